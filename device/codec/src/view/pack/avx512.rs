//! Packing elements of up to 16 bits in AVX-512 with VBMI: a register of elements at a time becomes
//! the bytes that they fill.
//!
//! The kept bits of each 16-bit lane are closed up, run by run of the mask; whatever the format, a
//! lane then has `c` of them. Lanes are joined in pairs, the upper one's bits moved down to the
//! lower one's. Most views keep one run from the sign down, which is closed up and joined by one
//! shift for either lane of a pair. If a pair's `2c` bits are whole bytes, one permutation of bytes
//! brings them together. If not, pairs are joined in pairs again: every 64-bit lane has `4c` bits
//! at its lower end. If `c` is odd, that is half a byte too many: odd lanes are moved up by as
//! much, and permuted apart.
//!
//! A whole register is stored as long as the stream has room for it, as what is behind its bytes
//! comes next; the last stores are masked, so nothing behind the stream's end is touched.

use std::arch::x86_64::{
    __m128i, __m512i, _mm_cvtsi32_si128, _mm512_and_si512, _mm512_loadu_si512, _mm512_mask_storeu_epi8,
    _mm512_maskz_permutexvar_epi8, _mm512_or_si512, _mm512_set_epi64, _mm512_set1_epi32, _mm512_set1_epi64,
    _mm512_sllv_epi64, _mm512_srl_epi16, _mm512_srl_epi32, _mm512_srl_epi64, _mm512_storeu_si512,
    _mm512_ternarylogic_epi64,
};

/// Bytes of a register.
const STEP: usize = 64;
/// Bits of a lane that is closed up.
const UNIT: u32 = 16;

/// One run of the mask: which bits, and how far they move down.
#[derive(Clone, Copy)]
struct Run {
    bits: u32,
    shift: u32,
}

