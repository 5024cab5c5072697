//! Chunks of different classes in one pool: what the device is told is what lies there, whoever
//! dies when.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use lamina_pool::mem::LeftOut;
use lamina_pool::{Class, Geometry, Pool, PoolError};

use crate::basics::{bytes, serving, worlds};
use crate::scenes::{Told, end, failed, in_turns, small};
use crate::world::{Work, World, let_others};

/// Two KV caches of other rows.
fn kv() -> [Class; 2] {
    [Class::new("bf16", Some("64,32")).unwrap(), Class::new("fp8_e4m3fn", Some("128,16")).unwrap()]
}

/// Stores an object of the class of its number, of which zero is the pool's own.
fn put(pool: &Pool, class: usize, name: &str, content: &[u8]) -> Result<(), PoolError> {
    match class.checked_sub(1) {
        None => pool.put(name, content),
        Some(class) => pool.of(&kv()[class])?.put(name, content),
    }
}

/// What does not lie in a chunk of the class that its name begins with, or is told to the device
/// as another.
fn misplaced(world: &World, pool: &Pool, chunk_bytes: u64) -> Result<Vec<String>, PoolError> {
    let written = |class: usize| class.checked_sub(1).map(|of| kv()[of].to_string()).unwrap_or_default();
    let mut wrong = Vec::new();
    for object in pool.list()? {
        let class = written(object.name[..1].parse().unwrap());
        let first = object.at / chunk_bytes;
        let last = (object.at + object.bytes.max(1) - 1) / chunk_bytes;
        let told: Vec<_> = (first..=last).map(|chunk| world.declared(chunk * chunk_bytes)).collect();
        if object.class != class || told.iter().any(|told| *told != class) {
            wrong.push(format!("{object:?} is {class:?}, and told {told:?}"));
        }
    }
    Ok(wrong)
}

#[test]
fn one_pool_holds_what_is_of_several_classes() {
    for world in worlds() {
        let one = world.attach(0).unwrap();
        for (number, length) in [100, 100, 100, 3000, 3000, 5000].into_iter().enumerate() {
            put(&one, number % 3, &format!("{} {number}", number % 3), &bytes(7, length)).unwrap();
        }
        assert_eq!(misplaced(&world, &one, 4096).unwrap(), Vec::<String>::new());
        let other = world.attach(1).unwrap();
        let done = AtomicU32::new(0);
        let works: Vec<Work<'_>> = vec![
            Box::new(|| {
                assert_eq!(other.get("2 5").unwrap(), Some(bytes(7, 5000)));
                let shares = other.stats().unwrap().by_class;
                let told = shares.iter().map(|share| (share.class.as_str(), share.ready_bytes));
                let want = [("", 3100), ("bf16 64,32", 3100), ("fp8_e4m3fn 128,16", 5100)];
                assert_eq!(told.collect::<Vec<_>>(), want);
                assert_eq!(shares.iter().map(|share| share.taken_bytes).sum::<u64>(), 4096 * 8);
                // What becomes free is told to be another's.
                for name in ["1 1", "1 4"] {
                    assert!(other.delete(name).unwrap());
                }
                done.fetch_add(1, Ordering::Relaxed);
            }),
            serving(&one, &done, 1),
        ];
        assert!(world.run(works, false));
        one.serve().unwrap();
        put(&one, 2, "2 6", &bytes(8, 4000)).unwrap();
        assert_eq!(misplaced(&world, &one, 4096).unwrap(), Vec::<String>::new());
        assert!(one.check(false).unwrap().problems.is_empty());
        // What no device knows is refused, and leaves nothing behind.
        let unknown = Class::new("unknown", None).unwrap();
        assert!(matches!(one.of(&unknown), Err(PoolError::Declare(_))));
        for number in 2..15 {
            one.of(&Class::new(&number.to_string(), None).unwrap()).unwrap();
        }
        one.of(&kv()[0]).unwrap();
        let another = Class::new("another", None).unwrap();
        assert!(matches!(one.of(&another), Err(PoolError::Classes { most: 15 })));
    }
}

