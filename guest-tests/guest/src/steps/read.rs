//! Reading views whole, by loads, and hashing what was loaded.

use std::{
    fmt::Write as _,
    time::{Duration, Instant},
};

use lamina_shim::{BASE, Error, Lamina, Span};
use sha2::{Digest, Sha256};

use crate::{Event, Phase, Plan, Report, report::console};

/// Bytes loaded at a time.
const CHUNK: usize = 1 << 20;

/// What was loaded.
pub(super) struct Loaded {
    /// SHA-256 in hexadecimal.
    pub(super) sha256: String,
    /// Seconds of the loads alone.
    pub(super) seconds: f64,
}

/// Loads every byte of `span` once.
pub(super) fn load(span: &Span<'_>) -> Result<Loaded, Error> {
    let mut hash = Sha256::new();
    let mut time = Duration::ZERO;
    let mut buffer = vec![0; CHUNK.min(span.len())];
    let mut done = 0;
    while done < span.len() {
        let count = CHUNK.min(span.len() - done);
        let start = Instant::now();
        span.load(done as u64, &mut buffer[..count])?;
        time += start.elapsed();
        hash.update(&buffer[..count]);
        done += count;
    }
    Ok(Loaded { sha256: hex(&hash.finalize()), seconds: time.as_secs_f64() })
}

/// `bytes` in hexadecimal.
pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// The (tensor, view) pairs that `plan` asks for, of one tensor if `only` names it.
pub(super) fn pairs(lamina: &Lamina, plan: &Plan, only: Option<&str>) -> Vec<(String, String)> {
    let wanted_tensor = |name: &str| match only {
        Some(only) => only == name,
        None => plan.tensors.as_ref().is_none_or(|names| names.iter().any(|wanted| wanted == name)),
    };
    let wanted_view = |view: &str| match view {
        BASE => plan.read_base,
        _ => plan.views.as_ref().is_none_or(|views| views.iter().any(|wanted| wanted == view)),
    };
    let tensors = lamina.directory().tensors.iter().filter(|tensor| wanted_tensor(&tensor.name));
    tensors
        .flat_map(|tensor| {
            let views = lamina.views_of(&tensor.name).into_iter().filter(|view| wanted_view(view));
            views.map(|view| (tensor.name.clone(), view)).collect::<Vec<_>>()
        })
        .collect()
}

/// Reads what `plan` asks for and reports each view. A view that cannot be had is a problem; the
/// others are read.
pub(super) fn pass(
    lamina: &Lamina,
    plan: &Plan,
    phase: Phase,
    only: Option<&str>,
    report: &mut Report,
) -> Result<(), Error> {
    let pairs = pairs(lamina, plan, only);
    let of = pairs.len();
    let mut base = None;
    for (index, (tensor, view)) in pairs.into_iter().enumerate() {
        let location = match lamina.locate(&tensor, &view) {
            Ok(location) => location,
            Err(error) => {
                report.problem("read", &error);
                continue;
            }
        };
        let number = index + 1;
        report.send(&Event::ViewBegin {
            phase,
            tensor: tensor.clone(),
            view: view.clone(),
            bytes: location.bytes,
            number,
            of,
        });
        let Loaded { sha256, seconds } = load(&lamina.span(&tensor, &view)?)?;
        console(&format!("{number}/{of} {tensor} {view}: {} bytes in {seconds:.3} s", location.bytes));
        if view == BASE {
            base = Some((tensor.clone(), sha256.clone()));
        } else if view == "full"
            && let Some((of, base)) = &base
            && *of == tensor
            && *base != sha256
        {
            report.problem("read", &format!("{tensor}: base has SHA-256 {base}, its view `full` {sha256}"));
        }
        report.send(&Event::View {
            phase,
            tensor,
            view,
            elements: location.elements,
            bytes: location.bytes,
            sha256,
            seconds,
        });
    }
    Ok(())
}
