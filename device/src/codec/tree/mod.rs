//! The plane tree: a block's exponent planes coded jointly, as a Huffman-shaped wavelet tree.
//!
//! Exponent planes are correlated, and coding them one by one cannot use it. So the upper planes below the sign
//! ([`joint_planes`]) are one *stream*: every *value* (those bits of an element, most significant first) has a prefix code, and
//! level `k` of the stream holds bit `k` of the code of only those elements whose code is longer than `k`. Sign and lower planes stay apart.
//!
//! A stream describes itself; nothing is shared between blocks. It has three parts:
//!
//! 1. The header, a little-endian bit string padded with zeros to whole bytes: 8 bits *low*, 5 bits *window* − 1, 3 bits code length of the *zero*
//!    symbol, 3 bits code length of the *escape* symbol, then 3 bits each: the code lengths of the values low, low + 1, … low + window − 1.
//!    Length 0 is no code. Low + window may not pass the largest value, and the zero symbol, the value 0, has a code only if low > 0.
//! 2. The levels, one behind the other without padding, level 0 first; only the last one is padded with zeros to a whole byte. Each holds its
//!    elements' bits in element order, the first in the lowest bit of the first byte.
//! 3. A byte for every element whose code is the escape's, in element order: its value.
//!
//! Codes are canonical: symbols are ordered by length, then as the values of the window, zero, escape; the first has the code of all
//! zeros, each further one the code before it plus one, with zeros appended to its length. Bit 0 of a code is its
//! most significant. Codes are complete (Σ 2^−length = 1), so no bits are without meaning and there are at least two symbols.
//!
//! The rules:
//! * The encoder chooses lengths from the block's own histogram; what occurs less than [`RARE`] times is escaped. A decoder knows only the format above.
//! * A stream that would not be shorter than the raw planes is not made; nor is one where a single value occurs, whose planes are constant.
//! * Everything works on planes: 64 elements a word. No element is looked at alone but those that are escaped.
//! * Decoding never trusts the bytes: it ends with the planes or a reason.
//! * Kernels ([`Kernel`]) are one source compiled twice, with BMI2's `pdep` and `pext` and without.

mod code;
mod levels;
#[cfg(test)]
mod tests;

use std::{cell::RefCell, sync::LazyLock};

pub use self::levels::SLACK;
use self::levels::Scratch;
pub(crate) use self::levels::{gather, spread};
use crate::format::Format;

/// Values that occur less often than this in a block are escaped: a code's place in the header and its bits cost more.
pub const RARE: u32 = 4;

/// Planes below the sign that are coded jointly: the exponent; of integers, the upper bits of the folded value.
///
/// Four of int8's and three of int4's: fewer lose what small values give, more cost a longer header than they gain.
pub const fn joint_planes(format: Format) -> usize {
    match format {
        Format::Opaque => 0,
        Format::Int8 => 4,
        Format::Int4 => 3,
        float => float.exponent_bits() as usize,
    }
}

/// Bytes that the jointly coded planes take raw: no stream is that long.
pub const fn joint_bytes(format: Format) -> usize {
    joint_planes(format) * format.plane_bytes()
}

/// A way to spread and gather bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Plain Rust.
    Portable,
    /// BMI2's `pdep` and `pext`, the rest in AVX2.
    #[cfg(target_arch = "x86_64")]
    Bmi2,
}

static BEST: LazyLock<Kernel> =
    LazyLock::new(|| *Kernel::available().last().expect("the portable one always is"));

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::new());
}

impl Kernel {
    /// The kernels that this processor can run, the best one last.
    pub fn available() -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        let kernels = [Self::Portable, Self::Bmi2];
        #[cfg(not(target_arch = "x86_64"))]
        let kernels = [Self::Portable];
        kernels.into_iter().filter(|kernel| kernel.is_available()).collect()
    }

    /// Whether this processor can run it.
    fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Bmi2 => {
                std::arch::is_x86_feature_detected!("avx2")
                    && std::arch::is_x86_feature_detected!("bmi1")
                    && std::arch::is_x86_feature_detected!("bmi2")
                    && std::arch::is_x86_feature_detected!("popcnt")
            }
        }
    }

    /// [`encode`] by this kernel, which must be available.
    pub fn encode(self, format: Format, planes: &[u8], out: &mut [u8]) -> Option<usize> {
        assert!(self.is_available(), "{self:?} needs another processor");
        assert!(planes.len() == joint_bytes(format), "the joint planes of one block");
        assert!(out.len() >= planes.len() + SLACK, "room for the longest stream");
        SCRATCH.with_borrow_mut(|scratch| match self {
            Self::Portable => levels::encode_portable(format, planes, out, scratch),
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Bmi2 => unsafe { levels::encode_bmi2(format, planes, out, scratch) },
        })
    }

    /// [`decode`] by this kernel, which must be available.
    ///
    /// # Errors
    /// As [`decode`].
    pub fn decode(
        self,
        format: Format,
        stream: &[u8],
        length: usize,
        planes: &mut [u8],
    ) -> Result<(), Malformed> {
        assert!(self.is_available(), "{self:?} needs another processor");
        assert!(planes.len() == joint_bytes(format), "the joint planes of one block");
        assert!(stream.len() >= length + SLACK, "the stream and slack behind it");
        SCRATCH.with_borrow_mut(|scratch| match self {
            Self::Portable => levels::decode_portable(format, stream, length, planes, scratch),
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Bmi2 => unsafe { levels::decode_bmi2(format, stream, length, planes, scratch) },
        })
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

/// Codes the joint planes of a block, most significant first, into the front of `out`: the bytes it takes, or `None` if
/// that would not make them shorter or they are constant.
///
/// # Panics
/// If `planes` are not [`joint_bytes`] or `out` has not [`SLACK`] more.
pub fn encode(format: Format, planes: &[u8], out: &mut [u8]) -> Option<usize> {
    BEST.encode(format, planes, out)
}

/// Decodes the first `length` bytes of `stream` to the joint planes of a block, most significant first. The [`SLACK`] bytes behind may be anything.
///
/// # Errors
/// [`Malformed`] when the bytes are no stream; `planes` are then undefined.
///
/// # Panics
/// If `planes` are not [`joint_bytes`] or `stream` has not [`SLACK`] bytes more than `length`.
pub fn decode(format: Format, stream: &[u8], length: usize, planes: &mut [u8]) -> Result<(), Malformed> {
    BEST.decode(format, stream, length, planes)
}
