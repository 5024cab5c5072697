//! Locks in two tiers: a mutex among a node's threads, and behind it one among nodes.
//!
//! In memory that is not coherent a node asks in a line of its own, and the manager grants in a
//! line of its own. The request holds the lock while it stands and is the one granted. Releasing is
//! taking the request back. In coherent memory the grant's word is taken and released by the nodes
//! themselves, in one step. Either way the word says who holds the lock.
//!
//! A change of two words is told as an *intent* before it begins. If its node dies, or the thread
//! alone, whoever comes next does the change again, whole.
//!
//! No lock is taken while another is held.

use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError};

use crate::error::PoolError;
use crate::layout::{is_sealed, seal, word};
use crate::mem::LINE;
use crate::member::{Local, Member, Wait};
use crate::mutex::{locked, try_locked};

/// A lock that is held.
pub(crate) struct Held<'m> {
    member: &'m Member,
    lock: u32,
    local: Option<MutexGuard<'m, Local>>,
}

/// A request: the node, its incarnation, a count. Below 2^63, and never zero.
fn request(node: u32, incarnation: u32, count: u32) -> u64 {
    u64::from(node) << 55 | u64::from(incarnation) << 32 | u64::from(count)
}

/// Node and incarnation of a request.
fn of_request(request: u64) -> (u32, u32) {
    ((request >> 55) as u32, (request >> 32) as u32 & 0x7f_ffff)
}

