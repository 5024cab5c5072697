//! The buffer of a request of the kernel's, as a file system's handlers are given it.

use std::slice;

use fuse_backend_rs::file_buf::FileVolatileSlice;

/// The whole of a request's buffer.
pub(super) fn bytes_of(slice: FileVolatileSlice<'_>) -> &mut [u8] {
    // SAFETY: the slice covers part of the one buffer that the worker of this request owns and lent
    // to the server for the time of the request; nobody else reads or writes it meanwhile, and it
    // is initialised memory.
    unsafe { slice::from_raw_parts_mut(slice.as_ptr(), slice.len()) }
}
