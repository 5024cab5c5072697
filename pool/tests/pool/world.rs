//! Nodes of a simulated memory, each a coroutine: a seed says who runs when, who dies and who is
//! stopped. Time goes on only while nodes wait.

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use generator::{Generator, Gn};
use lamina_pool::mem::{Call, CxlMem, Killed, LeftOut, Simulated};
use lamina_pool::{Class, Geometry, Host, Pool, PoolError};

/// Words of a coroutine's stack.
const STACK: usize = 0x6000;
/// Steps of all nodes after which a run does not end, unless it is one that may wait long.
const MAX_STEPS: u64 = 500_000;

pub(crate) struct World {
    pub(crate) memory: Arc<Simulated>,
    pub(crate) clock: Arc<AtomicU64>,
    steps: Arc<AtomicU64>,
    frozen: Arc<AtomicBool>,
    random: AtomicU64,
    timeout: u64,
    /// Steps after which a run does not end.
    pub(crate) max_steps: u64,
    /// How long a wait may take, if not long.
    pub(crate) max_wait: u64,
    /// Once in so many turns a node prefetches all; never if zero.
    prefetches: AtomicU64,
    declared: Declared,
}

/// What the device was told last of each range, by where it begins.
type Declared = Arc<Mutex<BTreeMap<u64, String>>>;

/// Lets other nodes run.
#[allow(deprecated, reason = "it is called from inside what is tested, which has no scope at hand")]
pub(crate) fn let_others() {
    if generator::is_generator() {
        generator::yield_with(());
    }
}

/// What a node does.
pub(crate) type Work<'w> = Box<dyn FnOnce() + Send + 'w>;

fn coroutine<'w>(work: impl FnOnce() + Send + 'w) -> Generator<'w, (), ()> {
    Gn::<()>::new_opt(STACK, work)
}

/// The machine of a node.
struct Machine {
    memory: Arc<Simulated>,
    clock: Arc<AtomicU64>,
    node: usize,
    timeout: u64,
    max_wait: u64,
    declared: Declared,
}

fn mixed(state: u64) -> u64 {
    let state = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ state >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ state >> 31
}

impl Host for Machine {
    fn now(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    fn relax(&self, _: u32) {
        self.clock.fetch_add(1, Ordering::Relaxed);
        let_others();
    }

    fn timeout(&self) -> u64 {
        self.timeout
    }

    fn max_wait(&self) -> u64 {
        self.max_wait
    }

    fn declare(&self, range: Range<u64>, class: Option<&Class>) -> Result<(), PoolError> {
        let class = class.map(ToString::to_string).unwrap_or_default();
        if class.contains("unknown") {
            return Err(PoolError::Declare(class));
        }
        // The device does it at one moment, and others run before and after.
        let_others();
        if !range.is_empty() && !self.memory.is_dead(self.node) {
            self.declared.lock().unwrap().insert(range.start, class);
        }
        let_others();
        Ok(())
    }

    fn is_gone(&self, _: u32, _: u32) -> bool {
        false
    }

    fn revoke(&self, node: u32, _: u32) -> bool {
        // The device does one after the other, and nothing for whom it revoked.
        if self.memory.is_revoked(self.node) {
            return false;
        }
        self.memory.revoke(node as usize);
        true
    }
}

pub(crate) fn geometry() -> Geometry {
    Geometry { nodes: 4, stripes: 3, groups: 4, chunks: 8, chunk_bytes: 4096 }
}

impl World {
    pub(crate) fn new(seed: u64, coherent: bool, geometry: &Geometry) -> Self {
        let steps = Arc::new(AtomicU64::new(0));
        let frozen = Arc::new(AtomicBool::new(false));
        let (counted, still) = (Arc::clone(&steps), Arc::clone(&frozen));
        let hook = move |_: usize| {
            let step = counted.fetch_add(1, Ordering::Relaxed);
            if !still.load(Ordering::Relaxed)
                && mixed(seed ^ step.wrapping_mul(0x9e37_79b9_7f4a_7c15)).is_multiple_of(5)
            {
                let_others();
            }
        };
        let bytes = geometry.bytes().unwrap();
        let memory = Simulated::new(bytes, geometry.nodes as usize, coherent, seed, hook);
        Pool::create(Arc::new(memory.node(0)), geometry).unwrap();
        memory.revive(0);
        memory.forget_sites();
        Self {
            memory,
            clock: Arc::new(AtomicU64::new(0)),
            steps,
            frozen,
            random: AtomicU64::new(seed.wrapping_mul(0xd134_2543_de82_ef95) | 1),
            timeout: 400,
            max_steps: MAX_STEPS,
            max_wait: 400 * 60,
            prefetches: AtomicU64::new(0),
            declared: Declared::default(),
        }
    }

    pub(crate) fn below(&self, bound: u64) -> u64 {
        let next = self.random.load(Ordering::Relaxed).wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.random.store(next, Ordering::Relaxed);
        mixed(next) % bound
    }

