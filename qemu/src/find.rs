//! Which QEMU runs the guest.
//!
//! In this order, the first that is new enough for the way the device is attached (for CXL 11.1):
//! 1. `LAMINA_QEMU`: a `qemu-system-x86_64`, or the folder of a tools root. If set, nothing else is
//!    tried.
//! 2. `qemu-system-x86_64` in `PATH`.
//! 3. The tools root that the recipe `images/tools` unpacks; it is built now if need be.
//!
//! A QEMU of the host runs as it is. One of a tools root runs through that root's own dynamic
//! loader, with that root's libraries and firmware, so it works on hosts with an older C library
//! and needs no chroot.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::bounded;
use crate::recipe::{self, RecipeError};
use crate::version::Version;

/// The program's name.
pub const PROGRAM: &str = "qemu-system-x86_64";

/// How long a QEMU may take to print what it is asked for.
const ASK: Duration = Duration::from_secs(20);

/// Where a QEMU lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Install {
    /// A program of the host.
    Host(PathBuf),
    /// A tools root, see `images/tools`.
    Root(PathBuf),
}

/// A QEMU that will do.
#[derive(Clone, Debug)]
pub struct Qemu {
    /// Where it lies.
    pub install: Install,
    /// Its version.
    pub version: Version,
}

/// Why no QEMU was found.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// The one that `LAMINA_QEMU` names will not do.
    #[error("the QEMU that LAMINA_QEMU names will not do")]
    Named(#[source] ProbeError),
    /// The one that the caller named will not do.
    #[error(transparent)]
    Given(ProbeError),
    /// None was found and none could be built.
    #[error(
        "no QEMU {oldest} or newer. Of the host: {host}. Unpacked by images/tools: {tools}.\n\
        Install Debian's package qemu-system-x86 of at least that version (trixie-backports has it), or the package mmdebstrap, \
        with which images/tools unpacks one, or name one in LAMINA_QEMU"
    )]
    None {
        /// The oldest that would do.
        oldest: Version,
        /// Why the host's will not do.
        host: Box<ProbeError>,
        /// Why the tools root will not do.
        tools: ToolsError,
    },
}

/// Why a tools root gave no QEMU.
#[derive(Debug, thiserror::Error)]
pub enum ToolsError {
    /// Building it was not allowed.
    #[error("not tried")]
    NotTried,
    /// The recipe failed.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// Its QEMU will not do.
    #[error(transparent)]
    Probe(#[from] ProbeError),
}

/// Why a certain QEMU will not do.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// `PATH` has none.
    #[error("PATH has no {PROGRAM}")]
    NotInPath,
    /// It does not run.
    #[error("{} does not run: {why}", path.display())]
    Run {
        /// The program.
        path: PathBuf,
        /// What the system or the program says.
        why: String,
    },
    /// It prints something else than a version.
    #[error("{} is no QEMU: asked for its version it prints {printed:?}", path.display())]
    NoVersion {
        /// The program.
        path: PathBuf,
        /// The first line it printed.
        printed: String,
    },
    /// It is too old for the way the device is attached.
    #[error("{} is QEMU {version}, and {oldest} or newer is needed", path.display())]
    Old {
        /// The program.
        path: PathBuf,
        /// Its version.
        version: Version,
        /// The oldest that would do.
        oldest: Version,
    },
}

impl Qemu {
    /// The QEMU to use, `oldest` or newer. `build` allows to unpack one when the host has none.
    ///
    /// # Errors
    /// When there is none; says what was tried and what to install.
    pub fn find(oldest: Version, build: bool) -> Result<Self, FindError> {
        let tools = || if build { Ok(recipe::run("tools")?) } else { Err(ToolsError::NotTried) };
        choose(oldest, env::var_os("LAMINA_QEMU").as_deref(), env::var_os("PATH").as_deref(), tools)
    }

    /// The QEMU at this path: a program, or a tools root.
    ///
    /// # Errors
    /// When it does not run or is older than `oldest`.
    pub fn probe(path: &Path, oldest: Version) -> Result<Self, ProbeError> {
        let install =
            if path.is_dir() { Install::Root(path.to_owned()) } else { Install::Host(path.to_owned()) };
        let printed = install.ask("--version")?;
        match Version::parse(&printed) {
            Some(version) if version >= oldest => Ok(Self { install, version }),
            Some(version) => Err(ProbeError::Old { path: path.to_owned(), version, oldest }),
            None => {
                let printed = printed.lines().next().unwrap_or_default().to_owned();
                Err(ProbeError::NoVersion { path: path.to_owned(), printed })
            }
        }
    }

