//! The table: groups of eight slots, each a tag in the group's first line and an entry in a line of
//! its own.
//!
//! A tag is one word, so each change of a slot's state is one store:
//!
//! empty → reserved by a writer → ready (a block, an object, or a block with a name) → evicting →
//! empty
//!
//! The entry is stored before its tag says so, and never changes while the tag does not. Who reads
//! pins the slot in a line of its node's, then looks at the tag again. The owner of the place makes
//! an evicted slot empty when it sees no pin, after it saw the tag evicting. One of the two sees
//! the other.

use std::sync::Mutex;

use crate::error::PoolError;
use crate::heap::Heap;
use crate::key::Key;
use crate::layout::{PINS, RING, SLOTS, Slot, is_sealed, seal, word};
use crate::mem::LINE;
use crate::member::{Member, Wait};
use crate::mutex::locked;

/// A slot's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Empty,
    Reserved,
    Block,
    Object,
    Evicting,
    /// A block that has a name.
    Named,
}

impl State {
    pub(crate) fn is_ready(self) -> bool {
        matches!(self, Self::Block | Self::Object | Self::Named)
    }

    /// Whether it gives way when space is wanted.
    pub(crate) fn is_block(self) -> bool {
        matches!(self, Self::Block | Self::Named)
    }

    /// Whether what is ready has a name.
    pub(crate) fn has_name(self) -> bool {
        matches!(self, Self::Object | Self::Named)
    }
}

/// A slot's tag: 48 bits of the key, 8 of the generation, the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tag(pub(crate) u64);

impl Tag {
    pub(crate) fn new(entry: &Entry, state: State) -> Self {
        Self(entry.key.short() << 16 | u64::from(entry.generation & 0xff) << 8 | state as u64)
    }

    /// The state, `None` if there is no such.
    pub(crate) fn state(self) -> Option<State> {
        match self.0 & 0xff {
            0 if self.0 == 0 => Some(State::Empty),
            1 => Some(State::Reserved),
            2 => Some(State::Block),
            3 => Some(State::Object),
            4 => Some(State::Evicting),
            5 => Some(State::Named),
            _ => None,
        }
    }

    pub(crate) fn with(self, state: State) -> Self {
        Self(self.0 & !0xff | state as u64)
    }

    pub(crate) fn is_ready(self) -> bool {
        self.state().is_some_and(State::is_ready)
    }

    fn short(self) -> u64 {
        self.0 >> 16
    }

    /// Whether it is ready, and a key's as far as a tag tells.
    pub(crate) fn is_ready_of(self, key: &Key) -> bool {
        self.is_ready() && self.short() == key.short()
    }

    pub(crate) fn is_block(self) -> bool {
        self.state().is_some_and(State::is_block)
    }
}

/// What a slot holds. One line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) key: Key,
    pub(crate) at: u64,
    pub(crate) length: u64,
    pub(crate) generation: u32,
    /// The check of the bytes.
    pub(crate) crc: u32,
    pub(crate) writer: u32,
    pub(crate) incarnation: u32,
    pub(crate) name_at: u64,
    pub(crate) name_length: u32,
}

impl Entry {
    fn to_line(&self) -> [u8; LINE as usize] {
        let mut line = [0; LINE as usize];
        line[..16].copy_from_slice(&self.key.0);
        let words = [
            self.at,
            self.length,
            u64::from(self.generation) << 32 | u64::from(self.crc),
            u64::from(self.writer) << 56 | u64::from(self.incarnation) << 32 | u64::from(self.name_length),
            self.name_at,
        ];
        for (index, word) in words.into_iter().enumerate() {
            line[16 + 8 * index..24 + 8 * index].copy_from_slice(&word.to_le_bytes());
        }
        seal(&mut line);
        line
    }

    fn of_line(line: &[u8; LINE as usize]) -> Option<Self> {
        if !is_sealed(line) {
            return None;
        }
        let mut key = [0; 16];
        key.copy_from_slice(&line[..16]);
        let writer = word(line, 5);
        Some(Self {
            key: Key(key),
            at: word(line, 2),
            length: word(line, 3),
            generation: (word(line, 4) >> 32) as u32,
            crc: word(line, 4) as u32,
            writer: (writer >> 56) as u32,
            incarnation: (writer >> 32) as u32 & 0xff_ffff,
            name_at: word(line, 6),
            name_length: writer as u32,
        })
    }

    /// Whether all it points to lies in the chunks.
    pub(crate) fn is_inside(&self, member: &Member) -> bool {
        let holds = |at, length| length == 0 || member.layout.holds(at, length);
        holds(self.at, self.length) && holds(self.name_at, u64::from(self.name_length))
    }

