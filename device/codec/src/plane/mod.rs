//! Bit-plane disaggregation (TRACE III-A, eq. 1 and 2): a block of words as planes, and planes as
//! words again.
//!
//! The rules:
//! * Plane `i` holds bit `i` of every element; element `j` is bit `j % 8` of the plane's byte
//!   `j / 8`.
//! * A [`PlaneBlock`] holds all planes of a block one behind the other, most significant first,
//!   each [`Format::plane_bytes`] long: 4096 bytes in all, whatever the format.
//! * Integers are folded first (`fold.rs`), so that small values of either sign have zero upper
//!   planes.
//! * [`join`] takes each plane from wherever it lies, so that raw planes need not be copied; a
//!   plane that was not fetched is [`ZEROS`]. [`join_block`] takes them from a [`PlaneBlock`],
//!   which is quicker.
//! * Planes whose bits are the bits of bytes that are not a block are [`split_bytes`] and
//!   [`join_bytes`].
//! * Kernels are chosen at run time ([`Kernel`]); all of them give the same bits as the portable
//!   one.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
mod fold;
mod portable;
#[cfg(target_arch = "x86_64")]
mod source;

use crate::{BLOCK_BYTES, BlockWords, format::Format, kernel::kernels};

/// The planes of a block, most significant first.
pub type PlaneBlock = [u8; BLOCK_BYTES];

/// A set of planes: bit `i` stands for plane `i`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PlaneMask(pub u32);

impl PlaneMask {
    /// Every plane of a format.
    pub const fn all(format: Format) -> Self {
        match format.planes() {
            32 => Self(u32::MAX),
            planes => Self((1 << planes) - 1),
        }
    }

    /// Whether plane `plane` is in the set.
    pub const fn has(self, plane: usize) -> bool {
        self.0 >> plane & 1 == 1
    }

    /// The planes of both sets.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether every plane of `other` is in the set.
    pub(crate) const fn covers(self, other: Self) -> bool {
        other.0 & !self.0 == 0
    }

    /// How many planes the set has.
    pub const fn count(self) -> u32 {
        self.0.count_ones()
    }
}

/// Where plane `plane` lies in a [`PlaneBlock`].
pub const fn plane_range(format: Format, plane: usize) -> std::ops::Range<usize> {
    let bytes = format.plane_bytes();
    let start = (format.planes() - 1 - plane) * bytes;
    start..start + bytes
}

/// The planes of a block by their number, each where it lies. Those above the format's are not
/// looked at.
pub type Planes<'a> = [&'a [u8]; 32];

/// Bytes of the longest plane.
const LONGEST: usize = 1024;

/// A plane of zeros, long enough for every format.
pub static ZEROS: Constant = Constant([0; LONGEST]);
/// A plane of ones, long enough for every format.
pub(crate) static ONES: Constant = Constant([0xff; LONGEST]);

/// A plane that begins a cache line, as vectors are loaded fastest.
#[repr(align(64))]
pub struct Constant([u8; LONGEST]);

impl std::ops::Deref for Constant {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

/// Bytes that [`split_bytes`] and [`join_bytes`] take: a multiple of this.
pub(crate) const BYTES_STEP: usize = 512;
/// The most bytes that they take: planes of [`ZEROS`] are that long.
pub(crate) const MAX_BYTES: usize = 8 * LONGEST;

kernels! {
    /// A way to transpose.
    pub enum Kernel {
        /// Plain Rust, 64 elements at a time.
        Portable,
        /// AVX2, 256 or 512 elements at a time.
        Avx2: ["avx2"],
        /// AVX-512 with VBMI and GFNI, 512 elements at a time.
        Avx512: ["avx512f", "avx512bw", "avx512vbmi", "gfni"],
    }
}

/// Calls one function of the kernel's module, having asserted that the processor can run it.
macro_rules! by_kernel {
    ($kernel:expr, $function:ident ( $($argument:expr),* )) => {{
        let kernel = $kernel;
        if !kernel.is_known() {
            return after_asking(kernel, move || by_kernel!(@ kernel, $function ( $($argument),* )));
        }
        by_kernel!(@ kernel, $function ( $($argument),* ));
    }};
    (@ $kernel:ident, $function:ident ( $($argument:expr),* )) => {
        match $kernel {
            Kernel::Portable => portable::$function($($argument),*),
            // SAFETY: the processor is known to have AVX2.
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2 => unsafe { avx2::$function($($argument),*) },
            // SAFETY: the processor is known to have the module's features.
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512 => unsafe { avx512::$function($($argument),*) },
        }
    };
}

/// Does something by a kernel of which nothing is known yet: apart, so that those that are known
/// need nothing of the stack.
#[cold]
#[inline(never)]
fn after_asking(kernel: Kernel, work: impl FnOnce()) {
    assert!(kernel.is_available(), "{kernel:?} needs another processor");
    work();
}

impl Kernel {
    /// [`split`] by this kernel.
    ///
    /// # Panics
    /// If the kernel is not available, or as [`split`].
    pub fn split(self, format: Format, words: &BlockWords, planes: &mut PlaneBlock) {
        assert!(format.planes() > 0, "opaque blocks have no planes");
        by_kernel!(self, split(format, words, planes));
    }

