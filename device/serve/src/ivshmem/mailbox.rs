//! A mailbox's memory, as [`lamina_abi::mailbox`] lays it out, from the device's side.
//!
//! It is a memfd that is sealed against changes of its length, so that reads and writes cannot fail
//! half-way, whatever QEMU does.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use lamina_abi::mailbox::{
    ANSWER_AT, ANSWER_BYTES, ANSWER_LENGTH_AT, ANSWER_NUMBER_AT, ANSWER_TOTAL_AT, MAILBOX_BYTES,
    MAILBOX_MAGIC, MAILBOX_VERSION, REQUEST_AT, REQUEST_BYTES, REQUEST_FROM_AT, REQUEST_LENGTH_AT,
    REQUEST_NUMBER_AT, VERSION_AT,
};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

/// What a guest asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Requested {
    /// A request's text.
    Text(Vec<u8>),
    /// More of the last answer, from there.
    More(u64),
    /// Nothing that can be answered, and why.
    Nonsense(String),
}

/// A mailbox.
#[derive(Debug)]
pub(crate) struct Mailbox {
    memory: File,
    /// The number of the request that was answered last.
    answered: u64,
    /// The last answer.
    answer: Vec<u8>,
}

impl Mailbox {
    /// An empty one.
    pub(crate) fn new() -> io::Result<Self> {
        let memory = memfd_create("lamina-mailbox", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&memory, MAILBOX_BYTES)?;
        fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let memory = File::from(memory);
        memory.write_all_at(&MAILBOX_MAGIC, 0)?;
        memory.write_all_at(&MAILBOX_VERSION.to_le_bytes(), VERSION_AT)?;
        Ok(Self { memory, answered: 0, answer: Vec::new() })
    }

    /// The memory, to be handed to QEMU.
    pub(crate) fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    /// The request that was not answered yet, if there is one, and its number.
    pub(super) fn request(&self) -> io::Result<Option<(u64, Requested)>> {
        let number = self.field(REQUEST_NUMBER_AT)?;
        if number == self.answered {
            return Ok(None);
        }
        let length = self.field(REQUEST_LENGTH_AT)?;
        if length == 0 {
            return Ok(Some((number, Requested::More(self.field(REQUEST_FROM_AT)?))));
        }
        let Some(length) = usize::try_from(length).ok().filter(|_| length <= REQUEST_BYTES) else {
            let why = format!("a request of {length} bytes; {REQUEST_BYTES} fit");
            return Ok(Some((number, Requested::Nonsense(why))));
        };
        let mut text = vec![0; length];
        self.memory.read_exact_at(&mut text, REQUEST_AT)?;
        let requested = if text.contains(&b'\n') || text.trim_ascii().is_empty() {
            Requested::Nonsense("a request is one line".into())
        } else {
            Requested::Text(text)
        };
        Ok(Some((number, requested)))
    }

    /// Answers a request.
    pub(super) fn answer(&mut self, number: u64, answer: Vec<u8>) -> io::Result<()> {
        self.answer = answer;
        self.piece(number, 0)
    }

    /// Answers a request with what the last answer has from there on.
    pub(super) fn piece(&mut self, number: u64, from: u64) -> io::Result<()> {
        let rest = usize::try_from(from).ok().and_then(|from| self.answer.get(from..)).unwrap_or_default();
        let piece = &rest[..rest.len().min(usize::try_from(ANSWER_BYTES).unwrap_or(usize::MAX))];
        self.memory.write_all_at(piece, ANSWER_AT)?;
        self.set_field(ANSWER_LENGTH_AT, piece.len() as u64)?;
        self.set_field(ANSWER_TOTAL_AT, self.answer.len() as u64)?;
        // Last: who sees it sees the rest, as stores of this architecture appear in their order.
        self.set_field(ANSWER_NUMBER_AT, number)?;
        self.answered = number;
        Ok(())
    }

