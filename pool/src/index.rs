//! The index of blocks, by whom a block is found: the table, which each node reads and changes by
//! itself, or a server, which is asked by messages.
//!
//! Both keep the same table, so some nodes may ask while others look. Who asks takes no lock, and
//! touches nothing of the table but the entry that it reads: in memory that is not coherent, a
//! request costs two lines that travel, whatever the table's locks would.
//!
//! Bytes never pass the server. It reserves a place, and the client stores there; it says in which
//! slot a block is, and the client pins that as ever. So nothing is lost with a server: what it had
//! reserved stays its client's, what was ready stays ready, and the next server goes on with the
//! table.

use std::sync::Arc;

use crate::class::Class;
use crate::error::PoolError;
use crate::key::Key;
use crate::layout::{BODY_BYTES, word};
use crate::mem::Crc;
use crate::member::Wait;
use crate::mutex::locked;
use crate::pool::Pool;
use crate::server::{self, ANSWERED, FULL, NO_CLASS, READY, YOURS};
use crate::table::Tag;

/// How often something is asked again whose answer was lost.
const TRIES: u32 = 8;

/// Blocks by their keys.
pub trait Index: Send + Sync {
    /// How many of the first blocks are there. They count as used, the first as the last to be
    /// evicted.
    ///
    /// # Errors
    /// [`PoolError::NoServer`], [`PoolError::Fenced`].
    fn prefix(&self, keys: &[Key]) -> Result<usize, PoolError>;

    /// Stores a block, unless it is there or another stores it. Whether this call did.
    ///
    /// # Errors
    /// [`PoolError::NoServer`], [`PoolError::Full`], [`PoolError::Fenced`].
    fn store(&self, key: Key, pieces: &[&[u8]]) -> Result<bool, PoolError> {
        self.store_of(None, key, pieces)
    }

    /// [`Index::store`] of what is of a class; none is the pool's own.
    ///
    /// # Errors
    /// As that; [`PoolError::Declare`] if the device does not take the class,
    /// [`PoolError::Classes`].
    fn store_of(&self, class: Option<&Class>, key: Key, pieces: &[&[u8]]) -> Result<bool, PoolError>;

    /// Reads a block into pieces one after the other, which together are as long. Whether it was
    /// there.
    ///
    /// # Errors
    /// [`PoolError::NoServer`], [`PoolError::Damaged`], [`PoolError::End`], [`PoolError::Fenced`].
    fn read_into(&self, key: &Key, pieces: &mut [&mut [u8]]) -> Result<bool, PoolError>;

    /// Removes a block. Whether it was there.
    ///
    /// # Errors
    /// [`PoolError::NoServer`], [`PoolError::Fenced`].
    fn remove(&self, key: &Key) -> Result<bool, PoolError>;
}

impl Index for Pool {
    fn prefix(&self, keys: &[Key]) -> Result<usize, PoolError> {
        Self::prefix(self, keys)
    }

    fn store_of(&self, class: Option<&Class>, key: Key, pieces: &[&[u8]]) -> Result<bool, PoolError> {
        self.of(class)?.store(key, pieces)
    }

    fn read_into(&self, key: &Key, pieces: &mut [&mut [u8]]) -> Result<bool, PoolError> {
        Self::read_into(self, key, pieces)
    }

    fn remove(&self, key: &Key) -> Result<bool, PoolError> {
        Self::remove(self, key)
    }
}

/// The index as its server has it. Threads of a node take turns.
pub struct ServedIndex {
    pool: Arc<Pool>,
}

impl ServedIndex {
    /// Asks whoever serves the index of `pool`, which need not be there yet.
    pub fn new(pool: Arc<Pool>) -> Self {
        Self { pool }
    }

    /// Asks, again if the server died with the question: all that is asked may be done twice.
    fn ask(&self, op: u16, body: &[u8], more: &[u8]) -> Result<(u16, Vec<u8>), PoolError> {
        let (pool, member) = (&self.pool, &self.pool.member);
        // A node has one line at each server.
        let _one = locked(&pool.asking);
        if !more.is_empty() {
            let at = member.layout.body(member.node);
            // It is there, as all that was stored, once it is known whom to ask.
            member.lines.store(at, more)?;
            member.lines.flush(at, more.len() as u64)?;
        }
        for _ in 0..TRIES {
            let server = self.server()?;
            match pool.ask_while(server, op, body, |member| Ok(server::serves(member)? == Some(server))) {
                Ok(Some(answer)) => return Ok(answer),
                // Another may have come in its place.
                Ok(None) | Err(PoolError::NoServer) => {}
                Err(why) => return Err(why),
            }
        }
        Err(PoolError::NoServer)
    }

