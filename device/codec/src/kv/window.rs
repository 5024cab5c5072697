//! A window to bundles.

use std::cell::RefCell;

use super::{
    bases,
    delta::{self, ColumnBases, Field},
    order::{ByColumns, Order},
    repeats::{Look, Repeats, SEVEN},
    shape::Shape,
};
use crate::{
    BLOCK_BYTES, Codec,
    block::{Bundle, Effort, is_zero},
    head::Details,
    lines::Lines,
    tree::Within,
};

/// Of so many blocks, one is coded in every way to find the best.
const SAMPLE: usize = 12;
/// A way that was best is used for further windows of about so many blocks before all are tried again,
const MOST_BLOCKS_MORE: usize = 96;
/// but not for fewer or more windows than these,
const USES: (usize, usize) = (3, 32);
/// and for twice as many each time that it is clearly the best again, by a part in so many,
const CLEARLY: usize = 48;
/// up to so many times as many,
const MOST_TIMES: usize = 4;
/// but only as long as a block in it takes what it took then, within a part in so many.
const DRIFT: usize = 16;
/// Channels without differences are coded and decoded quicker, and may take more than with them, a part in so many, unless there is time for the best.
const LITTLE: usize = 192;
/// Differences are for channels that have at least so many elements in a window: every channel has a base in every block.
const LEAST_RUN: usize = 8;

/// How a window is coded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Coding {
    /// In address order, as weights are.
    #[default]
    Plain,
    /// Channel by channel.
    Channels,
    /// Channel by channel, exponents as differences.
    Deltas,
}

impl Coding {
    /// Every way, `ALL[c as usize] == c`.
    pub const ALL: [Self; 3] = [Self::Plain, Self::Channels, Self::Deltas];

    /// The name used in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Channels => "channels",
            Self::Deltas => "deltas",
        }
    }
}

/// What was made of a window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Coded {
    /// How it is coded.
    pub coding: Coding,
    /// Rows that were left out because they repeat.
    pub repeated_rows: usize,
}

/// Room to work in.
struct Scratch {
    effort: Effort,
    rows: Vec<u8>,
    kept_rows: Lines<u8>,
    major: Lines<u8>,
    runs: Vec<u16>,
    bases: Vec<u8>,
    details: Vec<u8>,
    /// A block in every way.
    samples: [Bundle; Coding::ALL.len()],
    /// What was best before, by codec.
    best: [Option<Best>; Codec::ALL.len()],
}

/// The way that was best for a window.
struct Best {
    shape: Shape,
    coding: Coding,
    /// A block of it,
    block: usize,
    /// and what that took.
    bytes: usize,
    /// Whether all rows of the next window are looked at.
    look_at_all: bool,
    /// Windows that were coded so since.
    uses: usize,
    /// How many times as many as at least.
    times: usize,
}

impl Best {
    /// Whether it is to be tried on one more window, of so many blocks.
    fn serves(&self, shape: &Shape, blocks: usize) -> bool {
        let uses = (MOST_BLOCKS_MORE / blocks).clamp(USES.0, USES.1);
        self.shape == *shape && self.uses < self.times * uses
    }

    /// The rows of the next window that are looked at: in turn all of them, if not all at once.
    fn look(&self) -> Look {
        if self.look_at_all { Look::All } else { Look::Three { from: self.uses % SEVEN } }
    }
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = const { RefCell::new(Scratch {
        effort: Effort::Quick, rows: Vec::new(), kept_rows: Lines::none(), major: Lines::none(), runs: Vec::new(), bases: Vec::new(), details: Vec::new(), samples: [const { Bundle::new() }; Coding::ALL.len()], best: [const { None }; Codec::ALL.len()],
    }) };
}

/// Codes the window of `shape` that begins `before` blocks behind the tensor's beginning and holds `bytes`, whole blocks: a bundle each.
///
/// `way` is how, or the best there is if not given, which is asked anew only now and then. [`Coding::Plain`] leaves no row out.
///
/// # Panics
/// If `bytes` are not whole blocks.
pub fn encode(
    shape: &Shape,
    before: u64,
    codec: Codec,
    bytes: &[u8],
    way: Option<Coding>,
    bundles: &mut Vec<Bundle>,
) -> Coded {
    encode_with(Effort::Quick, shape, before, codec, bytes, way, bundles)
}

