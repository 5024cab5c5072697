//! The passes over the files: pieces of all tensors, taken in turn by a thread for each core.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use parking_lot::Mutex;

use super::tally::{Tally, blocks, windows};
use super::{AnalyzeError, rounding};
use crate::layout::Layout;
use crate::load::{PIECE, Progress};
use crate::model::{ModelFile, ModelTensor, Rearranged, sixes};
use lamina_codec::BLOCK_BYTES;
use lamina_codec::format::Format;
use lamina_codec::view::View;
use lamina_codec::{Codec, Encoder, block::Bundle};

/// The codecs of the word-major comparison.
pub(super) const WORD_CODECS: [Codec; 2] = [Codec::Lz4, Codec::Zstd];

/// A tensor to analyse.
pub(super) struct Subject<'a> {
    pub(super) model: &'a ModelFile,
    pub(super) tensor: &'a ModelTensor,
    pub(super) layout: Layout,
}

impl Subject<'_> {
    pub(super) fn format(&self) -> Format {
        self.tensor.format.parse().unwrap_or(Format::Opaque)
    }
}

/// What a tensor's blocks came to.
#[derive(Clone, Debug)]
pub(super) struct Sums {
    /// As they are.
    pub(super) own: Tally,
    /// Whether the file has four of the elements in three bytes.
    is_packed: bool,
    /// Word-major, in the order of [`WORD_CODECS`].
    pub(super) words: [u64; 2],
    /// Rounded, if values are.
    pub(super) rounded: Option<Rounded>,
}

/// The rounded values' sums.
#[derive(Clone, Debug)]
pub(super) struct Rounded {
    pub(super) fp8: Tally,
    pub(super) int4: Tally,
    /// The scale of fp8.
    pub(super) scale_exp: i32,
    view: View,
}

