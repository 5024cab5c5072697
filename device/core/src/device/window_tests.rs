//! KV windows in a device: staging and its bound, the cache of decoded windows, readers beside a
//! writer.

use std::sync::atomic::{AtomicBool, Ordering};

use super::{
    coding::{FetchError, Region, Wanted},
    scratch::Request,
    *,
};
use crate::{layout::Layout, stats::Tally};
use lamina_codec::{
    block::{BlockError, MAX_BUNDLE, Stored},
    format::Format,
    kv::KvLayout,
    plane::PlaneMask,
};
use lamina_store::{Fetched, StoreError};

/// Blocks of a window of these tests: 128 tokens of 64 bf16 channels.
const WINDOW: u64 = 4 * 4096;
const WINDOWS: u64 = 6;

fn device(config: impl FnOnce(&mut DeviceConfig)) -> Device {
    let mut all = DeviceConfig { codec: Codec::Tree, ..DeviceConfig::new(1 << 20, 64 << 20) };
    config(&mut all);
    Device::new(all).unwrap()
}

fn cache(device: &Device, name: &str) -> TensorInfo {
    let spec = TensorSpec {
        layout: Layout::Kv(KvLayout::rows(64, 128)),
        ..TensorSpec::new(name.to_owned(), None, WINDOWS * WINDOW, Format::Bf16)
    };
    device.create_tensor(spec).unwrap()
}

/// Rows of 64 bf16 channels, of which each has its own size.
fn rows(seed: u64, bytes: u64) -> Vec<u8> {
    let noise = lamina_codec::testing::bytes(seed * 5, usize::try_from(bytes).unwrap());
    let element = |(at, noise): (usize, &[u8])| {
        let exponent = 90 + u16::try_from(at % 64 * 37 % 29).unwrap() + u16::from(noise[1] & 3);
        (exponent << 7 | u16::from(noise[0] >> 1) | u16::from(noise[1] & 0x80) << 8).to_le_bytes()
    };
    noise.chunks(2).enumerate().flat_map(element).collect()
}

/// Tells the readers, even of a writer that failed.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn read(device: &Device, offset: u64, length: u64) -> Vec<u8> {
    let mut out = vec![0xa5; usize::try_from(length).unwrap()];
    device.read_base(offset, &mut out).unwrap();
    out
}

#[test]
fn tokens_appended_one_by_one_are_read_as_written() {
    let device = device(|config| config.open_windows = 1);
    let [k, v] = ["k", "v"].map(|name| cache(&device, name));
    let data = [rows(1, k.length), rows(2, k.length)];
    let view = device.create_view("k", "e8m3").unwrap();
    let want = |bytes: &[u8]| {
        lamina_reference::view_bytes(lamina_reference::Format::Bf16, "e8m3", bytes, bytes.len() as u64 / 2)
            .unwrap()
    };
    for token in 0..300_u64 {
        let at = usize::try_from(token * 128).unwrap();
        for (tensor, data) in [&k, &v].into_iter().zip(&data) {
            device.write_base(tensor.dpa + token * 128, &data[at..at + 128]).unwrap();
            if token % 37 == 0 {
                device.flush(tensor.dpa, tensor.length).unwrap();
                assert_eq!(device.stats().kv_windows.staged_bytes, 0);
            }
            if token % 23 == 0 {
                assert!(read(&device, tensor.dpa, at as u64 + 128) == data[..at + 128]);
            }
        }
        if token % 31 == 0 {
            let mut shown = vec![0; at + 128];
            device.read_views(view.offset, &mut shown).unwrap();
            assert!(shown == want(&data[0][..at + 128]));
        }
    }
    let report = device.stats();
    assert_eq!((report.kv_windows.open, report.kv_windows.staged_bytes), (1, WINDOW));
    // Two caches take turns in one place.
    assert!(report.kv_windows.back_pressure > 500, "{:?}", report.kv_windows);
    assert!(report.kv_windows.coded_deltas + report.kv_windows.coded_channels > 0, "{:?}", report.kv_windows);
    device.flush(0, device.base_bytes()).unwrap();
    // What was not written takes nothing.
    let stored = device.stats().device.stored_bytes;
    assert!(stored < 2 * 300 * 128 * 8 / 10, "{stored}");
}

