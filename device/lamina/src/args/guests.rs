//! A device and several guests on it: what a topology with more than one `[[guest]]` says.

use lamina_serve::Place;

use super::{Boot, Serve};

/// A device and its guests.
#[derive(Debug)]
pub(crate) struct Guests {
    /// The device.
    pub(crate) serve: Serve,
    /// Its guests.
    pub(crate) members: Vec<Member>,
    /// Whether only to say what would be started.
    pub(crate) print_command: bool,
}

/// A guest among several.
#[derive(Debug)]
pub(crate) struct Member {
    /// What it is called.
    pub(crate) name: String,
    /// What of the device it has.
    pub(crate) export: GuestExport,
    /// How it is booted.
    pub(crate) boot: Boot,
}

/// What of a device a guest has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GuestExport {
    /// What is everybody's.
    Shared,
    /// A partition of its own, or what is everybody's behind a cache of its own.
    Named,
}

/// The name of the folder with the sockets of a guest's disks.
pub(crate) fn folder_of(name: &str) -> String {
    format!("disks-{name}")
}

/// The name of the monitor socket of a guest's QEMU.
pub(crate) fn monitor_of(name: &str) -> String {
    Place::Guest(name.to_owned()).monitor()
}
