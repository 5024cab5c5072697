//! Decoding: down the code's tree level by level, and the values of its leaves back up to the elements.
//!
//! Elements are worked on in *stages*: arrays of those still alive, side by side, a vector after the other. An element is the number of its leaf among all
//! leaves in code order, or of the inner node it has come to, counted on from the leaves above: after level `k` it is alive if that is not below the number of leaves
//! down to there, `F`, and on level `k + 1`, with a bit `b`, it comes to `2x − F + b`. So leaves and nodes need not be told apart but by comparing with `F`.
//!
//! A stage of many vectors goes down to the first level that has leaves, and those that go on are moved together to the next stage. Of [`FEW`] vectors
//! the rest of the levels is done in place, each level's bits spread over the elements still alive: short stages one after the other would mostly wait for each other.

use std::arch::x86_64::{
    __m512i, _mm512_add_epi8, _mm512_cmpeq_epi8_mask, _mm512_cmpge_epu8_mask, _mm512_mask_add_epi8,
    _mm512_mask_expand_epi8, _mm512_mask_sub_epi8, _mm512_maskz_add_epi8, _mm512_maskz_compress_epi8,
    _mm512_maskz_mov_epi8, _mm512_permutexvar_epi8, _mm512_set_epi64, _mm512_set1_epi8, _mm512_set1_epi64,
    _mm512_setzero_si512, _mm512_shrdv_epi64, _mm512_storeu_si512, _mm512_sub_epi8, _pdep_u64,
};

use super::super::{
    MOST_ELEMENTS, Malformed, Scratch,
    code::{Code, FIXED_BITS, LONGEST, SLOTS, WINDOW},
    masks::read,
};
use super::{MOST_STREAM, STEP, first, load, load_at, store, store_at};

/// Vectors of a stage that goes down all the rest of the levels.
const FEW: usize = 8;
/// Bytes behind a stream that are looked at.
const BEHIND: usize = 128;

/// A code as decoders go by it, and the header it was read from.
pub(in super::super) struct Table {
    /// The header's bits, those behind it zero; 0 if none was read.
    header: u128,
    /// Its bytes.
    bytes: usize,
    /// The largest value of the format it was read for.
    largest: usize,
    /// The values of the leaves in code order; what stands at the escape's place or behind the last one is meaningless.
    values: [u8; 2 * SLOTS],
    /// How many leaves each level has.
    count: [u8; LONGEST],
    /// Levels.
    longest: usize,
    /// Level and number of the escape.
    escape: Option<(usize, u8)>,
}

impl Table {
    /// None that was read.
    pub(in super::super) const fn new() -> Self {
        Self {
            header: 0,
            bytes: 0,
            largest: 0,
            values: [0; 2 * SLOTS],
            count: [0; LONGEST],
            longest: 0,
            escape: None,
        }
    }

    /// Reads the header at the front of `stream`, unless it is the one that was read last; as [`Code::parse`] and [`Code::leaves`].
    #[inline]
    #[target_feature(enable = "bmi2,popcnt,avx512f,avx512bw,avx512vbmi2")]
    fn read(&mut self, stream: &[u8], length: usize, largest: usize) -> Result<(), Malformed> {
        let bits = u128::from_le_bytes(*stream.first_chunk().expect("16 bytes"));
        // A complete code has a header that is not zero, and a header says how long it is.
        let same = (bits ^ self.header) << (128 - 8 * self.bytes.max(1)) == 0;
        if same && self.header != 0 && self.bytes <= length && self.largest == largest {
            return Ok(());
        }
        self.parse(bits, stream, length, largest)
    }

    #[target_feature(enable = "bmi2,popcnt,avx512f,avx512bw,avx512vbmi2")]
    fn parse(&mut self, bits: u128, stream: &[u8], length: usize, largest: usize) -> Result<(), Malformed> {
        self.header = 0;
        let [low, head, ..] = bits.to_le_bytes();
        let window = usize::from(head & 31) + 1;
        let header = Code::header_bytes(window);
        let fields = (bits >> FIXED_BITS) & ((1 << (3 * window)) - 1);
        let eight = |at: usize| _pdep_u64((fields >> (24 * at)) as u64, 0x0707_0707_0707_0707).cast_signed();
        let (zero, escape) = ((bits >> 13) as u8 & 7, (bits >> 16) as u8 & 7);
        let others = i64::from(zero) | i64::from(escape) << 8;
        let lengths = _mm512_set_epi64(0, 0, 0, others, eight(3), eight(2), eight(1), eight(0));
        let values =
            _mm512_maskz_add_epi8(u64::MAX >> WINDOW, _mm512_set1_epi8(low.cast_signed()), load(&COUNTING));
        let (mut at, mut used) = (0, 0);
        self.longest = 0;
        for level in 0..LONGEST {
            let these = _mm512_cmpeq_epi8_mask(lengths, _mm512_set1_epi8(level as i8 + 1));
            let count = these.count_ones();
            store_at(&mut self.values, at, _mm512_maskz_compress_epi8(these, values));
            self.count[level] = count as u8;
            self.longest = if count > 0 { level + 1 } else { self.longest };
            at += count as usize;
            used += count << (LONGEST - 1 - level);
        }
        let two_zeros = zero > 0 && low == 0;
        if header > length || usize::from(low) + window - 1 > largest || two_zeros || used != 1 << LONGEST {
            return Err(Code::parse(stream, length, largest).expect_err("one of its checks failed"));
        }
        // The last symbol of all is the last one of its length.
        self.escape = usize::from(escape).checked_sub(1).map(|level| (level, self.count[level] - 1));
        self.header = bits & (u128::MAX >> (128 - 8 * header));
        (self.bytes, self.largest) = (header, largest);
        Ok(())
    }
}

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
}

