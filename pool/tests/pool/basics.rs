//! What a pool does, one thing after the other, in memory that does nothing by itself.

use std::sync::atomic::{AtomicU32, Ordering};

use lamina_pool::{Attached, Chain, Geometry, Key, Overview, Pool, PoolError, Reserved};

use crate::world::{Work, World, geometry, let_others};

/// Both kinds of memory, and of the second a few of its caches' moods.
pub(crate) fn worlds() -> impl Iterator<Item = World> {
    let all = [(0, true), (0, false), (1, false), (2, false), (4, false)];
    all.into_iter().map(|(seed, coherent)| World::new(seed, coherent, &geometry()))
}

pub(crate) fn bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut word = seed | 1;
    std::iter::repeat_with(|| {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (word >> 56) as u8
    })
    .take(length)
    .collect()
}

fn key(number: u32) -> Key {
    Chain::new("test").next(&[number])
}

#[test]
fn objects_are_put_got_replaced_listed_and_deleted_by_all() {
    for world in worlds() {
        let one = world.attach(0).unwrap();
        let other = world.attach(1).unwrap();
        assert_eq!(one.get("a").unwrap(), None);
        one.put("a", &bytes(1, 300)).unwrap();
        assert_eq!(other.get("a").unwrap(), Some(bytes(1, 300)));
        let done = AtomicU32::new(0);
        world.run(
            vec![
                Box::new(|| {
                    other.put("a", &bytes(2, 5000)).unwrap();
                    other.put("empty", &[]).unwrap();
                    assert_eq!(other.list().unwrap().len(), 2);
                    assert!(other.delete("empty").unwrap());
                    assert!(!other.delete("empty").unwrap());
                    other.put("b", &bytes(3, 17)).unwrap();
                    done.fetch_add(1, Ordering::Relaxed);
                }),
                serving(&one, &done, 1),
            ],
            false,
        );
        assert_eq!(one.get("a").unwrap(), Some(bytes(2, 5000)));
        assert_eq!(one.get("empty").unwrap(), None);
        let names: Vec<_> =
            one.list().unwrap().into_iter().map(|object| (object.name, object.bytes)).collect();
        assert_eq!(names, [("a".to_owned(), 5000), ("b".to_owned(), 17)]);
        assert!(matches!(one.put("", &[]), Err(PoolError::NoName)));
        assert!(matches!(one.put(&"x".repeat(1025), &[]), Err(PoolError::TooLong { .. })));
        let report = one.check(false).unwrap();
        assert_eq!((report.problems.as_slice(), report.ready, report.bytes), (&[][..], 2, 5017));
    }
}

/// A node that does its duty until `most` others are done.
pub(crate) fn serving<'p>(pool: &'p Pool, done: &'p AtomicU32, most: u32) -> Work<'p> {
    Box::new(move || {
        while done.load(Ordering::Relaxed) < most {
            pool.serve().unwrap();
            let_others();
        }
    })
}

#[test]
fn blocks_are_stored_once_gathered_scattered_and_read_in_parts() {
    for world in worlds() {
        let one = world.attach(0).unwrap();
        let (k, v) = (bytes(1, 700), bytes(2, 700));
        assert!(one.store(key(1), &[&k, &v]).unwrap());
        assert!(!one.store(key(1), &[&v, &k]).unwrap(), "stored once");
        let (mut first, mut second) = (vec![0; 1000], vec![0; 400]);
        assert!(one.read_into(&key(1), &mut [&mut first, &mut second]).unwrap());
        assert_eq!([first, second].concat(), [&k[..], &v[..]].concat());
        let (mut part, mut last) = ([0; 4], [0; 2]);
        assert!(one.read_parts(&key(1), &mut [(699, &mut part), (1398, &mut last)]).unwrap());
        assert_eq!(part[..], [&k[699..], &v[..3]].concat());
        assert_eq!(last, v[698..]);
        let past = one.read_parts(&key(1), &mut [(1397, &mut part)]);
        assert!(matches!(past, Err(PoolError::End { at: 1397, length: 4, bytes: 1400 })));
        assert!(!one.read_into(&key(2), &mut [&mut part]).unwrap());
        // A reservation holds others off until it is dropped.
        let Reserved::Yours(mut mine) = one.reserve(key(3), 100).unwrap() else { panic!("free") };
        assert!(matches!(one.reserve(key(3), 100).unwrap(), Reserved::Busy));
        mine.append(&[0; 60]).unwrap();
        assert!(matches!(mine.append(&[0; 41]), Err(PoolError::End { .. })));
        drop(mine);
        let Reserved::Yours(mine) = one.reserve(key(3), 100).unwrap() else { panic!("given back") };
        assert!(matches!(mine.commit(), Err(PoolError::End { .. })), "bytes are missing");
        assert_eq!(one.read(&key(3)).unwrap(), None);
        assert!(one.remove(&key(1)).unwrap());
        assert!(one.check(false).unwrap().problems.is_empty());
        assert_eq!(one.stats().unwrap().taken_bytes, 4096 * 2, "one chunk of each size is kept");
    }
}

