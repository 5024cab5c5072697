//! The command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use lamina::codec::{Codec, UnknownCodec};
use lamina::device::MOST_OPEN_WINDOWS;
use lamina::format::Format;
use lamina::kv::{KvLayout, Shape};
use lamina::load::{FormatRule, KvRule, LoadOptions};
use lamina::mode::Mode;
use lamina::serve::Shows;
use lamina::serve::launder::LaunderWith;
use lamina_qemu::{Accel, AttachKind};

use crate::division::DivisionArgs;
use crate::several::SeveralArgs;

/// A CXL Type-3 memory device in user space: tensors as compressed bit-planes, precision views by address alias.
#[derive(Debug, Parser)]
#[command(
    version,
    propagate_version = true,
    after_help = "\
Examples:
  Serve 256 MiB with a checkpoint in it and two reduced views of every tensor that can give them:
      lamina serve --capacity 256M --mount /tmp/lamina --model model.safetensors --views full,e8m3,fp8_e4m3fn
  Look at it, from another terminal:
      lamina views
      lamina stats
  Make one more view while it runs:
      lamina view add model.layers.0.self_attn.q_proj.weight e8m3+g2:packed
  Make stores to the base window visible in every view:
      lamina flush
  See whether the store fills up, and make room:
      lamina events
      lamina discard old.k
  See what bit-planes and codecs make of a checkpoint, without serving it:
      lamina analyze model.safetensors --plot planes.svg"
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Serve(Box<Serve>),
    Boot(Box<Boot>),
    /// Show the counters of a device that is being served.
    Stats(Client),
    /// List the tensors of a device that is being served.
    Tensors(Client),
    /// List the views of a device that is being served.
    Views(Client),
    /// List the disks of a device that is being served.
    Disks(Client),
    /// List the pairs of files that a device shows, whose they are, and the sockets for their guests.
    Guests(Client),
    /// Make and list views.
    #[command(subcommand)]
    View(View),
    Flush(Flush),
    Discard(Discard),
    /// Tell what happened to a device that is being served: how full it is, what found no room, what was lost.
    Events(Client),
    /// List poisoned blocks, poison some, or clear them.
    #[command(subcommand)]
    Poison(Poison),
    Upgrade(Upgrade),
    /// Save a device to one file, or make an image of such a file, on this machine or another.
    #[command(subcommand)]
    Snapshot(Snapshot),
    Analyze(Analyze),
}

/// Serve a device: mount its two windows, or serve them as disks, load checkpoints, answer the API and guests, until SIGINT or SIGTERM.
///
/// The mount shows two files: `base`, the capacity window, and `views`, the aperture with the directory and all views. Give
/// both to QEMU as memory-backend-file with share=on. A line on standard output says when they are ready. With --guest or --host
/// each guest or host has two such files and a control socket of its own.
///
/// With --vhost-user the windows are virtio disks (vhost-user-blk), with or without a mount: `base`, which can be written, and `views`,
/// which cannot, with a partition for each view. They need no driver in the guest, and no CXL.
#[derive(Debug, Args)]
#[command(after_help = "\
Two guests with a gigabyte each, of which one may store half a gigabyte; then, from two other terminals, boot one on each part:
    lamina serve --mount /tmp/lamina --guest alice=1G,quota=512M --guest bob=1G,model=model.safetensors
    lamina boot --guest alice            lamina boot --guest bob
Two hosts that share a region and are not coherent, as CXL 2.0 leaves them:
    lamina serve --mount /tmp/lamina --capacity 256M --host one --host two

Sizes take K, M, G and T (powers of 1024). QEMU's CXL windows are multiples of 256M.

Disks: DIR makes DIR/base.sock and DIR/views.sock. SOCKET=base, SOCKET=views and SOCKET=TENSOR,VIEW make one disk each; the last shows
one view from offset 0 on. Give a socket to QEMU with
      -object memory-backend-memfd,id=ram,share=on,size=1G -numa node,memdev=ram
      -chardev socket,id=disk0,path=SOCKET,reconnect-ms=100 -device vhost-user-blk-pci,chardev=disk0,num-queues=2
In the guest they have the serial numbers lamina-base, lamina-views and lamina-vN; `lamina disks` and the ready line list them.

