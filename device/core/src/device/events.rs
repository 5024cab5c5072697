//! Events: what an operator should know of, in order, each said once.
//!
//! * The store fills up: an event when its chunks pass each of [`LEVELS`], when there is none left,
//!   and when it has fallen below a level again by [`MARGIN`]. A level is passed once on the way
//!   up, however often writes go back and forth around it.
//! * So is it with what is left of the host's memory, if the store is in it: an event when it falls
//!   below each of [`MEMORY_LEVELS`], and when it has risen above one again by [`MEMORY_MARGIN`].
//! * A write finds no room, in the store or on the host: an event, and no more of them until a
//!   write has found room, and there is some for what takes more than before.
//! * The image cannot be brought to the disk: one event, however often that is tried.
//! * Stores are lost because a write-back was refused: an event that names the range. Ranges that
//!   follow one another are one event. However many there are, they fill no log.
//! * The last [`MAX_EVENTS`] events are kept. Where more than half of these are losses, the oldest
//!   of them goes first: why they came about is worth more than each.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::Serialize;

use super::{Device, DeviceError};

/// Per cent of the store's chunks in use at which it is said.
pub const LEVELS: [u64; 3] = [75, 90, 97];
/// Per cent below a level at which it is said that the store has fallen below it.
pub const MARGIN: u64 = 2;
/// Per cent of the reserve of the host's memory that are left when it is said.
pub const MEMORY_LEVELS: [u64; 3] = [400, 200, 125];
/// Per cent of the reserve above a level at which it is said that more is left.
pub const MEMORY_MARGIN: u64 = 25;
/// Events that are kept.
pub const MAX_EVENTS: usize = 1024;
/// Losses that are logged in a second; the others are counted.
const LOGGED: u64 = 64;

/// Whether so little memory is left that it is said.
pub(super) fn is_scarce(left: u64, reserve: u64) -> bool {
    left < reserve.saturating_mul(MEMORY_LEVELS[0]) / 100
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// The store is fuller than a level.
    StoreAbove,
    /// The store is emptier than that level again.
    StoreBelow,
    /// Less of the host's memory is left than a level.
    MemoryBelow,
    /// More than that level is left again.
    MemoryAbove,
    /// A write found no room.
    NoRoom,
    /// A write found room again.
    RoomAgain,
    /// A write-back was refused.
    StoresLost,
    /// The image could not be brought to the disk.
    NotSynced,
}

/// An event.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Event {
    /// From 1.
    pub number: u64,
    /// Seconds since the device was opened by this process.
    pub seconds: f64,
    /// What happened.
    pub kind: Kind,
    /// The same for people.
    pub text: String,
}

/// The events of a device.
pub(super) struct Events {
    began: Instant,
    kept: Mutex<Kept>,
    /// Levels that were passed.
    level: AtomicUsize,
    memory_level: AtomicUsize,
    no_room: AtomicBool,
    not_synced: AtomicBool,
}

#[derive(Default)]
struct Kept {
    count: u64,
    last: VecDeque<Event>,
    /// What the last event says was lost, if it does.
    lost: Range<u64>,
    lost_bytes: u64,
    /// Losses that were told in the second that began then.
    told: u64,
    told_since: Option<Instant>,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            kept: Mutex::default(),
            level: AtomicUsize::new(0),
            memory_level: AtomicUsize::new(0),
            no_room: AtomicBool::new(false),
            not_synced: AtomicBool::new(false),
        }
    }
}

impl Events {
    fn say(&self, kind: Kind, text: String) {
        tracing::warn!("{text}");
        self.kept.lock().add(self.began, kind, text);
    }

