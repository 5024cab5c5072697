//! `lamina boot --topology FILE.toml`, and `lamina serve` with one: a device and its guests,
//! written down.
//!
//! * Every key is an option by its name: in `[device]` what the device is made of, in `[[guest]]`
//!   what boots on it. So a file means what the same options mean, and is read by the same parser:
//!   this only turns one into the other. A test holds the keys against the options, so that none is
//!   forgotten.
//! * A file with one guest stands for `lamina boot`. One with several, or with a guest that has a
//!   partition, stands for `lamina serve` and a boot of each guest: see [`several`].
//! * `lamina serve` makes the device and what is of its guests on it: their partitions, and hosts'
//!   caches. It boots nobody, so there need be none.
//! * Paths are relative to the file's folder.
//! * Beside the file, no other option is taken but `--print-command` of a boot and `--json` of
//!   `serve`.
//! * The workers of the device are told the options, not the file, which may have changed when one
//!   is started anew.

mod file;
mod options;
mod several;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::sync::OnceLock;

use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches};

use self::file::File;
use self::options::Options;
use crate::args::{Cli, Command};
use crate::out;
use crate::status::Status;

/// The options that stand for the file, if there is one.
static WORDS: OnceLock<Vec<OsString>> = OnceLock::new();

/// The command line, with a topology's options in the place of its file.
///
/// # Errors
/// What is wrong was said; the status to end with.
pub(crate) fn command_line() -> Result<Cli, ExitCode> {
    let matches = Cli::command().try_get_matches().map_err(|why| out::parsed(&why))?;
    let cli = Cli::from_arg_matches(&matches).map_err(|why| out::parsed(&why))?;
    let (path, purpose) = match &cli.command {
        Command::Boot(boot) => (&boot.topology, For::Boot { print_command: boot.print_command }),
        Command::Serve(serve) => (&serve.topology, For::Serve { json: serve.json }),
        _ => return Ok(cli),
    };
    let Some(path) = path else { return Ok(cli) };
    let failed = |status: Status, why: String| {
        eprintln!("lamina: the topology {}: {why}", path.display());
        ExitCode::from(status)
    };
    others(&matches, purpose.beside()).map_err(|why| failed(Status::Usage, why))?;
    let read = std::fs::read_to_string(path).and_then(|text| Ok((text, std::path::absolute(path)?)));
    let (text, place) = read.map_err(|why| failed(Status::Io, why.to_string()))?;
    let folder = place.parent().unwrap_or(Path::new("/"));
    let (cli, words) = expand(&text, folder, purpose).map_err(|why| failed(Status::Usage, why))?;
    // This is the first and only call.
    let _ = WORDS.set(words);
    Ok(cli)
}

/// The options that this program was started with, without its name, for one that is to do the
/// same.
pub(crate) fn words() -> Vec<OsString> {
    WORDS.get().cloned().unwrap_or_else(|| std::env::args_os().skip(1).collect())
}

/// What a file is read for.
#[derive(Clone, Copy, Debug)]
enum For {
    Boot { print_command: bool },
    Serve { json: bool },
}

impl For {
    /// The option that is taken beside the file.
    fn beside(self) -> &'static str {
        match self {
            Self::Boot { .. } => "print-command",
            Self::Serve { .. } => "json",
        }
    }
}

/// Refuses other options beside the file.
fn others(matches: &clap::ArgMatches, but: &str) -> Result<(), String> {
    let Some((name, given)) = matches.subcommand() else { return Ok(()) };
    let command = Cli::command();
    let known = command.find_subcommand(name).into_iter().flat_map(clap::Command::get_arguments);
    let other = known
        .filter(|option| option.get_long().is_none_or(|option| option != "topology" && option != but))
        .map(clap::Arg::get_id)
        .find(|id| {
            given.try_contains_id(id.as_str()).is_ok()
                && given.value_source(id.as_str()) == Some(ValueSource::CommandLine)
        });
    other.map_or(Ok(()), |id| {
        Err(format!("{:?} is given beside it; write all options but --{but} into the file", id.as_str()))
    })
}

/// What a file stands for, parsed and as the words that workers are told.
fn expand(text: &str, folder: &Path, purpose: For) -> Result<(Cli, Vec<OsString>), String> {
    let source = Source { text, folder };
    let mut file: File = toml::from_str(text).map_err(|why| why.to_string())?;
    let print_command = match purpose {
        For::Serve { json } => return several::serve(file, source, json),
        For::Boot { print_command } => print_command,
    };
    if let Some((key, at)) = file.device.only_of_serve() {
        let why = format!("`{key}` is of `lamina serve`; a guest that is booted has `attach`");
        return Err(source.at(at, &why));
    }
    if file.guest.is_empty() {
        return Err("there is no [[guest]] to boot".to_owned());
    }
    if several::is(&file) {
        return several::expand(file, source, print_command);
    }
    let mut options = Options::of("boot", source);
    options.switch_on("--print-command", print_command);
    options.device(file.device);
    options.guest(file.guest.remove(0).into_inner());
    options.parse()
}

/// A file's text and the folder that paths in it are relative to.
#[derive(Clone, Copy)]
struct Source<'f> {
    text: &'f str,
    folder: &'f Path,
}

impl Source<'_> {
    /// `why`, with the line that it is said of.
    fn at(self, place: usize, why: &str) -> String {
        let before = self.text.as_bytes().iter().take(place);
        format!("line {}: {why}", before.filter(|byte| **byte == b'\n').count() + 1)
    }
}
