//! What long tests have nodes do, wherever they run, and what must hold in the end.

use std::path::Path;

use crate::error::PoolError;
use crate::key::{Chain, Key};
use crate::pool::Pool;

/// Blocks, and of these objects have the contents.
const BLOCKS: u32 = 24;
const OBJECTS: u32 = 4;

/// Why a pool does not hold.
#[derive(Debug, thiserror::Error)]
pub enum Wrong {
    /// The pool refused what it should do.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// Something is not what was stored.
    #[error("{0}")]
    Held(String),
}

/// What a node did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Blocks and objects stored.
    pub stored: u64,
    /// Those that were read, and were whole.
    pub read: u64,
    /// Those that were removed.
    pub removed: u64,
}

fn content(number: u32) -> Vec<u8> {
    let mut word = (u64::from(number) + 7) | 1;
    let next = || {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (word >> 56) as u8
    };
    std::iter::repeat_with(next).take(1000 + number as usize * 400).collect()
}

fn key(number: u32) -> Key {
    Chain::new("soak").next(&[number])
}

/// Attaches to a pool and takes turns until the process is killed. Ends at once if the pool has no
/// number left.
///
/// # Errors
/// As [`turn`], and what [`Pool::open`] says.
pub fn work(path: &Path) -> Result<(), Wrong> {
    let pool = match Pool::open(path) {
        Err(PoolError::Nodes { .. }) => return Ok(()),
        opened => opened?,
    };
    let (mut round, mut done) = (u64::from(std::process::id()), Done::default());
    loop {
        turn(&pool, &mut round, &mut done)?;
    }
}

/// Stores, reads or removes something that `round` chooses, and makes the next of it.
///
/// # Errors
/// What is torn, stale or lost; what the pool says.
pub fn turn(pool: &Pool, round: &mut u64, done: &mut Done) -> Result<(), Wrong> {
    *round = round.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    let number = (*round >> 40) as u32 % BLOCKS;
    let (key, name) = (key(number), (number % OBJECTS).to_string());
    match *round >> 60 {
        0..6 => done.stored += u64::from(pool.store(key, &[&content(number)])?),
        6..10 => {
            if let Some(found) = pool.read(&key)? {
                if found != content(number) {
                    return Err(Wrong::Held(format!("block {number} is torn or stale")));
                }
                done.read += 1;
            }
        }
        10..12 => done.removed += u64::from(pool.remove(&key)?),
        12 | 13 => match pool.put(&name, &content(number)) {
            Ok(()) => done.stored += 1,
            Err(PoolError::Full { .. } | PoolError::NoSlot) => {}
            Err(why) => return Err(why.into()),
        },
        14 => {
            if let Some(found) = pool.get(&name)? {
                if (0..BLOCKS).all(|number| content(number) != found) {
                    return Err(Wrong::Held(format!("object {name} is torn or stale")));
                }
                done.read += 1;
            }
        }
        _ => pool.serve()?,
    }
    Ok(())
}

/// What must hold when all others are gone: nothing is reserved, lost or torn, and all that is
/// there can be removed. `pool` is the last node, and leaves no chunk taken.
///
/// # Errors
/// What does not hold; what the pool says.
pub fn settle(pool: Pool, open: impl FnOnce() -> Result<Pool, PoolError>) -> Result<(), Wrong> {
    let ensure = |holds: bool, what: String| if holds { Ok(()) } else { Err(Wrong::Held(what)) };
    pool.serve()?;
    let found = pool.check(false)?;
    ensure(found.problems.is_empty(), format!("{:?}", found.problems))?;
    let stats = pool.stats()?;
    ensure((stats.reserved, stats.evicting, stats.nodes) == (0, 0, 1), format!("{stats:?}"))?;
    for number in 0..BLOCKS {
        if let Some(found) = pool.read(&key(number))? {
            ensure(found == content(number), format!("block {number} is torn or stale"))?;
            ensure(pool.remove(&key(number))?, format!("block {number} cannot be removed"))?;
        }
    }
    for object in pool.list()? {
        ensure(pool.delete(&object.name)?, format!("object {} cannot be removed", object.name))?;
    }
    let found = pool.check(false)?;
    ensure(found.problems.is_empty(), format!("{:?}", found.problems))?;
    pool.leave()?;
    // Whoever comes next takes over what the last kept for itself.
    let taken = open()?.stats()?.taken_bytes;
    ensure(taken == 0, format!("{taken} bytes of chunks are leaked"))
}