/// Both passes over all subjects: their sums, in order.
pub(super) fn run(
    subjects: &[Subject<'_>],
    codecs: &[Codec],
    progress: impl Fn(Progress<'_>) -> ControlFlow<()> + Sync,
) -> Result<Vec<Sums>, AnalyzeError> {
    let all: Vec<_> = subjects.iter().collect();
    let floats: Vec<_> = subjects.iter().filter(|subject| rounding::applies(subject.format())).collect();
    let bytes_of =
        |subjects: &[&Subject<'_>]| subjects.iter().map(|subject| subject.tensor.length).sum::<u64>();
    let total = bytes_of(&all) + bytes_of(&floats);
    let read = AtomicU64::new(0);
    let done = |subject: &Subject<'_>, bytes| {
        let bytes = read.fetch_add(bytes, Ordering::Relaxed) + bytes;
        progress(Progress { tensor: &subject.tensor.name, bytes, total })
    };

    let largest: Vec<_> = floats.iter().map(|_| Mutex::new(0_f32)).collect();
    pass(&floats, &done, |index, _, bytes| {
        let found = rounding::largest(floats[index].format(), bytes);
        let mut largest = largest[index].lock();
        *largest = largest.max(found);
    })?;

    let mut largest = largest.into_iter().map(Mutex::into_inner);
    let sums: Vec<_> = subjects
        .iter()
        .map(|subject| {
            let format = subject.format();
            let rounded = rounding::applies(format).then(|| {
                let view = rounding::fp8_view(format, largest.next().expect("one for each that is rounded"));
                Rounded {
                    fp8: Tally::new(Format::Fp8E4m3fn, codecs),
                    int4: Tally::new(Format::Int4, codecs),
                    scale_exp: view.scale_exp(),
                    view,
                }
            });
            let is_packed = subject.tensor.rearranged == Some(Rearranged::Sixes);
            Mutex::new(Sums { own: Tally::new(format, codecs), is_packed, words: [0; 2], rounded })
        })
        .collect();
    let empty: Vec<_> = sums.iter().map(|sums| sums.lock().clone()).collect();
    pass(&all, &done, |index, at, bytes| {
        // Added up here and then there, so that other pieces of the tensor need not wait.
        let mut piece = empty[index].clone();
        piece.code(all[index].layout, at, bytes);
        sums[index].lock().add(&piece);
    })?;
    Ok(sums.into_iter().map(Mutex::into_inner).collect())
}

impl Sums {
    fn code(&mut self, layout: Layout, at: u64, bytes: &[u8]) {
        self.own.code(layout, at, bytes);
        let mut packed = Vec::new();
        let as_in_file = if self.is_packed {
            packed.resize(bytes.len() / sixes::ELEMENTS * sixes::BYTES, 0);
            sixes::gather(bytes, &mut packed);
            // A ratio is to what the file takes.
            self.own.logical_bytes -= (bytes.len() - packed.len()) as u64;
            &packed[..]
        } else {
            bytes
        };
        let (mut encoder, mut bundle) = (Encoder::new(), Bundle::new());
        for block in blocks(as_in_file) {
            for (sum, codec) in self.words.iter_mut().zip(WORD_CODECS) {
                encoder.words(codec, &block.words, &mut bundle);
                *sum += bundle.bytes().len() as u64;
            }
        }
        if let Some(Rounded { fp8, int4, view, .. }) = &mut self.rounded {
            let mut values = Vec::new();
            rounding::to_fp8(view, bytes, &mut values);
            // Pieces begin with a block of each rounded format too.
            let before = self.own.format.elements_in(at);
            fp8.code(layout, before, &values);
            values.clear();
            rounding::to_int4(self.own.format, bytes, &mut values);
            int4.code(layout, before / 2, &values);
            // The last nibble of an odd number is filled up, and is no element.
            int4.elements = self.own.elements;
        }
    }

    fn add(&mut self, other: &Self) {
        self.own.add(&other.own);
        self.words.iter_mut().zip(other.words).for_each(|(sum, bytes)| *sum += bytes);
        if let (Some(sums), Some(other)) = (&mut self.rounded, &other.rounded) {
            sums.fp8.add(&other.fp8);
            sums.int4.add(&other.int4);
        }
    }
}

/// Blocks of the widest format that have as many elements as one of int4.
const BLOCKS_OF_INT4: u64 = 8;

impl Subject<'_> {
    /// Bytes of a piece: whole windows of a KV cache, and whole blocks of what it may be rounded
    /// to.
    fn piece(&self) -> u64 {
        let Some(shape) = windows(self.format(), self.layout) else { return PIECE };
        let least = shape.blocks() as u64 * BLOCKS_OF_INT4 * BLOCK_BYTES as u64;
        (PIECE / least).max(1) * least
    }
}

/// Gives every piece of every subject to `each`, with the subject's index and where the piece
/// begins in it, on all cores.
fn pass(
    subjects: &[&Subject<'_>],
    done: &(impl Fn(&Subject<'_>, u64) -> ControlFlow<()> + Sync),
    each: impl Fn(usize, u64, &[u8]) + Sync,
) -> Result<(), AnalyzeError> {
    // Where each subject's pieces end in the sequence of all pieces.
    let ends: Vec<u64> = subjects
        .iter()
        .scan(0, |pieces, subject| {
            *pieces += subject.tensor.length.div_ceil(subject.piece());
            Some(*pieces)
        })
        .collect();
    let pieces = ends.last().copied().unwrap_or(0);
    let next = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let failure = Mutex::new(None);
    let work = || {
        let mut buffer = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let piece = next.fetch_add(1, Ordering::Relaxed);
            if piece >= pieces {
                return;
            }
            let index = ends.partition_point(|end| *end <= piece);
            let subject = subjects[index];
            let before = index.checked_sub(1).map_or(0, |before| ends[before]);
            let at = (piece - before) * subject.piece();
            let length = subject.piece().min(subject.tensor.length - at);
            buffer.resize(usize::try_from(length).expect("at most a piece"), 0);
            let result = match subject.model.read(subject.tensor, at, &mut buffer) {
                Ok(()) => {
                    each(index, at, &buffer);
                    if done(subject, length).is_break() { Err(AnalyzeError::Stopped) } else { Ok(()) }
                }
                Err(why) => Err(why.into()),
            };
            if let Err(why) = result {
                stop.store(true, Ordering::Relaxed);
                *failure.lock() = Some(why);
            }
        }
    };
    let cores = thread::available_parallelism().map_or(2, usize::from);
    let helpers = usize::try_from(pieces).unwrap_or(cores).min(cores).saturating_sub(1);
    thread::scope(|scope| {
        for _ in 0..helpers {
            scope.spawn(work);
        }
        work();
    });
    failure.into_inner().map_or(Ok(()), Err)
}
