//! `./x bench codec` as a person or a script runs it, without what it would install.

use std::process::Output;

use lamina_run::bundled;
use serde_json::Value;

/// `./x bench codec --no-peers`, for a second a table.
fn without_peers(arguments: &[&str]) -> Output {
    let mut command = crate::bench();
    command.env("LAMINA_CACHE", "/dev/null/cache");
    command.args(["codec", "--no-peers", "--seconds", "1"]).args(arguments).output().unwrap()
}

fn bench(arguments: &[&str]) -> Output {
    let model = bundled().expect("start the tests through ./x test").remove(0);
    without_peers(&[&["--model", model.to_str().unwrap()], arguments].concat())
}

/// The ratio of a codec's row.
fn ratio(table: &Value, codec: &str) -> f64 {
    let rows = table["rows"].as_array().unwrap();
    let row = rows.iter().find(|row| row["codec"] == codec).unwrap_or_else(|| panic!("{codec}: {table}"));
    assert_eq!(row["state"], "measured", "{row}");
    row["ratio"].as_f64().unwrap()
}

#[test]
fn a_script_gets_json_in_which_the_bundled_weights_shrink() {
    let output = bench(&["--json"]);
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let [table, mxfp4] = report["tables"].as_array().unwrap().as_slice() else { panic!("{report}") };
    assert_eq!(mxfp4["format"], "fp4_e2m1");
    assert!(mxfp4["expanded"][0]["gbs"].as_f64() > Some(0.0) && table["expanded"].is_null(), "{report}");
    assert_eq!(
        (table["file"].as_str(), table["format"].as_str()),
        (Some("stories260K-bf16.safetensors"), Some("bf16"))
    );
    let ratio = |codec: &str| ratio(table, codec);
    assert!((ratio("memcpy") - 1.0).abs() < 1e-12);
    assert!(ratio("words zstd-3") > ratio("words lz4"));
    assert!(ratio("lamina lz4") > ratio("words lz4"));
    assert!(ratio("lamina tree") > ratio("lamina zstd") && ratio("lamina zstd") > ratio("lamina lz4"));
}

#[test]
fn a_person_gets_a_table_and_a_clear_no() {
    let output = bench(&[]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success() && text.contains("lamina tree") && text.contains("decode GB/s"),
        "{text}"
    );
    for (arguments, said) in [(["--format", "fp16"], "fp16"), (["--format", "float"], "formats are")] {
        let output = bench(&arguments);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && output.stdout.is_empty(), "{error}");
        assert!(error.contains(said) && !error.contains("panicked"), "{error}");
    }
}

#[test]
fn by_default_the_bundled_weights_and_each_side_of_the_cache_have_a_table_and_nothing_is_fetched() {
    let output = without_peers(&["--json"]);
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let [weights, mxfp4, keys, values] = report["tables"].as_array().unwrap().as_slice() else {
        panic!("{report}")
    };
    assert_eq!((&weights["cache"], &mxfp4["cache"]), (&Value::Null, &Value::Null));
    assert_eq!((&keys["cache"]["side"], &values["cache"]["side"]), (&"k".into(), &"v".into()));
    for table in [keys, values] {
        assert_eq!(table["file"], "stories260K-kv-bf16.safetensors");
        for codec in ["lz4", "zstd", "tree"] {
            let (blocks, windows) = (format!("lamina {codec}"), format!("lamina {codec}, kv"));
            assert!(ratio(table, &windows) > 1.05 * ratio(table, &blocks), "{table}");
        }
    }
    assert_eq!(report["absent"], Value::Array(Vec::new()));
}

#[test]
fn a_cache_of_another_shape_is_refused() {
    for (layout, code, said) in
        [("33", 1, "rows of 33"), ("32,300", 2, "1 to 256 tokens"), ("rows", 2, "1024,128")]
    {
        let output = without_peers(&["--kv", layout]);
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(code) && error.contains(said), "{layout}: {error}");
    }
}
