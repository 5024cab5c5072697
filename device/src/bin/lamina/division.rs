//! How a device is divided among guests and hosts: from the command line to partitions, the pairs of files that show them, and what is loaded into them.
//!
//! * Without `--guest` the device is not divided. With it, each guest has a partition, and `--shared` makes one more, named [`SHARED`], for everybody.
//! * What is shared (the whole device, or that partition) is shown by the pair at the mount's root, or, with hosts, by a pair for each host.
//! * `--model` goes to what is shared, a guest's `model=` to its partition.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use lamina::device::{Device, DeviceConfig, MOST_PARTITIONS, Partition, PartitionConfig};
use lamina::load::{self, LoadOptions};
use lamina::model::ModelFile;
use lamina::serve::{PairOptions, Place};

use crate::args::{DeviceArgs, bytes};

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

/// A pair of files that is to be shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SeatPlan {
    pub(crate) place: Place,
    /// The name of its partition.
    partition: String,
    cache_bytes: Option<u64>,
}

impl SeatPlan {
    /// The pair, of `device`.
    pub(crate) fn pair(&self, device: &Arc<Device>) -> Result<PairOptions> {
        let partition = Partition::named(device, &self.partition)
            .with_context(|| format!("the device has no partition {:?}", self.partition))?;
        Ok(PairOptions { place: self.place.clone(), partition, cache_bytes: self.cache_bytes })
    }
}

impl DivisionArgs {
    fn divided(&self) -> bool {
        !self.guests.is_empty()
    }

    /// Whether there is a part that is everybody's.
    fn shares(&self) -> bool {
        !self.divided() || self.shared.is_some()
    }

    /// The partition that is everybody's.
    fn shared_name(&self) -> &'static str {
        if self.divided() { SHARED } else { "" }
    }

    /// The pairs of files.
    ///
    /// # Errors
    /// When two have one name, or a name cannot be one.
    pub(crate) fn seats(&self) -> Result<Vec<SeatPlan>> {
        let hosts: Vec<String> = match self.hosts {
            Some(count) => (0..count).map(|n| format!("h{n}")).collect(),
            None => self.host.clone(),
        };
        ensure!(
            self.shares() || hosts.is_empty(),
            "hosts share a part of the device: say with --shared BYTES how large it is"
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
        let guest = |guest: &GuestSpec| SeatPlan {
            place: Place::Guest(guest.name.clone()),
            partition: guest.name.clone(),
            cache_bytes: None,
        };
        let mut seats: Vec<_> = self.guests.iter().map(guest).collect();
        let partition = self.shared_name().to_owned();
        if self.shares() && hosts.is_empty() {
            seats.push(SeatPlan { place: Place::Root, partition: partition.clone(), cache_bytes: None });
        }
        seats.extend(hosts.into_iter().map(|name| SeatPlan {
            place: Place::Host(name),
            partition: partition.clone(),
            cache_bytes: Some(self.host_cache),
        }));
        let mut names = BTreeSet::new();
        if let Some(seat) = seats.iter().find(|seat| !names.insert(seat.place.name())) {
            bail!("{} names two guests or hosts; each has a name of its own", seat.place.name());
        }
        Ok(seats)
    }

    /// The windows of the device: as large as asked, or as the checkpoints need.
    ///
    /// # Errors
    /// When a checkpoint cannot be read, or has no place to go.
    pub(crate) fn config(&self, device: &DeviceArgs) -> Result<DeviceConfig> {
        let options = device.load_options();
        let mut partitions = Vec::new();
        for guest in &self.guests {
            let (_, views_needed) = needed(&guest.models, &options)?;
            partitions.push(PartitionConfig {
                name: guest.name.clone(),
                base_bytes: guest.bytes,
                views_bytes: guest.views.unwrap_or(fitting(views_needed.max(guest.bytes))),
                quota_bytes: guest.quota,
            });
        }
        ensure!(
            self.shares() || device.models.is_empty(),
            "--model goes to the shared part, and there is none: say --shared BYTES, or load it for a guest with --guest NAME=BYTES,model=FILE"
        );
        let (base_needed, views_needed) = needed(&device.models, &options)?;
        let base_bytes = self.shared.or(device.capacity).unwrap_or(fitting(base_needed));
        let views_bytes = device.views_capacity.unwrap_or(fitting(views_needed.max(base_bytes)));
        if !self.divided() {
            return Ok(DeviceConfig::new(base_bytes, views_bytes));
        }
        if self.shared.is_some() {
            let name = SHARED.to_owned();
            partitions.push(PartitionConfig { name, base_bytes, views_bytes, quota_bytes: None });
        }
        Ok(DeviceConfig::divided(partitions))
    }

    /// Refuses an image that is divided otherwise; one that is there keeps its sizes and quotas.
    ///
    /// # Errors
    /// When its partitions are not those asked for.
    pub(crate) fn fits(&self, partitions: &[PartitionConfig], image: &Path) -> Result<()> {
        let there: Vec<_> = partitions.iter().map(|part| (part.name.as_str(), part.base_bytes)).collect();
        let mut asked: Vec<_> = self.guests.iter().map(|guest| (guest.name.as_str(), guest.bytes)).collect();
        asked.extend(self.shared.map(|bytes| (SHARED, bytes)));
        let list = |parts: &[(&str, u64)]| {
            let parts: Vec<_> = parts.iter().map(|(name, bytes)| format!("{name}={bytes}")).collect();
            if parts.is_empty() { "not divided".to_owned() } else { parts.join(", ") }
        };
        ensure!(
            there == asked,
            "the image {} is {}, and asked for is {}; an image stays as it was divided",
            image.display(),
            list(&there),
            list(&asked)
        );
        Ok(())
    }

    /// What is loaded, and into which partition of a divided device.
    pub(crate) fn loads(&self, models: &[PathBuf]) -> Vec<(PathBuf, Option<String>)> {
        let own = self
            .guests
            .iter()
            .flat_map(|guest| guest.models.iter().map(|model| (model.clone(), Some(guest.name.clone()))));
        let shared = self.divided().then(|| SHARED.to_owned());
        own.chain(models.iter().map(|model| (model.clone(), shared.clone()))).collect()
    }
}

