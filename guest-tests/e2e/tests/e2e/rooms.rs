//! Who may use whom: crates downwards only, and modules of a crate in no circle.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::root;

/// All crates, and what each may use of ours. `docs/architecture.md` says what each is.
const ROOMS: [(&str, &[&str]); 19] = [
    ("lamina-abi", &[]),
    ("lamina-codec", &[]),
    ("lamina-store", &["lamina-codec"]),
    ("lamina-device", &["lamina-abi", "lamina-codec", "lamina-store"]),
    ("lamina-files", &["lamina-codec", "lamina-device"]),
    (
        "lamina-serve",
        &["lamina-abi", "lamina-codec", "lamina-device", "lamina-files", "lamina-pool", "lamina-store"],
    ),
    // It is told numbers and files, and asks nobody.
    ("lamina-model", &[]),
    ("lamina-qemu", &["lamina-abi"]),
    ("lamina-shim", &["lamina-abi"]),
    (
        "lamina",
        &[
            "lamina-abi",
            "lamina-codec",
            "lamina-device",
            // It runs a model for advice on its precisions.
            "lamina-llama",
            "lamina-model",
            "lamina-pool",
            "lamina-qemu",
            "lamina-serve",
            "lamina-store",
        ],
    ),
    // It is for those who want nothing else of ours.
    ("lamina-pool", &[]),
    ("lamina-models", &[]),
    // What judges the device shares no code with it.
    ("lamina-reference", &[]),
    ("lamina-llama", &[]),
    ("lamina-skipped", &[]),
    ("lamina-guest", &["lamina-abi", "lamina-llama", "lamina-pool", "lamina-shim"]),
    ("lamina-run", &["lamina-guest", "lamina-llama", "lamina-qemu", "lamina-reference"]),
    (
        "lamina-bench",
        &[
            "lamina-abi",
            "lamina-codec",
            "lamina-device",
            "lamina-guest",
            "lamina-llama",
            "lamina-model",
            "lamina-pool",
            "lamina-qemu",
            "lamina-run",
            "lamina-store",
        ],
    ),
    ("lamina-e2e", &[]),
];

/// Folders of crates in which modules may be no circle.
const SOURCES: [&str; 13] = [
    "device/codec",
    "device/store",
    "device/core",
    "device/files",
    "device/serve",
    "device/model",
    "device/lamina",
    "pool",
    "driver-shim",
    "qemu",
    "guest-tests/llama",
    "guest-tests/run",
    "guest-tests/bench",
];

/// Those of them in which files that lie side by side may be a circle still.
const FLAT_CIRCLES: [&str; 3] = ["device/store", "device/lamina", "guest-tests/llama"];

/// What the codec may use of others: it is for those who want nothing else.
const OF_CODEC: [&str; 7] =
    ["crc-fast", "lz4_flex", "multiversion", "proptest", "serde", "thiserror", "zstd"];

/// What each package of the workspace uses, outside its tests.
fn uses() -> BTreeMap<String, BTreeSet<String>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    metadata["packages"]
        .as_array()
        .unwrap()
        .iter()
        .map(|package| {
            let all = package["dependencies"].as_array().unwrap();
            let used = all.iter().filter(|dependency| dependency["kind"] != "dev");
            (text(&package["name"]), used.map(|dependency| text(&dependency["name"])).collect())
        })
        .collect()
}

