//! What holds of all documents: their length, their links, and the paths that they name.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use super::read;
use crate::root;

/// Documents and how many words they may have, tables and commands included.
const MAX_WORDS: [(&str, usize); 3] =
    [("README.md", 1000), ("docs/tutorial.md", 1500), ("docs/architecture.md", 2000)];
/// The project's folders, by which a path in a text is known.
const FOLDERS: [&str; 9] =
    ["device", "docs", "driver-shim", "fuzz", "guest-tests", "images", "pool", "python", "qemu"];

#[test]
fn documents_keep_to_their_length() {
    for (document, most) in MAX_WORDS {
        let words = read(&root().join(document)).split_whitespace().count();
        assert!(words <= most, "{document} has {words} words, and may have {most}");
    }
}

#[test]
fn links_between_documents_lead_somewhere() {
    let mut wrong = Vec::new();
    for document in documents() {
        let text = read(&document);
        for target in links(&text) {
            if target.contains("://") {
                continue;
            }
            let (path, anchor) = target.split_once('#').map_or((target, None), |(path, at)| (path, Some(at)));
            let file = if path.is_empty() { document.clone() } else { document.with_file_name(path) };
            let is_there = match anchor {
                None => file.exists(),
                Some(anchor) => file.is_file() && anchors(&read(&file)).contains(anchor),
            };
            if !is_there {
                wrong.push(format!("{}: {target}", document.display()));
            }
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
}

#[test]
fn no_document_names_a_path_that_is_missing() {
    let mut wrong = Vec::new();
    for document in documents() {
        for path in paths(&read(&document)) {
            if !root().join(&path).exists() {
                wrong.push(format!("{}: {path}", document.display()));
            }
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
}

#[test]
fn the_rows_of_a_table_follow_each_other() {
    let mut wrong = Vec::new();
    for document in documents() {
        for line in loose_rows(&read(&document)) {
            wrong.push(format!("{}:{line}", document.display()));
        }
    }
    assert_eq!(wrong, Vec::<String>::new());
}

/// Every text for readers.
fn documents() -> Vec<PathBuf> {
    let outside = ["README.md", "guest-tests/models/README.md", "python/README.md"];
    let mut found = outside.map(|document| root().join(document)).to_vec();
    let mut folders = vec![root().join("docs")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                found.push(path);
            }
        }
    }
    found.sort();
    assert!(found.len() > 5, "{found:?}");
    found
}

/// The targets of a text's links: what stands in round brackets behind square ones.
fn links(text: &str) -> Vec<&str> {
    let behind = text.split("](").skip(1);
    behind.filter_map(|rest| rest.split_once(')')).map(|(target, _)| target).collect()
}

/// What a text's headings are called in links, as GitHub has it.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let anchor = |line: &str| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

/// The paths into the project's folders that a text names.
fn paths(text: &str) -> BTreeSet<String> {
    let is_path = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '_' | '-');
    let words = text.split(|c: char| !is_path(c) && c != '~' && c != '$');
    let words = words.map(|word| word.trim_end_matches(['.', '/', '-']));
    let named = words.filter(|word| {
        Path::new(word).components().count() > 1
            && FOLDERS
                .iter()
                .any(|folder| word.strip_prefix(folder).is_some_and(|rest| rest.starts_with('/')))
    });
    named.map(str::to_owned).collect()
}

/// The numbers of the lines that begin with `|` and are in no table: no row is before them, and no
/// `|---|` behind. They are shown as text.
fn loose_rows(text: &str) -> Vec<usize> {
    let (mut loose, mut in_code, mut in_table) = (Vec::new(), false, false);
    let mut lines = (1..).zip(text.lines().map(str::trim_start)).peekable();
    while let Some((number, line)) = lines.next() {
        in_code ^= line.starts_with("```");
        let is_row = !in_code && line.starts_with('|');
        let is_head = lines.peek().is_some_and(|(_, next)| next.starts_with("|---"));
        if is_row && !in_table && !is_head {
            loose.push(number);
        }
        in_table = is_row;
    }
    loose
}

#[test]
fn loose_rows_are_found() {
    let table = "| a | b |\n|---|---|\n| 1 | 2 |\n";
    let code = "```text\n| 3 | 4 |\n```\n";
    assert_eq!(loose_rows(&format!("{table}\n{code}\n{table}")), [0; 0]);
    assert_eq!(loose_rows(&format!("{table}\n| 5 | 6 |\n| 7 | 8 |\n\n{table}")), [5]);
}

#[test]
fn links_headings_and_paths_are_found() {
    assert_eq!(links("a [b](c.md#d-e) and ![f](g.svg)"), ["c.md#d-e", "g.svg"]);
    let found = anchors("# A, b\n## What is *not* promised\ntext\n");
    assert!(found.contains("a-b") && found.contains("what-is-not-promised"), "{found:?}");
    let found = paths("`docs/a.md`, (qemu/src/lib.rs). ~/device/x $HOME/docs/y docs, and x/device/z");
    assert_eq!(found.into_iter().collect::<Vec<_>>(), ["docs/a.md", "qemu/src/lib.rs"]);
}
