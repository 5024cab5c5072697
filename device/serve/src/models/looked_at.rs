//! The files under `models/` that were looked at.
//!
//! * What a file at a precision shows takes memory for each of its tensors, and anybody may name
//!   precisions. Of those that nobody configured, [`MAX_ASKED`] are held: the one that was asked
//!   for longest ago goes. An inode's number says what it is, so the file is made again when it is
//!   read.
//! * What was read of a file is counted on, and a folder lists it, until its model is removed. So
//!   is its inode known: the kernel is told then to drop its pages.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use parking_lot::Mutex;

use lamina_device::files::{FileLayout, Read};

use super::number;

/// Most precisions of models that are held besides the configured ones.
pub(super) const MAX_ASKED: usize = 32;

/// A file, ready to be read.
pub(crate) struct Shown {
    pub(super) layout: FileLayout,
    /// Bytes stored of it, as somebody asked last, and what had been changed on the device then.
    pub(super) stored: Mutex<Option<(u64, u64)>>,
    /// What had been written to the device when it was opened last.
    pub(super) opened: AtomicU64,
    /// What was read of it before it was made again.
    before: Read,
    /// Whether it is configured, and held for good.
    stays: bool,
}

impl Shown {
    /// What was read of it.
    pub(super) fn traffic(&self) -> Read {
        let Read { bytes, stored } = self.layout.traffic();
        Read { bytes: self.before.bytes + bytes, stored: self.before.stored + stored }
    }
}

/// A file that nobody looked at, or that is not held any more.
pub(super) struct NotHeld;

/// What is known of a file.
enum Known {
    /// No tensor of it can be shown so.
    Nothing,
    Ready(Arc<Shown>),
    /// It is not held any more: its bytes, and what was read of it.
    Past(u64, Read),
}

/// All that were looked at.
#[derive(Default)]
pub(super) struct LookedAt {
    /// By inode.
    files: HashMap<u64, Known>,
    /// The models and precisions that are held and not configured; what was asked for last is last.
    asked: VecDeque<(u32, u64)>,
}

impl LookedAt {
    /// A file that is held; none if no tensor of it can be shown so.
    pub(super) fn find(&mut self, inode: u64) -> Result<Option<Arc<Shown>>, NotHeld> {
        let shown = match self.files.get(&inode) {
            Some(Known::Nothing) => return Ok(None),
            Some(Known::Past(..)) | None => return Err(NotHeld),
            Some(Known::Ready(shown)) => Arc::clone(shown),
        };
        if !shown.stays {
            self.ask(inode);
        }
        Ok(Some(shown))
    }

    /// Adds a file that was not held. Whoever was first: what was read through it is counted there.
    pub(super) fn add(&mut self, inode: u64, layout: Option<FileLayout>, stays: bool) -> Option<Arc<Shown>> {
        if let Ok(found) = self.find(inode) {
            return found;
        }
        let before = self.told(inode).map(|(_, read)| read).unwrap_or_default();
        let (stored, opened) = (Mutex::default(), AtomicU64::new(u64::MAX));
        let shown = layout.map(|layout| Arc::new(Shown { layout, stored, opened, before, stays }));
        let known = shown.as_ref().map_or(Known::Nothing, |shown| Known::Ready(Arc::clone(shown)));
        self.files.insert(inode, known);
        if shown.is_some() && !stays {
            self.ask(inode);
        }
        shown
    }

    /// Notes that a precision was asked for, and lets the oldest go if there are too many.
    fn ask(&mut self, inode: u64) {
        let asked = (number::model_of(inode), number::code_of(inode));
        if self.asked.back() == Some(&asked) {
            return;
        }
        self.asked.retain(|other| *other != asked);
        self.asked.push_back(asked);
        while self.asked.len() > MAX_ASKED {
            let Some(oldest) = self.asked.pop_front() else { return };
            for (inode, known) in &mut self.files {
                let is_oldest = (number::model_of(*inode), number::code_of(*inode)) == oldest;
                // Who reads it now counts there, and asks for it again.
                if let Known::Ready(shown) = known
                    && is_oldest
                    && !shown.stays
                    && Arc::strong_count(shown) == 1
                {
                    *known = Known::Past(shown.layout.bytes(), shown.traffic());
                }
            }
        }
    }

    /// Whether a file can be shown, if somebody looked.
    pub(super) fn is_shown(&self, inode: u64) -> Option<bool> {
        self.files.get(&inode).map(|known| !matches!(known, Known::Nothing))
    }

    /// The bytes of a file that was looked at, and what was read of it.
    pub(super) fn told(&self, inode: u64) -> Option<(u64, Read)> {
        match self.files.get(&inode)? {
            Known::Nothing => None,
            Known::Ready(shown) => Some((shown.layout.bytes(), shown.traffic())),
            Known::Past(bytes, read) => Some((*bytes, *read)),
        }
    }

    /// The inodes of the files of a model that were looked at and can be shown.
    pub(super) fn of_model(&self, id: u32) -> BTreeSet<u64> {
        let shown = self.files.iter().filter(|(_, known)| !matches!(known, Known::Nothing));
        shown.map(|(inode, _)| *inode).filter(|inode| number::model_of(*inode) == id).collect()
    }

    /// Forgets a model: the inodes that were looked at.
    pub(super) fn forget(&mut self, id: u32) -> Vec<u64> {
        self.asked.retain(|(model, _)| *model != id);
        let of = |inode: &u64, _: &mut Known| number::model_of(*inode) == id;
        self.files.extract_if(of).map(|(inode, _)| inode).collect()
    }

    /// How many files are held.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.files.values().filter(|known| matches!(known, Known::Ready(_))).count()
    }
}
