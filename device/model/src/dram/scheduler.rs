//! FR-FCFS: of the commands that may be issued first, one that reads or writes an open row goes
//! before one that opens or closes a row, and the older burst before the younger.
//!
//! * Time goes from command to command, not from cycle to cycle. Each channel knows its next
//!   command, and which that is changes only when a burst comes to it or it issues one.
//! * A burst holds a miss status register from when it comes until its data are there. When all are
//!   held, the next burst waits, and so does all behind it.
//! * Rows stay open until another is wanted. A burst is passed by so many younger ones and no more.
//! * A refresh that is due goes before all else on its rank.

use std::collections::VecDeque;

use serde::Serialize;

use super::channel::{Burst, CLOSED, Channel};
use super::checker::Checker;
use super::profile::Profile;
use super::{Command, Kind, Place};
use crate::ModelError;

/// Refreshes behind which an idle module is not stepped through.
const STEPPED_REFRESHES: u64 = 8;

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

/// A module at work.
pub struct Dram {
    profile: Profile,
    channels: Vec<Channel>,
    registers: usize,
    /// When data of bursts that hold registers will be there. A channel has one data bus, so of
    /// each channel they are in order.
    busy: Vec<VecDeque<u64>>,
    /// All of these.
    held: usize,
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
        Ok(Self {
            channels: (0..profile.geometry.channels).map(|_| Channel::new(profile)).collect(),
            registers,
            busy: vec![VecDeque::with_capacity(registers); profile.geometry.channels as usize],
            held: 0,
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
            let next = self.next();
            if let Some((channel, _)) = next.filter(|(_, next)| *next < at) {
                self.issue(channel);
                continue;
            }
            self.release(at);
            if self.held + self.queued < self.registers {
                break;
            }
            // All wait for the next data, or for the command that will bring some.
            match (self.next_data(), next) {
                (Some(finished), Some((_, next))) if finished <= next => at = finished,
                (_, Some((channel, _))) => self.issue(channel),
                (Some(finished), None) => at = finished,
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
        channel.add(place, burst, &self.profile);
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
        self.release(u64::MAX);
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

    /// When the next data of those that hold a register will be there.
    fn next_data(&self) -> Option<u64> {
        self.busy.iter().filter_map(|channel| channel.front().copied()).min()
    }

    /// Frees the registers of data that are there by then.
    fn release(&mut self, at: u64) {
        for channel in &mut self.busy {
            while channel.front().is_some_and(|finished| *finished <= at) {
                channel.pop_front();
                self.held -= 1;
            }
        }
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
            channel.plan(&self.profile);
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
                place.row = channel.activate(next, t);
            }
            Kind::Precharge => {
                self.counts.precharges += 1;
                self.counts.open_bank_cycles += channel.precharge(next.at, next.bank, t);
            }
            Kind::PrechargeAll => {
                self.counts.precharges_all += 1;
                for bank in rank * banks..(rank + 1) * banks {
                    if channel.banks[bank].row != CLOSED {
                        self.counts.open_bank_cycles += channel.precharge(next.at, bank, t);
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
                let (burst, finished) = channel.serve(next, t);
                (place.row, place.column) = (burst.row, burst.column);
                let count = if burst.write { &mut self.counts.writes } else { &mut self.counts.reads };
                *count += 1;
                self.queued -= 1;
                self.last = self.last.max(finished);
                self.busy[at].push_back(finished);
                self.held += 1;
                self.done.push(Done { tag: burst.tag, admitted: burst.admitted, finished });
            }
        }
        let long = matches!(next.kind, Kind::Activate | Kind::Read | Kind::Write);
        channel.bus = next.at + if long { 2 } else { 1 };
        channel.plan(&self.profile);
        let command = Command { at: next.at, kind: next.kind, place };
        if let Err(wrong) = self.checker.check(&command) {
            self.wrong.get_or_insert(wrong);
        }
    }
}
