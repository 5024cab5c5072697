use super::{
    super::{
        KvLayout,
        tests::{decode, encode, small},
    },
    *,
};
use crate::{format::Format, plane::PlaneMask, testing::bytes};

/// Rows of bf16 whose channels have a sign each. Exponents are up to three below the channel's
/// largest, which is `largest` of the channel's number.
fn leaning(rows: usize, columns: usize, mantissa: u8, largest: impl Fn(usize) -> u8) -> Vec<u8> {
    let noise = bytes(5, rows * columns * 2);
    let elements = noise.as_chunks::<2>().0.iter().enumerate().map(|(at, [low, high])| {
        let column = at % columns;
        let sign = u16::from(column.wrapping_mul(0x9e37_79b9) >> 13 & 1 == 1);
        let exponent = largest(column) - (high & 3);
        (sign << 15 | u16::from(exponent) << 7 | u16::from(low & mantissa)).to_le_bytes()
    });
    elements.flatten().collect()
}

#[test]
fn the_way_that_takes_least_is_taken() {
    // Whole rows, in blocks of whole columns or not, whose differences are made with the order; and
    // cut rows, whose are made block by block.
    for (channels, rows) in [(1024, 8), (1024, 12), (1000, 12)] {
        let shape = Shape::new(Format::Bf16, &KvLayout::rows(channels, rows)).unwrap().unwrap();
        let order = shape.order(0, shape.blocks());
        assert_eq!(order.by_columns().is_some_and(|columns| columns.fit_blocks()), channels == 1024);
        let (columns, rows) = (order.columns, order.elements.div_ceil(order.columns));
        let coding = |codec, largest: fn(usize) -> u8| {
            let mut window = leaning(rows, columns, 0x7f, largest);
            window.truncate(shape.blocks() * BLOCK_BYTES);
            let mut bundles = Vec::new();
            let coded = encode(&shape, 0, codec, &window, None, &mut bundles);
            assert!(decode(&shape, 0, &bundles, PlaneMask::all(Format::Bf16)) == window, "{rows}");
            coded.coding
        };
        // Channels of sizes of their own; and of one size, where bases are worth nothing.
        for codec in Codec::ALL {
            assert_eq!(
                coding(codec, |column| 100 + small(column * 37 % 31)),
                Coding::Deltas,
                "{codec} {rows}"
            );
        }
        assert_eq!(coding(Codec::Tree, |_| 115), Coding::Channels, "{rows}");
    }
}

#[test]
fn parts_of_a_column_may_have_bases_of_their_own() {
    const ZEROS: usize = 1;
    // Columns of 12, which blocks of 2048 cut.
    let shape = Shape::new(Format::Bf16, &KvLayout::rows(1024, 12)).unwrap().unwrap();
    let (order, field) = (shape.order(0, shape.blocks()), Field::of(Format::Bf16).unwrap());
    let columns = order.by_columns().unwrap();
    let mut window = leaning(12, 1024, 0x7f, |column| 100 + small(column * 37 % 31));
    let mut major = vec![0; window.len()];
    order.channel_major(None, &window, &mut major);
    // One block is of zeros, and cuts columns at both ends of which the others have the rest.
    major[ZEROS * BLOCK_BYTES..][..BLOCK_BYTES].fill(0);
    assert!(columns.begins_cut(ZEROS) && columns.begins_cut(ZEROS + 1));
    order.token_major(None, &major, &mut window);
    let (mut bundles, mut before, mut cut) = (Vec::new(), None, 0);
    for (block, words) in major.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().enumerate() {
        let mut runs = Vec::new();
        order.block_runs(block, &mut runs);
        let mut own = vec![0; runs.len()];
        delta::subtract(field, &runs, words, &mut own);
        cut += usize::from(
            block != ZEROS && columns.begins_cut(block) && before.is_some() && before != own.first().copied(),
        );
        before = (block != ZEROS).then(|| own[own.len() - 1]);
        let mut details = Vec::new();
        bases::write(&own, &mut details);
        let mut bundle = Bundle::new();
        let details = Details { delta: true, repeats: false, bytes: &details };
        if block != ZEROS {
            let mut encoder = Encoder::new();
            bundle.encode_with_header(&mut encoder.block, Format::Bf16, Codec::Tree, words, &details);
        }
        bundles.push(bundle);
    }
    assert!(cut > 0, "no column has two bases");
    let elements = window.as_chunks::<2>().0;
    // Everything, the upper part of the exponent and of the mantissa, no exponent.
    for mask in [0xffff, 0xe000, 0xffc0, 0x8070] {
        let want: Vec<_> =
            elements.iter().flat_map(|element| (u16::from_le_bytes(*element) & mask).to_le_bytes()).collect();
        assert!(decode(&shape, 0, &bundles, PlaneMask(mask.into())) == want, "{mask:#06x}");
    }
}
