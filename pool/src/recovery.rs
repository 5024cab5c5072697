//! What becomes of a dead node's things: who manages takes them over.
//!
//! Its locks are given up before (`member`). Then its reservations are dropped and its chunks
//! adopted: what the table points to in them is in use, the rest is free. Each step can be done
//! again, so a manager that dies in it leaves the rest to the next.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::PoolError;
use crate::heap::{Extents, Heap, Owner, is_taken, mark};
use crate::layout::{ALLOC, Slot};
use crate::mem::LINE;
use crate::member::Member;
use crate::table::{Entry, State, is_pinned, tags};

/// Recovers a node up to an incarnation.
pub(crate) fn recover(member: &Member, heap: &Heap, node: u32, last: u32) -> Result<(), PoolError> {
    clear_pins(member, node, last)?;
    adopt_all(member, heap, &|of, incarnation| of == node && incarnation <= last)?;
    member.recovered(node, last)
}

/// Drops the reservations and adopts the chunks of all for whom `is_dead`.
pub(crate) fn adopt_all(
    member: &Member,
    heap: &Heap,
    is_dead: &dyn Fn(u32, u32) -> bool,
) -> Result<(), PoolError> {
    // Nobody takes places in them any more, so this stays as it is.
    let chunks = chunks_of(member, is_dead)?;
    let mut used = Used::default();
    for stripe in 0..member.layout.geometry.stripes {
        let held = member.acquire(1 + stripe)?;
        for group in (stripe..member.layout.geometry.groups).step_by(member.layout.geometry.stripes as usize)
        {
            member.lines.consume(member.layout.tags(group), LINE)?;
            for (index, tag) in tags(member, group)?.into_iter().enumerate() {
                if tag.state() == Some(State::Empty) {
                    continue;
                }
                let slot = Slot { group, index: index as u32 };
                member.lines.consume(member.layout.entry(slot), LINE)?;
                let entry = Entry::load(member, slot, tag)?;
                let left = match (tag.state(), &entry) {
                    (Some(State::Reserved), Some(entry)) if is_dead(entry.writer, entry.incarnation) => {
                        // A server's heap may hold it: then that takes it back.
                        let owned = is_of(member, entry, &chunks);
                        (!owned).then(|| tag.with(State::Evicting))
                    }
                    (Some(State::Evicting), Some(entry)) if is_free(member, slot, entry, &chunks)? => None,
                    // Whoever filled it died at its entry. By what cannot be read nothing is found.
                    (Some(State::Reserved | State::Evicting), None) => None,
                    // What was ready and cannot be read is for `check` to tell.
                    _ => Some(tag),
                };
                if let (Some(_), Some(entry)) = (left, &entry) {
                    used.note(member, entry, &chunks);
                }
                if left != Some(tag) {
                    member.lines.post(member.layout.tag(slot), left.map_or(0, |tag| tag.0))?;
                }
            }
        }
        held.release()?;
    }
    let held = member.acquire(ALLOC)?;
    let now = chunks_of(member, is_dead)?;
    for (chunk, owner) in &now {
        // Another may have adopted it meanwhile, and a run goes by its first chunk.
        let is_behind = used.behind.contains(chunk) || owner.run == 0 && is_inner(member, *chunk)?;
        match used.begins.get(chunk) {
            _ if !chunks.contains_key(chunk) => {}
            Some(extents) => {
                // Of what does not fit nobody can say what is free: it stays until it is dropped.
                let fitted = owner.fitted(&member.layout, *chunk, extents);
                if let Some(owner) = fitted.filter(|owner| used.has_run(*chunk, owner, &now)) {
                    heap.adopt(member, *chunk, owner, extents)?;
                }
            }
            None if is_behind => {}
            None => give_back(member, *chunk, owner, &used)?,
        }
    }
    held.release()
}

/// What the table points to.
#[derive(Default)]
struct Used {
    /// In chunks that are to be adopted.
    begins: BTreeMap<u32, Extents>,
    /// Chunks into which something reaches that begins in one before.
    behind: BTreeSet<u32>,
}

