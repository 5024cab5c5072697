//! The index of blocks, both ways: each test of what an index promises is one for all of them.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use lamina_pool::mem::{CxlMem, LeftOut, MemError, Node, Site};
use lamina_pool::{Chain, Class, Geometry, Index, IndexServer, Key, Pool, PoolError, ServedIndex, local};

use crate::basics::{bytes, worlds};
use crate::scenes::Told;
use crate::world::{Work, World, geometry, let_others};

fn key(number: u32) -> Key {
    Chain::new("index").next(&[number])
}

fn content(number: u32) -> Vec<u8> {
    bytes(u64::from(number) + 5, 200 + 310 * (number % 9) as usize)
}

fn read(index: &dyn Index, number: u32) -> Result<Option<Vec<u8>>, PoolError> {
    let mut found = vec![0; content(number).len()];
    let (front, back) = found.split_at_mut(77);
    Ok(index.read_into(&key(number), &mut [front, back])?.then_some(found))
}

fn store(index: &dyn Index, number: u32) -> Result<bool, PoolError> {
    let content = content(number);
    index.store(key(number), &[&content[..13], &content[13..]])
}

/// What a node does with an index that nobody else uses.
fn alone(index: &dyn Index) -> Result<(), PoolError> {
    let keys: Vec<_> = (0..6).map(key).collect();
    assert_eq!(index.prefix(&keys)?, 0);
    assert_eq!(read(index, 0)?, None);
    for number in [0, 1, 3] {
        assert!(store(index, number)?);
        assert!(!store(index, number)?, "it is there");
    }
    assert_eq!(index.prefix(&keys)?, 2, "up to the first that is missing");
    for number in [0, 1, 3] {
        assert_eq!(read(index, number)?, Some(content(number)));
    }
    let short = index.read_into(&key(1), &mut [&mut [0; 3]]);
    assert!(matches!(short, Err(PoolError::End { length: 3, .. })), "{short:?}");
    assert!(index.remove(&key(1))? && !index.remove(&key(1))?);
    assert_eq!((index.prefix(&keys)?, read(index, 1)?), (1, None));
    assert!(index.store(key(9), &[])?, "a block may be empty");
    assert!(index.read_into(&key(9), &mut [])?);
    let large = index.store(key(8), &[&vec![0; 1 << 20]]);
    assert!(matches!(large, Err(PoolError::Full { .. })), "{large:?}");
    // Of more than there is space for, what is there is whole.
    let many: Vec<u32> = (10..60).collect();
    for number in &many {
        assert!(store(index, *number)?);
    }
    let mut there = 0;
    for number in &many {
        if let Some(found) = read(index, *number)? {
            assert_eq!(found, content(*number));
            there += 1;
        }
    }
    assert!(there > 0 && there < many.len(), "{there}");
    // As many keys as take several questions.
    let keys: Vec<_> = (100..300).map(key).collect();
    for key in &keys[..3] {
        assert!(index.store(*key, &[b"x"])?);
    }
    assert_eq!(index.prefix(&keys)?, 3);
    Ok(())
}

/// Two nodes that store and read the same blocks: each is stored once, and read whole.
fn together(index: &dyn Index, stored: &AtomicU32) -> Result<(), PoolError> {
    for number in 0..8 {
        stored.fetch_add(u32::from(store(index, number)?), Ordering::Relaxed);
        match read(index, number)? {
            Some(found) => assert_eq!(found, content(number)),
            // The other is storing it.
            None => assert!(index.prefix(&[key(number)])? <= 1),
        }
    }
    Ok(())
}

fn roomy() -> Geometry {
    Geometry { nodes: 4, stripes: 2, groups: 8, chunks: 24, chunk_bytes: 4096 }
}

/// Serves until all are done: the index too, if this node is to.
fn serve(pool: &Arc<Pool>, serves: bool, left: &AtomicU32) {
    let server = serves.then(|| IndexServer::new(Arc::clone(pool)).unwrap());
    while left.load(Ordering::Relaxed) > 0 {
        pool.serve().unwrap();
        if let Some(server) = &server {
            server.turn().unwrap();
        }
        let_others();
    }
}

