//! Every row of `golden/views.tsv`, which numpy and `ml_dtypes` have computed; `golden/make.py`
//! states the rules.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

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

/// What is wrong with a row of the file, if its view is not the one that it tells of.
fn check(row: &str, enumerations: &[(Format, Vec<u32>)]) -> Option<String> {
    let [format, elements, spelling, length, sha256] =
        row.split('\t').collect::<Vec<_>>().try_into().expect("five columns");
    let format: Format = format.parse().expect("a format");
    let elements: usize = elements.parse().expect("a count");
    let (_, all) = enumerations.iter().find(|(of, _)| *of == format).expect("every format is there");
    let codes = if elements == all.len() { &all[..] } else { &all[all.len() / 3..][..elements] };
    let row = format!("{format} {spelling} of {elements} elements");
    match view_bytes(format, spelling, &bytes(format, codes), elements as u64) {
        Err(why) => Some(format!("{row}: {why}")),
        Ok(view) if view.len().to_string() != length => {
            Some(format!("{row}: {} bytes, not {length}", view.len()))
        }
        Ok(view) => (Sha256::digest(&view)[..] != from_hex(sha256)).then_some(row),
    }
}

#[test]
fn every_view_has_the_bytes_that_ml_dtypes_and_numpy_compute() {
    let enumerations = Format::ALL.map(|format| (format, enumeration(format)));
    let rows: Vec<_> = GOLDEN.lines().collect();
    let next = AtomicUsize::new(0);
    let check_some = || {
        let mut checked = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(row) = rows.get(at) else { return checked };
            checked.push((at, check(row, &enumerations)));
        }
    };
    let mut checked: Vec<_> = thread::scope(|scope| {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(check_some)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    checked.sort_unstable();
    let rows = checked.len();
    let wrong: Vec<_> = checked.into_iter().filter_map(|(_, wrong)| wrong).collect();
    assert_eq!(wrong, Vec::<String>::new());
    assert_eq!(rows, 1094, "views.tsv is not whole");
}
