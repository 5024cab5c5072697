//! What a view makes of one element. An element is its bits, in the low end of a `u32`.

use std::cmp::Ordering;

use crate::Format;

/// Ones in the `count` bits from bit `from` up.
fn ones(from: u32, count: u32) -> u32 {
    (from..from + count).map(|bit| 1 << bit).sum()
}

/// The bit of the sign.
fn sign_bit(format: Format) -> u32 {
    ones(format.exponent_bits() + format.mantissa_bits(), 1)
}

/// The bits of the `count` most significant exponent bits.
fn top_exponent(format: Format, count: u32) -> u32 {
    ones(format.mantissa_bits() + format.exponent_bits() - count, count)
}

/// The bits of the `count` most significant mantissa bits.
fn top_mantissa(format: Format, count: u32) -> u32 {
    ones(format.mantissa_bits() - count, count)
}

/// `x` with its sign, `exponent` exponent bits and `mantissa` mantissa bits, the other bits zero;
/// rounded from `guards` more mantissa bits if there are any.
pub(crate) fn top(format: Format, exponent: u32, mantissa: u32, guards: u32, x: u32) -> u32 {
    let truncated = x & (sign_bit(format) | top_exponent(format, exponent) | top_mantissa(format, mantissa));
    let all_exponent = top_exponent(format, format.exponent_bits());
    if guards == 0 || x & all_exponent == all_exponent {
        return truncated;
    }
    let fetched = mantissa.saturating_add(guards).min(format.mantissa_bits());
    let number = x & (all_exponent | top_mantissa(format, fetched));
    let step = 1 << (format.mantissa_bits() - mantissa);
    let below = number - number % step;
    let above = below + step;
    let nearest = match (number - below).cmp(&(above - number)) {
        Ordering::Less => below,
        Ordering::Equal if (below / step).is_multiple_of(2) => below,
        Ordering::Equal | Ordering::Greater => above,
    };
    (x & sign_bit(format)) | nearest
}

/// `x` with its exponent's field at the nearest multiple of what its `exponent` uppermost bits
/// count in, or at the largest.
pub(crate) fn round_exponent(format: Format, exponent: u32, x: u32) -> u32 {
    let all_exponent = top_exponent(format, format.exponent_bits());
    let field = (x & all_exponent) >> format.mantissa_bits();
    let step = 1 << (format.exponent_bits() - exponent);
    let multiples = (0..1_u32 << exponent).map(|count| count * step);
    let nearest = multiples
        .min_by_key(|multiple| (multiple.abs_diff(field), multiple / step % 2))
        .expect("zero is one");
    (x & !all_exponent) | nearest << format.mantissa_bits()
}

/// The kept bits of `x` moved together: sign uppermost, then `exponent` exponent and `mantissa`
/// mantissa bits.
pub(crate) fn pack(format: Format, exponent: u32, mantissa: u32, x: u32) -> u32 {
    let kept = [sign_bit(format), top_exponent(format, exponent), top_mantissa(format, mantissa)];
    let mut packed = 0;
    for bit in (0..format.bits()).rev().map(|bit| 1 << bit) {
        if kept.iter().any(|field| field & bit != 0) {
            packed = packed * 2 + u32::from(x & bit != 0);
        }
    }
    packed
}

/// 2^n, exactly.
fn power_of_two(n: i32) -> f64 {
    let biased = u64::try_from(n + 1023).expect("far from the ends of double precision");
    f64::from_bits(biased << 52)
}

/// Whether an exponent of all ones is infinity or NaN, as IEEE formats have it.
fn has_infinities(format: Format) -> bool {
    !matches!(format, Format::Fp8E4m3fn | Format::Fp4E2m1 | Format::Fp6E3m2 | Format::Fp6E2m3)
}

/// The number that `x` stands for; double precision holds it exactly.
pub(crate) fn value(format: Format, x: u32) -> f64 {
    if format == Format::E8m0 {
        return if x == 0xff { f64::NAN } else { power_of_two(x.cast_signed() - 127) };
    }
    let exponent_field = (x & top_exponent(format, format.exponent_bits())) >> format.mantissa_bits();
    let mantissa_field = x & top_mantissa(format, format.mantissa_bits());
    let all_ones = ones(0, format.exponent_bits());
    let all_mantissa = ones(0, format.mantissa_bits());

    let magnitude =
        if format == Format::Fp8E4m3fn && exponent_field == all_ones && mantissa_field == all_mantissa {
            f64::NAN
        } else if has_infinities(format) && exponent_field == all_ones {
            if mantissa_field == 0 { f64::INFINITY } else { f64::NAN }
        } else {
            let bias = all_ones / 2;
            // An exponent field of zero means no leading one and the same exponent as a field of
            // one.
            let leading = if exponent_field == 0 { 0.0 } else { 1.0 };
            let exponent = exponent_field.max(1).cast_signed() - bias.cast_signed();
            let fraction = f64::from(mantissa_field) / power_of_two(format.mantissa_bits().cast_signed());
            (leading + fraction) * power_of_two(exponent)
        };
    if x & sign_bit(format) == 0 { magnitude } else { -magnitude }
}

/// The finite values without sign of a float format: the value of code 0, of code 1 and so on to
/// the largest.
pub(crate) fn finite_values(format: Format) -> Vec<f64> {
    (0..sign_bit(format)).map(|code| value(format, code)).take_while(|value| value.is_finite()).collect()
}

/// The element `x` of `format`, truncated to `guards` mantissa bits more than `target` has and
/// divided by 2^`scale`, as `target`'s nearest code. `finite` is [`finite_values`] of `target`.
pub(crate) fn convert(
    format: Format,
    target: Format,
    finite: &[f64],
    guards: u32,
    scale: i32,
    x: u32,
) -> u32 {
    let fetched = target.mantissa_bits().saturating_add(guards).min(format.mantissa_bits());
    let truncated = top(format, format.exponent_bits(), fetched, 0, x);
    let stored = value(format, truncated) / power_of_two(scale);
    let sign = if x & sign_bit(format) == 0 { 0 } else { sign_bit(target) };
    sign | if stored.is_nan() { quiet_nan(target) } else { nearest(finite, stored.abs()) }
}

/// The code of the finite value nearest to `magnitude`; of two equally near, the even code.
fn nearest(finite: &[f64], magnitude: f64) -> u32 {
    // The values rise with their codes, and value(0) = 0 is never above the magnitude.
    let above = finite.partition_point(|&value| value <= magnitude);
    let below = above - 1;
    let code = if above == finite.len() {
        below
    } else {
        // Neighbours have few significant bits, so their middle is exact, as is everything compared
        // with it.
        let middle = f64::midpoint(finite[below], finite[above]);
        match magnitude.total_cmp(&middle) {
            Ordering::Less => below,
            Ordering::Equal if below.is_multiple_of(2) => below,
            Ordering::Equal | Ordering::Greater => above,
        }
    };
    u32::try_from(code).expect("a code has at most 16 bits")
}

/// The NaN that `ml_dtypes` writes, without its sign; the largest number where there is none.
fn quiet_nan(target: Format) -> u32 {
    match target {
        // Its only one: every bit set.
        Format::Fp8E4m3fn => ones(0, 7),
        Format::Fp4E2m1 | Format::Fp6E3m2 | Format::Fp6E2m3 => {
            ones(0, target.exponent_bits() + target.mantissa_bits())
        }
        // All of the exponent and the uppermost bit of the mantissa.
        _ => top_exponent(target, target.exponent_bits()) | top_mantissa(target, 1),
    }
}
