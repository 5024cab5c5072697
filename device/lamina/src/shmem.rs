//! The device with shared memory: served beside a holder, and the driver that its guests need.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use lamina_qemu::{GuestFile, Source};
use lamina_serve::ShmemServer;
use lamina_serve::shmem::WindowFile;

use crate::life::{Ready, WindowFile as Window};

/// Where the driver goes in the guest; `lamina-shim up` looks for it there.
const DRIVER: &str = "/lib/modules/lamina.ko";

/// Serves the windows of a device that is ready on `socket`.
///
/// # Errors
/// As [`serve`].
pub(crate) fn serve_ready(socket: &Path, ready: &Ready) -> Result<ShmemServer> {
    serve(socket, ready.base.as_ref(), ready.views.as_ref(), ready.ctl.as_deref())
}

/// Serves these windows on `socket`, of a device whose guest port listens at `ctl`.
///
/// # Errors
/// When one of them is missing, or the server cannot be.
pub(crate) fn serve(
    socket: &Path,
    base: Option<&Window>,
    views: Option<&Window>,
    ctl: Option<&Path>,
) -> Result<ShmemServer> {
    let file = |window: Option<&Window>| {
        let window = window?;
        Some(WindowFile { path: window.path.clone()?, bytes: window.bytes })
    };
    let windows = file(base).zip(file(views)).zip(ctl);
    let ((base, views), ctl) = windows.context(
        "shared memory needs both windows' files and the socket for guests (--ctl), of a device that is mounted and not divided",
    )?;
    Ok(ShmemServer::serve(socket, base, views, ctl)?)
}

/// The driver, for the guest image's kernel.
///
/// # Errors
/// When it cannot be built.
pub(crate) fn driver() -> Result<GuestFile> {
    let module: PathBuf = lamina_qemu::image::driver()?;
    Ok(GuestFile { path: DRIVER.into(), source: Source::Host(module), mode: 0o644 })
}
