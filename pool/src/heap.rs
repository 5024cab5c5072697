//! A node's heap: chunks of the pool, each of one class and carved into places of one size.
//!
//! Which chunks are in use stands in the pool's bitmap, whose they are beside it. Which places of a
//! chunk are free only its node knows, in its own memory: whoever recovers the node finds out
//! again, from the table. So nothing is told when a place is taken.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;

use crate::class::{Class, ClassId, OWN, UNTOLD};
use crate::error::PoolError;
use crate::layout::{ALLOC, CLASSES, Layout};
use crate::mem::LINE;
use crate::member::Member;
use crate::mutex::locked;

/// The smallest place.
const SMALLEST: u64 = 64;

/// The chunks of a node.
#[derive(Debug, Default)]
pub(crate) struct Heap {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    chunks: BTreeMap<u32, Chunk>,
    /// Chunks with free places, by class and size.
    open: BTreeMap<(ClassId, u64), BTreeSet<u32>>,
}

#[derive(Debug)]
struct Chunk {
    class: ClassId,
    size: u64,
    run: u32,
    free: Vec<u32>,
    is_free: Vec<bool>,
}

/// What stands of a chunk in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) node: u32,
    pub(crate) incarnation: u32,
    /// What the device was told its bytes are.
    pub(crate) class: ClassId,
    /// Chunks of its run, zero for those behind the first.
    pub(crate) run: u32,
    pub(crate) size: u64,
}

/// The size of the place for so many bytes: a power of two or one and a half, or whole chunks.
pub(crate) fn size_for(length: u64, chunk_bytes: u64) -> Option<u64> {
    if length > chunk_bytes / 2 {
        return length.checked_next_multiple_of(chunk_bytes);
    }
    let power = length.max(SMALLEST).next_power_of_two();
    let half = power / 4 * 3;
    Some(if half >= length && half.is_multiple_of(64) { half } else { power })
}

/// Places of one size in a chunk, or one for a run.
fn places(size: u64, chunk_bytes: u64) -> u32 {
    (chunk_bytes / size).max(1) as u32
}

impl Owner {
    pub(crate) fn load(member: &Member, chunk: u32) -> Result<Self, PoolError> {
        let at = member.layout.chunk(chunk);
        let word = member.lines.word(at)?;
        let size = member.lines.word(at + 8)?;
        Ok(Self {
            node: (word >> 56) as u32,
            incarnation: (word >> 32) as u32 & 0xff_ffff,
            class: ClassId((word >> 24) as u8),
            run: word as u32 & 0xff_ffff,
            size,
        })
    }

    pub(crate) fn store(&self, member: &Member, chunk: u32) -> Result<(), PoolError> {
        let at = member.layout.chunk(chunk);
        let whose = u64::from(self.node) << 56 | u64::from(self.incarnation) << 32;
        let word = whose | u64::from(self.class.0) << 24 | u64::from(self.run);
        member.lines.set(at, word)?;
        member.lines.set(at + 8, self.size)?;
        Ok(())
    }

    /// Whether a run of this size can begin at `chunk`.
    pub(crate) fn is_sound(&self, layout: &Layout, chunk: u32) -> bool {
        let chunk_bytes = layout.geometry.chunk_bytes;
        let carved = self.run == 1
            && (SMALLEST..=chunk_bytes / 2).contains(&self.size)
            && size_for(self.size, chunk_bytes) == Some(self.size);
        let run = self.run >= 1
            && u64::from(self.run).checked_mul(chunk_bytes) == Some(self.size)
            && chunk.checked_add(self.run).is_some_and(|end| end <= layout.geometry.chunks);
        carved || run
    }

    /// The place of a chunk in which a byte lies, if it begins there.
    pub(crate) fn place(&self, layout: &Layout, chunk: u32, at: u64) -> Option<u32> {
        let inside = at.checked_sub(layout.chunk_at(chunk))?;
        let place = u32::try_from(inside / self.size.max(1)).ok()?;
        let fits = place < places(self.size.max(1), layout.geometry.chunk_bytes);
        (inside.is_multiple_of(self.size.max(1)) && fits).then_some(place)
    }

    /// Whether a run of this size can begin at `chunk` and has a place for so many bytes at `at`.
    pub(crate) fn holds(&self, layout: &Layout, chunk: u32, at: u64, length: u64) -> bool {
        self.is_sound(layout, chunk) && length <= self.size && self.place(layout, chunk, at).is_some()
    }

