//! Checkpoints: what a crash of the host leaves of an image.
//!
//! Stores into the mapping reach the disk in any order, and a crash keeps any mixture of a page's
//! versions since it was last synced. So an image on a disk has, beside what it is changed by, two
//! copies of the plane index and of the tables, and by turns one of them is made what the device is
//! at one moment. The rules:
//!
//! * A *cut* is the moment: no entry is being published, no tables are being saved. Pages of the
//!   index that changed since that copy was made last are *frozen*: who is about to change one
//!   copies it first, and whoever makes the checkpoint copies the others. Nobody waits for more
//!   than a page.
//! * Everything is synced, then the copy's header is written with the next number, then that is
//!   synced. Only now is the checkpoint made. So before a process that follows a killed one forgets
//!   a checkpoint to make another in its place, it syncs, as the last one may not be on the disk.
//! * A segment that was freed after the cut of the last checkpoint that was made may still be named
//!   there: it is [held](super::segments), and used again when a later one is made.
//! * The *state* says whether the image was left cleanly, which is when a checkpoint was made and
//!   nothing changed since, and by which boot of the host it was changed otherwise. Who changes an
//!   image that was left cleanly says so on the disk first.
//! * Who opens an image that another boot changed finds any mixture: it is [recovered](recover),
//!   which makes it what the last checkpoint says. Staged KV windows are not part of it: what was
//!   stored into them was not flushed. Nor are counters, which are what they happen to be.
//! * If this boot changed it, the page cache has all of it, and a killed process is all there was.
//! * Where the boot cannot be told (no `/proc`), an image that was not left cleanly is recovered,
//!   but for a process that follows another that served it.
//! * After a sync that failed nobody knows what is on the disk: no later one of this process
//!   succeeds, nor of the workers that its holder starts after it. The state says so too, in the
//!   page cache, which has what the disk may lack. The next holder [writes it again](super::cached)
//!   before it believes a sync. After a crash of the host such an image was not left cleanly.

use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use parking_lot::{Condvar, Mutex};

use super::{
    Store, StoreError, cached, counters, entry::ENTRY_BYTES, image::Image, index::Index, journal::Journal,
    ledger, memory::Memory, tables::Tables,
};

/// Behind the pages of superblock and checkpoints.
pub(super) const HEAD_END: u64 = 20 << 10;
/// The state: magic, CRC-32C of what follows it, the number of the checkpoint that is all of the
/// image if it was left cleanly (0 otherwise, or [`FAILED`]), and the boot.
const STATE_AT: usize = 8 << 10;
/// The copies' headers: magic, CRC-32C of what follows it, number, bytes of the tables, their
/// CRC-32C, seconds since 1970.
const HEADERS_AT: [usize; 2] = [12 << 10, 16 << 10];
/// In the place of that number: a sync failed. No checkpoint has it, so an earlier program reads it
/// as 0.
const FAILED: u64 = u64::MAX;
const STATE_MAGIC: [u8; 8] = *b"LAMSTATE";
const HEADER_MAGIC: [u8; 8] = *b"LAMCHECK";
/// Bytes of a boot's name.
const BOOT_BYTES: usize = 36;
/// Bytes of the state and of a header.
const STATE_BYTES: usize = 24 + BOOT_BYTES;
const HEADER_BYTES: usize = 48;
/// Where the kernel names its boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// Bytes of the index that are looked at at once.
const PIECE_BYTES: usize = 64 << 10;

/// The first pages of an image with checkpoints.
#[derive(Debug)]
pub struct Head {
    memory: Memory,
    file: Arc<File>,
    boot: [u8; BOOT_BYTES],
    /// Whether the state says that the image was left cleanly.
    is_clean: AtomicBool,
    /// Whether anything changed since the cut of the last checkpoint.
    is_changed: AtomicBool,
    /// Whether a sync failed, of this worker or of one before it.
    has_failed: AtomicBool,
    /// Memory of the holder, where the next worker finds that one failed: the kernel says so once.
    beside: Option<Arc<File>>,
    state: Mutex<()>,
    /// Held while the state is written.
    writing: Mutex<()>,
    #[cfg(any(test, feature = "testing"))]
    failpoints: super::failpoints::Failpoints,
}

