//! The transpose in AVX-512 with VBMI and GFNI: a line of each plane at a time, 64 bytes (half of
//! it for fp32).
//!
//! `gf2p8affineqb` transposes the 8×8 bit matrix in each quadword. To join, a byte of each of eight
//! planes is brought together in a quadword, the matrix is transposed, and bytes are brought
//! together to elements; to split is that backwards.
//!
//! Number the bytes of some registers by the register, the lane in it (two bits) and the place in
//! the lane (four bits). Unpacking pairs of registers, low and high, moves the place's first bit to
//! the register's number, moves the others up, and puts last the bit in which the pairs differ.
//! What moves bytes between lanes is `vpermi2b`, once in a network; its indices are worked out here
//! from what the unpacking does. Comments give numbers as bits: register, place in the lane.
//!
//! A *group* is eight elements, a byte of a plane. The instruction takes a matrix's rows from the
//! quadword's last byte on, so planes (joining) and elements (splitting) are in descending order in
//! a quadword.

mod join;
mod split;

use std::arch::x86_64::{
    __m512i, _mm512_gf2p8affine_epi64_epi8, _mm512_loadu_si512, _mm512_storeu_si512, _mm512_unpackhi_epi8,
    _mm512_unpacklo_epi8,
};

pub(crate) use self::{
    join::{bytes_of, gathered},
    split::planes_beside,
};
pub(super) use self::{
    join::{join, join_block, join_bytes},
    split::{split, split_bytes},
};

/// Bytes of a register.
type Line = [u8; 64];
pub(crate) type Eight = [__m512i; 8];

/// A line of indices: `line!(at => value of byte at)`.
macro_rules! line {
    ($at:ident => $value:expr) => {{
        const LINE: Line = {
            let mut line = [0; 64];
            let mut $at: usize = 0;
            while $at < 64 {
                let value: usize = $value;
                line[$at] = value.to_le_bytes()[0];
                $at += 1;
            }
            line
        };
        load(&LINE)
    }};
}

use line;

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn load(line: &Line) -> __m512i {
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(line.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn store(line: &mut Line, value: __m512i) {
    // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_si512(line.as_mut_ptr().cast(), value) }
}

/// Transposes the matrices in the quadwords: bit `i` of the result's byte `j` is bit `j` of byte
/// `7 − i`, if byte `j` of `select` is `1 << j`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn transpose(matrices: __m512i, select: __m512i) -> __m512i {
    _mm512_gf2p8affine_epi64_epi8::<0>(select, matrices)
}

/// Unpacks the pairs of registers `D` apart.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn unpack<const N: usize, const D: usize>(v: [__m512i; N]) -> [__m512i; N] {
    let mut out = v;
    for pair in 0..N / 2 {
        let a = pair / D * 2 * D + pair % D;
        out[a] = _mm512_unpacklo_epi8(v[a], v[a + D]);
        out[a + D] = _mm512_unpackhi_epi8(v[a], v[a + D]);
    }
    out
}