impl Member {
    /// Takes a lock.
    pub(crate) fn acquire(&self, lock: u32) -> Result<Held<'_>, PoolError> {
        let mutex = &self.local[lock as usize];
        let (mut local, died) = match mutex.lock() {
            Ok(local) => (local, false),
            Err(poisoned) => {
                mutex.clear_poison();
                (poisoned.into_inner(), true)
            }
        };
        if died && local.held != 0 {
            // A thread of this node died with it. The node still holds it.
            self.replay(lock)?;
            return Ok(Held { member: self, lock, local: Some(local) });
        }
        local.count = local.count.wrapping_add(1);
        let wanted = request(self.node, self.incarnation, local.count);
        let mut wait = Wait::default();
        if self.lines.coherent() {
            local.held = wanted;
            let grant = self.layout.grant(lock);
            while self.lines.compare_exchange(grant, 0, wanted)? != Some(true) {
                if wait.is_due() && self.take_over(grant, wanted)? {
                    self.replay(lock)?;
                    break;
                }
                local.held = 0;
                self.waits.fetch_add(1, Ordering::Relaxed);
                self.wait(&mut wait, "a lock")?;
                local.held = wanted;
            }
        } else {
            local.held = wanted;
            if let Err(why) = self.ask(lock, wanted, &mut wait) {
                local.held = 0;
                self.lines.post(self.layout.request(lock, self.node), wanted << 1)?;
                return Err(why);
            }
        }
        Ok(Held { member: self, lock, local: Some(local) })
    }

    /// Takes a lock that nobody holds who could give it back: its word was damaged. Whether it did.
    fn take_over(&self, grant: u64, wanted: u64) -> Result<bool, PoolError> {
        let granted = self.lines.fresh(grant)?;
        let (holder, incarnation) = of_request(granted);
        let is_own = (holder, incarnation) == (self.node, self.incarnation);
        // Of this node's threads only one waits here, and none holds it.
        let is_free =
            || Ok::<_, PoolError>(self.is_nobody(holder, incarnation)? && !self.lives(holder, incarnation)?);
        if granted == 0 || !is_own && !is_free()? {
            return Ok(false);
        }
        Ok(self.lines.compare_exchange(grant, granted, wanted)? == Some(true))
    }

    fn ask(&self, lock: u32, wanted: u64, wait: &mut Wait) -> Result<(), PoolError> {
        // The manager looks at both again and again, so their order does not matter.
        let at = self.layout.request(lock, self.node);
        self.lines.set(at, wanted << 1 | 1)?;
        self.lines.flush(at, 8)?;
        {
            let _one = locked(&self.doorbell);
            let at = self.layout.doorbell(self.node, lock);
            let rung = self.lines.word(at)?;
            self.lines.post(at, rung | 1 << (lock % 64))?;
        }
        while self.lines.fresh(self.layout.grant(lock))? != wanted {
            self.waits.fetch_add(1, Ordering::Relaxed);
            self.wait(wait, "a lock")?;
        }
        Ok(())
    }

    /// Grants what can be granted, if this node manages.
    pub(crate) fn grant(&self) -> Result<(), PoolError> {
        if self.lines.coherent() || !self.leads() {
            return Ok(());
        }
        let Some(_one) = try_locked(&self.granting) else { return Ok(()) };
        let nodes = self.layout.geometry.nodes;
        let (first, length) = self.layout.all_doorbells();
        self.lines.consume(first, length)?;
        for words in 0..self.layout.locks.div_ceil(64) {
            let mut rung = 0;
            for node in 0..nodes {
                rung |= self.lines.word(self.layout.doorbell(node, words * 64))?;
            }
            while rung != 0 {
                let lock = words * 64 + rung.trailing_zeros();
                rung &= rung - 1;
                if lock < self.layout.locks {
                    self.grant_one(lock)?;
                }
            }
        }
        Ok(())
    }

    fn grant_one(&self, lock: u32) -> Result<(), PoolError> {
        let nodes = self.layout.geometry.nodes;
        self.lines.consume(self.layout.request(lock, 0), u64::from(nodes) * LINE)?;
        let granted = self.lines.word(self.layout.grant(lock))?;
        let (holder, incarnation) = of_request(granted);
        let asks = |node: u32| self.lines.word(self.layout.request(lock, node));
        if granted != 0
            && holder < nodes
            && asks(holder)? == granted << 1 | 1
            && incarnation > self.void(holder)
        {
            return Ok(());
        }
        // Whose turn comes after the last holder's.
        for node in (1..=nodes).map(|next| (holder.min(nodes) + next) % nodes) {
            let asked = asks(node)?;
            let (of, incarnation) = of_request(asked >> 1);
            if asked & 1 == 1 && asked >> 1 != granted && of == node && incarnation > self.void(node) {
                self.lines.post(self.layout.grant(lock), asked >> 1)?;
                return Ok(());
            }
        }
        Ok(())
    }

    /// Gives up the locks that a dead node holds, after doing its changes again.
    pub(crate) fn give_up(&self, node: u32, last: u32) -> Result<(), PoolError> {
        let _one = locked(&self.granting);
        for lock in 0..self.layout.locks {
            let grant = self.layout.grant(lock);
            let granted = self.lines.word(grant)?;
            let (holder, incarnation) = of_request(granted);
            if granted == 0 || holder != node || incarnation > last {
                continue;
            }
            if self.lines.coherent() {
                self.replay(lock)?;
                self.lines.compare_exchange(grant, granted, 0)?;
            } else {
                if self.lines.fresh(self.layout.request(lock, node))? == granted << 1 | 1 {
                    self.replay(lock)?;
                }
                self.lines.set(grant, 0)?;
            }
        }
        Ok(())
    }

    /// Does the change again that a lock's holder told, if it told one.
    pub(crate) fn replay(&self, lock: u32) -> Result<(), PoolError> {
        let at = self.layout.intent(lock);
        self.lines.consume(at, LINE)?;
        let mut intent = [0; LINE as usize];
        self.lines.load(at, &mut intent)?;
        if word(&intent, 0) == 0 {
            return Ok(());
        }
        if is_sealed(&intent) {
            for pair in [1, 3] {
                let (tag, value) = (word(&intent, pair), word(&intent, pair + 1));
                let ours = |slot: &crate::layout::Slot| self.layout.lock_of(slot.group) == lock;
                if self.layout.slot_of_tag(tag).as_ref().is_some_and(ours) {
                    self.lines.invalidate(tag, 8)?;
                    self.lines.settle()?;
                    self.lines.set(tag, value)?;
                    self.lines.publish(tag, 8)?;
                }
            }
        }
        // One that does not check was not told whole, so nothing was changed.
        self.lines.post(at, 0)?;
        Ok(())
    }

    /// Whether a lock has an intent that is told and not taken back.
    pub(crate) fn has_intent(&self, lock: u32) -> Result<bool, PoolError> {
        Ok(self.lines.fresh(self.layout.intent(lock))? != 0)
    }
}

impl Held<'_> {
    /// Changes two tags of one line as one, for whoever looks after a death.
    pub(crate) fn change(&self, pairs: [(u64, u64); 2]) -> Result<(), PoolError> {
        let lines = &self.member.lines;
        let at = self.member.layout.intent(self.lock);
        let mut intent = [0; LINE as usize];
        for (index, value) in [1, pairs[0].0, pairs[0].1, pairs[1].0, pairs[1].1].into_iter().enumerate() {
            intent[8 * index..8 * index + 8].copy_from_slice(&value.to_le_bytes());
        }
        seal(&mut intent);
        lines.store(at, &intent)?;
        lines.publish(at, LINE)?;
        for (tag, value) in pairs {
            lines.set(tag, value)?;
        }
        lines.publish(pairs[0].0, 8)?;
        lines.post(at, 0)?;
        Ok(())
    }

    /// Gives the lock back.
    pub(crate) fn release(mut self) -> Result<(), PoolError> {
        self.give_back()
    }

    fn give_back(&mut self) -> Result<(), PoolError> {
        let Some(mut local) = self.local.take() else { return Ok(()) };
        let member = self.member;
        let held = std::mem::take(&mut local.held);
        if member.lines.coherent() {
            // By a step, not a store: a node that was taken for dead may not give back what is
            // another's by now.
            member.lines.compare_exchange(member.layout.grant(self.lock), held, 0)?;
            return Ok(());
        }
        member.lines.post(member.layout.request(self.lock, member.node), held << 1)?;
        let _one = member.doorbell.lock().unwrap_or_else(PoisonError::into_inner);
        let at = member.layout.doorbell(member.node, self.lock);
        // Nobody need see this soon: a bit too many has the manager look once more.
        let rung = member.lines.word(at)?;
        member.lines.set(at, rung & !(1 << (self.lock % 64)))?;
        Ok(())
    }
}

