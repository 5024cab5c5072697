//! Products with values that were unpacked before: what fused ones are measured against.

use std::ops::Range;

use super::{Kernel, PackedSide, TOKENS};

impl PackedSide<'_> {
    /// The values of all tokens, in their order, each row one behind the other.
    ///
    /// # Panics
    /// If `out` has not one for each token and channel.
    pub fn restore(&self, out: &mut [f32]) {
        self.restore_by(Kernel::best(), out);
    }

    /// As [`Self::restore`], unpacked by this kernel, which must be available.
    ///
    /// # Panics
    /// As [`Self::restore`].
    pub fn restore_by(&self, kernel: Kernel, out: &mut [f32]) {
        let quantized = self.unpack_by(kernel);
        assert_eq!(out.len(), quantized.values.len(), "values of {} channels", self.channels);
        for ((row, levels), token) in
            out.chunks_exact_mut(self.channels).zip(quantized.values.chunks(self.channels)).zip(&self.tokens)
        {
            restore(token.scale(), token.zero, levels, row);
        }
    }
}

#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2+fma"))]
fn restore(scale: f32, zero: i16, levels: &[u8], row: &mut [f32]) {
    for (value, level) in row.iter_mut().zip(levels) {
        *value = f32::from(i16::from(*level) + zero) * scale;
    }
}

/// As [`PackedSide::dot`], of 64 rows of values.
pub fn dot(values: &[f32], channels: usize, head: Range<usize>, query: &[f32]) -> [f32; TOKENS] {
    let mut out = [0.0; TOKENS];
    for (out, row) in out.iter_mut().zip(values.chunks_exact(channels)) {
        *out = dot_row(&row[head.clone()], query);
    }
    out
}

#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2+fma"))]
fn dot_row(row: &[f32], query: &[f32]) -> f32 {
    const LANES: usize = 32;
    let mut sums = [0.0_f32; LANES];
    let (rows, queries) = (row.as_chunks::<LANES>(), query.as_chunks::<LANES>());
    for (row, query) in rows.0.iter().zip(queries.0) {
        for ((sum, value), query) in sums.iter_mut().zip(row).zip(query) {
            *sum += value * query;
        }
    }
    let rest: f32 = rows.1.iter().zip(queries.1).map(|(value, query)| value * query).sum();
    sums.iter().sum::<f32>() + rest
}

/// As [`PackedSide::weigh`], of 64 rows of values.
pub fn weigh(values: &[f32], channels: usize, head: Range<usize>, weights: &[f32; TOKENS], out: &mut [f32]) {
    for (weight, row) in weights.iter().zip(values.chunks_exact(channels)) {
        weigh_row(&row[head.clone()], *weight, out);
    }
}

#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512vl", "x86_64+avx2+fma"))]
fn weigh_row(row: &[f32], weight: f32, out: &mut [f32]) {
    for (out, value) in out.iter_mut().zip(row) {
        *out += value * weight;
    }
}