    /// Where it has places, and how many bytes lie in each.
    pub(crate) fn extents(&self) -> impl Iterator<Item = (u64, u64)> {
        let data = (self.at, self.length);
        let name = (self.name_at, u64::from(self.name_length));
        [data, name].into_iter().filter(|(_, length)| *length > 0)
    }

    /// Where it has places.
    pub(crate) fn places(&self) -> impl Iterator<Item = u64> {
        self.extents().map(|(at, _)| at)
    }

    pub(crate) fn store(&self, member: &Member, slot: Slot) -> Result<u64, PoolError> {
        let at = member.layout.entry(slot);
        member.lines.store(at, &self.to_line())?;
        Ok(at)
    }

    /// The entry of a slot as this node sees it, if it checks, is the tag's, and lies inside.
    pub(crate) fn load(member: &Member, slot: Slot, tag: Tag) -> Result<Option<Self>, PoolError> {
        Ok(Self::last(member, slot)?.filter(|entry| {
            entry.generation & 0xff == (tag.0 >> 8 & 0xff) as u32
                && entry.key.short() == tag.short()
                && entry.is_inside(member)
        }))
    }

    /// The entry of a slot, whatever its tag says.
    pub(crate) fn last(member: &Member, slot: Slot) -> Result<Option<Self>, PoolError> {
        let mut line = [0; LINE as usize];
        member.lines.load(member.layout.entry(slot), &mut line)?;
        Ok(Self::of_line(&line))
    }
}

/// The group of a key.
pub(crate) fn group(member: &Member, key: &Key) -> u32 {
    (key.place() % u64::from(member.layout.geometry.groups)) as u32
}

/// A group's tags, of a line that was consumed.
pub(crate) fn tags(member: &Member, group: u32) -> Result<[Tag; SLOTS as usize], PoolError> {
    let mut line = [0; LINE as usize];
    member.lines.load(member.layout.tags(group), &mut line)?;
    Ok(std::array::from_fn(|index| Tag(word(&line, index))))
}

/// Slots of a group whose tags are of `key` and in a state that `wanted` wants.
pub(crate) fn matching(
    tags: &[Tag; SLOTS as usize],
    group: u32,
    key: &Key,
    wanted: impl Fn(State) -> bool,
) -> impl Iterator<Item = (Slot, Tag)> {
    let short = key.short();
    tags.iter().enumerate().filter_map(move |(index, tag)| {
        let is = tag.short() == short && tag.state().is_some_and(&wanted);
        is.then_some((Slot { group, index: index as u32 }, *tag))
    })
}

/// What a key has in the table.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// The slot in which it is ready.
    pub(crate) whole: Option<(Slot, Tag)>,
    /// A slot whose tag is the key's, and whose entry does not check.
    pub(crate) damaged: Option<(Slot, Tag)>,
}

/// Looks for what `key` has.
pub(crate) fn seek(member: &Member, key: &Key) -> Result<Found, PoolError> {
    let group = group(member, key);
    let mut wait = Wait::default();
    loop {
        member.lines.consume(member.layout.tags(group), LINE)?;
        let seen = tags(member, group)?;
        let mut found = Found::default();
        for (slot, tag) in matching(&seen, group, key, State::is_ready) {
            member.lines.consume(member.layout.entry(slot), LINE)?;
            match Entry::load(member, slot, tag)? {
                Some(entry) if entry.key == *key => found.whole = found.whole.or(Some((slot, tag))),
                Some(_) => {}
                None => found.damaged = Some((slot, tag)),
            }
        }
        if found.whole.is_some() {
            return Ok(found);
        }
        // Words that are the same twice were all there at one moment between.
        if tags(member, group)? == seen {
            if found.damaged.is_none() {
                return Ok(found);
            }
            member.lines.consume(member.layout.tags(group), LINE)?;
            if tags(member, group)? == seen {
                return Ok(found);
            }
        }
        member.wait(&mut wait, "a group that does not change")?;
    }
}

/// The slot in which `key` is ready. A block whose entry does not check is dropped, and is not
/// there.
pub(crate) fn find(member: &Member, key: &Key) -> Result<Option<(Slot, Tag)>, PoolError> {
    loop {
        let found = seek(member, key)?;
        let (None, Some((slot, tag))) = (found.whole, found.damaged) else { return Ok(found.whole) };
        if !tag.is_block() {
            return Err(PoolError::Damaged { what: "an entry", at: member.layout.entry(slot) });
        }
        discard_blocks(member, key, slot)?;
    }
}

