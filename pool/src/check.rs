//! Verifies every invariant of a pool, also while others use it, and mends what can be.
//!
//! Each group is looked at under its lock. What was found wrong across groups is looked at again
//! before it is reported: others may have changed it meanwhile.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::class::{self, UNTOLD};
use crate::error::PoolError;
use crate::heap::{Owner, is_taken};
use crate::layout::{ALLOC, PINS, SLOTS, Slot};
use crate::mem::LINE;
use crate::pool::Pool;
use crate::recovery::adopt_all;
use crate::table::{Entry, State, Tag, group, sweep, tags};

/// Something that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Problem {
    /// What.
    pub what: &'static str,
    /// Where.
    pub at: u64,
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Objects and blocks that are ready and check.
    pub ready: u64,
    /// Their bytes.
    pub bytes: u64,
    /// What does not hold.
    pub problems: Vec<Problem>,
    /// Whether what does not hold was mended.
    pub repaired: bool,
}

/// What is in use, and by which slot.
type Places = BTreeMap<u64, (u64, Slot, Tag)>;

impl Pool {
    /// Verifies every invariant; with `repair` mends what does not hold: what cannot be read is
    /// dropped, what is nobody's is taken back. Other threads of this node must rest.
    ///
    /// # Errors
    /// [`PoolError::Fenced`], [`PoolError::Mem`], [`PoolError::Timeout`].
    pub fn check(&self, repair: bool) -> Result<Report, PoolError> {
        self.serve()?;
        // What nobody told this node of is no fault.
        sweep(&self.member, &self.heap)?;
        let mut report = Report::default();
        let mut found = Found {
            problems: BTreeSet::new(),
            places: Places::new(),
            doubts: BTreeSet::new(),
            ready: Vec::new(),
            dropped: BTreeSet::new(),
        };
        for lock in 0..self.member.layout.locks {
            let held = self.member.acquire(lock)?;
            if self.member.has_intent(lock)? {
                found.say("a change that was told and not done", self.member.layout.intent(lock));
                if repair {
                    self.member.replay(lock)?;
                }
            }
            held.release()?;
        }
        for group in 0..self.member.layout.geometry.groups {
            self.check_group(group, repair, &mut found)?;
        }
        self.check_bytes(repair, &mut found, &mut report)?;
        self.check_places(repair, &mut found)?;
        self.check_pins(repair, &mut found)?;
        self.check_chunks(repair, &mut found)?;
        self.check_heap(repair, &mut found)?;
        self.member.alive()?;
        report.problems = found.problems.into_iter().collect();
        report.repaired = repair;
        Ok(report)
    }

    /// Drops a slot that cannot be kept, if it is still so.
    fn drop_slot(&self, slot: Slot, tag: Tag) -> Result<(), PoolError> {
        let held = self.member.acquire(self.member.layout.lock_of(slot.group))?;
        let at = self.member.layout.tag(slot);
        if self.member.lines.fresh(at)? == tag.0 {
            self.member.lines.post(at, 0)?;
        }
        held.release()
    }

    fn check_group(&self, number: u32, repair: bool, found: &mut Found) -> Result<(), PoolError> {
        let member = &self.member;
        let held = member.acquire(member.layout.lock_of(number))?;
        member.lines.consume(member.layout.tags(number), LINE)?;
        let mut keys = BTreeSet::new();
        for (index, tag) in tags(member, number)?.into_iter().enumerate() {
            let slot = Slot { group: number, index: index as u32 };
            let at = member.layout.tag(slot);
            if tag.state() == Some(State::Empty) {
                continue;
            }
            member.lines.consume(member.layout.entry(slot), LINE)?;
            let wrong = match (tag.state(), Entry::load(member, slot, tag)?) {
                (None, _) => Some("a tag of no known state"),
                (_, None) => Some("an entry that does not check"),
                (_, Some(entry)) if group(member, &entry.key) != number => {
                    Some("an entry in another's group")
                }
                (Some(State::Reserved), Some(entry))
                    if self.member.is_nobody(entry.writer, entry.incarnation)? =>
                {
                    Some("a reservation of nobody")
                }
                (Some(state), Some(entry)) if state.is_ready() && !keys.insert(entry.key) => {
                    Some("a key that is there twice")
                }
                (_, Some(entry)) => {
                    if tag.is_ready() {
                        found.ready.push((slot, tag));
                    }
                    for place in entry.places() {
                        let length =
                            if place == entry.at { entry.length } else { u64::from(entry.name_length) };
                        if let Some((_, other, _)) = found.places.insert(place, (length, slot, tag)) {
                            found.doubtful(other, slot);
                        }
                    }
                    None
                }
            };
            if let Some(wrong) = wrong {
                found.say(wrong, at);
                if repair {
                    member.lines.post(at, 0)?;
                }
            }
        }
        held.release()
    }

