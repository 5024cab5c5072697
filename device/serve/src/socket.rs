//! Unix sockets that are the owner's alone and outlive no process.
//!
//! * It is made in a [directory of this user's alone](super::private_dir), and has mode 0600 from
//!   the moment it exists.
//! * One that nobody listens on any more is what a killed run left: it is replaced. One that
//!   somebody listens on, and any other kind of file, is refused by name and left alone.
//! * The file is removed when its [`OwnedSocket`] goes, if it is still that one: whoever removed it
//!   may have let another device make its own there.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixListener as StdListener;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
use nix::sys::stat::{Mode, fchmod};
use tokio::net::UnixListener;

use super::ServeError;
use super::peer::reach;
use super::private_dir::PrivateDir;

/// How long a worker whose holder was killed may take to go.
const LINGER: Duration = Duration::from_secs(1);

/// A listening socket and its file.
#[derive(Debug)]
pub(super) struct OwnedSocket {
    pub(super) listener: UnixListener,
    path: PathBuf,
    /// Its file, unless that is somebody else's.
    file: Option<SocketFile>,
}

/// The file of a socket, to be removed by who made it.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Open, so that no other file gets its inode's number.
    file: File,
}

impl SocketFile {
    /// The file that was made at `path`, and is at `place` now.
    fn made(path: &Path, place: &Path) -> io::Result<Self> {
        let flags = libc::O_PATH | libc::O_NOFOLLOW;
        let file = File::options().read(true).custom_flags(flags).open(place)?;
        Ok(Self { path: path.to_owned(), file })
    }

    /// Removes it, if it is still there. Another one in its place stays.
    pub fn remove(&self) {
        let is_ours = |found: fs::Metadata| {
            self.file.metadata().is_ok_and(|own| (own.dev(), own.ino()) == (found.dev(), found.ino()))
        };
        if !fs::symlink_metadata(&self.path).is_ok_and(is_ours) {
            tracing::debug!(path = %self.path.display(), "the socket's file is gone");
        } else if let Err(why) = fs::remove_file(&self.path) {
            tracing::debug!(path = %self.path.display(), "socket file stays: {why}");
        }
    }
}

impl OwnedSocket {
    /// Listens at `path`. Must be called within a tokio runtime.
    pub(super) fn bind(path: &Path) -> Result<Self, ServeError> {
        let failed = |source| ServeError::Socket { path: path.to_owned(), source };
        let (listener, file) = claim(path)?;
        let listener = UnixListener::from_std(listener).map_err(failed)?;
        Ok(Self { listener, path: path.to_owned(), file: Some(file) })
    }

    /// Takes over a socket that listens at `path` already; its file is somebody else's. Must be
    /// called within a tokio runtime.
    pub(super) fn adopt(listener: StdListener, path: &Path) -> Result<Self, ServeError> {
        let failed = |source| ServeError::Socket { path: path.to_owned(), source };
        listener.set_nonblocking(true).map_err(failed)?;
        let listener = UnixListener::from_std(listener).map_err(failed)?;
        Ok(Self { listener, path: path.to_owned(), file: None })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

/// Listens at `path`, without blocking, where nobody listens yet. The file is the caller's to
/// remove.
///
/// # Errors
///
/// When its directory is not this user's alone, or the socket is in use or cannot be made.
pub fn claim(path: &Path) -> Result<(StdListener, SocketFile), ServeError> {
    let failed = |source| ServeError::Socket { path: path.to_owned(), source };
    // Those who connect need it to fit.
    UnixAddr::new(path).map_err(|why| failed(why.into()))?;
    let (_directory, place) = PrivateDir::of_socket(path)?;
    let place = place.as_path();
    match fs::symlink_metadata(place) {
        Ok(found) if !found.file_type().is_socket() => {
            return Err(failed(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "another kind of file is there",
            )));
        }
        Ok(_) => match somebody_listens(place) {
            Ok(()) => return Err(ServeError::SocketBusy { path: path.to_owned() }),
            Err(why) if why.kind() == io::ErrorKind::ConnectionRefused => {
                tracing::info!(path = %path.display(), "replacing the socket that a killed run left");
                fs::remove_file(place).map_err(failed)?;
            }
            Err(why) => return Err(failed(why)),
        },
        Err(why) if why.kind() == io::ErrorKind::NotFound => {}
        Err(why) => return Err(failed(why)),
    }
    let listener = listen_at(place).map_err(|why| failed(why.into()))?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok((listener, SocketFile::made(path, place).map_err(failed)?))
}

/// Whether somebody listens at `path`, and stays: the worker of a holder that was killed just now
/// listens for another moment.
fn somebody_listens(path: &Path) -> io::Result<()> {
    let begun = Instant::now();
    loop {
        match reach(path) {
            Ok(_) if begun.elapsed() < LINGER => thread::sleep(LINGER / 20),
            // One who takes no connections listens all the same.
            Err(why) if why.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            reached => return reached.map(drop),
        }
    }
}

fn listen_at(path: &Path) -> nix::Result<StdListener> {
    let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    // Linux makes the file with the mode of the unbound socket, so there is no moment at which
    // others may connect.
    fchmod(&fd, Mode::S_IRUSR | Mode::S_IWUSR)?;
    bind(std::os::fd::AsRawFd::as_raw_fd(&fd), &UnixAddr::new(path)?)?;
    listen(&fd, Backlog::new(128)?)?;
    Ok(fd.into())
}

impl Drop for OwnedSocket {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            file.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[tokio::test]
    async fn a_socket_is_its_owners_alone_and_goes_with_the_listener() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let socket = OwnedSocket::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        drop(socket);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn a_live_socket_is_refused_by_name_and_a_dead_one_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let live = StdListener::bind(&path).unwrap();
        let refused = OwnedSocket::bind(&path).unwrap_err();
        assert!(
            matches!(&refused, ServeError::SocketBusy { .. }) && refused.to_string().contains("/s"),
            "{refused}"
        );
        drop(live);
        OwnedSocket::bind(&path).unwrap();
    }

    #[tokio::test]
    async fn a_socket_that_somebody_else_put_in_its_place_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let first = OwnedSocket::bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let second = OwnedSocket::bind(&path).unwrap();
        drop(first);
        assert!(reach(&path).is_ok(), "the second cannot be reached");
        drop(second);
        assert!(!path.exists());
    }

    #[tokio::test]
    async fn another_kind_of_file_and_too_long_a_path_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        fs::write(&path, "precious").unwrap();
        assert!(matches!(OwnedSocket::bind(&path), Err(ServeError::Socket { .. })));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        let long = directory.path().join("x".repeat(120));
        assert!(matches!(OwnedSocket::bind(&long), Err(ServeError::Socket { .. })));
    }
}
