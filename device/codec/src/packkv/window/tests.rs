//! Against a reader that takes what is said of the stored bytes word by word, and slowly.

use proptest::prelude::*;

use super::super::{PackTokens, RelativeScale, Repack};
use super::*;
use crate::view::widen_fp16;

const FORMATS: [Format; 2] = [Format::Bf16, Format::Fp16];

/// That of rows of so many channels in windows of so many tokens.
fn made(format: Format, channels: usize, window: u32, packing: Packing) -> Result<WindowPacker, PackKvError> {
    WindowPacker::new(format, u32::try_from(channels).unwrap(), window, packing)
}

fn packer(format: Format, channels: usize, packing: Packing) -> WindowPacker {
    let window = [64, 128, 192, 256].into_iter();
    let found = window.map(|window| made(format, channels, window, packing)).find(Result::is_ok);
    found.expect("channels that fill blocks").unwrap()
}

fn packing() -> impl Strategy<Value = Packing> {
    let scale = prop_oneof![Just(0.01_f32), Just(0.1), Just(1.0), 0.01_f32..1.0];
    let repack = prop::sample::select(Repack::ALL.to_vec());
    (scale, repack, prop::sample::select(PackTokens::ALL.to_vec()))
        .prop_map(|(scale, repack, pack)| Packing { scale: RelativeScale::new(scale).unwrap(), repack, pack })
}

/// Elements of a window: calm ones, and in some rows any bits there are.
fn window(channels: usize, tokens: usize) -> impl Strategy<Value = Vec<u8>> {
    let calm = prop::collection::vec((0x3c00_u16..0x4300, any::<bool>()), channels).prop_map(|row| {
        row.into_iter().map(|(word, minus)| word | u16::from(minus) << 15).collect::<Vec<_>>()
    });
    let wild = prop::collection::vec(any::<u16>(), channels);
    let few = (1_u16..u16::MAX).prop_map(move |word| vec![word; channels]);
    let row = prop_oneof![12 => calm, 1 => wild, 1 => few];
    prop::collection::vec(row, tokens)
        .prop_map(|rows| rows.concat().into_iter().flat_map(u16::to_le_bytes).collect())
}

fn case() -> impl Strategy<Value = (WindowPacker, Vec<u8>)> {
    let shape = prop::sample::select(vec![(32, 64), (32, 128), (64, 64), (16, 128), (8, 256), (96, 64)]);
    (shape, prop::sample::select(FORMATS.to_vec()), packing()).prop_flat_map(
        |((channels, tokens), format, packing)| {
            let packer = made(format, channels, u32::try_from(tokens).unwrap(), packing).unwrap();
            (Just(packer), window(channels, tokens))
        },
    )
}

fn value(format: Format, word: &[u8]) -> f64 {
    let word = u16::from_le_bytes([word[0], word[1]]);
    f64::from(if format == Format::Fp16 { widen_fp16(word) } else { f32::from_bits(u32::from(word) << 16) })
}

fn is_finite(format: Format, row: &[u8]) -> bool {
    row.chunks(2).all(|word| value(format, word).is_finite())
}

/// A string of bits, looked at one by one.
struct Bits<'b>(&'b [u8], usize);

impl Bits<'_> {
    fn take(&mut self, count: u32) -> u32 {
        (0..count).fold(0, |all, at| {
            let bit = self.0[self.1 / 8] >> (self.1 % 8) & 1;
            self.1 += 1;
            all | u32::from(bit) << at
        })
    }
}

fn number(bytes: &[u8]) -> usize {
    bytes.iter().rev().fold(0, |all, byte| all << 8 | usize::from(*byte))
}

