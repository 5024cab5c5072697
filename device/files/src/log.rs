//! The log of changes, on the device itself.
//!
//! It has two places, hidden tensors of bytes. One of them is in use: a header, what the state was
//! when the log was begun there, and a record for each change of the file system since.
//!
//! * A record is its length, a CRC-32C and changes. The CRC is of where it stands as well, so that
//!   nothing that lay there before is taken for one. The first that does not check is the end.
//! * Beginning anew writes the state to the other place, and its header last, with a higher
//!   generation. The higher of two counts. So a process that dies leaves the one or the other.
//! * A block of the device is stored whole or not at all, and a block of the log is only ever
//!   written again with more behind it. So what was written stays what it was.
//! * A record is written before what it says is done, and before the kernel is answered.
//! * The place that is not in use holds filler behind where its header would be, as much as the
//!   state takes. So a full store has room to begin anew, and no removal fails for want of it. Who
//!   uses the log has the store [keep](Log::keep_room_of) what its places give back meanwhile, for
//!   nobody else who waits for room to take it.

use std::sync::Arc;

use lamina_codec::BLOCK_BYTES;
use lamina_device::device::{Device, KeptRoom};

use super::error::FileError;
use super::record;
use super::space::{RESERVE, filler, has_slabs};
use super::state::State;

const MAGIC: &[u8; 8] = b"LAMFILES";
const VERSION: u32 = 1;
/// Bytes of a block.
const BLOCK: u64 = BLOCK_BYTES as u64;
/// Where the first record begins.
const FIRST: u64 = BLOCK;
/// Bytes of a record before its changes.
const HEAD: u64 = 8;
/// Bytes that are read or written at once.
const PIECE: u64 = 1 << 20;
/// Bytes of changes after which it is worth to begin anew, if the state takes less.
const MIN_CHANGES: u64 = 1 << 20;
/// Bytes of filler that are written at once.
const FILLER_STEP: u64 = 16 * BLOCK;
/// Bytes of filler beyond what the state takes: records that remove something, and the requests
/// that are remembered as done.
const FILLER_MORE: u64 = 64 << 10;

/// A place: DPA and bytes.
pub(crate) type Place = (u64, u64);

pub(crate) struct Log {
    device: Arc<Device>,
    places: [Place; 2],
    used: usize,
    generation: u64,
    /// Where the next record begins.
    at: u64,
    /// What of its block is before that.
    block: Vec<u8>,
    /// Where the state ends that the log began with.
    began: u64,
    /// Bytes that the state takes when it is written anew, at most.
    state_bytes: u64,
    /// Where the filler ends in the place that is not in use; 0 if that may hold anything.
    filler_end: u64,
}

impl Log {
    /// An empty log in these places, in which nothing is stored.
    pub(crate) fn begin(device: Arc<Device>, places: [Place; 2], state: &State) -> Result<Self, FileError> {
        let mut log = Self {
            device,
            places,
            used: 1,
            generation: 0,
            at: FIRST,
            block: Vec::new(),
            began: FIRST,
            state_bytes: 0,
            filler_end: 0,
        };
        log.begin_anew(state, false)?;
        Ok(log)
    }

    /// The log that lies in these places and the state that it makes; none if there never was one.
    pub(crate) fn open(device: &Arc<Device>, places: [Place; 2]) -> Result<Option<(Self, State)>, FileError> {
        let mut newest = None;
        for (used, place) in places.iter().enumerate() {
            if let Some(generation) = header(device, place.0)?
                && newest.is_none_or(|(_, other)| generation > other)
            {
                newest = Some((used, generation));
            }
        }
        let Some((used, generation)) = newest else {
            for place in places {
                refuse_headless(device, place)?;
            }
            return Ok(None);
        };
        let (state, at) = replay(device, places[used], generation, places[used].1)?;
        // A damaged record looks like the end, and what no record names is discarded.
        let (first, end) = (places[used].0, places[used].0.saturating_add(places[used].1));
        if let Some(lost) =
            device.poison().iter().find(|lost| lost.dpa < end && first < lost.dpa.saturating_add(lost.length))
        {
            let why = format!("its block at {:#x} is damaged: {}", lost.dpa, lost.why);
            return Err(FileError::Damaged { why });
        }
        state.check(places[used])?;
        let mut block = vec![0; usize::try_from(at % BLOCK).unwrap_or(0)];
        let (dpa, length) = places[used];
        device.read_base(dpa + at - at % BLOCK, &mut block)?;
        if let Err(why) = device.discard(dpa + at, length - at) {
            tracing::debug!("what is behind the log stays: {why}");
        }
        let mut log = Self {
            device: Arc::clone(device),
            places,
            used,
            generation,
            at,
            block,
            began: at,
            state_bytes: at - FIRST,
            filler_end: 0,
        };
        log.keep_what_room_there_is();
        Ok(Some((log, state)))
    }

