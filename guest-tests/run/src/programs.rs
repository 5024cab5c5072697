//! Where the programs lie that a job starts: the device beside this program, the guest's in their
//! own folder.

use std::{
    env,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

/// The folder with the guest's static programs, which `./x` sets.
pub const GUEST_PROGRAMS: &str = "LAMINA_GUEST_PROGRAMS";

/// The `lamina` program that was built with this one.
///
/// # Errors
/// When it is not there.
pub fn lamina() -> Result<PathBuf> {
    host("lamina")
}

/// One of the programs that were built with this one.
///
/// # Errors
/// When it is not there.
pub fn host(name: &str) -> Result<PathBuf> {
    let this = env::current_exe().context("this program does not know its own path")?;
    // Tests lie one folder deeper than programs.
    let candidates = this.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    let found = candidates.into_iter().find(|path| path.is_file());
    found.with_context(|| format!("no `{name}` beside {}: build it with ./x build", this.display()))
}

/// One of the guest's programs.
///
/// # Errors
/// When it is not there.
pub fn guest(name: &str) -> Result<PathBuf> {
    let Some(folder) = env::var_os(GUEST_PROGRAMS) else {
        bail!("{GUEST_PROGRAMS} does not say where the guest's programs are: start this through ./x");
    };
    let path = Path::new(&folder).join(name);
    if !path.is_file() {
        bail!("no {name} in {}: build it with ./x build", path.parent().unwrap_or(Path::new("/")).display());
    }
    Ok(path)
}
