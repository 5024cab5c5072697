//! Streams against the format's own words, kernels against each other, and decoders against
//! anything.

pub(super) mod codes;

use proptest::prelude::*;

use super::*;
use crate::{
    BLOCK_BYTES, BlockWords, check, plane,
    survey::survey,
    testing::{bytes, words},
};

const FORMATS: [Format; 11] = [
    Format::Fp32,
    Format::Fp16,
    Format::Bf16,
    Format::Fp8E4m3fn,
    Format::Fp8E5m2,
    Format::Int8,
    Format::Int4,
    Format::Fp4E2m1,
    Format::Fp6E3m2,
    Format::Fp6E2m3,
    Format::E8m0,
];

fn format() -> impl Strategy<Value = Format> {
    prop::sample::select(FORMATS.to_vec())
}

/// The values of a block, most significant plane first.
fn values(format: Format, words: &BlockWords) -> Vec<u8> {
    let mut planes = [0; BLOCK_BYTES];
    plane::split(format, words, &mut planes);
    let (count, bytes) = (joint_planes(format), format.plane_bytes());
    let bit = |plane: usize, element: usize| planes[(1 + plane) * bytes + element / 8] >> (element % 8) & 1;
    (0..8 * bytes)
        .map(|element| (0..count).fold(0, |value, plane| value << 1 | bit(plane, element)))
        .collect()
}

/// A block in which element `e` has `value(e)`.
fn values_of(format: Format, value: impl Fn(usize) -> u8) -> Vec<u8> {
    (0..8 * format.plane_bytes()).map(value).collect()
}

fn encoded(kernel: Kernel, format: Format, values: &[u8]) -> Option<Vec<u8>> {
    let mut out = vec![0xa5; joint_bytes(format) + SLACK];
    kernel
        .encode(format, values, &mut out, &mut Workspace::new().scratch)
        .map(|length| out[..length].to_vec())
}

fn decoded(kernel: Kernel, format: Format, stream: &[u8]) -> Result<Vec<u8>, Malformed> {
    let (mut decoder, slack) = (Decoder::default(), [stream, &[0xa5; SLACK]].concat());
    kernel
        .decode(format, &slack, stream.len(), &mut decoder)
        .map(|()| decoder.workspace.fields.values(format).to_vec())
}