    /// Writes a record. If the log is to be begun anew for it, that is with `state`. What `frees`
    /// may use the last of the log, and makes the state no larger.
    pub(crate) fn append(&mut self, changes: &[u8], state: &State, frees: bool) -> Result<(), FileError> {
        let framed = (HEAD + changes.len() as u64).next_multiple_of(8);
        if !frees
            && let Err(why) = self.keep_room(self.state_bytes + framed)
            // The state may take less than is known.
            && (self.at == self.began || self.begin_anew(state, frees).is_err())
        {
            return Err(why);
        }
        let (long, capacity) = (self.at - self.began, self.places[self.used].1);
        let bound = if frees { capacity } else { capacity / 8 * 7 };
        if long > MIN_CHANGES.max(2 * self.began) || self.at + framed > bound {
            match self.begin_anew(state, frees) {
                Ok(()) => {}
                // As long as there is room behind it, the log goes on as it is.
                Err(why) if self.at + framed <= bound => tracing::debug!("the log stays long: {why}"),
                Err(why) => return Err(why),
            }
        }
        if self.at + framed > bound {
            return Err(FileError::NoNames { bytes: self.at, capacity });
        }
        if !frees {
            self.keep_room(self.state_bytes + framed)?;
        }
        let first = self.at - self.at % BLOCK;
        let mut bytes = self.block.clone();
        frame(self.generation, self.at, changes, &mut bytes);
        let end = first + bytes.len() as u64;
        let rest = bytes.len() - bytes.len() % BLOCK_BYTES;
        let block = bytes[rest..].to_vec();
        bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
        self.device.write_base(self.places[self.used].0 + first, &bytes)?;
        (self.at, self.block) = (end, block);
        if frees {
            self.keep_what_room_there_is();
        } else {
            self.state_bytes += framed;
        }
        Ok(())
    }

    /// Writes the state to the other place, which is in use from then on. For what `frees` the
    /// state may take all that a log may that grows: there is as much behind it as there was
    /// before.
    pub(crate) fn begin_anew(&mut self, state: &State, frees: bool) -> Result<(), FileError> {
        let other = 1 - self.used;
        let (dpa, capacity) = self.places[other];
        let most = if frees { capacity / 16 * 15 } else { capacity / 4 * 3 };
        self.filler_end = 0;
        let written = self.write_anew(state, self.places[other], most);
        let (at, block) = written.inspect_err(|_| self.forget(other))?;
        let mut head = MAGIC.to_vec();
        head.extend_from_slice(&VERSION.to_le_bytes());
        head.extend_from_slice(&(self.generation + 1).to_le_bytes());
        head.extend_from_slice(&crc32c::crc32c(&head).to_le_bytes());
        head.resize(BLOCK_BYTES, 0);
        self.device.write_base(dpa, &head).inspect_err(|_| self.forget(other))?;
        debug_assert!(at <= capacity);
        let before = self.used;
        (self.used, self.generation, self.at, self.began, self.block) =
            (other, self.generation + 1, at, at, block);
        self.state_bytes = at - FIRST;
        self.forget(before);
        Ok(())
    }