    /// Notes that `bytes` that were stored in a range of the base window are lost; of `whom` they
    /// are, a guest or a target, if the device has any.
    pub(super) fn lost(&self, range: Range<u64>, bytes: u64, whom: &str, why: &str) {
        let mut kept = self.kept.lock();
        let follows = kept.last.back().is_some_and(|last| last.kind == Kind::StoresLost)
            && kept.lost.end == range.start;
        let (first, before) = if follows { (kept.lost.start, kept.lost_bytes) } else { (range.start, 0) };
        let bytes = before.saturating_add(bytes);
        (kept.lost, kept.lost_bytes) = (first..range.end, bytes);
        let whom = if whom.is_empty() { String::new() } else { format!(" of {whom}") };
        let text = format!("{bytes} bytes{whom} that were stored at DPA {first:#x} are lost: {why}");
        kept.tell(Instant::now(), &text);
        match kept.last.back_mut().filter(|_| follows) {
            Some(last) => last.text = text,
            None => kept.add(self.began, Kind::StoresLost, text),
        }
    }

    /// Notes that the image cannot be brought to the disk.
    pub(super) fn not_synced(&self, why: &std::io::Error) {
        if !self.not_synced.swap(true, Relaxed) {
            let text = format!(
                "the image cannot be brought to the disk, so a crash of the host takes what was stored since the last sync: {why}"
            );
            self.say(Kind::NotSynced, text);
        }
    }

    /// Looks at how full the store is: `held` of `all` chunks.
    pub(super) fn look(&self, held: u64, all: u64) {
        let above = |per_cent: u64| held.saturating_mul(100) > all.saturating_mul(per_cent);
        match step(&self.level, &LEVELS, above, |level| !above(level - MARGIN)) {
            Some(Step::Past(level)) => self.say(
                Kind::StoreAbove,
                format!("more than {level} % of the store without its reserve are in use: discard what is not needed"),
            ),
            Some(Step::Back(level)) => {
                self.say(Kind::StoreBelow, format!("less than {level} % of the store without its reserve are in use again"));
            }
            None => {}
        }
    }

    /// Looks at what is left of the host's memory, beside its reserve.
    pub(super) fn look_at_memory(&self, left: u64, reserve: u64) {
        let below = |per_cent: u64| left.saturating_mul(100) < reserve.saturating_mul(per_cent);
        let again = |level| !below(level + MEMORY_MARGIN);
        // Others may take much at once.
        while let Some(step) = step(&self.memory_level, &MEMORY_LEVELS, below, again) {
            let (kind, than, level, then) = match step {
                Step::Past(level) => (Kind::MemoryBelow, "less", level, ": free some"),
                Step::Back(level) => (Kind::MemoryAbove, "more", level, " again"),
            };
            let text = format!(
                "{left} bytes of the host's memory are left, {than} than {level} % of the reserve of {reserve} bytes{then}"
            );
            self.say(kind, text);
        }
    }

    /// Notes how a write went, and whether there is room for what takes more than before.
    pub(super) fn note<T>(&self, written: &Result<T, DeviceError>, room: bool) {
        match written {
            Err(DeviceError::Store(why)) if why.is_no_room() && !self.no_room.swap(true, Relaxed) => {
                self.say(Kind::NoRoom, format!("writes find no room: {why}"));
            }
            Ok(_) if room && self.no_room.load(Relaxed) && self.no_room.swap(false, Relaxed) => {
                self.say(Kind::RoomAgain, "writes find room again".to_owned());
            }
            _ => {}
        }
    }
}

/// Which level was passed, or is not any more.
enum Step {
    Past(u64),
    Back(u64),
}

/// Moves `now`, the number of `levels` that were passed, by one if it has to be.
fn step(
    now: &AtomicUsize,
    levels: &[u64],
    past: impl Fn(u64) -> bool,
    back: impl Fn(u64) -> bool,
) -> Option<Step> {
    let passed = now.load(Relaxed);
    let becomes = |next| now.compare_exchange(passed, next, Relaxed, Relaxed).is_ok();
    if let Some(level) = levels.get(passed).filter(|level| past(**level)) {
        return becomes(passed + 1).then_some(Step::Past(*level));
    }
    let level = levels[passed.checked_sub(1)?];
    (back(level) && becomes(passed - 1)).then_some(Step::Back(level))
}

