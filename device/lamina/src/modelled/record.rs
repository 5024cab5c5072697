//! `lamina trace record`: takes the trace of a device at work, as it comes, into a file.
//!
//! Everything that comes is checked on its way. However it ends, what was whole is in a file that
//! opens, with `--cut` if this program was killed or found no room for the end.

use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, IsTerminal, Read};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use http_body_util::BodyExt;
use hyper::Method;
use hyper::body::{Bytes, Incoming};
use indicatif::{BinaryBytes, HumanCount, ProgressBar};
use lamina_model::trace::{Item, Reader, Writer};
use serde_json::json;
use tokio::sync::mpsc::{Receiver, channel};

use crate::args::{ApiAt, Record};
use crate::client;
use crate::log;
use crate::out::print_line;
use crate::signals::Ending;
use crate::status::NoDevice;

/// Pieces of the trace that wait to be written.
pub(super) const WAITING: usize = 16;
/// How often progress is shown.
const SHOWN: Duration = Duration::from_millis(500);
/// How long the rest of a trace may take to come once the device is told to end it. It waits two
/// seconds itself for pieces to be taken.
pub(super) const REST: Duration = Duration::from_secs(10);

/// What was recorded.
#[derive(Clone, Copy, Debug, Default)]
struct Recorded {
    requests: u64,
    blocks: u64,
    lost: u64,
    /// Whether that is all that was asked for, and the device did not go away.
    ended: bool,
}

/// Records until it was long or much enough, or somebody interrupts.
pub(crate) async fn record(args: &Record) -> Result<()> {
    let begun = Instant::now();
    let made = OpenOptions::new().write(true).create_new(true).open(&args.file);
    let file = made.with_context(|| format!("cannot make {}", args.file.display()))?;
    let recorded = follow(args, file).await;
    let recorded = match recorded {
        Ok(recorded) => recorded,
        Err(why) if holds_something(&args.file) => {
            let file = args.file.display();
            let cut = "what came before is in it; --cut reads it if it has no end";
            return Err(why.context(format!("{file}: {cut}")));
        }
        Err(why) => {
            // What cannot be removed is said to be wrong anyway.
            let _ = std::fs::remove_file(&args.file);
            return Err(why.context(format!("nothing was recorded into {}", args.file.display())));
        }
    };
    let bytes = std::fs::metadata(&args.file)?.len();
    let Recorded { requests, blocks, lost, ended } = recorded;
    let seconds = begun.elapsed().as_secs_f64();
    if args.client.json {
        print_line!(
            "{}",
            json!({
                "trace": args.file, "requests": requests, "blocks": blocks, "lost": lost, "bytes": bytes,
                "seconds": seconds, "ended": ended,
            })
        )?;
    } else {
        let (requests, blocks) = (HumanCount(requests), HumanCount(blocks));
        let (lost, bytes) = (HumanCount(lost), BinaryBytes(bytes));
        let file = args.file.display();
        print_line!(
            "{file}: {requests} requests, {blocks} layouts of blocks, {lost} lost, {bytes}, {seconds:.1} s"
        )?;
    }
    if !ended {
        bail!(NoDevice("the device did not end the trace; what it sent before is in it".to_owned()));
    }
    Ok(())
}

async fn follow(args: &Record, file: File) -> Result<Recorded> {
    let api = &args.client.api;
    let mut ending = Ending::watch()?;
    let (mut body, _connection) = client::open(api, "/trace").await?;
    let (to, pieces) = channel(WAITING);
    let most = args.requests;
    let mut copied = tokio::task::spawn_blocking(move || copy(Pieces::new(pieces), file, most));
    let end = args.duration.map(|seconds| tokio::time::Instant::now() + Duration::from_secs_f64(seconds));
    let over = async {
        match end {
            Some(end) => tokio::time::sleep_until(end).await,
            None => std::future::pending().await,
        }
    };
    log::say(&format!("recording {api}; Ctrl-C ends it"));
    let mut done = None;
    tokio::select! {
        // All that was asked for.
        copied = &mut copied => done = Some(copied),
        () = async { while pass(&mut body, &to).await {} } => {}
        () = async { tokio::select! { () = over => {}, _ = ending.next() => {} } } => {
            // What was recorded before is still coming, also if somebody else has stopped it. It is
            // not waited for if the device stands still, or somebody interrupts again.
            let rest = async {
                if let Err(why) = stop(api).await {
                    tracing::debug!("{why:#}");
                }
                while pass(&mut body, &to).await {}
            };
            tokio::select! {
                () = rest => {}
                () = tokio::time::sleep(REST) => {}
                _ = ending.next() => {}
            }
        }
    }
    drop(to);
    let recorded = match done {
        Some(done) => done,
        None => copied.await,
    }?;
    let is_enough = |recorded: &Recorded| most.is_some_and(|most| recorded.requests >= most);
    if recorded.as_ref().is_ok_and(|recorded| !is_enough(recorded)) {
        return recorded;
    }
    // Nobody takes the rest, which the device would notice by itself, but later. At its end another
    // recording may begin.
    let rest = async {
        if stop(api).await.is_ok() {
            while matches!(body.frame().await, Some(Ok(_))) {}
        }
    };
    // A device that stands still is not waited for.
    let _ = tokio::time::timeout(REST, rest).await;
    recorded
}

