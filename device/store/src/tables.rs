//! What an image keeps of tensors and views: a text, saved whole, in one of two places by turns.
//!
//! Of an image whose both places are damaged it is not known what its blocks are, so it is refused.
//!
//! A place begins with the number of the save, which is stored last, the text's length and its CRC-32C. The valid one with the
//! higher number counts, so a save that was cut short leaves the one before.
//!
//! A save makes room in both places. So the next one needs none if it is no longer: a tensor can be
//! removed, or its making be undone, on a full disk too.

use std::sync::{
    Arc,
    atomic::{Ordering, fence},
};

use parking_lot::{Mutex, MutexGuard};

use super::{StoreError, checkpoint::Head, image::Image, memory::Memory};

/// Bytes of each of the two places.
pub(super) const PLACE_BYTES: usize = 32 << 20;
/// Bytes before the text.
const HEADER_BYTES: usize = 64;
/// Bytes of both.
pub(super) const BYTES: u64 = 2 * PLACE_BYTES as u64;

/// The two places of an image.
pub struct Tables {
    memory: Memory,
    saves: Mutex<Saves>,
    /// The image's, if it has checkpoints, and where those have tables.
    checkpoints: Option<(Arc<Head>, [Memory; 2])>,
}

/// What was saved.
pub(super) struct Saves {
    /// The number of the last save, 0 if there was none.
    number: u64,
    /// What was saved last, if it has to be known.
    pub(super) text: Arc<Vec<u8>>,
}

impl Tables {
    /// The tables of `image`, and the text saved last, if any was.
    ///
    /// # Errors
    /// [`StoreError::Reserve`]; [`StoreError::DamagedTables`] if some were saved, and neither place
    /// can be read.
    pub fn open(image: &Image) -> Result<(Self, Option<Vec<u8>>), StoreError> {
        let memory = image.tables()?;
        let found = (0..2).filter_map(|place| read(&memory, place)).max_by_key(|(number, _)| *number);
        // A place that is being saved has no number, and one that never was neither. With
        // checkpoints there always were.
        let any =
            image.superblock().checkpoints || (0..2).any(|place| word(&memory, place * PLACE_BYTES) != 0);
        if found.is_none() && any {
            return Err(StoreError::DamagedTables);
        }
        let (number, text) = found.map_or((0, None), |(number, text)| (number, Some(text)));
        let checkpoints = image.head().map(|head| Ok::<_, StoreError>((head, image.texts()?))).transpose()?;
        let saves = Saves { number, text: Arc::new(text.clone().unwrap_or_default()) };
        Ok((Self { memory, saves: Mutex::new(saves), checkpoints }, text))
    }

    /// Has `image` keep `text`, whatever its places hold.
    pub(super) fn replace(image: &Image, text: &[u8]) -> Result<(), StoreError> {
        let memory = image.tables()?;
        let number = (0..2).filter_map(|place| read(&memory, place)).map(|(number, _)| number).max();
        let saves = Saves { number: number.unwrap_or(0), text: Arc::default() };
        Self { memory, saves: Mutex::new(saves), checkpoints: None }.save(text)
    }

    /// Saves `text`.
    ///
    /// # Errors
    /// [`StoreError::Tables`] if it is too long; [`StoreError::NoRoom`]. Then the text before stays.
    pub fn save(&self, text: &[u8]) -> Result<(), StoreError> {
        let most = PLACE_BYTES - HEADER_BYTES;
        if text.len() > most {
            return Err(StoreError::Tables { bytes: text.len(), most });
        }
        let mut saves = self.saves.lock();
        let number = saves.number + 1;
        let at = place_of(number);
        for place in [at, PLACE_BYTES - at] {
            self.memory.ensure(place..place + HEADER_BYTES + text.len())?;
        }
        if let Some((head, texts)) = &self.checkpoints {
            // A checkpoint needs no room of its own then.
            texts.iter().try_for_each(|memory| memory.ensure(0..text.len()))?;
            head.touch();
        }
        self.memory.write(at, &0_u64.to_le_bytes());
        fence(Ordering::Release);
        self.memory.write(at + 8, &header(number, text)[8..24]);
        self.memory.write(at + HEADER_BYTES, text);
        fence(Ordering::Release);
        self.memory.write(at, &number.to_le_bytes());
        *saves = Saves { number, text: Arc::new(text.to_vec()) };
        Ok(())
    }

