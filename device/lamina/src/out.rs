//! Standard output: what a command was asked for. Everything that is printed goes through here, and
//! an error of it comes to [`main`](crate::main) like any other, so that whatever was begun is
//! undone.
//!
//! * Whoever reads has gone: the command ends without a word, with the status that a shell gives
//!   one that `SIGPIPE` ended. Rust's programs ignore that signal.
//! * Anything else, a full disk for one: an error that says so.

use std::fmt::Arguments;
use std::io::{self, Write};
use std::process::ExitCode;

use crate::status::Status;

/// Something could not be printed.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output")]
pub(crate) struct Unprinted(#[from] pub(crate) io::Error);

/// Prints a line, as `println!` does.
macro_rules! print_line {
    ($($line:tt)*) => { $crate::out::line(format_args!($($line)*)) };
}
pub(crate) use print_line;

/// Prints a line.
pub(crate) fn line(line: Arguments<'_>) -> Result<(), Unprinted> {
    text(format!("{line}\n").as_bytes())
}

/// Prints text as it is.
pub(crate) fn text(text: &[u8]) -> Result<(), Unprinted> {
    let mut out = io::stdout().lock();
    out.write_all(text)?;
    Ok(out.flush()?)
}

/// Prints JSON, indented.
pub(crate) fn print_json(value: &serde_json::Value) -> anyhow::Result<()> {
    Ok(print_line!("{}", serde_json::to_string_pretty(value)?)?)
}

/// Prints the lines of a guest's console, each behind `before`. The guest goes on if they cannot be
/// printed any more, which is said once.
pub(crate) fn console(before: String) -> impl FnMut(&str) + Send {
    let mut broken = false;
    move |line: &str| {
        if !broken && let Err(why) = print_line!("{before}{line}") {
            broken = true;
            tracing::warn!("{why}; the guest's console is not shown any more");
        }
    }
}

/// Prints what the parser of the command line has to say, help or an error, and gives the status to
/// end with.
pub(crate) fn parsed(why: &clap::Error) -> ExitCode {
    let printed = why.print().and_then(|()| io::stdout().flush());
    match printed {
        Err(unprinted) if !why.use_stderr() => failed(&Unprinted(unprinted).into()),
        _ => u8::try_from(why.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from),
    }
}

/// Says why a command failed, if anybody is to know, and gives the status to end with.
pub(crate) fn failed(why: &anyhow::Error) -> ExitCode {
    let status = Status::of(why);
    if status != Status::ReaderGone {
        crate::log::say(&format!("lamina: {}", reason(why)));
    }
    status.into()
}

/// An error with its causes. Many say their cause themselves, and some begin with what was said
/// before them, as a file's name: nothing is said twice.
pub(crate) fn reason(why: &anyhow::Error) -> String {
    let (mut whole, mut last) = (why.to_string(), 0);
    for cause in why.chain().skip(1) {
        let cause = cause.to_string();
        if whole[last..].contains(&format!(": {cause}")) {
            continue;
        }
        if cause.strip_prefix(&whole[last..]).is_some_and(|rest| rest.starts_with(": ")) {
            whole.truncate(last);
        } else {
            whole.push_str(": ");
            last = whole.len();
        }
        whole.push_str(&cause);
    }
    whole
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{path}: cannot open: {source}")]
    struct Says {
        path: &'static str,
        source: io::Error,
    }

    #[test]
    fn a_cause_is_said_once() {
        let missing = || io::Error::from_raw_os_error(2);
        let once = "a: cannot open: No such file or directory (os error 2)";
        let says = || Says { path: "a", source: missing() };
        assert_eq!(reason(&says().into()), once);
        assert_eq!(reason(&anyhow!(says()).context("a")), once);
        assert_eq!(reason(&anyhow!(says()).context("no model")), format!("no model: {once}"));
        let kernels = Err::<(), _>(missing()).context("b").context("cannot begin").unwrap_err();
        assert_eq!(reason(&kernels), "cannot begin: b: No such file or directory (os error 2)");
        assert_eq!(reason(&anyhow!("alone")), "alone");
    }
}
