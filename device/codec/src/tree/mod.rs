//! The plane tree: a block's exponent planes coded jointly, as a Huffman-shaped wavelet tree.
//!
//! Exponent planes are correlated, and coding them one by one cannot use it. So the upper planes
//! below the sign ([`joint_planes`]) are one *stream*: every *value* (those bits of an element,
//! most significant first) has a prefix code, and level `k` of the stream holds bit `k` of the code
//! of only those elements whose code is longer than `k`. Sign and lower planes stay apart.
//!
//! A stream describes itself; nothing is shared between blocks. It has three parts:
//!
//! 1. The header, a little-endian bit string padded with zeros to whole bytes: 8 bits *low*, 5 bits
//!    *window* − 1, 3 bits code length of the *zero* symbol, 3 bits code length of the *escape*
//!    symbol, then 3 bits each: the code lengths of the values low, low + 1, … low + window − 1.
//!    Length 0 is no code. Low + window may not pass the largest value, and the zero symbol, the
//!    value 0, has a code only if low > 0.
//! 2. The levels, one behind the other without padding, level 0 first; only the last one is padded
//!    with zeros to a whole byte. Each holds its elements' bits in element order, the first in the
//!    lowest bit of the first byte.
//! 3. A byte for every element whose code is the escape's, in element order: its value.
//!
//! Codes are canonical: symbols are ordered by length, then as the values of the window, zero,
//! escape; the first has the code of all zeros, each further one the code before it plus one, with
//! zeros appended to its length. Bit 0 of a code is its most significant. Codes are complete (Σ
//! 2^−length = 1), so no bits are without meaning and there are at least two symbols.
//!
//! The rules:
//! * The encoder chooses lengths from the block's own histogram; what occurs less than [`RARE`]
//!   times is escaped. So a stream depends on its block alone. A decoder knows only the format
//!   above.
//! * A stream that would not be shorter than the raw planes is not made; nor is one where a single
//!   value occurs, whose planes are constant.
//! * Decoding never trusts the bytes: it ends with the planes or a reason.
//! * Values come as a byte an element, and go so; [`fields`] takes them out of words and puts them
//!   back.
//! * Kernels ([`Kernel`]) give the same streams and the same errors: planes of codes in plain Rust
//!   ([`compact`]), element by element with AVX-512's compress and expand ([`avx512`]), and masks
//!   of 64 elements with BMI2's `pdep` and `pext` ([`masks`]).

#[cfg(target_arch = "x86_64")]
mod avx512;
mod bits;
mod code;
mod compact;
mod fields;
#[cfg(target_arch = "x86_64")]
mod masks;
mod plan;
#[cfg(test)]
mod tests;
mod whole;

pub(crate) use self::whole::Whole;
use self::{
    code::{Code, Coder},
    compact::MAX_PLANE,
    fields::Fields,
    lines::Lines,
    plan::{Census, Plan},
};
use crate::{
    BlockWords, check,
    format::Format,
    kernel::kernels,
    lines,
    plane::{self, PlaneMask, Planes},
};

/// Bytes behind a stream that are read or written with it.
pub(crate) const SLACK: usize = 16;

/// Values that occur less often than this in a block are escaped: a code's place in the header and
/// its bits cost more.
pub(crate) const RARE: u32 = 4;

/// Planes below the uppermost that are coded jointly: the exponent; of integers, the upper bits of
/// the folded value.
///
/// Four of int8's and three of int4's: fewer lose what small values give, more cost a longer header
/// than they gain. Of what lies in a byte and has six bits, everything from the byte's second bit
/// down to the exponent's last: the plane above the sign is zeros, and the sign costs its one bit.
/// Of a power of two, all bits but the first.
pub(crate) const fn joint_planes(format: Format) -> usize {
    match format {
        Format::Opaque => 0,
        Format::Int8 => 4,
        Format::Int4 => 3,
        Format::E8m0 => 7,
        Format::Fp6E3m2 | Format::Fp6E2m3 => 2 + format.exponent_bits() as usize,
        float => float.exponent_bits() as usize,
    }
}

/// Bytes that the jointly coded planes take raw: no stream is that long.
pub const fn joint_bytes(format: Format) -> usize {
    joint_planes(format) * format.plane_bytes()
}

kernels! {
    /// A way to code and decode.
    pub enum Kernel {
        /// Plain Rust.
        Portable,
        /// BMI2's `pdep` and `pext`, the rest in AVX2.
        Bmi2: ["avx2", "bmi1", "bmi2", "popcnt"],
        /// AVX-512 with VBMI2's compress and expand of bytes.
        Avx512: [
            "sse4.2", "avx2", "bmi1", "bmi2", "popcnt", "avx512f", "avx512bw", "avx512vbmi", "avx512vbmi2", "avx512bitalg",
            "avx512vpopcntdq", "gfni"
        ],
    }
}

