//! A pool that processes share: its objects and blocks from and into Python's buffers.

use std::{
    fmt,
    ops::Deref,
    path::PathBuf,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use lamina_pool::{Chain, Class, Geometry, Held, Key, PoolError, Report, Reservation, Service, local};
use pyo3::{exceptions::PyValueError, prelude::*, types::PyBytes};

use crate::buffer::{Bytes, Memory};

pyo3::import_exception!(lamina._control, LaminaError);
pyo3::import_exception!(lamina.pool, PoolFull);

/// Bytes that are copied and checked at a time: they stay in the nearest cache.
const PIECE: usize = 16 << 10;
/// There is no pool any more.
const CLOSED: Refused = Refused::Closed("the pool was closed: open it again");
/// How long [`Attached::leave`] and [`Attached::rest`] wait for what other threads are at. For the
/// thread that does the node's duty they wait until it ends its turn.
const LEAVING: Duration = Duration::from_secs(10);

/// Why a pool did not do something.
#[derive(Debug)]
pub(crate) enum Refused {
    /// It was left, or is another process's.
    Closed(&'static str),
    /// What is read and where it is to go are not of one length.
    Length { stored: u64, buffer: u64 },
    /// The pool's own.
    Pool(PoolError),
}

impl From<PoolError> for Refused {
    fn from(why: PoolError) -> Self {
        Self::Pool(why)
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed(why) => to.write_str(why),
            Self::Length { stored, buffer } => {
                write!(to, "{stored} bytes are stored, and the buffer has {buffer}")
            }
            Self::Pool(why) => why.fmt(to),
        }
    }
}

impl From<Refused> for PyErr {
    /// What the caller can mend is a `ValueError`.
    fn from(why: Refused) -> Self {
        let text = why.to_string();
        match why {
            Refused::Length { .. }
            | Refused::Pool(PoolError::NoName | PoolError::TooLong { .. } | PoolError::Geometry(_)) => {
                PyValueError::new_err(text)
            }
            Refused::Pool(PoolError::Full { .. } | PoolError::NoSlot) => PoolFull::new_err(text),
            _ => LaminaError::new_err(text),
        }
    }
}

/// A pool that this process is a node of, until it leaves.
///
/// Its methods wait for other threads, which may want Python's lock to end what they are at: so
/// who has that lock gives it up first.
pub(crate) struct Attached {
    node: RwLock<Option<Node>>,
    process: u32,
    /// Forks under way: until they are done no thread begins anything.
    forks: AtomicUsize,
    /// What threads are at. A fork has none of them, but would have for ever what they had of the
    /// pool, with the lock that says that this process lives.
    inside: AtomicUsize,
}

/// Something a thread is at, which a fork waits for.
struct Inside<'a>(&'a AtomicUsize);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The pool, for one operation.
pub(crate) struct Using<'a> {
    pool: Arc<lamina_pool::Pool>,
    // Behind the pool: it ends last.
    _inside: Inside<'a>,
}

impl Deref for Using<'_> {
    type Target = lamina_pool::Pool;

    fn deref(&self) -> &Self::Target {
        &self.pool
    }
}

/// A node of a pool, and the thread that does its duty.
struct Node {
    pool: Arc<lamina_pool::Pool>,
    service: Option<Service>,
}

impl Node {
    fn new(pool: lamina_pool::Pool) -> Self {
        let mut node = Self { pool: Arc::new(pool), service: None };
        node.serve();
        node
    }

    fn serve(&mut self) {
        self.service.get_or_insert_with(|| Service::start(Arc::clone(&self.pool)));
    }

    /// Ends the thread, and says what ended it before.
    fn rest(&mut self) -> Result<(), PoolError> {
        self.service.take().map_or(Ok(()), Service::stop)
    }
}

impl Attached {
    fn new(pool: lamina_pool::Pool) -> Self {
        Self {
            node: RwLock::new(Some(Node::new(pool))),
            process: std::process::id(),
            forks: AtomicUsize::new(0),
            inside: AtomicUsize::new(0),
        }
    }

    /// Whether this is the process that is attached, and no fork of it.
    pub(crate) fn is_here(&self) -> bool {
        std::process::id() == self.process
    }

    /// Refuses in a fork of the process that is attached, without waiting for anything.
    ///
    /// # Errors
    /// [`Refused::Closed`].
    pub(crate) fn here(&self) -> Result<(), Refused> {
        if self.is_here() {
            return Ok(());
        }
        Err(Refused::Closed("the pool was opened before this process was forked: open it again"))
    }

