//! FR-FCFS: of the commands that may be issued first, one that reads or writes an open row goes
//! before one that opens or closes a row, and the older burst before the younger.
//!
//! * Time goes from command to command, not from cycle to cycle. Each channel knows its next
//!   command, and which that is changes only when a burst comes to it or it issues one.
//! * A burst holds a miss status register from when it comes until its data are there. When all are
//!   held, the next burst waits, and so does all behind it.
//! * Rows stay open until another is wanted. A burst is passed by so many younger ones and no more.
//! * A refresh that is due goes before all else on its rank.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use serde::Serialize;

use super::checker::Checker;
use super::profile::{Profile, Timing};
use super::{Command, Kind, Place};
use crate::ModelError;

/// Younger bursts of its bank that a burst lets pass, because they hit the open row.
const MAX_PASSED_IN_BANK: u32 = 16;
/// Bursts of its channel that a burst lets pass.
const MAX_PASSED: u64 = 64;
/// Refreshes behind which an idle module is not stepped through.
const STEPPED_REFRESHES: u64 = 8;
const CLOSED: u32 = u32::MAX;

/// A line that is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// When it comes, in cycles; never earlier than the one before.
    pub at: u64,
    /// Where it lies.
    pub place: Place,
    /// Whether it is written.
    pub write: bool,
    /// What its [`Done`] is known by.
    pub tag: u64,
}

/// A line whose data are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Of the access.
    pub tag: u64,
    /// When it got a register.
    pub admitted: u64,
    /// When its last data came.
    pub finished: u64,
}

/// What was issued.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Activations of rows.
    pub activates: u64,
    /// Rows closed one by one.
    pub precharges: u64,
    /// Commands that closed all rows of a rank.
    pub precharges_all: u64,
    /// Lines read.
    pub reads: u64,
    /// Lines written.
    pub writes: u64,
    /// Refreshes of a rank.
    pub refreshes: u64,
    /// Lines for which no row was opened.
    pub row_hits: u64,
    /// Cycles that banks were open, of all banks.
    pub open_bank_cycles: u64,
}

/// A run that is over.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What was issued.
    pub counts: Counts,
    /// Cycles until the last data were there.
    pub cycles: u64,
    /// Commands that the checker found legal: all of them.
    pub checked: u64,
}

#[derive(Clone, Copy)]
struct Burst {
    row: u32,
    column: u32,
    write: bool,
    /// Bursts that came to the channel before it.
    order: u64,
    tag: u64,
    admitted: u64,
}

struct Bank {
    row: u32,
    /// Whether its row was opened and nothing read or written since.
    fresh: bool,
    opened: u64,
    activate: u64,
    precharge: u64,
    column: u64,
    queue: Vec<Burst>,
    /// The burst that is next.
    pick: usize,
    passed: u32,
}

struct Rank {
    activate: u64,
    activate_group: Vec<u64>,
    /// The last four activations, the oldest at `oldest`.
    four: [u64; 4],
    oldest: usize,
    activations: u64,
    read: u64,
    write: u64,
    read_group: Vec<u64>,
    write_group: Vec<u64>,
    refresh: u64,
    due: u64,
    open: u32,
}

/// A command that is next on a channel or rank.
#[derive(Clone, Copy)]
struct Next {
    at: u64,
    kind: Kind,
    bank: usize,
    order: u64,
}

impl Next {
    fn is_before(&self, other: &Self) -> bool {
        let key = |next: &Self| (next.at, !matches!(next.kind, Kind::Read | Kind::Write), next.order);
        key(self) < key(other)
    }
}

struct Channel {
    banks: Vec<Bank>,
    ranks: Vec<Rank>,
    /// Banks with a queue.
    pending: Vec<usize>,
    came: u64,
    served: u64,
    bus: u64,
    data: u64,
    data_rank: usize,
    data_read: bool,
    next: Next,
}

