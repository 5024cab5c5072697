//! The store under random operations against a plain array, and its entries against damage.

use proptest::prelude::*;

use super::{
    losses::{Loss, Losses, MAX_LOGGED},
    *,
};
use lamina_codec::{
    BlockWords, Codec, Decoder, Encoder, block::StoredPlanes, format::Format, testing::words,
};

const BLOCKS: u64 = 24;

#[derive(Clone, Debug)]
enum Operation {
    Write { block: u64, format: Format, codec: Codec, words: Box<BlockWords> },
    Discard { block: u64 },
    Read { block: u64, mask: u32 },
}

fn operation() -> impl Strategy<Value = Operation> {
    let block = 0..BLOCKS;
    let format = prop::sample::select(Format::ALL.to_vec());
    let codec = prop::sample::select(Codec::ALL.to_vec());
    prop_oneof![
        4 => (block.clone(), format, codec, words())
            .prop_map(|(block, format, codec, words)| Operation::Write { block, format, codec, words }),
        1 => block.clone().prop_map(|block| Operation::Discard { block }),
        3 => (block, any::<u32>()).prop_map(|(block, mask)| Operation::Read { block, mask }),
    ]
}

fn read(store: &Store, block: u64, mask: PlaneMask) -> (Entry, BlockWords) {
    let mut bundle = Box::new([0xa5; MAX_BUNDLE]);
    let entry = store.fetch(block, |_| mask, &mut bundle).unwrap().entry;
    let mut words = [0; BLOCK_BYTES];
    if let Some(place) = &entry.place {
        Decoder::new().block(&place.stored, mask, &bundle, &mut words).unwrap();
    }
    (entry, words)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_store_is_an_array_of_blocks(operations in prop::collection::vec(operation(), 1..120)) {
        let store = Store::new(BLOCKS, BLOCKS * 3 * 65536).unwrap();
        let mut model = vec![[0; BLOCK_BYTES]; usize::try_from(BLOCKS).unwrap()];
        let mut bundle = Bundle::new();
        for operation in operations {
            match operation {
                Operation::Write { block, format, codec, words } => {
                    Encoder::new().block(format, codec, &words, &mut bundle);
                    store.replace(block).unwrap().publish(&bundle).unwrap();
                    model[usize::try_from(block).unwrap()] = *words;
                }
                Operation::Discard { block } => {
                    store.replace(block).unwrap().publish(&Bundle::new()).unwrap();
                    model[usize::try_from(block).unwrap()] = [0; BLOCK_BYTES];
                }
                Operation::Read { block, mask } => {
                    let (entry, got) = read(&store, block, PlaneMask(mask));
                    let mut want = model[usize::try_from(block).unwrap()];
                    if let Some(entry::Place { stored: Stored::Planes(StoredPlanes { format, .. }), .. }) = entry.place {
                        let mut planes = [0; BLOCK_BYTES];
                        lamina_codec::plane::split(format, &want, &mut planes);
                        lamina_codec::plane::join(format, &lamina_codec::plane::select(format, PlaneMask(mask), &planes), &mut want);
                    }
                    prop_assert_eq!(&got[..], &want[..]);
                }
            }
        }
        let mut charged = 0;
        for (block, want) in model.iter().enumerate() {
            let (entry, got) = read(&store, block as u64, PlaneMask(u32::MAX));
            charged += entry.charged();
            prop_assert_eq!(&got[..], &want[..]);
        }
        prop_assert_eq!(store.used_bytes(), charged, "every granule in use belongs to a block");
    }

    #[test]
    fn an_entry_is_read_as_written_and_every_flip_is_noticed(
        format in prop::sample::select(Format::ALL.to_vec()), codec in prop::sample::select(Codec::ALL.to_vec()),
        words in words(), segment in 0_u64..1 << 36, epoch: u16, lossy: bool, difference: bool,
        bit in 0..ENTRY_BYTES * 8,
    ) {
        let mut bundle = Bundle::new();
        if difference {
            Encoder::new().difference(format, codec, &words, &mut bundle);
        } else {
            Encoder::new().block(format, codec, &words, &mut bundle);
        }
        for version in [Version::One, Version::Two].into_iter().filter(|version| version.holds(format)) {
            let lossy = lossy && version == Version::Two;
            let difference = difference && version.has_differences();
            let placed = |stored| entry::Place { segment, stored, lossy, difference };
            let entry = Entry { epoch, place: bundle.stored.clone().map(placed) }.fitting(version);
            let mut bytes = entry.encode(version);
            prop_assert_eq!(&Entry::decode(version, &bytes).unwrap(), &entry);
            prop_assume!(entry != Entry::default());
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Entry::decode(version, &bytes).is_err());
        }
    }

    #[test]
    fn any_64_bytes_behind_a_valid_checksum_decode_safely(mut bytes: [u8; 32], rest: [u8; 32]) {
        // So that some get past the reserved bits.
        for version in [Version::One, Version::Two] {
        match version {
            Version::One => (bytes[6], bytes[7]) = (bytes[6] & 3, bytes[7] & 0x1f),
            Version::Two => (bytes[4], bytes[5], bytes[9]) = (bytes[4] & 0x7f, bytes[5] & 0x20, bytes[9] & 0x1b),
        }
        let mut entry = [0; ENTRY_BYTES];
        entry[..32].copy_from_slice(&bytes);
        entry[32..].copy_from_slice(&rest);
        entry[10..14].fill(0);
        let check = crc32c::crc32c(&entry);
        entry[10..14].copy_from_slice(&check.to_le_bytes());
        if let Ok(Entry { place: Some(place), .. }) = Entry::decode(version, &entry) {
            let (all, bundle) = (PlaneMask(u32::MAX), [0; MAX_BUNDLE]);
            let _ = Decoder::new().block(&place.stored, all, &bundle, &mut [0; BLOCK_BYTES]);
        }
        }
    }
}

