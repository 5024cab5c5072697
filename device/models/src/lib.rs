//! The store's publication protocol and its list of losses, their very code, run by loom in every
//! order in which threads and memory may let its steps happen.
//!
//! The device is a large crate and these files of it are small: so they are taken in by their
//! paths, with loom's locks and fences in the place of the usual ones.
#![cfg(test)]
#![allow(unreachable_pub, reason = "public where they belong")]

#[path = "../../store/src/losses.rs"]
#[allow(dead_code, reason = "the models ask for less than the device")]
mod losses;
mod poison;
#[path = "../../store/src/publication.rs"]
mod publication;
mod readers;
mod recovery;
mod sync;
