//! The bases of a block as bytes of its head.
//!
//! The least of them, the bits of the largest difference from it, and the differences in so many bits each, lowest bit first, padded to whole bytes: eight of them
//! take as many bytes as one of them bits.

/// Bases worked on at a time.
const EIGHT: usize = 8;

/// Appends bases.
pub(super) fn write(bases: &[u8], out: &mut Vec<u8>) {
    let (least, most) =
        bases.iter().fold((u8::MAX, 0), |(least, most), base| (least.min(*base), most.max(*base)));
    let least = least.min(most);
    let spread = most - least;
    let bits = 8 - spread.leading_zeros();
    out.extend([least, u8::try_from(bits).expect("8 at most")]);
    for bases in bases.chunks(EIGHT) {
        let packed =
            (0..).zip(bases).fold(0, |packed, (at, base)| packed | u64::from(base - least) << (at * bits));
        let length = (bases.len() * bits as usize).div_ceil(8);
        out.extend_from_slice(&packed.to_le_bytes()[..length]);
    }
}

/// Reads as many bases as `bases` has from the front of `bytes`: what is behind them.
pub(super) fn read<'a>(bytes: &'a [u8], bases: &mut [u8]) -> Option<&'a [u8]> {
    let (&[least, bits], packed) = bytes.split_first_chunk()?;
    if bits > 8 {
        return None;
    }
    let (packed, rest) = packed.split_at_checked((bases.len() * usize::from(bits)).div_ceil(8))?;
    if bits == 0 {
        bases.fill(least);
        return Some(rest);
    }
    let mut most = 0;
    for (bases, packed) in bases.chunks_mut(EIGHT).zip(packed.chunks(bits.into())) {
        let more = apart(word(packed), bits.into()).to_le_bytes();
        for (base, more) in bases.iter_mut().zip(more) {
            most = more.max(most);
            *base = least.wrapping_add(more);
        }
    }
    least.checked_add(most).map(|_| rest)
}

/// One to eight bytes, zeros behind them. To copy so few would take longer.
fn word(bytes: &[u8]) -> u64 {
    match (bytes.first_chunk(), bytes.last_chunk()) {
        (Some(first), Some(last)) => {
            let [first, last] = [first, last].map(|four| u64::from(u32::from_le_bytes(*four)));
            first | last << (8 * (bytes.len() - 4))
        }
        _ => bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte)),
    }
}

/// Eight times `bits` bits side by side, each as a byte: all of them cut in halves, these in pairs of bytes, and these in bytes.
fn apart(mut word: u64, bits: u32) -> u64 {
    word &= ones(8 * bits);
    for (round, parts) in (0..3).zip(PARTS).rev() {
        let lower = ones(bits << round) * parts;
        word = word & lower | (word >> (bits << round) & lower) << (8 << round);
    }
    word
}

/// The lowest `bits` bits, from 1 to 64.
const fn ones(bits: u32) -> u64 {
    u64::MAX >> (64 - bits)
}

/// The lowest bits of pairs of bytes, of fours, and of all.
const PARTS: [u64; 3] = [0x0001_0001_0001_0001, 0x0000_0001_0000_0001, 1];

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
}
