//! Holes: base bytes of which nothing is stored, and which so are zeros, for who copies a window or
//! looks for what is in it.
//!
//! What is no hole may hold zeros too; what is one never holds anything else. So what is not known
//! is data: blocks of KV tensors, which may be staged or coded with their neighbours, damaged and
//! poisoned blocks, a plain device's, and what lies behind [`MAX_ENTRIES`].

use std::ops::Range;

use super::Device;
use crate::window::Map;
use lamina_codec::BLOCK_BYTES;

/// Index entries that are looked at for one answer: those of 512 MiB, about a millisecond. The map
/// is held meanwhile.
const MAX_ENTRIES: u64 = 1 << 17;

impl Device {
    /// The first byte of this range of the base window that may be anything but zero, or its end.
    pub fn next_data(&self, range: Range<u64>) -> u64 {
        let Some(store) = self.coded_store() else { return range.start };
        // Held, so that no KV tensor comes to be where the store is looked at.
        let map = self.map.read();
        let unknown = Self::first_unknown(&map, &range).start;
        if unknown <= range.start {
            return range.start;
        }
        let found = store.next_data(blocks(range.start..unknown), MAX_ENTRIES);
        (found * BLOCK_BYTES as u64).clamp(range.start, unknown)
    }

    /// The first byte of this range of the base window of which nothing is stored, or its end.
    pub fn next_hole(&self, range: Range<u64>) -> u64 {
        let Some(store) = self.coded_store() else { return range.end };
        let map = self.map.read();
        let (mut at, mut left) = (range.start, MAX_ENTRIES);
        while at < range.end {
            let unknown = Self::first_unknown(&map, &(at..range.end));
            if unknown.start > at {
                let looked = blocks(at..unknown.start);
                let Some(found) = store.next_hole(looked.clone(), left) else { break };
                if found < looked.end {
                    return (found * BLOCK_BYTES as u64).max(at);
                }
                left = left.saturating_sub(looked.end - looked.start);
            }
            at = unknown.end;
        }
        range.end
    }

    /// The first blocks that a range has of a tensor whose blocks are coded together; what is
    /// behind the range if none.
    fn first_unknown(map: &Map, range: &Range<u64>) -> Range<u64> {
        let found = map.windowed_in(range);
        found.map_or(range.end..range.end, |tensor| tensor.info.dpa..tensor.end())
    }
}

/// The blocks that a range touches.
fn blocks(range: Range<u64>) -> Range<u64> {
    range.start / BLOCK_BYTES as u64..range.end.div_ceil(BLOCK_BYTES as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{device::DeviceConfig, layout::Layout, tensor::TensorSpec};
    use lamina_codec::{format::Format, kv::KvLayout, testing::bytes};
    use lamina_store::mode::Mode;

    const BASE: u64 = 64 << 20;

    fn device(mode: Mode) -> Device {
        Device::new(DeviceConfig { mode, ..DeviceConfig::new(BASE, 8 << 20) }).unwrap()
    }

    #[test]
    fn what_was_never_written_discarded_or_written_with_zeros_is_a_hole() {
        let device = device(Mode::Trace);
        assert_eq!((device.next_data(0..BASE), device.next_hole(0..BASE)), (BASE, 0));
        device.write_base(9 * 4096 + 100, &bytes(5, 5000)).unwrap();
        assert_eq!((device.next_data(0..BASE), device.next_hole(0..BASE)), (9 * 4096, 0));
        let (inside, end) = (9 * 4096 + 7, 11 * 4096);
        assert_eq!((device.next_data(inside..BASE), device.next_hole(inside..BASE)), (inside, end));
        assert_eq!((device.next_data(end..BASE), device.next_data(100..9 * 4096)), (BASE, 9 * 4096));
        device.write_base(9 * 4096, &[0; 4096]).unwrap();
        device.discard(10 * 4096, 4096).unwrap();
        assert_eq!((device.next_data(0..BASE), device.next_hole(inside..BASE)), (BASE, inside));
    }

    #[test]
    fn what_is_not_known_is_data() {
        let plain = device(Mode::Plain);
        assert_eq!((plain.next_data(5..BASE), plain.next_hole(5..BASE)), (5, BASE));
        let device = device(Mode::Trace);
        let layout = Layout::Kv(KvLayout::rows(512, 64));
        let spec = TensorSpec {
            name: "kv".to_owned(),
            dpa: Some(1 << 20),
            length: 64 << 10,
            elements: None,
            shape: Vec::new(),
            format: Format::Bf16,
            layout,
            codec: None,
            base: None,
        };
        device.create_tensor(spec).unwrap();
        let end = (1 << 20) + (64 << 10);
        assert_eq!((device.next_data(0..BASE), device.next_hole(1 << 20..BASE)), (1 << 20, end));
        assert_eq!(device.next_data(end..BASE), BASE);
        device.inject_poison(2 << 20, 1).unwrap();
        assert_eq!(device.next_data(end..BASE), 2 << 20);
        assert_eq!(device.next_hole(2 << 20..BASE), (2 << 20) + 4096);
    }

    #[test]
    fn more_entries_than_are_looked_at_are_data() {
        let store = device(Mode::Trace);
        let store = store.coded_store().unwrap();
        assert_eq!((store.next_data(3..100, 10), store.next_data(3..100, 97)), (13, 100));
        assert_eq!((store.next_hole(3..100, 10), store.next_hole(3..100, 0)), (Some(3), None));
    }
}
