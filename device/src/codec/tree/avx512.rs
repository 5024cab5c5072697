//! The levels of a stream, 64 elements at a time: as [`super::compact`], with AVX-512's compress and expand.

#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "numbers of a block's levels, values and symbols fit in a byte"
)]

use std::arch::x86_64::{
    __m512i, _mm512_add_epi8, _mm512_add_epi64, _mm512_cmpeq_epi8_mask, _mm512_cmpge_epu8_mask,
    _mm512_cmplt_epu8_mask, _mm512_cmpneq_epi8_mask, _mm512_gf2p8affine_epi64_epi8, _mm512_loadu_si512,
    _mm512_mask_add_epi8, _mm512_mask_blend_epi8, _mm512_mask_expand_epi8, _mm512_mask_sub_epi8,
    _mm512_maskz_add_epi8, _mm512_maskz_compress_epi8, _mm512_maskz_expand_epi8,
    _mm512_maskz_permutexvar_epi8, _mm512_max_epu8, _mm512_movepi8_mask, _mm512_permutex2var_epi8,
    _mm512_permutexvar_epi8, _mm512_popcnt_epi8, _mm512_sad_epu8, _mm512_set1_epi8, _mm512_set1_epi64,
    _mm512_setzero_si512, _mm512_shrdv_epi64, _mm512_storeu_si512, _mm512_sub_epi8, _mm512_test_epi8_mask,
    _mm512_testn_epi8_mask, _pdep_u64,
};

use super::{
    END, MOST_ELEMENTS, Malformed, Scratch,
    code::{Code, ESCAPE, FIXED_BITS, LONGEST, Leaves, Marks, SLOTS, SYMBOLS, WINDOW, ZERO},
    masks,
    plan::{Census, Plan},
};

/// Elements worked on at a time.
const STEP: usize = 64;
/// Bytes that a decoder looks at, however long it is told the stream is: header, levels and escapes.
pub(super) const MOST_STREAM: usize = 16 + MOST_ELEMENTS * LONGEST / 8 + MOST_ELEMENTS;

#[target_feature(enable = "avx512f")]
fn load(bytes: &[u8; STEP]) -> __m512i {
    // SAFETY: the array has the register's 64 bytes, and the load needs no alignment.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

#[target_feature(enable = "avx512f")]
fn load_at(bytes: &[u8], at: usize) -> __m512i {
    load(bytes[at..at + STEP].try_into().expect("a step"))
}

#[target_feature(enable = "avx512f")]
fn store(bytes: &mut [u8; STEP], value: __m512i) {
    // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
    unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), value) };
}

#[target_feature(enable = "avx512f")]
fn store_at(bytes: &mut [u8], at: usize, value: __m512i) {
    store((&mut bytes[at..at + STEP]).try_into().expect("a step"), value);
}

/// The lowest `count` bits, all if it is more than 64.
fn first(count: usize) -> u64 {
    if count >= STEP { u64::MAX } else { (1 << count) - 1 }
}

/// Appends bits to bytes.
struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
    pending: u64,
    held: u32,
}

impl Writer<'_> {
    /// Appends the lowest `count` of `bits`, at most 64, whose others are zero.
    fn push(&mut self, bits: u64, count: usize) {
        let low = self.pending | bits << self.held;
        self.out[self.at..self.at + 8].copy_from_slice(&low.to_le_bytes());
        let high = (bits >> 1) >> (63 - self.held);
        self.held += u32::try_from(count).expect("at most 64");
        let full = self.held >= 64;
        self.pending = if full { high } else { low };
        self.at += if full { 8 } else { 0 };
        self.held &= 63;
    }

    /// Pads to a whole byte; where the next one goes.
    fn finish(self) -> usize {
        self.out[self.at..self.at + 8].copy_from_slice(&self.pending.to_le_bytes());
        self.at + (self.held as usize).div_ceil(8)
    }
}

