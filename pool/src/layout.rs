//! Where everything lies: offsets alone, all of them from a geometry that the superblock holds.
//!
//! Each line has one role that writes it:
//!
//! | area | a line each | writer |
//! |---|---|---|
//! | superblock | two lines | who creates |
//! | manager | one | who is elected |
//! | nodes | node | that node |
//! | fenced | node | the manager |
//! | server | one: who serves the index | the holder of lock 0 |
//! | census | two lines: what the table holds | the manager |
//! | counts | node, two lines: what it did | that node |
//! | classes | class: what its bytes are | the holder of lock 0, once |
//! | shares | five lines: what is held by class | the manager |
//! | doorbells | node, 512 locks | that node |
//! | requests | lock and node | that node |
//! | grants | lock | the manager; in coherent memory who takes and releases it |
//! | intents | lock | its holder |
//! | hazards | node, 8 pins | that node |
//! | rings | freeing node and owner: tail, head, entries | the freeing node, the owner, the freeing node |
//! | messages | client and server: request, response | client, server |
//! | bodies | client, 16 lines: what is longer than a request | client |
//! | bitmap, chunks | 512 chunks, 4 chunks | the holder of lock 0 |
//! | groups | tags, stamps, eight entries | the holder of the group's lock |

use std::ops::Range;

use crate::error::PoolError;
use crate::mem::{Crc, LINE, Lines};

const MAGIC: u64 = u64::from_le_bytes(*b"LAMIPOOL");
/// 2: slots may hold named blocks, of which programs of version 1 know nothing. 3: nodes tell what
/// they count, and there may be a server of the index. 4: a chunk has a class, which is said in the
/// word that says whose it is.
const VERSION: u64 = 4;
pub(crate) const SUPERBLOCK: u64 = 2 * LINE;
/// Slots of a group.
pub(crate) const SLOTS: u64 = 8;
/// Groups of a pool that fits few bytes.
const MIN_GROUPS: u32 = 4;
/// Nodes of a pool that was made without a word of them.
const NODES: u32 = 16;
/// Groups that a pool may have.
const MAX_GROUPS: u32 = 1 << 28;
/// Bytes that a pool may have, whose slots are one for each [`SLOT_BYTES`].
pub(crate) const MAX_BYTES: u64 = (MAX_GROUPS as u64) * SLOTS * SLOT_BYTES;
/// Bytes of memory for each slot of a pool that fits it.
const SLOT_BYTES: u64 = 16 << 10;
const GROUP: u64 = (2 + SLOTS) * LINE;
/// Lines of a node's pins.
const HAZARD_LINES: u64 = 8;
/// Pins that a node may have at a time.
pub(crate) const PINS: usize = (HAZARD_LINES * 8) as usize;
/// Bytes of a client's body.
pub(crate) const BODY_BYTES: u64 = 16 * LINE;
/// Bytes of a record of counts.
pub(crate) const RECORD: u64 = 2 * LINE;
/// Classes that a pool has, its own among them.
pub(crate) const CLASSES: u32 = 16;
/// Bytes of the record of what is held by class.
pub(crate) const SHARES: u64 = 5 * LINE;
const RING_LINES: u64 = 8;
/// What a ring holds.
pub(crate) const RING: u64 = RING_LINES * 8;
/// The lock of bitmap and chunks.
pub(crate) const ALLOC: u32 = 0;

/// How many there are of everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Nodes that may be attached at a time, up to 64.
    pub nodes: u32,
    /// Locks over the table.
    pub stripes: u32,
    /// Groups of eight slots: each holds an object or a block.
    pub groups: u32,
    /// Chunks.
    pub chunks: u32,
    /// Bytes of a chunk: a power of two.
    pub chunk_bytes: u64,
}

impl Geometry {
    /// A geometry for a memory of so many bytes: chunks of 2 MiB (less if it is small), and a slot
    /// for each 16 KiB. 16 nodes may be attached.
    pub fn fitting(bytes: u64) -> Self {
        Self::fitting_for(bytes, NODES)
    }

