//! Joining planes: a byte of each of eight is brought together in a quadword, the matrix is
//! transposed, and bytes are brought together to elements.

use std::{
    arch::x86_64::{
        __m512i, _mm256_loadu_si256, _mm512_and_si512, _mm512_castsi256_si512, _mm512_inserti64x4,
        _mm512_loadu_si512, _mm512_mask_loadu_epi64, _mm512_maskz_mov_epi64, _mm512_multishift_epi64_epi8,
        _mm512_permutex2var_epi8, _mm512_set1_epi8, _mm512_set1_epi16, _mm512_set1_epi32, _mm512_set1_epi64,
        _mm512_setzero_si512, _mm512_ternarylogic_epi64, _mm512_unpackhi_epi8, _mm512_unpacklo_epi8,
        _mm512_xor_si512,
    },
    hint::black_box,
};

use super::{Eight, Line, line, load, store, transpose, unpack};
use crate::{
    BlockWords,
    format::Format,
    plane::{PlaneBlock, PlaneMask, Planes, first, fold::Fold, source::Source},
};

/// The line at `at` of each plane.
///
/// # Safety
/// Each plane has that many bytes, and 64 more.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
unsafe fn load_planes<const N: usize>(planes: impl Source<N>, at: usize) -> [__m512i; N] {
    let mut v = [_mm512_setzero_si512(); N];
    for (bit, v) in v.iter_mut().enumerate() {
        // SAFETY: as the caller promises; the load needs no alignment.
        *v = unsafe { _mm512_loadu_si512(planes.plane(bit).add(at).cast()) };
    }
    v
}

/// Puts a line of each of eight planes together, but for the transposing: each quadword of the
/// result has a byte of each plane, the last plane first. `first` and `second` say which bytes go
/// where; see `joined!`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn gather(planes: &Eight, first: __m512i, second: __m512i) -> Eight {
    let mut v = *planes;
    // k = 7 − plane, its bits k2 k1 k0. Of the result's number r2 r1 r0 and quadword s in a lane:
    for k in 0..4 {
        let (a, b) = (planes[7 - k], planes[3 - k]);
        v[k] = _mm512_permutex2var_epi8(a, first, b); // register r2 k1 k0, place r1 r0 s k2
        v[4 + k] = _mm512_permutex2var_epi8(a, second, b);
    }
    let v = unpack::<8, 2>(v); // r2 r1 k0, r0 s k2 k1
    unpack::<8, 1>(v) // r2 r1 r0, s k2 k1 k0
}

/// The indices for [`gather`] that bring the group `$group` of the planes to register `$r`, lane
/// `$lane`, quadword `$s`.
macro_rules! joined {
    (($r:ident, $lane:ident, $s:ident) => $group:expr) => {
        [joined!(@ 0, ($r, $lane, $s) => $group), joined!(@ 4, ($r, $lane, $s) => $group)]
    };
    (@ $upper:literal, ($r:ident, $lane:ident, $s:ident) => $group:expr) => {
        line!(at => {
            let ($lane, $r, $s) = (at >> 4, $upper + (at >> 2 & 3), at >> 1 & 1);
            (at & 1) << 6 | $group
        })
    };
}

/// Adds the sign's plane, the last, to the others.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn fold<const N: usize>(v: &mut [__m512i; N]) {
    let Some((sign, others)) = v.split_last_mut() else { return };
    for v in others {
        *v = _mm512_xor_si512(*v, *sign);
    }
}

/// The same where planes that are not in `mask` are zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn fold_some(v: &mut Eight, mask: PlaneMask) {
    let mask = _mm512_set1_epi8(mask.0.to_le_bytes()[0].cast_signed());
    // All bits of a plane's in `mask`.
    let keep = |plane| transpose(_mm512_set1_epi64(0x0101_0101_0101_0101_i64 << plane), mask);
    let [others @ .., sign] = v;
    *sign = _mm512_and_si512(*sign, keep(7));
    for (plane, v) in others.iter_mut().enumerate() {
        // Of the third operand what is in the first, and to that the second.
        *v = _mm512_ternarylogic_epi64::<0x6c>(keep(plane), *sign, *v);
    }
}

