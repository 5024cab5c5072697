//! A node among the others: that it lives, who manages, and who is dead.
//!
//! Each node counts on in its own line. The manager watches the others; they watch the manager. Who
//! does not count on for a time is revoked, which is final: only then is it dead. What it held is
//! given up by the manager: its locks here, the rest in `recovery`.
//!
//! The manager is elected by Burns' and Lamport's algorithm of one bit a node, which needs nothing
//! but loads and stores, and of which each word has one writer.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::error::PoolError;
use crate::host::Host;
use crate::layout::{Layout, PINS};
use crate::mem::Lines;
use crate::mutex::{locked, try_locked};

/// A node's line: whether it is there; it counts; it stands for election; its clock of touches.
const COUNT: u64 = 8;
pub(crate) const CANDIDATE: u64 = 16;
const CLOCK: u64 = 24;

const JOINED: u64 = 1;
const LEFT: u64 = 2;
/// A number's incarnations: 23 bits.
const MAX_INCARNATIONS: u32 = 1 << 23;
/// A node counts on so many times within the timeout.
const COUNTS: u64 = 8;
/// Gaps between looks, at whomever, in which a node may become silent, however long they are.
const MIN_GAPS: u64 = 4;

/// Milliseconds between two turns of what a node does now and then.
pub(crate) fn interval(host: &dyn Host) -> u64 {
    (host.timeout() / COUNTS).max(1)
}

/// A node of a pool.
pub(crate) struct Member {
    pub(crate) lines: Lines,
    pub(crate) layout: Layout,
    pub(crate) host: Arc<dyn Host>,
    pub(crate) node: u32,
    pub(crate) incarnation: u32,
    word: u64,
    beat: Mutex<Beat>,
    /// The manager's word while it is this node's, or zero.
    lead: AtomicU64,
    watch: Mutex<Watch>,
    /// For each node the last incarnation whose locks were given up: the manager's.
    void: Vec<AtomicU32>,
    dead: Mutex<Vec<Dead>>,
    /// Whether this node's last life ended without a word.
    has_died: bool,
    is_fenced: AtomicBool,
    pub(crate) local: Vec<Mutex<Local>>,
    pub(crate) doorbell: Mutex<()>,
    pub(crate) granting: Mutex<()>,
    /// Times that a lock was not to be had at once.
    pub(crate) waits: AtomicU64,
}

/// What the threads of a node share of a lock.
#[derive(Debug, Default)]
pub(crate) struct Local {
    pub(crate) count: u32,
    /// The request that holds it, or zero.
    pub(crate) held: u64,
}

/// A node that is to be recovered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dead {
    pub(crate) node: u32,
    /// Up to this incarnation.
    pub(crate) last: u32,
    /// Whether it died, as far as is known. Of one that left its chunks are taken over.
    pub(crate) has_died: bool,
}

#[derive(Default)]
struct Beat {
    count: u64,
    next: u64,
}

/// A node's look at the others. Its clock goes on by its looks, and by little from one to the
/// next: of what a node missed because it was stopped itself nobody else is to blame.
#[derive(Default)]
struct Watch {
    seen: Vec<Seen>,
    next: u64,
    /// The last look, by the host's clock.
    looked: u64,
    clock: u64,
}

impl Watch {
    /// Looks now, and says what time that is.
    fn look(&mut self, host: &dyn Host) -> u64 {
        let now = host.now();
        let gap = now.saturating_sub(self.looked).min((host.timeout() / MIN_GAPS).max(1));
        self.looked = now;
        self.clock = self.clock.saturating_add(gap);
        self.clock
    }
}

#[derive(Clone, Copy, Default)]
struct Seen {
    word: u64,
    count: u64,
    /// By the watch's clock.
    since: u64,
}

/// What a node's line says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Absent,
    Alive(u32),
    Left(u32),
    /// It does not count on, or is certainly gone.
    Silent(u32),
}

fn of_word(word: u64) -> (u64, u32) {
    (word & 0xff, (word >> 8) as u32)
}

