//! What is run for a reproduction, before anything is written about it.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use lamina_codec::Codec;
use lamina_codec::kv::KvLayout;
use lamina_device::analyze::{AnalyzeOptions, Report, analyze};
use lamina_device::load::KV_WINDOW;
use lamina_device::model::ModelFile;
use lamina_model::dram::Profile;
use lamina_model::elastic::{self, Beside};
use lamina_model::system::Ratios;

use super::decoded::Decoded;
use super::designs::{self, Design};
use super::llama::Llama;
use crate::args::Reproduce;
use crate::log;
use crate::meter::Meter;

/// Checkpoints, as the device would store them.
pub(super) struct Weights {
    /// Their files.
    pub(super) names: String,
    pub(super) report: Report,
}

/// KV caches, coded in two ways.
pub(super) struct Caches {
    /// Their files.
    pub(super) names: String,
    pub(super) layout: KvLayout,
    /// By windows, channel by channel.
    pub(super) report: Report,
    /// As weights: bit-planes of tokens in order.
    pub(super) planes: Report,
}

/// All that was run.
pub(super) struct Found {
    pub(super) weights: Option<Weights>,
    pub(super) caches: Option<Caches>,
    pub(super) decoded: Option<Decoded>,
    pub(super) llama: Option<Llama>,
    pub(super) designs: Vec<Design>,
    pub(super) profile: Profile,
    pub(super) elastic: Vec<Beside>,
}

/// Says what is done, and at the end how long it took.
fn step<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    log::say(&format!("reproduce: {what}"));
    let begun = Instant::now();
    let done = work().with_context(|| what.to_owned())?;
    log::say(&format!("reproduce: {what}: {:.1} s", begun.elapsed().as_secs_f64()));
    Ok(done)
}

impl Found {
    /// Runs all of it. What can be refused is refused before anything takes long.
    pub(super) fn new(args: &Reproduce) -> Result<Self> {
        let (weights, caches) = if args.model.is_empty() && args.cache.is_empty() {
            bundled()
        } else {
            (args.model.clone(), args.cache.clone())
        };
        let spread = |path: &PathBuf| ModelFile::open(path).map(ModelFile::spread);
        let open = |paths: &[PathBuf]| paths.iter().map(spread).collect::<Result<Vec<_>, _>>();
        let (weight_files, cache_files) = (open(&weights)?, open(&caches)?);
        let layout = (!cache_files.is_empty()).then(|| layout(args.kv, &cache_files)).transpose()?;
        let decoded = args.decode.as_deref().map(Decoded::read).transpose()?;
        let llama = args.llama.as_deref().map(Llama::read).transpose()?;
        let profile = Profile::named(&args.dram)?;
        let weights = (!weight_files.is_empty()).then(|| {
            let options = AnalyzeOptions::default();
            let report = step("coding the weights", || analysed(&weight_files, &options))?;
            Ok::<_, anyhow::Error>(Weights { names: names(&weights), report })
        });
        let caches = layout.map(|layout| {
            let options = AnalyzeOptions { kv: Some(layout), ..AnalyzeOptions::default() };
            let report = step(
                "coding the KV cache by \
                windows",
                || analysed(&cache_files, &options),
            )?;
            let options = AnalyzeOptions { codecs: vec![Codec::Lz4, Codec::Zstd], kv: None };
            let planes = step("coding the KV cache by planes only", || analysed(&cache_files, &options))?;
            Ok::<_, anyhow::Error>(Caches { names: names(&caches), layout, report, planes })
        });
        Ok(Self {
            weights: weights.transpose()?,
            caches: caches.transpose()?,
            decoded,
            llama,
            designs: step("three devices on the same bytes", designs::run)?,
            elastic: step("reading weights by planes and by words in the DRAM model", || {
                Ok(elastic::beside(&profile)?)
            })?,
            profile,
        })
    }

    /// Ratios of the designs on the files at hand, and what of the paper's stands in for what is
    /// missing; none if there is neither.
    pub(super) fn ratios(&self) -> Option<[Ratios; 3]> {
        if self.weights.is_none() && self.caches.is_none() {
            return None;
        }
        let mut ratios = Ratios::paper(16.0);
        let mut sources = Vec::new();
        if let Some(caches) = &self.caches {
            let total = &caches.report.total;
            ratios[1].kv = total.word_major.get("zstd").copied().flatten().unwrap_or(1.0);
            ratios[2].kv = best(total.codecs.values().map(|codec| codec.ratio)).unwrap_or(1.0);
            sources.push(format!("KV of {}", caches.names));
        }
        if let Some(weights) = &self.weights {
            let total = &weights.report.total;
            ratios[1].weights = total.word_major.get("zstd").copied().flatten().unwrap_or(1.0);
            ratios[2].weights = best(total.codecs.values().map(|codec| codec.ratio)).unwrap_or(1.0);
            sources.push(format!("weights of {}", weights.names));
        }
        let missing = [(self.caches.is_none(), "KV"), (self.weights.is_none(), "weights")];
        sources.extend(missing.iter().filter(|(gone, _)| *gone).map(|(_, of)| {
            format!(
                "{of} as the paper has \
                it"
            )
        }));
        let source = format!("measured: {}", sources.join(", "));
        ratios[1..].iter_mut().for_each(|ratios| ratios.source.clone_from(&source));
        Some(ratios)
    }
}

/// The greatest ratio.
pub(super) fn best(ratios: impl Iterator<Item = Option<f64>>) -> Option<f64> {
    ratios.flatten().reduce(f64::max)
}

/// The model and the KV cache that come with the project, where it is at hand.
fn bundled() -> (Vec<PathBuf>, Vec<PathBuf>) {
    let folder = lamina_qemu::recipe::root().join("guest-tests/models");
    let at_hand = |name: &str| Some(folder.join(name)).filter(|path| path.is_file()).into_iter().collect();
    (at_hand("stories260K-bf16.safetensors"), at_hand("stories260K-kv-bf16.safetensors"))
}

fn names(files: &[PathBuf]) -> String {
    let name = |path: &PathBuf| path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
    files.iter().map(name).collect::<Vec<_>>().join(", ")
}

fn analysed(files: &[ModelFile], options: &AnalyzeOptions) -> Result<Report> {
    let meter = Meter::new("read");
    let report = analyze(files, options, |progress| {
        meter.show(&progress);
        ControlFlow::Continue(())
    });
    meter.finish();
    Ok(report?)
}

/// The layout given, or that of tensors of two dimensions, tokens and channels.
fn layout(given: Option<KvLayout>, files: &[ModelFile]) -> Result<KvLayout> {
    if let Some(layout) = given {
        return Ok(layout);
    }
    let mut channels =
        files.iter().flat_map(ModelFile::tensors).filter_map(|tensor| match tensor.shape[..] {
            [_, channels] => Some(channels),
            _ => None,
        });
    let first = channels.next();
    match first.and_then(|first| u32::try_from(first).ok()) {
        Some(row) if row > 0 && channels.all(|other| Some(other) == first) => {
            Ok(KvLayout::rows(row, KV_WINDOW))
        }
        _ => bail!(
            "the tensors of {} do not tell the layout of a KV cache: say it with --kv \
                CHANNELS[,WINDOW]",
            files.first().map_or(Path::new("the cache"), ModelFile::path).display()
        ),
    }
}
