//! Table II and Fig. 5: what a model made of a text, as `./x run --workload decode` measured it.
//!
//! The decoder is no part of this program: its report is read.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use lamina_codec::format::Format;
use lamina_codec::view::View;
use serde::Deserialize;

use super::book::{How, Paper, Row, Section};
use super::chart::{Across, Chart, Kind, Look, Series};
use super::found::Found;
use super::llama::{self, Llama};

/// The part of a decode run's report that is told here.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Decoded {
    pub(super) model: String,
    /// By view of the weights.
    perplexity: BTreeMap<String, f64>,
    /// By policy of the KV cache.
    policy_perplexity: BTreeMap<String, f64>,
    /// Bytes of the written text's K and V over those stored for them.
    pub(super) kv_ratio: Option<f64>,
    /// Whether the text is what a run in ordinary memory wrote.
    identical_to_reference: bool,
    /// Tokens of a page of the cache.
    page_tokens: u64,
    runs: Vec<Run>,
}

/// A text.
#[derive(Clone, Debug, Deserialize)]
struct Run {
    task: String,
    weights: String,
    policy: String,
    tokens: u64,
    weights_moved: Moved,
    kv_moved: Moved,
}

/// What reads moved.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Moved {
    stored_bytes_fetched: u64,
    plain_bytes_fetched: u64,
}

impl Moved {
    /// Fetched of what a plain device fetches.
    fn of_plain(self) -> Option<f64> {
        #[expect(clippy::cast_precision_loss, reason = "a percentage")]
        let [stored, plain] = [self.stored_bytes_fetched, self.plain_bytes_fetched].map(|bytes| bytes as f64);
        (plain > 0.0).then(|| 100.0 * stored / plain)
    }
}

/// A whole report.
#[derive(Deserialize)]
struct Whole {
    decode: Option<Decoded>,
}

/// The policy under which everything is read.
const FULL: &str = "full";

impl Decoded {
    /// The report of a run, a file.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| {
            format!(
                "cannot read \
            {}",
                path.display()
            )
        })?;
        let whole: Whole = serde_json::from_str(&text).with_context(|| {
            format!(
                "{} is no report of ./x run --workload \
                decode",
                path.display()
            )
        })?;
        whole
            .decode
            .with_context(|| format!("{} tells of no decoder: run ./x run --workload decode", path.display()))
    }

    /// The judged text in this view and under this policy.
    fn judged(&self, weights: &str, policy: &str) -> Option<&Run> {
        self.runs.iter().find(|run| run.task == "judge" && run.weights == weights && run.policy == policy)
    }

    fn source(&self) -> String {
        let tokens = self
            .judged(FULL, FULL)
            .map_or_else(|| "an unknown number of tokens".to_owned(), |run| format!("{} tokens", run.tokens));
        let same = if self.identical_to_reference {
            "A text that it wrote there was, logit for logit, what a run in ordinary memory wrote."
        } else {
            "A text that it wrote there was NOT what a run in ordinary memory wrote."
        };
        format!(
            "Measured on {}, {tokens} of a bundled text, its weights and its KV cache on \
                this device (./x run --workload decode). {same} Perplexities are that model's and \
                that text's.",
            self.model
        )
    }
}

const NOT_RUN: &str = "No decode run was given: ./x reproduce makes one, or give the report.json \
    of ./x run --workload decode with --decode.";

/// TRACE, Table II (CXL-NDP, Table I), Llama 3.1 8B on BookSum: policy and perplexity.
const TABLE_II: [(&str, f64); 5] = [
    ("full KV cache", 10.49),
    ("sliding window of 64 tokens", 14.33),
    ("Quest: 5 pages in bf16", 12.49),
    ("5 pages in bf16, 3 in fp8, 2 in fp4", 11.87),
    ("5 pages in bf16, 5 in fp8", 11.60),
];

/// Which of the paper's policies this one is, by its tiers.
fn place(policy: &str) -> Option<usize> {
    if policy == FULL {
        return Some(0);
    }
    if policy == "window:64" {
        return Some(1);
    }
    let (_, tiers) = policy.split_once(':').filter(|(kind, _)| matches!(*kind, "top" | "quest"))?;
    match tiers.split(',').count() {
        1 => Some(2),
        2 => Some(4),
        3 => Some(3),
        _ => None,
    }
}

