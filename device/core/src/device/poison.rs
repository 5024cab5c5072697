//! Poison: blocks whose bytes are lost, and what becomes of them (CXL 3.1, 8.2.9.9.4, as far as a
//! device of blocks has it).
//!
//! The rules:
//! * A block is poisoned when its stored planes or its index entry do not check, or when somebody
//!   injects poison. What it held is given up: its entry says so, also to the next process, and its
//!   segment is freed.
//! * It reads as [`PATTERN`] in every byte: NaN in every floating-point format, -1 in every integer
//!   one. Views show what their arithmetic makes of that. A read is no error, because an error
//!   would end a guest's machine rather than its program.
//! * Who finds a block damaged poisons what was read, not what somebody has written there since.
//! * A stored block of a KV window that is lost takes with it those blocks of the window that have
//!   bytes in it ([`lamina_codec::kv`]). These are poisoned, the others keep what they hold: the
//!   window is coded anew in address order, where each block stands alone. As long as there is no
//!   room for that, everybody who decodes it finds the same.
//! * A write of the whole block clears its poison. A write of a part of it is refused: what the
//!   rest should be, nobody knows.
//! * Every poisoned block is listed until it is cleared, and every poisoning is an event, with a
//!   number, that is known for a while even if the block is soon written ([`Device::poisonings`]).
//! * What is cleared is looked at again under the lock that whoever writes it holds.

use std::ops::Range;

use serde::Serialize;

use super::{
    Device, DeviceError,
    coding::{Region, owner},
};
use crate::window::Map;
use lamina_codec::BLOCK_BYTES;
pub use lamina_store::cause::Cause;
use lamina_store::{StoreError, cause::Why, losses::Loss};

/// What each byte of a poisoned block reads as.
pub const PATTERN: u8 = 0xff;

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

impl Poisoned {
    fn new(map: &Map, loss: Loss<Why>) -> Self {
        let length = BLOCK_BYTES as u64;
        let dpa = loss.block * length;
        let tensor = map.tensor_at(dpa).map(|tensor| tensor.info.name.clone());
        let Why { cause, text } = loss.why;
        Self { dpa, length, tensor, cause, why: text.as_ref().to_owned(), event: loss.event }
    }
}

impl Device {
    /// The poisoned blocks, by DPA.
    pub fn poison(&self) -> Vec<Poisoned> {
        let map = self.map();
        let listed = self.coded_store().map(|store| store.losses().listed()).unwrap_or_default();
        listed.into_iter().map(|loss| Poisoned::new(&map, loss)).collect()
    }

    /// Where the first poisoned block of a base range begins.
    pub fn first_poison(&self, range: &Range<u64>) -> Option<u64> {
        let listed = self.coded_store()?.losses().listed_in(blocks_of(range));
        listed.into_iter().next().map(|block| block * BLOCK_BYTES as u64)
    }

    /// Poisonings so far: the number of the last event.
    pub fn poison_events(&self) -> u64 {
        self.poison_now().1
    }

    /// The poisonings behind event `event`, in order, also of blocks that are poisoned no more; and
    /// how many there were besides, of which too much is past to know which.
    pub fn poisonings(&self, event: u64) -> (Vec<Poisoned>, u64) {
        let map = self.map();
        let (losses, missed) =
            self.coded_store().map(|store| store.losses().since(event)).unwrap_or_default();
        (losses.into_iter().map(|loss| Poisoned::new(&map, loss)).collect(), missed)
    }

    /// Blocks that are poisoned now, and poisonings so far.
    pub(super) fn poison_now(&self) -> (u64, u64) {
        self.coded_store().map(|store| store.losses().now()).unwrap_or_default()
    }

    /// Poisons every block that this base range touches, as damage would: what they held is lost.
    ///
    /// # Errors
    /// [`DeviceError::PastWindow`]; [`DeviceError::Plain`] of a device that keeps no checks;
    /// [`DeviceError::Store`] if there is no room to say so, or for what is left of a KV window to
    /// be coded without it; then the blocks before are poisoned.
    pub fn inject_poison(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        let range = self.inside(super::Window::Base, offset, length)?;
        if self.coded_store().is_none() {
            return Err(DeviceError::Plain);
        }
        let why = Why::new(Cause::Injected, "poison was injected");
        let blocks = blocks_of(&range);
        let mut next = blocks.start;
        while next < blocks.end {
            let map = self.map.read();
            next = Region::of(self, owner(&map, next)).coding().poison(next..blocks.end, &why)?;
        }
        Ok(())
    }

    /// Clears the poison of this base range: its poisoned blocks are zeros then, others stay as
    /// they are.
    ///
    /// # Errors
    /// As [`Device::write_base`].
    pub fn clear_poison(&self, offset: u64, length: u64) -> Result<(), DeviceError> {
        let range = self.inside(super::Window::Base, offset, length)?;
        let Some(store) = self.coded_store() else { return Ok(()) };
        let blocks = blocks_of(&range);
        let mut cleared = 0;
        for block in store.losses().listed_in(blocks.clone()) {
            // With its window, maybe.
            if block < cleared {
                continue;
            }
            let map = self.map.read();
            cleared = Region::of(self, owner(&map, block)).coding().clear_poison(block..blocks.end)?;
        }
        Ok(())
    }

    /// Whether reading failed because what is stored is damaged.
    pub fn is_damage(why: &DeviceError) -> bool {
        is_damage(why)
    }
}

/// Whether reading failed because what is stored is damaged.
pub(super) fn is_damage(why: &DeviceError) -> bool {
    matches!(
        why,
        DeviceError::Damaged { .. }
            | DeviceError::BaseLost { .. }
            | DeviceError::Store(StoreError::Entry { .. })
    )
}

/// The blocks that a base range touches.
fn blocks_of(range: &Range<u64>) -> Range<u64> {
    let block = BLOCK_BYTES as u64;
    let end = if range.is_empty() { range.start / block } else { range.end.div_ceil(block) };
    range.start / block..end
}

/// Tells the log.
pub(super) fn say_lost(block: u64, why: &Why) {
    let dpa = block * BLOCK_BYTES as u64;
    tracing::error!("the block at DPA {dpa:#x} is poisoned: {}", why.text);
}
