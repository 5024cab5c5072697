//! A device under load, and the plain array that it is compared with.
//!
//! * What chance decides comes from [`Dice`], so a seed says which stores, loads and pauses there
//!   are.
//! * The load goes on in two threads: one writes memory and a tensor and reads what it wrote, the
//!   other reads a tensor that nobody writes. Pages from [`HURT`] on are the fault's own.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{FallocateFlags, PosixFadviseAdvice, fallocate, posix_fadvise};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::{Value, json};

use super::Fault;
use crate::common::{Place, Rig, Run, Window, expected, lamina, noise, request};

pub(super) const PAGE_BYTES: usize = 4096;
pub(super) const PAGE: u64 = PAGE_BYTES as u64;
pub(super) const MIB: u64 = 1 << 20;
/// A tensor that nobody writes.
const STILL: u64 = 0;
/// Memory that no tensor covers, and a tensor; both are written.
pub(super) const OPEN: u64 = 2 * MIB;
pub(super) const TENSOR: u64 = 4 * MIB;
/// Pages that are damaged and poisoned.
pub(super) const HURT: u64 = 5 * MIB;
/// Behind these of them are of KV windows.
pub(super) const CACHE: u64 = HURT + MIB / 2;
/// Bytes of a window: as many tokens, with so many bf16 channels each.
pub(super) const WINDOW: u64 = 64 << 10;
pub(super) const TOKENS: usize = 8;
pub(super) const CHANNELS: usize = 4096;
/// What the array has.
pub(super) const END: u64 = 6 * MIB;
/// The page whose reads panic.
pub(super) const PANIC: u64 = 7 * MIB;
/// What is filled until there is no room; zeros otherwise.
pub(super) const FILL: u64 = 8 * MIB;
pub(super) const CAPACITY: u64 = 64 * MIB;

/// What chance decides.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    /// Less than `sides`.
    pub(super) fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % sides
    }

    pub(super) fn page(&mut self, from: u64, to: u64) -> u64 {
        from + self.roll((to - from) / PAGE) * PAGE
    }

    /// Bytes that a codec makes smaller, or not.
    pub(super) fn bytes(&mut self, length: u64) -> Vec<u8> {
        let mut bytes = noise(self.roll(u64::MAX), index(length));
        if self.roll(2) == 0 {
            for byte in &mut bytes {
                *byte &= 0x11;
            }
        }
        bytes
    }

    pub(super) fn pause(&mut self, milliseconds: u64) {
        thread::sleep(Duration::from_millis(self.roll(milliseconds)));
    }
}

pub(super) fn index(at: u64) -> usize {
    usize::try_from(at).unwrap()
}

/// A disk that is soon full.
pub(super) struct SmallDisk(PathBuf);

