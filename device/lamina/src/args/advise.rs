//! Arguments of the advice on precisions.

use std::path::PathBuf;

use clap::Args;

/// Find a precision for each tensor of a model under a budget of bits, by running it on a text.
///
/// Each matrix alone is read at each of --views, and what the model says of the text is compared
/// with what it says in full: the mean Kullback-Leibler divergence of its next-token probabilities.
/// Bits then go where they give most. The best of two such mixtures and the best uniform precision
/// on the text is the map, which is judged, beside uniform precisions, on another part of it.
#[derive(Debug, Args)]
#[command(after_help = "\
Models are those of the project's decoder: Llama's architecture with one matrix for embedding and classifier, as GGUF, or as bf16
safetensors with its shape in the metadata. The latter may have experts, each of whose matrices gets a precision of its own.

Examples:
      lamina advise smollm2-bf16.gguf --text essay.txt --budget 11.5 --out small.toml
      lamina mount smollm2-bf16.gguf --map small=small.toml ~/m    # has smollm2-bf16@small.gguf")]
pub(crate) struct Advise {
    /// The model.
    pub(crate) model: PathBuf,
    /// A text of the kind that the model is for.
    #[arg(long, value_name = "FILE")]
    pub(crate) text: PathBuf,
    /// Bits a weight, of the planes that are read, on average over all matrices.
    #[arg(long, value_name = "BITS")]
    pub(crate) budget: f64,
    /// Precisions that a tensor may get besides full: views of bf16 that mask.
    #[arg(long, value_delimiter = ',', default_value = "e8m1,e8m2,e8m3,e8m4", value_name = "VIEW,…")]
    pub(crate) views: Vec<String>,
    /// Tokens of the text that precisions are chosen by.
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub(crate) text_tokens: usize,
    /// Tokens behind these that perplexities are of.
    #[arg(long, default_value_t = 256, value_name = "N")]
    pub(crate) check_tokens: usize,
    /// Give each head of Q, K and V a precision of its own.
    #[arg(long)]
    pub(crate) by_head: bool,
    /// Write which experts each of the tokens that precisions are chosen by used, and with what
    /// share, as comma-separated values.
    #[arg(long, value_name = "FILE")]
    pub(crate) routes: Option<PathBuf>,
    /// The vocabulary of a safetensors model.
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,
    /// Where the map goes.
    #[arg(long, default_value = "precisions.toml", value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Print JSON instead of tables.
    #[arg(long)]
    pub(crate) json: bool,
}
