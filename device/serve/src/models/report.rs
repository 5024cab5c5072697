//! What is told of models.

use serde::Serialize;

use super::{Folder, Models, number};
use lamina_device::files::{Apart, LeftOut, Model, Read};

/// All models, and what is being loaded.
#[derive(Clone, Debug, Serialize)]
pub struct ModelsReport {
    /// By name.
    pub models: Vec<ModelReport>,
    /// What is being loaded.
    pub loading: Option<LoadingReport>,
}

/// How far loading is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LoadingReport {
    /// The model.
    pub name: String,
    /// Bytes that are loaded.
    pub bytes: u64,
    /// Bytes of all tensors.
    pub total: u64,
}

/// A model.
#[derive(Clone, Debug, Serialize)]
pub struct ModelReport {
    /// Its name.
    pub name: String,
    /// Bytes of its files.
    pub bytes: u64,
    /// Bytes that are stored of them.
    pub stored: u64,
    /// The model that it was loaded against, as long as any tensor has a base.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    /// Tensors that are stored by themselves even so, when it is loaded.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub apart: Vec<Apart>,
    /// What of its directory was not loaded, when it is loaded.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOut>,
    /// Its files.
    pub files: Vec<FileReport>,
}

/// A file of a model.
#[derive(Clone, Debug, Serialize)]
pub struct FileReport {
    /// Its path in the model's folder.
    pub path: String,
    /// `safetensors`, `gguf`, `npy` or `other`.
    pub kind: lamina_device::model::FileKind,
    /// Its bytes.
    pub bytes: u64,
    /// Bytes that are stored of it.
    pub stored: u64,
    /// What was read of it, as it is and at precisions.
    pub views: Vec<ViewReport>,
}

/// What was read of a file at a precision.
#[derive(Clone, Debug, Serialize)]
pub struct ViewReport {
    /// The precision; `full` for the file as it is.
    pub view: String,
    /// Bytes of the file at it.
    pub bytes: u64,
    /// Bytes given to readers.
    pub read: u64,
    /// Stored bytes fetched for that.
    pub fetched: u64,
}

impl Models {
    /// All models, and what is being loaded.
    pub fn report(&self) -> ModelsReport {
        let models = self.folders().iter().map(|folder| self.report_of(folder)).collect();
        ModelsReport { models, loading: self.loading.lock().clone() }
    }

    /// The model that a model was loaded against, as long as any tensor of it has a base.
    pub(super) fn base_of(&self, model: &Model) -> Option<String> {
        let has_base = |name| self.device.tensor(name).is_ok_and(|tensor| tensor.base.is_some());
        model.manifest.base.clone().filter(|_| model.manifest.tensors().any(has_base))
    }

    pub(super) fn report_of(&self, folder: &Folder) -> ModelReport {
        let manifest = &folder.model.manifest;
        let requested = self.looked_at.lock().of_model(manifest.id);
        let files = (0..folder.entries.len()).filter_map(|entry| {
            let file = folder.file(entry)?;
            let full = number::of(manifest.id, entry, 0)?;
            // The file as it is comes first, looked at or not.
            let stored = self.shown(folder, entry, None, full).ok().flatten();
            let stored = stored.map_or(0, |shown| shown.layout.charged());
            let inodes =
                requested.iter().copied().filter(|inode| number::entry_of(*inode) == entry && *inode != full);
            let views = std::iter::once(full).chain(inodes).filter_map(|inode| {
                let precision = number::precision(manifest, number::code_of(inode));
                let (bytes, read) = self.looked_at.lock().told(inode)?;
                let Read { bytes: read, stored: fetched } = read;
                let view = precision.map_or_else(|| "full".to_owned(), |precision| precision.to_string());
                Some(ViewReport { view, bytes, read, fetched })
            });
            let (path, kind, bytes) = (file.path.clone(), file.kind, file.bytes);
            Some(FileReport { path, kind, bytes, stored, views: views.collect() })
        });
        let files: Vec<_> = files.collect();
        ModelReport {
            name: manifest.name.clone(),
            bytes: files.iter().map(|file| file.bytes).sum(),
            stored: files.iter().map(|file| file.stored).sum(),
            base: self.base_of(&folder.model),
            apart: Vec::new(),
            left_out: Vec::new(),
            files,
        }
    }
}
