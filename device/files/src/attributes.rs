//! Modes, owners, times and extended attributes.
//!
//! `user.lamina.format`, `user.lamina.kv` and `user.lamina.lossy` of a file say what its bytes are,
//! and how they are kept. Setting or removing one codes the file anew, all of it, before the call
//! returns. Of a folder they are for what is made in it later.

use super::class::{Class, FORMAT, KV, LOSSY};
use super::error::FileError;
use super::parts::PART;
use super::state::{Change, Meta, Time};
use super::{Caller, Files, now};

/// Bytes that are stored of a file.
const STORED: &[u8] = b"user.lamina.stored";
/// Its bytes by those.
const RATIO: &[u8] = b"user.lamina.ratio";
/// What the names of all attributes of the device's own begin with.
const OWN: &[u8] = b"user.lamina.";
/// Marks a file as a pool, for who serves it.
pub const POOL: &[u8] = b"user.lamina.pool";
/// Most bytes of the names and values of an inode's attributes.
const MAX_BYTES: usize = 64 << 10;
/// Most bytes of an attribute's name.
const MAX_ATTRIBUTE_NAME: usize = 255;

/// What is to be told otherwise of an inode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Permissions.
    pub mode: Option<u32>,
    /// The owner.
    pub uid: Option<u32>,
    /// The group.
    pub gid: Option<u32>,
    /// Bytes.
    pub size: Option<u64>,
    /// When it was accessed.
    pub accessed: Option<When>,
    /// When it was modified.
    pub modified: Option<When>,
    /// Whether what lets it run as somebody else goes.
    pub drops_privileges: bool,
}

/// A time that is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// At this moment.
    Now,
    /// This one.
    At(Time),
}

impl When {
    fn time(self) -> Time {
        match self {
            Self::Now => now(),
            Self::At(time) => time,
        }
    }
}

impl Files {
    /// Tells otherwise of an inode, all at once: what is told of it then. To want nothing is to
    /// give it to the owner that it has.
    ///
    /// # Errors
    /// What the device says.
    pub fn set(&self, inode: u64, wanted: &Wanted) -> Result<Meta, FileError> {
        let change = |meta: &mut Meta| {
            if let Some(mode) = wanted.mode {
                meta.mode = meta.mode & libc::S_IFMT | mode & 0o7777;
            }
            meta.uid = wanted.uid.unwrap_or(meta.uid);
            meta.gid = wanted.gid.unwrap_or(meta.gid);
            if !meta.is_folder() && (wanted.drops_privileges || *wanted == Wanted::default()) {
                without_privileges(meta);
            }
            // Also where the size stays.
            if wanted.size.is_some() {
                meta.times[1] = now();
            }
            if let Some(accessed) = wanted.accessed {
                meta.times[0] = accessed.time();
            }
            if let Some(modified) = wanted.modified {
                meta.times[1] = modified.time();
            }
            meta.times[2] = now();
        };
        if let Some(size) = wanted.size {
            self.resize(inode, size, change)?;
        } else {
            let mut core = self.core.lock();
            let mut meta = core.meta(inode)?;
            change(&mut meta);
            self.commit(&mut core, vec![Change::Put { inode, meta }], Caller::default(), true)?;
        }
        self.meta(inode)
    }

    /// Clears what lets a file run as somebody else: it was written to.
    ///
    /// # Errors
    /// What the device says.
    pub fn drop_privileges(&self, inode: u64) -> Result<(), FileError> {
        let mut core = self.core.lock();
        let mut meta = core.meta(inode)?;
        let before = meta.mode;
        without_privileges(&mut meta);
        if meta.mode == before {
            return Ok(());
        }
        self.commit(&mut core, vec![Change::Put { inode, meta }], Caller::default(), true)
    }

    /// An extended attribute.
    ///
    /// # Errors
    /// [`FileError::NoAttribute`].
    pub fn attribute(&self, inode: u64, name: &[u8]) -> Result<Vec<u8>, FileError> {
        let none = FileError::NoAttribute { inode };
        let size = {
            let core = self.core.lock();
            let node = core.state.node(inode)?;
            if let Some(value) = node.attributes.get(name) {
                return Ok(value.clone());
            }
            if ![STORED, RATIO].contains(&name) || !node.meta.is_file() {
                return Err(none);
            }
            node.meta.size
        };
        let stored = self.stored(inode)?;
        match name {
            STORED => Ok(stored.to_string().into_bytes()),
            _ if stored == 0 => Err(none),
            _ => {
                let thousandths = u128::from(size) * 1000 / u128::from(stored);
                Ok(format!("{}.{:03}", thousandths / 1000, thousandths % 1000).into_bytes())
            }
        }
    }

