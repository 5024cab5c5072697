//! What becomes of a dead node's things: who manages takes them over.
//!
//! Its locks are given up before (`member`). Then its reservations are dropped and its chunks
//! adopted: what the table points to in them is in use, the rest is free. Each step can be done
//! again, so a manager that dies in it leaves the rest to the next.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::PoolError;
use crate::heap::{Heap, Owner, is_taken};
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
    let mut used: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
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
                let mut left = None;
                if let Some(entry) = Entry::load(member, slot, tag)? {
                    left = match tag.state() {
                        Some(State::Reserved) if is_dead(entry.writer, entry.incarnation) => {
                            // A server's heap may hold it: then that takes it back.
                            let owned = is_of(member, &entry, &chunks);
                            (!owned).then(|| tag.with(State::Evicting))
                        }
                        Some(State::Evicting) if is_free(member, slot, &entry, &chunks)? => None,
                        _ => Some(tag),
                    };
                    if left.is_some() {
                        note(member, &entry, &chunks, &mut used);
                    }
                }
                // By what cannot be read nothing can be found.
                if left != Some(tag) {
                    member.lines.post(member.layout.tag(slot), left.map_or(0, |tag| tag.0))?;
                }
            }
        }
        held.release()?;
    }
    let held = member.acquire(ALLOC)?;
    let now = chunks_of(member, is_dead)?;
    for (chunk, owner) in now {
        // Another may have adopted it meanwhile, and a run goes by its first chunk.
        if !chunks.contains_key(&chunk) || owner.run == 0 && is_inner(member, chunk)? {
            continue;
        }
        let none = BTreeSet::new();
        let places = if owner.is_sound(&member.layout, chunk) { used.get(&chunk) } else { None };
        heap.adopt(member, chunk, owner, places.unwrap_or(&none))?;
    }
    held.release()
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

/// Notes what an entry uses of `chunks`.
fn note(
    member: &Member,
    entry: &Entry,
    chunks: &BTreeMap<u32, Owner>,
    used: &mut BTreeMap<u32, BTreeSet<u32>>,
) {
    for at in entry.places() {
        if let Some(chunk) = member.layout.chunk_of(at)
            && let Some(owner) = chunks.get(&chunk)
            && let Some(place) = owner.place(&member.layout, chunk, at)
        {
            used.entry(chunk).or_default().insert(place);
        }
    }
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
