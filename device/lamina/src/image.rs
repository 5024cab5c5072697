//! Images of earlier versions.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use lamina_device::device::{Device, DeviceConfig};
use lamina_store::entry::Version;
use lamina_store::image::Image;

use crate::args;
use crate::out::print_line;

pub(crate) fn image(command: &args::Image) -> Result<()> {
    let args::Image::Upgrade { image } = command;
    upgrade(image)
}

fn upgrade(path: &Path) -> Result<()> {
    // The file itself gets a new one in its place, whatever names it.
    let path = path.canonicalize().with_context(|| format!("cannot use the image {}", path.display()))?;
    let image = Image::open(&path)?.ok_or_else(|| anyhow!("{} is empty", path.display()))?;
    let (old, new) = (image.superblock().version, Version::default());
    if old == new {
        print_line!("{}: of version {} already", path.display(), new as u8)?;
        return Ok(());
    }
    // What a killed process left is finished, and what it staged is coded.
    let device = Device::open(image.clone(), &DeviceConfig::new(0, 0))?;
    device.flush(0, device.base_bytes())?;
    device.sync_last()?;
    drop(device);
    lamina_store::upgrade::upgrade(&image, &path)?;
    print_line!("{}: of version {} now, before of {}", path.display(), new as u8, old as u8)?;
    Ok(())
}