/// A copy's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) number: u64,
    text_bytes: u64,
    text_check: u32,
    /// Seconds since 1970.
    made: u64,
}

/// Makes checkpoints.
pub(super) struct Checkpoints {
    head: Arc<Head>,
    texts: [Memory; 2],
    tables: Arc<Tables>,
    /// Which copy the last checkpoint is, and its number: held by who makes one.
    last: Mutex<(usize, u64)>,
    /// Whether that one is on the disk for sure.
    is_synced: AtomicBool,
    made: AtomicU64,
    /// Whether one should be made soon, and who waits to do that.
    wanted: Mutex<bool>,
    waiting: Condvar,
}

impl Head {
    fn open(image: &Image) -> Result<Self, StoreError> {
        let memory = image.head_pages()?;
        memory.ensure(0..usize::try_from(HEAD_END).expect("five pages"))?;
        Ok(Self {
            memory,
            file: image.shared_file(),
            boot: this_boot(),
            is_clean: AtomicBool::new(false),
            is_changed: AtomicBool::new(true),
            has_failed: AtomicBool::new(image.beside_file().is_some_and(|file| ledger::has_failed(file))),
            beside: image.beside_file().cloned(),
            state: Mutex::new(()),
            writing: Mutex::new(()),
            #[cfg(any(test, feature = "testing"))]
            failpoints: super::failpoints::current(),
        })
    }

    /// Says that something is about to change.
    pub fn touch(&self) {
        // In one order with those of `make_last`: either it sees that something changes, or this
        // that it is left cleanly.
        self.is_changed.store(true, SeqCst);
        if self.is_clean.load(SeqCst) {
            self.no_more_clean();
        }
    }

    #[cold]
    fn no_more_clean(&self) {
        let _one = self.state.lock();
        if !self.is_clean.load(Relaxed) {
            return;
        }
        self.set_state(0);
        // Before anything else may reach the disk.
        if let Err(why) = self.sync() {
            tracing::error!("the image's state cannot be brought to the disk: {why}");
        }
        self.is_clean.store(false, Relaxed);
    }

    fn set_state(&self, clean: u64) {
        let _one = self.writing.lock();
        let state = self.state_of(if self.has_failed() { FAILED } else { clean });
        self.memory.write(STATE_AT, &state);
    }

    fn state_of(&self, number: u64) -> [u8; STATE_BYTES] {
        let mut state = [0; STATE_BYTES];
        state[16..24].copy_from_slice(&number.to_le_bytes());
        state[24..].copy_from_slice(&self.boot);
        seal(STATE_MAGIC, &mut state);
        state
    }

    /// The number of the checkpoint that the image is, or what stands in its place, and the boot.
    fn state(&self) -> Option<(u64, [u8; BOOT_BYTES])> {
        let state = self.get::<STATE_BYTES>(STATE_AT, STATE_MAGIC)?;
        Some((word(&state, 16), *state.last_chunk().expect("the boot is last")))
    }

    fn header(&self, copy: usize) -> Option<Header> {
        let header = self.get::<HEADER_BYTES>(HEADERS_AT[copy], HEADER_MAGIC)?;
        // None that was made has the last number: there is one behind each.
        let number = Some(word(&header, 16)).filter(|number| (1..u64::MAX).contains(number))?;
        let text_check = u32::try_from(word(&header, 32)).ok()?;
        Some(Header { number, text_bytes: word(&header, 24), text_check, made: word(&header, 40) })
    }

