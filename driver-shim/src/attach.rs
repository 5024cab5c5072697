//! Bringing Lamina up in a guest: from two memdevs to two windows.
//!
//! 1. Wait for the memdevs. If some carry Lamina's serial numbers, only those are touched; else all
//!    of them, or those that the caller names.
//! 2. Give each its region and its dax device, as `device_dax`. Those that state to be targets of
//!    an interleave set have one region together.
//! 3. Tell base from views: by serial number, else by content (the views window begins with a
//!    directory whose window size is the device's own). Which one QEMU enumerates first means
//!    nothing.
//! 4. On request hand the base to `kmem`, as system RAM.
//!
//! Where the windows are shared memory of PCI devices, there is nothing to make: they are found and
//! told. Where they are that of a virtio device, its driver is loaded.
//!
//! All of it can be repeated; what is there is used.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{
    Access, Error, Window,
    dax::{self, Dax, Use},
    directory,
    ivshmem::{self, Bar, Bars},
    region::{self, Region},
    shmem,
    sysfs::{Tree, wait},
    topology::{Memdev, Role, memdevs},
};

/// What to bring up.
#[derive(Clone, Debug)]
pub struct UpOptions {
    /// Use the base window as system RAM instead of mapping it.
    pub system_ram: bool,
    /// The memdevs to use, for example `mem0` and `mem1`; empty for all that are Lamina's.
    pub memdevs: Vec<String>,
    /// How long to wait for the kernel to show devices.
    pub wait: Duration,
}

impl Default for UpOptions {
    fn default() -> Self {
        Self { system_ram: false, memdevs: Vec::new(), wait: Duration::from_secs(10) }
    }
}

/// One window as it is attached.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Attachment {
    /// Base or views.
    pub role: Role,
    /// The CXL memory device, for example `mem0`, or those of an interleave set by target,
    /// `mem0, mem2`, or what has the shared memory: a PCI device, for example `0000:00:10.0`, or a
    /// driver's file, `lamina0`.
    pub memdev: String,
    /// Its region, for example `region0`; `BAR 2` of a PCI device, `shared memory` of a driver.
    pub region: String,
    /// Whether the region was made now, rather than found.
    pub created: bool,
    /// The dax device, for example `dax0.0`; empty for shared memory.
    pub dax: String,
    /// The node to map, for example `/dev/dax0.0`; not there with [`Use::SystemRam`].
    pub node: PathBuf,
    /// Bytes of the window.
    pub bytes: u64,
    /// What mappings of it must be multiples of, in bytes.
    pub align: u64,
    /// How it is used; none for shared memory, which a program maps.
    pub r#use: Option<Use>,
}

/// Both windows.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Attached {
    /// The capacity window.
    pub base: Attachment,
    /// The aperture with the directory.
    pub views: Attachment,
}

/// A memdev, or those of an interleave set by target.
struct Group(Vec<Memdev>);

impl Group {
    fn name(&self) -> String {
        self.0.iter().map(|memdev| memdev.name.as_str()).collect::<Vec<_>>().join(", ")
    }

    fn role(&self) -> Option<Role> {
        Role::of_serial(self.0.first()?.serial)
    }
}

/// Makes regions and dax devices for Lamina's memdevs and tells the windows apart.
///
/// # Errors
/// [`Error::Memdevs`] when there are not two memdevs of Lamina, [`Error::NoDriver`], and whatever
/// regions, dax devices and the directory give.
pub fn up(tree: &Tree, options: &UpOptions) -> Result<Attached, Error> {
    let looks_for_others = || memdevs(tree).is_empty() && options.memdevs.is_empty();
    if looks_for_others() {
        let driven = shmem::bring_up(tree, options.wait);
        if let Ok(Some(node)) = &driven {
            return driver(node, options);
        }
        if let Some(bars) = ivshmem::windows(tree)? {
            return shared_memory(bars, options);
        }
        // Memdevs may have come meanwhile.
        if looks_for_others() {
            driven?;
        }
    }
    let candidates = candidates(tree, options)?;
    let mut found = Vec::new();
    for group in candidates {
        let region = region::ensure(tree, &group.0)?;
        let dax = dax::of_region(tree, &region.name, options.wait)?;
        // System RAM stays what it is: only the base can be that.
        let dax = match dax.driver {
            Some(Use::SystemRam) if options.system_ram => dax,
            _ => dax::bind(tree, &dax, Use::Devdax)?,
        };
        found.push((group, region, dax));
    }

    let views = views_index(tree, &found)?;
    let base = found.iter().position(|(group, _, _)| group.role() == Some(Role::Base));
    let base = match (base, found.len()) {
        (Some(base), _) if base != views => base,
        (_, 2) => 1 - views,
        _ => return Err(memdevs_error(&found, "more than one could be the base")),
    };
    if options.system_ram {
        found[base].2 = dax::bind(tree, &found[base].2, Use::SystemRam)?;
    }
    let attachment = |index: usize, role| {
        let (group, region, dax) = &found[index];
        Attachment {
            role,
            memdev: group.name(),
            region: region.name.clone(),
            created: region.created,
            dax: dax.name.clone(),
            node: dax.node.clone(),
            bytes: dax.bytes,
            align: dax.align,
            r#use: Some(dax.driver.unwrap_or(Use::Devdax)),
        }
    };
    Ok(Attached { base: attachment(base, Role::Base), views: attachment(views, Role::Views) })
}

