//! The base window as the guest's memory, by the kernel's own tools: a NUMA node in a tier of its
//! own, processes bound to it by numactl, pages demoted to it and promoted from it, and DAMON
//! telling hot from cold on it. A tool that fails is a problem, and the next one is still tried.
//!
//! Memory comes in pages of 4 KiB: a huge page of which a process has given back a part is kept as
//! a whole, and accesses to it are not seen by DAMON in an emulated guest (see
//! [`Known::touch`](crate::Known::touch)).

mod demotion;
mod heat;
mod process;

use std::time::Instant;

use anyhow::{Context, ensure};
use lamina_shim::{OpenOptions, UpOptions, dax::Use, sysfs::Tree, up};

use super::talker::Talker;
use crate::{Event, RamPlan, Report, Tier, report::console};

const TIERS: &str = "devices/virtual/memory_tiering";
const HUGE_PAGES: &str = "kernel/mm/transparent_hugepage/enabled";

pub(super) fn run(options: &OpenOptions, plan: &RamPlan, report: &mut Report) {
    let tree = &options.tree;
    let node = match online(tree, report) {
        Ok(node) => node,
        Err(error) => return report.problem("system-ram", &format!("{error:#}")),
    };
    for process in &plan.processes {
        if let Err(error) = process::run(options, node, process, report) {
            report.problem(&process.name, &format!("{error:#}"));
        }
    }
    if let Err(error) = demotion::run(tree, node, plan.demote_bytes, report) {
        report.problem("demotion", &format!("{error:#}"));
    }
    if let Err(error) = heat::run(tree, node, plan, report) {
        report.problem("damon", &format!("{error:#}"));
    }
}

/// Makes the base window memory: its node.
fn online(tree: &Tree, report: &mut Report) -> anyhow::Result<u32> {
    let start = Instant::now();
    if tree.exists(HUGE_PAGES) {
        tree.write(HUGE_PAGES, "never")?;
    }
    let base = up(tree, &UpOptions { system_ram: true, ..UpOptions::default() })?.base;
    ensure!(base.r#use == Some(Use::SystemRam), "{} is no memory", base.dax);
    let node = u32::try_from(tree.number(format!("bus/dax/devices/{}/target_node", base.dax))?)?;
    let seconds = start.elapsed().as_secs_f64();
    let tiers = tiers(tree)?;
    console(&format!("the base window is node {node}, after {seconds:.1} s; tiers {tiers:?}"));
    report.send(&Event::SystemRam { node, bytes: base.bytes, tiers, seconds });
    Ok(node)
}

/// The kernel's memory tiers, the fastest first.
fn tiers(tree: &Tree) -> anyhow::Result<Vec<Tier>> {
    let mut tiers = Vec::new();
    for name in tree.list(TIERS) {
        let Some(tier) = name.strip_prefix("memory_tier") else { continue };
        let tier = tier.parse().with_context(|| format!("{name} is no tier"))?;
        tiers.push(Tier { tier, nodes: tree.read(format!("{TIERS}/{name}/nodelist"))? });
    }
    tiers.sort_by_key(|tier| tier.tier);
    Ok(tiers)
}

/// Starts a program whose memory numactl binds to the node.
fn bound(node: u32, words: &[String]) -> anyhow::Result<Talker> {
    let numactl = ["numactl".to_owned(), format!("--membind={node}")];
    Talker::start(&[&numactl, words].concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn tiers_come_by_their_numbers() {
        let root = tempfile::tempdir().unwrap();
        let tree = Tree::at(root.path(), None);
        for (name, nodes) in [("memory_tier22", "1\n"), ("memory_tier4", "0\n")] {
            let folder = tree.sys(TIERS).join(name);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("nodelist"), nodes).unwrap();
        }
        fs::create_dir(tree.sys(TIERS).join("power")).unwrap();
        let found = tiers(&tree).unwrap();
        let expected = [(4, "0"), (22, "1")].map(|(tier, nodes)| Tier { tier, nodes: nodes.to_owned() });
        assert_eq!(found, expected);
    }
}
