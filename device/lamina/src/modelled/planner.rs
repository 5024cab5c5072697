//! The model as one HTML page with sliders, for who has no terminal at hand: `lamina model --page`
//! writes it, and a device serves it at `/planner`.
//!
//! The formulas are in it a second time, in JavaScript. `guest-tests/clients/page.py` holds what a
//! browser makes of them against this program's.

use anyhow::{Context, Result};
use lamina_model::system::{PRESETS, Ratios, Server, Shape};
use serde_json::json;

/// Contexts of the page that a device serves, tokens: those of `lamina model`.
const CONTEXTS: [u64; 7] = [4 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 192 << 10, 256 << 10];

/// The page that a device serves: the paper's model and server first.
///
/// # Errors
/// None: the preset is known.
pub(crate) fn served() -> Result<String> {
    let shape = Shape::preset("gpt-oss-120b-mxfp4").context("the preset is gone")?;
    Ok(page(&shape, &Server::default(), &CONTEXTS))
}

/// The page, with `shape` first among the LLMs to choose from.
pub(super) fn page(shape: &Shape, server: &Server, contexts: &[u64]) -> String {
    let others = PRESETS.iter().filter_map(|preset| Shape::preset(preset.0));
    let shapes: Vec<_> =
        [shape.clone()].into_iter().chain(others.filter(|other| other.name != shape.name)).collect();
    // As `Ratios::paper` tells them apart: more than 8 bits, more than 5, and fewer.
    let ratios = json!({
        "printed": Ratios::printed(),
        "wide": Ratios::paper(16.0),
        "byte": Ratios::paper(8.0),
        "narrow": Ratios::paper(4.0),
    });
    let given = json!({"presets": shapes, "server": server, "ratios": ratios, "contexts": contexts});
    // A name comes from a file, and none may end the script.
    let given = given.to_string().replace('<', "\\u003c");
    include_str!("planner.html").replacen("GIVEN", &given, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_asks_nobody_and_names_stay_names() {
        let mut shape = Shape::preset("llama-3.1-8b").unwrap();
        shape.name = "</script><b>mine".to_owned();
        let page = page(&shape, &Server::default(), &[4096, 8192]);
        assert!(!page.contains("</script><b>") && page.contains("\\u003c/script>\\u003cb>mine"), "{page}");
        for outside in ["http:", "https:", "src=", "url(", "GIVEN", "<link"] {
            assert!(!page.contains(outside), "{outside}");
        }
        // A preset is there once.
        let preset = super::page(&Shape::preset("qwen3-32b").unwrap(), &Server::default(), &[4096]);
        assert_eq!(preset.matches("\"name\":\"qwen3-32b\"").count(), 1);
        assert!(preset.contains("\"contexts\":[4096]"));
    }
}
