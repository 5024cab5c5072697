//! The mount itself: what must outlive the process that answers it.
//!
//! * Whoever holds a [`HeldMount`] keeps the connection to the kernel: the session's descriptor of
//!   /dev/fuse and every clone of it. A clone that is closed for the last time ends the requests
//!   that were read from it with an error; so clones are made here, and lent.
//! * If the process that answers dies, its requests stay with the kernel. The next one, given the
//!   same descriptors, asks for them again.
//! * Dropping it aborts the connection, so that nobody sleeps on it any more, and unmounts.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;

use fuse_backend_rs::transport::FuseSession;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::ServeError;
use super::mount_point::{self, MountPoint};

/// A mount.
pub struct HeldMount {
    session: Option<FuseSession>,
    point: MountPoint,
    channels: Channels,
}

/// Descriptors of /dev/fuse, each with a queue of its own.
#[derive(Debug)]
pub struct Channels {
    /// One for each worker thread.
    pub requests: Vec<File>,
    /// One for what the kernel is told.
    pub notices: File,
}

impl HeldMount {
    /// Mounts at `point`, to be answered by `threads` threads.
    ///
    /// # Errors
    ///
    /// When FUSE is missing or the mount cannot be made; each names what to do.
    pub fn new(point: MountPoint, threads: usize) -> Result<Self, ServeError> {
        super::fuse::fuse_present()?;
        let failed = |why: fuse_backend_rs::transport::Error| ServeError::Mount {
            path: point.path.clone(),
            why: why.to_string(),
        };
        let mut session =
            FuseSession::new(&point.path, &mount_point::source(), "lamina", false).map_err(failed)?;
        session.set_allow_other(false);
        session.mount().map_err(failed)?;
        let channels = (0..threads.max(1))
            .map(|_| channel_of(&session))
            .collect::<io::Result<Vec<_>>>()
            .and_then(|requests| Ok(Channels { requests, notices: channel_of(&session)? }));
        match channels {
            Ok(channels) => Ok(Self { session: Some(session), point, channels }),
            Err(why) => {
                take_away(&point.path);
                Err(ServeError::Threads(why))
            }
        }
    }

    /// The mounted directory.
    pub fn path(&self) -> &Path {
        &self.point.path
    }

    /// The base window's file.
    pub fn base_path(&self) -> PathBuf {
        self.point.path.join("base")
    }

    /// The views window's file.
    pub fn views_path(&self) -> PathBuf {
        self.point.path.join("views")
    }

    /// The descriptors, to be lent.
    pub fn channels(&self) -> &Channels {
        &self.channels
    }
}

impl Channels {
    /// The same descriptors once more.
    ///
    /// # Errors
    ///
    /// When descriptors run out.
    pub fn try_clone(&self) -> io::Result<Self> {
        let requests = self.requests.iter().map(File::try_clone).collect::<io::Result<_>>()?;
        Ok(Self { requests, notices: self.notices.try_clone()? })
    }
}

impl Drop for HeldMount {
    fn drop(&mut self) {
        take_away(&self.point.path);
        // Closes its descriptor; the rest was done above.
        drop(self.session.take());
    }
}

/// Aborts and unmounts what is mounted at `path`.
fn take_away(path: &Path) {
    mount_point::abort_mount(path);
    if let Err(why) = mount_point::unmount(path) {
        tracing::warn!(path = %path.display(), "not unmounted: {why}");
    }
}

/// Threads that answer a mount unless told otherwise.
pub(super) fn usual_threads() -> usize {
    thread::available_parallelism().map_or(2, usize::from).clamp(2, 16)
}

/// A descriptor of /dev/fuse with a queue of its own, or the session's own where the kernel cannot
/// clone it. Reads block.
fn channel_of(session: &FuseSession) -> io::Result<File> {
    let channel = match session.clone_fuse_file() {
        Ok(clone) => clone,
        Err(why) => {
            tracing::debug!("workers share one queue: {why}");
            session.get_fuse_file().ok_or(io::ErrorKind::NotConnected)?.try_clone()?
        }
    };
    let flags = OFlag::from_bits_truncate(fcntl(&channel, FcntlArg::F_GETFL)?);
    fcntl(&channel, FcntlArg::F_SETFL(flags - OFlag::O_NONBLOCK))?;
    Ok(channel)
}
