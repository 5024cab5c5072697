use std::cell::Cell;
use std::collections::VecDeque;
use std::process::Command;

use super::*;

#[path = "../../line-recorder/cache.rs"]
mod cache;
#[path = "../../line-recorder/decode.rs"]
mod decode;
#[path = "../../line-recorder/pages.rs"]
#[expect(clippy::cast_possible_truncation, reason = "of a number's lowest bits")]
mod pages;
#[path = "../../line-recorder/processor.rs"]
#[expect(clippy::cast_possible_truncation, reason = "of numbers of sets")]
mod processor;
#[path = "../../line-recorder/refusal.rs"]
mod refusal;
#[path = "../../line-recorder/ring.rs"]
#[expect(clippy::cast_possible_truncation, reason = "of a number's lowest bits")]
mod ring;

use self::processor::Processor;
use self::ring::Ring;

fn lines(processors: u32, cache_bytes: usize) -> (tempfile::TempDir, Lines) {
    let folder = tempfile::tempdir().unwrap();
    let lines = Lines::new(folder.path(), folder.path(), processors, cache_bytes).unwrap();
    lines.word(header::TICKS_A_SECOND).store(2_000_000_000, Ordering::Relaxed);
    lines.word(header::FIRST_TICK).store(100, Ordering::Relaxed);
    (folder, lines)
}

/// The ring of a processor, as the recorder has it.
fn ring(lines: &Lines, processor: usize) -> Ring {
    // SAFETY: it is that part, and the tests keep `lines` for longer.
    unsafe { Ring::new(lines.of(processor, 0).as_ptr(), WORDS as u64) }
}

/// What the recorder does with a record.
fn push(ring: &mut Ring, what: u64, tick: u64) {
    // SAFETY: it has a part.
    unsafe { ring.push(what, || tick) };
}

fn taken(lines: &Lines) -> Vec<Line> {
    let mut taken = Vec::new();
    lines.take(&mut taken);
    taken
}

/// A file system of 1 MiB, where this user may mount one.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mount =
            Command::new("mount").args(["-t", "tmpfs", "-o", "size=1m", "tmpfs"]).arg(folder.path()).output();
        mount.is_ok_and(|mount| mount.status.success()).then(|| Self(folder))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let done = Command::new("umount").arg("-l").arg(self.0.path()).status();
        if !std::thread::panicking() {
            assert!(done.unwrap().success());
        }
    }
}

#[test]
fn a_disk_without_room_for_the_rings_is_an_error_and_no_signal() {
    let Some(disk) = SmallDisk::new() else {
        return lamina_skipped::test("nothing can be mounted here");
    };
    let cache = tempfile::tempdir().unwrap();
    match Lines::new(disk.0.path(), cache.path(), 2, 0) {
        Err(LinesError::File { path, error }) => {
            assert_eq!((path, error.kind()), (disk.0.path().join("lines"), io::ErrorKind::StorageFull));
        }
        made => panic!("{made:?}"),
    }
}

#[test]
fn a_guest_that_may_have_more_processors_than_the_file_has_parts_is_refused() {
    for (most, parts) in [(1, 1), (2, 2), (2, 4), (256, 256)] {
        assert!(refusal::of_processors(most, parts).is_none(), "{most} of {parts}");
    }
    for (most, parts) in [(4, 2), (257, 256), (u64::MAX, 1)] {
        let why = refusal::of_processors(most, parts).unwrap();
        let said = std::str::from_utf8(why.bytes()).unwrap();
        let expected = format!(
            "lamina: lines are recorded of {parts} processors, and the guest may have {most}: give --cpus {most}\n"
        );
        assert_eq!(said, expected);
    }
}

