//! Storing and reading, and the cache of prefixes: blocks by the keys of a [`crate::Chain`].
//!
//! A block is stored once: who reserves its key stores it, and whoever else wants to finds it
//! reserved, or ready. A writer that dies is recovered, and with it the reservation.
//!
//! A block may have a name instead of a chain's key, as an object has: it is evicted as a block is.

use crate::class::{ClassId, OWN};
use crate::classed::Classed;
use crate::counts::Counts;
use crate::error::PoolError;
use crate::heap::class_at;
use crate::key::Key;
use crate::layout::{SLOTS, Slot};
use crate::mem::{Crc, LINE};
use crate::member::Wait;
use crate::mutex::locked;
use crate::pool::Pool;
use crate::table::{Entry, Pin, State, Tag, discard, evict, find, group, matching, reclaim, settle, tags};

/// Slots of a group that objects may have. One is left for what replaces one of them: the old is
/// there until the new is.
const MAX_OBJECTS: usize = SLOTS as usize - 1;

/// How many slots are in a state.
fn count(tags: &[Tag], state: State) -> usize {
    tags.iter().filter(|tag| tag.state() == Some(state)).count()
}

/// What came of a reservation.
pub enum Reserved<'p> {
    /// The caller stores it.
    Yours(Box<Reservation<'p>>),
    /// It is there.
    Ready,
    /// Another stores it.
    Busy,
}

/// A place that is reserved for a key. Dropped without [`Reservation::commit`] it is given back.
pub struct Reservation<'p> {
    pool: &'p Pool,
    slot: Slot,
    tag: Tag,
    entry: Entry,
    /// What it is once it is ready.
    kind: State,
    done: u64,
    crc: Crc,
    open: bool,
    /// None if another node stores it.
    storing: Option<Storing<'p>>,
}

/// A key that this node is storing, by itself or by a server: none of its other threads begins to.
/// So what the node has reserved at a server without knowing, because the answer was lost, is
/// nobody's but the one's who asks again.
pub(crate) struct Storing<'p> {
    pool: &'p Pool,
    key: Key,
}

impl Drop for Storing<'_> {
    fn drop(&mut self) {
        locked(&self.pool.storing).remove(&self.key);
    }
}