#[test]
fn crates_use_those_below_them_and_no_others() {
    let uses = uses();
    let known: BTreeMap<_, _> = ROOMS.into_iter().collect();
    let mut wrong: Vec<_> = uses
        .keys()
        .filter(|package| !known.contains_key(package.as_str()))
        .map(|package| format!("{package} has no room"))
        .collect();
    for (room, may) in ROOMS {
        for used in uses[room].iter().filter(|used| uses.contains_key(*used)) {
            if !may.contains(&used.as_str()) {
                wrong.push(format!("{room} uses {used}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let of_codec: Vec<_> = uses["lamina-codec"].iter().map(String::as_str).collect();
    assert!(of_codec.iter().all(|used| OF_CODEC.contains(used)), "{of_codec:?}");
}

/// A crate's modules of the first level: which others each names, and where.
type Modules = BTreeMap<String, BTreeMap<String, PathBuf>>;

/// The names that `text` takes from its crate's root: of `crate::NAME` and of `crate::{NAME, ...}`.
fn named(text: &str, root: &str) -> BTreeSet<String> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let word = |text: &str| text.chars().take_while(|c| is_word(*c)).collect::<String>();
    let mut names = BTreeSet::new();
    for (at, _) in text.match_indices(root) {
        // Not of a longer word, nor of `super::super::` where `super::` is meant.
        if text[..at].ends_with(|c| is_word(c) || c == ':') {
            continue;
        }
        let rest = text[at + root.len()..].trim_start();
        let Some(group) = rest.strip_prefix('{') else {
            names.insert(word(rest));
            continue;
        };
        let (mut depth, mut begins) = (0, true);
        for (at, c) in group.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => begins = true,
                c if begins && is_word(c) => {
                    names.insert(word(&group[at..]));
                    begins = false;
                }
                _ => {}
            }
        }
    }
    names
}

/// Source without comments, and without what is only compiled for tests at the end of a file.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

/// Whether a file, or its folder, is named for tests.
fn is_test(path: &Path) -> bool {
    let named = |name: &str| name.contains("test");
    let folder = path.parent().and_then(Path::file_name);
    [path.file_name(), folder].into_iter().flatten().any(|name| name.to_str().is_some_and(named))
}

fn modules(source: &Path) -> Modules {
    let of = |path: &Path| {
        let inside = path.strip_prefix(source).unwrap();
        let first = Path::new(inside.components().next().unwrap().as_os_str()).to_owned();
        (first.with_extension("").to_str().unwrap().to_owned(), inside.to_owned())
    };
    let all: Vec<_> = files(source).into_iter().filter(|path| !is_test(path)).collect();
    let known: BTreeSet<String> = all.iter().map(|path| of(path).0).collect();
    let mut modules = Modules::new();
    for path in &all {
        let (module, inside) = of(path);
        let text = code(&fs::read_to_string(path).unwrap());
        let is_own = path.file_name().is_some_and(|name| name == "mod.rs");
        let depth = inside.components().count() - usize::from(is_own);
        let mut names = named(&text, "crate::");
        names.extend(named(&text, &"super::".repeat(depth)));
        for name in names.into_iter().filter(|name| *name != module && known.contains(name)) {
            modules.entry(module.clone()).or_default().insert(name, inside.clone());
        }
    }
    // The crate's root names all of them.
    modules.retain(|module, _| module != "lib" && module != "main");
    modules
}

/// Modules that each can be reached from and lead back to `from`.
fn circle(modules: &Modules, from: &str) -> BTreeSet<String> {
    let reached = |from: &str| {
        let (mut reached, mut next) = (BTreeSet::new(), vec![from.to_owned()]);
        while let Some(module) = next.pop() {
            for name in modules.get(&module).into_iter().flat_map(BTreeMap::keys) {
                if reached.insert(name.clone()) {
                    next.push(name.clone());
                }
            }
        }
        reached
    };
    reached(from).into_iter().filter(|module| reached(module).contains(from)).collect()
}

#[test]
fn modules_are_in_no_circle() {
    for room in SOURCES {
        let source = root().join(room).join("src");
        let modules = modules(&source);
        assert!(modules.values().map(BTreeMap::len).sum::<usize>() > 5, "{room}: nothing is named");
        // One whose files are its tests alone has no folder.
        let has_folder = |module: &str| {
            let folder = source.join(module);
            folder.is_dir() && files(&folder).iter().any(|path| !is_test(path))
        };
        let may_be_flat = FLAT_CIRCLES.contains(&room);
        let mut is_flat = false;
        for module in modules.keys() {
            let circle = circle(&modules, module);
            assert!(
                circle.is_empty() || may_be_flat && !has_folder(module),
                "{room}: {module} is in the circle of {circle:?}, by {:?}",
                modules[module]
            );
            is_flat |= !circle.is_empty();
        }
        assert_eq!(is_flat, may_be_flat, "{room} has no circle any more");
    }
}

#[test]
fn circles_are_found() {
    let names = |text: &str| named(text, "crate::").into_iter().collect::<Vec<_>>();
    assert_eq!(names("use crate::{a::{b, c}, d, e::*};\n crate::f::g() + mycrate::h"), ["a", "d", "e", "f"]);
    assert_eq!(named("super::super::a; super::b", "super::super::").into_iter().collect::<Vec<_>>(), ["a"]);
    let to = |names: &[&str]| names.iter().map(|name| ((*name).to_owned(), PathBuf::new())).collect();
    let modules: Modules = [("a", &["b"][..]), ("b", &["c"]), ("c", &["a", "d"]), ("d", &[])]
        .map(|(module, names)| (module.to_owned(), to(names)))
        .into();
    assert_eq!(circle(&modules, "a").len(), 3);
    assert!(circle(&modules, "d").is_empty());
}
