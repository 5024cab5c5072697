//! Guests that have the mount as a file system: programs that read files, and know nothing of the
//! device.

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
        "{BEGIN}mount -t virtiofs lamina /mnt || fail 'no file system'\ncd /mnt/models || fail 'no models'\n"
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
         echo \"base $(stat -c %s /mnt/base)\"\n\
         head -c 3000001 /dev/urandom >/w && cp /w /mnt/files/w && sync || fail 'a file is not made'\n\
         sum=$(sha256sum </w) && [ \"$sum\" = \"$(sha256sum </mnt/files/w)\" ] || fail 'a file is not the same'\n\
         echo \"file $(stat -c %s /mnt/files/w)\"\n",
    );
    let mut options = vec!["--attach", "virtiofs", "--model", model_text, "--run-dir", run];
    options.extend(["--capacity", "256M", "--files", "64M"]);
    // Of root's mount the files are a mount in it.
    options.extend(rustix::process::geteuid().is_root().then_some("--write-cache"));
    let said = boot(folder.path(), &script, &options);
    for (view, digest) in wanted {
        assert_eq!(reported(&said, view), digest, "{view}");
    }
    assert_eq!(reported(&said, "base"), (256 << 20).to_string());
    assert_eq!(reported(&said, "file"), "3000001");
}

/// What a program of the guest makes of a view's file, which it takes for a checkpoint.
const OPENS: &str = "\
import sys, numpy
from safetensors import safe_open
def bits(path):
    data = open(path, 'rb').read()
    return numpy.frombuffer(data, numpy.uint16, offset=8 + int.from_bytes(data[:8], 'little'))
full, view = sys.argv[1:]
with safe_open(view, 'numpy') as file:
    names = len(list(file.keys()))
assert (bits(full) & 0xfff0 == bits(view)).all()
print('names', names)
";

#[test]
fn a_larger_guests_safetensors_opens_a_view() {
    if std::env::var_os("LAMINA_LONG").is_none() {
        lamina_skipped::test("the larger guest is booted with --long");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (model, run, program) = (model(), folder.path().join("run"), folder.path().join("opens.py"));
    let stem = model.file_stem().unwrap().to_str().unwrap();
    std::fs::write(&program, OPENS).unwrap();
    let script = format!(
        "{BEGIN}mount -t virtiofs lamina /mnt || fail 'no file system'\n\
         cd /mnt/models/{stem} && python3 /opens.py {stem}.safetensors {stem}@e8m3.safetensors || fail python\n\
         numactl --hardware && cxl list || fail tools\n"
    );
    let (model, run) = (model.to_str().unwrap(), run.to_str().unwrap());
    let put = format!("{}=/opens.py", program.display());
    let options = ["--attach", "virtiofs", "--python", "--model", model, "--run-dir", run, "--put", &put];
    let said = boot(folder.path(), &script, &options);
    assert_eq!(reported(&said, "names"), "47");
}
