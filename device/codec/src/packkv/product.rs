//! Packs as they are stored: unpacked, or multiplied without being unpacked first (the paper's
//! computation-aware decompression).

use std::ops::Range;

use super::{Order, PackKvError, PackTokens, Quantized, TOKENS, Token};

/// Values that are taken from the packs at once: at most 7 bits of each, and the 7 in front of
/// them, fit 64 bits.
const GROUP: usize = 8;

/// A pack's least value, the bits of what is above it, and where these begin.
pub(super) struct Head {
    pub(super) least: u8,
    pub(super) length: u8,
    /// Bits from the first of the side's packs on.
    pub(super) at: usize,
}

/// One side of a block as it is stored. All of it was checked.
pub struct PackedSide<'b> {
    /// Heads and payloads.
    pub(super) packs: &'b [u8],
    pub(super) channels: usize,
    pub(super) bits: u32,
    pub(super) tokens: Vec<Token>,
    pub(super) pack: PackTokens,
    pub(super) order: Order,
    /// Of each pack, round by round; none if there are no bits.
    pub(super) heads: Vec<Head>,
}

impl PackedSide<'_> {
    /// That no value needs more bits than its side has.
    pub(super) fn check_values(&self) -> Result<(), PackKvError> {
        let most = (1_u16 << self.bits) - 1;
        for head in &self.heads {
            for group in 0..self.pack.tokens().div_ceil(GROUP) {
                let worst = self.group(head, group).into_iter().max().unwrap_or(0);
                let value = u16::from(head.least) + u16::from(worst);
                if value > most {
                    let bound = "what the bits of its side hold";
                    return Err(PackKvError::Field { field: "value", value: value.into(), bound });
                }
            }
        }
        Ok(())
    }

    /// What is above the least one of [`GROUP`] values of a pack, or of all it has.
    #[inline]
    fn group(&self, head: &Head, group: usize) -> [u8; GROUP] {
        let length = usize::from(head.length);
        let count = self.pack.tokens().min(GROUP);
        let word = self.word(head.at + group * GROUP * length) & ((1 << (count * length)) - 1);
        let mask = (1_u64 << length) - 1;
        #[expect(clippy::cast_possible_truncation, reason = "at most 7 bits")]
        std::array::from_fn(|at| (word >> (at * length) & mask) as u8)
    }

    /// At least 56 bits of the packs from bit `at` on; zeros behind their end.
    #[inline]
    fn word(&self, at: usize) -> u64 {
        let from = at / 8;
        let word = if let Some(bytes) = self.packs.get(from..from + 8) {
            u64::from_le_bytes(bytes.try_into().expect("8 bytes"))
        } else {
            let rest = self.packs.get(from..).unwrap_or_default();
            let mut bytes = [0; 8];
            bytes[..rest.len()].copy_from_slice(rest);
            u64::from_le_bytes(bytes)
        };
        word >> (at % 8)
    }

    /// Channels of a token.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// The quantised values, in the order of the tokens.
    pub fn unpack(&self) -> Quantized {
        let mut values = vec![0; TOKENS * self.channels];
        let each_group = |round: usize, channel: usize, group: usize, head: &Head| {
            let tokens = self.order.places()[round * self.pack.tokens()..][..self.pack.tokens()].iter();
            for (token, above) in tokens.skip(group * GROUP).zip(self.group(head, group)) {
                values[usize::from(*token) * self.channels + channel] = head.least + above;
            }
        };
        self.for_each_group(0..self.channels, each_group);
        Quantized { channels: self.channels, tokens: self.tokens.clone(), values }
    }

    /// Calls with round, channel, group and head for all groups of these channels.
    #[inline]
    fn for_each_group(&self, channels: Range<usize>, mut each: impl FnMut(usize, usize, usize, &Head)) {
        let groups = self.pack.tokens().div_ceil(GROUP);
        for (round, heads) in self.heads.chunks(self.channels).enumerate() {
            for channel in channels.clone() {
                for group in 0..groups {
                    each(round, channel, group, &heads[channel]);
                }
            }
        }
    }

    /// The product of each token's keys in `channels`, a head's, with `query`, by token: what
    /// attention does with K.
    ///
    /// # Panics
    /// If `channels` are no channels of it, or `query` has not one value for each.
    pub fn dot(&self, channels: Range<usize>, query: &[f32]) -> [f32; TOKENS] {
        assert!(channels.end <= self.channels && channels.len() == query.len(), "{channels:?}");
        let sum: f32 = query.iter().sum();
        let sums = dot_levels(self, channels, query);
        let mut out = [0.0; TOKENS];
        for (token, levels) in self.order.places().iter().zip(sums) {
            let Token { zero, .. } = self.tokens[usize::from(*token)];
            out[usize::from(*token)] =
                self.tokens[usize::from(*token)].scale() * (levels + f32::from(zero) * sum);
        }
        out
    }

    /// Adds to `out` the values of each of `channels`, a head's, times its token's weight: what
    /// attention does with V.
    ///
    /// # Panics
    /// If `channels` are no channels of it, or `out` has not one value for each.
    pub fn weigh(&self, channels: Range<usize>, weights: &[f32; TOKENS], out: &mut [f32]) {
        assert!(channels.end <= self.channels && channels.len() == out.len(), "{channels:?}");
        let mut scaled = [0.0; TOKENS];
        let mut zeros = 0.0;
        for (scaled, token) in scaled.iter_mut().zip(self.order.places()) {
            let of = &self.tokens[usize::from(*token)];
            *scaled = weights[usize::from(*token)] * of.scale();
            zeros += *scaled * f32::from(of.zero);
        }
        for out in &mut *out {
            *out += zeros;
        }
        weigh_levels(self, channels, &scaled, out);
    }
}

