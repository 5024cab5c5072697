//! Matrices that are held for those who read on: those read last, over all files of a device.

use std::sync::Arc;

use parking_lot::Mutex;

/// Bytes that are held, of all matrices together.
const MAX_BYTES: u64 = 256 << 20;
/// Matrices that are held, however small.
const MAX_COUNT: usize = 64;

/// The matrices that were read last.
#[derive(Default)]
pub struct Matrices {
    /// The one that was read longest ago first.
    held: Mutex<Vec<Held>>,
}

/// A matrix: the number of the tensor on the device, and its own in the tensor.
pub(super) type Which = (u64, u64);

struct Held {
    which: Which,
    bytes: u64,
    matrix: Arc<Slot>,
}

/// What had been changed on the device before a matrix was read, and the matrix. Whoever reads it
/// has the lock, so that others wait for that one and for no other.
type Slot = Mutex<Option<(u64, Arc<Matrix>)>>;

/// A matrix as it is stored.
pub(super) struct Matrix {
    pub(super) elements: Vec<u8>,
    pub(super) scales: Vec<u8>,
}

impl Matrices {
    /// A matrix of so many bytes, held or else read, as it was when `changes` had been changed.
    pub(super) fn get<E>(
        &self,
        which: Which,
        bytes: u64,
        changes: u64,
        read: impl FnOnce() -> Result<Matrix, E>,
    ) -> Result<Arc<Matrix>, E> {
        let slot = self.slot(which, bytes);
        let mut slot = slot.lock();
        if let Some((_, matrix)) = slot.as_ref().filter(|(at, _)| *at == changes) {
            return Ok(Arc::clone(matrix));
        }
        let matrix = Arc::new(read()?);
        *slot = Some((changes, Arc::clone(&matrix)));
        Ok(matrix)
    }

    /// Holds none any more.
    pub fn clear(&self) {
        self.held.lock().clear();
    }

    fn slot(&self, which: Which, bytes: u64) -> Arc<Slot> {
        let mut held = self.held.lock();
        let found = held.iter().position(|held| held.which == which);
        let last = found.map_or_else(|| Held { which, bytes, matrix: Arc::default() }, |at| held.remove(at));
        let slot = Arc::clone(&last.matrix);
        held.push(last);
        let mut sum: u64 = held.iter().map(|held| held.bytes).sum();
        let mut count = held.len();
        held.retain(|held| {
            let stays = (sum <= MAX_BYTES && count <= MAX_COUNT) || held.which == which;
            if !stays {
                (sum, count) = (sum - held.bytes, count - 1);
            }
            stays
        });
        slot
    }

    #[cfg(test)]
    pub(super) fn held(&self) -> Vec<Which> {
        self.held.lock().iter().map(|held| held.which).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a matrix is read, by its answer.
    fn is_read(matrices: &Matrices, which: Which, bytes: u64, changes: u64) -> bool {
        let mut read = false;
        let matrix = matrices.get(which, bytes, changes, || {
            read = true;
            Ok::<_, ()>(Matrix { elements: vec![u8::try_from(which.1).unwrap()], scales: Vec::new() })
        });
        assert_eq!(usize::from(matrix.unwrap().elements[0]), usize::try_from(which.1).unwrap());
        read
    }

    #[test]
    fn those_read_last_are_held_and_no_more_bytes_than_may_be() {
        let matrices = Matrices::default();
        let quarter = MAX_BYTES / 4;
        for number in 0..4 {
            assert!(is_read(&matrices, (1, number), quarter, 7));
        }
        // Of another tensor the same number is another matrix; the first was read last.
        assert!(!is_read(&matrices, (1, 0), quarter, 7));
        assert!(is_read(&matrices, (2, 0), quarter, 7));
        assert_eq!(matrices.held(), [(1, 2), (1, 3), (1, 0), (2, 0)]);
        assert!(is_read(&matrices, (1, 1), quarter, 7));
        // One byte more takes the place of two.
        assert!(is_read(&matrices, (3, 0), quarter + 1, 7));
        assert_eq!(matrices.held(), [(2, 0), (1, 1), (3, 0)]);
        matrices.clear();
        assert_eq!(matrices.held(), []);
    }

    #[test]
    fn small_ones_are_bounded_too_and_what_changed_is_read_again() {
        let matrices = Matrices::default();
        for number in 0..=MAX_COUNT as u64 {
            assert!(is_read(&matrices, (1, number), 1, 0));
        }
        assert_eq!(matrices.held().len(), MAX_COUNT);
        assert!(!is_read(&matrices, (1, 1), 1, 0));
        assert!(is_read(&matrices, (1, 1), 1, 1));
        assert!(!is_read(&matrices, (1, 1), 1, 1));
        let failed = matrices.get((1, 1), 1, 2, || Err("no"));
        assert_eq!(failed.err(), Some("no"));
        assert!(is_read(&matrices, (1, 1), 1, 2));
    }
}
