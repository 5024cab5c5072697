//! How a device is divided among guests and hosts: from the command line to partitions, the pairs of files that show them, and what is loaded into them.
//!
//! * Without `--guest` the device is not divided. With it, each guest has a partition, and `--shared` makes one more, named [`SHARED`], for everybody.
//! * What is shared (the whole device, or that partition) is shown by the pair at the mount's root, or, with hosts, by a pair for each host.
//! * `--model` goes to what is shared, a guest's `model=` to its partition.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Result, bail, ensure};
use clap::Args;
use lamina::device::{Device, DeviceConfig, MOST_PARTITIONS, Partition, PartitionConfig};
use lamina::load::{self, LoadOptions};
use lamina::model::ModelFile;
use lamina::serve::{PairOptions, Place};

use crate::args::bytes;

/// The partition that is everybody's.
const SHARED: &str = "shared";
/// QEMU's CXL windows are multiples of this.
const CXL_MULTIPLE: u64 = 256 << 20;

/// Who shares the device, and how.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Several guests on one device")]
pub(crate) struct DivisionArgs {
    /// A guest with a part of the device that is its own: window, tensors, views and control socket; may be given more than once. `quota` bounds what it may store,
    /// `views` is its views window, `model` loads a safetensors file into its part and may be repeated. The capacity is then all parts' together.
    #[arg(
        long = "guest",
        value_name = "NAME=BYTES[,quota=BYTES][,views=BYTES][,model=FILE]",
        conflicts_with = "capacity"
    )]
    guests: Vec<GuestSpec>,
    /// Bytes of a part that is everybody's, besides the guests' own; --views-capacity is then its views window.
    #[arg(long, value_parser = bytes, value_name = "BYTES", requires = "guests")]
    shared: Option<u64>,
    /// So many hosts, h0, h1 and so on, share the device, or its shared part, each with a cache of its own that nobody keeps coherent: stores show at others when they
    /// are flushed, and where these invalidate.
    #[arg(long, value_name = "N", conflicts_with = "host", value_parser = clap::value_parser!(u8).range(1..=16))]
    hosts: Option<u8>,
    /// Such a host by name; may be given more than once.
    #[arg(long, value_name = "NAME")]
    host: Vec<String>,
    /// Bytes of pages that a host's cache holds; each takes as much memory, and twice as much where the host stored into it.
    #[arg(long, value_parser = bytes, default_value = "64M", value_name = "BYTES")]
    host_cache: u64,
}

/// A guest as the command line has it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct GuestSpec {
    name: String,
    bytes: u64,
    quota: Option<u64>,
    views: Option<u64>,
    models: Vec<PathBuf>,
}

impl FromStr for GuestSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form =
            "write NAME=BYTES[,quota=BYTES][,views=BYTES][,model=FILE]…, for example a=256M,quota=128M";
        let mut fields = text.split(',');
        let first = fields.next().and_then(|first| first.split_once('='));
        let (name, size) = first.ok_or_else(|| format!("{text:?} is no guest: {form}"))?;
        let mut guest =
            Self { name: name.to_owned(), bytes: bytes(size)?, quota: None, views: None, models: Vec::new() };
        for field in fields {
            match field.split_once('=') {
                Some(("quota", size)) if guest.quota.is_none() => guest.quota = Some(bytes(size)?),
                Some(("views", size)) if guest.views.is_none() => guest.views = Some(bytes(size)?),
                Some(("model", path)) if !path.is_empty() => guest.models.push(path.into()),
                _ => return Err(format!("guest {name}: {field:?} is none of its options: {form}")),
            }
        }
        Ok(guest)
    }
}

/// A device that is to be served, and to whom.
pub(crate) struct Plan {
    /// What the device is made of, as far as that is decided here.
    pub(crate) config: DeviceConfig,
    /// What is loaded, and where.
    pub(crate) loads: Vec<(ModelFile, LoadOptions)>,
    /// Place, partition and cache of each pair of files.
    pairs: Vec<(Place, String, Option<u64>)>,
}

