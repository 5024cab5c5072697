//! What the kernel asks about `models/`, answered by inode.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use lamina_device::device::DeviceError;
use lamina_device::files::{FilesError, Precision};
use lamina_device::model::FileKind;
use lamina_device::tensor::TensorError;

use super::looked_at::Shown;
use super::number::{self, MODELS};
use super::{Folder, Models};

/// Bytes of the smallest place that a file is said to take: of one without any, tar reads nothing.
const MIN_TAKEN: u64 = 4096;
/// The extensions of checkpoints, which stay at the end of a name.
const EXTENSIONS: [&str; 3] = [".safetensors", ".gguf", ".npy"];
/// The extended attributes of a file.
const ATTRIBUTES: [&str; 7] = [
    "user.lamina.view",
    "user.lamina.stored",
    "user.lamina.ratio",
    "user.lamina.kept",
    "user.lamina.base",
    "user.lamina.read",
    "user.lamina.fetched",
];

/// Whether an inode is under `models/`.
pub(crate) fn is_ours(inode: u64) -> bool {
    inode & MODELS != 0
}

/// What an inode is.
pub(crate) struct Attributes {
    pub(crate) is_folder: bool,
    pub(crate) bytes: u64,
    /// Bytes that it takes.
    pub(crate) taken: u64,
    pub(crate) modified: (i64, i64),
}

/// Something in a folder.
pub(crate) struct Child {
    pub(crate) inode: u64,
    pub(crate) is_folder: bool,
    pub(crate) name: String,
}

/// A file or folder of a model.
struct Place {
    folder: Arc<Folder>,
    entry: usize,
    code: u64,
    precision: Option<Precision>,
}

impl Place {
    fn inode(&self) -> io::Result<u64> {
        number::of(self.folder.model.manifest.id, self.entry, self.code).ok_or_else(|| errno(libc::EOVERFLOW))
    }

    fn is_folder(&self) -> bool {
        self.folder.file(self.entry).is_none()
    }
}

fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

/// What a reader is told of an error.
fn said(why: &FilesError) -> io::Error {
    if let FilesError::Device(why) = why {
        return failed(why);
    }
    tracing::error!("a model's file cannot be shown: {why}");
    errno(libc::EIO)
}

fn failed(why: &DeviceError) -> io::Error {
    if let DeviceError::Tensor(TensorError::Unknown { name }) = why {
        tracing::info!("a file was read whose tensor {name} was removed");
        return errno(libc::ESTALE);
    }
    tracing::error!("reading a model's file failed: {why}");
    errno(libc::EIO)
}

impl Models {
    fn place(&self, inode: u64) -> io::Result<Place> {
        let folder = self.numbered(number::model_of(inode)).ok_or_else(|| errno(libc::ESTALE))?;
        let (entry, code) = (number::entry_of(inode), number::code_of(inode));
        let precision = number::precision(&folder.model.manifest, code);
        if entry >= folder.entries.len() || (code != 0) != precision.is_some() {
            return Err(errno(libc::ESTALE));
        }
        Ok(Place { folder, entry, code, precision })
    }

    /// A file of a place, ready to be read.
    fn shown_at(&self, place: &Place) -> io::Result<Option<Arc<Shown>>> {
        let shown = self.shown(&place.folder, place.entry, place.precision.as_ref(), place.inode()?);
        shown.map_err(|why| said(&why))
    }

    /// Whether a place can be shown: of a file that is not held it is known, if somebody looked.
    fn can_be_shown(&self, place: &Place) -> io::Result<bool> {
        let known = self.looked_at.lock().is_shown(place.inode()?);
        known.map_or_else(|| Ok(self.shown_at(place)?.is_some()), Ok)
    }

    fn file(&self, inode: u64) -> io::Result<Arc<Shown>> {
        if inode == MODELS {
            return Err(errno(libc::EISDIR));
        }
        let place = self.place(inode)?;
        if place.is_folder() {
            return Err(errno(libc::EISDIR));
        }
        self.shown_at(&place)?.ok_or_else(|| errno(libc::ESTALE))
    }

    pub(crate) fn attributes(&self, inode: u64) -> io::Result<Attributes> {
        if inode == MODELS {
            return Ok(Attributes { is_folder: true, bytes: 0, taken: 0, modified: (0, 0) });
        }
        let place = self.place(inode)?;
        let files = &place.folder.model.manifest.files;
        let Some(file) = place.folder.file(place.entry) else {
            let modified = files.iter().map(|file| file.modified).max().unwrap_or_default();
            return Ok(Attributes { is_folder: true, bytes: 0, taken: 0, modified });
        };
        let shown = self.shown_at(&place)?.ok_or_else(|| errno(libc::ESTALE))?;
        // What a precision shows is stored once, with the file.
        let taken = if place.precision.is_some() { 0 } else { shown.layout.charged() };
        let (bytes, taken) = (shown.layout.bytes(), taken.max(MIN_TAKEN));
        Ok(Attributes { is_folder: false, bytes, taken, modified: file.modified })
    }

