//! What there is to load: a checkpoint, the shards that an index names, or a directory with all
//! that is in it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::Deserialize;

use super::folder::{LeftOut, escaped};
use super::manifest::{Content, Extent, FileEntry, Manifest, StrandOf};
use super::map::PrecisionMap;
use super::precision::{is_view, spelled};
use super::{FilesError, expand};
use crate::load::base_needed;
use crate::model::checkpoint::of_kind;
use crate::model::scaled::{self, ScaledTensor};
use crate::model::{FileKind, ModelFile, ModelTensor, Rearranged, Strand, open_regular, sixes};
use crate::tensor::HIDDEN;
use lamina_codec::BLOCK_BYTES;
use lamina_codec::view::{Kind, View};

/// The longest name of a model, and of a part of a path, in bytes.
pub(super) const MAX_NAME: usize = 200;
/// Most files and directories of a model.
pub const MAX_FILES: usize = 1 << 15;
/// How deep directories may go.
pub(super) const MAX_DEPTH: usize = 16;
/// How an index of shards ends.
const INDEX: &str = ".safetensors.index.json";
/// The extensions of checkpoints.
const CHECKPOINTS: [&str; 3] = ["safetensors", "gguf", "npy"];
/// The longest index that is read.
const MAX_INDEX: u64 = 64 << 20;

/// A model that is to be loaded: opened, and its headers checked.
pub struct ModelPlan {
    pub(super) name: String,
    pub(super) files: Vec<PlannedFile>,
    /// What of its directory is not loaded.
    pub(super) left_out: Vec<LeftOut>,
}

/// A file of it.
pub(super) struct PlannedFile {
    /// Its path in the model's folder.
    pub(super) path: String,
    pub(super) file: ModelFile,
    /// The same with its tensors as they lie on the device, if that is otherwise.
    strands: Option<ModelFile>,
    /// What its tensors' names begin with on the device.
    pub(super) within: String,
}

/// The name that a model has unless it is given another: the file's or the directory's.
pub fn name_of(path: &Path) -> String {
    let name =
        path.canonicalize().ok().and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    let name = name.or_else(|| Some(path.file_name()?.to_string_lossy().into_owned())).unwrap_or_default();
    let stem = name.strip_suffix(INDEX).or_else(|| {
        let (stem, extension) = name.rsplit_once('.')?;
        CHECKPOINTS.contains(&extension).then_some(stem)
    });
    stem.unwrap_or(&name).replace('@', "-")
}

impl PlannedFile {
    fn new(path: String, file: ModelFile, within: String) -> Result<Self, FilesError> {
        let failed = |source| FilesError::Directory { path: file.path().into(), source };
        let strands = file.in_strands().map_err(failed)?;
        Ok(Self { path, file, strands, within })
    }

    /// The file with its tensors as they lie on the device.
    pub(super) fn loaded(&self) -> &ModelFile {
        self.strands.as_ref().unwrap_or(&self.file)
    }

    /// The block-scaled tensors that it has.
    pub(super) fn scaled(&self) -> Vec<ScaledTensor> {
        match self.file.kind() {
            FileKind::Safetensors => scaled::find(self.file.tensors()).0,
            FileKind::Gguf | FileKind::Npy | FileKind::Other => Vec::new(),
        }
    }
}

impl ModelPlan {
    /// Opens what is at `path`, to be called `name`.
    ///
    /// # Errors
    ///
    /// What is wrong with it, or with the name.
    pub fn open(path: &Path, name: &str) -> Result<Self, FilesError> {
        if is_bad(name) || name.contains('@') {
            return Err(FilesError::Name { what: "model", name: name.to_owned() });
        }
        let mut plan = Self { name: name.to_owned(), files: Vec::new(), left_out: Vec::new() };
        let failed = |source| FilesError::Directory { path: path.into(), source };
        let file_name =
            path.file_name().map_or_else(|| name.into(), |name| name.to_string_lossy()).into_owned();
        if fs::metadata(path).map_err(failed)?.is_dir() {
            plan.add_directory(path, "", 0)?;
            plan.files.sort_by(|one, other| one.path.cmp(&other.path));
            plan.left_out.sort_by(|one, other| one.file.cmp(&other.file));
            if plan.files.iter().all(|file| !is_checkpoint(&file.path)) {
                return Err(FilesError::Empty { path: path.into(), left_out: plan.left_out });
            }
        } else if file_name.ends_with(INDEX) {
            let index = Index::read(path)?;
            let folder = path.parent().unwrap_or(Path::new(""));
            for shard in index.shards(path)? {
                plan.add_file(&folder.join(shard), shard)?;
            }
            plan.add_file(path, &file_name)?;
        } else {
            if is_bad(&file_name) {
                return Err(FilesError::Name { what: "file", name: file_name });
            }
            let file = ModelFile::open(path)?;
            plan.files.push(PlannedFile::new(file_name, file, format!("{name}/"))?);
        }
        plan.check_indices(path)?;
        plan.set_apart()?;
        Ok(plan)
    }

