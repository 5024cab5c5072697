//! Calls into our own mount, which sleep until this process, or the one after it, has answered
//! them.
//!
//! * A thread that makes such a call gives itself a [file table of its own](own_table) first, with
//!   the standard streams and the files that it needs. When the process is killed while the thread
//!   sleeps, which neither a kill nor a signal ends, everything else that the process had open is
//!   closed all the same: the holder hears that it died, and has another one answer.
//! * Who shares the process's table asks the mount nothing, not even for a file's attributes:
//!   [`device_of`] tells what the kernel knows by itself.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread;

use nix::sched::{CloneFlags, unshare};
use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Opens files, for reading and writing: all of them, in order, or none.
pub(super) fn open(paths: Vec<PathBuf>) -> io::Result<Vec<File>> {
    let (ours, theirs) = UnixStream::pair()?;
    let (number, count) = (theirs.as_raw_fd(), paths.len());
    let opening = move || {
        if let Err(why) = own_table(number) {
            tracing::warn!("the mount's files are opened with the shared file table: {why}");
        }
        let open = |path| File::options().read(true).write(true).open(path);
        let files: Vec<File> = paths.iter().map(open).collect::<io::Result<_>>()?;
        // SAFETY: `theirs` is open in the table that this one began as, and lives until this thread
        // was joined.
        let to = unsafe { BorrowedFd::borrow_raw(number) };
        files.iter().try_for_each(|file| send(to, file))
    };
    let opened = thread::Builder::new().name("open".into()).spawn(opening)?.join();
    opened.unwrap_or_else(|_| Err(io::Error::other("the thread that opens the mount's files panicked")))?;
    let files = (0..count).map(|_| receive(&ours)).collect::<io::Result<_>>()?;
    drop(theirs);
    Ok(files)
}

fn send(to: BorrowedFd<'_>, file: &File) -> io::Result<()> {
    let file = [file.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&file)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    sendmsg(to, &[IoSlice::new(b"1")], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn receive(from: &UnixStream) -> io::Result<File> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    // What was sent before is there.
    recvmsg(from, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut files = Vec::<OwnedFd>::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            files.extend(rights);
        }
    }
    Ok(files.pop().map(File::from).ok_or(io::ErrorKind::UnexpectedEof)?)
}

/// Gives the calling thread a file table with only the standard streams and `kept`.
pub(super) fn own_table(kept: RawFd) -> io::Result<()> {
    unshare(CloneFlags::CLONE_FILES)?;
    let below = kept.saturating_sub(1);
    if below >= 3 {
        close_range(3, below)?;
    }
    close_range(kept.saturating_add(1), RawFd::MAX)
}

fn close_range(first: RawFd, last: RawFd) -> io::Result<()> {
    // SAFETY: closes descriptors of this thread's own table, which no `File` of this thread owns.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The device number of the file system that a file is on, without asking that.
pub(super) fn device_of(file: &File) -> io::Result<u64> {
    number_of(file, Path::new(""), AtFlags::EMPTY_PATH)
}

/// The same of a path.
pub(super) fn device_at(path: &Path) -> io::Result<u64> {
    number_of(CWD, path, AtFlags::empty())
}

fn number_of(from: impl AsFd, path: &Path, how: AtFlags) -> io::Result<u64> {
    let found = statx(from, path, how | AtFlags::STATX_DONT_SYNC, StatxFlags::empty())?;
    Ok(makedev(found.stx_dev_major, found.stx_dev_minor))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    #[test]
    fn files_opened_elsewhere_are_here_and_on_the_device_they_say() {
        let folder = tempfile::tempdir().unwrap();
        let paths = ["base", "views", "target0"].map(|name| folder.path().join(name)).to_vec();
        assert_eq!(open(paths.clone()).unwrap_err().kind(), io::ErrorKind::NotFound);
        for path in &paths {
            File::create(path).unwrap().write_all(path.as_os_str().as_encoded_bytes()).unwrap();
        }
        let files = open(paths.clone()).unwrap();
        assert_eq!(files.len(), paths.len());
        for (file, path) in files.iter().zip(&paths) {
            let mut found = vec![0; path.as_os_str().len()];
            file.read_exact_at(&mut found, 0).unwrap();
            assert_eq!(found, path.as_os_str().as_encoded_bytes());
            assert_eq!(device_of(file).unwrap(), path.metadata().unwrap().dev());
        }
        assert_eq!(device_at(folder.path()).unwrap(), folder.path().metadata().unwrap().dev());
    }
}
