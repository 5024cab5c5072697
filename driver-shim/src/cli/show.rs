//! Commands that show what there is: `up`, `list`, `map`.

use std::{
    fmt::Write as _,
    io::{self, Write as _},
};

use anyhow::Context;
use lamina_abi::{Layout, TensorEntry};
use lamina_shim::{Attached, Lamina, Location, Window, dax::Use};
use serde_json::{Value, json};

pub(super) fn attached(attached: &Attached, as_json: bool) -> anyhow::Result<()> {
    if as_json {
        return super::line(&serde_json::to_string_pretty(attached)?);
    }
    for window in [&attached.base, &attached.views] {
        let place = match window.r#use {
            None | Some(Use::Devdax) => window.node.display().to_string(),
            Some(Use::SystemRam) => "system RAM".into(),
        };
        let role = window.role;
        let made = if window.created { "made" } else { "found" };
        super::line(&format!(
            "{role:<5}  {place}  {} MiB  {} {} ({made})",
            window.bytes >> 20,
            window.memdev,
            window.region,
        ))?;
    }
    Ok(())
}

pub(super) fn list(lamina: &Lamina, as_json: bool) -> anyhow::Result<()> {
    let directory = lamina.directory();
    if as_json {
        let tensors: Vec<Value> =
            directory.tensors.iter().map(|tensor| tensor_json(lamina, tensor)).collect();
        return super::line(&serde_json::to_string_pretty(&json!({
            "generation": directory.generation,
            "base_bytes": directory.base_bytes,
            "views_bytes": directory.views_bytes,
            "is_incomplete": directory.is_incomplete,
            "tensors": tensors,
        }))?);
    }
    let width = directory.tensors.iter().map(|tensor| tensor.name.chars().count()).max().unwrap_or(0).max(6);
    let mut text =
        format!("{:<width$}  {:<10}  {:<12}  {:>12}  VIEWS\n", "TENSOR", "FORMAT", "SHAPE", "BYTES");
    for tensor in &directory.tensors {
        let views = lamina.views_of(&tensor.name).join(" ");
        writeln!(
            text,
            "{:<width$}  {:<10}  {:<12}  {:>12}  {views}",
            printable(&tensor.name),
            printable(&tensor.format),
            printable(&tensor.shape),
            tensor.length,
        )?;
    }
    if directory.is_incomplete {
        writeln!(
            text,
            "... and more: the directory has no room for them, and no control port tells of them"
        )?;
    }
    write!(io::stdout().lock(), "{text}").context("standard output")
}

fn tensor_json(lamina: &Lamina, tensor: &TensorEntry) -> Value {
    let directory = lamina.directory();
    let views: Vec<Value> = directory
        .views
        .iter()
        .filter(|view| {
            directory.tensors.get(view.tensor as usize).is_some_and(|entry| entry.name == tensor.name)
        })
        .map(|view| {
            json!({
                "view": view.spelling,
                "offset": view.offset,
                "bytes": view.length,
                "elements": view.elements,
                "bits": view.bits,
                "scale_exp": view.scale_exp,
            })
        })
        .collect();
    json!({
        "tensor": tensor.name,
        "format": tensor.format,
        "shape": tensor.shape,
        "dpa": tensor.dpa,
        "bytes": tensor.length,
        "elements": tensor.elements,
        "layout": match tensor.layout {
            Layout::Weight => json!("weight"),
            Layout::Kv { channels, window, stride, groups, paged_tokens } => {
                let mut kv = json!({ "channels": channels, "window": window });
                if stride != channels {
                    kv["stride"] = stride.into();
                }
                if groups > 1 {
                    kv["paged"] = json!({ "groups": groups, "block": paged_tokens });
                }
                json!({ "kv": kv })
            }
        },
        "lossy": tensor.lossy,
        "views": views,
    })
}

/// A location with what `mmap` has to be told: offset and length that are multiples of the device's
/// alignment.
fn mapping(location: &Location, window: &Window) -> Value {
    let align = window.align().max(1);
    let start = location.offset - location.offset % align;
    let end = location.offset + location.bytes;
    let mapped = (end.div_ceil(align).saturating_mul(align)).min(window.bytes()) - start;
    json!({
        "tensor": location.tensor,
        "view": location.view,
        "device": window.path(),
        "offset": location.offset,
        "bytes": location.bytes,
        "mmap_offset": start,
        "mmap_length": mapped,
        "skip": location.offset - start,
    })
}

pub(super) fn map(
    lamina: &Lamina,
    tensor: Option<&str>,
    view: Option<&str>,
    as_json: bool,
) -> anyhow::Result<()> {
    let tensors: Vec<&str> = match tensor {
        Some(tensor) => vec![tensor],
        None => super::all(lamina)?.iter().map(|entry| entry.name.as_str()).collect(),
    };
    let mut found = Vec::new();
    for tensor in tensors {
        let views = lamina.views_of(tensor);
        let views = match view {
            Some(view) => vec![view.to_owned()],
            // An unknown tensor has no views: let `locate` say so.
            None if views.is_empty() => vec![lamina_shim::BASE.to_owned()],
            None => views,
        };
        for view in views {
            let location = lamina.locate(tensor, &view)?;
            found.push(mapping(&location, lamina.window(location.window)?));
        }
    }
    if as_json {
        return super::line(&serde_json::to_string_pretty(&found)?);
    }
    let mut out = io::stdout().lock();
    for entry in &found {
        writeln!(
            out,
            "{} {}: device {} offset {} bytes {} (mmap {} bytes at {}, skip {})",
            printable(entry["tensor"].as_str().unwrap_or_default()),
            printable(entry["view"].as_str().unwrap_or_default()),
            entry["device"].as_str().unwrap_or_default(),
            entry["offset"],
            entry["bytes"],
            entry["mmap_length"],
            entry["mmap_offset"],
            entry["skip"],
        )
        .context("standard output")?;
    }
    Ok(())
}

/// Text of the directory without control characters, which a terminal would act upon.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}
