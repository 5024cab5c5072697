//! How a device is divided among guests and hosts: from the command line to partitions, the exports
//! that show them, and what is loaded into them.
//!
//! * Without `--guest` the device is not divided. With it, each guest has a partition, and
//!   `--shared` makes one more, named [`SHARED`], for everybody.
//! * What is shared (the whole device, or that partition) is shown by the export at the mount's
//!   root, or, with hosts, by an export for each host.
//! * `--model` goes to what is shared, a guest's `model=` to its partition.
//! * An image keeps its partitions. What the command line does not say of them is as the image has
//!   it; hosts are not part of it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use lamina_abi::Interleave;
use lamina_device::device::{Device, DeviceConfig, MAX_PARTITIONS, Partition, PartitionConfig};
use lamina_device::load::{self, LoadOptions};
use lamina_qemu::topology::ivshmem;
use lamina_serve::{ExportOptions, Place};
use lamina_store::image::Superblock;

use crate::args::{DeviceArgs, GuestSpec, PartitionArgs};

/// The partition that is everybody's.
const SHARED: &str = "shared";
/// QEMU's CXL windows are multiples of this.
const CXL_MULTIPLE: u64 = 256 << 20;

/// A device that is to be served, and to whom.
pub(crate) struct Plan {
    /// The partitions; one without a name for a device that is not divided.
    partitions: Vec<PartitionPlan>,
    /// What is loaded, and where.
    pub(crate) loads: Vec<Load>,
    /// Place, partition and cache of each export.
    exports: Vec<(Place, String, Option<u64>)>,
    /// Guests whose windows are disks as well, and the directories of their sockets.
    pub(crate) disks: Vec<(String, PathBuf)>,
    /// Whether windows whose size is not given are as large as a PCI BAR can be.
    powers_of_two: bool,
    /// CXL memory devices that the base window is interleaved over.
    ways: u32,
}

/// A partition as the command line has it; what it does not say is fitting, or as the image has it.
struct PartitionPlan {
    name: Option<String>,
    base_bytes: Option<u64>,
    views_bytes: Option<u64>,
    quota_bytes: Option<u64>,
}

/// A checkpoint and the partition it goes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Load {
    pub(crate) path: PathBuf,
    pub(crate) partition: Option<String>,
}

