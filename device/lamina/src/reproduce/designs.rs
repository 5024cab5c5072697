//! Table III: what the three designs do, seen on three devices that are given the same bytes. And
//! Table III of CXL-NDP: what a KV window has beside its planes.

use anyhow::{Context, Result};
use lamina_codec::block::Stored;
use lamina_codec::format::Format;
use lamina_codec::kv::{Coding, KvLayout, Shape};
use lamina_codec::{Codec, Encoder};
use lamina_device::device::{Device, DeviceConfig};
use lamina_device::layout::Layout;
use lamina_device::load::KV_WINDOW;
use lamina_device::tensor::TensorSpec;
use lamina_store::mode::Mode;

use super::book::{How, Paper, Row, Section};
use super::found::Found;

/// Bytes of each of both tensors.
const BYTES: u64 = 1 << 20;
/// Channels of the KV tensor.
const CHANNELS: u32 = 64;
const WINDOW: u64 = 4 << 20;

/// One device after its work.
pub(super) struct Design {
    name: &'static str,
    /// Whether each load gave what was stored.
    same_bytes: bool,
    /// Bytes stored over bytes given, of weights and of the same values as a KV tensor.
    stored: [f64; 2],
    /// Bytes fetched for the view `e8m3` over those for `full`.
    of_full: f64,
}

/// Values that a channel keeps near to its own, as caches do: bf16, tokens by channels. `above` is
/// how far a channel's exponent is above the least.
fn values(bytes: u64, channels: u32, above: fn(u64) -> u64) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut values = Vec::new();
    for number in 0..bytes / 2 {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let channel = number % u64::from(channels);
        // An exponent of the channel, one less half of the time; sign and mantissa at random.
        let exponent = 110 + above(channel) - (state >> 20 & 1);
        let word = (state >> 40 & 0x807f) | exponent << 7;
        values.extend_from_slice(&u16::try_from(word).unwrap_or(u16::MAX).to_le_bytes());
    }
    values
}

fn spec(name: &str, dpa: u64, layout: Layout) -> TensorSpec {
    TensorSpec {
        name: name.to_owned(),
        dpa: Some(dpa),
        length: BYTES,
        elements: None,
        shape: Vec::new(),
        format: Format::Bf16,
        layout,
        codec: None,
        base: None,
    }
}

/// Gives three devices the same bytes.
pub(super) fn run() -> Result<Vec<Design>> {
    let data = values(BYTES, CHANNELS, |channel| channel / 4);
    let kv = KvLayout::rows(CHANNELS, KV_WINDOW);
    [Mode::Plain, Mode::GComp, Mode::Trace]
        .into_iter()
        .map(|mode| {
            let config = DeviceConfig { mode, codec: Codec::Zstd, ..DeviceConfig::new(WINDOW, 16 << 20) };
            let device = Device::new(config)?;
            device.create_tensor(spec("weights", 0, Layout::Weight))?;
            device.create_tensor(spec("cache", BYTES, Layout::Kv(kv)))?;
            let view = device.create_view("weights", "e8m3")?;
            device.write_base(0, &data)?;
            device.write_base(BYTES, &data)?;
            device.flush(0, WINDOW)?;
            let mut read = vec![0; data.len()];
            let mut same_bytes = true;
            for dpa in [0, BYTES] {
                device.read_base(dpa, &mut read)?;
                same_bytes &= read == data;
            }
            device.read_views(view.offset, &mut read)?;
            let stats = device.stats();
            let tensor = |name: &str| {
                let found = stats.tensors.iter().find(|tensor| tensor.name == name);
                found.with_context(|| format!("the device tells nothing of {name}"))
            };
            let stored = |name: &str| Ok::<_, anyhow::Error>(part(tensor(name)?.stored_bytes, BYTES));
            let seen = stats.views.iter().find(|seen| seen.info.offset == view.offset);
            let seen = seen.context("the device tells nothing of its view")?;
            let full = tensor("weights")?.base.stored_bytes_fetched;
            Ok(Design {
                name: mode.name(),
                same_bytes,
                stored: [stored("weights")?, stored("cache")?],
                of_full: part(seen.traffic.stored_bytes_fetched, full),
            })
        })
        .collect()
}

#[expect(clippy::cast_precision_loss, reason = "a few mebibytes")]
fn part(some: u64, all: u64) -> f64 {
    if all == 0 { 0.0 } else { some as f64 / all as f64 }
}