#[test]
fn the_bound_on_open_windows_holds_and_nothing_is_lost() {
    let device = device(|config| config.open_windows = 2);
    let tensor = cache(&device, "k");
    let data = rows(3, tensor.length);
    for window in 0..WINDOWS {
        let at = usize::try_from(window * WINDOW).unwrap();
        device.write_base(tensor.dpa + window * WINDOW, &data[at..at + 5000]).unwrap();
        let windows = device.stats().kv_windows;
        assert_eq!(windows.open, (window + 1).min(2));
        assert_eq!(windows.staged_bytes, (window + 1).min(2) * WINDOW);
        assert_eq!(windows.back_pressure, (window + 1).saturating_sub(2));
    }
    // The second one is written again, so the fifth is the older of the two that are open then.
    for window in [1, 0] {
        device.write_base(tensor.dpa + window * WINDOW + 5000, &[7; 10]).unwrap();
    }
    for window in 0..WINDOWS {
        let at = usize::try_from(window * WINDOW).unwrap();
        let mut want = data[at..at + 5000].to_vec();
        want.resize(5010, if window < 2 { 7 } else { 0 });
        assert!(read(&device, tensor.dpa + window * WINDOW, 5010) == want, "window {window}");
    }
    // Whoever writes all of a window leaves none open.
    device.flush(0, device.base_bytes()).unwrap();
    device.write_base(tensor.dpa, &data).unwrap();
    for page in 0..4_u64 {
        device.write_base(tensor.dpa + page * 4096, &[9; 4096]).unwrap();
        assert_eq!(device.stats().kv_windows.open, u64::from(page < 3));
    }
    assert!(read(&device, tensor.dpa, WINDOW).iter().all(|byte| *byte == 9));
}

#[test]
fn a_full_store_refuses_and_loses_nothing() {
    let device = device(|config| config.store_bytes = Some(65536));
    let tensor = cache(&device, "k");
    let noise = lamina_codec::testing::bytes(5, usize::try_from(tensor.length).unwrap());
    let mut written = 0;
    let full = loop {
        let at = usize::try_from(written).unwrap();
        // All but a page, so that it is staged.
        match device.write_base(tensor.dpa + written, &noise[at..at + 3 * 4096]) {
            Ok(()) => {}
            Err(error) => break error,
        }
        match device.flush(tensor.dpa, tensor.length) {
            Ok(()) => written += WINDOW,
            Err(error) => break error,
        }
        assert!(written < tensor.length, "the store holds less than the tensor");
    };
    assert!(matches!(full, DeviceError::Store(StoreError::Full { .. })), "{full}");
    assert_eq!(device.stats().kv_windows.open, 1);
    for window in (0..=written).step_by(usize::try_from(WINDOW).unwrap()) {
        let at = usize::try_from(window).unwrap();
        assert!(read(&device, tensor.dpa + window, 3 * 4096) == noise[at..at + 3 * 4096], "window {window}");
    }
    // Once there is room, it goes where it belongs.
    device.discard(tensor.dpa, WINDOW).unwrap();
    device.flush(tensor.dpa, tensor.length).unwrap();
    let after = device.stats().kv_windows;
    assert_eq!((after.open, after.staged_bytes), (0, 0));
    let at = usize::try_from(written).unwrap();
    assert!(read(&device, tensor.dpa + written, 3 * 4096) == noise[at..at + 3 * 4096]);
}

#[test]
fn a_sequence_that_ends_frees_its_space() {
    let device = device(|_| ());
    let tensor = cache(&device, "k");
    let data = rows(4, tensor.length);
    device.write_base(tensor.dpa, &data).unwrap();
    let all = device.stats().device.stored_bytes;
    // From the middle of a window on, to the middle of another.
    device.discard(tensor.dpa + WINDOW / 2, 3 * WINDOW).unwrap();
    let report = device.stats();
    assert_eq!(report.kv_windows.open, 0);
    assert_eq!(report.writes.discarded_blocks, 12);
    assert!(report.device.stored_bytes < all * 6 / 10, "{} of {all}", report.device.stored_bytes);
    let mut want = data;
    let from = usize::try_from(WINDOW / 2).unwrap();
    want[from..from + usize::try_from(3 * WINDOW).unwrap()].fill(0);
    assert!(read(&device, tensor.dpa, tensor.length) == want);
    // An open window is dropped with the rest.
    device.write_base(tensor.dpa + 100, &[1; 100]).unwrap();
    device.discard(tensor.dpa, tensor.length).unwrap();
    let report = device.stats();
    assert_eq!((report.kv_windows.open, report.device.stored_bytes, report.blocks.live), (0, 0, 0));
    assert_eq!(device.blocks.used_bytes(), 0);
}

