//! Against what is said of it, step by step and slowly.

use proptest::prelude::*;

use super::*;

/// Values of 64 tokens.
fn values(channels: usize) -> impl Strategy<Value = Vec<f32>> {
    let number = prop_oneof![
        8 => -4.0_f32..4.0,
        2 => Just(0.0_f32),
        1 => Just(-0.0_f32),
        1 => any::<u16>().prop_map(|bits| f32::from_bits(u32::from(bits) << 16)),
        1 => any::<f32>(),
    ];
    let finite = number.prop_filter("finite", |number| number.is_finite());
    prop_oneof![
        4 => prop::collection::vec(finite.clone(), channels * TOKENS),
        // Tokens of which each has one value.
        1 => prop::collection::vec(finite, TOKENS)
            .prop_map(move |of| of.iter().flat_map(|value| vec![*value; channels]).collect()),
    ]
}

fn sides() -> impl Strategy<Value = (Vec<f32>, Vec<f32>, [usize; 2])> {
    (1_usize..24, 1_usize..24).prop_flat_map(|(k, v)| (values(k), values(v), Just([k, v])))
}

fn scale() -> impl Strategy<Value = RelativeScale> {
    prop_oneof![Just(0.01_f32), Just(1.0), 0.01_f32..1.0].prop_map(|scale| RelativeScale::new(scale).unwrap())
}

fn pack() -> impl Strategy<Value = PackTokens> {
    prop::sample::select(PackTokens::ALL.to_vec())
}

/// The bits that hold a number, counted.
fn slow_bits(number: u8) -> u64 {
    (0..=8).find(|bits| u32::from(number) < 1 << bits).unwrap()
}

fn slow_size(side: &Quantized, order: &Order, pack: PackTokens, bits: u32) -> u64 {
    let mut sum = 0;
    for tokens in order.places().chunks(pack.tokens()) {
        for channel in 0..side.channels() {
            let values = || tokens.iter().map(|token| side.row(usize::from(*token))[channel]);
            let range = values().max().unwrap() - values().min().unwrap();
            sum += pack.tokens() as u64 * slow_bits(range);
            sum += u64::from(bits) + slow_bits(u8::try_from(bits).unwrap());
        }
    }
    sum
}

