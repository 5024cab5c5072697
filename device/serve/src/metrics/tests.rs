//! Every declared figure is in JSON, in OpenMetrics and in `docs/counters.md`, and no other number
//! is.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::sync::Arc;

use lamina_abi::Interleave;
use lamina_codec::{format::Format, kv::KvLayout};
use lamina_device::counters::Scope;
use lamina_device::device::{Device, DeviceConfig, Moved, Partition, PartitionConfig, Watcher};
use lamina_device::layout::Layout;
use lamina_device::stats::{Interleaving, ModelledReport};
use lamina_device::tensor::TensorSpec;

use lamina_files::Files;
use lamina_pool::{NodeCounts, Occupancy, Overview, Share};

use super::*;
use crate::cold_pages::ColdPages;
use crate::files::FilesReport;
use crate::host_cache::HostCache;
use crate::pools::{PoolClassReport, PoolNodeReport, PoolReport, PoolsReport};

/// What numbers in JSON say of their object that are not counted.
const TOLD: [&str; 7] = ["dpa", "elements", "offset", "length", "bits", "planes", "scale_exp"];

fn spec(name: &str, length: u64, layout: Layout) -> TensorSpec {
    TensorSpec {
        name: name.to_owned(),
        dpa: None,
        length,
        elements: None,
        shape: Vec::new(),
        format: Format::Bf16,
        layout,
        codec: None,
        base: None,
    }
}

/// Somebody who models hardware, and tells of one design.
#[derive(Debug)]
struct Modelling;

