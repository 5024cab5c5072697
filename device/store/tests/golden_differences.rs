//! Golden files of differences: blocks as an earlier version stored them against the same block of
//! another tensor. `docs/format.md` says what is in them.
//!
//! The other block is `golden/NAME.words`. The block itself is that with the lowest bit of every
//! 101st byte flipped, or the same to the bit (`NAME.equal`). `golden-differences/NAME.stored` is
//! the entry of version 2 and the bundle, which every later version must read.
//!
//! `cargo test -p lamina-store --test golden_differences -- --ignored` writes what is missing; it
//! never changes what is there.

use std::fs;
use std::path::{Path, PathBuf};

use lamina_codec::block::{Bundle, MAX_BUNDLE};
use lamina_codec::format::Format;
use lamina_codec::plane::PlaneMask;
use lamina_codec::{BLOCK_BYTES, BlockWords, Codec, Decoder, Encoder};
use lamina_store::entry::{Damaged, ENTRY_BYTES, Entry, Place, Version};

const CASES: [(&str, Format); 6] = [
    ("bf16", Format::Bf16),
    ("fp32", Format::Fp32),
    ("int8", Format::Int8),
    ("int4", Format::Int4),
    ("fp4_e2m1", Format::Fp4E2m1),
    ("opaque-noise", Format::Opaque),
];
const SEGMENT: u64 = 0xa_9876_5432;
const EPOCH: u16 = 0x12;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

fn base(name: &str) -> BlockWords {
    fs::read(folder("golden").join(format!("{name}.words"))).unwrap().try_into().unwrap()
}

/// Names of files, with the case and whether the block is its base's.
fn files() -> impl Iterator<Item = (PathBuf, &'static str, Format, bool)> {
    CASES.into_iter().flat_map(|(name, format)| {
        [false, true].map(|equal| {
            let suffix = if equal { ".equal" } else { "" };
            (folder("golden-differences").join(format!("{name}{suffix}.stored")), name, format, equal)
        })
    })
}

fn difference(equal: bool) -> BlockWords {
    std::array::from_fn(|at| u8::from(!equal && at % 101 == 0))
}

fn encoded(format: Format, equal: bool) -> Vec<u8> {
    let mut bundle = Bundle::new();
    Encoder::new().difference(format, Codec::Tree, &difference(equal), &mut bundle);
    let placed = |stored| Place { segment: SEGMENT, stored, lossy: false, difference: bundle.difference };
    let entry = Entry { epoch: EPOCH, place: bundle.stored.clone().map(placed) };
    [&entry.encode(Version::Two)[..], bundle.bytes()].concat()
}

#[test]
fn what_was_stored_is_read_against_the_other_block() {
    for (path, name, format, equal) in files() {
        let shown = path.display();
        let stored = fs::read(&path).unwrap_or_else(|why| panic!("{shown}: {why}"));
        let (entry, bytes) = stored.split_first_chunk::<ENTRY_BYTES>().expect("an entry");
        let Entry {
            epoch: EPOCH,
            place: Some(Place { segment: SEGMENT, stored, lossy: false, difference: true }),
        } = Entry::decode(Version::Two, entry).unwrap()
        else {
            panic!("{shown}: another entry")
        };
        assert_eq!(bytes.len(), stored.bytes(), "{shown}");
        assert!(!equal || format == Format::Opaque || bytes.is_empty(), "{shown}: it takes bytes");
        let mut bundle = [0xa5; MAX_BUNDLE];
        bundle[..bytes.len()].copy_from_slice(bytes);
        let mut words = [0; BLOCK_BYTES];
        Decoder::new().block(&stored, PlaneMask(u32::MAX), &bundle, &mut words).unwrap();
        let base = base(name);
        let flip = difference(equal);
        for at in 0..BLOCK_BYTES {
            assert_eq!(words[at] ^ base[at], base[at] ^ flip[at], "{shown}: byte {at}");
        }
    }
}

/// The bits that say it, by their places: a program of before takes them for damage.
#[test]
fn the_flag_is_a_bit_that_was_reserved() {
    for (path, ..) in files() {
        let stored = fs::read(&path).unwrap();
        let mut entry: [u8; ENTRY_BYTES] = stored[..ENTRY_BYTES].try_into().unwrap();
        assert_eq!(entry[9] >> 4, 1, "{}", path.display());
        entry[9] |= 0x20;
        entry[10..14].fill(0);
        let check = crc32c::crc32c(&entry);
        entry[10..14].copy_from_slice(&check.to_le_bytes());
        let told = Entry::decode(Version::Two, &entry);
        assert_eq!(told, Err(Damaged::Field { field: "reserved bits", value: 1 }));
    }
}

#[test]
#[ignore = "writes missing golden files"]
fn write_what_is_missing() {
    for (path, _, format, equal) in files() {
        fs::create_dir_all(path.parent().expect("a folder")).unwrap();
        if !path.exists() {
            fs::write(&path, encoded(format, equal)).unwrap();
        }
    }
}
