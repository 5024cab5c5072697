//! Serving a device: as files to map, two for each guest or host ([`fuse`], [`export`]), as disks
//! ([`vhost_user`]), as an API over sockets ([`api`]), and to guests ([`guest_port`], and before it
//! [`ivshmem`] or [`shmem`], which also maps, where they have no serial port).
//!
//! The servers know the device and nothing behind it. What a file shows is the device's two
//! windows; what keeps those coherent, and what a user of both may rely on, is stated in one place:
//! [`coherence`].

mod additions;
pub mod api;
mod asker;
mod bounded_writes;
pub mod coherence;
mod cold_pages;
pub mod control;
mod detaching;
mod direct;
pub mod disks;
mod dropped_pages;
pub mod export;
mod export_file;
#[cfg(debug_assertions)]
mod failpoints;
mod files;
pub mod flusher;
pub mod fuse;
mod fuse_fs;
pub(crate) mod fuse_workers;
#[doc(hidden)]
pub mod fuzzing;
pub mod guest_port;
mod held_bytes;
mod held_mount;
pub mod host_cache;
pub(crate) mod http;
mod invalidations;
pub mod ivshmem;
mod live;
mod metrics;
pub mod models;
mod mount_point;
mod openapi;
mod own_mount;
mod owner;
pub mod peer;
mod pools;
pub mod private_dir;
pub mod qmp;
mod ranges;
mod relay;
mod request_buffer;
mod served_pages;
mod settled_files;
pub mod shmem;
mod socket;
mod targets;
pub(crate) mod tree;
pub(crate) mod vhost_connections;
pub mod vhost_user;
mod window_parts;
pub mod write_backs;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;

pub use additions::{Additions, Recorder};
pub use api::{Api, claim_tcp};
pub use coherence::Coherence;
pub use cold_pages::PageCacheReport;
pub use control::{Control, ControlError, FoldersReport, ServedExport, ServedStats};
pub use export::{Export, ExportOptions, Place};
pub use export_file::ExportFile;
pub use fuse::{Mount, MountOptions};
pub use guest_port::GuestPort;
pub use held_mount::{Channels, HeldMount, fuse_present};
pub use ivshmem::IvshmemServer;
pub use metrics::sections;
pub use models::Models;
pub use mount_point::{MountPoint, OurMount, abort_connection};
pub use pools::{PoolClassReport, PoolNodeReport, PoolReport, PoolsReport};
pub use private_dir::PrivateDir;
pub use shmem::ShmemServer;
pub use socket::{SocketFile, claim};
pub use vhost_user::{DiskServer, Shows};