impl Plan {
    /// Decides. Of a device that lies in an `image` already, the partitions are the image's: what
    /// is said otherwise is refused.
    pub(crate) fn new(
        args: &PartitionArgs,
        device: &DeviceArgs,
        image: Option<(&Superblock, &Path)>,
    ) -> Result<Self> {
        let mut args = args.clone();
        if let Some((is, _)) = image
            && args.guests.is_empty()
        {
            args.divide_like(is);
        }
        let divided = !args.guests.is_empty();
        let powers_of_two = device.powers_of_two;
        let ways = device.several.interleave.map_or(1, Interleave::ways);
        let mut plan = Self {
            partitions: Vec::new(),
            loads: Vec::new(),
            exports: Vec::new(),
            disks: Vec::new(),
            powers_of_two,
            ways,
        };
        for guest in args.guests {
            ensure!(
                guest.name != SHARED,
                "{SHARED} names the partition that --shared makes; no guest can have it"
            );
            let name = Some(guest.name.clone());
            plan.load(&guest.models, name.as_ref());
            let (base_bytes, quota_bytes) = (Some(guest.bytes), guest.quota);
            plan.partitions.push(PartitionPlan { name, base_bytes, views_bytes: guest.views, quota_bytes });
            plan.disks.extend(guest.disks.map(|directory| (guest.name.clone(), directory)));
            plan.exports.push((Place::Guest(guest.name.clone()), guest.name, None));
        }
        let hosts: Vec<String> = match args.hosts {
            Some(count) => (0..count).map(|n| format!("h{n}")).collect(),
            None => args.host,
        };
        ensure!(
            ways == 1 || (!divided && hosts.is_empty()),
            "--interleave is for a device that is neither divided among guests nor shared by hosts"
        );
        let shared = if divided { SHARED } else { "" };
        let is_shared = !divided || args.shared.is_some();
        ensure!(
            is_shared || hosts.is_empty(),
            "hosts share a partition of the device: say with --shared BYTES how large it is"
        );
        ensure!(
            is_shared || device.models.is_empty(),
            "--model goes to the shared partition, and there is none: say --shared BYTES, or load it for a guest with --guest NAME=BYTES,model=FILE"
        );
        ensure!(
            is_shared || device.qmp.is_empty(),
            "--qmp tells of the shared partition, and there is none: a guest's QEMU is told that listens at qmp-NAME.sock in the --run-dir"
        );
        ensure!(
            hosts.len() <= MAX_PARTITIONS,
            "{} hosts; a device has at most {MAX_PARTITIONS}",
            hosts.len()
        );
        for name in &hosts {
            let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_".contains(c);
            if name.is_empty() || name.len() > 32 || !name.chars().all(fits) {
                bail!("{name:?} cannot name a host: 1 to 32 lower-case letters, digits, `-` and `_`");
            }
        }
        if is_shared {
            let name = divided.then(|| shared.to_owned());
            plan.load(&device.models, name.as_ref());
            let base_bytes = if divided { args.shared } else { device.capacity };
            plan.partitions.push(PartitionPlan {
                name,
                base_bytes,
                views_bytes: device.views_capacity,
                quota_bytes: None,
            });
            if hosts.is_empty() {
                plan.exports.push((Place::Root, shared.to_owned(), None));
            }
        }
        let hosts =
            hosts.into_iter().map(|name| (Place::Host(name), shared.to_owned(), Some(args.host_cache)));
        plan.exports.extend(hosts);
        let mut names = BTreeSet::new();
        if let Some((place, ..)) = plan.exports.iter().find(|(place, ..)| !names.insert(place.name())) {
            bail!("{} names two guests or hosts; each has a name of its own", place.name());
        }
        if powers_of_two && !divided {
            let (base, views) = image.map_or((device.capacity, device.views_capacity), |(is, _)| {
                (Some(is.base_bytes), Some(is.views_bytes))
            });
            base.map_or(Ok(()), |bytes| ivshmem::check_bytes("base", bytes))?;
            views.map_or(Ok(()), |bytes| ivshmem::check_bytes("views", bytes))?;
        }
        if let Some((is, path)) = image {
            plan.fits(device, is)
                .with_context(|| format!("the image {} is another device", path.display()))?;
            if let Some(set) = device.several.interleave {
                ensure!(
                    is.base_bytes.is_multiple_of(set.stripe()),
                    "--interleave {set}: the image {} has a base window of {} bytes, no multiple of {}",
                    path.display(),
                    is.base_bytes,
                    set.stripe()
                );
            }
        }
        Ok(plan)
    }

    fn load(&mut self, models: &[PathBuf], partition: Option<&String>) {
        self.loads
            .extend(models.iter().map(|path| Load { path: path.clone(), partition: partition.cloned() }));
    }

    /// Refuses what is said otherwise than the image has it.
    fn fits(&self, device: &DeviceArgs, is: &Superblock) -> Result<()> {
        let same = |what: &str, requested: Option<u64>, is: Option<u64>| {
            let is_text = is.map_or_else(|| "none".to_owned(), |bytes| format!("{bytes} bytes"));
            ensure!(
                requested.is_none() || requested == is,
                "{what}: it has {is_text}; an image keeps its sizes"
            );
            Ok(())
        };
        let mode = device.mode.unwrap_or(is.mode);
        ensure!(mode == is.mode, "--mode {mode}: it is {}; an image keeps its mode", is.mode);
        let codec = device.codec.unwrap_or(is.codec);
        ensure!(codec == is.codec, "--codec {codec}: it has {}; an image keeps its codec", is.codec);
        // As it is made of what is asked for.
        let least = is.partitions.len().max(1) as u64;
        let windows = device.open_windows.map_or(is.open_windows, |windows| (windows as u64).max(least));
        ensure!(
            windows == is.open_windows,
            "--open-windows {windows}: it has {}; an image keeps their number",
            is.open_windows
        );
        let store = device.store_capacity.map(|bytes| bytes.min(is.version.max_store_bytes()));
        same("--store-capacity", store, Some(is.store_bytes))?;
        same("--capacity", device.capacity, Some(is.base_bytes))?;
        if is.partitions.is_empty() && self.partitions.iter().all(|partition| partition.name.is_none()) {
            return same("--views-capacity", device.views_capacity, Some(is.views_bytes));
        }
        let requested: Vec<_> =
            self.partitions.iter().filter_map(|partition| partition.name.as_deref()).collect();
        let names: Vec<_> = is.partitions.iter().map(|partition| partition.name.as_str()).collect();
        ensure!(
            requested == names,
            "--guest and --shared ask for the partitions [{}], it has [{}]; an image keeps its partitions",
            requested.join(", "),
            names.join(", ")
        );
        for (partition, is) in self.partitions.iter().zip(&is.partitions) {
            let of = |what: &str| format!("the {what} of {}", is.name);
            same(&of("base window"), partition.base_bytes, Some(is.base_bytes))?;
            same(&of("views window"), partition.views_bytes, Some(is.views_bytes))?;
            same(&of("quota"), partition.quota_bytes, is.quota_bytes)?;
        }
        Ok(())
    }

