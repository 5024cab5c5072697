//! The file system against one that is nothing but vectors and maps, and its log cut anywhere.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;

use lamina_codec::testing::bytes;
use lamina_device::device::{Device, DeviceConfig};

use super::log::{self, Place};
use super::*;

/// What the log made when a record was written.
pub(crate) struct Recorded {
    place: Place,
    generation: u64,
    at: u64,
    state: State,
}

impl Recorded {
    pub(crate) fn new(log: &Log, state: &State) -> Self {
        let (place, generation, at) = log.position();
        Self { place, generation, at, state: state.clone() }
    }
}

const LIMIT: u64 = 64 << 20;

fn device() -> Arc<Device> {
    let config = DeviceConfig { observe: false, ..DeviceConfig::new(128 << 20, 8 << 20) };
    Arc::new(Device::new(config).unwrap())
}

fn files(device: &Arc<Device>, first: bool) -> Files {
    Files::open(Arc::clone(device), LIMIT, first).unwrap().unwrap()
}

fn file(files: &Files, name: &str) -> u64 {
    files.make(Caller::default(), ROOT, name.as_bytes(), &NEW_FILE).unwrap()
}

const NEW_FILE: New<'_> = New { mode: libc::S_IFREG | 0o644, device: 0, target: b"" };
const NEW_FOLDER: New<'_> = New { mode: libc::S_IFDIR | 0o755, device: 0, target: b"" };

fn contents(files: &Files, inode: u64) -> Vec<u8> {
    let size = usize::try_from(files.meta(inode).unwrap().size).unwrap();
    let mut out = vec![0xee; size + 10];
    assert_eq!(files.read(inode, 0, &mut out, true).unwrap(), size);
    out.truncate(size);
    out
}

/// A file system that is nothing but a table.
#[derive(Clone, Default)]
struct Model {
    /// By inode.
    files: BTreeMap<u64, Vec<u8>>,
    /// Folders and what is in them.
    folders: BTreeMap<u64, BTreeMap<Vec<u8>, u64>>,
    open: Vec<u64>,
}

impl Model {
    fn names_of(&self, inode: u64) -> usize {
        self.folders.values().flat_map(BTreeMap::values).filter(|found| **found == inode).count()
    }

    fn is_inside(&self, folder: u64, other: u64) -> bool {
        folder == other
            || self.folders[&other]
                .values()
                .any(|child| self.folders.contains_key(child) && self.is_inside(folder, *child))
    }