/// The incarnation of a node that is attached and whether it manages, by its word, the last of it
/// that was recovered, and the manager's word. Whoever was recovered is dead, and did not say so.
pub(crate) fn attached(node: u32, word: u64, fenced: u32, manager: u64) -> Option<(u32, bool)> {
    let (state, incarnation) = of_word(word);
    let leads = manager & 0xffff_ffff == u64::from(node) << 24 | u64::from(incarnation);
    (state == JOINED && incarnation > fenced).then_some((incarnation, leads))
}

impl Member {
    /// Joins as `node`, which nobody else may be: the host answers for that.
    pub(crate) fn join(lines: Lines, host: Arc<dyn Host>, node: u32) -> Result<Self, PoolError> {
        let layout = Layout::open(&lines)?;
        let nodes = layout.geometry.nodes;
        if node >= nodes {
            return Err(PoolError::Node { node, why: format!("the pool has {nodes}") });
        }
        let at = layout.node(node);
        let (state, own) = of_word(lines.fresh(at)?);
        // A word that was damaged may have gone back. All up to the last that was recovered are
        // dead, and this one may not be taken for one of them. Where memory is not coherent
        // `may_begin` finds that out, which looks there in any case.
        let last = if lines.coherent() { own.max(lines.word(layout.fenced(node))? as u32) } else { own };
        if last >= MAX_INCARNATIONS - 1 {
            return Err(PoolError::Node {
                node,
                why: "it was attached too often: create the pool anew".into(),
            });
        }
        let incarnation = last + 1;
        let word = u64::from(incarnation) << 8 | JOINED;
        for pin in 0..PINS {
            lines.set(layout.hazard(node, pin), 0)?;
        }
        lines.flush(layout.hazard(node, 0), 8 * PINS as u64)?;
        lines.set(at + COUNT, 0)?;
        lines.set(at + CANDIDATE, 0)?;
        lines.post(at, word)?;
        let now = host.now();
        let watch = Watch { seen: vec![Seen::default(); nodes as usize], looked: now, ..Watch::default() };
        Ok(Self {
            node,
            incarnation,
            word,
            beat: Mutex::default(),
            lead: AtomicU64::new(0),
            watch: Mutex::new(watch),
            void: (0..nodes).map(|_| AtomicU32::new(0)).collect(),
            dead: Mutex::default(),
            has_died: state == JOINED,
            is_fenced: AtomicBool::new(false),
            local: (0..layout.locks).map(|_| Mutex::default()).collect(),
            doorbell: Mutex::new(()),
            granting: Mutex::new(()),
            waits: AtomicU64::new(0),
            lines,
            layout,
            host,
        })
    }

    /// Leaves. Nothing of this node may follow.
    pub(crate) fn leave(&self) -> Result<(), PoolError> {
        self.lines.post(self.layout.node(self.node), u64::from(self.incarnation) << 8 | LEFT)?;
        Ok(())
    }

    pub(crate) fn leads(&self) -> bool {
        self.lead.load(Ordering::Acquire) != 0
    }

    /// The last incarnation of a node whose locks and reservations are void, as the manager knows.
    pub(crate) fn void(&self, node: u32) -> u32 {
        self.void.get(node as usize).map_or(0, |void| void.load(Ordering::Acquire))
    }

    /// Whether a node may have something pinned. One that is not attached has not, and whoever
    /// attaches later sees what was told before: it need not be looked for. Where nodes' caches are
    /// not coherent, all are looked at together.
    pub(crate) fn may_pin(&self, node: u32) -> Result<bool, PoolError> {
        Ok(!self.lines.coherent() || of_word(self.lines.word(self.layout.node(node))?).0 == JOINED)
    }

    /// Fails if this node was taken for dead. What it stored before a success has reached the
    /// memory.
    pub(crate) fn alive(&self) -> Result<(), PoolError> {
        let fenced = PoolError::Fenced { node: self.node };
        if self.is_fenced.load(Ordering::Relaxed) {
            return Err(fenced);
        }
        self.lines.told()?;
        if self.lines.fresh(self.layout.node(self.node))? != self.word {
            self.is_fenced.store(true, Ordering::Relaxed);
            return Err(fenced);
        }
        Ok(())
    }

