//! A process that is talked to, a line each way.

use std::{
    io::{BufRead, BufReader, Read, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use rustix::io::ioctl_fionread;

/// Bytes in a pipe that is as good as full: it takes 64 KiB, and programs write up to a page at a
/// time.
const FULL: u64 = 60 << 10;
/// How long a process may take to fill its pipe.
const TIMEOUT: Duration = Duration::from_secs(600);

/// A process, killed when this is dropped.
pub(super) struct Talker {
    name: String,
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Talker {
    /// Starts `words`. Its complaints go to the console.
    pub(super) fn start(words: &[String]) -> anyhow::Result<Self> {
        let (program, args) = words.split_first().context("no program is named")?;
        let started = Command::new(program).args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = started.with_context(|| format!("cannot start {program}"))?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().context("its output is not connected")?);
        Ok(Self { name: words.join(" "), child, input, output })
    }

    /// Its process.
    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Says something.
    pub(super) fn tell(&mut self, text: &str) -> anyhow::Result<()> {
        let input = self.input.as_mut().context("its input is closed")?;
        let reported = input.write_all(text.as_bytes()).and_then(|()| input.flush());
        reported.with_context(|| format!("{} takes no input", self.name))
    }

    /// The next line it says.
    pub(super) fn hear(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.output.read_line(&mut line).with_context(|| format!("{} cannot be heard", self.name))?;
        ensure!(!line.is_empty(), "{} ended early: {:?}", self.name, self.child.wait());
        Ok(line.trim_end().to_owned())
    }

    /// Says a line and hears the answer.
    pub(super) fn ask(&mut self, line: &str) -> anyhow::Result<String> {
        self.tell(&format!("{line}\n"))?;
        self.hear()
    }

    /// The number that follows `word` in the answer to `line`.
    pub(super) fn number(&mut self, line: &str, word: &str) -> anyhow::Result<u64> {
        let answer = self.ask(line)?;
        let number = answer.strip_prefix(word).and_then(|rest| rest.split_whitespace().next()?.parse().ok());
        number.with_context(|| format!("{} answers {answer:?} to {line}", self.name))
    }

    /// Waits until it has said so much that it waits for somebody to take it. Nothing must have
    /// been heard yet.
    pub(super) fn until_it_waits(&mut self) -> anyhow::Result<()> {
        let begun = Instant::now();
        while ioctl_fionread(self.output.get_ref())? < FULL {
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended ({status}) before it had filled its pipe", self.name);
            }
            ensure!(begun.elapsed() < TIMEOUT, "{} does not fill its pipe", self.name);
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Closes its input, takes what it still says, and waits until it has ended, which must be
    /// well.
    pub(super) fn end(mut self) -> anyhow::Result<()> {
        self.input = None;
        let mut rest = Vec::new();
        self.output.read_to_end(&mut rest)?;
        let status = self.child.wait()?;
        ensure!(status.success(), "{} ended with {status}", self.name);
        Ok(())
    }
}

impl Drop for Talker {
    fn drop(&mut self) {
        // The only error is that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Talker {
        Talker::start(&["sh", "-c", script].map(String::from)).unwrap()
    }

    #[test]
    fn a_process_is_heard_line_by_line_and_ends_well() {
        let mut talker = shell("read a; echo got $a; read b; echo wrong 7; cat");
        assert_eq!(talker.ask("fill").unwrap(), "got fill");
        assert_eq!(talker.number("check", "wrong ").unwrap(), 7);
        talker.end().unwrap();
    }

    #[test]
    fn a_process_that_fails_or_ends_early_is_an_error() {
        assert!(shell("exit 3").end().unwrap_err().to_string().contains('3'));
        assert!(shell("exit 0").hear().unwrap_err().to_string().contains("ended early"));
        assert!(shell("echo little").until_it_waits().unwrap_err().to_string().contains("before"));
        assert!(Talker::start(&[]).is_err());
        assert!(Talker::start(&["/no/such/program".to_owned()]).is_err());
    }

    #[test]
    fn a_process_whose_output_nobody_takes_is_seen_to_wait() {
        let mut talker = shell("head -c 200000 /dev/zero");
        talker.until_it_waits().unwrap();
        talker.end().unwrap();
    }
}
