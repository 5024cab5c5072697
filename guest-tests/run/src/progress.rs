//! How far a job is, for whoever shows it.

use crate::daemon::Ready;

/// How far a job is.
pub enum Step<'a> {
    /// Something begins.
    Doing(&'a str),
    /// The device can be looked at here while it runs.
    Serving(&'a Ready),
    /// The guest reads its `number`th view of `of`.
    Reading {
        /// From 1.
        number: usize,
        /// How many.
        of: usize,
        /// The tensor.
        tensor: &'a str,
        /// The view.
        view: &'a str,
    },
    /// The guest writes or judges its `number`th text of `of`.
    Decoding {
        /// From 1.
        number: usize,
        /// How many.
        of: usize,
        /// The view that weights are read in.
        weights: &'a str,
        /// How the KV cache is read.
        policy: &'a str,
    },
}
