//! What the program ends with, so that scripts can tell failures apart.
//!
//! [`Status::ALL`] is the table: `lamina --help` prints it, and tests hold it against
//! `docs/operation.md` and against what the program does.

use std::io;
use std::path::PathBuf;
use std::process::{ExitCode, ExitStatus};

use lamina_pool::PoolError;

use crate::out::Unprinted;

/// What the program ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Status {
    Done = 0,
    Failed = 1,
    Usage = 2,
    NoDevice = 3,
    Refused = 4,
    Io = 5,
    Limited = 6,
    Missing = 7,
    /// 128 and the number of `SIGPIPE`.
    ReaderGone = 141,
}

impl Status {
    pub(crate) const ALL: [(Self, &str); 9] = [
        (Self::Done, "done"),
        (Self::Failed, "failed, as by a value that cannot be; none of the below"),
        (Self::Usage, "the command line is not of the form that `--help` shows, or a topology is wrong"),
        (Self::NoDevice, "no device answers there"),
        (Self::Refused, "the device answers, and refuses"),
        (Self::Io, "a file, a socket or the system failed: not there, no right to it, no space"),
        (Self::Limited, "`lamina doctor`: everything is there, and something works less well than it could"),
        (Self::Missing, "`lamina doctor`: something is missing that the device needs"),
        (Self::ReaderGone, "whoever read standard output has gone"),
    ];

    /// What a command that failed so ends with.
    pub(crate) fn of(why: &anyhow::Error) -> Self {
        let gone = |Unprinted(why): &Unprinted| why.kind() == io::ErrorKind::BrokenPipe;
        if why.downcast_ref::<Unprinted>().is_some_and(gone) {
            Self::ReaderGone
        } else if why.downcast_ref::<NoDevice>().is_some() {
            Self::NoDevice
        } else if why.downcast_ref::<Refused>().is_some() || why.chain().any(is_held) {
            Self::Refused
        } else if let Some(ended) = why.downcast_ref::<NotStarted>() {
            // What the device ended with says what failed.
            let code = ended.status.code();
            let mut failures = Self::ALL.into_iter().filter(|(own, _)| *own != Self::Done);
            let own = failures.find(|(own, _)| code == Some(*own as i32));
            own.map_or(Self::Failed, |(own, _)| own)
        } else if why.chain().any(|why| why.is::<io::Error>() || is_file_of_pool(why)) {
            Self::Io
        } else {
            Self::Failed
        }
    }

    /// The table, a line each.
    pub(crate) fn table() -> String {
        let lines = Self::ALL.map(|(status, means)| format!("  {:>3}  {means}", status as u8));
        format!(
            "Exit statuses:\n{}\n  `lamina boot --script` ends with the script's status, if the guest ran it.",
            lines.join("\n")
        )
    }
}

/// Whether a pool's file is what failed. That says the system's error itself, and has none below.
fn is_file_of_pool(why: &(dyn std::error::Error + 'static)) -> bool {
    matches!(why.downcast_ref(), Some(PoolError::File { .. }))
}

/// Whether a device says that a pool would take what is somebody's.
fn is_held(why: &(dyn std::error::Error + 'static)) -> bool {
    matches!(why.downcast_ref(), Some(PoolError::Held { .. }))
}

impl From<Status> for ExitCode {
    fn from(status: Status) -> Self {
        Self::from(status as u8)
    }
}

/// A device ended before it was mounted.
#[derive(Debug, thiserror::Error)]
#[error(
    "the device did not start ({status}){}{last}{}", if .last.is_empty() { "" } else { ":\n" },
    .log.as_ref().map_or_else(String::new, |log| format!("\nits whole log is {}", log.display()))
)]
pub(crate) struct NotStarted {
    /// What it ended with.
    pub(crate) status: ExitStatus,
    /// What it said last.
    pub(crate) last: String,
    /// Where the rest is.
    pub(crate) log: Option<PathBuf>,
}

/// Nothing answers where a device was looked for.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct NoDevice(pub(crate) String);

/// A device answers that it will not do what it was asked for, or cannot.
#[derive(Debug, thiserror::Error)]
#[error("the device refuses: {0}")]
pub(crate) struct Refused(pub(crate) String);

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};
    use lamina_qemu::BootError;
    use lamina_qemu::initramfs::InitramfsError;

    use super::*;

    #[test]
    fn a_failure_is_told_by_what_it_is_whatever_was_said_around_it() {
        let io = || io::Error::from(io::ErrorKind::NotFound);
        let told = |why: anyhow::Error| Status::of(&Err::<(), _>(why).context("around it").unwrap_err());
        assert_eq!(told(anyhow!("something")), Status::Failed);
        assert_eq!(told(anyhow!(io())), Status::Io);
        assert_eq!(told(anyhow!(Refused("no".into()))), Status::Refused);
        let full = InitramfsError::Write { path: "initramfs.img".into(), error: io() };
        assert_eq!(told(anyhow!(BootError::from(full))), Status::Io);
        assert_eq!(told(anyhow!(PoolError::File { path: "pool".into(), cause: io() })), Status::Io);
        // The socket's error is below it.
        let nobody = Err::<(), _>(io()).with_context(|| NoDevice("nobody".into())).unwrap_err();
        assert_eq!(told(nobody), Status::NoDevice);
        assert_eq!(told(anyhow!(Unprinted::from(io()))), Status::Io);
        let gone = io::Error::from(io::ErrorKind::BrokenPipe);
        assert_eq!(told(anyhow!(Unprinted::from(gone))), Status::ReaderGone);
    }

    #[test]
    fn statuses_are_distinct_and_the_document_has_them() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/operation.md");
        let document = std::fs::read_to_string(path).unwrap();
        let mut numbers: Vec<_> = Status::ALL.iter().map(|(status, _)| *status as u8).collect();
        for (status, means) in Status::ALL {
            let row = format!("| {} | {means} |\n", status as u8);
            assert!(document.contains(&row), "docs/operation.md needs {row}");
        }
        numbers.dedup();
        assert!(numbers.len() == Status::ALL.len() && numbers.is_sorted());
    }
}
