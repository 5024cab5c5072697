//! Memory whose nodes have caches that nobody keeps coherent, for tests: what is possible on
//! hardware happens here, chosen by a seed.
//!
//! * A node's loads and stores go to lines of its own. Other nodes see nothing of them before a
//!   line is written back, whole, with whatever else it holds.
//! * Flushes, invalidations and streamed stores complete in any order, each at any later moment,
//!   at the latest by the fence. Between two of them other nodes may run.
//! * At any moment a line may be evicted, and written back if it was stored to; and a line that
//!   nobody asked for may be prefetched, and so become stale.
//! * A node that dies loses what it had not written back, or not, line by line.
//! * A node that is revoked stores to nobody, and loads bytes of 0xff.
//!
//! It can also be coherent, for the protocols' other half. Each call site can be left out, to see
//! that a test finds it missing.

use std::collections::BTreeSet;
use std::panic::Location;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::{Call, CxlMem, LINE, MemError, inside, lines};

/// A call that can be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Site {
    /// Its line, which tells most of them apart: scenes look many up.
    pub line: u32,
    /// The source file.
    pub file: &'static str,
    /// What is called there.
    pub call: Call,
}

/// A call that is left out, or of a control one that is made with all else alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeftOut {
    /// Which.
    pub site: Site,
    /// It is made.
    pub is_control: bool,
}

/// What a node that dies unwinds with.
#[derive(Clone, Copy, Debug)]
pub struct Killed;

/// What may happen by itself: once in so many steps, never if zero.
#[derive(Clone, Copy, Debug, Default)]
struct Chances {
    evict: u64,
    complete: u64,
    prefetch: u64,
}

