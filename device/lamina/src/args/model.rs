//! Arguments of what is modelled.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::values::takes_negative;

/// Model decoding on a server with a CXL device: tokens a second against context, where it spills,
/// how many devices. All of it is modelled, by formulas recovered from the paper's figures.
///
/// Tokens a second are of one sequence of the batch: a step gives each a token, and reads the KV of
/// all. Its weights are those of one token, whatever the batch, of a mixture of experts as well.
#[derive(Debug, Args)]
#[command(
    after_help = "\
MODEL is a preset (gpt-oss-120b, gpt-oss-120b-mxfp4, llama-3.1-8b, llama-3.1-70b, llama-3.1-405b, mixtral-8x7b, opt-30b, deepseek-v3,
qwen3-32b, smollm2-135m) in upper or lower case, a config.json, or a TOML file with name, layers, kv_elements (of a token and a layer),
parameters, and if you like active_parameters, kv_bits, weight_bits.

Ratios: `printed` are those that reproduce the paper's figures, `paper` those that it measured; a file is what `lamina analyze --json`
or /stats gave, the report.json of `./x run --workload decode`, or {\"trace\": {\"kv\": 1.5, \"weights\": 1.3}}, of which
either may be left out.

Examples:
  The paper's Figs. 12 to 14 beside the model's numbers:
      lamina model --paper
  A planner's question, with ratios of one's own checkpoint:
      lamina analyze model.safetensors --json > ratios.json
      lamina model llama-3.1-70b --hbm 141 --ratios ratios.json --target 20 --plot rates.svg
  The same with sliders, in a browser:
      lamina model llama-3.1-70b --page planner.html",
    mut_args(takes_negative)
)]
pub(crate) struct Model {
    /// The LLM.
    #[arg(default_value = "gpt-oss-120b", value_name = "MODEL")]
    pub(crate) llm: String,
    /// Where compression counts: as the paper's figures were made, in the device only, or both
    /// beside each other.
    #[arg(long, value_enum, default_value = "both")]
    pub(crate) accounting: Accounted,
    /// Ratios of the designs [default: `printed` as printed, `paper` in the device only].
    #[arg(long, value_name = "printed|paper|FILE")]
    pub(crate) ratios: Option<String>,
    /// Contexts in tokens, separated by commas; k is 1024.
    #[arg(long, value_delimiter = ',', default_value = "4k,16k,32k,64k,128k,192k,256k", value_parser = tokens, value_name = "LIST")]
    pub(crate) context: Vec<u64>,
    /// HBM for weights and KV, in GB.
    #[arg(long, default_value_t = 76.0, value_name = "GB")]
    pub(crate) hbm: f64,
    /// The part of HBM for weights.
    #[arg(long, default_value_t = 0.8)]
    pub(crate) alpha: f64,
    /// The link in one direction, in GB/s.
    #[arg(long, default_value_t = 512.0, value_name = "GB/S")]
    pub(crate) link: f64,
    /// The device's DRAM, in GB/s.
    #[arg(long, default_value_t = 256.0, value_name = "GB/S")]
    pub(crate) ddr: f64,
    /// Sequences decoded at once.
    #[arg(long, default_value_t = 16.0)]
    pub(crate) batch: f64,
    /// The part of the context that a step reads.
    #[arg(long, default_value_t = 0.2)]
    pub(crate) f_rd: f64,
    /// Tokens a second that compute and HBM allow.
    #[arg(long, value_name = "TOKENS/S")]
    pub(crate) ceiling: Option<f64>,
    /// Tokens a second that you ask for: says how long a context each design gives it at.
    #[arg(long, value_name = "TOKENS/S")]
    pub(crate) target: Option<f64>,
    /// Bits of a weight as the host stores it [default: the model's].
    #[arg(long, value_name = "BITS")]
    pub(crate) weight_bits: Option<f64>,
    /// What one device holds, in GB.
    #[arg(long, default_value_t = 256.0, value_name = "GB")]
    pub(crate) device: f64,
    /// The price of a GB of the device's DRAM; 1 gives prices relative to plain memory.
    #[arg(long, default_value_t = 1.0, value_name = "PRICE")]
    pub(crate) dram_price: f64,
    /// Print the paper's figures beside the model's, and nothing else.
    #[arg(
        long,
        conflicts_with_all = [
            "llm", "accounting", "ratios", "context", "hbm", "alpha", "link", "ddr", "batch", "f_rd", "ceiling", "target",
            "weight_bits", "device", "dram_price", "plot",
        ]
    )]
    pub(crate) paper: bool,
    /// Write the model as a page with sliders to this HTML file, which needs no network, and print
    /// nothing.
    #[arg(long, value_name = "OUT.html", conflicts_with_all = ["plot", "json", "paper"])]
    pub(crate) page: Option<PathBuf>,
    /// Draw to this SVG file, or as text with `-`. Unless --accounting says one, there are two
    /// drawings: this file is the device's only, and beside it one that ends in `.printed.svg` is
    /// as printed.
    #[arg(long, value_name = "OUT.svg|-")]
    pub(crate) plot: Option<PathBuf>,
    /// Print JSON instead of tables.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Where compression counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Accounted {
    /// As the paper's figures were made.
    AsPrinted,
    /// In the device and nowhere else.
    DeviceOnly,
    /// Both.
    Both,
}

/// A number of tokens; k is 1024.
fn tokens(text: &str) -> Result<u64, String> {
    let (digits, unit) = text.strip_suffix(['k', 'K']).map_or((text, 1), |digits| (digits, 1024));
    let number = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
    number.ok_or_else(|| format!("{text:?} is no number of tokens: write for example 4096 or 128k"))
}
