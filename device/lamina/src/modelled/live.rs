//! `--model-dram`: what hardware would have done with the work of guests, while they do it.
//!
//! The rules:
//! * A request hands its event over and goes on. A thread of its own models it.
//! * Events that come faster than that thread can follow are left out of all designs alike, and
//!   counted. Memory is bounded: a queue, and where each block that was moved would lie.
//! * An error of the model ends the model, not the device.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lamina_device::device::{Moved, Watcher};
use lamina_device::stats::ModelledReport;
use lamina_model::ModelError;
use lamina_model::controller::GHZ;
use lamina_model::dram::Profile;
use lamina_model::replay::{Options, Outcome, Pace, Run, Subject};
use lamina_model::trace::{BLOCK_BYTES, Block, BlockKind, Request, Served, View, WordBytes};
use lamina_store::mode::Mode;

/// Events that wait: some megabytes.
const QUEUE: usize = 1 << 16;
/// How often what was modelled is told anew.
const TOLD: Duration = Duration::from_millis(500);

/// What is kept of an event, and when it was.
#[derive(Clone, Debug)]
struct Event {
    time_ns: u64,
    block: u64,
    asked: Range<u16>,
    stored: Option<u16>,
    /// Where the block's bundle lies, in lines, however much of it was moved.
    segment: Option<u64>,
    write: bool,
    /// Bits of an element, and how many of them the link carries.
    bits: (u32, u32),
}

/// The model of a device at work.
#[derive(Debug)]
pub(crate) struct Live {
    begun: Instant,
    queue: SyncSender<Event>,
    left_out: AtomicU64,
    told: Arc<Mutex<Vec<ModelledReport>>>,
}

impl Live {
    /// Models a device of this mode, beside one that keeps words, with this module.
    pub(crate) fn start(mode: Mode, profile: &Profile) -> Result<Arc<Self>> {
        let (queue, events) = sync_channel(QUEUE);
        let told = Arc::new(Mutex::new(Vec::new()));
        let (profile, shown) = (profile.clone(), Arc::clone(&told));
        let run = move || {
            let modelled = Designs::new(mode, &profile).and_then(|designs| designs.follow(&events, &shown));
            if let Err(why) = modelled {
                tracing::error!("what hardware would do is not modelled any more: {why}");
            }
        };
        thread::Builder::new().name("model".into()).spawn(run).context("cannot start the model's thread")?;
        Ok(Arc::new(Self { begun: Instant::now(), queue, left_out: AtomicU64::new(0), told }))
    }
}

impl Watcher for Live {
    fn moved(&self, moved: &Moved<'_>) {
        let Moved { block, ref asked, stored, write, format, view, entry, .. } = *moved;
        // What only a generic device moves is in neither design.
        if asked.is_empty() && stored.is_none() {
            return;
        }
        let bits = (format.bits(), view.map_or(format.bits(), lamina_codec::view::View::bits));
        let time_ns = u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let segment = entry.and_then(|entry| entry.place.as_ref()).map(|place| place.segment);
        let event = Event { time_ns, block, asked: asked.clone(), stored, segment, write, bits };
        if self.queue.try_send(event).is_err() {
            self.left_out.fetch_add(1, Relaxed);
        }
    }

    fn report(&self) -> Vec<ModelledReport> {
        let mut reports = self.told.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for report in &mut reports {
            report.left_out = self.left_out.load(Relaxed);
        }
        reports
    }
}

/// The designs on the same events.
struct Designs {
    mode: Mode,
    source: String,
    link: String,
    plain: Run,
    /// The device's own, unless that is `plain`.
    own: Option<Run>,
    view: View,
    last_ns: u64,
}

impl Designs {
    fn new(mode: Mode, profile: &Profile) -> Result<Self, ModelError> {
        // The device says itself what it had decoded before.
        let options =
            Options { dram: Some(profile.clone()), pace: Pace::Recorded, buffer: 0, ..Options::usual()? };
        let name = match mode {
            Mode::Plain => None,
            Mode::GComp => Some("gcomp-lz4"),
            Mode::Trace => Some("trace"),
        };
        let run = |name: &str| Run::new(Subject::named(name)?, &options);
        Ok(Self {
            mode,
            source: format!("{}: {}", profile.name, profile.currents.source),
            link: format!("{}; {}", options.link.name, options.link.source),
            plain: run("plain")?,
            own: name.map(run).transpose()?,
            // What is stored of a block here is one plane, and a part of any view.
            view: View { planes: u64::MAX, ..View::full(16) },
            last_ns: 0,
        })
    }

