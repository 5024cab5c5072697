//! Windows of a KV tensor, coded with loss: what a device keeps of one that has all its tokens.
//!
//! The rules:
//! * A window is whole groups of 64 tokens and whole blocks of 4096 bytes ([`WindowPacker::new`]).
//! * It is coded with loss once it is *full*: once no token is zeros in all channels. What is
//!   written so far of a window that is not stays exact.
//! * A value comes back at most half a step of its token from what it was, and half of the last bit
//!   of its format. A token that has a value that is not finite is kept as it is, alone: it changes
//!   nothing of its neighbours.
//! * Coding what came back gives the same values: nothing drifts, however often a window is coded.
//! * A window that would be no shorter is not coded.
//! * The same bytes of a window give the same stored bytes.
//!
//! The stored bytes of a window, little endian:
//!
//! | bytes | |
//! |---|---|
//! | 1 | version, 1 |
//! | 1 | number of the elements' format |
//! | 2 | groups |
//! | 4 | elements of a row |
//!
//! and then of each group:
//!
//! | bytes | |
//! |---|---|
//! | 4 | bytes of its block |
//! | 8 | tokens that are kept as they are, a bit each, the first in the lowest |
//! | … | rows of these |
//! | … | its [block](super::Block), which has K alone; what it says of tokens that are kept as they are counts for nothing |

use std::ops::Range;

use super::{
    Block, Order, PackKvError, PackedSide, Packing, Quantized, TOKENS,
    quantized::Token,
    rows::{Row, Rows},
};
use crate::{
    BLOCK_BYTES,
    block::Bundle,
    bounds::{MAX_BLOCKS, MAX_WINDOW},
    format::Format,
};

/// The version that is written.
const VERSION: u8 = 1;
/// Bytes in front of the first group.
const HEADER: usize = 8;
/// Bytes in front of a group's rows.
const GROUP_HEADER: usize = 12;
/// Bytes of an element.
const WIDTH: usize = 2;

/// Codes the windows of a KV tensor with loss, and decodes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowPacker {
    rows: Rows,
    /// Elements of a row.
    channels: usize,
    packing: Packing,
}

impl WindowPacker {
    /// That of a tensor of this format, whose rows have `channels` elements and whose windows are
    /// of `window` tokens.
    ///
    /// # Errors
    /// [`PackKvError::Window`] where such windows cannot be coded with loss.
    pub fn new(format: Format, channels: u32, window: u32, packing: Packing) -> Result<Self, PackKvError> {
        let refused = |why| Err(PackKvError::Window { why });
        if !Rows::takes(format) {
            return refused(format!("it is for bf16 and fp16, not for {format}"));
        }
        let row = u64::from(channels) * WIDTH as u64;
        let is_whole = |tokens: u32| {
            let bytes = u64::from(tokens) * row;
            u64::from(tokens).is_multiple_of(TOKENS as u64)
                && bytes > 0
                && bytes.is_multiple_of(BLOCK_BYTES as u64)
                && bytes <= (MAX_BLOCKS * BLOCK_BYTES) as u64
        };
        if !is_whole(window) {
            let could = (1..=MAX_WINDOW).find(|tokens| is_whole(*tokens)).map_or_else(
                || format!("no window of up to {MAX_WINDOW} tokens is"),
                |tokens| format!("one of {tokens} tokens is"),
            );
            return refused(format!(
                "a window is whole groups of {TOKENS} tokens and whole blocks of {BLOCK_BYTES} bytes, {MAX_BLOCKS} at \
                 most; of {window} tokens of {row} bytes it is not, {could}"
            ));
        }
        let channels = usize::try_from(row).expect("at most a window's") / WIDTH;
        Ok(Self { rows: Rows { format, scale: packing.scale }, channels, packing })
    }

    /// How it codes.
    pub fn packing(&self) -> Packing {
        self.packing
    }

    fn row_bytes(&self) -> usize {
        self.channels * WIDTH
    }

    /// A window's bytes coded, unless it is to be kept as it is: it is not full, or would be no
    /// shorter.
    pub fn encode(&self, window: &[u8]) -> Option<Vec<u8>> {
        let groups = window.chunks_exact(self.row_bytes() * TOKENS);
        let is_full = || window.chunks_exact(self.row_bytes()).all(|row| row.iter().any(|byte| *byte != 0));
        if window.is_empty() || !groups.remainder().is_empty() || !is_full() {
            return None;
        }
        let number = u16::try_from(groups.len()).expect("MAX_WINDOW tokens at most");
        let mut out = vec![VERSION, self.rows.format as u8];
        out.extend(number.to_le_bytes());
        out.extend(u32::try_from(self.channels).expect("a row of a window").to_le_bytes());
        for group in groups {
            self.encode_group(group, &mut out);
        }
        (out.len() < window.len()).then_some(out)
    }

