//! The beginning of a GGUF file: metadata, and where each tensor lies.

use std::collections::BTreeMap;

use super::blocks::{Blocks, UnreadableType};

/// Tensors' alignment where the metadata does not say.
const ALIGNMENT: usize = 32;
/// How deep lists of lists may go.
const MAX_DEPTH: u32 = 4;
/// Most dimensions of a tensor.
const MAX_DIMENSIONS: u32 = 8;

/// A file's beginning.
#[derive(Debug)]
pub struct Header<'a> {
    /// The metadata.
    pub values: BTreeMap<String, Value>,
    /// The tensors.
    pub tensors: BTreeMap<String, Stored<'a>>,
}

/// A value of the metadata.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A whole number or a truth value. Negative ones are not told apart from large ones.
    Number(u64),
    /// A number.
    Float(f32),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Self>),
}

/// A tensor in a file.
#[derive(Clone, Copy, Debug)]
pub struct Stored<'a> {
    /// The number of its type.
    pub kind: u32,
    /// Its elements.
    pub elements: usize,
    /// Its bytes.
    pub bytes: &'a [u8],
}

/// Why a file is no GGUF file that can be read.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// Another beginning, or a version that is not read.
    #[error("not a GGUF file of version 2 or 3: it begins with {magic:#010x}, {version}")]
    Magic {
        /// The first four bytes.
        magic: u32,
        /// The next four.
        version: u32,
    },
    /// What is missing of the file.
    #[error("{length} bytes at byte {at} lie past the file's end at {end}")]
    Past {
        /// Where they should begin.
        at: usize,
        /// How many they should be.
        length: u64,
        /// The file's bytes.
        end: usize,
    },
    /// A value of a type that there is not, or lists that are too deep.
    #[error("the value at byte {at} has the type {kind}, which is not read here")]
    ValueType {
        /// Where it is.
        at: usize,
        /// Its type.
        kind: u32,
    },
    /// A text that is none.
    #[error("the text at byte {at} is no UTF-8")]
    Text {
        /// Where it is.
        at: usize,
    },
    /// A shape with too many dimensions or elements, or that is no number of whole blocks.
    #[error("tensor {tensor} cannot have this shape: {shape:?}")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its dimensions, the innermost first.
        shape: Vec<u64>,
    },
    /// A type that is not read.
    #[error("tensor {tensor}: {why}")]
    Type {
        /// The tensor.
        tensor: String,
        /// What is wrong.
        why: UnreadableType,
    },
}

impl Value {
    /// A whole number or a truth value.
    pub fn number(&self) -> Option<u64> {
        if let Self::Number(number) = self { Some(*number) } else { None }
    }

    /// A number with a fraction.
    pub fn float(&self) -> Option<f32> {
        if let Self::Float(number) = self { Some(*number) } else { None }
    }

    /// A text.
    pub fn text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    /// A list.
    pub fn list(&self) -> Option<&[Self]> {
        if let Self::List(list) = self { Some(list) } else { None }
    }
}

impl<'a> Header<'a> {
    /// The beginning of `file`.
    ///
    /// # Errors
    /// [`HeaderError`].
    pub fn read(file: &'a [u8]) -> Result<Self, HeaderError> {
        let mut reader = Reader { file, at: 0 };
        let (magic, version) = (reader.u32()?, reader.u32()?);
        if magic.to_le_bytes() != *b"GGUF" || !(2..=3).contains(&version) {
            return Err(HeaderError::Magic { magic, version });
        }
        let (tensors, count) = (reader.u64()?, reader.u64()?);
        let mut values = BTreeMap::new();
        for _ in 0..count {
            let key = reader.text()?;
            let kind = reader.u32()?;
            values.insert(key, reader.value(kind, 0)?);
        }
        let mut entries = Vec::new();
        for _ in 0..tensors {
            let name = reader.text()?;
            let dimensions = reader.u32()?;
            if dimensions > MAX_DIMENSIONS {
                return Err(HeaderError::Shape { tensor: name, shape: vec![u64::from(dimensions)] });
            }
            let shape = (0..dimensions).map(|_| reader.u64()).collect::<Result<Vec<_>, _>>()?;
            entries.push((name, shape, reader.u32()?, reader.u64()?));
        }
        let alignment = values.get("general.alignment").and_then(Value::number);
        let alignment = alignment.and_then(|alignment| usize::try_from(alignment).ok());
        let alignment = alignment.filter(|bytes| *bytes > 0).unwrap_or(ALIGNMENT);
        let start = reader.at.checked_next_multiple_of(alignment).unwrap_or(usize::MAX);
        let mut tensors = BTreeMap::new();
        for (name, shape, kind, offset) in entries {
            let blocks = Blocks::of(kind);
            let blocks = blocks.map_err(|why| HeaderError::Type { tensor: name.clone(), why })?;
            let elements = shape.iter().try_fold(1_u64, |all, next| all.checked_mul(*next));
            let elements = elements.and_then(|elements| usize::try_from(elements).ok());
            let bytes = elements.and_then(|elements| Some((elements, blocks.bytes(elements)?)));
            let Some((elements, length)) = bytes else {
                return Err(HeaderError::Shape { tensor: name, shape });
            };
            let at = start.saturating_add(usize::try_from(offset).unwrap_or(usize::MAX));
            let bytes = Reader { file, at }.take(length as u64)?;
            tensors.insert(name, Stored { kind, elements, bytes });
        }
        Ok(Self { values, tensors })
    }
}

struct Reader<'a> {
    file: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, length: u64) -> Result<&'a [u8], HeaderError> {
        let past = || HeaderError::Past { at: self.at, length, end: self.file.len() };
        let count = usize::try_from(length).map_err(|_| past())?;
        let bytes = self.file.get(self.at..).and_then(|rest| rest.get(..count)).ok_or_else(past)?;
        self.at += count;
        Ok(bytes)
    }

    fn number<const N: usize>(&mut self) -> Result<[u8; N], HeaderError> {
        let bytes = self.take(N as u64)?;
        Ok(bytes.try_into().expect("so many were taken"))
    }

    fn u32(&mut self) -> Result<u32, HeaderError> {
        self.number().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, HeaderError> {
        self.number().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Result<String, HeaderError> {
        let length = self.u64()?;
        let at = self.at;
        let bytes = self.take(length)?.to_vec();
        String::from_utf8(bytes).map_err(|_| HeaderError::Text { at })
    }

    fn value(&mut self, kind: u32, depth: u32) -> Result<Value, HeaderError> {
        let at = self.at;
        Ok(match kind {
            0 | 1 | 7 => Value::Number(u64::from(self.number::<1>()?[0])),
            2 | 3 => Value::Number(u64::from(u16::from_le_bytes(self.number()?))),
            4 | 5 => Value::Number(u64::from(self.u32()?)),
            6 => Value::Float(f32::from_le_bytes(self.number()?)),
            8 => Value::Text(self.text()?),
            9 if depth < MAX_DEPTH => {
                let (kind, count) = (self.u32()?, self.u64()?);
                // Every value has a byte, so no list is longer than what is left of the file.
                let list = (0..count).map(|_| self.value(kind, depth + 1));
                Value::List(list.collect::<Result<_, _>>()?)
            }
            10 | 11 => Value::Number(self.u64()?),
            // No number that is read here has double precision.
            12 => {
                self.u64()?;
                Value::Float(f32::NAN)
            }
            _ => return Err(HeaderError::ValueType { at, kind }),
        })
    }
}
