//! Several guests that are booted at once on one device: a topology with more than one `[[guest]]`.
//!
//! * The device is there before the first guest, and goes after the last has ended.
//! * What the guests' consoles say is printed with the guest's name before each line. If one of
//!   them has a shell, that has the terminal, and the others' consoles are written to
//!   `console-NAME.log` beside the device's sockets.
//! * The status is that of the first guest, as they are written, whose script did not end with 0.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use lamina_abi::Interleave;
use lamina_qemu::AttachKind;

use crate::args::{GuestExport, Guests, Member, Serve, folder_of, monitor_of};
use crate::boot::{self, Console, Ready, Signals};
use crate::holder::{Holder, StopSwitch};
use crate::life;
use crate::log;
use crate::out::{self, print_line};
use crate::way::Way;

/// Boots all guests and waits for the end of each.
pub(crate) async fn boot(args: Guests) -> Result<ExitCode> {
    let mut signals = Signals::watch()?;
    let Guests { serve, members, print_command } = args;
    let Serve { mut device, partition_table, mount, vhost_user, .. } = serve;
    device.powers_of_two = members.iter().any(|guest| guest.boot.attach == AttachKind::Ivshmem);
    let (run_dir, set) = (device.run_dir.clone(), device.several.interleave);
    let mut programs = Vec::new();
    for guest in &members {
        let theirs = signals.or_leave(boot::programs(&guest.boot)).await;
        programs.push(theirs.with_context(|| format!("guest {}", guest.name))?);
    }
    let stop = StopSwitch::default();
    let started = boot::start(device, partition_table, mount, vhost_user, &stop);
    let holder = signals.or_stop(&stop, started).await?;
    let has_shell = members.iter().any(|guest| guest.boot.script.is_none());
    let (mut ways, mut ready) = (Vec::new(), Vec::new());
    for (Member { name, export, boot }, files) in members.into_iter().zip(programs) {
        let way = way(&holder.ready, &name, export, boot.attach, boot.cpus, set);
        let way = way.with_context(|| format!("guest {name}"))?;
        let console = console(&name, (has_shell && boot.script.is_some()).then_some(&*run_dir))?;
        let monitor = (boot.attach == AttachKind::Cxl).then(|| run_dir.join(monitor_of(&name)));
        let prepared = signals.or_leave(boot::prepare(boot, &way, files, monitor)).await;
        let prepared = prepared.with_context(|| format!("guest {name}"))?;
        ways.push(way);
        ready.push(Ready { name: Some(name), prepared, console });
    }
    let mut statuses = Vec::new();
    if print_command {
        for Ready { name, prepared, .. } in ready {
            print_line!("# {}\n{}", name.unwrap_or_default(), prepared.command.to_shell())?;
        }
    } else {
        statuses = boot::run(ready, signals).await?;
    }
    drop(ways);
    // Unmounting sleeps.
    tokio::task::spawn_blocking(|| Holder::stop(holder)).await??;
    Ok(boot::exit_code(statuses.into_iter().flatten().find(|status| *status != 0)))
}

/// A guest's way to the device.
fn way(
    ready: &life::Ready,
    name: &str,
    export: GuestExport,
    kind: AttachKind,
    cpus: u32,
    set: Option<Interleave>,
) -> Result<Way> {
    match (export, kind) {
        (GuestExport::Named, _) => {
            let export = ready.guests.iter().find(|export| export["name"] == name);
            boot::way_to(export.context("the device does not know it")?, &ready.disks, kind, cpus)
        }
        (GuestExport::Shared, AttachKind::VhostUser) => {
            // Each has sockets of its own.
            let theirs =
                |disk: &&PathBuf| disk.parent().is_some_and(|folder| folder.ends_with(folder_of(name)));
            let sockets = boot::sockets(&ready.disks, None);
            let sockets = sockets.iter().filter(theirs).cloned().collect();
            Ok(Way::disks(sockets, ready.ctl.clone(), cpus))
        }
        (GuestExport::Shared, _) => {
            let files = boot::whole(ready, set).context("no partition of the device is everybody's")?;
            Way::files(kind, files, None)
        }
    }
}

/// Where the lines of a guest's console go: a file in `folder`, or here.
fn console(name: &str, folder: Option<&Path>) -> Result<Console> {
    let Some(folder) = folder else { return Ok(Box::new(out::console(format!("{name}: ")))) };
    let path = folder.join(format!("console-{name}.log"));
    let mut file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
    log::say(&format!("the console of guest {name} goes to {}", path.display()));
    Ok(Box::new(move |line| {
        if let Err(why) = writeln!(file, "{line}") {
            tracing::warn!("{}: {why}", path.display());
        }
    }))
}
