//! What stored blocks hold, by kind: what the gauges of heads, words and planes count.

use super::{Gauge, Stats};
use crate::figures;
use lamina_codec::{
    Codec,
    block::{MAX_PLANES, Stored, StoredPlane},
    format::Format,
};
use lamina_store::entry::Entry;

/// Kinds of stored plane, as the gauges tell them apart: raw, then by codec.
const PLANE_KINDS: usize = 1 + Codec::ALL.len();
/// Planes of all formats.
const SLOTS: usize = Format::ALL.len() * MAX_PLANES;
/// Where gauges are in [`Held`]: the headers of transformed blocks, blocks that hold data and that
/// no codec made smaller, blocks of words by kind, planes by slot and kind, constant planes by
/// slot.
const HEADS: usize = 0;
const BYPASS_BLOCKS: usize = 1;
const WORDS: usize = 2;
const PLANES: usize = WORDS + PLANE_KINDS;
const CONSTANT: usize = PLANES + SLOTS * PLANE_KINDS;
const ALL: usize = CONSTANT + SLOTS;

/// Gauges of what blocks hold, in exact bytes.
#[derive(Debug)]
pub(crate) struct Held(Vec<Gauge>);

figures! {
    /// One plane of one format, over all blocks.
    pub struct PlaneReport {
        reported {
            /// The format.
            format: Format;
            /// The plane: bit of the element.
            plane: u32;
        }
        figures {
            /// Blocks in which a plane is constant and stores nothing.
            constant: u64 = Gauge "plane_constant_blocks" Count;
            /// Exact bytes of a plane over all blocks: stored raw.
            raw_bytes: u64 = Gauge "plane_stored" {codec = "raw"} Bytes;
            /// Exact bytes of a plane stored as LZ4.
            lz4_bytes: u64 = Gauge "plane_stored" {codec = "lz4"} Bytes;
            /// Exact bytes of a plane stored as ZSTD.
            zstd_bytes: u64 = Gauge "plane_stored" {codec = "zstd"} Bytes;
            /// Exact bytes of plane trees, all counted with the highest plane that they hold.
            tree_bytes: u64 = Gauge "plane_stored" {codec = "tree"} Bytes;
        }
    }
}

impl Default for Held {
    fn default() -> Self {
        Self((0..ALL).map(|_| Gauge::default()).collect())
    }
}

impl Held {
    /// Exact bytes of the headers of transformed blocks.
    pub(super) fn heads(&self) -> u64 {
        self.0[HEADS].get()
    }

    /// Blocks that hold data and that no codec made smaller.
    pub(super) fn bypass_blocks(&self) -> u64 {
        self.0[BYPASS_BLOCKS].get()
    }

    /// Exact bytes of blocks of words, raw or by this codec.
    pub(super) fn words(&self, codec: Option<Codec>) -> u64 {
        self.0[WORDS + codec.map_or(0, |codec| 1 + codec as usize)].get()
    }

    /// Planes that store anything, by format, the highest first.
    pub(super) fn planes(&self) -> Vec<PlaneReport> {
        let all = Format::ALL
            .into_iter()
            .flat_map(|format| (0..MAX_PLANES).rev().map(move |plane| (format, plane)));
        all.filter_map(|(format, plane)| {
            let slot = slot(format, plane);
            let [raw, lz4, zstd, tree] =
                std::array::from_fn::<_, PLANE_KINDS, _>(|kind| self.0[planes(slot, kind)].get());
            let constant = self.0[CONSTANT + slot].get();
            (constant + raw + lz4 + zstd + tree > 0).then(|| PlaneReport {
                format,
                plane: u32::try_from(plane).expect("at most 31"),
                constant,
                raw_bytes: raw,
                lz4_bytes: lz4,
                zstd_bytes: zstd,
                tree_bytes: tree,
            })
        })
        .collect()
    }
}

fn slot(format: Format, plane: usize) -> usize {
    format as usize * MAX_PLANES + plane
}

/// Where the gauge of planes of a slot is, stored as this kind.
const fn planes(slot: usize, kind: usize) -> usize {
    PLANES + slot * PLANE_KINDS + kind
}

/// What many blocks hold, counted by one thread for all gauges.
#[derive(Debug)]
pub(crate) struct Holdings(Vec<i64>);

impl Default for Holdings {
    fn default() -> Self {
        Self(vec![0; ALL])
    }
}

impl Holdings {
    /// Counts a block.
    pub(crate) fn add(&mut self, entry: &Entry) {
        self.count(entry, 1);
    }

    /// Counts a block as `new` that was counted as `old`.
    pub(crate) fn shift(&mut self, old: &Entry, new: &Entry) {
        self.count(old, -1);
        self.count(new, 1);
    }

    fn count(&mut self, entry: &Entry, sign: i64) {
        each(entry, |at, count| self.0[at] += sign * count);
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
            each(entry, |at, count| self.held.0[at].add(sign * count));
        }
    }

    /// Blocks that hold this were found, or came in the place of others.
    pub(crate) fn found(&self, Holdings(counts): &Holdings) {
        // Few of them change at a time: many that do not are passed by at once.
        for (counts, gauges) in counts.chunks(64).zip(self.held.0.chunks(64)) {
            if counts.iter().fold(0, |any, count| any | count) != 0 {
                counts
                    .iter()
                    .zip(gauges)
                    .filter(|(count, _)| **count != 0)
                    .for_each(|(count, gauge)| gauge.add(*count));
            }
        }
    }

    /// All gauges that follow from the entries and from who owns their blocks.
    pub(crate) fn of_entries(&self) -> impl Iterator<Item = &Gauge> {
        self.held.0.iter().chain([&self.live_blocks, &self.opaque_blocks, &self.opaque_stored])
    }
}

/// Calls with where each gauge is that counts a block, and what it counts of it.
fn each(entry: &Entry, mut count: impl FnMut(usize, i64)) {
    let Some(place) = &entry.place else { return };
    count(HEADS, i64::try_from(place.stored.head_bytes()).expect("less than a block"));
    let bypass = place.is_bypass();
    if bypass {
        count(BYPASS_BLOCKS, 1);
    }
    match &place.stored {
        Stored::Words { codec, length, .. } => {
            count(WORDS + if bypass { 0 } else { 1 + *codec as usize }, i64::from(*length));
        }
        // Neither words nor planes: what they take is in what their tensors are charged.
        Stored::Packed { .. } => {}
        Stored::Planes(planes) => {
            let all = planes.format.planes();
            for index in 0..all {
                let slot = slot(planes.format, all - 1 - index);
                let kind = match planes.plane(index) {
                    StoredPlane::Zeros | StoredPlane::Ones => {
                        count(CONSTANT + slot, 1);
                        continue;
                    }
                    StoredPlane::Joint => {
                        // The stream is counted once, with the first of its planes.
                        if index == 1 {
                            let kind = 1 + Codec::Tree as usize;
                            count(self::planes(slot, kind), i64::from(planes.joint.length));
                        }
                        continue;
                    }
                    StoredPlane::Raw => 0,
                    StoredPlane::Coded(_) => 1 + planes.codec as usize,
                };
                count(self::planes(slot, kind), i64::from(planes.lengths[index]));
            }
        }
    }
}