    fn check_bytes(&self, repair: bool, found: &mut Found, report: &mut Report) -> Result<(), PoolError> {
        for (slot, tag) in std::mem::take(&mut found.ready) {
            let Some(pin) = self.pins.pin(&self.member, slot, tag)? else { continue };
            let mut bytes = vec![0; pin.entry.length as usize];
            let named = !tag.state().is_some_and(State::has_name) || self.name(&pin.entry)?.is_some();
            let crc = self.load(&pin, &mut [&mut bytes])?;
            if self.is_whole(&pin, &crc)? && named {
                report.ready += 1;
                report.bytes += pin.entry.length;
                continue;
            }
            found.say("bytes that do not check", pin.entry.at);
            let places: Vec<u64> = pin.entry.places().collect();
            drop(pin);
            if repair {
                self.drop_slot(slot, tag)?;
                // Of two that point to one place the other may keep it.
                if !found.doubts.contains(&slot) {
                    found.dropped.extend(places);
                }
            }
        }
        Ok(())
    }

    /// Each place lies in a chunk that is in use, begins where one of its places does, and is one
    /// entry's.
    fn check_places(&self, repair: bool, found: &mut Found) -> Result<(), PoolError> {
        let member = &self.member;
        let held = member.acquire(ALLOC)?;
        let (first, length) = member.layout.all_bits();
        member.lines.invalidate(first, length)?;
        let (first, length) = member.layout.all_chunks();
        member.lines.invalidate(first, length)?;
        member.lines.settle()?;
        let mut wrong = Vec::new();
        for (place, (length, slot, tag)) in &found.places {
            let Some(chunk) = member.layout.chunk_of(*place) else { continue };
            let owner = Owner::load(member, chunk)?;
            let fits = is_taken(member, chunk)?
                && owner.is_sound(&member.layout, chunk)
                && owner.place(&member.layout, chunk, *place).is_some()
                && *length <= owner.size;
            if !fits || found.doubts.contains(slot) {
                wrong.push((*place, *slot, *tag));
            }
        }
        held.release()?;
        let mut seen = BTreeMap::new();
        for (place, slot, tag) in wrong {
            // Only what is still there, and was there with the other, is wrong.
            let held = member.acquire(member.layout.lock_of(slot.group))?;
            let is_there = member.lines.fresh(member.layout.tag(slot))? == tag.0;
            held.release()?;
            let doubtful = found.doubts.contains(&slot);
            if is_there
                && (!doubtful || self.is_shared(slot, place, found)?)
                && seen.insert(place, slot).is_none()
            {
                found.problems.insert(Problem { what: "a place that cannot be the entry's", at: place });
                if repair {
                    self.drop_slot(slot, tag)?;
                }
            }
        }
        Ok(())
    }