    fn set_header(&self, copy: usize, Header { number, text_bytes, text_check, made }: Header) {
        let mut header = [0; HEADER_BYTES];
        let words = [number, text_bytes, text_check.into(), made];
        for (place, word) in header[16..].as_chunks_mut().0.iter_mut().zip(words) {
            *place = word.to_le_bytes();
        }
        seal(HEADER_MAGIC, &mut header);
        self.memory.write(HEADERS_AT[copy], &header);
    }

    /// Says that a copy is none.
    fn forget(&self, copy: usize) {
        self.memory.write(HEADERS_AT[copy], &[0; HEADER_BYTES]);
    }

    fn get<const BYTES: usize>(&self, at: usize, magic: [u8; 8]) -> Option<[u8; BYTES]> {
        let mut bytes = [0; BYTES];
        self.memory.read(at, &mut bytes);
        let checks = u64::from(crc32c::crc32c(&bytes[16..])) == word(&bytes, 8);
        (bytes.starts_with(&magic) && checks).then_some(bytes)
    }

    /// Brings the file to the disk.
    fn sync(&self) -> io::Result<()> {
        if self.has_failed.load(Relaxed) {
            return Err(io::Error::other(
                "a sync before failed, and what of it is on the disk is not known; save a snapshot to another disk, or mend this one and start again before the host is",
            ));
        }
        #[cfg(any(test, feature = "testing"))]
        let synced = self.failpoints.synced(&self.file).and_then(|()| self.file.sync_data());
        #[cfg(not(any(test, feature = "testing")))]
        let synced = self.file.sync_data();
        synced.inspect_err(|_| self.fail())
    }

    /// Says that what should be on the disk is not, to whoever opens the image until the host is
    /// started again.
    fn fail(&self) {
        self.has_failed.store(true, Relaxed);
        if let Some(Err(why)) = self.beside.as_deref().map(ledger::note_failure) {
            tracing::error!("the next worker will not know that a sync failed: {why}");
        }
        let _one = self.writing.lock();
        // As a file: a store into the mapping may be the end of the process if the disk is none any
        // more.
        if let Err(why) = self.file.write_all_at(&self.state_of(FAILED), STATE_AT as u64) {
            tracing::error!("who serves the image next will not know that a sync failed: {why}");
        }
    }

    /// [Syncs again](Self::sync_again) if the state says that a sync failed. Of another boot there
    /// is nothing in the page cache.
    fn sync_again_if_failed(&self) {
        if self.state().is_some_and(|(number, boot)| number == FAILED && boot == self.boot) {
            self.sync_again();
        }
    }

    /// Brings to the disk what a sync of an earlier holder may have left out. If it cannot, no sync
    /// of this process succeeds.
    fn sync_again(&self) {
        if self.has_failed() {
            return;
        }
        let written = cached::write_again(&self.file).inspect_err(|_| self.fail());
        match written.and_then(|bytes| self.sync().map(|()| bytes)) {
            Ok(bytes) => tracing::warn!(
                bytes,
                "a sync of the image failed before it was served: what the system still had of it was written to the disk again"
            ),
            Err(why) => tracing::error!(
                "a sync of the image failed before it was served, and what the system still has of it cannot be written to the disk: {why}"
            ),
        }
    }

    /// Whether a sync failed: what of the image is on the disk is not known then, and what the disk
    /// gives back of it may be older than what was stored.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Relaxed)
    }

    /// Copies whose header checks, the last one first.
    pub(super) fn headers(&self) -> Vec<(usize, Header)> {
        let mut all: Vec<_> = (0..2).filter_map(|copy| Some((copy, self.header(copy)?))).collect();
        all.sort_unstable_by_key(|(_, header)| std::cmp::Reverse(header.number));
        all
    }
}

