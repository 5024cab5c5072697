//! Short stories of a few nodes that end in something known, whatever the order.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};

use lamina_pool::mem::Site;
use lamina_pool::{Chain, Geometry, Key, Pool, PoolError};

use crate::basics::bytes;
use crate::schedules::{Plan, schedule};
use crate::world::{Work, World, let_others};

/// What a scene gives: the calls that it made, or what was wrong.
type Told = Result<BTreeSet<Site>, Vec<String>>;

/// A scene, by seed and by what is left out.
type Scene = fn(u64, Option<Site>) -> Told;

pub(crate) const SCENES: [(&str, Scene); 7] = [
    ("schedules", schedules),
    ("deaths", deaths),
    ("tight", tight),
    ("rings", rings),
    ("touches", touches),
    ("messages", messages),
    ("checks", checks),
];

fn of(plan: Plan, seed: u64, left_out: Option<Site>) -> Told {
    schedule(seed, plan, left_out).map(|world| world.memory.sites())
}

const PLAN: Plan = Plan { coherent: false, deaths: false, tight: false, operations: 6 };

fn schedules(seed: u64, left_out: Option<Site>) -> Told {
    of(PLAN, seed, left_out)
}

fn deaths(seed: u64, left_out: Option<Site>) -> Told {
    of(Plan { deaths: true, tight: seed.is_multiple_of(2), ..PLAN }, seed, left_out)
}

fn tight(seed: u64, left_out: Option<Site>) -> Told {
    of(Plan { tight: true, ..PLAN }, seed, left_out)
}

/// Runs one node's work while another serves.
fn in_turns(world: &World, other: &Pool, work: impl FnOnce() + Send) -> bool {
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

fn small() -> Geometry {
    Geometry { nodes: 3, stripes: 1, groups: 2, chunks: 8, chunk_bytes: 4096 }
}

fn key(number: u32) -> Key {
    Chain::new("scenes").next(&[number])
}

fn end(world: &World, wrong: Vec<String>) -> Told {
    if wrong.is_empty() { Ok(world.memory.sites()) } else { Err(wrong) }
}

#[allow(clippy::needless_pass_by_value, reason = "it is what an error is mapped by")]
fn failed(why: PoolError) -> Vec<String> {
    vec![why.to_string()]
}

/// What one node frees another takes back by what it is told, without looking for it.
fn rings(seed: u64, left_out: Option<Site>) -> Told {
    let world = World::new(seed, false, &small());
    world.memory.leave_out(left_out);
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
fn touches(seed: u64, left_out: Option<Site>) -> Told {
    let world = World::new(seed, false, &small());
    world.memory.leave_out(left_out);
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
fn checks(seed: u64, left_out: Option<Site>) -> Told {
    let world = World::new(seed, false, &Geometry { chunks: 32, ..small() });
    world.memory.leave_out(left_out);
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

/// Two clients ask a server, which dies and comes again: each is answered, nothing is done twice,
/// and what may be lost is said.
fn messages(seed: u64, left_out: Option<Site>) -> Told {
    let world = World::new(seed, false, &small());
    world.memory.leave_out(left_out);
    let wrong = std::sync::Mutex::new(Vec::new());
    let say = |what: String| wrong.lock().unwrap().push(what);
    let counts: Vec<AtomicU32> = (0..64).map(|_| AtomicU32::new(0)).collect();
    let done = AtomicU32::new(0);
    if seed.is_multiple_of(2) {
        world.memory.kill_after(0, 600 + seed * 7 % 900);
    }
    let serve = |pool: &Pool| -> Result<(), PoolError> {
        while done.load(Ordering::Relaxed) < 2 {
            pool.answer(|request| {
                let number = request.body[0];
                counts[usize::from(number)].fetch_add(1, Ordering::Relaxed);
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
            while !world.memory.is_dead(0) && done.load(Ordering::Relaxed) < 2 {
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

/// What `site` says of its call, in the files of the pool.
fn of_file<'a>(sites: &'a BTreeSet<Site>, file: &'a str) -> impl Iterator<Item = Site> + 'a {
    sites.iter().filter(move |site| site.file.ends_with(file)).copied()
}

/// Each call of the protocol of messages is needed: left out, one after the other, it is missed.
#[test]
fn each_call_of_the_messages_is_missed_when_it_is_left_out() {
    let sites: BTreeSet<_> = (0..8).flat_map(|seed| messages(seed, None).unwrap()).collect();
    let mut tried = 0;
    for site in of_file(&sites, "message.rs") {
        tried += 1;
        let is_missed = |seed: u64| {
            let ran = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| messages(seed, Some(site))));
            !matches!(ran, Ok(Ok(_)))
        };
        assert!((0..200).any(is_missed), "nothing misses {site:?}");
    }
    assert!(tried >= 8, "{tried}");
}
