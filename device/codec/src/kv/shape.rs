//! What a KV tensor looks like: its layout as it is told, and the windows that follow from it.
//!
//! The rules:
//! * Lengths are counted in elements, so that they hold for any format.
//! * A layout is checked when a tensor is made of it ([`Shape::new`]), and refused with the bound
//!   it breaks.

use serde::{Deserialize, Serialize};

pub use crate::bounds::{MAX_BLOCKS, MAX_WINDOW};

use super::{delta::Field, order::Order, paged::Paged};
use crate::{
    BLOCK_BYTES,
    format::Format,
    packkv::{Packing, WindowPacker},
};

/// Tokens of a window that says nothing else.
pub const WINDOW: u32 = 128;

/// How a KV tensor is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Spelled")]
pub struct KvLayout {
    /// Elements of a token's row.
    pub channels: u32,
    /// Tokens of a window.
    pub window: u32,
    /// Elements from one row to the next, padding included; `channels` if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stride: Option<u32>,
    /// Parts a row is cut in, which paged blocks keep apart; one part if not given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paged: Option<PagedRows>,
    /// How its full windows are coded with loss, if somebody asked for that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lossy: Option<Packing>,
}

/// Rows of a paged cache, `[blocks, groups, block, channels / groups]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PagedRows {
    /// Parts of a token's row: heads, or K and V, or both.
    pub groups: u32,
    /// Tokens of a paged block.
    pub block: u32,
}

/// The block layouts of vLLM's paged caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Preset {
    /// `[blocks, block_size, heads, head_size]`: a token's heads in one row.
    Nhd,
    /// `[blocks, heads, block_size, head_size]`: a head's tokens side by side.
    Hnd,
    /// `[blocks, 2, block_size, heads, head_size]`: as `nhd`, K before V in each block.
    NhdKv,
    /// `[blocks, 2, heads, block_size, head_size]`: as `hnd`, K before V in each block.
    HndKv,
}

/// A KV layout that cannot be.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum KvError {
    /// Window or channels.
    #[error(
        "a kv layout has 1 to {MAX_WINDOW} tokens a window and at least one channel, not {window} and {channels}"
    )]
    Size {
        /// Channels given.
        channels: u32,
        /// Window given.
        window: u32,
    },
    /// A row longer than the way to the next.
    #[error("a kv layout's stride is its {channels} channels or more, not {stride}")]
    Stride {
        /// Channels given.
        channels: u32,
        /// Stride given.
        stride: u32,
    },
    /// Rows that cannot be cut so.
    #[error(
        "{channels} channels in {groups} groups of whole bytes, {block} tokens a paged block: groups divide the channels evenly, both are at least 1"
    )]
    Groups {
        /// Channels given.
        channels: u32,
        /// Groups given.
        groups: u32,
        /// Tokens of a paged block.
        block: u32,
    },
    /// Padding between paged rows.
    #[error("a paged kv layout has no padding, so no stride but its {channels} channels, not {stride}")]
    PagedStride {
        /// Channels given.
        channels: u32,
        /// Stride given.
        stride: u32,
    },
    /// Paged blocks that make no window.
    #[error(
        "paged blocks of {bytes} bytes fill no window: a window is whole paged blocks and whole {BLOCK_BYTES}-byte blocks, \
         {} bytes at most", MAX_BLOCKS * BLOCK_BYTES
    )]
    Pages {
        /// Bytes of a paged block.
        bytes: u64,
    },
    /// Windows that cannot be coded with loss.
    #[error("lossy coding: {why}")]
    Lossy {
        /// Why not.
        why: String,
    },
    /// A layout that is spelled wrong.
    #[error("{what}")]
    Spelling {
        /// What is wrong.
        what: &'static str,
    },
}

impl KvLayout {
    /// Rows of `channels` elements without padding.
    pub const fn rows(channels: u32, window: u32) -> Self {
        Self { channels, window, stride: None, paged: None, lossy: None }
    }

