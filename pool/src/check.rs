//! Verifies every invariant of a pool, also while others use it, and mends what can be.
//!
//! Each group is looked at under its lock. What was found wrong across groups is looked at again
//! before it is reported: others may have changed it meanwhile.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::class::{self, UNTOLD};
use crate::error::PoolError;
use crate::heap::{Extents, Owner, is_taken};
use crate::layout::{ALLOC, Layout, PINS, SLOTS, Slot};
use crate::mem::LINE;
use crate::pool::Pool;
use crate::recovery::adopt_all;
use crate::table::{Entry, State, Tag, group, sweep, tags};

/// Times that a repair goes through the pool: a mend may bring out what is to be mended next.
const MAX_REPAIRS: u32 = 3;

/// Something that does not hold.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Problem {
    /// What.
    pub what: &'static str,
    /// Where.
    pub at: u64,
    /// Whether it was mended: afterwards it was not found any more.
    pub mended: bool,
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Objects and blocks that are ready and check.
    pub ready: u64,
    /// Their bytes.
    pub bytes: u64,
    /// What does not hold, or did not before it was mended.
    pub problems: Vec<Problem>,
    /// Whether all that did not hold was mended.
    pub repaired: bool,
}

/// What is in use, and by which slot.
type Places = BTreeMap<u64, (u64, Slot, Tag)>;

impl Pool {
    /// Verifies every invariant; with `repair` mends what does not hold: what cannot be read is
    /// dropped, what is nobody's is taken back once no other node is attached, whose it may be.
    /// Other threads of this node must rest.
    ///
    /// # Errors
    /// [`PoolError::Fenced`], [`PoolError::Mem`], [`PoolError::Timeout`].
    pub fn check(&self, repair: bool) -> Result<Report, PoolError> {
        let mut found = self.look_through(repair)?;
        let mut all = found.problems.clone();
        for turn in 1..=MAX_REPAIRS {
            if !repair || found.problems.is_empty() {
                break;
            }
            // The last only looks.
            found = self.look_through(turn < MAX_REPAIRS)?;
            all.extend(&found.problems);
        }
        let is_mended = |problem: &(&str, u64)| repair && !found.problems.contains(problem);
        let of = |problem: (&'static str, u64)| {
            let (what, at) = problem;
            Problem { what, at, mended: is_mended(&problem) }
        };
        Ok(Report {
            ready: found.whole.0,
            bytes: found.whole.1,
            problems: all.into_iter().map(of).collect(),
            repaired: repair && found.problems.is_empty(),
        })
    }

    /// Goes through the pool once.
    fn look_through(&self, repair: bool) -> Result<Found, PoolError> {
        self.serve()?;
        // What nobody told this node of is no fault.
        sweep(&self.member, &self.heap)?;
        let mut found = Found {
            whole: (0, 0),
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
        self.check_nodes(repair, &mut found)?;
        for group in 0..self.member.layout.geometry.groups {
            self.check_group(group, repair, &mut found)?;
        }
        self.check_bytes(repair, &mut found)?;
        self.check_chunks(repair, &mut found)?;
        self.check_pins(repair, &mut found)?;
        self.check_heap(repair, &mut found)?;
        self.member.alive()?;
        Ok(found)
    }

    /// Whoever is said to be recovered has lived. By these words the rest is somebody's or
    /// nobody's.
    fn check_nodes(&self, repair: bool, found: &mut Found) -> Result<(), PoolError> {
        let member = &self.member;
        for node in 0..member.layout.geometry.nodes {
            let (is_wrong, right) = member.misfenced(node)?;
            if !is_wrong {
                continue;
            }
            let at = member.layout.fenced(node);
            found.say("a node that is said to be recovered and is not", at);
            if let Some(right) = right.filter(|_| repair) {
                member.alive()?;
                member.lines.post(at, u64::from(right))?;
            }
        }
        Ok(())
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
            // Its writer may fill it now, and be said to be recovered by a word that was damaged.
            let mut is_filled = false;
            let wrong = match (tag.state(), Entry::load(member, slot, tag)?) {
                (None, _) => Some("a tag of no known state"),
                (_, None) => Some("an entry that does not check"),
                (_, Some(entry)) if group(member, &entry.key) != number => {
                    Some("an entry in another's group")
                }
                (Some(State::Reserved), Some(entry))
                    if self.member.is_nobody(entry.writer, entry.incarnation)? =>
                {
                    is_filled = entry.writer != member.node && member.may_live(entry.writer)?;
                    Some("a reservation of nobody")
                }
                (Some(state), Some(entry)) if state.is_ready() && !keys.insert(entry.key) => {
                    Some("a key that is there twice")
                }
                (_, Some(entry)) => {
                    if tag.is_ready() {
                        found.ready.push((slot, tag));
                    }
                    for (place, length) in entry.extents() {
                        if let Some((_, other, _)) = found.places.insert(place, (length, slot, tag)) {
                            found.doubtful(other, slot);
                        }
                    }
                    None
                }
            };
            if let Some(wrong) = wrong {
                found.say(wrong, at);
                if repair && !is_filled {
                    member.lines.post(at, 0)?;
                }
            }
        }
        held.release()
    }

