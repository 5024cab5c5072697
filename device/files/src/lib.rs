//! `files/`: a file system on the device.
//!
//! * [`state`] knows inodes, names, extents and attributes. It is memory, and what the changes in
//!   the [log](log) make of nothing.
//! * What files hold lies in the base window, in [slabs](space) of one [class] each: in a slab of
//!   bf16 the device codes bf16. A file's attributes say its class, and [parts] may be of others.
//! * Who serves the files answers the kernel; this crate knows nothing of it but the numbers of its
//!   errors.
//!
//! The rules:
//! * Each request that changes names is one record, so all of it is there after a crash or nothing.
//! * A place is recorded before anything is stored there; a size that grows, after what it shows
//!   was stored; a size that shrinks, before anything is discarded.
//! * What lies behind a file's end may be anything after a crash. It is made zeros before the end
//!   moves over it.
//! * An inode without a name stays as long as it is open, and one that is no file, as long as the
//!   kernel knows of it. Who serves a mount that another process
//!   answered before does not know what is open, and waits for the kernel to forget the inode.
//! * Bytes move under the inode's own gate, shared, and never under the lock of names and extents.
//!   What takes places from a file holds the gate alone. The gate is taken first.
//! * A request that the kernel sends again, because the process that did it died before it
//!   answered, is known by its number and not done twice.

mod attributes;
mod class;
mod data;
mod error;
mod extents;
mod log;
mod names;
mod parts;
mod record;
mod space;
mod state;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::{Mutex, RwLock};

use lamina_codec::BLOCK_BYTES;
use lamina_codec::format::Format;
use lamina_device::device::Device;
use lamina_device::device::poison::Poisoned;
use lamina_device::layout::Layout;

pub use self::attributes::{POOL, Wanted, When};
pub use self::data::Way;
pub use self::error::FileError;
pub use self::names::{Child, Marked, New, Rename};
pub use self::parts::{PART, SaidOfPart, said_of_part};
pub use self::state::{MAX_NAME, Meta, ROOT, Time};

use self::log::Log;
use self::space::Space;
use self::state::{Change, Node, State};

/// Bytes of the log's places for files of so many bytes: a 32nd part each, within bounds.
const LOG: Range<u64> = 1 << 20..256 << 20;
/// Of a request's number: the kernel sends it again.
const SENT_AGAIN: u64 = 1 << 63;

/// Who asks, and by which request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Caller {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The request's number, of which the mount has no other in flight.
    pub request: u64,
}

/// How much there is and may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Bytes that files may take.
    pub limit: u64,
    /// Bytes of those that none takes.
    pub free: u64,
    /// Inodes that there are.
    pub inodes: u64,
}

/// What was done and what there is, for who counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FilesCount {
    /// Inodes.
    pub inodes: u64,
    /// Bytes of address that files take.
    pub taken: u64,
    /// Bytes that were read.
    pub read: u64,
    /// Bytes that were written.
    pub written: u64,
    /// Records of the log since the process began.
    pub records: u64,
}

/// A file system on a device.
pub struct Files {
    device: Arc<Device>,
    core: Mutex<Core>,
    read: AtomicU64,
    written: AtomicU64,
    records: AtomicU64,
    /// Whether the kernel keeps what is written in its page cache.
    write_cache: bool,
}

/// What is changed together.
struct Core {
    state: State,
    log: Log,
    space: Space,
    live: HashMap<u64, Live>,
    /// Whether nobody answered the mount before.
    first: bool,
    #[cfg(test)]
    history: Option<Vec<tests::Recorded>>,
}

/// What is known of an inode since the process began.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
struct Live {
    /// Shared by who reads and writes, held alone by who takes places away.
    gate: Arc<RwLock<()>>,
    /// Open descriptors.
    opens: u64,
    /// How often the kernel was told of it and did not forget that. It may look an inode up again
    /// before it says that it forgot what it knew.
    lookups: u64,
    /// Whether those are all.
    known: bool,
    /// Whether zeros lie behind the end.
    clean: bool,
    /// Whether the kernel may have pages of it anywhere.
    cached: bool,
    /// Whether it may have pages of what was written, which lies somewhere.
    written: bool,
    /// Whether somebody may store into these: then what is a hole here may be none any more.
    writable: bool,
    /// When it was last written to, if that is not recorded.
    modified: Option<Time>,
}