#[derive(Clone)]
enum Pending {
    WriteBack(usize),
    Drop(usize),
    Stream(usize, usize, Vec<u8>),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Held {
    No,
    Clean,
    Dirty,
}

#[derive(Clone)]
struct Line {
    held: Held,
    bytes: [u8; LINE as usize],
}

/// A node's cache.
struct Cache {
    lines: Vec<Line>,
    held: Vec<usize>,
    pending: Vec<Pending>,
    /// What a fence that was left out should have completed: it completes last.
    late: Vec<Pending>,
    /// Lines that the call that is left out is about: they are prefetched often.
    sought: BTreeSet<usize>,
    /// Steps in which lines are evicted as soon as they are stored to.
    hurried: u32,
    dead: bool,
    revoked: bool,
    steps: u64,
    /// The step at which it dies.
    last: Option<u64>,
}

struct State {
    media: Vec<u8>,
    caches: Vec<Cache>,
    random: u64,
    chances: Chances,
    sites: BTreeSet<Site>,
    left_out: Option<LeftOut>,
}

/// Steps after a call that is left out.
const HURRIED: u32 = 8;
/// Lines that are prefetched often, at most.
const SOUGHT: usize = 64;

type Hook = Box<dyn Fn(usize) + Send + Sync>;

/// The memory and all nodes' caches.
pub struct Simulated {
    state: Mutex<State>,
    bytes: u64,
    coherent: bool,
    /// Called at each step of a node, where others may run.
    hook: Hook,
    /// Called where a call is left out.
    pause: OnceLock<Hook>,
}

impl State {
    /// The next number of the sequence (`splitmix64`).
    fn random(&mut self) -> u64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.random ^ self.random >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.random() % bound as u64) as usize
    }

    fn happens(&mut self, once_in: u64) -> bool {
        once_in != 0 && self.random().is_multiple_of(once_in)
    }

    fn media(&self, line: usize) -> [u8; LINE as usize] {
        let at = line * LINE as usize;
        self.media[at..at + LINE as usize].try_into().unwrap_or([0; LINE as usize])
    }

    fn write_media(&mut self, node: usize, line: usize, offset: usize, bytes: &[u8]) {
        if !self.caches[node].revoked {
            let at = line * LINE as usize + offset;
            self.media[at..at + bytes.len()].copy_from_slice(bytes);
        }
    }

    fn fetch(&mut self, node: usize, line: usize) {
        if self.caches[node].lines[line].held == Held::No {
            let bytes = if self.caches[node].revoked { [0xff; LINE as usize] } else { self.media(line) };
            self.caches[node].lines[line] = Line { held: Held::Clean, bytes };
            self.caches[node].held.push(line);
        }
    }

    fn write_back(&mut self, node: usize, line: usize) {
        if self.caches[node].lines[line].held == Held::Dirty {
            let bytes = self.caches[node].lines[line].bytes;
            self.write_media(node, line, 0, &bytes);
            self.caches[node].lines[line].held = Held::Clean;
        }
    }

    fn drop_line(&mut self, node: usize, line: usize) {
        self.write_back(node, line);
        if self.caches[node].lines[line].held != Held::No {
            self.caches[node].lines[line].held = Held::No;
            // Its place is among the last mostly. The order is the seed's, and stays.
            let held = &mut self.caches[node].held;
            if let Some(at) = held.iter().rposition(|held| *held == line) {
                held.remove(at);
            }
        }
    }

    fn complete(&mut self, node: usize, pending: Pending) {
        match pending {
            Pending::WriteBack(line) => self.write_back(node, line),
            Pending::Drop(line) => self.drop_line(node, line),
            Pending::Stream(line, offset, bytes) => {
                self.drop_line(node, line);
                self.write_media(node, line, offset, &bytes);
            }
        }
    }

    /// Completes one pending call, if there is any.
    fn complete_one(&mut self, node: usize) -> bool {
        let many = self.caches[node].pending.len();
        if many == 0 {
            return false;
        }
        let which = self.below(many);
        let pending = self.caches[node].pending.swap_remove(which);
        self.complete(node, pending);
        true
    }

    /// Has the node's own loads and stores of a line see what it streamed.
    fn drain(&mut self, node: usize, line: usize) {
        let is_of = |pending: &mut Pending| matches!(pending, Pending::Stream(of, ..) if *of == line);
        let Cache { late, pending, .. } = &mut self.caches[node];
        let streams: Vec<_> = late.extract_if(.., is_of).chain(pending.extract_if(.., is_of)).collect();
        for stream in streams {
            self.complete(node, stream);
        }
    }

    fn die(&mut self, node: usize) {
        let late = std::mem::take(&mut self.caches[node].late);
        for pending in std::mem::take(&mut self.caches[node].pending).into_iter().chain(late) {
            if self.happens(2) {
                self.complete(node, pending);
            }
        }
        for line in std::mem::take(&mut self.caches[node].held) {
            if self.happens(2) {
                self.write_back(node, line);
            }
            self.caches[node].lines[line].held = Held::No;
        }
        self.caches[node].dead = true;
    }

    fn background(&mut self, node: usize, near: Option<usize>) {
        let Chances { evict, complete, prefetch } = self.chances;
        if self.happens(complete) {
            self.complete_one(node);
        }
        if self.happens(evict) && !self.caches[node].held.is_empty() {
            let which = self.below(self.caches[node].held.len());
            let line = self.caches[node].held[which];
            self.drop_line(node, line);
        }
        if let Some(hurried) = self.caches[node].hurried.checked_sub(1) {
            self.caches[node].hurried = hurried;
            let is_dirty = |line: &usize| self.caches[node].lines[*line].held == Held::Dirty;
            if let Some(line) = near.filter(is_dirty)
                && self.happens(2)
            {
                self.drop_line(node, line);
            }
        }
        let many = self.caches[node].sought.len();
        if many > 0 && self.happens(3) {
            let which = self.below(many);
            if let Some(line) = self.caches[node].sought.iter().nth(which).copied() {
                self.fetch(node, line);
            }
        }
        if self.happens(prefetch) {
            let many = self.caches[node].lines.len();
            let line = near.map_or(0, |line| line + 1);
            let line = if self.happens(2) || line >= many { self.below(many) } else { line };
            self.fetch(node, line);
        }
    }
}

impl Simulated {
    /// Memory of `bytes` for `nodes`. `hook` is called with a node's number at each of its steps.
    pub fn new(
        bytes: u64,
        nodes: usize,
        coherent: bool,
        seed: u64,
        hook: impl Fn(usize) + Send + Sync + 'static,
    ) -> Arc<Self> {
        let bytes = bytes.next_multiple_of(LINE);
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        let line = Line { held: Held::No, bytes: [0; LINE as usize] };
        let cache = |_| Cache {
            lines: if coherent { Vec::new() } else { vec![line.clone(); length / LINE as usize] },
            held: Vec::new(),
            pending: Vec::new(),
            late: Vec::new(),
            sought: BTreeSet::new(),
            hurried: 0,
            dead: false,
            revoked: false,
            steps: 0,
            last: None,
        };
        let mut state = State {
            media: vec![0; length],
            caches: (0..nodes).map(cache).collect(),
            random: seed,
            chances: Chances::default(),
            sites: BTreeSet::new(),
            left_out: None,
        };
        // A third of all seeds has caches that do nothing by themselves: what is missing then is
        // missing for good.
        if !seed.is_multiple_of(3) {
            let of = |state: &mut State, most: usize| 2 + state.below(most) as u64;
            state.chances = Chances {
                evict: of(&mut state, 60),
                complete: of(&mut state, 12),
                prefetch: of(&mut state, 30),
            };
            // Of the rest every other completes nothing before its fence.
            if seed.is_multiple_of(2) {
                state.chances.complete = 0;
            }
        }
        Arc::new(Self {
            state: Mutex::new(state),
            bytes,
            coherent,
            hook: Box::new(hook),
            pause: OnceLock::new(),
        })
    }

