//! What llama.cpp made of the same model at precisions: a second opinion beside the project's own
//! decoder, on the files that a mount shows.
//!
//! llama.cpp is no part of this program, and neither is Python: `guest-tests/clients/precisions.py`
//! runs it, and its report is read.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::book::{How, Row, Section};
use super::chart::{Look, Series};
use super::decoded::planes;

/// The report of a run.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Llama {
    /// The program and its version.
    program: String,
    pub(super) model: String,
    /// The text that was judged, a file's name.
    text: String,
    /// Tokens of it.
    tokens: u64,
    /// By view of the weights.
    perplexity: BTreeMap<String, f64>,
    /// Its KV cache of the text, a file's name.
    cache: String,
}

/// What says that there is none, and how there would be.
pub(super) const NOT_RUN: &str = "llama.cpp was not run beside it: ./x reproduce --model smollm2 \
    --fetch-llama fetches it from PyPI and does, or give the llama.json of an earlier run with \
    --llama.";

impl Llama {
    /// Reads a report, a file.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let whole: Self = serde_json::from_str(&text).with_context(|| {
            format!("{} is no report of guest-tests/clients/precisions.py", path.display())
        })?;
        ensure!(!whole.perplexity.is_empty(), "perplexity of {} has no view", path.display());
        for (view, perplexity) in &whole.perplexity {
            // The exponential of a mean of what is not negative.
            ensure!(
                perplexity.is_finite() && *perplexity >= 1.0,
                "perplexity.{view} of {} is {perplexity}, and cannot be below 1",
                path.display()
            );
            ensure!(planes(view).is_some(), "perplexity.{view} of {} is of no view of bf16", path.display());
        }
        Ok(whole)
    }

    /// With everything in full.
    pub(super) fn full(&self) -> Option<f64> {
        self.perplexity.get("full").copied()
    }

    /// Who judged what.
    pub(super) fn source(&self) -> String {
        let Self { program, model, text, tokens, .. } = self;
        format!(
            "Measured by {program} on {model}, its matrices made bf16, on the files of a mount that \
                show them at each precision: {tokens} tokens of {text}, each given all before it."
        )
    }

    /// If its KV cache is among these files, what to say of it.
    pub(super) fn cached(&self, files: &str) -> Option<String> {
        let Self { program, model, text, tokens, cache, .. } = self;
        let is_it = files.split(", ").any(|file| file == cache);
        is_it.then(|| {
            format!(
                " {cache} is what {program} keeps of {tokens} tokens of {text} with {model} in \
                    full, K and V in bf16, K after RoPE."
            )
        })
    }

    /// Its perplexities by view, fewest planes first.
    pub(super) fn rows(&self, section: Section) -> Section {
        section.rows(self.by_planes().into_iter().map(|(planes, view, perplexity)| {
            Row::new(format!("weights as {view}, {planes:.0} planes fetched, by llama.cpp"), "", 3, None)
                .ours(How::Measured, Some(perplexity))
        }))
    }

    /// The same, to plot.
    pub(super) fn series(&self) -> Series {
        let points = self.by_planes().into_iter().map(|(planes, _, perplexity)| [planes, perplexity]);
        Series::new(format!("{}, by llama.cpp", self.model), 1, Look::Solid, points)
    }

    fn by_planes(&self) -> Vec<(f64, &str, f64)> {
        let planes = |view: &String| planes(view).unwrap_or(16.0);
        let mut all: Vec<_> =
            self.perplexity.iter().map(|(view, of)| (planes(view), view.as_str(), *of)).collect();
        all.sort_by(|a, b| a.0.total_cmp(&b.0));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reproduce::book::Paper;

    fn report(perplexity: &str) -> String {
        format!(
            "{{\"program\": \"llama.cpp\", \"model\": \"m\", \"text\": \"t.txt\", \"tokens\": 256, \
                \"cache\": \"m-kv.safetensors\", \"perplexity\": {perplexity}}}"
        )
    }

    fn read(text: &str) -> Result<Llama> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("llama.json");
        fs::write(&path, text).unwrap();
        Llama::read(&path)
    }

    #[test]
    fn views_come_in_the_order_of_what_they_fetch() {
        let llama = read(&report("{\"full\": 10.5, \"e8m3\": 11.5, \"e8m1\": 60}")).unwrap();
        assert_eq!(llama.full(), Some(10.5));
        let section = llama.rows(Section::new(Paper::Ndp, "Fig. 4", "", ""));
        let rows: Vec<_> = section.rows.iter().map(|row| (row.what.as_str(), row.ours)).collect();
        let expected = [
            ("weights as e8m1, 10 planes fetched, by llama.cpp", Some(60.0)),
            ("weights as e8m3, 12 planes fetched, by llama.cpp", Some(11.5)),
            ("weights as full, 16 planes fetched, by llama.cpp", Some(10.5)),
        ];
        assert_eq!(rows, expected);
        assert!(llama.cached("a, m-kv.safetensors").unwrap().contains("256 tokens of t.txt"));
        assert_eq!(llama.cached("other-m-kv.safetensors"), None);
    }

    #[test]
    fn what_cannot_be_a_report_is_refused_by_the_field() {
        let refused = |text: &str| format!("{:#}", read(text).unwrap_err());
        assert!(refused("{}").contains("precisions.py"));
        assert!(refused(&report("{}")).contains("has no view"));
        let why = refused(&report("{\"e8m3\": 0.5}"));
        assert!(why.contains("perplexity.e8m3") && why.contains("0.5"), "{why}");
        assert!(refused(&report("{\"nonsense\": 2}")).contains("perplexity.nonsense"));
        assert!(refused(&report("{\"full\": null}")).contains("llama.json"));
        assert!(Llama::read(Path::new("/nonexistent")).unwrap_err().to_string().contains("/nonexistent"));
    }
}
