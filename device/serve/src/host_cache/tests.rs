//! Caches of several hosts against a model: an array for each, an array for the device.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use lamina_device::device::{Device, DeviceConfig};

const PAGES: usize = 4;
const BASE: usize = PAGES * PAGE;

fn hosts(count: usize) -> (Arc<Device>, Vec<HostCache>) {
    let device = Arc::new(Device::new(DeviceConfig::new(BASE as u64, 64 << 20)).unwrap());
    let whole = Partition::named(&device, "").unwrap();
    let caches = (0..count).map(|_| HostCache::new(whole.clone(), BASE as u64)).collect();
    (device, caches)
}

fn seen(host: &HostCache, at: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    host.read(at as u64, &mut bytes).unwrap();
    bytes
}

fn on(device: &Device, at: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    device.read_base(at as u64, &mut bytes).unwrap();
    bytes
}

/// What changed on the device: first and last byte of each run of lines.
fn flush(host: &HostCache, range: Range<u64>) -> Vec<(u64, u64)> {
    let mut changed = Vec::new();
    host.write_back(range, &mut changed).unwrap();
    changed.into_iter().map(|range| (range.start, range.end)).collect()
}

fn invalidate(host: &HostCache, range: Range<u64>) -> u64 {
    host.leave(range.clone());
    host.left(range, &mut Vec::new()).unwrap()
}

#[test]
fn stores_of_two_hosts_to_different_lines_of_a_page_are_both_kept() {
    let (device, hosts) = hosts(2);
    for host in &hosts {
        assert_eq!(seen(host, 0, PAGE), [0; PAGE]);
    }
    // Each writes its whole page back, as a page cache does.
    let mut one = [0; PAGE];
    one[..64].fill(1);
    let mut other = [0; PAGE];
    other[64..192].fill(2);
    hosts[0].write(0, &one).unwrap();
    hosts[1].write(0, &other).unwrap();
    assert_eq!(on(&device, 0, PAGE), [0; PAGE], "a write-back is no flush");
    assert_eq!(flush(&hosts[0], 0..BASE as u64), [(0, 64)]);
    assert_eq!(flush(&hosts[1], 0..BASE as u64), [(64, 192)]);
    let merged = [[1; 64].as_slice(), &[2; 128], &[0; PAGE - 192]].concat();
    assert_eq!(on(&device, 0, PAGE), merged);
    // Each has its own still, until it lets go of it.
    assert!(seen(&hosts[0], 0, PAGE) == one && seen(&hosts[1], 0, PAGE) == other);
    assert_eq!(invalidate(&hosts[0], 100..101), 1);
    assert!(seen(&hosts[0], 0, PAGE) == merged && seen(&hosts[1], 0, PAGE) == other);
    assert_eq!(hosts[0].report("h").lines_merged, 1);
}

#[test]
fn a_flush_brings_the_lines_that_its_range_touches_and_no_others() {
    let (device, hosts) = hosts(1);
    hosts[0].write(0, &[7; BASE]).unwrap();
    assert_eq!(flush(&hosts[0], 100..129), [(64, 192)]);
    let held = on(&device, 0, BASE);
    assert!(held.iter().enumerate().all(|(at, byte)| (*byte == 7) == (64..192).contains(&at)));
    assert_eq!(flush(&hosts[0], 4095..4097), [(4032, 4160)], "in two pages");
    assert_eq!(flush(&hosts[0], 5..5), []);
}

#[test]
fn a_page_read_while_it_leaves_is_the_devices() {
    let (device, hosts) = hosts(2);
    seen(&hosts[0], 0, PAGE);
    hosts[0].write(0, &[1; 64]).unwrap();
    device.write_base(128, &[9; 64]).unwrap();
    hosts[0].leave(0..4096);
    // The page cache writes back once more, then has dropped the page, and somebody loads from it.
    hosts[0].write(64, &[2; 64]).unwrap();
    let now = [[1; 64], [2; 64], [9; 64]].concat();
    assert_eq!(seen(&hosts[0], 0, 192), now);
    assert_eq!(on(&device, 0, 192), now);
    assert_eq!(hosts[0].left(0..4096, &mut Vec::new()).unwrap(), 0, "it came back, so it stays");
    device.write_base(0, &[5; 64]).unwrap();
    assert_eq!(seen(&hosts[0], 0, 64), [1; 64]);
}

