//! The device served as disks, without a mount, in a process of its own that can be killed and
//! started again.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;

use crate::{
    daemon::{Process, ask},
    programs,
};

/// A device that is served as disks. Dropping it stops it.
pub struct Disks {
    process: Process,
    options: Vec<String>,
    /// What it said when it was ready.
    pub ready: Ready,
    folder: tempfile::TempDir,
}

/// The ready line of `lamina serve --json --vhost-user`.
#[derive(Clone, Debug, Deserialize)]
pub struct Ready {
    /// The API's socket.
    pub api: PathBuf,
    /// The socket of the guest's control port.
    pub ctl: PathBuf,
    /// The disks: `base` first, then `views`.
    pub disks: Vec<Disk>,
}

/// A disk.
#[derive(Clone, Debug, Deserialize)]
pub struct Disk {
    /// Its serial number.
    pub serial: String,
    /// Its socket.
    pub socket: PathBuf,
    /// Its bytes.
    pub bytes: u64,
    /// The partitions of the views disk.
    #[serde(default)]
    pub partitions: Vec<Partition>,
}

/// A partition of the views disk.
#[derive(Clone, Debug, Deserialize)]
pub struct Partition {
    /// Its number.
    pub number: u32,
    /// Its name in the table.
    pub name: String,
    /// The tensor; empty for the directory.
    pub tensor: String,
    /// The view; empty for the directory.
    pub view: String,
    /// Where it begins on the disk.
    pub offset: u64,
    /// Bytes of the view.
    pub length: u64,
}

impl Disks {
    /// Starts a device with more `options` of `lamina serve`, and waits until it is ready.
    ///
    /// # Errors
    /// When it does not start; it has said why on stderr.
    pub fn start(options: &[&str]) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("lamina-disks-").tempdir()?;
        let options: Vec<String> = options.iter().map(|&option| option.to_owned()).collect();
        let (process, ready) = serve(folder.path(), &options)?;
        Ok(Self { process, options, ready, folder })
    }

    /// Kills the device at once and starts it again, on the same sockets.
    ///
    /// # Errors
    /// As [`Disks::start`].
    pub fn kill_and_start_again(&mut self) -> Result<()> {
        self.process.kill()?;
        (self.process, self.ready) = serve(self.folder.path(), &self.options)?;
        Ok(())
    }

    /// The process that holds the device; the one that does the work is its child.
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The sockets, in the order of the guest's disks.
    pub fn sockets(&self) -> Vec<PathBuf> {
        self.ready.disks.iter().map(|disk| disk.socket.clone()).collect()
    }

    /// The partition that shows a view.
    ///
    /// # Errors
    /// When there is none.
    pub fn partition(&self, tensor: &str, view: &str) -> Result<&Partition> {
        let mut all = self.ready.disks.iter().flat_map(|disk| &disk.partitions);
        let found = all.find(|partition| partition.tensor == tensor && partition.view == view);
        found.with_context(|| format!("no partition shows {view} of {tensor}"))
    }

    /// The counters, now.
    ///
    /// # Errors
    /// When the device does not answer.
    pub fn stats(&self) -> Result<Value> {
        serde_json::from_slice(&ask(&self.ready.api, &["stats", "--json"])?).context("no counters")
    }

    /// Tensors, by `lamina tensors`.
    ///
    /// # Errors
    /// When the device does not answer.
    pub fn tensors(&self) -> Result<Value> {
        serde_json::from_slice(&ask(&self.ready.api, &["tensors", "--json"])?).context("no tensors")
    }

    /// Stops the device.
    ///
    /// # Errors
    /// When it had ended already, or ends with an error.
    pub fn stop(self) -> Result<()> {
        self.process.stop()
    }
}

fn serve(folder: &Path, options: &[String]) -> Result<(Process, Ready)> {
    let mut command = Command::new(programs::lamina()?);
    command.args(["serve", "--json"]).arg("--vhost-user").arg(folder.join("disks"));
    command.arg("--run-dir").arg(folder.join("run")).args(options);
    Process::start(command)
}
