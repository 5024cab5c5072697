//! One trace through several designs: bytes, fills, link, activations, energy and latency of the
//! same work.
//!
//! What each design does with a request, block by block:
//! * `plain` moves the lines that are asked for. It reads a line that is written in part. Lines
//!   that follow each other lie in all channels and bank groups.
//! * `plain-rows` moves the same lines, and a block's lie in a row, as a bundle does. What it and
//!   `plain` differ in is placement; what it and `gcomp` or `trace` differ in is not.
//! * `gcomp` looks for the block's index entry, and moves all of the coded block.
//! * `trace` looks for the entry, and moves the planes that the view wants: with
//!   [`Placement::Bundles`] out of one bundle, with [`Placement::Planes`] from rows in which each
//!   plane of many blocks lies (TRACE, Fig. 10), each plane at a place of its own, whole granules
//!   each.
//!
//! Taken to be so for both that code:
//! * The last few decoded blocks stay in a buffer, so that lines of one block which follow each
//!   other are one fill. The paper has staging memory and does not say how much of it reads may
//!   use.
//! * Each store of a block codes it, and writes its entry. One in part reads it first.
//! * A miss of the index reads 64 bytes more, in front of the block in latency.
//! * Blocks of which the trace says nothing have [`Assumed`] ratios, and are counted.
//!
//! What was recorded of a device says besides whether it fetched a block or had its words at hand,
//! and where the bundle lies. Then `trace` and `gcomp` do the same, and no buffer is modelled. If
//! it measured what blocks take as words, `gcomp` moves that.

mod layout;
mod run;
#[cfg(test)]
mod tests;

use std::io::Read;

use serde::Serialize;

pub use self::run::Run;
use crate::controller::{CacheConfig, Design};
use crate::dram::{Counts, Energy, Profile};
use crate::link::{Link, Traffic};
use crate::number::within;
use crate::trace::text::LineAccess;
use crate::trace::{BLOCK_BYTES, Block, Blocks, Header, Item, Reader, Request, View, WordBytes};
use crate::{ModelError, Summary};

/// By what `gcomp` codes words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum WordCodec {
    /// LZ4.
    Lz4,
    /// ZSTD.
    Zstd,
}

/// Where stored bytes lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Placement {
    /// Lines at their addresses, over all channels and bank groups.
    Words,
    /// A block's lines together, within rows, and blocks as bundles lie.
    Rows,
    /// A block's bytes together, within rows.
    Bundles,
    /// A plane of many blocks together in a row: as many rows as planes.
    Planes,
}

/// A design that a trace is replayed through.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Subject {
    /// Its name in reports.
    pub name: &'static str,
    /// What it is.
    pub design: Design,
    /// Its codec, of `gcomp`.
    pub codec: Option<WordCodec>,
    /// Where it puts bytes.
    pub placement: Placement,
}

/// All subjects, in the order of reports.
pub const SUBJECTS: [Subject; 6] = [
    Subject { name: "plain", design: Design::Plain, codec: None, placement: Placement::Words },
    Subject { name: "plain-rows", design: Design::Plain, codec: None, placement: Placement::Rows },
    Subject {
        name: "gcomp-lz4",
        design: Design::Gcomp,
        codec: Some(WordCodec::Lz4),
        placement: Placement::Bundles,
    },
    Subject {
        name: "gcomp-zstd",
        design: Design::Gcomp,
        codec: Some(WordCodec::Zstd),
        placement: Placement::Bundles,
    },
    Subject { name: "trace", design: Design::Trace, codec: None, placement: Placement::Bundles },
    Subject { name: "trace-planes", design: Design::Trace, codec: None, placement: Placement::Planes },
];

impl Subject {
    /// The subject of that name.
    ///
    /// # Errors
    /// There is none.
    pub fn named(name: &str) -> Result<Self, ModelError> {
        let names = || SUBJECTS.map(|subject| subject.name).join(", ");
        let found = SUBJECTS.into_iter().find(|subject| subject.name == name);
        found.ok_or_else(|| ModelError::field("design", name, &format!("one of {}", names())))
    }
}

/// Ratios of blocks of which a trace says nothing.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Assumed {
    /// Bits of an element.
    pub bits: u32,
    /// Of words by lz4.
    pub lz4: f64,
    /// Of words by zstd.
    pub zstd: f64,
    /// Of planes; all of it is in the exponent.
    pub trace: f64,
    /// Where these come from.
    pub source: &'static str,
}

impl Default for Assumed {
    fn default() -> Self {
        let source = "bf16 weights of Llama 3.1 8B: TRACE, Tables I and IV";
        Self { bits: 16, lz4: 1.0, zstd: 1.259, trace: 1.34, source }
    }
}

