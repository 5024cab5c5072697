//! The check of a plane's stored bytes: two syndromes over GF(2⁸), as a Reed-Solomon code has.
//!
//! The field is that of AES, polynomial 0x11b, where α = 3 generates every non-zero element. Byte
//! `p` has the coefficient α^e(p); its row is `p / 64`, its word in the row `p / 8 % 8`, and
//!
//! e(p) = row + 4 · (bits of word reversed) + 32 · (p % 8).
//!
//! The check's lower byte is S₀, the sum (XOR) of all bytes; its upper byte is S₁, the sum of all
//! bytes times their coefficients.
//!
//! The rules:
//! * Any error within one byte is found, and any in two bytes whose coefficients differ: e(p) takes
//!   256 values over the first 256 bytes, and only the first and the last of them meet, because
//!   α^255 = 1. Of other errors one in 2^16 is not found.
//! * Bytes past the end count as zeros, so the length is not guarded; whoever keeps the check keeps
//!   the length under a checksum of its own.
//! * Rows are added up by Horner's rule, multiplying by α alone; the order of e makes what remains
//!   of a row cheap to fold without a multiplier.
//! * Kernels ([`Kernel`]) are chosen once for all planes of a block, at run time; all of them give
//!   what the portable one gives.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod gfni;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(super) use self::gfni::Sums;
use crate::kernel::kernels;

/// Bytes that are added up side by side.
const ROW: usize = 64;

/// Where a plane's stored bytes lie in their bundle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Span {
    /// The first of them.
    pub start: u16,
    /// How many.
    pub length: u16,
}

impl Span {
    /// The place as a range.
    pub(crate) fn range(self) -> std::ops::Range<usize> {
        usize::from(self.start)..usize::from(self.start) + usize::from(self.length)
    }
}

kernels! {
    /// A way to compute checks.
    pub(crate) enum Kernel {
        /// Plain Rust.
        Portable,
        /// AVX2, which multiplies by a constant through tables of nibbles.
        Avx2: ["avx2"],
        /// AVX-512 with GFNI's multiplier.
        Gfni: ["avx512f", "avx512bw", "gfni"],
    }
}

impl Kernel {
    /// [`checks`] by this kernel, which must be available.
    pub(crate) fn checks(self, bundle: &[u8], planes: &[Span], checks: &mut [u16]) {
        assert!(self.is_available(), "{self:?} needs another processor");
        assert!(planes.len() == checks.len(), "a check for each plane");
        match self {
            Self::Portable => portable::checks(bundle, planes, checks),
            // SAFETY: the processor has AVX2, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { avx2::checks(bundle, planes, checks) },
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Gfni => unsafe { gfni::checks(bundle, planes, checks) },
        }
    }

    /// [`differ`] by this kernel, which must be available.
    pub(crate) fn differ(self, bundle: &[u8], planes: &[Span], checks: &[u16]) -> u32 {
        assert!(self.is_available(), "{self:?} needs another processor");
        assert!(planes.len() == checks.len() && planes.len() <= 32, "a check for each plane of a block");
        match self {
            Self::Portable => portable::differ(bundle, planes, checks),
            // SAFETY: the processor has AVX2, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { avx2::differ(bundle, planes, checks) },
            // SAFETY: the processor has its features, as was asserted above.
            #[cfg(target_arch = "x86_64")]
            Self::Gfni => unsafe { gfni::differ(bundle, planes, checks) },
        }
    }
}

/// The check of each plane; that of no bytes is 0.
///
/// # Panics
/// If a plane is outside the bundle, or there are not as many checks as planes.
pub(crate) fn checks(bundle: &[u8], planes: &[Span], checks: &mut [u16]) {
    Kernel::best().checks(bundle, planes, checks);
}

/// The planes of a block whose check is another than the one given: bit `i` is the plane at `i`.
///
/// # Panics
/// As [`checks`], or if there are more than 32 planes.
pub(crate) fn differ(bundle: &[u8], planes: &[Span], checks: &[u16]) -> u32 {
    Kernel::best().differ(bundle, planes, checks)
}

/// The check of a plane of these bytes, a bundle's length at most.
pub fn check(plane: &[u8]) -> u16 {
    let length = u16::try_from(plane.len()).expect("no plane is as long");
    let mut check = [0];
    checks(plane, &[Span { start: 0, length }], &mut check);
    check[0]
}

/// The last row of a plane, if it is not whole, and a mask with ones for the bytes it has. `spare`
/// is for rows at the bundle's end.
fn last_row<'a>(
    bundle: &'a [u8],
    plane: Span,
    spare: &'a mut [u8; ROW],
) -> (&'a [u8; ROW], &'static [u8; ROW]) {
    static MASKS: [u8; 2 * ROW] = {
        let mut masks = [0; 2 * ROW];
        let mut at = 0;
        while at < ROW {
            masks[at] = 0xff;
            at += 1;
        }
        masks
    };
    let length = usize::from(plane.length) % ROW;
    let rest = &bundle[plane.range().end - length..];
    // What follows the plane is read and masked out: quicker than to copy so many bytes and no
    // more.
    let row = if let Some(row) = rest.first_chunk() {
        row
    } else {
        spare[..length].copy_from_slice(&rest[..length]);
        spare
    };
    (row, MASKS[ROW - length..].first_chunk().expect("as many zeros follow"))
}

/// e(p) of the bytes of a row.
const fn exponent(byte: usize) -> usize {
    let word = byte / 8;
    4 * (word >> 2 | word & 2 | (word & 1) << 2) + 32 * (byte % 8)
}

/// α times `x`.
const fn times_alpha(x: u8) -> u8 {
    x << 1 ^ x ^ if x >> 7 == 1 { 0x1b } else { 0 }
}

/// The coefficients of the bytes of a row.
const COEFFICIENTS: [u8; ROW] = {
    let mut coefficients = [1; ROW];
    let mut byte = 0;
    while byte < ROW {
        let mut power = 0;
        while power < exponent(byte) {
            coefficients[byte] = times_alpha(coefficients[byte]);
            power += 1;
        }
        byte += 1;
    }
    coefficients
};

#[cfg(test)]
mod tests;