/// The bytes that checkpoints take of either window.
fn needed(models: &[PathBuf], options: &LoadOptions) -> Result<(u64, u64)> {
    let (mut base, mut views) = (0_u64, lamina_abi::DIRECTORY_BYTES);
    for path in models {
        let model = ModelFile::open(path)?;
        base = base.saturating_add(load::base_needed(&model));
        views = views.saturating_add(load::views_needed(&model, options));
    }
    Ok((base, views))
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

    /// The seats and the device for `lamina serve --mount m` and these.
    fn plan(words: &[&str]) -> Result<(Vec<SeatPlan>, DeviceConfig)> {
        let cli = Cli::try_parse_from(["lamina", "serve", "--mount", "m"].iter().chain(words))?;
        let Command::Serve(serve) = cli.command else { bail!("another command") };
        Ok((serve.division.seats()?, serve.division.config(&serve.device)?))
    }

    fn refused(words: &[&str]) -> String {
        plan(words).err().unwrap().to_string()
    }

    fn seat(place: Place, partition: &str, cache_bytes: Option<u64>) -> SeatPlan {
        SeatPlan { place, partition: partition.to_owned(), cache_bytes }
    }

    #[test]
    fn a_device_alone_has_one_pair_and_no_partitions() {
        let (seats, config) = plan(&["--capacity", "512M"]).unwrap();
        assert_eq!((config.base_bytes, config.views_bytes), (512 << 20, 512 << 20));
        assert!(config.partitions.is_empty());
        assert_eq!(seats, [seat(Place::Root, "", None)]);
    }

    #[test]
    fn guests_have_partitions_and_pairs_of_their_own() {
        let words =
            ["--guest", "a=1G,quota=64M", "--guest", "b=256M,views=512M", "--shared", "32M", "--host", "x"];
        let (seats, config) = plan(&words).unwrap();
        let size = |part: &PartitionConfig| {
            (part.name.clone(), part.base_bytes >> 20, part.views_bytes >> 20, part.quota_bytes)
        };
        let sizes: Vec<_> = config.partitions.iter().map(size).collect();
        let expected = [
            ("a".to_owned(), 1024, 1024, Some(64 << 20)),
            ("b".to_owned(), 256, 512, None),
            ("shared".to_owned(), 32, 256, None),
        ];
        assert_eq!(sizes, expected);
        assert_eq!(config.base_bytes, (1024 + 256 + 32) << 20);
        let guest = |name: &str| seat(Place::Guest(name.into()), name, None);
        let host = seat(Place::Host("x".into()), "shared", Some(64 << 20));
        assert_eq!(seats, [guest("a"), guest("b"), host]);
        let device = Arc::new(Device::new(config).unwrap());
        assert_eq!(seats[2].pair(&device).unwrap().partition.base(), 1280 << 20..1312 << 20);
    }

    #[test]
    fn hosts_share_what_is_not_a_guests() {
        let (seats, _) = plan(&["--hosts", "2", "--host-cache", "1M"]).unwrap();
        let host = |name: &str| seat(Place::Host(name.into()), "", Some(1 << 20));
        assert_eq!(seats, [host("h0"), host("h1")]);
        assert!(refused(&["--guest", "a=1M", "--hosts", "2"]).contains("--shared BYTES"));
        assert!(refused(&["--guest", "a=1M", "--model", "m"]).contains("model=FILE"));
        assert!(refused(&["--host", "x", "--host", "x"]).contains("x names two"));
        assert!(refused(&["--guest", "x=1M", "--shared", "1M", "--host", "x"]).contains("x names two"));
        assert!(refused(&["--host", "../x"]).contains("cannot name a host"));
        for words in [["--hosts", "0"], ["--hosts", "17"], ["--shared", "1M"]] {
            assert!(plan(&words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn an_image_stays_as_it_was_divided() {
        let words = ["lamina", "serve", "--mount", "m", "--guest", "a=1M,quota=1M", "--shared", "2M"];
        let Command::Serve(serve) = Cli::try_parse_from(words).unwrap().command else { panic!("another") };
        let part = |name: &str, base_bytes| PartitionConfig {
            name: name.into(),
            base_bytes,
            views_bytes: 4 << 20,
            quota_bytes: None,
        };
        let fits = |parts: &[PartitionConfig]| {
            serve.division.fits(parts, Path::new("i")).map_err(|why| why.to_string())
        };
        assert_eq!(fits(&[part("a", 1 << 20), part("shared", 2 << 20)]), Ok(()));
        assert!(fits(&[part("a", 1 << 20)]).unwrap_err().contains("a=1048576, shared=2097152"));
        assert!(fits(&[]).unwrap_err().contains("not divided"));
        let models = ["m".into()];
        assert_eq!(serve.division.loads(&models), [("m".into(), Some("shared".to_owned()))]);
        assert_eq!(DivisionArgs::default().loads(&models), [("m".into(), None)]);
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
