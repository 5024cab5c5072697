//! The same work under each design, by hand and by what must hold of any.

use super::*;
use crate::trace::{BlockKind, MAX_TIME_NS, Request, Seen, Served, Writer};

const DEVICE: u64 = 1 << 30;

fn block(plane: u16, exponent: u16) -> Block {
    let mut planes = vec![plane; 16];
    planes[1..9].fill(exponent);
    let words = WordBytes { lz4: Some(4096), zstd: Some(3200) };
    Block { planes: planes.into(), words, ..Block::default() }
}

fn views() -> Vec<View> {
    let view = |name: &str, link_bits, count: u32| View {
        name: name.to_owned(),
        bits: 16,
        link_bits,
        planes: (1 << count) - 1,
    };
    vec![View::full(16), view("e8m3", 16, 12), view("e8m3:packed", 12, 12)]
}

/// A trace of these requests: address, bytes, view, write.
fn trace(blocks: &[(u64, Block)], requests: &[(u64, u64, u32, bool)]) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), Header { seen: Seen::Requests, device_bytes: DEVICE }).unwrap();
    assert!(views().iter().all(|view| writer.view(view).is_ok()));
    assert!(blocks.iter().all(|(number, block)| writer.block(*number, block).is_ok()));
    for (number, (address, length, view, write)) in (0..).zip(requests) {
        let request = Request {
            time_ns: number * 1000,
            address: *address,
            length: *length,
            view: *view,
            guest: 0,
            write: *write,
            served: None,
        };
        writer.request(&request).unwrap();
    }
    writer.finish().unwrap()
}

fn replayed(trace: &[u8], options: &Options) -> Vec<Outcome> {
    compare(&mut Reader::new(trace).unwrap(), &SUBJECTS, options).unwrap().designs
}

fn usual() -> Options {
    Options::usual().unwrap()
}

/// Some numbers, the same each time.
fn numbers(count: u64, below: u64) -> impl Iterator<Item = u64> {
    (0..count).scan(9_u64, move |state, _| {
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        Some((*state >> 33) % below)
    })
}

/// By hand: sign and mantissa planes of 256 bytes and exponent planes of 100 are 2848 bytes, 45
/// granules. The view's twelve planes end at 256 + 800 + 768 = 1824, 29 granules; plane by plane
/// they are 4 + 8 · 2 + 3 · 4 = 32.
#[test]
fn one_block_is_moved_as_by_hand() {
    let blocks = [(7, block(256, 100))];
    let bytes = |view| {
        let trace = trace(&blocks, &[(7 * 4096, 4096, view, false)]);
        replayed(&trace, &usual()).iter().map(|outcome| outcome.read_bytes / 64).collect::<Vec<_>>()
    };
    assert_eq!(bytes(0), [64, 64, 64, 50, 45, 4 + 16 + 28]);
    assert_eq!(bytes(1), [64, 64, 64, 50, 29, 32]);
}

