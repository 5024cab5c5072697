#!/bin/sh
# Makes a CXL region of each memory device and brings it up as devdax: the windows are memory to the
# guest.
set -e
cxl=/sys/bus/cxl/devices
echo "report: $(cat /proc/version)" >/dev/virtio-ports/org.lamina.report
exec 3<>/dev/virtio-ports/org.lamina.ctl
echo '{"ask":1}' >&3
read -r answer <&3
echo "control: $answer"
for serial in 0x4c616d696e610000 0x4c616d696e610001; do
    mem=
    for candidate in "$cxl"/mem*; do
        if [ "$(cat "$candidate/serial")" = "$serial" ]; then mem=$candidate; fi
    done
    echo "serial $serial bytes $(($(cat "$mem/ram/size")))"
    for endpoint in "$cxl"/endpoint*; do
        if [ "$(readlink -f "$endpoint/uport")" = "$(readlink -f "$mem")" ]; then decoder=decoder${endpoint##*endpoint}.0; fi
    done
    region=$(cat "$cxl/decoder0.0/create_ram_region")
    echo "$region" >"$cxl/decoder0.0/create_ram_region"
    echo 256 >"$cxl/$region/interleave_granularity"
    echo 1 >"$cxl/$region/interleave_ways"
    cat "$mem/ram/size" >"$cxl/$region/size"
    echo ram >"$cxl/$decoder/mode"
    cat "$mem/ram/size" >"$cxl/$decoder/dpa_size"
    echo "$decoder" >"$cxl/$region/target0"
    echo 1 >"$cxl/$region/commit"
    echo "$region" >/sys/bus/cxl/drivers/cxl_region/bind
    dax=dax${region#region}.0
    echo "$dax" >/sys/bus/dax/drivers/device_dax/new_id
    while [ ! -e "/dev/$dax" ]; do sleep 0.01; done
done
read -r up _ </proc/uptime
echo "dax devices after $up s"
/bin/poke /dev/dax0.0 0 8192 "stored in base by the guest"
/bin/poke /dev/dax1.0 0 12288 "stored in views by the guest"
echo "stored"
sleep 2
exit 7
