//! Blocks of bf16 by a *3+3 code*: three leaves on the second level, three on the fourth, the
//! others below, which is what an encoder prefers ([`super::super::code`]).
//!
//! Behind two levels, and behind two more, all elements that go on have come to one node, so their
//! bits alone tell what they are, and nothing is moved in the tree walk. Everything is done in as
//! many steps whatever the values are, but for whether the last levels have two vectors or four, so
//! that the processor need not guess: for as many elements as the buffers hold, which hardly any
//! block passes. Those that do, and streams that end too early, are left to the general way
//! ([`super::walk`]), which tells what is wrong with them.

pub(super) mod encode;

use std::arch::x86_64::{
    __m512i, _mm512_and_si512, _mm512_gf2p8affine_epi64_epi8, _mm512_mask_add_epi8,
    _mm512_mask_cmpeq_epi8_mask, _mm512_mask_expand_epi8, _mm512_mask_mov_epi8, _mm512_maskz_mov_epi8,
    _mm512_permutexvar_epi8, _mm512_set1_epi8, _mm512_set1_epi64, _mm512_setzero_si512, _pdep_u64,
};

use super::super::{code::LONGEST, masks::read};
use super::{
    STEP,
    bits::{aligned, before},
    decode::ELEMENTS,
    first, load, load_at, load_first,
    stage::{GoesOn, lane},
    store,
    table::{Table, leaf},
};

/// Elements that may go on behind the second level, and behind the fourth.
const SECOND: usize = 768;
const THIRD: usize = 256;
/// Levels above the last ones, which are gone through bit by bit.
const ABOVE: usize = 4;

/// What the last levels of a 3+3 code are.
pub(super) struct ThreeAndThree {
    /// By the bits that an element has on them, zeros for those that it does not have: its leaf.
    leaves: [u8; 16],
    /// The bits of those that are escaped, or what none has.
    escape: u8,
    /// Ones where all go on behind the fifth level, and where those with a one do.
    fifth: [u64; 2],
    /// Ones where all go on behind the sixth level, and where those that have come to its second
    /// node do, to its third and to its fourth.
    sixth: [u64; 4],
}

/// What a block is decoded in.
#[repr(align(64))]
pub(super) struct Buffers {
    /// Which elements go on behind the second level, and of these behind the fourth.
    first: GoesOn,
    second: GoesOn,
    /// The bits of the third level and of the fourth.
    rows: [[[u8; STEP]; 2]; 2],
    /// The values of elements that go on.
    values: [u8; BUFFER],
    last: [u8; THIRD + STEP],
}

/// For [`SECOND`] values, and for a register from any of the places that an index is cut to.
const BUFFER: usize = SECOND.next_power_of_two() + STEP;

impl Buffers {
    pub(super) const fn new() -> Self {
        Self {
            first: GoesOn::new(),
            second: GoesOn::new(),
            rows: [[[0; STEP]; 2]; 2],
            values: [0; BUFFER],
            last: [0; THIRD + STEP],
        }
    }
}

impl ThreeAndThree {
    /// For a code with so many leaves on each level, if it is a 3+3 code and has its escape, if
    /// any, below.
    pub(super) fn of(count: [u8; LONGEST], escape_level: usize, escape_leaf: u8) -> Option<Self> {
        if count[..ABOVE] != [0, 3, 0, 3] || escape_level < ABOVE {
            return None;
        }
        let mut leaves = [0; 16];
        for (bits, of) in leaves.iter_mut().enumerate().take(1 << (LONGEST - ABOVE)) {
            *of = leaf(count, ABOVE..LONGEST, bits);
        }
        let escape = (escape_level < LONGEST).then_some(escape_leaf);
        let escape = leaves.iter().position(|leaf| Some(*leaf) == escape).map_or(u8::MAX, |bits| bits as u8);
        let ones = |are: bool| if are { u64::MAX } else { 0 };
        Some(Self {
            leaves,
            escape,
            fifth: [0, 1].map(|leaves| ones(count[ABOVE] <= leaves)),
            sixth: [0, 1, 2, 3].map(|leaves| ones(count[ABOVE + 1] <= leaves)),
        })
    }
}

