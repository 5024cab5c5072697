//! One channel: its banks with their queues, and the command that is next.
//!
//! Planning is what a replay spends its time on, once for each command. So what a bank needs is
//! kept as a [`Want`] that changes only when its bank does, and what a group permits only when it
//! has a command. Reads or writes of open rows are often known far ahead, unless another burst
//! comes: these are foreseen, and issued in one step.

use std::hint::select_unpredictable;

use super::bank::{Bank, CLOSED, Run};
use super::finishes::Finishes;
use super::profile::{Profile, Timing};
use super::{Kind, Place};

/// Bursts of its channel that a burst lets pass.
pub(super) const MAX_PASSED: u64 = 64;
/// Kinds of command that a burst may need: read, write, activation, precharge.
const KINDS: usize = 4;
const READ: usize = 0;
const WRITE: usize = 1;
const ACTIVATE: usize = 2;
const PRECHARGE: usize = 3;
/// Added to the priority of what opens or closes a row: it goes after reads and writes.
pub(super) const ROW: u64 = 1 << 63;

pub(super) struct Rank {
    pub activate: u64,
    /// The last four activations, the oldest at `oldest`.
    four: [u64; 4],
    oldest: usize,
    activations: u64,
    read: u64,
    write: u64,
    /// From when on any bank may be closed.
    precharge: u64,
    pub refresh: u64,
    pub due: u64,
    pub open: u32,
}

/// A command that is next on a channel or rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Next {
    pub at: u64,
    pub kind: Kind,
    pub bank: usize,
    /// Of commands that may be issued in the same cycle, the least goes first.
    pub priority: u64,
}

impl Next {
    fn is_before(&self, other: &Self) -> bool {
        // Banks count by rank, so of two refreshes the first rank's goes before.
        let key = |next: &Self| (next.at, next.priority, next.bank);
        key(self) < key(other)
    }
}

/// What the burst that is next in a bank needs first.
#[derive(Clone, Copy)]
pub(super) struct Want {
    pub kind: Kind,
    pub bank: usize,
    pub rank: usize,
    /// Which of [`Channel::by_kind`] it waits for.
    pub level: usize,
    /// Which of [`Channel::by_group`] it waits for.
    pub group: usize,
    /// From when on its bank permits it.
    pub ready: u64,
    pub priority: u64,
    /// The order of the bank's oldest burst.
    pub oldest: u64,
}

pub(super) struct Channel {
    pub banks: Vec<Bank>,
    pub ranks: Vec<Rank>,
    /// Of each bank with a queue.
    pub wants: Vec<Want>,
    /// By rank and kind: from when on all but groups and banks permits a command.
    pub by_kind: Vec<u64>,
    /// By rank, kind and bank group: from when on the group permits a command.
    pub by_group: Vec<u64>,
    pub groups: usize,
    pub came: u64,
    pub served: u64,
    /// The order of the oldest burst that is queued; without one, of none.
    pub oldest: u64,
    pub bus: u64,
    pub data: u64,
    pub data_rank: usize,
    pub data_read: bool,
    pub next: Next,
    /// Commands that are known to be issued unless another burst comes: `next`, and then one each
    /// `step` cycles. None if that is not known, also of `next`.
    pub foreseen: u32,
    /// What `foreseen` may grow to when the runs grow that are served.
    pub most: u32,
    pub step: u64,
    /// The bank that has each second of them, if one has.
    pub other: Option<usize>,
    /// When data will be there, also of what is foreseen.
    pub finishes: Finishes,
}

/// What was read or written of a bank.
#[derive(Clone, Copy)]
pub(super) struct Served {
    pub bank: usize,
    /// Of which run, and which part of it.
    pub run: Run,
    /// Whether its row was open already.
    pub hit: bool,
    /// When the last data are there.
    pub finished: u64,
}

impl Rank {
    fn new(due: u64) -> Self {
        Self {
            activate: 0,
            four: [0; 4],
            oldest: 0,
            activations: 0,
            read: 0,
            write: 0,
            precharge: 0,
            refresh: 0,
            due,
            open: 0,
        }
    }
}