    /// Models events until there is nobody left to send some.
    fn follow(
        mut self,
        events: &Receiver<Event>,
        told: &Mutex<Vec<ModelledReport>>,
    ) -> Result<(), ModelError> {
        let (mut last, mut is_new) = (Instant::now(), true);
        loop {
            let ended = match events.recv_timeout(TOLD) {
                Ok(event) => {
                    self.take(&event);
                    is_new = true;
                    false
                }
                Err(RecvTimeoutError::Timeout) => false,
                Err(RecvTimeoutError::Disconnected) => true,
            };
            if is_new && (ended || last.elapsed() >= TOLD) {
                *told.lock().unwrap_or_else(PoisonError::into_inner) = self.report()?;
                (last, is_new) = (Instant::now(), false);
            }
            if ended {
                return Ok(());
            }
        }
    }

    fn take(&mut self, event: &Event) {
        let Event { time_ns, block, ref asked, stored, segment, write, bits } = *event;
        // Threads hand over in another order than they looked at the clock.
        self.last_ns = self.last_ns.max(time_ns);
        let Some(address) = block.checked_mul(BLOCK_BYTES) else { return };
        let is_asked = !asked.is_empty();
        let (from, length) =
            if is_asked { (asked.start.into(), asked.len() as u64) } else { (0, BLOCK_BYTES) };
        let mut request = Request {
            time_ns: self.last_ns,
            address: address + from,
            length,
            view: 0,
            guest: 0,
            write,
            served: None,
        };
        if is_asked {
            self.plain.request(&request, &self.view, |_| None);
        }
        if let Some(own) = &mut self.own {
            let fetched = stored.is_some();
            // A generic device reads what it stores a part of without being told.
            let by_itself = fetched && (is_asked || write);
            request.served = Some(Served { asked: is_asked, fetched, by_itself, reads_told: false });
            (self.view.bits, self.view.link_bits) = bits;
            let stored = stored.map(|stored| stored_as(self.mode, stored, segment));
            own.request(&request, &self.view, |_| stored.as_ref());
        }
    }

    fn report(&mut self) -> Result<Vec<ModelledReport>, ModelError> {
        let views = std::slice::from_ref(&self.view);
        let mut reports = vec![report("plain", &self.source, &self.link, &self.plain.so_far(views)?)];
        if let Some(own) = &mut self.own {
            reports.push(report(self.mode.name(), &self.source, &self.link, &own.so_far(views)?));
        }
        Ok(reports)
    }
}

/// A block of which so many bytes were moved, and which lies there.
fn stored_as(mode: Mode, stored: u16, segment: Option<u64>) -> Block {
    let kind = match u64::from(stored) {
        0 => BlockKind::Zeros,
        BLOCK_BYTES.. => BlockKind::Bypassed,
        _ => BlockKind::Coded,
    };
    // What was moved of a bundle is one range of it, whichever planes they are.
    let planes = if mode == Mode::Trace { Arc::from([stored]) } else { Arc::default() };
    let words = WordBytes { lz4: Some(stored), zstd: Some(stored) };
    Block { kind, segment, planes, words, ..Block::default() }
}

fn report(design: &'static str, source: &str, link: &str, outcome: &Outcome) -> ModelledReport {
    let seconds = |ns| Duration::from_nanos(ns).as_secs_f64();
    let dram = outcome.dram.as_ref();
    let traffic = outcome.link.first().map(|link| link.traffic).unwrap_or_default();
    let latency = dram.map(|dram| &dram.latency_ns).filter(|latency| latency.count > 0);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "positive, and far below 2^64"
    )]
    let picojoules = |pj: f64| pj as u64;
    ModelledReport {
        design,
        source: source.to_owned(),
        link: link.to_owned(),
        requests: outcome.requests,
        left_out: 0,
        read_bytes: dram.map_or(0, |dram| 64 * dram.commands.reads),
        written_bytes: dram.map_or(0, |dram| 64 * dram.commands.writes),
        activates: dram.map_or(0, |dram| dram.commands.activates),
        row_hit_rate: dram.and_then(|dram| dram.row_hit_rate),
        access_picojoules: dram.map_or(0, |dram| picojoules(dram.energy.access_pj())),
        p50_seconds: latency.map(|latency| seconds(latency.p50)),
        p99_seconds: latency.map(|latency| seconds(latency.p99)),
        mean_seconds: latency.and_then(|latency| latency.mean).map(|ns| ns / 1e9),
        service_seconds: outcome.service_cycles.mean.map(|cycles| cycles / (GHZ * 1e9)),
        down_flits: traffic.down.flits,
        up_flits: traffic.up.flits,
        down_utilisation: traffic.down.utilisation,
        up_utilisation: traffic.up.utilisation,
    }
}

