//! A pool of objects in memory that several hosts share by loads and stores, whether the memory
//! keeps their caches coherent or not.
//!
//! ```
//! use lamina_pool::{Geometry, Pool, local};
//!
//! # fn main() -> Result<(), lamina_pool::PoolError> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("pool");
//! local::create(&path, &Geometry::fitting(8 << 20))?;
//! let pool = Pool::open(&path)?;
//! pool.put("greeting", b"hello")?;
//! assert_eq!(pool.get("greeting")?.as_deref(), Some(&b"hello"[..]));
//! # pool.leave()?;
//! # Ok(())
//! # }
//! ```
//!
//! `docs/pool.md` says what is promised, and how it is laid out.

// Words are packed by shifts, and offsets are checked against the memory before they become
// addresses.
#![allow(clippy::cast_possible_truncation)]

mod check;
mod class;
mod classed;
mod counts;
#[cfg(test)]
mod damaged;
mod error;
#[doc(hidden)]
pub mod fuzzing;
pub mod guests;
mod heap;
mod host;
pub mod hosts;
mod index;
mod key;
mod layout;
pub mod local;
mod lock;
pub mod mem;
mod member;
mod message;
mod mutex;
mod named;
mod overview;
mod pool;
mod prefix;
mod recovery;
mod server;
mod service;
#[doc(hidden)]
pub mod soak;
mod table;

pub use check::{Problem, Report};
pub use class::{Class, Share};
pub use classed::Classed;
pub use counts::{NodeCounts, Occupancy};
pub use error::PoolError;
pub use host::Host;
pub use index::{Index, ServedIndex};
pub use key::{Chain, Key};
pub use layout::Geometry;
pub use message::{BODY, Request};
pub use named::Held;
pub use overview::{Attached, Overview};
pub use pool::{Object, Pool, Stats};
pub use prefix::{Reservation, Reserved};
pub use server::IndexServer;
pub use service::Service;

const _: () = assert!(usize::BITS == 64, "offsets become addresses");
