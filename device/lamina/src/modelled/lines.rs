//! `lamina boot --record-lines`: which lines of the windows a guest touches, as a trace.
//!
//! * QEMU's plug-in records lines by their places in the guest's memory. A thread takes them as
//!   they come, and a file without a name keeps them until the guest has ended.
//! * How blocks are stored is what a recording of the device says meanwhile: the host's page cache
//!   asks for each page before a guest can load of it. A block has one layout in the trace, its
//!   last.
//! * Between the guest and the trace lies a *modelled* cache. What is in the trace is what it would
//!   have read and written back.

mod places;
mod shown;

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use hyper::Method;
use indicatif::{BinaryBytes, HumanCount};
use lamina_model::trace::{Block, Header, Item, Reader, Request, Seen, Writer};
use lamina_qemu::lines::{Line, Lines};
use lamina_qemu::recipe;
use tempfile::TempDir;
use tokio::sync::mpsc::channel;
use tokio::sync::oneshot;

use self::places::{Monitor, Place, Window};
use self::shown::Map;
use super::record::{Pieces, REST, WAITING, pass};
use crate::args::ApiAt;
use crate::client;
use crate::log;
use crate::out;

/// How often lines are taken.
const TAKEN: Duration = Duration::from_millis(10);
/// How often QEMU is asked for the windows until both are there, and then.
const ASKED: [Duration; 2] = [Duration::from_millis(200), Duration::from_secs(5)];
/// Words of a line in the file: when, and [`packed`].
const KEPT: usize = 2;

/// What is wanted.
pub(crate) struct Wanted {
    /// The trace, a new file.
    pub(crate) out: PathBuf,
    /// The device's API.
    pub(crate) api: ApiAt,
    /// Bytes of the base window.
    pub(crate) base_bytes: u64,
    /// The guest's processors.
    pub(crate) cpus: u32,
    /// Bytes of the modelled cache of each.
    pub(crate) cache: usize,
}

/// A new file, which goes again unless it becomes a trace.
struct Out {
    file: File,
    path: PathBuf,
    is_trace: bool,
}

