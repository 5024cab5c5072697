//! Who owns a block, in constant time: a tree of chunk words.
//!
//! The rules:
//! * A *chunk* is 2 MiB. Its word says that nobody owns it, who owns all of it, or which extents of
//!   it are whose.
//! * Words lie in nodes of [`FANOUT`], these in nodes again. A node whose words all say the same
//!   owner is one word itself. So a range of any length costs a few words.
//! * A tree is cloned in one step. What changes in a clone is copied on the way to it, and nothing
//!   else: both stay what they are.

use std::{ops::Range, sync::Arc};

use lamina_codec::BLOCK_BYTES;

/// Blocks of a chunk of 2 MiB.
const CHUNK_BLOCKS: u64 = (2 << 20) / BLOCK_BYTES as u64;
/// Words of a node.
const FANOUT: usize = 1 << FANOUT_BITS;
const FANOUT_BITS: u32 = 6;

/// Owners of blocks.
pub(crate) struct Chunks<T> {
    root: Word<T>,
    /// Nodes between the root's word and a chunk's.
    height: u32,
}

/// What is said of a chunk, or of as many as a node has.
enum Word<T> {
    /// Nobody owns any of it.
    Free,
    /// Somebody owns all of it.
    Whole(Arc<T>),
    /// Of one chunk: these parts of it are owned, in order.
    Parts(Arc<Vec<Extent<T>>>),
    /// Of more than one chunk.
    Node(Arc<Node<T>>),
}

struct Node<T>([Word<T>; FANOUT]);

/// Blocks of a chunk, counted from its first.
struct Extent<T> {
    start: u16,
    end: u16,
    owner: Arc<T>,
}

impl<T> Clone for Chunks<T> {
    fn clone(&self) -> Self {
        Self { root: self.root.clone(), height: self.height }
    }
}

impl<T> Clone for Word<T> {
    fn clone(&self) -> Self {
        match self {
            Self::Free => Self::Free,
            Self::Whole(owner) => Self::Whole(Arc::clone(owner)),
            Self::Parts(parts) => Self::Parts(Arc::clone(parts)),
            Self::Node(node) => Self::Node(Arc::clone(node)),
        }
    }
}

impl<T> Clone for Node<T> {
    fn clone(&self) -> Self {
        Self(self.0.each_ref().map(Word::clone))
    }
}

impl<T> Clone for Extent<T> {
    fn clone(&self) -> Self {
        Self { start: self.start, end: self.end, owner: Arc::clone(&self.owner) }
    }
}

impl<T> Chunks<T> {
    /// Of so many blocks, which nobody owns.
    pub(crate) fn new(blocks: u64) -> Self {
        let mut height = 0;
        while bits(height) < u64::BITS && blocks > 1 << bits(height) {
            height += 1;
        }
        Self { root: Word::Free, height }
    }

    /// The owner of a block.
    pub(crate) fn owner(&self, block: u64) -> Option<&Arc<T>> {
        self.look(block).0
    }

    /// The owner of a block, and a block behind it up to which all have the same.
    pub(crate) fn look(&self, block: u64) -> (Option<&Arc<T>>, u64) {
        let (mut word, mut level) = (&self.root, self.height);
        if block >> bits(level) != 0 {
            return (None, u64::MAX);
        }
        loop {
            let end = ((block >> bits(level)) + 1) << bits(level);
            match word {
                Word::Free => return (None, end),
                Word::Whole(owner) => return (Some(owner), end),
                Word::Node(node) => {
                    level -= 1;
                    word = &node.0[place(block, level)];
                }
                Word::Parts(parts) => {
                    let start = end - CHUNK_BLOCKS;
                    let inside = inside(block - start);
                    let at = parts.partition_point(|part| part.end <= inside);
                    return match parts.get(at) {
                        None => (None, end),
                        Some(part) if inside < part.start => (None, start + u64::from(part.start)),
                        Some(part) => (Some(&part.owner), start + u64::from(part.end)),
                    };
                }
            }
        }
    }

    /// Says whose these blocks are from now on.
    pub(crate) fn set(&mut self, blocks: &Range<u64>, owner: Option<&Arc<T>>) {
        if !blocks.is_empty() {
            set(&mut self.root, self.height, 0, blocks, owner);
        }
    }
}

/// Blocks of a word at this level, as a power of two.
const fn bits(level: u32) -> u32 {
    CHUNK_BLOCKS.trailing_zeros() + level * FANOUT_BITS
}

/// Where in a node the word at `level` of a block is.
fn place(block: u64, level: u32) -> usize {
    usize::try_from(block >> bits(level)).unwrap_or(usize::MAX) % FANOUT
}

/// A block counted from its chunk's first.
fn inside(block: u64) -> u16 {
    u16::try_from(block).expect("at most a chunk's blocks")
}

/// Has `word`, at `level` and of the blocks from `first` on, say whose `blocks` are. At least one
/// of them is its own.
fn set<T>(word: &mut Word<T>, level: u32, first: u64, blocks: &Range<u64>, owner: Option<&Arc<T>>) {
    let end = first + (1 << bits(level));
    if blocks.start <= first && end <= blocks.end {
        *word = owner.map_or(Word::Free, |owner| Word::Whole(Arc::clone(owner)));
        return;
    }
    let (from, to) = (blocks.start.max(first), blocks.end.min(end));
    if level == 0 {
        set_parts(word, inside(from - first)..inside(to - first), owner);
        return;
    }
    if !matches!(word, Word::Node(_)) {
        // A free word or a whole one, which all words below then are.
        *word = Word::Node(Arc::new(Node(std::array::from_fn(|_| word.clone()))));
    }
    let Word::Node(node) = word else { return };
    let words = &mut Arc::make_mut(node).0;
    let below = level - 1;
    let (start, last) = (place(from, below), place(to - 1, below));
    for (at, word) in words.iter_mut().enumerate().take(last + 1).skip(start) {
        set(word, below, first + ((at as u64) << bits(below)), blocks, owner);
    }
    if words.iter().all(|word| matches!(word, Word::Free)) {
        *word = Word::Free;
    }
}

/// Likewise of a chunk's word, whose blocks are `blocks` only in part.
fn set_parts<T>(word: &mut Word<T>, blocks: Range<u16>, owner: Option<&Arc<T>>) {
    if !matches!(word, Word::Parts(_)) {
        let mut parts = Vec::new();
        if let Word::Whole(owner) = word {
            parts.push(Extent { start: 0, end: inside(CHUNK_BLOCKS), owner: Arc::clone(owner) });
        }
        *word = Word::Parts(Arc::new(parts));
    }
    let Word::Parts(parts) = word else { return };
    let parts = Arc::make_mut(parts);
    let from = parts.partition_point(|part| part.end <= blocks.start);
    let to = parts.partition_point(|part| part.start < blocks.end);
    // What the first and the last of those in the way keep.
    let before = parts[from..to].first().filter(|part| part.start < blocks.start).cloned();
    let behind = parts[from..to].last().filter(|part| blocks.end < part.end).cloned();
    let before = before.map(|part| Extent { end: blocks.start, ..part });
    let behind = behind.map(|part| Extent { start: blocks.end, ..part });
    let own = owner.map(|owner| Extent { start: blocks.start, end: blocks.end, owner: Arc::clone(owner) });
    parts.splice(from..to, before.into_iter().chain(own).chain(behind));
    if parts.is_empty() {
        *word = Word::Free;
    }
}

#[cfg(test)]
mod tests;
