//! Running the recipes in `images/`, which build what a boot needs and print the folder they made.
//!
//! * The recipes lie in the repository: the folder `LAMINA_ROOT` names, or the one this library was
//!   compiled in.
//! * A recipe keeps what it built in a cache, so running it again is quick; its progress goes to
//!   this process's stderr.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Why a recipe gave no folder.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// There is no repository to take recipes from.
    #[error("the recipe images/{recipe} is not in {}; set LAMINA_ROOT to a checkout of the repository", root.display())]
    Missing {
        /// The recipe's name.
        recipe: String,
        /// Where it was looked for.
        root: PathBuf,
    },
    /// The recipe could not be started.
    #[error("cannot run {}: {error}", path.display())]
    Start {
        /// The recipe.
        path: PathBuf,
        /// What the system says.
        error: std::io::Error,
    },
    /// Nothing says where things are kept.
    #[error("HOME is not set, and neither is LAMINA_CACHE: set it to a folder for what is kept between runs")]
    NoCache,
    /// The recipe failed and said why.
    #[error("{} failed ({status}); its messages are above", path.display())]
    Failed {
        /// The recipe.
        path: PathBuf,
        /// How it ended.
        status: std::process::ExitStatus,
    },
    /// The recipe printed no folder.
    #[error("{} printed no folder but {printed:?}", path.display())]
    Printed {
        /// The recipe.
        path: PathBuf,
        /// Its last line.
        printed: String,
    },
}

/// The repository that recipes are taken from.
pub fn root() -> PathBuf {
    env::var_os("LAMINA_ROOT").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("/")).to_owned(),
        PathBuf::from,
    )
}

/// The folder that things are kept in between runs, shared with the recipes: `LAMINA_CACHE`, or
/// `lamina` in the user's cache. Absolute, as recipes print it.
///
/// # Errors
/// [`RecipeError::NoCache`] if nothing names one: programs are run from there, and a folder that
/// all users share is no place for that.
pub fn cache() -> Result<PathBuf, RecipeError> {
    cache_of(|name| env::var_os(name))
}

fn cache_of(variable: impl Fn(&str) -> Option<OsString>) -> Result<PathBuf, RecipeError> {
    let set = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let folder = set("LAMINA_CACHE")
        .or_else(|| Some(set("XDG_CACHE_HOME")?.join("lamina")))
        .or_else(|| Some(set("HOME")?.join(".cache/lamina")))
        .ok_or(RecipeError::NoCache)?;
    // Without a current folder, recipes say what is wrong.
    Ok(std::path::absolute(&folder).unwrap_or(folder))
}

/// Runs the recipe of this name and returns the folder it made, or made before.
///
/// # Errors
/// When the recipe is missing, cannot run, or fails; it has then said why on stderr.
pub fn run(recipe: &str) -> Result<PathBuf, RecipeError> {
    run_in(&root(), recipe)
}

fn run_in(root: &Path, recipe: &str) -> Result<PathBuf, RecipeError> {
    let path = root.join("images").join(recipe);
    if !path.is_file() {
        return Err(RecipeError::Missing { recipe: recipe.to_owned(), root: root.to_owned() });
    }
    tracing::debug!("running {}", path.display());
    let output = Command::new(&path)
        .env("LAMINA_CACHE", cache()?)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| RecipeError::Start { path: path.clone(), error })?;
    if !output.status.success() {
        return Err(RecipeError::Failed { path, status: output.status });
    }
    let printed = String::from_utf8_lossy(&output.stdout).lines().last().unwrap_or_default().to_owned();
    let folder = PathBuf::from(&printed);
    if !folder.is_absolute() || !folder.is_dir() {
        return Err(RecipeError::Printed { path, printed });
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_recipe(script: &str) -> (tempfile::TempDir, Result<PathBuf, RecipeError>) {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("images")).unwrap();
        let path = root.path().join("images/thing");
        // Written by another process: what this one has open, a process that another test starts
        // has open too for a moment, and then it cannot be run.
        let write = "printf '#!/bin/sh\\n%s\\n' \"$1\" >\"$0\" && chmod 755 \"$0\"";
        let written = Command::new("sh").args(["-c", write]).arg(path).arg(script).status().unwrap();
        assert!(written.success());
        let result = run_in(root.path(), "thing");
        (root, result)
    }

    #[test]
    fn what_is_kept_has_a_folder_that_somebody_named() {
        let named = |all: &[(&str, &str)]| {
            let of = |name: &str| all.iter().find(|(other, _)| *other == name).map(|(_, value)| value.into());
            cache_of(of)
        };
        let all = [("LAMINA_CACHE", "/l"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")];
        assert_eq!(named(&all).unwrap(), Path::new("/l"));
        assert_eq!(named(&all[1..]).unwrap(), Path::new("/x/lamina"));
        assert_eq!(named(&all[2..]).unwrap(), Path::new("/h/.cache/lamina"));
        // Not one that all users share: who comes first would say what others run.
        for none in [&[][..], &[("HOME", ""), ("LAMINA_CACHE", "")]] {
            assert!(matches!(named(none), Err(RecipeError::NoCache)), "{none:?}");
        }
    }

    #[test]
    fn the_last_line_a_recipe_prints_is_its_folder() {
        let (_root, folder) = with_recipe("echo something; echo /proc");
        assert_eq!(folder.unwrap(), Path::new("/proc"));
    }

    #[test]
    fn a_recipe_that_fails_or_prints_no_folder_is_an_error() {
        assert!(
            matches!(with_recipe("echo /proc; exit 3").1, Err(RecipeError::Failed { status, .. }) if status.code() == Some(3))
        );
        assert!(
            matches!(with_recipe("echo nowhere").1, Err(RecipeError::Printed { printed, .. }) if printed == "nowhere")
        );
        assert!(matches!(with_recipe("true").1, Err(RecipeError::Printed { .. })));
    }

    #[test]
    fn a_missing_repository_is_named_with_the_variable_to_set() {
        let root = tempfile::tempdir().unwrap();
        let message = run_in(root.path(), "tools").unwrap_err().to_string();
        assert!(message.contains("images/tools") && message.contains("LAMINA_ROOT"), "{message}");
    }
}
