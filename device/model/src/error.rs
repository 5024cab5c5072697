//! What is wrong with what a model was given.

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
        Self::Field { field: field.to_owned(), value: value.to_string(), must: must.to_string() }
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
