//! A trace going through one design.

mod lines;

use std::collections::{HashMap, VecDeque};
use std::hash::BuildHasherDefault;
use std::ops::Range;
use std::rc::Rc;

use super::{DramReport, Options, Outcome, Pace, Placement, Subject, ViewTraffic, WordCodec, layout};
use crate::controller::{Design, GHZ, IndexCache, Stored};
use crate::dram::{Done, Dram, Energy};
use crate::link::{Direction, Requests, Traffic};
use crate::number::float;
use crate::trace::text::LineAccess;
use crate::trace::{BLOCK_BYTES, Block, BlockKind, NumberHasher, Request, Served, View};
use crate::{Histogram, ModelError};

/// A request whose bursts are under way.
struct Open {
    left: u32,
    begin: Option<u64>,
    end: u64,
    complete: bool,
}

/// What is asked of one block.
#[derive(Clone, Copy)]
struct Asked {
    whole: bool,
    write: bool,
    served: Option<Served>,
}

/// Lines moved and where: by which of the two ways a line's number becomes a place.
#[derive(Clone, Copy)]
enum Way {
    ByLine,
    ByRow,
}

/// One design at work.
pub struct Run {
    subject: Subject,
    options: Options,
    cache: IndexCache,
    /// Decoded blocks, the latest first, and which planes of them.
    buffer: VecDeque<(u64, u64)>,
    /// Where bundles lie: the first line and how many.
    segments: HashMap<u64, (u64, u64), BuildHasherDefault<NumberHasher>>,
    next_line: u64,
    index_line: u64,
    assumed: Rc<Block>,
    dram: Option<Dram>,
    exported: Option<Vec<LineAccess>>,
    /// Requests under way, the oldest with number `first`.
    open: VecDeque<Open>,
    first: u64,
    done: Vec<Done>,
    now: u64,
    sums: Sums,
    link: Vec<Requests>,
    latency: Histogram,
    service: Histogram,
}

#[derive(Default)]
struct Sums {
    requests: u64,
    asked: u64,
    read: u64,
    written: u64,
    index: u64,
    hits: u64,
    misses: u64,
    fills: u64,
    buffered: u64,
    zeros: u64,
    measured: u64,
    whole: u64,
    assumed: u64,
    last_ns: u64,
}

impl Run {
    /// A design that did nothing yet.
    ///
    /// # Errors
    /// An option is of no use.
    pub fn new(subject: Subject, options: &Options) -> Result<Self, ModelError> {
        let dram = options.dram.as_ref().map(|profile| Dram::new(profile, options.registers)).transpose()?;
        let bytes = options.dram.as_ref().map_or(crate::trace::MAX_DEVICE, crate::dram::Profile::bytes);
        Ok(Self {
            subject,
            cache: IndexCache::new(options.cache)?,
            buffer: VecDeque::with_capacity(options.buffer + 1),
            segments: HashMap::default(),
            next_line: 0,
            // Entries are a 64th, and lie at the end.
            index_line: bytes / 64 / 64 * 63,
            assumed: Rc::new(options.assumed.block()),
            dram,
            exported: None,
            open: VecDeque::new(),
            first: 0,
            done: Vec::new(),
            now: 0,
            sums: Sums::default(),
            link: Vec::new(),
            latency: Histogram::default(),
            service: Histogram::default(),
            options: options.clone(),
        })
    }

    /// The same, which times no line and keeps all that are moved for [`Run::exported`].
    ///
    /// # Errors
    /// As [`Run::new`].
    pub fn exporting(subject: Subject, options: &Options) -> Result<Self, ModelError> {
        Ok(Self { dram: None, exported: Some(Vec::new()), ..Self::new(subject, options)? })
    }

    /// The lines that were moved since the last call.
    pub fn exported(&mut self) -> impl Iterator<Item = LineAccess> {
        self.exported.as_mut().map(std::mem::take).unwrap_or_default().into_iter()
    }