#[test]
fn an_index_keeps_what_it_promises_whoever_has_it() {
    for (served, world) in [false, true].into_iter().flat_map(|served| worlds().map(move |w| (served, w))) {
        let pools: Vec<_> = (0..2).map(|node| Arc::new(world.attach(node).unwrap())).collect();
        let index: Box<dyn Index> = if served {
            Box::new(ServedIndex::new(Arc::clone(&pools[1])))
        } else {
            Box::new(world.attach(2).unwrap())
        };
        let left = AtomicU32::new(1);
        let ended = world.run(
            vec![
                Box::new(|| {
                    alone(&*index).unwrap();
                    left.store(0, Ordering::Relaxed);
                }),
                Box::new(|| serve(&pools[0], served, &left)),
            ],
            false,
        );
        assert!(ended);
        assert_eq!(pools[0].check(false).unwrap().problems, []);
        if served {
            // Who asks counts, not who serves.
            let counted = pools[1].stats().unwrap();
            assert!(counted.stores > 50 && counted.hits > 5 && counted.misses > 5, "{counted:?}");
        }
    }
}

#[test]
fn clients_of_a_served_index_store_what_is_of_a_class() {
    for world in worlds() {
        let pools: Vec<_> = (0..2).map(|node| Arc::new(world.attach(node).unwrap())).collect();
        let index = ServedIndex::new(Arc::clone(&pools[1]));
        let class = Class::new("bf16", Some("64,32")).unwrap();
        let left = AtomicU32::new(1);
        let works: Vec<Work<'_>> = vec![
            Box::new(|| {
                for (number, class) in [(0, None), (1, Some(&class)), (2, Some(&class)), (3, None)] {
                    let content = content(number);
                    assert!(index.store_of(class, key(number), &[&content]).unwrap());
                    assert!(!index.store_of(class, key(number), &[&content]).unwrap(), "it is there");
                    assert_eq!(read(&index, number).unwrap(), Some(content));
                }
                // What no device knows is refused, and the index goes on.
                let unknown = Class::new("unknown", None).unwrap();
                let refused = index.store_of(Some(&unknown), key(4), &[b"x"]);
                assert!(matches!(refused, Err(PoolError::Declare(_))), "{refused:?}");
                assert!(store(&index, 4).unwrap());
                left.store(0, Ordering::Relaxed);
            }),
            Box::new(|| serve(&pools[0], true, &left)),
        ];
        assert!(world.run(works, false));
        let shares = pools[0].stats().unwrap().by_class;
        let told: Vec<_> = shares.iter().map(|share| (share.class.as_str(), share.ready_bytes)).collect();
        let bytes =
            |numbers: [u32; 2]| numbers.map(|number| content(number).len() as u64).iter().sum::<u64>();
        assert_eq!(told, [("", bytes([0, 3]) + content(4).len() as u64), ("bf16 64,32", bytes([1, 2]))]);
        assert_eq!(pools[0].check(false).unwrap().problems, []);
    }
}

#[test]
fn two_who_store_one_block_store_it_once_whoever_has_the_index() {
    for (served, seed) in [false, true].into_iter().flat_map(|served| (0..8).map(move |seed| (served, seed)))
    {
        let world = World::new(seed, seed == 7, &roomy());
        let pools: Vec<_> = (0..3).map(|node| Arc::new(world.attach(node).unwrap())).collect();
        let stored = AtomicU32::new(0);
        let left = AtomicU32::new(2);
        let client = |node: usize| -> Work<'_> {
            let (pool, stored, left) = (Arc::clone(&pools[node]), &stored, &left);
            Box::new(move || {
                let asked = ServedIndex::new(Arc::clone(&pool));
                let index: &dyn Index = if served { &asked } else { &*pool };
                together(index, stored).unwrap();
                left.fetch_sub(1, Ordering::Relaxed);
                while left.load(Ordering::Relaxed) > 0 {
                    pool.serve().unwrap();
                    let_others();
                }
            })
        };
        let works = vec![client(1), client(2), Box::new(|| serve(&pools[0], served, &left))];
        assert!(world.run(works, false));
        assert_eq!(stored.load(Ordering::Relaxed), 8, "served {served}, seed {seed}");
        for number in 0..8 {
            assert_eq!(read(&*pools[0], number).unwrap(), Some(content(number)));
        }
    }
}

