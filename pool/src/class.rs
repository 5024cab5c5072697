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
use crate::layout::{CLASSES, is_sealed, seal};
use crate::mem::LINE;

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

    /// Its line of the directory.
    pub(crate) fn to_line(&self) -> [u8; LINE as usize] {
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
pub(crate) fn is_free(line: &[u8]) -> bool {
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

/// The classes of a directory that lies at `at` in some bytes. The pool's own is none.
pub(crate) fn directory(bytes: &[u8], at: u64) -> Vec<Option<Class>> {
    let lines = bytes[at as usize..].chunks_exact(LINE as usize);
    lines.take(CLASSES as usize).map(Class::of_line).collect()
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
