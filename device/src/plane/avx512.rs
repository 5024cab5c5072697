//! The transpose in AVX-512 with VBMI and GFNI: 64 bytes of each plane at a time (32 where fp32 is joined).
//!
//! `gf2p8affineqb` transposes the 8×8 bit matrix in each quadword. To join, a byte of each of eight planes is brought together in a
//! quadword, the matrix is transposed, and bytes are brought together to elements; to split is that backwards.
//!
//! Number the bytes of some registers by the register, the lane in it (two bits) and the place in the lane (four bits). Unpacking
//! pairs of registers, low and high, moves the place's first bit to the register's number, moves the others up, and
//! puts last the bit in which the pairs differ. What moves bytes between lanes is `vpermi2b`, once in a network (twice where fp32 is
//! split); its indices are worked out here from what the unpacking does. Comments give numbers as bits: register, place in the lane.
//!
//! A *group* is eight elements, a byte of a plane. The instruction takes a matrix's rows from the quadword's last
//! byte on, so planes (joining) and elements (splitting) are in descending order in a quadword.

use std::{
    arch::x86_64::{
        __m512i, _mm256_loadu_si256, _mm512_castsi256_si512, _mm512_gf2p8affine_epi64_epi8,
        _mm512_inserti64x4, _mm512_loadu_si512, _mm512_multishift_epi64_epi8, _mm512_or_si512,
        _mm512_permutex2var_epi8, _mm512_set1_epi8, _mm512_set1_epi64, _mm512_setzero_si512,
        _mm512_shuffle_epi8, _mm512_storeu_si512, _mm512_ternarylogic_epi64, _mm512_unpackhi_epi8,
        _mm512_unpacklo_epi8, _mm512_xor_si512,
    },
    hint::black_box,
};

use super::{PlaneBlock, Planes, avx2::joins, first, fold::Fold, parts_mut};
use crate::{BlockWords, format::Format};

/// Bytes of a register.
type Line = [u8; 64];
pub(crate) type Eight = [__m512i; 8];

/// A line of indices: `line!(at => value of byte at)`.
macro_rules! line {
    ($at:ident => $value:expr) => {{
        const LINE: Line = {
            let mut line = [0; 64];
            let mut $at: usize = 0;
            while $at < 64 {
                let value: usize = $value;
                line[$at] = value.to_le_bytes()[0];
                $at += 1;
            }
            line
        };
        load(&LINE)
    }};
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn load(line: &Line) -> __m512i {
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(line.as_ptr().cast()) }
}

/// The line at `at` of each plane.
///
/// # Safety
/// Each plane has that many bytes, and 64 more.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
unsafe fn load_planes<const N: usize>(planes: &[&[u8]; N], at: usize) -> [__m512i; N] {
    let mut v = [_mm512_setzero_si512(); N];
    for bit in 0..N {
        // SAFETY: as the caller promises; the load needs no alignment.
        v[bit] = unsafe { _mm512_loadu_si512(planes[bit].as_ptr().add(at).cast()) };
    }
    v
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn store(line: &mut Line, value: __m512i) {
    // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_si512(line.as_mut_ptr().cast(), value) }
}

/// Transposes the matrices in the quadwords: bit `i` of the result's byte `j` is bit `j` of byte `7 − i`, if byte `j` of `select` is `1 << j`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn transpose(matrices: __m512i, select: __m512i) -> __m512i {
    _mm512_gf2p8affine_epi64_epi8::<0>(select, matrices)
}

/// Unpacks the pairs of registers `D` apart.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn unpack<const N: usize, const D: usize>(v: [__m512i; N]) -> [__m512i; N] {
    let mut out = v;
    for pair in 0..N / 2 {
        let a = pair / D * 2 * D + pair % D;
        out[a] = _mm512_unpacklo_epi8(v[a], v[a + D]);
        out[a + D] = _mm512_unpackhi_epi8(v[a], v[a + D]);
    }
    out
}

/// Puts a line of each of eight planes together, but for the transposing: each quadword of the result has a byte of each plane,
/// the last plane first. `first` and `second` say which bytes go where; see `joined!`.
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

