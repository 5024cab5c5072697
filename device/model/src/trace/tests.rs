//! What is written is read, and what was cut, damaged or made up is refused by its field.

use super::text::{Form, LineAccess};
use super::*;
use crate::ModelError;

const HEAD: Header = Header { seen: Seen::Requests, device_bytes: 1 << 30 };

/// A name may be anybody's, and goes to terminals.
#[test]
fn names_of_views_are_printable() {
    let mut writer = Writer::new(Vec::new(), HEAD).unwrap();
    let name = "a\x1b[31mRED\x1b]0;title\x07\nx\u{9b}é".to_owned();
    writer.view(&View { name, ..View::full(16) }).unwrap();
    let trace = writer.finish().unwrap();
    let mut reader = Reader::new(&trace[..]).unwrap();
    let Some(Item::View(view)) = reader.next_item().unwrap() else { panic!("a view") };
    assert_eq!(view.name, r"a\u{1b}[31mRED\u{1b}]0;title\u{7}\nx\u{9b}é");
}

fn served(bits: u64) -> Option<Served> {
    let is = |bit: u64| bits >> bit & 1 == 1;
    let served = Served { asked: is(0), fetched: is(1), by_itself: is(2), reads_told: is(3) };
    Some(served).filter(|_| bits & 7 > 0)
}

fn items() -> Vec<Item> {
    let mut items = vec![
        Item::View(View::full(16)),
        Item::View(View { name: "e8m3".to_owned(), bits: 16, link_bits: 16, planes: 0xfff }),
    ];
    for number in 0..3000_u64 {
        let kind =
            [BlockKind::Coded, BlockKind::Zeros, BlockKind::Bypassed][usize::try_from(number % 3).unwrap()];
        let words = WordBytes { lz4: Some(4096).filter(|_| number % 2 == 0), zstd: Some(0) };
        let block = Block { kind, words, ..Block::default() };
        let block = match kind {
            BlockKind::Zeros => block,
            _ => Block {
                planes: [u16::try_from(number % 257).unwrap(); 16].into(),
                segment: number.checked_sub(9),
                head: u16::try_from(number % 64).unwrap(),
                stream: u16::try_from(number % 900).unwrap(),
                joint: u8::try_from(number % 9).unwrap(),
                ..block
            },
        };
        items.push(Item::Block(number * 5 % 4096, block));
        if number % 1000 == 999 {
            items.push(Item::Lost(number));
        }
        if number % 4 == 3 {
            let bytes = u16::try_from(number % 4161).unwrap();
            items.push(Item::Words(number * 3 % 4096, WordBytes { lz4: None, zstd: Some(bytes) }));
        }
        items.push(Item::Request(Request {
            time_ns: number * 1000,
            address: number * 7919 * 64 % (1 << 29),
            length: 64 + number % 5000,
            view: u32::try_from(number % 2).unwrap(),
            guest: 3,
            write: number % 7 == 0,
            served: served(number % 16),
        }));
    }
    for number in 0..20_000 {
        items.push(Item::Request(Request {
            time_ns: 4_000_000 + number,
            address: number * 4096,
            length: 4096,
            view: 0,
            guest: 0,
            write: false,
            served: None,
        }));
    }
    items
}

fn written(items: &[Item]) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), HEAD).unwrap();
    for item in items {
        match item {
            Item::View(view) => writer.view(view).unwrap(),
            Item::Block(number, block) => writer.block(*number, block).unwrap(),
            Item::Words(number, words) => writer.words(*number, *words).unwrap(),
            Item::Request(request) => writer.request(request).unwrap(),
            Item::Lost(requests) => writer.lost(*requests).unwrap(),
        }
    }
    writer.finish().unwrap()
}

fn read(bytes: &[u8]) -> Result<Vec<Item>, ModelError> {
    let mut reader = Reader::new(bytes)?;
    let mut items = Vec::new();
    while let Some(item) = reader.next_item()? {
        items.push(item);
    }
    Ok(items)
}

