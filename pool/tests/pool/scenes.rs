//! Short stories of a few nodes that end in something known, whatever the order.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use lamina_pool::mem::{LeftOut, Site};
use lamina_pool::{Chain, Geometry, Index, IndexServer, Key, Object, Pool, PoolError, ServedIndex};

use crate::basics::bytes;
use crate::classes::classes;
use crate::index::replaced;
use crate::rare::{comings, held, intended, unpinned, watched, withdrawn};
use crate::schedules::{Plan, schedule};
use crate::world::{Work, World, let_others};

/// What a scene gives: the calls that it made, or what was wrong.
pub(crate) type Told = Result<BTreeSet<Site>, Vec<String>>;

/// A scene, by seed and by what is left out.
pub(crate) type Scene = fn(u64, Option<LeftOut>) -> Told;

pub(crate) const SCENES: [(&str, Scene); 26] = [
    ("creates", creates),
    ("numbers", numbers),
    ("pinned", pinned),
    ("kills", kills),
    ("torn", torn),
    ("pins", pins),
    ("lists", lists),
    ("live", live),
    ("elections", elections),
    ("schedules", schedules),
    ("deaths", deaths),
    ("tight", tight),
    ("rings", rings),
    ("touches", touches),
    ("messages", messages),
    ("served", served),
    ("replaced", replaced),
    ("named", named),
    ("checks", checks),
    ("classes", classes),
    ("withdrawn", withdrawn),
    ("unpinned", unpinned),
    ("held", held),
    ("comings", comings),
    ("intended", intended),
    ("watched", watched),
];

fn of(plan: Plan, seed: u64, left_out: Option<LeftOut>) -> Told {
    schedule(seed, plan, left_out).map(|world| world.memory.sites())
}

const PLAN: Plan = Plan { coherent: false, deaths: false, tight: false, operations: 6 };

fn schedules(seed: u64, left_out: Option<LeftOut>) -> Told {
    of(PLAN, seed, left_out)
}

fn deaths(seed: u64, left_out: Option<LeftOut>) -> Told {
    of(Plan { deaths: true, tight: seed.is_multiple_of(2), ..PLAN }, seed, left_out)
}

fn tight(seed: u64, left_out: Option<LeftOut>) -> Told {
    of(Plan { tight: true, ..PLAN }, seed, left_out)
}

/// Runs one node's work while another serves.
pub(crate) fn in_turns(world: &World, other: &Pool, work: impl FnOnce() + Send) -> bool {
    let done = AtomicU32::new(0);
    let serve = |pool: &Pool| {
        while done.load(Ordering::Relaxed) == 0 {
            if pool.serve().is_err() {
                return;
            }
            let_others();
        }
    };
    let works: Vec<Work<'_>> = vec![
        Box::new(|| {
            work();
            done.fetch_add(1, Ordering::Relaxed);
        }),
        Box::new(|| serve(other)),
    ];
    world.run(works, false)
}

pub(crate) fn small() -> Geometry {
    Geometry { nodes: 3, stripes: 1, groups: 2, chunks: 8, chunk_bytes: 4096 }
}

pub(crate) fn key(number: u32) -> Key {
    Chain::new("scenes").next(&[number])
}

pub(crate) fn end(world: &World, wrong: Vec<String>) -> Told {
    if wrong.is_empty() { Ok(world.memory.sites()) } else { Err(wrong) }
}

#[allow(clippy::needless_pass_by_value, reason = "it is what an error is mapped by")]
pub(crate) fn failed(why: PoolError) -> Vec<String> {
    vec![why.to_string()]
}

/// What one node frees another takes back by what it is told, without looking for it.
fn rings(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world = World::new(seed, false, &small());
    world.leave_out(left_out, false);
    let (one, other) = (world.attach(0).map_err(failed)?, world.attach(1).map_err(failed)?);
    let wrong = std::sync::Mutex::new(Vec::new());
    let say = |what: String| wrong.lock().unwrap().push(what);
    for round in 0..70 {
        let stored = in_turns(&world, &other, || match one.store(key(round), &[&[1; 100], &[2; 60]]) {
            Ok(true) => {}
            failed => say(format!("round {round} stores: {failed:?}")),
        });
        let removed = in_turns(&world, &one, || match other.remove(&key(round)) {
            Ok(true) => {}
            failed => say(format!("round {round} removes: {failed:?}")),
        });
        let served = in_turns(&world, &other, || {
            for _ in 0..3 {
                if let Err(why) = one.serve() {
                    say(why.to_string());
                }
            }
        });
        match one.stats() {
            Ok(stats) if stats.evicting == 0 => {}
            found => say(format!("round {round}: {found:?}")),
        }
        if !(stored && removed && served) {
            say("no end".into());
        }
        if !wrong.lock().unwrap().is_empty() {
            break;
        }
    }
    end(&world, wrong.into_inner().unwrap())
}

