//! CRC-32C of the stored bytes of a stream or of words.
//!
//! What a CRC becomes by the bytes behind it is a product by a constant for their number, in the field of polynomials modulo the CRC's. So parts of the bytes are taken side by side: lines of
//! registers by AVX-512 ([`avx512`]), words by the processor's instruction for CRCs ([`sse42`]). Elsewhere it is the `crc32c` crate, which is made for longer runs; tests hold the others to it.

#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod sse42;

use crate::kernel::kernels;

kernels! {
    /// A processor's way to a CRC.
    pub(super) enum Kernel {
        /// The crate's.
        Portable,
        /// The instructions for CRCs and for products without carries.
        Sse42: ["sse4.2", "pclmulqdq"],
        /// Four such products at once.
        Avx512: ["sse4.2", "pclmulqdq", "bmi2", "avx512f", "avx512bw", "vpclmulqdq"],
    }
}

impl Kernel {
    /// CRC-32C of `bytes`, by this kernel, which must be available.
    fn crc32c(self, bytes: &[u8]) -> u32 {
        assert!(self.is_available(), "{self:?} needs another processor");
        match self {
            Self::Portable => crc32c::crc32c(bytes),
            // SAFETY: the processor has its features, as was just asserted.
            #[cfg(target_arch = "x86_64")]
            Self::Sse42 => unsafe { sse42::crc32c(bytes) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512::crc32c(bytes) },
        }
    }
}

/// CRC-32C of `bytes`.
pub(super) fn crc32c(bytes: &[u8]) -> u32 {
    Kernel::best().crc32c(bytes)
}

/// CRC-32C of bytes that were written just now, bit by bit: words of them can be had at once, but lines only when all of it has come to the cache.
pub(super) fn crc32c_of_written(bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    if Kernel::best() == Kernel::Avx512 {
        return Kernel::Sse42.crc32c(bytes);
    }
    crc32c(bytes)
}

/// Most words of a part: those of a third of a block and a few more.
#[cfg(target_arch = "x86_64")]
const MOST: usize = 176;

/// For `n` words behind: x^(64n − 33) modulo the polynomial, the highest power in the lowest bit. The instruction for CRCs adds 32 to it, a product 1.
#[cfg(target_arch = "x86_64")]
const BEHIND: [u32; 2 * MOST + 1] = {
    let mut powers = [0; 2 * MOST + 1];
    // x^−33 + 64 = x^31 is the lowest bit.
    let mut power = 1_u32;
    let mut words = 1;
    while words <= 2 * MOST {
        powers[words] = power;
        let mut bit = 0;
        while bit < 64 {
            power = power >> 1 ^ if power & 1 == 1 { 0x82f6_3b78 } else { 0 };
            bit += 1;
        }
        words += 1;
    }
    powers
};

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Kernel;

    proptest! {
        #[test]
        fn it_is_what_the_crate_says(bytes in prop::collection::vec(any::<u8>(), 0..5000), start in 0_usize..9) {
            let bytes = &bytes[start.min(bytes.len())..];
            for kernel in Kernel::available() {
                prop_assert_eq!(kernel.crc32c(bytes), crc32c::crc32c(bytes), "{:?}", kernel);
            }
        }
    }

    #[test]
    fn every_length_up_to_a_streams_has_its_own() {
        let bytes: Vec<u8> = (0..1700_u32).map(|at| ((at * at / 3) ^ at).to_le_bytes()[0]).collect();
        for length in 0..=bytes.len() {
            for kernel in Kernel::available() {
                assert_eq!(
                    kernel.crc32c(&bytes[..length]),
                    crc32c::crc32c(&bytes[..length]),
                    "{kernel:?} {length}"
                );
            }
        }
    }

    #[test]
    fn it_is_the_one_of_the_standard() {
        for kernel in Kernel::available() {
            assert_eq!(kernel.crc32c(b"123456789"), 0xe306_9283, "{kernel:?}");
            assert_eq!(kernel.crc32c(&[]), 0, "{kernel:?}");
        }
    }
}
