//! The file that says which tensor gets which precision, as `--map` reads it.

use std::fs::Permissions;
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use tempfile::{Builder, NamedTempFile};

/// A tensor, or rows of it, at a precision.
pub(crate) struct Rule<'a> {
    pub(crate) name: &'a str,
    pub(crate) rows: Option<&'a Range<usize>>,
    pub(crate) view: &'a str,
}

#[derive(Serialize)]
struct Map<'a> {
    tensor: Vec<Written<'a>>,
}

#[derive(Serialize)]
struct Written<'a> {
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    rows: Option<String>,
    view: &'a str,
}

/// A map that is not there yet: what was there stays until it is written, and if it never is.
pub(crate) struct File {
    path: PathBuf,
    beside: NamedTempFile,
}

impl File {
    /// One that will be at `path`.
    pub(crate) fn new(path: &Path) -> io::Result<Self> {
        if path.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // As any new file, less what the process's mask takes.
        let beside = Builder::new().permissions(Permissions::from_mode(0o666)).tempfile_in(folder)?;
        Ok(Self { path: path.to_owned(), beside })
    }

    /// Writes it; what no rule names stays full.
    pub(crate) fn write<'a>(mut self, rules: impl Iterator<Item = Rule<'a>>) -> io::Result<()> {
        let rows = |rows: &Range<usize>| format!("{}..{}", rows.start, rows.end);
        let written =
            rules.map(|rule| Written { name: rule.name, rows: rule.rows.map(rows), view: rule.view });
        let text = toml::to_string(&Map { tensor: written.collect() }).map_err(io::Error::other)?;
        self.beside.write_all(text.as_bytes())?;
        self.beside.as_file().sync_all()?;
        self.beside.persist(self.path)?;
        Ok(())
    }
}
