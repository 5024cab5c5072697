//! The codec on buffers: blocks of 4 KiB, or windows of a KV cache, coded and kept in memory.

use std::ops::Range;

use lamina_codec::{
    BLOCK_BYTES, BlockWords, Codec, Decoder, Encoder,
    block::{BlockError, Bundle, MAX_BUNDLE, Stored},
    format::Format,
    kv::{KvLayout, Shape, WindowDecoder},
    plane::{self, PlaneMask},
    view::View,
};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::buffer::{Bytes, Memory};

fn value(why: impl ToString) -> PyErr {
    PyValueError::new_err(why.to_string())
}

/// Names of formats and bits of an element.
#[pyfunction]
pub(crate) fn formats() -> Vec<(&'static str, u32)> {
    Format::ALL.iter().map(|format| (format.name(), format.bits())).collect()
}

/// Bits of an element in a view of a format, and S, where a stored value x stands for x·2^S.
#[pyfunction]
pub(crate) fn view_of(format: &str, spelling: &str) -> PyResult<(u32, i32)> {
    let view = View::parse(format.parse().map_err(value)?, spelling).map_err(value)?;
    Ok((view.bits(), view.scale_exp()))
}

/// A block: what is stored of it, and where.
struct Block {
    /// None for a block of zeros.
    stored: Option<Stored>,
    bytes: Range<usize>,
}

/// An array as the device would store it, in memory.
#[pyclass(frozen, module = "lamina._lamina")]
pub(crate) struct Compressed {
    format: Format,
    codec: Codec,
    /// The windows, if it is a KV cache.
    shape: Option<Shape>,
    length: usize,
    blocks: Vec<Block>,
    bytes: Vec<u8>,
}

/// Codes `data`, elements of `format`; of a KV cache, `kv` is channels of a row and tokens of a
/// window.
#[pyfunction]
#[pyo3(signature = (data, format, codec, kv=None))]
pub(crate) fn compress(
    py: Python<'_>,
    data: &Bound<'_, PyAny>,
    format: &str,
    codec: &str,
    kv: Option<(u32, u32)>,
) -> PyResult<Compressed> {
    let format: Format = format.parse().map_err(value)?;
    let codec: Codec = codec.parse().map_err(value)?;
    let shape = kv.map(|(channels, window)| Shape::new(format, &KvLayout::rows(channels, window)));
    let shape = shape.transpose().map_err(value)?.flatten();
    let data = Bytes::of(data)?;
    whole_elements(format, &data)?;
    let memory = data.memory();
    let length = data.len();
    Ok(py.detach(move || {
        let mut coded = Compressed {
            format,
            codec,
            shape,
            length,
            blocks: Vec::new(),
            bytes: Vec::with_capacity(length),
        };
        coded.fill(memory);
        coded
    }))
}

impl Compressed {
    fn fill(&mut self, from: Memory<'_>) {
        let mut encoder = Encoder::new();
        let count = self.length.div_ceil(BLOCK_BYTES);
        self.blocks.reserve(count);
        let Some(shape) = self.shape else {
            let (mut words, mut bundle) = ([0; BLOCK_BYTES], Bundle::new());
            for block in 0..count {
                from.read(block * BLOCK_BYTES, &mut words);
                encoder.block(self.format, self.codec, &words, &mut bundle);
                self.push(&bundle);
            }
            return;
        };
        let (mut window, mut bundles) = (Vec::new(), Vec::new());
        for first in (0..count).step_by(shape.blocks()) {
            window.resize(shape.blocks().min(count - first) * BLOCK_BYTES, 0);
            from.read(first * BLOCK_BYTES, &mut window);
            encoder.window(&shape, first as u64, self.codec, &window, None, &mut bundles);
            for bundle in &bundles {
                self.push(bundle);
            }
        }
    }

    fn push(&mut self, bundle: &Bundle) {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(bundle.bytes());
        self.blocks.push(Block { stored: bundle.stored.clone(), bytes: start..self.bytes.len() });
    }

    /// Puts the bytes of a block that a reader of `mask` fetches where they belong: how many these
    /// are.
    fn fetch(&self, block: &Block, stored: &Stored, mask: PlaneMask, to: &mut [u8; MAX_BUNDLE]) -> usize {
        let (from, mut fetched) = (&self.bytes[block.bytes.clone()], 0);
        stored.runs(mask, |run| {
            to[run.clone()].copy_from_slice(&from[run.clone()]);
            fetched += run.len();
        });
        fetched
    }

    fn read(&self, view: &View, to: Memory<'_>) -> Result<usize, BlockError> {
        let mut decoder = Decoder::new();
        let (mut bundle, mut words, mut fetched) = ([0; MAX_BUNDLE], [0; BLOCK_BYTES], 0);
        let step = BLOCK_BYTES * view.bits() as usize / self.format.bits() as usize;
        let mut out = vec![0; step];
        let mut render = |at: usize, words: &mut BlockWords| {
            view.render_to(words, 0, &mut out);
            to.write(at * step, &out);
        };
        let Some(shape) = self.shape else {
            for (at, block) in self.blocks.iter().enumerate() {
                words.fill(0);
                if let Some(stored) = &block.stored {
                    fetched += self.fetch(block, stored, view.mask(), &mut bundle);
                    decoder.block(stored, view.mask(), &bundle, &mut words)?;
                }
                render(at, &mut words);
            }
            return Ok(fetched);
        };
        let (mut back, mut before) = (Vec::new(), 0);
        for blocks in self.blocks.chunks(shape.blocks()) {
            let mut window =
                WindowDecoder::new(&mut decoder, &shape, before as u64, blocks.len(), view.mask(), &mut back);
            for (at, block) in blocks.iter().enumerate() {
                let Some(stored) = &block.stored else { continue };
                let wanted = window.wanted(stored);
                fetched += self.fetch(block, stored, wanted, &mut bundle);
                window.add(at, stored, wanted, &bundle)?;
            }
            window.finish();
            for (at, words) in back.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().enumerate() {
                render(before + at, words);
            }
            before += blocks.len();
        }
        Ok(fetched)
    }

