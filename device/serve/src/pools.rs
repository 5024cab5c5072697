//! What pools on the mount tell of themselves, for who watches the device.
//!
//! * A pool's nodes write what they count into the pool. It is read as any process reads the file,
//!   through the page cache: what nodes stored is there long before the device has it.
//! * So a thread with a file table of its own reads it ([`super::own_mount`]), when somebody asks.
//!   Who asks waits for it [a moment](WAIT) at most, and is told what was found last.
//! * What a pool says is not trusted: [`Overview::read`] follows no offset, and numbers that lie
//!   are shown as they are.
//! * A file of `files/` is a pool if it has the attribute that whoever makes one sets. A window is
//!   looked at where its first page is in the page cache, which it is while a node is attached, and
//!   so a look adds no load to what the device counts. Hosts that are not coherent have what they
//!   wrote back in the device, where it is read.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::fs::{Advice, fadvise};
use serde::Serialize;

use lamina_device::counters::{Place, Scope, Section};
use lamina_device::device::Partition;
use lamina_device::figures;
use lamina_files::{Files, POOL};
use lamina_pool::{NodeCounts, Occupancy, Overview};

use super::export::Export;
use super::files::{FOLDER, inode_of};
use super::flusher::is_cached;
use super::own_mount::own_table;
use super::settled_files::open_below;

/// How long who asks waits for a look.
const WAIT: Duration = Duration::from_millis(250);
/// What is younger is told again.
const FRESH: Duration = Duration::from_millis(500);
/// What is stored of a file is counted when this many times as long has passed as that took.
const SELDOM: u32 = 20;

figures! {
    /// What is told of a pool.
    pub struct PoolReport {
        reported {
            /// Its file, below the mount.
            name: String;
        }
        figures {
            /// Bytes of its chunks.
            capacity_bytes: u64 = Gauge "capacity" Bytes;
            /// Bytes of the chunks that its nodes took.
            taken_bytes: Option<u64> = Gauge "taken" Bytes;
            /// Bytes of the objects and blocks that are ready.
            ready_bytes: Option<u64> = Gauge "ready" Bytes;
            /// Bytes that the device stores of its file, or of its window, tables included.
            device_bytes: Option<u64> = Gauge "device" Bytes;
            /// Ready bytes by those that the device stores.
            ratio: Option<f64> = Gauge "ratio" Ratio;
            /// Slots of its table: each is for an object or a block.
            slots: u64 = Gauge "slots" Count;
            /// Slots that are in use, by state: a writer fills it.
            reserved: Option<u64> = Gauge "used_slots" { state = "reserved" } Count;
            /// Slots that are in use: a block is ready.
            blocks: Option<u64> = Gauge "used_slots" { state = "block" } Count;
            /// Slots that are in use: an object is ready.
            objects: Option<u64> = Gauge "used_slots" { state = "object" } Count;
            /// Slots that are in use: what it held was evicted or removed, and it is not free yet.
            evicting: Option<u64> = Gauge "used_slots" { state = "evicting" } Count;
            /// Nodes that are attached.
            nodes: u64 = Gauge "nodes" Count;
            /// Gets and lookups that found what they wanted, of all nodes since the pool was made.
            hits: u64 = Counter "hits" Count;
            /// Gets and lookups that did not.
            misses: u64 = Counter "misses" Count;
            /// Hits by all gets and lookups.
            hit_rate: Option<f64> = Gauge "hit_rate" Ratio;
            /// Objects and blocks that were stored.
            stores: u64 = Counter "stores" Count;
            /// Blocks that were evicted for space.
            evictions: u64 = Counter "evictions" Count;
            /// Times that a lock was not to be had at once.
            lock_waits: u64 = Counter "lock_waits" Count;
            /// Nodes that died and were recovered.
            recoveries: u64 = Counter "recoveries" Count;
            /// Bytes that were read of objects and blocks.
            read_bytes: u64 = Counter "read" Bytes;
            /// Bytes that were stored of them.
            written_bytes: u64 = Counter "written" Bytes;
        }
    }
}

