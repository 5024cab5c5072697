//! The directory: the first 2 MiB of the views window, the one format that device and guest share.
//!
//! A guest finds every tensor and every view in it by loads alone. The rules:
//!
//! * Everything is little-endian. Offsets are bytes from the start of the directory unless said
//!   otherwise.
//! * The directory is written by the device and read-only to everybody else. Each change raises
//!   `generation`.
//! * `crc32c` covers the `used_bytes` of the directory with the checksum field itself taken as
//!   zero. A reader that raced with a change sees a mismatch ([`DirectoryError::Checksum`]) and
//!   reads again.
//! * Records have a fixed size stated in the header, so that later versions may append fields.
//! * Text (names, view spellings, shapes) lies in one area behind the records, as UTF-8 without
//!   terminators. Records may share it, but have no more together than `used_bytes`.
//!
//! | header field | offset | type |
//! |---|---|---|
//! | magic `LAMINADR` | 0 | 8 bytes |
//! | version (1) | 8 | u32 |
//! | crc32c | 12 | u32 |
//! | generation | 16 | u64 |
//! | used bytes | 24 | u64 |
//! | base window bytes | 32 | u64 |
//! | views window bytes | 40 | u64 |
//! | tensor count, tensor record bytes | 48, 52 | u32, u32 |
//! | view count, view record bytes | 56, 60 | u32, u32 |
//! | tensors offset, views offset, text offset | 64, 72, 80 | u64 |
//! | flags: 1 if not all tensors and views have room here, and the control port tells the rest | 88 | u32 |
//!
//! | tensor record field | offset | type |
//! |---|---|---|
//! | DPA, length in bytes, elements | 0, 8, 16 | u64 |
//! | name, shape, format: offset and length of text | 24, 32, 40 | u32, u32 each |
//! | layout (0 weight, 1 kv), kv channels, kv window, kv stride | 48, 52, 56, 60 | u32 |
//! | kv groups, kv paged tokens | 64, 68 | u32 |
//! | flags: 1 if what is loaded may differ from what was stored, as somebody asked for | 72 | u32 |
//! | reserved | 76 | 4 bytes |
//!
//! The first directories had tensor records of 64 bytes and no stride: a stride of 0 is the
//! channels, and groups and paged tokens that are not there or 0 are 1.
//!
//! | view record field | offset | type |
//! |---|---|---|
//! | offset in the views window, length in bytes, elements | 0, 8, 16 | u64 |
//! | spelling: offset and length of text | 24 | u32, u32 |
//! | tensor: index of its record | 32 | u32 |
//! | bits per element | 36 | u32 |
//! | scale exponent s (a stored value x stands for x·2^s) | 40 | i32 |
//! | reserved | 44 | 20 bytes |

mod decode;
mod encode;
pub mod interleave;
pub mod mailbox;
pub mod shmem;

pub use decode::decode;
pub use encode::encode;
pub use interleave::Interleave;

/// Bytes of the views window that the directory occupies; views begin behind it.
pub const DIRECTORY_BYTES: u64 = 2 << 20;
/// Views are placed at multiples of this many bytes, the usual alignment of a devdax mapping.
pub const VIEW_ALIGN: u64 = 2 << 20;
/// The first eight bytes of a directory.
pub const MAGIC: [u8; 8] = *b"LAMINADR";
/// The version this crate writes and reads.
pub const VERSION: u32 = 1;
/// Bytes of the header.
pub const HEADER_BYTES: usize = 128;
/// Bytes of a tensor record.
pub const TENSOR_RECORD_BYTES: usize = 80;
/// Bytes of the shortest tensor record that is read.
pub const MIN_TENSOR_RECORD_BYTES: usize = 64;
/// Bytes of a view record.
pub const VIEW_RECORD_BYTES: usize = 64;

