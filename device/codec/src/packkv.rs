//! Lossy KV caches (PackKV): quantised token by token, tokens reordered, packed to as few bits as
//! each pack needs. For caches only, and only where somebody asked for it.
//!
//! ```
//! use lamina_codec::packkv::{Block, Order, PackTokens, Quantized, RelativeScale, Repack, TOKENS};
//!
//! // 64 tokens of 4 channels.
//! let k: Vec<f32> = (0..4 * TOKENS as u16).map(|n| f32::from(n % 4) + f32::from(n) / 999.0).collect();
//! let v: Vec<f32> = k.iter().map(|k| -k).collect();
//! let k = Quantized::new(&k, 4, RelativeScale::new(0.1).unwrap()).unwrap();
//! let v = Quantized::new(&v, 4, RelativeScale::new(0.2).unwrap()).unwrap();
//! let pack = PackTokens::new(8).unwrap();
//! let order = Order::new(Repack::Greedy, pack, &k, &v);
//! let bytes = Block { k: &k, v: &v }.encode(&order, pack);
//! let (k_again, v_again) = lamina_codec::packkv::decode(&bytes, [4, 4]).unwrap();
//! assert_eq!((k_again, v_again), (k, v));
//! ```
//!
//! The steps, for a *block* of 64 tokens of one layer, K and V:
//!
//! 1. [`Quantized`]: each token of each side gets a scale, `s = (max − min) · r` over all its
//!    channels, and a zero, `z = round(min / s)`; a value becomes `q = round(x / s) − z`. This is
//!    the only step that loses anything.
//! 2. [`Order`]: the tokens are put in an order in which neighbours are alike (the paper's
//!    encode-aware repacking). Attention does not ask for the order of keys, as long as values have
//!    the same one.
//! 3. [`Block::encode`]: *packs*, some tokens that follow each other of one channel, are stored as
//!    their least value and what is above it, in as many bits as the greatest of these needs.
//!
//! The rules:
//! * Where the paper and its published code are silent or unsafe, this is what holds: arithmetic is
//!   in double precision; the scale is a bfloat16, rounded up, so that scale and zero take the 32
//!   bits that the paper counts; a scale is large enough for the zero to fit 16 bits, which costs
//!   2⁻¹⁶ of the largest value; values that are not finite are refused.
//! * A value comes back as `(q + z) · s`, at most half a scale from what it was.
//! * Decoding never trusts the bytes. Everything a reader needs is stored and counted, but the
//!   numbers of channels.
//!
//! A block's bytes, little endian, bits from the lowest of the first byte on:
//!
//! | bytes | |
//! |---|---|
//! | 1 | version, 1 |
//! | 1 | tokens of a pack: 4, 8 or 16 |
//! | 1 | 1 if an order is stored, else 0: the tokens' own |
//! | 1, 1 | bits that hold the greatest `q` of K, of V: B |
//! | 3 | zeros |
//! | 48 | the order, if stored: for each place the number of its token, 6 bits |
//! | 256, 256 | of K, of V: for each token its scale (bfloat16) and zero (16 bits); nothing of a side of no channels |
//! | … | packs of K, padded to whole bytes; then those of V |
//!
//! Packs of a side are in rounds, all channels' packs of the same tokens. First come all rounds'
//! least values and lengths, for each pack B bits and as many as hold B, padded to whole bytes;
//! then their payloads. If B is 0 there is nothing. Padding is zeros.

mod bits;
#[doc(hidden)]
pub mod dense;
mod order;
mod packing;
mod product;
mod quantized;
mod rows;
#[cfg(test)]
mod tests;
mod window;

pub use self::{
    order::{Order, Repack},
    packing::Packing,
    product::{Kernel, PackedSide},
    quantized::{Quantized, RelativeScale, Token},
    window::{PackedGroup, PackedWindow, WindowPacker},
};

use serde::{Deserialize, Serialize};

use bits::{Writer, bits_of};

