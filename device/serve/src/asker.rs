//! Whether who asked over a Unix socket is still there.
//!
//! A connection's end is read from one that was closed as from one whose peer has only asked its
//! last question. On a Unix socket the system tells these apart, on TCP it does not.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The peer of a connection.
#[derive(Clone, Debug)]
pub(super) struct Asker(Arc<OwnedFd>);

impl Asker {
    pub(super) fn of(stream: impl AsFd) -> io::Result<Self> {
        Ok(Self(Arc::new(stream.as_fd().try_clone_to_owned()?)))
    }

    /// Whether it has closed the connection, or ended.
    pub(super) fn is_gone(&self) -> bool {
        let mut ends = [PollFd::new(&*self.0, PollFlags::empty())];
        poll(&mut ends, Some(&Timespec::default())).is_ok() && ends[0].revents().contains(PollFlags::HUP)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Shutdown;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn who_has_only_asked_its_last_question_is_there() {
        let (own, theirs) = UnixStream::pair().unwrap();
        let asker = Asker::of(&own).unwrap();
        assert!(!asker.is_gone());
        theirs.shutdown(Shutdown::Write).unwrap();
        assert!(!asker.is_gone());
        drop(theirs);
        assert!(asker.is_gone());
    }
}