/// [`find`] for who reads, who is told of a block that is dropped.
pub(crate) fn find_to_read(member: &Member, key: &Key) -> Result<Option<(Slot, Tag)>, PoolError> {
    loop {
        let found = seek(member, key)?;
        let (None, Some((slot, tag))) = (found.whole, found.damaged) else { return Ok(found.whole) };
        // If there is none any more, another dropped it, and may have stored it anew.
        if !tag.is_block() || discard_blocks(member, key, slot)? {
            return Err(PoolError::Damaged { what: "an entry", at: member.layout.entry(slot) });
        }
    }
}

/// Drops the blocks of a key whose entries do not check: as long as they are there nobody stores
/// it anew. Whether there were any. Objects stay for `check`.
fn discard_blocks(member: &Member, key: &Key, slot: Slot) -> Result<bool, PoolError> {
    discard(member, slot.group, |tag| tag.is_block() && tag.is_ready_of(key))
}

/// Empties slots of a group whose entries do not check, of those that `is_wanted`. Whether there
/// were any. Where their places are nobody can say: these are free once their chunk's owner has
/// gone, or checks.
pub(crate) fn discard(
    member: &Member,
    group: u32,
    is_wanted: impl Fn(Tag) -> bool,
) -> Result<bool, PoolError> {
    let held = member.acquire(member.layout.lock_of(group))?;
    member.lines.consume(member.layout.tags(group), LINE)?;
    let mut any = false;
    for (index, tag) in tags(member, group)?.into_iter().enumerate().filter(|(_, tag)| is_wanted(*tag)) {
        let slot = Slot { group, index: index as u32 };
        member.lines.consume(member.layout.entry(slot), LINE)?;
        if Entry::load(member, slot, tag)?.is_none() {
            member.lines.post(member.layout.tag(slot), 0)?;
            any = true;
        }
    }
    held.release()?;
    Ok(any)
}

/// A node's pins.
#[derive(Debug)]
pub(crate) struct Pins {
    free: Mutex<Vec<usize>>,
}

impl Default for Pins {
    fn default() -> Self {
        Self { free: Mutex::new((0..PINS).rev().collect()) }
    }
}

/// A slot that keeps what it holds while this lives.
pub(crate) struct Pin<'p> {
    member: &'p Member,
    pins: &'p Pins,
    number: usize,
    pub(crate) slot: Slot,
    pub(crate) tag: Tag,
    pub(crate) entry: Entry,
}

impl Pins {
    /// Pins a slot, if its tag is still `tag`.
    pub(crate) fn pin<'p>(
        &'p self,
        member: &'p Member,
        slot: Slot,
        tag: Tag,
    ) -> Result<Option<Pin<'p>>, PoolError> {
        let mut wait = Wait::default();
        let number = loop {
            if let Some(number) = locked(&self.free).pop() {
                break number;
            }
            member.wait(&mut wait, "a pin")?;
        };
        let none = Entry {
            key: Key([0; 16]),
            at: 0,
            length: 0,
            generation: 0,
            crc: 0,
            writer: 0,
            incarnation: 0,
            name_at: 0,
            name_length: 0,
        };
        let mut pin = Pin { member, pins: self, number, slot, tag, entry: none };
        member.lines.post(member.layout.hazard(member.node, number), slot.number() + 1)?;
        member.lines.told()?;
        member.lines.invalidate(member.layout.tag(slot), 8)?;
        member.lines.invalidate(member.layout.entry(slot), LINE)?;
        member.lines.settle()?;
        if member.lines.word(member.layout.tag(slot))? != tag.0 {
            return Ok(None);
        }
        let Some(entry) = Entry::load(member, slot, tag)? else { return Ok(None) };
        pin.entry = entry;
        Ok(Some(pin))
    }
}

impl Pin<'_> {
    /// Lets go of the slot before this ends.
    pub(crate) fn let_go(&self) {
        let at = self.member.layout.hazard(self.member.node, self.number);
        // If that fails the memory is gone. Others need not see it before this node's next fence.
        let _ = self.member.lines.set(at, 0);
        let _ = self.member.lines.flush(at, 8);
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.let_go();
        locked(&self.pins.free).push(self.number);
    }
}

