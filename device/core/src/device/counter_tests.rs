//! The counters against a small model of what they count, which knows no more of the device than
//! what each block is stored in.

use std::collections::{BTreeMap, HashMap};

use proptest::prelude::*;
use serde_json::Value;

use super::*;
use crate::layout::Layout;
use lamina_codec::{Encoder, format::Format, kv::KvLayout};

const BLOCK: usize = BLOCK_BYTES;
/// Blocks of the base window: weights, then windows of a KV cache, then nobody's.
const BLOCKS: usize = 32;
const WEIGHTS: Range<usize> = 0..12;
const CACHE: Range<usize> = 12..24;
/// Blocks of a window: 128 tokens of 64 bf16 channels.
const WINDOW: usize = 4;
/// Few, so that entries push each other out.
const INDEX_ENTRIES: usize = 8;

#[derive(Clone, Debug)]
enum Operation {
    Write {
        range: Range<usize>,
        seed: u64,
    },
    Read {
        range: Range<usize>,
    },
    /// Of the view `full` of the weights, or else of the KV cache: these bytes, if it has them.
    View {
        weights: bool,
        range: Range<usize>,
    },
    Discard {
        range: Range<usize>,
    },
    Flush,
}

fn operation() -> impl Strategy<Value = Operation> {
    let range = || {
        let odd = (0..BLOCKS * BLOCK / 8, 1..BLOCK).prop_map(|(at, words)| at * 8..at * 8 + words * 2);
        let tokens =
            (CACHE.start * BLOCK / 128..CACHE.end * BLOCK / 128).prop_map(|row| row * 128..row * 128 + 128);
        let whole = (0..BLOCKS, 1..4_usize).prop_map(|(block, count)| block * BLOCK..(block + count) * BLOCK);
        let window =
            (0..BLOCKS / WINDOW).prop_map(|window| window * WINDOW * BLOCK..(window + 1) * WINDOW * BLOCK);
        prop_oneof![3 => odd, 3 => tokens, 3 => whole, 1 => window]
            .prop_map(|range| range.start..range.end.min(BLOCKS * BLOCK))
    };
    prop_oneof![
        5 => (range(), any::<u64>()).prop_map(|(range, seed)| Operation::Write { range, seed }),
        4 => range().prop_map(|range| Operation::Read { range }),
        4 => (any::<bool>(), range()).prop_map(|(weights, range)| Operation::View { weights, range }),
        1 => range().prop_map(|range| Operation::Discard { range }),
        1 => Just(Operation::Flush),
    ]
}

/// Data that a codec makes smaller, or not, or nothing but zeros.
fn bytes(seed: u64, length: usize) -> Vec<u8> {
    let noise = lamina_codec::testing::bytes(seed, length);
    match seed % 4 {
        0 => vec![0; length],
        1 => noise,
        _ => noise
            .iter()
            .enumerate()
            .map(|(at, byte)| if at % 2 == 0 { *byte } else { 0x3c + byte % 4 })
            .collect(),
    }
}

/// What is told of reads, by the names in JSON.
#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    reads: u64,
    bytes: u64,
    blocks: u64,
    stored: u64,
    plain: u64,
    gcomp: u64,
    index: u64,
    gcomp_index: u64,
    staged_blocks: u64,
    staged: u64,
}

impl Counts {
    fn check(&self, reported: &Value, what: &str) -> Result<(), TestCaseError> {
        for (name, want) in [
            ("reads", self.reads),
            ("bytes", self.bytes),
            ("blocks", self.blocks),
            ("stored_bytes_fetched", self.stored),
            ("plain_bytes_fetched", self.plain),
            ("gcomp_bytes_fetched", self.gcomp),
            ("index_bytes_fetched", 64 * self.index),
            ("gcomp_index_bytes_fetched", 64 * self.gcomp_index),
            ("staged_blocks", self.staged_blocks),
            ("staged_bytes", self.staged),
        ] {
            prop_assert_eq!(reported[name].as_u64(), Some(want), "{} of {}: {}", name, what, reported);
        }
        for (name, part) in
            [("of_plain", self.stored), ("of_plain_with_index", self.stored + 64 * self.index)]
        {
            #[expect(clippy::cast_precision_loss, reason = "small numbers")]
            let want = (self.plain > 0).then(|| part as f64 / self.plain as f64);
            prop_assert_eq!(reported[name].as_f64(), want, "{} of {}", name, what);
        }
        Ok(())
    }
}

