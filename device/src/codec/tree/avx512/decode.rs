//! Decoding: down the code's tree level by level, and the values of its leaves back up to the elements.
//!
//! Elements are worked on in *stages*: arrays of those still alive, side by side, a vector after the other. An element is the number of its leaf among all
//! leaves in code order, or of the inner node it has come to, counted on from the leaves above: after level `k` it is alive if that is not below the number of leaves
//! down to there, `F`, and on level `k + 1`, with a bit `b`, it comes to `2x − F + b`. So leaves and nodes need not be told apart but by comparing with `F`.
//!
//! The first stage is read from the stream as often as it is wanted: its levels have bits of all elements. Mostly all that go on have come to the same node, and then which they
//! are is all there is to it; so it mostly is with the second stage, too ([`alike`]). A stage of many vectors goes down to the first level that has leaves, and those that go on
//! are moved together to the next stage. Of [`MOST`] vectors the rest of the levels is done in place, each level's bits spread over the elements still alive: short stages one after
//! the other would mostly wait for each other. These levels do too: so what else is to be done for a block is done between them.
//!
//! Values come with their bits where they are wanted, by a matrix that the table of leaves and the escaped values are brought through.

use std::{
    arch::x86_64::{
        __m512i, _mm512_add_epi8, _mm512_add_epi64, _mm512_and_si512, _mm512_cmpeq_epi8_mask,
        _mm512_cmpge_epu8_mask, _mm512_gf2p8affine_epi64_epi8, _mm512_mask_add_epi8,
        _mm512_mask_cmpeq_epi8_mask, _mm512_mask_cmpge_epu8_mask, _mm512_mask_expand_epi8,
        _mm512_mask_sub_epi8, _mm512_maskz_add_epi8, _mm512_maskz_compress_epi8, _mm512_maskz_mov_epi8,
        _mm512_maskz_set1_epi8, _mm512_permutex2var_epi8, _mm512_permutexvar_epi8, _mm512_popcnt_epi64,
        _mm512_reduce_add_epi64, _mm512_set1_epi8, _mm512_set1_epi64, _mm512_setzero_si512, _mm512_sub_epi8,
        _mm512_ternarylogic_epi64, _pdep_u64,
    },
    ops::Range,
};

use super::super::{MOST_ELEMENTS, Malformed, Scratch, code::LONGEST, masks::read};
use super::{
    MOST_STREAM, STEP,
    bits::{align, aligned, before, store_words},
    first, load, load_at, store, store_at,
    table::Table,
};
use crate::{BlockWords, plane::avx512::join_bytes_of};

/// Vectors of the last stage.
const MOST: usize = 4;
/// Bytes behind a stream that are looked at.
const BEHIND: usize = 128;
/// Lines of half a block.
const HALF: usize = 32;

/// Where a decoder is.
struct Walk<'a> {
    /// The stream, with [`BEHIND`] bytes behind it.
    stream: &'a [u8],
    /// Its bytes.
    length: usize,
    /// Leaves of each level.
    count: &'a [u8; LONGEST],
    /// Levels.
    longest: usize,
    /// The next level.
    level: usize,
    /// Its first bit.
    at: usize,
    /// Leaves above it: elements that are alive are not below.
    leaves: u8,
    /// Elements above it that are escaped.
    escapes: usize,
}

impl Walk<'_> {
    /// Steps over a level of `alive` elements: where its bits begin.
    fn step(&mut self, alive: usize) -> Result<usize, Malformed> {
        let (at, end) = (self.at, self.at + alive);
        if end > 8 * self.length {
            return Err(Malformed::Level { level: self.level, end, bits: 8 * self.length });
        }
        self.leaves += self.count[self.level];
        (self.at, self.level) = (end, self.level + 1);
        Ok(at)
    }

    /// If elements that have all come to one node, and go on, come to one again: over how many levels.
    fn together(&self) -> Option<usize> {
        let count = self.count.get(self.level..)?;
        let levels = 1 + count.iter().position(|count| *count > 0)?;
        (usize::from(count[levels - 1]) + 1 == 1 << levels).then_some(levels)
    }
}

