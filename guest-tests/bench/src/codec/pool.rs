//! The bytes that are coded: whole blocks of a file's tensors of one kind.
//!
//! The rules:
//! * A kind is a format and, of KV caches, a side: K and V are coded apart. Which tensors are
//!   caches, and of which side, is told as `lamina analyze --kv` tells it.
//! * A block never spans two tensors, as in the device; what a tensor has behind its last whole
//!   block is left out. Windows of a cache begin with its tensor, and the last one ends with the
//!   tensor's last whole block.
//! * Of more than [`MAX_BLOCKS`] blocks, runs of [`RUN`] blocks, in whole windows, are taken from
//!   all over the file.

use anyhow::{Result, bail};
use lamina_codec::{
    BLOCK_BYTES, BlockWords,
    format::Format,
    kv::{KvLayout, Shape},
};
use lamina_device::{
    analyze::{layers, layout_of},
    layout::Layout,
    model::{ModelFile, ModelTensor},
};

/// Blocks of a table at most: 24 MiB, so that all of MiniLM's weights are in theirs.
pub const MAX_BLOCKS: u64 = 6144;
/// Blocks that stay together: 256 KiB, the largest chunk of ZipNN.
pub const RUN: u64 = 64;

/// What has a table of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// The format.
    pub format: Format,
    /// Of a KV cache: `k`, `v`, or `kv` where no name tells.
    pub side: Option<&'static str>,
}

/// Blocks of one kind from one file.
pub struct Pool {
    /// The file's name.
    pub file: String,
    /// The format.
    pub format: Format,
    /// What they are of a KV cache.
    pub cache: Option<Cache>,
    /// The blocks.
    pub blocks: Vec<BlockWords>,
    /// The scales of the elements, if they were made here; see [`mxfp4`](super::mxfp4).
    pub scales: Vec<u8>,
    /// Bytes of all whole blocks of the kind in the file.
    pub of_bytes: u64,
}

/// A side of a KV cache.
pub struct Cache {
    /// `k`, `v` or `kv`.
    pub side: &'static str,
    /// As it was told.
    pub layout: KvLayout,
    /// The windows that follow from it.
    pub shape: Shape,
    /// The windows whose blocks follow each other.
    pub windows: Vec<Window>,
}

/// A window of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Blocks of the tensor before it.
    pub before: u64,
    /// Its blocks.
    pub blocks: usize,
}

/// The kinds of which a file has whole blocks if caches have this layout, the format with the most
/// bytes first, of each what is no cache first; `opaque` is none.
pub fn kinds(model: &ModelFile, kv: Option<KvLayout>) -> Vec<Kind> {
    let count = |format| {
        let of_format = model.tensors().iter().filter(|tensor| tensor.format == Format::name(format));
        of_format.map(whole_blocks).sum::<u64>()
    };
    let mut formats = Format::ALL.to_vec();
    formats.retain(|format| *format != Format::Opaque);
    formats.sort_by_key(|format| std::cmp::Reverse(count(*format)));
    let sides = [None, Some("k"), Some("v"), Some("kv")];
    let kinds = formats.into_iter().flat_map(|format| sides.map(|side| Kind { format, side }));
    kinds.filter(|kind| tensors(model, *kind, kv).any(|tensor| whole_blocks(tensor) > 0)).collect()
}

impl Pool {
    /// Reads the blocks of `kind` in `model` if caches have this layout.
    ///
    /// # Errors
    /// When the file cannot be read, or the layout cannot be.
    pub fn read(model: &ModelFile, kind: Kind, kv: Option<KvLayout>) -> Result<Self> {
        Self::read_most(model, kind, kv, MAX_BLOCKS)
    }