/// The runs of ones in `keep`, and how many.
fn runs(mut keep: u32) -> ([Run; UNIT as usize / 2], usize) {
    let mut runs = [Run { bits: 0, shift: 0 }; UNIT as usize / 2];
    let (mut count, mut to) = (0, 0);
    while keep != 0 {
        let from = keep.trailing_zeros();
        // The carry of this addition ends at the zero above the run.
        let bits = keep & !keep.wrapping_add(1 << from);
        runs[count] = Run { bits, shift: from - to };
        to += bits.count_ones();
        count += 1;
        keep &= !bits;
    }
    (runs, count)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; 64]) -> __m512i {
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// Which bytes of lanes come where in the stream.
#[derive(Clone, Copy)]
struct Gather {
    places: u64,
    index: [u8; STEP],
}

impl Gather {
    /// Those of every `step`th lane of `wide` bytes from `first` on. Each has `bits` bits, which in
    /// odd lanes begin in the midst of a byte if they do not fill bytes.
    const fn new(wide: usize, bits: usize, first: usize, step: usize) -> Self {
        let mut gather = Self { places: 0, index: [0; STEP] };
        let mut lane = first;
        while lane < STEP / wide {
            let mut place = lane * bits / 8;
            let mut byte = wide * lane;
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

/// How what is joined is brought together.
#[derive(Clone, Copy)]
enum Gathers {
    /// Of pairs, which have whole bytes.
    Pairs(Gather),
    /// Of pairs of pairs.
    Fours(Gather),
    /// Of pairs of pairs that do not have whole bytes: the even ones and the odd ones.
    Halves(Gather, Gather),
}

/// By how many bits of a 16-bit lane are kept.
static GATHERS: [Gathers; UNIT as usize + 1] = {
    let mut gathers = [Gathers::Pairs(Gather::new(4, 0, 0, 1)); UNIT as usize + 1];
    let mut count = 1;
    while count < gathers.len() {
        gathers[count] = if count.is_multiple_of(4) {
            Gathers::Pairs(Gather::new(4, 2 * count, 0, 1))
        } else if count.is_multiple_of(2) {
            Gathers::Fours(Gather::new(8, 4 * count, 0, 1))
        } else {
            Gathers::Halves(Gather::new(8, 4 * count, 0, 2), Gather::new(8, 4 * count, 1, 2))
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
    gathers: Gathers,
}

impl<'r> Packing<'r> {
    fn new(runs: &'r [Run], count: u32) -> Self {
        let (&first, others) = runs.split_first().expect("a bit is kept");
        Self { first, others, count, gathers: GATHERS[count as usize] }
    }

    /// Those of each pair of 16-bit lanes at its lower end.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn pairs(&self, words: __m512i) -> __m512i {
        let apart = UNIT - self.count;
        let kept = _mm512_set1_epi32(((1_u32 << self.count) - 1).cast_signed());
        let (lower, upper) = if self.others.is_empty() && self.first.shift == apart {
            let lower = _mm512_srl_epi32(words, register(apart));
            (lower, _mm512_srl_epi32(words, register(2 * apart)))
        } else {
            let mut closed = close(self.first, words);
            for &run in self.others {
                closed = _mm512_or_si512(closed, close(run, words));
            }
            (closed, _mm512_srl_epi32(closed, register(apart)))
        };
        // (kept & lower) | (!kept & upper).
        _mm512_ternarylogic_epi64::<0xca>(kept, lower, upper)
    }

    /// Those of each four lanes at their lower end.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn fours(&self, words: __m512i) -> __m512i {
        let pairs = self.pairs(words);
        let upper = _mm512_srl_epi64(pairs, register(2 * (UNIT - self.count)));
        let kept = _mm512_set1_epi64(((1_u64 << (2 * self.count)) - 1).cast_signed());
        _mm512_ternarylogic_epi64::<0xca>(kept, pairs, upper)
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

/// Packs the bits in `keep`, of which there are some, of every two bytes of `words` into `stream`,
/// which they fill.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
pub(super) fn pack(keep: u16, words: &[u8], stream: &mut [u8]) {
    let (runs, run_count) = runs(keep.into());
    let packing = Packing::new(&runs[..run_count], keep.count_ones());
    let bytes = 4 * packing.count as usize;
    match packing.gathers {
        Gathers::Pairs(all) => each(words, bytes, stream, |words| all.of(packing.pairs(words))),
        Gathers::Fours(all) => each(words, bytes, stream, |words| all.of(packing.fours(words))),
        Gathers::Halves(even, odd) => each(words, bytes, stream, |words| {
            let fours = _mm512_sllv_epi64(packing.fours(words), _mm512_set_epi64(4, 0, 4, 0, 4, 0, 4, 0));
            _mm512_or_si512(even.of(fours), odd.of(fours))
        }),
    }
}

/// Puts into `stream` what `pack` makes of each register of `words`, `bytes` bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn each(words: &[u8], bytes: usize, stream: &mut [u8], pack: impl Fn(__m512i) -> __m512i) {
    let (whole, rest) = words.as_chunks();
    // Of so many the register is stored whole, as the stream has room for it.
    let roomy = stream.len().checked_sub(STEP).map_or(0, |last| last / bytes + 1).min(whole.len());
    for (index, words) in whole[..roomy].iter().enumerate() {
        let packed = pack(load(words));
        // SAFETY: `index` is at most `last / bytes`, and the stream has a register behind `last`;
        // the store needs no alignment.
        unsafe { _mm512_storeu_si512(stream.as_mut_ptr().add(index * bytes).cast(), packed) };
    }
    for (index, words) in whole.iter().enumerate().skip(roomy) {
        store(&mut stream[index * bytes..], pack(load(words)));
    }
    if !rest.is_empty() {
        let mut words = [0; STEP];
        words[..rest.len()].copy_from_slice(rest);
        store(&mut stream[whole.len() * bytes..], pack(load(&words)));
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