/// As [`encode`], with this effort.
///
/// # Panics
/// If `bytes` are not whole blocks.
pub fn encode_with(
    effort: Effort,
    shape: &Shape,
    before: u64,
    codec: Codec,
    bytes: &[u8],
    way: Option<Coding>,
    bundles: &mut Vec<Bundle>,
) -> Coded {
    let (blocks, rest) = bytes.as_chunks::<BLOCK_BYTES>();
    assert!(rest.is_empty(), "a window is whole blocks");
    bundles.resize_with(blocks.len(), Bundle::new);
    for bundle in bundles.iter_mut() {
        bundle.set_effort(effort);
        bundle.set_within(Within::Window(None));
    }
    if bytes.iter().all(|byte| *byte == 0) {
        bundles.iter_mut().for_each(Bundle::clear);
        return Coded::default();
    }
    let mut done = None;
    if way != Some(Coding::Plain) {
        let order = shape.order(before, blocks.len());
        let coded = SCRATCH.with_borrow_mut(|scratch| {
            scratch.effort = effort;
            for sample in &mut scratch.samples {
                sample.set_effort(effort);
            }
            if effort == Effort::Thorough {
                scratch.best = [const { None }; Codec::ALL.len()];
            }
            transformed(shape, order, codec, bytes, way, scratch, bundles)
        });
        match coded {
            Ok(coded) => return coded,
            Err(block) => done = block,
        }
    }
    for (block, (words, bundle)) in blocks.iter().zip(bundles).enumerate() {
        if Some(block) != done {
            bundle.set_within(Within::Window(None));
            bundle.encode(shape.format(), codec, words);
        }
    }
    Coded::default()
}

/// A window to be coded in channel-major order.
struct Transformed<'a> {
    shape: &'a Shape,
    order: Order,
    /// The columns of its blocks, if whole rows are all there is.
    columns: Option<ByColumns>,
    codec: Codec,
    /// It as the host sees it.
    bytes: &'a [u8],
    /// The rows that are kept.
    rows: &'a [u8],
    /// These in channel-major order, once that was asked for,
    major: &'a mut Lines<u8>,
    /// and how: of [`Coding::Deltas`], all exponents are differences.
    arranged: Option<Coding>,
    /// The list of repeated rows, if there are any.
    repeats: Option<Repeats>,
    runs: &'a mut Vec<u16>,
    /// The bases of the block that is coded, or of all columns if they are arranged as differences.
    bases: &'a mut Vec<u8>,
    details: &'a mut Vec<u8>,
}

