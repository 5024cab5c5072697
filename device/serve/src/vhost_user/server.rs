//! Serving a disk on a socket, one connection after another.
//!
//! * A socket file that nobody listens on any more is replaced, so a device that was killed is
//!   started again on the same sockets, and whoever was connected connects again. A socket that
//!   somebody else keeps open can be passed in instead; its file is theirs.
//! * One connection is served at a time ([`vhost_connections`](crate::vhost_connections)).
//! * Dropping a [`DiskServer`] lets each queue finish the piece of a request that it does, closes
//!   the connection and takes the socket's file away. A request that is not done then is not given
//!   back: the next server of the disk does it.

use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use vm_memory::GuestMemoryAtomic;

use crate::ServeError;
use crate::control::Control;
use crate::socket::{self, SocketFile};
use crate::vhost_connections::{Connections, Memory, Served};

use super::backend::Backend;
use super::disk::Disk;
use crate::disks::{DiskInfo, ServedDisk, Shows};

/// A disk on a socket. Dropping it ends it.
pub struct DiskServer {
    disk: Arc<Disk>,
    /// Gone before the file is.
    connections: Option<Connections<Seen>>,
    /// The socket's, unless that is somebody else's.
    file: Option<SocketFile>,
}

/// A disk, as connections see it.
struct Seen(Arc<Disk>);

impl Served for Seen {
    type Backend = Backend;

    fn backend(&self, memory: &GuestMemoryAtomic<Memory>) -> Backend {
        Backend::new(Arc::clone(&self.0), memory.clone())
    }

    fn stop(backend: &Backend) {
        backend.stop();
    }

    fn is_quiet_by(backend: &Backend, deadline: Instant) -> bool {
        backend.is_quiet_by(deadline)
    }

    fn set_connected(&self, connected: bool) {
        self.0.set_connected(connected);
    }
}

impl DiskServer {
    /// Serves a disk on a Unix socket at `path`.
    ///
    /// # Errors
    ///
    /// When the socket is in use or cannot be made, or the disk's view cannot be.
    pub fn bind(control: &Control, shows: Shows, path: &Path) -> Result<Self, ServeError> {
        let disk = new_disk(control, shows, path)?;
        let (listener, file) = socket::claim(path)?;
        match Self::start(control, disk, listener) {
            Ok(mut server) => {
                server.file = Some(file);
                Ok(server)
            }
            Err(why) => {
                // The socket is of no use to anybody.
                file.remove();
                Err(why)
            }
        }
    }

    /// Serves a disk on a socket that listens already, at `path`, and stays when this server goes.
    ///
    /// # Errors
    ///
    /// When the disk's view cannot be, or threads run out.
    pub fn adopt(
        control: &Control,
        shows: Shows,
        listener: UnixListener,
        path: &Path,
    ) -> Result<Self, ServeError> {
        let disk = new_disk(control, shows, path)?;
        listener.set_nonblocking(true).map_err(ServeError::Threads)?;
        Self::start(control, disk, listener)
    }

    fn start(control: &Control, disk: Disk, listener: UnixListener) -> Result<Self, ServeError> {
        let disk = Arc::new(disk);
        let name = format!("disk-{}", disk.info().serial);
        let connections = Connections::serve(Arc::new(Seen(Arc::clone(&disk))), listener, name)
            .map_err(ServeError::Threads)?;
        let shown: Arc<dyn ServedDisk> = Arc::clone(&disk) as _;
        control.served(&shown);
        Ok(Self { disk, connections: Some(connections), file: None })
    }

    /// Takes no more connections, and begins nothing more for the one there is. Never waits.
    pub fn stop(&mut self) {
        if let Some(connections) = &mut self.connections {
            connections.stop();
        }
    }

    /// Closes the connection after [`Self::stop`], when nothing is done for it any more, or at
    /// `deadline`.
    pub fn close_by(&self, deadline: Instant) {
        if let Some(connections) = &self.connections {
            connections.close_by(deadline);
        }
    }

    /// What can be told of the disk.
    pub fn info(&self) -> DiskInfo {
        self.disk.info()
    }
}

impl Drop for DiskServer {
    fn drop(&mut self) {
        drop(self.connections.take());
        if let Some(file) = &self.file {
            file.remove();
        }
    }
}

fn new_disk(control: &Control, shows: Shows, path: &Path) -> Result<Disk, ServeError> {
    Disk::new(control.clone(), shows, path)
        .map_err(|why| ServeError::Disk { path: path.to_owned(), why: Box::new(why) })
}