/// Each node knows what the others used, when it evicts.
fn touches(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world = World::new(seed, false, &small());
    world.leave_out(left_out, false);
    let (one, other) = (world.attach(0).map_err(failed)?, world.attach(1).map_err(failed)?);
    let wrong = std::sync::Mutex::new(Vec::new());
    let say = |what: String| wrong.lock().unwrap().push(what);
    let keys: Vec<_> = (0..8).map(key).collect();
    let mut ended = in_turns(&world, &other, || {
        for key in &keys {
            if one.store(*key, &[&bytes(7, 4096)]).is_err() {
                say("it does not fit".into());
            }
        }
    });
    // The other uses all but two, and some of these again and again.
    for _ in 0..2 {
        ended &= in_turns(&world, &one, || {
            for key in keys.iter().filter(|key| **key != keys[2] && **key != keys[5]) {
                if !matches!(other.prefix(&[*key]), Ok(1)) {
                    say("it is lost".into());
                }
            }
            if let Err(why) = other.tell_touches() {
                say(why.to_string());
            }
        });
        ended &= in_turns(&world, &other, || {
            let told = one.prefix(&keys[..1]).and_then(|_| one.tell_touches());
            if let Err(why) = told {
                say(why.to_string());
            }
        });
    }
    ended &= in_turns(&world, &other, || {
        for new in 100..102 {
            if one.store(key(new), &[&bytes(8, 4096)]).is_err() {
                say("nothing was evicted".into());
            }
        }
        for (number, key) in keys.iter().enumerate() {
            let there = one.read(key).map(|found| found.is_some());
            if !matches!(there, Ok(there) if there != (number == 2 || number == 5)) {
                say(format!("{number}: {there:?}"));
            }
        }
    });
    if !ended {
        say("no end".into());
    }
    end(&world, wrong.into_inner().unwrap())
}

/// A node that checks again and again sees what the other changed meanwhile, and no fault.
fn checks(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world = World::new(seed, false, &Geometry { chunks: 32, ..small() });
    world.leave_out(left_out, false);
    let (one, other) = (world.attach(0).map_err(failed)?, world.attach(1).map_err(failed)?);
    let wrong = std::sync::Mutex::new(Vec::new());
    let say = |what: String| wrong.lock().unwrap().push(what);
    let mut ended = true;
    for round in 0..6_u32 {
        ended &= in_turns(&world, &one, || {
            let length = [100, 3000, 5000][round as usize % 3];
            let done = other
                .store(key(round), &[&bytes(u64::from(round), length)])
                .and_then(|_| other.put(&format!("{}", round % 2), &bytes(9, 60 + length)))
                .and_then(|()| if round > 1 { other.remove(&key(round - 2)) } else { Ok(true) });
            if !matches!(done, Ok(true)) {
                say(format!("round {round}: {done:?}"));
            }
        });
        ended &= in_turns(&world, &other, || {
            let ready = u64::from(round.min(1)) * 2 + 2;
            match one.check(false) {
                Ok(report) if report.problems.is_empty() && report.ready == ready => {}
                found => say(format!("round {round}: {found:?}")),
            }
        });
    }
    if !ended {
        say("no end".into());
    }
    end(&world, wrong.into_inner().unwrap())
}

