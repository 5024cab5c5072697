//! Bounds of a KV window, whatever codes it.

/// Most tokens a window may have (n in TRACE eq. 3).
pub const MAX_WINDOW: u32 = 256;
/// Most blocks of a window, 1 MiB: rows so long that its tokens would take more make windows of
/// fewer tokens.
pub const MAX_BLOCKS: usize = 256;