/// Tokens of a block.
pub const TOKENS: usize = 64;
/// Bits of the greatest quantised value: 101, at the least relative scale.
const MAX_BITS: u32 = 7;
/// The version that is written.
const VERSION: u8 = 1;
/// Bytes in front of the order.
const HEADER: usize = 8;
/// Bytes of an order that is stored.
const ORDER_BYTES: usize = TOKENS * 6 / 8;
/// Bytes of the scales and zeros of a side.
const TOKENS_BYTES: usize = TOKENS * 4;

/// Why there is no block.
#[derive(Clone, Debug, thiserror::Error, PartialEq)]
pub enum PackKvError {
    /// A relative scale that cannot be.
    #[error("a relative scale of {0}: it has to be from 0.01 to 1")]
    Scale(f32),
    /// A way of packing that is spelled wrong.
    #[error("{text:?} is no packkv[:SCALE[,REPACK[,PACK]]], for example packkv:0.1,greedy,8: {why}")]
    Spelling {
        /// What was written.
        text: String,
        /// What is wrong.
        why: String,
    },
    /// Windows that cannot be coded.
    #[error("{why}")]
    Window {
        /// Why not.
        why: String,
    },
    /// Packs of another size.
    #[error("packs of {0} tokens: 4, 8 or 16 are known")]
    Pack(usize),
    /// Values that are no block.
    #[error("{values} values are no 64 tokens of {channels} channels")]
    Values {
        /// How many there are.
        values: usize,
        /// Channels of a token.
        channels: usize,
    },
    /// A value that has no place on a scale.
    #[error("token {token} has {value} in channel {channel}: only finite values can be quantised")]
    NotFinite {
        /// The token in its block.
        token: usize,
        /// The channel.
        channel: usize,
        /// The value.
        value: f32,
    },
    /// A block that ends too early, or goes on behind its end.
    #[error("a block of {bytes} bytes, where its header and lengths say {expected}")]
    Length {
        /// Bytes that there are.
        bytes: usize,
        /// Bytes that there should be, as far as that is known.
        expected: usize,
    },
    /// A field that says what cannot be.
    #[error("the {field} of a block is {value}: {bound}")]
    Field {
        /// Which one.
        field: &'static str,
        /// What it says.
        value: u64,
        /// What it may say.
        bound: &'static str,
    },
}

/// Tokens of a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "usize", into = "usize")]
pub struct PackTokens(usize);

impl TryFrom<usize> for PackTokens {
    type Error = PackKvError;

    fn try_from(tokens: usize) -> Result<Self, PackKvError> {
        Self::new(tokens)
    }
}

impl From<PackTokens> for usize {
    fn from(pack: PackTokens) -> Self {
        pack.0
    }
}

impl PackTokens {
    /// All that there are.
    pub const ALL: [Self; 3] = [Self(4), Self(8), Self(16)];

    /// # Errors
    /// [`PackKvError::Pack`].
    pub fn new(tokens: usize) -> Result<Self, PackKvError> {
        Self::ALL.into_iter().find(|pack| pack.0 == tokens).ok_or(PackKvError::Pack(tokens))
    }

    /// How many.
    pub fn tokens(self) -> usize {
        self.0
    }

    /// Packs of a channel in a block.
    fn rounds(self) -> usize {
        TOKENS / self.0
    }
}

/// Both sides of a block of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Block<'q> {
    /// Keys.
    pub k: &'q Quantized,
    /// Values.
    pub v: &'q Quantized,
}

impl Block<'_> {
    /// The block's bytes. An order that is the tokens' own is not stored.
    pub fn encode(&self, order: &Order, pack: PackTokens) -> Vec<u8> {
        let kept = *order != Order::own();
        let pack_tokens = u8::try_from(pack.0).expect("at most 16");
        let bits = [self.k, self.v].map(|side| u8::try_from(side.bits()).expect("at most 7"));
        let mut out = vec![VERSION, pack_tokens, kept.into(), bits[0], bits[1], 0, 0, 0];
        if kept {
            let mut writer = Writer::new(&mut out);
            order.places().iter().for_each(|token| writer.put((*token).into(), 6));
        }
        for side in [self.k, self.v] {
            for token in side.tokens() {
                out.extend(token.scale_bits().to_le_bytes());
                out.extend(token.zero.to_le_bytes());
            }
        }
        for side in [self.k, self.v] {
            put_packs(side, order, pack, &mut out);
        }
        out
    }
}