    /// The layout of a preset.
    ///
    /// # Errors
    /// [`KvError::Size`] if a row would have more than 2^32 − 1 elements.
    pub fn preset(
        preset: Preset,
        heads: u32,
        head_size: u32,
        block: u32,
        window: u32,
    ) -> Result<Self, KvError> {
        let both = u32::from(matches!(preset, Preset::NhdKv | Preset::HndKv)) + 1;
        let channels = heads.checked_mul(head_size).and_then(|channels| channels.checked_mul(both));
        let channels = channels.ok_or(KvError::Size { channels: u32::MAX, window })?;
        let groups = match preset {
            Preset::Nhd => 1,
            Preset::NhdKv => 2,
            // With parts of no channels they are not bounded.
            Preset::Hnd | Preset::HndKv => heads.saturating_mul(both),
        };
        let paged = (groups > 1).then_some(PagedRows { groups, block });
        Ok(Self { paged, ..Self::rows(channels, window) })
    }
}

/// A layout as it is written in JSON: by numbers, or by a preset's name.
#[derive(Deserialize)]
struct Spelled {
    channels: Option<u32>,
    window: Option<u32>,
    stride: Option<u32>,
    paged: Option<PagedRows>,
    preset: Option<Preset>,
    heads: Option<u32>,
    head_size: Option<u32>,
    block_size: Option<u32>,
    lossy: Option<Packing>,
}

impl TryFrom<Spelled> for KvLayout {
    type Error = KvError;

    fn try_from(spelled: Spelled) -> Result<Self, KvError> {
        let window = spelled.window.unwrap_or(WINDOW);
        let Spelled { channels, stride, paged, heads, head_size, block_size, lossy, .. } = spelled;
        let layout = match (spelled.preset, channels) {
            (None, Some(channels)) => match (heads, head_size, block_size) {
                (None, None, None) => Ok(Self { channels, window, stride, paged, lossy: None }),
                _ => Err(KvError::Spelling { what: "heads, head_size and block_size belong to a preset" }),
            },
            (Some(preset), None) => match (heads, head_size, block_size, stride, paged) {
                (Some(heads), Some(head_size), Some(block), None, None) => {
                    Self::preset(preset, heads, head_size, block, window)
                }
                _ => Err(KvError::Spelling {
                    what: "a kv preset takes heads, head_size and block_size, and no stride or paged rows",
                }),
            },
            _ => Err(KvError::Spelling { what: "a kv layout has either channels or a preset" }),
        };
        Ok(Self { lossy, ..layout? })
    }
}

/// The windows of a KV tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    format: Format,
    width: usize,
    columns: usize,
    paged: Option<Paged>,
    blocks: usize,
    /// Where the exponents are.
    field: Option<Field>,
    /// What codes full windows with loss.
    packer: Option<WindowPacker>,
    /// The column that the second block begins in.
    second: u64,
    /// The elements of a window of all these blocks that begins with a row.
    whole: Order,
}

/// What codes windows of this layout with loss.
fn packer(format: Format, layout: &KvLayout, packing: Packing) -> Result<WindowPacker, KvError> {
    let refused = |why: &str| Err(KvError::Lossy { why: why.to_owned() });
    if layout.paged.is_some() {
        return refused("paged caches have no whole rows");
    }
    if layout.stride.is_some_and(|stride| stride != layout.channels) {
        return refused("what pads rows would be coded with them");
    }
    WindowPacker::new(format, layout.channels, layout.window, packing)
        .map_err(|why| KvError::Lossy { why: why.to_string() })
}