/// A direct-mapped cache of entries, and what is counted of it.
#[derive(Default)]
struct Index {
    holds: HashMap<usize, usize>,
    hits: u64,
    misses: u64,
    written: u64,
}

impl Index {
    /// Looks for an entry: 1 if it has to be fetched.
    fn look(&mut self, block: usize) -> u64 {
        let held = self.holds.insert(block % INDEX_ENTRIES, block) == Some(block);
        *(if held { &mut self.hits } else { &mut self.misses }) += 1;
        u64::from(!held)
    }
}

/// What an open window knows of its blocks.
#[derive(Default)]
struct Open {
    touched: [bool; WINDOW],
    whole: [bool; WINDOW],
}

struct Model {
    mode: Mode,
    codec: Codec,
    array: Vec<u8>,
    /// What GComp stores for each block.
    gcomp: Vec<u64>,
    index: Index,
    gcomp_index: Index,
    /// By first block.
    open: BTreeMap<usize, Open>,
    /// Which bytes were given of what was decoded for a view or window, by its first block.
    given: HashMap<usize, Vec<bool>>,
    base: Counts,
    views: Counts,
    writes: Counts,
    gcomp_written: u64,
    blocks_written: u64,
    fills: [[u64; 7]; 2],
}

/// The parts of `range` by pieces of `size` bytes.
fn pieces(range: &Range<usize>, size: usize) -> Vec<Range<usize>> {
    let all = range.start / size..range.end.div_ceil(size);
    all.map(|n| range.start.max(n * size)..range.end.min((n + 1) * size)).collect()
}

/// Bytes of lines that `range` touches, and of those that it does not cover.
fn line_bytes(range: &Range<usize>) -> (u64, u64) {
    let touched = pieces(range, 64);
    let partial = touched.iter().filter(|line| line.len() < 64).count();
    (64 * touched.len() as u64, 64 * partial as u64)
}

impl Model {
    fn new(mode: Mode, codec: Codec) -> Self {
        Self {
            mode,
            codec,
            array: vec![0; BLOCKS * BLOCK],
            gcomp: vec![0; BLOCKS],
            index: Index::default(),
            gcomp_index: Index::default(),
            open: BTreeMap::new(),
            given: HashMap::new(),
            base: Counts::default(),
            views: Counts::default(),
            writes: Counts::default(),
            gcomp_written: 0,
            blocks_written: 0,
            fills: [[0; 7]; 2],
        }
    }

    fn stored(&self, device: &Device, block: usize) -> u64 {
        if self.mode == Mode::Plain {
            0
        } else {
            device.coded_store().unwrap().entry(block as u64).unwrap().charged()
        }
    }

    fn is_window(&self, block: usize) -> bool {
        self.mode == Mode::Trace && CACHE.contains(&block)
    }

    fn fill(&mut self, window: usize, length: usize) {
        let size = [4, 8, 16, 32, 64, 128].iter().position(|size| length <= size << 10).unwrap_or(6);
        self.fills[window][size] += 1;
    }

