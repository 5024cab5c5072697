//! Reads the LZ4 of a plane by whole registers: 16 bytes are copied where fewer are asked for, and what is too much is written over by what follows.

use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_shuffle_epi8, _mm_storeu_si128};

use super::SLACK;

/// Bytes of a copy.
const STEP: usize = 16;
type Step = [u8; STEP];

/// A length that has bytes of its own.
const LONG: usize = 15;
/// Bytes that a match has at least.
const LEAST_MATCH: usize = 4;

/// Which bytes a match at each offset, 16 for all that are larger, repeats in a step.
static REPEATED: [Step; STEP + 1] = {
    let mut repeated = [[0; STEP]; STEP + 1];
    let mut offset = 1;
    while offset <= STEP {
        let (mut at, mut byte) = (0, 0_u8);
        while at < STEP {
            repeated[offset][at] = byte;
            at += 1;
            byte = if at % offset == 0 { 0 } else { byte + 1 };
        }
        offset += 1;
    }
    repeated
};

/// How far a step repeats whole matches of each offset, 16 of all that are larger.
static AHEAD: [u8; STEP + 1] = [0, 16, 16, 15, 16, 15, 12, 14, 16, 9, 10, 11, 12, 13, 14, 15, 16];

/// Reads the first `length` bytes of `stored` to the first `plane` bytes of `out`: whether they give as many. There are [`SLACK`] bytes more of both.
#[target_feature(enable = "avx2")]
pub(super) fn decompress(stored: &[u8], length: usize, out: &mut [u8], plane: usize) -> bool {
    assert!(stored.len() >= length + SLACK && out.len() >= plane + SLACK, "room for whole steps");
    // Bytes of the stream that are read, of the plane that are written.
    let (mut read, mut written) = (0, 0);
    // What is past the stream's end is seen when it was read: it is not far behind.
    while read < length {
        let token = usize::from(stored[read]);
        read += 1;
        let mut literals = token >> 4;
        if literals < LONG {
            store(out, written, load(stored, read));
        } else {
            literals += more(stored, length, &mut read);
            if literals > length.saturating_sub(read) || literals > plane - written {
                return false;
            }
            let mut at = 0;
            while at < literals {
                store(out, written + at, load(stored, read + at));
                at += STEP;
            }
        }
        read += literals;
        written += literals;
        if read >= length {
            return read == length && written == plane;
        }
        let offset = usize::from(u16::from_le_bytes([stored[read], stored[read + 1]]));
        read += 2;
        let mut matched = token & 15;
        if matched == LONG {
            matched += more(stored, length, &mut read);
        }
        matched += LEAST_MATCH;
        if offset.wrapping_sub(1) >= written || written + matched > plane {
            return false;
        }
        let from = written - offset;
        let pattern = _mm_shuffle_epi8(load(out, from), load(&REPEATED[offset.min(STEP)], 0));
        store(out, written, pattern);
        if matched > STEP {
            let ahead = usize::from(AHEAD[offset.min(STEP)]);
            let mut at = ahead;
            while at < matched {
                let next = if offset >= STEP { load(out, from + at) } else { pattern };
                store(out, written + at, next);
                at += ahead;
            }
        }
        written += matched;
    }
    false
}

/// The bytes of a length.
#[inline]
fn more(stored: &[u8], length: usize, read: &mut usize) -> usize {
    let mut more = 0;
    while *read < length {
        let byte = stored[*read];
        *read += 1;
        more += usize::from(byte);
        if byte < u8::MAX {
            break;
        }
    }
    more
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(bytes: &[u8], at: usize) -> __m128i {
    let step: &Step = bytes[at..].first_chunk().expect("slack behind it");
    // SAFETY: the array has the register's 16 bytes, and the load needs no alignment.
    unsafe { _mm_loadu_si128(step.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn store(bytes: &mut [u8], at: usize, value: __m128i) {
    let step: &mut Step = bytes[at..].first_chunk_mut().expect("slack behind it");
    // SAFETY: the array has the register's 16 bytes, and the store needs no alignment.
    unsafe { _mm_storeu_si128(step.as_mut_ptr().cast(), value) }
}