    /// Does what a request asks for. `stored` gives how the block of a number is stored, if anybody
    /// said so.
    pub fn request<'a>(&mut self, request: &Request, view: &View, stored: impl Fn(u64) -> Option<&'a Block>) {
        let end = request.address + request.length;
        self.sums.last_ns = request.time_ns;
        let asked = request.served.is_none_or(|served| served.asked);
        if asked {
            self.sums.requests += 1;
            self.sums.asked += request.length;
            self.count_link(request, view);
        }
        self.now = match (&self.options.dram, self.options.pace) {
            (Some(profile), Pace::Recorded) => profile.cycles(request.time_ns),
            _ if self.dram.is_some() => 0,
            _ => self.sums.requests,
        };
        if self.dram.is_some() {
            self.open.push_back(Open { left: 0, begin: None, end: 0, complete: false });
        }
        if self.subject.design == Design::Plain {
            if asked {
                self.plain(request.address, end, request.write);
            }
        } else {
            let mut at = request.address;
            while at < end {
                let block = at / BLOCK_BYTES;
                let part = end.min((block + 1) * BLOCK_BYTES) - at;
                let stored = stored(block);
                let assumed = Rc::clone(&self.assumed);
                let asked =
                    Asked { whole: part == BLOCK_BYTES, write: request.write, served: request.served };
                let is_measured = stored.is_some_and(|stored| self.is_measured(stored));
                let bypassed = |stored: &&Block| stored.kind == BlockKind::Bypassed;
                let known = stored.filter(|stored| is_measured || bypassed(stored));
                if self.block(block, known.unwrap_or(&assumed), view, asked) {
                    let sums = &mut self.sums;
                    *match known {
                        Some(_) if is_measured => &mut sums.measured,
                        Some(_) => &mut sums.whole,
                        None => &mut sums.assumed,
                    } += 1;
                }
                at += part;
            }
        }
        self.settle();
    }

    /// What the link carries: planes that a packed view leaves out are not asked for.
    fn count_link(&mut self, request: &Request, view: &View) {
        let number = request.view as usize;
        if number >= self.link.len() {
            self.link.resize(number + 1, Requests::default());
        }
        let (mut at, mut length) = (request.address, request.length);
        // Only `trace` has views; others give words.
        if self.subject.design == Design::Trace && !request.write && view.link_bits != view.bits {
            let scaled = |bytes: u64| {
                let bits = u128::from(bytes) * u128::from(view.link_bits) / u128::from(view.bits);
                u64::try_from(bits).unwrap_or(u64::MAX)
            };
            let end = scaled(at.saturating_add(length));
            at = scaled(at);
            length = end.saturating_sub(at).max(1);
        }
        self.link[number].add(at, length, request.write);
    }

    fn plain(&mut self, start: u64, end: u64, write: bool) {
        let all = layout::lines(start, end);
        let whole_from = start.div_ceil(64).min(all.end);
        let whole_to = (end / 64).max(whole_from);
        for (lines, is_whole) in
            [(all.start..whole_from, false), (whole_from..whole_to, true), (whole_to..all.end, false)]
        {
            if !write || !is_whole {
                self.sums.read += self.words(lines.clone(), false);
            }
            if write {
                self.sums.written += self.words(lines, true);
            }
        }
        // Counted by blocks, as under the other designs: of a store those of which a line is read.
        let (first, last) = (start / BLOCK_BYTES, (end - 1) / BLOCK_BYTES);
        let blocks = if write {
            let parts =
                [(start, first), (end, last)].map(|(at, block)| (!at.is_multiple_of(64)).then_some(block));
            match parts {
                [Some(first), Some(last)] if first == last => 1,
                parts => parts.into_iter().flatten().count() as u64,
            }
        } else {
            last - first + 1
        };
        self.service.add_each(Design::Plain.cycles(Stored::Bypass, true), blocks);
    }

    /// Moves lines of words from where `plain` or `plain-rows` has them, and gives their bytes.
    fn words(&mut self, lines: Range<u64>, write: bool) -> u64 {
        const LINES: u64 = BLOCK_BYTES / 64;
        if self.subject.placement != Placement::Rows {
            return self.bursts(lines, Way::ByLine, write);
        }
        let (mut at, mut moved) = (lines.start, 0);
        while at < lines.end {
            let end = lines.end.min((at / LINES + 1) * LINES);
            let first = self.segment(at / LINES, LINES, None) + at % LINES;
            moved += self.bursts(first..first + (end - at), Way::ByRow, write);
            at = end;
        }
        moved
    }

    /// Whether a device of this design moved what was served so.
    fn moves(&self, served: Served) -> bool {
        if self.subject.design == Design::Trace { served.fetched } else { served.by_itself }
    }

    /// Whether the trace says how many bytes the design stores for a block.
    fn is_measured(&self, stored: &Block) -> bool {
        let has_size = match self.subject.design {
            Design::Gcomp => self.as_words(stored).is_some(),
            _ => stored.has_layout(),
        };
        has_size || stored.kind == BlockKind::Zeros
    }

    /// Bytes that a block takes as words by the design's codec, if anybody knows.
    fn as_words(&self, block: &Block) -> Option<u64> {
        let bytes = match self.subject.codec {
            Some(WordCodec::Zstd) => block.words.zstd,
            _ => block.words.lz4,
        };
        bytes.map(|bytes| u64::from(bytes).min(BLOCK_BYTES))
    }

    /// Does what is asked of one block, and says whether it was moved.
    fn block(&mut self, number: u64, block: &Block, view: &View, asked: Asked) -> bool {
        let Asked { whole, write, served } = asked;
        let design = self.subject.design;
        // All of a view's planes are all of a block, which a store of a part wants.
        let in_part = design == Design::Trace && !write && view.planes != View::full(view.bits).planes;
        let wanted = if in_part { view.planes } else { u64::MAX };
        let held = match served {
            None => self.buffer.iter().position(|(held, planes)| *held == number && wanted & !planes == 0),
            Some(_) => None,
        };
        let moves = served.is_none_or(|served| self.moves(served));
        if !moves && served.is_some_and(|served| !served.asked) {
            return false;
        }
        if !write && (held.is_some() || !moves) {
            self.sums.buffered += 1;
            if let Some(latest) = held.filter(|at| *at > 0).and_then(|at| self.buffer.remove(at)) {
                self.buffer.push_front(latest);
            }
            self.service.add(design.cycles(Stored::Nothing, true));
            return false;
        }
        if !moves {
            return false;
        }
        // A device that was recorded says itself what it read to store a part.
        let is_told = |served: Served| design == Design::Trace || served.reads_told;
        let reads_first = !whole && held.is_none() && !served.is_some_and(is_told);
        let hit = self.cache.touch(number);
        let entry = self.index_line + number..self.index_line + number + 1;
        *(if hit { &mut self.sums.hits } else { &mut self.sums.misses }) += 1;
        if !hit {
            self.sums.index += 64;
            self.bursts(entry.clone(), Way::ByLine, false);
        }
        if !write || reads_first {
            let fetched = self.move_block(number, block, wanted, false);
            self.sums.read += fetched;
            self.sums.fills += u64::from(fetched > 0);
            // What is measured of words says more than the kind, which is of this device's bundle.
            let kind = if design == Design::Gcomp && self.as_words(block).is_some() {
                if fetched == 0 { BlockKind::Zeros } else { BlockKind::Coded }
            } else {
                block.kind
            };
            self.sums.zeros += u64::from(kind == BlockKind::Zeros);
            let stored = match (kind, fetched) {
                (BlockKind::Zeros, _) | (_, 0) => Stored::Nothing,
                (_, fetched) if fetched >= BLOCK_BYTES => Stored::Bypass,
                (BlockKind::Bypassed, _) => Stored::Bypass,
                (BlockKind::Coded, fetched) => Stored::Coded(float(BLOCK_BYTES) / float(fetched)),
            };
            self.service.add(design.cycles(stored, hit));
        }
        if write {
            self.sums.written += self.move_block(number, block, u64::MAX, true);
            self.sums.index += 64;
            self.bursts(entry, Way::ByLine, true);
        }
        if served.is_none() {
            self.keep(number, wanted);
        }
        true
    }

    /// Keeps a decoded block in the buffer.
    fn keep(&mut self, number: u64, planes: u64) {
        if let Some(at) = self.buffer.iter().position(|(held, _)| *held == number) {
            self.buffer.remove(at);
        }
        self.buffer.push_front((number, planes));
        self.buffer.truncate(self.options.buffer);
    }

    /// Moves what is stored of a block for these planes, and gives the bytes of it.
    fn move_block(&mut self, number: u64, block: &Block, wanted: u64, write: bool) -> u64 {
        let measured = self.as_words(block).filter(|_| self.subject.design == Design::Gcomp);
        if block.kind == BlockKind::Zeros && measured.is_none() {
            return 0;
        }
        let mut moved = 0;
        if self.subject.design == Design::Trace && block.has_layout() {
            if self.subject.placement == Placement::Planes && !block.planes.is_empty() {
                let profile = self.options.dram.as_ref();
                let columns = profile.map_or(128, |profile| u64::from(profile.geometry.columns));
                layout::rows(block, number, wanted, columns, |lines| {
                    moved += self.bursts(lines, Way::ByRow, write);
                });
            } else {
                let first = self.segment(number, block.bytes().div_ceil(64), block.segment);
                layout::bundle(block, wanted, |lines| {
                    moved += self.bursts(first + lines.start..first + lines.end, Way::ByRow, write);
                });
            }
            return moved;
        }
        // Of a bypassed block without a layout, all of it.
        let count = measured.unwrap_or(BLOCK_BYTES).div_ceil(64);
        let first = self.segment(number, count, None);
        self.bursts(first..first + count, Way::ByRow, write)
    }

    /// Serves all that is under way, and says what was done.
    ///
    /// # Errors
    /// DRAM issued what it may not: an error of this model.
    pub fn finish(mut self, views: &[View]) -> Result<Outcome, ModelError> {
        self.so_far(views)
    }

    /// The same, and more may follow: what is under way is served before that comes.
    ///
    /// # Errors
    /// As [`Run::finish`].
    pub fn so_far(&mut self, views: &[View]) -> Result<Outcome, ModelError> {
        // What was recorded took at least as long as it did, however little of it a design moved.
        let recorded = (self.options.pace == Pace::Recorded).then_some(self.sums.last_ns);
        let until = recorded.zip(self.options.dram.as_ref()).map(|(ns, profile)| profile.cycles(ns));
        let finish = |dram: &mut Dram| dram.finish_at(until.unwrap_or(0));
        let outcome = self.dram.as_mut().map(finish).transpose()?;
        self.settle();
        let sums = &self.sums;
        let dram = outcome.zip(self.options.dram.as_ref()).map(|(outcome, profile)| {
            let seconds = profile.ns(outcome.cycles) / 1e9;
            let lines = outcome.counts.reads + outcome.counts.writes;
            let energy = Energy::new(profile, &outcome.counts, outcome.cycles);
            let rate = |bytes: u64| if seconds > 0.0 { float(bytes) / seconds / 1e9 } else { 0.0 };
            DramReport {
                commands: outcome.counts,
                checked: outcome.checked,
                row_hit_rate: (lines > 0).then(|| float(outcome.counts.row_hits) / float(lines)),
                seconds,
                gbs: rate(64 * lines),
                asked_gbs: rate(sums.asked),
                energy,
                access_pj_per_byte: (sums.asked > 0).then(|| energy.access_pj() / float(sums.asked)),
                latency_ns: self.latency.summary(),
            }
        });
        let elapsed = match &dram {
            Some(dram) => Some(dram.seconds),
            None => recorded.map(|ns| float(ns) / 1e9).filter(|seconds| *seconds > 0.0),
        };
        let link = self.link.iter().zip(views).filter(|(requests, _)| **requests != Requests::default());
        let mut link: Vec<_> = link
            .map(|(requests, view)| {
                let traffic = self.options.link.carry(*requests, None);
                ViewTraffic { view: view.name.clone(), bits: view.bits, traffic }
            })
            .collect();
        // No faster than the link itself, which all views share.
        let busy = |of: fn(&Traffic) -> &Direction| -> f64 {
            link.iter().map(|link| of(&link.traffic).busy_seconds).sum()
        };
        let busy = busy(|traffic| &traffic.up).max(busy(|traffic| &traffic.down));
        if let Some(seconds) = elapsed.map(|elapsed| elapsed.max(busy)).filter(|seconds| *seconds > 0.0) {
            for ViewTraffic { traffic, .. } in &mut link {
                for direction in [&mut traffic.up, &mut traffic.down] {
                    direction.utilisation = Some(direction.busy_seconds / seconds);
                }
            }
        }
        let service = self.service.summary();
        let load = |cycles: f64| cycles / GHZ + self.options.link.latency_ns;
        Ok(Outcome {
            subject: self.subject,
            requests: sums.requests,
            asked_bytes: sums.asked,
            read_bytes: sums.read,
            written_bytes: sums.written,
            index_bytes: sums.index,
            index_hits: sums.hits,
            index_misses: sums.misses,
            fills: sums.fills,
            buffered: sums.buffered,
            zeros: sums.zeros,
            measured: sums.measured,
            whole: sums.whole,
            assumed: sums.assumed,
            load_ns: service.mean.map(load),
            load_p99_ns: service.mean.map(|_| load(float(service.p99))),
            service_cycles: service,
            link,
            dram,
        })
    }
}
