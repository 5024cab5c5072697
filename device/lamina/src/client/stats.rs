//! `lamina stats`: a headline, and what is declared of each section. What is zero is left out.

use anyhow::Result;
use hyper::Method;
use lamina_device::counters::{Figure, Row, Section, Unit};
use serde_json::Value;

use super::ask;
use crate::args::Client;
use crate::out::{print_json, print_line};
use crate::table::{count, duration, new_table, ratio, size, text};

pub(crate) async fn stats(client: &Client) -> Result<()> {
    let stats = ask(&client.api, Method::GET, "/stats", None).await?;
    if client.json {
        return print_json(&stats);
    }
    let device = &stats["device"];
    let compared = device["gcomp_codec"].as_str().map(|codec| format!(", compared with gcomp by {codec}"));
    print_line!(
        "{} ({}{}): {} of {} written and stored as {} and {} of index, ratio {}",
        text(&device["mode"]),
        text(&device["codec"]),
        compared.unwrap_or_default(),
        size(&device["written_bytes"]),
        size(&device["capacity_bytes"]),
        size(&device["stored_bytes"]),
        size(&device["index_bytes"]),
        ratio(&device["ratio"]),
    )?;
    print_line!("one access here is a page filled (4 KiB) or the read-ahead, not a 64-byte load")?;
    for section in lamina_serve::sections() {
        print(section, &section.rows(&stats))?;
    }
    Ok(())
}

/// Prints a section: a line, or a table where labels tell its rows apart.
fn print(section: &Section, rows: &[Row<'_>]) -> Result<()> {
    let shown = |row: &Row<'_>, figure: &Figure| row.object[figure.name].as_f64().is_some_and(|n| n != 0.0);
    let figures: Vec<_> =
        section.figures.iter().filter(|figure| rows.iter().any(|row| shown(row, figure))).collect();
    let Some(first) = rows.first().filter(|_| !figures.is_empty()) else { return Ok(()) };
    if first.labels.is_empty() {
        let all = figures.iter().map(|figure| format!("{} {}", figure.title(), number(figure, first)));
        print_line!("{}: {}", section.title, all.collect::<Vec<_>>().join(", "))?;
        return Ok(());
    }
    let labels = first.labels.iter().map(|(label, _)| label.replace('_', " "));
    let titles: Vec<_> = labels.chain(figures.iter().map(|figure| figure.title())).collect();
    let titles: Vec<_> = titles.iter().map(String::as_str).collect();
    let mut table = new_table(&titles, first.labels.len());
    for row in rows.iter().filter(|row| figures.iter().any(|figure| shown(row, figure))) {
        let labels = row.labels.iter().map(|(_, value)| value.clone());
        table.add_row(labels.chain(figures.iter().map(|figure| number(figure, row))));
    }
    print_line!("{}:\n{table}", section.title)?;
    Ok(())
}

fn number(figure: &Figure, row: &Row<'_>) -> String {
    let number: &Value = &row.object[figure.name];
    match figure.unit {
        Unit::Count => count(number),
        Unit::Bytes => size(number),
        Unit::Ratio => ratio(number),
        Unit::Seconds => number.as_f64().map_or_else(|| "–".to_owned(), duration),
        Unit::Rate => format!("{} GB/s", ratio(number)),
    }
}