/// A matrix for each quadword that brings bits of bytes to other places: bit `to` is that of `from(to)`, if `wanted` has it.
fn matrix(wanted: u8, from: impl Fn(u32) -> u32) -> i64 {
    // The instruction takes the first bit's row from the last byte.
    let row = |to| u64::from(wanted & 1 << from(to)) << (8 * (7 - to));
    (0..8).map(row).sum::<u64>().cast_signed()
}

/// See [`super::super::decode`].
#[target_feature(enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512vpopcntdq,gfni")]
pub(in super::super) fn decode(
    stream: &[u8],
    length: usize,
    largest: usize,
    values: &mut [u8],
    scratch: &mut Scratch,
) -> Result<(), Malformed> {
    let as_they_are = matrix(u8::MAX, |bit| bit);
    let root = descend(stream, length, largest, values.len(), as_they_are, scratch, || ())?;
    let vectors = values.as_chunks_mut().0;
    root.up(|at, found| store(&mut vectors[at], found));
    Ok(())
}

/// As [`decode`] of a block of bf16, straight to words: `planes` are those of the lower bits and, behind them, the sign's; of the values the bits in `wanted` count.
///
/// # Panics
/// If a plane is too short.
#[target_feature(enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512vpopcntdq,gfni")]
pub(in super::super) fn decode_bf16(
    stream: &[u8],
    length: usize,
    wanted: u8,
    planes: &[&[u8]; 8],
    words: &mut BlockWords,
    scratch: &mut Scratch,
) -> Result<(), Malformed> {
    let planes: [&[[u8; STEP]; 4]; 8] =
        planes.map(|plane| plane.as_chunks().0.first_chunk().expect("a plane of bf16"));
    // The bytes of sign and lower bits wait where the second half of the words will be: an element's words are never behind its byte.
    let elements = words.len() / 2;
    let lines: &mut [[u8; STEP]; 64] = words.as_chunks_mut().0.try_into().expect("a block");
    let rests: &mut [[u8; 512]; 4] =
        lines[HALF..].as_flattened_mut().as_chunks_mut().0.try_into().expect("half a block");
    let mut steps = rests.iter_mut().enumerate();
    let mut join = || {
        if let Some((step, rests)) = steps.next() {
            join_bytes_of(planes.map(|plane| &plane[step]), rests);
        }
    };
    // They are joined while the levels wait for each other. Values come rotated: so each of their bits is at its place in one of a word's bytes.
    let rotated = matrix(wanted, |bit| (bit + 1) % 8);
    let root = descend(stream, length, u8::MAX.into(), elements, rotated, scratch, &mut join)?;
    for _ in 0..4 {
        join();
    }
    let (first, second) = (load(&FIRST_WORDS), load(&SECOND_WORDS));
    let lower = _mm512_set1_epi8(0x7f);
    root.up(move |at, value| {
        let rest = load(&lines[HALF + at]);
        // Of the first operand's ones the second, of its zeros the third.
        let low = _mm512_ternarylogic_epi64::<0xca>(lower, rest, value);
        let high = _mm512_ternarylogic_epi64::<0xca>(lower, value, rest);
        store(&mut lines[2 * at], _mm512_permutex2var_epi8(low, first, high));
        store(&mut lines[2 * at + 1], _mm512_permutex2var_epi8(low, second, high));
    });
    Ok(())
}

/// The bytes of two registers in turn, of the registers' first halves.
const FIRST_WORDS: [u8; STEP] = {
    let mut places = [0; STEP];
    let mut at = 0;
    while at < STEP {
        places[at] = (at / 2 + at % 2 * STEP) as u8;
        at += 1;
    }
    places
};
/// The same of their second halves.
const SECOND_WORDS: [u8; STEP] = {
    let mut places = FIRST_WORDS;
    let mut at = 0;
    while at < STEP {
        places[at] += STEP as u8 / 2;
        at += 1;
    }
    places
};