/// Why a device cannot be served, or an operation on a served one failed.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// There is no /dev/fuse.
    #[error(
        "/dev/fuse does not exist: load the kernel module (`modprobe fuse`), or give it to the container (`--device /dev/fuse`)"
    )]
    NoFuseDevice,
    /// /dev/fuse cannot be opened.
    #[error("cannot open /dev/fuse: {source}; it needs the module `fuse` and read and write permission")]
    FuseDevice {
        /// Why.
        source: io::Error,
    },
    /// Mounting without root needs a helper.
    #[error("fusermount3 is not in PATH, and mounting without root needs it: install the package fuse3")]
    NoFusermount,
    /// The directory cannot be used.
    #[error("cannot use the mount point {}: {source}", path.display())]
    MountPoint {
        /// The directory, or the file about it.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The directory is not empty.
    #[error("the mount point {} is not empty (it holds {}): name an empty or a new directory", path.display(), entry.display())]
    MountPointNotEmpty {
        /// The directory.
        path: PathBuf,
        /// Something in it.
        entry: PathBuf,
    },
    /// Something is mounted there.
    #[error("{} is mounted already ({kind} from {source_name}) and {state}: unmount it or name another directory", path.display())]
    MountPointBusy {
        /// The directory.
        path: PathBuf,
        /// The file system's type.
        kind: String,
        /// The mount's source.
        source_name: String,
        /// What was found about it.
        state: String,
    },
    /// Somebody else is about to mount there, or to unmount.
    #[error(
        "another run has the mount point {}, here or in another container, or holds a lock of it: \
         wait for its end, or name another directory",
        path.display()
    )]
    MountPointTaken {
        /// The directory.
        path: PathBuf,
    },
    /// The mount failed.
    #[error("cannot mount on {}: {why}", path.display())]
    Mount {
        /// The directory.
        path: PathBuf,
        /// What the kernel or fusermount3 said.
        why: String,
    },
    /// There is no place for `files/`, or what is there cannot be used.
    #[error("no files/ can be shown: {source}; --files 0 does without")]
    Files {
        /// Why.
        source: lamina_files::FileError,
    },
    /// Nobody has all of the device.
    #[error(
        "--files is for a device that is served as a whole: files/ would lie in addresses that a --guest or a --host has"
    )]
    FilesOfAll,
    /// Threads or descriptors ran out.
    #[error("cannot start threads: {0}")]
    Threads(#[source] io::Error),
    /// The device could not drop all of a range.
    #[error(
        "of {length} bytes at {offset:#x} of the base window the first {done} were dropped, and no more: {source}"
    )]
    Discard {
        /// Offset in the base window.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Those that were dropped.
        done: u64,
        /// Why.
        source: lamina_device::device::DeviceError,
    },
    /// Dirty base pages did not reach the device.
    #[error("cannot flush {length} bytes at {offset:#x} of the base window: {source}")]
    Flush {
        /// Offset in the base window.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Why.
        source: io::Error,
    },
    /// A host's access cannot be changed, because the next process could not be told of it.
    #[error("the host's access stays as it was: the note of it cannot be written: {0}")]
    Revoke(io::Error),
    /// The device cannot store what a host wants written back, or drop a part of a block.
    #[error(transparent)]
    Device(#[from] lamina_device::device::DeviceError),
    /// A range passes the end of the base window.
    #[error("{} the end of the base window, which has {window} bytes", passing(*offset, *length))]
    PastEnd {
        /// Offset in the base window.
        offset: u64,
        /// Bytes.
        length: u64,
        /// Bytes of the window.
        window: u64,
    },
    /// A directory for sockets or a mount is not this user's alone.
    #[error("the directory {} is not used: {fault}", path.display())]
    NotPrivate {
        /// The directory.
        path: PathBuf,
        /// What is wrong with it.
        fault: private_dir::Fault,
    },
    /// A socket is in use.
    #[error("somebody listens on {} already: stop that run (`lamina stats --api` may tell which) or name another socket (another --run-dir, if it lies there)", path.display())]
    SocketBusy {
        /// The socket.
        path: PathBuf,
    },
    /// A socket cannot be made.
    #[error("cannot listen on the socket {}: {source}", path.display())]
    Socket {
        /// The socket.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A disk cannot be served.
    #[error("cannot serve a disk on {}: {why}", path.display())]
    Disk {
        /// Its socket.
        path: PathBuf,
        /// Why.
        why: Box<ControlError>,
    },
    /// A TCP address cannot be listened on.
    #[error("cannot listen on {address}: {source}; port 0 takes any free one")]
    Tcp {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: io::Error,
    },
    /// A TCP address that others than this host could reach.
    #[error(
        "{address} is no loopback address; the API has no passwords and listens on 127.0.0.1 or [::1] only"
    )]
    NotLoopback {
        /// The address.
        address: SocketAddr,
    },
    /// The mount is being taken down.
    #[error("the mount is being taken down")]
    Closing,
}

/// A range that passes an end, and how.
fn passing(offset: u64, length: u64) -> String {
    match length {
        0 => format!("the offset {offset:#x} passes"),
        _ => format!("{length} bytes at {offset:#x} pass"),
    }
}
