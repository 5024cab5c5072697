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
    bases.fill(least);
    if bits == 0 {
        return Some(rest);
    }
    let (mask, mut fits) = (u8::MAX >> (8 - bits), true);
    for (bases, packed) in bases.chunks_mut(EIGHT).zip(packed.chunks(bits.into())) {
        let mut word = [0; 8];
        word[..packed.len()].copy_from_slice(packed);
        let mut word = u64::from_le_bytes(word);
        for base in bases {
            let (sum, over) = least.overflowing_add(word.to_le_bytes()[0] & mask);
            fits &= !over;
            *base = sum;
            word >>= bits;
        }
    }
    fits.then_some(rest)
}