/// A server dies at some step of its work; another takes over, or it comes back as itself. What was
/// stored is there, and what is asked meanwhile is answered. The calls that were made, and whether
/// the server died before all was done.
fn replaced_at(
    seed: u64,
    coherent: bool,
    left_out: Option<LeftOut>,
) -> Result<(BTreeSet<Site>, bool), Vec<String>> {
    let world = World::new(seed, coherent, &roomy());
    let failed = |why: PoolError| vec![why.to_string()];
    let first = Arc::new(world.attach(0).map_err(failed)?);
    let client = Arc::new(world.attach(1).map_err(failed)?);
    world.memory.kill_after(0, 100 + world.below(4000));
    world.leave_out(left_out, false);
    let next = if seed.is_multiple_of(2) { 3 } else { 0 };
    let (left, is_over) = (AtomicU32::new(1), AtomicBool::new(false));
    let wrong = Mutex::new(Vec::new());
    let done = |work: Result<(), PoolError>| {
        if let Err(why) = work {
            wrong.lock().unwrap().push(why.to_string());
        }
        left.store(0, Ordering::Relaxed);
    };
    let works: Vec<Work<'_>> = vec![
        Box::new(|| {
            let index = ServedIndex::new(Arc::clone(&client));
            let work = || {
                for number in 0..12 {
                    store(&index, number)?;
                    if read(&index, number)? != Some(content(number)) {
                        wrong.lock().unwrap().push(format!("{number} is not there"));
                    }
                }
                let found = index.prefix(&(0..12).map(key).collect::<Vec<_>>())?;
                if found != 12 {
                    wrong.lock().unwrap().push(format!("{found} are there"));
                }
                Ok(())
            };
            done(work());
        }),
        Box::new(|| {
            let Ok(server) = IndexServer::new(Arc::clone(&first)) else { return };
            while left.load(Ordering::Relaxed) > 0 && first.serve().is_ok() && server.turn().is_ok() {
                let_others();
            }
        }),
        Box::new(|| {
            while left.load(Ordering::Relaxed) > 0 && !world.memory.is_dead(0) && !world.is_over() {
                world.clock.fetch_add(1, Ordering::Relaxed);
                let_others();
            }
            if left.load(Ordering::Relaxed) == 0 {
                return;
            }
            is_over.store(true, Ordering::Relaxed);
            if next == 0 {
                world.memory.revive(0);
            }
            let work = || {
                let pool = Arc::new(world.attach(next)?);
                let server = loop {
                    match IndexServer::new(Arc::clone(&pool)) {
                        // Nobody knows yet that the other is dead.
                        Err(PoolError::Served { node: 0 }) => pool.serve()?,
                        server => break server?,
                    }
                    world.clock.fetch_add(1, Ordering::Relaxed);
                    let_others();
                };
                while left.load(Ordering::Relaxed) > 0 {
                    pool.serve()?;
                    server.turn()?;
                    let_others();
                }
                Ok(())
            };
            done(work());
        }),
    ];
    if !world.run(works, false) {
        wrong.lock().unwrap().push("no end".into());
    }
    let mut wrong = wrong.into_inner().unwrap();
    if wrong.is_empty() {
        let after = world.attach(2).map_err(failed)?;
        for _ in 0..1500 {
            world.clock.fetch_add(1, Ordering::Relaxed);
            client.serve().and_then(|()| after.serve()).map_err(failed)?;
        }
        let checked = after.check(false).map_err(failed)?;
        if !checked.problems.is_empty() || checked.ready != 12 {
            wrong.push(format!("{checked:?}"));
        }
    }
    if !wrong.is_empty() {
        return Err(wrong);
    }
    Ok((world.memory.sites(), is_over.load(Ordering::Relaxed)))
}

pub(crate) fn replaced(seed: u64, left_out: Option<LeftOut>) -> Told {
    replaced_at(seed, false, left_out).map(|(sites, _)| sites)
}

#[test]
fn clients_go_on_when_a_server_that_died_is_replaced() {
    let mut died = 0;
    for seed in 0..60 {
        match replaced_at(seed, seed % 5 == 0, None) {
            Ok((_, is_over)) => died += u32::from(is_over),
            Err(why) => panic!("seed {seed}: {why:#?}"),
        }
    }
    assert!(died > 20, "only {died} servers died at work");
}

