//! A bounded cache of what was decoded and not yet read.
//!
//! A reader of one page of a KV window makes the device decode the window, and a page of a packed
//! view may end inside a block. A reader that goes on asks for the rest next. So what a read
//! decoded and did not give away is kept, until it was given away or room is needed.
//!
//! The rules:
//! * A byte is given once: asking for it again is a new read, which fetches again. So this saves
//!   what reading page by page would fetch twice, and hides nothing that a device without it would
//!   fetch for the same bytes.
//! * What is kept belongs to a set of planes; another view of the same window is another one.
//! * What is kept of a block belongs to the entry it was decoded by. So nobody has to forget it
//!   when the block is written.
//! * What is kept of a window belongs to its tensor. Who changes the window forgets it: see
//!   [`super::windows`].

use std::{
    collections::HashMap,
    ops::Range,
    sync::{Arc, Weak},
};

use crate::tensor::Tensor;
use lamina_codec::plane::PlaneMask;
use lamina_store::entry::Entry;

/// What is kept, by the first block of it and the planes that it has.
type Key = (u64, PlaneMask);

/// What words were decoded from.
#[derive(Clone, Debug)]
pub(super) enum DecodedFrom {
    /// A block by itself that has this entry.
    Block(Entry),
    /// A window of this tensor. Another tensor may come to the same place, and its range may be
    /// written between the two.
    Window(Weak<Tensor>),
}

impl DecodedFrom {
    pub(super) fn window(tensor: &Arc<Tensor>) -> Self {
        Self::Window(Arc::downgrade(tensor))
    }
}

impl PartialEq for DecodedFrom {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Block(entry), Self::Block(other)) => entry == other,
            // What is kept keeps the address of a tensor that is gone from being another's.
            (Self::Window(tensor), Self::Window(other)) => tensor.ptr_eq(other),
            _ => false,
        }
    }
}

/// Decoded windows and blocks.
pub(super) struct Decoded {
    kept: HashMap<Key, Kept>,
    bytes: usize,
    most: usize,
    clock: u64,
}

struct Kept {
    words: Arc<Vec<u8>>,
    from: DecodedFrom,
    /// What was given away already, in order, neighbours joined.
    given: Vec<Range<usize>>,
    used: u64,
}

impl Decoded {
    /// A cache of at most `most` bytes.
    pub(super) fn new(most: usize) -> Self {
        Self { kept: HashMap::new(), bytes: 0, most, clock: 0 }
    }

    /// Bytes kept.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The decoded words that begin at `block`, if bytes `range` of them are there and were not
    /// given away, and were decoded from what is there now, `from`.
    pub(super) fn take(
        &mut self,
        block: u64,
        mask: PlaneMask,
        range: &Range<usize>,
        from: &DecodedFrom,
    ) -> Option<Arc<Vec<u8>>> {
        let key = (block, mask);
        let kept = self.kept.get_mut(&key)?;
        let current = kept.from == *from && range.end <= kept.words.len();
        if !current || !give(&mut kept.given, range) {
            self.remove(key);
            return None;
        }
        let words = kept.words.clone();
        self.clock += 1;
        kept.used = self.clock;
        if kept.given.len() == 1 && kept.given[0] == (0..words.len()) {
            self.remove(key);
        }
        Some(words)
    }

    /// Whether any of bytes `range` of the words that begin at `block` was given away.
    pub(super) fn gave(&self, block: u64, mask: PlaneMask, range: &Range<usize>) -> bool {
        let given = self.kept.get(&(block, mask)).map_or(&[][..], |kept| &kept.given);
        given.iter().any(|given| given.start < range.end && range.start < given.end)
    }

    /// Keeps `words`, of which `range` has been given away already, in place of what was kept of
    /// them. Nothing is kept that has nothing left to give or would be all there is room for.
    pub(super) fn keep(
        &mut self,
        block: u64,
        mask: PlaneMask,
        range: Range<usize>,
        words: Arc<Vec<u8>>,
        from: DecodedFrom,
    ) {
        let key = (block, mask);
        self.remove(key);
        if range == (0..words.len()) || words.len() > self.most {
            return;
        }
        while self.bytes + words.len() > self.most {
            let oldest = self.kept.iter().min_by_key(|(_, kept)| kept.used).map(|(key, _)| *key);
            self.remove(oldest.expect("bytes are kept by somebody"));
        }
        self.bytes += words.len();
        self.clock += 1;
        self.kept.insert(key, Kept { words, from, given: vec![range], used: self.clock });
    }

