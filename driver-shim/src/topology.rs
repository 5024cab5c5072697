//! The CXL memdevs of this machine, as sysfs shows them.
//!
//! `bus/cxl/devices` holds, flat: `memN` (a device), `endpointE` (its port, whose `uport` link
//! names the memdev), `decoderE.M` (its decoders) and `decoderR.M` (the root decoders, the ones
//! with `create_ram_region`: the platform's CXL windows). A dax device lies, resolved, in a folder
//! below its `regionN`.

use std::{fmt, path::Path};

use lamina_abi::Interleave;

use crate::sysfs::Tree;

/// Where the CXL bus lists its devices.
pub(crate) const DEVICES: &str = "bus/cxl/devices";

/// Serial number (`sn=` of QEMU's `cxl-type3`) of the memdev that carries the base window: "Lamina"
/// in ASCII, 0.
pub const BASE_SERIAL: u64 = 0x4c61_6d69_6e61_0000;
/// Serial number of the memdev that carries the views window: "Lamina" in ASCII, 1.
pub const VIEWS_SERIAL: u64 = 0x4c61_6d69_6e61_0001;

/// Which of the two windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The capacity window: the tensors themselves.
    Base,
    /// The aperture that begins with the directory.
    Views,
}

impl Role {
    /// The role that a memdev's serial number states, if it is one of Lamina's.
    pub fn of_serial(serial: u64) -> Option<Self> {
        match serial {
            BASE_SERIAL => Some(Self::Base),
            VIEWS_SERIAL => Some(Self::Views),
            // A target has a part of the base window.
            _ => Interleave::of_serial(serial).map(|_| Self::Base),
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Base => "base",
            Self::Views => "views",
        })
    }
}

/// A CXL memory device with its endpoint port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memdev {
    /// Its name, for example `mem0`.
    pub name: String,
    /// Its serial number, zero if it states none.
    pub serial: u64,
    /// Volatile capacity in bytes.
    pub ram_bytes: u64,
    /// Its port, for example `endpoint2`; none as long as the driver has not made it.
    pub endpoint: Option<String>,
}

impl Memdev {
    /// The interleave set that it states to be of, and which target of it.
    pub fn target(&self) -> Option<(Interleave, u32)> {
        Interleave::of_serial(self.serial)
    }
}

/// All memdevs, in the order of their numbers.
pub fn memdevs(tree: &Tree) -> Vec<Memdev> {
    let names = tree.list(DEVICES);
    let numbered = |name: &str, prefix: &str| {
        name.strip_prefix(prefix)
            .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
    };
    names
        .iter()
        .filter(|name| numbered(name, "mem"))
        .map(|name| Memdev {
            name: name.clone(),
            serial: tree.number(format!("{DEVICES}/{name}/serial")).unwrap_or(0),
            ram_bytes: tree.number(format!("{DEVICES}/{name}/ram/size")).unwrap_or(0),
            endpoint: names
                .iter()
                .filter(|port| numbered(port, "endpoint"))
                .find(|port| tree.link(format!("{DEVICES}/{port}/uport")).as_ref() == Some(name))
                .cloned(),
        })
        .collect()
}

/// The decoders of a port, for example `decoder2.0`, in the order in which they must be used.
pub(crate) fn decoders(tree: &Tree, port: &str) -> Vec<String> {
    let number = port.trim_start_matches(|c: char| !c.is_ascii_digit());
    let prefix = format!("decoder{number}.");
    tree.list(DEVICES).into_iter().filter(|name| name.starts_with(&prefix)).collect()
}

/// The root decoders that can hold a volatile region.
pub(crate) fn ram_roots(tree: &Tree) -> Vec<String> {
    tree.list(DEVICES)
        .into_iter()
        .filter(|name| name.starts_with("decoder"))
        .filter(|name| tree.exists(format!("{DEVICES}/{name}/create_ram_region")))
        .collect()
}

/// The serial number of the memdev behind a dax device, or of the first of a set, if it is CXL
/// memory.
pub(crate) fn dax_serial(tree: &Tree, dax: &str) -> Option<u64> {
    let place = tree.resolve(Path::new("bus/dax/devices").join(dax))?;
    let region = place.components().find_map(|part| {
        let name = part.as_os_str().to_str()?;
        let number = name.strip_prefix("region")?;
        number.bytes().all(|byte| byte.is_ascii_digit()).then_some(name)
    })?;
    let decoder = tree.read(format!("{DEVICES}/{region}/target0")).ok()?;
    let port = decoder.strip_prefix("decoder")?.split('.').next()?;
    let memdev = tree.link(format!("{DEVICES}/endpoint{port}/uport"))?;
    tree.number(format!("{DEVICES}/{memdev}/serial")).ok()
}
