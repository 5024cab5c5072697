//! What an image keeps of tensors and views: a log of changes, twice.
//!
//! The rules:
//! * There are two places, and both say the same: a change is there when it is in both. So one that
//!   is damaged leaves the other. Of an image whose both places are damaged it is not known what
//!   its blocks are, so it is refused.
//! * The text of a place is a magic number, a seed, and *records*: length, CRC-32C of seed, offset
//!   and bytes, and the bytes, which are opaque here. A place begins with its number and with how
//!   much of the text counts, which is stored behind each record. So a record that was cut short is
//!   none.
//! * A text that has become twice what it was when it was begun is begun anew, as one record that
//!   says everything: first in one place, under the next number, then in the other. A seed is that
//!   number, so nothing of the text before is taken for a part of it.
//! * There always is room for one record of [`RESERVE_BYTES`] more, and a text that is begun anew
//!   without what was removed is no longer than before: a tensor can be removed, or its making be
//!   undone, on a full disk too.
//! * Programs before this kept one text in the places by turns, whole. Such a text is read, and
//!   replaced by a log at the first change.

use std::sync::{
    Arc,
    atomic::{Ordering, fence},
};

use parking_lot::{Mutex, MutexGuard};

use super::{
    StoreError,
    checkpoint::Head,
    image::Image,
    memory::{Memory, UNIT_BYTES},
};

/// Bytes of each of the two places.
pub(super) const PLACE_BYTES: usize = 32 << 20;
/// Bytes before the text.
const HEADER_BYTES: usize = 64;
/// Bytes of both.
pub(super) const BYTES: u64 = 2 * PLACE_BYTES as u64;
/// Bytes of the longest record for which there always is room.
pub const RESERVE_BYTES: usize = 16 << 10;
/// What a text of records begins with; its seed follows.
const MAGIC: &[u8; 8] = b"LAMNAMES";
/// Bytes of magic number and seed.
const BEGIN_BYTES: usize = 16;
/// Bytes before a record's own: length and check.
const RECORD_BYTES: usize = 8;
/// Bytes of the longest text.
const MAX_BYTES: usize = PLACE_BYTES - HEADER_BYTES;
/// Bytes of a piece of the text in memory.
const PIECE_BYTES: usize = 1 << 20;

/// The two places of an image.
pub struct Tables {
    memory: Memory,
    saves: Mutex<Saves>,
    /// The image's, if it has checkpoints, and where those have tables.
    checkpoints: Option<(Arc<Head>, [Memory; 2])>,
}

/// What an image's tables held when it was opened.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing was ever saved.
    Nothing,
    /// The text of a program before there were records.
    Text(Vec<u8>),
    /// Records, in order.
    Records(Vec<Vec<u8>>),
}

/// What was saved.
pub(super) struct Saves {
    /// The number of the text, 0 if there is none.
    number: u64,
    seed: [u8; 8],
    /// The place that has it for sure, and whether both do.
    place: usize,
    in_step: bool,
    pub(super) text: Text,
    /// Bytes of the text when it was begun.
    begun: usize,
}

/// A text in memory, in pieces that are shared with who copies it.
#[derive(Clone, Debug, Default)]
pub(super) struct Text {
    pieces: Vec<Arc<Vec<u8>>>,
    bytes: usize,
    check: u32,
}

impl Text {
    fn new(bytes: Vec<u8>) -> Self {
        let (length, check) = (bytes.len(), crc32c::crc32c(&bytes));
        Self { pieces: vec![Arc::new(bytes)], bytes: length, check }
    }

    fn push(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len();
        self.check = crc32c::crc32c_append(self.check, bytes);
        match self.pieces.last_mut().filter(|last| last.len() < PIECE_BYTES).and_then(Arc::get_mut) {
            Some(last) => last.extend_from_slice(bytes),
            None => self.pieces.push(Arc::new(bytes.to_vec())),
        }
    }

    /// Its length.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// CRC-32C of all of it.
    pub(super) fn check(&self) -> u32 {
        self.check
    }