    /// [`Self::fitting`] for so many nodes. It takes no more than `bytes`, unless these are too few
    /// for any.
    pub fn fitting_for(bytes: u64, nodes: u32) -> Self {
        let chunk_bytes = if bytes < 64 << 20 { 256 << 10 } else { 2 << 20 };
        let slots = bytes / SLOT_BYTES;
        let groups = u32::try_from((slots / SLOTS).max(u64::from(MIN_GROUPS))).unwrap_or(u32::MAX);
        let most = u32::try_from(bytes / chunk_bytes).unwrap_or(u32::MAX);
        let mut found = Self { nodes, stripes: groups.min(64), groups, chunks: 1, chunk_bytes };
        if Layout::new(&found).is_ok_and(|layout| layout.end > bytes) {
            (found.stripes, found.groups) = (MIN_GROUPS, MIN_GROUPS);
        }
        let fits =
            |chunks| Layout::new(&Self { chunks, ..found.clone() }).is_ok_and(|layout| layout.end <= bytes);
        // The largest number of chunks that fits.
        let (mut low, mut high) = (1, most.max(1));
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if fits(middle) { low = middle } else { high = middle - 1 }
        }
        found.chunks = low;
        found
    }

    /// Bytes of memory that it takes.
    ///
    /// # Errors
    /// [`PoolError::Geometry`].
    pub fn bytes(&self) -> Result<u64, PoolError> {
        Layout::new(self).map(|layout| layout.end)
    }

    /// Where in the memory the chunks lie, in which objects are.
    ///
    /// # Errors
    /// [`PoolError::Geometry`].
    pub fn data(&self) -> Result<Range<u64>, PoolError> {
        Layout::new(self).map(|layout| layout.data..layout.end)
    }
}

/// Offsets of everything.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) geometry: Geometry,
    pub(crate) locks: u32,
    manager: u64,
    nodes: u64,
    fenced: u64,
    server: u64,
    census: u64,
    counts: u64,
    classes: u64,
    shares: u64,
    doorbells: u64,
    doorbell_lines: u64,
    requests: u64,
    grants: u64,
    intents: u64,
    hazards: u64,
    rings: u64,
    messages: u64,
    bodies: u64,
    bitmap: u64,
    chunks: u64,
    groups: u64,
    pub(crate) data: u64,
    pub(crate) end: u64,
}

