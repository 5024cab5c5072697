//! The transpose in plain Rust: 8×8 bits at a time in a `u64`. It defines what every faster kernel must give.

use super::{PlaneBlock, Planes, plane_range};
use crate::{BlockWords, format::Format};

/// Transposes an 8×8 bit matrix: bit `j` of byte `i` becomes bit `i` of byte `j`.
const fn transpose(mut x: u64) -> u64 {
    let mut t = (x ^ (x >> 7)) & 0x00aa_00aa_00aa_00aa;
    x ^= t ^ (t << 7);
    t = (x ^ (x >> 14)) & 0x0000_cccc_0000_cccc;
    x ^= t ^ (t << 14);
    t = (x ^ (x >> 28)) & 0x0000_0000_f0f0_f0f0;
    x ^ t ^ (t << 28)
}

pub(super) fn split(format: Format, words: &BlockWords, planes: &mut PlaneBlock) {
    match format {
        Format::Opaque => panic!("opaque blocks have no planes"),
        Format::Int4 => {
            for (group, bytes) in words.chunks_exact(4).enumerate() {
                let nibbles = u32::from_le_bytes(bytes.try_into().expect("four bytes"));
                let columns = transpose(spread_nibbles(nibbles)).to_le_bytes();
                for (plane, column) in columns[..4].iter().enumerate() {
                    planes[plane_range(format, plane).start + group] = *column;
                }
            }
        }
        Format::Fp8E4m3fn | Format::Fp8E5m2 | Format::Int8 => split_bytes::<1>(format, words, planes),
        Format::Fp16 | Format::Bf16 => split_bytes::<2>(format, words, planes),
        Format::Fp32 => split_bytes::<4>(format, words, planes),
    }
}

/// Elements of `N` bytes, eight at a time, one byte position of them after the other.
fn split_bytes<const N: usize>(format: Format, words: &BlockWords, planes: &mut PlaneBlock) {
    for (group, elements) in words.chunks_exact(8 * N).enumerate() {
        for position in 0..N {
            let mut rows = [0_u8; 8];
            for (row, element) in rows.iter_mut().zip(elements.chunks_exact(N)) {
                *row = element[position];
            }
            let columns = transpose(u64::from_le_bytes(rows)).to_le_bytes();
            for (bit, column) in columns.iter().enumerate() {
                planes[plane_range(format, position * 8 + bit).start + group] = *column;
            }
        }
    }
}

pub(super) fn join(format: Format, planes: &Planes<'_>, words: &mut BlockWords) {
    match format {
        Format::Opaque => panic!("opaque blocks have no planes"),
        Format::Int4 => {
            for (group, bytes) in words.chunks_exact_mut(4).enumerate() {
                let columns = [0, 1, 2, 3].map(|plane: usize| planes[plane][group]);
                let rows = transpose(u32::from_le_bytes(columns).into());
                bytes.copy_from_slice(&gather_nibbles(rows).to_le_bytes());
            }
        }
        Format::Fp8E4m3fn | Format::Fp8E5m2 | Format::Int8 => join_bytes::<1>(planes, words),
        Format::Fp16 | Format::Bf16 => join_bytes::<2>(planes, words),
        Format::Fp32 => join_bytes::<4>(planes, words),
    }
}

fn join_bytes<const N: usize>(planes: &Planes<'_>, words: &mut BlockWords) {
    let count = words.len() / (8 * N);
    for position in 0..N {
        let planes: [&[u8]; 8] = std::array::from_fn(|bit| &planes[position * 8 + bit][..count]);
        for (group, elements) in words.chunks_exact_mut(8 * N).enumerate() {
            let columns = planes.map(|plane| plane[group]);
            let rows = transpose(u64::from_le_bytes(columns)).to_le_bytes();
            for (row, element) in rows.iter().zip(elements.chunks_exact_mut(N)) {
                element[position] = *row;
            }
        }
    }
}

/// The eight nibbles of `x`, each in the low half of a byte.
const fn spread_nibbles(x: u32) -> u64 {
    let x = x as u64;
    let x = (x | x << 16) & 0x0000_ffff_0000_ffff;
    let x = (x | x << 8) & 0x00ff_00ff_00ff_00ff;
    (x | x << 4) & 0x0f0f_0f0f_0f0f_0f0f
}

/// The low halves of the eight bytes of `x`, side by side.
#[expect(clippy::cast_possible_truncation, reason = "the upper half is dropped on purpose")]
const fn gather_nibbles(x: u64) -> u32 {
    let x = x & 0x0f0f_0f0f_0f0f_0f0f;
    let x = (x | x >> 4) & 0x00ff_00ff_00ff_00ff;
    let x = (x | x >> 8) & 0x0000_ffff_0000_ffff;
    (x | x >> 16) as u32
}
