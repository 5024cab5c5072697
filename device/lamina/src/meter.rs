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
    shown: Shown,
}

enum Shown {
    Bar(ProgressBar),
    Lines(Mutex<Instant>),
}

impl Meter {
    pub(crate) fn new(verb: &'static str) -> Self {
        let shown = if io::stderr().is_terminal() {
            let style = ProgressStyle::with_template(
                "{bar:30} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {wide_msg}",
            );
            let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
            Shown::Bar(ProgressBar::new(0).with_style(style))
        } else {
            Shown::Lines(Mutex::new(Instant::now()))
        };
        Self { verb, shown }
    }

    pub(crate) fn show(&self, progress: &Progress<'_>) {
        match &self.shown {
            Shown::Bar(bar) => {
                bar.set_length(progress.total);
                bar.set_position(progress.bytes);
                bar.set_message(progress.tensor.to_owned());
            }
            Shown::Lines(last) => {
                let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
                if last.elapsed() >= PLAIN_PROGRESS || progress.bytes == progress.total {
                    *last = Instant::now();
                    let (bytes, total) = (BinaryBytes(progress.bytes), BinaryBytes(progress.total));
                    log::say(&format!("{} {bytes} of {total}", self.verb));
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
