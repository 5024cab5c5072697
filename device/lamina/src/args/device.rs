//! What a device is made of, for every command that makes one.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;
use lamina_codec::Codec;
use lamina_device::load::{FormatRule, KvRule, LoadOptions};
use lamina_model::dram::Profile;
use lamina_serve::flusher::WriteBackWith;
use lamina_store::mode::Mode;

use super::mount::base;
use super::several::SeveralArgs;
use super::values::{bytes, dram, open_windows, run_dir, threads};

/// What a device is made of and where it listens.
#[derive(Clone, Debug, Args)]
pub(crate) struct DeviceArgs {
    /// Bytes of the base window [default: what the checkpoints take, at least 256M].
    #[arg(long, value_parser = bytes, value_name = "BYTES")]
    pub(crate) capacity: Option<u64>,
    /// Bytes of the views window [default: the capacity, or more if the views, and one more of each
    /// tensor, take more].
    #[arg(long, value_parser = bytes, value_name = "BYTES")]
    pub(crate) views_capacity: Option<u64>,
    /// The device: trace (bit-planes), gcomp (compressed words) or plain (words) [default: trace,
    /// or as the --image is].
    #[arg(long, value_name = "MODE")]
    pub(crate) mode: Option<Mode>,
    /// The codec: lz4, zstd or tree [default: tree, or as the --image has it].
    #[arg(long, value_name = "CODEC")]
    pub(crate) codec: Option<Codec>,
    /// A safetensors, GGUF or .npy file to load; may be given more than once. Packed elements of
    /// six bits get a byte each. A file that the --image holds already is not loaded again; tensors
    /// there of the same names and of another file, or of one that has changed, are refused.
    #[arg(long = "model", value_name = "FILE")]
    pub(crate) models: Vec<PathBuf>,
    /// Tensors that the --model called MODEL has of the same name, format and shape as the one
    /// called BASE, which comes before it, are stored as the difference to its. Models are called
    /// as their files, without the extension; MODEL's tensors are called MODEL/NAME then. May be
    /// given more than once.
    #[arg(long = "model-base", value_name = "MODEL=BASE", value_parser = base)]
    pub(crate) bases: Vec<(String, String)>,
    /// Load the checkpoints even so: remove the --image's tensors of their names, with all that was
    /// stored into them, and write over what lies outside tensors where a checkpoint fits nowhere
    /// else.
    #[arg(long, requires = "image")]
    pub(crate) replace: bool,
    /// Views to make of every tensor, separated by commas; none if empty [default: full].
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    pub(crate) views: Option<Vec<String>>,
    /// Tensors that are KV caches, by name pattern; those named *.k and *.v with two dimensions are
    /// without being told. Rows with padding and paged caches are written as for
    /// `lamina analyze --kv`.
    #[arg(long, value_name = "PATTERN=CHANNELS[,WINDOW]")]
    pub(crate) kv: Vec<KvRule>,
    /// KV windows that may be open for writing at once; each is staged in memory until it is coded
    /// [default: 64, or as the --image has it].
    #[arg(long, value_parser = open_windows, value_name = "N")]
    pub(crate) open_windows: Option<usize>,
    /// Keep the device in this file: it is there again the next time, with all that it held. The
    /// file is sparse, and stays as large as the device may become.
    #[arg(long, value_name = "FILE")]
    pub(crate) image: Option<PathBuf>,
    /// Bring what was stored in the --image to the disk every so many seconds: what was flushed
    /// before survives a crash of the host, as at that moment. With 0 that is done only when the
    /// device ends, and when the store needs what was freed since. An image on a tmpfs does not
    /// survive one.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u32).range(0..=86_400), value_name = "SECONDS")]
    pub(crate) sync_seconds: u32,
    /// Bytes of compressed data that the store may hold, with its reserve for what takes the place
    /// of other data: an eighth of a small store, a 32nd of a large one [default: twice the
    /// capacity, which is room for any data].
    #[arg(long, value_parser = bytes, value_name = "BYTES")]
    pub(crate) store_capacity: Option<u64>,
    /// Seconds for which a store into the mount that finds no room may wait for some before it is
    /// lost; 0 for not at all. Discards make room, and so does space on the host where that is what
    /// lacks.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=3600), value_name = "SECONDS")]
    pub(crate) full_wait: u32,
    #[command(flatten)]
    pub(crate) folder: FilesArgs,
    /// Bytes of the mount's files that the host's page cache may hold, where they are decoded: when
    /// there are more, those that were filled longest ago are written back and dropped, also from
    /// mappings [default: as many as the host has memory for].
    #[arg(long, value_parser = bytes, value_name = "BYTES")]
    pub(crate) cache_bytes: Option<u64>,
    /// Bytes of the host's memory that a store in memory (no --image, or one on a tmpfs) leaves
    /// free: where it would take of them, it is full, as above. Control groups' limits count as the
    /// host's; 0 lets it take everything [default: a sixteenth of all memory, at most 256M].
    #[arg(long, value_parser = bytes, value_name = "BYTES")]
    pub(crate) memory_reserve: Option<u64>,
    /// Count, beside what the device moves, what others would have moved for the same requests: one
    /// that keeps words as they are, one that compresses whole blocks by a generic codec, a cache
    /// of index entries on the chip, and each device of an interleave set. The second takes about
    /// as long as storing does; without this, what they would have counted is left out.
    #[arg(long)]
    pub(crate) observe: bool,
    /// Model, while guests work, what DRAM and controller of this device and of a plain one would
    /// have done: ddr5-4800 unless you say ddr5-5600 or ddr5-6400. The page, `lamina stats` and
    /// /metrics show it. It takes a core while there is much to do; what comes faster than it can
    /// follow is left out and counted. A base window larger than the module, 64 GiB, is refused.
    #[arg(long, num_args = 0..=1, require_equals = true, default_missing_value = "ddr5-4800")]
    #[arg(value_parser = dram, value_name = "MODULE")]
    pub(crate) model_dram: Option<Profile>,
    /// A monitor socket (QMP) of a QEMU that has what is everybody's as `mem0`: its guest is told
    /// of poisoned blocks, as of media errors of CXL memory. May be given more than once. Besides,
    /// whoever listens in the --run-dir at qmp.sock, or at qmp-NAME.sock for a guest or host, is
    /// told; `lamina boot` sees to that by itself.
    #[arg(long, value_name = "SOCKET")]
    pub(crate) qmp: Vec<PathBuf>,
    /// Tensors that have another format than the file says, by name pattern; their bytes are as in
    /// the file.
    #[arg(long, value_name = "PATTERN=FORMAT")]
    pub(crate) format: Vec<FormatRule>,
    /// Where the sockets are made: api.sock, ctl.sock, and ctl-NAME.sock of each guest or host.
    /// Made if it is missing; a directory of another user, one in which others may write, and a
    /// symbolic link are refused, here and wherever a socket or the mount is to be.
    #[arg(long, default_value_os_t = run_dir(), value_name = "DIR")]
    pub(crate) run_dir: PathBuf,
    /// Serve the API on this loopback address too, to your own user and root; port 0 takes any free
    /// port.
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) tcp: Option<SocketAddr>,
    /// KiB read when a page is missing; 4 reads exactly that page, more is faster for sequential
    /// reads; more than 128 needs root.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(0..=1024), value_name = "KIB")]
    pub(crate) read_ahead_kb: u32,
    /// Threads that answer the mount [default: one for each core, at least 2].
    #[arg(long, value_parser = threads)]
    pub(crate) threads: Option<usize>,
    /// How dirty pages are made to reach the device: `auto`, `sync_file_range` or `msync`.
    #[arg(long, default_value = "auto", hide = true, alias = "write_back-with", value_name = "HOW")]
    pub(crate) write_back_with: WriteBackWith,
    #[command(flatten)]
    pub(crate) several: SeveralArgs,
    /// Whether windows whose size is not given get one that suits a PCI BAR.
    #[arg(skip)]
    pub(crate) powers_of_two: bool,
}

