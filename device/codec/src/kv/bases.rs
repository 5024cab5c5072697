//! The bases of a block as bytes of its head.
//!
//! The least of them, the bits of the largest difference from it, and the differences in so many
//! bits each, lowest bit first, padded to whole bytes: eight of them take as many bytes as one of
//! them bits. What the padding holds is not looked at.

/// Bases worked on at a time.
const EIGHT: usize = 8;

/// The lowest bit of every byte.
const EVERY: u64 = u64::from_ne_bytes([1; EIGHT]);

/// Appends bases.
pub(super) fn write(bases: &[u8], out: &mut Vec<u8>) {
    let most = bases.iter().fold(0, |most, base| (*base).max(most));
    let least = bases.iter().fold(most, |least, base| (*base).min(least));
    let bits = 8 - (most - least).leading_zeros() as usize;
    let [bits_byte, ..] = bits.to_le_bytes();
    let at = out.len();
    let end = at + 2 + (bases.len() * bits).div_ceil(8);
    // Eight bytes a time, whatever of them counts.
    out.resize(end + EIGHT, 0);
    let (head, packed) = out[at..].split_at_mut(2);
    head.copy_from_slice(&[least, bits_byte]);
    let widths = Widths::of(bits);
    let (eights, rest) = bases.as_chunks();
    let mut at = 0;
    for eight in eights {
        packed[at..at + EIGHT].copy_from_slice(&together(*eight, least, &widths));
        at += bits;
    }
    if !rest.is_empty() {
        let mut last = [least; EIGHT];
        last[..rest.len()].copy_from_slice(rest);
        packed[at..at + EIGHT].copy_from_slice(&together(last, least, &widths));
    }
    out.truncate(end);
}

/// Eight bases less the least one, in as many bits each, side by side: brought together in pairs of
/// bytes, in fours and in all.
#[inline]
fn together(bases: [u8; EIGHT], least: u8, widths: &Widths) -> [u8; EIGHT] {
    let Widths { bits, lower: [one, two, four] } = *widths;
    let word = u64::from_le_bytes(bases) - EVERY * u64::from(least);
    let word = word & one | (word >> 8 & one) << bits;
    let word = word & two | (word >> 16 & two) << (2 * bits);
    (word & four | (word >> 32) << (4 * bits)).to_le_bytes()
}

/// Reads as many bases as `bases` has from the front of `bytes`: what is behind them.
pub(super) fn read<'a>(bytes: &'a [u8], bases: &mut [u8]) -> Option<&'a [u8]> {
    let (&[least, bits], packed) = bytes.split_first_chunk()?;
    let bits = usize::from(bits);
    if bits > 8 {
        return None;
    }
    let (packed, rest) = packed.split_at_checked((bases.len() * bits).div_ceil(8))?;
    if bits == 0 {
        bases.fill(least);
        return Some(rest);
    }
    let (widths, leasts) = (Widths::of(bits), EVERY * u64::from(least));
    let (eights, last) = bases.as_chunks_mut();
    let mut passed = 0;
    let mut parts = packed.chunks(bits);
    for (eight, packed) in eights.iter_mut().zip(&mut parts) {
        let (sums, over) = sums(leasts, apart(word(packed), &widths));
        *eight = sums.to_le_bytes();
        passed |= over;
    }
    if let Some(packed) = parts.next() {
        let there = (1 << (8 * last.len())) - 1;
        let (sums, over) = sums(leasts, apart(word(packed), &widths) & there);
        last.copy_from_slice(&sums.to_le_bytes()[..last.len()]);
        passed |= over;
    }
    (passed == 0).then_some(rest)
}

/// Sums byte by byte, and a one wherever one passes a byte.
#[inline]
fn sums(a: u64, b: u64) -> (u64, u64) {
    const UPPER: u64 = EVERY << 7;
    let sums = ((a & !UPPER) + (b & !UPPER)) ^ ((a ^ b) & UPPER);
    (sums, (a & b | (a | b) & !sums) & UPPER)
}

/// One to eight bytes, zeros behind them. To copy so few would take longer.
#[inline]
fn word(bytes: &[u8]) -> u64 {
    let length = bytes.len();
    match (bytes.first_chunk(), bytes.last_chunk()) {
        (Some(first), Some(last)) => {
            let [first, last] = [first, last].map(|four| u64::from(u32::from_le_bytes(*four)));
            first | last << (8 * (length - 4))
        }
        // The first, the middle and the last byte of three are all there are.
        _ => [0, length / 2, length - 1]
            .into_iter()
            .fold(0, |word, at| word | u64::from(bytes[at]) << (8 * at)),
    }
}

