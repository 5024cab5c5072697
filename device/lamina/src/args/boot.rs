//! `lamina boot`.

use std::path::PathBuf;

use clap::{Arg, Args, Command, Id};
use lamina_qemu::{Accel, AttachKind};

use super::DeviceArgs;
use super::values::{accel, bytes, put};

/// The options of a device, without `but`, and `others`. An option that names a device which is
/// there conflicts with them: they would be ignored, and an --image would keep nothing.
fn device_options(but: &[&str], others: &[&'static str]) -> Vec<Id> {
    let command = DeviceArgs::augment_args(Command::new("boot"));
    let options = command.get_arguments().map(Arg::get_id).filter(|id| !but.contains(&id.as_str()));
    options.cloned().chain(others.iter().copied().map(Id::from)).collect()
}

/// Boot a guest that sees a device as CXL memory, as disks, as shared memory of PCI devices, or as
/// a file system.
///
/// Starts a device as `serve` does, or takes one that is being served, and boots Debian's kernel in
/// QEMU with the two windows as two cxl-type3 devices: base first, views second. Without a script
/// you get a shell, with lamina-shim in it. KVM is used where it works, emulation elsewhere. A QEMU
/// older than 11.1 will not do; without one, one is unpacked from Debian's packages. With --attach
/// vhost-user the windows are two virtio disks, and QEMU 7.2 will do. With --attach ivshmem they
/// are the memory of two PCI devices, whose sizes are powers of two, and a third one carries
/// requests: the guest needs neither CXL nor a serial port. With --attach shmem a virtio device
/// maps what the guest asks for, and a driver of ours, built for its kernel, gives /dev/lamina0.
/// With --attach virtiofs the guest has the mount as a file system, models and windows:
/// `mount -t virtiofs lamina /mnt`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  A shell on a device with a checkpoint in it; then, in the guest, `lamina-shim up` and `lamina-shim list`:
      lamina boot --model model.safetensors --views full,e8m3
  A script of your own, with a program of your own (linked statically) beside it:
      lamina boot --model model.safetensors --put ./reader=/bin/reader --script ./test.sh
  On a device that is being served already:
      lamina boot --base ~/lamina/base --views-file ~/lamina/views --ctl /run/lamina/ctl.sock
  As disks, of a device that is being served with --vhost-user /run/lamina/disks:
      lamina boot --attach vhost-user --disk /run/lamina/disks/base.sock --disk /run/lamina/disks/views.sock
  As an interleave set of two CXL memory devices:
      lamina boot --interleave 2x256 --model model.safetensors --views full,e8m3
  As shared memory, or several guests at once, with all options in a file:
      lamina boot --topology docs/topology.toml
  Lines of 64 bytes that a guest touches, for a trace that `lamina compare` judges:
      lamina boot --model model.safetensors --script ./work.sh --record-lines work.trace
  Only say what would be started, for a QEMU command line of your own:
      lamina boot --base ~/lamina/base --views-file ~/lamina/views --print-command")]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub(crate) struct Boot {
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    /// Take all of this from a file of TOML: docs/topology.toml is an example.
    #[arg(long, value_name = "FILE")]
    pub(crate) topology: Option<PathBuf>,
    /// How the guest sees the device: cxl, vhost-user, ivshmem, shmem or virtiofs.
    #[arg(long, default_value_t, value_name = "HOW")]
    pub(crate) attach: AttachKind,
    /// The directory to mount on [default: a temporary one].
    #[arg(long, value_name = "DIR", conflicts_with_all = ["base", "disks"])]
    pub(crate) mount: Option<PathBuf>,
    /// With --attach vhost-user: the socket of a disk that is being served; may be given more than
    /// once.
    #[arg(long = "disk", value_name = "SOCKET", group = "of_ctl")]
    #[arg(conflicts_with_all = device_options(&[], &["base"]))]
    pub(crate) disks: Vec<PathBuf>,
    /// The partition of this guest, or the files of this host, of a device that is being served
    /// with this --run-dir.
    #[arg(long, alias = "host", value_name = "NAME")]
    #[arg(conflicts_with_all = device_options(&["run_dir"], &["base", "disks", "mount"]))]
    #[arg(conflicts_with_all = ["ctl", "shmem"])]
    pub(crate) guest: Option<String>,
    /// With --attach ivshmem and --base: the socket of the mailboxes that `lamina serve --ivshmem`
    /// serves [default: one is served here, if --ctl is given].
    #[arg(long, value_name = "SOCKET", requires = "base", conflicts_with = "ctl")]
    pub(crate) mailbox: Option<PathBuf>,
    /// With --attach shmem: the socket that `lamina serve --vhost-user-shmem` serves [default: one
    /// is served here].
    #[arg(long, value_name = "SOCKET")]
    #[arg(conflicts_with_all = device_options(&[], &["base", "mount"]))]
    pub(crate) shmem: Option<PathBuf>,
    /// The base window of a device that is being served, or any file of the size.
    #[arg(long, value_name = "FILE", requires = "views_file")]
    #[arg(conflicts_with_all = device_options(&["interleave"], &[]))]
    #[arg(group = "of_ctl", group = "of_views")]
    pub(crate) base: Option<PathBuf>,
    /// The views window of that device.
    #[arg(long, value_name = "FILE", requires = "of_views")]
    pub(crate) views_file: Option<PathBuf>,
    /// The socket for guests of that device, or of the one whose disks these are.
    #[arg(long, value_name = "SOCKET", requires = "of_ctl")]
    pub(crate) ctl: Option<PathBuf>,
    /// A shell script to run in the guest instead of an interactive shell; its exit status becomes
    /// this program's.
    #[arg(long, value_name = "FILE")]
    pub(crate) script: Option<PathBuf>,
    /// A file to put into the guest; may be given more than once.
    #[arg(long, value_name = "HOST=GUEST", value_parser = put)]
    pub(crate) put: Vec<(PathBuf, String)>,
    /// Put fio, stress-ng, memtester and numactl into the guest.
    #[arg(long)]
    pub(crate) extras: bool,
    /// Put Python with NumPy and safetensors, numactl, cxl and daxctl into the guest.
    #[arg(long)]
    pub(crate) python: bool,
    /// MiB of the guest's ordinary memory [default: enough for windows of this size].
    #[arg(long, value_name = "MIB")]
    pub(crate) memory: Option<u64>,
    /// The guest's processors.
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub(crate) cpus: u32,
    /// How to run the guest: kvm or tcg [default: kvm where it works].
    #[arg(long, value_name = "ACCEL", value_parser = accel)]
    pub(crate) accel: Option<Accel>,
    /// Let QEMU have huge pages for the windows: on a mount it then reads megabytes for a byte.
    #[arg(long)]
    pub(crate) huge_pages: bool,
    /// Record which lines of the windows the guest touches, as a trace in a new file. The guest is
    /// emulated, and the device is one that this starts, as CXL memory or by ivshmem.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["guest", "base", "disks", "shmem", "print_command", "topology"])]
    #[arg(group = "recording")]
    pub(crate) record_lines: Option<PathBuf>,
    /// The modelled cache of each of the guest's processors, of eight ways, before which lines are
    /// not recorded: a power of two, or 0 to record every load and store.
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value = "2M")]
    #[arg(requires = "recording")]
    pub(crate) lines_cache: u64,
    /// Print the command that starts QEMU, and end.
    #[arg(long)]
    pub(crate) print_command: bool,
    /// More options for QEMU.
    #[arg(last = true, value_name = "QEMU OPTION")]
    pub(crate) qemu: Vec<String>,
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::Cli;

    /// An option and a value that it takes.
    fn given(option: &Arg) -> Vec<String> {
        let long = option.get_long().unwrap();
        if !option.get_action().takes_values() || option.is_require_equals_set() {
            return vec![format!("--{long}")];
        }
        let value = match long {
            "mode" => "trace",
            "codec" => "tree",
            "interleave" => "2x256",
            "tcp" => "127.0.0.1:0",
            "write-back-with" => "msync",
            "kv" => "*.k=64",
            "format" => "*=bf16",
            "model-base" => "a=b",
            _ => "4",
        };
        vec![format!("--{long}"), value.to_owned()]
    }

    fn refused(words: &[&str]) -> Option<String> {
        let why = Cli::try_parse_from([&["lamina", "boot"], words].concat()).err()?;
        assert_eq!(why.exit_code(), 2, "{words:?}");
        Some(why.to_string())
    }

    #[test]
    fn an_option_of_a_device_is_refused_where_none_is_started() {
        let ways: [(&[&str], &str); 4] = [
            (&["--base", "b", "--views-file", "v"], "interleave"),
            (&["--disk", "d"], ""),
            (&["--guest", "g"], "run-dir"),
            (&["--shmem", "s"], ""),
        ];
        let command = DeviceArgs::augment_args(Command::new("boot"));
        let options: Vec<_> = command.get_arguments().collect();
        assert!(options.len() >= 30, "{} options", options.len());
        for (way, taken) in ways {
            assert_eq!(refused(way), None);
            for option in &options {
                let given = given(option);
                let words: Vec<_> = way.iter().copied().chain(given.iter().map(String::as_str)).collect();
                match refused(&words) {
                    None => assert_eq!(option.get_long(), Some(taken), "{words:?}"),
                    Some(why) => assert!(
                        why.contains("cannot be used with")
                            && why.contains(&given[0])
                            && why.contains(way[0]),
                        "{words:?}: {why}"
                    ),
                }
            }
        }
    }

    #[test]
    fn an_option_that_goes_with_another_is_refused_without() {
        for (words, named) in [
            (&["--ctl", "c"][..], "--base"),
            (&["--shmem", "s", "--ctl", "c"], "--base"),
            (&["--lines-cache", "4K"], "--record-lines"),
            (&["--guest", "g", "--lines-cache", "4K"], "--record-lines"),
            (&["--disk", "d", "--views-file", "v"], "--base"),
            (&["--guest", "g", "--views-file", "v"], "--base"),
            (&["--base", "b"], "--views-file"),
            (&["--guest", "g", "--shmem", "s"], "--shmem"),
        ] {
            let why = refused(words).unwrap_or_default();
            assert!(why.contains(named), "{words:?}: {why}");
        }
        for words in [
            &["--base", "b", "--views-file", "v", "--ctl", "c"][..],
            &["--disk", "d", "--disk", "e", "--ctl", "c"],
            &["--record-lines", "r", "--lines-cache", "4K"],
        ] {
            assert_eq!(refused(words), None, "{words:?}");
        }
    }
}