/// Whether a file is a trace with something in it.
fn holds_something(path: &Path) -> bool {
    let item =
        File::open(path).ok().and_then(|file| Reader::new(BufReader::new(file)).ok()?.next_item().ok());
    item.flatten().is_some()
}

/// Hands the next piece on; whether there was one that somebody takes.
pub(super) async fn pass(body: &mut Incoming, to: &tokio::sync::mpsc::Sender<Bytes>) -> bool {
    match body.frame().await {
        Some(Ok(frame)) => match frame.into_data() {
            Ok(data) => to.send(data).await.is_ok(),
            Err(_) => true,
        },
        _ => false,
    }
}

async fn stop(api: &ApiAt) -> Result<()> {
    client::ask(api, Method::DELETE, "/trace", None).await.map(drop)
}

/// Copies a trace, at most so many requests of it.
fn copy(pieces: Pieces, file: File, most: Option<u64>) -> Result<Recorded> {
    let mut reader = Reader::new(pieces).context("the device sends no trace")?;
    let mut writer = Writer::new(BufWriter::new(file), reader.header())?;
    let (mut recorded, mut shown) = (Recorded::default(), Instant::now());
    let bar = if io::stderr().is_terminal() { ProgressBar::new_spinner() } else { ProgressBar::hidden() };
    while most.is_none_or(|most| recorded.requests < most) {
        if reader.is_at_chunk() {
            // Whoever kills this program finds what came.
            writer.sync()?;
        }
        match reader.next_item() {
            Ok(Some(Item::View(view))) => writer.view(&view)?,
            Ok(Some(Item::Block(number, block))) => {
                writer.block(number, &block)?;
                recorded.blocks += 1;
            }
            Ok(Some(Item::Words(number, words))) => writer.words(number, words)?,
            Ok(Some(Item::Request(request))) => {
                writer.request(&request)?;
                recorded.requests += 1;
            }
            Ok(Some(Item::Lost(requests))) => {
                writer.lost(requests)?;
                recorded.lost = recorded.lost.saturating_add(requests);
            }
            Ok(None) => {
                recorded.ended = true;
                break;
            }
            Err(why) if reader.is_cut() => {
                tracing::debug!("the trace broke off: {why}");
                break;
            }
            Err(why) => {
                writer.finish()?;
                return Err(why).context("what the device sends is no trace");
            }
        }
        if shown.elapsed() >= SHOWN {
            let (requests, lost) = (HumanCount(recorded.requests), HumanCount(recorded.lost));
            bar.set_message(format!("{requests} requests, {lost} lost"));
            bar.tick();
            shown = Instant::now();
        }
    }
    bar.finish_and_clear();
    writer.finish()?;
    recorded.ended |= most.is_some_and(|most| recorded.requests >= most);
    Ok(recorded)
}

/// A trace as it comes, to be read.
pub(super) struct Pieces {
    from: Receiver<Bytes>,
    piece: Bytes,
}

impl Pieces {
    pub(super) fn new(from: Receiver<Bytes>) -> Self {
        Self { from, piece: Bytes::new() }
    }
}

impl Read for Pieces {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.from.blocking_recv() {
                Some(piece) => self.piece = piece,
                None => return Ok(0),
            }
        }
        let length = out.len().min(self.piece.len());
        out[..length].copy_from_slice(&self.piece.split_to(length));
        Ok(length)
    }
}
