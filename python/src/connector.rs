//! A pool behind a queue, as `LMCache` wants its native plug-ins: what is submitted is done by
//! threads that know nothing of Python, and told by a descriptor that polls readable.

use std::{
    collections::VecDeque,
    os::fd::AsRawFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
};

use lamina_pool::{Class, Pool as Shared, PoolError, Reservation};
use nix::sys::eventfd::{EfdFlags, EventFd};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{
    buffer::Bytes,
    pool::{Attached, LaminaError, Pool, Refused, Said, append, class_of, scatter},
};

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    Set,
    Get,
    Exists,
    Delete,
}

/// What was submitted together, and is told together.
struct Batch {
    id: u64,
    work: Work,
    keys: Vec<String>,
    /// Python's, one a key if there are any. They are given back by the thread that drains, which
    /// may; all others only read the list, and have let go of it before they say that they are
    /// done.
    buffers: RwLock<Vec<Bytes>>,
    results: Mutex<Vec<bool>>,
    /// Of the first key that failed.
    error: Mutex<Option<String>>,
    left: AtomicUsize,
}

impl Batch {
    /// Does the work of one key: whether it was there, or is.
    fn one(&self, pool: &Shared, class: Option<&Class>, index: usize) -> Result<bool, Refused> {
        let (key, buffers) = (&self.keys[index], self.buffers.read().unwrap_or_else(PoisonError::into_inner));
        match self.work {
            Work::Set => {
                let memory = buffers[index].memory();
                // What another stored under the key is as good.
                let fill = |reservation: &mut Reservation<'_>| append(reservation, &[memory]);
                pool.of(class)?.keep_from(key, memory.len() as u64, fill)?;
                Ok(true)
            }
            Work::Get => match pool.hold_named(key)? {
                Some(held) => scatter(&held, &[buffers[index].memory()]).map(|()| true),
                None => Ok(false),
            },
            Work::Exists => Ok(pool.hold_named(key)?.is_some()),
            Work::Delete => Ok(pool.delete(key)?),
        }
    }

    fn run(&self, attached: &Attached, class: Option<&Class>, index: usize) {
        // For a batch that lost a key to a panic LMCache would wait for ever. The batch itself is
        // whole after one: its results are written only here.
        let done = catch_unwind(AssertUnwindSafe(|| {
            attached.pool().and_then(|pool| self.one(&pool, class, index)).map_err(|why| why.to_string())
        }));
        match done.unwrap_or_else(|_| Err("the work on it panicked".into())) {
            Ok(found) => locked(&self.results)[index] = found,
            Err(why) => {
                locked(&self.error).get_or_insert_with(|| format!("{}: {why}", self.keys[index]));
            }
        }
    }
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<(Arc<Batch>, usize)>,
    closed: bool,
}

struct Inner {
    attached: Arc<Attached>,
    /// Of what is stored, if it is not the pool's own.
    class: Option<Class>,
    queue: Mutex<Queue>,
    wake: Condvar,
    done: Mutex<Vec<Arc<Batch>>>,
    event: EventFd,
}

impl Inner {
    fn tell(&self, batch: Arc<Batch>) {
        locked(&self.done).push(batch);
        // It fails only when it counts to 2^64: then it polls readable already.
        let _ = self.event.write(1);
    }

