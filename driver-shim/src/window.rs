//! A window: one memory device, mapped whole.
//!
//! Rules:
//!
//! * A window is a devdax node in a guest, or any file a process can map (the device's own FUSE
//!   files on a host, an ordinary file in a test).
//! * It may also be a range that a driver's file shows ([`crate::shmem`]).
//! * It is mapped once, shared, from 0 to its end: for devdax that is a multiple of its `align`,
//!   and mapping costs address space only. Memory is touched by loads and stores alone.
//! * Other programs, other CPUs and the device change the bytes at any time. So no `&[u8]` of it is
//!   ever handed out, only a [`Span`], whose copies are volatile, or its raw pointer.
//! * Every offset and length is checked against the window's own length before an address is made
//!   of it.

use std::{
    fs::{File, OpenOptions},
    io::{self, Seek, SeekFrom},
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

use memmap2::{MmapOptions, MmapRaw};
use vm_memory::VolatileSlice;

use crate::{
    shmem::{self, Shared},
    sysfs::Tree,
    topology::Role,
};

/// What a mapping may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Loads.
    Read,
    /// Loads and stores.
    ReadWrite,
}

/// A mapped window.
#[derive(Debug)]
pub struct Window {
    path: PathBuf,
    map: MmapRaw,
    bytes: u64,
    align: u64,
    access: Access,
}

/// Why a window or a part of it cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum WindowError {
    /// The file could not be opened.
    #[error("cannot open the window {path}: {cause}; is the path right, and are you root?")]
    Open {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        cause: io::Error,
    },
    /// The size could not be found, or is zero or beyond this machine's addresses.
    #[error("the window {path} has no usable size: {why}")]
    Size {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The file could not be mapped.
    #[error("cannot map {bytes} bytes of the window {path} ({access:?}): {cause}")]
    Map {
        /// The file.
        path: PathBuf,
        /// The window's length.
        bytes: u64,
        /// What the mapping should have allowed.
        access: Access,
        /// The kernel's error.
        cause: io::Error,
    },
    /// The driver maps no such range into the machine.
    #[error("{path} does not map the {role} window, {bytes} bytes: {cause}{}", few(cause))]
    Refused {
        /// The driver's file.
        path: PathBuf,
        /// Which window.
        role: Role,
        /// The window's length.
        bytes: u64,
        /// The kernel's error.
        cause: io::Error,
    },
    /// A range that passes the end.
    #[error("bytes {offset} + {length} pass the end of {what}, which has {bytes} bytes")]
    End {
        /// What the range was meant to lie in.
        what: String,
        /// Start of the range.
        offset: u64,
        /// Length of the range.
        length: u64,
        /// Length of what it should lie in.
        bytes: u64,
    },
    /// A store through a mapping made for loads.
    #[error("{path} is mapped for loads only: views are read-only, write the tensor through `base`")]
    ReadOnly {
        /// The file.
        path: PathBuf,
    },
}

impl Window {
    /// Maps the whole of `path`. `tree` tells the size of a devdax node.
    ///
    /// # Errors
    /// [`WindowError::Open`], [`WindowError::Size`], [`WindowError::Map`].
    pub fn open(path: &Path, access: Access, tree: &Tree) -> Result<Self, WindowError> {
        let mut file = OpenOptions::new()
            .read(true)
            .write(access == Access::ReadWrite)
            .open(path)
            .map_err(|cause| WindowError::Open { path: path.into(), cause })?;
        let bad = |why: String| WindowError::Size { path: path.into(), why };
        let (bytes, align) = measure(&mut file, tree).map_err(|error| bad(error.to_string()))?;
        if bytes == 0 {
            return Err(bad("it is empty".into()));
        }
        let length = usize::try_from(bytes)
            .ok()
            .filter(|length| isize::try_from(*length).is_ok())
            .ok_or_else(|| bad(format!("{bytes} bytes cannot be mapped by this machine")))?;
        let mut options = MmapOptions::new();
        options.len(length);
        let map = match access {
            Access::Read => options.map_raw_read_only(&file),
            Access::ReadWrite => options.map_raw(&file),
        }
        .map_err(|cause| WindowError::Map { path: path.into(), bytes, access, cause })?;
        Ok(Self { path: path.into(), map, bytes, align, access })
    }

    /// Maps the whole window of `role` through a driver's file, see [`shmem`].
    pub(crate) fn of_driver(node: &Path, role: Role, access: Access) -> Result<Self, WindowError> {
        let (shared, map) = shmem::place(node, role)?;
        Self::of_mapping(&shared, map.at, map.length, access)
    }

    /// Maps what a driver shows at `at`.
    ///
    /// # Errors
    /// [`WindowError::Size`], [`WindowError::Map`].
    pub fn of_mapping(shared: &Shared, at: u64, bytes: u64, access: Access) -> Result<Self, WindowError> {
        let path = shared.path();
        let length = usize::try_from(bytes).ok().filter(|length| isize::try_from(*length).is_ok());
        let length = length.ok_or_else(|| WindowError::Size {
            path: path.into(),
            why: format!("{bytes} bytes cannot be mapped by this machine"),
        })?;
        let mut options = MmapOptions::new();
        options.offset(at).len(length);
        let map = match access {
            Access::Read => options.map_raw_read_only(shared.file()),
            Access::ReadWrite => options.map_raw(shared.file()),
        }
        .map_err(|cause| WindowError::Map { path: path.into(), bytes, access, cause })?;
        Ok(Self { path: path.into(), map, bytes, align: rustix::param::page_size() as u64, access })
    }