    /// [`join`] by this kernel.
    ///
    /// # Panics
    /// If the kernel is not available, or as [`join`].
    pub fn join(self, format: Format, planes: &Planes<'_>, words: &mut BlockWords) {
        assert!(format.planes() > 0, "opaque blocks have no planes");
        by_kernel!(self, join(format, planes, words));
    }

    /// [`join_block`] by this kernel.
    ///
    /// # Panics
    /// If the kernel is not available, or as [`join_block`].
    pub fn join_block(self, format: Format, mask: PlaneMask, block: &PlaneBlock, words: &mut BlockWords) {
        assert!(format.planes() > 0, "opaque blocks have no planes");
        by_kernel!(self, join_block(format, mask, block, words));
    }

    /// [`split_bytes`] by this kernel.
    ///
    /// # Panics
    /// If the kernel is not available, or as [`split_bytes`].
    pub(crate) fn split_bytes(self, bytes: &[u8], planes: [&mut [u8]; 8]) {
        assert_bytes(bytes.len());
        let planes = planes.map(|plane| &mut plane[..bytes.len() / 8]);
        by_kernel!(self, split_bytes(bytes, planes));
    }

    /// [`join_bytes`] by this kernel.
    ///
    /// # Panics
    /// If the kernel is not available, or as [`join_bytes`].
    pub(crate) fn join_bytes(self, planes: &[&[u8]; 8], out: &mut [u8]) {
        assert_bytes(out.len());
        let planes = planes.map(|plane| &plane[..out.len() / 8]);
        by_kernel!(self, join_bytes(&planes, out));
    }
}

/// Splits `words` into planes.
///
/// # Panics
/// If the format is `opaque`, which has no planes.
pub fn split(format: Format, words: &BlockWords, planes: &mut PlaneBlock) {
    Kernel::best().split(format, words, planes);
}

/// Puts planes together to words. Each plane has [`Format::plane_bytes`] or more.
///
/// For integers a prefix of planes, the others zero, gives the arithmetic shift's bits and, below
/// them, the sign's.
///
/// # Panics
/// If the format is `opaque`, which has no planes, or a plane is too short.
pub fn join(format: Format, planes: &Planes<'_>, words: &mut BlockWords) {
    Kernel::best().join(format, planes, words);
}

/// Puts the planes of `block` that are in `mask` together to words, the others zero, whatever
/// `block` has of them: as [`join`] of what [`select`] gives, but nothing is to be said of where
/// each plane lies.
///
/// # Panics
/// If the format is `opaque`, which has no planes.
pub fn join_block(format: Format, mask: PlaneMask, block: &PlaneBlock, words: &mut BlockWords) {
    Kernel::best().join_block(format, mask, block, words);
}

/// Splits bytes, as many as [`join_bytes`] takes, into the planes of their bits: bit `j % 8` of
/// `planes[i][j / 8]` is bit `i` of `bytes[j]`. Nothing is folded. What a plane has beyond
/// `bytes.len() / 8` bytes is left alone.
///
/// # Panics
/// If there are not that many bytes, or a plane is shorter than an eighth of them.
pub(crate) fn split_bytes(bytes: &[u8], planes: [&mut [u8]; 8]) {
    Kernel::best().split_bytes(bytes, planes);
}

/// Puts the planes of the bits of bytes together, a multiple of [`BYTES_STEP`] of them, at most
/// [`MAX_BYTES`]: bit `i` of `out[j]` is bit `j % 8` of `planes[i][j / 8]`. Nothing is unfolded.
///
/// # Panics
/// If `out` has another length, or a plane is shorter than an eighth of it.
pub(crate) fn join_bytes(planes: &[&[u8]; 8], out: &mut [u8]) {
    Kernel::best().join_bytes(planes, out);
}

fn assert_bytes(length: usize) {
    assert!(
        length.is_multiple_of(BYTES_STEP) && length <= MAX_BYTES,
        "{length} bytes are no multiple of {BYTES_STEP} up to {MAX_BYTES}"
    );
}

/// The first `bytes` of the first `N` planes, in parts of `PART` bytes.
fn parts<'a, const N: usize, const PART: usize>(planes: &[&'a [u8]], bytes: usize) -> [&'a [[u8; PART]]; N] {
    std::array::from_fn(|plane| planes[plane][..bytes].as_chunks().0)
}