/// A module at work.
pub struct Dram {
    profile: Profile,
    channels: Vec<Channel>,
    registers: usize,
    /// When data of bursts that hold registers will be there.
    busy: BinaryHeap<Reverse<u64>>,
    queued: usize,
    clock: u64,
    last: u64,
    admitted: u64,
    done: Vec<Done>,
    counts: Counts,
    checker: Checker,
    wrong: Option<ModelError>,
}

impl Dram {
    /// With all banks closed and so many registers (TRACE's earlier form has 64: CXL-NDP, III-D).
    ///
    /// # Errors
    /// A field of the profile, or the number of registers, that is of no use.
    pub fn new(profile: &Profile, registers: usize) -> Result<Self, ModelError> {
        profile.check()?;
        if !(1..=4096).contains(&registers) {
            return Err(ModelError::field("mshr", &registers, "from 1 to 4096"));
        }
        let (g, t) = (&profile.geometry, &profile.timing);
        let groups = vec![0; g.groups as usize];
        let rank = |_| Rank {
            activate: 0,
            activate_group: groups.clone(),
            four: [0; 4],
            oldest: 0,
            activations: 0,
            read: 0,
            write: 0,
            read_group: groups.clone(),
            write_group: groups.clone(),
            refresh: 0,
            due: t.refi,
            open: 0,
        };
        let bank = |_| Bank {
            row: CLOSED,
            fresh: false,
            opened: 0,
            activate: 0,
            precharge: 0,
            column: 0,
            queue: Vec::new(),
            pick: 0,
            passed: 0,
        };
        let channel = |_| {
            let mut channel = Channel {
                banks: (0..g.ranks * g.groups * g.banks).map(bank).collect(),
                ranks: (0..g.ranks).map(rank).collect(),
                pending: Vec::new(),
                came: 0,
                served: 0,
                bus: 0,
                data: 0,
                data_rank: 0,
                data_read: true,
                next: Next { at: t.refi, kind: Kind::Refresh, bank: 0, order: 0 },
            };
            channel.next = channel.plan(profile);
            channel
        };
        Ok(Self {
            channels: (0..g.channels).map(channel).collect(),
            registers,
            busy: BinaryHeap::with_capacity(registers + 1),
            queued: 0,
            clock: 0,
            last: 0,
            admitted: 0,
            done: Vec::new(),
            counts: Counts::default(),
            checker: Checker::new(profile),
            wrong: None,
            profile: profile.clone(),
        })
    }

    /// The cycle up to which all is decided.
    pub fn clock(&self) -> u64 {
        self.clock
    }

    /// Lets an access come, as soon as a register is free.
    pub fn push(&mut self, access: &Access) {
        let mut at = access.at.max(self.clock);
        self.skip(at);
        loop {
            while let Some(next) = self.next().filter(|(_, next)| *next < at) {
                self.issue(next.0);
            }
            while self.busy.peek().is_some_and(|Reverse(finished)| *finished <= at) {
                self.busy.pop();
            }
            if self.busy.len() + self.queued < self.registers {
                break;
            }
            // All wait for the next data, or for the command that will bring some.
            match (self.busy.peek(), self.next()) {
                (Some(Reverse(finished)), Some((_, next))) if *finished <= next => at = *finished,
                (_, Some((channel, _))) => self.issue(channel),
                (Some(Reverse(finished)), None) => at = *finished,
                (None, None) => break,
            }
        }
        self.clock = at;
        self.queued += 1;
        self.admitted += 1;
        let p = access.place;
        let g = &self.profile.geometry;
        let place = ((p.rank * g.groups + p.group) * g.banks + p.bank) as usize;
        let channel = &mut self.channels[p.channel as usize];
        let burst = Burst {
            row: p.row,
            column: p.column,
            write: access.write,
            order: channel.came,
            tag: access.tag,
            admitted: at,
        };
        channel.came += 1;
        channel.add(place, burst);
        channel.next = channel.plan(&self.profile);
    }

    /// Bursts that were finished since the last [`Dram::take_done`].
    pub fn finished(&self) -> usize {
        self.done.len()
    }