    /// At most `most` blocks, but one run.
    fn read_most(model: &ModelFile, kind: Kind, kv: Option<KvLayout>, most: u64) -> Result<Self> {
        let mut cache = None;
        if let Some((side, layout)) = kind.side.zip(kv) {
            let shape = Shape::new(kind.format, &layout)?;
            cache = shape.map(|shape| Cache { side, layout, shape, windows: Vec::new() });
        }
        // Blocks are taken window by window, or one by one.
        let step = cache.as_ref().map_or(1, |cache| cache.shape.blocks() as u64);
        let whole: u64 = tensors(model, kind, kv).map(whole_blocks).sum();
        let total: u64 = tensors(model, kind, kv).map(|tensor| whole_blocks(tensor).div_ceil(step)).sum();
        let runs: Vec<_> = if whole <= most {
            vec![(0, total)]
        } else {
            let run = (RUN / step).max(1);
            let count = (most / (run * step)).max(1);
            (0..count).map(|number| (number * total / count, run.min(total))).collect()
        };
        let mut blocks = Vec::new();
        for (start, count) in runs {
            for index in start..start + count {
                let Some((tensor, window)) = window(tensors(model, kind, kv), step, index) else {
                    bail!("{} has no such window of {}", model.path().display(), kind.format);
                };
                let first = blocks.len();
                blocks.resize(first + window.blocks, [0; BLOCK_BYTES]);
                model.read(tensor, window.before * BLOCK_BYTES as u64, blocks[first..].as_flattened_mut())?;
                if let Some(cache) = &mut cache {
                    cache.windows.push(window);
                }
            }
        }
        let name = model.path().file_name().unwrap_or(model.path().as_os_str());
        let file = name.to_string_lossy().into_owned();
        let (scales, of_bytes) = (Vec::new(), whole * BLOCK_BYTES as u64);
        Ok(Self { file, format: kind.format, cache, blocks, scales, of_bytes })
    }

    /// Bytes of the blocks.
    pub fn bytes(&self) -> u64 {
        (self.blocks.len() * BLOCK_BYTES) as u64
    }
}

/// The tensors of a kind.
fn tensors(model: &ModelFile, kind: Kind, kv: Option<KvLayout>) -> impl Iterator<Item = &ModelTensor> {
    model.tensors().iter().filter(move |tensor| {
        let cache = kv.is_some_and(|kv| matches!(layout_of(kv, tensor), Layout::Kv(_)));
        let side = cache.then(|| layers::place(&tensor.name).1);
        tensor.format == kind.format.name() && side == kind.side
    })
}

fn whole_blocks(tensor: &ModelTensor) -> u64 {
    tensor.length / BLOCK_BYTES as u64
}

