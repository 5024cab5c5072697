//! Who serves the index: a node that looks into the table for others.

use std::sync::Arc;

use crate::class::ClassId;
use crate::error::PoolError;
use crate::key::Key;
use crate::layout::{ALLOC, BODY_BYTES, word};
use crate::mem::Crc;
use crate::member::Member;
use crate::message::Request;
use crate::pool::Pool;
use crate::prefix::Reserved;
use crate::table::{State, Tag, find};

/// What is asked: how many of some blocks are there, where one is, for a place, that it be ready,
/// that it be removed, that a place be given back.
pub(crate) const PREFIX: u16 = 1;
pub(crate) const FIND: u16 = 2;
pub(crate) const RESERVE: u16 = 3;
pub(crate) const COMMIT: u16 = 4;
pub(crate) const REMOVE: u16 = 5;
pub(crate) const ABORT: u16 = 6;

/// What is answered.
pub(crate) const ANSWERED: u16 = 0;
pub(crate) const MISSING: u16 = 1;
pub(crate) const READY: u16 = 2;
pub(crate) const YOURS: u16 = 3;
/// There is no space; with a word behind it, no slot.
pub(crate) const FULL: u16 = 4;
const BUSY: u16 = 5;
const REFUSED: u16 = 6;
/// The device does not take the class.
pub(crate) const NO_CLASS: u16 = 7;

/// Words as a message has them.
pub(crate) fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// The answer to what cannot be done.
fn in_vain(op: u16) -> (u16, Vec<u8>) {
    match op {
        PREFIX => (ANSWERED, words(&[0])),
        FIND | REMOVE => (MISSING, Vec::new()),
        RESERVE => (FULL, Vec::new()),
        _ => (REFUSED, Vec::new()),
    }
}

fn of(node: u32, incarnation: u32) -> u64 {
    u64::from(incarnation) << 8 | (u64::from(node) + 1)
}

/// The node that serves the index, if one does.
pub(crate) fn serves(member: &Member) -> Result<Option<u32>, PoolError> {
    let said = member.lines.fresh(member.layout.server())?;
    let Some(node) = ((said & 0xff) as u32).checked_sub(1) else { return Ok(None) };
    if node >= member.layout.geometry.nodes {
        return Ok(None);
    }
    let (incarnation, _) = member.incarnation(node)?;
    Ok((of(node, incarnation) == said && member.is_attached(node)?).then_some(node))
}

/// A node that serves the index.
pub struct IndexServer {
    pool: Arc<Pool>,
}

impl IndexServer {
    /// Begins to serve, if no other does.
    ///
    /// # Errors
    /// [`PoolError::Served`], [`PoolError::Fenced`].
    pub fn new(pool: Arc<Pool>) -> Result<Self, PoolError> {
        let member = &pool.member;
        let held = member.acquire(ALLOC)?;
        let other = serves(member)?.filter(|node| *node != member.node);
        if other.is_none() {
            member.lines.post(member.layout.server(), of(member.node, member.incarnation))?;
        }
        held.release()?;
        match other {
            Some(node) => Err(PoolError::Served { node }),
            None => Ok(Self { pool }),
        }
    }

    /// Answers what was asked, and says how many questions that were.
    ///
    /// # Errors
    /// [`PoolError::Fenced`], [`PoolError::Mem`].
    pub fn turn(&self) -> Result<usize, PoolError> {
        self.pool.answer(|request| match self.reply(request) {
            // No damaged entry, nobody who keeps a lock and no device that refuses ends a server.
            Err(PoolError::Damaged { .. } | PoolError::Timeout(_) | PoolError::Declare(_)) => {
                Ok(in_vain(request.op))
            }
            reply => reply,
        })
    }

    /// Does this node's duty and answers until `stop` holds. It sleeps while nobody asks.
    ///
    /// # Errors
    /// [`PoolError::Fenced`], [`PoolError::Mem`].
    pub fn run(&self, stop: impl Fn() -> bool) -> Result<(), PoolError> {
        let (mut idle, mut busy) = (0_u32, 0_u32);
        while !stop() {
            if self.turn()? > 0 {
                (idle, busy) = (0, busy.wrapping_add(1));
                // However much is asked, the others must see that it lives.
                if !busy.is_multiple_of(16) {
                    continue;
                }
            } else {
                idle = idle.saturating_add(1);
                self.pool.member.host.relax(idle);
            }
            match self.pool.serve() {
                // It is done the next time.
                Ok(()) | Err(PoolError::Timeout(_)) => {}
                Err(why) => return Err(why),
            }
        }
        Ok(())
    }

