//! What the device knows of a model's files.
//!
//! | bytes | field |
//! |---|---|
//! | 0..8 | `LAMINAm1` |
//! | 8 | 1 once all tensors are there, 0 before |
//! | 16..24 | bytes of the JSON |
//! | 24..32 | bytes of the literals |
//! | 32..48 | XXH3-128 of bytes 16..32, of the JSON and of the literals |
//! | 64.. | JSON, then the literals |

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use twox_hash::xxhash3_128::Hasher;

use super::map::PrecisionMap;
use super::plan::is_bad;
use super::{FilesError, Precision};
use crate::device::{Device, DeviceError, TensorView};
use crate::model::FileKind;
use crate::tensor::{HIDDEN, SourceId};

const MAGIC: &[u8; 8] = b"LAMINAm1";
/// Where the mark is.
pub(super) const MARK: u64 = 8;
/// Bytes before the JSON.
const HEAD: usize = 64;
/// Where the lengths of the JSON and of the literals are.
const LENGTHS: Range<usize> = 16..32;
/// What a model's manifest is called in its names.
const NAME: &str = "manifest";
/// The longest manifest: the headers of 65,000 shards are smaller.
const MAX_BYTES: u64 = 4 << 30;
/// The longest JSON of one, which alone is held in memory. A tensor takes some 120 bytes of it, so
/// half a million tensors have room: an expert's three matrices of each of 400 experts of 60
/// layers, each with scales and zeros, are fewer.
const MAX_JSON: u64 = 64 << 20;
/// Bytes of the literals that are looked at together.
const PIECE: usize = 1 << 20;

/// A model's files.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// The model's name.
    pub name: String,
    /// Its number, which no other model of the device has.
    pub id: u32,
    /// Its files, by path.
    pub files: Vec<FileEntry>,
    /// The precisions that lists show.
    pub views: Vec<String>,
    /// The maps of precisions, by name.
    pub maps: BTreeMap<String, PrecisionMap>,
    /// The model that it was loaded against.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
}

/// A file of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its path in the model's folder, `/` between the parts.
    pub path: String,
    /// What it is.
    pub kind: FileKind,
    /// Its bytes.
    pub bytes: u64,
    /// When it was last changed: seconds and nanoseconds.
    pub modified: (i64, i64),
    /// What it is made of, in order.
    pub extents: Vec<Extent>,
}

/// A piece of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extent {
    /// Its bytes.
    pub length: u64,
    /// What is there.
    pub of: Content,
}

/// Where a piece's bytes are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Content {
    /// In the manifest's literals, from there on.
    Literal(u64),
    /// All of a tensor.
    Tensor(String),
    /// All of a tensor, packed: of each four of its bytes the lower six bits, in three bytes.
    Sixes(String),
    /// All of these tensors: some bytes of each, in this order, again and again.
    Woven(Vec<StrandOf>),
}

/// A tensor that is some bytes of each block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StrandOf {
    /// Its name on the device.
    pub tensor: String,
    /// Its bytes of a block.
    pub width: u64,
}

impl Content {
    /// The tensors that it is, by name.
    pub(super) fn tensors(&self) -> impl Iterator<Item = &str> {
        let (own, strands) = match self {
            Self::Literal(_) => (None, &[][..]),
            Self::Tensor(name) | Self::Sixes(name) => (Some(name.as_str()), &[][..]),
            Self::Woven(strands) => (None, &strands[..]),
        };
        own.into_iter().chain(strands.iter().map(|strand| strand.tensor.as_str()))
    }
}

/// A model that the device holds.
pub struct Model {
    /// What is known of it.
    pub manifest: Manifest,
    pub(super) literals: Literals,
}

/// Where the bytes are that are in no tensor.
pub(super) enum Literals {
    /// In the manifest's tensor, from there on.
    Tensor(Arc<TensorView>, u64),
    /// With the tables, as what is known of this source.
    Tables(SourceId, Arc<[u8]>),
}