    /// Its pieces, each with its place in it.
    pub(super) fn pieces(&self) -> impl Iterator<Item = (usize, &[u8])> {
        self.pieces.iter().scan(0, |at, piece| {
            let begin = *at;
            *at += piece.len();
            Some((begin, &piece[..]))
        })
    }

    /// All of it.
    pub(super) fn whole(&self) -> Vec<u8> {
        self.pieces.iter().flat_map(|piece| piece.iter().copied()).collect()
    }
}

impl Tables {
    /// The tables of `image`, and what they hold.
    ///
    /// # Errors
    /// [`StoreError::Reserve`]; [`StoreError::DamagedTables`] if something was saved, and neither
    /// place can be read.
    pub fn open(image: &Image) -> Result<(Self, Found), StoreError> {
        let memory = image.tables()?;
        let read = [read(&memory, 0), read(&memory, 1)];
        let [one, other] = read.each_ref().map(|is| is.as_ref().map(|(number, text)| (*number, text.len())));
        let in_step = one == other;
        let place = usize::from(other > one);
        // A place that is being saved has no number, and one that never was neither. With
        // checkpoints there always were.
        let any =
            image.superblock().checkpoints || (0..2).any(|place| word(&memory, place * PLACE_BYTES) != 0);
        let [one, other] = read;
        let (number, text) = match if place == 0 { one } else { other } {
            Some(found) => found,
            None if any => return Err(StoreError::DamagedTables),
            None => (0, Vec::new()),
        };
        let found = match records(&text) {
            _ if number == 0 => Found::Nothing,
            Some(records) => Found::Records(records.map(<[u8]>::to_vec).collect()),
            None => Found::Text(text.clone()),
        };
        let in_step = in_step && matches!(found, Found::Records(_));
        let checkpoints = image.head().map(|head| Ok::<_, StoreError>((head, image.texts()?))).transpose()?;
        let seed = text.get(MAGIC.len()..).and_then(|rest| rest.first_chunk()).copied().unwrap_or_default();
        let saves = Saves { number, seed, place, in_step, begun: text.len(), text: Text::new(text) };
        Ok((Self { memory, saves: Mutex::new(saves), checkpoints }, found))
    }

    /// Has `image` keep `text`, of records or of a program before there were any, whatever its
    /// places hold.
    ///
    /// # Errors
    /// [`StoreError::Reserve`], [`StoreError::NoRoom`].
    #[doc(hidden)]
    pub fn replace(image: &Image, text: &[u8]) -> Result<(), StoreError> {
        let memory = image.tables()?;
        let number = (0..2).filter_map(|place| read(&memory, place)).map(|(number, _)| number).max();
        let number = number.unwrap_or(0) + 1;
        for place in 0..2 {
            let at = place * PLACE_BYTES;
            memory.ensure(at..at + HEADER_BYTES + text.len())?;
        }
        // Cut short, this is begun again: what is there meanwhile does not count.
        (0..2).for_each(|place| begin(&memory, place, number, text));
        Ok(())
    }

    /// Adds a record. If it is time to begin anew, the text is what `all` says after the change.
    ///
    /// # Errors
    /// [`StoreError::Tables`] if there would be too much; [`StoreError::NoRoom`]. Then nothing
    /// changed.
    pub fn append(&self, record: &[u8], all: impl FnOnce() -> Vec<u8>) -> Result<(), StoreError> {
        let mut saves = self.saves.lock();
        let end = saves.text.bytes() + RECORD_BYTES + record.len();
        let most = (UNIT_BYTES - HEADER_BYTES - RESERVE_BYTES).max(2 * saves.begun);
        if !saves.in_step || end > most.min(MAX_BYTES - RESERVE_BYTES) || self.ensure(end).is_err() {
            return self.begin(&mut saves, &all());
        }
        self.touch();
        let at = saves.text.bytes();
        let bytes = sealed(saves.seed, at, record);
        for place in 0..2 {
            let start = place * PLACE_BYTES;
            self.memory.write(start + HEADER_BYTES + at, &bytes);
            fence(Ordering::Release);
            self.memory.write(start + 24, &end_word(saves.number, end).to_le_bytes());
            fence(Ordering::Release);
        }
        saves.text.push(&bytes);
        Ok(())
    }

