//! A pool as a node has it: objects by name, blocks by key.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use serde::Serialize;

use crate::class::{ClassId, Share};
use crate::counts::{Counts, NodeCounts, Occupancy, Shares, Telling};
use crate::error::PoolError;
use crate::heap::{Heap, Owner, is_taken, size_for, written};
use crate::host::Host;
use crate::key::Key;
use crate::layout::{Geometry, Layout, SLOTS, Slot};
use crate::mem::{CxlMem, LINE, Lines};
use crate::member::{Dead, Member, Wait, interval};
use crate::mutex::{locked, try_locked};
use crate::recovery::recover;
use crate::table::{Entry, Pin, Pins, State, Tag, discard, drain, evict, find_to_read, seek, sweep, tags};

/// Bytes that an object's name may have.
pub(crate) const MAX_NAME: usize = 1024;
/// Touches that are kept before they are told.
const TOUCHES: usize = 64;
/// Groups that are looked at for something to evict.
const LOOKED_AT: u64 = 256;
/// Turns of a wait for others' space between two evictions.
const PATIENT_TURNS: u32 = 256;

/// A pool, as one node has it.
pub struct Pool {
    pub(crate) member: Member,
    pub(crate) heap: Heap,
    pub(crate) pins: Pins,
    touches: Mutex<Touches>,
    recovering: Mutex<()>,
    hand: AtomicU64,
    pub(crate) counts: Counts,
    telling: Mutex<Telling>,
    /// Held by the thread that asks for the index.
    pub(crate) asking: Mutex<()>,
    /// The keys that threads of this node store now.
    pub(crate) storing: Mutex<BTreeSet<Key>>,
}

#[derive(Debug, Default)]
struct Touches {
    slots: Vec<Slot>,
    clock: u64,
}

/// What a pool holds, and what this node did with it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Bytes of all chunks.
    pub bytes: u64,
    /// Bytes of the chunks that are in use.
    pub taken_bytes: u64,
    /// Bytes of the objects and blocks that are ready.
    pub ready_bytes: u64,
    /// Slots of the table.
    pub slots: u64,
    /// Slots that a writer fills.
    pub reserved: u64,
    /// Blocks that are ready.
    pub blocks: u64,
    /// Objects that are ready.
    pub objects: u64,
    /// Slots that wait for their owner, or for a pin to go.
    pub evicting: u64,
    /// Nodes that are attached.
    pub nodes: u64,
    /// The node that manages.
    pub manager: Option<u32>,
    /// This node: gets and lookups that found what they wanted.
    pub hits: u64,
    /// This node: those that did not.
    pub misses: u64,
    /// This node: objects and blocks stored.
    pub stores: u64,
    /// This node: blocks evicted for space.
    pub evictions: u64,
    /// This node: nodes recovered.
    pub recoveries: u64,
    /// This node: times that a lock was not to be had at once.
    pub lock_waits: u64,
    /// What all nodes did since the pool was made, of each number those who had it together.
    pub by_node: Vec<NodeCounts>,
    /// What is held, by class; the pool's own first.
    pub by_class: Vec<Share>,
}

/// An object of a pool, or a block that has a name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Object {
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub bytes: u64,
    /// Where they lie in the memory.
    pub at: u64,
    /// The class of their chunk, as it is written; empty for the pool's own.
    pub class: String,
}

impl Pool {
    /// Makes an empty pool in a memory. Nobody may be attached to what was there.
    ///
    /// # Errors
    /// [`PoolError::Geometry`], [`PoolError::Mem`].
    pub fn create(memory: Arc<dyn CxlMem>, geometry: &Geometry) -> Result<(), PoolError> {
        Layout::new(geometry)?.create(&Lines::new(memory))
    }

    /// The geometry of the pool in a memory.
    ///
    /// # Errors
    /// [`PoolError::NoPool`], [`PoolError::Damaged`].
    pub fn geometry(memory: Arc<dyn CxlMem>) -> Result<Geometry, PoolError> {
        Ok(Layout::open(&Lines::new(memory))?.geometry)
    }