#[test]
fn a_client_that_dies_with_a_place_of_the_servers_leaves_it() {
    for seed in 0..40 {
        let world = World::new(seed, seed % 4 == 0, &roomy());
        let (server, client) = (Arc::new(world.attach(0).unwrap()), Arc::new(world.attach(1).unwrap()));
        let left = AtomicU32::new(1);
        world.memory.kill_after(1, 60 + world.below(1200));
        let works: Vec<Work<'_>> = vec![
            Box::new(|| {
                let index = ServedIndex::new(Arc::clone(&client));
                for number in 0..40 {
                    store(&index, number).unwrap();
                }
            }),
            Box::new(|| {
                let serving = IndexServer::new(Arc::clone(&server)).unwrap();
                for _ in 0..6000 {
                    world.clock.fetch_add(1, Ordering::Relaxed);
                    server.serve().unwrap();
                    serving.turn().unwrap();
                    let_others();
                }
                left.store(0, Ordering::Relaxed);
            }),
        ];
        assert!(world.run(works, false));
        assert!(world.memory.is_dead(1), "seed {seed}");
        let checked = server.check(false).unwrap();
        assert_eq!(checked.problems, [], "seed {seed}");
        let stats = server.stats().unwrap();
        assert_eq!((stats.reserved, stats.evicting, stats.nodes), (0, 0, 1), "seed {seed}");
    }
}

#[test]
fn what_a_client_asked_that_was_recovered_from_is_not_done() {
    let mut asked = 0;
    for seed in 0..40 {
        let world = World::new(seed, seed % 4 == 0, &roomy());
        let (server, client) = (Arc::new(world.attach(0).unwrap()), Arc::new(world.attach(1).unwrap()));
        world.memory.kill_after(1, 30 + world.below(200));
        let works: Vec<Work<'_>> = vec![
            Box::new(|| {
                let _ = store(&ServedIndex::new(Arc::clone(&client)), 1);
            }),
            Box::new(|| {
                let serving = IndexServer::new(Arc::clone(&server)).unwrap();
                // It hears nobody until the client is recovered from.
                while server.stats().unwrap().nodes > 1 {
                    world.clock.fetch_add(1, Ordering::Relaxed);
                    server.serve().unwrap();
                    let_others();
                }
                asked += serving.turn().unwrap();
            }),
        ];
        assert!(world.run(works, false));
        let stats = server.stats().unwrap();
        assert_eq!((stats.reserved, stats.nodes), (0, 1), "seed {seed}");
        assert_eq!(server.check(false).unwrap().problems, [], "seed {seed}");
    }
    assert!(asked > 20, "only {asked} had asked");
}

/// Memory of which the next streamed store into the chunks fails, if that is wanted.
struct Failing {
    memory: Node,
    data: u64,
    fails: AtomicBool,
}

impl CxlMem for Failing {
    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    fn coherent(&self) -> bool {
        self.memory.coherent()
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MemError> {
        self.memory.load(at, into)
    }

    fn store(&self, at: u64, from: &[u8]) -> Result<(), MemError> {
        self.memory.store(at, from)
    }

    fn ntstore(&self, at: u64, from: &[u8]) -> Result<(), MemError> {
        if at >= self.data && self.fails.swap(false, Ordering::Relaxed) {
            return Err(MemError::Port { request: "a store".into(), why: "the test says so".into() });
        }
        self.memory.ntstore(at, from)
    }

    fn flush(&self, at: u64, length: u64) -> Result<(), MemError> {
        self.memory.flush(at, length)
    }

    fn invalidate(&self, at: u64, length: u64) -> Result<(), MemError> {
        self.memory.invalidate(at, length)
    }

    fn fence(&self) -> Result<(), MemError> {
        self.memory.fence()
    }

    fn compare_exchange(&self, at: u64, old: u64, new: u64) -> Result<Option<bool>, MemError> {
        self.memory.compare_exchange(at, old, new)
    }
}

#[test]
fn a_client_that_fails_to_store_gives_its_place_back() {
    const RESERVE: u16 = 3;
    const COMMIT: u16 = 4;
    const ABORT: u16 = 6;
    for world in worlds() {
        let data = geometry().data().unwrap().start;
        let memory = Arc::new(Failing { memory: world.memory.node(1), data, fails: false.into() });
        let server = Arc::new(world.attach(0).unwrap());
        let failing = Arc::new(world.attach_to(memory.clone(), 1, 1).unwrap());
        let other = Arc::new(world.attach(2).unwrap());
        let left = AtomicU32::new(1);
        let works: Vec<Work<'_>> = vec![
            Box::new(|| {
                let [index, others] = [&failing, &other].map(|pool| ServedIndex::new(Arc::clone(pool)));
                memory.fails.store(true, Ordering::Relaxed);
                let failed = store(&index, 3);
                assert!(matches!(failed, Err(PoolError::Mem(MemError::Port { .. }))), "{failed:?}");
                assert!(store(&others, 3).unwrap(), "the key is busy still");
                assert_eq!(read(&index, 3).unwrap(), Some(content(3)));
                // A place is given back once, however often that is asked, and never what is ready.
                let asked = |op: u16, words: &[u8]| failing.ask(0, op, words).unwrap().unwrap();
                let (_, place) = asked(RESERVE, &[&key(4).0[..], &100_u64.to_le_bytes()].concat());
                assert!(!store(&others, 4).unwrap(), "it is reserved");
                for _ in 0..2 {
                    assert_eq!(asked(ABORT, &place[..16]).0, 0);
                }
                assert_ne!(asked(COMMIT, &[&place[..16], &[0; 8][..]].concat()).0, 0);
                assert!(store(&others, 4).unwrap());
                assert_eq!(asked(ABORT, &place[..16]).0, 0);
                assert_eq!(read(&index, 4).unwrap(), Some(content(4)));
                assert_ne!(asked(ABORT, &[0xff; 16]).0, 0);
                left.store(0, Ordering::Relaxed);
            }),
            Box::new(|| serve(&server, true, &left)),
        ];
        assert!(world.run(works, false));
        assert_eq!(server.check(false).unwrap().problems, []);
        assert_eq!(server.stats().unwrap().reserved, 0);
    }
}

