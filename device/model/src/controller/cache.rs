//! The cache of index entries on the chip.

use serde::Serialize;

use crate::ModelError;

/// Which entry of a set goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Policy {
    /// The one that was not used for longest.
    Lru,
    /// The one that came first.
    Fifo,
    /// Any; the same ones in each run.
    Random,
}

/// What a cache is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct CacheConfig {
    /// Entries of 64 bytes, a power of two.
    pub entries: u32,
    /// Entries of a set, a power of two.
    pub ways: u32,
    /// Which entry of a set goes.
    pub policy: Policy,
}

impl Default for CacheConfig {
    /// 2 MiB (CXL-NDP, III-D), direct-mapped, as the device's counters have it.
    fn default() -> Self {
        Self { entries: 32_768, ways: 1, policy: Policy::Lru }
    }
}

/// A cache and what it holds.
#[derive(Clone, Debug)]
pub struct IndexCache {
    ways: usize,
    sets: u64,
    policy: Policy,
    /// Blocks by set, the next to go last; none is `EMPTY`.
    held: Vec<u64>,
    random: u64,
}

const EMPTY: u64 = u64::MAX;

impl IndexCache {
    /// An empty one.
    ///
    /// # Errors
    /// A field that is of no use.
    pub fn new(config: CacheConfig) -> Result<Self, ModelError> {
        let CacheConfig { entries, ways, policy } = config;
        if !entries.is_power_of_two() || entries > 1 << 26 {
            return Err(ModelError::field("index-entries", &entries, "a power of two up to 2^26"));
        }
        if !ways.is_power_of_two() || ways > entries.min(256) {
            return Err(ModelError::field("index-ways", &ways, "a power of two up to the entries and 256"));
        }
        Ok(Self {
            ways: ways as usize,
            sets: u64::from(entries / ways),
            policy,
            held: vec![EMPTY; entries as usize],
            random: 0x9e37_79b9_7f4a_7c15,
        })
    }

    /// Looks for a block's entry and holds it from now on. Whether it was held.
    pub fn touch(&mut self, block: u64) -> bool {
        let set = usize::try_from(block & (self.sets - 1)).unwrap_or(0);
        let set = &mut self.held[set * self.ways..(set + 1) * self.ways];
        if let Some(at) = set.iter().position(|held| *held == block) {
            if self.policy == Policy::Lru {
                set[..=at].rotate_right(1);
            }
            return true;
        }
        let free = set.iter().position(|held| *held == EMPTY);
        let goes = match (self.policy, free) {
            (_, Some(free)) => free,
            (Policy::Random, None) => {
                self.random ^= self.random << 13;
                self.random ^= self.random >> 7;
                self.random ^= self.random << 17;
                usize::try_from(self.random % self.ways as u64).unwrap_or(0)
            }
            _ => self.ways - 1,
        };
        set[..=goes].rotate_right(1);
        set[0] = block;
        false
    }
}
