//! The ways to multiply with packs, one for each processor, chosen at run time.

use std::ops::Range;

use super::{PackedSide, TOKENS, dot, fit, spread, unpack, weigh};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::kernel::kernels;

kernels! {
    /// A processor's way to multiply with packs.
    pub enum Kernel {
        /// Any processor.
        Portable,
        /// Levels spread by BMI2's `pdep`, eight multiplied at a time.
        Avx2: ["avx2", "fma", "bmi2"],
        /// The same, but sixteen packs of four tokens looked up at a time.
        Avx512: ["avx2", "fma", "bmi2", "avx512f", "avx512bw", "avx512vbmi"],
    }
}

/// A method that runs the kernel's function for packs of the side's tokens.
macro_rules! by_pack {
    ($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) $(-> $result:ty)? = $portable:expr) => {
        $(#[$doc])*
        pub(super) fn $name(self, side: &PackedSide<'_>, $($argument: $type),*) $(-> $result)? {
            fn run<const PACK: usize>(kernel: Kernel, side: &PackedSide<'_>, $($argument: $type),*) $(-> $result)? {
                assert!(kernel.is_available(), "{kernel:?} needs another processor");
                match kernel {
                    Kernel::Portable => $portable(side, $($argument),*),
                    // SAFETY: the processor has the features of the kernel, as was just asserted.
                    #[cfg(target_arch = "x86_64")]
                    Kernel::Avx512 if PACK == 4 => unsafe { avx512::$name(side, $($argument),*) },
                    // SAFETY: as above; the AVX2 kernel needs less.
                    #[cfg(target_arch = "x86_64")]
                    Kernel::Avx2 | Kernel::Avx512 => unsafe { avx2::$name::<PACK>(side, $($argument),*) },
                }
            }
            match side.pack.tokens() {
                16 => run::<16>(self, side, $($argument),*),
                8 => run::<8>(self, side, $($argument),*),
                _ => run::<4>(self, side, $($argument),*),
            }
        }
    };
}

impl Kernel {
    by_pack! {
        /// See [`fit`].
        fit(channels: Range<usize>, most: u8) -> bool = |side, channels, most| fit::<PACK>(side, channels, most, spread)
    }

    by_pack! {
        /// See [`unpack`].
        unpack(channels: Range<usize>, values: &mut [u8]) = |side, channels, values| unpack::<PACK>(side, channels, values, spread)
    }

    by_pack! {
        /// See [`dot`].
        dot(channels: Range<usize>, query: &[f32], sums: &mut [f32; TOKENS]) = dot::<PACK>
    }

    by_pack! {
        /// See [`weigh`].
        weigh(channels: Range<usize>, scaled: &[f32; TOKENS], out: &mut [f32]) = weigh::<PACK>
    }
}