#[test]
fn what_was_used_least_recently_goes_first_and_of_a_prefix_its_end() {
    for world in worlds() {
        // Eight chunks, each a block.
        let one = world.attach(0).unwrap();
        let keys: Vec<_> = (0..7).map(key).collect();
        for key in &keys {
            assert!(one.store(*key, &[&[1; 4096]]).unwrap());
        }
        assert!(one.store(key(100), &[&[1; 4096]]).unwrap());
        assert_eq!(one.prefix(&keys[..3]).unwrap(), 3);
        assert!(one.read(&keys[5]).unwrap().is_some());
        let there = |pool: &lamina_pool::Pool| {
            let all = keys.iter().chain([&key(100)]).copied().collect::<Vec<_>>();
            all.into_iter().map(|key| pool.remove(&key).unwrap()).collect::<Vec<_>>()
        };
        for new in 200..205 {
            assert!(one.store(key(new), &[&[2; 4096]]).unwrap());
        }
        // 3, 4, 6 and 100 were never used again, and of the prefix 2 is its end.
        assert_eq!(there(&one), [true, true, false, false, false, true, false, false]);
    }
}

#[test]
fn a_pool_that_is_full_of_objects_says_so_and_evicts_none() {
    for (number, world) in worlds().enumerate() {
        let one = world.attach(0).unwrap();
        for number in 0..8 {
            let put = one.put(&format!("{number}"), &[7; 4000]);
            assert_eq!(put.is_ok(), number < 7, "{put:?}: a chunk for the names");
        }
        assert!(matches!(one.put("x", &vec![0; 40_000]), Err(PoolError::Full { others: 0, .. })));
        assert_eq!(one.list().unwrap().len(), 7);
        let (other, done) = (world.attach(1).unwrap(), AtomicU32::new(0));
        let refused = || {
            let why = other.put("x", b"x").unwrap_err().to_string();
            assert!(why.starts_with("no space for 1 bytes: nothing can be evicted"), "{why}");
            // It is only looked for in memory that is coherent.
            assert_eq!(why.contains("; other nodes have 32768 bytes of chunks"), number == 0, "{why}");
            done.fetch_add(1, Ordering::Relaxed);
        };
        world.run(vec![Box::new(refused), serving(&one, &done, 1)], false);
        assert!(one.delete("3").unwrap());
        one.put("8", &[8; 4000]).unwrap();
        assert_eq!(one.get("8").unwrap(), Some(vec![8; 4000]));
        assert!(one.check(false).unwrap().problems.is_empty());
    }
}

/// More slots than there are places.
fn slots(groups: u32) -> Geometry {
    Geometry { groups, ..geometry() }
}