#[test]
fn what_the_device_cannot_store_stays_with_the_host() {
    use lamina_device::device::PartitionConfig;
    let part = PartitionConfig {
        name: "shared".into(),
        base_bytes: BASE as u64,
        views_bytes: 4 << 20,
        quota_bytes: Some(0),
    };
    let device = Arc::new(Device::new(DeviceConfig::divided(vec![part])).unwrap());
    let host = HostCache::new(Partition::named(&device, "shared").unwrap(), BASE as u64);
    host.write(0, b"mine").unwrap();
    let all = 0..BASE as u64;
    assert!(host.write_back(all.clone(), &mut Vec::new()).unwrap_err().is_no_room());
    host.leave(all.clone());
    assert!(host.left(all.clone(), &mut Vec::new()).unwrap_err().is_no_room());
    assert_eq!(seen(&host, 0, 4), b"mine");
    host.leave(all);
    assert_eq!(seen(&host, 0, 4), b"mine", "read while it leaves and cannot");
}

#[test]
fn what_passes_the_end_is_refused_whole() {
    let (_, hosts) = hosts(1);
    for (at, length) in [(BASE as u64, 1), (BASE as u64 - 1, 2), (u64::MAX, 2)] {
        let bytes = vec![1; length];
        assert!(hosts[0].write(at, &bytes).unwrap_err().to_string().contains("16384 bytes"));
        assert!(hosts[0].read(at, &mut bytes.clone()).unwrap_err().to_string().contains("16384 bytes"));
    }
    assert_eq!(hosts[0].report("h").held_bytes, 0);
}

#[test]
fn who_waits_for_room_gets_it_when_the_oldest_page_has_gone() {
    let (_, mut all) = hosts(1);
    let mut cache = all.remove(0);
    cache.most = 2;
    for page in 0..2 {
        assert!(cache.has_room(page * 4096, 4096));
        seen(&cache, usize::try_from(page).unwrap() * PAGE, 1);
    }
    assert!(cache.has_room(4096, 8192), "held in part");
    assert!(!cache.has_room(8192, 4096));
    let (send, reported) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            cache.make_room_until_closed(|ranges| {
                assert_eq!(ranges.iter().map(|range| range.start).collect::<Vec<_>>(), [0]);
                invalidate(&cache, ranges[0].clone())
            });
        });
        let first = send.clone();
        cache.wait_for_room(8192..12288, Box::new(move || first.send(1).unwrap()));
        assert_eq!(reported.recv(), Ok(1));
        assert!(cache.has_room(8192, 4096));
        cache.close();
    });
    cache.wait_for_room(8192..12288, Box::new(move || send.send(2).unwrap()));
    assert_eq!(reported.recv(), Ok(2), "nobody waits for one that is closed");
}

/// Whoever drops a page waits for reads of it, so such a read must not wait for the one who drops.
#[test]
fn nobody_waits_to_read_what_is_being_dropped() {
    let (_, hosts) = hosts(1);
    let (send, reported) = std::sync::mpsc::channel();
    let read = |page: u64| {
        let send = send.clone();
        let then = move || send.send(page).unwrap();
        hosts[0].wait_for_room(page * 4096..(page + 1) * 4096, Box::new(then));
    };
    let now = || reported.try_iter().collect::<Vec<_>>();
    let dropped = [0..4096, 8192..12288];
    read(0);
    read(1);
    assert_eq!(now(), Vec::<u64>::new());
    hosts[0].dropping(&dropped);
    assert_eq!(now(), [0], "it waited already");
    read(2);
    read(3);
    assert_eq!(now(), [2]);
    hosts[0].dropped(&dropped);
    read(0);
    assert_eq!(now(), Vec::<u64>::new());
    hosts[0].close();
    hosts[0].make_room_until_closed(|_| panic!("there is an end"));
    assert_eq!(now(), [1, 3, 0]);
}

