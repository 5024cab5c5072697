//! How the elements of a decoded block lie.

/// How the elements of a decoded block lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// As the host sees them.
    #[default]
    Words,
    /// Of bf16, [`FIELDS`] elements by as many: their exponents, a byte each, and behind these as
    /// many bytes of a sign above a mantissa. A decoder of exponents has them so before it joins
    /// them to words, and who makes something else of the elements would take them apart again.
    Fields,
}

/// Elements whose fields lie together.
pub const FIELDS: usize = 64;