figures! {
    /// What was done under a number of a pool's, by all who had it.
    pub struct PoolNodeReport {
        reported {
            /// The pool's file, below the mount.
            pool: String;
            /// The number.
            node: String;
            /// What the last who had it is called.
            host: String;
        }
        figures {
            /// Whether a node is attached under this number.
            attached: u64 = Gauge "attached" Count;
            /// Whether it manages.
            manages: u64 = Gauge "manages" Count;
            /// Its gets and lookups that found what they wanted.
            hits: u64 = Counter "hits" Count;
            /// Its gets and lookups that did not.
            misses: u64 = Counter "misses" Count;
            /// Its hits by all its gets and lookups.
            hit_rate: Option<f64> = Gauge "hit_rate" Ratio;
            /// Objects and blocks that it stored.
            stores: u64 = Counter "stores" Count;
            /// Blocks that it evicted for space.
            evictions: u64 = Counter "evictions" Count;
            /// Times that a lock was not to be had by it at once.
            lock_waits: u64 = Counter "lock_waits" Count;
            /// Nodes that died and that it recovered.
            recoveries: u64 = Counter "recoveries" Count;
            /// Bytes that it read of objects and blocks.
            read_bytes: u64 = Counter "read" Bytes;
            /// Bytes that it stored of them.
            written_bytes: u64 = Counter "written" Bytes;
        }
    }
}

figures! {
    /// What is told of a class of a pool's chunks.
    pub struct PoolClassReport {
        reported {
            /// The pool's file, below the mount.
            pool: String;
            /// The class: a format, and perhaps a layout; `own` is what the file is.
            class: String;
        }
        figures {
            /// Bytes of the objects and blocks that are ready.
            ready_bytes: Option<u64> = Gauge "ready" Bytes;
            /// Bytes of the chunks that its nodes took.
            taken_bytes: Option<u64> = Gauge "taken" Bytes;
            /// Bytes that the device stores of the parts of this class of a file in `files/`; the
            /// pool's tables are of its own.
            device_bytes: Option<u64> = Gauge "device" Bytes;
            /// Ready bytes by those that the device stores.
            ratio: Option<f64> = Gauge "ratio" Ratio;
        }
    }
}

/// The figures of pools.
pub(super) const SECTION: Section = Section {
    title: "pools",
    scope: Scope::Device,
    places: &[Place::list("/pools")],
    labels: &[("pool", "name")],
    prefix: "pool_",
    of: "",
    figures: PoolReport::FIGURES,
};

/// The figures of their classes.
pub(super) const CLASSES: Section = Section {
    title: "classes of pools",
    scope: Scope::Device,
    places: &[Place::list("/pool_classes")],
    labels: &[("pool", "pool"), ("class", "class")],
    prefix: "pool_class_",
    of: "",
    figures: PoolClassReport::FIGURES,
};

/// The figures of their nodes.
pub(super) const NODES: Section = Section {
    title: "nodes of pools",
    scope: Scope::Host,
    places: &[Place::list("/pool_nodes")],
    labels: &[("pool", "pool"), ("node", "node"), ("host", "host")],
    prefix: "pool_node_",
    of: "",
    figures: PoolNodeReport::FIGURES,
};

/// One number by another, if that is one.
#[allow(clippy::cast_precision_loss, reason = "a rate has as many digits as are shown")]
fn part(of: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| of as f64 / all as f64)
}

impl PoolReport {
    /// What a pool tells of which the device stores so much.
    pub(super) fn of(name: &str, overview: &Overview, device_bytes: Option<u64>) -> Self {
        let all =
            |count: fn(&NodeCounts) -> u64| overview.nodes.iter().map(count).fold(0, u64::saturating_add);
        let (hits, misses) = (all(|node| node.hits), all(|node| node.misses));
        // Nobody has counted yet: null, and not zero.
        let held = |count: fn(&Occupancy) -> u64| overview.occupancy.as_ref().map(count);
        let ready_bytes = held(|held| held.ready_bytes);
        Self {
            name: name.to_owned(),
            capacity_bytes: overview.bytes,
            taken_bytes: held(|held| held.taken_bytes),
            ready_bytes,
            device_bytes,
            ratio: device_bytes.zip(ready_bytes).and_then(|(stored, ready)| part(ready, stored)),
            slots: overview.slots,
            reserved: held(|held| held.reserved),
            blocks: held(|held| held.blocks),
            objects: held(|held| held.objects),
            evicting: held(|held| held.evicting),
            nodes: overview.attached.len() as u64,
            hits,
            misses,
            hit_rate: part(hits, hits.saturating_add(misses)),
            stores: all(|node| node.stores),
            evictions: all(|node| node.evictions),
            lock_waits: all(|node| node.lock_waits),
            recoveries: all(|node| node.recoveries),
            read_bytes: all(|node| node.read_bytes),
            written_bytes: all(|node| node.stored_bytes),
        }
    }
}