impl Plan {
    /// Opens the checkpoints and decides.
    pub(crate) fn new(
        args: DivisionArgs,
        models: &[PathBuf],
        options: &LoadOptions,
        capacity: Option<u64>,
        views_capacity: Option<u64>,
    ) -> Result<Self> {
        let divided = !args.guests.is_empty();
        let mut plan = Self { config: DeviceConfig::new(0, 0), loads: Vec::new(), pairs: Vec::new() };
        let mut partitions = Vec::new();
        for guest in args.guests {
            let (_, views_needed) = plan.open(&guest.models, options, Some(&guest.name))?;
            partitions.push(PartitionConfig {
                views_bytes: guest.views.unwrap_or(fitting(views_needed.max(guest.bytes))),
                name: guest.name.clone(),
                base_bytes: guest.bytes,
                quota_bytes: guest.quota,
            });
            plan.pairs.push((Place::Guest(guest.name.clone()), guest.name, None));
        }
        let hosts: Vec<String> = match args.hosts {
            Some(count) => (0..count).map(|n| format!("h{n}")).collect(),
            None => args.host,
        };
        let shared = if divided { SHARED } else { "" };
        let is_shared = !divided || args.shared.is_some();
        ensure!(
            is_shared || hosts.is_empty(),
            "hosts share a part of the device: say with --shared BYTES how large it is"
        );
        ensure!(
            is_shared || models.is_empty(),
            "--model goes to the shared part, and there is none: say --shared BYTES, or load it for a guest with --guest NAME=BYTES,model=FILE"
        );
        ensure!(
            hosts.len() <= MOST_PARTITIONS,
            "{} hosts; a device has at most {MOST_PARTITIONS}",
            hosts.len()
        );
        for name in &hosts {
            let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_".contains(c);
            if name.is_empty() || name.len() > 32 || !name.chars().all(fits) {
                bail!("{name:?} cannot name a host: 1 to 32 lower-case letters, digits, `-` and `_`");
            }
        }
        if is_shared {
            let (base_needed, views_needed) = plan.open(models, options, divided.then_some(shared))?;
            let base_bytes = args.shared.or(capacity).unwrap_or(fitting(base_needed));
            let views_bytes = views_capacity.unwrap_or(fitting(views_needed.max(base_bytes)));
            if divided {
                let name = shared.to_owned();
                partitions.push(PartitionConfig { name, base_bytes, views_bytes, quota_bytes: None });
            } else {
                plan.config = DeviceConfig::new(base_bytes, views_bytes);
            }
            if hosts.is_empty() {
                plan.pairs.push((Place::Root, shared.to_owned(), None));
            }
        }
        if divided {
            plan.config = DeviceConfig::divided(partitions);
        }
        let hosts =
            hosts.into_iter().map(|name| (Place::Host(name), shared.to_owned(), Some(args.host_cache)));
        plan.pairs.extend(hosts);
        let mut names = BTreeSet::new();
        if let Some((place, ..)) = plan.pairs.iter().find(|(place, ..)| !names.insert(place.name())) {
            bail!("{} names two guests or hosts; each has a name of its own", place.name());
        }
        Ok(plan)
    }

    /// Opens checkpoints for a partition: the bytes that they take of either window.
    fn open(
        &mut self,
        models: &[PathBuf],
        options: &LoadOptions,
        partition: Option<&str>,
    ) -> Result<(u64, u64)> {
        let (mut base, mut views) = (0_u64, lamina_abi::DIRECTORY_BYTES);
        for path in models {
            let model = ModelFile::open(path)?;
            base = base.saturating_add(load::base_needed(&model));
            views = views.saturating_add(load::views_needed(&model, options));
            let partition = partition.map(str::to_owned);
            self.loads.push((model, LoadOptions { partition, ..options.clone() }));
        }
        Ok((base, views))
    }

    /// The pairs of files of `device`, which was made as planned.
    pub(crate) fn pairs(&self, device: &Arc<Device>) -> Result<Vec<PairOptions>> {
        let pair = |(place, partition, cache_bytes): &(Place, String, Option<u64>)| {
            let Some(partition) = Partition::named(device, partition) else {
                bail!("the device has no partition {partition:?}");
            };
            Ok(PairOptions { place: place.clone(), partition, cache_bytes: *cache_bytes })
        };
        self.pairs.iter().map(pair).collect()
    }
}

