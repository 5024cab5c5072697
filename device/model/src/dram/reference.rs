//! A scheduler that is slow and plain, and the same commands of the one that is not.
//!
//! It queues single bursts, keeps all commands that it issued, and looks each time at all of the
//! last ones for what the next has to wait for.

use super::tests::Numbers;
use super::*;

/// Before all that reads or writes an open row goes what does, then the older.
const ROW: u64 = 1 << 63;

struct Waiting {
    access: Access,
    order: u64,
    admitted: u64,
}

struct Channel {
    issued: Vec<Command>,
    waiting: Vec<Waiting>,
    came: u64,
    served: u64,
    /// By bank: its open row, and how many bursts passed its oldest one.
    banks: Vec<(Option<u32>, u32)>,
    /// By rank: when its next refresh is due.
    due: Vec<u64>,
}

/// When, its priority, its bank, what it is, and which burst that waits it serves.
type Next = (u64, u64, usize, Command, usize);

pub(super) struct Slow {
    profile: Profile,
    registers: usize,
    channels: Vec<Channel>,
    /// When data will be there of bursts that hold a register.
    finishes: Vec<u64>,
    pub clock: u64,
    done: Vec<Done>,
}

/// Cycles that a command is issued behind another of its channel, at least.
fn need(before: &Command, kind: Kind, place: Place, t: &profile::Timing) -> u64 {
    let (old, new) = (before.place, place);
    let in_rank = |cycles: u64| if old.rank == new.rank { cycles } else { 0 };
    let is_in_group = (old.rank, old.group) == (new.rank, new.group);
    let in_group = |cycles: u64| if is_in_group { cycles } else { 0 };
    let in_bank = |cycles: u64| if is_in_group && old.bank == new.bank { cycles } else { 0 };
    let turn = if old.rank == new.rank { 0 } else { t.turn };
    let write = t.cwl + t.burst;
    let bus = if matches!(before.kind, Kind::Activate | Kind::Read | Kind::Write) { 2 } else { 1 };
    let all = match (before.kind, kind) {
        (Kind::Activate, Kind::Activate) => {
            in_rank(t.rrd_s).max(in_group(t.rrd_l)).max(in_bank(t.ras + t.rp))
        }
        (Kind::Activate, Kind::Precharge) => in_bank(t.ras),
        (Kind::Activate, Kind::Read | Kind::Write) => in_bank(t.rcd),
        (Kind::Precharge, Kind::Activate) => in_bank(t.rp),
        (Kind::PrechargeAll, Kind::Activate | Kind::Refresh) | (Kind::Precharge, Kind::Refresh) => {
            in_rank(t.rp)
        }
        (Kind::Read, Kind::Precharge) => in_bank(t.rtp),
        (Kind::Write, Kind::Precharge) => in_bank(write + t.wr),
        (Kind::Read, Kind::Read) => in_rank(t.ccd_s).max(in_group(t.ccd_l)).max(t.burst + turn),
        (Kind::Read, Kind::Write) => t.cl + t.burst + t.turn - t.cwl,
        (Kind::Write, Kind::Write) => in_rank(t.ccd_s).max(in_group(t.ccd_l_wr)).max(t.burst + turn),
        (Kind::Write, Kind::Read) => {
            let data = (write + turn).saturating_sub(t.cl);
            in_rank(write + t.wtr_s).max(in_group(write + t.wtr_l)).max(data)
        }
        (Kind::Refresh, Kind::Activate | Kind::Refresh) => in_rank(t.rfc),
        _ => 0,
    };
    all.max(bus)
}

impl Channel {
    /// When a command may be issued.
    fn earliest(&self, kind: Kind, place: Place, t: &profile::Timing) -> u64 {
        let reach = t.rfc + t.ras + t.rp + t.cl + t.burst + t.wr + t.wtr_l + t.faw;
        let last = self.issued.last().map_or(0, |last| last.at);
        let recent = || self.issued.iter().rev().take_while(|before| before.at + reach >= last);
        let all = recent().map(|before| before.at + need(before, kind, place, t)).max().unwrap_or(0);
        let mut opened = recent()
            .filter(|before| before.kind == Kind::Activate && before.place.rank == place.rank)
            .map(|before| before.at + t.faw);
        if kind == Kind::Activate { opened.nth(3).map_or(all, |four| four.max(all)) } else { all }
    }