impl Layout {
    pub(crate) fn new(geometry: &Geometry) -> Result<Self, PoolError> {
        let bad = |why: &str| Err(PoolError::Geometry(why.to_owned()));
        let Geometry { nodes, stripes, groups, chunks, chunk_bytes } = *geometry;
        if !(1..=64).contains(&nodes) {
            return bad(&format!("{nodes} nodes: it has 1 to 64"));
        }
        if !(1..=4096).contains(&stripes) {
            return bad(&format!("{stripes} stripes: it has 1 to 4096"));
        }
        if !(stripes..=MAX_GROUPS).contains(&groups) {
            return bad(&format!("{groups} groups of slots: it has {stripes} to {MAX_GROUPS}"));
        }
        if chunks == 0 || chunks >= 1 << 24 {
            return bad(&format!("{chunks} chunks: it has 1 to {}", (1 << 24) - 1));
        }
        if !chunk_bytes.is_power_of_two() || !(4 << 10..=1 << 30).contains(&chunk_bytes) {
            return bad(&format!("chunks of {chunk_bytes} bytes: powers of two from 4 KiB to 1 GiB"));
        }
        let locks = stripes + 1;
        let doorbell_lines = u64::from(locks).div_ceil(512);
        let (nodes, locks_wide) = (u64::from(nodes), u64::from(locks));
        // Bounded above: the sum stays below 2^56.
        let mut next = SUPERBLOCK;
        let mut area = |lines: u64| {
            let at = next;
            next += lines * LINE;
            at
        };
        let manager = area(1);
        let node_lines = area(nodes);
        let fenced = area(nodes);
        let server = area(1);
        let census = area(RECORD / LINE);
        let counts = area(nodes * RECORD / LINE);
        let classes = area(u64::from(CLASSES));
        let shares = area(SHARES / LINE);
        let doorbells = area(nodes * doorbell_lines);
        let requests = area(nodes * locks_wide);
        let grants = area(locks_wide);
        let intents = area(locks_wide);
        let hazards = area(nodes * HAZARD_LINES);
        let rings = area(nodes * nodes * (2 + RING_LINES));
        let messages = area(nodes * nodes * 2);
        let bodies = area(nodes * BODY_BYTES / LINE);
        let bitmap = area(u64::from(chunks).div_ceil(512));
        let chunk_lines = area(u64::from(chunks).div_ceil(4));
        let group_lines = area(u64::from(groups) * GROUP / LINE);
        let data = next.next_multiple_of(chunk_bytes);
        Ok(Self {
            geometry: geometry.clone(),
            locks,
            manager,
            nodes: node_lines,
            fenced,
            server,
            census,
            counts,
            classes,
            shares,
            doorbells,
            doorbell_lines,
            requests,
            grants,
            intents,
            hazards,
            rings,
            messages,
            bodies,
            bitmap,
            chunks: chunk_lines,
            groups: group_lines,
            data,
            end: data + u64::from(chunks) * chunk_bytes,
        })
    }

    pub(crate) fn manager(&self) -> u64 {
        self.manager
    }

    /// A node's line: its word, its count, whether it is a candidate.
    pub(crate) fn node(&self, node: u32) -> u64 {
        self.nodes + u64::from(node) * LINE
    }

    pub(crate) fn fenced(&self, node: u32) -> u64 {
        self.fenced + u64::from(node) * LINE
    }

    /// All lines that say who is fenced.
    pub(crate) fn all_fenced(&self) -> (u64, u64) {
        (self.fenced, u64::from(self.geometry.nodes) * LINE)
    }

    /// The word that says who serves the index.
    pub(crate) fn server(&self) -> u64 {
        self.server
    }

    /// What belongs to a client's request and does not fit into its line.
    pub(crate) fn body(&self, client: u32) -> u64 {
        self.bodies + u64::from(client) * BODY_BYTES
    }

    /// What the manager counted of the table.
    pub(crate) fn census(&self) -> u64 {
        self.census
    }

    /// What a node counted.
    pub(crate) fn counts(&self, node: u32) -> u64 {
        self.counts + u64::from(node) * RECORD
    }

    /// What a class is.
    pub(crate) fn class(&self, class: u8) -> u64 {
        self.classes + u64::from(class) * LINE
    }

    /// What is held by class.
    pub(crate) fn shares(&self) -> u64 {
        self.shares
    }

    /// Everything that tells who is attached and what was counted: from the superblock on.
    pub(crate) fn told(&self) -> u64 {
        self.doorbells
    }

    /// The lines of groups `first..last`.
    pub(crate) fn groups(&self, groups: &Range<u32>) -> (u64, u64) {
        (self.tags(groups.start), u64::from(groups.end - groups.start) * GROUP)
    }

    /// The word of a node's doorbell that has a lock's bit.
    pub(crate) fn doorbell(&self, node: u32, lock: u32) -> u64 {
        self.doorbells + u64::from(node) * self.doorbell_lines * LINE + u64::from(lock / 64) * 8
    }

    pub(crate) fn all_doorbells(&self) -> (u64, u64) {
        (self.doorbells, u64::from(self.geometry.nodes) * self.doorbell_lines * LINE)
    }

    pub(crate) fn request(&self, lock: u32, node: u32) -> u64 {
        self.requests + (u64::from(lock) * u64::from(self.geometry.nodes) + u64::from(node)) * LINE
    }