#[test]
fn what_finds_no_run_beside_the_objects_evicts_nothing() {
    for (seed, coherent) in [(0, true), (0, false), (1, false), (2, false)] {
        let world = World::new(seed, coherent, &slots(16));
        let one = world.attach(0).unwrap();
        // A chunk for its bytes and one for its name, of eight.
        one.put("stays", &[1; 100]).unwrap();
        for number in 0..6 {
            assert!(one.store(key(number), &[&[2; 4096]]).unwrap());
        }
        let large = vec![3; 8 * 4096];
        let long = "n".repeat(200);
        for (name, chunks) in [("large", 7), ("large", 8), (&*long, 6)] {
            let large = &large[..chunks * 4096];
            let kept = one.keep_from(name, large.len() as u64, |place| place.append(large));
            let refused = [kept.map(drop), one.put(name, large)];
            for refused in refused {
                let bytes = large.len() as u64;
                assert!(
                    matches!(refused, Err(PoolError::Full { bytes: of, .. }) if of == bytes),
                    "{refused:?}"
                );
            }
            assert_eq!(one.stats().unwrap().blocks, 6, "{name}, {chunks}");
        }
        // What all of them make room for does.
        one.put("large", &large[..6 * 4096]).unwrap();
        assert_eq!(one.stats().unwrap().blocks, 0);
        assert!(one.get("stays").unwrap() == Some(vec![1; 100]));
        assert!(one.get("large").unwrap().is_some_and(|found| found == large[..6 * 4096]));
        assert!(one.check(false).unwrap().problems.is_empty());
    }
}

#[test]
fn what_finds_no_chunk_without_objects_evicts_nothing() {
    for (seed, coherent) in [(0, true), (0, false), (1, false), (2, false)] {
        let world = World::new(seed, coherent, &slots(16));
        let one = world.attach(0).unwrap();
        // In each of seven chunks an object and a block; in the eighth the names.
        for number in 0..7 {
            one.put(&format!("{number}"), &[1; 2048]).unwrap();
            assert!(one.store(key(number), &[&[2; 2048]]).unwrap());
        }
        let refused = one.store(key(100), &[&[3; 100]]);
        assert!(matches!(refused, Err(PoolError::Full { bytes: 100, .. })), "{refused:?}");
        assert_eq!(one.stats().unwrap().blocks, 7);
        // A block's place is one for what is as large.
        one.put("as large", &[4; 2048]).unwrap();
        assert_eq!((one.stats().unwrap().blocks, one.list().unwrap().len()), (6, 8));
        assert!(one.check(false).unwrap().problems.is_empty());
    }
}

#[test]
fn a_pool_in_which_nothing_can_be_evicted_is_looked_through_once() {
    let world = World::new(0, true, &Geometry { chunks: 2, ..slots(600) });
    let (one, other) = (world.attach(0).unwrap(), world.attach(1).unwrap());
    let reserved = (0..2).map(|number| match other.reserve(key(number), 4096).unwrap() {
        Reserved::Yours(reserved) => reserved,
        _ => panic!("free"),
    });
    let reserved: Vec<_> = reserved.collect();
    let began = world.clock.load(Ordering::Relaxed);
    let refused = one.put("x", b"x");
    assert!(matches!(refused, Err(PoolError::Full { bytes: 1, others: 8192 })), "{refused:?}");
    assert_eq!(world.clock.load(Ordering::Relaxed), began, "nobody is waited for");
    for mut reserved in reserved {
        reserved.append(&[1; 4096]).unwrap();
        reserved.commit().unwrap();
    }
    // A block is found, in whatever group.
    let done = AtomicU32::new(0);
    let puts = || {
        one.put("x", b"x").unwrap();
        done.fetch_add(1, Ordering::Relaxed);
    };
    assert!(world.run(vec![Box::new(puts), serving(&other, &done, 1)], false));
    assert_eq!(other.get("x").unwrap(), Some(b"x".to_vec()));
}

#[test]
fn a_run_that_another_has_made_empty_and_not_yet_given_back_is_waited_for() {
    let large = vec![7; 8 * 4096];
    for seed in 0..100 {
        let world = World::new(seed, seed % 2 == 0, &geometry());
        let (one, other) = (world.attach(0).unwrap(), world.attach(1).unwrap());
        let done = AtomicU32::new(0);
        let store = |pool: &Pool, number| {
            let stored = pool.store(key(number), &[&large]);
            assert!(matches!(stored, Ok(true)), "seed {seed}: {stored:?}");
            done.fetch_add(1, Ordering::Relaxed);
        };
        assert!(world.run(vec![Box::new(|| store(&other, 1)), serving(&one, &done, 1)], false));
        assert!(world.run(vec![Box::new(|| store(&one, 2)), serving(&other, &done, 2)], false));
        assert!(one.read(&key(2)).unwrap().is_some_and(|found| found == large));
    }
}

