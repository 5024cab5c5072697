//! Pools in a file that processes of one host share: coherent memory.
//!
//! A node's number is a lock on one byte far behind the file's end, which the kernel gives up when
//! the process dies. So a dead process is known at once, and one that is only stopped is never
//! taken for dead: the others wait for it.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use nix::unistd::{Whence, lseek};
use rustix::fs::{XattrFlags, fgetxattr, fsetxattr, fstatfs};

use crate::class::Class;
use crate::error::PoolError;
use crate::host::Host;
use crate::layout::{Geometry, MAX_BYTES};
use crate::mem::{self, Lines, Map, Mapped};
use crate::member::Member;
use crate::pool::Pool;

/// The byte of node 0.
const FIRST: i64 = 1 << 62;
/// The byte of who makes a pool where there is none.
const MAKER: i64 = FIRST - 1;
/// Times that others may remove a file while one waits to make a pool in it.
const MAX_REMOVED: u32 = 64;
/// How long a part may be in the way of a tensor that a device makes or removes: as long as a
/// gigabyte or more is dropped and forgotten by the kernel.
const MAX_BUSY: Duration = Duration::from_secs(10);
const BUSY_PAUSE: Duration = Duration::from_millis(5);
/// Bytes of an attribute's value at most, as the kernel has it.
const MAX_SAID: usize = 64 << 10;
const TIMEOUT: u64 = 2_000;
const MAX_WAIT: u64 = 60_000;

/// Processes of one host.
pub struct Processes {
    file: File,
    node: u32,
    began: Instant,
}

fn byte(kind: libc::c_int, at: i64) -> libc::flock {
    // Signed and narrow as the C library has it.
    #[allow(clippy::cast_possible_wrap)]
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: at,
        l_len: 1,
        l_pid: 0,
    }
}

/// Takes a lock, if no other has it.
fn try_lock(file: &File, lock: &libc::flock) -> Result<bool, Errno> {
    match fcntl(file, FcntlArg::F_OFD_SETLK(lock)) {
        Ok(_) => Ok(true),
        Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
        Err(why) => Err(why),
    }
}

fn no_locks(node: u32, cause: Errno) -> PoolError {
    PoolError::Node { node, why: format!("its byte of the file cannot be locked: {cause}") }
}

impl Processes {
    /// Takes the first free number below `nodes`, or the one that is wanted.
    ///
    /// # Errors
    /// [`PoolError::Nodes`], [`PoolError::Node`].
    pub fn claim(file: File, nodes: u32, wanted: Option<u32>) -> Result<Self, PoolError> {
        let range = wanted.map_or(0..nodes, |node| node..node.saturating_add(1).min(nodes));
        Self::claim_of(file, range)?.ok_or_else(|| match wanted {
            Some(node) => PoolError::Node { node, why: "a process has it, or the pool has fewer".into() },
            None => PoolError::Nodes { nodes },
        })
    }

    /// Takes the first free number of a range, if one is.
    fn claim_of(file: File, range: Range<u32>) -> Result<Option<Self>, PoolError> {
        for node in range {
            match try_lock(&file, &byte(libc::F_WRLCK, FIRST + i64::from(node))) {
                Ok(true) => return Ok(Some(Self { file, node, began: Instant::now() })),
                Ok(false) => {}
                Err(cause) => return Err(no_locks(node, cause)),
            }
        }
        Ok(None)
    }

    /// The number.
    pub fn node(&self) -> u32 {
        self.node
    }
}