/// A level's way from one node to the next, but for the bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn down(elements: __m512i, leaves: __m512i) -> __m512i {
    _mm512_sub_epi8(_mm512_add_epi8(elements, elements), leaves)
}

/// See [`super::super::decode`].
#[target_feature(enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2")]
pub(in super::super) fn decode(
    stream: &[u8],
    length: usize,
    largest: usize,
    values: &mut [u8],
    scratch: &mut Scratch,
) -> Result<(), Malformed> {
    let Scratch { levels, masks: [goes_on, bits, _], stream: copy, table, .. } = scratch;
    table.read(stream, length, largest)?;
    let Table { values: leaf_values, count, longest, escape, .. } = &*table;
    let longest = *longest;
    // With room for whole registers behind it.
    let roomy = if stream.len() >= length + BEHIND {
        stream
    } else {
        let copied = length.min(MOST_STREAM);
        copy[..copied].copy_from_slice(&stream[..copied]);
        copy
    };
    let mut walk = Walk { stream: roomy, length, count, longest, level: 0, at: 8 * table.bytes, leaves: 0 };
    let escape = escape.map(|(level, node)| {
        (level, _mm512_set1_epi8((count[..level].iter().sum::<u8>() + node).cast_signed()))
    });

    // Down. Of each stage its elements, and whether it has the escaped ones.
    let mut stages = [(0, None); LONGEST];
    let (mut stage, mut alive, mut escapes) = (0, values.len(), 0);
    while walk.level < longest {
        let level = walk.level;
        let vectors = alive.div_ceil(STEP);
        let (upper, lower) = levels.split_at_mut(stage + 1);
        let here = if stage == 0 { &mut *values } else { &mut upper[stage] };
        let here = &mut here.as_chunks_mut().0[..vectors];
        let goes_on = &mut goes_on[stage * MASKS..][..vectors];
        let going_on = if vectors > FEW {
            many(&mut walk, here, stage == 0, alive, goes_on, bits, &mut lower[0])?
        } else {
            few(&mut walk, here, alive, goes_on)?;
            0
        };
        let has = escape.filter(|(at, _)| (level..walk.level).contains(at)).map(|(_, escape)| escape);
        if let Some(escape) = has {
            for (index, x) in here.iter().enumerate() {
                let here = _mm512_cmpeq_epi8_mask(load(x), escape) & first(alive - index * STEP);
                escapes += here.count_ones() as usize;
            }
        }
        stages[stage] = (alive, has);
        stage += 1;
        alive = going_on;
    }
    let at = walk.at.div_ceil(8);
    if at + escapes != length {
        return Err(Malformed::Escapes { end: at + escapes, length });
    }
    if let Some(value) = stream[at..length].iter().find(|value| usize::from(**value) > largest) {
        return Err(Malformed::Escaped { value: *value, largest });
    }

    // Up.
    let table = load_at(leaf_values, 0);
    for (stage, (alive, escape)) in stages[..stage].iter().enumerate().rev() {
        let (upper, lower) = levels.split_at_mut(stage + 1);
        let here = if stage == 0 { &mut *values } else { &mut upper[stage] };
        let here = &mut here.as_chunks_mut().0[..alive.div_ceil(STEP)];
        let masks = &goes_on[stage * MASKS..];
        match escape {
            None => up(here, masks, &lower[0], table, |_, _, found| found),
            Some(escape) => {
                let mut at = at;
                up(here, masks, &lower[0], table, |index, x, found| {
                    let escaped = _mm512_cmpeq_epi8_mask(x, *escape) & first(alive - index * STEP);
                    let found = _mm512_mask_expand_epi8(found, escaped, load_at(roomy, at));
                    at += escaped.count_ones() as usize;
                    found
                });
            }
        }
    }
    Ok(())
}

