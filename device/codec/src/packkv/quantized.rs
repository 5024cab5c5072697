//! Token-wise quantisation.

use super::{PackKvError, TOKENS, bits::bits_of};

/// The scale of a token as a part of what its values span.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RelativeScale(f32);

impl RelativeScale {
    /// The finest: 101 levels.
    pub const MIN: f32 = 0.01;

    /// # Errors
    /// [`PackKvError::Scale`] outside 0.01 to 1.
    pub fn new(scale: f32) -> Result<Self, PackKvError> {
        if (Self::MIN..=1.0).contains(&scale) { Ok(Self(scale)) } else { Err(PackKvError::Scale(scale)) }
    }

    /// The number.
    pub fn get(self) -> f32 {
        self.0
    }
}

/// What a token's quantised values mean.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Token {
    /// The step between neighbouring levels: a bfloat16, finite and not negative.
    scale: f32,
    /// The level of the quantised value 0.
    pub zero: i16,
}

impl Token {
    /// The step between neighbouring levels.
    pub fn scale(self) -> f32 {
        self.scale
    }

    pub(super) fn scale_bits(self) -> u16 {
        u16::try_from(self.scale.to_bits() >> 16).expect("16 bits are left")
    }

    pub(super) fn stored([a, b, c, d]: [u8; 4]) -> Result<Self, PackKvError> {
        let bits = u16::from_le_bytes([a, b]);
        let scale = f32::from_bits(u32::from(bits) << 16);
        if !scale.is_finite() || scale.is_sign_negative() {
            let bound = "a finite bfloat16 that is not negative";
            return Err(PackKvError::Field { field: "scale of a token", value: bits.into(), bound });
        }
        Ok(Self { scale, zero: i16::from_le_bytes([c, d]) })
    }

    /// What a quantised value stands for.
    pub fn value(self, quantized: u8) -> f32 {
        // At most 23 bits, so exact before it is multiplied.
        #[expect(clippy::cast_precision_loss, reason = "at most 16 bits")]
        let level = (i32::from(self.zero) + i32::from(quantized)) as f32;
        // The level above the largest number is that one.
        (level * self.scale).clamp(f32::MIN, f32::MAX)
    }
}

/// One side, K or V, of a block: small numbers, and what they mean.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    pub(super) channels: usize,
    pub(super) tokens: Vec<Token>,
    /// Token by token.
    pub(super) values: Vec<u8>,
}

impl Quantized {
    /// Quantises 64 tokens of so many channels, all heads' side by side.
    ///
    /// # Errors
    /// [`PackKvError::Values`], [`PackKvError::NotFinite`].
    pub fn new(values: &[f32], channels: usize, scale: RelativeScale) -> Result<Self, PackKvError> {
        if channels == 0 || Some(values.len()) != channels.checked_mul(TOKENS) {
            return Err(PackKvError::Values { values: values.len(), channels });
        }
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            let (token, channel) = (at / channels, at % channels);
            return Err(PackKvError::NotFinite { token, channel, value: values[at] });
        }
        let mut quantized = Self { channels, tokens: Vec::with_capacity(TOKENS), values: Vec::new() };
        quantized.values.reserve_exact(values.len());
        for row in values.chunks(channels) {
            quantized.add(row, scale);
        }
        Ok(quantized)
    }

    fn add(&mut self, row: &[f32], relative: RelativeScale) {
        let least = f64::from(row.iter().copied().fold(f32::INFINITY, f32::min));
        let most = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let largest = least.abs().max(most.abs());
        let wanted = ((most - least) * f64::from(relative.0)).max(largest / f64::from(i16::MAX));
        let scale = round_up(wanted);
        let level = |value: f64| if scale > 0.0 { (value / f64::from(scale)).round_ties_even() } else { 0.0 };
        #[expect(clippy::cast_possible_truncation, reason = "the scale has every level fit 16 bits")]
        let zero = level(least) as i16;
        self.tokens.push(Token { scale, zero });
        self.values.extend(row.iter().map(|value| {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "from the least one's 0 to 101"
            )]
            let quantized = (level(f64::from(*value)) - f64::from(zero)) as u8;
            quantized
        }));
    }

    /// Channels of a token.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// Scale and zero of each token.
    pub fn tokens(&self) -> &[Token] {
        &self.tokens
    }

    /// The quantised values of a token.
    pub fn row(&self, token: usize) -> &[u8] {
        &self.values[token * self.channels..][..self.channels]
    }

    /// What the quantised values of a token stand for.
    pub fn restored(&self, token: usize) -> impl Iterator<Item = f32> + '_ {
        let of = self.tokens[token];
        self.row(token).iter().map(move |quantized| of.value(*quantized))
    }

    /// Bits that hold the greatest quantised value.
    pub fn bits(&self) -> u32 {
        bits_of(self.values.iter().copied().max().unwrap_or(0))
    }
}

/// The least bfloat16 that is not below `wanted`, or the greatest there is.
fn round_up(wanted: f64) -> f32 {
    const GREATEST: u32 = 0x7f7f_0000;
    #[expect(clippy::cast_possible_truncation, reason = "what is lost is looked at below")]
    let near = wanted as f32;
    // Neighbouring bit patterns are neighbouring numbers.
    let bits = near.to_bits() + u32::from(f64::from(near) < wanted);
    f32::from_bits(bits.saturating_add(0xffff).min(GREATEST | 0xffff) & 0xffff_0000)
}
