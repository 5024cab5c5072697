//! Why a model's files cannot be loaded or shown.

use std::io;
use std::path::PathBuf;

use super::folder::LeftOut;
use super::plan::{MAX_FILES, MAX_NAME};
use crate::device::DeviceError;
use crate::load::LoadError;
use crate::model::ModelError;
use crate::tensor::NoBase;
use lamina_codec::view::ViewError;

/// Why a model's files cannot be loaded or shown.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// A checkpoint that cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A checkpoint that the device does not take.
    #[error(transparent)]
    Load(Box<LoadError>),
    /// The device refuses.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A device that stores no differences.
    #[error("nothing can be stored as the difference to {base}: {why}")]
    Base {
        /// The model that was to be the base.
        base: String,
        /// Why not.
        why: NoBase,
    },
    /// A base that has nothing in common with the model.
    #[error(
        "no tensor of {name} has the name, the format and the shape of one of {base}: load it without a base"
    )]
    NothingDerived {
        /// The model.
        name: String,
        /// What was to be its base.
        base: String,
    },
    /// A name that cannot be one.
    #[error(
        "{name:?} cannot name a {what}: 1 to {MAX_NAME} bytes without `/`, `@` and control characters, and neither `.` nor `..`"
    )]
    Name {
        /// What it was to name.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A name in a directory that leads out of it, or cannot be shown.
    #[error("{}: {name:?} names nothing in this directory: {why}", path.display())]
    Inside {
        /// The directory, or the file that has the name.
        path: PathBuf,
        /// The name.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A directory that cannot be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Directory {
        /// The directory, or what is in it.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Nothing to load.
    #[error(
        "{}: there is no .safetensors, .gguf or .npy file in this directory{}",
        path.display(),
        beside(left_out)
    )]
    Empty {
        /// The directory.
        path: PathBuf,
        /// What of it is not loaded.
        left_out: Vec<LeftOut>,
    },
    /// Too many files.
    #[error("{}: more than {MAX_FILES} files and directories", path.display())]
    TooMany {
        /// The directory.
        path: PathBuf,
    },
    /// An index that is none.
    #[error("{}: no index of shards: {why}", path.display())]
    Index {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A shard that is not there.
    #[error("{}: shard {shard:?} is missing{}", path.display(), because(why.as_deref()))]
    ShardMissing {
        /// The index.
        path: PathBuf,
        /// The shard.
        shard: String,
        /// Why it is not loaded, if it is there.
        why: Option<String>,
    },
    /// A tensor that its shard lacks.
    #[error("{}: tensor {tensor:?} is not in shard {shard:?}", path.display())]
    ShardLacks {
        /// The index.
        path: PathBuf,
        /// The shard.
        shard: String,
        /// The tensor.
        tensor: String,
    },
    /// A tensor in two shards.
    #[error("{}: tensor {tensor:?} is in shard {one:?} and in {other:?}", path.display())]
    ShardsOverlap {
        /// The index.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// A shard.
        one: String,
        /// Another one.
        other: String,
    },
    /// A model of the name is there.
    #[error(
        "there is a model {name:?} already: remove it (`lamina rm {name}`), or load this one under another name (`--as`)"
    )]
    Exists {
        /// The name.
        name: String,
    },
    /// A model of the name is there, and is another or shown otherwise.
    #[error(
        "the image holds a model {name:?} already, and {why}. Nothing was changed: leave this one out, and `lamina rm {name}` and \
         `lamina load` it, or `lamina load` it under another name (`--as`)"
    )]
    Kept {
        /// The name.
        name: String,
        /// What is another.
        why: String,
    },
    /// A model that another is stored as the difference to.
    #[error(
        "{name} is the base of {derived}, and cannot be removed before that: `lamina tensor detach {remedy}` stores it by itself, \
         `lamina {removes}` removes it"
    )]
    IsBase {
        /// The model.
        name: String,
        /// A model of those, or a tensor that is no model's.
        derived: String,
        /// What detaches it.
        remedy: String,
        /// What removes it.
        removes: String,
    },
    /// No model has the name.
    #[error("there is no model {name:?}; `lamina ls` lists them")]
    Unknown {
        /// The name.
        name: String,
    },
    /// A view that no format gives.
    #[error(transparent)]
    View(#[from] ViewError),
    /// A view that has no elements in bytes.
    #[error("{spelling}: packed elements have no dtype that a file could name")]
    Packed {
        /// The view.
        spelling: String,
    },
    /// A view that no tensor of a file can be shown in.
    #[error("{file}: no tensor of it can be shown as {precision}: {}", first(tensor.as_ref()))]
    NothingGiven {
        /// The file, or the model.
        file: String,
        /// The view or map.
        precision: String,
        /// Its first tensor: name and dtype.
        tensor: Option<(String, String)>,
    },
    /// A map that cannot be.
    #[error("map {map:?}: {why}")]
    Map {
        /// Its name.
        map: String,
        /// What is wrong.
        why: String,
    },
    /// What the device holds of a model cannot be read.
    #[error("the manifest of {name:?} cannot be used: {why}")]
    Manifest {
        /// The model.
        name: String,
        /// What is wrong.
        why: String,
    },
}

fn first(tensor: Option<&(String, String)>) -> String {
    match tensor {
        Some((name, dtype)) => format!("its first, {name:?}, is {dtype}"),
        None => "it has none".to_owned(),
    }
}

/// The first of what is left out, and how many more there are.
fn beside(left_out: &[LeftOut]) -> String {
    match left_out {
        [] => String::new(),
        [one] => format!("; {one}"),
        [one, more @ ..] => format!("; {one}; and {} more", more.len()),
    }
}

fn because(why: Option<&str>) -> String {
    why.map_or_else(String::new, |why| format!(": {why}"))
}

impl From<LoadError> for FilesError {
    fn from(why: LoadError) -> Self {
        Self::Load(Box::new(why))
    }
}
