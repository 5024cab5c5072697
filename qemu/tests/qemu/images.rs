//! The image recipes when something is missing.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

/// Runs a recipe with an empty cache of this name, and with programs of these scripts in front of
/// others: whether it built, and what it said.
fn with(recipe: &str, cache: &str, programs: &[(&str, &str)]) -> (bool, String) {
    let folder = tempfile::tempdir().unwrap();
    for (program, script) in programs {
        let program = folder.path().join(program);
        fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let output = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../images").join(recipe))
        .env("PATH", path)
        .env("LAMINA_CACHE", folder.path().join(cache))
        // Nowhere to fetch packages from: a build that is not refused for lack of room stops here.
        .env("LAMINA_MIRROR", "http://127.0.0.1:9/none")
        .output()
        .unwrap();
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

/// A `df` that says that so many MiB are free.
fn free(mib: u64) -> String {
    format!("echo header; echo disk 1 1 {} 1% /", mib * 1024)
}

const RECIPES: [&str; 6] = ["guest", "tools", "extras", "workloads", "python", "virtiofsd"];

#[test]
fn a_build_that_would_fill_the_disk_is_refused_with_the_room_it_needs() {
    for recipe in RECIPES {
        let (built, said) = with(recipe, "cache", &[("df", &free(37))]);
        assert!(!built, "{said}");
        assert!(said.contains("only 37 MiB are free") && said.contains("LAMINA_CACHE"), "{said}");
    }
}

#[test]
fn a_cache_that_loaders_cannot_name_is_refused() {
    let caches = ["a cache", "a:cache", "a;cache"];
    for (recipe, cache) in RECIPES.into_iter().flat_map(|recipe| caches.map(|cache| (recipe, cache))) {
        let (built, said) = with(recipe, cache, &[]);
        assert!(!built && said.contains("a space, a colon") && said.contains("LAMINA_CACHE"), "{said}");
    }
}

#[test]
fn a_step_that_fails_without_a_word_is_named() {
    for recipe in RECIPES {
        let (built, said) = with(recipe, "cache", &[("df", &free(1 << 20)), ("mktemp", "exit 3")]);
        assert!(!built && said.matches("of lib.sh failed").count() == 1, "{said}");
        assert!(said.contains("mktemp -d"), "{said}");
    }
}