impl Kept {
    /// Logs a loss, unless there were many in this second: whether it did.
    fn tell(&mut self, now: Instant, text: &str) -> bool {
        let is_new = self.told_since.is_none_or(|since| now - since >= Duration::from_secs(1));
        if is_new {
            let silent = self.told.saturating_sub(LOGGED);
            if silent > 0 {
                tracing::warn!("{silent} more losses of stores were not logged one by one");
            }
            (self.told, self.told_since) = (0, Some(now));
        }
        self.told += 1;
        let is_told = self.told <= LOGGED;
        if is_told {
            let more = if self.told < LOGGED { "" } else { "; others of this second are not logged" };
            tracing::warn!("{text}{more}");
        }
        is_told
    }

    fn add(&mut self, began: Instant, kind: Kind, text: String) {
        self.count += 1;
        if self.last.len() == MAX_EVENTS {
            let is_loss = |event: &Event| event.kind == Kind::StoresLost;
            let are_most = self.last.iter().filter(|event| is_loss(event)).count() > MAX_EVENTS / 2;
            let oldest = self.last.iter().position(|event| is_loss(event) || !are_most);
            self.last.remove(oldest.unwrap_or(0));
        }
        let event = Event { number: self.count, seconds: began.elapsed().as_secs_f64(), kind, text };
        self.last.push_back(event);
    }
}

impl Device {
    /// The last events, first to last.
    pub fn events(&self) -> Vec<Event> {
        self.events.kept.lock().last.iter().cloned().collect()
    }

