//! A CXL RAM region for a memdev, or for several that are an interleave set, made by sysfs alone.
//!
//! The kernel wants this order: take a name from a root decoder's `create_ram_region` and write it
//! back; give the region granularity, ways and size; set each endpoint decoder's `mode` and
//! `dpa_size`; make it the region's `target0`, `target1` and so on, by target; `commit`; bind the
//! region's driver. What exists is used: a decoder that belongs to a region keeps it, and a region
//! that an earlier attempt left half made is finished. A region that this attempt made and could
//! not finish is deleted again.

use lamina_abi::Interleave;

use crate::{
    sysfs::{SysfsError, Tree},
    topology::{DEVICES, Memdev, decoders, ram_roots},
};

const DRIVER: &str = "bus/cxl/drivers/cxl_region";
/// `ENXIO`, which `commit` gives when the kernel cannot flush the CPU caches of a new region.
const NO_CACHE_FLUSH: i32 = 6;

/// The region of a memdev or a set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its name, for example `region0`.
    pub name: String,
    /// Whether this call made it.
    pub created: bool,
}

/// Why a memdev got no region.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The memdev has no port with a free decoder.
    #[error(
        "{memdev} has no free endpoint decoder: {why}; are cxl_acpi, cxl_pci, cxl_port and cxl_mem loaded, and is it \
         not in use already (`dmesg | grep cxl`)?"
    )]
    NoDecoder {
        /// The memdev.
        memdev: String,
        /// What was missing.
        why: String,
    },
    /// The targets of a set are not alike.
    #[error(
        "the interleave set {memdevs} has targets of different sizes ({bytes} bytes): they come from different devices"
    )]
    Sizes {
        /// The memdevs.
        memdevs: String,
        /// Their sizes.
        bytes: String,
    },
    /// No root decoder can hold volatile regions.
    #[error(
        "no root decoder offers create_ram_region: the platform has no CXL window for volatile memory; give QEMU \
         `-M …,cxl=on,cxl-fmw.0.targets.0=…,cxl-fmw.0.size=…` and load cxl_acpi"
    )]
    NoRoot,
    /// No root decoder has room.
    #[error(
        "no CXL window has {bytes} bytes left for {memdev}: {tried}; make QEMU's cxl-fmw sizes at least as large as the \
         memory devices together"
    )]
    NoRoom {
        /// The memdev.
        memdev: String,
        /// The size its region needs.
        bytes: u64,
        /// Root decoders with their size and refusal.
        tried: String,
    },
    /// The kernel cannot make the CPU caches agree with a new region.
    #[error(
        "{region} could not be committed: {cause}. A kernel that finds itself in a virtual machine does not flush \
         CPU caches: start QEMU with `-cpu …,-hypervisor`"
    )]
    Caches {
        /// The region.
        region: String,
        /// The refused write.
        cause: SysfsError,
    },
    /// Any other attribute.
    #[error(transparent)]
    Sysfs(#[from] SysfsError),
}

/// An endpoint's decoder for a region, and the region that it has already.
struct Target {
    decoder: String,
    region: Option<String>,
}

/// The region over all volatile capacity of a memdev, or of the targets of an interleave set in
/// their order, made if there is none.
///
/// # Errors
/// Any of [`RegionError`].
pub fn ensure(tree: &Tree, memdevs: &[Memdev]) -> Result<Region, RegionError> {
    let targets = memdevs.iter().map(|memdev| find_target(tree, memdev)).collect::<Result<Vec<_>, _>>()?;
    let names = || memdevs.iter().map(|memdev| memdev.name.as_str()).collect::<Vec<_>>().join(", ");
    let each = memdevs.first().map_or(0, |memdev| memdev.ram_bytes);
    if memdevs.iter().any(|memdev| memdev.ram_bytes != each) {
        let bytes = memdevs.iter().map(|memdev| memdev.ram_bytes.to_string()).collect::<Vec<_>>().join(", ");
        return Err(RegionError::Sizes { memdevs: names(), bytes });
    }
    if let Some(region) = targets.iter().find_map(|target| target.region.clone()) {
        aim(tree, &targets, &region, each)?;
        finish(tree, &region)?;
        return Ok(Region { name: region, created: false });
    }
    if let Some(memdev) = memdevs.iter().find(|memdev| memdev.ram_bytes == 0) {
        let why = "it states no volatile capacity (ram/size is 0); use `volatile-memdev=` in QEMU".into();
        return Err(RegionError::NoDecoder { memdev: memdev.name.clone(), why });
    }

    let set = memdevs.first().and_then(Memdev::target).map(|(set, _)| set);
    let bytes = each.saturating_mul(memdevs.len() as u64);
    let roots = ram_roots(tree);
    if roots.is_empty() {
        return Err(RegionError::NoRoot);
    }
    let mut tried = Vec::new();
    for root in &roots {
        let region = tree.read(format!("{DEVICES}/{root}/create_ram_region"))?;
        tree.write(format!("{DEVICES}/{root}/create_ram_region"), &region)?;
        match allot(tree, root, &region, set, bytes) {
            Ok(()) => {}
            Err(error) => {
                delete(tree, root, &region);
                let size = tree.number(format!("{DEVICES}/{root}/size")).unwrap_or(0);
                tried.push(format!("{root} of {size} bytes ({error})"));
                continue;
            }
        }
        let made = aim(tree, &targets, &region, each).and_then(|()| finish(tree, &region));
        if let Err(error) = made {
            delete(tree, root, &region);
            return Err(error);
        }
        return Ok(Region { name: region, created: true });
    }
    Err(RegionError::NoRoom { memdev: names(), bytes, tried: tried.join(", ") })
}