    fn check_bytes(&self, repair: bool, found: &mut Found) -> Result<(), PoolError> {
        for (slot, tag) in std::mem::take(&mut found.ready) {
            let Some(pin) = self.pins.pin(&self.member, slot, tag)? else { continue };
            let mut bytes = vec![0; pin.entry.length as usize];
            let named = !tag.state().is_some_and(State::has_name) || self.name(&pin.entry)?.is_some();
            let crc = self.load(&pin, &mut [&mut bytes])?;
            if self.is_whole(&pin, &crc)? && named {
                found.whole.0 += 1;
                found.whole.1 += pin.entry.length;
                continue;
            }
            found.say("bytes that do not check", pin.entry.at);
            let places: Vec<u64> = pin.entry.places().collect();
            drop(pin);
            if repair {
                self.drop_slot(slot, tag)?;
                // Of two that point to one place the other may keep it.
                if !found.doubts.contains(&slot) {
                    for place in &places {
                        found.places.remove(place);
                    }
                    found.dropped.extend(places);
                }
            }
        }
        Ok(())
    }

    /// Drops what points to places that cannot be its own.
    fn check_places(
        &self,
        repair: bool,
        wrong: Vec<(u64, Slot, Tag)>,
        found: &mut Found,
    ) -> Result<(), PoolError> {
        let member = &self.member;
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
                found.say("a place that cannot be the entry's", place);
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

    /// Each chunk in use is somebody's who lives, or will be recovered, and carved as what lies in
    /// it. Each place lies in a chunk that is in use, begins where one of its places does, and is
    /// one entry's.
    fn check_chunks(&self, repair: bool, found: &mut Found) -> Result<(), PoolError> {
        let member = &self.member;
        let (mut nobody, mut wrong) = (BTreeSet::new(), Vec::new());
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
            // The run before, and its end.
            let mut run: Option<(Owner, u32)> = None;
            for chunk in 0..member.layout.geometry.chunks {
                if !is_taken(member, chunk)? {
                    run = None;
                    continue;
                }
                let owner = Owner::load(member, chunk)?;
                let first = run.filter(|(_, end)| chunk < *end).map(|(first, _)| first);
                let is_nobodys = member.is_nobody(owner.node, owner.incarnation)?;
                let (is_right, right) = self.check_owner(chunk, owner, is_nobodys, first, found)?;
                if !is_right {
                    let what =
                        if is_nobodys { "a chunk of nobody" } else { "a chunk that is part of nothing" };
                    found.say(what, member.layout.chunk_at(chunk));
                }
                let is_known = known.contains(&owner.class);
                if !is_known {
                    found.say("a chunk of no known class", member.layout.chunk_at(chunk));
                }
                let mended = Owner { class: if is_known { owner.class } else { UNTOLD }, ..right };
                if repair && mended != owner {
                    member.alive()?;
                    mended.store(member, chunk)?;
                    member.lines.publish(member.layout.chunk(chunk), 16)?;
                }
                if is_nobodys && (right.node, right.incarnation) == (owner.node, owner.incarnation) {
                    nobody.insert((owner.node, owner.incarnation));
                }
                if right.is_sound(&member.layout, chunk) {
                    run = Some((right, chunk + right.run));
                }
            }
            for (place, (length, slot, tag)) in &found.places {
                let Some(chunk) = member.layout.chunk_of(*place) else { continue };
                let fits = is_taken(member, chunk)?
                    && Owner::load(member, chunk)?.holds(&member.layout, chunk, *place, *length);
                if !fits || found.doubts.contains(slot) {
                    wrong.push((*place, *slot, *tag));
                }
            }
            held.release()?;
        }
        self.check_places(repair, wrong, found)?;
        // A living node's chunk may seem nobody's by a word that was damaged, and it fills its free
        // places nevertheless.
        if repair && !nobody.is_empty() && member.is_alone()? {
            adopt_all(member, &self.heap, &|node, incarnation| nobody.contains(&(node, incarnation)))?;
        }
        Ok(())
    }

