//! Bytes of Python's buffers, copied in and out.

use pyo3::{buffer::PyUntypedBuffer, exceptions::PyValueError, prelude::*};
use vm_memory::VolatileSlice;

/// The bytes of a contiguous buffer that Python lends, whatever its elements. Other threads may
/// write to it, so it gives copies only.
pub(crate) struct Bytes(PyUntypedBuffer);

impl Bytes {
    /// What `object` lends.
    ///
    /// # Errors
    /// `ValueError` if its bytes do not follow each other.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyUntypedBuffer::get(object)?;
        if buffer.is_c_contiguous() {
            Ok(Self(buffer))
        } else {
            Err(PyValueError::new_err(
                "the array's bytes do not follow each other: pass numpy.ascontiguousarray(it)",
            ))
        }
    }

    /// As [`Self::of`], to be written.
    ///
    /// # Errors
    /// `ValueError` if it is read-only, too.
    pub(crate) fn writable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let bytes = Self::of(object)?;
        if bytes.0.readonly() {
            return Err(PyValueError::new_err("the array to write to is read-only"));
        }
        Ok(bytes)
    }

    /// Its bytes.
    pub(crate) fn len(&self) -> usize {
        self.0.len_bytes()
    }

    /// What of it may be copied from or, if it was got by [`Self::writable`], to.
    pub(crate) fn memory(&self) -> Memory<'_> {
        // SAFETY: the buffer is `len_bytes` long from `buf_ptr` on, and stays so while Python's
        // view of it, which `self` holds, is not released. It is used through volatile copies only,
        // and written only if it may be.
        Memory(unsafe { VolatileSlice::new(self.0.buf_ptr().cast(), self.0.len_bytes()) })
    }
}

/// The memory of [`Bytes`].
#[derive(Clone, Copy)]
pub(crate) struct Memory<'b>(VolatileSlice<'b>);

// SAFETY: it is memory that the buffer keeps where it is, and that is copied from and to by
// volatile accesses, which any thread may do.
unsafe impl Send for Memory<'_> {}
// SAFETY: as above; through a shared reference it does nothing else.
unsafe impl Sync for Memory<'_> {}

impl Memory<'_> {
    /// Its bytes.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Copies as many bytes at `at` as there are, at most `to.len()`; the rest of `to` becomes
    /// zeros.
    pub(crate) fn read(&self, at: usize, to: &mut [u8]) {
        let count = self.0.len().saturating_sub(at).min(to.len());
        let (found, rest) = to.split_at_mut(count);
        if let Ok(part) = self.0.subslice(at, count) {
            part.copy_to(found);
        }
        rest.fill(0);
    }

    /// Copies as many of `from` to `at` as there is room for.
    pub(crate) fn write(&self, at: usize, from: &[u8]) {
        let count = self.0.len().saturating_sub(at).min(from.len());
        if let Ok(part) = self.0.subslice(at, count) {
            part.copy_from(&from[..count]);
        }
    }
}
