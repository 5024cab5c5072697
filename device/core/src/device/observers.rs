//! Observers: what is known of devices that this one is compared with.
//!
//! The rules:
//! * One event a fetched block and one a stored block. An observer adds what it makes of them to
//!   the request's tally, or to counters of its own.
//! * Observers see, and change nothing: stored bytes, answers and the device's own counters are the
//!   same without them.
//! * Off, nothing is computed and nothing is told: what they would have counted is left out of
//!   every report.

use std::ops::Range;

use lamina_codec::{
    BLOCK_BYTES, BlockWords, Codec, block::is_zero, format::Format, plane::PlaneMask, view::View,
};
use lamina_store::{self as store, StoreError, entry::Entry, image::Image, memory::Memory, mode::Mode};

use super::{
    DeviceConfig, by_index,
    charge::{By, Charge},
    lines,
    scratch::Pool,
    watcher::{self, AsWords, Watchers},
};
use crate::stats::{IndexCache, InterleaveReport, Stats, Tally, members::Members};

/// One block was fetched for a request, or given from what was fetched before.
pub(super) struct Fetch<'a> {
    pub(super) block: u64,
    /// Bytes of it that the request asked for. None of a block that is fetched because of others of
    /// its KV window.
    pub(super) requested: &'a [Range<usize>],
    /// Bytes that the store gave for it, if it was looked for there.
    pub(super) stored: Option<u64>,
    /// Whether a device that codes each block by itself fetches it now, too.
    pub(super) by_itself: bool,
    /// The format of what owns it.
    pub(super) format: Format,
    pub(super) codec: Codec,
    /// The view that is read, if it is one.
    pub(super) view: Option<&'a View>,
    /// The planes that were fetched.
    pub(super) planes: PlaneMask,
    /// What it was fetched by, if it was and the mode has entries.
    pub(super) entry: Option<&'a Entry>,
}

/// One block was stored into.
pub(super) struct Change<'a> {
    pub(super) block: u64,
    /// The codec of what owns it.
    pub(super) codec: Codec,
    /// The parts of it that a host stored.
    pub(super) parts: &'a [Range<usize>],
    /// How it was coded, if it was: a KV window is coded later.
    pub(super) coded: Option<Coded<'a>>,
    /// What all of it was read by, if it was read before it was coded.
    pub(super) read: Option<&'a Entry>,
}

/// A block was coded and published.
pub(super) struct Coded<'a> {
    pub(super) words: &'a BlockWords,
    pub(super) charge: Charge,
    pub(super) by: By,
    /// What it is stored as, if the mode has entries.
    pub(super) entry: Option<&'a Entry>,
}

