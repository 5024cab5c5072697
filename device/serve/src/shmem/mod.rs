//! Guests that have the windows mapped on request: a virtio device whose shared-memory region holds
//! them, over vhost-user.
//!
//! The guest has a region of addresses, a PCI BAR, with nothing behind it at first. By a control
//! queue it asks for a range of a window at a place of the region, and QEMU maps the mount's file
//! there (`VHOST_USER_BACKEND_SHMEM_MAP`): loads and stores then go to the host's page cache, as
//! with every other attach. The same queue carries lines for the [guest port](super::guest_port),
//! so the guest needs no serial port. `docs/shmem.md` has the protocol and the limits of QEMU.
//!
//! One file each: a connection ([`backend`]), a request in a chain of descriptors ([`request`]),
//! and what is mapped where ([`mappings`]).
//!
//! * This may live in another process than the device, and outlives the device's workers: QEMU does
//!   not connect again to such a server that went away. A window's file is opened for each mapping
//!   and closed once QEMU has it.
//! * What is mapped into the guest is guest memory too, so QEMU tells this server to map it in
//!   turn. Nothing may be read or written through that, nor through another file of the mount:
//!   whoever serves a mount must not touch it, and who is only near that would hang with it. So
//!   queues and buffers are looked for in the guest's other memory alone.
//! * A guest is not trusted: a range must lie in its window, a place in the region, and neither may
//!   overlap what is mapped; the lengths of text are bounded.
//! * While QEMU waits for this server it serves no mappings, so nothing that QEMU waits for may
//!   wait for a mapping.

mod backend;
mod mappings;
mod request;

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use tokio::runtime::Handle;
use vm_memory::GuestMemoryAtomic;

use super::ServeError;
use super::mount_point;
use super::socket::{self, SocketFile};
use super::vhost_connections::{Connections, Memory, Served};
use backend::Backend;

/// One window's file.
#[derive(Clone, Debug)]
pub struct WindowFile {
    /// Where it is.
    pub path: PathBuf,
    /// Bytes of the window.
    pub bytes: u64,
}

/// Both windows, and where lines for the guest port go.
#[derive(Debug)]
struct Shown {
    /// Base and views.
    windows: [WindowFile; 2],
    /// Device and inode numbers of their files.
    identities: [(u64, u64); 2],
    port: PathBuf,
    runtime: Handle,
}

impl Shown {
    /// The device numbers of the windows' mount and of others of its server.
    fn mount_numbers(&self) -> io::Result<Vec<u64>> {
        mount_point::numbers_beside(self.identities[0].0)
    }

    /// Bytes of the region: room for both windows and as much again, a power of two, as a BAR's
    /// are.
    fn region_bytes(&self) -> u64 {
        let both = self.windows.iter().map(|window| window.bytes).fold(0, u64::saturating_add);
        both.saturating_mul(2).checked_next_power_of_two().unwrap_or(1 << 63)
    }
}

/// What connections are to.
struct Shared(Arc<Shown>);

impl Served for Shared {
    type Backend = Backend;

    fn backend(&self, _: &GuestMemoryAtomic<Memory>) -> Backend {
        Backend::new(Arc::clone(&self.0))
    }

    fn stop(backend: &Backend) {
        backend.stop();
    }

    fn is_quiet_by(_: &Backend, _: Instant) -> bool {
        // A request that is under way may wait for QEMU, which may wait for this server: its answer
        // is not waited for.
        true
    }

    fn set_connected(&self, connected: bool) {
        tracing::debug!(connected, "a guest with shared memory");
    }
}

/// A device with shared memory on a socket. Dropping it ends it.
pub struct ShmemServer {
    path: PathBuf,
    file: SocketFile,
    /// Gone before the file is.
    connections: Option<Connections<Shared>>,
}

impl ShmemServer {
    /// Serves the windows in these files on a Unix socket at `path`, for the device whose guest
    /// port listens at `port`. Must be called within a tokio runtime.
    ///
    /// # Errors
    ///
    /// When a file cannot be found, or the socket is in use or cannot be made.
    pub fn serve(path: &Path, base: WindowFile, views: WindowFile, port: &Path) -> Result<Self, ServeError> {
        let failed = |source| ServeError::Socket { path: path.to_owned(), source };
        let identity = |window: &WindowFile| {
            let found = fs::metadata(&window.path).map_err(|why| {
                let why = format!("cannot use the window {}: {why}", window.path.display());
                failed(io::Error::other(why))
            })?;
            Ok::<_, ServeError>((found.dev(), found.ino()))
        };
        let identities = [identity(&base)?, identity(&views)?];
        let (port, runtime) = (port.to_owned(), Handle::current());
        let shown = Shown { windows: [base, views], identities, port, runtime };
        let (listener, file) = socket::claim(path)?;
        let served = Connections::serve(Arc::new(Shared(Arc::new(shown))), listener, "shmem".into());
        match served {
            Ok(connections) => Ok(Self { path: path.to_owned(), file, connections: Some(connections) }),
            Err(why) => {
                // The socket is of no use to anybody.
                file.remove();
                Err(ServeError::Threads(why))
            }
        }
    }

    /// The socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ShmemServer {
    fn drop(&mut self) {
        drop(self.connections.take());
        self.file.remove();
    }
}
