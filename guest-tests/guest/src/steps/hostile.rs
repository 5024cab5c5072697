//! Misbehaviour that must hurt nothing: stores into a view, and reaching past ends.

use anyhow::Context;
use lamina_shim::{Access, BASE, Error, Lamina, OpenOptions, Role};

use super::read::{load, pairs};
use crate::{Event, Plan, Report, report::console};

/// Bytes stored into a view: a page.
const STORED: usize = 4096;

pub(super) fn run(
    lamina: &Lamina,
    plan: &Plan,
    options: &OpenOptions,
    report: &mut Report,
) -> anyhow::Result<()> {
    past_end(lamina, plan, report)?;
    let (tensor, view) = pairs(lamina, plan, None)
        .into_iter()
        .find(|(_, view)| view != BASE)
        .context("the plan has no view to store into")?;
    store(lamina, &tensor, &view, options, report)
}

/// Stores over the start of a view, through a mapping that allows it.
fn store(
    lamina: &Lamina,
    tensor: &str,
    view: &str,
    options: &OpenOptions,
    report: &mut Report,
) -> anyhow::Result<()> {
    let hash = |view: &str| Ok::<_, Error>(load(&lamina.span(tensor, view)?)?.sha256);
    let (before, base_before) = (hash(view)?, hash(BASE)?);
    let bad = OpenOptions {
        base: Some(lamina.window(Role::Base)?.path().into()),
        views: Some(lamina.window(Role::Views)?.path().into()),
        views_access: Access::ReadWrite,
        ..options.clone()
    };
    let bad = Lamina::open(&bad)?;
    let location = bad.locate(tensor, view)?;
    let span = bad.span(tensor, view)?;
    let mut page = vec![0; STORED.min(span.len())];
    span.load(0, &mut page)?;
    for byte in &mut page {
        *byte ^= 0xa5;
    }
    span.store(0, &page)?;
    let mut back = vec![0; page.len()];
    span.load(0, &mut back)?;
    let seen = back == page;
    drop(bad);

    lamina.flush(None)?;
    let (after_flush, base_after) = (hash(view)?, hash(BASE)?);
    let base_unchanged = base_after == base_before;
    console(&format!(
        "stored {} bytes into {tensor} {view}: seen {seen}, gone after a flush {}, tensor unchanged {base_unchanged}",
        page.len(),
        after_flush == before,
    ));
    if !base_unchanged {
        report.problem("hostile", &format!("a store into {tensor} {view} changed the tensor itself"));
    }
    report.send(&Event::HostileStore {
        tensor: tensor.into(),
        view: view.into(),
        offset: location.offset,
        bytes: page.len() as u64,
        before,
        seen,
        after_flush,
        base_unchanged,
    });
    Ok(())
}

/// Asks the library for bytes that are not there.
fn past_end(lamina: &Lamina, plan: &Plan, report: &mut Report) -> anyhow::Result<()> {
    let (tensor, view) = pairs(lamina, plan, None).into_iter().next().context("the plan has no view")?;
    let span = lamina.span(&tensor, &view)?;
    let length = span.len() as u64;
    let views = lamina.window(Role::Views)?;
    let mut byte = [0];
    let attempts: [(String, Option<Error>); 5] = [
        (format!("load the byte behind {tensor} {view}"), span.load(length, &mut byte).err().map(Into::into)),
        (
            format!("load at the last address behind {tensor} {view}"),
            span.load(u64::MAX, &mut byte).err().map(Into::into),
        ),
        ("load the byte behind the views window".into(), views.span(views.bytes(), 1).err().map(Into::into)),
        (
            format!("store into {tensor} {view} behind its end"),
            span.store(length, &byte).err().map(Into::into),
        ),
        (format!("a view of {tensor} that is not there"), lamina.span(&tensor, "e99m99").err()),
    ];
    for (attempt, refused) in attempts {
        match refused {
            Some(error) => report.send(&Event::PastEnd { attempt, error: error.to_string() }),
            None => report.problem("hostile", &format!("{attempt}: this should have been refused")),
        }
    }
    Ok(())
}
