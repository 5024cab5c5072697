//! Tensors that lie on the device otherwise than in their file.
//!
//! A quantised block of GGUF is a few scales and a few integers. Side by side they hardly compress;
//! apart the scales do, as floating-point numbers, and so do integers of 8 bits. A *strand* of a
//! tensor is the same bytes of each of its blocks, and a tensor of its own. Types whose blocks have
//! 256 elements stay as they are: 2 to 4 of their 84 to 292 bytes are such scales.
//!
//! Elements of [six bits](super::sixes), of which safetensors packs four in three bytes, get a byte
//! each.

use std::collections::BTreeSet;
use std::io;

use super::checkpoint::ReadAt;
use super::{FileKind, ModelFile, ModelTensor, sixes};

/// How a tensor's bytes on the device come from those of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rearranged {
    /// The same bytes of each block.
    Strand(Strand),
    /// Packed elements of six bits.
    Sixes,
}

/// Where in each block of a tensor a strand's bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strand {
    /// Bytes of a block before them.
    pub skip: u64,
    /// Bytes of a block that are its own.
    pub width: u64,
    /// Bytes of a block.
    pub block: u64,
}

/// Strands of a type: what they are called, as ggml has it, their bytes in a block and their
/// format. They fill the block.
type Strands = &'static [(&'static str, u64, &'static str)];

const D: (&str, u64, &str) = ("d", 2, "fp16");
const M: (&str, u64, &str) = ("m", 2, "fp16");
const QH: (&str, u64, &str) = ("qh", 4, "opaque");
const QS: (&str, u64, &str) = ("qs", 16, "opaque");

/// The types whose blocks are taken apart, by name.
const TYPES: [(&str, Strands); 5] = [
    ("Q4_0", &[D, QS]),
    ("Q4_1", &[D, M, QS]),
    ("Q5_0", &[D, QH, QS]),
    ("Q5_1", &[D, M, QH, QS]),
    ("Q8_0", &[D, ("qs", 32, "int8")]),
];

/// Bytes of whole blocks that are read at once.
const AT_ONCE: u64 = 256 << 10;

impl Strand {
    /// Its bytes from byte `at` on, of a tensor whose blocks begin at `offset` of `file`.
    pub(super) fn read(
        self,
        file: &dyn ReadAt,
        offset: u64,
        mut at: u64,
        mut out: &mut [u8],
    ) -> io::Result<()> {
        let size = |bytes: u64| usize::try_from(bytes).expect("a block is short");
        let (skip, width, block) = (size(self.skip), size(self.width), size(self.block));
        let most = AT_ONCE / self.block;
        let mut blocks = Vec::new();
        while !out.is_empty() {
            let (first, mut from) = (at / self.width, size(at % self.width));
            let wanted = (from + out.len()).div_ceil(width).min(size(most));
            // Of the last block nothing that is behind.
            blocks.resize((wanted - 1) * block + skip + width, 0);
            file.read_exact_at(&mut blocks, offset + first * self.block)?;
            for one in blocks.chunks(block) {
                let own = &one[skip + from..skip + width];
                let own = &own[..own.len().min(out.len())];
                let (now, rest) = out.split_at_mut(own.len());
                now.copy_from_slice(own);
                (out, at, from) = (rest, at + own.len() as u64, 0);
            }
        }
        Ok(())
    }
}

impl Rearranged {
    /// Fills `out` with the tensor's bytes from byte `at` on; those in the file begin at `offset`.
    pub(super) fn read(self, file: &dyn ReadAt, offset: u64, at: u64, out: &mut [u8]) -> io::Result<()> {
        match self {
            Self::Strand(strand) => strand.read(file, offset, at, out),
            Self::Sixes => sixes::read(file, offset, at, out),
        }
    }

    /// How far behind a tensor's beginning in the file its first `bytes` bytes reach.
    pub(super) fn reach(self, bytes: u64) -> u64 {
        match self {
            Self::Strand(Strand { width, block, .. }) => bytes.div_ceil(width) * block,
            Self::Sixes => sixes::packed(bytes),
        }
    }
}

impl ModelFile {
    /// The same file with a byte for each element of six bits, as the device has them.
    #[must_use]
    pub fn spread(self) -> Self {
        self.spread_where(|_| true)
    }

    /// The same of the tensors that are `wanted`.
    #[must_use]
    pub(crate) fn spread_where(mut self, wanted: impl Fn(&ModelTensor) -> bool) -> Self {
        if self.kind == FileKind::Safetensors {
            self.tensors.iter_mut().filter(|tensor| wanted(tensor)).for_each(spread);
        }
        self
    }

