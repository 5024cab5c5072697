//! The description of a stored block: which planes have how many bytes where in the bundle.

use std::ops::Range;

use super::{MAX_BUNDLE, MAX_PLANES, TRAILING_CHECK};
use crate::{BLOCK_BYTES, Codec, check::Span, format::Format, head::Head, plane::PlaneMask, tree};

/// Formats with more planes keep their checks in the bundle.
pub const MAX_CHECKS: usize = 16;

/// How one plane is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredPlane {
    /// Every bit is zero: nothing stored.
    Zeros,
    /// Every bit is one: nothing stored.
    Ones,
    /// The plane's own bytes.
    Raw,
    /// This many bytes of the block's codec.
    Coded(u16),
    /// One of those in the block's [`Joint`] stream, which has no bytes of its own.
    Joint,
}

/// The plane tree's stream of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Joint {
    /// Bytes; 0 is no stream.
    pub length: u16,
    /// CRC-32C of them.
    pub check: u32,
}

/// How a block's planes are stored, counted from the most significant on: plane `p` of the format's
/// `n` is at `n − 1 − p`.
///
/// Kept small, because every read copies it, and such that no step of a read asks for the kind of
/// each plane in turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredPlanes {
    /// The block's format, which need not be its tensor's of today.
    pub format: Format,
    /// The codec of its singly coded planes.
    pub codec: Codec,
    /// The head before them.
    pub head: Head,
    /// The stream of its jointly coded planes.
    pub joint: Joint,
    /// Bytes of each plane in the bundle, its check not counted: none of one that is constant or in
    /// the stream.
    pub lengths: [u16; MAX_PLANES],
    /// Bit `i` is set if the plane at `i` is all ones.
    pub ones: u32,
    /// The checks of the planes that have bytes, where they are not in the bundle; zero otherwise.
    pub checks: [u16; MAX_CHECKS],
}

/// Bytes of a bundle's parts, which lie in it in this order: the head, the first plane, the stream,
/// the other planes. Whoever reads planes reads the head.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parts {
    /// Of the head.
    pub head: u16,
    /// Of the stream.
    pub stream: u16,
    /// Planes in the stream: the second and those that follow it.
    pub joint: usize,
    /// Of each plane with its check, the most significant first; 0 of one in the stream.
    pub planes: Vec<u16>,
}

/// How a block is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Bit-planes.
    Planes(StoredPlanes),
    /// Words, coded if `length` is less than a block.
    Words {
        /// The codec, if coded.
        codec: Codec,
        /// Stored bytes.
        length: u16,
        /// CRC-32C of the stored bytes.
        check: u32,
    },
    /// A piece of a KV window that is coded with loss, which only all of them give back.
    Packed {
        /// Stored bytes.
        length: u16,
        /// CRC-32C of the stored bytes.
        check: u32,
    },
}

impl StoredPlanes {
    /// Planes of `format`, all of them zeros.
    pub const fn zeros(format: Format, codec: Codec) -> Self {
        Self {
            format,
            codec,
            head: Head { length: 0, delta: false },
            joint: Joint { length: 0, check: 0 },
            lengths: [0; MAX_PLANES],
            ones: 0,
            checks: [0; MAX_CHECKS],
        }
    }

    /// How the plane at `index` is stored.
    pub fn plane(&self, index: usize) -> StoredPlane {
        match self.lengths[index] {
            _ if self.is_joint(index) => StoredPlane::Joint,
            0 if self.ones >> index & 1 == 1 => StoredPlane::Ones,
            0 => StoredPlane::Zeros,
            length if usize::from(length) == self.format.plane_bytes() => StoredPlane::Raw,
            length => StoredPlane::Coded(length),
        }
    }

    /// Whether a bundle begins with the planes as they are, one behind the other.
    pub(super) fn is_block(&self) -> bool {
        let (count, raw) = (self.format.planes(), self.format.plane_bytes());
        self.head.length == 0
            && self.joint.length == 0
            && trailing_check(self.format) == 0
            && self.lengths[..count].iter().all(|length| usize::from(*length) == raw)
    }

    /// The planes that are not in the stream: all, or the sign and those below the stream's.
    pub fn single(&self) -> [Range<usize>; 2] {
        let count = self.format.planes();
        match self.joint.length {
            0 => [0..count, count..count],
            _ => [0..1, 1 + tree::joint_planes(self.format)..count],
        }
    }

    /// Whether the plane at `index` is in the stream.
    pub(crate) fn is_joint(&self, index: usize) -> bool {
        self.joint.length > 0 && is_joint(self.format, index)
    }

    /// Bytes of the bundle.
    pub fn bytes(&self) -> usize {
        // Not in usize: 32 narrow additions are a few vector ones.
        let (mut bytes, mut stored) = (u32::from(self.head.length) + u32::from(self.joint.length), 0);
        for length in self.lengths {
            bytes += u32::from(length);
            stored += u32::from(length > 0);
        }
        bytes as usize + stored as usize * usize::from(trailing_check(self.format))
    }

    /// Bytes of the head and of the first `count` planes, and of the stream if some are in it.
    fn first(&self, count: usize, with_stream: bool) -> usize {
        let stream = if with_stream { self.joint.length } else { 0 };
        let trailing = trailing_check(self.format);
        let planes = self.lengths[..count].iter();
        let bytes = planes.map(|length| usize::from(if *length > 0 { length + trailing } else { 0 }));
        usize::from(self.head.length) + usize::from(stream) + bytes.sum::<usize>()
    }