impl Pool {
    /// Begins to store a key, if no other thread of this node is at it.
    pub(crate) fn storing(&self, key: Key) -> Option<Storing<'_>> {
        // Made only then: one that goes gives the key back.
        let is_first = locked(&self.storing).insert(key);
        is_first.then(|| Storing { pool: self, key })
    }

    /// Reserves a block of `length` bytes.
    ///
    /// # Errors
    /// [`PoolError::Full`], [`PoolError::NoSlot`], [`PoolError::Fenced`].
    pub fn reserve(&self, key: Key, length: u64) -> Result<Reserved<'_>, PoolError> {
        self.own().reserve(key, length)
    }

    /// Reserves a block that `writer`, a node's number and incarnation, will store: the place is
    /// of this node's heap, and the reservation the writer's.
    pub(crate) fn reserve_for(
        &self,
        writer: (u32, u32),
        class: ClassId,
        key: Key,
        length: u64,
    ) -> Result<Reserved<'_>, PoolError> {
        self.reserve_by(writer, class, key, "", State::Block, length)
    }

    /// Reserves a place for `length` bytes of a class. Of a block it is in vain if the key is
    /// ready; an object takes the place of what has its key.
    pub(crate) fn reserve_as(
        &self,
        class: ClassId,
        key: Key,
        name: &str,
        kind: State,
        length: u64,
    ) -> Result<Reserved<'_>, PoolError> {
        let Some(storing) = self.storing(key) else { return Ok(Reserved::Busy) };
        let own = (self.member.node, self.member.incarnation);
        let mut reserved = self.reserve_by(own, class, key, name, kind, length)?;
        if let Reserved::Yours(reservation) = &mut reserved {
            reservation.storing = Some(storing);
        }
        Ok(reserved)
    }

    fn reserve_by(
        &self,
        (writer, incarnation): (u32, u32),
        class: ClassId,
        key: Key,
        name: &str,
        kind: State,
        length: u64,
    ) -> Result<Reserved<'_>, PoolError> {
        if kind.is_block() && find(&self.member, &key)?.is_some() {
            return Ok(Reserved::Ready);
        }
        let mut entry = Entry {
            key,
            at: 0,
            length,
            generation: 0,
            crc: 0,
            writer,
            incarnation,
            name_at: 0,
            name_length: name.len() as u32,
        };
        // Both together: no block goes for an object whose name has no place then.
        let wanted = [(class, length), (OWN, name.len() as u64)];
        let wanted: Vec<_> = wanted.into_iter().filter(|(_, bytes)| *bytes > 0).collect();
        let mut places = self.allocate(&wanted)?.into_iter().map(|place| place.at);
        if length > 0 {
            entry.at = places.next().unwrap_or_default();
        }
        if !name.is_empty() {
            entry.name_at = places.next().unwrap_or_default();
            if let Err(why) = self.member.lines.ntstore(entry.name_at, name.as_bytes()) {
                self.give(&entry)?;
                return Err(why.into());
            }
        }
        let given = entry.clone();
        let reserved = self.enter(entry, kind);
        if !matches!(reserved, Ok(Reserved::Yours(_))) {
            self.give(&given)?;
        }
        self.member.alive()?;
        reserved
    }

    fn give(&self, entry: &Entry) -> Result<(), PoolError> {
        for at in entry.places() {
            self.heap.give(&self.member, at)?;
        }
        Ok(())
    }

    /// Puts a reservation into the table.
    fn enter(&self, mut entry: Entry, kind: State) -> Result<Reserved<'_>, PoolError> {
        let member = &self.member;
        let group = group(member, &entry.key);
        let is_block = kind.is_block();
        let mut wait = Wait::default();
        loop {
            let held = member.acquire(member.layout.lock_of(group))?;
            member.lines.consume(member.layout.tags(group), LINE)?;
            let seen = tags(member, group)?;
            let wanted = |state: State| state == State::Reserved || is_block && state.is_ready();
            for (slot, tag) in matching(&seen, group, &entry.key, wanted) {
                member.lines.consume(member.layout.entry(slot), LINE)?;
                if Entry::load(member, slot, tag)?.is_some_and(|found| found.key == entry.key) {
                    held.release()?;
                    return Ok(if tag.is_ready() { Reserved::Ready } else { Reserved::Busy });
                }
            }
            let objects = count(&seen, State::Object);
            let is_crowded = !is_block && objects + count(&seen, State::Reserved) >= MAX_OBJECTS;
            let replaces = is_crowded && self.has_object(group, &seen, &entry.key)?;
            if is_crowded && !replaces && objects + self.named_reservations(group, &seen)? >= MAX_OBJECTS {
                held.release()?;
                if objects >= MAX_OBJECTS {
                    return Err(PoolError::NoSlot);
                }
                self.await_slot(&mut wait)?;
                continue;
            }
            if let Some(index) = seen.iter().position(|tag| tag.state() == Some(State::Empty)) {
                let slot = Slot { group, index: index as u32 };
                let at = member.layout.entry(slot);
                member.lines.consume(at, LINE)?;
                let last = Entry::last(member, slot)?.map_or(0, |last| last.generation);
                entry.generation = last.wrapping_add(1);
                entry.store(member, slot)?;
                member.lines.publish(at, LINE)?;
                let tag = Tag::new(&entry, State::Reserved);
                member.lines.post(member.layout.tag(slot), tag.0)?;
                held.release()?;
                return Ok(Reserved::Yours(Box::new(Reservation {
                    pool: self,
                    slot,
                    tag,
                    entry,
                    kind,
                    done: 0,
                    crc: Crc::default(),
                    open: true,
                    storing: None,
                })));
            }
            held.release()?;
            self.make_slot(group, &seen, replaces, &mut wait)?;
        }
    }

    /// Whether an object of a group has this key, or had it and does not check. Its lock is held.
    fn has_object(&self, group: u32, seen: &[Tag; SLOTS as usize], key: &Key) -> Result<bool, PoolError> {
        for (slot, tag) in matching(seen, group, key, |state| state == State::Object) {
            self.member.lines.consume(self.member.layout.entry(slot), LINE)?;
            if Entry::load(&self.member, slot, tag)?.is_none_or(|found| found.key == *key) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// How many reservations of a group may become objects. Its lock is held.
    fn named_reservations(&self, group: u32, seen: &[Tag]) -> Result<usize, PoolError> {
        let member = &self.member;
        let mut found = 0;
        for (index, tag) in seen.iter().enumerate().filter(|(_, tag)| tag.state() == Some(State::Reserved)) {
            let slot = Slot { group, index: index as u32 };
            member.lines.consume(member.layout.entry(slot), LINE)?;
            found += usize::from(Entry::load(member, slot, *tag)?.is_some_and(|entry| entry.name_length > 0));
        }
        Ok(found)
    }

    /// Empties a slot of a full group, or waits for whoever can; for what replaces an object also
    /// for those who fill one.
    fn make_slot(&self, group: u32, seen: &[Tag], replaces: bool, wait: &mut Wait) -> Result<(), PoolError> {
        for (index, tag) in seen.iter().enumerate() {
            let slot = Slot { group, index: index as u32 };
            if tag.state() == Some(State::Evicting) && reclaim(&self.member, &self.heap, slot)? {
                return Ok(());
            }
        }
        if count(seen, State::Evicting) == 0 {
            if let Some((slot, tag)) = self.oldest_of(group)? {
                if evict(&self.member, &self.heap, slot, tag)? {
                    Counts::add(&self.counts.evictions, 1);
                }
                return Ok(());
            }
            // One that can be read would have been the oldest.
            if seen.iter().any(|tag| tag.is_block()) && discard(&self.member, group, Tag::is_block)? {
                return Ok(());
            }
            if !replaces || count(seen, State::Reserved) == 0 {
                return Err(PoolError::NoSlot);
            }
        }
        self.await_slot(wait)
    }

    /// A step of a wait for a slot that another fills or gives back.
    fn await_slot(&self, wait: &mut Wait) -> Result<(), PoolError> {
        self.serve()?;
        self.member.wait(wait, "a slot that another node gives back")
    }

    /// Stores a block, unless it is there or another stores it. Whether this call did.
    ///
    /// # Errors
    /// [`PoolError::Full`], [`PoolError::NoSlot`], [`PoolError::Fenced`].
    pub fn store(&self, key: Key, pieces: &[&[u8]]) -> Result<bool, PoolError> {
        self.own().store(key, pieces)
    }

    /// What `writer` has reserved, if it still has.
    pub(crate) fn reserved_by(
        &self,
        writer: (u32, u32),
        slot: Slot,
        tag: Tag,
    ) -> Result<Option<Reservation<'_>>, PoolError> {
        let member = &self.member;
        member.lines.invalidate(member.layout.tag(slot), 8)?;
        member.lines.invalidate(member.layout.entry(slot), LINE)?;
        member.lines.settle()?;
        if tag.state() != Some(State::Reserved) || member.lines.word(member.layout.tag(slot))? != tag.0 {
            return Ok(None);
        }
        let entry = Entry::load(member, slot, tag)?;
        let entry = entry.filter(|entry| (entry.writer, entry.incarnation) == writer);
        let of = |entry| Reservation {
            pool: self,
            slot,
            tag,
            entry,
            kind: State::Block,
            done: 0,
            crc: Crc::default(),
            open: true,
            storing: None,
        };
        Ok(entry.map(of))
    }

    /// The slot and tag under which `writer` has reserved a key.
    pub(crate) fn reservation_of(
        &self,
        writer: (u32, u32),
        key: &Key,
    ) -> Result<Option<Reservation<'_>>, PoolError> {
        let group = group(&self.member, key);
        self.member.lines.consume(self.member.layout.tags(group), LINE)?;
        let seen = tags(&self.member, group)?;
        for (slot, tag) in matching(&seen, group, key, |state| state == State::Reserved) {
            if let Some(found) = self.reserved_by(writer, slot, tag)? {
                if found.entry.key == *key {
                    return Ok(Some(found));
                }
                found.hand_over();
            }
        }
        Ok(None)
    }

    /// How many of the first blocks are there. They count as used, the first as the last to be
    /// evicted.
    ///
    /// # Errors
    /// [`PoolError::Fenced`].
    pub fn prefix(&self, keys: &[Key]) -> Result<usize, PoolError> {
        let found = self.look_up(keys)?;
        self.count_lookups(found, keys.len());
        Ok(found)
    }

    /// [`Self::prefix`] for another node, which counts for itself.
    pub(crate) fn look_up(&self, keys: &[Key]) -> Result<usize, PoolError> {
        let mut slots = Vec::with_capacity(keys.len());
        for key in keys {
            match find(&self.member, key) {
                Ok(Some((slot, _))) => slots.push(slot),
                // What cannot be read ends it as what is not there.
                Ok(None) | Err(PoolError::Damaged { .. }) => break,
                Err(why) => return Err(why),
            }
        }
        let found = slots.len();
        slots.reverse();
        self.touch(&slots)?;
        self.member.alive()?;
        Ok(found)
    }

    /// Counts that of so many looked for these were found.
    pub(crate) fn count_lookups(&self, found: usize, all: usize) {
        Counts::add(&self.counts.hits, found as u64);
        Counts::add(&self.counts.misses, (all - found) as u64);
    }

    /// Counts that something was stored.
    pub(crate) fn count_store(&self, length: u64) {
        Counts::add(&self.counts.stores, 1);
        Counts::add(&self.counts.stored_bytes, length);
    }

    /// The bytes of an object or a block.
    ///
    /// # Errors
    /// [`PoolError::Damaged`], [`PoolError::Fenced`].
    pub fn read(&self, key: &Key) -> Result<Option<Vec<u8>>, PoolError> {
        let Some(pin) = self.pin(key)? else { return Ok(None) };
        let length = usize::try_from(pin.entry.length)
            .map_err(|_| PoolError::Damaged { what: "a length", at: pin.entry.at })?;
        let mut bytes = vec![0; length];
        self.fill(&pin, &mut [&mut bytes])?;
        Ok(Some(bytes))
    }

    /// Reads an object or a block into pieces one after the other, which together are as long.
    /// Whether it was there.
    ///
    /// # Errors
    /// [`PoolError::Damaged`], [`PoolError::End`], [`PoolError::Fenced`].
    pub fn read_into(&self, key: &Key, pieces: &mut [&mut [u8]]) -> Result<bool, PoolError> {
        let Some(pin) = self.pin(key)? else { return Ok(false) };
        self.read_pinned(&pin, pieces)?;
        Ok(true)
    }

    /// Reads all of what is pinned into pieces that are as long.
    pub(crate) fn read_pinned(&self, pin: &Pin<'_>, pieces: &mut [&mut [u8]]) -> Result<(), PoolError> {
        let length: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
        if length != pin.entry.length {
            return Err(PoolError::End { at: 0, length, bytes: pin.entry.length });
        }
        self.fill(pin, pieces)
    }

    /// Reads parts of an object or a block, each at its offset. Whether it was there. The check is
    /// of the whole, so parts are read unchecked.
    ///
    /// # Errors
    /// [`PoolError::End`], [`PoolError::Fenced`].
    pub fn read_parts(&self, key: &Key, parts: &mut [(u64, &mut [u8])]) -> Result<bool, PoolError> {
        let Some(pin) = self.pin(key)? else { return Ok(false) };
        let bytes = pin.entry.length;
        for (at, part) in parts.iter() {
            let length = part.len() as u64;
            if at.checked_add(length).is_none_or(|end| end > bytes) {
                return Err(PoolError::End { at: *at, length, bytes });
            }
            self.member.lines.invalidate(pin.entry.at + at, length)?;
        }
        self.member.lines.settle()?;
        for (at, part) in parts {
            self.member.lines.load(pin.entry.at + *at, part)?;
            Counts::add(&self.counts.read_bytes, part.len() as u64);
        }
        self.member.alive()?;
        Ok(true)
    }

    /// Reads all of what is pinned, and checks it.
    fn fill(&self, pin: &Pin<'_>, pieces: &mut [&mut [u8]]) -> Result<(), PoolError> {
        let crc = self.load(pin, pieces)?;
        self.verify(pin, &crc)
    }

    /// Reads all of what is pinned: its check.
    pub(crate) fn load(&self, pin: &Pin<'_>, pieces: &mut [&mut [u8]]) -> Result<Crc, PoolError> {
        let entry = &pin.entry;
        self.member.lines.consume(entry.at, entry.length)?;
        let (mut at, mut crc) = (entry.at, Crc::default());
        for piece in pieces {
            self.member.lines.load_checked(at, piece, &mut crc)?;
            at += piece.len() as u64;
        }
        Ok(crc)
    }

    /// Whether what was read is what was stored.
    pub(crate) fn is_whole(&self, pin: &Pin<'_>, crc: &Crc) -> Result<bool, PoolError> {
        if crc.finish() != pin.entry.crc {
            self.member.alive()?;
            return Ok(false);
        }
        Counts::add(&self.counts.read_bytes, pin.entry.length);
        Ok(true)
    }

    /// Refuses what is not what was stored.
    pub(crate) fn verify(&self, pin: &Pin<'_>, crc: &Crc) -> Result<(), PoolError> {
        if self.is_whole(pin, crc)? {
            return Ok(());
        }
        self.drop_damaged(pin)?;
        Err(PoolError::Damaged { what: "an object's bytes", at: pin.entry.at })
    }

    /// Drops a block that cannot be read: as long as it is there nobody stores it anew. Others may
    /// have it pinned; its place is free when they are done. Objects are for `check` to drop.
    pub(crate) fn drop_damaged(&self, pin: &Pin<'_>) -> Result<(), PoolError> {
        // Who was taken for dead may have read what is another's by now.
        self.member.alive()?;
        if pin.tag.state().is_some_and(State::is_block) {
            pin.let_go();
            evict(&self.member, &self.heap, pin.slot, pin.tag)?;
        }
        Ok(())
    }
}

