//! The counters as OpenMetrics text, made at each scrape from what `/stats` answers.
//!
//! Names begin with `lamina_`; bytes are in names that end in `_bytes`, counters in `_total`. What
//! belongs to a window, a tensor, a view or a plane is one metric with labels. A number that the
//! device was told not to measure is left out.

use std::fmt;
use std::sync::LazyLock;

use lamina_device::counters::{Figure, Kind, Row, Section, Unit};
use lamina_device::stats::SECTIONS;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{self, Registry};
use serde_json::Value;

use super::control::ServedStats;
use super::host_cache::SECTION;

/// The content type of the text.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All figures of a served device, by where they are in what `/stats` answers.
pub fn sections() -> impl Iterator<Item = &'static Section> {
    let others = [
        &SECTION,
        &super::files::SECTION,
        &super::cold_pages::SECTION,
        &super::pools::SECTION,
        &super::pools::CLASSES,
        &super::pools::NODES,
    ];
    SECTIONS.iter().chain(others)
}

/// The page, with the sections that its script shows.
pub(super) static PAGE: LazyLock<String> = LazyLock::new(|| {
    let sections = serde_json::to_string(&sections().collect::<Vec<_>>()).expect("names and texts");
    include_str!("page.html").replace("SECTIONS", &sections)
});

/// The report as OpenMetrics text, `# EOF` included.
pub(super) fn text(report: &ServedStats) -> String {
    let stats = serde_json::to_value(report).expect("numbers and names");
    let mut registry = Registry::with_prefix("lamina");
    registry.register_collector(Box::new(Snapshot(stats)));
    let mut out = String::new();
    // A `String` takes everything: an error could only come from a metric, and numbers have none.
    if let Err(why) = text::encode(&mut out, &registry) {
        tracing::error!("metrics could not be encoded: {why}");
    }
    out
}

#[derive(Debug)]
struct Snapshot(Value);

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let kind = ["mode", "codec", "gcomp_codec"];
        let kind = kind.map(|name| Some((name, self.0["device"][name].as_str()?.to_owned())));
        let info = Info::new(kind.into_iter().flatten().collect::<Vec<_>>());
        info.encode(encoder.encode_descriptor("device", "What kind of device", None, info.metric_type())?)?;
        for section in sections() {
            let rows = section.rows(&self.0);
            // Figures that a label of their own tells apart are one metric.
            for figures in section.figures.chunk_by(|a, b| (a.metric, a.unit) == (b.metric, b.unit)) {
                family(&mut encoder, section, figures, &rows)?;
            }
        }
        Ok(())
    }
}

/// Encodes one metric, if there is a number of it.
fn family(
    encoder: &mut DescriptorEncoder<'_>,
    section: &Section,
    figures: &[Figure],
    rows: &[Row<'_>],
) -> fmt::Result {
    let Some(first) = figures.first() else { return Ok(()) };
    let mut numbers = rows
        .iter()
        .flat_map(|row| figures.iter().map(move |figure| (row, figure, &row.object[figure.name])))
        .filter(|(.., number)| number.is_number() || number.is_object())
        .peekable();
    if numbers.peek().is_none() {
        return Ok(());
    }
    let name = format!("{}{}", section.prefix, first.metric);
    let help = format!("{}{}", help_of(figures), section.of);
    let unit = match first.unit {
        Unit::Count | Unit::Ratio => None,
        Unit::Bytes => Some(registry::Unit::Bytes),
        Unit::Seconds => Some(registry::Unit::Seconds),
        Unit::Rate => Some(registry::Unit::Other("gigabytes_per_second".to_owned())),
    };
    let kind = match first.kind {
        Kind::Counter => MetricType::Counter,
        Kind::Gauge => MetricType::Gauge,
        Kind::Histogram => MetricType::Histogram,
    };
    let mut family = encoder.encode_descriptor(&name, &help, unit.as_ref(), kind)?;
    for (row, figure, number) in numbers {
        let own = figure.label.map(|(label, value)| (label, value.to_owned()));
        let labels: Vec<_> = row.labels.iter().cloned().chain(own).collect();
        if labels.is_empty() {
            encode(number, kind, family)?;
            return Ok(());
        }
        encode(number, kind, family.encode_family(&labels)?)?;
    }
    Ok(())
}

/// What is said of a metric. Of several figures the first says that before a colon, and behind it
/// what its own label means, which is left out: the others have other labels.
fn help_of(figures: &[Figure]) -> &'static str {
    let help = figures.first().map_or("", |first| first.help);
    match help.split_once(": ") {
        Some((of_all, _)) if figures.len() > 1 => of_all,
        _ => help.trim_end_matches('.'),
    }
}

fn encode(number: &Value, kind: MetricType, mut to: MetricEncoder<'_>) -> fmt::Result {
    if let Some(buckets) = number["buckets"].as_array() {
        let buckets = buckets.iter().map(|bucket| {
            let bound = bucket["up_to_seconds"].as_f64().unwrap_or(f64::INFINITY);
            (bound, bucket["requests"].as_u64().unwrap_or_default())
        });
        let (sum, count) = (number["sum"].as_f64(), number["count"].as_u64());
        let (sum, count) = (sum.unwrap_or_default(), count.unwrap_or_default());
        return to.encode_histogram::<NoLabelSet>(sum, count, &buckets.collect::<Vec<_>>(), None);
    }
    match (number.as_u64(), number.as_f64()) {
        (Some(number), _) if matches!(kind, MetricType::Counter) => ConstCounter::new(number).encode(to),
        (Some(number), _) => ConstGauge::new(number).encode(to),
        (None, number) => ConstGauge::new(number.unwrap_or_default()).encode(to),
    }
}

#[cfg(test)]
mod tests;
