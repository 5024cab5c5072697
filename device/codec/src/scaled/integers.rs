//! 4-bit integers with scales and zeros of groups, as GPTQ and AWQ keep them, at bf16.
//!
//! The rules:
//! * A weight is a matrix of outputs × inputs. W[o, i] = scale[g, o] · (q[i, o] − zero[g, o]),
//!   where g is the group of the input i. The product is rounded to binary32 (of scales of 16 bits
//!   it is exact), and that to the nearest bf16, ties to even. NaN is 0x7fc0, as of all that is
//!   [scaled](super).
//! * Eight integers are a little-endian word of 32 bits, the first in its lowest four. GPTQ packs
//!   eight inputs of an output, AWQ eight outputs of an input, in the order 0, 2, 4, 6, 1, 3, 5, 7.
//!   Zeros are packed by outputs in both, in the same order.
//! * Groups are of inputs that follow each other, unless an index says the group of each. Their
//!   size is a power of two wherever one makes so many groups. The last group may be shorter.
//! * The first format of GPTQ stores zeros less 1, and a program adds that again: 1 to 16.

use std::ops::Range;

use super::{rounded, widen_fp16};
use crate::format::Format;

/// Integers of a word.
pub const PACKED: usize = 8;
/// Where in a word of AWQ each of eight outputs is.
const INTERLEAVED: [usize; PACKED] = [0, 4, 1, 5, 2, 6, 3, 7];

/// What a word holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packed {
    /// Inputs of an output: `[inputs / 8, outputs]`, as GPTQ has it.
    Inputs,
    /// Outputs of an input: `[inputs, outputs / 8]`, as AWQ has it.
    Outputs,
}

/// A matrix of 4-bit integers.
#[derive(Clone, Copy, Debug)]
pub struct Integers {
    /// What a word of elements holds.
    pub packed: Packed,
    /// Its columns, put together.
    pub inputs: usize,
    /// Its rows, a multiple of [`PACKED`].
    pub outputs: usize,
    /// Groups of inputs.
    pub groups: usize,
    /// The format of scales: `fp16`, `bf16` or `fp32`.
    pub scale: Format,
    /// What is added to a zero as it is stored.
    pub more: u8,
}

/// What a matrix is stored as.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// Words of integers.
    pub elements: &'a [u8],
    /// The scales, `[groups, outputs]`.
    pub scales: &'a [u8],
    /// Words of zeros, `[groups, outputs / 8]`.
    pub zeros: &'a [u8],
    /// The group of each input, an `i32`; none if groups are of inputs that follow each other, of
    /// which the last may be short. Inputs of a group that is not there are NaN.
    pub groups: Option<&'a [u8]>,
}

impl Integers {
    /// Bytes of elements, scales, zeros and the groups of inputs; none if these pass the address
    /// space.
    pub fn bytes(&self) -> Option<[usize; 4]> {
        let width = self.scale.bits() as usize / 8;
        let scales = self.groups.checked_mul(self.outputs)?;
        let elements = self.inputs.checked_mul(self.outputs)? / 2;
        Some([elements, scales.checked_mul(width)?, scales / 2, self.inputs.checked_mul(4)?])
    }

    /// Bytes that [`Self::to_bf16`] works in for so many rows, with its result; none if these pass
    /// the address space. Of groups it is as many as there are, however few inputs these have.
    pub fn work(&self, rows: usize) -> Option<usize> {
        let factors = self.groups.checked_mul(rows)?.checked_mul(size_of::<(f32, f32)>())?;
        let groups = self.inputs.checked_mul(size_of::<Option<usize>>())?;
        let values = self.inputs.checked_mul(rows)?.checked_mul(2)?;
        factors.checked_add(groups)?.checked_add(values)
    }

    /// Inputs of a group where they follow each other: the power of two that makes so many groups,
    /// of which the last may have fewer, or else as many in each. None if there is no such: with
    /// another size most inputs would get another's scale.
    pub fn group_inputs(&self) -> Option<usize> {
        let size = self.inputs.checked_add(self.groups.checked_sub(1)?)? / self.groups;
        let power = size.checked_next_power_of_two()?;
        if self.inputs.div_ceil(power) == self.groups {
            return Some(power);
        }
        (size > 0 && size * self.groups == self.inputs).then_some(size)
    }

