//! What has a name: objects, and blocks that are evicted as others are; and both stored from and
//! read into memory that is no slice of Rust's, a piece at a time.

use crate::classed::Classed;
use crate::error::PoolError;
use crate::key::Key;
use crate::mem::{Crc, PIECE};
use crate::member::Wait;
use crate::pool::{MAX_NAME, Pool};
use crate::prefix::{Reservation, Reserved};
use crate::table::{Pin, State};

/// An object or a block that stays while this lives: it is not evicted, nor its place given to
/// another. A node holds up to 64 at a time; more wait.
pub struct Held<'p> {
    pool: &'p Pool,
    pin: Pin<'p>,
}

impl Held<'_> {
    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        self.pin.entry.length
    }

    /// Calls `part` with all its bytes in their order, some KiB at a time. Only if this succeeds
    /// they were what was stored: the check is of the whole.
    ///
    /// # Errors
    /// [`PoolError::Damaged`], [`PoolError::Fenced`].
    pub fn read(&self, mut part: impl FnMut(&[u8])) -> Result<(), PoolError> {
        let (entry, member) = (&self.pin.entry, &self.pool.member);
        member.lines.consume(entry.at, entry.length)?;
        let mut crc = Crc::default();
        let mut piece = vec![0; PIECE.min(usize::try_from(entry.length).unwrap_or(PIECE))];
        let mut done = 0;
        while done < entry.length {
            let length = (entry.length - done).min(piece.len() as u64);
            let piece = &mut piece[..length as usize];
            member.lines.load_checked(entry.at + done, piece, &mut crc)?;
            part(piece);
            done += length;
        }
        self.pool.verify(&self.pin, &crc)
    }
}

impl Pool {
    /// Holds an object or a block, if it is there.
    ///
    /// # Errors
    /// [`PoolError::Damaged`], [`PoolError::Fenced`], [`PoolError::Timeout`].
    pub fn hold(&self, key: &Key) -> Result<Option<Held<'_>>, PoolError> {
        Ok(self.pin(key)?.map(|pin| Held { pool: self, pin }))
    }

    /// Holds what has a name. Names are compared whole: of two that had the same key the other is a
    /// miss.
    ///
    /// # Errors
    /// As [`Self::hold`].
    pub fn hold_named(&self, name: &str) -> Result<Option<Held<'_>>, PoolError> {
        let Some(held) = self.hold(&Key::of_name(name))? else { return Ok(None) };
        let found = self.name(&held.pin.entry)?;
        if found.is_none() && held.pin.tag.state() == Some(State::Named) {
            self.drop_damaged(&held.pin)?;
        }
        Ok(found.is_some_and(|found| found == name).then_some(held))
    }

    /// [`Pool::put`] of `length` bytes that `fill` appends.
    ///
    /// # Errors
    /// As [`Pool::put`]; what `fill` gives.
    pub fn put_from(
        &self,
        name: &str,
        length: u64,
        fill: impl FnOnce(&mut Reservation<'_>) -> Result<(), PoolError>,
    ) -> Result<(), PoolError> {
        self.own().put_from(name, length, fill)
    }

    /// Stores a block under a name, unless that is there. Whether this call did. If another is
    /// storing it, it waits for the end of that.
    ///
    /// # Errors
    /// As [`Pool::put`]; what `fill` gives.
    pub fn keep_from(
        &self,
        name: &str,
        length: u64,
        fill: impl FnOnce(&mut Reservation<'_>) -> Result<(), PoolError>,
    ) -> Result<bool, PoolError> {
        self.own().keep_from(name, length, fill)
    }

    /// [`Pool::store`] of `length` bytes that `fill` appends.
    ///
    /// # Errors
    /// As [`Pool::store`]; what `fill` gives.
    pub fn store_from(
        &self,
        key: Key,
        length: u64,
        fill: impl FnOnce(&mut Reservation<'_>) -> Result<(), PoolError>,
    ) -> Result<bool, PoolError> {
        self.own().store_from(key, length, fill)
    }
}

impl Classed<'_> {
    /// [`Pool::put`].
    ///
    /// # Errors
    /// As that; [`PoolError::Declare`].
    pub fn put(&self, name: &str, bytes: &[u8]) -> Result<(), PoolError> {
        self.put_from(name, bytes.len() as u64, |reservation| reservation.append(bytes))
    }

    /// [`Pool::put_from`].
    ///
    /// # Errors
    /// As that; [`PoolError::Declare`].
    pub fn put_from(
        &self,
        name: &str,
        length: u64,
        fill: impl FnOnce(&mut Reservation<'_>) -> Result<(), PoolError>,
    ) -> Result<(), PoolError> {
        self.store_named(name, State::Object, length, fill).map(|_| ())
    }

    /// [`Pool::keep_from`].
    ///
    /// # Errors
    /// As that; [`PoolError::Declare`].
    pub fn keep_from(
        &self,
        name: &str,
        length: u64,
        fill: impl FnOnce(&mut Reservation<'_>) -> Result<(), PoolError>,
    ) -> Result<bool, PoolError> {
        self.store_named(name, State::Named, length, fill)
    }

    /// [`Pool::store_from`].
    ///
    /// # Errors
    /// As that; [`PoolError::Declare`].
    pub fn store_from(
        &self,
        key: Key,
        length: u64,
        fill: impl FnOnce(&mut Reservation<'_>) -> Result<(), PoolError>,
    ) -> Result<bool, PoolError> {
        let Reserved::Yours(mut reservation) = self.reserve(key, length)? else { return Ok(false) };
        fill(&mut reservation)?;
        reservation.commit()?;
        Ok(true)
    }

    fn store_named(
        &self,
        name: &str,
        kind: State,
        length: u64,
        fill: impl FnOnce(&mut Reservation<'_>) -> Result<(), PoolError>,
    ) -> Result<bool, PoolError> {
        if name.is_empty() {
            return Err(PoolError::NoName);
        }
        if name.len() > MAX_NAME {
            let (bytes, most) = (name.len() as u64, MAX_NAME as u64);
            return Err(PoolError::TooLong { what: "a name", bytes, most });
        }
        let mut wait = Wait::default();
        loop {
            match self.pool.reserve_as(self.class, Key::of_name(name), name, kind, length)? {
                Reserved::Yours(mut reservation) => {
                    fill(&mut reservation)?;
                    reservation.commit()?;
                    return Ok(true);
                }
                Reserved::Ready if kind.is_block() => return Ok(false),
                // Another is storing it.
                Reserved::Ready | Reserved::Busy => {
                    self.pool.serve()?;
                    self.pool.member.wait(&mut wait, "another that stores the same object")?;
                }
            }
        }
    }
}
