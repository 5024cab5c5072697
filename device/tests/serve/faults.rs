//! The fault-injection run: a device under load is compared with a plain array, while one fault after another happens to it.
//!
//! * Faults are dealt like cards: all [kinds](KINDS) in an order that the seed decides, then again. So are the load's operations; only where they meet is left to the scheduler.
//! * After each fault everything is flushed and read back from the device, and every byte is what the array has. Where a fault may leave old or new bytes, as the
//!   death of everything may of blocks that were not flushed, each block is one of the two, and the array takes it over.
//! * A failure names seed and step. `LAMINA_LONG` makes it ten minutes, `LAMINA_SEED` begins with another seed.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::fcntl::{FallocateFlags, PosixFadviseAdvice, fallocate, posix_fadvise};
use nix::libc::{EIO, ENOSPC};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Whence, lseek};
use serde_json::{Value, json};

use crate::common::{Place, Rig, Run, Window, expected, lamina, noise, request, within};
use crate::deaths::{kill_worker, worker};

const PAGE_BYTES: usize = 4096;
const PAGE: u64 = PAGE_BYTES as u64;
const MIB: u64 = 1 << 20;
/// A tensor that nobody writes.
const STILL: u64 = 0;
/// Memory that no tensor covers, and a tensor; both are written.
const OPEN: u64 = 2 * MIB;
const TENSOR: u64 = 4 * MIB;
/// Pages that are damaged and poisoned.
const HURT: u64 = 5 * MIB;
/// What the array has.
const END: u64 = 6 * MIB;
/// The page whose reads panic.
const PANIC: u64 = 7 * MIB;
/// What is filled until there is no room; zeros otherwise.
const FILL: u64 = 8 * MIB;
const CAPACITY: u64 = 64 * MIB;

/// The faults. The first are struck while the load goes on.
const KINDS: [(&str, Strike); 14] = [
    ("worker killed", Strike::Under(|run, _| kill_worker(&run.rig.run))),
    ("workers killed in a row", Strike::Under(kill_several)),
    ("panic", Strike::Under(panic)),
    ("upgrade", Strike::Under(|run, _| run.lamina(&["upgrade"]))),
    ("worker stopped for a while", Strike::Under(stop)),
    ("flipped bit", Strike::Under(flip)),
    ("poison", Strike::Under(poison)),
    ("half-open clients", Strike::Under(half_open)),
    ("slow readers", Strike::Under(slow_readers)),
    ("unmapped peer", Strike::Under(unmap)),
    ("no room", Strike::Alone(fill)),
    ("no room, worker killed", Strike::Alone(fill_and_kill)),
    ("snapshot", Strike::Alone(snapshot)),
    ("everything killed", Strike::Alone(kill_everything)),
];

#[derive(Clone, Copy)]
enum Strike {
    /// While the load goes on.
    Under(fn(&mut Trial, &mut Dice)),
    /// While it does not.
    Alone(fn(&mut Trial, &mut Dice)),
}

/// What chance decides.
struct Dice(u64);

impl Dice {
    /// Less than `sides`.
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ mixed >> 31) % sides
    }

    fn page(&mut self, from: u64, to: u64) -> u64 {
        from + self.roll((to - from) / PAGE) * PAGE
    }

    /// Bytes that a codec makes smaller, or not.
    fn bytes(&mut self, length: u64) -> Vec<u8> {
        let mut bytes = noise(self.roll(u64::MAX), index(length));
        if self.roll(2) == 0 {
            for byte in &mut bytes {
                *byte &= 0x11;
            }
        }
        bytes
    }

    fn pause(&mut self, milliseconds: u64) {
        thread::sleep(Duration::from_millis(self.roll(milliseconds)));
    }
}

fn index(at: u64) -> usize {
    usize::try_from(at).unwrap()
}

