//! Lost blocks: what a KV window keeps of a lost block, which stores are refused, and what
//! clearing, injecting and writing leave when they meet.

use std::sync::Barrier;

use super::*;
use crate::layout::Layout;
use lamina_codec::{format::Format, kv::KvLayout};
use lamina_store::{StoreError, entry::Damaged};

const BLOCK: usize = BLOCK_BYTES;
/// Tokens of a window, 8 KiB each: two blocks, of which each has half of the channels.
const TOKENS: usize = 8;
const WINDOW: usize = TOKENS * 2 * BLOCK;
const WINDOWS: usize = 3;
const LENGTH: usize = WINDOWS * WINDOW;

fn config() -> DeviceConfig {
    DeviceConfig { codec: Codec::Tree, ..DeviceConfig::new(1 << 20, 8 << 20) }
}

fn in_memory() -> Device {
    Device::new(config()).unwrap()
}

/// A cache of which a stored block holds some channels of all tokens, and a block of the host all
/// of half the channels of one.
fn wide(device: &Device) {
    let spec = TensorSpec {
        name: "k".to_owned(),
        dpa: Some(0),
        length: LENGTH as u64,
        elements: None,
        shape: Vec::new(),
        format: Format::Bf16,
        layout: Layout::Kv(KvLayout::rows(4096, u32::try_from(TOKENS).unwrap())),
        codec: None,
        base: None,
    };
    device.create_tensor(spec).unwrap();
}

/// Channels of different sizes, which are coded channel by channel.
fn rows(seed: u64) -> Vec<u8> {
    let noise = lamina_codec::testing::bytes(seed * 5, LENGTH);
    let element = |(at, noise): (usize, &[u8])| {
        let exponent = 90 + u16::try_from(at % 4096 * 37 % 29).unwrap() + u16::from(noise[1] & 1);
        (exponent << 7 | u16::from(noise[0] >> 4)).to_le_bytes()
    };
    noise.chunks(2).enumerate().flat_map(element).collect()
}

fn read(device: &Device, at: usize, length: usize) -> Vec<u8> {
    let mut out = vec![0xa5; length];
    device.read_base(at as u64, &mut out).unwrap();
    out
}

/// The numbers of the blocks that are listed.
fn listed(device: &Device) -> Vec<usize> {
    device.poison().iter().map(|poisoned| usize::try_from(poisoned.dpa).unwrap() / BLOCK).collect()
}

/// The device is the array, and lists those of its blocks that are lost.
fn same(device: &Device, model: &[Option<Vec<u8>>]) {
    for (block, want) in model.iter().enumerate() {
        let found = read(device, block * BLOCK, BLOCK);
        match want {
            Some(want) => assert!(found == *want, "block {block}"),
            None => assert!(found == [poison::PATTERN; BLOCK], "block {block} is lost"),
        }
    }
    let lost: Vec<_> =
        model.iter().enumerate().filter_map(|(block, it)| it.is_none().then_some(block)).collect();
    assert_eq!(listed(device), lost);
}

fn model(data: &[u8]) -> Vec<Option<Vec<u8>>> {
    data.chunks(BLOCK).map(|block| Some(block.to_vec())).collect()
}

fn refused(written: Result<(), DeviceError>) {
    let why = written.unwrap_err();
    assert!(matches!(why, DeviceError::Store(StoreError::Entry { why: Damaged::Poison, .. })), "{why}");
}

/// A device with damage in the first window: block 1 of it, as it is stored, has channels of the
/// blocks with even numbers.
fn damaged(device: &Device) -> Vec<Option<Vec<u8>>> {
    wide(device);
    let data = rows(1);
    device.write_base(0, &data).unwrap();
    let coded = device.stats().kv_windows;
    assert_eq!((coded.coded_plain, coded.coded_channels + coded.coded_deltas), (0, WINDOWS as u64));
    device.flip_stored_bit(1, 20);
    let mut model = model(&data);
    model[..2 * TOKENS].iter_mut().step_by(2).for_each(|block| *block = None);
    model
}

#[test]
fn a_lost_block_of_a_window_takes_the_blocks_that_have_bytes_in_it_and_no_others() {
    let device = in_memory();
    let mut model = damaged(&device);
    same(&device, &model);
    assert_eq!(device.stats().requests.poison_events, TOKENS as u64);
    // Part of a healthy block, of a lost one, and the whole of a lost one.
    device.write_base(BLOCK as u64 + 8, &[7; 8]).unwrap();
    model[1].as_mut().unwrap()[8..16].fill(7);
    refused(device.write_base(8, &[7; 8]));
    device.write_base(2 * BLOCK as u64, &[5; BLOCK]).unwrap();
    model[2] = Some(vec![5; BLOCK]);
    same(&device, &model);
    // Closed, however often.
    for _ in 0..2 {
        device.flush(0, LENGTH as u64).unwrap();
        same(&device, &model);
    }
    // Of several blocks, those before the refused one are written.
    refused(device.write_base(2 * BLOCK as u64, &[6; 2 * BLOCK + 100]));
    (model[2], model[3]) = (Some(vec![6; BLOCK]), Some(vec![6; BLOCK]));
    same(&device, &model);
    device.discard(6 * BLOCK as u64, 2 * BLOCK as u64).unwrap();
    (model[6], model[7]) = (Some(vec![0; BLOCK]), Some(vec![0; BLOCK]));
    same(&device, &model);
    refused(device.discard(9 * BLOCK as u64, BLOCK as u64 + 1));
    model[9] = Some(vec![0; BLOCK]);
    same(&device, &model);
    device.clear_poison(10 * BLOCK as u64, 1).unwrap();
    model[10] = Some(vec![0; BLOCK]);
    same(&device, &model);
    device.write_base(0, &rows(2)[..WINDOW]).unwrap();
    model[..2 * TOKENS].clone_from_slice(&self::model(&rows(2)[..WINDOW]));
    same(&device, &model);
    assert_eq!(device.stats().requests.poison_events, TOKENS as u64, "nothing was lost twice");
}