    fn settle(&mut self) {
        let nameless: Vec<_> =
            self.files.keys().copied().filter(|inode| self.names_of(*inode) == 0).collect();
        for inode in nameless {
            if !self.open.contains(&inode) {
                self.files.remove(&inode);
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Make { folder: usize, name: u8, is_folder: bool },
    Remove { folder: usize, name: u8, is_folder: bool },
    Rename { from: usize, old: u8, to: usize, new: u8, how: Rename },
    Link { file: usize, folder: usize, name: u8 },
    Write { file: usize, at: u64, length: usize, seed: u64, written_back: bool },
    Resize { file: usize, size: u64 },
    Punch { file: usize, at: u64, length: u64 },
    Allocate { file: usize, at: u64, length: u64, grows: bool },
    Format { file: usize, which: usize },
    Part { file: usize, block: u64, blocks: u64, which: usize },
    Open { file: usize },
    Close { file: usize },
    Again { first: bool },
}

fn step() -> impl Strategy<Value = Step> {
    let (folder, name, file) = (0..4_usize, 0..5_u8, 0..6_usize);
    let at = prop_oneof![0..40_000_u64, (0..12_u64).prop_map(|block| block * 4096), 0..700_000_u64];
    let how = prop_oneof![Just(Rename::Replace), Just(Rename::Keep), Just(Rename::Exchange)];
    prop_oneof![
        4 => (folder.clone(), name.clone(), any::<bool>())
            .prop_map(|(folder, name, is_folder)| Step::Make { folder, name, is_folder }),
        2 => (folder.clone(), name.clone(), any::<bool>())
            .prop_map(|(folder, name, is_folder)| Step::Remove { folder, name, is_folder }),
        4 => (folder.clone(), name.clone(), folder.clone(), name.clone(), how)
            .prop_map(|(from, old, to, new, how)| Step::Rename { from, old, to, new, how }),
        1 => (file.clone(), folder, name).prop_map(|(file, folder, name)| Step::Link { file, folder, name }),
        8 => (file.clone(), at.clone(), 0..30_000_usize, 0..3_u64, any::<bool>()).prop_map(
            |(file, at, length, seed, written_back)| Step::Write { file, at, length, seed, written_back }
        ),
        3 => (file.clone(), at.clone()).prop_map(|(file, size)| Step::Resize { file, size }),
        2 => (file.clone(), at.clone(), 0..50_000_u64)
            .prop_map(|(file, at, length)| Step::Punch { file, at, length }),
        1 => (file.clone(), at, 1..50_000_u64, any::<bool>())
            .prop_map(|(file, at, length, grows)| Step::Allocate { file, at, length, grows }),
        1 => (file.clone(), 0..5_usize).prop_map(|(file, which)| Step::Format { file, which }),
        2 => (file.clone(), 0..24_u64, 0..40_u64, 0..6_usize)
            .prop_map(|(file, block, blocks, which)| Step::Part { file, block, blocks, which }),
        2 => file.clone().prop_map(|file| Step::Open { file }),
        2 => file.prop_map(|file| Step::Close { file }),
        1 => any::<bool>().prop_map(|first| Step::Again { first }),
    ]
}

/// Does a step to both, which have to agree on whether it can be done.
fn go(files: &mut Files, device: &Arc<Device>, model: &mut Model, step: &Step) -> Result<(), TestCaseError> {
    let caller = Caller { uid: 7, gid: 8, request: 0 };
    let folder = |model: &Model, at: usize| *model.folders.keys().nth(at % model.folders.len()).unwrap();
    let name = |name: u8| vec![b'a' + name];
    let pick = |model: &Model, at: usize| {
        let all: Vec<_> = model.files.keys().copied().collect();
        if all.is_empty() { None } else { Some(all[at % all.len()]) }
    };
    match *step {
        Step::Make { folder: at, name: called, is_folder } => {
            let folder = folder(model, at);
            let made =
                files.make(caller, folder, &name(called), if is_folder { &NEW_FOLDER } else { &NEW_FILE });
            let there = model.folders[&folder].contains_key(&name(called));
            prop_assert_eq!(made.is_err(), there);
            if let Ok(inode) = made {
                model.folders.get_mut(&folder).unwrap().insert(name(called), inode);
                if is_folder {
                    model.folders.insert(inode, BTreeMap::new());
                } else {
                    model.files.insert(inode, Vec::new());
                }
            }
        }
        Step::Remove { folder: at, name: called, is_folder } => {
            let folder = folder(model, at);
            let inode = model.folders[&folder].get(&name(called)).copied();
            let can = inode.is_some_and(|inode| match model.folders.get(&inode) {
                Some(inside) => is_folder && inside.is_empty(),
                None => !is_folder,
            });
            let removed = files.remove(caller, folder, &name(called), is_folder);
            prop_assert_eq!(removed.is_ok(), can, "{:?}", removed);
            if can {
                model.folders.get_mut(&folder).unwrap().remove(&name(called));
                model.folders.remove(&inode.unwrap());
                if is_folder {
                    files.forgotten(inode.unwrap(), 1).unwrap();
                }
            }
        }
        Step::Rename { from, old, to, new, how } => {
            let (from, to) = (folder(model, from), folder(model, to));
            let (old, new) = (name(old), name(new));
            let moved = model.folders[&from].get(&old).copied();
            let other = model.folders[&to].get(&new).copied();
            let is_folder =
                |inode: Option<u64>| inode.is_some_and(|inode| model.folders.contains_key(&inode));
            let can = moved.is_some()
                && match (how, other) {
                    (Rename::Keep, Some(_)) | (Rename::Exchange, None) => false,
                    _ if moved == other => true,
                    _ if is_folder(moved) && model.is_inside(to, moved.unwrap()) => false,
                    (Rename::Exchange, _) => !is_folder(other) || !model.is_inside(from, other.unwrap()),
                    (_, Some(other)) => {
                        is_folder(moved) == is_folder(Some(other))
                            && model.folders.get(&other).is_none_or(BTreeMap::is_empty)
                    }
                    _ => true,
                };
            let done = files.rename(caller, (from, &old), (to, &new), how);
            prop_assert_eq!(done.is_ok(), can, "{:?} {:?}", step, done);
            if can && moved != other {
                model.folders.get_mut(&from).unwrap().remove(&old);
                model.folders.get_mut(&to).unwrap().insert(new, moved.unwrap());
                match (how, other) {
                    (Rename::Exchange, Some(other)) => {
                        model.folders.get_mut(&from).unwrap().insert(old, other);
                    }
                    (_, Some(other)) if model.folders.remove(&other).is_some() => {
                        files.forgotten(other, 1).unwrap();
                    }
                    _ => {}
                }
            }
        }
        Step::Link { file, folder: at, name: called } => {
            let folder = folder(model, at);
            let Some(inode) = pick(model, file) else { return Ok(()) };
            let can = model.names_of(inode) > 0 && !model.folders[&folder].contains_key(&name(called));
            let linked = files.link(caller, inode, folder, &name(called));
            prop_assert_eq!(linked.is_ok(), can, "{:?}", linked);
            if can {
                model.folders.get_mut(&folder).unwrap().insert(name(called), inode);
            }
        }
        Step::Write { file, at, length, seed, written_back } => {
            let Some(inode) = pick(model, file) else { return Ok(()) };
            let mut data = bytes(5 * seed, length);
            if seed == 0 {
                data.fill(0);
            }
            let held = model.files.get_mut(&inode).unwrap();
            let at_index = usize::try_from(at).unwrap();
            let taken = if written_back { held.len().saturating_sub(at_index).min(length) } else { length };
            let way = if written_back { Way::WrittenBack } else { Way::Cached };
            prop_assert_eq!(files.write(inode, at, &data, way).unwrap(), taken);
            if taken > 0 {
                held.resize(held.len().max(at_index + taken), 0);
                held[at_index..at_index + taken].copy_from_slice(&data[..taken]);
            }
        }
        Step::Resize { file, size } => {
            let Some(inode) = pick(model, file) else { return Ok(()) };
            files.set(inode, &Wanted { size: Some(size), ..Wanted::default() }).unwrap();
            model.files.get_mut(&inode).unwrap().resize(usize::try_from(size).unwrap(), 0);
        }
        Step::Punch { file, at, length } => {
            let Some(inode) = pick(model, file) else { return Ok(()) };
            files.punch(inode, &(at..at + length)).unwrap();
            let held = model.files.get_mut(&inode).unwrap();
            let end = usize::try_from(at + length).unwrap().min(held.len());
            let start = usize::try_from(at).unwrap().min(end);
            held[start..end].fill(0);
        }
        Step::Allocate { file, at, length, grows } => {
            let Some(inode) = pick(model, file) else { return Ok(()) };
            files.allocate(inode, &(at..at + length), grows).unwrap();
            let held = model.files.get_mut(&inode).unwrap();
            if grows {
                held.resize(held.len().max(usize::try_from(at + length).unwrap()), 0);
            }
        }
        Step::Format { file, which } => {
            let Some(inode) = pick(model, file) else { return Ok(()) };
            match which {
                0 => drop(files.remove_attribute(Caller::default(), inode, b"user.lamina.format")),
                1 => {
                    files
                        .set_attribute(Caller::default(), inode, b"user.lamina.kv", b"48,100", None)
                        .unwrap();
                }
                2 => drop(files.remove_attribute(Caller::default(), inode, b"user.lamina.kv")),
                3 => {
                    files.set_attribute(Caller::default(), inode, b"user.lamina.kv", b"64,64", None).unwrap();
                }
                _ => files
                    .set_attribute(Caller::default(), inode, b"user.lamina.format", b"bf16", None)
                    .unwrap(),
            }
        }
        Step::Part { file, block, blocks, which } => {
            let Some(inode) = pick(model, file) else { return Ok(()) };
            let class = ["", " bf16", " fp16 64,32", " bf16 48,100", " bf16 64,64", " bf16 64,96"][which];
            let part = format!("{}+{}{class}", block * 4096, blocks * 4096);
            match files.set_attribute(Caller::default(), inode, b"user.lamina.class", part.as_bytes(), None) {
                // Of a file whose units are larger, or behind its end.
                Ok(())
                | Err(FileError::Invalid { .. } | FileError::Units { .. } | FileError::TooLarge { .. }) => {}
                Err(why) => prop_assert!(false, "{part}: {why}"),
            }
        }
        Step::Open { file } => {
            let Some(inode) = pick(model, file) else { return Ok(()) };
            files.opened(inode, true).unwrap();
            model.open.push(inode);
        }
        Step::Close { file } => {
            if !model.open.is_empty() {
                let inode = model.open.remove(file % model.open.len());
                files.closed(inode).unwrap();
            }
        }
        Step::Again { first } => {
            // The process is killed. Another one serves the mount, or the mount is gone too.
            *files = super::tests::files(device, first);
            files.core.lock().history = Some(Vec::new());
            let open = std::mem::take(&mut model.open);
            if !first {
                // Nobody knows who has what open until the kernel forgets it.
                let nameless: Vec<_> =
                    model.files.keys().copied().filter(|inode| model.names_of(*inode) == 0).collect();
                for inode in nameless {
                    prop_assert!(files.meta(inode).is_ok() && open.contains(&inode));
                    files.forgotten(inode, 1).unwrap();
                }
                for inode in model.files.keys() {
                    files.forgotten(*inode, 1).unwrap();
                }
            }
        }
    }
    model.settle();
    Ok(())
}

/// Removes what is in a folder.
fn remove_all(files: &Files, model: &Model, folder: u64) {
    for (name, inode) in &model.folders[&folder] {
        let is_folder = model.folders.contains_key(inode);
        if is_folder {
            remove_all(files, model, *inode);
        }
        files.remove(Caller::default(), folder, name, is_folder).unwrap();
        files.forgotten(*inode, 1).unwrap();
    }
}

/// Both hold the same.
fn compare(files: &Files, model: &Model) -> Result<(), TestCaseError> {
    let inodes: Vec<_> = model.files.keys().chain(model.folders.keys()).copied().collect();
    let core = files.core.lock();
    let mut found: Vec<_> = core.state.nodes().map(|(inode, _)| inode).collect();
    let is_even = core.space.is_even();
    drop(core);
    found.sort_unstable();
    prop_assert!(is_even, "a slab's free places are no whole units");
    let mut wanted = inodes;
    wanted.sort_unstable();
    prop_assert_eq!(found, wanted);
    for (inode, held) in &model.files {
        prop_assert!(contents(files, *inode) == *held, "inode {}", inode);
        prop_assert_eq!(files.meta(*inode).unwrap().links as usize, model.names_of(*inode));
        let mut at = 0;
        while let Ok(data) = files.seek(*inode, at, true) {
            let skipped = &held[usize::try_from(at).unwrap()..usize::try_from(data).unwrap()];
            prop_assert!(skipped.iter().all(|byte| *byte == 0));
            at = files.seek(*inode, data, false).unwrap();
            prop_assert!(at > data);
        }
        prop_assert!(held[usize::try_from(at).unwrap().min(held.len())..].iter().all(|byte| *byte == 0));
    }
    for (inode, names) in &model.folders {
        let mut children = files.children(*inode, 0, usize::MAX).unwrap();
        children.sort_by(|a, b| a.name.cmp(&b.name));
        let told: BTreeMap<_, _> = children.into_iter().map(|child| (child.name, child.inode)).collect();
        prop_assert_eq!(&told, names);
        let folders = names.values().filter(|inode| model.folders.contains_key(inode)).count();
        let meta = files.meta(*inode).unwrap();
        prop_assert_eq!(meta.links as usize, 2 + folders);
        for child in names.values().filter(|child| model.folders.contains_key(child)) {
            prop_assert_eq!(files.meta(*child).unwrap().parent, *inode);
        }
    }
    Ok(())
}

/// Every beginning of the log makes the state that there was at its end.
fn check_history(files: &Files, device: &Device) -> Result<(), TestCaseError> {
    let core = files.core.lock();
    let (place, generation, end) = core.log.position();
    let same = core.history.iter().flatten().filter(|was| (was.place, was.generation) == (place, generation));
    for was in same {
        let (state, at) = log::replay(device, place, generation, was.at).unwrap();
        prop_assert_eq!(at, was.at);
        prop_assert!(state == was.state);
        prop_assert!(at <= end);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn files_are_what_a_table_says_whenever_the_process_dies(steps in prop::collection::vec(step(), 1..80)) {
        let device = device();
        let mut files = files(&device, true);
        files.core.lock().history = Some(Vec::new());
        let mut model = Model { folders: BTreeMap::from([(ROOT, BTreeMap::new())]), ..Model::default() };
        for step in &steps {
            go(&mut files, &device, &mut model, step)?;
        }
        compare(&files, &model)?;
        check_history(&files, &device)?;
        drop(files);
        let files = super::tests::files(&device, true);
        model.open.clear();
        model.settle();
        compare(&files, &model)?;
        // Nothing of what is removed stays.
        remove_all(&files, &model, ROOT);
        prop_assert_eq!(files.extent(), Extent { limit: LIMIT, free: LIMIT, inodes: 1 });
    }

    #[test]
    fn a_log_that_ends_anywhere_makes_a_state_that_there_was(
        steps in prop::collection::vec(step(), 1..40), cut in any::<prop::sample::Index>(),
    ) {
        let device = device();
        let mut files = files(&device, true);
        files.core.lock().history = Some(Vec::new());
        let mut model = Model { folders: BTreeMap::from([(ROOT, BTreeMap::new())]), ..Model::default() };
        for step in steps.iter().filter(|step| !matches!(step, Step::Again { .. })) {
            go(&mut files, &device, &mut model, step)?;
        }
        let core = files.core.lock();
        let (place, generation, end) = core.log.position();
        // A block of the device is there or not; a record may begin in one and end in another.
        let blocks = (end - 4096).div_ceil(4096);
        let at = 4096 + cut.index(usize::try_from(blocks).unwrap() + 1) as u64 * 4096;
        device.discard(place.0 + at, place.1 - at).unwrap();
        let (state, reached) = log::replay(&device, place, generation, u64::MAX).unwrap();
        let mut all = core.history.iter().flatten().filter(|was| (was.place, was.generation) == (place, generation));
        match all.rfind(|was| was.at <= reached) {
            Some(was) => {
                prop_assert_eq!(was.at, reached);
                prop_assert!(state == was.state);
            }
            None => prop_assert!(reached <= 2 * 4096),
        }
    }
}

#[test]
fn a_store_that_is_full_takes_no_more_and_lets_files_be_removed() {
    let config =
        DeviceConfig { observe: false, store_bytes: Some(34 << 20), ..DeviceConfig::new(128 << 20, 8 << 20) };
    let device = Arc::new(Device::new(config).unwrap());
    let files = files(&device, true);
    let first = file(&files, "first");
    let piece = bytes(5, 1 << 20);
    let mut at = 0;
    let why = loop {
        match files.write(first, at, &piece, Way::Cached) {
            Ok(count) => at += count as u64,
            Err(why) => break why,
        }
    };
    assert!(why.is_no_room() && at > 16 << 20, "{at}: {why}");
    // What is there stays, and can be read and written in its place.
    assert_eq!(files.meta(first).unwrap().size, at);
    files.write(first, 0, &piece[..4096], Way::Cached).unwrap();
    // Names are refused at some time, too, but nothing hinders a removal.
    let mut names = 0;
    while files.make(Caller::default(), ROOT, format!("{names}").as_bytes(), &NEW_FILE).is_ok() {
        names += 1;
        if names > 100_000 {
            break;
        }
    }
    files.remove(Caller::default(), ROOT, b"first", false).unwrap();
    let second = file(&files, "second");
    assert_eq!(files.write(second, 0, &piece, Way::Cached).unwrap(), piece.len());
    assert!(contents(&files, second) == piece);
}

#[test]
fn all_names_can_be_removed_though_the_store_and_the_log_are_full() {
    let config =
        DeviceConfig { observe: false, store_bytes: Some(24 << 20), ..DeviceConfig::new(128 << 20, 8 << 20) };
    let device = Arc::new(Device::new(config).unwrap());
    // A log of 1 MiB.
    let files = Files::open(Arc::clone(&device), 32 << 20, true).unwrap().unwrap();
    let all = file(&files, "all");
    let name = |number: u32| format!("{}{number}", "x".repeat(200)).into_bytes();
    let mut made = 0;
    while files.make(Caller::default(), ROOT, &name(made), &NEW_FILE).is_ok() {
        made += 1;
    }
    assert!(made > 2000, "{made}");
    // One that is open keeps its bytes, so no removal of a name makes room for the next.
    files.opened(all, true).unwrap();
    let fill = || {
        for length in [1 << 20, 64 << 10, 4096_usize] {
            let mut at = files.meta(all).unwrap().size;
            while let Ok(count) = files.write(all, at, &bytes(at + 5, length), Way::Cached) {
                at += count as u64;
            }
        }
    };
    fill();
    let first = files.find(ROOT, &name(0)).unwrap();
    for number in 0..made {
        // What else may use the last of the log is asked for, too, and refused or not.
        let mode = 0o600 + number % 2;
        files.set(first, &Wanted { mode: Some(mode), ..Wanted::default() }).unwrap();
        if number > 0 {
            files.remove(Caller::default(), ROOT, &name(number), false).unwrap();
        }
        if number % 500 == 0 {
            fill();
        }
    }
    drop(files);
    let files = Files::open(device, 32 << 20, true).unwrap().unwrap();
    assert_eq!(files.extent().inodes, 3);
    files.remove(Caller::default(), ROOT, &name(0), false).unwrap();
    files.remove(Caller::default(), ROOT, b"all", false).unwrap();
    assert_eq!(files.extent().inodes, 1);
}

/// Ends the threads, also if what is done panics.
struct Stop<'a>(&'a std::sync::atomic::AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

/// Does something while two threads store noise into what files do not have of the base window, and
/// try again whatever is refused. What is done is given what waits until the store is full.
fn while_full(device: &Device, others: Range<u64>, done: impl FnOnce(&dyn Fn()) -> Result<(), FileError>) {
    let stop = std::sync::atomic::AtomicBool::new(false);
    let refused = AtomicU64::new(0);
    let half = (others.end - others.start) / 2;
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        for thread in 0..2_u64 {
            let (stop, refused) = (&stop, &refused);
            let mut at = others.start + thread * half;
            scope.spawn(move || {
                let last = at + half;
                while !stop.load(Relaxed) && at < last {
                    let is_there = device.next_data(at..at + 4096) == at;
                    if is_there || device.write_base(at, &bytes(at | 1, 4096)).is_ok() {
                        at += 4096;
                    } else {
                        refused.fetch_add(1, Relaxed);
                    }
                }
            });
        }
        let until_full = || {
            let before = refused.load(Relaxed);
            while refused.load(Relaxed) < before + 4 {
                std::thread::yield_now();
            }
        };
        until_full();
        done(&until_full).unwrap();
    });
}

/// A device of 256 MiB whose store has 24.
fn small_store() -> Arc<Device> {
    let config =
        DeviceConfig { observe: false, store_bytes: Some(24 << 20), ..DeviceConfig::new(256 << 20, 8 << 20) };
    Arc::new(Device::new(config).unwrap())
}

#[test]
fn names_can_be_removed_while_others_wait_for_every_block_that_is_freed() {
    let device = small_store();
    let files = Files::open(Arc::clone(&device), 32 << 20, true).unwrap().unwrap();
    let name = |number: u32| format!("{}{number}", "x".repeat(100)).into_bytes();
    let made: u32 = 1500;
    for number in 0..made {
        let inode = files.make(Caller::default(), ROOT, &name(number), &NEW_FILE).unwrap();
        // Little files, whose blocks do not pay for a record each.
        if number % 10 == 0 {
            files.write(inode, 0, &bytes(5 + u64::from(number), 3000), Way::Cached).unwrap();
        }
    }
    let full = |files: &Files| {
        while_full(&device, 160 << 20..256 << 20, |until_full| {
            let all = files.children(ROOT, 0, usize::MAX)?;
            let first = all[0].inode;
            let mut mode = 0o600;
            for (number, child) in all.iter().skip(1).take(600).enumerate() {
                mode ^= 1;
                files.set(first, &Wanted { mode: Some(mode), ..Wanted::default() })?;
                files.remove(Caller::default(), ROOT, &child.name, false)?;
                if number % 50 == 0 {
                    until_full();
                }
            }
            Ok(())
        });
    };
    full(&files);
    drop(files);
    for first in [false, true] {
        let files = Files::open(Arc::clone(&device), 32 << 20, first).unwrap().unwrap();
        full(&files);
    }
    let files = Files::open(device, 32 << 20, true).unwrap().unwrap();
    assert_eq!(files.extent().inodes, 2);
}

#[test]
fn a_name_that_is_refused_of_a_full_store_takes_nothing_from_those_that_are_removed() {
    let device = small_store();
    let files = Files::open(Arc::clone(&device), 4 << 20, true).unwrap().unwrap();
    let name = |number: u32| format!("{}{number}", "x".repeat(200)).into_bytes();
    let make = |number| files.make(Caller::default(), ROOT, &name(number), &NEW_FILE);
    let mut made = 0;
    while make(made).is_ok() {
        made += 1;
    }
    while_full(&device, 160 << 20..256 << 20, |until_full| {
        files.renew_log()?;
        until_full();
        let inode = files.find(ROOT, &name(0))?;
        for turn in 0..900 {
            files.set(inode, &Wanted { mode: Some(0o600 + turn % 2), ..Wanted::default() })?;
            if turn % 300 == 0 {
                // There is room for some more names in a state that was just written.
                while make(made).is_ok() {
                    made += 1;
                }
                until_full();
            }
        }
        for number in 0..made {
            files.remove(Caller::default(), ROOT, &name(number), false)?;
        }
        Ok(())
    });
    assert_eq!(files.extent().inodes, 1);
}

#[test]
fn files_of_a_device_that_does_not_code_are_there_again() {
    let config = DeviceConfig {
        observe: false,
        mode: "plain".parse().unwrap(),
        ..DeviceConfig::new(128 << 20, 8 << 20)
    };
    let device = Arc::new(Device::new(config).unwrap());
    let content = bytes(3, 10_000);
    let inode = file(&files(&device, true), "x");
    for first in [false, true] {
        let files = files(&device, first);
        files.write(inode, 0, &content, Way::Cached).unwrap();
    }
    assert!(contents(&files(&device, true), inode) == content);
}

#[test]
fn a_file_may_reach_from_one_slab_into_the_next() {
    let device = device();
    let files = files(&device, true);
    let inode = file(&files, "x");
    let piece = bytes(5, 1 << 20);
    for at in 0..40 {
        files.write(inode, at << 20, &piece, Way::Cached).unwrap();
    }
    let extents = files.core.lock().state.file(inode).unwrap().extents.len();
    assert!(extents < 3, "{extents}: what this is about");
    let stored = files.stored(inode).unwrap();
    assert_eq!(stored, 40 << 20, "noise takes as much as it has");
    drop(files);
    for first in [false, true] {
        let files = super::tests::files(&device, first);
        assert_eq!(files.stored(inode).unwrap(), stored);
        assert!(contents(&files, inode).chunks(1 << 20).all(|found| found == piece));
        files.forgotten(inode, 1).unwrap();
    }
    let files = super::tests::files(&device, true);
    // Over the border, and what is left.
    files.punch(inode, &(10 << 20..20 << 20)).unwrap();
    drop(files);
    let files = super::tests::files(&device, true);
    let other = file(&files, "y");
    files.allocate(other, &(0..LIMIT - (30 << 20)), true).unwrap();
    files.remove(Caller::default(), ROOT, b"x", false).unwrap();
    files.remove(Caller::default(), ROOT, b"y", false).unwrap();
    assert_eq!(files.extent(), Extent { limit: LIMIT, free: LIMIT, inodes: 1 });
    let slab = |name: &&String| name.strip_prefix("/.lamina/files/").is_some_and(|rest| rest.contains('/'));
    assert_eq!(device.hidden_tensors().iter().filter(slab).count(), 0, "all slabs are empty and go");
}

#[test]
fn what_is_set_clears_privileges_and_changes_times_as_asked() {
    let files = files(&device(), true);
    let inode = file(&files, "x");
    let fifo = New { mode: libc::S_IFIFO | 0o6711, ..NEW_FILE };
    let fifo = files.make(Caller::default(), ROOT, b"fifo", &fifo).unwrap();
    let old = |inode, mode| {
        let at = Some(When::At((5, 0)));
        let wanted = Wanted { mode: Some(mode), modified: at, accessed: at, ..Wanted::default() };
        files.set(inode, &wanted).unwrap()
    };
    let drops_privileges = true;
    for (wanted, before, after, modifies) in [
        // Whoever may keep them truncates.
        (Wanted { size: Some(0), ..Wanted::default() }, 0o6755, 0o6755, true),
        (Wanted { size: Some(0), drops_privileges, ..Wanted::default() }, 0o6755, 0o755, true),
        (Wanted { uid: Some(1), drops_privileges, ..Wanted::default() }, 0o6711, 0o711, false),
        // Without the right to run it the group's bit says something else.
        (Wanted { gid: Some(1), drops_privileges, ..Wanted::default() }, 0o6744, 0o2744, false),
        (Wanted::default(), 0o4700, 0o700, false),
        (Wanted { mode: Some(0o4700), ..Wanted::default() }, 0o4700, 0o4700, false),
    ] {
        for inode in [inode, fifo].into_iter().take(if wanted.size.is_some() { 1 } else { 2 }) {
            let then = old(inode, before);
            std::thread::sleep(std::time::Duration::from_millis(2));
            let now = files.set(inode, &wanted).unwrap();
            assert_eq!(now.mode & 0o7777, after, "{wanted:?}");
            assert_eq!(now.times[1] != then.times[1], modifies, "{wanted:?}");
            assert!(now.times[2] > then.times[2], "{wanted:?}");
        }
    }
    let folder = files.make(Caller::default(), ROOT, b"d", &NEW_FOLDER).unwrap();
    old(folder, 0o2775);
    let wanted = Wanted { uid: Some(1), drops_privileges, ..Wanted::default() };
    assert_eq!(files.set(folder, &wanted).unwrap().mode & 0o7777, 0o2775);
}

#[test]
fn addresses_run_out_and_come_back() {
    let device = device();
    let files = files(&device, true);
    let mut made = Vec::new();
    // Zeros take an address and nothing else.
    let zeros = vec![0; 1 << 20];
    let why = loop {
        let inode = file(&files, &format!("f{}", made.len()));
        match (0..5).try_for_each(|piece| files.write(inode, piece << 20, &zeros, Way::Cached).map(drop)) {
            Ok(()) => made.push(inode),
            Err(why) => break why,
        }
    };
    assert!(matches!(why, FileError::NoAddress { .. }) && why.errno() == libc::ENOSPC, "{why}");
    // Nothing is lost to what files were given beforehand.
    assert!(made.len() >= 12, "{}", made.len());
    files.remove(Caller::default(), ROOT, b"f0", false).unwrap();
    let last = file(&files, "last");
    files.write(last, 0, &zeros, Way::Cached).unwrap();
}

#[test]
fn a_part_has_what_others_were_given_beforehand() {
    const PART: u64 = 8 << 20;
    let files = files(&device(), true);
    let all = file(&files, "all");
    let set = |inode, name: &[u8], value: &str| {
        files.set_attribute(Caller::default(), inode, name, value.as_bytes(), None)
    };
    set(all, b"user.lamina.format", "bf16").unwrap();
    // As much as a slab, so that what is free is free for bytes of no format.
    files.allocate(all, &(0..16 << 20), true).unwrap();
    let held = bytes(3, 4096);
    files.write(all, 0, &held, Way::Cached).unwrap();
    let (grows, zeros) = (file(&files, "grows"), vec![0; 1 << 20]);
    let mut at = 0;
    while files.extent().free >= PART {
        at += files.write(grows, at, &zeros, Way::Cached).unwrap() as u64;
    }
    let part = format!("0+{PART} opaque");
    set(all, b"user.lamina.class", &part).unwrap();
    assert_eq!(contents(&files, all)[..held.len()], held);
    assert!(files.stored_by_class(all, &["opaque"]).unwrap()[0] > 0);
    // Nothing else gives way.
    let rest = format!("{PART}+{PART} opaque");
    let why = set(all, b"user.lamina.class", &rest).unwrap_err();
    assert!(matches!(why, FileError::NoAddress { .. }), "{why}");
}

#[test]
fn parts_whose_units_are_not_the_files_own_are_refused() {
    let files = files(&device(), true);
    let inode = file(&files, "a");
    let set = |name: &[u8], value: &str| {
        files.set_attribute(Caller::default(), inode, name, value.as_bytes(), None)
    };
    // Two blocks, of which three are no multiple.
    set(b"user.lamina.kv", "64,64").unwrap();
    files.allocate(inode, &(0..96 << 10), true).unwrap();
    let held = bytes(3, 96 << 10);
    files.write(inode, 0, &held, Way::Cached).unwrap();
    // Also when nothing but whether it can be is asked.
    for part in ["0+24576 bf16 64,96", "0+0 bf16 64,96"] {
        let why = set(b"user.lamina.class", part).unwrap_err();
        assert!(matches!(why, FileError::Units { part: 12288, file: 8192 }), "{why}");
        assert_eq!(why.errno(), libc::EINVAL);
        assert!(why.to_string().contains("12288") && why.to_string().contains("8192"), "{why}");
    }
    // A half and a double of it can be.
    for part in ["0+24576 bf16", "24576+24576 bf16 64,128"] {
        set(b"user.lamina.class", part).unwrap();
    }
    for (start, end) in [(0, 16384_usize), (8192, 40960)] {
        files.punch(inode, &(start as u64..end as u64)).unwrap();
        files.write(inode, start as u64, &held[start..end], Way::Cached).unwrap();
        assert!(files.core.lock().space.is_even());
    }
    assert!(contents(&files, inode) == held);
}

#[test]
fn the_log_is_begun_anew_and_names_run_out() {
    let device = device();
    let files = Files::open(Arc::clone(&device), 4 << 20, true).unwrap().unwrap();
    let long = "x".repeat(200);
    let mut made = 0;
    let why = loop {
        match files.make(Caller::default(), ROOT, format!("{long}{made}").as_bytes(), &NEW_FILE) {
            Ok(_) => made += 1,
            Err(why) => break why,
        }
    };
    assert!(matches!(why, FileError::NoNames { .. }) && made > 2000, "{made}: {why}");
    for name in 0..made {
        files.remove(Caller::default(), ROOT, format!("{long}{name}").as_bytes(), false).unwrap();
    }
    assert_eq!(files.extent().inodes, 1);
    file(&files, "again");
    drop(files);
    let files = Files::open(device, 4 << 20, true).unwrap().unwrap();
    assert_eq!(files.children(ROOT, 0, 9).unwrap().len(), 1);
}

#[test]
fn a_request_that_is_sent_again_is_done_once() {
    let device = device();
    let files = files(&device, true);
    let caller = |request| Caller { request, ..Caller::default() };
    let inode = files.make(caller(2), ROOT, b"a", &NEW_FILE).unwrap();
    files.rename(caller(4), (ROOT, b"a"), (ROOT, b"b"), Rename::Replace).unwrap();
    files.link(caller(6), inode, ROOT, b"c").unwrap();
    files.remove(caller(8), ROOT, b"b", false).unwrap();
    drop(files);
    let files = super::tests::files(&device, false);
    let again = |request| caller(request | SENT_AGAIN);
    files.rename(again(4), (ROOT, b"a"), (ROOT, b"b"), Rename::Replace).unwrap();
    files.link(again(6), inode, ROOT, b"c").unwrap();
    files.remove(again(8), ROOT, b"b", false).unwrap();
    assert_eq!(files.find(ROOT, b"c").unwrap(), inode);
    // Another of the kernel's numbers is another request.
    assert_eq!(files.remove(again(10), ROOT, b"b", false).unwrap_err().errno(), libc::ENOENT);
    let made = files.make(again(12), ROOT, b"d", &NEW_FILE).unwrap();
    for again in [caller(14), again(14)] {
        files.set_attribute(again, made, b"user.x", b"", Some(false)).unwrap();
    }
    for again in [caller(16), again(16)] {
        files.remove_attribute(again, made, b"user.x").unwrap();
    }
    assert_eq!(files.make(again(12), ROOT, b"d", &NEW_FILE).unwrap(), made);
    assert_eq!(files.make(caller(18), ROOT, b"d", &NEW_FILE).unwrap_err().errno(), libc::EEXIST);
    drop(files);
    // Another mount counts its requests anew.
    let files = super::tests::files(&device, true);
    assert_eq!(files.make(again(12), ROOT, b"d", &NEW_FILE).unwrap_err().errno(), libc::EEXIST);
    drop(files);
    // So it does for whoever serves it after a process that died.
    let files = super::tests::files(&device, false);
    assert_eq!(files.find(ROOT, b"c").unwrap(), inode);
    files.remove(again(8), ROOT, b"c", false).unwrap();
    assert!(files.find(ROOT, b"c").is_err(), "said to be done, and not done");
}

#[test]
fn a_file_is_coded_as_its_attributes_say() {
    let device = device();
    let files = files(&device, true);
    let bf16: Vec<u8> = bytes(77, 2 << 20).chunks(2).flat_map(|pair| [pair[0], 0x3f]).collect();
    let stored = |inode| -> u64 {
        String::from_utf8(files.attribute(inode, b"user.lamina.stored").unwrap()).unwrap().parse().unwrap()
    };
    let plain = file(&files, "plain");
    files.write(plain, 0, &bf16, Way::Cached).unwrap();
    let before = stored(plain);
    files.set_attribute(Caller::default(), plain, b"user.lamina.format", b"bf16", Some(false)).unwrap();
    assert!(contents(&files, plain) == bf16);
    assert!(stored(plain) < before * 9 / 10, "{} of {before}", stored(plain));
    let ratio = files.attribute(plain, b"user.lamina.ratio").unwrap();
    let ratio: f64 = String::from_utf8(ratio).unwrap().parse().unwrap();
    #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
    let wanted = bf16.len() as f64 / stored(plain) as f64;
    assert!((ratio - wanted).abs() < 0.001, "{ratio} {wanted}");
    // What is made in a folder has the folder's.
    let folder = files.make(Caller::default(), ROOT, b"d", &NEW_FOLDER).unwrap();
    files.set_attribute(Caller::default(), folder, b"user.lamina.kv", b"64,32", None).unwrap();
    let inside = files.make(Caller::default(), folder, b"x", &NEW_FILE).unwrap();
    let inner = files.make(Caller::default(), folder, b"e", &NEW_FOLDER).unwrap();
    assert_eq!(files.attribute(inside, b"user.lamina.kv").unwrap(), b"64,32");
    assert_eq!(files.attribute(inner, b"user.lamina.kv").unwrap(), b"64,32");
    files.write(inside, 0, &bf16, Way::Cached).unwrap();
    files.sync(inside).unwrap();
    assert!(contents(&files, inside) == bf16 && stored(inside) < before);
    for (name, value, number) in [
        ("user.lamina.format", "bf17", libc::EINVAL),
        ("user.lamina.kv", "1", 0),
        ("user.lamina.kv", "0,1", libc::EINVAL),
        ("user.lamina.stored", "1", libc::EPERM),
        ("system.posix_acl_access", "", libc::EOPNOTSUPP),
        ("user.", "", libc::EOPNOTSUPP),
        ("user.mine", "", 0),
    ] {
        let set = files.set_attribute(Caller::default(), inside, name.as_bytes(), value.as_bytes(), None);
        assert_eq!(set.map_or_else(|why| why.errno(), |()| 0), number, "{name}");
    }
    assert!(contents(&files, inside) == bf16);
    let names = files.attribute_names(inside).unwrap();
    let names: Vec<_> =
        names.split(|byte| *byte == 0).map(|name| std::str::from_utf8(name).unwrap()).collect();
    assert_eq!(names, ["user.lamina.kv", "user.mine", ""]);
    assert_eq!(
        files.remove_attribute(Caller::default(), inside, b"user.no").unwrap_err().errno(),
        libc::ENODATA
    );
}

/// Bytes of two KV caches of other rows, which code well as what they are, and of none.
fn rows(seed: u64, channels: u64, bytes: u64) -> Vec<u8> {
    let of = |at: u64| {
        let (row, channel) = (at / channels, at % channels);
        let low = (row * 7 + seed + channel * channel * 31) % 5;
        [u8::try_from(low).unwrap() + u8::try_from(channel % 251).unwrap() / 2, 0x3e]
    };
    (0..bytes / 2).flat_map(of).collect()
}

#[test]
fn parts_of_a_file_are_coded_as_is_said_of_them() {
    const PART: u64 = 1 << 20;
    let device = device();
    let held = [rows(1, 64, PART), rows(2, 512, PART), bytes(3, 1 << 20)].concat();
    let classes = ["bf16 64,64", "bf16 512,32", ""];
    let say = |files: &Files, inode, part: &str| {
        files.set_attribute(Caller::default(), inode, b"user.lamina.class", part.as_bytes(), None)
    };
    let mut first = files(&device, true);
    // Said before anything is stored there, and after.
    for (name, before) in [("a", true), ("b", false)] {
        let inode = file(&first, name);
        first.allocate(inode, &(0..3 * PART), true).unwrap();
        let say_all = |files: &Files| {
            for (number, class) in classes.iter().enumerate().take(2) {
                say(files, inode, &format!("{}+{PART} {class}", number as u64 * PART)).unwrap();
            }
        };
        if before {
            say_all(&first);
        }
        first.write(inode, 0, &held, Way::Cached).unwrap();
        if !before {
            let opaque = first.stored(inode).unwrap();
            say_all(&first);
            assert!(first.stored(inode).unwrap() < opaque * 3 / 4, "it codes nothing better");
        }
        first.sync(inode).unwrap();
        assert!(contents(&first, inode) == held);
        let stored = first.stored_by_class(inode, &classes).unwrap();
        assert_eq!(stored.iter().sum::<u64>(), first.stored(inode).unwrap());
        assert!(stored[0] < PART / 2 && stored[1] < PART / 2 && stored[2] > PART / 2, "{stored:?}");
        // Each as what the other is takes more, or as much.
        for (part, other) in [(0, 1), (1, 0)] {
            say(&first, inode, &format!("{}+{PART} {}", part * PART, classes[other])).unwrap();
        }
        let swapped = first.stored_by_class(inode, &classes).unwrap();
        assert!(swapped[0] + swapped[1] > stored[0] + stored[1], "{swapped:?} {stored:?}");
        assert!(contents(&first, inode) == held);
        say_all(&first);
        assert_eq!(first.stored_by_class(inode, &classes).unwrap(), stored);
        // It is so for whoever serves the mount next.
        drop(first);
        first = super::tests::files(&device, true);
        assert!(contents(&first, inode) == held);
        assert_eq!(first.stored_by_class(inode, &classes).unwrap(), stored);
        // What is zeros by a hole is the file's own again, and all of it if that is said.
        first.punch(inode, &(0..PART)).unwrap();
        first.write(inode, 0, &held[..1 << 20], Way::Cached).unwrap();
        assert!(contents(&first, inode) == held);
        assert_eq!(first.stored_by_class(inode, &classes[..1]).unwrap(), [0]);
        say(&first, inode, &format!("0+{}", 3 * PART)).unwrap();
        assert_eq!(first.stored_by_class(inode, &classes[1..2]).unwrap(), [0]);
        assert!(contents(&first, inode) == held);
        for (said, number) in [
            ("", libc::EINVAL),
            ("0", libc::EINVAL),
            ("0+4096 bf17", libc::EINVAL),
            ("0+4096 bf16 64,64,lossy=packkv", libc::EINVAL),
            ("1+4096 bf16", libc::EINVAL),
            ("0+4097 bf16", libc::EINVAL),
            ("18446744073709551615+4096 bf16", libc::EFBIG),
            ("3145728+4096 bf16", libc::EFBIG),
            // Only whether it could be.
            ("0+0 bf16 64,64", 0),
        ] {
            let said = say(&first, inode, said).map_or_else(|why| why.errno(), |()| 0);
            assert_eq!(said, number);
        }
        first
            .set_attribute(Caller::default(), inode, b"user.lamina.kv", b"64,64,lossy=packkv", None)
            .unwrap();
        assert_eq!(say(&first, inode, "0+131072 bf16").unwrap_err().errno(), libc::EINVAL);
        first.remove(Caller::default(), ROOT, name.as_bytes(), false).unwrap();
    }
    assert_eq!(first.extent().free, LIMIT);
}

#[test]
fn what_lies_behind_the_end_is_never_seen() {
    let device = device();
    let files = files(&device, true);
    let inode = file(&files, "x");
    files.write(inode, 0, &[1; 10_000], Way::Cached).unwrap();
    // A process that died while it wrote, before the size was recorded.
    let (dpa, length) = {
        let core = files.core.lock();
        let first = core.state.file(inode).unwrap().extents.all().next();
        first.map(|(_, dpa, length)| (dpa, length)).unwrap()
    };
    device.write_base(dpa + 10_000, &vec![2; usize::try_from(length - 10_000).unwrap()]).unwrap();
    drop(files);
    for first in [false, true] {
        let files = super::tests::files(&device, first);
        let size = 11_000 + 500 * u64::from(first);
        files.set(inode, &Wanted { size: Some(size), ..Wanted::default() }).unwrap();
        let mut wanted = vec![1; 10_000];
        wanted.resize(usize::try_from(size).unwrap(), 0);
        assert!(contents(&files, inode) == wanted);
    }
    let files = super::tests::files(&device, true);
    files.write(inode, 12_000, b"end", Way::Cached).unwrap();
    assert_eq!(contents(&files, inode)[10_000..], [vec![0; 2000], b"end".to_vec()].concat());
}

#[test]
fn a_damaged_log_is_refused_and_one_of_another_version() {
    let device = device();
    let place = {
        let files = files(&device, true);
        file(&files, "x");
        let core = files.core.lock();
        core.log.position().0
    };
    let mut head = vec![0; 24];
    device.read_base(place.0, &mut head).unwrap();
    for (at, byte) in [(0, b'x'), (8, 9), (20, 1)] {
        let mut wrong = head.clone();
        wrong[at] ^= byte;
        device.write_base(place.0, &wrong).unwrap();
        let refused = Files::open(Arc::clone(&device), LIMIT, true).err().unwrap();
        assert_eq!(refused.errno(), libc::EIO, "{refused}");
    }
    device.write_base(place.0, &head).unwrap();
    assert_eq!(files(&device, true).extent().inodes, 2);
}

#[test]
fn a_device_without_files_has_none_unless_asked_for_some() {
    let device = device();
    assert!(Files::open(Arc::clone(&device), 0, true).unwrap().is_none());
    drop(files(&device, true));
    assert!(Files::open(device, 0, true).unwrap().is_some(), "what is there is shown");
}

#[test]
fn damage_of_the_log_is_not_its_end() {
    let device = device();
    let place = {
        let files = files(&device, true);
        let inode = file(&files, "x");
        files.write(inode, 0, &bytes(5, 1 << 20), Way::Cached).unwrap();
        let core = files.core.lock();
        core.log.position().0
    };
    device.inject_poison(place.0 + 4096, 4096).unwrap();
    let stored = device.space().free;
    let refused = Files::open(Arc::clone(&device), LIMIT, true).err().unwrap();
    assert!(matches!(refused, FileError::Damaged { .. }), "{refused}");
    assert_eq!(device.space().free, stored, "nothing is discarded");
    assert_eq!(damaged_log(&device, &(0..place.0 + 4096)), None);
    assert_eq!(damaged_log(&device, &(0..place.0 + 4097)), Some(place));
}

#[test]
fn a_log_without_its_header_is_not_taken_for_none() {
    for holds in [false, true] {
        let device = device();
        let (dpa, length) = {
            let files = files(&device, true);
            let inode = file(&files, "x");
            if holds {
                files.write(inode, 0, &bytes(5, 1 << 20), Way::Cached).unwrap();
            }
            let core = files.core.lock();
            core.log.position().0
        };
        device.discard(dpa, 4096).unwrap();
        let stored = device.space().free;
        let refused = Files::open(Arc::clone(&device), LIMIT, true).err().unwrap();
        assert!(matches!(refused, FileError::Damaged { .. }), "{refused}");
        assert!(refused.to_string().contains(&format!("`lamina discard {dpa} {length}`")), "{refused}");
        assert_eq!(device.space().free, stored, "nothing is discarded");
        // As it says.
        device.discard(dpa, length).unwrap();
        assert_eq!(files(&device, true).extent(), Extent { limit: LIMIT, free: LIMIT, inodes: 1 });
    }
}

#[test]
fn what_files_keep_is_not_to_be_discarded_but_a_log_that_is_given_up() {
    let device = device();
    let files = files(&device, true);
    let inode = file(&files, "x");
    files.write(inode, 0, &bytes(5, 1 << 20), Way::Cached).unwrap();
    let (dpa, length) = files.core.lock().log.position().0;
    let (_, slab, _) = files.core.lock().state.file(inode).unwrap().extents.all().next().unwrap();
    for served in [true, false] {
        for part in [dpa..dpa + 4096, dpa + 4096..dpa + length, 0..device.base_bytes(), slab..slab + 1] {
            let lost = lost_by_discard(&device, &part, served);
            assert!(lost.is_some_and(|(_, dpa, length)| part.start < dpa + length && dpa < part.end));
        }
        let whole = lost_by_discard(&device, &(dpa..dpa + length), served);
        assert_eq!(whole.is_some(), served);
        let end = device.base_bytes();
        assert_eq!(lost_by_discard(&device, &(end - 4096..end), served), None);
    }
}

#[test]
fn a_log_that_is_damaged_while_it_is_served_is_written_anew() {
    let device = device();
    let files = files(&device, true);
    file(&files, "x");
    let (place, ..) = files.core.lock().log.position();
    device.inject_poison(place.0, 2 * 4096).unwrap();
    files.renew_log().unwrap();
    assert_eq!((device.poison().len(), damaged_log(&device, &(0..u64::MAX))), (0, None));
    file(&files, "y");
    drop(files);
    assert_eq!(super::tests::files(&device, true).extent().inodes, 3);
}

#[test]
fn what_is_lost_of_a_file_is_not_taken_for_bytes_when_that_is_coded_anew() {
    let device = device();
    let files = files(&device, true);
    let inode = file(&files, "x");
    let held = bytes(5, 64 << 10);
    files.write(inode, 0, &held, Way::Cached).unwrap();
    let set = |name: &[u8], value: &[u8]| files.set_attribute(Caller::default(), inode, name, value, None);
    let places = |files: &Files| super::places_of(files.core.lock().state.node(inode).unwrap());
    let before = places(&files);
    let free = files.extent().free;
    device.inject_poison(before[0].start + 8192, 4096).unwrap();
    for (name, value) in [("user.lamina.format", "bf16"), ("user.lamina.class", "4096+16384 bf16")] {
        let why = set(name.as_bytes(), value.as_bytes()).unwrap_err();
        assert_eq!(why.errno(), libc::EIO, "{name}: {why}");
        assert!(why.to_string().contains("4096 bytes at 8192 of the file are lost"), "{name}: {why}");
        assert_eq!((places(&files), device.poison().len()), (before.clone(), 1), "{name}");
    }
    assert!(files.attribute(inode, b"user.lamina.format").is_err() && files.extent().free == free);
    // A part beside it is not lost, and neither is what was written again.
    set(b"user.lamina.class", b"16384+16384 bf16").unwrap();
    files.write(inode, 8192, &held[8192..12288], Way::Cached).unwrap();
    set(b"user.lamina.format", b"bf16").unwrap();
    assert!(contents(&files, inode) == held && device.poison().is_empty());
}

#[test]
fn pages_that_a_write_filled_may_be_stored_into_without_a_read() {
    // Of what waits to be written back the kernel does not say where.
    for (way, first) in
        [(Way::Cached, [65536, 65536]), (Way::WrittenBack, [0, 40000]), (Way::Direct, [u64::MAX; 2])]
    {
        let first = first.map(|at| Some(at).filter(|at| *at < u64::MAX));
        let device = device();
        let files = files(&device, true);
        let inode = file(&files, "x");
        files.looked_up(inode).unwrap();
        files.opened(inode, true).unwrap();
        files.set(inode, &Wanted { size: Some(1 << 20), ..Wanted::default() }).unwrap();
        let data = |from| files.seek(inode, from, true);
        assert!(data(0).is_err(), "nothing of it is in the page cache");
        files.write(inode, 65536, &[0; 4096], way).unwrap();
        assert_eq!(data(0).ok(), first[0], "{way:?}");
        if way == Way::Cached {
            assert_eq!(
                (files.seek(inode, 0, false).ok(), files.seek(inode, 65536, false).ok()),
                (Some(0), Some(69632))
            );
        }
        // As long as the kernel knows it, whoever opens it and whatever is punched.
        files.closed(inode).unwrap();
        files.opened(inode, false).unwrap();
        files.punch(inode, &(0..32768)).unwrap();
        assert_eq!(data(40000).ok(), first[1], "{way:?}");
        files.closed(inode).unwrap();
        files.forgotten(inode, 1).unwrap();
        assert!(data(0).is_err());
    }
}

#[test]
fn an_inode_that_the_kernel_looked_up_again_is_not_forgotten() {
    let device = device();
    let files = files(&device, true);
    let inode = file(&files, "x");
    files.set(inode, &Wanted { size: Some(1 << 20), ..Wanted::default() }).unwrap();
    files.looked_up(inode).unwrap();
    files.looked_up(inode).unwrap();
    files.opened(inode, true).unwrap();
    files.read(inode, 0, &mut [0; 10], true).unwrap();
    // What was known before is forgotten, and not what is known since.
    files.forgotten(inode, 1).unwrap();
    assert_eq!(files.seek(inode, 5, true).unwrap(), 5, "stores into its pages may be everywhere");
    files.closed(inode).unwrap();
    files.forgotten(inode, 1).unwrap();
    assert!(matches!(files.seek(inode, 5, true), Err(FileError::NothingBehind { .. })));
}

#[test]
fn addresses_are_given_without_a_file_losing_what_another_wrote_meanwhile() {
    let device = device();
    let files = files(&device, true);
    let inode = file(&files, "x");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for end in 1..400 {
                files.allocate(inode, &(0..end * 512), true).unwrap();
            }
        });
        for at in 0..400_u64 {
            files.write(inode, at * 1024, &[7; 1024], Way::Cached).unwrap();
        }
    });
    assert!(contents(&files, inode) == vec![7; 400 << 10]);
}

