//! Counters and gauges, and how they are [declared](declare).

mod counted;
mod declare;
mod sections;
mod times;
mod traffic;

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

use lamina_store::counters::Kept;

pub(crate) use self::counted::Counted;
pub use self::declare::{At, Slot, Slots};
pub use self::declare::{Compared, Figure, Kind, Unit};
pub use self::sections::{Place, Row, Scope, Section};
pub(crate) use self::times::Latency;
pub use self::times::{Bucket, Histogram, LatencyReport, Times};
pub(crate) use self::traffic::{Fills, Traffic, entries_bytes, ratio};
pub use self::traffic::{FillsReport, TrafficReport};

/// Most devices.
pub(crate) const MAX_MEMBERS: usize = lamina_abi::interleave::MAX_WAYS as usize;

/// A number that only rises.
#[derive(Debug)]
pub struct Counter(Where);

/// Where a number is kept.
#[derive(Debug)]
enum Where {
    Here(AtomicU64),
    /// In the image, so that the next process goes on from it.
    Image(Kept),
}

impl Default for Counter {
    fn default() -> Self {
        Self(Where::Here(AtomicU64::new(0)))
    }
}

impl Counter {
    /// Adds `n`.
    pub fn add(&self, n: u64) {
        match &self.0 {
            Where::Here(number) => drop(number.fetch_add(n, Relaxed)),
            Where::Image(kept) => kept.add(n),
        }
    }

    /// The number.
    pub fn get(&self) -> u64 {
        match &self.0 {
            Where::Here(number) => number.load(Relaxed),
            Where::Image(kept) => kept.get(),
        }
    }

    /// Keeps the number in an image from now on, if that has room for it.
    pub(crate) fn keep(&mut self, kept: Option<Kept>) {
        if let Some(kept) = kept {
            self.0 = Where::Image(kept);
        }
    }
}

/// A number that rises and falls.
#[derive(Debug, Default)]
pub struct Gauge(AtomicI64);

impl Gauge {
    /// Adds `new` and takes `old` away.
    pub fn shift(&self, old: u64, new: u64) {
        self.0.fetch_add(new.cast_signed().wrapping_sub(old.cast_signed()), Relaxed);
    }

    pub(crate) fn add(&self, count: i64) {
        self.0.fetch_add(count, Relaxed);
    }

    /// The number.
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed).max(0).unsigned_abs()
    }
}

/// What one request moved, added up before it is counted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    /// Blocks looked at.
    pub(crate) blocks: u64,
    /// Planes selected in blocks that hold data.
    pub(crate) planes: u64,
    /// Stored bytes fetched.
    pub(crate) stored: u64,
    /// Bytes a plain device would have fetched.
    pub(crate) plain: u64,
    /// Bytes a generically compressing device would have fetched.
    pub(crate) gcomp: u64,
    /// Entries that the modelled cache of entries held.
    pub(crate) index_hits: u64,
    /// Those that it did not hold.
    pub(crate) index_misses: u64,
    /// Entries that GComp's would have held.
    pub(crate) gcomp_index_hits: u64,
    /// Those that it would not.
    pub(crate) gcomp_index_misses: u64,
    /// Blocks that the buffer of an open KV window answered.
    pub(crate) staged_blocks: u64,
    /// Bytes of the lines that they gave.
    pub(crate) staged: u64,
    /// Of `plain`, what is of each device, where the region is interleaved over several.
    pub(crate) plain_of: [u64; MAX_MEMBERS],
    /// Of `stored`, likewise.
    pub(crate) stored_of: [u64; MAX_MEMBERS],
}

impl Tally {
    /// Adds another request's part.
    pub(crate) fn add(&mut self, other: &Self) {
        self.blocks += other.blocks;
        self.planes += other.planes;
        self.stored += other.stored;
        self.plain += other.plain;
        self.gcomp += other.gcomp;
        self.index_hits += other.index_hits;
        self.index_misses += other.index_misses;
        self.gcomp_index_hits += other.gcomp_index_hits;
        self.gcomp_index_misses += other.gcomp_index_misses;
        self.staged_blocks += other.staged_blocks;
        self.staged += other.staged;
        for (all, more) in [(&mut self.plain_of, &other.plain_of), (&mut self.stored_of, &other.stored_of)] {
            all.iter_mut().zip(more).for_each(|(all, more)| *all += more);
        }
    }
}

/// Where an image keeps counters of traffic: the number of the first, and of the first of those
/// that came later.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Numbers {
    pub(crate) first: Option<usize>,
    pub(crate) later: Option<usize>,
}
