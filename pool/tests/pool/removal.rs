//! Each flush, invalidation and fence is needed: left out, one at a time, a scene finds it missing.
//!
//! Which there are is found by running all scenes with all of them. A scene that fails counts only
//! if it ends well when the call is made and everything else is alike. What no scene finds is
//! listed here, with the reason.
//!
//! `witnesses.txt` has what found each site before, and is tried first; what it does not find is
//! searched for. `LAMINA_SITES_WRITE=1` writes it anew, with what finds each site now.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Write, stderr};
use std::panic::{self, AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Once};

use lamina_pool::mem::{LeftOut, Site};

use crate::scenes::{SCENES, Scene};

/// Runs for each site, of all scenes that come by it.
const RUNS: u64 = 1536;

/// What it brings comes anyway by the node's next fence or count, or is looked at again.
const LATER: &str = "it only comes later";
/// It only chooses what is evicted, or what is told.
const CHOICE: &str = "a choice, not a promise";
/// The next step has a fence of its own, in the lock that is taken or given back.
const NEXT: &str = "the next step's fence completes it, and what it completes is ordered by the lock";
/// What nothing finds missing, by function and call, and why it is there.
const LISTED: &[(&str, &str)] = &[
    ("heap.rs class_at Invalidate: member.lines.consume(member.layout.chunk(chunk), 16)?;", CHOICE),
    ("heap.rs class_at InvalidateFence: member.lines.consume(member.layout.chunk(chunk), 16)?;", CHOICE),
    ("pool.rs stats Invalidate: self.member.lines.consume(chunks, many)?;", CHOICE),
    ("pool.rs stats InvalidateFence: self.member.lines.consume(chunks, many)?;", CHOICE),
    ("member.rs members Invalidate: let manager = self.lines.fresh(self.layout.manager())?;", CHOICE),
    ("member.rs members InvalidateFence: let manager = self.lines.fresh(self.layout.manager())?;", CHOICE),
    ("lock.rs acquire Fence: self.lines.post(self.layout.request(lock, self.node), wanted << 1)?;", LATER),
    (
        "recovery.rs clear_pins Fence: member.lines.publish(member.layout.hazard(node, 0), 8 * crate::layout::PINS as u64)?;",
        LATER,
    ),
    ("counts.rs go_on Invalidate: Ok(member.lines.invalidate(first, length)?)", CHOICE),
    ("counts.rs go_on Invalidate: member.lines.invalidate(first, length)?;", CHOICE),
    ("counts.rs put Flush: Ok(member.lines.flush(at, record.len() as u64)?)", CHOICE),
    ("counts.rs tell Invalidate: member.lines.consume(at, RECORD)?;", CHOICE),
    ("counts.rs tell InvalidateFence: member.lines.consume(at, RECORD)?;", CHOICE),
    ("lock.rs ask Fence: self.lines.post(at, rung | 1 << (lock % 64))?;", LATER),
    ("lock.rs change Fence: lines.publish(pairs[0].0, 8)?;", NEXT),
    ("lock.rs grant_one Fence: self.lines.post(self.layout.grant(lock), asked >> 1)?;", LATER),
    ("member.rs clock Invalidate: self.lines.invalidate(self.layout.node(node), 32)?;", CHOICE),
    ("member.rs clock InvalidateFence: self.lines.settle()?;", CHOICE),
    ("member.rs recovered Fence: self.lines.post(self.layout.fenced(node), u64::from(incarnation))?;", LATER),
    ("member.rs recovered Flush: self.lines.post(self.layout.fenced(node), u64::from(incarnation))?;", LATER),
    ("member.rs succeed Fence: self.lines.post(own, 0)?;", LATER),
    ("member.rs succeed Fence: self.lines.post(own, 1)?;", LATER),
    ("member.rs succeed Flush: self.lines.post(own, 0)?;", LATER),
    ("member.rs succeed Invalidate: self.lines.consume(first, length)?;", LATER),
    ("member.rs is_attached Invalidate: let word = self.lines.fresh(self.layout.node(node))?;", LATER),
    ("member.rs is_attached InvalidateFence: let word = self.lines.fresh(self.layout.node(node))?;", LATER),
    ("message.rs answer Fence: member.lines.fence()?;", NEXT),
    ("message.rs answer Flush: member.lines.flush(answer, LINE)?;", LATER),
    (
        "message.rs answer InvalidateFence: member.lines.consume(first, u64::from(clients) * 2 * LINE)?;",
        LATER,
    ),
    ("message.rs ask_while Fence: member.lines.publish(at, LINE)?;", LATER),
    ("overview.rs overview Invalidate: self.member.lines.consume(0, layout.told())?;", CHOICE),
    ("overview.rs overview InvalidateFence: self.member.lines.consume(0, layout.told())?;", CHOICE),
    ("pool.rs entries Invalidate: member.lines.consume(member.layout.entry(slot), LINE)?;", CHOICE),
    ("pool.rs entries Invalidate: member.lines.invalidate(member.layout.tags(group), 2 * LINE)?;", CHOICE),
    ("pool.rs entries InvalidateFence: member.lines.consume(member.layout.entry(slot), LINE)?;", CHOICE),
    ("pool.rs entries InvalidateFence: member.lines.settle()?;", CHOICE),
    (
        "recovery.rs adopt_all Fence: member.lines.post(member.layout.tag(slot), left.map_or(0, |tag| tag.0))?;",
        NEXT,
    ),
    ("table.rs drain Fence: member.lines.post(at, tail)?;", LATER),
    (
        "server.rs new Fence: member.lines.post(member.layout.server(), of(member.node, member.incarnation))?;",
        NEXT,
    ),
    ("server.rs serves InvalidateFence: let said = member.lines.fresh(member.layout.server())?;", LATER),
    ("table.rs sweep Invalidate: member.lines.consume(member.layout.tags(group), LINE)?;", LATER),
    ("table.rs sweep InvalidateFence: member.lines.consume(member.layout.tags(group), LINE)?;", LATER),
    (
        "table.rs tell_owner Fence: member.lines.post(member.layout.ring_tail(member.node, owner), tail.wrapping_add(1))?;",
        LATER,
    ),
    (
        "table.rs tell_owner InvalidateFence: let head = member.lines.fresh(member.layout.ring_head(member.node, owner))?;",
        LATER,
    ),
    ("lock.rs grant InvalidateFence: self.lines.consume(first, length)?;", LATER),
    (
        "lock.rs grant_one InvalidateFence: self.lines.consume(self.layout.request(lock, 0), u64::from(nodes) * LINE)?;",
        LATER,
    ),
    ("lock.rs ask InvalidateFence: while self.lines.fresh(self.layout.grant(lock))? != wanted {", LATER),
    (
        "lock.rs give_back Fence: member.lines.post(member.layout.request(self.lock, member.node), held << 1)?;",
        LATER,
    ),
    ("pool.rs set_stamp Fence: self.member.lines.publish(at, 8)?;", CHOICE),
];

