//! What each processor runs: the transpose in AVX2 or AVX-512 where there is, the loops over
//! exponents and over rows that repeat from one source compiled three times. Chosen at run time.

use std::ops::Range;

use super::{
    delta::{self, ColumnBases, Columns, Field},
    order::{self, Order},
    repeats::{self, Repeats},
};
use crate::{BlockWords, kernel::kernels};

kernels! {
    /// A processor's way to run the loops.
    pub(crate) enum Kernel {
        /// Any processor.
        Portable,
        /// AVX2.
        Avx2: ["avx2", "bmi1", "bmi2", "popcnt"],
        /// AVX-512 with byte and word instructions.
        Avx512: ["avx2", "bmi1", "bmi2", "popcnt", "avx512f", "avx512bw", "avx512dq", "avx512vl"],
    }
}

/// A method that runs `$inner` as compiled for the kernel's processor.
macro_rules! compiled {
    ($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) = $inner:path) => {
        $(#[$doc])*
        pub(crate) fn $name(self, $($argument: $type),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,bmi1,bmi2,popcnt")]
            fn avx2($($argument: $type),*) {
                $inner($($argument),*);
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,bmi1,bmi2,popcnt")]
            fn avx512($($argument: $type),*) {
                $inner($($argument),*);
            }
            assert!(self.is_available(), "{self:?} needs another processor");
            match self {
                Self::Portable => $inner($($argument),*),
                // SAFETY: the processor has these features, as was just asserted.
                #[cfg(target_arch = "x86_64")]
                Self::Avx2 => unsafe { avx2($($argument),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Self::Avx512 => unsafe { avx512($($argument),*) },
            }
        }
    };
}

impl Kernel {
    /// [`Order::channel_major`] by this kernel, which must be available.
    pub(crate) fn channel_major(
        self,
        order: &Order,
        deltas: Option<ColumnBases<'_>>,
        from: &[u8],
        to: &mut [u8],
    ) {
        assert!(self.is_available(), "{self:?} needs another processor");
        order::channel_major(self, order, deltas, from, to);
    }

    /// [`Order::token_major`] by this kernel, which must be available.
    pub(crate) fn token_major(self, order: &Order, deltas: Option<&Columns<'_>>, from: &[u8], to: &mut [u8]) {
        assert!(self.is_available(), "{self:?} needs another processor");
        order::token_major(self, order, deltas, from, to);
    }

    compiled! {
        /// [`delta::subtract`] by this kernel, which must be available.
        subtract(field: Field, runs: &[u16], words: &mut [u8], bases: &mut [u8]) = delta::subtract_any
    }

    compiled! {
        /// [`delta::restore`] by this kernel, which must be available.
        restore(field: Field, runs: &[u16], bases: &[u8], words: &mut BlockWords) = delta::restore_any
    }

    compiled! {
        /// Undoes the differences of `columns` in `rows`, token-major rows of `length` bytes each,
        /// by this kernel, which must be available.
        restore_rows(deltas: &Columns<'_>, columns: Range<usize>, length: usize, rows: &mut [u8]) = delta::restore_rows_any
    }

    compiled! {
        /// Finds which of at most [`MAX_ROWS`](super::repeats::MAX_ROWS) rows of `length` bytes,
        /// eight or more, repeat, by this kernel, which must be available. If none seems to,
        /// `repeats` stays as it is: empty.
        find_repeats(length: usize, rows: &[u8], repeats: &mut Repeats) = repeats::find_any
    }

    compiled! {
        /// Copies the rows that are kept to the front of `to`, by this kernel, which must be
        /// available.
        keep_rows(length: usize, repeats: &Repeats, from: &[u8], to: &mut [u8]) = repeats::keep_any
    }

    compiled! {
        /// Copies every row from among those that are kept, at the front, by this kernel, which
        /// must be available.
        spread_rows(length: usize, repeats: &Repeats, rows: &mut [u8]) = repeats::spread_any
    }
}