    /// A read of one block's part of the base window, or of the view `full`.
    fn read(&mut self, device: &Device, part: &Range<usize>, view: bool) -> Counts {
        let block = part.start / BLOCK;
        let (mut counts, (lines, _)) = (Counts::default(), line_bytes(part));
        if !self.is_window(block) {
            let partial = view && self.mode == Mode::Trace && part.len() < BLOCK;
            let inside = part.start - block * BLOCK..part.end - block * BLOCK;
            counts.plain = lines;
            if partial && self.give(block, BLOCK, &inside) {
                return counts;
            }
            if partial {
                self.decoded(block, BLOCK, &inside);
            }
            counts.blocks = 1;
            counts.gcomp = self.gcomp[block];
            counts.gcomp_index = self.gcomp_index.look(block);
            if self.mode == Mode::Plain {
                counts.stored = lines;
            } else {
                counts.stored = self.stored(device, block);
                counts.index = self.index.look(block);
            }
            return counts;
        }
        let first = block - (block - CACHE.start) % WINDOW;
        if self.open.contains_key(&first) {
            (counts.staged_blocks, counts.staged) = (1, lines);
            return counts;
        }
        counts.plain = lines;
        let inside = part.start - first * BLOCK..part.end - first * BLOCK;
        let own = (block - first) * BLOCK..(block - first + 1) * BLOCK;
        let known = self.given.get(&first).is_some_and(|given| given[own].contains(&true));
        let kept = self.give(first, WINDOW * BLOCK, &inside);
        if !kept || !known {
            counts.gcomp = self.gcomp[block];
            counts.gcomp_index = self.gcomp_index.look(block);
        }
        if !kept {
            self.decoded(first, WINDOW * BLOCK, &inside);
            for block in first..first + WINDOW {
                counts.blocks += 1;
                counts.index += self.index.look(block);
                counts.stored += self.stored(device, block);
            }
        }
        counts
    }

    /// Whether these bytes are left of what was decoded. If some are and some are not, it is
    /// decoded again.
    fn give(&mut self, first: usize, size: usize, inside: &Range<usize>) -> bool {
        let Some(given) = self.given.get_mut(&first) else { return false };
        assert_eq!(given.len(), size);
        let again = given[inside.clone()].contains(&true);
        given[inside.clone()].fill(true);
        if again || !given.contains(&false) {
            self.given.remove(&first);
        }
        !again
    }

    fn decoded(&mut self, first: usize, size: usize, inside: &Range<usize>) {
        if *inside != (0..size) {
            let mut given = vec![false; size];
            given[inside.clone()].fill(true);
            self.given.insert(first, given);
        }
    }

    fn reads(&mut self, device: &Device, range: &Range<usize>, view: bool) {
        let mut all = Counts { reads: 1, bytes: range.len() as u64, ..Counts::default() };
        for part in pieces(range, BLOCK) {
            let one = self.read(device, &part, view);
            all.blocks += one.blocks;
            all.stored += one.stored;
            all.plain += one.plain;
            all.gcomp += one.gcomp;
            all.index += one.index;
            all.gcomp_index += one.gcomp_index;
            all.staged_blocks += one.staged_blocks;
            all.staged += one.staged;
        }
        let sum = if view { &mut self.views } else { &mut self.base };
        sum.reads += all.reads;
        sum.bytes += all.bytes;
        sum.blocks += all.blocks;
        sum.stored += all.stored;
        sum.plain += all.plain;
        sum.gcomp += all.gcomp;
        sum.index += all.index;
        sum.gcomp_index += all.gcomp_index;
        sum.staged_blocks += all.staged_blocks;
        sum.staged += all.staged;
        self.fill(view.into(), range.len());
    }

    /// What GComp stores for a block now.
    fn settle_gcomp(&mut self, block: usize) {
        let words = &self.array[block * BLOCK..(block + 1) * BLOCK];
        let mut out = [0; BLOCK];
        let bytes = match self.codec {
            _ if words.iter().all(|byte| *byte == 0) => 0,
            Codec::Lz4 | Codec::Tree => Encoder::new().bytes(Codec::Lz4, words, &mut out).unwrap_or(BLOCK),
            Codec::Zstd => Encoder::new().bytes(Codec::Zstd, words, &mut out).unwrap_or(BLOCK),
        };
        self.gcomp[block] = bytes.next_multiple_of(64) as u64;
        self.gcomp_written += self.gcomp[block];
        self.gcomp_index.written += 1;
    }