/// What all designs must agree with themselves in.
#[test]
fn what_dram_moves_is_what_was_counted() {
    let blocks: Vec<_> = (0..512)
        .map(|number| {
            let exponent = u16::try_from(number % 200).unwrap();
            let mut block = block(256, exponent);
            block.kind = [BlockKind::Coded, BlockKind::Zeros, BlockKind::Bypassed][exponent as usize % 3];
            (number, block)
        })
        .collect();
    let requests: Vec<_> = numbers(3000, 600 * 4096)
        .map(|at| (at / 8 * 8, 1 + at % 9000, u32::try_from(at % 3).unwrap(), at % 5 == 0))
        .collect();
    let trace = trace(&blocks, &requests);
    let asked: u64 = requests.iter().map(|request| request.1).sum();
    for options in [usual(), Options { pace: Pace::Recorded, buffer: 0, ..usual() }] {
        for outcome in replayed(&trace, &options) {
            let dram = outcome.dram.as_ref().unwrap();
            let moved = 64 * (dram.commands.reads + dram.commands.writes);
            assert_eq!(moved, outcome.read_bytes + outcome.written_bytes + outcome.index_bytes);
            assert_eq!((outcome.requests, outcome.asked_bytes), (3000, asked));
            assert!(dram.latency_ns.count <= 3000 && dram.latency_ns.count > 1500);
            assert!(dram.checked > 0 && dram.energy.access_pj() > 0.0);
            assert_eq!(outcome.buffered > 0, options.buffer > 0 && outcome.subject.design != Design::Plain);
            let mut lines = 0;
            let mut count = |_: &LineAccess| {
                lines += 1;
                Ok(())
            };
            super::lines(&mut Reader::new(&trace[..]).unwrap(), outcome.subject, &options, &mut count)
                .unwrap();
            // A replay without DRAM counts the same, and looks at no line.
            let untimed = Options { dram: None, ..options.clone() };
            let counted = compare(&mut Reader::new(&trace[..]).unwrap(), &[outcome.subject], &untimed);
            let counted = counted.unwrap().designs.remove(0);
            let link = |outcome: &Outcome| -> Vec<_> {
                outcome.link.iter().map(|link| link.traffic.requests).collect()
            };
            assert_eq!(link(&counted), link(&outcome));
            assert_eq!(
                Outcome { dram: None, link: Vec::new(), ..outcome.clone() },
                Outcome { link: Vec::new(), ..counted }
            );
            // Where index entries lie depends on the module, how many lines are moved does not.
            assert_eq!(64 * lines, moved, "{}", outcome.subject.name);
        }
    }
}

/// By hand, in cycles of 2.4 GHz. A block's 64 lines lie in one row under `plain-rows`: activated
/// at 0, read from 39 on every `tCCD_L` = 12, the last at 795, its data until 843: 351.25 ns. Under
/// `plain` 16 of them lie in each of four channels, two in each of eight bank groups: 32
/// activations, reads from 39 on every `tCCD_S` = 8, the last at 159, its data until 207: 86.25 ns.
#[test]
fn words_in_rows_are_moved_as_by_hand() {
    let dram = |requests: &[_]| {
        let outcomes = replayed(&trace(&[], requests), &Options { pace: Pace::Recorded, ..usual() });
        let both = [&outcomes[0], &outcomes[1]];
        assert_eq!(both.map(|outcome| outcome.subject.name), ["plain", "plain-rows"]);
        both.map(|outcome| {
            let dram = outcome.dram.clone().unwrap();
            (dram.commands.activates, dram.commands.reads, dram.commands.writes, dram.latency_ns.max)
        })
    };
    assert_eq!(dram(&[(7 * 4096, 4096, 0, false)]), [(32, 64, 0, 87), (1, 64, 0, 352)]);
    // Two blocks share a row, in the order in which they were first used, whatever their numbers.
    let [_, rows] = dram(&[(7 * 4096, 4096, 0, false), (9000 * 4096, 4096, 0, false)]);
    assert_eq!((rows.0, rows.1), (1, 128));
    // A third does not. The end of it and the begin of a fourth are two lines of one row, and 64
    // bytes over both of them are read before they are written.
    let [_, rows] = dram(&[
        (7 * 4096, 64, 0, false),
        (9000 * 4096, 64, 0, false),
        (5 * 4096 - 32, 64, 0, true),
        (4 * 4096, 4096, 0, false),
    ]);
    assert_eq!((rows.0, rows.1, rows.2), (2, 2 + 2 + 64, 2));
}

/// Placement alone: what moves a block as it is moves it from the same places, compressed or not.
#[test]
fn plain_in_rows_is_gcomp_without_compression_and_index() {
    let requests: Vec<_> = numbers(2000, 5000).map(|block| (block * 4096, 4096, 0, block % 5 == 0)).collect();
    let trace = trace(&[], &requests);
    let moved = |name: &str| {
        let subject = Subject::named(name).unwrap();
        let mut moved = Vec::new();
        let options = Options { buffer: 0, ..usual() };
        super::lines(&mut Reader::new(&trace[..]).unwrap(), subject, &options, |line| {
            moved.push((line.address, line.write));
            Ok(())
        })
        .unwrap();
        // Index entries lie behind all blocks.
        moved.retain(|(address, _)| *address < DEVICE);
        moved
    };
    let [plain, rows, gcomp] = ["plain", "plain-rows", "gcomp-lz4"].map(moved);
    assert!(rows == gcomp && rows != plain && rows.len() == plain.len());
}

