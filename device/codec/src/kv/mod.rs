//! KV caches: windows of tokens, coded channel by channel (TRACE III-B).
//!
//! A KV tensor is written token by token, but its values are alike within a channel. So its blocks
//! are coded in *windows* of a few dozen:
//!
//! 1. [`paged`]: parts of a token's row that a paged cache keeps apart are put together.
//! 2. [`repeats`]: rows equal to earlier ones are left out.
//! 3. [`order`]: the rows are transposed, so that each channel's elements follow each other.
//! 4. [`delta`]: each channel's exponents become differences from the largest of them, in its block
//!    or in the window.
//! 5. The result is cut in blocks again and each is coded as any block is, with a
//!    [head](crate::head) for what steps 2 and 4 need.
//!
//! The rules:
//! * A window is as many whole blocks as its tokens take, [`MAX_BLOCKS`] at most. Its coded blocks
//!   take the index entries of its own blocks, the first coded one that of the first; what repeats
//!   leave free at its end are blocks of zeros. Windows follow each other from the tensor's
//!   beginning on; the last one ends with the tensor's last block. Where the row does not divide
//!   the window, rows are cut at its borders.
//! * Bytes that are no channel's (padding behind a row, memory behind the tensor's end) are
//!   elements like the others: what a window holds comes back bit by bit.
//! * Each window is coded in whatever way takes least, as far as counts of some of its exponents
//!   tell ([`Coding`]). Nothing is known of other windows. All its blocks are coded in the same
//!   way, and say so.
//! * A stored block that is lost takes with it the blocks of the window that have bytes in it:
//!   itself alone in address order, else often all. The others can be decoded.
//! * A reader needs all blocks of a window for any of its bytes, but of each only the planes it
//!   wants: sign and mantissa are where they always are. A wanted exponent plane needs all of them,
//!   because differences carry.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod bases;
mod block_set;
pub(crate) mod decoder;
mod delta;
pub(crate) mod kernel;
mod order;
mod paged;
mod repeats;
mod shape;
mod spelling;
#[cfg(test)]
pub(crate) mod tests;
#[cfg(target_arch = "x86_64")]
mod tiles;
pub(crate) mod window;

pub use self::{
    block_set::BlockSet,
    decoder::WindowDecoder,
    shape::{KvError, KvLayout, MAX_BLOCKS, MAX_WINDOW, PagedRows, Preset, Shape, WINDOW},
    window::{Coded, Coding},
};
