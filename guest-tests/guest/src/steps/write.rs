//! Writing a tensor by stores, the fence, and reading it back everywhere.

use std::time::Instant;

use anyhow::ensure;
use lamina_shim::{BASE, Lamina};
use sha2::{Digest, Sha256};

use super::read::{hex, pass};
use crate::{Event, Phase, Plan, Report, WritePlan, report::console, rotate};

pub(super) fn run(
    lamina: &Lamina,
    plan: &Plan,
    write: &WritePlan,
    report: &mut Report,
) -> anyhow::Result<()> {
    let name = &write.tensor;
    let location = lamina.locate(name, BASE)?;
    let span = lamina.span(name, BASE)?;
    let mut old = vec![0; span.len()];
    span.load(0, &mut old)?;
    let (new, rotation) = rotate(&old, location.elements, write.seed);

    let start = Instant::now();
    span.store(0, &new)?;
    let seconds = start.elapsed().as_secs_f64();
    let mut back = vec![0; span.len()];
    span.load(0, &mut back)?;
    ensure!(back == new, "{name}: loads through the base window do not see its own stores");

    let start = Instant::now();
    lamina.flush(Some((location.offset, location.bytes)))?;
    let flush_seconds = start.elapsed().as_secs_f64();
    console(&format!("wrote {name}: {} bytes in {seconds:.3} s, flush {flush_seconds:.3} s", new.len()));
    report.send(&Event::Written {
        tensor: name.clone(),
        rotation,
        bytes: location.bytes,
        sha256: hex(&Sha256::digest(&new)),
        seconds,
        flush_seconds,
    });
    Ok(pass(lamina, plan, Phase::Written, Some(name), report)?)
}
