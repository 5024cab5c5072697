//! Where events go: the report port, else a file, else standard output.
//!
//! A report that cannot be written any more must not stop the run: the console still tells a
//! person, and the host notices the missing end.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    os::unix::{fs::FileTypeExt, net::UnixStream},
    path::Path,
};

use anyhow::Context;
use lamina_shim::{ctl, sysfs::Tree};

use crate::Event;

/// The virtio port that the host reads events from.
pub const REPORT_PORT: &str = "org.lamina.report";

/// The open report, which remembers problems for its end.
pub struct Report {
    out: Option<Box<dyn Write>>,
    errors: Vec<String>,
}

impl Report {
    /// A report to `path` (a port, a socket or a file, made if missing); without a path to the port
    /// [`REPORT_PORT`], and without that to standard output.
    ///
    /// # Errors
    /// When what should take the report cannot be opened.
    pub fn open(path: Option<&Path>) -> anyhow::Result<Self> {
        let port = path.map(Path::to_owned).or_else(|| ctl::port(&Tree::system(), REPORT_PORT));
        let out: Box<dyn Write> = match port {
            None => Box::new(io::stdout()),
            Some(path) => {
                let kind = fs::metadata(&path).map(|metadata| metadata.file_type());
                let context = || format!("cannot open the report {}", path.display());
                if kind.is_ok_and(|kind| kind.is_socket()) {
                    Box::new(UnixStream::connect(&path).with_context(context)?)
                } else {
                    Box::new(OpenOptions::new().append(true).create(true).open(&path).with_context(context)?)
                }
            }
        };
        Ok(Self { out: Some(out), errors: Vec::new() })
    }

    /// A report into anything.
    pub fn to(out: impl Write + 'static) -> Self {
        Self { out: Some(Box::new(out)), errors: Vec::new() }
    }

    /// Sends `event`, at once.
    pub fn send(&mut self, event: &Event) {
        if let Event::Problem { step, message } = event {
            self.errors.push(format!("{step}: {message}"));
            console(&format!("PROBLEM {step}: {message}"));
        }
        let Some(out) = &mut self.out else { return };
        let sent = serde_json::to_vec(event).map_err(io::Error::other).and_then(|mut line| {
            line.push(b'\n');
            out.write_all(&line)?;
            out.flush()
        });
        if let Err(error) = sent {
            console(&format!("the report is lost: {error}"));
            self.errors.push(format!("report: {error}"));
            self.out = None;
        }
    }

    /// Sends a problem found in `step`.
    pub fn problem(&mut self, step: &str, message: &impl ToString) {
        self.send(&Event::Problem { step: step.to_owned(), message: message.to_string() });
    }

    /// Ends the report and says whether there was no problem.
    pub fn done(mut self) -> bool {
        let errors = self.errors.clone();
        self.send(&Event::Done { ok: errors.is_empty(), errors });
        self.errors.is_empty()
    }
}

/// A line for a person at the console.
pub(crate) fn console(text: &str) {
    // A console that is gone is nobody's problem here.
    let _ = writeln!(io::stderr(), "lamina-guest: {text}");
}