/// A store of a part finds the block that was just read, under each design that has a buffer.
#[test]
fn a_store_of_a_part_finds_what_was_read() {
    let block = block(256, 100);
    let load = |view| replayed(&trace(&[(0, block.clone())], &[(0, 64, view, false)]), &usual());
    let both = |view| {
        let requests = [(0, 64, view, false), (0, 64, view, true)];
        replayed(&trace(&[(0, block.clone())], &requests), &usual())
    };
    for (loaded, stored) in load(0).iter().zip(&both(0)).skip(2) {
        let name = stored.subject.name;
        assert_eq!((stored.fills, stored.read_bytes), (1, loaded.read_bytes), "{name}");
    }
    // Of a view that is not all of it, the store reads the block.
    let fills = both(1).iter().map(|outcome| outcome.fills).collect::<Vec<_>>();
    assert_eq!(fills, [0, 0, 1, 1, 2, 2]);
    // A view of all planes is all of a block of more.
    let narrow = View::full(8);
    let mut writer = Writer::new(Vec::new(), Header { seen: Seen::Lines, device_bytes: DEVICE }).unwrap();
    writer.view(&narrow).unwrap();
    for write in [false, true] {
        let request = Request { time_ns: 0, address: 0, length: 64, view: 0, guest: 0, write, served: None };
        writer.request(&request).unwrap();
    }
    for outcome in replayed(&writer.finish().unwrap(), &usual()).iter().skip(2) {
        assert_eq!(outcome.fills, 1, "{}", outcome.subject.name);
    }
}

/// By hand: of blocks 0 to 7 the buffer holds all, and 0 is used again. Then 8 comes and 1 goes, so
/// 7 is there still.
#[test]
fn the_block_that_was_not_used_for_longest_goes() {
    let order = [0, 1, 2, 3, 4, 5, 6, 7, 0, 8, 7];
    let requests: Vec<_> = order.iter().map(|number| (number * 4096, 64, 0, false)).collect();
    for outcome in replayed(&trace(&[], &requests), &usual()).iter().skip(2) {
        assert_eq!((outcome.fills, outcome.buffered), (9, 2), "{}", outcome.subject.name);
    }
}

/// A load of 64 bytes: `trace` fetches a block for it, and is worse than `plain`, as it would be.
#[test]
fn one_line_random_reads_are_worse_under_trace() {
    let blocks: Vec<_> = (0..100_000).map(|number| (number, block(256, 100))).collect();
    let requests: Vec<_> = numbers(5000, 100_000 * 64).map(|line| (line * 64, 64, 0, false)).collect();
    let outcomes = replayed(&trace(&blocks, &requests), &usual());
    let [plain, .., trace, _] = &outcomes[..] else { panic!("six designs") };
    assert!(trace.read_bytes > 40 * plain.read_bytes);
    let dram = |outcome: &Outcome| outcome.dram.clone().unwrap();
    assert!(dram(trace).asked_gbs < dram(plain).asked_gbs / 10.0);
    assert!(dram(trace).access_pj_per_byte > dram(plain).access_pj_per_byte);
    assert!(trace.service_cycles.mean > plain.service_cycles.mean);
    assert_eq!(plain.service_cycles.max, 71);
}

/// By hand: 71 cycles at 2 GHz, and the link's 70 ns, or what is given for them.
#[test]
fn a_load_takes_the_controllers_cycles_and_the_link() {
    let trace = trace(&[], &[(0, 64, 0, false), (4096, 64, 0, true)]);
    let plain = |options: &Options| replayed(&trace, options).remove(0);
    let usually = plain(&usual());
    assert_eq!((usually.load_ns, usually.load_p99_ns), (Some(105.5), Some(105.5)));
    let link = usual().link.with_latency(0.0);
    assert_eq!(plain(&Options { link, ..usual() }).load_ns, Some(35.5));
}

