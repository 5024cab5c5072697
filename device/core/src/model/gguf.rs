//! GGUF files: metadata, tensor entries, and tensors at aligned offsets (little-endian, versions 2
//! and 3).
//!
//! * Float tensors and `I8` have the device's formats. Blocks of quantised types are `opaque`:
//!   bytes, kept to the bit. A model's files may have them [in strands](super::strands).
//! * A type that is not known here is `opaque` too, up to the next tensor.
//! * Bytes between tensors are padding, at most [`MAX_GAP`] at a place.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use lamina_codec::format::Format;
use twox_hash::xxhash3_128::Hasher;

use super::checkpoint::{Checkpoint, FileKind, ReadAt, Rewritten, bytes_in, elements};
use super::safetensors::Header;
use super::{MAX_HEADER_BYTES, MAX_NAME_BYTES, ModelError, ModelTensor};

/// What a file begins with.
const MAGIC: &[u8] = b"GGUF";
/// Most dimensions of a tensor.
const MAX_DIMENSIONS: u32 = 8;
/// Tensors' alignment where the metadata does not say.
const ALIGNMENT: u64 = 32;
/// Largest alignment, and most bytes that may lie between two tensors.
const MAX_GAP: u64 = 1 << 20;
/// How deep arrays of arrays may go.
const MAX_DEPTH: u32 = 4;
/// Bytes of a tensor's entry at least: no name, no dimensions.
const MIN_ENTRY: u64 = 8 + 4 + 4 + 8;
/// Bytes read at once.
const PIECE: usize = 64 << 10;
/// The type number of BF16.
const BF16: u32 = 30;

/// The types: number, name, elements and bytes of a block.
const TYPES: [(u32, &str, u64, u64); 33] = [
    (0, "F32", 1, 4),
    (1, "F16", 1, 2),
    (2, "Q4_0", 32, 18),
    (3, "Q4_1", 32, 20),
    (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24),
    (8, "Q8_0", 32, 34),
    (9, "Q8_1", 32, 36),
    (10, "Q2_K", 256, 84),
    (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144),
    (13, "Q5_K", 256, 176),
    (14, "Q6_K", 256, 210),
    (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66),
    (17, "IQ2_XS", 256, 74),
    (18, "IQ3_XXS", 256, 98),
    (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18),
    (21, "IQ3_S", 256, 110),
    (22, "IQ2_S", 256, 82),
    (23, "IQ4_XS", 256, 136),
    (24, "I8", 1, 1),
    (25, "I16", 1, 2),
    (26, "I32", 1, 4),
    (27, "I64", 1, 8),
    (28, "F64", 1, 8),
    (29, "IQ1_M", 256, 56),
    (BF16, "BF16", 1, 2),
    (34, "TQ1_0", 256, 54),
    (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17),
    (40, "NVFP4", 64, 36),
];

/// Why a file is no GGUF file that can be loaded.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// A version that is not read.
    #[error("version {version} of GGUF is not read, 2 and 3 of little-endian machines are")]
    Version {
        /// The version's number as it was read.
        version: u32,
    },
    /// The header passes the end of the file or the bound.
    #[error(
        "{what} at byte {at} would end at byte {end}, past the bound of {bound}: the file is cut short or its header lies"
    )]
    Past {
        /// What was to be read.
        what: &'static str,
        /// Where it begins.
        at: u64,
        /// Where it would end.
        end: u64,
        /// The file's bytes, or the most that a header may have.
        bound: u64,
    },
    /// More tensors than a file of this size has room to name.
    #[error("{count} {what} do not fit in the {left} bytes that are left of the file")]
    TooMany {
        /// Tensors, or entries of the metadata.
        what: &'static str,
        /// How many the header claims.
        count: u64,
        /// Bytes behind the claim.
        left: u64,
    },
    /// A value of a type that there is not.
    #[error("the value at byte {at} has the type {kind}, which there is not")]
    ValueType {
        /// Where it is.
        at: u64,
        /// Its type.
        kind: u32,
    },
    /// Arrays too deep.
    #[error("the array at byte {at} lies in {MAX_DEPTH} others")]
    Depth {
        /// Where it is.
        at: u64,
    },
    /// An alignment that cannot be.
    #[error("general.alignment is {alignment}; it is a power of two up to {MAX_GAP}")]
    Alignment {
        /// The value.
        alignment: u64,
    },
    /// An alignment of another type.
    #[error("general.alignment has the type {kind} of GGUF; it is an unsigned number")]
    AlignmentType {
        /// Its type.
        kind: u32,
    },
    /// A name that is no text.
    #[error("the name of tensor {index} is no UTF-8")]
    Name {
        /// Which tensor, from 0.
        index: u64,
    },
    /// Too many dimensions.
    #[error("tensor {tensor:?} has {dimensions} dimensions, at most {MAX_DIMENSIONS} are read")]
    Dimensions {
        /// The tensor.
        tensor: String,
        /// Its dimensions.
        dimensions: u32,
    },
    /// Rows that are no whole blocks, or too many elements to count.
    #[error(
        "tensor {tensor:?} of type {kind} has the shape {shape:?}, which is no number of whole blocks of {block} elements"
    )]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its type.
        kind: String,
        /// Its shape, outermost dimension first.
        shape: Vec<u64>,
        /// Elements of a block.
        block: u64,
    },
    /// A tensor that does not begin at a multiple of the alignment.
    #[error("tensor {tensor:?} begins at byte {offset} behind the header, no multiple of {alignment}")]
    Unaligned {
        /// The tensor.
        tensor: String,
        /// Where it begins.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// Many bytes that belong to no tensor.
    #[error(
        "bytes {begin} to {end} of the file belong to no tensor; at most {MAX_GAP} are taken for padding"
    )]
    Gap {
        /// Where they begin.
        begin: u64,
        /// Where they end.
        end: u64,
    },
}

