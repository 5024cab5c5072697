//! The device's side of `lamina trace record`: what requests move, as a trace that is sent as it
//! comes.
//!
//! The rules:
//! * A request copies its event into a queue and goes on. Events that find no room there are lost,
//!   and the trace says how many and where.
//! * Memory is bounded: the queue, the pieces that wait for who takes the trace, and a table of
//!   blocks whose layout was said. A block that fell out of the table is said again.
//! * Once it is told to stop, a recording ends whether anybody takes the trace or not. What nobody
//!   took in time is lost as well, and the last piece, for which room is kept, says so.
//! * A record is what one request moved of one block: the layout of a bundle is said before it, so
//!   that a replay fetches the lines that were fetched.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use hyper::body::Bytes;
use lamina_codec::Codec;
use lamina_codec::block::Stored;
use lamina_codec::format::Format;
use lamina_codec::plane::PlaneMask;
use lamina_codec::view::Kind;
use lamina_device::device::{AsWords, Device, Moved, Partition, Watcher};
use lamina_device::stats::ModelledReport;
use lamina_model::trace::{
    BLOCK_BYTES, Block, BlockKind, Header, MAX_VIEWS, Request, Seen, Served, View, WordBytes, Writer,
};
use lamina_serve::Recorder;
use lamina_store::entry::Entry;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{OwnedPermit, Sender};

/// Events that wait: some megabytes.
const QUEUE: usize = 1 << 15;
/// Events that are written together.
const BATCH: usize = 1 << 12;
/// Blocks of which it is known what was said: some megabytes.
const SAID: usize = 1 << 17;
/// How long what was recorded may wait to be sent.
const SENT: Duration = Duration::from_millis(200);
/// How often something is sent when nothing is recorded: only who writes learns that the peer is
/// gone, and another recording may begin.
const KEPT_ALIVE: Duration = Duration::from_secs(2);
/// How long a piece may wait for room once the recording is to stop, and how often that is looked
/// at.
const TAKEN: (Duration, Duration) = (Duration::from_secs(2), Duration::from_millis(5));

/// What is kept of an event.
#[derive(Clone, Debug)]
struct Event {
    time_ns: u64,
    block: u64,
    asked: Range<u16>,
    write: bool,
    served: Served,
    shown: Shown,
    planes: PlaneMask,
    entry: Option<Entry>,
    as_words: Option<AsWords>,
}

/// What tells views apart: the format, and what is shown of it in how many bits, if it is a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shown {
    format: Format,
    view: Option<(Kind, u32)>,
}

/// A recording.
#[derive(Debug)]
struct Recording {
    begun: Instant,
    queue: SyncSender<Event>,
    lost: AtomicU64,
    stop: AtomicBool,
    /// Nobody took a piece in time, so that all others but the last are left out.
    untaken: AtomicBool,
    done: AtomicBool,
}

impl Watcher for Recording {
    fn moved(&self, moved: &Moved<'_>) {
        let event = Event {
            time_ns: u64::try_from(self.begun.elapsed().as_nanos()).unwrap_or(u64::MAX),
            block: moved.block,
            asked: moved.asked.clone(),
            write: moved.write,
            served: Served {
                asked: !moved.asked.is_empty(),
                fetched: moved.stored.is_some(),
                by_itself: moved.by_itself,
                reads_told: true,
            },
            shown: Shown { format: moved.format, view: moved.view.map(|view| (view.kind(), view.bits())) },
            planes: moved.planes,
            entry: moved.entry.cloned(),
            as_words: moved.as_words,
        };
        if self.queue.try_send(event).is_err() {
            self.lost.fetch_add(1, Relaxed);
        }
    }

    fn report(&self) -> Vec<ModelledReport> {
        Vec::new()
    }
}

/// Records one trace at a time.
#[derive(Debug, Default)]
pub(crate) struct Recordings(Mutex<Option<Arc<Recording>>>);

