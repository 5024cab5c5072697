//! Pools in the base window: only where nothing else lies, whatever is forced.

use std::fs;
use std::path::Path;

use lamina_pool::{Geometry, PoolError, local};
use lamina_reference::Format;

use crate::common::{Place, floats, noise, safetensors};

#[test]
fn a_pool_takes_neither_files_nor_models_whatever_is_forced() {
    let place = Place::new();
    let model = safetensors(&[("w", "BF16", vec![9000], floats(Format::Bf16, 1, 9000))]);
    let image = place.text("image");
    let path = place.write("w.safetensors", &model);
    place.mount(&["--image", &image, "--files", "256M", &path]);
    let precious = noise(2, 300_000);
    fs::write(place.path("m/files/precious"), &precious).unwrap();
    let base = place.text("m/base");
    let whole = |when: &str| {
        assert!(place.read("w/w.safetensors") == model, "{when}");
        assert!(fs::read(place.path("m/files/precious")).unwrap() == precious, "{when}");
    };
    for more in [&[][..], &["--force"], &["--force", "--kv", "64"], &["--force", "--json"]] {
        let output = place.lamina(&[&["pool", "create", &base], more].concat());
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(4), 0), "{said}");
        assert!(said.contains("files/, models/w lie there") && !said.contains("--force"), "{said}");
        // An empty files/ cannot be removed.
        assert!(said.contains("with --files 0"), "{said}");
        whole("after it was refused");
    }
    // Nor by the library.
    let refused = local::create(Path::new(&base), &Geometry::fitting(64 << 20));
    assert!(
        matches!(&refused, Err(PoolError::Held { holds, .. }) if holds == "files/, models/w"),
        "{refused:?}"
    );
    let refused = local::open_or_create(Path::new(&base), &Geometry::fitting(64 << 20), |_| Ok(()));
    assert!(refused.is_err());
    place.said(&["umount", &place.text("m")]);
    place.mount(&["--image", &image]);
    whole("after it was mounted again");
    // In files/ there is room for one.
    let pool = place.text("m/files/pool");
    place.said(&["pool", "create", &pool, "--size", "8M"]);
    place.said(&["pool", "put", &pool, "object", &path]);
    whole("beside a pool");
}

#[test]
fn a_pool_takes_no_tensor_but_a_pools() {
    let place = Place::new();
    place.mount(&["--capacity", "256M"]);
    let base = place.text("m/base");
    let names = ["a", "b", "c", "d", "e", "f"];
    for name in names {
        place.said(&["tensor", "add", name, "--length", "64K", "--format", "bf16"]);
    }
    let refused = place.refused(&["pool", "create", &base, "--force"]);
    let all = "the tensor a, the tensor b, the tensor c, the tensor d and 2 more lie there";
    assert!(refused.contains(all), "{refused}");
    for name in names {
        place.said(&["tensor", "rm", name]);
    }
    place.said(&["pool", "create", &base]);
    // Where a pool is, with a class or without, another one takes its place.
    let from = place.write("from", &noise(3, 100_000));
    for more in [&["--kv", "64"][..], &[], &["--kv", "64,256"]] {
        place.said(&["pool", "put", &base, "object", &from]);
        assert!(place.refused(&["pool", "create", &base]).contains("--force has it lost"));
        place.said(&[&["pool", "create", &base, "--force"], more].concat());
        assert_eq!(place.said(&["pool", "ls", &base]), "");
    }
}

#[test]
fn names_that_are_not_there_are_said_as_names() {
    let place = Place::new();
    place.mount(&["--capacity", "256M"]);
    let base = place.text("m/base");
    place.said(&["pool", "create", &base]);
    assert!(
        place.refused(&["pool", "rm", &base, "x", "y z"]).contains("there is no object \"x\", \"y z\"\n")
    );
    let refused = place.refused(&["pool", "fence", "one"]);
    assert!(refused.contains("no host one shares this memory; it has no hosts"), "{refused}");
}
