//! Serving a disk on a socket, one connection after another.
//!
//! * A socket file that nobody listens on any more is replaced, so a device that was killed is started again on the same sockets, and
//!   whoever was connected connects again. A socket that somebody else keeps open can be passed in instead; its file is theirs.
//! * One connection is served at a time, as a disk has one user; another one waits until that has gone.
//! * Dropping a [`DiskServer`] lets each queue finish its request, closes the connection and takes the socket's file away.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vhost::vhost_user::{Error as ProtocolError, Listener};
use vhost_user_backend::{Error as DaemonError, ShutdownHandle, VhostUserDaemon};
use vm_memory::GuestMemoryAtomic;

use crate::serve::ServeError;
use crate::serve::control::Control;
use crate::serve::socket;

use super::backend::Backend;
use super::disk::{Disk, DiskInfo, Shows};
use super::request::Memory;

/// A disk on a socket. Dropping it ends it.
pub struct DiskServer {
    disk: Arc<Disk>,
    /// Closed to wake the thread.
    stop: Option<UnixStream>,
    current: Arc<Mutex<Current>>,
    thread: Option<JoinHandle<()>>,
    owns_file: bool,
}

/// The connection that is being served.
#[derive(Default)]
struct Current {
    connection: Option<(Arc<Backend>, ShutdownHandle)>,
    stopping: bool,
}

impl DiskServer {
    /// Serves a disk on a Unix socket at `path`.
    ///
    /// # Errors
    ///
    /// When the socket is in use or cannot be made, or the disk's view cannot be.
    pub fn bind(control: &Control, shows: Shows, path: &Path) -> Result<Self, ServeError> {
        let disk = new_disk(control, shows, path)?;
        let listener = socket::claim(path)?;
        match Self::start(control, disk, listener, true) {
            Ok(server) => Ok(server),
            Err(why) => {
                // The socket is of no use to anybody.
                let _ = fs::remove_file(path);
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
        Self::start(control, disk, listener, false)
    }

    fn start(
        control: &Control,
        disk: Disk,
        listener: UnixListener,
        owns_file: bool,
    ) -> Result<Self, ServeError> {
        let disk = Arc::new(disk);
        let current = Arc::new(Mutex::new(Current::default()));
        let (stop, stopped) = UnixStream::pair().map_err(ServeError::Threads)?;
        let run = {
            let (disk, current) = (Arc::clone(&disk), Arc::clone(&current));
            move || accept(&disk, &listener, &stopped, &current)
        };
        let name = format!("disk-{}", disk.info().serial);
        let thread = thread::Builder::new().name(name).spawn(run).map_err(ServeError::Threads)?;
        control.served(&disk);
        Ok(Self { disk, stop: Some(stop), current, thread: Some(thread), owns_file })
    }

    /// What can be told of the disk.
    pub fn info(&self) -> DiskInfo {
        self.disk.info()
    }
}

impl Drop for DiskServer {
    fn drop(&mut self) {
        drop(self.stop.take());
        let connection = {
            let mut current = lock(&self.current);
            current.stopping = true;
            current.connection.take()
        };
        if let Some((backend, shutdown)) = connection {
            // Only then may the other side look at what was given back.
            backend.quiesce();
            shutdown.shutdown();
        }
        if let Some(thread) = self.thread.take() {
            // A panic was logged by the panic hook.
            let _ = thread.join();
        }
        if self.owns_file
            && let Err(why) = fs::remove_file(&self.disk.info().socket)
        {
            tracing::debug!("socket file stays: {why}");
        }
    }
}

fn new_disk(control: &Control, shows: Shows, path: &Path) -> Result<Disk, ServeError> {
    Disk::new(control.clone(), shows, path)
        .map_err(|why| ServeError::Disk { path: path.to_owned(), why: Box::new(why) })
}

fn lock(current: &Mutex<Current>) -> MutexGuard<'_, Current> {
    current.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves connections until `stopped` is closed.
fn accept(disk: &Arc<Disk>, listener: &UnixListener, stopped: &UnixStream, current: &Mutex<Current>) {
    loop {
        match wait(listener, stopped) {
            Ok(true) => {}
            Ok(false) => return,
            Err(why) => {
                tracing::error!("a disk's socket cannot be waited on, it is closed: {why}");
                return;
            }
        }
        if let Err(why) = connection(disk, listener, current) {
            tracing::warn!("a disk's connection ended: {why}");
            // What failed at once would fail again at once.
            thread::sleep(std::time::Duration::from_millis(50));
        }
        disk.set_connected(false);
    }
}

/// Whether somebody wants to connect; `false` if it is time to stop.
fn wait(listener: &UnixListener, stopped: &UnixStream) -> io::Result<bool> {
    loop {
        let mut descriptors = [
            PollFd::new(listener.as_fd(), PollFlags::POLLIN),
            PollFd::new(stopped.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut descriptors, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(why) => return Err(why.into()),
        }
        if descriptors[1].any().unwrap_or(true) {
            return Ok(false);
        }
        if descriptors[0].any().unwrap_or(false) {
            return Ok(true);
        }
    }
}

/// Takes a connection and serves it to its end.
fn connection(
    disk: &Arc<Disk>,
    listener: &UnixListener,
    current: &Mutex<Current>,
) -> Result<(), DaemonError> {
    let memory = GuestMemoryAtomic::new(Memory::new());
    let backend = Arc::new(Backend::new(Arc::clone(disk), memory.clone()));
    let mut daemon = VhostUserDaemon::new("disk-connection".to_owned(), Arc::clone(&backend), memory)?;
    let mut listener = Listener::from(listener.try_clone().map_err(DaemonError::StartDaemon)?);
    daemon.start(&mut listener)?;
    drop(listener);
    disk.set_connected(true);
    {
        let mut current = lock(current);
        match daemon.shutdown_handle() {
            Some(shutdown) if current.stopping => shutdown.shutdown(),
            shutdown => current.connection = shutdown.map(|shutdown| (backend, shutdown)),
        }
    }
    let ended = daemon.wait();
    lock(current).connection = None;
    match ended {
        Err(DaemonError::HandleRequest(ProtocolError::Disconnected | ProtocolError::PartialMessage)) => {
            Ok(())
        }
        ended => ended,
    }
}
