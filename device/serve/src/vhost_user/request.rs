//! One request: taken from a chain of descriptors, done, and answered.
//!
//! * A request is a header of 16 bytes and perhaps data that the device reads, then perhaps data
//!   that it writes and a byte for the status. How these are cut into descriptors is the driver's
//!   choice.
//! * One without a header or a place for the status is [`Broken`]; whatever else is wrong with it
//!   is answered.
//! * It may have gigabytes of data. So it is done piece by piece, and left undone and unanswered
//!   after any of them once the disk is stopping: whoever serves the disk next does it again.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use virtio_queue::DescriptorChain;
use vm_memory::{GuestMemoryLoadGuard, Permissions};

use crate::control::ControlError;
use crate::vhost_connections::Memory;

use super::config::{DISCARD_RANGES, DISCARD_SECTORS, SECTOR, SERIAL_BYTES};
use super::disk::Disk;
use super::pieces::Pieces;
use super::workspace::Workspace;

/// A chain of descriptors in it.
pub(super) type Chain = DescriptorChain<GuestMemoryLoadGuard<Memory>>;

/// Bytes of a header.
const HEADER: usize = 16;

const STATUS_OK: u8 = 0;
const STATUS_IOERR: u8 = 1;
const STATUS_UNSUPP: u8 = 2;

const TYPE_IN: u32 = 0;
const TYPE_OUT: u32 = 1;
const TYPE_FLUSH: u32 = 4;
const TYPE_GET_ID: u32 = 8;
const TYPE_DISCARD: u32 = 11;
const TYPE_WRITE_ZEROES: u32 = 13;