    /// Takes what was finished since the last call.
    pub fn take_done(&mut self, into: &mut Vec<Done>) {
        into.append(&mut self.done);
    }

    /// Serves all that came, and says what was issued.
    ///
    /// # Errors
    /// A command was illegal, or a burst got lost: an error of this model.
    pub fn finish(&mut self) -> Result<Outcome, ModelError> {
        while self.queued > 0 {
            let Some((channel, _)) = self.next() else { break };
            self.issue(channel);
        }
        self.busy.clear();
        self.clock = self.clock.max(self.last);
        if let Some(wrong) = self.wrong.take() {
            return Err(wrong);
        }
        let served = self.counts.reads + self.counts.writes;
        if served != self.admitted || self.queued > 0 {
            let why = format!("{} bursts came and {served} were served", self.admitted);
            return Err(ModelError::Form { what: "the schedule".to_owned(), why });
        }
        let mut counts = self.counts;
        for bank in self.channels.iter().flat_map(|channel| &channel.banks) {
            if bank.row != CLOSED {
                counts.open_bank_cycles += self.last.saturating_sub(bank.opened);
            }
        }
        Ok(Outcome { counts, cycles: self.last, checked: self.checker.checked() })
    }

    /// The channel whose next command is first, and when that is.
    fn next(&self) -> Option<(usize, u64)> {
        let all = self.channels.iter().enumerate().map(|(at, channel)| (at, channel.next.at));
        all.min_by_key(|(_, at)| *at)
    }

    /// Lets an idle module's time pass without stepping through all of its refreshes.
    fn skip(&mut self, at: u64) {
        let refi = self.profile.timing.refi;
        if at.saturating_sub(self.clock) < 4 * STEPPED_REFRESHES * refi {
            return;
        }
        while self.queued > 0
            && let Some((channel, _)) = self.next().filter(|(_, next)| *next < at)
        {
            self.issue(channel);
        }
        if self.queued > 0 {
            return;
        }
        // All rows are closed by the first refresh, whatever was open.
        let until = self.clock.max(self.last) + STEPPED_REFRESHES * refi;
        while let Some((channel, _)) = self.next().filter(|(_, next)| *next < until.min(at)) {
            self.issue(channel);
        }
        for channel in &mut self.channels {
            for rank in &mut channel.ranks {
                if rank.open == 0 && rank.due < at {
                    let passed = (at - rank.due) / refi;
                    rank.due += passed * refi;
                    self.counts.refreshes += passed;
                }
            }
            channel.next = channel.plan(&self.profile);
        }
    }

    /// Issues the next command of a channel.
    fn issue(&mut self, at: usize) {
        let next = self.channels[at].next;
        let (t, g) = (&self.profile.timing, &self.profile.geometry);
        let channel = &mut self.channels[at];
        let banks = (g.groups * g.banks) as usize;
        let (rank, inside) = (next.bank / banks, next.bank % banks);
        let narrow = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let mut place = Place {
            channel: narrow(at),
            rank: narrow(rank),
            group: narrow(inside) / g.banks,
            bank: narrow(inside) % g.banks,
            row: 0,
            column: 0,
        };
        match next.kind {
            Kind::Activate => {
                self.counts.activates += 1;
                place.row = channel.activate(next, place.group as usize, rank, t);
            }
            Kind::Precharge => {
                self.counts.precharges += 1;
                self.counts.open_bank_cycles += channel.precharge(next.at, next.bank, rank, t);
            }
            Kind::PrechargeAll => {
                self.counts.precharges_all += 1;
                for bank in rank * banks..(rank + 1) * banks {
                    if channel.banks[bank].row != CLOSED {
                        self.counts.open_bank_cycles += channel.precharge(next.at, bank, rank, t);
                    }
                }
            }
            Kind::Refresh => {
                self.counts.refreshes += 1;
                let state = &mut channel.ranks[rank];
                state.due += t.refi;
                state.activate = state.activate.max(next.at + t.rfc);
                state.refresh = next.at + t.rfc;
            }
            Kind::Read | Kind::Write => {
                let hit = !std::mem::replace(&mut channel.banks[next.bank].fresh, false);
                self.counts.row_hits += u64::from(hit);
                let (burst, finished) = channel.serve(next, place.group as usize, rank, t);
                (place.row, place.column) = (burst.row, burst.column);
                let count = if burst.write { &mut self.counts.writes } else { &mut self.counts.reads };
                *count += 1;
                self.queued -= 1;
                self.last = self.last.max(finished);
                self.busy.push(Reverse(finished));
                self.done.push(Done { tag: burst.tag, admitted: burst.admitted, finished });
            }
        }
        let long = matches!(next.kind, Kind::Activate | Kind::Read | Kind::Write);
        channel.bus = next.at + if long { 2 } else { 1 };
        channel.next = channel.plan(&self.profile);
        let command = Command { at: next.at, kind: next.kind, place };
        if let Err(wrong) = self.checker.check(&command) {
            self.wrong.get_or_insert(wrong);
        }
    }
}

