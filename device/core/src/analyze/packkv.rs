//! What PackKV would make of KV caches: Tables I, II and V of its paper as it counts, and with
//! everything counted that a reader needs, beside KIVI at the same relative scale.
//!
//! The rules:
//! * Ratios are to 16 bits an element, whatever format the caches have.
//! * K and V of a layer are a pair: names that differ only in which side they say. A cache without
//!   the other side is told of and left out.
//! * Whole blocks of 64 tokens are coded, as they lie in the file. What is left at the end is not,
//!   nor is the buffer of 128 to 191 newest tokens that PackKV keeps as they are: no ratio has them
//!   in it.
//! * *As counted by the paper*: payloads, and for each pack its least value and its length, of as
//!   many bits as the layer's greatest value needs. *All counted*: the block's bytes, with scales
//!   and zeros, the order, the header; what K and V share is half each one's.
//! * KIVI's ratio follows from its shape: B bits for each of n values, and 32 bits for each n.
//!   These are 64 tokens of a channel in K, all channels of a token in V. B is what the levels of
//!   the same relative scale need. The same scale is not the same accuracy: KIVI's K has finer
//!   groups.

use std::{
    collections::BTreeMap,
    ops::ControlFlow,
    sync::atomic::{AtomicU64, Ordering},
};

use rayon::prelude::*;
use serde::Serialize;

use super::{AnalyzeError, layers::place, layout_of, report, rounding};
use crate::{
    layout::Layout,
    load::Progress,
    model::{ModelFile, ModelTensor},
};
use lamina_codec::{
    format::Format,
    kv::KvLayout,
    packkv::{Block, Order, PackTokens, Quantized, RelativeScale, Repack, TOKENS, papers_bits},
};

/// The relative scales of K and V.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scales {
    /// Of K.
    pub k: RelativeScale,
    /// Of V.
    pub v: RelativeScale,
}

impl Default for Scales {
    /// The paper's for its Table I: 0.1 and 0.2.
    fn default() -> Self {
        let scale = |scale| RelativeScale::new(scale).expect("between 0.01 and 1");
        Self { k: scale(0.1), v: scale(0.2) }
    }
}

/// All figures.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PackKvReport {
    /// Pairs of K and V.
    pub pairs: usize,
    /// Caches that have no other side.
    pub unpaired: Vec<String>,
    /// Blocks of 64 tokens, of all pairs.
    pub blocks: u64,
    /// Tokens behind the last whole block of each pair.
    pub tokens_left: u64,
    /// Keys.
    pub k: SideReport,
    /// Values.
    pub v: SideReport,
    /// Each way to repack and each length of packs.
    pub ways: Vec<WayReport>,
}

/// What all ways of coding a side share.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SideReport {
    /// The relative scale.
    pub scale: f32,
    /// Elements that were coded.
    pub elements: u64,
    /// The root of the mean square of what quantisation changes, to that of the values.
    pub error: Option<f64>,
    /// Bits of a value in KIVI.
    pub kivi_bits: u32,
    /// KIVI's ratio.
    pub kivi_ratio: Option<f64>,
}

/// The ratios of one way of coding.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WayReport {
    /// How the order is found.
    pub repack: &'static str,
    /// Tokens of a pack.
    pub pack: usize,
    /// K, as the paper counts.
    pub k_paper: Option<f64>,
    /// K, all counted.
    pub k_counted: Option<f64>,
    /// V, as the paper counts.
    pub v_paper: Option<f64>,
    /// V, all counted.
    pub v_counted: Option<f64>,
    /// Both, all counted.
    pub counted: Option<f64>,
}

/// K and V of a layer.
struct Pair<'m> {
    sides: [Side<'m>; 2],
    blocks: u64,
}

struct Side<'m> {
    model: &'m ModelFile,
    tensor: &'m ModelTensor,
    format: Format,
    channels: usize,
}

/// What a pair's blocks came to.
#[derive(Clone, Default)]
struct Sums {
    /// By way: of K and V, and of both.
    ways: Vec<WaySums>,
    /// Of each side: bits of the greatest value, squares of values, squares of what was changed.
    bits: [u32; 2],
    squares: [f64; 2],
    errors: [f64; 2],
}

