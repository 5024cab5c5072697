//! Swapping to a disk of the device: a process that may keep only a part of its memory in RAM.
//!
//! At the end nothing is swapped out any more and the disk is let go, so what the device was asked
//! to write and read is what the kernel counted, to the page.

use std::time::Instant;

use anyhow::Context;
use lamina_shim::{Ctl, OpenOptions, open_ctl, sysfs::Tree};
use serde_json::Value;

use super::{
    talker::Talker,
    vm::{self, Group, counted},
};
use crate::{Event, Report, SwapPlan, report::console};

pub(super) fn run(options: &OpenOptions, plan: &SwapPlan, report: &mut Report) -> anyhow::Result<()> {
    let tree = &options.tree;
    let mut ctl = open_ctl(tree, options.ctl.as_deref())?;
    let disk = disk(tree, &plan.serial)?;
    vm::run("mkswap", &[&disk])?;
    // What mkswap wrote is on the disk before anything is counted.
    vm::run("sync", &[])?;
    vm::run("swapon", &[&disk])?;
    let group = Group::make(tree, "lamina-swap")?;
    group.set("memory.max", &plan.limit_bytes.to_string())?;

    let start = Instant::now();
    let counters = || anyhow::Ok((counted("pswpout")?, counted("pswpin")?));
    let (out_before, in_before) = counters()?;
    let before = stats(&mut ctl)?;
    let mut talker = Talker::start(&["/bin/lamina-pages".to_owned(), plan.bytes.to_string()])?;
    group.take(talker.pid())?;
    talker.ask("fill")?;
    let mut wrong_words = talker.number("check", "wrong ")?;
    group.set("memory.max", "max")?;
    vm::run("swapoff", &[&disk])?;
    wrong_words += talker.number("check", "wrong ")?;
    talker.end()?;
    let after = stats(&mut ctl)?;
    let (out_after, in_after) = counters()?;
    let (out_pages, in_pages) = (out_after - out_before, in_after - in_before);
    let seconds = start.elapsed().as_secs_f64();
    console(&format!("swapped {out_pages} pages out and {in_pages} in, in {seconds:.1} s"));
    report.send(&Event::Swapped { out_pages, in_pages, wrong_words, before, after, seconds });
    Ok(())
}

fn stats(ctl: &mut Ctl) -> anyhow::Result<Value> {
    ctl.flush(None)?;
    Ok(ctl.stats()?["stats"].take())
}

/// The disk with this serial number.
pub(super) fn disk(tree: &Tree, serial: &str) -> anyhow::Result<String> {
    let has = |name: &String| tree.read(format!("block/{name}/serial")).is_ok_and(|found| found == serial);
    let found = tree.list("block").into_iter().find(has);
    let name = found.with_context(|| format!("no disk has the serial number {serial}"))?;
    Ok(tree.dev(name).to_string_lossy().into_owned())
}