/// Bits of a side as the paper counts them: payloads, and for each pack its least value and its
/// length, of values of which the greatest in the *layer* has `bits` bits. It counts neither scales
/// and zeros nor orders and headers.
pub fn papers_bits(side: &Quantized, order: &Order, pack: PackTokens, bits: u32) -> u64 {
    let packs = packs_of(side, order, pack);
    packs.map(|(least, most)| (pack.0 as u64) * u64::from(bits_of(most - least)) + head_bits(bits)).sum()
}

/// Bits of a pack's least value and length.
fn head_bits(bits: u32) -> u64 {
    u64::from(bits + length_bits(bits))
}

/// Bits that hold a length of at most `bits`.
fn length_bits(bits: u32) -> u32 {
    u32::BITS - bits.leading_zeros()
}

/// The least and the greatest value of every pack, round by round.
fn packs_of<'q>(
    side: &'q Quantized,
    order: &'q Order,
    pack: PackTokens,
) -> impl Iterator<Item = (u8, u8)> + 'q {
    let rounds = order.places().chunks(pack.0);
    rounds.flat_map(move |tokens| {
        let (mut least, mut most) = (vec![u8::MAX; side.channels()], vec![0; side.channels()]);
        for token in tokens {
            for ((least, most), value) in least.iter_mut().zip(&mut most).zip(side.row((*token).into())) {
                (*least, *most) = ((*least).min(*value), (*most).max(*value));
            }
        }
        least.into_iter().zip(most)
    })
}

fn put_packs(side: &Quantized, order: &Order, pack: PackTokens, out: &mut Vec<u8>) {
    let bits = side.bits();
    if bits == 0 {
        return;
    }
    let heads: Vec<_> = packs_of(side, order, pack).collect();
    let mut writer = Writer::new(out);
    for (least, most) in &heads {
        writer.put((*least).into(), bits);
        writer.put(bits_of(most - least), length_bits(bits));
    }
    drop(writer);
    let mut writer = Writer::new(out);
    for (tokens, heads) in order.places().chunks(pack.0).zip(heads.chunks(side.channels())) {
        for (channel, (least, most)) in heads.iter().enumerate() {
            let length = bits_of(most - least);
            if length > 0 {
                for token in tokens {
                    writer.put((side.row((*token).into())[channel] - least).into(), length);
                }
            }
        }
    }
}

/// What [`Block::encode`] was given: K and V, in the order of the tokens, of so many channels.
///
/// # Errors
/// [`PackKvError::Length`], [`PackKvError::Field`].
pub fn decode(bytes: &[u8], channels: [usize; 2]) -> Result<(Quantized, Quantized), PackKvError> {
    let [k, v] = PackedSide::both(bytes, channels)?;
    Ok((k.unpack(), v.unpack()))
}

