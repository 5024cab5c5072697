//! What the kernel tells of its memory, and the control groups by which it is pressed.

use std::{fs, process::Command};

use anyhow::{Context, ensure};
use lamina_shim::sysfs::Tree;

/// Bytes of a page.
pub(super) const PAGE: u64 = 4096;
const GROUPS: &str = "fs/cgroup";

/// The sum of the counters in `/proc/vmstat` whose names begin with `prefix`.
pub(super) fn counted(prefix: &str) -> anyhow::Result<u64> {
    let text = fs::read_to_string("/proc/vmstat").context("cannot read /proc/vmstat")?;
    sum(&text, prefix).with_context(|| format!("this kernel does not count {prefix}"))
}

fn sum(text: &str, prefix: &str) -> Option<u64> {
    let mut found = text.lines().filter(|line| line.starts_with(prefix)).peekable();
    found.peek()?;
    found.map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).sum()
}

/// Bytes of the process's memory on `node`, and on other nodes what is not of files: those, in an
/// initramfs, are in the guest's RAM from the start.
pub(super) fn placed(pid: u32, node: u32) -> anyhow::Result<(u64, u64)> {
    let path = format!("/proc/{pid}/numa_maps");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    Ok(by_node(&text, node))
}

fn by_node(numa_maps: &str, node: u32) -> (u64, u64) {
    let (mut here, mut elsewhere) = (0, 0);
    for line in numa_maps.lines() {
        let of_a_file = line.contains(" file=");
        let counts = line.split_whitespace().filter_map(|word| {
            let (on, pages) = word.strip_prefix('N')?.split_once('=')?;
            Some((on.parse::<u32>().ok()?, pages.parse::<u64>().ok()?))
        });
        for (on, pages) in counts {
            if on == node {
                here += PAGE * pages;
            } else if !of_a_file {
                elsewhere += PAGE * pages;
            }
        }
    }
    (here, elsewhere)
}

/// Has the kernel give back pages that it only keeps for a while on their way to be freed.
pub(super) fn settle() -> anyhow::Result<()> {
    fs::write("/proc/sys/vm/drop_caches", "1").context("cannot write drop_caches")
}

/// A control group of memory.
pub(super) struct Group<'a> {
    tree: &'a Tree,
    path: String,
}

impl<'a> Group<'a> {
    /// Makes one.
    pub(super) fn make(tree: &'a Tree, name: &str) -> anyhow::Result<Self> {
        if !tree.exists(format!("{GROUPS}/cgroup.controllers")) {
            run("mount", &["-t", "cgroup2", "none", &tree.sys(GROUPS).to_string_lossy()])?;
        }
        tree.write(format!("{GROUPS}/cgroup.subtree_control"), "+memory")?;
        let path = format!("{GROUPS}/{name}");
        fs::create_dir(tree.sys(&path)).with_context(|| format!("cannot make the control group {name}"))?;
        Ok(Self { tree, path })
    }

    /// Takes a process in. What it has already stays where it is.
    pub(super) fn take(&self, pid: u32) -> anyhow::Result<()> {
        self.set("cgroup.procs", &pid.to_string())
    }

    /// Sets one of the group's attributes.
    pub(super) fn set(&self, attribute: &str, value: &str) -> anyhow::Result<()> {
        Ok(self.tree.write(format!("{}/{attribute}", self.path), value)?)
    }
}

/// Runs a program to its end, which must be well.
pub(super) fn run(program: &str, args: &[&str]) -> anyhow::Result<()> {
    let output = Command::new(program).args(args).output();
    let output = output.with_context(|| format!("cannot start {program}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {}: {}", args.join(" "), output.status, said.trim());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_summed_by_the_beginning_of_their_names() {
        let text = "pswpin 3\npgdemote_kswapd 10\npgdemote_direct 32\nthp_swpout 1\n";
        assert_eq!((sum(text, "pgdemote_"), sum(text, "pswpin")), (Some(42), Some(3)));
        assert_eq!((sum(text, "pgpromote_"), sum("pswpin many\n", "pswpin")), (None, None));
    }

    #[test]
    fn what_is_on_a_node_is_its_pages_there_of_files_too_once_they_were_written() {
        let text = "\
00400000 bind:1 file=/bin/python3 mapped=40 N0=40 kernelpagesize_kB=4
00900000 bind:1 file=/bin/python3 anon=5 dirty=5 mapped=8 N0=3 N1=5 kernelpagesize_kB=4
00a00000 bind:1 heap anon=17 dirty=17 N1=17 kernelpagesize_kB=4
7f000000 bind:1 anon=512 dirty=512 N0=2 N1=510 kernelpagesize_kB=4
7ffd0000 bind:1 stack anon=3 dirty=3 N1=3 kernelpagesize_kB=4
7fff0000 default
";
        assert_eq!(by_node(text, 1), (535 * PAGE, 2 * PAGE));
        assert_eq!(by_node(text, 0), (45 * PAGE, 530 * PAGE));
        assert_eq!(by_node("", 0), (0, 0));
    }
}