proptest! {
    #[test]
    fn a_value_comes_back_within_half_a_scale((k, _, channels) in sides(), scale in scale()) {
        let quantized = Quantized::new(&k, channels[0], scale).unwrap();
        for (token, row) in k.chunks(channels[0]).enumerate() {
            let of = &quantized.tokens()[token];
            let step = f64::from(of.scale());
            let (least, most) = row.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), value| {
                (least.min(f64::from(*value)), most.max(f64::from(*value)))
            });
            // No coarser than asked for, but for what rounding up to a bfloat16 and the zero's bits
            // ask for.
            let asked = ((most - least) * f64::from(scale.get())).max(least.abs().max(most.abs()) / 32767.0);
            prop_assert!(step <= asked * (1.0 + 1.0 / 128.0) + 2_f64.powi(-133), "{step} of {asked}");
            for (value, restored) in row.iter().zip(quantized.restored(token)) {
                let off = (f64::from(*value) - f64::from(restored)).abs();
                prop_assert!(off <= step / 2.0 * (1.0 + 1e-6), "{value} {restored} {step}");
            }
            prop_assert!(quantized.row(token).iter().all(|value| *value <= 101));
        }
    }

    #[test]
    fn a_block_comes_back_as_it_was((k, v, channels) in sides(), scale in scale(), pack in pack()) {
        let k = Quantized::new(&k, channels[0], scale).unwrap();
        let v = Quantized::new(&v, channels[1], scale).unwrap();
        for repack in Repack::ALL {
            let order = Order::new(repack, pack, &k, &v);
            let mut places = *order.places();
            places.sort_unstable();
            prop_assert_eq!(places, *Order::own().places());
            let bytes = Block { k: &k, v: &v }.encode(&order, pack);
            let back = decode(&bytes, channels).unwrap();
            prop_assert_eq!((&back.0, &back.1), (&k, &v));
            // What the paper counts is stored, and what is stored besides is known.
            let besides = HEADER + 2 * TOKENS_BYTES + if order == Order::own() { 0 } else { ORDER_BYTES };
            let mut packs = 0;
            for side in [&k, &v] {
                let bits = side.bits();
                let counted = papers_bits(side, &order, pack, bits);
                prop_assert_eq!(counted, slow_size(side, &order, pack, bits));
                let heads = (TOKENS / pack.tokens() * side.channels()) as u64 * head_bits(bits);
                let bytes = heads.div_ceil(8) + (counted - heads).div_ceil(8);
                packs += if bits == 0 { 0 } else { usize::try_from(bytes).unwrap() };
            }
            prop_assert_eq!(bytes.len(), besides + packs);
        }
    }

    #[test]
    fn products_are_those_of_the_restored_values(
        (k, v, channels) in sides(),
        scale in scale(),
        pack in pack(),
        factors in prop::collection::vec(-2.0_f32..2.0, 24 + TOKENS),
        part in (0.0_f64..1.0, 0.0_f64..1.0),
    ) {
        // Of values that single precision adds up without much loss.
        let calm = |values: Vec<f32>| values.into_iter().map(|value| value.clamp(-100.0, 100.0)).collect::<Vec<_>>();
        let k = Quantized::new(&calm(k), channels[0], scale).unwrap();
        let v = Quantized::new(&calm(v), channels[1], scale).unwrap();
        let order = Order::new(Repack::Greedy, pack, &k, &v);
        let bytes = Block { k: &k, v: &v }.encode(&order, pack);
        let [packed_k, packed_v] = PackedSide::both(&bytes, channels).unwrap();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "small")]
        let at = |part: f64, of: usize| (part * of as f64) as usize;
        let some = |of: usize| {
            let (a, b) = (at(part.0, of + 1), at(part.1, of + 1));
            a.min(b)..a.max(b)
        };
        let range = some(channels[0]);
        let dots = packed_k.dot(range.clone(), &factors[..range.len()]);
        for (token, dot) in dots.into_iter().enumerate() {
            let row: Vec<_> = k.restored(token).collect();
            let products = row[range.clone()].iter().zip(&factors);
            let want: f64 = products.map(|(value, factor)| f64::from(*value) * f64::from(*factor)).sum();
            prop_assert!((f64::from(dot) - want).abs() < 0.05, "{dot} {want}");
        }
        let range = some(channels[1]);
        let weights: &[f32; TOKENS] = factors[24..].try_into().unwrap();
        let mut out = vec![1.0; range.len()];
        packed_v.weigh(range.clone(), weights, &mut out);
        for (channel, out) in range.zip(out) {
            let rows = (0..TOKENS).map(|token| v.restored(token).nth(channel).unwrap());
            let want: f64 = rows.zip(weights).map(|(value, weight)| f64::from(value) * f64::from(*weight)).sum();
            prop_assert!((f64::from(out) - 1.0 - want).abs() < 0.2, "{out} {want}");
        }
    }

    #[test]
    fn bytes_of_anybody_are_a_block_or_an_error(
        bytes in prop::collection::vec(any::<u8>(), 0..1200),
        valid in any::<bool>(),
        channels in (0_usize..40, 0_usize..40),
    ) {
        let mut bytes = bytes;
        if valid && bytes.len() >= HEADER {
            let header = [1, 8, 0, bytes[3] % 8, bytes[4] % 8, 0, 0, 0];
            bytes[..HEADER].copy_from_slice(&header);
        }
        if let Ok((k, v)) = decode(&bytes, [channels.0, channels.1]) {
            prop_assert_eq!((k.channels(), v.channels()), channels);
        }
    }

    #[test]
    fn a_block_with_a_bit_changed_or_cut_is_another_one_or_an_error(
        (k, v, channels) in sides(), at in 0.0_f64..1.0, bit in 0_u8..8,
    ) {
        let scale = RelativeScale::new(0.1).unwrap();
        let k = Quantized::new(&k, channels[0], scale).unwrap();
        let v = Quantized::new(&v, channels[1], scale).unwrap();
        let pack = PackTokens::new(16).unwrap();
        let bytes = Block { k: &k, v: &v }.encode(&Order::new(Repack::Median, pack, &k, &v), pack);
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "small")]
        let at = (at * bytes.len() as f64) as usize;
        prop_assert!(decode(&bytes[..at], channels).is_err());
        let mut changed = bytes.clone();
        changed[at] ^= 1 << bit;
        if let Ok(other) = decode(&changed, channels) {
            // Only an order has more than one way to be written, if tokens are alike.
            prop_assert!(other != (k, v) || at < HEADER + ORDER_BYTES);
        }
        let longer = [&bytes[..], &[0]].concat();
        prop_assert_eq!(
            decode(&longer, channels),
            Err(PackKvError::Length { bytes: longer.len(), expected: bytes.len() })
        );
    }
}

