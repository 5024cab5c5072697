//! A block of bf16 coded whole: its exponents as a stream, its other planes as they are.
//!
//! Signs and mantissas mostly are noise. So they are written to where they belong in the bundle at
//! once, the sign plane before the stream and the others behind it, and what is to be known of them
//! is found on the way: their checks, and whether they are noise. The rules:
//!
//! * The planes wait beside the bundle until the stream has its length.
//! * What is told of the planes is what [`check`](super::super::check) and
//!   [`survey`](super::super::survey) say.

use super::{Kernel, Workspace};
use crate::{BlockWords, check, format::Format, plane, survey::survey};

/// Bytes of a plane.
pub(super) const PLANE: usize = Format::Bf16.plane_bytes();
/// Lines of a plane.
pub(super) const STEPS: usize = PLANE / 64;
/// Planes beside the exponent's.
pub(crate) const BESIDE: usize = 8;

/// What there is to know of a block that was coded whole. It is where the caller has it from the
/// beginning, as results are copied on their way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Whole {
    /// Bytes of the stream.
    pub length: usize,
    /// The checks of the planes beside it, most significant first.
    pub checks: [u16; BESIDE],
    /// Which of these planes are noise, the most significant one in the lowest bit.
    pub noise: u8,
}

impl Kernel {
    /// Codes a block of bf16 whole, its other planes as they are: sign plane, stream, lower planes.
    /// False if there is no stream, as [`Self::encode_block`] says; what is in `out` is then
    /// undefined, and `whole` is as it was.
    ///
    /// # Panics
    /// If the processor does not have this kernel or `out` is shorter than a block and
    /// [`SLACK`](super::SLACK).
    pub fn encode_bf16(
        self,
        words: &BlockWords,
        workspace: &mut Workspace,
        out: &mut [u8],
        whole: &mut Whole,
    ) -> bool {
        let Workspace { fields, scratch } = workspace;
        let (values, rests, planes) = fields.of_bf16();
        self.take_apart(words, values, rests, planes);
        let (sign, out) = out.split_at_mut(PLANE);
        let Some(length) = self.encode(Format::Bf16, values, out, scratch) else {
            return false;
        };
        whole.length = length;
        self.place(planes, sign, &mut out[length..], whole);
        true
    }

    /// Takes a block apart to values and the planes beside them, most significant first; `rests` is
    /// scratch.
    fn take_apart(
        self,
        words: &BlockWords,
        values: &mut [u8],
        rests: &mut [u8],
        planes: &mut [[u8; PLANE]; BESIDE],
    ) {
        assert!(self.is_available(), "{self:?} needs another processor");
        #[cfg(target_arch = "x86_64")]
        if self == Self::Avx512 {
            // SAFETY: the processor has its features, as was asserted above.
            return unsafe { super::avx512::take_apart(words, values, planes) };
        }
        self.take_bf16(words, values, rests);
        let mut planes = planes.each_mut().map(|plane| &mut plane[..]);
        planes.reverse();
        plane::split_bytes(rests, planes);
    }

    /// Copies planes to where they belong, the first to `sign` and the others to `lower`, and finds
    /// their checks, and which are noise.
    fn place(self, planes: &[[u8; PLANE]; BESIDE], sign: &mut [u8], lower: &mut [u8], whole: &mut Whole) {
        let sign = sign.first_chunk_mut().expect("room for the sign plane");
        let mut lower = lower.as_chunks_mut().0.iter_mut();
        let mut next = || lower.next().expect("room for all planes");
        let mut places = [sign, next(), next(), next(), next(), next(), next(), next()];
        assert!(self.is_available(), "{self:?} needs another processor");
        #[cfg(target_arch = "x86_64")]
        if self == Self::Avx512 {
            // SAFETY: the processor has its features, as was asserted above.
            let noise = unsafe { super::avx512::place(planes, &mut places, &mut whole.checks) };
            whole.noise = noise.unwrap_or_else(|| noise_of(planes));
            return;
        }
        places.iter_mut().zip(planes).for_each(|(place, plane)| **place = *plane);
        whole.checks = planes.each_ref().map(|plane| check::check(plane));
        whole.noise = noise_of(planes);
    }
}

/// Which planes are noise.
fn noise_of(planes: &[[u8; PLANE]; BESIDE]) -> u8 {
    let [noise, ..] = survey(planes.as_flattened(), PLANE, true).noise.to_le_bytes();
    noise
}