    /// What the node with this number sees.
    pub fn node(self: &Arc<Self>, number: usize) -> Node {
        Node { memory: Arc::clone(self), number }
    }

    /// Leaves a call out. What makes it missed is sought there: the lines that it is about are
    /// prefetched, and `pause` is called with the node's number, where others may run.
    pub fn leave_out(&self, left_out: LeftOut, pause: impl Fn(usize) + Send + Sync + 'static) {
        self.state().left_out = Some(left_out);
        let _ = self.pause.set(Box::new(pause));
    }

    /// All calls that were made.
    pub fn sites(&self) -> BTreeSet<Site> {
        self.state().sites.clone()
    }

    /// Forgets the calls that were made so far.
    pub fn forget_sites(&self) {
        self.state().sites.clear();
    }

    /// How many nodes there are.
    pub fn nodes(&self) -> usize {
        self.state().caches.len()
    }

    /// Has a node die `steps` steps from now: its next access then unwinds with [`Killed`].
    pub fn kill_after(&self, node: usize, steps: u64) {
        let cache = &mut self.state().caches[node];
        cache.last = Some(cache.steps + steps);
    }

    /// Steps that a node has made.
    pub fn steps(&self, node: usize) -> u64 {
        self.state().caches[node].steps
    }

    /// Has a node hold all lines that it does not hold, as a processor may that prefetches them.
    pub fn prefetch(&self, node: usize) {
        let mut state = self.state();
        for line in 0..state.caches[node].lines.len() {
            state.fetch(node, line);
        }
    }

    /// Whether a node has died.
    pub fn is_dead(&self, node: usize) -> bool {
        self.state().caches[node].dead
    }

    /// Takes a node's access away, as a device does.
    pub fn revoke(&self, node: usize) {
        self.state().caches[node].revoked = true;
    }

    /// Whether a node's access was taken away.
    pub fn is_revoked(&self, node: usize) -> bool {
        self.state().caches[node].revoked
    }

    /// Gives a node access anew, with an empty cache, as after it started again.
    pub fn revive(&self, node: usize) {
        let cache = &mut self.state().caches[node];
        for line in std::mem::take(&mut cache.held) {
            cache.lines[line].held = Held::No;
        }
        cache.pending.clear();
        cache.late.clear();
        cache.dead = false;
        cache.revoked = false;
        cache.last = None;
    }

