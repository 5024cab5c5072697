//! What the file system knows: inodes, names, extents and attributes, and the changes that make it.
//!
//! It is memory only. A state is what the changes so far make of an empty one, in the order of the
//! log; so a crash leaves the state that a beginning of the log makes.

use std::collections::{BTreeMap, HashMap, VecDeque};

use lamina_codec::BLOCK_BYTES;

use super::class::Class;
use super::error::FileError;
use super::extents::Extents;

/// Seconds and nanoseconds.
pub type Time = (i64, u32);
/// The folder that everything is in.
pub const ROOT: u64 = 1;
/// Most bytes of a name.
pub const MAX_NAME: usize = 255;
/// Most bytes of a file.
pub(crate) const MAX_SIZE: u64 = i64::MAX as u64 - (1 << 30);
/// The place of the first name in a folder: `.` and `..` are before it.
pub(crate) const FIRST_PLACE: u64 = 3;
/// Requests that are remembered as done. A mount has fewer in flight than that.
const DONE: usize = 1024;
/// Numbers of inodes are less: the mount has bits of its own above.
pub(crate) const INODES: u64 = 1 << 61;
/// Places in a folder are less: the kernel has a sign there.
const PLACES: u64 = 1 << 63;

/// What is told of an inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meta {
    /// Kind and permissions, as in `st_mode`.
    pub mode: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// Names that it has; of a folder, two and one for each folder in it.
    pub links: u32,
    /// The device that a special file stands for.
    pub device: u32,
    /// Its bytes.
    pub size: u64,
    /// The folder that a folder is in.
    pub parent: u64,
    /// When it was accessed, modified and changed.
    pub times: [Time; 3],
}

impl Meta {
    /// Whether it is a folder.
    pub fn is_folder(&self) -> bool {
        self.mode & libc::S_IFMT == libc::S_IFDIR
    }

    /// Whether it holds bytes.
    pub fn is_file(&self) -> bool {
        self.mode & libc::S_IFMT == libc::S_IFREG
    }

    /// Whether it is a symbolic link.
    pub fn is_link(&self) -> bool {
        self.mode & libc::S_IFMT == libc::S_IFLNK
    }
}

/// One thing that changes. A record of the log is some of these, all or none of which count.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// An inode is made, or told otherwise of.
    Put { inode: u64, meta: Meta },
    /// An inode is no more.
    Drop { inode: u64 },
    /// A name in a folder stands for an inode, at a place in the folder's order, or is no more.
    Name { folder: u64, name: Vec<u8>, to: Option<(u64, u64)> },
    /// A hole of a file lies somewhere.
    Map { inode: u64, at: u64, dpa: u64, length: u64 },
    /// A range of a file lies nowhere.
    Cut { inode: u64, at: u64, length: u64 },
    /// An extended attribute.
    Attribute { inode: u64, name: Vec<u8>, value: Option<Vec<u8>> },
    /// What a symbolic link says.
    Target { inode: u64, target: Vec<u8> },
    /// The least number that no inode has had.
    Next { inode: u64 },
    /// A request of the kernel was done with this record. Of 0, which none has, that those before
    /// were another mount's.
    Done { request: u64 },
}

/// An inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) meta: Meta,
    pub(crate) extents: Extents,
    pub(crate) attributes: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(crate) target: Vec<u8>,
    /// The inode and the place of each name.
    pub(crate) names: BTreeMap<Vec<u8>, (u64, u64)>,
    /// The names by place.
    pub(crate) order: BTreeMap<u64, Vec<u8>>,
}

impl Node {
    /// What its bytes are, as its attributes say.
    pub(crate) fn class(&self) -> Class {
        // They were checked when they were set.
        Class::new(|name| self.attributes.get(name).map(Vec::as_slice)).unwrap_or(Class::OPAQUE)
    }
}

/// All inodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    nodes: HashMap<u64, Node>,
    next: u64,
    done: VecDeque<u64>,
}

impl State {
    pub(crate) fn node(&self, inode: u64) -> Result<&Node, FileError> {
        self.nodes.get(&inode).ok_or(FileError::Stale { inode })
    }

    /// A folder.
    pub(crate) fn folder(&self, inode: u64) -> Result<&Node, FileError> {
        let node = self.node(inode)?;
        if node.meta.is_folder() { Ok(node) } else { Err(FileError::NotFolder { inode }) }
    }

    /// A file that holds bytes.
    pub(crate) fn file(&self, inode: u64) -> Result<&Node, FileError> {
        let node = self.node(inode)?;
        match &node.meta {
            meta if meta.is_file() => Ok(node),
            meta if meta.is_folder() => Err(FileError::IsFolder { inode }),
            _ => Err(FileError::Invalid { what: "only files hold bytes" }),
        }
    }

