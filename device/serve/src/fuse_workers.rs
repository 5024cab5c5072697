//! The threads that answer the kernel's requests on /dev/fuse.
//!
//! * A worker owns a clone of /dev/fuse and two buffers, reads a request and answers it in place.
//!   It never waits for anything that another request has to bring about.
//! * A read of `views` over dirty base pages must first write back them, which waits for FUSE
//!   WRITEs; so must one of `base` or a target over dirty pages of the other. The worker leaves
//!   such a request to the flusher and turns to the next one; afterwards one of the late answerers
//!   answers it, on the descriptor it came from, where alone the kernel takes the answer. A host's
//!   read for which its cache has no room waits in the same way.
//! * A write-back for which there is no room is left to [`super::write_backs`], which answers it
//!   later in the same way.
//! * A handler that panics or cannot make sense of a request answers EIO. The server lives on.

use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use fuse_backend_rs::abi::fuse_abi::Opcode;
use fuse_backend_rs::api::server::{MAX_BUFFER_SIZE, Server};
use fuse_backend_rs::transport::{FuseBuf, FuseDevWriter, Reader, Writer};

use super::coherence::DirtyRanges;
use super::export::Export;
use super::export_file::ExportFile;
use super::fuse_fs::{Shown, WindowFs};
use super::host_cache::HostCache;
use super::tree::Tree;
use super::write_backs::{Answer, Asker};

/// Bytes of a worker's buffers: the largest request or answer, 1 MiB, and a page for what goes
/// before it.
pub(crate) const BUFFER_BYTES: usize = MAX_BUFFER_SIZE as usize + 4096;
/// Bytes of every request's header.
const HEADER_BYTES: usize = 40;
/// Bytes of what a write has between its header and its data.
const WRITE_BYTES: usize = 40;
/// Of a write's flags: the kernel writes back a page (`FUSE_WRITE_CACHE`).
const WRITTEN_BACK: u32 = 1;

/// What all workers share.
pub(crate) struct Workers {
    pub(super) server: Server<WindowFs>,
    pub(super) tree: Arc<Tree>,
    /// Clones of /dev/fuse, one a worker.
    pub(super) channels: Vec<File>,
    /// Requests that waited for the flusher, until the mount closes.
    pub(super) late: Mutex<Option<Sender<Late>>>,
    /// Bytes that are read at once when a page is missing.
    read_ahead: u32,
    /// Requests that made a handler panic.
    pub(crate) panics: AtomicU64,
}

/// A request to be answered by a late answerer.
pub(crate) struct Late {
    channel: usize,
    request: Vec<u8>,
}

/// Why a request is set aside.
enum Aside {
    /// Something else that shows the same bytes has to be written back first.
    FlushPages(DirtyRanges),
    /// A host's cache has to make room for this range first.
    Room(Arc<HostCache>, Range<u64>),
}

/// The fields of a request's header that are looked at before the server parses it.
struct Header {
    opcode: u32,
    unique: u64,
    inode: u64,
}

impl Header {
    fn of(request: &[u8]) -> Option<Self> {
        Some(Self {
            opcode: u32::from_ne_bytes(*request.get(4..)?.first_chunk()?),
            unique: u64::from_ne_bytes(*request.get(8..)?.first_chunk()?),
            inode: u64::from_ne_bytes(*request.get(16..)?.first_chunk()?),
        })
    }

    fn wants_answer(&self) -> bool {
        ![Opcode::Forget as u32, Opcode::BatchForget as u32, Opcode::Interrupt as u32].contains(&self.opcode)
    }

    /// Bounds what a mount says that it reads ahead, which the server takes over: the kernel then
    /// reads so much without anybody's asking in sysfs.
    fn bound_read_ahead(&self, request: &mut [u8], bytes: u32) {
        // struct fuse_init_in: major, minor, max_readahead, and more.
        let Some(field) = request.get_mut(HEADER_BYTES + 8..).and_then(<[u8]>::first_chunk_mut) else {
            return;
        };
        if self.opcode == Opcode::Init as u32 {
            *field = u32::from_ne_bytes(*field).min(bytes).to_ne_bytes();
        }
    }