    /// A store that is about to change the array.
    fn before_write(&mut self, device: &Device, range: &Range<usize>, discard: bool) {
        let mut at = range.start;
        while at < range.end {
            let block = at / BLOCK;
            if self.is_window(block) {
                let first = block - (block - CACHE.start) % WINDOW;
                let end = range.end.min((first + WINDOW) * BLOCK);
                self.write_window(device, first, &(at..end), discard);
                at = end;
                continue;
            }
            let part = at..range.end.min((block + 1) * BLOCK);
            at = part.end;
            let hole = self.mode != Mode::Plain && device.coded_store().unwrap().is_hole(block as u64);
            if discard && hole {
                continue;
            }
            let plain = line_bytes(&part).1;
            self.writes.gcomp_index += self.gcomp_index.look(block);
            if self.mode != Mode::Plain {
                self.writes.index += self.index.look(block);
                self.index.written += 1;
            }
            if part.len() < BLOCK {
                let (reads, stored) = match self.mode {
                    Mode::Plain => (u64::from(plain > 0), plain),
                    _ => (1, self.stored(device, block)),
                };
                self.writes.reads += reads;
                self.writes.bytes += reads * part.len() as u64;
                self.writes.blocks += u64::from(self.mode != Mode::Plain);
                self.writes.stored += stored;
                self.writes.plain += plain;
                self.writes.gcomp += self.gcomp[block];
            }
            self.given.remove(&block);
            self.blocks_written += 1;
        }
    }

    fn write_window(&mut self, device: &Device, first: usize, range: &Range<usize>, discard: bool) {
        let all = first..first + WINDOW;
        if range.len() == WINDOW * BLOCK {
            let empty = all.clone().all(|block| device.coded_store().unwrap().is_hole(block as u64));
            if discard && empty && !self.open.contains_key(&first) {
                return;
            }
            self.open.insert(first, Open { touched: [true; WINDOW], whole: [true; WINDOW] });
            return;
        }
        if !self.open.contains_key(&first) {
            self.given.remove(&first);
            self.writes.reads += 1;
            self.writes.bytes += range.len() as u64;
            for block in all {
                self.writes.blocks += 1;
                self.writes.index += self.index.look(block);
                self.writes.stored += self.stored(device, block);
            }
        }
        let open = self.open.entry(first).or_default();
        for part in pieces(range, BLOCK) {
            let (block, whole) = (part.start / BLOCK, part.len() == BLOCK);
            if !open.touched[block - first] && !whole {
                self.writes.plain += line_bytes(&part).1;
                self.writes.gcomp += self.gcomp[block];
                self.writes.gcomp_index += self.gcomp_index.look(block);
            }
            open.touched[block - first] = true;
            open.whole[block - first] |= whole;
        }
    }

    /// The store, or the discard, changed the array.
    fn after_write(&mut self, range: &Range<usize>, discard: bool, holes: &[bool]) {
        for block in range.start / BLOCK..range.end.div_ceil(BLOCK) {
            let untouched = discard && holes.get(block) == Some(&true);
            if !self.is_window(block) && !untouched {
                self.settle_gcomp(block);
            }
        }
        let windows = range.start / BLOCK..range.end.div_ceil(BLOCK);
        let touched = |first: usize| first < windows.end && windows.start < first + WINDOW;
        let close = |(first, open): (&usize, &Open)| {
            (touched(*first) && (discard || open.whole == [true; WINDOW])).then_some(*first)
        };
        for first in self.open.iter().filter_map(close).collect::<Vec<_>>() {
            self.close(first);
        }
    }

    fn close(&mut self, first: usize) {
        let open = self.open.remove(&first).unwrap();
        self.given.remove(&first);
        for block in first..first + WINDOW {
            self.writes.index += self.index.look(block);
            self.index.written += 1;
            self.blocks_written += 1;
            if open.touched[block - first] {
                self.writes.gcomp_index += self.gcomp_index.look(block);
                self.settle_gcomp(block);
            }
        }
    }