/// Decodes all stages but the first, and does something `aside` after each of the last levels.
#[inline]
#[target_feature(enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512vpopcntdq,gfni")]
pub(super) fn descend<'a>(
    stream: &'a [u8],
    length: usize,
    largest: usize,
    elements: usize,
    matrix: i64,
    scratch: &'a mut Scratch,
    aside: impl FnMut(),
) -> Result<Root<'a>, Malformed> {
    let Scratch { levels, masks: [goes_on, aligned, _], stream: copy, table: code, .. } = scratch;
    code.read(stream, length, largest)?;
    let code = &*code;
    // With room for whole registers behind it.
    let roomy = if stream.len() >= length + BEHIND {
        stream
    } else {
        let copied = length.min(MOST_STREAM);
        copy[..copied].copy_from_slice(&stream[..copied]);
        copy
    };
    let matrix = _mm512_set1_epi64(matrix);
    let placed = |values| _mm512_gf2p8affine_epi64_epi8::<0>(values, matrix);
    let table = placed(load_at(&code.values, 0));
    let escape = code.escape.map(|(level, node)| {
        let leaf = code.count[..level].iter().sum::<u8>() + node;
        (level, _mm512_set1_epi8(leaf.cast_signed()))
    });
    let escape_of = |levels: Range<usize>| escape.filter(|(at, _)| levels.contains(at)).map(|(_, leaf)| leaf);
    let Table { count, longest, bytes, .. } = code;
    let longest = *longest;
    let mut walk =
        Walk { stream: roomy, length, count, longest, level: 0, at: 8 * bytes, leaves: 0, escapes: 0 };

    // The levels down to the first that has leaves have bits of all elements.
    while walk.leaves == 0 {
        walk.step(elements)?;
    }
    let vectors = elements / STEP;
    let bits = roomy[*bytes..][..walk.level * elements / 8].as_chunks().0;
    let rows = Rows { bits, levels: walk.level, vectors };
    let (of_root, goes_on) = goes_on.split_at_mut(MASKS);
    let of_root = &mut of_root[..vectors];
    let mut alive = rows.down(walk.leaves, of_root, &mut levels[1]);
    let root_escape = escape_of(0..walk.level);
    walk.escapes = root_escape.map_or(0, |leaf| rows.at(leaf));

    // Stages of many vectors: their elements, and whether they have the escaped ones.
    let mut stages = [(0, None); LONGEST];
    let mut stage = 1;
    let mut together = (1 << walk.level) - 1 == usize::from(walk.leaves);
    while alive > MOST * STEP && walk.level < walk.longest {
        let level = walk.level;
        let (upper, lower) = levels.split_at_mut(stage + 1);
        let here = &mut upper[stage].as_chunks_mut().0[..alive.div_ceil(STEP)];
        let goes_on = &mut goes_on[(stage - 1) * MASKS..][..MASKS];
        let levels = walk.together().filter(|levels| together && *levels <= 3);
        together = levels.is_some();
        let going_on = match levels {
            Some(1) => alike::<1>(&mut walk, here, alive, goes_on, aligned, &mut lower[0]),
            Some(2) => alike::<2>(&mut walk, here, alive, goes_on, aligned, &mut lower[0]),
            Some(3) => alike::<3>(&mut walk, here, alive, goes_on, aligned, &mut lower[0]),
            _ => many(&mut walk, here, alive, &mut goes_on[..here.len()], aligned, &mut lower[0]),
        }?;
        let escape = escape_of(level..walk.level);
        if let Some(leaf) = escape {
            for (index, x) in here.iter().enumerate() {
                let here = _mm512_cmpeq_epi8_mask(load(x), leaf) & first(alive - index * STEP);
                walk.escapes += here.count_ones() as usize;
            }
        }
        stages[stage] = (alive, escape);
        stage += 1;
        alive = going_on;
    }
    let last = escape_of(walk.level..LONGEST);
    let here = &mut levels[stage];
    let at = few(walk, here, alive, table, matrix, last, aside)?;
    if let Some(value) = stream[at..length].iter().find(|value| usize::from(**value) > largest) {
        return Err(Malformed::Escaped { value: *value, largest });
    }

    for (stage, (alive, escape)) in stages.iter().enumerate().take(stage).skip(1).rev() {
        let (upper, lower) = levels.split_at_mut(stage + 1);
        let here = &mut upper[stage].as_chunks_mut().0[..alive.div_ceil(STEP)];
        let goes_on = &goes_on[(stage - 1) * MASKS..];
        match escape {
            None => up(here, goes_on, &lower[0], table, |_, _, found| found),
            Some(leaf) => {
                let mut at = at;
                up(here, goes_on, &lower[0], table, |index, x, found| {
                    let escaped = _mm512_cmpeq_epi8_mask(x, *leaf) & first(alive - index * STEP);
                    let found = _mm512_mask_expand_epi8(found, escaped, placed(load_at(roomy, at)));
                    at += escaped.count_ones() as usize;
                    found
                });
            }
        }
    }
    let escape = root_escape.map(|leaf| (leaf, &roomy[at..]));
    Ok(Root { rows, goes_on: of_root, below: &levels[1], table, matrix, escape })
}