/// What the values of a block are. Those within 32 of the largest are counted eight values at a time: as one-hot bytes, of which eight make a
/// matrix of bits, whose columns' ones are what there is of each value. Zeros are counted apart; blocks with yet others are left to [`masks`].
#[target_feature(
    enable = "avx2,bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512bitalg,avx512vpopcntdq,gfni"
)]
fn census(values: &[u8], planes: usize, scratch: &mut Scratch) -> Option<Census> {
    let chunks = values.as_chunks::<STEP>().0;
    let (mut largest, mut zeros) = (_mm512_setzero_si512(), 0);
    for chunk in chunks {
        let chunk = load(chunk);
        largest = _mm512_max_epu8(largest, chunk);
        zeros += _mm512_testn_epi8_mask(chunk, chunk).count_ones();
    }
    let mut lanes = [0; STEP];
    store(&mut lanes, largest);
    let largest = lanes.into_iter().max().unwrap_or(0);
    let low = largest.saturating_sub(WINDOW as u8 - 1).max(1);

    let mut counts = [0_u64; WINDOW];
    let mut left = values.len() as u64 - u64::from(zeros);
    // Eight values that are counted together are eight rows of ones; the others have no row.
    let one_hot = load(&ONE_HOT);
    let together = load(&TOGETHER);
    let identity = _mm512_set1_epi64(0x8040_2010_0804_0201_u64.cast_signed());
    for (eight, counts) in counts.as_chunks_mut::<8>().0.iter_mut().enumerate().rev() {
        if left == 0 {
            break;
        }
        let first = _mm512_set1_epi8(low.wrapping_add(8 * eight as u8).cast_signed());
        let mut sums = _mm512_setzero_si512();
        // A byte holds the ones of 31 times eight elements.
        for chunks in chunks.chunks(16) {
            let mut ones = _mm512_setzero_si512();
            for chunk in chunks {
                let value = _mm512_sub_epi8(load(chunk), first);
                let here = _mm512_cmplt_epu8_mask(value, _mm512_set1_epi8(8));
                let rows = _mm512_maskz_permutexvar_epi8(here, value, one_hot);
                let columns = _mm512_gf2p8affine_epi64_epi8::<0>(identity, rows);
                ones = _mm512_add_epi8(ones, _mm512_popcnt_epi8(columns));
            }
            sums = _mm512_add_epi64(
                sums,
                _mm512_sad_epu8(_mm512_permutexvar_epi8(together, ones), _mm512_setzero_si512()),
            );
        }
        // SAFETY: the array has the register's 64 bytes, and the store needs no alignment.
        unsafe { _mm512_storeu_si512(counts.as_mut_ptr().cast(), sums) };
        left -= counts.iter().sum::<u64>();
    }
    if left > 0 {
        return match chunks.len() {
            16 => masks::count::<16>(values, planes, scratch),
            32 => masks::count::<32>(values, planes, scratch),
            64 => masks::count::<64>(values, planes, scratch),
            _ => masks::count::<128>(values, planes, scratch),
        };
    }
    let mut census = Census::new();
    census.tell(0, zeros)?;
    // Up to a bound: where the window ends with the largest value, an open range would step past it.
    for (value, count) in (low..=u8::MAX).zip(counts) {
        census.tell(value, count as u32)?;
    }
    Some(census)
}