    pub(crate) fn grant(&self, lock: u32) -> u64 {
        self.grants + u64::from(lock) * LINE
    }

    pub(crate) fn intent(&self, lock: u32) -> u64 {
        self.intents + u64::from(lock) * LINE
    }

    pub(crate) fn hazard(&self, node: u32, pin: usize) -> u64 {
        self.hazards + u64::from(node) * HAZARD_LINES * LINE + 8 * pin as u64
    }

    pub(crate) fn all_hazards(&self) -> (u64, u64) {
        (self.hazards, u64::from(self.geometry.nodes) * HAZARD_LINES * LINE)
    }

    fn ring(&self, from: u32, owner: u32) -> u64 {
        let number = u64::from(from) * u64::from(self.geometry.nodes) + u64::from(owner);
        self.rings + number * (2 + RING_LINES) * LINE
    }

    pub(crate) fn ring_tail(&self, from: u32, owner: u32) -> u64 {
        self.ring(from, owner)
    }

    pub(crate) fn ring_head(&self, from: u32, owner: u32) -> u64 {
        self.ring(from, owner) + LINE
    }

    pub(crate) fn ring_entry(&self, from: u32, owner: u32, number: u64) -> u64 {
        self.ring(from, owner) + 2 * LINE + number % RING * 8
    }

    /// The line of a client's request to a server.
    pub(crate) fn message(&self, client: u32, server: u32) -> u64 {
        let number = u64::from(server) * u64::from(self.geometry.nodes) + u64::from(client);
        self.messages + number * 2 * LINE
    }

    pub(crate) fn response(&self, client: u32, server: u32) -> u64 {
        self.message(client, server) + LINE
    }

    /// The word of the bitmap that has a chunk's bit.
    pub(crate) fn bits(&self, chunk: u32) -> u64 {
        self.bitmap + u64::from(chunk / 64) * 8
    }

    pub(crate) fn all_bits(&self) -> (u64, u64) {
        (self.bitmap, self.chunks - self.bitmap)
    }

    /// The two words of a chunk.
    pub(crate) fn chunk(&self, chunk: u32) -> u64 {
        self.chunks + u64::from(chunk) * 16
    }

    pub(crate) fn all_chunks(&self) -> (u64, u64) {
        (self.chunks, self.groups - self.chunks)
    }

    /// The tags of a group.
    pub(crate) fn tags(&self, group: u32) -> u64 {
        self.groups + u64::from(group) * GROUP
    }

    pub(crate) fn stamps(&self, group: u32) -> u64 {
        self.tags(group) + LINE
    }

    pub(crate) fn entry(&self, slot: Slot) -> u64 {
        self.tags(slot.group) + (2 + u64::from(slot.index)) * LINE
    }

    pub(crate) fn tag(&self, slot: Slot) -> u64 {
        self.tags(slot.group) + 8 * u64::from(slot.index)
    }

    /// The slot whose tag lies at `at`, if there is one.
    pub(crate) fn slot_of_tag(&self, at: u64) -> Option<Slot> {
        let inside = at.checked_sub(self.groups)?;
        let group = u32::try_from(inside / GROUP).ok().filter(|group| *group < self.geometry.groups)?;
        let rest = inside % GROUP;
        (rest < LINE && rest.is_multiple_of(8)).then_some(Slot { group, index: (rest / 8) as u32 })
    }

    pub(crate) fn slot(&self, number: u64) -> Option<Slot> {
        let group = u32::try_from(number / SLOTS).ok().filter(|group| *group < self.geometry.groups)?;
        Some(Slot { group, index: (number % SLOTS) as u32 })
    }

    pub(crate) fn lock_of(&self, group: u32) -> u32 {
        1 + group % self.geometry.stripes
    }

