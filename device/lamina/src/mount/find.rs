//! Which device is mounted where.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::args::run_dir;
use crate::holder;

/// The directory of the directories of mounted devices.
pub(super) const MOUNTS: &str = "mounts";
/// The file that says where a device is mounted.
const PLACE: &str = "mounted-on";

/// A device that is mounted.
pub(super) struct Found {
    /// Where its sockets are.
    pub(super) run_dir: PathBuf,
    /// Where it is mounted.
    pub(super) dir: PathBuf,
}

impl Found {
    pub(super) fn api(&self) -> PathBuf {
        self.run_dir.join("api.sock")
    }
}

/// The directory for the sockets of a device that is mounted there. Asks nothing of what is mounted
/// there, which may be dead.
fn named(dir: &Path) -> Result<(PathBuf, PathBuf)> {
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

/// The directory for the sockets of a device that is to be mounted there.
pub(super) fn run_dir_of(dir: &Path) -> Result<PathBuf> {
    let (run_dir, dir) = named(dir)?;
    lamina_serve::PrivateDir::make(&run_dir)?;
    let place = run_dir.join(PLACE);
    fs::write(&place, dir.as_os_str().as_encoded_bytes())
        .with_context(|| format!("cannot write {}", place.display()))?;
    Ok(run_dir)
}

/// The device that is mounted there.
pub(super) fn mounted(dir: &Path) -> Result<Found> {
    let (run_dir, dir) = named(dir)?;
    if !holder::is_held(&run_dir) {
        bail!(
            "nothing that `lamina mount` started is mounted on {}; `lamina ls` lists what is",
            dir.display()
        );
    }
    Ok(Found { run_dir, dir })
}

/// All devices that are mounted.
pub(super) fn all() -> Vec<Found> {
    let Ok(entries) = fs::read_dir(run_dir().join(MOUNTS)) else { return Vec::new() };
    let of = |run_dir: PathBuf| {
        use std::os::unix::ffi::OsStringExt;
        let dir = std::ffi::OsString::from_vec(fs::read(run_dir.join(PLACE)).ok()?).into();
        holder::is_held(&run_dir).then_some(Found { run_dir, dir })
    };
    let mut all: Vec<_> = entries.flatten().filter_map(|entry| of(entry.path())).collect();
    all.sort_by(|one, other| one.dir.cmp(&other.dir));
    all
}

/// The device that is mounted there, or the only one.
pub(super) fn one(dir: Option<&Path>) -> Result<Found> {
    if let Some(dir) = dir {
        return mounted(dir);
    }
    let mut all = all();
    match all.len() {
        1 => Ok(all.remove(0)),
        0 => bail!("nothing is mounted: `lamina mount MODEL… DIR` does that"),
        _ => {
            let dirs: Vec<_> = all.iter().map(|found| found.dir.display().to_string()).collect();
            bail!("say with --in which one: {}", dirs.join(", "))
        }
    }
}