    /// Begins the text anew with what `all` says.
    ///
    /// # Errors
    /// As [`Self::append`].
    pub fn rewrite(&self, all: &[u8]) -> Result<(), StoreError> {
        self.begin(&mut self.saves.lock(), all)
    }

    fn begin(&self, saves: &mut Saves, all: &[u8]) -> Result<(), StoreError> {
        // Behind the last number, which no place may have, it begins anew: until both places have
        // it, the one with the text before counts.
        let number = saves.number.checked_add(1).filter(|next| *next < u64::MAX).unwrap_or(1);
        let seed = number.to_le_bytes();
        let text = [&MAGIC[..], &seed, &sealed(seed, BEGIN_BYTES, all)].concat();
        let most = MAX_BYTES - RESERVE_BYTES;
        if text.len() > most {
            return Err(StoreError::Tables { bytes: text.len(), most });
        }
        self.ensure(text.len())?;
        self.touch();
        // The place that has the text before is the last to lose it.
        for place in [1 - saves.place, saves.place] {
            begin(&self.memory, place, number, &text);
        }
        self.release(saves.text.bytes(), text.len());
        let (place, begun) = (saves.place, text.len());
        *saves = Saves { number, seed, place, in_step: true, begun, text: Text::new(text) };
        Ok(())
    }

    /// Makes room for so much text in both places and in the checkpoints, which need none of their
    /// own then, and for a record more.
    fn ensure(&self, bytes: usize) -> Result<(), StoreError> {
        let bytes = bytes + RESERVE_BYTES;
        for place in 0..2 {
            let at = place * PLACE_BYTES;
            self.memory.ensure(at..at + HEADER_BYTES + bytes)?;
        }
        let texts = self.checkpoints.iter().flat_map(|(_, texts)| texts);
        texts.into_iter().try_for_each(|memory| memory.ensure(0..bytes))
    }

    /// Gives back the room of a text of `before` bytes that one of `now` does not need.
    fn release(&self, before: usize, now: usize) {
        let units = |bytes: usize| (HEADER_BYTES + bytes + RESERVE_BYTES).div_ceil(UNIT_BYTES);
        let (now, before) = (units(now), units(before).min(PLACE_BYTES / UNIT_BYTES));
        for place in 0..2 {
            let first = place * PLACE_BYTES / UNIT_BYTES;
            (now..before).for_each(|unit| self.memory.release(first + unit));
        }
    }

    /// Says that something is about to change.
    fn touch(&self) {
        if let Some((head, _)) = &self.checkpoints {
            head.touch();
        }
    }

    /// What was saved last, which stays the last as long as this is held.
    pub(super) fn last(&self) -> MutexGuard<'_, Saves> {
        self.saves.lock()
    }
}

/// A record as it is stored at `at` of a text.
fn sealed(seed: [u8; 8], at: usize, record: &[u8]) -> Vec<u8> {
    let length = u32::try_from(record.len()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(RECORD_BYTES + record.len());
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&record_check(seed, at, record).to_le_bytes());
    bytes.extend_from_slice(record);
    bytes
}

fn record_check(seed: [u8; 8], at: usize, record: &[u8]) -> u32 {
    let check = crc32c::crc32c_append(crc32c::crc32c(&seed), &(at as u64).to_le_bytes());
    crc32c::crc32c_append(check, record)
}

/// The records of a text, if it is one of records and each checks.
fn records(text: &[u8]) -> Option<impl Iterator<Item = &[u8]>> {
    let seed = *text.strip_prefix(MAGIC)?.first_chunk::<8>()?;
    let (mut at, mut found) = (BEGIN_BYTES, Vec::new());
    while at < text.len() {
        let rest = &text[at..];
        let length = u32::from_le_bytes(*rest.first_chunk()?);
        let check = u32::from_le_bytes(*rest.get(4..)?.first_chunk()?);
        let end = RECORD_BYTES.checked_add(usize::try_from(length).ok()?)?;
        let record = rest.get(RECORD_BYTES..end)?;
        if record_check(seed, at, record) != check {
            return None;
        }
        found.push(record);
        at += end;
    }
    Some(found.into_iter())
}

