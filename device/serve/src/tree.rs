//! The folders and files of the mount, fixed from its beginning to its end.
//!
//! Inodes are numbers from 1, the root. A folder comes before what is in it, an export's `base`
//! right before its `views`, and its targets, `target0` and so on, behind them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::export::Export;
use super::export_file::ExportFile;
use super::models::Models;
use super::targets::Targets;
use lamina_files::Files;

/// Inode of the root.
pub(super) const ROOT: u64 = 1;

/// What lies where.
pub(crate) struct Tree {
    /// By inode, from 1.
    nodes: Vec<Node>,
    exports: Vec<Arc<Export>>,
    /// What lies in the folder `models`, if there is one.
    models: Option<Arc<Models>>,
    /// What lies in the folder `files`, if there is one.
    files: Option<Arc<Files>>,
    /// The API's socket.
    api: Option<PathBuf>,
}

struct Node {
    parent: u64,
    name: String,
    /// The export and what it shows of it, of a file.
    file: Option<(usize, ExportFile)>,
}

impl Tree {
    /// The tree of these exports.
    pub(crate) fn new(exports: Vec<Arc<Export>>) -> Self {
        let mut tree = Self {
            nodes: vec![Node { parent: ROOT, name: String::new(), file: None }],
            exports: Vec::new(),
            models: None,
            files: None,
            api: None,
        };
        for (index, export) in exports.iter().enumerate() {
            let folder = export.place().folders().into_iter().fold(ROOT, |parent, name| {
                tree.find(parent, name).unwrap_or_else(|| tree.add(parent, name, None))
            });
            tree.add(folder, "base", Some((index, ExportFile::Base)));
            tree.add(folder, "views", Some((index, ExportFile::Views)));
            for target in export.targets().into_iter().flat_map(Targets::numbers) {
                tree.add(folder, &format!("target{target}"), Some((index, ExportFile::Target(target))));
            }
        }
        tree.exports = exports;
        tree
    }

    /// The same with a folder of models.
    pub(super) fn with_models(self, models: Option<Arc<Models>>) -> Self {
        Self { models, ..self }
    }

    /// The same with a folder of files.
    pub(super) fn with_files(self, files: Option<Arc<Files>>) -> Self {
        Self { files, ..self }
    }

    /// The files, if there is a folder of them.
    pub(super) fn files(&self) -> Option<&Arc<Files>> {
        self.files.as_ref()
    }

    /// The models, if there is a folder of them.
    pub(super) fn models(&self) -> Option<&Arc<Models>> {
        self.models.as_ref()
    }

    /// The same with an API that answers on this socket.
    pub(super) fn with_api(self, api: Option<PathBuf>) -> Self {
        Self { api, ..self }
    }

    /// The API's socket, if the mount tells it.
    pub(super) fn api(&self) -> Option<&Path> {
        self.api.as_deref()
    }

    fn add(&mut self, parent: u64, name: &str, file: Option<(usize, ExportFile)>) -> u64 {
        self.nodes.push(Node { parent, name: name.to_owned(), file });
        self.nodes.len() as u64
    }

    fn node(&self, inode: u64) -> Option<&Node> {
        self.nodes.get(usize::try_from(inode.checked_sub(ROOT)?).ok()?)
    }

    /// The inode of `name` in a folder. `lane0`, as the interleave target `target0` was called by
    /// the version before, is found by that name too: command lines of guests hold it.
    pub(super) fn find(&self, parent: u64, name: &str) -> Option<u64> {
        let find =
            |name: &str| self.children(parent).find(|child| child.name == name).map(|child| child.inode);
        find(name).or_else(|| find(&format!("target{}", name.strip_prefix("lane")?)))
    }

    /// What is in a folder.
    pub(super) fn children(&self, parent: u64) -> impl Iterator<Item = Child<'_>> {
        let nodes = (ROOT..).zip(&self.nodes).skip(1);
        nodes.filter(move |(_, node)| node.parent == parent).map(|(inode, node)| Child {
            inode,
            name: &node.name,
            is_folder: node.file.is_none(),
        })
    }

    /// The folder that `inode` is in; the root's own for the root.
    pub(super) fn parent(&self, inode: u64) -> Option<u64> {
        self.node(inode).map(|node| node.parent)
    }

    /// The file `inode`; none if that is a folder or nothing.
    pub(super) fn file(&self, inode: u64) -> Option<(&Arc<Export>, ExportFile)> {
        let (export, which) = self.node(inode)?.file?;
        Some((&self.exports[export], which))
    }

    /// The inode of an export's file.
    pub(super) fn inode_of(&self, export: &Arc<Export>, which: ExportFile) -> Option<u64> {
        let is = |node: &Node| {
            node.file.is_some_and(|(at, of)| of == which && Arc::ptr_eq(&self.exports[at], export))
        };
        (ROOT..).zip(&self.nodes).find(|(_, node)| is(node)).map(|(inode, _)| inode)
    }

    /// All exports, in the order they were named.
    pub(super) fn exports(&self) -> &[Arc<Export>] {
        &self.exports
    }

    /// Files and folders.
    pub(super) fn len(&self) -> u64 {
        self.nodes.len() as u64
    }
}