    /// Counts on.
    fn beat(&self) -> Result<(), PoolError> {
        let Some(mut beat) = try_locked(&self.beat) else { return Ok(()) };
        let now = self.host.now();
        if now < beat.next {
            return Ok(());
        }
        beat.next = now + interval(&*self.host);
        self.alive()?;
        beat.count += 1;
        self.lines.post(self.layout.node(self.node) + COUNT, beat.count)?;
        Ok(())
    }

    /// Does a node's duty, if it is time: counts on, watches, and stands for election.
    pub(crate) fn turn(&self) -> Result<(), PoolError> {
        self.beat()?;
        let Some(mut watch) = try_locked(&self.watch) else { return Ok(()) };
        let now = self.host.now();
        if now < watch.next {
            return Ok(());
        }
        watch.next = now + interval(&*self.host);
        if !self.leads() && self.host.may_manage() {
            self.succeed(&mut watch)?;
        }
        if self.leads() {
            for node in 0..self.layout.geometry.nodes {
                self.bury(&mut watch, node)?;
            }
        }
        Ok(())
    }

    /// What a node's line says, and whether it stands for election.
    fn look(&self, watch: &mut Watch, node: u32) -> Result<(Life, bool), PoolError> {
        let at = self.layout.node(node);
        self.lines.consume(at, 32)?;
        let word = self.lines.word(at)?;
        let count = self.lines.word(at + COUNT)?;
        let stands = self.lines.word(at + CANDIDATE)? == 1;
        let (state, incarnation) = of_word(word);
        let life = match state {
            LEFT => Life::Left(incarnation),
            JOINED if node == self.node => Life::Alive(incarnation),
            JOINED => {
                let now = watch.look(&*self.host);
                let seen = &mut watch.seen[node as usize];
                if (seen.word, seen.count) != (word, count) {
                    *seen = Seen { word, count, since: now };
                }
                let silent = now.saturating_sub(seen.since) > self.host.timeout();
                if silent || self.host.is_gone(node, incarnation) {
                    Life::Silent(incarnation)
                } else {
                    Life::Alive(incarnation)
                }
            }
            _ => Life::Absent,
        };
        Ok((life, stands))
    }

    /// Takes over if the manager is dead or gone, and no other does.
    fn succeed(&self, watch: &mut Watch) -> Result<(), PoolError> {
        let manager = self.lines.fresh(self.layout.manager())?;
        if !self.is_vacant(watch, manager)? {
            return Ok(());
        }
        let own = self.layout.node(self.node) + CANDIDATE;
        self.lines.post(own, 1)?;
        self.lines.told()?;
        for node in (0..self.layout.geometry.nodes).filter(|node| *node != self.node) {
            let (began, mut turns) = (self.host.now(), 0);
            loop {
                let (life, stands) = self.look(watch, node)?;
                match life {
                    // Nothing of it can come any more.
                    Life::Silent(incarnation) if stands && self.host.revoke(node, incarnation) => break,
                    Life::Silent(_) | Life::Alive(_) if stands => {}
                    _ => break,
                }
                // Who comes first goes first; who comes later waits here until the others are done.
                // One of them may be stopped: this node stands again in its next turn, and does
                // until then what needs no manager. A look may take long, so there are at least
                // two, between which one that comes later has made way.
                let waited = self.host.now().saturating_sub(began);
                let most = interval(&*self.host).min(self.host.max_wait());
                if node < self.node || turns > 0 && waited > most {
                    self.lines.post(own, 0)?;
                    watch.next = self.host.now() + interval(&*self.host);
                    return Ok(());
                }
                self.beat()?;
                self.host.relax(turns);
                turns = turns.saturating_add(1);
            }
        }
        // Alone. Somebody may have been here before.
        let now = self.lines.fresh(self.layout.manager())?;
        let vacant = now == manager || self.is_vacant(watch, now)?;
        if vacant && self.has_ended(watch, now)? {
            let word =
                (now >> 32).wrapping_add(1) << 32 | u64::from(self.node) << 24 | u64::from(self.incarnation);
            self.lines.post(self.layout.manager(), word)?;
            let (first, length) = self.layout.all_fenced();
            self.lines.consume(first, length)?;
            for (node, void) in self.void.iter().enumerate() {
                let fenced = self.lines.word(self.layout.fenced(node as u32))?;
                void.store(fenced as u32, Ordering::Release);
            }
            // The last manager's grants are this one's to go on with.
            for lock in 0..self.layout.locks {
                self.lines.invalidate(self.layout.grant(lock), 8)?;
            }
            self.lines.settle()?;
            self.lead.store(word, Ordering::Release);
        }
        self.lines.post(own, 0)?;
        Ok(())
    }

