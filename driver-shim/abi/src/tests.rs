use super::*;
use proptest::prelude::*;

fn layout() -> impl Strategy<Value = Layout> {
    prop_oneof![
        Just(Layout::Weight),
        (any::<[u32; 2]>(), 1..u32::MAX, 1..u32::MAX, 1..u32::MAX).prop_map(
            |([channels, window], stride, groups, paged_tokens)| Layout::Kv {
                channels,
                window,
                stride,
                groups,
                paged_tokens,
            }
        ),
    ]
}

fn directory() -> impl Strategy<Value = Directory> {
    let tensor = (".{0,20}", "[0-9x]{0,9}", "[a-z0-9_]{0,9}", any::<[u64; 3]>(), layout(), any::<bool>())
        .prop_map(|(name, shape, format, [dpa, length, elements], layout, lossy)| TensorEntry {
            name,
            shape,
            format,
            dpa,
            length,
            elements,
            layout,
            lossy,
        });
    (any::<[u64; 3]>(), proptest::collection::vec(tensor, 1..8), 0_usize..9, any::<bool>()).prop_flat_map(
        |([generation, base_bytes, views_bytes], tensors, views, is_incomplete)| {
            let count = u32::try_from(tensors.len()).unwrap();
            let view = (0..count, "[a-z0-9:+]{1,12}", any::<[u64; 3]>(), any::<u32>(), any::<i32>())
                .prop_map(|(tensor, spelling, [offset, length, elements], bits, scale_exp)| ViewEntry {
                    tensor,
                    spelling,
                    offset,
                    length,
                    elements,
                    bits,
                    scale_exp,
                });
            proptest::collection::vec(view, views).prop_map(move |views| Directory {
                generation,
                base_bytes,
                views_bytes,
                tensors: tensors.clone(),
                views,
                is_incomplete,
            })
        },
    )
}

proptest! {
    #[test]
    fn what_was_written_is_read(directory in directory(), slack in 0_usize..300) {
        let mut bytes = encode(&directory).unwrap();
        bytes.resize(bytes.len() + slack, 0);
        prop_assert_eq!(decode(&bytes).unwrap(), directory);
    }

    #[test]
    fn a_flipped_bit_is_noticed(directory in directory(), at in any::<prop::sample::Index>(), bit in 0_u8..8) {
        let mut bytes = encode(&directory).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        prop_assert!(decode(&bytes).is_err());
    }

    #[test]
    fn any_bytes_behind_a_valid_checksum_are_an_error_or_a_directory(
        mut bytes in proptest::collection::vec(any::<u8>(), HEADER_BYTES..600),
    ) {
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        let used = bytes.len() as u64;
        bytes[24..32].copy_from_slice(&used.to_le_bytes());
        bytes[12..16].fill(0);
        let checksum = crc32c::crc32c(&bytes);
        bytes[12..16].copy_from_slice(&checksum.to_le_bytes());
        // No panic and no checksum error; whether the rest makes sense is chance.
        let lied = matches!(decode(&bytes), Err(DirectoryError::Checksum { .. }));
        prop_assert!(!lied);
    }
}

#[test]
fn a_truncated_directory_is_refused() {
    let bytes = encode(&Directory { views_bytes: 1 << 30, ..Directory::default() }).unwrap();
    for length in 0..bytes.len() {
        assert!(decode(&bytes[..length]).is_err(), "{length} bytes");
    }
}

#[test]
fn a_full_directory_says_what_it_would_need() {
    let tensor = TensorEntry {
        name: "n".repeat(1000),
        shape: String::new(),
        format: "bf16".into(),
        dpa: 0,
        length: 0,
        elements: 0,
        layout: Layout::Weight,
        lossy: false,
    };
    let directory = Directory { tensors: vec![tensor; 2000], ..Directory::default() };
    assert_eq!(encode(&directory), Err(DirectoryError::Full { needed: 128 + 2000 * (80 + 1004) }));
}

#[test]
fn text_that_many_records_share_is_no_more_than_a_directory_holds() {
    let view = |spelling: String| ViewEntry {
        tensor: 0,
        spelling,
        offset: DIRECTORY_BYTES,
        length: 1,
        elements: 1,
        bits: 8,
        scale_exp: 0,
    };
    let tensor = TensorEntry {
        name: "w".into(),
        shape: "1".into(),
        format: "opaque".into(),
        dpa: 0,
        length: 1,
        elements: 1,
        layout: Layout::Weight,
        lossy: false,
    };
    let views = std::iter::once(view("x".repeat(1 << 20))).chain((0..8000).map(|_| view("y".into())));
    let directory = Directory { tensors: vec![tensor], views: views.collect(), ..Directory::default() };
    let mut bytes = encode(&directory).unwrap();
    assert_eq!(decode(&bytes).unwrap(), directory);
    // All of them are spelled as the longest is: gigabytes.
    let first = HEADER_BYTES + TENSOR_RECORD_BYTES;
    let spelling: [u8; 8] = bytes[first + 24..first + 32].try_into().unwrap();
    for record in 1..=8000 {
        let at = first + record * VIEW_RECORD_BYTES + 24;
        bytes[at..at + 8].copy_from_slice(&spelling);
    }
    bytes[12..16].fill(0);
    let checksum = crc32c::crc32c(&bytes);
    bytes[12..16].copy_from_slice(&checksum.to_le_bytes());
    assert!(matches!(decode(&bytes), Err(DirectoryError::Bound { field: "text of all records", .. })));
}
