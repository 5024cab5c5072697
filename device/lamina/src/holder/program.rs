//! The program that workers are started from: this one, or the one that an upgrade named.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags, fstat, open};

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
    /// What the system says of a file that is not there, or that is none.
    pub(super) fn open(path: PathBuf) -> io::Result<Self> {
        // What may be executed need not be readable, and what is no file is not waited for.
        let file = open(&path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        if !FileType::from_raw_mode(fstat(&file)?.st_mode).is_file() {
            return Err(io::Error::other("it is no regular file"));
        }
        let mut begins = [0; 2];
        let read = File::open(place_of(&file)).and_then(|mut file| file.read_exact(&mut begins));
        let is_script = read.is_ok() && begins == *b"#!";
        Ok(Self { path, file: (!is_script).then(|| Arc::new(file)) })
    }

    /// As it was named.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What this process starts it by.
    pub(super) fn started_by(&self) -> PathBuf {
        self.file.as_deref().map_or_else(|| self.path.clone(), place_of)
    }

    /// Whether its file may have gone since.
    pub(super) fn is_script(&self) -> bool {
        self.file.is_none()
    }
}

/// What this process opens a file by that it has open.
fn place_of(file: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::process::CommandExt;
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
        assert!(!program.is_script());
        let said = Command::new(program.started_by()).arg0("echo").arg("itself").output().unwrap();
        assert_eq!((said.status.code(), said.stdout.as_slice()), (Some(0), b"itself\n".as_slice()));
        // A script is what its file says.
        let script = Program::open(path.clone()).unwrap();
        assert!(script.is_script());
        assert_eq!(Command::new(script.started_by()).status().unwrap().code(), Some(1));
        fs::remove_file(&path).unwrap();
        assert_eq!(Program::open(path.clone()).unwrap_err().kind(), io::ErrorKind::NotFound);
        shell("mkfifo \"$0\"", &path);
        assert_eq!(Program::open(path).unwrap_err().to_string(), "it is no regular file");
    }
}