    /// Begins something, once no fork is under way.
    fn enter(&self) -> Inside<'_> {
        loop {
            // It counts before it looks, and a fork says so before it counts: one sees the other.
            self.inside.fetch_add(1, Ordering::SeqCst);
            let inside = Inside(&self.inside);
            if self.forks.load(Ordering::SeqCst) == 0 {
                return inside;
            }
            drop(inside);
            while self.forks.load(Ordering::SeqCst) > 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// The pool, for one operation.
    ///
    /// # Errors
    /// [`Refused::Closed`].
    pub(crate) fn pool(&self) -> Result<Using<'_>, Refused> {
        self.here()?;
        let inside = self.enter();
        let node = self.node.read().unwrap_or_else(PoisonError::into_inner);
        let pool = node.as_ref().map(|node| Arc::clone(&node.pool)).ok_or(CLOSED)?;
        Ok(Using { pool, _inside: inside })
    }

    /// Verifies the pool. Until that is done no thread of this process does anything with it.
    fn check(&self, repair: bool) -> Result<Report, Refused> {
        self.here()?;
        let _inside = self.enter();
        let mut node = self.node.write().unwrap_or_else(PoisonError::into_inner);
        let Some(node) = node.as_mut() else { return Err(CLOSED) };
        let served = node.rest();
        // What others began they end. None begins anew, or this would never come to its turn.
        while Arc::get_mut(&mut node.pool).is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let checked = served.and_then(|()| node.pool.check(repair));
        node.serve();
        Ok(checked?)
    }

    /// Leaves the pool, once no thread is at anything. The second time it does nothing.
    pub(crate) fn leave(&self) -> Result<(), PoolError> {
        if !self.is_here() {
            return Ok(());
        }
        let _inside = self.enter();
        self.leave_now()
    }

    fn leave_now(&self) -> Result<(), PoolError> {
        let taken = self.node.write().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut node) = taken else { return Ok(()) };
        let (served, mut pool, began) = (node.rest(), node.pool, Instant::now());
        loop {
            match Arc::try_unwrap(pool) {
                Ok(pool) => return pool.leave().and(served),
                Err(shared) if began.elapsed() < LEAVING => pool = shared,
                // Others find this node gone when the last thread ends what it is at.
                Err(_) => return Err(PoolError::Timeout("what other threads do with the pool")),
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends the thread that does the node's duty and waits for what others are at, so that a fork
    /// has nothing of them. Until [`Self::resume`] none begins anything.
    fn rest(&self) {
        self.forks.fetch_add(1, Ordering::SeqCst);
        let began = Instant::now();
        // After that the fork is made nevertheless: the program wants it.
        while self.inside.load(Ordering::SeqCst) > 0 && began.elapsed() < LEAVING {
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Some(node) = self.node.write().unwrap_or_else(PoisonError::into_inner).as_mut() {
            // What ended it before ends it again when it is resumed, and is told by `check` and by
            // who leaves. Of a node that was fenced all else tells, too.
            let _ = node.rest();
        }
    }

    /// Has the duty done again, after the last of the forks under way.
    fn resume(&self) {
        let mut node = self.node.write().unwrap_or_else(PoisonError::into_inner);
        // One that did not rest has nothing to resume.
        let before =
            self.forks.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |forks| forks.checked_sub(1));
        if let (Ok(1), Some(node)) = (before, node.as_mut()) {
            node.serve();
        }
    }

    /// Lets go of a pool that the process has by a fork: it is no node here, and the parent's death
    /// is noticed. Stores nothing.
    fn forked(&self) {
        // Of another thread that had it there is nothing left: then it stays mapped.
        let taken = self.node.try_write().ok().and_then(|mut node| node.take());
        if let Some(Node { pool, service }) = taken {
            // The thread of one that did not rest is not here: whoever waits for its end finds that
            // it has not said what came of it.
            std::mem::forget(service);
            drop(pool);
        }
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        if self.is_here() {
            // Nobody has it, so there is no fork to wait for. If it fails, others find this node
            // gone.
            let _ = self.leave_now();
        } else {
            self.forked();
        }
    }
}

/// Appends what buffers hold.
pub(crate) fn append(reservation: &mut Reservation<'_>, pieces: &[Memory<'_>]) -> Result<(), PoolError> {
    let mut part = vec![0; PIECE];
    for piece in pieces {
        for at in (0..piece.len()).step_by(PIECE) {
            let part = &mut part[..PIECE.min(piece.len() - at)];
            piece.read(at, part);
            reservation.append(part)?;
        }
    }
    Ok(())
}

/// Reads what is held into buffers, which together are as long.
pub(crate) fn scatter(held: &Held<'_>, pieces: &[Memory<'_>]) -> Result<(), Refused> {
    let (stored, buffer) = (held.bytes(), total(pieces));
    if stored != buffer {
        return Err(Refused::Length { stored, buffer });
    }
    let mut pieces = pieces.iter();
    let (mut piece, mut at) = (pieces.next(), 0);
    held.read(|mut part| {
        while let Some(into) = piece {
            let count = part.len().min(into.len() - at);
            into.write(at, &part[..count]);
            (part, at) = (&part[count..], at + count);
            if at < into.len() {
                break;
            }
            (piece, at) = (pieces.next(), 0);
        }
    })?;
    Ok(())
}

