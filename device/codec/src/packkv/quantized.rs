//! Token-wise quantisation.

use serde::{Deserialize, Serialize};

use super::{PackKvError, TOKENS, bits::bits_of};

/// The scale of a token as a part of what its values span.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "f32", into = "f32")]
pub struct RelativeScale(f32);

// It is a number from 0.01 to 1.
impl Eq for RelativeScale {}

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

impl TryFrom<f32> for RelativeScale {
    type Error = PackKvError;

    fn try_from(scale: f32) -> Result<Self, PackKvError> {
        Self::new(scale)
    }
}

impl From<RelativeScale> for f32 {
    fn from(scale: RelativeScale) -> Self {
        scale.0
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
    /// What all channels share that have no values.
    pub(super) const NONE: Self = Self { scale: 0.0, zero: 0 };

    /// That of values of which `least` is the least one, with this scale: a bfloat16, large enough
    /// for every level to fit 16 bits.
    pub(super) fn new(scale: f32, least: f32) -> Self {
        let mut token = Self { scale, zero: 0 };
        #[expect(clippy::cast_possible_truncation, reason = "the scale has every level fit 16 bits")]
        let zero = token.level(least) as i16;
        token.zero = zero;
        token
    }

    /// The level nearest to a value, not counted from the zero.
    pub(super) fn level(self, value: f32) -> f64 {
        if self.scale > 0.0 { (f64::from(value) / f64::from(self.scale)).round_ties_even() } else { 0.0 }
    }

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
        self.at((i32::from(self.zero) + i32::from(quantized)).into())
    }

    /// What a level stands for that is not counted from the zero.
    #[expect(clippy::cast_possible_truncation, reason = "a whole number of at most 17 bits")]
    pub(super) fn at(self, level: f64) -> f32 {
        // The product is exact; the level above the largest number is that one.
        (level as f32 * self.scale).clamp(f32::MIN, f32::MAX)
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

    /// That of no channels, in the place of a side that a block does not have.
    pub fn none() -> Self {
        Self { channels: 0, tokens: Vec::new(), values: Vec::new() }
    }

    fn add(&mut self, row: &[f32], relative: RelativeScale) {
        let token = token_of(row, relative);
        self.tokens.push(token);
        self.values.extend(row.iter().map(|value| {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "from the least one's 0 to 101"
            )]
            let quantized = (token.level(*value) - f64::from(token.zero)) as u8;
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

/// Scale and zero of a row of finite values.
pub(super) fn token_of(row: &[f32], relative: RelativeScale) -> Token {
    let least = row.iter().copied().fold(f32::INFINITY, f32::min);
    let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let span = f64::from(most) - f64::from(least);
    Token::new(round_up((span * f64::from(relative.0)).max(least_scale(least, most))), least)
}

/// The least scale by which levels from `least` to `most` fit 16 bits.
pub(super) fn least_scale(least: f32, most: f32) -> f64 {
    f64::from(least.abs().max(most.abs())) / f64::from(i16::MAX)
}

/// The least bfloat16 that is not below `wanted`, or the greatest there is.
pub(super) fn round_up(wanted: f64) -> f32 {
    const GREATEST: u32 = 0x7f7f_0000;
    #[expect(clippy::cast_possible_truncation, reason = "what is lost is looked at below")]
    let near = wanted as f32;
    // Neighbouring bit patterns are neighbouring numbers.
    let bits = near.to_bits() + u32::from(f64::from(near) < wanted);
    f32::from_bits(bits.saturating_add(0xffff).min(GREATEST | 0xffff) & 0xffff_0000)
}
