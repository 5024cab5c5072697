//! A range of another memory: a pool beside whatever else the memory holds.

use std::panic::Location;

use super::{Call, Crc, CxlMem, LINE, MemError, inside};

/// The range.
#[derive(Debug)]
pub struct Part<M> {
    memory: M,
    start: u64,
    bytes: u64,
}

impl<M: CxlMem> Part<M> {
    /// The `bytes` of `memory` from `start` on, which is at a line's beginning.
    ///
    /// # Errors
    /// [`MemError::End`], [`MemError::Unaligned`].
    pub fn new(memory: M, start: u64, bytes: u64) -> Result<Self, MemError> {
        inside(start, bytes, memory.bytes())?;
        if start.is_multiple_of(LINE) {
            Ok(Self { memory, start, bytes })
        } else {
            Err(MemError::Unaligned { at: start })
        }
    }

    /// Where a range of this one lies in the whole memory.
    fn place(&self, at: u64, length: u64) -> Result<u64, MemError> {
        inside(at, length, self.bytes)?;
        Ok(self.start + at)
    }
}

impl<M: CxlMem> CxlMem for Part<M> {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn coherent(&self) -> bool {
        self.memory.coherent()
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MemError> {
        self.memory.load(self.place(at, into.len() as u64)?, into)
    }

    fn store(&self, at: u64, from: &[u8]) -> Result<(), MemError> {
        self.memory.store(self.place(at, from.len() as u64)?, from)
    }

    fn ntstore(&self, at: u64, from: &[u8]) -> Result<(), MemError> {
        self.memory.ntstore(self.place(at, from.len() as u64)?, from)
    }

    fn load_checked(&self, at: u64, into: &mut [u8], crc: &mut Crc) -> Result<(), MemError> {
        self.memory.load_checked(self.place(at, into.len() as u64)?, into, crc)
    }

    fn ntstore_checked(&self, at: u64, from: &[u8], crc: &mut Crc) -> Result<(), MemError> {
        self.memory.ntstore_checked(self.place(at, from.len() as u64)?, from, crc)
    }

    fn flush(&self, at: u64, length: u64) -> Result<(), MemError> {
        self.memory.flush(self.place(at, length)?, length)
    }

    fn invalidate(&self, at: u64, length: u64) -> Result<(), MemError> {
        self.memory.invalidate(self.place(at, length)?, length)
    }

    fn fence(&self) -> Result<(), MemError> {
        self.memory.fence()
    }

    fn compare_exchange(&self, at: u64, old: u64, new: u64) -> Result<Option<bool>, MemError> {
        self.memory.compare_exchange(self.place(at, 8)?, old, new)
    }

    fn wants(&self, site: &'static Location<'static>, call: Call, at: u64, length: u64) -> bool {
        self.memory.wants(site, call, self.start + at, length)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::mem::{Map, Mapped};

    #[test]
    fn a_part_is_its_range_and_nothing_beside_it() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let whole = || Mapped::new(Map::new(&file, Path::new("a file"), None).unwrap());
        let part = Part::new(whole(), 1024, 512).unwrap();
        part.store(0, &[1; 512]).unwrap();
        assert_eq!(part.compare_exchange(8, u64::from_le_bytes([1; 8]), 7).unwrap(), Some(true));
        let mut all = [0; 4096];
        whole().load(0, &mut all).unwrap();
        assert_eq!(all[1040..1536], [1; 496]);
        assert_eq!((all[1023], all[1024], all[1032], all[1535], all[1536]), (0, 1, 7, 1, 0));
        assert!(matches!(part.store(511, &[0; 2]), Err(MemError::End { bytes: 512, .. })));
        assert!(matches!(part.load(u64::MAX, &mut [0]), Err(MemError::End { .. })));
        assert!(matches!(Part::new(whole(), 4032, 65), Err(MemError::End { .. })));
        assert!(matches!(Part::new(whole(), 32, 64), Err(MemError::Unaligned { at: 32 })));
    }
}
