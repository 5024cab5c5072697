//! A block of bf16 of a transformed window, coded by a plane tree, as [`Bundle::encode_headed`] does it where the mantissas are noise: stream and planes are written to where they
//! belong at once, and the head before them when its length is known. So a bundle need not begin where its bytes do.

use super::{Bundle, MAX_HEAD, Stored, StoredPlanes, with_kept};
use crate::{
    BlockWords,
    codec::{
        Codec,
        check::{self, Span},
        head::{self, Details, Head},
        signs,
        survey::survey,
        tree,
    },
    format::Format,
};

const FORMAT: Format = Format::Bf16;
/// Bytes of a plane.
const RAW: usize = FORMAT.plane_bytes();
/// The first plane below the stream's.
const LOWER: usize = 1 + tree::joint_planes(FORMAT);
/// The planes that are in no stream.
const BESIDE: usize = 1 + FORMAT.planes() - LOWER;

impl Bundle {
    /// Codes `words` of bf16 by a plane tree, with `details` in the head.
    pub(super) fn encode_bf16_headed(&mut self, words: &BlockWords, details: Details<'_>) {
        let out = &mut self.bytes[MAX_HEAD..];
        let length = with_kept(self.effort, |kept| tree::encode_bf16(words, kept, out)).unwrap_or(0);
        let behind = MAX_HEAD + RAW + length;
        let end = behind + (BESIDE - 1) * RAW;
        let (front, rest) = self.bytes.split_at_mut(MAX_HEAD);
        let sign_plane = &rest[..RAW];
        let lower = survey(&rest[behind - MAX_HEAD..end - MAX_HEAD], RAW, true);
        let all_noise = length > 0 && lower.noise.count_ones() as usize == BESIDE - 1;
        let mut signs = 0;
        if all_noise {
            signs = signs::encode(FORMAT, sign_plane, RAW, &mut front[head::signs_at()..]).unwrap_or(0);
        }
        if !all_noise || signs == 0 && survey(sign_plane, RAW, true).noise == 0 {
            let mut stream = [0; tree::joint_bytes(FORMAT)];
            let stream = &mut stream[..length];
            stream.copy_from_slice(&rest[RAW..][..length]);
            self.start = 0;
            return self.encode_planes(FORMAT, Codec::Tree, words, Some(details), Some(stream));
        }
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
        stored.lengths[0] = if signs > 0 { 0 } else { plane_bytes };
        let place = |at: usize| u16::try_from(at).expect("within a bundle and a head");
        let (mut spans, mut checks) =
            ([Span { start: place(MAX_HEAD), length: stored.lengths[0] }; BESIDE], [0; BESIDE]);
        for (at, span) in (behind..end).step_by(RAW).zip(&mut spans[1..]) {
            *span = Span { start: place(at), length: plane_bytes };
        }
        check::checks(&self.bytes, &spans, &mut checks);
        stored.checks[0] = checks[0];
        stored.checks[LOWER..FORMAT.planes()].copy_from_slice(&checks[1..]);
        self.stored = Some(Stored::Planes(stored));
    }
}
