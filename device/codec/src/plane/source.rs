//! Where the planes lie that a kernel joins: each somewhere, or all of a block one behind the
//! other.
//!
//! The rule: kernels ask for a plane by a number that a compiler knows, so that of a block's planes
//! none is looked up, as pointers are.

use super::PlaneBlock;
use crate::BLOCK_BYTES;

/// Planes `0..N`.
pub(super) trait Source<const N: usize>: Copy {
    /// Whether planes are whole lines apart, so that all of them begin at a line where the first
    /// does.
    const IN_LINES: bool;

    /// Where plane `plane` begins.
    fn plane(self, plane: usize) -> *const u8;

    /// The same planes, for one more step. Of pointers a compiler knows nothing then: it would copy
    /// all to the stack before the first step, which takes longer than to look at each again.
    fn anew(self) -> Self;
}

impl<const N: usize> Source<N> for &[&[u8]; N] {
    const IN_LINES: bool = false;

    #[inline]
    fn plane(self, plane: usize) -> *const u8 {
        self[plane].as_ptr()
    }

    #[inline]
    fn anew(self) -> Self {
        std::hint::black_box(self)
    }
}

/// `N` is a format's planes.
impl<const N: usize> Source<N> for &PlaneBlock {
    const IN_LINES: bool = true;

    #[inline]
    fn plane(self, plane: usize) -> *const u8 {
        self[(N - 1 - plane) * (BLOCK_BYTES / N)..].as_ptr()
    }

    #[inline]
    fn anew(self) -> Self {
        self
    }
}
