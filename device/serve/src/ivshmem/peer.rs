//! One guest's QEMU: what it is told when it connects, and its requests, one after another, until
//! it goes.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use lamina_abi::mailbox::{DEVICE_PEER, GUEST_PEER};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;
use tokio::net::unix::pipe;

use super::mailbox::{Mailbox, Requested};
use crate::relay::{answer, refusal};

/// The version of the protocol between an ivshmem server and QEMU.
const PROTOCOL: i64 = 0;
/// The message that comes with the shared memory.
const MEMORY: i64 = -1;

/// A guest.
#[derive(Debug)]
pub(super) struct Peer {
    stream: UnixStream,
    mailbox: Mailbox,
    /// Rung by the guest. An eventfd is read like a pipe, eight bytes at a time.
    requested: pipe::Receiver,
    /// Rings the guest.
    answered: OwnedFd,
}

impl Peer {
    /// Tells a QEMU that connected who it is, and gives it the mailbox and the doorbells.
    pub(super) fn greet(stream: UnixStream, mailbox: Mailbox) -> io::Result<Self> {
        let bell = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let (requested, answered) = (bell()?, bell()?);
        let (device, guest) = (i64::from(DEVICE_PEER), i64::from(GUEST_PEER));
        tell(&stream, PROTOCOL, None)?;
        tell(&stream, guest, None)?;
        tell(&stream, MEMORY, Some(mailbox.memory()))?;
        tell(&stream, device, Some(requested.as_fd()))?;
        // QEMU lets the guest start when it hears of itself, so this comes last.
        tell(&stream, guest, Some(answered.as_fd()))?;
        Ok(Self { stream, mailbox, requested: pipe::Receiver::from_owned_fd_unchecked(requested)?, answered })
    }

    /// Answers requests until QEMU is gone.
    pub(super) async fn serve(mut self, port: &Path) -> io::Result<()> {
        let (mut reading, _writing) = self.stream.split();
        // The other side never says anything: what comes is its end.
        let mut byte = [0];
        let gone = reading.read(&mut byte);
        let (mailbox, requested, answered) = (&mut self.mailbox, &self.requested, &self.answered);
        let answering = async {
            loop {
                requested.readable().await?;
                // It counts how often it was rung, which means nothing.
                let _ = requested.try_read(&mut [0; 8]);
                if !perform(mailbox, async |text| answer(port, text).await).await? {
                    continue;
                }
                // A guest that takes no interrupts lets them add up, in vain.
                let _ = rustix::io::write(answered, &1_u64.to_ne_bytes());
            }
        };
        tokio::select! {
            _ = gone => Ok(()),
            failed = answering => failed,
        }
    }
}

/// Answers the request in `mailbox`, its text by what `ask` brings: whether there was one.
pub(crate) async fn perform(
    mailbox: &mut Mailbox,
    ask: impl AsyncFnOnce(Vec<u8>) -> Vec<u8>,
) -> io::Result<bool> {
    let Some((number, requested)) = mailbox.request()? else { return Ok(false) };
    match requested {
        Requested::More(from) => mailbox.piece(number, from)?,
        Requested::Text(text) => mailbox.answer(number, ask(text).await)?,
        Requested::Nonsense(why) => mailbox.answer(number, refusal(&why))?,
    }
    Ok(true)
}

/// Sends a message of the protocol: a number, and a descriptor with it.
fn tell(stream: &UnixStream, number: i64, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = descriptor.map(|descriptor| [descriptor]);
    if let Some(descriptors) = &descriptors
        && !control.push(SendAncillaryMessage::ScmRights(descriptors))
    {
        return Err(io::Error::other("a message has no room for a descriptor"));
    }
    let bytes = number.to_le_bytes();
    // A new connection has room for all that is said, so it is never waited for.
    let sent = sendmsg(stream.as_fd(), &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)?;
    if sent == bytes.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}
