//! Interleaving: which of several targets holds which bytes of a region. The device, QEMU's
//! launcher and the shim share it.
//!
//! * A region is cut into granules. Granule k lies in target k mod ways, right behind the granules
//!   of that target before it. So byte h of the region is byte (h / (ways · granule)) · granule + h
//!   mod granule of target (h / granule) mod ways.
//! * A *set* is what CXL memory devices are interleaved by: 2 or 4 ways, granules of 256 bytes up,
//!   which the guest's decoders undo. A decoder tells targets apart by bits 8 to 14 of an address
//!   (CXL's interleave capability has no others, and Linux refuses what needs them), so ways times
//!   granule are 32 KiB at most.
//! * *Chunks* are what software interleaves by: 2 MiB, 2 to 8 ways.
//! * The serial number of a CXL memory device says that it is a target, of what set and which, so
//!   that a guest needs to be told nothing else.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

/// Bytes of the chunks that software interleaves by.
pub const CHUNK_BYTES: u64 = 2 << 20;
/// Most ways.
pub const MAX_WAYS: u32 = 8;
/// Most bytes of a stripe of a set, one granule of each target.
pub const MAX_STRIPE_BYTES: u64 = 32 << 10;
/// The smallest granule.
const MIN_GRANULE_BYTES: u64 = 256;
/// The serial numbers of targets: "Lamina", then 1, the granule as a power of two of 256 bytes, the
/// ways and the target, a hexadecimal digit each.
const SERIAL: u64 = 0x4c61_6d69_6e61_1000;

/// How a region is cut into targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interleave {
    ways: u32,
    granule: u64,
}

/// Why something is no interleaving.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InterleaveError {
    /// It cannot be read.
    #[error("{text:?} is no interleave set: write WAYSxGRANULE, for example 2x256 or 4x4K")]
    Form {
        /// What was written.
        text: String,
    },
    /// A number of ways that no set has.
    #[error("{ways} ways: an interleave set has 2 or 4")]
    Ways {
        /// The ways.
        ways: u32,
    },
    /// A granule that no set has.
    #[error("a granule of {granule} bytes: CXL's are powers of two from 256 bytes to 16 KiB")]
    Granule {
        /// The granule.
        granule: u64,
    },
    /// A set that no decoder makes.
    #[error(
        "{ways} ways of {granule} bytes make stripes of {} bytes, and CXL's decoders tell targets apart within {MAX_STRIPE_BYTES}: 2 ways go up to 16K, 4 ways to 8K",
        u64::from(*ways) * granule
    )]
    Stripe {
        /// The ways.
        ways: u32,
        /// The granule.
        granule: u64,
    },
    /// A number of devices that chunks do not go over.
    #[error("{ways} devices: chunks go over 2 to {MAX_WAYS}")]
    Chunks {
        /// The devices.
        ways: u32,
    },
}

impl Interleave {
    /// A set of CXL memory devices.
    ///
    /// # Errors
    /// [`InterleaveError`], for a set that there cannot be.
    pub fn set(ways: u32, granule: u64) -> Result<Self, InterleaveError> {
        if ways != 2 && ways != 4 {
            return Err(InterleaveError::Ways { ways });
        }
        if !granule.is_power_of_two() || !(MIN_GRANULE_BYTES..=16 << 10).contains(&granule) {
            return Err(InterleaveError::Granule { granule });
        }
        if u64::from(ways) * granule > MAX_STRIPE_BYTES {
            return Err(InterleaveError::Stripe { ways, granule });
        }
        Ok(Self { ways, granule })
    }

    /// Chunks of [`CHUNK_BYTES`] over so many devices.
    ///
    /// # Errors
    /// [`InterleaveError::Chunks`].
    pub fn chunks(ways: u32) -> Result<Self, InterleaveError> {
        if (2..=MAX_WAYS).contains(&ways) {
            Ok(Self { ways, granule: CHUNK_BYTES })
        } else {
            Err(InterleaveError::Chunks { ways })
        }
    }

    /// Whether this is a set, rather than chunks.
    pub fn is_set(self) -> bool {
        self.granule < CHUNK_BYTES
    }

    /// The number of targets.
    pub fn ways(self) -> u32 {
        self.ways
    }

