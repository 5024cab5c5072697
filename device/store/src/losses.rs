//! Losses: which blocks are poisoned, why, and which were.
//!
//! The rules:
//! * The entry of a block says whether it is poisoned; the list says so too, and why. Who changes
//!   an entry changes the list while it still holds the block's stripe, so both say the same to
//!   everybody else.
//! * Of a block of an open KV window the window says it, and of one that could not be coded anew
//!   for want of room who decodes it; there the window's lock takes the stripe's part.
//! * Each loss is an event with a number. It stays in the log when its block is written, until
//!   [`MAX_LOGGED`] newer ones came: who looks now and then is told of every one.
//!
//! Nothing here knows what an entry is. `device/models` runs this file with
//! [`publication`](super::publication).

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
};

use super::{
    publication::Held,
    sync::{AtomicUsize, Mutex, Ordering},
};

/// Losses that are logged, the newest. Of older ones only those are known that are still listed.
pub(crate) const MAX_LOGGED: usize = 1 << 14;

/// A loss.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss<Why> {
    /// Its block's number.
    pub block: u64,
    /// Its number, from 1.
    pub event: u64,
    /// Its cause.
    pub why: Why,
}

/// The losses of a store.
pub struct Losses<Why> {
    /// How many are listed. Whoever holds the stripe of a block that is listed sees that it is
    /// not 0.
    count: AtomicUsize,
    state: Mutex<State<Why>>,
}

struct State<Why> {
    /// By block.
    listed: BTreeMap<u64, Loss<Why>>,
    log: VecDeque<Loss<Why>>,
    events: u64,
}

impl<Why: Clone> Losses<Why> {
    pub(crate) fn new() -> Self {
        let state = State { listed: BTreeMap::new(), log: VecDeque::new(), events: 0 };
        Self { count: AtomicUsize::new(0), state: Mutex::new(state) }
    }

    /// Publishes what `put` writes into the entries of `blocks`, which are held, and lists those
    /// that `lost` says are lost now, and no others of them.
    pub(super) fn publish<Guard, T>(
        &self,
        held: Held<Guard>,
        blocks: Range<u64>,
        put: impl FnOnce() -> T,
        lost: impl Fn(u64) -> Option<Why>,
    ) -> T {
        held.publish(|| {
            let done = put();
            for block in blocks {
                match lost(block) {
                    Some(why) => {
                        self.note(block, why);
                    }
                    None => self.mended(block),
                }
            }
            done
        })
    }

    /// Lists a block. The caller holds its stripe, or the lock of its KV window. Whether it was not
    /// listed.
    pub fn note(&self, block: u64, why: Why) -> bool {
        let mut state = self.state.lock();
        if state.listed.contains_key(&block) {
            return false;
        }
        state.events += 1;
        let loss = Loss { block, event: state.events, why };
        if state.log.len() == MAX_LOGGED {
            state.log.pop_front();
        }
        state.log.push_back(loss.clone());
        state.listed.insert(block, loss);
        self.count.store(state.listed.len(), Ordering::Relaxed);
        true
    }

    /// Lists a block no more, as it holds something again. The caller holds what [`Self::note`]
    /// asks for.
    pub fn mended(&self, block: u64) {
        if self.count.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut state = self.state.lock();
        state.listed.remove(&block);
        self.count.store(state.listed.len(), Ordering::Relaxed);
    }

    /// Whether a block is listed.
    pub fn lists(&self, block: u64) -> bool {
        self.count.load(Ordering::Relaxed) > 0 && self.state.lock().listed.contains_key(&block)
    }

    /// The listed blocks of a range.
    pub fn listed_in(&self, blocks: Range<u64>) -> Vec<u64> {
        self.state.lock().listed.range(blocks).map(|(block, _)| *block).collect()
    }

    /// What is listed, by block.
    pub fn listed(&self) -> Vec<Loss<Why>> {
        self.state.lock().listed.values().cloned().collect()
    }

    /// How many blocks are listed, and the number of the last event.
    pub fn now(&self) -> (u64, u64) {
        let state = self.state.lock();
        (state.listed.len() as u64, state.events)
    }

    /// The losses behind event `event`, in order, and how many more there were that are neither
    /// logged nor listed any more.
    pub fn since(&self, event: u64) -> (Vec<Loss<Why>>, u64) {
        let state = self.state.lock();
        let logged = state.log.front().map_or(state.events, |first| first.event - 1);
        let unlogged = |loss: &&Loss<Why>| loss.event > event && loss.event <= logged;
        let mut found: Vec<_> = state.listed.values().filter(unlogged).cloned().collect();
        found.sort_by_key(|loss| loss.event);
        let missed = logged.saturating_sub(event) - found.len() as u64;
        found.extend(state.log.iter().filter(|loss| loss.event > event).cloned());
        (found, missed)
    }
}