/// Something in a folder.
pub(super) struct Child<'a> {
    pub(super) inode: u64,
    pub(super) name: &'a str,
    pub(super) is_folder: bool,
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::export::{ExportOptions, Place};
    use super::*;
    use lamina_device::device::{Device, DeviceConfig, Partition};
    use lamina_device::stats::Interleaving;

    #[test]
    fn each_pair_lies_in_its_own_folder() {
        let device = Arc::new(Device::new(DeviceConfig::new(4096, 4 << 20)).unwrap());
        let partition = Partition::named(&device, "").unwrap();
        let places =
            [Place::Root, Place::Guest("a".into()), Place::Guest("b".into()), Place::Host("a".into())];
        let exports = places.map(|place| {
            let options =
                ExportOptions { place, partition: partition.clone(), cache_bytes: None, revoked_mark: None };
            Arc::new(Export::new(&options, Path::new("/m"), std::time::Duration::ZERO))
        });
        let tree = Tree::new(exports.to_vec());
        let names = |inode| tree.children(inode).map(|child| child.name.to_owned()).collect::<Vec<_>>();
        assert_eq!(names(ROOT), ["base", "views", "guests", "hosts"]);
        assert_eq!(
            (tree.find(ROOT, "base"), tree.find(ROOT, "views"), tree.find(ROOT, "x")),
            (Some(2), Some(3), None)
        );
        let guests = tree.find(ROOT, "guests").unwrap();
        assert_eq!(names(guests), ["a", "b"]);
        let b = tree.find(guests, "b").unwrap();
        assert_eq!((tree.parent(b), tree.parent(ROOT), tree.parent(99)), (Some(guests), Some(ROOT), None));
        for (export, folder) in exports.iter().zip(["/m", "/m/guests/a", "/m/guests/b", "/m/hosts/a"]) {
            assert_eq!(export.base_path(), Path::new(folder).join("base"));
            for which in [ExportFile::Base, ExportFile::Views] {
                let inode = tree.inode_of(export, which).unwrap();
                let (found, of) = tree.file(inode).unwrap();
                assert!(Arc::ptr_eq(found, export) && of == which);
            }
            assert_eq!(tree.inode_of(export, ExportFile::Target(0)), None);
        }
        for none in [0, ROOT, guests, b, tree.len() + 1, u64::MAX] {
            assert!(tree.file(none).is_none(), "{none}");
        }
    }

    #[test]
    fn the_targets_of_a_set_lie_beside_its_base() {
        let interleaving = Some(Interleaving { interleave: "4x4K".parse().unwrap(), bandwidth: 1.0 });
        let config = DeviceConfig { interleaving, ..DeviceConfig::new(64 << 10, 4 << 20) };
        let partition = Partition::first(Arc::new(Device::new(config).unwrap()));
        let options = ExportOptions { place: Place::Root, partition, cache_bytes: None, revoked_mark: None };
        let export = Arc::new(Export::new(&options, Path::new("/m"), std::time::Duration::ZERO));
        let tree = Tree::new(vec![Arc::clone(&export)]);
        let names: Vec<_> = tree.children(ROOT).map(|child| child.name.to_owned()).collect();
        assert_eq!(names, ["base", "views", "target0", "target1", "target2", "target3"]);
        let inode = tree.inode_of(&export, ExportFile::Target(2)).unwrap();
        assert_eq!(
            (tree.find(ROOT, "target2"), tree.file(inode).unwrap().1),
            (Some(inode), ExportFile::Target(2))
        );
        assert_eq!(tree.find(ROOT, "lane2"), Some(inode), "as the version before called it");
        assert_eq!(tree.find(ROOT, "lane4"), None);
        assert_eq!(export.report().targets[3].path, Path::new("/m/target3"));
        assert_eq!(export.report().targets[3].bytes, 16 << 10);
    }
}