    pub(super) fn add_file(&mut self, source: &Path, path: &str) -> Result<(), FilesError> {
        if self.files.len() == MAX_FILES {
            return Err(FilesError::TooMany { path: source.into() });
        }
        let file = if is_checkpoint(path) {
            ModelFile::open(source)?
        } else {
            ModelFile::open_as_bytes(source, &format!("{}files/{path}", &HIDDEN[1..]))?
        };
        self.files.push(PlannedFile::new(path.to_owned(), file, format!("{}/", self.name))?);
        Ok(())
    }

    /// Holds every index against the shards that it names.
    fn check_indices(&self, root: &Path) -> Result<(), FilesError> {
        for index_file in self.files.iter().filter(|file| file.path.ends_with(INDEX)) {
            let path = index_file.file.path();
            let index = Index::read(path)?;
            let folder = index_file.path.rsplit_once('/').map_or("", |(folder, _)| folder);
            let mut owner: BTreeMap<&str, &str> = BTreeMap::new();
            for shard in index.shards(path)? {
                let inside = if folder.is_empty() { shard.to_owned() } else { format!("{folder}/{shard}") };
                let found = self.files.iter().find(|file| file.path == inside);
                let missing = || {
                    let left_out = self.left_out.iter().find(|left| left.file == escaped(inside.as_ref()));
                    let (path, shard) = (path.into(), shard.to_owned());
                    FilesError::ShardMissing { path, shard, why: left_out.map(|left| left.why.clone()) }
                };
                let found = found.ok_or_else(missing)?;
                for tensor in found.file.tensors() {
                    if let Some(other) = owner.insert(&tensor.name, shard) {
                        return Err(FilesError::ShardsOverlap {
                            path: path.into(),
                            tensor: tensor.name.clone(),
                            one: other.to_owned(),
                            other: shard.to_owned(),
                        });
                    }
                }
            }
            for (tensor, shard) in &index.weight_map {
                if owner.get(tensor.as_str()) != Some(&shard.as_str()) {
                    let (shard, tensor) = (shard.clone(), tensor.clone());
                    return Err(FilesError::ShardLacks { path: path.into(), shard, tensor });
                }
            }
        }
        for file in &self.files {
            let bad = |tensor: &&ModelTensor| {
                is_checkpoint(&file.path) && format!("/{}", tensor.name).contains(HIDDEN)
            };
            if let Some(tensor) = file.file.tensors().iter().find(bad) {
                let (path, name) = (root.to_owned(), tensor.name.clone());
                return Err(FilesError::Inside {
                    path,
                    name,
                    why: "tensors with `.lamina/` are the device's own",
                });
            }
        }
        Ok(())
    }

    /// Tensors that files have by the same name are told apart by the files' paths.
    fn set_apart(&mut self) -> Result<(), FilesError> {
        let mut seen = BTreeSet::new();
        let name = self.name.clone();
        for file in &mut self.files {
            let names: Vec<_> = file.loaded().tensors().iter().map(|tensor| tensor.name.clone()).collect();
            if names.iter().any(|tensor| seen.contains(&format!("{}{tensor}", file.within))) {
                file.within = format!("{name}/{}/", file.path);
            }
            for tensor in names {
                if !seen.insert(format!("{}{tensor}", file.within)) {
                    let why = "two tensors of the model have this name";
                    let (path, name) = (file.file.path().to_owned(), tensor.clone());
                    return Err(FilesError::Inside { path, name, why });
                }
            }
        }
        Ok(())
    }