    fn next(&self, profile: &Profile) -> Next {
        let (t, g) = (&profile.timing, &profile.geometry);
        let number = |place: Place| ((place.rank * g.groups + place.group) * g.banks + place.bank) as usize;
        let oldest = self.waiting.iter().map(|waiting| waiting.order).min();
        let urgent = oldest.filter(|oldest| self.served >= oldest + 64);
        let of_rank = |rank: u32| {
            let mut first: Option<Next> = None;
            for bank in (rank * g.groups * g.banks) as usize..((rank + 1) * g.groups * g.banks) as usize {
                let of_bank = || {
                    let all = self.waiting.iter().enumerate();
                    all.filter(|(_, waiting)| number(waiting.access.place) == bank)
                };
                let Some(eldest) = of_bank().next() else { continue };
                let (row, passed) = self.banks[bank];
                let hit = of_bank().find(|(_, waiting)| row == Some(waiting.access.place.row));
                let (at, waiting) = hit.filter(|_| passed < 16).unwrap_or(eldest);
                let Access { place, write, .. } = waiting.access;
                let kind = match row {
                    Some(row) if row == place.row => {
                        if write {
                            Kind::Write
                        } else {
                            Kind::Read
                        }
                    }
                    Some(_) => Kind::Precharge,
                    None => Kind::Activate,
                };
                let is_column = matches!(kind, Kind::Read | Kind::Write);
                if is_column && urgent.is_some_and(|urgent| eldest.1.order != urgent) {
                    continue;
                }
                let when = self.earliest(kind, place, t).max(waiting.admitted);
                let priority = if is_column { waiting.order } else { ROW | waiting.order };
                let place = match kind {
                    Kind::Activate => Place { column: 0, ..place },
                    Kind::Precharge => Place { row: 0, column: 0, ..place },
                    _ => place,
                };
                let next = (when, priority, bank, Command { at: when, kind, place }, at);
                if first.as_ref().is_none_or(|first| (next.0, next.1, next.2) < (first.0, first.1, first.2)) {
                    first = Some(next);
                }
            }
            let due = self.due[rank as usize];
            first.filter(|first| first.0 < due).unwrap_or_else(|| self.refresh(rank, due, profile))
        };
        (0..g.ranks).map(of_rank).min_by_key(|next| (next.0, next.1, next.2)).unwrap()
    }

    fn refresh(&self, rank: u32, due: u64, profile: &Profile) -> Next {
        let (t, g) = (&profile.timing, &profile.geometry);
        let banks = (g.groups * g.banks) as usize;
        let channel = self.issued.first().map_or(0, |first| first.place.channel);
        let place = Place { channel, rank, ..Place::default() };
        let first = rank as usize * banks;
        let open = (0..banks).filter(|bank| self.banks[first + bank].0.is_some());
        let of = |bank: usize| {
            let bank = u32::try_from(bank).unwrap();
            Place { group: bank / g.banks, bank: bank % g.banks, ..place }
        };
        let closed = open.map(|bank| self.earliest(Kind::Precharge, of(bank), t)).max();
        let (kind, at) = match closed {
            Some(at) => (Kind::PrechargeAll, at),
            None => (Kind::Refresh, self.earliest(Kind::Refresh, place, t)),
        };
        let at = at.max(due);
        (at, ROW, first, Command { at, kind, place }, 0)
    }
}

impl Slow {
    pub(super) fn new(profile: &Profile, registers: usize) -> Self {
        let g = &profile.geometry;
        let channel = || Channel {
            issued: Vec::new(),
            waiting: Vec::new(),
            came: 0,
            served: 0,
            banks: vec![(None, 0); (g.ranks * g.groups * g.banks) as usize],
            due: vec![profile.timing.refi; g.ranks as usize],
        };
        let channels = (0..g.channels).map(|_| channel()).collect();
        let profile = profile.clone();
        Self { profile, registers, channels, finishes: Vec::new(), clock: 0, done: Vec::new() }
    }

