//! Poison: blocks whose bytes are lost, and what becomes of them (CXL 3.1, 8.2.9.9.4, as far as a device of blocks has it).
//!
//! The rules:
//! * A block is poisoned when its stored planes or its index entry do not check, or when somebody injects poison. What it held is given up: its
//!   entry says so, also to the next process, and its segment is freed.
//! * It reads as [`PATTERN`] in every byte: NaN in every floating-point format, -1 in every integer one. Views show what their arithmetic makes of that. A read is no
//!   error, because an error would end a guest's machine rather than its program.
//! * Who finds a block damaged poisons what was read, not what somebody has written there since.
//! * One block of a KV window that is lost makes the window lost: all its blocks are poisoned. A store into such a window begins from the pattern.
//! * A write of the whole block clears its poison. A write of a part of it is refused: what the rest should be, nobody knows.
//! * Every poisoned block is listed until it is cleared, and every poisoning is an event, with a number.

use std::{collections::BTreeMap, ops::Range};

use parking_lot::Mutex;
use serde::Serialize;

use super::{
    Device, DeviceError,
    charge::{self, Charge},
};
use crate::{
    BLOCK_BYTES,
    stats::Counter,
    store::{StoreError, entry::Entry},
};

/// What each byte of a poisoned block reads as.
pub const PATTERN: u8 = 0xff;

/// Why a block is poisoned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Its stored bytes, or those of another block of its KV window, did not check.
    Damaged,
    /// Somebody asked for it.
    Injected,
    /// It was poisoned when the image was opened.
    Found,
}

/// A poisoned block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Poisoned {
    /// Where it begins.
    pub dpa: u64,
    /// Its bytes.
    pub length: u64,
    /// The tensor that owns it.
    pub tensor: Option<String>,
    /// Why it is poisoned.
    pub cause: Cause,
    /// What was found.
    pub why: String,
    /// The number of the event, from 1.
    pub event: u64,
}

/// The poison of a device.
#[derive(Default)]
pub(super) struct Poison {
    /// By block.
    listed: Mutex<BTreeMap<u64, (Cause, String, u64)>>,
    events: Counter,
}

impl Poison {
    /// Notes that a block was poisoned before the device was opened.
    pub(super) fn found(&self, block: u64) {
        self.note(block, Cause::Found, "it was poisoned when the image was opened".to_owned());
    }

    /// Whether it was not listed before.
    fn note(&self, block: u64, cause: Cause, why: String) -> bool {
        let mut listed = self.listed.lock();
        let std::collections::btree_map::Entry::Vacant(place) = listed.entry(block) else { return false };
        self.events.add(1);
        place.insert((cause, why, self.events.get()));
        true
    }

    /// Notes that a block was written.
    pub(super) fn written(&self, block: u64) {
        let mut listed = self.listed.lock();
        if !listed.is_empty() {
            listed.remove(&block);
        }
    }

    /// Blocks that are poisoned now, and poisonings so far.
    pub(super) fn now(&self) -> (u64, u64) {
        (self.listed.lock().len() as u64, self.events.get())
    }
}

impl Device {
    /// The poisoned blocks, by DPA.
    pub fn poison(&self) -> Vec<Poisoned> {
        let map = self.map();
        let block = BLOCK_BYTES as u64;
        let poisoned = |(number, (cause, why, event)): (&u64, &(Cause, String, u64))| Poisoned {
            dpa: number * block,
            length: block,
            tensor: map.tensor_at(number * block).map(|tensor| tensor.info.name.clone()),
            cause: *cause,
            why: why.clone(),
            event: *event,
        };
        self.poison.listed.lock().iter().map(poisoned).collect()
    }

    /// Poisonings so far: the number of the last event.
    pub fn poison_events(&self) -> u64 {
        self.poison.events.get()
    }

    /// Poisons every block that this base range touches, as damage would: what they held is lost.
    ///
    /// # Errors
    /// [`DeviceError::PastWindow`]; [`DeviceError::Plain`] of a device that keeps no checks.
    pub fn inject_poison(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        let range = self.inside(super::Window::Base, offset, length)?;
        if self.coded_store().is_none() {
            return Err(DeviceError::Plain);
        }
        // What is staged of a window is given up with it.
        self.close_windows(range.clone())?;
        let block = BLOCK_BYTES as u64;
        for number in range.start / block..range.end.div_ceil(block) {
            self.lose(number..number + 1, Cause::Injected, "poison was injected", |_| true);
        }
        Ok(())
    }

    /// Clears the poison of this base range: its poisoned blocks are zeros then, others stay as they are.
    ///
    /// # Errors
    /// As [`Device::write_base`].
    pub fn clear_poison(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        let range = self.inside(super::Window::Base, offset, length)?;
        let block = BLOCK_BYTES as u64;
        let blocks = range.start / block..range.end.div_ceil(block);
        let listed: Vec<u64> = self.poison.listed.lock().range(blocks).map(|(number, _)| *number).collect();
        for number in listed {
            self.write_base(number * block, &[0; BLOCK_BYTES])?;
        }
        self.close_windows(range)
    }

    /// Whether reading failed because what is stored is damaged.
    pub(crate) fn is_damage(why: &DeviceError) -> bool {
        matches!(why, DeviceError::Damaged { .. } | DeviceError::Store(StoreError::Entry { .. }))
    }

    /// Poisons the blocks of a window of which one was found damaged. The caller holds the window's lock, so that they are what they were.
    pub(super) fn found_window_damage(&self, blocks: Range<u64>, why: &DeviceError) {
        self.lose(blocks, Cause::Damaged, &why.to_string(), |_| true);
    }

    /// Poisons a block that was found damaged by this entry, or has none that can be read. If it was written meanwhile it is another one, and stays.
    pub(super) fn found_damage(&self, block: u64, entry: Option<&Entry>, why: &DeviceError) {
        self.lose(block..block + 1, Cause::Damaged, &why.to_string(), |now| now == entry);
    }

    fn lose(&self, blocks: Range<u64>, cause: Cause, why: &str, meant: impl Fn(Option<&Entry>) -> bool) {
        let Some(store) = self.coded_store() else { return };
        // A reader may be here that holds the map.
        let map = self.map.read_recursive();
        for block in blocks {
            let Some(old) = store.poison(block, &meant) else { continue };
            if let Some(old) = old {
                self.stats.replaced(&old, &Entry::default());
                let before = Charge::of(&old);
                self.unaccount(block, 0, before.bytes());
                charge::charge(&self.stats, &map, block, before, Charge::default());
            }
            self.windows.decoded.lock().forget(block);
            if self.poison.note(block, cause, why.to_owned()) {
                let dpa = block * BLOCK_BYTES as u64;
                tracing::error!("the block at DPA {dpa:#x} is poisoned: {why}");
            }
        }
    }
}
