//! A code from a stream's header to what a decoder goes by. Blocks one after the other often have
//! the same header, which is not read again.

use std::{
    arch::x86_64::{
        _mm_crc32_u64, _mm512_cmpeq_epi8_mask, _mm512_maskz_add_epi8, _mm512_maskz_compress_epi8,
        _mm512_set_epi64, _mm512_set1_epi8, _pdep_u64,
    },
    ops::Range,
};

use super::super::{
    Malformed,
    code::{Code, FIXED_BITS, LONGEST, SLOTS, WINDOW},
};
use super::{COUNTING, STEP, load, store_at, three_and_three::ThreeAndThree};

/// A code as decoders go by it, and the header it was read from.
pub(super) struct Table {
    /// The header's bits, those behind it zero; 0 if none was read.
    header: u128,
    pub(super) bytes: usize,
    /// The largest value of the format it was read for.
    largest: usize,
    /// The values of the leaves in code order; what stands at the escape's place or behind the last
    /// one is meaningless.
    pub(super) values: [u8; 2 * SLOTS],
    /// How many leaves each level has.
    pub(super) count: [u8; LONGEST],
    /// Levels.
    pub(super) longest: usize,
    /// The escape's level, past all if there is none, and its leaf.
    pub(super) escape_level: usize,
    pub(super) escape_leaf: u8,
    /// What there is to know of a 3+3 code.
    pub(super) three_and_three: Option<ThreeAndThree>,
}

/// The leaf that an element comes to that has these bits on some levels of a code with so many
/// leaves on each, if it has come to the first node there; the first leaf of all if it comes to
/// none.
pub(super) fn leaf(count: [u8; LONGEST], levels: Range<usize>, bits: usize) -> u8 {
    let mut above: u8 = count[..levels.start].iter().sum();
    let mut node = 0;
    for level in levels.clone() {
        let number = 2 * node + (bits >> (levels.end - 1 - level) & 1) as u8;
        if number < count[level] {
            return above + number;
        }
        above += count[level];
        node = number - count[level];
    }
    0
}

/// A cache of codes: those read last, each at the place that its header says. A header says all of
/// its code, so what is decoded does not depend on what is cached.
pub(in super::super) struct Tables([Table; TABLES]);

/// Codes that are cached.
const TABLES: usize = 64;

impl Tables {
    /// None that was read.
    #[expect(clippy::large_stack_arrays, reason = "it is made once a thread")]
    pub(in super::super) const fn new() -> Self {
        Self([const { Table::new() }; TABLES])
    }

    /// Reads the header at the front of `stream`, unless that was done; as [`Code::parse`] and
    /// [`Code::leaves`].
    #[inline]
    #[target_feature(enable = "sse4.2,bmi2,popcnt,avx512f,avx512bw,avx512vbmi2")]
    pub(super) fn read(&mut self, stream: &[u8], length: usize, largest: usize) -> Result<&Table, Malformed> {
        let bits = u128::from_le_bytes(*stream.first_chunk().expect("16 bytes"));
        let window = (bits >> 8) as usize % WINDOW + 1;
        let bytes = Code::header_bytes(window);
        let header = bits & (u128::MAX >> (128 - 8 * bytes));
        let hash = _mm_crc32_u64(_mm_crc32_u64(0, header as u64), (header >> 64) as u64);
        let table = &mut self.0[hash as usize % TABLES];
        // A header of zeros is none.
        if header != table.header || header == 0 || bytes > length || largest != table.largest {
            table.parse(bits, stream, length, largest)?;
        }
        Ok(table)
    }
}

impl Table {
    /// None that was read.
    const fn new() -> Self {
        Self {
            header: 0,
            bytes: 0,
            largest: 0,
            values: [0; 2 * SLOTS],
            count: [0; LONGEST],
            longest: 0,
            escape_level: LONGEST,
            escape_leaf: 0,
            three_and_three: None,
        }
    }

    /// The values of the leaves.
    pub(super) fn leaves(&self) -> &[u8; STEP] {
        self.values.first_chunk().expect("more values than leaves")
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
        self.escape_level = usize::from(escape).checked_sub(1).unwrap_or(LONGEST);
        self.escape_leaf = self.count.iter().take(self.escape_level + 1).sum::<u8>().wrapping_sub(1);
        self.header = bits & (u128::MAX >> (128 - 8 * header));
        self.three_and_three = ThreeAndThree::of(self.count, self.escape_level, self.escape_leaf);
        (self.bytes, self.largest) = (header, largest);
        Ok(())
    }
}
