//! Block-scaled tensors: which tensors of a checkpoint are the elements of such, and which their
//! scales. They are known by name, dtype and shape.
//!
//! | scheme | elements | scales | is, put together |
//! |---|---|---|---|
//! | MXFP4 of GPT-OSS | `X_blocks` `U8` […, G, 16] | `X_scales` `U8` […, G] | `X` […, 32 G]; of four dimensions the last two are exchanged |
//! | MXFP4 | `X.weight` `U8` […, 16 G] | `X.weight_scale` `U8` or `F8_E8M0` […, G] | `X.weight` […, 32 G] |
//! | MXFP6 | `X.weight` `F6_E2M3` or `F6_E3M2` […, 32 G] | likewise | `X.weight` […, 32 G] |
//! | MXFP8 | `X.weight` `F8_E4M3` or `F8_E5M2` […, 32 G] | likewise | `X.weight` […, 32 G] |
//! | NVFP4 | `X.weight` `U8` […, 8 G] | `X.weight_scale` `F8_E4M3` […, G], `X.weight_scale_2` `F32`, one | `X.weight` […, 16 G] |
//! | GPTQ | `X.qweight` `I32` [K / 8, N] | `X.scales` [G, N], `X.qzeros` `I32` [G, N / 8], `X.g_idx` `I32` [K] or none | `X.weight` [N, K] |
//! | AWQ | `X.qweight` `I32` [K, N / 8] | likewise, without `X.g_idx` | likewise |
//!
//! The rules:
//! * Elements of four bits lie two to a byte, the first in the low half. So `U8` is `fp4_e2m1`, a
//!   `U8` of scales is `e8m0`, and `I32` of `qweight` and `qzeros` is `int4`.
//! * A shape says whether a tensor is what its name says. What it does not fit stays what its dtype
//!   is, and a remark says why, in one line. A configuration is not asked: it may be of another
//!   file.
//! * Elements of six bits that are packed in `U8`, 24 bytes for a scale, may be of either format.
//!   Nothing but a configuration says which, so they stay bytes, and a remark says so.
//! * The parts of a tensor are in one file.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::safetensors::METADATA;
use super::{ModelTensor, sixes};
use lamina_codec::format::Format;
use lamina_codec::scaled::{MX_BLOCK, NV_BLOCK};

/// How elements are scaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// `fp4_e2m1` and a power of two for 32.
    Mxfp4,
    /// An fp6 and a power of two for 32.
    Mxfp6,
    /// An fp8 and a power of two for 32.
    Mxfp8,
    /// `fp4_e2m1`, an `fp8_e4m3fn` for 16 and a factor for all.
    Nvfp4,
    /// 4-bit integers along the rows of the inputs, with scales and zeros of groups.
    Gptq,
    /// 4-bit integers along the columns of the outputs, with scales and zeros of groups.
    Awq,
}

impl Scheme {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Mxfp4, Self::Mxfp6, Self::Mxfp8, Self::Nvfp4, Self::Gptq, Self::Awq];

    /// What it is called.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mxfp4 => "mxfp4",
            Self::Mxfp6 => "mxfp6",
            Self::Mxfp8 => "mxfp8",
            Self::Nvfp4 => "nvfp4",
            Self::Gptq => "gptq",
            Self::Awq => "awq",
        }
    }
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A block-scaled tensor: its parts, by their number among the checkpoint's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ScaledTensor {
    pub(crate) scheme: Scheme,
    pub(crate) elements: usize,
    pub(crate) scales: usize,
    /// What is for all elements, or the zeros.
    pub(crate) third: Option<usize>,
    /// The groups of inputs, if these do not follow each other.
    pub(crate) fourth: Option<usize>,
    /// What it is put together, if that can be shown.
    pub(crate) whole: Option<Whole>,
}

/// A block-scaled tensor put together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Whole {
    pub(crate) name: String,
    /// Its dimensions, the outermost first.
    pub(crate) shape: Vec<u64>,
    /// Whether the last two dimensions are those of the parts exchanged.
    pub(crate) exchanged: bool,
}

impl ScaledTensor {
    /// The numbers of its parts.
    pub(crate) fn parts(&self) -> impl Iterator<Item = usize> {
        [self.elements, self.scales].into_iter().chain(self.third).chain(self.fourth)
    }
}

