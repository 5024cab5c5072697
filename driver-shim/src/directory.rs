//! Reading the directory by loads.
//!
//! The device may rewrite the directory while it is read. A checksum tells, and then it is read
//! again, a few times with growing pauses. Only as many bytes are loaded as the header says are
//! used.

use std::{thread, time::Duration};

use lamina_abi::{DIRECTORY_BYTES, Directory, DirectoryError, HEADER_BYTES};

use crate::{Error, Window};

/// Reads before giving up.
const ATTEMPTS: u32 = 8;

/// The directory at the start of the views window.
///
/// # Errors
/// [`Error::Directory`] when the window does not begin with a directory, or it stays damaged.
pub fn read(views: &Window) -> Result<Directory, Error> {
    let wrap = |cause| Error::Directory { path: views.path().into(), cause };
    let mut attempt = 1;
    loop {
        match once(views) {
            Ok(directory) => return Ok(directory),
            Err(error) if attempt == ATTEMPTS || !may_be_a_race(&error) => return Err(wrap(error)),
            Err(error) => tracing::debug!(%error, attempt, "reading the directory again"),
        }
        thread::sleep(Duration::from_millis(1 << attempt));
        attempt += 1;
    }
}

/// Whether a writer could be the cause. Behind a sound checksum nothing is, nor where the header is
/// not ours at all.
fn may_be_a_race(error: &DirectoryError) -> bool {
    matches!(error, DirectoryError::Checksum { .. } | DirectoryError::Bound { field: "used_bytes", .. })
}

fn once(views: &Window) -> Result<Directory, DirectoryError> {
    let limit = views.bytes().min(DIRECTORY_BYTES);
    let mut bytes = loaded(views, limit.min(HEADER_BYTES as u64));
    if let Some(used) = bytes.get(24..32).and_then(|field| field.try_into().ok()).map(u64::from_le_bytes)
        && bytes.starts_with(&lamina_abi::MAGIC)
        && used <= limit
    {
        bytes = loaded(views, used.max(HEADER_BYTES as u64).min(limit));
    }
    lamina_abi::decode(&bytes)
}

/// The first `length` bytes of the window, fewer if it is shorter.
fn loaded(views: &Window, length: u64) -> Vec<u8> {
    let Ok(span) = views.span(0, length) else { return Vec::new() };
    let mut bytes = vec![0; span.len()];
    span.volatile().copy_to(&mut bytes);
    bytes
}
