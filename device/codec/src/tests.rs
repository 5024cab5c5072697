//! Round trips of every format and codec, and damage to stored bytes.

use proptest::prelude::*;

use super::{
    block::{BlockError, Bundle, MAX_BUNDLE, Stored, StoredPlane},
    *,
};
use crate::{BLOCK_BYTES, format::Format, plane::PlaneMask, testing::words};

fn format() -> impl Strategy<Value = Format> {
    prop::sample::select(Format::ALL.to_vec())
}

fn codec() -> impl Strategy<Value = Codec> {
    prop::sample::select(Codec::ALL.to_vec())
}

/// The bundle's bytes at the places of `mask`'s runs, noise elsewhere.
fn fetched(stored: &Stored, mask: PlaneMask, bytes: &[u8]) -> Box<[u8; MAX_BUNDLE]> {
    let mut bundle = Box::new([0xa5; MAX_BUNDLE]);
    stored.runs(mask, |run| bundle[run.clone()].copy_from_slice(&bytes[run]));
    bundle
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_block_comes_back(format in format(), codec in codec(), words in words(), by_words in any::<bool>()) {
        let (mut encoder, mut bundle) = (Encoder::new(), Bundle::new());
        if by_words {
            encoder.words(codec, &words, &mut bundle);
        } else {
            encoder.block(format, codec, &words, &mut bundle);
        }
        let mut back = [0; BLOCK_BYTES];
        if let Some(stored) = &bundle.stored {
            prop_assert_eq!(stored.bytes(), bundle.bytes().len());
            let all = PlaneMask::all(format);
            Decoder::new().block(stored, all, &fetched(stored, all, bundle.bytes()), &mut back).unwrap();
        }
        prop_assert_eq!(&back[..], &words[..]);
    }

    #[test]
    fn bundles_depend_on_their_blocks_alone(
        blocks in prop::collection::vec((format(), codec(), words(), any::<bool>()), 2..12),
    ) {
        let code = |encoder: &mut Encoder, (format, codec, words, by_words): &(Format, Codec, Box<BlockWords>, bool)| {
            let mut bundle = Bundle::new();
            match by_words {
                true => encoder.words(*codec, words, &mut bundle),
                false => encoder.block(*format, *codec, words, &mut bundle),
            }
            (bundle.stored.clone(), bundle.bytes().to_vec())
        };
        let alone: Vec<_> = blocks.iter().map(|block| code(&mut Encoder::new(), block)).collect();
        let mut encoder = Encoder::new();
        let in_order: Vec<_> = blocks.iter().map(|block| code(&mut encoder, block)).collect();
        prop_assert!(in_order == alone);
        let mut in_reverse: Vec<_> = blocks.iter().rev().map(|block| code(&mut encoder, block)).collect();
        in_reverse.reverse();
        prop_assert!(in_reverse == alone);
        let on_threads: Vec<_> = std::thread::scope(|scope| {
            let parts = blocks.chunks(blocks.len().div_ceil(3)).map(|part| {
                scope.spawn(|| {
                    let mut encoder = Encoder::new();
                    part.iter().map(|block| code(&mut encoder, block)).collect::<Vec<_>>()
                })
            });
            let parts: Vec<_> = parts.collect();
            parts.into_iter().flat_map(|part| part.join().unwrap()).collect()
        });
        prop_assert!(on_threads == alone);
    }

    #[test]
    fn a_mask_needs_only_its_runs(format in format(), codec in codec(), words in words(), mask in any::<u32>()) {
        prop_assume!(format != Format::Opaque);
        let mask = PlaneMask(mask & PlaneMask::all(format).0);
        let (mut encoder, mut bundle) = (Encoder::new(), Bundle::new());
        encoder.block(format, codec, &words, &mut bundle);
        let Some(stored) = &bundle.stored else { return Ok(()) };
        let mut got = [0; BLOCK_BYTES];
        Decoder::new().block(stored, mask, &fetched(stored, mask, bundle.bytes()), &mut got).unwrap();
        let mut planes = [0; BLOCK_BYTES];
        crate::plane::split(format, &words, &mut planes);
        let mut want = [0; BLOCK_BYTES];
        crate::plane::join(format, &crate::plane::select(format, mask, &planes), &mut want);
        prop_assert_eq!(&got[..], &want[..]);

        let mut covered = 0;
        stored.runs(mask, |run| covered += run.len());
        let Stored::Planes(planes) = stored else { panic!("planes were encoded") };
        let wanted_at: Vec<_> = (0..format.planes()).filter(|at| mask.has(format.planes() - 1 - at)).collect();
        let tree = if wanted_at.iter().any(|at| planes.plane(*at) == StoredPlane::Joint) { planes.joint.length } else { 0 };
        let wanted = wanted_at.iter().map(|at| usize::from(planes.lengths[*at])).sum::<usize>() + usize::from(tree);
        let checks = if format == Format::Fp32 { 2 * format.planes() } else { 0 };
        prop_assert!(wanted <= covered && covered <= wanted + checks, "{} bytes for {}", covered, wanted);
    }

    #[test]
    fn a_difference_and_the_other_block_give_every_plane(
        format in format(), codec in codec(), words in words(), other in words(),
        mask in any::<u32>(), few in any::<bool>(),
    ) {
        // Of a fine-tune most words are the same.
        let other: Box<BlockWords> = if few {
            let mut near = words.clone();
            near.iter_mut().step_by(97).for_each(|byte| *byte ^= 0x81);
            near
        } else {
            other
        };
        let mask = if format == Format::Opaque { u32::MAX } else { mask & PlaneMask::all(format).0 };
        let mask = PlaneMask(mask);
        let mut encoder = Encoder::new();
        let mut decoded = |words: &BlockWords, difference: bool| {
            let mut bundle = Bundle::new();
            if difference {
                encoder.difference(format, codec, words, &mut bundle);
            } else {
                encoder.block(format, codec, words, &mut bundle);
            }
            assert_eq!(bundle.difference, difference);
            let mut back = [0; BLOCK_BYTES];
            if let Some(stored) = &bundle.stored {
                let bytes = fetched(stored, mask, bundle.bytes());
                Decoder::new().block(stored, mask, &bytes, &mut back).unwrap();
            }
            assert!(bundle.stored.is_some() || !difference, "a difference is always stored");
            back
        };
        let mut xor = [0; BLOCK_BYTES];
        xor.iter_mut().zip(words.iter().zip(&*other)).for_each(|(xor, (one, other))| *xor = one ^ other);
        let (of_words, of_other) = (decoded(&words, false), decoded(&other, false));
        let of_xor = decoded(&xor, true);
        let joined: Vec<_> = of_xor.iter().zip(&of_other).map(|(one, other)| one ^ other).collect();
        prop_assert_eq!(&joined[..], &of_words[..]);
    }

    #[test]
    fn a_flipped_bit_in_what_is_fetched_is_noticed(
        format in format(), codec in codec(), words in words(), at in any::<prop::sample::Index>(), bit in 0_u8..8,
    ) {
        let (mut encoder, mut bundle) = (Encoder::new(), Bundle::new());
        encoder.block(format, codec, &words, &mut bundle);
        let Some(stored) = &bundle.stored else { return Ok(()) };
        prop_assume!(!bundle.bytes().is_empty());
        let all = PlaneMask::all(format);
        let mut bytes = fetched(stored, all, bundle.bytes());
        bytes[at.index(bundle.bytes().len())] ^= 1 << bit;
        prop_assert!(Decoder::new().block(stored, all, &bytes, &mut [0; BLOCK_BYTES]).is_err());
    }

    #[test]
    fn noise_never_decodes_past_its_output(codec in codec(), stored in prop::collection::vec(any::<u8>(), 0..600), length in 0_usize..600) {
        let mut out = vec![0; length];
        let _ = Decoder::new().bytes(codec, &stored, &mut out); // an error or chance, never a panic
    }
}