    /// Offset and length of a read.
    fn read(&self, request: &[u8]) -> Option<(u64, u64)> {
        if self.opcode == Opcode::Read as u32 { Self::span(request) } else { None }
    }

    /// Offset and length of a read or write.
    fn span(request: &[u8]) -> Option<(u64, u64)> {
        // struct fuse_read_in and fuse_write_in: handle, offset, size.
        let offset = u64::from_ne_bytes(*request.get(HEADER_BYTES + 8..)?.first_chunk()?);
        let length = u32::from_ne_bytes(*request.get(HEADER_BYTES + 16..)?.first_chunk()?);
        Some((offset, u64::from(length)))
    }

    /// Offset and data of a write-back.
    fn write_back<'a>(&self, request: &'a mut [u8]) -> Option<(u64, &'a mut [u8])> {
        if self.opcode != Opcode::Write as u32 {
            return None;
        }
        // struct fuse_write_in: handle, offset, size, flags of the write, and more.
        let (fields, data) = request.get_mut(HEADER_BYTES..)?.split_at_mut_checked(WRITE_BYTES)?;
        let offset = u64::from_ne_bytes(*fields.get(8..)?.first_chunk()?);
        let length = u32::from_ne_bytes(*fields.get(16..)?.first_chunk()?);
        let flags = u32::from_ne_bytes(*fields.get(20..)?.first_chunk()?);
        let whole = usize::try_from(length).is_ok_and(|length| length == data.len());
        (whole && flags & WRITTEN_BACK != 0).then_some((offset, data))
    }
}

impl Workers {
    /// Workers that answer for what is `shown` of a tree what comes from `channels`, and the queue
    /// of what they set aside.
    pub(crate) fn new(
        (tree, shown): (Arc<Tree>, Shown),
        channels: Vec<File>,
        read_ahead_kb: u32,
    ) -> (Arc<Self>, Receiver<Late>) {
        let (late, late_queue) = channel();
        let workers = Self {
            server: Server::new(WindowFs::new(Arc::clone(&tree), shown)),
            tree,
            channels,
            late: Mutex::new(Some(late)),
            read_ahead: read_ahead_kb.saturating_mul(1024),
            panics: AtomicU64::new(0),
        };
        (Arc::new(workers), late_queue)
    }

    /// A worker: answers requests from its channel until the file system is unmounted.
    pub(super) fn work(self: &Arc<Self>, channel: usize) {
        // Every page is touched, and so there: a process that is killed while the kernel has to
        // find a page for a request's bytes fails that request.
        let mut request = vec![1; BUFFER_BYTES];
        let mut answer = vec![0; BUFFER_BYTES];
        loop {
            match (&self.channels[channel]).read(&mut request) {
                Ok(length) => self.take(channel, &mut request[..length], &mut answer),
                Err(why) => match why.raw_os_error() {
                    // ENOENT: the request was withdrawn while it was read.
                    Some(libc::ENOENT | libc::EINTR | libc::EAGAIN) => {}
                    Some(libc::ENODEV | libc::ENOTCONN | libc::ECONNABORTED) => return,
                    _ => {
                        tracing::error!("reading /dev/fuse failed, this worker ends: {why}");
                        return;
                    }
                },
            }
        }
    }

    /// Answers a request, or sets it aside.
    pub(crate) fn take(self: &Arc<Self>, channel: usize, request: &mut [u8], answer: &mut [u8]) {
        let Some(header) = Header::of(request) else {
            tracing::error!(bytes = request.len(), "a request shorter than its header");
            return;
        };
        let Some((export, what)) = self.set_aside(&header, request) else {
            return self.answer(channel, &header, request, answer);
        };
        let late = Late { channel, request: request.to_vec() };
        let workers = Arc::clone(self);
        let go_on = move || {
            if let Some(queue) = &*workers.late.lock().unwrap_or_else(PoisonError::into_inner) {
                // No answerer left means that the mount is gone, and with it the asker.
                let _ = queue.send(late);
            }
        };
        match what {
            Aside::FlushPages(dirty_ranges) => export.coherence().flush_pages(
                dirty_ranges,
                Box::new(move |result: io::Result<()>| {
                    if let Err(why) = result {
                        // The view is served from what the device has, as after a failed write-back
                        // on any file system.
                        tracing::warn!("flushing pages under a read failed: {why}");
                    }
                    go_on();
                }),
            ),
            Aside::Room(cache, range) => cache.wait_for_room(range, Box::new(go_on)),
        }
    }