impl PoolNodeReport {
    /// What a pool tells of its nodes.
    pub(super) fn of<'o>(name: &str, overview: &'o Overview) -> impl Iterator<Item = Self> + use<'o> {
        let pool = name.to_owned();
        overview.nodes.iter().map(move |node| {
            let attached = overview.attached.iter().find(|attached| attached.node == node.node);
            Self {
                pool: pool.clone(),
                node: node.node.to_string(),
                host: node.name.clone(),
                attached: attached.is_some().into(),
                manages: attached.is_some_and(|attached| attached.manages).into(),
                hits: node.hits,
                misses: node.misses,
                hit_rate: part(node.hits, node.hits.saturating_add(node.misses)),
                stores: node.stores,
                evictions: node.evictions,
                lock_waits: node.lock_waits,
                recoveries: node.recoveries,
                read_bytes: node.read_bytes,
                written_bytes: node.stored_bytes,
            }
        })
    }
}

impl PoolClassReport {
    /// What a pool tells of its classes, of which the device stores so much each.
    pub(super) fn of<'o>(
        name: &str,
        overview: &'o Overview,
        stored: &'o [u64],
    ) -> impl Iterator<Item = Self> + use<'o> {
        let pool = name.to_owned();
        overview.classes.iter().enumerate().map(move |(number, share)| {
            let device_bytes = stored.get(number).copied();
            let counted = |bytes: u64| overview.occupancy.is_some().then_some(bytes);
            let ready_bytes = counted(share.ready_bytes);
            Self {
                pool: pool.clone(),
                class: if share.class.is_empty() { "own".to_owned() } else { share.class.clone() },
                ready_bytes,
                taken_bytes: counted(share.taken_bytes),
                device_bytes,
                ratio: device_bytes.zip(ready_bytes).and_then(|(stored, ready)| part(ready, stored)),
            }
        })
    }
}

/// What was found of all pools.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PoolsReport {
    /// Each pool, by its file.
    pub pools: Vec<PoolReport>,
    /// Their classes.
    pub pool_classes: Vec<PoolClassReport>,
    /// Their nodes.
    pub pool_nodes: Vec<PoolNodeReport>,
}

/// Who looks at pools, and what was found last.
pub(super) struct Pools {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    wanted: bool,
    closed: bool,
    looked: Option<Instant>,
    found: PoolsReport,
}

impl Pools {
    pub(super) fn new() -> Self {
        Self { state: Mutex::default(), changed: Condvar::new() }
    }

    /// What is there now, or was when it was looked at last.
    pub(super) fn report(&self) -> PoolsReport {
        let mut state = self.state.lock();
        let asked = Instant::now();
        let is_fresh = |state: &State| state.looked.is_some_and(|looked| looked + FRESH > asked);
        if !is_fresh(&state) && !state.closed {
            state.wanted = true;
            self.changed.notify_all();
            self.changed.wait_while_for(&mut state, |state| !is_fresh(state) && !state.closed, WAIT);
        }
        state.found.clone()
    }

