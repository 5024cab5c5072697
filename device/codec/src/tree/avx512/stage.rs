//! A stage of a block's elements: down the levels to the first that has leaves, and the values of
//! leaves back up.
//!
//! Where all elements of a stage have come to one node, as at the root and mostly behind it, they
//! are told apart by their bits alone: their *rows*, a level's each, stand in the stream or are
//! brought to words. If all that go on come to one node again, which they are is all there is to
//! tell, and nothing is moved. Elsewhere elements are bytes, and those that go on are moved
//! together.
//!
//! What stands behind a stage's last element has no meaning, but does not go on.

use std::arch::x86_64::{
    __m512i, _mm_cvtsi128_si64, _mm512_add_epi8, _mm512_add_epi64, _mm512_alignr_epi64, _mm512_and_si512,
    _mm512_castsi512_si128, _mm512_cmpeq_epi8_mask, _mm512_cmpge_epu8_mask, _mm512_gf2p8affine_epi64_epi8,
    _mm512_mask_add_epi8, _mm512_mask_expand_epi8, _mm512_mask_sub_epi8, _mm512_maskz_compress_epi8,
    _mm512_maskz_mov_epi8, _mm512_permutexvar_epi8, _mm512_permutexvar_epi64, _mm512_popcnt_epi64,
    _mm512_set1_epi8, _mm512_set1_epi64, _mm512_setzero_si512, _mm512_sub_epi8, _mm512_sub_epi64,
};

use super::super::{MAX_ELEMENTS, code::LONGEST};
use super::{
    BUFFER, MASKS, STEP,
    bits::{aligned, before, store_words},
    first, load, load_at, load_in, store, store_in,
};

/// Vectors that are brought up together where there are not many.
pub(super) const FOUR: usize = 4;

/// The bits that a stage's elements have on its levels, of elements that have all come to one node.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    /// Words of a level's bits, and those of the next `pitch` behind it.
    pub bits: &'a [[u8; 8]],
    pub pitch: usize,
    pub levels: usize,
    /// Leaves above the stage.
    pub above: u8,
}

/// Which elements of a stage go on.
#[repr(align(64))]
pub(super) struct GoesOn {
    /// A bit for each element.
    masks: [u64; MASKS],
    /// How many go on before the first of each mask.
    before: [u64; MASKS],
}

impl GoesOn {
    pub(super) const fn new() -> Self {
        Self { masks: [0; MASKS], before: [0; MASKS] }
    }

    /// What is known of a vector of elements: its mask, and how many go on before.
    #[inline]
    pub(super) fn of(&self, index: usize) -> (u64, usize) {
        (self.masks[index], self.before[index] as usize)
    }

    /// What is known of `GROUP` vectors of elements.
    #[inline]
    pub(super) fn group<const GROUP: usize>(&self, group: usize) -> (&[u64; GROUP], &[u64; GROUP]) {
        (&self.masks.as_chunks().0[group], &self.before.as_chunks().0[group])
    }

    /// Notes 512 elements, behind those of `index` times as many, before which `before` go on, in
    /// each of its lanes: how many go on before the next.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vpopcntdq")]
    pub(super) fn note(&mut self, index: usize, masks: __m512i, before: __m512i) -> __m512i {
        let zeros = _mm512_setzero_si512();
        let counts = _mm512_popcnt_epi64(masks);
        let sums = _mm512_add_epi64(counts, _mm512_alignr_epi64::<7>(counts, zeros));
        let sums = _mm512_add_epi64(sums, _mm512_alignr_epi64::<6>(sums, zeros));
        let sums = _mm512_add_epi64(sums, _mm512_alignr_epi64::<4>(sums, zeros));
        let sums = _mm512_add_epi64(sums, before);
        store_words(&mut self.masks.as_chunks_mut::<8>().0[index], masks);
        store_words(&mut self.before.as_chunks_mut::<8>().0[index], _mm512_sub_epi64(sums, counts));
        _mm512_permutexvar_epi64(_mm512_set1_epi64(7), sums)
    }
}

/// Elements of a stage, before which as many others are as were counted.
#[inline]
#[target_feature(enable = "avx512f")]
fn load_behind(bytes: &[u8; BUFFER], before: u64) -> __m512i {
    // No stage has as many, which the compiler does not know: it takes less than a comparison.
    load_in(bytes, before as usize % MAX_ELEMENTS)
}

