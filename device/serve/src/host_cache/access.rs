//! Whether a host may reach the region. Who finds another host dead takes its access away first:
//! else one that was only paused goes on later, and stores into what is no longer its own.

use std::fs::{self, File};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};

/// A host's access.
pub(super) struct Access {
    state: AtomicU8,
    /// A file that is there while access is revoked: the next process that serves the device
    /// finds it, if this one dies. None: it does not outlive this process.
    mark: Option<PathBuf>,
}

/// What a host has of the region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum State {
    /// Its loads and stores reach the region, through its cache.
    Granted,
    /// Its stores reach nobody, its loads are poison.
    Revoked,
    /// Its loads read the device again, and stores into pages that it read since count. Others are
    /// of pages that it held while revoked, and are dropped.
    Returning,
}

impl Access {
    /// Access as the last process left it.
    pub(super) fn new(mark: Option<PathBuf>) -> Self {
        let revoked = mark.as_ref().is_some_and(|mark| mark.exists());
        let state = if revoked { State::Revoked } else { State::Granted };
        Self { state: AtomicU8::new(state as u8), mark }
    }

    pub(super) fn state(&self) -> State {
        match self.state.load(Ordering::SeqCst) {
            0 => State::Granted,
            1 => State::Revoked,
            _ => State::Returning,
        }
    }

    fn set(&self, state: State) {
        self.state.store(state as u8, Ordering::SeqCst);
    }

    /// Revokes it. Who looks at [`Self::state`] afterwards finds it so, and so does the next
    /// process.
    ///
    /// # Errors
    ///
    /// When the mark cannot be made; access is as it was then.
    pub(super) fn revoke(&self) -> io::Result<()> {
        if let Some(mark) = &self.mark {
            File::create(mark)?;
        }
        self.set(State::Revoked);
        Ok(())
    }

    /// Begins to give it back.
    pub(super) fn begin_return(&self) {
        self.set(State::Returning);
    }

    /// Gives up giving it back. The mark is there still.
    pub(super) fn end_return(&self) {
        self.set(State::Revoked);
    }

    /// Gives it back, after [`Self::begin_return`].
    ///
    /// # Errors
    ///
    /// When the mark cannot be removed; it is not given back then.
    pub(super) fn grant(&self) -> io::Result<()> {
        if let Some(mark) = &self.mark
            && let Err(why) = fs::remove_file(mark)
            && why.kind() != io::ErrorKind::NotFound
        {
            return Err(why);
        }
        self.set(State::Granted);
        Ok(())
    }
}
