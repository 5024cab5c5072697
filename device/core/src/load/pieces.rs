//! The bytes of a checkpoint, read by a few threads at once, and what tells them from others'.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use twox_hash::xxhash3_128::Hasher;

use super::{LoadError, PIECE, Reported};
use crate::device::{Source, Stamp};
use crate::model::{ModelFile, ModelTensor};

/// A file that changed no longer ago than this may change again without its times doing so: file
/// systems count in steps, of up to two seconds.
const STAMPS_APART: Duration = Duration::from_secs(2);
/// Pieces that are read ahead of the one that is stored.
const AHEAD: usize = 2;

/// Has `store` take the pieces of all tensors in order, by the tensor's number and the place in it:
/// their digests. A thread reads ahead. What is stored in one order lies in the same places each
/// time; the device codes a piece on all cores.
pub(super) fn store_each(
    model: &ModelFile,
    reported: &Reported<'_>,
    mut store: impl FnMut(usize, u64, &[u8]) -> Result<(), LoadError>,
) -> Result<Vec<u128>, LoadError> {
    thread::scope(|scope| {
        // Both end with this closure, so that the thread ends when a piece is refused.
        let (full, pieces) = mpsc::sync_channel(AHEAD);
        let (empty, buffers) = mpsc::channel();
        for _ in 0..=AHEAD {
            let _ = empty.send(Vec::new());
        }
        scope.spawn(move || {
            for (number, tensor) in model.tensors().iter().enumerate() {
                for at in (0..tensor.length.div_ceil(PIECE)).map(|piece| piece * PIECE) {
                    let Ok(mut buffer): Result<Vec<u8>, _> = buffers.recv() else { return };
                    buffer
                        .resize(usize::try_from(PIECE.min(tensor.length - at)).expect("at most a piece"), 0);
                    let read = model.read(tensor, at, &mut buffer);
                    let read = read.map(|()| Contents::of_piece(&buffer)).map_err(LoadError::from);
                    let last = read.is_err();
                    if full.send((number, at, buffer, read)).is_err() || last {
                        return;
                    }
                }
            }
        });
        let mut digests = Vec::new();
        for (number, at, buffer, digest) in pieces {
            digests.push(digest?);
            store(number, at, &buffer)?;
            reported.read(&model.tensors()[number].name, buffer.len() as u64)?;
            let _ = empty.send(buffer);
        }
        Ok(digests)
    })
}

/// Has a few threads read a tensor's pieces and do something with each, by its place in the tensor:
/// what came of them, in order.
pub(super) fn each_piece<T: Send>(
    model: &ModelFile,
    tensor: &ModelTensor,
    reported: &Reported<'_>,
    work: impl Fn(u64, &[u8]) -> Result<T, LoadError> + Sync,
) -> Result<Vec<T>, LoadError> {
    let next = AtomicU64::new(0);
    let stop = AtomicBool::new(false);
    let failure = Mutex::new(None);
    let all = Mutex::new(Vec::new());
    let pieces = tensor.length.div_ceil(PIECE);
    let run = || {
        let mut buffer = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let piece = next.fetch_add(1, Ordering::Relaxed);
            let at = piece.saturating_mul(PIECE);
            if at >= tensor.length {
                return;
            }
            let length = PIECE.min(tensor.length - at);
            buffer.resize(usize::try_from(length).unwrap_or(0), 0);
            let done = model.read(tensor, at, &mut buffer).map_err(LoadError::from);
            let done = done.and_then(|()| work(at, &buffer));
            match done.and_then(|done| reported.read(&tensor.name, length).map(|()| done)) {
                Ok(done) => all.lock().unwrap_or_else(PoisonError::into_inner).push((piece, done)),
                Err(why) => {
                    stop.store(true, Ordering::Relaxed);
                    *failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
                }
            }
        }
    };
    let cores = thread::available_parallelism().map_or(2, usize::from).min(8);
    let helpers = usize::try_from(pieces).unwrap_or(cores).min(cores).saturating_sub(1);
    thread::scope(|scope| {
        for _ in 0..helpers {
            scope.spawn(run);
        }
        run();
    });
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

    /// Adds the digests of a tensor's pieces.
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
        for tensor in model.tensors() {
            contents.add(&each_piece(model, tensor, reported, |_, bytes| Ok(Self::of_piece(bytes)))?);
        }
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
