//! Names: what is in folders, and what they stand for.

use std::collections::BTreeSet;

use super::class::{FORMAT, KV, LOSSY};
use super::error::FileError;
use super::state::{Change, FIRST_PLACE, Meta, Node, ROOT, State, check_name};
use super::{Caller, Core, Files, now, places_of};

/// Most bytes of what a symbolic link says.
const MAX_TARGET: usize = 4095;
/// Most names of an inode.
const MAX_LINKS: u32 = 65_000;

/// What is to be made.
#[derive(Clone, Copy, Debug)]
pub struct New<'a> {
    /// Kind and permissions, as in `st_mode`.
    pub mode: u32,
    /// The device that a special file stands for.
    pub device: u32,
    /// What a symbolic link says.
    pub target: &'a [u8],
}

/// How a name moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rename {
    /// Over whatever has the new name.
    Replace,
    /// Only if nothing has it.
    Keep,
    /// What has it takes the old one.
    Exchange,
}

/// Something in a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Child {
    /// Its inode.
    pub inode: u64,
    /// Its name.
    pub name: Vec<u8>,
    /// Its kind and permissions.
    pub mode: u32,
    /// Its place: whoever goes on behind it misses nothing that stays.
    pub place: u64,
}

/// A file and one of its names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Marked {
    /// Its inode.
    pub inode: u64,
    /// One of its paths, from the folder of all on.
    pub path: Vec<u8>,
}

impl State {
    /// A path of each of these inodes that has one, by path.
    fn paths_of(&self, mut left: BTreeSet<u64>) -> Vec<Marked> {
        let (mut found, mut folders) = (Vec::new(), vec![(ROOT, Vec::new())]);
        while let Some((folder, path)) = folders.pop().filter(|_| !left.is_empty()) {
            let Ok(node) = self.folder(folder) else { continue };
            for (name, (inode, _)) in &node.names {
                let path = if path.is_empty() { name.clone() } else { [&path[..], b"/", name].concat() };
                if left.remove(inode) {
                    found.push(Marked { inode: *inode, path });
                } else if self.folder(*inode).is_ok() {
                    folders.push((*inode, path));
                }
            }
        }
        found.sort_by(|one, other| one.path.cmp(&other.path));
        found
    }
}

impl Files {
    /// The files that have a name and this attribute, by path.
    pub fn marked(&self, attribute: &[u8]) -> Vec<Marked> {
        let core = self.core.lock();
        let has = |(inode, node): (u64, &Node)| {
            (node.meta.is_file() && node.attributes.contains_key(attribute)).then_some(inode)
        };
        core.state.paths_of(core.state.nodes().filter_map(has).collect())
    }

    /// The files that have a name, and that the kernel is known to know: of these it may have
    /// pages.
    pub fn known(&self) -> Vec<Marked> {
        let core = self.core.lock();
        let known = core.live.keys().copied().filter(|inode| core.state.file(*inode).is_ok());
        core.state.paths_of(known.collect())
    }

    /// The files that have a name, and that the kernel may know: any, if another process answered
    /// before.
    pub fn may_be_known(&self) -> Vec<Marked> {
        let core = self.core.lock();
        if core.first {
            drop(core);
            return self.known();
        }
        let files = core.state.nodes().map(|(inode, _)| inode);
        core.state.paths_of(files.filter(|inode| core.state.file(*inode).is_ok()).collect())
    }

    /// The inode of a name.
    ///
    /// # Errors
    /// [`FileError::NotFound`], [`FileError::NotFolder`], [`FileError::TooLong`].
    pub fn find(&self, folder: u64, name: &[u8]) -> Result<u64, FileError> {
        self.core.lock().find(folder, name)
    }

    /// What is in a folder behind a place, at most `most`.
    ///
    /// # Errors
    /// [`FileError::NotFolder`], [`FileError::Stale`].
    pub fn children(&self, folder: u64, behind: u64, most: usize) -> Result<Vec<Child>, FileError> {
        let core = self.core.lock();
        let node = core.state.folder(folder)?;
        let children = node.order.range(behind.saturating_add(1)..).take(most).filter_map(|(place, name)| {
            let (inode, _) = *node.names.get(name)?;
            let mode = core.state.node(inode).ok()?.meta.mode;
            Some(Child { inode, name: name.clone(), mode, place: *place })
        });
        Ok(children.collect())
    }

