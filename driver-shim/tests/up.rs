//! Regions and dax devices against a kernel of plain files that insists on the right order.

mod common;

use std::{fs, os::unix::fs::symlink, sync::Arc, time::Duration};

use common::{
    WINDOW,
    kernel::{Config, Kernel},
};
use lamina_shim::{
    Attached, BASE_SERIAL, Error, Lamina, OpenOptions, UpOptions, VIEWS_SERIAL,
    dax::{DaxError, Use},
    region::RegionError,
    sysfs::Tree,
    up,
};

fn options() -> UpOptions {
    UpOptions { wait: Duration::from_millis(200), ..UpOptions::default() }
}

fn ram() -> UpOptions {
    UpOptions { system_ram: true, ..options() }
}

fn bring(kernel: &Arc<Kernel>) -> Result<Attached, Error> {
    up(&kernel.tree(), &options())
}

/// Opens what sysfs shows and holds one view against the file.
fn reads(kernel: &Arc<Kernel>) -> Lamina {
    let none = OpenOptions { base: None, views: None, tree: kernel.tree(), ..kernel.windows.options() };
    let lamina = Lamina::open(&none).unwrap();
    let span = lamina.span("w", "e8m3").unwrap();
    let mut bytes = vec![0; span.len()];
    span.load(0, &mut bytes).unwrap();
    assert!(bytes == kernel.windows.expected("w", "e8m3"));
    lamina
}

