//! FR-FCFS: of the commands that may be issued first, one that reads or writes an open row goes
//! before one that opens or closes a row, and the older burst before the younger.
//!
//! * Time goes from command to command, not from cycle to cycle. Each channel knows its next
//!   command, and which that is changes only when a burst comes to it or it issues one.
//! * Channels share nothing but the registers. What a channel foresees is issued when another burst
//!   comes to it, or when time gets behind it. Until then only the times of its data count.
//! * A burst holds a miss status register from when it comes until its data are there. When all are
//!   held, the next burst waits, and so does all behind it.
//! * Rows stay open until another is wanted. A burst is passed by so many younger ones and no more.
//! * A refresh that is due goes before all else on its rank.

use std::hint::select_unpredictable;

use serde::Serialize;

#[cfg(test)]
use super::Command;
use super::bank::{CLOSED, Run};
use super::channel::Channel;
use super::checker::Checker;
use super::profile::Profile;
use super::{Commands, Kind, Place};
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

/// Lines that came together and whose data are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Of the access.
    pub tag: u64,
    /// How many: one, if it came alone.
    pub count: u32,
    /// When the first line that came with these got a register.
    pub admitted: u64,
    /// When their last data came.
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
    /// Cycles until the last data were there, or those that it was given.
    pub cycles: u64,
    /// Commands that the checker found legal: all of them.
    pub checked: u64,
}

/// A module at work.
pub struct Dram {
    profile: Profile,
    channels: Vec<Channel>,
    registers: u32,
    /// Of each channel: when the first data that hold a register will be there.
    data: Vec<u64>,
    /// Of each channel: until when it is known what it does, if nothing comes.
    known: Vec<u64>,
    /// Bursts that hold a register.
    held: u32,
    /// Those of them of which no read or write was issued.
    queued: u64,
    clock: u64,
    last: u64,
    admitted: u64,
    done: Vec<Done>,
    counts: Counts,
    checker: Checker,
    wrong: Option<ModelError>,
    /// All commands, each channel's in their order.
    #[cfg(test)]
    pub(super) issued: Vec<Command>,
}

impl Dram {
    /// With all banks closed and so many registers (TRACE's earlier form has 64: CXL-NDP, III-D).
    ///
    /// # Errors
    /// A field of the profile, or the number of registers, that is of no use.
    pub fn new(profile: &Profile, registers: usize) -> Result<Self, ModelError> {
        profile.check()?;
        let registers = u32::try_from(registers)
            .ok()
            .filter(|registers| (1..=4096).contains(registers))
            .ok_or_else(|| ModelError::field("mshr", &registers, "from 1 to 4096"))?;
        let channels: Vec<_> =
            (0..profile.geometry.channels).map(|number| Channel::new(number, profile)).collect();
        Ok(Self {
            registers,
            data: vec![u64::MAX; channels.len()],
            known: channels.iter().map(Channel::known_until).collect(),
            channels,
            held: 0,
            queued: 0,
            clock: 0,
            last: 0,
            admitted: 0,
            done: Vec::new(),
            counts: Counts::default(),
            checker: Checker::new(profile),
            wrong: None,
            #[cfg(test)]
            issued: Vec::new(),
            profile: profile.clone(),
        })
    }

    /// The cycle up to which all is decided.
    pub fn clock(&self) -> u64 {
        self.clock
    }

    /// Lets an access come, as soon as a register is free.
    pub fn push(&mut self, access: &Access) {
        self.push_run(access, 1);
    }

    /// Lets so many lines come that follow each other in a row, the first at the access's place:
    /// the same as one push for each. Gives when the first of them got a register.
    pub fn push_run(&mut self, access: &Access, count: u32) -> u64 {
        let p = access.place;
        let g = &self.profile.geometry;
        let bank = ((p.rank * g.groups + p.group) * g.banks + p.bank) as usize;
        let at = p.channel as usize;
        let now = self.clock.max(access.at);
        self.skip(now);
        self.clock = now;
        let (mut begun, mut line) = (None, 0);
        while line < count {
            if line > 0 && self.channels[at].may_join(bank) {
                let came = self.follow(at, bank, count - line);
                line += came;
                if came == 0 {
                    self.issue(first(&self.known).0);
                }
                continue;
            }
            self.admit();
            begun.get_or_insert(self.clock);
            // From now on other commands may be issued than were foreseen.
            if self.channels[at].cut(self.clock) {
                self.issue(at);
                self.channels[at].cut(self.clock);
            }
            let channel = &mut self.channels[at];
            let burst = Run {
                row: p.row,
                column: p.column + line,
                count: 1,
                write: access.write,
                order: channel.came,
                tag: access.tag,
                admitted: self.clock,
            };
            channel.add(bank, burst, &self.profile.timing);
            self.note(at);
            line += 1;
        }
        begun.unwrap_or(self.clock)
    }

