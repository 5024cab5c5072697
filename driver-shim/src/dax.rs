//! The dax device of a region, and which driver it has.
//!
//! Rules:
//!
//! * A region of CXL RAM shows up, a little after its driver was bound, as `daxN.M`. Linux would
//!   rather give it to `kmem` (system RAM) than to `device_dax` (a node to map); naming it in a
//!   driver's `new_id` settles which.
//! * System RAM is not taken back: pages in use cannot be given up, and the kernel would pin the
//!   region until reboot.
//! * From `device_dax` to `kmem` works at any time, and ends the mappings of whoever has one.

use std::{path::PathBuf, time::Duration};

use crate::sysfs::{SysfsError, Tree, wait};

const DEVICES: &str = "bus/dax/devices";
const DRIVERS: &str = "bus/dax/drivers";
const MEMORY: &str = "devices/system/memory";

/// How a dax device is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Use {
    /// A node under `/dev` for programs to map.
    Devdax,
    /// A NUMA node of ordinary memory.
    SystemRam,
}

impl Use {
    /// The driver's name in sysfs.
    pub fn driver(self) -> &'static str {
        match self {
            Self::Devdax => "device_dax",
            Self::SystemRam => "kmem",
        }
    }

    fn module(self) -> &'static str {
        self.driver()
    }
}

/// A dax device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dax {
    /// Its name, for example `dax0.0`.
    pub name: String,
    /// Its node, for example `/dev/dax0.0`.
    pub node: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
    /// What mappings must be multiples of, in bytes.
    pub align: u64,
    /// How it is used, if a driver has it.
    pub driver: Option<Use>,
}

/// Why a region gave no usable dax device.
#[derive(Debug, thiserror::Error)]
pub enum DaxError {
    /// None appeared.
    #[error(
        "{region} brought no dax device within {seconds:.1} s: is the module dax_cxl loaded (`modprobe dax_cxl`), and \
         what does `dmesg` say of {region}?"
    )]
    Missing {
        /// The region.
        region: String,
        /// How long it was waited for.
        seconds: f64,
    },
    /// The driver is not in this kernel.
    #[error(
        "the kernel has no {driver} driver for {dax}: `modprobe {driver}`, or add the module to the initramfs"
    )]
    NoDriver {
        /// The device.
        dax: String,
        /// The driver.
        driver: &'static str,
    },
    /// The device is system RAM, and should be a node.
    #[error(
        "{dax} is system RAM already (driver kmem), which cannot be taken back safely: reboot without loading kmem, \
         or use `lamina-shim up --system-ram`"
    )]
    SystemRam {
        /// The device.
        dax: String,
    },
    /// The driver was told, and did not take it.
    #[error("{driver} did not take {dax} (its driver is now {now:?}): see `dmesg`")]
    NotTaken {
        /// The device.
        dax: String,
        /// The driver asked for.
        driver: &'static str,
        /// The driver it has.
        now: Option<String>,
    },
    /// The node is not under `/dev`.
    #[error("{dax} has its driver but {node} is missing: mount devtmpfs on /dev")]
    NoNode {
        /// The device.
        dax: String,
        /// The node.
        node: PathBuf,
    },
    /// Any other attribute.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
}

/// All dax devices.
pub fn list(tree: &Tree) -> Vec<Dax> {
    tree.list(DEVICES).iter().filter_map(|name| describe(tree, name).ok()).collect()
}

fn describe(tree: &Tree, name: &str) -> Result<Dax, SysfsError> {
    let driver = tree.link(format!("{DEVICES}/{name}/driver"));
    Ok(Dax {
        name: name.into(),
        node: tree.dev(name),
        bytes: tree.number(format!("{DEVICES}/{name}/size"))?,
        align: tree.number(format!("{DEVICES}/{name}/align")).unwrap_or(2 << 20),
        driver: [Use::Devdax, Use::SystemRam]
            .into_iter()
            .find(|r#use| driver.as_deref() == Some(r#use.driver())),
    })
}

/// The dax device of `region`, waiting up to `limit` for it.
///
/// # Errors
/// [`DaxError::Missing`], [`DaxError::Sysfs`].
pub fn of_region(tree: &Tree, region: &str, limit: Duration) -> Result<Dax, DaxError> {
    tree.module("dax_cxl", "bus/cxl/drivers/cxl_dax_region");
    let below = |name: &String| {
        let place = tree.resolve(format!("{DEVICES}/{name}"));
        place.is_some_and(|place| place.components().any(|part| part.as_os_str() == region))
    };
    let name = wait(limit, || tree.list(DEVICES).into_iter().find(below))
        .ok_or_else(|| DaxError::Missing { region: region.into(), seconds: limit.as_secs_f64() })?;
    Ok(describe(tree, &name)?)
}

/// Gives `dax` to the driver of `wanted`, unless it has it.
///
/// # Errors
/// Any of [`DaxError`] but `Missing`.
pub fn bind(tree: &Tree, dax: &Dax, wanted: Use) -> Result<Dax, DaxError> {
    let name = &dax.name;
    let driver = wanted.driver();
    let current = || tree.link(format!("{DEVICES}/{name}/driver"));
    if current().as_deref() != Some(driver) {
        tree.module(wanted.module(), &format!("{DRIVERS}/{driver}"));
        if !tree.exists(format!("{DRIVERS}/{driver}")) {
            return Err(DaxError::NoDriver { dax: name.clone(), driver });
        }
        if let Some(other) = current().filter(|other| other != driver) {
            if other == Use::SystemRam.driver() {
                return Err(DaxError::SystemRam { dax: name.clone() });
            }
            tree.write(format!("{DRIVERS}/{other}/unbind"), name)?;
            if let Err(error) = tree.write(format!("{DRIVERS}/{other}/remove_id"), name) {
                tracing::debug!(%error, "the old driver did not know the device by name");
            }
        }
        // Loading kmem may have taken the device already.
        if current().as_deref() != Some(driver) {
            tree.write(format!("{DRIVERS}/{driver}/new_id"), name)?;
        }
        if current().is_none() {
            tree.write(format!("{DRIVERS}/{driver}/bind"), name)?;
        }
        let now = current();
        if now.as_deref() != Some(driver) {
            return Err(DaxError::NotTaken { dax: name.clone(), driver, now });
        }
    }
    match wanted {
        Use::Devdax => {
            let node = tree.dev(name);
            wait(Duration::from_secs(2), || node.exists().then_some(()))
                .ok_or_else(|| DaxError::NoNode { dax: name.clone(), node })?;
        }
        Use::SystemRam => online(tree, name, dax.bytes)?,
    }
    Ok(describe(tree, name)?)
}

/// Brings the device's memory blocks online as movable memory, where the kernel has not done so by
/// itself.
fn online(tree: &Tree, name: &str, bytes: u64) -> Result<(), DaxError> {
    let block = u64::from_str_radix(&tree.read(format!("{MEMORY}/block_size_bytes"))?, 16)
        .ok()
        .filter(|block| *block > 0)
        .ok_or_else(|| SysfsError::Number {
            path: tree.sys(format!("{MEMORY}/block_size_bytes")),
            value: "no block size".into(),
        })?;
    let start = tree.number(format!("{DEVICES}/{name}/resource"))?;
    let end = start.saturating_add(bytes);
    for number in start.div_ceil(block)..end / block {
        let state = format!("{MEMORY}/memory{number}/state");
        if tree.exists(&state) && tree.read(&state)? == "offline" {
            tree.write(&state, "online_movable")?;
        }
    }
    Ok(())
}