#[test]
fn what_is_written_is_read() {
    let items = items();
    let bytes = written(&items);
    assert_eq!(read(&bytes).unwrap(), items);
    assert_eq!(Reader::new(&bytes[..]).unwrap().header(), HEAD);
    let stream: Vec<_> = items.iter().filter(|item| matches!(item, Item::Request(_))).cloned().collect();
    let views = [Item::View(View::full(16)), Item::View(View::full(8))];
    let alone = written(&[&views[..], &stream].concat());
    // About as many bytes a request as it has fields.
    assert!(alone.len() < 9 * stream.len(), "{}", alone.len() / stream.len());
}

#[test]
fn a_trace_that_is_cut_anywhere_is_refused() {
    let bytes = written(&items()[..200]);
    for length in 0..bytes.len() {
        let why = read(&bytes[..length]).unwrap_err().to_string();
        assert!(why.contains("cut short"), "{length}: {why}");
    }
    // Nobody ended it, though all its chunks are whole.
    let end = bytes.len() - CHUNK_HEADER - 2;
    let why = read(&bytes[..end]).unwrap_err().to_string();
    assert!(
        why.contains("cut short") && why.contains("88 requests and 110 blocks before it are whole"),
        "{why}"
    );
}

#[test]
fn a_trace_that_is_cut_is_taken_up_to_there_if_that_is_asked_for() {
    let items = items();
    let bytes = written(&items[..200]);
    let mut most = 0;
    for length in HEADER..=bytes.len() {
        let mut reader = Reader::new(&bytes[..length]).unwrap().up_to_a_cut();
        let mut given = Vec::new();
        while let Some(item) = reader.next_item().unwrap() {
            given.push(item);
        }
        assert_eq!(given, items[..given.len()], "{length}");
        assert_eq!(reader.is_cut(), length < bytes.len(), "{length}");
        assert!(given.len() >= most, "{length}");
        most = given.len();
        let requests = given.iter().filter(|item| matches!(item, Item::Request(_))).count();
        assert_eq!(reader.given().0, requests as u64);
        reader.check_end().unwrap();
    }
    assert_eq!(most, 200);
    // What is damaged is no end.
    let mut damaged = bytes.clone();
    damaged[HEADER + CHUNK_HEADER] ^= 1;
    let refused = Reader::new(&damaged[..]).unwrap().up_to_a_cut().next_item();
    assert!(refused.unwrap_err().to_string().contains("is damaged"));
}

#[test]
fn what_lies_behind_the_end_is_told() {
    let bytes = [written(&items()[..200]), b"x".to_vec()].concat();
    let mut reader = Reader::new(&bytes[..]).unwrap();
    while reader.next_item().unwrap().is_some() {}
    assert!(reader.check_end().unwrap_err().to_string().contains("bytes behind its end"));
}

/// By hand, as versions 1 and 2 laid them out.
#[test]
fn traces_of_versions_1_and_2_are_read() {
    let trace = |version: u8, block: &[u8], request: &[u8]| {
        let mut bytes = Vec::new();
        let mut header = *b"LAMTRACE\x01\0\0\0\0\0\0\0\0\0\x10\0\0\0\0\0";
        header[8] = version;
        header[16..24].copy_from_slice(&(1_u64 << 20).to_le_bytes());
        bytes.extend(header);
        bytes.extend(crc32c::crc32c(&header).to_le_bytes());
        bytes.extend([0; 4]);
        let mut chunk = |tag: u8, records: u32, payload: &[u8]| {
            let mut header = vec![tag, 0, 0, 0];
            header.extend(records.to_le_bytes());
            header.extend(u32::try_from(payload.len()).unwrap().to_le_bytes());
            let check = crc32c::crc32c_append(crc32c::crc32c(&header), payload);
            header.extend(check.to_le_bytes());
            bytes.extend(header);
            bytes.extend(payload);
        };
        chunk(b'V', 1, b"\x04full\x10\x10\xff\xff\x03");
        chunk(b'B', 1, block);
        chunk(b'R', 1, request);
        chunk(b'E', 0, &[1, 1]);
        bytes
    };
    // Block 5, coded, two planes of 7 and 9 bytes, 11 as words by lz4, and by zstd nobody knows.
    let words = WordBytes { lz4: Some(11), zstd: None };
    let block = Block { planes: [7, 9].into(), words, ..Block::default() };
    let (time_ns, address, length, view, guest) = (21, 32, 64, 0, 3);
    let request = Request { time_ns, address, length, view, guest, write: true, served: None };
    let items =
        |block, request| vec![Item::View(View::full(16)), Item::Block(5, block), Item::Request(request)];
    // At 20 ns: view 0, a write, of guest 3, 1 ns later, address 32, 64 bytes.
    let first = trace(1, &[5, 0, 2, 7, 9, 11, 0], &[20, 1, 3, 1, 64, 64]);
    assert_eq!(read(&first).unwrap(), items(block.clone(), request));
    // In line 41, a head of 2 bytes and a stream of 3 with no plane; asked for and fetched.
    let block = Block { segment: Some(41), head: 2, stream: 3, ..block };
    let served = Some(Served { asked: true, fetched: true, by_itself: false, reads_told: false });
    let second = trace(2, &[5, 0, 42, 2, 3, 0, 2, 7, 9, 11, 0], &[20, 7, 3, 1, 64, 64]);
    assert_eq!(read(&second).unwrap(), items(block, Request { served, ..request }));
}