    /// Has the store keep what the log and the reserve give back for them, until what is returned
    /// is dropped.
    pub(crate) fn keep_room_of<'a>(device: &'a Device, places: &[Place; 2]) -> Option<KeptRoom<'a>> {
        let reserve = device.place_of(RESERVE);
        let all: Vec<_> = places.iter().copied().chain(reserve).collect();
        device.keep_room(&all)
    }

    /// Where it lies.
    pub(crate) fn places(&self) -> [Place; 2] {
        self.places
    }

    /// Has filler keep the room that a state of so many bytes takes.
    fn keep_room(&mut self, state_bytes: u64) -> Result<(), FileError> {
        let (dpa, capacity) = self.places[1 - self.used];
        let wanted = (FIRST + state_bytes + state_bytes / 16 + FILLER_MORE).min(capacity);
        if self.filler_end >= wanted {
            return Ok(());
        }
        if self.filler_end == 0 {
            self.device.discard(dpa, BLOCK)?;
            self.device.discard(dpa, capacity)?;
            self.filler_end = FIRST;
        }
        // Somewhat more, so that few records write any.
        let end = (wanted + wanted / 8).next_multiple_of(FILLER_STEP).min(capacity);
        while self.filler_end < end {
            let length = FILLER_STEP.min(end - self.filler_end);
            let (at, mut done) = (dpa + self.filler_end, 0);
            let written = self.device.write_back(at, &filler(at, length), &mut done);
            self.filler_end += done as u64;
            if let Err(why) = written {
                return if self.filler_end < wanted { Err(why.into()) } else { Ok(()) };
            }
        }
        Ok(())
    }

    /// As [`Self::keep_room`], for the state that there is and as far as that goes.
    pub(crate) fn keep_what_room_there_is(&mut self) {
        if let Err(why) = self.keep_room(self.state_bytes) {
            tracing::debug!("there is no room to keep for the log: {why}");
        }
    }

    /// Writes all but the header: where the log then ends, and what of its last block is used.
    fn write_anew(
        &self,
        state: &State,
        (dpa, capacity): Place,
        most: u64,
    ) -> Result<(u64, Vec<u8>), FileError> {
        // Over the filler, block by block. Without a header the rest is nothing.
        self.device.discard(dpa, BLOCK)?;
        let generation = self.generation + 1;
        let (mut first, mut bytes) = (FIRST, Vec::new());
        let mut changes = Vec::new();
        let mut parts = state.as_changes().peekable();
        while let Some(part) = parts.next() {
            record::encode(&part, &mut changes);
            if changes.len() < BLOCK_BYTES && parts.peek().is_some() {
                continue;
            }
            frame(generation, first + bytes.len() as u64, &changes, &mut bytes);
            changes.clear();
            if first + bytes.len() as u64 > most {
                let bytes = first + bytes.len() as u64;
                return Err(FileError::NoNames { bytes, capacity });
            }
            if bytes.len() as u64 >= PIECE {
                let whole = bytes.len() - bytes.len() % BLOCK_BYTES;
                self.device.write_base(dpa + first, &bytes[..whole])?;
                bytes.drain(..whole);
                first += whole as u64;
            }
        }
        let (end, rest) = (first + bytes.len() as u64, bytes.len() - bytes.len() % BLOCK_BYTES);
        let block = bytes[rest..].to_vec();
        bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
        self.device.write_base(dpa + first, &bytes)?;
        let behind = end.next_multiple_of(BLOCK);
        self.device.discard(dpa + behind, capacity.saturating_sub(behind))?;
        Ok((end, block))
    }

    /// Forgets what a place holds that is not in use.
    fn forget(&self, place: usize) {
        let (dpa, length) = self.places[place];
        // Header first: without it the rest is nothing.
        let forgotten = self.device.discard(dpa, BLOCK).and_then(|()| self.device.discard(dpa, length));
        if let Err(why) = forgotten {
            tracing::debug!("an old log stays until the next is begun: {why}");
        }
    }

    /// Where the next record begins, and the place and generation it is in.
    #[cfg(test)]
    pub(crate) fn position(&self) -> (Place, u64, u64) {
        (self.places[self.used], self.generation, self.at)
    }
}

/// The generation of the log in a place, if there is one.
fn header(device: &Device, dpa: u64) -> Result<Option<u64>, FileError> {
    let mut head = [0; 24];
    device.read_base(dpa, &mut head)?;
    let number = |at: usize| head[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
    if head == [0; 24] {
        return Ok(None);
    }
    if !head.starts_with(MAGIC) || number(20) != crc32c::crc32c(&head[..20]) {
        return Err(FileError::Damaged { why: "its header does not check".to_owned() });
    }
    if number(8) != VERSION {
        let why = format!("it is of version {}, and this program reads version {VERSION}", number(8));
        return Err(FileError::Damaged { why });
    }
    Ok(Some(head[12..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))))
}