    /// Attaches as `node`. The host sees to it that nobody else is that node.
    ///
    /// # Errors
    /// [`PoolError::NoPool`], [`PoolError::Node`], [`PoolError::Timeout`].
    pub fn attach(memory: Arc<dyn CxlMem>, host: Arc<dyn Host>, node: u32) -> Result<Self, PoolError> {
        let member = Member::join(Lines::new(memory), host, node)?;
        let pool = Self {
            member,
            heap: Heap::default(),
            pins: Pins::default(),
            touches: Mutex::default(),
            recovering: Mutex::new(()),
            hand: AtomicU64::new(0),
            counts: Counts::default(),
            telling: Mutex::default(),
            asking: Mutex::default(),
            storing: Mutex::default(),
        };
        let mut wait = Wait::default();
        pool.serve()?;
        // Not before all is recovered that this node held when it was here before.
        while !pool.member.may_begin()? {
            pool.serve()?;
            pool.member.wait(&mut wait, "the recovery of this node's last life")?;
        }
        Ok(pool)
    }

    /// Leaves the pool. What this node stored stays.
    ///
    /// # Errors
    /// [`PoolError::Mem`], [`PoolError::Fenced`].
    pub fn leave(self) -> Result<(), PoolError> {
        self.tell_touches()?;
        self.heap.shrink(&self.member)?;
        self.member.alive()?;
        locked(&self.telling).tell(&self.member, &self.counts)?;
        self.member.leave()
    }

    /// This node's number.
    pub fn node(&self) -> u32 {
        self.member.node
    }

    /// Does a node's duty: counts on, grants locks if it manages, recovers the dead, takes back
    /// what others freed. Call it often, or have [`crate::Service`] do so.
    ///
    /// # Errors
    /// [`PoolError::Fenced`], [`PoolError::Mem`].
    pub fn serve(&self) -> Result<(), PoolError> {
        self.member.turn()?;
        self.member.grant()?;
        if let Some(_one) = try_locked(&self.recovering) {
            while let Some(Dead { node, last, has_died }) = self.member.dead() {
                recover(&self.member, &self.heap, node, last)?;
                Counts::add(&self.counts.recoveries, u64::from(has_died));
            }
        }
        drain(&self.member, &self.heap)?;
        if let Some(mut telling) = try_locked(&self.telling) {
            telling.turn(&self.member, &self.counts)?;
        }
        Ok(())
    }

    /// Stores an object, in place of one of that name if there is one. Others see the old bytes or
    /// the new.
    ///
    /// # Errors
    /// [`PoolError::Full`], [`PoolError::NoSlot`], [`PoolError::NoName`], [`PoolError::TooLong`],
    /// [`PoolError::Fenced`].
    pub fn put(&self, name: &str, bytes: &[u8]) -> Result<(), PoolError> {
        self.put_from(name, bytes.len() as u64, |reservation| reservation.append(bytes))
    }

    /// An object's bytes.
    ///
    /// # Errors
    /// [`PoolError::Damaged`], [`PoolError::Fenced`].
    pub fn get(&self, name: &str) -> Result<Option<Vec<u8>>, PoolError> {
        self.read(&Key::of_name(name))
    }

    /// Removes an object. Whether there was one.
    ///
    /// # Errors
    /// [`PoolError::Fenced`].
    pub fn delete(&self, name: &str) -> Result<bool, PoolError> {
        self.remove(&Key::of_name(name))
    }

    /// All objects, and blocks that have names, by name.
    ///
    /// # Errors
    /// [`PoolError::Fenced`].
    pub fn list(&self) -> Result<Vec<Object>, PoolError> {
        let directory = self.directory()?;
        let mut found = Vec::new();
        for group in 0..self.member.layout.geometry.groups {
            self.member.lines.consume(self.member.layout.tags(group), LINE)?;
            for (index, tag) in tags(&self.member, group)?.into_iter().enumerate() {
                if !tag.state().is_some_and(State::has_name) {
                    continue;
                }
                let slot = Slot { group, index: index as u32 };
                if let Some(pin) = self.pins.pin(&self.member, slot, tag)?
                    && let Some(name) = self.name(&pin.entry)?
                {
                    let Entry { at, length, .. } = pin.entry;
                    let class = written(&self.member, &directory, at)?;
                    found.push(Object { name, bytes: length, at, class });
                }
            }
        }
        self.member.alive()?;
        found.sort();
        Ok(found)
    }