#[test]
fn records_of_all_processors_come_in_the_order_of_time_and_once() {
    let (_folder, lines) = lines(2, 0);
    let [mut first, mut second] = [0, 1].map(|processor| ring(&lines, processor));
    push(&mut first, 3 << SIZE_SHIFT | 0x1_0000_0008, 300);
    push(&mut second, ADDRESS, 500);
    let line = |time_ns, address, bytes, write, processor| Line { time_ns, address, bytes, write, processor };
    assert_eq!(taken(&lines), [line(100, 0x1_0000_0008, 8, false, 0), line(200, ADDRESS, 1, false, 1)]);
    push(&mut first, WRITE | 6 << SIZE_SHIFT | 0x2_0000_0040, 900);
    assert_eq!(taken(&lines), [line(400, 0x2_0000_0040, 64, true, 0)]);
    assert_eq!(taken(&lines), []);
}

#[test]
fn records_between_two_looks_at_the_clock_are_spread_evenly() {
    let (_folder, lines) = lines(1, 0);
    let mut ring = ring(&lines, 0);
    let asked = Cell::new(0);
    for number in 0..10 {
        // SAFETY: it has a part.
        unsafe {
            ring.push(number, || {
                asked.set(asked.get() + 1);
                100 + 1400 * number
            });
        }
    }
    // The first seven are of the group that began at 0 and ended when the next one began.
    let times = taken(&lines).iter().map(|line| line.time_ns).collect::<Vec<_>>();
    assert_eq!(times, [0, 700, 1400, 2100, 2800, 3500, 4200, 4900, 4900, 4900]);
    assert_eq!(asked.get(), 2);
    // What comes after a taking has a time of its own, however late that is.
    push(&mut ring, 10, 2_000_000_100);
    assert_eq!(taken(&lines)[0].time_ns, 1_000_000_000);
}

#[test]
fn a_ring_begins_anew_behind_its_end_and_what_finds_no_room_is_counted() {
    let (_folder, lines) = lines(1, 0);
    let mut ring = ring(&lines, 0);
    let room = (WORDS / GROUP * (GROUP - 1)) as u64;
    for number in 0..room + 5 {
        push(&mut ring, number, number);
    }
    let mut got = Vec::new();
    assert!(lines.take(&mut got), "who takes a full ring is told not to wait");
    assert!(!lines.take(&mut got));
    assert_eq!((got.len() as u64, lines.lost()), (room, 5));
    assert!(got.iter().zip(0..).all(|(line, number)| line.address == number));
    // There is room again, in the middle of groups as well.
    let (mut next, mut expected) = (0, 0);
    for most in (1..3000).cycle().take(3000) {
        for _ in 0..most {
            push(&mut ring, next, next);
            next += 1;
        }
        for line in taken(&lines) {
            assert_eq!(line.address, expected);
            expected += 1;
        }
    }
    assert_eq!((next, lines.lost()), (expected, 5));
    assert!(next > 2 * room, "{next}");
}

#[test]
fn a_head_that_cannot_be_gives_no_more_than_a_ring() {
    let (_folder, lines) = lines(1, 0);
    for slot in 0..WORDS {
        lines.of(0, PAGE / 8 + slot).store(u64::MAX, Ordering::Relaxed);
    }
    for head in [u64::MAX, 7, 0] {
        lines.of(0, counter::HEAD).store(head, Ordering::Relaxed);
        let got = taken(&lines).len();
        assert!(got <= WORDS, "{got}");
    }
}

/// The modelled caches of all sets, slowly: the lines of a set, the newest first, and whether each
/// is written.
struct Reference {
    sets: Vec<VecDeque<(u64, bool)>>,
    told: Vec<(u64, bool)>,
}

impl Reference {
    fn touch(&mut self, line: u64, write: bool) {
        let number = line / 64 + 1;
        let sets = self.sets.len() as u64;
        let set = &mut self.sets[usize::try_from((number ^ number >> 16) % sets).unwrap()];
        let found = set.iter().position(|(held, _)| *held == line);
        let held = found.and_then(|at| set.remove(at));
        if held.is_none() {
            self.told.push((line, false));
        }
        set.push_front((line, write || held.is_some_and(|(_, written)| written)));
        if set.len() > WAYS {
            let (gone, written) = set.pop_back().unwrap();
            if written {
                self.told.push((gone, true));
            }
        }
    }
}