#[test]
fn every_flipped_bit_is_found() {
    let bytes = written(&items()[..40]);
    for bit in 0..bytes.len() * 8 {
        // Zeros that fill the header up are nobody's.
        if (28 * 8..32 * 8).contains(&bit) {
            continue;
        }
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(read(&damaged).is_err(), "bit {bit}");
    }
}

#[test]
fn what_cannot_be_is_refused_by_its_field() {
    let refused = |items: &[Item]| read(&written(items)).unwrap_err().to_string();
    let full = Item::View(View::full(16));
    let request = |address, length, view| {
        Item::Request(Request { time_ns: 0, address, length, view, guest: 0, write: false, served: None })
    };
    assert!(refused(&[request(0, 64, 0)]).contains("view of request 0"));
    assert!(refused(&[full.clone(), request(1 << 30, 64, 0)]).contains("address of request 0 is 0x40000000"));
    assert!(refused(&[full.clone(), request(u64::MAX, 64, 0)]).contains("address of request 0"));
    assert!(refused(&[full.clone(), request(0, 0, 0)]).contains("length of request 0 is 0"));
    assert!(refused(&[full.clone(), request(0, 1 << 40, 0)]).contains("length of request 0"));
    let late = |time_ns| match request(0, 64, 0) {
        Item::Request(request) => Item::Request(Request { time_ns, ..request }),
        other => other,
    };
    assert!(read(&written(&[full.clone(), late(MAX_TIME_NS)])).is_ok());
    assert!(refused(&[full.clone(), late(MAX_TIME_NS + 1)]).contains("time of request 0"));
    assert!(refused(&[full.clone(), late(u64::MAX)]).contains("time of request 0"));
    let view = |bits, planes| Item::View(View { name: "v".to_owned(), bits, link_bits: 16, planes });
    assert!(refused(&[view(8, 0x1ff)]).contains("view \"v\""));
    assert!(refused(&[view(0, 0)]).contains("view \"v\""));
    assert!(refused(&[view(65, 0)]).contains("bits of a view's element"));
    let block = |planes: Vec<u16>| Block { planes: planes.into(), ..Block::default() };
    assert!(refused(&[Item::Block(1 << 18, block(vec![]))]).contains("block in chunk 1 is 262144"));
    assert!(refused(&[Item::Block(0, block(vec![1; 65]))]).contains("planes of a block"));
    assert!(refused(&[Item::Block(0, block(vec![4161]))]).contains("bytes of a plane"));
    assert!(refused(&[Item::Block(0, block(vec![4096; 3]))]).contains("planes of block 0"));
    let words = WordBytes { lz4: Some(4161), zstd: None };
    assert!(refused(&[Item::Words(0, words)]).contains("bytes by lz4 in chunk 1 is 4162"));
    assert!(refused(&[Item::Words(1 << 18, words)]).contains("block in chunk 1 is 262144"));
    let odd = |block| refused(&[Item::Block(0, block)]);
    assert!(odd(Block { head: 4161, ..block(vec![]) }).contains("bytes of a head"));
    assert!(odd(Block { joint: 3, ..block(vec![1; 3]) }).contains("joint planes of block 0 is 3"));
    assert!(odd(Block { stream: 4160, ..block(vec![4096]) }).contains("planes of block 0"));
    let mut other = written(&[]);
    other[8] = 4;
    assert!(read(&other).unwrap_err().to_string().contains("version is 4"));
    assert!(read(b"0x10 READ 1, and so on for a while").unwrap_err().to_string().contains("LAMTRACE"));
    let mut small = written(&[]);
    small[16..24].copy_from_slice(&5_u64.to_le_bytes());
    let check = crc32c::crc32c(&small[..24]);
    small[24..28].copy_from_slice(&check.to_le_bytes());
    assert!(read(&small).unwrap_err().to_string().contains("device bytes is 5"));
}