    /// [`Self::holds`] of all that begins in the chunk.
    pub(crate) fn fits(&self, layout: &Layout, chunk: u32, extents: &Extents) -> bool {
        self.is_sound(layout, chunk)
            && extents.iter().all(|(at, length)| self.holds(layout, chunk, *at, *length))
    }

    /// Itself if it fits what begins in its chunk; if not, its words were damaged, and what begins
    /// there says what size and run were. `None` if that says nothing, or two things.
    pub(crate) fn fitted(self, layout: &Layout, chunk: u32, extents: &Extents) -> Option<Self> {
        if self.fits(layout, chunk, extents) {
            return Some(self);
        }
        let chunk_bytes = layout.geometry.chunk_bytes;
        let size = size_for(*extents.values().max()?, chunk_bytes)?;
        let run = u32::try_from(size.div_ceil(chunk_bytes)).ok()?;
        Some(Self { run, size, ..self }).filter(|owner| owner.fits(layout, chunk, extents))
    }
}

/// Where something begins in a chunk, and its bytes.
pub(crate) type Extents = BTreeMap<u64, u64>;

/// Whether a chunk's bit is set, of bits that were consumed.
pub(crate) fn is_taken(member: &Member, chunk: u32) -> Result<bool, PoolError> {
    Ok(member.lines.word(member.layout.bits(chunk))? >> (chunk % 64) & 1 == 1)
}

/// The class of the chunk in which `at` lies, which is in use.
pub(crate) fn class_at(member: &Member, at: u64) -> Result<Option<ClassId>, PoolError> {
    let Some(chunk) = member.layout.chunk_of(at) else { return Ok(None) };
    member.lines.consume(member.layout.chunk(chunk), 16)?;
    Ok(Some(Owner::load(member, chunk)?.class))
}

/// How the class is written of what lies at `at`, which is pinned.
pub(crate) fn written(member: &Member, directory: &[Option<Class>], at: u64) -> Result<String, PoolError> {
    let number = class_at(member, at)?.map_or(0, |class| usize::from(class.0));
    let class = directory.get(number).and_then(Option::as_ref);
    Ok(class.map(ToString::to_string).unwrap_or_default())
}

/// The class of a number, as this node sees the directory; none is the pool's own.
fn class_of(member: &Member, class: ClassId) -> Result<Option<Class>, PoolError> {
    if class == OWN {
        return Ok(None);
    }
    let at = member.layout.class(class.0);
    let damaged = PoolError::Damaged { what: "a class", at };
    if u32::from(class.0) >= CLASSES {
        return Err(damaged);
    }
    member.lines.consume(at, LINE)?;
    let mut line = [0; LINE as usize];
    member.lines.load(at, &mut line)?;
    Class::of_line(&line).ok_or(damaged).map(Some)
}

/// Tells the device what the bytes of free chunks will be.
fn tell(member: &Member, class: ClassId, chunks: &[u32]) -> Result<(), PoolError> {
    let known = class_of(member, class)?;
    for chunk in chunks {
        let range = member.layout.chunk_at(*chunk)..member.layout.chunk_at(*chunk + 1);
        member.host.declare(range, known.as_ref())?;
    }
    Ok(())
}

pub(crate) fn mark(member: &Member, chunk: u32, run: u32, taken: bool) -> Result<(), PoolError> {
    for chunk in chunk..chunk + run {
        let at = member.layout.bits(chunk);
        let bit = 1 << (chunk % 64);
        let word = member.lines.word(at)?;
        member.lines.set(at, if taken { word | bit } else { word & !bit })?;
    }
    let first = member.layout.bits(chunk);
    member.lines.publish(first, member.layout.bits(chunk + run - 1) + 8 - first)?;
    Ok(())
}

impl Heap {
    /// Whether the place at `at` is of this node's heap.
    pub(crate) fn owns(&self, layout: &Layout, at: u64) -> bool {
        layout.chunk_of(at).is_some_and(|chunk| locked(&self.state).chunks.contains_key(&chunk))
    }

    /// Whether `at` lies in a chunk of this node's that is carved so.
    pub(crate) fn has(&self, layout: &Layout, at: u64, class: ClassId, size: u64) -> bool {
        let state = locked(&self.state);
        let chunk = layout.chunk_of(at).and_then(|chunk| state.chunks.get(&chunk));
        chunk.is_some_and(|chunk| (chunk.class, chunk.size) == (class, size))
    }

    /// Whether a place of this class and size is free in the chunks that the node has.
    pub(crate) fn has_free(&self, class: ClassId, size: u64) -> bool {
        locked(&self.state).open.get(&(class, size)).is_some_and(|open| !open.is_empty())
    }

