//! What stored blocks hold, by kind: what the gauges of heads, words and planes count.

use super::{Gauge, PLANE_KINDS, Stats, slot};
use lamina_codec::{
    Codec,
    block::{MAX_PLANES, Stored, StoredPlane},
    format::Format,
};
use lamina_store::entry::Entry;

/// Slots of formats' planes.
const SLOTS: usize = Format::ALL.len() * MAX_PLANES;
/// Where words are in [`Holdings`], then planes, then constant planes; heads and bypass blocks come first.
const WORDS: usize = 2;
const PLANES: usize = WORDS + PLANE_KINDS;
const CONSTANT: usize = PLANES + SLOTS * PLANE_KINDS;

/// A gauge.
#[derive(Clone, Copy)]
enum Which {
    Heads,
    BypassBlocks,
    /// By kind.
    Words(usize),
    /// By slot and kind.
    Planes(usize, usize),
    /// By slot.
    Constant(usize),
}

/// What many blocks hold, counted by one thread for all gauges.
#[derive(Debug)]
pub(crate) struct Holdings(Vec<i64>);

impl Default for Holdings {
    fn default() -> Self {
        Self(vec![0; CONSTANT + SLOTS])
    }
}

impl Holdings {
    /// Counts a block.
    pub(crate) fn add(&mut self, entry: &Entry) {
        each(entry, |which, count| {
            let at = match which {
                Which::Heads => 0,
                Which::BypassBlocks => 1,
                Which::Words(kind) => WORDS + kind,
                Which::Planes(slot, kind) => PLANES + slot * PLANE_KINDS + kind,
                Which::Constant(slot) => CONSTANT + slot,
            };
            self.0[at] += count;
        });
    }
}

impl Stats {
    /// A block's entry changed from `old` to `new`.
    pub(crate) fn replaced(&self, old: &Entry, new: &Entry) {
        self.index_written.add(1);
        self.recount(old, new);
    }

    /// A block that was counted as `old` is found to be `new`.
    pub(crate) fn recount(&self, old: &Entry, new: &Entry) {
        for (entry, sign) in [(old, -1), (new, 1)] {
            each(entry, |which, count| {
                let gauge = match which {
                    Which::Heads => &self.heads,
                    Which::BypassBlocks => &self.bypass_blocks,
                    Which::Words(kind) => &self.words[kind],
                    Which::Planes(slot, kind) => &self.planes[slot][kind],
                    Which::Constant(slot) => &self.constant[slot],
                };
                gauge.add(sign * count);
            });
        }
    }

    /// Blocks that hold this were found.
    pub(crate) fn found(&self, Holdings(counts): &Holdings) {
        self.holdings().zip(counts).for_each(|(gauge, count)| gauge.add(*count));
    }

    /// The gauges of what blocks hold, in the order of [`Holdings`].
    fn holdings(&self) -> impl Iterator<Item = &Gauge> {
        let planes = self.planes.iter().flatten();
        let first: [&Gauge; WORDS] = [&self.heads, &self.bypass_blocks];
        first.into_iter().chain(&self.words).chain(planes).chain(&self.constant)
    }

    /// All gauges that follow from the entries and from who owns their blocks.
    pub(crate) fn of_entries(&self) -> impl Iterator<Item = &Gauge> {
        self.holdings().chain([&self.live_blocks, &self.opaque_blocks, &self.opaque_stored])
    }
}

/// Calls with each gauge that counts a block, and what it counts of it.
fn each(entry: &Entry, mut count: impl FnMut(Which, i64)) {
    let Some(place) = &entry.place else { return };
    count(Which::Heads, i64::try_from(place.stored.head_bytes()).expect("less than a block"));
    let bypass = place.stored.is_bypass();
    if bypass {
        count(Which::BypassBlocks, 1);
    }
    match &place.stored {
        Stored::Words { codec, length, .. } => {
            count(Which::Words(if bypass { 0 } else { 1 + *codec as usize }), i64::from(*length));
        }
        Stored::Planes(planes) => {
            let all = planes.format.planes();
            for index in 0..all {
                let slot = slot(planes.format, all - 1 - index);
                let kind = match planes.plane(index) {
                    StoredPlane::Zeros | StoredPlane::Ones => {
                        count(Which::Constant(slot), 1);
                        continue;
                    }
                    StoredPlane::Joint => {
                        // The stream is counted once, with the first of its planes.
                        if index == 1 {
                            let kind = 1 + Codec::Tree as usize;
                            count(Which::Planes(slot, kind), i64::from(planes.joint.length));
                        }
                        continue;
                    }
                    StoredPlane::Raw => 0,
                    StoredPlane::Coded(_) => 1 + planes.codec as usize,
                };
                count(Which::Planes(slot, kind), i64::from(planes.lengths[index]));
            }
        }
    }
}
