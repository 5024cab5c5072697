//! What can be written into a topology.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;
use toml::Spanned;

pub(super) type Field<T> = Option<Spanned<T>>;

/// A file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct File {
    #[serde(default)]
    pub(super) device: Device,
    #[serde(default)]
    pub(super) guest: Vec<Spanned<Guest>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Device {
    pub(super) mount: Field<PathBuf>,
    pub(super) capacity: Field<Number>,
    pub(super) views_capacity: Field<Number>,
    pub(super) mode: Field<String>,
    pub(super) codec: Field<String>,
    pub(super) model: Field<Vec<PathBuf>>,
    pub(super) views: Field<Vec<String>>,
    pub(super) kv: Field<Vec<String>>,
    pub(super) open_windows: Field<Number>,
    pub(super) image: Field<PathBuf>,
    pub(super) replace: Field<bool>,
    pub(super) observe: Field<bool>,
    pub(super) model_dram: Field<String>,
    pub(super) model_base: Field<Vec<String>>,
    pub(super) sync_seconds: Field<Number>,
    pub(super) store_capacity: Field<Number>,
    pub(super) full_wait: Field<Number>,
    pub(super) files: Field<Number>,
    pub(super) write_cache: Field<bool>,
    pub(super) cache_bytes: Field<Number>,
    pub(super) memory_reserve: Field<Number>,
    pub(super) format: Field<Vec<String>>,
    pub(super) qmp: Field<Paths>,
    pub(super) run_dir: Field<PathBuf>,
    pub(super) tcp: Field<String>,
    pub(super) read_ahead_kb: Field<Number>,
    pub(super) threads: Field<Number>,
    pub(super) devices: Field<Number>,
    pub(super) interleave: Field<String>,
    #[serde(rename = "device-bandwidth")]
    pub(super) bandwidth: Field<Bandwidth>,
    pub(super) shared: Field<Number>,
    pub(super) host_cache: Field<Number>,
    /// Of a device that is served, as the next two; a guest that is booted has `attach`.
    pub(super) vhost_user: Field<Vec<String>>,
    pub(super) ivshmem: Field<PathBuf>,
    pub(super) vhost_user_shmem: Field<PathBuf>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Guest {
    pub(super) name: Field<String>,
    /// Of a partition of its own, as the next three.
    pub(super) capacity: Field<Number>,
    pub(super) views_capacity: Field<Number>,
    pub(super) quota: Field<Number>,
    pub(super) model: Field<Vec<PathBuf>>,
    /// Whether it has a cache of its own, which nobody keeps coherent.
    pub(super) host: Field<bool>,
    #[serde(rename = "guest")]
    pub(super) export: Field<String>,
    pub(super) shmem: Field<PathBuf>,
    pub(super) attach: Field<String>,
    pub(super) base: Field<PathBuf>,
    pub(super) views_file: Field<PathBuf>,
    pub(super) ctl: Field<PathBuf>,
    pub(super) mailbox: Field<PathBuf>,
    pub(super) disk: Field<Vec<PathBuf>>,
    pub(super) script: Field<PathBuf>,
    /// The host's file by the guest's path.
    pub(super) put: Field<BTreeMap<String, PathBuf>>,
    pub(super) extras: Field<bool>,
    pub(super) python: Field<bool>,
    pub(super) memory: Field<Number>,
    pub(super) cpus: Field<Number>,
    pub(super) accel: Field<String>,
    pub(super) huge_pages: Field<bool>,
    pub(super) qemu: Field<Vec<String>>,
}

/// A number or a size, with a unit or without.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Number {
    Plain(i64),
    Text(String),
}

/// A path, or several.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a path or a list of paths")]
pub(super) enum Paths {
    One(PathBuf),
    Several(Vec<PathBuf>),
}

/// GB/s, whole or not.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Bandwidth {
    Whole(i64),
    Fraction(f64),
}

impl Device {
    /// A key that says how a device which is served is attached to, and its place.
    pub(super) fn only_of_serve(&self) -> Option<(&'static str, usize)> {
        let disks = self.vhost_user.as_ref().map(|field| ("vhost-user", field.span().start));
        let ivshmem = self.ivshmem.as_ref().map(|field| ("ivshmem", field.span().start));
        let shmem = self.vhost_user_shmem.as_ref().map(|field| ("vhost-user-shmem", field.span().start));
        disks.or(ivshmem).or(shmem)
    }
}

impl Number {
    /// As it is written on a command line.
    pub(super) fn text(self) -> String {
        match self {
            Self::Plain(number) => number.to_string(),
            Self::Text(text) => text,
        }
    }
}