    pub(crate) fn attach(&self, node: u32) -> Result<Pool, PoolError> {
        self.attach_as(node as usize, node)
    }

    /// Attaches as `node` from another machine than that number's own.
    pub(crate) fn attach_as(&self, machine: usize, node: u32) -> Result<Pool, PoolError> {
        self.attach_to(Arc::new(self.memory.node(machine)), machine, node)
    }

    /// Attaches to a memory that is not quite the machine's.
    pub(crate) fn attach_to(
        &self,
        memory: Arc<dyn CxlMem>,
        machine: usize,
        node: u32,
    ) -> Result<Pool, PoolError> {
        let host = Machine {
            memory: Arc::clone(&self.memory),
            clock: Arc::clone(&self.clock),
            node: machine,
            timeout: self.timeout,
            max_wait: self.max_wait,
            declared: Arc::clone(&self.declared),
        };
        Pool::attach(memory, Arc::new(host), node)
    }

    /// Leaves a call out. At times the node stops there, or dies soon after it if it `may_die`.
    pub(crate) fn leave_out(&self, left_out: Option<LeftOut>, may_die: bool) {
        let Some(left_out) = left_out else { return };
        // What is held from long ago shows what is not dropped.
        if matches!(left_out.site.call, Call::Invalidate | Call::InvalidateFence) && self.below(3) == 0 {
            self.prefetches.store(40, Ordering::Relaxed);
        }
        let (memory, clock) = (Arc::downgrade(&self.memory), Arc::clone(&self.clock));
        let random = AtomicU64::new(self.below(u64::MAX));
        let (next_stop, killed) = (AtomicU64::new(0), AtomicBool::new(false));
        let timeout = self.timeout;
        self.memory.leave_out(left_out, move |node| {
            let chance = mixed(random.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed));
            if !generator::is_generator() || !chance.is_multiple_of(3) {
                return;
            }
            let Some(memory) = memory.upgrade() else { return };
            if may_die && chance >> 8 & 1 == 0 {
                if !killed.swap(true, Ordering::Relaxed) {
                    memory.kill_after(node, 1 + (chance >> 16) % 8);
                }
            } else if clock.load(Ordering::Relaxed) >= next_stop.load(Ordering::Relaxed) {
                // Not for so long, nor so often, that it is taken for dead.
                let began = clock.load(Ordering::Relaxed);
                next_stop.store(began + timeout / 2, Ordering::Relaxed);
                let mut turns = (chance >> 16) % 300;
                while turns > 0 && clock.load(Ordering::Relaxed) < began + timeout / 8 {
                    turns -= 1;
                    let_others();
                }
            }
        });
    }

    /// What the device was told last of the range that begins there: at first, what all is.
    pub(crate) fn declared(&self, at: u64) -> String {
        self.declared.lock().unwrap().get(&at).cloned().unwrap_or_default()
    }

    /// Whether a run did not end and is given up: who touches no memory has to look.
    pub(crate) fn is_over(&self) -> bool {
        self.frozen.load(Ordering::Relaxed)
    }

    pub(crate) fn now(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// Runs a node's work for each node, until all ended or died. A node that is stopped goes on
    /// when it is chosen again, `stops` steps later. Whether all came to an end.
    pub(crate) fn run<'w>(&'w self, works: Vec<Work<'w>>, stops: bool) -> bool {
        let mut running: Vec<_> = works
            .into_iter()
            .map(|work| {
                let work = move || {
                    if let Err(why) = catch_unwind(AssertUnwindSafe(work))
                        && !why.is::<Killed>()
                    {
                        resume_unwind(why);
                    }
                };
                (coroutine(work), 0_u64)
            })
            .collect();
        let end = self.now() + self.max_steps;
        let mut turns = 0_u64;
        while !running.is_empty() {
            turns += 1;
            if self.now() > end || turns > self.max_steps {
                // Their stacks are unwound: nothing of theirs may go on.
                self.frozen.store(true, Ordering::Relaxed);
                while !running.is_empty() {
                    // Each time: one of them may start a node again.
                    for node in 0..self.memory.nodes() {
                        self.memory.kill_after(node, 0);
                    }
                    for (work, _) in &mut running {
                        work.resume();
                    }
                    running.retain(|(work, _)| !work.is_done());
                }
                self.frozen.store(false, Ordering::Relaxed);
                return false;
            }
            let prefetches = self.prefetches.load(Ordering::Relaxed);
            if prefetches > 0 && self.below(prefetches) == 0 {
                self.memory.prefetch(self.below(self.memory.nodes() as u64) as usize);
            }
            let which = self.below(running.len() as u64) as usize;
            let (work, stopped_until) = &mut running[which];
            if *stopped_until > turns {
                if self.below(8) == 0 {
                    self.clock.fetch_add(1, Ordering::Relaxed);
                }
                continue;
            }
            if stops && self.below(4000) == 0 {
                *stopped_until = turns + self.below(20_000);
                continue;
            }
            work.resume();
            if work.is_done() {
                drop(running.swap_remove(which));
            }
        }
        true
    }
}
