//! Contents that nobody sane wrote: errors, never a fault, never without end.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lamina_pool::Pool;
use lamina_pool::fuzzing::{self, Alone, geometry, memory, use_all};
use lamina_pool::mem::Mapped;
use proptest::prelude::*;

/// A pool with something in it.
fn pool() -> Arc<Mapped> {
    let memory = memory(geometry().bytes().unwrap());
    Pool::create(memory.clone(), &geometry()).unwrap();
    use_all(&memory);
    memory
}

/// The seeds of the fuzz target.
fn seeds() -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds/pool");
    let mut paths: Vec<_> = fs::read_dir(folder).unwrap().map(|file| file.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| fs::read(path).unwrap()).collect()
}

#[test]
fn the_fuzz_targets_seeds_end_well() {
    let seeds = seeds();
    assert!(seeds.len() >= 5);
    for seed in seeds {
        fuzzing::pool(&seed);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damage_and_lies_lead_to_errors(
        damage in prop::collection::vec((128_u64..40_000, any::<u64>(), 0_u8..4), 1..40),
    ) {
        use lamina_pool::mem::CxlMem;
        let memory = pool();
        let bytes = memory.bytes();
        for (at, word, how) in damage {
            let at = at / 8 * 8 % bytes;
            // Bytes of any kind, small numbers, offsets that nearly fit, copies of other words.
            let mut other = [0; 8];
            memory.load(word % bytes / 8 * 8, &mut other).unwrap();
            let value = match how {
                0 => word,
                1 => word % 6,
                2 => bytes - word % 128,
                _ => u64::from_le_bytes(other),
            };
            memory.store(at, &value.to_le_bytes()).unwrap();
        }
        let began = Instant::now();
        use_all(&memory);
        prop_assert!(began.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn stores_into_a_pool_whose_checks_are_mended_lead_to_errors(
        seed in prop::sample::select(seeds()),
        how in any::<u8>(),
        stores in prop::collection::vec((0_u16..2600, prop_oneof![any::<u64>(), 0_u64..8, 0_u64..41_000]), 0..12),
    ) {
        let mut data = seed;
        data[0] = data[0] & 1 | how & !1;
        for (place, word) in stores {
            data.extend(place.to_le_bytes());
            data.extend(word.to_le_bytes());
        }
        fuzzing::pool(&data);
    }

    #[test]
    fn bytes_of_any_kind_are_no_pool(seed in any::<u64>()) {
        use lamina_pool::mem::CxlMem;
        let memory = memory(64 << 10);
        memory.store(0, &crate::basics::bytes(seed, 64 << 10)).unwrap();
        prop_assert!(Pool::geometry(memory.clone()).is_err());
        use_all(&memory);
    }
}

#[test]
fn what_was_damaged_is_mended_and_the_rest_is_kept() {
    use lamina_pool::mem::CxlMem;
    let memory = memory(geometry().bytes().unwrap());
    Pool::create(memory.clone(), &geometry()).unwrap();
    let attach = || Pool::attach(memory.clone(), Alone::new(), 0).unwrap();
    let pool = attach();
    for name in ["one", "two"] {
        pool.put(name, name.repeat(100).as_bytes()).unwrap();
    }
    // A byte of the one.
    let mut all = vec![0; usize::try_from(memory.bytes()).unwrap()];
    memory.load(0, &mut all).unwrap();
    let at = all.windows(9).position(|bytes| bytes == b"oneoneone").unwrap() as u64;
    memory.store(at + 50, b"x").unwrap();
    assert!(pool.get("one").is_err());
    let found = pool.check(true).unwrap();
    assert_eq!(found.problems.len(), 1, "{found:?}");
    assert_eq!(pool.get("one").unwrap(), None);
    assert_eq!(pool.get("two").unwrap(), Some(b"two".repeat(100)));
    pool.leave().unwrap();
    let again = attach().check(true).unwrap();
    let rest = attach().check(false).unwrap();
    assert_eq!(rest.problems, [], "{again:?}");
    assert_eq!(rest.ready, 1);
}
