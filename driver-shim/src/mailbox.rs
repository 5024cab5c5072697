//! A mailbox from the guest's side: requests and answers through shared memory and a doorbell.
//! [`lamina_abi::mailbox`] has the layout and the rules.
//!
//! * One program at a time: the mailbox is locked (`flock` of the doorbell's file) as long as it is
//!   open.
//! * A request that a killed program left unanswered is waited for, so that the device never reads
//!   a mixture of two.
//! * A program without a driver gets no interrupts, so the answer is looked for, ever less often.
//!   It rings again now and then: a doorbell may be lost while a device comes back, and rings twice
//!   in vain.

use std::{
    fs::{File, OpenOptions},
    io,
    path::Path,
    sync::atomic::{Ordering, fence},
    thread,
    time::{Duration, Instant},
};

use lamina_abi::mailbox::{
    ANSWER_AT, ANSWER_BYTES, ANSWER_LENGTH_AT, ANSWER_NUMBER_AT, ANSWER_TOTAL_AT, DOORBELL_AT, MAILBOX_MAGIC,
    MAILBOX_VERSION, REQUEST_AT, REQUEST_BYTES, REQUEST_FROM_AT, REQUEST_LENGTH_AT, REQUEST_NUMBER_AT, RING,
    VERSION_AT,
};
use rustix::fs::{FlockOperation, flock};
use vm_memory::Bytes;

use crate::{
    Access, Window, WindowError,
    sysfs::{Tree, wait},
};

/// Between two looks for an answer, at most.
const LONGEST_PAUSE: Duration = Duration::from_millis(2);
/// How long is looked without a pause.
const EAGER: Duration = Duration::from_micros(200);
/// Between two rings for one request.
const AGAIN: Duration = Duration::from_secs(1);

/// Why a mailbox gave no answer.
#[derive(Debug)]
pub(crate) enum MailboxError {
    /// The deadline passed.
    Late,
    /// A driver gave up, after so long: it has a deadline of its own.
    DriverLate(Duration),
    /// The answer would be longer than this.
    TooLong(usize),
    /// The device broke the rules, or the request does not fit.
    Broken(String),
}

impl From<WindowError> for MailboxError {
    fn from(error: WindowError) -> Self {
        Self::Broken(error.to_string())
    }
}

/// A mailbox that is this program's as long as it is open.
#[derive(Debug)]
pub(crate) struct Mailbox {
    memory: Window,
    registers: Window,
    /// Holds the lock.
    _lock: File,
}

