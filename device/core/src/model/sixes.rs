//! Elements of six bits, which safetensors has four in three bytes and the device one in a byte.
//!
//! safetensors does not say in which order the bits lie. They are taken for a stream, the first
//! element in the lowest bits, as processors with such elements have them. Whatever the order, what
//! comes back is the same to the bit; only planes and precisions depend on it.

use std::io;

use super::checkpoint::ReadAt;
use super::{ModelTensor, Rearranged};
use lamina_codec::format::Format;

/// Elements that share bytes.
pub(crate) const ELEMENTS: usize = 4;
/// The bytes that they share.
pub(crate) const BYTES: usize = 3;
/// Bytes of a file that are read at once.
const AT_ONCE: usize = BYTES << 16;

/// The device's format of elements that a file has under this dtype, if they are such.
pub(crate) fn format_of(dtype: &str) -> Option<&'static str> {
    match dtype {
        "F6_E2M3" => Some("fp6_e2m3"),
        "F6_E3M2" => Some("fp6_e3m2"),
        _ => None,
    }
}

impl ModelTensor {
    /// The format of its elements where each of six bits has a byte.
    pub(crate) fn element_format(&self) -> Format {
        format_of(&self.dtype).unwrap_or(self.format).parse().unwrap_or(Format::Opaque)
    }

    /// Its bytes as its file has them.
    pub(crate) fn file_length(&self) -> u64 {
        match self.rearranged {
            Some(Rearranged::Sixes) => packed(self.length),
            Some(Rearranged::Strand(_)) | None => self.length,
        }
    }
}

/// The elements that are in so many packed bytes, if these are whole groups.
pub(crate) fn elements(packed: u64) -> Option<u64> {
    let groups = packed / BYTES as u64;
    groups.checked_mul(ELEMENTS as u64).filter(|_| packed.is_multiple_of(BYTES as u64))
}

/// The bytes of the groups that the first so many elements are in.
pub(crate) fn packed(elements: u64) -> u64 {
    elements.div_ceil(ELEMENTS as u64).saturating_mul(BYTES as u64)
}

/// Puts whole groups of packed elements into a byte each.
fn spread(packed: &[u8], elements: &mut [u8]) {
    for (packed, elements) in packed.as_chunks::<BYTES>().0.iter().zip(elements.as_chunks_mut().0) {
        let [a, b, c] = *packed;
        *elements = [a & 0x3f, a >> 6 | b << 2 & 0x3f, b >> 4 | c << 4 & 0x3f, c >> 2];
    }
}

/// Packs whole groups of elements. Of each the lower six bits count.
pub(crate) fn gather(elements: &[u8], packed: &mut [u8]) {
    for (elements, packed) in elements.as_chunks::<ELEMENTS>().0.iter().zip(packed.as_chunks_mut().0) {
        let [a, b, c, d] = elements.map(|element| element & 0x3f);
        *packed = [a | b << 6, b >> 2 | c << 4, c >> 4 | d << 2];
    }
}

/// Fills `out` with the elements from `at` on of a tensor whose packed bytes begin at `offset` of
/// `file`.
pub(super) fn read(file: &dyn ReadAt, offset: u64, at: u64, mut out: &mut [u8]) -> io::Result<()> {
    let of_group = ELEMENTS as u64;
    let (mut group, mut from) = (at / of_group, usize::try_from(at % of_group).expect("fewer than four"));
    let (mut packed, mut elements) = (Vec::new(), Vec::new());
    while !out.is_empty() {
        let groups = (from + out.len()).div_ceil(ELEMENTS).min(AT_ONCE / BYTES);
        packed.resize(groups * BYTES, 0);
        elements.resize(groups * ELEMENTS, 0);
        file.read_exact_at(&mut packed, offset + group * BYTES as u64)?;
        spread(&packed, &mut elements);
        let own = &elements[from..];
        let own = &own[..own.len().min(out.len())];
        let (now, rest) = out.split_at_mut(own.len());
        now.copy_from_slice(own);
        (out, group, from) = (rest, group + groups as u64, 0);
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// The elements of a stream of bits, lowest first, one bit at a time.
    pub(crate) fn slow(packed: &[u8]) -> Vec<u8> {
        let bit = |at: usize| packed[at / 8] >> (at % 8) & 1;
        let element = |number: usize| (0..6).map(|k| bit(number * 6 + k) << k).sum();
        (0..packed.len() * 8 / 6).map(element).collect()
    }

    #[test]
    fn every_group_of_three_bytes_is_four_elements_and_comes_back() {
        for number in 0..1_u32 << 24 {
            let [a, b, c, _] = number.to_le_bytes();
            let (mut elements, mut back) = ([0xa5; 4], [0xa5; 3]);
            spread(&[a, b, c], &mut elements);
            gather(&elements, &mut back);
            assert_eq!(back, [a, b, c]);
            assert!(elements.iter().all(|element| *element < 64));
        }
        // Each bit alone, and every byte in every place, where a bit of its own says.
        for byte in 0..=255 {
            for packed in [[byte, 0, 0], [0, byte, 0], [0, 0, byte], [byte; 3], [byte, !byte, byte]] {
                let mut elements = [0xa5; 4];
                spread(&packed, &mut elements);
                assert_eq!(elements.to_vec(), slow(&packed));
            }
        }
    }

    #[test]
    fn any_range_of_elements_is_read_out_of_a_file() {
        let length = 7 + AT_ONCE + 30;
        let file: Vec<u8> =
            (0..length).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 13).to_le_bytes()[0]).collect();
        let whole = slow(&file[7..]);
        let end = whole.len();
        for range in [0..end, 1..2, 1..end - 1, 5..131, end / 2 + 1..end, end - 1..end, 3..3, 2..11] {
            let mut out = vec![0xa5; range.len()];
            read(&&file[..], 7, range.start as u64, &mut out).unwrap();
            assert!(out == whole[range.clone()], "{range:?}");
        }
        assert!(read(&&file[..], 7, end as u64, &mut [0]).is_err(), "there is no more");
    }
}
