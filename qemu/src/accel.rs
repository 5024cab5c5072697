//! Whether the guest runs on the processor (KVM) or is emulated (TCG).
//!
//! `/dev/kvm` may exist and still boot nothing: KVM is usable only when the processor also
//! announces `vmx` or `svm` and the device opens for reading and writing.

use std::fs::{File, OpenOptions};
use std::{fmt, io};

use crate::version::Version;

/// The first QEMU that is trusted to emulate AVX.
const AVX_WORKS: Version = Version { major: 9, minor: 0, patch: 0 };

/// How QEMU runs the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// On the host's processor.
    Kvm,
    /// Emulated, one host thread for each virtual processor.
    Tcg,
}

impl Accel {
    /// KVM when usable, else TCG; the reason is logged.
    pub fn detect() -> Self {
        let open = || OpenOptions::new().read(true).write(true).open("/dev/kvm");
        let (accel, why) = choose(&std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default(), open);
        tracing::debug!("running guests with {accel}: {why}");
        accel
    }

    /// The options for QEMU. The guest must not see a hypervisor: the kernel would refuse to commit
    /// a CXL region, for it cannot be sure to flush the host's caches.
    ///
    /// The emulation of AVX was new in QEMU 7.2: kernels and programs crash in it now and then. Old
    /// QEMUs emulate a processor without.
    pub fn args(self, qemu: Version) -> Vec<String> {
        let (accel, cpu) = match self {
            Self::Kvm => ("kvm", "host,-hypervisor"),
            Self::Tcg if qemu < AVX_WORKS => ("tcg,thread=multi", "qemu64,-hypervisor"),
            Self::Tcg => ("tcg,thread=multi", "max,-hypervisor"),
        };
        ["-accel", accel, "-cpu", cpu].map(String::from).to_vec()
    }
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}

fn choose(cpuinfo: &str, open: impl FnOnce() -> io::Result<File>) -> (Accel, String) {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    if !flags.split_whitespace().any(|flag| flag == "vmx" || flag == "svm") {
        return (Accel::Tcg, "the processor announces neither vmx nor svm".into());
    }
    match open() {
        Ok(_) => (Accel::Kvm, "/dev/kvm opens and the processor has virtualization".into()),
        Err(error) => (Accel::Tcg, format!("/dev/kvm does not open: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn null() -> io::Result<File> {
        File::open("/dev/null")
    }

    #[test]
    fn kvm_needs_both_the_processor_and_the_device() {
        let able = "processor\t: 0\nflags\t\t: fpu vmx sse2\n";
        assert_eq!(choose(able, null).0, Accel::Kvm);
        assert_eq!(choose("flags : svm", null).0, Accel::Kvm);
        let (accel, why) = choose(able, || Err(io::ErrorKind::PermissionDenied.into()));
        assert_eq!(accel, Accel::Tcg);
        assert!(why.contains("/dev/kvm"), "{why}");
    }

    #[test]
    fn a_kvm_device_without_processor_support_is_not_used() {
        // `vmx flags` lists sub-features and `avx512_vmx`-like names only contain the word.
        for cpuinfo in ["", "flags : fpu sse2", "vmx flags : vnmi", "flags : xsvmx"] {
            assert_eq!(choose(cpuinfo, null).0, Accel::Tcg, "{cpuinfo:?}");
        }
    }

    #[test]
    fn the_guest_never_sees_a_hypervisor() {
        for accel in [Accel::Kvm, Accel::Tcg] {
            assert!(accel.args(crate::version::OLDEST).iter().any(|arg| arg.ends_with(",-hypervisor")));
        }
    }
}
