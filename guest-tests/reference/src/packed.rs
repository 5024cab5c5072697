//! What comes back of a KV tensor that is packed with loss, by the rules of `docs/format.md`.

/// Tokens that are packed together.
const TOKENS: usize = 64;
/// Bytes of a block of the device.
const BLOCK: usize = 4096;

/// What a device gives of the rows of bf16, `channels` each, of a tensor whose full windows are
/// packed at a relative scale: windows of the fewest tokens that are whole groups of 64 and whole
/// blocks. A window in which a row is zeros comes back as it is.
///
/// Rows whose quantised values would not be kept a second time, which a device keeps as they are,
/// are not looked for: rows of a model's K and V are none.
///
/// # Panics
/// If no window of up to 256 tokens is whole blocks.
pub fn packed_windows(bytes: &[u8], channels: usize, scale: f32) -> Vec<u8> {
    let row = 2 * channels;
    let mut windows = (1..=4).map(|groups| groups * TOKENS * row);
    let window = windows.find(|bytes| bytes % BLOCK == 0).expect("a window of whole blocks");
    let mut out = bytes.to_vec();
    for window in out.chunks_exact_mut(window) {
        if window.chunks_exact(row).all(|row| row.iter().any(|byte| *byte != 0)) {
            window.chunks_exact_mut(row).for_each(|row| pack(row, scale));
        }
    }
    out
}

#[expect(clippy::cast_possible_truncation, reason = "what is lost only moves where a search begins")]
fn pack(row: &mut [u8], scale: f32) {
    let values: Vec<f64> =
        row.chunks(2).map(|word| f64::from(f32::from_le_bytes([0, 0, word[0], word[1]]))).collect();
    if !values.iter().all(|value| value.is_finite()) {
        return;
    }
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let wanted = ((most - least) * f64::from(scale)).max(least.abs().max(most.abs()) / 32767.0);
    // Of all bfloat16 the least that is not below.
    let near = (wanted as f32).to_bits() >> 16;
    let scales = |numbers: std::ops::Range<u32>| numbers.map(|bits| f64::from(f32::from_bits(bits << 16)));
    let step = scales(near..0x7f80).find(|step| *step >= wanted).expect("a finite row");
    let level = |value: f64, step: f64| if step > 0.0 { (value / step).round_ties_even() } else { 0.0 };
    let back = |value: f64, step: f64| nearest(level(value, step) * step).to_le_bytes();
    // A row that came back is one whose values are levels of a scale near what is asked for: within
    // four times of it.
    let mut others = scales(near.saturating_sub(256)..(near + 256).min(0x7f80));
    if others.any(|step| row.chunks(2).zip(&values).all(|(word, value)| word == back(*value, step))) {
        return;
    }
    for (word, value) in row.chunks_mut(2).zip(values) {
        word.copy_from_slice(&back(value, step));
    }
}

/// The bf16 nearest to a value of at most 24 bits, of two the even one, and no infinity.
#[expect(clippy::cast_possible_truncation, reason = "it is exact, and so few bits are left")]
fn nearest(value: f64) -> u16 {
    let bits = (value as f32).to_bits();
    let rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    let most = 0x7f7f | rounded & 0x8000;
    if rounded & 0x7fff > 0x7f7f { most as u16 } else { rounded as u16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hand_computed_row() {
        let bf16 = |values: &[f32]| {
            values.iter().flat_map(|value| value.to_le_bytes()[2..].to_vec()).collect::<Vec<u8>>()
        };
        // Steps of a tenth of 8.09375, which is 0.8125 as a bfloat16: -4, -1, 0, 2 and 6 of them.
        let mut row = bf16(&[-3.093_75, -1.0, 0.0, 2.0, 5.0]);
        pack(&mut row, 0.1);
        assert_eq!(row, bf16(&[-3.25, -0.8125, 0.0, 1.625, 4.875]));
        let before = row.clone();
        pack(&mut row, 0.1);
        assert_eq!(row, before);
    }

    #[test]
    fn a_window_that_is_not_full_is_as_it_was() {
        let bytes: Vec<u8> = (0..4096_u32).flat_map(|at| [(at * 7).to_le_bytes()[0], 0x3f]).collect();
        let mut gap = bytes.clone();
        gap[4096 + 64..4096 + 128].fill(0);
        let back = packed_windows(&gap, 32, 0.2);
        assert!(back[..4096] != gap[..4096] && back[4096..] == gap[4096..]);
        assert!(back[..4096] == packed_windows(&bytes, 32, 0.2)[..4096]);
    }
}
