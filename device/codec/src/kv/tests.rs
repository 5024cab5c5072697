//! The transform against slow definitions on random bits, and windows through their bundles and
//! back.

mod layouts;

use proptest::prelude::*;

use super::{
    delta::{ColumnBases, Columns, Field},
    kernel::Kernel,
    order::Order,
    paged::Paged,
    repeats::{MAX_ROWS, Repeats},
    window::Coded,
    *,
};
use crate::{
    BLOCK_BYTES, BlockWords, Codec, Decoder, Encoder,
    block::{Bundle, MAX_BUNDLE, Stored},
    format::Format,
    plane::{self, PlaneMask},
    testing::bytes,
};

pub(super) fn small(number: usize) -> u8 {
    number.try_into().unwrap()
}

fn order() -> impl Strategy<Value = Order> {
    let width = prop::sample::select(vec![1_usize, 2, 4]);
    // Whole windows of the usual length have a way of their own.
    let sizes = prop_oneof![
        (1_usize..80, 0_usize..4000),
        (32_usize..150).prop_map(|columns| (columns, 128 * columns)),
    ];
    (width, sizes).prop_flat_map(|(width, (columns, elements))| {
        (0..columns).prop_map(move |first| Order::new(width, columns, first, elements))
    })
}

/// By sorting: the places of the elements, by column and then by row.
fn slow_channel_major(order: &Order, from: &[u8]) -> Vec<u8> {
    let mut places: Vec<usize> = (0..order.elements).collect();
    places.sort_by_key(|at| ((order.first + at) % order.columns, *at));
    places.into_iter().flat_map(|at| from[at * order.width..][..order.width].to_vec()).collect()
}

fn format() -> impl Strategy<Value = Format> {
    let formats: Vec<_> = Format::ALL.into_iter().filter(|format| *format != Format::Opaque).collect();
    prop::sample::select(formats)
}

fn layout() -> impl Strategy<Value = KvLayout> {
    let channels = prop_oneof![1_u32..40, Just(64), Just(96), Just(128), 1000_u32..3000];
    let rows =
        (channels, 1_u32..=MAX_WINDOW, prop::option::of(0_u32..9)).prop_map(|(channels, window, padding)| {
            KvLayout { stride: padding.map(|padding| channels + padding), ..KvLayout::rows(channels, window) }
        });
    let preset = prop::sample::select(vec![Preset::Nhd, Preset::Hnd, Preset::NhdKv, Preset::HndKv]);
    let sizes = prop::sample::select(vec![(2_u32, 16_u32), (4, 32), (1, 64), (8, 8)]);
    let paged = (preset, sizes, prop::sample::select(vec![8_u32, 16, 32]), 1_u32..=128).prop_map(
        |(preset, (heads, size), block, window)| {
            KvLayout::preset(preset, heads, size, block, window).unwrap()
        },
    );
    prop_oneof![3 => rows, 1 => paged]
}

/// Rows of channels that each have their own size and sign, some rows equal to others, filling
/// whole blocks.
fn cache(format: Format, columns: usize, length: usize, seed: u64) -> Vec<u8> {
    let noise = bytes(seed * 5, length);
    let width = (format.bits() as usize).div_ceil(8);
    let mut out = noise.clone();
    let columns_in_turn = (0..columns.max(1)).cycle();
    for (column, element) in columns_in_turn.zip(out.chunks_exact_mut(width)) {
        let top = element.last_mut().unwrap();
        let lean = if column.is_multiple_of(3) { 0x80 } else { 0 };
        *top = lean | (0x30 + small(column % 7)) | *top & 1;
    }
    let row = columns * width;
    if seed.is_multiple_of(2) && row > 0 {
        for at in (row..length.saturating_sub(row)).step_by(row * 3) {
            let (before, after) = out.split_at_mut(at);
            after[..row].copy_from_slice(&before[..row]);
        }
    }
    out
}

/// The bundle's bytes at the places of the runs of `mask`, noise elsewhere.
fn fetched(stored: &Stored, mask: PlaneMask, bytes: &[u8]) -> Box<[u8; MAX_BUNDLE]> {
    let mut bundle = Box::new([0xa5; MAX_BUNDLE]);
    stored.runs(mask, |run| bundle[run.clone()].copy_from_slice(&bytes[run]));
    bundle
}

