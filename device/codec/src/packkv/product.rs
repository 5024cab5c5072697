//! Packs as they are stored: unpacked, or multiplied without being unpacked first (the paper's
//! computation-aware decompression).
//!
//! The rules:
//! * Levels are taken from the packs eight at a time: an *octet*, eight places of a channel, in the
//!   bytes of a word.
//! * K: `dot_t = s_t · (Σ_c q_c · level_tc + z_t · Σ_c q_c)`, and V: `out_c = Σ_t w_t · s_t ·
//!   level_tc + Σ_t w_t · s_t · z_t`. So no level becomes the value that it stands for, and none is
//!   written to memory. Sums are in single precision.
//! * The order of tokens matters to scales, weights and results alone, of which there are 64.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod kernel;

use std::ops::Range;

pub use self::kernel::Kernel;
use super::{Order, PackKvError, PackTokens, Quantized, TOKENS, Token, bits};

/// Octets of a channel.
const OCTETS: usize = TOKENS / 8;

/// The lowest bit of each byte.
const ONES: u64 = 0x0101_0101_0101_0101;
/// The highest bit of each byte.
const HIGHEST: u64 = ONES << 7;
/// For each length the bits that a value of it may have, in every byte.
const MASKS: [u64; 8] = {
    let mut masks = [0; 8];
    let mut length = 1;
    while length < 8 {
        masks[length] = masks[length - 1] << 1 | ONES;
        length += 1;
    }
    masks
};
/// The bytes of a pack of four.
const FOUR: u64 = 0xffff_ffff;

/// Of packs, round by round, each number by itself, so that those of packs that follow each other
/// are loaded at once.
#[derive(Default)]
pub(super) struct Heads {
    /// Least values.
    pub(super) least: Vec<u8>,
    /// Bits of what is above these, at most 7.
    pub(super) length: Vec<u8>,
    /// Where packs begin: bits from the first of the side's packs on.
    pub(super) at: Vec<usize>,
}

impl Heads {
    pub(super) fn is_empty(&self) -> bool {
        self.at.is_empty()
    }
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
    /// None if there are no bits.
    pub(super) heads: Heads,
}

impl PackedSide<'_> {
    /// That no value needs more bits than its side has.
    pub(super) fn check_values(&self) -> Result<(), PackKvError> {
        let most = (1_u8 << self.bits) - 1;
        if self.heads.is_empty() || Kernel::best().fit(self, 0..self.channels, most) {
            return Ok(());
        }
        let bound = "what the bits of its side hold";
        Err(PackKvError::Field { field: "value, or more than", value: most.into(), bound })
    }

    /// An octet of a channel in which each pack has so many tokens, by a processor's way to give
    /// bits of a word to the bits of a mask.
    #[expect(
        clippy::inline_always,
        reason = "it must become part of the loop that is compiled for each processor"
    )]
    #[inline(always)]
    fn octet<const PACK: usize>(
        &self,
        channel: usize,
        octet: usize,
        spread: impl Fn(u64, u64) -> u64 + Copy,
    ) -> u64 {
        let some = |round: usize, first: usize, bytes: u64| {
            let Heads { least, length, at } = &self.heads;
            let index = round * self.channels + channel;
            let (least, length) = (least[index], length[index]);
            let word = bits::word(self.packs, at[index] + first * usize::from(length));
            // Both are at most 7 bits, so no byte carries.
            spread(word, MASKS[usize::from(length & 7)] & bytes) + u64::from(least) * (ONES & bytes)
        };
        match PACK {
            16 => some(octet / 2, octet % 2 * 8, u64::MAX),
            8 => some(octet, 0, u64::MAX),
            _ => some(2 * octet, 0, FOUR) | some(2 * octet + 1, 0, FOUR) << 32,
        }
    }

    /// Channels of a token.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// The quantised values, in the order of the tokens.
    pub fn unpack(&self) -> Quantized {
        self.unpack_by(Kernel::best())
    }

    /// As [`Self::unpack`], by this kernel, which must be available.
    pub(super) fn unpack_by(&self, kernel: Kernel) -> Quantized {
        let mut values = vec![0; TOKENS * self.channels];
        if !self.heads.is_empty() {
            kernel.unpack(self, 0..self.channels, &mut values);
        }
        Quantized { channels: self.channels, tokens: self.tokens.clone(), values }
    }

    /// The product of each token's keys in `channels`, a head's, with `query`, by token: what
    /// attention does with K. What passes `f32` is infinite here, where [unpacked](Self::unpack)
    /// values are the largest there is.
    ///
    /// # Panics
    /// If `channels` are no channels of it, or `query` has not one value for each.
    pub fn dot(&self, channels: Range<usize>, query: &[f32]) -> [f32; TOKENS] {
        self.dot_by(Kernel::best(), channels, query)
    }

    /// As [`Self::dot`], by this kernel, which must be available.
    ///
    /// # Panics
    /// As [`Self::dot`].
    pub fn dot_by(&self, kernel: Kernel, channels: Range<usize>, query: &[f32]) -> [f32; TOKENS] {
        assert!(channels.end <= self.channels && channels.len() == query.len(), "{channels:?}");
        let sum: f32 = query.iter().sum();
        let mut sums = [0.0; TOKENS];
        if !self.heads.is_empty() {
            kernel.dot(self, channels, query, &mut sums);
        }
        let mut out = [0.0; TOKENS];
        for (token, levels) in self.order.places().iter().zip(sums) {
            let token = usize::from(*token);
            let of = self.tokens[token];
            out[token] = of.scale() * (levels + f32::from(of.zero) * sum);
        }
        out
    }

    /// Adds to `out` the values of each of `channels`, a head's, times its token's weight: what
    /// attention does with V.
    ///
    /// # Panics
    /// If `channels` are no channels of it, or `out` has not one value for each.
    pub fn weigh(&self, channels: Range<usize>, weights: &[f32; TOKENS], out: &mut [f32]) {
        self.weigh_by(Kernel::best(), channels, weights, out);
    }

    /// As [`Self::weigh`], by this kernel, which must be available.
    ///
    /// # Panics
    /// As [`Self::weigh`].
    pub fn weigh_by(&self, kernel: Kernel, channels: Range<usize>, weights: &[f32; TOKENS], out: &mut [f32]) {
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
        if !self.heads.is_empty() {
            kernel.weigh(self, channels, &scaled, out);
        }
    }
}