/// Window number `index` of `tensors`, of `step` blocks each unless its tensor ends before.
fn window<'a>(
    tensors: impl Iterator<Item = &'a ModelTensor>,
    step: u64,
    mut index: u64,
) -> Option<(&'a ModelTensor, Window)> {
    for tensor in tensors {
        let blocks = whole_blocks(tensor);
        if index < blocks.div_ceil(step) {
            let before = index * step;
            let blocks = usize::try_from(step.min(blocks - before)).ok()?;
            return Some((tensor, Window { before, blocks }));
        }
        index -= blocks.div_ceil(step);
    }
    None
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::codec::tests::{write_model, write_shaped};

    /// Blocks whose first two bytes are their number, and `tail` bytes more.
    fn numbered(from: u16, count: u16, tail: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (from..from + count)
            .flat_map(|number| {
                let mut block = [1; BLOCK_BYTES];
                block[..2].copy_from_slice(&number.to_le_bytes());
                block
            })
            .collect();
        bytes.resize(bytes.len() + tail, 0xee);
        bytes
    }

    fn read(model: &ModelFile, format: Format) -> Pool {
        Pool::read(model, Kind { format, side: None }, None).unwrap()
    }

    fn numbers(pool: &Pool) -> Vec<u16> {
        pool.blocks.iter().map(|block| u16::from_le_bytes([block[0], block[1]])).collect()
    }

    fn model(folder: &Path) -> ModelFile {
        let path = folder.join("some.safetensors");
        let tensors = [
            ("a", "BF16", numbered(0, 3, 2)),
            ("b", "F16", numbered(100, 2, 4094)),
            ("c", "BF16", numbered(0, 0, 4094)),
            ("d", "BF16", numbered(3, 400, 0)),
            ("e", "U8", numbered(7, 1, 0)),
            ("f", "F32", numbered(0, 0, 4)),
        ];
        write_model(&path, &tensors);
        ModelFile::open(&path).unwrap()
    }

    #[test]
    fn whole_blocks_of_a_format_are_taken_in_order_and_never_across_tensors() {
        let folder = tempfile::tempdir().unwrap();
        let model = model(folder.path());
        let formats: Vec<_> = kinds(&model, None).iter().map(|kind| (kind.format, kind.side)).collect();
        let wanted = [(Format::Bf16, None), (Format::Fp16, None)];
        assert_eq!(formats, wanted, "opaque has no planes, fp32 no whole block");
        let pool = read(&model, Format::Bf16);
        assert!(pool.cache.is_none());
        assert_eq!(numbers(&pool), (0..403).collect::<Vec<_>>());
        assert_eq!((pool.bytes(), pool.of_bytes), (403 * 4096, 403 * 4096));
        assert_eq!(pool.file, "some.safetensors");
        assert_eq!(numbers(&read(&model, Format::Fp16)), [100, 101]);
    }

    #[test]
    fn of_too_many_blocks_runs_from_all_over_the_file_are_taken() {
        let folder = tempfile::tempdir().unwrap();
        let model = model(folder.path());
        let kind = Kind { format: Format::Bf16, side: None };
        let pool = Pool::read_most(&model, kind, None, 2 * RUN).unwrap();
        let wanted: Vec<_> = (0..64).chain(201..265).collect();
        assert_eq!(numbers(&pool), wanted);
        assert_eq!((pool.bytes(), pool.of_bytes), (128 * 4096, 403 * 4096));
    }

    /// A cache of windows of two blocks, and a weight.
    fn cache(folder: &Path) -> ModelFile {
        let path = folder.join("cache.safetensors");
        let tensor = |name: &str, from, count: u16, channels| {
            let bytes = numbered(from, count, 0);
            (name.to_owned(), "BF16", vec![bytes.len() / 2 / channels, channels], bytes)
        };
        let tensors = [
            tensor("layers.0.k", 0, 5, 32),
            tensor("layers.0.v", 1000, 2, 32),
            tensor("layers.0.weight", 2000, 3, 64),
            tensor("layers.1.k", 5, 400, 32),
            tensor("layers.1.v", 1002, 1, 32),
            tensor("untold", 3000, 1, 32),
        ];
        write_shaped(&path, &tensors);
        ModelFile::open(&path).unwrap()
    }

    #[test]
    fn k_and_v_are_apart_in_windows_that_begin_with_their_tensors() {
        let folder = tempfile::tempdir().unwrap();
        let model = cache(folder.path());
        let layout = KvLayout::rows(32, 128);
        let sides = |kv| kinds(&model, kv).iter().map(|kind| kind.side).collect::<Vec<_>>();
        assert_eq!(sides(None), [None]);
        assert_eq!(sides(Some(layout)), [None, Some("k"), Some("v"), Some("kv")]);
        let read = |side, most| {
            let kind = Kind { format: Format::Bf16, side };
            Pool::read_most(&model, kind, Some(layout), most).unwrap()
        };
        assert_eq!(numbers(&read(None, MAX_BLOCKS)), [2000, 2001, 2002]);
        assert_eq!(numbers(&read(Some("kv"), MAX_BLOCKS)), [3000]);
        let values = read(Some("v"), MAX_BLOCKS);
        assert_eq!(numbers(&values), [1000, 1001, 1002]);
        let values = values.cache.unwrap();
        assert_eq!((values.side, values.layout, values.shape.blocks()), ("v", layout, 2));
        assert_eq!(values.windows, [Window { before: 0, blocks: 2 }, Window { before: 0, blocks: 1 }]);

        let keys = read(Some("k"), MAX_BLOCKS);
        assert_eq!(numbers(&keys), (0..405).collect::<Vec<_>>());
        let windows = &keys.cache.as_ref().unwrap().windows;
        assert_eq!(windows.len(), 203);
        let wanted =
            [(0, 2), (2, 2), (4, 1), (0, 2), (2, 2)].map(|(before, blocks)| Window { before, blocks });
        assert_eq!(windows[..5], wanted);
        let some = read(Some("k"), 2 * RUN);
        // 32 windows from the first on, of which the third is short, and from the 102nd on.
        assert_eq!(numbers(&some), (0..63).chain(201..265).collect::<Vec<_>>());
        assert_eq!((some.bytes(), some.of_bytes), (127 * 4096, 405 * 4096));
    }

    #[test]
    fn a_layout_that_cannot_be_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let model = cache(folder.path());
        let kind = Kind { format: Format::Bf16, side: Some("k") };
        let why = Pool::read(&model, kind, Some(KvLayout::rows(32, 257))).err().unwrap();
        assert!(why.to_string().contains("257"), "{why}");
    }
}