#[test]
fn version_1_holds_the_formats_that_it_has_numbers_for() {
    for (number, format) in Format::ALL.into_iter().enumerate() {
        assert_eq!((Version::One.holds(format), Version::Two.holds(format)), (number < 8, true), "{format}");
    }
    let store = Store::new(1, 1 << 20).unwrap();
    assert!(store.holds(Format::Fp4E2m1), "a new store is of version 2");
}

#[test]
fn any_block_may_be_expected_whatever_its_entry_names() {
    let store = Store::new(4, 65536).unwrap();
    let words = words_of(60, 1);
    let mut bundle = Bundle::new();
    Encoder::new().block(Format::Opaque, Codec::Lz4, &words, &mut bundle);
    store.replace(0).unwrap().publish(&bundle).unwrap();
    // It names the last of all segments that can be named; the others name the first.
    assert!(store.poison(1, &cause::Why::found(), |_| true).unwrap().is_some());
    for bytes in [0..0, 0..4096, 4096..4097, 2000..u64::MAX, u64::MAX - 1..u64::MAX] {
        (0..4).for_each(|block| store.prefetch(block, bytes.clone()));
    }
    assert_eq!(read(&store, 0, PlaneMask(u32::MAX)).1, words);
    assert!(store.entry(1).is_err() && store.entry(3).unwrap() == Entry::default());
}

#[test]
fn a_full_store_refuses_and_keeps_what_it_has() {
    let store = Store::new(64, 65536).unwrap();
    let mut noise = [0; BLOCK_BYTES];
    let mut state = 7_u64;
    for byte in &mut noise {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        *byte = state.to_be_bytes()[0];
    }
    let mut bundle = Bundle::new();
    Encoder::new().block(Format::Opaque, Codec::Lz4, &noise, &mut bundle);
    for block in 0..16 {
        store.replace(block).unwrap().publish(&bundle).unwrap();
    }
    let error = store.replace(16).unwrap().publish(&bundle).unwrap_err();
    assert!(matches!(error, StoreError::Full { wanted: 4096, used: 65536, capacity: 65536 }), "{error}");
    for block in 0..16 {
        assert_eq!(read(&store, block, PlaneMask(u32::MAX)).1, noise);
    }
    store.replace(3).unwrap().publish(&Bundle::new()).unwrap();
    store.replace(16).unwrap().publish(&bundle).unwrap();
    assert_eq!(read(&store, 16, PlaneMask(u32::MAX)).1, noise);
    assert_eq!(read(&store, 3, PlaneMask(u32::MAX)).1, [0; BLOCK_BYTES]);
}

#[test]
fn readers_see_the_old_block_or_the_new_never_a_mixture() {
    let store = Store::new(1, 1 << 20).unwrap();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut bundle = Bundle::new();
            for round in 0..4000_u32 {
                let byte = round.to_le_bytes()[0];
                let mut words = [byte; BLOCK_BYTES];
                words[..4].copy_from_slice(&[byte; 4]);
                Encoder::new().block(
                    if round % 2 == 0 { Format::Bf16 } else { Format::Opaque },
                    Codec::Lz4,
                    &words,
                    &mut bundle,
                );
                store.replace(0).unwrap().publish(&bundle).unwrap();
            }
        });
        while !writer.is_finished() {
            let (_, words) = read(&store, 0, PlaneMask(u32::MAX));
            assert!(words.iter().all(|byte| *byte == words[0]), "a mixture of two blocks");
        }
    });
}

/// Words of which LZ4 leaves about so many granules.
fn words_of(granules: usize, seed: u64) -> BlockWords {
    let mut words = [0; BLOCK_BYTES];
    let length = (granules * GRANULE_BYTES).min(BLOCK_BYTES);
    words[..length].copy_from_slice(&lamina_codec::testing::bytes(seed, length));
    words
}