fn total(pieces: &[Memory<'_>]) -> u64 {
    pieces.iter().map(|piece| piece.len() as u64).sum()
}

fn key_of(key: &[u8]) -> PyResult<Key> {
    let key = key
        .try_into()
        .map_err(|_| PyValueError::new_err(format!("a key has 16 bytes, and this has {}", key.len())))?;
    Ok(Key(key))
}

/// A class, as Python says it: a format, and perhaps channels and window.
pub(crate) type Said = (String, Option<(u32, u32)>);

pub(crate) fn class_of(said: Option<Said>) -> PyResult<Option<Class>> {
    let Some((format, kv)) = said else { return Ok(None) };
    let kv = kv.map(|(channels, window)| format!("{channels},{window}"));
    Ok(Some(Class::new(&format, kv.as_deref()).map_err(Refused::from)?))
}

/// A node of a pool.
#[pyclass(frozen, module = "lamina._lamina")]
pub(crate) struct Pool {
    pub(crate) attached: Arc<Attached>,
}

impl Pool {
    /// Does something with the pool while other threads of Python run.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&lamina_pool::Pool) -> Result<T, Refused> + Send,
    ) -> PyResult<T> {
        Ok(py.detach(move || work(&*self.attached.pool()?))?)
    }

    /// What `find` holds, as `bytes`.
    fn bytes<'py>(
        &self,
        py: Python<'py>,
        find: impl FnOnce(&lamina_pool::Pool) -> Result<Option<Held<'_>>, PoolError> + Send,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let pool = py.detach(|| self.attached.pool())?;
        let Some(held) = py.detach(|| find(&pool)).map_err(Refused::from)? else { return Ok(None) };
        let length = usize::try_from(held.bytes()).map_err(|why| LaminaError::new_err(why.to_string()))?;
        let bytes = PyBytes::new_with(py, length, |into| {
            let mut at = 0;
            let copy = |part: &[u8]| {
                into[at..at + part.len()].copy_from_slice(part);
                at += part.len();
            };
            Ok(py.detach(|| held.read(copy)).map_err(Refused::from)?)
        });
        bytes.map(Some)
    }
}

