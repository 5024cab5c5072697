//! One channel: its banks with their queues, and the command that is next.
//!
//! Planning is what a replay spends its time on, once for each command. So what a bank needs is
//! kept as a [`Want`] that changes only when its bank does, and what all banks of a group wait for
//! is worked out once a command, not once a bank.

use std::collections::VecDeque;

use super::Kind;
use super::profile::{Profile, Timing};

/// Younger bursts of its bank that a burst lets pass, because they hit the open row.
const MAX_PASSED_IN_BANK: u32 = 16;
/// Bursts of its channel that a burst lets pass.
const MAX_PASSED: u64 = 64;
/// The row of a bank that has none open.
pub(super) const CLOSED: u32 = u32::MAX;
/// Kinds of command that a burst may need.
const KINDS: usize = 4;
/// Added to the priority of what opens or closes a row: it goes after reads and writes.
const ROW: u64 = 1 << 63;

#[derive(Clone, Copy)]
pub(super) struct Burst {
    pub row: u32,
    pub column: u32,
    pub write: bool,
    /// Bursts that came to the channel before it.
    pub order: u64,
    pub tag: u64,
    pub admitted: u64,
}

pub(super) struct Bank {
    rank: usize,
    group: usize,
    pub row: u32,
    /// Whether its row was opened and nothing read or written since.
    pub fresh: bool,
    pub opened: u64,
    activate: u64,
    precharge: u64,
    column: u64,
    queue: VecDeque<Burst>,
    /// The burst that is next.
    pick: usize,
    passed: u32,
    /// Which of the channel's wants is its own, if it has a queue.
    want: usize,
}

pub(super) struct Rank {
    pub activate: u64,
    activate_group: Vec<u64>,
    /// The last four activations, the oldest at `oldest`.
    four: [u64; 4],
    oldest: usize,
    activations: u64,
    read: u64,
    write: u64,
    read_group: Vec<u64>,
    write_group: Vec<u64>,
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
    priority: u64,
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
struct Want {
    kind: Kind,
    bank: usize,
    rank: usize,
    /// Which of [`Channel::shared`] it waits for.
    shared: usize,
    /// From when on its bank permits it.
    ready: u64,
    priority: u64,
    /// The order of the bank's oldest burst.
    oldest: u64,
}

pub(super) struct Channel {
    pub banks: Vec<Bank>,
    pub ranks: Vec<Rank>,
    /// Of each bank with a queue.
    wants: Vec<Want>,
    /// By rank, kind and bank group: from when on all but a bank itself permits a command.
    shared: Vec<u64>,
    pub came: u64,
    served: u64,
    /// The order of the oldest burst that is queued; without one, of none.
    oldest: u64,
    pub bus: u64,
    data: u64,
    data_rank: usize,
    data_read: bool,
    pub next: Next,
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

impl Rank {
    fn new(groups: usize, due: u64) -> Self {
        Self {
            activate: 0,
            activate_group: vec![0; groups],
            four: [0; 4],
            oldest: 0,
            activations: 0,
            read: 0,
            write: 0,
            read_group: vec![0; groups],
            write_group: vec![0; groups],
            refresh: 0,
            due,
            open: 0,
        }
    }

    fn groups(&self) -> usize {
        self.read_group.len()
    }
}

impl Channel {
    /// With all banks closed.
    pub(super) fn new(profile: &Profile) -> Self {
        let g = &profile.geometry;
        let [ranks, groups, banks] = [g.ranks, g.groups, g.banks].map(|count| count as usize);
        let bank = |place: usize| Bank {
            rank: place / banks / groups,
            group: place / banks % groups,
            row: CLOSED,
            fresh: false,
            opened: 0,
            activate: 0,
            precharge: 0,
            column: 0,
            queue: VecDeque::new(),
            pick: 0,
            passed: 0,
            want: 0,
        };
        let mut channel = Self {
            banks: (0..ranks * groups * banks).map(bank).collect(),
            ranks: (0..ranks).map(|_| Rank::new(groups, profile.timing.refi)).collect(),
            wants: Vec::new(),
            shared: vec![0; ranks * KINDS * groups],
            came: 0,
            served: 0,
            oldest: u64::MAX,
            bus: 0,
            data: 0,
            data_rank: 0,
            data_read: true,
            next: Next { at: u64::MAX, kind: Kind::Refresh, bank: 0, priority: ROW },
        };
        channel.plan(profile);
        channel
    }

