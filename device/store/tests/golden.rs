//! Golden files: blocks as earlier versions stored them, which every later one must read.
//! `docs/format.md` says what is in them.
//!
//! In `golden/`, `NAME.words` is a block's 4096 bytes, `NAME.CODEC.stored` its index entry of
//! version 1 and its bundle; in `golden-v2/` are those of version 2. What lz4 and zstd give for the
//! same input may change with their libraries, and which code a plane tree chooses with its
//! encoder, so of coded bytes only reading is promised; everything else that is written today must
//! be what was written then.
//!
//! `cargo test -p lamina-store --test golden -- --ignored` writes what is missing, the fuzz
//! targets' seeds among it; it never changes what is there.

use std::fs;
use std::path::{Path, PathBuf};

use lamina_codec::Codec;
use lamina_codec::block::{Bundle, MAX_BUNDLE, Stored};
use lamina_codec::format::Format;
use lamina_codec::plane::PlaneMask;
use lamina_codec::{BLOCK_BYTES, BlockWords, Decoder, Encoder};
use lamina_store::entry::{ENTRY_BYTES, Entry, Place, Version};

/// The cases that a version's entries can hold.
fn cases_of(version: Version) -> impl Iterator<Item = (&'static str, Format, BlockWords)> {
    cases().into_iter().filter(move |(_, format, _)| version.holds(*format))
}

/// A version, where its files are, the segment that all entries name, and their epoch.
struct Files {
    version: Version,
    folder: &'static str,
    segment: u64,
    epoch: u16,
}

const FILES: [Files; 2] = [
    Files { version: Version::One, folder: "tests/golden", segment: 0x12_3456_789a, epoch: 0x1234 },
    Files { version: Version::Two, folder: "tests/golden-v2", segment: 0xa_9876_5432, epoch: 0x12 },
];

impl Files {
    fn stored(&self, name: &str, codec: Codec) -> PathBuf {
        folder(self.folder).join(format!("{name}.{codec}.stored"))
    }

    /// The entry and the bundle that today's program stores.
    fn encoded(&self, format: Format, codec: Codec, words: &BlockWords) -> Vec<u8> {
        let mut bundle = Bundle::new();
        Encoder::new().block(format, codec, words, &mut bundle);
        let placed = |stored| Place { segment: self.segment, stored, lossy: false, difference: false };
        let entry = Entry { epoch: self.epoch, place: bundle.stored.clone().map(placed) };
        [&entry.encode(self.version)[..], bundle.bytes()].concat()
    }

    fn split(&self, stored: &[u8]) -> (Entry, [u8; MAX_BUNDLE]) {
        let (entry, bytes) = stored.split_first_chunk::<ENTRY_BYTES>().expect("an entry");
        let entry = Entry::decode(self.version, entry).unwrap();
        assert_eq!(entry.place.as_ref().map_or(0, |place| place.stored.bytes()), bytes.len());
        let mut bundle = [0xa5; MAX_BUNDLE];
        bundle[..bytes.len()].copy_from_slice(bytes);
        (entry, bundle)
    }
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn golden(file: &str) -> PathBuf {
    folder("tests/golden").join(file)
}

/// Even numbers from 0 to 1.
fn uniform(seed: u32) -> impl FnMut() -> f32 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from(u16::from_le_bytes([state.to_le_bytes()[2], state.to_le_bytes()[3]])) / 65536.0
    }
}