    fn reply(&self, request: Request<'_>) -> Result<(u16, Vec<u8>), PoolError> {
        let pool = &self.pool;
        let writer = (request.client, request.incarnation);
        let key = request.body.first_chunk().map(|key| Key(*key));
        let nothing = |op: u16| Ok((op, Vec::new()));
        match (request.op, key) {
            (PREFIX, _) => match self.keys(request)? {
                Some(keys) => Ok((ANSWERED, words(&[pool.look_up(&keys)? as u64]))),
                None => nothing(REFUSED),
            },
            (FIND, Some(key)) => match find(&pool.member, &key)? {
                Some((slot, tag)) => {
                    pool.touch(&[slot])?;
                    Ok((READY, words(&[slot.number(), tag.0])))
                }
                None => nothing(MISSING),
            },
            (RESERVE, Some(key)) => {
                let Ok(class) = word(request.body, 3).try_into() else { return nothing(REFUSED) };
                self.reserve(writer, ClassId(class), key, word(request.body, 2))
            }
            (COMMIT, _) => {
                let (slot, tag) = (word(request.body, 0), Tag(word(request.body, 1)));
                let Some(slot) = pool.member.layout.slot(slot) else { return nothing(REFUSED) };
                if let Some(reservation) = pool.reserved_by(writer, slot, tag)? {
                    // Refused if whoever reserved it was taken for dead just now.
                    reservation.commit_as(word(request.body, 2) as u32)?;
                    return nothing(ANSWERED);
                }
                // It is asked again if a server died: perhaps that one had done it.
                let now = Tag(pool.member.lines.fresh(pool.member.layout.tag(slot))?);
                nothing(if now == tag.with(State::Block) { ANSWERED } else { REFUSED })
            }
            (ABORT, _) => {
                let (slot, tag) = (word(request.body, 0), Tag(word(request.body, 1)));
                let Some(slot) = pool.member.layout.slot(slot) else { return nothing(REFUSED) };
                // What is not there any more was given back, or committed: done once in any case.
                if let Some(reservation) = pool.reserved_by(writer, slot, tag)? {
                    reservation.abort()?;
                }
                nothing(ANSWERED)
            }
            (REMOVE, Some(key)) => nothing(if pool.remove(&key)? { READY } else { MISSING }),
            _ => nothing(REFUSED),
        }
    }

    fn reserve(
        &self,
        writer: (u32, u32),
        class: ClassId,
        key: Key,
        length: u64,
    ) -> Result<(u16, Vec<u8>), PoolError> {
        // What a server that died had reserved for it is its own still.
        let old = self.pool.reservation_of(writer, &key)?;
        let reservation = match old {
            Some(old) if old.is_of(class, length)? => old,
            // Of another length or class it is given back.
            old => {
                drop(old);
                match self.pool.reserve_for(writer, class, key, length) {
                    Ok(Reserved::Yours(reservation)) => *reservation,
                    Ok(Reserved::Ready) => return Ok((READY, Vec::new())),
                    Ok(Reserved::Busy) => return Ok((BUSY, Vec::new())),
                    Err(PoolError::Full { .. }) => return Ok((FULL, Vec::new())),
                    // An older client knows it as full.
                    Err(PoolError::NoSlot) => return Ok((FULL, words(&[0]))),
                    Err(PoolError::Declare(_)) => return Ok((NO_CLASS, Vec::new())),
                    Err(why) => return Err(why),
                }
            }
        };
        // Whoever recovers the client from now on finds it. If that is over, nobody would give it
        // back.
        if !self.is_here(writer)? {
            drop(reservation);
            return Ok((REFUSED, Vec::new()));
        }
        let (slot, tag, at) = reservation.hand_over();
        Ok((YOURS, words(&[slot.number(), tag.0, at])))
    }

    /// Whether a client is attached, and not recovered from.
    fn is_here(&self, (client, incarnation): (u32, u32)) -> Result<bool, PoolError> {
        let member = &self.pool.member;
        Ok(member.incarnation(client)? == (incarnation, true) && member.fenced(client)? < incarnation)
    }

    /// The keys that a client sent, if all of them are there.
    fn keys(&self, request: Request<'_>) -> Result<Option<Vec<Key>>, PoolError> {
        let (many, check) = (word(request.body, 0), word(request.body, 1));
        let Some(length) = many.checked_mul(16).filter(|length| *length <= BODY_BYTES) else {
            return Ok(None);
        };
        let member = &self.pool.member;
        let at = member.layout.body(request.client);
        let mut bytes = vec![0; length as usize];
        member.lines.consume(at, length)?;
        member.lines.load(at, &mut bytes)?;
        let keys = bytes.as_chunks::<16>().0.iter().map(|key| Key(*key)).collect();
        Ok((u64::from(Crc::of(&bytes)) == check).then_some(keys))
    }
}