    /// The same file with strands in place of its tensors of quantised blocks, and a byte for each
    /// element of six bits, if it has any.
    ///
    /// # Errors
    ///
    /// What the system says.
    pub fn in_strands(&self) -> io::Result<Option<Self>> {
        let names: BTreeSet<&str> = self.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        let tensors: Vec<_> = match self.kind {
            FileKind::Gguf => self.tensors.iter().flat_map(|tensor| strands(tensor, &names)).collect(),
            FileKind::Safetensors => {
                let mut tensors = self.tensors.clone();
                tensors.iter_mut().for_each(spread);
                tensors
            }
            FileKind::Npy | FileKind::Other => return Ok(None),
        };
        if tensors == self.tensors {
            return Ok(None);
        }
        Ok(Some(Self {
            path: self.path.clone(),
            file: self.file.try_clone()?,
            tensors,
            metadata: self.metadata.clone(),
            header_digest: self.header_digest,
            kind: self.kind,
            remarks: self.remarks.clone(),
            opened: self.opened.clone(),
        }))
    }
}

/// Gives each element of a tensor a byte, if they have six bits.
fn spread(tensor: &mut ModelTensor) {
    let is_packed = tensor.length > 0 && tensor.rearranged.is_none();
    let format = sixes::format_of(&tensor.dtype).filter(|_| is_packed);
    // As many groups as the header was checked to have.
    if let Some((format, length)) = format.zip(sixes::elements(tensor.length)) {
        (tensor.format, tensor.length, tensor.rearranged) = (format, length, Some(Rearranged::Sixes));
    }
}

/// The strands of a tensor, or itself if it has none, or another tensor is called as one would be.
fn strands(tensor: &ModelTensor, names: &BTreeSet<&str>) -> Vec<ModelTensor> {
    let own = TYPES.iter().find(|(dtype, _)| *dtype == tensor.dtype).map_or(&[][..], |(_, own)| own);
    let block: u64 = own.iter().map(|(_, width, _)| width).sum();
    let name = |part: &str| format!("{}.{part}", tensor.name);
    let taken = own.iter().any(|(part, ..)| names.contains(name(part).as_str()));
    if own.is_empty() || taken || tensor.length == 0 || !tensor.length.is_multiple_of(block) {
        return vec![tensor.clone()];
    }
    let mut skip = 0;
    let strand = |&(part, width, format): &(&str, u64, &'static str)| {
        let strand = Strand { skip, width, block };
        skip += width;
        ModelTensor {
            name: name(part),
            dtype: tensor.dtype.clone(),
            shape: vec![tensor.length / block, if format == "fp16" { width / 2 } else { width }],
            format,
            offset: tensor.offset,
            length: tensor.length / block * width,
            rearranged: Some(Rearranged::Strand(strand)),
        }
    };
    own.iter().map(strand).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    impl ReadAt for &[u8] {
        fn read_exact_at(&self, out: &mut [u8], offset: u64) -> io::Result<()> {
            let offset = usize::try_from(offset).unwrap();
            let from = self.get(offset..offset + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
            out.copy_from_slice(from);
            Ok(())
        }
    }

    #[test]
    fn a_types_strands_fill_its_blocks() {
        for ((dtype, own), block) in TYPES.iter().zip([18, 20, 22, 24, 34]) {
            assert_eq!(own.iter().map(|(_, width, _)| width).sum::<u64>(), block, "{dtype}");
        }
    }

    #[test]
    fn any_range_of_a_strand_is_those_bytes_of_each_block() {
        let file: Vec<u8> =
            (0..7 + 20 * 50_000_u32).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
        for (skip, width) in [(0, 2), (2, 2), (4, 16)] {
            let whole: Vec<u8> =
                file[7..].chunks(20).flat_map(|block| &block[skip..skip + width]).copied().collect();
            let strand = Strand { skip: skip as u64, width: width as u64, block: 20 };
            let end = whole.len();
            for range in [0..end, 1..2, 1..end - 1, end / 2 + 1..end, end - 1..end, 3..3, 16..49] {
                let mut out = vec![0; range.len()];
                strand.read(&&file[..], 7, range.start as u64, &mut out).unwrap();
                assert_eq!(out, whole[range]);
            }
            assert!(strand.read(&&file[..], 7, end as u64, &mut [0]).is_err(), "there is no more");
        }
    }
}