/// Table III.
pub(super) fn table_iii(found: &Found) -> Section {
    let source = "Three devices of this program, one of each mode, were given the same two \
        mebibytes in this run: bf16 values made up so that each channel keeps to an exponent of \
        its own, once as weights and once as a KV tensor. The codec is zstd.";
    let mut section = Section::new(Paper::Trace, "Table III", "The three designs", source);
    for Design { name, same_bytes, stored, of_full } in &found.designs {
        let measured = |what: &str, unit, ours| {
            Row::new(format!("{name}: {what}"), unit, 0, None).ours(How::Measured, Some(ours))
        };
        section = section.rows([
            measured("loads that gave what was stored", "%", if *same_bytes { 100.0 } else { 0.0 }),
            measured("stored of the weights' bytes", "%", 100.0 * stored[0]),
            measured("stored of the KV tensor's bytes", "%", 100.0 * stored[1]),
            measured("fetched for view e8m3, of what full takes", "%", 100.0 * of_full),
        ]);
    }
    section.note(
        "The paper's ticks: one interface for all; a codec in gcomp and trace; KV grouped by \
            channels, and planes fetched as wanted, in trace alone.",
    )
}

/// Bytes of the headers of a window of differences, all of its blocks together.
fn headers(channels: u32, tokens: u32) -> Result<usize> {
    let data = values(2 * u64::from(channels) * u64::from(tokens), channels, |channel| channel % 16);
    let shape = Shape::new(Format::Bf16, &KvLayout::rows(channels, tokens))?;
    let shape = shape.context("bf16 has no windows")?;
    let mut bundles = Vec::new();
    Encoder::new().window(&shape, 0, Codec::Zstd, &data, Some(Coding::Deltas), &mut bundles);
    Ok(bundles.iter().filter_map(|bundle| bundle.stored.as_ref()).map(Stored::head_bytes).sum())
}

/// CXL-NDP's Table III.
///
/// # Errors
/// The codec does not know the window.
pub(super) fn ndp_table_iii(_: &Found) -> Result<Section> {
    let (channels, tokens) = (128, 256);
    let bytes = u64::try_from(headers(channels, tokens)?)?;
    let all = 2 * u64::from(channels) * u64::from(tokens);
    let source = "Measured in this run: a KV window of 256 tokens by 128 channels, bf16 values made up so that \
        channels side by side have exponents of their own, coded as differences from these. Ours has a \
        header in each of the window's 16 blocks: what the block is, its channels' bases in as few bits as \
        they differ in, and a check. Entries of the index, 64 bytes a block as in TRACE, are not in it.";
    let section = Section::new(Paper::Ndp, "Table III", "What a KV window has beside its planes", source);
    Ok(section
        .rows([
            Row::quoted("header of a block", "B", 0, 12.0),
            Row::quoted("base exponent of a channel", "B", 0, 1.0),
            Row::new("a window of 128 channels and 256 tokens", "B", 0, Some(140.0))
                .ours(How::Measured, Some(part(bytes, 1))),
            Row::new("the same, of the bytes it is for (paper: under 0.1 % at 4 KB)", "%", 2, Some(0.1))
                .ours(How::Measured, Some(100.0 * part(bytes, all))),
        ])
        .note(
            "By the paper's own numbers it is not under 0.1 %: 140 bytes are 3.4 % of 4 KiB, and 0.21 % of the \
                window's 64 KiB.",
        ))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: 16 blocks of 8 channels, whose exponents differ by 7 at most, 3 bits each. A block
    /// has 2 bytes of what it is, 2 of the least base and the bits, 3 of bases and 2 of the check.
    #[test]
    fn a_windows_headers_are_their_bases_and_little_more() {
        assert_eq!(headers(128, 256).unwrap(), 16 * (2 + 2 + 3 + 2));
    }

    /// The paper's ticks.
    #[test]
    fn only_trace_fetches_planes_and_groups_channels() {
        let all = run().unwrap();
        let [plain, gcomp, trace] = &all[..] else { panic!("three designs") };
        assert!(all.iter().all(|design| design.same_bytes));
        assert!(plain.stored.iter().all(|part| (part - 1.0).abs() < 1e-9));
        assert!((gcomp.stored[0] - gcomp.stored[1]).abs() < 1e-9);
        assert!(trace.stored[1] < trace.stored[0] && trace.stored[1] < 0.9 * gcomp.stored[1]);
        assert!(plain.of_full > 0.99 && gcomp.of_full > 0.99 && trace.of_full < 0.8);
    }
}
