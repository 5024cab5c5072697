//! A window to bundles.

use super::{
    bases,
    delta::{self, ColumnBases, Field},
    order::{ByColumns, Order},
    repeats::Repeats,
    shape::Shape,
};
use crate::{
    BLOCK_BYTES, Codec, Encoder,
    block::{Bundle, is_zero},
    head::{self, Details},
    lines::Lines,
    plane, signs, tree,
    workspace::{Aligned, BlockEncoder},
};

/// Of so many blocks, one tells the best way.
const SAMPLE: usize = 12;
/// Differences are taken unless another way takes less by more than one in so many bytes of the
/// exponents: a few blocks do not tell less.
const LITTLE: usize = 32;
/// The same of codecs of bytes, which make more of differences than counts tell.
const LITTLE_OF_BYTES: usize = 16;
/// Differences are for channels that have at least so many elements in a window: every channel has
/// a base in every block.
const MIN_RUN: usize = 8;

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

/// What a window is coded in.
#[derive(Default)]
pub(crate) struct Scratch {
    rows: Vec<u8>,
    compact_rows: Lines<u8>,
    major: Lines<u8>,
    runs: Vec<u16>,
    bases: Vec<u8>,
    details: Vec<u8>,
    /// A block in one way or another.
    trial: Bundle,
}

/// See [`Encoder::window`].
pub(crate) fn encode(
    encoder: &mut Encoder,
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
    if bytes.iter().all(|byte| *byte == 0) {
        bundles.iter_mut().for_each(Bundle::clear);
        return Coded::default();
    }
    if way != Some(Coding::Plain) {
        let order = shape.order(before, blocks.len());
        if let Some(coded) = transformed(encoder, shape, order, codec, bytes, way, bundles) {
            return coded;
        }
    }
    for (words, bundle) in blocks.iter().zip(bundles) {
        bundle.encode(&mut encoder.block, shape.format(), codec, words);
    }
    Coded::default()
}

/// A window to be coded in channel-major order.
struct Transformed<'a> {
    encoder: &'a mut BlockEncoder,
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

