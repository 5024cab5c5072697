//! Contents that nobody sane wrote: errors, never a fault, never without end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lamina_pool::mem::{Map, Mapped};
use lamina_pool::{Chain, Geometry, Host, Pool};
use proptest::prelude::*;

/// A machine on which nobody else is, and that does not wait long.
struct Alone(Instant);

impl Host for Alone {
    fn now(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_millis()).unwrap()
    }
    fn relax(&self, _: u32) {}
    fn timeout(&self) -> u64 {
        1
    }
    fn patience(&self) -> u64 {
        20
    }
    fn is_gone(&self, _: u32, _: u32) -> bool {
        true
    }
    fn revoke(&self, _: u32, _: u32) -> bool {
        true
    }
}

fn geometry() -> Geometry {
    Geometry { nodes: 3, stripes: 2, groups: 4, chunks: 6, chunk_bytes: 4096 }
}

/// Does everything, whatever comes of it.
fn use_all(memory: &Arc<Mapped>) {
    let Ok(pool) = Pool::attach(memory.clone(), Arc::new(Alone(Instant::now())), 0) else { return };
    let key = Chain::new("hostile").next(&[1]);
    let _ = pool.serve();
    let _ = pool.get("a");
    let _ = pool.put("a", &[1; 300]);
    let _ = pool.store(key, &[&[2; 700]]);
    let _ = pool.read_parts(&key, &mut [(5, &mut [0; 9])]);
    let _ = pool.prefix(&[key]);
    let _ = pool.list();
    let _ = pool.delete("b");
    let _ = pool.answer(|_| Ok((1, vec![0; 40])));
    let _ = pool.stats();
    let _ = pool.check(false);
    let _ = pool.check(true);
    let _ = pool.put("c", &[3; 5000]);
    let _ = pool.leave();
}

fn memory(bytes: u64) -> Arc<Mapped> {
    let file = tempfile::tempfile().unwrap();
    file.set_len(bytes).unwrap();
    Arc::new(Mapped::new(Map::new(&file, std::path::Path::new("a pool"), None).unwrap()))
}

/// A pool with something in it.
fn pool() -> Arc<Mapped> {
    let memory = memory(geometry().bytes().unwrap());
    Pool::create(memory.clone(), &geometry()).unwrap();
    use_all(&memory);
    memory
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
    let attach = || Pool::attach(memory.clone(), Arc::new(Alone(Instant::now())), 0).unwrap();
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
