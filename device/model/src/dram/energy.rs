//! Picojoules, from currents.
//!
//! By Micron's method (TN-41-01, and DRAMPower): what a command adds to standby. Of DDR5 the
//! active standby is measured with all banks open, while `idd0` has one open. So standby is taken
//! to grow with each open bank, from `idd2n` to `idd3n`, and an activation is `idd0` less the
//! standby of one open bank.

use serde::Serialize;

use super::profile::Profile;
use super::scheduler::Counts;
use crate::number::float;

/// Picojoules, by what they went into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Energy {
    /// Activations, with their precharges.
    pub activate_pj: f64,
    /// Reads.
    pub read_pj: f64,
    /// Writes.
    pub write_pj: f64,
    /// Refreshes.
    pub refresh_pj: f64,
    /// Standby, banks open and closed.
    pub background_pj: f64,
}

/// Picojoules of one command, of all devices of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PerCommand {
    /// An activation and its precharge.
    pub activate_pj: f64,
    /// A read of 64 bytes.
    pub read_pj: f64,
    /// A write of 64 bytes.
    pub write_pj: f64,
    /// A refresh of a rank.
    pub refresh_pj: f64,
    /// Milliwatts of a rank with all banks closed.
    pub closed_mw: f64,
    /// Milliwatts more of each open bank.
    pub open_bank_mw: f64,
}

impl PerCommand {
    /// By a module's currents.
    pub fn new(profile: &Profile) -> Self {
        let (c, t, g) = (&profile.currents, &profile.timing, &profile.geometry);
        let devices = f64::from(g.devices);
        let ns = |cycles: u64| profile.ns(cycles);
        let open = |closed: f64, open: f64| (open - closed) / f64::from(g.groups * g.banks);
        let (bank_dd, bank_pp) = (open(c.idd2n, c.idd3n), open(c.ipp2n, c.ipp3n));
        let cycle = t.ras + t.rp;
        let opened = float(t.ras) / float(cycle);
        // Milliampere times volts times nanoseconds are picojoules.
        let pj = |dd: f64, pp: f64, cycles: u64| {
            devices * (dd.max(0.0) * c.vdd + pp.max(0.0) * c.vpp) * ns(cycles)
        };
        Self {
            activate_pj: pj(c.idd0 - c.idd2n - bank_dd * opened, c.ipp0 - c.ipp2n - bank_pp * opened, cycle),
            read_pj: pj(c.idd4r - c.idd3n, c.ipp4r - c.ipp3n, t.burst),
            write_pj: pj(c.idd4w - c.idd3n, c.ipp4w - c.ipp3n, t.burst),
            refresh_pj: pj(c.idd5b - c.idd2n, c.ipp5b - c.ipp2n, t.rfc),
            closed_mw: devices * (c.idd2n * c.vdd + c.ipp2n * c.vpp),
            open_bank_mw: devices * (bank_dd * c.vdd + bank_pp * c.vpp),
        }
    }
}

impl Energy {
    /// Of these commands, which took so many cycles.
    pub fn new(profile: &Profile, counts: &Counts, cycles: u64) -> Self {
        let each = PerCommand::new(profile);
        let ranks = f64::from(profile.geometry.channels * profile.geometry.ranks);
        Self {
            activate_pj: each.activate_pj * float(counts.activates),
            read_pj: each.read_pj * float(counts.reads),
            write_pj: each.write_pj * float(counts.writes),
            refresh_pj: each.refresh_pj * float(counts.refreshes),
            background_pj: each.closed_mw * ranks * profile.ns(cycles)
                + each.open_bank_mw * profile.ns(counts.open_bank_cycles),
        }
    }

    /// All of it but standby and refresh, which go on without requests.
    pub fn access_pj(&self) -> f64 {
        self.activate_pj + self.read_pj + self.write_pj
    }

    /// All of it.
    pub fn total_pj(&self) -> f64 {
        self.access_pj() + self.refresh_pj + self.background_pj
    }
}
