//! The device: the walk of a load and of a store, over parts that own what they work on. The only
//! thing the servers know.
//!
//! | part | owns |
//! |---|---|
//! | namespace (`map`, [`tables`], [`device_image`]) | tensors and views, who owns which block |
//! | block service ([`blocks`]) | the store or the flat memory, what was decoded and not yet read |
//! | KV staging ([`windows`]) | open KV windows |
//! | accounts ([`accounts`]) | counters, charges, quotas, [observers] |
//!
//! A walk asks the namespace first. That says the owner, whose [`coding`] asks staging and blocks,
//! which charge and count. Nothing asks back.
//!
//! The rules:
//! * Every method may be called from any thread. Reads of different blocks never wait for each
//!   other, nor for the coding of a write to another block, but for those of one KV window: see
//!   `windows`.
//! * A read or write that is not wholly inside its window changes nothing and is an error.
//! * Who owns a block, and so how it is coded, is decided under the map's lock, which every write
//!   holds for its block: charges and counters always agree with the map.
//! * A read that finds its map stale begins again with the new one.
//! * A write to a block is atomic to readers of that block; a request over several blocks is not,
//!   as with any memory.

mod accounts;
mod against;
mod bases;
mod blocks;
mod blockwise;
mod charge;
mod coding;
mod config;
mod decoded;
mod derived;
mod detach;
mod device_image;
mod error;
pub mod events;
#[cfg(test)]
mod holds;
mod holes;
mod noted;
mod observers;
mod parallel;
mod partition;
mod partition_table;
pub mod poison;
mod reads;
mod recovered;
mod room;
mod scratch;
mod sources;
mod staged;
mod tables;
mod targets;
mod tensor_views;
mod transitions;
mod watcher;
mod windows;
mod writes;

use std::{
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::{Mutex, RwLock};

#[cfg(test)]
pub(crate) use self::device_image::text_of;
use self::{
    accounts::Accounts, blocks::BlockService, charge::Charge, device_image::DeviceImage, events::Events,
    noted::LastNoted, observers::Observers, recovered::Recovered, staged::StagedPlaces, windows::KvStaging,
};
pub use self::{
    config::{DeviceConfig, MAX_OPEN_WINDOWS},
    error::DeviceError,
    partition::Partition,
    partition_table::{MAX_PARTITION_NAME_BYTES, MAX_PARTITIONS},
    room::Space,
    sources::{Places, Source, Stamp},
    tables::MAX_AT_ONCE,
    tensor_views::TensorView,
    watcher::{AsWords, Moved, Watcher},
};
use crate::partition_table::PartitionState;
pub use lamina_store::{KeptRoom, image::PartitionConfig};

use crate::{
    counters::{Compared, Slots},
    stats::{Stats, Subject, members::Members},
    window::Map,
};
pub use crate::{
    stats::StatsReport,
    tensor::{SourceId, TensorInfo, TensorSpec},
    window::ViewInfo,
};
use lamina_codec::{BLOCK_BYTES, Codec};
use lamina_store::{
    Basis, Store, checkpoint,
    entry::Entry,
    image::{Image, Superblock},
    mode::Mode,
    snapshot,
};

/// One of the two windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Window {
    /// The capacity.
    Base,
    /// The aliases.
    Views,
}

impl std::fmt::Display for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Base => "base",
            Self::Views => "views",
        })
    }
}

/// A CXL Type-3 memory device.
pub struct Device {
    config: DeviceConfig,
    map: RwLock<Arc<Map>>,
    blocks: Arc<BlockService>,
    windows: KvStaging,
    accounts: Arc<Accounts>,
    /// The image that all this is kept in, if it is.
    image: Option<DeviceImage>,
    events: Events,
    noted: Mutex<LastNoted>,
    /// Processes that served it and died.
    worker_deaths: AtomicU64,
    started: Instant,
}