/// Whether no level of these channels is above `most`, at most 127.
#[expect(clippy::inline_always, reason = "as above")]
#[inline(always)]
fn fit<const PACK: usize>(
    side: &PackedSide<'_>,
    channels: Range<usize>,
    most: u8,
    spread: impl Fn(u64, u64) -> u64 + Copy,
) -> bool {
    // What is above `most` then has the highest bit of its byte.
    let add = ONES * u64::from(127 - most);
    let mut above = 0;
    for octet in 0..OCTETS {
        for channel in channels.clone() {
            let levels = side.octet::<PACK>(channel, octet, spread);
            above |= levels | ((levels & !HIGHEST) + add);
        }
    }
    above & HIGHEST == 0
}

/// Puts the levels of these channels to their tokens' rows in `values`, which have all channels.
#[expect(clippy::inline_always, reason = "as above")]
#[inline(always)]
fn unpack<const PACK: usize>(
    side: &PackedSide<'_>,
    channels: Range<usize>,
    values: &mut [u8],
    spread: impl Fn(u64, u64) -> u64 + Copy,
) {
    for octet in 0..OCTETS {
        let tokens = &side.order.places()[octet * 8..][..8];
        for channel in channels.clone() {
            let levels = side.octet::<PACK>(channel, octet, spread).to_le_bytes();
            for (token, level) in tokens.iter().zip(levels) {
                values[usize::from(*token) * side.channels + channel] = level;
            }
        }
    }
}

/// Adds up for each place its levels times `query`, as any processor does.
fn dot<const PACK: usize>(
    side: &PackedSide<'_>,
    channels: Range<usize>,
    query: &[f32],
    sums: &mut [f32; TOKENS],
) {
    for (channel, query) in channels.zip(query) {
        for (octet, sums) in sums.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let levels = side.octet::<PACK>(channel, octet, spread).to_le_bytes();
            for (sum, level) in sums.iter_mut().zip(levels) {
                *sum += f32::from(level) * query;
            }
        }
    }
}

/// Adds to each of `out` its channel's levels times what their places have in `scaled`, as any
/// processor does.
fn weigh<const PACK: usize>(
    side: &PackedSide<'_>,
    channels: Range<usize>,
    scaled: &[f32; TOKENS],
    out: &mut [f32],
) {
    for (channel, out) in channels.zip(out) {
        let mut sums = [0.0; 8];
        for (octet, scaled) in scaled.as_chunks::<8>().0.iter().enumerate() {
            let levels = side.octet::<PACK>(channel, octet, spread).to_le_bytes();
            for ((sum, level), scaled) in sums.iter_mut().zip(levels).zip(scaled) {
                *sum += f32::from(level) * scaled;
            }
        }
        *out += sums.iter().sum::<f32>();
    }
}

/// Gives the lowest bits of `word` to the bits of a mask of [`MASKS`], lowest first.
#[expect(clippy::inline_always, reason = "as above")]
#[inline(always)]
fn spread(word: u64, mask: u64) -> u64 {
    let length = (mask & 0xff).count_ones();
    let byte = |at: u32| (word >> (at * length) & mask & 0xff) << (8 * at);
    let bytes = if mask > FOUR { 8 } else { 4 };
    (0..bytes).fold(0, |all, at| all | byte(at))
}
