//! The device as disks: virtio-blk devices over vhost-user, for guests without CXL and for any
//! virtual machine monitor that speaks it.
//!
//! A disk shows the base window, the views window, or one view ([`Shows`]). It is served on a Unix
//! socket ([`DiskServer`]), reads and writes the guest's memory itself, and needs no driver of ours
//! in the guest.
//!
//! The way of a request, one file each: a connection's rings ([`backend`]), the requests in them in
//! order ([`queue`]), what one asks for and where it ends ([`request`]), where in the guest's
//! memory that is ([`pieces`]), what it is done through ([`workspace`]), and the bytes of the disk
//! ([`disk`]), of which the views disk's first and last are a partition table that is computed
//! ([`partitions`]). What a driver is told of the disk is in [`config`].
//!
//! The rules:
//! * Nothing that a guest puts into its memory is trusted: addresses and lengths are checked, a
//!   request that makes no sense is answered with an error, and one that cannot even be answered is
//!   given back.
//! * Requests of a queue are done one after the other and given back in that order. So the index of
//!   the last one given back, which lies in the guest's memory, says exactly what is left to do. A
//!   device that is killed and started again, on the same socket, goes on there: reads, writes and
//!   discards that were begun are done again, which changes nothing. For the same reason there is
//!   no `VHOST_USER_PROTOCOL_F_INFLIGHT_SHMFD`: it records what this order makes known.
//! * Bytes are decoded into a buffer of the queue's, by several threads where there is much to
//!   read, and copied once, to the guest.

mod backend;
pub(crate) mod config;
mod disk;
mod partitions;
mod pieces;
pub(crate) mod queue;
pub(crate) mod request;
mod server;
mod workspace;

pub use disk::Disk;
pub use server::DiskServer;

pub use crate::disks::{DiskInfo, Shows};