#[test]
fn a_reader_of_pages_decodes_a_window_once() {
    let device = device(|_| ());
    let tensor = cache(&device, "k");
    device.write_base(tensor.dpa, &rows(5, tensor.length)).unwrap();
    let stored = device.stats().device.stored_bytes;
    let pages = |offset: u64, length: u64, read: &dyn Fn(u64, &mut [u8])| {
        for at in (0..length).step_by(4096) {
            let mut page = [0; 4096];
            read(offset + at, &mut page[..usize::try_from((length - at).min(4096)).unwrap()]);
        }
    };
    for pass in 1..=3 {
        pages(tensor.dpa, tensor.length, &|at, page| device.read_base(at, page).unwrap());
        let report = device.stats();
        assert_eq!(report.kv_windows.decoded, pass * WINDOWS);
        assert_eq!(report.kv_windows.reused, pass * WINDOWS * 3);
        // Each pass fetches what is stored, once, and compares with what a plain device fetches.
        assert_eq!(report.requests.base.stored_bytes_fetched, pass * stored);
        assert_eq!(report.requests.base.plain_bytes_fetched, Some(pass * tensor.length));
        assert_eq!(
            report.requests.base.gcomp_bytes_fetched,
            report.writes.gcomp_bytes_written.map(|n| pass * n)
        );
        assert_eq!(report.kv_windows.decoded_bytes, 0);
    }
    // A view's planes are fetched once too, fewer of them, also where its pages end inside blocks.
    for spelling in ["e8m3", "e8m3:packed", "fp8_e4m3fn"] {
        let view = device.create_view("k", spelling).unwrap();
        let before = device.stats();
        pages(view.offset, view.length, &|at, page| device.read_views(at, page).unwrap());
        let after = device.stats();
        assert_eq!(after.kv_windows.decoded - before.kv_windows.decoded, WINDOWS, "{spelling}");
        let fetched = after.requests.views.stored_bytes_fetched - before.requests.views.stored_bytes_fetched;
        assert!(fetched < stored * 9 / 10, "{spelling}: {fetched} of {stored}");
    }
    // One page alone costs its window.
    let before = device.stats().requests.base;
    device.read_base(tensor.dpa + 4096, &mut [0; 4096]).unwrap();
    let after = device.stats().requests.base;
    let fetched = after.stored_bytes_fetched - before.stored_bytes_fetched;
    assert!(fetched > 2 * 4096 && fetched < WINDOW, "{fetched}");
    assert_eq!(after.plain_bytes_fetched.unwrap() - before.plain_bytes_fetched.unwrap(), 4096);
    // And what it left behind is not served after a write.
    device.write_base(tensor.dpa + 2 * 4096, &[1; 64]).unwrap();
    device.flush(tensor.dpa, tensor.length).unwrap();
    assert!(read(&device, tensor.dpa + 2 * 4096, 64).iter().all(|byte| *byte == 1));
}

