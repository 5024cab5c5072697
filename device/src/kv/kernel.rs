//! What each processor runs: the transpose in AVX2 or AVX-512 where there is, the loops over exponents from one source compiled three times. Chosen at run time.

use std::{ops::Range, sync::LazyLock};

use super::{
    delta::{self, Columns, Field},
    order::{self, Order},
};
use crate::BlockWords;

/// A processor's way to run the loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Any processor.
    Portable,
    /// AVX2.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX-512 with byte and word instructions.
    #[cfg(target_arch = "x86_64")]
    Avx512,
}

static BEST: LazyLock<Kernel> =
    LazyLock::new(|| *Kernel::available().last().expect("the portable one always is"));

/// A method that runs `$inner` as compiled for the kernel's processor.
macro_rules! compiled {
    ($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) = $inner:path) => {
        $(#[$doc])*
        pub fn $name(self, $($argument: $type),*) {
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
    /// The kernels that this processor can run, the best one last.
    pub fn available() -> Vec<Self> {
        #[cfg(target_arch = "x86_64")]
        let kernels = [Self::Portable, Self::Avx2, Self::Avx512];
        #[cfg(not(target_arch = "x86_64"))]
        let kernels = [Self::Portable];
        kernels.into_iter().filter(|kernel| kernel.is_available()).collect()
    }

    /// The best one.
    pub fn best() -> Self {
        *BEST
    }

    /// Whether this processor can run it.
    fn is_available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        let avx2 = || {
            std::arch::is_x86_feature_detected!("avx2")
                && std::arch::is_x86_feature_detected!("bmi1")
                && std::arch::is_x86_feature_detected!("bmi2")
                && std::arch::is_x86_feature_detected!("popcnt")
        };
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                avx2()
                    && std::arch::is_x86_feature_detected!("avx512f")
                    && std::arch::is_x86_feature_detected!("avx512bw")
                    && std::arch::is_x86_feature_detected!("avx512dq")
                    && std::arch::is_x86_feature_detected!("avx512vl")
            }
        }
    }

    /// [`Order::channel_major`] by this kernel, which must be available.
    pub fn channel_major(self, order: &Order, from: &[u8], to: &mut [u8]) {
        assert!(self.is_available(), "{self:?} needs another processor");
        order::channel_major(self, order, from, to);
    }

    /// [`Order::token_major`] by this kernel, which must be available.
    pub fn token_major(self, order: &Order, deltas: Option<&Columns<'_>>, from: &[u8], to: &mut [u8]) {
        assert!(self.is_available(), "{self:?} needs another processor");
        order::token_major(self, order, deltas, from, to);
    }

    compiled! {
        /// [`delta::subtract`] by this kernel, which must be available.
        subtract(field: Field, runs: &[u16], words: &mut BlockWords, bases: &mut [u8]) = delta::subtract_any
    }

    compiled! {
        /// [`delta::restore`] by this kernel, which must be available.
        restore(field: Field, runs: &[u16], bases: &[u8], words: &mut BlockWords) = delta::restore_any
    }

    compiled! {
        /// Undoes the differences of `columns` in `rows`, token-major rows of `length` bytes each, by this kernel, which must be available.
        restore_rows(deltas: &Columns<'_>, columns: Range<usize>, length: usize, rows: &mut [u8]) = delta::restore_rows_any
    }
}
