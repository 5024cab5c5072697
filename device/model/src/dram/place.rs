//! Places of lines in a module.

use super::profile::Geometry;

/// Where a line of 64 bytes lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Place {
    /// Its channel.
    pub channel: u32,
    /// Its rank.
    pub rank: u32,
    /// Its bank group.
    pub group: u32,
    /// Its bank in the group.
    pub bank: u32,
    /// Its row.
    pub row: u32,
    /// Its line in the row.
    pub column: u32,
}

impl Geometry {
    /// Where the line of that number lies if lines go over channels first, then over bank groups:
    /// row, rank, bank, column, bank group, channel, from the most significant on. A module's
    /// lines repeat behind its end.
    pub fn by_line(&self, line: u64) -> Place {
        let mut rest = line;
        let mut take = |count: u32| digit(&mut rest, count);
        let channel = take(self.channels);
        let group = take(self.groups);
        let column = take(self.columns);
        let bank = take(self.banks);
        let rank = take(self.ranks);
        let row = take(self.rows);
        Place { channel, rank, group, bank, row, column }
    }

    /// Where the line of that number lies if whole rows go over channels first, then over bank
    /// groups: row, rank, bank, bank group, channel, column.
    pub fn by_row(&self, line: u64) -> Place {
        let mut rest = line;
        let mut take = |count: u32| digit(&mut rest, count);
        let column = take(self.columns);
        let channel = take(self.channels);
        let group = take(self.groups);
        let bank = take(self.banks);
        let rank = take(self.ranks);
        let row = take(self.rows);
        Place { channel, rank, group, bank, row, column }
    }
}

fn digit(rest: &mut u64, count: u32) -> u32 {
    let count = u64::from(count);
    // Most counts are powers of two, and a division costs as much as all else here.
    let (quotient, remainder) = if count.is_power_of_two() {
        (*rest >> count.trailing_zeros(), *rest & (count - 1))
    } else {
        (*rest / count, *rest % count)
    };
    *rest = quotient;
    u32::try_from(remainder).unwrap_or(u32::MAX)
}