pub(super) fn encode(
    shape: &Shape,
    before: u64,
    codec: Codec,
    bytes: &[u8],
    way: Option<Coding>,
    bundles: &mut Vec<Bundle>,
) -> Coded {
    Encoder::new().window(shape, before, codec, bytes, way, bundles)
}

pub(super) fn decode(shape: &Shape, before: u64, bundles: &[Bundle], mask: PlaneMask) -> Vec<u8> {
    // What was there before counts for nothing.
    let mut out = vec![0xa5; bundles.len() * BLOCK_BYTES + 3];
    let mut decoder = Decoder::new();
    let mut decoder = WindowDecoder::new(&mut decoder, shape, before, bundles.len(), mask, &mut out);
    for (block, bundle) in bundles.iter().enumerate() {
        if let Some(stored) = &bundle.stored {
            let wanted = decoder.wanted(stored);
            decoder.add(block, stored, wanted, &fetched(stored, wanted, bundle.bytes())).unwrap();
        }
    }
    decoder.finish();
    out
}

/// What block by block in address order gives of these planes.
fn want(format: Format, mask: PlaneMask, window: &[u8]) -> Vec<u8> {
    window
        .as_chunks()
        .0
        .iter()
        .flat_map(|words: &BlockWords| {
            let (mut planes, mut out) = ([0; BLOCK_BYTES], [0; BLOCK_BYTES]);
            plane::split(format, words, &mut planes);
            plane::join(format, &plane::select(format, mask, &planes), &mut out);
            out
        })
        .collect()
}

