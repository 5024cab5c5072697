//! CRC-32C of the stored bytes of a stream or of words.

use crc_fast::{CrcAlgorithm, checksum};

/// CRC-32C of `bytes`.
#[expect(clippy::cast_possible_truncation, reason = "a CRC of 32 bits, in the lower half")]
pub(super) fn crc32c(bytes: &[u8]) -> u32 {
    checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

#[cfg(test)]
mod tests {
    use super::crc32c;

    /// Bit by bit, as the standard says it.
    fn by_bits(bytes: &[u8]) -> u32 {
        let step = |crc: u32| crc >> 1 ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 };
        !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), |crc, _| step(crc)))
    }

    #[test]
    fn every_length_up_to_a_streams_has_its_own() {
        let bytes: Vec<u8> = (0..1700_u32).map(|at| ((at * at / 3) ^ at).to_le_bytes()[0]).collect();
        for length in 0..=bytes.len() {
            assert_eq!(crc32c(&bytes[..length]), by_bits(&bytes[..length]), "{length}");
        }
    }

    #[test]
    fn it_is_the_one_of_the_standard() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[]), 0);
    }
}