    /// Whether another slot than `slot` points to `place` now.
    fn is_shared(&self, slot: Slot, place: u64, found: &Found) -> Result<bool, PoolError> {
        for other in found.doubts.iter().filter(|other| **other != slot) {
            let held = self.member.acquire(self.member.layout.lock_of(other.group))?;
            let tag = Tag(self.member.lines.fresh(self.member.layout.tag(*other))?);
            self.member.lines.consume(self.member.layout.entry(*other), LINE)?;
            let entry = Entry::load(&self.member, *other, tag)?;
            held.release()?;
            let points = |entry: &Entry| entry.places().any(|at| at == place);
            if tag.state() != Some(State::Empty) && entry.as_ref().is_some_and(points) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn check_pins(&self, repair: bool, found: &mut Found) -> Result<(), PoolError> {
        let member = &self.member;
        let slots = u64::from(member.layout.geometry.groups) * SLOTS;
        for node in 0..member.layout.geometry.nodes {
            let (incarnation, joined) = member.incarnation(node)?;
            let is_nobodys = !joined && incarnation <= member.fenced(node)?;
            for pin in 0..PINS {
                let at = member.layout.hazard(node, pin);
                let slot = member.lines.fresh(at)?;
                if slot != 0 && (is_nobodys || slot > slots) {
                    found.say("a pin of nobody", at);
                    if repair {
                        member.lines.post(at, 0)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Each chunk in use is somebody's who lives, or will be recovered.
    fn check_chunks(&self, repair: bool, found: &mut Found) -> Result<(), PoolError> {
        let member = &self.member;
        let mut nobody = BTreeSet::new();
        {
            let held = member.acquire(ALLOC)?;
            let (first, length) = member.layout.all_bits();
            member.lines.invalidate(first, length)?;
            let (first, length) = member.layout.all_chunks();
            member.lines.invalidate(first, length)?;
            // Looking at the directory completes that.
            let (known, damaged) = self.classes()?;
            for class in damaged {
                let at = member.layout.class(class.0);
                found.say("a class that does not check", at);
                if repair {
                    member.lines.store(at, &class::lost_line())?;
                    member.lines.publish(at, LINE)?;
                }
            }
            let mut inner = 0;
            for chunk in 0..member.layout.geometry.chunks {
                if !is_taken(member, chunk)? {
                    inner = 0;
                    continue;
                }
                let owner = Owner::load(member, chunk)?;
                if self.member.is_nobody(owner.node, owner.incarnation)? {
                    found.say("a chunk of nobody", member.layout.chunk_at(chunk));
                    nobody.insert((owner.node, owner.incarnation));
                } else if owner.run == 0 && inner == 0
                    || owner.run > 0 && !owner.is_sound(&member.layout, chunk)
                {
                    found.say("a chunk that is part of nothing", member.layout.chunk_at(chunk));
                }
                if !known.contains(&owner.class) {
                    found.say("a chunk of no known class", member.layout.chunk_at(chunk));
                    if repair {
                        Owner { class: UNTOLD, ..owner }.store(member, chunk)?;
                        member.lines.publish(member.layout.chunk(chunk), 16)?;
                    }
                }
                inner = if owner.run > 0 { owner.run } else { inner }.saturating_sub(1);
            }
            held.release()?;
        }
        if repair && !nobody.is_empty() {
            adopt_all(member, &self.heap, &|node, incarnation| nobody.contains(&(node, incarnation)))?;
        }
        Ok(())
    }

    /// What this node's heap holds to be in use is what the table points to.
    fn check_heap(&self, repair: bool, found: &mut Found) -> Result<(), PoolError> {
        let used = self.heap.used(&self.member.layout);
        let own = |at: &u64| self.heap.owns(&self.member.layout, *at);
        // What this check dropped is free now, which is no problem of its own.
        for at in found.dropped.iter().filter(|at| used.contains(at)) {
            self.heap.give(&self.member, *at)?;
        }
        let pointed: BTreeSet<u64> = found.places.keys().copied().filter(own).collect();
        for at in used.difference(&pointed) {
            // What was adopted since the table was looked at is right.
            if found.problems.iter().any(|problem| problem.what == "a chunk of nobody") {
                break;
            }
            found.problems.insert(Problem { what: "a place in use that nothing points to", at: *at });
            if repair {
                self.heap.give(&self.member, *at)?;
            }
        }
        for at in pointed.difference(&used) {
            let (_, slot, tag) = found.places[at];
            found.problems.insert(Problem { what: "a free place that an entry points to", at: *at });
            if repair {
                self.drop_slot(slot, tag)?;
            }
        }
        Ok(())
    }
}

struct Found {
    problems: BTreeSet<Problem>,
    places: Places,
    doubts: BTreeSet<Slot>,
    ready: Vec<(Slot, Tag)>,
    /// Places of what was dropped because its bytes do not check.
    dropped: BTreeSet<u64>,
}

impl Found {
    fn say(&mut self, what: &'static str, at: u64) {
        self.problems.insert(Problem { what, at });
    }

    /// Two slots that point to one place: it may have been the one's before it was the other's.
    fn doubtful(&mut self, one: Slot, other: Slot) {
        self.doubts.extend([one, other]);
    }
}
