//! Where a guest has the windows: what QEMU says of the guest's memory.
//!
//! The guest's kernel decides that while it runs, so QEMU's monitor is asked until both windows are
//! there, and now and then behind that.

use std::io::{BufRead, BufReader, Read, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use lamina_serve::peer;
use serde_json::{Value, json};

/// Bytes that an answer may have: a list of all memory.
const MAX_ANSWER: u64 = 16 << 20;
/// How long the monitor may take.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Which window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Window {
    Base,
    Views,
}

/// A part of a window in the guest's physical memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) at: Range<u64>,
    pub(super) window: Window,
    /// Where in the window it begins.
    pub(super) offset: u64,
}

/// A connection to QEMU's monitor.
pub(super) struct Monitor(BufReader<UnixStream>);

impl Monitor {
    /// Connects to the QEMU that listens at `socket`.
    pub(super) fn connect(socket: &Path) -> Result<Self> {
        let stream = peer::connect(socket)?;
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let mut monitor = Self(BufReader::new(stream));
        ensure!(monitor.line()?.get("QMP").is_some(), "{} is no monitor of QEMU", socket.display());
        monitor.execute(&json!({ "execute": "qmp_capabilities" }))?;
        Ok(monitor)
    }

    /// Where the windows are now.
    pub(super) fn places(&mut self) -> Result<Vec<Place>> {
        // There is no such list for programs: this one is for people.
        let arguments = json!({ "command-line": "info mtree -f" });
        let list = self.execute(&json!({ "execute": "human-monitor-command", "arguments": arguments }))?;
        Ok(parse(list.as_str().unwrap_or_default()))
    }

    fn execute(&mut self, command: &Value) -> Result<Value> {
        writeln!(self.0.get_mut(), "{command}")?;
        loop {
            let mut answer = self.line()?;
            if let Some(why) = answer.get("error") {
                bail!("QEMU refuses: {:.200}", why["desc"].as_str().unwrap_or_default());
            }
            // Events come between.
            if let Some(answer) = answer.get_mut("return") {
                return Ok(answer.take());
            }
        }
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.0.by_ref().take(MAX_ANSWER).read_line(&mut line)?;
        serde_json::from_str(&line).context("QEMU's monitor says no JSON")
    }
}

/// The windows in QEMU's list of what the processors see, a line a range, such as
/// `  0000000110000000-000000011fffffff (prio 0, ram): base @0000000000100000`.
fn parse(list: &str) -> Vec<Place> {
    let (mut heading, mut is_memory) = (false, false);
    let mut places = Vec::new();
    for line in list.lines() {
        if line.starts_with("FlatView") {
            (heading, is_memory) = (true, false);
        } else if heading && line.trim_start().starts_with("AS ") {
            is_memory |= line.contains("AS \"memory\"");
        } else if is_memory {
            heading = false;
            places.extend(place(line));
        }
    }
    places
}

fn place(line: &str) -> Option<Place> {
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let (range, rest) = line.trim().split_once(" (")?;
    let (first, last) = range.split_once('-')?;
    let mut words = rest.split_once("): ")?.1.split(' ');
    let window = match words.next()?.rsplit('/').next()? {
        "base" => Window::Base,
        "views" => Window::Views,
        _ => return None,
    };
    let offset = match words.next().and_then(|word| word.strip_prefix('@')) {
        Some(offset) => number(offset)?,
        None => 0,
    };
    Some(Place { at: number(first)?..number(last)?.checked_add(1)?, window, offset })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_windows_are_found_in_what_processors_see() {
        let list = "FlatView #0
 AS \"cxl-type3-dpa-vmem-space:mem0\", root: base
 Root memory region: base
  0000000000000000-000000000fffffff (prio 0, ram): base

FlatView #1
 AS \"memory\", root: system
 AS \"cpu-memory-0\", root: system
 Root memory region: system
  0000000000000000-00000000000bffff (prio 0, ram): ram
  0000000110000000-000000011fffffff (prio 0, ram): base
  0000000120000000-00000001200fffff (prio 0, ram): /objects/views @0000000000100000 KVM
  00000000fee00000-00000000feefffff (prio 4096, i/o): apic-msi

FlatView #2
 AS \"I/O\", root: io
  No rendered FlatView
";
        let place = |at, window, offset| Place { at, window, offset };
        assert_eq!(
            parse(list),
            [
                place(0x1_1000_0000..0x1_2000_0000, Window::Base, 0),
                place(0x1_2000_0000..0x1_2010_0000, Window::Views, 0x10_0000),
            ]
        );
    }

    #[test]
    fn what_is_no_such_list_has_no_windows() {
        let odd = "FlatView #0\n AS \"memory\", root: system\n  zz-1 (prio 0, ram): base\n  0-ffffffffffffffff (prio 0, ram): base\n  1-2 (): base @x\n  1-2\n";
        for text in ["", "FlatView #0", odd] {
            assert_eq!(parse(text), [], "{text:?}");
        }
    }
}