/// The block-scaled tensors among `tensors`, and a line for each that looks like one and is none.
pub(crate) fn find(tensors: &[ModelTensor]) -> (Vec<ScaledTensor>, Vec<String>) {
    let by_name = tensors.iter().enumerate().map(|(number, tensor)| (tensor.name.as_str(), number)).collect();
    let search = Search { tensors, by_name };
    let (mut found, mut remarks) = (Vec::new(), Vec::new());
    // Names that a file's header can have once only.
    let mut taken = BTreeSet::from([METADATA.to_owned()]);
    for (number, tensor) in tensors.iter().enumerate().filter(|(_, tensor)| tensor.length > 0) {
        match search.at(number, tensor) {
            Ok(Some(mut scaled)) => {
                scaled.whole = scaled.whole.filter(|whole| taken.insert(whole.name.clone()));
                found.push(scaled);
            }
            Ok(None) => {}
            Err(why) => remarks.push(why),
        }
    }
    (found, remarks)
}

/// Gives the parts of block-scaled tensors the formats of their elements. The lines that
/// [`find`] has.
pub(crate) fn mark(tensors: &mut [ModelTensor]) -> Vec<String> {
    let (found, remarks) = find(tensors);
    for scaled in found {
        let [elements, scales, zeros] = match scaled.scheme {
            Scheme::Mxfp4 => [Some(Format::Fp4E2m1), Some(Format::E8m0), None],
            // The dtype says what elements are.
            Scheme::Mxfp6 | Scheme::Mxfp8 => [None, Some(Format::E8m0), None],
            Scheme::Nvfp4 => [Some(Format::Fp4E2m1), None, None],
            Scheme::Gptq | Scheme::Awq => [Some(Format::Int4), None, Some(Format::Int4)],
        };
        let parts = [Some(scaled.elements), Some(scaled.scales), scaled.third];
        for (part, format) in parts.into_iter().zip([elements, scales, zeros]) {
            if let (Some(part), Some(format)) = (part, format) {
                tensors[part].format = format.name();
            }
        }
    }
    remarks
}

/// Bytes of the elements of six bits that share a scale, packed.
const PACKED_SIXES: usize = MX_BLOCK / sixes::ELEMENTS * sixes::BYTES;

struct Search<'a> {
    tensors: &'a [ModelTensor],
    by_name: BTreeMap<&'a str, usize>,
}

type Found = Result<Option<ScaledTensor>, String>;

