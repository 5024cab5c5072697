//! QEMU's version, and the oldest one that will do.
//!
//! QEMU 11.1 is the first that maps a `cxl-type3` device's memory into the guest directly; before
//! it every load and store was trapped, fifty times slower, and vector instructions crashed KVM
//! guests.

use std::fmt;

/// A version of QEMU, such as 11.1.3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// 11 of 11.1.3.
    pub major: u32,
    /// 1 of 11.1.3.
    pub minor: u32,
    /// 3 of 11.1.3; 0 when not stated.
    pub patch: u32,
}

/// The oldest QEMU that Lamina attaches to as CXL memory.
pub const OLDEST: Version = Version { major: 11, minor: 1, patch: 0 };

impl Version {
    /// Reads the version from what `qemu-system-x86_64 --version` prints; `None` if that is
    /// something else.
    pub fn parse(output: &str) -> Option<Self> {
        let rest = output.split_once("QEMU emulator version ")?.1;
        let number = rest.split(|c: char| !c.is_ascii_digit() && c != '.').next()?;
        let mut parts = number.split('.').map(|part| part.parse().ok());
        let major = parts.next()??;
        let minor = parts.next()??;
        let patch = parts.next().flatten().unwrap_or(0);
        Some(Self { major, minor, patch })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_qemu_prints_is_understood() {
        let debian = "QEMU emulator version 11.1.3 (Debian 1:11.1.3+ds-1~bpo13+1)\nCopyright (c) 2003-2026 Fabrice Bellard\n";
        assert_eq!(Version::parse(debian), Some(Version { major: 11, minor: 1, patch: 3 }));
        let candidate = Version::parse("QEMU emulator version 11.1.0-rc2");
        assert_eq!(candidate, Some(Version { major: 11, minor: 1, patch: 0 }));
        assert_eq!(
            Version::parse("QEMU emulator version 12.0"),
            Some(Version { major: 12, minor: 0, patch: 0 })
        );
    }

    #[test]
    fn what_is_no_version_is_refused() {
        for text in [
            "",
            "QEMU emulator version ",
            "QEMU emulator version eleven",
            "QEMU emulator version 11",
            "qemu 11.1.3",
        ] {
            assert_eq!(Version::parse(text), None, "{text:?}");
        }
        assert_eq!(Version::parse("QEMU emulator version 99999999999999999999.1"), None);
    }

    #[test]
    fn versions_are_ordered_by_number_not_by_text() {
        let old = Version::parse("QEMU emulator version 9.10.2").unwrap();
        let trapped = Version::parse("QEMU emulator version 10.2.0").unwrap();
        assert!(old < trapped && trapped < OLDEST);
        assert!(Version::parse("QEMU emulator version 11.1.0").unwrap() >= OLDEST);
    }
}