    /// Queues a burst.
    pub(super) fn add(&mut self, place: usize, burst: Burst, profile: &Profile) {
        let bank = &mut self.banks[place];
        let is_first = bank.queue.is_empty();
        let before = bank.pick;
        bank.queue.push_back(burst);
        bank.choose();
        if is_first {
            bank.want = self.wants.len();
            self.oldest = self.oldest.min(burst.order);
            self.wants.push(self.want(place));
        } else if bank.pick == before {
            debug_assert_eq!(self.next, self.planned(), "another burst for bank {place}");
            return;
        } else {
            self.renew(place);
        }
        let is_of_bank = !matches!(self.next.kind, Kind::PrechargeAll | Kind::Refresh);
        if is_of_bank && self.next.bank == place {
            self.plan(profile);
            return;
        }
        // Other banks want what they wanted: it goes before the next command or changes nothing.
        let want = self.wants[self.banks[place].want];
        let next = self.earliest(&want);
        let may = self.urgent().is_none_or(|order| is_permitted(&want, order));
        if may && next.at < self.ranks[want.rank].due && next.is_before(&self.next) {
            self.next = next;
        }
        debug_assert_eq!(self.next, self.planned(), "a burst for bank {place}");
    }

    /// Plans the next command of the channel.
    pub(super) fn plan(&mut self, profile: &Profile) {
        self.share(&profile.timing);
        self.next = self.planned();
    }

    /// The first command of all that are wanted, or due.
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
    fn urgent(&self) -> Option<u64> {
        (self.served >= self.oldest.saturating_add(MAX_PASSED)).then_some(self.oldest)
    }

    /// Of these wants, what may be issued first.
    #[inline]
    fn first<'a>(&self, wants: impl Iterator<Item = &'a Want>) -> Option<Next> {
        // One number for time and priority compares without a branch that is hard to predict.
        let key = |want: &Want| {
            let at = want.ready.max(self.shared[want.shared]);
            (u128::from(at) << 64) | u128::from(want.priority)
        };
        wants.min_by_key(|want| key(want)).map(|want| self.earliest(want))
    }

    /// When what a bank wants may be issued.
    #[inline]
    fn earliest(&self, want: &Want) -> Next {
        let at = want.ready.max(self.shared[want.shared]);
        Next { at, kind: want.kind, bank: want.bank, priority: want.priority }
    }

    /// Works out from when on ranks, groups and buses permit each kind of command.
    fn share(&mut self, t: &Timing) {
        let groups = self.ranks.first().map_or(0, Rank::groups);
        for (rank, (state, shared)) in
            self.ranks.iter().zip(self.shared.chunks_exact_mut(KINDS * groups)).enumerate()
        {
            let is_other = rank != self.data_rank;
            let data = |turns: bool, latency: u64| {
                let turn = if turns { t.turn } else { 0 };
                if self.served > 0 { (self.data + turn).saturating_sub(latency) } else { 0 }
            };
            let read = state.read.max(data(is_other, t.cl)).max(self.bus);
            let write = state.write.max(data(is_other || self.data_read, t.cwl)).max(self.bus);
            let four = if state.activations >= 4 { state.four[state.oldest] + t.faw } else { 0 };
            let activate = state.activate.max(four).max(self.bus);
            let (columns, rows) = shared.split_at_mut(2 * groups);
            let (reads, writes) = columns.split_at_mut(groups);
            let (activates, precharges) = rows.split_at_mut(groups);
            let raise = |shared: &mut [u64], by_group: &[u64], all: u64| {
                for (shared, group) in shared.iter_mut().zip(by_group) {
                    *shared = all.max(*group);
                }
            };
            raise(reads, &state.read_group, read);
            raise(writes, &state.write_group, write);
            raise(activates, &state.activate_group, activate);
            precharges.fill(self.bus);
        }
    }

