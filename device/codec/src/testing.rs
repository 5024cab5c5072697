//! What tests of this crate and of those above it share.

use proptest::prelude::*;

use crate::{BLOCK_BYTES, BlockWords};

/// The same bytes for the same seed: noise, or values of `width` bytes that look like a cache's.
pub fn bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    (0..length)
        .map(|at| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let noise = state.to_be_bytes()[0];
            match seed % 5 {
                0 => noise,
                1 => 0,
                2 if at % 2 == 1 => 0x3c | noise & 0x83,
                // NaN, infinities, zeros of both signs, subnormals of several formats.
                3 => [0, 1, 0x80, 0xff, 0x7f, 0x7c][usize::from(noise % 6)],
                _ => noise & 0x11,
            }
        })
        .collect()
}

/// Blocks from noise to nearly constant, so that every way of storing a plane occurs.
pub fn words() -> impl Strategy<Value = Box<BlockWords>> {
    let noise = prop::collection::vec(any::<u8>(), BLOCK_BYTES);
    let few = (any::<[u8; 4]>(), prop::collection::vec(0_usize..4, BLOCK_BYTES))
        .prop_map(|(values, picks)| picks.into_iter().map(|pick| values[pick]).collect::<Vec<_>>());
    let runs = prop::collection::vec((any::<u8>(), 1_usize..600), 1..40).prop_map(|runs| {
        let mut bytes: Vec<u8> =
            runs.into_iter().flat_map(|(byte, length)| std::iter::repeat_n(byte, length)).collect();
        bytes.resize(BLOCK_BYTES, 0xff);
        bytes
    });
    let floats = prop::collection::vec(-0.1_f32..0.1, BLOCK_BYTES / 2).prop_map(|values| {
        values.into_iter().flat_map(|value| value.to_le_bytes()[2..].to_vec()).collect::<Vec<_>>()
    });
    prop_oneof![noise, few, runs, floats].prop_map(|bytes| bytes.try_into().unwrap())
}

/// Spellings a person might try, most of which some format gives and some none.
pub fn spelling() -> impl Strategy<Value = String> {
    let fixed = [
        "full",
        "bf16",
        "fp8_e4m3fn",
        "fp8_e5m2",
        "int4",
        "int2",
        "e08m1",
        "full:packed",
        "int4:packed",
        "e8m3:Packed",
        "bf16@1",
        "e8",
        "",
    ];
    let guard = || prop_oneof![3 => Just(String::new()), 2 => (0_u32..28).prop_map(|g| format!("+g{g}"))];
    let exponent_guard =
        prop_oneof![3 => Just(""), 2 => prop::sample::select(vec!["+d0", "+d1", "+d2", "+d3"])];
    let packed = prop_oneof![Just(""), Just(":packed")];
    prop_oneof![
        2 => prop::sample::select(fixed.to_vec()).prop_map(str::to_owned),
        6 => (0_u32..10, 0_u32..25, exponent_guard, guard(), packed)
            .prop_map(|(e, m, d, g, p)| format!("e{e}m{m}{d}{g}{p}")),
        3 => (prop::sample::select(vec!["bf16", "fp8_e4m3fn", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1"]), guard(),
              prop_oneof![Just(String::new()), (-70_i32..70).prop_map(|s| format!("@{s}"))])
            .prop_map(|(target, guard, scale)| format!("{target}{guard}{scale}")),
    ]
}
