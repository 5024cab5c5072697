//! The device as its users meet it: files to map, an API, a port for guests, and the `lamina`
//! program.
//!
//! These tests mount for real: they need /dev/fuse, and root or fusermount3.

mod api;
mod bare_worker;
mod boot;
mod careful_worker;
mod checkpoints;
mod clients;
mod coherence;
mod common;
mod crashes;
mod deaths;
mod directories;
mod discards;
mod disk_driver;
mod disks;
mod exerciser;
mod faults;
mod fencing;
mod files;
mod guest_port;
mod guests;
mod hostile_peers;
mod hosts;
mod interleave;
mod ivshmem;
mod memory;
mod modelled;
mod mount;
mod older_holder;
mod packaging;
mod page_cache;
mod poison;
mod pool;
mod pressure;
mod program;
mod recorded;
mod removals;
mod shmem;
mod statuses;
mod stops;
mod top;
