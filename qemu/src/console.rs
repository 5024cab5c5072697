//! What the guest says on its serial console.
//!
//! Lines are handed on as they come. Two of them are `/init`'s: `lamina-init: ready UPTIME` before
//! the program starts, and `lamina-init: exit STATUS` after it ended. The last lines are kept, to
//! explain failures.

use std::collections::VecDeque;

/// Lines kept to explain failures.
const KEPT_LINES: usize = 100;
/// Bytes after which a line is taken as complete without its end.
const LINE_BYTES: usize = 16 << 10;
const READY: &str = "lamina-init: ready ";
const EXIT: &str = "lamina-init: exit ";

/// What `/init` says about the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marker {
    /// The guest is up; the program starts now.
    Ready,
    /// The program ended with this status.
    Exit(i32),
}

impl Marker {
    /// The marker on this line, if it is one.
    pub fn parse(line: &str) -> Option<Self> {
        if line.starts_with(READY) {
            return Some(Self::Ready);
        }
        line.strip_prefix(EXIT)?.trim().parse().ok().map(Self::Exit)
    }
}

/// Cuts a byte stream into lines and keeps the last ones.
#[derive(Debug, Default)]
pub struct Lines {
    partial: Vec<u8>,
    kept: VecDeque<String>,
}

impl Lines {
    /// Takes more bytes and hands each line completed by them to `on_line`, without its end; bytes
    /// that are no text are replaced.
    pub fn push(&mut self, bytes: &[u8], mut on_line: impl FnMut(&str)) {
        for &byte in bytes {
            if byte != b'\n' {
                self.partial.push(byte);
            }
            if byte == b'\n' || self.partial.len() >= LINE_BYTES {
                self.finish(&mut on_line);
            }
        }
    }

    /// Hands on what came since the last end of a line, if anything did.
    pub fn end(&mut self, mut on_line: impl FnMut(&str)) {
        if !self.partial.is_empty() {
            self.finish(&mut on_line);
        }
    }

    /// The last lines, joined.
    pub fn tail(&self) -> String {
        self.kept.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }

    fn finish(&mut self, on_line: &mut impl FnMut(&str)) {
        let text = String::from_utf8_lossy(&self.partial);
        let line = text.trim_end_matches('\r').to_owned();
        self.partial.clear();
        on_line(&line);
        if self.kept.len() == KEPT_LINES {
            self.kept.pop_front();
        }
        self.kept.push_back(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_the_same_however_the_bytes_arrive() {
        let bytes = b"boot\r\nlamina-init: ready 4.2\r\n\r\n\xff\nend";
        for size in 1..=bytes.len() {
            let (mut lines, mut seen) = (Lines::default(), Vec::new());
            for chunk in bytes.chunks(size) {
                lines.push(chunk, |line| seen.push(line.to_owned()));
            }
            lines.end(|line| seen.push(line.to_owned()));
            assert_eq!(seen, ["boot", "lamina-init: ready 4.2", "", "\u{fffd}", "end"], "{size}");
        }
    }

    #[test]
    fn only_what_init_says_is_a_marker() {
        assert_eq!(Marker::parse("lamina-init: ready 4.18"), Some(Marker::Ready));
        assert_eq!(Marker::parse("lamina-init: exit 0"), Some(Marker::Exit(0)));
        assert_eq!(Marker::parse("lamina-init: exit 137"), Some(Marker::Exit(137)));
        for line in [
            "",
            "lamina-init: exit",
            "lamina-init: exit x",
            "# lamina-init: exit 0",
            "lamina-init: cannot load x",
        ] {
            assert_eq!(Marker::parse(line), None, "{line}");
        }
    }

    #[test]
    fn endless_output_is_cut_and_only_its_end_is_kept() {
        let (mut lines, mut count) = (Lines::default(), 0);
        for _ in 0..100 {
            lines.push(&[b'x'; LINE_BYTES], |_| count += 1);
        }
        assert_eq!(count, 100);
        assert_eq!(lines.tail().len(), KEPT_LINES * (LINE_BYTES + 1) - 1);
    }
}