/// The indices for [`gather`] that bring the group `$group` of the planes to register `$r`, lane `$lane`, quadword `$s`.
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

/// Joins planes of eight bits.
///
/// # Safety
/// Each plane has an eighth of the words' bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
unsafe fn join_8<const FOLD: bool>(planes: &[&[u8]; 8], words: &mut [u8]) {
    let (steps, _) = words.as_chunks_mut::<512>();
    for (step, words) in steps.iter_mut().enumerate() {
        // SAFETY: the steps before this one and this one take 64 bytes of a plane for 512 of the words.
        join_lines::<FOLD>(unsafe { load_planes(planes, 64 * step) }, words);
    }
}

/// Joins a line of each of eight planes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn join_lines<const FOLD: bool>(mut v: Eight, words: &mut [u8; 512]) {
    if FOLD {
        for plane in 0..7 {
            v[plane] = _mm512_xor_si512(v[plane], v[7]);
        }
    }
    let bytes = bytes_of(&gathered_lines(&v));
    let lines: &mut [Line; 8] = words.as_chunks_mut().0.try_into().expect("8 lines");
    for (line, bytes) in lines.iter_mut().zip(bytes) {
        store(line, bytes);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn gathered_lines(planes: &Eight) -> Eight {
    let [first, second] = joined!((r, lane, s) => 8 * r + 2 * lane + s);
    gather(planes, first, second)
}

/// Brings a line of each of eight planes together: quadword `g` of the eight registers, one after the other, has byte `g` of each line, the last line's first.
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

/// Joins planes of 16 bits.
///
/// # Safety
/// Each plane has 256 bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
unsafe fn join_16(planes: &[&[u8]; 16], words: &mut BlockWords) {
    let (steps, _) = words.as_chunks_mut::<1024>();
    for (step, words) in steps.iter_mut().enumerate() {
        // So that a compiler does not copy all pointers to the stack first, which takes longer than to look at each again.
        let planes = black_box(planes);
        // SAFETY: there are four steps.
        join_lines_16(&unsafe { load_planes(planes, 64 * step) }, words);
    }
}

/// Joins a line of each of 16 planes, and gives the first eight as [`gather`] brought them together: quadword `q` of register `r` has byte 8 r + [`byte_joined`]`(q)`
/// of each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn join_lines_16(v: &[__m512i; 16], words: &mut [u8; 1024]) -> Eight {
    let identity = _mm512_set1_epi64(0x8040_2010_0804_0201_u64.cast_signed());
    // So that low and high bytes, unpacked, give 32 elements in order and then the 32 behind them.
    let [first, second] = joined!((r, lane, s) => 8 * r + byte_joined(2 * lane + s));
    let low = gather(&[v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]], first, second);
    let high = gather(&[v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15]], first, second);
    let lines: &mut [Line; 16] = words.as_chunks_mut().0.try_into().expect("16 lines");
    for r in 0..8 {
        let (low, high) = (transpose(low[r], identity), transpose(high[r], identity));
        store(&mut lines[2 * r], _mm512_unpacklo_epi8(low, high));
        store(&mut lines[2 * r + 1], _mm512_unpackhi_epi8(low, high));
    }
    low
}

/// The byte that quadword `q` has of those of a word where elements of 16 bits are joined.
pub(crate) const fn byte_joined(q: usize) -> usize {
    4 * (q & 1) + q / 2
}

/// [`join_lines_16`] of the line `line` of each plane, the lowest bit's first.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
pub(crate) fn joined_16(planes: &[&[Line; 4]; 16], line: usize, words: &mut [u8; 1024]) -> Eight {
    let mut v = [_mm512_setzero_si512(); 16];
    for plane in 0..16 {
        v[plane] = load(&planes[plane][line]);
    }
    join_lines_16(&v, words)
}