impl Recorder for Recordings {
    fn begin(&self, device: &Arc<Device>, to: Sender<Bytes>) -> Result<(), String> {
        let mut now = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if now.as_ref().is_some_and(|recording| !recording.done.load(Relaxed)) {
            let why = "a trace is being recorded already, one at a time: DELETE /trace ends it";
            return Err(why.to_owned());
        }
        let (queue, events) = sync_channel(QUEUE);
        let recording = Arc::new(Recording {
            begun: Instant::now(),
            queue,
            lost: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            untaken: AtomicBool::new(false),
            done: AtomicBool::new(false),
        });
        let watcher: Arc<dyn Watcher> = recording.clone();
        device.watch(Arc::clone(&watcher));
        let pump = Pump {
            guests: Partition::all(device).iter().map(|part| part.base().start).collect(),
            device: Arc::downgrade(device),
            device_bytes: device.base_bytes(),
            recording: Arc::clone(&recording),
            watcher: Arc::clone(&watcher),
        };
        let started = thread::Builder::new().name("recorder".into()).spawn(move || pump.run(&events, to));
        if let Err(why) = started {
            device.unwatch(&watcher);
            return Err(format!("cannot start the recorder's thread: {why}"));
        }
        *now = Some(recording);
        Ok(())
    }

    fn stop(&self) -> bool {
        let now = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let running = now.as_ref().filter(|recording| !recording.done.load(Relaxed));
        running.is_some_and(|recording| !recording.stop.swap(true, Relaxed))
    }
}

/// What the recorder's thread has.
struct Pump {
    device: Weak<Device>,
    device_bytes: u64,
    /// Where each guest's part of the base window begins.
    guests: Vec<u64>,
    recording: Arc<Recording>,
    watcher: Arc<dyn Watcher>,
}

/// The recording is over, also if the thread panics.
impl Drop for Pump {
    fn drop(&mut self) {
        self.unwatch();
        self.recording.done.store(true, Relaxed);
    }
}

impl Pump {
    fn run(self, events: &Receiver<Event>, to: Sender<Bytes>) {
        // Whoever sees the end of the trace may begin another.
        let end = to.clone();
        if let Err(why) = self.write(events, to) {
            tracing::debug!("a recording ended early: {why}");
        }
        drop(self);
        drop(end);
    }

    fn unwatch(&self) {
        if let Some(device) = self.device.upgrade() {
            device.unwatch(&self.watcher);
        }
    }

    fn write(&self, events: &Receiver<Event>, to: Sender<Bytes>) -> io::Result<()> {
        let header = Header { seen: Seen::Requests, device_bytes: self.device_bytes };
        let taken = to.clone();
        let pieces = Pieces::new(to, Arc::clone(&self.recording));
        let mut trace = Trace::new(Writer::new(pieces, header)?, &self.guests)?;
        let (mut batch, mut said_lost) = (Vec::with_capacity(BATCH), 0);
        let (mut sent, mut told) = (Instant::now(), Instant::now());
        loop {
            let stops = self.recording.stop.load(Relaxed);
            if stops {
                // What was told before this is in the queue.
                self.unwatch();
            }
            match events.recv_timeout(if stops { Duration::ZERO } else { SENT }) {
                Ok(event) => {
                    batch.push(event);
                    batch.extend(events.try_iter().take(BATCH - 1));
                    trace.add(&batch)?;
                    batch.clear();
                    told = Instant::now();
                    if self.recording.untaken.load(Relaxed) {
                        self.unwatch();
                        let left = events.try_iter().count() as u64;
                        trace.lose(left + self.recording.lost.load(Relaxed) - said_lost)?;
                        trace.writer.finish()?.end();
                        return Ok(());
                    }
                }
                Err(RecvTimeoutError::Timeout) if !stops => {
                    if told.elapsed() >= KEPT_ALIVE {
                        trace.writer.keep_alive()?;
                        told = Instant::now();
                    }
                }
                Err(_) => {
                    trace.lose(self.recording.lost.load(Relaxed) - said_lost)?;
                    trace.writer.finish()?.end();
                    return Ok(());
                }
            }
            let lost = self.recording.lost.load(Relaxed);
            trace.lose(lost - said_lost)?;
            said_lost = lost;
            if sent.elapsed() >= SENT {
                trace.writer.sync()?;
                sent = Instant::now();
            }
            if taken.is_closed() {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
        }
    }
}

/// Sends what is written when it is flushed, or enough.
struct Pieces {
    to: Sender<Bytes>,
    /// Room for the last piece, whether the others are taken or not.
    last: Option<OwnedPermit<Bytes>>,
    bytes: Vec<u8>,
    recording: Arc<Recording>,
}

impl Pieces {
    /// Bytes of a piece.
    const PIECE: usize = 1 << 16;

