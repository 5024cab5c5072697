//! Splits a block of bf16 into its bit-planes and joins some of them again.
//!
//! `cargo run -p lamina-codec --example block`

use lamina_codec::{
    BLOCK_BYTES,
    format::Format,
    plane::{self, PlaneMask},
};

pub(crate) fn main() {
    let mut words = [0; BLOCK_BYTES];
    for (at, word) in words.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        *word = 0x3f80_u16.wrapping_add(u16::try_from(at % 128).expect("a mantissa")).to_le_bytes();
    }
    let mut planes = [0; BLOCK_BYTES];
    plane::split(Format::Bf16, &words, &mut planes);

    let all = PlaneMask::all(Format::Bf16);
    let mut back = [0; BLOCK_BYTES];
    plane::join_block(Format::Bf16, all, &planes, &mut back);
    assert_eq!(back, words, "all planes give every bit");

    // Sign, eight bits of exponent and three of mantissa: the planes of the view e8m3.
    let upper = PlaneMask(0xfff0);
    plane::join_block(Format::Bf16, upper, &planes, &mut back);
    for (full, cut) in words.as_chunks::<2>().0.iter().zip(back.as_chunks::<2>().0) {
        assert_eq!(u16::from_le_bytes(*full) & 0xfff0, u16::from_le_bytes(*cut));
    }
    println!("{} planes of {} bytes; 12 of them give e8m3", 16, BLOCK_BYTES / 16);
}