impl Mailbox {
    /// Opens the mailbox of the PCI device in `folder`, once no other program has it.
    pub(crate) fn open(folder: &Path, max_wait: Duration) -> io::Result<Self> {
        let tree = Tree::system();
        let map = |name| {
            Window::open(&folder.join(name), Access::ReadWrite, &tree)
                .map_err(|error| io::Error::other(error.to_string()))
        };
        let lock = OpenOptions::new().read(true).open(folder.join("resource0"))?;
        let free = || match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => None,
            locked => Some(locked),
        };
        wait(max_wait, free).unwrap_or(Err(rustix::io::Errno::BUSY))?;
        let mailbox = Self { memory: map("resource2")?, registers: map("resource0")?, _lock: lock };
        let mut magic = [0; MAILBOX_MAGIC.len()];
        let version = mailbox.load(0, &mut magic).and_then(|()| mailbox.field(VERSION_AT));
        match version {
            Ok(MAILBOX_VERSION) if magic == MAILBOX_MAGIC => Ok(mailbox),
            Ok(version) if magic == MAILBOX_MAGIC => Err(io::Error::other(format!(
                "the mailbox has version {version}, this program knows {MAILBOX_VERSION}"
            ))),
            _ => Err(io::Error::other("no mailbox is there")),
        }
    }

    /// Sends a request's text and returns the answer's, of at most `bound` bytes.
    pub(crate) fn exchange(
        &self,
        request: &str,
        bound: usize,
        deadline: Instant,
    ) -> Result<Vec<u8>, MailboxError> {
        if request.len() as u64 > REQUEST_BYTES {
            return Err(MailboxError::Broken(format!(
                "a request of {} bytes; {REQUEST_BYTES} fit",
                request.len()
            )));
        }
        let before = self.field(REQUEST_NUMBER_AT)?;
        self.await_answer(before, deadline)?;
        self.memory.span(REQUEST_AT, REQUEST_BYTES)?.store(0, request.as_bytes())?;
        let mut number = self.ask(before, request.len() as u64, 0, deadline)?;
        let total = usize::try_from(self.field(ANSWER_TOTAL_AT)?).unwrap_or(usize::MAX);
        if total > bound {
            return Err(MailboxError::TooLong(bound));
        }
        let mut answer = Vec::new();
        loop {
            let piece = self.field(ANSWER_LENGTH_AT)?;
            let start = answer.len();
            let fits = piece <= ANSWER_BYTES && piece <= (total - start) as u64;
            let Some(end) = usize::try_from(piece).ok().filter(|_| fits).map(|piece| start + piece) else {
                return Err(MailboxError::Broken(format!(
                    "a piece of {piece} bytes at {start} of an answer of {total}"
                )));
            };
            answer.resize(end, 0);
            self.load(ANSWER_AT, &mut answer[start..])?;
            if end == total {
                return Ok(answer);
            }
            if end == start {
                return Err(MailboxError::Broken(format!("an answer of {total} bytes ends at {end}")));
            }
            number = self.ask(number, 0, end as u64, deadline)?;
        }
    }

    /// Makes a request whose text is there, and waits until it is answered: its number.
    fn ask(&self, before: u64, length: u64, from: u64, deadline: Instant) -> Result<u64, MailboxError> {
        let number = before.wrapping_add(1).max(1);
        self.set_field(REQUEST_LENGTH_AT, length)?;
        self.set_field(REQUEST_FROM_AT, from)?;
        fence(Ordering::SeqCst);
        self.set_field(REQUEST_NUMBER_AT, number)?;
        self.await_answer(number, deadline)?;
        Ok(number)
    }

    /// Rings until the request of this number is answered.
    fn await_answer(&self, number: u64, deadline: Instant) -> Result<(), MailboxError> {
        let begun = Instant::now();
        let (mut rung, mut pause) = (None::<Instant>, Duration::from_micros(50));
        while self.field(ANSWER_NUMBER_AT)? != number {
            let now = Instant::now();
            if now >= deadline {
                return Err(MailboxError::Late);
            }
            if rung.is_none_or(|rung| now - rung >= AGAIN) {
                fence(Ordering::SeqCst);
                self.ring()?;
                rung = Some(now);
            }
            if now - begun < EAGER {
                thread::yield_now();
            } else {
                thread::sleep(pause);
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn ring(&self) -> Result<(), MailboxError> {
        let doorbell = self.registers.span(DOORBELL_AT, 4)?;
        let rung = doorbell.volatile().store(RING.to_le(), 0, Ordering::Release);
        rung.map_err(|error| MailboxError::Broken(format!("the doorbell cannot be reached: {error}")))
    }

    fn load(&self, at: u64, into: &mut [u8]) -> Result<(), MailboxError> {
        Ok(self.memory.span(at, into.len() as u64)?.load(0, into)?)
    }

    fn field(&self, at: u64) -> Result<u64, MailboxError> {
        let field = self.memory.span(at, 8)?.volatile().load::<u64>(0, Ordering::Acquire);
        field.map(u64::from_le).map_err(|error| MailboxError::Broken(error.to_string()))
    }

    fn set_field(&self, at: u64, value: u64) -> Result<(), MailboxError> {
        let set = self.memory.span(at, 8)?.volatile().store(value.to_le(), 0, Ordering::Release);
        set.map_err(|error| MailboxError::Broken(error.to_string()))
    }
}