    /// The chunk that a byte lies in.
    pub(crate) fn chunk_of(&self, at: u64) -> Option<u32> {
        let inside = at.checked_sub(self.data)?;
        let chunk = u32::try_from(inside / self.geometry.chunk_bytes).ok()?;
        (chunk < self.geometry.chunks).then_some(chunk)
    }

    pub(crate) fn chunk_at(&self, chunk: u32) -> u64 {
        self.data + u64::from(chunk) * self.geometry.chunk_bytes
    }

    /// Whether a range lies in the chunks.
    pub(crate) fn holds(&self, at: u64, length: u64) -> bool {
        at >= self.data && at.checked_add(length).is_some_and(|end| end <= self.end)
    }

    fn superblock(&self) -> [u8; SUPERBLOCK as usize] {
        let Geometry { nodes, stripes, groups, chunks, chunk_bytes } = self.geometry;
        let two = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let words = [
            MAGIC,
            VERSION << 32 | LINE,
            self.end,
            two(nodes, stripes),
            two(groups, chunks),
            chunk_bytes,
            // What tells that two programs lay it out alike.
            self.messages << 32 ^ self.groups << 16 ^ self.data,
        ];
        let mut bytes = [0; SUPERBLOCK as usize];
        for (index, word) in words.into_iter().enumerate() {
            bytes[8 * index..8 * index + 8].copy_from_slice(&word.to_le_bytes());
        }
        seal(&mut bytes);
        bytes
    }

    /// Makes an empty pool. Nobody may be attached.
    pub(crate) fn create(&self, lines: &Lines) -> Result<(), PoolError> {
        if self.end > lines.bytes() {
            return Err(PoolError::Geometry(format!("{} bytes in a memory of {}", self.end, lines.bytes())));
        }
        // First no pool, then an empty one, last its superblock.
        let zeros = [0; 4096];
        let mut at = 0;
        while at < self.data {
            let length = (self.data - at).min(zeros.len() as u64);
            lines.ntstore(at, &zeros[..length as usize])?;
            if at == 0 {
                lines.fence()?;
            }
            at += length;
        }
        lines.fence()?;
        lines.store(0, &self.superblock())?;
        lines.publish(0, SUPERBLOCK)?;
        Ok(())
    }

    /// Reads the superblock of a pool.
    pub(crate) fn open(lines: &Lines) -> Result<Self, PoolError> {
        if lines.bytes() < SUPERBLOCK {
            return Err(PoolError::NoPool("the memory is too small".into()));
        }
        lines.consume(0, SUPERBLOCK)?;
        let mut bytes = [0; SUPERBLOCK as usize];
        lines.load(0, &mut bytes)?;
        Self::of_superblock(&bytes, lines.bytes())
    }

    /// What a superblock says, of a memory of `length` bytes.
    pub(crate) fn of_superblock(bytes: &[u8; SUPERBLOCK as usize], length: u64) -> Result<Self, PoolError> {
        let no = |why: &str| PoolError::NoPool(why.to_owned());
        let word = |index: usize| word(bytes, index);
        if word(0) != MAGIC {
            return Err(no("it does not begin as one"));
        }
        if word(1) != (VERSION << 32 | LINE) {
            return Err(no("it is of another version"));
        }
        let high = |word: u64| (word >> 32) as u32;
        let geometry = Geometry {
            nodes: high(word(3)),
            stripes: word(3) as u32,
            groups: high(word(4)),
            chunks: word(4) as u32,
            chunk_bytes: word(5),
        };
        let layout = Self::new(&geometry)?;
        if layout.superblock() != *bytes {
            return Err(PoolError::Damaged { what: "the superblock", at: 0 });
        }
        if layout.end > length {
            return Err(no(&format!("it needs {} bytes and the memory has {length}", layout.end)));
        }
        Ok(layout)
    }
}

/// A place in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Slot {
    pub(crate) group: u32,
    pub(crate) index: u32,
}