    /// The name of an entry that is pinned. It checks by the key.
    pub(crate) fn name(&self, entry: &Entry) -> Result<Option<String>, PoolError> {
        if entry.name_length as usize > MAX_NAME {
            return Ok(None);
        }
        let mut bytes = vec![0; entry.name_length as usize];
        self.member.lines.consume(entry.name_at, u64::from(entry.name_length))?;
        self.member.lines.load(entry.name_at, &mut bytes)?;
        Ok(String::from_utf8(bytes).ok().filter(|name| Key::of_name(name) == entry.key))
    }

    /// Removes an object or a block, also one whose entry does not check. Whether it was there.
    ///
    /// # Errors
    /// [`PoolError::Fenced`].
    pub fn remove(&self, key: &Key) -> Result<bool, PoolError> {
        let mut removed = false;
        loop {
            let found = seek(&self.member, key)?;
            // It would be there when the rest is gone.
            if let Some((slot, _)) = found.damaged {
                removed |= discard(&self.member, slot.group, |tag| tag.is_ready_of(key))?;
            }
            match found.whole {
                Some((slot, tag)) if evict(&self.member, &self.heap, slot, tag)? => {
                    removed = true;
                    break;
                }
                None if found.damaged.is_none() => break,
                _ => {}
            }
        }
        self.member.alive()?;
        Ok(removed)
    }