/// A site by the function and the line that it stands in, which outlive line numbers.
fn name(site: Site) -> String {
    let file = Path::new(site.file).file_name().unwrap().to_str().unwrap();
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(file)).unwrap();
    let lines: Vec<_> = text.lines().collect();
    let at = site.line as usize - 1;
    let of_function = |line: &&str| line.split_once("fn ").map(|(_, rest)| rest.to_owned());
    let function = lines[..=at].iter().rev().find_map(of_function).unwrap_or_default();
    let function: String = function.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    format!("{file} {function} {:?}: {}", site.call, lines[at].trim())
}

thread_local! {
    static IS_QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Whether `scene` ends well. Many panic on purpose, and a message with its backtrace takes longer
/// than the scene: there is none on this thread meanwhile. Others' panics say what they always do.
fn ends_well(scene: Scene, seed: u64, left_out: LeftOut) -> bool {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = panic::take_hook();
        panic::set_hook(Box::new(move |what| {
            if !IS_QUIET.get() {
                usual(what);
            }
        }));
    });
    IS_QUIET.set(true);
    let end = catch_unwind(AssertUnwindSafe(|| scene(seed, Some(left_out))));
    IS_QUIET.set(false);
    matches!(end, Ok(Ok(_)))
}

/// A run that may find a site missing: a scene, by its place in [`SCENES`], and the round.
type Run = (usize, u64);

fn finds(site: Site, (index, round): Run) -> bool {
    let seed = round * 31 + index as u64;
    let ends = |is_control| ends_well(SCENES[index].1, seed, LeftOut { site, is_control });
    !ends(false) && ends(true)
}

