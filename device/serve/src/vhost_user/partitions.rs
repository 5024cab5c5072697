//! The partition table (GPT, UEFI 2.10 chapter 5) of the views disk: a partition for the directory,
//! and one for each view.
//!
//! The disk is the views window with 2 MiB before and behind it. The table lies in those, is
//! computed from the device's views when it is read, and cannot be written. So a guest's kernel
//! makes a block device of every view, from offset 0 on, without a driver of ours; after a view
//! came or went, the guest reads the table anew (`blockdev --rereadpt`). Linux takes 255
//! partitions; views behind the 254th have none and are still on the disk, at their offset in the
//! views window plus 2 MiB.
//!
//! * Partition 1 is the directory. Partition n + 2 is the n-th view by offset.
//! * A partition's name is `tensor:view`, or its last 36 characters. Its unique number is made of
//!   its place and name: it stays the same from run to run.
//! * Partitions are as long as their view, rounded up to 4 KiB; what is behind the view's end reads
//!   as zeros.

use lamina_device::window::ViewInfo;

use super::config::SECTOR;
use crate::disks::Partition;

/// Bytes before and behind the window.
pub(super) const MARGIN: u64 = 2 << 20;
/// Bytes of the directory's partition.
const DIRECTORY: u64 = lamina_abi::DIRECTORY_BYTES;
/// Entries of the table.
const ENTRIES: usize = 256;
/// Partitions that Linux makes devices of.
const MAX_PARTITIONS: usize = 255;
const ENTRY_BYTES: usize = 128;
const SECTOR_BYTES: usize = 512;
/// Sectors that the entries take.
const ENTRY_SECTORS: u64 = (ENTRIES * ENTRY_BYTES / SECTOR_BYTES) as u64;
/// The type of a partition with a view: no file system, so nothing looks for one by it. "Lamina",
/// then a random number.
const TYPE: [u8; 16] = *b"Lamina\x4d\x8f\xb1\x07\x2e\x93\xd4\x5a\x61\xc8";
/// Read-only, not to be mounted by itself.
const ATTRIBUTES: u64 = 1 << 60 | 1 << 63;

/// The partitions of a views window with these views, which are in order of offset.
pub(super) fn partitions(views: Vec<ViewInfo>) -> Vec<Partition> {
    let directory = Partition {
        number: 1,
        name: "lamina-directory".to_owned(),
        tensor: String::new(),
        view: String::new(),
        offset: MARGIN,
        length: DIRECTORY,
    };
    let shown = views.into_iter().filter(|view| view.length > 0).enumerate().map(|(n, view)| Partition {
        number: n + 2,
        name: name(&format!("{}:{}", view.tensor, view.view)),
        tensor: view.tensor,
        view: view.view,
        offset: MARGIN + view.offset,
        length: view.length,
    });
    std::iter::once(directory).chain(shown).take(MAX_PARTITIONS).collect()
}

/// The last characters of a name that fit into a table.
fn name(whole: &str) -> String {
    let mut units = 0;
    let fits = |c: &char| {
        units += c.len_utf16();
        units <= 36
    };
    let last: Vec<char> = whole.chars().rev().take_while(fits).collect();
    last.into_iter().rev().collect()
}

/// The table of a disk of `bytes` bytes: its first [`MARGIN`] and its last.
pub(super) fn table(partitions: &[Partition], bytes: u64) -> (Vec<u8>, Vec<u8>) {
    let margin = usize::try_from(MARGIN).expect("2 MiB");
    let (mut first, mut last) = (vec![0; margin], vec![0; margin]);
    let sectors = bytes / SECTOR;
    let entries: Vec<u8> = partitions.iter().flat_map(entry).collect();
    let mut all = vec![0; ENTRIES * ENTRY_BYTES];
    all[..entries.len()].copy_from_slice(&entries);

    first[..SECTOR_BYTES].copy_from_slice(&protective(sectors));
    first[SECTOR_BYTES..2 * SECTOR_BYTES].copy_from_slice(&header(1, sectors - 1, 2, sectors, &all));
    first[2 * SECTOR_BYTES..2 * SECTOR_BYTES + all.len()].copy_from_slice(&all);
    let backup = sectors - 1 - ENTRY_SECTORS;
    let (space, end) = last.split_at_mut(margin - SECTOR_BYTES);
    end.copy_from_slice(&header(sectors - 1, 1, backup, sectors, &all));
    let from = space.len() - all.len();
    space[from..].copy_from_slice(&all);
    (first, last)
}

/// A header at sector `here`, whose twin is at `other` and whose entries are at `entries`.
fn header(here: u64, other: u64, entries: u64, sectors: u64, all: &[u8]) -> [u8; SECTOR_BYTES] {
    let mut header = [0; SECTOR_BYTES];
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"EFI PART");
    put(8, &0x0001_0000_u32.to_le_bytes());
    put(12, &92_u32.to_le_bytes());
    put(24, &here.to_le_bytes());
    put(32, &other.to_le_bytes());
    put(40, &(MARGIN / SECTOR).to_le_bytes());
    put(48, &(sectors - MARGIN / SECTOR - 1).to_le_bytes());
    put(56, &unique("lamina-views", sectors));
    put(72, &entries.to_le_bytes());
    put(80, &u32::try_from(ENTRIES).expect("256").to_le_bytes());
    put(84, &u32::try_from(ENTRY_BYTES).expect("128").to_le_bytes());
    put(88, &crc32(all).to_le_bytes());
    let sum = crc32(&header[..92]);
    header[16..20].copy_from_slice(&sum.to_le_bytes());
    header
}

