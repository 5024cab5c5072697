//! The image recipes when something is missing.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

/// Runs a recipe with an empty cache and with `df` saying that `mib` are free.
fn with_free(recipe: &str, mib: u64) -> (bool, String) {
    let folder = tempfile::tempdir().unwrap();
    let df = folder.path().join("df");
    let script = format!("#!/bin/sh\necho header\necho disk 1 1 {} 1% /\n", mib * 1024);
    fs::write(&df, script).unwrap();
    fs::set_permissions(&df, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let output = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../images").join(recipe))
        .env("PATH", path)
        .env("LAMINA_CACHE", folder.path().join("cache"))
        // Nowhere to fetch packages from: a build that is not refused for lack of room stops here.
        .env("LAMINA_MIRROR", "http://127.0.0.1:9/none")
        .output()
        .unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn a_build_that_would_fill_the_disk_is_refused_with_the_room_it_needs() {
    for recipe in ["guest", "tools", "extras", "workloads", "python", "virtiofsd"] {
        let (built, said) = with_free(recipe, 37);
        assert!(!built, "{said}");
        assert!(said.contains("only 37 MiB are free") && said.contains("LAMINA_CACHE"), "{said}");
    }
}
