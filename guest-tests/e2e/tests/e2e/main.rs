//! What holds of the whole: guests booted on real devices, the documents' commands, who uses whom.
//!
//! These need what `./x` sets up: the programs of the host and of the guest, the guest's image, a
//! QEMU, FUSE. They are one binary, for each links all of them. They begin in the order of their
//! names: what takes longest, which is what the README says, begins among the first.

mod booted;
mod decoder;
mod documents;
mod guests;
mod handoff;
mod installs;
mod interrupted;
mod ram;
mod ram_tools;
mod rooms;
mod soak;
mod traced;
mod vhost;
mod ways;

use std::path::{Path, PathBuf};

/// The project's folder.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}
