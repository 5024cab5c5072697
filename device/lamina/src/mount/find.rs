//! Which device is mounted where.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::args::{ApiAt, To, run_dir, socket_in};
use crate::client;
use crate::holder;
use crate::status::NoDevice;

/// The directory of the directories of mounted devices.
pub(super) const MOUNTS: &str = "mounts";
/// The file that says where a device is mounted.
const PLACE: &str = "mounted-on";
/// The attribute of a mount's root that names the socket of its API.
const API: &str = "user.lamina.api";

/// A device that shows models.
pub(super) struct Found {
    /// Where it answers.
    pub(super) api: ApiAt,
    /// Where it is mounted, if it says so.
    pub(super) dir: Option<PathBuf>,
}

impl Found {
    /// A model's folder, for a person.
    pub(super) fn folder(&self, model: &str) -> String {
        self.inside(&format!("models/{model}"))
    }

    /// The folder of files, for a person.
    pub(super) fn files(&self) -> String {
        self.inside("files")
    }

    fn inside(&self, path: &str) -> String {
        match &self.dir {
            Some(dir) => format!("{}/{path}", dir.display()),
            None => path.to_owned(),
        }
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

/// Whether `lamina mount` has a device mounted there.
pub(super) fn is_mounted(dir: &Path) -> Result<bool> {
    Ok(holder::is_held(&named(dir)?.0))
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

/// The directory for the sockets of the device that `lamina mount` mounted there.
pub(super) fn ours(dir: &Path) -> Result<PathBuf> {
    let (run_dir, dir) = named(dir)?;
    if holder::is_held(&run_dir) {
        return Ok(run_dir);
    }
    match told(&dir) {
        Some((_, socket)) => bail!(
            "{} is not from `lamina mount`: end the `lamina serve` or `lamina boot` that answers at {}",
            dir.display(),
            socket.display()
        ),
        None => bail!(NoDevice(format!(
            "nothing that `lamina mount` started is mounted on {}; `lamina ls` lists what is",
            dir.display()
        ))),
    }
}

/// The device that is mounted on a directory, or on one above it, whoever started it.
pub(super) fn mounted(dir: &Path) -> Result<Found> {
    let (run_dir, dir) = named(dir)?;
    if holder::is_held(&run_dir) {
        return Ok(Found { api: ApiAt::in_dir(&run_dir), dir: Some(dir) });
    }
    let (dir, socket) = told(&dir).with_context(|| {
        NoDevice(format!(
            "no device is mounted on {}: `lamina ls` lists those that are, `lamina mount MODEL… {0}` mounts one, and --api reaches one that is served without a mount",
            dir.display()
        ))
    })?;
    Ok(Found { api: socket.into(), dir: Some(dir) })
}

/// What a mount says of itself: where its root is, and the API's socket.
fn told(dir: &Path) -> Option<(PathBuf, PathBuf)> {
    let mut path = vec![0; libc::PATH_MAX.unsigned_abs() as usize];
    dir.ancestors().find_map(|dir| {
        let length = rustix::fs::getxattr(dir, API, &mut path[..]).ok()?;
        Some((dir.to_owned(), PathBuf::from(OsString::from_vec(path[..length].to_vec()))))
    })
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
fn all_mounted() -> Vec<(PathBuf, PathBuf)> {
    let of = |run_dir: PathBuf| {
        let dir: PathBuf = OsString::from_vec(fs::read(run_dir.join(PLACE)).ok()?).into();
        holder::is_held(&run_dir).then_some((run_dir, dir))
    };
    let entries = fs::read_dir(run_dir().join(MOUNTS)).into_iter().flatten().flatten();
    let mut all: Vec<_> = entries.filter_map(|entry| of(entry.path())).collect();
    all.sort_by(|(_, one), (_, other)| one.cmp(other));
    all
}

/// All devices that `lamina mount` mounted, and the one that is served in the usual place.
pub(super) async fn all() -> Vec<Found> {
    let found = |(run_dir, dir): (PathBuf, PathBuf)| Found { api: ApiAt::in_dir(&run_dir), dir: Some(dir) };
    let mut all: Vec<_> = all_mounted().into_iter().map(found).collect();
    if holder::is_held(&run_dir()) {
        all.push(at(ApiAt::default()).await);
    }
    all
}

/// The device that answers at `api`.
pub(super) async fn at(api: ApiAt) -> Found {
    let exports = client::exports(&api).await.unwrap_or_default();
    let root = exports.iter().find(|export| export["name"].is_null());
    let base = root.and_then(|export| export["base"]["path"].as_str()).map(Path::new);
    let dir = base.and_then(Path::parent).map(Path::to_owned);
    Found { api, dir }
}

/// The device that is asked for, or the only one.
pub(super) async fn one(to: &To) -> Result<Found> {
    match (&to.api, &to.dir) {
        (Some(api), _) => return Ok(at(api.clone()).await),
        (None, Some(dir)) => return mounted(dir),
        (None, None) => {}
    }
    let mut all = all().await;
    match all.len() {
        1 => Ok(all.remove(0)),
        0 => bail!(NoDevice(
            "no device is mounted: `lamina mount MODEL… DIR` does that; one that is served elsewhere is reached by --in DIR or --api"
                .to_owned()
        )),
        _ => {
            let each = all.iter().map(|found| match &found.dir {
                Some(dir) => format!("--in {}", dir.display()),
                None => format!("--api {}", found.api),
            });
            bail!("say which one: {}", each.collect::<Vec<_>>().join(", "))
        }
    }
}
