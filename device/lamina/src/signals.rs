//! The signals that end what runs, so that nothing of it is lost or stays behind, and one that must
//! not end it.

use std::fs;
use std::future::pending;
use std::io;

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
            hung_up: if is_ignored(hangup) { None } else { Some(signal(hangup)?) },
        })
    }

    /// Waits for the next: what it is called.
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
            _ = hung_up => "SIGHUP",
        }
    }
}

/// Whether this process ignores a signal, as the kernel lists that.
fn is_ignored(signal: SignalKind) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask >> (signal.as_raw_value() - 1) & 1 == 1)
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