    /// A place for so many bytes of a class, of the chunks that the node has.
    pub(crate) fn take(&self, layout: &Layout, class: ClassId, size: u64) -> Option<u64> {
        let mut state = locked(&self.state);
        let number = *state.open.get(&(class, size))?.first()?;
        let chunk = state.chunks.get_mut(&number)?;
        let place = chunk.free.pop()?;
        chunk.is_free[place as usize] = false;
        if chunk.free.is_empty()
            && let Some(open) = state.open.get_mut(&(class, size))
        {
            open.remove(&number);
        }
        Some(layout.chunk_at(number) + u64::from(place) * size)
    }

    /// Takes chunks from the pool for places of a class and size. Whether there were any.
    pub(crate) fn grow(&self, member: &Member, class: ClassId, size: u64) -> Result<bool, PoolError> {
        let layout = &member.layout;
        let Ok(run) = u32::try_from(size.div_ceil(layout.geometry.chunk_bytes)) else { return Ok(false) };
        let held = member.acquire(ALLOC)?;
        let (first, length) = layout.all_bits();
        member.lines.consume(first, length)?;
        let (mut begin, mut found) = (0, None);
        for chunk in 0..layout.geometry.chunks {
            if is_taken(member, chunk)? {
                begin = chunk + 1;
            } else if chunk + 1 - begin == run {
                found = Some(begin);
                break;
            }
        }
        let Some(chunk) = found else { return held.release().map(|()| false) };
        // First whose they are, which means nothing yet, then that they are taken.
        let last = layout.chunk(chunk + run - 1) + 16;
        member.lines.consume(layout.chunk(chunk), last - layout.chunk(chunk))?;
        let mut others = Vec::new();
        for chunk in chunk..chunk + run {
            if Owner::load(member, chunk)?.class != class {
                others.push(chunk);
            }
        }
        let owned = |class| {
            (chunk..chunk + run).enumerate().try_for_each(|(index, chunk)| {
                let run = if index == 0 { run } else { 0 };
                let (node, incarnation) = (member.node, member.incarnation);
                Owner { node, incarnation, class, run, size }.store(member, chunk)
            })?;
            Ok::<_, PoolError>(member.lines.publish(layout.chunk(chunk), last - layout.chunk(chunk))?)
        };
        let mut said = class;
        if !others.is_empty() {
            // Whoever dies from here on leaves chunks of which nobody believes what they are.
            owned(UNTOLD)?;
            match tell(member, class, &others) {
                // What is the pool's own may lie in a chunk that was told to be something else.
                Err(PoolError::Declare(_)) if class == OWN => said = UNTOLD,
                told => told?,
            }
        }
        owned(said)?;
        mark(member, chunk, run, true)?;
        let owner = Owner { node: member.node, incarnation: member.incarnation, class, run, size };
        self.add(layout, chunk, owner, &BTreeSet::new());
        held.release()?;
        Ok(true)
    }

    fn add(&self, layout: &Layout, chunk: u32, owner: Owner, used: &BTreeSet<u32>) {
        let Owner { class, run, size, .. } = owner;
        let many = places(size, layout.geometry.chunk_bytes);
        let is_free: Vec<bool> = (0..many).map(|place| !used.contains(&place)).collect();
        let free: Vec<u32> = (0..many).rev().filter(|place| is_free[*place as usize]).collect();
        let mut state = locked(&self.state);
        if !free.is_empty() {
            state.open.entry((class, size)).or_default().insert(chunk);
        }
        state.chunks.insert(chunk, Chunk { class, size, run, free, is_free });
    }

    /// Takes a dead node's chunk over, with the places that are in use: all that begins there,
    /// which the owner fits. Lock 0 is held, and bits and owners are consumed.
    pub(crate) fn adopt(
        &self,
        member: &Member,
        chunk: u32,
        owner: Owner,
        extents: &Extents,
    ) -> Result<(), PoolError> {
        let used = extents.keys().filter_map(|at| owner.place(&member.layout, chunk, *at)).collect();
        for number in chunk..chunk + owner.run {
            let class = Owner::load(member, number)?.class;
            let run = if number == chunk { owner.run } else { 0 };
            let (node, incarnation) = (member.node, member.incarnation);
            Owner { node, incarnation, class, run, ..owner }.store(member, number)?;
        }
        // Giving the lock back completes it, and nobody asks whose a chunk is before the dead node
        // is said to be recovered.
        member.lines.flush(member.layout.chunk(chunk), u64::from(owner.run) * 16)?;
        self.add(&member.layout, chunk, owner, &used);
        Ok(())
    }