#[test]
fn a_hand_computed_token() {
    // 64 tokens of 5 channels, spans of 8 in steps of 0.8: the scale is 0.8 rounded up.
    let row = [-3.0, -1.0, 0.0, 2.0, 5.0];
    let values: Vec<f32> = row.repeat(TOKENS);
    let quantized = Quantized::new(&values, 5, RelativeScale::new(0.1).unwrap()).unwrap();
    let token = &quantized.tokens()[0];
    assert_eq!((token.scale(), token.zero), (0.800_781_25, -4));
    // −3.75 → −4, −1.25 → −1, 0, 2.5 → 2, 6.24 → 6, each less the zero.
    assert_eq!(quantized.row(0), [0, 3, 4, 6, 10]);
    assert_eq!(quantized.bits(), 4);
    // Each pack has one value 64 times, so 4 bits for it and 3 for the length, 0.
    let pack = PackTokens::new(16).unwrap();
    assert_eq!(papers_bits(&quantized, &Order::own(), pack, 4), 5 * 4 * 7);
}

#[test]
fn greedy_puts_like_tokens_together_and_takes_the_fewest_bits() {
    // Every fourth token is large: together they make packs of one value.
    let values: Vec<f32> =
        (0..TOKENS).flat_map(|n| if n % 4 == 0 { [8.0, 0.0] } else { [0.0, 8.0] }).collect();
    let k = Quantized::new(&values, 2, RelativeScale::new(0.1).unwrap()).unwrap();
    for pack in PackTokens::ALL {
        let sizes =
            Repack::ALL.map(|repack| papers_bits(&k, &Order::new(repack, pack, &k, &k), pack, k.bits()));
        let heads = (TOKENS / pack.tokens() * 2) as u64 * (4 + 3);
        assert_eq!(sizes[1], heads, "packs of {}", pack.tokens());
        assert!(sizes[0] > sizes[1], "{sizes:?}");
    }
}

#[test]
fn what_is_no_block_is_refused_with_its_numbers() {
    let scale = RelativeScale::new(0.1).unwrap();
    for bad in [0.0, 0.009, 1.01, -1.0, f32::NAN] {
        assert!(RelativeScale::new(bad).is_err(), "{bad}");
    }
    assert_eq!(PackTokens::new(5), Err(PackKvError::Pack(5)));
    assert_eq!(Quantized::new(&[0.0; 65], 1, scale), Err(PackKvError::Values { values: 65, channels: 1 }));
    assert_eq!(Quantized::new(&[], 0, scale), Err(PackKvError::Values { values: 0, channels: 0 }));
    let mut values = vec![0.0; TOKENS * 3];
    values[7] = f32::INFINITY;
    let refused = PackKvError::NotFinite { token: 2, channel: 1, value: f32::INFINITY };
    assert_eq!(Quantized::new(&values, 3, scale), Err(refused));
}

proptest! {
    #[test]
    fn every_kernel_has_the_same_levels_and_products(
        (k, _, channels) in sides(),
        scale in scale(),
        pack in pack(),
        factors in prop::collection::vec(-2.0_f32..2.0, 24 + TOKENS),
    ) {
        let k: Vec<f32> = k.into_iter().map(|value| value.clamp(-100.0, 100.0)).collect();
        let k = Quantized::new(&k, channels[0], scale).unwrap();
        let none = Quantized::none();
        let order = Order::new(Repack::Greedy, pack, &k, &none);
        let bytes = Block { k: &k, v: &none }.encode(&order, pack);
        let [side, other] = PackedSide::both(&bytes, [channels[0], 0]).unwrap();
        prop_assert_eq!(other.unpack(), none);
        let weights: &[f32; TOKENS] = factors[24..].try_into().unwrap();
        let all = 0..channels[0];
        let products = |kernel: Kernel| {
            let mut out = vec![0.0; channels[0]];
            side.weigh_by(kernel, all.clone(), weights, &mut out);
            (side.dot_by(kernel, all.clone(), &factors[..channels[0]]), out)
        };
        let want = products(Kernel::Portable);
        for kernel in Kernel::available() {
            prop_assert_eq!(&side.unpack_by(kernel), &k, "{:?}", kernel);
            let got = products(kernel);
            let pairs = got.0.iter().zip(&want.0).chain(got.1.iter().zip(&want.1));
            for (got, want) in pairs {
                prop_assert!((got - want).abs() <= 1e-3 + want.abs() * 1e-4, "{kernel:?}: {got} {want}");
            }
        }
    }
}