#[derive(Clone, Copy, Default)]
struct WaySums {
    /// Bits of payloads, of K and V.
    payload: [u64; 2],
    /// Packs.
    packs: [u64; 2],
    /// Bits of the sides, with half of what they share.
    counted: [u64; 2],
}

/// Every way, in the order of the report.
fn ways() -> impl Iterator<Item = (Repack, PackTokens)> {
    Repack::ALL.into_iter().flat_map(|repack| PackTokens::ALL.map(|pack| (repack, pack)))
}

/// Codes the caches of `layout` in `models` in every way, telling `progress` after each block.
///
/// # Errors
/// [`AnalyzeError`]: a file cannot be read, no pair of caches has the layout, a value is not
/// finite, or `progress` stops it.
pub fn packkv(
    models: &[ModelFile],
    layout: KvLayout,
    scales: Scales,
    progress: impl Fn(Progress<'_>) -> ControlFlow<()> + Sync,
) -> Result<PackKvReport, AnalyzeError> {
    let (pairs, unpaired) = pairs(models, layout)?;
    let bytes = |pair: &Pair<'_>| pair.sides.iter().map(Side::block_bytes).sum::<u64>();
    let total = pairs.iter().map(|pair| pair.blocks * bytes(pair)).sum();
    let done = AtomicU64::new(0);
    let mut report = Totals::new();
    for pair in &pairs {
        let sums = (0..pair.blocks)
            .into_par_iter()
            .map(|block| {
                let sums = pair.code(block, scales)?;
                let bytes = done.fetch_add(bytes(pair), Ordering::Relaxed) + bytes(pair);
                let tensor = &pair.sides[0].tensor.name;
                match progress(Progress { tensor, bytes, total }) {
                    ControlFlow::Continue(()) => Ok(sums),
                    ControlFlow::Break(()) => Err(AnalyzeError::Stopped),
                }
            })
            .try_reduce(Sums::default, |sums, more| Ok(sums.with(&more)))?;
        report.add(pair, &sums);
    }
    Ok(report.report(&pairs, unpaired, scales))
}

/// The pairs of caches that have this layout, by name, and the names of those that have no other
/// side.
fn pairs(models: &[ModelFile], layout: KvLayout) -> Result<(Vec<Pair<'_>>, Vec<String>), AnalyzeError> {
    let none = |why| Err(AnalyzeError::NoPair { layout, why });
    if layout.paged.is_some() || layout.stride.is_some_and(|stride| stride != layout.channels) {
        return none("its tokens lie in pages or apart");
    }
    let mut found = BTreeMap::<_, [Option<Side<'_>>; 2]>::new();
    let mut unpaired = Vec::new();
    for model in models {
        for tensor in model.tensors() {
            let format = tensor.format.parse().unwrap_or(Format::Opaque);
            if !rounding::applies(format) || !matches!(layout_of(layout, tensor), Layout::Kv(_)) {
                continue;
            }
            let channels = usize::try_from(layout.channels).expect("32 bits");
            let side = Side { model, tensor, format, channels };
            match (place(&tensor.name).1, both_sides_name(&tensor.name)) {
                ("k", name) => found.entry(name).or_default()[0] = Some(side),
                ("v", name) => found.entry(name).or_default()[1] = Some(side),
                _ => unpaired.push(tensor.name.clone()),
            }
        }
    }
    let mut pairs = Vec::new();
    for sides in found.into_values() {
        match sides {
            [Some(k), Some(v)] => {
                let blocks = (k.tokens() / TOKENS as u64).min(v.tokens() / TOKENS as u64);
                pairs.push(Pair { sides: [k, v], blocks });
            }
            sides => unpaired.extend(sides.into_iter().flatten().map(|side| side.tensor.name.clone())),
        }
    }
    if pairs.iter().all(|pair| pair.blocks == 0) {
        return none(
            "no K and V have its channels and 64 tokens, in fp32, fp16 or bf16, and names that differ only in k and v",
        );
    }
    Ok((pairs, unpaired))
}

/// A tensor's name without what says its side.
fn both_sides_name(name: &str) -> String {
    let is_side = |part: &str| matches!(part, "k" | "key" | "keys" | "v" | "value" | "values");
    let parts = name.split_inclusive(|c: char| !c.is_ascii_alphanumeric());
    let mut kept: Vec<&str> = parts.collect();
    let bare = |part: &str| part.trim_end_matches(|c: char| !c.is_ascii_alphanumeric()).to_owned();
    if let Some(at) = kept.iter().rposition(|part| is_side(&bare(part))) {
        kept.remove(at);
    }
    kept.concat()
}

impl Side<'_> {
    fn row_bytes(&self) -> u64 {
        self.channels as u64 * u64::from(self.format.bits()) / 8
    }

    fn block_bytes(&self) -> u64 {
        self.row_bytes() * TOKENS as u64
    }

    fn tokens(&self) -> u64 {
        self.tensor.length / self.row_bytes()
    }

    fn quantized(&self, block: u64, scale: RelativeScale) -> Result<(Quantized, f64, f64), AnalyzeError> {
        let bytes = usize::try_from(self.block_bytes()).expect("64 rows of 32 bits of channels");
        let mut buffer = vec![0; bytes];
        self.model.read(self.tensor, block * self.block_bytes(), &mut buffer)?;
        let values: Vec<f32> = rounding::values(self.format, &buffer).collect();
        let quantized = Quantized::new(&values, self.channels, scale)
            .map_err(|why| AnalyzeError::PackKv { name: self.tensor.name.clone(), block, why })?;
        let restored = (0..TOKENS).flat_map(|token| quantized.restored(token));
        let (mut squares, mut errors) = (0.0, 0.0);
        for (value, restored) in values.iter().zip(restored) {
            let (value, restored) = (f64::from(*value), f64::from(restored));
            squares += value * value;
            errors += (value - restored) * (value - restored);
        }
        Ok((quantized, squares, errors))
    }
}

impl Pair<'_> {
    fn code(&self, block: u64, scales: Scales) -> Result<Sums, AnalyzeError> {
        let (k, k_squares, k_errors) = self.sides[0].quantized(block, scales.k)?;
        let (v, v_squares, v_errors) = self.sides[1].quantized(block, scales.v)?;
        let ways = ways().map(|(repack, pack)| {
            let order = Order::new(repack, pack, &k, &v);
            let bytes = Block { k: &k, v: &v }.encode(&order, pack).len() as u64;
            let side = |side: &Quantized| {
                let packs = (side.channels() * TOKENS / pack.tokens()) as u64;
                let own = papers_bits(side, &order, pack, side.bits()).div_ceil(8);
                (papers_bits(side, &order, pack, 0), packs, own * 8)
            };
            let (sides, shared) = ([side(&k), side(&v)], bytes * 8);
            let shared = shared - sides[0].2 - sides[1].2;
            WaySums {
                payload: sides.map(|(payload, ..)| payload),
                packs: sides.map(|(_, packs, _)| packs),
                counted: sides.map(|(.., own)| own + shared / 2),
            }
        });
        Ok(Sums {
            ways: ways.collect(),
            bits: [k.bits(), v.bits()],
            squares: [k_squares, v_squares],
            errors: [k_errors, v_errors],
        })
    }
}