impl Watcher for Modelling {
    fn moved(&self, _: &Moved<'_>) {}

    fn report(&self) -> Vec<ModelledReport> {
        let some = Some(1e-7);
        vec![ModelledReport {
            design: "trace",
            requests: 3,
            row_hit_rate: Some(0.5),
            p50_seconds: some,
            p99_seconds: some,
            mean_seconds: some,
            service_seconds: some,
            ..ModelledReport::default()
        }]
    }
}

/// A device of which everything is counted: divided, interleaved, with weights, a KV cache and a
/// host.
fn served(observe: bool) -> ServedStats {
    let part = |name: &str| PartitionConfig {
        name: name.to_owned(),
        base_bytes: 4 << 20,
        views_bytes: 4 << 20,
        quota_bytes: Some(2 << 20),
    };
    let config = DeviceConfig {
        observe,
        partitions: vec![part("a"), part("b")],
        interleaving: Some(Interleaving { interleave: Interleave::chunks(2).unwrap(), bandwidth: 22.5 }),
        watcher: observe.then(|| -> Arc<dyn Watcher> { Arc::new(Modelling) }),
        ..DeviceConfig::new(8 << 20, 8 << 20)
    };
    let device = Arc::new(Device::new(config).unwrap());
    let part = Partition::named(&device, "a").unwrap();
    part.create_tensor(spec("weights", 8192, Layout::Weight)).unwrap();
    let cache = part.create_tensor(spec("cache", 32 << 10, Layout::Kv(KvLayout::rows(64, 128)))).unwrap();
    let view = part.create_view("weights", "full").unwrap();
    part.write_base(0, &[7; 100]).unwrap();
    part.write_base(cache.dpa, &[1; 130]).unwrap();
    part.read_base(0, &mut [0; 4096]).unwrap();
    part.read_base(cache.dpa, &mut [0; 200]).unwrap();
    part.read_views(view.offset, &mut [0; 8192]).unwrap();
    let hosts = vec![HostCache::new(Partition::named(&device, "b").unwrap(), 1 << 20).report("h")];
    let undivided = Arc::new(Device::new(DeviceConfig::new(32 << 20, 8 << 20)).unwrap());
    let files = Files::open(undivided, 8 << 20, true).unwrap();
    let files = files.map(|files| FilesReport::of(&files));
    let node = NodeCounts { name: "h".into(), hits: 3, misses: 1, ..NodeCounts::default() };
    let overview = Overview {
        occupancy: Some(Occupancy::default()),
        nodes: vec![node],
        classes: vec![Share::default()],
        ..Overview::default()
    };
    let pools = PoolsReport {
        pools: vec![PoolReport::of("base", &overview, Some(4096))],
        pool_classes: PoolClassReport::of("base", &overview, &[4096]).collect(),
        pool_nodes: PoolNodeReport::of("base", &overview).collect(),
    };
    let page_cache = Some(ColdPages::new(1 << 20).report());
    ServedStats { device: device.stats(), hosts, files, page_cache, pools }
}

#[test]
fn every_figure_is_in_json_and_in_metrics_and_no_other_number_is() {
    let served = served(true);
    let stats = serde_json::to_value(&served).unwrap();
    let metrics = text(&served);
    let mut names = BTreeSet::new();
    for section in sections() {
        let rows = section.rows(&stats);
        assert!(!rows.is_empty(), "{} is nowhere", section.title);
        for figure in section.figures {
            let name = figure.metric(section.prefix);
            assert!(names.insert((name.clone(), figure.label)), "{name} is declared twice");
            let mut reported = 0;
            for row in &rows {
                let number = row.object.get(figure.name);
                let number = number.unwrap_or_else(|| panic!("{} has no {}", section.title, figure.name));
                let labels = row.labels.iter().map(|(label, value)| (*label, value.as_str()));
                let labels: Vec<_> = labels.chain(figure.label).collect();
                let labels = labels.iter().map(|(label, value)| format!("{label}=\"{value}\""));
                let labels = labels.collect::<Vec<_>>().join(",");
                let sample = if labels.is_empty() { name.clone() } else { format!("{name}{{{labels}}}") };
                if figure.kind == Kind::Histogram {
                    is_histogram(number, &name, &labels, &metrics);
                    reported += 1;
                    continue;
                }
                let value = metrics.lines().find_map(|line| line.strip_prefix(&sample)?.strip_prefix(' '));
                let value = value.map(|value| value.parse::<f64>().unwrap());
                let same = |value: f64, number: f64| (value - number).abs() <= number.abs() * 1e-12;
                match (value, number.as_f64()) {
                    (Some(value), Some(number)) => assert!(same(value, number), "{sample} {number}"),
                    (None, None) => assert!(number.is_null(), "{sample} {number}"),
                    (value, number) => panic!("{sample} is {value:?} in metrics and {number:?} in JSON"),
                }
                reported += u32::from(value.is_some());
            }
            if reported > 0 {
                let family = name.trim_end_matches("_total");
                let unit = name.strip_suffix("_bytes_total").or(name.strip_suffix("_bytes"));
                assert!(metrics.contains(&format!("# HELP {family} ")), "{family}: {metrics}");
                assert!(metrics.contains(&format!("# TYPE {family} ")), "{family}: {metrics}");
                assert!(unit.is_none() || metrics.contains(&format!("# UNIT {family} bytes")), "{family}");
            }
            assert!(figure.help.ends_with('.'), "{name}: {}", figure.help);
        }
        let declared = |name: &str| sections().any(|section| section.figures.iter().any(|f| f.name == name));
        for (name, value) in rows.iter().flat_map(|row| row.object.as_object().unwrap()) {
            let label = section.labels.iter().any(|(_, field)| field == name);
            let reported = label || TOLD.contains(&name.as_str()) || declared(name);
            assert!(!value.is_number() || reported, "{} has {name}, which is not declared", section.title);
        }
    }
    let scopes: Vec<_> = sections().map(|section| section.scope).collect();
    let device = [Scope::Device, Scope::Design, Scope::Member, Scope::Partition, Scope::Host];
    for scope in device.into_iter().chain([Scope::Window, Scope::View, Scope::Tensor, Scope::Plane]) {
        assert!(scopes.contains(&scope), "{scope:?}");
    }
    assert!(PAGE.contains("\"title\":\"stored fetched\"") && !PAGE.contains("SECTIONS"));
}

#[test]
fn the_help_of_a_metric_holds_for_all_its_labels() {
    let text = text(&served(true));
    let mut labelled = BTreeSet::new();
    for section in sections() {
        for figures in section.figures.chunk_by(|a, b| (a.metric, a.unit) == (b.metric, b.unit)) {
            if let [first, _, ..] = figures {
                let name = first.metric(section.prefix);
                let (of_all, _) =
                    first.help.split_once(": ").unwrap_or_else(|| panic!("{name}: {}", first.help));
                assert!(text.contains(&format!("# HELP {name} {of_all}{}\n", section.of)), "{name}: {text}");
                labelled.insert(name);
            }
        }
    }
    assert!(labelled.contains("lamina_window_bytes") && labelled.len() > 3, "{labelled:?}");
    assert!(text.contains("# HELP lamina_window_bytes Bytes of a window\n"), "{text}");
}

/// Whether the text has a histogram as JSON has it: with counts that rise to that of all.
fn is_histogram(of: &Value, name: &str, labels: &str, metrics: &str) {
    let sample = |suffix: &str| {
        let sample = format!("{name}_{suffix}{{{labels}}} ");
        let value = metrics.lines().find_map(|line| line.strip_prefix(&sample));
        value.unwrap_or_else(|| panic!("{sample}: {metrics}")).parse::<f64>().ok()
    };
    assert_eq!((sample("count"), sample("sum")), (of["count"].as_f64(), of["sum"].as_f64()));
    let (bucket, labels) = (format!("{name}_bucket{{le=\""), format!("\",{labels}}} "));
    let told = metrics.lines().filter_map(|line| line.strip_prefix(&bucket)?.split_once(&labels));
    let told: Vec<_> =
        told.map(|(bound, count)| (bound.parse::<f64>().unwrap(), count.parse::<u64>().unwrap())).collect();
    let mut rising = 0;
    let buckets = of["buckets"].as_array().unwrap().iter().map(|bucket| {
        rising += bucket["requests"].as_u64().unwrap();
        (bucket["up_to_seconds"].as_f64().unwrap_or(f64::INFINITY), rising)
    });
    assert_eq!(told, buckets.collect::<Vec<_>>());
    assert_eq!(Some(rising), of["count"].as_u64());
    assert!(metrics.contains(&format!("# TYPE {name} histogram\n")), "{name}");
}

#[test]
fn what_is_not_measured_is_left_out() {
    let served = served(false);
    let stats = serde_json::to_value(&served).unwrap();
    assert!(stats["requests"]["base"]["plain_bytes_fetched"].is_null());
    assert!(stats["index"]["hits"].is_null() && stats["interleave"].is_null());
    let text = text(&served);
    for part in
        ["gcomp", "plain_fetched", "of_plain", "index_cache", "index_fetched", "interleave", "modelled"]
    {
        assert!(!text.contains(part) && self::text(&self::served(true)).contains(part), "{part}: {text}");
    }
}

#[test]
fn every_section_is_a_key_of_what_is_told_even_if_there_is_nothing() {
    let bare = ServedStats { hosts: Vec::new(), files: None, page_cache: None, ..served(false) };
    let stats = serde_json::to_value(&bare).unwrap();
    for place in sections().flat_map(|section| section.places) {
        let pointer = place.list.unwrap_or(place.each);
        let key = pointer.split('/').nth(1).unwrap();
        assert!(stats.get(key).is_some(), "{pointer}");
    }
    assert!(stats["files"].is_null() && stats["page_cache"].is_null());
}

#[test]
fn docs_have_the_figures_as_they_are_declared() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/counters.md");
    let document = std::fs::read_to_string(path).unwrap();
    let (begin, end) = ("<!-- figures, as declared -->\n", "<!-- end of figures -->");
    let table = document.split_once(begin).and_then(|(_, rest)| rest.split_once(end)).map(|(table, _)| table);
    let declared = declared();
    assert_eq!(table, Some(declared.as_str()), "between the marks belongs:\n{declared}");
}