/// Table II.
pub(super) fn table_ii(found: &Found) -> Section {
    let title = "Perplexity by policy of the KV cache";
    let by_llama = |section: Section| match &found.llama {
        None => section,
        Some(llama) => section
            .rows(llama.full().map(|full| {
                Row::new("full KV cache, by llama.cpp", "", 2, None).ours(How::Measured, Some(full))
            }))
            .note(llama.source())
            .note("llama.cpp has none of the other policies."),
    };
    let Some(decoded) = &found.decoded else {
        let rows = TABLE_II.map(|(what, paper)| Row::new(what, "", 2, Some(paper)).ours(How::NotRun, None));
        return by_llama(Section::new(Paper::Trace, "Table II", title, NOT_RUN).rows(rows));
    };
    // Where pages are ranked both ways, by head is the paper's.
    let mut beside: [Option<&String>; 5] = [None; 5];
    for policy in decoded.policy_perplexity.keys() {
        if let Some(place) = place(policy)
            && beside[place].is_none_or(|before| before.starts_with("top:"))
        {
            beside[place] = Some(policy);
        }
    }
    let missing: Vec<_> = TABLE_II
        .iter()
        .zip(beside)
        .filter(|(_, policy)| policy.is_none())
        .map(|((what, _), _)| *what)
        .collect();
    let mut source = decoded.source();
    if !missing.is_empty() {
        let _ = write!(source, " Its run had no policy that is as these: {}.", missing.join("; "));
    }
    let mut section = Section::new(Paper::Trace, "Table II", title, source);
    let perplexity = |policy: &String| decoded.policy_perplexity.get(policy).copied();
    let full = decoded.policy_perplexity.get(FULL).copied();
    for ((what, paper), policy) in TABLE_II.into_iter().zip(beside) {
        let what = policy.map_or_else(
            || what.to_owned(),
            |policy| {
                format!(
                    "{what}; here \
            {policy}"
                )
            },
        );
        let ours = policy.and_then(perplexity);
        section = section.rows([
            Row::new(&what, "", 2, Some(paper)).ours(How::Measured, ours),
            Row::new(format!("{what}: over full"), "×", 3, Some(paper / TABLE_II[0].1))
                .ours(How::Measured, ours.zip(full).map(|(ours, full)| ours / full))
                .derived()
                .again(),
        ]);
    }
    let listed: Vec<_> = beside.into_iter().flatten().collect();
    for (policy, ours) in decoded.policy_perplexity.iter().filter(|(policy, _)| !listed.contains(policy)) {
        section = section.rows([Row::new(policy, "", 2, None).ours(How::Measured, Some(*ours))]);
    }
    for policy in decoded.policy_perplexity.keys() {
        let fetched = decoded.judged(FULL, policy).and_then(|run| run.kv_moved.of_plain());
        let what = format!("{policy}: fetched of what plain fetches for the KV it reads");
        section = section.rows(fetched.map(|of| Row::new(what, "%", 1, None).ours(How::Measured, Some(of))));
    }
    let chart = Chart {
        title: "Perplexity over that with all of the cache".to_owned(),
        kind: Kind::Bars,
        right: "policy",
        across: Across::Names(
            ["full", "window", "Quest", "three tiers", "two tiers"].map(str::to_owned).to_vec(),
        ),
        up: "times full",
        log: false,
        series: vec![
            Series::named(
                "paper, Llama 3.1 8B on BookSum",
                0,
                Look::Dashed,
                TABLE_II.map(|(_, paper)| Some(paper / TABLE_II[0].1)),
            ),
            Series::named(
                format!("here, {}", decoded.model),
                2,
                Look::Solid,
                beside.map(|policy| policy.and_then(perplexity).zip(full).map(|(ours, full)| ours / full)),
            ),
        ],
    };
    by_llama(section).chart(chart).note(format!(
        "Pages have {} tokens here. For fp8 and fp4 stand views with their mantissas in the \
            tensor's own container. The same as CXL-NDP, Table I. What is fetched may be more \
            than plain's: a KV window is fetched whole for the first page of it that is read, and \
            what the host's page cache has is fetched by neither.",
        decoded.page_tokens
    ))
}

/// Planes that a view of bf16 fetches.
pub(super) fn planes(view: &str) -> Option<f64> {
    let view = View::parse(Format::Bf16, view).ok()?;
    Some(f64::from(view.mask().count()))
}

