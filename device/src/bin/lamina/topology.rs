//! `lamina boot --topology FILE.toml`: a device and its guest, written down.
//!
//! * Every key is an option of `lamina boot` by its name, in `[device]` what the device is made of, in `[[guest]]` what boots on it. So a file means what the
//!   same options mean, and is read by the same parser: this only turns one into the other.
//! * Paths are relative to the file's folder.
//! * Beside the file, no other option is taken but `--print-command`.
//! * The workers of the device are told the options, not the file, which may have changed when one is started anew.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::OnceLock;

use clap::error::{ContextKind, ContextValue};
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches, Parser};
use serde::Deserialize;
use toml::Spanned;

use crate::args::{Cli, Command};

/// The options that stand for the file, if there is one.
static WORDS: OnceLock<Vec<OsString>> = OnceLock::new();

type Field<T> = Option<Spanned<T>>;

/// A file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    #[serde(default)]
    device: Device,
    guest: Vec<Spanned<Guest>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Device {
    mount: Field<PathBuf>,
    capacity: Field<Number>,
    views_capacity: Field<Number>,
    mode: Field<String>,
    codec: Field<String>,
    model: Field<Vec<PathBuf>>,
    views: Field<Vec<String>>,
    kv: Field<Vec<String>>,
    open_windows: Field<Number>,
    image: Field<PathBuf>,
    store_capacity: Field<Number>,
    full_wait: Field<Number>,
    memory_reserve: Field<Number>,
    format: Field<Vec<String>>,
    run_dir: Field<PathBuf>,
    tcp: Field<String>,
    read_ahead_kb: Field<Number>,
    threads: Field<Number>,
    devices: Field<Number>,
    interleave: Field<String>,
    #[serde(rename = "device-bandwidth")]
    bandwidth: Field<Bandwidth>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Guest {
    attach: Field<String>,
    base: Field<PathBuf>,
    views_file: Field<PathBuf>,
    ctl: Field<PathBuf>,
    mailbox: Field<PathBuf>,
    disk: Field<Vec<PathBuf>>,
    script: Field<PathBuf>,
    /// The host's file by the guest's path.
    put: Field<BTreeMap<String, PathBuf>>,
    extras: Field<bool>,
    memory: Field<Number>,
    cpus: Field<Number>,
    accel: Field<String>,
    huge_pages: Field<bool>,
    qemu: Field<Vec<String>>,
}

/// A number or a size, with a unit or without.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Number {
    Plain(i64),
    Text(String),
}

/// GB/s, whole or not.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Bandwidth {
    Whole(i64),
    Fraction(f64),
}

/// Options, and the places in the file that they come from.
struct Options<'f> {
    folder: &'f Path,
    words: Vec<OsString>,
    places: Vec<(&'static str, usize)>,
}

impl Options<'_> {
    /// Adds an option for each of the field's values.
    fn add<T, V: Into<OsString>>(
        &mut self,
        option: &'static str,
        field: Field<T>,
        values: impl FnOnce(T) -> Vec<V>,
    ) {
        let Some(field) = field else { return };
        self.places.push((option, field.span().start));
        for value in values(field.into_inner()) {
            let mut word = OsString::from(option);
            word.push("=");
            word.push(value.into());
            self.words.push(word);
        }
    }

    fn text(&mut self, option: &'static str, field: Field<String>) {
        self.add(option, field, |text| vec![text]);
    }

    fn texts(&mut self, option: &'static str, field: Field<Vec<String>>) {
        self.add(option, field, |texts| texts);
    }

    fn number(&mut self, option: &'static str, field: Field<Number>) {
        self.add(option, field, |number| match number {
            Number::Plain(number) => vec![number.to_string()],
            Number::Text(text) => vec![text],
        });
    }

    fn path(&mut self, option: &'static str, field: Field<PathBuf>) {
        let folder = self.folder.to_owned();
        self.add(option, field, |path| vec![folder.join(path)]);
    }

    fn paths(&mut self, option: &'static str, field: Field<Vec<PathBuf>>) {
        let folder = self.folder.to_owned();
        self.add(option, field, |paths| paths.into_iter().map(|path| folder.join(path)).collect());
    }

    fn switch(&mut self, option: &'static str, field: Field<bool>) {
        let Some(field) = field else { return };
        self.places.push((option, field.span().start));
        if field.into_inner() {
            self.words.push(option.into());
        }
    }

    fn device(&mut self, device: Device) {
        self.path("--mount", device.mount);
        self.number("--capacity", device.capacity);
        self.number("--views-capacity", device.views_capacity);
        self.text("--mode", device.mode);
        self.text("--codec", device.codec);
        self.paths("--model", device.model);
        // One option, so that no views at all can be said.
        self.add("--views", device.views, |views| vec![views.join(",")]);
        self.texts("--kv", device.kv);
        self.number("--open-windows", device.open_windows);
        self.path("--image", device.image);
        self.number("--store-capacity", device.store_capacity);
        self.number("--full-wait", device.full_wait);
        self.number("--memory-reserve", device.memory_reserve);
        self.texts("--format", device.format);
        self.path("--run-dir", device.run_dir);
        self.text("--tcp", device.tcp);
        self.number("--read-ahead-kb", device.read_ahead_kb);
        self.number("--threads", device.threads);
        self.number("--devices", device.devices);
        self.text("--interleave", device.interleave);
        self.add("--device-bandwidth", device.bandwidth, |bandwidth| match bandwidth {
            Bandwidth::Whole(gbs) => vec![gbs.to_string()],
            Bandwidth::Fraction(gbs) => vec![gbs.to_string()],
        });
    }

    fn guest(&mut self, guest: Guest) {
        self.text("--attach", guest.attach);
        self.path("--base", guest.base);
        self.path("--views-file", guest.views_file);
        self.path("--ctl", guest.ctl);
        self.path("--mailbox", guest.mailbox);
        self.paths("--disk", guest.disk);
        self.path("--script", guest.script);
        let folder = self.folder.to_owned();
        self.add("--put", guest.put, |files| {
            let put = |(guest, host): (String, PathBuf)| {
                let mut word = folder.join(host).into_os_string();
                word.push("=");
                word.push(guest);
                word
            };
            files.into_iter().map(put).collect()
        });
        self.switch("--extras", guest.extras);
        self.number("--memory", guest.memory);
        self.number("--cpus", guest.cpus);
        self.text("--accel", guest.accel);
        self.switch("--huge-pages", guest.huge_pages);
        // Last: what follows is QEMU's.
        if let Some(words) = guest.qemu {
            self.words.push("--".into());
            self.words.extend(words.into_inner().into_iter().map(OsString::from));
        }
    }
}

