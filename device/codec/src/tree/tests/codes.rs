//! Streams by codes that are given, written as the format says: any complete code, and those that
//! decoders have ways of their own for.

use proptest::prelude::*;

use super::*;

/// The code lengths of a code of at least two symbols. Splitting any leaf of a complete code gives
/// a complete code.
pub(super) fn complete(splits: &[prop::sample::Index]) -> Vec<u8> {
    let mut lengths = vec![1, 1];
    for split in splits {
        let at = split.index(lengths.len());
        if lengths[at] < 7 {
            lengths[at] += 1;
            lengths.push(lengths[at]);
        }
    }
    lengths
}

/// Writes as the module's documentation says: symbols by their code lengths, those of the window,
/// zero and the escape, and of each element the symbol and the value.
fn written_by_the_book(low: u8, window: &[u8], [zero, escape]: [u8; 2], elements: &[(usize, u8)]) -> Vec<u8> {
    let mut header = u128::from(low) | (window.len() as u128 - 1) << 8;
    header |= u128::from(zero) << 13 | u128::from(escape) << 16;
    window.iter().enumerate().for_each(|(i, length)| header |= u128::from(*length) << (19 + 3 * i));
    let mut stream = header.to_le_bytes()[..(19 + 3 * window.len()).div_ceil(8)].to_vec();
    let lengths = [window, &[zero, escape]].concat();
    let mut symbols: Vec<_> = (0..lengths.len()).filter(|symbol| lengths[*symbol] > 0).collect();
    symbols.sort_by_key(|symbol| lengths[*symbol]);
    let (mut codes, mut code, mut last) = (vec![0; lengths.len()], 0, 0);
    for symbol in symbols {
        code <<= lengths[symbol] - last;
        (codes[symbol], last) = (code, lengths[symbol]);
        code += 1;
    }
    let mut at = 8 * stream.len();
    for level in 0..last {
        for symbol in elements.iter().map(|element| element.0).filter(|symbol| lengths[*symbol] > level) {
            stream.resize(at / 8 + 1, 0);
            stream[at / 8] |= (codes[symbol] >> (lengths[symbol] - 1 - level) & 1) << (at % 8);
            at += 1;
        }
    }
    stream.extend(elements.iter().filter(|element| element.0 > window.len()).map(|element| element.1));
    stream
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn values_by_any_complete_code_come_back(
        format in format(), low in any::<prop::sample::Index>(), splits in prop::collection::vec(any::<prop::sample::Index>(), 0..33),
        extra in any::<[bool; 2]>(), picks in prop::collection::vec(any::<(prop::sample::Index, prop::sample::Index)>(), 2..300), skew in 0_usize..4,
    ) {
        let largest = (1 << joint_planes(format)) - 1;
        let mut window = complete(&splits);
        let extra = extra.map(|wanted| if wanted && window.len() > 1 { window.pop().unwrap() } else { 0 });
        let free = largest + 1 - usize::from(extra[0] > 0);
        if window.len() > free.min(32) {
            return Ok(());
        }
        let low = low.index(free + 1 - window.len()) + usize::from(extra[0] > 0);
        let lengths = [&window[..], &extra].concat();
        let mut symbols: Vec<_> = (0..lengths.len()).filter(|symbol| lengths[*symbol] > 0).collect();
        symbols.sort_by_key(|symbol| lengths[*symbol]);
        let elements: Vec<_> = (0..8 * format.plane_bytes()).map(|element| {
            let (symbol, value) = picks[(element + element / picks.len()) % picks.len()];
            // Short codes more often, if it is skewed.
            let most = symbols.len() >> (element.trailing_ones() as usize * skew).min(7);
            let symbol = symbols[symbol.index(most.max(1))];
            let value = match symbol.checked_sub(window.len()) {
                None => low + symbol,
                Some(0) => 0,
                Some(_) => value.index(largest + 1),
            };
            (symbol, u8::try_from(value).unwrap())
        }).collect();
        let stream = written_by_the_book(u8::try_from(low).unwrap(), &window, extra, &elements);
        let values: Vec<_> = elements.iter().map(|element| element.1).collect();
        prop_assert!(by_the_book(format, &stream) == values);
        for kernel in Kernel::available() {
            prop_assert!(decoded(kernel, format, &stream).as_ref() == Ok(&values), "{kernel:?}");
        }
    }
}

/// The exponents of a block of bf16 that is decoded to words.
fn exponents(kernel: Kernel, stream: &[u8]) -> Result<Vec<u8>, Malformed> {
    let slack = [stream, &[0xa5; SLACK]].concat();
    let (mut words, zeros) = ([0xa5; BLOCK_BYTES], [0; BF16_PLANE]);
    let length = stream.len();
    let mut block = Bf16 {
        stream: &slack,
        length,
        wanted: u8::MAX,
        planes: [&zeros; 8],
        words: &mut words,
        checks: [0; 8],
    };
    kernel.decode_bf16(&mut block, &mut Decoder::default())?;
    Ok(words.as_chunks().0.iter().map(|word| (u16::from_le_bytes(*word) >> 7).to_le_bytes()[0]).collect())
}

