//! What bytes are, for the device that codes them: each chunk has a class of its own.
//!
//! The classes of a pool stand in its directory, one line each, which never changes once it is
//! there. A chunk's class is a number in the word that says whose it is. It says what the device
//! was *told* of the chunk, also while that is free, so that nobody tells it again:
//!
//! untold -> the device is told -> the class -> the chunk is taken
//!
//! A node that dies on the way leaves a free chunk that is untold. So no chunk with something in
//! it is of another class than the device knows; and if it were, no byte would change by that: what
//! a class chooses is without loss.
//!
//! A line that is damaged is nobody's to take: chunks bear its number. `check` tells it, and a
//! repair marks it as lost for good.

use std::fmt;

use serde::Serialize;

use crate::error::PoolError;
use crate::heap::Owner;
use crate::layout::{ALLOC, CLASSES, is_sealed, seal};
use crate::mem::LINE;
use crate::member::Member;
use crate::pool::Pool;

/// Bytes of the directory.
const DIRECTORY: usize = CLASSES as usize * LINE as usize;
/// Bytes that a class's text may have: what a line holds behind its length and before its check.
const TEXT: usize = LINE as usize - 5;

/// The number of a class in a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ClassId(pub(crate) u8);

/// The pool's own class: what its file is.
pub(crate) const OWN: ClassId = ClassId(0);
/// Nobody knows what the device was told.
pub(crate) const UNTOLD: ClassId = ClassId(0xff);

/// What bytes are: the format of elements, and the rows of a KV cache if they are one. The device
/// codes what is stored so, without loss.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Class {
    format: String,
    kv: Option<String>,
}

impl Class {
    /// A class of elements of `format`, such as `bf16`, which are rows of a KV cache if `kv` says
    /// so as `CHANNELS,WINDOW`, such as `1024,128`.
    ///
    /// # Errors
    /// [`PoolError::TooLong`], [`PoolError::Declare`] for what has other characters than those, or
    /// is kept with loss.
    pub fn new(format: &str, kv: Option<&str>) -> Result<Self, PoolError> {
        let is_word = |text: &str| {
            !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric() || "_,:.-=".contains(c))
        };
        let class = Self { format: format.to_owned(), kv: kv.map(str::to_owned) };
        if !is_word(format) || !kv.is_none_or(is_word) {
            return Err(PoolError::Declare(format!("{:?} is no format and layout", class.to_string())));
        }
        if kv.is_some_and(|kv| kv.contains("lossy")) {
            let why = "a pool checks what it holds, and what is kept with loss does not check";
            return Err(PoolError::Declare(format!("{class}: {why}")));
        }
        let bytes = class.to_string().len();
        if bytes > TEXT {
            let (bytes, most) = (bytes as u64, TEXT as u64);
            return Err(PoolError::TooLong { what: "a class", bytes, most });
        }
        Ok(class)
    }

    /// The format of elements.
    pub fn format(&self) -> &str {
        &self.format
    }

    /// The layout of a KV cache, if it is one.
    pub fn kv(&self) -> Option<&str> {
        self.kv.as_deref()
    }

    /// What [`fmt::Display`] wrote.
    fn of_text(text: &str) -> Option<Self> {
        let (format, kv) = text.split_once(' ').map_or((text, None), |(format, kv)| (format, Some(kv)));
        Self::new(format, kv).ok()
    }

    fn to_line(&self) -> [u8; LINE as usize] {
        let (mut line, text) = ([0; LINE as usize], self.to_string());
        line[0] = text.len() as u8;
        line[1..=text.len()].copy_from_slice(text.as_bytes());
        seal(&mut line);
        line
    }

    /// What a line of the directory says, if it checks.
    pub(crate) fn of_line(line: &[u8]) -> Option<Self> {
        // Zeros were never written, and check as well as anything.
        let length = usize::from(line[0]);
        if !(1..=TEXT).contains(&length) || !is_sealed(line) {
            return None;
        }
        Self::of_text(std::str::from_utf8(&line[1..=length]).ok()?)
    }
}

/// What is in place of a class's line that was damaged: the number is not given to another.
pub(crate) fn lost_line() -> [u8; LINE as usize] {
    let mut line = [0; LINE as usize];
    line[1] = 1;
    seal(&mut line);
    line
}

