//! Where a ledger lies, and where what is in it.

use std::{
    fs::File,
    io,
    os::{fd::AsFd, unix::fs::FileExt},
    sync::{
        Arc,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Relaxed, Release},
            fence,
        },
    },
};

use nix::fcntl::{FallocateFlags, fallocate};

use super::{ACCOUNTS_BYTES, LOG_RECORDS, Ledger, MAP_BYTES, MIN_SLOTS, RECORD_BYTES, STATE_BYTES, Worker};
use crate::{
    StoreError,
    geometry::CHUNK_GRANULES,
    host_memory::HostMemory,
    memory::{BitsAt, Memory, UNIT_BYTES},
};

const MAGIC: u64 = u64::from_le_bytes(*b"LAMLEDG\x02");
/// Parts of an image whose units' bits are kept.
pub(crate) const PARTS: usize = 5;

// Words of the header.
const MAGIC_AT: usize = 0;
const WORKER_AT: usize = 8;
/// The generation; 0 if the ledger does not count.
pub(super) const GENERATION_AT: usize = 16;
/// Records that were begun.
pub(super) const NOTED_AT: usize = 24;
/// Chunks that were ever used are before this one.
pub(super) const CHUNKS_USED_AT: usize = 32;
const BLOCKS_AT: usize = 40;
const CHUNKS_AT: usize = 48;
/// The last generation that there was.
pub(super) const LAST_AT: usize = 56;
/// Of both places for accounts: words of the accounts, lost blocks, CRC-32C of both and of the
/// generation.
pub(super) const PLACES_AT: [usize; 2] = [64, 128];
const HOLDER_AT: usize = 192;
/// Of each part of the image: 1 once its bits say what there is.
const BITS_KNOWN_AT: [usize; PARTS] = [200, 208, 216, 224, 232];
/// 1 once a sync of the image failed, whatever else is done to the ledger.
const FAILED_AT: u64 = 240;
const HEADER_BYTES: usize = 4096;

/// Where the parts are, from the ledger's beginning on.
#[derive(Clone, Debug)]
pub(super) struct Parts {
    pub(super) accounts: usize,
    pub(super) log: usize,
    pub(super) states: usize,
    pub(super) maps: usize,
    pub(super) held: usize,
    pub(super) owners: usize,
    bits: usize,
    end: usize,
}

/// Where a ledger lies, and whether what it says counts for this process.
#[derive(Clone, Debug)]
pub(crate) struct LedgerPlace {
    file: Arc<File>,
    start: u64,
    host: Option<Arc<HostMemory>>,
    parts: Parts,
    chunks: usize,
    follows: bool,
    /// Where the bits of parts of the image are.
    bits: [BitsAt; PARTS],
}

impl LedgerPlace {
    /// Finds or makes the ledger of `worker` from `start` on, of an image with so many blocks and
    /// chunks, and with parts of these sizes of which it keeps bits. It grows as `host` allows.
    pub(crate) fn open(
        (file, start): (&Arc<File>, u64),
        host: Option<Arc<HostMemory>>,
        (blocks, chunks): (u64, usize),
        parts: &[u64; PARTS],
        worker: Worker,
    ) -> Result<Self, StoreError> {
        let places = Parts::of(chunks, parts);
        let length = start + places.end as u64;
        let no_room = |source| StoreError::NoRoom { what: "ledger", source };
        if file.metadata().map_err(no_room)?.len() < length {
            file.set_len(length).map_err(no_room)?;
        }
        let header = Memory::part("ledger", file, start, HEADER_BYTES as u64, None)?;
        let word = |at| header.number(at).load(Relaxed);
        header.ensure(0..HEADER_BYTES)?;
        let sizes = [(BLOCKS_AT, blocks), (CHUNKS_AT, chunks as u64)];
        let same = word(MAGIC_AT) == MAGIC && sizes.iter().all(|(at, size)| word(*at) == *size);
        let follows =
            same && word(HOLDER_AT) == worker.holder && word(WORKER_AT).checked_add(1) == Some(worker.number);
        if !follows {
            header.write(MAGIC_AT, &0_u64.to_le_bytes());
            let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            let range = (start + HEADER_BYTES as u64, (places.end - HEADER_BYTES) as u64);
            fallocate(file.as_fd(), hole, signed(range.0), signed(range.1))
                .map_err(|why| no_room(why.into()))?;
            let zeros = [GENERATION_AT, NOTED_AT, CHUNKS_USED_AT, LAST_AT].into_iter().chain(BITS_KNOWN_AT);
            for (at, size) in sizes.into_iter().chain(zeros.map(|at| (at, 0))) {
                header.write(at, &size.to_le_bytes());
            }
        }
        // A store into the bits takes no room then.
        let keep = FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(file.as_fd(), keep, signed(start + places.bits as u64), signed(all_bits_bytes(parts)))
            .map_err(|why| no_room(why.into()))?;
        let mut next = start + places.bits as u64;
        let bits = std::array::from_fn(|part| {
            let offset = next;
            next += 2 * bits_bytes(parts[part]);
            // Who made them may have died meanwhile.
            let known = word(BITS_KNOWN_AT[part]) == 1;
            let known_at = start + BITS_KNOWN_AT[part] as u64;
            BitsAt { file: Arc::clone(file), offset, known, known_at }
        });
        fence(Release);
        header.write(HOLDER_AT, &worker.holder.to_le_bytes());
        header.write(WORKER_AT, &worker.number.to_le_bytes());
        header.write(MAGIC_AT, &MAGIC.to_le_bytes());
        Ok(Self { file: Arc::clone(file), start, host, parts: places, chunks, follows, bits })
    }