/// The values of three leaves, from one on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn three(values: __m512i, from: i8) -> [__m512i; 3] {
    let [a, b, c] = [_mm512_set1_epi8(from), _mm512_set1_epi8(from + 1), _mm512_set1_epi8(from + 2)];
    [
        _mm512_permutexvar_epi8(a, values),
        _mm512_permutexvar_epi8(b, values),
        _mm512_permutexvar_epi8(c, values),
    ]
}

/// A vector's values on two levels: of the three leaves by its bits, or, of elements that go on,
/// those that follow each other in `below`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2")]
fn up([a, b, c]: [__m512i; 3], bits: [u64; 2], goes_on: u64, below: __m512i) -> __m512i {
    let value = _mm512_mask_mov_epi8(a, bits[1], b);
    let value = _mm512_mask_mov_epi8(value, bits[0], c);
    _mm512_mask_expand_epi8(value, goes_on, below)
}

/// A block that has been gone down, and up to the first two levels.
pub(super) struct Up<'a> {
    goes_on: &'a GoesOn,
    values: &'a [u8; BUFFER],
    rows: &'a [[u8; STEP]; 8],
    three: [__m512i; 3],
}

impl Up<'_> {
    /// The values of eight vectors, for line number `line` of a plane.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi2")]
    pub(super) fn line(&self, line: usize) -> [__m512i; 8] {
        let (first, second) = (self.rows[line].as_chunks().0, self.rows[4 + line].as_chunks().0);
        let (goes_on, before) = self.goes_on.group::<8>(line);
        let mut values = [self.three[0]; 8];
        for at in 0..8 {
            let bits = [u64::from_le_bytes(first[at]), u64::from_le_bytes(second[at])];
            let below = load_at(self.values, before[at] as usize % SECOND.next_power_of_two());
            values[at] = up(self.three, bits, goes_on[at], below);
        }
        values
    }
}

/// Goes down all levels of `stream`, which has [`BEHIND`](super::walk::BEHIND) bytes behind it, and
/// up to the first two. `None` if that is not for here.
#[inline]
#[target_feature(enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512vpopcntdq,gfni")]
pub(super) fn through<'a>(
    (stream, length): (&'a [u8], usize),
    matrix: i64,
    code: &Table,
    buffers: &'a mut Buffers,
) -> Option<Up<'a>> {
    let three_and_three = code.three_and_three.as_ref()?;
    let matrix = _mm512_set1_epi64(matrix);
    let values = _mm512_gf2p8affine_epi64_epi8::<0>(load(code.leaves()), matrix);
    let rows: &[[u8; STEP]; 8] = stream[code.bytes..].as_chunks().0.first_chunk()?;
    let mut sum = _mm512_setzero_si512();
    for line in 0..4 {
        let ones = _mm512_and_si512(load(&rows[line]), load(&rows[4 + line]));
        sum = buffers.first.note(line, ones, sum);
    }
    let alive = lane(sum);
    let at = 8 * code.bytes + 2 * ELEMENTS;
    let behind = at + 2 * alive;
    // With fewer elements than a register has bytes, more would be looked at than may be behind the
    // stream.
    if !(STEP..=SECOND).contains(&alive) || behind > 8 * length {
        return None;
    }
    let mut sum = _mm512_setzero_si512();
    for line in 0..2 {
        let passed = 8 * STEP * line;
        let (third, fourth) = (aligned(stream, at + passed), aligned(stream, at + alive + passed));
        let ones = _mm512_and_si512(_mm512_and_si512(third, fourth), before(alive.wrapping_sub(passed)));
        sum = buffers.second.note(line, ones, sum);
        store(&mut buffers.rows[0][line], third);
        store(&mut buffers.rows[1][line], fourth);
    }
    let left = lane(sum);
    let stream = (stream, length, behind);
    match left.div_ceil(STEP) {
        0..=2 => three_and_three.last::<2>(stream, left, (values, matrix), &mut buffers.last)?,
        3..=4 => three_and_three.last::<4>(stream, left, (values, matrix), &mut buffers.last)?,
        _ => return None,
    }
    let three_below = three(values, 3);
    for (index, to) in buffers.values.as_chunks_mut().0[..SECOND / STEP].iter_mut().enumerate() {
        let [third, fourth] = &buffers.rows;
        let [third, fourth] =
            [third.as_flattened().as_chunks().0[index], fourth.as_flattened().as_chunks().0[index]];
        let bits = [u64::from_le_bytes(third), u64::from_le_bytes(fourth)];
        let (goes_on, before) = buffers.second.of(index);
        store(to, up(three_below, bits, goes_on, load_at(&buffers.last, before % THIRD)));
    }
    Some(Up { goes_on: &buffers.first, values: &buffers.values, rows, three: three(values, 0) })
}

