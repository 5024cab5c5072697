//! A block's walk of the code's tree level by level, and back up with the values of its leaves.
//!
//! Elements are worked on in *stages* ([`super::stage`]): those still alive, side by side. An
//! element is the number of its leaf among all leaves in code order, or of the inner node it has
//! come to, counted on from the leaves above: after level `k` it is alive if that is not below the
//! number of leaves down to there, `F`, and on level `k + 1`, with a bit `b`, it comes to
//! `2x − F + b`. So leaves and nodes need not be told apart but by comparing with `F`.
//!
//! The first stage is read from the stream as often as it is wanted: its levels have bits of all
//! elements. Of [`MAX_LAST`] vectors the rest of the levels is done in place ([`super::few`]).
//!
//! Values come with their bits where they are wanted, by a matrix that the table of leaves and the
//! escaped values are brought through.

use std::arch::x86_64::{
    __m512i, _mm512_add_epi8, _mm512_gf2p8affine_epi64_epi8, _mm512_mask_expand_epi8,
    _mm512_permutexvar_epi8, _mm512_set1_epi8, _mm512_set1_epi64,
};

use super::super::{Malformed, code::LONGEST};
use super::{
    BUFFER, COUNTING, MASKS, STEP,
    few::{self, few},
    load, load_at,
    stage::{self, Escaped, FOUR, GoesOn, Rows, Up, many, many_up, row, rows_of_ones},
    store,
    table::Table,
};

/// Vectors of the last stage.
const MAX_LAST: usize = 4;
/// Bytes behind a stream that are looked at.
pub(super) const BEHIND: usize = 128;

/// What a block is decoded in.
#[repr(align(64))]
pub(super) struct Buffers {
    /// The bits of each level, but for those of the first stage.
    rows: [[[u8; 8]; MASKS]; LONGEST],
    /// Which elements of each stage go on.
    goes_on: [GoesOn; LONGEST],
    /// The elements of each stage but the first, and then their values.
    values: [[u8; BUFFER]; LONGEST],
    /// The stages that were gone through.
    stages: [Stage; LONGEST],
}

impl Buffers {
    #[expect(clippy::large_stack_arrays, reason = "it is made once a thread")]
    pub(super) const fn new() -> Self {
        Self {
            rows: [[[0; 8]; MASKS]; LONGEST],
            goes_on: [const { GoesOn::new() }; LONGEST],
            values: [[0; BUFFER]; LONGEST],
            stages: [Stage { alive: 0, level: 0, levels: 0, above: 0 }; LONGEST],
        }
    }
}

/// Where a decoder is.
pub(super) struct Cursor<'a> {
    /// The stream, with [`BEHIND`] bytes behind it.
    pub stream: &'a [u8],
    /// Its bytes.
    pub length: usize,
    /// Leaves of each level.
    pub count: [u8; LONGEST],
    /// Levels.
    pub longest: usize,
    /// The next level.
    pub level: usize,
    /// Its first bit.
    pub at: usize,
    /// Leaves above it: elements that are alive are not below.
    pub leaves: u8,
}

impl Cursor<'_> {
    /// Steps over a level of `alive` elements: where its bits begin.
    #[inline]
    pub(super) fn step(&mut self, alive: usize) -> Result<usize, Malformed> {
        let (at, end) = (self.at, self.at + alive);
        if end > 8 * self.length {
            return Err(Malformed::Level { level: self.level, end, bits: 8 * self.length });
        }
        self.leaves += self.count[self.level];
        (self.at, self.level) = (end, self.level + 1);
        Ok(at)
    }
}

/// A stage that was gone through.
#[derive(Clone, Copy)]
struct Stage {
    alive: usize,
    /// Its first level.
    level: usize,
    /// Levels; none if its elements are bytes.
    levels: usize,
    /// Leaves above it.
    above: u8,
}

/// A block on its way.
pub(super) struct TreeWalk<'a> {
    cursor: Cursor<'a>,
    /// The rows of the first stage, as they are in the stream.
    root: Rows<'a>,
    /// The values of the leaves.
    table: __m512i,
    /// What brings bits of values to their places.
    matrix: i64,
    /// The escape's level, past all if there is none, and its leaf.
    escape_level: usize,
    escape_leaf: u8,
    /// The stage that has it.
    escape_stage: usize,
    /// Elements of stages before the last that are escaped.
    escapes: usize,
    /// Where their values begin in the stream.
    escaped_at: usize,
    /// The largest value.
    largest: usize,
    /// Elements that go on.
    alive: usize,
    /// Whether these have all come to one node.
    together: bool,
    /// Stages that were gone through.
    count: usize,
}