Views: full · eXmY keeps X exponent and Y mantissa bits · +gN rounds with N more bits fetched · :packed packs the elements ·
bf16 fp8_e4m3fn fp8_e5m2 convert · int4 int2 of int8. A view that a tensor's format cannot give is skipped and listed.")]
pub(crate) struct Serve {
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    #[command(flatten)]
    pub(crate) division: DivisionArgs,
    /// The directory to mount on; made if it is missing.
    #[arg(long, value_name = "DIR", required_unless_present = "vhost_user")]
    pub(crate) mount: Option<PathBuf>,
    /// Serve disks: a directory for the sockets of both windows, or one socket and what its disk shows; may be given more than once.
    #[arg(long, value_name = "DIR|SOCKET=WHAT", value_parser = disks)]
    pub(crate) vhost_user: Vec<DiskArg>,
    /// Serve mailboxes on this socket, for guests that see the mount as shared memory of PCI devices: the chardev of an
    /// ivshmem-doorbell. The windows' sizes must be powers of two then, and are unless given.
    #[arg(long, value_name = "SOCKET", requires = "mount")]
    pub(crate) ivshmem: Option<PathBuf>,
    /// Serve a virtio device on this socket whose shared-memory region holds what of the windows a guest has mapped: the chardev of QEMU's
    /// vhost-user-test-device-pci (11.1). The guest needs the driver in driver-shim/kernel.
    #[arg(long, value_name = "SOCKET", requires = "mount")]
    pub(crate) vhost_user_shmem: Option<PathBuf>,
    /// Print the ready line as JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What a device is made of and where it listens.
#[derive(Debug, Args)]
pub(crate) struct DeviceArgs {
    /// Bytes of the base window [default: what the checkpoints take, at least 256M].
    #[arg(long, value_parser = bytes, value_name = "BYTES")]
    pub(crate) capacity: Option<u64>,
    /// Bytes of the views window [default: the capacity, or more if the views take more].
    #[arg(long, value_parser = bytes, value_name = "BYTES")]
    pub(crate) views_capacity: Option<u64>,
    /// The device: trace (bit-planes), gcomp (compressed words) or plain (words).
    #[arg(long, default_value_t, value_name = "MODE")]
    pub(crate) mode: Mode,
    /// The codec: lz4, zstd or tree.
    #[arg(long, default_value_t, value_name = "CODEC")]
    pub(crate) codec: Codec,
    /// A safetensors file to load; may be given more than once.
    #[arg(long = "model", value_name = "FILE")]
    pub(crate) models: Vec<PathBuf>,
    /// Views to make of every tensor, separated by commas; none if empty.
    #[arg(long, value_delimiter = ',', default_value = "full", value_name = "LIST")]
    pub(crate) views: Vec<String>,
    /// Tensors that are KV caches, by name pattern; those named *.k and *.v with two dimensions are without being told. Rows with padding and
    /// paged caches are written as for `lamina analyze --kv`.
    #[arg(long, value_name = "PATTERN=CHANNELS[,WINDOW]")]
    pub(crate) kv: Vec<KvRule>,
    /// KV windows that may be open for writing at once; each is staged in memory until it is coded.
    #[arg(long, default_value_t = 64, value_parser = open_windows, value_name = "N")]
    pub(crate) open_windows: usize,
    /// Keep the device in this file: it is there again the next time, with all that it held. The file is sparse, and stays
    /// as large as the device may become.
    #[arg(long, value_name = "FILE")]
    pub(crate) image: Option<PathBuf>,
    /// Bytes of compressed data that the store may hold [default: twice the capacity, which is room for any data].
    #[arg(long, value_parser = bytes, value_name = "BYTES")]
    pub(crate) store_capacity: Option<u64>,
    /// Seconds for which a store into the mount that finds no room may wait for some before it is lost; 0 for not at all. Discards make room, and so does space
    /// on the host where that is what lacks.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=3600), value_name = "SECONDS")]
    pub(crate) full_wait: u32,
    /// The monitor socket (QMP) of the QEMU that attaches the base window as `mem0`: its guest is told of poisoned blocks, as of media errors of CXL
    /// memory. `lamina boot` makes one by itself.
    #[arg(long, value_name = "SOCKET")]
    pub(crate) qmp: Option<PathBuf>,
    /// Tensors that have another format than the file says, by name pattern.
    #[arg(long, value_name = "PATTERN=FORMAT")]
    pub(crate) format: Vec<FormatRule>,
    /// Where the sockets are made: api.sock, ctl.sock, and ctl-NAME.sock of each guest or host.
    #[arg(long, default_value_os_t = run_dir(), value_name = "DIR")]
    pub(crate) run_dir: PathBuf,
    /// Serve the API on this loopback address too, to your own user and root; port 0 takes any free port.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) tcp: Option<SocketAddr>,
    /// KiB read when a page is missing; 4 reads exactly that page, more is faster for sequential reads; more than 128 needs root.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(0..=1024), value_name = "KIB")]
    pub(crate) read_ahead_kb: u32,
    /// Threads that answer the mount [default: one for each core, at least 2].
    #[arg(long, value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// How dirty pages are made to reach the device: `auto`, `sync_file_range` or `msync`.
    #[arg(long, default_value = "auto", hide = true, value_name = "HOW")]
    pub(crate) launder_with: LaunderWith,
    #[command(flatten)]
    pub(crate) several: SeveralArgs,
    /// Whether windows whose size is not given get one that suits a PCI BAR.
    #[arg(skip)]
    pub(crate) powers_of_two: bool,
}

impl DeviceArgs {
    /// How checkpoints are loaded.
    pub(crate) fn load_options(&self) -> LoadOptions {
        LoadOptions {
            views: self.views.iter().filter(|view| !view.is_empty()).cloned().collect(),
            kv: [self.kv.clone(), KvRule::by_name().to_vec()].concat(),
            formats: self.format.clone(),
            partition: None,
        }
    }
}

/// Boot a guest that sees a device as CXL memory, as disks, or as shared memory of PCI devices.
///
/// Starts a device as `serve` does, or takes one that is being served, and boots Debian's kernel in QEMU with the two windows as two
/// cxl-type3 devices: base first, views second. Without a script you get a shell, with lamina-shim in it. KVM is used where it
/// works, emulation elsewhere. A QEMU older than 11.1 will not do; without one, one is unpacked from Debian's packages. With
/// --attach vhost-user the windows are two virtio disks, and QEMU 7.2 will do. With --attach ivshmem they are the memory of two PCI
/// devices, whose sizes are powers of two, and a third one carries requests: the guest needs neither CXL nor a serial port. With
/// --attach shmem a virtio device maps what the guest asks for, and a driver of ours, built for its kernel, gives /dev/lamina0.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  A shell on a device with a checkpoint in it; then, in the guest, `lamina-shim up` and `lamina-shim list`:
      lamina boot --model model.safetensors --views full,e8m3
  A script of your own, with a program of your own (linked statically) beside it:
      lamina boot --model model.safetensors --put ./reader=/bin/reader --script ./test.sh
  On a device that is being served already:
      lamina boot --base /tmp/lamina/base --views-file /tmp/lamina/views --ctl /run/lamina/ctl.sock
  As disks, of a device that is being served with --vhost-user /run/lamina/disks:
      lamina boot --attach vhost-user --disk /run/lamina/disks/base.sock --disk /run/lamina/disks/views.sock
  As an interleave set of two CXL memory devices:
      lamina boot --interleave 2x256 --model model.safetensors --views full,e8m3
  As shared memory, with all options in a file:
      lamina boot --topology docs/topology.toml
  Only say what would be started, for a QEMU command line of your own:
      lamina boot --base /tmp/lamina/base --views-file /tmp/lamina/views --print-command")]
pub(crate) struct Boot {
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    /// Take all of this from a file of TOML: docs/topology.toml is an example.
    #[arg(long, value_name = "FILE")]
    pub(crate) topology: Option<PathBuf>,
    /// How the guest sees the device: cxl, vhost-user, ivshmem or shmem.
    #[arg(long, default_value_t, value_name = "HOW")]
    pub(crate) attach: AttachKind,
    /// The directory to mount on [default: a temporary one].
    #[arg(long, value_name = "DIR", conflicts_with_all = ["base", "disks"])]
    pub(crate) mount: Option<PathBuf>,
    /// With --attach vhost-user: the socket of a disk that is being served; may be given more than once.
    #[arg(long = "disk", value_name = "SOCKET", conflicts_with = "base")]
    pub(crate) disks: Vec<PathBuf>,
    /// The part of this guest, or the files of this host, of a device that is being served with this --run-dir.
    #[arg(long, alias = "host", value_name = "NAME", conflicts_with_all = ["base", "disks", "mount", "ctl", "models"])]
    pub(crate) guest: Option<String>,
    /// With --attach ivshmem and --base: the socket of the mailboxes that `lamina serve --ivshmem` serves [default: one is served here, if --ctl is given].
    #[arg(long, value_name = "SOCKET", requires = "base", conflicts_with = "ctl")]
    pub(crate) mailbox: Option<PathBuf>,
    /// With --attach shmem: the socket that `lamina serve --vhost-user-shmem` serves [default: one is served here].
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
    /// A shell script to run in the guest instead of an interactive shell; its exit status becomes this program's.
    #[arg(long, value_name = "FILE")]
    pub(crate) script: Option<PathBuf>,
    /// A file to put into the guest; may be given more than once.
    #[arg(long = "put", value_name = "HOST=GUEST", value_parser = put)]
    pub(crate) files: Vec<(PathBuf, String)>,
    /// Put fio, stress-ng, memtester and numactl into the guest.
    #[arg(long)]
    pub(crate) extras: bool,
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
    /// Print the command that starts QEMU, and end.
    #[arg(long)]
    pub(crate) print_command: bool,
    /// More options for QEMU.
    #[arg(last = true, value_name = "QEMU OPTION")]
    pub(crate) qemu: Vec<String>,
}

/// What all client commands take.
#[derive(Clone, Debug, Args)]
pub(crate) struct Client {
    /// The API's socket.
    #[arg(long, default_value_os_t = run_dir().join("api.sock"), value_name = "PATH")]
    pub(crate) api: PathBuf,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum View {
    /// Make a view of a tensor, for example `lamina view add lm_head.weight e8m3+g2`.
    Add {
        /// The tensor's name.
        tensor: String,
        /// The view's spelling.
        spelling: String,
        #[command(flatten)]
        client: Client,
    },
    /// List the views.
    List(Client),
}

/// Make every store to the base window visible in every view: the coherence fence.
///
/// Views are computed from what has reached the device. Stores sit in the host's page cache until the kernel writes them
/// back; this writes them back now and drops stale view pages.
#[derive(Debug, Args)]
pub(crate) struct Flush {
    /// Where the range begins in the base window.
    #[arg(long, value_parser = bytes, default_value = "0", value_name = "BYTES")]
    pub(crate) offset: u64,
    /// Its bytes [default: to the window's end].
    #[arg(long, value_parser = bytes, value_name = "BYTES")]
    pub(crate) length: Option<u64>,
    #[command(flatten)]
    pub(crate) client: Client,
}

/// Drop bytes of the base window: they read as zero afterwards, and store nothing.
///
/// This makes room in a store that is full. What is stored in the range and has not reached the device is dropped too.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  A tensor's bytes, by its name; the tensor stays:
      lamina discard model.layers.0.self_attn.q_proj.weight
  A mebibyte from DPA 0x100000 on:
      lamina discard 0x100000 1M")]
pub(crate) struct Discard {
    /// The tensor's name, or where the range begins in the base window if BYTES are given.
    #[arg(value_name = "TENSOR|DPA")]
    pub(crate) what: String,
    /// The range's bytes.
    #[arg(value_parser = bytes, value_name = "BYTES")]
    pub(crate) length: Option<u64>,
    #[command(flatten)]
    pub(crate) client: Client,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Poison {
    /// List the poisoned blocks, and why they are.
    List(Client),
    /// Poison the blocks of a range, as damage to what is stored would: their bytes are lost, and read as 0xff.
    ///
    /// For those who test how their software takes it. Writing a whole block clears its poison.
    Inject(PoisonRange),
    /// Clear the poison of a range: its poisoned blocks are zeros then.
    Clear(PoisonRange),
}

/// Blocks of the base window.
#[derive(Debug, Args)]
pub(crate) struct PoisonRange {
    /// Where the range begins in the base window.
    #[arg(value_parser = bytes, value_name = "DPA")]
    pub(crate) offset: u64,
    /// Its bytes; every block of 4096 that it touches counts.
    #[arg(value_parser = bytes, default_value = "4096", value_name = "BYTES")]
    pub(crate) length: u64,
    #[command(flatten)]
    pub(crate) client: Client,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Snapshot {
    /// Write everything that a device holds to a new file: what was stored by now, as at one moment. Guests wait meanwhile.
    Save {
        /// The file.
        file: PathBuf,
        /// Where the device's sockets are.
        #[arg(long, default_value_os_t = run_dir(), value_name = "DIR")]
        run_dir: PathBuf,
    },
    /// Make an image of a snapshot, for `lamina serve --image`.
    Restore {
        /// The snapshot.
        file: PathBuf,
        /// The image, a new file.
        image: PathBuf,
    },
}

/// Replace the program of a device that is being served, under running guests.
///
/// The process that does the work is ended and started again from the new program; the mount, the memory and the sockets stay where
/// they are. Guests wait for a moment. If the new program does not answer, the one before is started again.
#[derive(Debug, Args)]
pub(crate) struct Upgrade {
    /// The new program [default: the file that the running one was started from, as it is now].
    #[arg(value_name = "FILE")]
    pub(crate) program: Option<PathBuf>,
    /// Where the device's sockets are.
    #[arg(long, default_value_os_t = run_dir(), value_name = "DIR")]
    pub(crate) run_dir: PathBuf,
}

/// Show what the device would make of checkpoints: ratios by codec and bit-plane, beside the entropy limit and word-major coding.
///
/// Nothing is loaded or served; files may be far larger than memory. They are read twice, because rounding to fp8 needs each
/// tensor's largest value first.
#[derive(Debug, Args)]
#[command(after_help = "\
Ratios are bytes before to bytes after at 4 KiB blocks, index entries not counted. The limit keeps sign and mantissa raw and the
exponent at its entropy in each block. Rounding: fp8 is the view fp8_e4m3fn with the power of two that fits the tensor; int4 is
symmetric in groups of 128 elements with the groups' scales not counted.

KV caches: CHANNELS[,WINDOW] · CHANNELS,WINDOW,stride=STRIDE for rows with padding · vLLM's paged caches of four dimensions or more
as PRESET:HEADS,HEAD_SIZE,BLOCK_SIZE[,WINDOW] with the preset nhd, hnd or, with K before V in each block, nhd_kv or hnd_kv.

Example:
      lamina analyze model-00001.safetensors model-00002.safetensors --codec zstd --plot planes.svg")]
pub(crate) struct Analyze {
    /// Safetensors files.
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// Tensors of two dimensions with this many channels are KV caches, in windows of so many tokens [window: 128], and are told layer by
    /// layer too. Rows with padding and paged caches: see below.
    #[arg(long, value_parser = kv_layout, value_name = "CHANNELS[,WINDOW]")]
    pub(crate) kv: Option<KvLayout>,
    /// The codecs of the planes: all, or a list separated by commas.
    #[arg(long, default_value = "all", value_parser = codecs, value_name = "all|LIST")]
    pub(crate) codec: Codecs,
    /// Print JSON instead of tables.
    #[arg(long)]
    pub(crate) json: bool,
    /// Draw the ratios of all planes to this SVG file.
    #[arg(long, value_name = "OUT.svg")]
    pub(crate) plot: Option<PathBuf>,
}

/// Codecs to compare, each once.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Codecs(pub(crate) Vec<Codec>);

/// The directory for sockets when none is named: the user's own runtime directory, or one of this user's in /tmp.
fn run_dir() -> PathBuf {
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) if !dir.is_empty() => PathBuf::from(dir).join("lamina"),
        _ if nix::unistd::geteuid().is_root() => PathBuf::from("/run/lamina"),
        _ => std::env::temp_dir().join(format!("lamina-{}", nix::unistd::geteuid())),
    }
}

/// A size: decimal or 0x-hexadecimal, or decimal with K, M, G or T for powers of 1024 (KiB and so on are taken too).
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no size: write for example 4096, 0x1000, 256M or 64G");
    if let Some(digits) = text.strip_prefix("0x") {
        return u64::from_str_radix(digits, 16).map_err(|_| wrong());
    }
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let shift = match unit {
        "" => 0,
        "K" | "k" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        "T" | "TiB" => 40,
        _ => return Err(wrong()),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is more than 64 bits can count"))
}

fn codecs(text: &str) -> Result<Codecs, String> {
    if text == "all" {
        return Ok(Codecs(Codec::ALL.to_vec()));
    }
    let mut codecs = Vec::new();
    for name in text.split(',') {
        let codec = name.parse().map_err(|why: UnknownCodec| why.to_string())?;
        if !codecs.contains(&codec) {
            codecs.push(codec);
        }
    }
    Ok(Codecs(codecs))
}

fn kv_layout(text: &str) -> Result<KvLayout, String> {
    let layout =
        text.parse::<KvLayout>().and_then(|layout| Shape::new(Format::Bf16, &layout).map(|_| layout));
    layout.map_err(|why| {
        format!(
            "{why}: write CHANNELS or CHANNELS,WINDOW, for example 1024,128; rows with padding as CHANNELS,WINDOW,stride=STRIDE; \
             a paged cache as PRESET:HEADS,HEAD_SIZE,BLOCK_SIZE[,WINDOW] with the preset nhd, hnd, nhd_kv or hnd_kv"
        )
    })
}

fn open_windows(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(windows @ 1..=MOST_OPEN_WINDOWS) => Ok(windows),
        _ => Err(format!("{text:?} is no number of windows from 1 to {MOST_OPEN_WINDOWS}")),
    }
}

fn put(text: &str) -> Result<(PathBuf, String), String> {
    match text.split_once('=') {
        Some((host, guest)) if !host.is_empty() && guest.starts_with('/') => {
            Ok((host.into(), guest.to_owned()))
        }
        _ => Err(format!("{text:?} is no HOST=GUEST: write for example ./reader=/bin/reader")),
    }
}

/// What `--vhost-user` asks for.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum DiskArg {
    /// Both windows, on sockets in this directory.
    Both(PathBuf),
    /// One disk.
    One(PathBuf, Shows),
}