impl Files {
    /// The files of a device, which may take `limit` bytes. None if there are none, and none may
    /// be. `first` says that nobody answered the mount before.
    ///
    /// # Errors
    /// [`FileError::Damaged`] if what is there cannot be used; what the device says.
    pub fn open(device: Arc<Device>, limit: u64, first: bool) -> Result<Option<Self>, FileError> {
        let names = [space::named("log0"), space::named("log1")];
        let place = |name: &String| device.place_of(name);
        let there = place(&names[0]).zip(place(&names[1]));
        if there.is_none() && limit == 0 {
            return Ok(None);
        }
        let bytes = (limit / 32).clamp(LOG.start, LOG.end).next_multiple_of(BLOCK_BYTES as u64);
        for name in &names {
            if let Some((_, has)) = place(name) {
                if has < bytes && *name == names[0] {
                    tracing::warn!(
                        "the log of files/ keeps the {has} bytes that it was made with: more --files makes room for \
                         bytes, and for no more names"
                    );
                }
                continue;
            }
            let dpa =
                space::place_of_nothing(&device, name, bytes)?.ok_or(FileError::NoPlace { wanted: bytes })?;
            space::make_tensor(&device, name, dpa, bytes, Format::Opaque, Layout::Weight)?;
        }
        let places = [place(&names[0]).unwrap_or_default(), place(&names[1]).unwrap_or_default()];
        let kept = Log::keep_room_of(&device, &places);
        let (log, state) = if let Some(opened) = Log::open(&device, places)? {
            opened
        } else {
            let state = empty()?;
            (Log::begin(Arc::clone(&device), places, &state)?, state)
        };
        let used: Vec<_> = state
            .nodes()
            .flat_map(|(_, node)| node.extents.all().map(|(_, dpa, length)| dpa..dpa.saturating_add(length)))
            .collect();
        let space = Space::open(&device, limit, &used)?;
        space::fill_reserve(&device);
        drop(kept);
        let core = Core {
            state,
            log,
            space,
            live: HashMap::new(),
            first,
            #[cfg(test)]
            history: None,
        };
        let files = Self {
            device,
            core: Mutex::new(core),
            read: AtomicU64::new(0),
            written: AtomicU64::new(0),
            records: AtomicU64::new(0),
            write_cache: false,
        };
        if first {
            files.forget_done()?;
            let nameless: Vec<_> = {
                let core = files.core.lock();
                core.state.nodes().filter(|(_, node)| node.meta.links == 0).map(|(inode, _)| inode).collect()
            };
            nameless.into_iter().try_for_each(|inode| files.drop_nameless(inode))?;
        }
        Ok(Some(files))
    }

    /// The same, where the kernel keeps what is written in its page cache: then it says how large
    /// files are and when they were modified, and what comes out of that cache may make one larger.
    #[must_use]
    pub fn with_write_cache(self, write_cache: bool) -> Self {
        Self { write_cache, ..self }
    }

    /// How much there is and may be.
    pub fn extent(&self) -> Extent {
        let core = self.core.lock();
        Extent { limit: core.space.limit(), free: core.space.free_bytes(), inodes: core.state.len() }
    }

    /// What was done and what there is.
    pub fn count(&self) -> FilesCount {
        let Extent { limit, free, inodes } = self.extent();
        FilesCount {
            inodes,
            taken: limit.saturating_sub(free),
            read: self.read.load(Relaxed),
            written: self.written.load(Relaxed),
            records: self.records.load(Relaxed),
        }
    }

    /// What is told of an inode.
    ///
    /// # Errors
    /// [`FileError::Stale`].
    pub fn meta(&self, inode: u64) -> Result<Meta, FileError> {
        self.core.lock().meta(inode)
    }