    fn new(to: Sender<Bytes>, recording: Arc<Recording>) -> Self {
        let last = to.clone().try_reserve_owned().ok();
        Self { to, last, bytes: Vec::new(), recording }
    }

    /// Sends what is left. It is all that was not taken in time, or the end of what was.
    fn end(self) {
        if let Some(last) = self.last.filter(|_| !self.bytes.is_empty()) {
            last.send(self.bytes.into());
        }
    }
}

impl Write for Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.bytes.extend_from_slice(bytes);
        if self.bytes.len() >= Self::PIECE {
            self.flush()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.bytes.is_empty() || self.recording.untaken.load(Relaxed) {
            return Ok(());
        }
        let mut waited = Duration::ZERO;
        let mut piece = Bytes::from(std::mem::take(&mut self.bytes));
        loop {
            piece = match self.to.try_send(piece) {
                Ok(()) => return Ok(()),
                Err(TrySendError::Closed(_)) => return Err(io::ErrorKind::BrokenPipe.into()),
                Err(TrySendError::Full(piece)) => piece,
            };
            if waited >= TAKEN.0 {
                self.bytes = piece.into();
                self.recording.untaken.store(true, Relaxed);
                return Ok(());
            }
            thread::sleep(TAKEN.1);
            if self.recording.stop.load(Relaxed) {
                waited += TAKEN.1;
            }
        }
    }
}

/// A trace that is being written.
struct Trace<'a, W: Write> {
    writer: Writer<W>,
    guests: &'a [u64],
    views: HashMap<(Shown, u32, PlaneMask), u32>,
    /// Blocks by their number modulo the table's length.
    said: Vec<Option<Said>>,
}

/// What was said of a block: by what epoch and segment its layout, and its bytes as words.
#[derive(Clone, Copy, Debug)]
struct Said {
    block: u64,
    layout: Option<(u16, Option<u64>)>,
    as_words: Option<AsWords>,
}

/// What is to be said of a block.
enum News {
    Block(Block),
    Words(WordBytes),
}

impl<'a, W: Write> Trace<'a, W> {
    fn new(mut writer: Writer<W>, guests: &'a [u64]) -> io::Result<Self> {
        // Whoever takes the trace knows by its header that it is being recorded.
        writer.sync()?;
        Ok(Self { writer, guests, views: HashMap::new(), said: vec![None; SAID] })
    }

    fn lose(&mut self, events: u64) -> io::Result<()> {
        if events > 0 { self.writer.lost(events) } else { Ok(()) }
    }

    /// Writes events in their order. Layouts come before the requests of a group, in which no block
    /// has two.
    fn add(&mut self, events: &[Event]) -> io::Result<()> {
        let (mut from, mut met, mut all_news) = (0, HashSet::new(), Vec::new());
        for (at, event) in events.iter().enumerate() {
            if let Some(news) = self.news(event) {
                if met.contains(&event.block) {
                    self.group(&events[from..at], &mut all_news)?;
                    from = at;
                    met.clear();
                }
                all_news.push((event.block, news));
            }
            met.insert(event.block);
        }
        self.group(&events[from..], &mut all_news)
    }

    /// What an event tells of its block that was not said.
    fn news(&mut self, event: &Event) -> Option<News> {
        let slot = &mut self.said[usize::try_from(event.block % SAID as u64).unwrap_or(0)];
        let (layout, as_words) = slot
            .filter(|said| said.block == event.block)
            .map_or_else(|| (None, None), |said| (said.layout, said.as_words));
        let by = |entry: &Entry| (entry.epoch, entry.place.as_ref().map(|place| place.segment));
        let now = Said {
            block: event.block,
            layout: event.entry.as_ref().map(by).or(layout),
            as_words: event.as_words.or(as_words),
        };
        *slot = Some(now);
        match &event.entry {
            Some(entry) if now.layout != layout => Some(News::Block(stored_as(entry, now.as_words))),
            _ if now.as_words != as_words => now.as_words.map(|words| News::Words(word_bytes(words))),
            _ => None,
        }
    }

