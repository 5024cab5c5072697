//! Which devices `lamina mount` mounted, and where: what is noted beside their sockets.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

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

/// The directory for the sockets of a device that is to be mounted there.
pub(crate) fn run_dir_of(dir: &Path) -> Result<PathBuf> {
    let (run_dir, dir) = named(dir)?;
    lamina_serve::PrivateDir::make(&run_dir)?;
    let place = run_dir.join(PLACE);
    fs::write(&place, dir.as_os_str().as_encoded_bytes())
        .with_context(|| format!("cannot write {}", place.display()))?;
    Ok(run_dir)
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