/// What a node reserves without knowing, because the answer was lost, is given to it again; but two
/// of its threads never have one place.
#[test]
fn threads_of_a_node_store_one_block_once_by_either_way() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pool");
    local::create(&path, &Geometry::fitting(8 << 20)).unwrap();
    let (served, pool) = (Arc::new(Pool::open(&path).unwrap()), Arc::new(Pool::open(&path).unwrap()));
    let server = IndexServer::new(served).unwrap();
    let (one, other) = (ServedIndex::new(Arc::clone(&pool)), ServedIndex::new(Arc::clone(&pool)));
    let (stored, left) = (AtomicU32::new(0), AtomicU32::new(3));
    std::thread::scope(|scope| {
        scope.spawn(|| server.run(|| left.load(Ordering::Relaxed) == 0).unwrap());
        for index in [&one as &dyn Index, &other, &*pool] {
            let (stored, left) = (&stored, &left);
            scope.spawn(move || {
                for number in 0..200 {
                    stored.fetch_add(u32::from(store(index, number).unwrap()), Ordering::Relaxed);
                }
                left.fetch_sub(1, Ordering::Relaxed);
            });
        }
    });
    assert_eq!(stored.into_inner(), 200);
    assert!((0..200).all(|number| read(&*pool, number).unwrap() == Some(content(number))));
}

#[test]
fn where_nobody_serves_it_is_said_within_a_bounded_time_and_one_serves_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pool");
    local::create(&path, &Geometry::fitting(8 << 20)).unwrap();
    let pool = Arc::new(Pool::open(&path).unwrap());
    let index = ServedIndex::new(Arc::clone(&pool));
    let began = Instant::now();
    assert!(matches!(store(&index, 1), Err(PoolError::NoServer)));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    let served = Arc::new(Pool::open(&path).unwrap());
    let server = IndexServer::new(Arc::clone(&served)).unwrap();
    let node = served.node();
    let other = IndexServer::new(Arc::clone(&pool)).err();
    assert!(matches!(other, Some(PoolError::Served { node: by }) if by == node), "{other:?}");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                served.serve().unwrap();
                server.turn().unwrap();
            }
        });
        assert!(store(&index, 1).unwrap() && read(&index, 1).unwrap() == Some(content(1)));
        done.store(true, Ordering::Relaxed);
    });
    drop(server);
    Arc::into_inner(served).unwrap().leave().unwrap();
    let began = Instant::now();
    assert!(matches!(index.prefix(&[key(1)]), Err(PoolError::NoServer)));
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
    assert_eq!(read(&*pool, 1).unwrap(), Some(content(1)), "it lies in the table all the same");
}