    /// Whether what stands of a chunk in use is right, and what must stand there as far as is
    /// known. It lies in the run of `first` if there is one. Lock 0 is held.
    fn check_owner(
        &self,
        chunk: u32,
        owner: Owner,
        is_nobodys: bool,
        first: Option<Owner>,
        found: &Found,
    ) -> Result<(bool, Owner), PoolError> {
        let (member, layout) = (&self.member, &self.member.layout);
        // This node knows what it has.
        if let Some(own) = self.heap.owner(member, chunk) {
            let right = Owner { class: owner.class, ..own };
            return Ok((owner == right, right));
        }
        let is_sound = owner.is_sound(layout, chunk);
        if let Some(first) = first.filter(|_| !is_sound) {
            let is_right = owner.run == 0 && !is_nobodys;
            return Ok((
                is_right,
                if is_right { owner } else { Owner { class: owner.class, run: 0, ..first } },
            ));
        }
        let extents = found.extents(layout, chunk);
        if owner.fits(layout, chunk, &extents) {
            return Ok((!is_nobodys, owner));
        }
        // Only what is still there says how the chunk is carved: with that in it, it stays so.
        let mut there = Extents::new();
        for (at, length) in extents {
            let (_, slot, tag) = found.places[&at];
            if member.lines.fresh(layout.tag(slot))? == tag.0 {
                there.insert(at, length);
            }
        }
        if owner.fits(layout, chunk, &there) {
            return Ok((!is_nobodys, owner));
        }
        let Some(fitted) = owner.fitted(layout, chunk, &there) else { return Ok((false, owner)) };
        for inner in chunk + 1..chunk + fitted.run {
            let other = Owner::load(member, inner)?;
            let is_others =
                other.is_sound(layout, inner) && !member.is_nobody(other.node, other.incarnation)?;
            if is_others || !is_taken(member, inner)? {
                return Ok((false, owner));
            }
        }
        Ok((false, fitted))
    }

    /// What this node's heap holds to be in use is what the table points to.
    fn check_heap(&self, repair: bool, found: &mut Found) -> Result<(), PoolError> {
        let used = self.heap.used(&self.member.layout);
        let own = |at: &u64| self.heap.owns(&self.member.layout, *at);
        // What this check dropped is free now, which is no problem of its own.
        for at in found.dropped.iter().filter(|at| used.contains(at)) {
            self.heap.give(&self.member, *at)?;
        }
        let used = self.heap.used(&self.member.layout);
        let pointed: BTreeSet<u64> = found.places.keys().copied().filter(own).collect();
        for at in used.difference(&pointed) {
            // What was adopted since the table was looked at is right.
            if found.problems.iter().any(|(what, _)| *what == "a chunk of nobody") {
                break;
            }
            found.say("a place in use that nothing points to", *at);
            if repair {
                self.heap.give(&self.member, *at)?;
            }
        }
        for at in pointed.difference(&used) {
            let (_, slot, tag) = found.places[at];
            found.say("a free place that an entry points to", *at);
            if repair {
                self.drop_slot(slot, tag)?;
            }
        }
        Ok(())
    }
}

struct Found {
    /// What is ready and checks: how many, and their bytes.
    whole: (u64, u64),
    /// What does not hold, and where.
    problems: BTreeSet<(&'static str, u64)>,
    places: Places,
    doubts: BTreeSet<Slot>,
    ready: Vec<(Slot, Tag)>,
    /// Places of what was dropped because its bytes do not check.
    dropped: BTreeSet<u64>,
}

impl Found {
    fn say(&mut self, what: &'static str, at: u64) {
        self.problems.insert((what, at));
    }

    /// What begins in a chunk.
    fn extents(&self, layout: &Layout, chunk: u32) -> Extents {
        let within = self.places.range(layout.chunk_at(chunk)..layout.chunk_at(chunk + 1));
        within.map(|(at, (length, ..))| (*at, *length)).collect()
    }

    /// Two slots that point to one place: it may have been the one's before it was the other's.
    fn doubtful(&mut self, one: Slot, other: Slot) {
        self.doubts.extend([one, other]);
    }
}
