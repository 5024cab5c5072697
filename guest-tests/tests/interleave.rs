//! Guests whose base window is an interleave set of CXL memory devices, which their own kernel's decoders put together.
//!
//! QEMU hands each load and store of such a region on by itself, so little is read.

use std::fmt::Write;
use std::process::Command;

use lamina_guest_tests::{bundled, judge::Judge, programs};

/// The value of the line `name value`.
fn told<'l>(said: &'l str, name: &str) -> &'l str {
    let found = said.lines().find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(' '));
    found.unwrap_or_else(|| panic!("the guest did not tell {name}: {said}"))
}

fn sum(script: &mut String, name: &str, tensor: &str, view: &str) {
    writeln!(
        script,
        "sum=$(lamina-shim sum {tensor} {view}) || fail sum; echo \"{name} $(echo $sum | cut -c1-64)\""
    )
    .unwrap();
}

/// Boots a guest on the set: it loads every tensor through the region and in a view, writes one by stores, and loads that again in every view.
fn a_guest_puts_the_set_together(set: &str, ways: usize, granularity: u32) {
    let folder = tempfile::tempdir().unwrap();
    let model = bundled().expect("start the tests through ./x test").remove(0);
    let judge = Judge::new(std::slice::from_ref(&model)).unwrap();
    let names: Vec<&str> = judge.names().collect();
    let (written, views) = ("tok_embeddings.weight", ["full", "e8m3", "e8m3+g2:packed", "fp8_e4m3fn"]);
    let new = folder.path().join("new");
    std::fs::write(&new, judge.full(written, 1000).unwrap()).unwrap();

    let mut script = format!(
        "#!/bin/sh\nfail() {{ echo \"FAILED: $*\"; exit 1; }}\nlamina-shim up || fail up\n\
         region=$(grep -lx {ways} /sys/bus/cxl/devices/region*/interleave_ways) || fail 'no set'\n\
         [ \"$(cat $(dirname $region)/interleave_granularity)\" = {granularity} ] || fail granularity\n"
    );
    for (n, name) in names.iter().enumerate() {
        for view in ["base", "e8m3"] {
            sum(&mut script, &format!("before{n}-{view}"), name, view);
        }
    }
    writeln!(script, "lamina-shim write {written} </new && lamina-shim flush || fail flush").unwrap();
    for view in views.iter().chain(&["base"]) {
        sum(&mut script, &format!("after-{view}"), written, view);
    }
    // All of the devices have moved something, and are modelled.
    script.push_str(
        "lamina-shim stats >/stats && grep -q '\"by\": \"hardware\"' /stats || fail stats\n\
         echo \"devices $(grep -c '\"modelled_gbs\": [0-9]' /stats)\"\nexit 7\n",
    );
    let path = folder.path().join("script.sh");
    std::fs::write(&path, script).unwrap();

    let output = Command::new(programs::lamina().unwrap())
        .args(["boot", "--interleave", set, "--views", &views.join(","), "--put"])
        .arg(format!("{}=/new", new.display()))
        .arg("--model")
        .arg(&model)
        .arg("--run-dir")
        .arg(folder.path().join("run"))
        .arg("--script")
        .arg(&path)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(7), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    for (n, name) in names.iter().enumerate() {
        for view in ["base", "e8m3"] {
            let want = judge.sha256(name, view, 0).unwrap();
            assert_eq!(told(&said, &format!("before{n}-{view}")), want, "{set}: {name} {view}");
        }
    }
    for view in views.iter().chain(&["base"]) {
        let want = judge.sha256(written, view, 1000).unwrap();
        assert_eq!(told(&said, &format!("after-{view}")), want, "{set}: {view}");
    }
    assert_eq!(told(&said, "devices"), ways.to_string());
}

#[test]
fn two_devices_by_lines_of_256_bytes_are_one_window() {
    a_guest_puts_the_set_together("2x256", 2, 256);
}

#[test]
fn four_devices_by_pages_are_one_window() {
    a_guest_puts_the_set_together("4x4K", 4, 4096);
}