/// The first `N` planes, having asserted that they have `bytes` bytes or more.
#[cfg(target_arch = "x86_64")]
#[inline]
fn first<'a, 'b, const N: usize>(planes: &'a [&'b [u8]], bytes: usize) -> &'a [&'b [u8]; N] {
    let planes = planes.first_chunk().expect("every format's planes");
    // Told apart by what is said of them: else a compiler looks at all at once, by shuffles that a
    // join waits for.
    for (plane, bits) in planes.iter().enumerate() {
        assert!(bits.len() >= bytes, "plane {plane} is shorter than {bytes} bytes");
    }
    planes
}

/// The `N` planes of a block, most significant first, each in `PARTS` parts of `PART` bytes.
fn parts_mut<const N: usize, const PARTS: usize, const PART: usize>(
    block: &mut PlaneBlock,
) -> &mut [[[u8; PART]; PARTS]; N] {
    let parts = block.as_chunks_mut().0.as_chunks_mut().0;
    parts.try_into().expect("a block is all planes of a format")
}

/// The planes of `block` that are in `mask`, the others zero.
pub fn select(format: Format, mask: PlaneMask, block: &PlaneBlock) -> Planes<'_> {
    match format.planes() {
        4 => select_of::<4, 1024>(mask, block),
        8 => select_of::<8, 512>(mask, block),
        16 => select_of::<16, 256>(mask, block),
        32 => select_of::<32, 128>(mask, block),
        _ => [&ZEROS; 32],
    }
}

fn select_of<const N: usize, const BYTES: usize>(mask: PlaneMask, block: &PlaneBlock) -> Planes<'_> {
    let mut planes: Planes<'_> = [&ZEROS[..BYTES]; 32];
    let [parts] = block.as_chunks::<BYTES>().0.as_chunks::<N>().0 else { unreachable!("they fill a block") };
    for (plane, part) in parts.iter().rev().enumerate() {
        planes[plane] = if mask.has(plane) { part } else { &ZEROS[..BYTES] };
    }
    planes
}

/// Clears every bit of `words` that lies in a plane outside `mask`: what a word-major device does
/// to serve a view.
///
/// Integers keep their unfolded bits, so that a prefix of planes has zeros below it where
/// [`join()`] has the sign's bits; their views look at neither.
pub fn clear_outside(format: Format, mask: PlaneMask, words: &mut BlockWords) {
    let [a, b, c, d] = match format.bits() {
        32 => mask.0,
        16 => mask.0 << 16 | mask.0,
        8 => mask.0 * 0x0101_0101,
        _ => mask.0 * 0x1111_1111,
    }
    .to_le_bytes();
    for word in words.chunks_exact_mut(4) {
        word.iter_mut().zip([a, b, c, d]).for_each(|(byte, keep)| *byte &= keep);
    }
}

#[cfg(test)]
mod tests;
