//! Snapshots: an image without its holes, as one stream that can be moved to another machine.
//!
//! A stream is a magic number and the image's length, then *extents*, each its place in the image,
//! its length, a CRC-32C of both and its bytes, and at the end an extent of length 0 whose place is
//! the number of extents. Numbers are little-endian, 8 bytes each. Extents are in order and do not
//! overlap; what is between them is zeros.

use std::{
    ffi::OsString,
    fs::File,
    io::{self, Read, Write},
    ops::Range,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
};

use nix::{
    errno::Errno,
    fcntl::{AT_FDCWD, RenameFlags, renameat2},
};

use super::{
    image::{Image, ImageError, known_version},
    index::PAGE_BYTES,
    memory::data_of,
    saving::Saving,
    tables::saved_once,
};

/// What a stream begins with; the number of its image's version follows.
const MAGIC: &[u8; 7] = b"LAMSNAP";
/// Bytes of the longest extent.
const MAX_BYTES: usize = 1 << 20;
/// Bytes of an extent before its data: place, length, check.
#[doc(hidden)]
pub const HEAD_BYTES: usize = 24;

/// Why a snapshot cannot be restored.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The system refuses.
    #[error("cannot use {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is something else, cut short or damaged.
    #[error("{} is no whole snapshot: {why}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// What is in it is no image.
    #[error(transparent)]
    Image(#[from] ImageError),
}

/// Writes a device in `image` to `out`: the bytes of all extents. Everybody goes on meanwhile;
/// `saving` keeps what they change, if the device codes. Of a plain device each block is what it is
/// when it is written. What is staged of KV windows is no part of a snapshot, and counters are what
/// they happen to be.
///
/// # Errors
/// What the system says; a snapshot that was given up.
pub fn save(image: &Image, saving: Option<&Saving<'_>>, out: &mut impl Write) -> io::Result<u64> {
    let parts = image.parts();
    let [_, tables, counters, _journal, _staging, gcomp, index, segments, ..] = parts;
    let end = image.plain_bytes();
    let mut magic = [0; 8];
    magic[..7].copy_from_slice(MAGIC);
    magic[7] = image.superblock().version as u8;
    out.write_all(&magic)?;
    out.write_all(&end.to_le_bytes())?;
    let mut stream = Stream { out, extents: 0, bytes: 0, data: vec![0; MAX_BYTES] };
    stream.put(0, &image.plain_superblock())?;
    let live = |at, part: &mut [u8]| image.file().read_exact_at(part, at);
    match saving {
        Some(saving) => {
            // A device that never had tensors has no tables.
            if saving.text.bytes() > 0 {
                let (at, text) = saved_once(&saving.text);
                for (number, part) in (0_u64..).zip(text.chunks(MAX_BYTES)) {
                    stream.put(tables.start + at as u64 + number * MAX_BYTES as u64, part)?;
                }
            }
            stream.copy(data_in(image, counters)?, live)?;
            stream.copy(data_in(image, gcomp)?, live)?;
            let place = |at: usize| index.start + at as u64;
            let ranges = saving.index_ranges().into_iter();
            let ranges = ranges.map(|range| {
                // Whole pages.
                let start = range.start / PAGE_BYTES * PAGE_BYTES;
                let end = range.end.next_multiple_of(PAGE_BYTES);
                place(start)..place(end).min(index.end)
            });
            let ranges = merge(ranges);
            stream.copy(ranges, |at, part| {
                let at = usize::try_from(at - index.start).expect("the index is mapped");
                saving.read_index(at, part)
            })?;
            let ranges = data_in(image, segments)?;
            stream.copy(ranges, |at, part| saving.read_segments(image, at, part))?;
        }
        None => stream.copy(data_in(image, tables.start..end)?, live)?,
    }
    stream.end()
}

/// Extents on their way out.
struct Stream<'o, W> {
    out: &'o mut W,
    extents: u64,
    bytes: u64,
    data: Vec<u8>,
}

impl<W: Write> Stream<'_, W> {
    /// Writes bytes of the image, unless they are zeros: room that was made and never used.
    fn put(&mut self, at: u64, part: &[u8]) -> io::Result<()> {
        if part.iter().any(|byte| *byte != 0) {
            self.out.write_all(&head(at, part))?;
            self.out.write_all(part)?;
            (self.extents, self.bytes) = (self.extents + 1, self.bytes + part.len() as u64);
        }
        Ok(())
    }

    /// Writes what `read` gives of ranges of the image, in order.
    fn copy(
        &mut self,
        ranges: Vec<Range<u64>>,
        read: impl Fn(u64, &mut [u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut data = std::mem::take(&mut self.data);
        for range in ranges {
            for at in range.clone().step_by(MAX_BYTES) {
                let length = usize::try_from(range.end - at).unwrap_or(usize::MAX).min(MAX_BYTES);
                let part = &mut data[..length];
                read(at, part)?;
                self.put(at, part)?;
            }
        }
        self.data = data;
        Ok(())
    }

    fn end(self) -> io::Result<u64> {
        self.out.write_all(&head(self.extents, &[]))?;
        self.out.flush()?;
        Ok(self.bytes)
    }
}

/// Where in `part` of an image the file has something.
pub(super) fn data_in(image: &Image, part: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    data_of(image.file(), part)
}

/// Ranges in order, those that touch made one.
fn merge(ranges: impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

/// Makes an image at `to`, where there is none, of the snapshot at `from`.
///
/// It is made under [another name](unfinished) and brought to the disk, and only then renamed:
/// whatever ends a restore, `to` is the whole device or nothing. What one that was killed left
/// under that name is overwritten by the next.
///
/// # Errors
/// [`SnapshotError`]; nothing is left then, under either name.
pub fn restore(from: &Path, to: &Path) -> Result<(), SnapshotError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| SnapshotError::File { path, source }
    };
    let input = File::open(from).map_err(failed(from))?;
    let there = to.try_exists().map_err(failed(to))?;
    if there {
        return Err(failed(to)(io::ErrorKind::AlreadyExists.into()));
    }
    let made = unfinished(to);
    // Before it is touched: another restore may be at work on it.
    let output = super::image::made_locked(&made)?;
    output.set_len(0).map_err(failed(&made))?;
    super::image::keep_in_place(&output);
    let restored = fill(&mut io::BufReader::with_capacity(MAX_BYTES, input), &output)
        .map_err(|why| match why {
            Broken::Stream(why) => SnapshotError::Damaged { path: from.to_owned(), why },
            Broken::Write(source) => failed(&made)(source),
        })
        .and_then(|()| {
            let empty =
                || SnapshotError::Damaged { path: from.to_owned(), why: "it holds no image".to_owned() };
            let image = Image::from_file(output, &made)?.ok_or_else(empty)?;
            image.file().sync_all().map_err(failed(&made))?;
            rename(&made, to).map_err(failed(to))?;
            sync_folder(to).map_err(failed(to))
        });
    if restored.is_err() {
        let _ = std::fs::remove_file(&made);
    }
    restored
}

