//! The elements and scales of OCP's Microscaling Formats (MX) 1.0, every code, against the values
//! that its tables give. `ml_dtypes` calls them `float4_e2m1fn`, `float6_e3m2fn`, `float6_e2m3fn`
//! and `float8_e8m0fnu`.

use lamina_reference::{Format, Scales, expanded};

/// The values of the codes without a sign.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
const E3M2: [f32; 32] = [
    0.0, 0.0625, 0.125, 0.1875, // subnormals
    0.25, 0.3125, 0.375, 0.4375, //
    0.5, 0.625, 0.75, 0.875, //
    1.0, 1.25, 1.5, 1.75, //
    2.0, 2.5, 3.0, 3.5, //
    4.0, 5.0, 6.0, 7.0, //
    8.0, 10.0, 12.0, 14.0, //
    16.0, 20.0, 24.0, 28.0,
];
const E2M3: [f32; 32] = [
    0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, // subnormals
    1.0, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875, //
    2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5, 3.75, //
    4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5,
];

/// A power of two, also where single precision has only subnormals.
fn power(exponent: i32) -> f64 {
    2_f64.powi(exponent)
}

/// The values of bf16 codes.
fn values(bytes: &[u8]) -> Vec<f64> {
    let pairs = bytes.as_chunks::<2>().0.iter();
    pairs.map(|[low, high]| f64::from(f32::from_le_bytes([0, 0, *low, *high]))).collect()
}

#[test]
fn every_code_has_the_tables_value() {
    for (format, table) in
        [(Format::Fp4E2m1, &E2M1[..]), (Format::Fp6E3m2, &E3M2[..]), (Format::Fp6E2m3, &E2M3[..])]
    {
        let codes: Vec<u8> = (0..u8::try_from(2 * table.len()).unwrap()).collect();
        let elements = if format.bits() == 4 {
            codes.as_chunks().0.iter().map(|[low, high]| high << 4 | low).collect()
        } else {
            codes.clone()
        };
        let count = codes.len() as u64;
        let shown = values(&expanded(format, &elements, count, count, Scales::Powers(&[127])));
        for (code, value) in shown.iter().enumerate() {
            let want = f64::from(table[code % table.len()]);
            let want = if code < table.len() { want } else { -want };
            assert_eq!(value.to_bits(), want.to_bits(), "{format} {code:#x}: {value}, not {want}");
        }
    }
}

#[test]
fn every_scale_is_its_power_of_two() {
    // 1, and −1.
    for (element, sign) in [(2_u8, 1.0), (10, -1.0)] {
        for scale in 0..=u8::MAX {
            let shown = values(&expanded(Format::Fp4E2m1, &[element], 1, 1, Scales::Powers(&[scale])))[0];
            if scale == u8::MAX {
                assert!(shown.is_nan());
            } else {
                assert_eq!(shown.to_bits(), (sign * power(i32::from(scale) - 127)).to_bits(), "{scale}");
            }
        }
    }
}