    /// A thread's work, until the queue is closed and empty.
    fn work(&self) {
        let mut queue = locked(&self.queue);
        loop {
            if let Some((batch, index)) = queue.waiting.pop_front() {
                drop(queue);
                batch.run(&self.attached, self.class.as_ref(), index);
                if batch.left.fetch_sub(1, Ordering::AcqRel) == 1 {
                    self.tell(batch);
                }
                queue = locked(&self.queue);
            } else if queue.closed {
                return;
            } else {
                queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

/// A completion as `LMCache` takes it: which, whether all went well, what did not, and each key's
/// result.
type Completion = (u64, bool, String, Option<Vec<bool>>);

/// A pool behind a queue.
#[pyclass(frozen, module = "lamina._lamina")]
pub(crate) struct Connector {
    inner: Arc<Inner>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    next: AtomicU64,
}

impl Connector {
    fn submit(&self, work: Work, keys: Vec<String>, buffers: Vec<Bytes>) -> PyResult<u64> {
        if matches!(work, Work::Set | Work::Get) && keys.len() != buffers.len() {
            return Err(PyValueError::new_err(format!("{} keys and {} buffers", keys.len(), buffers.len())));
        }
        // In another process than the threads' nothing would ever be done, and one of them may have
        // had the queue's lock when that was forked.
        self.inner.attached.here()?;
        let (id, count) = (self.next.fetch_add(1, Ordering::Relaxed), keys.len());
        let batch = Arc::new(Batch {
            id,
            work,
            keys,
            buffers: RwLock::new(buffers),
            results: Mutex::new(vec![false; count]),
            error: Mutex::new(None),
            left: AtomicUsize::new(count),
        });
        let mut queue = locked(&self.inner.queue);
        if queue.closed {
            return Err(LaminaError::new_err("the connector was closed"));
        }
        if count == 0 {
            drop(queue);
            self.inner.tell(batch);
            return Ok(id);
        }
        queue.waiting.extend((0..count).map(|index| (Arc::clone(&batch), index)));
        drop(queue);
        self.inner.wake.notify_all();
        Ok(id)
    }

    /// Ends the threads, once all that was submitted is done, and leaves the pool.
    fn end(&self) -> Result<(), PoolError> {
        // A process that was forked has none of them.
        if !self.inner.attached.is_here() {
            return Ok(());
        }
        // Held to the end: another who closes would find no threads, and leave the pool under them.
        let mut threads = locked(&self.threads);
        locked(&self.inner.queue).closed = true;
        self.inner.wake.notify_all();
        for thread in threads.drain(..) {
            // One that panicked has no more work.
            let _ = thread.join();
        }
        self.inner.attached.leave()
    }
}

#[pymethods]
impl Connector {
    /// A queue in front of a pool, with so many threads behind it. What is stored is of `class`.
    #[new]
    #[pyo3(signature = (pool, threads, class=None))]
    fn new(pool: &Pool, threads: usize, class: Option<Said>) -> PyResult<Self> {
        if !(1..=64).contains(&threads) {
            return Err(PyValueError::new_err(format!("{threads} threads: it has 1 to 64")));
        }
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let event = event.map_err(|why| LaminaError::new_err(format!("no descriptor of events: {why}")))?;
        let inner = Arc::new(Inner {
            attached: Arc::clone(&pool.attached),
            class: class_of(class)?,
            queue: Mutex::default(),
            wake: Condvar::new(),
            done: Mutex::default(),
            event,
        });
        let start = |number: usize| {
            let inner = Arc::clone(&inner);
            std::thread::Builder::new().name(format!("lamina-pool-{number}")).spawn(move || inner.work())
        };
        let threads = (0..threads).map(start).collect::<Result<Vec<_>, _>>()?;
        Ok(Self { inner, threads: Mutex::new(threads), next: AtomicU64::new(1) })
    }

    /// A descriptor that polls readable once something is done that was not drained.
    fn event_fd(&self) -> i32 {
        self.inner.event.as_raw_fd()
    }

    /// Stores a value a key. A key that is there stays.
    fn submit_batch_set(&self, keys: Vec<String>, buffers: Vec<Bound<'_, PyAny>>) -> PyResult<u64> {
        let buffers = buffers.iter().map(Bytes::of).collect::<PyResult<_>>()?;
        self.submit(Work::Set, keys, buffers)
    }

    /// Reads each key's value into its buffer, which is as long.
    fn submit_batch_get(&self, keys: Vec<String>, buffers: Vec<Bound<'_, PyAny>>) -> PyResult<u64> {
        let buffers = buffers.iter().map(Bytes::writable).collect::<PyResult<_>>()?;
        self.submit(Work::Get, keys, buffers)
    }

    /// Asks which keys are there.
    fn submit_batch_exists(&self, keys: Vec<String>) -> PyResult<u64> {
        self.submit(Work::Exists, keys, Vec::new())
    }

    /// Removes keys.
    fn submit_batch_delete(&self, keys: Vec<String>) -> PyResult<u64> {
        self.submit(Work::Delete, keys, Vec::new())
    }

    /// What was done since the last call, and gives the buffers back.
    fn drain_completions(&self) -> Vec<Completion> {
        // First the descriptor: what is done after it makes it readable again. Without anything to
        // read it says so, which is no fault.
        let _ = self.inner.event.read();
        let done = std::mem::take(&mut *locked(&self.inner.done));
        done.into_iter()
            .map(|batch| {
                batch.buffers.write().unwrap_or_else(PoisonError::into_inner).clear();
                let error = locked(&batch.error).take();
                let results = std::mem::take(&mut *locked(&batch.results));
                let results = (batch.work != Work::Set).then_some(results);
                (batch.id, error.is_none(), error.unwrap_or_default(), results)
            })
            .collect()
    }

    /// Ends what was submitted, then leaves the pool.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        Ok(py.detach(|| self.end()).map_err(Refused::from)?)
    }
}

impl Drop for Connector {
    fn drop(&mut self) {
        // The threads want nothing of Python, but may wait for a thread that does. While Python
        // shuts down its lock is not given up: then none of its threads runs. In a process that was
        // forked there is nothing to wait for.
        if self.inner.attached.is_here() {
            let ended = Python::try_attach(|py| py.detach(|| self.end()));
            let _ = ended.unwrap_or_else(|| self.end());
        } else {
            // Without the lock: one that closes may have had it when this was forked.
            std::mem::forget(std::mem::take(self.threads.get_mut().unwrap_or_else(PoisonError::into_inner)));
        }
    }
}
