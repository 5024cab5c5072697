//! Which devices `lamina mount` mounted, and where: what is noted beside their sockets.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use lamina_serve::PrivateDir;

use crate::args::{run_dir, socket_in};
use crate::holder;

/// The directory of the directories of mounted devices.
pub(crate) const MOUNTS: &str = "mounts";
/// The file that says where a device is mounted.
const PLACE: &str = "mounted-on";

/// The directory for the sockets of a device that is mounted there. Asks nothing of what is mounted
/// there, which may be dead.
pub(crate) fn named(dir: &Path) -> Result<(PathBuf, PathBuf)> {
    let dir = std::path::absolute(dir)?;
    let resolved = dir.parent().and_then(|parent| parent.canonicalize().ok());
    let dir = match (resolved, dir.file_name()) {
        (Some(parent), Some(name)) => parent.join(name),
        _ => dir,
    };
    // Sockets' paths are short.
    let hash = dir.as_os_str().as_encoded_bytes().iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    });
    Ok((run_dir().join(MOUNTS).join(format!("{hash:016x}")), dir))
}

/// Whether `lamina mount` made this directory for the sockets of the device that it mounted there.
pub(crate) fn is_of(run_dir: &Path, dir: &Path) -> bool {
    fs::read(run_dir.join(PLACE)).is_ok_and(|place| place == dir.as_os_str().as_encoded_bytes())
}

/// Whether `lamina mount` has a device mounted there.
pub(crate) fn is_mounted(dir: &Path) -> Result<bool> {
    Ok(holder::is_held(&named(dir)?.0))
}

/// The directory for the sockets of a device, locked: while this is there, no other command begins
/// a device in it or removes it.
pub(crate) struct Claim {
    run_dir: PathBuf,
    _lock: File,
}

impl Claim {
    /// The directory for a device that is to be mounted there.
    ///
    /// # Errors
    /// If a device is mounted there, or another command is about to mount one.
    pub(crate) fn new(dir: &Path) -> Result<Self> {
        let (run_dir, resolved) = named(dir)?;
        let claim = loop {
            PrivateDir::make(&run_dir)?;
            match Self::of(&run_dir) {
                Ok(claim) => break claim,
                // A mount that failed has just removed it.
                Err(TryLockError::Error(why)) if why.kind() == io::ErrorKind::NotFound => {}
                Err(TryLockError::Error(why)) => {
                    return Err(why).with_context(|| format!("cannot lock {}", run_dir.display()));
                }
                Err(TryLockError::WouldBlock) if holder::is_held(&run_dir) => bail!(is_mounted_already(dir)),
                Err(TryLockError::WouldBlock) => bail!(
                    "another `lamina mount` or `lamina umount` of {} has not come to its end: wait for it",
                    dir.display()
                ),
            }
        };
        if holder::is_held(&run_dir) {
            bail!(is_mounted_already(dir));
        }
        let place = run_dir.join(PLACE);
        fs::write(&place, resolved.as_os_str().as_encoded_bytes())
            .with_context(|| format!("cannot write {}", place.display()))?;
        Ok(claim)
    }

    /// The directory as it is.
    ///
    /// # Errors
    /// `WouldBlock` if another command has it, and why it cannot be locked.
    pub(crate) fn of(run_dir: &Path) -> Result<Self, TryLockError> {
        let lock = File::open(run_dir).map_err(TryLockError::Error)?;
        lock.try_lock()?;
        // It may have been removed, or made anew, since it was opened.
        let identity = |of: fs::Metadata| (of.dev(), of.ino());
        let locked = lock.metadata().map_err(TryLockError::Error)?;
        let there = fs::metadata(run_dir).map_err(TryLockError::Error)?;
        if identity(there) != identity(locked) {
            return Err(TryLockError::Error(io::ErrorKind::NotFound.into()));
        }
        Ok(Self { run_dir: run_dir.to_owned(), _lock: lock })
    }

    pub(crate) fn run_dir(&self) -> &Path {
        &self.run_dir
    }
}

fn is_mounted_already(dir: &Path) -> String {
    let dir = dir.display();
    format!("{dir} is mounted already: `lamina ls {dir}` shows it, `lamina load` adds to it")
}

/// The socket of the device in the usual place, or else of the only one that is mounted.
pub(crate) fn usual_socket() -> Result<PathBuf> {
    let usual = socket_in(&run_dir());
    // One without a holder answers, too.
    if holder::is_held(&run_dir()) || UnixStream::connect(&usual).is_ok() {
        return Ok(usual);
    }
    let all = all_mounted();
    match &all[..] {
        [] => Ok(usual),
        [(run_dir, _)] => Ok(socket_in(run_dir)),
        _ => {
            let each = all
                .iter()
                .map(|(run_dir, dir)| format!("--api {} of {}", socket_in(run_dir).display(), dir.display()));
            bail!("say which device: {}", each.collect::<Vec<_>>().join(", "))
        }
    }
}

/// The directories for the sockets of the devices that `lamina mount` mounted, and where they are.
pub(crate) fn all_mounted() -> Vec<(PathBuf, PathBuf)> {
    let of = |run_dir: PathBuf| {
        let dir: PathBuf = OsString::from_vec(fs::read(run_dir.join(PLACE)).ok()?).into();
        holder::is_held(&run_dir).then_some((run_dir, dir))
    };
    let entries = fs::read_dir(run_dir().join(MOUNTS)).into_iter().flatten().flatten();
    let mut all: Vec<_> = entries.filter_map(|entry| of(entry.path())).collect();
    all.sort_by(|(_, one), (_, other)| one.cmp(other));
    all
}
