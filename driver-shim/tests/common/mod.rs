//! Windows in ordinary files, with a directory and bytes that tell where they came from.

#![allow(dead_code, reason = "every test file uses a part of it")]

pub(crate) mod kernel;

use std::{
    fs::OpenOptions as FileOptions,
    io::{BufRead, BufReader, Write},
    os::unix::{
        fs::FileExt,
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    thread,
};

use lamina_abi::{DIRECTORY_BYTES, Directory, Layout, TensorEntry, VIEW_ALIGN, ViewEntry, encode};
use lamina_shim::{Access, OpenOptions, sysfs::Tree};
use tempfile::TempDir;

/// Bytes of each window.
pub(crate) const WINDOW: u64 = 16 << 20;
/// Elements of the larger tensor; odd, so that nothing ends on a page.
pub(crate) const ELEMENTS: u64 = 70_001;

pub(crate) struct Windows {
    pub(crate) dir: TempDir,
    pub(crate) directory: Directory,
}

impl Windows {
    /// `w` (bf16, views full, e8m3, e8m3:packed) and `kv` (views full).
    pub(crate) fn new() -> Self {
        let windows = Self { dir: TempDir::new().unwrap(), directory: directory() };
        for (name, salt) in [("base", 1), ("views", 2)] {
            windows.file(name).set_len(WINDOW).unwrap();
            let behind = if name == "base" { 0 } else { DIRECTORY_BYTES };
            let bytes: Vec<u8> = (behind..WINDOW).map(|at| byte(at, salt)).collect();
            windows.file(name).write_all_at(&bytes, behind).unwrap();
        }
        windows.write_directory(&windows.directory);
        windows
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn file(&self, name: &str) -> std::fs::File {
        FileOptions::new().read(true).write(true).create(true).truncate(false).open(self.path(name)).unwrap()
    }

    pub(crate) fn write_directory(&self, directory: &Directory) {
        self.file("views").write_all_at(&encode(directory).unwrap(), 0).unwrap();
    }

    pub(crate) fn options(&self) -> OpenOptions {
        OpenOptions {
            base: Some(self.path("base")),
            views: Some(self.path("views")),
            ctl: Some(self.path("ctl")),
            base_access: Access::Read,
            views_access: Access::Read,
            tree: Tree::at(self.dir.path(), None),
        }
    }

    /// What the file holds there, read without the library.
    pub(crate) fn bytes(&self, name: &str, offset: u64, length: u64) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(length).unwrap()];
        self.file(name).read_exact_at(&mut bytes, offset).unwrap();
        bytes
    }

    /// The bytes of a view, or of the tensor for `base`.
    pub(crate) fn expected(&self, tensor: &str, view: &str) -> Vec<u8> {
        if view == "base" {
            let entry = self.directory.tensor(tensor).unwrap();
            return self.bytes("base", entry.dpa, entry.length);
        }
        let entry = self.directory.view(tensor, view).unwrap();
        self.bytes("views", entry.offset, entry.length)
    }
}

fn byte(at: u64, salt: u64) -> u8 {
    ((at + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ salt) >> 40).to_le_bytes()[0]
}

fn directory() -> Directory {
    let bytes = ELEMENTS * 2;
    let tensor = |name: &str, dpa, elements: u64, layout| TensorEntry {
        name: name.into(),
        shape: elements.to_string(),
        format: "bf16".into(),
        dpa,
        length: elements * 2,
        elements,
        layout,
        lossy: false,
    };
    let view = |tensor, spelling: &str, slot, elements: u64, bits: u32| ViewEntry {
        tensor,
        spelling: spelling.into(),
        offset: slot * VIEW_ALIGN,
        length: (elements * u64::from(bits)).div_ceil(8),
        elements,
        bits,
        scale_exp: 0,
    };
    Directory {
        generation: 7,
        base_bytes: WINDOW,
        views_bytes: WINDOW,
        tensors: vec![
            tensor("w", 4096, ELEMENTS, Layout::Weight),
            tensor("kv", 4096 + bytes.next_multiple_of(4096), 640, Layout::rows(32, 16)),
        ],
        views: vec![
            view(0, "full", 1, ELEMENTS, 16),
            view(0, "e8m3", 2, ELEMENTS, 16),
            view(0, "e8m3:packed", 3, ELEMENTS, 12),
            view(1, "full", 4, 640, 16),
        ],
        is_incomplete: false,
    }
}

/// A device that answers each request line with what `answer` makes of it; the requests are kept.
/// What a connection asks first, to find its own replies, is refused by name.
pub(crate) fn device(
    path: &Path,
    answer: impl Fn(&str, &mut UnixStream) + Send + Sync + 'static,
) -> Arc<Mutex<Vec<String>>> {
    let listener = UnixListener::bind(path).unwrap();
    let requests = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&requests);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            while let Some(Ok(line)) = lines.next() {
                if line.contains("sync-") {
                    stream.write_all(refusal(&line).as_bytes()).unwrap();
                } else if !line.is_empty() {
                    kept.lock().unwrap().push(line.clone());
                    answer(&line, &mut stream);
                }
            }
        }
    });
    requests
}

/// The refusal of an operation that does not exist.
pub(crate) fn refusal(line: &str) -> String {
    let request: serde_json::Value = serde_json::from_str(line).unwrap();
    let error = format!("no request: unknown variant {}", request["op"]);
    format!("{}\n", serde_json::json!({ "ok": false, "error": error }))
}

/// A device that says yes.
pub(crate) fn willing_device(path: &Path) -> Arc<Mutex<Vec<String>>> {
    device(path, |_, stream| stream.write_all(b"{\"ok\":true}\n").unwrap())
}
