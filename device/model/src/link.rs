//! CXL.mem on a PCIe link: messages, flits and how busy the link is.
//!
//! Sources: the CXL specification 3.1, chapter 4 (slots and flits), and PCIe 5.0 and 6.0 (rates).
//! * A flit of 68 bytes has a slot for headers and three for headers or data, 16 bytes each. A flit
//!   of data only has four. PCIe 5.0 codes 128 bits in 130.
//! * A flit of 256 bytes has a slot of 14 bytes for headers and 14 slots for headers or data. Its
//!   checks are in the flit.
//! * Host to device, a slot holds one header: a read request, or a write's. A write's header is
//!   followed by four slots of data, and one of byte enables if it stores a part of a line.
//! * Device to host, a slot holds two headers: of a read's data, which four slots follow, or of a
//!   write's completion. Formats with three are left out.
//!
//! Not modelled: credits and acknowledgements (they ride in headers), retries, CXL.io beside it.

use serde::{Deserialize, Serialize};

use crate::ModelError;
use crate::number::{float, within};

/// Which flits a link sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Flit {
    /// 68 bytes, up to PCIe 5.0.
    #[serde(rename = "68")]
    B68,
    /// 256 bytes, from PCIe 6.0 on.
    #[serde(rename = "256")]
    B256,
}

impl Flit {
    /// Its bytes on the wire.
    pub fn bytes(self) -> u64 {
        match self {
            Self::B68 => 68,
            Self::B256 => 256,
        }
    }

    /// Flits for so many headers, of which a slot holds `a_slot`, and slots of data.
    fn count(self, headers: u64, a_slot: u64, data: u64) -> u64 {
        // Slots beside the header's.
        let others = match self {
            Self::B68 => 3,
            Self::B256 => 14,
        };
        let heads = headers.div_ceil(a_slot);
        if self == Self::B68 && others * heads < data {
            // Headers fit into headers' slots, and what data is left goes into flits of data only.
            return heads + (data - others * heads).div_ceil(others + 1);
        }
        (heads + data).div_ceil(others + 1).max(data.div_ceil(others))
    }
}

/// A link.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Link {
    /// Its name.
    pub name: String,
    /// Its flits.
    pub flit: Flit,
    /// Bytes a second in one direction, after coding.
    pub rate: f64,
    /// Nanoseconds that it adds to a load.
    pub latency_ns: f64,
    /// Where these come from.
    pub source: &'static str,
}

/// Where a rate comes from, with a latency that is not ours.
const GIVEN: &str = "PCIe 5.0 and 6.0; latency: given";

/// What a link adds to a load: Pond (ASPLOS 2023, section 2) has 70 ns for a device that is
/// attached directly, ports and controller without DRAM.
pub const LATENCY_NS: f64 = 70.0;

/// Names of the links that are known.
pub const LINKS: [&str; 4] = ["gen5x8", "gen5x16", "gen6x8", "gen6x16"];

impl Link {
    /// The link of that name, `gen5x16` for example.
    ///
    /// # Errors
    /// There is none.
    pub fn named(name: &str) -> Result<Self, ModelError> {
        let (flit, a_lane) = match name.split_once('x') {
            Some(("gen5", "8" | "16")) => (Flit::B68, 4e9 * 128.0 / 130.0),
            Some(("gen6", "8" | "16")) => (Flit::B256, 8e9),
            _ => return Err(ModelError::field("link", name, &format!("one of {}", LINKS.join(", ")))),
        };
        let lanes = if name.ends_with("x16") { 16.0 } else { 8.0 };
        let source = "PCIe 5.0 and 6.0; latency: Pond, ASPLOS 2023, section 2";
        Ok(Self { name: name.to_owned(), flit, rate: a_lane * lanes, latency_ns: LATENCY_NS, source })
    }

    /// The same with another latency.
    #[must_use]
    pub fn with_latency(self, latency_ns: f64) -> Self {
        Self { latency_ns, source: GIVEN, ..self }
    }

    /// Refuses what is of no use.
    ///
    /// # Errors
    /// The field that is.
    pub fn check(&self) -> Result<(), ModelError> {
        within("link-latency", self.latency_ns, 0.0..=1e6)?;
        within("link rate", self.rate, 1e6..=1e15)?;
        Ok(())
    }
}

/// Requests of lines of 64 bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Requests {
    /// Lines read.
    pub reads: u64,
    /// Lines written whole.
    pub writes: u64,
    /// Lines written in part.
    pub partial_writes: u64,
}

impl Requests {
    /// Adds the lines that `length` bytes from `at` touch.
    pub fn add(&mut self, at: u64, length: u64, write: bool) {
        let Some(last) = (at.checked_add(length)).filter(|_| length > 0) else { return };
        let lines = last.div_ceil(64) - at / 64;
        if write {
            let whole = (last / 64).saturating_sub(at.div_ceil(64));
            self.writes += whole;
            self.partial_writes += lines - whole;
        } else {
            self.reads += lines;
        }
    }
}

/// One direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Direction {
    /// Requests and responses.
    pub messages: u64,
    /// Bytes of lines.
    pub data_bytes: u64,
    /// Flits.
    pub flits: u64,
    /// Bytes on the wire.
    pub bytes: u64,
    /// Lines' bytes over the wire's; null while there are none.
    pub efficiency: Option<f64>,
    /// Seconds that it takes at least.
    pub busy_seconds: f64,
    /// The part of the elapsed time that it was busy; null if none elapsed.
    pub utilisation: Option<f64>,
}

