//! Which device a command on models is for.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use lamina_serve::{OurMount, peer};

use crate::args::{ApiAt, To, run_dir};
use crate::client;
use crate::holder;
use crate::mounted::{all_mounted, is_of, named};
use crate::status::NoDevice;

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

/// The directory for the sockets of the device that `lamina mount` mounted there.
pub(super) fn ours(dir: &Path) -> Result<PathBuf> {
    let (run_dir, dir) = named(dir)?;
    if holder::is_held(&run_dir) {
        return Ok(run_dir);
    }
    let at = dir.display();
    let Some((root, socket)) = told(&dir).filter(|(root, _)| *root == dir) else {
        bail!(NoDevice(format!(
            "nothing that `lamina mount` started is mounted on {at}; `lamina ls` lists what is"
        )));
    };
    // Whoever mounted it had another environment, and so another place for sockets.
    if let Some(theirs) = socket.parent().filter(|theirs| is_of(theirs, &root) && holder::is_held(theirs)) {
        return Ok(theirs.to_owned());
    }
    if is_gone(&socket) {
        let server = OurMount::at(&root).and_then(|mount| mount.server()).filter(|pid| is_lamina(*pid));
        let end = server.map_or_else(
            || "end its process, which may be in another container".to_owned(),
            |pid| format!("`kill {pid}` ends it"),
        );
        bail!(NoDevice(format!("the sockets of the device on {at} are gone, {}: {end}", socket.display())));
    }
    bail!(
        "{at} is not from `lamina mount`: end the `lamina serve` or `lamina boot` that answers at {}",
        socket.display()
    )
}

/// The mount there that nobody serves any more, if it was one of ours, and where its device had its
/// sockets.
pub(super) fn dead(dir: &Path) -> Result<Option<(PathBuf, OurMount)>> {
    let (run_dir, dir) = named(dir)?;
    Ok(OurMount::at(&dir).filter(|mount| is_dead(mount, &run_dir, &dir)).map(|mount| (run_dir, mount)))
}

/// Whether nobody serves a mount there any more. What is noted in the directory for its sockets
/// says that its device was one of this host's.
fn is_dead(mount: &OurMount, run_dir: &Path, dir: &Path) -> bool {
    mount.is_dead(is_of(run_dir, dir) && !holder::is_held(run_dir))
}

/// Whether a process is a `lamina`. The number in a mount's name may be of another container, where
/// another process has it.
fn is_lamina(pid: u32) -> bool {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let program = line.split(|byte| *byte == 0).next().unwrap_or_default();
    Path::new(OsStr::from_bytes(program)).file_name() == Some(OsStr::new("lamina"))
}

/// Whether nobody listens at a socket.
pub(super) fn is_gone(socket: &Path) -> bool {
    let gone = |why: &io::Error| matches!(why.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused);
    peer::connect(socket).is_err_and(|why| gone(&why))
}

/// The device that is mounted on a directory, or on one above it, whoever started it.
pub(super) fn mounted(dir: &Path) -> Result<Found> {
    let (run_dir, dir) = named(dir)?;
    if holder::is_held(&run_dir) {
        return Ok(Found { api: ApiAt::in_dir(&run_dir), dir: Some(dir) });
    }
    let is_dead = || OurMount::at(&dir).is_some_and(|mount| is_dead(&mount, &run_dir, &dir));
    // Who asks a dead one anything else may wait for ever. It may die just now.
    let told = if is_dead() { None } else { told(&dir) };
    let Some((dir, socket)) = told else {
        let at = dir.display();
        bail!(NoDevice(if is_dead() {
            format!(
                "the device that was mounted on {at} was killed: `lamina umount {at}` takes its mount away"
            )
        } else {
            format!(
                "no device is mounted on {at}: `lamina ls` lists those that are, `lamina mount MODEL… {at}` mounts one, and --api reaches one that is served without a mount"
            )
        }));
    };
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

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_that_is_no_lamina_is_told_from_one() {
        for (name, is) in [("lamina", true), ("/bin/lamina", true), ("lamina-run", false), ("sh", false)] {
            let mut shell = Command::new("sh");
            shell.arg0(name).args(["-c", "echo; read line"]).stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut shell = shell.spawn().unwrap();
            // It has its name when it runs, which is later than it is there.
            shell.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
            assert_eq!(is_lamina(shell.id()), is, "{name}");
            drop(shell.stdin.take());
            shell.wait().unwrap();
            assert!(!is_lamina(shell.id()), "{name}");
        }
    }
}
