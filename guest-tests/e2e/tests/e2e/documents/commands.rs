//! Runs the shell commands of README.md and of the tutorial, as a reader would: in one shell, one
//! after the other.
//!
//! A block that begins with "```sh" is run. One with "```sh no-test: why" is skipped and counted.
//! The shell's folder has a `./x` that starts the programs of this build; the rest of it is the
//! project's, by links.

use std::{
    fmt::Write,
    fs,
    os::unix::{
        fs::{PermissionsExt, symlink},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use lamina_run::{bundled, judge::Judge, programs};
use rustix::process::{Pid, Signal, kill_process_group};

use super::read;
use crate::root;

/// What a document's commands may take together. They take some 20 s where guests are emulated.
const LIMIT: Duration = Duration::from_secs(300);
/// What a shell that is told to end may take to stop its device.
const END: Duration = Duration::from_secs(30);

/// In place of the project's `x`, which would build another profile and install what is missing.
const X: &str = r#"#!/bin/sh
command=$1
shift
case $command in
run) exec "$RUN" "$@" ;;
boot) exec "$LAMINA" boot "$@" ;;
lamina) exec "$LAMINA" "$@" ;;
build) ;;
*) echo "x: the test has no $command" >&2; exit 2 ;;
esac
"#;

#[test]
fn the_commands_of_the_readme_run() {
    let said = run("README.md");
    assert!(said.contains("every byte was right"), "{said}");
    assert!(said.contains("tok_embeddings.weight"), "a guest lists the tensors: {said}");
}

#[test]
fn the_commands_of_the_tutorial_run_and_do_what_it_says() {
    let said = run("docs/tutorial.md");
    let sums = said.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        let (sum, tensor, view) = (words.next()?, words.next()?, words.next()?);
        (tensor == "tok_embeddings.weight" && view == "e8m3" && sum.len() == 64).then_some(sum)
    });
    let sums: Vec<_> = sums.collect();
    // Before a flush a view may lag behind a store, or not.
    let [first, _, stored, back, guest, again] = sums[..] else { panic!("{said}") };
    let judge = Judge::new(&bundled().unwrap()[..1]).unwrap();
    assert_eq!(first, judge.sha256("tok_embeddings.weight", "e8m3", 0).unwrap());
    assert_ne!(stored, first, "a flush makes the store seen");
    assert_eq!([back, guest, again], [first; 3], "{said}");
    assert!(said.contains("every byte was right"), "{said}");
}

/// Runs what a document has the reader type, and returns what that printed.
fn run(document: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    clone(folder.path());
    let output = folder.path().join("output");
    let file = fs::File::create(&output).unwrap();
    let shim = programs::guest("lamina-shim").expect("start the tests through ./x test");
    let mut command = Command::new("bash");
    command.arg("-c").arg(script(document)).current_dir(folder.path());
    command.env("RUN", programs::host("lamina-run").unwrap()).env("LAMINA", programs::lamina().unwrap());
    command.env("LAMINA_GUEST_PROGRAMS", shim.parent().unwrap()).env("LAMINA_ROOT", root());
    // What is built lies as in a clone of its own.
    command.env_remove("CARGO_TARGET_DIR");
    command.env("LAMINA_CACHE", cache());
    command.env("HOME", folder.path()).env("XDG_RUNTIME_DIR", folder.path().join("run"));
    command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file).process_group(0);
    let mut shell = command.spawn().unwrap();
    let group = Pid::from_child(&shell);
    let (mut begun, mut limit) = (Instant::now(), LIMIT);
    let status = loop {
        if let Some(status) = shell.try_wait().unwrap() {
            break status;
        }
        if begun.elapsed() > limit {
            // Gently first, so that no mount is left behind.
            let signal = if limit == LIMIT { Signal::TERM } else { Signal::KILL };
            // It may end meanwhile.
            let _ = kill_process_group(group, signal);
            (begun, limit) = (Instant::now(), END);
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let said = String::from_utf8_lossy(&fs::read(&output).unwrap()).into_owned();
    assert!(status.success() && limit == LIMIT, "{document}: {status}\n{said}");
    said
}

/// A folder that looks like a clone that was built.
fn clone(folder: &Path) {
    fs::write(folder.join("x"), X).unwrap();
    fs::set_permissions(folder.join("x"), fs::Permissions::from_mode(0o755)).unwrap();
    for name in ["docs", "driver-shim", "guest-tests"] {
        symlink(root().join(name), folder.join(name)).unwrap();
    }
    let shim = programs::guest("lamina-shim").expect("start the tests through ./x test");
    fs::create_dir_all(folder.join("target/guest")).unwrap();
    symlink(shim.parent().unwrap(), folder.join("target/guest/release")).unwrap();
}

/// Where images are kept: the home of the shell is another one.
fn cache() -> PathBuf {
    let of = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    of("LAMINA_CACHE").unwrap_or_else(|| {
        let caches = of("XDG_CACHE_HOME").or_else(|| of("HOME").map(|home| home.join(".cache")));
        caches.expect("HOME is set").join("lamina")
    })
}

/// All blocks of a document that are run, each printed before it is.
fn script(document: &str) -> String {
    let mut script = "set -euo pipefail\n\
        trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n\
        trap 'exit 1' TERM\n"
        .to_owned();
    let mut count = 0;
    for block in blocks(&read(&root().join(document))) {
        let place = format!("{document}:{}", block.line);
        match block.info.split_once("no-test:") {
            Some((_, why)) if !why.trim().is_empty() => {
                lamina_skipped::part(format!("{place}: {}", why.trim()));
            }
            _ => {
                assert_eq!(block.info, "sh", "{place}: write ```sh, or ```sh no-test: WHY");
                count += 1;
                writeln!(script, "echo '--- {place}'\n{}", block.body).unwrap();
            }
        }
    }
    assert!(count > 0, "{document} has commands");
    script
}

/// A fenced block of shell commands.
struct Block {
    /// Where its commands begin.
    line: usize,
    /// What stands behind the fence.
    info: String,
    body: String,
}

/// The blocks whose language is `sh`.
fn blocks(text: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut open: Option<Block> = None;
    for (number, line) in (2..).zip(text.lines()) {
        match (open.as_mut(), line.strip_prefix("```")) {
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (Some(block), None) => block.body.extend([line, "\n"]),
            (None, Some(info)) => {
                open = Some(Block { line: number, info: info.trim().to_owned(), body: String::new() });
            }
            (None, None) => {}
        }
    }
    assert!(open.is_none(), "a block has no end");
    blocks.retain(|block| block.info.split_whitespace().next() == Some("sh"));
    blocks
}

#[test]
fn blocks_of_other_languages_are_not_run() {
    let text = "a\n```sh\none\ntwo\n```\n```text\nno\n```\n```sh no-test: it is long\nthree\n```\n";
    let found = blocks(text);
    let found: Vec<_> =
        found.iter().map(|block| (block.line, block.info.as_str(), block.body.as_str())).collect();
    assert_eq!(found, [(3, "sh", "one\ntwo\n"), (10, "sh no-test: it is long", "three\n")]);
}
