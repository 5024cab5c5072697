//! Each flush, invalidation and fence is needed: left out, one at a time, a scene finds it missing.
//!
//! Which there are is found by running all scenes with all of them. A scene that fails counts only
//! if it ends well when the call is made and everything else is alike. What no scene finds is
//! listed here, with the reason.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use lamina_pool::mem::{LeftOut, Site};

use crate::scenes::{SCENES, Scene};

/// Runs for each site, of all scenes that come by it.
const RUNS: u64 = 1536;

/// Of them, those that all scenes are tried with before [`TELLING`] is.
const FIRST: u64 = 8;

/// Runs that found what few others find, by scene. They save the time of a search while scenes and
/// pool do what they did; what they do not find any more is searched for among all.
const TELLING: &[(&str, &[u64])] = &[
    ("checks", &[11]),
    ("classes", &[8, 19, 32, 78, 98, 104, 140, 211]),
    ("comings", &[20]),
    ("creates", &[18, 78]),
    ("deaths", &[74]),
    ("live", &[12]),
    ("messages", &[10]),
    ("pins", &[8, 15, 16, 23, 25, 33, 56, 60, 126, 217]),
    ("replaced", &[14, 38, 42, 74, 530]),
    ("tight", &[8, 11]),
    ("torn", &[19, 20, 36, 144, 158]),
    ("withdrawn", &[10]),
];

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

/// Whether one of the scenes that come by finds `site` missing.
fn is_found(site: Site, scenes: &[(usize, Scene)]) -> bool {
    let finds = |round: u64, &(index, scene): &(usize, Scene)| {
        let seed = round * 31 + index as u64;
        let ends = |is_control| {
            let run = || scene(seed, Some(LeftOut { site, is_control }));
            matches!(catch_unwind(AssertUnwindSafe(run)), Ok(Ok(_)))
        };
        !ends(false) && ends(true)
    };
    let tells = |at: &(usize, Scene)| {
        let of_scene = TELLING.iter().filter(|(name, _)| *name == SCENES[at.0].0);
        of_scene.flat_map(|(_, rounds)| *rounds).any(|round| finds(*round, at))
    };
    // As many runs, however few scenes come by.
    let runs = RUNS.div_ceil(scenes.len().min(4) as u64);
    let any = |mut rounds: Range<u64>| rounds.any(|round| scenes.iter().any(|at| finds(round, at)));
    any(0..FIRST) || scenes.iter().any(tells) || any(FIRST..runs)
}

/// All that the scenes come by, and which they are.
fn sites() -> BTreeMap<Site, Vec<(usize, Scene)>> {
    let mut by_site: BTreeMap<Site, Vec<(usize, Scene)>> = BTreeMap::new();
    for (index, (name, scene)) in SCENES.iter().enumerate() {
        let mut sites = BTreeSet::new();
        for round in 0..6 {
            match scene(round * 31 + index as u64, None) {
                Ok(found) => sites.extend(found),
                Err(failures) => panic!("{name} fails with nothing left out: {failures:#?}"),
            }
        }
        for site in sites {
            by_site.entry(site).or_default().push((index, *scene));
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
    let is_scene = |name: &str| SCENES.iter().any(|(scene, _)| *scene == name);
    assert!(TELLING.iter().all(|(scene, _)| is_scene(scene)));
    let next = AtomicUsize::new(0);
    let missed = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((site, scenes)) = tried.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if !is_found(**site, scenes) {
                        missed.lock().unwrap().push(name(**site));
                    }
                }
            });
        }
    });
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "of {} sites nothing finds {missed:#?}", tried.len());
    let names: BTreeSet<_> = by_site.keys().map(|site| name(*site)).collect();
    let gone: Vec<_> = listed.keys().filter(|listed| !names.contains(**listed)).collect();
    assert!(gone.is_empty(), "listed, and not in the code: {gone:#?}");
    assert!(listed.values().all(|why| [LATER, CHOICE, NEXT].contains(why)));
}
