//! What the guest tells the host: one event a line, as a JSON object whose `event` names its kind.

use std::path::PathBuf;

use lamina_shim::Attached;
use serde::{Deserialize, Serialize};

use crate::{Calls, Heat, Side, Tier};

/// Which pass over the data an event belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// The data as the host loaded it.
    Loaded,
    /// After the guest wrote a tensor.
    Written,
}

/// What is measured of an attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Measure {
    /// Loads from the guest's ordinary memory.
    Ordinary,
    /// Loads of a view of which nothing is cached.
    Cold,
    /// Loads of a view that was just loaded.
    Warm,
    /// Loads of the base window, where they were loaded before.
    Base,
    /// Stores into the base window, and the flush that brings them to the views.
    Stored,
    /// A flush of the same bytes, when there is nothing to bring.
    Flush,
}

/// A window as the guest mapped it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WindowReport {
    /// The device node or file.
    pub path: PathBuf,
    /// Bytes.
    pub bytes: u64,
}

/// One step of the guest. All times are seconds on the guest's clock, all lengths bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// The program runs.
    Started {
        /// Kernel release, as `uname -r`.
        kernel: String,
        /// Machine, as `uname -m`.
        machine: String,
        /// Time since boot.
        uptime: f64,
    },
    /// Both windows are mapped and the directory is read.
    Up {
        /// Time since boot.
        uptime: f64,
        /// Time that regions and dax devices took; zero if the windows were given by path.
        seconds: f64,
        /// How the windows are attached; none if they were given by path.
        attached: Option<Box<Attached>>,
        /// The base window.
        base: WindowReport,
        /// The views window.
        views: WindowReport,
        /// Generation of the directory.
        generation: u64,
        /// Tensors in the directory.
        tensors: usize,
        /// Views in the directory.
        view_count: usize,
    },
    /// A view is about to be read.
    ViewBegin {
        /// The pass.
        phase: Phase,
        /// The tensor.
        tensor: String,
        /// The view, or `base`.
        view: String,
        /// Bytes to read.
        bytes: u64,
        /// Which one of the pass this is, from 1.
        number: usize,
        /// How many the pass has.
        of: usize,
    },
    /// A view was read, every byte once.
    View {
        /// The pass.
        phase: Phase,
        /// The tensor.
        tensor: String,
        /// The view, or `base`.
        view: String,
        /// Elements, as the directory says.
        elements: u64,
        /// Bytes read.
        bytes: u64,
        /// SHA-256 of the bytes as they were loaded, in hexadecimal.
        sha256: String,
        /// Time of the loads alone, without the hashing.
        seconds: f64,
    },
    /// A side of a handoff is done.
    Handoff {
        /// Which.
        side: Side,
        /// Blocks stored, or found.
        blocks: usize,
        /// Bytes of each.
        block_bytes: u64,
        /// Seconds from the beginning until the other side's part was there.
        waited: f64,
        /// Seconds in all.
        seconds: f64,
        /// The text's tokens, prompt included: of who goes on.
        tokens: Vec<usize>,
        /// The text.
        text: String,
        /// What was found to be wrong with the first block that was.
        caught: Option<String>,
        /// Calls on the region's memory.
        calls: Calls,
    },
    /// What was done on a pool that the host's processes have too, so far.
    Soaked {
        /// The node's number.
        node: u32,
        /// Turns in all.
        turns: u64,
        /// Blocks and objects stored.
        stored: u64,
        /// Those that were read, and were whole.
        read: u64,
        /// Those that were removed.
        removed: u64,
    },
    /// The device's counters when everything had been read once: what its control port answers to
    /// `stats`.
    Counters {
        /// The counters.
        stats: serde_json::Value,
    },
    /// A text is about to be written or judged.
    DecodeBegin {
        /// Which one of the plan this is, from 1.
        number: usize,
        /// How many the plan has.
        of: usize,
    },
    /// A text was written or judged.
    Decoded {
        /// Which one of the plan, from 1.
        number: usize,
        /// The tokens: the text written, prompt included, or the text judged.
        tokens: Vec<usize>,
        /// The text they stand for.
        text: String,
        /// Of a text that was judged: e to the mean of −ln p of its tokens.
        perplexity: Option<f64>,
        /// SHA-256 of all logits on the way, in hexadecimal.
        logits_sha256: String,
        /// Bytes of weights loaded.
        weight_bytes: u64,
        /// Bytes of the KV cache loaded through views.
        kv_view_bytes: u64,
        /// Bytes of the KV cache loaded through the base window.
        kv_base_bytes: u64,
        /// Bytes of the KV cache stored.
        kv_stored_bytes: u64,
        /// Flushes of the KV cache.
        flushes: u64,
        /// Time it took.
        seconds: f64,
        /// The device's counters before the first token.
        before: serde_json::Value,
        /// The device's counters after the last flush.
        after: serde_json::Value,
    },
    /// A tensor was written through the base window and flushed.
    Written {
        /// The tensor.
        tensor: String,
        /// Element i took the value of element (i + `rotation`) mod n.
        rotation: u64,
        /// Bytes stored.
        bytes: u64,
        /// SHA-256 of the bytes stored.
        sha256: String,
        /// Time of the stores.
        seconds: f64,
        /// Time of the flush.
        flush_seconds: f64,
    },
    /// A message was read.
    Message {
        /// The exchange.
        exchange: String,
        /// The round that the producer said it had stored.
        round: u64,
        /// The round whose message was read, 0 for what was there before; none if it was no message
        /// as a whole.
        seen: Option<u64>,
    },
    /// Stores into a view were tried.
    HostileStore {
        /// The tensor.
        tensor: String,
        /// The view stored into.
        view: String,
        /// Offset in the views window.
        offset: u64,
        /// Bytes stored.
        bytes: u64,
        /// SHA-256 of the whole view before.
        before: String,
        /// Whether the stores were seen by loads right after (they live in the page cache, if
        /// anywhere).
        seen: bool,
        /// SHA-256 of the whole view after a flush of everything.
        after_flush: String,
        /// Whether the tensor itself, through the base window, is what it was.
        base_unchanged: bool,
    },
    /// An access past an end was tried and refused.
    PastEnd {
        /// What was tried.
        attempt: String,
        /// The error that refused it.
        error: String,
    },
    /// One measurement of warm reads.
    WarmRead {
        /// The tensor.
        tensor: String,
        /// Which measurement, from 0.
        repeat: u32,
        /// Bytes read.
        bytes: u64,
        /// Time it took.
        seconds: f64,
        /// Bytes per second.
        bytes_per_second: f64,
    },
    /// One measurement of an attachment.
    Measured {
        /// What was measured.
        what: Measure,
        /// Which measurement of it, from 0.
        round: u32,
        /// Bytes loaded or stored.
        bytes: u64,
        /// Time it took.
        seconds: f64,
    },
    /// The base window is memory.
    SystemRam {
        /// Its NUMA node.
        node: u32,
        /// Bytes of the window.
        bytes: u64,
        /// The kernel's memory tiers, the fastest first.
        tiers: Vec<Tier>,
        /// Time it took.
        seconds: f64,
    },
    /// A process was measured that was bound to the node.
    Process {
        /// Its name.
        name: String,
        /// Bytes of its memory on the node.
        node_bytes: u64,
        /// Bytes of it on other nodes, files not counted.
        other_bytes: u64,
        /// The device's counters before it began.
        before: serde_json::Value,
        /// The device's counters when it was ready and everything was flushed.
        after: serde_json::Value,
        /// Time until it was ready.
        seconds: f64,
    },
    /// A process's memory was demoted to the node, and used again.
    Demoted {
        /// Pages that the kernel demoted.
        demoted_pages: u64,
        /// Pages that it promoted when they were read again and again.
        promoted_pages: u64,
        /// Words of the process that are not what was stored.
        wrong_words: u64,
        /// Time it took.
        seconds: f64,
    },
    /// DAMON watched a process on the node.
    Watched {
        /// What it found; none if this kernel has no DAMON.
        heat: Option<Heat>,
    },
    /// A process was swapped to a disk of the device and back.
    Swapped {
        /// Pages that the kernel wrote.
        out_pages: u64,
        /// Pages that it read.
        in_pages: u64,
        /// Words of the process that are not what was stored.
        wrong_words: u64,
        /// The device's counters before.
        before: serde_json::Value,
        /// The device's counters when nothing was swapped out any more.
        after: serde_json::Value,
        /// Time it took.
        seconds: f64,
    },
    /// Something is wrong.
    Problem {
        /// The step it happened in.
        step: String,
        /// What is wrong.
        message: String,
    },
    /// The last event.
    Done {
        /// Whether there was no problem.
        ok: bool,
        /// All problems again, each with its step.
        errors: Vec<String>,
    },
}
