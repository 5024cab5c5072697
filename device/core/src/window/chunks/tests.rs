//! The tree against a list with one owner a block.

use proptest::prelude::*;

use super::*;

/// Five chunks of the second node and a few blocks, so that every level has something.
const BLOCKS: u64 = (FANOUT as u64 + 5) * CHUNK_BLOCKS + 7;

/// Ranges that begin and end at chunks, near them, and anywhere.
fn ranges() -> impl Strategy<Value = Range<u64>> {
    let place = || {
        let near = (0..=BLOCKS / CHUNK_BLOCKS, -2_i64..=2)
            .prop_map(|(chunk, off)| (chunk * CHUNK_BLOCKS).saturating_add_signed(off).min(BLOCKS));
        prop_oneof![near, 0..=BLOCKS]
    };
    (place(), place()).prop_map(|(one, other)| one.min(other)..one.max(other))
}

fn agrees(chunks: &Chunks<u32>, list: &[Option<u32>]) -> Result<(), TestCaseError> {
    let mut block = 0;
    while block < BLOCKS {
        let (owner, end) = chunks.look(block);
        prop_assert!(end > block);
        let range = usize::try_from(block).unwrap()..usize::try_from(end.min(BLOCKS)).unwrap();
        prop_assert!(list[range].iter().all(|is| is.as_ref() == owner.map(|owner| &**owner)), "{block}");
        block = end;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_block_has_the_owner_that_was_set_last(
        sets in prop::collection::vec((ranges(), prop::option::of(0_u32..4)), 1..24),
    ) {
        let (mut chunks, mut list) = (Chunks::new(BLOCKS), vec![None; usize::try_from(BLOCKS).unwrap()]);
        for (range, owner) in sets {
            let (before, was) = (chunks.clone(), list.clone());
            chunks.set(&range, owner.map(Arc::new).as_ref());
            list[usize::try_from(range.start).unwrap()..usize::try_from(range.end).unwrap()].fill(owner);
            agrees(&chunks, &list)?;
            // Who has the tree as it was sees nothing of it.
            agrees(&before, &was)?;
        }
        chunks.set(&(0..BLOCKS), None);
        prop_assert!(!matches!(chunks.root, Word::Whole(_)));
        prop_assert_eq!(chunks.owner(BLOCKS - 1), None);
    }
}

#[test]
fn a_long_range_takes_few_words() {
    let blocks = (64 << 40) / BLOCK_BYTES as u64;
    let mut chunks = Chunks::new(blocks);
    let owner = Arc::new(1);
    chunks.set(&(1..blocks - 1), Some(&owner));
    assert_eq!((chunks.owner(0), chunks.owner(blocks - 1), chunks.owner(blocks)), (None, None, None));
    assert_eq!(chunks.owner(u64::MAX), None);
    assert_eq!((chunks.owner(1), chunks.owner(blocks - 2)), (Some(&owner), Some(&owner)));
    assert!(Arc::strong_count(&owner) < 1000, "{}", Arc::strong_count(&owner));
    chunks.set(&(1..blocks - 1), None);
    assert!(matches!(chunks.root, Word::Free));
    assert_eq!(Arc::strong_count(&owner), 1);
}
