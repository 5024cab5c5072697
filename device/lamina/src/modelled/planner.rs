//! The model as one HTML page with sliders, for who has no terminal at hand: `lamina model --page`
//! writes it, and a device serves it at `/planner`.
//!
//! The formulas are in it a second time, in JavaScript. `guest-tests/clients/page.py` holds what a
//! browser makes of them against this program's.

use anyhow::{Context, Result};
use lamina_model::system::{Accounting, PRESETS, Ratios, Server, Shape};
use serde_json::{Value, json};

/// Contexts of the page that a device serves, tokens: those of `lamina model`.
const CONTEXTS: [u64; 7] = [4 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 192 << 10, 256 << 10];
/// Tokens a second that the page asks for first, unless others are given.
const TARGET: f64 = 20.0;

/// What the page shows first.
pub(super) struct Given<'a> {
    pub(super) shape: &'a Shape,
    pub(super) server: &'a Server,
    pub(super) contexts: &'a [u64],
    pub(super) accounting: Accounting,
    /// Those of the shape; without them the paper's.
    pub(super) ratios: Option<[Ratios; 3]>,
    pub(super) target: Option<f64>,
}

/// Name, text, least, most, step, unit.
type Slider = (&'static str, &'static str, f64, f64, f64, &'static str);

const SLIDERS: [Slider; 14] = [
    ("hbm", "HBM for weights and KV", 0.0, 1000.0, 1.0, "GB"),
    ("alpha", "part of it for weights", 0.0, 1.0, 0.001, ""),
    ("ddr", "DRAM of the device", 1.0, 2000.0, 1.0, "GB/s"),
    ("link", "link, one direction", 1.0, 2000.0, 1.0, "GB/s"),
    ("batch", "sequences at once", 1.0, 256.0, 1.0, ""),
    ("f_rd", "part of the context read", 0.01, 1.0, 0.01, ""),
    ("weight_bits", "bits of a weight", 1.0, 32.0, 0.25, ""),
    ("gcomp_kv", "gcomp: ratio of KV", 0.5, 4.0, 0.005, "×"),
    ("gcomp_weights", "gcomp: ratio of weights", 0.5, 4.0, 0.001, "×"),
    ("trace_kv", "trace: ratio of KV", 0.5, 4.0, 0.005, "×"),
    ("trace_weights", "trace: ratio of weights", 0.5, 4.0, 0.001, "×"),
    ("ceiling", "ceiling, 0 for none", 0.0, 500.0, 0.01, "tokens/s"),
    ("target", "tokens a second wanted", 0.5, 500.0, 0.5, "tokens/s"),
    ("device", "one device holds", 16.0, 2048.0, 16.0, "GB"),
];

/// The page that a device serves: the paper's model and server first.
///
/// # Errors
/// None: the preset is known.
pub(crate) fn served() -> Result<String> {
    let shape = Shape::preset("gpt-oss-120b-mxfp4").context("the preset is gone")?;
    let server = Server::default();
    let accounting = Accounting::DeviceOnly;
    let (contexts, ratios, target) = (&CONTEXTS, None, None);
    Ok(page(&Given { shape: &shape, server: &server, contexts, accounting, ratios, target }))
}

/// The page, with the given shape first among the LLMs to choose from.
pub(super) fn page(given: &Given<'_>) -> String {
    let others = PRESETS.iter().filter_map(|preset| Shape::preset(preset.0));
    let others = others.filter(|other| other.name != given.shape.name);
    let shapes: Vec<_> = [given.shape.clone()].into_iter().chain(others).collect();
    // As `Ratios::paper` tells them apart: more than 8 bits, more than 5, and fewer.
    let ratios = json!({
        "printed": Ratios::printed(),
        "wide": Ratios::paper(16.0),
        "byte": Ratios::paper(8.0),
        "narrow": Ratios::paper(4.0),
    });
    let sliders: Vec<_> = SLIDERS.iter().map(|slider| widened(slider, value(given, slider.0))).collect();
    let given = json!({
        "presets": shapes, "dram_price": given.server.dram_price, "ratios": ratios, "contexts": given.contexts,
        "accounting": given.accounting, "given_ratios": given.ratios, "sliders": sliders,
    });
    // A name comes from a file, and none may end the script.
    let given = given.to_string().replace('<', "\\u003c");
    include_str!("planner.html").replacen("GIVEN", &given, 1)
}

/// What a slider shows first.
fn value(given: &Given<'_>, name: &str) -> f64 {
    const GB: f64 = 1e9;
    let Server { hbm_bytes, alpha, link_rate, ddr_rate, batch, read_fraction, ceiling, device_bytes, .. } =
        *given.server;
    let ratio =
        |at: usize, of: fn(&Ratios) -> f64| given.ratios.as_ref().map_or(1.0, |ratios| of(&ratios[at]));
    match name {
        "hbm" => hbm_bytes / GB,
        "alpha" => alpha,
        "ddr" => ddr_rate / GB,
        "link" => link_rate / GB,
        "batch" => batch,
        "f_rd" => read_fraction,
        "weight_bits" => given.shape.weight_bits,
        "gcomp_kv" => ratio(1, |ratios| ratios.kv),
        "gcomp_weights" => ratio(1, |ratios| ratios.weights),
        "trace_kv" => ratio(2, |ratios| ratios.kv),
        "trace_weights" => ratio(2, |ratios| ratios.weights),
        "ceiling" => ceiling.unwrap_or(0.0),
        "target" => given.target.unwrap_or(TARGET),
        _ => device_bytes / GB,
    }
}

/// A slider that can stand at `value`: a browser moves what is out of its bounds or between two of
/// its steps, and would show another server without a word.
fn widened((name, text, min, max, step, unit): &Slider, value: f64) -> Value {
    let (min, max) = (min.min(value), max.max(value));
    let steps = (value - min) / step;
    let step = if (steps - steps.round()).abs() < 1e-9 { json!(step) } else { json!("any") };
    json!({"name": name, "text": text, "min": min, "max": max, "step": step, "unit": unit, "value": value})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given<'a>(shape: &'a Shape, server: &'a Server, contexts: &'a [u64]) -> Given<'a> {
        let accounting = Accounting::DeviceOnly;
        Given { shape, server, contexts, accounting, ratios: None, target: None }
    }

    /// What stands in the page for GIVEN.
    fn inside(page: &str) -> Value {
        let (_, from) = page.split_once("contexts, accounting, given_ratios, sliders } = ").unwrap();
        serde_json::Deserializer::from_str(from).into_iter().next().unwrap().unwrap()
    }

    #[test]
    fn a_page_asks_nobody_and_names_stay_names() {
        let mut shape = Shape::preset("llama-3.1-8b").unwrap();
        shape.name = "</script><b>mine".to_owned();
        let server = Server::default();
        let page = super::page(&given(&shape, &server, &[4096, 8192]));
        assert!(!page.contains("</script><b>") && page.contains("\\u003c/script>\\u003cb>mine"), "{page}");
        for outside in ["http:", "https:", "src=", "url(", "GIVEN", "<link"] {
            assert!(!page.contains(outside), "{outside}");
        }
        // A preset is there once.
        let preset = Shape::preset("qwen3-32b").unwrap();
        let page = super::page(&given(&preset, &server, &[4096]));
        assert_eq!(page.matches("\"name\":\"qwen3-32b\"").count(), 1);
        assert!(page.contains("\"contexts\":[4096]"));
    }

    /// Out of the bounds of the sliders, between their steps, and both.
    #[test]
    fn sliders_can_stand_at_what_is_given() {
        let mut shape = Shape::preset("llama-3.1-405b").unwrap();
        shape.weight_bits = 4.1;
        let server = Server {
            hbm_bytes: 1128e9,
            alpha: 0.123_45,
            link_rate: 0.5e9,
            ddr_rate: 76.8e9,
            batch: 512.0,
            read_fraction: 0.001,
            ceiling: Some(1e6),
            device_bytes: 4096e9,
            dram_price: 3.0,
        };
        let mut ratios = Ratios::printed();
        (ratios[1].kv, ratios[2].weights) = (4096.0, 1.23456);
        let given = Given { ratios: Some(ratios), target: Some(0.1), ..given(&shape, &server, &[4096]) };
        let inside = inside(&page(&given));
        assert_eq!(inside["dram_price"], 3.0);
        let shown = |name: &str| {
            let all = inside["sliders"].as_array().unwrap();
            let slider = all.iter().find(|slider| slider["name"] == name).unwrap();
            let [value, min, max] = ["value", "min", "max"].map(|of| slider[of].as_f64().unwrap());
            assert!((min..=max).contains(&value), "{slider}");
            if let Some(step) = slider["step"].as_f64() {
                let steps = (value - min) / step;
                assert!((steps - steps.round()).abs() < 1e-9, "{slider}");
            }
            value
        };
        for (name, value) in [
            ("hbm", 1128.0),
            ("alpha", 0.123_45),
            ("link", 0.5),
            ("ddr", 76.8),
            ("batch", 512.0),
            ("f_rd", 0.001),
            ("ceiling", 1e6),
            ("device", 4096.0),
            ("weight_bits", 4.1),
            ("gcomp_kv", 4096.0),
            ("gcomp_weights", 1.1),
            ("trace_kv", 2.0),
            ("trace_weights", 1.234_56),
            ("target", 0.1),
        ] {
            assert!((shown(name) - value).abs() < 1e-9, "{name}");
        }
        // The paper's stay as they are.
        let usual = super::tests::inside(&served().unwrap());
        assert!(usual["sliders"].as_array().unwrap().iter().all(|slider| slider["step"].is_number()));
    }
}
