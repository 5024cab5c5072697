//! DRAM behind a controller: commands, row hits, bandwidth, energy.
//!
//! * [`profile`]: geometry, timing and currents of a module.
//! * [`place`]: where lines lie, in channels, banks and rows.
//! * [`scheduler`]: FR-FCFS over queues of banks, told when each command may be issued.
//! * [`channel`]: the banks of one channel, and which command is next there.
//! * [`bank`]: a bank's row, and the bursts that wait for it.
//! * [`foresee`]: what a channel will issue while nothing comes to it.
//! * [`finishes`]: when data will be there.
//! * [`checker`]: whether each command was legal, from the times of those before it. It shares no
//!   state and no arithmetic with the scheduler, and sees every command of every run.
//! * [`energy`]: picojoules by published currents.
//!
//! Functions of a few lines are marked to be inlined over these modules: without that, a replay of
//! bundles takes a tenth longer.
//!
//! Modelled in cycles of the DRAM's clock: row activation and precharge, reads and writes with
//! their data, bank groups, the window of four activations, turns between reads and writes and
//! between ranks, refresh of all banks of a rank, the command bus. Not modelled: power-down,
//! refresh of single banks, ECC in the die, row hammer mitigation, termination, temperature.

mod bank;
mod channel;
pub mod checker;
pub mod energy;
mod finishes;
mod foresee;
pub mod place;
pub mod profile;
#[cfg(test)]
mod reference;
mod scheduler;
#[cfg(test)]
mod tests;

pub use self::energy::Energy;
pub use self::place::Place;
pub use self::profile::Profile;
pub use self::scheduler::{Access, Counts, Done, Dram, Outcome};

/// What a command does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Opens a row.
    Activate,
    /// Closes a bank's row.
    Precharge,
    /// Closes all rows of a rank.
    PrechargeAll,
    /// Reads a line.
    Read,
    /// Writes a line.
    Write,
    /// Refreshes all banks of a rank.
    Refresh,
}

/// One command on a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// When, in cycles.
    pub at: u64,
    /// What.
    pub kind: Kind,
    /// Where; of commands for a rank, only channel and rank count.
    pub place: Place,
}

/// Commands `step` cycles apart. Those of several places take turns, each a column behind its last.
/// There are more than one only of reads or writes.
#[derive(Clone, Copy, Debug)]
pub struct Commands<'a> {
    /// What each does.
    pub kind: Kind,
    /// When the first is issued.
    pub at: u64,
    /// Where the first of each turn is.
    pub places: &'a [Place],
    /// Cycles between commands.
    pub step: u64,
    /// How many.
    pub count: u32,
}

impl Commands<'_> {
    /// The command of that number.
    pub fn get(&self, number: u32) -> Command {
        let turns = u32::try_from(self.places.len()).unwrap_or(u32::MAX).max(1);
        let mut place = self.places.get((number % turns) as usize).copied().unwrap_or_default();
        place.column = place.column.saturating_add(number / turns);
        let at = self.at.saturating_add(self.step.saturating_mul(number.into()));
        Command { at, kind: self.kind, place }
    }
}