/// The levels of the first stage in the stream.
#[derive(Clone, Copy)]
struct Rows<'a> {
    /// Level by level, a vector's bits in each.
    bits: &'a [[u8; 8]],
    levels: usize,
    vectors: usize,
}

impl<'a> Rows<'a> {
    /// Where each of `LEVELS` levels is, of all if that is 0.
    #[inline]
    fn levels<const LEVELS: usize>(self) -> [&'a [[u8; 8]]; LONGEST] {
        let levels = if LEVELS > 0 { LEVELS } else { self.levels };
        let row =
            |level| if level < levels { &self.bits[level * self.vectors..][..self.vectors] } else { &[] };
        std::array::from_fn(row)
    }

    /// Which elements go on: those that come to a node from number `leaves` on. They are moved together to `next`: how many they are.
    #[inline]
    #[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi2,avx512vpopcntdq,gfni")]
    fn down(self, leaves: u8, goes_on: &mut [u64], next: &mut [u8]) -> usize {
        if (1 << self.levels) - 1 == usize::from(leaves) {
            // To the last node of all, by ones alone.
            let going_on = self.ones(goes_on);
            let node = _mm512_set1_epi8(leaves.cast_signed());
            let next = &mut next.as_chunks_mut().0[..going_on.div_ceil(STEP)];
            for elements in next {
                store(elements, node);
            }
            return going_on;
        }
        match self.levels {
            1 => self.down_levels::<1>(leaves, goes_on, next),
            2 => self.down_levels::<2>(leaves, goes_on, next),
            3 => self.down_levels::<3>(leaves, goes_on, next),
            _ => self.down_levels::<0>(leaves, goes_on, next),
        }
    }

    #[inline]
    #[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi2")]
    fn down_levels<const LEVELS: usize>(self, leaves: u8, goes_on: &mut [u64], next: &mut [u8]) -> usize {
        let leaves = _mm512_set1_epi8(leaves.cast_signed());
        let rows = self.levels::<LEVELS>();
        let mut going_on = 0;
        for (index, goes_on) in goes_on.iter_mut().enumerate() {
            let x = element::<LEVELS>(&rows, self.levels, index);
            *goes_on = _mm512_cmpge_epu8_mask(x, leaves);
            store_at(next, going_on, _mm512_maskz_compress_epi8(*goes_on, x));
            going_on += goes_on.count_ones() as usize;
        }
        going_on
    }