impl Host for Processes {
    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn relax(&self, turns: u32) {
        match turns {
            0..32 => std::hint::spin_loop(),
            32..256 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(100)),
        }
    }

    fn timeout(&self) -> u64 {
        TIMEOUT
    }

    fn max_wait(&self) -> u64 {
        MAX_WAIT
    }

    fn name(&self, _: u32) -> String {
        let program = fs::read_to_string("/proc/self/comm").unwrap_or_default();
        format!("{} {}", std::process::id(), program.trim_end())
    }

    fn declare(&self, range: Range<u64>, class: Option<&Class>) -> Result<(), PoolError> {
        tell_class(&self.file, range, class)
    }

    fn is_gone(&self, node: u32, _: u32) -> bool {
        let mut lock = byte(libc::F_WRLCK, FIRST + i64::from(node));
        let asked = fcntl(&self.file, FcntlArg::F_OFD_GETLK(&mut lock));
        asked.is_ok() && libc::c_int::from(lock.l_type) == libc::F_UNLCK && node != self.node
    }

    fn revoke(&self, node: u32, incarnation: u32) -> bool {
        // One that is stopped cannot be kept from storing when it goes on.
        self.is_gone(node, incarnation)
    }
}

pub(crate) fn open_file(path: &Path) -> Result<File, PoolError> {
    let open = OpenOptions::new().read(true).write(true).open(path);
    open.map_err(|cause| PoolError::File { path: path.to_owned(), cause })
}

/// The memory of a file.
///
/// # Errors
/// [`PoolError::File`], [`PoolError::Mem`].
pub fn memory(path: &Path) -> Result<Arc<Mapped>, PoolError> {
    Ok(Arc::new(Mapped::new(Map::new(&open_file(path)?, path, None)?)))
}

/// Opens what is there to look at it. What is no file is not waited for: a FIFO's other end may
/// never come.
fn open_to_look(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)
}

/// Whether there is anything but zeros in a file, or it is no file but a device, of which only its
/// users know. What is not there holds nothing.
///
/// # Errors
/// The kernel's; a folder is none of these.
pub fn holds_something(path: &Path) -> io::Result<bool> {
    let file = match open_to_look(path) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => return Ok(false),
        file => file?,
    };
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !metadata.is_file() {
        return Ok(true);
    }
    let (mut at, mut piece) = (0, vec![0; 1 << 20]);
    loop {
        // What is a hole is not read.
        let data = match lseek(&file, at, Whence::SeekData) {
            Err(Errno::ENXIO) => return Ok(false),
            data => data?,
        };
        let read = file.read_at(&mut piece, u64::try_from(data).map_err(io::Error::other)?)?;
        if read == 0 {
            return Ok(false);
        }
        if piece[..read].iter().any(|byte| *byte != 0) {
            return Ok(true);
        }
        at = data + i64::try_from(read).map_err(io::Error::other)?;
    }
}

/// Refuses a device's base window that holds files, models or tensors. A pool takes all of it, so
/// whoever makes one there loses them, however sure they are. What is not there is not refused.
///
/// # Errors
/// [`PoolError::Held`], [`PoolError::File`].
pub fn check_holds_no_other(path: &Path) -> Result<(), PoolError> {
    match open_to_look(path) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(cause) => Err(PoolError::File { path: path.to_owned(), cause }),
        Ok(file) => check_holds(&file, path),
    }
}

/// [`check_holds_no_other`] of a file that is open.
pub(crate) fn check_holds(file: &File, path: &Path) -> Result<(), PoolError> {
    use rustix::io::Errno as E;

    if !is_of_mount(file) {
        return Ok(());
    }
    let mut said = vec![0; MAX_SAID];
    let length = match fgetxattr(file, "user.lamina.holds", &mut said[..]) {
        Ok(length) => length,
        // Nothing lies there, it is no base window, or no device's mount. Those of others say so in
        // their own ways.
        Err(E::NODATA | E::OPNOTSUPP | E::NOSYS | E::PERM | E::ACCESS | E::INVAL | E::IO) => return Ok(()),
        Err(why) => return Err(PoolError::File { path: path.to_owned(), cause: why.into() }),
    };
    said.truncate(length);
    Err(PoolError::Held { path: path.to_owned(), holds: String::from_utf8_lossy(&said).into_owned() })
}