/// `image`, as it is to be opened: if it has checkpoints, and another boot of the host changed it,
/// it is recovered. The first process of a run is the one that no other served this image before.
///
/// # Errors
/// [`StoreError::Crashed`] if that cannot be; [`StoreError::Reserve`], [`StoreError::NoRoom`].
pub fn settle(image: Image, first_process: bool) -> Result<Image, StoreError> {
    if !image.superblock().checkpoints {
        // A worker that is tried out may have to give way to the one of an earlier version that
        // served before it, and that could not open it any more.
        if !image.lacks_checkpoints() || !first_process {
            return Ok(image);
        }
        // Checkpoints take no room that the image cannot be opened without.
        Journal::new(image.journal()?)?;
        counters::make_room(&image)?;
        return Ok(match make_room(&image) {
            Ok(head) => image.with_head(Some(Arc::new(head))),
            Err(why) => {
                tracing::warn!(
                    "the image gets no checkpoints, so a crash of the host may lose or tear what was written since the last clean stop: {why}"
                );
                image
            }
        });
    }
    let head = Head::open(&image)?;
    let (state, last) = (head.state(), head.headers().first().copied());
    let number = last.map_or(0, |(_, header)| header.number);
    let is_clean = state.is_some_and(|(clean, _)| clean == number && number > 0);
    let known = |boot: &[u8; BOOT_BYTES]| *boot != [0; BOOT_BYTES] && *boot == head.boot;
    if !is_clean && first_process && !state.is_some_and(|(_, boot)| known(&boot)) {
        let (copy, header) = last.ok_or(StoreError::Crashed { damaged: "the headers of its checkpoints" })?;
        recover(&image, copy, header)?;
    }
    head.sync_again_if_failed();
    head.is_clean.store(is_clean, Relaxed);
    if !is_clean {
        head.set_state(0);
    }
    Ok(image.with_head(Some(Arc::new(head))))
}

/// Makes room for checkpoints in an image that has none. If there is too little, it takes none.
fn make_room(image: &Image) -> Result<Head, StoreError> {
    let made = image.lengthen().map_err(|source| StoreError::NoRoom { what: "checkpoints", source });
    made.and_then(|()| make_room_in(image)).inspect_err(|_| {
        if let Err(why) = image.shorten() {
            tracing::warn!("what was taken for checkpoints is not given back: {why}");
        }
    })
}

fn make_room_in(image: &Image) -> Result<Head, StoreError> {
    let head = Head::open(image)?;
    // The first checkpoint of an earlier holder may be what its sync left out.
    head.sync_again_if_failed();
    ensure_copies(&image.index()?, &image.copies()?)?;
    let (tables, _) = Tables::open(image)?;
    let bytes = tables.last().text.bytes();
    image.texts()?.iter().try_for_each(|memory| memory.ensure(0..bytes))?;
    head.set_state(0);
    Ok(head)
}

/// Makes sure that the copies of `index` can be written where it has something.
pub(super) fn ensure_copies(index: &Memory, copies: &[Memory; 2]) -> Result<(), StoreError> {
    let mut ranges = index.all_touched();
    ranges.try_for_each(|range| copies.iter().try_for_each(|copy| copy.ensure(range.clone())))
}

/// Makes the image what its checkpoint `copy` says. If this is cut short, it is begun again: the
/// checkpoint is not changed, nor is the state.
fn recover(image: &Image, copy: usize, header: Header) -> Result<(), StoreError> {
    let damaged = StoreError::Crashed { damaged: "the tables of its last checkpoint" };
    let bytes = text_of(&image.texts()?[copy], header).ok_or(damaged)?;
    let (index, saved) = (image.index()?, &image.copies()?[copy]);
    let (mut is, mut was) = (vec![0; PIECE_BYTES], vec![0; PIECE_BYTES]);
    for piece in pieces(&[&index, saved]) {
        let (is, was) = (&mut is[..piece.len()], &mut was[..piece.len()]);
        index.read(piece.start, is);
        saved.read(piece.start, was);
        if is != was {
            index.ensure(piece.clone())?;
            index.write(piece.start, was);
        }
    }
    Journal::new(image.journal()?)?.forget_all();
    let staging = image.staging()?;
    for place in staging.populated().into_iter().flat_map(|range| {
        (range.start / super::image::STAGE_BYTES * super::image::STAGE_BYTES..range.end)
            .step_by(super::image::STAGE_BYTES)
    }) {
        staging.ensure(place..place + 8)?;
        // The count of its blocks, which makes it valid.
        staging.write(place, &[0; 8]);
    }
    Tables::replace(image, &bytes)?;
    let ago = now().saturating_sub(header.made);
    tracing::warn!(
        checkpoint = header.number,
        "the host ended without a clean stop: the device is as it was at the last sync, {ago} s ago"
    );
    Ok(())
}