    /// Puts rows of the matrix together, each `inputs` of bf16.
    ///
    /// # Panics
    /// If `out` has not the bytes of `rows`, or a part is shorter than [`Self::bytes`].
    pub fn to_bf16(&self, parts: &Parts<'_>, rows: Range<usize>, out: &mut [u8]) {
        assert_eq!(out.len(), 2 * rows.len() * self.inputs, "rows of bf16");
        if out.is_empty() {
            return;
        }
        // By group, then by row: what one input needs lies together.
        let factors: Vec<(f32, f32)> = (0..self.groups)
            .flat_map(|group| rows.clone().map(move |row| (group, row)))
            .map(|(group, row)| (self.scale(parts, group, row), f32::from(self.zero(parts, group, row))))
            .collect();
        let size = self.group_inputs();
        let group = |input| self.group(parts, size, input);
        let groups: Vec<Option<usize>> = (0..self.inputs).map(group).collect();
        for (index, row) in rows.clone().enumerate() {
            let out = out[2 * index * self.inputs..][..2 * self.inputs].as_chunks_mut::<2>().0;
            for ((input, group), out) in groups.iter().enumerate().zip(out) {
                let value = group.map_or(f32::NAN, |group| {
                    let (scale, zero) = factors[group * rows.len() + index];
                    scale * (f32::from(self.element(parts, input, row)) - zero)
                });
                *out = [rounded(value).to_le_bytes()[0], rounded(value).to_le_bytes()[1]];
            }
        }
    }

    fn element(&self, parts: &Parts<'_>, input: usize, output: usize) -> u8 {
        match self.packed {
            Packed::Inputs => nibble(parts.elements, input / PACKED * self.outputs + output, input % PACKED),
            Packed::Outputs => {
                let word = input * (self.outputs / PACKED) + output / PACKED;
                nibble(parts.elements, word, INTERLEAVED[output % PACKED])
            }
        }
    }

    fn zero(&self, parts: &Parts<'_>, group: usize, output: usize) -> u8 {
        let at = match self.packed {
            Packed::Inputs => output % PACKED,
            Packed::Outputs => INTERLEAVED[output % PACKED],
        };
        nibble(parts.zeros, group * (self.outputs / PACKED) + output / PACKED, at) + self.more
    }

    fn scale(&self, parts: &Parts<'_>, group: usize, output: usize) -> f32 {
        let index = group * self.outputs + output;
        let half = || {
            let word = &parts.scales[2 * index..][..2];
            u16::from_le_bytes([word[0], word[1]])
        };
        match self.scale {
            Format::Fp32 => {
                let word = &parts.scales[4 * index..][..4];
                f32::from_le_bytes([word[0], word[1], word[2], word[3]])
            }
            Format::Fp16 => widen_fp16(half()),
            _ => f32::from_bits(u32::from(half()) << 16),
        }
    }

    fn group(&self, parts: &Parts<'_>, size: Option<usize>, input: usize) -> Option<usize> {
        let group = match parts.groups {
            None => input / size?,
            Some(groups) => {
                let word = &groups[4 * input..][..4];
                usize::try_from(i32::from_le_bytes([word[0], word[1], word[2], word[3]])).ok()?
            }
        };
        (group < self.groups).then_some(group)
    }
}

