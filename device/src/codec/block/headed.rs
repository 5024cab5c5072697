//! A block of bf16 of a transformed window, coded by a plane tree, as [`Bundle::encode_headed`] does it where the mantissas are noise: stream and planes are written to where they
//! belong at once, and the head before them when its length is known. So a bundle need not begin where its bytes do.

use super::{Bundle, MAX_HEAD, Stored, StoredPlanes, with_kept};
use crate::{
    BlockWords,
    codec::{
        Codec,
        head::{self, Details, Head},
        signs,
        survey::survey,
        tree::{self, Whole},
    },
    format::Format,
};

const FORMAT: Format = Format::Bf16;
/// Bytes of a plane.
const RAW: usize = FORMAT.plane_bytes();
/// The first plane below the stream's.
const LOWER: usize = 1 + tree::joint_planes(FORMAT);
const LOWER_PLANES: usize = FORMAT.planes() - LOWER;

impl Bundle {
    /// Codes `words` of bf16 by a plane tree, with `details` in the head.
    pub(super) fn encode_bf16_headed(&mut self, words: &BlockWords, details: Details<'_>) {
        let out = &mut self.bytes[MAX_HEAD..];
        let whole = with_kept(self.effort, |kept| tree::encode_bf16(words, kept, out));
        let length = whole.map_or(0, |whole| whole.length);
        let end = MAX_HEAD + RAW + length + LOWER_PLANES * RAW;
        let (front, rest) = self.bytes.split_at_mut(MAX_HEAD);
        let (sign_plane, behind) = rest.split_at(RAW);
        // Signs seldom are noise where mantissas are.
        let lower_noise = || survey(&behind[length..][..LOWER_PLANES * RAW], RAW, true).noise.count_ones();
        let all_noise = |whole: Whole| whole.noise || lower_noise() as usize == LOWER_PLANES;
        let whole = whole.filter(|whole| all_noise(*whole));
        let mut signs = 0;
        if whole.is_some() {
            signs = signs::encode(FORMAT, sign_plane, RAW, &mut front[head::signs_at()..]).unwrap_or(0);
        }
        let whole = whole.filter(|_| signs > 0 || survey(sign_plane, RAW, true).noise == 1);
        let Some(Whole { checks, .. }) = whole else {
            let mut stream = [0; tree::joint_bytes(FORMAT)];
            let stream = &mut stream[..length];
            stream.copy_from_slice(&behind[..length]);
            self.start = 0;
            return self.encode_planes(FORMAT, Codec::Tree, words, Some(details), Some(stream));
        };
        let head = Head { length: head::write(signs, details, front), delta: details.delta };
        let head_bytes = usize::from(head.length);
        // With the signs in the head, nothing is left of their plane.
        let planes_at = if signs > 0 { MAX_HEAD + RAW } else { MAX_HEAD };
        self.start = planes_at - head_bytes;
        self.bytes.copy_within(..head_bytes, self.start);

        let mut stored = StoredPlanes { head, ..StoredPlanes::zeros(FORMAT, Codec::Tree.bytewise()) };
        self.length = MAX_HEAD + RAW;
        stored.joint = self.joint(length);
        self.length = end - self.start;
        let plane_bytes = u16::try_from(RAW).expect("at most 1024");
        stored.lengths[LOWER..FORMAT.planes()].fill(plane_bytes);
        stored.checks[LOWER..FORMAT.planes()].copy_from_slice(&checks[1..]);
        if signs == 0 {
            (stored.lengths[0], stored.checks[0]) = (plane_bytes, checks[0]);
        }
        self.stored = Some(Stored::Planes(stored));
    }
}
