//! The memory that a request names: pieces of the guest's, taken as one run of bytes.
//!
//! The guest may change it at any time, and another request may name the same. So it is copied in
//! and out, and nothing here holds a reference to it.

use std::ops::Range;

use vm_memory::{GuestAddress, GuestMemory, Permissions, VolatileSlice};

use crate::vhost_connections::Memory;

use super::request::Broken;

/// Bytes that a request has the device read, or write.
#[derive(Default)]
pub(super) struct Pieces<'m> {
    all: Vec<VolatileSlice<'m>>,
    bytes: usize,
    /// The piece at the front of what was used last, and where it begins: most are used in order.
    last: (usize, usize),
    /// The end of what was written.
    written: usize,
}

impl<'m> Pieces<'m> {
    /// Appends `length` bytes at `at`.
    pub(super) fn push(
        &mut self,
        memory: &'m Memory,
        at: GuestAddress,
        length: u32,
        access: Permissions,
    ) -> Result<(), Broken> {
        let slices = memory.get_slices(at, length as usize, access).map_err(|_| Broken::Descriptors)?;
        for slice in slices {
            let slice = slice.map_err(|_| Broken::Descriptors)?;
            self.bytes = self.bytes.checked_add(slice.len()).ok_or(Broken::Descriptors)?;
            self.all.push(slice);
        }
        Ok(())
    }

    /// How many bytes they are.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The end of what was written there.
    pub(super) fn written(&self) -> usize {
        self.written
    }

    /// Copies out what lies from `at` on. `false` if that are not as many bytes.
    #[must_use]
    pub(super) fn read(&mut self, at: usize, out: &mut [u8]) -> bool {
        let range = at..at + out.len();
        self.each(&range, |slice, place| {
            slice.copy_to(&mut out[place]);
        })
    }

    /// Copies to what lies from `at` on. `false` if that are not as many bytes.
    pub(super) fn write(&mut self, at: usize, data: &[u8]) -> bool {
        let range = at..at + data.len();
        self.written = self.written.max(range.end.min(self.bytes));
        self.each(&range, |slice, place| slice.copy_from(&data[place]))
    }

    /// Calls with all of a range, piece by piece, and where in the range that is. `false` if there
    /// is not all of it.
    fn each(
        &mut self,
        range: &Range<usize>,
        mut found: impl FnMut(&VolatileSlice<'m>, Range<usize>),
    ) -> bool {
        let (mut index, mut start) = if self.last.1 <= range.start { self.last } else { (0, 0) };
        let mut at = range.start;
        while at < range.end {
            let Some(piece) = self.all.get(index) else { return false };
            let end = start + piece.len();
            if at < end {
                let until = end.min(range.end);
                let part = piece.subslice(at - start, until - at).expect("inside the piece");
                if at == range.start {
                    self.last = (index, start);
                }
                found(&part, at - range.start..until - range.start);
                at = until;
            }
            (index, start) = (index + 1, end);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::Bytes as _;

    use super::*;

    /// Bytes of each of the two regions of the guest's memory, of which the second follows the
    /// first.
    const REGION: usize = 256;

    proptest! {
        #[test]
        fn pieces_are_one_run_of_bytes_wherever_they_lie(
            places in prop::collection::vec((0..2 * REGION, 0_usize..90), 0..8),
            ranges in prop::collection::vec((0_usize..300, 0_usize..200), 1..8), noise in any::<u8>(),
        ) {
            let regions = [0, REGION].map(|at| (GuestAddress(at as u64), REGION));
            let guest = Memory::from_ranges(&regions).unwrap();
            let mut memory: Vec<u8> = (0..2 * REGION).map(|at| noise.wrapping_mul(at.to_le_bytes()[0] | 1)).collect();
            guest.write_slice(&memory, GuestAddress(0)).unwrap();
            let mut pieces = Pieces::default();
            // Where each byte of the run is in memory. Some are in it twice.
            let mut run = Vec::new();
            for (at, length) in places {
                let length = length.min(2 * REGION - at);
                let bytes = u32::try_from(length).unwrap();
                pieces.push(&guest, GuestAddress(at as u64), bytes, Permissions::Write).unwrap();
                run.extend(at..at + length);
            }
            prop_assert_eq!(pieces.bytes(), run.len());
            let mut end = 0;
            for (n, (at, length)) in ranges.into_iter().enumerate() {
                let inside = at + length <= run.len();
                let mut found = vec![0; length];
                prop_assert_eq!(pieces.read(at, &mut found), inside || length == 0);
                if !inside {
                    continue;
                }
                let want: Vec<u8> = run[at..at + length].iter().map(|at| memory[*at]).collect();
                prop_assert_eq!(found, want);
                let data: Vec<u8> = (0..length).map(|at| (7 * at + n).to_le_bytes()[0]).collect();
                prop_assert!(pieces.write(at, &data));
                for (at, byte) in run[at..at + length].iter().zip(data) {
                    memory[*at] = byte;
                }
                end = end.max(at + length);
                prop_assert_eq!(pieces.written(), end);
            }
            let mut after = vec![0; 2 * REGION];
            guest.read_slice(&mut after, GuestAddress(0)).unwrap();
            prop_assert_eq!(after, memory);
        }
    }

    #[test]
    fn pieces_outside_of_the_guests_memory_are_refused() {
        let guest = Memory::from_ranges(&[(GuestAddress(0), REGION)]).unwrap();
        for (at, length) in [(0, 257), (255, 2), (256, 1), (u64::MAX, 2)] {
            let refused = Pieces::default().push(&guest, GuestAddress(at), length, Permissions::Read);
            assert!(matches!(refused, Err(Broken::Descriptors)), "{at} {length}");
        }
    }
}
