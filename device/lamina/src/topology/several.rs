//! A topology with several guests, or with one that has a partition: a device that is
//! served, and a boot of each guest.
//!
//! | a `[[guest]]` with | has |
//! |---|---|
//! | `capacity` | a partition of its own, with its own tensors (`model`), `views-capacity` and `quota`: `lamina serve --guest` |
//! | `host = true` | what is everybody's, behind a cache of its own that nobody keeps coherent: `lamina serve --host` |
//! | neither | what is everybody's: the device, or, if others have partitions, the one that `shared` in `[device]` makes |
//!
//! * A guest is called by its `name`, or `guest-1` and so on in the order of the file.
//! * All are on the file's own device; a device that is served elsewhere is for a file with one
//!   guest.
//! * One guest at most has no `script`, for there is one terminal.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::Path;

use toml::Spanned;

use super::Source;
use super::file::{Field, File, Guest, Number};
use super::options::Options;
use crate::args::{self, Cli, Command, GuestExport, Guests, Member, folder_of, monitor_of};

/// Whether a file is such a topology.
pub(super) fn is(file: &File) -> bool {
    let of_several = |guest: &Guest| {
        guest.has_partition()
            || guest.host.is_some()
            || guest.quota.is_some()
            || guest.views_capacity.is_some()
            || guest.model.is_some()
    };
    let device = &file.device;
    file.guest.len() > 1
        || device.shared.is_some()
        || device.host_cache.is_some()
        || file.guest.iter().any(|guest| of_several(guest.get_ref()))
}

/// What it stands for, and the words that tell it of the device.
///
/// # Errors
/// What is wrong, with its line.
pub(super) fn expand(
    file: File,
    source: Source<'_>,
    print_command: bool,
) -> Result<(Cli, Vec<OsString>), String> {
    let File { mut device, guest: guests } = file;
    let run_dir = device.run_dir.as_ref().map_or_else(args::run_dir, |dir| source.folder.join(dir.get_ref()));
    let divided = guests.iter().any(|guest| guest.get_ref().has_partition());
    let has_hosts = guests.iter().any(|guest| guest.get_ref().is_host());
    let has_shared = device.shared.is_some() || !divided;

    let mut serve = Options::of("serve", source);
    let mount = device.mount.take();
    if mount.is_none() {
        serve.word("--mount", run_dir.join("mount"));
    }
    serve.path("--mount", mount);
    serve.number("--shared", device.shared.take());
    serve.number("--host-cache", device.host_cache.take());
    serve.device(device);

    let (mut members, mut names) = (Vec::<Member>::new(), BTreeSet::new());
    for (number, guest) in (1..).zip(guests) {
        let place = guest.span().start;
        let mut guest = guest.into_inner();
        let name = guest.take_name(number, place, &mut names, source)?;
        guest.is_of_this_device(source)?;
        let disks = guest.attach.as_ref().is_some_and(|attach| attach.get_ref() == "vhost-user");
        let disks = disks.then(|| run_dir.join(folder_of(&name)));
        let export = if let Some(partition) = guest.partition(&name, disks.as_deref(), source)? {
            serve.word("--guest", partition);
            GuestExport::Named
        } else if guest.is_host() {
            if disks.is_some() {
                return Err(source.at(
                    place,
                    "a host has files of its own, and no disks: attach it by cxl, ivshmem or shmem",
                ));
            }
            serve.word("--host", &name);
            GuestExport::Named
        } else if !has_shared {
            let why = "others have a partition of the device, so this guest needs one too: give it a `capacity`, or [device] a partition that is everybody's, `shared`";
            return Err(source.at(place, why));
        } else if has_hosts {
            return Err(source.at(place, "others are hosts, so this guest has to be one too, or to have a partition of its own: `host = true` or `capacity`"));
        } else {
            if guest.attach.as_ref().is_none_or(|attach| attach.get_ref() == "cxl") {
                // The device knows where guests and hosts with names of their own listen.
                serve.word("--qmp", run_dir.join(monitor_of(&name)));
            }
            if let Some(disks) = disks {
                if divided {
                    return Err(source.at(place, "disks show a guest's own partition or a device that is not divided: give this guest a `capacity`"));
                }
                serve.word("--vhost-user", disks);
            }
            GuestExport::Shared
        };
        if guest.script.is_none() && members.iter().any(|member| member.boot.script.is_none()) {
            return Err(source.at(place, "a second guest without a `script`; one shell has the terminal"));
        }
        let mut options = Options::of("boot", source);
        options.guest(guest);
        let Command::Boot(boot) = options.parse()?.0.command else { unreachable!("it was asked for") };
        members.push(Member { name, export, boot: *boot });
    }
    let (cli, words) = serve.parse()?;
    let Command::Serve(serve) = cli.command else { unreachable!("it was asked for") };
    let guests = Guests { serve: *serve, members, print_command };
    Ok((Cli { command: Command::BootSeveral(Box::new(guests)) }, words))
}

