//! What the two files are, and what they refuse.

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::Stdio;
use std::sync::Arc;

use lamina_device::device::{Device, DeviceConfig};
use lamina_serve::{Mount, MountOptions, MountPoint, ServeError};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use crate::common::{BASE, Place, Rig, TENSOR, VIEWS, eventually, lamina, mounted, noise, within};

#[test]
fn the_mount_shows_two_files_of_the_windows_sizes_for_their_owner_alone() {
    within(60, || {
        let rig = Rig::new("auto");
        let mut names: Vec<_> =
            fs::read_dir(rig.place.path("mount")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["base", "models", "views"]);
        for (path, size) in [(rig.base_path(), BASE), (rig.place.path("mount/views"), VIEWS)] {
            let found = fs::metadata(path).unwrap();
            assert_eq!((found.len(), found.mode() & 0o7777), (size, 0o600));
        }
    });
}

#[test]
fn views_are_the_references_bytes_by_read_and_by_load() {
    within(120, || {
        let rig = Rig::new("auto");
        let spellings = [
            "full",
            "e8m3",
            "e8m3+g2",
            "e4m3+d2:packed",
            "e5m0:packed",
            "e8m2+g3:packed",
            "fp8_e4m3fn",
            "fp8_e5m2+g1",
        ];
        let views: Vec<_> = spellings.iter().map(|spelling| rig.view(spelling)).collect();
        let (base, window) = (rig.base(), rig.views());
        assert!(base.load(0, TENSOR) == rig.bytes, "base");
        for (spelling, view) in spellings.iter().zip(views) {
            let expected = rig.expected(spelling);
            assert_eq!(view.length, expected.len() as u64, "{spelling}");
            assert!(window.load(view.offset, expected.len()) == expected, "{spelling} by load");
            assert!(window.read(view.offset, expected.len()) == expected, "{spelling} by read");
            let odd = window.read(view.offset + 4093, 777);
            assert!(odd == expected[4093..4093 + 777], "{spelling} at an odd place");
            let behind = window.read(view.offset + view.length, 100);
            assert_eq!(behind, [0; 100], "behind {spelling}");
        }
    });
}

#[test]
fn a_touched_page_is_read_alone() {
    within(60, || {
        let rig = Rig::new("auto");
        let view = rig.view("e8m3");
        let (base, views) = (rig.base(), rig.views());
        base.load(5 * 4096 + 17, 1);
        views.load(view.offset + 9 * 4096, 1);
        let requests = rig.requests();
        for window in ["base", "views"] {
            assert_eq!(requests[window]["reads"], 1, "{requests}");
            assert_eq!(requests[window]["bytes"], 4096, "{requests}");
        }
    });
}

#[test]
fn nothing_lies_past_the_end() {
    within(60, || {
        let rig = Rig::new("auto");
        let base = rig.base();
        assert_eq!(base.file.read_at(&mut [0; 16], BASE).unwrap(), 0);
        assert_eq!(base.file.read_at(&mut [0; 16], BASE - 4).unwrap(), 4);
        let refused = base.file.write_at(&[1; 16], BASE).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC));
        assert!(base.file.write_all_at(&[1; 16], BASE - 4).is_err());
        assert_eq!(fs::metadata(rig.base_path()).unwrap().len(), BASE);
        // A fresh descriptor asks the kernel anew.
        assert_eq!(rig.base().file.read_at(&mut [0; 16], BASE).unwrap(), 0);
    });
}