/// The decoder of a memdev that has a region, or else its first one.
fn find_target(tree: &Tree, memdev: &Memdev) -> Result<Target, RegionError> {
    let none = |why: &str| RegionError::NoDecoder { memdev: memdev.name.clone(), why: why.into() };
    let port = memdev.endpoint.as_deref().ok_or_else(|| none("the driver made no endpoint port"))?;
    let mut decoders = decoders(tree, port);
    if decoders.is_empty() {
        return Err(none(&format!("{port} has no decoders")));
    }
    let region = |decoder: &String| {
        tree.read(format!("{DEVICES}/{decoder}/region")).ok().filter(|region| !region.is_empty())
    };
    let taken = decoders.iter().position(|decoder| region(decoder).is_some());
    let decoder = decoders.swap_remove(taken.unwrap_or(0));
    Ok(Target { region: region(&decoder), decoder })
}

/// Gives the region its shape and its addresses.
fn allot(
    tree: &Tree,
    root: &str,
    region: &str,
    set: Option<Interleave>,
    bytes: u64,
) -> Result<(), SysfsError> {
    // With one way the granularity means nothing, but a root decoder that interleaves demands its
    // own.
    let of_root =
        || tree.number(format!("{DEVICES}/{root}/interleave_granularity")).ok().filter(|value| *value > 0);
    let granularity = set.map(Interleave::granule).or_else(of_root).unwrap_or(256);
    tree.write(format!("{DEVICES}/{region}/interleave_granularity"), &granularity.to_string())?;
    let ways = set.map_or(1, Interleave::ways);
    tree.write(format!("{DEVICES}/{region}/interleave_ways"), &ways.to_string())?;
    tree.write(format!("{DEVICES}/{region}/size"), &bytes.to_string())
}

/// Gives each memdev's decoder all its capacity, `bytes`, and the region the decoder, where it has
/// it not yet.
fn aim(tree: &Tree, targets: &[Target], region: &str, bytes: u64) -> Result<(), RegionError> {
    for (position, Target { decoder, region: has }) in targets.iter().enumerate() {
        if has.is_some() {
            continue;
        }
        tree.write(format!("{DEVICES}/{decoder}/mode"), "ram")?;
        tree.write(format!("{DEVICES}/{decoder}/dpa_size"), &bytes.to_string())?;
        tree.write(format!("{DEVICES}/{region}/target{position}"), decoder)?;
    }
    Ok(())
}

/// Commits the region and binds its driver, where that is not done yet.
fn finish(tree: &Tree, region: &str) -> Result<(), RegionError> {
    let caches = |error: SysfsError| match &error {
        SysfsError::Write { cause, .. } if cause.raw_os_error() == Some(NO_CACHE_FLUSH) => {
            RegionError::Caches { region: region.into(), cause: error }
        }
        _ => error.into(),
    };
    if tree.number(format!("{DEVICES}/{region}/commit")).unwrap_or(0) == 0 {
        tree.write(format!("{DEVICES}/{region}/commit"), "1").map_err(caches)?;
    }
    if tree.link(format!("{DEVICES}/{region}/driver")).is_none() {
        tree.write(format!("{DRIVER}/bind"), region).map_err(caches)?;
    }
    Ok(())
}

fn delete(tree: &Tree, root: &str, region: &str) {
    if let Err(error) = tree.write(format!("{DEVICES}/{root}/delete_region"), region) {
        tracing::warn!(%error, "an unfinished region stays behind");
    }
}