#[cfg(test)]
mod tests {
    use lamina_codec::Codec;
    use lamina_codec::block::Stored;
    use lamina_codec::format::Format;
    use lamina_codec::plane::PlaneMask;
    use lamina_device::device::{Device, DeviceConfig};
    use lamina_device::layout::Layout;
    use lamina_device::tensor::TensorSpec;
    use lamina_model::link::{Link, Requests};
    use lamina_store::entry::{Entry, Place};

    use super::*;

    /// A device with bf16 numbers on it, modelled.
    fn device(mode: Mode) -> (Device, Arc<Live>) {
        let live = Live::start(mode, &Profile::named("ddr5-4800").unwrap()).unwrap();
        let watcher: Arc<dyn Watcher> = live.clone();
        let config = DeviceConfig {
            mode,
            observe: false,
            watcher: Some(watcher),
            ..DeviceConfig::new(1 << 20, 8 << 20)
        };
        let device = Device::new(config).unwrap();
        let length = 256 << 10;
        let spec = TensorSpec {
            name: "weights".to_owned(),
            dpa: Some(0),
            length,
            elements: None,
            shape: Vec::new(),
            format: Format::Bf16,
            layout: Layout::Weight,
            codec: None,
            base: None,
        };
        device.create_tensor(spec).unwrap();
        let data: Vec<u8> =
            (0..length / 2).flat_map(|n| [(n * 167 % 251) as u8, 0x3c + (n % 3) as u8]).collect();
        device.write_base(0, &data).unwrap();
        (device, live)
    }

    /// What is told when everything that came was modelled.
    fn settled(device: &Device, requests: u64) -> Vec<ModelledReport> {
        for _ in 0..200 {
            let told = device.stats().modelled;
            if told.first().is_some_and(|plain| plain.requests == requests) {
                return told;
            }
            thread::sleep(Duration::from_millis(50));
        }
        panic!("not told in time: {:?}", device.stats().modelled);
    }

    #[test]
    fn the_bytes_of_both_designs_are_those_that_the_device_counts() {
        let (device, _live) = device(Mode::Trace);
        let view = device.create_view("weights", "e8m3").unwrap();
        let mut out = vec![0; 256 << 10];
        device.read_views(view.offset, &mut out).unwrap();
        device.read_base(4000, &mut out[..200]).unwrap();
        // 64 blocks written, 64 read through the view, two read in part.
        let told = settled(&device, 130);
        let [plain, trace] = &told[..] else { panic!("{told:?}") };
        assert_eq!((plain.design, trace.design), ("plain", "trace"));
        // Whole blocks, and the four lines that bytes 4000 to 4199 touch.
        assert_eq!((plain.read_bytes, plain.written_bytes), (64 * 4096 + 4 * 64, 64 * 4096));
        let stats = device.stats();
        let fetched = stats.requests.base.stored_bytes_fetched + stats.requests.views.stored_bytes_fetched;
        // Besides, an entry is read for each block that is new to the cache, and written with it.
        assert_eq!(trace.read_bytes, fetched + 64 * 64);
        assert_eq!(trace.written_bytes, stats.writes.stored_bytes_written + 64 * 64);
        assert!(trace.access_picojoules < plain.access_picojoules, "{told:?}");
        assert!(trace.p50_seconds.unwrap() > 1e-8 && trace.p99_seconds >= trace.p50_seconds, "{told:?}");
        assert!(trace.service_seconds > plain.service_seconds && trace.left_out == 0, "{told:?}");
        assert!(plain.source.contains("ddr5-4800"));
        // The link carries the words of both alike: 64 blocks down, 64 and four lines up.
        assert_eq!((plain.down_flits, plain.up_flits), (trace.down_flits, trace.up_flits));
        let up = Link::named("gen5x16").unwrap();
        let lines = Requests { reads: 64 * 64 + 4, writes: 64 * 64, partial_writes: 0 };
        assert_eq!(trace.up_flits, up.carry(lines, None).up.flits);
        assert!(trace.up_utilisation > Some(0.0) && trace.down_utilisation < Some(1.0), "{told:?}");
        // A packed view carries 12 bits of 16.
        let packed = device.create_view("weights", "e8m3:packed").unwrap();
        device.read_views(packed.offset, &mut out[..192 << 10]).unwrap();
        let told = settled(&device, 130 + 64);
        let lines = Requests { reads: lines.reads + 3 * 1024, ..lines };
        assert_eq!(told[1].up_flits, up.carry(lines, None).up.flits);
        assert!(told[0].up_flits > told[1].up_flits, "{told:?}");
    }