    /// What was saved last, which stays the last as long as this is held.
    pub(super) fn last(&self) -> MutexGuard<'_, Saves> {
        self.saves.lock()
    }
}

/// Where in the tables' part the save of this number is.
fn place_of(number: u64) -> usize {
    usize::from(number % 2 == 1) * PLACE_BYTES
}

/// What stands before a text: number, length and check.
fn header(number: u64, text: &[u8]) -> [u8; HEADER_BYTES] {
    let mut header = [0; HEADER_BYTES];
    header[..8].copy_from_slice(&number.to_le_bytes());
    header[8..16].copy_from_slice(&(text.len() as u64).to_le_bytes());
    header[16..24].copy_from_slice(&u64::from(check(number, text)).to_le_bytes());
    header
}

/// The tables' part of an image that saved `text` and nothing before: where in it the bytes are,
/// and these.
pub(super) fn saved_once(text: &[u8]) -> (usize, Vec<u8>) {
    (place_of(1), [&header(1, text), text].concat())
}

fn word(memory: &Memory, at: usize) -> u64 {
    let mut word = [0; 8];
    memory.read(at, &mut word);
    u64::from_le_bytes(word)
}

fn read(memory: &Memory, place: usize) -> Option<(u64, Vec<u8>)> {
    let at = place * PLACE_BYTES;
    let word = |at| word(memory, at);
    let (number, stored) = (word(at), word(at + 16));
    let length = usize::try_from(word(at + 8)).ok().filter(|length| *length <= PLACE_BYTES - HEADER_BYTES)?;
    // None that was saved has the last number: there is one behind each.
    if number == 0 || number == u64::MAX {
        return None;
    }
    let mut text = vec![0; length];
    memory.read(at + HEADER_BYTES, &mut text);
    (u64::from(check(number, &text)) == stored).then_some((number, text))
}

fn check(number: u64, text: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&number.to_le_bytes()), text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{image::Superblock, mode::Mode};
    use lamina_codec::Codec;

    #[test]
    fn the_last_whole_save_counts() {
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
        let image = Image::in_memory(superblock).unwrap();
        let (tables, found) = Tables::open(&image).unwrap();
        assert_eq!(found, None);
        for text in [&b"one"[..], b"", b"three"] {
            tables.save(text).unwrap();
            assert_eq!(Tables::open(&image).unwrap().1.unwrap(), text);
        }
        // The third save is in the place of the first; damaged, the second counts.
        tables.memory.write(PLACE_BYTES + HEADER_BYTES, b"T");
        assert_eq!(Tables::open(&image).unwrap().1.unwrap(), b"");
        // A number that none can follow is not one that was saved, whatever its check says.
        let forged = u64::from(check(u64::MAX, b"T"));
        for (at, word) in [(8, 1), (16, forged), (0, u64::MAX)] {
            tables.memory.write(PLACE_BYTES + at, &word.to_le_bytes());
        }
        assert_eq!(Tables::open(&image).unwrap().1.unwrap(), b"");
        // Neither place: nobody knows what the blocks are.
        tables.memory.write(HEADER_BYTES, b"TWO");
        tables.memory.write(8, &2_u64.to_le_bytes());
        let why = Tables::open(&image).err().expect("both are damaged").to_string();
        assert!(why.contains("snapshot"), "{why}");
        let long = tables.save(&vec![0; PLACE_BYTES]).unwrap_err();
        assert!(matches!(long, StoreError::Tables { bytes: PLACE_BYTES, .. }));
    }
}