    /// The folder that a folder is in.
    pub(crate) fn parent(&self, inode: u64, root: u64) -> io::Result<u64> {
        if inode == MODELS {
            return Ok(root);
        }
        let place = self.place(inode)?;
        if place.entry == 0 {
            return Ok(MODELS);
        }
        let parent = place.folder.entries.get(place.entry).map_or(0, |entry| entry.parent);
        Place { entry: parent, ..place }.inode()
    }

    /// The inode of `name` in a folder.
    pub(crate) fn find(&self, parent: u64, name: &str) -> io::Result<u64> {
        let none = || errno(libc::ENOENT);
        if parent == MODELS {
            return self.find_model(name)?.ok_or_else(none);
        }
        let place = self.place(parent)?;
        if !place.is_folder() {
            return Err(errno(libc::ENOTDIR));
        }
        let child = place.folder.children(place.entry).find(|(_, entry)| entry.name == name);
        if let Some((entry, _)) = child {
            return self.child(&place, entry)?.inode();
        }
        if place.code != 0 {
            return Err(none());
        }
        for (stem, requested, extension) in splits(name) {
            let base = format!("{stem}{extension}");
            let child = place.folder.children(place.entry).find(|(_, entry)| entry.name == base);
            if let Some((entry, _)) = child
                && let Some(inode) = self.precise(&place.folder, entry, requested)?
            {
                return Ok(inode);
            }
        }
        Err(none())
    }

    /// What of a folder at a precision an entry is: as it is, if it cannot be shown so.
    fn child(&self, place: &Place, entry: usize) -> io::Result<Place> {
        let folder = Arc::clone(&place.folder);
        let own = Place { folder, entry, code: place.code, precision: place.precision.clone() };
        if place.code == 0 || own.is_folder() || self.can_be_shown(&own)? {
            return Ok(own);
        }
        Ok(Place { code: 0, precision: None, ..own })
    }

    fn find_model(&self, name: &str) -> io::Result<Option<u64>> {
        if let Some(folder) = self.folder(name) {
            return Ok(number::of(folder.model.manifest.id, 0, 0));
        }
        for (stem, requested, extension) in splits(name) {
            let Some(folder) = self.folder(stem) else { continue };
            if extension.is_empty() {
                let manifest = &folder.model.manifest;
                let precision = Precision::parse(requested, &manifest.maps);
                let code = precision.as_ref().and_then(|precision| number::code(manifest, precision));
                let (Some(code), Some(precision)) = (code, precision) else { continue };
                for (entry, _) in folder.checkpoints() {
                    let (folder, precision) = (Arc::clone(&folder), Some(precision.clone()));
                    if self.can_be_shown(&Place { folder, entry, code, precision })? {
                        return Ok(number::of(manifest.id, 0, code));
                    }
                }
                continue;
            }
            let mut fitting = folder.checkpoints().filter(|(_, file)| file.path.ends_with(extension));
            if let (Some((entry, _)), None) = (fitting.next(), fitting.next())
                && let Some(inode) = self.precise(&folder, entry, requested)?
            {
                return Ok(Some(inode));
            }
        }
        Ok(None)
    }

    /// The inode of a checkpoint at the precision that is spelled so, if it can be shown so.
    fn precise(&self, folder: &Arc<Folder>, entry: usize, requested: &str) -> io::Result<Option<u64>> {
        let manifest = &folder.model.manifest;
        let is_checkpoint = folder.file(entry).is_some_and(|file| file.kind != FileKind::Other);
        let precision = Precision::parse(requested, &manifest.maps).filter(|_| is_checkpoint);
        let Some(precision) = precision else { return Ok(None) };
        let Some(code) = number::code(manifest, &precision) else { return Ok(None) };
        let place = Place { folder: Arc::clone(folder), entry, code, precision: Some(precision) };
        if self.can_be_shown(&place)? { place.inode().map(Some) } else { Ok(None) }
    }

