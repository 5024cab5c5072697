//! What happens to the device: each function injects one fault, and leaves a device that is whole
//! again and an array that says what it holds.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::libc::{EIO, ENOSPC};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Whence, lseek};
use serde_json::{Value, json};

use super::trial::{
    CACHE, CAPACITY, CHANNELS, Dice, END, FILL, HURT, MIB, OPEN, PAGE, PAGE_BYTES, PANIC, TENSOR, TOKENS,
    Trial, WINDOW,
};
use super::trial::{done, fresh, index, punch, same};
use crate::common::{Place, Run, Window, lamina, noise, request};
use crate::deaths::{kill_worker, worker};

pub(super) fn kill_several(run: &mut Trial, dice: &mut Dice) {
    for _ in 0..2 + dice.roll(4) {
        kill_worker(&run.rig.run);
        dice.pause(40);
    }
}

/// A read that kills each worker fails in the end; then it is a read like any other.
pub(super) fn panic(run: &mut Trial, _: &mut Dice) {
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

pub(super) fn stop(run: &mut Trial, dice: &mut Dice) {
    let worker = Pid::from_raw(worker(run.rig.run.child.id()));
    kill(worker, Signal::SIGSTOP).unwrap();
    thread::sleep(Duration::from_millis(10 + dice.roll(60)));
    if dice.roll(2) == 0 {
        kill(worker, Signal::SIGKILL).unwrap();
    } else {
        kill(worker, Signal::SIGCONT).unwrap();
    }
}

/// A bit of a stored block flips: the block reads as poison, is listed, and is whole when it was
/// written again.
pub(super) fn flip(run: &mut Trial, dice: &mut Dice) {
    if dice.roll(2) == 0 {
        return flip_in_window(run, dice);
    }
    let at = dice.page(HURT, CACHE);
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

/// A bit of a stored block of a KV window flips: pages that have bytes in it read as poison and are
/// listed, the others are as they were.
fn flip_in_window(run: &mut Trial, dice: &mut Dice) {
    let at = CACHE + dice.roll((END - CACHE) / WINDOW) * WINDOW;
    let mut bytes = noise(dice.roll(u64::MAX), index(WINDOW));
    if dice.roll(3) > 0 {
        // Exponents that a channel's tokens have in common: coded channel by channel.
        for (place, element) in bytes.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            element[1] = 0x30 | u8::try_from(place % CHANNELS % 13).unwrap();
        }
    }
    let base = File::options().read(true).write(true).open(run.rig.base_path()).unwrap();
    base.write_all_at(&bytes, at).unwrap();
    base.sync_all().unwrap();
    run.ask("POST", "/flush", &json!({ "offset": at, "length": WINDOW }));
    run.model(at, &bytes);
    let image = File::options().read(true).write(true).open(run.image()).unwrap();
    let elements: Vec<u8> = bytes.chunks(2).map(|element| element[0] & 1).collect();
    let by_channel = (0..elements.len()).map(|place| elements[place % TOKENS * CHANNELS + place / TOKENS]);
    let by_channel: Vec<u8> = by_channel.collect();
    // The lowest plane of a block, which is noise and so stored as it is: in the one order or in
    // the other.
    let stored = index(dice.roll(WINDOW / PAGE));
    let plane = |elements: &[u8]| -> Vec<u8> {
        let block = &elements[stored * PAGE_BYTES / 2..(stored + 1) * PAGE_BYTES / 2];
        block.chunks(8).map(|bits| bits.iter().rev().fold(0, |byte, bit| byte << 1 | bit)).collect()
    };
    let (mut transformed, mut places) = (true, find_anywhere(&image, &plane(&by_channel)));
    if places.is_empty() {
        (transformed, places) = (false, find_anywhere(&image, &plane(&elements)));
    }
    assert!(!places.is_empty(), "noise is stored as it is");
    for place in places {
        let mut byte = [0];
        image.read_exact_at(&mut byte, place + 9).unwrap();
        image.write_all_at(&[byte[0] ^ 1 << dice.roll(8)], place + 9).unwrap();
    }
    let pages = index(WINDOW / PAGE);
    let is_lost = |page: &usize| match transformed {
        // Who reads the first stored block learns which rows repeat.
        true if stored == 0 => true,
        // A page has the lower half of the channels, or the upper.
        true => page % 2 == stored / (pages / 2),
        false => *page == stored,
    };
    let lost: Vec<u64> = (0..pages).filter(is_lost).map(|page| at + page as u64 * PAGE).collect();
    for page in &lost {
        run.model(*page, &[0xff; PAGE_BYTES]);
    }
    let wanted = run.model[index(at)..][..index(WINDOW)].to_vec();
    // Any page of it finds the damage, also one that is not lost.
    let first = dice.page(at, at + WINDOW);
    same("a page", first, &fresh(&base, first, PAGE_BYTES), &wanted[index(first - at)..][..PAGE_BYTES]);
    same("a damaged window", at, &fresh(&base, at, index(WINDOW)), &wanted);
    let listed = run.ask("GET", "/poison", &Value::Null);
    let listed: Vec<_> =
        listed.as_array().unwrap().iter().map(|block| block["dpa"].as_u64().unwrap()).collect();
    assert_eq!(listed, lost);
    // A page that is healthy, or lost, is written: the others stay as they are.
    let page = dice.page(at, at + WINDOW);
    let bytes = dice.bytes(PAGE);
    base.write_all_at(&bytes, page).unwrap();
    run.model(page, &bytes);
    base.sync_all().unwrap();
    if dice.roll(2) == 0 {
        run.ask("POST", "/flush", &json!({ "offset": at, "length": WINDOW }));
    }
    if dice.roll(3) == 0 {
        kill_worker(&run.rig.run);
    }
    same(
        "a window written to",
        at,
        &fresh(&base, at, index(WINDOW)),
        &run.model[index(at)..][..index(WINDOW)],
    );
    for page in lost.into_iter().filter(|lost| *lost != page) {
        hurt(run, dice, &base, page);
    }
}

/// Where these bytes are in an image, at whichever place.
fn find_anywhere(image: &File, bytes: &[u8]) -> Vec<u64> {
    let first = u64::from_le_bytes(*bytes.first_chunk().unwrap());
    let mut found = Vec::new();
    let mut at = 0;
    while let Ok(data) = lseek(image.as_fd(), at, Whence::SeekData) {
        let hole = lseek(image.as_fd(), data, Whence::SeekHole).unwrap();
        let mut extent = vec![0; usize::try_from(hole - data).unwrap()];
        image.read_exact_at(&mut extent, data.unsigned_abs()).unwrap();
        let starts = extent
            .windows(8)
            .enumerate()
            .filter(|(_, window)| u64::from_le_bytes(*window.first_chunk().unwrap()) == first);
        let holds = starts.filter(|(start, _)| extent[*start..].starts_with(bytes));
        found.extend(holds.map(|(start, _)| data.unsigned_abs() + start as u64));
        at = hole;
    }
    found
}

pub(super) fn poison(run: &mut Trial, dice: &mut Dice) {
    let at = dice.page(HURT, END);
    let base = File::options().read(true).write(true).open(run.rig.base_path()).unwrap();
    run.ask("POST", "/poison/inject", &json!({ "offset": at, "length": PAGE }));
    hurt(run, dice, &base, at);
}

/// A page reads as poison until it is cleared or written, and no other with it.
fn hurt(run: &mut Trial, dice: &mut Dice, base: &File, at: u64) {
    run.model(at, &[0xff; PAGE_BYTES]);
    same("what is around it", HURT, &fresh(base, HURT, index(END - HURT)), &run.model[index(HURT)..]);
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
pub(super) fn half_open(run: &mut Trial, dice: &mut Dice) {
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
pub(super) fn slow_readers(run: &mut Trial, dice: &mut Dice) {
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
pub(super) fn unmap(run: &mut Trial, dice: &mut Dice) {
    let at = dice.page(HURT, END);
    let bytes = dice.bytes(PAGE);
    let mut window = Window::open(&run.rig.base_path());
    window.store(at, &bytes);
    drop(window);
    run.model(at, &bytes);
}

/// Writes until there is no room; then everything is as it was, and there is room again.
pub(super) fn fill(run: &mut Trial, dice: &mut Dice) {
    until_full(run, dice);
    run.judge();
    make_room(run);
}

pub(super) fn fill_and_kill(run: &mut Trial, dice: &mut Dice) {
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
pub(super) fn snapshot(run: &mut Trial, _: &mut Dice) {
    let other = Place::new();
    let (file, image) = (other.text("snapshot"), other.text("image"));
    run.lamina(&["snapshot", "save", &file]);
    done(&mut lamina(&["snapshot", "restore", &file, &image]));
    let restored = Run::start(&mut other.serve(&["--image", &image]));
    let base = File::open(other.path("mount/base")).unwrap();
    same("the restored base window", 0, &fresh(&base, 0, index(END)), &run.model);
    drop((base, restored));
}

/// The host crashes: everything is killed, and of each page of the image that changed since the
/// last sync chance says which version is on the disk. The device is then as it was at the last
/// sync, which here is the last clean stop.
pub(super) fn crash_host(run: &mut Trial, dice: &mut Dice) {
    if run.disk.is_some() {
        // A tmpfs does not outlive its host.
        return kill_everything(run, dice);
    }
    // A clean stop is a sync, of all that the array has.
    run.rig.run.signal(Signal::SIGTERM);
    run.silent.clear();
    assert!(run.rig.run.child.wait().unwrap().success());
    Place::let_go(&run.image());
    let synced = changed(&run.image(), &BTreeMap::new());
    run.rig.run = Trial::serve(&run.rig.place, None);
    let syncs = |run: &Trial| run.ask("GET", "/stats", &Value::Null)["device"]["syncs"].as_u64().unwrap();
    let before = syncs(run);
    let mut versions = Vec::new();
    let base = File::options().write(true).open(run.rig.base_path()).unwrap();
    for _ in 0..2 {
        for _ in 0..40 {
            // Over what was synced, and where its segments were freed.
            let at = dice.page(OPEN, HURT);
            base.write_all_at(&dice.bytes(PAGE), at).unwrap();
            if dice.roll(4) == 0 {
                punch(&base, dice.page(OPEN, HURT), PAGE);
            }
        }
        base.sync_all().unwrap();
        run.ask("POST", "/flush", &json!({ "offset": 0, "length": CAPACITY }));
        versions.push(changed(&run.image(), &synced));
    }
    drop(base);
    let is_synced = syncs(run) != before;
    let worker = worker(run.rig.run.child.id());
    run.rig.run.signal(Signal::SIGKILL);
    let _ = kill(Pid::from_raw(worker), Signal::SIGKILL);
    let _ = run.rig.run.child.wait();
    Place::let_go(&run.image());
    versions.push(changed(&run.image(), &synced));
    if is_synced {
        // For lack of room the device synced in between, and the array does not know what it was
        // then. Everything goes back to the clean stop.
        for (page, bytes) in versions.iter_mut().flatten() {
            *bytes = synced.get(page).cloned().unwrap_or_else(|| vec![0; PAGE_BYTES]);
        }
    }
    run.crashes[usize::from(is_synced)] += 1;
    let image = File::options().write(true).open(run.image()).unwrap();
    let pages: BTreeSet<u64> = versions.iter().flat_map(BTreeMap::keys).copied().collect();
    assert!(pages.len() > 40, "{} pages changed", pages.len());
    let zeros = vec![0; PAGE_BYTES];
    for page in pages {
        let which = index(dice.roll(versions.len() as u64 + 1));
        // One that has not changed in a version is in it what was synced.
        let version = versions.get(which).and_then(|version| version.get(&page));
        let bytes = version.or(synced.get(&page)).unwrap_or(&zeros);
        image.write_all_at(bytes, page * PAGE).unwrap();
    }
    if !is_synced {
        // The state, at whose end is the boot: this is another one.
        image.write_all_at(&[0; 64], 8 << 10).unwrap();
    }
    drop(image);
    run.rig.run = Trial::serve(&run.rig.place, None);
    if is_synced {
        return;
    }
    let log = std::fs::read_to_string(run.rig.place.path("log")).unwrap();
    assert!(log.contains("as it was at the last sync"), "the crash was not noticed");
}

/// Pages of a file that are not what they were, by number.
fn changed(file: &Path, before: &BTreeMap<u64, Vec<u8>>) -> BTreeMap<u64, Vec<u8>> {
    let file = File::open(file).unwrap();
    let mut found = BTreeMap::new();
    let mut at = 0;
    while let Ok(data) = lseek(file.as_fd(), at, Whence::SeekData) {
        at = lseek(file.as_fd(), data, Whence::SeekHole).unwrap();
        for page in data.unsigned_abs() / PAGE..at.unsigned_abs().div_ceil(PAGE) {
            let mut bytes = vec![0; PAGE_BYTES];
            file.read_exact_at(&mut bytes, page * PAGE).unwrap();
            if before.get(&page) != Some(&bytes) {
                found.insert(page, bytes);
            }
        }
    }
    let gone = before.keys().filter(|page| {
        let at = (**page * PAGE).cast_signed();
        !lseek(file.as_fd(), at, Whence::SeekData).is_ok_and(|data| data == at)
    });
    let gone: Vec<_> = gone.copied().collect();
    found.extend(gone.into_iter().map(|page| (page, vec![0; PAGE_BYTES])));
    found
}

/// Holder and worker are killed while pages are stored into and written. Each block that was not
/// flushed is old or new.
pub(super) fn kill_everything(run: &mut Trial, dice: &mut Dice) {
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
