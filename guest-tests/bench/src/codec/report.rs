//! What a comparison tells: JSON for programs, a table for people.

use std::fmt::Write;

use comfy_table::CellAlignment;
use indicatif::BinaryBytes;
use lamina_codec::{
    BLOCK_BYTES,
    format::Format,
    internals::{PlaneKernel, TreeKernel},
    kv::KvLayout,
};
use serde::{Deserialize, Serialize};

use super::{
    Timed, bytes_per_second,
    mxfp4::Expanded,
    ours::{BATCH, SPLIT_JOIN},
};
use crate::{median, table};

/// All tables.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// What the processor has of what the device's kernels and the peers use.
    pub cpu_flags: Vec<String>,
    /// The kernels that the device's codecs chose: transpose and plane tree.
    pub kernels: Vec<String>,
    /// How long the device's codecs, and each peer's, were measured for a table.
    pub seconds: f64,
    /// One for each file and format, and for each side of a KV cache.
    pub tables: Vec<Table>,
    /// What has no table.
    pub absent: Vec<Absent>,
}

/// A file that could not be had.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Absent {
    /// Its name.
    pub file: String,
    /// Why.
    pub why: String,
}

/// What was measured on the same bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// The file's name.
    pub file: String,
    /// The format.
    pub format: Format,
    /// Of a KV cache: which part of it.
    pub cache: Option<CacheOf>,
    /// Bytes that were coded.
    pub bytes: u64,
    /// Bytes of this kind in the file, in whole blocks.
    pub of_bytes: u64,
    /// Of elements that have scales: how fast both become bf16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expanded: Vec<Expanded>,
    /// The codecs.
    pub rows: Vec<Row>,
}

/// A part of a KV cache.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CacheOf {
    /// `k`, `v`, or `kv` where no name tells.
    pub side: String,
    /// As it was told.
    pub layout: KvLayout,
}

/// A codec.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Its name.
    pub codec: String,
    /// Package and version of a peer.
    pub version: Option<String>,
    /// What came of it.
    #[serde(flatten)]
    pub outcome: Outcome,
}

/// What came of a codec, or of a peer with several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum Outcome<M = Measured> {
    /// It was measured.
    Measured(M),
    /// It is not there.
    NotInstalled {
        /// Why.
        why: String,
    },
    /// It does not know the format.
    NotApplicable {
        /// Which.
        why: String,
    },
    /// It gave an error, or other bytes back.
    Failed {
        /// What.
        why: String,
    },
}

/// What `memcpy` of batches in the second-level cache does, in bytes per second, timed where codecs
/// are: behind one pass over the batch, as they encode, and behind two more, as they decode.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Copying {
    /// In the turn of encoding.
    pub encode: f64,
    /// In the turn of decoding.
    pub decode: f64,
}

/// Numbers; speeds are of uncompressed bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Bytes to stored bytes, or none if nothing is stored.
    pub ratio: Option<f64>,
    /// GB/s of coding.
    pub encode_gbs: f64,
    /// The same to [`Copying::encode`].
    pub encode_of_memcpy: f64,
    /// GB/s of decoding.
    pub decode_gbs: f64,
    /// The same to [`Copying::decode`].
    pub decode_of_memcpy: f64,
    /// Microseconds of decoding the unit that has a certain 4 KiB.
    pub read_us: f64,
    /// Bytes of that unit.
    pub unit_bytes: u64,
    /// Of these microseconds, the call alone, for what is called from Python.
    pub call_us: Option<f64>,
}

impl Measured {
    /// From what was timed on `bytes`.
    pub fn new(timed: &Timed, bytes: u64, memcpy: Copying, call_seconds: Option<f64>) -> Self {
        let (encode, decode) =
            (bytes_per_second(bytes, &timed.encode), bytes_per_second(bytes, &timed.decode));
        #[expect(clippy::cast_precision_loss, reason = "a ratio to be looked at")]
        let ratio = (timed.stored_bytes > 0).then(|| bytes as f64 / timed.stored_bytes as f64);
        Self {
            ratio,
            encode_gbs: encode / 1e9,
            encode_of_memcpy: encode / memcpy.encode,
            decode_gbs: decode / 1e9,
            decode_of_memcpy: decode / memcpy.decode,
            read_us: median(timed.read.clone()) * 1e6,
            unit_bytes: timed.unit_bytes,
            call_us: call_seconds.map(|seconds| seconds * 1e6),
        }
    }
}