impl<'a> TreeWalk<'a> {
    /// A block of `elements` whose stream begins with `code` and has [`BEHIND`] bytes behind it.
    /// `matrix` brings bits of values to their places.
    #[inline]
    #[target_feature(enable = "avx512f,gfni")]
    pub(super) fn new(
        (stream, length): (&'a [u8], usize),
        largest: usize,
        elements: usize,
        matrix: i64,
        code: &'a Table,
    ) -> Self {
        let Table { count, longest, bytes, escape_level, escape_leaf, .. } = code;
        Self {
            cursor: Cursor {
                stream,
                length,
                count: *count,
                longest: *longest,
                level: 0,
                at: 8 * bytes,
                leaves: 0,
            },
            root: Rows { bits: stream[*bytes..].as_chunks().0, pitch: elements / STEP, levels: 0, above: 0 },
            table: _mm512_gf2p8affine_epi64_epi8::<0>(load(code.leaves()), _mm512_set1_epi64(matrix)),
            matrix,
            escape_level: *escape_level,
            escape_leaf: *escape_leaf,
            escape_stage: usize::MAX,
            escapes: 0,
            escaped_at: 0,
            largest,
            alive: elements,
            together: true,
            count: 0,
        }
    }

    /// Goes through the first stage.
    #[inline]
    #[target_feature(
        enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512vpopcntdq,gfni"
    )]
    fn begin(&mut self, buffers: &mut Buffers) -> Result<(), Malformed> {
        let Self { cursor, root, alive, .. } = self;
        let Buffers { goes_on, values, stages, .. } = buffers;
        let elements = *alive;
        while cursor.leaves == 0 {
            cursor.step(elements)?;
        }
        root.levels = cursor.level;
        self.together = usize::from(cursor.leaves) + 1 == 1 << root.levels;
        self.alive = if self.together {
            root.ones(elements / STEP, &mut goes_on[0])
        } else {
            root.down(elements / STEP, cursor.leaves, &mut goes_on[0], &mut values[0])
        };
        stages[0] = Stage { alive: elements, level: 0, levels: root.levels, above: 0 };
        self.count = 1;
        if let Some(leaf) = self.escape_within(0) {
            self.escapes = self.root.at(elements / STEP, leaf);
        }
        Ok(())
    }

    /// The escape's leaf, if it is on the levels from `level` down to here, which is noted.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn escape_within(&mut self, level: usize) -> Option<__m512i> {
        let here = (level..self.cursor.level).contains(&self.escape_level);
        if here {
            self.escape_stage = self.count - 1;
        }
        here.then(|| _mm512_set1_epi8(self.escape_leaf.cast_signed()))
    }

    /// Goes through the stages of many vectors.
    #[inline]
    #[target_feature(
        enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512vpopcntdq,gfni"
    )]
    fn stages(&mut self, buffers: &mut Buffers) -> Result<(), Malformed> {
        while self.alive > MAX_LAST * STEP && self.cursor.level < self.cursor.longest {
            self.stage(buffers)?;
        }
        Ok(())
    }

    #[inline]
    #[target_feature(
        enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512vpopcntdq,gfni"
    )]
    fn stage(&mut self, buffers: &mut Buffers) -> Result<(), Malformed> {
        let Self { cursor, alive, together, .. } = self;
        let Buffers { rows: all_rows, goes_on, values, stages } = buffers;
        let (alive, together, level, above) = (*alive, *together, cursor.level, cursor.leaves);
        let mut begins = [0; LONGEST];
        let mut levels = 0;
        while cursor.leaves == above {
            begins[levels] = cursor.step(alive)?;
            levels += 1;
        }
        let begins = &begins[..levels];
        let rows = &mut all_rows[level..level + levels];
        let goes_on = &mut goes_on[self.count];
        let [here, next] = values[self.count - 1..].first_chunk_mut().expect("a buffer for every stage");
        let stays_together = together && usize::from(cursor.leaves - above) + 1 == 1 << levels;
        // Who is escaped has to be told from what stands behind the last element.
        let by_rows = stays_together && levels <= 3 && !(level..cursor.level).contains(&self.escape_level);
        self.alive = match *begins {
            [a] if by_rows => rows_of_ones(cursor.stream, [a], alive, rows, goes_on),
            [a, b] if by_rows => rows_of_ones(cursor.stream, [a, b], alive, rows, goes_on),
            [a, b, c] if by_rows => rows_of_ones(cursor.stream, [a, b, c], alive, rows, goes_on),
            _ => {
                for (begin, bits) in begins.iter().zip(&mut *rows) {
                    row(cursor.stream, *begin, alive, bits);
                }
                if together {
                    stage::fill(here, alive, above);
                }
                many(rows, (above, cursor.leaves), alive, here, goes_on, next)
            }
        };
        self.together = stays_together;
        stages[self.count] = Stage { alive, level, levels: if by_rows { levels } else { 0 }, above };
        self.count += 1;
        if let Some(leaf) = self.escape_within(level) {
            self.escapes = stage::at(here, alive, leaf);
        }
        Ok(())
    }

    /// Goes down all the rest of the levels with the elements that are left, which are few.
    #[inline]
    #[target_feature(
        enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512vpopcntdq,gfni"
    )]
    fn last(&mut self, buffers: &mut Buffers) -> Result<(), Malformed> {
        match self.alive.div_ceil(STEP) {
            0 | 1 => self.last_of::<1>(buffers),
            2 => self.last_of::<2>(buffers),
            _ => self.last_of::<MAX_LAST>(buffers),
        }
    }

    #[inline]
    #[target_feature(
        enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512vpopcntdq,gfni"
    )]
    fn last_of<const N: usize>(&mut self, buffers: &mut Buffers) -> Result<(), Malformed> {
        let matrix = _mm512_set1_epi64(self.matrix);
        let Self { cursor, alive, table, .. } = self;
        let here = &mut buffers.values[self.count - 1].as_chunks_mut::<STEP>().0[..N];
        let mut x = few::all::<N>(cursor.leaves);
        if !self.together {
            for (x, here) in x.iter_mut().zip(&*here) {
                *x = load(here);
            }
        }
        let level = cursor.level;
        let x = few(cursor, *alive, x)?;
        // Those of this stage stand behind those of the others.
        let leaf = (self.escape_level >= level && self.escape_level < LONGEST)
            .then(|| _mm512_set1_epi8(self.escape_leaf.cast_signed()));
        let escaped = leaf.map_or([0; N], |leaf| few::at(&x, *alive, leaf));
        let escapes = self.escapes + escaped.iter().map(|mask| mask.count_ones() as usize).sum::<usize>();
        let start = cursor.at.div_ceil(8);
        let end = start + escapes;
        if end != cursor.length {
            return Err(Malformed::Escapes { end, length: cursor.length });
        }
        let largest = self.largest;
        if largest < u8::MAX.into()
            && let Some(value) = cursor.stream[start..end].iter().find(|value| usize::from(**value) > largest)
        {
            return Err(Malformed::Escaped { value: *value, largest });
        }
        self.escaped_at = start;
        let mut at = start;
        for ((x, escaped), here) in x.iter().zip(escaped).zip(here) {
            let mut value = _mm512_permutexvar_epi8(*x, *table);
            if leaf.is_some() {
                let found = _mm512_gf2p8affine_epi64_epi8::<0>(load_at(cursor.stream, at), matrix);
                value = _mm512_mask_expand_epi8(value, escaped, found);
                at += escaped.count_ones() as usize;
            }
            store(here, value);
        }
        Ok(())
    }

    /// Brings the values back up to the first stage.
    #[inline]
    #[target_feature(
        enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512vpopcntdq,gfni"
    )]
    fn rise(&self, buffers: &mut Buffers) {
        let Buffers { rows, goes_on, values, stages } = buffers;
        for number in (1..self.count).rev() {
            let Stage { alive, level, levels, above } = stages[number];
            let [here, below] = values[number - 1..].first_chunk_mut().expect("a buffer for every stage");
            let goes_on = &goes_on[number];
            if levels == 0 {
                many_up(alive, here, goes_on, below, self.table, self.escaped(number));
                continue;
            }
            let rows = Rows { bits: rows[level..].as_flattened(), pitch: MASKS, levels, above };
            let above = _mm512_set1_epi8(above.cast_signed());
            let table = _mm512_permutexvar_epi8(_mm512_add_epi8(load(&COUNTING), above), self.table);
            let mut up = Up::new(rows, goes_on, below, table, None);
            let groups = here.as_chunks_mut::<STEP>().0.as_chunks_mut::<FOUR>().0;
            for (group, here) in groups[..alive.div_ceil(FOUR * STEP)].iter_mut().enumerate() {
                here.iter_mut().zip(up.group::<FOUR>(group)).for_each(|(here, value)| store(here, value));
            }
        }
    }

    /// What a stage's elements are escaped by, if they are.
    #[inline]
    #[target_feature(enable = "avx512f,gfni")]
    fn escaped(&self, stage: usize) -> Option<Escaped<'a>> {
        (stage == self.escape_stage).then(|| Escaped {
            leaf: _mm512_set1_epi8(self.escape_leaf.cast_signed()),
            values: &self.cursor.stream[self.escaped_at..],
            matrix: _mm512_set1_epi64(self.matrix),
        })
    }

    /// The way up to the first stage.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
    pub(super) fn end<'b>(&'b self, buffers: &'b Buffers) -> Up<'b> {
        Up::new(self.root, &buffers.goes_on[0], &buffers.values[0], self.table, self.escaped(0))
    }

    /// All decode levels, and back up to the first stage.
    #[inline]
    #[target_feature(
        enable = "bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512vpopcntdq,gfni"
    )]
    pub(super) fn through(&mut self, buffers: &mut Buffers) -> Result<(), Malformed> {
        self.begin(buffers)?;
        self.stages(buffers)?;
        self.last(buffers)?;
        self.rise(buffers);
        Ok(())
    }
}
