//! What is written is read, and what was cut, damaged or made up is refused by its field.

use super::text::{Form, LineAccess};
use super::*;
use crate::ModelError;

const HEAD: Header = Header { seen: Seen::Requests, device_bytes: 1 << 30 };

fn items() -> Vec<Item> {
    let mut items = vec![
        Item::View(View::full(16)),
        Item::View(View { name: "e8m3".to_owned(), bits: 16, link_bits: 16, planes: 0xfff }),
    ];
    for number in 0..3000_u64 {
        let kind =
            [BlockKind::Coded, BlockKind::Zeros, BlockKind::Bypassed][usize::try_from(number % 3).unwrap()];
        let block = number * 5 % 4096;
        let planes = if kind == BlockKind::Zeros {
            Vec::new()
        } else {
            vec![u16::try_from(number % 257).unwrap(); 16]
        };
        items.push(Item::Block(block, Block { kind, planes, lz4: 4096, zstd: 3000 }));
        items.push(Item::Request(Request {
            time_ns: number * 1000,
            address: number * 7919 * 64 % (1 << 29),
            length: 64 + number % 5000,
            view: u32::try_from(number % 2).unwrap(),
            guest: 3,
            write: number % 7 == 0,
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
            Item::Request(request) => writer.request(request).unwrap(),
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
    let end = bytes.len() - CHUNK_HEADER - 3;
    assert!(read(&bytes[..end]).unwrap_err().to_string().contains("cut short"));
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
        Item::Request(Request { time_ns: 0, address, length, view, guest: 0, write: false })
    };
    assert!(refused(&[request(0, 64, 0)]).contains("view of request 0"));
    assert!(refused(&[full.clone(), request(1 << 30, 64, 0)]).contains("address of request 0 is 0x40000000"));
    assert!(refused(&[full.clone(), request(u64::MAX, 64, 0)]).contains("address of request 0"));
    assert!(refused(&[full.clone(), request(0, 0, 0)]).contains("length of request 0 is 0"));
    assert!(refused(&[full.clone(), request(0, 1 << 40, 0)]).contains("length of request 0"));
    let view = |bits, planes| Item::View(View { name: "v".to_owned(), bits, link_bits: 16, planes });
    assert!(refused(&[view(8, 0x1ff)]).contains("view \"v\""));
    assert!(refused(&[view(0, 0)]).contains("view \"v\""));
    assert!(refused(&[view(65, 0)]).contains("bits of a view's element"));
    let block = |planes: Vec<u16>| Block { kind: BlockKind::Coded, planes, lz4: 0, zstd: 0 };
    assert!(refused(&[Item::Block(1 << 18, block(vec![]))]).contains("block in chunk 1 is 262144"));
    assert!(refused(&[Item::Block(0, block(vec![1; 65]))]).contains("planes of a block"));
    assert!(refused(&[Item::Block(0, block(vec![4161]))]).contains("bytes of a plane"));
    assert!(refused(&[Item::Block(0, block(vec![4096; 3]))]).contains("planes of block 0"));
    let mut other = written(&[]);
    other[8] = 2;
    assert!(read(&other).unwrap_err().to_string().contains("version is 2"));
    assert!(read(b"0x10 READ 1, and so on for a while").unwrap_err().to_string().contains("LAMTRACE"));
    let small = Writer::new(Vec::new(), Header { device_bytes: 5, ..HEAD }).unwrap().finish().unwrap();
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
    assert!(refused(Form::Dramsim3, "zz READ 1").contains("address of line 5"));
    assert!(refused(Form::Dramsim3, "0x10 FETCH 1").contains("access of line 5 is FETCH"));
    assert!(refused(Form::Ramulator2, "LD 0x10 7").contains("end of line 5 is 7"));
    assert!(refused(Form::Ramulator2, "LD 99999999999999999999").contains("address of line 5"));
}