/// Joins planes of eight bits. If `SOME`, planes outside `mask` are zeros.
///
/// # Safety
/// Each plane has an eighth of the words' bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
unsafe fn join_8<const FOLD: bool, const SOME: bool>(
    planes: impl Source<8>,
    mask: PlaneMask,
    words: &mut [u8],
) {
    let (pairs, last) = words.as_chunks_mut::<1024>();
    let end = 128 * pairs.len();
    for (pair, words) in pairs.iter_mut().enumerate() {
        let at = 128 * pair;
        // Two lines of a plane come quicker one after the other.
        let [mut first, mut second] = [[_mm512_setzero_si512(); 8]; 2];
        for bit in 0..8 {
            // SAFETY: the pairs before this one and this one take 128 bytes of a plane for 1024 of
            // the words; the loads need no alignment.
            unsafe {
                first[bit] = _mm512_loadu_si512(planes.plane(bit).add(at).cast());
                second[bit] = _mm512_loadu_si512(planes.plane(bit).add(at + 64).cast());
            }
        }
        let [words, behind] = words.as_chunks_mut().0 else { unreachable!("they are two halves") };
        join_lines::<FOLD, SOME>(first, mask, words);
        join_lines::<FOLD, SOME>(second, mask, behind);
    }
    if let [words] = last.as_chunks_mut().0 {
        // SAFETY: the pairs and what is left take an eighth of the words' bytes.
        join_lines::<FOLD, SOME>(unsafe { load_planes(planes, end) }, mask, words);
    }
}

/// Joins a line of each of eight planes. If `SOME`, planes outside `mask` are zeros.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn join_lines<const FOLD: bool, const SOME: bool>(mut v: Eight, mask: PlaneMask, words: &mut [u8; 512]) {
    match (FOLD, SOME) {
        (false, _) => {}
        (true, false) => fold(&mut v),
        (true, true) => fold_some(&mut v, mask),
    }
    let keep = _mm512_set1_epi8(mask.0.to_le_bytes()[0].cast_signed());
    let bytes = bytes_of(&gathered_lines(&v));
    let lines: &mut [Line; 8] = words.as_chunks_mut().0.try_into().expect("8 lines");
    for (line, bytes) in lines.iter_mut().zip(bytes) {
        store(line, if FOLD { bytes } else { masked::<SOME>(bytes, keep) });
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn gathered_lines(planes: &Eight) -> Eight {
    let [first, second] = joined!((r, lane, s) => 8 * r + 2 * lane + s);
    gather(planes, first, second)
}

/// Brings a line of each of eight planes together: quadword `g` of the eight registers, one after
/// the other, has byte `g` of each line, the last line's first.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
pub(crate) fn gathered(lines: [&Line; 8]) -> Eight {
    gathered_lines(&lines.map(|line| load(line)))
}

/// The bytes whose bits are those of eight lines that [`gathered`] has brought together.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
pub(crate) fn bytes_of(gathered: &Eight) -> Eight {
    let identity = _mm512_set1_epi64(0x8040_2010_0804_0201_u64.cast_signed());
    gathered.map(|matrices| transpose(matrices, identity))
}

/// Joins planes of 16 bits. If `SOME`, planes outside `mask` are zeros.
///
/// # Safety
/// Each plane has 256 bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
unsafe fn join_16<const SOME: bool>(planes: impl Source<16>, mask: PlaneMask, words: &mut BlockWords) {
    let [low, high, ..] = mask.0.to_le_bytes();
    let keep = _mm512_set1_epi16(i16::from_le_bytes([low, high]));
    let (steps, _) = words.as_chunks_mut::<1024>();
    for (step, words) in steps.iter_mut().enumerate() {
        let planes = planes.anew();
        // SAFETY: there are four steps.
        join_lines_16::<SOME>(&unsafe { load_planes(planes, 64 * step) }, keep, words);
    }
}

/// The bits that are in `keep`, or all unless `SOME`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn masked<const SOME: bool>(v: __m512i, keep: __m512i) -> __m512i {
    if SOME { _mm512_and_si512(v, keep) } else { v }
}

/// Joins a line of each of 16 planes, and gives the first eight as [`gather`] brought them
/// together: quadword `q` of register `r` has byte 8 r + [`byte_joined`]`(q)` of each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn join_lines_16<const SOME: bool>(v: &[__m512i; 16], keep: __m512i, words: &mut [u8; 1024]) -> Eight {
    let identity = _mm512_set1_epi64(0x8040_2010_0804_0201_u64.cast_signed());
    // So that low and high bytes, unpacked, give 32 elements in order and then the 32 behind them.
    let [first, second] = joined!((r, lane, s) => 8 * r + byte_joined(2 * lane + s));
    let low = gather(&[v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]], first, second);
    let high = gather(&[v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15]], first, second);
    let lines: &mut [Line; 16] = words.as_chunks_mut().0.try_into().expect("16 lines");
    for r in 0..8 {
        let (low, high) = (transpose(low[r], identity), transpose(high[r], identity));
        store(&mut lines[2 * r], masked::<SOME>(_mm512_unpacklo_epi8(low, high), keep));
        store(&mut lines[2 * r + 1], masked::<SOME>(_mm512_unpackhi_epi8(low, high), keep));
    }
    low
}

