//! What a disk's driver is told: features, and the configuration space (virtio 1.2, 5.2.3 and
//! 5.2.4).

use super::disk::Disk;

/// Bytes of a sector, the unit of all virtio-blk addresses.
pub(super) const SECTOR: u64 = 512;
/// Queues a disk has; a guest uses as many as it has processors, if its machine is told so.
pub(super) const QUEUES: u16 = 8;
/// Entries a queue may have.
pub(crate) const QUEUE_SIZE: u16 = 1024;
/// Pieces of memory that a request's data may consist of: 1 MiB in pages, and what goes around it
/// still fits 258 entries.
const SEGMENTS: u32 = 256;
/// Ranges that one discard or write-zeroes may have.
pub(super) const DISCARD_RANGES: u32 = 16;
/// Sectors that each of them may have: 1 GiB.
pub(super) const DISCARD_SECTORS: u32 = 1 << 21;
/// Sectors of a page, the unit that is freed.
const PAGE_SECTORS: u32 = 8;
/// Bytes of the serial number.
pub(super) const SERIAL_BYTES: usize = 20;

const BLK_F_SEG_MAX: u64 = 1 << 2;
const BLK_F_RO: u64 = 1 << 5;
const BLK_F_BLK_SIZE: u64 = 1 << 6;
const BLK_F_FLUSH: u64 = 1 << 9;
const BLK_F_TOPOLOGY: u64 = 1 << 10;
const BLK_F_MQ: u64 = 1 << 12;
const BLK_F_DISCARD: u64 = 1 << 13;
const BLK_F_WRITE_ZEROES: u64 = 1 << 14;
const RING_F_INDIRECT_DESC: u64 = 1 << 28;
const RING_F_EVENT_IDX: u64 = 1 << 29;
const VHOST_USER_F_PROTOCOL_FEATURES: u64 = 1 << 30;
const F_VERSION_1: u64 = 1 << 32;

/// The features of a disk.
pub(super) fn features(read_only: bool) -> u64 {
    let kind = if read_only { BLK_F_RO } else { BLK_F_DISCARD | BLK_F_WRITE_ZEROES };
    kind | BLK_F_SEG_MAX
        | BLK_F_BLK_SIZE
        | BLK_F_FLUSH
        | BLK_F_TOPOLOGY
        | BLK_F_MQ
        | RING_F_INDIRECT_DESC
        | RING_F_EVENT_IDX
        | VHOST_USER_F_PROTOCOL_FEATURES
        | F_VERSION_1
}

/// The configuration space, `struct virtio_blk_config` of the standard.
pub(super) fn space(disk: &Disk) -> [u8; 96] {
    let mut space = [0; 96];
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &(disk.bytes() / SECTOR).to_le_bytes());
    put(12, &SEGMENTS.to_le_bytes());
    put(20, &512_u32.to_le_bytes());
    // Topology: a physical block is 2^3 logical ones, a page; fewer than that and more than 1 MiB
    // are no good.
    put(24, &[3]);
    put(26, &8_u16.to_le_bytes());
    put(28, &2048_u32.to_le_bytes());
    put(34, &QUEUES.to_le_bytes());
    if !disk.read_only() {
        put(36, &DISCARD_SECTORS.to_le_bytes());
        put(40, &DISCARD_RANGES.to_le_bytes());
        put(44, &PAGE_SECTORS.to_le_bytes());
        put(48, &DISCARD_SECTORS.to_le_bytes());
        put(52, &DISCARD_RANGES.to_le_bytes());
        put(56, &[1]); // zeroes free what they cover
    }
    space
}

/// A part of the configuration space; nothing if it passes the end.
pub(super) fn part(space: &[u8], offset: u32, size: u32) -> Vec<u8> {
    let range = usize::try_from(offset).ok().zip(usize::try_from(size).ok());
    let range = range.and_then(|(offset, size)| Some(offset..offset.checked_add(size)?));
    range.and_then(|range| space.get(range)).map(<[u8]>::to_vec).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_past_the_end_of_the_space_is_nothing() {
        let space = [7; 96];
        assert_eq!(part(&space, 90, 6), [7; 6]);
        for (offset, size) in [(90, 7), (96, 1), (u32::MAX, u32::MAX), (0, 97)] {
            assert!(part(&space, offset, size).is_empty(), "{offset} {size}");
        }
    }
}