    /// The names of an inode's extended attributes, each with a zero behind it.
    ///
    /// # Errors
    /// [`FileError::Stale`].
    pub fn attribute_names(&self, inode: u64) -> Result<Vec<u8>, FileError> {
        let core = self.core.lock();
        let node = core.state.node(inode)?;
        // Not what is told and cannot be set, nor what an earlier program let be set: who copies
        // all that is listed would fail with it. A class is of a part, and is not kept by its name.
        let listed = node.attributes.keys().filter(|name| *name != PART && check_name(name).is_ok());
        Ok(listed.flat_map(|name| name.iter().copied().chain([0])).collect())
    }

    /// Sets an extended attribute: only if it is there or is not, if `there` says so.
    ///
    /// # Errors
    /// [`FileError::Unsupported`] of names of other kinds, [`FileError::Invalid`] of names that
    /// only look like the device's own, [`FileError::AttributesTooLarge`]; as
    /// [`Self::remove_attribute`].
    pub fn set_attribute(
        &self,
        caller: Caller,
        inode: u64,
        name: &[u8],
        value: &[u8],
        there: Option<bool>,
    ) -> Result<(), FileError> {
        check_name(name).inspect_err(|_| {
            if name.starts_with(OWN) {
                let name = String::from_utf8_lossy(name);
                tracing::warn!(
                    "{name} is refused: user.lamina. has format, kv, lossy, class and pool to set"
                );
            }
        })?;
        if name == PART {
            return self.set_class(caller, inode, value);
        }
        {
            let core = self.core.lock();
            if core.is_done(caller) {
                return Ok(());
            }
            let node = core.state.node(inode)?;
            let others = node.attributes.iter().filter(|(other, _)| other.as_slice() != name);
            // A list of the names has a zero behind each, and a longer one the kernel takes from
            // nobody.
            let bytes = others.map(|(name, value)| name.len() + 1 + value.len()).sum::<usize>()
                + name.len()
                + 1
                + value.len();
            if bytes > MAX_BYTES {
                return Err(FileError::AttributesTooLarge { bytes, most: MAX_BYTES });
            }
            match (there, node.attributes.contains_key(name)) {
                (Some(false), true) => return Err(FileError::AttributeExists { inode }),
                (Some(true), false) => return Err(FileError::NoAttribute { inode }),
                _ => {}
            }
        }
        self.change_attribute(caller, inode, name, Some(value))
    }

    /// Removes an extended attribute.
    ///
    /// # Errors
    /// [`FileError::NoAttribute`]; [`FileError::is_no_room`] if the file would have to be coded
    /// anew and there is no room for that. Then nothing changed.
    pub fn remove_attribute(&self, caller: Caller, inode: u64, name: &[u8]) -> Result<(), FileError> {
        {
            let core = self.core.lock();
            if core.is_done(caller) {
                return Ok(());
            }
            if !core.state.node(inode)?.attributes.contains_key(name) {
                return Err(FileError::NoAttribute { inode });
            }
        }
        self.change_attribute(caller, inode, name, None)
    }

    fn change_attribute(
        &self,
        caller: Caller,
        inode: u64,
        name: &[u8],
        value: Option<&[u8]>,
    ) -> Result<(), FileError> {
        let change = Change::Attribute { inode, name: name.to_vec(), value: value.map(<[u8]>::to_vec) };
        if [FORMAT, KV, LOSSY].contains(&name) {
            let (is_file, before, after) = {
                let core = self.core.lock();
                let node = core.state.node(inode)?;
                let of = |which: &[u8]| {
                    if which == name { value } else { node.attributes.get(which).map(Vec::as_slice) }
                };
                (node.meta.is_file(), node.class(), Class::new(of)?)
            };
            if is_file && before != after {
                return self.recode(caller, inode, &after, change);
            }
        }
        let mut core = self.core.lock();
        let mut meta = core.meta(inode)?;
        meta.times[2] = now();
        let changes = vec![change, Change::Put { inode, meta }];
        self.commit(&mut core, changes, caller, value.is_none())
    }
}

/// Refuses a name that no attribute can be set by.
fn check_name(name: &[u8]) -> Result<(), FileError> {
    // Not `security`: what a capability lets a file do would have to go with each write.
    let known: [&[u8]; 2] = [b"user.", b"trusted."];
    if !known.iter().any(|kind| name.starts_with(kind) && name.len() > kind.len()) {
        return Err(FileError::Unsupported { what: "an attribute of this kind" });
    }
    if [STORED, RATIO].contains(&name) {
        return Err(FileError::NotPermitted { what: "what is stored is not set" });
    }
    if name.starts_with(OWN) && ![FORMAT, KV, LOSSY, PART, POOL].contains(&name) {
        return Err(FileError::Invalid { what: "user.lamina. has no such attribute to set" });
    }
    if name.len() > MAX_ATTRIBUTE_NAME {
        return Err(FileError::TooLong { length: name.len(), most: MAX_ATTRIBUTE_NAME });
    }
    Ok(())
}

/// As the kernel has it: the user's bit goes, and the group's where the group may run it.
fn without_privileges(meta: &mut Meta) {
    meta.mode &= !libc::S_ISUID;
    if meta.mode & libc::S_IXGRP != 0 {
        meta.mode &= !libc::S_ISGID;
    }
}
