//! What a crash of the host leaves, as far as one can be made without a host: everything is killed,
//! and the image is what its last sync left on the disk.

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::Value;

use crate::common::{BASE, Place, Rig, Run, eventually, noise, within};
use crate::deaths::worker;

const MIB: usize = 1 << 20;

/// Kills holder and worker, and has the image be one that another boot of the host changed.
fn crash(rig: &mut Rig) {
    let worker = worker(rig.run.child.id());
    rig.run.signal(Signal::SIGKILL);
    let _ = kill(Pid::from_raw(worker), Signal::SIGKILL);
    let _ = rig.run.child.wait();
    let image = rig.place.path("image");
    Place::let_go(&image);
    let image = File::options().write(true).open(image).unwrap();
    // Its state.
    image.write_all_at(&[0; 64], 8 << 10).unwrap();
}

#[test]
fn what_was_flushed_is_synced_every_so_many_seconds_and_survives_the_host() {
    within(120, || {
        let image = |place: &Place| place.text("image");
        let mut rig = Rig::prepared(|place, command| {
            command.args(["--image", &image(place), "--sync-seconds", "1"]);
        });
        let at = 16 << 20;
        let (old, new) = (noise(1, MIB), noise(2, MIB));
        let base = rig.base();
        base.file.write_all_at(&old, at).unwrap();
        base.sync();
        rig.flush(0, BASE);
        let syncs = |rig: &Rig| rig.ask("GET", "/stats", &Value::Null)["device"]["syncs"].as_u64().unwrap();
        let before = syncs(&rig);
        eventually("two syncs", || {
            // One may have begun before; nothing is synced that did not change.
            base.file.write_all_at(&old, at + 2 * MIB as u64).unwrap();
            base.sync();
            syncs(&rig) >= before + 2
        });
        drop(base);
        crash(&mut rig);
        let restart = |rig: &mut Rig, seconds: &str| {
            let image = image(&rig.place);
            rig.run = Run::start(&mut rig.place.serve(&["--image", &image, "--sync-seconds", seconds]));
        };
        restart(&mut rig, "0");
        let found = |rig: &Rig, length: usize| {
            let mut found = vec![0; length];
            File::open(rig.base_path()).unwrap().read_exact_at(&mut found, at).unwrap();
            found
        };
        assert!(found(&rig, MIB) == old, "what was synced is lost");
        let mut tensor = vec![0; rig.bytes.len()];
        File::open(rig.base_path()).unwrap().read_exact_at(&mut tensor, 0).unwrap();
        assert!(tensor == rig.bytes);
        // Without a sync, it is what it was.
        let base = rig.base();
        base.file.write_all_at(&new, at).unwrap();
        base.sync();
        rig.flush(0, BASE);
        assert_eq!(syncs(&rig), 0);
        drop(base);
        crash(&mut rig);
        restart(&mut rig, "0");
        assert!(found(&rig, MIB) == old, "what was synced was written over");
        // A clean stop is a sync.
        let base = rig.base();
        base.file.write_all_at(&new, at).unwrap();
        drop(base);
        rig.run.signal(Signal::SIGTERM);
        assert!(rig.run.child.wait().unwrap().success());
        restart(&mut rig, "0");
        assert!(found(&rig, MIB) == new);
    });
}

#[test]
fn a_snapshot_into_a_pipe_that_nobody_reads_stops_nobody() {
    within(120, || {
        let mut rig = Rig::prepared(|place, command| {
            command.args(["--image", &place.text("image")]);
        });
        let (mut reader, writer) = std::io::pipe().unwrap();
        let holder = UnixStream::connect(rig.place.path("run/holder.sock")).unwrap();
        let text = br#""Save""#;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files = [writer.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        let length = u32::try_from(text.len()).unwrap().to_le_bytes();
        sendmsg(&holder, &[IoSlice::new(&length)], &mut control, SendFlags::empty()).unwrap();
        (&holder).write_all(text).unwrap();
        drop(writer);
        let mut magic = [0; 8];
        reader.read_exact(&mut magic).unwrap();
        assert_eq!(&magic[..7], b"LAMSNAP");
        // It is under way, and goes no further.
        let base = rig.base();
        for round in 0..4 {
            base.file.write_all_at(&noise(round, 4 * MIB), 16 << 20).unwrap();
            base.sync();
            rig.flush(0, BASE);
        }
        rig.view("e8m3");
        drop(base);
        rig.run.signal(Signal::SIGTERM);
        let begun = std::time::Instant::now();
        assert!(rig.run.child.wait().unwrap().success());
        // It would have been killed after half a minute.
        assert!(begun.elapsed() < Duration::from_secs(25), "{:?}", begun.elapsed());
        drop(reader);
    });
}
