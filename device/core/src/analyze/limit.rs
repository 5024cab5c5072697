//! How few bits a block can take if sign and mantissa stay as they are: the order-0 entropy of the
//! rest.

use lamina_codec::format::Format;

/// Bits that the elements in `bytes`, one block or the used part of one, take at least; the values'
/// own count for `opaque`.
pub(super) fn bits(format: Format, bytes: &[u8]) -> f64 {
    let mut counts = [0_u32; 256];
    // The exponent ends below the sign bit; an integer's entropy is that of all its bits.
    let (shift, mask) = if format.is_float() {
        (format.mantissa_bits(), (1_u32 << format.exponent_bits()) - 1)
    } else {
        (0, 0xff)
    };
    let elements = match format {
        Format::Opaque => return exact(bytes.len() * 8),
        format if format.is_nibble() => {
            for byte in bytes {
                for nibble in [byte & 15, byte >> 4] {
                    counts[(u32::from(nibble) >> shift & mask) as usize] += 1;
                }
            }
            bytes.len() * 2
        }
        _ => {
            let width = format.bits() as usize / 8;
            for element in bytes.chunks_exact(width) {
                let mut word = [0; 4];
                word[..width].copy_from_slice(element);
                counts[(u32::from_le_bytes(word) >> shift & mask) as usize] += 1;
            }
            bytes.len() / width
        }
    };
    let raw = if format.is_float() { 1 + format.mantissa_bits() as usize } else { 0 };
    exact(elements * raw) + entropy(&counts, elements)
}

/// n·H: n log2 n less the sum of c log2 c.
fn entropy(counts: &[u32], elements: usize) -> f64 {
    let weigh = |count: f64| if count > 0.0 { count * count.log2() } else { 0.0 };
    let sum: f64 = counts.iter().map(|count| weigh(f64::from(*count))).sum();
    weigh(exact(elements)) - sum
}

fn exact(count: usize) -> f64 {
    f64::from(u32::try_from(count).expect("at most the bits of a block"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_takes_its_raw_bits_and_its_exponents_entropy() {
        // Half of the exponents one value, half another: one bit each, with 8 of sign and mantissa.
        let words: Vec<u8> = [0x3f80_u16, 0x4000].repeat(100).iter().flat_map(|w| w.to_le_bytes()).collect();
        assert!((bits(Format::Bf16, &words) - 200.0 * 9.0).abs() < 1e-9);
        // Sixteen nibbles equally often: no gain.
        let nibbles: Vec<u8> = (0..16).map(|high| high << 4 | (15 - high)).collect();
        assert!((bits(Format::Int4, &nibbles) - 32.0 * 4.0).abs() < 1e-9);
        // One value only: nothing to tell.
        assert!(bits(Format::Int8, &[7; 64]).abs() < 1e-9);
        assert!((bits(Format::Fp32, &[7; 64]) - 16.0 * 24.0).abs() < 1e-9);
        // Two exponents equally often are a bit, beside sign and mantissa; what lies above them is
        // nothing.
        assert!((bits(Format::Fp4E2m1, &[0x12; 64]) - 128.0 * 3.0).abs() < 1e-9);
        assert!((bits(Format::Fp6E3m2, &[7; 64]) - 64.0 * 3.0).abs() < 1e-9);
        assert!(bits(Format::E8m0, &[120; 64]).abs() < 1e-9);
        assert!((bits(Format::Opaque, &[7; 64]) - 512.0).abs() < 1e-9);
        assert!(bits(Format::Fp16, &[]).abs() < 1e-9);
    }
}