#[test]
fn fragmentation_has_its_bound_under_long_random_rewrites() {
    const BLOCKS: u64 = 3000;
    let store = Store::new(BLOCKS, 64 << 20).unwrap();
    let mut model = std::collections::BTreeMap::new();
    let mut bundle = Bundle::new();
    let mut random = 1_u64;
    let mut next = |bound: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) % bound
    };
    let chunk = (segments::CHUNK_GRANULES * GRANULE_BYTES) as u64;
    for round in 0..16_000_u64 {
        // Sizes drift, so that what was needed a while ago is not needed any more; some blocks stay
        // for long.
        let size = (round / 1000 * 13 + next(6)) % 64;
        let block = if next(8) == 0 { next(BLOCKS) } else { next(BLOCKS / 8) * 8 };
        let words =
            if next(5) == 0 { [0; BLOCK_BYTES] } else { words_of(usize::try_from(size).unwrap(), round) };
        Encoder::new().block(Format::Opaque, Codec::Lz4, &words, &mut bundle);
        store.replace(block).unwrap().publish(&bundle).unwrap();
        model.insert(block, words);
        // A quarter of the slots, two chunks of each length, and what a length leaves over at the
        // end of a chunk.
        let lengths = segments::MAX_GRANULES as u64;
        let bound =
            store.used_bytes() * 4 / 3 * 16 / 15 + lengths * (segments::SLACK_CHUNKS as u64 + 1) * chunk;
        assert!(store.held_bytes() <= bound, "{} of {bound} in round {round}", store.held_bytes());
    }
    for (block, words) in model {
        assert!(read(&store, block, PlaneMask(u32::MAX)).1 == words, "block {block}");
    }
    for block in 0..BLOCKS {
        store.replace(block).unwrap().publish(&Bundle::new()).unwrap();
    }
    assert_eq!((store.used_bytes(), store.held_bytes()), (0, 0));
}

#[test]
fn a_length_that_is_needed_no_more_leaves_its_chunks() {
    // 15 segments of 65 granules fill a chunk; all but one of each 15 go.
    let store = Store::new(15 * 64, 64 << 20).unwrap();
    let mut bundle = Bundle::new();
    for block in 0..15 * 64 {
        Encoder::new().block(Format::Opaque, Codec::Lz4, &words_of(64, block), &mut bundle);
        store.replace(block).unwrap().publish(&bundle).unwrap();
    }
    for block in (0..15 * 64).filter(|block| block % 15 != 7) {
        store.replace(block).unwrap().publish(&Bundle::new()).unwrap();
    }
    let chunk = (segments::CHUNK_GRANULES * GRANULE_BYTES) as u64;
    assert!(store.held_bytes() <= 8 * chunk, "{} chunks hold 64 segments", store.held_bytes() / chunk);
    for block in (7..15 * 64).step_by(15) {
        assert!(read(&store, block, PlaneMask(u32::MAX)).1 == words_of(64, block));
    }
}

fn blocks_of(found: &[Loss<&str>]) -> Vec<u64> {
    found.iter().map(|loss| loss.block).collect()
}

#[test]
fn what_was_mended_is_logged_and_no_more_listed() {
    let losses = Losses::new();
    assert!(losses.note(7, "a") && losses.note(3, "b") && !losses.note(7, "c"));
    losses.mended(7);
    losses.mended(5);
    assert!(losses.note(7, "d"));
    losses.mended(3);
    assert_eq!(losses.now(), (1, 3));
    assert_eq!(losses.listed(), [Loss { block: 7, event: 3, why: "d" }]);
    assert!(losses.lists(7) && !losses.lists(3));
    assert_eq!(losses.listed_in(0..8), [7]);
    let (found, missed) = losses.since(0);
    assert_eq!((blocks_of(&found), missed), (vec![7, 3, 7], 0));
    let (found, missed) = losses.since(2);
    assert_eq!((blocks_of(&found), missed), (vec![7], 0));
    assert_eq!(losses.since(3), (Vec::new(), 0));
}

#[test]
fn of_losses_that_left_the_log_those_are_known_that_are_listed() {
    let losses = Losses::new();
    let more = 5_u64;
    for block in 0..MAX_LOGGED as u64 + more {
        losses.note(block, "");
    }
    losses.mended(1);
    losses.mended(more);
    let (found, missed) = losses.since(0);
    assert_eq!((found.len(), missed), (MAX_LOGGED + 4, 1));
    assert!(found.windows(2).all(|pair| pair[0].event < pair[1].event));
    let (found, missed) = losses.since(2);
    assert_eq!((found.len(), found[0].event, missed), (MAX_LOGGED + 3, 3, 0));
}