#[test]
fn constant_planes_store_nothing() {
    let mut words = [0; BLOCK_BYTES];
    words.chunks_exact_mut(2).for_each(|element| element.copy_from_slice(&0xbf80_u16.to_le_bytes()));
    let (mut encoder, mut bundle) = (Encoder::new(), Bundle::new());
    encoder.block(Format::Bf16, Codec::Lz4, &words, &mut bundle);
    assert_eq!(bundle.bytes(), b"");
    let Some(Stored::Planes(planes)) = &bundle.stored else { panic!("not a zero block") };
    assert_eq!(planes.plane(0), StoredPlane::Ones);
    assert_eq!(planes.plane(1), StoredPlane::Zeros);
    let mut back = [1; BLOCK_BYTES];
    let stored = bundle.stored.as_ref().unwrap();
    Decoder::new().block(stored, PlaneMask::all(Format::Bf16), &[0; MAX_BUNDLE], &mut back).unwrap();
    assert_eq!(back, words);
}

#[test]
fn signs_in_the_head_leave_no_plane() {
    let mut words = [0; BLOCK_BYTES];
    for (element, word) in (0_u16..).zip(words.as_chunks_mut::<2>().0) {
        // Runs of 24 signs: as many ones as zeros, and no word like the one before.
        let sign = if element / 24 % 2 == 1 { 0x8000 } else { 0 };
        *word = (sign | (0x3f00 + element.wrapping_mul(40_503) % 0x200)).to_le_bytes();
    }
    let (mut encoder, mut bundle) = (Encoder::new(), Bundle::new());
    bundle.encode_with_header(
        &mut encoder.block,
        Format::Bf16,
        Codec::Tree,
        &words,
        &head::Details::default(),
    );
    let Some(Stored::Planes(planes)) = &bundle.stored else { panic!("planes were encoded") };
    assert_eq!(planes.plane(0), StoredPlane::Zeros);
    assert!(usize::from(planes.head.length) < 250, "{}", planes.head.length);
    let (stored, all) = (bundle.stored.as_ref().unwrap(), PlaneMask::all(Format::Bf16));
    let mut back = [1; BLOCK_BYTES];
    Decoder::new().block(stored, all, &fetched(stored, all, bundle.bytes()), &mut back).unwrap();
    assert_eq!(back, words);
}