#[test]
fn a_window_that_is_full_has_no_place_for_the_log() {
    let device = device();
    device.write_base(0, &vec![1; 128 << 20]).unwrap();
    let refused = Files::open(device, LIMIT, true).err().unwrap();
    assert!(refused.to_string().contains("2097152 bytes in one piece"), "{refused}");
    assert!(refused.is_no_room());
}

#[test]
fn names_can_be_removed_however_often_others_are_told_of() {
    let device = device();
    let files = Files::open(Arc::clone(&device), 4 << 20, true).unwrap().unwrap();
    let name = |number: u32| format!("{}{number}", "x".repeat(200)).into_bytes();
    let mut made = 0;
    while files.make(Caller::default(), ROOT, &name(made), &NEW_FILE).is_ok() {
        made += 1;
    }
    let inode = files.find(ROOT, &name(0)).unwrap();
    for turn in 0..20_000 {
        files.set(inode, &Wanted { mode: Some(0o600 + turn % 2), ..Wanted::default() }).unwrap();
        let (old, new) = if turn % 2 == 0 { (name(1), name(2)) } else { (name(2), name(1)) };
        files.rename(Caller::default(), (ROOT, &old), (ROOT, &new), Rename::Exchange).unwrap();
    }
    // Longer names are refused, before they take what a removal needs.
    let longer = (0..made).map(|number| (name(number), [name(number), vec![b'y'; 40]].concat()));
    let longer: Vec<_> = longer
        .map(|(old, new)| files.rename(Caller::default(), (ROOT, &old), (ROOT, &new), Rename::Keep))
        .collect();
    assert!(longer.iter().any(|renamed| matches!(renamed, Err(FileError::NoNames { .. }))));
    for child in files.children(ROOT, 0, usize::MAX).unwrap() {
        files.remove(Caller::default(), ROOT, &child.name, false).unwrap();
    }
    assert_eq!(files.extent().inodes, 1);
}