    /// Forgets everything that begins at `block`.
    pub(super) fn forget(&mut self, block: u64) {
        let bytes = &mut self.bytes;
        self.kept.retain(|key, kept| {
            let stays = key.0 != block;
            *bytes -= if stays { 0 } else { kept.words.len() };
            stays
        });
    }

    fn remove(&mut self, key: Key) {
        if let Some(kept) = self.kept.remove(&key) {
            self.bytes -= kept.words.len();
        }
    }
}

/// Adds `range` to what was given, if none of it was.
fn give(given: &mut Vec<Range<usize>>, range: &Range<usize>) -> bool {
    let at = given.partition_point(|before| before.end <= range.start);
    if given.get(at).is_some_and(|next| next.start < range.end) {
        return false;
    }
    let joins_next = given.get(at).is_some_and(|next| next.start == range.end);
    let joins_last = at > 0 && given[at - 1].end == range.start;
    match (joins_last, joins_next) {
        (true, true) => given[at - 1].end = given.remove(at).end,
        (true, false) => given[at - 1].end = range.end,
        (false, true) => given[at].start = range.start,
        (false, false) => given.insert(at, range.clone()),
    }
    true
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_byte_is_given_once(ranges in prop::collection::vec((0_usize..60, 1_usize..20), 0..40)) {
            let (mut given, mut flags) = (Vec::new(), [false; 80]);
            for (start, length) in ranges {
                let range = start..start + length;
                let free = flags[range.clone()].iter().all(|flag| !flag);
                prop_assert_eq!(give(&mut given, &range), free);
                if free {
                    flags[range].fill(true);
                }
                let reported: Vec<usize> = given.iter().cloned().flatten().collect();
                let want: Vec<usize> = (0..80).filter(|at| flags[*at]).collect();
                prop_assert_eq!(reported, want);
                prop_assert!(given.windows(2).all(|pair| pair[0].end < pair[1].start));
            }
        }
    }

    #[test]
    fn what_was_read_or_has_no_room_is_gone() {
        let words = |length| Arc::new(vec![7; length]);
        let all = PlaneMask(u32::MAX);
        let by = |epoch| DecodedFrom::Block(Entry { epoch, place: None });
        let mut decoded = Decoded::new(100);
        decoded.keep(1, all, 0..10, words(40), by(0));
        decoded.keep(2, all, 0..10, words(40), by(0));
        assert!(decoded.take(1, all, &(10..20), &by(0)).is_some());
        // The least recently used one makes room.
        decoded.keep(3, all, 0..10, words(30), by(0));
        assert_eq!(decoded.bytes(), 70);
        assert!(decoded.take(2, all, &(10..20), &by(0)).is_none());
        // What was given is not given again, and is then forgotten.
        assert!(decoded.take(1, all, &(15..25), &by(0)).is_none());
        assert!(decoded.take(1, all, &(30..40), &by(0)).is_none());
        // Read to its end, it is forgotten too.
        assert!(decoded.take(3, all, &(10..30), &by(0)).is_some());
        assert_eq!(decoded.bytes(), 0);
        // Planes are told apart, and a block that changed is not what it was.
        decoded.keep(4, PlaneMask(1), 0..1, words(9), by(0));
        assert!(decoded.take(4, PlaneMask(2), &(1..2), &by(0)).is_none());
        assert!(decoded.take(4, PlaneMask(1), &(1..2), &by(1)).is_none());
        decoded.keep(5, all, 0..5, words(101), by(0));
        decoded.keep(6, all, 0..5, words(5), by(0));
        assert_eq!(decoded.bytes(), 0);
        decoded.keep(7, all, 0..5, words(50), by(0));
        decoded.forget(7);
        assert_eq!(decoded.bytes(), 0);
    }
}