/// A chain that is no request.
#[derive(Debug, thiserror::Error)]
pub(super) enum Broken {
    /// Its descriptors point outside of the guest's memory, or are too many.
    #[error("its descriptors do not describe the guest's memory")]
    Descriptors,
    /// It has no header.
    #[error("it has {0} bytes to read, less than a header")]
    Header(usize),
    /// It has no place for the status.
    #[error("it has no byte for the status")]
    Status,
}

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
enum Failure {
    /// The device could not.
    #[error(transparent)]
    Device(#[from] ControlError),
    /// The guest asked for what cannot be.
    #[error("{0}")]
    Requested(&'static str),
    /// The guest asked for what this disk does not do.
    #[error("{0}")]
    Unsupported(&'static str),
    /// The disk stops before all of it is done.
    #[error("the disk is being stopped")]
    Stopping,
}

/// A request.
pub(super) struct Request<'m> {
    kind: u32,
    sector: u64,
    /// The header, and what the device reads.
    from_guest: Pieces<'m>,
    /// What the device writes, and the status.
    to_guest: Pieces<'m>,
}

impl<'m> Request<'m> {
    /// The request in a chain of `memory`.
    pub(super) fn parse(memory: &'m Memory, chain: Chain) -> Result<Self, Broken> {
        let (mut from_guest, mut to_guest) = (Pieces::default(), Pieces::default());
        for descriptor in chain {
            let (pieces, access) = if descriptor.is_write_only() {
                (&mut to_guest, Permissions::Write)
            } else {
                (&mut from_guest, Permissions::Read)
            };
            pieces.push(memory, descriptor.addr(), descriptor.len(), access)?;
        }
        if to_guest.bytes() == 0 {
            return Err(Broken::Status);
        }
        let mut header = [0; HEADER];
        if !from_guest.read(0, &mut header) {
            return Err(Broken::Header(from_guest.bytes()));
        }
        let (kind, sector) = (number(&header[..4]), number(&header[8..]));
        let kind = u32::try_from(kind).expect("four bytes");
        Ok(Self { kind, sector, from_guest, to_guest })
    }

    /// Whether it reads the disk.
    pub(super) fn is_read(&self) -> bool {
        self.kind == TYPE_IN
    }

    /// Does what is asked, by way of `workspace`, and answers. Returns the bytes that were written
    /// to the guest, or `None` if it was left undone because the disk is `stopping`.
    pub(super) fn serve(
        mut self,
        disk: &Disk,
        workspace: &mut Workspace,
        stopping: &AtomicBool,
    ) -> Option<u32> {
        // A panic is logged by its hook; the guest gets an error like any other.
        let performed = catch_unwind(AssertUnwindSafe(|| self.perform(disk, workspace, stopping)));
        let status = match performed {
            Ok(Ok(())) => STATUS_OK,
            Ok(Err(Failure::Stopping)) => return None,
            // What it goes through may be closed already; the next server's is not.
            Ok(Err(Failure::Device(_))) if stopping.load(Ordering::SeqCst) => return None,
            Ok(Err(why)) => {
                let (kind, sector) = (self.kind, self.sector);
                if matches!(why, Failure::Device(_)) {
                    tracing::warn!(kind, sector, "a disk's request failed: {why}");
                } else {
                    tracing::debug!(kind, sector, "a disk's request was refused: {why}");
                }
                if matches!(why, Failure::Unsupported(_)) { STATUS_UNSUPP } else { STATUS_IOERR }
            }
            Err(_) => {
                disk.count_panic();
                STATUS_IOERR
            }
        };
        Some(self.answer(status))
    }

    /// Answers that the request failed.
    pub(super) fn fail(self) -> u32 {
        self.answer(STATUS_IOERR)
    }

    fn answer(mut self, status: u8) -> u32 {
        let written = self.to_guest.written();
        let reported = self.to_guest.write(self.room(), &[status]);
        u32::try_from(written + usize::from(reported)).unwrap_or(u32::MAX)
    }

    /// Bytes of data that it has the device write.
    fn room(&self) -> usize {
        // The last one is for the status.
        self.to_guest.bytes() - 1
    }

    /// Bytes of data that it has the device read.
    fn data(&self) -> usize {
        self.from_guest.bytes() - HEADER
    }

    fn perform(
        &mut self,
        disk: &Disk,
        workspace: &mut Workspace,
        stopping: &AtomicBool,
    ) -> Result<(), Failure> {
        match self.kind {
            TYPE_IN => self.read(disk, workspace, stopping),
            TYPE_OUT => self.write(disk, workspace, stopping),
            TYPE_FLUSH => Ok(disk.flush()?),
            TYPE_GET_ID if self.room() < SERIAL_BYTES => {
                Err(Failure::Requested("there is no room for the serial number"))
            }
            TYPE_GET_ID => {
                self.to_guest.write(0, &disk.serial());
                Ok(())
            }
            TYPE_DISCARD | TYPE_WRITE_ZEROES if disk.read_only() => {
                Err(Failure::Unsupported("the disk is read-only"))
            }
            TYPE_DISCARD => self.free(disk, 0, stopping),
            // The flag `unmap` changes nothing: zeros are never stored.
            TYPE_WRITE_ZEROES => self.free(disk, 1, stopping),
            _ => Err(Failure::Unsupported("no such request")),
        }
    }

    fn read(&mut self, disk: &Disk, workspace: &mut Workspace, stopping: &AtomicBool) -> Result<(), Failure> {
        let length = self.room();
        let offset = disk
            .place(self.sector, length as u64)
            .ok_or(Failure::Requested("not whole sectors of the disk"))?;
        for at in (0..length).step_by(workspace.len()) {
            go_on(stopping)?;
            let part = (length - at).min(workspace.len());
            self.to_guest.write(at, workspace.read(disk, offset + at as u64, part)?);
        }
        Ok(())
    }

    fn write(
        &mut self,
        disk: &Disk,
        workspace: &mut Workspace,
        stopping: &AtomicBool,
    ) -> Result<(), Failure> {
        if disk.read_only() {
            return Err(Failure::Requested("the disk is read-only"));
        }
        let length = self.data();
        let offset = disk
            .place(self.sector, length as u64)
            .ok_or(Failure::Requested("not whole sectors of the disk"))?;
        for at in (0..length).step_by(workspace.len()) {
            go_on(stopping)?;
            let data = workspace.front((length - at).min(workspace.len()));
            self.take(at, data)?;
            disk.write(offset + at as u64, data)?;
        }
        Ok(())
    }

    /// Takes data of the guest's from `at` on.
    fn take(&mut self, at: usize, data: &mut [u8]) -> Result<(), Failure> {
        let whole = self.from_guest.read(HEADER + at, data);
        whole.then_some(()).ok_or(Failure::Requested("less data than it says"))
    }

    /// Discards or zeroes ranges, of which each has at most these flags. All are checked before the
    /// first is freed.
    fn free(&mut self, disk: &Disk, flags: u32, stopping: &AtomicBool) -> Result<(), Failure> {
        let length = self.data();
        if length == 0 || !length.is_multiple_of(16) || length / 16 > DISCARD_RANGES as usize {
            return Err(Failure::Requested("not 1 to 16 ranges"));
        }
        let mut places = Vec::with_capacity(length / 16);
        for at in (0..length).step_by(16) {
            let mut range = [0; 16];
            self.take(at, &mut range)?;
            let (sector, sectors) = (number(&range[..8]), number(&range[8..12]));
            if number(&range[12..]) & !u64::from(flags) != 0 {
                return Err(Failure::Unsupported("a flag that has no meaning"));
            }
            if sectors > u64::from(DISCARD_SECTORS) {
                return Err(Failure::Requested("more sectors than one range may have"));
            }
            let bytes = sectors * SECTOR;
            let place = disk.place(sector, bytes).ok_or(Failure::Requested("not sectors of the disk"))?;
            places.push((place, bytes));
        }
        places.into_iter().try_for_each(|(offset, bytes)| {
            go_on(stopping)?;
            Ok(disk.discard(offset, bytes)?)
        })
    }
}

fn go_on(stopping: &AtomicBool) -> Result<(), Failure> {
    if stopping.load(Ordering::SeqCst) { Err(Failure::Stopping) } else { Ok(()) }
}

/// A little-endian number of up to eight bytes.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte))
}