impl<'b> PackedSide<'b> {
    /// K and V of a block's bytes, of so many channels, to be computed with as they are.
    ///
    /// # Errors
    /// [`PackKvError::Length`], [`PackKvError::Field`].
    pub fn both(bytes: &'b [u8], channels: [usize; 2]) -> Result<[Self; 2], PackKvError> {
        let tokens_bytes = channels.map(|channels| if channels == 0 { 0 } else { TOKENS_BYTES });
        let fixed = HEADER + tokens_bytes.iter().sum::<usize>();
        let (header, rest) = bytes
            .split_at_checked(HEADER)
            .ok_or(PackKvError::Length { bytes: bytes.len(), expected: fixed })?;
        let field = |field, value: u8, bound| PackKvError::Field { field, value: value.into(), bound };
        if header[0] != VERSION {
            return Err(field("version", header[0], "1 is known"));
        }
        let pack = PackTokens::new(header[1].into())
            .map_err(|_| field("tokens of a pack", header[1], "4, 8 or 16"))?;
        if header[2] > 1 {
            return Err(field("mark of a stored order", header[2], "0 or 1"));
        }
        for bits in &header[3..5] {
            if u32::from(*bits) > MAX_BITS {
                return Err(field("bits of a side", *bits, "at most 7"));
            }
        }
        if let Some(other) = header[5..].iter().find(|byte| **byte != 0) {
            return Err(field("reserved byte", *other, "0"));
        }
        let order_bytes = if header[2] == 1 { ORDER_BYTES } else { 0 };
        let expected = fixed + order_bytes;
        let too_short = PackKvError::Length { bytes: bytes.len(), expected };
        let (order, rest) = rest.split_at_checked(order_bytes).ok_or(too_short.clone())?;
        let order = if header[2] == 1 { Order::stored(order)? } else { Order::own() };
        let (tokens, rest) = rest.split_at_checked(fixed - HEADER).ok_or(too_short)?;
        let at = bytes.len() - rest.len();
        let side = |side: usize, from: usize| {
            let tokens = if side == 0 { &tokens[..tokens_bytes[0]] } else { &tokens[tokens_bytes[0]..] };
            Self::new(bytes, from, (channels[side], header[3 + side].into()), tokens, pack, order.clone())
        };
        let (k, end) = side(0, at)?;
        let (v, end) = side(1, end)?;
        if end != bytes.len() {
            return Err(PackKvError::Length { bytes: bytes.len(), expected: end });
        }
        Ok([k, v])
    }

    /// A side whose packs begin at byte `at`, and where they end.
    fn new(
        block: &'b [u8],
        at: usize,
        (channels, bits): (usize, u32),
        tokens: &[u8],
        pack: PackTokens,
        order: Order,
    ) -> Result<(Self, usize), PackKvError> {
        let tokens =
            tokens.as_chunks::<4>().0.iter().map(|bytes| Token::stored(*bytes)).collect::<Result<_, _>>()?;
        let mut side =
            Self { packs: &[], channels, bits, tokens, pack, order, heads: product::Heads::default() };
        if bits == 0 {
            return Ok((side, at));
        }
        let packs = channels.saturating_mul(pack.rounds());
        let too_short = |expected: usize| PackKvError::Length { bytes: block.len(), expected };
        let head_bits = bits + length_bits(bits);
        let heads = packs.saturating_mul(head_bits as usize);
        let end = at.saturating_add(heads.div_ceil(8));
        let bytes = block.get(at..end).ok_or(too_short(end))?;
        check_padding(bytes, heads)?;
        let mut payload = heads.next_multiple_of(8);
        let product::Heads { least: leasts, length: lengths, at: places } = &mut side.heads;
        leasts.reserve_exact(packs);
        lengths.reserve_exact(packs);
        places.reserve_exact(packs);
        for index in 0..packs {
            let head = bits::word(bytes, index * head_bits as usize);
            let (least, length) = (head & ((1 << bits) - 1), head >> bits & ((1 << length_bits(bits)) - 1));
            if length > bits.into() {
                let bound = "at most the bits of its side";
                return Err(PackKvError::Field { field: "length of a pack", value: length, bound });
            }
            leasts.push(u8::try_from(least).expect("at most 7 bits"));
            lengths.push(u8::try_from(length).expect("at most 7"));
            places.push(payload);
            payload = payload.saturating_add(pack.tokens() * usize::try_from(length).expect("at most 7"));
        }
        let end = at.saturating_add(payload.div_ceil(8));
        side.packs = block.get(at..end).ok_or(too_short(end))?;
        check_padding(side.packs, payload)?;
        side.check_values()?;
        Ok((side, end))
    }
}

/// That what is behind these bits, to the end of the last byte, is zeros.
fn check_padding(bytes: &[u8], bits: usize) -> Result<(), PackKvError> {
    let unused = bytes.len() * 8 - bits;
    let padding = bytes.last().map_or(0, |last| u32::from(*last) << unused >> 8 << 8);
    if padding == 0 {
        return Ok(());
    }
    Err(PackKvError::Field { field: "padding of packs", value: padding.into(), bound: "zeros" })
}
