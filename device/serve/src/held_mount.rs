//! The mount itself: what must outlive the process that answers it.
//!
//! * Whoever holds a [`HeldMount`] keeps the connection to the kernel: the session's descriptor of
//!   /dev/fuse and every clone of it. A clone that is closed for the last time ends the requests
//!   that were read from it with an error; so clones are made here, and lent.
//! * If the process that answers dies, its requests stay with the kernel. The next one, given the
//!   same descriptors, asks for them again.
//! * Dropping it aborts the connection, so that nobody sleeps on it any more, and unmounts; another
//!   mount that lies over it by then stays.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;

use fuse_backend_rs::transport::FuseSession;
use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::ServeError;
use super::mount_point::{self, MountPoint, OurMount};

/// A mount.
pub struct HeldMount {
    session: Option<FuseSession>,
    point: Point,
    channels: Channels,
}

/// Where something is mounted.
enum Point {
    /// On a directory.
    On(MountPoint, OurMount),
    /// On a folder of another mount, of which nothing may be asked any more when this one ends.
    In {
        /// The folder.
        path: PathBuf,
        /// The connection's number.
        minor: Option<String>,
    },
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
        point.check()?;
        let (mut session, channels) = mounted(&point.path, threads)?;
        let Some(mount) = OurMount::at(&point.path) else {
            // By a path that is no UTF-8 the session cannot.
            if session.umount().is_err()
                && let Err(why) = mount_point::unmount_at(&point.path)
            {
                tracing::warn!(path = %point.path.display(), "not unmounted: {why}");
            }
            let why = "it does not show in /proc/self/mountinfo".to_owned();
            return Err(ServeError::Mount { path: point.path.clone(), why });
        };
        Ok(Self { session: Some(session), point: Point::On(point, mount), channels })
    }

    /// Mounts at a folder of another mount, to be answered by `threads` threads. Who answers that
    /// one is asked for the folder. It is to be dropped after that one, with which it is unmounted.
    ///
    /// # Errors
    ///
    /// When there is no such folder, or the mount cannot be made.
    pub fn within(path: PathBuf, threads: usize) -> Result<Self, ServeError> {
        let (session, channels) = mounted(&path, threads)?;
        let minor = mount_point::minor_at(&path);
        Ok(Self { session: Some(session), point: Point::In { path, minor }, channels })
    }

    /// The mounted directory.
    pub fn path(&self) -> &Path {
        match &self.point {
            Point::On(point, _) => &point.path,
            Point::In { path, .. } => path,
        }
    }

    /// The base window's file.
    pub fn base_path(&self) -> PathBuf {
        self.path().join("base")
    }

    /// The views window's file.
    pub fn views_path(&self) -> PathBuf {
        self.path().join("views")
    }

    /// The connection's number, of a mount in another.
    pub fn minor(&self) -> Option<&str> {
        match &self.point {
            Point::On(..) => None,
            Point::In { minor, .. } => minor.as_deref(),
        }
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
        let is_gone = match &self.point {
            Point::On(_, mount) => mount.take_away(),
            Point::In { minor, .. } => {
                mount_point::abort_connection(minor.as_deref());
                true
            }
        };
        let session = self.session.take();
        if is_gone {
            // Closes its descriptor; the rest was done above.
            drop(session);
        } else {
            // It would unmount by the path, whatever lies there.
            std::mem::forget(session);
        }
    }
}

/// Mounts at a directory.
fn mounted(path: &Path, threads: usize) -> Result<(FuseSession, Channels), ServeError> {
    fuse_present()?;
    let failed = |why: fuse_backend_rs::transport::Error| ServeError::Mount {
        path: path.to_owned(),
        why: why.to_string(),
    };
    let mut session = FuseSession::new(path, &mount_point::source(), "lamina", false).map_err(failed)?;
    session.set_allow_other(false);
    session.mount().map_err(failed)?;
    let channels = (0..threads.max(1))
        .map(|_| channel_of(&session))
        .collect::<io::Result<Vec<_>>>()
        .and_then(|requests| Ok(Channels { requests, notices: channel_of(&session)? }));
    match channels {
        Ok(channels) => Ok((session, channels)),
        Err(why) => {
            if let Some(mount) = OurMount::at(path) {
                mount.take_away();
            }
            Err(ServeError::Threads(why))
        }
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

/// Whether this host can mount.
///
/// # Errors
///
/// What is missing, and how to get it.
pub fn fuse_present() -> Result<(), ServeError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    present(Path::new("/dev/fuse"), nix::unistd::geteuid().is_root(), &path)
}

fn present(device: &Path, root: bool, path: &OsStr) -> Result<(), ServeError> {
    match File::options().read(true).write(true).open(device) {
        Ok(_) => {}
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Err(ServeError::NoFuseDevice),
        Err(source) => return Err(ServeError::FuseDevice { source }),
    }
    if root {
        return Ok(());
    }
    let mut helpers = std::env::split_paths(path).map(|directory| directory.join("fusermount3"));
    let usable = |file: PathBuf| fs::metadata(file).is_ok_and(|found| found.mode() & 0o111 != 0);
    if helpers.any(usable) { Ok(()) } else { Err(ServeError::NoFusermount) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_with_its_package() {
        let nowhere = tempfile::tempdir().unwrap();
        let said = |device: &Path, root| {
            present(device, root, nowhere.path().as_os_str()).map_err(|why| why.to_string())
        };
        assert!(said(&nowhere.path().join("fuse"), true).unwrap_err().contains("modprobe fuse"));
        assert!(said(Path::new("/dev/null"), false).unwrap_err().contains("package fuse3"));
        assert_eq!(said(Path::new("/dev/null"), true), Ok(()));
    }
}