/// A pool is created in place of another, by a node that dies on the way or does not. Whoever
/// opened the old one finds the old, the new, or none.
fn creates(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world = World::new(seed, false, &small());
    let keys: Vec<_> = (0..6).map(key).collect();
    let one = world.attach(0).map_err(failed)?;
    for key in &keys {
        one.store(*key, &[&bytes(3, 500)]).map_err(failed)?;
    }
    one.leave().map_err(failed)?;
    let open = || Pool::geometry(Arc::new(world.memory.node(2)));
    open().map_err(failed)?;
    world.leave_out(left_out, false);
    let new = Geometry { groups: 1, ..small() };
    if !seed.is_multiple_of(4) {
        world.memory.kill_after(1, world.below(400));
    }
    let created =
        catch_unwind(AssertUnwindSafe(|| Pool::create(Arc::new(world.memory.node(1)), &new).is_ok()));
    let mut wrong = Vec::new();
    match open() {
        Ok(found) if created.is_ok() && found != new => wrong.push("the old is there".to_owned()),
        Err(why) if created.is_ok() => wrong.push(why.to_string()),
        Err(_) => {}
        Ok(found) => {
            let last = world.attach(2).map_err(failed)?;
            let there = keys.iter().filter(|key| matches!(last.read(key), Ok(Some(_)))).count();
            let checked = last.check(false).map_err(failed)?;
            if there != if found == new { 0 } else { 6 } || !checked.problems.is_empty() {
                wrong.push(format!("{there} of 6 are there, {checked:?}"));
            }
        }
    }
    end(&world, wrong)
}

/// Two machines are the same node by turns. Each begins a life of its own.
fn numbers(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world = World::new(seed, false, &small());
    world.leave_out(left_out, false);
    let mut wrong = Vec::new();
    let mut life = |machine: usize, number: u32| -> Result<(), PoolError> {
        let pool = world.attach_as(machine, 0)?;
        pool.store(key(number), &[&bytes(u64::from(number), 700)])?;
        if number > 0 && !pool.remove(&key(number - 1))? {
            wrong.push(format!("{number}: the last life's block is lost"));
        }
        pool.serve()?;
        let stats = pool.stats()?;
        if (stats.blocks, stats.evicting, stats.nodes) != (1, 0, 1) {
            wrong.push(format!("{number}: {stats:?}"));
        }
        pool.leave()
    };
    for number in 0..6 {
        life(number as usize % 2, number).map_err(failed)?;
    }
    end(&world, wrong)
}

/// A reader dies with what it reads pinned, and comes again. What it read can be freed.
fn pinned(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world = World::new(seed, false, &small());
    world.leave_out(left_out, false);
    let one = world.attach(0).map_err(failed)?;
    let wrong = std::sync::Mutex::new(Vec::new());
    let say = |what: String| wrong.lock().unwrap().push(what);
    let reader = world.attach(1).map_err(failed)?;
    let ended = in_turns(&world, &reader, || {
        if let Err(why) = one.store(key(1), &[&bytes(5, 300)]) {
            say(why.to_string());
        }
    });
    world.memory.kill_after(1, world.below(60));
    let _ = catch_unwind(AssertUnwindSafe(|| reader.read(&key(1)).is_ok()));
    world.memory.revive(1);
    let second = std::sync::Mutex::new(None);
    let attached = in_turns(&world, &one, || match world.attach(1) {
        Ok(pool) => *second.lock().unwrap() = Some(pool),
        Err(why) => say(why.to_string()),
    });
    let Some(second) = second.into_inner().unwrap() else { return end(&world, wrong.into_inner().unwrap()) };
    let removed = in_turns(&world, &second, || {
        if !matches!(one.remove(&key(1)), Ok(true)) || one.serve().is_err() {
            say("it is not removed".into());
        }
    });
    match one.stats() {
        Ok(stats) if stats.evicting == 0 && stats.blocks == 0 => {}
        found => say(format!("{found:?}")),
    }
    if !(ended && attached && removed) {
        say("no end".into());
    }
    end(&world, wrong.into_inner().unwrap())
}

/// A node dies while it puts an object in place of another. Whoever checked the pool before does
/// the change whole, or finds that none began.
fn torn(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world = World::new(seed, false, &small());
    world.leave_out(left_out, true);
    let (one, other) = (world.attach(0).map_err(failed)?, world.attach(1).map_err(failed)?);
    one.put("a", &bytes(1, 50)).map_err(failed)?;
    let wrong = std::sync::Mutex::new(Vec::new());
    let say = |what: String| wrong.lock().unwrap().push(what);
    let mut ended = in_turns(&world, &one, || {
        if !matches!(other.check(false), Ok(report) if report.problems.is_empty()) {
            say("a problem before".into());
        }
    });
    let begun = AtomicU32::new(0);
    ended &= world.run(
        vec![
            Box::new(|| {
                world.memory.kill_after(0, 40 + world.below(140));
                let _ = one.put("a", &bytes(2, 60));
                let_others();
                while one.serve().is_ok() {
                    let_others();
                }
            }),
            Box::new(|| {
                while begun.fetch_add(1, Ordering::Relaxed) < 700 {
                    world.clock.fetch_add(1, Ordering::Relaxed);
                    if let Err(why) = other.serve() {
                        return say(why.to_string());
                    }
                    let_others();
                }
                match other.get("a") {
                    Ok(Some(found)) if found == bytes(1, 50) || found == bytes(2, 60) => {}
                    found => say(format!("{found:?}")),
                }
                match other.check(false) {
                    Ok(report) if report.problems.is_empty() && report.ready == 1 => {}
                    found => say(format!("{found:?}")),
                }
            }),
        ],
        false,
    );
    if !ended {
        say("no end".into());
    }
    end(&world, wrong.into_inner().unwrap())
}