/// The first lane.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn lane(sums: __m512i) -> usize {
    _mm_cvtsi128_si64(_mm512_castsi512_si128(sums)).cast_unsigned() as usize
}

/// The leaf by which elements are escaped, and their values in the stream; a matrix brings bits of
/// values to their places.
#[derive(Clone, Copy)]
pub(super) struct Escaped<'a> {
    pub leaf: __m512i,
    pub values: &'a [u8],
    pub matrix: __m512i,
}

impl<'a> Rows<'a> {
    /// The words of `GROUP` vectors of elements on each level.
    #[inline]
    fn group<const GROUP: usize>(self, group: usize) -> [&'a [[u8; 8]; GROUP]; LONGEST] {
        std::array::from_fn(|level| {
            let level = if level < self.levels { level } else { 0 };
            self.bits[level * self.pitch + group * GROUP..].first_chunk().expect("as many words as elements")
        })
    }

    /// What bits count on each level: numbers of nodes from the first on.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn weights(self) -> [__m512i; LONGEST] {
        let mut weights = [_mm512_setzero_si512(); LONGEST];
        for (weight, level) in weights.iter_mut().zip((0..self.levels).rev()) {
            *weight = _mm512_set1_epi8(1 << level);
        }
        weights
    }

    /// Where a vector of elements comes to, by its bits: the number of the leaf among the stage's
    /// leaves, or behind these of the node.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn element<const GROUP: usize>(
        self,
        rows: &[&[[u8; 8]; GROUP]; LONGEST],
        weights: &[__m512i; LONGEST],
        index: usize,
    ) -> __m512i {
        let mut x = _mm512_maskz_mov_epi8(u64::from_le_bytes(rows[0][index]), weights[0]);
        for level in 1..self.levels {
            x = _mm512_mask_add_epi8(x, u64::from_le_bytes(rows[level][index]), x, weights[level]);
        }
        x
    }

    /// Which of `vectors` whole vectors of elements have ones on all levels, and how many they are.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vpopcntdq,gfni")]
    pub(super) fn ones(self, vectors: usize, goes_on: &mut GoesOn) -> usize {
        let mut sum = _mm512_setzero_si512();
        for at in 0..vectors / 8 {
            let row = |level: usize| {
                let words: &[[u8; 8]; 8] =
                    self.bits[level * self.pitch + 8 * at..].first_chunk().expect("a row");
                load(words.as_flattened().try_into().expect("eight words"))
            };
            let mut ones = row(0);
            for level in 1..self.levels {
                ones = _mm512_and_si512(ones, row(level));
            }
            sum = goes_on.note(at, ones, sum);
        }
        lane(sum)
    }

    /// Which elements of `vectors` whole vectors go on: those that come to a node from number
    /// `leaves` on. They are moved together to `next`: how many they are. No leaves are above.
    #[inline]
    #[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi2")]
    pub(super) fn down(
        self,
        vectors: usize,
        leaves: u8,
        goes_on: &mut GoesOn,
        next: &mut [u8; BUFFER],
    ) -> usize {
        let leaves = _mm512_set1_epi8(leaves.cast_signed());
        let weights = self.weights();
        let mut going_on = 0;
        let GoesOn { masks, before } = goes_on;
        let groups = masks.as_chunks_mut::<FOUR>().0.iter_mut().zip(before.as_chunks_mut::<FOUR>().0);
        for (group, (masks, before)) in groups.take(vectors / FOUR).enumerate() {
            let rows = self.group::<FOUR>(group);
            for (index, (goes_on, before)) in masks.iter_mut().zip(before).enumerate() {
                *before = going_on as u64;
                let x = self.element(&rows, &weights, index);
                *goes_on = _mm512_cmpge_epu8_mask(x, leaves);
                store_in(next, going_on, _mm512_maskz_compress_epi8(*goes_on, x));
                going_on += goes_on.count_ones() as usize;
            }
        }
        going_on
    }

    /// How many elements of `vectors` whole vectors come to `leaf`. No leaves are above.
    #[cold]
    #[target_feature(enable = "popcnt,avx512f,avx512bw")]
    pub(super) fn at(self, vectors: usize, leaf: __m512i) -> usize {
        let weights = self.weights();
        let x = |index| self.element(&self.group::<1>(index), &weights, 0);
        (0..vectors).map(|index| _mm512_cmpeq_epi8_mask(x(index), leaf).count_ones() as usize).sum()
    }
}

