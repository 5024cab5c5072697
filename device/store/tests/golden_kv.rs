//! Golden files of KV windows: as earlier versions stored them, which every later one must read.
//! `docs/format.md` says what is in them.
//!
//! In `golden-kv/`, `NAME.window` is a window's bytes, `NAME.CODEC.stored` its blocks as they are
//! stored, index entry of version 1 and bundle of each in turn; in `golden-kv-v2/` the entries are
//! of version 2. How a window is coded may change; what was coded must be read.
//!
//! `cargo test -p lamina-store --test golden_kv -- --ignored` writes what is missing; it never
//! changes what is there.

use std::fs;
use std::path::{Path, PathBuf};

use lamina_codec::Codec;
use lamina_codec::block::{MAX_BUNDLE, Stored, StoredPlanes};
use lamina_codec::format::Format;
use lamina_codec::kv::{Coding, KvLayout, Preset, Shape, WindowDecoder};
use lamina_codec::plane::PlaneMask;
use lamina_codec::{BLOCK_BYTES, Decoder, Encoder};
use lamina_store::entry::{ENTRY_BYTES, Entry, Place, Version};

fn golden(file: &str) -> PathBuf {
    golden_of(Version::One, file)
}

/// A file of entries of this version.
fn golden_of(version: Version, file: &str) -> PathBuf {
    let folder = match version {
        Version::One => "tests/golden-kv",
        Version::Two => "tests/golden-kv-v2",
    };
    Path::new(env!("CARGO_MANIFEST_DIR")).join(folder).join(file)
}

const VERSIONS: [Version; 2] = [Version::One, Version::Two];

struct Case {
    name: &'static str,
    format: Format,
    layout: KvLayout,
    /// Blocks before the window in its tensor.
    before: u64,
    way: Coding,
}

impl Case {
    fn shape(&self) -> Shape {
        Shape::new(self.format, &self.layout).unwrap().unwrap()
    }

    /// Channels of different sizes, most of which lean to one sign; some rows repeat.
    fn window(&self) -> Vec<u8> {
        let shape = self.shape();
        let order = shape.order(self.before, shape.blocks());
        let mut state = 7_u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state >> 8
        };
        let mut out = Vec::new();
        for at in 0..order.elements {
            let (row, column) = ((order.first + at) / order.columns, (order.first + at) % order.columns);
            let noise = if row % 9 == 8 { 0x5a_5a5a } else { next() };
            let lean = u32::from(column % 3 != 0) ^ u32::from(noise % 13 == 0);
            let (exponent, mantissa) = (self.format.exponent_bits(), self.format.mantissa_bits());
            if exponent == 0 {
                // Integers, small ones of either sign.
                out.extend([
                    (noise % 7 * 3).to_le_bytes()[0].wrapping_sub(u8::try_from(column % 3 * 8).unwrap())
                ]);
                continue;
            }
            let middle = (1 << exponent >> 1) + u32::try_from(column % 3).unwrap();
            let element = lean << (exponent + mantissa)
                | (middle - (noise & noise >> 3 & 3)) << mantissa
                | noise >> 1 & ((1 << mantissa) - 1);
            out.extend_from_slice(&element.to_le_bytes()[..order.width]);
        }
        out
    }
}

fn cases() -> [Case; 5] {
    let rows = KvLayout::rows(32, 128);
    let padded = KvLayout { stride: Some(50), ..KvLayout::rows(45, 60) };
    let paged = KvLayout::preset(Preset::HndKv, 4, 16, 16, 32).unwrap();
    let case = |name, format, layout, before, way| Case { name, format, layout, before, way };
    [
        case("bf16", Format::Bf16, rows, 0, Coding::Deltas),
        case("bf16-channels", Format::Bf16, rows, 4, Coding::Channels),
        case("fp32-padded", Format::Fp32, padded, 3, Coding::Deltas),
        case("fp8-paged", Format::Fp8E4m3fn, paged, 0, Coding::Deltas),
        case("int8", Format::Int8, rows, 0, Coding::Channels),
    ]
}

