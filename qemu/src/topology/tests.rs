use super::cxl::GRANULE;
use super::*;
use crate::version::OLDEST;
use std::fs::File;
use std::os::unix::net::UnixListener;

fn sparse(folder: &Path, name: &str, bytes: u64) -> PathBuf {
    let path = folder.join(name);
    File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

fn windows(folder: &Path) -> Cxl {
    let (base, views) = (sparse(folder, "base", 512 << 20), sparse(folder, "views", 256 << 20));
    Cxl { base, base_bytes: 512 << 20, views, views_bytes: 256 << 20, targets: None }
}

fn topology(folder: &Path) -> Topology {
    with(Attach::Cxl(windows(folder)))
}

fn with(attach: Attach) -> Topology {
    Topology { attach, memory_mib: 512, cpus: 2, control: None, report: None }
}

#[test]
fn two_devices_share_one_window_as_large_as_both() {
    let folder = tempfile::tempdir().unwrap();
    let topology = topology(folder.path());
    topology.check().unwrap();
    let args = topology.args(OLDEST).join(" ");
    assert!(args.contains("cxl-fmw.0.size=768M"), "{args}");
    let (base, views) = (folder.path().join("base"), folder.path().join("views"));
    let (base, views) = (base.display(), views.display());
    assert!(
        args.contains(&format!("memory-backend-file,id=base,share=on,size=512M,mem-path={base}")),
        "{args}"
    );
    assert!(
        args.contains(&format!("memory-backend-file,id=views,share=on,size=256M,mem-path={views}")),
        "{args}"
    );
    assert!(args.contains("cxl-type3,id=mem0,bus=rp0,volatile-memdev=base,sn=0x4c616d696e610000"), "{args}");
    assert!(args.contains("cxl-type3,id=mem1,bus=rp1,volatile-memdev=views,sn=0x4c616d696e610001"), "{args}");
    assert!(!args.contains("virtio"), "{args}");
}

#[test]
fn the_targets_of_a_set_stand_for_its_base() {
    let folder = tempfile::tempdir().unwrap();
    let files: Vec<_> =
        (0..2).map(|target| sparse(folder.path(), &format!("target{target}"), 256 << 20)).collect();
    let set = "2x4K".parse().unwrap();
    let of = |files: &[PathBuf], base_bytes| {
        let targets = Some(Targets { set, files: files.to_vec() });
        with(Attach::Cxl(Cxl { base_bytes, targets, ..windows(folder.path()) }))
    };
    let topology = of(&files, 512 << 20);
    topology.check().unwrap();
    let args = topology.args(OLDEST).join(" ");
    assert!(args.contains("cxl-fmw.0.size=768M"), "{args}");
    for (target, file) in files.iter().enumerate() {
        let memory = format!("id=target{target},share=on,size=256M,mem-path={}", file.display());
        let device = format!(
            "id=mem{target},bus=rp{target},volatile-memdev=target{target},sn=0x4c616d696e61142{target}"
        );
        assert!(args.contains(&memory) && args.contains(&device), "{args}");
    }
    assert!(args.contains("id=mem2,bus=rp2,volatile-memdev=views,sn=0x4c616d696e610001"), "{args}");
    assert!(!args.contains("base"), "{args}");
    for (files, bytes) in [(&files[..1], 512 << 20), (&files, 256 << 20), (&files, 768 << 20)] {
        let error = of(files, bytes).check().unwrap_err();
        assert!(
            matches!(error, TopologyError::Set { .. }) && error.to_string().contains("536870912"),
            "{error}"
        );
    }
    std::fs::remove_file(&files[1]).unwrap();
    let error = of(&files, 512 << 20).check().unwrap_err();
    assert!(matches!(error, TopologyError::File { window: "interleave target", .. }), "{error}");
}

#[test]
fn sizes_that_cxl_cannot_carry_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for bytes in [0, 1, GRANULE - 1, GRANULE + 4096, u64::MAX, u64::MAX - GRANULE + 1] {
        let topology = with(Attach::Cxl(Cxl { views_bytes: bytes, ..windows(folder.path()) }));
        let error = topology.check().unwrap_err();
        assert!(matches!(error, TopologyError::Size { window: "views", bytes: b } if b == bytes), "{error}");
        assert!(error.to_string().contains("256 MiB"), "{error}");
    }
}