fn text_of(memory: &Memory, header: Header) -> Option<Vec<u8>> {
    let bytes =
        usize::try_from(header.text_bytes).ok().filter(|bytes| *bytes <= super::tables::PLACE_BYTES)?;
    let mut text = vec![0; bytes];
    memory.read(0, &mut text);
    (crc32c::crc32c(&text) == header.text_check).then_some(text)
}

/// Pieces of the index where any of these may have something, each of whole entries, in order and
/// each once.
fn pieces(memories: &[&Memory]) -> Vec<std::ops::Range<usize>> {
    let mut starts: Vec<(usize, usize)> = Vec::new();
    for memory in memories {
        let bytes = memory.bytes();
        for range in memory.populated() {
            let first = range.start / PIECE_BYTES * PIECE_BYTES;
            starts
                .extend((first..range.end).step_by(PIECE_BYTES).map(|at| (at, bytes.min(at + PIECE_BYTES))));
        }
    }
    starts.sort_unstable();
    starts.dedup();
    starts.into_iter().map(|(start, end)| start..end).collect()
}

/// What entries of a checkpoint say that the index does not: of each its 64 bytes and its block.
pub(super) fn differing(index: &Index, saved: &Memory, mut found: impl FnMut(u64, &[u8; ENTRY_BYTES])) {
    let (mut is, mut was) = (vec![0; PIECE_BYTES], vec![0; PIECE_BYTES]);
    for piece in pieces(&[saved]) {
        let (is, was) = (&mut is[..piece.len()], &mut was[..piece.len()]);
        index.read_bytes(piece.start, is);
        saved.read(piece.start, was);
        if is == was {
            continue;
        }
        let entries = is.as_chunks::<ENTRY_BYTES>().0.iter().zip(was.as_chunks().0);
        for (block, (is, was)) in ((piece.start / ENTRY_BYTES) as u64..).zip(entries) {
            if is != was {
                found(block, was);
            }
        }
    }
}

impl Checkpoints {
    /// Makes checkpoints of what `image` holds. If it is to have some and has none yet, the first
    /// one is made now; `None` if it is to have none.
    pub(super) fn open(
        image: &Image,
        store: &Store,
        tables: &Arc<Tables>,
    ) -> Result<Option<Self>, StoreError> {
        let Some(head) = image.head() else { return Ok(None) };
        let last = head.headers().first().map_or((1, 0), |(copy, header)| (*copy, header.number));
        // One that was left cleanly is the checkpoint.
        head.is_changed.store(!head.is_clean.load(Relaxed), SeqCst);
        let made = Self {
            texts: image.texts()?,
            tables: Arc::clone(tables),
            last: Mutex::new(last),
            is_synced: AtomicBool::new(last.1 == 0),
            made: AtomicU64::new(0),
            wanted: Mutex::new(false),
            waiting: Condvar::new(),
            head,
        };
        let is_new = !image.superblock().checkpoints;
        if is_new || last.1 == 0 {
            let first = made.make(store).and_then(|()| {
                if is_new { image.says_checkpoints().inspect_err(|_| made.head.fail()) } else { Ok(()) }
            });
            first.map_err(|source| StoreError::NoRoom { what: "checkpoints", source })?;
        }
        Ok(Some(made))
    }