impl ThreeAndThree {
    /// The values of the elements that are left on the last levels, in at most `N` vectors. `None`
    /// if the stream does not end with what they take.
    #[inline]
    #[target_feature(enable = "bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,gfni")]
    fn last<const N: usize>(
        &self,
        (stream, length, mut at): (&[u8], usize, usize),
        left: usize,
        (values, matrix): (__m512i, __m512i),
        to: &mut [u8; THIRD + STEP],
    ) -> Option<()> {
        let mut fifth = [0; N];
        let mut goes_on = [0; N];
        for index in 0..N {
            let here = first(left.saturating_sub(STEP * index));
            fifth[index] = read(stream, at + STEP * index) & here;
            goes_on[index] = here;
        }
        let here = goes_on;
        at += left;
        let mut sixth = [0; N];
        for index in 0..N {
            let going_on = goes_on[index] & (self.fifth[0] | self.fifth[1] & fifth[index]);
            sixth[index] = _pdep_u64(read(stream, at), going_on);
            at += going_on.count_ones() as usize;
            // Where all have gone on, there are two nodes, of two each; else one.
            let (high, low) = (fifth[index] & self.fifth[0], sixth[index]);
            let [all, second, third, fourth] = self.sixth;
            goes_on[index] = going_on & (all | second & (high | low) | third & high | fourth & high & low);
        }
        let mut seventh = [0; N];
        for index in 0..N {
            seventh[index] = _pdep_u64(read(stream, at), goes_on[index]);
            at += goes_on[index].count_ones() as usize;
        }
        let (four, two, one) = (_mm512_set1_epi8(4), _mm512_set1_epi8(2), _mm512_set1_epi8(1));
        let escape = _mm512_set1_epi8(self.escape.cast_signed());
        let mut x = [four; N];
        let mut escaped = [0; N];
        let (mut at, mut escapes) = (at.div_ceil(8), 0);
        for index in 0..N {
            let bits = _mm512_maskz_mov_epi8(fifth[index], four);
            let bits = _mm512_mask_add_epi8(bits, sixth[index], bits, two);
            x[index] = _mm512_mask_add_epi8(bits, seventh[index], bits, one);
            escaped[index] = _mm512_mask_cmpeq_epi8_mask(here[index], x[index], escape);
            escapes += escaped[index].count_ones() as usize;
        }
        if at + escapes != length {
            return None;
        }
        let values = _mm512_permutexvar_epi8(load_first(&self.leaves), values);
        for ((x, escaped), to) in x.into_iter().zip(escaped).zip(to.as_chunks_mut().0) {
            let found = _mm512_gf2p8affine_epi64_epi8::<0>(load_at(stream, at), matrix);
            store(to, _mm512_mask_expand_epi8(_mm512_permutexvar_epi8(x, values), escaped, found));
            at += escaped.count_ones() as usize;
        }
        Some(())
    }
}