#[test]
fn what_a_tensor_decoded_is_not_another_ones() {
    // Coded in address order, so that its removal codes nothing anew, and channel by channel.
    let noise = lamina_codec::testing::bytes(3, usize::try_from(WINDOW).unwrap());
    for old in [noise, rows(1, WINDOW)] {
        for write in [|_: &Device| (), |device: &Device| device.write_base(0, &rows(2, WINDOW)).unwrap()] {
            let device = device(|_| ());
            cache(&device, "first");
            device.write_base(0, &old).unwrap();
            assert!(read(&device, 0, 4096) == old[..4096]);
            let kept = device.map().tensor_at(0).unwrap().clone();
            device.remove_tensor("first").unwrap();
            // A reader that the removal overtook has decoded more since the window was coded.
            let words = std::sync::Arc::new(old.clone());
            let (all, from) = (PlaneMask::all(Format::Bf16), decoded::DecodedFrom::window(&kept));
            device.blocks.decoded.lock().keep(0, all, 0..4096, words, from);
            drop(kept);
            device.discard(0, WINDOW).unwrap();
            write(&device);
            let now = read(&device, 0, WINDOW);
            cache(&device, "second");
            assert!(read(&device, 4096, WINDOW - 4096) == now[4096..]);
        }
    }
}

#[test]
fn a_tensor_takes_over_what_is_there_and_leaves_it() {
    let device = device(|_| ());
    let data = rows(6, WINDOWS * WINDOW);
    device.write_base(0, &data).unwrap();
    for layout in [KvLayout::rows(64, 128), KvLayout::rows(100, 50), KvLayout::rows(3000, 7)] {
        let spec = TensorSpec {
            layout: Layout::Kv(layout),
            ..TensorSpec::new("k", Some(0), data.len() as u64, Format::Bf16)
        };
        device.create_tensor(spec).unwrap();
        assert!(device.stats().kv_windows.coded_deltas + device.stats().kv_windows.coded_channels > 0);
        assert!(read(&device, 0, data.len() as u64) == data, "{layout}");
        device.write_base(10, &data[10..20]).unwrap();
        device.remove_tensor("k").unwrap();
        let report = device.stats();
        assert_eq!((report.kv_windows.open, report.blocks.heads_bytes), (0, 0));
        assert!(read(&device, 0, data.len() as u64) == data, "{layout}");
        assert_eq!(device.blocks.used_bytes(), report.device.stored_bytes);
    }
}

#[test]
fn a_damaged_window_is_poisoned_until_it_is_written() {
    let device = device(|_| ());
    let tensor = cache(&device, "k");
    let data = rows(7, tensor.length);
    let window = usize::try_from(WINDOW).unwrap();
    device.write_base(tensor.dpa, &data).unwrap();
    device.flip_stored_bit(tensor.dpa / 4096 + 1, 20);
    // Any page of the window, and no other window.
    assert!(read(&device, tensor.dpa + 3 * 4096, 4096).iter().all(|byte| *byte == 0xff));
    assert_eq!(device.stats().requests.damaged_reads, 1);
    let blocks: Vec<_> = device.poison().iter().map(|poison| poison.dpa).collect();
    assert_eq!(blocks, [0, 4096, 8192, 12288].map(|at| tensor.dpa + at));
    assert!(read(&device, tensor.dpa + WINDOW, WINDOW) == data[window..2 * window]);
    // What the rest should be that a store leaves, nobody knows.
    device.write_base(tensor.dpa, &data[..10]).unwrap_err();
    assert!(read(&device, tensor.dpa, WINDOW).iter().all(|byte| *byte == 0xff));
    assert_eq!(device.poison().len(), 4);
    device.write_base(tensor.dpa, &data[..window]).unwrap();
    device.flush(0, device.base_bytes()).unwrap();
    assert!(read(&device, tensor.dpa, tensor.length) == data);
    assert_eq!(device.poison(), []);
}

