//! Strings of bits, from the lowest of the first byte on.

/// Bits that hold `value`.
pub(super) fn bits_of(value: u8) -> u32 {
    u8::BITS - value.leading_zeros()
}

/// At least 57 bits from bit `at` on, zeros behind the end of the bytes; what is above these counts
/// for nothing.
#[inline]
pub(super) fn word(bytes: &[u8], at: usize) -> u64 {
    let from = at / 8;
    let word = if let Some(bytes) = bytes.get(from..).and_then(<[u8]>::first_chunk) {
        u64::from_le_bytes(*bytes)
    } else {
        end(bytes.get(from..).unwrap_or_default())
    };
    word >> (at % 8)
}

/// Fewer than eight bytes, and zeros behind them.
#[cold]
fn end(rest: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    bytes[..rest.len()].copy_from_slice(rest);
    u64::from_le_bytes(bytes)
}

/// Adds bits to bytes. What it was given is there in whole bytes when it is dropped.
pub(super) struct Writer<'o> {
    out: &'o mut Vec<u8>,
    held: u64,
    bits: u32,
}

impl<'o> Writer<'o> {
    pub(super) fn new(out: &'o mut Vec<u8>) -> Self {
        Self { out, held: 0, bits: 0 }
    }

    /// Adds the lowest `bits` of `value`, at most 8, which has no others.
    pub(super) fn put(&mut self, value: u32, bits: u32) {
        self.held |= u64::from(value) << self.bits;
        self.bits += bits;
        while self.bits >= 8 {
            self.push();
            self.bits -= 8;
        }
    }

    fn push(&mut self) {
        self.out.push(self.held.to_le_bytes()[0]);
        self.held >>= 8;
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        if self.bits > 0 {
            self.push();
        }
    }
}

/// Takes bits from bytes.
pub(super) struct Reader<'b> {
    bytes: &'b [u8],
    at: usize,
}

impl<'b> Reader<'b> {
    pub(super) fn new(bytes: &'b [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// The next `bits`, at most 8, which are there.
    pub(super) fn take(&mut self, bits: u32) -> u32 {
        let (byte, shift) = (self.at / 8, self.at % 8);
        let next = self.bytes.get(byte + 1).copied().unwrap_or(0);
        let both = u32::from(u16::from_le_bytes([self.bytes[byte], next]));
        self.at += bits as usize;
        both >> shift & ((1 << bits) - 1)
    }
}
