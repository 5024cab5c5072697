//! Blocks that are stored together and published each by itself.
//!
//! The rules:
//! * Bundles are stored before any stripe is taken, with one look for room for all. If one finds no
//!   room, nothing was stored.
//! * All stripes are held while entries are replaced, so the caller can say with certainty what is
//!   charged before and afterwards, and refuse.
//! * Each entry is recorded, put and forgotten by itself: a process that is killed between two
//!   leaves blocks before it new and blocks behind it old. What it had stored for these no entry
//!   names, so who opens the store frees it.
//! * Old segments are freed together, when no stripe is held.

use super::{Store, StoreError, entry::Entry};
use lamina_codec::block::Bundle;

impl Store {
    /// Stores `bundles` as the content of blocks from `first` on, at most
    /// [`STRIPES`](super::STRIPES), if `admit` takes what they are charged before and afterwards:
    /// old and new entries. Nothing of what was there is read, and what was damaged is mended.
    /// After an error all is as it was.
    ///
    /// # Errors
    /// [`StoreError::Full`], [`StoreError::NoRoom`], [`StoreError::HostMemory`]; those of `admit`.
    pub fn replace_all<E: From<StoreError>>(
        &self,
        first: u64,
        bundles: &[Bundle],
        admit: impl FnOnce(u64, u64) -> Result<(), E>,
    ) -> Result<Vec<(Entry, Entry)>, E> {
        let blocks = first..first + bundles.len() as u64;
        let prepared = self.prepare_all(first, bundles, false)?;
        let held = self.stripes.hold_all(blocks.clone());
        let mut changes = Vec::with_capacity(bundles.len());
        for (block, prepared) in blocks.clone().zip(prepared) {
            // Nothing of a damaged block is needed; its segment, which nothing names, is lost.
            let old = self.index.get(block).unwrap_or_default();
            let new = old.next(self.index.version(), prepared.place);
            changes.push((old, new));
        }
        let (mut before, mut after) = (0, 0);
        for (old, new) in &changes {
            before += old.charged();
            after += new.charged();
        }
        if let Err(why) = admit(before, after) {
            drop(held);
            let places = changes.iter().filter_map(|(_, new)| new.place.as_ref());
            self.segments.give_back(places.map(|place| (place.segment, place.stored.bytes())));
            return Err(why);
        }
        let put = || {
            let watching = self.index.watch();
            for (block, (_, new)) in blocks.clone().zip(&changes) {
                self.put_watched(&watching, block, &self.encode(new));
            }
        };
        self.losses.publish(held, blocks.clone(), put, |_| None);
        self.free(changes.iter().map(|(old, _)| old));
        Ok(changes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::GRANULE_BYTES;
    use lamina_codec::{
        BLOCK_BYTES, BlockWords, Codec, Decoder, Encoder, block::MAX_BUNDLE, format::Format, plane::PlaneMask,
    };

    const BLOCKS: u64 = 32;
    const ALL: PlaneMask = PlaneMask(u32::MAX);

    /// Words of which about so many granules are left, none of a length of 0.
    fn words(granules: usize, seed: u64) -> BlockWords {
        let mut words = [0; BLOCK_BYTES];
        let length = (granules * GRANULE_BYTES).min(BLOCK_BYTES);
        words[..length].copy_from_slice(&lamina_codec::testing::bytes(seed, length));
        words
    }

    fn bundles(blocks: &[BlockWords]) -> Vec<Bundle> {
        let mut encoder = Encoder::new();
        let coded = blocks.iter().map(|words| {
            let mut bundle = Bundle::new();
            encoder.block(Format::Opaque, Codec::Lz4, words, &mut bundle);
            bundle
        });
        coded.collect()
    }

    fn read(store: &Store, block: u64) -> BlockWords {
        let (mut bundle, mut words) = (Box::new([0; MAX_BUNDLE]), [0; BLOCK_BYTES]);
        if let Some(place) = store.fetch(block, |_| ALL, &mut bundle).unwrap().entry.place {
            Decoder::new().block(&place.stored, ALL, &bundle, &mut words).unwrap();
        }
        words
    }

    fn charged(store: &Store) -> u64 {
        (0..BLOCKS).map(|block| store.entry(block).unwrap().charged()).sum()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn blocks_are_stored_together_or_all_are_as_they_were(
            stores in prop::collection::vec((0..BLOCKS, 1..=16_usize, 0..70_usize, any::<u64>(), 0..4_u8), 1..60),
        ) {
            // Less than all blocks take, if none of them gets smaller.
            let store = Store::new(BLOCKS, 2 * 65536).unwrap();
            let mut model = vec![[0; BLOCK_BYTES]; usize::try_from(BLOCKS).unwrap()];
            for (first, count, granules, seed, refused) in stores {
                let at = usize::try_from(first).unwrap();
                let count = count.min(model.len() - at);
                let new: Vec<_> = (0..count).map(|number| words(granules, seed ^ number as u64)).collect();
                let before = charged(&store);
                let mut told = (0, 0);
                let admit = |old, new| {
                    told = (old, new);
                    if refused == 0 { Err(StoreError::DamagedTables) } else { Ok(()) }
                };
                match store.replace_all(first, &bundles(&new), admit) {
                    Ok(changes) => {
                        prop_assert!(refused > 0 && changes.len() == count);
                        prop_assert_eq!(charged(&store) + told.0, before + told.1);
                        model[at..at + count].copy_from_slice(&new);
                    }
                    Err(why) => {
                        prop_assert!(why.is_no_room() || refused == 0, "{}", why);
                        prop_assert_eq!(charged(&store), before);
                    }
                }
                prop_assert_eq!(store.used_bytes(), charged(&store), "a segment is lost");
            }
            for (block, want) in (0..).zip(&model) {
                prop_assert!(read(&store, block) == *want, "block {}", block);
            }
        }
    }

    #[test]
    fn stores_of_the_same_blocks_at_once_leave_each_of_them_whole() {
        let store = Store::new(BLOCKS, 64 << 20).unwrap();
        // Threads store overlapping ranges of words that say whose they are.
        let ranges = [0..16, 8..24, 1..9_u64];
        std::thread::scope(|scope| {
            let writers: Vec<_> = (1..)
                .zip(&ranges)
                .map(|(byte, range)| {
                    let store = &store;
                    scope.spawn(move || {
                        for round in 0..400_usize {
                            let mut words = [byte; BLOCK_BYTES];
                            words[..round].fill(byte + 0x10);
                            let count = usize::try_from(range.end - range.start).unwrap();
                            let all = bundles(&vec![words; count]);
                            store.replace_all(range.start, &all, |_, _| Ok::<_, StoreError>(())).unwrap();
                        }
                    })
                })
                .collect();
            while writers.iter().any(|writer| !writer.is_finished()) {
                for block in 0..BLOCKS {
                    let words = read(&store, block);
                    let byte = words[BLOCK_BYTES - 1];
                    let first = words.iter().position(|found| *found == byte).unwrap();
                    assert!(words[..first].iter().all(|found| *found == byte + 0x10), "a mixture");
                    assert!(words[first..].iter().all(|found| *found == byte), "a mixture");
                }
            }
        });
        assert_eq!(store.used_bytes(), charged(&store), "a segment is lost");
        assert!((0..24).all(|block| store.entry(block).unwrap().place.is_some()));
    }
}