    /// Bytes of a granule.
    pub fn granule(self) -> u64 {
        self.granule
    }

    /// Bytes of a stripe, one granule of each target.
    pub fn stripe(self) -> u64 {
        self.granule * u64::from(self.ways)
    }

    /// The target that holds byte `at` of the region.
    pub fn target_of(self, at: u64) -> u32 {
        u32::try_from(at / self.granule % u64::from(self.ways)).expect("less than the ways")
    }

    /// Bytes of `target` before byte `at` of the region: where in the target that byte lies, if it
    /// is the target's.
    pub fn before(self, target: u32, at: u64) -> u64 {
        let begin = u64::from(target) * self.granule;
        at / self.stripe() * self.granule + (at % self.stripe()).saturating_sub(begin).min(self.granule)
    }

    /// Where in the region byte `at` of `target` lies.
    pub fn region_of(self, target: u32, at: u64) -> u64 {
        at / self.granule * self.stripe() + u64::from(target) * self.granule + at % self.granule
    }

    /// The bytes of `target` that show any of a range of the region; empty if none do.
    pub fn target_range(self, target: u32, region: &Range<u64>) -> Range<u64> {
        self.before(target, region.start)..self.before(target, region.end)
    }

    /// The parts of the region that a range of `target` shows, in order, each in one granule.
    pub fn pieces(self, target: u32, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let mut at = range.start;
        std::iter::from_fn(move || {
            let length = range.end.checked_sub(at)?.min(self.granule - at % self.granule);
            let start = self.region_of(target, at);
            at += length;
            (length > 0).then_some(start..start + length)
        })
    }

    /// The serial number of the CXL memory device that is `target` of this set.
    pub fn serial(self, target: u32) -> u64 {
        let exponent = u64::from((self.granule / MIN_GRANULE_BYTES).trailing_zeros());
        SERIAL | exponent << 8 | u64::from(self.ways) << 4 | u64::from(target)
    }

    /// The set and the target that a serial number states, if it is a target's.
    pub fn of_serial(serial: u64) -> Option<(Self, u32)> {
        let digit = |place: u32| u32::try_from(serial >> (4 * place) & 0xf).expect("a digit");
        let set = Self::set(digit(1), MIN_GRANULE_BYTES << digit(2)).ok()?;
        (set.serial(digit(0)) == serial && digit(0) < set.ways).then_some((set, digit(0)))
    }
}

impl fmt::Display for Interleave {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.granule {
            bytes if bytes.is_multiple_of(1 << 20) => write!(f, "{}x{}M", self.ways, bytes >> 20),
            bytes if bytes.is_multiple_of(1 << 10) => write!(f, "{}x{}K", self.ways, bytes >> 10),
            bytes => write!(f, "{}x{bytes}", self.ways),
        }
    }
}

impl FromStr for Interleave {
    type Err = InterleaveError;

