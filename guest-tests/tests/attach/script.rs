//! Guests that run a script by `lamina boot`, and what the script says of tensors and views.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use lamina_guest_tests::judge::Judge;
use lamina_guest_tests::{bundled, programs};

/// Views of every kind.
pub(crate) const VIEWS: [&str; 4] = ["full", "e8m3", "e8m3+g2:packed", "fp8_e4m3fn"];
/// The tensor that is written.
pub(crate) const WRITTEN: &str = "tok_embeddings.weight";

pub(crate) fn model() -> PathBuf {
    bundled().expect("start the tests through ./x test").remove(0)
}

/// Runs a script in a guest by `lamina boot` and returns what it said.
fn boot(folder: &Path, script: &str, options: &[&str]) -> String {
    let path = folder.join("script.sh");
    std::fs::write(&path, format!("{script}\nexit 7\n")).unwrap();
    let mut command = Command::new(programs::lamina().unwrap());
    command.arg("boot").args(options).arg("--script").arg(&path);
    finish(command)
}

/// Runs a `lamina boot` whose script ends with status 7.
pub(crate) fn finish(mut command: Command) -> String {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let why = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{said}\n{why}");
    said
}

/// The value of the line `name value`.
pub(crate) fn told<'l>(said: &'l str, name: &str) -> &'l str {
    let found = said.lines().find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(' '));
    found.unwrap_or_else(|| panic!("the guest did not tell {name}: {said}"))
}

/// The value of the line `name value` of one of several guests.
pub(crate) fn told_by<'l>(said: &'l str, guest: &str, name: &str) -> &'l str {
    let line = format!("{guest}: {name}");
    told(said, &line)
}

/// Has the script tell a view's digest.
pub(crate) fn sum(script: &mut String, name: &str, tensor: &str, view: &str) {
    writeln!(
        script,
        "sum=$(lamina-shim sum {tensor} {view}) || fail sum; echo \"{name} $(echo $sum | cut -c1-64)\""
    )
    .unwrap();
}

/// Boots a guest by this way on a device with the model, whose script reads, writes and asks, after `prologue` and before `more`, and holds what it said against the
/// reference. The guest has the programs `put` as well. Returns what else was said.
pub(crate) fn reads_writes_and_asks(
    attach: &str,
    prologue: &str,
    more: &str,
    put: &[&str],
    judge: &Judge,
) -> String {
    let folder = tempfile::tempdir().unwrap();
    let script = format!("{prologue}lamina-shim up || fail up\n{}{}{more}", read_and_write(judge), asks());
    let (model, run, new) = (model(), folder.path().join("run"), new(folder.path(), judge));
    let views = VIEWS.join(",");
    let mut options = vec!["--attach", attach, "--model", model.to_str().unwrap(), "--views", &views];
    options.extend(["--run-dir", run.to_str().unwrap(), "--put", &new]);
    options.extend(put.iter().flat_map(|program| ["--put", program]));
    let said = boot(folder.path(), &script, &options);
    right(&said, judge);
    assert_eq!(told(&said, "made"), judge.sha256(WRITTEN, "e8m1", 1000).unwrap());
    assert_eq!(told(&said, "stats"), "1");
    said
}

/// A view made by the guest, refusals in the device's words, several programs at once, and an answer of many bytes.
fn asks() -> String {
    let mut script = format!("lamina-shim view {WRITTEN} e8m1 >/dev/null || fail view\n");
    sum(&mut script, "made", WRITTEN, "e8m1");
    script.push_str(
        "lamina-shim flush --offset 18446744073709551615 --length 1 2>/why && fail 'flushed past the end'\n\
         grep -q 'pass the end' /why || fail \"$(cat /why)\"\n\
         for n in 1 2 3 4 5 6; do lamina-shim flush || echo 'FAILED: a flush' & done; wait\n\
         echo \"stats $(lamina-shim stats | grep -c '\"base_writes\"')\"\n",
    );
    script
}

/// Has the script tell the digests of every tensor in every view, write one tensor with what [`new`] put into the guest, flush, and tell its digests again.
fn read_and_write(judge: &Judge) -> String {
    let mut script = String::new();
    for (n, name) in judge.names().enumerate() {
        for view in VIEWS.iter().chain(&["base"]) {
            sum(&mut script, &format!("before{n}-{view}"), name, view);
        }
    }
    writeln!(script, "lamina-shim write {WRITTEN} </new && lamina-shim flush || fail flush").unwrap();
    for view in VIEWS.iter().chain(&["base"]) {
        sum(&mut script, &format!("after-{view}"), WRITTEN, view);
    }
    script
}

/// What is written, as an option `--put`.
fn new(folder: &Path, judge: &Judge) -> String {
    let new = folder.join("new");
    std::fs::write(&new, judge.full(WRITTEN, 1000).unwrap()).unwrap();
    format!("{}=/new", new.display())
}

/// Holds what such a script said against the reference.
fn right(said: &str, judge: &Judge) {
    assert!(!said.contains("FAILED"), "{said}");
    for (n, name) in judge.names().enumerate() {
        for view in VIEWS.iter().chain(&["base"]) {
            let want = judge.sha256(name, view, 0).unwrap();
            assert_eq!(told(said, &format!("before{n}-{view}")), want, "{name} {view}");
        }
    }
    for view in VIEWS.iter().chain(&["base"]) {
        assert_eq!(
            told(said, &format!("after-{view}")),
            judge.sha256(WRITTEN, view, 1000).unwrap(),
            "{view}"
        );
    }
}
