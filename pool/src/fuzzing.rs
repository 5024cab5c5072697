//! What the fuzz target does with its input; `fuzz/` and the tests call the same function.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::class::Class;
use crate::error::PoolError;
use crate::host::Host;
use crate::key::Chain;
use crate::layout::{CLASSES, Geometry, Layout, SHARES, SLOTS, SUPERBLOCK, Slot, seal};
use crate::mem::{CxlMem, LINE, Map, Mapped};
use crate::overview::Overview;
use crate::pool::Pool;

/// Everything ends within this time, whatever the contents.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A machine on which nobody else is, and that does not wait long.
#[derive(Debug)]
pub struct Alone(Instant);

impl Alone {
    /// Its clock begins.
    pub fn new() -> Arc<Self> {
        Arc::new(Self(Instant::now()))
    }
}

impl Host for Alone {
    fn now(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn relax(&self, _: u32) {}

    fn timeout(&self) -> u64 {
        1
    }

    fn max_wait(&self) -> u64 {
        20
    }

    fn declare(&self, _: Range<u64>, _: Option<&Class>) -> Result<(), PoolError> {
        Ok(())
    }

    fn is_gone(&self, _: u32, _: u32) -> bool {
        true
    }

    fn revoke(&self, _: u32, _: u32) -> bool {
        true
    }
}

/// A small pool's geometry.
pub fn geometry() -> Geometry {
    Geometry { nodes: 3, stripes: 2, groups: 4, chunks: 6, chunk_bytes: 4096 }
}

/// A memory of zeros.
///
/// # Panics
/// When there is no memory.
pub fn memory(bytes: u64) -> Arc<Mapped> {
    let file = File::from(memfd_create("pool", MFdFlags::MFD_CLOEXEC).expect("memory for a file"));
    file.set_len(bytes).expect("a file of memory");
    Arc::new(Mapped::new(Map::new(&file, Path::new("a pool"), None).expect("a mapping")))
}

/// Does everything with a pool, whatever comes of it.
pub fn use_all(memory: &Arc<Mapped>) {
    // From outside: at most the first KiB, whatever they say.
    let seen = Overview::read(memory.bytes(), |at, into| {
        assert!(at == 0 && into.len() <= 20 << 10, "{} bytes at {at} are looked at", into.len());
        memory.load(at, into)
    });
    drop(seen.expect("what is read lies inside"));
    let Ok(pool) = Pool::attach(memory.clone(), Alone::new(), 0) else { return };
    let key = Chain::new("hostile").next(&[1]);
    let _ = pool.serve();
    let _ = pool.get("a");
    let _ = pool.put("a", &[1; 300]);
    let _ = pool.store(key, &[&[2; 700]]);
    if let Ok(class) = Class::new("bf16", Some("64,32")) {
        let _ = pool.of(&class).and_then(|of| of.put("d", &[4; 900]));
    }
    let _ = pool.read(&key);
    let _ = pool.read_parts(&key, &mut [(5, &mut [0; 9])]);
    let _ = pool.prefix(&[key]);
    for object in pool.list().unwrap_or_default() {
        let _ = pool.get(&object.name);
    }
    let _ = pool.delete("b");
    let _ = pool.answer(|_| Ok((1, vec![0; 40])));
    let _ = pool.stats();
    let _ = pool.check(false);
    let _ = pool.check(true);
    let _ = pool.put("c", &[3; 5000]);
    let _ = pool.leave();
}

/// Where a lock's intent lies in a pool of this geometry: for tests that damage it.
///
/// # Errors
/// [`PoolError::Geometry`].
pub fn intent_at(geometry: &Geometry, lock: u32) -> Result<u64, PoolError> {
    Ok(Layout::new(geometry)?.intent(lock))
}

/// Contents of a pool's memory, and then everything that can be done with it. Bits of the first
/// byte say what they are: the memory itself, or stores into a good pool, each a word's number (2
/// bytes) and the word; and whose checks are mended, because no fuzzer finds its way past them:
/// the superblock's, the intents', the entries', the classes'.
///
/// # Panics
/// When a promise is broken.
pub fn pool(data: &[u8]) {
    let Some((how, rest)) = data.split_first() else { return };
    let layout = Layout::new(&geometry()).expect("a geometry");
    let memory = memory(layout.end);
    let store = |at: u64, bytes: &[u8]| memory.store(at, bytes).expect("inside");
    if how & 1 == 1 {
        store(0, &rest[..rest.len().min(layout.end as usize)]);
    } else {
        Pool::create(memory.clone(), &geometry()).expect("it fits");
        use_all(&memory);
        for word in rest.as_chunks::<10>().0 {
            let number = u64::from(u16::from_le_bytes([word[0], word[1]]));
            store(number * 8 % layout.end, &word[2..]);
        }
    }
    let mend = |at: u64, length: u64| {
        let mut record = vec![0; length as usize];
        memory.load(at, &mut record).expect("inside");
        seal(&mut record);
        store(at, &record);
    };
    if how & 2 == 2 {
        mend(0, SUPERBLOCK);
    }
    if how & 4 == 4 {
        (0..layout.locks).for_each(|lock| mend(layout.intent(lock), LINE));
    }
    if how & 8 == 8 {
        let slots = u64::from(geometry().groups) * SLOTS;
        let entries =
            (0..slots).map(|slot| Slot { group: (slot / SLOTS) as u32, index: (slot % SLOTS) as u32 });
        entries.for_each(|slot| mend(layout.entry(slot), LINE));
    }
    if how & 16 == 16 {
        (0..CLASSES as u8).for_each(|class| mend(layout.class(class), LINE));
        mend(layout.shares(), SHARES);
    }
    let began = Instant::now();
    use_all(&memory);
    assert!(began.elapsed() < TIMEOUT, "it took {:?}", began.elapsed());
}