    /// Whether the store may not have room for so many bytes more, whatever they are.
    pub fn is_tight(&self, bytes: u64) -> bool {
        self.coded_store().is_some_and(|store| !store.has_room(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceConfig;
    use lamina_store::StoreError;

    #[test]
    fn levels_are_said_once_up_and_once_down() {
        let events = Events::default();
        for held in [0, 74, 75, 76, 74, 76, 91, 89, 98, 100, 96, 40, 40, 40, 40, 80] {
            events.look(held, 100);
        }
        let said: Vec<_> = events.kept.lock().last.iter().map(|event| (event.number, event.kind)).collect();
        let kinds = [
            Kind::StoreAbove, // 75
            Kind::StoreAbove, // 90
            Kind::StoreAbove, // 97
            Kind::StoreBelow,
            Kind::StoreBelow,
            Kind::StoreBelow,
            Kind::StoreAbove,
        ];
        assert_eq!(said, (1..).zip(kinds).collect::<Vec<_>>());
    }

    #[test]
    fn many_losses_push_out_no_other_event_and_fill_no_log() {
        let events = Events::default();
        events.look(99, 100);
        let scattered = MAX_EVENTS as u64 + 100;
        for page in 0..scattered {
            events.lost(8192 * page..8192 * page + 4096, 4096, "", "no room");
        }
        let mut kept = events.kept.lock();
        assert_eq!((kept.last.len(), kept.last[0].kind), (MAX_EVENTS, Kind::StoreAbove));
        let (last, of_last) = (kept.last.back().unwrap(), format!("DPA {:#x}", 8192 * (scattered - 1)));
        assert!(last.kind == Kind::StoresLost && last.text.contains(&of_last), "{last:?}");
        assert!(kept.last.iter().is_sorted_by_key(|event| event.number));
        let (mut told, later) = (Kept::default(), Instant::now());
        let second = Duration::from_secs(1);
        assert_eq!((0..1000).filter(|_| told.tell(later, "")).count() as u64, LOGGED);
        assert!(told.tell(later + second, "") && told.told == 1);
        // A loss stays as long as others do, whatever else comes.
        let mut add = |kind| kept.add(events.began, kind, String::new());
        (0..2 * MAX_EVENTS).for_each(|_| add(Kind::NoRoom));
        add(Kind::StoresLost);
        (1..MAX_EVENTS).for_each(|_| add(Kind::RoomAgain));
        assert_eq!((kept.last.len(), kept.last[0].kind), (MAX_EVENTS, Kind::StoresLost));
        kept.add(events.began, Kind::RoomAgain, String::new());
        assert!(kept.last.iter().all(|event| event.kind == Kind::RoomAgain));
    }

    #[test]
    fn what_is_left_of_memory_is_said_as_it_falls_and_rises() {
        let events = Events::default();
        for left in [u64::MAX, 4000, 3999, 4100, 1999, 2249, 1000, 4249, 4250, 0, u64::MAX] {
            events.look_at_memory(left, 1000);
        }
        let kept = events.kept.lock();
        let said: Vec<_> = kept.last.iter().map(|event| (event.kind, event.text.as_str())).collect();
        let first = "3999 bytes of the host's memory are left, less than 400 % of the reserve of 1000 bytes: free some";
        assert_eq!(said[0], (Kind::MemoryBelow, first));
        let kinds: String =
            said.iter().map(|(kind, _)| if *kind == Kind::MemoryBelow { '-' } else { '+' }).collect();
        assert_eq!(kinds, "---+++---+++", "{said:?}");
    }

    #[test]
    fn what_is_lost_one_behind_the_other_is_one_event() {
        let events = Events::default();
        events.lost(0..4096, 4096, "", "full");
        events.lost(4096..12288, 8192, "", "full");
        events.lost(0..4096, 4096, "a", "full");
        events.note::<()>(&Err(StoreError::Full { wanted: 1, used: 1, capacity: 1 }.into()), false);
        events.lost(4096..8192, 4096, "a", "full");
        let kept = events.kept.lock();
        let said: Vec<_> = kept.last.iter().map(|event| (event.kind, event.text.as_str())).collect();
        assert_eq!(said[0], (Kind::StoresLost, "12288 bytes that were stored at DPA 0x0 are lost: full"));
        assert_eq!(said[1], (Kind::StoresLost, "4096 bytes of a that were stored at DPA 0x0 are lost: full"));
        assert_eq!((said[2].0, said[3].0, said.len()), (Kind::NoRoom, Kind::StoresLost, 4));
    }

    #[test]
    fn a_store_that_is_promised_more_than_it_holds_warns_refuses_and_recovers() {
        let config = DeviceConfig { store_bytes: Some(16 << 20), ..DeviceConfig::new(64 << 20, 8 << 20) };
        let device = Device::new(config).unwrap();
        // Noise, which takes the same room everywhere.
        let block = |at: u64| lamina_codec::testing::bytes(5 * (at + 1), 4096);
        let mut written = 0;
        let refused = loop {
            match device.write_base(written * 4096, &block(written)) {
                Ok(()) => written += 1,
                Err(why) => break why,
            }
        };
        assert!(matches!(refused, DeviceError::Store(StoreError::Full { .. })), "{refused}");
        assert!(device.is_tight(4096) && device.write_base(written * 4096, &block(7)).is_err());
        let kinds = |device: &Device| device.events().iter().map(|event| event.kind).collect::<Vec<_>>();
        let filled = [Kind::StoreAbove, Kind::StoreAbove, Kind::StoreAbove, Kind::NoRoom];
        assert_eq!(kinds(&device), filled);
        // Nothing of what is there is harmed, and it can be written again in place of itself.
        let mut found = vec![0; 4096];
        for at in 0..written {
            device.read_base(at * 4096, &mut found).unwrap();
            assert!(found == block(at), "block {at}");
            device.write_base(at * 4096, &block(at + written)).unwrap();
            device.read_base(at * 4096, &mut found).unwrap();
            assert!(found == block(at + written), "block {at}");
        }
        assert!(device.write_base(written * 4096, &block(7)).is_err(), "and takes nothing else");
        assert_eq!(kinds(&device), filled, "what finds its own place again is no room for others");
        device.discard(0, written / 2 * 4096).unwrap();
        device.write_base(written * 4096, &block(written)).unwrap();
        assert!(!device.is_tight(4096));
        assert!(kinds(&device)[4..].contains(&Kind::RoomAgain), "{:?}", device.events());
        device.read_base(written * 4096, &mut found).unwrap();
        assert!(found == block(written));
    }
}
