//! `./x bench store`: that every kind of data is stored in every way, first and again, and told.

use serde_json::Value;

#[test]
fn stores_of_each_kind_by_each_way_are_told_beside_plain_and_tmpfs() {
    let output = crate::bench().args(["store", "--mib", "2", "--rounds", "1", "--json"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["bytes"], 2 << 20);
    let rows = report["rows"].as_array().unwrap();
    let threads = report["threads"].as_u64().unwrap();
    // Four kinds by four ways, and by two with several at once; into a hole and over it.
    assert_eq!(rows.len(), 4 * if threads > 1 { 6 } else { 4 } * 2);
    for row in rows {
        let is_alone = row["way"].as_str().unwrap().starts_with("device");
        assert!(row["lamina"].as_f64() > Some(0.0) && row["plain"].as_f64() > Some(0.0), "{row}");
        assert!(row["of_plain"].as_f64() > Some(0.0), "{row}");
        assert_eq!(row["observed"].as_f64().is_some(), is_alone, "{row}");
    }
    let ratio = |data: &str| {
        let found = report["data"].as_array().unwrap().iter().find(|found| found["data"] == data);
        found.unwrap()["ratio"].as_f64().unwrap()
    };
    assert!(ratio("bf16") > 1.2 && ratio("KV") > 1.2 && ratio("compressible") > 1.5, "{report}");
    assert!((0.9..=1.0).contains(&ratio("incompressible")), "{report}");
}

#[test]
fn nothing_is_measured_of_no_bytes_no_rounds_or_a_codec_that_is_none() {
    for none in [["--mib", "0"], ["--rounds", "0"], ["--codec", "rar"]] {
        let output = crate::bench().arg("store").args(none).output().unwrap();
        let why = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && why.contains("invalid value"), "{none:?}: {why}");
    }
}
