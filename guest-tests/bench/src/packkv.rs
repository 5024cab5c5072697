//! Attention's products with packed KV caches: fused, beside values that are unpacked first.
//!
//! The rules:
//! * K and V are those of the bundled cache: a token's row is all its layers side by side, again
//!   and again until it has [`CHANNELS`]. Heads have [`HEAD`] channels.
//! * Both sides begin with the same packed bytes, which are looked through and checked before
//!   ("opened"), as once for a sequence; a column says what that takes. Unpacking first writes
//!   every value to memory, and multiplies then.
//! * Each kernel that this processor can run is measured, but the portable one where there is
//!   another: it multiplies packs, and unpacks them. What is unpacked is multiplied by the best way
//!   that there is.
//! * One thread. All take turns, and medians are over all rounds. What they give is compared.

use std::{hint::black_box, path::Path, time::Instant};

use anyhow::{Context, Result, ensure};
use comfy_table::Table;
use lamina_codec::{
    format::Format,
    internals::dense,
    packkv::{
        Block, Kernel, Order, PackKvError, PackTokens, PackedSide, Quantized, RelativeScale, Repack, TOKENS,
    },
};
use lamina_device::model::ModelFile;

use crate::{median, table};

/// Channels of a token.
const CHANNELS: usize = 1024;
/// Channels of a head.
const HEAD: usize = 128;
/// The scales of K and V, the paper's.
const SCALES: [f32; 2] = [0.1, 0.2];

/// The products of one side, by packs of so many tokens.
struct Case {
    is_k: bool,
    pack: PackTokens,
    /// What is stored, by 64 tokens.
    stored: Vec<Vec<u8>>,
    /// Seconds of opening.
    opening: Vec<f64>,
    /// Of unpacking and multiplying, and of multiplying packs, by kernel.
    products: Vec<(Kernel, [Vec<f64>; 2])>,
}

/// Measures with the cache in `file`: a table.
///
/// # Errors
/// When the file cannot be read or has no K and V, or products differ.
pub fn run(file: &Path, rounds: usize) -> Result<Table> {
    let mut cases = Vec::new();
    for (is_k, side) in [(true, "k"), (false, "v")] {
        let blocks = blocks(file, side)?;
        for pack in PackTokens::ALL {
            let scale = RelativeScale::new(SCALES[usize::from(!is_k)])?;
            let stored = blocks.iter().map(|values| {
                let (quantized, none) = (Quantized::new(values, CHANNELS, scale)?, Quantized::none());
                let order = Order::new(Repack::Greedy, pack, &quantized, &none);
                Ok(Block { k: &quantized, v: &none }.encode(&order, pack))
            });
            let stored = stored.collect::<Result<_>>()?;
            let products = kernels().into_iter().map(|kernel| (kernel, Default::default())).collect();
            cases.push(Case { is_k, pack, stored, opening: Vec::new(), products });
        }
    }
    for case in &mut cases {
        case.compare()?;
    }
    for _ in 0..rounds {
        cases.iter_mut().try_for_each(Case::round)?;
    }
    let head = [
        "product",
        "pack",
        "kernel",
        "ratio",
        "open µs",
        "unpack, multiply µs",
        "fused µs",
        "times",
        "bytes moved",
    ];
    let mut table = table(&head);
    for case in cases {
        let count = case.stored.len();
        let values = count * TOKENS * CHANNELS;
        let bytes: usize = case.stored.iter().map(Vec::len).sum();
        let open = median(case.opening);
        #[expect(clippy::cast_precision_loss, reason = "to be looked at")]
        let (ratio, per_block) =
            ((2 * values) as f64 / bytes as f64, |seconds: f64| seconds * 1e6 / count as f64);
        // Packs are read, and values in single precision written and read.
        #[expect(clippy::cast_precision_loss, reason = "to be looked at")]
        let moved = (bytes + 8 * values) as f64 / bytes as f64;
        for (kernel, seconds) in case.products {
            let [unpacked, fused] = seconds.map(median);
            table.add_row([
                if case.is_k { "K·q" } else { "w·V" }.to_owned(),
                case.pack.tokens().to_string(),
                format!("{kernel:?}"),
                format!("{ratio:.2}"),
                format!("{:.1}", per_block(open)),
                format!("{:.1}", per_block(unpacked)),
                format!("{:.1}", per_block(fused)),
                format!("{:.1}", unpacked / fused),
                format!("{moved:.1}"),
            ]);
        }
    }
    Ok(table)
}

/// The kernels that are measured: those of this processor, or the portable one if it has none.
fn kernels() -> Vec<Kernel> {
    let all = Kernel::available();
    if all.len() > 1 { all[1..].to_vec() } else { all }
}