    /// The file behind the window.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What offsets and lengths of a mapping of one's own must be multiples of, in bytes.
    pub fn align(&self) -> u64 {
        self.align
    }

    /// Whether stores are possible.
    pub fn access(&self) -> Access {
        self.access
    }

    /// `length` bytes at `offset`.
    ///
    /// # Errors
    /// [`WindowError::End`].
    pub fn span(&self, offset: u64, length: u64) -> Result<Span<'_>, WindowError> {
        let end = || WindowError::End {
            what: format!("the window {}", self.path.display()),
            offset,
            length,
            bytes: self.bytes,
        };
        if !fits(offset, length, self.bytes) {
            return Err(end());
        }
        // SAFETY: the mapping is `self.map.len()` = `self.bytes` bytes long, and lives as long as
        // the borrow of `self` that the span carries. Nothing else in this process makes references
        // into it.
        let whole = unsafe { VolatileSlice::new(self.map.as_mut_ptr(), self.map.len()) };
        let (Ok(start), Ok(count)) = (usize::try_from(offset), usize::try_from(length)) else {
            return Err(end());
        };
        let slice = whole.subslice(start, count).map_err(|_| end())?;
        Ok(Span { slice, window: self })
    }
}

/// A checked part of a window: the pointer that the shim hands out.
#[derive(Clone, Copy, Debug)]
pub struct Span<'w> {
    slice: VolatileSlice<'w>,
    window: &'w Window,
}

impl<'w> Span<'w> {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.slice.len()
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.slice.is_empty()
    }

    /// The address of the first byte, valid for [`Span::len`] bytes while the window lives. The
    /// bytes change under the reader's hands: make no Rust reference of it. Stores need a window
    /// with [`Access::ReadWrite`].
    pub fn as_ptr(&self) -> *mut u8 {
        self.slice.ptr_guard_mut().as_ptr()
    }

    /// The same memory as `vm-memory` knows it, for loads.
    pub fn volatile(&self) -> VolatileSlice<'w> {
        self.slice
    }

    /// `length` bytes at `offset` of this span.
    ///
    /// # Errors
    /// [`WindowError::End`].
    pub fn part(&self, offset: u64, length: u64) -> Result<Span<'w>, WindowError> {
        let bytes = self.slice.len() as u64;
        let end = || WindowError::End { what: "the view".into(), offset, length, bytes };
        if !fits(offset, length, bytes) {
            return Err(end());
        }
        let (Ok(start), Ok(count)) = (usize::try_from(offset), usize::try_from(length)) else {
            return Err(end());
        };
        let slice = self.slice.subslice(start, count).map_err(|_| end())?;
        Ok(Span { slice, window: self.window })
    }

    /// Loads `into.len()` bytes at `offset`.
    ///
    /// # Errors
    /// [`WindowError::End`].
    pub fn load(&self, offset: u64, into: &mut [u8]) -> Result<(), WindowError> {
        self.part(offset, into.len() as u64)?.slice.copy_to(into);
        Ok(())
    }

    /// Stores `from` at `offset`.
    ///
    /// # Errors
    /// [`WindowError::ReadOnly`], [`WindowError::End`].
    pub fn store(&self, offset: u64, from: &[u8]) -> Result<(), WindowError> {
        if self.window.access != Access::ReadWrite {
            return Err(WindowError::ReadOnly { path: self.window.path.clone() });
        }
        self.part(offset, from.len() as u64)?.slice.copy_from(from);
        Ok(())
    }
}

/// What helps when a machine has no mapping left.
fn few(cause: &io::Error) -> &'static str {
    match cause.kind() {
        io::ErrorKind::StorageFull => {
            "; a machine has few mappings: programs that ask for the same range share one, and one is free when \
             every file that has it is closed"
        }
        _ => "",
    }
}

/// Whether `offset + length` neither overflows nor passes `bytes`.
pub(crate) fn fits(offset: u64, length: u64, bytes: u64) -> bool {
    offset.checked_add(length).is_some_and(|end| end <= bytes)
}

/// Length and mapping alignment in bytes.
fn measure(file: &mut File, tree: &Tree) -> io::Result<(u64, u64)> {
    let metadata = file.metadata()?;
    let page = rustix::param::page_size() as u64;
    if !metadata.file_type().is_char_device() {
        // The end of a block device is found by seeking, like a file's.
        return Ok((file.seek(SeekFrom::End(0))?, page));
    }
    let device = metadata.rdev();
    let folder = format!("dev/char/{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let size = tree.number(format!("{folder}/size")).map_err(io::Error::other)?;
    Ok((size, tree.number(format!("{folder}/align")).unwrap_or(2 << 20)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refused_mapping_is_no_matter_of_paths_and_rights() {
        let refused = |cause: rustix::io::Errno| {
            let path = "/dev/lamina0".into();
            WindowError::Refused { path, role: Role::Views, bytes: 4096, cause: cause.into() }.to_string()
        };
        for cause in [rustix::io::Errno::NOSPC, rustix::io::Errno::EXIST, rustix::io::Errno::NODEV] {
            let said = refused(cause);
            assert!(said.starts_with("/dev/lamina0 does not map the views window, 4096 bytes: "), "{said}");
            assert_eq!(said.contains("few mappings"), cause == rustix::io::Errno::NOSPC, "{said}");
        }
    }
}