/// The byte that quadword `q` has of those of a word where elements of 16 bits are joined.
const fn byte_joined(q: usize) -> usize {
    4 * (q & 1) + q / 2
}

/// Puts half of the line at `at`, the second if `SECOND`, of each of 16 planes from `FIRST` on
/// together like [`gather`], the first eight planes in the registers' lower half.
///
/// # Safety
/// Each plane has a line there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
unsafe fn gather_halves<S: Source<32>, const FIRST: usize, const SECOND: bool>(
    planes: S,
    at: usize,
) -> Eight {
    let half = if SECOND { 32 } else { 0 };
    let mut v = [_mm512_setzero_si512(); 8];
    for (k, v) in v.iter_mut().enumerate() {
        // SAFETY: as the caller promises; the loads need no alignment.
        *v = unsafe {
            let (low, high) = (planes.plane(FIRST + 7 - k).add(at), planes.plane(FIRST + 15 - k).add(at));
            let low = _mm512_castsi256_si512(_mm256_loadu_si256(low.add(half).cast()));
            // With its line a second half comes to its place; of planes that begin anywhere, that
            // would be two lines.
            if SECOND && S::IN_LINES {
                _mm512_mask_loadu_epi64(low, 0xf0, high.cast())
            } else {
                _mm512_inserti64x4::<1>(low, _mm256_loadu_si256(high.add(half).cast()))
            }
        };
    } // k2 k1 k0, g3 g2 g1 g0
    let v = unpack::<8, 4>(v); // g3 k1 k0, g2 g1 g0 k2
    let v = unpack::<8, 2>(v); // g3 g2 k0, g1 g0 k2 k1
    unpack::<8, 1>(v) // g3 g2 g1, g0 k2 k1 k0
}

/// Joins planes of 32 bits. If `SOME`, planes outside `mask` are zeros.
///
/// # Safety
/// Each plane has 128 bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
unsafe fn join_32<const SOME: bool>(planes: impl Source<32>, mask: PlaneMask, words: &mut BlockWords) {
    let keep = _mm512_set1_epi32(mask.0.cast_signed());
    for (line, words) in words.as_chunks_mut::<2048>().0.iter_mut().enumerate() {
        let [first, second] = words.as_chunks_mut().0 else { unreachable!("they are two halves") };
        // SAFETY: there are two lines.
        unsafe {
            join_half_32::<SOME, false>(planes, 64 * line, keep, first);
            join_half_32::<SOME, true>(planes, 64 * line, keep, second);
        }
    }
}

/// Joins half of a line of each of 32 planes.
///
/// # Safety
/// Each plane has a line there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
unsafe fn join_half_32<const SOME: bool, const SECOND: bool>(
    planes: impl Source<32>,
    at: usize,
    keep: __m512i,
    words: &mut [u8; 1024],
) {
    let identity = _mm512_set1_epi64(0x8040_2010_0804_0201_u64.cast_signed());
    // Byte c of element e (four bits) of the first 16 and of the last: in pairs of bytes, lanes are
    // numbered by c0 and which 16.
    let first = line!(at => (at >> 1 & 1) << 6 | (at & 1) << 5 | at >> 2);
    let second = line!(at => (at >> 1 & 1) << 6 | (at & 1) << 5 | 16 | at >> 2);
    // So that neither pointers nor what was loaded for the other half are on the stack.
    let planes = black_box(planes);
    // SAFETY: as the caller promises.
    let (low, high) =
        unsafe { (gather_halves::<_, 0, SECOND>(planes, at), gather_halves::<_, 16, SECOND>(planes, at)) };
    let lines: &mut [Line; 16] = words.as_chunks_mut().0.try_into().expect("16 lines");
    for r in 0..8 {
        let (low, high) = (transpose(low[r], identity), transpose(high[r], identity));
        store(&mut lines[r], masked::<SOME>(_mm512_permutex2var_epi8(low, first, high), keep));
        store(&mut lines[8 + r], masked::<SOME>(_mm512_permutex2var_epi8(low, second, high), keep));
    }
}