impl Report {
    /// Of `tables` that each side had `time` for, and of what has none.
    pub fn new(time: std::time::Duration, tables: Vec<Table>, absent: Vec<Absent>) -> Self {
        let best = |kernels: Vec<String>| kernels.into_iter().next_back().unwrap_or_default();
        let kernels = vec![
            best(PlaneKernel::available().iter().map(|kernel| format!("{kernel:?}")).collect()),
            best(TreeKernel::available().iter().map(|kernel| format!("{kernel:?}")).collect()),
        ];
        Self { cpu_flags: cpu_flags(), kernels, seconds: time.as_secs_f64(), tables, absent }
    }

    /// The files that have no table, and the codecs that have no numbers in some table though they
    /// know its format.
    pub fn lacking(&self) -> Vec<&str> {
        let mut lacking: Vec<_> = self.absent.iter().map(|absent| absent.file.as_str()).collect();
        for row in self.tables.iter().flat_map(|table| &table.rows) {
            let lacks = matches!(row.outcome, Outcome::NotInstalled { .. } | Outcome::Failed { .. });
            if lacks && !lacking.contains(&row.codec.as_str()) {
                lacking.push(&row.codec);
            }
        }
        lacking
    }

    /// The tables for a person.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for table in &self.tables {
            let Table { file, format, cache, bytes, of_bytes, .. } = table;
            let cache = cache.as_ref().map_or(String::new(), |CacheOf { side, layout }| {
                format!(", {} of {layout}", side.to_uppercase())
            });
            let of =
                if bytes == of_bytes { String::new() } else { format!(" of {}", BinaryBytes(*of_bytes)) };
            let blocks = bytes / BLOCK_BYTES as u64;
            let _ = writeln!(
                text,
                "{file}, {format}{cache}: {}{of} in {blocks} blocks; one thread; {}; kernels {}\n{}\n{}",
                BinaryBytes(*bytes),
                self.cpu_flags.join(" "),
                self.kernels.join(", "),
                table.to_text(),
                table.notes()
            );
        }
        for Absent { file, why } in &self.absent {
            let _ = writeln!(text, "{file}: not fetched: {why}");
        }
        text
    }
}

impl Table {
    fn to_text(&self) -> comfy_table::Table {
        let head = [
            "codec",
            "ratio",
            "encode GB/s",
            "of memcpy",
            "decode GB/s",
            "of memcpy",
            "4 KiB µs",
            "decoded for it",
        ];
        let mut out = table(&head);
        if let Some(last) = out.column_mut(head.len() - 1) {
            last.set_cell_alignment(CellAlignment::Left);
        }
        for row in &self.rows {
            let Row { codec, outcome, .. } = row;
            let without = |what: &str, why: &str| {
                let mut cells = vec![codec.clone()];
                cells.resize(head.len() - 1, "–".to_owned());
                cells.push(format!("{what}: {why}"));
                cells
            };
            out.add_row(match outcome {
                Outcome::NotInstalled { why } => without("not installed", why),
                Outcome::NotApplicable { why } => without("not applicable", why),
                Outcome::Failed { why } => without("failed", why),
                Outcome::Measured(measured) => vec![
                    codec.clone(),
                    measured.ratio.map_or_else(|| "∞".to_owned(), |ratio| format!("{ratio:.3}")),
                    format!("{:.2}", measured.encode_gbs),
                    format!("{:.3}", measured.encode_of_memcpy),
                    format!("{:.2}", measured.decode_gbs),
                    format!("{:.3}", measured.decode_of_memcpy),
                    format!("{:.2}", measured.read_us),
                    BinaryBytes(measured.unit_bytes).to_string(),
                ],
            });
        }
        out
    }

