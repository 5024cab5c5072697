//! Attaching Lamina's windows to a QEMU guest.
//!
//! [`boot`] starts a guest that sees the device in one of the ways of [`Attach`]: its two memory
//! files, `base` and `views`, as two CXL Type-3 devices through the mainline driver or as shared
//! memory of PCI devices, or its sockets as virtio disks. The files may be the device's FUSE mount
//! or any file of the right size: nothing here knows the difference.
//!
//! The way of a boot, one file each: which QEMU ([`find`], [`version`]; built by [`recipe`] when
//! there is none), whether KVM can be used ([`accel`]), what is attached ([`topology`]), what the
//! guest runs ([`initramfs`], on the [`image`]), the command line that says all this ([`command`]),
//! and the process ([`launch`]) with its [`console`].
//!
//! Rules:
//! * A guest never outlives its [`Guest`] nor this process, however either ends.
//! * The lines of the windows that an emulated guest touches are recorded if that is asked for
//!   ([`lines`]).
//! * QEMU's advice for huge pages is swallowed ([`madv`]) unless asked for: on FUSE it would turn a
//!   4-byte load into a read of megabytes.
//! * Whatever can be checked before QEMU starts is checked, and named with its bound.

pub mod accel;
pub mod bounded;
mod carried;
pub mod command;
pub mod config;
pub mod console;
pub mod find;
pub mod image;
pub mod initramfs;
pub mod launch;
pub mod lines;
pub mod madv;
pub mod recipe;
pub mod signals;
pub mod topology;
pub mod version;

pub use accel::Accel;
pub use config::BootConfig;
pub use find::Qemu;
pub use image::GuestImage;
pub use initramfs::{GuestFile, Source};
pub use launch::{BootError, Guest, Outcome, boot};
pub use topology::{Attach, AttachKind, Cxl, Ivshmem, Port, Shmem, Targets, Topology, VhostUser, Virtiofs};
pub use version::Version;
