//! The main job, and what boots guests and checks them for the tests and the benchmarks too.
//!
//! A job starts the device as a user would ([`daemon`]), boots a guest on it that reads every
//! tensor in every view ([`visit`]), holds each hash against the reference computed from the model
//! file ([`judge`]), and tells what came of it ([`report`]). It may run a language model on the
//! device instead, or as well ([`decode`]), or use the device as memory ([`ram`]). Nothing here
//! looks into the device but through its API.

pub mod daemon;
pub mod decode;
pub mod disks;
mod figures;
mod files;
pub mod handoff;
pub mod interrupt;
pub mod job;
pub mod judge;
mod on_host;
pub mod programs;
mod progress;
pub mod ram;
pub mod report;
mod subject;
pub mod visit;

use std::{
    io::{IsTerminal, stderr},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use tracing_subscriber::EnvFilter;

/// Has this process log to stderr: what `LAMINA_LOG` asks for, or warnings.
///
/// # Panics
/// When it logs already.
pub fn log_to_stderr() {
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_from_env("LAMINA_LOG").unwrap_or_else(|_| "warn".into()))
        .with_writer(stderr)
        .with_ansi(stderr().is_terminal())
        .init();
}

/// The model and the KV cache that come with the project.
///
/// # Errors
/// When they are not where `LAMINA_ROOT` says the project is.
pub fn bundled() -> Result<Vec<PathBuf>> {
    ["stories260K-bf16.safetensors", "stories260K-kv-bf16.safetensors"]
        .into_iter()
        .map(bundled_file)
        .collect()
}

/// A file that comes with the project.
///
/// # Errors
/// When it is not where `LAMINA_ROOT` says the project is.
pub fn bundled_file(name: &str) -> Result<PathBuf> {
    let root = std::env::var_os("LAMINA_ROOT").context(
        "a file was not given, and LAMINA_ROOT does not say where the bundled ones are: start this through ./x",
    )?;
    let path = Path::new(&root).join("guest-tests/models").join(name);
    if !path.is_file() {
        bail!("the bundled file {} is missing", path.display());
    }
    Ok(path)
}