/// The format.
pub(crate) struct Gguf;

impl Checkpoint for Gguf {
    fn kind(&self) -> FileKind {
        FileKind::Gguf
    }

    fn begins(&self, start: &[u8]) -> bool {
        start.starts_with(MAGIC)
    }

    fn read(&self, path: &Path, file: &dyn ReadAt, bytes: u64) -> Result<Header, ModelError> {
        let Entries { all, data_start, digest, .. } = entries(path, file, bytes)?;
        let tensors = check(path, all, data_start, bytes)?;
        Ok(Header { tensors, metadata: BTreeMap::new(), digest, data_start, remarks: Vec::new() })
    }

    /// As llama.cpp's own tools do, which leave vectors as they are: its kernels want them so.
    fn can_say(&self, tensor: &ModelTensor, target: Format) -> bool {
        target == Format::Bf16 && tensor.shape.len() > 1
    }

    fn rewrite(
        &self,
        path: &Path,
        raw: &[u8],
        tensors: &[ModelTensor],
        targets: &[Option<Format>],
        _: &[(&str, String)],
    ) -> Result<Rewritten, ModelError> {
        let Entries { all, alignment, data_start, .. } = entries(path, &Raw(raw), raw.len() as u64)?;
        let places: BTreeMap<_, _> = all.iter().map(|entry| (&entry.name, entry.place)).collect();
        let mut header = raw.to_vec();
        let mut order = Vec::with_capacity(tensors.len());
        let mut at = data_start;
        let past = |at| failed(path, past("a tensor", at, u64::MAX, u64::MAX));
        for (index, (tensor, target)) in tensors.iter().zip(targets).enumerate() {
            at = at.checked_next_multiple_of(alignment).ok_or_else(|| past(at))?;
            let place = places.get(&tensor.name).ok_or_else(|| past(at))?;
            let place = usize::try_from(*place).unwrap_or(usize::MAX);
            let mut patch = |from: usize, bytes: &[u8]| {
                if let Some(field) = header.get_mut(from..from.saturating_add(bytes.len())) {
                    field.copy_from_slice(bytes);
                }
            };
            let length = match target {
                Some(format) => {
                    patch(place, &BF16.to_le_bytes());
                    bytes_in(tensor, *format).ok_or_else(|| past(at))?
                }
                None => tensor.length,
            };
            patch(place.saturating_add(4), &(at - data_start).to_le_bytes());
            order.push((index, at));
            at = at.checked_add(length).ok_or_else(|| past(at))?;
        }
        // Files end at a multiple of the alignment, as their tensors do.
        let bytes = at.checked_next_multiple_of(alignment).unwrap_or(at);
        Ok(Rewritten { header, order, bytes })
    }
}

/// A header in memory.
struct Raw<'a>(&'a [u8]);