    /// Gives registers to up to so many bursts that follow the one that came last, as long as it
    /// waits and all that is issued meanwhile is foreseen. Gives how many that were.
    fn follow(&mut self, at: usize, bank: usize, count: u32) -> u32 {
        let others = self.known.iter().enumerate().filter(|(other, _)| *other != at);
        let others = others.map(|(_, known)| *known).min().unwrap_or(u64::MAX);
        let mut came = 0;
        while came < count {
            let mut more = (count - came).min(self.registers - self.held);
            if more == 0 {
                more = self.free(others.min(self.channels[at].known_until()), count - came);
            }
            if more == 0 {
                break;
            }
            self.held += more;
            self.channels[at].join(bank, more);
            came += more;
        }
        self.queued += u64::from(came);
        self.admitted += u64::from(came);
        self.note(at);
        came
    }

    /// Frees the registers of data that are there by a time, of the first such and at most so many.
    /// Gives how many that were: fewer than there are at times, but none only if there are none.
    /// The clock is when the last of these data came.
    fn free(&mut self, until: u64, most: u32) -> u32 {
        let (one, earliest) = first(&self.data);
        if earliest > until {
            return 0;
        }
        if most == 1 {
            self.free_of(one, 1);
            return 1;
        }
        // Of two channels at once: more are hardly ever at work for one request.
        let (mut other, mut second, mut third) = (one, u64::MAX, u64::MAX);
        for (at, data) in self.data.iter().enumerate() {
            let data = select_unpredictable(at == one, u64::MAX, *data);
            third = third.min(data.max(second));
            other = select_unpredictable(data < second, at, other);
            second = second.min(data);
        }
        let both = [one, other].map(|at| &self.channels[at].finishes);
        let counts = if one == other {
            both[0].merged(None, until, most)
        } else {
            both[0].merged(Some(both[1]), until.min(third), most)
        };
        for (at, count) in [one, other].into_iter().zip(counts) {
            if count > 0 {
                self.free_of(at, count);
            }
        }
        counts[0] + counts[1]
    }

    /// Frees the registers of so many of a channel's first data.
    #[inline]
    fn free_of(&mut self, at: usize, count: u32) {
        let finishes = &mut self.channels[at].finishes;
        self.clock = self.clock.max(finishes.pop(count));
        self.data[at] = finishes.first();
        self.held -= count;
    }

    /// Gives a burst a register, as soon as one is free: the clock is then. What is issued before
    /// is issued or foreseen.
    fn admit(&mut self) {
        loop {
            let (channel, known) = first(&self.known);
            if known >= self.clock {
                if self.held < self.registers {
                    break;
                }
                // The first data that come free one: those that came are not counted before.
                if self.free(known, 1) == 1 {
                    break;
                }
            }
            self.issue(channel);
        }
        self.held += 1;
        self.queued += 1;
        self.admitted += 1;
    }

    /// Notes when a channel's data come and until when it is known what it does.
    #[inline]
    fn note(&mut self, at: usize) {
        self.data[at] = self.channels[at].finishes.first();
        self.known[at] = self.channels[at].known_until();
    }