impl<'p> Classed<'p> {
    /// [`Pool::reserve`].
    ///
    /// # Errors
    /// As that; [`PoolError::Declare`].
    pub fn reserve(&self, key: Key, length: u64) -> Result<Reserved<'p>, PoolError> {
        self.pool.reserve_as(self.class, key, "", State::Block, length)
    }

    /// [`Pool::store`].
    ///
    /// # Errors
    /// As that; [`PoolError::Declare`].
    pub fn store(&self, key: Key, pieces: &[&[u8]]) -> Result<bool, PoolError> {
        let length = pieces.iter().map(|piece| piece.len() as u64).sum();
        self.store_from(key, length, |reservation| {
            pieces.iter().try_for_each(|piece| reservation.append(piece))
        })
    }
}

impl Reservation<'_> {
    /// Appends bytes: the pieces of a block, in their order.
    ///
    /// # Errors
    /// [`PoolError::End`].
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), PoolError> {
        let length = bytes.len() as u64;
        if length > self.entry.length - self.done {
            return Err(PoolError::End { at: self.done, length, bytes: self.entry.length });
        }
        self.pool.member.lines.ntstore_checked(self.entry.at + self.done, bytes, &mut self.crc)?;
        self.done += length;
        Ok(())
    }

    /// Makes it ready: all see it whole, whoever comes after.
    ///
    /// # Errors
    /// [`PoolError::End`] if bytes are missing, [`PoolError::Fenced`].
    pub fn commit(self) -> Result<(), PoolError> {
        if self.done != self.entry.length {
            return Err(PoolError::End { at: self.done, length: 0, bytes: self.entry.length });
        }
        let crc = self.crc.finish();
        let (pool, length) = (self.pool, self.entry.length);
        self.commit_as(crc)?;
        pool.count_store(length);
        Ok(())
    }

    /// [`Self::commit`] of bytes that were stored, and check to `crc`.
    pub(crate) fn commit_as(mut self, crc: u32) -> Result<(), PoolError> {
        let (pool, member) = (self.pool, &self.pool.member);
        self.entry.crc = crc;
        // Taking the lock completes the stores of the bytes.
        let held = member.acquire(member.layout.lock_of(self.slot.group))?;
        let tag_at = member.layout.tag(self.slot);
        member.lines.consume(tag_at, 8)?;
        if member.lines.word(tag_at)? != self.tag.0 {
            // Somebody took this node for dead, or stored what it may not.
            self.open = false;
            held.release()?;
            member.alive()?;
            return Err(PoolError::Damaged { what: "a reservation", at: tag_at });
        }
        let at = self.entry.store(member, self.slot)?;
        // The stamp's fences complete it.
        member.lines.flush(at, LINE)?;
        pool.set_stamp(self.slot, pool.stamp())?;
        self.open = false;
        let ready = self.tag.with(self.kind);
        let old = if self.kind == State::Object { self.older()? } else { None };
        match old {
            Some((slot, tag)) => {
                held.change([(tag_at, ready.0), (member.layout.tag(slot), tag.with(State::Evicting).0)])?;
            }
            None => member.lines.post(tag_at, ready.0)?,
        }
        held.release()?;
        if let Some((slot, _)) = old {
            settle(member, &pool.heap, slot)?;
        }
        member.alive()
    }

    /// Leaves it to its writer: where it is in the table, its tag, and where its bytes go.
    pub(crate) fn hand_over(mut self) -> (Slot, Tag, u64) {
        self.open = false;
        (self.slot, self.tag, self.entry.at)
    }

    /// Whether it is of so many bytes, of a class.
    pub(crate) fn is_of(&self, class: ClassId, length: u64) -> Result<bool, PoolError> {
        let is_as_long = self.entry.length == length;
        Ok(is_as_long && class_at(&self.pool.member, self.entry.at)?.is_none_or(|found| found == class))
    }

    /// The object that this one replaces. The group's lock is held.
    fn older(&self) -> Result<Option<(Slot, Tag)>, PoolError> {
        let member = &self.pool.member;
        let seen = tags(member, self.slot.group)?;
        let mut damaged = None;
        for (slot, tag) in matching(&seen, self.slot.group, &self.entry.key, State::is_ready) {
            member.lines.consume(member.layout.entry(slot), LINE)?;
            match Entry::load(member, slot, tag)? {
                Some(entry) if entry.key == self.entry.key => return Ok(Some((slot, tag))),
                Some(_) => {}
                // It would be found once this one is deleted.
                None => damaged = Some((slot, tag)),
            }
        }
        Ok(damaged)
    }

    /// Gives it back, and says if that cannot be done.
    pub(crate) fn abort(mut self) -> Result<(), PoolError> {
        self.open = false;
        self.give_up()
    }

    fn give_up(&mut self) -> Result<(), PoolError> {
        let member = &self.pool.member;
        let held = member.acquire(member.layout.lock_of(self.slot.group))?;
        let at = member.layout.tag(self.slot);
        member.lines.consume(at, 8)?;
        let is_ours = member.lines.word(at)? == self.tag.0;
        // A server that died may have taken the place.
        let is_own = self.entry.places().all(|at| self.pool.heap.owns(&member.layout, at));
        if is_ours {
            member.lines.post(at, if is_own { 0 } else { self.tag.with(State::Evicting).0 })?;
        }
        held.release()?;
        match (is_ours, is_own) {
            (true, true) => self.pool.give(&self.entry),
            (true, false) => settle(member, &self.pool.heap, self.slot),
            (false, _) => Ok(()),
        }
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        // If that fails, the node is fenced or the memory gone: others recover it.
        if self.open && !std::thread::panicking() {
            let _ = self.give_up();
        }
    }
}