/// One node reads what the other replaces all the time, in places that come free at once.
fn pins(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world = World::new(seed, false, &small());
    world.leave_out(left_out, false);
    let (one, other) = (world.attach(0).map_err(failed)?, world.attach(1).map_err(failed)?);
    one.put("a", &bytes(0, 200)).map_err(failed)?;
    let wrong = std::sync::Mutex::new(Vec::new());
    let say = |what: String| wrong.lock().unwrap().push(what);
    let done = AtomicU32::new(0);
    let works: Vec<Work<'_>> = vec![
        Box::new(|| {
            for round in 0..12 {
                if let Err(why) = one.put("a", &bytes(round, 200)) {
                    say(why.to_string());
                }
            }
            done.fetch_add(1, Ordering::Relaxed);
            while done.load(Ordering::Relaxed) < 2 && one.serve().is_ok() {
                let_others();
            }
            match one.stats() {
                Ok(stats) if stats.evicting == 0 => {}
                found => say(format!("{found:?}")),
            }
            done.fetch_add(1, Ordering::Relaxed);
        }),
        Box::new(|| {
            for _ in 0..12 {
                match other.get("a") {
                    Ok(Some(found)) if (0..12).any(|round| found == bytes(round, 200)) => {}
                    found => say(format!("{found:?}")),
                }
            }
            done.fetch_add(1, Ordering::Relaxed);
            while done.load(Ordering::Relaxed) < 3 && other.serve().is_ok() {
                let_others();
            }
        }),
    ];
    if !world.run(works, false) {
        say("no end".into());
    }
    end(&world, wrong.into_inner().unwrap())
}

/// What a node lists and counts again and again is what the other has changed meanwhile.
fn lists(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world = World::new(seed, false, &small());
    world.leave_out(left_out, false);
    let (one, other) = (world.attach(0).map_err(failed)?, world.attach(1).map_err(failed)?);
    let wrong = std::sync::Mutex::new(Vec::new());
    let say = |what: String| wrong.lock().unwrap().push(what);
    let mut ended = true;
    for round in 0..6_u32 {
        let length = 100 + 40 * round as usize;
        let name = |round: u32| "abcdefg"[..=round as usize % 7].repeat(1 + round as usize % 2);
        let taken = AtomicU32::new(0);
        ended &= in_turns(&world, &one, || {
            let change = || -> Result<(), PoolError> {
                if round > 0 {
                    other.delete(&name(round - 1))?;
                    other.remove(&key(round - 1))?;
                }
                other.put(&name(round), &bytes(1, length))?;
                other.store(key(round), &[&bytes(2, 1500 + 900 * (round as usize % 3))])?;
                taken.store(other.stats()?.taken_bytes as u32, Ordering::Relaxed);
                Ok(())
            };
            if let Err(why) = change() {
                say(why.to_string());
            }
        });
        ended &= in_turns(&world, &other, || {
            let want = |listed: &[Object]| matches!(listed, [one] if one.name == name(round) && one.bytes == length as u64);
            match (one.list(), one.stats()) {
                (Ok(listed), Ok(stats))
                    if want(&listed)
                        && (stats.objects, stats.blocks, stats.nodes) == (1, 1, 2)
                        && stats.ready_bytes == (length + 1500 + 900 * (round as usize % 3)) as u64
                        && stats.taken_bytes == u64::from(taken.load(Ordering::Relaxed)) => {}
                found => say(format!("round {round}: {found:?}")),
            }
        });
    }
    if !ended {
        say("no end".into());
    }
    end(&world, wrong.into_inner().unwrap())
}