/// Who is told of fetches and stores.
trait Observer {
    fn fetched(&self, fetch: &Fetch<'_>, tally: &mut Tally);
    fn stored(&self, change: &Change<'_>, stats: &Stats, tally: &mut Tally);
}

/// All observers of a device.
pub(super) struct Observers {
    on: Option<On>,
    /// The devices that the base window is interleaved over, if it is. Without observers they count
    /// nothing, but images keep room for their counters.
    members: Option<MemberDevices>,
    /// Who models hardware or records, whether the others are on or not.
    watchers: Watchers,
}

struct On {
    index: Option<OwnIndex>,
    generic: Generic,
}

/// A device without compression or planes.
struct Plain;

/// The modelled cache of this device's index entries.
struct OwnIndex(IndexCache);

/// The paper's GComp: every block compressed whole, by the generic codec of its tensor.
struct Generic {
    mode: Mode,
    /// A byte a block: granules that it would store.
    granules: Memory,
    index: IndexCache,
    encoders: Pool,
}

struct MemberDevices {
    members: Members,
    /// Whether the device keeps words at their addresses, so that what is fetched is what is asked
    /// for.
    flat: bool,
}

impl Observers {
    pub(super) fn new(config: &DeviceConfig, image: Option<&Image>) -> Result<Self, StoreError> {
        let on = || {
            let granules = match image {
                Some(image) => image.gcomp()?,
                None => Memory::reserve("comparison with gcomp", store::blocks(config.base_bytes))?,
            };
            let index = || IndexCache::new(config.index_cache_entries);
            let own = (config.mode != Mode::Plain).then(|| OwnIndex(index()));
            Ok::<_, StoreError>(On {
                index: own,
                generic: Generic { mode: config.mode, granules, index: index(), encoders: Pool::default() },
            })
        };
        let members = config.interleaving.map(|interleaving| MemberDevices {
            members: Members::new(interleaving),
            flat: config.mode == Mode::Plain,
        });
        let watchers = Watchers::new(config.watcher.clone());
        Ok(Self { on: config.observe.then(on).transpose()?, members, watchers })
    }

    /// Whether there are any.
    pub(super) fn are_on(&self) -> bool {
        self.on.is_some()
    }

    /// The devices that the region is interleaved over, whose counters an image keeps.
    pub(super) fn members_mut(&mut self) -> Option<&mut Members> {
        self.members.as_mut().map(|devices| &mut devices.members)
    }

    /// What is told of these devices.
    pub(super) fn members_report(&self) -> Option<InterleaveReport> {
        self.members().map(Members::report)
    }

    /// Makes sure that what is kept of these blocks can be written.
    pub(super) fn ensure(&self, blocks: Range<u64>) -> Result<(), StoreError> {
        match &self.on {
            Some(on) => on.generic.granules.ensure(by_index(blocks.start)..by_index(blocks.end)),
            None => Ok(()),
        }
    }

    #[inline]
    pub(super) fn fetched(&self, fetch: &Fetch<'_>, tally: &mut Tally) {
        self.each(|observer| observer.fetched(fetch, tally));
        self.watchers.each(|watcher| {
            watcher::fetched(watcher, fetch, self.as_words(fetch.block, fetch.codec));
        });
    }

    #[inline]
    pub(super) fn stored(&self, change: &Change<'_>, stats: &Stats, tally: &mut Tally) {
        let before = self.watchers.any().then(|| self.as_words(change.block, change.codec)).flatten();
        self.each(|observer| observer.stored(change, stats, tally));
        self.watchers.each(|watcher| {
            watcher::stored(watcher, change, before, self.as_words(change.block, change.codec));
        });
    }

    /// What a generic device stores for a block of an owner with this codec, if that is measured.
    fn as_words(&self, block: u64, codec: Codec) -> Option<AsWords> {
        let on = self.on.as_ref()?;
        Some(AsWords { bytes: watcher::short(on.generic.bytes(block)), codec })
    }

    /// Who is told of each block that is moved.
    pub(super) fn watchers(&self) -> &Watchers {
        &self.watchers
    }

    /// A read request is complete.
    pub(super) fn read(&self, tally: &Tally) {
        if let Some(members) = self.members() {
            members.count_read(tally);
        }
    }

    /// A write request for these bytes of the region is complete.
    pub(super) fn wrote(&self, range: &Range<u64>) {
        if let Some(members) = self.members() {
            members.count_write(range);
        }
    }

    /// A write request for so many bytes of a target is complete.
    pub(super) fn wrote_target(&self, target: u32, bytes: u64) {
        if let Some(members) = self.members() {
            members.count_target_write(target, bytes);
        }
    }

    fn members(&self) -> Option<&Members> {
        self.on.as_ref().and(self.members.as_ref()).map(|devices| &devices.members)
    }

    #[inline]
    fn each(&self, mut tell: impl FnMut(&dyn Observer)) {
        let Some(on) = &self.on else { return };
        tell(&Plain);
        tell(&on.generic);
        if let Some(index) = &on.index {
            tell(index);
        }
        if let Some(members) = &self.members {
            tell(members);
        }
    }
}

impl Change<'_> {
    /// The parts that do not fill the block.
    fn partial(&self) -> impl Iterator<Item = &Range<usize>> {
        self.parts.iter().filter(|part| !part.is_empty() && part.len() < BLOCK_BYTES)
    }

    /// Whether a host stored a part of it only, so that a device that codes blocks reads it first.
    pub(super) fn is_partial(&self) -> bool {
        self.partial().next().is_some()
    }

    /// Whether a device that codes each block by itself codes this one anew.
    fn is_coded_by_itself(&self) -> bool {
        self.coded.as_ref().is_some_and(|coded| coded.by == By::Store)
    }
}

impl Observer for Plain {
    fn fetched(&self, fetch: &Fetch<'_>, tally: &mut Tally) {
        tally.plain += fetch.requested.iter().map(lines).sum::<u64>();
    }