#[derive(Clone, Debug)]
enum Step {
    Read { at: usize, length: usize },
    Write { at: usize, length: usize, byte: u8 },
    WriteBack { page: usize },
    Flush { at: usize, length: usize },
    Invalidate { at: usize, length: usize },
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..BASE, 0..2 * PAGE).prop_map(|(at, length)| (at, length.min(BASE - at)));
    prop_oneof![
        2 => range().prop_map(|(at, length)| Step::Read { at, length }),
        3 => (range(), 0..3_u8).prop_map(|((at, length), byte)| Step::Write { at, length, byte }),
        1 => (0..PAGES).prop_map(|page| Step::WriteBack { page }),
        2 => range().prop_map(|(at, length)| Step::Flush { at, length }),
        2 => range().prop_map(|(at, length)| Step::Invalidate { at, length }),
    ]
}

/// A host as the contract says: what it was given, and what it has, line by line.
struct Model {
    held: [Option<(Vec<u8>, Vec<u8>)>; PAGES],
}

impl Model {
    fn give(&mut self, device: &[u8], page: usize) -> &mut (Vec<u8>, Vec<u8>) {
        let bytes = device[page * PAGE..(page + 1) * PAGE].to_vec();
        self.held[page].get_or_insert_with(|| (bytes.clone(), bytes))
    }

    fn flush(&mut self, device: &mut [u8], lines: Range<usize>) {
        for line in lines {
            let (page, inside) = (line * LINE / PAGE, line * LINE % PAGE..line * LINE % PAGE + LINE);
            let Some((given, now)) = &mut self.held[page] else { continue };
            if given[inside.clone()] != now[inside.clone()] {
                device[line * LINE..(line + 1) * LINE].copy_from_slice(&now[inside.clone()]);
                given[inside.clone()].copy_from_slice(&now[inside]);
            }
        }
    }
}

proptest! {
    #[test]
    fn hosts_see_what_the_contract_says(steps in prop::collection::vec((0..3_usize, step()), 1..60)) {
        let (device, hosts) = hosts(3);
        let mut bytes = vec![0; BASE];
        let mut models: Vec<Model> = (0..3).map(|_| Model { held: Default::default() }).collect();
        for (who, step) in steps {
            let (host, model) = (&hosts[who], &mut models[who]);
            let touched = |at: usize, length: usize| if length == 0 { 0..0 } else { at / PAGE..(at + length).div_ceil(PAGE) };
            match step {
                Step::Read { at, length } => {
                    let mut expected = Vec::new();
                    for page in touched(at, length) {
                        expected.extend_from_slice(&model.give(&bytes, page).1);
                    }
                    let expected = if length == 0 { &[] } else { &expected[at % PAGE..at % PAGE + length] };
                    prop_assert!(seen(host, at, length) == expected);
                }
                Step::Write { at, length, byte } => {
                    for at in at..at + length {
                        model.give(&bytes, at / PAGE).1[at % PAGE] = byte;
                    }
                    host.write(at as u64, &vec![byte; length]).unwrap();
                }
                Step::WriteBack { page } => {
                    // What a page cache does whenever it likes: it changes nothing.
                    if model.held[page].is_some() {
                        let whole = seen(host, page * PAGE, PAGE);
                        host.write((page * PAGE) as u64, &whole).unwrap();
                    }
                }
                Step::Flush { at, length } => {
                    let lines = if length == 0 { 0..0 } else { at / LINE..(at + length).div_ceil(LINE) };
                    model.flush(&mut bytes, lines);
                    flush(host, at as u64..(at + length) as u64);
                }
                Step::Invalidate { at, length } => {
                    for page in touched(at, length) {
                        model.flush(&mut bytes, page * PAGE / LINE..(page + 1) * PAGE / LINE);
                        model.held[page] = None;
                    }
                    invalidate(host, at as u64..(at + length) as u64);
                }
            }
            prop_assert!(on(&device, 0, BASE) == bytes);
        }
        for (host, model) in hosts.iter().zip(&models) {
            let held = model.held.iter().flatten().count() * PAGE;
            prop_assert_eq!(host.report("h").held_bytes, held as u64);
            prop_assert_eq!(host.order.lock().pages.len() * PAGE, held);
        }
    }
}