    /// Nobody stores into a KV window twice: it is told when it is coded, each block whole.
    #[test]
    fn a_staged_window_is_moved_once_by_both() {
        let live = Live::start(Mode::Trace, &Profile::named("ddr5-4800").unwrap()).unwrap();
        let watcher: Arc<dyn Watcher> = live;
        let config = DeviceConfig { watcher: Some(watcher), ..DeviceConfig::new(1 << 20, 8 << 20) };
        let device = Device::new(config).unwrap();
        let spec = TensorSpec {
            name: "cache".to_owned(),
            dpa: Some(0),
            length: 64 << 10,
            elements: None,
            shape: Vec::new(),
            format: Format::Bf16,
            layout: Layout::Kv("64,128".parse().unwrap()),
            codec: None,
            base: None,
        };
        device.create_tensor(spec).unwrap();
        // Windows are 16 KiB: one row after the other, then a flush.
        for row in 0..128_u8 {
            device.write_base(128 * u64::from(row), &[row, 0x3c].repeat(64)).unwrap();
        }
        device.flush(0, 64 << 10).unwrap();
        let [plain, trace] = &settled(&device, 4)[..] else { panic!("two designs") };
        assert_eq!((plain.written_bytes, plain.read_bytes), (16 << 10, 0));
        let stored = device.stats().writes.stored_bytes_written;
        assert_eq!(trace.written_bytes, stored + 4 * 64);
    }

    #[test]
    fn a_plain_device_is_modelled_alone_and_gcomp_fetches_whole_blocks() {
        let (device, _live) = self::device(Mode::Plain);
        assert_eq!(settled(&device, 64).len(), 1);
        let (device, _live) = self::device(Mode::GComp);
        device.read_base(0, &mut [0; 64]).unwrap();
        let told = settled(&device, 65);
        assert_eq!(told[1].design, "gcomp");
        let fetched = device.stats().requests.base.stored_bytes_fetched;
        assert!(fetched > 64 && told[1].read_bytes == fetched + 64 * 64, "{told:?}");
    }

    /// However much of it was moved the first time: a bundle does not move because it is read.
    #[test]
    fn a_block_stays_where_the_device_has_it() {
        let (queue, events) = sync_channel(QUEUE);
        let live = Live { begun: Instant::now(), queue, left_out: AtomicU64::new(0), told: Arc::default() };
        let stored = Stored::Words { codec: Codec::Lz4, length: 3000, check: 0 };
        let place = Some(Place { segment: 77, stored, lossy: false, difference: false });
        let entry = Entry { epoch: 0, place };
        let moved = Moved {
            block: 5,
            asked: 0..4096,
            stored: Some(1280),
            by_itself: true,
            write: false,
            format: Format::Bf16,
            view: None,
            planes: PlaneMask::all(Format::Bf16),
            entry: Some(&entry),
            as_words: None,
        };
        live.moved(&moved);
        live.moved(&Moved { stored: Some(3000), ..moved });
        for stored in [1280, 3000] {
            let event = events.recv().unwrap();
            let block = stored_as(Mode::Trace, event.stored.unwrap(), event.segment);
            assert_eq!((block.segment, block.bytes()), (Some(77), stored));
        }
    }

    /// A queue that is full costs events and nothing else.
    #[test]
    fn what_comes_too_fast_is_left_out_and_counted() {
        let live = Live::start(Mode::Trace, &Profile::named("ddr5-4800").unwrap()).unwrap();
        let moved = Moved {
            block: 7,
            asked: 0..4096,
            stored: Some(3000),
            by_itself: true,
            write: false,
            format: Format::Bf16,
            view: None,
            planes: PlaneMask::all(Format::Bf16),
            entry: None,
            as_words: None,
        };
        let begun = Instant::now();
        for _ in 0..4 * QUEUE {
            live.moved(&moved);
        }
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        assert!(live.left_out.load(Relaxed) > 0);
        live.moved(&Moved { block: u64::MAX, ..moved });
    }
}
