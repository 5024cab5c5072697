use super::*;

#[path = "../../line-recorder/decode.rs"]
mod decode;
#[path = "../../line-recorder/pages.rs"]
#[expect(clippy::cast_possible_truncation, reason = "of a number's lowest bits")]
mod pages;

fn lines(processors: u32, cache_bytes: usize) -> (tempfile::TempDir, Lines) {
    let folder = tempfile::tempdir().unwrap();
    let lines = Lines::new(folder.path(), folder.path(), processors, cache_bytes).unwrap();
    lines.word(header::TICKS_A_SECOND).store(2_000_000_000, Ordering::Relaxed);
    lines.word(header::FIRST_TICK).store(100, Ordering::Relaxed);
    (folder, lines)
}

/// What the recorder does with a record.
fn push(lines: &Lines, processor: usize, what: u64, tick: u64) {
    let head = lines.of(processor, counter::HEAD);
    let number = head.load(Ordering::Relaxed);
    let slot = PAGE / 8 + 2 * (usize::try_from(number).unwrap() % RECORDS);
    lines.of(processor, slot).store(what, Ordering::Relaxed);
    lines.of(processor, slot + 1).store(tick, Ordering::Relaxed);
    head.store(number + 1, Ordering::Release);
}

#[test]
fn records_of_all_processors_come_in_the_order_of_time_and_once() {
    let (_folder, lines) = lines(2, 0);
    push(&lines, 0, 3 << SIZE_SHIFT | 0x1_0000_0008, 300);
    push(&lines, 0, WRITE | 6 << SIZE_SHIFT | 0x2_0000_0040, 900);
    push(&lines, 1, ADDRESS, 500);
    let mut taken = Vec::new();
    lines.take(&mut taken);
    let line = |time_ns, address, bytes, write, processor| Line { time_ns, address, bytes, write, processor };
    let expected = [
        line(100, 0x1_0000_0008, 8, false, 0),
        line(200, ADDRESS, 1, false, 1),
        line(400, 0x2_0000_0040, 64, true, 0),
    ];
    assert_eq!(taken, expected);
    lines.take(&mut taken);
    assert_eq!(taken.len(), 3);
    // A ring begins anew behind its end.
    for number in 0..RECORDS as u64 + 5 {
        if number == 10 {
            lines.take(&mut taken);
        }
        push(&lines, 1, number, number);
    }
    taken.clear();
    lines.take(&mut taken);
    assert_eq!((taken.len(), taken.last().unwrap().address), (RECORDS - 5, RECORDS as u64 + 4));
}

#[test]
fn a_head_that_cannot_be_gives_no_more_than_a_ring() {
    let (_folder, lines) = lines(1, 0);
    lines.of(0, counter::HEAD).store(u64::MAX, Ordering::Relaxed);
    let mut taken = Vec::new();
    lines.take(&mut taken);
    assert_eq!(taken.len(), RECORDS);
    lines.of(0, counter::HEAD).store(7, Ordering::Relaxed);
    lines.take(&mut taken);
    assert_eq!(taken.len(), RECORDS);
}

#[test]
fn the_cache_s_written_lines_are_told() {
    let (_folder, lines) = lines(2, 4096);
    assert_eq!(lines.sets, 8);
    lines.of(1, cache_word(RECORDS) + 3).store(0x1040 | DIRTY, Ordering::Relaxed);
    lines.of(1, cache_word(RECORDS) + 4).store(0x2040, Ordering::Relaxed);
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