/// Decodes as the module's documentation says, a bit at a time.
fn by_the_book(format: Format, stream: &[u8]) -> Vec<u8> {
    let bit = |at: usize| usize::from(stream[at / 8] >> (at % 8) & 1);
    let field = |at: usize, width: usize| (0..width).map(|i| bit(at + i) << i).sum::<usize>();
    let (low, window) = (field(0, 8), field(8, 5) + 1);
    let mut symbols: Vec<_> = (0..window).map(|i| (field(19 + 3 * i, 3), Some(low + i))).collect();
    symbols.push((field(13, 3), Some(0)));
    symbols.push((field(16, 3), None));
    symbols.retain(|(length, _)| *length > 0);
    symbols.sort_by_key(|(length, _)| *length);
    let mut codes = Vec::new();
    let (mut code, mut last) = (0, 0);
    for (length, value) in symbols {
        code <<= length - last;
        codes.push((length, code, value));
        code += 1;
        last = length;
    }
    assert_eq!(code, 1 << last, "a complete code");

    let elements = 8 * format.plane_bytes();
    let mut prefix = vec![(0, 0); elements];
    let found = |prefix: (usize, usize)| codes.iter().find(|code| (code.0, code.1) == prefix);
    let mut at = 8 * (19 + 3 * window).div_ceil(8);
    for _ in 0..last {
        for prefix in prefix.iter_mut().filter(|prefix| found(**prefix).is_none()) {
            *prefix = (prefix.0 + 1, prefix.1 << 1 | bit(at));
            at += 1;
        }
    }
    let mut escapes = stream[at.div_ceil(8)..].iter();
    let values = prefix
        .iter()
        .map(|prefix| match found(*prefix).expect("a code").2 {
            Some(value) => u8::try_from(value).unwrap(),
            None => *escapes.next().expect("an escape"),
        })
        .collect();
    assert_eq!(escapes.len(), 0);
    values
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn a_stream_means_what_the_format_says(format in format(), words in words()) {
        let values = values(format, &words);
        if let Some(stream) = encoded(Kernel::Portable, format, &values) {
            prop_assert!(stream.len() < joint_bytes(format));
            prop_assert!(by_the_book(format, &stream) == values);
        }
    }

    #[test]
    fn every_kernel_asks_the_same_cost(format in format(), words in words()) {
        let costs: Vec<_> =
            Kernel::available().into_iter().map(|kernel| kernel.cost(format, &words, &mut Workspace::new())).collect();
        prop_assert!(costs.iter().all(|cost| *cost == costs[0] && *cost <= joint_bytes(format)), "{costs:?}");
    }

    #[test]
    fn a_cost_is_near_what_a_stream_takes(low in 1_u8..200, width in 1_u32..5, seed in any::<u64>()) {
        // As exponents are: each smaller one half as frequent, some elements zero.
        let noise = bytes(5 * (seed >> 3), 2 * 2048);
        let mut words = [0; BLOCK_BYTES];
        for (word, [often, zero]) in words.as_chunks_mut().0.iter_mut().zip(noise.as_chunks().0) {
            let exponent = low + u8::try_from(often.leading_zeros() * width).expect("at most 32");
            let value = if *zero == 0 { 0 } else { u16::from(exponent) << 7 };
            *word = value.to_le_bytes();
        }
        let cost = Kernel::Portable.cost(Format::Bf16, &words, &mut Workspace::new());
        let stream = encoded(Kernel::Portable, Format::Bf16, &values(Format::Bf16, &words)).expect("a stream").len();
        prop_assert!(5 * cost > 4 * stream && 4 * cost < 5 * stream, "{cost} {stream}");
    }

    #[test]
    fn every_kernel_gives_the_portable_ones_streams(format in format(), words in words()) {
        let values = values(format, &words);
        let stream = encoded(Kernel::Portable, format, &values);
        for kernel in Kernel::available() {
            prop_assert_eq!(&encoded(kernel, format, &values), &stream, "{:?}", kernel);
            if let Some(stream) = &stream {
                prop_assert!(decoded(kernel, format, stream).as_ref() == Ok(&values), "{:?}", kernel);
            }
        }
    }

    #[test]
    fn every_kernel_counts_the_same(format in format(), words in words()) {
        let values = values(format, &words);
        let counted = |kernel: Kernel| {
            let census = kernel.census(format, &values, &mut Workspace::new().scratch)?;
            let Census { values, counts, found, escapes } = census;
            Some((values[..found].to_vec(), counts[..found].to_vec(), escapes))
        };
        let want = counted(Kernel::Portable);
        for kernel in Kernel::available() {
            prop_assert_eq!(&counted(kernel), &want, "{:?}", kernel);
        }
    }

    #[test]
    fn every_kernel_puts_the_same_words_together(format in format(), words in words(), mask in any::<u32>()) {
        let mut stream = vec![0; joint_bytes(format) + SLACK];
        let Some(length) = Kernel::Portable.encode_block(format, &words, &mut Workspace::new(), &mut stream) else { return Ok(()) };
        let mask = PlaneMask(mask & PlaneMask::all(format).0);
        let (mut split, mut want) = ([0; BLOCK_BYTES], [0; BLOCK_BYTES]);
        plane::split(format, &words, &mut split);
        let planes = plane::select(format, mask, &split);
        plane::join(format, &planes, &mut want);
        for kernel in Kernel::available() {
            let mut got = [0xa5; BLOCK_BYTES];
            kernel.decode_block(format, &stream, length, mask, &planes, &mut got, &mut Decoder::default()).expect("intact");
            prop_assert!(got == want, "{kernel:?}");
        }
    }

    #[test]
    fn every_kernel_codes_a_block_of_bf16_whole(words in words()) {
        let mut split = [0; BLOCK_BYTES];
        plane::split(Format::Bf16, &words, &mut split);
        let (upper, lower) = split.split_at(9 * 256);
        for kernel in Kernel::available() {
            let mut out = vec![0; BLOCK_BYTES + SLACK];
            let mut whole = Whole::default();
            let coded = kernel.encode_bf16(&words, &mut Workspace::new(), &mut out, &mut whole);
            let whole = coded.then_some(whole);
            let stream = encoded(kernel, Format::Bf16, &values(Format::Bf16, &words));
            prop_assert_eq!(whole.as_ref().map(|whole| whole.length), stream.as_ref().map(Vec::len));
            if let Some((whole, stream)) = whole.zip(stream) {
                let want = [&upper[..256], &stream, lower].concat();
                prop_assert!(out[..want.len()] == want, "{kernel:?}");
                let planes = [&upper[..256], lower].concat();
                let checks: Vec<_> = planes.chunks(256).map(check::check).collect();
                prop_assert_eq!(whole.checks.to_vec(), checks, "{:?}", kernel);
                prop_assert_eq!(u32::from(whole.noise), survey(&planes, 256, true).noise, "{:?}", kernel);
            }
        }
    }

    #[test]
    fn values_around_any_centre_come_back(
        format in format(), centre in any::<u8>(), spread in 1_u32..8, strays in prop::collection::vec(any::<(u16, u8)>(), 0..40),
        zeros in 0_usize..5, seed in any::<u32>(),
    ) {
        let largest = (1_usize << joint_planes(format)) - 1;
        let value = |element: usize| {
            if let Some((_, value)) = strays.iter().find(|(at, _)| usize::from(*at) % 4096 == element) {
                return value & u8::try_from(largest).unwrap();
            }
            let hash = (u32::try_from(element).unwrap() ^ seed).wrapping_mul(2_654_435_761);
            if zeros > 0 && element.is_multiple_of(zeros) { return 0 }
            let below = (hash | 1 << (32 - spread)).leading_zeros();
            u8::try_from(usize::from(centre).saturating_sub(below.try_into().unwrap()).min(largest)).unwrap()
        };
        let values = values_of(format, value);
        for kernel in Kernel::available() {
            if let Some(stream) = encoded(kernel, format, &values) {
                prop_assert!(by_the_book(format, &stream) == values);
                prop_assert!(decoded(kernel, format, &stream).as_ref() == Ok(&values), "{:?}", kernel);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn every_kernel_finds_the_checks_of_the_planes_beside_a_stream(words in words(), wanted in any::<u8>()) {
        let mut stream = vec![0; joint_bytes(Format::Bf16) + SLACK];
        let length = Kernel::Portable.encode_block(Format::Bf16, &words, &mut Workspace::new(), &mut stream);
        let Some(length) = length else { return Ok(()) };
        let mut split = [0; BLOCK_BYTES];
        plane::split(Format::Bf16, &words, &mut split);
        let planes: &[[u8; BF16_PLANE]; 16] = split.as_chunks().0.try_into().unwrap();
        let mut beside = [&planes[0]; 8];
        for (beside, plane) in beside.iter_mut().zip(planes.iter().rev()).take(7) {
            *beside = plane;
        }
        let mut checks = beside.map(|plane| check::check(plane));
        checks.reverse();
        for kernel in Kernel::available() {
            let mut got = [0; BLOCK_BYTES];
            let mut block = Bf16 { stream: &stream, length, wanted, planes: beside, words: &mut got, checks: [0; 8] };
            prop_assert_eq!((kernel.decode_bf16(&mut block, &mut Decoder::default()), block.checks), (Ok(()), checks), "{:?}", kernel);
            let mask = 0x807f | u16::from(wanted) << 7;
            let want: Vec<_> = words.as_chunks().0.iter().map(|word| u16::from_le_bytes(*word) & mask).collect();
            let got: Vec<_> = got.as_chunks().0.iter().map(|word| u16::from_le_bytes(*word)).collect();
            prop_assert!(got == want, "{kernel:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn damaged_streams_end_with_planes_or_a_reason(
        written in format(), read in format(), words in words(), cut in any::<prop::sample::Index>(), whole in any::<bool>(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 0..4),
    ) {
        let values = values(written, &words);
        let Some(mut stream) = encoded(Kernel::Portable, written, &values) else { return Ok(()) };
        for (at, byte, in_header) in damage {
            let length = if in_header { stream.len().min(12) } else { stream.len() };
            stream[at.index(length)] ^= byte;
        }
        if !whole {
            stream.truncate(cut.index(stream.len()));
        }
        let want = decoded(Kernel::Portable, read, &stream);
        for kernel in Kernel::available() {
            prop_assert!(decoded(kernel, read, &stream) == want, "{:?}", kernel);
        }
    }

    #[test]
    fn any_complete_code_over_noise_ends_with_planes_or_a_reason(
        format in format(), low in any::<u8>(), merges in prop::collection::vec(any::<prop::sample::Index>(), 1..33),
        noise in prop::collection::vec(any::<u8>(), 0..2100), zero in any::<bool>(), escape in any::<bool>(),
    ) {
        let mut lengths = codes::complete(&merges);
        let extra = [zero, escape].map(|wanted| if wanted && lengths.len() > 1 { lengths.pop().unwrap() } else { 0 });
        lengths.truncate(32);
        let mut bits = u128::from(low) | (lengths.len() as u128 - 1) << 8 | u128::from(extra[0]) << 13 | u128::from(extra[1]) << 16;
        lengths.iter().enumerate().for_each(|(i, length)| bits |= u128::from(*length) << (19 + 3 * i));
        let mut stream = bits.to_le_bytes()[..(19 + 3 * lengths.len()).div_ceil(8)].to_vec();
        stream.extend(noise);
        let want = decoded(Kernel::Portable, format, &stream);
        for kernel in Kernel::available() {
            prop_assert!(decoded(kernel, format, &stream) == want, "{:?}", kernel);
        }
    }
}

#[test]
fn a_single_value_makes_no_stream() {
    for format in FORMATS {
        for kernel in Kernel::available() {
            assert_eq!(encoded(kernel, format, &values_of(format, |_| 3)), None, "{format}");
        }
    }
}

#[test]
fn values_up_to_the_largest_come_back() {
    // Exponents of infinities and of NaN, and of the largest numbers.
    for format in [Format::Fp32, Format::Bf16] {
        for spread in [1, 2, 31, 32] {
            let values = values_of(format, |element| 255 - u8::try_from(element % spread).unwrap());
            let want = encoded(Kernel::Portable, format, &values);
            assert_eq!(want.is_some(), spread > 1, "{format} {spread}");
            for kernel in Kernel::available() {
                assert_eq!(encoded(kernel, format, &values), want, "{kernel:?} {format} {spread}");
                if let Some(stream) = &want {
                    assert_eq!(decoded(kernel, format, stream).as_ref(), Ok(&values), "{kernel:?} {format}");
                }
            }
        }
    }
}

#[test]
fn zeros_far_below_the_other_values_have_a_code() {
    let values =
        values_of(
            Format::Bf16,
            |element| if element.is_multiple_of(2) { 0 } else { 120 + u8::from(element % 4 == 1) },
        );
    let stream = encoded(Kernel::Portable, Format::Bf16, &values).expect("three values");
    // One bit for half of the elements, two for the others; no escapes.
    assert_eq!(stream.len(), (19 + 6_usize).div_ceil(8) + (2048 + 1024) / 8);
    assert_eq!(decoded(Kernel::Portable, Format::Bf16, &stream), Ok(values));
}

#[test]
fn rare_values_are_escaped() {
    // 126 on most, three infinities' exponents and one zero among them.
    let value = |element: usize| match element {
        5 | 900 | 2047 => 255,
        64 => 0,
        _ => 126,
    };
    let values = values_of(Format::Bf16, value);
    for kernel in Kernel::available() {
        let stream = encoded(kernel, Format::Bf16, &values).expect("few values");
        assert_eq!(stream.len(), 3 + 256 + 4);
        assert_eq!(stream[3 + 256..], [255, 0, 255, 255]);
        assert_eq!(decoded(kernel, Format::Bf16, &stream), Ok(values.clone()));
    }
}
#[test]
fn values_far_apart_and_many_of_them_come_back() {
    // NaNs among small values; more values than fit a window; and as many rare ones as can be.
    let nans = values_of(Format::Bf16, |element| {
        if element.is_multiple_of(2) { 255 } else { 100 + u8::try_from(element % 6).unwrap() }
    });
    let wide = values_of(Format::Fp32, |element| u8::try_from(element % 7 * 40).unwrap());
    let rare =
        values_of(
            Format::Bf16,
            |element| if element < 3 * 255 { u8::try_from(element / 3).unwrap() } else { 200 },
        );
    for (format, values) in [(Format::Bf16, nans), (Format::Fp32, wide), (Format::Bf16, rare)] {
        for kernel in Kernel::available() {
            let stream = encoded(kernel, format, &values).expect("shorter than planes");
            assert!(by_the_book(format, &stream) == values);
            assert!(decoded(kernel, format, &stream).as_ref() == Ok(&values), "{kernel:?}");
        }
    }
}

proptest! {
    #[test]
    fn every_kernel_takes_values_out_and_puts_them_back(format in format(), words in words(), mask in any::<u32>()) {
        let mut block = [0; BLOCK_BYTES];
        plane::split(format, &words, &mut block);
        let planes = plane::select(format, PlaneMask(mask), &block);
        let mut want = [0; BLOCK_BYTES];
        plane::join(format, &planes, &mut want);
        for kernel in Kernel::available() {
            let mut fields = Fields::new();
            kernel.take(format, &words, fields.values(format));
            prop_assert!(fields.values(format) == values(format, &words), "{:?}", kernel);
            fields.rest(format, &planes);
            let wanted = mask >> (format.planes() - 1 - joint_planes(format));
            let mut got = [0; BLOCK_BYTES];
            kernel.put(format, &fields, wanted.to_le_bytes()[0], &mut got);
            prop_assert!(got == want, "{:?}", kernel);
        }
    }
}