impl Slot {
    pub(crate) fn number(self) -> u64 {
        u64::from(self.group) * SLOTS + u64::from(self.index)
    }
}

/// The `index`th word of a record.
pub(crate) fn word(bytes: &[u8], index: usize) -> u64 {
    bytes.as_chunks::<8>().0.get(index).map_or(0, |word| u64::from_le_bytes(*word))
}

/// Puts a record's check into its last four bytes.
pub(crate) fn seal(record: &mut [u8]) {
    let (rest, last) = record.split_at_mut(record.len() - 4);
    last.copy_from_slice(&Crc::of(rest).to_le_bytes());
}

pub(crate) fn is_sealed(record: &[u8]) -> bool {
    let (rest, last) = record.split_at(record.len() - 4);
    last == Crc::of(rest).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_do_not_overlap_and_chunks_fill_what_there_is() {
        for bytes in [1 << 20, 8 << 20, 100 << 20, 1 << 30] {
            let geometry = Geometry::fitting(bytes);
            let layout = Layout::new(&geometry).unwrap();
            assert!(layout.end <= bytes || geometry.chunks == 1, "{bytes}");
            assert!(bytes - layout.end.min(bytes) < 2 * geometry.chunk_bytes, "{bytes}");
            assert!(layout.tags(geometry.groups) <= layout.data);
            assert!(layout.chunk(geometry.chunks) <= layout.groups);
            assert!(layout.response(geometry.nodes - 1, geometry.nodes - 1) < layout.bitmap);
            assert!(layout.ring_entry(geometry.nodes - 1, geometry.nodes - 1, RING - 1) < layout.messages);
            assert!(layout.hazard(geometry.nodes - 1, PINS - 1) < layout.rings);
            let last = Slot { group: geometry.groups - 1, index: 7 };
            assert_eq!(layout.slot_of_tag(layout.tag(last)), Some(last));
            assert_eq!(layout.slot(last.number()), Some(last));
            assert_eq!(layout.slot_of_tag(layout.stamps(0)), None);
            assert_eq!(layout.chunk_of(layout.end), None);
        }
    }

    #[test]
    fn a_pool_for_any_number_of_nodes_takes_no_more_than_it_is_given() {
        for bytes in [8 << 20, 64 << 20] {
            for nodes in [1, 16, 17, 64] {
                let geometry = Geometry::fitting_for(bytes, nodes);
                let taken = geometry.bytes().unwrap();
                assert_eq!(geometry.nodes, nodes);
                assert!(taken <= bytes && bytes - taken < 2 * geometry.chunk_bytes, "{nodes}: {geometry:?}");
            }
            assert_eq!(Geometry::fitting_for(bytes, 16), Geometry::fitting(bytes));
        }
        // Of too few it takes the least that there is.
        let least = Geometry::fitting_for(2 << 20, 64).bytes().unwrap();
        assert!(least > 2 << 20);
        assert_eq!(Geometry::fitting_for(least, 64).bytes().unwrap(), least);
        assert!(Geometry::fitting_for(least - 1, 64).bytes().unwrap() >= least);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let good = Geometry { nodes: 4, stripes: 4, groups: 8, chunks: 8, chunk_bytes: 4096 };
        assert!(good.bytes().is_ok());
        for bad in [
            Geometry { nodes: 0, ..good.clone() },
            Geometry { nodes: 65, ..good.clone() },
            Geometry { stripes: 0, ..good.clone() },
            Geometry { stripes: 9, ..good.clone() },
            Geometry { groups: u32::MAX, ..good.clone() },
            Geometry { chunks: 0, ..good.clone() },
            Geometry { chunks: 1 << 24, ..good.clone() },
            Geometry { chunk_bytes: 5000, ..good.clone() },
            Geometry { chunk_bytes: 1 << 40, ..good.clone() },
        ] {
            assert!(matches!(bad.bytes(), Err(PoolError::Geometry(_))), "{bad:?}");
        }
    }
}
