//! The command line.

mod advise;
mod api_at;
mod boot;
mod device;
mod guests;
mod model;
mod mount;
mod partitions;
mod pool;
mod reproduce;
mod several;
mod traced;
mod values;

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand};
use lamina_codec::Codec;
use lamina_codec::format::Format;
use lamina_codec::kv::KvLayout;
use lamina_codec::packkv::Packing;
use lamina_device::analyze::packkv::Scales;

pub(crate) use self::advise::Advise;
pub(crate) use self::api_at::{ApiAt, socket_in};
pub(crate) use self::boot::Boot;
pub(crate) use self::device::DeviceArgs;
pub(crate) use self::guests::{GuestExport, Guests, Member, folder_of, monitor_of};
pub(crate) use self::model::{Accounted, Model};
pub(crate) use self::mount::{LoadModel, Ls, Mount, Rm, Shown, To, Umount};
pub(crate) use self::partitions::{GuestSpec, PartitionArgs};
pub(crate) use self::pool::{Holds, PoolAt, PoolCommand, PoolReplay};
pub(crate) use self::reproduce::Reproduce;
pub(crate) use self::traced::{
    Compare, Convert, Elastic, Other, Paced, Record, Replacement, Replayed, Trace, Traced,
};
pub(crate) use self::values::{DiskArg, bytes, kv_layout, run_dir};
use self::values::{codecs, disks, packkv_scales, shape};

/// A CXL Type-3 memory device in user space: tensors as compressed bit-planes, precision views by
/// address alias.
#[derive(Debug, Parser)]
#[command(
    version,
    propagate_version = true,
    after_help = crate::status::Status::table(),
    after_long_help = format!("{EXAMPLES}\n\n{}", crate::status::Status::table())
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "\
Examples:
  Show a checkpoint as files, as it is and at any precision, and end that:
      lamina mount model.safetensors ~/m
      ls -l ~/m/models/model/model@e8m3.safetensors
      lamina umount ~/m
  Serve 256 MiB with a checkpoint in it and two reduced views of every tensor that can give them:
      lamina serve --capacity 256M --mount ~/lamina --model model.safetensors --views full,e8m3,fp8_e4m3fn
  Look at it, from another terminal:
      lamina views
      lamina stats
  Make one more view while it runs:
      lamina view add model.layers.0.self_attn.q_proj.weight e8m3+g2:packed
  Make a tensor of one's own, and remove it with its views:
      lamina tensor add scratch --length 64M --format bf16
      lamina tensor rm scratch
  Make stores to the base window visible in every view:
      lamina flush
  See whether the store fills up, and make room:
      lamina events
      lamina discard old.k
  See what bit-planes and codecs make of a checkpoint, without serving it:
      lamina analyze model.safetensors --plot planes.svg
  See whether this host has what all of that needs:
      lamina doctor";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Mount(Mount),
    Umount(Umount),
    Ls(Ls),
    Load(LoadModel),
    Rm(Rm),
    Serve(Box<Serve>),
    Boot(Box<Boot>),
    /// What a topology with several guests stands for.
    #[command(skip)]
    BootSeveral(Box<Guests>),
    /// Show the counters of a device that is being served.
    Stats(Client),
    Top(Top),
    /// List the tensors of a device that is being served.
    Tensors(Client),
    /// List the views of a device that is being served.
    Views(Client),
    /// List the disks of a device that is being served.
    Disks(Client),
    /// List the exports that a device shows, whose they are, and the sockets for their guests.
    Guests(Client),
    /// Make, resize, remove and list tensors.
    #[command(subcommand)]
    Tensor(Tensor),
    /// Make, remove and list views.
    #[command(subcommand)]
    View(View),
    Flush(Flush),
    Discard(Discard),
    /// Tell what happened to a device that is being served: how full it is, what found no room,
    /// what was lost.
    Events(Client),
    /// List poisoned blocks, poison some, or clear them.
    #[command(subcommand)]
    Poison(Poison),
    Upgrade(Upgrade),
    /// Save a device to one file, or make an image of such a file, on this machine or another.
    #[command(subcommand)]
    Snapshot(Snapshot),
    /// Work on an image that no device is being served from.
    #[command(subcommand)]
    Image(Image),
    #[command(subcommand)]
    Pool(PoolCommand),
    Analyze(Analyze),
    Advise(Advise),
    Model(Box<Model>),
    Compare(Box<Compare>),
    #[command(subcommand)]
    Trace(Trace),
    Elastic(Elastic),
    Reproduce(Reproduce),
    Doctor(Doctor),
    Completions(Completions),
    Man(ManPages),
}

