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
    /// Stores `bundles` as the content of blocks from `first` on, at most [`STRIPES`](super::STRIPES),
    /// if `admit` takes what they are charged before and afterwards: old and new entries. Nothing of
    /// what was there is read, and what was damaged is mended. After an error all is as it was.
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