#[test]
fn what_another_frees_while_the_table_is_looked_through_is_had() {
    let (large, geometry) = (vec![7; 4096], Geometry { chunks: 4, ..slots(600) });
    for seed in 0..100 {
        let world = World::new(seed, true, &geometry);
        let (one, other) = (world.attach(0).unwrap(), world.attach(1).unwrap());
        one.put("mine", &large).unwrap();
        other.put("old", &large).unwrap();
        let done = AtomicU32::new(0);
        let replaces = || {
            assert!(one.delete("old").unwrap());
            let put = one.put("new", &large);
            done.fetch_add(1, Ordering::Relaxed);
            assert!(put.is_ok(), "seed {seed}: {put:?}");
        };
        assert!(world.run(vec![Box::new(replaces), serving(&other, &done, 1)], false));
    }
}

#[test]
fn what_a_node_that_left_had_reserved_is_waited_for() {
    for coherent in [true, false] {
        let world = World::new(0, coherent, &Geometry { chunks: 2, ..slots(600) });
        let (one, other) = (world.attach(0).unwrap(), world.attach(1).unwrap());
        let done = AtomicU32::new(0);
        let leaves = || {
            for number in 0..2 {
                let reserved = other.reserve(key(number), 4096).unwrap();
                assert!(matches!(reserved, Reserved::Yours(_)));
                std::mem::forget(reserved);
            }
            other.leave().unwrap();
            done.fetch_add(1, Ordering::Relaxed);
        };
        assert!(world.run(vec![Box::new(leaves), serving(&one, &done, 1)], false));
        let puts = || {
            let put = one.put("x", b"x");
            assert!(put.is_ok(), "coherent: {coherent}: {put:?}");
        };
        assert!(world.run(vec![Box::new(puts)], false));
        assert_eq!(one.get("x").unwrap(), Some(b"x".to_vec()));
    }
}

#[test]
fn objects_that_have_all_slots_of_a_key_are_said_to() {
    for world in worlds() {
        let one = world.attach(0).unwrap();
        // There are four groups of eight slots, and space for more.
        let put = |number: u32| one.put(&format!("{number}"), b"");
        let stored: Vec<_> = (0..40).filter(|number| put(*number).is_ok()).collect();
        assert!((8..33).contains(&stored.len()));
        let refused = (0..40).find(|number| !stored.contains(number)).unwrap();
        let why = put(refused).unwrap_err();
        assert!(matches!(why, PoolError::NoSlot), "{why}");
        assert!(why.to_string().contains("eight that this key may have hold objects"), "{why}");
        assert!(one.stats().unwrap().taken_bytes < 3 * 4096);
        // Blocks make room.
        for number in &stored {
            assert!(one.delete(&format!("{number}")).unwrap());
        }
        for number in 0..100 {
            assert!(one.store(key(number), &[b"block"]).unwrap());
        }
        put(refused).unwrap();
        assert!(one.check(false).unwrap().problems.is_empty());
    }
}