/// Reading on and on: planes save bytes, a view more, and energy with them. In a bundle a view
/// saves bursts and hardly an activation; rows of their own stay asleep.
#[test]
fn only_planes_in_rows_of_their_own_leave_rows_asleep() {
    let blocks: Vec<_> = (0..4096).map(|number| (number, block(256, 256))).collect();
    let read = |view| {
        let requests: Vec<_> = (0..4096).map(|number| (number * 4096, 4096, view, false)).collect();
        let outcomes = replayed(&trace(&blocks, &requests), &usual());
        let activates = |at: usize| outcomes[at].dram.as_ref().unwrap().commands.activates;
        let energy = |at: usize| outcomes[at].dram.as_ref().unwrap().energy.access_pj();
        (activates(4), activates(5), energy(4), energy(5), outcomes)
    };
    let (bundles, planes, full_energy, full_planes, full) = read(0);
    let (view_bundles, view_planes, view_energy, view_planes_energy, view) = read(1);
    assert!(view_bundles * 10 > bundles * 9, "{view_bundles} {bundles}");
    assert!(view_planes * 4 < planes * 3 + planes / 2, "{view_planes} {planes}");
    assert!(view_energy < 0.8 * full_energy && view_planes_energy < 0.8 * full_planes);
    assert_eq!(view[5].read_bytes * 16, full[5].read_bytes * 12);
    assert_eq!(view[0].read_bytes, full[0].read_bytes);
}

#[test]
fn the_link_is_told_view_by_view() {
    let requests: Vec<_> =
        (0..64).map(|number| (number * 4096, 4096, u32::try_from(number % 3).unwrap(), false)).collect();
    let outcomes = replayed(&trace(&[], &requests), &usual());
    let lines = |at: usize| -> Vec<(String, u64)> {
        let link = outcomes[at].link.iter();
        link.map(|link| (link.view.clone(), link.traffic.up.data_bytes / 64)).collect()
    };
    let named = |lines: [u64; 3]| ["full", "e8m3", "e8m3:packed"].map(str::to_owned).into_iter().zip(lines);
    assert_eq!(lines(0), named([22 * 64, 21 * 64, 21 * 64]).collect::<Vec<_>>());
    assert_eq!(lines(4), named([22 * 64, 21 * 64, 21 * 48]).collect::<Vec<_>>());
    // All views share one link: words come through it faster than it carries them, so it is full.
    for outcome in &outcomes {
        let used = outcome.link.iter().map(|link| link.traffic.up.utilisation.unwrap());
        assert!(used.clone().all(|part| part > 0.0), "{}", outcome.subject.name);
        let all: f64 = used.sum();
        assert!(all < 1.0 + 1e-9, "{}: {all}", outcome.subject.name);
        assert!(outcome.subject.name != "plain" || all > 1.0 - 1e-9, "{all}");
    }
    // The trace said nothing of these blocks.
    assert_eq!(outcomes[4].assumed, 64);
}

/// Requests that came faster than DRAM serves them, or all at once, took as long as DRAM was at
/// work.
#[test]
fn what_was_recorded_takes_no_less_than_dram() {
    let rate = usual().dram.unwrap().geometry.channels;
    for (count, nearly) in [(1, 0.02), (2000, 0.001)] {
        // A microsecond apart in `trace`, a hundred blocks each: 400 KiB take five.
        let requests: Vec<_> = (0..count).map(|number| (number * 100 * 4096, 100 * 4096, 0, false)).collect();
        let trace = trace(&[], &requests);
        let at = &|pace| replayed(&trace, &Options { pace, ..usual() });
        let paces = [Pace::Full, Pace::Recorded];
        let [all_full, all_recorded] = std::thread::scope(|scope| {
            paces.map(|pace| scope.spawn(move || at(pace))).map(|replaying| replaying.join().unwrap())
        });
        for (full, recorded) in all_full.iter().zip(&all_recorded) {
            let [full_dram, dram] = [full, recorded].map(|outcome| outcome.dram.clone().unwrap());
            let close = |a: f64, b: f64| (a / b - 1.0).abs() <= nearly;
            let name = full.subject.name;
            assert!(close(dram.seconds, full_dram.seconds) && close(dram.gbs, full_dram.gbs), "{name}");
            assert!(dram.gbs < 19.2 * f64::from(rate), "{name}: {}", dram.gbs);
            let used = |outcome: &Outcome| outcome.link[0].traffic.up.utilisation.unwrap();
            assert!(close(used(recorded), used(full)) && used(full) < 1.0 + 1e-9, "{name}");
        }
    }
    // Without DRAM nobody knows how long one request takes.
    let one = trace(&[], &[(0, 4096, 0, false)]);
    let untimed = replayed(&one, &Options { dram: None, pace: Pace::Recorded, ..usual() });
    assert!(untimed.iter().all(|outcome| outcome.link[0].traffic.up.utilisation.is_none()));
}