    /// The model's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Bytes of its files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().fold(0, |sum, file| sum.saturating_add(file.file.opened().len()))
    }

    /// Bytes of its tensors.
    pub(super) fn tensor_bytes(&self) -> u64 {
        let tensors = self.files.iter().flat_map(|file| file.loaded().tensors());
        tensors.fold(0, |sum, tensor| sum.saturating_add(tensor.length))
    }

    /// Bytes of the base window that it takes in a fresh device.
    ///
    /// # Errors
    ///
    /// When headers cannot be read.
    pub fn base_needed(&self) -> Result<u64, FilesError> {
        let (manifest, literals) = self.manifest(u32::MAX, &[], &BTreeMap::new())?;
        let own = manifest.encode(&literals)?.len() as u64;
        let files = self.files.iter().map(|file| base_needed(file.loaded()));
        Ok(files.fold(own.next_multiple_of(BLOCK_BYTES as u64), u64::saturating_add))
    }

    /// Its manifest, and the bytes that are in no tensor.
    pub(super) fn manifest(
        &self,
        id: u32,
        views: &[String],
        maps: &BTreeMap<String, PrecisionMap>,
    ) -> Result<(Manifest, Vec<u8>), FilesError> {
        let mut literals = Vec::new();
        let files =
            self.files.iter().map(|file| entry(&file.path, file.loaded(), &file.within, &mut literals));
        let files = files.collect::<Result<_, _>>()?;
        let (name, views, maps) = (self.name.clone(), views.to_vec(), maps.clone());
        Ok((Manifest { name, id, files, views, maps, base: None }, literals))
    }

    /// Refuses views that there are not, and maps whose rules match nothing.
    pub(super) fn check(
        &self,
        views: &[String],
        maps: &BTreeMap<String, PrecisionMap>,
    ) -> Result<(), FilesError> {
        views.iter().try_for_each(|view| self.check_view(view))?;
        for (name, map) in maps {
            let wrong = |why: String| FilesError::Map { map: name.clone(), why };
            if is_bad(name) || is_view(name) {
                return Err(wrong("a map is called by a name that is no view's and has no `/`".to_owned()));
            }
            if map.rules.is_empty() {
                return Err(wrong("it has no rules".to_owned()));
            }
            for rule in &map.rules {
                spelled(&rule.view)?;
                let tensors = self.files.iter().filter(|file| is_checkpoint(&file.path));
                let tensors: Vec<_> = tensors.flat_map(|file| file.file.tensors()).collect();
                let rows = |tensor: &&ModelTensor| rule.rows_of(&tensor.name, &tensor.shape);
                let matched = tensors.iter().map(rows).collect::<Result<Vec<_>, _>>();
                if matched.map_err(wrong)?.iter().all(Vec::is_empty) {
                    let why = format!(
                        "{:?} matches none of the {} tensors of {}",
                        rule.name,
                        tensors.len(),
                        self.name
                    );
                    return Err(wrong(if rule.experts.is_empty() {
                        why
                    } else {
                        format!("{why} with the experts {:?}", rule.experts)
                    }));
                }
            }
        }
        Ok(())
    }
}

impl ModelPlan {
    /// Refuses a view that there is not, and one that no tensor gives.
    fn check_view(&self, spelling: &str) -> Result<(), FilesError> {
        let kind = spelled(spelling)?.kind();
        let gives = |file: &PlannedFile, tensor: &ModelTensor| {
            let view = View::parse(tensor.element_format(), spelling);
            match view.map(|view| view.kind()) {
                Ok(Kind::Converted { target, .. }) => {
                    of_kind(file.file.kind()).is_some_and(|format| format.can_say(tensor, target))
                }
                kind => kind.is_ok(),
            }
        };
        let all = || {
            let files = self.files.iter().filter(|file| is_checkpoint(&file.path));
            files.flat_map(|file| file.file.tensors().iter().map(move |tensor| (file, tensor)))
        };
        let has_whole = |file: &PlannedFile| {
            let scaled = file.scaled();
            scaled.iter().any(|scaled| scaled.whole.is_some() && expand::expands(kind, scaled.scheme))
        };
        if all().any(|(file, tensor)| gives(file, tensor)) || self.files.iter().any(has_whole) {
            return Ok(());
        }
        let tensor = all().next().map(|(_, tensor)| (tensor.name.clone(), tensor.dtype.clone()));
        Err(FilesError::NothingGiven { file: self.name.clone(), precision: spelling.to_owned(), tensor })
    }
}

