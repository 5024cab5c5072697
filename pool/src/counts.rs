//! What nodes count, and tell in the pool for whoever looks: each node what it did, in a record of
//! its own; the manager what the table holds, which it goes through in parts.
//!
//! Nothing depends on these numbers. A record that does not check is not there; one that is late is
//! told again. So no fence is made for them: what is flushed and dropped here is so by the next
//! that the node makes anyway, and what the manager counts may be a turn old.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use crate::class::{Class, OWN, Share};
use crate::error::PoolError;
use crate::heap::{Owner, is_taken};
use crate::layout::{CLASSES, RECORD, SHARES, Slot, is_sealed, seal, word};
use crate::member::{Member, interval};
use crate::table::{Entry, State, tags};

/// Bytes of a node's name.
const NAME: usize = 40;
/// Turns in which the manager goes through the table, and the groups of a turn at least.
const TURNS: u32 = 64;
const MIN_GROUPS: u32 = 64;

/// What this node did.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) hits: AtomicU64,
    pub(crate) misses: AtomicU64,
    pub(crate) stores: AtomicU64,
    pub(crate) evictions: AtomicU64,
    pub(crate) recoveries: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) stored_bytes: AtomicU64,
}

impl Counts {
    pub(crate) fn add(counter: &AtomicU64, many: u64) {
        counter.fetch_add(many, Ordering::Relaxed);
    }

    /// These and the times that locks were waited for, in the order of a record.
    fn all(&self, member: &Member) -> [u64; 8] {
        let Self { hits, misses, stores, evictions, recoveries, read_bytes, stored_bytes } = self;
        [hits, misses, stores, evictions, recoveries, &member.waits, read_bytes, stored_bytes]
            .map(|counter| counter.load(Ordering::Relaxed))
    }
}

/// What was done under a node's number, by all who had it, since the pool was made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NodeCounts {
    /// The number.
    pub node: u32,
    /// What the last who had it is called: a host's name, or a process's number and program.
    pub name: String,
    /// Gets and lookups that found what they wanted.
    pub hits: u64,
    /// Those that did not.
    pub misses: u64,
    /// Objects and blocks stored.
    pub stores: u64,
    /// Blocks evicted for space.
    pub evictions: u64,
    /// Dead nodes recovered.
    pub recoveries: u64,
    /// Times that a lock was not to be had at once.
    pub lock_waits: u64,
    /// Bytes read of objects and blocks.
    pub read_bytes: u64,
    /// Bytes stored.
    pub stored_bytes: u64,
}

impl NodeCounts {
    /// What a record says, if it checks. It was written by whoever could.
    pub(crate) fn of_record(node: u32, record: &[u8; RECORD as usize]) -> Option<Self> {
        // Zeros were never written, and check as well as anything.
        if !is_sealed(record) || word(record, 0) == 0 {
            return None;
        }
        let name = &record[10 * 8..10 * 8 + NAME];
        let name = String::from_utf8_lossy(name.split(|byte| *byte == 0).next().unwrap_or_default());
        Some(Self {
            node,
            name: name.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect(),
            hits: word(record, 1),
            misses: word(record, 2),
            stores: word(record, 3),
            evictions: word(record, 4),
            recoveries: word(record, 5),
            lock_waits: word(record, 6),
            read_bytes: word(record, 7),
            stored_bytes: word(record, 8),
        })
    }

    fn numbers(&self) -> [u64; 8] {
        let Self {
            hits, misses, stores, evictions, recoveries, lock_waits, read_bytes, stored_bytes, ..
        } = *self;
        [hits, misses, stores, evictions, recoveries, lock_waits, read_bytes, stored_bytes]
    }
}

/// What the table holds, by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Occupancy {
    /// Slots that a writer fills.
    pub reserved: u64,
    /// Blocks that are ready.
    pub blocks: u64,
    /// Objects that are ready.
    pub objects: u64,
    /// Slots that wait for their owner, or for a pin to go.
    pub evicting: u64,
    /// Bytes of the objects and blocks that are ready.
    pub ready_bytes: u64,
    /// Bytes of the chunks that are in use.
    pub taken_bytes: u64,
}

impl Occupancy {
    /// What a record says, if it checks.
    pub(crate) fn of_record(record: &[u8; RECORD as usize]) -> Option<Self> {
        (is_sealed(record) && word(record, 0) != 0).then(|| Self {
            reserved: word(record, 1),
            blocks: word(record, 2),
            objects: word(record, 3),
            evicting: word(record, 4),
            ready_bytes: word(record, 5),
            taken_bytes: word(record, 6),
        })
    }
}

/// What is held, by class: bytes that are ready, and bytes of the chunks in use.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shares([(u64, u64); CLASSES as usize]);

impl Shares {
    /// What a record says, if it checks.
    pub(crate) fn of_record(record: &[u8; SHARES as usize]) -> Option<Self> {
        let share = |class: usize| (word(record, 1 + 2 * class), word(record, 2 + 2 * class));
        (is_sealed(record) && word(record, 0) != 0).then(|| Self(std::array::from_fn(share)))
    }

    /// With what a directory calls them. The pool's own is the first, and without a name.
    pub(crate) fn of(&self, directory: &[Option<Class>]) -> Vec<Share> {
        let named = self.0.iter().zip(directory).enumerate();
        let shares = named.filter_map(|(number, (&(ready_bytes, taken_bytes), class))| {
            let class = class.as_ref().map(ToString::to_string);
            let class = if number == 0 { Some(String::new()) } else { class };
            class.map(|class| Share { class, ready_bytes, taken_bytes })
        });
        shares.collect()
    }

