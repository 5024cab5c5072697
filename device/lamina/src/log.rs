//! The log: lines on standard error, which nobody has to read.
//!
//! * A line waits in a bounded queue until a thread of its own has written it. When the queue is
//!   full, because whoever has the other end of standard error does not read, the line is lost and
//!   counted, and the count is written when there is room again: nothing that serves a device ever
//!   waits for a reader.
//! * A process that ends waits a bounded time for what is in the queue.
//! * What a thread that panicked logged is written at once, and the log goes on: `tracing-appender`
//!   is flushed only by ending it, and says nowhere how many lines it dropped.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use tracing_subscriber::EnvFilter;

/// Lines that may wait.
const MAX_LINES: usize = 4096;
/// How long a process that has done its work waits for its log to be written.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(1);

/// This process's.
static LOG: OnceLock<Log> = OnceLock::new();

/// A queue of lines, and its writer.
#[derive(Clone)]
struct Log {
    lines: SyncSender<Line>,
    lost: Arc<AtomicU64>,
}

enum Line {
    Text(Vec<u8>),
    /// Everything before was written.
    Flushed(SyncSender<()>),
}

/// Starts logging, panics too.
pub(crate) fn start() {
    // fuse-backend-rs logs every answer that came too late, with all of its bytes; virtio_queue and
    // vhost_user_backend whatever a guest does wrong.
    let quiet = "info,fuse_backend_rs=off,virtio_queue=off,vhost_user_backend=off";
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(quiet));
    let set_up = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::IsTerminal::is_terminal(&io::stderr()));
    // Not by way of the standard library, which holds a lock while it writes.
    let written =
        io::stderr().as_fd().try_clone_to_owned().and_then(|end| Log::new(File::from(end), MAX_LINES));
    match written {
        Ok(log) => {
            let log = LOG.get_or_init(|| log);
            set_up.with_writer(|| log.clone()).init();
        }
        Err(why) => {
            set_up.with_writer(io::stderr).init();
            tracing::warn!("the log is written by whoever has something to say: {why}");
        }
    }
    std::panic::set_hook(Box::new(|panic| {
        panicked(panic);
        flush(TIMEOUT);
    }));
}

/// Writes a line as it is.
pub(crate) fn say(line: &str) {
    match LOG.get() {
        Some(log) => log.take(format!("{line}\n").into_bytes()),
        None => eprintln!("{line}"),
    }
}

/// Logs a panic.
pub(crate) fn panicked(panic: &PanicHookInfo<'_>) {
    let backtrace = Backtrace::capture();
    let thread = thread::current();
    let name = thread.name().unwrap_or("unnamed");
    if backtrace.status() == BacktraceStatus::Captured {
        tracing::error!("thread {name} {panic}\n{backtrace}");
    } else {
        tracing::error!("thread {name} {panic}");
    }
}

/// Waits until everything that was logged is written, for a bounded time.
pub(crate) fn flush(max_wait: Duration) {
    if let Some(log) = LOG.get() {
        log.flush(max_wait);
    }
}

impl Log {
    fn new(to: impl Write + Send + 'static, most: usize) -> io::Result<Self> {
        let (lines, queue) = sync_channel(most);
        let lost = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&lost);
        thread::Builder::new().name("log".into()).spawn(move || write_all(&queue, &count, to))?;
        Ok(Self { lines, lost })
    }

    /// Takes a whole line. Never waits.
    fn take(&self, line: Vec<u8>) {
        if self.lines.try_send(Line::Text(line)).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn flush(&self, max_wait: Duration) {
        let begun = Instant::now();
        let (flushed, written) = sync_channel(1);
        while let Err(TrySendError::Full(_)) = self.lines.try_send(Line::Flushed(flushed.clone())) {
            if begun.elapsed() > max_wait {
                return;
            }
            thread::sleep(Duration::from_millis(5));
        }
        // What is not written by then is lost.
        let _ = written.recv_timeout(max_wait.saturating_sub(begun.elapsed()));
    }
}

impl Write for Log {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.take(line.to_vec());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes lines as long as somebody has some. What cannot be written has nowhere else to go.
fn write_all(queue: &Receiver<Line>, lost: &AtomicU64, mut to: impl Write) {
    for line in queue {
        if let Line::Text(text) = &line {
            let _ = to.write_all(text);
        }
        let lost = lost.swap(0, Ordering::Relaxed);
        if lost > 0 {
            let _ = writeln!(to, "{lost} lines of the log are lost, because nobody read those before");
        }
        if let Line::Flushed(written) = line {
            let _ = written.try_send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn lines_that_nobody_reads_are_counted_and_hold_nobody_up() {
        let (mut reader, writer) = io::pipe().unwrap();
        let mut log = Log::new(writer, 16).unwrap();
        // Many times more than a pipe and the queue take.
        let line = format!("{}\n", "x".repeat(4095));
        for _ in 0..4096 {
            log.write_all(line.as_bytes()).unwrap();
        }
        log.flush(Duration::from_millis(10));
        let reading = thread::spawn(move || {
            let mut text = String::new();
            reader.read_to_string(&mut text).unwrap();
            text
        });
        log.flush(Duration::from_secs(60));
        drop(log);
        let text = reading.join().unwrap();
        let reported = |line: &str| line.split_once(" lines of the log are lost")?.0.parse::<usize>().ok();
        let (lost, written): (Vec<_>, Vec<_>) = text.lines().partition(|line| reported(line).is_some());
        assert_eq!(written.len() + lost.iter().filter_map(|line| reported(line)).sum::<usize>(), 4096);
        assert!(written.iter().all(|line| line.len() == 4095));
    }
}
