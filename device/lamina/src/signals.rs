//! The signals that end what runs, so that nothing of it is lost or stays behind, and one that must
//! not end it.

use std::future::pending;
use std::io;

use lamina_qemu::signals::is_ignored;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGINT, SIGTERM and SIGHUP, which a terminal sends that is closed.
pub(crate) struct Ending {
    interrupted: Signal,
    terminated: Signal,
    hung_up: Option<Signal>,
}

impl Ending {
    /// From now on these signals do not end this process by themselves. A SIGHUP that is ignored
    /// stays so: that is what `nohup` is for.
    ///
    /// # Errors
    /// When no handler can be had.
    pub(crate) fn watch() -> io::Result<Self> {
        let hangup = SignalKind::hangup();
        Ok(Self {
            interrupted: signal(SignalKind::interrupt())?,
            terminated: signal(SignalKind::terminate())?,
            hung_up: if is_ignored(hangup.as_raw_value()) { None } else { Some(signal(hangup)?) },
        })
    }

    /// Waits for the next: what it is called. Of SIGHUP there is one only: for a terminal that is
    /// closed, the shell sends it and then the kernel, which is no second word.
    pub(crate) async fn next(&mut self) -> &'static str {
        let hung_up = async {
            match &mut self.hung_up {
                Some(hung_up) => hung_up.recv().await,
                None => pending().await,
            }
        };
        tokio::select! {
            _ = self.interrupted.recv() => "SIGINT",
            _ = self.terminated.recv() => "SIGTERM",
            _ = hung_up => {
                // What has it handled stays.
                self.hung_up = None;
                "SIGHUP"
            }
        }
    }
}

/// Has a write past the limit of files' sizes (`ulimit -f`) fail with EFBIG, which is said like any
/// other error, where SIGXFSZ would end this process without a word. Programs that this one starts
/// find the signal as it was: a handler, unlike what is ignored, does not outlive `exec`.
pub(crate) fn survive_file_limit() {
    extern "C" fn nothing(_: libc::c_int) {}
    let handler: extern "C" fn(libc::c_int) = nothing;
    // SAFETY: a handler that does nothing may interrupt anything, and system calls that it
    // interrupts go on.
    unsafe {
        let before = libc::signal(libc::SIGXFSZ, handler as libc::sighandler_t);
        if before == libc::SIG_IGN {
            libc::signal(libc::SIGXFSZ, before);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use rustix::process::{Signal as Sent, getpid, kill_process};

    use super::*;

    #[tokio::test]
    async fn a_terminal_that_is_closed_counts_once() {
        // Who starts the tests may have it ignored.
        // SAFETY: no handler is lost: none of this process's is installed yet.
        unsafe { libc::signal(libc::SIGHUP, libc::SIG_DFL) };
        let mut ending = Ending::watch().unwrap();
        let mut all = signal(SignalKind::hangup()).unwrap();
        let mut hang_up = async || {
            kill_process(getpid(), Sent::HUP).unwrap();
            all.recv().await.unwrap();
        };
        hang_up().await;
        assert_eq!(ending.next().await, "SIGHUP");
        hang_up().await;
        // What hears of all of them has heard of it.
        tokio::select! {
            biased;
            by = ending.next() => panic!("{by} again"),
            () = ready(()) => {}
        }
        kill_process(getpid(), Sent::TERM).unwrap();
        assert_eq!(ending.next().await, "SIGTERM");
    }
}