    fn group(&mut self, events: &[Event], all_news: &mut Vec<(u64, News)>) -> io::Result<()> {
        all_news.sort_by_key(|(block, _)| *block);
        for (number, news) in &*all_news {
            if let News::Block(block) = news {
                self.writer.block(*number, block)?;
            }
        }
        for (number, news) in all_news.drain(..) {
            if let News::Words(words) = news {
                self.writer.words(number, words)?;
            }
        }
        // Views that are new come before the requests as well, so that these are one chunk.
        let views = events.iter().map(|event| self.view(event)).collect::<io::Result<Vec<_>>>()?;
        for (event, view) in events.iter().zip(views) {
            let start = event.block.saturating_mul(BLOCK_BYTES);
            let guest = self.guests.partition_point(|from| *from <= start).saturating_sub(1);
            let (offset, length) = if event.served.asked {
                (event.asked.start.into(), event.asked.len() as u64)
            } else {
                (0, BLOCK_BYTES)
            };
            self.writer.request(&Request {
                time_ns: event.time_ns,
                address: start.saturating_add(offset),
                length,
                view,
                guest: u32::try_from(guest).unwrap_or(u32::MAX),
                write: event.write,
                served: Some(event.served),
            })?;
        }
        Ok(())
    }

    /// The number of an event's view, which is said if it is new.
    fn view(&mut self, event: &Event) -> io::Result<u32> {
        let Shown { format, view } = event.shown;
        // What is stored in another format than its owner's is fetched by its own planes.
        let bits =
            match event.entry.as_ref().and_then(|entry| entry.place.as_ref()).map(|place| &place.stored) {
                Some(Stored::Planes(planes)) if planes.format != Format::Opaque => planes.format.bits(),
                _ => format.bits(),
            };
        let key = (event.shown, bits, event.planes);
        if let Some(number) = self.views.get(&key) {
            return Ok(*number);
        }
        let number = self.views.len();
        if number >= MAX_VIEWS {
            return Err(io::Error::other(format!("more than {MAX_VIEWS} views were read")));
        }
        let number = u32::try_from(number).map_err(io::Error::other)?;
        let full = View::full(bits);
        let all = full.planes;
        let said = match view {
            None => full,
            Some((kind, of)) => View { name: kind.to_string(), link_bits: of * bits / format.bits(), ..full },
        };
        // Theirs count planes from the most significant on.
        let planes = u64::from(event.planes.0.reverse_bits() >> (32 - bits)) & all;
        self.writer.view(&View { planes, ..said })?;
        self.views.insert(key, number);
        Ok(number)
    }
}

/// Words that were compressed whole, as a trace says them.
fn word_bytes(words: AsWords) -> WordBytes {
    let AsWords { bytes, codec } = words;
    match codec {
        // Zeros are nothing by any codec.
        _ if bytes == 0 => WordBytes { lz4: Some(0), zstd: Some(0) },
        Codec::Lz4 | Codec::Tree => WordBytes { lz4: Some(bytes), zstd: None },
        Codec::Zstd => WordBytes { lz4: None, zstd: Some(bytes) },
    }
}

/// How a block is stored, as a trace says it, and what it takes as words if that was measured.
fn stored_as(entry: &Entry, as_words: Option<AsWords>) -> Block {
    let words = as_words.map(word_bytes).unwrap_or_default();
    let Some(place) = &entry.place else {
        return Block { kind: BlockKind::Zeros, words, ..Block::default() };
    };
    let kind = if place.is_bypass() { BlockKind::Bypassed } else { BlockKind::Coded };
    let block = Block { kind, segment: Some(place.segment), words, ..Block::default() };
    match &place.stored {
        Stored::Planes(planes) => {
            let parts = planes.parts();
            let joint = u8::try_from(parts.joint).unwrap_or(u8::MAX);
            Block { head: parts.head, stream: parts.stream, joint, planes: parts.planes.into(), ..block }
        }
        // Words are fetched whole, whatever is wanted of them. A generic device stores just these.
        Stored::Words { codec, length, .. } if as_words.is_none() && !place.difference => {
            let words = word_bytes(AsWords { bytes: *length, codec: *codec });
            Block { head: *length, words, ..block }
        }
        // So is a piece of a packed window.
        Stored::Words { length, .. } | Stored::Packed { length, .. } => Block { head: *length, ..block },
    }
}

#[cfg(test)]
mod tests;