    /// What has to be known to read the table.
    fn notes(&self) -> String {
        let mut notes = format!(
            "memcpy, lamina and words: batches of {BATCH} blocks in the second-level cache; the others: everything in one call, processor time.\n\
             of memcpy: of its own row; it is timed where codecs are, to encode behind one pass over a batch, to decode behind two more.\n\
             words: each block's words by lz4 or zstd. Ratios of lamina and words are without index entries (64 bytes a block).\n\
             4 KiB: the time to read one block; where a codec has to decode more for it, the time of that. lamina and words first copy its \
             bundle out of the store.\n"
        );
        if self.cache.is_some() {
            notes += "kv: windows coded and decoded whole, as the device does it; ratios count bases and all else but index entries.\n";
        }
        if self.rows.iter().any(|row| row.codec == SPLIT_JOIN) {
            let _ = writeln!(notes, "{SPLIT_JOIN}: planes alone, nothing coded or checked.");
        }
        if !self.expanded.is_empty() {
            notes += "elements and scales to bf16, of the memcpy that moves as many bytes (half of those read and written):";
            for (at, Expanded { name, gbs, of_memcpy }) in self.expanded.iter().enumerate() {
                let comma = if at > 0 { "," } else { "" };
                let _ = write!(notes, "{comma} {name} {gbs:.2} GB/s of bf16 ({of_memcpy:.3})");
            }
            notes += ".\n";
        }
        let mut calls: Vec<(f64, Vec<&str>)> = Vec::new();
        let mut versions: Vec<&str> = Vec::new();
        for row in &self.rows {
            if let Some(version) = row.version.as_deref()
                && !versions.contains(&version)
            {
                versions.push(version);
                if let Outcome::Measured(Measured { call_us: Some(call), .. }) = row.outcome {
                    match calls.iter_mut().find(|(other, _)| format!("{other:.2}") == format!("{call:.2}")) {
                        Some((_, peers)) => peers.push(version),
                        None => calls.push((call, vec![version])),
                    }
                }
            }
        }
        if !calls.is_empty() {
            let calls: Vec<_> =
                calls.iter().map(|(call, peers)| format!("{call:.2} µs ({})", peers.join(", "))).collect();
            let _ = writeln!(
                notes,
                "Peers are called from Python; of each of their times, a call that does nothing takes {}.",
                calls.join(", ")
            );
        }
        notes
    }
}