/// What an encoder goes by; as [`Code::marks`].
#[target_feature(enable = "popcnt,avx512f,avx512bw,avx512vbmi2")]
fn marks(code: &Code) -> Marks {
    let mut lengths = [0; STEP];
    lengths[..SYMBOLS].copy_from_slice(&code.lengths);
    let lengths = load(&lengths);
    let (mut marks, mut next) = (_mm512_setzero_si512(), 0_u32);
    for (level, ranks) in RANKS.iter().enumerate() {
        let these = _mm512_cmpeq_epi8_mask(lengths, _mm512_set1_epi8(level as i8 + 1));
        let first = _mm512_set1_epi8(((2 * next + 1) << (LONGEST - 1 - level)) as i8);
        marks = _mm512_mask_add_epi8(marks, these, _mm512_maskz_expand_epi8(these, load(ranks)), first);
        next = 2 * (next + these.count_ones());
    }
    let mut by_symbol = [0; STEP];
    store(&mut by_symbol, marks);
    let escape = by_symbol[ESCAPE];
    let mut of = [escape; 256 + STEP];
    if code.lengths[ZERO] > 0 {
        of[0] = by_symbol[ZERO];
    }
    let coded = _mm512_test_epi8_mask(lengths, lengths) & u64::from(u32::MAX);
    let low = usize::from(code.low);
    let window = _mm512_mask_blend_epi8(coded, load_at(&of, low), marks);
    store_at(&mut of, low, window);
    Marks { of: *of.first_chunk().expect("longer"), escape }
}

/// A one at the place of its number, for the first eight numbers.
const ONE_HOT: [u8; STEP] = {
    let mut rows = [0; STEP];
    let mut at = 0;
    while at < 8 {
        rows[at] = 1 << at;
        at += 1;
    }
    rows
};

/// Byte `i` of all eight words side by side.
const TOGETHER: [u8; STEP] = {
    let mut places = [0; STEP];
    let mut at = 0;
    while at < STEP {
        places[at] = (at % 8 * 8 + at / 8) as u8;
        at += 1;
    }
    places
};

/// For each level, the codes that are the first one and those after it, without the first one, as far up as in a mark.
const RANKS: [[u8; STEP]; LONGEST] = {
    let mut ranks = [[0; STEP]; LONGEST];
    let mut level = 0;
    while level < LONGEST {
        let mut at = 0;
        while at < STEP {
            ranks[level][at] = (at << (LONGEST - level)) as u8;
            at += 1;
        }
        level += 1;
    }
    ranks
};

/// See [`super::encode`]; `count` planes are coded.
#[target_feature(
    enable = "avx2,bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512bitalg,avx512vpopcntdq,gfni"
)]
pub(super) fn encode(values: &[u8], count: usize, out: &mut [u8], scratch: &mut Scratch) -> Option<usize> {
    let plan = Plan::new(&census(values, count, scratch)?, count * values.len() / 8)?;
    let marks = marks(&plan.code);
    let [t0, t1, t2, t3] = [0, 64, 128, 192].map(|at| load_at(&marks.of, at));
    let end = _mm512_set1_epi8(END.cast_signed());
    let escape = _mm512_set1_epi8(marks.escape.cast_signed());

    let at = plan.code.write(out);
    let mut writer = Writer { out, at, pending: 0, held: 0 };
    let [level, escaped, ..] = &mut scratch.levels;
    let (mut going_on, mut escapes) = (0, 0);
    for values in values.as_chunks::<STEP>().0 {
        let values = load(values);
        let (lower, upper) =
            (_mm512_permutex2var_epi8(t0, values, t1), _mm512_permutex2var_epi8(t2, values, t3));
        let marks = _mm512_mask_blend_epi8(_mm512_movepi8_mask(values), lower, upper);
        writer.push(_mm512_movepi8_mask(marks), STEP);
        let escaping = _mm512_cmpeq_epi8_mask(marks, escape);
        if escaping != 0 {
            store_at(escaped, escapes, _mm512_maskz_compress_epi8(escaping, values));
            escapes += escaping.count_ones() as usize;
        }
        let rest = _mm512_add_epi8(marks, marks);
        let goes_on = _mm512_cmpneq_epi8_mask(rest, end);
        store_at(level, going_on, _mm512_maskz_compress_epi8(goes_on, rest));
        going_on += goes_on.count_ones() as usize;
    }
    while going_on > 0 {
        let count = going_on;
        going_on = 0;
        for start in (0..count).step_by(STEP) {
            let here = (count - start).min(STEP);
            let marks = load_at(level, start);
            writer.push(_mm512_movepi8_mask(marks) & first(here), here);
            let rest = _mm512_add_epi8(marks, marks);
            let goes_on = _mm512_cmpneq_epi8_mask(rest, end) & first(here);
            // Never ahead of what was just loaded.
            store_at(level, going_on, _mm512_maskz_compress_epi8(goes_on, rest));
            going_on += goes_on.count_ones() as usize;
        }
    }
    let at = writer.finish();
    out[at..at + escapes].copy_from_slice(&escaped[..escapes]);
    debug_assert_eq!(at + escapes, plan.length);
    Some(at + escapes)
}