impl Drop for Held<'_> {
    /// A thread that dies leaves it to the next of its node.
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // If that fails the memory is gone, and with it the lock.
            let _ = self.give_back();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{Geometry, Layout};
    use crate::local;
    use crate::mem::{CxlMem, Lines};
    use crate::pool::Pool;

    #[test]
    fn a_lock_whose_word_names_nobody_is_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pool");
        local::create(&path, &Geometry::fitting(8 << 20)).unwrap();
        let memory = local::memory(&path).unwrap();
        let layout = Layout::open(&Lines::new(memory.clone())).unwrap();
        let pool = Pool::open(&path).unwrap();
        let (node, own) = (pool.member.node, pool.member.incarnation);
        let words = [1, u64::MAX, request(node, own, 7), request(node, own + 1, 1), request(node, 0, 3)];
        for (round, word) in words.into_iter().enumerate() {
            for lock in 0..layout.locks {
                memory.store(layout.grant(lock), &word.to_le_bytes()).unwrap();
            }
            let name = format!("object {round}");
            pool.put(&name, &[7; 100]).unwrap();
            assert_eq!(pool.get(&name).unwrap(), Some(vec![7; 100]));
            let found = pool.check(true).unwrap();
            assert_eq!((found.problems.len(), found.ready), (0, round as u64 + 1), "{word:#x}: {found:?}");
        }
        // What a living node holds stays its own.
        let other = Pool::open(&path).unwrap();
        let held = other.member.acquire(1).unwrap();
        let granted = pool.member.lines.fresh(layout.grant(1)).unwrap();
        // Whatever is said of it.
        for fenced in [0, other.member.incarnation, u32::MAX] {
            memory.store(layout.fenced(other.node()), &u64::from(fenced).to_le_bytes()).unwrap();
            assert!(!pool.member.take_over(layout.grant(1), request(node, own, 9)).unwrap(), "{fenced:#x}");
            assert_eq!(pool.member.lines.fresh(layout.grant(1)).unwrap(), granted);
        }
        held.release().unwrap();
    }

    #[test]
    fn a_node_whose_word_went_back_lives_on_as_nobody_else() {
        for word in [0_u64, 1] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("pool");
            local::create(&path, &Geometry::fitting(8 << 20)).unwrap();
            let memory = local::memory(&path).unwrap();
            let layout = Layout::open(&Lines::new(memory.clone())).unwrap();
            for number in 0..5 {
                let pool = Pool::open(&path).unwrap();
                pool.put(&format!("object {number}"), &[1; 3000]).unwrap();
                pool.leave().unwrap();
            }
            memory.store(layout.node(0), &word.to_le_bytes()).unwrap();
            let pool = Pool::open(&path).unwrap();
            let (node, own) = (pool.member.node, pool.member.incarnation);
            assert!(node == 0 && !pool.member.is_nobody(node, own).unwrap(), "{own}");
            assert_eq!(pool.member.members().unwrap(), [(0, own, true)]);
            pool.check(true).unwrap();
            assert_eq!(pool.check(false).unwrap().problems, []);
            let other = Pool::open(&path).unwrap();
            let held = pool.member.acquire(1).unwrap();
            assert!(
                !other.member.take_over(layout.grant(1), request(1, other.member.incarnation, 9)).unwrap()
            );
            held.release().unwrap();
        }
    }

    #[test]
    fn only_who_died_is_counted_as_recovered() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pool");
        local::create(&path, &Geometry::fitting(8 << 20)).unwrap();
        let recoveries = |pool: &Pool| {
            pool.serve().unwrap();
            pool.stats().unwrap().recoveries
        };
        for number in 0..3 {
            let pool = Pool::open(&path).unwrap();
            pool.put(&format!("object {number}"), &[1; 100]).unwrap();
            assert_eq!(recoveries(&pool), 0);
            pool.leave().unwrap();
        }
        drop(Pool::open(&path).unwrap());
        let pool = Pool::open(&path).unwrap();
        assert_eq!(recoveries(&pool), 1);
    }
}
