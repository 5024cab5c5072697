//! Lamina: a CXL Type-3 memory device in user space.
//!
//! A load that reaches the device walks one straight line, and the modules are its stations:
//!
//! `serve` (a file or a socket) → [`window`] (base or views, and which view) → [`store`] (plane index, segments) →
//! [`codec`] and [`plane`] (planes back to words) → [`layout`] (weight, kv) → [`view`] (the view's arithmetic) → bytes.
//!
//! A store walks it backwards. [`device`] holds the line together and is the only thing the servers know; [`mode`] swaps
//! the middle for the paper's two baselines; [`stats`] counts at the stations and nowhere else. [`analyze`] says beforehand what
//! the device would make of a checkpoint.

pub mod analyze;
pub mod codec;
pub mod device;
pub mod format;
#[doc(hidden)]
pub mod fuzzing;
mod kernel;
pub mod kv;
pub mod layout;
mod lines;
pub mod load;
pub mod mode;
pub mod model;
pub mod plane;
pub mod serve;
pub mod stats;
pub mod store;
pub mod tensor;
pub mod view;
pub mod window;

/// Bytes of a logical block: one page, the unit that is split into planes, coded and indexed (TRACE III-A).
pub const BLOCK_BYTES: usize = 4096;

/// The words of one block: its bytes as the host sees them.
pub type BlockWords = [u8; BLOCK_BYTES];
