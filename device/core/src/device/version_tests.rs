//! What earlier versions wrote is read, and becomes this version's by an upgrade.

use super::image_tests::{BLOCK, BLOCKS, bytes, read_all};
use super::*;
use lamina_codec::format::Format;
use lamina_store::{entry::Version, snapshot::restore, upgrade::upgrade};

/// What the device held whose snapshot was saved by the last program of version 1.
fn held() -> Vec<u8> {
    let mut all = vec![0; BLOCKS * BLOCK];
    let element = |n: usize| {
        (u16::try_from(90 + n % 64 % 30).unwrap() << 7 | u16::try_from(n % 128).unwrap()).to_le_bytes()
    };
    let rows: Vec<u8> = (0..8 * BLOCK / 2).flat_map(element).collect();
    let mut put = |block: usize, bytes: &[u8]| all[block * BLOCK..][..bytes.len()].copy_from_slice(bytes);
    put(0, &bytes(2, 20 * BLOCK));
    put(BLOCKS / 2, &rows);
    put(BLOCKS - 8, &bytes(3, 2 * BLOCK));
    put(BLOCKS - 5, &bytes(5, 3 * BLOCK));
    put(7, &[poison::PATTERN; BLOCK]);
    put(9, &[0; BLOCK]);
    all
}

#[test]
fn a_snapshot_of_version_1_is_restored_served_and_upgraded() {
    let folder = tempfile::tempdir().unwrap();
    let snapshot = concat!(env!("CARGO_MANIFEST_DIR"), "/../store/tests/golden-images/v1.snapshot");
    let path = folder.path().join("image");
    restore(snapshot.as_ref(), &path).unwrap();
    let config = DeviceConfig { first_process: false, ..DeviceConfig::new(0, 0) };
    let open = || {
        let image = Image::open(&path).unwrap().unwrap();
        (image.clone(), Device::open(image, &config).unwrap())
    };
    let (image, device) = open();
    assert_eq!(image.superblock().version, Version::One);
    assert!(read_all(&device) == held());
    assert!(device.stats().blocks.heads_bytes > 0, "a KV window is coded channel by channel");
    // Entries of version 1 have no number for what came later.
    assert!(device.holds(Format::Int4) && !device.holds(Format::Fp4E2m1));
    let spec = |name: &str| TensorSpec {
        name: name.to_owned(),
        dpa: None,
        length: 4096,
        elements: None,
        shape: Vec::new(),
        format: Format::Fp4E2m1,
        layout: crate::layout::Layout::default(),
        codec: None,
        base: None,
    };
    let refused = device.create_tensor(spec("new")).unwrap_err().to_string();
    assert!(refused.contains("new: an image of version 1 has no blocks of fp4_e2m1"), "{refused}");
    let refused = TensorSpec { format: Format::Bf16, base: Some("w".into()), ..spec("new") };
    let refused = device.create_tensor(refused).unwrap_err().to_string();
    assert!(refused.contains("an image of version 1 has no differences"), "{refused}");
    // It is written as it was, too.
    let own = bytes(6, BLOCK);
    device.write_base((15 * BLOCK) as u64, &own).unwrap();
    drop(device);
    upgrade(&image, &path).unwrap();
    drop(image);
    let (image, device) = open();
    assert_eq!(image.superblock().version, Version::Two);
    let mut wanted = held();
    wanted[15 * BLOCK..16 * BLOCK].copy_from_slice(&own);
    assert!(read_all(&device) == wanted);
    assert_eq!((device.tensors().len(), device.views().len()), (2, 1));
    assert!(device.stats().blocks.heads_bytes > 0);
    assert!(device.holds(Format::Fp4E2m1));
    device.write_base(0, &bytes(9, BLOCKS * BLOCK)).unwrap();
    device.flush(0, device.base_bytes()).unwrap();
    assert!(read_all(&device) == bytes(9, BLOCKS * BLOCK));
}

#[test]
fn what_version_1_has_no_number_for_is_loaded_as_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let snapshot = concat!(env!("CARGO_MANIFEST_DIR"), "/../store/tests/golden-images/v1.snapshot");
    let path = folder.path().join("image");
    restore(snapshot.as_ref(), &path).unwrap();
    let config = DeviceConfig { first_process: false, ..DeviceConfig::new(0, 0) };
    let device = Device::open(Image::open(&path).unwrap().unwrap(), &config).unwrap();
    for tensor in device.tensors() {
        device.remove_tensor(&tensor.name).unwrap();
    }
    device.discard(0, device.base_bytes()).unwrap();
    let elements = bytes(7, 64);
    let (_file, model) = crate::load::tests::checkpoint(&[
        ("x_blocks", "U8", &[2, 2, 16], elements.clone()),
        ("x_scales", "U8", &[2, 2], vec![120; 4]),
        ("w", "F8_E5M2", &[4], vec![1; 4]),
    ]);
    let options = crate::load::LoadOptions::default();
    let loaded =
        crate::load::load_model(&device, &model, &options, |_| std::ops::ControlFlow::Continue(())).unwrap();
    let formats: Vec<_> = loaded.tensors.iter().map(|tensor| tensor.format).collect();
    assert_eq!(formats, [Format::Opaque, Format::Opaque, Format::Fp8E5m2]);
    let mut found = vec![0; 64];
    device.read_base(loaded.tensors[0].dpa, &mut found).unwrap();
    assert!(found == elements);
}