    /// What has to happen before a request can be answered, if anything.
    fn set_aside(&self, header: &Header, request: &[u8]) -> Option<(&Arc<Export>, Aside)> {
        let (offset, length) = header.read(request)?;
        let (export, which) = self.tree.file(header.inode)?;
        if let (ExportFile::Base, Some(cache)) = (which, export.cache()) {
            let full = !cache.has_room(offset, length);
            let range = offset..offset.saturating_add(length);
            return full.then(|| (export, Aside::Room(Arc::clone(cache), range)));
        }
        Some((export, Aside::FlushPages(export.coherence().dirty_ranges(which, offset, length)?)))
    }

    /// A late answerer: answers what the flusher is done with until the mount closes.
    pub(super) fn answer_late(&self, queue: &Mutex<Receiver<Late>>) {
        let mut answer = vec![0; BUFFER_BYTES];
        loop {
            let late = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok(late) = late else { return };
            self.answer_one_late(late, &mut answer);
        }
    }

    /// Answers a request that nothing has to happen for any more, by way of `answer`.
    pub(crate) fn answer_one_late(&self, mut late: Late, answer: &mut [u8]) {
        if let Some(header) = Header::of(&late.request) {
            self.answer(late.channel, &header, &mut late.request, answer);
        }
    }

    fn answer(&self, channel: usize, header: &Header, request: &mut [u8], answer: &mut [u8]) {
        let device = &self.channels[channel];
        let handled = catch_unwind(AssertUnwindSafe(|| -> Result<(), String> {
            #[cfg(debug_assertions)]
            self.fire_failpoint(header, request);
            if self.write_back(channel, header, request) {
                return Ok(());
            }
            super::files::answering(header.unique);
            header.bound_read_ahead(request, self.read_ahead);
            let reader =
                Reader::<()>::from_fuse_buffer(FuseBuf::new(request)).map_err(|why| why.to_string())?;
            let writer =
                FuseDevWriter::<()>::new(device.as_raw_fd(), answer).map_err(|why| why.to_string())?;
            match self.server.handle_message(reader, Writer::FuseDev(writer), None, None) {
                Ok(_) => Ok(()),
                // The answer could not be delivered: the asker was interrupted, or the mount is
                // gone.
                Err(fuse_backend_rs::Error::EncodeMessage(why)) => {
                    tracing::debug!(opcode = header.opcode, "an answer nobody waited for: {why}");
                    Ok(())
                }
                Err(why) => Err(why.to_string()),
            }
        }));
        match handled {
            Ok(Ok(())) => return,
            Ok(Err(why)) => {
                tracing::error!(
                    opcode = header.opcode,
                    inode = header.inode,
                    "request not understood: {why}"
                );
            }
            Err(_) => {
                let panics = self.panics.fetch_add(1, Ordering::Relaxed) + 1;
                tracing::error!(
                    opcode = header.opcode,
                    inode = header.inode,
                    panics,
                    "a handler panicked; answering EIO"
                );
            }
        }
        if header.wants_answer() {
            reply(device, header.unique, -libc::EIO, None);
        }
    }

    /// Takes a page of a coherent base window, or of a target, that the kernel writes back, and
    /// answers it if it need not wait: whether it was one.
    fn write_back(&self, channel: usize, header: &Header, request: &mut [u8]) -> bool {
        let Some((offset, data)) = header.write_back(request) else { return false };
        let Some((export, which)) = self.tree.file(header.inode) else { return false };
        let end = offset.checked_add(data.len() as u64);
        let stored = which != ExportFile::Views && export.cache().is_none();
        if !stored || end.is_none_or(|end| end > export.bytes_of(which)) {
            return false;
        }
        let asker = Asker { channel, unique: header.unique };
        if let Some(answer) = export.coherence().write_back(which, asker, offset, data) {
            self.written_back(asker, answer);
        }
        true
    }

