//! The three devices of the paper's Table III, over identical work.
//!
//! | mode | layout | codec, index, bypass | plane-aligned fetch |
//! |---|---|---|---|
//! | `plain` | words | – | – |
//! | `gcomp` | words | 4 KiB blocks | – |
//! | `trace` | bit-planes | planes of 4 KiB blocks | yes |

use std::{fmt, str::FromStr};

/// Which device this is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// CXL-Plain: word-major, uncompressed.
    Plain,
    /// CXL-GComp: word-major, each 4 KiB block compressed by a generic codec, with bypass.
    GComp,
    /// TRACE: bit-planes, compressed one by one, fetched one by one.
    #[default]
    Trace,
}

/// A name that is no mode's.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("no mode is called {name:?}; modes are trace, gcomp and plain")]
pub struct UnknownMode {
    /// The name.
    pub name: String,
}

impl Mode {
    /// The name used everywhere.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::GComp => "gcomp",
            Self::Trace => "trace",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Mode {
    type Err = UnknownMode;

    fn from_str(name: &str) -> Result<Self, UnknownMode> {
        [Self::Plain, Self::GComp, Self::Trace]
            .into_iter()
            .find(|mode| mode.name() == name)
            .ok_or_else(|| UnknownMode { name: name.to_owned() })
    }
}

impl<'de> serde::Deserialize<'de> for Mode {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        name.parse().map_err(serde::de::Error::custom)
    }
}

impl serde::Serialize for Mode {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}
