//! A store in memory, on a host whose memory runs out: what is told, what is refused, and that
//! nothing is harmed.

use std::{
    collections::BTreeMap,
    fs::File,
    os::unix::fs::MetadataExt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use super::{Device, DeviceConfig, DeviceError, events::Kind};
use lamina_codec::testing::bytes;
use lamina_store::{
    StoreError,
    host_memory::{HostMemory, Left},
    image::Image,
};

const RESERVE: u64 = 16 << 20;
/// What the host has for image and reserve.
const MEMORY: u64 = 40 << 20;

/// A device in memory, and what it should hold.
struct Host {
    device: Device,
    /// What the host has for the image.
    memory: Arc<AtomicU64>,
    file: File,
    model: BTreeMap<u64, Vec<u8>>,
}

/// A block that takes `granules` of 64 bytes, from 2 to 64.
fn block(seed: u64, granules: usize) -> Vec<u8> {
    let mut block = bytes(5 * seed, 4096);
    if granules < 64 {
        block[granules * 64 - 40..].fill(0);
    }
    block
}

fn taken(file: &File) -> u64 {
    file.metadata().unwrap().blocks() * 512
}

impl Host {
    fn new() -> Self {
        let config = DeviceConfig::new(64 << 20, 8 << 20);
        let image = Image::in_memory(config.superblock()).unwrap();
        assert!(image.is_in_memory());
        let file = image.file().try_clone().unwrap();
        let memory = Arc::new(AtomicU64::new(MEMORY));
        let (has, looked_at) = (Arc::clone(&memory), file.try_clone().unwrap());
        let look = move || {
            let bytes = has.load(Relaxed).saturating_sub(taken(&looked_at));
            Some(Left { bytes, group: None })
        };
        let device = Device::open(image.within(HostMemory::new(RESERVE, look)), &config).unwrap();
        Self { device, memory, file, model: BTreeMap::new() }
    }

    fn write(&mut self, at: u64, block: Vec<u8>) -> Result<(), DeviceError> {
        self.device.write_base(at * 4096, &block)?;
        self.model.insert(at, block);
        Ok(())
    }

    /// Stores noise in block after block, until it is refused: the first block that was.
    fn fill(&mut self, from: u64) -> u64 {
        let mut at = from;
        loop {
            match self.write(at, block(at + 1, 64)) {
                Ok(()) => at += 1,
                Err(DeviceError::Store(StoreError::HostMemory { reserve: RESERVE, .. })) => return at,
                Err(other) => panic!("block {at}: {other}"),
            }
        }
    }

    fn left(&self) -> u64 {
        let left = self.device.stats().device.host_memory_left_bytes.unwrap();
        assert_eq!(left, self.memory.load(Relaxed).saturating_sub(taken(&self.file)));
        left
    }

    fn kinds(&self) -> Vec<Kind> {
        self.device.events().iter().map(|event| event.kind).collect()
    }

    fn is_as_it_should_be(&self) {
        let mut found = vec![0; 4096];
        for (at, block) in &self.model {
            self.device.read_base(at * 4096, &mut found).unwrap();
            assert!(found == *block, "block {at}");
        }
    }
}

#[test]
fn a_host_whose_memory_runs_out_is_told_of_and_growth_ends_at_the_reserve() {
    let mut host = Host::new();
    assert_eq!(host.device.stats().device.memory_reserve_bytes, RESERVE);
    let filled = host.fill(0);
    let left = host.left();
    assert!((RESERVE..RESERVE + (1 << 20)).contains(&left), "{left}");
    assert_eq!(host.kinds(), [Kind::MemoryBelow, Kind::MemoryBelow, Kind::MemoryBelow, Kind::NoRoom]);
    let events = host.device.events();
    assert!(
        events[3].text.contains("of the host's memory") && events[3].text.contains("kept free"),
        "{events:?}"
    );
    // Others take memory, and give it back.
    host.memory.fetch_sub(6 << 20, Relaxed);
    assert_eq!(host.fill(filled), filled);
    host.memory.fetch_add(12 << 20, Relaxed);
    let more = host.fill(filled);
    assert!(more > filled + 1000, "{filled} {more}");
    assert!(host.kinds()[4..].contains(&Kind::RoomAgain), "{:?}", host.device.events());
    // So does the device itself.
    host.device.discard(0, 2000 * 4096).unwrap();
    host.model.retain(|at, _| *at >= 2000);
    assert!(host.fill(more) > more + 1000);
    host.is_as_it_should_be();
}

#[test]
fn what_is_stored_is_written_again_in_its_place_whatever_it_takes_then() {
    let mut host = Host::new();
    let filled = host.fill(0);
    let mut lengths = vec![64; usize::try_from(filled).unwrap()];
    for round in 0..3 {
        for (at, length) in (0_u64..).zip(&mut lengths) {
            // Every length there is, each no longer than what was there.
            let wanted = 2 + usize::from(bytes(5 * (at * 7 + round + 1), 8)[7]) % (*length - 1);
            *length = if round == 0 { 64 } else { wanted };
            host.write(at, block(at + round, *length)).unwrap();
        }
        assert!(host.left() >= RESERVE / 2);
    }
    host.is_as_it_should_be();
    // What others took of the reserve is not there to rewrite in.
    host.memory.store(taken(&host.file) + RESERVE / 2, Relaxed);
    let refused =
        (0..filled).find_map(|at| host.write(at, block(at, lengths[usize::try_from(at).unwrap()])).err());
    assert!(refused.is_none_or(|why| why.is_no_room()));
    host.is_as_it_should_be();
}

#[test]
fn what_was_never_written_is_discarded_without_room() {
    let mut host = Host::new();
    // So little above the reserve that one look allows no unit beside the one that was asked for.
    host.memory.store(taken(&host.file) + RESERVE + (256 << 10), Relaxed);
    host.write(5, block(5, 64)).unwrap();
    host.memory.store(0, Relaxed);
    let before = taken(&host.file);
    assert!(host.write(12_000, block(1, 64)).unwrap_err().is_no_room());
    host.device.discard(0, 64 << 20).unwrap();
    assert_eq!(host.device.stats().writes.discarded_blocks, 16_384);
    // Of what was freed no room is kept where memory is scarce.
    assert!(taken(&host.file) < before, "{before}");
    let mut found = vec![1; 4096];
    host.device.read_base(5 * 4096, &mut found).unwrap();
    assert!(found.iter().all(|byte| *byte == 0));
}