    /// What a symbolic link says.
    ///
    /// # Errors
    /// [`FileError::Invalid`] of what is none.
    pub fn target(&self, inode: u64) -> Result<Vec<u8>, FileError> {
        let core = self.core.lock();
        let node = core.state.node(inode)?;
        if node.meta.is_link() {
            Ok(node.target.clone())
        } else {
            Err(FileError::Invalid { what: "only symbolic links say something" })
        }
    }

    /// Makes something. It has the folder's attributes for what bytes are.
    ///
    /// # Errors
    /// [`FileError::Exists`] and others.
    pub fn make(&self, caller: Caller, folder: u64, name: &[u8], new: &New<'_>) -> Result<u64, FileError> {
        let mut core = self.core.lock();
        if core.is_done(caller) {
            return core.find(folder, name);
        }
        check_name(name)?;
        if new.target.len() > MAX_TARGET {
            return Err(FileError::TooLong { length: new.target.len(), most: MAX_TARGET });
        }
        let parent = core.meta_of_folder(folder)?;
        let node = core.state.folder(folder)?;
        if node.names.contains_key(name) {
            return Err(FileError::Exists { folder });
        }
        let (inode, now) = (core.state.next(), now());
        let mut meta = Meta {
            mode: new.mode,
            uid: caller.uid,
            gid: caller.gid,
            links: 1,
            device: new.device,
            size: new.target.len() as u64,
            parent: 0,
            times: [now; 3],
        };
        if parent.mode & libc::S_ISGID != 0 {
            meta.gid = parent.gid;
        }
        let is_folder = meta.is_folder();
        if is_folder {
            (meta.links, meta.parent) = (2, folder);
            meta.mode |= parent.mode & libc::S_ISGID;
        }
        let inherits = is_folder || meta.is_file();
        let mut changes = vec![Change::Put { inode, meta }];
        if !new.target.is_empty() {
            changes.push(Change::Target { inode, target: new.target.to_vec() });
        }
        for name in [FORMAT, KV, LOSSY].into_iter().filter(|_| inherits) {
            if let Some(value) = node.attributes.get(name) {
                changes.push(Change::Attribute { inode, name: name.to_vec(), value: Some(value.clone()) });
            }
        }
        let to = Some((inode, core.free_place(folder)));
        changes.push(Change::Name { folder, name: name.to_vec(), to });
        let links = parent.links.saturating_add(is_folder.into());
        changes.push(touched(folder, Meta { links, ..parent }));
        self.commit(&mut core, changes, caller, false)?;
        let live = core.live(inode);
        // Nobody but this process ever told the kernel of it.
        (live.known, live.clean) = (true, true);
        (live.cached, live.written, live.writable) = (false, false, false);
        Ok(inode)
    }

    /// Gives an inode another name.
    ///
    /// # Errors
    /// [`FileError::NotPermitted`] of folders, [`FileError::Exists`] and others.
    pub fn link(&self, caller: Caller, inode: u64, folder: u64, name: &[u8]) -> Result<(), FileError> {
        let mut core = self.core.lock();
        if core.is_done(caller) {
            return Ok(());
        }
        check_name(name)?;
        let meta = core.meta(inode)?;
        if meta.is_folder() {
            return Err(FileError::NotPermitted { what: "a folder has one name" });
        }
        if meta.links >= MAX_LINKS {
            return Err(FileError::TooManyLinks { inode, links: meta.links });
        }
        if meta.links == 0 {
            return Err(FileError::NotFound { folder });
        }
        let parent = core.meta_of_folder(folder)?;
        if core.state.folder(folder)?.names.contains_key(name) {
            return Err(FileError::Exists { folder });
        }
        let to = Some((inode, core.free_place(folder)));
        let changes = vec![
            changed(inode, Meta { links: meta.links + 1, ..meta }),
            Change::Name { folder, name: name.to_vec(), to },
            touched(folder, parent),
        ];
        self.commit(&mut core, changes, caller, false)
    }