#[test]
fn the_files_cannot_be_resized() {
    within(60, || {
        let rig = Rig::new("auto");
        let (base, views) = (rig.base(), rig.views());
        for size in [0, BASE - 1, BASE + 1] {
            assert_eq!(base.file.set_len(size).unwrap_err().kind(), ErrorKind::PermissionDenied, "{size}");
        }
        base.file.set_len(BASE).unwrap();
        views.file.set_len(VIEWS).unwrap();
        assert_eq!(views.file.set_len(0).unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
        let opened = fs::File::create(rig.place.path("mount/views"));
        assert_eq!(opened.unwrap_err().kind(), ErrorKind::ReadOnlyFilesystem);
        assert!(base.load(0, TENSOR) == rig.bytes);
    });
}

#[test]
fn punching_a_hole_drops_bytes_in_both_windows_and_other_fallocates_are_refused() {
    within(60, || {
        let mut rig = Rig::new("auto");
        let view = rig.view("full");
        let (base, views) = (rig.base(), rig.views());
        assert!(views.load(view.offset, TENSOR) == rig.bytes);
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(base.file.as_fd(), hole, 4096 * 3, 8192).unwrap();
        rig.bytes[4096 * 3..4096 * 5].fill(0);
        assert!(base.load(0, TENSOR) == rig.bytes);
        eventually("the hole shows in the view", || views.load(view.offset, TENSOR) == rig.bytes);
        rig.ask("POST", "/discard", &json!({ "offset": 100, "length": 5000 }));
        rig.bytes[100..5100].fill(0);
        assert!(base.load(0, TENSOR) == rig.bytes);
        assert!(views.load(view.offset, TENSOR) == rig.bytes);
        assert_eq!(
            fallocate(base.file.as_fd(), FallocateFlags::empty(), 0, 4096),
            Err(nix::errno::Errno::EOPNOTSUPP)
        );
        assert!(fallocate(views.file.as_fd(), hole, 0, 4096).is_err());
        assert_eq!(rig.try_ask("POST", "/discard", &json!({ "offset": BASE, "length": 1 })).0, 422);
    });
}

#[test]
fn a_mount_point_in_use_is_refused_by_name() {
    within(60, || {
        let rig = Rig::new("auto");
        let refused = MountPoint::prepare(&rig.place.path("mount")).unwrap_err();
        let text = refused.to_string();
        assert!(matches!(refused, ServeError::MountPointBusy { .. }), "{text}");
        assert!(text.contains(&rig.run.child.id().to_string()), "{text}");
        // And it still works.
        assert!(rig.base().load(0, TENSOR) == rig.bytes);
    });
}

#[test]
fn of_two_devices_that_load_for_one_mount_point_one_is_refused_and_the_other_is_served() {
    within(120, || {
        let place = Place::new();
        let bytes = noise(7, 24 << 20);
        let model = place.checkpoint("t", &bytes);
        let devices = ["one", "other"].map(|run| {
            let (mount, run) = (place.text("mount"), place.text(run));
            let mut command = lamina(&["serve", "--json", "--mount", &mount, "--run-dir", &run]);
            command.args(["--model", &model]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        });
        let mut ended = devices.map(|mut device| {
            let mut ready = String::new();
            BufReader::new(device.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
            (device, ready.contains("\"ready\":true"))
        });
        assert!(ended[0].1 != ended[1].1, "{ended:?}");
        ended.sort_by_key(|(_, is_ready)| *is_ready);
        let [(refused, _), (served, _)] = ended;
        let refused = refused.wait_with_output().unwrap();
        let why = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && why.contains(&place.text("mount")), "{why}");
        let base = place.path("mount/base");
        let found = crate::common::Window::open(&base).read(0, bytes.len());
        assert!(found == bytes, "the one that is served is not harmed");
        let pid = Pid::from_raw(i32::try_from(served.id()).unwrap());
        kill(pid, Signal::SIGTERM).unwrap();
        assert!(served.wait_with_output().unwrap().status.success());
    });
}

#[test]
fn a_device_whose_holder_is_killed_leaves_no_mount() {
    within(60, || {
        let mut rig = Rig::new("auto");
        rig.run.signal(Signal::SIGKILL);
        rig.run.child.wait().unwrap();
        eventually("no mount", || !mounted(&rig.place.path("mount")));
        assert!(rig.place.path("mount").read_dir().unwrap().next().is_none());
    });
}

#[test]
fn unmounting_keeps_what_was_written_and_clears_the_mount_point() {
    within(60, || {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("mount");
        let device = Arc::new(Device::new(DeviceConfig::new(1 << 20, 4 << 20)).unwrap());
        let point = MountPoint::prepare(&path).unwrap();
        let mount = Mount::new(&device, point, &MountOptions::default()).unwrap();
        fs::OpenOptions::new()
            .write(true)
            .open(mount.base_path())
            .unwrap()
            .write_all_at(b"kept", 70)
            .unwrap();
        drop(mount);
        assert!(!path.exists());
        let mut found = [0; 4];
        device.read_base(70, &mut found).unwrap();
        assert_eq!(found, *b"kept");
    });
}

#[test]
fn unmounting_does_not_wait_for_those_who_still_map_a_window() {
    within(60, || {
        let Rig { run, place, .. } = Rig::new("auto");
        let mut base = crate::common::Window::open(&place.path("mount/base"));
        base.store(70, b"stored");
        run.signal(Signal::SIGTERM);
        assert!(run.end().success());
        assert!(!mounted(&place.path("mount")) && !place.path("mount").exists());
        assert_eq!(base.load(70, 6), *b"stored", "what was loaded stays readable");
    });
}

#[test]
fn one_process_can_serve_many_devices() {
    within(60, || {
        let directory = tempfile::tempdir().unwrap();
        let mounts: Vec<_> = (0..4_u8)
            .map(|number| {
                let device = Arc::new(Device::new(DeviceConfig::new(1 << 20, 4 << 20)).unwrap());
                device.write_base(0, &[number]).unwrap();
                let point = MountPoint::prepare(&directory.path().join(number.to_string())).unwrap();
                Mount::new(&device, point, &MountOptions::default()).unwrap()
            })
            .collect();
        for (number, mount) in mounts.iter().enumerate() {
            assert_eq!(usize::from(fs::read(mount.base_path()).unwrap()[0]), number);
        }
    });
}
