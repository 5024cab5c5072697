//! Directories for sockets and mounts that are this user's alone.
//!
//! Whoever may write in a directory may take a socket away and put another in its place, and those
//! who connect by the path never know. So a directory is used only if it is this user's own, nobody
//! else may write in it, and it is no symbolic link, which somebody could turn elsewhere. One that
//! is missing is made, for this user alone.
//!
//! What was checked is what is used: the directory is opened first, looked at through the
//! descriptor, and sockets are made through that, whatever the path names by then. The directories
//! above it are not looked at: who may rename one of those can keep clients out, but [what clients
//! find there](super::peer) is no more believed than before. One in /tmp is as good as any, for
//! nobody else may rename or remove it there.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use nix::unistd::{Uid, geteuid};
use rustix::fs::{Mode, OFlags, fstat, open};

use super::ServeError;

/// The bits of a mode by which others than the owner may write.
const OTHERS_WRITE: u32 = 0o022;

/// What is wrong with a directory.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// It is a link.
    #[error("it is a symbolic link, which may be turned elsewhere: name the directory itself")]
    Link,
    /// It is somebody else's.
    #[error("it belongs to user {owner}, and this is user {user}: name a new one, or one of user {user}'s")]
    Owner {
        /// Whose it is.
        owner: u32,
        /// Who runs this.
        user: u32,
    },
    /// Others may write in it.
    #[error(
        "its mode {mode:o} lets others write in it: `chmod go-w` it if only user {user} uses it, or name a new one"
    )]
    Mode {
        /// Its permissions.
        mode: u32,
        /// Who runs this.
        user: u32,
    },
    /// It cannot be made or opened.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A directory of this user's.
#[derive(Debug)]
pub struct PrivateDir {
    descriptor: OwnedFd,
}

impl PrivateDir {
    /// The directory at `path`, made with what is missing above it if there is none.
    ///
    /// # Errors
    ///
    /// When it is not this user's alone, or cannot be made; says what to do.
    pub fn make(path: &Path) -> Result<Self, ServeError> {
        let failed = |fault| ServeError::NotPrivate { path: path.to_owned(), fault };
        let made = DirBuilder::new().recursive(true).mode(0o700).create(plain(path).map_err(failed)?);
        match made {
            Err(why) if why.kind() != io::ErrorKind::AlreadyExists => Err(failed(why.into())),
            // Something else than a directory is told of when it is opened.
            _ => Self::open(path),
        }
    }

    /// The directory at `path`.
    ///
    /// # Errors
    ///
    /// When it is not this user's alone, or there is none.
    pub fn open(path: &Path) -> Result<Self, ServeError> {
        let opened = plain(path).and_then(|path| Self::try_open(&path));
        opened.map_err(|fault| ServeError::NotPrivate { path: path.to_owned(), fault })
    }

    fn try_open(path: &Path) -> Result<Self, Fault> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let descriptor = open(path, flags, Mode::empty()).map_err(|why| {
            let link = fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_symlink());
            if link { Fault::Link } else { Fault::Io(why.into()) }
        })?;
        let found = fstat(&descriptor).map_err(io::Error::from)?;
        check(found.st_uid, found.st_mode, geteuid())?;
        Ok(Self { descriptor })
    }

    /// The directory that a socket at `path` is in, and the socket's name there.
    ///
    /// # Errors
    ///
    /// As [`Self::open`], or when the path names no file.
    pub(super) fn of_socket(path: &Path) -> Result<(Self, PathBuf), ServeError> {
        let failed = |source| ServeError::Socket { path: path.to_owned(), source };
        let name = path.file_name().ok_or_else(|| failed(io::Error::from(io::ErrorKind::InvalidInput)))?;
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = Self::open(parent.unwrap_or(Path::new(".")))?;
        let place = directory.place(Path::new(name));
        Ok((directory, place))
    }

    /// Where a file of this name in it is, whatever its path names by now.
    fn place(&self, name: &Path) -> PathBuf {
        Path::new("/proc/self/fd").join(self.descriptor.as_raw_fd().to_string()).join(name)
    }
}

/// Checks that a socket which somebody else is to connect to, such as a QEMU, is in a directory of
/// this user's alone.
///
/// # Errors
///
/// When it is not.
pub fn check_socket_dir(socket: &Path) -> Result<(), ServeError> {
    PrivateDir::of_socket(socket).map(drop)
}

fn check(owner: u32, mode: u32, user: Uid) -> Result<(), Fault> {
    let (user, mode) = (user.as_raw(), mode & 0o7777);
    if owner != user {
        return Err(Fault::Owner { owner, user });
    }
    if mode & OTHERS_WRITE != 0 {
        return Err(Fault::Mode { mode, user });
    }
    Ok(())
}

/// A path whose last part is the directory's own name: behind a slash or a dot a link would be
/// followed.
fn plain(path: &Path) -> Result<PathBuf, Fault> {
    Ok(std::path::absolute(path)?.components().collect())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn fault(path: &Path) -> Fault {
        match PrivateDir::make(path) {
            Err(ServeError::NotPrivate { fault, .. }) => fault,
            made => panic!("{}: {made:?}", path.display()),
        }
    }

    #[test]
    fn a_missing_directory_is_made_for_this_user_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b");
        for _ in 0..2 {
            PrivateDir::make(&path).unwrap();
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o700);
        }
        assert!(matches!(PrivateDir::open(&folder.path().join("c")), Err(ServeError::NotPrivate { .. })));
    }

    #[test]
    fn a_directory_in_which_others_may_write_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::create_dir(&path).unwrap();
        for (mode, good) in [(0o700, true), (0o755, true), (0o775, false), (0o702, false), (0o1777, false)] {
            fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            if good {
                PrivateDir::make(&path).unwrap();
            } else {
                let fault = fault(&path);
                assert!(
                    matches!(fault, Fault::Mode { mode: found, .. } if found == mode),
                    "{mode:o}: {fault}"
                );
            }
        }
    }

    #[test]
    fn a_link_is_refused_however_it_is_written_and_what_is_no_directory_too() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        fs::create_dir(&target).unwrap();
        symlink(&target, &link).unwrap();
        for end in ["", "/", "/.", "/./"] {
            let path = PathBuf::from(format!("{}{end}", link.display()));
            assert!(matches!(fault(&path), Fault::Link), "{end}");
        }
        // One that leads nowhere is not followed to make something there.
        let nowhere = folder.path().join("nowhere");
        symlink(folder.path().join("made"), &nowhere).unwrap();
        fault(&nowhere);
        assert!(!folder.path().join("made").exists());
        fs::write(folder.path().join("file"), "x").unwrap();
        assert!(matches!(fault(&folder.path().join("file")), Fault::Io(_)));
        // A link above it is the way there, and no more.
        PrivateDir::make(&link.join("inside")).unwrap();
        PrivateDir::make(&folder.path().join("target/../target/inside")).unwrap();
    }

    #[test]
    fn another_users_directory_is_refused_with_both_users() {
        let user = Uid::from_raw(1000);
        assert!(check(1000, 0o40700, user).is_ok());
        for owner in [0, 1001] {
            let why = check(owner, 0o40700, user).unwrap_err().to_string();
            assert!(why.contains(&format!("user {owner}")) && why.contains("user 1000"), "{why}");
        }
        // Root is no exception: what another user owns, that user may change.
        assert!(matches!(check(1000, 0o40700, Uid::from_raw(0)), Err(Fault::Owner { owner: 1000, user: 0 })));
    }
}
