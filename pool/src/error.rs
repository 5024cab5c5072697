//! Why something could not be done with a pool.

use crate::mem::MemError;

/// Why something could not be done with a pool.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// The memory refused.
    #[error(transparent)]
    Mem(MemError),
    /// There is no pool, or one that this program does not know.
    #[error("there is no pool here: {0}; `lamina pool create` makes one")]
    NoPool(String),
    /// A geometry that cannot be.
    #[error("a pool cannot have {0}")]
    Geometry(String),
    /// What is held does not check.
    #[error(
        "the pool is damaged: {what} at {at} does not check; `lamina pool check --repair` mends what can be"
    )]
    Damaged {
        /// Which record.
        what: &'static str,
        /// Where.
        at: u64,
    },
    /// This node was taken for dead, and its access revoked.
    #[error("node {node} was taken for dead and its access revoked: attach anew")]
    Fenced {
        /// The node.
        node: u32,
    },
    /// The device took the access of this node's host away.
    #[error("{}", MemError::Revoked)]
    Revoked,
    /// There is no space, and nothing that could be evicted.
    #[error("no space for {bytes} bytes: nothing can be evicted{}", of_others(*others))]
    Full {
        /// What was wanted.
        bytes: u64,
        /// Bytes of chunks that other nodes have.
        others: u64,
    },
    /// The slots that a key may have are in use by what is not evicted.
    #[error(
        "no slot: seven of the eight that this key may have hold objects, which are not evicted, and one is for what \
         replaces one of them; delete one of these, or create the pool anew and larger: it has more slots then"
    )]
    NoSlot,
    /// Another is at it, or too many are.
    #[error("waited too long for {0}")]
    Timeout(&'static str),
    /// Nobody answers what is asked.
    #[error("nobody serves the pool's index: `lamina pool serve` does")]
    NoServer,
    /// Another serves already.
    #[error("node {node} serves the pool's index already")]
    Served {
        /// The node.
        node: u32,
    },
    /// It has as many classes as it can.
    #[error("the pool has {most} classes besides its own, and no place for another")]
    Classes {
        /// How many it may have.
        most: u32,
    },
    /// A device's base window that holds more than a pool.
    #[error(
        "{path}: {holds} lie there, and a pool takes all of it: remove models and tensors first, make the pool in \
         files/, or begin a device that has none of these: with a new image or without, and with --files 0"
    )]
    Held {
        /// The window.
        path: std::path::PathBuf,
        /// What the device says lies there.
        holds: String,
    },
    /// A name of no bytes.
    #[error("a name has no bytes: it must have at least one")]
    NoName,
    /// A name or a body that is too long.
    #[error("{what} has {bytes} bytes, more than {most}")]
    TooLong {
        /// What it is.
        what: &'static str,
        /// Its bytes.
        bytes: u64,
        /// What it may have.
        most: u64,
    },
    /// A range that passes an object's end.
    #[error("bytes {at} + {length} pass the end of the object, which has {bytes} bytes")]
    End {
        /// Start of the range.
        at: u64,
        /// Its length.
        length: u64,
        /// Bytes of the object.
        bytes: u64,
    },
    /// All numbers are in use.
    #[error("all {nodes} nodes of the pool are attached: detach one, or create the pool with more")]
    Nodes {
        /// How many there may be.
        nodes: u32,
    },
    /// A node's number that the pool has not, or that is another's.
    #[error("node {node} cannot be had: {why}")]
    Node {
        /// The node.
        node: u32,
        /// Why.
        why: String,
    },
    /// The device could not be told what the pool's objects are.
    #[error("the pool's objects cannot be declared: {0}")]
    Declare(String),
    /// The file could not be used.
    #[error("{path}: {cause}")]
    File {
        /// The file.
        path: std::path::PathBuf,
        /// The kernel's error.
        cause: std::io::Error,
    },
}

/// What is said of chunks that others have.
fn of_others(bytes: u64) -> String {
    if bytes == 0 {
        return String::new();
    }
    format!(
        "; other nodes have {bytes} bytes of chunks, whose free places only they fill while they are attached"
    )
}

impl From<MemError> for PoolError {
    fn from(why: MemError) -> Self {
        match why {
            MemError::Revoked => Self::Revoked,
            why => Self::Mem(why),
        }
    }
}
