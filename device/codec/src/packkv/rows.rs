//! Rows of 16-bit floats, quantised so that to quantise what comes back changes nothing.
//!
//! A device codes the same tokens again and again: when a neighbour is rewritten, when a tensor is
//! made longer, removed or made anew. If each time took half a step, values would drift. So:
//! * A row whose values all lie on the levels of some scale that this relative scale may have given
//!   is taken to be one that came back, and is coded by that scale: it comes back to the bit.
//! * Any other row is quantised, and then held to that: if what comes back would not be kept, the
//!   row is not quantised at all. Its caller keeps it as it is.

use super::quantized::{RelativeScale, Token, least_scale, round_up, token_of};
use crate::{format::Format, view::widen_fp16};

/// Most scales that are tried around one that may have given a row: what its format's rounding
/// leaves open. Of rows far from zero it is more, and these are hardly changed by any scale.
const TRIED: u32 = 32;

/// Quantises rows of one format at one relative scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rows {
    pub(super) format: Format,
    pub(super) scale: RelativeScale,
}

/// A row's scale, zero and levels above that.
pub(super) type Row = (Token, Vec<u8>);

impl Rows {
    /// Whether rows of a format can be quantised.
    pub(super) fn takes(format: Format) -> bool {
        matches!(format, Format::Bf16 | Format::Fp16)
    }

    /// The row quantised, or none if it is to be kept as it is: it has a value that is not finite,
    /// or what comes back would come back otherwise the next time.
    pub(super) fn quantise(self, words: &[u16]) -> Option<Row> {
        let values: Vec<f32> = words.iter().map(|word| self.widen(*word)).collect();
        if values.iter().any(|value| !value.is_finite()) {
            return None;
        }
        if let Some(row) = self.came_back(words, &values) {
            return Some(row);
        }
        let row = nearest(token_of(&values, self.scale), &values)?;
        let back = self.restore(&row);
        let values: Vec<f32> = back.iter().map(|word| self.widen(*word)).collect();
        self.came_back(&back, &values).map(|_| row)
    }

    /// The row as it comes back, if it is one that did.
    fn came_back(self, words: &[u16], values: &[f32]) -> Option<Row> {
        let least = values.iter().copied().fold(f32::INFINITY, f32::min);
        let most = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let tried = |scale: f32| {
            let token = Token::new(scale, least);
            let is_level = |(word, value): (&u16, &f32)| self.narrow(token.at(token.level(*value))) == *word;
            if words.iter().zip(values).all(is_level) { nearest(token, values) } else { None }
        };
        let least_scale = least_scale(least, most);
        let of_size = round_up(least_scale);
        if let Some(row) = neighbours(of_size, 2).filter(|scale| fits(*scale, least_scale)).find_map(tried) {
            return Some(row);
        }
        let span = f64::from(most) - f64::from(least);
        if span == 0.0 {
            return None;
        }
        // A row of the span S was given a scale s from S·r to S·r·(1 + 2⁻⁷), and comes back with a
        // span of a whole number of s that is at most one s from S.
        let relative = f64::from(self.scale.get());
        let (fewest, most_steps) = (1.0 / (relative * (1.0 + 1.0 / 128.0)) - 1.0, 1.0 / relative + 1.0);
        // Both ends were rounded to the format.
        let rounding = (f64::from(least).abs() + f64::from(most).abs()) * self.rounding();
        let mut steps = fewest.floor().max(1.0);
        while steps <= most_steps.ceil() {
            let low = round_up((span - rounding).max(0.0) / steps);
            let high = round_up((span + rounding) / steps);
            let count = (high.to_bits() - low.to_bits()) >> 16;
            let scales = neighbours(round_up(span / steps), count.min(TRIED) + 1);
            if let Some(row) = scales.filter(|scale| fits(*scale, least_scale)).find_map(tried) {
                return Some(row);
            }
            steps += 1.0;
        }
        None
    }

    /// What a quantised row stands for.
    pub(super) fn restore(self, (token, levels): &Row) -> Vec<u16> {
        levels.iter().map(|level| self.narrow(token.value(*level))).collect()
    }

    pub(super) fn widen(self, word: u16) -> f32 {
        match self.format {
            Format::Fp16 => widen_fp16(word),
            _ => f32::from_bits(u32::from(word) << 16),
        }
    }

    /// The nearest finite number of the format, of two the even one.
    pub(super) fn narrow(self, value: f32) -> u16 {
        match self.format {
            Format::Fp16 => narrow_fp16(value),
            _ => narrow_bf16(value),
        }
    }

    /// The largest relative error of rounding to the format.
    fn rounding(self) -> f64 {
        match self.format {
            Format::Fp16 => 1.0 / 2048.0,
            _ => 1.0 / 256.0,
        }
    }
}

/// Whether levels of this scale fit 16 bits.
fn fits(scale: f32, least_scale: f64) -> bool {
    f64::from(scale) >= least_scale && scale.is_finite()
}

/// So many bfloat16 on each side of one, itself first.
fn neighbours(scale: f32, count: u32) -> impl Iterator<Item = f32> {
    let number = scale.to_bits() >> 16;
    let away = move |step: u32| [number.checked_sub(step), number.checked_add(step)];
    let bits = (0..=count).flat_map(move |step| away(step).into_iter().take(if step == 0 { 1 } else { 2 }));
    bits.flatten().map(|number| f32::from_bits(number << 16))
}

