//! What the tests share: a mounted device with one tensor, and bytes seen through mappings.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use lamina::device::{Device, DeviceConfig, TensorSpec, ViewInfo};
use lamina::format::Format;
use lamina::serve::launder::LaunderWith;
use lamina::serve::{Mount, MountOptions, MountPoint};
use memmap2::MmapMut;
use tempfile::TempDir;

pub(crate) const BASE: u64 = 32 << 20;
pub(crate) const VIEWS: u64 = 64 << 20;
/// Bytes of the tensor `t`, bf16, at DPA 0: not a whole number of pages.
pub(crate) const TENSOR: usize = (4 << 20) + 6;

/// A device with a tensor, mounted.
pub(crate) struct Rig {
    pub(crate) mount: Mount,
    pub(crate) device: Arc<Device>,
    /// What the tensor holds, kept by the test.
    pub(crate) bytes: Vec<u8>,
    pub(crate) directory: TempDir,
}

impl Rig {
    pub(crate) fn new(launder_with: LaunderWith) -> Self {
        let device = Arc::new(Device::new(DeviceConfig::new(BASE, VIEWS)).unwrap());
        let bytes = noise(7, TENSOR);
        device.create_tensor(spec("t", 0, TENSOR)).unwrap();
        device.write_base(0, &bytes).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let point = MountPoint::prepare(&directory.path().join("mount")).unwrap();
        let options = MountOptions { launder_with, ..MountOptions::default() };
        let mount = Mount::new(Arc::clone(&device), point, &options).unwrap();
        Self { mount, device, bytes, directory }
    }

    pub(crate) fn base(&self) -> Window {
        Window::open(&self.mount.base_path())
    }

    pub(crate) fn views(&self) -> Window {
        Window::open(&self.mount.views_path())
    }

    /// Makes a view before anybody has read the directory.
    pub(crate) fn view(&self, spelling: &str) -> ViewInfo {
        self.device.create_view("t", spelling).unwrap()
    }

    /// What a view shows, by the reference.
    pub(crate) fn expected(&self, spelling: &str) -> Vec<u8> {
        expected(spelling, &self.bytes)
    }
}

pub(crate) fn spec(name: &str, dpa: u64, length: usize) -> TensorSpec {
    TensorSpec {
        name: name.to_owned(),
        dpa: Some(dpa),
        length: length as u64,
        elements: None,
        shape: Vec::new(),
        format: Format::Bf16,
        layout: lamina::layout::Layout::Weight,
        codec: None,
    }
}

/// A view of bf16 bytes, by the reference.
pub(crate) fn expected(spelling: &str, bytes: &[u8]) -> Vec<u8> {
    lamina_reference::view_bytes(lamina_reference::Format::Bf16, spelling, bytes, bytes.len() as u64 / 2)
        .unwrap()
}

/// A window's file, opened for reading and writing and mapped shared.
pub(crate) struct Window {
    pub(crate) file: File,
    map: MmapMut,
}

impl Window {
    pub(crate) fn open(path: &Path) -> Self {
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        // SAFETY: other threads and the kernel may change the memory; it is only touched byte by byte, volatile, below.
        let map = unsafe { MmapMut::map_mut(&file) }.unwrap();
        Self { file, map }
    }

    /// Loads bytes through the mapping.
    pub(crate) fn load(&self, at: u64, length: usize) -> Vec<u8> {
        let at = usize::try_from(at).unwrap();
        let part = &self.map[at..at + length];
        // SAFETY: inside the mapping, by the slice above.
        (0..length).map(|i| unsafe { part.as_ptr().add(i).read_volatile() }).collect()
    }

    /// Stores bytes through the mapping.
    pub(crate) fn store(&mut self, at: u64, bytes: &[u8]) {
        let at = usize::try_from(at).unwrap();
        let part = &mut self.map[at..at + bytes.len()];
        for (i, byte) in bytes.iter().enumerate() {
            // SAFETY: inside the mapping, by the slice above.
            unsafe { part.as_mut_ptr().add(i).write_volatile(*byte) };
        }
    }

    /// Writes back the stores to the mapping.
    pub(crate) fn sync(&self) {
        self.map.flush().unwrap();
    }

    /// Reads bytes by `pread`.
    pub(crate) fn read(&self, at: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.file.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }
}

/// Bytes without a pattern.
pub(crate) fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[5]
    };
    (0..length).map(|_| next()).collect()
}

/// Runs a test that must come to an end by itself.
pub(crate) fn within(seconds: u64, test: impl FnOnce() + Send + 'static) {
    let (done, ended) = mpsc::channel::<()>();
    let run = thread::spawn(move || {
        test();
        drop(done);
    });
    match ended.recv_timeout(Duration::from_secs(seconds)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("not over after {seconds} s: a deadlock"),
        _ => run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
    }
}

/// Waits until `holds`, for a bounded time.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if holds() {
            return;
        }
        thread::sleep(Duration::from_millis(5));
    }
    panic!("did not come about within 5 s: {what}");
}