/// The values of one side in blocks of 64 tokens.
fn blocks(file: &Path, side: &str) -> Result<Vec<Vec<f32>>> {
    let model = ModelFile::open(file)?;
    let mut layers = Vec::new();
    for tensor in model.tensors().iter().filter(|tensor| tensor.name.ends_with(&format!(".{side}"))) {
        ensure!(tensor.format == Format::Bf16.name(), "{} is no bf16", tensor.name);
        let [tokens, channels] = tensor.shape[..] else { continue };
        let mut bytes = vec![0; usize::try_from(tensor.length)?];
        model.read(tensor, 0, &mut bytes)?;
        let values: Vec<f32> =
            bytes.as_chunks().0.iter().map(|&[a, b]| f32::from_le_bytes([0, 0, a, b])).collect();
        layers.push((usize::try_from(tokens)?, usize::try_from(channels)?, values));
    }
    let tokens = layers.iter().map(|(tokens, ..)| *tokens).min().context("no K and V in the file")?;
    ensure!(tokens >= TOKENS, "{tokens} tokens make no block of {TOKENS}");
    let row = |token: usize| {
        let all =
            layers.iter().flat_map(move |(_, channels, values)| &values[token * channels..][..*channels]);
        all.copied().collect::<Vec<_>>().into_iter().cycle().take(CHANNELS)
    };
    Ok((0..tokens / TOKENS)
        .map(|block| (0..TOKENS).flat_map(|at| row(block * TOKENS + at)).collect())
        .collect())
}

/// The sides of what is stored, looked through and checked.
fn open(stored: &[Vec<u8>]) -> Result<Vec<PackedSide<'_>>, PackKvError> {
    stored.iter().map(|stored| PackedSide::both(stored, [CHANNELS, 0]).map(|[side, _]| side)).collect()
}

impl Case {
    /// Every head's products by both ways.
    fn compare(&self) -> Result<()> {
        let (query, weights) = factors();
        let mut values = vec![0.0; TOKENS * CHANNELS];
        for side in open(&self.stored)? {
            side.restore(&mut values);
            let heads =
                heads().flat_map(|head| kernels().into_iter().map(move |kernel| (head.clone(), kernel)));
            for (head, kernel) in heads {
                let pairs: Vec<(f32, f32)> = if self.is_k {
                    let fused = side.dot_by(kernel, head.clone(), &query);
                    fused.into_iter().zip(dense::dot(&values, CHANNELS, head, &query)).collect()
                } else {
                    let [mut fused, mut unpacked] = [[0.0; HEAD]; 2];
                    side.weigh_by(kernel, head.clone(), &weights, &mut fused);
                    dense::weigh(&values, CHANNELS, head, &weights, &mut unpacked);
                    fused.into_iter().zip(unpacked).collect()
                };
                let size = pairs.iter().fold(1e-3_f32, |most, (_, want)| most.max(want.abs()));
                let differs = pairs.iter().find(|(got, want)| (got - want).abs() > size * 1e-3);
                ensure!(differs.is_none(), "products of {kernel:?} differ: {differs:?}");
            }
        }
        Ok(())
    }

    fn round(&mut self) -> Result<()> {
        let (query, weights) = factors();
        let begun = Instant::now();
        let sides = open(&self.stored)?;
        self.opening.push(begun.elapsed().as_secs_f64());
        let mut values = vec![0.0; TOKENS * CHANNELS];
        let mut out = [0.0; HEAD];
        for (kernel, [unpacking, fused]) in &mut self.products {
            let begun = Instant::now();
            for side in &sides {
                side.restore_by(*kernel, &mut values);
                for head in heads() {
                    if self.is_k {
                        black_box(dense::dot(&values, CHANNELS, head, &query));
                    } else {
                        dense::weigh(&values, CHANNELS, head, &weights, &mut out);
                    }
                }
            }
            unpacking.push(begun.elapsed().as_secs_f64());
            let begun = Instant::now();
            for side in &sides {
                for head in heads() {
                    if self.is_k {
                        black_box(side.dot_by(*kernel, head, &query));
                    } else {
                        side.weigh_by(*kernel, head, &weights, &mut out);
                    }
                }
            }
            fused.push(begun.elapsed().as_secs_f64());
        }
        black_box(out);
        Ok(())
    }
}

/// A head's query, and the weights of tokens.
fn factors() -> ([f32; HEAD], [f32; TOKENS]) {
    let some = |at: usize| f32::from(u8::try_from(at * 37 % 64).expect("less than 64")) / 32.0 - 1.0;
    (std::array::from_fn(some), std::array::from_fn(some))
}

fn heads() -> impl Iterator<Item = std::ops::Range<usize>> {
    (0..CHANNELS / HEAD).map(|head| head * HEAD..(head + 1) * HEAD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_give_the_same_of_the_bundled_cache() {
        let file = lamina_run::bundled_file("stories260K-kv-bf16.safetensors").unwrap();
        let text = run(&file, 1).unwrap().to_string();
        let rows = 3 * kernels().len();
        assert_eq!((text.matches("K·q").count(), text.matches("w·V").count()), (rows, rows), "{text}");
    }
}