    /// It reads the lines that are stored in part.
    fn stored(&self, change: &Change<'_>, _: &Stats, tally: &mut Tally) {
        tally.plain += change.partial().map(partial_lines).sum::<u64>();
    }
}

impl Observer for OwnIndex {
    fn fetched(&self, fetch: &Fetch<'_>, tally: &mut Tally) {
        if fetch.stored.is_some() {
            self.look_for(fetch.block, tally);
        }
    }

    fn stored(&self, change: &Change<'_>, _: &Stats, tally: &mut Tally) {
        if change.coded.is_some() {
            self.look_for(change.block, tally);
        }
    }
}

impl OwnIndex {
    fn look_for(&self, block: u64, tally: &mut Tally) {
        let hit = self.0.touch(block);
        *(if hit { &mut tally.index_hits } else { &mut tally.index_misses }) += 1;
    }
}

impl Observer for Generic {
    fn fetched(&self, fetch: &Fetch<'_>, tally: &mut Tally) {
        if fetch.by_itself {
            tally.gcomp += self.bytes(fetch.block);
            self.look_for(fetch.block, tally);
        }
    }

    /// It reads a block that is stored in part.
    fn stored(&self, change: &Change<'_>, stats: &Stats, tally: &mut Tally) {
        let in_part = change.is_partial();
        if in_part {
            tally.gcomp += self.bytes(change.block);
        }
        if in_part || change.is_coded_by_itself() {
            self.look_for(change.block, tally);
        }
        // The words of others of a KV window are what they were.
        if let Some(coded) = change.coded.as_ref().filter(|coded| coded.by == By::Store) {
            let granules = self.granules_for(change.codec, coded);
            stats.gcomp_bytes_written.add(u64::from(granules) * store::GRANULE_BYTES as u64);
            stats.gcomp_index_written.add(1);
            self.granules.write(by_index(change.block), &[granules]);
        }
    }
}

impl Generic {
    fn bytes(&self, block: u64) -> u64 {
        let mut granules = [0];
        self.granules.read(by_index(block), &mut granules);
        u64::from(granules[0]) * store::GRANULE_BYTES as u64
    }

    fn look_for(&self, block: u64, tally: &mut Tally) {
        let hit = self.index.touch(block);
        *(if hit { &mut tally.gcomp_index_hits } else { &mut tally.gcomp_index_misses }) += 1;
    }

    fn granules_for(&self, codec: Codec, coded: &Coded<'_>) -> u8 {
        let bytes = match self.mode {
            _ if is_zero(coded.words) => 0,
            Mode::GComp => coded.charge.bytes,
            Mode::Plain | Mode::Trace => {
                let mut out = [0; BLOCK_BYTES];
                let encoder = &mut self.encoders.take().encoder;
                store::charged(encoder.bytes(codec, coded.words, &mut out).unwrap_or(BLOCK_BYTES))
            }
        };
        u8::try_from(bytes / store::GRANULE_BYTES as u64).expect("at most 64 granules")
    }
}

impl Observer for MemberDevices {
    fn fetched(&self, fetch: &Fetch<'_>, tally: &mut Tally) {
        for part in fetch.requested {
            self.members.add_plain(fetch.block, part.start, part.len(), tally);
        }
        if self.flat {
            tally.stored_of = tally.plain_of;
        } else if let Some(stored) = fetch.stored {
            self.members.add_stored(fetch.block, stored, tally);
        }
    }

    fn stored(&self, change: &Change<'_>, _: &Stats, _: &mut Tally) {
        if let Some(coded) = &change.coded {
            self.members.count_stored(change.block, coded.charge.bytes);
        }
    }
}

/// Bytes of the lines of 64 bytes that `part` of a block fills in part.
pub(super) fn partial_lines(part: &Range<usize>) -> u64 {
    let filled = (part.end / 64).saturating_sub(part.start.div_ceil(64)) * 64;
    lines(part) - filled as u64
}
