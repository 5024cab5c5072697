//! Lamina from inside a guest.
//!
//! The device shows up as two CXL memory devices, or as shared memory of PCI devices ([`ivshmem`])
//! or of a virtio device ([`shmem`]). This library makes their regions ([`up`]), maps them
//! ([`Window`]), reads the directory by loads and hands out the memory of (tensor, view)
//! ([`Lamina::span`]); a small control port ([`Ctl`]) carries what loads and stores cannot say.
//! `include/lamina.h` is the same for C.
//!
//! ```no_run
//! use lamina_shim::{Lamina, OpenOptions, UpOptions, sysfs::Tree, up};
//!
//! # fn main() -> Result<(), lamina_shim::Error> {
//! up(&Tree::system(), &UpOptions::default())?;
//! let lamina = Lamina::open(&OpenOptions::from_env())?;
//! let weights = lamina.span("layers.0.wq", "e8m3")?;
//! let mut first = [0; 2];
//! weights.load(0, &mut first)?;
//! # Ok(())
//! # }
//! ```

pub mod attach;
mod capi;
pub mod ctl;
pub mod dax;
pub mod directory;
mod error;
pub mod ivshmem;
mod lamina;
mod mailbox;
pub mod region;
pub mod shmem;
pub mod sysfs;
pub mod topology;
mod window;

pub use attach::{Attached, Attachment, UpOptions, up};
pub use ctl::{Ctl, CtlError, NewTensor};
pub use error::Error;
pub use lamina::{BASE, Lamina, Location, OpenOptions, open_ctl};
pub use topology::{BASE_SERIAL, Role, VIEWS_SERIAL};
pub use window::{Access, Span, Window, WindowError};
