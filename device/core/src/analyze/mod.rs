//! What the device would make of a checkpoint: ratios by codec and plane, without loading it (TRACE
//! Table I, Table IV, Fig. 16).
//!
//! The rules:
//! * Blocks are coded exactly as the device codes them, those of KV caches by windows
//!   ([`lamina_codec::kv`]): each tensor begins a block, the last one is filled up with zeros. Only
//!   windows of *rounded* caches may end early, where a piece that was read ends. A *ratio* is the
//!   tensor's bytes to the bytes of its bundles; index entries are not counted. Of elements of six
//!   bits, which lie in a byte each on the device, the tensor's bytes are those of the file.
//! * A ratio without a number (`None`, `null` in JSON) has nothing stored under it: no elements, or
//!   zeros only.
//! * A stored byte is charged in equal parts to the planes that cannot be read without it, so the
//!   planes of a bundle sum up to it even where a codec codes planes jointly.
//! * *Word-major* is the paper's `CXL-GComp`: lz4 and zstd over the words of each 4 KiB block.
//! * The *limit* keeps sign and mantissa raw and gives the exponent its order-0 entropy in each
//!   block, side information free; of integers it is the entropy of the whole value, of opaque
//!   bytes there is none. A codec that finds structure in sign or mantissa, or beyond order 0, can
//!   pass it.
//! * Elements and scales of block-scaled tensors are tensors of their own, and summed up in
//!   [`scaled`].
//! * *Rounded* is what the paper's Table IV does first: see [`rounding`].
//! * Files are read in pieces by all cores and never held, twice: the scale of `fp8` needs the
//!   largest value first.

pub mod derived;
pub mod layers;
mod limit;
pub mod packkv;
pub mod plot;
mod plot_layers;
pub mod report;
pub mod rounding;
pub mod scaled;
mod tally;
mod work;

use std::ops::ControlFlow;

pub use self::report::Report;
use crate::layout::Layout;
use crate::load::Progress;
use crate::model::{ModelError, ModelFile, ModelTensor};
use lamina_codec::Codec;
use lamina_codec::format::Format;
use lamina_codec::kv::{KvError, KvLayout, Shape};
use lamina_codec::packkv::PackKvError;

/// What to analyse.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AnalyzeOptions {
    /// The codecs of the planes.
    pub codecs: Vec<Codec>,
    /// Tensors whose dimensions fit this layout are KV caches.
    pub kv: Option<KvLayout>,
}

impl Default for AnalyzeOptions {
    /// Every codec, no KV.
    fn default() -> Self {
        Self { codecs: Codec::ALL.to_vec(), kv: None }
    }
}

/// The layout of `tensor` if caches have this one: `kv` if it has two dimensions of which the last
/// is a row, or four or more of which those behind the first are a paged block.
pub fn layout_of(kv: KvLayout, tensor: &ModelTensor) -> Layout {
    let row = u64::from(kv.stride.unwrap_or(kv.channels));
    let product =
        |dimensions: &[u64]| dimensions.iter().try_fold(1_u64, |product, &n| product.checked_mul(n));
    let fits = match (tensor.shape.as_slice(), kv.paged) {
        ([_, last], _) => *last == row,
        ([_, _, _, inner @ ..], None) if !inner.is_empty() => product(&tensor.shape[2..]) == Some(row),
        ([_, _, _, inner @ ..], Some(paged)) if !inner.is_empty() => {
            product(&tensor.shape[1..]) == row.checked_mul(paged.block.into())
        }
        _ => false,
    };
    if fits { Layout::Kv(kv) } else { Layout::Weight }
}

/// Why an analysis has no result.
#[derive(Debug, thiserror::Error)]
pub enum AnalyzeError {
    /// A file cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// KV was asked for, and there is none.
    #[error("no tensor's dimensions end in rows of {row}, so nothing is a KV cache of {layout}")]
    NoKv {
        /// Elements of a row.
        row: u32,
        /// The layout asked for.
        layout: KvLayout,
    },
    /// PackKV was asked for, and there is nothing for it.
    #[error("no pair of K and V for PackKV in caches of {layout}: {why}")]
    NoPair {
        /// The layout asked for.
        layout: KvLayout,
        /// What is missing.
        why: &'static str,
    },
    /// A cache that PackKV cannot code.
    #[error("tensor {name}, block {block} of 64 tokens: {why}")]
    PackKv {
        /// The tensor's name.
        name: String,
        /// The block's number in it.
        block: u64,
        /// What is wrong with it.
        why: PackKvError,
    },
    /// A KV layout that cannot be.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// The caller's progress function said so.
    #[error("the analysis was stopped")]
    Stopped,
}

/// Analyses all tensors of `models`, [spread](ModelFile::spread), telling `progress` after each
/// piece, which may stop it. `progress` is called from several threads; its bytes are those read,
/// in both passes.
///
/// # Errors
/// [`AnalyzeError`] when a file cannot be read, no tensor is the KV cache that `options` speak of,
/// or `progress` stops it.
pub fn analyze(
    models: &[ModelFile],
    options: &AnalyzeOptions,
    progress: impl Fn(Progress<'_>) -> ControlFlow<()> + Sync,
) -> Result<Report, AnalyzeError> {
    let subjects: Vec<_> = models
        .iter()
        .flat_map(|model| model.tensors().iter().map(move |tensor| (model, tensor)))
        .map(|(model, tensor)| {
            let layout = options.kv.map_or(Layout::Weight, |kv| layout_of(kv, tensor));
            work::Subject { model, tensor, layout }
        })
        .collect();
    if let Some(layout) = options.kv {
        let caches = || subjects.iter().filter(|subject| matches!(subject.layout, Layout::Kv(_)));
        if caches().next().is_none() {
            return Err(AnalyzeError::NoKv { row: layout.stride.unwrap_or(layout.channels), layout });
        }
        // What they may be rounded to has windows too.
        for format in caches().map(work::Subject::format).chain([Format::Fp8E4m3fn, Format::Int4]) {
            Shape::new(format, &layout)?;
        }
    }
    let sums = work::run(&subjects, &options.codecs, progress)?;
    Ok(Report::new(models, &subjects, &sums, &options.codecs, options.kv))
}

#[cfg(test)]
mod tests;
