//! LZ4 of short inputs, as planes are.
//!
//! A library's compressor is made for long inputs: to clear its table takes longer than to look
//! through a plane. The rules:
//!
//! * The format is LZ4's block format: *sequences* of a token, literals, and a match of four bytes
//!   or more. The last one has literals only, five or more, and no match begins in the last twelve
//!   bytes.
//! * Every position is looked up in a table by a hash of its six bytes, where the last position
//!   with that hash is; after many that were not found, only every second, third, and so on.
//! * A match of four or five bytes is not worth the two or three that it takes: without them a
//!   stream has half as many sequences, which is what reading it takes time for, and as many bytes
//!   within a part in 300. If the match at the next position is longer, that one is taken.
//! * Of an input that is zeros to the end but for a few bytes that seem to be noise, these are
//!   literals, and the zeros one match.
//! * It ends as soon as what is written is not shorter than the input.

#![expect(
    clippy::cast_possible_truncation,
    reason = "positions and lengths are at most 512, bytes are cut on purpose"
)]

/// Bytes of the longest input.
pub(super) const MAX_INPUT: usize = 512;

/// Bytes that a match has at least.
const MIN_MATCH: usize = 4;
/// Bytes that a match has to be written.
const WORTH: usize = 6;
/// Bytes at the end that are literals.
const LAST_LITERALS: usize = 5;
/// Bytes at the end in which no match begins.
const NO_MATCH: usize = 12;
/// A length that has bytes of its own.
const LONG: usize = 15;
/// Positions that are not found before every second is left out.
const MISSES_A_STEP: usize = 32;
/// Bytes before zeros to the end that are not looked through.
const MAX_BEFORE: usize = 128;
/// Places of the table.
const PLACES: usize = 512;

/// Compresses `input` into the front of `out`, if that makes it shorter: the bytes it takes.
///
/// # Panics
/// If `input` is longer than [`MAX_INPUT`] or `out` shorter than `input`.
pub(super) fn compress(input: &[u8], out: &mut [u8]) -> Option<usize> {
    assert!(input.len() <= MAX_INPUT && out.len() >= input.len());
    let mut writer = Writer { out: &mut out[..input.len()], at: 0 };
    // A plane that ends with zeros, as those of a window's last block do, need not be looked
    // through.
    let (before, eights) = input.as_rchunks::<8>();
    let zeros = eights.iter().rev().take_while(|eight| u64::from_le_bytes(**eight) == 0).count();
    let zeros_at = before.len() + 8 * (eights.len() - zeros);
    if zeros_at <= MAX_BEFORE && 2 * zeros_at + NO_MATCH < input.len() && is_noise(&input[..zeros_at]) {
        let start = zeros_at + 1;
        let zeros = Match { start, offset: 1, length: input.len() - LAST_LITERALS - start };
        writer.sequence(&input[..start], Some(&zeros))?;
        writer.sequence(&input[start + zeros.length..], None)?;
        return (writer.at < input.len()).then_some(writer.at);
    }
    let mut finder = Finder { input, table: [0; PLACES] };
    // Bytes before `first` are written; what is before 0 cannot be found.
    let (mut first, mut at, mut missed) = (0, 1, 0);
    // The match at the position before.
    let mut held: Option<Match> = None;
    loop {
        let found = if at + NO_MATCH <= input.len() { finder.find(at, first) } else { None };
        let best = match (held.take(), found) {
            (None, None) if at + NO_MATCH > input.len() => break,
            (None, None) => {
                at += 1 + missed / MISSES_A_STEP;
                missed += 1;
                continue;
            }
            (None, found) => {
                held = found;
                at += 1;
                continue;
            }
            (Some(held), Some(found)) if found.length > held.length => found,
            (Some(held), _) => held,
        };
        writer.sequence(&input[first..best.start], Some(&best))?;
        first = best.start + best.length;
        at = first;
        missed = 0;
        // So that what goes on as it did before is found where it does.
        finder.add(at - 2);
    }
    writer.sequence(&input[first..], None)?;
    (writer.at < input.len()).then_some(writer.at)
}