/// A lock that is given up at once when this goes, also if a process that was forked meanwhile has
/// the file still.
struct Locked<'f> {
    file: &'f File,
    lock: libc::flock,
}

impl<'f> Locked<'f> {
    /// All nodes' bytes, if none has its own.
    fn nodes(file: &'f File) -> Result<Self, PoolError> {
        let lock = libc::flock { l_len: 64, ..byte(libc::F_WRLCK, FIRST) };
        match try_lock(file, &lock) {
            Ok(true) => Ok(Self { file, lock }),
            Ok(false) => Err(PoolError::Node { node: 0, why: "processes are attached to the pool".into() }),
            Err(cause) => Err(no_locks(0, cause)),
        }
    }

    /// The maker's byte, once no other has it. A signal calls `interrupted`, and the wait goes on
    /// unless that fails.
    fn maker(file: &'f File, interrupted: &mut dyn FnMut() -> io::Result<()>) -> io::Result<Self> {
        let lock = byte(libc::F_WRLCK, MAKER);
        loop {
            match fcntl(file, FcntlArg::F_OFD_SETLKW(&lock)) {
                Err(Errno::EINTR) => interrupted()?,
                locked => return Ok(locked.map(|_| Self { file, lock })?),
            }
        }
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.lock.l_type = byte(libc::F_UNLCK, 0).l_type;
        // The end of the file's last descriptor gives it up in any case.
        let _ = fcntl(self.file, FcntlArg::F_OFD_SETLK(&self.lock));
    }
}

/// A file, and whether it was not there before.
fn new_file(path: &Path) -> Result<(File, bool), PoolError> {
    match OpenOptions::new().read(true).write(true).create_new(true).open(path) {
        Err(why) if why.kind() == io::ErrorKind::AlreadyExists => Ok((made_file(path)?, false)),
        made => {
            made.map(|file| (file, true)).map_err(|cause| PoolError::File { path: path.to_owned(), cause })
        }
    }
}

fn made_file(path: &Path) -> Result<File, PoolError> {
    let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
    open.map_err(|cause| PoolError::File { path: path.to_owned(), cause })
}

/// Makes a pool in a file, which is made as long as the pool if it is not there or shorter. A file
/// that was not there is not there either if this fails.
///
/// # Errors
/// [`PoolError::Node`] if a process is attached to the pool that is there; [`PoolError::Held`],
/// [`PoolError::File`], [`PoolError::Geometry`], [`PoolError::Mem`].
pub fn create(path: &Path, geometry: &Geometry) -> Result<(), PoolError> {
    create_declared(path, geometry, |_| Ok(()))
}

/// [`create`], with `declare` called before anything is stored: with the bytes of the file in which
/// objects will be, so that the device can be told what they are.
///
/// # Errors
/// As [`create`]; what `declare` gives.
pub fn create_declared(
    path: &Path,
    geometry: &Geometry,
    declare: impl FnOnce(Range<u64>) -> Result<(), PoolError>,
) -> Result<(), PoolError> {
    let fail = |cause| PoolError::File { path: path.to_owned(), cause };
    let bytes = geometry.bytes()?;
    let (file, is_new) = new_file(path)?;
    let _nobody = Locked::nodes(&file)?;
    let metadata = file.metadata().map_err(fail)?;
    let make = || {
        check_holds(&file, path)?;
        if metadata.is_file() && metadata.len() < bytes {
            file.set_len(bytes).map_err(|why| {
                let (nodes, length) = (geometry.nodes, metadata.len());
                let why = format!(
                    "a pool for {nodes} nodes takes {bytes} bytes, and its file keeps {length}: {why}"
                );
                fail(io::Error::other(why))
            })?;
        }
        if is_of_mount(&file) {
            // What a pool that was there before had said of its chunks, whatever its geometry. A
            // file whose units do not come out even takes it of the chunks alone.
            let all = 0..metadata.len().max(bytes);
            let _ = tell_class(&file, all, None).or_else(|_| tell_class(&file, geometry.data()?, None));
        }
        declare(geometry.data()?)?;
        let memory = Mapped::new(Map::new(&file, path, None)?);
        Pool::create(Arc::new(memory), geometry)?;
        mark(&file);
        Ok(())
    };
    let made = make();
    // Nobody else made a pool in it before: it was empty when its locks were ours.
    if made.is_err() && is_new && metadata.len() == 0 {
        let _ = fs::remove_file(path);
    }
    made
}