/// What a file is made of; what is in no tensor is added to the literals.
pub(super) fn entry(
    path: &str,
    file: &ModelFile,
    within: &str,
    literals: &mut Vec<u8>,
) -> Result<FileEntry, FilesError> {
    let mut extents = Vec::new();
    let mut at = 0;
    let mut literal = |from: u64, to: u64, extents: &mut Vec<Extent>| {
        if from < to {
            let begin = literals.len();
            literals.resize(begin + usize::try_from(to - from).unwrap_or(usize::MAX), 0);
            file.read_raw(from, &mut literals[begin..])?;
            extents.push(Extent { length: to - from, of: Content::Literal(begin as u64) });
        }
        Ok::<_, FilesError>(())
    };
    for tensor in file.tensors().iter().filter(|tensor| tensor.length > 0) {
        let name = format!("{within}{}", tensor.name);
        let strand = match tensor.rearranged {
            Some(Rearranged::Strand(strand)) => strand,
            how => {
                literal(at, tensor.offset, &mut extents)?;
                let (length, of) = match how {
                    Some(_) => (sixes::packed(tensor.length), Content::Sixes(name)),
                    None => (tensor.length, Content::Tensor(name)),
                };
                extents.push(Extent { length, of });
                at = tensor.offset + length;
                continue;
            }
        };
        let Strand { skip, width, block } = strand;
        // A tensor's strands follow each other.
        if skip == 0 {
            literal(at, tensor.offset, &mut extents)?;
            let length = tensor.length / width * block;
            extents.push(Extent { length, of: Content::Woven(Vec::new()) });
            at = tensor.offset + length;
        }
        if let Some(Extent { of: Content::Woven(strands), .. }) = extents.last_mut() {
            strands.push(StrandOf { tensor: name, width });
        }
    }
    let (opened, bytes) = (file.opened(), file.opened().len());
    literal(at, bytes, &mut extents)?;
    let modified = (opened.mtime(), opened.mtime_nsec());
    Ok(FileEntry { path: path.to_owned(), kind: file.kind(), bytes, modified, extents })
}

/// Whether a name cannot be one of a file.
pub(super) fn is_bad(name: &str) -> bool {
    let size = name.is_empty() || name.len() > MAX_NAME;
    size || name == "." || name == ".." || name.chars().any(|c| c == '/' || c.is_control())
}

pub(super) fn is_checkpoint(path: &str) -> bool {
    path.rsplit_once('.').is_some_and(|(_, extension)| CHECKPOINTS.contains(&extension))
}

/// An index of shards.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Index {
    fn read(path: &Path) -> Result<Self, FilesError> {
        let wrong = |why: String| FilesError::Index { path: path.into(), why };
        let failed = |why: io::Error| wrong(why.to_string());
        let opened = open_regular(path).map_err(failed)?;
        let (file, _) = opened.ok_or_else(|| wrong("it is no file".to_owned()))?;
        let mut text = Vec::new();
        file.take(MAX_INDEX + 1).read_to_end(&mut text).map_err(failed)?;
        if text.len() as u64 > MAX_INDEX {
            return Err(wrong(format!("it has more than {MAX_INDEX} bytes")));
        }
        serde_json::from_slice(&text).map_err(|why| wrong(why.to_string()))
    }

    /// The shards that it names, each once.
    fn shards(&self, path: &Path) -> Result<BTreeSet<&str>, FilesError> {
        let shards: BTreeSet<_> = self.weight_map.values().map(String::as_str).collect();
        if let Some(bad) = shards.iter().find(|shard| is_bad(shard)) {
            let why = "shards lie in the directory of their index";
            return Err(FilesError::Inside { path: path.into(), name: (*bad).to_owned(), why });
        }
        Ok(shards)
    }
}
