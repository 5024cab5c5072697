//! Scenes of what seldom comes together: each for calls that no other scene misses.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use lamina_pool::fuzzing::intent_at;
use lamina_pool::mem::LeftOut;
use lamina_pool::{Geometry, Key, Pool, PoolError};

use crate::basics::bytes;
use crate::scenes::{Told, end, failed, in_turns, key, small};
use crate::world::{Work, World, geometry, let_others};

/// Serves for a while, in which time goes on.
fn serve_for(world: &World, pool: &Pool, turns: u32) -> Result<(), PoolError> {
    for _ in 0..turns {
        world.clock.fetch_add(1, Ordering::Relaxed);
        pool.serve()?;
        let_others();
    }
    Ok(())
}

/// A node asks for a lock that nobody grants, for who manages is stopped, and withdraws. It asks no
/// more, and the others get the lock.
pub(crate) fn withdrawn(seed: u64, left_out: Option<LeftOut>) -> Told {
    let mut world = World::new(seed, false, &small());
    let (one, other) = (world.attach(0).map_err(failed)?, world.attach(1).map_err(failed)?);
    world.max_wait = 60;
    let hasty = world.attach(2).map_err(failed)?;
    world.leave_out(left_out, false);
    let wrong = Mutex::new(Vec::new());
    let say = |what: String| wrong.lock().unwrap().push(what);
    let left = AtomicU32::new(2);
    let works: Vec<Work<'_>> = vec![
        Box::new(|| {
            // It manages, and is stopped for less than it takes to be dead.
            while left.load(Ordering::Relaxed) == 2 {
                let_others();
            }
            while left.load(Ordering::Relaxed) > 0 && one.serve().is_ok() {
                let_others();
            }
        }),
        Box::new(|| {
            match hasty.store(key(1), &[&bytes(1, 200)]) {
                Err(PoolError::Timeout(_)) => {}
                found => say(format!("the hasty one: {found:?}")),
            }
            left.fetch_sub(1, Ordering::Relaxed);
            while left.load(Ordering::Relaxed) > 0 && hasty.serve().is_ok() {
                let_others();
            }
        }),
        Box::new(|| {
            while left.load(Ordering::Relaxed) == 2 {
                let_others();
            }
            let stored = other.store(key(1), &[&bytes(1, 200)]);
            if !matches!(stored, Ok(true)) {
                say(format!("the other: {stored:?}"));
            }
            left.store(0, Ordering::Relaxed);
        }),
    ];
    if !world.run(works, false) {
        say("no end".into());
    }
    end(&world, wrong.into_inner().unwrap())
}

/// A word says of a change that it is told and not done. Who looks finds that, and finds it no more
/// once the word says so no more.
pub(crate) fn intended(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world = World::new(seed, false, &small());
    let (one, other) = (world.attach(0).map_err(failed)?, world.attach(1).map_err(failed)?);
    world.leave_out(left_out, false);
    let intent = intent_at(&small(), 1).map_err(failed)?;
    let wrong = Mutex::new(Vec::new());
    let mut ended = true;
    for (word, many) in [(1, 1), (0, 0)] {
        world.memory.damage(intent, &[word]).unwrap();
        ended &= in_turns(&world, &other, || match one.check(false) {
            Ok(report) if report.problems.len() == many => {}
            found => wrong.lock().unwrap().push(format!("{word}: {found:?}")),
        });
    }
    if !ended {
        wrong.lock().unwrap().push("no end".into());
    }
    end(&world, wrong.into_inner().unwrap())
}

/// A node counts on for long, and does nothing else. Who manages never takes it for dead.
pub(crate) fn watched(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world = World::new(seed, false, &small());
    let (manager, one) = (world.attach(0).map_err(failed)?, world.attach(1).map_err(failed)?);
    let turn = || {
        // Time enough for a count and a look.
        world.clock.fetch_add(60, Ordering::Relaxed);
        one.serve().and_then(|()| manager.serve()).map_err(failed)
    };
    turn()?;
    world.leave_out(left_out, false);
    // Three times what it takes to be dead.
    for _ in 0..20 {
        turn()?;
    }
    end(&world, if world.memory.is_revoked(1) { vec!["it is revoked".into()] } else { Vec::new() })
}

