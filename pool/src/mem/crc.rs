//! The check of an object's bytes, CRC-32C, which is added up while they are copied.
//!
//! Bytes that are copied first and checked afterwards are loaded twice, which costs as much again
//! as the copy (`./x bench pool`). With AVX-512 and its carry-less multiplier each register that is
//! copied is folded into four others on its way (Gopal and others, *Fast CRC Computation for
//! Generic Polynomials Using PCLMULQDQ Instruction*, Intel, 2009). What these hold in the end has
//! the check of all the bytes, so whoever knows how to check 256 bytes ends it: the crate.
//!
//! Shared memory is loaded once: what is checked is what was copied, whatever others store
//! meanwhile.

#[cfg(target_arch = "x86_64")]
mod avx512;

use std::ptr;

use crc_fast::{CrcAlgorithm, Digest};

use super::LINE;

/// Bytes that are copied and checked at a time by whom that takes two passes: they stay in the
/// nearest cache.
pub(crate) const PIECE: usize = 16 << 10;
/// Fewer bytes are sooner checked by themselves than folded.
const FEW: usize = 1 << 10;

/// The CRC-32C of bytes, as far as they came.
#[derive(Clone, Debug)]
pub struct Crc {
    state: u32,
}

impl Default for Crc {
    /// Of no bytes.
    fn default() -> Self {
        Self { state: u32::MAX }
    }
}

/// How bytes go where they are to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stores {
    /// Into the caches: who loads them from shared memory needs them next.
    Cached,
    /// Past them, at a line's beginning: nobody here does, and no line is loaded to be overwritten.
    Streamed,
}

impl Crc {
    /// The check of some bytes.
    pub fn of(bytes: &[u8]) -> u32 {
        let mut crc = Self::default();
        crc.update(bytes);
        crc.finish()
    }

    /// Adds bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(self.state));
        digest.update(bytes);
        self.state = digest.get_state() as u32;
    }

    /// The check of all that were added.
    pub fn finish(&self) -> u32 {
        !self.state
    }

    /// Fills `into` from shared memory, and adds its bytes.
    ///
    /// # Safety
    /// As many bytes are mapped at `from`, and are not those of `into`.
    pub(crate) unsafe fn load(&mut self, from: *const u8, into: &mut [u8]) {
        // Stores that reach over a line's end cost twice, loads hardly more.
        let head = into.as_ptr().align_offset(LINE as usize).min(into.len());
        let (head, rest) = into.split_at_mut(head);
        // SAFETY: `head` is the first of what the caller promises.
        unsafe { self.load_twice(from, head) };
        let (from, target) = (from.wrapping_add(head.len()), rest.as_mut_ptr());
        // SAFETY: `rest` is Rust's and belongs to `from`, and the caller promises the other part.
        let done = unsafe { self.fold(from, target, rest.len(), Stores::Cached) };
        // SAFETY: the same of what is left.
        unsafe { self.load_twice(from.wrapping_add(done), &mut rest[done..]) };
    }

    /// Loads bytes and adds them, one after the other.
    ///
    /// # Safety
    /// As of [`Self::load`].
    unsafe fn load_twice(&mut self, from: *const u8, into: &mut [u8]) {
        let mut from = from;
        for piece in into.chunks_mut(PIECE) {
            // SAFETY: `piece` is what of `into` belongs to `from`, where as many bytes are mapped.
            unsafe { ptr::copy_nonoverlapping(from, piece.as_mut_ptr(), piece.len()) };
            self.update(piece);
            from = from.wrapping_add(piece.len());
        }
    }

    /// Stores bytes to shared memory, past the caches if that is worth it, and adds them. They are
    /// ordered before the stores that follow.
    ///
    /// # Safety
    /// As many bytes are mapped for stores at `into`, and are not those of `from`.
    pub(crate) unsafe fn store(&mut self, from: &[u8], into: *mut u8) {
        let (mut from, mut into) = (from, into);
        let mut stores = Stores::Cached;
        if from.len() >= PIECE {
            let (head, rest) = from.split_at(into.align_offset(LINE as usize).min(from.len()));
            // SAFETY: `head` is the first of `from`, for which there is a place at `into`.
            unsafe { self.store_twice(head, into) };
            (from, into, stores) = (rest, into.wrapping_add(head.len()), Stores::Streamed);
        }
        // SAFETY: `from` is Rust's, what is left of it has its place at `into`, which is where a
        // line begins if they are streamed.
        let done = unsafe { self.fold(from.as_ptr(), into, from.len(), stores) };
        // SAFETY: the same of what is left now.
        unsafe { self.store_twice(&from[done..], into.wrapping_add(done)) };
    }

    /// Stores bytes and adds them, one after the other.
    ///
    /// # Safety
    /// As of [`Self::store`].
    unsafe fn store_twice(&mut self, from: &[u8], into: *mut u8) {
        let mut into = into;
        for piece in from.chunks(PIECE) {
            // SAFETY: as the caller promises of all the pieces.
            unsafe { ptr::copy_nonoverlapping(piece.as_ptr(), into, piece.len()) };
            self.update(piece);
            into = into.wrapping_add(piece.len());
        }
    }

    /// Copies and adds the first of some bytes in one pass, if the processor can: how many.
    ///
    /// # Safety
    /// `length` bytes are mapped at `from` and for stores at `into`, and are not the same; `into`
    /// begins a line if they are streamed.
    #[cfg(target_arch = "x86_64")]
    unsafe fn fold(&mut self, from: *const u8, into: *mut u8, length: usize, stores: Stores) -> usize {
        if length < FEW || !avx512::is_available() {
            return 0;
        }
        let length = length - length % avx512::FOLDED;
        // SAFETY: the processor has what it takes, and the caller promises the rest.
        let folded = unsafe {
            match stores {
                Stores::Cached => avx512::copy::<false>(from, into, length, self.state),
                Stores::Streamed => avx512::copy::<true>(from, into, length, self.state),
            }
        };
        self.state = 0;
        self.update(&folded);
        length
    }

    #[cfg(not(target_arch = "x86_64"))]
    #[allow(clippy::unused_self, reason = "other processors have one")]
    unsafe fn fold(&mut self, _: *const u8, _: *mut u8, _: usize, _: Stores) -> usize {
        0
    }
}

