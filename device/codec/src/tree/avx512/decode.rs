//! Decoding blocks: to values, or, of bf16, straight to words.
//!
//! The planes beside the values are checked as they are joined: their bytes are at hand then.

use std::arch::x86_64::{__m512i, _mm512_permutex2var_epi8, _mm512_set1_epi8, _mm512_ternarylogic_epi64};

use super::super::{
    Bf16, Malformed,
    whole::{PLANE, STEPS},
};
use super::{
    MAX_STREAM, STEP, load, store,
    table::Tables,
    three_and_three,
    walk::{BEHIND, Buffers, TreeWalk},
};
use crate::{
    check::Sums,
    plane::avx512::{bytes_of, gathered},
};

/// Vectors that are brought up together at the root.
const EIGHT: usize = 8;
/// Elements of a block of bf16.
pub(super) const ELEMENTS: usize = 8 * PLANE;

/// The matrix by which values stay what they are.
const AS_THEY_ARE: u64 = 0x0102_0408_1020_4080;
/// That by which their first bit comes last.
const ROTATED: u64 = 0x0204_0810_2040_8001;

/// What a decoder keeps.
pub(in super::super) struct Decoder {
    /// Codes that were read.
    tables: Tables,
    /// Scratch for a block on its way.
    buffers: Buffers,
    three_and_three: three_and_three::Buffers,
    /// A stream and what is read behind it.
    stream: [u8; MAX_STREAM + BEHIND],
}

impl Default for Decoder {
    fn default() -> Self {
        Self {
            tables: Tables::new(),
            buffers: Buffers::new(),
            three_and_three: three_and_three::Buffers::new(),
            stream: [0; MAX_STREAM + BEHIND],
        }
    }
}

/// A stream with at least [`BEHIND`] bytes behind it.
#[inline]
fn with_slack<'a>(stream: &'a [u8], length: usize, copy: &'a mut [u8; MAX_STREAM + BEHIND]) -> &'a [u8] {
    if stream.len() >= length + BEHIND {
        return stream;
    }
    let copied = length.min(MAX_STREAM);
    copy[..copied].copy_from_slice(&stream[..copied]);
    copy
}

/// See [`super::super::Kernel::decode_block`].
#[target_feature(
    enable = "sse4.2,bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512vpopcntdq,gfni"
)]
pub(in super::super) fn decode(
    stream: &[u8],
    length: usize,
    largest: usize,
    values: &mut [u8],
    decoder: &mut Decoder,
) -> Result<(), Malformed> {
    let Decoder { tables, buffers, stream: copy, .. } = decoder;
    let code = tables.read(stream, length, largest)?;
    let stream = with_slack(stream, length, copy);
    let mut walk = TreeWalk::new((stream, length), largest, values.len(), AS_THEY_ARE.cast_signed(), code);
    walk.through(buffers)?;
    let steps: &mut [[[u8; STEP]; EIGHT]] = values.as_chunks_mut().0.as_chunks_mut().0;
    let mut end = walk.end(buffers);
    for (step, vectors) in steps.iter_mut().enumerate() {
        vectors.iter_mut().zip(end.group::<EIGHT>(step)).for_each(|(vector, found)| store(vector, found));
    }
    Ok(())
}

/// As [`decode`] of a block of bf16, straight to words, with the checks of the planes
/// beside the stream.
#[target_feature(
    enable = "sse4.2,bmi1,bmi2,popcnt,avx512f,avx512bw,avx512vbmi,avx512vbmi2,avx512vpopcntdq,gfni"
)]
pub(in super::super) fn decode_bf16(block: &mut Bf16<'_>, decoder: &mut Decoder) -> Result<(), Malformed> {
    let Decoder { tables, buffers, three_and_three: their_buffers, stream: copy } = decoder;
    let code = tables.read(block.stream, block.length, u8::MAX.into())?;
    let stream = with_slack(block.stream, block.length, copy);
    // Values come rotated: so each of their bits is at its place in one of a word's bytes. The
    // first bit's row is in the last byte.
    let matrix = (ROTATED & (0x0101_0101_0101_0101 * u64::from(block.wanted))).cast_signed();
    let planes = block.planes.map(|plane| plane.as_chunks().0.first_chunk().expect("a plane's lines"));
    let lines: &mut [[[[u8; STEP]; 2]; EIGHT]; STEPS] =
        block.words.as_chunks_mut().0.as_chunks_mut().0.as_chunks_mut().0.first_chunk_mut().expect("a block");
    let join = Join::new();
    let mut sums = Sums::new();
    if let Some(up) = three_and_three::through((stream, block.length), matrix, code, their_buffers) {
        for (line, out) in lines.iter_mut().enumerate() {
            let rests = rests(planes, line, &mut sums);
            join.put(out, &up.line(line), &rests);
        }
        block.checks = sums.checks();
        return Ok(());
    }
    let mut walk = TreeWalk::new((stream, block.length), u8::MAX.into(), ELEMENTS, matrix, code);
    walk.through(buffers)?;
    let mut end = walk.end(buffers);
    for (line, out) in lines.iter_mut().enumerate() {
        let values = end.group::<EIGHT>(line);
        join.put(out, &values, &rests(planes, line, &mut sums));
    }
    block.checks = sums.checks();
    Ok(())
}

/// A line of each of the planes beside the values, added to their sums, as bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn rests(planes: [&[[u8; STEP]; STEPS]; 8], line: usize, sums: &mut Sums) -> [__m512i; EIGHT] {
    let gathered = gathered(planes.map(|plane| &plane[line]));
    sums.add(line, &gathered);
    bytes_of(&gathered)
}

/// How values are joined with what is beside them.
struct Join {
    /// Bits that the first of two bytes has of what is beside the value, and the second of the
    /// value.
    lower: __m512i,
    /// Where the bytes of two vectors go.
    places: [__m512i; 2],
}

impl Join {
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn new() -> Self {
        Self { lower: _mm512_set1_epi8(0x7f), places: [&FIRST, &SECOND].map(|places| load(places)) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512vbmi")]
    fn put(&self, out: &mut [[[u8; STEP]; 2]; EIGHT], values: &[__m512i; EIGHT], rests: &[__m512i; EIGHT]) {
        let [first, second] = self.places;
        for at in 0..EIGHT {
            let (value, rest) = (values[at], rests[at]);
            // Of the first operand's ones the second, of its zeros the third.
            let low = _mm512_ternarylogic_epi64::<0xca>(self.lower, rest, value);
            let high = _mm512_ternarylogic_epi64::<0xca>(self.lower, value, rest);
            let [a, b] = &mut out[at];
            store(a, _mm512_permutex2var_epi8(low, first, high));
            store(b, _mm512_permutex2var_epi8(low, second, high));
        }
    }
}

/// The bytes of two registers in turn, of the registers' first halves.
const FIRST: [u8; STEP] = in_turn(0);
/// The same of their second halves.
const SECOND: [u8; STEP] = in_turn(STEP / 2);

const fn in_turn(from: usize) -> [u8; STEP] {
    let mut places = [0; STEP];
    let mut at = 0;
    while at < STEP {
        places[at] = (from + at / 2 + at % 2 * STEP) as u8;
        at += 1;
    }
    places
}