/// The device of a file, served for whoever boots on it: with the partitions of its guests, and
/// its hosts. What else is said of a guest is left to `lamina boot`.
///
/// # Errors
/// What is wrong, with its line.
pub(super) fn serve(file: File, source: Source<'_>, json: bool) -> Result<(Cli, Vec<OsString>), String> {
    let File { mut device, guest: guests } = file;
    let mut serve = Options::of("serve", source);
    serve.switch_on("--json", json);
    serve.number("--shared", device.shared.take());
    serve.number("--host-cache", device.host_cache.take());
    serve.attached(&mut device);
    serve.device(device);
    let mut names = BTreeSet::new();
    for (number, guest) in (1..).zip(guests) {
        let place = guest.span().start;
        let mut guest = guest.into_inner();
        let name = guest.take_name(number, place, &mut names, source)?;
        if let Some(partition) = guest.partition(&name, None, source)? {
            serve.word("--guest", partition);
        } else if guest.is_host() {
            serve.word("--host", &name);
        }
    }
    serve.parse()
}

impl Guest {
    /// What it is called, which no other is.
    fn take_name(
        &mut self,
        number: usize,
        place: usize,
        names: &mut BTreeSet<String>,
        source: Source<'_>,
    ) -> Result<String, String> {
        let (at, name) = self.name.take().map_or_else(
            || (place, format!("guest-{number}")),
            |name| (name.span().start, name.into_inner()),
        );
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_".contains(c);
        if name.is_empty() || name.len() > 32 || !name.chars().all(fits) {
            let why =
                format!("{name:?} cannot name a guest: 1 to 32 lower-case letters, digits, `-` and `_`");
            return Err(source.at(at, &why));
        }
        if !names.insert(name.clone()) {
            return Err(source.at(at, &format!("a second guest that is called {name}")));
        }
        Ok(name)
    }

    fn has_partition(&self) -> bool {
        self.capacity.is_some()
    }

    fn is_host(&self) -> bool {
        self.host.as_ref().is_some_and(|host| *host.get_ref())
    }

    /// Refuses what names a device that is served elsewhere.
    fn is_of_this_device(&self, source: Source<'_>) -> Result<(), String> {
        fn place<T>(field: Option<&Spanned<T>>) -> Option<usize> {
            field.map(|field| field.span().start)
        }
        let elsewhere = [
            ("base", place(self.base.as_ref())),
            ("views-file", place(self.views_file.as_ref())),
            ("ctl", place(self.ctl.as_ref())),
            ("mailbox", place(self.mailbox.as_ref())),
            ("disk", place(self.disk.as_ref())),
            ("guest", place(self.export.as_ref())),
            ("shmem", place(self.shmem.as_ref())),
        ];
        let found = elsewhere.into_iter().find_map(|(key, place)| Some((key, place?)));
        found.map_or(Ok(()), |(key, place)| {
            Err(source.at(
                place,
                &format!(
                    "`{key}` names a device that is served elsewhere; several guests are on the file's own"
                ),
            ))
        })
    }

    /// The guest's partition as an option `--guest`, if it has one.
    fn partition(
        &mut self,
        name: &str,
        disks: Option<&Path>,
        source: Source<'_>,
    ) -> Result<Option<OsString>, String> {
        let bytes = |field: Field<Number>| {
            let of = |field: toml::Spanned<Number>| {
                let place = field.span().start;
                args::bytes(&field.into_inner().text()).map_err(|why| source.at(place, &why))
            };
            field.map(of).transpose()
        };
        let (quota, views, models) = (self.quota.take(), self.views_capacity.take(), self.model.take());
        let Some(capacity) = self.capacity.take() else {
            let places = [
                quota.map(|field| field.span().start),
                views.map(|field| field.span().start),
                models.map(|field| field.span().start),
            ];
            return places.into_iter().flatten().min().map_or(Ok(None), |place| {
                Err(source.at(place, "this is of a partition of the guest's own: give it a `capacity`"))
            });
        };
        if let Some(host) = self.host.as_ref().filter(|host| *host.get_ref()) {
            return Err(source.at(
                host.span().start,
                "a host shares what is everybody's, and has no partition of its own",
            ));
        }
        let mut word = OsString::from(format!("{name}={}", bytes(Some(capacity))?.unwrap_or_default()));
        for (option, size) in [("quota", bytes(quota)?), ("views", bytes(views)?)] {
            if let Some(size) = size {
                word.push(format!(",{option}={size}"));
            }
        }
        let place = models.as_ref().map_or(0, |models| models.span().start);
        let models = models.map(toml::Spanned::into_inner).unwrap_or_default();
        let models = models.iter().map(|model| ("model", source.folder.join(model)));
        for (option, path) in models.chain(disks.map(|disks| ("disks", disks.to_owned()))) {
            // The option's parts are divided by commas.
            if path.to_string_lossy().contains(',') {
                return Err(source.at(place, &format!("{} has a comma in its path", path.display())));
            }
            word.push(format!(",{option}="));
            word.push(path);
        }
        Ok(Some(word))
    }
}
