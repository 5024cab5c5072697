//! The threads that answer the kernel's requests on /dev/fuse.
//!
//! * A worker owns a clone of /dev/fuse and two buffers, reads a request and answers it in place. It never waits for
//!   anything that another request has to bring about.
//! * A read of `views` over dirty base pages must first launder them, which waits for FUSE WRITEs; so must one of `base` or a lane over dirty pages of the other. The worker leaves such a
//!   request to the launderer and turns to the next one; afterwards one of the late answerers answers it, on the
//!   descriptor it came from, where alone the kernel takes the answer. A host's read for which its cache has no room waits in the same way.
//! * A handler that panics or cannot make sense of a request answers EIO. The server lives on.

use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};

use fuse_backend_rs::abi::fuse_abi::Opcode;
use fuse_backend_rs::api::server::{MAX_BUFFER_SIZE, Server};
use fuse_backend_rs::transport::{FuseBuf, FuseDevWriter, Reader, Writer};

use super::coherence::Laundry;
use super::fuse_fs::WindowFs;
use super::host_cache::HostCache;
use super::lanes::Face;
use super::pair::Pair;
use super::tree::Tree;

/// Bytes of a worker's buffers: the largest request or answer, 1 MiB, and a page for what goes before it.
const BUFFER_BYTES: usize = MAX_BUFFER_SIZE as usize + 4096;
/// Bytes of every request's header.
const HEADER_BYTES: usize = 40;

/// What all workers share.
pub(super) struct Workers {
    pub(super) server: Server<WindowFs>,
    pub(super) tree: Arc<Tree>,
    /// Clones of /dev/fuse, one a worker.
    pub(super) channels: Vec<File>,
    /// Requests that waited for the launderer, until the mount closes.
    pub(super) late: Mutex<Option<Sender<Late>>>,
    /// Requests that made a handler panic.
    pub(super) panics: AtomicU64,
}

/// A request to be answered by a late answerer.
pub(super) struct Late {
    channel: usize,
    request: Vec<u8>,
}

/// Why a request is set aside.
enum Aside {
    /// Something else that shows the same bytes has to be laundered first.
    Launder(Laundry),
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

    /// Offset and length of a read.
    fn read(&self, request: &[u8]) -> Option<(u64, u64)> {
        if self.opcode != Opcode::Read as u32 {
            return None;
        }
        // struct fuse_read_in: handle, offset, size.
        let offset = u64::from_ne_bytes(*request.get(HEADER_BYTES + 8..)?.first_chunk()?);
        let length = u32::from_ne_bytes(*request.get(HEADER_BYTES + 16..)?.first_chunk()?);
        Some((offset, u64::from(length)))
    }
}

impl Workers {
    /// A worker: answers requests from its channel until the file system is unmounted.
    pub(super) fn work(self: &Arc<Self>, channel: usize) {
        // Every page is touched, and so there: a process that is killed while the kernel has to find a page for a request's bytes fails that request.
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

    fn take(self: &Arc<Self>, channel: usize, request: &mut [u8], answer: &mut [u8]) {
        let Some(header) = Header::of(request) else {
            tracing::error!(bytes = request.len(), "a request shorter than its header");
            return;
        };
        let Some((pair, what)) = self.set_aside(&header, request) else {
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
            Aside::Launder(laundry) => pair.coherence().launder(
                laundry,
                Box::new(move |result: io::Result<()>| {
                    if let Err(why) = result {
                        // The view is served from what the device has, as after a failed write-back on any file system.
                        tracing::warn!("laundering pages under a read failed: {why}");
                    }
                    go_on();
                }),
            ),
            Aside::Room(cache, range) => cache.wait_for_room(range, Box::new(go_on)),
        }
    }

    /// What has to happen before a request can be answered, if anything.
    fn set_aside(&self, header: &Header, request: &[u8]) -> Option<(&Arc<Pair>, Aside)> {
        let (offset, length) = header.read(request)?;
        let (pair, face) = self.tree.file(header.inode)?;
        if let (Face::Base, Some(cache)) = (face, pair.cache()) {
            let full = !cache.has_room(offset, length);
            let range = offset..offset.saturating_add(length);
            return full.then(|| (pair, Aside::Room(Arc::clone(cache), range)));
        }
        Some((pair, Aside::Launder(pair.coherence().laundry(face, offset, length)?)))
    }

    /// A late answerer: answers what the launderer is done with until the mount closes.
    pub(super) fn answer_late(&self, queue: &Mutex<Receiver<Late>>) {
        let mut answer = vec![0; BUFFER_BYTES];
        loop {
            let late = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok(mut late) = late else { return };
            if let Some(header) = Header::of(&late.request) {
                self.answer(late.channel, &header, &mut late.request, &mut answer);
            }
        }
    }

    fn answer(&self, channel: usize, header: &Header, request: &mut [u8], answer: &mut [u8]) {
        let device = &self.channels[channel];
        let handled = catch_unwind(AssertUnwindSafe(|| -> Result<(), String> {
            let reader =
                Reader::<()>::from_fuse_buffer(FuseBuf::new(request)).map_err(|why| why.to_string())?;
            let writer =
                FuseDevWriter::<()>::new(device.as_raw_fd(), answer).map_err(|why| why.to_string())?;
            match self.server.handle_message(reader, Writer::FuseDev(writer), None, None) {
                Ok(_) => Ok(()),
                // The answer could not be delivered: the asker was interrupted, or the mount is gone.
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
            refuse(device, header.unique);
        }
    }
}

/// Answers a request with EIO.
fn refuse(mut device: &File, unique: u64) {
    let mut answer = [0; 16];
    answer[..4].copy_from_slice(&16_u32.to_ne_bytes());
    answer[4..8].copy_from_slice(&(-libc::EIO).to_ne_bytes());
    answer[8..].copy_from_slice(&unique.to_ne_bytes());
    // ENOENT here means that the request was answered before the failure.
    if let Err(why) = device.write(&answer) {
        tracing::debug!("EIO not delivered: {why}");
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
