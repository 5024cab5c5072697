//! Whom this process talks to at a Unix socket.
//!
//! A path says nothing about who listens there: whoever may write in a directory may put a socket
//! into it. So each connection that is made to a socket asks the kernel whose it is, and goes on
//! only with this user's own and root's.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use nix::sys::socket::sockopt::PeerCredentials;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, UnixAddr, connect as connect_to, getsockopt, socket,
};
use nix::unistd::{Uid, geteuid};

use super::owner::{listener, may_ask};

/// Connects to who listens at `path`, without waiting for a place in the queue of one who takes no
/// connections.
///
/// # Errors
///
/// When nobody listens there, their queue is full ([`io::ErrorKind::WouldBlock`]), or they are
/// another user's ([`io::ErrorKind::PermissionDenied`]).
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    let stream = reach(path)?;
    check(&stream, path)?;
    Ok(stream)
}

/// Connects to whoever listens at `path`, without waiting.
pub(super) fn reach(path: &Path) -> io::Result<UnixStream> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let stream = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect_to(std::os::fd::AsRawFd::as_raw_fd(&stream), &UnixAddr::new(path)?)?;
    let stream = UnixStream::from(stream);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Checks that the other side of a connection to `path` is this user's or root's, by who began to
/// listen.
///
/// # Errors
///
/// When it is another user's, with both.
pub fn check(stream: &impl AsFd, path: &Path) -> io::Result<()> {
    let theirs = Uid::from_raw(getsockopt(stream, PeerCredentials)?.uid());
    if may_ask(Some(theirs)) { Ok(()) } else { Err(refused(Some(theirs), &path.display())) }
}

/// Checks that who listens at a loopback address is this user or root.
///
/// # Errors
///
/// When it is another user, or nobody knows who.
pub fn check_address(address: SocketAddr) -> io::Result<()> {
    let theirs = listener(address);
    if may_ask(theirs) { Ok(()) } else { Err(refused(theirs, &address)) }
}

fn refused(theirs: Option<Uid>, at: &dyn std::fmt::Display) -> io::Error {
    let theirs = theirs.map_or_else(|| "an unknown user".to_owned(), |user| format!("user {user}"));
    let why = format!(
        "{theirs} listens at {at}, and this is user {}, who trusts the sockets of that user and of root only",
        geteuid()
    );
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use nix::sys::socket::{Backlog, bind, listen};

    use super::*;

    #[test]
    fn an_own_socket_is_believed_and_a_full_queue_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        connect(&path).unwrap();
        drop(listener);
        assert_eq!(connect(&path).unwrap_err().kind(), io::ErrorKind::ConnectionRefused);
        let full = folder.path().join("full");
        let listener = socket(AddressFamily::Unix, SockType::Stream, SockFlag::empty(), None).unwrap();
        bind(std::os::fd::AsRawFd::as_raw_fd(&listener), &UnixAddr::new(&full).unwrap()).unwrap();
        listen(&listener, Backlog::new(0).unwrap()).unwrap();
        let _first = connect(&full).unwrap();
        assert_eq!(connect(&full).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
}