    /// The node and incarnation of a manager's word, if they are any node's.
    fn manager_of(&self, manager: u64) -> Option<(u32, u32)> {
        let (node, incarnation) = ((manager >> 24 & 0xff) as u32, manager as u32 & 0xff_ffff);
        (incarnation > 0 && node < self.layout.geometry.nodes).then_some((node, incarnation))
    }

    /// Whether a manager's word is nobody's who manages.
    fn is_vacant(&self, watch: &mut Watch, manager: u64) -> Result<bool, PoolError> {
        let Some((node, incarnation)) = self.manager_of(manager) else { return Ok(true) };
        Ok(self.look(watch, node)?.0 != Life::Alive(incarnation))
    }

    /// Sees to it that a manager that does not manage cannot.
    fn has_ended(&self, watch: &mut Watch, manager: u64) -> Result<bool, PoolError> {
        let Some((node, incarnation)) = self.manager_of(manager) else { return Ok(true) };
        Ok(match self.look(watch, node)?.0 {
            Life::Silent(silent) if silent == incarnation => self.host.revoke(node, incarnation),
            Life::Alive(alive) => alive != incarnation,
            _ => true,
        })
    }

    /// Gives up the locks of a node that is dead or has left, and has the rest recovered.
    fn bury(&self, watch: &mut Watch, node: u32) -> Result<(), PoolError> {
        let life = self.look(watch, node)?.0;
        let mut void = self.void(node);
        if self.lines.coherent() && void > 0 && !locked(&self.dead).iter().any(|dead| dead.node == node) {
            // It was read from a word that was damaged, or `check` has mended one since to less
            // than was recovered: who comes next as this node would wait. So it is done again.
            let fenced = self.fenced(node)?;
            if fenced < void {
                void = fenced;
                self.void[node as usize].store(void, Ordering::Release);
            }
        }
        let (last, has_died) = match life {
            Life::Absent => (0, false),
            Life::Left(incarnation) => (incarnation, false),
            Life::Silent(incarnation) if incarnation <= void => (void, true),
            Life::Silent(incarnation) if self.host.revoke(node, incarnation) => (incarnation, true),
            // Whoever was it before is gone: its number was to be had. How it ended only who is it
            // now has seen.
            Life::Alive(incarnation) | Life::Silent(incarnation) => {
                (incarnation.saturating_sub(1), node == self.node && self.has_died)
            }
        };
        if last > void {
            self.give_up(node, last)?;
            if let Some(void) = self.void.get(node as usize) {
                void.store(last, Ordering::Release);
            }
            locked(&self.dead).push(Dead { node, last, has_died });
        }
        Ok(())
    }

    /// Nodes that are to be recovered, up to which incarnation. The manager's.
    pub(crate) fn dead(&self) -> Option<Dead> {
        locked(&self.dead).first().copied()
    }

    /// Says that a node is recovered.
    pub(crate) fn recovered(&self, node: u32, incarnation: u32) -> Result<(), PoolError> {
        self.lines.post(self.layout.fenced(node), u64::from(incarnation))?;
        locked(&self.dead).retain(|dead| (dead.node, dead.last) != (node, incarnation));
        Ok(())
    }

