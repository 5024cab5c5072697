//! Commands that make, resize and remove what has a name: `tensor`, `view`. The device's control
//! port does it, and answers in JSON, which is printed.

use anyhow::ensure;
use clap::{Args, Subcommand};
use lamina_shim::{Ctl, NewTensor};
use serde_json::Value;

#[derive(Debug, Subcommand)]
pub(super) enum Tensor {
    /// Make a tensor; the bytes that are there stay
    #[command(after_help = "\
Examples:
  lamina-shim tensor add mine --length 64M --format bf16
  lamina-shim tensor add cache.k --length 16M --format bf16 --kv 1024,128
  lamina-shim tensor add cache.v --length 16M --format bf16 --kv 1024,64 --lossy packkv:0.1
  lamina-shim tensor add tuned --length 64M --format bf16 --derived-from mine")]
    Add {
        /// Its name
        name: String,
        /// Its bytes; K, M, G and T are powers of 1024
        #[arg(long, value_parser = bytes, value_name = "BYTES")]
        length: u64,
        /// The format of its elements, e.g. bf16
        #[arg(long)]
        format: String,
        /// Where it begins in the base window, a multiple of 4096 [default: where it fits]
        #[arg(long, value_parser = bytes, value_name = "DPA")]
        at: Option<u64>,
        /// It is a KV cache: channels of a row and tokens of a window
        #[arg(long, value_parser = kv, value_name = "CHANNELS[,WINDOW]")]
        kv: Option<(u32, u32)>,
        /// Code its full windows with loss, as PackKV: a token's values in steps of SCALE of what
        /// they span, its tokens in an order found by REPACK, PACK of them together
        #[arg(long, requires = "kv", value_name = "packkv[:SCALE[,REPACK[,PACK]]]")]
        lossy: Option<String>,
        /// Its shape, outermost dimension first [default: one dimension]
        #[arg(long, value_delimiter = 'x', value_name = "AxBx…")]
        shape: Vec<u64>,
        /// The codec of its planes [default: the device's]
        #[arg(long)]
        codec: Option<String>,
        /// A tensor of the same format and length: blocks are stored as the difference to its where
        /// that takes less, and it cannot be removed before this one
        #[arg(long, value_name = "TENSOR", conflicts_with = "kv")]
        derived_from: Option<String>,
    },
    /// Store a tensor that has a base by itself, so that it needs none
    Detach {
        /// Its name
        name: String,
    },
    /// Make a tensor longer or shorter where it is
    Resize {
        /// Its name
        name: String,
        /// Its bytes from now on
        #[arg(long, value_parser = bytes, value_name = "BYTES")]
        length: u64,
    },
    /// Remove a tensor and its views; its bytes stay
    Rm {
        /// Its name
        name: String,
    },
}

#[derive(Args, Debug)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(super) struct View {
    #[command(subcommand)]
    command: Option<ViewCommand>,
    /// The tensor
    #[arg(required = true)]
    tensor: Option<String>,
    /// The view's spelling, e.g. e8m3+g2
    #[arg(required = true)]
    spelling: Option<String>,
}

#[derive(Debug, Subcommand)]
enum ViewCommand {
    /// Make a view of a tensor
    Add {
        /// The tensor
        tensor: String,
        /// The view's spelling, e.g. e8m3+g2
        spelling: String,
    },
    /// Remove a view of a tensor
    Rm {
        /// The tensor
        tensor: String,
        /// The view's spelling
        spelling: String,
    },
}

pub(super) fn tensor(ctl: &mut Ctl, command: &Tensor) -> anyhow::Result<()> {
    match command {
        Tensor::Add { name, length, format, at, kv, lossy, shape, codec, derived_from } => {
            let tensor = NewTensor {
                name: name.clone(),
                length: *length,
                format: format.clone(),
                dpa: *at,
                shape: shape.clone(),
                kv: *kv,
                lossy: lossy.clone(),
                codec: codec.clone(),
                base: derived_from.clone(),
            };
            let reply = ctl.create_tensors(&[tensor])?;
            print(reply.get("tensors").and_then(|tensors| tensors.get(0)).unwrap_or(&reply))
        }
        Tensor::Resize { name, length } => {
            let reply = ctl.resize_tensor(name, *length)?;
            print(reply.get("tensor").unwrap_or(&reply))
        }
        Tensor::Detach { name } => {
            let reply = ctl.detach_tensor(name)?;
            print(reply.get("tensor").unwrap_or(&reply))
        }
        Tensor::Rm { name } => ctl.remove_tensor(name).map(drop).map_err(Into::into),
    }
}

pub(super) fn view(ctl: &mut Ctl, command: &View) -> anyhow::Result<()> {
    match command {
        View { command: Some(ViewCommand::Rm { tensor, spelling }), .. } => {
            ctl.remove_view(tensor, spelling).map(drop).map_err(Into::into)
        }
        View { command: Some(ViewCommand::Add { tensor, spelling }), .. }
        | View { command: None, tensor: Some(tensor), spelling: Some(spelling) } => {
            let reply = ctl.create_view(tensor, spelling)?;
            print(reply.get("view").unwrap_or(&reply))
        }
        View { .. } => {
            ensure!(false, "a view is made by its tensor and its spelling");
            Ok(())
        }
    }
}

fn print(value: &Value) -> anyhow::Result<()> {
    super::line(&serde_json::to_string_pretty(value)?)
}

/// A number of bytes: decimal or hexadecimal, with K, M, G or T for powers of 1024.
fn bytes(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no number of bytes: write for example 4096, 0x1000 or 64M");
    if let Some(digits) = text.strip_prefix("0x") {
        return u64::from_str_radix(digits, 16).map_err(|_| wrong());
    }
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(end);
    let shift = match unit {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(wrong()),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is more than 64 bits can count"))
}

fn kv(text: &str) -> Result<(u32, u32), String> {
    let (channels, window) = text.split_once(',').unwrap_or((text, "128"));
    let wrong =
        || format!("{text:?} is no KV layout: write CHANNELS or CHANNELS,WINDOW, for example 1024,128");
    Ok((channels.parse().map_err(|_| wrong())?, window.parse().map_err(|_| wrong())?))
}