    /// Which elements have ones on all levels, and how many they are.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vpopcntdq,gfni")]
    fn ones(self, goes_on: &mut [u64]) -> usize {
        let mut sum = _mm512_setzero_si512();
        let rows = self.bits.as_flattened().as_chunks().0;
        for (at, goes_on) in goes_on.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let mut ones = load(&rows[at]);
            for level in 1..self.levels {
                ones = _mm512_and_si512(ones, load(&rows[level * self.vectors / 8 + at]));
            }
            store_words(goes_on, ones);
            sum = _mm512_add_epi64(sum, _mm512_popcnt_epi64(ones));
        }
        _mm512_reduce_add_epi64(sum).cast_unsigned() as usize
    }

    /// How many elements come to the node `leaf`.
    #[target_feature(enable = "popcnt,avx512f,avx512bw")]
    fn at(self, leaf: __m512i) -> usize {
        let rows = self.levels::<0>();
        let here = |index| _mm512_cmpeq_epi8_mask(element::<0>(&rows, self.levels, index), leaf);
        (0..self.vectors).map(|index| here(index).count_ones() as usize).sum()
    }
}

/// The nodes that a vector of elements comes to by the bits of `LEVELS` rows, of `levels` if that is 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn element<const LEVELS: usize>(rows: &[&[[u8; 8]]; LONGEST], levels: usize, index: usize) -> __m512i {
    let one = _mm512_set1_epi8(-1);
    let mut x = _mm512_maskz_set1_epi8(u64::from_le_bytes(rows[0][index]), 1);
    for row in &rows[1..if LEVELS > 0 { LEVELS } else { levels }] {
        x = _mm512_add_epi8(x, x);
        x = _mm512_mask_sub_epi8(x, u64::from_le_bytes(row[index]), x, one);
    }
    x
}

/// The first stage on its way up.
pub(super) struct Root<'a> {
    /// Its levels.
    rows: Rows<'a>,
    /// Which of its elements go on.
    goes_on: &'a [u64],
    /// The values of those.
    below: &'a [u8],
    /// The values of leaves.
    table: __m512i,
    /// What brings bits of values to their places.
    matrix: __m512i,
    /// If its elements are escaped, by which leaf, and their values.
    escape: Option<(__m512i, &'a [u8])>,
}

impl Root<'_> {
    /// Gives `each` the values vector by vector, and their numbers.
    #[inline]
    #[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,gfni")]
    pub(super) fn up(&self, each: impl FnMut(usize, __m512i)) {
        match (self.rows.levels, &self.escape) {
            (1, None) => self.up_levels::<1>(None, each),
            (2, None) => self.up_levels::<2>(None, each),
            (3, None) => self.up_levels::<3>(None, each),
            (_, escape) => self.up_levels::<0>(*escape, each),
        }
    }

    #[inline]
    #[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,gfni")]
    fn up_levels<const LEVELS: usize>(
        &self,
        escape: Option<(__m512i, &[u8])>,
        mut each: impl FnMut(usize, __m512i),
    ) {
        let rows = self.rows.levels::<LEVELS>();
        let (mut taken, mut escapes) = (0, 0);
        for (at, goes_on) in self.goes_on.iter().enumerate() {
            let x = element::<LEVELS>(&rows, self.rows.levels, at);
            let mut value = _mm512_permutexvar_epi8(x, self.table);
            value = _mm512_mask_expand_epi8(value, *goes_on, load_at(self.below, taken));
            taken += goes_on.count_ones() as usize;
            if let Some((leaf, escaped)) = escape {
                let here = _mm512_cmpeq_epi8_mask(x, leaf);
                let escaped = _mm512_gf2p8affine_epi64_epi8::<0>(load_at(escaped, escapes), self.matrix);
                value = _mm512_mask_expand_epi8(value, here, escaped);
                escapes += here.count_ones() as usize;
            }
            each(at, value);
        }
    }
}

