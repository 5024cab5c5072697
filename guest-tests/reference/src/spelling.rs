//! From a view's spelling to what it asks for, checked against the format it is asked of.
//!
//! ```text
//! view      = "full" | "int4" | "int2" | top | converted
//! top       = "e" number "m" number [ "+d" number ] [ "+g" number ] [ ":packed" ]
//! converted = "bf16" [ "+g" number ] | small [ "+g" number ] [ "@" [ "-" ] number ]
//! small     = "fp8_e4m3fn" | "fp8_e5m2" | "fp6_e3m2" | "fp6_e2m3" | "fp4_e2m1"
//! number    = "0" | digit from 1 to 9 { digit }, at most 4294967295
//! ```

use crate::{Format, Refused};

/// Guard planes of a conversion that names none.
const DEFAULT_GUARDS: u32 = 2;

/// What a spelling asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum View {
    /// Every bit.
    Full,
    /// Sign, top exponent bits and top mantissa bits, each of these rounded if it has guards.
    Top { exponent: u32, exponent_guards: u32, mantissa: u32, guards: u32, packed: bool },
    /// Value / 2^scale in another format.
    Converted { target: Format, guards: u32, scale: i32 },
    /// The uppermost bits of an integer.
    HighBits { kept: u32 },
}

/// What `spelling` asks of a tensor of `format`.
pub(crate) fn parse(format: Format, spelling: &str) -> Result<View, Refused> {
    let view = || spelling.to_owned();
    let convertible = |from: &'static str, formats: &[Format]| {
        if formats.contains(&format) {
            Ok(())
        } else {
            Err(Refused::Conversion { view: view(), format, from })
        }
    };
    match grammar(spelling).ok_or_else(|| Refused::Spelling { view: view() })? {
        View::Full => Ok(View::Full),
        requested @ View::Top { exponent, exponent_guards, mantissa, guards, .. } => {
            let (exponent_bits, mantissa_bits) = (format.exponent_bits(), format.mantissa_bits());
            if exponent_bits == 0 {
                return Err(Refused::NoExponent { view: view(), format });
            }
            if exponent_guards > 2 {
                return Err(Refused::ExponentGuards { view: view() });
            }
            let exponent = exponent.saturating_add(exponent_guards);
            if exponent > exponent_bits {
                return Err(Refused::ExponentBits { view: view(), format, has: exponent_bits });
            }
            if mantissa > mantissa_bits {
                return Err(Refused::MantissaBits { view: view(), format, has: mantissa_bits });
            }
            if guards > 0 && exponent < exponent_bits {
                return Err(Refused::GuardsNeedExponent { view: view(), format, needs: exponent_bits });
            }
            Ok(requested)
        }
        requested @ View::Converted { target, scale, .. } => {
            let wide = [
                Format::Fp32,
                Format::Fp16,
                Format::Bf16,
                Format::Fp8E4m3fn,
                Format::Fp8E5m2,
                Format::Fp6E3m2,
                Format::Fp6E2m3,
            ];
            match target {
                Format::Bf16 => convertible("fp32 or fp16", &wide[..2])?,
                Format::Fp8E4m3fn | Format::Fp8E5m2 => convertible("fp32, fp16 or bf16", &wide[..3])?,
                Format::Fp4E2m1 => convertible("fp32, fp16, bf16, an fp8 or an fp6", &wide)?,
                _ => convertible("fp32, fp16, bf16 or an fp8", &wide[..5])?,
            }
            if !(-64..=64).contains(&scale) {
                return Err(Refused::Scale { view: view(), format });
            }
            Ok(requested)
        }
        requested @ View::HighBits { kept } => {
            match kept {
                2 => convertible("int8 or int4", &[Format::Int8, Format::Int4])?,
                _ => convertible("int8", &[Format::Int8])?,
            }
            Ok(requested)
        }
    }
}

/// What `spelling` says, whatever the format; `None` if it says nothing.
fn grammar(spelling: &str) -> Option<View> {
    match spelling {
        "full" => return Some(View::Full),
        "int4" => return Some(View::HighBits { kept: 4 }),
        "int2" => return Some(View::HighBits { kept: 2 }),
        _ => {}
    }
    for target in
        [Format::Bf16, Format::Fp8E4m3fn, Format::Fp8E5m2, Format::Fp6E3m2, Format::Fp6E2m3, Format::Fp4E2m1]
    {
        if let Some(rest) = spelling.strip_prefix(target.name()) {
            let (rest, guards) = optional(rest, "+g", number)?;
            let (rest, scale) = optional(rest, "@", signed_number)?;
            if !rest.is_empty() || (target == Format::Bf16 && scale.is_some()) {
                return None;
            }
            return Some(View::Converted {
                target,
                guards: guards.unwrap_or(DEFAULT_GUARDS),
                scale: scale.unwrap_or(0),
            });
        }
    }
    let (rest, exponent) = number(spelling.strip_prefix('e')?)?;
    let (rest, mantissa) = number(rest.strip_prefix('m')?)?;
    let (rest, exponent_guards) = optional(rest, "+d", number)?;
    let (rest, guards) = optional(rest, "+g", number)?;
    let packed = match rest {
        "" => false,
        ":packed" => true,
        _ => return None,
    };
    let (exponent_guards, guards) = (exponent_guards.unwrap_or(0), guards.unwrap_or(0));
    Some(View::Top { exponent, exponent_guards, mantissa, guards, packed })
}

/// A part that may be left out, but is whole if `mark` announces it: what follows it, and its
/// value.
fn optional<'a, T>(
    text: &'a str,
    mark: &str,
    part: impl Fn(&'a str) -> Option<(&'a str, T)>,
) -> Option<(&'a str, Option<T>)> {
    match text.strip_prefix(mark) {
        None => Some((text, None)),
        Some(rest) => part(rest).map(|(rest, value)| (rest, Some(value))),
    }
}

/// A number without needless zeros at the start of `text`: what follows it, and its value.
fn number(text: &str) -> Option<(&str, u32)> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    if digits.len() > 1 && digits.starts_with('0') {
        return None;
    }
    Some((rest, digits.parse().ok()?))
}

/// As [`number`], but it may have a minus; there is no minus zero.
fn signed_number(text: &str) -> Option<(&str, i32)> {
    let (rest, value) = number(text.strip_prefix('-').unwrap_or(text))?;
    let value = i32::try_from(value).ok()?;
    match text.starts_with('-') {
        true if value == 0 => None,
        true => Some((rest, -value)),
        false => Some((rest, value)),
    }
}