#[test]
fn many_classes_have_room_in_few_addresses() {
    let files = files(&device(), true);
    let set = |inode, name: &[u8], value: &str| {
        files.set_attribute(Caller::default(), inode, name, value.as_bytes(), None).unwrap();
    };
    let formats = ["bf16", "fp16", "fp32", "fp8_e4m3fn", "fp8_e5m2", "fp6_e3m2", "int8", "int4"];
    let mut held = Vec::new();
    for (number, format) in formats.iter().enumerate() {
        let inode = file(&files, format);
        set(inode, b"user.lamina.format", format);
        held.push((inode, bytes(number as u64, 300_000)));
    }
    for number in 1..=20_u64 {
        let inode = file(&files, &format!("kv {number}"));
        set(inode, b"user.lamina.format", "bf16");
        set(inode, b"user.lamina.kv", &format!("{},32", 16 * number));
        held.push((inode, bytes(number, 1 << 20)));
    }
    for (inode, content) in &held {
        files.write(*inode, 0, content, Way::Cached).unwrap();
    }
    // What is left goes to one file, but for what classes have begun and do not use.
    let (large, zeros) = (file(&files, "large"), vec![0; 1 << 20]);
    let mut at = 0;
    while files.write(large, at, &zeros, Way::Cached).is_ok_and(|count| count == zeros.len()) {
        at += zeros.len() as u64;
    }
    assert!(at >= 16 << 20, "{at} of {:?}", files.extent());
    for (inode, content) in &held {
        assert!(contents(&files, *inode) == *content);
    }
}

