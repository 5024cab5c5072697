//! Who shares a device, as the command line says it. What comes of that is a
//! [plan](crate::partition_table::Plan).

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;

use super::values::bytes;

/// Who shares the device, and how.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Several guests on one device")]
pub(crate) struct PartitionArgs {
    /// A guest with a partition of the device: window, tensors, views and control socket of its
    /// own; may be given more than once. `quota` bounds what it may store, `views` is its views
    /// window, `model` loads a safetensors file into its partition and may be repeated, `disks`
    /// serves its windows as disks too, on sockets in that directory. The capacity is then all
    /// partitions' together.
    #[arg(
        long = "guest",
        value_name = "NAME=BYTES[,quota=BYTES][,views=BYTES][,model=FILE][,disks=DIR]",
        conflicts_with = "capacity",
        requires = "mount"
    )]
    pub(crate) guests: Vec<GuestSpec>,
    /// Bytes of a partition that is everybody's, besides the guests' own; --views-capacity is then
    /// its views window.
    #[arg(long, value_parser = bytes, value_name = "BYTES", requires = "guests")]
    pub(crate) shared: Option<u64>,
    /// So many hosts, h0, h1 and so on, share the device, or its shared partition, each with a
    /// cache of its own that nobody keeps coherent: stores show at others when they are flushed,
    /// and where these invalidate.
    #[arg(long, value_name = "N", conflicts_with = "host", group = "any_host", requires = "mount", value_parser = clap::value_parser!(u8).range(1..=16))]
    pub(crate) hosts: Option<u8>,
    /// Such a host by name; may be given more than once.
    #[arg(long, value_name = "NAME", group = "any_host", requires = "mount")]
    pub(crate) host: Vec<String>,
    /// Bytes of pages that a host's cache holds; each takes as much memory, and twice as much where
    /// the host stored into it.
    #[arg(long, value_parser = bytes, default_value = "64M", requires = "any_host", value_name = "BYTES")]
    pub(crate) host_cache: u64,
}

/// A guest as the command line has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GuestSpec {
    pub(crate) name: String,
    pub(crate) bytes: u64,
    pub(crate) quota: Option<u64>,
    pub(crate) views: Option<u64>,
    pub(crate) models: Vec<PathBuf>,
    pub(crate) disks: Option<PathBuf>,
}

impl FromStr for GuestSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = "write NAME=BYTES[,quota=BYTES][,views=BYTES][,model=FILE]…[,disks=DIR], for example a=256M,quota=128M";
        let mut fields = text.split(',');
        let first = fields.next().and_then(|first| first.split_once('='));
        let (name, size) = first.ok_or_else(|| format!("{text:?} is no guest: {form}"))?;
        let (name, bytes_of) = (name.to_owned(), bytes(size)?);
        let mut guest =
            Self { name, bytes: bytes_of, quota: None, views: None, models: Vec::new(), disks: None };
        for field in fields {
            match field.split_once('=') {
                Some(("quota", size)) if guest.quota.is_none() => guest.quota = Some(bytes(size)?),
                Some(("views", size)) if guest.views.is_none() => guest.views = Some(bytes(size)?),
                Some(("model", path)) if !path.is_empty() => guest.models.push(path.into()),
                Some(("disks", path)) if !path.is_empty() && guest.disks.is_none() => {
                    guest.disks = Some(path.into());
                }
                _ => return Err(format!("guest {}: {field:?} is none of its options: {form}", guest.name)),
            }
        }
        Ok(guest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