impl ReadAt for Raw<'_> {
    fn read_exact_at(&self, out: &mut [u8], offset: u64) -> std::io::Result<()> {
        let from = usize::try_from(offset).ok().and_then(|at| self.0.get(at..)?.get(..out.len()));
        out.copy_from_slice(from.ok_or(std::io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// What a header says, unchecked.
struct Entries {
    all: Vec<Entry>,
    alignment: u64,
    data_start: u64,
    digest: u128,
}

/// A tensor's entry.
struct Entry {
    name: String,
    /// Innermost dimension first, as the file has them.
    dimensions: Vec<u64>,
    kind: u32,
    offset: u64,
    /// Where its type stands in the file; the offset follows.
    place: u64,
}

fn failed(path: &Path, why: GgufError) -> ModelError {
    ModelError::Gguf { path: path.into(), why }
}

fn past(what: &'static str, at: u64, end: u64, bound: u64) -> GgufError {
    GgufError::Past { what, at, end, bound }
}

/// Reads a header from its beginning on, a piece at a time.
struct Reader<'a> {
    path: &'a Path,
    file: &'a dyn ReadAt,
    bound: u64,
    at: u64,
    piece: Vec<u8>,
    /// Where the piece begins.
    start: u64,
    digest: Hasher,
}

impl Reader<'_> {
    fn take(&mut self, what: &'static str, out: &mut [u8]) -> Result<(), ModelError> {
        let end = self.end(what, out.len() as u64)?;
        let mut done = 0;
        while done < out.len() {
            let inside = usize::try_from(self.at - self.start).unwrap_or(usize::MAX);
            if inside >= self.piece.len() {
                self.fill()?;
                continue;
            }
            let take = (out.len() - done).min(self.piece.len() - inside);
            out[done..done + take].copy_from_slice(&self.piece[inside..inside + take]);
            self.digest.write(&out[done..done + take]);
            done += take;
            self.at += take as u64;
        }
        debug_assert_eq!(self.at, end);
        Ok(())
    }

    fn fill(&mut self) -> Result<(), ModelError> {
        let length = usize::try_from(self.bound - self.at).unwrap_or(PIECE).min(PIECE);
        self.piece.resize(length, 0);
        self.start = self.at;
        self.file.read_exact_at(&mut self.piece, self.at).map_err(|source| ModelError::ReadHeader {
            path: self.path.into(),
            header: self.at + length as u64,
            source,
        })
    }

    /// Where so many more bytes end, if they are there.
    fn end(&self, what: &'static str, length: u64) -> Result<u64, ModelError> {
        let end = self.at.saturating_add(length);
        if end > self.bound { Err(failed(self.path, past(what, self.at, end, self.bound))) } else { Ok(end) }
    }

    fn skip(&mut self, what: &'static str, length: u64) -> Result<(), ModelError> {
        self.end(what, length)?;
        let mut left = length;
        let mut scrap = [0; 256];
        while left > 0 {
            let take = usize::try_from(left).unwrap_or(scrap.len()).min(scrap.len());
            self.take(what, &mut scrap[..take])?;
            left -= take as u64;
        }
        Ok(())
    }

    fn u32(&mut self, what: &'static str) -> Result<u32, ModelError> {
        let mut bytes = [0; 4];
        self.take(what, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn u64(&mut self, what: &'static str) -> Result<u64, ModelError> {
        let mut bytes = [0; 8];
        self.take(what, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// A text of at most `most` bytes; a longer one is passed over.
    fn text(&mut self, what: &'static str, most: usize) -> Result<Option<Vec<u8>>, ModelError> {
        let length = self.u64(what)?;
        match usize::try_from(length) {
            Ok(length) if length <= most => {
                self.end(what, length as u64)?;
                let mut text = vec![0; length];
                self.take(what, &mut text)?;
                Ok(Some(text))
            }
            _ => self.skip(what, length).map(|()| None),
        }
    }

    /// Passes over a value: its bits, if it is a number.
    fn value(&mut self, kind: u32, depth: u32) -> Result<Option<u64>, ModelError> {
        let at = self.at;
        if let Some(size) = size_of(kind) {
            let mut bytes = [0; 8];
            self.take("a value", &mut bytes[..size])?;
            return Ok(Some(u64::from_le_bytes(bytes)));
        }
        match kind {
            8 => self.text("a text", 0).map(|_| None),
            9 if depth == MAX_DEPTH => Err(failed(self.path, GgufError::Depth { at })),
            9 => {
                let (kind, count) = (self.u32("an array's type")?, self.u64("an array's length")?);
                if let Some(size) = size_of(kind) {
                    self.skip("an array", count.saturating_mul(size as u64))?;
                    return Ok(None);
                }
                // The least that a text or an array takes.
                self.end("an array", count.saturating_mul(8))?;
                for _ in 0..count {
                    self.value(kind, depth + 1)?;
                }
                Ok(None)
            }
            _ => Err(failed(self.path, GgufError::ValueType { at, kind })),
        }
    }
}

/// Bytes of a number's type.
fn size_of(kind: u32) -> Option<usize> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

fn entries(path: &Path, file: &dyn ReadAt, bytes: u64) -> Result<Entries, ModelError> {
    let bound = bytes.min(MAX_HEADER_BYTES);
    let (piece, digest) = (Vec::new(), Hasher::new());
    let mut reader = Reader { path, file, bound, at: 0, piece, start: 0, digest };
    let reader = &mut reader;
    reader.u32("the magic number")?;
    let version = reader.u32("the version")?;
    if version != 2 && version != 3 {
        return Err(failed(path, GgufError::Version { version }));
    }
    let tensors = reader.u64("the number of tensors")?;
    let values = reader.u64("the number of metadata")?;
    let left = bytes - reader.at;
    for (what, count, least) in [("tensors", tensors, MIN_ENTRY), ("metadata", values, 8 + 4 + 1)] {
        if count.checked_mul(least).is_none_or(|least| least > left) {
            return Err(failed(path, GgufError::TooMany { what, count, left }));
        }
    }
    let mut alignment = ALIGNMENT;
    for _ in 0..values {
        let key = reader.text("a key", 64)?;
        let kind = reader.u32("a value's type")?;
        let value = reader.value(kind, 0)?;
        if key.as_deref() == Some(b"general.alignment") {
            alignment = value.ok_or_else(|| failed(path, GgufError::AlignmentType { kind }))?;
        }
    }
    if !alignment.is_power_of_two() || alignment > MAX_GAP {
        return Err(failed(path, GgufError::Alignment { alignment }));
    }
    let mut all = Vec::new();
    for index in 0..tensors {
        let at = reader.at;
        let name =
            reader.text("a tensor's name", MAX_NAME_BYTES)?.ok_or_else(|| ModelError::NameTooLong {
                path: path.into(),
                start: format!("the one at byte {at}"),
                bytes: usize::try_from(reader.at - at).unwrap_or(usize::MAX),
            })?;
        let name = String::from_utf8(name).map_err(|_| failed(path, GgufError::Name { index }))?;
        let dimensions = reader.u32("a tensor's dimensions")?;
        if dimensions > MAX_DIMENSIONS {
            return Err(failed(path, GgufError::Dimensions { tensor: name, dimensions }));
        }
        let dimensions = (0..dimensions).map(|_| reader.u64("a dimension")).collect::<Result<Vec<_>, _>>()?;
        let place = reader.at;
        let (kind, offset) = (reader.u32("a tensor's type")?, reader.u64("a tensor's offset")?);
        all.push(Entry { name, dimensions, kind, offset, place });
    }
    let digest = reader.digest.finish_128();
    let data_start = if tensors == 0 { reader.at } else { reader.at.next_multiple_of(alignment) };
    check_names(path, &all, alignment)?;
    Ok(Entries { all, alignment, data_start: data_start.min(bytes), digest })
}

/// Whether no name is there twice, and every tensor begins where it may.
fn check_names(path: &Path, all: &[Entry], alignment: u64) -> Result<(), ModelError> {
    let mut seen = BTreeSet::new();
    for entry in all {
        if !seen.insert(&entry.name) {
            return Err(ModelError::Duplicate { path: path.into(), tensor: entry.name.clone() });
        }
        if !entry.offset.is_multiple_of(alignment) {
            let (tensor, offset) = (entry.name.clone(), entry.offset);
            return Err(failed(path, GgufError::Unaligned { tensor, offset, alignment }));
        }
    }
    Ok(())
}

/// The tensors by position, if they lie in the file one behind the other.
fn check(
    path: &Path,
    mut entries: Vec<Entry>,
    data_start: u64,
    bytes: u64,
) -> Result<Vec<ModelTensor>, ModelError> {
    entries.sort_by_key(|entry| entry.offset);
    let data = bytes - data_start;
    let ends: Vec<_> = entries.iter().skip(1).map(|next| next.offset).chain([data]).collect();
    let mut tensors: Vec<ModelTensor> = Vec::with_capacity(entries.len());
    let mut covered = 0;
    for (entry, next) in entries.into_iter().zip(ends) {
        let Entry { name, dimensions, kind, offset, .. } = entry;
        let shape: Vec<_> = dimensions.iter().rev().copied().collect();
        let known = TYPES.iter().find(|(number, ..)| *number == kind);
        let (dtype, length) = match known {
            Some((_, dtype, block, size)) => {
                let whole = dimensions.first().copied().unwrap_or(1).is_multiple_of(*block);
                let length =
                    elements(&shape).filter(|_| whole).and_then(|count| (count / block).checked_mul(*size));
                let length = length.ok_or_else(|| {
                    let (tensor, kind) = (name.clone(), (*dtype).to_owned());
                    failed(path, GgufError::Shape { tensor, kind, shape: shape.clone(), block: *block })
                })?;
                ((*dtype).to_owned(), length)
            }
            None => (format!("type {kind}"), next.saturating_sub(offset)),
        };
        let end = offset.saturating_add(length);
        if end > data {
            return Err(ModelError::PastEnd { path: path.into(), tensor: name, end, data });
        }
        if offset < covered {
            let other = tensors.pop().map(|tensor| tensor.name).unwrap_or_default();
            return Err(ModelError::Overlap {
                path: path.into(),
                tensor: name,
                begin: offset,
                other,
                end: covered,
            });
        }
        gap(path, data_start + covered, data_start + offset)?;
        covered = end;
        let format = match kind {
            0 => "fp32",
            1 => "fp16",
            24 => "int8",
            BF16 => "bf16",
            _ => "opaque",
        };
        tensors.push(ModelTensor {
            name,
            dtype,
            shape,
            format,
            offset: data_start + offset,
            length,
            rearranged: None,
        });
    }
    gap(path, data_start + covered, bytes)?;
    Ok(tensors)
}

/// Refuses bytes between tensors that are too many.
fn gap(path: &Path, begin: u64, end: u64) -> Result<(), ModelError> {
    if end - begin > MAX_GAP { Err(failed(path, GgufError::Gap { begin, end })) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file with one value of the metadata and one empty tensor of F32.
    fn file(key: &str, value: &[u8], dimensions: &[u64]) -> Vec<u8> {
        let text = |text: &str| [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat();
        let mut file = [MAGIC, &3_u32.to_le_bytes(), &1_u64.to_le_bytes(), &1_u64.to_le_bytes()].concat();
        file.extend([text(key), value.to_vec(), text("x")].concat());
        file.extend(u32::try_from(dimensions.len()).unwrap().to_le_bytes());
        file.extend(dimensions.iter().flat_map(|n| n.to_le_bytes()));
        file.extend([0; 4 + 8]);
        file.resize(file.len().next_multiple_of(32), 0);
        file
    }

    fn read(file: &[u8]) -> Result<Vec<ModelTensor>, String> {
        let header = Gguf.read(Path::new("m.gguf"), &Raw(file), file.len() as u64);
        header.map(|header| header.tensors).map_err(|why| why.to_string())
    }

    fn number(kind: u32, number: u32) -> Vec<u8> {
        [kind.to_le_bytes(), number.to_le_bytes()].concat()
    }

    #[test]
    fn a_dimension_of_0_makes_a_tensor_empty_wherever_it_is() {
        for dimensions in [[1 << 63, 1 << 63, 0], [0, 1 << 63, 1 << 63]] {
            let tensors = read(&file("k", &number(4, 1), &dimensions)).unwrap();
            assert_eq!(tensors[0].length, 0);
        }
        let why = read(&file("k", &number(4, 1), &[1 << 63, 1 << 63])).unwrap_err();
        assert!(why.contains("no number of whole blocks"), "{why}");
    }

    #[test]
    fn an_alignment_is_a_number() {
        read(&file("general.alignment", &number(4, 32), &[0])).unwrap();
        let text = [&8_u32.to_le_bytes()[..], &2_u64.to_le_bytes(), b"32"].concat();
        for (value, says) in [
            (text, "general.alignment has the type 8 of GGUF; it is an unsigned number"),
            (number(4, 3), "general.alignment is 3; it is a power of two up to 1048576"),
        ] {
            let why = read(&file("general.alignment", &value, &[0])).unwrap_err();
            assert_eq!(why, format!("m.gguf: {says}"));
        }
    }
}
