//! One request: taken from a chain of descriptors, and answered.
//!
//! * A request is a header of 32 bytes and perhaps text that the device reads, then a header of 16
//!   bytes and perhaps text that it writes ([`lamina_abi::shmem`]). How these are cut into
//!   descriptors is the driver's choice.
//! * One without a header, or without room for the answer's, is [`Broken`]; whatever else is wrong
//!   with it is answered.

use lamina_abi::shmem::{REQUEST_BYTES, RESPONSE_BYTES, TEXT_BYTES};
use std::io::{Read, Write};
use std::ops::Deref;
use virtio_queue::{DescriptorChain, Reader, Writer};

use crate::vhost_connections::Memory;

/// A chain that is no request.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    /// Its descriptors point outside of the guest's own memory, or are too many.
    #[error("its descriptors do not describe the guest's memory")]
    Descriptors,
    /// It has no header.
    #[error("it has {0} bytes to read, less than a header")]
    Header(usize),
    /// It has no room for an answer.
    #[error("it has {0} bytes for an answer, less than a header")]
    Room(usize),
    /// It has too much text.
    #[error("it has {0} bytes of text; {TEXT_BYTES} are allowed")]
    Text(usize),
}

/// What is asked.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Requested {
    pub(super) op: u32,
    pub(super) window: u32,
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) at: u64,
    pub(super) text: Vec<u8>,
}

/// What is answered: a status, the length of the whole answer, and a piece of it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Answer<'a> {
    pub(super) status: u32,
    pub(super) total: u64,
    pub(super) piece: &'a [u8],
}

/// The request in a chain of `memory`, which has room for an answer.
pub(super) fn parse<M>(memory: &Memory, chain: DescriptorChain<M>) -> Result<Requested, Broken>
where
    M: Deref<Target = Memory> + Clone,
{
    let mut from_guest: Reader<'_, ()> = chain.clone().reader(memory).map_err(|_| Broken::Descriptors)?;
    let to_guest: Writer<'_, ()> = chain.writer(memory).map_err(|_| Broken::Descriptors)?;
    let bytes = from_guest.available_bytes();
    let mut header = [0; REQUEST_BYTES];
    from_guest.read_exact(&mut header).map_err(|_| Broken::Header(bytes))?;
    let room = to_guest.available_bytes();
    if room < RESPONSE_BYTES {
        return Err(Broken::Room(room));
    }
    let text_bytes = bytes - REQUEST_BYTES;
    if text_bytes > TEXT_BYTES {
        return Err(Broken::Text(text_bytes));
    }
    let mut text = vec![0; text_bytes];
    from_guest.read_exact(&mut text).map_err(|_| Broken::Descriptors)?;
    let four = |at: usize| u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"));
    let eight = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
    Ok(Requested { op: four(0), window: four(4), offset: eight(8), length: eight(16), at: eight(24), text })
}

/// Writes an answer into a chain of `memory`, with as much of its piece as there is room for.
/// Returns the bytes that were written to the guest.
///
/// The descriptors are read again, and may be others by now: then the guest gets less, or nothing.
pub(super) fn reply<M>(memory: &Memory, chain: DescriptorChain<M>, answer: &Answer<'_>) -> u32
where
    M: Deref<Target = Memory> + Clone,
{
    let Ok(mut to_guest): Result<Writer<'_, ()>, _> = chain.writer(memory) else { return 0 };
    let mut header = [0; RESPONSE_BYTES];
    header[..4].copy_from_slice(&answer.status.to_le_bytes());
    header[8..].copy_from_slice(&answer.total.to_le_bytes());
    let room = to_guest.available_bytes().saturating_sub(RESPONSE_BYTES);
    let piece = &answer.piece[..answer.piece.len().min(room).min(TEXT_BYTES)];
    let written = to_guest.write_all(&header).and_then(|()| to_guest.write_all(piece));
    match written {
        Ok(()) => u32::try_from(RESPONSE_BYTES + piece.len()).expect("both are bounded"),
        Err(why) => {
            tracing::debug!("an answer does not reach the guest's memory: {why}");
            0
        }
    }
}