#[test]
fn what_one_format_does_not_use_is_there_for_others() {
    let config = DeviceConfig { observe: false, ..DeviceConfig::new(1 << 30, 8 << 20) };
    let files = files(&Arc::new(Device::new(config).unwrap()), true);
    let first = file(&files, "first");
    let why = files.allocate(first, &(0..LIMIT + (8 << 20)), false).unwrap_err();
    assert!(matches!(why, FileError::NoAddress { .. }), "{why}");
    for (name, format) in [("b", "bf16"), ("o", "opaque"), ("h", "fp16")] {
        let inode = file(&files, name);
        let set =
            files.set_attribute(Caller::default(), inode, b"user.lamina.format", format.as_bytes(), None);
        set.unwrap();
        files.allocate(inode, &(0..LIMIT), true).unwrap();
        files.remove(Caller::default(), ROOT, name.as_bytes(), false).unwrap();
        assert_eq!(files.extent().free, LIMIT);
    }
}

/// What is opened of a log that goes on with these changes.
fn lying(changes: &[Change]) -> Result<Files, FileError> {
    let device = device();
    let mut bytes = Vec::new();
    record::encode(changes, &mut bytes);
    {
        let files = files(&device, true);
        let mut core = files.core.lock();
        let Core { state, log, .. } = &mut *core;
        log.append(&bytes, state, false).unwrap();
    }
    Files::open(device, LIMIT, true).map(Option::unwrap)
}

