//! Changes as bytes: what a record of the log holds.
//!
//! Numbers are written seven bits at a time, lowest first; texts with their length before them.

use super::state::{Change, Meta, Time};

/// Adds changes to `out`.
pub(crate) fn encode(changes: &[Change], out: &mut Vec<u8>) {
    for change in changes {
        encode_one(change, out);
    }
}

fn encode_one(change: &Change, out: &mut Vec<u8>) {
    match change {
        Change::Put { inode, meta } => {
            out.push(1);
            let Meta { mode, uid, gid, links, device, size, parent, times } = meta;
            let numbers =
                [*inode, (*mode).into(), (*uid).into(), (*gid).into(), (*links).into(), (*device).into()];
            numbers.into_iter().chain([*size, *parent]).for_each(|number| put(number, out));
            for (seconds, nanoseconds) in times {
                put(seconds.cast_unsigned(), out);
                put((*nanoseconds).into(), out);
            }
        }
        Change::Drop { inode } => {
            out.push(2);
            put(*inode, out);
        }
        Change::Name { folder, name, to } => {
            out.push(3);
            put(*folder, out);
            text(name, out);
            let (inode, place) = to.unwrap_or((0, 0));
            put(inode, out);
            put(place, out);
        }
        Change::Map { inode, at, dpa, length } => {
            out.push(4);
            for number in [*inode, *at, *dpa, *length] {
                put(number, out);
            }
        }
        Change::Cut { inode, at, length } => {
            out.push(5);
            for number in [*inode, *at, *length] {
                put(number, out);
            }
        }
        Change::Attribute { inode, name, value } => {
            out.push(6);
            put(*inode, out);
            text(name, out);
            put(value.is_some().into(), out);
            text(value.as_deref().unwrap_or_default(), out);
        }
        Change::Target { inode, target } => {
            out.push(7);
            put(*inode, out);
            text(target, out);
        }
        Change::Next { inode } => {
            out.push(8);
            put(*inode, out);
        }
        Change::Done { request } => {
            out.push(9);
            put(*request, out);
        }
    }
}

/// The changes of a record; none if it is not one.
pub(crate) fn decode(mut bytes: &[u8]) -> Option<Vec<Change>> {
    let mut changes = Vec::new();
    while !bytes.is_empty() {
        changes.push(decode_one(&mut bytes)?);
    }
    Some(changes)
}

fn decode_one(bytes: &mut &[u8]) -> Option<Change> {
    let kind = take(bytes, 1)?[0];
    let inode = number(bytes)?;
    Some(match kind {
        1 => {
            let [mode, uid, gid, links, device] =
                [short(bytes)?, short(bytes)?, short(bytes)?, short(bytes)?, short(bytes)?];
            let (size, parent) = (number(bytes)?, number(bytes)?);
            let mut time = || -> Option<Time> { Some((number(bytes)?.cast_signed(), short(bytes)?)) };
            let times = [time()?, time()?, time()?];
            Change::Put { inode, meta: Meta { mode, uid, gid, links, device, size, parent, times } }
        }
        2 => Change::Drop { inode },
        3 => {
            let (name, to, place) = (words(bytes)?, number(bytes)?, number(bytes)?);
            Change::Name { folder: inode, name, to: (to != 0).then_some((to, place)) }
        }
        4 => Change::Map { inode, at: number(bytes)?, dpa: number(bytes)?, length: number(bytes)? },
        5 => Change::Cut { inode, at: number(bytes)?, length: number(bytes)? },
        6 => {
            let (name, there, value) = (words(bytes)?, number(bytes)?, words(bytes)?);
            Change::Attribute { inode, name, value: (there != 0).then_some(value) }
        }
        7 => Change::Target { inode, target: words(bytes)? },
        8 => Change::Next { inode },
        9 => Change::Done { request: inode },
        _ => return None,
    })
}

fn put(mut number: u64, out: &mut Vec<u8>) {
    while number >= 0x80 {
        out.push(u8::try_from(number & 0x7f).unwrap_or(0) | 0x80);
        number >>= 7;
    }
    out.push(u8::try_from(number).unwrap_or(0));
}

fn text(text: &[u8], out: &mut Vec<u8>) {
    put(text.len() as u64, out);
    out.extend_from_slice(text);
}

fn take<'a>(bytes: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(count)?;
    *bytes = rest;
    Some(taken)
}

fn number(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0_u64;
    for shift in (0..64).step_by(7) {
        let byte = u64::from(take(bytes, 1)?[0]);
        number |= (byte & 0x7f).checked_shl(shift)?;
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}

fn short(bytes: &mut &[u8]) -> Option<u32> {
    u32::try_from(number(bytes)?).ok()
}

fn words(bytes: &mut &[u8]) -> Option<Vec<u8>> {
    let length = usize::try_from(number(bytes)?).ok()?;
    Some(take(bytes, length)?.to_vec())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn changes_are_read_back() {
        let times = [(-1, 999_999_999), (0, 0), (i64::MAX, 7)];
        let (mode, links) = (0o100_644, 3);
        let meta = Meta { mode, uid: u32::MAX, gid: 5, links, device: 9, size: u64::MAX, parent: 1, times };
        let changes = [
            Change::Put { inode: 300, meta },
            Change::Drop { inode: u64::MAX },
            Change::Name { folder: 1, name: b"\xff a".to_vec(), to: Some((2, 3)) },
            Change::Name { folder: 1, name: vec![b'x'; 255], to: None },
            Change::Map { inode: 1, at: 0, dpa: 1 << 40, length: 4096 },
            Change::Cut { inode: 1, at: 5, length: u64::MAX },
            Change::Attribute { inode: 2, name: b"user.x".to_vec(), value: Some(Vec::new()) },
            Change::Attribute { inode: 2, name: b"user.x".to_vec(), value: None },
            Change::Target { inode: 4, target: b"../x".to_vec() },
            Change::Next { inode: 128 },
            Change::Done { request: 1 << 62 },
        ];
        let mut bytes = Vec::new();
        encode(&changes, &mut bytes);
        assert_eq!(decode(&bytes), Some(changes.to_vec()));
        for cut in 1..bytes.len() {
            // Whatever is left is no panic, and never the whole.
            assert_ne!(decode(&bytes[..cut]), Some(changes.to_vec()));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_taken_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            if let Some(changes) = decode(&bytes) {
                let mut again = Vec::new();
                encode(&changes, &mut again);
                prop_assert_eq!(decode(&again), Some(changes));
            }
        }
    }
}
