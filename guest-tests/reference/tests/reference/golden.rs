//! Every row of `golden/views.tsv`, which numpy and `ml_dtypes` have computed; `golden/make.py`
//! states the rules.

use lamina_reference::{Format, view_bytes};
use sha2::{Digest, Sha256};

const GOLDEN: &str = include_str!("../../golden/views.tsv");

/// As `MANTISSAS` in `make.py`.
fn mantissas() -> Vec<u32> {
    let around = |m: u32| [m.wrapping_sub(1), m, m + 1].map(|m| m % (1 << 23));
    let mut all: Vec<u32> = (0..24).flat_map(|k| [1 << k, 3 << k]).flat_map(around).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// The codes of a format's enumeration.
fn enumeration(format: Format) -> Vec<u32> {
    if format != Format::Fp32 {
        return (0..1 << format.bits()).collect();
    }
    let mantissas = mantissas();
    let mut codes: Vec<u32> =
        (0..512).flat_map(|top| mantissas.iter().map(move |m| (top << 23) | m)).collect();
    let mut x = 1u32;
    codes.extend(
        std::iter::repeat_with(|| {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            x
        })
        .take(20_000),
    );
    codes
}

/// The tensor's bytes that hold `codes`.
fn bytes(format: Format, codes: &[u32]) -> Vec<u8> {
    if format.bits() == 4 {
        return codes
            .chunks(2)
            .map(|two| two.iter().enumerate().map(|(i, code)| code << (4 * i)).sum::<u32>().to_le_bytes()[0])
            .collect();
    }
    let bytes = format.bits() as usize / 8;
    codes.iter().flat_map(|code| code.to_le_bytes().into_iter().take(bytes)).collect()
}

/// The bytes that `digits` spell.
fn from_hex(digits: &str) -> Vec<u8> {
    let byte = |at| u8::from_str_radix(&digits[at..at + 2], 16).expect("hexadecimal digits");
    (0..digits.len()).step_by(2).map(byte).collect()
}

#[test]
fn every_view_has_the_bytes_that_ml_dtypes_and_numpy_compute() {
    let enumerations = Format::ALL.map(|format| (format, enumeration(format)));
    let (mut rows, mut wrong) = (0, Vec::new());
    for row in GOLDEN.lines() {
        let [format, elements, spelling, length, sha256] =
            row.split('\t').collect::<Vec<_>>().try_into().expect("five columns");
        let format: Format = format.parse().expect("a format");
        let elements: usize = elements.parse().expect("a count");
        let (_, all) = enumerations.iter().find(|(of, _)| *of == format).expect("every format is there");
        let codes = if elements == all.len() { &all[..] } else { &all[all.len() / 3..][..elements] };
        let view = view_bytes(format, spelling, &bytes(format, codes), elements as u64)
            .unwrap_or_else(|why| panic!("{format} {spelling}: {why}"));
        assert_eq!(view.len().to_string(), length, "{format} {spelling} of {elements} elements");
        if Sha256::digest(&view)[..] != from_hex(sha256) {
            wrong.push(format!("{format} {spelling} of {elements} elements"));
        }
        rows += 1;
    }
    assert_eq!(wrong, Vec::<String>::new());
    assert_eq!(rows, 1094, "views.tsv is not whole");
}