/// Accesses of the tests: the logarithm of the bytes, and whether it is a store.
fn kind(access: u32) -> (u32, bool) {
    (access & 15, access & 16 != 0)
}

#[test]
fn what_goes_through_the_cache_is_what_a_slow_one_lets_through() {
    for (sets, pages) in [(1, 2), (2, 3), (8, 16), (64, 40)] {
        let (_folder, lines) = lines(1, sets * WAYS * LINE);
        let mut processor = Processor::new();
        assert!(!processor.has_part());
        // SAFETY: it is that part.
        unsafe { processor.take_part(lines.of(0, 0).as_ptr(), WORDS as u64, sets as u64) };
        processor.forget();
        let mut reference = Reference { sets: vec![VecDeque::new(); sets], told: Vec::new() };
        let mut state = sets as u64;
        let mut below = |most: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % most
        };
        let mut skipped = 0;
        for _ in 0..3000 {
            // Two streams that go on for a while, as those of a loop, by accesses of some kinds.
            let streams = [0, 1].map(|_| (below(pages) << 12 | below(4096), below(7), below(32)));
            for step in 0..below(40) {
                for (from, log, kinds) in streams {
                    let access = u32::try_from(log | (kinds & 1) << 4).unwrap();
                    let at = (from + (step << (kinds >> 1 & 7))) % (pages << 12);
                    // Each page of the windows is seen at two places.
                    let (guest, place) = (at | (kinds & 2) << 40, 0x1_0000_0000 + (at & !4095));
                    let (last, address) = (at + (1 << log) - 1, 0x1_0000_0000 + at);
                    reference.touch(address & !63, kinds & 1 == 1);
                    if last / 64 != at / 64 && last / 4096 == at / 4096 {
                        reference.touch(0x1_0000_0000 + (last & !63), kinds & 1 == 1);
                    }
                    if processor.is_again(access, guest) {
                        skipped += 1;
                    } else {
                        // SAFETY: it has a part.
                        unsafe { processor.touch(access, guest, place, kind, || 0) };
                    }
                }
            }
            if below(10) == 0 {
                processor.forget();
            }
            let got = taken(&lines).iter().map(|line| (line.address, line.write)).collect::<Vec<_>>();
            assert_eq!(got, std::mem::take(&mut reference.told));
        }
        assert!(skipped > 100, "{skipped}");
        let mut unwritten = lines.unwritten();
        let held = reference.sets.into_iter().flatten().filter(|(_, written)| *written);
        let mut expected = held.map(|(line, _)| (0, line)).collect::<Vec<_>>();
        unwritten.sort_unstable();
        expected.sort_unstable();
        assert_eq!(unwritten, expected);
    }
}

#[test]
fn the_cache_s_written_lines_are_told() {
    let (_folder, lines) = lines(2, 4096);
    assert_eq!(lines.sets, 8);
    lines.of(1, cache_word(WORDS) + 3).store(0x1040 | DIRTY, Ordering::Relaxed);
    lines.of(1, cache_word(WORDS) + 4).store(0x2040, Ordering::Relaxed);
    assert_eq!(lines.unwritten(), [(1, 0x1000)]);
}

#[test]
fn a_cache_that_is_not_modelled_is_refused_with_its_bounds() {
    let folder = tempfile::tempdir().unwrap();
    for bytes in [64, 3 << 20, 128 << 20] {
        let why = Lines::new(folder.path(), folder.path(), 1, bytes).unwrap_err().to_string();
        assert!(why.contains(&bytes.to_string()) && why.contains("512 to 67108864"), "{why}");
    }
    let nowhere = folder.path().join("none");
    assert!(matches!(Lines::new(&nowhere, folder.path(), 1, 0), Err(LinesError::File { .. })));
}

