//! Images of earlier versions.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use lamina_device::device::{Device, DeviceConfig};
use lamina_store::entry::Version;
use lamina_store::image::Image;
use serde_json::json;

use crate::args;
use crate::out::{print_json, print_line};

pub(crate) fn image(command: &args::Image) -> Result<()> {
    let args::Image::Upgrade { image, json } = command;
    let (path, before, now) = upgrade(image)?;
    if *json {
        return print_json(&json!({ "image": path, "before": before as u8, "version": now as u8 }));
    }
    match (before as u8, now as u8) {
        (before, now) if before == now => print_line!("{}: of version {now} already", path.display())?,
        (before, now) => print_line!("{}: of version {now} now, before of {before}", path.display())?,
    }
    Ok(())
}

/// Upgrades an image: which file it is, of which version it was, and is.
fn upgrade(path: &Path) -> Result<(PathBuf, Version, Version)> {
    // The file itself gets a new one in its place, whatever names it.
    let path = path.canonicalize().with_context(|| format!("cannot use the image {}", path.display()))?;
    let image = Image::open(&path)?.ok_or_else(|| anyhow!("{} is empty", path.display()))?;
    let (old, new) = (image.superblock().version, Version::default());
    if old == new {
        return Ok((path, old, new));
    }
    // What a killed process left is finished, and what it staged is coded.
    let device = Device::open(image.clone(), &DeviceConfig::new(0, 0))?;
    device.flush(0, device.base_bytes())?;
    device.sync_last()?;
    drop(device);
    lamina_store::upgrade::upgrade(&image, &path)?;
    Ok((path, old, new))
}
