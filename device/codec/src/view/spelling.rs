//! Spellings of views, the same on the command line, in the API and in the directory.
//!
//! `full` · `eXmY[+dN][+gN][:packed]` · `bf16` `fp8_e4m3fn` `fp8_e5m2` `fp6_e3m2` `fp6_e2m3`
//! `fp4_e2m1`, each with `[+gN]`, all but the first with `[@S]` · `int4` `int2`. Numbers are
//! decimal without leading zeros.

use super::{DEFAULT_GUARD, Kind};
use crate::format::Format;

/// Largest magnitude of a scale exponent.
pub(super) const MAX_SCALE: i32 = 64;

/// Most guard planes of an exponent: TRACE III-C has 0, 1 and 2.
pub(super) const MAX_EXPONENT_GUARD: u32 = 2;

/// What values are converted from.
const SOURCES: [Format; 7] = [
    Format::Fp32,
    Format::Fp16,
    Format::Bf16,
    Format::Fp8E4m3fn,
    Format::Fp8E5m2,
    Format::Fp6E3m2,
    Format::Fp6E2m3,
];

/// What values are converted to.
const TARGETS: [Format; 6] =
    [Format::Bf16, Format::Fp8E4m3fn, Format::Fp8E5m2, Format::Fp6E3m2, Format::Fp6E2m3, Format::Fp4E2m1];

/// Why there is no such view.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ViewError {
    /// No view is spelled so.
    #[error(
        "no view is spelled {spelling:?}; views are full, eXmY, eXmY+dN, eXmY+gN, any with :packed, bf16, fp8_e4m3fn, fp8_e5m2, fp6_e3m2, \
         fp6_e2m3, fp4_e2m1, int4, int2"
    )]
    Unknown {
        /// The spelling.
        spelling: String,
    },
    /// The format has fewer bits in a field than the view wants.
    #[error("{spelling}: {format} has {has} {field} bits, not {wants}")]
    Field {
        /// The spelling.
        spelling: String,
        /// The tensor's format.
        format: Format,
        /// `exponent` or `mantissa`.
        field: &'static str,
        /// Bits the format has.
        has: u32,
        /// Bits the view wants.
        wants: u32,
    },
    /// Rounding carries into the exponent, so it needs all of it.
    #[error(
        "{spelling}: rounding with guard planes needs all {has} exponent planes of {format}, not {wants}"
    )]
    GuardNeedsExponent {
        /// The spelling.
        spelling: String,
        /// The tensor's format.
        format: Format,
        /// Exponent bits the format has.
        has: u32,
        /// Exponent bits the view wants.
        wants: u32,
    },
    /// The format cannot give the view.
    #[error("{spelling}: not a view of {format}, it is one of {of}")]
    Format {
        /// The spelling.
        spelling: String,
        /// The tensor's format.
        format: Format,
        /// The formats that can.
        of: &'static str,
    },
    /// What an element is worth is said elsewhere.
    #[error(
        "{spelling}: an element of {format} is worth something only with the scale of its block, which lies in another tensor; \
         the file NAME@bf16.safetensors has them put together"
    )]
    Scaled {
        /// The spelling.
        spelling: String,
        /// The tensor's format.
        format: Format,
    },
    /// A number in the spelling passes its bound.
    #[error("{spelling}: {what} is at most {bound}")]
    Bound {
        /// The spelling.
        spelling: String,
        /// The number.
        what: &'static str,
        /// Its bound.
        bound: u32,
    },
}

