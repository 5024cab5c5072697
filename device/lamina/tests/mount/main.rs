//! `lamina mount`: models as files, as they were loaded and at other precisions, for software that
//! knows nothing of them.
//!
//! These tests mount for real: they need /dev/fuse, and root or fusermount3.

mod advice;
mod bad;
mod clients;
mod common;
mod differences;
mod files;
mod life;
mod pools;
mod precisions;
mod scaled;
mod served;
mod tools;
mod tuned;