/// Most elements of a block.
const MAX_ELEMENTS: usize = 8192;

/// Of so many elements, one is counted where a block's cost is asked for.
const PART: usize = 4;

/// What is left of a mark when all its bits are written.
#[cfg(target_arch = "x86_64")]
const END: u8 = 0x80;

/// Scratch for a block that is worked on.
struct Scratch {
    /// An encoder's marks of a level and of the one after it, in turn, what is escaped, and the
    /// words of a level; the rest of a vector behind them.
    #[cfg(target_arch = "x86_64")]
    levels: [Lines<u8>; 4],
    /// Words of masks.
    #[cfg(target_arch = "x86_64")]
    masks: [Lines<u64>; 3],
}

/// Bytes of a plane of bf16.
const BF16_PLANE: usize = Format::Bf16.plane_bytes();

/// A stored block of bf16.
pub struct Bf16<'a> {
    /// Its stream, and at least [`SLACK`] bytes behind it, which may be anything.
    pub stream: &'a [u8],
    /// Bytes of the stream.
    pub length: usize,
    /// Of the values the bits that count; the others become zeros.
    pub wanted: u8,
    /// The planes of the lower bits and, behind them, the sign's.
    pub planes: [&'a [u8; BF16_PLANE]; 8],
    /// Where it goes.
    pub words: &'a mut BlockWords,
    /// The checks of the planes, the most significant first, which decoding finds. They are here
    /// because a result is copied on its way.
    pub checks: [u16; 8],
}

/// What coding a block works in. Nothing of one block is left for the next.
pub struct Workspace {
    fields: Fields,
    scratch: Scratch,
}

impl Workspace {
    /// Scratch buffers for blocks of any format.
    pub fn new() -> Self {
        let scratch = Scratch {
            #[cfg(target_arch = "x86_64")]
            levels: std::array::from_fn(|_| Lines::new(MAX_ELEMENTS + 64)),
            #[cfg(target_arch = "x86_64")]
            masks: std::array::from_fn(|_| Lines::new(masks::STORE)),
        };
        Self { fields: Fields::new(), scratch }
    }
}

impl Default for Workspace {
    fn default() -> Self {
        Self::new()
    }
}

/// What decoding a block works in.
#[derive(Default)]
pub struct Decoder {
    workspace: Workspace,
    #[cfg(target_arch = "x86_64")]
    avx512: Box<avx512::Decoder>,
}

impl Kernel {
    /// Codes the values of a block of words into the front of `out`: the bytes it takes, or `None`
    /// if that would not make them shorter than their planes or they are all the same.
    ///
    /// # Panics
    /// If the processor does not have this kernel or `out` has not [`SLACK`] more than
    /// [`joint_bytes`].
    pub fn encode_block(
        self,
        format: Format,
        words: &BlockWords,
        workspace: &mut Workspace,
        out: &mut [u8],
    ) -> Option<usize> {
        let Workspace { fields, scratch } = workspace;
        let values = fields.values(format);
        self.take(format, words, values);
        self.encode(format, values, out, scratch)
    }

    /// Decodes the first `length` bytes of `stream` and puts them together with the planes beside
    /// them to words, of which the joint planes in `mask` count, the others zero. The [`SLACK`]
    /// bytes behind the stream may be anything.
    ///
    /// # Errors
    /// [`Malformed`] when the bytes are no stream; `words` are then undefined.
    ///
    /// # Panics
    /// If the processor does not have this kernel, `stream` has not [`SLACK`] bytes more than
    /// `length`, or a plane is too short.
    #[expect(clippy::too_many_arguments, reason = "a stream, what is wanted of it, and where that goes")]
    pub fn decode_block(
        self,
        format: Format,
        stream: &[u8],
        length: usize,
        mask: PlaneMask,
        planes: &Planes<'_>,
        words: &mut BlockWords,
        decoder: &mut Decoder,
    ) -> Result<(), Malformed> {
        let wanted =
            mask.0 >> (format.planes() - 1 - joint_planes(format)) & ((1 << joint_planes(format)) - 1);
        let wanted = u8::try_from(wanted).expect("at most eight joint planes");
        if format == Format::Bf16 {
            let planes = std::array::from_fn(|bit| {
                planes[if bit < 7 { bit } else { 15 }].first_chunk().expect("a plane of bf16")
            });
            let mut block = Bf16 { stream, length, wanted, planes, words, checks: [0; 8] };
            return self.decode_bf16(&mut block, decoder);
        }
        self.decode_fields(format, stream, length, wanted, planes, words, decoder)
    }