    /// What a new device is made of, as far as that is decided here. Opens the checkpoints to see
    /// what they take.
    pub(crate) fn config(&self, options: &LoadOptions) -> Result<DeviceConfig> {
        let mut partitions = Vec::new();
        let one_view = LoadOptions { views: vec!["full".to_owned()], ..options.clone() };
        for partition in &self.partitions {
            let (mut base_needed, mut views_needed) = (0_u64, lamina_abi::DIRECTORY_BYTES);
            for load in self.loads.iter().filter(|load| load.partition == partition.name) {
                let model = load::open(&load.path, options, None)?;
                base_needed = base_needed.saturating_add(load::base_needed(&model));
                views_needed = views_needed.saturating_add(load::views_needed(&model, options));
                // A view of each tensor has room that is made later.
                views_needed = views_needed.saturating_add(load::views_needed(&model, &one_view));
            }
            let fitting = |bytes, devices| fitting(bytes, devices, self.powers_of_two);
            let base_bytes = partition.base_bytes.unwrap_or(fitting(base_needed, self.ways));
            let views_bytes = partition.views_bytes.unwrap_or(fitting(views_needed.max(base_bytes), 1));
            let Some(name) = partition.name.clone() else {
                return Ok(DeviceConfig::new(base_bytes, views_bytes));
            };
            partitions.push(PartitionConfig {
                name,
                base_bytes,
                views_bytes,
                quota_bytes: partition.quota_bytes,
            });
        }
        Ok(DeviceConfig::divided(partitions))
    }

    /// The files that would say that hosts' access was revoked.
    pub(crate) fn revoked_marks(&self, run_dir: &Path) -> impl Iterator<Item = PathBuf> {
        self.exports.iter().filter_map(|(place, ..)| Some(run_dir.join(place.revoked_mark()?)))
    }

    /// The sockets of the guests' control ports in `run_dir`, one for each export.
    pub(crate) fn sockets(&self, run_dir: &Path) -> impl Iterator<Item = PathBuf> {
        self.exports.iter().map(|(place, ..)| run_dir.join(place.socket()))
    }

    /// Where QEMUs may listen that are to be told of poison, and the partition of `device` that
    /// each has: beside the exports' sockets in `run_dir`, and `others` of
    /// what is everybody's.
    pub(crate) fn monitors(
        &self,
        run_dir: &Path,
        others: &[PathBuf],
        device: &Arc<Device>,
    ) -> Result<Vec<(PathBuf, Partition)>> {
        let own = self
            .exports(device, run_dir)?
            .into_iter()
            .map(|export| (run_dir.join(export.place.monitor()), export.partition));
        let mut all: Vec<_> = own.collect();
        let shared = Partition::named(device, if self.divided() { SHARED } else { "" });
        // What is asked for was checked to be there.
        all.extend(
            shared.iter().flat_map(|shared| others.iter().map(|socket| (socket.clone(), shared.clone()))),
        );
        // Only once each, however it is named.
        let mut seen = BTreeSet::new();
        all.retain(|(socket, _)| seen.insert(socket.clone()));
        Ok(all)
    }

    fn divided(&self) -> bool {
        self.partitions.iter().any(|partition| partition.name.is_some())
    }