/// Tells the device that a file of its mount is a pool, so that who watches the device sees it.
/// Elsewhere nobody looks.
fn mark(file: &File) {
    if is_of_mount(file) {
        // A window has no attributes, and is looked at anyway.
        let _ = fsetxattr(file, "user.lamina.pool", b"1", XattrFlags::empty());
    }
}

fn is_of_mount(file: &File) -> bool {
    const FUSE: i64 = 0x6573_5546;
    fstatfs(file).is_ok_and(|found| found.f_type == FUSE)
}

/// Tells the device in whose mount a file is what a range of it is; none is what the file is.
fn tell_class(file: &File, range: Range<u64>, class: Option<&Class>) -> Result<(), PoolError> {
    if !is_of_mount(file) {
        return class.map_or(Ok(()), |class| {
            let why = "objects have a class of their own in a mount only, where a device codes them";
            Err(PoolError::Declare(format!("{class}: {why}")))
        });
    }
    let class = class.map(|class| format!(" {class}")).unwrap_or_default();
    let said = format!("{}+{}{class}", range.start, range.end - range.start);
    let tell = || fsetxattr(file, "user.lamina.class", said.as_bytes(), XattrFlags::empty());
    let until = Instant::now() + MAX_BUSY;
    let mut told = tell();
    while told == Err(rustix::io::Errno::BUSY) && Instant::now() < until {
        std::thread::sleep(BUSY_PAUSE);
        told = tell();
    }
    told.map_err(|why| {
        let hint = match why {
            rustix::io::Errno::INVAL => {
                ": the device knows no such format or rows, or their windows do not come out even with \
                 the pool's own"
            }
            rustix::io::Errno::EXIST => ": they overlap a tensor, as a pool's that was made with a class",
            rustix::io::Errno::BUSY => ": they overlap a tensor that is being made or removed",
            _ => "",
        };
        PoolError::Declare(format!("bytes {said}: {why}{hint}"))
    })
}

/// How large a pool in a file is: as the file, or `bytes` if it is empty or not there.
///
/// # Errors
/// [`PoolError::File`]; [`PoolError::Geometry`] if that is more than a pool may have.
pub fn length_of(path: &Path, bytes: u64) -> Result<u64, PoolError> {
    let fail = |cause| PoolError::File { path: path.to_owned(), cause };
    let length = match open_to_look(path).and_then(|file| mem::length(&file)) {
        Err(why) if why.kind() == io::ErrorKind::NotFound => 0,
        length => length.map_err(fail)?,
    };
    let bytes = if length == 0 { bytes } else { length };
    if bytes > MAX_BYTES {
        return Err(PoolError::Geometry(format!("{bytes} bytes: it has at most {MAX_BYTES}, 32 TiB")));
    }
    Ok(bytes)
}

/// Attaches to the pool in a file, which is made first if the file holds nothing. Of several
/// processes that do so at once one makes it. The pool, and whether this call made it.
///
/// # Errors
/// [`PoolError::NoPool`] if the file holds something else; as [`create_declared`] and
/// [`Pool::open`]. A file that was not there is not there either if no pool could be made in it.
pub fn open_or_create(
    path: &Path,
    geometry: &Geometry,
    declare: impl FnOnce(Range<u64>) -> Result<(), PoolError>,
) -> Result<(Pool, bool), PoolError> {
    open_or_create_while(path, geometry, declare, || Ok(()))
}