/// Puts half a line, at `at`, of each of 16 planes from `FIRST` on together like [`gather`], the first eight planes in the registers' lower
/// half.
///
/// # Safety
/// Each plane has 32 bytes there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
unsafe fn gather_halves<const FIRST: usize>(planes: &Planes<'_>, at: usize) -> Eight {
    let mut v = [_mm512_setzero_si512(); 8];
    for k in 0..8 {
        // SAFETY: as the caller promises; the loads need no alignment.
        let (low, high) = unsafe {
            let (low, high) =
                (planes[FIRST + 7 - k].as_ptr().add(at), planes[FIRST + 15 - k].as_ptr().add(at));
            (_mm256_loadu_si256(low.cast()), _mm256_loadu_si256(high.cast()))
        };
        v[k] = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
    } // k2 k1 k0, g3 g2 g1 g0
    let v = unpack::<8, 4>(v); // g3 k1 k0, g2 g1 g0 k2
    let v = unpack::<8, 2>(v); // g3 g2 k0, g1 g0 k2 k1
    unpack::<8, 1>(v) // g3 g2 g1, g0 k2 k1 k0
}

/// Joins planes of 32 bits.
///
/// # Safety
/// Each plane has 128 bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
unsafe fn join_32(planes: &Planes<'_>, words: &mut BlockWords) {
    let identity = _mm512_set1_epi64(0x8040_2010_0804_0201_u64.cast_signed());
    // Byte c of element e (four bits) of the first 16 and of the last: in pairs of bytes, lanes are numbered by c0 and which 16.
    let first = line!(at => (at >> 1 & 1) << 6 | (at & 1) << 5 | at >> 2);
    let second = line!(at => (at >> 1 & 1) << 6 | (at & 1) << 5 | 16 | at >> 2);
    let (steps, _) = words.as_chunks_mut::<1024>();
    for (step, words) in steps.iter_mut().enumerate() {
        let planes = black_box(planes); // as in `join_16`
        // SAFETY: there are four steps.
        let (low, high) =
            unsafe { (gather_halves::<0>(planes, 32 * step), gather_halves::<16>(planes, 32 * step)) };
        let lines: &mut [Line; 16] = words.as_chunks_mut().0.try_into().expect("16 lines");
        for r in 0..8 {
            let (low, high) = (transpose(low[r], identity), transpose(high[r], identity));
            store(&mut lines[r], _mm512_permutex2var_epi8(low, first, high));
            store(&mut lines[8 + r], _mm512_permutex2var_epi8(low, second, high));
        }
    }
}

/// Joins planes of four bits.
///
/// # Safety
/// Each plane has 1024 bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
unsafe fn join_4<const FOLD: bool>(planes: &[&[u8]; 4], words: &mut BlockWords) {
    // A matrix has two groups: nibbles of the second are the low half of its columns, of the first the high half. With the odd elements'
    // columns before the even ones', half of the nibbles are in their places, those of the first group's odd and the second's even elements;
    // the others are 28 bits from theirs.
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
        if FOLD {
            for plane in 0..3 {
                v[plane] = _mm512_xor_si512(v[plane], v[3]);
            }
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

joins!("avx512f,avx512bw,avx512vbmi,gfni");

/// For splitting bytes: byte `p` of the transposed matrices is plane `p`, folded with the sign if `fold`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn planes_of_bytes(fold: bool) -> __m512i {
    let select = if fold { 0x80c0_a090_8884_8281_u64 } else { 0x8040_2010_0804_0201 };
    _mm512_set1_epi64(select.cast_signed())
}

/// Takes apart eight lines in which the quadwords are a byte of each of eight planes, of eight groups: a line of each plane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn scatter(v: &Eight) -> Eight {
    // Groups are numbered by the register r2 r1 r0, the lane, and s. r2 r1 r0, s p2 p1 p0
    let v = unpack::<8, 4>(*v); // s r1 r0, p2 p1 p0 r2
    let v = unpack::<8, 2>(v); // s p2 r0, p1 p0 r2 r1
    let v = unpack::<8, 1>(v); // s p2 p1, p0 r2 r1 r0
    let even = line!(group => (group & 1) << 6 | (group >> 1 & 3) << 4 | group >> 3);
    let odd = line!(group => (group & 1) << 6 | (group >> 1 & 3) << 4 | 8 | group >> 3);
    let mut planes = v;
    for plane in 0..8 {
        let order = if plane % 2 == 0 { even } else { odd };
        planes[plane] = _mm512_permutex2var_epi8(v[plane / 2], order, v[4 + plane / 2]);
    }
    planes
}

