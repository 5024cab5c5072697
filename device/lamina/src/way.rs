//! How a guest comes to a device that is served: from its files or sockets to what QEMU is given,
//! and the servers that live as long as the guest does.

use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use lamina_abi::Interleave;
use lamina_qemu::topology::virtiofs;
use lamina_qemu::{Attach, AttachKind, Cxl, Ivshmem, Shmem, Targets, VhostUser, Virtiofs};
use lamina_serve::{IvshmemServer, ShmemServer};
use tempfile::TempDir;

use crate::life::WindowFile;
use crate::shmem;

/// How long virtiofsd may take to listen.
const TO_LISTEN: Duration = Duration::from_secs(10);
/// Most queues that a disk gets.
const MAX_QUEUES: u32 = 8;

/// A guest's way to the device.
pub(crate) struct Way {
    /// What QEMU is given.
    pub(crate) attach: Attach,
    /// The socket of the guest's control port, where it has one.
    pub(crate) ctl: Option<PathBuf>,
    _mailbox: Option<IvshmemServer>,
    _region: Option<ShmemServer>,
    _folder_server: Option<FolderServer>,
    /// Holds these servers' sockets.
    _folder: Option<TempDir>,
}

/// The files of a device, and its socket for guests.
pub(crate) struct Files {
    pub(crate) base: PathBuf,
    pub(crate) views: PathBuf,
    pub(crate) ctl: Option<PathBuf>,
    /// What the base window is an interleave set of, for guests that see CXL memory; the targets
    /// lie beside the base.
    pub(crate) set: Option<Interleave>,
}

impl Way {
    fn plain(attach: Attach, ctl: Option<PathBuf>) -> Self {
        Self { attach, ctl, _mailbox: None, _region: None, _folder_server: None, _folder: None }
    }

    /// Disks that listen on these sockets, for a guest with so many processors.
    pub(crate) fn disks(disks: Vec<PathBuf>, ctl: Option<PathBuf>, cpus: u32) -> Self {
        // One queue for each processor, as far as that helps.
        let queues = u16::try_from(cpus.clamp(1, MAX_QUEUES)).expect("at most 8");
        Self::plain(Attach::VhostUser(VhostUser { disks, queues }), ctl)
    }

    /// A device with shared memory that somebody serves on `socket`.
    pub(crate) fn region(socket: PathBuf) -> Self {
        Self::plain(Attach::Shmem(Shmem { socket }), None)
    }

    /// A device's files, with its mailboxes on a socket that somebody serves, or that is served
    /// here if they are needed.
    ///
    /// # Errors
    /// When a file cannot be used, or a server cannot be.
    pub(crate) fn files(kind: AttachKind, files: Files, mailbox: Option<PathBuf>) -> Result<Self> {
        let Files { base, views, ctl, set } = files;
        let (base_bytes, views_bytes) = (bytes(&base)?, bytes(&views)?);
        let folder = || tempfile::Builder::new().prefix("lamina-boot-").tempdir();
        match kind {
            AttachKind::Cxl => {
                let targets = set.map(|set| {
                    let target = |target| base.with_file_name(format!("target{target}"));
                    Targets { set, files: (0..set.ways()).map(target).collect() }
                });
                Ok(Self::plain(Attach::Cxl(Cxl { base, base_bytes, views, views_bytes, targets }), ctl))
            }
            AttachKind::Ivshmem => {
                let attach =
                    |mailbox| Attach::Ivshmem(Ivshmem { base, base_bytes, views, views_bytes, mailbox });
                let (None, Some(ctl)) = (&mailbox, ctl) else {
                    return Ok(Self::plain(attach(mailbox), None));
                };
                let folder = folder()?;
                let server = IvshmemServer::serve(&folder.path().join("mailbox.sock"), &ctl)?;
                let plain = Self::plain(attach(Some(server.path().to_owned())), None);
                Ok(Self { _mailbox: Some(server), _folder: Some(folder), ..plain })
            }
            AttachKind::Shmem => {
                let folder = folder()?;
                let socket = folder.path().join("shmem.sock");
                let window = |path: PathBuf, bytes| WindowFile { path: Some(path), bytes };
                let (base, views) = (window(base, base_bytes), window(views, views_bytes));
                let server = shmem::serve(&socket, Some(&base), Some(&views), ctl.as_deref())?;
                let plain = Self::region(socket);
                Ok(Self { _region: Some(server), _folder: Some(folder), ..plain })
            }
            AttachKind::Virtiofs => {
                let shared = base.parent().context("the window lies in no folder")?;
                let folder = folder()?;
                let socket = folder.path().join("virtiofs.sock");
                let server = FolderServer::start(shared, &socket)?;
                let plain = Self::plain(Attach::Virtiofs(Virtiofs { socket }), ctl);
                Ok(Self { _folder_server: Some(server), _folder: Some(folder), ..plain })
            }
            AttachKind::VhostUser => bail!("disks are attached by their sockets, not by the windows' files"),
        }
    }
}

fn bytes(window: &Path) -> Result<u64> {
    let metadata =
        window.metadata().with_context(|| format!("cannot use the window {}", window.display()))?;
    Ok(metadata.len())
}

/// A virtiofsd, until it is dropped.
struct FolderServer(Child);

impl FolderServer {
    /// Serves `folder` on `socket`.
    fn start(folder: &Path, socket: &Path) -> Result<Self> {
        let mut command = virtiofs::server(folder, socket)?;
        let started = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let mut server = Self(started.context("cannot start virtiofsd")?);
        let begun = Instant::now();
        while !socket.exists() {
            if let Some(status) = server.0.try_wait()? {
                bail!("virtiofsd cannot serve {} ({status}); its messages are above", folder.display());
            }
            if begun.elapsed() > TO_LISTEN {
                bail!("virtiofsd does not listen at {}", socket.display());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(server)
    }
}

impl Drop for FolderServer {
    fn drop(&mut self) {
        // It may have ended with QEMU.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
