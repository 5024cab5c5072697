//! What the guest is asked to do; the host puts it into the initramfs as `/plan.json`.

use std::{fs, path::Path};

use anyhow::Context;
use serde::{Deserialize, Serialize};

use crate::{DecodePlan, HandoffPlan, MessagePlan, RamPlan, SoakPlan, SwapPlan};

/// The steps of a run. Everything is optional: an empty object reads every tensor in every view.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Plan {
    /// Read only views with these spellings; all in the directory if not given. The pseudo-view
    /// `base` is governed by `read_base` alone.
    pub views: Option<Vec<String>>,
    /// Read only these tensors; all in the directory if not given.
    pub tensors: Option<Vec<String>>,
    /// Read every tensor through the base window as well.
    pub read_base: bool,
    /// Tell the device's counters after that, before anything else is read.
    pub counters: bool,
    /// Run a decoder on the device.
    pub decode: Option<DecodePlan>,
    /// Write a tensor through the base window, flush, and read it back in every view.
    pub write: Option<WritePlan>,
    /// Exchange messages with another guest, one exchange after the other.
    pub messages: Vec<MessagePlan>,
    /// Compute a prompt's KV cache for another host, or go on with it.
    pub handoff: Option<HandoffPlan>,
    /// Work on a pool that the host's processes have too.
    pub soak: Option<SoakPlan>,
    /// Misbehave: store into a view, reach past ends.
    pub hostile: bool,
    /// Read a tensor over and over while its pages are warm.
    pub warm_bench: Option<WarmBench>,
    /// Measure the loads, stores and flushes of the way that the device is attached by.
    pub attach_bench: Option<AttachBench>,
    /// Use the base window as memory, and do nothing of the above.
    pub ram: Option<RamPlan>,
    /// Swap to a disk of the device, and do nothing of the above.
    pub swap: Option<SwapPlan>,
}

impl Default for Plan {
    fn default() -> Self {
        Self {
            views: None,
            tensors: None,
            read_base: true,
            counters: false,
            decode: None,
            write: None,
            messages: Vec::new(),
            handoff: None,
            soak: None,
            hostile: false,
            warm_bench: None,
            attach_bench: None,
            ram: None,
            swap: None,
        }
    }
}

/// A tensor to write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WritePlan {
    /// The tensor's name.
    pub tensor: String,
    /// Decides the new bytes: see [`crate::rotation`].
    pub seed: u64,
}

/// A benchmark of warm reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WarmBench {
    /// The tensor's name; it is read through the base window.
    pub tensor: String,
    /// How many measurements to make.
    pub repeats: u32,
}

/// A benchmark of an attachment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachBench {
    /// The tensor's name; it is loaded through its view `full` and through the base window, and
    /// stored into.
    pub tensor: String,
    /// How many measurements of each kind to make.
    pub rounds: u32,
    /// Milliseconds after which a measurement takes in no more bytes.
    pub limit_ms: u64,
    /// Where the tensor is if the device is attached as disks; then nothing else of the plan is
    /// done.
    pub disks: Option<DiskPlaces>,
}

/// A tensor's places on the device's disks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskPlaces {
    /// The partition of the views disk that shows its view `full`.
    pub partition: u32,
    /// Where it begins on the base disk.
    pub offset: u64,
    /// Its bytes.
    pub bytes: u64,
}

impl Plan {
    /// The plan in the file at `path`.
    ///
    /// # Errors
    /// When it cannot be read, or is not a plan.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let bytes = fs::read(path).with_context(|| format!("cannot read the plan {}", path.display()))?;
        serde_json::from_slice(&bytes).with_context(|| format!("{} is no plan", path.display()))
    }
}
