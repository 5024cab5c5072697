//! Lossy rounding before coding, as the paper's Table IV has it: fp32, fp16 and bf16 values to fp8
//! and to int4.
//!
//! * `fp8` is the device's own view `fp8_e4m3fn@s` of the tensor, with the smallest scale s at
//!   which its largest finite magnitude does not saturate.
//! * `int4` is symmetric in groups of [`GROUP`] elements in memory order: x / d to nearest even
//!   with d a seventh of the group's largest finite magnitude, so −7 to 7; NaN becomes 0. The
//!   groups' d are not stored and not counted.

use lamina_codec::format::Format;
use lamina_codec::plane;
use lamina_codec::view::{View, widen_fp16};
use lamina_codec::{BLOCK_BYTES, BlockWords};

/// Elements that share an int4 scale.
pub const GROUP: usize = 128;
/// The largest finite `fp8_e4m3fn`.
const LARGEST_FP8: f32 = 448.0;
/// Scales that a view's spelling can name.
const SCALES: std::ops::RangeInclusive<i32> = -64..=64;

/// Whether values of this format are rounded.
pub fn applies(format: Format) -> bool {
    matches!(format, Format::Fp32 | Format::Fp16 | Format::Bf16)
}

/// The largest finite magnitude of the values in `bytes`; 0 if there is none.
pub(super) fn largest(format: Format, bytes: &[u8]) -> f32 {
    values(format, bytes).map(f32::abs).filter(|value| value.is_finite()).fold(0.0, f32::max)
}

/// The view that rounds values up to `largest` to fp8.
pub(super) fn fp8_view(format: Format, largest: f32) -> View {
    let scale = SCALES.clone().find(|scale| largest * 2_f32.powi(-scale) <= LARGEST_FP8);
    let scale = if largest == 0.0 { 0 } else { scale.unwrap_or(*SCALES.end()) };
    View::parse(format, &format!("fp8_e4m3fn@{scale}")).expect("a view of every format that is rounded")
}

/// Appends what `view` shows of the values in `bytes` to `out`.
pub(super) fn to_fp8(view: &View, bytes: &[u8], out: &mut Vec<u8>) {
    let format = view.format();
    let start = out.len();
    let per_block = usize::try_from(format.block_elements()).expect("at most 8192");
    for block in bytes.chunks(BLOCK_BYTES) {
        let mut words: BlockWords = [0; BLOCK_BYTES];
        words[..block.len()].copy_from_slice(block);
        plane::clear_outside(format, view.mask(), &mut words);
        view.render(&mut words, 0, per_block, out);
    }
    out.truncate(start + bytes.len() * 8 / format.bits() as usize);
}

/// Appends the values in `bytes`, which begin a group, to `out` as int4.
pub(super) fn to_int4(format: Format, bytes: &[u8], out: &mut Vec<u8>) {
    for group in bytes.chunks(GROUP * format.bits() as usize / 8) {
        let step = largest(format, group) / 7.0;
        let mut low = None;
        for value in values(format, group) {
            let level = if step > 0.0 { (value / step).round_ties_even().clamp(-7.0, 7.0) } else { 0.0 };
            #[expect(clippy::cast_possible_truncation, reason = "−7 to 7; NaN becomes 0")]
            let nibble = (level as i8).cast_unsigned() & 15;
            match low.take() {
                None => low = Some(nibble),
                Some(low) => out.push(nibble << 4 | low),
            }
        }
        out.extend(low);
    }
}

/// The values of a format that is rounded.
pub(super) fn values(format: Format, bytes: &[u8]) -> impl Iterator<Item = f32> {
    let width = format.bits() as usize / 8;
    bytes.chunks_exact(width).map(move |element| match (format, element) {
        (Format::Fp16, &[a, b]) => widen_fp16(u16::from_le_bytes([a, b])),
        (_, &[a, b]) => f32::from_le_bytes([0, 0, a, b]),
        (_, element) => f32::from_le_bytes(element.try_into().expect("fp32, fp16 or bf16")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bf16(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()[2..].to_vec()).collect()
    }

    #[test]
    fn the_largest_value_fits_fp8_and_would_not_at_a_smaller_scale() {
        for (largest, scale) in [(448.0, 0), (449.0, 1), (1.0, -8), (0.875, -9), (0.0, 0), (3e38, 64)] {
            assert_eq!(fp8_view(Format::Fp32, largest).scale_exp(), scale, "{largest}");
        }
        let mut out = Vec::new();
        to_fp8(&fp8_view(Format::Bf16, 0.875), &bf16(&[0.875, -0.875, 0.0, 0.4375, f32::NAN]), &mut out);
        assert_eq!(out, [0x7e, 0xfe, 0x00, 0x76, 0x7f]);
    }

    #[test]
    fn int4_fills_its_range_group_by_group() {
        let mut values = vec![0.0; 2 * GROUP + 3];
        values[..6].copy_from_slice(&[7.0, -7.0, 1.0, 0.5, f32::NAN, f32::INFINITY]);
        values[GROUP..GROUP + 2].copy_from_slice(&[0.014, -0.002]);
        values[2 * GROUP..].copy_from_slice(&[2.0, 0.0, -2.0]);
        let mut out = Vec::new();
        to_int4(Format::Bf16, &bf16(&values), &mut out);
        assert_eq!(out.len(), GROUP + 2);
        assert_eq!(out[..3], [0x97, 0x01, 0x70]);
        assert_eq!(out[GROUP / 2..GROUP / 2 + 2], [0xf7, 0x00]);
        assert_eq!(out[GROUP..], [0x07, 0x09]);
    }

    #[test]
    fn every_source_has_its_values() {
        assert_eq!(values(Format::Fp16, &0xc500_u16.to_le_bytes()).collect::<Vec<_>>(), [-5.0]);
        assert_eq!(values(Format::Fp32, &1.5_f32.to_le_bytes()).collect::<Vec<_>>(), [1.5]);
        assert!((largest(Format::Bf16, &bf16(&[1.0, -3.0, f32::NAN, f32::NEG_INFINITY])) - 3.0).abs() < 1e-9);
    }
}