/// Joins planes of four bits. If `SOME`, planes outside `mask` are zeros.
///
/// # Safety
/// Each plane has 1024 bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
unsafe fn join_4<const FOLD: bool, const SOME: bool>(
    planes: impl Source<4>,
    mask: PlaneMask,
    words: &mut BlockWords,
) {
    // A matrix has two groups: nibbles of the second are the low half of its columns, of the first
    // the high half. With the odd elements' columns before the even ones', half of the nibbles are
    // in their places, those of the first group's odd and the second's even elements; the others
    // are 28 bits from theirs.
    let odd_even = _mm512_set1_epi64(0x4010_0401_8020_0802_u64.cast_signed());
    let in_place = _mm512_set1_epi64(0x0f0f_0f0f_f0f0_f0f0_u64.cast_signed());
    let from = _mm512_set1_epi64(0x140c_043c_3c34_2c24);
    // k = 3 − plane; a line's number r1 r0, a group's in the line's lane g1 g0.
    let first = line!(at => (at & 1) << 6 | (at >> 3 & 1) << 4 | (at >> 4) << 2 | at >> 1 & 3);
    let second = line!(at => (at & 1) << 6 | 32 | (at >> 3 & 1) << 4 | (at >> 4) << 2 | at >> 1 & 3);
    let (steps, _) = words.as_chunks_mut::<256>();
    for (step, words) in steps.iter_mut().enumerate() {
        // SAFETY: there are 16 steps.
        let mut v: [__m512i; 4] = unsafe { load_planes(planes, 64 * step) };
        if SOME {
            // Of four planes quicker than [`fold_some`].
            for (plane, v) in v.iter_mut().enumerate() {
                *v = _mm512_maskz_mov_epi64(if mask.has(plane) { u8::MAX } else { 0 }, *v);
            }
        }
        if FOLD {
            fold(&mut v);
        }
        let v = [
            _mm512_permutex2var_epi8(v[3], first, v[1]), // r1 k0, r0 g1 g0 k1
            _mm512_permutex2var_epi8(v[2], first, v[0]),
            _mm512_permutex2var_epi8(v[3], second, v[1]),
            _mm512_permutex2var_epi8(v[2], second, v[0]),
        ];
        let v = unpack::<4, 1>(v); // r1 r0, g1 g0 k1 k0
        for (line, matrices) in words.as_chunks_mut().0.iter_mut().zip(v) {
            let nibbles = transpose(matrices, odd_even);
            let moved = _mm512_multishift_epi64_epi8(from, nibbles);
            // Of the first operand's ones the second, of its zeros the third.
            store(line, _mm512_ternarylogic_epi64::<0xca>(in_place, nibbles, moved));
        }
    }
}

/// Puts planes together to words; see [`super::join`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
pub(in crate::plane) fn join(format: Format, planes: &Planes<'_>, words: &mut BlockWords) {
    let all = PlaneMask::all(format);
    // SAFETY: `first` has asserted the planes' lengths.
    unsafe {
        match (format.bits(), Fold::of(format)) {
            (4, Fold::No) => join_4::<false, false>(first(planes, 1024), all, words),
            (4, _) => join_4::<true, false>(first(planes, 1024), all, words),
            (8, Fold::No) => join_8::<false, false>(first(planes, 512), all, words),
            (8, _) => join_8::<true, false>(first(planes, 512), all, words),
            (16, _) => join_16::<false>(first(planes, 256), all, words),
            _ => join_32::<false>(first(planes, 128), all, words),
        }
    }
}

/// Puts planes of a block together to words; see [`super::join_block`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
pub(in crate::plane) fn join_block(
    format: Format,
    mask: PlaneMask,
    block: &PlaneBlock,
    words: &mut BlockWords,
) {
    let is_all = |planes| mask.0 & planes == planes;
    // SAFETY: a block has all bytes of its planes.
    unsafe {
        match (format.bits(), Fold::of(format)) {
            (4, Fold::No) if is_all(0xf) => join_4::<false, false>(block, mask, words),
            (4, Fold::No) => join_4::<false, true>(block, mask, words),
            (4, _) if is_all(0xf) => join_4::<true, false>(block, mask, words),
            (4, _) => join_4::<true, true>(block, mask, words),
            (8, Fold::No) if is_all(0xff) => join_8::<false, false>(block, mask, words),
            (8, Fold::No) => join_8::<false, true>(block, mask, words),
            (8, _) if is_all(0xff) => join_8::<true, false>(block, mask, words),
            (8, _) => join_8::<true, true>(block, mask, words),
            (16, _) if is_all(0xffff) => join_16::<false>(block, mask, words),
            (16, _) => join_16::<true>(block, mask, words),
            _ if is_all(u32::MAX) => join_32::<false>(block, mask, words),
            _ => join_32::<true>(block, mask, words),
        }
    }
}

/// Puts planes together to bytes; see [`super::join_bytes`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
pub(in crate::plane) fn join_bytes(planes: &[&[u8]; 8], bytes: &mut [u8]) {
    // SAFETY: `first` has asserted the planes' lengths.
    unsafe { join_8::<false, false>(first(planes, bytes.len() / 8), PlaneMask(0xff), bytes) }
}
