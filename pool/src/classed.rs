//! A pool for what is of a class, and the directory of its classes.

use crate::class::{Class, ClassId, OWN, UNTOLD, directory, is_free, lost_line};
use crate::error::PoolError;
use crate::layout::{ALLOC, CLASSES};
use crate::mem::LINE;
use crate::pool::Pool;

/// Bytes of the directory.
const DIRECTORY: usize = CLASSES as usize * LINE as usize;

/// A pool, for what is of a class: [`Pool::of`].
#[derive(Clone, Copy)]
pub struct Classed<'p> {
    pub(crate) pool: &'p Pool,
    pub(crate) class: ClassId,
}

impl Pool {
    /// The pool, for what is of `class`: that lies in chunks of its own, which the device codes as
    /// the class says. A pool has up to 15 besides its own, which is `None`.
    ///
    /// # Errors
    /// [`PoolError::Declare`] if the device does not know the class, or there is none;
    /// [`PoolError::Classes`].
    pub fn of<'c>(&self, class: impl Into<Option<&'c Class>>) -> Result<Classed<'_>, PoolError> {
        let of = |class| Classed { pool: self, class };
        let Some(class) = class.into() else { return Ok(of(OWN)) };
        if let Some(known) = self.find_class(class)?.0 {
            return Ok(of(known));
        }
        self.member.host.declare(0..0, Some(class))?;
        let held = self.member.acquire(ALLOC)?;
        let found = match self.find_class(class)? {
            (Some(known), _) => known,
            (None, Some(free)) => {
                let at = self.member.layout.class(free.0);
                self.member.lines.store(at, &class.to_line())?;
                self.member.lines.publish(at, LINE)?;
                free
            }
            (None, None) => return Err(PoolError::Classes { most: CLASSES - 1 }),
        };
        held.release()?;
        Ok(of(found))
    }

    /// The pool, for what is of its own class.
    pub(crate) fn own(&self) -> Classed<'_> {
        Classed { pool: self, class: OWN }
    }

    /// The directory, as the memory has it.
    pub(crate) fn directory(&self) -> Result<Vec<Option<Class>>, PoolError> {
        Ok(directory(&self.directory_bytes()?, 0))
    }

    fn directory_bytes(&self) -> Result<[u8; DIRECTORY], PoolError> {
        let (at, mut bytes) = (self.member.layout.class(0), [0; DIRECTORY]);
        self.member.lines.consume(at, bytes.len() as u64)?;
        self.member.lines.load(at, &mut bytes)?;
        Ok(bytes)
    }

    /// The classes that chunks in use may have, and those whose lines do not check.
    pub(crate) fn classes(&self) -> Result<(Vec<ClassId>, Vec<ClassId>), PoolError> {
        let (mut known, mut damaged) = (vec![OWN, UNTOLD], Vec::new());
        for (number, line) in self.directory_bytes()?.chunks_exact(LINE as usize).enumerate() {
            let class = ClassId(number as u8);
            if Class::of_line(line).is_some() {
                known.push(class);
            } else if !is_free(line) && line != lost_line() {
                damaged.push(class);
            }
        }
        Ok((known, damaged))
    }

    /// The number of a class, and the first that was never given to one.
    fn find_class(&self, class: &Class) -> Result<(Option<ClassId>, Option<ClassId>), PoolError> {
        let bytes = self.directory_bytes()?;
        let number = |is_wanted: &dyn Fn(&[u8]) -> bool| {
            // The first is the pool's own, which has no line.
            let found = bytes.chunks_exact(LINE as usize).skip(1).position(is_wanted);
            found.map(|behind| ClassId(behind as u8 + 1))
        };
        Ok((number(&|line| Class::of_line(line).as_ref() == Some(class)), number(&is_free)))
    }
}