#[pymethods]
impl Pool {
    /// Attaches to the pool in a file.
    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let pool = py.detach(|| lamina_pool::Pool::open(&path)).map_err(Refused::from)?;
        Ok(Self { attached: Arc::new(Attached::new(pool)) })
    }

    /// Makes a pool in a file and attaches to it; with `or_open` only if there is none, and with
    /// `force` whatever the file holds. `declare` is called with the bytes of the file in which
    /// objects will be.
    #[staticmethod]
    #[pyo3(signature = (path, size, nodes, declare=None, *, or_open=false, force=false))]
    fn create(
        py: Python<'_>,
        path: PathBuf,
        size: u64,
        nodes: u32,
        declare: Option<Py<PyAny>>,
        or_open: bool,
        force: bool,
    ) -> PyResult<Self> {
        let (mut refused, mut raised) = (None, None);
        let (refusal, raising) = (&mut refused, &mut raised);
        // What a handler of Python's raises ends the wait.
        let signalled = || {
            Python::attach(|py| {
                py.check_signals().map_err(|why| {
                    *raising = Some(why);
                    std::io::ErrorKind::Interrupted.into()
                })
            })
        };
        let declare = |data: std::ops::Range<u64>| {
            let Some(declare) = declare else { return Ok(()) };
            Python::attach(|py| declare.call1(py, (data.start, data.end))).map(|_| ()).map_err(|why| {
                let text = why.to_string();
                *refusal = Some(why);
                PoolError::Declare(text)
            })
        };
        let made = py.detach(move || {
            let length = local::length_of(&path, size)?;
            let geometry = Geometry::fitting_for(length, nodes);
            let check_length = || match geometry.bytes()? {
                least if least > length => {
                    let why = format!("{length} bytes: for {nodes} nodes it has {least} at least");
                    Err(PoolError::Geometry(why))
                }
                _ => Ok(()),
            };
            let fail = |cause| PoolError::File { path: path.clone(), cause };
            let holds_something = || local::holds_something(&path).map_err(fail);
            if or_open {
                // A pool that is there has a geometry of its own.
                if !holds_something()? {
                    check_length()?;
                }
                return local::open_or_create_while(&path, &geometry, declare, signalled)
                    .map(|(pool, _)| pool);
            }
            local::check_holds_no_other(&path)?;
            if !force && holds_something()? {
                let cause = std::io::Error::other("it may hold what somebody wants; force=True has it lost");
                return Err(fail(cause));
            }
            check_length()?;
            local::create_declared(&path, &geometry, declare)?;
            lamina_pool::Pool::open(&path)
        });
        match made {
            Ok(pool) => Ok(Self { attached: Arc::new(Attached::new(pool)) }),
            Err(why) => Err(raised.or(refused).unwrap_or_else(|| Refused::from(why).into())),
        }
    }

    /// This node's number.
    #[getter]
    fn node(&self, py: Python<'_>) -> PyResult<u32> {
        self.with(py, |pool| Ok(pool.node()))
    }

    /// Has the pool know a class, if the device does.
    #[pyo3(signature = (class))]
    fn know(&self, py: Python<'_>, class: Said) -> PyResult<()> {
        let class = class_of(Some(class))?;
        self.with(py, |pool| Ok(pool.of(class.as_ref()).map(|_| ())?))
    }

    /// Stores an object, in place of one of that name.
    #[pyo3(signature = (name, data, class=None))]
    fn put(&self, py: Python<'_>, name: &str, data: &Bound<'_, PyAny>, class: Option<Said>) -> PyResult<()> {
        let class = class_of(class)?;
        let data = Bytes::of(data)?;
        let memory = data.memory();
        self.with(py, |pool| {
            let classed = pool.of(class.as_ref())?;
            Ok(classed.put_from(name, memory.len() as u64, |reservation| append(reservation, &[memory]))?)
        })
    }

    /// Stores a block under a name, unless that is there. Whether this call did.
    #[pyo3(signature = (name, data, class=None))]
    fn keep(
        &self,
        py: Python<'_>,
        name: &str,
        data: &Bound<'_, PyAny>,
        class: Option<Said>,
    ) -> PyResult<bool> {
        let class = class_of(class)?;
        let data = Bytes::of(data)?;
        let memory = data.memory();
        self.with(py, |pool| {
            let classed = pool.of(class.as_ref())?;
            Ok(classed.keep_from(name, memory.len() as u64, |reservation| append(reservation, &[memory]))?)
        })
    }

    /// The bytes of what has a name.
    fn get<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Option<Bound<'py, PyBytes>>> {
        self.bytes(py, |pool| pool.hold_named(name))
    }

    /// Reads what has a name into a buffer. Whether it was there.
    fn get_into(&self, py: Python<'_>, name: &str, out: &Bound<'_, PyAny>) -> PyResult<bool> {
        let out = Bytes::writable(out)?;
        let memory = out.memory();
        self.with(py, |pool| match pool.hold_named(name)? {
            Some(held) => scatter(&held, &[memory]).map(|()| true),
            None => Ok(false),
        })
    }

    /// The bytes of what has a name, without reading them.
    fn length(&self, py: Python<'_>, name: &str) -> PyResult<Option<u64>> {
        self.with(py, |pool| Ok(pool.hold_named(name)?.map(|held| held.bytes())))
    }

    /// Removes what has a name. Whether it was there.
    fn delete(&self, py: Python<'_>, name: &str) -> PyResult<bool> {
        self.with(py, |pool| Ok(pool.delete(name)?))
    }

    /// Names, and the bytes of each.
    fn list(&self, py: Python<'_>) -> PyResult<Vec<(String, u64)>> {
        let listed = self.with(py, |pool| Ok(pool.list()?))?;
        Ok(listed.into_iter().map(|object| (object.name, object.bytes)).collect())
    }

    /// Stores a block of pieces, unless it is there or another stores it. Whether this call did.
    #[pyo3(signature = (key, pieces, class=None))]
    fn store(
        &self,
        py: Python<'_>,
        key: &[u8],
        pieces: Vec<Bound<'_, PyAny>>,
        class: Option<Said>,
    ) -> PyResult<bool> {
        let class = class_of(class)?;
        let key = key_of(key)?;
        let pieces = pieces.iter().map(Bytes::of).collect::<PyResult<Vec<_>>>()?;
        let memories: Vec<_> = pieces.iter().map(Bytes::memory).collect();
        self.with(py, |pool| {
            let classed = pool.of(class.as_ref())?;
            Ok(classed.store_from(key, total(&memories), |reservation| append(reservation, &memories))?)
        })
    }

    /// Reads a block into pieces. Whether it was there.
    fn read_into(&self, py: Python<'_>, key: &[u8], pieces: Vec<Bound<'_, PyAny>>) -> PyResult<bool> {
        let key = key_of(key)?;
        let pieces = pieces.iter().map(Bytes::writable).collect::<PyResult<Vec<_>>>()?;
        let memories: Vec<_> = pieces.iter().map(Bytes::memory).collect();
        self.with(py, |pool| match pool.hold(&key)? {
            Some(held) => scatter(&held, &memories).map(|()| true),
            None => Ok(false),
        })
    }

    /// The bytes of a block.
    fn read<'py>(&self, py: Python<'py>, key: &[u8]) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let key = key_of(key)?;
        self.bytes(py, |pool| pool.hold(&key))
    }

    /// Removes a block. Whether it was there.
    fn remove(&self, py: Python<'_>, key: &[u8]) -> PyResult<bool> {
        let key = key_of(key)?;
        self.with(py, |pool| Ok(pool.remove(&key)?))
    }

    /// How many of the first blocks are there.
    fn prefix(&self, py: Python<'_>, keys: Vec<Vec<u8>>) -> PyResult<usize> {
        let keys = keys.iter().map(|key| key_of(key)).collect::<PyResult<Vec<_>>>()?;
        self.with(py, |pool| Ok(pool.prefix(&keys)?))
    }

    /// What the pool holds and this node did, as JSON.
    fn stat(&self, py: Python<'_>) -> PyResult<String> {
        json(&self.with(py, |pool| Ok(pool.stats()?))?)
    }

    /// What does not hold, as JSON.
    fn check(&self, py: Python<'_>, repair: bool) -> PyResult<String> {
        json(&py.detach(|| self.attached.check(repair))?)
    }

    /// Leaves the pool.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        Ok(py.detach(|| self.attached.leave()).map_err(Refused::from)?)
    }

    /// Has the node rest before the process is forked.
    fn rest(&self, py: Python<'_>) {
        py.detach(|| self.attached.rest());
    }

    /// Has the node's duty done again in a process that was forked.
    fn resume(&self, py: Python<'_>) {
        py.detach(|| self.attached.resume());
    }

    /// Lets go of the pool in the fork.
    fn forked(&self) {
        self.attached.forked();
    }
}

