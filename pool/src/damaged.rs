//! Words of a pool that were damaged, one at a time: what is lost by them, what is told, what is
//! mended.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tempfile::TempDir;

use crate::check::Report;
use crate::error::PoolError;
use crate::heap::is_taken;
use crate::key::{Chain, Key};
use crate::layout::{Geometry, Layout, SLOTS, Slot};
use crate::local::{self, Processes};
use crate::mem::{CxlMem, LINE, Lines, Mapped};
use crate::pool::Pool;
use crate::service::Service;
use crate::service::tests::{Hasty, until};
use crate::table::{Entry, State, Tag, find};

/// Bytes of a chunk of [`Place`]'s pool.
const CHUNK: usize = 256 << 10;

/// A file with a pool.
struct Place {
    folder: TempDir,
    memory: Arc<Mapped>,
    layout: Layout,
}

impl Place {
    fn new() -> Self {
        Self::of(&Geometry::fitting(8 << 20))
    }

    fn of(geometry: &Geometry) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pool");
        local::create(&path, geometry).unwrap();
        let memory = local::memory(&path).unwrap();
        let layout = Layout::open(&Lines::new(memory.clone())).unwrap();
        Self { folder, memory, layout }
    }

    fn open(&self) -> Pool {
        Pool::open(&self.folder.path().join("pool")).unwrap()
    }

    fn word(&self, at: u64) -> u64 {
        let mut word = [0; 8];
        self.memory.load(at, &mut word).unwrap();
        u64::from_le_bytes(word)
    }

    fn set(&self, at: u64, word: u64) {
        self.memory.store(at, &word.to_le_bytes()).unwrap();
    }

    /// Damages the entry of what `key` has.
    fn damage_entry(&self, pool: &Pool, key: &Key) -> Slot {
        let (slot, _) = find(&pool.member, key).unwrap().expect("it is there");
        let at = self.layout.entry(slot) + 16;
        self.set(at, self.word(at) ^ 0xee);
        slot
    }
}

/// The slots of a group, and their tags.
fn slots(place: &Place, group: u32) -> impl Iterator<Item = (Slot, Tag)> {
    let of = move |index| {
        let slot = Slot { group, index };
        (slot, Tag(place.word(place.layout.tag(slot))))
    };
    (0..SLOTS as u32).map(of)
}

fn content(number: usize, length: usize) -> Vec<u8> {
    (0..length).map(|index| (index * 31 + number * 7) as u8).collect()
}

fn key(number: u32) -> Key {
    Chain::new("damaged").next(&[number])
}

fn whats(report: &Report) -> Vec<&'static str> {
    report.problems.iter().map(|problem| problem.what).collect()
}

/// Objects of three kinds: 20 that share a chunk, 5 that share another, and one that has a run.
fn put_all(pool: &Pool) {
    for number in 0..20 {
        pool.put(&format!("small {number}"), &content(number, 50)).unwrap();
    }
    for number in 0..5 {
        pool.put(&format!("middle {number}"), &content(number, 120)).unwrap();
    }
    pool.put("run", &content(0, 3 * CHUNK - 5)).unwrap();
}

fn all_are_there(pool: &Pool, what: &str) {
    for number in 0..20 {
        let found = pool.get(&format!("small {number}")).unwrap();
        assert_eq!(found, Some(content(number, 50)), "{what}: small {number}");
    }
    for number in 0..5 {
        let found = pool.get(&format!("middle {number}")).unwrap();
        assert_eq!(found, Some(content(number, 120)), "{what}: middle {number}");
    }
    assert!(pool.get("run").unwrap() == Some(content(0, 3 * CHUNK - 5)), "{what}: run");
}

/// The chunk in which the bytes of an object begin.
fn chunk(place: &Place, pool: &Pool, name: &str) -> u32 {
    let (slot, tag) = find(&pool.member, &Key::of_name(name)).unwrap().expect("it is there");
    let entry = Entry::load(&pool.member, slot, tag).unwrap().expect("it checks");
    place.layout.chunk_of(entry.at).expect("it lies in a chunk")
}

