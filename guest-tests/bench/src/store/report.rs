//! What was measured.

use comfy_table::Table;
use serde::Serialize;

use crate::table;

/// Everything.
#[derive(Clone, Debug, Serialize)]
pub struct StoreReport {
    /// The codec of the devices.
    pub codec: String,
    /// Bytes of a store.
    pub bytes: u64,
    /// Rounds, of which medians are told.
    pub rounds: usize,
    /// Stores at once, of the ways that have several.
    pub threads: usize,
    /// What is stored.
    pub data: Vec<DataReport>,
    /// Each kind of data by each way.
    pub rows: Vec<StoreRow>,
}

/// A kind of data.
#[derive(Clone, Debug, Serialize)]
pub struct DataReport {
    /// Its name.
    pub data: String,
    /// Its bytes over those that the device stores for them.
    pub ratio: Option<f64>,
}

/// What was there before a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// A hole.
    First,
    /// Other bytes.
    Rewrite,
}

/// Medians of one kind of data, stored one way. Rates are bytes a second.
#[derive(Clone, Debug, Serialize)]
pub struct StoreRow {
    /// What is stored.
    pub data: String,
    /// How.
    pub way: String,
    /// Over what.
    pub phase: Phase,
    /// The device.
    pub lamina: Option<f64>,
    /// The device that tells what other devices would have moved.
    pub observed: Option<f64>,
    /// The plain device.
    pub plain: Option<f64>,
    /// A file in tmpfs; null where its kernel has no `O_DIRECT` there.
    pub tmpfs: Option<f64>,
    /// The device, of the plain one's.
    pub of_plain: Option<f64>,
    /// The device, of tmpfs's.
    pub of_tmpfs: Option<f64>,
}

impl StoreRow {
    pub(super) fn new(data: &str, way: String, phase: Phase, rates: [Option<f64>; 4]) -> Self {
        let [lamina, observed, plain, tmpfs] = rates;
        let of = |whole: Option<f64>| Some(lamina? / whole?);
        let (of_plain, of_tmpfs) = (of(plain), of(tmpfs));
        Self { data: data.to_owned(), way, phase, lamina, observed, plain, tmpfs, of_plain, of_tmpfs }
    }
}

impl StoreReport {
    /// What is in the tables, in a line.
    pub fn title(&self) -> String {
        let ratio = |data: &DataReport| {
            let ratio = data.ratio.map_or_else(|| "–".to_owned(), |ratio| format!("{ratio:.2}"));
            format!("{} {ratio}", data.data)
        };
        format!(
            "stores of {} MiB until the device has them, codec {}, medians of {}; GB/s, and of the plain device's and tmpfs's; stored at a ratio of {}",
            self.bytes >> 20,
            self.codec,
            self.rounds,
            self.data.iter().map(ratio).collect::<Vec<_>>().join(", "),
        )
    }

    /// The tables for a person.
    pub fn to_text(&self) -> String {
        format!(
            "{}\n\nfirst stores, into holes\n{}\n\nrewrites\n{}",
            self.title(),
            self.to_table(Phase::First),
            self.to_table(Phase::Rewrite)
        )
    }

    fn to_table(&self, phase: Phase) -> Table {
        let mut out = table(&["data", "by", "lamina", "observed", "plain", "tmpfs", "of plain", "of tmpfs"]);
        for row in self.rows.iter().filter(|row| row.phase == phase) {
            let number = |figure: Option<f64>, unit: f64| {
                figure.map_or_else(|| "–".to_owned(), |figure| format!("{:.2}", figure / unit))
            };
            let gbs = |rate| number(rate, 1e9);
            out.add_row([
                row.data.clone(),
                row.way.clone(),
                gbs(row.lamina),
                gbs(row.observed),
                gbs(row.plain),
                gbs(row.tmpfs),
                number(row.of_plain, 1.0),
                number(row.of_tmpfs, 1.0),
            ]);
        }
        out
    }
}