impl Device {
    /// An empty device. Takes no time or memory in proportion to its windows.
    ///
    /// # Errors
    /// [`DeviceError::Size`] for window sizes that cannot be; [`DeviceError::Store`] if the address
    /// space cannot be had; partitions that cannot be.
    pub fn new(config: DeviceConfig) -> Result<Self, DeviceError> {
        config.check()?;
        let partition_table = config.partition_table()?;
        let map = Map::new(&partition_table, &[]).draft().finish_all();
        let observers = Observers::new(&config, None)?;
        let accounts = Accounts { stats: Stats::default(), partition_table, observers };
        let blocks = blocks::Backing::new(&config)?;
        Ok(Self::with(config, map, blocks, accounts, None, None))
    }

    fn with(
        config: DeviceConfig,
        map: Map,
        blocks: blocks::Backing,
        accounts: Accounts,
        image: Option<DeviceImage>,
        places: Option<StagedPlaces>,
    ) -> Self {
        let accounts = Arc::new(accounts);
        let blocks = Arc::new(BlockService::new(&config, blocks, accounts.clone()));
        Self {
            windows: KvStaging::new(&config, blocks.clone(), accounts.clone(), places),
            map: RwLock::new(Arc::new(map)),
            blocks,
            accounts,
            image,
            events: Events::default(),
            noted: Mutex::default(),
            worker_deaths: AtomicU64::new(0),
            started: Instant::now(),
            config,
        }
    }

    /// The device that lies in `image`, as the last process left it: what `config` says otherwise
    /// of its sizes, mode and codec does not count.
    ///
    /// # Errors
    /// As [`Device::new`]; [`DeviceError::Image`] for an image that no device made.
    pub fn open(image: Image, config: &DeviceConfig) -> Result<Self, DeviceError> {
        let Superblock {
            base_bytes, views_bytes, store_bytes, mode, codec, open_windows, partitions, ..
        } = image.superblock().clone();
        let store_bytes = Some(store_bytes);
        let least = partitions.len().max(1) as u64;
        if open_windows < least {
            return Err(DeviceError::OpenWindows { windows: open_windows, least });
        }
        let open_windows = usize::try_from(open_windows).unwrap_or(usize::MAX);
        let config = DeviceConfig {
            base_bytes,
            views_bytes,
            store_bytes,
            mode,
            codec,
            open_windows,
            partitions,
            ..config.clone()
        };
        config.check()?;
        let mut partition_table = config.partition_table()?;
        let mut stats = Stats::default();
        let image = checkpoint::settle(image, config.first_process)?.with_ledger(config.worker);
        let mut observers = Observers::new(&config, Some(&image))?;
        let (image, map) = DeviceImage::open(image, &config, &partition_table)?;
        let partitions = partition_table.partitions.iter_mut().flat_map(PartitionState::counters);
        let of_members = observers.members_mut().into_iter().flat_map(Members::counters);
        let counters = partitions.chain(stats.counters()).chain(of_members);
        counters.for_each(|counter| counter.keep(image.counters().take()));
        // An image of an older program has zeros there.
        let later = partition_table
            .partitions
            .iter_mut()
            .flat_map(PartitionState::later_counters)
            .chain(stats.later_counters());
        later.for_each(|counter| counter.keep(image.counters().take()));
        let fit = |noted: &[u64]| noted::fit(noted, &stats, &partition_table, &map);
        let found = |recovered: &mut Recovered, block, entry: &Entry, charge: &Charge| {
            partition_table.found(block, charge.bytes());
            recovered.found(&map, block, entry, charge);
        };
        let (blocks, basis) = blocks::Backing::open(image.image(), fit, found)?;
        let places = StagedPlaces::open(image.image())?;
        let accounts = Accounts { stats, partition_table, observers };
        match basis {
            Basis::Found(all) => all.into_iter().for_each(|recovered| recovered.settle(&accounts.stats)),
            Basis::Noted { accounts: noted, changed } => accounts.go_on(&map, &noted, &changed),
        }
        let device = Self::with(config, map, blocks, accounts, Some(image), Some(places));
        if device.image.as_ref().is_some_and(DeviceImage::renumbered) {
            // Else the next process would find these counters at zero.
            if let Err(why) = device.keep_all(&device.map()) {
                tracing::warn!("some counters will begin at zero with the next process: {why}");
            }
        }
        device.windows.reopen(&device.map());
        if let (Some(image), Some(store)) = (&device.image, device.coded_store()) {
            store.keep_checkpoints(image.image(), image.tables())?;
        }
        device.recover_windows()?;
        device.note_accounts();
        Ok(device)
    }