impl Search<'_> {
    /// The tensor of a name, if it has elements.
    fn named(&self, name: &str) -> Option<(usize, &ModelTensor)> {
        let number = *self.by_name.get(name)?;
        Some((number, &self.tensors[number])).filter(|(_, tensor)| tensor.length > 0)
    }

    /// The block-scaled tensor whose elements, or whose scales without elements, a tensor is.
    fn at(&self, number: usize, tensor: &ModelTensor) -> Found {
        let name = tensor.name.as_str();
        let without =
            |elements: &str| Err(format!("{name}: scales without {elements}: kept as {}", tensor.dtype));
        if let Some(stem) = name.strip_suffix("_blocks") {
            return self.blocks(number, tensor, stem);
        }
        if let Some(stem) = name.strip_suffix("_scales") {
            let elements = format!("{stem}_blocks");
            let alone = tensor.dtype == "U8" && self.named(&elements).is_none();
            return if alone { without(&elements) } else { Ok(None) };
        }
        if let Some(stem) = name.strip_suffix(".weight_scale") {
            return self.weight(number, tensor, stem);
        }
        if let Some(stem) = name.strip_suffix(".weight_scale_2") {
            let elements = format!("{stem}.weight");
            let alone = self.named(&elements).is_none();
            return if alone { without(&elements) } else { Ok(None) };
        }
        if let Some(stem) = name.strip_suffix(".qweight") {
            return self.integers(number, tensor, stem);
        }
        if let Some(stem) = name.strip_suffix(".qzeros") {
            let elements = format!("{stem}.qweight");
            let alone = self.named(&elements).is_none();
            return if alone { without(&elements) } else { Ok(None) };
        }
        Ok(None)
    }

    /// MXFP4 as GPT-OSS has it.
    fn blocks(&self, number: usize, tensor: &ModelTensor, stem: &str) -> Found {
        let name = &tensor.name;
        let Some((scales_number, scales)) = self.named(&format!("{stem}_scales")) else {
            // Other models have other blocks.
            let looks_like = tensor.dtype == "U8" && tensor.shape.last() == Some(&(MX_BLOCK as u64 / 2));
            let why = format!("{name}: blocks without {stem}_scales in the same file: kept as U8");
            return if looks_like { Err(why) } else { Ok(None) };
        };
        if tensor.dtype != "U8" || !is_power(scales) {
            return Err(mixed(tensor, scales, "U8 and U8"));
        }
        let Some((prefix, [groups, bytes])) = tensor.shape.split_last_chunk::<2>() else {
            return Err(divided(tensor, scales, "16 bytes"));
        };
        if *bytes != MX_BLOCK as u64 / 2 || scales.shape != [prefix, &[*groups]].concat() {
            return Err(divided(tensor, scales, "16 bytes"));
        }
        let row = groups.checked_mul(MX_BLOCK as u64);
        let row = row.ok_or_else(|| divided(tensor, scales, "16 bytes"))?;
        let mut shape = prefix.to_vec();
        // Experts are kept a row an output, and are a row an input where they are not quantised.
        let exchanged = shape.len() == 2;
        shape.insert(if exchanged { 1 } else { shape.len() }, row);
        let taken = self.by_name.contains_key(stem);
        if taken {
            return Err(format!("{name}: there is a tensor {stem} already: kept as U8"));
        }
        let whole = Some(Whole { name: stem.to_owned(), shape, exchanged });
        let (elements, scales) = (number, scales_number);
        Ok(Some(ScaledTensor { scheme: Scheme::Mxfp4, elements, scales, third: None, fourth: None, whole }))
    }

    /// A weight, and scales that are named after it.
    fn weight(&self, number: usize, scales: &ModelTensor, stem: &str) -> Found {
        let Some((elements, weight)) = self.named(&format!("{stem}.weight")) else {
            let alone = is_power(scales) || scales.dtype == "F8_E4M3";
            let why = format!("{}: scales without {stem}.weight: kept as {}", scales.name, scales.dtype);
            return if alone { Err(why) } else { Ok(None) };
        };
        let third = self.named(&format!("{stem}.weight_scale_2"));
        let packed = weight.dtype == "U8";
        let fp8 = matches!(weight.dtype.as_str(), "F8_E4M3" | "F8_E5M2");
        let fp6 = sixes::format_of(&weight.dtype).is_some();
        let (scheme, block, third) = match (scales.dtype.as_str(), third) {
            ("F8_E4M3", Some((third, all))) if packed => {
                if all.dtype != "F32" || all.length != 4 {
                    let (shape, dtype) = (&all.shape, &all.dtype);
                    return Err(format!("{}: {dtype} {shape:?} is no factor of all: kept as U8", all.name));
                }
                (Scheme::Nvfp4, NV_BLOCK, Some(third))
            }
            ("F8_E4M3", None) if packed => {
                let name = &weight.name;
                return Err(format!(
                    "{name}: NVFP4 without {stem}.weight_scale_2 in the same file: kept as U8"
                ));
            }
            ("U8" | "F8_E8M0", None) if packed => (Scheme::Mxfp4, MX_BLOCK, None),
            ("U8" | "F8_E8M0", None) if fp6 => (Scheme::Mxfp6, MX_BLOCK, None),
            ("U8" | "F8_E8M0", None) if fp8 => (Scheme::Mxfp8, MX_BLOCK, None),
            // No other scheme has elements of six bits.
            (_, None) if fp6 => return Err(mixed(weight, scales, "F6_E2M3 or F6_E3M2 and U8 or F8_E8M0")),
            // One scale for a tensor, a row or a tile: other schemes, of which nothing is packed.
            _ if !packed => return Ok(None),
            _ => return Err(mixed(weight, scales, "U8 and F8_E4M3, U8 or F8_E8M0")),
        };
        // Where elements have a dtype the shape counts them, and bytes where they are packed.
        let (of_block, unit) = if packed { (block / 2, "bytes") } else { (block, "elements") };
        let wrong = || divided(weight, scales, &format!("{of_block} {unit}"));
        let (Some((row, prefix)), Some((groups, scales_prefix))) =
            (weight.shape.split_last(), scales.shape.split_last())
        else {
            return Err(wrong());
        };
        let is_row =
            |of_block: usize| prefix == scales_prefix && groups.checked_mul(of_block as u64) == Some(*row);
        if scheme == Scheme::Mxfp4 && is_row(PACKED_SIXES) {
            return Err(unsaid(weight, scales));
        }
        if !is_row(of_block) {
            return Err(wrong());
        }
        let row = groups.checked_mul(block as u64).ok_or_else(wrong)?;
        let shape = [prefix, &[row]].concat();
        let whole = Some(Whole { name: weight.name.clone(), shape, exchanged: false });
        Ok(Some(ScaledTensor { scheme, elements, scales: number, third, fourth: None, whole }))
    }

    /// 4-bit integers, eight to an `I32`.
    fn integers(&self, number: usize, tensor: &ModelTensor, stem: &str) -> Found {
        let name = &tensor.name;
        if tensor.dtype != "I32" {
            return Ok(None);
        }
        let missing = |what: &str| Err(format!("{name}: integers without {stem}.{what}: kept as I32"));
        let Some((scales_number, scales)) = self.named(&format!("{stem}.scales")) else {
            return missing("scales");
        };
        let Some((zeros_number, zeros)) = self.named(&format!("{stem}.qzeros")) else {
            return missing("qzeros");
        };
        if zeros.dtype != "I32" {
            return Err(mixed(tensor, zeros, "I32 and I32"));
        }
        let wrong = || {
            let (shape, scales, zeros) = (&tensor.shape, &scales.shape, &zeros.shape);
            format!(
                "{name}: {shape:?} with scales {scales:?} and zeros {zeros:?} are no 4-bit integers: kept as I32"
            )
        };
        let (&[rows, columns], &[groups, outputs], &[zero_groups, zero_columns]) =
            (&tensor.shape[..], &scales.shape[..], &zeros.shape[..])
        else {
            return Err(wrong());
        };
        if zero_groups != groups || zero_columns.checked_mul(8) != Some(outputs) {
            return Err(wrong());
        }
        let (scheme, inputs) = if columns == outputs {
            (Scheme::Gptq, rows.checked_mul(8))
        } else if columns == zero_columns {
            (Scheme::Awq, Some(rows))
        } else {
            return Err(wrong());
        };
        // The last group may be short.
        if inputs.is_none_or(|inputs| groups > inputs) {
            return Err(wrong());
        }
        let inputs = inputs.unwrap_or_default();
        let fourth = match self.named(&format!("{stem}.g_idx")).filter(|_| scheme == Scheme::Gptq) {
            Some((number, indices)) if indices.dtype == "I32" && indices.shape == [inputs] => Some(number),
            Some((_, indices)) => {
                let (dtype, shape) = (&indices.dtype, &indices.shape);
                return Err(format!(
                    "{}: {dtype} {shape:?} are no groups of {inputs} inputs: {name} is kept as I32",
                    indices.name
                ));
            }
            None => None,
        };
        let whole = format!("{stem}.weight");
        // Where there is one already, it is put together by whoever loads it.
        let whole = Some(whole).filter(|whole| !self.by_name.contains_key(whole.as_str()));
        let whole = whole.map(|name| Whole { name, shape: vec![outputs, inputs], exchanged: false });
        let (elements, scales, third) = (number, scales_number, Some(zeros_number));
        Ok(Some(ScaledTensor { scheme, elements, scales, third, fourth, whole }))
    }
}