fn told(mode: u32, size: u64, parent: u64) -> Meta {
    Meta { mode, uid: 0, gid: 0, links: u32::MAX, device: 0, size, parent, times: [(0, 0); 3] }
}

#[test]
fn a_log_that_lies_is_refused() {
    let put = |inode| Change::Put { inode, meta: told(NEW_FILE.mode, 0, 0) };
    let name = |name: &[u8], place| Change::Name { folder: ROOT, name: name.to_vec(), to: Some((5, place)) };
    let map = |at, dpa, length| Change::Map { inode: 5, at, dpa, length };
    for changes in [
        vec![put(5), name(b"../x", 3)],
        vec![put(5), name(b"a\0b", 3)],
        vec![put(5), name(b"..", 3)],
        vec![put(5), name(&[b'x'; 256], 3)],
        vec![put(5), name(b"x", u64::MAX)],
        vec![name(b"x", 3)],
        vec![put(0)],
        vec![put(u64::MAX)],
        vec![put(1 << 61 | 7)],
        vec![Change::Put { inode: 5, meta: told(NEW_FILE.mode, u64::MAX, 0) }],
        vec![Change::Put { inode: ROOT, meta: told(NEW_FILE.mode, 0, 0) }],
        vec![Change::Drop { inode: ROOT }],
        vec![put(5), map(1, 4096, 4096)],
        vec![put(5), map(0, 4097, 4096)],
        vec![put(5), map(0, 4096, 10)],
        vec![put(5), map(0, 4096, 4096)],
        vec![put(5), map(0, 4096, 0)],
        vec![put(5), map(u64::MAX - 4095, 4096, 8192)],
        vec![map(0, 4096, 4096)],
    ] {
        let refused = lying(&changes).err();
        assert!(matches!(refused, Some(FileError::Damaged { .. })), "{changes:?}: {refused:?}");
    }
}