/// The blocks: a name, the format, the words. Between them every way of storing a plane occurs.
fn cases() -> Vec<(&'static str, Format, BlockWords)> {
    let mut next = uniform(1);
    // As weights are: a bell of small values. Not one of them zero, so that some exponent planes
    // are all ones.
    let mut weight = || {
        let value = (next() + next() + next() + next() - 2.0) * 0.12;
        if value.abs() < 0.005 { 0.005 } else { value }
    };
    let mut block = |element: &mut dyn FnMut(f32) -> Vec<u8>| -> BlockWords {
        let mut bytes = Vec::new();
        while bytes.len() < BLOCK_BYTES {
            bytes.extend(element(weight()));
        }
        bytes.try_into().expect("elements fill a block")
    };
    let fp16 = |value: f32| {
        // Normal values only, rounded towards zero.
        let bits = value.to_bits();
        let [low, high, ..] =
            ((bits >> 16 & 0x8000) | ((bits & 0x7fff_ffff) - (112 << 23)) >> 13).to_le_bytes();
        vec![low, high]
    };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 31")]
    let fp6 = |value: f32| (value.abs() * 120.0).min(31.0) as u8 | if value < 0.0 { 0x20 } else { 0 };
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "114 to 126")]
    let exponent = |value: f32| value.mul_add(25.0, 120.0) as u8;
    let byte_of = |value: u16| value.to_be_bytes()[0];
    #[expect(clippy::cast_possible_truncation, reason = "−38 to 38 and −7 to 7")]
    let (int8, int4) = (|value: f32| (value * 160.0) as i8, |value: f32| (value * 32.0) as i8);
    let (mut held, mut small) = (None, None);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut noisy = || -> BlockWords {
        std::array::from_fn(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()[5]
        })
    };
    let text = b"Blocks of bytes that nobody gave a format are kept as words. ";
    vec![
        ("zeros", Format::Bf16, [0; BLOCK_BYTES]),
        ("opaque", Format::Opaque, std::array::from_fn(|at| text[at % text.len()])),
        ("opaque-noise", Format::Opaque, noisy()),
        ("bf16-noise", Format::Bf16, noisy()),
        ("fp32-noise", Format::Fp32, noisy()),
        ("fp32", Format::Fp32, block(&mut |value| value.to_le_bytes().to_vec())),
        ("fp16", Format::Fp16, block(&mut |value| fp16(value))),
        ("bf16", Format::Bf16, block(&mut |value| value.to_le_bytes()[2..].to_vec())),
        (
            "fp8_e4m3fn",
            Format::Fp8E4m3fn,
            block(&mut |value| {
                // A bf16 less its lower bits: 1-4-3 with the bias moved.
                let [.., low, high] = (value * 16.0).to_le_bytes();
                let magnitude = (u16::from_le_bytes([low, high]) & 0x7fff) >> 4;
                let [code, _] = (magnitude.saturating_sub(120 << 3)).to_le_bytes();
                vec![code.min(0x7e) | high & 0x80]
            }),
        ),
        (
            "fp8_e5m2",
            Format::Fp8E5m2,
            block(&mut |value| vec![byte_of(u16::from_le_bytes(fp16(value).try_into().unwrap()))]),
        ),
        ("int8", Format::Int8, block(&mut |value| vec![int8(value).cast_unsigned()])),
        (
            "int4",
            Format::Int4,
            block(&mut |value| {
                let nibble = int4(value).cast_unsigned() & 15;
                match held.take() {
                    None => {
                        held = Some(nibble);
                        Vec::new()
                    }
                    Some(low) => vec![nibble << 4 | low],
                }
            }),
        ),
        (
            "fp4_e2m1",
            Format::Fp4E2m1,
            block(&mut |value| {
                // Mostly the subnormal, so that the exponents are worth a plane tree.
                let nibble = fp6(value * 0.7) >> 2 & 7 | if value < 0.0 { 8 } else { 0 };
                match small.take() {
                    None => {
                        small = Some(nibble);
                        Vec::new()
                    }
                    Some(low) => vec![nibble << 4 | low],
                }
            }),
        ),
        ("fp6_e3m2", Format::Fp6E3m2, block(&mut |value| vec![fp6(value)])),
        ("fp6_e2m3", Format::Fp6E2m3, block(&mut |value| vec![fp6(value * 0.5)])),
        (
            "e8m0",
            Format::E8m0,
            // As the scales of weights are: a few neighbours.
            block(&mut |value| vec![exponent(value)]),
        ),
    ]
}

#[test]
fn what_was_stored_is_read() {
    for files in &FILES {
        let mut read = 0;
        for (name, ..) in cases_of(files.version) {
            let words = fs::read(golden(&format!("{name}.words"))).unwrap();
            for codec in Codec::ALL {
                let path = files.stored(name, codec);
                let shown = path.display();
                let (entry, bundle) = files.split(&fs::read(&path).unwrap());
                assert_eq!(entry.epoch, files.epoch, "{shown}");
                let mut back = [0; BLOCK_BYTES];
                if let Some(Place { segment, stored, lossy: false, difference: false }) = &entry.place {
                    assert_eq!(*segment, files.segment, "{shown}");
                    Decoder::new()
                        .block(stored, PlaneMask(u32::MAX), &bundle, &mut back)
                        .unwrap_or_else(|why| panic!("{shown}: {why}"));
                }
                assert!(back[..] == words[..], "{shown}");
                read += 1;
            }
        }
        let all = fs::read_dir(folder(files.folder)).unwrap().map(|file| file.unwrap().path());
        let stored = all.filter(|path| path.extension().is_some_and(|extension| extension == "stored"));
        assert_eq!(stored.count(), read, "{}: a file that is no case's", files.folder);
    }
}