    /// The exports of `device`, which was made as planned.
    pub(crate) fn exports(&self, device: &Arc<Device>, run_dir: &Path) -> Result<Vec<ExportOptions>> {
        let export = |(place, partition, cache_bytes): &(Place, String, Option<u64>)| {
            let Some(partition) = Partition::named(device, partition) else {
                bail!("the device has no partition {partition:?}");
            };
            let revoked_mark = place.revoked_mark().map(|name| run_dir.join(name));
            Ok(ExportOptions { place: place.clone(), partition, cache_bytes: *cache_bytes, revoked_mark })
        };
        self.exports.iter().map(export).collect()
    }
}

impl PartitionArgs {
    /// Asks for the partitions that an image has.
    fn divide_like(&mut self, is: &Superblock) {
        for partition in &is.partitions {
            if partition.name == SHARED {
                self.shared = Some(partition.base_bytes);
                continue;
            }
            self.guests.push(GuestSpec {
                name: partition.name.clone(),
                bytes: partition.base_bytes,
                quota: partition.quota_bytes,
                views: Some(partition.views_bytes),
                models: Vec::new(),
                disks: None,
            });
        }
    }
}

/// A window over so many devices that QEMU takes and that holds so many bytes.
fn fitting(bytes: u64, devices: u32, power_of_two: bool) -> u64 {
    let fitting = bytes.max(1).checked_next_multiple_of(CXL_MULTIPLE * u64::from(devices));
    let fitting = if power_of_two { fitting.and_then(u64::checked_next_power_of_two) } else { fitting };
    fitting.unwrap_or(bytes)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    fn serve(words: &[&str]) -> Result<Box<crate::args::Serve>> {
        let cli = Cli::try_parse_from(["lamina", "serve", "--mount", "m"].iter().chain(words))?;
        let Command::Serve(serve) = cli.command else { bail!("another command") };
        Ok(serve)
    }

    /// The plan for `lamina serve --mount m` and these.
    fn plan(words: &[&str]) -> Result<Plan> {
        let serve = serve(words)?;
        Plan::new(&serve.partition_table, &serve.device, None)
    }

    /// The same on an image.
    fn plan_on(is: &Superblock, words: &[&str]) -> Result<Plan> {
        let serve = serve(words)?;
        Plan::new(&serve.partition_table, &serve.device, Some((is, Path::new("i"))))
    }

    fn config(plan: &Plan) -> DeviceConfig {
        plan.config(&LoadOptions::default()).unwrap()
    }

    fn refused(words: &[&str]) -> String {
        plan(words).err().unwrap().to_string()
    }

    #[test]
    fn a_device_alone_has_one_export_and_no_partitions() {
        let plan = plan(&["--capacity", "512M"]).unwrap();
        let made = config(&plan);
        assert_eq!((made.base_bytes, made.views_bytes), (512 << 20, 512 << 20));
        assert!(made.partitions.is_empty());
        assert_eq!(plan.exports, [(Place::Root, String::new(), None)]);
    }

    #[test]
    fn an_interleave_set_has_a_base_for_each_of_its_devices_and_is_alone() {
        let made = config(&plan(&["--interleave", "4x4K"]).unwrap());
        assert_eq!((made.base_bytes, made.views_bytes), (1 << 30, 1 << 30));
        for others in [&["--guest", "a=1G"][..], &["--capacity", "1G", "--hosts", "2"]] {
            let words = [&["--interleave", "2x256"], others].concat();
            assert!(refused(&words).contains("neither divided"), "{words:?}");
        }
        assert!(plan(&["--devices", "2", "--guest", "a=1G"]).is_ok());
        let is = DeviceConfig::new(20 << 10, 4 << 20).superblock();
        let why = plan_on(&is, &["--interleave", "4x4K"]).err().unwrap().to_string();
        assert!(why.contains("20480 bytes, no multiple of 16384"), "{why}");
        assert!(plan_on(&is, &["--interleave", "4x1K"]).is_ok());
    }

    #[test]
    fn guests_have_partitions_and_exports_of_their_own() {
        let words =
            ["--guest", "a=1G,quota=64M", "--guest", "b=256M,views=512M", "--shared", "32M", "--host", "x"];
        let plan = plan(&words).unwrap();
        let made = config(&plan);
        let sizes: Vec<_> = made
            .partitions
            .iter()
            .map(|partition| {
                (
                    partition.name.as_str(),
                    partition.base_bytes >> 20,
                    partition.views_bytes >> 20,
                    partition.quota_bytes,
                )
            })
            .collect();
        let expected = [("a", 1024, 1024, Some(64 << 20)), ("b", 256, 512, None), ("shared", 32, 256, None)];
        assert_eq!(sizes, expected);
        assert_eq!(made.base_bytes, (1024 + 256 + 32) << 20);
        let guest = |name: &str| (Place::Guest(name.into()), name.to_owned(), None);
        let host = (Place::Host("x".into()), "shared".to_owned(), Some(64 << 20));
        assert_eq!(plan.exports, [guest("a"), guest("b"), host]);
        let device = Arc::new(Device::new(made).unwrap());
        assert_eq!(
            plan.exports(&device, Path::new("run")).unwrap()[2].partition.base(),
            1280 << 20..1312 << 20
        );
    }

    #[test]
    fn each_guest_has_a_monitor_socket_and_more_are_of_what_is_shared() {
        let monitors = |words: &[&str]| {
            let plan = plan(&[words, &["--qmp", "/q"]].concat()).unwrap();
            let device = Arc::new(Device::new(config(&plan)).unwrap());
            let serve = serve(&[words, &["--qmp", "/q", "--qmp", "/run/qmp.sock"]].concat()).unwrap();
            let monitors = plan.monitors(Path::new("/run"), &serve.device.qmp, &device).unwrap();
            let named = |(socket, partition): (PathBuf, Partition)| {
                (socket.to_str().unwrap().to_owned(), partition.name().to_owned())
            };
            monitors.into_iter().map(named).collect::<Vec<_>>()
        };
        let exports = |all: &[(&str, &str)]| {
            all.iter()
                .map(|(socket, partition)| ((*socket).to_owned(), (*partition).to_owned()))
                .collect::<Vec<_>>()
        };
        assert_eq!(monitors(&[]), exports(&[("/run/qmp.sock", ""), ("/q", "")]));
        assert_eq!(
            monitors(&["--guest", "a=256M", "--shared", "256M", "--host", "x"]),
            exports(&[
                ("/run/qmp-a.sock", "a"),
                ("/run/qmp-x.sock", "shared"),
                ("/q", "shared"),
                ("/run/qmp.sock", "shared")
            ])
        );
    }

    #[test]
    fn hosts_share_what_is_not_a_guests() {
        let plan = plan(&["--hosts", "2", "--host-cache", "1M"]).unwrap();
        let host = |name: &str| (Place::Host(name.into()), String::new(), Some(1 << 20));
        assert_eq!(plan.exports, [host("h0"), host("h1")]);
        assert!(refused(&["--guest", "a=1M", "--hosts", "2"]).contains("--shared BYTES"));
        assert!(refused(&["--guest", "a=1M", "--model", "m"]).contains("model=FILE"));
        assert!(refused(&["--guest", "a=1M", "--qmp", "q"]).contains("qmp-NAME.sock"));
        assert!(refused(&["--host", "x", "--host", "x"]).contains("x names two"));
        assert!(refused(&["--guest", "x=1M", "--shared", "1M", "--host", "x"]).contains("x names two"));
        assert!(refused(&["--host", "../x"]).contains("cannot name a host"));
        for words in [["--hosts", "0"], ["--hosts", "17"], ["--shared", "1M"], ["--host-cache", "1M"]] {
            assert!(plan_fails(&words), "{words:?}");
        }
    }

    #[test]
    fn an_image_keeps_its_partitions() {
        let words = ["--guest", "a=1G,quota=64M", "--guest", "b=256M,views=512M", "--shared", "32M"];
        let first = plan(&words).unwrap();
        let is = config(&first).superblock();
        for words in [&[][..], &words, &["--guest", "a=1G", "--guest", "b=256M", "--shared", "32M"]] {
            let again = plan_on(&is, words).unwrap();
            assert_eq!(again.exports, first.exports, "{words:?}");
        }
        let hosts = plan_on(&is, &["--hosts", "1", "--model", "m"]).unwrap();
        assert_eq!(hosts.exports[2].0, Place::Host("h0".into()));
        assert_eq!(hosts.loads, [Load { path: "m".into(), partition: Some(SHARED.into()) }]);
        for (words, says) in [
            (&["--guest", "a=1G", "--guest", "b=256M"][..], "keeps its partitions"),
            (&["--guest", "b=256M", "--guest", "a=1G", "--shared", "32M"], "keeps its partitions"),
            (&["--guest", "a=2G", "--guest", "b=256M", "--shared", "32M"], "base window of a"),
            (&["--guest", "a=1G", "--guest", "b=256M,views=1G", "--shared", "32M"], "views window of b"),
            (
                &["--guest", "a=1G", "--guest", "b=256M,quota=1M", "--shared", "32M"],
                "quota of b: it has none",
            ),
            (&["--views-capacity", "1G"], "views window of shared"),
            (&["--capacity", "1G"], "--capacity"),
            (&["--mode", "gcomp"], "--mode gcomp: it is trace"),
            (&["--codec", "zstd"], "--codec zstd: it has tree"),
            (&["--open-windows", "7"], "--open-windows 7: it has 64"),
            (&["--store-capacity", "1G"], "--store-capacity: it has"),
        ] {
            let why = plan_on(&is, words).err().map(|why| format!("{why:#}")).unwrap_or_default();
            assert!(why.contains(says) && why.contains("the image i"), "{words:?}: {why}");
        }
        // What it was made of may be said again, though it was made of more.
        let few = Superblock { open_windows: 3, store_bytes: 1 << 30, ..is.clone() };
        let words = ["--mode", "trace", "--codec", "tree", "--open-windows", "1", "--store-capacity", "1G"];
        plan_on(&few, &words).unwrap();
        let whole = config(&plan(&["--capacity", "512M"]).unwrap()).superblock();
        assert!(plan_on(&whole, &["--capacity", "512M"]).is_ok());
        assert!(plan_on(&whole, &["--capacity", "256M"]).is_err());
        assert!(plan_on(&whole, &["--guest", "a=512M"]).is_err());
        assert!(refused(&["--guest", "shared=1M"]).contains("--shared"));
    }

    #[test]
    fn windows_of_a_pci_device_are_powers_of_two() {
        let on = |image: Option<&Superblock>, words: &[&str]| {
            let mut serve = serve(words).unwrap();
            serve.device.powers_of_two = true;
            let image = image.map(|is| (is, Path::new("i")));
            Plan::new(&serve.partition_table, &serve.device, image).map(|plan| config(&plan))
        };
        let made = on(None, &["--capacity", "512M", "--views-capacity", "1G"]).unwrap();
        on(Some(&made.superblock()), &[]).unwrap();
        for words in [["--capacity", "300M"], ["--views-capacity", "768M"], ["--capacity", "512K"]] {
            let why = on(None, &words).unwrap_err().to_string();
            assert!(why.contains("needs a power of two from 1048576"), "{words:?}: {why}");
        }
        let odd = config(&plan(&["--capacity", "768M"]).unwrap()).superblock();
        assert!(on(Some(&odd), &[]).unwrap_err().to_string().contains("805306368 bytes"));
    }

    #[test]
    fn one_more_view_of_each_tensor_has_room_unless_a_size_is_given() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("m.safetensors");
        let tensor = |n: usize| {
            format!(r#""t{n}":{{"dtype":"BF16","shape":[16],"data_offsets":[{},{}]}}"#, 32 * n, 32 * n + 32)
        };
        let header = format!("{{{}}}", (0..127).map(tensor).collect::<Vec<_>>().join(","));
        let head = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
        std::fs::write(&file, [head, vec![1; 127 * 32]].concat()).unwrap();
        let words = ["--model", file.to_str().unwrap(), "--views", "full,e8m3"];
        let options = serve(&words).unwrap().device.load_options();
        let device = Device::new(plan(&words).unwrap().config(&options).unwrap()).unwrap();
        let model = load::open(&file, &options, None).unwrap();
        let go_on = |_: load::Progress<'_>| std::ops::ControlFlow::Continue(());
        let loaded = load::load_model(&device, &model, &options, go_on).unwrap();
        assert_eq!(loaded.views.len(), 254);
        for tensor in loaded.tensors {
            device.create_view(&tensor.name, "e8m2").unwrap();
        }
    }

    fn plan_fails(words: &[&str]) -> bool {
        plan(words).is_err()
    }
}