#[test]
fn a_damaged_plane_beside_a_stream_is_named_whatever_else_is_read() {
    let mut words = [0; BLOCK_BYTES];
    for (element, word) in (0_u32..).zip(words.as_chunks_mut::<2>().0) {
        // Signs and mantissas are noise, exponents are few.
        let noise = element.wrapping_mul(0x9e37_79b9).rotate_left(element % 32).to_le_bytes();
        let exponent = 120 + noise[0].leading_zeros().min(6);
        *word = (u16::from_le_bytes([noise[1], noise[2]]) & 0x807f | u16::try_from(exponent << 7).unwrap())
            .to_le_bytes();
    }
    let (mut encoder, mut bundle) = (Encoder::new(), Bundle::new());
    encoder.block(Format::Bf16, Codec::Tree, &words, &mut bundle);
    let stored = bundle.stored.clone().unwrap();
    let Stored::Planes(planes) = &stored else { panic!("planes were encoded") };
    let stream = usize::from(planes.joint.length);
    assert!(stream > 0 && bundle.bytes().len() == stream + 8 * 256, "all beside the stream is raw");
    let all = PlaneMask::all(Format::Bf16);
    for plane in [15, 6, 5, 4, 3, 2, 1, 0] {
        let start = if plane == 15 { 0 } else { stream + (7 - plane) * 256 };
        let mut bytes = fetched(&stored, all, bundle.bytes());
        bytes[start + 255] ^= 0x10;
        for mask in [all, PlaneMask(1 << plane), PlaneMask(all.0 & !1 | 1 << plane)] {
            let told = Decoder::new().block(&stored, mask, &bytes, &mut [0; BLOCK_BYTES]);
            assert!(
                matches!(told, Err(BlockError::PlaneCheck { plane: named, .. }) if named == plane),
                "{told:?}"
            );
        }
    }
}

