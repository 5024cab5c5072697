use super::{
    super::{
        KvLayout,
        tests::{decode, small},
    },
    *,
};
use crate::{format::Format, plane::PlaneMask, testing::bytes, tree};

/// Rows of bf16 whose channels have a sign each. Exponents are up to three below the channel's largest, which is `largest` of the channel's number.
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
fn differences_that_are_given_up_within_a_window_leave_no_trace() {
    // Whole rows, in blocks of whole columns or not, whose differences are made with the order; and cut rows, whose are made block by block.
    for (channels, rows) in [(1024, 8), (1024, 12), (1000, 12)] {
        let shape = Shape::new(Format::Bf16, &KvLayout::rows(channels, rows)).unwrap().unwrap();
        let order = shape.order(0, shape.blocks());
        assert_eq!(order.by_columns().is_some_and(|columns| columns.fit_blocks()), channels == 1024);
        let (columns, rows) = (order.columns, order.elements.div_ceil(order.columns));
        // Channels of sizes of their own; of one size, where bases are worth nothing; and the same of fewer bits.
        let leaning = |mantissa, largest: fn(usize) -> u8| {
            let mut window = leaning(rows, columns, mantissa, largest);
            window.truncate(shape.blocks() * BLOCK_BYTES);
            window
        };
        let different = leaning(0x7f, |column| 100 + small(column * 37 % 31));
        let same = leaning(0x7f, |_| 115);
        let shorter = leaning(0, |_| 115);
        let in_turn = |windows: &[&Vec<u8>]| {
            let code = |window: &&Vec<u8>| {
                let mut bundles = Vec::new();
                let coded = encode(&shape, 0, Codec::Lz4, window, None, &mut bundles);
                assert!(decode(&shape, 0, &bundles, PlaneMask::all(Format::Bf16)) == **window, "{rows}");
                coded.coding
            };
            // A thread of its own: which way was best is known to the thread.
            std::thread::scope(|scope| {
                scope.spawn(|| windows.iter().map(code).collect::<Vec<_>>()).join().unwrap()
            })
        };
        let alone = [&different, &same, &shorter].map(|window| in_turn(&[window])[0]);
        assert_eq!(alone, [Coding::Deltas, Coding::Channels, Coding::Channels], "{rows}");
        // What was best before is used where it takes as much, though it is not best; where it does not, it was used in vain, and all are tried.
        let turns = in_turn(&[&different, &same, &shorter, &different]);
        assert_eq!(turns, [Coding::Deltas, Coding::Deltas, Coding::Channels, Coding::Deltas], "{rows}");
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
            bundle.encode_headed(Format::Bf16, Codec::Tree, words, &details);
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

#[test]
fn a_sample_of_zeros_may_share_a_column_with_others() {
    // Of 24 blocks the seventh and the nineteenth are samples. That one ends with the first eight rows of a column of twelve.
    let shape = Shape::new(Format::Bf16, &KvLayout::rows(4096, 12)).unwrap().unwrap();
    let zero = SAMPLE / 2 + SAMPLE;
    let columns = shape.order(0, shape.blocks()).by_columns().unwrap().of(zero);
    let last = columns.end - 1;
    let mut window = leaning(12, 4096, 0x7f, |column| 100 + small(column * 37 % 31));
    for (at, element) in window.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let (row, column) = (at / 4096, at % 4096);
        if columns.contains(&column) && (column < last || row < 8) {
            *element = [0; 2];
        }
    }
    let code = || {
        let mut bundles = Vec::new();
        let coded = encode(&shape, 0, Codec::Tree, &window, None, &mut bundles);
        assert_eq!(coded.coding, Coding::Deltas);
        let of_zeros: Vec<_> = (0..bundles.len()).filter(|block| bundles[*block].stored.is_none()).collect();
        assert_eq!(of_zeros, [zero]);
        assert!(decode(&shape, 0, &bundles, PlaneMask::all(Format::Bf16)) == window);
    };
    // A thread of its own, which knows no way yet.
    std::thread::scope(|scope| scope.spawn(code).join().unwrap());
}

#[test]
fn blocks_of_the_same_channels_use_the_code_of_the_window_before_untried() {
    if format!("{:?}", tree::Kernel::best()) == "Bmi2" {
        // It makes a code for each block.
        return;
    }
    let shape = Shape::new(Format::Bf16, &KvLayout::rows(128, 64)).unwrap().unwrap();
    // Of so many exponents about as many elements each, mantissas and signs noise.
    let even = |exponents: u8| -> Vec<u8> {
        let noise = bytes(5, shape.blocks() * BLOCK_BYTES * 2);
        let elements = noise.as_chunks::<4>().0.iter().map(|[low, high, which, _]| {
            let exponent = 100 + u16::from(which % exponents);
            (u16::from(*high & 0x80) << 8 | exponent << 7 | u16::from(low & 0x7f)).to_le_bytes()
        });
        elements.flatten().collect()
    };
    let (four, two) = (even(4), even(2));
    for way in [Coding::Channels, Coding::Plain] {
        // The bytes of the last of some windows, coded one after another by a thread of their own, which knows no code yet.
        let last = |windows: &[&Vec<u8>]| {
            let code = |_, window: &&Vec<u8>| {
                let mut bundles = Vec::new();
                encode(&shape, 0, Codec::Tree, window, Some(way), &mut bundles);
                assert!(decode(&shape, 0, &bundles, PlaneMask::all(Format::Bf16)) == **window);
                bundles.iter().map(|bundle| bundle.bytes().len()).sum::<usize>()
            };
            std::thread::scope(|scope| scope.spawn(|| windows.iter().fold(0, code)).join().unwrap())
        };
        // By the code of four, two take what four do, which a sample would tell.
        let (of_four, of_two, behind) = (last(&[&four]), last(&[&two]), last(&[&four, &two]));
        assert!(of_two < of_four, "{way:?}");
        assert_eq!(
            behind > of_two,
            way == Coding::Channels,
            "{way:?}: {behind:?} bytes instead of {of_two:?}"
        );
    }
}

/// How the last of some windows are coded, one after another by a thread of their own, which knows no way yet.
fn codings(shape: &Shape, effort: Effort, codec: Codec, windows: &[&Vec<u8>]) -> Vec<Coding> {
    let code = |window: &&Vec<u8>| {
        let mut bundles = Vec::new();
        let coded = encode_with(effort, shape, 0, codec, window, None, &mut bundles);
        assert!(decode(shape, 0, &bundles, PlaneMask::all(Format::Bf16)) == **window);
        coded.coding
    };
    std::thread::scope(|scope| scope.spawn(|| windows.iter().map(code).collect()).join().unwrap())
}

#[test]
fn a_way_that_is_clearly_best_again_is_used_for_twice_as_long() {
    // Windows of four blocks, which are asked about after 24.
    let shape = Shape::new(Format::Bf16, &KvLayout::rows(1024, 8)).unwrap().unwrap();
    let different = leaning(8, 1024, 0x7f, |column| 100 + small(column * 37 % 31));
    // It takes as much as differences, though channels are best.
    let same = leaning(8, 1024, 0x7f, |_| 115);
    // How many more are coded in the first's way behind so many of it.
    let longer = |of: &Vec<u8>, count: usize, then: &Vec<u8>| {
        let windows: Vec<_> = std::iter::repeat_n(of, count).chain(std::iter::repeat_n(then, 200)).collect();
        let codings = codings(&shape, Effort::Quick, Codec::Lz4, &windows);
        assert!(codings[..count].iter().all(|coding| *coding == codings[0]));
        codings[count..].iter().position(|coding| *coding != codings[0]).expect("it is asked again")
    };
    // Asked about with the first window, the 26th, the 75th and the 172nd.
    let counts = [1, 25, 26, 74, 75, 171, 172];
    assert_eq!(counts.map(|count| longer(&different, count, &same)), [24, 0, 48, 0, 96, 0, 96]);
    // With few sizes differences are best, but not clearly, and are asked about with every 25th window.
    let few = leaning(8, 1024, 0x7f, |column| if column < 289 { 100 + small(column * 37 % 31) } else { 115 });
    assert_eq!([25, 26, 50, 51].map(|count| longer(&few, count, &same)), [0, 24, 0, 24]);
    // What takes another number of bytes is asked about at once, and then as if it were the first.
    let shorter = leaning(8, 1024, 0x3f, |column| 100 + small(column * 37 % 31));
    let short = leaning(8, 1024, 0x3f, |_| 115);
    let windows: Vec<_> = std::iter::repeat_n(&different, 26)
        .chain([&shorter])
        .chain(std::iter::repeat_n(&short, 100))
        .collect();
    let codings = codings(&shape, Effort::Quick, Codec::Lz4, &windows);
    assert_eq!(codings.iter().position(|coding| *coding != Coding::Deltas), Some(27 + 24));
}

#[test]
fn another_codec_or_shape_is_asked_about_by_itself() {
    let [wide, narrow] =
        [1024, 512].map(|channels| Shape::new(Format::Bf16, &KvLayout::rows(channels, 8)).unwrap().unwrap());
    let windows = [1024, 512].map(|channels| leaning(8, channels, 0x7f, |_| 115));
    let different = leaning(8, 1024, 0x7f, |column| 100 + small(column * 37 % 31));
    let code =
        |shape: &Shape, codec, window: &[u8]| encode(shape, 0, codec, window, None, &mut Vec::new()).coding;
    let codings = std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            [
                code(&wide, Codec::Lz4, &different),
                // Another codec does not know, and what it finds is not told to this one.
                code(&wide, Codec::Zstd, &windows[0]),
                code(&wide, Codec::Lz4, &windows[0]),
                // Nor does another shape.
                code(&narrow, Codec::Lz4, &windows[1]),
            ]
        });
        thread.join().unwrap()
    });
    assert_eq!(codings.map(|coding| coding == Coding::Deltas), [true, false, true, false], "{codings:?}");
}

