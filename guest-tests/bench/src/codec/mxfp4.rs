//! Weights of bf16 as MXFP4, made here: no model of it is at hand. And how fast it, MXFP8 and NVFP4
//! become bf16.
//!
//! The rules:
//! * A block of 32 has the scale that OCP's document gives it: the power of two of its largest
//!   magnitude, less the 2 of the largest `fp4_e2m1`. Elements are what the view `fp4_e2m1@S`
//!   shows.
//! * MXFP8 and NVFP4 are the same bytes and scales, read as theirs: how fast a kernel is does not
//!   depend on the elements.
//! * To bf16, elements and scales are put together in batches that stay in the second-level cache,
//!   and held against the `memcpy` that moves as many bytes: half of what is read and written.

use std::{hint::black_box, time::Instant};

use lamina_codec::{
    BLOCK_BYTES, BlockWords,
    format::Format,
    plane,
    scaled::{MX_BLOCK, Scaled},
    view::View,
};
use serde::{Deserialize, Serialize};

use super::pool::Pool;
use crate::median;

/// Blocks of elements at a time: of 32 KiB of fp4 come 128.
const BATCH: usize = 8;
/// The exponent of the largest fp4.
const LARGEST: i32 = 2;
/// Bytes of bf16 that become a block of elements.
const WIDE: usize = 4 * BLOCK_BYTES;

/// How fast elements and scales become bf16.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Expanded {
    /// What they are: `MXFP4`, `MXFP8` or `NVFP4`.
    pub name: String,
    /// GB/s of bf16.
    pub gbs: f64,
    /// The time of the `memcpy` that moves as many bytes, to this one.
    pub of_memcpy: f64,
}

/// The blocks of a pool of bf16 as MXFP4: those of elements that are whole.
pub fn quantised(pool: &Pool) -> Pool {
    let (mut blocks, mut scales) = (Vec::new(), Vec::new());
    let views: Vec<View> = (-64..=64).map(view).collect();
    for wide in pool.blocks.as_flattened().as_chunks::<WIDE>().0 {
        let mut elements = Vec::with_capacity(BLOCK_BYTES);
        for block in wide.as_chunks::<{ 2 * MX_BLOCK }>().0 {
            let largest = block.as_chunks().0.iter().map(|[_, high]| high & 0x7f).max().unwrap_or(0);
            let of_largest = block
                .as_chunks()
                .0
                .iter()
                .filter(|[_, high]| high & 0x7f == largest)
                .map(|[low, _]| low >> 7);
            let exponent = i32::from(largest) << 1 | i32::from(of_largest.max().unwrap_or(0));
            let scale = (exponent - 127 - LARGEST).clamp(-64, 64);
            let mut words: BlockWords = [0; BLOCK_BYTES];
            words[..block.len()].copy_from_slice(block);
            let view = &views[usize::try_from(scale + 64).expect("at least -64")];
            plane::clear_outside(Format::Bf16, view.mask(), &mut words);
            view.render(&mut words, 0, MX_BLOCK, &mut elements);
            scales.push(u8::try_from(scale + 127).expect("63 to 191"));
        }
        blocks.push(elements.try_into().expect("a block"));
    }
    let file = format!("{} as MXFP4, made here", pool.file);
    let of_bytes = (blocks.len() * BLOCK_BYTES) as u64;
    Pool { file, format: Format::Fp4E2m1, cache: None, blocks, scales, of_bytes }
}

fn view(scale: i32) -> View {
    // All of the mantissa counts.
    View::parse(Format::Bf16, &format!("fp4_e2m1+g6@{scale}")).expect("a view of bf16")
}

/// Puts elements and scales together, again and again.
pub struct Expanding<'a> {
    pool: &'a Pool,
    ways: Vec<Way>,
    out: Vec<u8>,
    wide: Vec<u8>,
}

/// One reading of the elements.
struct Way {
    name: &'static str,
    scaled: Scaled,
    /// Those of all blocks.
    scales: Vec<u8>,
    /// Seconds of each round.
    expand: Vec<f64>,
    copy: Vec<f64>,
}