/// What a place's header says of the bytes that count of a text of records: these, and a check.
fn end_word(number: u64, end: usize) -> u64 {
    let end = end as u64;
    let check = crc32c::crc32c_append(crc32c::crc32c(&number.to_le_bytes()), &end.to_le_bytes());
    end | u64::from(check) << 32
}

/// Writes `text` to a place under `number`.
fn begin(memory: &Memory, place: usize, number: u64, text: &[u8]) {
    let at = place * PLACE_BYTES;
    memory.write(at, &0_u64.to_le_bytes());
    fence(Ordering::Release);
    memory.write(at + 8, &header(number, text)[8..32]);
    memory.write(at + HEADER_BYTES, text);
    fence(Ordering::Release);
    memory.write(at, &number.to_le_bytes());
    fence(Ordering::Release);
}

/// What stands before a text: number, length and check of what never changes of it, and how much
/// counts of one of records.
fn header(number: u64, text: &[u8]) -> [u8; HEADER_BYTES] {
    let is_log = text.starts_with(MAGIC);
    let fixed = if is_log { &text[..BEGIN_BYTES.min(text.len())] } else { text };
    let end = if is_log { end_word(number, text.len()) } else { 0 };
    let mut header = [0; HEADER_BYTES];
    let words = [number, fixed.len() as u64, u64::from(check(number, fixed)), end];
    for (place, word) in header.as_chunks_mut().0.iter_mut().zip(words) {
        *place = word.to_le_bytes();
    }
    header
}

/// The tables' part of an image that keeps `text` in one place and nothing else: where in it the
/// bytes are, and these.
pub(super) fn saved_once(text: &Text) -> (usize, Vec<u8>) {
    let text = text.whole();
    (PLACE_BYTES, [&header(1, &text), &text[..]].concat())
}

fn word(memory: &Memory, at: usize) -> u64 {
    let mut word = [0; 8];
    memory.read(at, &mut word);
    u64::from_le_bytes(word)
}

/// The number and the text of a place, if it is whole.
fn read(memory: &Memory, place: usize) -> Option<(u64, Vec<u8>)> {
    let at = place * PLACE_BYTES;
    let word = |at| word(memory, at);
    let (number, stored) = (word(at), word(at + 16));
    let length = usize::try_from(word(at + 8)).ok().filter(|length| *length <= MAX_BYTES)?;
    // None that was saved has the last number.
    if number == 0 || number == u64::MAX {
        return None;
    }
    let mut text = vec![0; length];
    memory.read(at + HEADER_BYTES, &mut text);
    if u64::from(check(number, &text)) != stored {
        return None;
    }
    if text.len() == BEGIN_BYTES && text.starts_with(MAGIC) {
        let counts = word(at + 24);
        let end = usize::try_from(counts & u64::from(u32::MAX)).ok();
        let end = end.filter(|end| (BEGIN_BYTES..=MAX_BYTES).contains(end))?;
        if end_word(number, end) != counts {
            return None;
        }
        text.resize(end, 0);
        memory.read(at + HEADER_BYTES, &mut text);
        drop(records(&text)?);
    }
    Some((number, text))
}

