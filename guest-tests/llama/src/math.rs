//! The operations of a forward pass, each with its order of additions fixed.

use wide::f32x8;

/// A count as a number; exact, for shapes end at 2^20.
#[expect(clippy::cast_precision_loss, reason = "counts here are at most 2^20")]
pub(crate) fn number(count: usize) -> f32 {
    count as f32
}

/// Partial sums of a scalar product: as many as a processor adds at once.
const LANES: usize = 8;

/// The scalar product. Term i goes to partial sum i mod [`LANES`]; the partial sums are added in
/// pairs, and to that the terms behind the last whole group, one after the other.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks(), b.as_chunks());
    let mut sums = f32x8::ZERO;
    for (a, b) in a.iter().zip(b) {
        sums += f32x8::new(*a) * f32x8::new(*b);
    }
    total(sums, a_rest, b_rest)
}

/// The scalar products of `rows` with each of `xs`, all of them as long: `out` has one for each
/// of `xs`, row after row. Each is [`dot`]'s, to the bit.
pub(crate) fn products(rows: &[f32], xs: &[f32], length: usize, out: &mut [f32]) {
    let count = xs.len() / length;
    for (rows, out) in rows.chunks(2 * length).zip(out.chunks_mut(2 * count)) {
        if rows.len() < 2 * length {
            for (x, out) in xs.chunks_exact(length).zip(out) {
                *out = dot(rows, x);
            }
            continue;
        }
        // Two rows by two columns: each number that is loaded is used twice.
        let ((first, second), (upper, lower)) = (rows.split_at(length), out.split_at_mut(count));
        let ((a, a_rest), (b, b_rest)) = (first.as_chunks::<LANES>(), second.as_chunks::<LANES>());
        for ((xs, upper), lower) in xs.chunks(2 * length).zip(upper.chunks_mut(2)).zip(lower.chunks_mut(2)) {
            if xs.len() < 2 * length {
                (upper[0], lower[0]) = (dot(first, xs), dot(second, xs));
                continue;
            }
            let (x, y) = xs.split_at(length);
            let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
            let mut sums = [f32x8::ZERO; 4];
            for (((a, b), x), y) in a.iter().zip(b).zip(x).zip(y) {
                let (a, b, x, y) = (f32x8::new(*a), f32x8::new(*b), f32x8::new(*x), f32x8::new(*y));
                sums[0] += a * x;
                sums[1] += a * y;
                sums[2] += b * x;
                sums[3] += b * y;
            }
            upper[0] = total(sums[0], a_rest, x_rest);
            upper[1] = total(sums[1], a_rest, y_rest);
            lower[0] = total(sums[2], b_rest, x_rest);
            lower[1] = total(sums[3], b_rest, y_rest);
        }
    }
}

#[inline]
fn total(sums: f32x8, a: &[f32], b: &[f32]) -> f32 {
    let [s0, s1, s2, s3, s4, s5, s6, s7] = sums.to_array();
    let sum = ((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7));
    a.iter().zip(b).fold(sum, |sum, (a, b)| sum + a * b)
}

/// `x` divided by its root mean square and multiplied by `gain`.
pub(crate) fn rms_norm(x: &[f32], gain: &[f32], epsilon: f32, out: &mut [f32]) {
    let mean = dot(x, x) / number(x.len());
    let scale = 1.0 / (mean + epsilon).sqrt();
    for ((out, x), gain) in out.iter_mut().zip(x).zip(gain) {
        *out = gain * (scale * x);
    }
}

/// Makes weights that sum to one of logarithms, by way of the largest.
pub(crate) fn softmax(x: &mut [f32]) {
    let largest = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for x in x.iter_mut() {
        *x = libm::expf(*x - largest);
        sum += *x;
    }
    for x in x.iter_mut() {
        *x /= sum;
    }
}

/// The gated activation of the feed-forward block: `SiLU` of `gate`, times `up`.
pub(crate) fn swiglu(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + libm::expf(-*gate)) * up;
    }
}

/// Cosine and sine of the rotary embedding at `position`, one for each pair of a head's channels:
/// the angle grows with the position and falls with the channel.
pub(crate) fn rotation(theta: f32, head_size: usize, position: usize) -> Vec<(f32, f32)> {
    let pairs = 0..head_size / 2;
    let angle = |pair| number(position) / libm::powf(theta, number(2 * pair) / number(head_size));
    pairs.map(angle).map(|angle| (libm::cosf(angle), libm::sinf(angle))).collect()
}

/// Rotates each pair of neighbouring channels of each head.
pub(crate) fn rotate(x: &mut [f32], rotation: &[(f32, f32)]) {
    for head in x.chunks_exact_mut(2 * rotation.len()) {
        for (pair, (cos, sin)) in head.chunks_exact_mut(2).zip(rotation) {
            (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn many_products_are_each_the_one(
            length in 1_usize..40,
            rows in 0_usize..6,
            columns in 1_usize..6,
            seed: u64,
        ) {
            let mut state = seed;
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                f32::from(u16::try_from(state >> 48).unwrap()) / 1000.0 - 32.0
            };
            let mut numbers = |count: usize| (0..count).map(|_| next()).collect::<Vec<_>>();
            let (a, x) = (numbers(rows * length), numbers(columns * length));
            let mut out = vec![0.0; rows * columns];
            products(&a, &x, length, &mut out);
            let want = a.chunks(length).flat_map(|row| x.chunks(length).map(|x| dot(row, x)));
            prop_assert_eq!(out, want.collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_sum_is_made_in_the_order_that_is_written() {
        let (mut a, large) = ([0.0; 17], 16_777_216.0);
        (a[0], a[16]) = (large, -large);
        // One is lost beside 2^24, two are not: those of lanes 1 and 5 meet first.
        (a[1], a[8]) = (1.0, 1.0);
        assert_eq!(dot(&a, &[1.0; 17]).to_bits(), 0.0_f32.to_bits());
        (a[5], a[8]) = (1.0, 0.0);
        assert_eq!(dot(&a, &[1.0; 17]).to_bits(), 2.0_f32.to_bits());
    }
}
