//! Pages that the kernel demotes to the node when a process's control group is pressed, and
//! promotes when they are read again (NUMA balancing of tiers).

use std::{
    fs,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use lamina_shim::sysfs::{Tree, wait};

use super::super::{
    talker::Talker,
    vm::{self, Group, counted},
};
use crate::{Event, Report, report::console};

/// How long the kernel may take to demote, and then to promote.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Bytes it is asked for at a time.
const STEP: u64 = 2 << 20;

pub(super) fn run(tree: &Tree, node: u32, bytes: u64, report: &mut Report) -> anyhow::Result<()> {
    let start = Instant::now();
    tree.write("kernel/mm/numa/demotion_enabled", "1")?;
    let group = Group::make(tree, "lamina-demotion")?;
    let size = bytes.to_string();
    let words = ["/bin/lamina-pages", &size, "--hot", &size].map(str::to_owned);
    let mut talker = Talker::start(&words)?;
    group.take(talker.pid())?;
    talker.ask("fill")?;
    let counters = || anyhow::Ok((counted("pgdemote_")?, counted("pgpromote_success")?));
    let (demoted_before, promoted_before) = counters()?;
    let there = || vm::placed(talker.pid(), node).is_ok_and(|(here, _)| 2 * here >= bytes);
    let demoted = wait(TIMEOUT, || {
        // Refused when it found less than it was asked for; where the pages are tells.
        let _ = group.set("memory.reclaim", &STEP.to_string());
        there().then_some(())
    });
    ensure!(demoted.is_some(), "half of the process is not on node {node} after {} s", TIMEOUT.as_secs());
    let demoted_pages = counted("pgdemote_")? - demoted_before;
    let mut wrong_words = talker.number("check", "wrong ")?;

    fs::write("/proc/sys/kernel/numa_balancing", "2").context("cannot have tiers balanced")?;
    talker.ask("touch")?;
    let promoted = || counted("pgpromote_success").ok().filter(|now| *now > promoted_before);
    let promoted_pages = wait(TIMEOUT, promoted).map_or(0, |now| now - promoted_before);
    fs::write("/proc/sys/kernel/numa_balancing", "0").context("cannot end balancing")?;
    wrong_words += talker.number("check", "wrong ")?;
    talker.end()?;
    let seconds = start.elapsed().as_secs_f64();
    console(&format!("{demoted_pages} pages demoted, {promoted_pages} promoted, in {seconds:.1} s"));
    report.send(&Event::Demoted { demoted_pages, promoted_pages, wrong_words, seconds });
    Ok(())
}