/// Whether there are about as many ones as zeros in a few bytes.
fn is_noise(bytes: &[u8]) -> bool {
    let (eights, rest) = bytes.as_chunks();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let eights = eights.iter().chain([&last]);
    let ones = eights.map(|eight| u64::from_le_bytes(*eight).count_ones() as usize).sum::<usize>();
    (3 * bytes.len()..=5 * bytes.len()).contains(&ones)
}

/// Bytes that were there before.
struct Match {
    start: usize,
    offset: usize,
    length: usize,
}

struct Finder<'a> {
    input: &'a [u8],
    /// Where bytes with that hash were last.
    table: [u16; PLACES],
}

impl Finder<'_> {
    /// The match at `at`, from `first` on at the earliest, if it is worth a sequence.
    fn find(&mut self, at: usize, first: usize) -> Option<Match> {
        let input = self.input;
        let bytes = bytes_at(input, at);
        let found = usize::from(std::mem::replace(&mut self.table[hash(bytes)], at as u16));
        if bytes_at(input, found) != bytes {
            return None;
        }
        let (mut start, mut from) = (at, found);
        while start > first && from > 0 && input[start - 1] == input[from - 1] {
            (start, from) = (start - 1, from - 1);
        }
        let length = at - start + WORTH + same(input, found + WORTH, at + WORTH);
        Some(Match { start, offset: start - from, length })
    }

    /// Adds a position, if a match could begin there.
    fn add(&mut self, at: usize) {
        if at + NO_MATCH <= self.input.len() {
            self.table[hash(bytes_at(self.input, at))] = at as u16;
        }
    }
}

/// The bytes that a match has to have, in the upper ones.
fn bytes_at(input: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*input[at..].first_chunk().expect("no match begins near the end")) << (8 * (8 - WORTH))
}

/// A place in the table.
fn hash(bytes: u64) -> usize {
    (bytes.wrapping_mul(0x9e37_79b1_85eb_ca87) >> (64 - PLACES.ilog2())) as usize
}

/// How many bytes from `a` on are those from `b` on, which is behind it, before the last literals.
fn same(input: &[u8], a: usize, b: usize) -> usize {
    let mut same = 0;
    while b + same + 8 + LAST_LITERALS <= input.len() {
        let eight = |at: usize| u64::from_le_bytes(*input[at..].first_chunk().expect("before the end"));
        let differ = eight(a + same) ^ eight(b + same);
        if differ != 0 {
            return same + differ.trailing_zeros() as usize / 8;
        }
        same += 8;
    }
    while b + same + LAST_LITERALS < input.len() && input[a + same] == input[b + same] {
        same += 1;
    }
    same
}

/// Writes sequences as long as the output buffer has bytes left.
struct Writer<'a> {
    out: &'a mut [u8],
    at: usize,
}

