//! `./x bench files`: that each access is measured in each place, or fio is asked for.

use std::process::Command;

#[test]
fn files_are_measured_beside_a_tmpfs_and_another_folder_or_fio_is_asked_for() {
    let beside = tempfile::tempdir().unwrap();
    let mut bench = crate::bench();
    let output =
        bench.args(["files", "--mib", "4", "--rounds", "1", "--beside"]).arg(beside.path()).output().unwrap();
    if Command::new("fio").arg("--version").output().is_err() {
        let why = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && why.contains("Debian's package fio"), "{why}");
        return;
    }
    assert!(output.status.success(), "{output:?}");
    let table = String::from_utf8_lossy(&output.stdout);
    for access in ["writes", "reads"] {
        for order in ["sequential", "random"] {
            for block in ["1 MiB", "4 KiB"] {
                assert!(table.contains(&format!("{order} {access} of {block}")), "{table}");
            }
        }
    }
    assert!(table.contains("an fsync after each") && table.contains("of beside"), "{table}");
    assert_eq!(beside.path().read_dir().unwrap().count(), 0, "nothing is left behind");
}
