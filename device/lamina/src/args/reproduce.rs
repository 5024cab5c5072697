//! Arguments of the reproduction.

use std::path::PathBuf;

use clap::Args;
use lamina_codec::kv::KvLayout;

use super::values::kv_layout;

/// Run what the papers' tables and figures show, and write it beside their numbers: one HTML file
/// that needs no network.
///
/// Each number says whether it was measured, on what, or modelled, from what, or fitted to the
/// paper's, or why it cannot be had. Nothing is taken from an earlier run but what --decode and
/// --llama give.
#[derive(Debug, Args)]
#[command(after_help = "\
Without --model and --cache the bundled 260 K-parameter model and its KV cache are measured, where the project's folder is at hand.
Perplexities need a language model to run: ./x reproduce does that first, and gives its report with --decode.

Examples:
      lamina reproduce --out report
  On weights of one's own:
      lamina reproduce --model model.safetensors --cache kv.safetensors --out report
  With SmolLM2-135M's perplexities and KV cache, by the project's decoder and by llama.cpp:
      ./x reproduce --model smollm2 --fetch-llama")]
pub(crate) struct Reproduce {
    /// A checkpoint whose weights are measured; may be given more than once.
    #[arg(long, value_name = "FILE")]
    pub(crate) model: Vec<PathBuf>,
    /// A checkpoint of KV caches, tokens by channels; may be given more than once.
    #[arg(long, value_name = "FILE")]
    pub(crate) cache: Vec<PathBuf>,
    /// The caches' layout, written as for `lamina analyze --kv` [default: that of their tensors].
    #[arg(long, value_parser = kv_layout, value_name = "CHANNELS[,WINDOW]", requires = "cache")]
    pub(crate) kv: Option<KvLayout>,
    /// The report.json of `./x run --workload decode`, for perplexities.
    #[arg(long, value_name = "FILE")]
    pub(crate) decode: Option<PathBuf>,
    /// What llama.cpp made of a model at precisions, for perplexities beside: the llama.json that
    /// `./x reproduce` writes.
    #[arg(long, value_name = "FILE")]
    pub(crate) llama: Option<PathBuf>,
    /// The module: ddr5-4800, ddr5-5600, ddr5-6400.
    #[arg(long, default_value = "ddr5-4800", value_name = "NAME")]
    pub(crate) dram: String,
    /// Where report.html and report.json go; made if it is missing.
    #[arg(long, default_value = "lamina-report", value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Print report.json instead of a list.
    #[arg(long)]
    pub(crate) json: bool,
}