#[test]
fn a_memory_file_that_would_be_lengthened_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let large = Cxl { base_bytes: 1 << 30, ..windows(folder.path()) };
    let topology = Topology { memory_mib: 1024, ..with(Attach::Cxl(large)) };
    let error = topology.check().unwrap_err();
    assert!(
        matches!(error, TopologyError::Short { window: "base", found: 0x2000_0000, bytes: 0x4000_0000, .. }),
        "{error}"
    );
}

#[test]
fn a_missing_memory_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let named = |base: PathBuf| with(Attach::Cxl(Cxl { base, ..windows(folder.path()) }));
    let topology = named(folder.path().join("nothing"));
    let message = topology.check().unwrap_err().to_string();
    assert!(message.contains("base") && message.contains("/nothing"), "{message}");
    let topology = named(folder.path().to_owned());
    assert!(matches!(topology.check(), Err(TopologyError::File { window: "base", .. })));
}

#[test]
fn memory_grows_with_the_windows_the_kernel_has_to_map() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(Topology::memory_for(64 << 30), 512 + 1024);
    let views = sparse(folder.path(), "large", 64 << 30);
    let large = with(Attach::Cxl(Cxl { views, views_bytes: 64 << 30, ..windows(folder.path()) }));
    let error = large.check().unwrap_err();
    assert!(matches!(error, TopologyError::Memory { mib: 512, least: 1288 }), "{error}");
    Topology { memory_mib: Topology::memory_for(65 << 30), ..large }.check().unwrap();
}

#[test]
fn the_number_of_processors_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    for cpus in [0, 256] {
        let topology = Topology { cpus, ..topology(folder.path()) };
        assert!(matches!(topology.check(), Err(TopologyError::Cpus { .. })));
    }
}

#[test]
fn ports_carry_the_names_that_guests_look_for() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("ctl");
    let _listener = UnixListener::bind(&socket).unwrap();
    let report = Some(Port::File(folder.path().join("report,1")));
    let topology = Topology { control: Some(socket), report, ..topology(folder.path()) };
    topology.check().unwrap();
    let args = topology.args(OLDEST).join(" ");
    assert!(args.contains("chardev=control,name=org.lamina.ctl"), "{args}");
    assert!(args.contains("chardev=report,name=org.lamina.report"), "{args}");
    assert!(args.contains("report,,1"), "a comma in a path is doubled: {args}");
}

#[test]
fn a_missing_or_wrong_socket_is_found_before_qemu_starts() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let long = folder.path().join("x".repeat(120));
    let plain = sparse(folder.path(), "plain", 0);
    for (path, why) in [(missing, "No such file"), (long, "107"), (plain, "no socket")] {
        let topology = Topology { control: Some(path), ..topology(folder.path()) };
        let message = topology.check().unwrap_err().to_string();
        assert!(message.contains(CONTROL_PORT) && message.contains(why), "{message}");
    }
}

#[test]
fn disks_share_the_guests_ram_and_come_back_with_the_device() {
    let folder = tempfile::tempdir().unwrap();
    let disks: Vec<_> = ["base,1.sock", "views.sock"].map(|name| folder.path().join(name)).to_vec();
    let _listeners: Vec<_> = disks.iter().map(|path| UnixListener::bind(path).unwrap()).collect();
    let topology = with(Attach::VhostUser(VhostUser { disks, queues: 2 }));
    topology.check().unwrap();
    let args = topology.args(OLDEST).join(" ");
    assert!(args.contains("memory-backend-memfd,share=on,id=ram,size=512M"), "{args}");
    assert!(
        args.contains("socket,id=disk0,reconnect-ms=100,path=") && args.contains("base,,1.sock"),
        "{args}"
    );
    assert!(args.contains("vhost-user-blk-pci,id=blk1,bus=pcie.0,chardev=disk1,num-queues=2"), "{args}");
    assert!(!args.contains("cxl"), "{args}");
    // Before QEMU 9.2 there are whole seconds only.
    let old = topology.args(Version { major: 7, minor: 2, patch: 22 }).join(" ");
    assert!(old.contains("reconnect=1,") && !old.contains("reconnect-ms"), "{old}");
}