    /// Bytes of address that a file takes up to its end.
    ///
    /// # Errors
    /// [`FileError::Stale`].
    pub fn taken(&self, inode: u64) -> Result<u64, FileError> {
        let core = self.core.lock();
        let node = core.state.node(inode)?;
        Ok(node.extents.bytes_in(&(0..node.meta.size.next_multiple_of(BLOCK_BYTES as u64))))
    }

    /// Whether the kernel may have been given more of a file than is known here.
    pub fn may_hold_more(&self) -> bool {
        self.write_cache
    }

    /// Says that an inode was opened, perhaps to be stored into.
    ///
    /// # Errors
    /// [`FileError::Stale`].
    pub fn opened(&self, inode: u64, writable: bool) -> Result<(), FileError> {
        let mut core = self.core.lock();
        core.state.node(inode)?;
        let live = core.live(inode);
        live.opens += 1;
        live.writable |= writable;
        Ok(())
    }

    /// Says that an inode was closed once.
    ///
    /// # Errors
    /// What the device says where nothing is left of it.
    pub fn closed(&self, inode: u64) -> Result<(), FileError> {
        let mut core = self.core.lock();
        let Ok(links) = core.state.node(inode).map(|node| node.meta.links) else { return Ok(()) };
        let live = core.live(inode);
        live.opens = live.opens.saturating_sub(1);
        let gone = live.opens == 0 && live.known && links == 0;
        if gone {
            drop(core);
            return self.drop_nameless(inode);
        }
        // What a process that dies would forget.
        self.record_time(&mut core, inode)
    }

    /// Says that the kernel was told of an inode, by name.
    ///
    /// # Errors
    /// [`FileError::Stale`].
    pub fn looked_up(&self, inode: u64) -> Result<(), FileError> {
        let mut core = self.core.lock();
        core.state.node(inode)?;
        core.live(inode).lookups += 1;
        Ok(())
    }

    /// Says that the kernel forgot `count` of the times that it was told of an inode.
    ///
    /// # Errors
    /// What the device says where nothing is left of it.
    pub fn forgotten(&self, inode: u64, count: u64) -> Result<(), FileError> {
        let mut core = self.core.lock();
        let Ok(links) = core.state.node(inode).map(|node| node.meta.links) else { return Ok(()) };
        let first = core.first;
        let live = core.live(inode);
        // More than is known here, if another process answered before.
        live.lookups = live.lookups.saturating_sub(count);
        if live.lookups > 0 {
            return Ok(());
        }
        (live.known, live.cached, live.written, live.writable) = (true, false, false, false);
        let idle = live.opens == 0;
        if idle && links == 0 {
            drop(core);
            return self.drop_nameless(inode);
        }
        self.record_time(&mut core, inode)?;
        if idle && first && Arc::strong_count(&core.live(inode).gate) == 1 {
            core.live.remove(&inode);
        }
        Ok(())
    }

    /// Writes the log anew, where it was not, so that damage to what there was of it is no more.
    ///
    /// # Errors
    /// What the device says.
    pub fn renew_log(&self) -> Result<(), FileError> {
        let mut core = self.core.lock();
        let Core { state, log, .. } = &mut *core;
        let _kept = Log::keep_room_of(&self.device, &log.places());
        let begun = log.begin_anew(state, true);
        self.refill(log);
        begun
    }

    /// Has what was left over kept for the next record that frees some.
    fn refill(&self, log: &mut Log) {
        log.keep_what_room_there_is();
        space::fill_reserve(&self.device);
    }

    /// Brings what was written to a file to the device and to the disk that its image is on.
    ///
    /// # Errors
    /// What the device or the disk says.
    pub fn sync(&self, inode: u64) -> Result<(), FileError> {
        let ranges: Vec<_> = {
            let mut core = self.core.lock();
            self.record_time(&mut core, inode)?;
            core.state.node(inode)?.extents.all().map(|(_, dpa, length)| (dpa, length)).collect()
        };
        for (dpa, length) in ranges {
            self.device.flush(dpa, length)?;
        }
        self.device.sync().map_err(FileError::Sync)
    }