/// Serve a device: mount its two windows, or serve them as disks, load checkpoints, answer the API
/// and guests, until SIGINT, SIGTERM or SIGHUP, which a terminal sends that is closed.
///
/// The mount shows two files: `base`, the capacity window, and `views`, the aperture with the
/// directory and all views. Give both to QEMU as memory-backend-file with share=on. A line on
/// standard output says when they are ready. With --guest or --host each guest or host has two such
/// files and a control socket of its own.
///
/// With --vhost-user the windows are virtio disks (vhost-user-blk), with or without a mount:
/// `base`, which can be written, and `views`, which cannot, with a partition for each view. They
/// need no driver in the guest, and no CXL.
#[derive(Debug, Args)]
#[command(after_help = "\
Two guests with a gigabyte each, of which one may store half a gigabyte; then, from two other terminals, boot one on each partition:
    lamina serve --mount ~/lamina --guest alice=1G,quota=512M --guest bob=1G,model=model.safetensors
    lamina boot --guest alice            lamina boot --guest bob
Two hosts that share a region and are not coherent, as CXL 2.0 leaves them:
    lamina serve --mount ~/lamina --capacity 256M --host one --host two

Sizes take K, M, G and T (powers of 1024). QEMU's CXL windows are multiples of 256M.

Disks: DIR makes DIR/base.sock and DIR/views.sock. SOCKET=base, SOCKET=views and SOCKET=TENSOR,VIEW make one disk each; the last shows
one view from offset 0 on. Give a socket to QEMU with
      -object memory-backend-memfd,id=ram,share=on,size=1G -numa node,memdev=ram
      -chardev socket,id=disk0,path=SOCKET,reconnect-ms=100 -device vhost-user-blk-pci,chardev=disk0,num-queues=2
In the guest they have the serial numbers lamina-base, lamina-views and lamina-vN; `lamina disks` and the ready line list them.