    /// The last incarnation of a node that is recovered.
    pub(crate) fn fenced(&self, node: u32) -> Result<u32, PoolError> {
        Ok(self.lines.fresh(self.layout.fenced(node))? as u32)
    }

    /// A node's incarnation, and whether it is attached.
    pub(crate) fn incarnation(&self, node: u32) -> Result<(u32, bool), PoolError> {
        let (state, incarnation) = of_word(self.lines.fresh(self.layout.node(node))?);
        Ok((incarnation, state == JOINED))
    }

    /// Whether a node's incarnation is dead and recovered, or never was.
    pub(crate) fn is_nobody(&self, node: u32, incarnation: u32) -> Result<bool, PoolError> {
        if node >= self.layout.geometry.nodes {
            return Ok(true);
        }
        Ok(incarnation <= self.fenced(node)? || incarnation > self.incarnation(node)?.0)
    }

    /// Whether a node's incarnation certainly lives, whatever was said of its being recovered.
    pub(crate) fn lives(&self, node: u32, incarnation: u32) -> Result<bool, PoolError> {
        let is_current = self.incarnation(node)? == (incarnation, true);
        Ok(is_current && self.knows_who_lives() && !self.host.is_gone(node, incarnation))
    }

    /// Whether the host can tell who lives: not where memory is not coherent, or others manage.
    fn knows_who_lives(&self) -> bool {
        self.lines.coherent() && self.host.may_manage()
    }

