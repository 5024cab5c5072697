//! `lamina pool put`: an object's bytes go from a file to the pool a piece at a time. What does not
//! say how long it is, a pipe, is read first, as far as the pool could hold it.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use lamina_pool::{Class, Pool, PoolError, local};

use super::with;

/// Bytes that are read at a time.
const PIECE: usize = 1 << 20;

/// Stores what `from` holds, or standard input, as an object of a pool. Its bytes.
pub(super) fn put(pool: &Path, name: &str, from: Option<PathBuf>, class: Option<&Class>) -> Result<u64> {
    let (path, file) = match from {
        Some(path) => {
            let file = File::open(&path);
            (path, file)
        }
        None => (PathBuf::from("standard input"), io::stdin().as_fd().try_clone_to_owned().map(File::from)),
    };
    let mut file = file.with_context(|| path.display().to_string())?;
    let (head, length) = begin(pool, &path, &mut file)?;
    with(pool, |pool| {
        pool.of(class)?.put_from(name, length, |object| {
            object.append(&head)?;
            let append = |piece: &[u8]| {
                object.append(piece)?;
                serve(pool)
            };
            pieces(&path, &mut file, length - head.len() as u64, append)
        })?;
        Ok(length)
    })
}

/// How what is at `path` begins, and its length. All of it if it does not say how long it is.
fn begin(pool: &Path, path: &Path, file: &mut File) -> Result<(Vec<u8>, u64)> {
    let (mut head, whole) = (Vec::new(), PIECE as u64);
    let named = || path.display().to_string();
    file.by_ref().take(whole).read_to_end(&mut head).with_context(named)?;
    let mut length = head.len() as u64;
    if length < whole {
        return Ok((head, length));
    }
    let metadata = file.metadata()?;
    if metadata.is_file() {
        // It may have been read from before.
        length += metadata.len().saturating_sub(file.stream_position()?);
    }
    if length == whole {
        let most = Pool::geometry(local::memory(pool)?)?.data()?;
        let most = most.end - most.start;
        file.by_ref().take(most.saturating_sub(length) + 1).read_to_end(&mut head).with_context(named)?;
        length = head.len() as u64;
        ensure!(length <= most, "{} holds more than the {most} bytes of the pool's chunks", path.display());
    }
    Ok((head, length))
}

/// Does the node's duty: others may wait for it while a large file is read.
fn serve(pool: &Pool) -> Result<(), PoolError> {
    match pool.serve() {
        // It is done the next time.
        Err(PoolError::Timeout(_)) => Ok(()),
        served => served,
    }
}

/// Calls `each` with the next `length` bytes of what is at `path`.
fn pieces(
    path: &Path,
    from: &mut impl Read,
    length: u64,
    mut each: impl FnMut(&[u8]) -> Result<(), PoolError>,
) -> Result<(), PoolError> {
    let fail = |cause| PoolError::File { path: path.to_owned(), cause };
    let (mut left, mut piece) = (length, Vec::new());
    while left > 0 {
        piece.clear();
        from.by_ref().take(left.min(PIECE as u64)).read_to_end(&mut piece).map_err(fail)?;
        if piece.is_empty() {
            let why = format!("it had {length} bytes more, and {left} of them are gone");
            return Err(fail(io::Error::new(ErrorKind::UnexpectedEof, why)));
        }
        each(&piece)?;
        left -= piece.len() as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::FileExt;

    use lamina_pool::Geometry;
    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    #[test]
    fn an_object_is_what_was_read_whether_it_says_how_long_it_is_or_not() {
        let folder = tempfile::tempdir().unwrap();
        let [pool, from, pipe] = ["pool", "from", "pipe"].map(|name| folder.path().join(name));
        local::create(&pool, &Geometry::fitting(32 << 20)).unwrap();
        let stored = |from: &Path| {
            let bytes = put(&pool, "it", Some(from.to_owned()), None).unwrap();
            let found = with(&pool, |pool| Ok(pool.get("it")?)).unwrap().unwrap();
            assert_eq!(bytes, found.len() as u64);
            found
        };
        mkfifo(&pipe, Mode::S_IRWXU).unwrap();
        for length in [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5] {
            let bytes: Vec<u8> = (0..length).map(|at| (at / 251 + at).to_le_bytes()[0]).collect();
            fs::write(&from, &bytes).unwrap();
            assert!(stored(&from) == bytes, "{length}");
            std::thread::scope(|scope| {
                scope.spawn(|| fs::write(&pipe, &bytes).unwrap());
                assert!(stored(&pipe) == bytes, "{length}");
            });
        }
        // It says that it has no bytes.
        assert_eq!(stored(Path::new("/proc/version")), fs::read("/proc/version").unwrap());
    }

    #[test]
    fn what_the_pool_cannot_hold_is_refused_before_it_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let [pool, large] = ["pool", "large"].map(|name| folder.path().join(name));
        local::create(&pool, &Geometry::fitting(8 << 20)).unwrap();
        let refused =
            |from: &Path| format!("{:#}", put(&pool, "it", Some(from.to_owned()), None).unwrap_err());
        // A hole of so many bytes takes no space, and no memory would hold it.
        let file = File::create(&large).unwrap();
        file.set_len(1 << 42).unwrap();
        file.write_all_at(b"x", 0).unwrap();
        assert!(refused(&large).starts_with("no space for 4398046511104 bytes"), "{}", refused(&large));
        let endless = refused(Path::new("/dev/zero"));
        assert!(endless.starts_with("/dev/zero holds more than the "), "{endless}");
        assert!(refused(folder.path()).starts_with(&folder.path().display().to_string()));
        assert!(with(&pool, |pool| Ok(pool.list()?)).unwrap().is_empty());
    }

    #[test]
    fn a_file_that_became_shorter_is_said_to() {
        let mut read = Vec::new();
        let each = |piece: &[u8]| {
            read.extend_from_slice(piece);
            Ok(())
        };
        let why = pieces(Path::new("a file"), &mut &b"abc"[..], 5, each).unwrap_err().to_string();
        assert_eq!(why, "a file: it had 5 bytes more, and 2 of them are gone");
        assert_eq!(read, b"abc");
    }
}