fn check(number: u64, text: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&number.to_le_bytes()), text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{image::Superblock, mode::Mode};
    use lamina_codec::Codec;

    fn image() -> Image {
        let superblock = Superblock {
            base_bytes: 4096,
            views_bytes: 4 << 20,
            store_bytes: 65536,
            mode: Mode::Trace,
            codec: Codec::Tree,
            open_windows: 1,
            partitions: Vec::new(),
            checkpoints: false,
            version: crate::entry::Version::default(),
        };
        Image::in_memory(superblock).unwrap()
    }

    fn found(image: &Image) -> Vec<String> {
        let Found::Records(records) = Tables::open(image).unwrap().1 else { panic!("no records") };
        records.into_iter().map(|record| String::from_utf8(record).unwrap()).collect()
    }

    fn no_need() -> Vec<u8> {
        panic!("the text is short")
    }

    #[test]
    fn every_record_that_was_added_is_there_and_one_place_is_enough() {
        let image = image();
        let (tables, before) = Tables::open(&image).unwrap();
        assert_eq!(before, Found::Nothing);
        tables.append(b"lost", || b"one".to_vec()).unwrap();
        tables.append(b"two", no_need).unwrap();
        tables.append(b"", no_need).unwrap();
        assert_eq!(found(&image), ["one", "two", ""]);
        let last = HEADER_BYTES + BEGIN_BYTES + RECORD_BYTES;
        for place in [0, PLACE_BYTES] {
            for at in [0, 8, 16, 24, 28, HEADER_BYTES, HEADER_BYTES + 9, last - 5, last, last + 14] {
                let mut byte = [0];
                tables.memory.read(place + at, &mut byte);
                tables.memory.write(place + at, &[byte[0] ^ 1]);
                assert_eq!(found(&image), ["one", "two", ""], "{at}");
                // The next change makes both whole again.
                let (again, _) = Tables::open(&image).unwrap();
                again.append(b"lost", || b"all".to_vec()).unwrap();
                assert_eq!(found(&image), ["all"], "{at}");
                again.append(b"more", no_need).unwrap();
                Tables::replace(&image, &tables.last().text.whole()).unwrap();
            }
        }
        // Neither place: nobody knows what the blocks are.
        for place in [0, PLACE_BYTES] {
            tables.memory.write(place + last, b"O");
        }
        let why = Tables::open(&image).err().expect("both are damaged").to_string();
        assert!(why.contains("snapshot"), "{why}");
    }

    #[test]
    fn a_text_is_begun_anew_before_it_is_long_and_gives_its_room_back() {
        let image = image();
        let (tables, _) = Tables::open(&image).unwrap();
        let all = || b"everything".to_vec();
        tables.append(b"", all).unwrap();
        let room = image.allocated_bytes().unwrap();
        for _ in 0..2000 {
            tables.append(&[b'x'; 1000], all).unwrap();
            assert!(tables.last().text.bytes() < UNIT_BYTES);
        }
        assert_eq!(image.allocated_bytes().unwrap(), room);
        tables.rewrite(&vec![b'x'; 1 << 20]).unwrap();
        tables.append(&vec![b'y'; 100_000], no_need).unwrap();
        assert_eq!(found(&image).len(), 2);
        assert!(image.allocated_bytes().unwrap() > room + (1 << 20));
        tables.rewrite(b"everything").unwrap();
        assert_eq!(image.allocated_bytes().unwrap(), room);
        let long = tables.rewrite(&vec![0; PLACE_BYTES]).unwrap_err();
        assert!(matches!(long, StoreError::Tables { .. }), "{long}");
        assert_eq!(found(&image), ["everything"]);
    }

    #[test]
    fn a_text_of_before_is_read_until_it_is_replaced() {
        let image = image();
        let memory = image.tables().unwrap();
        memory.ensure(0..BYTES.try_into().unwrap()).unwrap();
        for (number, text) in [(1, &b"{one}"[..]), (2, b"{}"), (3, b"{three}")] {
            begin(&memory, usize::try_from(number % 2).unwrap(), number, text);
            assert_eq!(Tables::open(&image).unwrap().1, Found::Text(text.to_vec()));
        }
        // A number that none can follow is not one that was saved, whatever its check says.
        begin(&memory, 0, u64::MAX, b"T");
        let (tables, text) = Tables::open(&image).unwrap();
        assert_eq!(text, Found::Text(b"{three}".to_vec()));
        tables.append(b"lost", || b"three".to_vec()).unwrap();
        tables.append(b"four", no_need).unwrap();
        assert_eq!(found(&image), ["three", "four"]);
    }
}