    fn check(&self, device: &Device) -> Result<(), TestCaseError> {
        let reported = serde_json::to_value(device.stats()).unwrap();
        self.base.check(&reported["requests"]["base"], "base")?;
        self.views.check(&reported["requests"]["views"], "views")?;
        self.writes.check(&reported["reads_for_writes"], "writes")?;
        let (index, gcomp) = (&self.index, &self.gcomp_index);
        for (name, want) in [
            ("hits", index.hits),
            ("misses", index.misses),
            ("bytes_fetched", 64 * index.misses),
            ("bytes_written", 64 * index.written),
            ("gcomp_hits", gcomp.hits),
            ("gcomp_misses", gcomp.misses),
            ("gcomp_bytes_fetched", 64 * gcomp.misses),
            ("gcomp_bytes_written", 64 * gcomp.written),
        ] {
            prop_assert_eq!(
                reported["index"][name].as_u64(),
                Some(want),
                "{} of {}",
                name,
                reported["index"]
            );
        }
        let misses = |what: &Value| what["index_bytes_fetched"].as_u64().unwrap();
        let all = misses(&reported["requests"]["base"])
            + misses(&reported["requests"]["views"])
            + misses(&reported["reads_for_writes"]);
        prop_assert_eq!(all, 64 * index.misses, "each miss is somebody's");
        prop_assert_eq!(reported["writes"]["gcomp_bytes_written"].as_u64(), Some(self.gcomp_written));
        prop_assert_eq!(reported["writes"]["blocks_written"].as_u64(), Some(self.blocks_written));
        for (name, want) in ["base_fills", "view_fills"].into_iter().zip(&self.fills) {
            let sizes = reported["requests"][name].as_array().unwrap();
            let fills: Vec<_> = sizes.iter().map(|size| size["fills"].as_u64().unwrap()).collect();
            prop_assert_eq!(&fills, want, "{}", name);
        }
        // What a view or tensor is told is its part of its window's.
        for name in ["plain_bytes_fetched", "index_bytes_fetched", "staged_blocks", "staged_bytes"] {
            let sum = |list: &Value, field: fn(&Value) -> &Value| -> u64 {
                list.as_array().unwrap().iter().map(|one| field(one)[name].as_u64().unwrap()).sum()
            };
            let of_views = sum(&reported["views"], |view| view);
            prop_assert_eq!(Some(of_views), reported["requests"]["views"][name].as_u64(), "{}", name);
            let of_tensors = sum(&reported["tensors"], |tensor| &tensor["base"]);
            prop_assert!(Some(of_tensors) <= reported["requests"]["base"][name].as_u64(), "{}", name);
        }
        Ok(())
    }
}

fn spec(name: &str, blocks: Range<usize>, layout: Layout) -> TensorSpec {
    TensorSpec {
        name: name.into(),
        dpa: Some((blocks.start * BLOCK) as u64),
        length: (blocks.len() * BLOCK) as u64,
        elements: None,
        shape: Vec::new(),
        format: Format::Bf16,
        layout,
        codec: None,
        base: None,
    }
}

