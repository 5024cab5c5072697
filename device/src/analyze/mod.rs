//! What the device would make of a checkpoint: ratios by codec and plane, without loading it (TRACE Table I, Table IV, Fig. 16).
//!
//! The rules:
//! * Blocks are coded exactly as the device codes them, by [`Layout::encode`]: each tensor begins a block, the last one is filled
//!   up with zeros. A *ratio* is the tensor's bytes to the bytes of its bundles; index entries are not counted.
//! * A ratio without a number (`None`, `null` in JSON) has nothing stored under it: no elements, or zeros only.
//! * A stored byte is charged in equal parts to the planes that cannot be read without it, so the planes of a bundle sum up to it
//!   even where a codec codes planes jointly.
//! * *Word-major* is the paper's `CXL-GComp`: lz4 and zstd over the words of each 4 KiB block.
//! * The *limit* keeps sign and mantissa raw and gives the exponent its order-0 entropy in each block, side information free; of
//!   integers it is the entropy of the whole value, of opaque bytes there is none. A codec that finds structure in sign or
//!   mantissa, or beyond order 0, can pass it.
//! * *Rounded* is what the paper's Table IV does first: see [`rounding`].
//! * Files are read in pieces by all cores and never held, twice: the scale of `fp8` needs the largest value first.

mod limit;
pub mod plot;
pub mod report;
pub mod rounding;
mod tally;
mod work;

use std::ops::ControlFlow;

pub use self::report::Report;
use crate::codec::Codec;
use crate::layout::Layout;
use crate::load::Progress;
use crate::model::{ModelError, ModelFile, ModelTensor};

/// What to analyse.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnalyzeOptions {
    /// The codecs of the planes.
    pub codecs: Vec<Codec>,
    /// Rows of this many channels, in windows of this many tokens, are KV caches.
    pub kv: Option<KvShape>,
}

impl Default for AnalyzeOptions {
    /// Every codec, no KV.
    fn default() -> Self {
        Self { codecs: Codec::ALL.to_vec(), kv: None }
    }
}

/// What a KV cache looks like: tensors of two dimensions of which the last is `channels` are taken for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Elements of a token's row.
    pub channels: u32,
    /// Tokens of a window.
    pub window: u32,
}

impl KvShape {
    /// The layout of `tensor`.
    fn layout(self, tensor: &ModelTensor) -> Layout {
        match tensor.shape.as_slice() {
            [_, channels] if *channels == u64::from(self.channels) => {
                Layout::Kv(crate::kv::KvLayout::rows(self.channels, self.window))
            }
            _ => Layout::Weight,
        }
    }
}

/// Why an analysis has no result.
#[derive(Debug, thiserror::Error)]
pub enum AnalyzeError {
    /// A file cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// KV was asked for, and there is none.
    #[error(
        "no tensor has two dimensions of which the last is {channels}, so nothing is a KV cache of {channels} channels"
    )]
    NoKv {
        /// The channels asked for.
        channels: u32,
    },
    /// The caller's progress function said so.
    #[error("the analysis was stopped")]
    Stopped,
}

/// Analyses all tensors of `models`, telling `progress` after each piece, which may stop it. `progress` is called from several
/// threads; its bytes are those read, in both passes.
///
/// # Errors
/// [`AnalyzeError`] when a file cannot be read, no tensor is the KV cache that `options` speak of, or `progress` stops it.
pub fn analyze(
    models: &[ModelFile],
    options: &AnalyzeOptions,
    progress: impl Fn(Progress<'_>) -> ControlFlow<()> + Sync,
) -> Result<Report, AnalyzeError> {
    let subjects: Vec<_> = models
        .iter()
        .flat_map(|model| model.tensors().iter().map(move |tensor| (model, tensor)))
        .map(|(model, tensor)| {
            let layout = options.kv.map_or(Layout::Weight, |kv| kv.layout(tensor));
            work::Subject { model, tensor, layout }
        })
        .collect();
    if let Some(KvShape { channels, .. }) = options.kv
        && !subjects.iter().any(|subject| matches!(subject.layout, Layout::Kv(_)))
    {
        return Err(AnalyzeError::NoKv { channels });
    }
    let sums = work::run(&subjects, &options.codecs, progress)?;
    Ok(Report::new(&subjects, &sums, &options.codecs))
}

#[cfg(test)]
mod tests;