    fn view(&self, spelling: &str) -> PyResult<View> {
        View::parse(self.format, spelling).map_err(value)
    }
}

#[pymethods]
impl Compressed {
    /// The elements' format.
    #[getter]
    fn format(&self) -> &'static str {
        self.format.name()
    }

    /// The codec of its planes.
    #[getter]
    fn codec(&self) -> &'static str {
        self.codec.name()
    }

    /// Bytes of what was coded.
    #[getter]
    fn nbytes(&self) -> usize {
        self.length
    }

    /// Bytes it takes, without what says where they are.
    #[getter]
    fn stored(&self) -> usize {
        self.bytes.len()
    }

    /// Bytes of the view `spelling`.
    fn view_bytes(&self, spelling: &str) -> PyResult<u64> {
        let elements = self.format.elements_in(self.length as u64);
        self.view(spelling)?.bytes_for(elements).ok_or_else(|| value("more bytes than there can be"))
    }

    /// Writes the view `spelling` to `out`: the stored bytes that this took.
    fn read_into(&self, py: Python<'_>, spelling: &str, out: &Bound<'_, PyAny>) -> PyResult<usize> {
        let view = self.view(spelling)?;
        let (out, wanted) = (Bytes::writable(out)?, self.view_bytes(spelling)?);
        if out.len() as u64 != wanted {
            return Err(value(format!(
                "the view {spelling} has {wanted} bytes, and the array {}",
                out.len()
            )));
        }
        let memory = out.memory();
        py.detach(move || self.read(&view, memory)).map_err(value)
    }
}

/// The bit-planes of `data`, filled up to whole blocks with zeros, written to `out`: plane i, bit i
/// of every element, at i times the bytes of a plane.
#[pyfunction]
pub(crate) fn split_planes(
    py: Python<'_>,
    data: &Bound<'_, PyAny>,
    format: &str,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let (format, data, out) = (planar(format)?, Bytes::of(data)?, Bytes::writable(out)?);
    whole_elements(format, &data)?;
    let blocks = data.len().div_ceil(BLOCK_BYTES);
    planes_fit(&out, blocks)?;
    let (from, to) = (data.memory(), out.memory());
    py.detach(move || {
        let (mut words, mut planes) = ([0; BLOCK_BYTES], [0; BLOCK_BYTES]);
        let bytes = format.plane_bytes();
        for block in 0..blocks {
            from.read(block * BLOCK_BYTES, &mut words);
            plane::split(format, &words, &mut planes);
            for plane in 0..format.planes() {
                to.write((plane * blocks + block) * bytes, &planes[plane::plane_range(format, plane)]);
            }
        }
    });
    Ok(())
}

/// The elements that `planes` give, as [`split_planes`] writes them, written to `out`.
#[pyfunction]
pub(crate) fn join_planes(
    py: Python<'_>,
    planes: &Bound<'_, PyAny>,
    format: &str,
    out: &Bound<'_, PyAny>,
) -> PyResult<()> {
    let (format, planes, out) = (planar(format)?, Bytes::of(planes)?, Bytes::writable(out)?);
    let blocks = out.len().div_ceil(BLOCK_BYTES);
    planes_fit(&planes, blocks)?;
    let (from, to) = (planes.memory(), out.memory());
    py.detach(move || {
        let (mut words, mut block_planes) = ([0; BLOCK_BYTES], [0; BLOCK_BYTES]);
        let bytes = format.plane_bytes();
        for block in 0..blocks {
            for plane in 0..format.planes() {
                let range = plane::plane_range(format, plane);
                from.read((plane * blocks + block) * bytes, &mut block_planes[range]);
            }
            plane::join_block(format, PlaneMask::all(format), &block_planes, &mut words);
            to.write(block * BLOCK_BYTES, &words);
        }
    });
    Ok(())
}

fn planar(format: &str) -> PyResult<Format> {
    let format: Format = format.parse().map_err(value)?;
    if format.planes() == 0 { Err(value("opaque bytes have no planes")) } else { Ok(format) }
}

/// Refuses bytes that end in the middle of an element: no view would have them.
fn whole_elements(format: Format, data: &Bytes) -> PyResult<()> {
    let bytes = data.len() as u64;
    if format.bytes_for(format.elements_in(bytes)) == Some(bytes) {
        return Ok(());
    }
    Err(value(format!(
        "{bytes} bytes are no whole number of elements of {format}, which have {} bits",
        format.bits()
    )))
}

fn planes_fit(planes: &Bytes, blocks: usize) -> PyResult<()> {
    let wanted = blocks * BLOCK_BYTES;
    if planes.len() == wanted {
        return Ok(());
    }
    Err(value(format!("the planes of {blocks} blocks have {wanted} bytes, and the array {}", planes.len())))
}