/// The leaves of the code at the front of `stream` and the bits of its header; as [`Code::parse`] and [`Code::leaves`].
#[target_feature(enable = "bmi2,popcnt,avx512f,avx512bw,avx512vbmi2")]
fn leaves(stream: &[u8], length: usize, largest: usize) -> Result<(Leaves, usize), Malformed> {
    let bits = u128::from_le_bytes(stream[..16].try_into().expect("16 bytes"));
    let [low, head, ..] = bits.to_le_bytes();
    let window = usize::from(head & 31) + 1;
    let mut lengths = [0; SLOTS];
    let fields = (bits >> FIXED_BITS) & ((1 << (3 * window)) - 1);
    for (index, eight) in lengths[..WINDOW].as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *eight = _pdep_u64((fields >> (24 * index)) as u64, 0x0707_0707_0707_0707).to_le_bytes();
    }
    lengths[ZERO] = (bits >> 13) as u8 & 7;
    lengths[ESCAPE] = (bits >> 16) as u8 & 7;
    let header = Code::header_bytes(window);

    let mut leaves = Leaves { values: [0; 2 * SLOTS], count: [0; LONGEST], longest: 0, escape: None };
    let of_lengths = load(&lengths);
    let values =
        _mm512_maskz_add_epi8(u64::MAX >> WINDOW, _mm512_set1_epi8(low.cast_signed()), load(&COUNTING));
    let (mut at, mut used) = (0, 0);
    for level in 0..LONGEST {
        let these = _mm512_cmpeq_epi8_mask(of_lengths, _mm512_set1_epi8(level as i8 + 1));
        let count = these.count_ones();
        store_at(&mut leaves.values, at, _mm512_maskz_compress_epi8(these, values));
        leaves.count[level] = count as u8;
        leaves.longest = if count > 0 { level + 1 } else { leaves.longest };
        at += count as usize;
        used += count << (LONGEST - 1 - level);
    }
    let two_zeros = lengths[ZERO] > 0 && low == 0;
    if header > length || usize::from(low) + window - 1 > largest || two_zeros || used != 1 << LONGEST {
        return Err(Code::parse(stream, length, largest).expect_err("one of its checks failed"));
    }
    // The last symbol of all is the last one of its length.
    leaves.escape = usize::from(lengths[ESCAPE]).checked_sub(1).map(|level| (level, leaves.count[level] - 1));
    Ok((leaves, 8 * header))
}

/// A stage of the way down: levels without leaves, then one with leaves.
#[derive(Clone, Copy)]
struct Stage {
    /// The last level.
    level: usize,
    /// Elements.
    alive: usize,
}