    fn next(&self) -> (usize, Next) {
        let all = self.channels.iter().map(|channel| channel.next(&self.profile)).enumerate();
        all.min_by_key(|(_, next)| next.0).unwrap()
    }

    fn waiting(&self) -> usize {
        self.channels.iter().map(|channel| channel.waiting.len()).sum()
    }

    pub(super) fn push(&mut self, access: &Access) {
        let mut at = access.at.max(self.clock);
        loop {
            let (channel, next) = self.next();
            if next.0 >= at {
                self.finishes.retain(|finish| *finish > at);
                if self.finishes.len() + self.waiting() < self.registers {
                    break;
                }
                let first = self.finishes.iter().copied().min();
                if let Some(first) = first.filter(|first| *first <= next.0) {
                    at = first;
                    continue;
                }
            }
            self.issue(channel, next);
        }
        self.clock = at;
        let channel = &mut self.channels[access.place.channel as usize];
        channel.waiting.push(Waiting { access: *access, order: channel.came, admitted: at });
        channel.came += 1;
    }

    fn issue(&mut self, at: usize, (when, _, bank, mut command, burst): Next) {
        let (t, channel) = (&self.profile.timing, &mut self.channels[at]);
        command.place.channel = u32::try_from(at).unwrap();
        match command.kind {
            Kind::Activate => channel.banks[bank].0 = Some(command.place.row),
            Kind::Precharge => channel.banks[bank] = (None, 0),
            Kind::PrechargeAll => {
                let banks = channel.banks.len() / channel.due.len();
                for bank in channel.banks[bank..bank + banks].iter_mut().filter(|bank| bank.0.is_some()) {
                    *bank = (None, 0);
                }
            }
            Kind::Refresh => channel.due[command.place.rank as usize] += t.refi,
            Kind::Read | Kind::Write => {
                let served = channel.waiting.remove(burst);
                let place = |place: Place| (place.rank, place.group, place.bank);
                let same = |waiting: &&Waiting| place(waiting.access.place) == place(served.access.place);
                let passes = channel.waiting[..burst].iter().any(|waiting| same(&waiting));
                channel.banks[bank].1 = if passes { channel.banks[bank].1 + 1 } else { 0 };
                channel.served += 1;
                let latency = if served.access.write { t.cwl } else { t.cl };
                let finished = when + latency + t.burst;
                self.finishes.push(finished);
                let (tag, admitted) = (served.access.tag, served.admitted);
                self.done.push(Done { tag, count: 1, admitted, finished });
            }
        }
        channel.issued.push(command);
    }

    /// Serves all, and gives the commands of each channel.
    pub(super) fn finish(mut self) -> (Vec<Vec<Command>>, Vec<Done>) {
        while self.waiting() > 0 {
            let (channel, next) = self.next();
            self.issue(channel, next);
        }
        (self.channels.into_iter().map(|channel| channel.issued).collect(), self.done)
    }
}