/// Whether nothing was ever written to a line of the directory.
fn is_free(line: &[u8]) -> bool {
    line.iter().all(|byte| *byte == 0)
}

impl fmt::Display for Class {
    /// The format, and behind it the layout: `bf16 1024,128`.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.format)?;
        self.kv.as_ref().map_or(Ok(()), |kv| write!(formatter, " {kv}"))
    }
}

/// What is held of a class.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Share {
    /// The class, as it is written; empty for the pool's own.
    pub class: String,
    /// Bytes of the objects and blocks that are ready.
    pub ready_bytes: u64,
    /// Bytes of the chunks that are in use.
    pub taken_bytes: u64,
}

/// A pool, for what is of a class: [`Pool::of`].
#[derive(Clone, Copy)]
pub struct Classed<'p> {
    pub(crate) pool: &'p Pool,
    pub(crate) class: ClassId,
}

/// The classes of a directory that lies at `at` in some bytes. The pool's own is none.
pub(crate) fn directory(bytes: &[u8], at: u64) -> Vec<Option<Class>> {
    let lines = bytes[at as usize..].chunks_exact(LINE as usize);
    lines.take(CLASSES as usize).map(Class::of_line).collect()
}

/// The class of the chunk in which `at` lies, which is in use.
pub(crate) fn class_at(member: &Member, at: u64) -> Result<Option<ClassId>, PoolError> {
    let Some(chunk) = member.layout.chunk_of(at) else { return Ok(None) };
    member.lines.consume(member.layout.chunk(chunk), 16)?;
    Ok(Some(Owner::load(member, chunk)?.class))
}

/// How the class is written of what lies at `at`, which is pinned.
pub(crate) fn written(member: &Member, directory: &[Option<Class>], at: u64) -> Result<String, PoolError> {
    let number = class_at(member, at)?.map_or(0, |class| usize::from(class.0));
    let class = directory.get(number).and_then(Option::as_ref);
    Ok(class.map(ToString::to_string).unwrap_or_default())
}

/// The class of a number, as this node sees the directory; none is the pool's own.
fn class_of(member: &Member, class: ClassId) -> Result<Option<Class>, PoolError> {
    if class == OWN {
        return Ok(None);
    }
    let at = member.layout.class(class.0);
    let damaged = PoolError::Damaged { what: "a class", at };
    if u32::from(class.0) >= CLASSES {
        return Err(damaged);
    }
    member.lines.consume(at, LINE)?;
    let mut line = [0; LINE as usize];
    member.lines.load(at, &mut line)?;
    Class::of_line(&line).ok_or(damaged).map(Some)
}

/// Tells the device what the bytes of free chunks will be.
pub(crate) fn tell(member: &Member, class: ClassId, chunks: &[u32]) -> Result<(), PoolError> {
    let known = class_of(member, class)?;
    for chunk in chunks {
        let range = member.layout.chunk_at(*chunk)..member.layout.chunk_at(*chunk + 1);
        member.host.declare(range, known.as_ref())?;
    }
    Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_what_its_line_says() {
        for (format, kv) in [("bf16", None), ("fp8_e4m3fn", Some("1024,128")), ("x", Some("a:b"))] {
            let class = Class::new(format, kv).unwrap();
            assert_eq!(Class::of_line(&class.to_line()), Some(class.clone()));
            for bit in 0..class.to_line().len() * 8 {
                let mut line = class.to_line();
                line[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(Class::of_line(&line), None, "{class}, bit {bit}");
            }
        }
        for (line, free) in [([0; LINE as usize], true), (lost_line(), false)] {
            assert_eq!((Class::of_line(&line), is_free(&line)), (None, free));
        }
        for (format, kv) in [
            ("", None),
            ("bf 16", None),
            ("bf16", Some("")),
            ("bf16", Some("1\n2")),
            ("bf16", Some("64,lossy=packkv")),
        ] {
            assert!(matches!(Class::new(format, kv), Err(PoolError::Declare(_))), "{format:?} {kv:?}");
        }
        let long = "1".repeat(TEXT);
        assert!(Class::new(&long, None).is_ok());
        assert!(matches!(Class::new("bf16", Some(&long)), Err(PoolError::TooLong { .. })));
    }
}