    /// As [`Self::decode_block`] of bf16; finds the checks of the planes beside the stream.
    ///
    /// # Errors
    /// [`Malformed`].
    pub fn decode_bf16(self, block: &mut Bf16<'_>, decoder: &mut Decoder) -> Result<(), Malformed> {
        #[cfg(target_arch = "x86_64")]
        if self == Self::Avx512 {
            self.check_stream(block.stream, block.length);
            // SAFETY: the processor has its features, as was asserted above.
            return unsafe { avx512::decode_bf16(block, &mut decoder.avx512) };
        }
        let mut all: Planes<'_> = [&plane::ZEROS; 32];
        for (all, plane) in all.iter_mut().zip(&block.planes[..7]) {
            *all = &plane[..];
        }
        all[15] = block.planes[7];
        let Bf16 { stream, length, wanted, .. } = *block;
        self.decode_fields(Format::Bf16, stream, length, wanted, &all, block.words, decoder)?;
        block.checks = block.planes.map(|plane| check::check(plane));
        block.checks.reverse();
        Ok(())
    }

    /// As [`Self::decode_block`], by way of a byte for each element.
    #[expect(clippy::too_many_arguments, reason = "as of decode_block")]
    fn decode_fields(
        self,
        format: Format,
        stream: &[u8],
        length: usize,
        wanted: u8,
        planes: &Planes<'_>,
        words: &mut BlockWords,
        decoder: &mut Decoder,
    ) -> Result<(), Malformed> {
        if self == Self::Portable {
            return self.decode_planes(format, stream, length, wanted, planes, words);
        }
        self.decode(format, stream, length, decoder)?;
        let fields = &mut decoder.workspace.fields;
        fields.rest(format, planes);
        self.put(format, fields, wanted, words);
        Ok(())
    }

    /// As [`Self::decode_block`], by way of the values' planes.
    fn decode_planes(
        self,
        format: Format,
        stream: &[u8],
        length: usize,
        wanted: u8,
        planes: &Planes<'_>,
        words: &mut BlockWords,
    ) -> Result<(), Malformed> {
        self.check_stream(stream, length);
        let count = joint_planes(format);
        let mut values = [[0; MAX_PLANE]; 8];
        compact::decode(stream, length, (1 << count) - 1, 8 * format.plane_bytes(), &mut values)?;
        let mut all = *planes;
        let joint = &mut all[format.planes() - 1 - count..][..count];
        for (bit, (plane, values)) in joint.iter_mut().zip(&values).enumerate() {
            *plane = if wanted >> bit & 1 == 1 { values } else { &plane::ZEROS };
        }
        plane::join(format, &all, words);
        Ok(())
    }

    /// Codes values by their best code.
    fn encode(self, format: Format, values: &[u8], out: &mut [u8], scratch: &mut Scratch) -> Option<usize> {
        let raw = self.check_output(format, values, out);
        #[cfg(target_arch = "x86_64")]
        if self == Self::Bmi2 {
            // It has each value's elements as a mask, and codes by these.
            // SAFETY: the processor has its features, as was asserted above.
            return unsafe { masks::encode_bmi2(values, joint_planes(format), out, scratch) };
        }
        let census = self.census(format, values, scratch)?;
        if census.symbols() < 2 {
            return None;
        }
        let plan = self.plan(&census, raw)?;
        let coder = self.coder(plan.code);
        let length = self.levels(values, &coder, out, scratch);
        debug_assert_eq!(length, plan.length, "a stream is as long as its plan says");
        Some(length)
    }

    /// About the bytes that the joint planes of a block take: a stream's, or none if they are
    /// constant, or what they take as they are. They are known from counts of one element in
    /// [`PART`], without coding or even a code, and the same by every kernel.
    fn cost(self, format: Format, words: &BlockWords, workspace: &mut Workspace) -> usize {
        let Workspace { fields, scratch } = workspace;
        let values = fields.values(format);
        self.take(format, words, values);
        let mut part = [0; MAX_ELEMENTS / PART];
        let part = &mut part[..values.len() / PART];
        for (to, from) in part.chunks_mut(64).zip(values.chunks(64).step_by(PART)) {
            to.copy_from_slice(from);
        }
        let raw = joint_bytes(format);
        match self.census(format, part, scratch) {
            Some(census) if census.symbols() < 2 => 0,
            Some(census) => (PART * census.entropy_bytes()).min(raw),
            None => raw,
        }
    }

