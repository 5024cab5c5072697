//! Streams of bits: bit k of a stream is bit k mod 8 of byte k div 8, and a number's lowest bit
//! comes first. Little-endian elements and nibbles with the lower one first are the case of 8, 16,
//! 32 and 4 bits.

/// The `index`-th number of `bits` bits in `bytes`, which must reach so far.
pub(crate) fn read(bytes: &[u8], index: u64, bits: u32) -> u32 {
    let first = usize::try_from(index).expect("the bytes are in memory") * bits as usize;
    let mut number = 0;
    for i in 0..bits {
        let at = first + i as usize;
        let bit = (bytes[at / 8] >> (at % 8)) & 1;
        number |= u32::from(bit) << i;
    }
    number
}

/// Writes numbers one behind the other.
pub(crate) struct Writer {
    bytes: Vec<u8>,
    /// Bits written; those of the last byte that are not are zero.
    written: usize,
}

impl Writer {
    /// A writer that has written nothing.
    pub(crate) fn new() -> Self {
        Self { bytes: Vec::new(), written: 0 }
    }

    /// Appends the lower `bits` bits of `number`, lowest first.
    pub(crate) fn push(&mut self, number: u32, bits: u32) {
        for i in 0..bits {
            if self.written.is_multiple_of(8) {
                self.bytes.push(0);
            }
            if (number >> i) & 1 == 1 {
                self.bytes[self.written / 8] |= 1 << (self.written % 8);
            }
            self.written += 1;
        }
    }

    /// The bytes written.
    pub(crate) fn finish(self) -> Vec<u8> {
        self.bytes
    }
}