    /// All inodes and their numbers.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = (u64, &Node)> {
        self.nodes.iter().map(|(inode, node)| (*inode, node))
    }

    pub(crate) fn len(&self) -> u64 {
        self.nodes.len() as u64
    }

    /// A number that no inode has had.
    pub(crate) fn next(&self) -> u64 {
        self.next.max(ROOT + 1)
    }

    /// Whether a request was done.
    pub(crate) fn is_done(&self, request: u64) -> bool {
        self.done.contains(&request)
    }

    /// Whether any request is remembered as done.
    pub(crate) fn has_done(&self) -> bool {
        !self.done.is_empty()
    }

    /// Refuses what no log of this program makes, and who serves it cannot do without, of a log of
    /// so many bytes at a DPA.
    pub(crate) fn check(&self, (dpa, length): (u64, u64)) -> Result<(), FileError> {
        if self.folder(ROOT).is_err() {
            let why = format!(
                "it has no folder of all, so its records behind {dpa:#x} are gone; a snapshot from before has the names, \
                 `lamina discard {dpa} {length}` begins files/ anew, with nothing in it, when the device is started next"
            );
            return Err(FileError::Damaged { why });
        }
        let named = self.nodes.values().flat_map(|node| node.names.values());
        match named.map(|(inode, _)| *inode).find(|inode| !self.nodes.contains_key(inode)) {
            Some(inode) => {
                Err(FileError::Damaged { why: format!("a name stands for inode {inode}, which is none") })
            }
            None => Ok(()),
        }
    }

    /// Makes a change. What cannot be was not written by this program.
    pub(crate) fn apply(&mut self, change: Change) -> Result<(), FileError> {
        let damaged = |why: String| FileError::Damaged { why };
        match change {
            Change::Put { inode, meta } => {
                if !(ROOT..INODES).contains(&inode) || meta.size > MAX_SIZE {
                    let size = meta.size;
                    return Err(damaged(format!("inode {inode} of {size} bytes cannot be")));
                }
                self.next = self.next.max(inode.saturating_add(1));
                if let Some(node) = self.nodes.get_mut(&inode) {
                    node.meta = meta;
                } else {
                    let node = Node {
                        meta,
                        extents: Extents::default(),
                        attributes: BTreeMap::new(),
                        target: Vec::new(),
                        names: BTreeMap::new(),
                        order: BTreeMap::new(),
                    };
                    self.nodes.insert(inode, node);
                }
            }
            Change::Drop { inode } => {
                self.nodes.remove(&inode);
            }
            Change::Name { folder, name, to } => {
                if check_name(&name).is_err() || to.is_some_and(|(_, place)| place >= PLACES) {
                    return Err(damaged(format!("a name of {} bytes cannot be", name.len())));
                }
                let folder = self.known(folder)?;
                if let Some((_, place)) = folder.names.remove(&name) {
                    folder.order.remove(&place);
                }
                if let Some((inode, place)) = to {
                    if folder.order.insert(place, name.clone()).is_some() {
                        return Err(damaged(format!("two names at place {place} of a folder")));
                    }
                    folder.names.insert(name, (inode, place));
                }
            }
            Change::Map { inode, at, dpa, length } => {
                let Some(end) = at.checked_add(length).filter(|_| dpa.checked_add(length).is_some()) else {
                    return Err(damaged(format!("{length} bytes at {at} pass the last address")));
                };
                if [at, dpa, length].iter().any(|number| !number.is_multiple_of(BLOCK_BYTES as u64)) {
                    return Err(damaged(format!("{length} bytes at {at} are no whole blocks")));
                }
                let node = self.known(inode)?;
                if length == 0 || node.extents.bytes_in(&(at..end)) > 0 {
                    return Err(damaged(format!(
                        "{length} bytes at {at} of inode {inode} lie in two places"
                    )));
                }
                node.extents.insert(at, dpa, length);
            }
            Change::Cut { inode, at, length } => {
                self.known(inode)?.extents.cut(&(at..at.saturating_add(length)));
            }
            Change::Attribute { inode, name, value } => {
                let attributes = &mut self.known(inode)?.attributes;
                match value {
                    Some(value) => attributes.insert(name, value),
                    None => attributes.remove(&name),
                };
            }
            Change::Target { inode, target } => self.known(inode)?.target = target,
            Change::Next { inode } => self.next = self.next.max(inode),
            Change::Done { request: 0 } => self.done.clear(),
            Change::Done { request } => {
                if self.done.len() == DONE {
                    self.done.pop_front();
                }
                self.done.push_back(request);
            }
        }
        Ok(())
    }

    fn known(&mut self, inode: u64) -> Result<&mut Node, FileError> {
        let unknown =
            || FileError::Damaged { why: format!("it tells of inode {inode}, which it did not make") };
        self.nodes.get_mut(&inode).ok_or_else(unknown)
    }

    /// The changes that make this state, in parts of which each may be a record.
    pub(crate) fn as_changes(&self) -> impl Iterator<Item = Vec<Change>> {
        let mut inodes: Vec<_> = self.nodes.keys().copied().collect();
        inodes.sort_unstable();
        let done = self.done.iter().map(|request| Change::Done { request: *request });
        let first = std::iter::once(Change::Next { inode: self.next }).chain(done).collect();
        std::iter::once(first).chain(inodes.into_iter().map(|inode| {
            let node = &self.nodes[&inode];
            let put = Change::Put { inode, meta: node.meta.clone() };
            let target =
                (!node.target.is_empty()).then(|| Change::Target { inode, target: node.target.clone() });
            let maps = node.extents.all().map(|(at, dpa, length)| Change::Map { inode, at, dpa, length });
            let attributes = node.attributes.iter().map(|(name, value)| {
                let (name, value) = (name.clone(), Some(value.clone()));
                Change::Attribute { inode, name, value }
            });
            let names = node.names.iter().map(|(name, to)| Change::Name {
                folder: inode,
                name: name.clone(),
                to: Some(*to),
            });
            std::iter::once(put).chain(target).chain(maps).chain(attributes).chain(names).collect()
        }))
    }
}

pub(crate) fn check_name(name: &[u8]) -> Result<(), FileError> {
    let length = name.len();
    if length > MAX_NAME {
        return Err(FileError::TooLong { length, most: MAX_NAME });
    }
    if name.is_empty() || name.iter().any(|byte| [b'/', 0].contains(byte)) || name == b"." || name == b".." {
        return Err(FileError::Invalid { what: "this cannot be a name" });
    }
    Ok(())
}