impl Shape {
    /// The windows of a tensor of this format and layout; `None` for `opaque`, which has no
    /// elements to put in order.
    ///
    /// # Errors
    /// [`KvError`] for a layout that cannot be.
    pub fn new(format: Format, layout: &KvLayout) -> Result<Option<Self>, KvError> {
        let KvLayout { channels, window, stride, paged, lossy } = *layout;
        if channels == 0 || window == 0 || window > MAX_WINDOW {
            return Err(KvError::Size { channels, window });
        }
        let stride = stride.unwrap_or(channels);
        if stride < channels {
            return Err(KvError::Stride { channels, stride });
        }
        if paged.is_some() && stride != channels {
            return Err(KvError::PagedStride { channels, stride });
        }
        let bits = u64::from(format.bits());
        let row_bits = u64::from(stride) * bits;
        // Nibbles are put in order two by two; rows of an odd number of them, two rows together.
        let width = usize::try_from(bits.div_ceil(8)).expect("4 at most");
        let columns = row_bits.div_ceil(8) / width as u64;
        let columns = if row_bits.is_multiple_of(8) { columns } else { u64::from(stride) };
        let block = BLOCK_BYTES as u64;
        let (paged, blocks) = match paged {
            None => (None, (u64::from(window) * row_bits).div_ceil(8 * block).clamp(1, MAX_BLOCKS as u64)),
            Some(PagedRows { groups, block: tokens }) => {
                let wrong = KvError::Groups { channels, groups, block: tokens };
                if groups == 0 || tokens == 0 || !row_bits.is_multiple_of(8 * u64::from(groups.max(1))) {
                    return Err(wrong);
                }
                if !channels.is_multiple_of(groups) {
                    return Err(wrong);
                }
                let bytes = (row_bits / 8).saturating_mul(tokens.into());
                // As many paged blocks as the window's tokens fill, and as end with a block.
                let pages = block / gcd(bytes, block);
                let most = MAX_BLOCKS as u64 * block / bytes.saturating_mul(pages).max(1) * pages;
                if most == 0 {
                    return Err(KvError::Pages { bytes });
                }
                let wanted = u64::from(window / tokens).max(1).next_multiple_of(pages).min(most);
                let size = |number: u64| usize::try_from(number).expect("at most a window's");
                let part = size(row_bits / 8 / u64::from(groups));
                let paged = Paged { groups: size(groups.into()), block: size(tokens.into()), part };
                (Some(paged), wanted * bytes / block)
            }
        };
        let packer = lossy.map(|packing| packer(format, layout, packing)).transpose()?;
        if format == Format::Opaque {
            return Ok(None);
        }
        let columns = usize::try_from(columns).expect("as many as 2^32 elements at most");
        let blocks = usize::try_from(blocks).expect("MAX_BLOCKS at most");
        let elements = BLOCK_BYTES / width;
        Ok(Some(Self {
            format,
            width,
            columns,
            paged,
            blocks,
            field: Field::of(format),
            packer,
            second: (elements % columns) as u64,
            whole: Order::new(width, columns, 0, blocks * elements),
        }))
    }

    /// The elements' format.
    pub const fn format(&self) -> Format {
        self.format
    }

    /// Blocks of a window, the last one's aside.
    pub const fn blocks(&self) -> usize {
        self.blocks
    }

    /// What codes full windows with loss, if that was asked for.
    pub const fn packer(&self) -> Option<&WindowPacker> {
        self.packer.as_ref()
    }

    /// Where the exponents are, if elements have some.
    pub(super) const fn field(&self) -> Option<&Field> {
        self.field.as_ref()
    }

    /// How a paged cache cuts rows.
    pub(super) const fn paged(&self) -> Option<&Paged> {
        self.paged.as_ref()
    }

    /// The elements of the window that begins `before` blocks behind the tensor's beginning and has
    /// `blocks` blocks.
    pub fn order(&self, before: u64, blocks: usize) -> Order {
        // Mostly blocks begin with a row.
        if self.second == 0 && blocks == self.blocks {
            return self.whole;
        }
        let columns = self.columns as u64;
        let first =
            usize::try_from((before % columns) * self.second % columns).expect("less than the columns");
        Order::new(self.width, self.columns, first, blocks * BLOCK_BYTES / self.width)
    }
}

const fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}
