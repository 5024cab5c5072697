//! Buffers that begin with a cache line: a vector that is as long as one, and does not, costs two
//! of them.

use std::ops::{Deref, DerefMut};

/// Bytes of a cache line.
const LINE: usize = 64;

/// Elements of which the first begins a cache line.
pub(crate) struct Lines<T> {
    elements: Vec<T>,
    start: usize,
}

impl<T> Lines<T> {
    /// None.
    pub(crate) const fn none() -> Self {
        Self { elements: Vec::new(), start: 0 }
    }
}

impl<T> Default for Lines<T> {
    fn default() -> Self {
        Self::none()
    }
}

impl<T: Copy + Default> Lines<T> {
    /// `count` elements or a few more.
    pub(crate) fn new(count: usize) -> Self {
        let elements = vec![T::default(); count + LINE / size_of::<T>()];
        // Where it cannot be told, it is only slower.
        let start = elements.as_ptr().align_offset(LINE).min(LINE / size_of::<T>());
        Self { elements, start }
    }

    /// Makes them at least `count`. If that makes them more, they hold nothing of what they did.
    #[inline]
    pub(crate) fn make_at_least(&mut self, count: usize) {
        if self.len() < count {
            *self = Self::new(count);
        }
    }
}

impl<T> Deref for Lines<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.elements[self.start..]
    }
}

impl<T> DerefMut for Lines<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.elements[self.start..]
    }
}