/// [`open_or_create`] that calls `interrupted` after each signal which comes while another process
/// makes the pool, and ends with what it fails with.
///
/// # Errors
/// As [`open_or_create`]; [`PoolError::File`] with what `interrupted` gives.
pub fn open_or_create_while(
    path: &Path,
    geometry: &Geometry,
    declare: impl FnOnce(Range<u64>) -> Result<(), PoolError>,
    mut interrupted: impl FnMut() -> io::Result<()>,
) -> Result<(Pool, bool), PoolError> {
    let fail = |cause| PoolError::File { path: path.to_owned(), cause };
    for _ in 0..MAX_REMOVED {
        let (file, is_new) = new_file(path)?;
        let _maker = Locked::maker(&file, &mut interrupted).map_err(fail)?;
        // Another may have made it, failed, and removed it.
        if file.metadata().map_err(fail)?.nlink() > 0 {
            return open_or_make(&file, is_new, path, geometry, declare);
        }
    }
    Err(fail(io::Error::other("it is removed again and again")))
}

/// [`open_or_create`] by whom has the maker's byte of the file.
fn open_or_make(
    file: &File,
    is_new: bool,
    path: &Path,
    geometry: &Geometry,
    declare: impl FnOnce(Range<u64>) -> Result<(), PoolError>,
) -> Result<(Pool, bool), PoolError> {
    let fail = |cause| PoolError::File { path: path.to_owned(), cause };
    let metadata = file.metadata().map_err(fail)?;
    // An empty file cannot be mapped.
    let is_empty = metadata.is_file() && metadata.len() == 0;
    if !is_empty && Pool::geometry(memory(path)?).is_ok() {
        // Perhaps it was made by a program that did not tell.
        mark(file);
        return Ok((Pool::open(path)?, false));
    }
    if holds_something(path).map_err(fail)? {
        return Err(PoolError::NoPool("the file holds something else".into()));
    }
    if let Err(why) = create_declared(path, geometry, declare) {
        if is_new {
            let _ = fs::remove_file(path);
        }
        return Err(why);
    }
    Ok((Pool::open(path)?, true))
}

impl Pool {
    /// Attaches to the pool in a file as the first node that is free, whose words are not damaged
    /// so that nobody can be it, and whose last life somebody recovers.
    ///
    /// # Errors
    /// [`PoolError::File`], [`PoolError::NoPool`], [`PoolError::Nodes`], [`PoolError::Node`],
    /// [`PoolError::Timeout`].
    pub fn open(path: &Path) -> Result<Self, PoolError> {
        Self::open_on(path, |host| Arc::new(host))
    }