impl Channel {
    /// With all banks closed.
    pub(super) fn new(number: u32, profile: &Profile) -> Self {
        let g = &profile.geometry;
        let bank = |at: u32| {
            let (rank, group, bank) = (at / g.banks / g.groups, at / g.banks % g.groups, at % g.banks);
            Bank::new(Place { channel: number, rank, group, bank, ..Place::default() })
        };
        let [ranks, groups] = [g.ranks as usize, g.groups as usize];
        let mut channel = Self {
            banks: (0..g.ranks * g.groups * g.banks).map(bank).collect(),
            ranks: (0..ranks).map(|_| Rank::new(profile.timing.refi)).collect(),
            wants: Vec::new(),
            by_kind: vec![0; ranks * KINDS],
            by_group: vec![0; ranks * KINDS * groups],
            groups,
            came: 0,
            served: 0,
            oldest: u64::MAX,
            bus: 0,
            data: 0,
            data_rank: 0,
            data_read: true,
            next: Next { at: u64::MAX, kind: Kind::Refresh, bank: 0, priority: ROW },
            foreseen: 0,
            most: 0,
            step: 0,
            other: None,
            finishes: Finishes::new(),
        };
        channel.plan(&profile.timing);
        channel
    }

    /// Queues a burst. Nothing may be foreseen.
    pub(super) fn add(&mut self, place: usize, burst: Run, t: &Timing) {
        self.came += u64::from(burst.count);
        let bank = &mut self.banks[place];
        let is_first = bank.queue.is_empty();
        let is_other = bank.add(burst);
        if is_first {
            bank.want = self.wants.len();
            self.oldest = self.oldest.min(burst.order);
            self.wants.push(self.want(place));
        } else if is_other {
            self.renew(place);
        }
        if is_first || is_other {
            let is_of_bank = !matches!(self.next.kind, Kind::PrechargeAll | Kind::Refresh);
            if is_of_bank && self.next.bank == place {
                self.plan(t);
                return;
            }
            // Other banks want what they wanted: it goes before the next command or changes
            // nothing.
            let want = self.wants[self.banks[place].want];
            let next = self.earliest(&want);
            let may = self.urgent().is_none_or(|order| is_permitted(&want, order));
            if may && next.at < self.ranks[want.rank].due && next.is_before(&self.next) {
                self.next = next;
            }
        }
        debug_assert_eq!(self.next, self.planned(), "a burst for bank {place}");
        self.foresee(t);
    }

    /// Plans the next command of the channel.
    pub(super) fn plan(&mut self, t: &Timing) {
        self.share(t);
        self.next = self.planned();
        self.foresee(t);
    }

    /// The first command of all that are wanted, or due.
    #[inline]
    fn planned(&self) -> Next {
        let urgent = self.urgent();
        let is_one = self.ranks.len() == 1;
        let mut best: Option<Next> = None;
        for (at, rank) in self.ranks.iter().enumerate() {
            let wants = self.wants.iter().filter(|want| is_one || want.rank == at);
            // Hardly ever is one urgent: the usual loop does not ask.
            let first = match urgent {
                None => self.first(wants),
                Some(order) => self.first(wants.filter(|want| is_permitted(want, order))),
            };
            let next = first.filter(|first| first.at < rank.due).unwrap_or_else(|| self.refresh(at));
            if best.as_ref().is_none_or(|best| next.is_before(best)) {
                best = Some(next);
            }
        }
        // There is at least one rank, and it is refreshed some day.
        best.unwrap_or(Next { at: u64::MAX, kind: Kind::Refresh, bank: 0, priority: ROW })
    }

    /// The oldest burst, if it let enough others pass: it is served before any other.
    #[inline]
    pub(super) fn urgent(&self) -> Option<u64> {
        (self.served >= self.oldest.saturating_add(MAX_PASSED)).then_some(self.oldest)
    }