/// The way of values back up to a stage of [`Rows`].
#[derive(Clone, Copy)]
pub(super) struct Up<'a> {
    rows: Rows<'a>,
    goes_on: &'a GoesOn,
    /// The values of elements that go on.
    below: &'a [u8; BUFFER],
    /// The values of leaves.
    table: __m512i,
    /// Where there is this, vectors are whole.
    escaped: Option<Escaped<'a>>,
    /// Those before.
    escapes: usize,
}

impl<'a> Up<'a> {
    /// To `rows`, by the values of the stage's leaves, each at the number that its bits are.
    #[inline]
    pub(super) const fn new(
        rows: Rows<'a>,
        goes_on: &'a GoesOn,
        below: &'a [u8; BUFFER],
        table: __m512i,
        escaped: Option<Escaped<'a>>,
    ) -> Self {
        Self { rows, goes_on, below, table, escaped, escapes: 0 }
    }

    /// The values of the next `GROUP` vectors, group number `group`.
    #[inline]
    #[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,gfni")]
    pub(super) fn group<const GROUP: usize>(&mut self, group: usize) -> [__m512i; GROUP] {
        if self.escaped.is_none() {
            return self.unescaped(group);
        }
        let (values, escapes) = self.with_escapes(group);
        self.escapes = escapes;
        values
    }

    /// As [`Self::group`] where none are escaped.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi,avx512vbmi2")]
    fn unescaped<const GROUP: usize>(&self, group: usize) -> [__m512i; GROUP] {
        let (goes_on, before) = self.goes_on.group::<GROUP>(group);
        let rows = self.rows.group::<GROUP>(group);
        let weights = self.rows.weights();
        let mut values = [self.table; GROUP];
        for index in 0..GROUP {
            let x = self.rows.element(&rows, &weights, index);
            let value = _mm512_permutexvar_epi8(x, self.table);
            values[index] =
                _mm512_mask_expand_epi8(value, goes_on[index], load_behind(self.below, before[index]));
        }
        values
    }

    /// As [`Self::group`]; gives the escapes that there were then, too. Apart and with a copy, so
    /// that what it needs is nowhere at hand where it is not used.
    #[cold]
    #[inline(never)]
    #[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,gfni")]
    fn with_escapes<const GROUP: usize>(self, group: usize) -> ([__m512i; GROUP], usize) {
        let mut values = self.unescaped(group);
        let mut escapes = self.escapes;
        if let Some(Escaped { leaf, values: escaped, matrix }) = self.escaped {
            let rows = self.rows.group::<GROUP>(group);
            let weights = self.rows.weights();
            let above = _mm512_set1_epi8(self.rows.above.cast_signed());
            for (index, value) in values.iter_mut().enumerate() {
                let x = self.rows.element(&rows, &weights, index);
                let here = _mm512_cmpeq_epi8_mask(_mm512_add_epi8(x, above), leaf);
                let found = _mm512_gf2p8affine_epi64_epi8::<0>(load_at(escaped, escapes), matrix);
                *value = _mm512_mask_expand_epi8(*value, here, found);
                escapes += here.count_ones() as usize;
            }
        }
        (values, escapes)
    }
}

/// Brings the bits of a level from bit `at` of the stream on, of `alive` elements, to words.
#[inline]
#[target_feature(enable = "avx512f,avx512vbmi2")]
pub(super) fn row(stream: &[u8], at: usize, alive: usize, row: &mut [[u8; 8]; MASKS]) {
    for (index, words) in row.as_chunks_mut::<8>().0[..alive.div_ceil(8 * STEP)].iter_mut().enumerate() {
        let words = words.as_flattened_mut().try_into().expect("eight words");
        store(words, aligned(stream, at + 8 * STEP * index));
    }
}

