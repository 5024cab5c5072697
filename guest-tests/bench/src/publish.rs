//! `./x bench --publish`: the page of figures, made of what the benchmarks print.
//!
//! A figure is only there with its command, the machine, the date and the commit. One page is of
//! one run: figures of different machines or days do not stand side by side.

use std::{
    fs::{self, OpenOptions},
    path::{Path, PathBuf},
    process::Command,
    thread,
};

use anyhow::{Context, Result};

/// The page, unless another file is named.
pub const PAGE: &str = "docs/performance.md";

/// What becomes the page.
#[derive(Debug)]
pub struct Page {
    path: PathBuf,
    sections: String,
}

impl Page {
    /// A page without figures. What the file holds stays until the page is written.
    ///
    /// # Errors
    /// When the file could not be written: better to hear it before hours of measuring.
    pub fn new(path: PathBuf) -> Result<Self> {
        OpenOptions::new().append(true).create(true).open(&path).with_context(|| refused(&path))?;
        Ok(Self { path, sections: String::new() })
    }

    /// Where it goes.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Takes up what the command `./x bench NAME …` printed.
    pub fn add(&mut self, command: &str, printed: &str) {
        let name = command.split_whitespace().nth(2).unwrap_or(command);
        let printed = printed.trim();
        let section = ["\n## ", name, "\n\n    ", command, "\n\n```text\n", printed, "\n```\n"];
        self.sections.extend(section);
    }

    /// Writes it.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self) -> Result<()> {
        let Self { path, sections } = self;
        let page = format!(
            "# Performance\n\n\
             Written by `./x bench --publish`; do not edit. What stands in one table was measured in one run.\n\
             What is to be read from it is its ratios: other machines have other rates.\n\n{}{sections}",
            machine()
        );
        fs::write(path, page).with_context(|| refused(path))
    }
}

/// The machine, the day and the commit, a line each.
fn machine() -> String {
    let cores = thread::available_parallelism().map_or_else(|_| "unknown".to_owned(), |n| n.to_string());
    let memory = field("/proc/meminfo", "MemTotal").unwrap_or_else(unknown);
    let processor = field("/proc/cpuinfo", "model name").unwrap_or_else(unknown);
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_else(|_| unknown());
    let lines = [
        ("processor", format!("{processor}, {cores} cores")),
        ("memory", memory),
        // Without what a distribution or a site appends.
        ("kernel", format!("Linux {}", kernel.trim().split('-').next().unwrap_or_default())),
        ("date", output("date", &["-u", "+%F"]).unwrap_or_else(unknown)),
        ("commit", output("git", &["describe", "--always", "--dirty"]).unwrap_or_else(unknown)),
    ];
    let rows = lines.map(|(name, value)| format!("| {name} | {value} |\n"));
    format!("| | |\n|---|---|\n{}", rows.concat())
}

fn refused(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

fn unknown() -> String {
    "unknown".to_owned()
}

/// The value of the first line `NAME: VALUE` of a file of the kernel's.
fn field(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// What a program prints, if it is there and succeeds.
fn output(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    let said = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| said.trim().to_owned())
}
