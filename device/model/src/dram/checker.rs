//! Whether commands were legal: each against the times of those before it.
//!
//! It knows what was issued and when, and nothing of what a scheduler thinks may be issued.

use super::profile::Profile;
use super::{Command, Commands, Kind, Place};
use crate::ModelError;

/// Longer ago than any constraint reaches.
const NEVER: i64 = i64::MIN / 2;
/// Cycles of the command bus that an activation, a read or a write takes.
const LONG: u64 = 2;

#[derive(Clone)]
struct Bank {
    row: Option<u32>,
    activated: i64,
    precharged: i64,
    read: i64,
    written: i64,
}

#[derive(Clone)]
struct Rank {
    banks: Vec<Bank>,
    /// The last four activations, the oldest at `oldest`.
    activations: [i64; 4],
    oldest: usize,
    /// By bank group.
    activated: Vec<i64>,
    read: Vec<i64>,
    written: Vec<i64>,
    any_activated: i64,
    any_read: i64,
    any_written: i64,
    refreshed: i64,
    open: u32,
}

#[derive(Clone)]
struct Channel {
    ranks: Vec<Rank>,
    /// When the command bus is free again.
    bus: i64,
    /// When the last data ended, and whose they were.
    data: i64,
    data_rank: u32,
}

impl Channel {
    /// Takes a read or write for issued.
    #[inline]
    fn take(&mut self, kind: Kind, now: i64, p: Place, profile: &Profile) {
        let (t, banks) = (&profile.timing, profile.geometry.banks);
        let rank = &mut self.ranks[p.rank as usize];
        let bank = &mut rank.banks[(p.group * banks + p.bank) as usize];
        let group = p.group as usize;
        let latency = if kind == Kind::Read {
            (bank.read, rank.read[group], rank.any_read) = (now, now, now);
            t.cl
        } else {
            (bank.written, rank.written[group], rank.any_written) = (now, now, now);
            t.cwl
        };
        self.bus = now + cycles(LONG);
        (self.data, self.data_rank) = (now + cycles(latency + t.burst), p.rank);
    }
}

/// Checks all commands of a run.
#[derive(Clone)]
pub struct Checker {
    profile: Profile,
    channels: Vec<Channel>,
    /// Commands that were checked.
    checked: u64,
}

impl Checker {
    /// With all banks closed, since ever.
    pub fn new(profile: &Profile) -> Self {
        let g = &profile.geometry;
        let bank = Bank { row: None, activated: NEVER, precharged: NEVER, read: NEVER, written: NEVER };
        let groups = vec![NEVER; g.groups as usize];
        let rank = Rank {
            banks: vec![bank; (g.groups * g.banks) as usize],
            activations: [NEVER; 4],
            oldest: 0,
            activated: groups.clone(),
            read: groups.clone(),
            written: groups,
            any_activated: NEVER,
            any_read: NEVER,
            any_written: NEVER,
            refreshed: NEVER,
            open: 0,
        };
        let channel =
            || Channel { ranks: vec![rank.clone(); g.ranks as usize], bus: NEVER, data: NEVER, data_rank: 0 };
        Self { profile: profile.clone(), channels: (0..g.channels).map(|_| channel()).collect(), checked: 0 }
    }

    /// Commands that were checked.
    pub fn checked(&self) -> u64 {
        self.checked
    }

    /// Checks commands that follow each other, and takes them for issued.
    ///
    /// # Errors
    /// The rule that the first breaks which breaks one.
    pub fn check_all(&mut self, commands: &Commands) -> Result<(), ModelError> {
        let (count, turns) = (commands.count, u32::try_from(commands.places.len()).unwrap_or(u32::MAX));
        let may = count > turns && self.may_follow(commands);
        let alone = if may { turns } else { count };
        (0..alone).try_for_each(|number| self.check(&commands.get(number)))?;
        if !may {
            return Ok(());
        }
        // A command behind these is as far from those before it as it must be, and all else that it
        // waits for was over at the first. So it is legal if its column is there.
        let columns = self.profile.geometry.columns;
        let last = (count - turns).max(turns)..count;
        if last.clone().any(|number| commands.get(number).place.column >= columns) {
            return (alone..count).try_for_each(|number| self.check(&commands.get(number)));
        }
        self.checked += u64::from(count - alone);
        for number in last {
            let Command { at, kind, place } = commands.get(number);
            self.channels[place.channel as usize].take(kind, cycles(at), place, &self.profile);
        }
        Ok(())
    }

    /// Whether reads, or writes, may follow each other so, as far as they wait for each other: of
    /// one place, or of two bank groups.
    #[inline]
    fn may_follow(&self, commands: &Commands) -> bool {
        let (t, step) = (&self.profile.timing, commands.step);
        let in_group = match commands.kind {
            Kind::Read => t.ccd_l,
            Kind::Write => t.ccd_l_wr,
            _ => return false,
        };
        let same = match commands.places {
            [_] => step,
            [a, b] if (a.channel, a.rank) == (b.channel, b.rank) && a.group != b.group => {
                step.saturating_mul(2)
            }
            _ => return false,
        };
        let end = step.checked_mul(commands.count.into()).and_then(|all| all.checked_add(commands.at));
        let is_time = end.is_some_and(|end| i64::try_from(end).is_ok());
        is_time && step >= LONG && step >= t.ccd_s && step >= t.burst && same >= in_group
    }