#[test]
fn a_store_that_is_the_first_to_meet_the_damage_keeps_what_can_be_decoded() {
    let device = in_memory();
    let mut model = damaged(&device);
    refused(device.write_base(8, &[7; 8]));
    device.write_base(3 * BLOCK as u64 + 8, &[7; 8]).unwrap();
    model[3].as_mut().unwrap()[8..16].fill(7);
    device.flush(0, LENGTH as u64).unwrap();
    same(&device, &model);
}

#[test]
fn in_address_order_only_the_damaged_block_is_lost() {
    let device = in_memory();
    wide(&device);
    let data = lamina_codec::testing::bytes(5, LENGTH);
    device.write_base(0, &data).unwrap();
    assert_eq!(device.stats().kv_windows.coded_plain, WINDOWS as u64);
    let mut model = model(&data);
    device.flip_stored_bit(3, 20);
    device.flip_stored_bit(15, 9);
    (model[3], model[15]) = (None, None);
    same(&device, &model);
    // A view shows what its arithmetic makes of the pattern.
    let view = device.create_view("k", "e8m3").unwrap();
    let mut shown = vec![0; BLOCK];
    device.read_views(view.offset + 3 * BLOCK as u64, &mut shown).unwrap();
    assert!(shown == [0xf0, 0xff].repeat(BLOCK / 2));
    device.clear_poison(0, LENGTH as u64).unwrap();
    (model[3], model[15]) = (Some(vec![0; BLOCK]), Some(vec![0; BLOCK]));
    same(&device, &model);
}

#[test]
fn poison_is_injected_into_and_cleared_from_single_blocks_of_a_window() {
    let device = in_memory();
    wide(&device);
    let data = rows(3);
    device.write_base(0, &data).unwrap();
    let mut model = model(&data);
    device.inject_poison(5 * BLOCK as u64, 1).unwrap();
    model[5] = None;
    same(&device, &model);
    // What is staged stays, but for the block.
    device.write_base(7 * BLOCK as u64 + 1, &[9; 100]).unwrap();
    model[7].as_mut().unwrap()[1..101].fill(9);
    device.inject_poison(6 * BLOCK as u64, BLOCK as u64).unwrap();
    model[6] = None;
    same(&device, &model);
    device.clear_poison(5 * BLOCK as u64, 1).unwrap();
    model[5] = Some(vec![0; BLOCK]);
    same(&device, &model);
    // Over the border of two windows.
    device.inject_poison(15 * BLOCK as u64, 2 * BLOCK as u64).unwrap();
    (model[15], model[16]) = (None, None);
    same(&device, &model);
    // A tensor that goes leaves its poison.
    device.remove_tensor("k").unwrap();
    same(&device, &model);
    wide(&device);
    same(&device, &model);
    device.clear_poison(0, LENGTH as u64).unwrap();
    for block in &mut model {
        block.get_or_insert_with(|| vec![0; BLOCK]);
    }
    same(&device, &model);
}

#[test]
fn a_damaged_window_can_be_removed() {
    let device = in_memory();
    let mut model = damaged(&device);
    device.write_base(WINDOW as u64 + 8, &[7; 8]).unwrap();
    model[2 * TOKENS].as_mut().unwrap()[8..16].fill(7);
    device.remove_tensor("k").unwrap();
    same(&device, &model);
    assert_eq!(device.stats().blocks.heads_bytes, 0);
}

#[test]
fn lost_blocks_of_windows_outlive_the_process_and_no_others_are_lost_with_them() {
    for flushed in [false, true] {
        let image = Image::in_memory(config().superblock()).unwrap();
        let device = Device::open(image.clone(), &config()).unwrap();
        let mut model = damaged(&device);
        device.write_base(BLOCK as u64 + 8, &[7; 8]).unwrap();
        model[1].as_mut().unwrap()[8..16].fill(7);
        device.write_base(2 * BLOCK as u64, &[5; BLOCK]).unwrap();
        model[2] = Some(vec![5; BLOCK]);
        if flushed {
            device.flush(0, LENGTH as u64).unwrap();
        }
        drop(device);
        for _ in 0..2 {
            let device = Device::open(image.clone(), &config()).unwrap();
            assert_eq!(device.stats().kv_windows.open, u64::from(!flushed));
            same(&device, &model);
            refused(device.write_base(8, &[7; 8]));
        }
        let device = Device::open(image, &config()).unwrap();
        device.flush(0, LENGTH as u64).unwrap();
        same(&device, &model);
    }
}