    /// What is in a folder, by inode: the order stays when others come and go.
    pub(crate) fn children(&self, inode: u64) -> io::Result<Vec<Child>> {
        if inode == MODELS {
            let folders = self.folders();
            let child = |folder: &Arc<Folder>| {
                let manifest = &folder.model.manifest;
                let inode = number::of(manifest.id, 0, 0)?;
                Some(Child { inode, is_folder: true, name: manifest.name.clone() })
            };
            let mut children: Vec<_> = folders.iter().filter_map(child).collect();
            children.sort_unstable_by_key(|child| child.inode);
            return Ok(children);
        }
        let place = self.place(inode)?;
        if !place.is_folder() {
            return Err(errno(libc::ENOTDIR));
        }
        let manifest = &place.folder.model.manifest;
        let requested = self.looked_at.lock().of_model(manifest.id);
        let mut children = Vec::new();
        for (entry, named) in place.folder.children(place.entry) {
            let child = self.child(&place, entry)?;
            children.push(Child {
                inode: child.inode()?,
                is_folder: child.is_folder(),
                name: named.name.clone(),
            });
            if place.code != 0 || place.folder.file(entry).is_none_or(|file| file.kind == FileKind::Other) {
                continue;
            }
            let configured = manifest.precisions();
            let configured = configured.iter().filter_map(|precision| number::code(manifest, precision));
            let requested = requested.iter().filter(|inode| number::entry_of(**inode) == entry);
            let mut codes: Vec<_> =
                configured.chain(requested.map(|inode| number::code_of(*inode))).collect();
            codes.sort_unstable();
            codes.dedup();
            for code in codes.into_iter().filter(|code| *code != 0) {
                let Some(precision) = number::precision(manifest, code) else { continue };
                let name = precise_name(&named.name, &precision);
                let folder = Arc::clone(&place.folder);
                let child = Place { folder, entry, code, precision: Some(precision) };
                if self.can_be_shown(&child)? {
                    children.push(Child { inode: child.inode()?, is_folder: false, name });
                }
            }
        }
        Ok(children)
    }

    /// Opens a file: whether its pages in the page cache are still right.
    pub(crate) fn open_file(&self, inode: u64) -> io::Result<bool> {
        let shown = self.file(inode)?;
        let now = self.device.changes();
        Ok(shown.opened.swap(now, Ordering::Relaxed) == now)
    }

    /// The bytes of a file.
    pub(crate) fn bytes(&self, inode: u64) -> io::Result<u64> {
        Ok(self.file(inode)?.layout.bytes())
    }

    /// Fills `out` from `offset` of a file on, which does not pass its end.
    pub(crate) fn read(&self, inode: u64, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.file(inode)?.layout.read(&self.device, offset, out).map_err(|why| failed(&why))?;
        // A model is hidden before anything of it is discarded: what was read while it was shown is
        // none of the zeros that come then.
        self.numbered(number::model_of(inode)).map(drop).ok_or_else(|| errno(libc::ESTALE))
    }

    /// The names of the extended attributes of a file, each with a zero behind it.
    pub(crate) fn attribute_names(&self, inode: u64) -> Vec<u8> {
        let has = |name: &&&str| self.attribute(inode, name).is_ok();
        ATTRIBUTES.iter().filter(has).flat_map(|name| name.bytes().chain([0])).collect()
    }

    /// An extended attribute of a file.
    pub(crate) fn attribute(&self, inode: u64, name: &str) -> io::Result<Vec<u8>> {
        let none = || errno(libc::ENODATA);
        if inode == MODELS || !ATTRIBUTES.contains(&name) {
            return Err(none());
        }
        let place = self.place(inode)?;
        if place.is_folder() {
            return Err(none());
        }
        let shown = self.shown_at(&place)?.ok_or_else(none)?;
        let layout = &shown.layout;
        let text = match name {
            "user.lamina.view" => {
                place.precision.as_ref().map_or_else(|| "full".to_owned(), Precision::to_string)
            }
            "user.lamina.stored" => self.stored(&shown)?.to_string(),
            "user.lamina.ratio" => match self.stored(&shown)? {
                0 => return Err(none()),
                stored => {
                    let thousandths = u128::from(layout.bytes()) * 1000 / u128::from(stored);
                    format!("{}.{:03}", thousandths / 1000, thousandths % 1000)
                }
            },
            "user.lamina.kept" => {
                let (given, kept) = layout.shown();
                if place.precision.is_none() || kept == 0 {
                    return Err(none());
                }
                format!("{kept} of {} tensors are full", given + kept)
            }
            "user.lamina.base" => self.base_of(&place.folder.model).ok_or_else(none)?,
            "user.lamina.read" => shown.traffic().bytes.to_string(),
            _ => shown.traffic().stored.to_string(),
        };
        Ok(text.into_bytes())
    }

    fn stored(&self, shown: &Shown) -> io::Result<u64> {
        let now = self.device.changes();
        let known = *shown.stored.lock();
        if let Some((_, stored)) = known.filter(|(at, _)| *at == now) {
            return Ok(stored);
        }
        let stored = shown.layout.stored(&self.device).map_err(|why| failed(&why))?;
        *shown.stored.lock() = Some((now, stored));
        Ok(stored)
    }
}

/// The ways to read a name as a stem, a precision and an extension.
fn splits(name: &str) -> impl Iterator<Item = (&str, &str, &'static str)> {
    let known = EXTENSIONS.into_iter().find(|extension| name.ends_with(extension)).unwrap_or("");
    let body = &name[..name.len() - known.len()];
    body.match_indices('@').map(move |(at, _)| (&body[..at], &body[at + 1..], known))
}

/// The name of a checkpoint at a precision.
fn precise_name(name: &str, precision: &Precision) -> String {
    let extension = EXTENSIONS.into_iter().find(|extension| name.ends_with(extension)).unwrap_or("");
    format!("{}@{precision}{extension}", &name[..name.len() - extension.len()])
}
