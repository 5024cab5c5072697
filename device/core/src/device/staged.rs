//! Where open KV windows are kept in an image, so that a store that was acknowledged outlives the
//! process.
//!
//! A place has a page for its header, one for the block that is being written, and the window as
//! the host sees it. The rules:
//! * The header says which window it is. Its count of blocks is stored after everything else and
//!   makes the place valid; it goes back to 0 when the window is published.
//! * The header says which blocks of the window are lost: what lies there for them means nothing. A
//!   block is lost no more after it was written.
//! * A store into a window is made a block at a time, and each block is noted in the second page
//!   first: a kill leaves the block as it was or as it is to be, never a mixture.
//! * Who stores into a place says first that the image changes: it may have been left cleanly with
//!   the window in it. A place that is freed needs no word, as its window was published.

use std::sync::{
    Arc,
    atomic::{Ordering, fence},
};

use parking_lot::Mutex;

use lamina_codec::{
    BLOCK_BYTES,
    kv::{BlockSet, MAX_BLOCKS},
};
use lamina_store::{
    StoreError,
    checkpoint::Head,
    image::{Image, STAGE_BYTES},
    memory::Memory,
};

/// In the header: blocks, first block, check of both; then where in the window the noted bytes go,
/// and how many there are (0 for none).
const BLOCKS: usize = 0;
const FIRST: usize = 8;
const CHECK: usize = 16;
const NOTED_AT: usize = 24;
const NOTED: usize = 32;
/// Which blocks are lost, a bit each. An earlier version leaves zeros here.
const LOST: usize = 64;
/// Where the noted bytes are.
const NOTE: usize = BLOCK_BYTES;
/// Where the window is.
const WINDOW: usize = 2 * BLOCK_BYTES;

/// All places of an image.
pub(super) struct StagedPlaces {
    memory: Memory,
    free: Mutex<Vec<usize>>,
    /// The image's, if it has checkpoints.
    head: Option<Arc<Head>>,
}

/// A place in use.
#[derive(Debug)]
pub(super) struct Place {
    at: usize,
}

/// A window that was open when the image was left.
pub(super) struct Found {
    pub(super) place: Place,
    /// The number of its first block.
    pub(super) first: u64,
    pub(super) bytes: Vec<u8>,
    pub(super) lost: BlockSet,
}

impl StagedPlaces {
    pub(super) fn open(image: &Image) -> Result<Self, StoreError> {
        let places = usize::try_from(image.superblock().open_windows).expect("they are mapped");
        let free = (0..places).rev().map(|place| place * STAGE_BYTES).collect();
        Ok(Self { memory: image.staging()?, free: Mutex::new(free), head: image.head() })
    }

    /// The windows that were open, each with its place, which is in use from now on.
    pub(super) fn found(&self) -> Vec<Found> {
        let mut all = Vec::new();
        // Looking at a place that was never used would cost a page of memory.
        let used = self.memory.populated();
        self.free.lock().retain(|at| {
            let at = *at;
            if !used.iter().any(|range| range.contains(&at)) {
                return true;
            }
            let (blocks, first) = (self.word(at + BLOCKS), self.word(at + FIRST));
            let count = usize::try_from(blocks).ok().filter(|blocks| (1..=MAX_BLOCKS).contains(blocks));
            let Some(count) = count.filter(|_| self.word(at + CHECK) == check(blocks, first)) else {
                return true;
            };
            let mut bytes = vec![0; count * BLOCK_BYTES];
            self.memory.read(at + WINDOW, &mut bytes);
            let place = Place { at };
            let noted = usize::try_from(self.word(at + NOTED)).unwrap_or(usize::MAX).min(BLOCK_BYTES);
            let to = usize::try_from(self.word(at + NOTED_AT)).unwrap_or(usize::MAX);
            if noted > 0 && to.checked_add(noted).is_some_and(|end| end <= bytes.len()) {
                self.memory.read(at + NOTE, &mut bytes[to..to + noted]);
                self.memory.write(at + WINDOW + to, &bytes[to..to + noted]);
            }
            self.put(at + NOTED, 0);
            let mut lost = BlockSet::default();
            let stored = BlockSet::from_words(std::array::from_fn(|word| self.word(at + LOST + 8 * word)));
            stored.iter().filter(|block| *block < count).for_each(|block| lost.insert(block));
            all.push(Found { place, first, bytes, lost });
            false
        });
        all
    }

    /// Puts a window, of which the blocks `lost` are lost, into a free place. There are as many as
    /// windows may be open.
    ///
    /// # Errors
    /// [`StoreError::NoRoom`].
    pub(super) fn take(&self, first: u64, bytes: &[u8], lost: &BlockSet) -> Result<Place, StoreError> {
        let at = self.free.lock().pop().expect("a place for each window that may be open");
        if let Err(full) = self.memory.ensure(at..at + WINDOW + bytes.len()) {
            self.free.lock().push(at);
            return Err(full);
        }
        self.touch();
        self.memory.write(at + WINDOW, bytes);
        let blocks = (bytes.len() / BLOCK_BYTES) as u64;
        self.put(at + FIRST, first);
        self.put(at + CHECK, check(blocks, first));
        self.put(at + NOTED, 0);
        let place = Place { at };
        self.set_lost(&place, lost);
        fence(Ordering::Release);
        self.put(at + BLOCKS, blocks);
        Ok(place)
    }

    /// Stores `data` at `to` of the window in `place`.
    pub(super) fn write(&self, place: &Place, to: usize, data: &[u8]) {
        self.touch();
        let mut done = 0;
        while done < data.len() {
            let length = (BLOCK_BYTES - (to + done) % BLOCK_BYTES).min(data.len() - done);
            let part = &data[done..done + length];
            self.memory.write(place.at + NOTE, part);
            self.put(place.at + NOTED_AT, (to + done) as u64);
            fence(Ordering::Release);
            self.put(place.at + NOTED, length as u64);
            fence(Ordering::Release);
            self.memory.write(place.at + WINDOW + to + done, part);
            fence(Ordering::Release);
            self.put(place.at + NOTED, 0);
            done += length;
        }
    }

    /// Says which blocks of the window in `place` are lost.
    pub(super) fn set_lost(&self, place: &Place, lost: &BlockSet) {
        self.touch();
        // What was written before is there when a block is lost no more.
        fence(Ordering::Release);
        for (at, word) in (place.at + LOST..).step_by(8).zip(lost.words()) {
            self.put(at, word);
        }
    }

    /// Frees a place whose window was published.
    pub(super) fn let_go(&self, Place { at }: Place) {
        fence(Ordering::Release);
        self.put(at + BLOCKS, 0);
        self.free.lock().push(at);
    }

    /// Says that something is about to change.
    fn touch(&self) {
        if let Some(head) = &self.head {
            head.touch();
        }
    }

    fn word(&self, at: usize) -> u64 {
        let mut word = [0; 8];
        self.memory.read(at, &mut word);
        u64::from_le_bytes(word)
    }

    fn put(&self, at: usize, word: u64) {
        self.memory.write(at, &word.to_le_bytes());
    }
}

fn check(blocks: u64, first: u64) -> u64 {
    u64::from(crc32c::crc32c_append(crc32c::crc32c(&blocks.to_le_bytes()), &first.to_le_bytes()))
}
