//! The device's folder as a file system of the guest (virtiofs), for programs that read files: the
//! two windows, and the models.
//!
//! ```text
//! pcie.0 ─ vhost-user-fs-pci: mount -t virtiofs lamina DIR ─ socket ─ virtiofsd ─ the mount
//! ```
//!
//! * The server reads and writes the guest's RAM itself, so that RAM is shared memory (a memfd).
//! * QEMU does not connect again to a server that went away, and the server ends with QEMU.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::attach::Part;
use super::{TopologyError, check_socket, escape};
use crate::find::in_root;
use crate::recipe::{self, RecipeError};
use crate::version::Version;

/// The first QEMU that this is tested with.
pub const OLDEST_QEMU: Version = Version { major: 7, minor: 2, patch: 0 };
/// What the guest mounts.
pub const TAG: &str = "lamina";
/// Entries of a queue.
const QUEUE_SIZE: u32 = 1024;
/// Where Debian has the server.
const SERVER: &str = "usr/libexec/virtiofsd";

/// The socket that serves the folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Virtiofs {
    /// The socket.
    pub socket: PathBuf,
}

impl Part for Virtiofs {
    fn check(&self) -> Result<(), TopologyError> {
        check_socket("shared folder", &self.socket)
    }

    fn mapped_bytes(&self) -> u64 {
        0
    }

    fn maps_mount(&self) -> bool {
        false
    }

    fn oldest_qemu(&self) -> Version {
        OLDEST_QEMU
    }

    fn ram(&self) -> &'static str {
        "memory-backend-memfd,share=on"
    }

    fn devices(&self, _: Version, option: &mut dyn FnMut(&str, String)) {
        option("-chardev", format!("socket,id=fs,path={}", escape(&self.socket)));
        option(
            "-device",
            format!("vhost-user-fs-pci,id=lamina,bus=pcie.0,chardev=fs,tag={TAG},queue-size={QUEUE_SIZE}"),
        );
    }
}

/// The command that serves `folder` on `socket`: the host's virtiofsd, or one that the recipe
/// `images/virtiofsd` unpacks now if need be. It ends when QEMU does.
///
/// # Errors
/// When the recipe fails.
pub fn server(folder: &Path, socket: &Path) -> Result<Command, RecipeError> {
    let host = Path::new("/").join(SERVER);
    let mut command = if host.is_file() {
        Command::new(host)
    } else {
        let root = recipe::run("virtiofsd")?;
        let (loader, arguments) = in_root(&root, &root.join(SERVER), None);
        let mut command = Command::new(loader);
        command.args(arguments);
        command
    };
    command.arg("--shared-dir").arg(folder).arg("--socket-path").arg(socket);
    // It has this user's rights and no more, so there is nothing to take from it. Extended
    // attributes say what the files are.
    command.args(["--sandbox", "none", "--cache", "auto", "--xattr", "--log-level", "warn"]);
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_finds_it_by_its_tag() {
        let fs = Virtiofs { socket: "/run/a,b.sock".into() };
        let mut options = Vec::new();
        fs.devices(OLDEST_QEMU, &mut |name, value| options.push(format!("{name} {value}")));
        assert_eq!(options[0], "-chardev socket,id=fs,path=/run/a,,b.sock");
        assert!(options[1].starts_with("-device vhost-user-fs-pci,") && options[1].contains("tag=lamina,"));
        assert!(fs.check().unwrap_err().to_string().contains("shared folder"));
    }
}