/// As many bits side by side eight times, each as a byte: all of them cut in halves, these in pairs
/// of bytes, and these in bytes.
#[inline]
fn apart(word: u64, widths: &Widths) -> u64 {
    let Widths { bits, lower: [one, two, four] } = *widths;
    let word = word & four | (word >> (4 * bits) & four) << 32;
    let word = word & two | (word >> (2 * bits) & two) << 16;
    word & one | (word >> bits & one) << 8
}

/// What there is to know of a number of bits from 1 to 8.
struct Widths {
    bits: usize,
    /// Ones for one base in every pair of bytes, for two in every four, and for four in all.
    lower: [u64; 3],
}

impl Widths {
    #[inline]
    const fn of(bits: usize) -> Self {
        const PAIRS: u64 = 0x0001_0001_0001_0001;
        const FOURS: u64 = 0x0000_0001_0000_0001;
        let lower = [((1 << bits) - 1) * PAIRS, ((1 << (2 * bits)) - 1) * FOURS, (1 << (4 * bits)) - 1];
        Self { bits, lower }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    /// Bit by bit.
    fn slowly(bases: &[u8]) -> Vec<u8> {
        let least = bases.iter().min().copied().unwrap_or(0);
        let bits = bases.iter().map(|base| 8 - (base - least).leading_zeros()).max().unwrap_or(0);
        let mut bytes = vec![least, u8::try_from(bits).unwrap()];
        for bases in bases.chunks(8) {
            let all = bases.iter().flat_map(|base| (0..bits).map(move |bit| (base - least) >> bit & 1));
            for eight in all.collect::<Vec<_>>().chunks(8) {
                bytes.push((0..).zip(eight).fold(0, |byte, (at, bit)| byte | bit << at));
            }
        }
        bytes
    }

    proptest! {
        #[test]
        fn they_are_as_bit_by_bit_and_come_back(
            shift in 0_u32..8, bases in prop::collection::vec(any::<u8>(), 0..50), behind in prop::collection::vec(any::<u8>(), 0..10),
        ) {
            let bases: Vec<u8> = bases.into_iter().map(|base| (base >> shift) + (u8::MAX - (u8::MAX >> shift)) / 2).collect();
            let mut bytes = Vec::new();
            super::write(&bases, &mut bytes);
            prop_assert_eq!(&bytes, &slowly(&bases));
            bytes.extend(&behind);
            let mut back = vec![0; bases.len()];
            prop_assert_eq!(super::read(&bytes, &mut back), Some(&behind[..]));
            prop_assert_eq!(&back, &bases);
        }

        #[test]
        fn sums_that_pass_a_byte_are_refused(least in 190_u8.., bases in prop::collection::vec(0_u8..64, 1..20)) {
            let mut bytes = Vec::new();
            super::write(&[&[0], &bases[..]].concat(), &mut bytes);
            bytes[0] = least;
            let most = bases.iter().max().unwrap();
            let fits = least.checked_add(*most).is_some();
            prop_assert_eq!(super::read(&bytes, &mut vec![0; bases.len() + 1]).is_some(), fits);
        }
    }

    #[test]
    fn ones_in_the_padding_change_nothing() {
        for (bits, count) in (1..=8).flat_map(|bits| (1..=17).map(move |count| (bits, count))) {
            // The least base with all ones added to it, were they read as another one, would pass a
            // byte.
            let least = u8::MAX - (1 << (bits - 1));
            let bases: Vec<u8> = (0..count).map(|at| if at == 0 { least } else { u8::MAX }).collect();
            let mut bytes = Vec::new();
            super::write(&bases, &mut bytes);
            let padding = (bytes.len() - 2) * 8 - bases.len() * usize::from(bytes[1]);
            *bytes.last_mut().unwrap() |= !(u8::MAX >> padding);
            let mut back = vec![0; bases.len()];
            assert_eq!(super::read(&bytes, &mut back), Some(&[][..]), "{bits} {count}");
            assert_eq!(back, bases, "{bits} {count}");
        }
    }
}