impl<'a> Expanding<'a> {
    /// Of a pool that has scales.
    pub fn new(pool: &'a Pool) -> Option<Self> {
        if pool.scales.is_empty() {
            return None;
        }
        let ways = [
            ("MXFP4", Scaled::mx(Format::Fp4E2m1)),
            ("MXFP8", Scaled::mx(Format::Fp8E4m3fn)),
            ("NVFP4", Scaled::nvfp4(1.0)),
        ];
        let ways = ways.map(|(name, scaled)| {
            let count = pool.blocks.len() * BLOCK_BYTES / scaled.block_bytes();
            let scales = pool.scales.iter().copied().cycle().take(count).collect();
            Way { name, scaled, scales, expand: Vec::new(), copy: Vec::new() }
        });
        let (out, wide) = (vec![0; BATCH * WIDE], vec![0; BATCH * WIDE]);
        Some(Self { pool, ways: ways.into(), out, wide })
    }

    /// Measures all blocks once, of each way.
    pub fn round(&mut self) {
        for Way { scaled, scales, expand, copy, .. } in &mut self.ways {
            let per_block = BLOCK_BYTES / scaled.block_bytes();
            let (mut expanding, mut copying) = (0.0, 0.0);
            let batches = self.pool.blocks.chunks(BATCH).zip(scales.chunks(BATCH * per_block));
            for (blocks, scales) in batches {
                let out = &mut self.out[..scales.len() * 2 * scaled.block()];
                let elements = blocks.as_flattened();
                scaled.to_bf16(elements, scales, out);
                expanding += seconds(|| scaled.to_bf16(black_box(elements), scales, black_box(out)));
                let moved = usize::midpoint(elements.len() + scales.len(), out.len());
                let (from, wide) = (&out[..moved], &mut self.wide[..moved]);
                wide.copy_from_slice(from);
                copying += seconds(|| black_box(wide).copy_from_slice(black_box(from)));
            }
            expand.push(expanding);
            copy.push(copying);
        }
    }

    /// What came of it.
    pub fn result(&self) -> Vec<Expanded> {
        let result = |way: &Way| {
            let (expand, copy) = (median(way.expand.clone()), median(way.copy.clone()));
            let bytes = (way.scales.len() * 2 * way.scaled.block()) as u64;
            Expanded { name: way.name.to_owned(), gbs: crate::rate(bytes, expand), of_memcpy: copy / expand }
        };
        self.ways.iter().map(result).collect()
    }
}

fn seconds(work: impl FnOnce()) -> f64 {
    let begun = Instant::now();
    work();
    begun.elapsed().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_of_weights_keeps_its_largest_value_within_a_step() {
        let mut state = 1_u32;
        let weights: Vec<u8> = (0..WIDE / 2)
            .flat_map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (f32::from(state.to_le_bytes()[3]) / 512.0 - 0.25).to_le_bytes()[2..].to_vec()
            })
            .collect();
        let blocks = weights.as_chunks::<BLOCK_BYTES>().0.to_vec();
        let pool = Pool {
            file: "w".into(),
            format: Format::Bf16,
            cache: None,
            blocks,
            scales: Vec::new(),
            of_bytes: 0,
        };
        let small = quantised(&pool);
        assert_eq!((small.blocks.len(), small.scales.len()), (1, BLOCK_BYTES / 16));
        let mut back = vec![0; WIDE];
        Scaled::mx(Format::Fp4E2m1).to_bf16(small.blocks.as_flattened(), &small.scales, &mut back);
        let values = |bytes: &[u8]| -> Vec<f32> {
            bytes.as_chunks().0.iter().map(|[low, high]| f32::from_le_bytes([0, 0, *low, *high])).collect()
        };
        for (was, is) in values(&weights).chunks(MX_BLOCK).zip(values(&back).chunks(MX_BLOCK)) {
            let largest = was.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
            for (was, is) in was.iter().zip(is) {
                // Half a step of the largest values, which lie 2 apart below 6, and what saturates.
                assert!((was - is).abs() <= largest / 4.0, "{was} became {is}, the largest is {largest}");
            }
        }
        let mut expanding = Expanding::new(&small).unwrap();
        expanding.round();
        let result = expanding.result();
        let names: Vec<_> = result.iter().map(|expanded| expanded.name.as_str()).collect();
        assert_eq!(names, ["MXFP4", "MXFP8", "NVFP4"]);
        assert!(result.iter().all(|expanded| expanded.gbs > 0.0 && expanded.of_memcpy > 0.0));
        assert!(Expanding::new(&pool).is_none());
    }
}