    /// Makes a checkpoint on the disk that the image is on: after a crash of the host the device is
    /// as it is now. What is staged in KV windows is no part of it, so [flush](Self::flush) what
    /// should be.
    ///
    /// # Errors
    /// What the system says. Then the last one before is what a crash leaves.
    pub fn sync(&self) -> std::io::Result<()> {
        self.sync_as(false)
    }

    /// As [`Self::sync`], before the device ends: who opens the image next need not ask whether the
    /// host crashed.
    ///
    /// # Errors
    /// As [`Self::sync`].
    pub fn sync_last(&self) -> std::io::Result<()> {
        self.sync_as(true)
    }

    fn sync_as(&self, last: bool) -> std::io::Result<()> {
        let synced = match self.coded_store().and_then(|store| store.checkpoint(last)) {
            Some(made) => made,
            None => self.image().map_or(Ok(()), |image| image.file().sync_data()),
        };
        synced.inspect_err(|why| self.events.not_synced(why))
    }

    /// Waits until [`Self::sync`] should be called because much of the store is held for the last
    /// one, or for so long.
    pub fn wait_to_sync(&self, most: Option<Duration>) {
        match self.coded_store() {
            Some(store) => store.wait_to_checkpoint(most),
            None => std::thread::sleep(most.unwrap_or(Duration::from_secs(60))),
        }
    }

    /// Writes a snapshot of the image to `out`: the bytes of data in it. It shows what was flushed
    /// before, as at one moment (of a plain device, each block at some moment); nobody waits for
    /// `out` to take it. If the store has no room left meanwhile, it is given up.
    ///
    /// # Errors
    /// What the system says; a device that lies in no image has no snapshots, and one at a time is
    /// saved.
    pub fn save(&self, out: &mut impl std::io::Write) -> std::io::Result<u64> {
        let image = self.image.as_ref().ok_or(std::io::ErrorKind::Unsupported)?;
        let saving = self.coded_store().map(|store| store.begin_saving(image.tables())).transpose()?;
        snapshot::save(image.image(), saving.as_ref(), out)
    }

    /// Says that so many processes that served this device died before this one.
    pub fn set_worker_deaths(&self, deaths: u64) {
        self.worker_deaths.store(deaths, Ordering::Relaxed);
    }

    /// Counts a panic of the process that serves this device.
    pub fn count_panic(&self) {
        self.accounts.stats.panics.add(1);
    }

    /// The image that the device lies in.
    pub fn image(&self) -> Option<&Image> {
        self.image.as_ref().map(DeviceImage::image)
    }

    /// Bytes of the base window.
    pub fn base_bytes(&self) -> u64 {
        self.config.base_bytes
    }

    /// Bytes of the views window.
    pub fn views_bytes(&self) -> u64 {
        self.config.views_bytes
    }

    /// Which device this is.
    pub fn mode(&self) -> Mode {
        self.config.mode
    }

    /// The codec of tensors that name none.
    pub fn codec(&self) -> Codec {
        self.config.codec
    }

    /// Counts a store into the views window, which has no effect on the device.
    pub fn count_refused_view_store(&self, bytes: u64) {
        self.accounts.stats.refused_view_stores.add(1);
        self.accounts.stats.refused_view_bytes.add(bytes);
    }

    /// The base ranges that a read of this range of the views window depends on.
    pub fn base_under_views(&self, offset: u64, length: u64) -> Vec<Range<u64>> {
        let range = offset..offset.saturating_add(length).min(self.config.views_bytes);
        let map = self.map();
        map.aliases_in(&range)
            .filter_map(|alias| {
                let start = alias.info.offset;
                let wanted = range.start.max(start) - start..range.end.min(start + alias.info.length) - start;
                alias.base_under(wanted)
            })
            .collect()
    }

    /// The ranges of the views window that show any of this base range.
    pub fn views_over_base(&self, offset: u64, length: u64) -> Vec<Range<u64>> {
        let range = offset..offset.saturating_add(length).min(self.config.base_bytes);
        self.map().aliases_over(range.clone()).filter_map(|alias| alias.over(&range)).collect()
    }