    /// Bytes of the bundle's parts.
    pub fn parts(&self) -> Parts {
        let (count, trailing) = (self.format.planes(), trailing_check(self.format));
        let with_check = |length: &u16| if *length > 0 { length + trailing } else { 0 };
        Parts {
            head: self.head.length,
            stream: self.joint.length,
            joint: if self.joint.length > 0 { tree::joint_planes(self.format) } else { 0 },
            planes: self.lengths[..count].iter().map(with_check).collect(),
        }
    }

    /// The planes in `mask` in this order: bit `i` is the plane at `i`.
    pub(super) const fn wanted(&self, mask: PlaneMask) -> u32 {
        mask.0.reverse_bits() >> (MAX_PLANES - self.format.planes())
    }

    /// Where the bytes of the stream lie: behind the sign plane's.
    #[inline]
    pub(super) fn stream(&self) -> Span {
        let sign = self.lengths[0];
        let behind = if sign > 0 { sign + trailing_check(self.format) } else { 0 };
        Span { start: self.head.length + behind, length: self.joint.length }
    }

    /// Tells where the bytes of each plane in `wanted` lie that is not in the stream, that the
    /// others have none.
    #[inline]
    pub(super) fn find(&self, wanted: u32, mut each: impl FnMut(usize, Span)) {
        let trailing = trailing_check(self.format);
        let length = |index| if wanted >> index & 1 == 1 { self.lengths[index] } else { 0 };
        each(0, Span { start: self.head.length, length: length(0) });
        let stream = self.stream();
        let mut start = stream.start + stream.length;
        let first = if stream.length > 0 { 1 + tree::joint_planes(self.format) } else { 1 };
        for index in first..self.format.planes().min(MAX_PLANES) {
            each(index, Span { start, length: length(index) });
            start += if self.lengths[index] > 0 { self.lengths[index] + trailing } else { 0 };
        }
    }

    /// Whether `mask` has planes that are in the stream.
    pub(super) fn wants_stream(&self, mask: PlaneMask) -> bool {
        let below = self.format.planes() - 1 - tree::joint_planes(self.format);
        self.joint.length > 0 && mask.0 >> below & ((1 << tree::joint_planes(self.format)) - 1) != 0
    }
}

impl Stored {
    /// Bytes of the bundle.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Planes(planes) => planes.bytes(),
            Self::Words { length, .. } | Self::Packed { length, .. } => (*length).into(),
        }
    }

    /// Whether it is a part of a KV window, and means nothing by itself.
    pub fn is_of_window(&self) -> bool {
        self.head_bytes() > 0 || self.is_lossy()
    }

    /// Whether it gives other values than were stored.
    pub const fn is_lossy(&self) -> bool {
        matches!(self, Self::Packed { .. })
    }

    /// Bytes of its head.
    pub fn head_bytes(&self) -> usize {
        match self {
            Self::Planes(planes) => planes.head.length.into(),
            Self::Words { .. } | Self::Packed { .. } => 0,
        }
    }

    /// Whether no codec helped: every stored plane is raw, or the words are.
    pub fn is_bypass(&self) -> bool {
        match self {
            Self::Planes(planes) => {
                let raw = planes.format.plane_bytes();
                planes.head.length == 0
                    && planes.joint.length == 0
                    && planes.lengths.iter().all(|length| *length == 0 || usize::from(*length) == raw)
            }
            Self::Words { length, .. } => usize::from(*length) == BLOCK_BYTES,
            Self::Packed { .. } => false,
        }
    }

    /// The runs of bundle bytes that hold the planes in `mask`, in order, neighbours joined. Words
    /// are one run whatever the mask.
    pub fn runs(&self, mask: PlaneMask, mut each: impl FnMut(Range<usize>)) {
        let planes = match self {
            Self::Planes(planes) if !mask.covers(PlaneMask::all(planes.format)) => planes,
            // All of it.
            _ => {
                let bytes = self.bytes();
                if bytes > 0 {
                    each(0..bytes);
                }
                return;
            }
        };
        let wanted = planes.wanted(mask);
        if wanted & wanted.wrapping_add(1) == 0 {
            // They are the first ones, as of most views.
            let bytes = planes.first(wanted.count_ones() as usize, planes.wants_stream(mask));
            if bytes > 0 {
                each(0..bytes);
            }
            return;
        }
        let mut open = 0..usize::from(planes.head.length);
        let mut add = |run: Range<usize>| {
            if run.start > open.end {
                if !open.is_empty() {
                    each(open.clone());
                }
                open.start = run.start;
            }
            open.end = run.end;
        };
        let mut wants_stream = planes.wants_stream(mask);
        let stream = planes.stream().range();
        planes.find(wanted, |index, span| {
            let Range { start, end } = span.range();
            if index > 0 && std::mem::take(&mut wants_stream) {
                add(stream.clone());
            }
            if start < end {
                add(start..end + usize::from(trailing_check(planes.format)));
            }
        });
        if wants_stream {
            add(stream);
        }
        if !open.is_empty() {
            each(open);
        }
    }
}

/// Whether plane number `index`, counted from the most significant on, is one that the plane tree
/// codes.
const fn is_joint(format: Format, index: usize) -> bool {
    0 < index && index <= tree::joint_planes(format)
}

/// Bytes of check that follow each stored plane of this format.
pub(super) const fn trailing_check(format: Format) -> u16 {
    if format.planes() > MAX_CHECKS { TRAILING_CHECK } else { 0 }
}

/// Bytes that a bundle with a head of `head` bytes may have: behind it, a plane tree may be read
/// beyond its end.
pub const fn most_bytes(head: usize) -> usize {
    if head > 0 { MAX_BUNDLE - tree::SLACK } else { MAX_BUNDLE }
}
