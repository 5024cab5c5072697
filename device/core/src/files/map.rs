//! Maps: precisions by tensor, rows or expert.
//!
//! ```toml
//! [[tensor]]
//! name = "*.experts.*"        # `*` stands for anything
//! experts = [0, 3]            # of `….experts.N.…`, or of the outermost of three dimensions
//! view = "e8m1"
//!
//! [[tensor]]
//! name = "*embed*"
//! rows = "0..1000"
//! view = "e8m3"
//! ```
//!
//! The first rule that matches a row counts; what none matches is full.

use std::ops::Range;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use wildmatch::WildMatch;

/// Precisions of a model's tensors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrecisionMap {
    /// The rules.
    #[serde(rename = "tensor", default)]
    pub rules: Vec<MapRule>,
}

impl FromStr for PrecisionMap {
    type Err = toml::de::Error;

    /// The map that a file of TOML has.
    fn from_str(text: &str) -> Result<Self, toml::de::Error> {
        toml::from_str(text)
    }
}

/// A precision of some tensors, or of parts of them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MapRule {
    /// Which tensors, `*` for anything.
    pub name: String,
    /// Which rows: `FROM..TO`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<String>,
    /// Which experts; all if empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub experts: Vec<u64>,
    /// The view's spelling.
    pub view: String,
}

impl MapRule {
    /// The rows of a tensor that it is about.
    pub(super) fn rows_of(&self, tensor: &str, shape: &[u64]) -> Result<Vec<Range<u64>>, String> {
        if !WildMatch::new(&self.name).matches(tensor) {
            return Ok(Vec::new());
        }
        let all = 0..shape.first().copied().unwrap_or(1);
        if let Some(rows) = &self.rows {
            let parts =
                rows.split_once("..").and_then(|(from, to)| Some((from.parse().ok()?, to.parse().ok()?)));
            let (from, to) = parts.ok_or_else(|| format!("rows {rows:?} are no FROM..TO"))?;
            if from >= to || to > all.end {
                return Err(format!("rows {rows} are not among the {} of {tensor}", all.end));
            }
            return Ok(one(from..to));
        }
        if self.experts.is_empty() {
            return Ok(one(all));
        }
        if let Some(expert) = expert_of(tensor) {
            return Ok(if self.experts.contains(&expert) { one(all) } else { Vec::new() });
        }
        if shape.len() < 3 {
            return Ok(Vec::new());
        }
        let known = self.experts.iter().filter(|expert| all.contains(expert));
        Ok(known.map(|expert| *expert..expert + 1).collect())
    }
}

fn one(rows: Range<u64>) -> Vec<Range<u64>> {
    std::iter::once(rows).collect()
}

/// The number behind `experts.` in a name.
fn expert_of(tensor: &str) -> Option<u64> {
    let mut parts = tensor.split('.');
    parts.by_ref().find(|part| *part == "experts")?;
    parts.next()?.parse().ok()
}

impl PrecisionMap {
    /// The views of a tensor's rows, in order; rows that are in none are full. Rules that do not
    /// fit the tensor match nothing of it.
    pub(super) fn views_of(&self, tensor: &str, shape: &[u64]) -> Vec<(Range<u64>, &str)> {
        let mut taken: Vec<(Range<u64>, &str)> = Vec::new();
        for rule in &self.rules {
            for wanted in rule.rows_of(tensor, shape).unwrap_or_default() {
                let mut at = wanted.start;
                let mut free = Vec::new();
                for (other, _) in &taken {
                    if other.end <= at || other.start >= wanted.end {
                        continue;
                    }
                    if other.start > at {
                        free.push((at..other.start, rule.view.as_str()));
                    }
                    at = at.max(other.end);
                }
                if at < wanted.end {
                    free.push((at..wanted.end, rule.view.as_str()));
                }
                taken.append(&mut free);
                taken.sort_unstable_by_key(|(rows, _)| rows.start);
            }
        }
        taken
    }
}
