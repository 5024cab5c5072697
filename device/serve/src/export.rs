//! An export on the mount: the two windows of a partition, as one guest or host has them.
//!
//! | place | files | page cache |
//! |---|---|---|
//! | the root | `base`, `views` | of all who map them: an undivided device, or its shared partition |
//! | the root, of a device that is an interleave set | `target0`, `target1` and so on besides | the same: see [`super::coherence`] |
//! | a guest's | `guests/NAME/base`, `guests/NAME/views` | of that guest alone, for its own partition |
//! | a host's | `hosts/NAME/base`, `hosts/NAME/views` | of that host alone, for the shared partition |
//!
//! A partition that is coherent has one export, for coherence is that of one page cache. A
//! partition that hosts share has an export for each, and then no other.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Serialize, Serializer};

use lamina_device::device::Partition;

use super::coherence::Coherence;
use super::export_file::ExportFile;
use super::host_cache::{HostCache, HostReport};
use super::targets::Targets;

/// Whose an export is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(tag = "kind", content = "name", rename_all = "snake_case")]
pub enum Place {
    /// Everybody's.
    Root,
    /// The guest's of this name.
    Guest(String),
    /// The host's of this name.
    Host(String),
}

impl Place {
    /// The folders below the mount point.
    pub(super) fn folders(&self) -> Vec<&str> {
        match self {
            Self::Root => Vec::new(),
            Self::Guest(name) => vec!["guests", name],
            Self::Host(name) => vec!["hosts", name],
        }
    }

    /// The name of the socket of its guest's control port.
    pub fn socket(&self) -> String {
        match self {
            Self::Root => "ctl.sock".to_owned(),
            Self::Guest(name) | Self::Host(name) => format!("ctl-{name}.sock"),
        }
    }

    /// The name of the monitor socket (QMP) at which its guest's QEMU is told of poison.
    pub fn monitor(&self) -> String {
        match self {
            Self::Root => "qmp.sock".to_owned(),
            Self::Guest(name) | Self::Host(name) => format!("qmp-{name}.sock"),
        }
    }

    /// The name of the file that says that a host's access is revoked.
    pub fn revoked_mark(&self) -> Option<String> {
        match self {
            Self::Host(name) => Some(format!("revoked-{name}")),
            Self::Root | Self::Guest(_) => None,
        }
    }

    /// The name of its guest or host; empty for the root.
    pub fn name(&self) -> &str {
        match self {
            Self::Root => "",
            Self::Guest(name) | Self::Host(name) => name,
        }
    }
}

/// An export to be mounted.
#[derive(Clone)]
pub struct ExportOptions {
    /// Whose it is.
    pub place: Place,
    /// What it shows.
    pub partition: Partition,
    /// Bytes that a host's cache holds; only for a host.
    pub cache_bytes: Option<u64>,
    /// A file that is there while the host's access is revoked, for the next process to find.
    pub revoked_mark: Option<PathBuf>,
}

/// An export that is mounted.
pub struct Export {
    place: Place,
    partition: Partition,
    cache: Option<Arc<HostCache>>,
    coherence: Coherence,
    folder: PathBuf,
}

/// An export, for somebody who wants to map it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExportReport {
    /// Whose it is.
    #[serde(flatten)]
    pub place: Place,
    /// Its base window.
    pub base: FileReport,
    /// Its views window.
    pub views: FileReport,
    /// The targets of its base window, if it is an interleave set.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<FileReport>,
}

/// A window's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileReport {
    /// Its path.
    #[serde(serialize_with = "lossy")]
    pub path: PathBuf,
    /// Its bytes.
    pub bytes: u64,
}

fn lossy<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&path.to_string_lossy())
}

impl Export {
    /// The export below the mount point `mount`. Write-backs may wait for room for `max_wait`.
    pub(crate) fn new(options: &ExportOptions, mount: &Path, max_wait: Duration) -> Self {
        let partition = options.partition.clone();
        let cache = options.cache_bytes.map(|bytes| {
            let cache = HostCache::new(partition.clone(), bytes);
            Arc::new(cache.marked_by(options.revoked_mark.clone()))
        });
        let folder = options.place.folders().into_iter().fold(mount.to_owned(), |path, name| path.join(name));
        let coherence = Coherence::new(partition.clone(), cache.clone(), max_wait);
        Self { place: options.place.clone(), partition, cache, coherence, folder }
    }

    /// Whose it is.
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// What it shows.
    pub fn partition(&self) -> &Partition {
        &self.partition
    }

    /// What keeps its windows coherent.
    pub fn coherence(&self) -> &Coherence {
        &self.coherence
    }

    pub(super) fn cache(&self) -> Option<&Arc<HostCache>> {
        self.cache.as_ref()
    }

    /// The targets of its base window, if it is an interleave set.
    pub(super) fn targets(&self) -> Option<&Targets> {
        self.coherence.targets()
    }

    /// What there are files of, `base` and `views` first.
    pub(super) fn files(&self) -> impl Iterator<Item = ExportFile> {
        let targets = self.targets().map_or(0..0, Targets::numbers);
        [ExportFile::Base, ExportFile::Views].into_iter().chain(targets.map(ExportFile::Target))
    }

    /// Bytes of a file.
    pub(super) fn bytes_of(&self, which: ExportFile) -> u64 {
        match which {
            ExportFile::Base => self.partition.base_bytes(),
            ExportFile::Views => self.partition.views_bytes(),
            ExportFile::Target(target) => self.targets().map_or(0, |targets| targets.bytes(target)),
        }
    }

    /// The files of its targets, in order.
    pub fn target_paths(&self) -> impl Iterator<Item = PathBuf> {
        let numbers = self.targets().map_or(0..0, Targets::numbers);
        numbers.map(|target| self.folder.join(format!("target{target}")))
    }

    /// The base window's file.
    pub fn base_path(&self) -> PathBuf {
        self.folder.join("base")
    }

    /// The views window's file.
    pub fn views_path(&self) -> PathBuf {
        self.folder.join("views")
    }

    /// Where it is.
    pub fn report(&self) -> ExportReport {
        ExportReport {
            place: self.place.clone(),
            base: FileReport { path: self.base_path(), bytes: self.partition.base_bytes() },
            views: FileReport { path: self.views_path(), bytes: self.partition.views_bytes() },
            targets: self
                .target_paths()
                .zip(0..)
                .map(|(path, target)| FileReport { path, bytes: self.bytes_of(ExportFile::Target(target)) })
                .collect(),
        }
    }

    /// What its host's cache tells, if it is a host's.
    pub fn host_report(&self) -> Option<HostReport> {
        Some(self.cache.as_ref()?.report(self.place.name()))
    }
}
