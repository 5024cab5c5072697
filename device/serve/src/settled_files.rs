//! Bringing to the device what the page cache has of `files/`, before a mount ends or a snapshot is
//! written.
//!
//! * Whoever still maps a file may have stored into pages that nobody wrote back. The kernel does
//!   so itself when a mapping or a descriptor goes, but not for who keeps them.
//! * Each file that the kernel may have dirty pages of is synced. That sleeps until this process
//!   has answered, so a thread of its own does so, with a file table of its own
//!   ([`super::own_mount`]).

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use lamina_files::Files;
use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::Mode;

use super::files::inode_of;
use super::flusher::may_be_dirty;
use super::own_mount::own_table;

/// How long nothing may be written back before the dirty pages that are left are given up when
/// unmounting.
pub(super) const SETTLE: Duration = Duration::from_secs(10);
/// What the kernel takes no path of, in bytes.
const MAX_PATH: usize = libc::PATH_MAX.unsigned_abs() as usize;
/// How often files are looked for that were renamed since their paths were told.
const TRIES: usize = 5;

/// Brings what the page cache has of the files of `folder` to the device. `goes_on` is told each
/// `pace` in which something came or a file was looked at. What this user may not open stays out.
///
/// # Errors
///
/// When a file cannot be written back, or there was nothing of that for as long as `longest_pause`:
/// then stores of whoever still maps files may not be there.
pub(super) fn settle_files(
    files: &Arc<Files>,
    folder: &Path,
    longest_pause: Duration,
    pace: Duration,
    goes_on: &dyn Fn(),
) -> io::Result<()> {
    let (done, ended) = channel();
    let (known, folder) = (Arc::clone(files), folder.to_owned());
    let looked_at = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&looked_at);
    let syncing = move || {
        if let Err(why) = own_table(2) {
            tracing::warn!("files/ is brought to the device with the shared file table: {why}");
        }
        // Who does not wait any more has given up.
        let _ = done.send(sync_all(&known, &folder, &count));
    };
    thread::Builder::new().name("files-sync".into()).spawn(syncing)?;
    let progress = || files.count().written + looked_at.load(Relaxed);
    let (mut before, mut since) = (progress(), Instant::now());
    loop {
        match ended.recv_timeout(pace.min(longest_pause)) {
            Ok(synced) => return synced,
            Err(RecvTimeoutError::Disconnected) => {
                return Err(io::Error::other("the thread that syncs files panicked"));
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        let now = progress();
        if now != before {
            (before, since) = (now, Instant::now());
            goes_on();
        } else if since.elapsed() >= longest_pause {
            return Err(io::Error::other(format!("nothing was written back for {longest_pause:?}")));
        }
    }
}

fn sync_all(files: &Files, folder: &Path, looked_at: &AtomicU64) -> io::Result<()> {
    let (mut failed, mut moved) = (None, None::<BTreeSet<u64>>);
    for _ in 0..TRIES {
        let mut missed = BTreeSet::new();
        for file in files.may_be_known() {
            if moved.as_ref().is_some_and(|moved| !moved.contains(&file.inode)) {
                continue;
            }
            let path = folder.join(OsStr::from_bytes(&file.path));
            match sync(folder, &file.path, inode_of(file.inode)) {
                Ok(true) => {}
                Ok(false) => {
                    missed.insert(file.inode);
                }
                Err(why) if why.kind() == io::ErrorKind::PermissionDenied => {
                    tracing::warn!(path = %path.display(), "whether a file is written back is not known: {why}");
                }
                Err(why) => {
                    tracing::error!(path = %path.display(), "a file cannot be written back: {why}");
                    failed = Some(why);
                }
            }
            looked_at.fetch_add(1, Relaxed);
        }
        if missed.is_empty() {
            return failed.map_or(Ok(()), Err);
        }
        moved = Some(missed);
    }
    let moved = moved.map_or(0, |moved| moved.len());
    Err(failed.unwrap_or_else(|| io::Error::other(format!("{moved} files are renamed again and again"))))
}

/// Syncs the file of this inode, unless the path leads to it no more: whether it did.
fn sync(folder: &Path, path: &[u8], inode: u64) -> io::Result<bool> {
    let file = match open_below(folder, path) {
        Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::ENXIO) => return Ok(false),
        opened => opened?,
    };
    let found = file.metadata()?;
    if found.ino() != inode {
        return Ok(false);
    }
    if may_be_dirty(&file, &(0..found.len())) {
        file.sync_data()?;
    }
    Ok(true)
}

/// Opens the file of a path in a folder. A path may be longer than the kernel takes at once, as
/// folders may be renamed into others: then in steps.
pub(super) fn open_below(folder: &Path, path: &[u8]) -> Result<File, Errno> {
    let step = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let mut from = open(folder, step, Mode::empty())?;
    let mut rest = path;
    while rest.len() >= MAX_PATH {
        let end = rest[..MAX_PATH].iter().rposition(|byte| *byte == b'/').ok_or(Errno::ENAMETOOLONG)?;
        from = openat(&from, &rest[..end], step, Mode::empty())?;
        rest = &rest[end + 1..];
    }
    // What lies there by now may be no file, and must not be waited for.
    let only_files = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    openat(&from, rest, OFlag::O_RDONLY | only_files, Mode::empty()).map(File::from)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use nix::sys::stat::mkdirat;

    use super::*;

    #[test]
    fn files_are_found_however_long_their_paths_are() {
        let root = tempfile::tempdir().unwrap();
        for count in [0, 1, 15, 16, 17, 40] {
            let mut from = open(root.path(), OFlag::O_PATH, Mode::empty()).unwrap();
            let mut path = Vec::new();
            // Of 255 bytes, so that 16 of them and as many `/` are just too long.
            let name = format!("{count:02}{}", "x".repeat(253));
            for _ in 0..count {
                mkdirat(&from, name.as_str(), Mode::S_IRWXU).unwrap();
                from = openat(&from, name.as_str(), OFlag::O_PATH, Mode::empty()).unwrap();
                path.extend_from_slice(format!("{name}/").as_bytes());
            }
            let last = format!("{count} is a file");
            path.extend_from_slice(last.as_bytes());
            let made = OFlag::O_CREAT | OFlag::O_WRONLY;
            let made = openat(&from, last.as_str(), made, Mode::S_IRWXU);
            File::from(made.unwrap()).write_all(last.as_bytes()).unwrap();
            let mut found = String::new();
            open_below(root.path(), &path).unwrap().read_to_string(&mut found).unwrap();
            assert_eq!(found, last);
            let inode = open_below(root.path(), &path).unwrap().metadata().unwrap().ino();
            assert!(sync(root.path(), &path, inode).unwrap());
            assert!(!sync(root.path(), &path, inode + 1).unwrap());
            path.extend_from_slice(b" no more");
            assert!(!sync(root.path(), &path, inode).unwrap());
        }
    }
}