    /// Whether it loads plug-ins: not every one is built so.
    ///
    /// # Errors
    /// When it does not run.
    pub fn has_plugins(&self) -> Result<bool, ProbeError> {
        Ok(self.install.ask("--help")?.lines().any(|line| line.starts_with("-plugin ")))
    }
}

impl Install {
    /// What it prints to this option.
    fn ask(&self, option: &str) -> Result<String, ProbeError> {
        self.ask_within(option, ASK)
    }

    fn ask_within(&self, option: &str, limit: Duration) -> Result<String, ProbeError> {
        let (path, arguments) = self.command(None);
        let output = bounded::output(Command::new(&path).args(arguments).arg(option), limit);
        let output =
            output.map_err(|error| ProbeError::Run { path: path.clone(), why: error.to_string() })?;
        if !output.status.success() {
            let first = String::from_utf8_lossy(&output.stderr);
            let why = format!("{}: {}", output.status, first.lines().next().unwrap_or_default());
            return Err(ProbeError::Run { path, why });
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The program to start, and the arguments that come before QEMU's own. In a tools root
    /// `preload` is loaded first; for a program of the host, the caller sets `LD_PRELOAD`.
    pub fn command(&self, preload: Option<&Path>) -> (PathBuf, Vec<String>) {
        match self {
            Self::Host(program) => (program.clone(), Vec::new()),
            Self::Root(root) => {
                let usr = root.join("usr");
                let (loader, mut args) = in_root(root, &usr.join("bin").join(PROGRAM), preload);
                for data in ["share/qemu", "share/seabios"] {
                    args.extend(["-L".to_owned(), text(&usr.join(data))]);
                }
                (loader, args)
            }
        }
    }
}

/// The loader of a root of unpacked packages, and its arguments up to a program of that root.
pub(crate) fn in_root(root: &Path, program: &Path, preload: Option<&Path>) -> (PathBuf, Vec<String>) {
    let usr = root.join("usr");
    let mut args = vec!["--library-path".to_owned(), text(&usr.join("lib/x86_64-linux-gnu"))];
    if let Some(preload) = preload {
        args.extend(["--preload".to_owned(), text(preload)]);
    }
    args.push(text(program));
    (usr.join("lib64/ld-linux-x86-64.so.2"), args)
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

fn choose(
    oldest: Version,
    named: Option<&OsStr>,
    path: Option<&OsStr>,
    tools: impl FnOnce() -> Result<PathBuf, ToolsError>,
) -> Result<Qemu, FindError> {
    if let Some(named) = named.filter(|named| !named.is_empty()) {
        return Qemu::probe(Path::new(named), oldest).map_err(FindError::Named);
    }
    let host =
        match in_path(path).ok_or(ProbeError::NotInPath).and_then(|program| Qemu::probe(&program, oldest)) {
            Ok(qemu) => return Ok(qemu),
            Err(error) => error,
        };
    if !matches!(host, ProbeError::NotInPath) {
        tracing::info!("not using a QEMU of the host: {host}");
    }
    tools().and_then(|root| Ok(Qemu::probe(&root, oldest)?)).map_err(|tools| FindError::None {
        oldest,
        host: Box::new(host),
        tools,
    })
}

fn in_path(path: Option<&OsStr>) -> Option<PathBuf> {
    env::split_paths(path?).map(|folder| folder.join(PROGRAM)).find(|program| program.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::version::OLDEST;
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;

    /// A folder with a program named like QEMU that runs this script.
    fn fake(script: &str) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let mut options = std::fs::OpenOptions::new();
        let mut file = options
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o755)
            .open(folder.path().join(PROGRAM))
            .unwrap();
        writeln!(file, "#!/bin/sh\n{script}").unwrap();
        folder
    }

    fn not_tried() -> Result<PathBuf, ToolsError> {
        Err(ToolsError::NotTried)
    }

    fn retry<T>(mut run: impl FnMut() -> Result<T, FindError>) -> Result<T, FindError> {
        // Another test's fork may hold the script open for writing for a moment (ETXTBSY).
        loop {
            match run() {
                Err(error) if error.to_string().contains("Text file busy") => std::thread::yield_now(),
                result => return result,
            }
        }
    }

    #[test]
    fn a_new_enough_qemu_in_path_is_taken() {
        let folder = fake("echo 'QEMU emulator version 11.2.0'");
        let qemu = retry(|| choose(OLDEST, None, Some(folder.path().as_os_str()), not_tried)).unwrap();
        assert_eq!(qemu.install, Install::Host(folder.path().join(PROGRAM)));
        assert_eq!(qemu.version, Version { major: 11, minor: 2, patch: 0 });
    }

    #[test]
    fn an_old_qemu_in_path_is_passed_over_and_the_packages_are_named() {
        let folder = fake("echo 'QEMU emulator version 10.0.2 (Debian)'");
        let message = retry(|| choose(OLDEST, None, Some(folder.path().as_os_str()), not_tried))
            .unwrap_err()
            .to_string();
        for part in ["QEMU 10.0.2", "11.1.0 or newer", "qemu-system-x86", "mmdebstrap", "LAMINA_QEMU"] {
            assert!(message.contains(part), "{part}: {message}");
        }
    }

    #[test]
    fn an_older_qemu_will_do_where_less_is_asked_of_it() {
        let folder = fake("echo 'QEMU emulator version 7.2.22 (Debian)'");
        let seven = Version { major: 7, minor: 2, patch: 0 };
        let path = Some(folder.path().as_os_str());
        assert_eq!(retry(|| choose(seven, None, path, not_tried)).unwrap().version.patch, 22);
        assert!(retry(|| choose(OLDEST, None, path, not_tried)).is_err());
    }

    #[test]
    fn a_missing_qemu_is_said_to_be_missing() {
        let folder = tempfile::tempdir().unwrap();
        let message =
            choose(OLDEST, None, Some(folder.path().as_os_str()), not_tried).unwrap_err().to_string();
        assert!(message.contains("PATH has no qemu-system-x86_64"), "{message}");
        assert!(choose(OLDEST, None, None, not_tried).is_err());
    }

    #[test]
    fn the_one_named_is_the_only_one_tried() {
        let good = fake("echo 'QEMU emulator version 11.1.0'");
        let old = fake("echo 'QEMU emulator version 8.2.2'");
        let bad = fake("echo 'no: such library' >&2; exit 127");
        let other = fake("echo 'hello, version 11.1.0'");
        let path = Some(good.path().as_os_str());
        let named = |folder: &tempfile::TempDir| {
            let program = folder.path().join(PROGRAM);
            retry(|| choose(OLDEST, Some(program.as_os_str()), path, not_tried))
        };
        let Err(FindError::Named(why @ ProbeError::Old { .. })) = named(&old) else { panic!("taken") };
        assert!(why.to_string().ends_with("QEMU 8.2.2, and 11.1.0 or newer is needed"), "{why}");
        assert!(
            matches!(named(&bad), Err(FindError::Named(ProbeError::Run { why, .. })) if why.contains("no: such library"))
        );
        assert!(matches!(named(&other), Err(FindError::Named(ProbeError::NoVersion { .. }))));
        assert!(named(&good).is_ok());
        let message =
            choose(OLDEST, Some(OsStr::new("/nowhere/qemu")), path, not_tried).unwrap_err().to_string();
        assert!(message.contains("LAMINA_QEMU"), "{message}");
    }

    #[test]
    fn one_that_never_says_its_version_will_not_do() {
        let folder = fake("sleep 600");
        let install = Install::Host(folder.path().join(PROGRAM));
        let ask = || install.ask_within("--version", Duration::from_millis(200)).map_err(FindError::Given);
        let why = retry(ask).unwrap_err().to_string();
        assert!(why.contains("does not run: it does not end within"), "{why}");
    }

    #[test]
    fn a_tools_root_runs_through_its_own_loader_with_the_filter_first() {
        let (program, args) = Install::Root("/root".into()).command(Some(Path::new("/f.so")));
        assert_eq!(program, Path::new("/root/usr/lib64/ld-linux-x86-64.so.2"));
        assert_eq!(
            args.join(" "),
            "--library-path /root/usr/lib/x86_64-linux-gnu --preload /f.so /root/usr/bin/qemu-system-x86_64 \
            -L /root/usr/share/qemu -L /root/usr/share/seabios"
        );
    }
}