    /// Who serves, once somebody does. What this node stored before is in the memory then.
    fn server(&self) -> Result<u32, PoolError> {
        let (pool, member) = (&self.pool, &self.pool.member);
        let began = member.host.now();
        let mut wait = Wait::default();
        loop {
            if let Some(node) = server::serves(member)? {
                return Ok(node);
            }
            if member.host.now().saturating_sub(began) > pool.grace() {
                return Err(PoolError::NoServer);
            }
            pool.serve()?;
            member.wait(&mut wait, "a server")?;
        }
    }

    /// Stores the bytes of a block in its place: their check. They are there when something else is
    /// asked.
    fn fill(&self, at: u64, pieces: &[&[u8]]) -> Result<u32, PoolError> {
        let lines = &self.pool.member.lines;
        let (mut done, mut crc) = (0, Crc::default());
        for piece in pieces {
            lines.ntstore_checked(at + done, piece, &mut crc)?;
            done += piece.len() as u64;
        }
        Ok(crc.finish())
    }
}

impl Index for ServedIndex {
    fn prefix(&self, keys: &[Key]) -> Result<usize, PoolError> {
        let mut found = 0;
        for part in keys.chunks(BODY_BYTES as usize / 16) {
            let bytes: Vec<u8> = part.iter().flat_map(|key| key.0).collect();
            let sent = [part.len() as u64, u64::from(Crc::of(&bytes))];
            let (_, answer) = self.ask(server::PREFIX, &server::words(&sent), &bytes)?;
            let there = (word(&answer, 0) as usize).min(part.len());
            found += there;
            if there < part.len() {
                break;
            }
        }
        self.pool.count_lookups(found, keys.len());
        Ok(found)
    }

    fn store_of(&self, class: Option<&Class>, key: Key, pieces: &[&[u8]]) -> Result<bool, PoolError> {
        let pool = &self.pool;
        // What a class is stands in the pool, where whoever serves finds it.
        let number = u64::from(pool.of(class)?.class.0);
        let Some(_one) = pool.storing(key) else { return Ok(false) };
        let length: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
        let asked = [&key.0[..], &length.to_le_bytes(), &number.to_le_bytes()].concat();
        let place = match self.ask(server::RESERVE, &asked, &[])? {
            (YOURS, place) => place,
            (FULL, no_slot) if no_slot.is_empty() => {
                return Err(PoolError::Full { bytes: length, others: 0 });
            }
            (FULL, _) => return Err(PoolError::NoSlot),
            (NO_CLASS, _) => {
                let class = class.map(ToString::to_string).unwrap_or_default();
                let why = "the device refuses it of who serves the index";
                return Err(PoolError::Declare(format!("{class}: {why}")));
            }
            _ => return Ok(false),
        };
        let (slot, tag, at) = (word(&place, 0), word(&place, 1), word(&place, 2));
        if length > 0 && !pool.member.layout.holds(at, length) {
            return Err(PoolError::Damaged { what: "a server's answer", at });
        }
        let committed = self.fill(at, pieces).and_then(|crc| {
            let (answer, _) = self.ask(server::COMMIT, &server::words(&[slot, tag, crc.into()]), &[])?;
            pool.member.alive()?;
            Ok(answer)
        });
        let answer = match committed {
            Ok(answer) => answer,
            Err(why) => {
                // Nobody else could store the key. If this fails too, the node is dead or nobody
                // serves: then it is given back with the node, or by the next store of it.
                let _ = self.ask(server::ABORT, &server::words(&[slot, tag]), &[]);
                return Err(why);
            }
        };
        // What is refused is gone again already: committed before a server died, and evicted since.
        let stored = answer == ANSWERED;
        if stored {
            pool.count_store(length);
        }
        Ok(stored)
    }

    fn read_into(&self, key: &Key, pieces: &mut [&mut [u8]]) -> Result<bool, PoolError> {
        let pool = &self.pool;
        let mut wait = Wait::default();
        loop {
            let (answer, found) = self.ask(server::FIND, &key.0, &[])?;
            let slot = pool.member.layout.slot(word(&found, 0)).filter(|_| answer == READY);
            let Some(slot) = slot else {
                pool.count_lookups(0, 1);
                return Ok(false);
            };
            // It may have been evicted since; then the server knows better.
            let pin = pool.pins.pin(&pool.member, slot, Tag(word(&found, 1)))?;
            if let Some(pin) = pin.filter(|pin| pin.entry.key == *key) {
                pool.count_lookups(1, 1);
                return pool.read_pinned(&pin, pieces).map(|()| true);
            }
            pool.member.alive()?;
            pool.member.wait(&mut wait, "a block that stays where it is")?;
        }
    }

    fn remove(&self, key: &Key) -> Result<bool, PoolError> {
        Ok(self.ask(server::REMOVE, &key.0, &[])?.0 == READY)
    }
}
