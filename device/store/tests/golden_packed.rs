//! Golden files of packed KV windows: as earlier versions stored them, which every later one must
//! read. `docs/format.md` says what is in them.
//!
//! In `golden-packed/`, `NAME.window` is a window's bytes, `NAME.stored` its blocks as they are
//! stored, index entry and bundle of each in turn, and `NAME.back` what comes back. No library has
//! a part in it, so that what is written today is the same, too.
//!
//! `cargo test -p lamina-store --test golden_packed -- --ignored` writes what is missing, and seeds
//! of the fuzz target `packed`; it never changes what is there.

use std::fs;
use std::path::{Path, PathBuf};

use lamina_codec::block::{Bundle, MAX_BUNDLE};
use lamina_codec::format::Format;
use lamina_codec::packkv::WindowPacker;
use lamina_store::entry::{ENTRY_BYTES, Entry, Place, Version};

struct Case {
    name: &'static str,
    format: Format,
    channels: u32,
    window: u32,
    packing: &'static str,
}

const CASES: [Case; 4] = [
    Case { name: "bf16", format: Format::Bf16, channels: 64, window: 64, packing: "packkv:0.1,greedy,8" },
    Case {
        name: "bf16-own-order",
        format: Format::Bf16,
        channels: 96,
        window: 64,
        packing: "packkv:0.05,none,4",
    },
    Case {
        name: "fp16-two-groups",
        format: Format::Fp16,
        channels: 32,
        window: 128,
        packing: "packkv:0.2,median,16",
    },
    Case {
        name: "fp16-coarse",
        format: Format::Fp16,
        channels: 32,
        window: 64,
        packing: "packkv:1,greedy,16",
    },
];

impl Case {
    fn packer(&self) -> WindowPacker {
        WindowPacker::new(self.format, self.channels, self.window, self.packing.parse().unwrap()).unwrap()
    }

    fn golden(&self, what: &str) -> PathBuf {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden-packed");
        folder.join(format!("{}.{what}", self.name))
    }

    /// Channels of different sizes; one token has a NaN, one only infinities, one a single value.
    fn window(&self) -> Vec<u8> {
        let mut state = 7_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        let (exponent, mantissa) = (self.format.exponent_bits(), self.format.mantissa_bits());
        let ones = ((1 << exponent) - 1) << mantissa;
        let mut out = Vec::new();
        for (token, channel) in
            (0..self.window).flat_map(|token| (0..self.channels).map(move |at| (token, at)))
        {
            let noise = next();
            let middle = (1 << exponent >> 1) + channel % 3;
            let lean = u32::from(channel % 3 != 0) ^ u32::from(noise % 13 == 0);
            let element = match (token, channel) {
                (5, 3) => ones | 1,
                (9, _) => ones | lean << (exponent + mantissa),
                (20, _) => middle << mantissa >> 1,
                _ => {
                    lean << (exponent + mantissa)
                        | (middle - (noise & noise >> 3 & 3)) << mantissa
                        | noise >> 1 & ((1 << mantissa) - 1)
                }
            };
            out.extend_from_slice(&element.to_le_bytes()[..2]);
        }
        out
    }

    fn stored(&self) -> Vec<u8> {
        let mut bundles: Vec<Bundle> = Vec::new();
        assert!(self.packer().encode_to(&self.window(), &mut bundles), "{}", self.name);
        let block = |bundle: &Bundle| {
            let place = bundle.stored.clone().map(|stored| Place::new(0x12_3456, stored));
            [&Entry { epoch: 0x34, place }.encode(Version::Two)[..], bundle.bytes()].concat()
        };
        bundles.iter().flat_map(block).collect()
    }

    /// The pieces of stored blocks, put together.
    fn pieces(&self, mut stored: &[u8]) -> Vec<u8> {
        let mut pieces = Vec::new();
        while let Some((entry, rest)) = stored.split_first_chunk::<ENTRY_BYTES>() {
            let place = Entry::decode(Version::Two, entry).unwrap().place.expect("a piece");
            assert!(place.lossy, "{}", self.name);
            let (piece, rest) = rest.split_at(place.stored.bytes());
            let mut bundle = [0xa5; MAX_BUNDLE];
            bundle[..piece.len()].copy_from_slice(piece);
            pieces.extend(place.stored.packed_piece(&bundle).unwrap().expect("a piece"));
            stored = rest;
        }
        pieces
    }

    fn back(&self, stored: &[u8]) -> Vec<u8> {
        let mut back = vec![0; self.window().len()];
        self.packer().decode(&self.pieces(stored), &mut back).unwrap();
        back
    }
}

#[test]
fn what_was_stored_is_read() {
    for case in &CASES {
        let stored = fs::read(case.golden("stored")).unwrap();
        assert!(case.back(&stored) == fs::read(case.golden("back")).unwrap(), "{}", case.name);
    }
}

#[test]
fn what_is_written_today_is_what_the_files_are_of() {
    for case in &CASES {
        assert!(case.window() == fs::read(case.golden("window")).unwrap(), "{}", case.name);
        assert!(case.stored() == fs::read(case.golden("stored")).unwrap(), "{}", case.name);
    }
}

#[test]
fn entries_of_pieces_are_damage_without_their_flag_and_in_version_1() {
    let stored = CASES[0].stored();
    let entry: [u8; ENTRY_BYTES] = *stored.first_chunk().unwrap();
    let mended = |mut entry: [u8; ENTRY_BYTES]| {
        entry[10..14].fill(0);
        let check = crc32c::crc32c(&entry);
        entry[10..14].copy_from_slice(&check.to_le_bytes());
        entry
    };
    assert!(Entry::decode(Version::Two, &mended(entry)).is_ok());
    let mut exact = entry;
    exact[9] &= !8;
    assert!(Entry::decode(Version::Two, &mended(exact)).is_err());
    let mut other = entry;
    other[9] = other[9] & !3 | 1;
    assert!(Entry::decode(Version::Two, &mended(other)).is_err(), "planes have no such codec");
    let place = Entry::decode(Version::Two, &entry).unwrap().place;
    let of_one = Entry { epoch: 3, place: place.map(|place| Place { lossy: false, ..place }) };
    assert!(Entry::decode(Version::One, &of_one.encode(Version::One)).is_err());
}

#[test]
#[ignore = "writes golden files that are missing"]
fn write_what_is_missing() {
    let write = |path: PathBuf, bytes: Vec<u8>| {
        fs::create_dir_all(path.parent().expect("a folder")).unwrap();
        if !path.exists() {
            fs::write(path, bytes).unwrap();
        }
    };
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/packed");
    for case in &CASES {
        let stored = case.stored();
        write(case.golden("window"), case.window());
        write(case.golden("back"), case.back(&stored));
        write(seeds.join(case.name), case.pieces(&stored));
        write(case.golden("stored"), stored);
    }
}