fn entry(partition: &Partition) -> [u8; ENTRY_BYTES] {
    let mut entry = [0; ENTRY_BYTES];
    let first = partition.offset / SECTOR;
    let last = first + partition.length.next_multiple_of(4096) / SECTOR - 1;
    entry[..16].copy_from_slice(&TYPE);
    let full = format!("{}:{}", partition.tensor, partition.view);
    entry[16..32].copy_from_slice(&unique(&full, partition.offset));
    entry[32..40].copy_from_slice(&first.to_le_bytes());
    entry[40..48].copy_from_slice(&last.to_le_bytes());
    entry[48..56].copy_from_slice(&ATTRIBUTES.to_le_bytes());
    for (unit, place) in partition.name.encode_utf16().zip(entry[56..].chunks_exact_mut(2)) {
        place.copy_from_slice(&unit.to_le_bytes());
    }
    entry
}

/// A master boot record that says that the whole disk is in use.
fn protective(sectors: u64) -> [u8; SECTOR_BYTES] {
    let mut record = [0; SECTOR_BYTES];
    // The one entry: first sector by cylinder, head and sector 0/0/2, type EE, last 255/255/255;
    // then both by number.
    record[446..454].copy_from_slice(&[0, 0, 2, 0, 0xee, 0xff, 0xff, 0xff]);
    record[454..458].copy_from_slice(&1_u32.to_le_bytes());
    record[458..462].copy_from_slice(&u32::try_from(sectors - 1).unwrap_or(u32::MAX).to_le_bytes());
    record[510..].copy_from_slice(&[0x55, 0xaa]);
    record
}

/// A number that is the same for the same text and place (a UUID of version 8).
fn unique(text: &str, place: u64) -> [u8; 16] {
    let mut number = [0; 16];
    for (n, part) in (0_u32..).zip(number.chunks_exact_mut(4)) {
        let seeded = crc32c::crc32c_append(n.wrapping_mul(0x9e37_79b9), &place.to_le_bytes());
        part.copy_from_slice(&crc32c::crc32c_append(seeded, text.as_bytes()).to_le_bytes());
    }
    number[7] = number[7] & 0x0f | 0x80;
    number[8] = number[8] & 0x3f | 0x80;
    number
}

/// The CRC-32 that GPT uses (that of Ethernet, not the one in the store).
fn crc32(bytes: &[u8]) -> u32 {
    let bit = |sum: u32| if sum & 1 == 1 { sum >> 1 ^ 0xedb8_8320 } else { sum >> 1 };
    !bytes.iter().fold(u32::MAX, |sum, &byte| (0..8).fold(sum ^ u32::from(byte), |sum, _| bit(sum)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(tensor: &str, spelling: &str, offset: u64, length: u64) -> ViewInfo {
        ViewInfo {
            tensor: tensor.to_owned(),
            view: spelling.to_owned(),
            offset,
            length,
            elements: length / 2,
            bits: 16,
            scale_exp: 0,
            planes: 16,
        }
    }

    #[test]
    fn the_sum_is_the_well_known_one() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn views_become_partitions_with_names_that_fit() {
        let long = "model.layers.0.self_attn.q_proj.weight";
        let views = vec![
            view("t", "e8m3", 2 << 20, 70_001),
            view("empty", "full", 4 << 20, 0),
            view(long, "full", 4 << 20, 4096),
        ];
        let found = partitions(views);
        assert_eq!(found.iter().map(|p| p.number).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(found[1].name, "t:e8m3");
        assert_eq!(found[2].name, "ayers.0.self_attn.q_proj.weight:full");
        assert_eq!(found[2].name.encode_utf16().count(), 36);
        assert_eq!(found[1].offset, 4 << 20);
        assert_eq!(name("𝕏".repeat(40).as_str()).encode_utf16().count(), 36);
    }

    #[test]
    fn the_table_and_its_copy_agree_and_their_sums_are_right() {
        let found = partitions(vec![view("t", "e8m3", 2 << 20, 70_001)]);
        let bytes = (64 << 20) + 2 * MARGIN;
        let (first, last) = table(&found, bytes);
        assert_eq!(first[510..512], [0x55, 0xaa]);
        let (head, twin) = (&first[512..1024], &last[last.len() - 512..]);
        for header in [head, twin] {
            assert_eq!(header[..8], *b"EFI PART");
            let mut bare = header[..92].to_vec();
            bare[16..20].fill(0);
            assert_eq!(header[16..20], crc32(&bare).to_le_bytes());
        }
        let number = |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!((number(head, 24), number(head, 32)), (number(twin, 32), number(twin, 24)));
        assert_eq!(number(head, 32), bytes / 512 - 1);
        let entries = &first[1024..1024 + 256 * 128];
        assert_eq!(entries, &last[last.len() - 512 - entries.len()..last.len() - 512]);
        assert_eq!(head[88..92], crc32(entries).to_le_bytes());
        // The second entry: the view, from its place to the end of its last page.
        assert_eq!(number(entries, 128 + 32), (4 << 20) / 512);
        assert_eq!(number(entries, 128 + 40), (4 << 20) / 512 + 18 * 8 - 1);
    }

    #[test]
    fn views_behind_the_last_partition_that_linux_makes_are_left_out() {
        let views = (0..400).map(|n| view("t", "full", (n + 1) << 21, 4096)).collect();
        let found = partitions(views);
        assert_eq!(found.len(), MAX_PARTITIONS);
        assert_eq!(table(&found, (401 << 21) + 2 * MARGIN).0.len(), 2 << 20);
    }
}
