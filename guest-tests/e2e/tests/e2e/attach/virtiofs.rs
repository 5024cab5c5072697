//! Guests that have the mount as a file system: programs that read files, and know nothing of the device.

use std::fmt::Write as _;
use std::process::Command;

use lamina_reference::{Format, view_bytes};

use super::script::{BEGIN, boot, model, reported};

/// The digest of a file of the host, by the host's own tool.
fn sha256(path: &std::path::Path) -> String {
    let output = Command::new("sha256sum").arg(path).output().unwrap();
    assert!(output.status.success());
    String::from_utf8(output.stdout).unwrap().split(' ').next().unwrap().to_owned()
}

#[test]
fn a_guest_opens_models_at_precisions_as_files() {
    if let Err(why) = lamina_qemu::recipe::run("virtiofsd") {
        lamina_skipped::test(format!("there is no virtiofsd: {why}"));
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (model, run) = (model(), folder.path().join("run"));
    let (model_text, run) = (model.to_str().unwrap(), run.to_str().unwrap());
    let stem = model.file_stem().unwrap().to_str().unwrap();
    let file = std::fs::read(&model).unwrap();
    // All of the bundled model is bf16.
    let start = 8 + usize::try_from(u64::from_le_bytes(*file.first_chunk().unwrap())).unwrap();
    let (head, data) = file.split_at(start);
    let mut script = format!(
        "{BEGIN}mkdir /m && mount -t virtiofs lamina /m || fail 'no file system'\ncd /m/models || fail 'no models'\n"
    );
    let mut wanted = vec![("full", sha256(&model))];
    for view in ["e8m3", "e8m1+g2"] {
        let path = folder.path().join(view);
        let shown = view_bytes(Format::Bf16, view, data, data.len() as u64 / 2).unwrap();
        std::fs::write(&path, [head, &shown].concat()).unwrap();
        wanted.push((view, sha256(&path)));
    }
    for (view, _) in &wanted {
        let name = if *view == "full" { stem.to_owned() } else { format!("{stem}@{view}") };
        let path = format!("{stem}/{name}.safetensors");
        writeln!(script, "sum=$(sha256sum {path}) || fail sum; echo \"{view} $(echo $sum | cut -c1-64)\"")
            .expect("a string");
    }
    script.push_str(
        "touch new 2>/why && fail 'a model is made'\n\
         grep -q 'Read-only' /why || fail \"$(cat /why)\"\n\
         echo \"base $(stat -c %s /m/base)\"\n",
    );
    let said = boot(
        folder.path(),
        &script,
        &["--attach", "virtiofs", "--model", model_text, "--run-dir", run, "--capacity", "256M"],
    );
    for (view, digest) in wanted {
        assert_eq!(reported(&said, view), digest, "{view}");
    }
    assert_eq!(reported(&said, "base"), (256 << 20).to_string());
}