/// The command line, with a topology's options in the place of its file.
///
/// # Errors
/// What is wrong was said; the status to end with.
pub(crate) fn command_line() -> Result<Cli, ExitCode> {
    let matches = Cli::command().get_matches();
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|why| why.exit());
    let Command::Boot(boot) = &cli.command else { return Ok(cli) };
    let Some(path) = &boot.topology else { return Ok(cli) };
    let expanded = others(&matches)
        .and_then(|()| std::fs::read_to_string(path).map_err(|why| why.to_string()))
        .and_then(|text| {
            let folder = std::path::absolute(path).map_err(|why| why.to_string())?;
            expand(&text, folder.parent().unwrap_or(Path::new("/")), boot.print_command)
        });
    match expanded {
        Ok((cli, words)) => {
            // This is the first and only call.
            let _ = WORDS.set(words);
            Ok(cli)
        }
        Err(why) => {
            eprintln!("lamina: the topology {}: {why}", path.display());
            Err(ExitCode::FAILURE)
        }
    }
}

/// The options that this program was started with, without its name, for one that is to do the same.
pub(crate) fn words() -> Vec<OsString> {
    WORDS.get().cloned().unwrap_or_else(|| std::env::args_os().skip(1).collect())
}

/// Refuses other options beside the file.
fn others(matches: &clap::ArgMatches) -> Result<(), String> {
    let Some((name, given)) = matches.subcommand() else { return Ok(()) };
    let command = Cli::command();
    let known = command.find_subcommand(name).into_iter().flat_map(clap::Command::get_arguments);
    let other = known
        .map(clap::Arg::get_id)
        .filter(|id| !["topology", "print_command"].contains(&id.as_str()))
        .find(|id| {
            given.try_contains_id(id.as_str()).is_ok()
                && given.value_source(id.as_str()) == Some(ValueSource::CommandLine)
        });
    other.map_or(Ok(()), |id| {
        Err(format!(
            "{:?} is given beside it; write all options but --print-command into the file",
            id.as_str()
        ))
    })
}