/// Gives the elements of a stage the values of their leaves: from the table, from below if they went on, or what `escaped` makes of an element's number
/// and value.
#[inline]
#[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2")]
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
    is_first: bool,
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
    let stage = Stage { above, leaves, alive, levels, bits };
    // Loops of their own for the common numbers of levels.
    Ok(match (levels, is_first) {
        (1, true) => stage.down::<1, true>(here, goes_on, next),
        (2, true) => stage.down::<2, true>(here, goes_on, next),
        (_, true) => stage.down::<0, true>(here, goes_on, next),
        (1, false) => stage.down::<1, false>(here, goes_on, next),
        (_, false) => stage.down::<0, false>(here, goes_on, next),
    })
}

/// What takes a stage of many vectors down.
struct Stage<'a> {
    /// Leaves above it.
    above: __m512i,
    /// Leaves down to its last level.
    leaves: __m512i,
    /// Its elements.
    alive: usize,
    /// Its levels.
    levels: usize,
    /// Their bits.
    bits: &'a [u64; LONGEST * MASKS],
}

impl Stage<'_> {
    /// Goes down `LEVELS` levels, all the stage's if that is 0; elements begin at the root if it `IS_FIRST`.
    #[inline]
    #[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi2")]
    fn down<const LEVELS: usize, const IS_FIRST: bool>(
        &self,
        here: &mut [[u8; STEP]],
        goes_on: &mut [u64],
        next: &mut [u8],
    ) -> usize {
        let one = _mm512_set1_epi8(-1);
        let mut going_on = 0;
        for (index, (elements, mask)) in here.iter_mut().zip(goes_on).enumerate() {
            let mut x = if IS_FIRST { _mm512_setzero_si512() } else { load(elements) };
            for level in 0..if LEVELS > 0 { LEVELS } else { self.levels } {
                x = down(x, self.above);
                x = _mm512_mask_sub_epi8(x, self.bits[level * MASKS + index], x, one);
            }
            // Behind the last element stands no leaf's number but the first's.
            x = if IS_FIRST { x } else { _mm512_maskz_mov_epi8(first(self.alive - index * STEP), x) };
            store(elements, x);
            *mask = _mm512_cmpge_epu8_mask(x, self.leaves);
            store_at(next, going_on, _mm512_maskz_compress_epi8(*mask, x));
            going_on += mask.count_ones() as usize;
        }
        going_on
    }
}

/// Goes down all the rest of the levels; at the end no element goes on.
#[inline]
#[target_feature(enable = "bmi1,bmi2,popcnt,avx512f,avx512bw")]
fn few(
    walk: &mut Walk<'_>,
    here: &mut [[u8; STEP]],
    mut alive: usize,
    goes_on: &mut [u64],
) -> Result<(), Malformed> {
    let one = _mm512_set1_epi8(-1);
    for (index, goes_on) in goes_on.iter_mut().enumerate() {
        *goes_on = first(alive - index * STEP);
    }
    while walk.level < walk.longest {
        let above = _mm512_set1_epi8(walk.leaves.cast_signed());
        let mut at = walk.step(alive)?;
        let leaves = _mm512_set1_epi8(walk.leaves.cast_signed());
        alive = 0;
        for (elements, goes_on) in here.iter_mut().zip(&mut *goes_on) {
            let bits = _pdep_u64(read(walk.stream, at), *goes_on);
            at += goes_on.count_ones() as usize;
            let x = load(elements);
            let x = _mm512_mask_add_epi8(x, *goes_on, x, _mm512_sub_epi8(x, above));
            let x = _mm512_mask_sub_epi8(x, bits, x, one);
            *goes_on &= _mm512_cmpge_epu8_mask(x, leaves);
            alive += goes_on.count_ones() as usize;
            store(elements, x);
        }
    }
    Ok(())
}

/// Words of a stage's masks.
const MASKS: usize = MOST_ELEMENTS / STEP;
/// The numbers from 0 on.
const COUNTING: [u8; STEP] = {
    let mut numbers = [0; STEP];
    let mut at = 0;
    while at < STEP {
        numbers[at] = at as u8;
        at += 1;
    }
    numbers
};

/// Brings `count` bits of `stream` from bit `at` on to the front of `bits`.
#[inline]
#[target_feature(enable = "avx512f,avx512vbmi2")]
fn align(stream: &[u8], at: usize, count: usize, bits: &mut [u64]) {
    let shift = _mm512_set1_epi64((at % 8) as i64);
    for (index, bits) in bits.as_chunks_mut::<8>().0.iter_mut().take(count.div_ceil(8 * STEP)).enumerate() {
        let byte = at / 8 + index * STEP;
        let value = _mm512_shrdv_epi64(load_at(stream, byte), load_at(stream, byte + 8), shift);
        // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
        unsafe { _mm512_storeu_si512(bits.as_mut_ptr().cast(), value) };
    }
}