#[test]
fn readers_see_a_window_before_a_store_or_after_it() {
    let device = device(|config| config.open_windows = 1);
    let tensor = cache(&device, "k");
    let view = device.create_view("k", "full").unwrap();
    let done = AtomicBool::new(false);
    // Every element of the tensor has the same value in each round; stores are of whole blocks,
    // windows or a few tokens.
    let fill = |round: u32| u8::try_from(round % 200 + 1).unwrap();
    device.write_base(tensor.dpa, &vec![fill(0); usize::try_from(tensor.length).unwrap()]).unwrap();
    std::thread::scope(|scope| {
        for reader in 0..2_u64 {
            let (device, done, tensor, view) = (&device, &done, &tensor, &view);
            scope.spawn(move || {
                let mut at = 0;
                while !done.load(Ordering::Relaxed) {
                    let mut page = [0; 4096];
                    if reader == 0 {
                        device.read_base(tensor.dpa + at, &mut page).unwrap();
                    } else {
                        device.read_views(view.offset + at, &mut page).unwrap();
                    }
                    at = (at + 4096 * (reader + 1)) % tensor.length;
                    assert!(page.iter().all(|byte| *byte == page[0] && *byte > 0), "a mixture");
                }
            });
        }
        scope.spawn(|| {
            let _done = Done(&done);
            for round in 1..400 {
                let byte = fill(round);
                let at = u64::from(round) * 7 % WINDOWS * WINDOW;
                if round % 3 == 0 {
                    device
                        .write_base(tensor.dpa + at, &vec![byte; usize::try_from(WINDOW).unwrap()])
                        .unwrap();
                } else {
                    for page in 0..u64::from(round % 4) {
                        device.write_base(tensor.dpa + at + page * 4096, &[byte; 4096]).unwrap();
                    }
                }
                if round % 5 == 0 {
                    device.flush(tensor.dpa, tensor.length).unwrap();
                }
            }
        });
    });
}

#[test]
fn readers_follow_a_tensor_that_comes_and_goes() {
    let device = device(|_| ());
    let data = rows(8, WINDOWS * WINDOW);
    device.write_base(0, &data).unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut at = 0;
                while !done.load(Ordering::Relaxed) {
                    let mut page = [0; 4096];
                    device.read_base(at, &mut page).unwrap();
                    assert!(page == data[usize::try_from(at).unwrap()..][..4096]);
                    at = (at + 4096) % (WINDOWS * WINDOW);
                }
            });
        }
        scope.spawn(|| {
            let _done = Done(&done);
            for _ in 0..30 {
                cache(&device, "k");
                device.remove_tensor("k").unwrap();
            }
        });
    });
}

/// All of a block, by somebody who takes it for one of this format.
fn whole_block(block: u64, format: Format) -> Wanted<'static> {
    const WHOLE: std::ops::Range<usize> = 0..BLOCK_BYTES;
    let mask = PlaneMask::all(format);
    Wanted {
        block,
        next: None,
        mask,
        inside: WHOLE,
        requested: &[WHOLE],
        keep: false,
        view: None,
        first: true,
    }
}

/// What is stored of `block`, fetched as a reader does that is then overtaken.
fn fetched(device: &Device, block: u64) -> Fetched {
    let mut bundle = Box::new([0; MAX_BUNDLE]);
    let all = |_: &Stored| PlaneMask(u32::MAX);
    device.coded_store().unwrap().fetch(block, all, &mut bundle).unwrap()
}

#[test]
fn a_reader_that_a_tensors_removal_overtakes_reads_again() {
    let device = device(|_| ());
    let data = rows(8, WINDOWS * WINDOW);
    device.write_base(0, &data).unwrap();
    cache(&device, "k");
    let fetched = fetched(&device, 0);
    assert!(fetched.entry.place.as_ref().is_some_and(|place| place.stored.head_bytes() > 0));
    let wanted = whole_block(0, Format::Opaque);
    // As one who does not know the tensor.
    let (mut words, mut request) = ([0; BLOCK_BYTES], Request::new(&device.blocks.pool));
    let read_by_itself =
        device.fetch(&device.map(), &Region::of(&device, None), None, &wanted, &mut words, &mut request);
    assert!(matches!(read_by_itself, Err(FetchError::Stale)), "{read_by_itself:?}");
    device.remove_tensor("k").unwrap();
    let why = DeviceError::Damaged { block: 0, why: BlockError::Window { what: "something" } };
    let settled = device.settle_damage(0, Some(&fetched.entry), &why);
    assert!(matches!(settled, Err(FetchError::Stale)), "the block was coded anew: {settled:?}");
    assert_eq!(device.poison(), []);
    assert!(read(&device, 0, WINDOWS * WINDOW) == data);
}

