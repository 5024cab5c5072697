//! Packing elements of up to 16 bits in AVX-512 with VBMI: a register of elements at a time becomes the bytes that they fill.
//!
//! The kept bits of each 16-bit lane are closed up, run by run of the mask (most views have one); whatever the format, a lane then has `c` of them.
//! Lanes are joined in pairs, the upper one's bits moved down to the lower one's, and those pairs in pairs again: every 64-bit lane has `4c` bits at its lower end, and
//! one permutation of bytes brings them together. If `c` is odd, that is half a byte too many: odd lanes are moved up by as much, and permuted apart.
//!
//! Stores are masked, so nothing behind the stream's end is touched.

use std::arch::x86_64::{
    __m128i, __m512i, _mm_cvtsi32_si128, _mm512_and_si512, _mm512_mask_storeu_epi8,
    _mm512_maskz_permutexvar_epi8, _mm512_or_si512, _mm512_set_epi64, _mm512_set1_epi32, _mm512_set1_epi64,
    _mm512_sllv_epi64, _mm512_srl_epi16, _mm512_srl_epi32, _mm512_srl_epi64, _mm512_ternarylogic_epi64,
};

use super::avx512::{Run, load, runs};

/// Bytes of a register.
const STEP: usize = 64;
/// Bits of a lane that is closed up.
const UNIT: u32 = 16;

/// Whether this processor has what is needed here.
pub(super) fn is_available() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("avx512bw")
        && std::arch::is_x86_feature_detected!("avx512vbmi")
}

/// Which bytes of 64-bit lanes come where in the stream.
#[derive(Clone, Copy)]
struct Gather {
    places: u64,
    index: [u8; STEP],
}

impl Gather {
    /// Those of every `step`th lane from `first` on. Each has `bits` bits, which in odd lanes begin in the midst of a byte if they do not fill bytes.
    const fn new(bits: usize, first: usize, step: usize) -> Self {
        let mut gather = Self { places: 0, index: [0; STEP] };
        let mut lane = first;
        while lane < 8 {
            let mut place = lane * bits / 8;
            let mut byte = 8 * lane;
            while place < ((lane + 1) * bits).div_ceil(8) {
                gather.places |= 1 << place;
                gather.index[place] = byte.to_le_bytes()[0];
                place += 1;
                byte += 1;
            }
            lane += step;
        }
        gather
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn of(&self, lanes: __m512i) -> __m512i {
        _mm512_maskz_permutexvar_epi8(self.places, load(&self.index), lanes)
    }
}

/// By how many bits of a 16-bit lane are kept: all 64-bit lanes if they have whole bytes then, otherwise the even ones and the odd ones.
static GATHERS: [(Gather, Option<Gather>); UNIT as usize + 1] = {
    let mut gathers = [(Gather::new(0, 0, 1), None); UNIT as usize + 1];
    let mut count = 1;
    while count < gathers.len() {
        let bits = 4 * count;
        gathers[count] = if count.is_multiple_of(2) {
            (Gather::new(bits, 0, 1), None)
        } else {
            (Gather::new(bits, 0, 2), Some(Gather::new(bits, 1, 2)))
        };
        count += 1;
    }
    gathers
};

/// How the bits of a mask are brought together.
struct Packing<'r> {
    /// A lane's first run of kept bits, and those above it.
    first: Run,
    others: &'r [Run],
    /// Kept bits of a 16-bit lane.
    count: u32,
    gather: Gather,
    gather_odd: Option<Gather>,
}

impl<'r> Packing<'r> {
    fn new(runs: &'r [Run], count: u32) -> Self {
        let (&first, others) = runs.split_first().expect("a bit is kept");
        let (gather, gather_odd) = GATHERS[count as usize];
        Self { first, others, count, gather, gather_odd }
    }

    /// The kept bits of `words` at the register's lower end.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn pack(&self, words: __m512i) -> __m512i {
        let mut closed = close(self.first, words);
        for &run in self.others {
            closed = _mm512_or_si512(closed, close(run, words));
        }
        let pair = 2 * self.count;
        let lower = |bits: u32| ((1_u64 << bits) - 1).cast_signed();
        // Each lower lane as it is, and above it the upper one moved down: (lower & lanes) | (!lower & moved).
        let moved = _mm512_srl_epi32(closed, register(UNIT - self.count));
        let kept = _mm512_set1_epi64(lower(self.count) << 32 | lower(self.count));
        let pairs = _mm512_ternarylogic_epi64::<0xca>(kept, closed, moved);
        let moved = _mm512_srl_epi64(pairs, register(2 * UNIT - pair));
        let fours = _mm512_ternarylogic_epi64::<0xca>(_mm512_set1_epi64(lower(pair)), pairs, moved);
        let Some(odd) = &self.gather_odd else { return self.gather.of(fours) };
        let fours = _mm512_sllv_epi64(fours, _mm512_set_epi64(4, 0, 4, 0, 4, 0, 4, 0));
        _mm512_or_si512(self.gather.of(fours), odd.of(fours))
    }
}

/// The bits of one run in each 16-bit lane, where they belong.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn close(run: Run, words: __m512i) -> __m512i {
    let bits = _mm512_set1_epi32((run.bits << UNIT | run.bits).cast_signed());
    _mm512_srl_epi16(_mm512_and_si512(words, bits), register(run.shift))
}

/// A count of bits to shift by.
#[inline]
#[target_feature(enable = "avx512f")]
fn register(bits: u32) -> __m128i {
    _mm_cvtsi32_si128(bits.cast_signed())
}

/// Packs the bits in `keep`, of which there are some, of every two bytes of `words` into `stream`, which they fill.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(super) fn pack(keep: u16, words: &[u8], stream: &mut [u8]) {
    let count = keep.count_ones();
    let (runs, run_count) = runs(keep.into());
    let packing = Packing::new(&runs[..run_count], count);
    let bytes = 4 * count as usize;
    let (whole, rest) = words.as_chunks();
    let (streams, last_stream) = stream.split_at_mut(whole.len() * bytes);
    for (words, stream) in whole.iter().zip(streams.chunks_exact_mut(bytes)) {
        store(stream, packing.pack(load(words)));
    }
    if !rest.is_empty() {
        let mut words = [0; STEP];
        words[..rest.len()].copy_from_slice(rest);
        store(last_stream, packing.pack(load(&words)));
    }
}

/// Puts the lower bytes of `value` into `bytes`, as many as there are.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn store(bytes: &mut [u8], value: __m512i) {
    let count = bytes.len().min(STEP);
    if count > 0 {
        // SAFETY: the mask lets through as many bytes as there are, none more.
        unsafe { _mm512_mask_storeu_epi8(bytes.as_mut_ptr().cast(), u64::MAX >> (STEP - count), value) };
    }
}