pub(super) fn parse(format: Format, spelling: &str) -> Result<Kind, ViewError> {
    let unknown = || ViewError::Unknown { spelling: spelling.to_owned() };
    let refuse = |of| ViewError::Format { spelling: spelling.to_owned(), format, of };
    match spelling {
        "full" => return Ok(Kind::Full),
        "int4" if format != Format::Int8 => return Err(refuse("int8")),
        "int4" => return Ok(Kind::Integer { bits: 4 }),
        "int2" if !matches!(format, Format::Int8 | Format::Int4) => return Err(refuse("int8, int4")),
        "int2" => return Ok(Kind::Integer { bits: 2 }),
        _ => {}
    }
    for target in TARGETS {
        if let Some(rest) = spelling.strip_prefix(target.name()) {
            return converted(format, target, spelling, rest);
        }
    }
    let (body, packed) = spelling.strip_suffix(":packed").map_or((spelling, false), |body| (body, true));
    let (body, guard) = suffix(body, "+g").ok_or_else(unknown)?;
    let (body, exponent_guard) = suffix(body, "+d").ok_or_else(unknown)?;
    let (exponent, mantissa) = body
        .strip_prefix('e')
        .and_then(|fields| fields.split_once('m'))
        .and_then(|(exponent, mantissa)| Some((number(exponent)?, number(mantissa)?)))
        .ok_or_else(unknown)?;
    if !format.is_float() {
        return Err(refuse("fp32, fp16, bf16, fp8_e4m3fn, fp8_e5m2, fp4_e2m1, fp6_e3m2, fp6_e2m3"));
    }
    let spelling = || spelling.to_owned();
    if exponent_guard > MAX_EXPONENT_GUARD {
        let what = "the number of an exponent's guard planes";
        return Err(ViewError::Bound { spelling: spelling(), what, bound: MAX_EXPONENT_GUARD });
    }
    let fetched = exponent.saturating_add(exponent_guard);
    for (field, has, wants) in
        [("exponent", format.exponent_bits(), fetched), ("mantissa", format.mantissa_bits(), mantissa)]
    {
        if wants > has {
            return Err(ViewError::Field { spelling: spelling(), format, field, has, wants });
        }
    }
    let has = format.exponent_bits();
    if guard > 0 && fetched < has {
        return Err(ViewError::GuardNeedsExponent { spelling: spelling(), format, has, wants: fetched });
    }
    Ok(Kind::Top { exponent, exponent_guard, mantissa, guard, packed })
}

/// What is before `mark`, and the number behind it: 0 if there is none.
fn suffix<'t>(text: &'t str, mark: &str) -> Option<(&'t str, u32)> {
    match text.split_once(mark) {
        Some((body, digits)) => Some((body, number(digits)?)),
        None => Some((text, 0)),
    }
}

fn converted(format: Format, target: Format, spelling: &str, rest: &str) -> Result<Kind, ViewError> {
    let unknown = || ViewError::Unknown { spelling: spelling.to_owned() };
    let (of, sources) = match target {
        Format::Bf16 => ("fp32, fp16", &SOURCES[..2]),
        Format::Fp8E4m3fn | Format::Fp8E5m2 => ("fp32, fp16, bf16", &SOURCES[..3]),
        Format::Fp4E2m1 => ("fp32, fp16, bf16, fp8_e4m3fn, fp8_e5m2, fp6_e3m2, fp6_e2m3", &SOURCES[..]),
        _ => ("fp32, fp16, bf16, fp8_e4m3fn, fp8_e5m2", &SOURCES[..5]),
    };
    let (rest, scale) = match rest.split_once('@') {
        Some(_) if target == Format::Bf16 => return Err(unknown()),
        Some((rest, scale)) => {
            let (sign, digits) = scale.strip_prefix('-').map_or((1, scale), |digits| (-1, digits));
            let magnitude = number(digits).ok_or_else(unknown)?;
            if sign < 0 && magnitude == 0 {
                return Err(unknown());
            }
            let magnitude = i32::try_from(magnitude).unwrap_or(i32::MAX);
            if magnitude > MAX_SCALE {
                let spelling = spelling.to_owned();
                return Err(ViewError::Bound {
                    spelling,
                    what: "the magnitude of a scale exponent",
                    bound: MAX_SCALE.unsigned_abs(),
                });
            }
            (rest, sign * magnitude)
        }
        None => (rest, 0),
    };
    let guard = match rest {
        "" => DEFAULT_GUARD,
        rest => rest.strip_prefix("+g").and_then(number).ok_or_else(unknown)?,
    };
    if !sources.contains(&format) {
        if matches!(format, Format::Fp4E2m1 | Format::Fp6E3m2 | Format::Fp6E2m3 | Format::E8m0) {
            return Err(ViewError::Scaled { spelling: spelling.to_owned(), format });
        }
        return Err(ViewError::Format { spelling: spelling.to_owned(), format, of });
    }
    Ok(Kind::Converted { target, guard, scale })
}

/// A decimal number without sign or leading zeros.
fn number(text: &str) -> Option<u32> {
    let plain = text.bytes().all(|byte| byte.is_ascii_digit()) && (text == "0" || !text.starts_with('0'));
    plain.then(|| text.parse().ok())?
}