    /// Makes a checkpoint, unless nothing changed since the last one.
    ///
    /// # Errors
    /// What the system says. Then the last one is what it was.
    pub(super) fn make(&self, store: &Store) -> io::Result<()> {
        let mut last = self.last.lock();
        self.make_one(store, &mut last)
    }

    fn make_one(&self, store: &Store, last: &mut (usize, u64)) -> io::Result<()> {
        let head = &self.head;
        if !head.is_changed.load(Relaxed) && last.1 > 0 {
            return if head.has_failed.load(Relaxed) { head.sync() } else { Ok(()) };
        }
        if !self.is_synced.load(Relaxed) {
            // Who made it may have been killed before that, and the one before is forgotten now.
            head.sync()?;
            self.is_synced.store(true, Relaxed);
        }
        let (copy, number) = (1 - last.0, last.1 + 1);
        head.forget(copy);
        let cut = store.index.freeze(copy, || {
            let saved = self.tables.last();
            head.is_changed.store(false, SeqCst);
            (store.segments.cut(), saved.text.clone())
        });
        let (epoch, text) = cut.map_err(io::Error::other)?;
        store.index.thaw();
        text.pieces().for_each(|(at, piece)| self.texts[copy].write(at, piece));
        let (text_bytes, text_check) = (text.bytes() as u64, text.check());
        let header = Header { number, text_bytes, text_check, made: now() };
        let made = head.sync().and_then(|()| {
            head.set_header(copy, header);
            head.sync()
        });
        made.inspect_err(|_| head.is_changed.store(true, Relaxed))?;
        *last = (copy, number);
        self.made.fetch_add(1, Relaxed);
        store.segments.checkpointed(epoch);
        Ok(())
    }

    /// As [`Self::make`], and says that the image is left cleanly.
    pub(super) fn make_last(&self, store: &Store) -> io::Result<()> {
        let mut last = self.last.lock();
        self.make_one(store, &mut last)?;
        let head = &self.head;
        let _one = head.state.lock();
        head.is_clean.store(true, SeqCst);
        // Who changes something from now on waits for this, and says that it is no more.
        if head.is_changed.load(SeqCst) {
            head.is_clean.store(false, SeqCst);
            return Ok(());
        }
        head.set_state(last.1);
        head.sync()
    }

    /// Says that one should be made soon.
    pub(super) fn want(&self) {
        let mut wanted = self.wanted.lock();
        if !*wanted {
            *wanted = true;
            self.waiting.notify_all();
        }
    }

    /// Waits until one is wanted, or for so long.
    pub(super) fn wait(&self, most: Option<Duration>) {
        let mut wanted = self.wanted.lock();
        match most {
            Some(most) if !*wanted => drop(self.waiting.wait_for(&mut wanted, most)),
            Some(_) => {}
            None => self.waiting.wait_while(&mut wanted, |wanted| !*wanted),
        }
        *wanted = false;
    }

    pub(super) fn made(&self) -> u64 {
        self.made.load(Relaxed)
    }
}

/// Begins `bytes` with a magic and the check of what follows both.
fn seal(magic: [u8; 8], bytes: &mut [u8]) {
    let check = u64::from(crc32c::crc32c(&bytes[16..]));
    bytes[..8].copy_from_slice(&magic);
    bytes[8..16].copy_from_slice(&check.to_le_bytes());
}

/// What the kernel calls its boot; zeros if it cannot be told.
fn this_boot() -> [u8; BOOT_BYTES] {
    let boot = std::fs::read(BOOT_ID).ok();
    let boot = boot.and_then(|boot| boot.first_chunk().copied()).unwrap_or([0; BOOT_BYTES]);
    #[cfg(any(test, feature = "testing"))]
    let boot = {
        let mut boot = boot;
        boot[0] ^= super::failpoints::current().boots().to_le_bytes()[0];
        boot
    };
    boot
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*bytes[at..].first_chunk().expect("eight bytes"))
}
