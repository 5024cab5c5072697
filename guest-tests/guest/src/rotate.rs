//! The new bytes of a written tensor: its old ones, rotated by whole elements.
//!
//! Rotation keeps the distribution of values, so that the written tensor compresses like the old
//! one and holds its special values; and the host can compute it from the model file in one line:
//! **element i := old element (i + k) mod n**, k = 1 + seed mod (n − 1).
//!
//! An element here is the [`unit`]: length / elements bytes, or one byte where elements are smaller
//! than that (two `int4` move together).

/// Bytes that move together in a tensor of `length` bytes and `elements` elements.
pub fn unit(length: u64, elements: u64) -> u64 {
    match length.checked_div(elements) {
        Some(bytes) if bytes > 0 && length.is_multiple_of(elements) => bytes,
        _ => 1,
    }
}

/// By how many of its `units` a tensor is rotated: at least 1 and less than `units`, 0 if there are
/// fewer than two.
pub fn rotation(units: u64, seed: u64) -> u64 {
    if units < 2 { 0 } else { 1 + seed % (units - 1) }
}

/// The new bytes for the old `bytes` of a tensor of `elements` elements, and the rotation in units.
pub fn rotate(bytes: &[u8], elements: u64, seed: u64) -> (Vec<u8>, u64) {
    let length = bytes.len() as u64;
    let unit = unit(length, elements);
    let rotation = rotation(length / unit, seed);
    let mut rotated = bytes.to_vec();
    rotated.rotate_left(usize::try_from(rotation * unit).expect("less than the length of a slice"));
    (rotated, rotation)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn element_i_becomes_element_i_plus_k() {
        let old: Vec<u8> = (0..40).collect();
        for elements in [1, 2, 5, 10, 20, 40] {
            for seed in [0, 1, 7, u64::MAX] {
                let (new, k) = rotate(&old, elements, seed);
                let size = old.len() / usize::try_from(elements).unwrap();
                for (i, element) in new.chunks(size).enumerate() {
                    let from = (i + usize::try_from(k).unwrap()) % (old.len() / size);
                    assert_eq!(element, &old[from * size..(from + 1) * size], "{elements} {seed} {i}");
                }
                assert!(elements == 1 || new != old, "a rotation by nothing");
            }
        }
    }

    #[test]
    fn elements_below_a_byte_move_as_bytes() {
        assert_eq!(unit(3, 5), 1);
        assert_eq!(unit(3, 6), 1);
        assert_eq!(rotate(&[1, 2, 3], 5, 0), (vec![2, 3, 1], 1));
    }

    #[test]
    fn an_empty_tensor_stays_empty() {
        assert_eq!(rotate(&[], 0, 3), (vec![], 0));
        assert_eq!(rotate(&[], 3, 3), (vec![], 0));
    }
}
