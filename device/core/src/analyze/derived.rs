//! What tensors take as differences to those of another checkpoint, beside what they take alone.

use std::collections::HashMap;
use std::ops::ControlFlow;

use rayon::prelude::*;
use serde::Serialize;

use super::{AnalyzeError, tally::blocks};
use crate::difference::encode_if_shorter;
use crate::load::{PIECE, Progress};
use crate::model::{ModelFile, ModelTensor};
use lamina_codec::{Codec, Encoder, block::Bundle, format::Format};
use lamina_store as store;

/// Tensors as differences to a base.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DerivedReport {
    /// The codec of their planes.
    pub codec: Codec,
    /// Tensors that both checkpoints have.
    pub tensors: Vec<DerivedTensor>,
    /// Tensors that the base has not so, and bytes that they take by themselves.
    pub apart: Vec<DerivedTensor>,
    /// All of these together.
    pub total: DerivedSums,
}

/// A tensor.
#[derive(Clone, Debug, Serialize)]
pub struct DerivedTensor {
    /// Its name.
    pub name: String,
    /// Its format.
    pub format: Format,
    /// What it comes to.
    #[serde(flatten)]
    pub sums: DerivedSums,
}

/// Sums over blocks, in bytes of whole granules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct DerivedSums {
    /// Bytes before coding.
    pub logical_bytes: u64,
    /// Bytes that they take by themselves.
    pub alone_bytes: u64,
    /// Bytes that they take with a base.
    pub derived_bytes: u64,
    /// Blocks.
    pub blocks: u64,
    /// Blocks that would be stored as differences.
    pub differences: u64,
    /// Blocks that are the base's to the bit.
    pub equal: u64,
    /// Logical bytes over bytes alone; null if nothing is stored.
    pub alone_ratio: Option<f64>,
    /// Logical bytes over bytes with a base; null if nothing is stored.
    pub derived_ratio: Option<f64>,
}

impl DerivedSums {
    fn add(&mut self, other: &Self) {
        self.logical_bytes += other.logical_bytes;
        self.alone_bytes += other.alone_bytes;
        self.derived_bytes += other.derived_bytes;
        self.blocks += other.blocks;
        self.differences += other.differences;
        self.equal += other.equal;
    }

    fn with_ratios(mut self) -> Self {
        self.alone_ratio = crate::counters::ratio(self.logical_bytes, self.alone_bytes);
        self.derived_ratio = crate::counters::ratio(self.logical_bytes, self.derived_bytes);
        self
    }
}

/// Codes every block of `models` by itself, and against the same block of the tensor of `bases`
/// that has the same name, dtype and shape.
///
/// # Errors
///
/// When a file cannot be read, or `progress` stops it.
pub fn derived(
    models: &[ModelFile],
    bases: &[ModelFile],
    codec: Codec,
    progress: impl Fn(Progress<'_>) -> ControlFlow<()> + Sync,
) -> Result<DerivedReport, AnalyzeError> {
    let theirs: HashMap<_, _> = bases
        .iter()
        .flat_map(|base| base.tensors().iter().map(move |tensor| (tensor.name.as_str(), (base, tensor))))
        .collect();
    let all = models.iter().flat_map(|model| model.tensors().iter().map(move |tensor| (model, tensor)));
    let all: Vec<_> = all.filter(|(_, tensor)| tensor.length > 0).collect();
    let total = all.iter().map(|(_, tensor)| tensor.length).sum();
    let mut report = DerivedReport { codec, ..DerivedReport::default() };
    let mut bytes = 0;
    for (model, tensor) in all {
        let same = |(_, other): &&(&ModelFile, &ModelTensor)| {
            (&other.format, &other.shape, other.length) == (&tensor.format, &tensor.shape, tensor.length)
        };
        let base = theirs.get(tensor.name.as_str()).filter(same).copied();
        let sums = code((model, tensor), base, codec)?;
        let sums = DerivedSums { logical_bytes: tensor.file_length(), ..sums };
        report.total.add(&sums);
        let format = tensor.format.parse().unwrap_or(Format::Opaque);
        let coded = DerivedTensor { name: tensor.name.clone(), format, sums: sums.with_ratios() };
        if base.is_some() {
            report.tensors.push(coded);
        } else {
            report.apart.push(coded);
        }
        bytes += tensor.length;
        if progress(Progress { tensor: &tensor.name, bytes, total }).is_break() {
            return Err(AnalyzeError::Stopped);
        }
    }
    report.total = report.total.with_ratios();
    Ok(report)
}

/// What a tensor comes to, piece by piece on all cores.
fn code(
    (model, tensor): (&ModelFile, &ModelTensor),
    base: Option<(&ModelFile, &ModelTensor)>,
    codec: Codec,
) -> Result<DerivedSums, AnalyzeError> {
    let format = tensor.format.parse().unwrap_or(Format::Opaque);
    let piece = |number: u64| -> Result<DerivedSums, AnalyzeError> {
        let at = number * PIECE;
        let length = usize::try_from(PIECE.min(tensor.length - at)).expect("at most a piece");
        let (mut own, mut other) = (vec![0; length], vec![0; length]);
        model.read(tensor, at, &mut own)?;
        if let Some((base, of)) = base {
            base.read(of, at, &mut other)?;
        }
        let mut sums = DerivedSums::default();
        let (mut encoder, mut bundle) = (Encoder::new(), Bundle::new());
        for (block, theirs) in blocks(&own).zip(blocks(&other)) {
            encoder.block(format, codec, &block.words, &mut bundle);
            sums.blocks += 1;
            sums.alone_bytes += store::charged(bundle.bytes().len());
            if base.is_some() {
                sums.equal += u64::from(block.words == theirs.words);
                encode_if_shorter(&mut encoder, format, codec, &block.words, &theirs.words, &mut bundle);
                sums.differences += u64::from(bundle.difference);
            }
            sums.derived_bytes += store::charged(bundle.bytes().len());
        }
        Ok(sums)
    };
    let pieces = (0..tensor.length.div_ceil(PIECE)).into_par_iter().map(piece);
    let add = |mut sums: DerivedSums, other: DerivedSums| {
        sums.add(&other);
        sums
    };
    pieces.try_reduce(DerivedSums::default, |one, other| Ok(add(one, other)))
}