/// An integer of a word.
fn nibble(words: &[u8], word: usize, at: usize) -> u8 {
    words[4 * word + at / 2] >> (4 * (at % 2)) & 0xf
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::bytes;

    /// Integers one by one, of words whose eight from the lowest bits on are `order`.
    fn unpacked(
        words: &[u8],
        rows: usize,
        columns: usize,
        packed: Packed,
        order: [usize; 8],
    ) -> Vec<Vec<u32>> {
        let word = |index: usize| u32::from_le_bytes(words[4 * index..4 * index + 4].try_into().unwrap());
        let integer = |row: usize, column: usize| {
            let (index, inner) = match packed {
                Packed::Inputs => (row / 8 * columns + column, row % 8),
                Packed::Outputs => (row * columns / 8 + column / 8, column % 8),
            };
            word(index) >> (4 * order.iter().position(|at| *at == inner).unwrap()) & 15
        };
        (0..rows).map(|row| (0..columns).map(|column| integer(row, column)).collect()).collect()
    }

    #[test]
    fn a_last_group_that_is_short_leaves_the_others_their_inputs() {
        let of = |inputs, groups| {
            let (packed, outputs) = (Packed::Inputs, 8);
            Integers { packed, inputs, outputs, groups, scale: Format::Fp16, more: 0 }.group_inputs()
        };
        for inputs in (8..5000).step_by(8) {
            for size in [32, 64, 128_usize] {
                let found = of(inputs, inputs.div_ceil(size));
                // A group that has all inputs is as good with more.
                let is_all = found.is_some_and(|found| found.min(size) >= inputs);
                assert!(is_all || found == Some(size), "{inputs} in groups of {size}: {found:?}");
            }
        }
        assert_eq!(
            [of(4800, 25), of(96, 5), of(8, 0), of(0, 0), of(0, 3)],
            [Some(192), None, None, None, None]
        );
    }

    proptest! {
        #[test]
        fn every_weight_is_its_integer_less_its_zero_times_its_scale(
            is_awq in any::<bool>(),
            (inputs, outputs, groups) in (1_usize..6, 1_usize..6, 1_usize..5),
            scale in prop::sample::select(vec![Format::Fp16, Format::Bf16, Format::Fp32]),
            more in 0_u8..2,
            by_index in any::<bool>(),
            seed in any::<u64>(),
            (from, to) in (0_usize..41, 0_usize..41),
        ) {
            let (inputs, outputs) = (8 * inputs, 8 * outputs);
            let packed = if is_awq { Packed::Outputs } else { Packed::Inputs };
            let integers = Integers { packed, inputs, outputs, groups, scale, more };
            let [elements, scales, zeros, index_count] = integers.bytes().unwrap();
            let (elements, scales, zeros) =
                (bytes(seed, elements), bytes(seed ^ 1, scales), bytes(seed ^ 2, zeros));
            // Some name groups that are not there, or none at all.
            let wild = bytes(seed ^ 3, inputs);
            let indices: Vec<i32> = wild.iter().map(|byte| i32::from(*byte) % 7 - 1).collect::<Vec<_>>();
            let index_bytes: Vec<u8> = indices.iter().flat_map(|index| index.to_le_bytes()).collect();
            prop_assert_eq!(index_bytes.len(), index_count);
            let groups_of = by_index.then_some(&index_bytes[..]);
            let parts = Parts { elements: &elements, scales: &scales, zeros: &zeros, groups: groups_of };
            let rows = from.min(to).min(outputs)..from.max(to).min(outputs);
            let mut out = vec![0xa5; 2 * rows.len() * inputs];
            prop_assert!(integers.work(rows.len()).is_some_and(|work| work >= out.len() + 8 * groups * rows.len()));
            integers.to_bf16(&parts, rows.clone(), &mut out);

            let order = if is_awq { [0, 2, 4, 6, 1, 3, 5, 7] } else { [0, 1, 2, 3, 4, 5, 6, 7] };
            let own = unpacked(&elements, inputs, outputs, packed, order);
            let zeros = unpacked(&zeros, groups, outputs, Packed::Outputs, order);
            let makes = |size: &usize| (0..inputs).step_by(*size).count() == groups;
            let power = (0..7).map(|power| 1 << power).find(makes);
            let size = power.or_else(|| (1..=inputs).find(|size| size * groups == inputs));
            prop_assert_eq!(integers.group_inputs(), size);
            let mut at = 0;
            for row in rows {
                for input in 0..inputs {
                    let group = match size {
                        _ if by_index => indices[input],
                        Some(size) => i32::try_from(input / size).unwrap(),
                        None => -1,
                    };
                    let found = u16::from_le_bytes([out[at], out[at + 1]]);
                    at += 2;
                    let Some(zeros) = usize::try_from(group).ok().and_then(|group| zeros.get(group)) else {
                        prop_assert_eq!(found, 0x7fc0);
                        continue;
                    };
                    let index = usize::try_from(group).unwrap() * outputs + row;
                    let code = |width: usize| {
                        scales[width * index..][..width].iter().rev().fold(0, |code, byte| code << 8 | u32::from(*byte))
                    };
                    let scale = match scale {
                        Format::Fp32 => f32::from_bits(code(4)),
                        Format::Fp16 => widen_fp16(u16::try_from(code(2)).unwrap()),
                        _ => f32::from_bits(code(2) << 16),
                    };
                    let steps = f64::from(own[input][row]) - f64::from(zeros[row] + u32::from(more));
                    #[expect(clippy::cast_possible_truncation, reason = "to round is what it is for")]
                    let want = (f64::from(scale) * steps) as f32;
                    if want.is_nan() {
                        prop_assert_eq!(found, 0x7fc0);
                        continue;
                    }
                    // The nearest of the two bf16 around it, of equal ones the even.
                    let low = want.to_bits() >> 16;
                    let rest = want.to_bits() & 0xffff;
                    let up = rest > 0x8000 || (rest == 0x8000 && low % 2 == 1);
                    prop_assert_eq!(u32::from(found), low + u32::from(up), "{} of {}", row, input);
                }
            }
        }
    }
}