#[test]
fn a_reader_whose_cache_is_gone_reads_again_and_poisons_nothing() {
    // Windows of one block, and of four.
    for tokens in [32, 128] {
        let device = device(|_| ());
        let layout = Layout::Kv(KvLayout::rows(64, tokens));
        let length = WINDOWS * WINDOW;
        let spec = |name: &str, format, layout| TensorSpec {
            layout,
            ..TensorSpec::new(name.to_owned(), Some(0), length, format)
        };
        device.create_tensor(spec("k", Format::Bf16, layout)).unwrap();
        device.write_base(0, &rows(9, length)).unwrap();
        let before = device.map();
        let cache = before.tensor_at(0);
        let mut request = Request::new(&device.blocks.pool);
        let read_as_before = |request: &mut Request<'_>| {
            let wanted = whole_block(0, Format::Bf16);
            let mut words = [0; BLOCK_BYTES];
            device.fetch(&before, &Region::of(&device, cache), cache, &wanted, &mut words, request)
        };
        assert!(read_as_before(&mut request).is_ok());
        device.remove_tensor("k").unwrap();
        let now = read_as_before(&mut request);
        assert!(matches!(now, Err(FetchError::Stale)), "{tokens} tokens, nobody's: {now:?}");
        device.create_tensor(spec("w", Format::Fp32, Layout::Weight)).unwrap();
        let other = lamina_codec::testing::bytes(10, usize::try_from(length).unwrap());
        device.write_base(0, &other).unwrap();
        let now = read_as_before(&mut request);
        assert!(matches!(now, Err(FetchError::Stale)), "{tokens} tokens, another's: {now:?}");
        assert_eq!(device.poison(), []);
        assert!(read(&device, 0, length) == other);
    }
}

#[test]
fn a_reader_that_finds_nothing_knows_that_no_cache_has_it_elsewhere() {
    let device = device(|_| ());
    // Rows that repeat are left out of a window, so its last blocks hold nothing. In address order
    // each holds something.
    let mut data = rows(12, WINDOW);
    data.as_chunks_mut::<256>().0.iter_mut().for_each(|tokens| tokens[..128].fill(0));
    device.write_base(0, &data).unwrap();
    let mut request = Request::new(&device.blocks.pool);
    let mut read_by = |map: &Map, block: u64| {
        let wanted = whole_block(block, Format::Opaque);
        let mut words = [1; BLOCK_BYTES];
        request.tally = Tally::default();
        let read = device.fetch(map, &Region::of(&device, None), None, &wanted, &mut words, &mut request);
        read.map(|()| (words, request.tally.blocks))
    };
    let nobodys = device.map();
    cache(&device, "k");
    let block = (0..WINDOW / 4096).find(|block| fetched(&device, *block).entry.place.is_none());
    let block = block.expect("rows are left out");
    let overtaken = read_by(&nobodys, block);
    assert!(matches!(overtaken, Err(FetchError::Stale)), "{:?}", overtaken.map(|(_, blocks)| blocks));
    device.remove_tensor("k").unwrap();
    // The tensor has come and gone, and what was found may be from between the two.
    let at = usize::try_from(block).unwrap() * BLOCK_BYTES;
    assert!(read_by(&nobodys, block).unwrap().0 == data[at..][..BLOCK_BYTES]);
    assert!(read_by(&nobodys, WINDOWS * WINDOW / 4096).unwrap() == ([0; BLOCK_BYTES], 1));
}

#[test]
fn what_was_written_since_it_was_found_damaged_stays() {
    let device = device(|_| ());
    device.write_base(0, &[1; BLOCK_BYTES]).unwrap();
    let before = fetched(&device, 0);
    device.write_base(0, &[2; BLOCK_BYTES]).unwrap();
    let why = || DeviceError::Damaged { block: 0, why: BlockError::Window { what: "something" } };
    for entry in [Some(&before.entry), None] {
        let settled = device.settle_damage(0, entry, &why());
        assert!(matches!(settled, Err(FetchError::Stale)), "{settled:?}");
    }
    assert_eq!(device.poison(), []);
    assert!(read(&device, 0, 4096) == [2; BLOCK_BYTES]);
    let now = fetched(&device, 0);
    device.settle_damage(0, Some(&now.entry), &why()).unwrap();
    assert_eq!(device.poison().len(), 1);
    assert!(read(&device, 0, 4096) == [poison::PATTERN; BLOCK_BYTES]);
}
