//! What a channel will issue while nothing comes to it: reads, or writes, of rows that are open.

use super::Kind;
use super::channel::{Channel, MAX_PASSED, ROW, Want};
use super::profile::Timing;

impl Channel {
    /// Whether the burst that came last is of that bank and waits.
    #[inline]
    pub(super) fn may_join(&mut self, place: usize) -> bool {
        self.came > 0 && self.banks[place].last(self.came - 1).is_some()
    }

    /// Lets the burst that came last be followed by others of its run, if it waits still. They
    /// change nothing of what is next: they go behind one of their own row.
    #[inline]
    pub(super) fn join(&mut self, place: usize, count: u32) {
        let Some(run) = self.banks[place].last(self.came.wrapping_sub(1)) else { return };
        run.count += count;
        self.came += u64::from(count);
        if self.foreseen < self.most {
            let grown = self.most.min(self.at_hand());
            self.finishes.extend(grown - self.foreseen);
            self.foreseen = grown;
        }
    }

    /// Leaves of what is foreseen what is issued before that cycle, and says whether that is any.
    #[inline]
    pub(super) fn cut(&mut self, at: u64) -> bool {
        if self.foreseen > 0 {
            let before = at.saturating_sub(self.next.at).div_ceil(self.step);
            let left = self.foreseen.min(u32::try_from(before).unwrap_or(u32::MAX));
            self.finishes.cut(self.foreseen - left);
            (self.foreseen, self.most) = (left, 0);
        }
        self.foreseen > 0
    }

    /// When what is known of this channel ends: that of the last command that is.
    #[inline]
    pub(super) fn known_until(&self) -> u64 {
        self.command(self.foreseen.saturating_sub(1))
    }

    /// When the command of that number is issued, of those that are foreseen.
    #[inline]
    pub(super) fn command(&self, number: u32) -> u64 {
        self.next.at + self.step * u64::from(number)
    }

    /// Commands for which bursts are at hand, in the order that is foreseen.
    #[inline]
    fn at_hand(&self) -> u32 {
        let count = |place: usize| self.banks[place].queue.front().map_or(0, |run| run.count);
        let first = count(self.next.bank);
        match self.other {
            None => first,
            Some(other) => (2 * first).min(2 * count(other) + 1),
        }
    }

    /// Foresees what is issued, if it is more than one command.
    #[inline]
    pub(super) fn foresee(&mut self, t: &Timing) {
        debug_assert_eq!(self.foreseen, 0, "nothing that is foreseen is forgotten");
        (self.most, self.other) = (0, None);
        if self.next.priority < ROW {
            let bank = &self.banks[self.next.bank];
            if bank.pick == 0 && bank.queue[0].count > 1 {
                self.foresee_run(t);
            }
        }
    }

    /// Foresees reads, or writes, of the row that is open in one bank, or in two that take turns.
    ///
    /// Two of different groups do where commands of one group must be further apart. Then each
    /// time the oldest goes that is not in the group of the one before.
    fn foresee_run(&mut self, t: &Timing) {
        let first = self.wants[self.banks[self.next.bank].want];
        let (in_group, latency) =
            if first.kind == Kind::Write { (t.ccd_l_wr, t.cwl) } else { (t.ccd_l, t.cl) };
        let urgent = self.urgent().is_some();
        let is_like = |want: &Want| want.level == first.level;
        let others =
            self.wants.iter().filter(|want| want.bank != first.bank && (want.priority >= ROW || !urgent));
        // The command bus has one of these for two cycles.
        let [turns, alone] = [t.ccd_s, in_group].map(|apart| apart.max(2));
        let at = self.next.at;
        let is_ready = |want: &Want| want.ready.max(self.by_group[want.group]) <= at + turns;
        let second = others
            .clone()
            .filter(|want| is_like(want) && want.group != first.group && is_ready(want))
            .min_by_key(|want| want.priority)
            .copied();
        if let Some(second) = &second {
            let in_turn = turns < in_group && in_group <= 2 * turns;
            if !in_turn || self.banks[second.bank].pick != 0 {
                return;
            }
        }
        let step = if second.is_some() { turns } else { alone };
        // Commands before a time.
        let before = |time: u64| time.saturating_sub(at).div_ceil(step);
        let due = self.ranks.iter().map(|rank| rank.due).min().unwrap_or(0);
        let mut most = before(due);
        if self.wants.len() > 1 && !urgent {
            most = most.min(self.oldest.saturating_add(MAX_PASSED) - self.served);
        }
        for want in others {
            let permitted = self.permitted(want);
            most = most.min(match &second {
                Some(second) if want.bank == second.bank => continue,
                _ if want.priority >= ROW => before(permitted + 1),
                _ if !is_like(want) || !is_ready(want) => before(permitted),
                // It never has its turn before these.
                _ if want.priority > first.priority => continue,
                Some(second) if want.group == second.group => continue,
                Some(_) if want.group != first.group => 2,
                _ => before(permitted),
            });
        }
        (self.step, self.other) = (step, second.map(|second| second.bank));
        self.most = u32::try_from(most).unwrap_or(u32::MAX);
        self.foreseen = self.most.min(self.at_hand());
        if self.foreseen > 0 {
            self.finishes.add(at + latency + t.burst, step, self.foreseen);
        }
    }
}