    /// Pins what `key` has.
    pub(crate) fn pin(&self, key: &Key) -> Result<Option<Pin<'_>>, PoolError> {
        while let Some((slot, tag)) = find_to_read(&self.member, key)? {
            if let Some(pin) = self.pins.pin(&self.member, slot, tag)?
                && pin.entry.key == *key
            {
                Counts::add(&self.counts.hits, 1);
                self.touch(&[slot])?;
                return Ok(Some(pin));
            }
        }
        Counts::add(&self.counts.misses, 1);
        self.member.alive()?;
        Ok(None)
    }

    /// Remembers that slots were used, the last first to be kept.
    pub(crate) fn touch(&self, slots: &[Slot]) -> Result<(), PoolError> {
        let full = {
            let mut touches = locked(&self.touches);
            touches.slots.extend_from_slice(slots);
            touches.slots.len() >= TOUCHES
        };
        if full { self.tell_touches() } else { Ok(()) }
    }

    /// The time of something that is used now.
    pub(crate) fn stamp(&self) -> u64 {
        let mut touches = locked(&self.touches);
        touches.clock += 1;
        touches.clock
    }

    /// Tells the others what this node used. They know by themselves only what was stored.
    ///
    /// # Errors
    /// [`PoolError::Mem`], [`PoolError::Timeout`].
    pub fn tell_touches(&self) -> Result<(), PoolError> {
        let clock = self.member.clock()?;
        let (mut told, clock) = {
            let mut touches = locked(&self.touches);
            touches.clock = touches.clock.max(clock);
            let mut told = Vec::with_capacity(touches.slots.len());
            for slot in std::mem::take(&mut touches.slots) {
                touches.clock += 1;
                told.push((self.member.layout.lock_of(slot.group), slot, touches.clock));
            }
            (told, touches.clock)
        };
        told.sort_unstable();
        for of_lock in told.chunk_by(|one, other| one.0 == other.0) {
            let held = self.member.acquire(of_lock[0].0)?;
            for (_, slot, stamp) in of_lock {
                self.set_stamp(*slot, *stamp)?;
            }
            held.release()?;
        }
        self.member.tell_clock(clock)
    }

    /// Sets when a slot was used. Its lock is held.
    pub(crate) fn set_stamp(&self, slot: Slot, stamp: u64) -> Result<(), PoolError> {
        let at = self.member.layout.stamps(slot.group) + 8 * u64::from(slot.index);
        self.member.lines.consume(at, 8)?;
        self.member.lines.set(at, stamp)?;
        self.member.lines.publish(at, 8)?;
        Ok(())
    }

    /// Places for so many bytes of a class each, all of them or none, by evicting if need be.
    pub(crate) fn allocate(&self, wanted: &[(ClassId, u64)]) -> Result<Vec<Place>, PoolError> {
        let layout = &self.member.layout;
        let bytes = wanted.first().map_or(0, |(_, length)| *length);
        let size = |(class, length): &(ClassId, u64)| {
            size_for(*length, layout.geometry.chunk_bytes).map(|size| (*class, size))
        };
        let sizes: Option<Vec<_>> = wanted.iter().map(size).collect();
        let all =
            |sizes: &[(ClassId, u64)]| sizes.iter().fold(0_u64, |all, (_, size)| all.saturating_add(*size));
        let Some(sizes) = sizes.filter(|sizes| all(sizes) <= layout.end - layout.data) else {
            return Err(PoolError::Full { bytes, others: 0 });
        };
        let mut had = Vec::with_capacity(sizes.len());
        while had.len() < sizes.len() {
            let found = self.allocate_next(&had, &sizes[had.len()..]);
            if let Ok(Some(at)) = found {
                had.push(Place { at, size: sizes[had.len()].1 });
                continue;
            }
            for place in had {
                self.heap.give(&self.member, place.at)?;
            }
            return Err(match found {
                Err(why) => why,
                Ok(_) => PoolError::Full { bytes, others: self.chunks_of_others()? },
            });
        }
        Ok(had)
    }

    /// A place for the first of `wanted`, classes and sizes of places, beside those that are `had`.
    /// `None` if there is no space for all of them.
    fn allocate_next(&self, had: &[Place], wanted: &[(ClassId, u64)]) -> Result<Option<u64>, PoolError> {
        let (layout, host) = (&self.member.layout, &*self.member.host);
        let Some((class, size)) = wanted.first().copied() else { return Ok(None) };
        let mut wait = Wait::default();
        let (mut tries, mut others_at, mut has_looked_again) = (0_u32, None, false);
        // Each turn evicts something, waits for another node, or is the last.
        for turn in 0..layout.geometry.groups.saturating_mul(SLOTS as u32).max(4096) {
            if let Some(at) = self.heap.take(layout, class, size) {
                return Ok(Some(at));
            }
            if self.heap.grow(&self.member, class, size)?
                || drain(&self.member, &self.heap)?
                || self.heap.shrink(&self.member)?
                || sweep(&self.member, &self.heap)?
            {
                continue;
            }
            // Nothing is evicted in vain. Objects may come meanwhile.
            let room = if tries.is_multiple_of(PATIENT_TURNS) && !self.could_fit(had, wanted)? {
                Room::None
            } else {
                tries += 1;
                self.make_room(turn.is_multiple_of(PATIENT_TURNS))?
            };
            match room {
                Room::Made => {
                    has_looked_again = false;
                    continue;
                }
                // What came free since the heap looked is there now.
                Room::None if !has_looked_again => {
                    has_looked_again = true;
                    continue;
                }
                Room::Others => others_at = Some(host.now()),
                Room::None if self.member.awaits_recovery()? => others_at = Some(host.now()),
                // What another has made empty it gives back only then.
                Room::None if others_at.is_some_and(|at| host.now().saturating_sub(at) <= interval(host)) => {
                }
                Room::None => return Ok(None),
            }
            has_looked_again = false;
            self.serve()?;
            match self.member.wait(&mut wait, "space that another node gives back") {
                // Who would have to give it back is stopped.
                Err(PoolError::Timeout(_)) => return Ok(None),
                waited => waited?,
            }
        }
        Ok(None)
    }

    /// Whether places for all that is `wanted` could come free by evicting blocks: objects stay,
    /// and the places that are `had`.
    fn could_fit(&self, had: &[Place], wanted: &[(ClassId, u64)]) -> Result<bool, PoolError> {
        let layout = &self.member.layout;
        let chunk_bytes = layout.geometry.chunk_bytes;
        let run = |bytes: u64| bytes.div_ceil(chunk_bytes);
        let range = |at, bytes| {
            let first = u64::from(layout.chunk_of(at)?);
            Some(first..first + run(bytes))
        };
        let mut staying: Vec<Range<u64>> =
            had.iter().filter_map(|place| range(place.at, place.size)).collect();
        let mut missing = BTreeSet::new();
        for (class, size) in wanted {
            if !self.heap.has_free(*class, *size) {
                missing.insert((*class, *size));
            }
        }
        let gives = |(class, size): &(ClassId, u64), entry: &Entry| {
            // All of a run comes free, whosever it is; a place of a chunk only its node fills.
            let is_run = *size >= chunk_bytes && size_for(entry.length, chunk_bytes) >= Some(*size);
            is_run || entry.places().any(|at| self.heap.has(layout, at, *class, *size))
        };
        let mut unmet = missing.clone();
        let is_wanted = |state: State| state.is_ready() || state == State::Evicting;
        for group in 0..layout.geometry.groups {
            self.entries(group, is_wanted, |_, _, tag, entry| {
                if tag.state() == Some(State::Object) {
                    let places = [(entry.at, entry.length), (entry.name_at, entry.name_length.into())];
                    let used = places.into_iter().filter(|(_, bytes)| *bytes > 0);
                    staying.extend(used.filter_map(|(at, bytes)| range(at, bytes)));
                } else {
                    unmet.retain(|kind| !gives(kind, entry));
                }
            })?;
            if unmet.is_empty() {
                return Ok(true);
            }
        }
        let is_chunks = |kind: &&(ClassId, u64)| kind.1 >= chunk_bytes || unmet.contains(*kind);
        let runs = || missing.iter().filter(is_chunks).map(|(_, size)| run(*size));
        // The longest run that nothing stays in, and all chunks that nothing stays in.
        let (mut longest, mut all, mut next) = (0, 0, 0);
        staying.sort_unstable_by_key(|range| range.start);
        let end = u64::from(layout.geometry.chunks);
        for stays in staying.into_iter().chain(std::iter::once(end..end)) {
            let gap = stays.start.saturating_sub(next);
            (longest, all, next) = (longest.max(gap), all + gap, next.max(stays.end));
        }
        Ok(runs().all(|run| run <= longest) && runs().sum::<u64>() <= all)
    }

    /// Bytes of the chunks that other nodes have, for whoever is told that there is no space. Where
    /// all of them would have to be brought anew nobody looks.
    fn chunks_of_others(&self) -> Result<u64, PoolError> {
        let (member, layout) = (&self.member, &self.member.layout);
        let mut bytes = 0;
        if !member.lines.coherent() {
            return Ok(bytes);
        }
        for chunk in 0..layout.geometry.chunks {
            if is_taken(member, chunk)? && Owner::load(member, chunk)?.node != member.node {
                bytes += layout.geometry.chunk_bytes;
            }
        }
        Ok(bytes)
    }

    /// Evicts the blocks that were not used for longest in the next groups that have any, of this
    /// node's if there are some. While others have something to give back, nothing of theirs is
    /// evicted unless `insist`.
    fn make_room(&self, insist: bool) -> Result<Room, PoolError> {
        self.tell_touches()?;
        let groups = u64::from(self.member.layout.geometry.groups);
        let many = groups.min(LOOKED_AT);
        let begin = self.hand.fetch_add(many, Ordering::Relaxed);
        let (mut own, mut others) = (Vec::new(), Vec::new());
        let mut evicting = false;
        let mut looked = 0;
        // Where there is nothing in all of one round, there is nothing.
        while looked < groups && !evicting && own.is_empty() && others.is_empty() {
            let end = groups.min(looked + many);
            for step in looked..end {
                let group = (begin.wrapping_add(step) % groups) as u32;
                self.entries(group, State::is_block, |stamp, slot, tag, entry| {
                    let is_own = entry.places().all(|at| self.heap.owns(&self.member.layout, at));
                    if is_own { &mut own } else { &mut others }.push((stamp, slot, tag));
                })?;
                for (index, tag) in tags(&self.member, group)?.into_iter().enumerate() {
                    let slot = Slot { group, index: index as u32 };
                    evicting |= tag.state() == Some(State::Evicting) && self.comes_free(slot, tag)?;
                }
            }
            looked = end;
        }
        self.hand.fetch_add(looked - many, Ordering::Relaxed);
        let is_own = !own.is_empty();
        if evicting && !is_own && !insist {
            return Ok(Room::Others);
        }
        let from = if is_own { &mut own } else { &mut others };
        from.sort_unstable_by_key(|(stamp, slot, _)| (*stamp, *slot));
        let some = from.len() / 64 + 1;
        let mut any = false;
        for (_, slot, tag) in from.iter().take(some) {
            let evicted = evict(&self.member, &self.heap, *slot, *tag)?;
            Counts::add(&self.counts.evictions, u64::from(evicted));
            any |= evicted;
        }
        Ok(match (any, is_own) {
            (true, true) => Room::Made,
            (true, false) => Room::Others,
            // What another has begun to evict comes free.
            (false, _) if evicting || !from.is_empty() => Room::Others,
            (false, _) => Room::None,
        })
    }

    /// Whether somebody may give an evicted slot's places back. Where all owners would have to be
    /// brought anew nobody looks.
    fn comes_free(&self, slot: Slot, tag: Tag) -> Result<bool, PoolError> {
        let (member, layout) = (&self.member, &self.member.layout);
        if !member.lines.coherent() {
            return Ok(true);
        }
        let Some(entry) = Entry::load(member, slot, tag)? else { return Ok(true) };
        for chunk in entry.places().filter_map(|at| layout.chunk_of(at)) {
            let Owner { node, incarnation, .. } = Owner::load(member, chunk)?;
            if member.is_nobody(node, incarnation)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Calls `found` with each entry of a group whose state is wanted, and when it was used.
    fn entries(
        &self,
        group: u32,
        is_wanted: impl Fn(State) -> bool,
        mut found: impl FnMut(u64, Slot, Tag, &Entry),
    ) -> Result<(), PoolError> {
        let member = &self.member;
        member.lines.invalidate(member.layout.tags(group), 2 * LINE)?;
        member.lines.settle()?;
        for (index, tag) in tags(member, group)?.into_iter().enumerate() {
            if tag.state().is_some_and(&is_wanted) {
                let slot = Slot { group, index: index as u32 };
                member.lines.consume(member.layout.entry(slot), LINE)?;
                let stamp = member.lines.word(member.layout.stamps(group) + 8 * index as u64)?;
                if let Some(entry) = Entry::load(member, slot, tag)? {
                    found(stamp, slot, tag, &entry);
                }
            }
        }
        Ok(())
    }

    /// The block of a group that was not used for longest.
    pub(crate) fn oldest_of(&self, group: u32) -> Result<Option<(Slot, Tag)>, PoolError> {
        let mut oldest: Option<(u64, Slot, Tag)> = None;
        self.entries(group, State::is_block, |stamp, slot, tag, _| {
            if oldest.is_none_or(|(least, ..)| stamp < least) {
                oldest = Some((stamp, slot, tag));
            }
        })?;
        Ok(oldest.map(|(_, slot, tag)| (slot, tag)))
    }

    /// What the pool holds, and what this node did.
    ///
    /// # Errors
    /// [`PoolError::Fenced`].
    pub fn stats(&self) -> Result<Stats, PoolError> {
        let layout = &self.member.layout;
        let mut stats = Stats {
            bytes: layout.end - layout.data,
            slots: u64::from(layout.geometry.groups) * SLOTS,
            hits: self.counts.hits.load(Ordering::Relaxed),
            misses: self.counts.misses.load(Ordering::Relaxed),
            stores: self.counts.stores.load(Ordering::Relaxed),
            evictions: self.counts.evictions.load(Ordering::Relaxed),
            recoveries: self.counts.recoveries.load(Ordering::Relaxed),
            lock_waits: self.member.waits.load(Ordering::Relaxed),
            ..Stats::default()
        };
        let (mut occupancy, mut shares) = (Occupancy::default(), Shares::default());
        let (chunks, many) = layout.all_chunks();
        self.member.lines.consume(chunks, many)?;
        for group in 0..layout.geometry.groups {
            let (first, length) = layout.groups(&(group..group + 1));
            self.member.lines.consume(first, length)?;
            shares.add(&self.member, &mut occupancy, group..group + 1)?;
        }
        let (first, length) = layout.all_bits();
        self.member.lines.consume(first, length)?;
        occupancy.taken_bytes = shares.take(&self.member)?;
        let Occupancy { reserved, blocks, objects, evicting, ready_bytes, taken_bytes } = occupancy;
        (stats.reserved, stats.blocks, stats.objects, stats.evicting) = (reserved, blocks, objects, evicting);
        (stats.ready_bytes, stats.taken_bytes) = (ready_bytes, taken_bytes);
        let members = self.member.members()?;
        stats.nodes = members.len() as u64;
        stats.manager = members.iter().find(|(_, _, leads)| *leads).map(|(node, ..)| *node);
        locked(&self.telling).tell(&self.member, &self.counts)?;
        stats.by_node = self.overview()?.nodes;
        stats.by_class = shares.of(&self.directory()?);
        self.member.alive()?;
        Ok(stats)
    }
}

/// A place that the heap gave.
pub(crate) struct Place {
    pub(crate) at: u64,
    size: u64,
}

/// What an attempt to make room came to.
enum Room {
    Made,
    /// Another node has to give it back.
    Others,
    None,
}