/// Codes a window channel by channel, if that is best and every block fits; if not, some block may be in address order in its bundle already.
fn transformed(
    shape: &Shape,
    order: Order,
    codec: Codec,
    bytes: &[u8],
    way: Option<Coding>,
    scratch: &mut Scratch,
    bundles: &mut [Bundle],
) -> Result<Coded, Option<usize>> {
    let Scratch { effort, rows, kept_rows, major, runs, bases, details, samples, best } = scratch;
    let best = &mut best[codec as usize];
    let mut window = bytes;
    if let Some(paged) = shape.paged() {
        rows.resize(bytes.len(), 0);
        paged.to_rows(bytes, rows);
        window = rows;
    }
    let is_known = best.as_ref().is_some_and(|best| way.is_none() && best.serves(shape, bundles.len()));
    let look = best.as_ref().filter(|_| is_known).map_or(Look::All, Best::look);
    let repeats = Repeats::find(&order, window, look);
    let mut kept = order;
    if let Some(repeats) = &repeats {
        kept_rows.make_at_least(bytes.len());
        repeats.compact(&order, window, kept_rows);
        kept = repeats.compact_order(&order);
        window = kept_rows;
    }
    let repeated_rows = repeats.as_ref().map_or(0, |_| order.rows() - kept.rows());
    let mut work = Transformed {
        shape,
        order: kept,
        columns: kept.by_columns(),
        codec,
        bytes,
        rows: window,
        major,
        arranged: None,
        repeats,
        runs,
        bases,
        details,
    };

    let (coding, done) = match way {
        Some(Coding::Deltas) if !work.has_deltas() => (Coding::Channels, None),
        Some(coding) => (coding, None),
        None => {
            if let Some((coding, block)) = is_known.then(|| work.again(best, bundles)).flatten() {
                (coding, Some(block))
            } else {
                let (coding, is_clear, block) = work.choose(*effort, samples);
                let sample = &samples[coding as usize];
                let before =
                    best.as_ref().filter(|best| is_clear && best.shape == *shape && best.coding == coding);
                let times = before.map_or(1, |best| MOST_TIMES.min(2 * best.times));
                *best = block.map(|block| {
                    bundles[block].copy_from(sample);
                    // Whatever made this window another one may be rows that were not looked at.
                    let look_at_all = look != Look::All || work.repeats.is_some();
                    let bytes = sample.bytes().len();
                    Best { shape: *shape, coding, block, bytes, look_at_all, uses: 0, times }
                });
                (coding, block)
            }
        }
    };
    if coding == Coding::Plain {
        return Err(done);
    }
    work.arrange(coding);
    for (block, bundle) in bundles.iter_mut().enumerate() {
        if Some(block) != done {
            work.encode(block, coding, bundle);
        }
        if !bundle.fits() {
            return Err(None);
        }
    }
    Ok(Coded { coding, repeated_rows })
}

