//! The program that workers are started from: this one, or the one that an upgrade named.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{Mode, OFlags, open};

/// A program that an upgrade named. It was opened then: when a worker dies, weeks later, its file
/// may be gone, or another that nobody has tried.
#[derive(Clone, Debug)]
pub(super) struct Program {
    path: PathBuf,
    /// None of a script: whoever interprets that opens it by its path.
    file: Option<Arc<OwnedFd>>,
}

impl Program {
    /// # Errors
    /// What the system says of a file that is not there, or that this user may not look at.
    pub(super) fn open(path: PathBuf) -> io::Result<Self> {
        // What may be executed need not be readable.
        let file = open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        let mut begins = [0; 2];
        let is_read = File::open(&path).and_then(|mut file| file.read_exact(&mut begins)).is_ok();
        let is_script = is_read && begins == *b"#!";
        Ok(Self { path, file: (!is_script).then(|| Arc::new(file)) })
    }

    /// As it was named.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What this process starts it by.
    pub(super) fn started_by(&self) -> PathBuf {
        let of_file = |file: &Arc<OwnedFd>| format!("/proc/self/fd/{}", file.as_raw_fd()).into();
        self.file.as_ref().map_or_else(|| self.path.clone(), of_file)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;

    /// Has a shell do it: what this process has open to write, one that another test starts has
    /// open too for a moment, and then it cannot be run.
    fn shell(script: &str, path: &Path) {
        assert!(Command::new("sh").args(["-c", script]).arg(path).status().unwrap().success());
    }

    #[test]
    fn a_program_is_started_as_it_was_when_it_was_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("program");
        // One that may not be read, too.
        shell("cp /bin/echo \"$0\" && chmod 111 \"$0\"", &path);
        let program = Program::open(path.clone()).unwrap();
        assert_eq!(program.path(), path);
        shell("rm -f \"$0\" && printf '#!/bin/sh\\nexit 1\\n' >\"$0\" && chmod 755 \"$0\"", &path);
        let said = Command::new(program.started_by()).arg("itself").output().unwrap();
        assert_eq!((said.status.code(), said.stdout.as_slice()), (Some(0), b"itself\n".as_slice()));
        // A script is what its file says.
        let script = Program::open(path.clone()).unwrap();
        assert_eq!(Command::new(script.started_by()).status().unwrap().code(), Some(1));
        fs::remove_file(&path).unwrap();
        assert_eq!(Program::open(path).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