impl Sums {
    fn with(mut self, more: &Self) -> Self {
        self.ways.resize(self.ways.len().max(more.ways.len()), WaySums::default());
        for (sums, more) in self.ways.iter_mut().zip(&more.ways) {
            for side in 0..2 {
                sums.payload[side] += more.payload[side];
                sums.packs[side] += more.packs[side];
                sums.counted[side] += more.counted[side];
            }
        }
        for side in 0..2 {
            self.bits[side] = self.bits[side].max(more.bits[side]);
            self.squares[side] += more.squares[side];
            self.errors[side] += more.errors[side];
        }
        self
    }
}

/// Sums of all pairs.
struct Totals {
    /// By way and side: bits as the paper counts, and all.
    ways: Vec<[[u64; 2]; 2]>,
    squares: [f64; 2],
    errors: [f64; 2],
}

impl Totals {
    fn new() -> Self {
        Self { ways: vec![[[0; 2]; 2]; ways().count()], squares: [0.0; 2], errors: [0.0; 2] }
    }

    fn add(&mut self, pair: &Pair<'_>, sums: &Sums) {
        debug_assert_eq!(sums.ways.is_empty(), pair.blocks == 0);
        for (totals, way) in self.ways.iter_mut().zip(&sums.ways) {
            for (side, [paper, counted]) in totals.iter_mut().enumerate() {
                let bits = u64::from(sums.bits[side]);
                let head = bits + u64::from(u64::BITS - bits.leading_zeros());
                *paper += way.payload[side] + way.packs[side] * head;
                *counted += way.counted[side];
            }
        }
        for side in 0..2 {
            self.squares[side] += sums.squares[side];
            self.errors[side] += sums.errors[side];
        }
    }