/// A node checks a pool that two others change meanwhile, and finds no fault.
fn live(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world = World::new(seed, false, &Geometry { chunks: 24, ..small() });
    world.leave_out(left_out, false);
    let wrong = std::sync::Mutex::new(Vec::new());
    let say = |what: String| wrong.lock().unwrap().push(what);
    let done = AtomicU32::new(0);
    let node = |number: u32| {
        let work = || -> Result<(), PoolError> {
            let pool = world.attach(number)?;
            for round in 0..5 {
                if number == 0 {
                    let report = pool.check(false)?;
                    if !report.problems.is_empty() {
                        say(format!("{report:?}"));
                    }
                } else {
                    pool.put(
                        &format!("{}", round % 2),
                        &bytes(u64::from(number), 80 + 900 * round as usize),
                    )?;
                    pool.store(key(10 * number + round), &[&[1; 300]])?;
                    if round > 0 {
                        pool.remove(&key(10 * number + round - 1))?;
                    }
                }
                pool.serve()?;
            }
            done.fetch_add(1, Ordering::Relaxed);
            while done.load(Ordering::Relaxed) < 3 {
                pool.serve()?;
                let_others();
            }
            Ok(())
        };
        if let Err(why) = work() {
            say(format!("node {number}: {why}"));
            done.fetch_add(3, Ordering::Relaxed);
        }
    };
    let works: Vec<Work<'_>> = vec![Box::new(|| node(0)), Box::new(|| node(1)), Box::new(|| node(2))];
    if !world.run(works, false) {
        say("no end".into());
    }
    end(&world, wrong.into_inner().unwrap())
}

/// Nodes that want the same lock all the time, of whom one dies again and again: it managed, or its
/// successor does.
fn elections(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world =
        World::new(seed, false, &Geometry { chunks: 24, stripes: 1, groups: 3, nodes: 3, chunk_bytes: 4096 });
    world.leave_out(left_out, false);
    let wrong = std::sync::Mutex::new(Vec::new());
    let say = |what: String| wrong.lock().unwrap().push(what);
    let done = AtomicU32::new(0);
    let stored: Vec<AtomicU32> = (0..8).map(|_| AtomicU32::new(0)).collect();
    let store = |pool: &Pool, number: usize| -> Result<(), PoolError> {
        if pool.store(key(number as u32), &[&bytes(number as u64, 90)])? {
            stored[number].fetch_add(1, Ordering::Relaxed);
        }
        pool.serve()
    };
    world.memory.kill_after(0, 100 + world.below(900));
    let client = |node: u32| {
        let work = || -> Result<(), PoolError> {
            let pool = world.attach(node)?;
            for number in 0..8 {
                store(&pool, number)?;
            }
            done.fetch_add(1, Ordering::Relaxed);
            while done.load(Ordering::Relaxed) < 3 {
                pool.serve()?;
                let_others();
            }
            if node == 1 {
                for _ in 0..600 {
                    pool.serve()?;
                    world.clock.fetch_add(1, Ordering::Relaxed);
                    let_others();
                }
                let report = pool.check(false)?;
                let reserved = pool.stats()?.reserved;
                // One that the dead began and nobody else stored is not there.
                let known = stored.iter().filter(|times| times.load(Ordering::Relaxed) > 0).count() as u64;
                if !report.problems.is_empty() || report.ready < known || reserved > 0 {
                    say(format!("{report:?}, {reserved} reserved"));
                }
                done.fetch_add(1, Ordering::Relaxed);
            }
            while done.load(Ordering::Relaxed) < 4 {
                pool.serve()?;
                let_others();
            }
            Ok(())
        };
        match work() {
            Ok(()) => {}
            Err(why) => {
                say(format!("node {node}: {why}"));
                done.store(9, Ordering::Relaxed);
            }
        }
    };
    let works: Vec<Work<'_>> = vec![
        Box::new(|| {
            let first = || -> Result<(), PoolError> {
                let pool = world.attach(0)?;
                for number in (0..8).rev() {
                    store(&pool, number)?;
                }
                loop {
                    pool.serve()?;
                    let_others();
                }
            };
            let _ = first();
        }),
        Box::new(|| client(1)),
        Box::new(|| client(2)),
        Box::new(|| {
            for life in 0..2 {
                while !world.memory.is_dead(0) {
                    if done.load(Ordering::Relaxed) > 3 || world.is_over() {
                        return;
                    }
                    let_others();
                }
                world.memory.revive(0);
                if life == 0 {
                    world.memory.kill_after(0, 50 + world.below(500));
                    let again = || {
                        let pool = world.attach(0)?;
                        while done.load(Ordering::Relaxed) < 4 {
                            pool.serve()?;
                            let_others();
                        }
                        Ok::<_, PoolError>(())
                    };
                    let died = catch_unwind(AssertUnwindSafe(again));
                    if let Ok(Err(why)) = died {
                        say(format!("the second life: {why}"));
                    }
                } else {
                    done.fetch_add(1, Ordering::Relaxed);
                }
            }
        }),
    ];
    if !world.run(works, false) {
        say("no end".into());
    }
    let stored: Vec<_> = stored.iter().map(|times| times.load(Ordering::Relaxed)).collect();
    if stored.iter().any(|times| *times > 1) {
        say(format!("stored {stored:?} times"));
    }
    end(&world, wrong.into_inner().unwrap())
}