/// Splits into planes of eight bits.
///
/// # Safety
/// Each plane has an eighth of the words' bytes, and nothing else uses them meanwhile.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
unsafe fn split_8(fold: bool, words: &[u8], planes: [*mut u8; 8]) {
    let select = planes_of_bytes(fold);
    let descending = line!(at => at & 15 ^ 7);
    for (step, words) in words.as_chunks::<512>().0.iter().enumerate() {
        let mut v = [_mm512_setzero_si512(); 8];
        for (v, line) in v.iter_mut().zip(words.as_chunks().0) {
            *v = transpose(_mm512_shuffle_epi8(load(line), descending), select);
        }
        let v = scatter(&v);
        for bit in 0..8 {
            // SAFETY: the steps before this one and this one take 64 bytes of a plane for 512 of the words.
            unsafe { _mm512_storeu_si512(planes[bit].add(64 * step).cast(), v[bit]) };
        }
    }
}

/// Takes apart 16 lines of 16-bit elements: a line of each plane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn scatter_16(words: &[__m512i; 16]) -> [Eight; 2] {
    let select = planes_of_bytes(false);
    let low = line!(at => 2 * (at ^ 7));
    let high = line!(at => 2 * (at ^ 7) + 1);
    let [mut v, mut w] = [[_mm512_setzero_si512(); 8]; 2];
    for r in 0..8 {
        let (a, b) = (words[2 * r], words[2 * r + 1]);
        v[r] = transpose(_mm512_permutex2var_epi8(a, low, b), select);
        w[r] = transpose(_mm512_permutex2var_epi8(a, high, b), select);
    }
    [scatter(&v), scatter(&w)]
}

/// Takes the planes beside the exponent's out of 16 lines of bf16: a line of each, the lowest bit's first and the sign's last.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
pub(crate) fn planes_beside(words: &[u8; 1024]) -> Eight {
    let select = planes_of_bytes(false);
    let low = line!(at => 2 * (at ^ 7));
    let high = line!(at => 2 * (at ^ 7) + 1);
    let sign = _mm512_set1_epi8(i8::MIN);
    let mut v = [_mm512_setzero_si512(); 8];
    for (v, pair) in v.iter_mut().zip(words.as_chunks::<128>().0) {
        let [a, b] = [0, 1].map(|line| load(&pair.as_chunks().0[line]));
        let (low, high) = (_mm512_permutex2var_epi8(a, low, b), _mm512_permutex2var_epi8(a, high, b));
        // Of the first operand's ones the second, of its zeros the third.
        *v = transpose(_mm512_ternarylogic_epi64::<0xca>(sign, high, low), select);
    }
    scatter(&v)
}

/// Splits into planes of 16 bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn split_16(words: &BlockWords, planes: &mut [[Line; 4]; 16]) {
    for (step, words) in words.as_chunks::<1024>().0.iter().enumerate() {
        let lines: &[Line; 16] = words.as_chunks().0.try_into().expect("16 lines");
        let mut v = [_mm512_setzero_si512(); 16];
        for k in 0..16 {
            v[k] = load(&lines[k]);
        }
        let [v, w] = scatter_16(&v);
        for bit in 0..8 {
            store(&mut planes[15 - bit][step], v[bit]);
            store(&mut planes[7 - bit][step], w[bit]);
        }
    }
}