    /// Whether a node has left or died whose places are yet to be given back.
    pub(crate) fn awaits_recovery(&self) -> Result<bool, PoolError> {
        for node in 0..self.layout.geometry.nodes {
            let (incarnation, is_attached) = self.incarnation(node)?;
            let is_over = !is_attached || self.host.is_gone(node, incarnation);
            let last = if is_over { incarnation } else { incarnation.saturating_sub(1) };
            if self.fenced(node)? < last {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether no other node may live.
    pub(crate) fn is_alone(&self) -> Result<bool, PoolError> {
        for node in (0..self.layout.geometry.nodes).filter(|node| *node != self.node) {
            if self.may_live(node)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether another node may be attached. Where the host knows who is gone the pool's words are
    /// not asked: they may be damaged.
    pub(crate) fn may_live(&self, node: u32) -> Result<bool, PoolError> {
        if node >= self.layout.geometry.nodes {
            return Ok(false);
        }
        let fenced = self.fenced(node)?;
        let (incarnation, joined) = self.incarnation(node)?;
        if self.knows_who_lives() {
            return Ok(!self.host.is_gone(node, incarnation));
        }
        Ok(joined && fenced != incarnation)
    }

    /// Whether a node is said to be recovered from a life that it has not had, or lives; and what
    /// the word must say, if that is known.
    pub(crate) fn misfenced(&self, node: u32) -> Result<(bool, Option<u32>), PoolError> {
        // Before the node's word, which only grows.
        let fenced = self.fenced(node)?;
        let (incarnation, joined) = self.incarnation(node)?;
        let is_own = node == self.node;
        let is_alive = is_own || joined && !self.host.is_gone(node, incarnation);
        // More than any node can have had. Less of a node that is gone does no harm: who comes next
        // goes by the larger of both words.
        let is_impossible = fenced >= MAX_INCARNATIONS;
        let is_wrong = match fenced.cmp(&incarnation) {
            std::cmp::Ordering::Less => false,
            std::cmp::Ordering::Equal => is_own,
            std::cmp::Ordering::Greater => is_alive || is_impossible,
        };
        // Else it may be the node's word that is wrong. Where memory is not coherent nobody but the
        // device knows who lives.
        let is_known = (is_own || is_impossible) && self.knows_who_lives();
        // Of one that is gone nobody knows whether it was recovered. To do it again does no harm.
        let right = incarnation.saturating_sub(1);
        Ok((is_wrong, (is_wrong && is_known).then_some(right)))
    }

    /// Whether all that came before this incarnation of this node is recovered.
    pub(crate) fn may_begin(&self) -> Result<bool, PoolError> {
        let fenced = self.fenced(self.node)?;
        // Who was taken for dead meanwhile is told so by whatever it does next.
        if fenced >= self.incarnation && self.alive().is_ok() {
            let why = format!("its word was damaged, which says {} after {fenced}", self.incarnation);
            return Err(PoolError::Node { node: self.node, why });
        }
        Ok(fenced.saturating_add(1) >= self.incarnation)
    }

    /// Whether a node is attached, and not known to be dead.
    pub(crate) fn is_attached(&self, node: u32) -> Result<bool, PoolError> {
        let word = self.lines.fresh(self.layout.node(node))?;
        Ok(attached(node, word, self.fenced(node)?, 0).is_some())
    }

    /// The nodes that are attached, and whether each manages.
    pub(crate) fn members(&self) -> Result<Vec<(u32, u32, bool)>, PoolError> {
        let manager = self.lines.fresh(self.layout.manager())?;
        let mut found = Vec::new();
        for node in 0..self.layout.geometry.nodes {
            let word = self.lines.fresh(self.layout.node(node))?;
            if let Some((incarnation, leads)) = attached(node, word, self.fenced(node)?, manager) {
                found.push((node, incarnation, leads));
            }
        }
        Ok(found)
    }

    /// The largest clock of touches that any node told.
    pub(crate) fn clock(&self) -> Result<u64, PoolError> {
        let mut largest = 0;
        for node in 0..self.layout.geometry.nodes {
            self.lines.invalidate(self.layout.node(node), 32)?;
        }
        self.lines.settle()?;
        for node in 0..self.layout.geometry.nodes {
            largest = largest.max(self.lines.word(self.layout.node(node) + CLOCK)?);
        }
        // One that lies has no more to say than half of all.
        Ok(largest & u64::MAX >> 1)
    }

    pub(crate) fn tell_clock(&self, clock: u64) -> Result<(), PoolError> {
        // The node's next count brings the line to the others.
        self.lines.set(self.layout.node(self.node) + CLOCK, clock)?;
        Ok(())
    }

    /// Whether whoever attaches as `node` has nothing to wait for: all its lives are recovered.
    pub(crate) fn is_recovered(lines: &Lines, node: u32) -> Result<bool, PoolError> {
        let layout = Layout::open(lines)?;
        let (_, last) = of_word(lines.fresh(layout.node(node))?);
        Ok(lines.fresh(layout.fenced(node))? as u32 >= last)
    }

    /// A wait's next step: the node's duty, and a moment.
    pub(crate) fn wait(&self, wait: &mut Wait, what: &'static str) -> Result<(), PoolError> {
        let now = self.host.now();
        let began = *wait.began.get_or_insert(now);
        if now.saturating_sub(began) > self.host.max_wait() {
            return Err(PoolError::Timeout(what));
        }
        if wait.is_due() || !self.lines.coherent() {
            self.grant()?;
            self.turn()?;
        }
        self.host.relax(wait.turns);
        wait.turns = wait.turns.saturating_add(1);
        Ok(())
    }
}

/// A wait.
#[derive(Default)]
pub(crate) struct Wait {
    began: Option<u64>,
    turns: u32,
}

impl Wait {
    /// Whether it is time for what is only done now and then.
    pub(crate) fn is_due(&self) -> bool {
        self.turns.is_multiple_of(16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Geometry;
    use crate::local::{self, Processes};
    use crate::mem::CxlMem;
    use crate::pool::Pool;

    /// A machine whose time goes on by its waits alone, and on which nobody is known to be dead.
    struct Waits {
        clock: AtomicU64,
        /// The most turns that a wait had.
        turns: AtomicU32,
        may_manage: bool,
    }

    impl Host for Waits {
        fn now(&self) -> u64 {
            self.clock.load(Ordering::Relaxed)
        }

        fn relax(&self, turns: u32) {
            self.clock.fetch_add(1, Ordering::Relaxed);
            self.turns.fetch_max(turns, Ordering::Relaxed);
        }

        fn timeout(&self) -> u64 {
            2_000
        }

        fn max_wait(&self) -> u64 {
            60_000
        }

        fn may_manage(&self) -> bool {
            self.may_manage
        }

        fn is_gone(&self, _: u32, _: u32) -> bool {
            false
        }

        fn revoke(&self, _: u32, _: u32) -> bool {
            false
        }
    }

    #[test]
    fn a_node_that_is_stopped_while_it_stands_for_election_holds_nobody_up_for_long() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pool");
        local::create(&path, &Geometry::fitting(8 << 20)).unwrap();
        let memory = local::memory(&path).unwrap();
        let host =
            |may_manage| Arc::new(Waits { clock: AtomicU64::new(0), turns: AtomicU32::new(0), may_manage });
        let stopped = Pool::attach(memory.clone(), host(false), 5).unwrap();
        let stands = stopped.member.layout.node(5) + CANDIDATE;
        memory.store(stands, &1_u64.to_le_bytes()).unwrap();
        let machine = host(true);
        let pool = Pool::attach(memory.clone(), machine.clone(), 0).unwrap();
        let (waited, most) = (machine.now(), interval(&*machine));
        assert!((most..2 * most).contains(&waited), "{waited}");
        // It sleeps in between.
        assert!(u64::from(machine.turns.load(Ordering::Relaxed)) + 2 >= most);
        assert!(!pool.member.leads());
        pool.put("object", b"its bytes").unwrap();
        // It stands again when that one does not any more.
        memory.store(stands, &[0; 8]).unwrap();
        machine.clock.fetch_add(most, Ordering::Relaxed);
        pool.serve().unwrap();
        assert!(pool.member.leads());
    }

    #[test]
    fn a_number_that_was_attached_too_often_is_refused_whatever_its_word_says() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pool");
        let geometry = Geometry { nodes: 2, ..Geometry::fitting(8 << 20) };
        local::create(&path, &geometry).unwrap();
        let memory = local::memory(&path).unwrap();
        let layout = Layout::open(&Lines::new(memory.clone())).unwrap();
        let set = |at: u64, word: u64| memory.store(at, &word.to_le_bytes()).unwrap();
        let is_refused = |said: &str| {
            let host = Processes::claim(local::open_file(&path).unwrap(), 2, Some(0)).unwrap();
            let opened = Pool::attach(memory.clone(), Arc::new(host), 0).map(|_| ());
            assert!(matches!(opened, Err(PoolError::Node { node: 0, .. })), "{said}: {opened:?}");
            // Another is to be had, until all are refused.
            let pool = Pool::open(&path).unwrap();
            assert_eq!(pool.node(), 1, "{said}");
            pool.put("object", b"is kept").unwrap();
            let why = Pool::open(&path).map(|_| ()).unwrap_err();
            assert!(matches!(why, PoolError::Node { node: 0, .. }), "{said}: {why}");
            let why = why.to_string();
            assert!(why.ends_with("; no other of the pool's 2 numbers is to be had"), "{said}: {why}");
            pool.leave().unwrap();
        };
        for incarnation in [u64::from(MAX_INCARNATIONS) - 1, u64::from(u32::MAX), u64::MAX >> 8] {
            set(layout.node(0), incarnation << 8 | LEFT);
            is_refused(&format!("{incarnation:#x}"));
        }
        set(layout.node(0), 0);
        set(layout.fenced(0), u64::from(MAX_INCARNATIONS));
        is_refused("the recovered");
        // A repair knows that nobody can have been recovered so often.
        let pool = Pool::open(&path).unwrap();
        assert!(pool.check(true).unwrap().repaired);
        assert_eq!(Pool::open(&path).unwrap().node(), 0);
        assert_eq!(pool.get("object").unwrap().unwrap(), b"is kept");
    }
}