    /// What the burst that is next in a bank needs first.
    fn want(&self, place: usize) -> Want {
        let bank = &self.banks[place];
        let burst = &bank.queue[bank.pick];
        // In the order of `share`.
        let (number, kind, ready) = if bank.row == burst.row {
            let (number, kind) = if burst.write { (1, Kind::Write) } else { (0, Kind::Read) };
            (number, kind, bank.column)
        } else if bank.row == CLOSED {
            (2, Kind::Activate, bank.activate)
        } else {
            (3, Kind::Precharge, bank.precharge)
        };
        let groups = self.ranks[bank.rank].groups();
        Want {
            kind,
            bank: place,
            rank: bank.rank,
            shared: (bank.rank * KINDS + number) * groups + bank.group,
            ready: ready.max(burst.admitted),
            priority: if number < 2 { burst.order } else { ROW | burst.order },
            oldest: bank.queue[0].order,
        }
    }

    /// Says anew what a bank wants, after it changed.
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
        let (kind, at) = if state.open > 0 {
            let open = self.banks[first..first + banks].iter().filter(|bank| bank.row != CLOSED);
            (Kind::PrechargeAll, open.map(|bank| bank.precharge).max().unwrap_or(0))
        } else {
            (Kind::Refresh, state.refresh)
        };
        Next { at: at.max(state.due).max(self.bus), kind, bank: first, priority: ROW }
    }

    /// Opens the row that is wanted of a bank, and gives it.
    pub(super) fn activate(&mut self, next: Next, t: &Timing) -> u32 {
        let bank = &mut self.banks[next.bank];
        let row = bank.queue[bank.pick].row;
        (bank.row, bank.fresh, bank.opened) = (row, true, next.at);
        bank.column = next.at + t.rcd;
        bank.precharge = next.at + t.ras;
        bank.activate = next.at + t.ras + t.rp;
        bank.choose();
        let state = &mut self.ranks[bank.rank];
        state.open += 1;
        state.activate = state.activate.max(next.at + t.rrd_s);
        state.activate_group[bank.group] = next.at + t.rrd_l;
        state.four[state.oldest] = next.at;
        state.oldest = (state.oldest + 1) % 4;
        state.activations += 1;
        self.renew(next.bank);
        row
    }

    /// Closes a bank and gives the cycles that it was open.
    pub(super) fn precharge(&mut self, at: u64, place: usize, t: &Timing) -> u64 {
        let bank = &mut self.banks[place];
        let open = at - bank.opened;
        bank.row = CLOSED;
        bank.activate = bank.activate.max(at + t.rp);
        bank.passed = 0;
        bank.choose();
        let state = &mut self.ranks[bank.rank];
        state.open -= 1;
        state.refresh = state.refresh.max(at + t.rp);
        self.renew(place);
        open
    }

    /// Reads or writes the burst that is next in a bank, and gives when its data are there.
    pub(super) fn serve(&mut self, next: Next, t: &Timing) -> (Burst, u64) {
        let bank = &mut self.banks[next.bank];
        bank.passed = if bank.pick == 0 { 0 } else { bank.passed + 1 };
        let burst = bank.queue[bank.pick];
        bank.queue.remove(bank.pick);
        bank.choose();
        let (rank, group) = (bank.rank, bank.group);
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
            let at = bank.want;
            self.wants.swap_remove(at);
            if let Some(moved) = self.wants.get(at) {
                self.banks[moved.bank].want = at;
            }
        } else {
            self.renew(next.bank);
        }
        if burst.order == self.oldest {
            self.oldest = self.wants.iter().map(|want| want.oldest).min().unwrap_or(u64::MAX);
        }
        (self.data, self.data_rank, self.data_read) = (finished, rank, !burst.write);
        self.served += 1;
        (burst, finished)
    }
}

/// Whether a bank may have its turn while only the burst of that order may read or write.
fn is_permitted(want: &Want, order: u64) -> bool {
    want.priority >= ROW || want.oldest == order
}
