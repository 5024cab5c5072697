//! The commands that serve models as files.

use std::path::PathBuf;

use clap::Args;

use super::ApiAt;
use super::values::bytes;

/// Serve models as files: start a device that holds them, and mount it on DIR.
///
/// DIR/models/NAME/ has the files as they are, to the bit, and each checkpoint at other precisions
/// under names like `model@e8m3.safetensors`, made when they are read. The device runs in the
/// background until `lamina umount DIR`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  A checkpoint, and what it is at another precision:
      lamina mount model.safetensors ~/m
      cmp model.safetensors ~/m/models/model/model.safetensors
      ls -l ~/m/models/model/model@e8m3.safetensors ~/m/models/model/model@fp8_e4m3fn.safetensors
  A directory with shards, configuration and tokenizer; as a whole it is at ~/m/models/llama@e8m3/ too:
      lamina mount ~/downloads/Llama-3.2-1B ~/m
  A model and a fine-tune of it: what is the same is stored once
      lamina mount base.safetensors tuned.safetensors ~/m --base tuned=base
  Precisions by tensor, from a file of rules ([[tensor]] name = \"*.down_proj.*\", view = \"e8m2\"):
      lamina mount model.gguf ~/m --map small=small.toml

Views: eXmY keeps X exponent and Y mantissa bits · +gN rounds with N more bits fetched · +dN rounds the exponent so ·
bf16 fp8_e4m3fn fp8_e5m2 convert. A tensor whose dtype cannot give a view stays as it is.")]
pub(crate) struct Mount {
    /// The models, safetensors, GGUF or .npy files, indices of shards, or directories with such;
    /// then the directory to mount on, which is made if it is missing.
    #[arg(required = true, num_args = 1.., value_name = "MODEL… DIR")]
    pub(crate) words: Vec<PathBuf>,
    /// Tensors that MODEL has of the same name, format and shape as BASE are stored as the
    /// difference to its: both are called as in DIR/models; may be given more than once.
    #[arg(long = "base", value_name = "MODEL=BASE", value_parser = base)]
    pub(crate) bases: Vec<(String, String)>,
    #[command(flatten)]
    pub(crate) shown: Shown,
    /// Keep the device in this file: it is there again the next time, with its models.
    #[arg(long, value_name = "FILE")]
    pub(crate) image: Option<PathBuf>,
    /// Bytes of the base window [default: twice what the models take, a gibibyte, and --files].
    #[arg(long, value_parser = bytes, value_name = "BYTES")]
    pub(crate) capacity: Option<u64>,
    /// Bytes that DIR/files may take: a file system for any files; none with 0 [default: 16G, or
    /// none if --capacity is given].
    #[arg(long, value_parser = bytes, value_name = "BYTES")]
    pub(crate) files: Option<u64>,
    /// Keep what is written to DIR/files in the page cache until it is synced or closed, or the
    /// kernel likes: quicker, but a full device says so at `fsync` or `close`. Needs root.
    #[arg(long)]
    pub(crate) write_cache: bool,
    /// Stay until SIGINT, SIGTERM or SIGHUP, or `lamina umount`.
    #[arg(long)]
    pub(crate) foreground: bool,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

/// How models are shown.
#[derive(Clone, Debug, Args)]
pub(crate) struct Shown {
    /// Views that the folders list from the beginning, separated by commas; others are there when
    /// they are asked for by name.
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    pub(crate) views: Vec<String>,
    /// A precision called NAME, whose rules are in a TOML file; may be given more than once.
    #[arg(long = "map", value_name = "NAME=FILE", value_parser = map)]
    pub(crate) maps: Vec<(String, PathBuf)>,
}

/// Take a mount down, and end its device.
#[derive(Debug, Args)]
pub(crate) struct Umount {
    /// Where it is mounted.
    pub(crate) dir: PathBuf,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// List models, their files, what is stored of them, and what was read of them at which precision.
#[derive(Debug, Args)]
pub(crate) struct Ls {
    /// Where they are mounted [default: everything that `lamina mount` mounted, and the device that
    /// is served in the usual place].
    pub(crate) dir: Option<PathBuf>,
    /// The API of a device that is being served: its socket, or the address of --tcp.
    #[arg(long, value_name = "PATH|ADDRESS:PORT", conflicts_with = "dir")]
    pub(crate) api: Option<ApiAt>,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Load a model into a device that is mounted, by `lamina mount`, `lamina serve` or `lamina boot`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  Into the only device that is mounted, and into one that `lamina serve --mount ~/lamina` serves:
      lamina load model.gguf
      lamina load model.gguf --in ~/lamina
  By the API of one, under another name:
      lamina load model.gguf --as other --api 127.0.0.1:8080
  A fine-tune of a model that is there: what is the same is stored once
      lamina load tuned.safetensors --base model")]
pub(crate) struct LoadModel {
    /// A safetensors, GGUF or .npy file, an index of shards, or a directory with such.
    pub(crate) model: PathBuf,
    /// What it is called [default: as the file or the directory].
    #[arg(long = "as", value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// A model that is there: tensors that both have, by name, format and shape, are stored as the
    /// difference to its, and it cannot be removed before this one.
    #[arg(long, value_name = "MODEL")]
    pub(crate) base: Option<String>,
    #[command(flatten)]
    pub(crate) shown: Shown,
    #[command(flatten)]
    pub(crate) to: To,
}

/// Remove a model from a device that is mounted, with all that is stored of it.
#[derive(Debug, Args)]
pub(crate) struct Rm {
    /// The model.
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) to: To,
}

/// Which device.
#[derive(Clone, Debug, Args)]
pub(crate) struct To {
    /// Where the device is mounted, or something in there; it may be left out where only one is.
    #[arg(long = "in", value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
    /// The device's API instead: its socket, or the address of --tcp.
    #[arg(long, value_name = "PATH|ADDRESS:PORT", conflicts_with = "dir")]
    pub(crate) api: Option<ApiAt>,
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// A model, and the one that it is stored against.
pub(crate) fn base(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((model, base)) if !model.is_empty() && !base.is_empty() && model != base => {
            Ok((model.to_owned(), base.to_owned()))
        }
        _ => Err(format!("{text:?} is no MODEL=BASE: write for example tuned=base")),
    }
}

fn map(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, file)) if !name.is_empty() && !file.is_empty() => Ok((name.to_owned(), file.into())),
        _ => Err(format!("{text:?} is no NAME=FILE: write for example small=small.toml")),
    }
}