/// Whether any node has a slot pinned. The pins of the dead are cleared.
pub(crate) fn is_pinned(member: &Member, slot: Slot) -> Result<bool, PoolError> {
    let (first, length) = member.layout.all_hazards();
    member.lines.told()?;
    member.lines.consume(first, length)?;
    let wanted = (slot.number() + 1).to_le_bytes();
    let mut pins = [0; 8 * PINS];
    for node in 0..member.layout.geometry.nodes {
        if !member.may_pin(node)? {
            continue;
        }
        member.lines.load(member.layout.hazard(node, 0), &mut pins)?;
        if pins.as_chunks::<8>().0.contains(&wanted) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Makes an evicted slot empty, if its places are this node's and nobody has it pinned, and gives
/// them back. Whether it did.
pub(crate) fn reclaim(member: &Member, heap: &Heap, slot: Slot) -> Result<bool, PoolError> {
    let held = member.acquire(member.layout.lock_of(slot.group))?;
    member.lines.invalidate(member.layout.tag(slot), 8)?;
    member.lines.invalidate(member.layout.entry(slot), LINE)?;
    member.lines.settle()?;
    let tag = Tag(member.lines.word(member.layout.tag(slot))?);
    if tag.state() != Some(State::Evicting) {
        return held.release().map(|()| false);
    }
    let Some(entry) = Entry::load(member, slot, tag)? else {
        // What cannot be read has no places that anybody could find.
        member.lines.post(member.layout.tag(slot), 0)?;
        return held.release().map(|()| true);
    };
    let own = entry.places().all(|at| heap.owns(&member.layout, at));
    if !own || is_pinned(member, slot)? {
        return held.release().map(|()| false);
    }
    member.lines.post(member.layout.tag(slot), 0)?;
    held.release()?;
    for at in entry.places() {
        heap.give(member, at)?;
    }
    Ok(true)
}

/// Begins to evict a slot, if its tag is still `tag`, and ends it if the places are this node's;
/// else tells the owner. Whether it was begun.
pub(crate) fn evict(member: &Member, heap: &Heap, slot: Slot, tag: Tag) -> Result<bool, PoolError> {
    let held = member.acquire(member.layout.lock_of(slot.group))?;
    member.lines.consume(member.layout.tag(slot), 8)?;
    if member.lines.word(member.layout.tag(slot))? != tag.0 {
        return held.release().map(|()| false);
    }
    member.lines.post(member.layout.tag(slot), tag.with(State::Evicting).0)?;
    held.release()?;
    settle(member, heap, slot)?;
    Ok(true)
}

/// Brings an evicted slot to its end, or its owner to do so.
pub(crate) fn settle(member: &Member, heap: &Heap, slot: Slot) -> Result<(), PoolError> {
    if !reclaim(member, heap, slot)? {
        tell_owner(member, slot)?;
    }
    Ok(())
}

/// Tells the owner of a slot's places that it is evicted. A hint: a ring may be full, and an owner
/// dead. What is not told is found by a sweep.
fn tell_owner(member: &Member, slot: Slot) -> Result<(), PoolError> {
    let Some(entry) = Entry::last(member, slot)? else { return Ok(()) };
    let Some(chunk) = entry.places().next().and_then(|at| member.layout.chunk_of(at)) else { return Ok(()) };
    member.lines.consume(member.layout.chunk(chunk), 16)?;
    let owner = crate::heap::Owner::load(member, chunk)?.node;
    if owner >= member.layout.geometry.nodes || owner == member.node {
        return Ok(());
    }
    let _one = locked(&member.doorbell);
    let tail = member.lines.word(member.layout.ring_tail(member.node, owner))?;
    let head = member.lines.fresh(member.layout.ring_head(member.node, owner))?;
    if tail.wrapping_sub(head) < RING {
        member.lines.post(member.layout.ring_entry(member.node, owner, tail), slot.number())?;
        member.lines.post(member.layout.ring_tail(member.node, owner), tail.wrapping_add(1))?;
    }
    Ok(())
}

/// Reclaims what others told this node of. Whether there was anything.
pub(crate) fn drain(member: &Member, heap: &Heap) -> Result<bool, PoolError> {
    let mut any = false;
    for from in (0..member.layout.geometry.nodes).filter(|from| *from != member.node) {
        let tail = member.lines.fresh(member.layout.ring_tail(from, member.node))?;
        let at = member.layout.ring_head(from, member.node);
        let head = member.lines.word(at)?;
        // Never more than a ring holds, whatever the tail says.
        let many = tail.wrapping_sub(head).min(RING);
        if many == 0 {
            continue;
        }
        for number in head..head.saturating_add(many) {
            let slot = member.lines.fresh(member.layout.ring_entry(from, member.node, number))?;
            if let Some(slot) = member.layout.slot(slot) {
                any |= reclaim(member, heap, slot)?;
            }
        }
        member.lines.post(at, tail)?;
    }
    Ok(any)
}

/// Reclaims all evicted slots whose places are this node's. Whether there were any.
pub(crate) fn sweep(member: &Member, heap: &Heap) -> Result<bool, PoolError> {
    let mut any = false;
    for group in 0..member.layout.geometry.groups {
        member.lines.consume(member.layout.tags(group), LINE)?;
        for (index, tag) in tags(member, group)?.into_iter().enumerate() {
            if tag.state() == Some(State::Evicting) {
                any |= reclaim(member, heap, Slot { group, index: index as u32 })?;
            }
        }
    }
    Ok(any)
}