impl Assumed {
    /// A block with these ratios: sign and mantissa as they are, the rest shared by the planes
    /// after the sign up to the half of all.
    pub fn block(&self) -> Block {
        let bytes = |ratio: f64| u16::try_from(crate::number::ceil(4096.0 / ratio)).unwrap_or(4096);
        let count = usize::try_from(self.bits).unwrap_or(16);
        let plane = u16::try_from(4096 / count).unwrap_or(256);
        let mut planes = vec![plane; count];
        let coded = &mut planes[1..=(count / 2).max(1)];
        let saved = 4096_u16.saturating_sub(bytes(self.trace));
        let each = saved / u16::try_from(coded.len()).unwrap_or(1);
        for bytes in coded {
            *bytes = bytes.saturating_sub(each);
        }
        let words = WordBytes { lz4: Some(bytes(self.lz4)), zstd: Some(bytes(self.zstd)) };
        Block { planes: planes.into(), words, ..Block::default() }
    }
}

/// When requests come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pace {
    /// As soon as a register is free.
    Full,
    /// When they were recorded.
    Recorded,
}

/// How a trace is replayed.
#[derive(Clone, Debug, Serialize)]
pub struct Options {
    /// The module; none, to leave DRAM out.
    pub dram: Option<Profile>,
    /// Bursts under way.
    pub registers: usize,
    /// The cache of index entries.
    pub cache: CacheConfig,
    /// Decoded blocks that are kept.
    pub buffer: usize,
    /// The link.
    pub link: Link,
    /// When requests come.
    pub pace: Pace,
    /// What is taken of blocks that the trace says nothing of.
    pub assumed: Assumed,
}

impl Options {
    /// The paper's module on a PCIe 5.0 x16.
    ///
    /// # Errors
    /// None: all names are known.
    pub fn usual() -> Result<Self, ModelError> {
        Ok(Self {
            dram: Some(Profile::named("ddr5-4800")?),
            registers: 64,
            cache: CacheConfig::default(),
            buffer: 8,
            link: Link::named("gen5x16")?,
            pace: Pace::Full,
            assumed: Assumed::default(),
        })
    }

    fn check(&self, header: Header) -> Result<(), ModelError> {
        self.link.check()?;
        within("buffer", crate::number::float(self.buffer as u64), 0.0..=4096.0)?;
        let Assumed { bits, lz4, zstd, trace, .. } = &self.assumed;
        if !matches!(bits, 4 | 8 | 16 | 32) {
            return Err(ModelError::field("assumed bits", bits, "4, 8, 16 or 32"));
        }
        for (field, ratio) in [("lz4", lz4), ("zstd", zstd), ("trace", trace)] {
            within(&format!("assumed {field} ratio"), *ratio, 1.0..=1.9)?;
        }
        if let Some(profile) = &self.dram {
            profile.check()?;
            if header.device_bytes > profile.bytes() {
                let must = format!("at most the module's {}: take a larger one", profile.bytes());
                return Err(ModelError::field("device bytes", &header.device_bytes, &must));
            }
        }
        Ok(())
    }
}

/// What DRAM did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DramReport {
    /// Its commands.
    pub commands: Counts,
    /// Commands that were checked: all.
    pub checked: u64,
    /// Lines that needed no activation, of all.
    pub row_hit_rate: Option<f64>,
    /// Seconds until the last data, or with [`Pace::Recorded`] until the last request was recorded
    /// if that is later.
    pub seconds: f64,
    /// Bytes moved a second, in GB/s.
    pub gbs: f64,
    /// Bytes asked for a second, in GB/s.
    pub asked_gbs: f64,
    /// Picojoules.
    pub energy: Energy,
    /// Picojoules of accesses for a byte that was asked for.
    pub access_pj_per_byte: Option<f64>,
    /// Nanoseconds from a request's first register to its last data.
    pub latency_ns: Summary,
}

/// What a link carried for a view.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ViewTraffic {
    /// The view.
    pub view: String,
    /// Bits of an element under it: views of two formats may have one name.
    pub bits: u32,
    /// Both directions.
    #[serde(flatten)]
    pub traffic: Traffic,
}

