//! `lamina completions` and `lamina man`, which come from the command line itself.

use std::fs;

use anyhow::{Context, Result};
use clap::CommandFactory;

use crate::args::{Cli, Completions, ManPages};
use crate::out;

/// The name by which the program is called.
const NAME: &str = "lamina";

/// Prints the completions for a shell.
///
/// # Errors
/// When they cannot be printed.
pub(crate) fn completions(args: &Completions) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), NAME, &mut script);
    Ok(out::text(&script)?)
}

/// Prints the manual page, or writes those of all commands.
///
/// # Errors
/// When they cannot be printed or written.
pub(crate) fn man(args: &ManPages) -> Result<()> {
    let command = Cli::command();
    if let Some(folder) = &args.out {
        let failed = || format!("cannot write manual pages into {}", folder.display());
        fs::create_dir_all(folder).with_context(failed)?;
        return clap_mangen::generate_to(command, folder).with_context(failed);
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    Ok(out::text(&page)?)
}
