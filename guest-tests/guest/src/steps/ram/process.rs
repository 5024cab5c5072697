//! What an ordinary process's memory is on the device.
//!
//! What is flushed before it starts and when it is ready differs by its memory alone: nothing else
//! takes memory from the node, and what is freed there is zeroed, which the device stores in
//! nothing.

use std::time::Instant;

use anyhow::ensure;
use lamina_shim::{OpenOptions, open_ctl};
use serde_json::Value;

use super::{super::vm, bound};
use crate::{Event, ProcessPlan, Report, report::console};

pub(super) fn run(
    options: &OpenOptions,
    node: u32,
    plan: &ProcessPlan,
    report: &mut Report,
) -> anyhow::Result<()> {
    let before = stats(options)?;
    let start = Instant::now();
    let mut talker = bound(node, &plan.command)?;
    talker.tell(&plan.input)?;
    match &plan.ready {
        None => talker.until_it_waits()?,
        Some(ready) => {
            let heard = talker.hear()?;
            ensure!(heard == *ready, "it says {heard:?} where it should be ready");
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let (node_bytes, other_bytes) = vm::placed(talker.pid(), node)?;
    let after = stats(options)?;
    if let Some((question, right)) = &plan.check {
        let answer = talker.ask(question)?;
        ensure!(answer == *right, "it found {answer:?} in its memory, not {right:?}");
    }
    talker.end()?;
    let name = plan.name.clone();
    console(&format!("{name}: {node_bytes} bytes on node {node} after {seconds:.1} s"));
    report.send(&Event::Process { name, node_bytes, other_bytes, before, after, seconds });
    Ok(())
}

/// The device's counters once everything that was stored is there.
fn stats(options: &OpenOptions) -> anyhow::Result<Value> {
    vm::settle()?;
    let mut ctl = open_ctl(&options.tree, options.ctl.as_deref())?;
    ctl.flush(None)?;
    Ok(ctl.stats()?["stats"].take())
}
