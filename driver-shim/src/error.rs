//! Everything that can go wrong, each error saying what it was about and what to do.
//!
//! A message is whole by itself: it contains its cause's words, because C programs and reports see
//! nothing but the message. So causes are fields, not `source()`s that a printer of chains would
//! say twice.

use std::path::PathBuf;

use crate::{ctl::CtlError, dax::DaxError, region::RegionError, window::WindowError};

/// An error of the shim.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A window could not be mapped, or a range passes it.
    #[error(transparent)]
    Window(#[from] WindowError),
    /// A region could not be made.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A dax device could not be had.
    #[error(transparent)]
    Dax(#[from] DaxError),
    /// The control port did not answer, or answered with an error.
    #[error(transparent)]
    Ctl(#[from] CtlError),
    /// The memdevs are not Lamina's two.
    #[error(
        "the CXL memory devices are not Lamina's two (found: {}): {why}; see `ls /sys/bus/cxl/devices`, load cxl_pci \
         and cxl_mem, or name them with --memdev",
        if found.is_empty() { "none" } else { found }
    )]
    Memdevs {
        /// What was found.
        found: String,
        /// What is missing or too many.
        why: String,
    },
    /// A virtio device is there, and its driver is not.
    #[error(
        "the virtio device {device} has no driver, no /dev/lamina0 came within {seconds:.1} s: load the module `lamina` \
         (/lib/modules/lamina.ko, or `modprobe lamina`); `dmesg` has what it says"
    )]
    NoDriver {
        /// The device.
        device: String,
        /// How long was waited.
        seconds: f64,
    },
    /// No path was given, and sysfs shows no devdax device with a directory.
    #[error(
        "no Lamina window found: {why}. Run `lamina-shim up` first, or give --base and --views (LAMINA_BASE, \
         LAMINA_VIEWS)"
    )]
    NotFound {
        /// What was looked at.
        why: String,
    },
    /// The views window does not begin with a sound directory.
    #[error(
        "{path} is no views window: {cause}; is the device running, and are base and views the right way round?"
    )]
    Directory {
        /// The window.
        path: PathBuf,
        /// What is wrong with the bytes.
        cause: lamina_abi::DirectoryError,
    },
    /// The directory describes a larger window than the one mapped.
    #[error(
        "{path} has {bytes} bytes, but the directory says the window has {stated}: it belongs to another device"
    )]
    ShortWindow {
        /// The window.
        path: PathBuf,
        /// Its length.
        bytes: u64,
        /// What the directory says.
        stated: u64,
    },
    /// There is no base window to map.
    #[error(
        "no base window is mapped: it is system RAM, or only --views was given; give --base, or read the tensor \
         through a view such as `full`"
    )]
    NoBase,
    /// No such tensor.
    #[error(
        "no tensor named {name:?}; {}",
        if *is_incomplete {
            format!("the directory has room for {count} of those there are, and no control port tells of the others")
        } else {
            format!("`lamina-shim list` shows the {count} there are")
        }
    )]
    NoTensor {
        /// The name.
        name: String,
        /// Tensors in the directory.
        count: usize,
        /// Whether there are others.
        is_incomplete: bool,
    },
    /// No such view.
    #[error("tensor {tensor:?} has no view {spelling:?}; it has: {known}. `lamina-shim view` makes one")]
    NoView {
        /// The tensor.
        tensor: String,
        /// The view.
        spelling: String,
        /// The views it has.
        known: String,
    },
    /// An entry of the directory that contradicts the window or itself.
    #[error(
        "the directory lies about {what}: {field} is {value}, the bound is {bound}; do not trust this device"
    )]
    Lie {
        /// Which entry.
        what: String,
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u128,
        /// What it may at most (or, for offsets of views, at least) be.
        bound: u64,
    },
}