/// For each place the sum of its quantised values times `query`.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2+fma"))]
fn dot_levels(side: &PackedSide<'_>, channels: Range<usize>, query: &[f32]) -> [f32; TOKENS] {
    let (mut sums, tokens) = ([0.0_f32; TOKENS], side.pack.tokens());
    let (groups, width) = (tokens.div_ceil(GROUP), tokens.min(GROUP));
    for (heads, sums) in side.heads.chunks(side.channels).zip(sums.chunks_mut(tokens)) {
        let mut least = 0.0;
        for (head, query) in heads[channels.clone()].iter().zip(query) {
            least += f32::from(head.least) * query;
            if head.length == 0 {
                continue;
            }
            for group in 0..groups {
                let above = side.group(head, group);
                for (sum, above) in sums[group * width..].iter_mut().zip(above) {
                    *sum += f32::from(above) * query;
                }
            }
        }
        for sum in sums {
            *sum += least;
        }
    }
    sums
}

/// Adds to each of `out` its channel's quantised values times what their places have in `scaled`.
#[multiversion::multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2+fma"))]
fn weigh_levels(side: &PackedSide<'_>, channels: Range<usize>, scaled: &[f32; TOKENS], out: &mut [f32]) {
    let tokens = side.pack.tokens();
    let (groups, width) = (tokens.div_ceil(GROUP), tokens.min(GROUP));
    for (heads, scaled) in side.heads.chunks(side.channels).zip(scaled.chunks(tokens)) {
        let all: f32 = scaled.iter().sum();
        for (head, out) in heads[channels.clone()].iter().zip(&mut *out) {
            let mut sums = [0.0_f32; GROUP];
            if head.length > 0 {
                for group in 0..groups {
                    let above = side.group(head, group);
                    for ((sum, scaled), above) in sums.iter_mut().zip(&scaled[group * width..]).zip(above) {
                        *sum += f32::from(above) * scaled;
                    }
                }
            }
            *out += f32::from(head.least) * all + sums.iter().sum::<f32>();
        }
    }
}
