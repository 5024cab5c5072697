//! What hardware would have done with the work that the device counts.
//!
//! * [`controller`]: cycles of a load, index cache.
//! * [`dram`]: commands, row hits, energy of a module.
//! * [`elastic`]: planes against words, for precisions by chunk.
//! * [`link`]: CXL.mem in flits, both directions.
//! * [`replay`]: a trace through several designs.
//! * [`trace`]: what was asked of a device, in a file.
//! * [`serving`]: nodes that prefill, and KV caches that they share or keep.
//! * [`system`]: the paper's model of a server, tokens a second against context.
//!
//! The rules:
//! * Everything here is *modelled*. A report says so and names the source of each number that is
//!   not computed here.
//! * Nothing here reads the device. It is given numbers and files, so that the device depends on
//!   nothing of this crate.
//! * What comes from outside is checked before it is used. An error names the field.

pub mod controller;
pub mod dram;
pub mod elastic;
mod error;
mod histogram;
pub mod link;
mod number;
pub mod replay;
pub mod serving;
pub mod system;
mod text;
pub mod trace;

pub use self::error::ModelError;
pub use self::histogram::{Histogram, Row, Summary, rows};
pub use self::number::{ceil, float};
