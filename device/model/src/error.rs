//! What is wrong with what a model was given.

use crate::text::printable;

/// Characters of a wrong value that are shown.
const MAX_SHOWN: usize = 100;

/// Why nothing was modelled.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum ModelError {
    /// A number is missing.
    #[error("{field} is missing")]
    Missing {
        /// Its name.
        field: String,
    },
    /// A number is of no use.
    #[error("{field} is {value}: it must be {must}")]
    Field {
        /// Its name.
        field: String,
        /// What was given.
        value: String,
        /// What it may be.
        must: String,
    },
    /// A file is not what it should be.
    #[error("{what}: {why}")]
    Form {
        /// The file or part of it.
        what: String,
        /// What is wrong.
        why: String,
    },
}

impl ModelError {
    /// An error of `field`.
    pub(crate) fn field(
        field: &str,
        value: &(impl ToString + ?Sized),
        must: &(impl ToString + ?Sized),
    ) -> Self {
        let value = value.to_string();
        // Files may hold anything, and messages are read.
        let value = match value.char_indices().nth(MAX_SHOWN) {
            Some((end, _)) => format!("{}…", printable(&value[..end])),
            None => printable(&value),
        };
        Self::Field { field: field.to_owned(), value, must: must.to_string() }
    }

    /// An error of a whole file or text, as others say it: in several lines, perhaps.
    pub(crate) fn form(what: &str, why: &str) -> Self {
        let lines = why.trim_end().lines().map(printable);
        Self::Form { what: what.to_owned(), why: lines.collect::<Vec<_>>().join("\n") }
    }

    /// The same error with the name of the file that it is in.
    pub(crate) fn within_file(self, file: &str) -> Self {
        match self {
            Self::Form { .. } => self,
            _ => Self::Form { what: file.to_owned(), why: self.to_string() },
        }
    }

    pub(crate) fn missing(field: &str) -> Self {
        Self::Missing { field: field.to_owned() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_value_is_shown_as_far_as_it_is_read() {
        let told = |value: &str| ModelError::field("f", value, "less").to_string();
        assert_eq!(told(&"ä".repeat(MAX_SHOWN)), format!("f is {}: it must be less", "ä".repeat(MAX_SHOWN)));
        assert_eq!(told("\u{1b}[2J"), "f is \\u{1b}[2J: it must be less");
        assert_eq!(told(&"ä".repeat(1 << 20)), format!("f is {}…: it must be less", "ä".repeat(MAX_SHOWN)));
    }
}
