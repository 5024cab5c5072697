//! Coded blocks as the codecs of this program keep them: each by itself, to be decoded as it lies,
//! and all of them without gaps, as in a store.

use std::ops::Range;

use lamina_codec::block::{Bundle, MAX_BUNDLE, Stored};

/// A coded block; one of zeros has no bundle.
pub struct Slot {
    /// What the bundle is.
    pub stored: Option<Stored>,
    /// Its bytes.
    pub bytes: [u8; MAX_BUNDLE],
}

/// Some coded blocks.
#[derive(Default)]
pub struct Kept {
    slots: Vec<Slot>,
    packed: Vec<u8>,
    places: Vec<Range<usize>>,
}

impl Kept {
    /// Keeps one more.
    pub fn push(&mut self, bundle: &Bundle) {
        let coded = if bundle.stored.is_some() { bundle.bytes() } else { &[] };
        let mut bytes = [0; MAX_BUNDLE];
        bytes[..coded.len()].copy_from_slice(coded);
        self.slots.push(Slot { stored: bundle.stored.clone(), bytes });
        let start = self.packed.len();
        self.packed.extend_from_slice(coded);
        self.places.push(start..self.packed.len());
    }

    /// A block by itself.
    pub fn slot(&self, block: usize) -> &Slot {
        &self.slots[block]
    }

    /// Copies a block's bundle out of the store.
    pub fn fetch(&self, block: usize, bytes: &mut [u8; MAX_BUNDLE]) -> Option<&Stored> {
        let stored = self.slots[block].stored.as_ref()?;
        let bundle = &self.packed[self.places[block].clone()];
        bytes[..bundle.len()].copy_from_slice(bundle);
        Some(stored)
    }

    /// Bytes of all bundles.
    pub fn stored_bytes(&self) -> usize {
        self.packed.len()
    }

    /// Flips a bit of a block: of it by itself, or in the store.
    #[cfg(test)]
    pub fn damage(&mut self, block: usize, in_store: bool) {
        let byte = if in_store {
            &mut self.packed[self.places[block].start]
        } else {
            &mut self.slots[block].bytes[0]
        };
        *byte ^= 1;
    }
}