    /// Runs, or parts of them, that were finished since the last [`Dram::take_done`].
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
        self.finish_at(0)
    }

    /// The same, and lets time pass until that cycle at least: the module is refreshed until then.
    /// Nothing may come before it later.
    ///
    /// # Errors
    /// As [`Dram::finish`].
    pub fn finish_at(&mut self, until: u64) -> Result<Outcome, ModelError> {
        while self.queued > 0 {
            self.issue(first(&self.known).0);
        }
        self.skip(until);
        while first(&self.known).1 < until {
            self.issue(first(&self.known).0);
        }
        let end = self.last.max(until);
        for at in 0..self.channels.len() {
            self.channels[at].finishes.clear();
            self.note(at);
        }
        self.held = 0;
        self.clock = self.clock.max(end);
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
                counts.open_bank_cycles += end.saturating_sub(bank.opened);
            }
        }
        Ok(Outcome { counts, cycles: end, checked: self.checker.checked() })
    }

    /// Lets an idle module's time pass without stepping through all of its refreshes.
    fn skip(&mut self, at: u64) {
        let refi = self.profile.timing.refi;
        if at.saturating_sub(self.clock) < 4 * STEPPED_REFRESHES * refi {
            return;
        }
        while self.queued > 0 && first(&self.known).1 < at {
            self.issue(first(&self.known).0);
        }
        if self.queued > 0 {
            return;
        }
        // All rows are closed by the first refresh, whatever was open.
        let until = self.clock.max(self.last) + STEPPED_REFRESHES * refi;
        while first(&self.known).1 < until.min(at) {
            self.issue(first(&self.known).0);
        }
        for (channel, known) in self.channels.iter_mut().zip(&mut self.known) {
            for rank in &mut channel.ranks {
                if rank.open == 0 && rank.due < at {
                    let passed = (at - rank.due) / refi;
                    rank.due += passed * refi;
                    self.counts.refreshes += passed;
                }
            }
            channel.plan(&self.profile.timing);
            *known = channel.known_until();
        }
    }

    /// Issues the next command of a channel, and with it those that are foreseen.
    fn issue(&mut self, at: usize) {
        let t = &self.profile.timing;
        let channel = &mut self.channels[at];
        let next = channel.next;
        let last = channel.known_until();
        let step = channel.step;
        let mut places = [channel.banks[next.bank].place; 2];
        let (mut turns, mut count) = (1, 1);
        match next.kind {
            Kind::Activate => {
                self.counts.activates += 1;
                places[0].row = channel.activate(next, t);
            }
            Kind::Precharge => {
                self.counts.precharges += 1;
                self.counts.open_bank_cycles += channel.precharge(next.at, next.bank, t);
            }
            Kind::PrechargeAll => {
                self.counts.precharges_all += 1;
                let banks = channel.banks.len() / channel.ranks.len();
                for bank in next.bank..next.bank + banks {
                    if channel.banks[bank].row != CLOSED {
                        self.counts.open_bank_cycles += channel.precharge(next.at, bank, t);
                    }
                }
            }
            Kind::Refresh => {
                self.counts.refreshes += 1;
                let state = &mut channel.ranks[places[0].rank as usize];
                state.due += t.refi;
                state.activate = state.activate.max(next.at + t.rfc);
                state.refresh = next.at + t.rfc;
            }
            Kind::Read | Kind::Write => {
                let (first, second) = channel.serve(t);
                (turns, count) = (1 + usize::from(second.is_some()), 0);
                for (served, place) in std::iter::once(&first).chain(&second).zip(&mut places) {
                    let run = served.run;
                    *place = channel.banks[served.bank].place;
                    (place.row, place.column) = (run.row, run.column);
                    count += run.count;
                    self.counts.row_hits += u64::from(run.count) - u64::from(!served.hit);
                    let (tag, admitted, finished) = (run.tag, run.admitted, served.finished);
                    self.last = self.last.max(finished);
                    self.done.push(Done { tag, count: run.count, admitted, finished });
                }
                let sum = if first.run.write { &mut self.counts.writes } else { &mut self.counts.reads };
                *sum += u64::from(count);
                self.queued -= u64::from(count);
            }
        }
        let long = matches!(next.kind, Kind::Activate | Kind::Read | Kind::Write);
        channel.bus = last + if long { 2 } else { 1 };
        channel.plan(t);
        let issued = Commands { kind: next.kind, at: next.at, places: &places[..turns], step, count };
        #[cfg(test)]
        self.issued.extend((0..count).map(|number| issued.get(number)));
        if let Err(wrong) = self.checker.check_all(&issued) {
            self.wrong.get_or_insert(wrong);
        }
        self.note(at);
    }
}

/// Which of the times is first, and that. Channels have their turns as if by chance: a branch for
/// each would be foretold wrongly.
#[inline]
fn first(times: &[u64]) -> (usize, u64) {
    let mut first = (0, u64::MAX);
    for (at, time) in times.iter().enumerate() {
        first.0 = select_unpredictable(*time < first.1, at, first.0);
        first.1 = first.1.min(*time);
    }
    first
}