    /// Writes changes to the log and makes them. What `frees` may use what is kept back for it.
    fn commit(
        &self,
        core: &mut Core,
        mut changes: Vec<Change>,
        caller: Caller,
        frees: bool,
    ) -> Result<(), FileError> {
        if caller.request != 0 {
            changes.push(Change::Done { request: caller.request & !SENT_AGAIN });
        }
        let mut bytes = Vec::with_capacity(256);
        record::encode(&changes, &mut bytes);
        self.append(core, &bytes, frees)?;
        self.records.fetch_add(1, Relaxed);
        for change in changes {
            if let Change::Put { inode, .. } = &change
                && let Some(live) = core.live.get_mut(inode)
            {
                live.modified = None;
            }
            core.state.apply(change)?;
        }
        #[cfg(test)]
        if let Some(history) = &mut core.history {
            history.push(tests::Recorded::new(&core.log, &core.state));
        }
        Ok(())
    }

    /// Writes a record to the log. Of a full store what `frees` takes what was kept for it, of
    /// which nobody else gets anything meanwhile, and as much as is left is kept for the next.
    fn append(&self, core: &mut Core, bytes: &[u8], frees: bool) -> Result<(), FileError> {
        let Core { state, log, .. } = core;
        let _kept = Log::keep_room_of(&self.device, &log.places());
        let appended = log.append(bytes, state, frees);
        if !frees || !matches!(&appended, Err(why) if why.is_no_room()) {
            if appended.is_err() {
                // It may have been given up for a state that turned out to be too large.
                self.refill(log);
            }
            return appended;
        }
        let appended =
            if space::drop_reserve(&self.device) { log.append(bytes, state, frees) } else { appended };
        let appended = match appended {
            Err(why) if why.is_no_room() => {
                log.begin_anew(state, frees).and_then(|()| log.append(bytes, state, frees))
            }
            appended => appended,
        };
        self.refill(log);
        appended
    }

    /// Records that another mount counts its requests anew: whoever serves it next, and reads the
    /// log, must not take one of it for one of the mount before.
    fn forget_done(&self) -> Result<(), FileError> {
        let mut core = self.core.lock();
        if !core.state.has_done() {
            return Ok(());
        }
        let forgotten = Change::Done { request: 0 };
        match self.commit(&mut core, vec![forgotten.clone()], Caller::default(), true) {
            // Of an image whose store an earlier program filled up to the last block. The log has
            // it when it is begun anew.
            Err(why) if why.is_no_room() => core.state.apply(forgotten),
            recorded => recorded,
        }
    }

    /// Records when an inode was last written to.
    fn record_time(&self, core: &mut Core, inode: u64) -> Result<(), FileError> {
        if core.live.get(&inode).is_none_or(|live| live.modified.is_none()) {
            return Ok(());
        }
        let put = Change::Put { inode, meta: core.meta(inode)? };
        match self.commit(core, vec![put], Caller::default(), true) {
            // The next record has it.
            Err(why) if why.is_no_room() => Ok(()),
            recorded => recorded,
        }
    }

    /// Drops an inode that has no name, and frees what it has.
    fn drop_nameless(&self, inode: u64) -> Result<(), FileError> {
        let mut core = self.core.lock();
        // Somebody else may have been first.
        let Some(node) = core.state.node(inode).ok().filter(|node| node.meta.links == 0) else {
            return Ok(());
        };
        let freed = places_of(node);
        self.commit(&mut core, vec![Change::Drop { inode }], Caller::default(), true)?;
        drop(core);
        self.free(inode, freed);
        Ok(())
    }

    /// Discards what a file had, which no record names any more, and gives it to others.
    fn free(&self, inode: u64, ranges: Vec<Range<u64>>) {
        let gate = self.core.lock().live(inode).gate.clone();
        {
            let _alone = gate.write();
            self.free_alone(ranges);
        }
        let mut core = self.core.lock();
        if core.state.node(inode).is_err() {
            core.live.remove(&inode);
        }
    }