    /// The same as a bundle for each block of the window, which are pieces of what is stored, none
    /// of them empty: whether it is coded.
    pub fn encode_to(&self, window: &[u8], bundles: &mut Vec<Bundle>) -> bool {
        let Some(stored) = self.encode(window) else { return false };
        let count = window.len() / BLOCK_BYTES;
        bundles.resize_with(count.max(bundles.len()), Bundle::new);
        for (at, bundle) in bundles[..count].iter_mut().enumerate() {
            bundle.put_packed(&stored[at * stored.len() / count..(at + 1) * stored.len() / count]);
        }
        true
    }

    fn encode_group(&self, group: &[u8], out: &mut Vec<u8>) {
        let words: Vec<u16> = group.as_chunks().0.iter().map(|word| u16::from_le_bytes(*word)).collect();
        let rows: Vec<Option<Row>> =
            words.chunks_exact(self.channels).map(|row| self.rows.quantise(row)).collect();
        let mut quantized = Quantized { channels: self.channels, ..Quantized::none() };
        let mut kept = 0_u64;
        // In the place of one that is kept as it is, a neighbour's levels lengthen no pack.
        let nobody = (Token::NONE, vec![0; self.channels]);
        let mut last = rows.iter().flatten().next().unwrap_or(&nobody);
        for (token, row) in rows.iter().enumerate() {
            last = row.as_ref().unwrap_or(last);
            kept |= u64::from(row.is_none()) << token;
            quantized.tokens.push(if row.is_some() { last.0 } else { Token::NONE });
            quantized.values.extend(&last.1);
        }
        let Packing { repack, pack, .. } = self.packing;
        let none = Quantized::none();
        let order = Order::new(repack, pack, &quantized, &none);
        let block = Block { k: &quantized, v: &none }.encode(&order, pack);
        out.extend(u32::try_from(block.len()).expect("less than a window").to_le_bytes());
        out.extend(kept.to_le_bytes());
        let as_they_are = group.chunks_exact(self.row_bytes()).zip(&rows).filter(|(_, row)| row.is_none());
        as_they_are.for_each(|(row, _)| out.extend(row));
        out.extend(block);
    }

    /// What [`Self::encode`] was given, but for what that lost.
    ///
    /// # Errors
    /// [`PackKvError`] for bytes that are no such window, or one of another length than `window`.
    pub fn decode(&self, stored: &[u8], window: &mut [u8]) -> Result<(), PackKvError> {
        let packed = PackedWindow::new(stored)?;
        let group_bytes = self.row_bytes() * TOKENS;
        let is_ours = packed.format() == self.rows.format && packed.channels() == self.channels;
        if !is_ours || packed.groups.len() * group_bytes != window.len() {
            let bound = "that of its tensor's windows";
            let value = packed.groups.len() as u64;
            return Err(PackKvError::Field { field: "shape of a window", value, bound });
        }
        for (group, out) in packed.groups.iter().zip(window.chunks_exact_mut(group_bytes)) {
            group.restore(out);
        }
        Ok(())
    }
}

/// A window as it is stored, all of it checked.
pub struct PackedWindow<'b> {
    rows: Rows,
    channels: usize,
    groups: Vec<PackedGroup<'b>>,
}

/// 64 tokens of a window as they are stored.
pub struct PackedGroup<'b> {
    rows: Rows,
    side: PackedSide<'b>,
    /// The tokens that are kept as they are, and their rows.
    kept: Vec<(usize, &'b [u8])>,
}