#[test]
fn folders_that_lie_in_each_other_are_found() {
    let folder = |inode, parent| Change::Put { inode, meta: told(NEW_FOLDER.mode, 0, parent) };
    let name = |folder, to| Change::Name { folder, name: b"x".to_vec(), to: Some((to, 3)) };
    let circle = [folder(5, 6), folder(6, 5), folder(7, ROOT), name(5, 6), name(6, 5), name(ROOT, 7)];
    let files = lying(&circle).unwrap();
    let refused = files.rename(Caller::default(), (ROOT, b"x"), (5, b"y"), Rename::Replace).unwrap_err();
    assert!(matches!(refused, FileError::Damaged { .. }), "{refused}");
    // Counts that cannot be are no panic.
    files.make(Caller::default(), 7, b"z", &NEW_FOLDER).unwrap();
    files.rename(Caller::default(), (7, b"z"), (ROOT, b"z"), Rename::Replace).unwrap();
}

#[test]
fn addresses_that_were_refused_or_given_back_are_left_to_every_class() {
    type Case = fn(&Files, u64);
    let refused = |files: &Files, inode| {
        assert!(files.allocate(inode, &(0..LIMIT + (1 << 20)), true).unwrap_err().is_no_room());
    };
    let written_and_refused = |files: &Files, inode| {
        let piece = bytes(1, 1 << 20);
        let mut at = 0;
        while let Ok(count) = files.write(inode, at, &piece, Way::Cached) {
            at += count as u64;
        }
        files.set(inode, &Wanted { size: Some(0), ..Wanted::default() }).unwrap();
    };
    let given_back = |files: &Files, inode| {
        files.allocate(inode, &(0..LIMIT - (1 << 20)), true).unwrap();
        files.remove(Caller::default(), ROOT, b"large", false).unwrap();
        files.forgotten(inode, 1).unwrap();
    };
    for case in [refused as Case, written_and_refused, given_back] {
        let device = device();
        let files = files(&device, true);
        case(&files, file(&files, "large"));
        assert_eq!(files.extent().free, LIMIT);
        // One small file lies in what was taken then, if that is still there.
        files.write(file(&files, "small"), 0, &[1; 4096], Way::Cached).unwrap();
        let coded = file(&files, "coded");
        files.set_attribute(Caller::default(), coded, b"user.lamina.format", b"bf16", None).unwrap();
        let held = bytes(2, 1 << 20);
        assert_eq!(files.write(coded, 0, &held, Way::Cached).unwrap(), held.len());
        assert!(contents(&files, coded) == held);
    }
}