impl Writer<'_> {
    /// Writes literals, and a match.
    fn sequence(&mut self, literals: &[u8], of: Option<&Match>) -> Option<()> {
        let extra = of.map_or(0, |of| of.length - MIN_MATCH);
        self.bytes(&[(literals.len().min(LONG) << 4 | extra.min(LONG)) as u8])?;
        self.length(literals.len())?;
        self.bytes(literals)?;
        if let Some(of) = of {
            self.bytes(&(of.offset as u16).to_le_bytes())?;
            self.length(extra)?;
        }
        Some(())
    }

    /// What the token does not tell of a length.
    fn length(&mut self, length: usize) -> Option<()> {
        let Some(mut left) = length.checked_sub(LONG) else { return Some(()) };
        while left >= 255 {
            self.bytes(&[255])?;
            left -= 255;
        }
        self.bytes(&[left as u8])
    }

    fn bytes(&mut self, bytes: &[u8]) -> Option<()> {
        self.out.get_mut(self.at..self.at + bytes.len())?.copy_from_slice(bytes);
        self.at += bytes.len();
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use lz4_flex::block::decompress_into;
    use proptest::prelude::*;

    use super::*;

    /// Pieces of few bytes again and again, noise between them.
    fn input() -> impl Strategy<Value = Vec<u8>> {
        let piece = (
            prop::collection::vec(any::<u8>(), 1..24),
            1_usize..60,
            prop::collection::vec(any::<u8>(), 0..24),
        );
        prop::collection::vec(piece, 0..12).prop_map(|pieces| {
            let mut bytes: Vec<_> = pieces
                .into_iter()
                .flat_map(|(piece, times, noise)| [piece.repeat(times), noise].concat())
                .collect();
            bytes.truncate(MAX_INPUT);
            bytes
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn what_is_shorter_is_a_block_of_the_format(input in input()) {
            let mut out = vec![0xa5; input.len()];
            if let Some(length) = compress(&input, &mut out) {
                prop_assert!(length < input.len());
                let mut back = vec![0; input.len()];
                prop_assert_eq!(decompress_into(&out[..length], &mut back).ok(), Some(input.len()));
                prop_assert_eq!(back, input);
            }
        }
    }

    #[test]
    fn matches_that_are_worth_it_are_found_at_any_distance() {
        // No four bytes twice.
        let noise: Vec<u8> = (0..MAX_INPUT).map(|at| ((at * at / 7) ^ (at * 31)) as u8).collect();
        for distance in [1, 2, 3, 4, 7, 8, 64, 200] {
            for length in [WORTH, 7, 8, 18, 19, 20, 200, 274, 275] {
                let end = (distance + length + NO_MATCH).min(MAX_INPUT);
                let mut input = noise[..end].to_vec();
                for at in distance..end - NO_MATCH {
                    input[at] = input[at - distance];
                }
                let mut out = vec![0; end];
                let stored = compress(&input, &mut out);
                // A token, the literals and their length, offset and length; a token and the last
                // literals.
                let most = 1 + distance + 1 + 2 + 2 + 1 + NO_MATCH;
                assert!(
                    stored.is_some_and(|stored| stored <= most) || end <= most,
                    "{distance} {length}: {stored:?}"
                );
                let Some(stored) = stored else { continue };
                let mut back = vec![0; end];
                assert_eq!(decompress_into(&out[..stored], &mut back).ok(), Some(end));
                assert_eq!(back, input);
            }
        }
    }

    #[test]
    fn zeros_to_the_end_are_a_match_whatever_is_before_them() {
        for before in 0..=MAX_BEFORE + 9 {
            for length in
                [1, 20, 21, 64, 128, 200, 256, MAX_INPUT].into_iter().filter(|length| before < *length)
            {
                // No byte of them is zero, and half of their bits are ones.
                let mut input: Vec<_> =
                    (0..before).map(|at| [0x5a, 0x93, 0x65, 0x1e, 0xc9][at * at / 7 % 5]).collect();
                input.resize(length, 0);
                let mut out = vec![0xa5; length];
                let stored = compress(&input, &mut out);
                // A token, the literals, with up to eight zeros, and their length, offset and
                // length; a token and the last literals.
                let most = 1 + before + 8 + 1 + 2 + 2 + 1 + LAST_LITERALS;
                let is_short = before + 8 <= MAX_BEFORE && 2 * (before + 8) + NO_MATCH < length;
                assert!(!is_short || stored.is_some_and(|stored| stored <= most), "{before} {length}");
                let Some(stored) = stored else { continue };
                let mut back = vec![0xa5; length];
                assert_eq!(decompress_into(&out[..stored], &mut back).ok(), Some(length));
                assert_eq!(back, input, "{before} {length}");
            }
        }
    }

    #[test]
    fn noise_and_nothing_are_left_alone() {
        let mut state = 1_u32;
        let mut byte = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        let noise: Vec<_> = (0..256).map(|_| byte()).collect();
        assert_eq!(compress(&noise, &mut [0; 256]), None);
        for length in 0..=LAST_LITERALS {
            assert_eq!(compress(&vec![7; length], &mut vec![0; length]), None);
        }
    }
}