#[test]
fn traces_of_others_are_written_and_read() {
    let access = LineAccess { address: 0x1f40, write: true, cycle: 7 };
    for (form, text) in [(Form::Dramsim3, "0x1F40 WRITE 7\n"), (Form::Ramulator2, "ST 0x1f40\n")] {
        let mut out = String::new();
        form.write(&mut out, &access);
        assert_eq!(out, text);
        assert_eq!(form.read(7, &out).unwrap(), Some(access));
        assert_eq!(form.read(0, "  ").unwrap(), None);
    }
    assert_eq!(Form::Ramulator2.read(0, "LD 64").unwrap().unwrap().address, 64);
    let refused = |form: Form, line: &str| form.read(4, line).unwrap_err().to_string();
    assert!(refused(Form::Dramsim3, "0x10 READ").contains("cycle of line 5 is missing"));
    assert!(refused(Form::Dramsim3, "0x10 READ 72057594037927937").contains("cycle of line 5"));
    assert!(refused(Form::Dramsim3, "zz READ 1").contains("address of line 5"));
    assert!(refused(Form::Dramsim3, "0x10 FETCH 1").contains("access of line 5 is FETCH"));
    assert!(refused(Form::Ramulator2, "LD 0x10 7").contains("end of line 5 is 7"));
    assert!(refused(Form::Ramulator2, "LD 99999999999999999999").contains("address of line 5"));
}

#[test]
fn blocks_are_found_by_their_numbers_and_no_others() {
    let (mut blocks, mut wanted) = (Blocks::default(), HashMap::new());
    for number in (0..4000_u64).map(|number| number * number * 7919 % (1 << 20)).chain([u64::MAX, 0, 63]) {
        let block = Block { head: u16::try_from(wanted.len()).unwrap(), ..Block::default() };
        blocks.insert(number, block.clone());
        wanted.insert(number, block);
    }
    // Bytes as words are said again of some, and of one of which nothing was said.
    let words = WordBytes { lz4: Some(7), zstd: None };
    for number in [0, 63, 77, u64::MAX] {
        blocks.set_words(number, words);
        wanted.entry(number).or_default().words = words;
    }
    for number in wanted.keys().flat_map(|number| [number.wrapping_sub(1), *number, number ^ 64]) {
        assert_eq!(blocks.get(number), wanted.get(&number), "{number}");
    }
}

#[test]
fn what_no_reader_takes_is_not_begun() {
    for device_bytes in [0, 64, BLOCK_BYTES - 1, MAX_DEVICE + 1, u64::MAX] {
        let mut out = Vec::new();
        let why = Writer::new(&mut out, Header { device_bytes, ..HEAD }).map(|_| ()).unwrap_err().to_string();
        assert!(
            why.starts_with(&format!("device bytes is {device_bytes}: it must be from 4096 to")),
            "{why}"
        );
        assert!(out.is_empty());
    }
    for device_bytes in [BLOCK_BYTES, MAX_DEVICE] {
        let header = Header { device_bytes, ..HEAD };
        let trace = Writer::new(Vec::new(), header).unwrap().finish().unwrap();
        assert_eq!(Reader::new(&trace[..]).unwrap().header(), header);
    }
}