#[test]
fn channels_may_take_a_192nd_more_than_differences_unless_there_is_time() {
    let shape = Shape::new(Format::Bf16, &KvLayout::rows(1024, 8)).unwrap().unwrap();
    let [mut little, mut more] = [0, 0];
    for different in 0..64 {
        // The second of the four blocks is looked at, of channels from 256 on. More and more of them have sizes of their own.
        let window = leaning(8, 1024, 0x7f, |column| {
            if column < 256 + different { 100 + small(column * 37 % 31) } else { 115 }
        });
        let costs = Coding::ALL.map(|way| {
            let mut bundles = Vec::new();
            let coded = encode(&shape, 0, Codec::Lz4, &window, Some(way), &mut bundles);
            assert_eq!(coded.coding, way);
            bundles[1].bytes().len()
        });
        let [in_order, channels, deltas] = costs;
        assert!(in_order > channels.min(deltas), "{costs:?}");
        let best = if deltas < channels { Coding::Deltas } else { Coding::Channels };
        let is_little = channels.saturating_sub(deltas) <= deltas / 192;
        let quick = if is_little { Coding::Channels } else { Coding::Deltas };
        for (effort, wanted) in [(Effort::Quick, quick), (Effort::Thorough, best)] {
            let coding = codings(&shape, effort, Codec::Lz4, &[&window])[0];
            assert_eq!(coding, wanted, "{different}: {effort:?} {costs:?}");
        }
        match best {
            Coding::Deltas if is_little => little += 1,
            Coding::Deltas => more += 1,
            _ => {}
        }
    }
    assert!(little > 0 && more > 0, "{little} {more}");
}