#[test]
fn a_folder_is_listed_to_its_end_while_what_is_in_it_is_renamed() {
    type Rewrite = fn(&Files, &[u8]);
    fn rename(files: &Files, old: &[u8], new: &[u8]) {
        files.rename(Caller::default(), (ROOT, old), (ROOT, new), Rename::Replace).unwrap();
    }
    let there_and_back = |files: &Files, name: &[u8]| {
        rename(files, name, b"other");
        rename(files, b"other", name);
    };
    let written_beside = |files: &Files, name: &[u8]| {
        file(files, "new");
        rename(files, b"new", name);
    };
    let suffixed = |files: &Files, name: &[u8]| rename(files, name, &[name, b"~"].concat());
    for rewrite in [there_and_back as Rewrite, written_beside, suffixed] {
        let files = files(&device(), true);
        for number in 0..600 {
            file(&files, &format!("{number}"));
        }
        let (mut behind, mut listed) = (0, 0);
        loop {
            let children = files.children(ROOT, behind, 10).unwrap();
            let Some(last) = children.last() else { break };
            behind = last.place;
            listed += children.len();
            assert!(listed <= 1200, "no end of it");
            for child in &children {
                rewrite(&files, &child.name);
            }
        }
        assert!(listed >= 600);
        assert_eq!(files.children(ROOT, 0, usize::MAX).unwrap().len(), 600);
    }
}

#[test]
fn attributes_that_are_told_are_not_listed_and_unknown_ones_of_the_devices_are_refused() {
    let files = files(&device(), true);
    let inode = file(&files, "x");
    files.write(inode, 0, &[0; 4096], Way::Cached).unwrap();
    let set = |name: &[u8], value: &[u8]| files.set_attribute(Caller::default(), inode, name, value, None);
    for (name, value) in [("format", "bf16"), ("kv", "1024,128"), ("pool", "1")] {
        set(format!("user.lamina.{name}").as_bytes(), value.as_bytes()).unwrap();
    }
    // Whoever copies attributes finds and sets each of them.
    let list = files.attribute_names(inode).unwrap();
    let names: Vec<_> = list.split(|byte| *byte == 0).filter(|name| !name.is_empty()).collect();
    assert_eq!(names.len(), 3);
    for name in names {
        set(name, &files.attribute(inode, name).unwrap()).unwrap();
    }
    assert!(files.attribute(inode, b"user.lamina.stored").is_ok(), "who asks for it is told");
    for name in ["formt", "Format", "class2", ""] {
        let refused = set(format!("user.lamina.{name}").as_bytes(), b"bf16").unwrap_err();
        assert_eq!(refused.errno(), libc::EINVAL, "{name}: {refused}");
    }
    set(b"user.laminated", b"").unwrap();
}

#[test]
fn attributes_that_an_earlier_program_let_be_set_are_told_and_not_listed() {
    let device = device();
    let files = files(&device, true);
    let inode = file(&files, "x");
    let mine: &[u8] = b"user.mine";
    files.set_attribute(Caller::default(), inode, mine, b"1", None).unwrap();
    let old: [&[u8]; 3] = [b"user.lamina.formt", b"user.lamina.class", b"user.lamina.ratio"];
    for name in old {
        let change = Change::Attribute { inode, name: name.to_vec(), value: Some(b"old".to_vec()) };
        files.commit(&mut files.core.lock(), vec![change], Caller::default(), true).unwrap();
    }
    drop(files);
    let files = super::tests::files(&device, true);
    assert_eq!(files.attribute_names(inode).unwrap(), [mine, b"\0"].concat());
    for name in old {
        assert_eq!(files.attribute(inode, name).unwrap(), b"old");
        files.remove_attribute(Caller::default(), inode, name).unwrap();
    }
}

#[test]
fn a_fifo_without_a_name_stays_until_the_kernel_forgets_it() {
    let device = device();
    for kind in [libc::S_IFIFO, libc::S_IFSOCK, libc::S_IFCHR] {
        for first in [true, false] {
            let files = files(&device, true);
            let new = New { mode: kind | 0o644, device: 0, target: b"" };
            let make = |name: &[u8]| files.make(Caller::default(), ROOT, name, &new).unwrap();
            let (inode, unknown) = (make(b"p"), make(b"q"));
            files.looked_up(inode).unwrap();
            drop(files);
            // Whoever answers then.
            let files = super::tests::files(&device, first);
            if first {
                files.looked_up(inode).unwrap();
            }
            files.remove(Caller::default(), ROOT, b"p", false).unwrap();
            assert_eq!((files.meta(inode).unwrap().links, files.extent().inodes), (0, 3));
            files.forgotten(inode, 1).unwrap();
            assert!(files.meta(inode).is_err());
            files.forgotten(unknown, 1).unwrap();
            files.remove(Caller::default(), ROOT, b"q", false).unwrap();
            assert_eq!(files.extent().inodes, 1, "the kernel knew nothing of it");
        }
    }
}

#[test]
fn as_many_attributes_as_there_may_be_can_be_listed() {
    /// The longest list that the kernel takes (`XATTR_LIST_MAX`).
    const MAX_LIST: usize = 64 << 10;
    let files = files(&device(), true);
    let inode = file(&files, "x");
    files.write(inode, 0, &[1], Way::Cached).unwrap();
    let set =
        |at| files.set_attribute(Caller::default(), inode, format!("user.{at:x}").as_bytes(), b"", None);
    let set = (0..20_000).map(set).take_while(Result::is_ok).count();
    let list = files.attribute_names(inode).unwrap();
    assert!((5000..20_000).contains(&set) && list.len() <= MAX_LIST, "{set} take {} bytes", list.len());
}
