//! What a module is made of. Times are in cycles of its clock, currents in milliampere a device.

use serde::{Deserialize, Serialize};

use crate::ModelError;
use crate::number::within;

/// Channels, banks and rows.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Geometry {
    /// Channels of a module.
    pub channels: u32,
    /// Ranks of a channel.
    pub ranks: u32,
    /// Bank groups of a rank.
    pub groups: u32,
    /// Banks of a group.
    pub banks: u32,
    /// Rows of a bank.
    pub rows: u32,
    /// Lines of 64 bytes of a row, over all devices of a rank.
    pub columns: u32,
    /// Devices of a rank, with those for ECC.
    pub devices: u32,
}

/// Times, in cycles.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timing {
    /// A cycle in picoseconds.
    pub tck_ps: f64,
    /// From a read to its data.
    pub cl: u64,
    /// From a write to its data.
    pub cwl: u64,
    /// From activation to read or write.
    pub rcd: u64,
    /// From precharge to activation.
    pub rp: u64,
    /// From activation to precharge.
    pub ras: u64,
    /// Data of a line.
    pub burst: u64,
    /// Between reads, or writes, of different bank groups.
    pub ccd_s: u64,
    /// Between reads of one bank group.
    pub ccd_l: u64,
    /// Between writes of one bank group.
    pub ccd_l_wr: u64,
    /// Between activations in different bank groups.
    pub rrd_s: u64,
    /// Between activations in one bank group.
    pub rrd_l: u64,
    /// In which at most four activations of a rank are.
    pub faw: u64,
    /// From the end of a write's data to a read of another bank group.
    pub wtr_s: u64,
    /// From the end of a write's data to a read of its bank group.
    pub wtr_l: u64,
    /// From the end of a write's data to precharge.
    pub wr: u64,
    /// From a read to precharge.
    pub rtp: u64,
    /// Of a refresh.
    pub rfc: u64,
    /// Between refreshes.
    pub refi: u64,
    /// Between data of different ranks, and when data turns.
    pub turn: u64,
}

/// Currents of a device, and what they flow at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Currents {
    /// Volts of the core.
    pub vdd: f64,
    /// Volts of the word lines.
    pub vpp: f64,
    /// One bank activated and precharged over and over.
    pub idd0: f64,
    /// All banks closed.
    pub idd2n: f64,
    /// All banks open.
    pub idd3n: f64,
    /// Reading without a pause.
    pub idd4r: f64,
    /// Writing without a pause.
    pub idd4w: f64,
    /// Refreshing without a pause.
    pub idd5b: f64,
    /// As `idd0`, at `vpp`; so are the others.
    pub ipp0: f64,
    /// All banks closed.
    pub ipp2n: f64,
    /// All banks open.
    pub ipp3n: f64,
    /// Reading.
    pub ipp4r: f64,
    /// Writing.
    pub ipp4w: f64,
    /// Refreshing.
    pub ipp5b: f64,
    /// Where they come from.
    #[serde(default)]
    pub source: String,
}

/// A module.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Its name.
    pub name: String,
    /// Channels, banks and rows.
    pub geometry: Geometry,
    /// Times.
    pub timing: Timing,
    /// Currents.
    pub currents: Currents,
}

/// Names of the modules that are known.
pub const PROFILES: [&str; 3] = ["ddr5-4800", "ddr5-5600", "ddr5-6400"];