impl<'b> PackedWindow<'b> {
    /// The window that these bytes are.
    ///
    /// # Errors
    /// [`PackKvError`] for bytes that are none.
    pub fn new(bytes: &'b [u8]) -> Result<Self, PackKvError> {
        let too_short = |expected| PackKvError::Length { bytes: bytes.len(), expected };
        let (header, mut rest) = bytes.split_at_checked(HEADER).ok_or(too_short(HEADER))?;
        let field = |field, value: u32, bound| Err(PackKvError::Field { field, value: value.into(), bound });
        if header[0] != VERSION {
            return field("version of a window", header[0].into(), "1 is known");
        }
        let format = Format::ALL.into_iter().find(|format| *format as u8 == header[1]);
        let Some(format) = format.filter(|format| Rows::takes(*format)) else {
            return field("format of a window", header[1].into(), "that of bf16 or fp16");
        };
        let groups = u16::from_le_bytes([header[2], header[3]]);
        if groups == 0 || usize::from(groups) * TOKENS > MAX_WINDOW as usize {
            return field("number of groups", groups.into(), "1 to 4");
        }
        let channels = u32::from_le_bytes([header[4], header[5], header[6], header[7]]);
        let most = MAX_BLOCKS * BLOCK_BYTES / TOKENS / WIDTH;
        let channels = match usize::try_from(channels) {
            Ok(channels) if (1..=most).contains(&channels) => channels,
            _ => return field("elements of a row", channels, "at least 1, and a window of 256 blocks"),
        };
        // What it was coded by does not matter to who reads it.
        let rows = Rows { format, scale: Packing::default().scale };
        let mut all = Vec::with_capacity(groups.into());
        for _ in 0..groups {
            let at = bytes.len() - rest.len();
            let header;
            (header, rest) = rest.split_at_checked(GROUP_HEADER).ok_or(too_short(at + GROUP_HEADER))?;
            let (length, kept) = header.split_at(4);
            let length = u32::from_le_bytes(length.try_into().expect("4 bytes")) as usize;
            let mut kept_tokens = u64::from_le_bytes(kept.try_into().expect("8 bytes"));
            let kept_bytes = kept_tokens.count_ones() as usize * channels * WIDTH;
            let end = (at + GROUP_HEADER + kept_bytes).saturating_add(length);
            let (kept_rows, block);
            (kept_rows, rest) = rest.split_at_checked(kept_bytes).ok_or(too_short(end))?;
            (block, rest) = rest.split_at_checked(length).ok_or(too_short(end))?;
            let mut kept = Vec::with_capacity(kept_tokens.count_ones() as usize);
            for row in kept_rows.chunks_exact(channels * WIDTH) {
                kept.push((kept_tokens.trailing_zeros() as usize, row));
                kept_tokens &= kept_tokens - 1;
            }
            let [side, _] = PackedSide::both(block, [channels, 0])?;
            let scale = |(token, _): &(usize, _)| u32::from(side.tokens[*token].scale_bits());
            if let Some(scale) = kept.iter().map(scale).find(|scale| *scale != 0) {
                return field("scale of a token that is kept", scale, "0");
            }
            all.push(PackedGroup { rows, side, kept });
        }
        if !rest.is_empty() {
            return Err(too_short(bytes.len() - rest.len()));
        }
        Ok(Self { rows, channels, groups: all })
    }

    /// The format of what was coded.
    pub fn format(&self) -> Format {
        self.rows.format
    }

    /// Elements of a row.
    pub fn channels(&self) -> usize {
        self.channels
    }

    /// 64 tokens each, in order.
    pub fn groups(&self) -> &[PackedGroup<'b>] {
        &self.groups
    }
}

impl PackedGroup<'_> {
    /// Its tokens as they are packed, but for those that are [kept](Self::kept).
    pub fn side(&self) -> &PackedSide<'_> {
        &self.side
    }

    /// The tokens that are kept as they are.
    pub fn kept(&self) -> impl Iterator<Item = usize> + '_ {
        self.kept.iter().map(|(token, _)| *token)
    }

    /// The rows as they come back.
    fn restore(&self, out: &mut [u8]) {
        let quantized = self.side.unpack();
        let words = out.as_chunks_mut::<WIDTH>().0.iter_mut();
        let values = (0..TOKENS).flat_map(|token| quantized.restored(token));
        for (word, value) in words.zip(values) {
            *word = self.rows.narrow(value).to_le_bytes();
        }
        for (token, row) in &self.kept {
            out[token * row.len()..][..row.len()].copy_from_slice(row);
        }
    }

    /// Values of a row that is kept.
    fn values<'r>(&'r self, row: &'r [u8], channels: &Range<usize>) -> impl Iterator<Item = f32> + 'r {
        let words = row.as_chunks::<WIDTH>().0[channels.clone()].iter();
        words.map(|word| self.rows.widen(u16::from_le_bytes(*word)))
    }

    /// As [`PackedSide::dot`], also of tokens that are kept as they are.
    ///
    /// # Panics
    /// As [`PackedSide::dot`].
    pub fn dot(&self, channels: Range<usize>, query: &[f32]) -> [f32; TOKENS] {
        let mut out = self.side.dot(channels.clone(), query);
        for (token, row) in &self.kept {
            out[*token] = self.values(row, &channels).zip(query).map(|(value, query)| value * query).sum();
        }
        out
    }

    /// As [`PackedSide::weigh`], also of tokens that are kept as they are.
    ///
    /// # Panics
    /// As [`PackedSide::weigh`].
    pub fn weigh(&self, channels: Range<usize>, weights: &[f32; TOKENS], out: &mut [f32]) {
        // What the side says of a token that is kept counts for nothing.
        let mut packed = *weights;
        self.kept().for_each(|token| packed[token] = 0.0);
        self.side.weigh(channels.clone(), &packed, out);
        for (token, row) in &self.kept {
            for (out, value) in out.iter_mut().zip(self.values(row, &channels)) {
                *out += value * weights[*token];
            }
        }
    }
}

#[cfg(test)]
mod tests;