    /// The share of the chunk in which a byte lies. What is of no known class counts as the pool's.
    fn share(&mut self, member: &Member, at: u64) -> Result<&mut (u64, u64), PoolError> {
        let class = match member.layout.chunk_of(at) {
            Some(chunk) => Owner::load(member, chunk)?.class,
            None => OWN,
        };
        let number = if u32::from(class.0) < CLASSES { usize::from(class.0) } else { 0 };
        Ok(&mut self.0[number])
    }

    /// Adds the chunks in use, as this node sees them: bytes of all.
    pub(crate) fn take(&mut self, member: &Member) -> Result<u64, PoolError> {
        let bytes = member.layout.geometry.chunk_bytes;
        let mut all = 0;
        for chunk in 0..member.layout.geometry.chunks {
            if is_taken(member, chunk)? {
                self.share(member, member.layout.chunk_at(chunk))?.1 += bytes;
                all += bytes;
            }
        }
        Ok(all)
    }

    /// Adds what groups hold, as this node sees them, here and to what is held of any class.
    pub(crate) fn add(
        &mut self,
        member: &Member,
        all: &mut Occupancy,
        groups: Range<u32>,
    ) -> Result<(), PoolError> {
        for group in groups {
            for (index, tag) in tags(member, group)?.into_iter().enumerate() {
                match tag.state() {
                    Some(State::Reserved) => all.reserved += 1,
                    Some(State::Block | State::Named) => all.blocks += 1,
                    Some(State::Object) => all.objects += 1,
                    Some(State::Evicting) => all.evicting += 1,
                    _ => {}
                }
                if tag.is_ready() {
                    let entry = Entry::load(member, Slot { group, index: index as u32 }, tag)?;
                    if let Some(entry) = entry {
                        all.ready_bytes += entry.length;
                        self.share(member, entry.at)?.0 += entry.length;
                    }
                }
            }
        }
        Ok(())
    }
}

/// What is told, and when the next is due.
#[derive(Debug, Default)]
pub(crate) struct Telling {
    next: u64,
    told: u64,
    name: String,
    /// What those told who had this number before; none before it was looked for.
    before: Option<[u64; 8]>,
    last: [u64; 8],
    /// The census so far, and the group that is next.
    census: Occupancy,
    shares: Shares,
    group: u32,
    taken: u64,
}

impl Telling {
    /// Does what is due.
    pub(crate) fn turn(&mut self, member: &Member, counts: &Counts) -> Result<(), PoolError> {
        let now = member.host.now();
        if now < self.next {
            return Ok(());
        }
        self.next = now + interval(&*member.host);
        self.tell(member, counts)?;
        if member.leads() {
            return self.go_on(member);
        }
        (self.census, self.shares, self.group) = (Occupancy::default(), Shares::default(), 0);
        Ok(())
    }

    /// Tells what this node did, if that is more than was told.
    pub(crate) fn tell(&mut self, member: &Member, counts: &Counts) -> Result<(), PoolError> {
        let now = counts.all(member);
        if now == self.last && self.told > 0 {
            return Ok(());
        }
        let at = member.layout.counts(member.node);
        let mut record = [0; RECORD as usize];
        let before = if let Some(before) = self.before {
            before
        } else {
            self.name = member.host.name(member.node);
            member.lines.consume(at, RECORD)?;
            member.lines.load(at, &mut record)?;
            let told = NodeCounts::of_record(member.node, &record);
            *self.before.insert(told.unwrap_or_default().numbers())
        };
        self.last = now;
        self.told += 1;
        let numbers = now.iter().zip(before).map(|(now, before)| before.wrapping_add(*now));
        let words: Vec<_> = std::iter::once(self.told).chain(numbers).collect();
        record.fill(0);
        // Half a character at its end is shown as such.
        let length = self.name.len().min(NAME);
        record[80..80 + length].copy_from_slice(&self.name.as_bytes()[..length]);
        put(member, at, &words, &mut record)
    }

    /// Counts some more groups; behind the last, tells what there is.
    fn go_on(&mut self, member: &Member) -> Result<(), PoolError> {
        let all = member.layout.geometry.groups;
        let most = (all / TURNS).max(MIN_GROUPS);
        let last = self.group.saturating_add(most).min(all);
        self.shares.add(member, &mut self.census, self.group..last)?;
        self.group = if last < all { last } else { 0 };
        if last == all {
            let (census, mut shares) = (std::mem::take(&mut self.census), std::mem::take(&mut self.shares));
            let Occupancy { reserved, blocks, objects, evicting, ready_bytes, .. } = census;
            self.taken += 1;
            let taken = shares.take(member)?;
            let words = [self.taken, reserved, blocks, objects, evicting, ready_bytes, taken];
            put(member, member.layout.census(), &words, &mut [0; RECORD as usize])?;
            let by_class = shares.0.iter().flat_map(|(ready, taken)| [*ready, *taken]);
            let words: Vec<_> = std::iter::once(self.taken).chain(by_class).collect();
            put(member, member.layout.shares(), &words, &mut [0; SHARES as usize])?;
            for (first, length) in [member.layout.all_bits(), member.layout.all_chunks()] {
                member.lines.invalidate(first, length)?;
            }
        }
        // What the next turn looks at.
        let next = self.group..self.group.saturating_add(most).min(all);
        let (first, length) = member.layout.groups(&next);
        Ok(member.lines.invalidate(first, length)?)
    }
}

/// Stores a record of these words, and whatever else it holds.
fn put(member: &Member, at: u64, words: &[u64], record: &mut [u8]) -> Result<(), PoolError> {
    for (index, word) in words.iter().enumerate() {
        record[8 * index..8 * index + 8].copy_from_slice(&word.to_le_bytes());
    }
    seal(record);
    member.lines.store(at, record)?;
    Ok(member.lines.flush(at, record.len() as u64)?)
}