    fn report(&self, pairs: &[Pair<'_>], unpaired: Vec<String>, scales: Scales) -> PackKvReport {
        let elements = |side: usize| {
            let of = |pair: &Pair<'_>| pair.blocks * (TOKENS * pair.sides[side].channels) as u64;
            pairs.iter().map(of).sum::<u64>()
        };
        let elements = [elements(0), elements(1)];
        let channels = pairs.first().map_or(0, |pair| pair.sides[1].channels as u64);
        let side = |side: usize, scale: RelativeScale, group: u64| {
            let (bits, ratio) = kivi(scale, group);
            let error = (self.squares[side] > 0.0).then(|| (self.errors[side] / self.squares[side]).sqrt());
            SideReport {
                scale: scale.get(),
                elements: elements[side],
                error: report::short(error),
                kivi_bits: bits,
                kivi_ratio: report::short(ratio),
            }
        };
        let ratio =
            |elements: u64, bits: u64| report::short(report::ratio(elements * 16, report::float(bits)));
        let ways = ways().zip(&self.ways).map(|((repack, pack), [k, v])| WayReport {
            repack: repack.name(),
            pack: pack.tokens(),
            k_paper: ratio(elements[0], k[0]),
            k_counted: ratio(elements[0], k[1]),
            v_paper: ratio(elements[1], v[0]),
            v_counted: ratio(elements[1], v[1]),
            counted: ratio(elements[0] + elements[1], k[1] + v[1]),
        });
        PackKvReport {
            pairs: pairs.len(),
            unpaired,
            blocks: pairs.iter().map(|pair| pair.blocks).sum(),
            tokens_left: pairs.iter().map(|pair| pair.sides[0].tokens() - pair.blocks * TOKENS as u64).sum(),
            k: side(0, scales.k, TOKENS as u64),
            v: side(1, scales.v, channels),
            ways: ways.collect(),
        }
    }
}

/// Bits of a value and the ratio of KIVI with groups of so many values.
fn kivi(scale: RelativeScale, group: u64) -> (u32, Option<f64>) {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "1 to 100")]
    let most = (1.0 / scale.get()).round() as u32;
    let bits = u32::BITS - most.leading_zeros();
    (bits, report::ratio(16 * group, report::float(group * u64::from(bits) + 32)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::tests::checkpoint;

    /// Tokens of 32 channels of which each has its own size, bf16.
    fn cache(tokens: usize, seed: u64) -> Vec<u8> {
        let noise = lamina_codec::testing::bytes(seed * 5, tokens * 32 * 2);
        let element = |(at, noise): (usize, &[u8])| {
            let size = f32::from(u8::try_from(at % 32).unwrap()) + 1.0;
            ((f32::from(noise[0]) / 255.0 - 0.5) * size).to_le_bytes()[2..].to_vec()
        };
        noise.chunks(2).enumerate().flat_map(element).collect()
    }

    fn scales() -> Scales {
        Scales::default()
    }

    #[test]
    fn kivis_columns_are_the_papers() {
        let scale = |scale| RelativeScale::new(scale).unwrap();
        // 2 bits in groups of 64 (III-B2); Table V of hidden sizes 1024 and 5120.
        for (scale, group, bits, ratio) in [
            (scale(0.34), 64, 2, 6.4),
            (scale(0.2), 64, 3, 4.57),
            (scale(0.2), 1024, 3, 5.28),
            (scale(0.2), 5120, 3, 5.32),
            (scale(0.68), 1024, 1, 15.52),
            (scale(0.34), 1024, 2, 7.88),
        ] {
            let (got, found) = kivi(scale, group);
            assert_eq!((got, (found.unwrap() * 100.0).round() / 100.0), (bits, ratio));
        }
    }

    #[test]
    fn figures_are_those_of_the_blocks() {
        let (k, v) = (cache(200, 1), cache(200, 2));
        let (_file, model) = checkpoint(&[
            ("layers.0.k", "BF16", &[200, 32], k.clone()),
            ("layers.0.v", "BF16", &[200, 32], v.clone()),
            ("layers.1.k", "BF16", &[200, 32], k.clone()),
            ("other", "BF16", &[64, 31], vec![0; 64 * 31 * 2]),
        ]);
        let layout = KvLayout::rows(32, 64);
        let report = packkv(&[model], layout, scales(), |_| ControlFlow::Continue(())).unwrap();
        assert_eq!((report.pairs, report.blocks, report.tokens_left), (1, 3, 8));
        assert_eq!(report.unpaired, ["layers.1.k"]);
        let values = |bytes: &[u8], block: usize| -> Vec<f32> {
            rounding::values(Format::Bf16, &bytes[block * 64 * 64..][..64 * 64]).collect()
        };
        for (way, (repack, pack)) in report.ways.iter().zip(ways()) {
            assert_eq!((way.repack, way.pack), (repack.name(), pack.tokens()));
            let mut bits = 0;
            for block in 0..3 {
                let k = Quantized::new(&values(&k, block), 32, scales().k).unwrap();
                let v = Quantized::new(&values(&v, block), 32, scales().v).unwrap();
                bits += Block { k: &k, v: &v }.encode(&Order::new(repack, pack, &k, &v), pack).len() * 8;
            }
            let want = report::short(report::ratio(2 * 3 * 64 * 32 * 16, report::float(bits as u64)));
            assert_eq!(way.counted, want);
            // The paper leaves out what a reader needs.
            assert!(way.k_paper > way.k_counted && way.v_paper > way.v_counted, "{way:?}");
        }
        // What rounding to tenths of each token's range changes, if tenths are not rounded.
        let (mut squares, mut errors) = (0.0, 0.0);
        for row in (0..3).flat_map(|block| values(&k, block)).collect::<Vec<_>>().chunks(32) {
            let (least, most) = row.iter().fold((0_f32, 0_f32), |(a, b), x| (a.min(*x), b.max(*x)));
            let step = (most - least) * 0.1;
            for value in row {
                squares += value * value;
                errors += (value - (value / step).round() * step).powi(2);
            }
        }
        let (error, want) = (report.k.error.unwrap(), f64::from((errors / squares).sqrt()));
        assert!((error / want - 1.0).abs() < 0.02, "{error} {want}");
    }

    #[test]
    fn what_is_no_pair_or_not_finite_is_said() {
        let (_file, model) = checkpoint(&[("layers.0.k", "BF16", &[200, 32], cache(200, 1))]);
        let layout = KvLayout::rows(32, 64);
        let go = |_: Progress<'_>| ControlFlow::Continue(());
        let why = packkv(&[model], layout, scales(), go).unwrap_err();
        assert!(matches!(why, AnalyzeError::NoPair { .. }), "{why}");
        let mut k = cache(200, 1);
        k[65 * 64 + 3] = 0x7f;
        k[65 * 64 + 2] = 0xc0;
        let (_file, model) = checkpoint(&[
            ("layers.0.k", "BF16", &[200, 32], k),
            ("layers.0.v", "BF16", &[200, 32], cache(200, 2)),
        ]);
        let why = packkv(&[model], layout, scales(), go).unwrap_err();
        let said = "tensor layers.0.k, block 1 of 64 tokens: token 1 has NaN in channel 1: only finite values can be quantised";
        assert_eq!(why.to_string(), said);
    }

    #[test]
    fn sides_are_found_by_name() {
        assert_eq!(both_sides_name("layers.0.seq.1.k"), both_sides_name("layers.0.seq.1.v"));
        assert_eq!(both_sides_name("past.3.key"), both_sides_name("past.3.value"));
        assert_ne!(both_sides_name("layers.0.k"), both_sides_name("layers.1.v"));
        assert_ne!(both_sides_name("k.0.k"), both_sides_name("v.0.v"));
    }
}
