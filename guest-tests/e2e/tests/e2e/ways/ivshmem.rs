//! Guests that see the device as shared memory of PCI devices: no CXL in them, and no serial port
//! for requests.

use lamina_run::judge::Judge;

use super::script::{model, reads_writes_and_asks, without_cxl};

/// What every script begins with: that there is nothing but the shared memory.
pub(crate) fn prologue() -> String {
    without_cxl(
        "[ \"$(grep -l 0x1110 /sys/bus/pci/devices/*/device | wc -l)\" = 3 ] || fail 'no shared memory'\n",
    )
}

#[test]
fn a_guest_without_cxl_reads_writes_and_flushes_through_the_doorbell() {
    let judge = Judge::new(&[model()]).unwrap();
    reads_writes_and_asks("ivshmem", &prologue(), "", &[], &judge);
}