/// The name of an image that is being restored to `to`, in the same directory.
pub fn unfinished(to: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(to.file_name().unwrap_or_default());
    name.push(".restoring");
    to.with_file_name(name)
}

/// Renames a file to a name that nobody has.
fn rename(from: &Path, to: &Path) -> io::Result<()> {
    let renamed = renameat2(AT_FDCWD, from, AT_FDCWD, to, RenameFlags::RENAME_NOREPLACE);
    #[cfg(any(test, feature = "testing"))]
    super::failpoints::current().stored();
    match renamed {
        // The file system cannot promise that nobody made it meanwhile.
        Err(Errno::EINVAL | Errno::ENOSYS) if !to.try_exists()? => std::fs::rename(from, to),
        renamed => Ok(renamed?),
    }
}

/// Brings the names in a file's directory to the disk.
///
/// # Errors
/// What the system says.
pub fn sync_folder(file: &Path) -> io::Result<()> {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

/// Why a stream did not become an image.
#[doc(hidden)]
#[derive(Debug)]
pub enum Broken {
    /// It is something else, cut short or damaged.
    Stream(String),
    /// The image cannot be written.
    Write(io::Error),
}

/// Makes the image in `output` that the stream `input` holds. What the file held before is gone.
///
/// # Errors
/// [`Broken`] says which of the two is at fault.
#[doc(hidden)]
pub fn fill(input: &mut impl Read, output: &File) -> Result<(), Broken> {
    let short = |part: &str, why: &io::Error| {
        Broken::Stream(match why.kind() {
            io::ErrorKind::UnexpectedEof => format!("it ends early, in {part}"),
            _ => format!("{part} cannot be read: {why}"),
        })
    };
    let mut start = [0; 16];
    input.read_exact(&mut start).map_err(|why| short("its first 16 bytes", &why))?;
    if start[..7] != MAGIC[..] {
        return Err(Broken::Stream("it does not begin as one".to_owned()));
    }
    known_version(start[7]).map_err(Broken::Stream)?;
    let end = word(&start[8..]);
    if i64::try_from(end).is_err() {
        return Err(Broken::Stream(format!("its image has {end} bytes")));
    }
    #[cfg(any(test, feature = "testing"))]
    let failpoints = super::failpoints::current();
    output.set_len(0).and_then(|()| output.set_len(end)).map_err(Broken::Write)?;
    #[cfg(any(test, feature = "testing"))]
    failpoints.stored();
    let (mut least, mut extents) = (0_u64, 0_u64);
    let mut data = vec![0; MAX_BYTES];
    loop {
        let mut found = [0; HEAD_BYTES];
        input
            .read_exact(&mut found)
            .map_err(|why| short(&format!("the head of extent {}", extents + 1), &why))?;
        let (at, length) = (word(&found), word(&found[8..]));
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > MAX_BYTES {
            return Err(Broken::Stream(format!("an extent has {length} bytes, more than {MAX_BYTES}")));
        }
        let part = &mut data[..length];
        input
            .read_exact(part)
            .map_err(|why| short(&format!("the extent of {length} bytes at {at:#x}"), &why))?;
        if head(at, part) != found {
            return Err(Broken::Stream(format!("the extent at {at:#x} does not match its check")));
        }
        if length == 0 {
            return if at == extents {
                Ok(())
            } else {
                Err(Broken::Stream(format!("it has {extents} extents of {at}")))
            };
        }
        let past = at.checked_add(length as u64).filter(|past| at >= least && *past <= end);
        least = past
            .ok_or_else(|| Broken::Stream(format!("{length} bytes at {at:#x} of {end} are out of place")))?;
        #[cfg(any(test, feature = "testing"))]
        let part = failpoints.written(part);
        output.write_all_at(part, at).map_err(Broken::Write)?;
        #[cfg(any(test, feature = "testing"))]
        failpoints.fire();
        extents += 1;
    }
}

/// The head of an extent.
#[doc(hidden)]
pub fn head(at: u64, data: &[u8]) -> [u8; HEAD_BYTES] {
    let mut head = [0; HEAD_BYTES];
    head[..8].copy_from_slice(&at.to_le_bytes());
    head[8..16].copy_from_slice(&(data.len() as u64).to_le_bytes());
    let check = crc32c::crc32c_append(crc32c::crc32c(&head[..16]), data);
    head[16..].copy_from_slice(&u64::from(check).to_le_bytes());
    head
}

fn word(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(*bytes.first_chunk().expect("eight bytes"))
}