    /// Gives a place back. An empty chunk goes to the pool if there are other places of its class
    /// and size, or it is a run.
    pub(crate) fn give(&self, member: &Member, at: u64) -> Result<(), PoolError> {
        let Some(number) = member.layout.chunk_of(at) else { return Ok(()) };
        let mut state = locked(&self.state);
        let others = |state: &State, kind| state.open.get(&kind).is_some_and(|open| open.len() > 1);
        let Some(chunk) = state.chunks.get_mut(&number) else { return Ok(()) };
        let (kind, size, run) = ((chunk.class, chunk.size), chunk.size, chunk.run);
        let place = ((at - member.layout.chunk_at(number)) / size) as u32;
        match chunk.is_free.get_mut(place as usize) {
            Some(free) if !*free => *free = true,
            _ => return Err(PoolError::Damaged { what: "a place that is given back twice", at }),
        }
        chunk.free.push(place);
        let empty = chunk.free.len() == chunk.is_free.len();
        state.open.entry(kind).or_default().insert(number);
        let is_run = size >= member.layout.geometry.chunk_bytes;
        if empty && (is_run || others(&state, kind)) {
            Self::forget(&mut state, number);
            drop(state);
            return Self::give_chunk(member, number, run);
        }
        Ok(())
    }

    /// Gives all empty chunks to the pool. Whether there were any.
    pub(crate) fn shrink(&self, member: &Member) -> Result<bool, PoolError> {
        let empty: Vec<(u32, u32)> = {
            let mut state = locked(&self.state);
            let is_empty = |chunk: &Chunk| chunk.free.len() == chunk.is_free.len();
            let empty: Vec<_> = state
                .chunks
                .iter()
                .filter(|(_, chunk)| is_empty(chunk))
                .map(|(number, chunk)| (*number, chunk.run))
                .collect();
            for (number, _) in &empty {
                Self::forget(&mut state, *number);
            }
            empty
        };
        for (chunk, run) in &empty {
            Self::give_chunk(member, *chunk, *run)?;
        }
        Ok(!empty.is_empty())
    }

    fn forget(state: &mut State, number: u32) {
        if let Some(chunk) = state.chunks.remove(&number)
            && let Some(open) = state.open.get_mut(&(chunk.class, chunk.size))
        {
            open.remove(&number);
        }
    }

    fn give_chunk(member: &Member, chunk: u32, run: u32) -> Result<(), PoolError> {
        let held = member.acquire(ALLOC)?;
        let first = member.layout.bits(chunk);
        member.lines.consume(first, member.layout.bits(chunk + run - 1) + 8 - first)?;
        mark(member, chunk, run, false)?;
        held.release()
    }

    /// What stands in the pool of a chunk of this heap, but for its class.
    pub(crate) fn owner(&self, member: &Member, number: u32) -> Option<Owner> {
        let state = locked(&self.state);
        let (first, chunk) = state.chunks.range(..=number).next_back()?;
        let run = if *first == number { chunk.run } else { 0 };
        let (node, incarnation) = (member.node, member.incarnation);
        let owner = Owner { node, incarnation, class: chunk.class, run, size: chunk.size };
        (number - first < chunk.run).then_some(owner)
    }

    /// Chunks of the heap and their places in use.
    pub(crate) fn used(&self, layout: &Layout) -> BTreeSet<u64> {
        let state = locked(&self.state);
        let of = |(number, chunk): (&u32, &Chunk)| {
            let begin = layout.chunk_at(*number);
            let used = |(place, free): (usize, &bool)| (!free).then_some(begin + place as u64 * chunk.size);
            chunk.is_free.iter().enumerate().filter_map(used).collect::<Vec<_>>()
        };
        state.chunks.iter().flat_map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_little_larger_than_what_it_holds() {
        let chunk = 2 << 20;
        for length in [0, 1, 64, 65, 96, 97, 128, 129, 193, 1000, 65_536, 98_304, 98_305, 1 << 20] {
            let size = size_for(length, chunk).unwrap();
            assert!(size >= length && size.is_multiple_of(64), "{length}: {size}");
            assert!(length < 128 || size * 2 <= length * 3, "{length}: {size}");
            assert_eq!(size_for(size, chunk), Some(size));
        }
        assert_eq!(size_for(96, chunk), Some(128), "lines are whole");
        assert_eq!(size_for(160, chunk), Some(192));
        assert_eq!(size_for((1 << 20) + 1, chunk), Some(2 << 20));
        assert_eq!(size_for((2 << 20) + 1, chunk), Some(4 << 20));
        assert_eq!(size_for(u64::MAX, chunk), None);
    }
}