/// See [`super::decode`].
#[target_feature(enable = "bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2")]
pub(super) fn decode(
    stream: &[u8],
    length: usize,
    largest: usize,
    values: &mut [u8],
    scratch: &mut Scratch,
) -> Result<(), Malformed> {
    let (leaves, mut at) = leaves(stream, length, largest)?;
    let Leaves { values: leaf_values, count, longest, escape } = &leaves;
    let Scratch { levels, masks: [goes_on, bits, _], stream: copy, .. } = scratch;
    // With room for whole registers behind it.
    let copied = length.min(MOST_STREAM);
    copy[..copied].copy_from_slice(&stream[..copied]);
    let one = _mm512_set1_epi8(-1);
    let escape_at = |level: usize| match escape {
        Some((at, node)) if *at == level => Some(_mm512_set1_epi8(node.cast_signed())),
        _ => None,
    };

    // Down.
    let mut stages = [Stage { level: 0, alive: 0 }; LONGEST];
    let (mut stage, mut alive, mut escapes, mut level) = (0, values.len(), 0, 0);
    while level < *longest {
        let first_level = level;
        loop {
            let end = at + alive;
            if end > 8 * length {
                return Err(Malformed::Level { level, end, bits: 8 * length });
            }
            align(copy, at, alive, &mut bits[(level - first_level) * MASKS..]);
            (at, level) = (end, level + 1);
            if count[level - 1] > 0 {
                break;
            }
        }
        let leaves = _mm512_set1_epi8(count[level - 1].cast_signed());
        let escape = escape_at(level - 1);
        let (upper, lower) = levels.split_at_mut(stage + 1);
        let next = &mut lower[0];
        let masks = &mut goes_on[stage * MASKS..][..alive.div_ceil(STEP)];
        let bits = bits.first_chunk::<{ LONGEST * MASKS }>().expect("room for every level");
        let mut going_on = 0;
        for (index, (nodes, mask)) in upper[stage].as_chunks_mut::<STEP>().0.iter_mut().zip(masks).enumerate()
        {
            let mut node = if stage == 0 { _mm512_setzero_si512() } else { load(nodes) };
            node = _mm512_add_epi8(node, node);
            node = _mm512_mask_sub_epi8(node, bits[index], node, one);
            for level in 1..level - first_level {
                node = _mm512_add_epi8(node, node);
                node = _mm512_mask_sub_epi8(node, bits[level * MASKS + index], node, one);
            }
            store(nodes, node);
            let valid = first(alive - index * STEP);
            *mask = _mm512_cmpge_epu8_mask(node, leaves) & valid;
            store_at(next, going_on, _mm512_maskz_compress_epi8(*mask, _mm512_sub_epi8(node, leaves)));
            going_on += mask.count_ones() as usize;
            if let Some(escape) = escape {
                escapes += (_mm512_cmpeq_epi8_mask(node, escape) & valid).count_ones() as usize;
            }
        }
        stages[stage] = Stage { level: level - 1, alive };
        stage += 1;
        alive = going_on;
    }
    let at = at.div_ceil(8);
    if at + escapes != length {
        return Err(Malformed::Escapes { end: at + escapes, length });
    }
    if let Some(value) = stream[at..length].iter().find(|value| usize::from(**value) > largest) {
        return Err(Malformed::Escaped { value: *value, largest });
    }

    // Up.
    let mut leaf: usize = count.iter().map(|count| usize::from(*count)).sum();
    for (stage, Stage { level, alive }) in stages[..stage].iter().enumerate().rev() {
        leaf -= usize::from(count[*level]);
        let table = load_at(leaf_values, leaf);
        let (upper, lower) = levels.split_at_mut(stage + 1);
        let below = &lower[0];
        let masks = &goes_on[stage * MASKS..][..alive.div_ceil(STEP)];
        let escape = escape_at(*level);
        let (mut taken, mut escape_at) = (0, at);
        for (index, (nodes, mask)) in upper[stage].as_chunks_mut::<STEP>().0.iter_mut().zip(masks).enumerate()
        {
            let node = load(nodes);
            let found = _mm512_permutexvar_epi8(node, table);
            let mut found = _mm512_mask_expand_epi8(found, *mask, load_at(below, taken));
            taken += mask.count_ones() as usize;
            if let Some(escape) = escape {
                let escaped = _mm512_cmpeq_epi8_mask(node, escape) & first(alive - index * STEP);
                found = _mm512_mask_expand_epi8(found, escaped, load_at(copy, escape_at));
                escape_at += escaped.count_ones() as usize;
            }
            if stage == 0 {
                store_at(values, index * STEP, found);
            } else {
                store(nodes, found);
            }
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