#[test]
fn a_damaged_window_that_finds_no_room_to_be_coded_anew_shows_what_is_left_all_the_same() {
    let device = Device::new(DeviceConfig { store_bytes: Some(2 * 65536), ..config() }).unwrap();
    wide(&device);
    // Tokens that are all alike are stored once, if none is lost.
    let data = lamina_codec::testing::bytes(5, 2 * BLOCK).repeat(TOKENS);
    device.write_base(0, &data).unwrap();
    let noise = lamina_codec::testing::bytes(10, BLOCK);
    let full = (LENGTH as u64..1 << 20).step_by(BLOCK).find(|at| device.write_base(*at, &noise).is_err());
    let full = full.expect("less room than memory");
    device.flip_stored_bit(1, 20);
    let mut model = model(&data);
    model.iter_mut().skip(1).step_by(2).for_each(|block| *block = None);
    for _ in 0..2 {
        same(&device, &model);
    }
    assert_eq!(device.stats().requests.poison_events, TOKENS as u64);
    let before = device.blocks.used_bytes();
    assert!(device.clear_poison(BLOCK as u64, 1).is_err(), "a block alone takes more room than all");
    device.write_base(8, &[7; 8]).unwrap();
    model[0].as_mut().unwrap()[8..16].fill(7);
    refused(device.write_base(BLOCK as u64 + 8, &[7; 8]));
    assert!(device.flush(0, LENGTH as u64).is_err() && device.blocks.used_bytes() == before);
    same(&device, &model);
    // Once there is room, it is coded.
    device.discard(LENGTH as u64, full - LENGTH as u64).unwrap();
    device.flush(0, LENGTH as u64).unwrap();
    assert_eq!(device.stats().kv_windows.open, 0);
    same(&device, &model);
}

#[test]
fn what_a_partial_store_finds_damaged_is_listed() {
    let device = in_memory();
    device.write_base(0, &lamina_codec::testing::bytes(5, BLOCK)).unwrap();
    device.flip_stored_bit(0, 20);
    let why = device.write_base(8, &[7; 8]).unwrap_err();
    assert!(matches!(why, DeviceError::Damaged { block: 0, .. }), "{why}");
    assert_eq!(listed(&device), [0]);
    refused(device.write_base(8, &[7; 8]));
}

/// Two threads at once, on each of `rounds` rounds.
fn both(rounds: u8, one: impl Fn(u8) + Sync, other: impl Fn(u8), after: impl Fn(u8)) {
    for round in 1..=rounds {
        let barrier = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                barrier.wait();
                one(round);
            });
            barrier.wait();
            other(round);
        });
        after(round);
    }
}

/// The blocks that the threads of these tests meet at: of memory that is no tensor's, or of one
/// window.
const MET: usize = 2 * TOKENS;

#[test]
fn clearing_never_takes_what_was_written_meanwhile() {
    for tensor in [false, true] {
        let device = in_memory();
        if tensor {
            wide(&device);
        }
        let whole = (MET * BLOCK) as u64;
        device.inject_poison(0, whole).unwrap();
        let write = |round: u8| {
            // From the other end, so that they meet.
            for block in (0..MET as u64).rev() {
                device.write_base(block * BLOCK as u64, &[round; BLOCK]).unwrap();
            }
        };
        let clear = |_| device.clear_poison(0, whole).unwrap();
        both(60, write, clear, |round| {
            assert!(read(&device, 0, MET * BLOCK).iter().all(|byte| *byte == round), "a write is gone");
            assert!(listed(&device).is_empty());
            device.inject_poison(0, whole).unwrap();
        });
    }
}

#[test]
fn a_block_is_listed_if_and_only_if_it_is_lost_whoever_came_last() {
    for tensor in [false, true] {
        let device = in_memory();
        if tensor {
            wide(&device);
        }
        let write = |round: u8| {
            for turn in 0..4 * MET {
                let block = (turn * 7 % MET) as u64;
                device.write_base(block * BLOCK as u64, &[round; BLOCK]).unwrap();
            }
        };
        let inject = |_| {
            for turn in 0..4 * MET {
                let block = (turn * 5 % MET) as u64;
                device.inject_poison(block * BLOCK as u64, 1).unwrap();
            }
        };
        both(60, write, inject, |round| {
            let is_lost = |block: &usize| {
                let found = read(&device, block * BLOCK, BLOCK);
                let lost = found.iter().all(|byte| *byte == poison::PATTERN);
                assert!(lost || found.iter().all(|byte| *byte == round), "block {block}");
                lost
            };
            let lost: Vec<_> = (0..MET).filter(is_lost).collect();
            assert_eq!(listed(&device), lost);
        });
    }
}
