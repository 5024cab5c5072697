//! Kernels against the definition, byte by byte, and the errors that a check must find.

use proptest::prelude::*;

use super::*;

/// The product in the field, bit by bit.
fn product(a: u8, b: u8) -> u8 {
    let (mut a, mut b, mut sum) = (u16::from(a), b, 0);
    while b > 0 {
        if b & 1 == 1 {
            sum ^= a;
        }
        b >>= 1;
        a <<= 1;
        if a & 0x100 != 0 {
            a ^= 0x11b;
        }
    }
    u8::try_from(sum).unwrap()
}

/// α^e(p), from the text of the format.
fn coefficient(p: usize) -> u8 {
    let (row, word, byte) = (p / 64, p / 8 % 8, p % 8);
    let reversed = [0, 4, 2, 6, 1, 5, 3, 7][word];
    (0..row + 4 * reversed + 32 * byte).fold(1, |power, _| product(power, 3))
}

fn reference(plane: &[u8]) -> u16 {
    let mut syndromes = [0, 0];
    for (p, byte) in plane.iter().enumerate() {
        syndromes[0] ^= byte;
        syndromes[1] ^= product(*byte, coefficient(p));
    }
    u16::from_le_bytes(syndromes)
}

#[test]
fn the_coefficients_differ_but_for_the_first_and_the_last_of_256() {
    let coefficients: Vec<_> = (0..256).map(coefficient).collect();
    for (a, first) in coefficients.iter().enumerate() {
        for (b, second) in coefficients.iter().enumerate().skip(a + 1) {
            assert_eq!(first == second, (a, b) == (0, 255), "bytes {a} and {b}");
        }
    }
}

/// One kernel's check of one plane.
fn one(kernel: Kernel, plane: &[u8]) -> u16 {
    let mut check = [0x5a5a];
    let length = u16::try_from(plane.len()).unwrap();
    kernel.checks(plane, &[Span { start: 0, length }], &mut check);
    check[0]
}

#[test]
fn every_error_in_one_byte_is_found() {
    // What an error adds to a check does not depend on the data: it is the check of the error
    // alone.
    let mut error = [0; 1024];
    for at in 0..error.len() {
        for value in 1..=255 {
            error[at] = value;
            let want = u16::from_le_bytes([value, product(value, coefficient(at))]);
            for kernel in Kernel::available() {
                let got = one(kernel, &error);
                assert_eq!(got, want, "{kernel:?}, {value:#x} at {at}");
                assert_ne!(got, 0, "{kernel:?}, {value:#x} at {at}");
            }
        }
        error[at] = 0;
    }
}

#[test]
fn every_error_in_two_of_255_bytes_is_found() {
    // Two errors in one byte each hide each other if they add the same to the check: no two may.
    for kernel in Kernel::available() {
        let mut by = vec![None; 1 << 16];
        let mut error = [0; 255];
        for at in 0..error.len() {
            for value in 1..=255 {
                error[at] = value;
                let other = by[usize::from(one(kernel, &error))].replace((at, value));
                assert_eq!(other, None, "{kernel:?}, {value:#x} at {at}");
            }
            error[at] = 0;
        }
    }
}

#[test]
fn a_changed_run_of_equal_bytes_is_found() {
    // A line that reads as its inverse, or shifted by a constant: aligned, so that sums of many
    // equal changes could cancel.
    for length in [2, 4, 8, 16, 32, 64, 128] {
        for start in (0..256).step_by(length) {
            for value in 1..=255 {
                let mut error = [0; 256];
                error[start..start + length].fill(value);
                assert_ne!(check(&error), 0, "{length} bytes of {value:#x} at {start}");
            }
        }
    }
}

proptest! {
    #[test]
    fn all_kernels_agree_with_the_definition(
        bundle in prop::collection::vec(any::<u8>(), 0..4161),
        places in prop::collection::vec((any::<prop::sample::Index>(), 0_usize..1025), 0..33),
        changes in prop::collection::vec(prop_oneof![Just(0), any::<u16>()], 32),
    ) {
        let planes: Vec<Span> = places
            .into_iter()
            .map(|(start, length)| {
                let start = start.index(bundle.len() + 1);
                let length = length.min(bundle.len() - start);
                Span { start: u16::try_from(start).unwrap(), length: u16::try_from(length).unwrap() }
            })
            .collect();
        let want: Vec<_> = planes.iter().map(|plane| reference(&bundle[plane.range()])).collect();
        for kernel in Kernel::available() {
            let mut got = vec![0x5a5a; planes.len()];
            kernel.checks(&bundle, &planes, &mut got);
            prop_assert_eq!(&got, &want, "{:?}", kernel);
            prop_assert_eq!(kernel.differ(&bundle, &planes, &want), 0, "{:?}", kernel);
            let others: Vec<_> = want.iter().zip(&changes).map(|(check, change)| check ^ change).collect();
            let differ = changes[..planes.len()].iter().rev().fold(0, |bits, change| bits << 1 | u32::from(*change > 0));
            prop_assert_eq!(kernel.differ(&bundle, &planes, &others), differ, "{:?}", kernel);
        }
        let mut got = vec![0x5a5a; planes.len()];
        checks(&bundle, &planes, &mut got);
        prop_assert_eq!(&got, &want);
        prop_assert_eq!(differ(&bundle, &planes, &want), 0);
    }
}

#[test]
#[should_panic(expected = "range end index 65 out of range")]
fn a_plane_outside_the_bundle_is_refused() {
    checks(&[0; 64], &[Span { start: 1, length: 64 }], &mut [0]);
}