#[test]
fn two_bare_memdevs_become_two_windows() {
    for mem0 in ["base", "views"] {
        for known in [true, false] {
            let mut serials = if known { [BASE_SERIAL, VIEWS_SERIAL] } else { [0, 0] };
            if mem0 == "views" {
                serials.reverse();
            }
            let kernel = Kernel::new(Config { serials, mem0, ..Config::default() });
            let attached = bring(&kernel).unwrap();
            let (base, views) = if mem0 == "base" { ("mem0", "mem1") } else { ("mem1", "mem0") };
            assert_eq!((&*attached.base.memdev, &*attached.views.memdev), (base, views), "{known}");
            assert!(attached.base.created && attached.views.created);
            assert_eq!((attached.base.bytes, attached.base.align), (WINDOW, 2 << 20));
            assert_eq!(attached.base.r#use, Some(Use::Devdax));
            let lamina = reads(&kernel);
            let span = lamina.span("w", "base").unwrap();
            let mut bytes = vec![0; span.len()];
            span.load(0, &mut bytes).unwrap();
            assert!(bytes == kernel.windows.expected("w", "base"), "{mem0} {known}");
        }
    }
}

#[test]
fn up_again_writes_nothing() {
    for set in [None, "4x256".parse().ok()] {
        let kernel = Kernel::new(Config { set, ..Config::default() });
        let first = bring(&kernel).unwrap();
        let writes = kernel.writes();
        let second = bring(&kernel).unwrap();
        assert_eq!(kernel.writes(), writes);
        assert!(!second.base.created && !second.views.created);
        assert_eq!((first.base.node, first.views.node), (second.base.node, second.views.node));
    }
}

#[test]
fn the_targets_of_a_set_become_one_region_in_their_order() {
    for (set, memdevs, views) in [("2x256", "mem1, mem0", "mem2"), ("4x4K", "mem3, mem2, mem1, mem0", "mem4")]
    {
        let kernel = Kernel::new(Config { set: set.parse().ok(), ..Config::default() });
        let attached = bring(&kernel).unwrap();
        assert_eq!((&*attached.base.memdev, &*attached.views.memdev), (memdevs, views));
        assert_eq!((attached.base.bytes, attached.base.created), (WINDOW, true));
        reads(&kernel);
        assert_eq!(kernel.room(), 0);
    }
}

#[test]
fn a_set_that_stopped_half_way_is_finished_and_one_without_a_target_is_not_begun() {
    let config = || Config { set: "2x256".parse().ok(), ..Config::default() };
    let kernel = Kernel::new(config());
    let tree = kernel.tree();
    for (path, value) in [
        ("decoder0.0/create_ram_region", "region0"),
        ("region0/interleave_granularity", "256"),
        ("region0/interleave_ways", "2"),
        ("region0/size", "16777216"),
        ("decoder2.0/mode", "ram"),
        ("decoder2.0/dpa_size", "8388608"),
        ("region0/target1", "decoder2.0"),
    ] {
        tree.write(format!("bus/cxl/devices/{path}"), value).unwrap();
    }
    let attached = bring(&kernel).unwrap();
    assert_eq!((&*attached.base.region, attached.base.created), ("region0", false));
    reads(&kernel);

    let kernel = Kernel::new(config());
    kernel.put("sys/bus/cxl/devices/mem1/serial", "0x99");
    let why = bring(&kernel).unwrap_err().to_string();
    assert!(why.contains("all targets of one set") && why.contains("mem0") && !why.contains("mem1"), "{why}");
    assert_eq!(kernel.writes(), 0);

    let kernel = Kernel::new(config());
    kernel.put("sys/bus/cxl/devices/mem1/ram/size", "0x1000000");
    let why = bring(&kernel).unwrap_err().to_string();
    assert!(why.contains("16777216, 8388608"), "{why}");
    assert_eq!(kernel.writes(), 0);
}

#[test]
fn an_attempt_that_stopped_half_way_is_finished() {
    let kernel = Kernel::new(Config::default());
    let tree = kernel.tree();
    let cxl = "bus/cxl/devices";
    for (path, value) in [
        ("decoder0.0/create_ram_region", "region0"),
        ("region0/interleave_granularity", "256"),
        ("region0/interleave_ways", "1"),
        ("region0/size", "16777216"),
        ("decoder2.0/mode", "ram"),
        ("decoder2.0/dpa_size", "16777216"),
        ("region0/target0", "decoder2.0"),
    ] {
        tree.write(format!("{cxl}/{path}"), value).unwrap();
    }
    let attached = bring(&kernel).unwrap();
    assert_eq!((&*attached.base.region, attached.base.created), ("region0", false));
    assert!(attached.views.created);
    reads(&kernel);
}

#[test]
fn the_base_can_be_system_ram_and_stays_it() {
    let kernel = Kernel::new(Config::default());
    let attached = up(&kernel.tree(), &ram()).unwrap();
    assert_eq!((attached.base.r#use, attached.views.r#use), (Some(Use::SystemRam), Some(Use::Devdax)));
    for block in 4..8 {
        let state = kernel.get(&format!("sys/devices/system/memory/memory{block}/state"));
        assert_eq!(state, "online_movable", "{block}");
    }
    assert!(matches!(reads(&kernel).span("w", "base"), Err(Error::NoBase)));

    let again = up(&kernel.tree(), &ram()).unwrap();
    assert_eq!(again.base.r#use, Some(Use::SystemRam));
    let error = bring(&kernel).unwrap_err();
    assert!(matches!(error, Error::Dax(DaxError::SystemRam { .. })), "{error}");
}

#[test]
fn too_small_a_cxl_window_is_named_and_nothing_stays_behind() {
    let kernel = Kernel::new(Config { room: WINDOW + 4096, ..Config::default() });
    let error = bring(&kernel).unwrap_err();
    assert!(matches!(error, Error::Region(RegionError::NoRoom { .. })), "{error}");
    let text = error.to_string();
    for word in ["mem1", "16777216", "decoder0.0", "cxl-fmw"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert!(!kernel.path("sys/bus/cxl/devices/region1").exists());
    assert_eq!(kernel.room(), 4096);
}

#[test]
fn a_refused_commit_says_what_to_tell_qemu_and_leaves_no_region() {
    let kernel = Kernel::new(Config { commit: Some(6), ..Config::default() });
    let error = bring(&kernel).unwrap_err().to_string();
    assert!(error.contains("-hypervisor"), "{error}");
    assert!(!kernel.path("sys/bus/cxl/devices/region0").exists());
    assert_eq!(kernel.room(), 2 * WINDOW);
    assert_eq!(kernel.get("sys/bus/cxl/devices/decoder2.0/region"), "");

    let kernel = Kernel::new(Config { commit: Some(5), ..Config::default() });
    let error = bring(&kernel).unwrap_err().to_string();
    assert!(!error.contains("-hypervisor") && error.contains("region0/commit"), "{error}");
}

#[test]
fn other_peoples_memdevs_are_left_alone() {
    let kernel = Kernel::new(Config { serials: [BASE_SERIAL, VIEWS_SERIAL], ..Config::default() });
    kernel.put("sys/bus/cxl/devices/mem2/serial", "0x99");
    kernel.put("sys/bus/cxl/devices/mem2/ram/size", "0x1000000");
    fs::create_dir_all(kernel.path("sys/bus/cxl/devices/endpoint4")).unwrap();
    symlink("../mem2", kernel.path("sys/bus/cxl/devices/endpoint4/uport")).unwrap();
    let attached = bring(&kernel).unwrap();
    assert_eq!((&*attached.base.memdev, &*attached.views.memdev), ("mem0", "mem1"));
    assert!(!kernel.path("sys/bus/cxl/devices/region2").exists());
}

#[test]
fn a_window_without_a_directory_is_no_views_window() {
    let kernel = Kernel::new(Config::default());
    kernel.windows.file("views").set_len(0).unwrap();
    kernel.windows.file("views").set_len(WINDOW).unwrap();
    let error = bring(&kernel).unwrap_err();
    assert!(matches!(error, Error::Directory { .. }), "{error}");
}

#[test]
fn missing_parts_of_the_platform_are_named() {
    let missing = |remove: &[&str]| {
        let kernel = Kernel::new(Config::default());
        for path in remove {
            let path = kernel.path(path);
            if path.is_dir() { fs::remove_dir_all(path).unwrap() } else { fs::remove_file(path).unwrap() }
        }
        bring(&kernel).unwrap_err().to_string()
    };
    for (remove, says) in [
        (&["sys/bus/cxl/devices"][..], "found: none"),
        (&["sys/bus/cxl/devices/mem1"], "mem0 (port endpoint2)"),
        (&["sys/bus/cxl/devices/endpoint3"], "mem1 (port none)"),
        (&["sys/bus/cxl/devices/decoder2.0"], "endpoint2 has no decoders"),
        (&["sys/bus/cxl/devices/mem0/ram/size"], "volatile-memdev"),
        (&["sys/bus/cxl/devices/decoder0.0"], "create_ram_region"),
        (&["sys/bus/cxl/devices/decoder2.0/dpa_size"], "decoder2.0/dpa_size"),
        (&["sys/bus/dax/drivers/device_dax"], "modprobe device_dax"),
    ] {
        let error = missing(remove);
        assert!(error.contains(says), "{remove:?}: {error}");
    }
    let error = bring(&Kernel::new(Config { dax_cxl: false, ..Config::default() })).unwrap_err().to_string();
    assert!(error.contains("region0 brought no dax device") && error.contains("modprobe dax_cxl"), "{error}");
}

#[test]
fn a_virtio_device_without_its_driver_is_said_to_lack_that() {
    let root = tempfile::tempdir().unwrap();
    let device = root.path().join("sys/bus/virtio/devices/virtio3");
    fs::create_dir_all(&device).unwrap();
    fs::write(device.join("device"), "0x0006\n").unwrap();
    // A tree with somebody who reacts: no module is loaded.
    let tree = Tree::at(root.path(), Some(Arc::new(|_, _| Ok(()))));
    let error = up(&tree, &options()).unwrap_err();
    assert!(matches!(&error, Error::NoDriver { device, .. } if device == "virtio3"), "{error}");
    assert!(error.to_string().contains("within 0.2 s: load the module `lamina`"), "{error}");
    // Another device is nobody's business.
    fs::write(device.join("device"), "0x0004\n").unwrap();
    assert!(matches!(up(&tree, &options()), Err(Error::Memdevs { .. })));
}

#[test]
fn before_up_there_is_nothing_to_open() {
    let kernel = Kernel::new(Config::default());
    let none = OpenOptions { base: None, views: None, tree: kernel.tree(), ..kernel.windows.options() };
    let error = Lamina::open(&none).unwrap_err();
    assert!(error.to_string().contains("lamina-shim up"), "{error}");
}
