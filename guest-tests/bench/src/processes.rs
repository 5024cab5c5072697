//! What the system tells of processes and their descendants.

use std::fs;

use anyhow::{Context, Result};

/// The processes that this one's threads have started and that are not waited for yet.
pub(super) fn children(pid: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// Bytes of memory that the process and its descendants have. What `n` processes share is a part of
/// `n` each has, whoever the others are.
///
/// # Errors
/// When the system does not tell. A descendant that is no more has none.
pub(super) fn memory(pid: u32) -> Result<u64> {
    let of_children: u64 = children(pid).into_iter().filter_map(|pid| memory(pid).ok()).sum();
    Ok(own_memory(pid)? + of_children)
}

fn own_memory(pid: u32) -> Result<u64> {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let line = rollup.lines().find(|line| line.starts_with("Pss:")).context("no Pss")?;
    let kib: u64 = line.split_whitespace().nth(1).context("no Pss")?.parse()?;
    Ok(kib << 10)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    /// Memory that a process has for itself.
    fn anonymous(pid: u32) -> u64 {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find(|line| line.starts_with("RssAnon:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    }

    #[test]
    fn what_descendants_have_counts() {
        // A shell whose child has 16 MiB, and says so.
        let script = r#"/bin/sh -c 'x=$(head -c 16777216 /dev/zero | tr "\\0" x); echo; read y; echo "$x" >/dev/null'; :"#;
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shell = shell.spawn().unwrap();
        let mut said = [0];
        std::io::Read::read_exact(shell.stdout.as_mut().unwrap(), &mut said).unwrap();
        let children = children(shell.id());
        let of_children: u64 = children.iter().map(|pid| anonymous(*pid)).sum();
        assert!(children.len() == 1 && of_children >= 16 << 20, "{children:?}: {of_children}");
        let (all, own) = (memory(shell.id()).unwrap(), own_memory(shell.id()).unwrap());
        assert!(all >= of_children + anonymous(shell.id()) && own < 16 << 20, "{all}, {own}");
        drop(shell.stdin.take());
        shell.wait().unwrap();
    }
}