/// As [`row`] of the `LEVELS` levels that begin `at`, and the words that have ones on all of them:
/// how many ones these are.
#[inline]
#[target_feature(enable = "avx512f,avx512vbmi2,avx512vpopcntdq")]
pub(super) fn rows_of_ones<const LEVELS: usize>(
    stream: &[u8],
    at: [usize; LEVELS],
    alive: usize,
    rows: &mut [[[u8; 8]; MASKS]],
    goes_on: &mut GoesOn,
) -> usize {
    let rows: &mut [_; LEVELS] = rows.first_chunk_mut().expect("a row for each level");
    let mut sum = _mm512_setzero_si512();
    for index in 0..alive.div_ceil(8 * STEP) {
        let mut ones = before(alive - 8 * STEP * index);
        for level in 0..LEVELS {
            let bits = aligned(stream, at[level] + 8 * STEP * index);
            let words = &mut rows[level].as_chunks_mut::<8>().0[index];
            store(words.as_flattened_mut().try_into().expect("eight words"), bits);
            ones = _mm512_and_si512(ones, bits);
        }
        sum = goes_on.note(index, ones, sum);
    }
    lane(sum)
}

/// Elements that have all come to `node`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn fill(here: &mut [u8; BUFFER], alive: usize, node: u8) {
    let node = _mm512_set1_epi8(node.cast_signed());
    for elements in &mut here.as_chunks_mut::<STEP>().0[..alive.div_ceil(STEP)] {
        store(elements, node);
    }
}

/// Takes `alive` elements over some levels, of which [`row`] has brought the bits, and only the
/// last has leaves. Those that go on are moved together to `next`: how many they are.
#[inline]
#[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi2")]
pub(super) fn many(
    rows: &[[[u8; 8]; MASKS]],
    (above, leaves): (u8, u8),
    alive: usize,
    here: &mut [u8; BUFFER],
    goes_on: &mut GoesOn,
    next: &mut [u8; BUFFER],
) -> usize {
    let (above, leaves) = (_mm512_set1_epi8(above.cast_signed()), _mm512_set1_epi8(leaves.cast_signed()));
    let one = _mm512_set1_epi8(-1);
    let mut going_on = 0;
    let vectors = here.as_chunks_mut::<STEP>().0.iter_mut().zip(&mut goes_on.masks);
    for (index, (elements, goes_on)) in vectors.take(alive.div_ceil(STEP)).enumerate() {
        let mut x = load(elements);
        for row in rows {
            x = _mm512_sub_epi8(_mm512_add_epi8(x, x), above);
            x = _mm512_mask_sub_epi8(x, u64::from_le_bytes(row[index]), x, one);
        }
        store(elements, x);
        *goes_on = _mm512_cmpge_epu8_mask(x, leaves) & first(alive - index * STEP);
        store_in(next, going_on, _mm512_maskz_compress_epi8(*goes_on, x));
        going_on += goes_on.count_ones() as usize;
    }
    going_on
}

/// How many of `alive` elements have come to `leaf`.
#[cold]
#[target_feature(enable = "popcnt,avx512f,avx512bw")]
pub(super) fn at(here: &[u8; BUFFER], alive: usize, leaf: __m512i) -> usize {
    let vectors = here.as_chunks::<STEP>().0.iter().take(alive.div_ceil(STEP)).enumerate();
    let here = |(index, x): (usize, &[u8; STEP])| {
        _mm512_cmpeq_epi8_mask(load(x), leaf) & first(alive - index * STEP)
    };
    vectors.map(|vector| here(vector).count_ones() as usize).sum()
}

/// Gives `alive` elements of which [`many`] has told what they came to the values of their leaves,
/// or from `below` if they went on.
#[inline]
#[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,gfni")]
pub(super) fn many_up(
    alive: usize,
    here: &mut [u8; BUFFER],
    goes_on: &GoesOn,
    below: &[u8; BUFFER],
    table: __m512i,
    escaped: Option<Escaped<'_>>,
) {
    let (mut taken, mut escapes) = (0, 0);
    let vectors = here.as_chunks_mut::<STEP>().0.iter_mut().zip(&goes_on.masks);
    for (index, (elements, goes_on)) in vectors.take(alive.div_ceil(STEP)).enumerate() {
        let x = load(elements);
        let mut value = _mm512_permutexvar_epi8(x, table);
        value = _mm512_mask_expand_epi8(value, *goes_on, load_in(below, taken));
        taken += goes_on.count_ones() as usize;
        if let Some(Escaped { leaf, values, matrix }) = escaped {
            let here = _mm512_cmpeq_epi8_mask(x, leaf) & first(alive - index * STEP);
            let found = _mm512_gf2p8affine_epi64_epi8::<0>(load_at(values, escapes), matrix);
            value = _mm512_mask_expand_epi8(value, here, found);
            escapes += here.count_ones() as usize;
        }
        store(elements, value);
    }
}