    fn field(&self, at: u64) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.memory.read_exact_at(&mut bytes, at)?;
        Ok(u64::from_le_bytes(bytes))
    }

    fn set_field(&self, at: u64, value: u64) -> io::Result<()> {
        self.memory.write_all_at(&value.to_le_bytes(), at)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ask(mailbox: &Mailbox, number: u64, text: &[u8]) {
        mailbox.memory.write_all_at(text, REQUEST_AT).unwrap();
        mailbox.set_field(REQUEST_LENGTH_AT, text.len() as u64).unwrap();
        mailbox.set_field(REQUEST_NUMBER_AT, number).unwrap();
    }

    #[test]
    fn a_request_is_seen_once_and_its_answer_fetched_in_pieces() {
        let mut mailbox = Mailbox::new().unwrap();
        assert_eq!(mailbox.request().unwrap(), None);
        ask(&mailbox, 7, b"{}");
        assert_eq!(mailbox.request().unwrap(), Some((7, Requested::Text(b"{}".to_vec()))));
        let answer: Vec<u8> = (0..2_000_003_u32).map(|n| ((n * 7) >> 3).to_le_bytes()[0]).collect();
        mailbox.answer(7, answer.clone()).unwrap();
        assert_eq!(mailbox.request().unwrap(), None);
        let mut fetched = Vec::new();
        for number in 8.. {
            let mut piece = vec![0; usize::try_from(mailbox.field(ANSWER_LENGTH_AT).unwrap()).unwrap()];
            mailbox.memory.read_exact_at(&mut piece, ANSWER_AT).unwrap();
            assert_eq!(mailbox.field(ANSWER_TOTAL_AT).unwrap(), answer.len() as u64);
            assert_eq!(mailbox.field(ANSWER_NUMBER_AT).unwrap(), number - 1);
            fetched.extend(piece);
            if fetched.len() >= answer.len() {
                break;
            }
            mailbox.set_field(REQUEST_FROM_AT, fetched.len() as u64).unwrap();
            ask(&mailbox, number, b"");
            let Some((requested, Requested::More(from))) = mailbox.request().unwrap() else {
                panic!("no request")
            };
            assert_eq!((requested, from), (number, fetched.len() as u64));
            mailbox.piece(requested, from).unwrap();
        }
        assert!(fetched == answer);
    }

    #[test]
    fn its_length_cannot_be_changed() {
        let mailbox = Mailbox::new().unwrap();
        for bytes in [0, MAILBOX_BYTES - 1, MAILBOX_BYTES + 1] {
            assert_eq!(ftruncate(mailbox.memory(), bytes), Err(rustix::io::Errno::PERM));
        }
    }

    proptest! {
        #[test]
        fn whatever_a_guest_writes_is_answered_within_the_mailbox(
            number in 1..u64::MAX,
            length in prop_oneof![any::<u64>(), 0..2 * REQUEST_BYTES],
            from in prop_oneof![any::<u64>(), 0..64_u64],
            text in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            let mut mailbox = Mailbox::new().unwrap();
            mailbox.answer(0, b"the answer before".to_vec()).unwrap();
            mailbox.memory.write_all_at(&text, REQUEST_AT).unwrap();
            mailbox.set_field(REQUEST_LENGTH_AT, length).unwrap();
            mailbox.set_field(REQUEST_FROM_AT, from).unwrap();
            mailbox.set_field(REQUEST_NUMBER_AT, number).unwrap();
            let (found, requested) = mailbox.request().unwrap().unwrap();
            prop_assert_eq!(found, number);
            match requested {
                Requested::More(place) => {
                    prop_assert_eq!((length, place), (0, from));
                    mailbox.piece(number, place).unwrap();
                    prop_assert_eq!(mailbox.field(ANSWER_LENGTH_AT).unwrap(), 17_u64.saturating_sub(from));
                }
                Requested::Text(text) => {
                    prop_assert!(length <= REQUEST_BYTES && text.len() as u64 == length);
                    prop_assert!(!text.contains(&b'\n'));
                }
                Requested::Nonsense(_) => prop_assert!(length > REQUEST_BYTES || length > 0),
            }
        }
    }
}