    /// Stores into the memory itself, as damage does.
    ///
    /// # Errors
    /// [`MemError::End`].
    pub fn damage(&self, at: u64, bytes: &[u8]) -> Result<(), MemError> {
        inside(at, bytes.len() as u64, self.bytes)?;
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        self.state().media[at..at + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    /// The bytes of the memory itself.
    pub fn media(&self) -> Vec<u8> {
        self.state().media.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A node of a simulated memory.
#[derive(Clone)]
pub struct Node {
    memory: Arc<Simulated>,
    number: usize,
}

impl Node {
    /// A step of the node: others may run, and it may die. `None` if it is dead and unwinds.
    fn step(&self) -> Option<MutexGuard<'_, State>> {
        if std::thread::panicking() {
            return None;
        }
        (self.memory.hook)(self.number);
        let mut state = self.memory.state();
        let cache = &mut state.caches[self.number];
        cache.steps += 1;
        if cache.last.is_some_and(|last| cache.steps >= last) && !cache.dead {
            state.die(self.number);
        }
        if state.caches[self.number].dead {
            drop(state);
            std::panic::resume_unwind(Box::new(Killed));
        }
        Some(state)
    }

    /// Where others may run because of what is left out.
    fn pause(&self) {
        if let Some(pause) = self.memory.pause.get() {
            pause(self.number);
        }
    }

    /// The parts of a range by line: line, offset in it, range of the caller's bytes.
    fn parts(at: u64, length: usize) -> impl Iterator<Item = (usize, usize, std::ops::Range<usize>)> {
        lines(at, length as u64).map(move |line| {
            let begin = line.max(at);
            let end = (line + LINE).min(at + length as u64);
            ((line / LINE) as usize, (begin - line) as usize, (begin - at) as usize..(end - at) as usize)
        })
    }

    fn range(at: u64, length: usize) -> std::ops::Range<usize> {
        at as usize..at as usize + length
    }
}

impl CxlMem for Node {
    fn bytes(&self) -> u64 {
        self.memory.bytes
    }

    fn coherent(&self) -> bool {
        self.memory.coherent
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MemError> {
        inside(at, into.len() as u64, self.memory.bytes)?;
        let Some(mut state) = self.step() else { return Ok(()) };
        if self.memory.coherent {
            if state.caches[self.number].revoked {
                into.fill(0xff);
            } else {
                into.copy_from_slice(&state.media[Self::range(at, into.len())]);
            }
            return Ok(());
        }
        for (line, offset, part) in Self::parts(at, into.len()) {
            state.drain(self.number, line);
            state.fetch(self.number, line);
            let held = &state.caches[self.number].lines[line].bytes;
            into[part.clone()].copy_from_slice(&held[offset..offset + part.len()]);
            state.background(self.number, Some(line));
        }
        Ok(())
    }

    fn store(&self, at: u64, from: &[u8]) -> Result<(), MemError> {
        inside(at, from.len() as u64, self.memory.bytes)?;
        let Some(mut state) = self.step() else { return Ok(()) };
        if self.memory.coherent {
            if !state.caches[self.number].revoked {
                state.media[Self::range(at, from.len())].copy_from_slice(from);
            }
            return Ok(());
        }
        for (line, offset, part) in Self::parts(at, from.len()) {
            state.drain(self.number, line);
            state.fetch(self.number, line);
            let held = &mut state.caches[self.number].lines[line];
            held.held = Held::Dirty;
            held.bytes[offset..offset + part.len()].copy_from_slice(&from[part]);
            state.background(self.number, Some(line));
        }
        Ok(())
    }

    fn ntstore(&self, at: u64, from: &[u8]) -> Result<(), MemError> {
        if self.memory.coherent {
            return self.store(at, from);
        }
        inside(at, from.len() as u64, self.memory.bytes)?;
        let Some(mut state) = self.step() else { return Ok(()) };
        for (line, offset, part) in Self::parts(at, from.len()) {
            // The store evicts the line from the caches, then waits in a buffer.
            state.drop_line(self.number, line);
            state.caches[self.number].pending.push(Pending::Stream(line, offset, from[part].to_vec()));
            state.background(self.number, Some(line));
        }
        Ok(())
    }

    fn flush(&self, at: u64, length: u64) -> Result<(), MemError> {
        inside(at, length, self.memory.bytes)?;
        let Some(mut state) = self.step() else { return Ok(()) };
        for (line, ..) in Self::parts(at, usize::try_from(length).unwrap_or(0)) {
            state.caches[self.number].pending.push(Pending::WriteBack(line));
        }
        state.background(self.number, None);
        Ok(())
    }

    fn invalidate(&self, at: u64, length: u64) -> Result<(), MemError> {
        inside(at, length, self.memory.bytes)?;
        let Some(mut state) = self.step() else { return Ok(()) };
        for (line, ..) in Self::parts(at, usize::try_from(length).unwrap_or(0)) {
            // What is not held need not be dropped.
            if state.caches[self.number].lines[line].held != Held::No {
                state.caches[self.number].pending.push(Pending::Drop(line));
            }
        }
        state.background(self.number, None);
        Ok(())
    }

    fn fence(&self) -> Result<(), MemError> {
        loop {
            let Some(mut state) = self.step() else { return Ok(()) };
            let many = state.caches[self.number].pending.len();
            // Some of what is pending, and then others may run.
            for _ in 0..many.min(1 + state.below(4)) {
                state.complete_one(self.number);
            }
            if many > 0 && !state.caches[self.number].pending.is_empty() {
                continue;
            }
            if state.caches[self.number].late.is_empty() {
                return Ok(());
            }
            drop(state);
            self.pause();
            let Some(mut state) = self.step() else { return Ok(()) };
            let late = std::mem::take(&mut state.caches[self.number].late);
            state.caches[self.number].pending.extend(late);
        }
    }

    fn compare_exchange(&self, at: u64, old: u64, new: u64) -> Result<Option<bool>, MemError> {
        inside(at, 8, self.memory.bytes)?;
        if !self.memory.coherent {
            return Ok(None);
        }
        let Some(mut state) = self.step() else { return Ok(Some(false)) };
        let range = Self::range(at, 8);
        let same = state.media[range.clone()] == old.to_le_bytes() && !state.caches[self.number].revoked;
        if same {
            state.media[range].copy_from_slice(&new.to_le_bytes());
        }
        Ok(Some(same))
    }

    fn wants(&self, site: &'static Location<'static>, call: Call, at: u64, length: u64) -> bool {
        if self.memory.coherent || std::thread::panicking() {
            return true;
        }
        let site = Site { file: site.file(), line: site.line(), call };
        let mut state = self.memory.state();
        state.sites.insert(site);
        let Some(left_out) = state.left_out.filter(|left_out| left_out.site == site) else { return true };
        let Cache { pending, late, sought, hurried, .. } = &mut state.caches[self.number];
        let dropped = pending.iter().filter_map(|pending| match pending {
            Pending::Drop(line) => Some(*line),
            _ => None,
        });
        let of_range = lines(at, length).map(|line| (line / LINE) as usize);
        match call {
            Call::Invalidate => sought.extend(of_range.take(SOUGHT)),
            Call::InvalidateFence => sought.extend(dropped),
            Call::Flush | Call::Fence => {}
        }
        if matches!(call, Call::Fence | Call::InvalidateFence) {
            late.append(pending);
        }
        if matches!(call, Call::Flush | Call::Fence) {
            *hurried = HURRIED;
        }
        while sought.len() > SOUGHT {
            sought.pop_first();
        }
        drop(state);
        self.pause();
        left_out.is_control
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two(seed: u64) -> (Node, Node) {
        let memory = Simulated::new(4096, 2, false, seed, |_| ());
        (memory.node(0), memory.node(1))
    }

    #[test]
    fn a_store_reaches_another_by_flush_and_invalidation_alone() {
        // Seed 0: nothing happens by itself.
        let (one, other) = two(0);
        let read = || {
            let mut byte = [0];
            other.load(5, &mut byte).unwrap();
            byte[0]
        };
        assert_eq!(read(), 0);
        one.store(5, &[7]).unwrap();
        other.invalidate(0, 64).unwrap();
        other.fence().unwrap();
        assert_eq!(read(), 0, "not flushed");
        one.flush(5, 1).unwrap();
        one.fence().unwrap();
        assert_eq!(read(), 0, "not invalidated");
        other.invalidate(0, 64).unwrap();
        other.fence().unwrap();
        assert_eq!(read(), 7);
        one.ntstore(5, &[8]).unwrap();
        other.invalidate(0, 64).unwrap();
        other.fence().unwrap();
        assert_eq!(read(), 7, "no fence");
        one.fence().unwrap();
        other.invalidate(0, 64).unwrap();
        other.fence().unwrap();
        assert_eq!(read(), 8);
    }

    #[test]
    fn a_line_is_written_back_whole() {
        let (one, other) = two(0);
        one.store(0, &[1]).unwrap();
        other.store(1, &[2]).unwrap();
        for node in [&one, &other] {
            node.flush(0, 64).unwrap();
            node.fence().unwrap();
        }
        assert_eq!(one.memory.media()[..2], [0, 2], "two writers of a line lose a store");
    }

    #[test]
    fn what_happens_by_itself_does() {
        let (mut early, mut stale) = (0, 0);
        for seed in 0..300 {
            let (one, other) = two(seed);
            one.store(0, &[1; 64]).unwrap();
            for at in 1..20 {
                one.load(at * 64, &mut [0]).unwrap();
            }
            early += u32::from(one.memory.media()[0] == 1);
            other.load(640, &mut [0]).unwrap();
            one.ntstore(704, &[9]).unwrap();
            one.fence().unwrap();
            let mut byte = [0];
            other.load(704, &mut byte).unwrap();
            stale += u32::from(byte[0] == 0);
        }
        assert!(early > 20, "{early} evictions");
        assert!(stale > 5, "{stale} prefetches");
    }

    #[test]
    fn a_revoked_node_reaches_nobody_and_the_dead_unwind() {
        let (one, other) = two(0);
        one.memory.revoke(0);
        one.ntstore(0, &[1]).unwrap();
        one.fence().unwrap();
        let mut bytes = [0; 2];
        one.load(128, &mut bytes).unwrap();
        assert_eq!(bytes, [0xff; 2]);
        assert_eq!(one.memory.media()[0], 0);
        one.memory.kill_after(1, 2);
        let died = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..3 {
                let _ = other.load(0, &mut [0]);
            }
        }));
        assert!(died.unwrap_err().is::<Killed>());
        assert!(one.memory.is_dead(1));
    }
}