    /// Removes a name, of a folder if `is_folder` and else of anything but one.
    ///
    /// # Errors
    /// [`FileError::NotFound`], [`FileError::NotEmpty`] and others.
    pub fn remove(&self, caller: Caller, folder: u64, name: &[u8], is_folder: bool) -> Result<(), FileError> {
        let mut core = self.core.lock();
        if core.is_done(caller) {
            return Ok(());
        }
        let inode = core.find(folder, name)?;
        core.may_go(inode, is_folder)?;
        let parent = core.meta_of_folder(folder)?;
        let links = parent.links.saturating_sub(is_folder.into());
        let mut changes = vec![
            Change::Name { folder, name: name.to_vec(), to: None },
            touched(folder, Meta { links, ..parent }),
        ];
        let freed = core.lose_name(inode, &mut changes)?;
        self.commit(&mut core, changes, caller, true)?;
        drop(core);
        if let Some(freed) = freed {
            self.free(inode, freed);
        }
        Ok(())
    }

    /// Moves a name.
    ///
    /// # Errors
    /// [`FileError::NotFound`], [`FileError::NotEmpty`] and others.
    pub fn rename(
        &self,
        caller: Caller,
        (from, old): (u64, &[u8]),
        (to, new): (u64, &[u8]),
        how: Rename,
    ) -> Result<(), FileError> {
        let mut core = self.core.lock();
        if core.is_done(caller) {
            return Ok(());
        }
        check_name(new)?;
        let inode = core.find(from, old)?;
        let other = match core.find(to, new) {
            Ok(other) => Some(other),
            Err(FileError::NotFound { .. }) => None,
            Err(why) => return Err(why),
        };
        match (how, other) {
            (Rename::Keep, Some(_)) => return Err(FileError::Exists { folder: to }),
            (Rename::Exchange, None) => return Err(FileError::NotFound { folder: to }),
            // Two names of one thing stay both.
            (_, Some(other)) if other == inode => return Ok(()),
            _ => {}
        }
        let is_folder = core.state.node(inode)?.meta.is_folder();
        let other_is_folder = match other {
            Some(other) => core.state.node(other)?.meta.is_folder(),
            None => false,
        };
        if is_folder {
            core.not_inside(inode, to)?;
        }
        if how == Rename::Exchange && other_is_folder {
            core.not_inside(other.unwrap_or(ROOT), from)?;
        }
        if let Some(other) = other.filter(|_| how == Rename::Replace) {
            core.may_go(other, is_folder)?;
        }
        let (mut source, mut goal) = (core.meta_of_folder(from)?, core.meta_of_folder(to)?);
        let mut changes = Vec::new();
        let moved = |name: &[u8], folder, to| Change::Name { folder, name: name.to_vec(), to };
        let place_of = |folder, name: &[u8]| -> Result<u64, FileError> {
            Ok(core.state.folder(folder)?.names.get(name).map_or(0, |(_, place)| *place))
        };
        let (here, there) = (place_of(from, old)?, place_of(to, new)?);
        // Behind all others only where it has to be: who lists a folder, and renames what is
        // listed, would be given all of it again, for ever.
        let place = match other {
            Some(_) => there,
            None if from == to => here,
            None => core.free_place(to),
        };
        let mut freed = None;
        if how == Rename::Exchange {
            // Each takes the other's place.
            changes.push(moved(old, from, None));
            changes.push(moved(new, to, Some((inode, there))));
            changes.push(moved(old, from, other.map(|other| (other, here))));
            if other_is_folder {
                (source.links, goal.links) = (source.links.saturating_add(1), goal.links.saturating_sub(1));
            }
            if let Some(other) = other {
                let parent = if other_is_folder { from } else { 0 };
                changes.push(changed(other, Meta { parent, ..core.meta(other)? }));
            }
        } else {
            changes.push(moved(old, from, None));
            changes.push(moved(new, to, Some((inode, place))));
            if let Some(other) = other {
                freed = core.lose_name(other, &mut changes)?.map(|freed| (other, freed));
                goal.links = goal.links.saturating_sub(other_is_folder.into());
            }
        }
        if is_folder {
            (source.links, goal.links) = (source.links.saturating_sub(1), goal.links.saturating_add(1));
        }
        let parent = if is_folder { to } else { 0 };
        changes.push(changed(inode, Meta { parent, ..core.meta(inode)? }));
        if from == to {
            // What one gains the other loses: both are the same folder.
            let was = core.meta_of_folder(from)?.links;
            let links = source.links.saturating_add(goal.links).saturating_sub(was);
            changes.push(touched(from, Meta { links, ..source }));
        } else {
            changes.push(touched(from, source));
            changes.push(touched(to, goal));
        }
        // A longer name takes more room for good.
        let frees = other.is_some() || new.len() <= old.len();
        self.commit(&mut core, changes, caller, frees)?;
        drop(core);
        if let Some((other, freed)) = freed {
            self.free(other, freed);
        }
        Ok(())
    }
}