fn disks(text: &str) -> Result<DiskArg, String> {
    let Some((path, what)) = text.split_once('=') else {
        return if text.is_empty() {
            Err("a directory has a name".to_owned())
        } else {
            Ok(DiskArg::Both(text.into()))
        };
    };
    let shows = match (what, what.rsplit_once(',')) {
        ("base", _) => Shows::Base,
        ("views", _) => Shows::Views,
        (_, Some((tensor, view))) if !tensor.is_empty() => {
            Shows::View { tensor: tensor.to_owned(), view: view.to_owned() }
        }
        _ => return Err(format!("{what:?} is nothing a disk shows: write base, views or TENSOR,VIEW")),
    };
    if path.is_empty() { Err("a socket has a path".to_owned()) } else { Ok(DiskArg::One(path.into(), shows)) }
}

fn accel(text: &str) -> Result<Accel, String> {
    [Accel::Kvm, Accel::Tcg]
        .into_iter()
        .find(|accel| accel.to_string() == text)
        .ok_or_else(|| format!("{text:?} is neither kvm nor tcg"))
}

fn threads(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(threads @ 1..=64) => Ok(threads),
        _ => Err(format!("{text:?} is no number of threads from 1 to 64")),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn codecs_and_kv_layouts_are_read_as_documented() {
        assert_eq!(codecs("all").unwrap().0, Codec::ALL);
        assert_eq!(codecs("zstd,lz4,zstd").unwrap().0, [Codec::Zstd, Codec::Lz4]);
        assert!(codecs("zstd,gzip").unwrap_err().contains("gzip") && codecs("").is_err());
        assert_eq!(kv_layout("64"), Ok(KvLayout::rows(64, 128)));
        assert_eq!(kv_layout("64,256"), Ok(KvLayout::rows(64, 256)));
        for text in ["", "0", "64,0", "64,", "x", "64,1,2", "-1"] {
            assert!(kv_layout(text).unwrap_err().contains("CHANNELS,WINDOW"), "{text}");
        }
    }

    #[test]
    fn disks_are_read_as_documented() {
        assert_eq!(disks("/run/disks"), Ok(DiskArg::Both("/run/disks".into())));
        assert_eq!(disks("b.sock=base"), Ok(DiskArg::One("b.sock".into(), Shows::Base)));
        assert_eq!(disks("v.sock=views"), Ok(DiskArg::One("v.sock".into(), Shows::Views)));
        let view = Shows::View { tensor: "a,b=c".to_owned(), view: "e8m3:packed".to_owned() };
        assert_eq!(disks("q.sock=a,b=c,e8m3:packed"), Ok(DiskArg::One("q.sock".into(), view)));
        for text in ["", "=base", "s=", "s=other", "s=,full"] {
            assert!(disks(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_read_as_documented() {
        for (text, value) in [
            ("0", 0),
            ("4096", 4096),
            ("0x1000", 4096),
            ("256M", 256 << 20),
            ("64G", 64 << 30),
            ("1KiB", 1024),
        ] {
            assert_eq!(bytes(text), Ok(value), "{text}");
        }
        for text in ["", "M", "-1", "1.5G", "256MB", "99999999999999999999", "99999999T", "0x"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
