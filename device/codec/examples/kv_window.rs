//! Codes a window of a KV cache: tokens by channels, stored channel by channel, and back.
//!
//! `cargo run -p lamina-codec --example kv_window`

use lamina_codec::{
    BLOCK_BYTES, Codec, Decoder, Encoder,
    block::MAX_BUNDLE,
    format::Format,
    kv::{KvLayout, Shape, WindowDecoder},
    plane::PlaneMask,
};

const CHANNELS: usize = 64;
const TOKENS: usize = 128;

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    // What a cache is like: a channel's values differ little from token to token.
    let mut window = Vec::new();
    for token in 0..TOKENS {
        for channel in 0..CHANNELS {
            let (token, channel) = (f32::from(u16::try_from(token)?), f32::from(u16::try_from(channel)?));
            let value = (channel - 31.5) * 0.25 + (token * 0.7 + channel).sin() * 0.02;
            window.extend_from_slice(&value.to_le_bytes()[2..]);
        }
    }
    let shape = Shape::new(Format::Bf16, &KvLayout::rows(CHANNELS.try_into()?, TOKENS.try_into()?))?
        .ok_or("a window of less than a block")?;
    let mut bundles = Vec::new();
    Encoder::new().window(&shape, 0, Codec::Tree, &window, None, &mut bundles);
    let stored_bytes: usize = bundles.iter().map(|bundle| bundle.bytes().len()).sum();

    let (mask, mut back) = (PlaneMask::all(Format::Bf16), Vec::new());
    let mut decoder = Decoder::new();
    let mut decoder = WindowDecoder::new(&mut decoder, &shape, 0, bundles.len(), mask, &mut back);
    for (block, bundle) in bundles.iter().enumerate() {
        let stored = bundle.stored.as_ref().expect("not all zeros");
        let mut fetched = [0; MAX_BUNDLE];
        fetched[..bundle.bytes().len()].copy_from_slice(bundle.bytes());
        decoder.add(block, stored, decoder.wanted(stored), &fetched)?;
    }
    decoder.finish();
    assert!(back == window);
    println!("{} blocks of {BLOCK_BYTES} bytes in {stored_bytes}, bit-exact", bundles.len());
    Ok(())
}