    /// A set.
    fn from_str(text: &str) -> Result<Self, InterleaveError> {
        let form = || InterleaveError::Form { text: text.to_owned() };
        let (ways, granule) = text.split_once('x').ok_or_else(form)?;
        let (digits, unit) = granule.strip_suffix('K').map_or((granule, 1), |digits| (digits, 1 << 10));
        let number = |digits: &str| {
            let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
            plain.then(|| digits.parse::<u32>().ok()).flatten().ok_or_else(form)
        };
        Self::set(number(ways)?, u64::from(number(digits)?) * unit)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Every interleaving there is.
    fn all() -> Vec<Interleave> {
        let granules = || (8..=14).map(|exponent| 1 << exponent);
        let sets =
            [2, 4].into_iter().flat_map(|ways| granules().filter_map(move |g| Interleave::set(ways, g).ok()));
        sets.chain((2..=8).map(|ways| Interleave::chunks(ways).unwrap())).collect()
    }

    /// The target and the place in it of each byte of a region, dealt out granule by granule.
    fn dealt(interleave: Interleave, bytes: usize) -> Vec<(u32, u64)> {
        let mut targets = vec![0_u64; interleave.ways() as usize];
        let (mut places, mut target) = (Vec::new(), 0);
        while places.len() < bytes {
            for _ in 0..interleave.granule() {
                places.push((u32::try_from(target).unwrap(), targets[target]));
                targets[target] += 1;
            }
            target = (target + 1) % targets.len();
        }
        places
    }

    #[test]
    fn every_byte_lies_where_dealing_granules_puts_it() {
        for interleave in all().into_iter().filter(|interleave| interleave.is_set()) {
            let places = dealt(interleave, 64 << 10);
            let mut before = vec![0; interleave.ways() as usize];
            for (at, &(target, place)) in (0..).zip(&places) {
                assert_eq!(interleave.target_of(at), target, "{interleave} {at}");
                assert_eq!(interleave.region_of(target, place), at, "{interleave} {at}");
                for (each, count) in (0..).zip(&before) {
                    assert_eq!(interleave.before(each, at), *count, "{interleave} {each} {at}");
                }
                before[target as usize] += 1;
            }
        }
    }

    proptest! {
        #[test]
        fn ranges_are_the_bytes_in_them(which in 0..all().len(), target in 0_u32..8, start in 0_u64..40_000, length in 0_u64..40_000, far in 0_u64..3) {
            let interleave = all()[which];
            let target = target % interleave.ways();
            // Chunks are far larger than what is looked at: around their edges, too.
            let start = start + far * interleave.granule().saturating_sub(20_000);
            let range = start..start + length;
            let pieces: Vec<_> = interleave.pieces(target, range.clone()).collect();
            prop_assert_eq!(pieces.iter().map(|piece| piece.end - piece.start).sum::<u64>(), length);
            let mut at = start;
            for piece in pieces {
                prop_assert_eq!(interleave.region_of(target, at), piece.start);
                prop_assert_eq!(interleave.target_of(piece.start), target);
                prop_assert_eq!(interleave.target_of(piece.end - 1), target);
                prop_assert_eq!(interleave.target_range(target, &piece), at..at + (piece.end - piece.start));
                at += piece.end - piece.start;
            }
            // The other way round: a region's bytes are those of its targets.
            let targets = (0..interleave.ways()).map(|target| interleave.target_range(target, &range));
            prop_assert_eq!(targets.map(|part| part.end - part.start).sum::<u64>(), length);
        }
    }

    #[test]
    fn sets_are_written_as_they_are_read_and_others_are_refused() {
        for set in all().into_iter().filter(|interleave| interleave.is_set()) {
            assert_eq!(set.to_string().parse(), Ok(set));
        }
        assert_eq!("2x4096".parse::<Interleave>(), "2x4K".parse());
        let refused = |text: &str| text.parse::<Interleave>().unwrap_err().to_string();
        for text in ["", "2", "x256", "2x", "2xK", "2x256M", "-2x256", "2x+256", "2x99999999999999999999"] {
            assert!(refused(text).contains("WAYSxGRANULE"), "{text}");
        }
        for text in ["0x256", "1x256", "3x256", "8x256", "16x256"] {
            assert!(refused(text).contains("2 or 4"), "{text}");
        }
        for text in ["2x0", "2x128", "2x300", "2x32K", "4x4294967295K"] {
            assert!(refused(text).contains("powers of two"), "{text}");
        }
        let why = refused("4x16K");
        assert!(why.contains("65536") && why.contains("16K") && why.contains("8K"), "{why}");
        for ways in [0, 1, 9, u32::MAX] {
            assert!(Interleave::chunks(ways).is_err(), "{ways}");
        }
    }

    #[test]
    fn a_target_is_known_by_its_serial_number() {
        let mut seen = Vec::new();
        for set in all().into_iter().filter(|interleave| interleave.is_set()) {
            for target in 0..set.ways() {
                let serial = set.serial(target);
                assert_eq!(Interleave::of_serial(serial), Some((set, target)));
                assert!(!seen.contains(&serial));
                seen.push(serial);
            }
        }
        assert_eq!("4x4K".parse::<Interleave>().unwrap().serial(3), 0x4c61_6d69_6e61_1443);
        for serial in
            [0, 1, 0x4c61_6d69_6e61_0000, SERIAL, SERIAL | 0x22, SERIAL | 0x30, SERIAL | 0xf20, u64::MAX]
        {
            assert_eq!(Interleave::of_serial(serial), None, "{serial:#x}");
        }
    }
}
