//! A device's windows in ordinary files with a control port in this process, and the program run on
//! them.

use std::{
    fs::{File, OpenOptions},
    io::{BufRead, BufReader, Write},
    os::unix::{fs::FileExt, net::UnixListener},
    path::PathBuf,
    process::{Command, Output},
    thread,
};

use lamina_abi::{Directory, encode};
use lamina_guest::Event;
use serde_json::Value;
use tempfile::TempDir;

/// The files of a device, and of the program on it.
pub(crate) struct Files(TempDir);

impl Files {
    pub(crate) fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn file(&self, name: &str) -> File {
        let path = self.path(name);
        OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
    }

    /// Gives both windows the sizes that the directory names, and puts it at the beginning of the
    /// views.
    pub(crate) fn publish(&self, directory: &Directory) {
        self.file("base").set_len(directory.base_bytes).unwrap();
        self.file("views").set_len(directory.views_bytes).unwrap();
        self.file("views").write_all_at(&encode(directory).unwrap(), 0).unwrap();
    }

    /// Has every request at the control port be answered so.
    pub(crate) fn serve(&self, mut answer: impl FnMut(Value) -> Value + Send + 'static) {
        let listener = UnixListener::bind(self.path("ctl")).unwrap();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                for line in BufReader::new(stream.try_clone().unwrap()).lines() {
                    let Ok(request) = serde_json::from_str(&line.unwrap()) else { continue };
                    stream.write_all(format!("{}\n", answer(request)).as_bytes()).unwrap();
                }
            }
        });
    }

    /// Runs the program with a plan, and returns its events too.
    pub(crate) fn run(&self, plan: &str) -> (Output, Vec<Event>) {
        std::fs::write(self.path("plan.json"), plan).unwrap();
        // Of a run before.
        let _ = std::fs::remove_file(self.path("report"));
        let output = Command::new(env!("CARGO_BIN_EXE_lamina-guest"))
            .arg(self.path("plan.json"))
            .arg("--report")
            .arg(self.path("report"))
            .env("LAMINA_BASE", self.path("base"))
            .env("LAMINA_VIEWS", self.path("views"))
            .env("LAMINA_CTL", self.path("ctl"))
            .output()
            .unwrap();
        let text = std::fs::read_to_string(self.path("report")).unwrap();
        (output, text.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
    }
}
