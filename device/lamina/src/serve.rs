//! `lamina serve`: from the command line to a device that answers, and back down again.
//!
//! The order: claim the sockets and the mount point and read the checkpoints' headers, so that what
//! cannot work is refused before minutes of loading; load, with the API already answering; mount;
//! say so. A signal ends it at any time, and nothing of it stays behind.

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use indicatif::BinaryBytes;
use lamina_serve::IvshmemServer;
use serde_json::Value;

use crate::args::Serve;
use crate::holder::{Holder, StopSwitch};
use crate::life::Ready;
use crate::log;
use crate::out::print_line;
use crate::shmem;
use crate::signals::Ending;

/// Serves until a signal comes.
pub(crate) async fn serve(mut args: Serve) -> Result<()> {
    args.device.powers_of_two = args.ivshmem.is_some();
    let mut ending = Ending::watch()?;
    let stop = StopSwitch::default();
    let json = args.json;
    let switch = stop.clone();
    let mut served = tokio::task::spawn_blocking(move || {
        let Some(mut holder) =
            Holder::start(&args.device, &args.partition_table, args.mount, args.vhost_user, &switch)?
        else {
            return Ok(());
        };
        // Not the worker's, which may die: no QEMU connects anew to an ivshmem server.
        let mailboxes = args.ivshmem.map(|socket| {
            let ctl = holder.ready.ctl.as_ref();
            let ctl = ctl.context("mailboxes are for a device that is not divided")?;
            Ok::<_, anyhow::Error>(IvshmemServer::serve(&socket, ctl)?)
        });
        let _mailboxes = mailboxes.transpose()?;
        // Nor to this one.
        let shmem = args.vhost_user_shmem.map(|socket| shmem::serve_ready(&socket, &holder.ready));
        let _shmem = shmem.transpose()?;
        say_ready(&holder.ready, json)?;
        notify_ready();
        holder.wait()
    });
    loop {
        tokio::select! {
            served = &mut served => return served?,
            _ = ending.next() => stop.stop(),
        }
    }
}

/// Says the same to systemd, if it has started this (`Type=notify`).
fn notify_ready() {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let address = match socket.as_encoded_bytes().split_first() {
        Some((b'@', name)) => SocketAddr::from_abstract_name(name),
        _ => SocketAddr::from_pathname(&socket),
    };
    let sent = address.and_then(|address| UnixDatagram::unbound()?.send_to_addr(b"READY=1", &address));
    if let Err(why) = sent {
        tracing::warn!("systemd cannot be told that the device is ready: {why}");
    }
}

/// Prints the one line that says that everything can be used.
fn say_ready(ready: &Ready, json: bool) -> Result<()> {
    if json {
        return Ok(print_line!("{}", serde_json::to_string(ready)?)?);
    }
    let text = |value: &Value, key: &str| value[key].as_str().unwrap_or_default().to_owned();
    for skipped in &ready.skipped {
        let (view, tensor, why) = (text(skipped, "view"), text(skipped, "tensor"), text(skipped, "why"));
        log::say(&format!("skipped: {view} of {tensor}: {why}"));
    }
    let tcp = ready.tcp.map_or_else(String::new, |address| format!(", http://{address}/"));
    let windows = |base: (&Path, u64), views: (&Path, u64)| {
        let file = |(path, bytes): (&Path, u64)| format!("{} ({})", path.display(), BinaryBytes(bytes));
        format!("{} and {}", file(base), file(views))
    };
    for guest in &ready.guests {
        let file = |window: &str| {
            let window = &guest[window];
            (PathBuf::from(text(window, "path")), window["bytes"].as_u64().unwrap_or(0))
        };
        let ((base, base_bytes), (views, views_bytes)) = (file("base"), file("views"));
        let files = windows((&base, base_bytes), (&views, views_bytes));
        print_line!("{}: {files}, guest {}", text(guest, "name"), text(guest, "ctl"))?;
    }
    let mut places = Vec::new();
    if let (Some(base), Some(views)) = (&ready.base, &ready.views)
        && let (Some(base_path), Some(views_path)) = (&base.path, &views.path)
    {
        places.push(windows((base_path, base.bytes), (views_path, views.bytes)));
    }
    places.extend(ready.targets.iter().map(|target| format!("interleave target {}", target.display())));
    places.extend(
        ready.disks.iter().map(|disk| format!("disk {} on {}", text(disk, "serial"), text(disk, "socket"))),
    );
    print_line!(
        "ready: {}{} tensors, {} views; API {}{tcp}{}",
        if places.is_empty() { String::new() } else { format!("{}; ", places.join(", ")) },
        ready.tensors,
        ready.view_count,
        ready.api.display(),
        ready.ctl.as_ref().map_or_else(String::new, |ctl| format!(", guests {}", ctl.display())),
    )?;
    Ok(())
}