/// Between two requests and up to the second all designs stand by for the same time, whether its
/// block is in their buffer or not.
#[test]
fn standby_goes_on_to_the_end_of_a_recording() {
    let mut writer = Writer::new(Vec::new(), Header { seen: Seen::Requests, device_bytes: DEVICE }).unwrap();
    writer.view(&View::full(16)).unwrap();
    for time_ns in [0, 300_000_000] {
        let request =
            Request { time_ns, address: 0, length: 4096, view: 0, guest: 0, write: false, served: None };
        writer.request(&request).unwrap();
    }
    let trace = writer.finish().unwrap();
    let outcomes = replayed(&trace, &Options { pace: Pace::Recorded, ..usual() });
    let dram: Vec<_> = outcomes.iter().map(|outcome| outcome.dram.clone().unwrap()).collect();
    assert_eq!((outcomes[0].buffered, outcomes[4].buffered), (0, 1));
    for (one, outcome) in dram.iter().zip(&outcomes) {
        let name = outcome.subject.name;
        assert!((one.seconds - 0.3).abs() < 1e-6, "{name}: {}", one.seconds);
        let part = one.energy.background_pj / dram[0].energy.background_pj;
        assert!((part - 1.0).abs() < 1e-3, "{name}: {part}");
        // By hand: each of four channels is refreshed every 9332 of 720 million cycles.
        assert_eq!((usual().dram.unwrap().timing.refi, one.commands.refreshes), (9332, 4 * 77_153), "{name}");
    }
}

/// By hand: a block that is read counts once, whatever it is made of, and a store counts the blocks
/// that it has to read first.
#[test]
fn every_design_counts_blocks() {
    for (request, blocks) in [
        ((7 * 4096, 4096, 0, false), 1),
        ((7 * 4096 + 64, 64, 0, false), 1),
        ((7 * 4096 - 1, 4098, 0, false), 3),
        ((7 * 4096, 8192, 0, true), 0),
        ((7 * 4096 + 8, 8, 0, true), 1),
        ((7 * 4096 + 8, 1000, 0, true), 1),
        ((7 * 4096 - 8, 16, 0, true), 2),
        ((7 * 4096 - 8, 4096 + 16, 0, true), 2),
        ((7 * 4096, 4096 + 8, 0, true), 1),
    ] {
        let requests = [request];
        for outcome in replayed(&trace(&[], &requests), &Options { buffer: 0, ..usual() }) {
            assert_eq!(outcome.service_cycles.count, blocks, "{}: {request:?}", outcome.subject.name);
        }
    }
}

/// A block that is in the buffer is not moved, and its size is nobody's concern.
#[test]
fn sizes_are_of_the_blocks_that_are_moved() {
    let zeros = Block { kind: BlockKind::Zeros, ..Block::default() };
    let blocks = [(0, block(256, 100)), (1, zeros), (2, block(256, 256))];
    let requests: Vec<_> = (0..4 * 64).map(|line| (line * 64, 64, 0, false)).collect();
    for outcome in replayed(&trace(&blocks, &requests), &usual()).iter().skip(2) {
        let sizes = (outcome.measured, outcome.whole, outcome.assumed);
        assert_eq!((sizes, outcome.buffered), ((3, 0, 1), 4 * 63), "{}", outcome.subject.name);
        assert_eq!(outcome.fills + outcome.zeros, 4);
    }
}

