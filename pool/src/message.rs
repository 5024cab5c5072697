//! Messages in memory: a slot for each client at each server.
//!
//! A client's request is a line that it alone writes; the server's response is another. A line
//! checks whole, so half of one is none. The server tells that it begins a request before it does
//! anything: if it dies, the next says that the request may have been done, and does not do it
//! again. So a request is done at most once. What is longer than a line is a block of the pool, and
//! its key is sent.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::PoolError;
use crate::layout::{is_sealed, seal, word};
use crate::mem::LINE;
use crate::member::{Member, Wait};
use crate::pool::Pool;

/// Bytes that a message carries.
pub const BODY: usize = 40;

/// What a response says of itself.
const BEGUN: u16 = u16::MAX;
const LOST: u16 = u16::MAX - 1;

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Line {
    incarnation: u32,
    sequence: u32,
    op: u16,
    length: u16,
    body: [u8; BODY],
}

impl Line {
    fn to_bytes(self) -> [u8; LINE as usize] {
        let mut bytes = [0; LINE as usize];
        bytes[..4].copy_from_slice(&self.incarnation.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[8..10].copy_from_slice(&self.op.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.length.to_le_bytes());
        bytes[16..16 + BODY].copy_from_slice(&self.body);
        seal(&mut bytes);
        bytes
    }

    fn of(bytes: &[u8; LINE as usize]) -> Option<Self> {
        let mut body = [0; BODY];
        body.copy_from_slice(&bytes[16..16 + BODY]);
        let (first, second) = (word(bytes, 0), word(bytes, 1));
        let line = Self {
            incarnation: first as u32,
            sequence: (first >> 32) as u32,
            op: second as u16,
            length: (second >> 16) as u16,
            body,
        };
        (is_sealed(bytes) && usize::from(line.length) <= BODY).then_some(line)
    }

    fn new(incarnation: u32, sequence: u32, op: u16, body: &[u8]) -> Result<Self, PoolError> {
        let mut whole = [0; BODY];
        let length = body.len();
        let into = whole.get_mut(..length).ok_or(PoolError::TooLong {
            what: "a message",
            bytes: length as u64,
            most: BODY as u64,
        })?;
        into.copy_from_slice(body);
        Ok(Self { incarnation, sequence, op, length: length as u16, body: whole })
    }

    fn is_same(&self, other: &Self) -> bool {
        (self.incarnation, self.sequence) == (other.incarnation, other.sequence)
    }
}

/// A request, as its server sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// The client's number.
    pub client: u32,
    /// Which of those who had the number it is.
    pub incarnation: u32,
    /// What is asked for: below 65,534.
    pub op: u16,
    /// What belongs to it.
    pub body: &'a [u8],
}

/// The last sequence of this process: unique among a node's threads.
static SEQUENCE: AtomicU32 = AtomicU32::new(0);

impl Pool {
    /// Asks another node and waits for its answer. One thread of a node asks one server at a time.
    /// `None`: the server died with it, and it may have been done or not.
    ///
    /// # Errors
    /// [`PoolError::TooLong`], [`PoolError::Node`], [`PoolError::Timeout`], [`PoolError::Fenced`];
    /// [`PoolError::NoServer`] when it has been gone for some time.
    pub fn ask(&self, server: u32, op: u16, body: &[u8]) -> Result<Option<(u16, Vec<u8>)>, PoolError> {
        self.ask_while(server, op, body, |member| member.is_attached(server))
    }

    /// [`Self::ask`], in vain when `serves` has not held for some time.
    pub(crate) fn ask_while(
        &self,
        server: u32,
        op: u16,
        body: &[u8],
        serves: impl Fn(&Member) -> Result<bool, PoolError>,
    ) -> Result<Option<(u16, Vec<u8>)>, PoolError> {
        let member = &self.member;
        if server >= member.layout.geometry.nodes || op >= LOST {
            return Err(PoolError::Node { node: server, why: "it is no server for this".into() });
        }
        let sequence = SEQUENCE.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let request = Line::new(member.incarnation, sequence, op, body)?;
        let at = member.layout.message(member.node, server);
        member.lines.store(at, &request.to_bytes())?;
        member.lines.publish(at, LINE)?;
        let mut wait = Wait::default();
        let mut gone = None;
        let response = member.layout.response(member.node, server);
        loop {
            // No fence: an old line checks too, and is looked at again.
            member.lines.invalidate(response, LINE)?;
            let mut bytes = [0; LINE as usize];
            member.lines.load(response, &mut bytes)?;
            if let Some(line) = Line::of(&bytes).filter(|line| line.is_same(&request)) {
                match line.op {
                    BEGUN => {}
                    LOST => return member.alive().map(|()| None),
                    op => {
                        member.alive()?;
                        return Ok(Some((op, line.body[..usize::from(line.length)].to_vec())));
                    }
                }
            }
            if wait.is_due() {
                // If this node manages, the server may wait to be recovered by it.
                self.serve()?;
                // It may come back, under its number, and then tells what became of this.
                let now = member.host.now();
                match serves(member)? {
                    true => gone = None,
                    false if now.saturating_sub(*gone.get_or_insert(now)) > self.grace() => {
                        return Err(PoolError::NoServer);
                    }
                    false => {}
                }
            }
            member.wait(&mut wait, "an answer")?;
        }
    }

    /// Milliseconds for which who is gone may come back.
    pub(crate) fn grace(&self) -> u64 {
        self.member.host.timeout().saturating_mul(2)
    }

    /// Answers what was asked of this node, and says how many. One thread does so. What a last life
    /// of this node began and did not end is not done again: its clients are told.
    ///
    /// # Errors
    /// [`PoolError::TooLong`] for a reply, [`PoolError::Fenced`].
    pub fn answer(
        &self,
        mut reply: impl FnMut(Request<'_>) -> Result<(u16, Vec<u8>), PoolError>,
    ) -> Result<usize, PoolError> {
        let member = &self.member;
        let clients = member.layout.geometry.nodes;
        // All of a batch lie side by side: one pass of invalidations, and one fence.
        let first = member.layout.message(0, member.node);
        member.lines.consume(first, u64::from(clients) * 2 * LINE)?;
        let mut begun = Vec::new();
        for client in 0..clients {
            let mut bytes = [0; LINE as usize];
            member.lines.load(member.layout.message(client, member.node), &mut bytes)?;
            let Some(request) = Line::of(&bytes).filter(|request| request.op < LOST) else { continue };
            let at = member.layout.response(client, member.node);
            member.lines.load(at, &mut bytes)?;
            let mut response = Line { op: BEGUN, length: 0, ..request };
            match Line::of(&bytes).filter(|response| response.is_same(&request)) {
                // It was this node's last life that began it.
                Some(last) if last.op == BEGUN => response.op = LOST,
                Some(_) => continue,
                None => begun.push((client, request)),
            }
            member.lines.store(at, &response.to_bytes())?;
            member.lines.flush(at, LINE)?;
        }
        // That they are begun is told before any is done.
        member.lines.fence()?;
        if !begun.is_empty() {
            member.alive()?;
        }
        for (client, request) in &begun {
            let body = &request.body[..usize::from(request.length)];
            let incarnation = request.incarnation;
            let (op, body) = reply(Request { client: *client, incarnation, op: request.op, body })?;
            let response = Line::new(request.incarnation, request.sequence, op.min(LOST - 1), &body)?;
            let answer = member.layout.response(*client, member.node);
            member.lines.store(answer, &response.to_bytes())?;
            member.lines.flush(answer, LINE)?;
        }
        member.lines.fence()?;
        member.alive()?;
        Ok(begun.len())
    }
}
