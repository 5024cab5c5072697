//! The controller: how many cycles a load takes in it, by the paper's stages (TRACE, Figs. 22 and
//! 23, Table V; 2 GHz, 7 nm).
//!
//! * Stages are front end, index, scheduler, a DRAM window (activation, column access, burst) and
//!   what of the codec is not hidden by it. Queues, link and host are outside.
//! * The paper gives 89 cycles for `trace` at a ratio of 1.5 and 85 at 3. Between and beyond, the
//!   cycles are taken to be linear in one over the ratio: how burst and codec share the four is not
//!   given.
//! * A block whose entry says that nothing is stored needs no DRAM; the paper does not speak of it.
//! * Area and power are the paper's, quoted. Nothing here computes any.

mod cache;
#[cfg(test)]
mod tests;

use serde::Serialize;

pub use self::cache::{CacheConfig, IndexCache, Policy};
use crate::number::ceil;

/// One of the paper's three devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Design {
    /// Words, no codec.
    Plain,
    /// Blocks of words, coded.
    Gcomp,
    /// Bit-planes, coded.
    Trace,
}

/// How a block is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stored {
    /// Coded; its bytes over those fetched for it.
    Coded(f64),
    /// As it is.
    Bypass,
    /// Nothing of it.
    Nothing,
}

/// Cycles of the stages of one design.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Stages {
    /// Decoding the request; of `trace`, alias and plane mask as well.
    pub front: u64,
    /// Address translation or the index, in the cache.
    pub index: u64,
    /// Arbitration.
    pub schedule: u64,
    /// Activation, column access and burst.
    pub window: u64,
}

/// The controller's clock, in GHz (TRACE, IV-E).
pub const GHZ: f64 = 2.0;

/// What the paper says of a design's silicon (TRACE, Table V): quoted, never modelled.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Quoted {
    /// The design.
    pub design: Design,
    /// Square millimetres.
    pub area_mm2: f64,
    /// Watts.
    pub power_w: f64,
    /// Cycles from load to use.
    pub cycles: u64,
    /// Where this stands.
    pub source: &'static str,
}

/// Table V.
pub const TABLE_V: [Quoted; 3] = {
    let source = "TRACE, Table V, ASAP7 7 nm, 2 GHz, 0.7 V: quoted";
    [
        Quoted { design: Design::Plain, area_mm2: 3.91, power_w: 9.0, cycles: 71, source },
        Quoted { design: Design::Gcomp, area_mm2: 6.66, power_w: 21.4, cycles: 84, source },
        Quoted { design: Design::Trace, area_mm2: 7.14, power_w: 22.4, cycles: 89, source },
    ]
};

impl Design {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Gcomp => "gcomp",
            Self::Trace => "trace",
        }
    }

    /// Its stages at the paper's settings.
    pub fn stages(self) -> Stages {
        let (front, schedule) = if self == Self::Trace { (5, 10) } else { (3, 8) };
        Stages { front, index: 2, schedule, window: 58 }
    }

    /// Cycles of the codec that the DRAM window does not hide, burst and all.
    fn exposed(self, stored: Stored) -> u64 {
        match (self, stored) {
            (Self::Plain, _) | (_, Stored::Nothing) => 0,
            // 76 cycles: the stages' 75 and one of control. `gcomp` is taken to need as much.
            (_, Stored::Bypass) => 1,
            (Self::Gcomp, Stored::Coded(_)) => 13,
            (Self::Trace, Stored::Coded(ratio)) => 6 + ceil(12.0 / ratio.max(1.0) - 1e-9),
        }
    }

    /// Cycles from load to use of a block, with its index entry in the cache or not.
    pub fn cycles(self, stored: Stored, index_hit: bool) -> u64 {
        let stages = self.stages();
        let miss = if index_hit || self == Self::Plain { 0 } else { stages.window };
        if stored == Stored::Nothing && self != Self::Plain {
            return stages.front + stages.index + miss;
        }
        stages.front + stages.index + miss + stages.schedule + stages.window + self.exposed(stored)
    }
}
