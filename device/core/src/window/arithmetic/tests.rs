//! Every range of small geometries against the definition, element by element; and the bounds of
//! what 64 bits hold.

use super::*;

/// Blocks of the small tensors.
const BLOCKS: u64 = 3;

/// Calls for geometries of blocks of 8 and 24 elements, of every width there is and of views up to
/// it.
fn geometries(mut each: impl FnMut(Geometry)) {
    for block_elements in [8, 24] {
        for width in [4, 8, 16, 32] {
            for bits in [1, 2, 3, 4, 5, 7, 8, 11, 16, 32].into_iter().filter(|bits| *bits <= width) {
                each(Geometry { width, bits, block_elements });
            }
        }
    }
}

/// Calls for every range up to `end`, empty ones included.
fn ranges(end: u64, mut each: impl FnMut(Range<u64>)) {
    for start in 0..=end {
        for stop in start..=end {
            each(start..stop);
        }
    }
}

/// The groups of eight elements of which `range`, in bytes, has a bit, where an element has `bits`;
/// none for no bytes.
fn groups_of(range: &Range<u64>, bits: u64) -> Range<u64> {
    if range.is_empty() {
        return 0..0;
    }
    let touched = |element: u64| {
        let (first, end) = (element * bits, (element + 1) * bits);
        first < range.end * 8 && range.start * 8 < end
    };
    let mut elements = (0..range.end * 8).filter(|element| touched(*element));
    let Some(first) = elements.next() else { return 0..0 };
    let last = elements.next_back().unwrap_or(first);
    first / 8..last / 8 + 1
}

#[test]
fn pieces_are_the_groups_that_a_range_touches_cut_at_blocks() {
    geometries(|geometry| {
        let Geometry { bits, block_elements, .. } = geometry;
        ranges(BLOCKS * block_elements / 8 * bits, |range| {
            let pieces: Vec<Piece> = geometry.pieces(range.clone()).collect();
            if range.is_empty() {
                // A range without bytes may name the group that it lies in.
                assert!(pieces.len() <= 1, "{geometry:?} {range:?}");
                return;
            }
            let mut next = groups_of(&range, bits);
            for piece in &pieces {
                let first = piece.block * block_elements + piece.elements.start as u64;
                assert_eq!(first, next.start * 8, "{geometry:?} {range:?} {piece:?}");
                assert_eq!(piece.offset, next.start * bits, "{geometry:?} {range:?} {piece:?}");
                assert!(piece.elements.end as u64 <= block_elements && !piece.elements.is_empty());
                next.start = piece.block * block_elements / 8 + piece.elements.end as u64 / 8;
            }
            assert!(next.is_empty(), "{geometry:?} {range:?} misses {next:?}");
        });
    });
}

#[test]
fn neighbouring_ranges_share_a_block_out_without_gap_or_overlap() {
    geometries(|geometry| {
        let Geometry { width, bits, block_elements } = geometry;
        let block_bytes = usize::try_from(block_elements * width / 8).unwrap();
        let end = BLOCKS * block_elements / 8 * bits;
        for block in 0..BLOCKS {
            assert_eq!(geometry.words_of(block, &(0..end)), 0..block_bytes);
            for cut in 0..=end {
                let (before, behind) =
                    (geometry.words_of(block, &(0..cut)), geometry.words_of(block, &(cut..end)));
                assert_eq!((before.start, before.end, behind.end), (0, behind.start, block_bytes));
            }
        }
        // Where whole groups are asked for, exactly their bytes.
        for group in 0..BLOCKS * block_elements / 8 {
            let (block, inside) = (group / (block_elements / 8), group % (block_elements / 8));
            let words = geometry.words_of(block, &(group * bits..(group + 1) * bits));
            assert_eq!(words.start as u64..words.end as u64, inside * width..(inside + 1) * width);
        }
    });
}

#[test]
fn what_shows_a_base_range_is_every_byte_of_the_groups_in_it() {
    geometries(|geometry| {
        let Geometry { width, bits, block_elements } = geometry;
        let groups = BLOCKS * block_elements / 8;
        // Whole views, and one that ends within its last group.
        for length in [groups * bits, groups * bits - bits.div_ceil(2)] {
            ranges(groups * width, |range| {
                let wanted = groups_of(&range, width);
                let wanted = wanted.start * bits..(wanted.end * bits).min(length);
                let shown = geometry.over(range.clone(), length);
                assert_eq!(
                    shown.unwrap_or(0..0),
                    if wanted.is_empty() { 0..0 } else { wanted },
                    "{geometry:?} {range:?}"
                );
            });
        }
    });
}

#[test]
fn a_view_depends_on_a_base_byte_exactly_if_it_shows_it() {
    geometries(|geometry| {
        let Geometry { width, bits, block_elements } = geometry;
        let (bytes, length) = (BLOCKS * block_elements * width / 8, BLOCKS * block_elements / 8 * bits);
        for at in 0..bytes {
            let shown = geometry.over(at..at + 1, length).unwrap();
            for view in 0..length {
                let needs = geometry.pieces(view..view + 1).any(|piece| {
                    let first = (piece.block * block_elements + piece.elements.start as u64) * width / 8;
                    let end = (piece.block * block_elements + piece.elements.end as u64) * width / 8;
                    (first..end).contains(&at)
                });
                assert_eq!(needs, shown.contains(&view), "{geometry:?}: byte {at}, byte {view} of the view");
            }
        }
    });
}

#[test]
fn the_largest_windows_are_in_bounds() {
    // The largest windows there may be, in the widest and the narrowest views.
    for (width, bits) in [(32, 32), (32, 1), (4, 4)] {
        let geometry = Geometry { width, bits, block_elements: 32_768 / width };
        let (bytes, length) = (1_u64 << 46, (1_u64 << 46) / width * bits);
        let piece = geometry.pieces(length - 1..length).last().unwrap();
        assert_eq!(piece.block, (bytes >> 12) - 1);
        assert_eq!(geometry.over(bytes - 1..bytes, length), Some(length - bits..length));
        assert_eq!(geometry.words_of(piece.block, &(0..length)), 0..4096);
    }
}