#[test]
fn what_was_stored_is_read() {
    for case in cases() {
        let window = fs::read(golden(&format!("{}.window", case.name))).unwrap();
        let shape = case.shape();
        assert_eq!(window.len(), shape.blocks() * BLOCK_BYTES, "{}", case.name);
        for (version, codec) in VERSIONS.into_iter().flat_map(|of| Codec::ALL.map(|codec| (of, codec))) {
            let file = format!("{}.{codec}.stored", case.name);
            let stored = fs::read(golden_of(version, &file)).unwrap();
            let mut left = &stored[..];
            let all = PlaneMask::all(case.format);
            let mut out = Vec::new();
            let mut decoder = Decoder::new();
            let mut decoder =
                WindowDecoder::new(&mut decoder, &shape, case.before, shape.blocks(), all, &mut out);
            let mut with_header = 0;
            for block in 0..shape.blocks() {
                let (entry, rest) = left.split_first_chunk::<ENTRY_BYTES>().unwrap();
                left = rest;
                let Some(Place { stored, .. }) = Entry::decode(version, entry).unwrap().place else {
                    continue;
                };
                with_header += usize::from(stored.head_bytes() > 0);
                let mut bundle = [0xa5; MAX_BUNDLE];
                bundle[..stored.bytes()].copy_from_slice(&left[..stored.bytes()]);
                left = &left[stored.bytes()..];
                let wanted = decoder.wanted(&stored);
                assert_eq!(wanted, all, "{file}");
                decoder.add(block, &stored, wanted, &bundle).unwrap();
            }
            decoder.finish();
            assert!(out == window, "{file}");
            assert!(left.is_empty() && with_header > 0, "{file}");
        }
    }
}

#[test]
fn what_is_written_today_is_what_the_files_are_of() {
    for case in cases() {
        let window = fs::read(golden(&format!("{}.window", case.name))).unwrap();
        assert!(window == case.window(), "{}", case.name);
        for version in VERSIONS {
            let stored = stored(&case, version, Codec::Tree);
            let kept = fs::read(golden_of(version, &format!("{}.tree.stored", case.name))).unwrap();
            // What no library decides: that there is a head, and whether exponents are differences.
            let heads = |bytes: &[u8]| {
                let Some(Place { stored: Stored::Planes(StoredPlanes { head, .. }), .. }) =
                    Entry::decode(version, bytes.first_chunk().unwrap()).unwrap().place
                else {
                    panic!("{}: planes", case.name)
                };
                (head.length > 0, head.delta)
            };
            assert_eq!(heads(&stored), heads(&kept), "{}", case.name);
            assert_eq!(heads(&kept), (true, case.way == Coding::Deltas), "{}", case.name);
        }
    }
}

fn stored(case: &Case, version: Version, codec: Codec) -> Vec<u8> {
    let mut bundles = Vec::new();
    let (shape, window) = (case.shape(), case.window());
    let coded = Encoder::new().window(&shape, case.before, codec, &window, Some(case.way), &mut bundles);
    assert_eq!(coded.coding, case.way, "{}", case.name);
    bundles
        .iter()
        .flat_map(|bundle| {
            let placed = |stored| Place { segment: 0x12_3456, stored, lossy: false, difference: false };
            let entry = Entry { epoch: 0x1234, place: bundle.stored.clone().map(placed) };
            [&entry.encode(version)[..], bundle.bytes()].concat()
        })
        .collect()
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
    for case in cases() {
        write(golden(&format!("{}.window", case.name)), case.window());
        for (version, codec) in VERSIONS.into_iter().flat_map(|of| Codec::ALL.map(|codec| (of, codec))) {
            let path = golden_of(version, &format!("{}.{codec}.stored", case.name));
            write(path, stored(&case, version, codec));
        }
    }
}