impl Transformed<'_> {
    /// The way that was best before, if it is likely to be so again, and a block that is coded in it now.
    fn again(&mut self, was_best: &mut Option<Best>, bundles: &mut [Bundle]) -> Option<(Coding, usize)> {
        let best = was_best.as_mut()?;
        best.uses += 1;
        best.look_at_all = self.repeats.is_some();
        let (coding, block) = (best.coding, best.block);
        if !self.allows(coding) || block >= self.used() {
            return None;
        }
        self.arrange(coding);
        self.encode(block, coding, &mut bundles[block]);
        let taken = bundles[block].bytes().len();
        if taken.abs_diff(best.bytes) <= best.bytes / DRIFT {
            return Some((coding, block));
        }
        self.undo(block, coding);
        *was_best = None;
        None
    }

    /// Whether the window may be coded so.
    fn allows(&self, coding: Coding) -> bool {
        match coding {
            Coding::Plain => self.repeats.is_none(),
            Coding::Channels => true,
            Coding::Deltas => self.has_deltas(),
        }
    }

    /// Blocks that hold something.
    fn used(&self) -> usize {
        (self.order.elements * self.order.width).div_ceil(BLOCK_BYTES)
    }

    /// The way in which some of the blocks take least, or channels where differences take little less; whether all others take clearly more; and a block that `samples` have in every way.
    #[inline(never)]
    fn choose(
        &mut self,
        effort: Effort,
        samples: &mut [Bundle; Coding::ALL.len()],
    ) -> (Coding, bool, Option<usize>) {
        let mut costs = [0; Coding::ALL.len()];
        let ways = Coding::ALL.map(|coding| (coding, self.allows(coding)));
        let ways = || ways.into_iter().filter_map(|(coding, allowed)| allowed.then_some(coding));
        let used = self.used();
        let mut last = None;
        for block in (SAMPLE / 2..used).step_by(SAMPLE).chain((used <= SAMPLE / 2).then_some((used - 1) / 2))
        {
            for coding in ways() {
                let sample = &mut samples[coding as usize];
                self.encode(block, coding, sample);
                self.undo(block, coding);
                costs[coding as usize] += sample.bytes().len();
            }
            last = Some(block);
        }
        let mut best =
            ways().min_by_key(|coding| costs[*coding as usize]).expect("one way is always allowed");
        let least = costs[best as usize];
        let in_channels = costs[Coding::Channels as usize];
        if effort == Effort::Quick && best == Coding::Deltas && in_channels - least <= least / LITTLE {
            best = Coding::Channels;
        }
        let is_clear = |coding| costs[coding as usize].saturating_sub(costs[best as usize]) > least / CLEARLY;
        let is_clear = ways().all(|coding| coding == best || is_clear(coding));
        (best, is_clear, last)
    }

    fn has_deltas(&self) -> bool {
        Field::of(self.shape.format()).is_some() && self.order.rows() >= LEAST_RUN
    }

    /// Puts what is kept in the order that it is coded in. Differences are made on the way if whole rows are all there is and columns are no longer than blocks, or else as a block is coded.
    /// A column of which two blocks have parts has the same base in both then, and one for each otherwise, as in the samples of [`Self::choose`].
    fn arrange(&mut self, coding: Coding) {
        let coding = match coding {
            Coding::Plain => return,
            Coding::Deltas if !self.columns.is_some_and(|columns| columns.fit_blocks()) => Coding::Channels,
            coding => coding,
        };
        if self.arranged == Some(coding) {
            return;
        }
        self.arranged = Some(coding);
        let length = self.order.elements * self.order.width;
        self.major.make_at_least(self.bytes.len());
        let major = &mut self.major[..length];
        let field = Field::of(self.shape.format()).filter(|_| coding == Coding::Deltas);
        let deltas = field.map(|field| {
            self.bases.resize(self.order.columns, 0);
            ColumnBases { field, bases: self.bases }
        });
        self.order.channel_major(deltas, &self.rows[..length], major);
        self.major[length..self.bytes.len()].fill(0);
    }

    /// Codes block `block`. Its exponents are left as differences if it is coded so.
    fn encode(&mut self, block: usize, coding: Coding, bundle: &mut Bundle) {
        let format = self.shape.format();
        // In address order all blocks have all channels, and differences are other values than exponents.
        bundle.set_within(Within::Window(match coding {
            Coding::Plain => None,
            Coding::Channels => Some(2 * block),
            Coding::Deltas => Some(2 * block + 1),
        }));
        if coding == Coding::Plain {
            return bundle.encode(format, self.codec, &self.bytes.as_chunks().0[block]);
        }
        if self.arranged.is_none() {
            self.arrange(Coding::Channels);
        }
        let words = &mut self.major.as_chunks_mut::<BLOCK_BYTES>().0[block];
        self.details.clear();
        let repeats = self.repeats.as_ref().filter(|_| block == 0);
        if let Some(repeats) = repeats {
            repeats.write(self.details);
        }
        let field = Field::of(format).filter(|_| coding == Coding::Deltas);
        let mut bases = &[][..];
        if let Some(field) = field {
            bases = if self.arranged == Some(Coding::Deltas)
                && let Some(columns) = self.columns
            {
                &self.bases[columns.of(block)]
            } else {
                self.order.block_runs(block, self.runs);
                self.bases.resize(self.runs.len(), 0);
                delta::subtract(field, self.runs, words, self.bases);
                &self.bases[..]
            };
            bases::write(bases, self.details);
        }
        // Zeros with bases of zero are zeros.
        let says_nothing = repeats.is_none() && (field.is_none() || bases.iter().all(|base| *base == 0));
        if says_nothing && is_zero(words) {
            return bundle.clear();
        }
        let details =
            Details { delta: field.is_some(), repeats: repeats.is_some(), bytes: &self.details[..] };
        bundle.encode_headed(format, self.codec, words, &details);
    }

    /// Makes exponents again of the differences of the block that was coded last, or has all arranged anew.
    fn undo(&mut self, block: usize, coding: Coding) {
        if self.arranged == Some(Coding::Deltas) {
            self.arranged = None;
            return;
        }
        if let Some(field) = Field::of(self.shape.format()).filter(|_| coding == Coding::Deltas) {
            let words = &mut self.major.as_chunks_mut::<BLOCK_BYTES>().0[block];
            delta::restore(field, self.runs, self.bases, words);
        }
    }
}

#[cfg(test)]
mod tests;