Views: full · eXmY keeps X exponent and Y mantissa bits · +gN rounds with N more bits fetched · +dN (1 or 2) rounds the exponent so ·
:packed packs the elements · bf16 fp8_e4m3fn fp8_e5m2 fp6_e3m2 fp6_e2m3 fp4_e2m1 convert · int4 int2 of int8, int2 of int4. A view
that a tensor's format cannot give is skipped and listed.")]
pub(crate) struct Serve {
    #[command(flatten)]
    pub(crate) device: DeviceArgs,
    #[command(flatten)]
    pub(crate) partition_table: PartitionArgs,
    /// The directory to mount on; made if it is missing.
    #[arg(long, value_name = "DIR", required_unless_present_any = ["vhost_user", "topology"])]
    pub(crate) mount: Option<PathBuf>,
    /// Take all of this from a file of TOML: docs/lamina.toml is an example. The partitions of
    /// its guests are made, and nobody is booted.
    #[arg(long, value_name = "FILE")]
    pub(crate) topology: Option<PathBuf>,
    /// Serve disks: a directory for the sockets of both windows, or one socket and what its disk
    /// shows; may be given more than once.
    #[arg(long, value_name = "DIR|SOCKET=WHAT", value_parser = disks)]
    pub(crate) vhost_user: Vec<DiskArg>,
    /// Serve mailboxes on this socket, for guests that see the mount as shared memory of PCI
    /// devices: the chardev of an ivshmem-doorbell. The windows' sizes must be powers of two then,
    /// and are unless given.
    #[arg(long, value_name = "SOCKET", requires = "mount")]
    pub(crate) ivshmem: Option<PathBuf>,
    /// Serve a virtio device on this socket whose shared-memory region holds what of the windows a
    /// guest has mapped: the chardev of QEMU's vhost-user-test-device-pci (11.1). The guest needs
    /// the driver in driver-shim/kernel.
    #[arg(long, value_name = "SOCKET", requires = "mount")]
    pub(crate) vhost_user_shmem: Option<PathBuf>,
    /// Print the ready line as JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What all client commands take.
#[derive(Clone, Debug, Args)]
pub(crate) struct Client {
    /// The API's socket, or the address of --tcp, which is your own or root's [default: that of the
    /// device in the usual place, or else of the only one that is mounted].
    #[arg(long, default_value = ApiAt::UNSAID, hide_default_value = true, value_name = "PATH|ADDRESS:PORT")]
    pub(crate) api: ApiAt,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Watch a device that is being served: what is stored of each plane, traffic by view, the hottest
/// tensors, events. The same is on the page of its API, `lamina serve --tcp`.
#[derive(Debug, Args)]
pub(crate) struct Top {
    /// The API's socket, or the address of --tcp, which is your own or root's [default: that of the
    /// device in the usual place, or else of the only one that is mounted].
    #[arg(long, default_value = ApiAt::UNSAID, hide_default_value = true, value_name = "PATH|ADDRESS:PORT")]
    pub(crate) api: ApiAt,
    /// Print one frame, and end.
    #[arg(long)]
    pub(crate) once: bool,
    /// Print what one frame shows as JSON, and end.
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
    /// Remove a view of a tensor, for example `lamina view rm lm_head.weight e8m3+g2`.
    ///
    /// Its place in the views window reads as zeros until another view comes there.
    Rm {
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

#[derive(Debug, Subcommand)]
pub(crate) enum Tensor {
    Add(TensorAdd),
    /// Remove a tensor and its views. Its bytes stay, as bytes of nobody, until they are discarded
    /// or written over.
    #[command(after_help = "\
Example:
      lamina discard scratch && lamina tensor rm scratch")]
    Rm {
        /// The tensor's name.
        name: String,
        #[command(flatten)]
        client: Client,
    },
    /// Make a tensor longer or shorter where it is, with its outermost dimension.
    ///
    /// It grows if what is behind it is nobody's. What is cut off stays, as bytes of nobody. Its
    /// views stay where they are.
    #[command(after_help = "\
Example:
      lamina tensor resize cache.k --length 128M")]
    Resize {
        /// The tensor's name.
        name: String,
        /// Its bytes from now on.
        #[arg(long, value_parser = bytes, value_name = "BYTES")]
        length: u64,
        #[command(flatten)]
        client: Client,
    },
    /// Store a tensor that has a base by itself, so that it needs none: the base may be removed
    /// then.
    ///
    /// It takes room, and its time. Loads and stores go on meanwhile; what is cut short is gone on
    /// with by the next one.
    #[command(after_help = "\
Examples:
      lamina tensor detach tuned/lm_head.weight
  All tensors of a model that was loaded with --base:
      lamina tensor detach --model tuned")]
    Detach {
        /// The tensors' names.
        #[arg(value_name = "NAME", required_unless_present = "model")]
        names: Vec<String>,
        /// All tensors of this model that have a base.
        #[arg(long, value_name = "MODEL", conflicts_with = "names")]
        model: Option<String>,
        #[command(flatten)]
        client: Client,
    },
    /// List the tensors.
    List(Client),
}

/// Make a tensor: say what a range of the base window holds. Bytes that are there stay, and are
/// coded anew.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  Weights where there is room:
      lamina tensor add scratch --length 64M --format bf16
  A matrix by its shape, coded with zstd:
      lamina tensor add head --shape 32000x4096 --format bf16 --codec zstd
  A KV cache of rows with 1024 channels, in windows of 128 tokens, at a place of one's own:
      lamina tensor add cache.k --length 64M --format bf16 --kv 1024,128 --at 0x10000000
  One that is packed with loss, a token's values in steps of a tenth of what they span:
      lamina tensor add cache.v --length 64M --format bf16 --kv 1024,64 --lossy packkv:0.1")]
pub(crate) struct TensorAdd {
    /// Its name, unique on the device; PARTITION/NAME where there are guests.
    pub(crate) name: String,
    /// Its bytes [default: those of its shape].
    #[arg(long, value_parser = bytes, value_name = "BYTES", required_unless_present = "shape")]
    pub(crate) length: Option<u64>,
    /// The format of its elements.
    #[arg(long)]
    pub(crate) format: Format,
    /// Where it begins in the base window, a multiple of 4096 [default: the smallest gap it fits].
    #[arg(long, value_parser = bytes, value_name = "DPA")]
    pub(crate) at: Option<u64>,
    /// It is a KV cache, written as for `lamina analyze --kv`.
    #[arg(long, value_parser = kv_layout, value_name = "CHANNELS[,WINDOW]")]
    pub(crate) kv: Option<KvLayout>,
    /// Code its full windows with loss, as in PackKV: a token's values in steps of SCALE of what
    /// they span [0.01 to 1, default 0.1], its tokens in an order found by REPACK [none, median,
    /// default greedy], PACK of them together [4, 16, default 8]. For bf16 and fp16 in windows of
    /// whole groups of 64 tokens and whole blocks of 4096 bytes.
    #[arg(long, value_parser = Packing::from_str, value_name = "packkv[:SCALE[,REPACK[,PACK]]]")]
    pub(crate) lossy: Option<Packing>,
    /// Code it with loss even though it is no KV cache and so may hold weights, in rows of its
    /// shape's last dimension.
    #[arg(long, requires = "lossy", requires = "shape", conflicts_with = "kv")]
    pub(crate) force_lossy: bool,
    /// Its shape, outermost dimension first, for example 32000x4096 [default: one dimension].
    #[arg(long, value_parser = shape, value_name = "AxBx…")]
    pub(crate) shape: Option<Dimensions>,
    /// The codec of its planes [default: the device's].
    #[arg(long)]
    pub(crate) codec: Option<Codec>,
    /// A tensor of the same format and length: blocks are stored as the difference to its where
    /// that takes less, and it cannot be removed before this one.
    #[arg(long, value_name = "TENSOR", conflicts_with = "kv")]
    pub(crate) base: Option<String>,
    #[command(flatten)]
    pub(crate) client: Client,
}

/// The dimensions of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Dimensions(pub(crate) Vec<u64>);

/// Make every store to the base window visible in every view: the coherence fence.
///
/// Views are computed from what has reached the device. Stores sit in the host's page cache until
/// the kernel writes them back; this writes them back now and drops stale view pages.
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
/// This makes room in a store that is full. What is stored in the range and has not reached the
/// device is dropped too.
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
    /// Poison the blocks of a range, as damage to what is stored would: their bytes are lost, and
    /// read as 0xff.
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
    /// Write everything that a device holds to a new file: what was flushed by now, as at one
    /// moment (stores that go on meanwhile, and through mappings, may be in it or not). Nobody
    /// waits for it; if the store has no room for what is written meanwhile, it is given up.
    Save {
        /// The file.
        file: PathBuf,
        /// Where the device's sockets are.
        #[arg(long, default_value_os_t = run_dir(), value_name = "DIR")]
        run_dir: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Make an image of a snapshot, for `lamina serve --image`.
    Restore {
        /// The snapshot.
        file: PathBuf,
        /// The image, a new file.
        image: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Image {
    /// Make an image of an earlier version one of this program's, with all that it holds.
    ///
    /// A new file is written beside it and takes its name when it is whole: an upgrade that is cut
    /// short leaves the image as it was. That takes as much room as the image meanwhile. Programs
    /// that know only the earlier version refuse the new one.
    Upgrade {
        /// The image.
        #[arg(value_name = "FILE")]
        image: PathBuf,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

/// Replace the program of a device that is being served, under running guests.
///
/// The process that does the work is ended and started again from the new program; the mount, the
/// memory and the sockets stay where they are. Guests wait for a moment. If the new program does
/// not answer, the one before is started again.
#[derive(Debug, Args)]
pub(crate) struct Upgrade {
    /// The new program [default: the file that the running one was started from, as it is now].
    #[arg(value_name = "FILE")]
    pub(crate) program: Option<PathBuf>,
    /// Where the device's sockets are.
    #[arg(long, default_value_os_t = run_dir(), value_name = "DIR")]
    pub(crate) run_dir: PathBuf,
    /// Print JSON, as `lamina serve --json` does when it is ready.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Show what the device would make of checkpoints: ratios by codec and bit-plane, beside the
/// entropy limit and word-major coding.
///
/// Nothing is loaded or served; files may be far larger than memory. They are read twice, because
/// rounding to fp8 needs each tensor's largest value first.
#[derive(Debug, Args)]
#[command(after_help = "\
Ratios are bytes before to bytes after at 4 KiB blocks, index entries not counted. The limit keeps sign and mantissa raw and the
exponent at its entropy in each block. Rounding: fp8 is the view fp8_e4m3fn with the power of two that fits the tensor; int4 is
symmetric in groups of 128 elements with the groups' scales not counted.

Block-scaled tensors are known by names, dtypes and shapes: MXFP4, MXFP6, MXFP8, NVFP4, GPTQ and AWQ have a table of bits a value,
in which scales and all else count. What looks like one and is none has a line that says why. Elements of six bits are coded with a
byte each, as they are stored, and held against the bytes that they take in the file.

KV caches: CHANNELS[,WINDOW] · CHANNELS,WINDOW,stride=STRIDE for rows with padding · vLLM's paged caches of four dimensions or more
as PRESET:HEADS,HEAD_SIZE,BLOCK_SIZE[,WINDOW] with the preset nhd, hnd or, with K before V in each block, nhd_kv or hnd_kv.

A base: blocks of tensors that both checkpoints have, by name, dtype and shape, by themselves and as `lamina load --base` would store
them, in whole granules of 64 bytes.

PackKV: every token is rounded to steps of a part of its range, K and V by their own; then tokens are put in order and packed.
Ratios are to 16 bits an element: as the paper counts, and with scales, zeros, order and headers counted. The device stores a tensor
so that is made by `lamina tensor add --lossy packkv`.

Examples:
      lamina analyze kv.safetensors --kv 1024 --packkv=0.1,0.2
      lamina analyze tuned.safetensors --base model.safetensors --codec tree
      lamina analyze model-00001.safetensors model-00002.safetensors --codec zstd --plot planes.svg")]
pub(crate) struct Analyze {
    /// Safetensors, GGUF or .npy files.
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// Tensors of two dimensions with this many channels are KV caches, in windows of so many
    /// tokens [window: 128], and are told layer by layer too. Rows with padding and paged caches:
    /// see below.
    #[arg(long, value_parser = kv_layout, value_name = "CHANNELS[,WINDOW]")]
    pub(crate) kv: Option<KvLayout>,
    /// The codecs of the planes: all, or a list separated by commas.
    #[arg(long, default_value = "all", value_parser = codecs, value_name = "all|LIST")]
    pub(crate) codec: Codecs,
    /// Tell too what lossy coding as in PackKV would make of the KV caches, at these relative
    /// scales of K and V [0.1,0.2]: see below.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "0.1,0.2", requires = "kv")]
    #[arg(value_parser = packkv_scales, value_name = "K,V")]
    pub(crate) packkv: Option<Scales>,
    /// Tell too what the files take as differences to this one, by `tree` or else the first codec
    /// of the list: see below.
    #[arg(long, value_name = "FILE")]
    pub(crate) base: Vec<PathBuf>,
    /// Print JSON instead of tables.
    #[arg(long)]
    pub(crate) json: bool,
    /// Draw the ratios of all planes to this SVG file.
    #[arg(long, value_name = "OUT.svg")]
    pub(crate) plot: Option<PathBuf>,
}

/// Look at this host: what it has of what a device and its guests need, what is missing, and the
/// command that mends it.
///
/// Looks at FUSE, the kernel, rights, QEMU, KVM, the guest's image, the processor, memory and
/// limits. Changes nothing, and needs no device.
#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Print what has a shell complete this program's commands and options.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
      lamina completions bash > ~/.local/share/bash-completion/completions/lamina
      lamina completions zsh > ~/.zfunc/_lamina
      lamina completions fish > ~/.config/fish/completions/lamina.fish")]
pub(crate) struct Completions {
    /// The shell.
    pub(crate) shell: clap_complete::Shell,
}

/// Print this program's manual page, or write those of all its commands.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
      lamina man --out ~/.local/share/man/man1 && man lamina-serve")]
pub(crate) struct ManPages {
    /// Write the pages of all commands into this directory, which is made if it is missing.
    #[arg(long, value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
}

/// Codecs to compare, each once.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Codecs(pub(crate) Vec<Codec>);

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// Commands that have nothing of their own to say: a guest's console, a script for a shell, and
    /// pages for `man`.
    const SAY_NOTHING: [&str; 3] = ["boot", "completions", "man"];

    /// Adds the names of all commands without commands of their own, and whether they take
    /// `--json`.
    fn leaves(command: &clap::Command, before: &str, all: &mut Vec<(String, bool)>) {
        for sub in command.get_subcommands() {
            let name = format!("{before}{}", sub.get_name());
            if sub.has_subcommands() {
                leaves(sub, &format!("{name} "), all);
            } else {
                let json = sub.get_arguments().any(|argument| argument.get_long() == Some("json"));
                all.push((name, json));
            }
        }
    }

    #[test]
    fn every_command_that_says_something_takes_json() {
        let mut all = Vec::new();
        leaves(&Cli::command(), "", &mut all);
        assert!(all.len() > 40, "{all:?}");
        for (name, json) in all {
            assert_eq!(json, !SAY_NOTHING.contains(&name.as_str()), "{name}");
        }
    }

    #[test]
    fn the_papers_figures_take_no_option_that_they_do_not_heed() {
        for (name, heeded) in [("model", &["page"][..]), ("elastic", &["dram"])] {
            let command = Cli::command();
            let command = command.find_subcommand(name).unwrap();
            let of = |id: &str| command.get_arguments().find(|argument| argument.get_id() == id).unwrap();
            let refused: Vec<_> =
                command.get_arg_conflicts_with(of("paper")).iter().map(|a| a.get_id()).collect();
            for argument in command.get_arguments() {
                let id = argument.get_id();
                let is_heeded = heeded.contains(&id.as_str()) || id == "paper" || id == "json";
                assert_ne!(is_heeded, refused.contains(&id), "{name}: {id}");
            }
        }
    }
}