/// The run that finds `site` missing, of those by the scenes that come by.
fn search(site: Site, scenes: &[usize]) -> Option<Run> {
    // As many runs, however few scenes come by.
    let rounds = RUNS.div_ceil(scenes.len().min(4) as u64);
    let mut runs = (0..rounds).flat_map(|round| scenes.iter().map(move |index| (*index, round)));
    runs.find(|run| finds(site, *run))
}

fn table() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pool/witnesses.txt")
}

/// The table's runs by a site's name, which several sites may share. A run that is wrong, or a line
/// that is none, costs a search and nothing else.
fn witnesses() -> BTreeMap<String, Vec<Run>> {
    let mut witnesses: BTreeMap<String, Vec<Run>> = BTreeMap::new();
    for line in fs::read_to_string(table()).unwrap_or_default().lines() {
        let [scene, round, name] = line.splitn(3, ' ').collect::<Vec<_>>()[..] else { continue };
        let index = SCENES.iter().position(|(known, _)| *known == scene);
        if let (Some(index), Ok(round)) = (index, round.parse::<u32>()) {
            witnesses.entry(name.to_owned()).or_default().push((index, round.into()));
        }
    }
    witnesses
}

/// All that the scenes come by, and which they are.
fn sites() -> BTreeMap<Site, Vec<usize>> {
    let mut by_site: BTreeMap<Site, Vec<usize>> = BTreeMap::new();
    for (index, (name, scene)) in SCENES.iter().enumerate() {
        let mut sites = BTreeSet::new();
        for round in 0..6 {
            match scene(round * 31 + index as u64, None) {
                Ok(found) => sites.extend(found),
                Err(failures) => panic!("{name} fails with nothing left out: {failures:#?}"),
            }
        }
        for site in sites {
            by_site.entry(site).or_default().push(index);
        }
    }
    by_site
}

#[test]
fn each_flush_invalidation_and_fence_that_is_left_out_is_found() {
    let by_site = sites();
    assert!(by_site.len() > 150, "only {} sites were reached", by_site.len());
    let listed: BTreeMap<_, _> = LISTED.iter().copied().collect();
    let is_listed = |site: &Site| listed.contains_key(name(*site).as_str());
    // For whoever looks for one: `LAMINA_SITES` is a part of the names of those that are tried.
    let wanted = std::env::var("LAMINA_SITES").unwrap_or_default();
    let is_wanted = |site: &Site| !is_listed(site) && name(*site).contains(&wanted);
    let tried: Vec<_> = by_site.iter().filter(|(site, _)| is_wanted(site)).collect();
    let witnesses = witnesses();
    let (next, searched) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let (missed, found) = (Mutex::new(Vec::new()), Mutex::new(BTreeSet::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((site, scenes)) = tried.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let name = name(**site);
                    let mut known = witnesses.get(&name).into_iter().flatten().copied();
                    let run = known.find(|run| finds(**site, *run)).or_else(|| {
                        searched.fetch_add(1, Ordering::Relaxed);
                        search(**site, scenes)
                    });
                    match run {
                        Some((index, round)) => {
                            let line = format!("{} {round} {name}\n", SCENES[index].0);
                            found.lock().unwrap().insert((name, line));
                        }
                        None => missed.lock().unwrap().push(name),
                    }
                }
            });
        }
    });
    let searched = searched.into_inner();
    if searched > 0 {
        // Past the harness, which shows only what failed.
        let advice = "LAMINA_SITES_WRITE=1 has the next run find them at once";
        writeln!(stderr(), "{searched} of {} sites were searched for: {advice}", tried.len()).unwrap();
    }
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "of {} sites nothing finds {missed:#?}", tried.len());
    let names: BTreeSet<_> = by_site.keys().map(|site| name(*site)).collect();
    let gone: Vec<_> = listed.keys().filter(|listed| !names.contains(**listed)).collect();
    assert!(gone.is_empty(), "listed, and not in the code: {gone:#?}");
    assert!(listed.values().all(|why| [LATER, CHOICE, NEXT].contains(why)));
    if std::env::var_os("LAMINA_SITES_WRITE").is_some() {
        assert!(wanted.is_empty(), "LAMINA_SITES chooses a part, and the table has all");
        let lines: String = found.into_inner().unwrap().into_iter().map(|(_, line)| line).collect();
        fs::write(table(), lines).unwrap();
    }
}
