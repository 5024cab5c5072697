//! `lamina boot`.

use std::path::PathBuf;

use clap::Args;
use lamina_qemu::{Accel, AttachKind};

use super::DeviceArgs;
use super::values::{accel, bytes, put};

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
    #[arg(long = "disk", value_name = "SOCKET", conflicts_with = "base")]
    pub(crate) disks: Vec<PathBuf>,
    /// The partition of this guest, or the files of this host, of a device that is being served
    /// with this --run-dir.
    #[arg(long, alias = "host", value_name = "NAME", conflicts_with_all = ["base", "disks", "mount", "ctl", "models"])]
    pub(crate) guest: Option<String>,
    /// With --attach ivshmem and --base: the socket of the mailboxes that `lamina serve --ivshmem`
    /// serves [default: one is served here, if --ctl is given].
    #[arg(long, value_name = "SOCKET", requires = "base", conflicts_with = "ctl")]
    pub(crate) mailbox: Option<PathBuf>,
    /// With --attach shmem: the socket that `lamina serve --vhost-user-shmem` serves [default: one
    /// is served here].
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["base", "mount"])]
    pub(crate) shmem: Option<PathBuf>,
    /// The base window of a device that is being served, or any file of the size.
    #[arg(long, value_name = "FILE", requires = "views_file")]
    pub(crate) base: Option<PathBuf>,
    /// The views window of that device.
    #[arg(long, value_name = "FILE", requires = "base")]
    pub(crate) views_file: Option<PathBuf>,
    /// The socket for guests of that device.
    #[arg(long, value_name = "SOCKET")]
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
    pub(crate) record_lines: Option<PathBuf>,
    /// The modelled cache of each of the guest's processors, of eight ways, before which lines are
    /// not recorded: a power of two, or 0 to record every load and store.
    #[arg(long, value_name = "BYTES", value_parser = bytes, default_value = "2M", requires = "record_lines")]
    pub(crate) lines_cache: u64,
    /// Print the command that starts QEMU, and end.
    #[arg(long)]
    pub(crate) print_command: bool,
    /// More options for QEMU.
    #[arg(last = true, value_name = "QEMU OPTION")]
    pub(crate) qemu: Vec<String>,
}