/// A node dies at any of its steps, and whoever recovers it may die, too. The third finds all that
/// was done, and nothing half done.
fn kills(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world = World::new(seed, false, &Geometry { chunks: 16, ..small() });
    world.leave_out(left_out, true);
    let wrong = std::sync::Mutex::new(Vec::new());
    let say = |what: String| wrong.lock().unwrap().push(what);
    let one = world.attach(0).map_err(failed)?;
    let first = one.put("a", &bytes(1, 700)).and_then(|()| one.store(key(0), &[&bytes(2, 6000)]));
    first.map_err(failed)?;
    let (two, three) = (world.attach(1).map_err(failed)?, world.attach(2).map_err(failed)?);
    world.memory.kill_after(0, world.below(700));
    if seed.is_multiple_of(2) {
        world.memory.kill_after(1, 100 + world.below(900));
    }
    let stage = AtomicU32::new(0);
    let turn = |pool: &Pool| {
        world.clock.fetch_add(2, Ordering::Relaxed);
        let served = pool.serve();
        let_others();
        served.is_ok()
    };
    let work = || -> Result<(), PoolError> {
        one.put("a", &bytes(3, 900))?;
        stage.store(1, Ordering::Relaxed);
        one.store(key(1), &[&bytes(4, 200)])?;
        stage.store(2, Ordering::Relaxed);
        one.remove(&key(0))?;
        stage.store(3, Ordering::Relaxed);
        one.prefix(&[key(1)])?;
        one.tell_touches()?;
        while turn(&one) {
            one.read(&key(1))?;
        }
        Ok(())
    };
    let works: Vec<Work<'_>> = vec![
        Box::new(|| {
            let _ = work();
        }),
        Box::new(|| {
            for round in 0..900 {
                if !turn(&two) || (round % 300 == 20 && two.store(key(10 + round), &[&[7; 90]]).is_err()) {
                    return;
                }
            }
            let _ = two.leave();
        }),
        Box::new(|| {
            for _ in 0..1000 {
                if !turn(&three) {
                    return;
                }
            }
            let ended = stage.load(Ordering::Relaxed);
            let judge = || -> Result<(), PoolError> {
                let (old, new) = (Some(bytes(1, 700)), Some(bytes(3, 900)));
                let a = three.get("a")?;
                if a != new && (a != old || ended >= 1) {
                    say(format!("the object is lost or torn after {ended}"));
                }
                match (three.read(&key(0))?, three.read(&key(1))?) {
                    (Some(found), _) if found != bytes(2, 6000) || ended >= 3 => say("block 0".into()),
                    (None, _) if ended < 2 => say("block 0 is lost".into()),
                    (_, Some(found)) if found != bytes(4, 200) => say("block 1 is torn".into()),
                    (_, None) if ended >= 2 => say("block 1 is lost".into()),
                    _ => {}
                }
                let report = three.check(false)?;
                let stats = three.stats()?;
                if !report.problems.is_empty() || stats.reserved + stats.evicting > 0 {
                    say(format!("{report:?}, {stats:?}"));
                }
                for number in [0, 1, 30, 330, 630] {
                    three.remove(&key(number))?;
                }
                three.delete("a")?;
                // The second may have died only now.
                for _ in 0..400 {
                    turn(&three);
                }
                let stats = three.stats()?;
                if stats.evicting > 0 || stats.taken_bytes > 4096 * 8 {
                    say(format!("leaked: {stats:?}"));
                }
                Ok(())
            };
            match judge() {
                Ok(()) | Err(PoolError::Fenced { .. }) => {}
                Err(why) => say(why.to_string()),
            }
        }),
    ];
    if !world.run(works, false) {
        say("no end".into());
    }
    end(&world, wrong.into_inner().unwrap())
}