/// A device has tensors of several formats, and each of them has a view `full`.
#[test]
fn views_of_one_name_are_told_apart_by_their_bits() {
    let mut writer = Writer::new(Vec::new(), Header { seen: Seen::Requests, device_bytes: DEVICE }).unwrap();
    for bits in [16, 8] {
        writer.view(&View::full(bits)).unwrap();
    }
    for view in 0..2 {
        let (time_ns, address, length) = (0, 4096 * u64::from(view), 64);
        let request = Request { time_ns, address, length, view, guest: 0, write: false, served: None };
        writer.request(&request).unwrap();
    }
    let outcome = replayed(&writer.finish().unwrap(), &usual()).remove(0);
    let told: Vec<_> = outcome.link.iter().map(|link| (link.view.as_str(), link.bits)).collect();
    assert_eq!(told, [("full", 16), ("full", 8)]);
}

#[test]
fn assumed_blocks_have_the_assumed_ratios() {
    let block = Assumed::default().block();
    let bytes: u64 = block.planes.iter().map(|plane| u64::from(*plane)).sum();
    assert!((4096.0 / crate::number::float(bytes) - 1.34).abs() < 0.01, "{bytes}");
    assert_eq!(block.words, WordBytes { lz4: Some(4096), zstd: Some(3254) });
    for bits in [4, 8, 32] {
        Assumed { bits, trace: 1.0, ..Assumed::default() }.block();
    }
}

/// What is measured of words counts, whatever this device's bundle is: by hand, of six blocks.
#[test]
fn words_that_were_measured_are_moved_by_gcomp_alone() {
    let by_lz4 = |lz4| WordBytes { lz4, zstd: None };
    let zeros = Block { kind: BlockKind::Zeros, ..Block::default() };
    let mut blocks = [(0, block(256, 100)), (1, zeros.clone()), (2, zeros.clone()), (3, block(256, 256))];
    // The difference to a base may be zeros where the words are not, and the other way round.
    blocks[1].1.words = by_lz4(Some(100));
    blocks[3].1.words = by_lz4(Some(0));
    let mut writer = Writer::new(Vec::new(), Header { seen: Seen::Requests, device_bytes: DEVICE }).unwrap();
    writer.view(&View::full(16)).unwrap();
    assert!(blocks.iter().all(|(number, block)| writer.block(*number, block).is_ok()));
    // Of block 4 only its words are known. Block 0's are said anew.
    writer.words(4, by_lz4(Some(2000))).unwrap();
    writer.words(0, by_lz4(Some(64))).unwrap();
    let served = |number: u64, length, write, asked| Request {
        time_ns: number,
        address: number * 4096,
        length,
        view: 0,
        guest: 0,
        write,
        served: Some(Served { asked, fetched: asked, by_itself: true, reads_told: true }),
    };
    assert!((0..6).all(|number| writer.request(&served(number, 4096, false, true)).is_ok()));
    // A part of block 0 is stored, which is read first and larger then.
    writer.request(&served(0, 4096, false, false)).unwrap();
    writer.words(0, by_lz4(Some(130))).unwrap();
    writer.request(&served(0, 64, true, true)).unwrap();
    let outcomes = replayed(&writer.finish().unwrap(), &usual());
    let gcomp = &outcomes[2];
    // Block 5 has the assumed ratio, 1.
    assert_eq!(gcomp.read_bytes, 64 + 128 + 2048 + 4096 + 64);
    assert_eq!((gcomp.written_bytes, gcomp.zeros), (192, 2));
    assert_eq!((gcomp.measured, gcomp.assumed, gcomp.requests), (7, 1, 7));
    // Bundles are what they were. Of blocks 4 and 5 nobody said one.
    let own = &outcomes[4];
    assert_eq!((own.measured, own.assumed, own.zeros), (5, 2, 2));
    // By ZSTD nothing is known but that blocks 1 and 2 are zeros.
    let by_zstd = &outcomes[3];
    assert_eq!((by_zstd.measured, by_zstd.whole, by_zstd.assumed), (2, 0, 6));
    assert_eq!((own.written_bytes, own.requests), (2880, 7));
}