#[cfg(test)]
mod tests {
    use crc_fast::checksum;
    use proptest::prelude::*;

    use super::*;

    fn want(bytes: &[u8]) -> u32 {
        checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
    }

    /// Copies parts of `bytes` one after the other, of which each begins `shifts` bytes behind a
    /// line at either side: as loads and as stores.
    fn copied(bytes: &[u8], parts: &[usize], (from_shift, into_shift): (usize, usize)) {
        let line = |buffer: &[u8]| buffer.as_ptr().align_offset(64);
        for is_load in [true, false] {
            let (mut crc, mut at) = (Crc::default(), 0_usize);
            for part in parts.iter().copied().chain([usize::MAX]) {
                let part = &bytes[at..at.saturating_add(part).min(bytes.len())];
                at += part.len();
                let mut from = vec![0; part.len() + 128];
                let first = line(&from) + from_shift;
                from[first..first + part.len()].copy_from_slice(part);
                let mut into = vec![0xaa; part.len() + 128];
                let second = line(&into) + into_shift;
                let (from, target) = (&from[first..first + part.len()], &mut into[second..][..part.len()]);
                if is_load {
                    // SAFETY: both have as many bytes, and are buffers of their own.
                    unsafe { crc.load(from.as_ptr(), target) };
                } else {
                    // SAFETY: the same.
                    unsafe { crc.store(from, target.as_mut_ptr()) };
                }
                assert!(target == part, "{} bytes", part.len());
                assert!(into[..second].iter().all(|byte| *byte == 0xaa), "before them");
                assert!(into[second + part.len()..].iter().all(|byte| *byte == 0xaa), "behind them");
            }
            assert_eq!(crc.finish(), want(bytes), "{} bytes in {parts:?}", bytes.len());
        }
    }

    #[test]
    fn every_length_is_copied_and_has_the_check_of_the_crate() {
        let bytes: Vec<u8> = (0..40_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        assert_eq!(Crc::of(&[]), want(&[]));
        assert_eq!(Crc::of(b"123456789"), 0xe306_9283, "the catalogue's");
        let near = |at: usize| at - 66..at + 66;
        for length in (0..1400).chain(near(PIECE)).chain(near(2 * PIECE)).chain([40_000]) {
            copied(&bytes[..length], &[], (length % 64, length * 7 % 64));
        }
    }

    proptest! {
        #[test]
        fn parts_at_any_place_have_the_check_of_the_whole(
            bytes in prop::collection::vec(any::<u8>(), 0..70_000),
            parts in prop::collection::vec(prop_oneof![0..70_usize, 900..40_000_usize], 0..5),
            shifts in (0..64_usize, 0..64_usize),
        ) {
            copied(&bytes, &parts, shifts);
        }
    }

    #[test]
    fn a_bit_that_differs_is_another_check() {
        let bytes = vec![0x5a; 3 * FEW + 77];
        for at in [0, 1, 255, 256, FEW, 3 * FEW, 3 * FEW + 76] {
            let mut other = bytes.clone();
            other[at] ^= 4;
            let (mut crc, mut into) = (Crc::default(), vec![0; other.len()]);
            // SAFETY: both have as many bytes, and are buffers of their own.
            unsafe { crc.load(other.as_ptr(), &mut into) };
            assert_ne!(crc.finish(), want(&bytes), "byte {at}");
        }
    }
}
