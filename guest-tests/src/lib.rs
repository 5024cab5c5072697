//! The main job, and the harness that boots guests and checks them.
//!
//! A job starts the device as a user would ([`daemon`]), boots a guest on it that reads every tensor in every view
//! ([`visit`]), holds each hash against the reference computed from the model file ([`judge`]), and tells what came of it
//! ([`report`]). Nothing here looks into the device but through its API.

pub mod daemon;
pub mod job;
pub mod judge;
pub mod programs;
pub mod report;
pub mod visit;