fn json(value: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(value).map_err(|why| LaminaError::new_err(why.to_string()))
}

/// The keys of a prefix's blocks, of tokens that are 32 bits each, `block` of them a block: what is
/// over has none.
#[pyfunction]
pub(crate) fn chain_keys(
    py: Python<'_>,
    model: &str,
    tokens: &Bound<'_, PyAny>,
    block: usize,
) -> PyResult<Vec<Py<PyBytes>>> {
    let tokens = Bytes::of(tokens)?;
    if block == 0 {
        return Err(PyValueError::new_err("a block has at least one token"));
    }
    let memory = tokens.memory();
    // No block is longer than all tokens.
    let Some(length) = block.checked_mul(4).filter(|length| *length <= memory.len()) else {
        return Ok(Vec::new());
    };
    let keys = py.detach(|| {
        let (mut chain, mut bytes) = (Chain::new(model), vec![0; length]);
        let blocks = memory.len() / length;
        let key = |index: usize| {
            memory.read(index * bytes.len(), &mut bytes);
            let tokens: Vec<_> =
                bytes.as_chunks::<4>().0.iter().map(|word| u32::from_ne_bytes(*word)).collect();
            chain.next(&tokens)
        };
        (0..blocks).map(key).collect::<Vec<_>>()
    });
    Ok(keys.into_iter().map(|key| PyBytes::new(py, &key.0).unbind()).collect())
}
