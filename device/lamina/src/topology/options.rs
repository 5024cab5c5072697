//! The options that a part of a topology stands for.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Parser;
use clap::error::{ContextKind, ContextValue};

use super::Source;
use super::file::{Bandwidth, Device, Field, Guest, Number, Paths};
use crate::args::Cli;

/// Options, and the places in the file that they come from.
pub(super) struct Options<'f> {
    source: Source<'f>,
    words: Vec<OsString>,
    places: Vec<(&'static str, usize)>,
}

impl<'f> Options<'f> {
    /// None yet, of this command.
    pub(super) fn of(command: &str, source: Source<'f>) -> Self {
        Self { source, words: vec![command.into()], places: Vec::new() }
    }

    /// Adds an option for each of the field's values.
    pub(super) fn add<T, V: Into<OsString>>(
        &mut self,
        option: &'static str,
        field: Field<T>,
        values: impl FnOnce(T) -> Vec<V>,
    ) {
        let Some(field) = field else { return };
        self.places.push((option, field.span().start));
        for value in values(field.into_inner()) {
            self.word(option, value);
        }
    }

    fn text(&mut self, option: &'static str, field: Field<String>) {
        self.add(option, field, |text| vec![text]);
    }

    fn texts(&mut self, option: &'static str, field: Field<Vec<String>>) {
        self.add(option, field, |texts| texts);
    }

    pub(super) fn number(&mut self, option: &'static str, field: Field<Number>) {
        self.add(option, field, |number| vec![number.text()]);
    }

    pub(super) fn path(&mut self, option: &'static str, field: Field<PathBuf>) {
        let folder = self.source.folder.to_owned();
        self.add(option, field, |path| vec![folder.join(path)]);
    }

    fn paths(&mut self, option: &'static str, field: Field<Vec<PathBuf>>) {
        let folder = self.source.folder.to_owned();
        self.add(option, field, |paths| paths.into_iter().map(|path| folder.join(path)).collect());
    }

    fn switch(&mut self, option: &'static str, field: Field<bool>) {
        let Some(field) = field else { return };
        self.places.push((option, field.span().start));
        self.switch_on(option, field.into_inner());
    }

    /// Adds an option with a value that is not the file's own.
    pub(super) fn word(&mut self, option: &str, value: impl Into<OsString>) {
        let mut word = OsString::from(option);
        word.push("=");
        word.push(value.into());
        self.words.push(word);
    }

    /// Adds an option, or not.
    pub(super) fn switch_on(&mut self, option: &str, on: bool) {
        self.words.extend(on.then(|| option.into()));
    }

    /// What the device is made of.
    pub(super) fn device(&mut self, device: Device) {
        self.path("--mount", device.mount);
        self.number("--capacity", device.capacity);
        self.number("--views-capacity", device.views_capacity);
        self.text("--mode", device.mode);
        self.text("--codec", device.codec);
        self.paths("--model", device.model);
        self.texts("--model-base", device.model_base);
        // One option, so that no views at all can be said.
        self.add("--views", device.views, |views| vec![views.join(",")]);
        self.texts("--kv", device.kv);
        self.number("--open-windows", device.open_windows);
        self.path("--image", device.image);
        self.switch("--replace", device.replace);
        self.switch("--observe", device.observe);
        self.text("--model-dram", device.model_dram);
        self.number("--sync-seconds", device.sync_seconds);
        self.number("--store-capacity", device.store_capacity);
        self.number("--full-wait", device.full_wait);
        self.number("--files", device.files);
        self.switch("--write-cache", device.write_cache);
        self.number("--cache-bytes", device.cache_bytes);
        self.number("--memory-reserve", device.memory_reserve);
        self.texts("--format", device.format);
        let folder = self.source.folder.to_owned();
        self.add("--qmp", device.qmp, |paths| match paths {
            Paths::One(path) => vec![folder.join(path)],
            Paths::Several(paths) => paths.into_iter().map(|path| folder.join(path)).collect(),
        });
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

    /// How a device that is served is attached to.
    pub(super) fn attached(&mut self, device: &mut Device) {
        let folder = self.source.folder.to_owned();
        // Those of one socket begin with its path, too.
        self.add("--vhost-user", device.vhost_user.take(), |disks| {
            disks.into_iter().map(|disk| folder.join(disk)).collect()
        });
        self.path("--ivshmem", device.ivshmem.take());
        self.path("--vhost-user-shmem", device.vhost_user_shmem.take());
    }

    /// What boots on it.
    pub(super) fn guest(&mut self, guest: Guest) {
        self.text("--attach", guest.attach);
        self.text("--guest", guest.export);
        self.path("--shmem", guest.shmem);
        self.path("--base", guest.base);
        self.path("--views-file", guest.views_file);
        self.path("--ctl", guest.ctl);
        self.path("--mailbox", guest.mailbox);
        self.paths("--disk", guest.disk);
        self.path("--script", guest.script);
        let folder = self.source.folder.to_owned();
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
        self.switch("--python", guest.python);
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

    /// Has the parser read them: what they mean, and they themselves.
    ///
    /// # Errors
    /// What is wrong, with its line.
    pub(super) fn parse(self) -> Result<(Cli, Vec<OsString>), String> {
        let Self { source, words, places } = self;
        let line = std::iter::once(OsString::from("lamina")).chain(words.iter().cloned());
        let cli = Cli::try_parse_from(line).map_err(|why| {
            let named = match why.get(ContextKind::InvalidArg) {
                Some(ContextValue::String(named)) => named.clone(),
                _ => String::new(),
            };
            let option = named.split([' ', '=']).next().unwrap_or_default();
            // What is wrong comes before the first empty line, and the usage, which is no file's,
            // after it.
            let reported = why.to_string();
            let reported = reported.split("\n\n").next().unwrap_or_default().trim_start_matches("error: ");
            let reported = reported.split_whitespace().collect::<Vec<_>>().join(" ");
            let place = places.iter().find(|(known, _)| *known == option);
            place.map_or_else(|| reported.clone(), |(_, at)| source.at(*at, &reported))
        })?;
        Ok((cli, words))
    }
}