/// Both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Traffic {
    /// What was asked for.
    pub requests: Requests,
    /// Host to device.
    pub down: Direction,
    /// Device to host.
    pub up: Direction,
}

impl Link {
    /// What these requests put on the link, in `seconds` if that is known.
    pub fn carry(&self, requests: Requests, seconds: Option<f64>) -> Traffic {
        let Requests { reads, writes, partial_writes } = requests;
        let written = writes + partial_writes;
        let direction = |messages: u64, a_slot: u64, lines: u64, enables: u64| {
            let flits = self.flit.count(messages, a_slot, 4 * lines + enables);
            let bytes = flits * self.flit.bytes();
            let busy_seconds = float(bytes) / self.rate;
            Direction {
                messages,
                data_bytes: 64 * lines,
                flits,
                bytes,
                efficiency: (bytes > 0).then(|| float(64 * lines) / float(bytes)),
                busy_seconds,
                utilisation: seconds.filter(|seconds| *seconds > 0.0).map(|seconds| busy_seconds / seconds),
            }
        };
        Traffic {
            requests,
            down: direction(reads + written, 1, written, partial_writes),
            up: direction(reads + written, 2, reads, 0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn carry(link: &str, reads: u64, writes: u64) -> Traffic {
        let requests = Requests { reads, writes, partial_writes: 0 };
        Link::named(link).unwrap().carry(requests, Some(1.0))
    }

    /// By hand: eight reads are eight requests, four to a flit. Their data is 32 slots and four
    /// slots of headers: four flits with a header take 12 slots of data, five flits of data the
    /// other 20.
    #[test]
    fn reads_in_flits_of_68_bytes_are_packed_as_by_hand() {
        let traffic = carry("gen5x16", 8, 0);
        assert_eq!((traffic.down.flits, traffic.up.flits), (2, 9));
        assert_eq!(traffic.up.bytes, 9 * 68);
        assert!((traffic.up.efficiency.unwrap() - 512.0 / 612.0).abs() < 1e-12);
        assert_eq!(traffic.down.data_bytes, 0);
    }

    /// By hand: seven writes are seven headers and 28 slots of data; seven flits with a header take
    /// 21, two flits of data the other seven. Seven completions are four slots, so one flit.
    #[test]
    fn writes_in_flits_of_68_bytes_are_packed_as_by_hand() {
        let traffic = carry("gen5x8", 0, 7);
        assert_eq!((traffic.down.flits, traffic.up.flits), (9, 1));
    }

    /// By hand: seven reads are 28 slots of data and four of headers, 32 slots, and two flits have
    /// 30. Four reads are 18 slots, three are 14.
    #[test]
    fn flits_of_256_bytes_are_packed_as_by_hand() {
        assert_eq!(carry("gen6x16", 7, 0).up.flits, 3);
        assert_eq!(carry("gen6x16", 7, 0).down.flits, 1);
        assert_eq!(carry("gen6x16", 4, 0).up.flits, 2);
        assert_eq!(carry("gen6x16", 3, 0).up.flits, 1);
    }

    #[test]
    fn more_traffic_is_never_fewer_flits_and_all_of_it_fits() {
        for link in LINKS {
            let slots = if link.starts_with("gen5") { 4 } else { 15 };
            for reads in 0..40 {
                for writes in 0..40 {
                    let now = carry(link, reads, writes);
                    let fits = |flits: u64, headers: u64, data: u64| slots * flits >= headers + data;
                    assert!(fits(now.down.flits, reads + writes, 4 * writes), "{link} {reads} {writes}");
                    assert!(fits(now.up.flits, (reads + writes).div_ceil(2), 4 * reads));
                    let more = carry(link, reads + 1, writes);
                    assert!(more.down.flits >= now.down.flits && more.up.flits >= now.up.flits);
                }
            }
        }
    }

    #[test]
    fn a_packed_view_carries_less_and_a_padded_one_as_much_as_full() {
        let link = Link::named("gen5x16").unwrap();
        let lines = |bytes: u64| {
            let mut requests = Requests::default();
            requests.add(0, bytes, false);
            link.carry(requests, None).up.data_bytes
        };
        assert_eq!(lines(1 << 20), 1 << 20);
        assert_eq!(lines((1 << 20) / 16 * 12), (1 << 20) / 16 * 12);
        let mut requests = Requests::default();
        requests.add(60, 8, false);
        requests.add(0, 0, false);
        requests.add(u64::MAX, 2, false);
        assert_eq!(requests.reads, 2);
        requests.add(60, 72, true);
        assert_eq!((requests.writes, requests.partial_writes), (1, 2));
    }

    #[test]
    fn rates_are_those_of_the_lanes() {
        let rate = |name: &str| Link::named(name).unwrap().rate;
        assert!((rate("gen5x16") - 63.015e9).abs() < 1e6 && (rate("gen6x16") - 128e9).abs() < 1.0);
        let traffic = carry("gen5x8", 1_000_000, 0);
        assert!((traffic.up.busy_seconds - traffic.up.utilisation.unwrap()).abs() < 1e-12);
        for wrong in ["gen4x16", "gen5x4", "gen5", "x16"] {
            assert!(Link::named(wrong).unwrap_err().to_string().contains("link"), "{wrong}");
        }
        for absurd in [-1.0, f64::NAN, 1e9] {
            let link = Link::named("gen5x8").unwrap().with_latency(absurd);
            assert!(link.check().unwrap_err().to_string().contains("link-latency"));
        }
    }
}
