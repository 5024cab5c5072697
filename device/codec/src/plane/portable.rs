//! The transpose in plain Rust: eight times 64 elements at a time in `u64`s. It defines what every
//! faster kernel must give.
//!
//! 64 elements of B bits are B words. Number each of their bits by the word's number W and its
//! place in the word, six bits: B2 B1 B0 for the byte and b2 b1 b0 within it. In words these say
//! which element it is and which of its bits; in planes, word W is plane W, and the place is the
//! element. So a transpose moves number bits to other places, and that takes six exchanges of one
//! bit of W with one of the place, one for each of the place's. An exchange works on two words at a
//! time, whose numbers differ in that bit.

use super::{PlaneBlock, PlaneMask, Planes, fold::Fold, parts, parts_mut, select};
use crate::{BlockWords, format::Format};

/// Exchanges bit `.0` of the word's number with bit `.1` of the place.
type Exchange = (u32, u32);

/// Words with the same number in as many transposes side by side: what a compiler makes vectors of.
type Lanes = [u64; LANES];
const LANES: usize = 8;
/// Bytes of a plane in that many transposes.
const STEP: usize = 8 * LANES;

/// How `N` words become `N` planes.
struct Width<const N: usize>;

impl<const N: usize> Width<N> {
    /// In this order for splitting, backwards for joining.
    ///
    /// A comment beside each says where the number bits of the elements (e5…e0) and of the planes
    /// (p4…p0) are after it.
    const EXCHANGES: [Exchange; 6] = match N {
        // W = e5 e4, place = e3 e2 e1 | e0 p1 p0
        4 => [
            (1, 5), // e3 e4, e5 e2 e1 | e0 p1 p0
            (0, 4), // e3 e2, e5 e4 e1 | e0 p1 p0
            (1, 3), // e1 e2, e5 e4 e3 | e0 p1 p0
            (0, 2), // e1 e0, e5 e4 e3 | e2 p1 p0
            (1, 1), // p1 e0, e5 e4 e3 | e2 e1 p0
            (0, 0), // p1 p0, e5 e4 e3 | e2 e1 e0
        ],
        // W = e5 e4 e3, place = e2 e1 e0 | p2 p1 p0
        8 => [(2, 5), (1, 4), (0, 3), (2, 2), (1, 1), (0, 0)],
        // W = e5 e4 e3 e2, place = e1 e0 p3 | p2 p1 p0
        16 => [
            (3, 5), // e1 e4 e3 e2, e5 e0 p3 | p2 p1 p0
            (2, 4), // e1 e0 e3 e2, e5 e4 p3 | p2 p1 p0
            (1, 3), // e1 e0 p3 e2, e5 e4 e3 | p2 p1 p0
            (0, 2), // e1 e0 p3 p2, e5 e4 e3 | e2 p1 p0
            (3, 1), // p1 e0 p3 p2, e5 e4 e3 | e2 e1 p0
            (2, 0), // p1 p0 p3 p2, e5 e4 e3 | e2 e1 e0
        ],
        // W = e5 e4 e3 e2 e1, place = e0 p4 p3 | p2 p1 p0
        32 => [
            (4, 5), // e0 e4 e3 e2 e1, e5 p4 p3 | p2 p1 p0
            (3, 4), // e0 p4 e3 e2 e1, e5 e4 p3 | p2 p1 p0
            (2, 3), // e0 p4 p3 e2 e1, e5 e4 e3 | p2 p1 p0
            (1, 2), // e0 p4 p3 p2 e1, e5 e4 e3 | e2 p1 p0
            (0, 1), // e0 p4 p3 p2 p1, e5 e4 e3 | e2 e1 p0
            (4, 0), // p0 p4 p3 p2 p1, e5 e4 e3 | e2 e1 e0
        ],
        _ => panic!("no format has elements of that many bits"),
    };

    /// The plane that each word has become: as the last lines above say, their numbers' bits are
    /// rotated.
    const PLANES: [usize; N] = {
        let rotated = match N {
            16 => 2,
            32 => 1,
            _ => 0,
        };
        let bits = N.trailing_zeros();
        let mut planes = [0; N];
        let mut word = 0;
        while word < N {
            planes[word] = (word << rotated | word >> (bits - rotated)) & (N - 1);
            word += 1;
        }
        planes
    };