/// Rate in MT/s, CL, RCD and RP of a speed bin, and its currents at Vdd: IDD0, 2N, 3N, 4R, 4W, 5B.
type Bin = (u32, [u64; 2], [f64; 6], [f64; 6], &'static str);

const BINS: [Bin; 3] = [
    (
        4800,
        [40, 39],
        [103.0, 92.0, 142.0, 318.0, 345.0, 277.0],
        [8.0, 6.0, 7.0, 9.0, 36.0, 28.0],
        "Micron 16Gb DDR5 SDRAM addendum, MT60B4G4 (x4), die revision A, -48B, as public derivatives of Ramulator 2 list it",
    ),
    (
        5600,
        [46, 45],
        [105.0, 92.0, 142.0, 337.0, 374.0, 277.0],
        [8.0, 6.0, 7.0, 9.0, 36.0, 28.0],
        "Micron 16Gb DDR5 SDRAM addendum, die revision A, -56B, as public derivatives of Ramulator 2 list it",
    ),
    (
        6400,
        [52, 52],
        [105.0, 92.0, 142.0, 337.0, 374.0, 277.0],
        [8.0, 6.0, 7.0, 9.0, 36.0, 28.0],
        "currents of DDR5-5600: none are at hand for 6400",
    ),
];

impl Profile {
    /// The module of that name: four channels of one rank of 10 devices x4 with 16 Gb, eight of
    /// them for data, as TRACE IV-D has it. Times are JESD79-5's for the speed bin.
    ///
    /// # Errors
    /// There is none.
    pub fn named(name: &str) -> Result<Self, ModelError> {
        let bin = BINS.into_iter().find(|bin| name == format!("ddr5-{}", bin.0));
        let Some((rate, [cl, rcd], dd, pp, source)) = bin else {
            return Err(ModelError::field("dram", name, &format!("one of {}", PROFILES.join(", "))));
        };
        let tck_ps = 2e6 / f64::from(rate);
        // JEDEC's rule for DDR5: a hundredth of rounding is forgiven.
        let cycles = |ns: f64| crate::number::ceil(ns * 1000.0 / tck_ps * 0.997);
        let timing = Timing {
            tck_ps,
            cl,
            cwl: cl - 2,
            rcd,
            rp: rcd,
            ras: cycles(32.0),
            burst: 8,
            ccd_s: 8,
            ccd_l: cycles(5.0).max(8),
            ccd_l_wr: cycles(20.0).max(32),
            rrd_s: 8,
            rrd_l: cycles(5.0).max(8),
            // Of pages of 1 KiB at every bin: its time for each, 13.3, 11.4 and 10 ns, is this.
            faw: 32,
            wtr_s: cycles(2.5).max(4),
            wtr_l: cycles(10.0).max(16),
            wr: cycles(30.0),
            rtp: cycles(7.5).max(12),
            rfc: cycles(295.0),
            refi: cycles(3900.0),
            turn: 2,
        };
        Ok(Self {
            name: name.to_owned(),
            geometry: Geometry {
                channels: 4,
                ranks: 1,
                groups: 8,
                banks: 4,
                rows: 1 << 16,
                columns: 128,
                devices: 10,
            },
            timing,
            currents: Currents {
                vdd: 1.1,
                vpp: 1.8,
                idd0: dd[0],
                idd2n: dd[1],
                idd3n: dd[2],
                idd4r: dd[3],
                idd4w: dd[4],
                idd5b: dd[5],
                ipp0: pp[0],
                ipp2n: pp[1],
                ipp3n: pp[2],
                ipp4r: pp[3],
                ipp4w: pp[4],
                ipp5b: pp[5],
                source: source.to_owned(),
            },
        })
    }

    /// A module written down as TOML.
    ///
    /// # Errors
    /// What is missing or absurd, by its name.
    pub fn parse(name: &str, text: &str) -> Result<Self, ModelError> {
        let form = |why: toml::de::Error| ModelError::form(name, &why.to_string());
        let profile: Self = toml::from_str(text).map_err(form)?;
        profile.check().map_err(|why| why.within_file(name))?;
        Ok(profile)
    }

    /// Refuses what is of no use.
    ///
    /// # Errors
    /// The field that is.
    pub fn check(&self) -> Result<(), ModelError> {
        let Geometry { channels, ranks, groups, banks, rows, columns, devices } = self.geometry;
        for (field, count, most) in [
            ("channels", channels, 64),
            ("ranks", ranks, 8),
            ("groups", groups, 16),
            ("banks", banks, 16),
            ("rows", rows, 1 << 20),
            ("columns", columns, 1 << 12),
            ("devices", devices, 64),
        ] {
            within(&format!("geometry.{field}"), f64::from(count), 1.0..=f64::from(most))?;
        }
        let t = &self.timing;
        within("timing.tck_ps", t.tck_ps, 10.0..=1e5)?;
        for (field, cycles) in [
            ("cl", t.cl),
            ("cwl", t.cwl),
            ("rcd", t.rcd),
            ("rp", t.rp),
            ("ras", t.ras),
            ("burst", t.burst),
            ("ccd_s", t.ccd_s),
            ("ccd_l", t.ccd_l),
            ("ccd_l_wr", t.ccd_l_wr),
            ("rrd_s", t.rrd_s),
            ("rrd_l", t.rrd_l),
            ("faw", t.faw),
            ("wtr_s", t.wtr_s),
            ("wtr_l", t.wtr_l),
            ("wr", t.wr),
            ("rtp", t.rtp),
            ("rfc", t.rfc),
            ("refi", t.refi),
            ("turn", t.turn),
        ] {
            within(&format!("timing.{field}"), crate::number::float(cycles), 1.0..=1e6)?;
        }
        // Else a rank does nothing but refresh.
        let least = 2 * (t.rfc + t.rp + t.ras + t.rcd + t.cl + t.burst + t.wr);
        within("timing.refi", crate::number::float(t.refi), crate::number::float(least)..=1e6)?;
        // Data of one kind follow each other in the order of their commands.
        within("timing.ccd_s", crate::number::float(t.ccd_s), crate::number::float(t.burst)..=1e6)?;
        within("timing.ccd_l", crate::number::float(t.ccd_l), crate::number::float(t.ccd_s)..=1e6)?;
        within("timing.ccd_l_wr", crate::number::float(t.ccd_l_wr), crate::number::float(t.ccd_s)..=1e6)?;
        within("timing.cwl", crate::number::float(t.cwl), 1.0..=crate::number::float(t.cl))?;
        let c = &self.currents;
        within("currents.vdd", c.vdd, 0.1..=10.0)?;
        within("currents.vpp", c.vpp, 0.0..=10.0)?;
        let all = [
            ("idd0", c.idd0, c.idd2n),
            ("idd2n", c.idd2n, 0.0),
            ("idd3n", c.idd3n, c.idd2n),
            ("idd4r", c.idd4r, c.idd3n),
            ("idd4w", c.idd4w, c.idd3n),
            ("idd5b", c.idd5b, c.idd2n),
            ("ipp0", c.ipp0, c.ipp2n),
            ("ipp2n", c.ipp2n, 0.0),
            ("ipp3n", c.ipp3n, c.ipp2n),
            ("ipp4r", c.ipp4r, c.ipp3n),
            ("ipp4w", c.ipp4w, c.ipp3n),
            ("ipp5b", c.ipp5b, c.ipp2n),
        ];
        // Each by itself, before it is another's bound.
        for (field, current, _) in all {
            within(&format!("currents.{field}"), current, 0.0..=1e5)?;
        }
        for (field, current, least) in all {
            within(&format!("currents.{field}"), current, least..=1e5)?;
        }
        Ok(())
    }

    /// Bytes that a module holds.
    pub fn bytes(&self) -> u64 {
        let g = &self.geometry;
        let lines = [g.channels, g.ranks, g.groups, g.banks, g.rows, g.columns];
        lines.into_iter().map(u64::from).fold(64, u64::saturating_mul)
    }

    /// Cycles for so many nanoseconds.
    pub fn cycles(&self, ns: u64) -> u64 {
        crate::number::ceil(crate::number::float(ns) * 1000.0 / self.timing.tck_ps)
    }

    /// Nanoseconds that so many cycles take.
    pub fn ns(&self, cycles: u64) -> f64 {
        crate::number::float(cycles) * self.timing.tck_ps / 1000.0
    }

    /// The whole nanosecond that a cycle belongs to: [`Profile::cycles`] of it is this cycle, if it
    /// gave it.
    pub fn whole_ns(&self, cycle: u64) -> u64 {
        // A quotient may be a hair below what it is of.
        crate::number::ceil((self.ns(cycle) + 1e-3).floor())
    }

    /// Cycles of a read of a closed row: activation, column access and burst.
    pub fn window(&self) -> u64 {
        self.timing.rcd + self.timing.cl + self.timing.burst
    }
}
