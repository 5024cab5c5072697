//! Which experts tokens use: a trace of it, and what experts got.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::Result;
use lamina_llama::{Route, Weight};
use serde::Serialize;

use super::measure::Answers;
use crate::made_file;

/// An expert: how often it was used, and what it got.
#[derive(Serialize)]
pub(crate) struct Usage {
    pub(crate) layer: usize,
    pub(crate) expert: usize,
    /// Tokens of the text that was chosen by that used it.
    pub(crate) routed: usize,
    /// Bits a weight, the mean over its tensors.
    pub(crate) bits: f64,
}

impl Usage {
    /// All experts among parts, each with its tensor, its weights and its bits a weight.
    pub(crate) fn of(full: &Answers, parts: impl Iterator<Item = (Weight, usize, u32)>) -> Vec<Self> {
        let mut sums = BTreeMap::<_, (u64, u64)>::new();
        for (weight, weights, bits) in parts {
            if let Some(expert) = weight.expert() {
                let (sum, all) = sums.entry(expert).or_default();
                *sum += weights as u64 * u64::from(bits);
                *all += weights as u64;
            }
        }
        let usage = |((layer, expert), (sum, all))| Self {
            layer,
            expert,
            routed: full.routed((layer, expert)),
            bits: super::float(sum) / super::float(all),
        };
        sums.into_iter().map(usage).collect()
    }
}

/// Writes a line for each token, layer and expert that it used, as comma-separated values.
pub(crate) fn write_routes(path: &Path, routes: &[Route]) -> Result<()> {
    let mut routes = routes.to_vec();
    routes.sort_by_key(|route| (route.position, route.layer, route.expert));
    let mut text = "token,layer,expert,share\n".to_owned();
    for Route { layer, position, expert, share } in routes {
        let _ = writeln!(text, "{position},{layer},{expert},{share}"); // a String takes anything
    }
    made_file::write(path, text.as_bytes())
}