    /// Looks no more.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    /// Looks whenever somebody asks. A thread of its own does so.
    pub(super) fn watch_until_closed(&self, mount: &Path, exports: &[Arc<Export>], files: Option<&Files>) {
        // All but the standard streams is given up, and nothing of this table stays open.
        if let Err(why) = own_table(2) {
            tracing::warn!("who watches pools keeps the shared file table: {why}");
        }
        let folder = mount.join(FOLDER);
        let mut stored: Vec<(u64, Stored)> = Vec::new();
        loop {
            {
                let mut state = self.state.lock();
                self.changed.wait_while(&mut state, |state| !state.wanted && !state.closed);
                if state.closed {
                    return;
                }
                state.wanted = false;
            }
            let mut found = PoolsReport::default();
            let mut regions = BTreeSet::new();
            // All hosts of a region have the same.
            for export in exports.iter().filter(|export| regions.insert(export.partition().name())) {
                if let Some((name, overview)) = of_export(mount, export) {
                    found.add(&name, &overview, Some(export.partition().stored_bytes()), &[]);
                }
            }
            if let Some(files) = files {
                let marked = files.marked(POOL);
                stored.retain(|(inode, _)| marked.iter().any(|file| file.inode == *inode));
                for file in marked {
                    let inode = inode_of(file.inode);
                    let Some(overview) = of_file(&folder, &file.path, inode) else { continue };
                    let name = Path::new(FOLDER).join(OsStr::from_bytes(&file.path));
                    let known = stored.iter().position(|(inode, _)| *inode == file.inode);
                    let known = known.unwrap_or_else(|| {
                        stored.push((file.inode, Stored::default()));
                        stored.len() - 1
                    });
                    let (bytes, by_class) = stored[known].1.of(files, file.inode, &overview);
                    found.add(&name.to_string_lossy(), &overview, bytes, by_class);
                }
            }
            let mut state = self.state.lock();
            (state.found, state.looked) = (found, Some(Instant::now()));
            self.changed.notify_all();
        }
    }
}

impl PoolsReport {
    fn add(&mut self, name: &str, overview: &Overview, device_bytes: Option<u64>, by_class: &[u64]) {
        self.pools.push(PoolReport::of(name, overview, device_bytes));
        self.pool_classes.extend(PoolClassReport::of(name, overview, by_class));
        self.pool_nodes.extend(PoolNodeReport::of(name, overview));
    }
}

/// What is stored of a file, which is counted block by block.
#[derive(Default)]
struct Stored {
    bytes: Option<u64>,
    by_class: Vec<u64>,
    /// When it is counted next.
    due: Option<Instant>,
}

impl Stored {
    fn of(&mut self, files: &Files, inode: u64, overview: &Overview) -> (Option<u64>, &[u64]) {
        let began = Instant::now();
        if self.due.is_none_or(|due| due <= began) {
            self.bytes = files.stored(inode).ok();
            let classes: Vec<_> = overview.classes.iter().map(|share| share.class.as_str()).collect();
            self.by_class = files.stored_by_class(inode, &classes).unwrap_or_default();
            self.due = Some(Instant::now() + began.elapsed() * SELDOM);
        }
        (self.bytes, &self.by_class)
    }
}

/// The pool in an export's window, and the window's name.
fn of_export(mount: &Path, export: &Export) -> Option<(String, Overview)> {
    let path = export.base_path();
    if export.cache().is_some() {
        let region = export.partition().name();
        let name = if region.is_empty() { "base".to_owned() } else { format!("base of {region}") };
        return of_partition(export.partition()).map(|found| (name, found));
    }
    let name = path.strip_prefix(mount).unwrap_or(&path);
    let file = File::open(&path).ok()?;
    if !is_cached(&file, &(0..1)) {
        return None;
    }
    Some((name.to_string_lossy().into_owned(), overview(&file, export.partition().base_bytes()).ok()??))
}

fn of_partition(partition: &Partition) -> Option<Overview> {
    // Where nothing was stored there is no pool, and no load is counted.
    if partition.next_data(0..4096) >= 4096 {
        return None;
    }
    let read = |at: u64, into: &mut [u8]| partition.read_base(at, into);
    Overview::read(partition.base_bytes(), read).ok()?
}

/// The pool in the file of this inode, if the path leads to it still.
fn of_file(folder: &Path, path: &[u8], inode: u64) -> Option<Overview> {
    // Each time anew: who holds a file open keeps what was removed. Something else may lie at its
    // path by now, which is not to be waited for.
    let file = open_below(folder, path).ok()?;
    let found = file.metadata().ok()?;
    if found.ino() != inode || !found.is_file() {
        return None;
    }
    overview(&file, found.len()).ok()?
}

fn overview(file: &File, length: u64) -> io::Result<Option<Overview>> {
    // No more than is looked at.
    fadvise(file, 0, None, Advice::Random)?;
    Overview::read(length, |at, into| file.read_exact_at(into, at))
}
