//! The folders and files of the mount, fixed from its beginning to its end.
//!
//! Inodes are numbers from 1, the root. A folder comes before what is in it, a pair's `base` right before its `views`, and its lanes, `lane0` and so on, behind them.

use std::sync::Arc;

use super::lanes::{Face, Lanes};
use super::models::Models;
use super::pair::Pair;

/// Inode of the root.
pub(super) const ROOT: u64 = 1;

/// What lies where.
pub(crate) struct Tree {
    /// By inode, from 1.
    nodes: Vec<Node>,
    pairs: Vec<Arc<Pair>>,
    /// What lies in the folder `models`, if there is one.
    models: Option<Arc<Models>>,
}

struct Node {
    parent: u64,
    name: String,
    /// The pair and what it shows of it, of a file.
    file: Option<(usize, Face)>,
}

impl Tree {
    /// The tree of these pairs.
    pub(crate) fn new(pairs: Vec<Arc<Pair>>) -> Self {
        let mut tree = Self {
            nodes: vec![Node { parent: ROOT, name: String::new(), file: None }],
            pairs: Vec::new(),
            models: None,
        };
        for (index, pair) in pairs.iter().enumerate() {
            let folder = pair.place().folders().into_iter().fold(ROOT, |parent, name| {
                tree.find(parent, name).unwrap_or_else(|| tree.add(parent, name, None))
            });
            tree.add(folder, "base", Some((index, Face::Base)));
            tree.add(folder, "views", Some((index, Face::Views)));
            for lane in pair.lanes().into_iter().flat_map(Lanes::numbers) {
                tree.add(folder, &format!("lane{lane}"), Some((index, Face::Lane(lane))));
            }
        }
        tree.pairs = pairs;
        tree
    }

    /// The same with a folder of models.
    pub(super) fn with_models(self, models: Option<Arc<Models>>) -> Self {
        Self { models, ..self }
    }

    /// The models, if there is a folder of them.
    pub(super) fn models(&self) -> Option<&Arc<Models>> {
        self.models.as_ref()
    }

    fn add(&mut self, parent: u64, name: &str, file: Option<(usize, Face)>) -> u64 {
        self.nodes.push(Node { parent, name: name.to_owned(), file });
        self.nodes.len() as u64
    }

    fn node(&self, inode: u64) -> Option<&Node> {
        self.nodes.get(usize::try_from(inode.checked_sub(ROOT)?).ok()?)
    }

    /// The inode of `name` in a folder.
    pub(super) fn find(&self, parent: u64, name: &str) -> Option<u64> {
        self.children(parent).find(|child| child.name == name).map(|child| child.inode)
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
    pub(super) fn file(&self, inode: u64) -> Option<(&Arc<Pair>, Face)> {
        let (pair, face) = self.node(inode)?.file?;
        Some((&self.pairs[pair], face))
    }

    /// The inode of a pair's file.
    pub(super) fn inode_of(&self, pair: &Arc<Pair>, face: Face) -> Option<u64> {
        let is =
            |node: &Node| node.file.is_some_and(|(at, of)| of == face && Arc::ptr_eq(&self.pairs[at], pair));
        (ROOT..).zip(&self.nodes).find(|(_, node)| is(node)).map(|(inode, _)| inode)
    }

    /// All pairs, in the order they were named.
    pub(super) fn pairs(&self) -> &[Arc<Pair>] {
        &self.pairs
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

    use super::super::pair::{PairOptions, Place};
    use super::*;
    use lamina_device::device::{Device, DeviceConfig, Partition};
    use lamina_device::stats::Interleaving;

    #[test]
    fn each_pair_lies_in_its_own_folder() {
        let device = Arc::new(Device::new(DeviceConfig::new(4096, 4 << 20)).unwrap());
        let partition = Partition::named(&device, "").unwrap();
        let places =
            [Place::Root, Place::Guest("a".into()), Place::Guest("b".into()), Place::Host("a".into())];
        let pairs = places.map(|place| {
            let options = PairOptions { place, partition: partition.clone(), cache_bytes: None };
            Arc::new(Pair::new(&options, Path::new("/m"), std::time::Duration::ZERO))
        });
        let tree = Tree::new(pairs.to_vec());
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
        for (pair, folder) in pairs.iter().zip(["/m", "/m/guests/a", "/m/guests/b", "/m/hosts/a"]) {
            assert_eq!(pair.base_path(), Path::new(folder).join("base"));
            for face in [Face::Base, Face::Views] {
                let inode = tree.inode_of(pair, face).unwrap();
                let (found, of) = tree.file(inode).unwrap();
                assert!(Arc::ptr_eq(found, pair) && of == face);
            }
            assert_eq!(tree.inode_of(pair, Face::Lane(0)), None);
        }
        for none in [0, ROOT, guests, b, tree.len() + 1, u64::MAX] {
            assert!(tree.file(none).is_none(), "{none}");
        }
    }

    #[test]
    fn the_lanes_of_a_set_lie_beside_its_base() {
        let interleaving = Some(Interleaving { interleave: "4x4K".parse().unwrap(), bandwidth: 1.0 });
        let config = DeviceConfig { interleaving, ..DeviceConfig::new(64 << 10, 4 << 20) };
        let partition = Partition::first(Arc::new(Device::new(config).unwrap()));
        let options = PairOptions { place: Place::Root, partition, cache_bytes: None };
        let pair = Arc::new(Pair::new(&options, Path::new("/m"), std::time::Duration::ZERO));
        let tree = Tree::new(vec![Arc::clone(&pair)]);
        let names: Vec<_> = tree.children(ROOT).map(|child| child.name.to_owned()).collect();
        assert_eq!(names, ["base", "views", "lane0", "lane1", "lane2", "lane3"]);
        let inode = tree.inode_of(&pair, Face::Lane(2)).unwrap();
        assert_eq!((tree.find(ROOT, "lane2"), tree.file(inode).unwrap().1), (Some(inode), Face::Lane(2)));
        assert_eq!(pair.report().lanes[3].path, Path::new("/m/lane3"));
        assert_eq!(pair.report().lanes[3].bytes, 16 << 10);
    }
}