    /// Where the bits of part number `part` are.
    pub(crate) fn bits(&self, part: usize) -> BitsAt {
        self.bits[part].clone()
    }

    /// Says that the ledger does not count, without a mapping of it.
    pub(crate) fn give_up(&self) -> io::Result<()> {
        self.file.write_all_at(&0_u64.to_le_bytes(), self.start + GENERATION_AT as u64)
    }

    /// The ledger there.
    pub(crate) fn ledger(&self) -> Result<Ledger, StoreError> {
        let bytes = self.parts.bits as u64;
        let memory = Memory::part("ledger", &self.file, self.start, bytes, self.host.clone())?;
        let generation = memory.number(GENERATION_AT).load(Relaxed);
        let generation = AtomicU64::new(if self.follows { generation } else { 0 });
        Ok(Ledger {
            memory,
            parts: self.parts.clone(),
            chunks: self.chunks,
            generation,
            broken: AtomicBool::new(false),
            follows: self.follows,
            taken: AtomicBool::new(false),
        })
    }
}

/// Whether a sync of the image failed whose ledger is in `file`, of memory that a holder keeps.
pub(crate) fn has_failed(file: &File) -> bool {
    let mut word = [0; 8];
    // A file that nobody wrote to is too short.
    file.read_exact_at(&mut word, FAILED_AT).is_ok() && word != [0; 8]
}

/// Notes that a sync of the image failed.
pub(crate) fn note_failure(file: &File) -> io::Result<()> {
    file.write_all_at(&1_u64.to_le_bytes(), FAILED_AT)
}

impl Parts {
    fn of(chunks: usize, parts: &[u64; PARTS]) -> Self {
        let mut end = HEADER_BYTES;
        let mut next = |bytes: usize| {
            let start = end;
            end = (start + bytes).next_multiple_of(UNIT_BYTES);
            start
        };
        let _header = next(0);
        let accounts = next(2 * ACCOUNTS_BYTES);
        let log = next(usize::try_from(LOG_RECORDS).expect("a few thousand") * RECORD_BYTES);
        let states = next(chunks * STATE_BYTES);
        let maps = next(chunks * MAP_BYTES);
        let held = next(chunks * MAP_BYTES);
        // Chunks of 16, 32, … 1024 segments lie apart, each kind with room for all.
        let owners = next(owners_before(chunks, CHUNK_GRANULES * 2));
        let bits = next(usize::try_from(all_bits_bytes(parts)).expect("less than the parts"));
        Self { accounts, log, states, maps, held, owners, bits, end }
    }
}

/// Bytes of bits for the units of a part.
pub(crate) fn bits_bytes(part: u64) -> u64 {
    // Whole pages, as they are mapped.
    part.div_ceil(UNIT_BYTES as u64 * 8).max(1).next_multiple_of(4096)
}

/// Bytes of the bits of all parts, of which each has two sets.
fn all_bits_bytes(parts: &[u64; PARTS]) -> u64 {
    parts.iter().map(|part| 2 * bits_bytes(*part)).sum()
}

/// Bytes of the owners of all chunks with room for fewer than `slots` segments, a power of two.
pub(super) const fn owners_before(chunks: usize, slots: usize) -> usize {
    chunks * (slots - MIN_SLOTS) * 8
}

fn signed(at: u64) -> i64 {
    i64::try_from(at).expect("an image's size is checked")
}