/// How a tensor's rows are laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Elements in address order.
    Weight,
    /// Token-major rows of `channels` elements, grouped by the device in windows of `window`
    /// tokens.
    Kv {
        /// Elements in a token's row.
        channels: u32,
        /// Tokens in a window.
        window: u32,
        /// Elements from one row to the next.
        stride: u32,
        /// Parts of a row, which paged blocks keep apart:
        /// `[blocks, groups, paged_tokens, channels / groups]`.
        groups: u32,
        /// Tokens of a paged block.
        paged_tokens: u32,
    },
}

impl Layout {
    /// Rows of `channels` elements without padding, in one part.
    pub const fn rows(channels: u32, window: u32) -> Self {
        Self::Kv { channels, window, stride: channels, groups: 1, paged_tokens: 1 }
    }
}

/// One tensor as the directory describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// The tensor's name, unique in the directory.
    pub name: String,
    /// The shape as text, outermost dimension first, for example `512x64`.
    pub shape: String,
    /// The element format by its name, for example `bf16`.
    pub format: String,
    /// Device physical address: the offset in the base window.
    pub dpa: u64,
    /// Bytes in the base window.
    pub length: u64,
    /// Elements.
    pub elements: u64,
    /// The layout.
    pub layout: Layout,
    /// Whether what is loaded may differ from what was stored, as somebody asked for.
    pub lossy: bool,
}

/// One view as the directory describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ViewEntry {
    /// Index of the tensor in [`Directory::tensors`].
    pub tensor: u32,
    /// The view's spelling, for example `e8m3:packed`.
    pub spelling: String,
    /// Offset in the views window.
    pub offset: u64,
    /// Bytes of the view.
    pub length: u64,
    /// Elements, the tensor's own count.
    pub elements: u64,
    /// Bits that an element takes in the view.
    pub bits: u32,
    /// A stored value x stands for x·2^`scale_exp`.
    pub scale_exp: i32,
}

/// Everything a directory says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Directory {
    /// Raised by one at each change.
    pub generation: u64,
    /// Bytes of the base window.
    pub base_bytes: u64,
    /// Bytes of the views window.
    pub views_bytes: u64,
    /// The tensors, by DPA.
    pub tensors: Vec<TensorEntry>,
    /// The views, by offset.
    pub views: Vec<ViewEntry>,
    /// Whether there are tensors or views that it has no room for.
    pub is_incomplete: bool,
}

impl Directory {
    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// The view of this tensor with this spelling.
    pub fn view(&self, tensor: &str, spelling: &str) -> Option<&ViewEntry> {
        let index = self.tensors.iter().position(|entry| entry.name == tensor)?;
        self.views.iter().find(|view| view.tensor as usize == index && view.spelling == spelling)
    }
}

/// Why bytes are no directory, or a directory no bytes.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum DirectoryError {
    /// The first bytes are not the magic.
    #[error("no Lamina directory here: it begins with {found:02x?}, not {:02x?} (\"LAMINADR\")", MAGIC)]
    Magic {
        /// The first eight bytes, or fewer if there are fewer.
        found: Vec<u8>,
    },
    /// A version this crate does not know.
    #[error("directory version {found}; this program reads version {VERSION}")]
    Version {
        /// The version found.
        found: u32,
    },
    /// The checksum does not match: damage, or a change while it was read.
    #[error("directory checksum {computed:#010x}, its header says {stored:#010x}")]
    Checksum {
        /// What the bytes give.
        computed: u32,
        /// What the header says.
        stored: u32,
    },
    /// A field points outside what it may.
    #[error("directory field {field} is {value}, which passes the bound of {bound}")]
    Bound {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// The bound it breaks.
        bound: u64,
    },
    /// Text that is not UTF-8.
    #[error("directory text of {field} is not UTF-8")]
    Text {
        /// The field.
        field: &'static str,
    },
    /// More tensors and views than the directory can describe.
    #[error(
        "the directory would need {needed} of {DIRECTORY_BYTES} bytes: fewer tensors, fewer views or shorter names"
    )]
    Full {
        /// Bytes it would take.
        needed: u64,
    },
}

#[cfg(test)]
mod tests;