impl Drop for Out {
    fn drop(&mut self) {
        if !self.is_trace {
            // What cannot be removed is empty, or a trace that says that it was cut short.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// A recording that is ready for its guest.
pub(crate) struct LineRecorder {
    wanted: Wanted,
    out: Out,
    lines: Arc<Lines>,
    monitor: PathBuf,
    _folder: TempDir,
}

/// A recording under way.
pub(crate) struct Recording {
    recorder: LineRecorder,
    stop: Arc<AtomicBool>,
    taker: JoinHandle<Result<Taken>>,
    layouts: tokio::task::JoinHandle<Result<Layouts>>,
    /// Ends `layouts` with what came, when it is dropped.
    follows: oneshot::Sender<()>,
}

/// What was taken of a guest.
struct Taken {
    kept: File,
    lines: u64,
    /// Lines that were taken and not kept.
    lost: u64,
    places: Vec<Place>,
}

/// Keeps lines as they are taken.
struct Keeper {
    kept: BufWriter<File>,
    lines: u64,
    lost: u64,
    last_ns: u64,
    /// Where the windows are.
    places: Vec<Place>,
    is_full: bool,
}

impl LineRecorder {
    /// Makes what QEMU is to write to.
    ///
    /// # Errors
    /// A file cannot be made.
    pub(crate) fn new(wanted: Wanted) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("lamina-lines-").tempdir()?;
        let lines = Lines::new(folder.path(), &recipe::cache()?, wanted.cpus, wanted.cache)?;
        let made = OpenOptions::new().write(true).create_new(true).open(&wanted.out);
        let file = made.with_context(|| format!("cannot make {}", wanted.out.display()))?;
        let monitor = folder.path().join("qmp.sock");
        let out = Out { file, path: wanted.out.clone(), is_trace: false };
        Ok(Self { wanted, out, lines: Arc::new(lines), monitor, _folder: folder })
    }

    /// The options that QEMU needs for it.
    pub(crate) fn args(&self) -> Vec<String> {
        let mut args = self.lines.args().to_vec();
        let monitor = self.monitor.to_string_lossy().replace(',', ",,");
        args.extend(["-qmp".to_owned(), format!("unix:{monitor},server=on,wait=off")]);
        args
    }

    /// Begins, before the guest does.
    ///
    /// # Errors
    /// The device records already, or does not answer.
    pub(crate) async fn begin(self) -> Result<Recording> {
        let (mut body, connection) = client::open(&self.wanted.api, "/trace").await?;
        let (to, pieces) = channel(WAITING);
        let reader = tokio::task::spawn_blocking(move || Layouts::read(Pieces::new(pieces)));
        let (follows, given_up) = oneshot::channel();
        let layouts = tokio::spawn(async move {
            tokio::select! {
                () = async { while pass(&mut body, &to).await {} } => {}
                _ = given_up => {}
            }
            drop((to, connection));
            reader.await?
        });
        let stop = Arc::new(AtomicBool::new(false));
        let (lines, monitor, stopped) = (Arc::clone(&self.lines), self.monitor.clone(), Arc::clone(&stop));
        let taker =
            thread::Builder::new().name("lines".into()).spawn(move || take(&lines, &monitor, &stopped))?;
        Ok(Recording { recorder: self, stop, taker, layouts, follows })
    }
}

impl Recording {
    /// Writes the trace, when the guest has ended and the device has not.
    ///
    /// # Errors
    /// Nothing was recorded, and why.
    pub(crate) async fn end(self) -> Result<()> {
        let out = self.recorder.wanted.out.clone();
        self.write().await.with_context(|| format!("no lines in {}", out.display()))
    }

    async fn write(self) -> Result<()> {
        let Self { recorder, stop, taker, mut layouts, follows } = self;
        let LineRecorder { wanted, out, lines, _folder: folder, .. } = recorder;
        stop.store(true, Ordering::Relaxed);
        let taken = tokio::task::spawn_blocking(move || taker.join()).await?;
        let taken = taken.map_err(|_| anyhow!("the thread that takes lines failed"))??;
        let map = {
            let tensors = client::ask(&wanted.api, Method::GET, "/tensors", None).await?;
            let views = client::ask(&wanted.api, Method::GET, "/views", None).await?;
            Map::new(tensors, &views)?
        };
        // Lines are there whether the device still records or not, and what it said before is, too.
        let rest = async {
            if let Err(why) = client::ask(&wanted.api, Method::DELETE, "/trace", None).await {
                tracing::debug!("{why:#}");
            }
            (&mut layouts).await
        };
        let layouts = if let Ok(layouts) = tokio::time::timeout(REST, rest).await {
            layouts
        } else {
            drop(follows);
            layouts.await
        };
        let Layouts { blocks, ended } = layouts??;
        if !ended {
            log::say(
                "the device broke off how it stores blocks: blocks stored after that are told as they were",
            );
        }
        ensure!(lines.is_loaded(), "QEMU did not load the recorder");
        ensure!(!taken.places.is_empty(), "the guest brought up no window");
        let (bytes, cache) = (wanted.base_bytes, wanted.cache);
        let written = tokio::task::spawn_blocking(move || {
            // All of it, so that it is dropped here.
            let mut out = out;
            let written = write_trace(&out.file, taken, &lines, &map, &blocks, bytes);
            out.is_trace = written.is_ok();
            drop(folder);
            written
        });
        let Written { requests, elsewhere, lost } = written.await??;
        let (requests, lost, elsewhere) = (HumanCount(requests), HumanCount(lost), HumanCount(elsewhere));
        let behind = match cache {
            0 => "each load and store".to_owned(),
            bytes => format!("behind a modelled cache of {} a processor", BinaryBytes(bytes as u64)),
        };
        let out = wanted.out.display();
        log::say(&format!("{out}: {requests} lines, {behind}; {lost} lost, {elsewhere} of no view left out"));
        Ok(())
    }
}

/// The layouts that a recording of the device says.
struct Layouts {
    /// The last of each block, by number.
    blocks: BTreeMap<u64, Block>,
    /// Whether the device ended it.
    ended: bool,
}

impl Layouts {
    /// Reads them as they come.
    fn read(pieces: Pieces) -> Result<Self> {
        let mut reader = Reader::new(pieces).context("the device sends no trace")?;
        let mut blocks = BTreeMap::<_, Block>::new();
        loop {
            match reader.next_item() {
                Ok(Some(Item::Block(number, block))) => drop(blocks.insert(number, block)),
                Ok(Some(Item::Words(number, words))) => blocks.entry(number).or_default().words = words,
                Ok(Some(Item::View(_) | Item::Request(_) | Item::Lost(_))) => {}
                Ok(None) => return Ok(Self { blocks, ended: true }),
                Err(why) if reader.is_cut() => {
                    tracing::debug!("the device's recording broke off: {why}");
                    return Ok(Self { blocks, ended: false });
                }
                Err(why) => return Err(why).context("what the device sends is no trace"),
            }
        }
    }
}

/// Takes lines until it is told to stop, and then what is left.
fn take(lines: &Lines, socket: &Path, stop: &AtomicBool) -> Result<Taken> {
    let mut keeper = Keeper::new(tempfile::tempfile()?);
    let (mut monitor, mut asked, mut batch) = (None, None::<Instant>, Vec::new());
    loop {
        let stops = stop.load(Ordering::Relaxed);
        let has_more = lines.take(&mut batch);
        batch.drain(..).for_each(|line| keeper.keep(&line));
        if stops {
            for (processor, address) in lines.unwritten() {
                let time_ns = keeper.last_ns;
                keeper.keep(&Line { time_ns, address, bytes: 64, write: true, processor });
            }
            return Ok(keeper.end()?);
        }
        let has = |window| keeper.places.iter().any(|place| place.window == window);
        let pause = ASKED[usize::from(has(Window::Base) && has(Window::Views))];
        if asked.is_none_or(|asked| asked.elapsed() >= pause) {
            asked = Some(Instant::now());
            // QEMU listens when it has started, and not when it has ended.
            if monitor.is_none() {
                monitor = Monitor::connect(socket).ok();
            }
            match monitor.as_mut().map(Monitor::places) {
                Some(Ok(places)) if !places.is_empty() && places != keeper.places => {
                    // What was recorded before this is of where the windows were.
                    lines.take(&mut batch);
                    batch.drain(..).for_each(|line| keeper.keep(&line));
                    let ranges: Vec<_> = places.iter().map(|place| place.at.clone()).collect();
                    lines.watch(&ranges);
                    tracing::debug!("lines of {places:?}");
                    keeper.places = places;
                }
                Some(Err(why)) => {
                    tracing::debug!("QEMU does not say where the windows are: {}", out::reason(&why));
                    monitor = None;
                }
                _ => {}
            }
        }
        if !has_more {
            thread::sleep(TAKEN);
        }
    }
}

impl Keeper {
    fn new(file: File) -> Self {
        let kept = BufWriter::new(file);
        Self { kept, lines: 0, lost: 0, last_ns: 0, places: Vec::new(), is_full: false }
    }

    /// Keeps a line by its place in its window. One that is in none, as a window has been moved, is
    /// lost, and so are all from the first on for which there is no space.
    fn keep(&mut self, line: &Line) {
        let place = self.places.iter().find(|place| place.at.contains(&line.address));
        let Some(place) = place.filter(|_| !self.is_full) else {
            self.lost += 1;
            return;
        };
        let offset = line.address - place.at.start + place.offset;
        let words = [line.time_ns, packed(offset, line, place.window)];
        self.last_ns = self.last_ns.max(line.time_ns);
        self.lines += 1;
        if let Err(why) = self.kept.write_all(words.map(u64::to_le_bytes).as_flattened()) {
            self.say_full(&why);
        }
    }

    fn say_full(&mut self, why: &io::Error) {
        self.is_full = true;
        let folder = std::env::temp_dir();
        let folder = folder.display();
        log::say(&format!(
            "no more lines are recorded: {folder}, where they lie until the guest ends: {why}"
        ));
    }

    /// What is kept, whole lines.
    fn end(mut self) -> io::Result<Taken> {
        if !self.is_full
            && let Err(why) = self.kept.flush()
        {
            self.say_full(&why);
        }
        // What is left in the buffer has no space.
        let (kept, _) = self.kept.into_parts();
        let whole = kept.metadata()?.len() / (8 * KEPT) as u64;
        let lines = self.lines.min(whole);
        Ok(Taken { kept, lines, lost: self.lost + (self.lines - lines), places: self.places })
    }
}

/// A line in a word: its place, the logarithm of its bytes, whether it is written, and in which
/// window it is. Physical addresses have 52 bits, and a line has 2^15 bytes at the most.
fn packed(offset: u64, line: &Line, window: Window) -> u64 {
    let flags = u64::from(line.write) << 1 | u64::from(window == Window::Views);
    offset << 6 | u64::from(line.bytes.ilog2()) << 2 | flags
}

/// What [`packed`] made a word of: the place, the bytes, whether it is written, and the window.
fn unpacked(word: u64) -> (u64, u64, bool, Window) {
    let window = if word & 1 == 1 { Window::Views } else { Window::Base };
    (word >> 6, 1 << (word >> 2 & 15), word & 2 != 0, window)
}

/// What is in a trace.
struct Written {
    requests: u64,
    /// Lines of the views window behind which is no view.
    elsewhere: u64,
    lost: u64,
}

fn write_trace(
    file: &File,
    taken: Taken,
    lines: &Lines,
    map: &Map,
    blocks: &BTreeMap<u64, Block>,
    device_bytes: u64,
) -> Result<Written> {
    let Taken { mut kept, lines: count, lost, .. } = taken;
    let mut writer = Writer::new(BufWriter::new(file), Header { seen: Seen::Lines, device_bytes })?;
    for view in map.views() {
        writer.view(view)?;
    }
    for (number, block) in blocks {
        writer.block(*number, block)?;
    }
    kept.rewind()?;
    let mut from = BufReader::new(kept);
    let mut written = Written { requests: 0, elsewhere: 0, lost: lost + lines.lost() };
    for _ in 0..count {
        let mut bytes = [[0; 8]; KEPT];
        from.read_exact(bytes.as_flattened_mut())?;
        let [time_ns, line] = bytes.map(u64::from_le_bytes);
        let (offset, length, write, window) = unpacked(line);
        let Some((address, length, view)) = map.behind(window, offset, length) else {
            written.elsewhere += 1;
            continue;
        };
        let length = length.min(device_bytes.saturating_sub(address)).max(1);
        writer.request(&Request { time_ns, address, length, view, guest: 0, write, served: None })?;
        written.requests += 1;
    }
    if written.lost > 0 {
        writer.lost(written.lost)?;
    }
    writer.finish()?;
    Ok(written)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A keeper of lines of the first MiB behind 4 GiB, which is the base window.
    fn keeper(file: File) -> Keeper {
        let mut keeper = Keeper::new(file);
        keeper.places = vec![Place { window: Window::Base, at: 4 << 30..(4 << 30) + (1 << 20), offset: 0 }];
        keeper
    }

    fn line(number: u64) -> Line {
        Line { time_ns: number, address: (4 << 30) + 64 * number, bytes: 64, write: false, processor: 0 }
    }

    #[test]
    fn lines_for_which_there_is_no_space_are_lost_and_the_guest_goes_on() {
        let full = OpenOptions::new().read(true).write(true).open("/dev/full").unwrap();
        let mut keeper = keeper(full);
        (0..3000).for_each(|number| keeper.keep(&line(number)));
        assert!(keeper.is_full);
        let taken = keeper.end().unwrap();
        assert_eq!((taken.lines, taken.lost), (0, 3000));
        // Of the last ones only the end tells that there is no space.
        let full = OpenOptions::new().read(true).write(true).open("/dev/full").unwrap();
        let mut keeper = self::keeper(full);
        keeper.keep(&line(0));
        let taken = keeper.end().unwrap();
        assert_eq!((taken.lines, taken.lost), (0, 1));
    }

    #[test]
    fn lines_of_where_no_window_is_any_more_are_counted() {
        let mut keeper = keeper(tempfile::tempfile().unwrap());
        (0..3).for_each(|number| keeper.keep(&line(number)));
        keeper.keep(&line(1 << 20));
        let taken = keeper.end().unwrap();
        assert_eq!((taken.lines, taken.lost), (3, 1));
        assert_eq!(taken.kept.metadata().unwrap().len(), 3 * 16);
    }

    #[test]
    fn a_line_comes_back_from_its_word() {
        for offset in [0, 1, 0xfff, (1 << 52) - 1] {
            for bytes in (0..16).map(|log| 1_u64 << log) {
                for (write, window) in [(false, Window::Base), (true, Window::Base), (false, Window::Views)] {
                    let line = Line { time_ns: 0, address: 0, bytes, write, processor: 0 };
                    assert_eq!(unpacked(packed(offset, &line, window)), (offset, bytes, write, window));
                }
            }
        }
    }
}