/// Splits into 16 of the planes of 32 bits, those from `FIRST` on: 0 or 16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn split_32<const FIRST: usize>(words: &BlockWords, planes: &mut [[Line; 2]; 32]) {
    // Half of each element: 32 halves of two lines.
    let order = line!(at => 2 * (at & !1) + (at & 1));
    let order = _mm512_or_si512(order, _mm512_set1_epi8(if FIRST == 0 { 0 } else { 2 }));
    for (step, words) in words.as_chunks::<2048>().0.iter().enumerate() {
        let lines: &[Line; 32] = words.as_chunks().0.try_into().expect("32 lines");
        let mut v = [_mm512_setzero_si512(); 16];
        for k in 0..16 {
            v[k] = _mm512_permutex2var_epi8(load(&lines[2 * k]), order, load(&lines[2 * k + 1]));
        }
        let [v, w] = scatter_16(&v);
        for bit in 0..8 {
            store(&mut planes[31 - FIRST - bit][step], v[bit]);
            store(&mut planes[23 - FIRST - bit][step], w[bit]);
        }
    }
}

/// Splits into planes of four bits.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn split_4(fold: bool, words: &BlockWords, planes: &mut [[Line; 16]; 4]) {
    let select = if fold { 0x80c0_a090_080c_0a09_u64 } else { 0x8040_2010_0804_0201 };
    let select = _mm512_set1_epi64(select.cast_signed());
    // Rows have an element of the first group in the low half and one of the second in the high half.
    let low = _mm512_set1_epi64(0x0004_080c_1014_181c);
    let high = _mm512_set1_epi64(0x1c20_2428_2c30_3438);
    let nibble = _mm512_set1_epi64(0x0f0f_0f0f_0f0f_0f0f);
    let even = line!(group => (group & 1) << 6 | (group >> 2 & 3) << 4 | (group >> 4) << 1 | group >> 1 & 1);
    let odd =
        line!(group => (group & 1) << 6 | (group >> 2 & 3) << 4 | 8 | (group >> 4) << 1 | group >> 1 & 1);
    for (step, words) in words.as_chunks::<256>().0.iter().enumerate() {
        let mut v = [_mm512_setzero_si512(); 4];
        for (v, line) in v.iter_mut().zip(words.as_chunks().0) {
            let line = load(line);
            let (a, b) = (_mm512_multishift_epi64_epi8(low, line), _mm512_multishift_epi64_epi8(high, line));
            *v = transpose(_mm512_ternarylogic_epi64::<0xca>(nibble, a, b), select);
        } // r1 r0, g1 g0 p1 p0
        let v = unpack::<4, 2>(v); // g1 r0, g0 p1 p0 r1
        let v = unpack::<4, 1>(v); // g1 g0, p1 p0 r1 r0
        let v = unpack::<4, 2>(v); // p1 g0, p0 r1 r0 g1
        for plane in 0..4 {
            let order = if plane % 2 == 0 { even } else { odd };
            let (a, b) = (v[plane & 2], v[plane & 2 | 1]);
            store(&mut planes[3 - plane][step], _mm512_permutex2var_epi8(a, order, b));
        }
    }
}

/// Splits words into planes; see [`super::split`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
pub(super) fn split(format: Format, words: &BlockWords, planes: &mut PlaneBlock) {
    let fold = Fold::of(format) != Fold::No;
    match format.bits() {
        4 => split_4(fold, words, parts_mut(planes)),
        8 => {
            let planes = parts_mut::<8, 512, 1>(planes).each_mut();
            let planes = std::array::from_fn(|plane| planes[7 - plane].as_mut_ptr().cast());
            // SAFETY: the planes have 512 bytes each, and the pointers are all that knows them.
            unsafe { split_8(fold, words, planes) }
        }
        16 => split_16(words, parts_mut(planes)),
        _ => {
            split_32::<0>(words, parts_mut(planes));
            split_32::<16>(words, parts_mut(planes));
        }
    }
}

/// Splits bytes into planes; see [`super::split_bytes`].
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
pub(super) fn split_bytes(bytes: &[u8], planes: [&mut [u8]; 8]) {
    let planes = planes.map(|plane| plane[..bytes.len() / 8].as_mut_ptr());
    // SAFETY: that asserted the planes' lengths, and the pointers are all that knows them.
    unsafe { split_8(false, bytes, planes) }
}