/// What a host flushes and what it does not, then its access goes and comes again.
#[test]
fn a_revoked_host_stores_to_nobody_and_begins_anew() {
    let (device, hosts) = hosts(1);
    let host = &hosts[0];
    assert_eq!(seen(host, 0, BASE), [0; BASE]);
    host.write(0, &[1; PAGE]).unwrap();
    flush(host, 0..PAGE as u64);
    host.write(0, &[2; PAGE]).unwrap();
    host.revoke().unwrap();
    assert!(host.is_revoked());
    assert_eq!(seen(host, 0, BASE), [PATTERN; BASE]);
    host.write(0, &[3; PAGE]).unwrap();
    assert_eq!(flush(host, 0..BASE as u64), []);
    assert_eq!(invalidate(host, 0..BASE as u64), 0);
    assert_eq!(on(&device, 0, PAGE), [1; PAGE]);
    let report = host.report("h");
    assert_eq!((report.revoked, report.held_bytes, report.pages_refused), (true, 0, 1));
    host.admit(|| {
        // What the page cache held while it was revoked is written back now, poison and all.
        host.write(PAGE as u64, &[4; PAGE]).unwrap();
        assert_eq!(seen(host, 0, PAGE), [1; PAGE], "and what it reads is the device's again");
        host.write(0, &[5; PAGE]).unwrap();
        Ok(())
    })
    .unwrap();
    assert!(!host.is_revoked());
    assert_eq!(flush(host, 0..BASE as u64), [(0, PAGE as u64)]);
    assert_eq!(on(&device, 0, 2 * PAGE), [[5; PAGE], [0; PAGE]].concat());
}

#[test]
fn a_host_whose_pages_cannot_be_dropped_stays_revoked() {
    let (device, hosts) = hosts(1);
    let host = &hosts[0];
    host.revoke().unwrap();
    let failed = host.admit(|| {
        assert_eq!(seen(host, 0, PAGE), [0; PAGE]);
        host.write(0, &[1; PAGE]).unwrap();
        Err(ServeError::Closing)
    });
    assert!(matches!(failed, Err(ServeError::Closing)));
    assert_eq!(seen(host, 0, PAGE), [PATTERN; PAGE]);
    flush(host, 0..BASE as u64);
    assert_eq!(on(&device, 0, PAGE), [0; PAGE]);
}

#[test]
fn the_next_process_finds_a_host_as_the_last_one_left_it() {
    let (device, _) = hosts(0);
    let folder = tempfile::tempdir().unwrap();
    let mark = folder.path().join("revoked-h");
    let next =
        || HostCache::new(Partition::named(&device, "").unwrap(), BASE as u64).marked_by(Some(mark.clone()));
    assert!(!next().is_revoked());
    next().revoke().unwrap();
    let host = next();
    assert!(host.is_revoked());
    assert_eq!(seen(&host, 0, PAGE), [PATTERN; PAGE]);
    host.admit(|| Ok(())).unwrap();
    assert!(!next().is_revoked());
    // A folder that is gone can keep no mark: nothing is revoked then.
    let gone = folder.path().join("gone/revoked-h");
    let host = HostCache::new(Partition::named(&device, "").unwrap(), BASE as u64).marked_by(Some(gone));
    assert!(host.revoke().is_err() && !host.is_revoked());
}

#[test]
fn a_host_stays_revoked_while_its_mark_cannot_be_removed() {
    let (device, _) = hosts(0);
    let folder = tempfile::tempdir().unwrap();
    let mark = folder.path().join("revoked-h");
    let host =
        HostCache::new(Partition::named(&device, "").unwrap(), BASE as u64).marked_by(Some(mark.clone()));
    host.revoke().unwrap();
    // A folder in its place cannot be removed as a file.
    std::fs::remove_file(&mark).unwrap();
    std::fs::create_dir(&mark).unwrap();
    let failed = host.admit(|| {
        assert_eq!(seen(&host, 0, PAGE), [0; PAGE]);
        host.write(0, &[1; PAGE]).unwrap();
        Ok(())
    });
    assert!(matches!(failed, Err(ServeError::Revoke(_))), "{failed:?}");
    host.write(0, &[2; PAGE]).unwrap();
    flush(&host, 0..BASE as u64);
    assert_eq!((seen(&host, 0, PAGE), on(&device, 0, PAGE)), (vec![PATTERN; PAGE], vec![0; PAGE]));
}
