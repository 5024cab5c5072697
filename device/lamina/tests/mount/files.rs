//! Files as they are: directories, shards, and what a read-only folder says.

use std::fs::{self, File, OpenOptions};
use std::io;

use lamina_reference::Format;
use rustix::fs::SeekFrom;
use serde_json::json;

use crate::common::{Place, floats, safetensors};

/// A model in two shards with what else lies beside them.
pub(crate) fn sharded(place: &Place, folder: &str) -> String {
    let shard =
        |name: &str, seed| safetensors(&[(name, "BF16", vec![30, 40], floats(Format::Bf16, seed, 1200))]);
    place.write(&format!("{folder}/model-00001-of-00002.safetensors"), &shard("a", 1));
    place.write(&format!("{folder}/model-00002-of-00002.safetensors"), &shard("b", 2));
    let index = json!({ "weight_map": {
        "a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"
    }});
    place.write(&format!("{folder}/model.safetensors.index.json"), index.to_string().as_bytes());
    place.write(&format!("{folder}/config.json"), br#"{"model_type": "llama"}"#);
    place.write(&format!("{folder}/tokenizer/merges.txt"), &b"a b\n".repeat(3000));
    place.write(&format!("{folder}/tokenizer/empty"), b"");
    place.text(folder)
}

#[test]
fn a_directory_is_there_with_everything_in_it_and_at_a_precision_as_a_whole() {
    let place = Place::new();
    let source = sharded(&place, "Llama");
    place.mount(&[&source]);
    // `cp -r` finds the folder as it was.
    let run = |words: &[&std::path::Path]| {
        let status = std::process::Command::new(words[0]).args(&words[1..]).status();
        assert!(status.unwrap().success(), "{words:?}");
    };
    let (copy, of) = (place.path("copy"), place.model("Llama"));
    run(&["cp".as_ref(), "-r".as_ref(), &of, &copy]);
    run(&["diff".as_ref(), "-r".as_ref(), &copy, &place.path("Llama")]);
    let files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer/empty",
        "tokenizer/merges.txt",
    ];
    for file in files {
        let source = fs::read(place.path("Llama").join(file)).unwrap();
        assert!(place.read(&format!("Llama/{file}")) == source, "{file}");
        let shown = place.read(&format!("Llama@e8m3/{file}"));
        assert_eq!(shown == source, !file.ends_with(".safetensors"), "{file}");
    }
    // By an index alone too, without the rest.
    let index = place.text("Llama/model.safetensors.index.json");
    place.said(&["load", "--as", "again", &index]);
    let names = fs::read_dir(place.model("again")).unwrap().count();
    assert_eq!(names, 3);
    assert!(
        place.read("again/model-00002-of-00002.safetensors")
            == place.read("Llama/model-00002-of-00002.safetensors")
    );
}

#[test]
fn what_would_change_a_model_is_told_that_it_is_read_only() {
    let place = Place::new();
    place.mount(&[&sharded(&place, "Llama")]);
    let file = place.model("Llama/config.json");
    let refused = |done: io::Result<()>, what: &str| {
        assert_eq!(done.map_err(|why| why.raw_os_error()), Err(Some(libc::EROFS)), "{what}");
    };
    refused(OpenOptions::new().append(true).open(&file).map(drop), "append");
    refused(File::create(&file).map(drop), "truncate");
    refused(File::create(place.model("Llama/new")).map(drop), "create");
    refused(fs::remove_file(&file), "rm");
    refused(fs::rename(&file, place.model("Llama/other")), "mv");
    refused(fs::create_dir(place.model("Llama/new")), "mkdir");
    refused(fs::create_dir(place.path("m/models/new")), "mkdir beside it");
    refused(fs::remove_dir(place.model("Llama")), "rmdir");
    refused(std::os::unix::fs::symlink("x", place.model("Llama/link")), "ln -s");
    refused(File::open(&file).unwrap().set_modified(std::time::SystemTime::UNIX_EPOCH), "touch");
    let attribute = rustix::fs::setxattr(&file, "user.x", b"y", rustix::fs::XattrFlags::empty());
    assert_eq!(attribute, Err(rustix::io::Errno::ROFS));
    // What changes nothing is accepted, as anywhere.
    fs::set_permissions(&file, fs::metadata(&file).unwrap().permissions()).unwrap();
    let opened = File::open(&file).unwrap();
    let end = opened.metadata().unwrap().len();
    assert_eq!(rustix::fs::seek(&opened, SeekFrom::Data(3)).unwrap(), 3);
    assert_eq!(rustix::fs::seek(&opened, SeekFrom::Hole(3)).unwrap(), end);
    assert_eq!(place.read("Llama/config.json"), br#"{"model_type": "llama"}"#);
}