/// What this processor has of the extensions that codecs use.
fn cpu_flags() -> Vec<String> {
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! flags {
            ($($flag:tt),*) => {
                [$(($flag, std::arch::is_x86_feature_detected!($flag))),*]
            };
        }
        let flags =
            flags!("avx2", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512vbmi2", "gfni");
        flags.into_iter().filter(|(_, here)| *here).map(|(flag, _)| flag.to_owned()).collect()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        vec![std::env::consts::ARCH.to_owned()]
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use serde_json::{Value, json};

    use super::*;

    fn measured(call_us: Option<f64>) -> Outcome {
        Outcome::Measured(Measured {
            ratio: Some(1.5),
            encode_gbs: 8.0,
            encode_of_memcpy: 0.125,
            decode_gbs: 10.25,
            decode_of_memcpy: 0.25,
            read_us: 0.5,
            unit_bytes: 4096,
            call_us,
        })
    }

    fn report() -> Report {
        let row = |codec: &str, version: Option<&str>, outcome| Row {
            codec: codec.to_owned(),
            version: version.map(str::to_owned),
            outcome,
        };
        let table = Table {
            file: "some.safetensors".to_owned(),
            format: Format::Bf16,
            cache: None,
            bytes: 1 << 20,
            of_bytes: 1 << 24,
            expanded: Vec::new(),
            rows: vec![
                row("lamina tree", None, measured(None)),
                row("bitshuffle", Some("bitshuffle 1.2"), measured(Some(0.31))),
                row("bitshuffle + lz4", Some("bitshuffle 1.2"), measured(Some(0.31))),
                row("ZipNN", None, Outcome::NotInstalled { why: "PyPI is not reachable".to_owned() }),
                row("pcodec -8", None, Outcome::NotApplicable { why: "no such format".to_owned() }),
                row("Blosc2", None, Outcome::Failed { why: "it ended".to_owned() }),
            ],
        };
        let cache = CacheOf { side: "k".to_owned(), layout: KvLayout::rows(32, 128) };
        let keys = Table { cache: Some(cache), ..table.clone() };
        let absent = Absent { file: "far.safetensors".to_owned(), why: "PyPI is not reachable".to_owned() };
        Report::new(Duration::from_secs(6), vec![table, keys], vec![absent])
    }

    #[test]
    fn the_json_has_the_promised_shape() {
        let report = report();
        let value: Value = serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
        assert_eq!(value["seconds"], 6.0);
        assert!(value["cpu_flags"].as_array().unwrap().iter().all(Value::is_string));
        assert_eq!(value["kernels"].as_array().unwrap().len(), 2);
        let table = &value["tables"][0];
        assert_eq!(table["file"], "some.safetensors");
        assert_eq!(table["format"], "bf16");
        assert_eq!((&table["bytes"], &table["of_bytes"]), (&json!(1 << 20), &json!(1 << 24)));
        let tree = json!({
            "codec": "lamina tree", "version": null, "state": "measured", "ratio": 1.5, "encode_gbs": 8.0, "encode_of_memcpy": 0.125,
            "decode_gbs": 10.25, "decode_of_memcpy": 0.25, "read_us": 0.5, "unit_bytes": 4096, "call_us": null
        });
        assert_eq!(table["rows"][0], tree);
        let zipnn = json!({ "codec": "ZipNN", "version": null, "state": "not_installed", "why": "PyPI is not reachable" });
        assert_eq!(table["rows"][3], zipnn);
        assert_eq!(table["cache"], Value::Null);
        let layout = json!({ "channels": 32, "window": 128 });
        assert_eq!(value["tables"][1]["cache"], json!({ "side": "k", "layout": layout }));
        let absent = json!([{ "file": "far.safetensors", "why": "PyPI is not reachable" }]);
        assert_eq!(value["absent"], absent);
        assert_eq!(table["rows"][4]["state"], "not_applicable");
        assert_eq!(table["rows"][5]["state"], "failed");
        assert_eq!(serde_json::from_value::<Report>(value).unwrap(), report);
    }

    #[test]
    fn what_lacks_is_said_once_and_an_unknown_format_is_no_lack() {
        assert_eq!(report().lacking(), ["far.safetensors", "ZipNN", "Blosc2"]);
    }

    #[test]
    fn the_table_has_numbers_or_the_reason_in_each_row_and_says_what_a_call_takes() {
        let text = report().to_text();
        let line = |start: &str| text.lines().find(|line| line.trim().starts_with(start)).unwrap();
        assert!(line("some.safetensors, bf16").contains("1.00 MiB of 16.00 MiB in 256 blocks"), "{text}");
        let cells: Vec<_> = line("lamina tree").split_whitespace().collect();
        assert_eq!(
            cells,
            ["lamina", "tree", "1.500", "8.00", "0.125", "10.25", "0.250", "0.50", "4.00", "KiB"]
        );
        assert!(line("ZipNN").contains("not installed: PyPI is not reachable"), "{text}");
        assert!(line("pcodec").contains("not applicable: no such format"), "{text}");
        assert!(line("Blosc2").contains("failed: it ended"), "{text}");
        assert!(line("far.safetensors").ends_with("not fetched: PyPI is not reachable"), "{text}");
        let keys = "some.safetensors, bf16, K of 32 channels, windows of 128 tokens: 1.00 MiB";
        assert_eq!(text.lines().filter(|line| line.starts_with(keys)).count(), 1, "{text}");
        assert_eq!(text.lines().filter(|line| line.starts_with("kv: windows")).count(), 1, "{text}");
        assert!(line("Peers are called").contains("0.31 µs (bitshuffle 1.2)"), "{text}");
    }

    #[test]
    fn nothing_stored_has_no_ratio() {
        let timed = Timed {
            codec: "x".to_owned(),
            stored_bytes: 0,
            unit_bytes: 4096,
            encode: vec![1.0],
            decode: vec![2.0],
            read: vec![3.0],
        };
        let measured = Measured::new(&timed, 4096, Copying { encode: 16384.0, decode: 4096.0 }, None);
        let of_memcpy = [measured.encode_of_memcpy, measured.decode_of_memcpy];
        assert_eq!((measured.ratio, of_memcpy, measured.read_us), (None, [0.25, 0.5], 3e6));
    }
}
