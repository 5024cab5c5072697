//! What the file system refuses.

use std::io;

use lamina_codec::format::UnknownFormat;
use lamina_codec::kv::KvError;
use lamina_codec::packkv::PackKvError;
use lamina_device::device::DeviceError;
use lamina_device::tensor::TensorError;

/// Why a request is refused.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The inode is no more, or never was.
    #[error("there is no inode {inode}")]
    Stale {
        /// The inode.
        inode: u64,
    },
    /// A name that is not there.
    #[error("folder {folder} has no such name")]
    NotFound {
        /// The folder.
        folder: u64,
    },
    /// A name that is there.
    #[error("folder {folder} has the name already")]
    Exists {
        /// The folder.
        folder: u64,
    },
    /// A name or a target that is too long.
    #[error("{length} bytes are more than the {most} that a name or a target may have")]
    TooLong {
        /// Its bytes.
        length: usize,
        /// The most.
        most: usize,
    },
    /// A folder where none may be.
    #[error("inode {inode} is a folder")]
    IsFolder {
        /// The inode.
        inode: u64,
    },
    /// None where one has to be.
    #[error("inode {inode} is no folder")]
    NotFolder {
        /// The inode.
        inode: u64,
    },
    /// A folder that holds something.
    #[error("folder {inode} is not empty")]
    NotEmpty {
        /// The folder.
        inode: u64,
    },
    /// What cannot be asked of this.
    #[error("{what}")]
    Invalid {
        /// What is wrong.
        what: &'static str,
    },
    /// A part whose units and the file's do not come out even: what is cut off at a unit of the one
    /// would be some of another's.
    #[error("the part's units of {part} bytes and the file's of {file} are no multiples of each other")]
    Units {
        /// Bytes of a unit of the part's class.
        part: u64,
        /// Bytes of a unit of the file's.
        file: u64,
    },
    /// A thing that this file system does not do.
    #[error("{what} is not supported")]
    Unsupported {
        /// The thing.
        what: &'static str,
    },
    /// What nobody may do.
    #[error("{what}")]
    NotPermitted {
        /// Why.
        what: &'static str,
    },
    /// A hard link too many.
    #[error("inode {inode} has {links} names already")]
    TooManyLinks {
        /// The inode.
        inode: u64,
        /// Its names.
        links: u32,
    },
    /// A size past what a file may have.
    #[error("a file cannot have {bytes} bytes")]
    TooLarge {
        /// The bytes.
        bytes: u64,
    },
    /// No address is left for so much.
    #[error("{wanted} bytes more than the {limit} that files may take; start with larger --files")]
    NoAddress {
        /// Bytes wanted.
        wanted: u64,
        /// Bytes that files may take.
        limit: u64,
    },
    /// Nowhere is room for the log.
    #[error(
        "the base window has no {wanted} bytes in one piece where nothing is stored, for the log of names; less --files needs less, `lamina rm` and `lamina discard` make room, and a new image can have more --capacity"
    )]
    NoPlace {
        /// Bytes wanted.
        wanted: u64,
    },
    /// The log of names and extents is full.
    #[error("names and extents take {bytes} bytes, for which their log of {capacity} has no room")]
    NoNames {
        /// Bytes that they take.
        bytes: u64,
        /// Bytes of the log.
        capacity: u64,
    },
    /// Nothing is behind the offset.
    #[error("nothing is behind offset {offset}")]
    NothingBehind {
        /// The offset.
        offset: u64,
    },
    /// No attribute of the name.
    #[error("inode {inode} has no such attribute")]
    NoAttribute {
        /// The inode.
        inode: u64,
    },
    /// An attribute that is there already.
    #[error("inode {inode} has the attribute already")]
    AttributeExists {
        /// The inode.
        inode: u64,
    },
    /// Attributes that are too large.
    #[error("{bytes} bytes of attributes, more than {most}")]
    AttributesTooLarge {
        /// The bytes.
        bytes: usize,
        /// The most.
        most: usize,
    },
    /// A format that is none.
    #[error(transparent)]
    Format(#[from] UnknownFormat),
    /// A KV layout that cannot be.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// A lossy coding that cannot be.
    #[error(transparent)]
    Lossy(#[from] PackKvError),
    /// What the log says cannot be.
    #[error("the log of the files cannot be used: {why}")]
    Damaged {
        /// What is wrong.
        why: String,
    },
    /// Bytes that would have to be read to code them anew, and are lost.
    #[error(
        "{length} bytes at {at} of the file are lost (`lamina poison list`), and would be taken for bytes if they were \
         coded anew; write them again, or make a hole there"
    )]
    Lost {
        /// Where they begin in the file.
        at: u64,
        /// How many there are.
        length: u64,
    },
    /// The device refuses.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The disk that the image is on refuses.
    #[error("the image is not brought to its disk: {0}")]
    Sync(io::Error),
}

impl FileError {
    /// Whether there was no room.
    pub fn is_no_room(&self) -> bool {
        self.errno() == libc::ENOSPC
    }

    /// The number of the system's error that says the same.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Stale { .. } => libc::ESTALE,
            Self::NotFound { .. } => libc::ENOENT,
            Self::Exists { .. } | Self::AttributeExists { .. } => libc::EEXIST,
            Self::TooLong { .. } => libc::ENAMETOOLONG,
            Self::IsFolder { .. } => libc::EISDIR,
            Self::NotFolder { .. } => libc::ENOTDIR,
            Self::NotEmpty { .. } => libc::ENOTEMPTY,
            Self::Invalid { .. }
            | Self::Units { .. }
            | Self::Format(_)
            | Self::Kv(_)
            | Self::Lossy(_)
            | Self::Device(DeviceError::Tensor(TensorError::Kv { .. })) => libc::EINVAL,
            Self::Unsupported { .. } => libc::EOPNOTSUPP,
            Self::NotPermitted { .. } => libc::EPERM,
            Self::TooManyLinks { .. } => libc::EMLINK,
            Self::TooLarge { .. } => libc::EFBIG,
            Self::NoAddress { .. } | Self::NoPlace { .. } | Self::NoNames { .. } => libc::ENOSPC,
            Self::NothingBehind { .. } => libc::ENXIO,
            Self::NoAttribute { .. } => libc::ENODATA,
            Self::AttributesTooLarge { .. } => libc::E2BIG,
            Self::Device(why) if why.is_no_room() => libc::ENOSPC,
            Self::Damaged { .. } | Self::Lost { .. } | Self::Device(_) | Self::Sync(_) => libc::EIO,
        }
    }
}