/// CXL-NDP, Fig. 4 (TRACE, Fig. 5), OPT-13B on C4.
const OPT: [(&str, f64); 3] =
    [("static, 8 bits", 16.39), ("dynamic by head and neuron, 8 bits", 12.70), ("dynamic, 6.4 bits", 13.89)];

/// Fig. 4 of CXL-NDP, which TRACE's Fig. 5 repeats without numbers.
pub(super) fn ndp_fig_4(found: &Found) -> Section {
    let title = "Perplexity against bits of a weight";
    let rows = OPT.map(|(what, paper)| Row::new(format!("OPT-13B: {what}"), "", 2, Some(paper)));
    let mut source = "OPT-13B, and the predictors that give each head and neuron its precision, are not \
        at hand."
        .to_owned();
    if found.decoded.is_some() || found.llama.is_some() {
        source.push_str(" Uniform precision is there, by views.");
    }
    for part in [
        found.decoded.as_ref().map_or(NOT_RUN.to_owned(), Decoded::source),
        found.llama.as_ref().map_or(llama::NOT_RUN.to_owned(), Llama::source),
    ] {
        source = format!("{source} {part}");
    }
    let mut section = Section::new(Paper::Ndp, "Fig. 4", title, source).rows(rows);
    let mut series = Vec::new();
    if let Some(decoded) = &found.decoded {
        let mut views: Vec<_> =
            decoded.perplexity.iter().map(|(view, of)| (planes(view).unwrap_or(16.0), view, of)).collect();
        views.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut points = Vec::new();
        for (bits, view, perplexity) in views {
            points.push([bits, *perplexity]);
            let row = Row::new(format!("weights as {view}, {bits:.0} planes fetched"), "", 3, None);
            section = section.rows([row.ours(How::Measured, Some(*perplexity))]);
            let fetched = decoded.judged(view, FULL).and_then(|run| run.weights_moved.of_plain());
            let what = format!("weights as {view}: fetched of what plain fetches");
            section =
                section.rows(fetched.map(|of| Row::new(what, "%", 1, None).ours(How::Measured, Some(of))));
        }
        series.push(Series::new(
            format!("{}, one view for all weights", decoded.model),
            2,
            Look::Solid,
            points,
        ));
    }
    if let Some(llama) = &found.llama {
        section = llama.rows(section);
        series.push(llama.series());
    }
    if !series.is_empty() {
        let fetched = |bits: &f64| {
            series.iter().flat_map(|series| &series.points).any(|point| (point[0] - bits).abs() < 0.5)
        };
        let ticks = (1..=16).map(f64::from).filter(fetched);
        section = section.chart(Chart {
            title: "Perplexity against planes fetched of a weight".to_owned(),
            kind: Kind::Lines,
            right: "planes of 16",
            across: Across::Numbers {
                log: false,
                ticks: ticks.map(|bits| (bits, bits.to_string())).collect(),
            },
            up: "perplexity",
            log: false,
            series,
        });
    }
    section.note("TRACE, Fig. 5, is the same comparison, and prints no numbers.").note(
        "Numbers in bf16 that a GGUF file's few bits stood for take fewer stored bytes than \
            weights that were trained in bf16.",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_those_of_the_papers_by_their_tiers() {
        let of = |policy: &str| place(policy).map(|place| TABLE_II[place].1);
        assert_eq!(of("full"), Some(10.49));
        assert_eq!(of("window:64"), Some(14.33));
        assert_eq!(of("quest:5=full"), Some(12.49));
        assert_eq!(of("top:2=full,1=e8m3+g2,1=e8m1+g2"), Some(11.87));
        assert_eq!(of("quest:5=full,5=e8m3+g2"), Some(11.60));
        assert_eq!(of("window:32"), None);
        assert_eq!((planes("full"), planes("e8m3"), planes("nonsense")), (Some(16.0), Some(12.0), None));
    }

    #[test]
    fn what_is_no_report_is_refused_by_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let refused = |text: &str| {
            let path = folder.path().join("report.json");
            fs::write(&path, text).unwrap();
            format!("{:#}", Decoded::read(&path).unwrap_err())
        };
        assert!(refused("{}").contains("tells of no decoder"));
        assert!(refused("[1").contains("is no report"));
        assert!(refused("{\"decode\": {\"model\": 1}}").contains("report.json"));
        assert!(Decoded::read(Path::new("/nonexistent")).unwrap_err().to_string().contains("/nonexistent"));
    }
}