impl Core {
    pub(crate) fn is_done(&self, caller: Caller) -> bool {
        caller.request & super::SENT_AGAIN != 0 && self.state.is_done(caller.request & !super::SENT_AGAIN)
    }

    fn find(&self, folder: u64, name: &[u8]) -> Result<u64, FileError> {
        check_name(name)?;
        let found = self.state.folder(folder)?.names.get(name);
        found.map(|(inode, _)| *inode).ok_or(FileError::NotFound { folder })
    }

    /// What is told of a folder in which names may be made.
    fn meta_of_folder(&self, folder: u64) -> Result<Meta, FileError> {
        let meta = self.state.folder(folder)?.meta.clone();
        if meta.links == 0 { Err(FileError::NotFound { folder }) } else { Ok(meta) }
    }

    /// A place behind all names of a folder.
    fn free_place(&self, folder: u64) -> u64 {
        let last = self.state.folder(folder).ok().and_then(|node| node.order.last_key_value());
        last.map_or(FIRST_PLACE, |(place, _)| place + 1)
    }

    /// Refuses what cannot lose its name as this.
    fn may_go(&self, inode: u64, is_folder: bool) -> Result<(), FileError> {
        let node = self.state.node(inode)?;
        match (node.meta.is_folder(), is_folder) {
            (true, false) => Err(FileError::IsFolder { inode }),
            (false, true) => Err(FileError::NotFolder { inode }),
            (true, true) if !node.names.is_empty() => Err(FileError::NotEmpty { inode }),
            _ => Ok(()),
        }
    }

    /// Adds that an inode loses a name: where it lies, if nothing of it stays.
    fn lose_name(
        &mut self,
        inode: u64,
        changes: &mut Vec<Change>,
    ) -> Result<Option<Vec<std::ops::Range<u64>>>, FileError> {
        let meta = self.meta(inode)?;
        let links = if meta.is_folder() { 0 } else { meta.links.saturating_sub(1) };
        if links == 0 && !meta.is_folder() && self.is_unused(inode, meta.is_file()) {
            changes.push(Change::Drop { inode });
            return Ok(Some(places_of(self.state.node(inode)?)));
        }
        changes.push(changed(inode, Meta { links, ..meta }));
        Ok(None)
    }

    /// Refuses to move a folder into itself.
    fn not_inside(&self, folder: u64, mut to: u64) -> Result<(), FileError> {
        for _ in 0..self.state.len() {
            if to == folder {
                return Err(FileError::Invalid { what: "a folder cannot be moved into itself" });
            }
            if to == ROOT || to == 0 {
                return Ok(());
            }
            to = self.state.folder(to)?.meta.parent;
        }
        Err(FileError::Damaged { why: format!("folder {to} is in itself") })
    }
}

/// Says that a folder has other names in it.
fn touched(inode: u64, mut meta: Meta) -> Change {
    let now = now();
    (meta.times[1], meta.times[2]) = (now, now);
    Change::Put { inode, meta }
}

/// Says that something about an inode was changed.
fn changed(inode: u64, mut meta: Meta) -> Change {
    meta.times[2] = now();
    Change::Put { inode, meta }
}
