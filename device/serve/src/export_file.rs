//! The files of an export.

/// What a file of an export shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportFile {
    /// The base window.
    Base,
    /// The views window.
    Views,
    /// A target of the base window.
    Target(u32),
}