/// Windows that are shared memory already.
fn shared_memory(bars: Bars, options: &UpOptions) -> Result<Attached, Error> {
    let views = bars.views;
    let wrong = |why: &str| Error::Memdevs { found: views.address.clone(), why: why.into() };
    if options.system_ram {
        return Err(wrong("the windows are shared memory of PCI devices, which cannot be system RAM"));
    }
    let base = bars.base.ok_or_else(|| wrong("no PCI device before it has the base window's size"))?;
    let attachment = |bar: Bar, role| Attachment {
        role,
        memdev: bar.address,
        region: "BAR 2".into(),
        created: false,
        dax: String::new(),
        node: bar.node,
        bytes: bar.bytes,
        align: rustix::param::page_size() as u64,
        r#use: None,
    };
    Ok(Attached { base: attachment(base, Role::Base), views: attachment(views, Role::Views) })
}

/// Windows that a driver's file shows.
fn driver(node: &Path, options: &UpOptions) -> Result<Attached, Error> {
    let name = node.file_name().unwrap_or_default().to_string_lossy();
    if options.system_ram {
        return Err(Error::Memdevs {
            found: name.into_owned(),
            why: "its windows are shared memory of a virtio device, which cannot be system RAM".into(),
        });
    }
    let attachment = |role| {
        let window = Window::of_driver(node, role, Access::Read)?;
        Ok::<_, Error>(Attachment {
            role,
            memdev: name.clone().into_owned(),
            region: "shared memory".into(),
            created: false,
            dax: String::new(),
            node: node.to_owned(),
            bytes: window.bytes(),
            align: window.align(),
            r#use: None,
        })
    };
    Ok(Attached { base: attachment(Role::Base)?, views: attachment(Role::Views)? })
}

/// The memdevs to bring up, once their endpoint ports are there and every set is whole.
fn candidates(tree: &Tree, options: &UpOptions) -> Result<Vec<Group>, Error> {
    let chosen = || {
        let all = memdevs(tree);
        if !options.memdevs.is_empty() {
            return all.into_iter().filter(|memdev| options.memdevs.contains(&memdev.name)).collect();
        }
        let (ours, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|memdev| Role::of_serial(memdev.serial).is_some());
        if ours.is_empty() { others } else { ours }
    };
    let wanted = options.memdevs.len().max(2);
    let ready = || {
        let found: Vec<Memdev> = chosen();
        let all = found.len() >= wanted && found.iter().all(|memdev| memdev.endpoint.is_some());
        grouped(found).filter(|groups| all && groups.len() >= 2)
    };
    wait(options.wait, ready).ok_or_else(|| {
        let found: Vec<String> = chosen()
            .iter()
            .map(|memdev| format!("{} (port {})", memdev.name, memdev.endpoint.as_deref().unwrap_or("none")))
            .collect();
        Error::Memdevs {
            found: found.join(", "),
            why: format!(
                "{wanted} are needed, and all targets of one set if one is a target, each with its endpoint port"
            ),
        }
    })
}

/// Memdevs one by one, but the targets of a set together. `None` if a set is not whole, or not the
/// only one.
fn grouped(memdevs: Vec<Memdev>) -> Option<Vec<Group>> {
    let (mut targets, others): (Vec<_>, Vec<_>) =
        memdevs.into_iter().partition(|memdev| memdev.target().is_some());
    targets.sort_by_key(|memdev| memdev.serial);
    let mut groups: Vec<_> = others.into_iter().map(|memdev| Group(vec![memdev])).collect();
    if let Some((set, _)) = targets.first().and_then(Memdev::target) {
        let whole = (0..set.ways()).map(|target| set.serial(target));
        if !targets.iter().map(|memdev| memdev.serial).eq(whole) {
            return None;
        }
        // In front, as the launcher names the base first.
        groups.insert(0, Group(targets));
    }
    Some(groups)
}

/// Which of `found` is the views window.
fn views_index(tree: &Tree, found: &[(Group, Region, Dax)]) -> Result<usize, Error> {
    let by_serial = |role| found.iter().position(|(group, _, _)| group.role() == Some(role));
    if let Some(views) = by_serial(Role::Views) {
        return Ok(views);
    }
    let mut why = None;
    // Backwards, because a launcher names the base first: then the base is never touched by this.
    for (index, (_, _, dax)) in found.iter().enumerate().rev() {
        if dax.driver != Some(Use::Devdax) || by_serial(Role::Base) == Some(index) {
            continue;
        }
        match begins_with_directory(tree, dax) {
            Ok(()) => return Ok(index),
            Err(error) => why = Some(error),
        }
    }
    Err(why.unwrap_or_else(|| memdevs_error(found, "none is mapped as devdax and could hold the views")))
}

/// Whether the device begins with a directory that describes a views window of the device's size.
pub(crate) fn begins_with_directory(tree: &Tree, dax: &Dax) -> Result<(), Error> {
    let window = Window::open(&dax.node, Access::Read, tree)?;
    let stated = directory::read(&window)?.views_bytes;
    if stated > window.bytes() {
        return Err(Error::ShortWindow { path: dax.node.clone(), bytes: window.bytes(), stated });
    }
    Ok(())
}

fn memdevs_error(found: &[(Group, Region, Dax)], why: &str) -> Error {
    let names: Vec<_> =
        found.iter().map(|(group, _, dax)| format!("{} ({})", group.name(), dax.name)).collect();
    Error::Memdevs { found: names.join(", "), why: why.into() }
}
