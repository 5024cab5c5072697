//! The folders and files of the mount, fixed from its beginning to its end.
//!
//! Inodes are numbers from 1, the root. A folder comes before what is in it, a pair's `base` right before its `views`.

use std::sync::Arc;

use crate::device::Window;

use super::pair::Pair;

/// Inode of the root.
const ROOT: u64 = 1;

/// What lies where.
pub(crate) struct Tree {
    /// By inode, from 1.
    nodes: Vec<Node>,
    pairs: Vec<Arc<Pair>>,
}

struct Node {
    parent: u64,
    name: String,
    /// The pair and the window, of a file.
    file: Option<(usize, Window)>,
}

impl Tree {
    /// The tree of these pairs.
    pub(crate) fn new(pairs: Vec<Arc<Pair>>) -> Self {
        let mut tree =
            Self { nodes: vec![Node { parent: ROOT, name: String::new(), file: None }], pairs: Vec::new() };
        for (index, pair) in pairs.iter().enumerate() {
            let folder = pair.place().folders().into_iter().fold(ROOT, |parent, name| {
                tree.find(parent, name).unwrap_or_else(|| tree.add(parent, name, None))
            });
            tree.add(folder, "base", Some((index, Window::Base)));
            tree.add(folder, "views", Some((index, Window::Views)));
        }
        tree.pairs = pairs;
        tree
    }

    fn add(&mut self, parent: u64, name: &str, file: Option<(usize, Window)>) -> u64 {
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
    pub(super) fn file(&self, inode: u64) -> Option<(&Arc<Pair>, Window)> {
        let (pair, window) = self.node(inode)?.file?;
        Some((&self.pairs[pair], window))
    }

    /// The inode of a pair's window.
    pub(super) fn inode_of(&self, pair: &Arc<Pair>, window: Window) -> Option<u64> {
        let is = |node: &Node| {
            node.file.is_some_and(|(at, of)| of == window && Arc::ptr_eq(&self.pairs[at], pair))
        };
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
    use crate::device::{Device, DeviceConfig, Partition};

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
            for window in [Window::Base, Window::Views] {
                let inode = tree.inode_of(pair, window).unwrap();
                let (found, of) = tree.file(inode).unwrap();
                assert!(Arc::ptr_eq(found, pair) && of == window);
            }
        }
        for none in [0, ROOT, guests, b, tree.len() + 1, u64::MAX] {
            assert!(tree.file(none).is_none(), "{none}");
        }
    }
}
