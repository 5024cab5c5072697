//! Guests booted on a device by each attachment, as a user would boot them: by `lamina boot`, with
//! options or from a file.
//!
//! These need what `./x` sets up: the guest's programs and image, a QEMU, FUSE. Disks, and guests
//! by CXL of a device that is served, have files of their own beside this folder.

mod interleave;
mod ivshmem;
mod parts;
mod script;
mod shmem;
mod topology;
mod virtiofs;