#[test]
fn paths_are_told_to_qemu_as_it_takes_them() {
    let folder = tempfile::Builder::new().prefix("a,b").tempdir().unwrap();
    let lines = Lines::new(folder.path(), folder.path(), 1, 0).unwrap();
    let [option, value] = lines.args();
    assert_eq!(option, "-plugin");
    assert!(value.contains("a,,b") && value.contains(",ring="), "{value}");
}

#[test]
fn instructions_that_change_mappings_are_known_and_others_are_not() {
    let changes: [&[u8]; 9] = [
        &[0x0f, 0x22, 0xd8],             // mov cr3, rax
        &[0x41, 0x0f, 0x22, 0xe0],       // mov cr4, r8
        &[0x0f, 0x01, 0x38],             // invlpg [rax]
        &[0x67, 0x0f, 0x01, 0x7b, 0x10], // invlpg [ebx+16]
        &[0x66, 0x0f, 0x38, 0x82, 0x08], // invpcid rcx, [rax]
        &[0x0f, 0xaa],                   // rsm
        &[0x0f, 0x01, 0xd8],             // vmrun
        &[0x0f, 0x01, 0xc2],             // vmlaunch
        &[0x0f, 0x01, 0x30],             // lmsw [rax]
    ];
    for code in changes {
        assert!(decode::changes_mappings(code), "{code:x?}");
    }
    let others: [&[u8]; 9] = [
        &[],
        &[0x0f],
        &[0x66],
        &[0x48, 0x8b, 0x00],       // mov rax, [rax]
        &[0x0f, 0x20, 0xd8],       // mov rax, cr3
        &[0x0f, 0x01, 0xf8],       // swapgs
        &[0x0f, 0x01, 0x10],       // lgdt [rax]
        &[0x0f, 0x01, 0xf9],       // rdtscp
        &[0x0f, 0x38, 0xf0, 0x00], // movbe
    ];
    for code in others {
        assert!(!decode::changes_mappings(code), "{code:x?}");
    }
}

#[test]
fn other_ranges_have_pages_looked_up_again() {
    let (_folder, lines) = lines(1, 0);
    let changes = || lines.word(header::CHANGES).load(Ordering::Acquire);
    let mut pages = pages::Pages::new();
    pages.forget();
    assert_eq!(pages.find(0x7000, changes()), None);
    // Looked up before the window came up.
    pages.remember(0x7000, 0, changes());
    assert_eq!(pages.find(0x7fff, changes()), Some(0));
    let before = changes();
    let window = 0x1_0000_0000..0x2_0000_0000;
    lines.watch(&[window]);
    assert_eq!(pages.find(0x7000, changes()), None);
    pages.remember(0x8000, 0x1_0000_8000, changes());
    assert_eq!(pages.find(0x8004, changes()), Some(0x1_0000_8000));
    // Of the ranges before nothing is left.
    assert_eq!(pages.find(0x7000, changes()), None);
    // Ranges that changed while a page was looked up: what was found is not believed.
    pages.remember(0x9000, 0x1_0000_9000, before);
    assert_eq!(pages.find(0x9000, changes()), None);
}

#[test]
fn what_is_remembered_of_pages_is_what_was_said_last_or_nothing() {
    let mut pages = pages::Pages::new();
    pages.forget();
    let (mut state, mut said) = (1_u64, std::collections::HashMap::new());
    let mut below = |most: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % most
    };
    let (mut ranges, mut found) = (0, 0);
    for _ in 0..200_000 {
        let address = below(4096) << 12 | below(4096);
        match below(1000) {
            // More often than a key tells generations apart.
            0..50 => {
                pages.forget();
                said.clear();
            }
            50..55 => {
                ranges += 1;
                said.clear();
            }
            55..400 => {
                let place = below(3) << 12;
                pages.remember(address, place, ranges);
                said.insert(address >> 12, place);
            }
            _ => {
                let known = pages.find(address, ranges);
                found += usize::from(known.is_some());
                // Another page may have taken its place.
                assert!(known.is_none() || known == said.get(&(address >> 12)).copied());
            }
        }
    }
    assert!(found > 100, "{found}");
}
