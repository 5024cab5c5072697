//! The windows and the mailbox as shared memory of PCI devices (ivshmem), found through sysfs.
//!
//! Rules:
//!
//! * A window is BAR 2 of a device 1af4:1110, the file `resource2` in its folder. Its identity says
//!   no more, so the memory does: the views window begins with a directory, the mailbox with its
//!   magic. The base is the device in the nearest slot before the views that is as large as the
//!   directory says.
//! * Devices are looked at from the last to the first, and the mailbox known by its size is looked
//!   at first, so that the base is not read for this.
//! * A device whose memory the firmware left switched off is switched on; none is ever switched
//!   off.

use std::path::PathBuf;

use lamina_abi::mailbox::{MAILBOX_BYTES, MAILBOX_MAGIC};

use crate::{Access, Error, Window, directory, sysfs::Tree};

const DEVICES: &str = "bus/pci/devices";
const VENDOR: u64 = 0x1af4;
const DEVICE: u64 = 0x1110;

/// A window in a PCI device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bar {
    /// The device's address, for example `0000:00:10.0`.
    pub address: String,
    /// The file to map.
    pub node: PathBuf,
    /// Bytes of it.
    pub bytes: u64,
}

/// Both windows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bars {
    /// The capacity window, if there is a device that could be it.
    pub base: Option<Bar>,
    /// The aperture with the directory.
    pub views: Bar,
}

/// All ivshmem devices, in the order of their slots.
fn bars(tree: &Tree) -> Vec<Bar> {
    let mut addresses = tree.list(DEVICES);
    addresses.sort();
    let is = |address: &String| {
        let number = |name: &str| tree.number(format!("{DEVICES}/{address}/{name}")).ok();
        number("vendor") == Some(VENDOR) && number("device") == Some(DEVICE)
    };
    let bar = |address: String| {
        let enable = format!("{DEVICES}/{address}/enable");
        if tree.number(&enable).is_ok_and(|count| count == 0)
            && let Err(error) = tree.write(&enable, "1")
        {
            tracing::warn!(%error, "a shared memory stays switched off");
        }
        let node = tree.sys(format!("{DEVICES}/{address}/resource2"));
        let bytes = std::fs::metadata(&node).ok()?.len();
        Some(Bar { address, node, bytes })
    };
    addresses.into_iter().filter(is).filter_map(bar).collect()
}

/// The windows; `None` if there are no such devices.
///
/// # Errors
/// When there are devices and none begins with a directory, or it cannot be mapped.
pub fn windows(tree: &Tree) -> Result<Option<Bars>, Error> {
    let bars = bars(tree);
    let mut why = None;
    for (index, views) in bars.iter().enumerate().rev().filter(|(_, bar)| bar.bytes > MAILBOX_BYTES) {
        let window = Window::open(&views.node, Access::Read, tree)?;
        let directory = match directory::read(&window) {
            Ok(directory) if directory.views_bytes <= views.bytes => directory,
            Ok(directory) => {
                why = Some(Error::ShortWindow {
                    path: views.node.clone(),
                    bytes: views.bytes,
                    stated: directory.views_bytes,
                });
                continue;
            }
            Err(error) => {
                why = Some(error);
                continue;
            }
        };
        let base = bars[..index].iter().rev().find(|bar| bar.bytes == directory.base_bytes);
        return Ok(Some(Bars { base: base.cloned(), views: views.clone() }));
    }
    why.map_or(Ok(None), Err)
}

/// The folder of the device with the mailbox.
pub fn mailbox(tree: &Tree) -> Option<PathBuf> {
    let begins = |bar: &Bar| {
        let mut magic = [0; MAILBOX_MAGIC.len()];
        let window = Window::open(&bar.node, Access::Read, tree).ok()?;
        window.span(0, magic.len() as u64).ok()?.load(0, &mut magic).ok()?;
        (magic == MAILBOX_MAGIC).then(|| tree.sys(format!("{DEVICES}/{}", bar.address)))
    };
    bars(tree).iter().rev().filter(|bar| bar.bytes == MAILBOX_BYTES).find_map(begins)
}
