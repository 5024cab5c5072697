//! The store's publication protocol, its very code, run by loom in every order in which threads and memory may let its steps happen.
//!
//! The device is a large crate and this file of it is small: so it is taken in by its path, with loom's locks and fences in the place of the usual ones.
#![cfg(test)]

#[path = "../../src/store/publication.rs"]
mod publication;
mod readers;
mod recovery;
mod sync;