    /// Answers a write-back.
    pub(super) fn written_back(&self, asker: Asker, answer: Answer) {
        let Some(device) = self.channels.get(asker.channel) else { return };
        match answer {
            Ok(length) => reply(device, asker.unique, 0, Some(length)),
            Err(number) => reply(device, asker.unique, -number, None),
        }
    }
}

#[cfg(debug_assertions)]
impl Workers {
    /// Panics if this request is to.
    fn fire_failpoint(&self, header: &Header, request: &[u8]) {
        let known = [(Opcode::Read as u32, "read"), (Opcode::Write as u32, "write")];
        let Some((_, what)) = known.iter().find(|(opcode, _)| *opcode == header.opcode) else { return };
        let base = self.tree.file(header.inode).is_some_and(|(_, which)| which == ExportFile::Base);
        if let Some((offset, length)) = Header::span(request).filter(|_| base) {
            super::failpoints::fire(what, &(offset..offset.saturating_add(length)));
        }
    }
}

/// Answers a request with an error number below zero, or a write with 0 and how much was written.
fn reply(mut device: &File, unique: u64, error: i32, written: Option<u32>) {
    // struct fuse_out_header: length, error, unique; struct fuse_write_out: size, padding.
    let mut answer = [0; 24];
    let length = if written.is_some() { answer.len() } else { 16 };
    answer[..4].copy_from_slice(&(if written.is_some() { 24_u32 } else { 16 }).to_ne_bytes());
    answer[4..8].copy_from_slice(&error.to_ne_bytes());
    answer[8..16].copy_from_slice(&unique.to_ne_bytes());
    answer[16..20].copy_from_slice(&written.unwrap_or(0).to_ne_bytes());
    // ENOENT here means that the request was answered before the failure.
    if let Err(why) = device.write(&answer[..length]) {
        tracing::debug!("an answer nobody waited for: {why}");
    }
}

/// Tells the kernel to drop the pages of a range of the file `inode`.
pub(super) fn invalidate(workers: &Workers, device: RawFd, inode: u64, range: &Range<u64>) {
    let mut buffer = [0; 64];
    let Ok(writer) = FuseDevWriter::<()>::new(device, &mut buffer) else { return };
    if let Err(why) = workers.server.notify_inval_inode(writer, inode, range.start, range.end - range.start) {
        // ENOENT: the kernel holds nothing of this file.
        tracing::debug!(?range, inode, "nothing to invalidate: {why}");
    }
}

/// Asks the kernel for every request that was read before and not answered.
pub(super) fn ask_again(workers: &Workers, device: RawFd) {
    let mut buffer = [0; 64];
    let Ok(writer) = FuseDevWriter::<()>::new(device, &mut buffer) else { return };
    if let Err(why) = workers.server.notify_resend(writer) {
        tracing::error!("the requests in flight are lost: {why}; Linux 6.9 and newer give them again");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_mount_reads_ahead_is_bounded() {
        let request = |opcode: Opcode| {
            let mut request = [7; HEADER_BYTES + 16];
            request[4..8].copy_from_slice(&(opcode as u32).to_ne_bytes());
            request[HEADER_BYTES + 8..HEADER_BYTES + 12].copy_from_slice(&131_072_u32.to_ne_bytes());
            request
        };
        let bounded = |opcode, bytes| {
            let mut request = request(opcode);
            Header::of(&request).unwrap().bound_read_ahead(&mut request, bytes);
            request
        };
        let mut four = request(Opcode::Init);
        four[HEADER_BYTES + 8..HEADER_BYTES + 12].copy_from_slice(&4096_u32.to_ne_bytes());
        assert_eq!(bounded(Opcode::Init, 4096), four);
        assert_eq!(bounded(Opcode::Init, 1 << 20), request(Opcode::Init), "the kernel's own bound is kept");
        assert_eq!(bounded(Opcode::Read, 4096), request(Opcode::Read));
        let mut short = request(Opcode::Init)[..HEADER_BYTES + 10].to_vec();
        Header::of(&short).unwrap().bound_read_ahead(&mut short, 4096);
        assert_eq!(short, request(Opcode::Init)[..HEADER_BYTES + 10]);
    }
}