/// Refuses a place without a header that holds a log nonetheless: what is stored elsewhere would be
/// given up without a word.
fn refuse_headless(device: &Device, place: Place) -> Result<(), FileError> {
    let (dpa, length) = place;
    let first = dpa + FIRST;
    let data = device.next_data(first..dpa + length);
    if data == dpa + length {
        return Ok(());
    }
    let mut block = vec![0; BLOCK_BYTES];
    device.read_base(first, &mut block)?;
    // A device that does not code says that all is data. A log does not begin with zeros.
    let is_filler = || filler(first, FILLER_STEP).starts_with(&block);
    if data == first && (is_filler() || block.iter().all(|byte| *byte == 0)) {
        return Ok(());
    }
    // A process that died when it made the first log had its empty state written, and no header.
    let (state, at) = replay(device, place, 1, length)?;
    if at > FIRST && state.len() == 1 && !has_slabs(device) {
        return Ok(());
    }
    let why = format!(
        "its header at {dpa:#x} is gone, and what was behind it is not; a snapshot from before has the names, \
         `lamina discard {dpa} {length}` begins files/ anew, with nothing in it, when the device is started next"
    );
    Err(FileError::Damaged { why })
}

/// What the records up to `until` make, and where the last one ends.
pub(crate) fn replay(
    device: &Device,
    (dpa, length): Place,
    generation: u64,
    until: u64,
) -> Result<(State, u64), FileError> {
    let (mut state, mut at) = (State::default(), FIRST);
    let (mut bytes, mut first) = (Vec::new(), FIRST);
    loop {
        let here = usize::try_from(at - first).unwrap_or(usize::MAX);
        match next(&bytes[here.min(bytes.len())..], generation, at) {
            Next::Record(changes, end) if end <= until => {
                let wrong = || FileError::Damaged { why: format!("its record at {at} cannot be read") };
                for change in record::decode(changes).ok_or_else(wrong)? {
                    state.apply(change)?;
                }
                at = end;
            }
            Next::More if first + (bytes.len() as u64) < length => {
                bytes.drain(..here);
                first = at;
                let end = first + bytes.len() as u64;
                let more = usize::try_from(PIECE.min(length - end)).unwrap_or(0);
                let old = bytes.len();
                bytes.resize(old + more, 0);
                device.read_base(dpa + end, &mut bytes[old..])?;
            }
            _ => return Ok((state, at)),
        }
    }
}

/// What begins somewhere in the log.
enum Next<'a> {
    /// A record: its changes, and where it ends.
    Record(&'a [u8], u64),
    /// More bytes have to be read to know.
    More,
    /// Nothing.
    End,
}

fn next(bytes: &[u8], generation: u64, at: u64) -> Next<'_> {
    let number =
        |at: usize| bytes.get(at..).and_then(<[u8]>::first_chunk).map(|bytes| u32::from_le_bytes(*bytes));
    let (Some(length), Some(crc)) = (number(0), number(4)) else { return Next::More };
    if length == 0 {
        return Next::End;
    }
    let head = 8;
    let Some(changes) = bytes.get(head..).and_then(|rest| rest.get(..usize::try_from(length).ok()?)) else {
        return Next::More;
    };
    if check(generation, at, changes) != crc {
        return Next::End;
    }
    Next::Record(changes, at + (HEAD + u64::from(length)).next_multiple_of(8))
}

/// Adds a record that begins at `at`.
fn frame(generation: u64, at: u64, changes: &[u8], out: &mut Vec<u8>) {
    let length = u32::try_from(changes.len()).unwrap_or(u32::MAX);
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(&check(generation, at, changes).to_le_bytes());
    out.extend_from_slice(changes);
    out.resize(out.len().next_multiple_of(8), 0);
}

fn check(generation: u64, at: u64, changes: &[u8]) -> u32 {
    let mut place = [0; 16];
    place[..8].copy_from_slice(&generation.to_le_bytes());
    place[8..].copy_from_slice(&at.to_le_bytes());
    crc32c::crc32c_append(crc32c::crc32c(&place), changes)
}
