//! Commands that move bytes: `cat`, `sum`, `write`. All of them copy through a private buffer, so
//! that what is hashed or printed is exactly what was loaded, once.

use std::io::{self, Read, Write};

use anyhow::{Context, ensure};
use lamina_shim::{BASE, Lamina, Span};
use sha2::{Digest, Sha256};

/// Bytes copied at a time.
const CHUNK: usize = 1 << 20;

/// Calls `each` with the bytes of `span` in order.
fn chunks(span: &Span<'_>, mut each: impl FnMut(&[u8]) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let mut buffer = vec![0; CHUNK.min(span.len())];
    let mut done = 0;
    while done < span.len() {
        let count = CHUNK.min(span.len() - done);
        span.load(done as u64, &mut buffer[..count])?;
        each(&buffer[..count])?;
        done += count;
    }
    Ok(())
}

pub(super) fn cat(
    lamina: &Lamina,
    tensor: &str,
    view: &str,
    offset: u64,
    length: Option<u64>,
) -> anyhow::Result<()> {
    let span = lamina.span(tensor, view)?;
    let length = length.unwrap_or_else(|| (span.len() as u64).saturating_sub(offset));
    let part = span.part(offset, length).with_context(|| format!("{tensor} {view}"))?;
    let mut out = io::stdout().lock();
    chunks(&part, |bytes| out.write_all(bytes).context("standard output"))?;
    out.flush().context("standard output")
}

pub(super) fn sum(
    lamina: &Lamina,
    tensor: Option<&str>,
    view: Option<&str>,
    all: bool,
) -> anyhow::Result<()> {
    let known = if all { super::all(lamina)? } else { &[] };
    let tensors: Vec<&str> = match tensor {
        Some(tensor) => vec![tensor],
        None => known.iter().map(|entry| entry.name.as_str()).collect(),
    };
    let mut out = io::stdout().lock();
    for tensor in tensors {
        let views = lamina.views_of(tensor);
        let views = if all && !views.is_empty() { views } else { vec![view.unwrap_or(BASE).to_owned()] };
        for view in views {
            let mut hash = Sha256::new();
            chunks(&lamina.span(tensor, &view)?, |bytes| {
                hash.update(bytes);
                Ok(())
            })?;
            for byte in hash.finalize() {
                write!(out, "{byte:02x}").context("standard output")?;
            }
            writeln!(out, "  {tensor} {view}").context("standard output")?;
        }
    }
    Ok(())
}

pub(super) fn write(lamina: &Lamina, tensor: &str, offset: u64) -> anyhow::Result<()> {
    let span = lamina.span(tensor, BASE)?;
    let room = span.part(offset, (span.len() as u64).saturating_sub(offset))?;
    // One byte more than fits, to notice input that is too long before anything is stored.
    let mut bytes = Vec::new();
    io::stdin().lock().take(room.len() as u64 + 1).read_to_end(&mut bytes).context("standard input")?;
    ensure!(
        bytes.len() <= room.len(),
        "standard input is longer than the {} bytes from {offset} to the end of {tensor:?}; nothing was stored",
        room.len(),
    );
    room.store(0, &bytes)?;
    super::line(&format!(
        "stored {} bytes at {offset} of {tensor}; `lamina-shim flush` makes views show them",
        bytes.len()
    ))
}
