//! DAMON on a process on the node that reads one part of its memory all the time and leaves the
//! other alone.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use lamina_shim::sysfs::{SysfsError, Tree, wait};

use super::bound;
use crate::{Event, Heat, RamPlan, Report, report::console};

const ADMIN: &str = "kernel/mm/damon/admin/kdamonds";
/// How long DAMON may take to tell them apart.
const TIMEOUT: Duration = Duration::from_secs(120);
/// How long it may refuse to be started.
const BUSY: Duration = Duration::from_secs(60);

pub(super) fn run(tree: &Tree, node: u32, plan: &RamPlan, report: &mut Report) -> anyhow::Result<()> {
    if !tree.exists(ADMIN) {
        console("this kernel has no DAMON");
        report.send(&Event::Watched { heat: None });
        return Ok(());
    }
    let (bytes, hot) = (plan.watched_bytes.to_string(), plan.hot_bytes.to_string());
    let mut talker = bound(node, &["/bin/lamina-pages", &bytes, "--hot", &hot].map(str::to_owned))?;
    let address = talker.number("fill", "ready ")?;
    talker.ask("touch")?;
    let start = Instant::now();
    watch(tree, talker.pid())?;
    let end = address + plan.watched_bytes;
    let (hot, cold) = (address..address + plan.hot_bytes, address + plan.hot_bytes..end);
    let mut last = None;
    let found = wait(TIMEOUT, || {
        let regions = regions(tree).ok()?;
        let heat = heat(&regions, &hot, &cold, start.elapsed().as_secs_f64());
        last = Some(heat);
        heat.told_apart().then_some(heat)
    });
    // A process that has ended is not watched any more; it must not end before.
    tree.write(format!("{ADMIN}/0/state"), "off").context("cannot stop DAMON")?;
    talker.end()?;
    let heat = found.or(last).context("DAMON tells no regions")?;
    console(&format!("DAMON: {heat:?}"));
    report.send(&Event::Watched { heat: Some(heat) });
    Ok(())
}

/// Has DAMON watch the memory that a process maps.
fn watch(tree: &Tree, pid: u32) -> anyhow::Result<()> {
    let pid = pid.to_string();
    let (context, scheme) = ("0/contexts/0", "0/contexts/0/schemes/0");
    let largest = u64::MAX.to_string();
    let longest = u32::MAX.to_string();
    let settings = [
        ("nr_kdamonds".to_owned(), "1"),
        ("0/contexts/nr_contexts".to_owned(), "1"),
        (format!("{context}/operations"), "vaddr"),
        (format!("{context}/targets/nr_targets"), "1"),
        (format!("{context}/targets/0/pid_target"), &pid),
        // What a scheme that only counts has tried is how regions are told.
        (format!("{context}/schemes/nr_schemes"), "1"),
        (format!("{scheme}/action"), "stat"),
        (format!("{scheme}/access_pattern/sz/max"), &largest),
        (format!("{scheme}/access_pattern/nr_accesses/max"), &longest),
        (format!("{scheme}/access_pattern/age/max"), &longest),
    ];
    for (file, value) in settings {
        tree.write(format!("{ADMIN}/{file}"), value)?;
    }
    let mut refused: Option<SysfsError> = None;
    let begun = wait(BUSY, || match tree.write(format!("{ADMIN}/0/state"), "on") {
        Ok(()) => Some(()),
        Err(error) => {
            refused = Some(error);
            None
        }
    });
    match (begun, refused) {
        (None, Some(error)) => Err(error).context("DAMON does not start"),
        _ => Ok(()),
    }
}

/// DAMON's regions now, and how often it saw each accessed.
fn regions(tree: &Tree) -> anyhow::Result<Vec<(Range<u64>, u64)>> {
    tree.write(format!("{ADMIN}/0/state"), "update_schemes_tried_regions")?;
    let folder = format!("{ADMIN}/0/contexts/0/schemes/0/tried_regions");
    let mut regions = Vec::new();
    for name in tree.list(&folder).into_iter().filter(|name| name.bytes().all(|byte| byte.is_ascii_digit())) {
        let number = |file: &str| tree.number(format!("{folder}/{name}/{file}"));
        regions.push((number("start")?..number("end")?, number("nr_accesses")?));
    }
    ensure!(!regions.is_empty(), "DAMON has no regions yet");
    Ok(regions)
}

fn heat(regions: &[(Range<u64>, u64)], hot: &Range<u64>, cold: &Range<u64>, seconds: f64) -> Heat {
    let found = |part: &Range<u64>, accessed: bool| {
        let matching = regions.iter().filter(|(_, accesses)| (*accesses > 0) == accessed);
        matching.map(|(region, _)| common(region, part)).sum()
    };
    Heat {
        hot_bytes: hot.end - hot.start,
        hot_found: found(hot, true),
        cold_bytes: cold.end - cold.start,
        cold_found: found(cold, false),
        regions: regions.len(),
        seconds,
    }
}

/// Bytes that are in both.
fn common(a: &Range<u64>, b: &Range<u64>) -> u64 {
    a.end.min(b.end).saturating_sub(a.start.max(b.start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_region_counts_for_the_part_of_it_that_is_hot_or_cold() {
        let regions = [(0..50, 0), (50..130, 3), (130..300, 0), (300..400, 9)];
        let found = heat(&regions, &(100..200), &(200..380), 1.0);
        assert_eq!((found.hot_found, found.cold_found, found.regions), (30, 100, 4));
        assert!(!found.told_apart());
        let found = heat(&[(0..175, 1), (175..400, 0)], &(100..200), &(200..380), 1.0);
        assert_eq!((found.hot_found, found.cold_found), (75, 180));
        assert!(found.told_apart());
    }
}