#[test]
fn absurd_options_are_refused_by_field() {
    let trace = trace(&[], &[(0, 64, 0, false)]);
    let refused = |options: &Options| {
        compare(&mut Reader::new(&trace[..]).unwrap(), &SUBJECTS, options).unwrap_err().to_string()
    };
    let mut small = usual();
    if let Some(profile) = &mut small.dram {
        profile.geometry.rows = 16;
    }
    assert!(refused(&small).contains("device bytes is 1073741824"));
    assert!(refused(&Options { registers: 0, ..usual() }).contains("mshr is 0"));
    let cache = CacheConfig { ways: 3, ..CacheConfig::default() };
    assert!(refused(&Options { cache, ..usual() }).contains("index-ways is 3"));
    let assumed = Assumed { trace: 9.0, ..Assumed::default() };
    assert!(refused(&Options { assumed, ..usual() }).contains("assumed trace ratio is 9"));
    let assumed = Assumed { bits: 0, ..Assumed::default() };
    assert!(refused(&Options { assumed, ..usual() }).contains("assumed bits is 0"));
    assert!(Subject::named("other").unwrap_err().to_string().contains("trace-planes"));
}

/// Line by line and byte by byte: the lines of a bundle in which a wanted part has a byte.
fn bundle_slowly(block: &Block, wanted: u64) -> Vec<u64> {
    let mut bytes = vec![true; block.head.into()];
    let is_joint = |plane: u64| (1..=u64::from(block.joint)).contains(&plane);
    let is_wanted = |plane: u64| wanted >> plane & 1 == 1;
    for (plane, length) in (0..).zip(&*block.planes) {
        if plane == 1 {
            let any = (0..64).any(|plane| is_joint(plane) && is_wanted(plane));
            bytes.extend(vec![any; block.stream.into()]);
        }
        bytes.extend(vec![is_wanted(plane); (*length).into()]);
    }
    (0..).zip(bytes.chunks(64)).filter(|(_, line)| line.contains(&true)).map(|(line, _)| line).collect()
}

/// Plane by plane: a place each, of which the first lines are moved that hold what is stored.
fn rows_slowly(block: &Block, number: u64, wanted: u64, columns: u64) -> Vec<u64> {
    let planes = block.planes.len() as u64;
    let place = (BLOCK_BYTES / planes).div_ceil(64).clamp(1, columns);
    let is_joint = |plane: u64| (1..=u64::from(block.joint)).contains(&plane);
    let any_joint = (0..planes).any(|plane| is_joint(plane) && wanted >> plane & 1 == 1);
    let mut moved = Vec::new();
    for (plane, length) in (0..).zip(&*block.planes) {
        let (mut bytes, mut most) = (u64::from(*length), place);
        let mut is_wanted = wanted >> plane & 1 == 1;
        if plane == 0 {
            (bytes, most) = (bytes + u64::from(block.head), columns);
            is_wanted |= block.head > 0;
        } else if is_joint(plane) {
            bytes += u64::from(block.stream).div_ceil(block.joint.into());
            is_wanted = any_joint;
        }
        let blocks_before = number % (columns / place);
        let row = number / (columns / place) * planes + plane;
        let mut line = 0;
        while is_wanted && 64 * line < bytes && line < most {
            moved.push(row * columns + blocks_before * place + line);
            line += 1;
        }
    }
    moved
}

#[test]
fn lines_of_a_layout_are_those_found_slowly() {
    let mut numbers = numbers(u64::MAX, 1 << 31);
    let mut below = |most: u64| numbers.next().unwrap() % most;
    for _ in 0..20_000 {
        let count = 1 + below(32);
        let joint = if below(2) == 0 { 0 } else { below(count) };
        let mut small = |most| u16::try_from(below(most)).unwrap();
        let planes = (0..count).map(|_| if small(3) == 0 { 0 } else { small(300) }).collect();
        let (head, stream) = (small(3) * small(100), if joint > 0 { small(900) } else { 0 });
        let joint = u8::try_from(joint).unwrap();
        let block = Block { head, stream, joint, planes, ..Block::default() };
        let wanted = below(1 << 31) | below(2) << 31;
        let mut bundle = Vec::new();
        layout::bundle(&block, wanted, |lines| bundle.extend(lines));
        assert_eq!(bundle, bundle_slowly(&block, wanted), "{block:?} {wanted:#x}");
        let (number, columns) = (below(1 << 20), 64 << below(2));
        let mut rows = Vec::new();
        layout::rows(&block, number, wanted, columns, |lines| rows.extend(lines));
        assert_eq!(rows, rows_slowly(&block, number, wanted, columns), "{block:?} {number} {wanted:#x}");
    }
}