/// Which word is damaged of the chunk of what, and what it is instead.
type Damage = (&'static str, u64, fn(u64) -> u64);

/// Words that say how chunks are carved.
const SIZES: [Damage; 11] = [
    ("small 0", 8, |_| 65),
    ("small 0", 8, |_| 128),
    ("small 0", 8, |_| 0),
    ("small 0", 8, |_| u64::MAX),
    ("small 0", 0, |word| word & !0xff_ffff),
    ("small 0", 0, |word| word | 7),
    ("middle 0", 8, |_| 0x81),
    ("middle 0", 8, |_| 64),
    ("run", 8, |word| word + 1),
    ("run", 0, |word| word & !0xff_ffff),
    ("run", 0, |word| word & !0xff_ffff | 1),
];

#[test]
fn what_a_chunk_holds_stays_whatever_is_said_of_its_size() {
    for (number, (name, at, damage)) in SIZES.into_iter().enumerate() {
        let what = format!("damage {number}");
        let place = Place::new();
        let pool = place.open();
        put_all(&pool);
        let at = place.layout.chunk(chunk(&place, &pool, name)) + at;
        pool.leave().unwrap();
        place.set(at, damage(place.word(at)));
        let pool = place.open();
        for number in 0..30 {
            pool.put(&format!("new {number}"), &content(number, 50)).unwrap();
        }
        pool.put("new run", &content(1, 2 * CHUNK)).unwrap();
        all_are_there(&pool, &what);
        assert_eq!(pool.check(false).unwrap().problems, [], "{what}");
    }
}

#[test]
fn a_chunk_stays_while_what_points_into_it_says_two_things() {
    let place = Place::new();
    let pool = place.open();
    put_all(&pool);
    let (slot, tag) = find(&pool.member, &Key::of_name("small 3")).unwrap().unwrap();
    let mut entry = Entry::load(&pool.member, slot, tag).unwrap().unwrap();
    entry.at += 32;
    entry.store(&pool.member, slot).unwrap();
    let chunk = chunk(&place, &pool, "small 0");
    pool.leave().unwrap();
    place.set(place.layout.chunk(chunk) + 8, 65);
    let pool = place.open();
    for number in 0..30 {
        pool.put(&format!("new {number}"), &content(number, 50)).unwrap();
    }
    assert!(is_taken(&pool.member, chunk).unwrap());
    assert_eq!(pool.get("small 0").unwrap(), Some(content(0, 50)));
    assert!(whats(&pool.check(false).unwrap()).contains(&"a chunk of nobody"));
    // What it says is one thing again once the one is dropped that does not check.
    let mended = pool.check(true).unwrap();
    assert!(mended.repaired, "{mended:?}");
    let mut found = whats(&mended);
    found.sort_unstable();
    assert_eq!(found, ["a chunk of nobody", "bytes that do not check"]);
    assert_eq!(pool.check(false).unwrap().problems, []);
    assert_eq!(pool.list().unwrap().len(), 20 + 5 + 1 + 30 - 1);
}

#[test]
fn what_a_recovery_cannot_read_is_left_for_a_check_to_tell() {
    let place = Place::new();
    let pool = place.open();
    put_all(&pool);
    pool.store(key(1), &[b"block"]).unwrap();
    place.damage_entry(&pool, &Key::of_name("small 1"));
    place.damage_entry(&pool, &key(1));
    let (slot, tag) = find(&pool.member, &Key::of_name("small 2")).unwrap().unwrap();
    place.set(place.layout.tag(slot), tag.0 ^ 0xff00);
    let (slot, tag) = find(&pool.member, &Key::of_name("small 4")).unwrap().unwrap();
    place.set(place.layout.tag(slot), tag.0 ^ 0xff80);
    pool.leave().unwrap();
    let pool = place.open();
    let found = pool.check(false).unwrap();
    let want = ["an entry that does not check"; 3].into_iter().chain(["a tag of no known state"]);
    let mut found_whats = whats(&found);
    found_whats.sort_unstable_by(|one, other| other.cmp(one));
    assert_eq!(found_whats, want.collect::<Vec<_>>());
    assert!(found.problems.iter().all(|problem| !problem.mended));
    assert!(matches!(pool.get("small 1"), Err(PoolError::Damaged { what: "an entry", .. })));
    let mended = pool.check(true).unwrap();
    assert!(mended.repaired && mended.problems.len() == 4, "{mended:?}");
    assert_eq!(pool.check(false).unwrap().problems, []);
    assert_eq!(pool.get("small 1").unwrap(), None);
    assert_eq!(pool.get("small 0").unwrap(), Some(content(0, 50)));
}

#[test]
fn a_reservation_whose_writer_died_at_its_entry_is_dropped() {
    let place = Place::new();
    let (pool, other) = (place.open(), place.open());
    put_all(&pool);
    let (slot, tag) = find(&pool.member, &Key::of_name("small 1")).unwrap().unwrap();
    place.damage_entry(&pool, &Key::of_name("small 1"));
    place.set(place.layout.tag(slot), tag.with(State::Reserved).0);
    drop(pool);
    other.serve().unwrap();
    drop(place.open());
    assert_eq!(other.check(false).unwrap().problems, []);
    assert_eq!(other.stats().unwrap().reserved, 0);
}

#[test]
fn a_block_whose_entry_is_damaged_is_dropped_by_whoever_comes_by() {
    let place = Place::new();
    let pool = place.open();
    let keys: Vec<_> = (0..3).map(key).collect();
    let store = |key: &Key| pool.store(*key, &[&content(1, 300)]).unwrap();
    let is_damaged = |found: Result<Option<Vec<u8>>, PoolError>| {
        assert!(matches!(found, Err(PoolError::Damaged { what: "an entry", .. })), "{found:?}");
    };
    assert!(keys.iter().all(store));
    // A prefix ends there, and the rest is found again once it is stored anew.
    place.damage_entry(&pool, &keys[1]);
    assert_eq!(pool.prefix(&keys).unwrap(), 1);
    assert!(store(&keys[1]));
    assert_eq!(pool.prefix(&keys).unwrap(), 3);
    // Who stores it does so.
    place.damage_entry(&pool, &keys[1]);
    assert!(store(&keys[1]) && !store(&keys[1]));
    // Who reads it is told once.
    place.damage_entry(&pool, &keys[1]);
    is_damaged(pool.read(&keys[1]));
    assert_eq!(pool.read(&keys[1]).unwrap(), None);
    assert!(store(&keys[1]));
    place.damage_entry(&pool, &keys[1]);
    assert!(pool.remove(&keys[1]).unwrap() && !pool.remove(&keys[1]).unwrap());
    // One with a name, too.
    let keep = || pool.keep_from("kept", 3, |place| place.append(b"abc")).unwrap();
    assert!(keep());
    place.damage_entry(&pool, &Key::of_name("kept"));
    assert!(keep() && !keep());
    assert_eq!(pool.get("kept").unwrap().unwrap(), b"abc");
}

#[test]
fn an_object_whose_entry_is_damaged_is_replaced_or_removed_and_else_told() {
    let place = Place::new();
    let pool = place.open();
    let object = Key::of_name("object");
    let damage = || place.damage_entry(&pool, &object);
    let is_damaged = || {
        let (got, kept) = (pool.get("object"), pool.keep_from("object", 0, |_| Ok(())));
        matches!(got, Err(PoolError::Damaged { .. })) && matches!(kept, Err(PoolError::Damaged { .. }))
    };
    pool.put("object", b"one").unwrap();
    damage();
    assert!(is_damaged() && is_damaged());
    pool.put("object", b"two").unwrap();
    assert_eq!(pool.get("object").unwrap().unwrap(), b"two");
    assert!(!whats(&pool.check(false).unwrap()).contains(&"an entry that does not check"));
    // Nothing of the old comes back.
    assert!(pool.delete("object").unwrap() && !pool.delete("object").unwrap());
    assert_eq!(pool.get("object").unwrap(), None);
    pool.put("object", b"three").unwrap();
    damage();
    assert!(pool.delete("object").unwrap() && !pool.delete("object").unwrap());
    assert_eq!(pool.get("object").unwrap(), None);
    // Both, as an older program left them.
    pool.put("object", b"four").unwrap();
    let slot = damage();
    let tag = place.layout.tag(slot);
    let hidden = place.word(tag);
    place.set(tag, 0);
    let other = Slot { index: slot.index + 1, ..slot };
    pool.put("object", b"five").unwrap();
    let (at, _) = find(&pool.member, &object).unwrap().unwrap();
    assert_eq!(at, slot);
    let mut line = [0; LINE as usize];
    place.memory.load(place.layout.entry(slot), &mut line).unwrap();
    line[20] ^= 1;
    place.memory.store(place.layout.entry(other), &line).unwrap();
    place.set(place.layout.tag(other), hidden);
    assert!(pool.delete("object").unwrap());
    assert_eq!(pool.get("object").unwrap(), None);
}

#[test]
fn a_group_of_blocks_that_cannot_be_read_has_slots_for_others() {
    let place = Place::of(&Geometry { nodes: 2, stripes: 1, groups: 1, chunks: 8, chunk_bytes: 4096 });
    let pool = place.open();
    for number in 0..8 {
        assert!(pool.store(key(number), &[b"block"]).unwrap());
    }
    for number in 0..8 {
        place.damage_entry(&pool, &key(number));
    }
    assert!(pool.store(key(100), &[b"another"]).unwrap());
    pool.put("object", b"and an object").unwrap();
    assert_eq!(pool.read(&key(100)).unwrap().unwrap(), b"another");
    assert!(pool.check(true).unwrap().repaired);
    assert_eq!(pool.check(false).unwrap().problems, []);
}

#[test]
fn an_object_whose_entry_is_damaged_is_replaced_where_objects_have_all_slots() {
    let place = Place::of(&Geometry { nodes: 2, stripes: 1, groups: 1, chunks: 8, chunk_bytes: 4096 });
    let pool = place.open();
    for number in 0..7 {
        pool.put(&number.to_string(), b"object").unwrap();
    }
    place.damage_entry(&pool, &Key::of_name("3"));
    assert!(matches!(pool.put("7", b"one too many"), Err(PoolError::NoSlot)));
    pool.put("3", b"replaced").unwrap();
    assert_eq!(pool.get("3").unwrap().unwrap(), b"replaced");
}

#[test]
fn a_repair_mends_beside_who_uses_the_pool_or_says_what_it_does_not() {
    /// A word, what it is instead, and whether a repair can know what it was.
    type Case<'c> = (u64, &'c dyn Fn(u64) -> u64, bool);

    let place = Place::new();
    let (server, checker) = (place.open(), place.open());
    put_all(&server);
    let fenced = place.layout.fenced(server.member.node);
    let of = |name: &str| place.layout.chunk(chunk(&place, &server, name));
    let sizes = SIZES.map(|(name, at, damage)| (of(name) + at, damage));
    let inner = of("run") + 16;
    let whose = |node: u64, incarnation: u64| {
        move |word: u64| word & 0xff_ffff_ffff_ffff & !(0xff_ffff << 32) | node << 56 | incarnation << 32
    };
    let (nobody, late) = (whose(9, 1), whose(0, 0x7f_ffff));
    let mut cases: Vec<Case<'_>> =
        sizes.iter().map(|(at, damage)| (*at, damage as &dyn Fn(u64) -> u64, true)).collect();
    cases.extend([
        (inner, &|word| word | 2 << 24, true),
        (inner, &|word| word | 9, true),
        (inner, &nobody, true),
        (inner, &late, true),
        (of("small 0"), &|word| word | 7 << 24, true),
        (fenced, &|_| u64::MAX, true),
        // It may be the node's word that is wrong.
        (fenced, &|word| word + 7, false),
        // It may be dead, as its word says, and its number claimed again.
        (fenced, &|word| word + 1, false),
        // Whoever lives may have it.
        (of("small 0"), &nobody, false),
        (of("run"), &late, false),
    ] as [Case<'_>; 10]);
    for (number, (at, damage, is_mended)) in cases.into_iter().enumerate() {
        let what = format!("case {number}");
        let before = place.word(at);
        assert_ne!(before, damage(before), "{what}");
        place.set(at, damage(before));
        let told = checker.check(false).unwrap();
        assert!(!told.problems.is_empty() && !told.repaired, "{what}");
        assert!(told.problems.iter().all(|problem| !problem.mended), "{what}: {told:?}");
        let mended = checker.check(true).unwrap();
        assert_eq!(mended.repaired, is_mended, "{what}: {mended:?}");
        assert_eq!(mended.problems.iter().all(|problem| problem.mended), is_mended, "{what}: {mended:?}");
        let left = checker.check(false).unwrap();
        assert_eq!(left.problems.is_empty(), is_mended, "{what}: {left:?}");
        if !is_mended {
            place.set(at, before);
        }
        all_are_there(&server, &what);
        server.put(&format!("new {number}"), &content(number, 50)).unwrap();
        assert_eq!(server.check(false).unwrap().problems, [], "{what}");
    }
}

#[test]
fn the_places_of_what_a_repair_drops_are_given_back_once() {
    let place = Place::new();
    let pool = place.open();
    put_all(&pool);
    let used = pool.heap.used(&place.layout).len();
    for name in ["small 3", "run"] {
        let (slot, tag) = find(&pool.member, &Key::of_name(name)).unwrap().expect("it is there");
        let at = Entry::load(&pool.member, slot, tag).unwrap().expect("it checks").at;
        place.set(at, place.word(at) ^ 1);
    }
    let mended = pool.check(true).unwrap();
    assert!(mended.repaired, "{mended:?}");
    assert_eq!(whats(&mended), ["bytes that do not check"; 2]);
    assert_eq!(pool.heap.used(&place.layout).len(), used - 4);
    put_all(&pool);
    all_are_there(&pool, "dropped");
    assert_eq!(pool.check(false).unwrap().problems, []);
}

#[test]
fn what_is_nobodys_is_taken_back_by_a_repair_of_who_is_alone() {
    let place = Place::new();
    let server = place.open();
    put_all(&server);
    let at = place.layout.chunk(chunk(&place, &server, "small 0"));
    place.set(at, place.word(at) | 0x7f_ffff << 32);
    let checker = place.open();
    assert!(!checker.check(true).unwrap().repaired);
    // It would be given to two.
    server.put("beside it", &content(7, 50)).unwrap();
    checker.put("another", &content(8, 50)).unwrap();
    server.leave().unwrap();
    let mended = checker.check(true).unwrap();
    assert!(mended.repaired && whats(&mended).contains(&"a chunk of nobody"), "{mended:?}");
    assert_eq!(checker.check(false).unwrap().problems, []);
    all_are_there(&checker, "alone");
    assert_eq!(checker.get("beside it").unwrap(), Some(content(7, 50)));
    assert_eq!(checker.get("another").unwrap(), Some(content(8, 50)));
}

#[test]
fn a_node_of_which_too_much_was_said_is_recovered_once_that_is_mended() {
    let place = Place::new();
    let (first, node) = (place.open(), place.open());
    let manager = Arc::new(place.open());
    place.set(place.layout.fenced(node.node()), u64::MAX);
    drop(first);
    // Who manages from now on has read it.
    until("nobody manages", || {
        manager.serve().unwrap();
        manager.stats().unwrap().manager == Some(manager.node())
    });
    assert!(manager.check(true).unwrap().repaired);
    node.put("object", &content(1, 50)).unwrap();
    node.leave().unwrap();
    let service = Service::start(Arc::clone(&manager));
    let (one, other) = (place.open(), place.open());
    assert_eq!((one.node(), other.node()), (0, 1));
    assert_eq!(other.get("object").unwrap(), Some(content(1, 50)));
    service.stop().unwrap();
    assert_eq!(other.check(false).unwrap().problems, []);
}

#[test]
fn what_a_living_node_fills_stays_though_it_is_said_to_be_recovered() {
    let place = Place::new();
    let (server, checker) = (place.open(), place.open());
    put_all(&server);
    let (slot, tag) = find(&server.member, &Key::of_name("small 3")).unwrap().unwrap();
    let (at, fenced) = (place.layout.tag(slot), place.layout.fenced(server.node()));
    place.set(at, tag.with(State::Reserved).0);
    let before = place.word(fenced);
    place.set(fenced, before + 1);
    let left = checker.check(true).unwrap();
    assert!(!left.repaired && whats(&left).contains(&"a reservation of nobody"), "{left:?}");
    assert_eq!(place.word(at), tag.with(State::Reserved).0);
    place.set(at, tag.0);
    for number in 0..40 {
        checker.put(&format!("one {number}"), &content(number, 50)).unwrap();
        server.put(&format!("other {number}"), &content(number + 1, 50)).unwrap();
    }
    place.set(fenced, before);
    all_are_there(&server, "filled");
    for pool in [&server, &checker] {
        assert_eq!(pool.check(false).unwrap().problems, []);
    }
}

#[test]
fn a_node_of_which_too_much_was_said_when_it_died_is_recovered_by_a_manager() {
    let place = Place::new();
    let (first, node) = (place.open(), place.open());
    let _other = place.open();
    put_all(&node);
    let (at, number) = (place.layout.fenced(node.node()), chunk(&place, &node, "small 0"));
    drop((first, node));
    place.set(at, u64::MAX);
    // It has read that, and another is attached: what is nobody's stays.
    let manager = place.open();
    assert!(manager.member.leads());
    let mended = manager.check(true).unwrap();
    assert!(mended.repaired, "{mended:?}");
    let recovered = || {
        manager.serve().unwrap();
        place.word(at) == 1
    };
    until("nobody is recovered", recovered);
    assert!(manager.heap.owns(&place.layout, place.layout.chunk_at(number)));
    all_are_there(&manager, "recovered");
    assert_eq!(manager.check(false).unwrap().problems, []);
    // Nor is it waited for once more where it was recovered before.
    place.set(at, u64::MAX);
    assert!(manager.check(true).unwrap().repaired);
    until("nobody is recovered again", recovered);
    assert_eq!(place.open().node(), 1);
}

#[test]
fn who_comes_upon_a_damaged_block_that_another_stored_anew_meanwhile_reads_it() {
    let place = Place::new();
    let (pool, other) = (place.open(), place.open());
    assert!(pool.store(key(1), &[b"block"]).unwrap());
    let (slot, _) = find(&pool.member, &key(1)).unwrap().unwrap();
    let held = other.member.acquire(place.layout.lock_of(slot.group)).unwrap();
    place.damage_entry(&pool, &key(1));
    let waits = || pool.member.waits.load(Ordering::Relaxed);
    let before = waits();
    std::thread::scope(|scope| {
        let read = scope.spawn(|| pool.read(&key(1)));
        until("nobody waits", || waits() > before);
        let at = place.layout.entry(slot) + 16;
        place.set(at, place.word(at) ^ 0xee);
        held.release().unwrap();
        assert_eq!(read.join().unwrap().unwrap().unwrap(), b"block");
    });
}

#[test]
fn there_is_no_space_where_who_would_give_it_back_is_stopped_or_nobody() {
    let place = Place::of(&Geometry { nodes: 2, stripes: 1, groups: 8, chunks: 4, chunk_bytes: 4096 });
    let stopped = place.open();
    for number in 0..4 {
        assert!(stopped.store(key(number), &[&content(1, 4096)]).unwrap());
    }
    let path = place.folder.path().join("pool");
    let host = Processes::claim(local::open_file(&path).unwrap(), 2, None).unwrap();
    let waited = Arc::new(AtomicU64::new(0));
    let host = Hasty(host, Arc::clone(&waited));
    let pool = Pool::attach(place.memory.clone(), Arc::new(host), 1).unwrap();
    let is_full = || {
        let stored = pool.put("object", b"bytes");
        assert!(matches!(stored, Err(PoolError::Full { .. })), "{stored:?}");
    };
    is_full();
    // One that is nobody's is not waited for at all.
    for number in 0..4 {
        let at = place.layout.chunk(number);
        place.set(at, place.word(at) | 0x7f_ffff << 32);
    }
    for group in 0..8 {
        for (slot, tag) in slots(&place, group).filter(|(_, tag)| tag.is_block()) {
            place.set(place.layout.tag(slot), tag.with(State::Evicting).0);
        }
    }
    let before = waited.load(Ordering::Relaxed);
    is_full();
    assert_eq!(waited.load(Ordering::Relaxed), before);
}