/// Gives the elements of a stage the values of their leaves: from the table, from below if they went on, or what `escaped` makes of an element's number
/// and value.
#[inline]
#[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,gfni")]
fn up(
    here: &mut [[u8; STEP]],
    goes_on: &[u64],
    below: &[u8],
    table: __m512i,
    mut escaped: impl FnMut(usize, __m512i, __m512i) -> __m512i,
) {
    let mut taken = 0;
    for (index, (elements, goes_on)) in here.iter_mut().zip(goes_on).enumerate() {
        let x = load(elements);
        let found = _mm512_permutexvar_epi8(x, table);
        let found = _mm512_mask_expand_epi8(found, *goes_on, load_at(below, taken));
        taken += goes_on.count_ones() as usize;
        store(elements, escaped(index, x, found));
    }
}

/// Goes down the levels to the first that has leaves. Elements that go on are moved together to `next`, and their masks go to `goes_on`: how many
/// they are.
#[inline]
#[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi2")]
fn many(
    walk: &mut Walk<'_>,
    here: &mut [[u8; STEP]],
    alive: usize,
    goes_on: &mut [u64],
    bits: &mut [u64],
    next: &mut [u8],
) -> Result<usize, Malformed> {
    let above = _mm512_set1_epi8(walk.leaves.cast_signed());
    let mut levels = 0;
    loop {
        let at = walk.step(alive)?;
        align(walk.stream, at, alive, &mut bits[levels * MASKS..]);
        levels += 1;
        if walk.count[walk.level - 1] > 0 {
            break;
        }
    }
    let leaves = _mm512_set1_epi8(walk.leaves.cast_signed());
    let bits = bits.first_chunk::<{ LONGEST * MASKS }>().expect("room for every level");
    let one = _mm512_set1_epi8(-1);
    let mut going_on = 0;
    for (index, (elements, mask)) in here.iter_mut().zip(goes_on).enumerate() {
        let mut x = load(elements);
        for level in 0..levels {
            x = _mm512_sub_epi8(_mm512_add_epi8(x, x), above);
            x = _mm512_mask_sub_epi8(x, bits[level * MASKS + index], x, one);
        }
        // Behind the last element stands no leaf's number but the first's.
        x = _mm512_maskz_mov_epi8(first(alive - index * STEP), x);
        store(elements, x);
        *mask = _mm512_cmpge_epu8_mask(x, leaves);
        store_at(next, going_on, _mm512_maskz_compress_epi8(*mask, x));
        going_on += mask.count_ones() as usize;
    }
    Ok(going_on)
}

/// As [`many`], of elements that have all come to one node and go on to one: the bits are all there is to tell apart.
#[inline]
#[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi2,avx512vpopcntdq")]
fn alike<const LEVELS: usize>(
    walk: &mut Walk<'_>,
    here: &mut [[u8; STEP]],
    alive: usize,
    goes_on: &mut [u64],
    bits: &mut [u64],
    next: &mut [u8],
) -> Result<usize, Malformed> {
    let node = _mm512_set1_epi8(walk.leaves.cast_signed());
    let mut begins = [0; LEVELS];
    for begin in &mut begins {
        *begin = walk.step(alive)?;
    }
    let mut sum = _mm512_setzero_si512();
    for (at, goes_on) in goes_on.as_chunks_mut::<8>().0.iter_mut().enumerate().take(alive.div_ceil(8 * STEP))
    {
        let mut ones = before(alive - 8 * STEP * at);
        for (level, begin) in begins.iter().enumerate() {
            let here = aligned(walk.stream, begin + 8 * STEP * at);
            store_words(&mut bits[level * MASKS + 8 * at..], here);
            ones = _mm512_and_si512(ones, here);
        }
        store_words(goes_on, ones);
        sum = _mm512_add_epi64(sum, _mm512_popcnt_epi64(ones));
    }
    let going_on = _mm512_reduce_add_epi64(sum).cast_unsigned() as usize;
    let next_node = _mm512_set1_epi8(walk.leaves.cast_signed());
    for next in &mut next.as_chunks_mut().0[..going_on.div_ceil(STEP)] {
        store(next, next_node);
    }
    let bits = bits.first_chunk::<{ LONGEST * MASKS }>().expect("room for every level");
    for (index, elements) in here.iter_mut().enumerate() {
        let mut x = _mm512_maskz_set1_epi8(bits[index], 1);
        for level in 1..LEVELS {
            x = _mm512_add_epi8(x, x);
            x = _mm512_mask_sub_epi8(x, bits[level * MASKS + index], x, _mm512_set1_epi8(-1));
        }
        // Behind the last element stands no leaf's number but the first's.
        store(elements, _mm512_maskz_add_epi8(first(alive - index * STEP), x, node));
    }
    Ok(going_on)
}