fn run(mode: Mode, codec: Codec, operations: Vec<Operation>) -> Result<(), TestCaseError> {
    let config = DeviceConfig::new((BLOCKS * BLOCK) as u64, 16 << 20);
    let device =
        Device::new(DeviceConfig { mode, codec, index_cache_entries: INDEX_ENTRIES, ..config }).unwrap();
    device.create_tensor(spec("w", WEIGHTS, Layout::Weight)).unwrap();
    device.create_tensor(spec("kv", CACHE, Layout::Kv(KvLayout::rows(64, 128)))).unwrap();
    let views = ["w", "kv"].map(|name| device.create_view(name, "full").unwrap());
    let mut model = Model::new(mode, codec);
    for operation in operations {
        match operation {
            Operation::Write { ref range, .. } | Operation::Discard { ref range } => {
                let (data, discard) = match operation {
                    Operation::Write { seed, .. } => (bytes(seed, range.len()), false),
                    _ => (vec![0; range.len()], true),
                };
                let hole = |block| mode != Mode::Plain && device.coded_store().unwrap().is_hole(block);
                let holes: Vec<_> = (0..BLOCKS as u64).map(hole).collect();
                model.before_write(&device, range, discard);
                if discard {
                    device.discard(range.start as u64, range.len() as u64).unwrap();
                } else {
                    device.write_base(range.start as u64, &data).unwrap();
                }
                model.array[range.clone()].copy_from_slice(&data);
                model.after_write(range, discard, &holes);
            }
            Operation::Read { range } => {
                model.reads(&device, &range, false);
                let mut out = vec![0; range.len()];
                device.read_base(range.start as u64, &mut out).unwrap();
                prop_assert!(out == model.array[range]);
            }
            Operation::View { weights, range } => {
                let (tensor, view) = if weights { (WEIGHTS, &views[0]) } else { (CACHE, &views[1]) };
                let range = range.start.max(tensor.start * BLOCK)..range.end.min(tensor.end * BLOCK);
                if range.is_empty() {
                    continue;
                }
                model.reads(&device, &range, true);
                let mut out = vec![0; range.len()];
                device
                    .read_views(view.offset + (range.start - tensor.start * BLOCK) as u64, &mut out)
                    .unwrap();
                prop_assert!(out == model.array[range]);
            }
            Operation::Flush => {
                device.flush(0, device.base_bytes()).unwrap();
                model
                    .open
                    .keys()
                    .copied()
                    .collect::<Vec<_>>()
                    .into_iter()
                    .for_each(|first| model.close(first));
            }
        }
        model.check(&device)?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(80))]

    #[test]
    fn counters_are_what_a_small_model_counts(
        codec in prop::sample::select(Codec::ALL.to_vec()), operations in prop::collection::vec(operation(), 1..60),
    ) {
        run(Mode::Trace, codec, operations)?;
    }

    #[test]
    fn counters_of_the_baselines_are_what_a_small_model_counts(
        mode in prop::sample::select(vec![Mode::GComp, Mode::Plain]), codec in prop::sample::select(Codec::ALL.to_vec()),
        operations in prop::collection::vec(operation(), 1..60),
    ) {
        run(mode, codec, operations)?;
    }
}

#[test]
fn a_store_that_is_staged_when_its_window_goes_is_what_gcomp_fetches_then() {
    let cleared = |device: &Device| device.clear_poison(0, device.base_bytes()).unwrap();
    let removed = |device: &Device| device.remove_tensor("kv").unwrap();
    for (go, lost) in [(&removed as &dyn Fn(&Device), false), (&cleared, true)] {
        let device = Device::new(DeviceConfig::new((BLOCKS * BLOCK) as u64, 16 << 20)).unwrap();
        let layout = Layout::Kv(KvLayout::rows(64, 128));
        device.create_tensor(spec("kv", CACHE, layout)).unwrap();
        let at = (CACHE.start * BLOCK) as u64;
        if lost {
            device.inject_poison(at + BLOCK as u64, 1).unwrap();
        }
        device.write_base(at, &bytes(5, 1000)).unwrap();
        go(&device);
        let fetched = || device.stats().requests.base.gcomp_bytes_fetched.unwrap();
        let before = fetched();
        device.read_base(at, &mut [0; BLOCK]).unwrap();
        let compressed = {
            let (mut words, mut out) = ([0; BLOCK], [0; BLOCK]);
            words[..1000].copy_from_slice(&bytes(5, 1000));
            Encoder::new().bytes(Codec::Tree, &words, &mut out).unwrap()
        };
        assert_eq!(fetched() - before, compressed.next_multiple_of(64) as u64, "lost: {lost}");
    }
}
