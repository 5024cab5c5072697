//! The kernel's attribute files, under a root that tests can move.
//!
//! Rules:
//!
//! * Every path is spelled relative to `/sys`; a [`Tree`] holds where `/sys` and `/dev` are.
//! * An attribute is read whole and trimmed; numbers may be decimal or `0x…`.
//! * A refused write names the file, the value and the kernel's error, because the kernel says
//!   nothing more.
//! * Whatever the kernel makes asynchronously (ports, dax devices) is waited for with a deadline,
//!   never forever.

use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// Called after each write with the path under `/sys` and the value: a test's fake kernel reacts
/// here.
pub type Reaction = Arc<dyn Fn(&Path, &str) -> io::Result<()> + Send + Sync>;

/// Where the kernel's files are.
#[derive(Clone)]
pub struct Tree {
    sys: PathBuf,
    dev: PathBuf,
    reaction: Option<Reaction>,
}

/// An attribute that could not be used.
#[derive(Debug, thiserror::Error)]
pub enum SysfsError {
    /// A file that could not be read.
    #[error("cannot read {path}: {cause}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        cause: io::Error,
    },
    /// A value the kernel did not accept.
    #[error("the kernel refused {value:?} for {path}: {cause}")]
    Write {
        /// The file.
        path: PathBuf,
        /// What was written.
        value: String,
        /// The kernel's error.
        cause: io::Error,
    },
    /// An attribute that should be a number.
    #[error("{path} holds {value:?}, which is no number")]
    Number {
        /// The file.
        path: PathBuf,
        /// What it holds.
        value: String,
    },
}

impl Tree {
    /// The running kernel's `/sys` and `/dev`.
    pub fn system() -> Self {
        Self { sys: "/sys".into(), dev: "/dev".into(), reaction: None }
    }

    /// `root/sys` and `root/dev`, for tests; `reaction` plays the kernel and sees every write after
    /// it was made.
    pub fn at(root: &Path, reaction: Option<Reaction>) -> Self {
        Self { sys: root.join("sys"), dev: root.join("dev"), reaction }
    }

    /// The file at `path` under `/sys`.
    pub fn sys(&self, path: impl AsRef<Path>) -> PathBuf {
        self.sys.join(path)
    }

    /// The device node `name` under `/dev`.
    pub fn dev(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dev.join(name)
    }

    /// Whether `path` exists.
    pub fn exists(&self, path: impl AsRef<Path>) -> bool {
        self.sys(path).exists()
    }

    /// The attribute at `path`, trimmed.
    ///
    /// # Errors
    /// [`SysfsError::Read`].
    pub fn read(&self, path: impl AsRef<Path>) -> Result<String, SysfsError> {
        let path = self.sys(path);
        match fs::read(&path) {
            Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).trim().to_owned()),
            Err(cause) => Err(SysfsError::Read { path, cause }),
        }
    }

    /// The number at `path`.
    ///
    /// # Errors
    /// [`SysfsError::Read`], [`SysfsError::Number`].
    pub fn number(&self, path: impl AsRef<Path>) -> Result<u64, SysfsError> {
        let value = self.read(&path)?;
        number(&value).ok_or_else(|| SysfsError::Number { path: self.sys(path), value })
    }

    /// Writes `value` to the attribute at `path`.
    ///
    /// # Errors
    /// [`SysfsError::Write`].
    pub fn write(&self, path: impl AsRef<Path>, value: &str) -> Result<(), SysfsError> {
        let full = self.sys(&path);
        tracing::debug!(path = %full.display(), value, "write");
        // No O_CREAT: a missing attribute is an error, not a new file.
        let written = fs::OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(&full)
            .and_then(|mut file| io::Write::write_all(&mut file, value.as_bytes()))
            .and_then(|()| self.reaction.as_ref().map_or(Ok(()), |react| react(path.as_ref(), value)));
        written.map_err(|cause| SysfsError::Write { path: full, value: value.to_owned(), cause })
    }

    /// The names in the folder at `path` with numbers in them compared as numbers; none if there is
    /// no such folder.
    pub fn list(&self, path: impl AsRef<Path>) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.sys(path)) else { return Vec::new() };
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
        names.sort_by_key(|name| (name.len(), name.clone()));
        names
    }

    /// The last part of where the link at `path` points, for example a driver's name.
    pub fn link(&self, path: impl AsRef<Path>) -> Option<String> {
        Some(fs::read_link(self.sys(path)).ok()?.file_name()?.to_str()?.to_owned())
    }

    /// The place of `path` with every link resolved.
    pub fn resolve(&self, path: impl AsRef<Path>) -> Option<PathBuf> {
        fs::canonicalize(self.sys(path)).ok()
    }

    /// Loads a kernel module if `driver` (a path under `/sys`) is not there yet: from
    /// `/lib/modules/NAME.ko`, where a small initramfs keeps it, else by `modprobe`. Whether it
    /// worked shows in `driver` alone: a kernel may have the driver built in, and a small system no
    /// `modprobe`.
    pub fn module(&self, module: &str, driver: &str) {
        if self.exists(driver) || self.reaction.is_some() {
            return;
        }
        if let Ok(file) = fs::File::open(format!("/lib/modules/{module}.ko")) {
            let loaded = rustix::system::finit_module(file, c"", 0);
            tracing::debug!(module, ?loaded, "finit_module");
            if loaded.is_ok() {
                return;
            }
        }
        let status = Command::new("modprobe")
            .arg(module)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        tracing::debug!(module, ?status, "modprobe");
    }
}

impl fmt::Debug for Tree {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tree").field("sys", &self.sys).field("dev", &self.dev).finish_non_exhaustive()
    }
}

/// Asks `probe` until it answers or `limit` has passed.
pub fn wait<T>(limit: Duration, mut probe: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = probe() {
            return Some(found);
        }
        if Instant::now() >= deadline {
            return None;
        }
        thread::sleep(Duration::from_millis(20));
    }
}

/// A number as sysfs spells it.
fn number(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}
