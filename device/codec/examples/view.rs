//! Renders a block of bf16 at lower precision from the planes that takes, and no others.
//!
//! `cargo run -p lamina-codec --example view`

use lamina_codec::{
    BLOCK_BYTES, Codec, Decoder, Encoder,
    block::{Bundle, MAX_BUNDLE},
    format::Format,
    view::View,
};

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = [0; BLOCK_BYTES];
    for (at, word) in words.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let value = f32::from(u16::try_from(at)?).sin();
        word.copy_from_slice(&value.to_le_bytes()[2..]);
    }
    let mut bundle = Bundle::new();
    Encoder::new().block(Format::Bf16, Codec::Tree, &words, &mut bundle);
    let stored = bundle.stored.clone().expect("not all zeros");

    let mut decoder = Decoder::new();
    for spelling in ["full", "e8m3", "fp8_e4m3fn", "fp8_e5m2@2"] {
        let view = View::parse(Format::Bf16, spelling)?;
        // Only these bytes are fetched; noise stands for the others.
        let (mut fetched, mut fetched_bytes) = ([0xa5; MAX_BUNDLE], 0);
        stored.runs(view.mask(), |run| {
            fetched[run.clone()].copy_from_slice(&bundle.bytes()[run.clone()]);
            fetched_bytes += run.len();
        });
        let mut block = [0; BLOCK_BYTES];
        decoder.block(&stored, view.mask(), &fetched, &mut block)?;
        let mut out = Vec::new();
        view.render(&mut block, 0, BLOCK_BYTES / 2, &mut out);
        println!("{spelling}: {} bytes, from {fetched_bytes} of {} stored", out.len(), bundle.bytes().len());
    }
    Ok(())
}
