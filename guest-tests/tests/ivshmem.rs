//! Guests that see the device as shared memory of PCI devices: no CXL in them, and no serial port for requests.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use lamina_guest_tests::{bundled, judge::Judge, programs};

const VIEWS: [&str; 4] = ["full", "e8m3", "e8m3+g2:packed", "fp8_e4m3fn"];

/// What every script begins with: that there is nothing but the shared memory.
const PROLOGUE: &str = r#"#!/bin/sh
fail() { echo "FAILED: $*"; exit 1; }
[ -z "$(ls /sys/bus/cxl/devices 2>/dev/null)" ] || fail "there is CXL"
[ -z "$(ls /sys/class/virtio-ports 2>/dev/null)" ] || fail "there is a serial port"
[ "$(grep -l 0x1110 /sys/bus/pci/devices/*/device | wc -l)" = 3 ] || fail "no shared memory"
"#;

fn model() -> PathBuf {
    bundled().expect("start the tests through ./x test").remove(0)
}

/// Runs a script in a guest by `lamina boot` and returns what it said.
fn boot(folder: &Path, script: &str, options: &[&str]) -> String {
    let path = folder.join("script.sh");
    std::fs::write(&path, format!("{PROLOGUE}{script}\nexit 7\n")).unwrap();
    let mut command = Command::new(programs::lamina().unwrap());
    command.arg("boot").args(options).arg("--script").arg(&path);
    finish(command)
}

fn finish(mut command: Command) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let why = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{said}\n{why}");
    said
}

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

#[test]
fn a_guest_without_cxl_reads_writes_and_flushes_through_the_doorbell() {
    let folder = tempfile::tempdir().unwrap();
    let judge = Judge::new(&[model()]).unwrap();
    let written = "tok_embeddings.weight";
    let new = folder.path().join("new");
    std::fs::write(&new, judge.full(written, 1000).unwrap()).unwrap();
    let names: Vec<&str> = judge.names().collect();
    let mut script = "lamina-shim up || fail up\n".to_owned();
    for (n, name) in names.iter().enumerate() {
        for view in VIEWS.iter().chain(&["base"]) {
            sum(&mut script, &format!("before{n}-{view}"), name, view);
        }
    }
    writeln!(script, "lamina-shim write {written} </new && lamina-shim flush || fail flush").unwrap();
    for view in VIEWS.iter().chain(&["base"]) {
        sum(&mut script, &format!("after-{view}"), written, view);
    }
    // A view made by the guest, refusals in the device's words, several programs at once, and an answer of many bytes.
    writeln!(script, "lamina-shim view {written} e8m1 >/dev/null || fail view").unwrap();
    sum(&mut script, "made", written, "e8m1");
    script.push_str(
        "lamina-shim flush --offset 18446744073709551615 --length 1 2>/why && fail 'flushed past the end'\n\
         grep -q 'pass the end' /why || fail \"$(cat /why)\"\n\
         for n in 1 2 3 4 5 6; do lamina-shim flush || echo 'FAILED: a flush' & done; wait\n\
         echo \"stats $(lamina-shim stats | grep -c '\"base_writes\"')\"\n",
    );
    let put = format!("{}=/new", new.display());
    let (model, run) = (model(), folder.path().join("run"));
    let options = [
        "--attach",
        "ivshmem",
        "--model",
        model.to_str().unwrap(),
        "--views",
        &VIEWS.join(","),
        "--put",
        &put,
        "--run-dir",
        run.to_str().unwrap(),
    ];
    let said = boot(folder.path(), &script, &options);
    assert!(!said.contains("FAILED"), "{said}");
    for (n, name) in names.iter().enumerate() {
        for view in VIEWS.iter().chain(&["base"]) {
            let want = judge.sha256(name, view, 0).unwrap();
            assert_eq!(told(&said, &format!("before{n}-{view}")), want, "{name} {view}");
        }
    }
    for view in VIEWS.iter().chain(&["base"]) {
        assert_eq!(
            told(&said, &format!("after-{view}")),
            judge.sha256(written, view, 1000).unwrap(),
            "{view}"
        );
    }
    assert_eq!(told(&said, "made"), judge.sha256(written, "e8m1", 1000).unwrap());
    assert_eq!(told(&said, "stats"), "1");
}

#[test]
fn a_topology_boots_what_it_says() {
    let folder = tempfile::tempdir().unwrap();
    let judge = Judge::new(&[model()]).unwrap();
    let name = "tok_embeddings.weight";
    let mut script = PROLOGUE.to_owned();
    sum(&mut script, "view", name, "e8m3");
    script.push_str("lamina-shim flush && cat /note && exit 7\n");
    std::fs::write(folder.path().join("script.sh"), script).unwrap();
    std::fs::write(folder.path().join("note"), "put here by the test\n").unwrap();
    // A size that no PCI device has is only refused where it was asked for.
    let file = |capacity: &str| {
        format!(
            "[device]\nmodel = [{:?}]\nviews = [\"e8m3\"]\n{capacity}run-dir = \"run\"\n\n\
             [[guest]]\nattach = \"ivshmem\"\nscript = \"script.sh\"\nput = {{ \"/note\" = \"note\" }}\n",
            model()
        )
    };
    let path = folder.path().join("topology.toml");
    let command = || {
        let mut command = Command::new(programs::lamina().unwrap());
        command.args(["boot", "--topology"]).arg(&path);
        command
    };
    std::fs::write(&path, file("capacity = \"768M\"\n")).unwrap();
    let output = command().output().unwrap();
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && why.contains("power of two"), "{why}");
    std::fs::write(&path, file("")).unwrap();
    let output = command().arg("--cpus=1").output().unwrap();
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && why.contains("cpus"), "{why}");
    let said = finish(command());
    assert_eq!(told(&said, "view"), judge.sha256(name, "e8m3", 0).unwrap());
    assert!(said.contains("put here by the test"), "{said}");
}