/// A disk that is soon full.
struct SmallDisk(PathBuf);

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
struct Trial {
    // In this order: the device ends before its disk goes.
    rig: Rig,
    disk: Option<SmallDisk>,
    model: Vec<u8>,
    /// Where the views of `still` and `u` are.
    views: [u64; 2],
    /// Clients that went silent.
    silent: VecDeque<UnixStream>,
    /// What went on, for whoever has to find out why it failed.
    seed: u64,
    step: (usize, &'static str),
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
    fn new(seed: u64, small_disk: bool) -> Self {
        let place = Place::new();
        let disk = if small_disk { SmallDisk::new(place.path("disk")) } else { None };
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
        drop(base);
        Self { rig, disk, model, views, silent: VecDeque::new(), seed, step: (0, "start") }
    }

    fn serve(place: &Place, disk: Option<&SmallDisk>) -> Run {
        let image = disk.map_or_else(|| place.path("image"), |disk| disk.0.join("image"));
        let store = if disk.is_some() { CAPACITY } else { 12 * MIB }.to_string();
        let capacity = CAPACITY.to_string();
        let sizes = ["--capacity", &capacity, "--views-capacity", "16M", "--views", ""];
        let mut command = place.serve(&sizes);
        command.args(["--store-capacity", &store, "--image"]).arg(image);
        command.env("LAMINA_FAULT", place.path("fault"));
        let log = File::options().create(true).append(true).open(place.path("log")).unwrap();
        Run::start_logging(&mut command, Stdio::from(log))
    }

    fn image(&self) -> PathBuf {
        self.disk.as_ref().map_or_else(|| self.rig.place.path("image"), |disk| disk.0.join("image"))
    }

    /// Runs `lamina` with words for this device.
    fn lamina(&self, words: &[&str]) {
        done(lamina(words).args(["--run-dir", &self.rig.place.text("run")]));
    }

    /// Asks the API until it answers, as who asks a worker that dies has to.
    fn ask(&self, method: &str, path: &str, body: &Value) -> Value {
        let text = if body.is_null() { String::new() } else { body.to_string() };
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(60) {
            let asked = UnixStream::connect(self.rig.place.path("run/api.sock")).and_then(|mut stream| {
                stream.set_read_timeout(Some(Duration::from_secs(60)))?;
                stream.write_all(request(method, path, &text).as_bytes())?;
                let mut answer = String::new();
                stream.read_to_string(&mut answer)?;
                Ok(answer)
            });
            let answer = asked.unwrap_or_default();
            if let Some((head, body)) = answer.split_once("\r\n\r\n") {
                let status = head.split(' ').nth(1).unwrap_or_default();
                assert!(status.starts_with('2'), "{method} {path} {text}: {answer}");
                return serde_json::from_str(body).unwrap_or(Value::Null);
            }
            thread::sleep(Duration::from_millis(5));
        }
        panic!("nobody answers {method} {path}");
    }

    fn model(&mut self, at: u64, bytes: &[u8]) {
        self.model[index(at)..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Everything that was stored reaches the device, and is read back from there.
    fn judge(&self) {
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
    fn step(&mut self, name: &'static str, strike: Strike, dice: &mut Dice) {
        self.step = (self.step.0 + 1, name);
        let seed = dice.roll(u64::MAX);
        match strike {
            Strike::Under(strike) => self.under_load(seed, |run| strike(run, dice)),
            Strike::Alone(strike) => {
                self.under_load(seed, |_| {});
                self.judge();
                strike(self, dice);
            }
        }
        self.judge();
    }

    fn under_load(&mut self, seed: u64, strike: impl FnOnce(&mut Self)) {
        let mut written = self.model[index(OPEN)..index(HURT)].to_vec();
        let still = self.model[index(STILL)..][..index(MIB)].to_vec();
        let mount = self.rig.place.path("mount");
        let views = self.views;
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            let writer = scope.spawn(|| write(&mount, views[1], &mut Dice(seed), &mut written));
            let reader = scope.spawn(|| read(&mount, views[0], &still, &done));
            strike(self);
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

/// The load's stores, and reads of what was stored. `model` is of the range from [`OPEN`] to [`HURT`].
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
fn fresh(file: &File, at: u64, length: usize) -> Vec<u8> {
    let (offset, bytes) = (i64::try_from(at).unwrap(), i64::try_from(length).unwrap());
    posix_fadvise(file.as_fd(), offset, bytes, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, at).unwrap();
    bytes
}

fn same(what: &str, at: u64, found: &[u8], wanted: &[u8]) {
    let differs = found.iter().zip(wanted).position(|(found, wanted)| found != wanted);
    let differs = differs.map(|place| at + place as u64);
    assert_eq!((found.len(), differs), (wanted.len(), None), "{what}, from {at:#x} on");
}

fn punch(file: &File, at: u64, length: u64) {
    let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    fallocate(file, hole, at.cast_signed(), length.cast_signed()).unwrap();
}

fn done(command: &mut Command) {
    let done = command.output().unwrap();
    assert!(done.status.success(), "{command:?}: {}", String::from_utf8_lossy(&done.stderr));
}

fn kill_several(run: &mut Trial, dice: &mut Dice) {
    for _ in 0..2 + dice.roll(4) {
        kill_worker(&run.rig.run);
        dice.pause(40);
    }
}

/// A read that kills each worker fails in the end; then it is a read like any other.
fn panic(run: &mut Trial, _: &mut Dice) {
    let fault = run.rig.place.path("fault");
    std::fs::write(&fault, format!("read {PANIC}")).unwrap();
    let base = File::open(run.rig.base_path()).unwrap();
    let offset = i64::try_from(PANIC).unwrap();
    posix_fadvise(base.as_fd(), offset, 4096, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
    let failed = base.read_at(&mut [0; 4096], PANIC).unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(EIO));
    std::fs::remove_file(&fault).unwrap();
    assert_eq!(fresh(&base, PANIC, 4096), [0; 4096]);
}

fn stop(run: &mut Trial, dice: &mut Dice) {
    let worker = Pid::from_raw(worker(run.rig.run.child.id()));
    kill(worker, Signal::SIGSTOP).unwrap();
    thread::sleep(Duration::from_millis(10 + dice.roll(60)));
    if dice.roll(2) == 0 {
        kill(worker, Signal::SIGKILL).unwrap();
    } else {
        kill(worker, Signal::SIGCONT).unwrap();
    }
}

/// A bit of a stored block flips: the block reads as poison, is listed, and is whole when it was written again.
fn flip(run: &mut Trial, dice: &mut Dice) {
    let at = dice.page(HURT, END);
    let bytes = noise(dice.roll(u64::MAX), index(PAGE));
    let base = File::options().read(true).write(true).open(run.rig.base_path()).unwrap();
    base.write_all_at(&bytes, at).unwrap();
    let (byte, bit) = (index(dice.roll(PAGE)), dice.roll(8));
    let image = File::options().read(true).write(true).open(run.image()).unwrap();
    let places = find(&image, &bytes);
    assert!(!places.is_empty(), "noise is stored as it is");
    for place in places {
        let place = place + byte as u64;
        image.write_all_at(&[bytes[byte] ^ 1 << bit], place).unwrap();
    }
    hurt(run, dice, &base, at);
}

/// Where these bytes are in an image: where they are stored, and maybe where they were.
fn find(image: &File, bytes: &[u8]) -> Vec<u64> {
    const GRANULE: usize = 64;
    let mut found = Vec::new();
    let mut at = 0;
    while let Ok(data) = lseek(image.as_fd(), at, Whence::SeekData) {
        let hole = lseek(image.as_fd(), data, Whence::SeekHole).unwrap();
        let mut extent = vec![0; usize::try_from(hole - data).unwrap()];
        image.read_exact_at(&mut extent, data.unsigned_abs()).unwrap();
        let starts = (0..extent.len().saturating_sub(bytes.len() - 1)).step_by(GRANULE);
        let holds = starts.filter(|start| extent[*start..].starts_with(bytes));
        found.extend(holds.map(|start| data.unsigned_abs() + start as u64));
        at = hole;
    }
    found
}

fn poison(run: &mut Trial, dice: &mut Dice) {
    let at = dice.page(HURT, END);
    let base = File::options().read(true).write(true).open(run.rig.base_path()).unwrap();
    run.ask("POST", "/poison/inject", &json!({ "offset": at, "length": PAGE }));
    hurt(run, dice, &base, at);
}

/// A page reads as poison until it is cleared or written.
fn hurt(run: &mut Trial, dice: &mut Dice, base: &File, at: u64) {
    same("a poisoned block", at, &fresh(base, at, index(PAGE)), &[0xff; PAGE_BYTES]);
    let listed = run.ask("GET", "/poison", &Value::Null);
    assert!(listed.as_array().unwrap().iter().any(|block| block["dpa"] == at), "{listed}");
    let mut bytes = vec![0; index(PAGE)];
    if dice.roll(2) == 0 {
        bytes = dice.bytes(PAGE);
        base.write_all_at(&bytes, at).unwrap();
    } else {
        run.ask("POST", "/poison/clear", &json!({ "offset": at, "length": PAGE }));
    }
    run.model(at, &bytes);
}

/// Clients that begin a request and never end it, or do not take the answer.
fn half_open(run: &mut Trial, dice: &mut Dice) {
    for _ in 0..10 {
        // A worker that is starting does not refuse them: the holder listens.
        let mut client = UnixStream::connect(run.rig.place.path("run/api.sock")).unwrap();
        let head = request("GET", "/stats", "");
        let sent = index(dice.roll(head.len() as u64 + 1));
        let _ = client.write_all(&head.as_bytes()[..sent]);
        if dice.roll(2) == 0 {
            let _ = client.shutdown(Shutdown::Write);
        }
        run.silent.push_back(client);
    }
    while run.silent.len() > 30 {
        run.silent.pop_front();
    }
    run.ask("GET", "/stats", &Value::Null);
}

/// Clients that take an answer a few bytes at a time.
fn slow_readers(run: &mut Trial, dice: &mut Dice) {
    let clients = (0..4).map(|_| {
        let mut client = UnixStream::connect(run.rig.place.path("run/api.sock")).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let _ = client.write_all(request("GET", "/metrics", "").as_bytes());
        client
    });
    for mut client in clients.collect::<Vec<_>>() {
        for _ in 0..dice.roll(20) {
            let _ = client.read(&mut [0; 7]);
        }
        dice.pause(3);
        run.silent.push_back(client);
    }
}

/// Somebody stores through a mapping and goes away without a word.
fn unmap(run: &mut Trial, dice: &mut Dice) {
    let at = dice.page(HURT, END);
    let bytes = dice.bytes(PAGE);
    let mut window = Window::open(&run.rig.base_path());
    window.store(at, &bytes);
    drop(window);
    run.model(at, &bytes);
}

/// Writes until there is no room; then everything is as it was, and there is room again.
fn fill(run: &mut Trial, dice: &mut Dice) {
    until_full(run, dice);
    run.judge();
    make_room(run);
}

fn fill_and_kill(run: &mut Trial, dice: &mut Dice) {
    until_full(run, dice);
    kill_several(run, dice);
    run.judge();
    make_room(run);
}

fn until_full(run: &Trial, dice: &mut Dice) {
    let base = File::options().write(true).open(run.rig.base_path()).unwrap();
    let step = 64 << 10;
    let refused = (FILL..CAPACITY).step_by(step).find_map(|at| {
        let bytes = noise(dice.roll(u64::MAX), step);
        base.write_all_at(&bytes, at).err()
    });
    assert_eq!(refused.expect("more than there is room for").raw_os_error(), Some(ENOSPC));
}

fn make_room(run: &Trial) {
    let base = File::options().read(true).write(true).open(run.rig.base_path()).unwrap();
    punch(&base, FILL, CAPACITY - FILL);
    assert!(fresh(&base, FILL, index(2 * MIB)).iter().all(|byte| *byte == 0));
}

/// A snapshot is another device with the same bytes.
fn snapshot(run: &mut Trial, _: &mut Dice) {
    let other = Place::new();
    let (file, image) = (other.text("snapshot"), other.text("image"));
    run.lamina(&["snapshot", "save", &file]);
    done(&mut lamina(&["snapshot", "restore", &file, &image]));
    let restored = Run::start(&mut other.serve(&["--image", &image]));
    let base = File::open(other.path("mount/base")).unwrap();
    same("the restored base window", 0, &fresh(&base, 0, index(END)), &run.model);
    drop((base, restored));
}

/// Holder and worker are killed while pages are stored into and written. Each block that was not flushed is old or new.
fn kill_everything(run: &mut Trial, dice: &mut Dice) {
    let mut pages: Vec<_> = (OPEN..TENSOR).step_by(index(PAGE)).collect();
    for place in 0..64 {
        let other = place + index(dice.roll((pages.len() - place) as u64));
        pages.swap(place, other);
    }
    // Stores of one word are not torn, neither by the processor nor by write-back.
    let mut window = Window::open(&run.rig.base_path());
    let mut news: Vec<(u64, Vec<u8>)> = Vec::new();
    for page in &pages[..16] {
        let mut new = run.model[index(*page)..][..index(PAGE)].to_vec();
        let word = index(dice.roll(PAGE / 8)) * 8;
        new[word] ^= 1;
        window.store(page + word as u64, &new[word..=word]);
        news.push((*page, new));
    }
    news.extend(pages[16..64].iter().map(|page| (*page, dice.bytes(PAGE))));
    let base = File::options().write(true).open(run.rig.base_path()).unwrap();
    let writes = news[16..].to_vec();
    let writer = thread::spawn(move || {
        // What fails was not flushed.
        writes.iter().take_while(|(at, bytes)| base.write_all_at(bytes, *at).is_ok()).count()
    });
    dice.pause(5);
    let worker = worker(run.rig.run.child.id());
    run.rig.run.signal(Signal::SIGKILL);
    let _ = kill(Pid::from_raw(worker), Signal::SIGKILL);
    run.silent.clear();
    Place::let_go(&run.image());
    // Whoever still waits for the old mount is let go by who takes its place.
    run.rig.run = Trial::serve(&run.rig.place, run.disk.as_ref());
    drop(window);
    writer.join().unwrap();
    let base = File::open(run.rig.base_path()).unwrap();
    for (at, new) in news {
        let found = fresh(&base, at, index(PAGE));
        if found != run.model[index(at)..][..index(PAGE)] {
            same("a block that is not the old one", at, &found, &new);
            run.model(at, &new);
        }
    }
}

/// Deals faults for a time, and each kind once at least: how often each was dealt.
fn run(seed: u64, time: Duration) -> [u32; KINDS.len()] {
    let begun = Instant::now();
    let mut run = Trial::new(seed, seed.is_multiple_of(2));
    let mut dice = Dice(seed);
    let mut dealt = [0; KINDS.len()];
    while dealt[0] == 0 || begun.elapsed() < time {
        let mut deck: Vec<_> = (0..KINDS.len()).collect();
        for place in 0..deck.len() {
            let other = place + index(dice.roll((deck.len() - place) as u64));
            deck.swap(place, other);
        }
        for kind in deck {
            let (name, strike) = KINDS[kind];
            run.step(name, strike, &mut dice);
            dealt[kind] += 1;
        }
    }
    let small = if run.disk.is_some() { "a small disk" } else { "a small store" };
    println!("seed {seed}, {small}: {} faults in {:?}", run.step.0, begun.elapsed());
    dealt
}

#[test]
fn no_fault_changes_a_byte() {
    let long = std::env::var_os("LAMINA_LONG").is_some();
    let seed = std::env::var("LAMINA_SEED").map_or(1, |seed| seed.parse().expect("a number"));
    let (runs, time) = if long { (10, 60) } else { (2, 3) };
    within(if long { 3600 } else { 300 }, move || {
        let mut all = [0; KINDS.len()];
        for seed in seed..seed + runs {
            let dealt = run(seed, Duration::from_secs(time));
            all.iter_mut().zip(dealt).for_each(|(all, dealt)| *all += dealt);
        }
        let dealt: Vec<_> =
            KINDS.iter().zip(all).map(|((name, _), count)| format!("{count} × {name}")).collect();
        println!("{}", dealt.join(", "));
    });
}