impl Used {
    fn note(&mut self, member: &Member, entry: &Entry, chunks: &BTreeMap<u32, Owner>) {
        for (at, length) in entry.extents() {
            let Some(chunk) = member.layout.chunk_of(at) else { continue };
            if let Some(last) = member.layout.chunk_of(at + (length - 1)) {
                self.behind.extend(chunk + 1..=last);
            }
            if chunks.contains_key(&chunk) {
                let longest = self.begins.entry(chunk).or_default().entry(at).or_default();
                *longest = length.max(*longest);
            }
        }
    }

    /// Whether the chunks behind the first of a run are there to be adopted with it. Of words that
    /// were not damaged that is known.
    fn has_run(&self, chunk: u32, owner: &Owner, now: &BTreeMap<u32, Owner>) -> bool {
        let is_as_said = now.get(&chunk) == Some(owner);
        let is_free = |inner: u32| now.contains_key(&inner) && !self.begins.contains_key(&inner);
        is_as_said || (chunk + 1..chunk + owner.run).all(is_free)
    }
}

/// Gives a dead node's chunk back, to which nothing points, and those of its run. Lock 0 is held.
fn give_back(member: &Member, chunk: u32, owner: &Owner, used: &Used) -> Result<(), PoolError> {
    // Whoever died while it took a run, or gave it back, had not all of it, and others may have
    // taken the rest since. What is another's begins with a run of its own.
    let end = if owner.is_sound(&member.layout, chunk) { chunk + owner.run } else { chunk + 1 };
    let is_used = |inner| used.behind.contains(&inner) || used.begins.contains_key(&inner);
    let mut own = 1;
    while chunk + own < end && !is_used(chunk + own) && Owner::load(member, chunk + own)?.run == 0 {
        own += 1;
    }
    mark(member, chunk, own, false)
}

/// Whether an evicted slot's places are all in `chunks`, and nobody has it pinned.
fn is_free(
    member: &Member,
    slot: Slot,
    entry: &Entry,
    chunks: &BTreeMap<u32, Owner>,
) -> Result<bool, PoolError> {
    Ok(is_of(member, entry, chunks) && !is_pinned(member, slot)?)
}

/// Whether an entry's places are all in `chunks`.
fn is_of(member: &Member, entry: &Entry, chunks: &BTreeMap<u32, Owner>) -> bool {
    entry.places().all(|at| member.layout.chunk_of(at).is_some_and(|chunk| chunks.contains_key(&chunk)))
}

/// Whether a chunk lies behind the first of a run that is in use.
fn is_inner(member: &Member, chunk: u32) -> Result<bool, PoolError> {
    for first in (0..chunk).rev() {
        let owner = Owner::load(member, first)?;
        if owner.run > 0 {
            return Ok(first.saturating_add(owner.run) > chunk && is_taken(member, first)?);
        }
    }
    Ok(false)
}

fn clear_pins(member: &Member, node: u32, last: u32) -> Result<(), PoolError> {
    // A later incarnation has pins of its own, and began by clearing.
    if last < member.incarnation(node)?.0 {
        return Ok(());
    }
    for pin in 0..crate::layout::PINS {
        // All words of its lines: what they held does not matter.
        member.lines.set(member.layout.hazard(node, pin), 0)?;
    }
    member.lines.publish(member.layout.hazard(node, 0), 8 * crate::layout::PINS as u64)?;
    Ok(())
}

/// The chunks of all for whom `is_dead`.
fn chunks_of(member: &Member, is_dead: &dyn Fn(u32, u32) -> bool) -> Result<BTreeMap<u32, Owner>, PoolError> {
    let (first, length) = member.layout.all_bits();
    member.lines.invalidate(first, length)?;
    let (first, length) = member.layout.all_chunks();
    member.lines.invalidate(first, length)?;
    member.lines.settle()?;
    let mut found = BTreeMap::new();
    for chunk in 0..member.layout.geometry.chunks {
        if is_taken(member, chunk)? {
            let owner = Owner::load(member, chunk)?;
            if is_dead(owner.node, owner.incarnation) {
                found.insert(chunk, owner);
            }
        }
    }
    Ok(found)
}