/// Runs of lines and single ones, near and far, in bursts and with pauses.
fn compared(profile: &Profile, registers: usize, writes: u64, longest: u64, seed: u64) -> Counts {
    let mut numbers = Numbers(seed);
    let (mut slow, mut dram) = (Slow::new(profile, registers), Dram::new(profile, registers).unwrap());
    let (mut now, mut done) = (0, Vec::new());
    let mut counts = std::collections::HashMap::new();
    for tag in 0..3000 / longest {
        now += if tag % 30 < 20 { 0 } else { numbers.below(20 * longest) };
        // Few rows, so that they are often open, and often another is.
        let mut place = profile.geometry.by_row(numbers.below(1 << 14));
        let most = u64::from(profile.geometry.columns - place.column);
        let count = if numbers.below(3) == 0 { 1 } else { 1 + numbers.below(most.min(longest)) };
        let access = Access { at: now, place, write: numbers.below(100) < writes, tag };
        let admitted = dram.push_run(&access, u32::try_from(count).unwrap());
        for line in 0..count {
            slow.push(&Access { place, ..access });
            place.column += 1;
            if line == 0 {
                assert_eq!(slow.clock, admitted, "run {tag}");
            }
        }
        assert_eq!(slow.clock, dram.clock(), "run {tag}");
        counts.insert(tag, count);
    }
    let outcome = dram.finish().unwrap();
    dram.take_done(&mut done);
    let (commands, bursts) = slow.finish();
    let mut all = 0;
    for (channel, commands) in (0..).zip(&commands) {
        let ours = dram.issued.iter().filter(|command| command.place.channel == channel);
        let ours: Vec<_> = ours.copied().collect();
        let differ = commands.iter().zip(&ours).position(|(theirs, ours)| theirs != ours);
        let around = differ.map(|at| (at, commands[at], ours[at]));
        assert_eq!((around, commands.len()), (None, ours.len()), "channel {channel}");
        all += commands.len() as u64;
    }
    assert_eq!(outcome.checked, all);
    assert_eq!(outcome.cycles, bursts.iter().map(|burst| burst.finished).max().unwrap());
    for (tag, count) in counts {
        let of_tag = done.iter().filter(|done| done.tag == tag);
        assert_eq!(of_tag.clone().map(|done| u64::from(done.count)).sum::<u64>(), count);
        let theirs = || bursts.iter().filter(|burst| burst.tag == tag);
        let finished = of_tag.clone().map(|done| done.finished).max();
        assert_eq!(finished, theirs().map(|burst| burst.finished).max(), "run {tag}");
        let admitted = of_tag.map(|done| done.admitted).min();
        assert_eq!(admitted, theirs().map(|burst| burst.admitted).min(), "run {tag}");
    }
    outcome.counts
}

/// The same commands in the same cycles as the slow one issues, whatever the module, the number of
/// registers and the part of writes.
#[test]
fn all_commands_are_those_of_the_slow_scheduler() {
    let mut seen = Counts::default();
    for (name, ranks, channels) in
        [("ddr5-4800", 1, 4), ("ddr5-4800", 2, 1), ("ddr5-5600", 1, 1), ("ddr5-6400", 2, 2)]
    {
        let mut profile = Profile::named(name).unwrap();
        (profile.geometry.ranks, profile.geometry.channels) = (ranks, channels);
        for (seed, (registers, writes)) in
            (1..).zip([(64, 0), (64, 10), (256, 0), (256, 50), (16, 0), (3, 5), (1, 50)])
        {
            for longest in [70, 6] {
                let counts = compared(&profile, registers, writes, longest, seed);
                seen.refreshes += counts.refreshes;
                seen.precharges += counts.precharges;
                seen.precharges_all += counts.precharges_all;
                seen.row_hits += counts.row_hits;
            }
        }
    }
    // Nothing of all that was left out.
    assert!(seen.refreshes > 100 && seen.precharges > 100 && seen.precharges_all > 50, "{seen:?}");
    assert!(seen.row_hits > 20_000, "{seen:?}");
}

/// Where times are such that two bank groups cannot take turns, or one of them never waits, and
/// where refreshes are as near as they may be.
#[test]
fn all_commands_are_those_of_the_slow_scheduler_with_odd_times() {
    let changes: [fn(&mut profile::Timing); 5] = [
        |t| t.ccd_l = t.ccd_s,
        |t| t.ccd_l = 2 * t.ccd_s + 1,
        |t| (t.burst, t.ccd_s, t.ccd_l) = (1, 1, 2),
        |t| t.ccd_l_wr = 2 * t.ccd_s,
        |t| t.turn = 300,
    ];
    for (seed, change) in (20..).zip(changes) {
        let mut profile = Profile::named("ddr5-4800").unwrap();
        (profile.geometry.ranks, profile.geometry.channels) = (2, 1);
        change(&mut profile.timing);
        profile.timing.refi = 2100;
        for (registers, writes) in [(64, 0), (64, 20), (64, 100), (5, 30)] {
            compared(&profile, registers, writes, 70, seed);
        }
        profile.geometry.ranks = 1;
        compared(&profile, 64, 0, 20, seed);
        compared(&profile, 64, 100, 6, seed);
    }
}