/// Two clients ask a server, which dies and comes again: each is answered, nothing is done twice,
/// and what may be lost is said.
fn messages(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world = World::new(seed, false, &small());
    world.leave_out(left_out, false);
    let wrong = std::sync::Mutex::new(Vec::new());
    let say = |what: String| wrong.lock().unwrap().push(what);
    let counts: Vec<AtomicU32> = (0..64).map(|_| AtomicU32::new(0)).collect();
    let done = AtomicU32::new(0);
    // Of those that die, half do so in the middle of what was asked.
    let dies_at_work = AtomicBool::new(seed.is_multiple_of(4));
    if seed % 4 == 2 {
        world.memory.kill_after(0, 600 + seed * 7 % 900);
    }
    let serve = |pool: &Pool| -> Result<(), PoolError> {
        while done.load(Ordering::Relaxed) < 2 {
            pool.answer(|request| {
                let number = request.body[0];
                counts[usize::from(number)].fetch_add(1, Ordering::Relaxed);
                if number % 16 == 3 && dies_at_work.swap(false, Ordering::Relaxed) {
                    world.memory.kill_after(0, 1);
                }
                // Others may run while it works.
                pool.get("nothing")?;
                Ok((request.op + 1, vec![number, 9]))
            })?;
            pool.serve()?;
            let_others();
        }
        Ok(())
    };
    let client = |node: u32| {
        let pool = match world.attach(node) {
            Ok(pool) => pool,
            Err(why) => return say(why.to_string()),
        };
        for round in 0..8 {
            let number = node as u8 * 16 + round;
            match pool.ask(0, 5, &[number]) {
                Ok(Some((6, body))) if body == [number, 9] => {
                    if counts[usize::from(number)].load(Ordering::Relaxed) != 1 {
                        say(format!("{number} was not done once"));
                    }
                }
                Ok(None) if seed.is_multiple_of(2) => {}
                other => say(format!("{number}: {other:?}")),
            }
        }
        while done.load(Ordering::Relaxed) < 2 {
            if pool.serve().is_err() {
                return;
            }
            done.fetch_add(1, Ordering::Relaxed);
            while done.load(Ordering::Relaxed) < 2 {
                if pool.serve().is_err() {
                    return;
                }
                let_others();
            }
        }
    };
    let works: Vec<Work<'_>> = vec![
        Box::new(|| {
            if let Ok(pool) = world.attach(0) {
                let _ = serve(&pool);
            }
        }),
        Box::new(|| client(1)),
        Box::new(|| client(2)),
        // It starts again.
        Box::new(|| {
            while !world.memory.is_dead(0) && done.load(Ordering::Relaxed) < 2 && !world.is_over() {
                let_others();
            }
            if done.load(Ordering::Relaxed) < 2 {
                world.memory.revive(0);
                match world.attach(0).and_then(|pool| serve(&pool)) {
                    Ok(()) => {}
                    Err(why) => say(format!("the second server: {why}")),
                }
            }
        }),
    ];
    if !world.run(works, false) {
        say("no end".into());
    }
    for (number, count) in counts.iter().enumerate() {
        if count.load(Ordering::Relaxed) > 1 {
            say(format!("{number} was done twice"));
        }
    }
    end(&world, wrong.into_inner().unwrap())
}