    /// Checks a command and takes it for issued.
    ///
    /// # Errors
    /// The rule that it breaks.
    pub fn check(&mut self, command: &Command) -> Result<(), ModelError> {
        self.checked += 1;
        let (t, g) = (&self.profile.timing, &self.profile.geometry);
        let p = command.place;
        let wrong = |rule: &str| ModelError::Form {
            what: format!("the schedule of channel {}", p.channel),
            why: format!("{:?} at cycle {} breaks {rule}", command.kind, command.at),
        };
        let now = cycles(command.at);
        let in_module = p.channel < g.channels
            && p.rank < g.ranks
            && p.group < g.groups
            && p.bank < g.banks
            && p.row < g.rows
            && p.column < g.columns;
        if !in_module {
            return Err(wrong("the module's geometry"));
        }
        let channel = &mut self.channels[p.channel as usize];
        if now < channel.bus {
            return Err(wrong("the command bus"));
        }
        let long = matches!(command.kind, Kind::Activate | Kind::Read | Kind::Write);
        channel.bus = now + cycles(if long { LONG } else { 1 });
        let rank = &mut channel.ranks[p.rank as usize];
        let group = p.group as usize;
        let at = (p.group * g.banks + p.bank) as usize;
        let apart = |before: i64, need: u64, rule: &str| {
            if now.saturating_sub(before) < cycles(need) { Err(wrong(rule)) } else { Ok(()) }
        };
        apart(rank.refreshed, t.rfc, "tRFC")?;
        match command.kind {
            Kind::Activate => {
                let bank = &rank.banks[at];
                if bank.row.is_some() {
                    return Err(wrong("a row that is open"));
                }
                apart(bank.precharged, t.rp, "tRP")?;
                apart(bank.activated, t.ras + t.rp, "tRC")?;
                apart(rank.any_activated, t.rrd_s, "tRRD_S")?;
                apart(rank.activated[group], t.rrd_l, "tRRD_L")?;
                apart(rank.activations[rank.oldest], t.faw, "tFAW")?;
                rank.activations[rank.oldest] = now;
                rank.oldest = (rank.oldest + 1) % 4;
                (rank.any_activated, rank.activated[group]) = (now, now);
                (rank.banks[at].row, rank.banks[at].activated) = (Some(p.row), now);
                rank.open += 1;
            }
            Kind::Precharge => {
                precharge(&mut rank.banks[at], now, t, &wrong)?;
                rank.open -= 1;
            }
            Kind::PrechargeAll => {
                for bank in rank.banks.iter_mut().filter(|bank| bank.row.is_some()) {
                    precharge(bank, now, t, &wrong)?;
                }
                rank.open = 0;
            }
            Kind::Read | Kind::Write => {
                let reads = command.kind == Kind::Read;
                let bank = &rank.banks[at];
                if bank.row != Some(p.row) {
                    return Err(wrong("the row, which is not open"));
                }
                apart(bank.activated, t.rcd, "tRCD")?;
                let latency = if reads {
                    apart(rank.any_read, t.ccd_s, "tCCD_S")?;
                    apart(rank.read[group], t.ccd_l, "tCCD_L")?;
                    apart(rank.any_written, t.cwl + t.burst + t.wtr_s, "tWTR_S")?;
                    apart(rank.written[group], t.cwl + t.burst + t.wtr_l, "tWTR_L")?;
                    t.cl
                } else {
                    apart(rank.any_written, t.ccd_s, "tCCD_S")?;
                    apart(rank.written[group], t.ccd_l_wr, "tCCD_L_WR")?;
                    t.cwl
                };
                // Data turn where the direction or the rank changes.
                let turns = channel.data_rank != p.rank || (!reads && rank.any_read > rank.any_written);
                let free = channel.data + if turns { cycles(t.turn) } else { 0 };
                if channel.data != NEVER && now + cycles(latency) < free {
                    return Err(wrong("the data bus"));
                }
                channel.take(command.kind, now, p, &self.profile);
            }
            Kind::Refresh => {
                if rank.open > 0 {
                    return Err(wrong("banks that are open"));
                }
                for bank in &rank.banks {
                    apart(bank.precharged, t.rp, "tRP")?;
                }
                rank.refreshed = now;
            }
        }
        Ok(())
    }
}

fn precharge(
    bank: &mut Bank,
    now: i64,
    t: &super::profile::Timing,
    wrong: &impl Fn(&str) -> ModelError,
) -> Result<(), ModelError> {
    if bank.row.take().is_none() {
        return Err(wrong("a bank that is closed"));
    }
    let rules = [
        (bank.activated, t.ras, "tRAS"),
        (bank.read, t.rtp, "tRTP"),
        (bank.written, t.cwl + t.burst + t.wr, "tWR"),
    ];
    for (before, need, rule) in rules {
        if now.saturating_sub(before) < cycles(need) {
            return Err(wrong(rule));
        }
    }
    bank.precharged = now;
    Ok(())
}

fn cycles(time: u64) -> i64 {
    i64::try_from(time).unwrap_or(i64::MAX / 4)
}
