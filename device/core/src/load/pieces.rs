//! The bytes of a checkpoint, read by a few threads at once, and what tells them from others'.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use twox_hash::xxhash3_128::Hasher;

use super::{LoadError, PIECE, Reported};
use crate::device::{Source, Stamp, parallel::alone};
use crate::model::{ModelFile, ModelTensor};

/// A file that changed no longer ago than this may change again without its times doing so: file
/// systems count in steps, of up to two seconds.
const STAMPS_APART: Duration = Duration::from_secs(2);
/// Threads that read a checkpoint, at most.
const MAX_THREADS: usize = 8;

/// Has a few threads read the pieces of some tensors and do something with each, by the tensor's
/// number and the place in it: what came of them, in order.
pub(super) fn each_piece<T: Send>(
    model: &ModelFile,
    tensors: &[ModelTensor],
    reported: &Reported<'_>,
    work: impl Fn(usize, u64, &[u8]) -> Result<T, LoadError> + Sync,
) -> Result<Vec<T>, LoadError> {
    let of_tensor = |(number, tensor): (usize, &ModelTensor)| {
        let length = tensor.length;
        (0..length.div_ceil(PIECE)).map(move |piece| (number, piece * PIECE))
    };
    let places: Vec<_> = tensors.iter().enumerate().flat_map(of_tensor).collect();
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let failure = Mutex::new(None);
    let all = Mutex::new(Vec::with_capacity(places.len()));
    let run = || {
        let mut buffer = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let piece = next.fetch_add(1, Ordering::Relaxed);
            let Some(&(number, at)) = places.get(piece) else { return };
            let tensor = &tensors[number];
            let length = PIECE.min(tensor.length - at);
            buffer.resize(usize::try_from(length).unwrap_or(0), 0);
            let done = model.read(tensor, at, &mut buffer).map_err(LoadError::from);
            let done = done.and_then(|()| work(number, at, &buffer));
            match done.and_then(|done| reported.read(&tensor.name, length).map(|()| done)) {
                Ok(done) => all.lock().unwrap_or_else(PoisonError::into_inner).push((piece, done)),
                Err(why) => {
                    stop.store(true, Ordering::Relaxed);
                    *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
                }
            }
        }
    };
    let cores = thread::available_parallelism().map_or(2, usize::from).min(MAX_THREADS);
    if places.len() < cores {
        run();
    } else {
        thread::scope(|scope| {
            for _ in 1..cores {
                scope.spawn(|| alone(run));
            }
            alone(run);
        });
    }
    if let Some(why) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(why);
    }
    let mut all = all.into_inner().unwrap_or_else(PoisonError::into_inner);
    all.sort_unstable_by_key(|(piece, _)| *piece);
    Ok(all.into_iter().map(|(_, done)| done).collect())
}

/// The digest of a checkpoint's contents: XXH3-128 of those of its pieces, tensor by tensor. It is
/// there to notice another file, not one that was made to pass for this one: SHA-256 would take as
/// long as coding does.
pub(super) struct Contents(Hasher);

impl Contents {
    /// Of nothing yet.
    pub(super) fn new() -> Self {
        Self(Hasher::new())
    }

    /// The digest of a piece.
    pub(super) fn of_piece(bytes: &[u8]) -> u128 {
        Hasher::oneshot(bytes)
    }

    /// Adds the digests of pieces.
    pub(super) fn add(&mut self, pieces: &[u128]) {
        for piece in pieces {
            self.0.write(&piece.to_le_bytes());
        }
    }

    /// That of all that was added.
    pub(super) fn digest(&self) -> String {
        hex(self.0.finish_128())
    }

    /// That of a file's tensors.
    pub(super) fn of_file(model: &ModelFile, reported: &Reported<'_>) -> Result<String, LoadError> {
        let mut contents = Self::new();
        contents.add(&each_piece(model, model.tensors(), reported, |_, _, bytes| Ok(Self::of_piece(bytes)))?);
        Ok(contents.digest())
    }
}

fn hex(digest: u128) -> String {
    format!("{digest:032x}")
}

/// A checkpoint as a source of tensors, of which nothing is loaded yet.
pub(crate) fn source_of(model: &ModelFile) -> Source {
    let path = model.path().canonicalize().unwrap_or_else(|_| model.path().to_owned());
    Source {
        path: path.to_string_lossy().into_owned(),
        bytes: model.opened().len(),
        header: hex(model.header_digest()),
        contents: None,
        stamp: None,
    }
}

/// A file's stamp, if its times would tell that it was written after this was said of it.
pub(super) fn stamp_of(said: &Metadata) -> Option<Stamp> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    let latest = said.mtime().max(said.ctime());
    let apart = i64::try_from(now.saturating_sub(STAMPS_APART).as_secs()).ok()?;
    (latest < apart).then(|| stamp(said))
}

/// Whether what the system says of a file tells that it was changed in between.
pub(super) fn told_apart(one: &Metadata, other: &Metadata) -> bool {
    stamp(one) != stamp(other) || one.len() != other.len()
}

fn stamp(said: &Metadata) -> Stamp {
    Stamp {
        device: said.dev(),
        inode: said.ino(),
        modified: (said.mtime(), said.mtime_nsec()),
        changed: (said.ctime(), said.ctime_nsec()),
    }
}