    /// Everything counted, now.
    pub fn stats(&self) -> StatsReport {
        if let Some(store) = self.coded_store() {
            let (blocks, bytes) = store.take_moved();
            self.accounts.stats.moved_blocks.add(blocks);
            self.accounts.stats.moved_bytes.add(bytes);
            self.accounts.stats.index_written.add(blocks);
        }
        self.accounts.stats.report(&Subject {
            mode: self.config.mode,
            codec: self.config.codec,
            base_bytes: self.config.base_bytes,
            views_bytes: self.config.views_bytes,
            store_capacity: self.blocks.capacity_bytes(),
            host_memory: self.look_at_memory(),
            worker_deaths: self.worker_deaths.load(Ordering::Relaxed),
            syncs: self.coded_store().map_or((0, 0), Store::checkpoints_made),
            uptime_seconds: self.started.elapsed().as_secs_f64(),
            compared: Compared(self.accounts.observers.are_on()),
            map: &self.map(),
            partition_table: &self.accounts.partition_table,
            interleave: self.accounts.observers.members_report(),
            modelled: self.config.watcher.as_ref().map_or_else(Vec::new, |watcher| watcher.report()),
            index_cache_entries: self.config.index_cache_entries.max(1),
            windows: self.windows.now(),
            poison: self.poison_now(),
        })
    }

    /// Has `watcher` told of what requests move from now on, until [`Device::unwatch`].
    pub fn watch(&self, watcher: Arc<dyn Watcher>) {
        self.accounts.observers.watchers().add(watcher);
    }

    /// Tells a watcher nothing more.
    pub fn unwatch(&self, watcher: &Arc<dyn Watcher>) {
        self.accounts.observers.watchers().remove(watcher);
    }

    /// The store, if the mode codes.
    fn coded_store(&self) -> Option<&Store> {
        self.blocks.store()
    }

    /// Flips a stored bit, for tests of what notices it.
    #[cfg(test)]
    pub(crate) fn flip_stored_bit(&self, block: u64, bit: usize) {
        self.blocks.flip_stored_bit(block, bit);
    }

    /// Where each of these blocks lies in the store, and how it is coded.
    #[cfg(test)]
    pub(crate) fn entries(&self, blocks: std::ops::Range<u64>) -> Vec<lamina_store::entry::Entry> {
        let store = self.blocks.store().expect("blocks that are coded");
        blocks.map(|block| store.entry(block).unwrap()).collect()
    }

    fn map(&self) -> Arc<Map> {
        self.map.read().clone()
    }

    /// The request's range, if it lies inside its window.
    fn inside(&self, window: Window, offset: u64, length: u64) -> Result<Range<u64>, DeviceError> {
        let size = match window {
            Window::Base => self.config.base_bytes,
            Window::Views => self.config.views_bytes,
        };
        match offset.checked_add(length) {
            Some(end) if end <= size => Ok(offset..end),
            _ => Err(DeviceError::PastWindow { window, offset, length, size }),
        }
    }
}

/// The block that holds base offset `at`, and the place in it.
fn locate(at: u64) -> (u64, usize) {
    let block = BLOCK_BYTES as u64;
    (at / block, usize::try_from(at % block).expect("less than a block"))
}

/// Bytes of the lines of 64 bytes that `part` of a block touches.
fn lines(part: &Range<usize>) -> u64 {
    if part.is_empty() {
        return 0;
    }
    (part.end.next_multiple_of(64) - part.start / 64 * 64) as u64
}

/// The place of `block` in memory that has something for each.
fn by_index(block: u64) -> usize {
    usize::try_from(block).expect("a block of this device")
}

#[cfg(test)]
mod counter_tests;
#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod death_tests;
#[cfg(test)]
mod derived_tests;
#[cfg(test)]
mod detach_tests;
#[cfg(test)]
mod full_disk_tests;
#[cfg(test)]
mod image_tests;
#[cfg(test)]
mod memory_tests;
#[cfg(test)]
mod name_tests;
#[cfg(test)]
mod observer_tests;
#[cfg(test)]
mod packed_tests;
#[cfg(test)]
mod poison_tests;
#[cfg(test)]
mod snapshot_tests;
#[cfg(test)]
mod table_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod version_tests;
#[cfg(test)]
mod window_tests;
