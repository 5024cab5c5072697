//! How a test says that it cannot run here.
//!
//! Rust's test runner knows tests that pass and tests that fail. A test that needs root, a control
//! group or a mount, and finds that it may not have it, calls [`test`] and returns. `./x test`
//! names a file in `LAMINA_SKIPPED`, reads it when all have run, and counts these apart from those
//! that passed.

use std::{
    fmt::Display,
    fs::OpenOptions,
    io::{self, Write},
    thread,
};

/// Names the file that takes a line for each skip: `test` or `part`, the test's name, why.
pub const FILE: &str = "LAMINA_SKIPPED";

/// Says that the test of this thread cannot run here at all. The caller returns.
///
/// # Panics
/// If the file cannot be written: a skip that nobody hears of would pass for a success.
pub fn test(why: impl Display) {
    tell("test", &why);
}

/// Says that a part of the test of this thread cannot run here. The test counts as passed for the
/// rest.
///
/// # Panics
/// As [`test()`].
pub fn part(why: impl Display) {
    tell("part", &why);
}

fn tell(what: &str, why: &dyn Display) {
    let thread = thread::current();
    let line = line(what, thread.name().unwrap_or("a test"), why);
    eprint!("skipped: {line}");
    if let Some(path) = std::env::var_os(FILE) {
        let written = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .and_then(|mut file| file.write_all(line.as_bytes()));
        check(written);
    }
}

/// One line, whatever the reason holds.
fn line(what: &str, name: &str, why: &dyn Display) -> String {
    let why = why.to_string().replace(['\n', '\r'], " ");
    format!("{what} {name}: {why}\n")
}

fn check(written: io::Result<()>) {
    written.expect("the file of skipped tests can be written");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_of_several_lines_is_one_line() {
        assert_eq!(line("test", "a::b", &"no root\nhere"), "test a::b: no root here\n");
    }

    #[test]
    #[should_panic(expected = "the file of skipped tests")]
    fn a_skip_that_cannot_be_told_fails() {
        check(Err(io::ErrorKind::NotFound.into()));
    }
}