#[test]
fn a_block_of_zeros_is_no_block() {
    let (mut encoder, mut bundle) = (Encoder::new(), Bundle::new());
    for format in Format::ALL {
        encoder.block(format, Codec::Zstd, &[0; BLOCK_BYTES], &mut bundle);
        assert_eq!((&bundle.stored, bundle.bytes().len()), (&None, 0));
        // To be equal to another block is something else, and takes no bytes of planes.
        encoder.difference(format, Codec::Zstd, &[0; BLOCK_BYTES], &mut bundle);
        assert!(bundle.stored.is_some() && bundle.difference);
        assert_eq!(bundle.bytes().is_empty(), format != Format::Opaque);
        encoder.block(format, Codec::Zstd, &[1; BLOCK_BYTES], &mut bundle);
        assert!(!bundle.difference, "nothing of the block before is left");
    }
}

#[test]
fn opaque_blocks_are_kept_where_little_repeats_and_coded_where_much_does() {
    let mut state = 7_u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_be_bytes()[0]
    };
    let stored = |words: &BlockWords, codec| {
        let mut bundle = Bundle::new();
        Encoder::new().block(Format::Opaque, codec, words, &mut bundle);
        bundle.bytes().len()
    };
    let noise: BlockWords = std::array::from_fn(|_| random());
    // As fio makes it: a few bytes of each 512 are zeros.
    let mut stamped = noise;
    stamped.chunks_mut(512).for_each(|sector| sector[..24].fill(0));
    let mut halves = noise;
    halves.copy_within(..BLOCK_BYTES / 2, BLOCK_BYTES / 2);
    let text: BlockWords = std::array::from_fn(|at| b"words that come again, "[at % 23]);
    for codec in [Codec::Lz4, Codec::Tree] {
        assert_eq!(stored(&noise, codec), BLOCK_BYTES);
        assert_eq!(stored(&stamped, codec), BLOCK_BYTES);
        assert!(stored(&halves, codec) < BLOCK_BYTES * 5 / 8);
        assert!(stored(&text, codec) < BLOCK_BYTES / 2);
    }
    assert!(stored(&stamped, Codec::Zstd) < BLOCK_BYTES, "who chose ZSTD has time");
}

#[test]
fn a_plane_check_notices_every_single_and_double_neighbouring_flip() {
    // A checksum's answer to an error does not depend on the data, so one plane of each length
    // stands for all.
    for bytes in [128, 256, 512, 1024] {
        let mut words = [0; BLOCK_BYTES];
        let mut state = 1_u32;
        for byte in &mut words {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *byte = state.to_be_bytes()[0];
        }
        let format = Format::ALL.into_iter().find(|f| f.planes() > 0 && f.plane_bytes() == bytes).unwrap();
        let (mut encoder, mut bundle) = (Encoder::new(), Bundle::new());
        encoder.block(format, Codec::Lz4, &words, &mut bundle);
        let stored = bundle.stored.as_ref().unwrap();
        assert!(stored.is_bypass());
        let sign = PlaneMask(1 << (format.planes() - 1));
        let mut fetched = fetched(stored, sign, bundle.bytes());
        for at in 0..bytes * 8 {
            for width in [1, 2] {
                if at + width > bytes * 8 {
                    continue;
                }
                let flip = |fetched: &mut [u8; MAX_BUNDLE]| {
                    (at..at + width).for_each(|bit| fetched[bit / 8] ^= 1 << (bit % 8));
                };
                flip(&mut fetched);
                assert!(
                    Decoder::new().block(stored, sign, &fetched, &mut [0; BLOCK_BYTES]).is_err(),
                    "bit {at}, {width} wide"
                );
                flip(&mut fetched);
            }
        }
    }
}