/// Whether a tensor may be powers of two.
fn is_power(scales: &ModelTensor) -> bool {
    matches!(scales.dtype.as_str(), "U8" | "F8_E8M0")
}

fn mixed(elements: &ModelTensor, scales: &ModelTensor, wanted: &str) -> String {
    let (name, dtype) = (&elements.name, &elements.dtype);
    format!("{name}: {dtype} with {} {} are not {wanted}: kept as they are", scales.name, scales.dtype)
}

fn divided(elements: &ModelTensor, scales: &ModelTensor, of_block: &str) -> String {
    let (name, shape, dtype) = (&elements.name, &elements.shape, &elements.dtype);
    let (other, scales) = (&scales.name, &scales.shape);
    format!("{name}: {shape:?} are not {of_block} for each of {other} {scales:?}: kept as {dtype}")
}

/// What can only be elements of six bits, packed, and does not say of which format.
fn unsaid(elements: &ModelTensor, scales: &ModelTensor) -> String {
    let (name, shape, dtype) = (&elements.name, &elements.shape, &elements.dtype);
    let (other, scales) = (&scales.name, &scales.shape);
    format!(
        "{name}: {shape:?} are {PACKED_SIXES} bytes for each of {other} {scales:?}, as packed MXFP6 is, but {dtype} does not \
         say whether F6_E2M3 or F6_E3M2: kept as {dtype}"
    )
}

#[cfg(test)]
mod tests;