/// A window that QEMU takes and that holds so many bytes.
fn fitting(bytes: u64) -> u64 {
    bytes.max(1).checked_next_multiple_of(CXL_MULTIPLE).unwrap_or(bytes)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    /// The plan for `lamina serve --mount m` and these.
    fn plan(words: &[&str]) -> Result<Plan> {
        let cli = Cli::try_parse_from(["lamina", "serve", "--mount", "m"].iter().chain(words))?;
        let Command::Serve(serve) = cli.command else { bail!("another command") };
        let device = serve.device;
        let options = LoadOptions::default();
        Plan::new(serve.division, &device.models, &options, device.capacity, device.views_capacity)
    }

    fn refused(words: &[&str]) -> String {
        plan(words).err().unwrap().to_string()
    }

    #[test]
    fn a_device_alone_has_one_pair_and_no_partitions() {
        let plan = plan(&["--capacity", "512M"]).unwrap();
        assert_eq!((plan.config.base_bytes, plan.config.views_bytes), (512 << 20, 512 << 20));
        assert!(plan.config.partitions.is_empty());
        assert_eq!(plan.pairs, [(Place::Root, String::new(), None)]);
    }

    #[test]
    fn guests_have_partitions_and_pairs_of_their_own() {
        let words =
            ["--guest", "a=1G,quota=64M", "--guest", "b=256M,views=512M", "--shared", "32M", "--host", "x"];
        let plan = plan(&words).unwrap();
        let sizes: Vec<_> = plan
            .config
            .partitions
            .iter()
            .map(|part| (part.name.as_str(), part.base_bytes >> 20, part.views_bytes >> 20, part.quota_bytes))
            .collect();
        let expected = [("a", 1024, 1024, Some(64 << 20)), ("b", 256, 512, None), ("shared", 32, 256, None)];
        assert_eq!(sizes, expected);
        assert_eq!(plan.config.base_bytes, (1024 + 256 + 32) << 20);
        let guest = |name: &str| (Place::Guest(name.into()), name.to_owned(), None);
        let host = (Place::Host("x".into()), "shared".to_owned(), Some(64 << 20));
        assert_eq!(plan.pairs, [guest("a"), guest("b"), host]);
        let device = Arc::new(Device::new(plan.config.clone()).unwrap());
        assert_eq!(plan.pairs(&device).unwrap()[2].partition.base(), 1280 << 20..1312 << 20);
    }

    #[test]
    fn hosts_share_what_is_not_a_guests() {
        let plan = plan(&["--hosts", "2", "--host-cache", "1M"]).unwrap();
        let host = |name: &str| (Place::Host(name.into()), String::new(), Some(1 << 20));
        assert_eq!(plan.pairs, [host("h0"), host("h1")]);
        assert!(refused(&["--guest", "a=1M", "--hosts", "2"]).contains("--shared BYTES"));
        assert!(refused(&["--guest", "a=1M", "--model", "m"]).contains("model=FILE"));
        assert!(refused(&["--host", "x", "--host", "x"]).contains("x names two"));
        assert!(refused(&["--guest", "x=1M", "--shared", "1M", "--host", "x"]).contains("x names two"));
        assert!(refused(&["--host", "../x"]).contains("cannot name a host"));
        for words in [["--hosts", "0"], ["--hosts", "17"], ["--shared", "1M"]] {
            assert!(plan_fails(&words), "{words:?}");
        }
    }

    fn plan_fails(words: &[&str]) -> bool {
        plan(words).is_err()
    }

    #[test]
    fn guests_are_read_as_documented() {
        let read = |text: &str| text.parse::<GuestSpec>();
        let full = read("a=256M,quota=1G,views=4G,model=x,model=y").unwrap();
        assert_eq!((full.name.as_str(), full.bytes, full.quota), ("a", 256 << 20, Some(1 << 30)));
        assert_eq!((full.views, full.models), (Some(4 << 30), vec!["x".into(), "y".into()]));
        for text in
            ["", "a", "a=", "a=x", "a=1M,", "a=1M,quota", "a=1M,quota=1M,quota=1M", "a=1M,model=", "a=1M,b=1"]
        {
            assert!(read(text).is_err(), "{text}");
        }
    }
}
