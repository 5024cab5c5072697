//! What the reads of one thing moved: of a window, a tensor, a view, a partition.

use lamina_store::entry::ENTRY_BYTES;

use super::{
    At, Compared, Counter,
    Slot::{self, First, Later},
    Slots, Tally,
};
use crate::{counters, figures};

counters! {
    /// What reads of one thing moved.
    pub(crate) struct Traffic for Compared {
        /// Index entries fetched, because the modelled cache did not hold them.
        pub(crate) index_misses: Counter, at Later(0), Later(0);
        /// Those that a generically compressing device would have fetched.
        pub(crate) gcomp_index_misses: Counter, at Later(1), Later(1);
    }

    /// What reads moved.
    #[derive(Copy, Default, PartialEq)]
    pub struct TrafficReport by report {
        counted {
            /// Read requests.
            reads: Counter at First(0) => reads "reads" Count;
            /// Bytes given to the host.
            bytes: Counter at First(1) => bytes "read" Bytes;
            /// Blocks looked at.
            blocks: Counter at First(2) => blocks "read_blocks" Count;
            /// Planes selected in blocks that hold data (0 for blocks of words).
            planes: Counter at First(3) => planes_fetched "fetched_planes" Count;
            /// Stored bytes fetched, in whole granules of 64 bytes.
            stored: Counter at First(4) => stored_bytes_fetched "stored_fetched" Bytes;
            /// Blocks that the buffers of open KV windows answered, which no device fetches.
            staged_blocks: Counter at Later(2) => staged_blocks "staged_blocks" Count;
            /// Bytes of the lines of 64 bytes that those gave.
            staged: Counter at Later(3) => staged_bytes "staged" Bytes;
        }
        compared {
            /// Bytes a plain device would have fetched.
            plain: Counter at First(5) => plain_bytes_fetched "plain_fetched" Bytes;
            /// Bytes a generically compressing device would have fetched.
            gcomp: Counter at First(6) => gcomp_bytes_fetched "gcomp_fetched" Bytes;
        }
        computed {
            /// Bytes of index entries fetched besides, 64 each: what the modelled cache did not
            /// hold.
            index_bytes_fetched: Option<u64> = Counter "index_fetched" Bytes,
                |it, given| given.some(entries_bytes(&it.index_misses));
            /// Bytes of index entries a generically compressing device would have fetched besides.
            gcomp_index_bytes_fetched: Option<u64> = Counter "gcomp_index_fetched" Bytes,
                |it, given| given.some(entries_bytes(&it.gcomp_index_misses));
            /// Stored bytes fetched over what a plain device would have fetched.
            of_plain: Option<f64> = Gauge "of_plain" Ratio,
                |it, given| ratio(it.stored.get(), given.some(it.plain.get())?);
            /// The same with index entries.
            of_plain_with_index: Option<f64> = Gauge "of_plain_with_index" Ratio,
                |it, given| {
                    let index = given.some(entries_bytes(&it.index_misses))?;
                    ratio(it.stored.get() + index, given.some(it.plain.get())?)
                };
        }
    }
}

impl Traffic {
    /// How many counters images kept first.
    pub(crate) const COUNTERS: usize = 7;
    /// How many came later.
    pub(crate) const LATER_COUNTERS: usize = 4;

    /// Counts one request that gave the host `bytes`.
    pub(crate) fn count(&self, bytes: u64, tally: &Tally) {
        self.add(1, bytes, tally);
    }

    /// Counts so many reads.
    pub(crate) fn add(&self, reads: u64, bytes: u64, tally: &Tally) {
        let all = [
            (&self.reads, reads),
            (&self.bytes, bytes),
            (&self.blocks, tally.blocks),
            (&self.planes, tally.planes),
            (&self.stored, tally.stored),
            (&self.plain, tally.plain),
            (&self.gcomp, tally.gcomp),
            (&self.index_misses, tally.index_misses),
            (&self.gcomp_index_misses, tally.gcomp_index_misses),
            (&self.staged_blocks, tally.staged_blocks),
            (&self.staged, tally.staged),
        ];
        // Most of a request's are zero, and each addition takes a line from other processors.
        for (counter, count) in all {
            if count > 0 {
                counter.add(count);
            }
        }
    }
}

/// Bytes of so many index entries.
pub(crate) fn entries_bytes(entries: &Counter) -> u64 {
    entries.get() * ENTRY_BYTES as u64
}

/// `part / whole`; nothing while there is no whole.
#[expect(clippy::cast_precision_loss, reason = "a ratio to be looked at; exact to 2^53 bytes")]
pub(crate) fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

/// Requests by size.
#[derive(Debug, Default)]
pub(crate) struct Fills([Counter; Self::BOUNDS.len() + 1]);

figures! {
    /// Requests of one size.
    #[derive(Copy, PartialEq, Eq)]
    pub struct FillsReport {
        reported {
            /// The longest of them, in bytes; each is longer than the size before. Null for what is
            /// longer than all sizes.
            up_to_bytes: Option<u64>;
        }
        figures {
            /// Requests by size, each longer than the size before: pages filled, alone or with what
            /// was read ahead.
            fills: u64 = Counter "fills" Count;
        }
    }
}

impl Fills {
    /// The longest requests of each size, but the last, in bytes.
    pub(crate) const BOUNDS: [u64; 6] = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10];

    /// Counts a request for `bytes`.
    pub(crate) fn count(&self, bytes: u64) {
        if bytes > 0 {
            self.0[Self::BOUNDS.partition_point(|bound| *bound < bytes)].add(1);
        }
    }

    pub(crate) fn report(&self) -> Vec<FillsReport> {
        let sizes = Self::BOUNDS.into_iter().map(Some).chain([None]);
        sizes
            .zip(&self.0)
            .map(|(up_to_bytes, fills)| FillsReport { up_to_bytes, fills: fills.get() })
            .collect()
    }
}

impl Slots for Fills {
    fn slots<'a>(&'a mut self, at: At, all: &mut Vec<(Slot, &'a mut Counter)>) {
        all.extend(self.0.iter_mut().enumerate().map(|(size, fills)| (Slot::First(size).within(at), fills)));
    }
}
