//! Precisions by name: a view's spelling, or a map.

use std::collections::BTreeMap;
use std::fmt;

use super::FilesError;
use super::map::PrecisionMap;
use lamina_codec::format::Format;
use lamina_codec::view::{Kind, View};

/// What a file is shown at.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// A view of every tensor that can give it, by its usual spelling.
    View(Kind, String),
    /// What the map of this name says.
    Map(String),
}

impl Precision {
    /// The precision that a name means.
    pub fn parse(name: &str, maps: &BTreeMap<String, PrecisionMap>) -> Option<Self> {
        if maps.contains_key(name) {
            return Some(Self::Map(name.to_owned()));
        }
        let view = spelled(name).ok()?;
        Some(Self::View(view.kind(), view.to_string()))
    }

    /// The precision of a view.
    pub fn of_kind(kind: Kind) -> Option<Self> {
        let spelling = match kind {
            Kind::Top { packed: false, .. } => kind.to_string(),
            Kind::Converted { target, guard, scale: 0 } => format!("{target}+g{guard}"),
            Kind::Converted { target, guard, scale } => format!("{target}+g{guard}@{scale}"),
            _ => return None,
        };
        Self::parse(&spelling, &BTreeMap::new())
    }
}

impl Precision {
    /// The format that it converts to.
    pub(super) fn target(&self) -> Option<Format> {
        match self {
            Self::View(Kind::Converted { target, .. }, _) => Some(*target),
            Self::View(..) | Self::Map(_) => None,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::View(_, name) | Self::Map(name) => f.write_str(name),
        }
    }
}

/// Whether a view of any format is spelled so.
pub(super) fn is_view(spelling: &str) -> bool {
    Format::ALL.into_iter().any(|format| View::parse(format, spelling).is_ok())
}

/// The view of this spelling, of the first format that has it, if elements of it have a dtype.
pub(super) fn spelled(spelling: &str) -> Result<View, FilesError> {
    let packed = || FilesError::Packed { spelling: spelling.to_owned() };
    let mut first = None;
    for format in Format::ALL {
        match View::parse(format, spelling) {
            Ok(view) => {
                let shown = match view.kind() {
                    Kind::Top { packed, .. } => !packed,
                    Kind::Converted { .. } => true,
                    Kind::Full | Kind::Integer { .. } => false,
                };
                return if shown { Ok(view) } else { Err(packed()) };
            }
            // Of fp32, which has the most planes, and so says most.
            Err(why) if format == Format::Fp32 => first = Some(why),
            Err(_) => {}
        }
    }
    Err(first.map_or_else(packed, FilesError::View))
}