impl Bank {
    /// Chooses the burst that is next: the oldest that hits the open row, unless the oldest of all
    /// let enough of them pass.
    fn choose(&mut self) {
        self.pick = 0;
        if self.row == CLOSED || self.passed >= MAX_PASSED_IN_BANK {
            return;
        }
        self.pick = self.queue.iter().position(|burst| burst.row == self.row).unwrap_or(0);
    }
}

impl Channel {
    fn add(&mut self, place: usize, burst: Burst) {
        let bank = &mut self.banks[place];
        if bank.queue.is_empty() {
            self.pending.push(place);
        }
        bank.queue.push(burst);
        bank.choose();
    }

    /// The next command of the channel.
    fn plan(&self, profile: &Profile) -> Next {
        let banks = (profile.geometry.groups * profile.geometry.banks) as usize;
        let oldest = self.pending.iter().map(|bank| self.banks[*bank].queue[0].order).min();
        // One that let enough others pass is served before any other.
        let urgent = oldest.filter(|order| self.served >= order + MAX_PASSED);
        let mut best: Option<Next> = None;
        for (at, rank) in self.ranks.iter().enumerate() {
            let pending = self.pending.iter().filter(|bank| self.ranks.len() == 1 || **bank / banks == at);
            let mut first: Option<Next> = None;
            for place in pending {
                let next = self.wants(*place, at, profile);
                let column = matches!(next.kind, Kind::Read | Kind::Write);
                if column && urgent.is_some_and(|order| self.banks[*place].queue[0].order != order) {
                    continue;
                }
                if first.as_ref().is_none_or(|first| next.is_before(first)) {
                    first = Some(next);
                }
            }
            if first.is_none_or(|first| first.at >= rank.due) {
                first = Some(self.refresh(at, banks));
            }
            if let Some(next) = first
                && best.as_ref().is_none_or(|best| next.is_before(best))
            {
                best = Some(next);
            }
        }
        // There is at least one rank, and it is refreshed some day.
        best.unwrap_or(Next { at: u64::MAX, kind: Kind::Refresh, bank: 0, order: 0 })
    }

    /// What the burst that is next in a bank needs first, and when that may be.
    fn wants(&self, place: usize, rank: usize, profile: &Profile) -> Next {
        let t = &profile.timing;
        let bank = &self.banks[place];
        let state = &self.ranks[rank];
        let burst = &bank.queue[bank.pick];
        let group = (place / profile.geometry.banks as usize) % profile.geometry.groups as usize;
        let (kind, at) = if bank.row == burst.row {
            let other_rank = rank != self.data_rank;
            if burst.write {
                let turn = if other_rank || self.data_read { t.turn } else { 0 };
                let data = if self.served > 0 { (self.data + turn).saturating_sub(t.cwl) } else { 0 };
                (Kind::Write, bank.column.max(state.write).max(state.write_group[group]).max(data))
            } else {
                let turn = if other_rank { t.turn } else { 0 };
                let data = if self.served > 0 { (self.data + turn).saturating_sub(t.cl) } else { 0 };
                (Kind::Read, bank.column.max(state.read).max(state.read_group[group]).max(data))
            }
        } else if bank.row == CLOSED {
            let four = if state.activations >= 4 { state.four[state.oldest] + t.faw } else { 0 };
            let after = bank.activate.max(state.activate).max(state.activate_group[group]);
            (Kind::Activate, after.max(four))
        } else {
            (Kind::Precharge, bank.precharge)
        };
        Next { at: at.max(self.bus).max(burst.admitted), kind, bank: place, order: burst.order }
    }