/// Two nodes store and read by an index that a third serves.
fn served(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world = World::new(seed, false, &Geometry { nodes: 3, chunks: 24, groups: 6, ..small() });
    let pools = (0..3).map(|node| world.attach(node).map(Arc::new)).collect::<Result<Vec<_>, _>>();
    let pools = pools.map_err(failed)?;
    world.leave_out(left_out, false);
    let wrong = std::sync::Mutex::new(Vec::new());
    let say = |what: String| wrong.lock().unwrap().push(what);
    let left = AtomicU32::new(2);
    let client = |pool: &Arc<Pool>, own: u32| {
        let index = ServedIndex::new(Arc::clone(pool));
        let work = || -> Result<(), PoolError> {
            for round in 0..6 {
                let content = |number: u32| bytes(u64::from(number) + 40, 150 + 90 * number as usize);
                let number = own * 6 + round;
                if !index.store(key(number), &[&content(number)])? {
                    say(format!("{number} is not stored"));
                }
                // What the other has stored by now, and one's own.
                for number in [number, (1 - own) * 6 + round] {
                    let mut found = vec![0; content(number).len()];
                    let there = index.read_into(&key(number), &mut [&mut found])?;
                    if there && found != content(number) || !there && number / 6 == own {
                        say(format!("{number} is {there}, and not what was stored"));
                    }
                }
                let keys: Vec<_> = (own * 6..=number).map(key).collect();
                let found = index.prefix(&keys)?;
                if found != keys.len() {
                    say(format!("{found} of {} are there", keys.len()));
                }
            }
            if index.remove(&key(own * 6))? && !index.remove(&key(own * 6))? {
                return Ok(());
            }
            say(format!("{} is removed otherwise", own * 6));
            Ok(())
        };
        if let Err(why) = work() {
            say(why.to_string());
        }
        left.fetch_sub(1, Ordering::Relaxed);
        while left.load(Ordering::Relaxed) > 0 && pool.serve().is_ok() {
            let_others();
        }
    };
    let works: Vec<Work<'_>> = vec![
        Box::new(|| client(&pools[0], 0)),
        Box::new(|| client(&pools[1], 1)),
        Box::new(|| {
            let Ok(server) = IndexServer::new(Arc::clone(&pools[2])) else { return };
            while left.load(Ordering::Relaxed) > 0 && pools[2].serve().is_ok() && server.turn().is_ok() {
                let_others();
            }
        }),
    ];
    if !world.run(works, false) {
        say("no end".into());
    }
    end(&world, wrong.into_inner().unwrap())
}

/// Blocks with names: two nodes keep the same, one stores each, and both read them whole, held
/// while the other evicts.
fn named(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world = World::new(seed, false, &Geometry { chunks: 4, groups: 3, ..small() });
    let pools = (0..2).map(|node| world.attach(node)).collect::<Result<Vec<_>, _>>().map_err(failed)?;
    world.leave_out(left_out, false);
    let wrong = std::sync::Mutex::new(Vec::new());
    let say = |what: String| wrong.lock().unwrap().push(what);
    let left = AtomicU32::new(2);
    let client = |pool: &Pool| {
        let work = || -> Result<(), PoolError> {
            for round in 0..24_u32 {
                // More than there is space for, and in part the other's.
                let number = (round * 7 + pool.node() * 3) % 20;
                let (name, content) = (format!("block {number}"), bytes(u64::from(number), 700));
                match pool.keep_from(&name, 700, |block| block.append(&content)) {
                    // All that could go is held.
                    Ok(_) | Err(PoolError::Full { .. } | PoolError::NoSlot) => {}
                    Err(why) => return Err(why),
                }
                // It may be evicted again already.
                let Some(held) = pool.hold_named(&name)? else { continue };
                for _ in 0..2 {
                    let mut found = Vec::new();
                    held.read(|part| found.extend_from_slice(part))?;
                    if found != content || held.bytes() != 700 {
                        say(format!("{name} is not what was stored"));
                    }
                    let_others();
                }
            }
            Ok(())
        };
        if let Err(why) = work() {
            say(why.to_string());
        }
        left.fetch_sub(1, Ordering::Relaxed);
        while left.load(Ordering::Relaxed) > 0 && pool.serve().is_ok() {
            let_others();
        }
    };
    let works: Vec<Work<'_>> = vec![Box::new(|| client(&pools[0])), Box::new(|| client(&pools[1]))];
    if !world.run(works, false) {
        say("no end".into());
    }
    match pools[0].check(false) {
        Ok(report) if report.problems.is_empty() => {}
        found => say(format!("{found:?}")),
    }
    end(&world, wrong.into_inner().unwrap())
}

#[test]
fn all_scenes_end_as_they_should() {
    for seed in 0..12 {
        for (name, scene) in SCENES {
            match scene(seed, None) {
                Ok(sites) => assert!(sites.len() > 30, "{name} makes few calls: {}", sites.len()),
                Err(failures) => panic!("{name}, seed {seed}: {failures:#?}"),
            }
        }
    }
}

/// With this seed the server dies while a client that waits for its answer manages.
#[test]
fn a_client_that_manages_recovers_the_server_that_it_waits_for() {
    assert_eq!(messages(594, None).err(), None);
}