/// What `plain` moves, line by line.
#[test]
fn plain_moves_the_lines_that_are_touched() {
    for (start, length) in numbers(200, 1 << 16).map(|number| (number % 1000, 1 + number / 1000 * 7 % 500)) {
        let of = |write| {
            let trace = trace(&[], &[(start, length, 0, write)]);
            let mut moved = Vec::new();
            let mut take = |line: &LineAccess| {
                moved.push((line.address, line.write));
                Ok(())
            };
            super::lines(&mut Reader::new(&trace[..]).unwrap(), SUBJECTS[0], &usual(), &mut take).unwrap();
            (moved, replayed(&trace, &Options { dram: None, ..usual() })[0].service_cycles.count)
        };
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        for line in (0..2000)
            .step_by(64)
            .filter(|line| (*line..line + 64).any(|at| (start..start + length).contains(&at)))
        {
            reads.push((line, false));
            let is_whole = (line..line + 64).all(|at| (start..start + length).contains(&at));
            if !is_whole {
                writes.push((line, false));
            }
            writes.push((line, true));
        }
        // All of it is in one block.
        let parts = writes.iter().filter(|(_, write)| !write).count();
        assert_eq!(of(false), (reads, 1), "{start} {length}");
        assert_eq!(of(true), (writes, parts.min(1) as u64), "{start} {length}");
    }
}

/// Five million requests a second a core for bytes and link, a million with timing, optimised. Here
/// it is only said.
#[test]
fn rates_of_replaying_are_printed() {
    let lines: Vec<_> = (0..400_000).map(|line| (line * 64, 64, 0, false)).collect();
    let bytes = trace(&[], &lines);
    for dram in [None, usual().dram] {
        let options = Options { dram, ..usual() };
        let started = std::time::Instant::now();
        for subject in SUBJECTS {
            compare(&mut Reader::new(&bytes[..]).unwrap(), &[subject], &options).unwrap();
        }
        let rate = 0.4 * 6.0 / started.elapsed().as_secs_f64();
        println!("{rate:.2} million requests a second, timing: {}", options.dram.is_some());
    }
}

/// Whatever a trace says of times and losses, its replay has an end and counts what it can.
#[test]
fn the_latest_times_and_the_most_losses_are_replayed() {
    let latest = MAX_TIME_NS;
    let mut writer = Writer::new(Vec::new(), Header { seen: Seen::Requests, device_bytes: DEVICE }).unwrap();
    writer.view(&View::full(16)).unwrap();
    for time_ns in [0, latest - 5, latest] {
        writer.lost(u64::MAX).unwrap();
        let request =
            Request { time_ns, address: 0, length: 64, view: 0, guest: 0, write: false, served: None };
        writer.request(&request).unwrap();
    }
    let trace = writer.finish().unwrap();
    // As short a cycle as a module may have, so that times are the most cycles.
    let mut fast = usual().dram.unwrap();
    fast.timing.tck_ps = 10.0;
    for (pace, dram) in
        [(Pace::Full, usual().dram), (Pace::Recorded, usual().dram), (Pace::Recorded, Some(fast))]
    {
        let options = Options { dram, pace, ..usual() };
        let compared = compare(&mut Reader::new(&trace[..]).unwrap(), &SUBJECTS, &options).unwrap();
        assert_eq!(compared.lost, u64::MAX);
        for outcome in compared.designs {
            assert_eq!((outcome.requests, outcome.dram.unwrap().commands.reads > 0), (3, true));
        }
    }
}