/// In a row that is longer than the window most columns have no elements: this would not end in
/// time if each was looked at.
#[test]
fn rows_may_be_very_long() {
    let columns = u32::MAX as usize;
    for (first, head) in [(0, 0), (7, 4096), (columns - 100, 100)] {
        let order = Order::new(2, columns, first, 4096);
        assert_eq!((order.head(), order.rows()), (head, 0));
        let from = bytes(35, 2 * 4096);
        // What is of the next row has lower columns.
        let head = if head == 4096 { 0 } else { 2 * head };
        let expected = [&from[head..], &from[..head]].concat();
        for kernel in Kernel::available() {
            let (mut to, mut back) = (vec![0; from.len()], vec![0; from.len()]);
            kernel.channel_major(&order, None, &from, &mut to);
            assert!(to == expected, "{kernel:?} {first}");
            kernel.token_major(&order, None, &to, &mut back);
            assert!(back == from, "{kernel:?} {first}");
        }
        assert_eq!(order.runs(0..4096).map(|run| run.len()).sum::<usize>(), 4096);
        assert!(order.runs(0..4096).all(|run| run.len() == 1));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn every_kernel_sorts_by_channel(order in order(), seed in any::<u64>()) {
        let from = bytes(seed / 5 * 5, order.elements * order.width);
        let want = slow_channel_major(&order, &from);
        for kernel in Kernel::available() {
            let mut major = vec![0xa5; from.len()];
            kernel.channel_major(&order, None, &from, &mut major);
            prop_assert!(major == want, "{:?}", kernel);
            let mut back = vec![0x5a; from.len()];
            kernel.token_major(&order, None, &major, &mut back);
            prop_assert!(back == from, "{:?}", kernel);
        }
    }

    #[test]
    fn runs_are_the_channels(order in order(), from in any::<prop::sample::Index>(), length in 0_usize..3000) {
        let from = from.index(order.elements + 1);
        let range = from..(from + length).min(order.elements);
        let mut columns: Vec<usize> = (0..order.elements).map(|at| (order.first + at) % order.columns).collect();
        columns.sort_unstable();
        let want: Vec<usize> = columns[range.clone()].chunk_by(|a, b| a == b).map(<[_]>::len).collect();
        let runs: Vec<_> = order.runs(range.clone()).collect();
        prop_assert_eq!(runs.iter().map(ExactSizeIterator::len).collect::<Vec<_>>(), want);
        prop_assert!(runs.iter().zip(runs.iter().skip(1)).all(|(a, b)| a.end == b.start));
        prop_assert_eq!(runs.first().map_or(range.start, |run| run.start), range.start);
        // Of a block, and its columns.
        let per_block = BLOCK_BYTES / order.width;
        for block in 0..=order.elements / per_block {
            let range = block * per_block..((block + 1) * per_block).min(order.elements);
            let columns = columns[range.clone()].chunk_by(|a, b| a == b);
            let want: Vec<_> = columns.clone().map(|run| u16::try_from(run.len()).unwrap()).collect();
            let mut found = Vec::new();
            order.block_runs(block, &mut found);
            prop_assert_eq!(found, want);
            let of_whole_rows = order.head() == 0 && order.elements == order.rows() * order.columns && order.rows() > 0;
            let numbers: Vec<_> = columns.map(|run| run[0]).collect();
            prop_assert_eq!(order.by_columns().map(|columns| columns.of(block).collect()), of_whole_rows.then_some(numbers));
        }
    }

    #[test]
    fn differences_are_from_the_largest_exponent(
        format in format(), seed in any::<u64>(), lengths in prop::collection::vec(1_u16..400, 0..40),
    ) {
        let Some(field) = Field::of(format) else { return Ok(()) };
        let width = format.bits() as usize / 8;
        let mut left = BLOCK_BYTES / width;
        let runs: Vec<u16> = lengths.into_iter().map_while(|length| {
            left = left.checked_sub(length.into())?;
            Some(length)
        }).collect();
        let words: BlockWords = bytes(seed, BLOCK_BYTES).try_into().unwrap();
        let load = |bytes: &[u8]| bytes.iter().rev().fold(0_u32, |word, byte| word << 8 | u32::from(*byte));
        let (shift, most) = (format.mantissa_bits(), (1_u32 << format.exponent_bits()) - 1);
        for kernel in Kernel::available() {
            let (mut changed, mut bases) = (words, vec![0xa5; runs.len()]);
            kernel.subtract(field, &runs, &mut changed, &mut bases);
            let mut at = 0;
            for (run, base) in runs.iter().zip(&bases) {
                let end = at + usize::from(*run) * width;
                let exponent = |word: u32| word >> shift & most;
                let exponents = words[at..end].chunks(width).map(|element| exponent(load(element)));
                prop_assert_eq!(u32::from(*base), exponents.max().unwrap());
                for (before, after) in words[at..end].chunks(width).zip(changed[at..end].chunks(width)) {
                    let (before, after) = (load(before), load(after));
                    prop_assert_eq!(exponent(after), u32::from(*base) - exponent(before));
                    prop_assert_eq!(before & !(most << shift), after & !(most << shift));
                }
                at = end;
            }
            prop_assert_eq!(&changed[at..], &words[at..]);
            kernel.restore(field, &runs, &bases, &mut changed);
            prop_assert!(changed == words, "{:?}", kernel);
            // Damage gives something, in the field only.
            kernel.restore(field, &runs, &vec![0xff; runs.len()], &mut changed);
        }
    }

    #[test]
    fn differences_of_columns_are_made_on_the_way(
        format in format(), columns in 1_usize..150, rows in prop_oneof![1_usize..40, Just(8), Just(16), Just(32), Just(128), Just(256)], seed in any::<u64>(),
    ) {
        let Some(field) = Field::of(format) else { return Ok(()) };
        let width = format.bits() as usize / 8;
        let order = Order::new(width, columns, 0, columns * rows);
        let from = bytes(seed, columns * rows * width);
        let mut want = slow_channel_major(&order, &from);
        let mut want_bases = vec![0; columns];
        for (column, base) in want.chunks_exact_mut(rows * width).zip(want_bases.chunks_mut(1)) {
            Kernel::Portable.subtract(field, &[rows.try_into().unwrap()], column, base);
        }
        for kernel in Kernel::available() {
            let (mut major, mut bases) = (vec![0x5a; from.len()], vec![0xa5; columns + 1]);
            kernel.channel_major(&order, Some(ColumnBases { field, bases: &mut bases }), &from, &mut major);
            prop_assert!(major == want, "{:?}", kernel);
            prop_assert_eq!(&bases[..columns], &want_bases);
            prop_assert_eq!(bases[columns], 0xa5);
        }
    }

    #[test]
    fn differences_of_columns_are_undone_on_the_way(
        format in format(), columns in 1_usize..150, rows in prop_oneof![1_usize..40, Just(128), Just(256)], seed in any::<u64>(),
        keep in prop_oneof![any::<u32>(), prop::sample::select(vec![u32::MAX, 0xffff, 0xff])],
    ) {
        let Some(field) = Field::of(format) else { return Ok(()) };
        let width = format.bits() as usize / 8;
        let order = Order::new(width, columns, 0, columns * rows);
        let (major, bases) = (bytes(seed, columns * rows * width), bytes(seed / 5 * 5, columns));
        let load = |bytes: &[u8]| bytes.iter().rev().fold(0_u32, |word, byte| word << 8 | u32::from(*byte));
        let (shift, most) = (format.mantissa_bits(), (1_u32 << format.exponent_bits()) - 1);
        let want: Vec<u8> = (0..columns * rows)
            .flat_map(|at| {
                let (row, column) = (at / columns, at % columns);
                let word = load(&major[(column * rows + row) * width..][..width]);
                let exponent = u32::from(bases[column]).wrapping_sub(word >> shift) & most;
                ((word & !(most << shift) | exponent << shift) & keep).to_le_bytes()[..width].to_vec()
            })
            .collect();
        for kernel in Kernel::available() {
            let mut back = vec![0x5a; major.len()];
            kernel.token_major(&order, Some(&Columns { field, bases: &bases, keep }), &major, &mut back);
            prop_assert!(back == want, "{:?}", kernel);
        }
    }

    #[test]
    fn blocks_with_and_without_differences_make_a_window(
        (format, layout) in (format(), layout()), seed in 0_u64..1000, mask in any::<u32>(), which in any::<u64>(), zeros in any::<u64>(),
    ) {
        let Some(shape) = Shape::new(format, &layout).ok().flatten() else { return Ok(()) };
        let columns = layout.stride.unwrap_or(layout.channels) as usize;
        let mut window = cache(format, columns, shape.blocks() * BLOCK_BYTES, seed);
        if shape.paged().is_none() && seed % 4 > 0 {
            // A third of the blocks, as they are coded where no row repeats, is zeros.
            let order = shape.order(0, shape.blocks());
            let mut major = vec![0; window.len()];
            order.channel_major(None, &window, &mut major);
            let blocks = major.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().enumerate();
            blocks.filter(|(block, _)| zeros.rotate_right(small(block % 64).into()) % 3 == 0).for_each(|(_, words)| words.fill(0));
            order.token_major(None, &major, &mut window);
        }
        let (mut same, mut different) = (Vec::new(), Vec::new());
        let ways = [(Coding::Channels, &mut same), (Coding::Deltas, &mut different)];
        let coded = ways.map(|(way, bundles)| encode(&shape, 0, Codec::Tree, &window, Some(way), bundles).coding);
        if coded.contains(&Coding::Plain) {
            return Ok(());
        }
        let both = same.into_iter().zip(different).enumerate();
        let bundles: Vec<Bundle> =
            both.map(|(block, (same, different))| if which >> (block % 64) & 1 == 1 { same } else { different }).collect();
        let mask = PlaneMask(mask & PlaneMask::all(format).0);
        prop_assert!(decode(&shape, 0, &bundles, mask) == want(format, mask, &window));
    }

    #[test]
    fn blocks_that_have_no_bytes_in_lost_ones_come_back(
        (format, layout) in (format(), layout()), seed in 0_u64..1000, which in any::<u64>(), few in any::<bool>(),
        way in prop::sample::select(vec![None, Some(Coding::Plain), Some(Coding::Channels), Some(Coding::Deltas)]),
    ) {
        let Some(shape) = Shape::new(format, &layout).ok().flatten() else { return Ok(()) };
        let columns = layout.stride.unwrap_or(layout.channels) as usize;
        let count = shape.blocks();
        let window = cache(format, columns, count * BLOCK_BYTES, seed);
        let mut bundles = Vec::new();
        let coded = encode(&shape, 0, Codec::Tree, &window, way, &mut bundles);
        let transformed = coded.coding != Coding::Plain;
        let mut gone = BlockSet::default();
        let is_gone = |block: &usize| which.rotate_right(small(block % 64).into()) % if few { 13 } else { 3 } == 0;
        (usize::from(transformed)..count).filter(is_gone).for_each(|block| gone.insert(block));
        let (mut out, all) = (Vec::new(), PlaneMask::all(format));
        let mut decoder = Decoder::new();
        let mut decoder = WindowDecoder::new(&mut decoder, &shape, 0, count, all, &mut out);
        for (block, bundle) in bundles.iter().enumerate().filter(|(block, _)| !gone.has(*block)) {
            if let Some(stored) = &bundle.stored {
                decoder.add(block, stored, all, &fetched(stored, all, bundle.bytes())).unwrap();
            }
        }
        let lost = decoder.finish_without(&gone, transformed);
        for (block, (found, want)) in out.chunks(BLOCK_BYTES).zip(window.chunks(BLOCK_BYTES)).enumerate() {
            prop_assert!(lost.has(block) || found == want, "block {}", block);
        }
        // And no block is lost without need.
        if coded.repeated_rows == 0 && shape.paged().is_none() {
            let order = shape.order(0, count);
            let mut places: Vec<usize> = (0..order.elements).collect();
            places.sort_by_key(|at| ((order.first + at) % order.columns, *at));
            let mut want = gone;
            if transformed {
                let per_block = BLOCK_BYTES / order.width;
                want = BlockSet::default();
                let reached = places.iter().enumerate().filter(|(at, _)| gone.has(at / per_block));
                reached.for_each(|(_, place)| want.insert(place / per_block));
            }
            prop_assert_eq!(lost, want);
        }
    }

    #[test]
    fn repeated_rows_come_back(
        width in prop::sample::select(vec![1_usize, 2, 4]), columns in 16_usize..70, first in 0_usize..16,
        rows in prop::collection::vec(0_u8..6, 0..300), tail in 0_usize..16,
    ) {
        let head = if first == 0 { 0 } else { columns - first };
        let order = Order::new(width, columns, first, head + rows.len() * columns + tail);
        let row = |kind: u8, length: usize| (0..length).map(move |at| kind ^ small(at % 7));
        let window: Vec<u8> = row(99, head * width)
            .chain(rows.iter().flat_map(|kind| row(*kind, columns * width)))
            .chain(row(77, tail * width))
            .collect();
        let Some(repeats) = Repeats::find(&order, &window) else { return Ok(()) };
        let kinds: std::collections::BTreeSet<_> = rows.iter().collect();
        let kept = repeats.compact_order(&order);
        prop_assert_eq!((kept.rows(), kept.head()), (kinds.len(), order.head()));
        let mut compact = vec![0xa5; window.len()];
        repeats.compact(&order, &window, &mut compact);
        let mut list = vec![1, 2, 3];
        repeats.write(&mut list);
        list.extend([4, 5]);
        let (read, rest) = Repeats::read(order.rows(), &list[3..]).unwrap();
        prop_assert_eq!((&read, rest), (&repeats, &[4_u8, 5][..]));
        compact[kept.elements * width..].fill(0xa5);
        read.expand(&order, &mut compact);
        prop_assert!(compact == window);
    }

    #[test]
    fn every_kernel_finds_and_moves_the_same_rows(
        length in prop::sample::select(vec![16_usize, 30, 32, 64, 100, 128, 768]), kinds in prop::collection::vec(0_u8..90, 1..MAX_ROWS),
    ) {
        // Rows that begin and end alike are told apart by what is between.
        let rows: Vec<u8> = kinds.iter().flat_map(|kind| (0..length).map(move |at| if (8..length - 8).contains(&at) { *kind } else { 7 })).collect();
        let mut found: Vec<(Repeats, Vec<u8>)> = Vec::new();
        for kernel in Kernel::available() {
            let mut repeats = Repeats::default();
            kernel.find_repeats(length, &rows, &mut repeats);
            let mut kept = vec![0; rows.len()];
            if repeats != Repeats::default() {
                kernel.keep_rows(length, &repeats, &rows, &mut kept);
                let mut back = kept.clone();
                kernel.spread_rows(length, &repeats, &mut back);
                prop_assert!(back == rows, "{:?}", kernel);
            }
            found.push((repeats, kept));
        }
        prop_assert!(found.iter().all(|other| *other == found[0]));
        let some_seem_equal = kinds.len() > 1;
        prop_assert_eq!(found[0].0 != Repeats::default(), some_seem_equal);
    }

    #[test]
    fn rows_that_repeat_are_found(columns in 8_usize..70, rows in 8_usize..256, seed in any::<u64>()) {
        let order = Order::new(2, columns, 0, columns * rows);
        let length = 2 * columns;
        let mut window = bytes(seed / 5 * 5, rows * length);
        prop_assert_eq!(Repeats::find(&order, &window), None);
        // One might be missed, as another row may come to the slot between; hardly all of them.
        let (once, again) = window.split_at_mut(rows / 2 * length);
        again[..once.len()].copy_from_slice(once);
        let repeats = Repeats::find(&order, &window);
        prop_assert_eq!(repeats.map(|repeats| repeats.compact_order(&order).rows()), Some(rows - rows / 2));
    }

    #[test]
    fn any_list_of_repeats_is_refused_or_harmless(rows in 0_usize..600, list in prop::collection::vec(any::<u8>(), 0..700)) {
        if let Some((repeats, _)) = Repeats::read(rows, &list) {
            let order = Order::new(2, 5, 3, 2 + rows * 5 + 4);
            let mut window = vec![7; order.elements * 2];
            repeats.expand(&order, &mut window);
            prop_assert_eq!(window, vec![7; order.elements * 2]);
        }
    }

    #[test]
    fn parts_of_rows_come_together(groups in 1_usize..6, block in 1_usize..20, part in 1_usize..40, length in 0_usize..9000, seed in any::<u64>()) {
        let paged = Paged { groups, block, part };
        let from = bytes(seed / 5 * 5, length);
        let mut rows = vec![0; length];
        paged.gather_rows(&from, &mut rows);
        let page = groups * block * part;
        for (at, byte) in from.iter().enumerate() {
            let (before, at) = (at / page * page, at % page);
            let place = before + (at / part % block * groups + at / part / block) * part + at % part;
            let place = if before + page > length { before + at } else { place };
            prop_assert_eq!(rows[place], *byte);
        }
        let mut back = vec![1; length];
        paged.scatter_rows(&rows, &mut back);
        prop_assert!(back == from);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn windows_come_back_whole_and_by_planes(
        format in format(), layout in layout(), window in 0_u64..5, codec in prop::sample::select(Codec::ALL.to_vec()),
        seed in any::<u64>(), way in prop::option::of(prop::sample::select(Coding::ALL.to_vec())), fewer in 0_usize..3, mask in any::<u32>(),
    ) {
        let Ok(Some(shape)) = Shape::new(format, &layout) else { return Ok(()) };
        let blocks = shape.blocks().min(12).saturating_sub(fewer).max(1);
        let before = window * shape.blocks() as u64;
        let order = shape.order(before, blocks);
        let data = if seed % 3 == 0 { bytes(seed / 3, blocks * BLOCK_BYTES) } else { cache(format, order.columns, blocks * BLOCK_BYTES, seed / 3 % 1000) };
        let mut bundles = Vec::new();
        let coded = encode(&shape, before, codec, &data, way, &mut bundles);
        if let Some(way) = way && way == Coding::Plain {
            prop_assert_eq!(coded, Coded::default());
        }
        prop_assert!(bundles.iter().all(Bundle::fits));
        prop_assert_eq!(bundles.len(), blocks);
        let all = PlaneMask::all(format);
        prop_assert!(decode(&shape, before, &bundles, all) == data, "{:?} {:?}", coded, layout);
        let mask = PlaneMask(mask & all.0);
        // A device serves only prefixes of the exponent, but any set of planes must come out right.
        prop_assert!(decode(&shape, before, &bundles, mask) == want(format, mask, &data), "{:?} {:?} {:?}", coded, layout, mask);
    }

    #[test]
    fn damaged_windows_are_refused_or_give_something(
        format in format(), layout in layout(), seed in any::<u64>(), flips in prop::collection::vec(any::<prop::sample::Index>(), 1..5), mend in any::<bool>(),
    ) {
        let Ok(Some(shape)) = Shape::new(format, &layout) else { return Ok(()) };
        let blocks = shape.blocks().min(4);
        let data = cache(format, shape.order(0, blocks).columns, blocks * BLOCK_BYTES, seed % 1000);
        let mut bundles = Vec::new();
        encode(&shape, 0, Codec::Tree, &data, Some(Coding::Deltas), &mut bundles);
        let mut out = Vec::new();
        let mut decoder = Decoder::new();
        let mut decoder = WindowDecoder::new(&mut decoder, &shape, 0, blocks, PlaneMask::all(format), &mut out);
        for (block, bundle) in bundles.iter().enumerate() {
            let Some(stored) = &bundle.stored else { continue };
            let mut bytes = fetched(stored, PlaneMask(u32::MAX), bundle.bytes());
            let head = stored.head_bytes();
            for flip in &flips {
                if head > 2 {
                    let bit = flip.index((head - 2) * 8);
                    bytes[bit / 8] ^= 1 << (bit % 8);
                }
            }
            if mend {
                crate::head::mend(&mut bytes[..head]);
            }
            let added = decoder.add(block, stored, PlaneMask(u32::MAX), &bytes);
            if !mend && head > 2 && bytes[..head] != bundle.bytes()[..head] {
                prop_assert!(added.is_err());
            }
        }
        decoder.finish();
        prop_assert_eq!(out.len(), data.len());
    }
}

/// A cache of channels that differ in size, most of which lean to one sign.
fn lively(rows: usize, columns: usize) -> Vec<u8> {
    let noise = bytes(5, rows * columns * 2);
    noise
        .chunks(2)
        .enumerate()
        .flat_map(|(at, noise)| {
            let column = at % columns;
            let sign = u16::from(noise[0] < 20) ^ u16::from(column.is_multiple_of(2));
            let exponent = 100 + u16::from(small(column * 37 % 29))
                - u16::from(noise[1] & 1)
                - u16::from(noise[1] & 6 == 0);
            (sign << 15 | exponent << 7 | u16::from(noise[0] >> 1)).to_le_bytes()
        })
        .collect()
}

#[test]
fn what_is_alike_in_a_channel_takes_less_channel_by_channel() {
    let shape = Shape::new(Format::Bf16, &KvLayout::rows(64, 128)).unwrap().unwrap();
    assert_eq!(shape.blocks(), 4);
    let data = lively(128, 64);
    for codec in Codec::ALL {
        let mut bundles = Vec::new();
        let mut size = |way| {
            let coded = encode(&shape, 0, codec, &data, way, &mut bundles);
            (coded.coding, bundles.iter().map(|bundle| bundle.bytes().len()).sum::<usize>())
        };
        let (plain, deltas) = (size(Some(Coding::Plain)), size(Some(Coding::Deltas)));
        assert_eq!((plain.0, deltas.0), (Coding::Plain, Coding::Deltas));
        assert!(deltas.1 < plain.1 * 9 / 10, "{codec}: {plain:?} {deltas:?}");
        assert_eq!(size(None), deltas, "{codec}");
    }
}

#[test]
fn a_row_that_repeats_costs_almost_nothing() {
    let shape = Shape::new(Format::Bf16, &KvLayout::rows(64, 128)).unwrap().unwrap();
    let once = lively(16, 64);
    let data = once.repeat(8);
    let mut bundles = Vec::new();
    let coded = encode(&shape, 0, Codec::Lz4, &data, None, &mut bundles);
    assert_eq!(coded.repeated_rows, 112);
    let stored: usize = bundles.iter().map(|bundle| bundle.bytes().len()).sum();
    assert!(stored < once.len(), "{stored} of {}", once.len());
    assert!(decode(&shape, 0, &bundles, PlaneMask::all(Format::Bf16)) == data);
    // A window of which only a few rows are written is mostly rows that repeat.
    let mut partial = lively(128, 64);
    partial[3 * 128..].fill(0);
    let coded = encode(&shape, 0, Codec::Lz4, &partial, None, &mut bundles);
    assert_eq!(coded.repeated_rows, 124);
    assert!(bundles.iter().map(|bundle| bundle.bytes().len()).sum::<usize>() < 1024);
}

#[test]
fn windows_are_coded_alike_whatever_was_coded_before() {
    // Alike and not, with rows that repeat, of two shapes and every codec.
    let shapes = [64, 384].map(|channels| {
        (channels as usize, Shape::new(Format::Bf16, &KvLayout::rows(channels, 128)).unwrap().unwrap())
    });
    let mut windows = Vec::new();
    for (channels, shape) in &shapes {
        let bytes_of = |seed| cache(Format::Bf16, *channels, shape.blocks() * BLOCK_BYTES, seed);
        for bytes in [
            lively(128, *channels),
            bytes_of(1),
            bytes_of(2),
            bytes_of(4),
            bytes(7, shape.blocks() * BLOCK_BYTES),
        ] {
            windows.extend(Codec::ALL.map(|codec| (shape, codec, bytes.clone())));
        }
    }
    let code = |encoder: &mut Encoder, (shape, codec, bytes): &(&Shape, Codec, Vec<u8>)| {
        let mut bundles = Vec::new();
        let coded = encoder.window(shape, 0, *codec, bytes, None, &mut bundles);
        let stored = bundles.iter().map(|bundle| (bundle.stored.clone(), bundle.bytes().to_vec()));
        (coded, stored.collect::<Vec<_>>())
    };
    let alone: Vec<_> = windows.iter().map(|window| code(&mut Encoder::new(), window)).collect();
    let mut encoder = Encoder::new();
    let in_order: Vec<_> = windows.iter().map(|window| code(&mut encoder, window)).collect();
    assert!(in_order == alone);
    let mut in_reverse: Vec<_> = windows.iter().rev().map(|window| code(&mut encoder, window)).collect();
    in_reverse.reverse();
    assert!(in_reverse == alone);
    let on_threads: Vec<_> = std::thread::scope(|scope| {
        let parts = windows.chunks(windows.len() / 2).map(|part| {
            scope.spawn(move || {
                let mut encoder = Encoder::new();
                part.iter().map(|window| code(&mut encoder, window)).collect::<Vec<_>>()
            })
        });
        let parts: Vec<_> = parts.collect();
        parts.into_iter().flat_map(|part| part.join().unwrap()).collect()
    });
    assert!(on_threads == alone);
}

#[test]
fn windows_are_whole_blocks_and_cut_rows_where_they_must() {
    let shape = |format, layout: &KvLayout| Shape::new(format, layout).unwrap().unwrap();
    let blocks = |channels, window| shape(Format::Bf16, &KvLayout::rows(channels, window)).blocks();
    assert_eq!([blocks(384, 128), blocks(1, 1), blocks(33, 100), blocks(4096, 256)], [24, 1, 2, 256]);
    // 4096 elements in two blocks: 62 rows of 66 with padding, and four elements of the next.
    let padded = KvLayout { stride: Some(66), ..KvLayout::rows(33, 60) };
    let orders = [0, 2, 66].map(|before| shape(Format::Bf16, &padded).order(before, 2).first);
    assert_eq!(orders, [0, 4, 0]);
    // Vast rows make windows of what there is room for.
    assert_eq!(blocks(u32::MAX, 256), MAX_BLOCKS);
    assert_eq!(shape(Format::Int4, &KvLayout::rows(33, 8)).order(0, 1).columns, 33);
    assert_eq!(shape(Format::Int4, &KvLayout::rows(34, 8)).order(0, 1).columns, 17);
    // A paged block of 16 tokens of 8 heads of 128: eight of them are 128 tokens.
    let hnd = KvLayout::preset(Preset::Hnd, 8, 128, 16, 128).unwrap();
    assert_eq!((hnd.channels, shape(Format::Bf16, &hnd).blocks()), (1024, 64));
    let both = KvLayout::preset(Preset::NhdKv, 8, 128, 16, 16).unwrap();
    assert_eq!((both.channels, shape(Format::Bf16, &both).blocks()), (2048, 16));
    assert_eq!(Shape::new(Format::Opaque, &KvLayout::rows(8, 8)), Ok(None));
}