#[test]
fn a_class_that_a_damaged_pool_says_is_found_and_mended() {
    let world = World::new(0, true, &small());
    let one = world.attach(0).unwrap();
    put(&one, 1, "1", &bytes(1, 100)).unwrap();
    let media = world.memory.media();
    let line = media.windows(10).position(|window| window == b"bf16 64,32").unwrap() as u64;
    world.memory.damage(line, b"x").unwrap();
    let problems = one.check(false).unwrap().problems;
    assert_eq!(
        problems.iter().map(|problem| problem.what).collect::<Vec<_>>(),
        ["a chunk of no known class", "a class that does not check"]
    );
    assert_eq!(one.get("1").unwrap(), Some(bytes(1, 100)), "a class changes no byte");
    // The number is nobody else's: chunks of what it was bear it.
    let line = line / 64 * 64;
    let is_kept = |kept: &[u8]| world.memory.media()[line as usize..][..64] == *kept;
    let damaged = world.memory.media()[line as usize..][..64].to_vec();
    put(&one, 2, "2", &bytes(2, 100)).unwrap();
    assert!(is_kept(&damaged), "a damaged line was taken for free");
    one.check(true).unwrap();
    assert!(one.check(false).unwrap().problems.is_empty());
    assert_eq!(one.get("1").unwrap(), Some(bytes(1, 100)));
    let lost = world.memory.media()[line as usize..][..64].to_vec();
    put(&one, 1, "1 again", &bytes(3, 100)).unwrap();
    for number in 3..15 {
        one.of(&Class::new(&number.to_string(), None).unwrap()).unwrap();
    }
    let another = Class::new("another", None).unwrap();
    assert!(matches!(one.of(&another), Err(PoolError::Classes { most: 15 })));
    assert!(is_kept(&lost), "a number that is lost was given again");
    let listed: Vec<_> = one.list().unwrap().into_iter().map(|object| (object.name, object.class)).collect();
    let told = |name: &str, class: &str| (name.to_owned(), class.to_owned());
    let [narrow, wide] = kv().map(|class| class.to_string());
    assert_eq!(listed, [told("1", ""), told("1 again", &narrow), told("2", &wide)]);
}

/// Two nodes store objects of three classes where there is hardly space, so chunks go from one
/// class to the other; one of them dies at any of its steps, and may die in the device's call. What
/// is ready lies in chunks that the device was told to be so.
pub(crate) fn classes(seed: u64, left_out: Option<LeftOut>) -> Told {
    let geometry = Geometry { chunks: 6, groups: 4, ..small() };
    let world = World::new(seed, false, &geometry);
    world.leave_out(left_out, true);
    let wrong = Mutex::new(Vec::new());
    let say = |what: String| wrong.lock().unwrap().push(what);
    let (one, other) = (world.attach(0).map_err(failed)?, world.attach(1).map_err(failed)?);
    if !seed.is_multiple_of(3) {
        world.memory.kill_after(0, 100 + world.below(3500));
    }
    let left = AtomicU32::new(2);
    let work = |pool: &Pool| -> Result<(), PoolError> {
        for round in 0..10_usize {
            let class = (round + pool.node() as usize * 2) % 3;
            let name = format!("{class} {} {}", pool.node(), round % 4);
            match put(pool, class, &name, &bytes(round as u64, 60 + 1900 * (round % 3))) {
                Ok(()) | Err(PoolError::Full { .. } | PoolError::NoSlot) => {}
                Err(why) => return Err(why),
            }
            let gone = format!("{} {} {}", (class + 1) % 3, pool.node(), (round + 2) % 4);
            pool.delete(&gone)?;
        }
        Ok(())
    };
    let works: Vec<Work<'_>> = vec![
        Box::new(|| {
            let worked = catch_unwind(AssertUnwindSafe(|| work(&one)));
            left.fetch_sub(1, Ordering::Relaxed);
            match worked {
                Ok(Ok(()) | Err(PoolError::Fenced { .. })) => {}
                Ok(Err(why)) => say(format!("one: {why}")),
                Err(_) => return,
            }
            while left.load(Ordering::Relaxed) > 0 && one.serve().is_ok() {
                let_others();
            }
        }),
        Box::new(|| {
            match work(&other) {
                Ok(()) => {}
                Err(why) => say(format!("other: {why}")),
            }
            // Whoever died is recovered by now.
            for _ in 0..1500 {
                world.clock.fetch_add(1, Ordering::Relaxed);
                if let Err(why) = other.serve() {
                    return say(format!("it serves: {why}"));
                }
                let_others();
            }
            left.fetch_sub(1, Ordering::Relaxed);
        }),
    ];
    if !world.run(works, false) {
        say("no end".into());
    }
    let judge = || {
        // Before anything else has this node look at the chunks anew.
        match (other.stats(), other.list()) {
            (Ok(stats), Ok(listed)) => {
                for share in stats.by_class {
                    let of = listed.iter().filter(|object| object.class == share.class);
                    if share.ready_bytes != of.map(|object| object.bytes).sum::<u64>() {
                        say(format!("{share:?} of {listed:?}"));
                    }
                }
            }
            found => say(format!("{found:?}")),
        }
        match misplaced(&world, &other, geometry.chunk_bytes) {
            Ok(wrong) => wrong.into_iter().for_each(&say),
            Err(why) => say(format!("it lists: {why}")),
        }
        match other.check(false) {
            Ok(report) if report.problems.is_empty() => {}
            found => say(format!("{found:?}")),
        }
    };
    if !in_turns(&world, &one, judge) && !world.memory.is_dead(0) {
        say("no end of the end".into());
    }
    end(&world, wrong.into_inner().unwrap())
}
