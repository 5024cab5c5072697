//! Guests that run a script by `lamina boot`, and what the script says of tensors and views.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use lamina_run::judge::Judge;
use lamina_run::{bundled, programs};

/// Views of every kind.
pub(crate) const VIEWS: [&str; 4] = ["full", "e8m3", "e8m3+g2:packed", "fp8_e4m3fn"];
/// What every script begins with.
pub(crate) const BEGIN: &str = "#!/bin/sh\nfail() { echo \"FAILED: $*\"; dmesg | tail -n 20; exit 1; }\n";
/// The tensor of the model that is written.
pub(crate) const WRITTEN: &str = "tok_embeddings.weight";
/// By how much what is written is rotated.
pub(crate) const ROTATION: u64 = 1000;

pub(crate) fn model() -> PathBuf {
    bundled().expect("start the tests through ./x test").remove(0)
}

/// The base window, and every view.
pub(crate) fn everything() -> impl Iterator<Item = &'static str> {
    VIEWS.into_iter().chain(["base"])
}

/// The beginning of a script for a guest that has no CXL and no serial port for requests, and in
/// which `check` holds.
pub(crate) fn without_cxl(check: &str) -> String {
    format!(
        "{BEGIN}[ -z \"$(ls /sys/bus/cxl/devices 2>/dev/null)\" ] || fail 'there is CXL'\n\
         [ -z \"$(ls /sys/class/virtio-ports 2>/dev/null)\" ] || fail 'there is a serial port'\n{check}"
    )
}

/// Runs a script in a guest by `lamina boot` and returns what it said.
pub(crate) fn boot(folder: &Path, script: &str, options: &[&str]) -> String {
    let path = folder.join("script.sh");
    std::fs::write(&path, format!("{script}\nexit 7\n")).unwrap();
    let mut command = Command::new(programs::lamina().unwrap());
    command.arg("boot").args(options).arg("--script").arg(&path);
    let said = finish(command);
    // Of what a script does not wait for, too.
    assert!(!said.contains("FAILED"), "{said}");
    said
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
pub(crate) fn reported<'l>(said: &'l str, name: &str) -> &'l str {
    let found = said.lines().find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(' '));
    found.unwrap_or_else(|| panic!("the guest did not tell {name}: {said}"))
}

/// The value of the line `name value` of one of several guests.
pub(crate) fn reported_by<'l>(said: &'l str, guest: &str, name: &str) -> &'l str {
    let line = format!("{guest}: {name}");
    reported(said, &line)
}

/// Has the script tell a view's digest.
pub(crate) fn sum(script: &mut String, name: &str, tensor: &str, view: &str) {
    writeln!(
        script,
        "sum=$(lamina-shim sum {tensor} {view}) || fail sum; echo \"{name} $(echo $sum | cut -c1-64)\""
    )
    .unwrap();
}

/// Has the script tell the digests of a tensor in everything, as `name-view`.
pub(crate) fn sums(script: &mut String, name: &str, tensor: &str) {
    for view in everything() {
        sum(script, &format!("{name}-{view}"), tensor, view);
    }
}

/// Holds what a script told of a tensor, rotated by so much, against the reference.
pub(crate) fn right(said: &str, judge: &Judge, name: &str, tensor: &str, rotation: u64) {
    for view in everything() {
        let want = judge.sha256(tensor, view, rotation).unwrap();
        assert_eq!(reported(said, &format!("{name}-{view}")), want, "{tensor} {view}");
    }
}

/// Has the script tell the digests of every tensor in everything, by one program: in a guest that
/// is emulated each takes longer to begin than to load a view.
pub(crate) fn sum_all(script: &mut String) {
    script.push_str("lamina-shim sum --all || fail sum\n");
}

/// Holds what [`sum_all`] told against the reference.
pub(crate) fn all_right(said: &str, judge: &Judge) {
    for tensor in judge.names() {
        for view in everything() {
            let of_view = format!("  {tensor} {view}");
            let told = said.lines().find_map(|line| line.trim_end().strip_suffix(&of_view));
            let want = judge.sha256(tensor, view, 0).unwrap();
            assert_eq!(told, Some(want.as_str()), "{tensor} {view}: {said}");
        }
    }
}

/// What is written to a tensor, as an option `--put`.
pub(crate) fn new(folder: &Path, judge: &Judge, tensor: &str) -> String {
    let new = folder.join("new");
    std::fs::write(&new, judge.full(tensor, ROTATION).unwrap()).unwrap();
    format!("{}=/new", new.display())
}

/// Has the script write a tensor with what [`new`] put into the guest, and flush.
pub(crate) fn write(script: &mut String, tensor: &str) {
    writeln!(script, "lamina-shim write {tensor} </new && lamina-shim flush || fail flush").unwrap();
}

/// Has the script see that it cannot have a tensor of another guest.
pub(crate) fn hidden(script: &mut String, tensor: &str, view: &str) {
    writeln!(
        script,
        "lamina-shim sum {tensor} {view} 2>/why && fail 'the other guest is seen'\n\
         grep -q {tensor} /why || fail \"$(cat /why)\""
    )
    .unwrap();
}

/// Boots a guest by this way on a device with the model, whose script reads, writes and asks, after
/// `prologue` and before `more`, and holds what it said against the reference. The guest has the
/// programs `put` as well. Returns what else was said.
pub(crate) fn reads_writes_and_asks(
    attach: &str,
    prologue: &str,
    more: &str,
    put: &[&str],
    judge: &Judge,
) -> String {
    let folder = tempfile::tempdir().unwrap();
    let script = format!("{prologue}lamina-shim up || fail up\n{}{}{more}", read_and_write(), asks());
    let (model, run) = (model(), folder.path().join("run"));
    let new = new(folder.path(), judge, WRITTEN);
    let views = VIEWS.join(",");
    let mut options = vec!["--attach", attach, "--model", model.to_str().unwrap(), "--views", &views];
    options.extend(["--run-dir", run.to_str().unwrap(), "--put", &new]);
    options.extend(put.iter().flat_map(|program| ["--put", program]));
    let said = boot(folder.path(), &script, &options);
    all_right(&said, judge);
    right(&said, judge, "after", WRITTEN, ROTATION);
    assert_eq!(reported(&said, "made"), judge.sha256(WRITTEN, "e8m1", ROTATION).unwrap());
    assert_eq!(reported(&said, "stats"), "1");
    said
}

/// A view made by the guest, refusals in the device's words, several programs at once, and an
/// answer of many bytes.
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

/// Has the script tell the digests of every tensor in everything, write one tensor, and tell its
/// digests again.
fn read_and_write() -> String {
    let mut script = String::new();
    sum_all(&mut script);
    write(&mut script, WRITTEN);
    sums(&mut script, "after", WRITTEN);
    script
}