/// The values of a window by its documentation; infinite where a token is kept as it is.
fn slow(stored: &[u8]) -> Vec<f64> {
    assert_eq!(stored[0], 1);
    let (groups, channels) = (number(&stored[2..4]), number(&stored[4..8]));
    let (mut values, mut at) = (Vec::new(), 8);
    for _ in 0..groups {
        let (length, kept) = (number(&stored[at..at + 4]), &stored[at + 4..at + 12]);
        let kept = |token: usize| kept[token / 8] >> (token % 8) & 1 == 1;
        at += 12 + (0..64).filter(|token| kept(*token)).count() * channels * 2;
        let block = &stored[at..at + length];
        at += length;
        let (pack, bits) = (usize::from(block[1]), u32::from(block[3]));
        let mut places: Vec<usize> = (0..64).collect();
        let mut from = 8;
        if block[2] == 1 {
            let mut order = Bits(&block[8..56], 0);
            for place in &mut places {
                *place = order.take(6) as usize;
            }
            from = 56;
        }
        let of_token = |token: usize| {
            let at = from + 4 * token;
            let scale = f32::from_bits(u32::try_from(number(&block[at..at + 2])).unwrap() << 16);
            (f64::from(scale), f64::from(i16::from_le_bytes([block[at + 2], block[at + 3]])))
        };
        let mut levels = vec![0; 64 * channels];
        if bits > 0 {
            let lengths = (0..8).find(|count| bits < 1 << count).unwrap();
            let mut packs = Bits(&block[from + 256..], 0);
            let heads: Vec<_> =
                (0..64 / pack * channels).map(|_| (packs.take(bits), packs.take(lengths))).collect();
            for (number, (least, length)) in heads.into_iter().enumerate() {
                for place in 0..pack {
                    let token = places[number / channels * pack + place];
                    levels[token * channels + number % channels] = least + packs.take(length);
                }
            }
        }
        for token in 0..64 {
            let (scale, zero) = of_token(token);
            for level in &levels[token * channels..][..channels] {
                let kept = if kept(token) { f64::INFINITY } else { 0.0 };
                values.push((f64::from(*level) + zero) * scale + kept);
            }
        }
    }
    assert_eq!(at, stored.len());
    values
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn values_come_back_within_the_bound_and_as_a_slow_reader_has_them((packer, window) in case()) {
        let (format, row) = (packer.rows.format, packer.row_bytes());
        let Some(stored) = packer.encode(&window) else { return Ok(()) };
        prop_assert_eq!(&packer.encode(&window).unwrap(), &stored, "the same bytes again");
        let mut back = vec![0; window.len()];
        packer.decode(&stored, &mut back).unwrap();
        let slow = slow(&stored);
        let largest = if format == Format::Fp16 { 65504.0 } else { f64::from(f32::from_bits(0x7f7f_0000)) };
        let last_bit = if format == Format::Fp16 { 2048.0 } else { 256.0 };
        for (token, (was, now)) in window.chunks(row).zip(back.chunks(row)).enumerate() {
            if !is_finite(format, was) {
                prop_assert_eq!(was, now, "token {} is kept as it is", token);
                continue;
            }
            let values = || was.chunks(2).map(|word| value(format, word));
            let (least, most) = (values().fold(f64::MAX, f64::min), values().fold(f64::MIN, f64::max));
            let asked = (most - least) * f64::from(packer.packing.scale.get());
            let step = asked.max(least.abs().max(most.abs()) / 32767.0) * (1.0 + 1.0 / 128.0);
            for (channel, (was, now)) in values().zip(now.chunks(2).map(|word| value(format, word))).enumerate() {
                let bound = step / 2.0 * (1.0 + 1e-6) + now.abs() / last_bit + 2_f64.powi(-24);
                prop_assert!((was - now).abs() <= bound, "{} {} {}", was, now, step);
                let said = slow[token * packer.channels + channel];
                if said.is_finite() {
                    let said = said.clamp(-largest, largest);
                    prop_assert!((said - now).abs() <= said.abs() / last_bit + 2_f64.powi(-25), "{} {}", said, now);
                }
            }
        }
    }

    #[test]
    fn what_came_back_is_packed_to_the_same_values((packer, window) in case()) {
        let Some(stored) = packer.encode(&window) else { return Ok(()) };
        let (mut once, mut twice) = (vec![0; window.len()], vec![0; window.len()]);
        packer.decode(&stored, &mut once).unwrap();
        // A token whose values are all near zero may have become zeros: then it is not full.
        let Some(stored) = packer.encode(&once) else { return Ok(()) };
        packer.decode(&stored, &mut twice).unwrap();
        prop_assert_eq!(once, twice);
    }

    #[test]
    fn a_token_is_what_it_is_whatever_its_neighbours_are(
        (packer, window) in case(), other in 0_u64..1000, token in 0_usize..64,
    ) {
        let row = packer.row_bytes();
        let noise = crate::testing::bytes(other, window.len());
        let mut changed: Vec<u8> = noise.chunks(2).flat_map(|word| [word[0], 0x3c | word[1] & 0x83]).collect();
        changed[token * row..][..row].copy_from_slice(&window[token * row..][..row]);
        let back = |window: &[u8]| {
            let mut back = vec![0; window.len()];
            packer.decode(&packer.encode(window)?, &mut back).unwrap();
            Some(back[token * row..][..row].to_vec())
        };
        if let (Some(one), Some(other)) = (back(&window), back(&changed)) {
            prop_assert_eq!(one, other);
        }
    }

    #[test]
    fn products_are_those_of_what_comes_back(
        (packer, window) in case(),
        factors in prop::collection::vec(-2.0_f32..2.0, 96 + TOKENS),
        part in (0_usize..8, 0_usize..96),
    ) {
        let Some(stored) = packer.encode(&window) else { return Ok(()) };
        let packed = PackedWindow::new(&stored).unwrap();
        let group = &packed.groups()[0];
        let rows: Vec<Vec<f64>> = (0..TOKENS)
            .map(|token| {
                let row = group.kept.iter().find(|(kept, _)| *kept == token);
                let restored = || group.side.unpack().restored(token).map(f64::from).collect();
                row.map_or_else(restored, |(_, row)| row.chunks(2).map(|word| value(packed.format(), word)).collect())
            })
            .collect();
        let channels = part.0.min(packed.channels())..part.1.min(packed.channels());
        let channels = channels.start..channels.end.max(channels.start);
        let dots = group.dot(channels.clone(), &factors[..channels.len()]);
        for (row, dot) in rows.iter().zip(dots) {
            let products = row[channels.clone()].iter().zip(&factors).map(|(value, factor)| value * f64::from(*factor));
            let (want, size): (f64, f64) = products.fold((0.0, 0.0), |(sum, size), one| (sum + one, size + one.abs()));
            if size < 1e30 {
                let largest = row.iter().fold(0.0_f64, |most, value| most.max(value.abs())) * 200.0;
                prop_assert!((f64::from(dot) - want).abs() <= largest * 1e-5 + 1e-30, "{} {}", dot, want);
            } else if want.is_nan() {
                prop_assert!(dot.is_nan());
            }
        }
        if rows.iter().flatten().all(|value| value.abs() < 1e6) {
            let weights: &[f32; TOKENS] = factors[96..].try_into().unwrap();
            let mut out = vec![1.0; channels.len()];
            group.weigh(channels.clone(), weights, &mut out);
            let largest = rows.iter().flatten().fold(0.0_f64, |most, value| most.max(value.abs()));
            for (channel, out) in channels.zip(out) {
                let want: f64 = rows.iter().zip(weights).map(|(row, weight)| row[channel] * f64::from(*weight)).sum();
                prop_assert!((f64::from(out) - 1.0 - want).abs() <= largest * 2e-3 + 1e-4, "{} {}", out, want);
            }
        }
    }

    #[test]
    fn bytes_that_changed_or_end_early_are_another_window_or_an_error(
        (packer, window) in case(), at in 0.0_f64..1.0, bit in 0_u8..8,
    ) {
        let Some(mut stored) = packer.encode(&window) else { return Ok(()) };
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "small")]
        let at = (at * stored.len() as f64) as usize;
        let mut back = vec![0; window.len()];
        prop_assert!(packer.decode(&stored[..at], &mut back).is_err());
        prop_assert!(packer.decode(&stored, &mut back[..window.len() - 2]).is_err());
        stored[at] ^= 1 << bit;
        let _ = packer.decode(&stored, &mut back);
        stored.push(0);
        prop_assert!(packer.decode(&stored, &mut back).is_err());
    }

    #[test]
    fn bytes_of_anybody_are_a_window_or_an_error(
        mut bytes in prop::collection::vec(any::<u8>(), 0..2000), valid: bool,
    ) {
        if valid && bytes.len() > 32 {
            bytes[..8].copy_from_slice(&[1, 3, 1, 0, 4, 0, 0, 0]);
            bytes[12..20].fill(0);
            let length = u32::try_from(bytes.len() - 20).unwrap();
            bytes[8..12].copy_from_slice(&length.to_le_bytes());
            let bits = bytes[23] % 8;
            bytes[20..28].copy_from_slice(&[1, 8, 0, bits, 0, 0, 0, 0]);
        }
        if let Ok(window) = PackedWindow::new(&bytes) {
            let query = vec![1.0; window.channels()];
            window.groups().iter().for_each(|group| {
                let _ = group.dot(0..query.len(), &query);
            });
        }
    }
}

#[test]
fn a_window_that_is_not_full_or_gains_nothing_is_not_packed() {
    let packer = packer(Format::Bf16, 32, Packing::default());
    let full: Vec<u8> =
        (0..64 * 64_u32).flat_map(|n| [u8::try_from(n % 251).unwrap(), 0x3f]).take(4096).collect();
    assert!(packer.encode(&full).is_some_and(|stored| stored.len() < 2500));
    for token in [0, 31, 63] {
        let mut gap = full.clone();
        gap[token * 64..][..64].fill(0);
        assert_eq!(packer.encode(&gap), None, "token {token} is zeros");
        gap[token * 64 + 63] = 0x80;
        assert!(packer.encode(&gap).is_some(), "a negative zero was written");
    }
    for length in [0, 64, 4096 - 64, 4096 + 64] {
        let other: Vec<u8> = full.iter().cycle().take(length).copied().collect();
        assert_eq!(packer.encode(&other), None, "{length} bytes");
    }
    // All of it is kept as it is, so that it would be longer.
    assert_eq!(packer.encode(&[0xff; 4096]), None);
}