/// Codes a window channel by channel, if that is best and every block fits.
fn transformed(
    encoder: &mut Encoder,
    shape: &Shape,
    order: Order,
    codec: Codec,
    bytes: &[u8],
    way: Option<Coding>,
    bundles: &mut [Bundle],
) -> Option<Coded> {
    let Scratch { rows, compact_rows, major, runs, bases, details, trial } = &mut encoder.window;
    let mut window = bytes;
    if let Some(paged) = shape.paged() {
        rows.resize(bytes.len(), 0);
        paged.gather_rows(bytes, rows);
        window = rows;
    }
    let repeats = Repeats::find(&order, window);
    let mut kept = order;
    if let Some(repeats) = &repeats {
        compact_rows.make_at_least(bytes.len());
        repeats.compact(&order, window, compact_rows);
        kept = repeats.compact_order(&order);
        window = compact_rows;
    }
    let repeated_rows = repeats.as_ref().map_or(0, |_| order.rows() - kept.rows());
    let mut work = Transformed {
        encoder: &mut encoder.block,
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
    let coding = match way {
        Some(Coding::Deltas) if !work.has_deltas() => Coding::Channels,
        Some(coding) => coding,
        None => work.choose(trial),
    };
    if coding == Coding::Plain {
        return None;
    }
    work.arrange(coding);
    for (block, bundle) in bundles.iter_mut().enumerate() {
        work.encode(block, coding, bundle);
        if !bundle.fits() {
            return None;
        }
    }
    Some(Coded { coding, repeated_rows })
}

impl Transformed<'_> {
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

    /// The blocks by which a way is chosen.
    fn samples(&self) -> impl Iterator<Item = usize> + use<> {
        let used = self.used();
        (SAMPLE / 2..used).step_by(SAMPLE).chain((used <= SAMPLE / 2).then_some((used - 1) / 2))
    }

    /// The way in which the samples take least. Where there are exponents, it is found by counting
    /// them; the samples are coded in every way otherwise.
    #[inline(never)]
    fn choose(&mut self, trial: &mut Bundle) -> Coding {
        let is_counted = Field::of(self.shape.format()).is_some();
        let mut costs = [0; Coding::ALL.len()];
        let ways = Coding::ALL.map(|coding| (coding, self.allows(coding)));
        let ways = || ways.into_iter().filter_map(|(coding, allowed)| allowed.then_some(coding));
        let least = |costs: &[usize; Coding::ALL.len()]| {
            ways().min_by_key(|coding| costs[*coding as usize]).expect("one way is always allowed")
        };
        for block in self.samples() {
            for coding in ways() {
                costs[coding as usize] += if is_counted {
                    self.price(block, coding)
                } else {
                    self.encode(block, coding, trial);
                    trial.bytes().len()
                };
            }
        }
        let deltas = &mut costs[Coding::Deltas as usize];
        *deltas -= *deltas / if self.codec == Codec::Tree { LITTLE } else { LITTLE_OF_BYTES };
        // Signs are looked at where they may still lead to another way.
        if is_counted && least(&costs) == Coding::Plain {
            for block in self.samples() {
                let [plain, by_channel @ ..] = &mut costs;
                let (in_order, in_channels) = self.sign_bytes(block);
                *plain += in_order;
                for cost in by_channel {
                    *cost += in_channels;
                }
            }
        }
        least(&costs)
    }

    /// About the bytes that a block's exponents take in a way, with what a head says of them. Signs
    /// are left out; mantissas are as noisy in any order.
    fn price(&mut self, block: usize, coding: Coding) -> usize {
        let format = self.shape.format();
        if coding == Coding::Plain {
            return tree::cost(format, &self.bytes.as_chunks().0[block], &mut self.encoder.tree);
        }
        self.arrange(Coding::Channels);
        self.details.clear();
        let field = Field::of(format).filter(|_| coding == Coding::Deltas);
        let words = &mut self.major.as_chunks_mut().0[block];
        if let Some(field) = field {
            self.order.block_runs(block, self.runs);
            self.bases.resize(self.runs.len(), 0);
            delta::subtract(field, self.runs, words, self.bases);
            bases::write(self.bases, self.details);
        }
        let stream = tree::cost(format, words, &mut self.encoder.tree);
        if let Some(field) = field {
            delta::restore(field, self.runs, self.bases, words);
        }
        head::length(self.details.len()) + stream
    }

    /// Bytes that the signs of a block take in address order, and channel by channel.
    fn sign_bytes(&mut self, block: usize) -> (usize, usize) {
        let format = self.shape.format();
        let raw = format.plane_bytes();
        let Aligned(planes) = &mut *self.encoder.split;
        plane::split(format, &self.bytes.as_chunks().0[block], planes);
        let is_constant =
            |signs: &[u8]| signs.iter().all(|byte| *byte == signs[0] && matches!(byte, 0 | 0xff));
        let in_order = if is_constant(&planes[..raw]) { 0 } else { raw };
        plane::split(format, &self.major.as_chunks().0[block], planes);
        let mut stream = [0; signs::MAX_PLANE + signs::SLACK];
        let in_channels = if is_constant(&planes[..raw]) {
            0
        } else {
            signs::Kernel::best().encode(format, &planes[..raw], raw, &mut stream).unwrap_or(raw)
        };
        (in_order, in_channels)
    }

    fn has_deltas(&self) -> bool {
        Field::of(self.shape.format()).is_some() && self.order.rows() >= MIN_RUN
    }

    /// Puts what is kept in the order that it is coded in. Differences are made on the way if whole
    /// rows are all there is and columns are no longer than blocks, or else as a block is coded, as
    /// where [`Self::choose`] has put the window in order already. A column of which two blocks
    /// have parts has the same base in both then, and one for each otherwise.
    fn arrange(&mut self, coding: Coding) {
        let coding = match coding {
            Coding::Plain => return,
            Coding::Deltas if !self.columns.is_some_and(|columns| columns.fit_blocks()) => Coding::Channels,
            coding => coding,
        };
        if self.arranged.is_some() {
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
        if coding == Coding::Plain {
            return bundle.encode(self.encoder, format, self.codec, &self.bytes.as_chunks().0[block]);
        }
        self.arrange(Coding::Channels);
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
        bundle.encode_with_header(self.encoder, format, self.codec, words, &details);
    }
}

#[cfg(test)]
mod tests;
