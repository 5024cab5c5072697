//! Manifests that anybody may have made.

use super::*;
use crate::device::DeviceConfig;
use crate::tensor::TensorSpec;
use lamina_codec::format::Format;

/// A manifest's head that says so many bytes of JSON and of literals.
fn head(json: u64, literals: u64) -> Vec<u8> {
    let mut head = [&MAGIC[..], &[1; 8], &json.to_le_bytes(), &literals.to_le_bytes()].concat();
    head.resize(HEAD, 0);
    head
}

/// Why a tensor of so many bytes that begins so is no manifest of `m`.
fn refused(bytes: u64, head: &[u8]) -> String {
    let device = Device::new(DeviceConfig::new(8 << 30, 16 << 20)).unwrap();
    let spec = TensorSpec::new(tensor_name("m"), Some(0), bytes, Format::Opaque);
    device.create_tensor(spec).unwrap();
    device.write_base(0, head).unwrap();
    match read(&device, &tensor_name("m")) {
        Err(why) => why.to_string(),
        Ok(_) => panic!("it is one"),
    }
}

#[test]
fn a_tensor_that_calls_itself_a_manifest_is_not_held_whole() {
    let whole = 4_u64 << 30;
    let json = whole - HEAD as u64;
    assert_eq!(
        refused(whole, &head(json, 0)),
        format!(
            "the manifest of \"m\" cannot be used: its JSON has {json} bytes, at most {MAX_JSON} are read"
        )
    );
    assert_eq!(
        refused(whole + 4096, &head(json + 4096, 0)),
        format!(
            "the manifest of \"m\" cannot be used: it has {} bytes, at most {MAX_BYTES} are read",
            whole + 4096
        )
    );
    // What does not come out even is looked at no further.
    assert!(refused(whole, &head(8, 0)).ends_with(&format!("it would end at byte 72 of {whole}")));
    assert!(refused(whole, &head(u64::MAX, u64::MAX)).contains("it would end at byte"));
    assert!(refused(63, &[7; 63]).ends_with("it has 63 bytes, and its head alone 64"));
    assert!(refused(16 << 20, &head(1 << 20, (15 << 20) - 64)).ends_with("its checksum is another"));
}

#[test]
fn a_manifest_that_could_not_be_read_again_is_not_written() {
    let views = (0..1 << 20).map(|number| format!("{number:064}")).collect();
    let (files, maps) = (Vec::new(), BTreeMap::new());
    let manifest = Manifest { name: "m".to_owned(), id: 1, files, views, maps, base: None };
    let why = manifest.encode(&[]).unwrap_err().to_string();
    assert!(why.contains("\"m\" cannot be used: its JSON has"), "{why}");
    assert!(why.ends_with(&format!("at most {MAX_JSON} are read")), "{why}");
}

#[test]
fn a_manifest_is_of_the_model_that_it_is_called_by() {
    let device = Device::new(DeviceConfig::new(16 << 20, 16 << 20)).unwrap();
    let of = |name: &str, paths: &[&str]| {
        let content = Extent { length: 4096, of: Content::Tensor("t".to_owned()) };
        let file = |path: &&str| FileEntry {
            path: (*path).to_owned(),
            kind: FileKind::Other,
            bytes: 4096,
            modified: (0, 0),
            extents: vec![content.clone()],
        };
        let files = paths.iter().map(file).collect();
        Manifest { name: name.to_owned(), id: 1, files, views: Vec::new(), maps: BTreeMap::new(), base: None }
    };
    device.create_tensor(TensorSpec::new("t".to_owned(), Some(0), 4096, Format::Opaque)).unwrap();
    device.write_base(0, &[7; 4096]).unwrap();
    let lies = [
        ("x", of("m", &["f"]), "one of \"m\""),
        ("a/b", of("a/b", &["f"]), "one of \"a/b\""),
        ("a@b", of("a@b", &["f"]), "one of \"a@b\""),
        ("m", of("m", &["a/../b"]), "\"a/../b\" is no path"),
        ("m", of("m", &["/a"]), "\"/a\" is no path"),
        ("m", of("m", &["a", "a"]), "\"a\" is no path of a file, or of two"),
    ];
    for (name, manifest, why) in lies {
        // Neither whole nor removed by half, it is no word about the tensors that it names.
        for mark in [0, 1] {
            let mut bytes = manifest.encode(&[]).unwrap();
            bytes[usize::try_from(MARK).unwrap()] = mark;
            let own = tensor_name(name);
            let spec = TensorSpec::new(own.clone(), Some(4096), bytes.len() as u64, Format::Opaque);
            device.create_tensor(spec).unwrap();
            device.write_base(4096, &bytes).unwrap();
            let refused = read(&device, &own).err().unwrap().to_string();
            assert!(refused.contains(why), "{refused}");
            assert!(super::super::held(&device).is_empty());
            device.remove_tensor(&own).unwrap();
        }
    }
    let mut found = [0; 4096];
    device.read_base(0, &mut found).unwrap();
    assert!(device.tensor("t").is_ok() && found == [7; 4096]);
}