/// The folder files/ of a mount.
#[derive(Clone, Debug, Args)]
pub(crate) struct FilesArgs {
    /// Bytes that files/ in the mount may take of the base window: a file system for any files.
    /// What an --image has of files is shown without this, too.
    #[arg(long, value_parser = bytes, default_value = "0", value_name = "BYTES")]
    pub(crate) files: u64,
    /// Keep what is written to files/ in the page cache until it is synced or closed, or the kernel
    /// likes: many small writes are far quicker then. A device without room says so at `fsync` or
    /// `close`, not at each `write`, and what was not synced is lost with the host or the holder,
    /// not with a worker. Needs root.
    #[arg(long)]
    pub(crate) write_cache: bool,
}

impl DeviceArgs {
    /// How checkpoints are loaded.
    pub(crate) fn load_options(&self) -> LoadOptions {
        let mut options = self.requested();
        options.kv.extend(KvRule::by_name());
        if self.views.is_none() {
            options.views = vec!["full".to_owned()];
        }
        options
    }

    /// What of that is said and not usual.
    pub(crate) fn requested(&self) -> LoadOptions {
        LoadOptions {
            views: self.views.iter().flatten().filter(|view| !view.is_empty()).cloned().collect(),
            kv: self.kv.clone(),
            formats: self.format.clone(),
            partition: None,
            within: None,
            bases: BTreeMap::new(),
            replace: self.replace,
        }
    }
}
