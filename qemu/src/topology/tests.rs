use super::*;
use std::fs::File;
use std::os::unix::net::UnixListener;

fn sparse(folder: &Path, name: &str, bytes: u64) -> PathBuf {
    let path = folder.join(name);
    File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

fn topology(folder: &Path) -> Topology {
    Topology {
        base: sparse(folder, "base", 512 << 20),
        base_bytes: 512 << 20,
        views: sparse(folder, "views", 256 << 20),
        views_bytes: 256 << 20,
        memory_mib: 512,
        cpus: 2,
        control: None,
        report: None,
    }
}

#[test]
fn two_devices_share_one_window_as_large_as_both() {
    let folder = tempfile::tempdir().unwrap();
    let topology = topology(folder.path());
    topology.check().unwrap();
    let args = topology.args().join(" ");
    assert!(args.contains("cxl-fmw.0.size=768M"), "{args}");
    let (base, views) = (topology.base.display(), topology.views.display());
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
fn sizes_that_cxl_cannot_carry_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for bytes in [0, 1, GRANULE - 1, GRANULE + 4096, u64::MAX, u64::MAX - GRANULE + 1] {
        let topology = Topology { views_bytes: bytes, ..topology(folder.path()) };
        let error = topology.check().unwrap_err();
        assert!(matches!(error, TopologyError::Size { window: "views", bytes: b } if b == bytes), "{error}");
        assert!(error.to_string().contains("256 MiB"), "{error}");
    }
}

#[test]
fn a_memory_file_that_would_be_lengthened_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let topology = Topology { base_bytes: 1 << 30, memory_mib: 1024, ..topology(folder.path()) };
    let error = topology.check().unwrap_err();
    assert!(
        matches!(error, TopologyError::Short { window: "base", found: 0x2000_0000, bytes: 0x4000_0000, .. }),
        "{error}"
    );
}

#[test]
fn a_missing_memory_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let topology = Topology { base: folder.path().join("nothing"), ..topology(folder.path()) };
    let message = topology.check().unwrap_err().to_string();
    assert!(message.contains("base") && message.contains("/nothing"), "{message}");
    let topology = Topology { base: folder.path().to_owned(), ..topology };
    assert!(matches!(topology.check(), Err(TopologyError::File { window: "base", .. })));
}

#[test]
fn memory_grows_with_the_windows_the_kernel_has_to_map() {
    let folder = tempfile::tempdir().unwrap();
    let small = topology(folder.path());
    assert_eq!(Topology::memory_for(64 << 30), 512 + 1024);
    let views = sparse(folder.path(), "large", 64 << 30);
    let large = Topology { views, views_bytes: 64 << 30, ..small };
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
    let args = topology.args().join(" ");
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