#[test]
fn disks_need_sockets_and_have_a_bound() {
    let folder = tempfile::tempdir().unwrap();
    let missing = VhostUser { disks: vec![folder.path().join("missing")], queues: 1 };
    let message = with(Attach::VhostUser(missing)).check().unwrap_err().to_string();
    assert!(message.contains("disk 0") && message.contains("No such file"), "{message}");
    for count in [0, vhost_user::MAX_DISKS + 1] {
        let disks = VhostUser { disks: vec!["/x".into(); count], queues: 1 };
        let error = with(Attach::VhostUser(disks)).check().unwrap_err();
        assert!(matches!(error, TopologyError::Disks { disks } if disks == count), "{error}");
    }
}

fn shared(folder: &Path, mailbox: Option<PathBuf>) -> Ivshmem {
    let Cxl { base, base_bytes, views, views_bytes, .. } = windows(folder);
    Ivshmem { base, base_bytes, views, views_bytes, mailbox }
}

#[test]
fn shared_memory_takes_three_slots_and_no_cxl() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("mail,box");
    let _listener = UnixListener::bind(&socket).unwrap();
    let topology = with(Attach::Ivshmem(shared(folder.path(), Some(socket))));
    topology.check().unwrap();
    assert!(topology.attach.maps_mount(), "QEMU must not ask for huge pages of the windows");
    let args = topology.args(OLDEST).join(" ");
    assert!(args.contains("memory-backend-file,id=base,share=on,size=512M,mem-path="), "{args}");
    assert!(args.contains("ivshmem-plain,id=shmem-base,bus=pcie.0,addr=0x10,memdev=base"), "{args}");
    assert!(args.contains("ivshmem-plain,id=shmem-views,bus=pcie.0,addr=0x11,memdev=views"), "{args}");
    assert!(args.contains("mail,,box") && args.contains("addr=0x12,chardev=mailbox,vectors=1"), "{args}");
    assert!(!args.contains("cxl") && !args.contains("virtio"), "{args}");
    let alone = with(Attach::Ivshmem(shared(folder.path(), None)));
    alone.check().unwrap();
    assert!(!alone.args(OLDEST).join(" ").contains("doorbell"));
}

#[test]
fn shared_memory_has_sizes_of_powers_of_two_and_a_socket_that_listens() {
    let folder = tempfile::tempdir().unwrap();
    for bytes in [0, 1, 4096, 3 << 28, (1 << 28) + 1, 1 << 63, u64::MAX] {
        let odd = Ivshmem { views_bytes: bytes, ..shared(folder.path(), None) };
        let error = with(Attach::Ivshmem(odd)).check().unwrap_err();
        assert!(
            matches!(error, TopologyError::NoPowerOfTwo { window: "views", bytes: b } if b == bytes),
            "{error}"
        );
    }
    let long = Ivshmem { base_bytes: 1 << 30, ..shared(folder.path(), None) };
    let error = with(Attach::Ivshmem(long)).check().unwrap_err();
    assert!(matches!(error, TopologyError::Short { window: "base", .. }), "{error}");
    let missing = shared(folder.path(), Some(folder.path().join("missing")));
    let message = with(Attach::Ivshmem(missing)).check().unwrap_err().to_string();
    assert!(message.contains("mailbox") && message.contains("No such file"), "{message}");
}

#[test]
fn windows_mapped_on_request_are_one_device_at_a_socket() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("shmem,sock");
    let topology = with(Attach::Shmem(Shmem { socket: socket.clone() }));
    assert!(topology.check().unwrap_err().to_string().contains("shared memory"));
    let _listener = UnixListener::bind(&socket).unwrap();
    topology.check().unwrap();
    let args = topology.args(OLDEST).join(" ");
    assert!(args.contains("vhost-user-test-device-pci") && args.contains("virtio-id=6"), "{args}");
    assert!(args.contains("shmem,,sock") && args.contains("memory-backend-memfd,share=on"), "{args}");
    assert!(topology.attach.maps_mount() && !args.contains("cxl"), "{args}");
}