/// The options that a file stands for, parsed and as words.
fn expand(text: &str, folder: &Path, print_command: bool) -> Result<(Cli, Vec<OsString>), String> {
    let line = |at: usize| text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count() + 1;
    let file: File = toml::from_str(text).map_err(|why| why.to_string())?;
    let mut guests = file.guest.into_iter();
    let guest = guests.next().ok_or("there is no [[guest]] to boot")?;
    if let Some(second) = guests.next() {
        return Err(format!(
            "line {}: a second [[guest]]; one is booted at a time, on a device that `lamina serve` serves to all",
            line(second.span().start)
        ));
    }
    let mut options = Options { folder, words: vec!["boot".into()], places: Vec::new() };
    options.words.extend(print_command.then(|| "--print-command".into()));
    options.device(file.device);
    options.guest(guest.into_inner());
    let Options { words, places, .. } = options;
    let parsed = Cli::try_parse_from(std::iter::once(OsString::from("lamina")).chain(words.iter().cloned()));
    let cli = parsed.map_err(|why| {
        let named = match why.get(ContextKind::InvalidArg) {
            Some(ContextValue::String(named)) => named.clone(),
            _ => String::new(),
        };
        let option = named.split([' ', '=']).next().unwrap_or_default();
        let place = places.iter().find(|(known, _)| *known == option);
        let place = place.map_or_else(String::new, |(_, at)| format!("line {}: ", line(*at)));
        // What is wrong comes before the first empty line, and the usage, which is no file's, after it.
        let told = why.to_string();
        let told = told.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
        format!("{place}{}", told.split_whitespace().collect::<Vec<_>>().join(" "))
    })?;
    Ok((cli, words))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<String>, String> {
        let (_, words) = expand(text, Path::new("/t"), false)?;
        Ok(words.into_iter().map(|word| word.into_string().unwrap()).collect())
    }

    #[test]
    fn a_file_means_what_the_same_options_mean() {
        let text = r#"
            [device]
            capacity = "512M"
            views-capacity = 1073741824
            mode = "trace"
            model = ["a.safetensors", "/m/b.safetensors"]
            views = ["full", "e8m3"]
            kv = ["*.k=64,128"]
            threads = 3
            devices = 2
            device-bandwidth = 12.5
            [[guest]]
            attach = "ivshmem"
            script = "test.sh"
            put = { "/bin/reader" = "reader" }
            extras = true
            huge-pages = false
            memory = 1024
            qemu = ["-device", "edu"]
        "#;
        let words = [
            "boot",
            "--capacity=512M",
            "--views-capacity=1073741824",
            "--mode=trace",
            "--model=/t/a.safetensors",
            "--model=/m/b.safetensors",
            "--views=full,e8m3",
            "--kv=*.k=64,128",
            "--threads=3",
            "--devices=2",
            "--device-bandwidth=12.5",
            "--attach=ivshmem",
            "--script=/t/test.sh",
            "--put=/t/reader=/bin/reader",
            "--extras",
            "--memory=1024",
            "--",
            "-device",
            "edu",
        ];
        assert_eq!(read(text).unwrap(), words);
        let (cli, _) = expand(text, Path::new("/t"), true).unwrap();
        let by_hand = ["lamina", "boot", "--print-command"].iter().chain(&words[1..]);
        let by_hand = Cli::try_parse_from(by_hand).unwrap();
        assert_eq!(format!("{cli:?}"), format!("{by_hand:?}"));
        let Command::Boot(boot) = cli.command else { panic!("no boot") };
        assert!(boot.print_command && boot.extras && !boot.huge_pages);
        assert_eq!(boot.device.capacity, Some(512 << 20));
    }

    #[test]
    fn what_is_wrong_is_told_with_its_line() {
        for (text, line, what) in [
            ("[device]\nkapazitaet = 1\n[[guest]]\n", "line 2", "kapazitaet"),
            ("[device]\n\nmodel = \"a\"\n[[guest]]\n", "line 3", "sequence"),
            ("[[guest]]\ncpus = 2\nattach = \"scsi\"\n", "line 3", "scsi"),
            ("[device]\ncapacity = \"1.5G\"\n[[guest]]\n", "line 2", "1.5G"),
            ("[[guest]]\n\n[[guest]]\ncpus = 1\n", "line 3", "second"),
            ("[[guest]]\nmemory = -1\n", "line 2", "-1"),
            ("[[guest]\n", "line 1", ""),
            ("[device]\ndevices = 9\n[[guest]]\n", "line 2", "2 to 8"),
            ("[device]\n\ninterleave = \"2x16K\"\n[[guest]]\n", "line 3", "Linux 6.12"),
        ] {
            let why = read(text).unwrap_err();
            assert!(why.contains(line) && why.contains(what), "{text}: {why}");
        }
        assert!(read("").unwrap_err().contains("guest"));
        assert!(read("guest = []").unwrap_err().contains("no [[guest]]"));
        assert!(read("[[guest]]\nbase = \"b\"\n").unwrap_err().contains("--views-file"));
    }

    #[test]
    fn the_example_can_be_booted() {
        let example = include_str!("../../../../docs/topology.toml");
        let (cli, _) = expand(example, Path::new("/t"), true).unwrap();
        let Command::Boot(boot) = cli.command else { panic!("no boot") };
        assert_eq!(boot.attach.to_string(), "ivshmem");
        assert_eq!(boot.device.models, [Path::new("/t/../guest-tests/models/stories260K-bf16.safetensors")]);
    }
}