    /// What values a block, or a part of one, has, or `None` if they are too many.
    fn census(self, format: Format, values: &[u8], scratch: &mut Scratch) -> Option<Census> {
        assert!(self.is_available(), "{self:?} needs another processor");
        match self {
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512::census(values, joint_planes(format), scratch) },
            _ => compact::census(values),
        }
    }

    /// How a block is coded of which this is the census, or `None` if not at all; see
    /// [`Plan::new`].
    fn plan(self, census: &Census, raw: usize) -> Option<Plan> {
        assert!(self.is_available(), "{self:?} needs another processor");
        match self {
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512::plan(census, raw) },
            _ => Plan::new(census, raw),
        }
    }

    /// A code to encode by.
    fn coder(self, code: Code) -> Coder {
        assert!(self.is_available(), "{self:?} needs another processor");
        match self {
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512::coder(code) },
            _ => Coder::new(code),
        }
    }

    /// Writes the stream of values by the code that was made for them: its bytes.
    fn levels(self, values: &[u8], coder: &Coder, out: &mut [u8], scratch: &mut Scratch) -> usize {
        assert!(self.is_available(), "{self:?} needs another processor");
        match self {
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512::levels(values, coder, out, scratch) },
            _ => compact::levels(values, coder, out),
        }
    }

    /// Checks what is given to an encoder: the bytes that a stream must stay below.
    fn check_output(self, format: Format, values: &[u8], out: &[u8]) -> usize {
        assert!(self.is_available(), "{self:?} needs another processor");
        assert!(values.len() == 8 * format.plane_bytes(), "the values of one block");
        let raw = joint_bytes(format);
        assert!(out.len() >= raw + SLACK, "the output buffer holds the longest stream");
        raw
    }

    /// Checks what is given to a decoder.
    fn check_stream(self, stream: &[u8], length: usize) {
        assert!(self.is_available(), "{self:?} needs another processor");
        assert!(stream.len() >= length + SLACK, "the stream and slack behind it");
    }

    /// Decodes to the values in `decoder`.
    fn decode(
        self,
        format: Format,
        stream: &[u8],
        length: usize,
        decoder: &mut Decoder,
    ) -> Result<(), Malformed> {
        self.check_stream(stream, length);
        let count = joint_planes(format);
        let Workspace { fields, scratch } = &mut decoder.workspace;
        let values = fields.values(format);
        match self {
            Self::Portable => {
                let mut planes = [[0; MAX_PLANE]; 8];
                compact::decode(stream, length, (1 << count) - 1, values.len(), &mut planes)?;
                plane::join_bytes(&planes.each_ref().map(|plane| &plane[..]), values);
                Ok(())
            }
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Bmi2 => unsafe { masks::decode_bmi2(stream, length, count, values, scratch) },
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe {
                avx512::decode(stream, length, (1 << count) - 1, values, &mut decoder.avx512)
            },
        }
    }
}

/// Why bytes are no stream.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Malformed {
    /// The header does not fit.
    #[error("a header of {header} bytes in a stream of {length}")]
    Header {
        /// Its bytes.
        header: usize,
        /// The stream's.
        length: usize,
    },
    /// The window passes the largest value.
    #[error("codes for values up to {last}, the largest is {largest}")]
    Window {
        /// The window's last value.
        last: usize,
        /// The format's.
        largest: usize,
    },
    /// The value 0 has two codes.
    #[error("the value 0 has two codes")]
    TwoZeros,
    /// The code is not complete.
    #[error("the code uses {used} of 128 parts")]
    Incomplete {
        /// Parts that its symbols use.
        used: usize,
    },
    /// A level ends after the stream.
    #[error("level {level} ends at bit {end} of {bits}")]
    Level {
        /// The level.
        level: usize,
        /// Where it ends.
        end: usize,
        /// Where the stream ends.
        bits: usize,
    },
    /// The escapes do not end with the stream.
    #[error("the escapes end at byte {end} of {length}")]
    Escapes {
        /// Where they end.
        end: usize,
        /// Where the stream ends.
        length: usize,
    },
    /// An escaped value that the format does not have.
    #[error("an escaped value is {value}, the largest is {largest}")]
    Escaped {
        /// The value.
        value: u8,
        /// The format's largest.
        largest: usize,
    },
}

/// [`Kernel::cost`] by the processor's best kernel.
pub(crate) fn cost(format: Format, words: &BlockWords, workspace: &mut Workspace) -> usize {
    Kernel::best().cost(format, words, workspace)
}