/// A reader dies with what it reads pinned, and comes never again. Who manages clears the pin, and
/// another, whose place it is, frees what was read.
pub(crate) fn unpinned(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world = World::new(seed, false, &small());
    world.leave_out(left_out, false);
    let pools = (0..3).map(|node| world.attach(node)).collect::<Result<Vec<_>, _>>().map_err(failed)?;
    let [manager, reader, owner] = &pools[..] else { return Err(vec!["not three".into()]) };
    let wrong = Mutex::new(Vec::new());
    let say = |what: String| wrong.lock().unwrap().push(what);
    let stored = in_turns(&world, manager, || {
        if let Err(why) = owner.store(key(1), &[&bytes(5, 300)]) {
            say(why.to_string());
        }
    });
    let left = AtomicU32::new(1);
    let works: Vec<Work<'_>> = vec![
        Box::new(|| {
            while left.load(Ordering::Relaxed) > 0 && manager.serve().is_ok() {
                let_others();
            }
        }),
        Box::new(|| {
            let held = reader.hold(&key(1));
            world.memory.kill_after(1, 1);
            let _ = catch_unwind(AssertUnwindSafe(|| held.map(|held| held.map(|held| held.read(|_| ())))));
        }),
        Box::new(|| {
            let work = || -> Result<(), PoolError> {
                serve_for(&world, owner, 100)?;
                if !owner.remove(&key(1))? {
                    say("it is not removed".into());
                }
                serve_for(&world, owner, 1200)?;
                // Nobody tells the owner that a pin is gone. It looks when it wants space.
                owner.check(false)?;
                owner.stats().map(|stats| {
                    if stats.evicting > 0 || stats.nodes != 2 || stats.manager != Some(0) {
                        say(format!("{stats:?}"));
                    }
                })
            };
            if let Err(why) = work() {
                say(why.to_string());
            }
            left.store(0, Ordering::Relaxed);
        }),
    ];
    let ended = world.run(works, false) && stored;
    if !ended {
        say("no end".into());
    }
    end(&world, wrong.into_inner().unwrap())
}

/// A node holds an object while the other puts others in its place, and reads it late.
pub(crate) fn held(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world = World::new(seed, false, &small());
    world.leave_out(left_out, false);
    let (one, other) = (world.attach(0).map_err(failed)?, world.attach(1).map_err(failed)?);
    let wrong = Mutex::new(Vec::new());
    let say = |what: String| wrong.lock().unwrap().push(what);
    let (begun, done) = (AtomicU32::new(0), AtomicU32::new(0));
    let works: Vec<Work<'_>> = vec![
        Box::new(|| {
            for round in 0..40 {
                if let Err(why) = one.put("a", &bytes(round, 200)) {
                    say(why.to_string());
                }
                begun.store(1, Ordering::Relaxed);
            }
            done.fetch_add(1, Ordering::Relaxed);
            while done.load(Ordering::Relaxed) < 2 && one.serve().is_ok() {
                let_others();
            }
        }),
        Box::new(|| {
            while begun.load(Ordering::Relaxed) == 0 {
                let_others();
            }
            let work = || -> Result<(), PoolError> {
                for _ in 0..6 {
                    let Some(held) = other.hold_named("a")? else { continue };
                    for _ in 0..150 {
                        let_others();
                    }
                    let mut found = Vec::new();
                    held.read(|part| found.extend_from_slice(part))?;
                    if !(0..40).any(|round| found == bytes(round, 200)) {
                        say("it is torn".into());
                    }
                }
                Ok(())
            };
            if let Err(why) = work() {
                say(why.to_string());
            }
            done.fetch_add(1, Ordering::Relaxed);
            while done.load(Ordering::Relaxed) < 2 && other.serve().is_ok() {
                let_others();
            }
        }),
    ];
    if !world.run(works, false) {
        say("no end".into());
    }
    end(&world, wrong.into_inner().unwrap())
}

