//! What is in a model's directory: files that are loaded, and what is left out.
//!
//! A name that cannot be shown, or something that is no file, is left out and told; the rest is
//! loaded. What an index of shards names has to be there, and so has a checkpoint.

use std::ffi::OsStr;
use std::path::Path;
use std::{fmt, fs};

use serde::Serialize;

use super::FilesError;
use super::plan::{MAX_DEPTH, MAX_FILES, MAX_NAME, ModelPlan, is_bad};

/// What of a directory is not loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LeftOut {
    /// Its path in the directory, escaped as in Rust.
    pub file: String,
    /// Why.
    pub why: String,
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is left out: {}", self.file, self.why)
    }
}

/// The name of what can be shown, or why it cannot be.
fn shown(name: &OsStr) -> Result<&str, &'static str> {
    match name.to_str() {
        None => Err("its name is no UTF-8"),
        Some(name) if name.len() > MAX_NAME => Err("its name is too long"),
        Some(name) if is_bad(name) => Err("its name has control characters"),
        Some(name) => Ok(name),
    }
}

/// A name without what a terminal would obey.
pub(super) fn escaped(name: &OsStr) -> String {
    match name.to_str() {
        Some(name) => name.escape_debug().to_string(),
        None => name.as_encoded_bytes().escape_ascii().to_string(),
    }
}

impl ModelPlan {
    /// Adds what is in the directory at `path`, which is `inside` the model's, so deep.
    pub(super) fn add_directory(
        &mut self,
        path: &Path,
        inside: &str,
        depth: usize,
    ) -> Result<(), FilesError> {
        let failed = |source| FilesError::Directory { path: path.into(), source };
        let below = |name: &str| if inside.is_empty() { name.to_owned() } else { format!("{inside}/{name}") };
        for entry in fs::read_dir(path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let own = match shown(&name) {
                Ok(own) => own,
                Err(why) => {
                    self.leave_out(path, inside, &name, why.to_owned())?;
                    continue;
                }
            };
            let kind = entry.file_type().map_err(failed)?;
            if kind.is_dir() {
                if depth == MAX_DEPTH {
                    let (path, name) = (path.into(), own.to_owned());
                    return Err(FilesError::Inside { path, name, why: "it is too deep" });
                }
                self.add_directory(&entry.path(), &below(own), depth + 1)?;
                continue;
            }
            // What a link leads to is loaded if it is a file: downloads are kept so.
            let source = entry.path();
            let why = match fs::metadata(&source) {
                Ok(found) if found.is_file() => {
                    self.add_file(&source, &below(own))?;
                    continue;
                }
                Ok(_) => "it is no file".to_owned(),
                Err(why) if kind.is_symlink() => format!("it is a link that leads nowhere: {why}"),
                Err(why) => return Err(FilesError::Directory { path: source, source: why }),
            };
            self.leave_out(path, inside, &name, why)?;
        }
        Ok(())
    }

    /// Notes that something of a directory is not loaded.
    fn leave_out(&mut self, path: &Path, inside: &str, name: &OsStr, why: String) -> Result<(), FilesError> {
        if self.left_out.len() == MAX_FILES {
            return Err(FilesError::TooMany { path: path.into() });
        }
        let path = Path::new(inside).join(name);
        self.left_out.push(LeftOut { file: escaped(path.as_os_str()), why });
        Ok(())
    }

    /// What of its directory is not loaded, by path.
    pub fn left_out(&self) -> &[LeftOut] {
        &self.left_out
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;
    use std::process::Command;

    use super::*;
    use crate::load::tests::checkpoint;

    fn weights(path: &Path) {
        let (file, _) = checkpoint(&[("w", "U8", &[3], vec![1, 2, 3])]);
        fs::copy(file.path(), path).unwrap();
    }

    #[test]
    fn an_index_that_is_no_file_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("m.safetensors.index.json");
        let refused = |path: &Path| {
            let why = ModelPlan::open(path, "m").err().unwrap();
            assert!(matches!(&why, FilesError::Index { why, .. } if why == "it is no file"), "{why}");
        };
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        refused(&path);
        fs::remove_file(&path).unwrap();
        symlink("/dev/zero", &path).unwrap();
        refused(&path);
    }

    #[test]
    fn what_cannot_be_shown_is_left_out_and_the_rest_is_loaded() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        weights(&at("m.safetensors"));
        fs::create_dir_all(at("inner/a\tb")).unwrap();
        for name in ["new\nline", "inner/a\tb/never seen", "inner/fine \u{e9}"] {
            fs::write(at(name), "text").unwrap();
        }
        fs::write(at("").join(OsStr::from_bytes(b"caf\xe9")), "text").unwrap();
        fs::write(at(&"x".repeat(MAX_NAME + 1)), "text").unwrap();
        symlink("nothing", at("inner/dangling.safetensors")).unwrap();
        symlink("loop", at("loop")).unwrap();
        symlink("inner", at("leads to a directory")).unwrap();
        symlink("m.safetensors", at("also.safetensors")).unwrap();
        let plan = ModelPlan::open(root.path(), "m").unwrap();
        let files: Vec<_> = plan.files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(files, ["also.safetensors", "inner/fine \u{e9}", "m.safetensors"]);
        let lines: Vec<_> = plan.left_out().iter().map(ToString::to_string).collect();
        assert_eq!(
            lines[..],
            [
                "caf\\xe9 is left out: its name is no UTF-8",
                "inner/a\\tb is left out: its name has control characters",
                "inner/dangling.safetensors is left out: it is a link that leads nowhere: No such file or directory (os \
                 error 2)",
                "leads to a directory is left out: it is no file",
                "loop is left out: it is a link that leads nowhere: Too many levels of symbolic links (os error 40)",
                "new\\nline is left out: its name has control characters",
                &format!("{} is left out: its name is too long", "x".repeat(MAX_NAME + 1)),
            ]
        );
    }

    #[test]
    fn what_must_be_there_is_missed_with_the_reason() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let refused = || match ModelPlan::open(root.path(), "m") {
            Ok(_) => panic!("it was opened"),
            Err(why) => why.to_string(),
        };
        symlink("gone", at("b.safetensors")).unwrap();
        fs::write(at("a\nb"), "text").unwrap();
        let why = refused();
        assert!(why.contains("no .safetensors, .gguf or .npy file"), "{why}");
        assert!(why.ends_with("; a\\nb is left out: its name has control characters; and 1 more"), "{why}");
        weights(&at("a.safetensors"));
        assert!(ModelPlan::open(root.path(), "m").is_ok());
        let index = r#"{"weight_map":{"w":"a.safetensors","v":"b.safetensors"}}"#;
        fs::write(at("m.safetensors.index.json"), index).unwrap();
        let why = refused();
        assert!(
            why.contains("shard \"b.safetensors\" is missing: it is a link that leads nowhere: No"),
            "{why}"
        );
    }
}
