# What the guest bob of guests.toml runs: it lists its disks, and the views that the partitions of
# one of them show.
cat /proc/partitions
grep -h PARTNAME /sys/block/vd*/vd*/uevent