/// The tables of `docs/counters.md`: sections with the same figures share one.
fn declared() -> String {
    let mut tables = String::new();
    let all: Vec<_> = sections().collect();
    for (number, section) in all.iter().enumerate() {
        let same = |other: &&&Section| std::ptr::eq(other.figures, section.figures);
        if all[..number].iter().any(|other| same(&other)) {
            continue;
        }
        let places = all[number..].iter().filter(same).flat_map(|section| {
            section.places.iter().map(|place| match place.list {
                None => format!("`{}`", place.each),
                Some(list) => format!("`{list}/*{}`", place.each),
            })
        });
        let places = places.collect::<Vec<_>>().join(", ");
        let prefixes =
            all[number..].iter().filter(same).map(|section| section.prefix).collect::<BTreeSet<_>>();
        let several = prefixes.len() > 1;
        write!(tables, "\n**{places}**").unwrap();
        if several {
            let prefixes = prefixes.iter().map(|prefix| format!("`{prefix}`")).collect::<Vec<_>>();
            write!(tables, "; … is {}", prefixes.join(", ")).unwrap();
        }
        writeln!(tables, "\n\n| JSON | OpenMetrics | is |\n|---|---|---|").unwrap();
        for figure in section.figures {
            let name = figure.metric(if several { "…" } else { section.prefix });
            let label =
                figure.label.map_or_else(String::new, |(label, value)| format!("{{{label}=\"{value}\"}}"));
            writeln!(tables, "| `{}` | `{name}{label}` | {} |", figure.name, figure.help).unwrap();
        }
    }
    tables
}