    /// [`Self::open`] on the machine that `on` makes of these processes.
    fn open_on(path: &Path, on: impl Fn(Processes) -> Arc<dyn Host>) -> Result<Self, PoolError> {
        let memory = memory(path)?;
        let nodes = Self::geometry(memory.clone())?.nodes;
        let (mut next, mut refused, mut has_waited) = (0, None, false);
        while let Some(host) = Processes::claim_of(open_file(path)?, next..nodes)? {
            let node = host.node();
            next = node + 1;
            // Who does not recover the one does not recover the other.
            if has_waited && !Member::is_recovered(&Lines::new(memory.clone()), node)? {
                continue;
            }
            match Self::attach(memory.clone(), on(host), node) {
                Err(why @ PoolError::Node { .. }) => refused = Some(why),
                Err(why @ PoolError::Timeout(_)) if !has_waited => (refused, has_waited) = (Some(why), true),
                attached => return attached,
            }
        }
        Err(match refused {
            Some(PoolError::Node { node, why }) => {
                let why = format!("{why}; no other of the pool's {nodes} numbers is to be had");
                PoolError::Node { node, why }
            }
            Some(why) => why,
            None => PoolError::Nodes { nodes },
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::mpsc::channel;

    use nix::sys::pthread::{pthread_kill, pthread_self};
    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

    use super::*;
    use crate::member::CANDIDATE;
    use crate::service::tests::Hasty;

    extern "C" fn interrupt(_: libc::c_int) {}

    /// Waits for a pool that another makes, until `most` signals came; then that one gives up.
    fn interrupted(
        most: u32,
        on_signal: impl FnMut() -> io::Result<()> + Send,
    ) -> Result<(Pool, bool), PoolError> {
        let folder = tempfile::tempdir().unwrap();
        let path = &folder.path().join("pool");
        let file = made_file(path).unwrap();
        let maker = Locked::maker(&file, &mut || Ok(())).unwrap();
        let action = SigAction::new(SigHandler::Handler(interrupt), SaFlags::empty(), SigSet::empty());
        // SAFETY: the handler does nothing, and nobody else has one for this signal.
        unsafe { sigaction(Signal::SIGUSR2, &action) }.unwrap();
        let (say, who) = channel();
        let (signals, mut on_signal) = (&AtomicU32::new(0), on_signal);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(move || {
                say.send(pthread_self()).unwrap();
                let signalled = || {
                    signals.fetch_add(1, Ordering::Relaxed);
                    on_signal()
                };
                open_or_create_while(path, &Geometry::fitting(8 << 20), |_| Ok(()), signalled)
            });
            let thread = who.recv().unwrap();
            while signals.load(Ordering::Relaxed) < most && !waiting.is_finished() {
                // It may have come to its end just now.
                let sent = pthread_kill(thread, Signal::SIGUSR2);
                assert!(matches!(sent, Ok(()) | Err(Errno::ESRCH)), "{sent:?}");
                std::thread::sleep(Duration::from_millis(1));
            }
            drop(maker);
            waiting.join().unwrap()
        })
    }

    #[test]
    fn who_waits_for_a_pool_to_be_made_waits_on_after_a_signal() {
        assert!(interrupted(3, || Ok(())).unwrap().1);
        let ended = interrupted(3, || Err(io::Error::other("enough"))).map(|_| ());
        assert!(
            matches!(&ended, Err(PoolError::File { cause, .. }) if cause.to_string() == "enough"),
            "{ended:?}"
        );
    }

    #[test]
    fn a_number_whose_last_life_nobody_recovers_is_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pool");
        create(&path, &Geometry { nodes: 4, ..Geometry::fitting(8 << 20) }).unwrap();
        let (manager, stopped) = (Pool::open(&path).unwrap(), Pool::open(&path).unwrap());
        stopped.put("object", b"is there").unwrap();
        let stands = stopped.member.layout.node(stopped.node()) + CANDIDATE;
        stopped.member.lines.post(stands, 1).unwrap();
        let left = Pool::open(&path).unwrap();
        drop(manager);
        left.leave().unwrap();
        let hasty = |host| Arc::new(Hasty(host, Arc::default())) as Arc<dyn Host>;
        let pool = Pool::open_on(&path, hasty).unwrap();
        // One is waited for, and no more.
        assert_eq!((pool.node(), pool.member.leads()), (3, false));
        assert_eq!(pool.member.incarnation(2).unwrap(), (1, false));
        assert_eq!(pool.get("object").unwrap().unwrap(), b"is there");
        let refused = Pool::open_on(&path, hasty).map(|_| ());
        assert!(matches!(refused, Err(PoolError::Timeout(_))), "{refused:?}");
    }

    #[test]
    fn who_cannot_lock_is_told_why_and_not_that_others_have_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pool");
        create(&path, &Geometry::fitting(8 << 20)).unwrap();
        // A lock to write wants a file that is open to write.
        let claimed = Processes::claim(File::open(&path).unwrap(), 16, None).map(|_| ());
        let why = claimed.unwrap_err().to_string();
        assert!(why.contains("cannot be locked: EBADF"), "{why}");
        let locked = Locked::nodes(&File::open(&path).unwrap()).map(|_| ()).unwrap_err().to_string();
        assert!(locked.contains("cannot be locked: EBADF"), "{locked}");
    }
}