    /// The next step towards a rank's refresh.
    fn refresh(&self, rank: usize, banks: usize) -> Next {
        let state = &self.ranks[rank];
        let first = rank * banks;
        let (kind, at) = if state.open > 0 {
            let open = self.banks[first..first + banks].iter().filter(|bank| bank.row != CLOSED);
            (Kind::PrechargeAll, open.map(|bank| bank.precharge).max().unwrap_or(0))
        } else {
            (Kind::Refresh, state.refresh)
        };
        Next { at: at.max(state.due).max(self.bus), kind, bank: first, order: 0 }
    }

    fn activate(&mut self, next: Next, group: usize, rank: usize, t: &Timing) -> u32 {
        let bank = &mut self.banks[next.bank];
        let row = bank.queue[bank.pick].row;
        (bank.row, bank.fresh, bank.opened) = (row, true, next.at);
        bank.column = next.at + t.rcd;
        bank.precharge = next.at + t.ras;
        bank.activate = next.at + t.ras + t.rp;
        bank.choose();
        let state = &mut self.ranks[rank];
        state.open += 1;
        state.activate = state.activate.max(next.at + t.rrd_s);
        state.activate_group[group] = next.at + t.rrd_l;
        state.four[state.oldest] = next.at;
        state.oldest = (state.oldest + 1) % 4;
        state.activations += 1;
        row
    }

    /// Closes a bank and gives the cycles that it was open.
    fn precharge(&mut self, at: u64, bank: usize, rank: usize, t: &Timing) -> u64 {
        let bank = &mut self.banks[bank];
        bank.row = CLOSED;
        bank.activate = bank.activate.max(at + t.rp);
        bank.passed = 0;
        bank.choose();
        let state = &mut self.ranks[rank];
        state.open -= 1;
        state.refresh = state.refresh.max(at + t.rp);
        at - bank.opened
    }

    /// Reads or writes the burst that is next in a bank, and gives when its data are there.
    fn serve(&mut self, next: Next, group: usize, rank: usize, t: &Timing) -> (Burst, u64) {
        let bank = &mut self.banks[next.bank];
        bank.passed = if bank.pick == 0 { 0 } else { bank.passed + 1 };
        let burst = bank.queue.remove(bank.pick);
        bank.choose();
        let state = &mut self.ranks[rank];
        let finished = if burst.write {
            let end = next.at + t.cwl + t.burst;
            bank.precharge = bank.precharge.max(end + t.wr);
            state.write = state.write.max(next.at + t.ccd_s);
            state.write_group[group] = next.at + t.ccd_l_wr;
            state.read = state.read.max(end + t.wtr_s);
            state.read_group[group] = state.read_group[group].max(end + t.wtr_l);
            end
        } else {
            let end = next.at + t.cl + t.burst;
            bank.precharge = bank.precharge.max(next.at + t.rtp);
            state.read = state.read.max(next.at + t.ccd_s);
            state.read_group[group] = state.read_group[group].max(next.at + t.ccd_l);
            end
        };
        if bank.queue.is_empty() {
            self.pending.retain(|pending| *pending != next.bank);
        }
        (self.data, self.data_rank, self.data_read) = (finished, rank, !burst.write);
        self.served += 1;
        (burst, finished)
    }
}
