//! Copying while folding, with AVX-512 and VPCLMULQDQ: 256 bytes at a time.

use std::arch::x86_64::{
    __m512i, _MM_HINT_T0, _mm_cvtsi64_si128, _mm_prefetch, _mm_sfence, _mm512_clmulepi64_epi128,
    _mm512_loadu_si512, _mm512_set4_epi64, _mm512_storeu_si512, _mm512_stream_si512,
    _mm512_ternarylogic_epi64, _mm512_xor_si512, _mm512_zextsi128_si512,
};

/// Bytes that are folded into others of as many.
pub(super) const FOLDED: usize = 4 * LINE;
const LINE: usize = 64;
/// How far ahead bytes are prefetched: a page, past whose end the processor does not look by
/// itself. `./x bench pool` is quickest so; at half of it a get of 64 KiB takes a fifth longer.
const AHEAD: usize = 4096;

/// CRC-32C's polynomial, its bits reflected.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// What the two halves of 16 bytes are multiplied with to be moved by [`FOLDED`] bytes: x to the
/// power of as many bits, and of the half's place, modulo the polynomial. A product of reflected
/// factors is one bit short, hence the shift.
const FIRST_HALF: u64 = power(8 * FOLDED as u32 + 32);
const SECOND_HALF: u64 = power(8 * FOLDED as u32 - 32);

const fn power(of: u32) -> u64 {
    let (mut left, mut rest) = (of, 1 << 31);
    while left > 0 {
        rest = if rest & 1 == 1 { rest >> 1 ^ POLYNOMIAL } else { rest >> 1 };
        left -= 1;
    }
    (rest as u64) << 1
}

/// Whether this processor has the instructions.
pub(super) fn is_available() -> bool {
    std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("vpclmulqdq")
}

/// A fold: `old`, moved by [`FOLDED`] bytes, and `new`, which are there.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn folded(old: __m512i, by: __m512i, new: __m512i) -> __m512i {
    const ALL_THREE: i32 = 0x96;
    let first = _mm512_clmulepi64_epi128::<0x00>(old, by);
    let second = _mm512_clmulepi64_epi128::<0x11>(old, by);
    _mm512_ternarylogic_epi64::<ALL_THREE>(first, second, new)
}

/// Copies `length` bytes. The check of what it returns, of a state of zero, is that of the bytes
/// after `state`. What is streamed is ordered before the stores that follow.
///
/// # Safety
/// The processor [has it](is_available). `length`, a multiple of [`FOLDED`] above zero, bytes are
/// mapped at `from` and for stores at `into`, and are not the same; `into` is a multiple of 64 if
/// they are streamed.
#[target_feature(enable = "avx512f,vpclmulqdq")]
pub(super) unsafe fn copy<const STREAM: bool>(
    from: *const u8,
    into: *mut u8,
    length: usize,
    state: u32,
) -> [u8; FOLDED] {
    let load = |at: usize, line: usize| {
        // SAFETY: `at` is at most `length - FOLDED` and `line` below 4: 64 bytes are mapped there.
        unsafe { _mm512_loadu_si512(from.add(at + LINE * line).cast()) }
    };
    let store = |at: usize, line: usize, bytes| {
        // SAFETY: as of loads; what is streamed begins at a line, as `into` does.
        unsafe {
            let into = into.add(at + LINE * line).cast();
            if STREAM { _mm512_stream_si512(into, bytes) } else { _mm512_storeu_si512(into, bytes) }
        }
    };
    let by = _mm512_set4_epi64(
        SECOND_HALF.cast_signed(),
        FIRST_HALF.cast_signed(),
        SECOND_HALF.cast_signed(),
        FIRST_HALF.cast_signed(),
    );
    let mut sums: [__m512i; 4] = std::array::from_fn(|line| load(0, line));
    for (line, bytes) in sums.iter().enumerate() {
        store(0, line, *bytes);
    }
    sums[0] = _mm512_xor_si512(sums[0], _mm512_zextsi128_si512(_mm_cvtsi64_si128(i64::from(state))));
    for at in (FOLDED..length).step_by(FOLDED) {
        // All loads first: a store to the same place of another page delays a load behind it.
        let bytes: [__m512i; 4] = std::array::from_fn(|line| {
            if !STREAM {
                // A hint, of any address.
                _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(at + LINE * line + AHEAD).cast());
            }
            load(at, line)
        });
        for (line, bytes) in bytes.into_iter().enumerate() {
            store(at, line, bytes);
            sums[line] = folded(sums[line], by, bytes);
        }
    }
    if STREAM {
        _mm_sfence();
    }
    let mut left = [0; FOLDED];
    for (line, sum) in left.as_chunks_mut::<LINE>().0.iter_mut().zip(sums) {
        // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
        unsafe { _mm512_storeu_si512(line.as_mut_ptr().cast(), sum) };
    }
    left
}