/// The name of a model's manifest on the device.
pub(super) fn tensor_name(model: &str) -> String {
    format!("{model}{HIDDEN}{NAME}")
}

/// The model whose manifest has this name.
pub(super) fn model_of(tensor: &str) -> Option<&str> {
    tensor.strip_suffix(NAME)?.strip_suffix(HIDDEN)
}

impl Manifest {
    /// The bytes of the manifest's tensor, without the mark.
    pub(super) fn encode(&self, literals: &[u8]) -> Result<Vec<u8>, FilesError> {
        let json = serde_json::to_vec(self).map_err(|why| self.wrong(why.to_string()))?;
        if json.len() as u64 > MAX_JSON {
            return Err(self.wrong(too_long("its JSON", json.len() as u64, MAX_JSON)));
        }
        let mut bytes = MAGIC.to_vec();
        bytes.resize(16, 0);
        bytes.extend_from_slice(&(json.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&(literals.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&digest(&bytes[LENGTHS], &json, literals).to_le_bytes());
        bytes.resize(HEAD, 0);
        bytes.extend_from_slice(&json);
        bytes.extend_from_slice(literals);
        Ok(bytes)
    }

    /// Refuses what no manifest of the model `model` says: of another it would be removed in that
    /// one's name, and a name that is none would be the end of the list that it is in.
    fn check(&self, model: &str) -> Result<(), String> {
        if self.name != model || is_bad(model) || model.contains('@') {
            return Err(format!("it calls itself one of {:?}", self.name));
        }
        let mut seen = BTreeSet::new();
        let mut is_wrong =
            |file: &FileEntry| file.path.split('/').any(is_bad) || !seen.insert(file.path.clone());
        match self.files.iter().find(|file| is_wrong(file)) {
            Some(file) => Err(format!("{:?} is no path of a file, or of two", file.path)),
            None => Ok(()),
        }
    }

    pub(super) fn wrong(&self, why: String) -> FilesError {
        FilesError::Manifest { name: self.name.clone(), why }
    }

    /// The names of its tensors, in the order of the files.
    pub fn tensors(&self) -> impl Iterator<Item = &str> {
        self.files.iter().flat_map(|file| &file.extents).flat_map(|extent| extent.of.tensors())
    }

    /// The precisions that lists show, views and maps.
    pub fn precisions(&self) -> Vec<Precision> {
        let views = self.views.iter().filter_map(|view| Precision::parse(view, &self.maps));
        let maps = self.maps.keys().filter_map(|map| Precision::parse(map, &self.maps));
        views.chain(maps).collect()
    }
}

fn digest(lengths: &[u8], json: &[u8], literals: &[u8]) -> u128 {
    let mut hasher = Hasher::new();
    for part in [lengths, json, literals] {
        hasher.write(part);
    }
    hasher.finish_128()
}

/// What a manifest's tensor holds.
pub(super) enum Found {
    /// A model.
    Whole(Box<Model>),
    /// One of which not all tensors are there.
    Unfinished(Box<Model>),
    /// Of no model that anybody was shown, or is any more: nothing was written, or not all of it,
    /// or it was discarded by half.
    Blank,
}

/// Reads a model's manifest. Any guest may make a tensor of such a name, so no more of one is held
/// than the JSON of a manifest may have.
pub(super) fn read(device: &Device, tensor: &str) -> Result<Found, FilesError> {
    let model = model_of(tensor).unwrap_or(tensor);
    let wrong = |why: String| FilesError::Manifest { name: model.to_owned(), why };
    let view = device.view_of(tensor, "full")?;
    let bytes = view.bytes();
    if bytes < HEAD as u64 {
        return Err(wrong(format!("it has {bytes} bytes, and its head alone {HEAD}")));
    }
    if bytes > MAX_BYTES {
        return Err(wrong(too_long("it", bytes, MAX_BYTES)));
    }
    let mut head = [0; HEAD];
    device.read_view_of(&view, 0, &mut head)?;
    if head == [0; HEAD] {
        return Ok(Found::Blank);
    }
    let json = parts(&head, bytes);
    if let Ok(json) = json
        && json > MAX_JSON
    {
        return Err(wrong(too_long("its JSON", json, MAX_JSON)));
    }
    let decoded = match json {
        Ok(json) => read_parts(device, &view, &head, json)?,
        Err(why) => Err(why),
    };
    let mark = head[usize::try_from(MARK).unwrap_or(0)];
    let (manifest, json_end) = match decoded {
        Ok(decoded) => decoded,
        // The mark is set behind everything else, and cleared before anything goes. Blocks are
        // written and discarded in order, so that the first is there, or is gone.
        Err(_) if mark == 0 && head.starts_with(MAGIC) => return Ok(Found::Blank),
        Err(why) => return Err(wrong(why)),
    };
    manifest.check(model).map_err(wrong)?;
    let literals = Literals::Tensor(Arc::new(view), json_end);
    let found = Box::new(Model { manifest, literals });
    Ok(if mark == 1 { Found::Whole(found) } else { Found::Unfinished(found) })
}

/// The manifest of this head with so many bytes of JSON, and where its literals begin.
fn read_parts(
    device: &Device,
    view: &TensorView,
    head: &[u8; HEAD],
    json: u64,
) -> Result<Result<(Manifest, u64), String>, DeviceError> {
    let mut hasher = Hasher::new();
    hasher.write(&head[LENGTHS]);
    let mut text = vec![0; usize::try_from(json).unwrap_or(0)];
    device.read_view_of(view, HEAD as u64, &mut text)?;
    hasher.write(&text);
    let json_end = HEAD as u64 + json;
    let mut piece = vec![0; PIECE];
    let mut at = json_end;
    while at < view.bytes() {
        let piece = &mut piece[..PIECE.min(usize::try_from(view.bytes() - at).unwrap_or(PIECE))];
        device.read_view_of(view, at, piece)?;
        hasher.write(piece);
        at += piece.len() as u64;
    }
    Ok(checked(head, hasher.finish_128(), &text).map(|manifest| (manifest, json_end)))
}

/// A manifest that was [encoded](Manifest::encode), and where its literals begin.
pub(super) fn decode(bytes: &[u8]) -> Result<(Manifest, usize), String> {
    let head = bytes.first_chunk().ok_or("it is shorter than its head")?;
    let json_end = HEAD + usize::try_from(parts(head, bytes.len() as u64)?).unwrap_or(0);
    let (json, literals) = (&bytes[HEAD..json_end], &bytes[json_end..]);
    Ok((checked(head, digest(&head[LENGTHS], json, literals), json)?, json_end))
}

/// Bytes of the JSON, as this head of a manifest of so many bytes says.
fn parts(head: &[u8; HEAD], bytes: u64) -> Result<u64, String> {
    if !head.starts_with(MAGIC) {
        return Err("it does not begin as one".to_owned());
    }
    let number = |at: usize| head[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    let json = number(LENGTHS.start);
    let end = (HEAD as u64).saturating_add(json).saturating_add(number(LENGTHS.start + 8));
    if end == bytes { Ok(json) } else { Err(format!("it would end at byte {end} of {bytes}")) }
}

/// The manifest that `json` says, if what it was read with has the checksum that its head says.
fn checked(head: &[u8; HEAD], digest: u128, json: &[u8]) -> Result<Manifest, String> {
    if head[32..48] != digest.to_le_bytes() {
        return Err("its checksum is another".to_owned());
    }
    serde_json::from_slice(json).map_err(|why| why.to_string())
}

fn too_long(what: &str, bytes: u64, most: u64) -> String {
    format!("{what} has {bytes} bytes, at most {most} are read")
}

#[cfg(test)]
mod tests;