/// A node checks and counts all the time while another comes, stores, holds, and goes, and a third
/// manages, or goes too. Nothing is found that does not hold.
pub(crate) fn comings(seed: u64, left_out: Option<LeftOut>) -> Told {
    let world = World::new(seed, false, &Geometry { chunks: 24, ..small() });
    world.leave_out(left_out, false);
    let (manager, one) = (world.attach(0).map_err(failed)?, world.attach(2).map_err(failed)?);
    let wrong = Mutex::new(Vec::new());
    let say = |what: String| wrong.lock().unwrap().push(what);
    let (left, is_there) = (AtomicU32::new(2), AtomicU32::new(0));
    let come = |number: u32| -> Result<(), PoolError> {
        let pool = world.attach(1)?;
        is_there.store(1, Ordering::Relaxed);
        let own: Key = key(10 + number);
        pool.store(own, &[&bytes(7, 200 + 1300 * (number as usize % 3))])?;
        let held = pool.hold(&own)?;
        for _ in 0..60 {
            pool.serve()?;
            let_others();
        }
        drop(held);
        pool.remove(&own)?;
        pool.serve()?;
        is_there.store(0, Ordering::Relaxed);
        pool.leave()
    };
    let works: Vec<Work<'_>> = vec![
        Box::new(|| {
            while left.load(Ordering::Relaxed) > 0 && manager.serve().is_ok() {
                let_others();
            }
        }),
        Box::new(|| {
            for number in 0..4 {
                if let Err(why) = come(number) {
                    say(format!("who comes: {why}"));
                }
            }
            left.fetch_sub(1, Ordering::Relaxed);
        }),
        Box::new(|| {
            let work = || -> Result<(), PoolError> {
                let mut more = 2;
                while more > 0 {
                    more -= u32::from(left.load(Ordering::Relaxed) < 2);
                    let before = is_there.load(Ordering::Relaxed);
                    let stats = one.stats()?;
                    let others = 2 + u64::from(before);
                    let is_same = before == is_there.load(Ordering::Relaxed);
                    if stats.manager != Some(0) || is_same && before == 1 && stats.nodes < others {
                        say(format!("{before}: {stats:?}"));
                    }
                    let report = one.check(false)?;
                    if !report.problems.is_empty() {
                        say(format!("{report:?}"));
                        break;
                    }
                }
                Ok(())
            };
            if let Err(why) = work() {
                say(format!("who checks: {why}"));
            }
            left.store(0, Ordering::Relaxed);
        }),
    ];
    if !world.run(works, false) {
        say("no end".into());
    }
    end(&world, wrong.into_inner().unwrap())
}

/// All hosts are stopped together for long, and one goes on before the others.
#[test]
fn hosts_that_were_stopped_together_take_none_of_them_for_dead() {
    for seed in 0..6 {
        let world = World::new(seed, seed % 2 == 0, &small());
        let pools: Vec<_> = (0..3).map(|node| world.attach(node).unwrap()).collect();
        let go_on = |which: &[usize], turns: u32| {
            for _ in 0..turns {
                world.clock.fetch_add(1, Ordering::Relaxed);
                for node in which {
                    pools[*node].serve().unwrap();
                }
            }
        };
        let revoked = || (0..3).filter(|node| world.memory.is_revoked(*node)).collect::<Vec<_>>();
        for first in 0..3 {
            // They know each other.
            go_on(&[0, 1, 2], 900);
            // Ten times what it takes to be dead.
            world.clock.fetch_add(4000, Ordering::Relaxed);
            go_on(&[first], 100);
            assert_eq!(revoked(), [0; 0], "seed {seed}: {first} goes on first");
        }
        // Who does not go on is dead nevertheless.
        go_on(&[0, 1, 2], 100);
        go_on(&[0, 1], 1000);
        assert_eq!(revoked(), [2], "seed {seed}");
    }
}

/// A node dies while it takes a run of chunks, and another takes what of it was still free before
/// the first is recovered. That stays the other's.
#[test]
fn what_another_takes_of_a_run_that_was_not_taken_whole_stays_its_own() {
    let mut deaths = 0;
    for steps in 1.. {
        let world = World::new(7, true, &geometry());
        let (survivor, dying) = (world.attach(0).unwrap(), world.attach(1).unwrap());
        world.memory.kill_after(1, steps);
        if catch_unwind(AssertUnwindSafe(|| dying.put("large", &bytes(1, 5 * 4096)))).is_ok() {
            break;
        }
        deaths += 1;
        // Who waits for a lock of the dead is given it, and has recovered nothing yet.
        survivor.put("kept", &bytes(2, 4000)).unwrap();
        serve_for(&world, &survivor, 2000).unwrap();
        let third = world.attach(2).unwrap();
        for number in 0..3 {
            // If the dead one stored its object, there is no room for all of these.
            match third.put(&format!("{number}"), &bytes(3, 4000)) {
                Ok(()) | Err(PoolError::Full { .. } | PoolError::NoSlot) => {}
                Err(why) => panic!("after {steps} steps: {why}"),
            }
        }
        let kept = survivor.get("kept").map(|kept| kept.map(|kept| kept == bytes(2, 4000)));
        assert!(matches!(kept, Ok(Some(true))), "after {steps} steps: {kept:?}");
        let problems = survivor.check(false).unwrap().problems;
        assert!(problems.is_empty(), "after {steps} steps: {problems:?}");
    }
    assert!(deaths > 20, "{deaths}");
}