/// Values at the nearest levels, if these fit the bits that there are.
fn nearest(token: Token, values: &[f32]) -> Option<Row> {
    let most = f64::from((1_u8 << super::MAX_BITS) - 1);
    let above = values.iter().map(|value| {
        let above = token.level(*value) - f64::from(token.zero);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "compared before")]
        (0.0..=most).contains(&above).then_some(above as u8)
    });
    Some((token, above.collect::<Option<_>>()?))
}

fn narrow_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    let sign = bits >> 16 & 0x8000;
    half((rounded & 0x7fff).min(0x7f7f) | sign)
}

fn narrow_fp16(value: f32) -> u16 {
    let bits = value.to_bits();
    let (sign, size) = (bits >> 16 & 0x8000, value.abs());
    let magnitude = if size < 2_f32.powi(-14) {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "at most 1024")]
        let steps = (size * 2_f32.powi(24)).round_ties_even() as u32;
        steps
    } else {
        let bits = size.to_bits();
        // The exponent's bias is 15, not 127.
        (((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10)).min(0x7bff)
    };
    half(magnitude | sign)
}

fn half(bits: u32) -> u16 {
    u16::try_from(bits).expect("16 bits")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const FORMATS: [Format; 2] = [Format::Bf16, Format::Fp16];

    fn rows(format: Format) -> Rows {
        Rows { format, scale: RelativeScale::new(0.1).unwrap() }
    }

    #[test]
    fn every_number_of_a_format_is_the_nearest_to_itself() {
        for rows in FORMATS.map(rows) {
            for word in 0..=u16::MAX {
                let value = rows.widen(word);
                if value.is_finite() {
                    assert_eq!(rows.narrow(value), word, "{value}");
                }
            }
        }
    }

    #[test]
    fn the_nearest_number_is_no_farther_than_any_other() {
        for rows in FORMATS.map(rows) {
            for word in (0..0x7c00_u16).step_by(7) {
                let (here, next) = (rows.widen(word), rows.widen(word + 1));
                if !next.is_finite() {
                    continue;
                }
                let middle = f64::midpoint(here.into(), next.into());
                #[expect(clippy::cast_possible_truncation, reason = "rounded to nearest")]
                for value in [middle as f32, (middle as f32).next_up(), (middle as f32).next_down()] {
                    let near = f64::from(rows.widen(rows.narrow(value)));
                    let off = (near - f64::from(value)).abs();
                    for other in [here, next] {
                        assert!(off <= (f64::from(other) - f64::from(value)).abs(), "{value} {near}");
                    }
                    assert_eq!(rows.narrow(-value), rows.narrow(value) | 0x8000);
                }
            }
        }
        // Beyond the largest it is that one.
        assert_eq!((rows(Format::Fp16).narrow(65_520.0), rows(Format::Fp16).narrow(-1e9)), (0x7bff, 0xfbff));
        assert_eq!(rows(Format::Bf16).narrow(f32::MAX), 0x7f7f);
    }

    /// Words of a row: of all sizes, of one size, far from zero, few different ones.
    fn words() -> impl Strategy<Value = Vec<u16>> {
        let calm =
            (-1000_i16..1000, 0_i16..3000).prop_map(|(value, offset)| f32::from(value + offset) / 100.0);
        let row = |element: BoxedStrategy<u16>| prop::collection::vec(element, 1..40);
        let bits = |value: f32| half(value.to_bits() >> 16);
        prop_oneof![
            4 => row(calm.prop_map(bits).boxed()),
            2 => row((0_u8..64).prop_map(move |value| bits(300.0 + f32::from(value) / 8.0)).boxed()),
            2 => row(any::<u16>().boxed()),
            1 => row(prop::sample::select(vec![0, 0x8000, 0x3f80, 1, 0x8001, 0x7bff, 0xfbff]).boxed()),
            1 => row((0_u16..16).boxed()),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 4000, ..ProptestConfig::default() })]

        #[test]
        fn what_came_back_once_comes_back_to_the_bit(
            words in words(),
            format in prop::sample::select(FORMATS.to_vec()),
            scale in prop_oneof![Just(0.01_f32), Just(0.1), Just(0.2), Just(1.0), 0.01_f32..1.0],
        ) {
            let rows = Rows { format, scale: RelativeScale::new(scale).unwrap() };
            if let Some(row) = rows.quantise(&words) {
                let back = rows.restore(&row);
                let again = rows.quantise(&back).expect("what came back is kept");
                prop_assert_eq!(rows.restore(&again), back);
            }
        }

        #[test]
        fn few_calm_rows_are_not_quantised(
            values in prop::collection::vec(-8.0_f32..8.0, 16..64),
            format in prop::sample::select(FORMATS.to_vec()),
            scale in prop::sample::select(vec![0.05_f32, 0.1, 0.2, 0.4]),
        ) {
            let rows = Rows { format, scale: RelativeScale::new(scale).unwrap() };
            let words: Vec<_> = values.iter().map(|value| rows.narrow(*value)).collect();
            prop_assert!(rows.quantise(&words).is_some());
        }
    }
}