/// The name and the labels of each metric in an expression of Prometheus.
fn metrics_in(expression: &str) -> Vec<(String, Vec<String>)> {
    let name_of = |text: &str| -> String {
        text.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect()
    };
    let found = expression.match_indices("lamina_").map(|(at, _)| {
        let name = name_of(&expression[at..]);
        let selected = expression[at + name.len()..].strip_prefix('{').and_then(|rest| rest.split_once('}'));
        let labels = selected.map_or("", |(labels, _)| labels).split(',').map(name_of);
        (name, labels.filter(|label| !label.is_empty()).collect())
    });
    found.collect()
}

#[test]
fn the_dashboard_asks_for_metrics_that_there_are() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/grafana.json");
    let dashboard: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let text = text(&served(true));
    // By name: the labels of its samples.
    let declared = |name: &str| {
        sections().find(|section| {
            section.figures.iter().any(|figure| {
                let suffix = name.strip_prefix(&figure.metric(section.prefix));
                let histogram = figure.kind == Kind::Histogram;
                suffix.is_some_and(|suffix| if histogram { suffix == "_bucket" } else { suffix.is_empty() })
            })
        })
    };
    let mut asked = 0;
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            let expression = target["expr"].as_str().unwrap();
            let legend = target["legendFormat"].as_str().unwrap();
            let metrics = metrics_in(expression);
            assert!(!metrics.is_empty(), "{expression}");
            for (name, labels) in metrics {
                assert!(declared(&name).is_some(), "{name} of {} is no metric", panel["title"]);
                let sample = text.lines().find(|line| line.starts_with(&format!("{name}{{")));
                let shown =
                    legend.split("{{").skip(1).filter_map(|rest| Some(rest.split_once("}}")?.0.to_owned()));
                for label in labels.into_iter().chain(shown).filter(|label| label != "instance") {
                    let sample = sample.unwrap_or_else(|| panic!("{name} has no labels"));
                    assert!(sample.contains(&format!("{label}=\"")), "{name} has no label {label}: {sample}");
                }
                asked += 1;
            }
        }
    }
    assert!(asked > 20, "{asked}");
}