#[test]
fn objects_are_replaced_however_many_their_keys_have() {
    for world in worlds() {
        let one = world.attach(0).unwrap();
        let other = world.attach(1).unwrap();
        // There are four groups of eight slots, and all the objects there can be.
        let name = |number: u32| format!("{number}");
        let stored: Vec<_> = (0..80).filter(|number| one.put(&name(*number), b"").is_ok()).collect();
        assert_eq!(stored.len(), 4 * 7);
        let done = AtomicU32::new(0);
        world.run(
            vec![
                Box::new(|| {
                    for number in &stored {
                        other.put(&name(*number), &[1; 20]).unwrap();
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                }),
                serving(&one, &done, 1),
            ],
            false,
        );
        for number in &stored {
            assert_eq!(one.get(&name(*number)).unwrap(), Some(vec![1; 20]));
        }
        assert_eq!(one.list().unwrap().len(), stored.len());
        assert!(one.check(false).unwrap().problems.is_empty());
    }
}

#[test]
fn a_block_that_is_damaged_is_dropped_by_who_reads_it_and_stored_anew() {
    for world in worlds() {
        let (one, other) = (world.attach(0).unwrap(), world.attach(1).unwrap());
        let reader = world.attach(2).unwrap();
        let (block, named, object) = (bytes(1, 3000), bytes(3, 3000), bytes(5, 3000));
        let damage = || {
            let media = world.memory.media();
            for stored in [&block, &named, &object] {
                let at = media.windows(64).position(|found| found == &stored[1024..1088]).unwrap();
                world.memory.damage(at as u64, &[!stored[1024]]).unwrap();
            }
        };
        let store = || {
            assert!(one.store(key(1), &[&block]).unwrap());
            assert!(one.keep_from("named", 3000, |place| place.append(&named)).unwrap());
            one.put("object", &object).unwrap();
        };
        let is_damaged = |found: Result<Option<Vec<u8>>, PoolError>| {
            assert!(matches!(found, Err(PoolError::Damaged { .. })), "{found:?}");
        };
        store();
        damage();
        // A check that is to mend nothing drops nothing.
        assert_eq!(one.check(false).unwrap().problems.len(), 3);
        // What another has pinned stays where it is until that one is done.
        let pinned = reader.hold(&key(1)).unwrap().unwrap();
        let left = AtomicU32::new(0);
        world.run(
            vec![
                Box::new(|| {
                    is_damaged(other.read(&key(1)));
                    let held = other.hold_named("named").unwrap().unwrap();
                    assert!(matches!(held.read(|_| ()), Err(PoolError::Damaged { .. })));
                    is_damaged(other.get("object"));
                    assert!(other.stats().unwrap().evicting >= 1);
                    assert!(other.store(key(1), &[&block]).unwrap());
                    assert!(matches!(pinned.read(|_| ()), Err(PoolError::Damaged { .. })));
                    assert_eq!(other.read(&key(1)).unwrap(), Some(block.clone()));
                    left.fetch_add(1, Ordering::Relaxed);
                }),
                serving(&one, &left, 1),
            ],
            false,
        );
        assert_eq!(other.get("named").unwrap(), None);
        is_damaged(other.get("object"));
        assert!(one.keep_from("named", 3000, |place| place.append(&named)).unwrap());
        one.put("object", &object).unwrap();
        assert_eq!(other.get("named").unwrap(), Some(named));
        assert_eq!(other.get("object").unwrap(), Some(object));
        let report = one.check(false).unwrap();
        assert_eq!((report.problems.as_slice(), report.ready), (&[][..], 3));
        assert_eq!(one.stats().unwrap().evicting, 0);
    }
}

#[test]
fn a_block_whose_name_is_damaged_is_none_and_is_stored_anew() {
    for world in worlds() {
        let one = world.attach(0).unwrap();
        let name = "a name of some length that is nowhere else";
        let keep = || one.keep_from(name, 3, |place| place.append(b"abc")).unwrap();
        assert!(keep() && !keep());
        let at = world.memory.media().windows(name.len()).position(|found| found == name.as_bytes());
        world.memory.damage(at.unwrap() as u64, b"A").unwrap();
        assert!(one.hold_named(name).unwrap().is_none());
        assert!(keep());
        assert!(one.hold_named(name).unwrap().is_some());
        assert!(one.check(false).unwrap().problems.is_empty());
    }
}

#[test]
fn a_run_of_chunks_holds_what_is_larger_than_one() {
    for world in worlds() {
        let one = world.attach(0).unwrap();
        for round in 0..20 {
            let large = bytes(round, 4096 * 5 + 1);
            assert!(one.store(key(1), &[&large]).unwrap());
            assert_eq!(one.read(&key(1)).unwrap(), Some(large));
            assert!(one.remove(&key(1)).unwrap());
        }
        assert_eq!(one.stats().unwrap().taken_bytes, 0);
    }
}

#[test]
fn what_cannot_be_a_pool_is_refused() {
    let world = World::new(0, true, &geometry());
    world.memory.damage(20, &[9]).unwrap();
    assert!(world.attach(0).is_err());
    world.memory.damage(0, &[9]).unwrap();
    assert!(matches!(world.attach(0), Err(PoolError::NoPool(_))));
    let bad = Geometry { nodes: 0, ..geometry() };
    assert!(matches!(bad.bytes(), Err(PoolError::Geometry(_))));
}

#[test]
fn blocks_with_names_are_kept_once_listed_evicted_and_read_in_parts() {
    for world in worlds() {
        let (one, other) = (world.attach(0).unwrap(), world.attach(1).unwrap());
        let keep = |pool: &Pool, name: &str, seed: u64| {
            pool.keep_from(name, 2500, |reservation| {
                bytes(seed, 2500).chunks(777).try_for_each(|piece| reservation.append(piece))
            })
        };
        assert!(keep(&one, "a", 1).unwrap());
        assert!(!keep(&other, "a", 2).unwrap(), "what is there stays");
        let held = other.hold_named("a").unwrap().expect("it is there");
        let mut read = Vec::new();
        held.read(|part| read.extend_from_slice(part)).unwrap();
        assert_eq!((held.bytes(), read), (2500, bytes(1, 2500)));
        drop(held);
        assert!(other.hold_named("b").unwrap().is_none());
        assert_eq!(one.list().unwrap().len(), 1);
        // An object takes a block's place, and stays; a block does not take an object's.
        one.put("a", b"object").unwrap();
        assert!(!keep(&one, "a", 3).unwrap());
        assert_eq!(other.get("a").unwrap().unwrap(), b"object");
        for seed in 0..40 {
            assert!(keep(&one, &format!("kept {seed}"), seed).unwrap());
        }
        let left = one.list().unwrap();
        assert!(left.len() < 40, "some were evicted");
        for object in left.iter().filter(|object| object.name != "a") {
            let seed = object.name.strip_prefix("kept ").unwrap().parse().unwrap();
            assert_eq!(one.get(&object.name).unwrap().unwrap(), bytes(seed, 2500));
        }
        assert_eq!(one.get("a").unwrap().unwrap(), b"object");
        assert!(one.delete("kept 39").unwrap() && one.hold_named("kept 39").unwrap().is_none());
        // Of what fails in the middle nothing is left.
        let failed = one.keep_from("c", 10, |reservation| reservation.append(&[0; 11]));
        assert!(matches!(failed, Err(PoolError::End { .. })), "{failed:?}");
        assert!(one.keep_from("", 0, |_| Ok(())).is_err());
        assert_eq!(one.check(false).unwrap().problems, []);
    }
}

#[test]
fn nodes_tell_what_they_did_and_go_on_from_what_was_told() {
    for world in worlds() {
        let one = world.attach(0).unwrap();
        one.put("a", &bytes(1, 300)).unwrap();
        one.store(key(1), &[&bytes(2, 200)]).unwrap();
        assert!(one.get("a").unwrap().is_some() && one.get("b").unwrap().is_none());
        for _ in 0..200 {
            world.clock.fetch_add(10, Ordering::Relaxed);
            one.serve().unwrap();
        }
        // Read as who has nothing but the bytes reads it.
        let media = world.memory.media();
        let read = |at: u64, into: &mut [u8]| {
            into.copy_from_slice(&media[at as usize..][..into.len()]);
            Ok::<_, ()>(())
        };
        let seen = Overview::read(media.len() as u64, read).unwrap().unwrap();
        assert_eq!(seen.attached, [Attached { node: 0, manages: true }]);
        let held = seen.occupancy.unwrap();
        assert_eq!((held.blocks, held.objects, held.ready_bytes), (1, 1, 500));
        assert_eq!(held.taken_bytes, one.stats().unwrap().taken_bytes);
        let [node] = &seen.nodes[..] else { panic!("{seen:?}") };
        assert_eq!((node.hits, node.misses, node.stores), (1, 1, 2));
        assert_eq!((node.read_bytes, node.stored_bytes, node.evictions), (300, 500, 0));
        one.leave().unwrap();
        // Whoever has the number next adds to it.
        let next = world.attach(0).unwrap();
        assert!(next.get("a").unwrap().is_some());
        let stats = next.stats().unwrap();
        assert_eq!((stats.hits, stats.by_node[0].hits, stats.by_node[0].stores), (1, 2, 2));
        // What does not check is not there, and nothing depends on it.
        let told = media.windows(8).position(|word| *word == 500_u64.to_le_bytes()).unwrap();
        world.memory.damage(told as u64, &[7]).unwrap();
        let other = world.attach(1).unwrap();
        assert_eq!(other.get("a").unwrap(), Some(bytes(1, 300)));
    }
}