/// A stream by a 3+3 code, below which are the lengths `last`, and its values. Symbol number
/// `escape` is the escape, if there are as many. So many elements go on behind the second level and
/// behind the fourth.
pub(in super::super) fn three_and_three(
    last: &[u8],
    escape: usize,
    [second, third]: [usize; 2],
) -> (Vec<u8>, Vec<u8>) {
    let mut window = [&[2, 2, 2, 4, 4, 4], last].concat();
    let extra = [0, if escape < window.len() { window.remove(escape) } else { 0 }];
    let mut symbols: Vec<_> = (0..window.len()).chain((extra[1] > 0).then_some(window.len() + 1)).collect();
    // In code order: of those of a length the escape is the last.
    symbols.sort_by_key(|symbol| *window.get(*symbol).unwrap_or(&extra[1]));
    let mut place = 0;
    let elements: Vec<_> = (0..8 * BF16_PLANE)
        .map(|element| {
            let noise = element.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
            // An odd factor gives each number once.
            let symbol = if element * 811 % 2048 >= second {
                symbols[noise % 3]
            } else {
                place += 1;
                // Of the last ones as many as are wanted.
                let last = third * place / second > third * (place - 1) / second;
                if last { symbols[6 + noise % (symbols.len() - 6)] } else { symbols[3 + noise % 3] }
            };
            // What is escaped is outside the window.
            let value = if symbol < window.len() { 100 + symbol } else { (120 + noise / 64 % 200) % 256 };
            (symbol, u8::try_from(value).unwrap())
        })
        .collect();
    (written_by_the_book(100, &window, extra, &elements), elements.iter().map(|element| element.1).collect())
}

/// 3+3 codes, whatever they have below, each symbol there the escape in turn; so many elements go
/// on that the buffers hold them, or not.
#[test]
fn three_and_three_codes_come_back_however_many_go_on() {
    let last: [&[u8]; 9] = [
        &[5, 5],
        &[5, 6, 6],
        &[5, 6, 7, 7],
        &[5, 7, 7, 7, 7],
        &[6, 6, 6, 6],
        &[6, 6, 6, 7, 7],
        &[6, 6, 7, 7, 7, 7],
        &[6, 7, 7, 7, 7, 7, 7],
        &[7; 8],
    ];
    let going_on = [
        [0, 0],
        [1, 1],
        [63, 9],
        [64, 0],
        [64, 64],
        [500, 100],
        [512, 128],
        [513, 129],
        [570, 110],
        [700, 192],
        [768, 256],
        [768, 257],
        [769, 10],
        [1300, 1],
        [2048, 2048],
    ];
    for (last, going_on) in last.into_iter().flat_map(|last| going_on.map(|going_on| (last, going_on))) {
        for escape in 6..=6 + last.len() {
            let (stream, values) = three_and_three(last, escape, going_on);
            assert!(by_the_book(Format::Bf16, &stream) == values, "{last:?} {escape}");
            for kernel in Kernel::available() {
                let got = exponents(kernel, &stream);
                assert!(got.as_ref() == Ok(&values), "{kernel:?} {last:?} {escape} {going_on:?}");
                // To values they are decoded in the general way.
                let got = decoded(kernel, Format::Bf16, &stream);
                assert!(got.as_ref() == Ok(&values), "{kernel:?} {last:?} {escape} {going_on:?}");
                // Bytes behind belong to no escape.
                let longer = [&stream[..], &[0]].concat();
                assert!(exponents(kernel, &longer).is_err(), "{kernel:?} {last:?} {escape}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn damaged_streams_of_three_and_three_codes_are_judged_alike(
        second in 0_usize..1000, third in 0_usize..300, escape in 6_usize..11, cut in prop::option::of(any::<prop::sample::Index>()),
        damage in prop::collection::vec((any::<prop::sample::Index>(), 1_u8..), 0..4), late in any::<bool>(),
    ) {
        let (mut stream, _) = three_and_three(&[5, 6, 7, 7], escape, [second, third.min(second)]);
        // What comes behind the first two levels is where the ways part.
        let from = if late { stream.len().min(521) - 1 } else { 0 };
        for (at, bits) in damage {
            let at = from + at.index(stream.len() - from);
            stream[at] ^= bits;
        }
        if let Some(cut) = cut {
            stream.truncate(from + cut.index(stream.len() - from));
        }
        let want = decoded(Kernel::Portable, Format::Bf16, &stream);
        for kernel in Kernel::available() {
            prop_assert_eq!(&exponents(kernel, &stream), &want, "{:?}", kernel);
            prop_assert_eq!(&decoded(kernel, Format::Bf16, &stream), &want, "{:?}", kernel);
        }
    }
}