/// What a design did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Outcome {
    /// The design.
    #[serde(flatten)]
    pub subject: Subject,
    /// Requests.
    pub requests: u64,
    /// Bytes that they asked for.
    pub asked_bytes: u64,
    /// Bytes read from DRAM, without index entries.
    pub read_bytes: u64,
    /// Bytes written to DRAM, without index entries.
    pub written_bytes: u64,
    /// Bytes of index entries, read and written.
    pub index_bytes: u64,
    /// Index entries that the cache held.
    pub index_hits: u64,
    /// Those that it did not.
    pub index_misses: u64,
    /// Blocks fetched and decoded.
    pub fills: u64,
    /// Blocks that the buffer had.
    pub buffered: u64,
    /// Blocks of zeros.
    pub zeros: u64,
    /// Blocks moved of which the trace says how many bytes the design stores.
    pub measured: u64,
    /// Those of which it says only that no codec made their planes smaller, and that are taken to
    /// be stored as they are.
    pub whole: u64,
    /// Those of which it says nothing.
    pub assumed: u64,
    /// Cycles from load to use of each block that was read, DRAM idle, by the paper's stages.
    pub service_cycles: Summary,
    /// The same in nanoseconds as the host sees it, on average: with the link's latency.
    pub load_ns: Option<f64>,
    /// 99 of 100 are at most this.
    pub load_p99_ns: Option<f64>,
    /// By view.
    pub link: Vec<ViewTraffic>,
    /// What DRAM did; null without timing.
    pub dram: Option<DramReport>,
}

/// One trace through several designs.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// Always `modelled`.
    pub label: &'static str,
    /// The trace.
    pub trace: Header,
    /// Requests that its recorder lost; no design did them.
    pub lost: u64,
    /// How it was replayed.
    pub options: Options,
    /// Each design.
    pub designs: Vec<Outcome>,
}

/// Replays a trace through these designs.
///
/// # Errors
/// The trace or an option is of no use.
pub fn compare<R: Read>(
    reader: &mut Reader<R>,
    subjects: &[Subject],
    options: &Options,
) -> Result<Comparison, ModelError> {
    let header = reader.header();
    options.check(header)?;
    let mut runs =
        subjects.iter().map(|subject| Run::new(*subject, options)).collect::<Result<Vec<_>, _>>()?;
    each(reader, |views, blocks, request| {
        for run in &mut runs {
            run.request(request, &views[request.view as usize], |number| blocks.get(number));
        }
        Ok(())
    })
    .and_then(|(views, lost)| {
        let designs = runs.into_iter().map(|run| run.finish(&views)).collect::<Result<_, _>>()?;
        Ok(Comparison { label: "modelled", trace: header, lost, options: options.clone(), designs })
    })
}

/// Gives the lines that a design moves in its DRAM, for simulators of others: in their order, each
/// at the number of its request, or with [`Pace::Recorded`] at the cycle that it was recorded in.
///
/// # Errors
/// The trace or an option is of no use, or `take` fails.
pub fn lines<R: Read>(
    reader: &mut Reader<R>,
    subject: Subject,
    options: &Options,
    mut take: impl FnMut(&LineAccess) -> Result<(), ModelError>,
) -> Result<(), ModelError> {
    options.check(reader.header())?;
    let mut run = Run::exporting(subject, options)?;
    each(reader, |views, blocks, request| {
        run.request(request, &views[request.view as usize], |number| blocks.get(number));
        run.exported().try_for_each(|access| take(&access))
    })?;
    Ok(())
}

/// Requests whose blocks are looked up before the first of them is replayed: a processor waits for
/// the memory of all of them at once.
const AHEAD: usize = 32;

/// Gives each request with the views and blocks that were said before it; then the views, and how
/// many requests were lost.
fn each<R: Read>(
    reader: &mut Reader<R>,
    mut take: impl FnMut(&[View], &Blocks, &Request) -> Result<(), ModelError>,
) -> Result<(Vec<View>, u64), ModelError> {
    let (mut views, mut blocks, mut lost) = (Vec::new(), Blocks::default(), 0_u64);
    let mut waiting = Vec::with_capacity(AHEAD);
    let mut catch_up = |views: &[View], blocks: &Blocks, waiting: &mut Vec<Request>| {
        for request in &*waiting {
            blocks.look_up(request.address / BLOCK_BYTES);
        }
        waiting.drain(..).try_for_each(|request| take(views, blocks, &request))
    };
    while let Some(item) = reader.next_item()? {
        if waiting.len() == AHEAD || !matches!(item, Item::Request(_)) {
            catch_up(&views, &blocks, &mut waiting)?;
        }
        match item {
            Item::View(view) => views.push(view),
            Item::Block(number, block) => blocks.insert(number, block),
            Item::Words(number, words) => blocks.set_words(number, words),
            Item::Request(request) => waiting.push(request),
            Item::Lost(requests) => lost = lost.saturating_add(requests),
        }
    }
    catch_up(&views, &blocks, &mut waiting)?;
    Ok((views, lost))
}
