//! Kernels: one computation written for several processors, chosen at run time.
//!
//! The rules:
//!
//! * The first, `Portable`, is plain Rust and runs anywhere; the others are named for the
//!   instructions they use and stand in the order of their speed. Tests hold each to the first.
//! * A kernel is only called after it was found available: that is what the `unsafe` calls behind
//!   it rest on.
//! * The processor is asked once, as kernels are called for every block. With the feature
//!   `portable` it is taken to have nothing.

/// Declares the kernels of a module: each with the processor's features that it needs.
macro_rules! kernels {
    (
        $(#[$doc:meta])*
        $visibility:vis enum $kernel:ident {
            $(#[$portable_doc:meta])*
            Portable,
            $(
                $(#[$variant_doc:meta])*
                $variant:ident: [$($feature:tt),+],
            )+
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $visibility enum $kernel {
            $(#[$portable_doc])*
            Portable,
            $(
                $(#[$variant_doc])*
                #[cfg(target_arch = "x86_64")]
                $variant,
            )+
        }

        impl $kernel {
            /// The kernels that this processor can run, the best one last.
            $visibility fn available() -> Vec<Self> {
                let all = [
                    Self::Portable,
                    $(
                        #[cfg(target_arch = "x86_64")]
                        Self::$variant,
                    )+
                ];
                all.into_iter().filter(|kernel| kernel.is_available()).collect()
            }

            /// The best one.
            $visibility fn best() -> Self {
                static BEST: std::sync::LazyLock<$kernel> =
                    std::sync::LazyLock::new(|| *$kernel::available().last().expect("the portable one always is"));
                *BEST
            }

            /// Whether this processor can run it.
            #[inline]
            fn is_available(self) -> bool {
                if !self.is_known() {
                    let available = [
                        Some(Self::Portable),
                        $(
                            #[cfg(target_arch = "x86_64")]
                            (cfg!(not(feature = "portable")) $(&& std::arch::is_x86_feature_detected!($feature))+)
                                .then_some(Self::$variant),
                        )+
                    ];
                    let available = available.into_iter().flatten().fold(0, |set, kernel| set | 1 << kernel as u32);
                    Self::known().store(available, std::sync::atomic::Ordering::Relaxed);
                }
                self.is_known()
            }

            /// Whether it was asked whether this processor can run it, and it can.
            #[inline]
            fn is_known(self) -> bool {
                Self::known().load(std::sync::atomic::Ordering::Relaxed) >> self as u32 & 1 == 1
            }

            /// A bit for each that is known to be available: none before it was asked.
            #[inline]
            fn known() -> &'static std::sync::atomic::AtomicU32 {
                static KNOWN: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
                &KNOWN
            }
        }
    };
}

pub(crate) use kernels;