    /// As [`Self::free`], of who holds the gate alone.
    fn free_alone(&self, ranges: Vec<Range<u64>>) {
        if ranges.is_empty() {
            return;
        }
        for range in &ranges {
            if let Err(why) = space::discard(&self.device, range) {
                tracing::debug!("what a file had is not discarded yet: {why}");
            }
        }
        let mut core = self.core.lock();
        core.space.give(ranges);
        let _kept = Log::keep_room_of(&self.device, &core.log.places());
        core.log.keep_what_room_there_is();
        space::fill_reserve(&self.device);
    }
}

impl Core {
    /// What is known of an inode since the process began.
    fn live(&mut self, inode: u64) -> &mut Live {
        let first = self.first;
        self.live.entry(inode).or_insert_with(|| Live {
            gate: Arc::default(),
            opens: 0,
            lookups: 0,
            known: first,
            clean: false,
            cached: !first,
            written: !first,
            writable: !first,
            modified: None,
        })
    }

    /// What is told of an inode, with the times that are not recorded.
    fn meta(&self, inode: u64) -> Result<Meta, FileError> {
        let mut meta = self.state.node(inode)?.meta.clone();
        if let Some(modified) = self.live.get(&inode).and_then(|live| live.modified) {
            meta.times[1] = modified;
            meta.times[2] = modified;
        }
        Ok(meta)
    }

    /// Whether nobody has an inode that is a file, or not. Who opens a FIFO or a device does not
    /// ask here: as long as the kernel knows of it, somebody may have it.
    fn is_unused(&mut self, inode: u64, is_file: bool) -> bool {
        let live = self.live(inode);
        live.known && live.opens == 0 && (is_file || live.lookups == 0)
    }
}

/// Where the log of a device's files lies that is damaged in this range of the base window: DPA and
/// bytes. To make zeros of the damage would end the log there, without a word.
pub fn damaged_log(device: &Device, range: &Range<u64>) -> Option<(u64, u64)> {
    let logs = [space::named("log0"), space::named("log1")];
    let is_there = |lost: &Poisoned| lost.dpa < range.end && range.start < lost.dpa + lost.length;
    let log = device
        .poison()
        .into_iter()
        .filter(is_there)
        .find_map(|lost| lost.tensor.filter(|tensor| logs.contains(tensor)));
    device.place_of(&log?)
}

/// What of the files would be lost, without a word to who uses them, if this range of the base
/// window were discarded: the tensor's name, DPA and bytes. While they are not `served`, their log
/// cannot be used, and to discard a whole place of it is to give it up.
pub fn lost_by_discard(device: &Device, range: &Range<u64>, served: bool) -> Option<(String, u64, u64)> {
    let (name, dpa, length) = space::tensor_in(device, range)?;
    let is_log = [space::named("log0"), space::named("log1")].contains(&name);
    let is_given_up = !served && is_log && *range == (dpa..dpa + length);
    (!is_given_up).then_some((name, dpa, length))
}

/// Where a file lies.
fn places_of(node: &Node) -> Vec<Range<u64>> {
    node.extents.all().map(|(_, dpa, length)| dpa..dpa + length).collect()
}

/// A file system with nothing in it.
fn empty() -> Result<State, FileError> {
    let mut state = State::default();
    let now = now();
    let (uid, gid) = (effective(libc::geteuid), effective(libc::getegid));
    let meta = Meta {
        mode: libc::S_IFDIR | 0o755,
        uid,
        gid,
        links: 2,
        device: 0,
        size: 0,
        parent: ROOT,
        times: [now; 3],
    };
    state.apply(Change::Put { inode: ROOT, meta })?;
    Ok(state)
}

fn effective(of: unsafe extern "C" fn() -> u32) -> u32 {
    // SAFETY: both have no arguments, touch no memory and cannot fail.
    unsafe { of() }
}

/// The time.
fn now() -> Time {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (i64::try_from(since.as_secs()).unwrap_or(i64::MAX), since.subsec_nanos())
}
