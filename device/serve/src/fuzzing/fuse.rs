//! Fuzz target for FUSE requests: whole ones, as a worker reads them from /dev/fuse and hands them
//! on.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fuse_backend_rs::abi::fuse_abi::Opcode;

use super::peers::works;
use super::{memory_file, small};
use crate::fuse_fs::Shown;
use crate::fuse_workers::{BUFFER_BYTES, Workers};
use crate::tree::Tree;
use crate::{Export, ExportOptions, Place};
use lamina_device::device::Partition;

/// Bytes of every request's header.
const HEADER_BYTES: usize = 40;
/// Bytes of a request that say what it is and which.
const MIN_BYTES: usize = 24;
/// Bytes of an answer's header.
const ANSWER_BYTES: usize = 16;

/// Requests to a mount of everybody's export and a host's: a byte of flags (1: mend the lengths in
/// their headers), then each with its length (2 bytes)
/// before it. Each gets an answer with its number, unless nobody waits for one.
pub fn fuse(data: &[u8]) {
    let Some((flags, mut rest)) = data.split_first() else { return };
    let device = Arc::new(small());
    let partition = Partition::first(Arc::clone(&device));
    // The host's cache has room for all, and what finds none in the device is refused at once, so
    // that no request waits for room.
    let exports = [(Place::Root, None), (Place::Host("h".to_owned()), Some(device.base_bytes()))];
    let exports = exports.map(|(place, cache_bytes)| {
        let options = ExportOptions { place, partition: partition.clone(), cache_bytes, revoked_mark: None };
        let export = Arc::new(Export::new(&options, Path::new("/mount"), Duration::ZERO));
        // There are no pages of a host's to be written back under views, and nobody to do it.
        export.coherence().close();
        export
    });
    let kernel = memory_file();
    let channel = kernel.try_clone().expect("a descriptor");
    let (workers, late) = Workers::new((Arc::new(Tree::new(exports.to_vec())), Shown::All), vec![channel], 4);
    let (mut answer, mut heard) = (vec![0; BUFFER_BYTES], 0);
    let mut number = 0_u64;
    while let Some((length, bytes)) = rest.split_first_chunk() {
        let length = usize::from(u16::from_le_bytes(*length)).min(bytes.len());
        let (request, after) = bytes.split_at(length);
        let mut request = request.to_vec();
        (rest, number) = (after, number + 1);
        if request.len() >= HEADER_BYTES {
            request[8..16].copy_from_slice(&number.to_ne_bytes());
            if flags & 1 == 1 {
                let length = u32::try_from(request.len()).expect("16 bits");
                request[..4].copy_from_slice(&length.to_ne_bytes());
            }
        }
        let requested = request.clone();
        workers.take(0, &mut request, &mut answer);
        for late in late.try_iter() {
            workers.answer_one_late(late, &mut answer);
        }
        let answers = hear(&kernel, &mut heard, &requested);
        assert_answered(&requested, answers);
    }
    assert_eq!(workers.panics.load(Ordering::Relaxed), 0, "a handler panicked");
    works(&device);
}

/// Reads what the kernel was told since `heard`, answers to `request`: how many there are.
fn hear(kernel: &File, heard: &mut u64, request: &[u8]) -> usize {
    let end = kernel.metadata().expect("a file in memory").len();
    let mut answers = 0;
    while *heard < end {
        let mut header = [0; ANSWER_BYTES];
        kernel.read_exact_at(&mut header, *heard).expect("a whole header");
        let [length, error] = [&header[..4], &header[4..8]]
            .map(|bytes| i32::from_ne_bytes(*bytes.first_chunk().expect("four bytes")));
        assert_eq!(header[8..], request[8..16], "an answer to another request");
        assert!((-4095..=0).contains(&error), "the error {error}");
        *heard += u64::try_from(length).expect("a length");
        assert!(length >= 16 && *heard <= end, "an answer of {length} bytes");
        answers += 1;
    }
    answers
}

fn assert_answered(request: &[u8], answers: usize) {
    let Some(opcode) = request.get(4..8).filter(|_| request.len() >= MIN_BYTES) else {
        assert_eq!(answers, 0, "an answer to what is no request");
        return;
    };
    let opcode = u32::from_ne_bytes(*opcode.first_chunk().expect("four bytes"));
    let is = |one: Opcode| opcode == one as u32;
    if is(Opcode::Forget) || is(Opcode::BatchForget) || is(Opcode::Interrupt) {
        assert_eq!(answers, 0, "an answer that nobody waits for");
    } else if !is(Opcode::Destroy) {
        assert!(answers > 0, "no answer to opcode {opcode}");
    }
}
