//! How far reading checkpoints is: a bar on a terminal, now and then a line elsewhere.

use std::io::{self, IsTerminal};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{BinaryBytes, ProgressBar, ProgressStyle};
use lamina_device::load::Progress;

use crate::log;

/// How often a plain line of progress is printed.
const PLAIN_PROGRESS: Duration = Duration::from_secs(2);

/// Shows progress on standard error.
pub(crate) struct Meter {
    /// What is being done, for plain lines: "loaded".
    verb: &'static str,
    /// What is counted where that is not bytes: "tensors".
    unit: Option<&'static str>,
    shown: Shown,
}

enum Shown {
    Bar(ProgressBar),
    Lines(Mutex<Instant>),
}

impl Meter {
    /// Of bytes.
    pub(crate) fn new(verb: &'static str) -> Self {
        Self::with(
            verb,
            None,
            "{bar:30} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {wide_msg}",
        )
    }

    /// Of things: "tensors", for example.
    pub(crate) fn of(verb: &'static str, unit: &'static str) -> Self {
        Self::with(verb, Some(unit), "{bar:30} {pos}/{len} {eta} left {wide_msg}")
    }

    fn with(verb: &'static str, unit: Option<&'static str>, template: &str) -> Self {
        let shown = if io::stderr().is_terminal() {
            let style = ProgressStyle::with_template(template);
            let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
            Shown::Bar(ProgressBar::new(0).with_style(style))
        } else {
            Shown::Lines(Mutex::new(Instant::now()))
        };
        Self { verb, unit, shown }
    }

    pub(crate) fn show(&self, progress: &Progress<'_>) {
        self.tell(progress.tensor, progress.bytes, progress.total);
    }

    /// That `done` of `total` are done, and what is being done.
    pub(crate) fn tell(&self, what: &str, done: u64, total: u64) {
        match &self.shown {
            Shown::Bar(bar) => {
                bar.set_length(total);
                bar.set_position(done);
                bar.set_message(what.to_owned());
            }
            Shown::Lines(last) => {
                let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
                if last.elapsed() >= PLAIN_PROGRESS || done == total {
                    *last = Instant::now();
                    let verb = self.verb;
                    log::say(&match self.unit {
                        None => format!("{verb} {} of {}", BinaryBytes(done), BinaryBytes(total)),
                        Some(unit) => format!("{verb} {done} of {total} {unit}"),
                    });
                }
            }
        }
    }

    pub(crate) fn finish(&self) {
        if let Shown::Bar(bar) = &self.shown {
            bar.finish_and_clear();
        }
    }
}
