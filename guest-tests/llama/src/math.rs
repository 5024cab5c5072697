//! The operations of a forward pass, each with its order of additions fixed.

/// A count as a number; exact, for shapes end at 2^20.
#[expect(clippy::cast_precision_loss, reason = "counts here are at most 2^20")]
pub(crate) fn number(count: usize) -> f32 {
    count as f32
}

/// The scalar product, summed from the first term on.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |sum, (a, b)| sum + a * b)
}

/// `x` divided by its root mean square and multiplied by `gain`.
pub(crate) fn rms_norm(x: &[f32], gain: &[f32], out: &mut [f32]) {
    let mean = dot(x, x) / number(x.len());
    let scale = 1.0 / (mean + 1e-5).sqrt();
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
pub(crate) fn rotation(head_size: usize, position: usize) -> Vec<(f32, f32)> {
    let pairs = 0..head_size / 2;
    let angle = |pair| number(position) / libm::powf(10_000.0, number(2 * pair) / number(head_size));
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
