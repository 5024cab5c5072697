//! The beginning of a GGUF file: metadata, and where each tensor lies.

use std::collections::{BTreeMap, btree_map::Entry};

use super::blocks::{Blocks, UnreadableType};

/// Where the metadata says how tensors are aligned.
const ALIGNMENT_KEY: &str = "general.alignment";
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
    /// A whole number or a truth value.
    Number(i128),
    /// A number.
    Float(f32),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Self>),
}

/// A tensor in a file.
#[derive(Clone, Debug)]
pub struct Stored<'a> {
    /// The number of its type.
    pub kind: u32,
    /// Its dimensions, the outermost first.
    pub dimensions: Vec<u64>,
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
    /// A key or a tensor that is there twice.
    #[error("the file has {name} twice")]
    Twice {
        /// Its name.
        name: String,
    },
    /// An alignment that is none.
    #[error("{ALIGNMENT_KEY} is {value}; it is a power of two")]
    Alignment {
        /// What it says.
        value: String,
    },
    /// A tensor that does not begin at a multiple of the alignment.
    #[error("tensor {tensor} begins at byte {offset} of the tensors, no multiple of {alignment}")]
    Unaligned {
        /// The tensor.
        tensor: String,
        /// Where it begins.
        offset: u64,
        /// The file's alignment.
        alignment: usize,
    },
    /// Tensors that share bytes.
    #[error("tensors {tensor} and {other} overlap")]
    Overlap {
        /// One that begins inside of the other.
        tensor: String,
        /// The other.
        other: String,
    },
}

impl Value {
    /// A whole number from 0 up, or a truth value.
    pub fn number(&self) -> Option<u64> {
        if let Self::Number(number) = self { (*number).try_into().ok() } else { None }
    }

    /// A number, whole or not.
    #[expect(clippy::cast_precision_loss, reason = "the decoder computes with f32")]
    pub fn float(&self) -> Option<f32> {
        match self {
            Self::Number(number) => Some(*number as f32),
            Self::Float(number) => Some(*number),
            _ => None,
        }
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
            let value = reader.value(kind, 0)?;
            only(&mut values, key, value)?;
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
        let alignment = values.get(ALIGNMENT_KEY).map_or(Ok(ALIGNMENT), alignment)?;
        let start = reader.at.checked_next_multiple_of(alignment).unwrap_or(usize::MAX);
        let mut tensors = BTreeMap::new();
        let mut places = Vec::with_capacity(entries.len());
        for (name, mut shape, kind, offset) in entries {
            let blocks = Blocks::of(kind);
            let blocks = blocks.map_err(|why| HeaderError::Type { tensor: name.clone(), why })?;
            let Some((elements, length)) = extent(blocks, &shape) else {
                return Err(HeaderError::Shape { tensor: name, shape });
            };
            if !offset.is_multiple_of(alignment as u64) {
                return Err(HeaderError::Unaligned { tensor: name, offset, alignment });
            }
            let at = start.saturating_add(usize::try_from(offset).unwrap_or(usize::MAX));
            let bytes = Reader { file, at }.take(length as u64)?;
            shape.reverse();
            places.push((at, at + length, name.clone()));
            only(&mut tensors, name, Stored { kind, dimensions: shape, elements, bytes })?;
        }
        apart(places)?;
        Ok(Self { values, tensors })
    }
}

/// Adds what no name has yet.
fn only<T>(all: &mut BTreeMap<String, T>, name: String, value: T) -> Result<(), HeaderError> {
    match all.entry(name) {
        Entry::Occupied(entry) => Err(HeaderError::Twice { name: entry.key().clone() }),
        Entry::Vacant(entry) => {
            entry.insert(value);
            Ok(())
        }
    }
}

/// The alignment that a value says.
fn alignment(value: &Value) -> Result<usize, HeaderError> {
    let number = value.number().and_then(|number| usize::try_from(number).ok());
    number.filter(|bytes| bytes.is_power_of_two()).ok_or_else(|| HeaderError::Alignment {
        value: match value {
            Value::Number(number) => number.to_string(),
            Value::Float(number) => number.to_string(),
            Value::Text(text) => format!("{text:?}"),
            Value::List(_) => "a list".to_owned(),
        },
    })
}

/// Elements and bytes of a shape, the innermost dimension first, if they are numbers and rows are
/// whole blocks. A dimension of 0 makes it empty whatever the others are.
fn extent(blocks: Blocks, shape: &[u64]) -> Option<(usize, usize)> {
    if shape.contains(&0) {
        return Some((0, 0));
    }
    let row = shape.first().copied().unwrap_or(1);
    blocks.bytes(usize::try_from(row).ok()?)?;
    let elements = shape.iter().try_fold(1_u64, |all, next| all.checked_mul(*next))?;
    let elements = usize::try_from(elements).ok()?;
    Some((elements, blocks.bytes(elements)?))
}

/// Whether no two of these places, from and to, share a byte.
fn apart(mut places: Vec<(usize, usize, String)>) -> Result<(), HeaderError> {
    // An empty one has no byte, wherever it lies.
    places.retain(|(from, to, _)| from < to);
    places.sort();
    let overlap = places.windows(2).find(|two| two[1].0 < two[0].1);
    overlap
        .map_or(Ok(()), |two| Err(HeaderError::Overlap { tensor: two[1].2.clone(), other: two[0].2.clone() }))
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
            0 | 7 => Value::Number(self.number::<1>()?[0].into()),
            1 => Value::Number(i8::from_le_bytes(self.number()?).into()),
            2 => Value::Number(u16::from_le_bytes(self.number()?).into()),
            3 => Value::Number(i16::from_le_bytes(self.number()?).into()),
            4 => Value::Number(self.u32()?.into()),
            5 => Value::Number(i32::from_le_bytes(self.number()?).into()),
            6 => Value::Float(f32::from_le_bytes(self.number()?)),
            8 => Value::Text(self.text()?),
            9 if depth < MAX_DEPTH => {
                let (kind, count) = (self.u32()?, self.u64()?);
                // Every value has a byte, so no list is longer than what is left of the file.
                let list = (0..count).map(|_| self.value(kind, depth + 1));
                Value::List(list.collect::<Result<_, _>>()?)
            }
            10 => Value::Number(self.u64()?.into()),
            11 => Value::Number(i64::from_le_bytes(self.number()?).into()),
            12 => Value::Float(narrow(f64::from_le_bytes(self.number()?))),
            _ => return Err(HeaderError::ValueType { at, kind }),
        })
    }
}

/// The float nearest to a double.
#[expect(clippy::cast_possible_truncation, reason = "the decoder computes with f32")]
fn narrow(number: f64) -> f32 {
    number as f32
}