    /// Of these wants, what may be issued first.
    #[inline]
    fn first<'a>(&self, wants: impl Iterator<Item = &'a Want>) -> Option<Next> {
        // One number for time and priority, and no branch: banks have their turns as if by chance.
        let key = |want: &Want| (u128::from(self.permitted(want)) << 64) | u128::from(want.priority);
        let mut first: Option<(u128, &Want)> = None;
        for want in wants {
            let this = (key(want), want);
            first = first.map_or(Some(this), |best| {
                let least = this.0.min(best.0);
                Some((least, select_unpredictable(this.0 < best.0, want, best.1)))
            });
        }
        first.map(|(_, want)| self.earliest(want))
    }

    /// When what a bank wants may be issued.
    #[inline]
    fn earliest(&self, want: &Want) -> Next {
        Next { at: self.permitted(want), kind: want.kind, bank: want.bank, priority: want.priority }
    }

    #[inline]
    pub(super) fn permitted(&self, want: &Want) -> u64 {
        want.ready.max(self.by_kind[want.level]).max(self.by_group[want.group])
    }

    /// Works out from when on ranks and buses permit each kind of command.
    #[inline]
    fn share(&mut self, t: &Timing) {
        for (rank, (state, shared)) in self.ranks.iter().zip(self.by_kind.chunks_exact_mut(KINDS)).enumerate()
        {
            let is_other = rank != self.data_rank;
            let data = |turns: bool, latency: u64| {
                let turn = if turns { t.turn } else { 0 };
                if self.served > 0 { (self.data + turn).saturating_sub(latency) } else { 0 }
            };
            let four = if state.activations >= 4 { state.four[state.oldest] + t.faw } else { 0 };
            shared[READ] = state.read.max(data(is_other, t.cl)).max(self.bus);
            shared[WRITE] = state.write.max(data(is_other || self.data_read, t.cwl)).max(self.bus);
            shared[ACTIVATE] = state.activate.max(four).max(self.bus);
            shared[PRECHARGE] = self.bus;
        }
    }

    /// Of which number in [`Channel::by_group`] the group of a bank is for a kind.
    fn group(&self, bank: &Bank, kind: usize) -> usize {
        (bank.rank * KINDS + kind) * self.groups + bank.group
    }

    /// What the burst that is next in a bank needs first.
    #[inline]
    fn want(&self, place: usize) -> Want {
        let bank = &self.banks[place];
        let burst = &bank.queue[bank.pick];
        let (number, kind, ready) = if bank.row == burst.row {
            let (number, kind) = if burst.write { (WRITE, Kind::Write) } else { (READ, Kind::Read) };
            (number, kind, bank.column)
        } else if bank.row == CLOSED {
            (ACTIVATE, Kind::Activate, bank.activate)
        } else {
            (PRECHARGE, Kind::Precharge, bank.precharge)
        };
        Want {
            kind,
            bank: place,
            rank: bank.rank,
            level: bank.rank * KINDS + number,
            group: self.group(bank, number),
            ready: ready.max(burst.admitted),
            priority: if number <= WRITE { burst.order } else { ROW | burst.order },
            oldest: bank.queue[0].order,
        }
    }

    /// Says anew what a bank wants, after it changed.
    #[inline]
    fn renew(&mut self, place: usize) {
        let bank = &self.banks[place];
        if bank.queue.is_empty() {
            return;
        }
        let at = bank.want;
        self.wants[at] = self.want(place);
    }

    /// The next step towards a rank's refresh.
    fn refresh(&self, rank: usize) -> Next {
        let state = &self.ranks[rank];
        let banks = self.banks.len() / self.ranks.len();
        let first = rank * banks;
        let (kind, at) = if state.open == 0 {
            (Kind::Refresh, state.refresh)
        } else if state.precharge <= state.due {
            (Kind::PrechargeAll, state.due)
        } else {
            let open = self.banks[first..first + banks].iter().filter(|bank| bank.row != CLOSED);
            (Kind::PrechargeAll, open.map(|bank| bank.precharge).max().unwrap_or(0))
        };
        Next { at: at.max(state.due).max(self.bus), kind, bank: first, priority: ROW }
    }

    /// Opens the row that is wanted of a bank, and gives it.
    pub(super) fn activate(&mut self, next: Next, t: &Timing) -> u32 {
        let bank = &mut self.banks[next.bank];
        let row = bank.open(next.at, t);
        let state = &mut self.ranks[bank.rank];
        state.open += 1;
        state.precharge = state.precharge.max(bank.precharge);
        state.activate = state.activate.max(next.at + t.rrd_s);
        state.four[state.oldest] = next.at;
        state.oldest = (state.oldest + 1) % 4;
        state.activations += 1;
        let group = self.group(&self.banks[next.bank], ACTIVATE);
        self.by_group[group] = next.at + t.rrd_l;
        self.renew(next.bank);
        row
    }

    /// Closes a bank and gives the cycles that it was open.
    pub(super) fn precharge(&mut self, at: u64, place: usize, t: &Timing) -> u64 {
        let bank = &mut self.banks[place];
        let open = bank.close(at, t);
        let state = &mut self.ranks[bank.rank];
        state.open -= 1;
        state.refresh = state.refresh.max(at + t.rp);
        self.renew(place);
        open
    }

    /// Reads or writes the burst that is next, with all that are foreseen behind it: of one bank,
    /// or of two that took turns.
    pub(super) fn serve(&mut self, t: &Timing) -> (Served, Option<Served>) {
        let count = self.foreseen.max(1);
        let (first, second) = match self.other.filter(|_| count > 1) {
            None => (self.serve_bank(self.next.bank, count, self.command(count - 1), t), None),
            Some(other) => {
                let (of_first, of_other) = (count.div_ceil(2), count / 2);
                let first = self.serve_bank(self.next.bank, of_first, self.command(2 * (of_first - 1)), t);
                (first, Some(self.serve_bank(other, of_other, self.command(2 * of_other - 1), t)))
            }
        };
        self.served += u64::from(count);
        let last = second.filter(|_| count.is_multiple_of(2)).unwrap_or(first);
        self.data = last.finished;
        (self.data_rank, self.data_read) = (self.banks[last.bank].rank, !last.run.write);
        self.left(&first);
        if let Some(second) = &second {
            self.left(second);
        }
        if first.run.order == self.oldest || second.is_some_and(|second| second.run.order == self.oldest) {
            self.oldest = self.wants.iter().map(|want| want.oldest).min().unwrap_or(u64::MAX);
        }
        if self.foreseen == 0 {
            self.finishes.add(self.data, 0, 1);
        }
        self.foreseen = 0;
        (first, second)
    }

    /// Says anew what a bank wants of which bursts were served.
    #[inline]
    fn left(&mut self, served: &Served) {
        let bank = &self.banks[served.bank];
        if !bank.queue.is_empty() {
            return self.renew(served.bank);
        }
        let at = bank.want;
        self.wants.swap_remove(at);
        if let Some(moved) = self.wants.get(at) {
            self.banks[moved.bank].want = at;
        }
    }

    /// Reads or writes so many bursts of a bank, the last at that cycle. What a command keeps
    /// others waiting for ends later than that of the one before it: the last one's counts.
    #[inline]
    fn serve_bank(&mut self, place: usize, count: u32, last: u64, t: &Timing) -> Served {
        let bank = &mut self.banks[place];
        let hit = !bank.fresh;
        let run = bank.take(count);
        let state = &mut self.ranks[bank.rank];
        let group = bank.rank * KINDS * self.groups + bank.group;
        let [read, write] = [READ, WRITE].map(|kind| group + kind * self.groups);
        let finished = if run.write {
            let end = last + t.cwl + t.burst;
            bank.precharge = bank.precharge.max(end + t.wr);
            state.write = state.write.max(last + t.ccd_s);
            state.read = state.read.max(end + t.wtr_s);
            self.by_group[write] = last + t.ccd_l_wr;
            self.by_group[read] = self.by_group[read].max(end + t.wtr_l);
            end
        } else {
            bank.precharge = bank.precharge.max(last + t.rtp);
            state.read = state.read.max(last + t.ccd_s);
            self.by_group[read] = self.by_group[read].max(last + t.ccd_l);
            last + t.cl + t.burst
        };
        state.precharge = state.precharge.max(bank.precharge);
        Served { bank: place, run, hit, finished }
    }
}

/// Whether a bank may have its turn while only the burst of that order may read or write.
fn is_permitted(want: &Want, order: u64) -> bool {
    want.priority >= ROW || want.oldest == order
}