impl SmallDisk {
    /// `None` for users who may not mount one.
    fn new(path: PathBuf) -> Option<Self> {
        std::fs::create_dir(&path).unwrap();
        mount(Some("small"), &path, Some("tmpfs"), MsFlags::empty(), Some("size=24m")).ok()?;
        Some(Self(path))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

/// A device and the array that it is compared with.
pub(super) struct Trial {
    // In this order: the device ends before its disk goes.
    pub(super) rig: Rig,
    pub(super) disk: Option<SmallDisk>,
    pub(super) model: Vec<u8>,
    /// Where the views of `still` and `u` are.
    views: [u64; 2],
    /// Clients that went silent.
    pub(super) silent: VecDeque<UnixStream>,
    /// What went on, for whoever has to find out why it failed.
    seed: u64,
    pub(super) step: (usize, &'static str),
    /// Crashes of the host, and those that were none because the device synced for room.
    pub(super) crashes: [u32; 2],
}

impl Drop for Trial {
    fn drop(&mut self) {
        if thread::panicking() {
            let log = std::fs::read_to_string(self.rig.place.path("log")).unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            let tail = lines[lines.len().saturating_sub(40)..].join("\n");
            eprintln!("{tail}\nfailed with seed {} at step {}: {}", self.seed, self.step.0, self.step.1);
        }
    }
}

impl Trial {
    /// A device on a disk that is small, or with a store that is.
    pub(super) fn new(seed: u64, small_disk: bool) -> Self {
        let place = Place::new();
        let disk = if small_disk { SmallDisk::new(place.path("disk")) } else { None };
        if small_disk && disk.is_none() {
            lamina_skipped::part("nothing can be mounted here: no small disk, a small store instead");
        }
        let run = Self::serve(&place, disk.as_ref());
        let rig = Rig { run, place, bytes: Vec::new() };
        let mut model = vec![0; index(END)];
        let base = rig.base();
        let mut views = [0; 2];
        for ((name, dpa), view) in [("still", STILL), ("u", TENSOR)].into_iter().zip(&mut views) {
            rig.ask(
                "POST",
                "/tensors",
                &json!({ "name": name, "dpa": dpa, "length": MIB, "format": "bf16" }),
            );
            *view = rig.view_of(name, "e8m3").offset;
            let bytes = noise(seed + dpa, index(MIB));
            base.file.write_all_at(&bytes, dpa).unwrap();
            model[index(dpa)..][..bytes.len()].copy_from_slice(&bytes);
        }
        // A token is two pages, so that stored blocks have bytes of half of the pages.
        let layout = json!({ "kind": "kv", "channels": CHANNELS, "window": TOKENS });
        rig.ask(
            "POST",
            "/tensors",
            &json!({ "name": "kv", "dpa": CACHE, "length": END - CACHE, "format": "bf16", "layout": layout }),
        );
        drop(base);
        Self { rig, disk, model, views, silent: VecDeque::new(), seed, step: (0, "start"), crashes: [0; 2] }
    }

    pub(super) fn serve(place: &Place, disk: Option<&SmallDisk>) -> Run {
        let image = disk.map_or_else(|| place.path("image"), |disk| disk.0.join("image"));
        let store = if disk.is_some() { CAPACITY } else { 12 * MIB }.to_string();
        let capacity = CAPACITY.to_string();
        let sizes = ["--capacity", &capacity, "--views-capacity", "16M", "--views", ""];
        let mut command = place.serve(&sizes);
        // The fault that crashes the host has to know when the last sync was.
        command.args(["--store-capacity", &store, "--sync-seconds", "0", "--image"]).arg(image);
        command.env("LAMINA_FAULT", place.path("fault"));
        let log = File::options().create(true).append(true).open(place.path("log")).unwrap();
        Run::start_logging(&mut command, Stdio::from(log))
    }

    pub(super) fn image(&self) -> PathBuf {
        self.disk.as_ref().map_or_else(|| self.rig.place.path("image"), |disk| disk.0.join("image"))
    }

    /// Runs `lamina` with words for this device.
    pub(super) fn lamina(&self, words: &[&str]) {
        done(lamina(words).args(["--run-dir", &self.rig.place.text("run")]));
    }

    /// Asks the API until it answers, as who asks a worker that dies has to.
    pub(super) fn ask(&self, method: &str, path: &str, body: &Value) -> Value {
        let text = if body.is_null() { String::new() } else { body.to_string() };
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(60) {
            let requested =
                UnixStream::connect(self.rig.place.path("run/api.sock")).and_then(|mut stream| {
                    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
                    stream.write_all(request(method, path, &text).as_bytes())?;
                    let mut answer = String::new();
                    stream.read_to_string(&mut answer)?;
                    Ok(answer)
                });
            let answer = requested.unwrap_or_default();
            if let Some((head, body)) = answer.split_once("\r\n\r\n") {
                let status = head.split(' ').nth(1).unwrap_or_default();
                assert!(status.starts_with('2'), "{method} {path} {text}: {answer}");
                return serde_json::from_str(body).unwrap_or(Value::Null);
            }
            thread::sleep(Duration::from_millis(5));
        }
        panic!("nobody answers {method} {path}");
    }

    pub(super) fn model(&mut self, at: u64, bytes: &[u8]) {
        self.model[index(at)..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Everything that was stored reaches the device, and is read back from there.
    pub(super) fn judge(&self) {
        self.ask("POST", "/flush", &json!({ "offset": 0, "length": CAPACITY }));
        let base = File::open(self.rig.base_path()).unwrap();
        base.sync_all().unwrap();
        let what = "the base window";
        same(what, 0, &fresh(&base, 0, index(END)), &self.model);
        let views = File::open(self.rig.place.path("mount/views")).unwrap();
        for (view, at) in self.views.into_iter().zip([STILL, TENSOR]) {
            let shown = expected("e8m3", &self.model[index(at)..][..index(MIB)]);
            same("a view", at, &fresh(&views, view, index(MIB)), &shown);
        }
        let listed = self.ask("GET", "/poison", &Value::Null);
        assert_eq!(listed, json!([]), "no block is poisoned for good");
    }

    /// Deals a fault, and judges what it left.
    pub(super) fn step(&mut self, name: &'static str, fault: Fault, dice: &mut Dice) {
        self.step = (self.step.0 + 1, name);
        let seed = dice.roll(u64::MAX);
        match fault {
            Fault::Under(fault) => self.under_load(seed, |run| fault(run, dice)),
            Fault::Alone(fault) => {
                self.under_load(seed, |_| {});
                self.judge();
                fault(self, dice);
            }
        }
        self.judge();
    }

    fn under_load(&mut self, seed: u64, fault: impl FnOnce(&mut Self)) {
        let mut written = self.model[index(OPEN)..index(HURT)].to_vec();
        let still = self.model[index(STILL)..][..index(MIB)].to_vec();
        let mount = self.rig.place.path("mount");
        let views = self.views;
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let writer = scope.spawn(|| write(&mount, views[1], &mut Dice(seed), &mut written));
            let reader = scope.spawn(|| read(&mount, views[0], &still, &done));
            fault(self);
            let wrote = writer.join();
            done.store(true, Ordering::Relaxed);
            let read = reader.join();
            for ended in [wrote, read] {
                ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
        });
        self.model(OPEN, &written);
    }
}

/// A buffer for direct reads.
#[repr(align(4096))]
struct Page([u8; PAGE_BYTES]);

/// The load's stores, and reads of what was stored. `model` is of the range from [`OPEN`] to
/// [`HURT`].
fn write(mount: &Path, view: u64, dice: &mut Dice, model: &mut [u8]) {
    let mut base = Window::open(&mount.join("base"));
    // Past the page cache, which may have views of what was before.
    let direct = nix::libc::O_DIRECT;
    let views = File::options().read(true).custom_flags(direct).open(mount.join("views")).unwrap();
    for _ in 0..60 {
        let length = 1 + dice.roll(9000);
        let at = dice.roll(HURT - OPEN - length);
        let part = index(at)..index(at + length);
        match dice.roll(20) {
            0..8 => {
                model[part.clone()].copy_from_slice(&dice.bytes(length));
                base.store(OPEN + at, &model[part]);
            }
            8..13 => {
                model[part.clone()].copy_from_slice(&dice.bytes(length));
                base.file.write_all_at(&model[part], OPEN + at).unwrap();
            }
            13..17 => same("what was stored", OPEN + at, &base.read(OPEN + at, part.len()), &model[part]),
            17 => {
                let at = dice.page(0, TENSOR - OPEN);
                model[index(at)..][..index(PAGE)].fill(0);
                punch(&base.file, OPEN + at, PAGE);
            }
            18 => base.sync(),
            _ => {
                let at = dice.page(0, MIB);
                let tensor = &model[index(TENSOR - OPEN + at)..][..index(PAGE)];
                let shown = expected("e8m3", tensor);
                let mut found = Page([0; PAGE_BYTES]);
                views.read_exact_at(&mut found.0, view + at).unwrap();
                same("a view of what was stored", at, &found.0, &shown);
            }
        }
    }
    base.sync();
}

/// The load's reads of what nobody writes.
fn read(mount: &Path, view: u64, still: &[u8], done: &AtomicBool) {
    let [base, views] = ["base", "views"].map(|name| File::open(mount.join(name)).unwrap());
    let shown = expected("e8m3", still);
    while !done.load(Ordering::Relaxed) {
        for at in (0..still.len()).step_by(64 << 10) {
            let part = at..at + index(PAGE);
            same("a tensor", at as u64, &fresh(&base, STILL + at as u64, part.len()), &still[part.clone()]);
            same("its view", at as u64, &fresh(&views, view + at as u64, part.len()), &shown[part]);
        }
    }
}

/// Bytes of a file, not from the page cache if nobody else has them.
pub(super) fn fresh(file: &File, at: u64, length: usize) -> Vec<u8> {
    let (offset, bytes) = (i64::try_from(at).unwrap(), i64::try_from(length).unwrap());
    posix_fadvise(file.as_fd(), offset, bytes, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, at).unwrap();
    bytes
}

pub(super) fn same(what: &str, at: u64, found: &[u8], wanted: &[u8]) {
    let differs = found.iter().zip(wanted).position(|(found, wanted)| found != wanted);
    let differs = differs.map(|place| at + place as u64);
    assert_eq!((found.len(), differs), (wanted.len(), None), "{what}, from {at:#x} on");
}

pub(super) fn punch(file: &File, at: u64, length: u64) {
    let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(file, hole, at.cast_signed(), length.cast_signed()).unwrap();
}

pub(super) fn done(command: &mut Command) {
    let done = command.output().unwrap();
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
}
