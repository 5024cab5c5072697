//! Codes a tensor of bf16 block by block, and reads it back.
//!
//! `cargo run -p lamina-codec --example tensor`

use lamina_codec::{
    BLOCK_BYTES, Codec, Decoder, Encoder,
    block::{Bundle, MAX_BUNDLE},
    format::Format,
    plane::PlaneMask,
};

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    // A million weights between -0.1 and 0.1.
    let mut state = 1_u32;
    let tensor: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        #[expect(clippy::cast_precision_loss, reason = "any number will do")]
        let weight = (state >> 8) as f32 / (1 << 24) as f32 * 0.2 - 0.1;
        [weight.to_le_bytes()[2], weight.to_le_bytes()[3]]
    })
    .take(1 << 20)
    .flatten()
    .collect();

    let (mut encoder, mut decoder) = (Encoder::new(), Decoder::new());
    let (mut bundle, mut stored_bytes) = (Bundle::new(), 0);
    for words in tensor.as_chunks::<BLOCK_BYTES>().0 {
        encoder.block(Format::Bf16, Codec::Tree, words, &mut bundle);
        // What is kept of a block: the description, and as many bytes as it says. A block of zeros
        // is none.
        let stored = bundle.stored.clone().expect("not all zeros");
        stored_bytes += bundle.bytes().len();

        let mut fetched = [0; MAX_BUNDLE];
        fetched[..bundle.bytes().len()].copy_from_slice(bundle.bytes());
        let mut back = [0; BLOCK_BYTES];
        decoder.block(&stored, PlaneMask::all(Format::Bf16), &fetched, &mut back)?;
        assert_eq!(back, *words);
    }
    println!("{} bytes in {stored_bytes}, bit-exact", tensor.len());
    Ok(())
}