    /// One of [`Self::EXCHANGES`]: constant, so that loops over words are known and shifts too.
    #[inline]
    fn exchange<const WHICH: usize>(words: &mut [Lanes; N]) {
        let (number, place) = const { Self::EXCHANGES[WHICH] };
        let shift = 1 << place;
        // Ones at the places without the bit.
        let mask = u64::MAX / ((1 << shift) + 1);
        for pair in words.chunks_exact_mut(2 << number) {
            let (without, with) = pair.split_at_mut(1 << number);
            for (a, b) in without.iter_mut().zip(with) {
                for (a, b) in a.iter_mut().zip(b) {
                    let differ = (*a >> shift ^ *b) & mask;
                    *b ^= differ;
                    *a ^= differ << shift;
                }
            }
        }
    }

    fn split(fold: Fold, words: &[u8], planes: &mut [&mut [[u8; STEP]]; N]) {
        let (groups, _) = words.as_chunks::<8>().0.as_chunks::<N>();
        for (step, groups) in groups.chunks_exact(LANES).enumerate() {
            let mut words = [[0; LANES]; N];
            for (lane, group) in groups.iter().enumerate() {
                for (word, bytes) in words.iter_mut().zip(group) {
                    word[lane] = fold.word(u64::from_le_bytes(*bytes));
                }
            }
            Self::exchange::<0>(&mut words);
            Self::exchange::<1>(&mut words);
            Self::exchange::<2>(&mut words);
            Self::exchange::<3>(&mut words);
            Self::exchange::<4>(&mut words);
            Self::exchange::<5>(&mut words);
            for (word, plane) in words.iter().zip(Self::PLANES) {
                for (bytes, lane) in planes[plane][step].as_chunks_mut().0.iter_mut().zip(word) {
                    *bytes = lane.to_le_bytes();
                }
            }
        }
    }

    fn join(fold: Fold, planes: &[&[[u8; STEP]]; N], words: &mut [u8]) {
        let (groups, _) = words.as_chunks_mut::<8>().0.as_chunks_mut::<N>();
        for (step, groups) in groups.chunks_exact_mut(LANES).enumerate() {
            let mut words = [[0; LANES]; N];
            for (word, plane) in words.iter_mut().zip(Self::PLANES) {
                for (bytes, lane) in planes[plane][step].as_chunks().0.iter().zip(word) {
                    *lane = u64::from_le_bytes(*bytes);
                }
            }
            Self::exchange::<5>(&mut words);
            Self::exchange::<4>(&mut words);
            Self::exchange::<3>(&mut words);
            Self::exchange::<2>(&mut words);
            Self::exchange::<1>(&mut words);
            Self::exchange::<0>(&mut words);
            for (lane, group) in groups.iter_mut().enumerate() {
                for (word, bytes) in words.iter().zip(group) {
                    *bytes = fold.word(word[lane]).to_le_bytes();
                }
            }
        }
    }
}

pub(super) fn split(format: Format, words: &BlockWords, planes: &mut PlaneBlock) {
    let fold = Fold::of(format);
    match format.bits() {
        4 => Width::<4>::split(fold, words, &mut in_order(parts_mut::<4, 16, STEP>(planes))),
        8 => Width::<8>::split(fold, words, &mut in_order(parts_mut::<8, 8, STEP>(planes))),
        16 => Width::<16>::split(fold, words, &mut in_order(parts_mut::<16, 4, STEP>(planes))),
        _ => Width::<32>::split(fold, words, &mut in_order(parts_mut::<32, 2, STEP>(planes))),
    }
}

/// Planes by their number.
fn in_order<const N: usize, const PARTS: usize>(
    planes: &mut [[[u8; STEP]; PARTS]; N],
) -> [&mut [[u8; STEP]]; N] {
    let mut planes = planes.each_mut().map(|plane| &mut plane[..]);
    planes.reverse();
    planes
}

pub(super) fn join(format: Format, planes: &Planes<'_>, words: &mut BlockWords) {
    let fold = Fold::of(format);
    match format.bits() {
        4 => Width::<4>::join(fold, &parts(planes, 1024), words),
        8 => Width::<8>::join(fold, &parts(planes, 512), words),
        16 => Width::<16>::join(fold, &parts(planes, 256), words),
        _ => Width::<32>::join(fold, &parts(planes, 128), words),
    }
}

// Not inlined, so that who calls one of several kernels has not its pointers' frame for all.
#[inline(never)]
pub(super) fn join_block(format: Format, mask: PlaneMask, block: &PlaneBlock, words: &mut BlockWords) {
    join(format, &select(format, mask, block), words);
}

pub(super) fn split_bytes(bytes: &[u8], planes: [&mut [u8]; 8]) {
    Width::<8>::split(Fold::No, bytes, &mut planes.map(|plane| plane.as_chunks_mut().0));
}

pub(super) fn join_bytes(planes: &[&[u8]; 8], bytes: &mut [u8]) {
    Width::<8>::join(Fold::No, &parts(planes, bytes.len() / 8), bytes);
}
