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
/// Where words are in [`Holdings`], then planes, then constant planes; heads and bypass blocks come
/// first.
const WORDS: usize = 2;
const PLANES: usize = WORDS + PLANE_KINDS;
const CONSTANT: usize = PLANES + SLOTS * PLANE_KINDS;

/// Gauges of what blocks hold, in exact bytes.
#[derive(Debug)]
pub(crate) struct Held {
    /// The headers of transformed blocks.
    pub(super) heads: Gauge,
    /// Blocks that hold data and that no codec made smaller.
    pub(super) bypass_blocks: Gauge,
    /// Blocks of words, by kind.
    words: [Gauge; PLANE_KINDS],
    /// Planes, by slot and kind.
    planes: Vec<[Gauge; PLANE_KINDS]>,
    /// Constant planes, by slot.
    constant: Vec<Gauge>,
}

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
        Self {
            heads: Gauge::default(),
            bypass_blocks: Gauge::default(),
            words: Default::default(),
            planes: (0..SLOTS).map(|_| Default::default()).collect(),
            constant: (0..SLOTS).map(|_| Gauge::default()).collect(),
        }
    }
}

impl Held {
    /// Exact bytes of blocks of words, raw or by this codec.
    pub(super) fn words(&self, codec: Option<Codec>) -> u64 {
        self.words[codec.map_or(0, |codec| 1 + codec as usize)].get()
    }

    /// Planes that store anything, by format, the highest first.
    pub(super) fn planes(&self) -> Vec<PlaneReport> {
        let all = Format::ALL
            .into_iter()
            .flat_map(|format| (0..MAX_PLANES).rev().map(move |plane| (format, plane)));
        all.filter_map(|(format, plane)| {
            let slot = slot(format, plane);
            let [raw, lz4, zstd, tree] = self.planes[slot].each_ref().map(Gauge::get);
            let constant = self.constant[slot].get();
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
        self.count(entry, 1);
    }

    /// Counts a block as `new` that was counted as `old`.
    pub(crate) fn shift(&mut self, old: &Entry, new: &Entry) {
        self.count(old, -1);
        self.count(new, 1);
    }

    fn count(&mut self, entry: &Entry, sign: i64) {
        each(entry, |which, count| {
            let at = match which {
                Which::Heads => 0,
                Which::BypassBlocks => 1,
                Which::Words(kind) => WORDS + kind,
                Which::Planes(slot, kind) => PLANES + slot * PLANE_KINDS + kind,
                Which::Constant(slot) => CONSTANT + slot,
            };
            self.0[at] += sign * count;
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
                    Which::Heads => &self.held.heads,
                    Which::BypassBlocks => &self.held.bypass_blocks,
                    Which::Words(kind) => &self.held.words[kind],
                    Which::Planes(slot, kind) => &self.held.planes[slot][kind],
                    Which::Constant(slot) => &self.held.constant[slot],
                };
                gauge.add(sign * count);
            });
        }
    }

    /// Blocks that hold this were found, or came in the place of others.
    pub(crate) fn found(&self, Holdings(counts): &Holdings) {
        let changed = self.holdings().zip(counts).filter(|(_, count)| **count != 0);
        changed.for_each(|(gauge, count)| gauge.add(*count));
    }

    /// The gauges of what blocks hold, in the order of [`Holdings`].
    fn holdings(&self) -> impl Iterator<Item = &Gauge> {
        let held = &self.held;
        let planes = held.planes.iter().flatten();
        let first: [&Gauge; WORDS] = [&held.heads, &held.bypass_blocks];
        first.into_iter().chain(&held.words).chain(planes).chain(&held.constant)
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
    let bypass = place.is_bypass();
    if bypass {
        count(Which::BypassBlocks, 1);
    }
    match &place.stored {
        Stored::Words { codec, length, .. } => {
            count(Which::Words(if bypass { 0 } else { 1 + *codec as usize }), i64::from(*length));
        }
        // Neither words nor planes: what they take is in what their tensors are charged.
        Stored::Packed { .. } => {}
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