/// Goes down all the rest of the levels with the elements of [`MOST`] vectors, `alive` of them, and gives them their values, as at the end no element goes on. Escapes are
/// by `escape`, if there are any here: where their values are in the stream. Something is done `aside` after each level.
#[inline]
#[target_feature(enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,gfni")]
fn few(
    mut walk: Walk<'_>,
    here: &mut [u8],
    mut alive: usize,
    table: __m512i,
    matrix: __m512i,
    escape: Option<__m512i>,
    mut aside: impl FnMut(),
) -> Result<usize, Malformed> {
    let here: &mut [[u8; STEP]; MOST] =
        here.as_chunks_mut().0.first_chunk_mut().expect("room for every level");
    let one = _mm512_set1_epi8(-1);
    let (mut x, mut goes_on) = ([_mm512_setzero_si512(); MOST], [0; MOST]);
    for index in 0..MOST {
        x[index] = load(&here[index]);
        goes_on[index] = first(alive.saturating_sub(index * STEP));
    }
    let all = goes_on;
    while walk.level < walk.longest {
        let above = _mm512_set1_epi8(walk.leaves.cast_signed());
        let mut at = walk.step(alive)?;
        let leaves = _mm512_set1_epi8(walk.leaves.cast_signed());
        alive = 0;
        for (x, goes_on) in x.iter_mut().zip(&mut goes_on) {
            let count = goes_on.count_ones() as usize;
            let bytes = walk.stream[at / 8..].first_chunk().expect("eight bytes");
            let mut bits = u64::from_le_bytes(*bytes) >> (at % 8);
            if count > 57 {
                bits = read(walk.stream, at);
            }
            let bits = _pdep_u64(bits, *goes_on);
            at += count;
            *x = _mm512_mask_add_epi8(*x, *goes_on, *x, _mm512_sub_epi8(*x, above));
            *x = _mm512_mask_sub_epi8(*x, bits, *x, one);
            *goes_on = _mm512_mask_cmpge_epu8_mask(*goes_on, *x, leaves);
            alive += goes_on.count_ones() as usize;
        }
        aside();
    }
    let mut escaped = [0; MOST];
    if let Some(leaf) = escape {
        for index in 0..MOST {
            escaped[index] = _mm512_mask_cmpeq_epi8_mask(all[index], x[index], leaf);
            walk.escapes += escaped[index].count_ones() as usize;
        }
    }
    let start = walk.at.div_ceil(8);
    if start + walk.escapes != walk.length {
        return Err(Malformed::Escapes { end: start + walk.escapes, length: walk.length });
    }
    let mut at = start;
    for index in 0..MOST {
        let mut found = _mm512_permutexvar_epi8(x[index], table);
        if escaped[index] != 0 {
            let values = _mm512_gf2p8affine_epi64_epi8::<0>(load_at(walk.stream, at), matrix);
            found = _mm512_mask_expand_epi8(found, escaped[index], values);
            at += escaped[index].count_ones() as usize;
        }
        store(&mut here[index], found);
    }
    Ok(start)
}

/// Words of a stage's masks.
const MASKS: usize = MOST_ELEMENTS / STEP;