#[test]
fn every_format_and_codec_has_its_files() {
    for (name, format, words) in cases() {
        assert!(fs::read(golden(&format!("{name}.words"))).unwrap() == words, "{name}: the case has changed");
        let files = FILES.iter().filter(|files| files.version.holds(format));
        for (files, codec) in files.flat_map(|files| Codec::ALL.map(|codec| (files, codec))) {
            let path = files.stored(name, codec);
            assert!(path.exists(), "{} is missing: write it as this file's head says", path.display());
        }
    }
}

#[test]
fn what_is_stored_today_is_what_was_stored() {
    for (name, format, words) in cases() {
        let files = FILES.iter().filter(|files| files.version.holds(format));
        for (files, codec) in files.flat_map(|files| Codec::ALL.map(|codec| (files, codec))) {
            let then = fs::read(files.stored(name, codec)).unwrap();
            let now = files.encoded(format, codec, &words);
            if name.contains("noise") || name == "zeros" {
                assert!(now == then, "{name} {codec}");
                continue;
            }
            // A library's bytes may differ, and an encoder may choose better; format, codec and
            // plain planes stay.
            let [then, now] =
                [then, now].map(|stored| files.split(&stored).0.place.expect("no zeros").stored);
            match (then, now) {
                (Stored::Planes(then), Stored::Planes(now)) => {
                    assert_eq!((then.format, then.codec), (now.format, now.codec), "{name} {codec}");
                    assert_eq!(then.lengths.map(|l| l == 0), now.lengths.map(|l| l == 0), "{name} {codec}");
                }
                (then, now) => {
                    assert_eq!(std::mem::discriminant(&then), std::mem::discriminant(&now), "{name} {codec}");
                }
            }
        }
    }
}

/// Writes a file that is not there yet.
fn write(path: &Path, bytes: &[u8]) {
    fs::create_dir_all(path.parent().expect("a folder")).unwrap();
    if !path.exists() {
        fs::write(path, bytes).unwrap();
    }
}

#[test]
#[ignore = "writes missing golden files and seeds"]
fn write_what_is_missing() {
    let seeds = folder("../../fuzz/seeds");
    for (format, (name, _, words)) in (0_u8..).zip(cases()) {
        write(&golden(&format!("{name}.words")), &words);
        for (codec, number) in Codec::ALL.into_iter().zip(0_u8..) {
            let of = cases()[usize::from(format)].1;
            let versions = [(&FILES[0], 3, ""), (&FILES[1], 7, ".v2")];
            for (files, flags, suffix) in versions.into_iter().filter(|(files, ..)| files.version.holds(of)) {
                let stored = files.encoded(of, codec, &words);
                write(&files.stored(name, codec), &stored);
                let seed = [&[flags, 0xff, 0xff, 0xff, 0xff], &stored[..]].concat();
                write(&seeds.join("stored").join(format!("{name}.{codec}{suffix}")), &seed);
            }
            let head = [cases()[usize::from(format)].1 as u8, number, 0, 0x00, 0xf0, 0x0f, 0xff];
            let seed = [&head, &words[..256]].concat();
            write(&seeds.join("round_trip").join(format!("{name}.{codec}")), &seed);
        }
    }
    let headers = [
        ("empty", 1, "{}"),
        ("one", 1 | 12 << 1, r#"{"a":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}}"#),
        (
            "two",
            1 | 16 << 1,
            r#"{"b":{"dtype":"F8_E4M3","shape":[4],"data_offsets":[12,16]},"__metadata__":{"x":"y"},"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}"#,
        ),
        ("none", 1, r#"{"a":{"dtype":"I8","shape":[0,7],"data_offsets":[0,0]}}"#),
        (
            "scaled",
            1 | 17 << 1,
            r#"{"a_blocks":{"dtype":"U8","shape":[1,16],"data_offsets":[0,16]},"a_scales":{"dtype":"U8","shape":[1],"data_offsets":[16,17]}}"#,
        ),
        (
            "scaled-odd",
            1 | 27 << 1,
            r#"{"a.weight":{"dtype":"U8","shape":[1,8],"data_offsets":[0,8]},"a.weight_scale":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[8,10]},"a.weight_scale_2":{"dtype":"F32","shape":[],"data_offsets":[10,14]},"b.qweight":{"dtype":"I32","shape":[1,1],"data_offsets":[14,18]},"b_scales":{"dtype":"U8","shape":[9],"data_offsets":[18,27]}}"#,
        ),
        ("hole", 1 | 9 << 1, r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[5,9]}}"#),
        (
            "huge",
            1,
            r#"{"a":{"dtype":"F64","shape":[4294967295,4294967295,9],"data_offsets":[0,18446744073709551615]}}"#,
        ),
        ("raw", 0, "\u{2}\0\0\0\0\0\0\0{}"),
    ];
    for (name, flags, text) in headers {
        write(&seeds.join("header").join(name), &[&[flags], text.as_bytes()].concat());
    }
}
