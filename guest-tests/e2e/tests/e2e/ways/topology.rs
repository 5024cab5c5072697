//! Topologies: what a file says is booted, with one guest and with several. One with an interleave
//! set is booted in [`super::interleave`].

use std::fmt::Write;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use lamina_run::{bundled, daemon::SharedDaemon, judge::Judge, programs};

use super::ivshmem::prologue;
use super::script::{BEGIN, finish, hidden, model, reported, reported_by, sum};

/// A view that both models have.
const VIEW: &str = "e8m3";

/// Boots the topology that `text` is.
fn boot(folder: &Path, text: &str) -> Output {
    let path = folder.join("topology.toml");
    fs::write(&path, text).unwrap();
    Command::new(programs::lamina().unwrap()).args(["boot", "--topology"]).arg(&path).output().unwrap()
}

/// A script that tells the digests of its first tensor through the base window and in a view, and
/// of a tensor of the other guest that it cannot have any.
fn of_memory(own: &str, others: &str) -> String {
    let mut script = format!("{BEGIN}lamina-shim up >/dev/null || fail up\n");
    for view in ["base", VIEW] {
        sum(&mut script, view, own, view);
        hidden(&mut script, others, view);
    }
    script.push_str("lamina-shim list >/list || fail list\nlamina-shim flush || fail flush\n");
    let _ = writeln!(script, "grep -q {others} /list && fail 'the other guest is listed'");
    script
}

/// The same of a guest that has disks and nothing of ours: `bytes` of its first tensor, which lies
/// where its base disk begins.
fn of_disks(bytes: u64, own: &str, others: &str) -> String {
    format!(
        r#"{BEGIN}
for block in /sys/block/vd*; do
    case $(cat "$block/serial") in
    lamina-base) base=/dev/${{block##*/}} ;;
    lamina-views) views=${{block##*/}} ;;
    esac
done
[ -b "$base" ] && [ -n "$views" ] || fail "no disks"
echo "base $(head -c {bytes} "$base" | sha256sum | cut -c1-64)"
cat /sys/block/"$views"/"$views"*/uevent >/names
grep -q '^PARTNAME={own}' /names || fail "no partition of its own: $(cat /names)"
grep -q '{others}' /names && fail "a partition of the other guest"
part=$(grep -l 'PARTNAME={own}:{VIEW}' /sys/block/"$views"/"$views"*/uevent | head -n 1)
[ -n "$part" ] || fail "no partition shows the view: $(cat /names)"
part=${{part%/uevent}}
echo "{VIEW} $(head -c {bytes} /dev/"${{part##*/}}" | sha256sum | cut -c1-64)"
echo "size $(cat /sys/block/"${{base##*/}}"/size)"
"#
    )
}

#[test]
fn two_guests_of_one_file_have_a_part_each_by_different_ways() {
    let folder = tempfile::tempdir().unwrap();
    let models = bundled().expect("start the tests through ./x test");
    let judges = [0, 1].map(|which| Judge::new(&models[which..=which]).unwrap());
    let [weights, cache] = [0, 1].map(|which| judges[which].names().next().unwrap());
    let bytes = judges[1].full(cache, 0).unwrap().len() as u64;
    let file = |name: &str, script: String, status: u8| {
        fs::write(folder.path().join(name), format!("{script}exit {status}\n")).unwrap();
    };
    file("alice.sh", of_memory(weights, cache), 0);
    file("bob.sh", of_disks(bytes, cache, weights), 9);
    let guest = |name: &str, attach: &str, model: &Path| {
        let model = model.to_str().unwrap();
        format!(
            "[[guest]]\nname = \"{name}\"\ncapacity = \"256M\"\nmodel = [{model:?}]\n\
             attach = \"{attach}\"\nscript = \"{name}.sh\"\ncpus = 1\n"
        )
    };
    let text = format!(
        "[device]\nviews = [\"full\", \"{VIEW}\"]\nrun-dir = \"run\"\n{}{}",
        guest("alice", "cxl", &models[0]),
        guest("bob", "vhost-user", &models[1])
    );
    let output = boot(folder.path(), &text);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(!said.contains("FAILED"), "{said}");
    // The status of the one whose script says that something is wrong.
    assert_eq!(output.status.code(), Some(9), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    for (name, judge, tensor) in [("alice", &judges[0], weights), ("bob", &judges[1], cache)] {
        for view in ["base", VIEW] {
            let want = judge.sha256(tensor, view, 0).unwrap();
            assert_eq!(reported_by(&said, name, view), want, "{name}: {tensor} {view}");
        }
    }
    assert_eq!(reported_by(&said, "bob", "size"), ((256 << 20) / 512).to_string());
    // Mount and sockets are gone with the device.
    assert!(!folder.path().join("run/mount").exists() && !folder.path().join("run/api.sock").exists());
}

#[test]
fn the_kernels_of_two_guests_log_the_poison_of_what_each_has() {
    let folder = tempfile::tempdir().unwrap();
    let script = "#!/bin/sh\nlamina-shim up >/dev/null || exit 3\necho waiting for poison\n\
        n=0; until dmesg | grep 'cxl_general_media: '; do n=$((n+1)); [ $n -lt 1200 ] || exit 5; sleep 0.5; done\n";
    fs::write(folder.path().join("script.sh"), script).unwrap();
    let text = "[device]\nrun-dir = \"run\"\nshared = \"256M\"\n\
        [[guest]]\nname = \"own\"\ncapacity = \"256M\"\nscript = \"script.sh\"\ncpus = 1\n\
        [[guest]]\nname = \"common\"\nscript = \"script.sh\"\ncpus = 1\n";
    let path = folder.path().join("topology.toml");
    fs::write(&path, text).unwrap();
    let mut command = Command::new(programs::lamina().unwrap());
    let mut child = command.args(["boot", "--topology"]).arg(&path).stdout(Stdio::piped()).spawn().unwrap();
    let (mut said, mut waiting) = (String::new(), 0);
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        waiting += u32::from(line.ends_with("waiting for poison"));
        if waiting == 2 {
            waiting = 0;
            // Of each guest's own, at different places.
            for dpa in ["0x3000", "0x10005000"] {
                let api = folder.path().join("run/api.sock");
                let injected = Command::new(programs::lamina().unwrap())
                    .args(["poison", "inject", dpa, "--api"])
                    .arg(api)
                    .status();
                assert!(injected.unwrap().success());
            }
        }
        said.push_str(&line);
        said.push('\n');
    }
    assert!(child.wait().unwrap().success(), "{said}");
    for (name, dpa) in [("own", "dpa=3000 "), ("common", "dpa=5000 ")] {
        let events = said.lines().filter(|line| line.contains("cxl_general_media: "));
        let own: Vec<_> = events.filter(|line| line.starts_with(&format!("{name}: "))).collect();
        assert!(own.len() == 1 && own[0].contains(dpa), "{name}: {said}");
    }
}

#[test]
fn a_guest_of_a_part_listens_where_the_device_tells_it_of_poison() {
    let device = SharedDaemon::start(&["--guest", "own=256M"]).unwrap();
    let run = device.ready.api.parent().unwrap();
    let mut command = Command::new(programs::lamina().unwrap());
    let output =
        command.args(["boot", "--guest", "own", "--print-command", "--run-dir"]).arg(run).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains(&format!("unix:{}/qmp-own.sock,server=on", run.display())), "{said}");
}

#[test]
fn a_guest_that_fails_ends_the_others() {
    let folder = tempfile::tempdir().unwrap();
    // Longer than the tests are given.
    fs::write(folder.path().join("waits.sh"), "sleep 100000\n").unwrap();
    let text = "[device]\nrun-dir = \"run\"\n\n\
        [[guest]]\nname = \"waits\"\nscript = \"waits.sh\"\ncpus = 1\n\n\
        [[guest]]\nname = \"fails\"\nscript = \"waits.sh\"\nqemu = [\"-device\", \"no-such-device\"]\n";
    let output = boot(folder.path(), text);
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && why.contains("guest fails"), "{why}");
    assert!(!folder.path().join("run/mount").exists() && !folder.path().join("run/api.sock").exists());
}

#[test]
fn a_file_is_refused_or_boots_what_it_says() {
    let folder = tempfile::tempdir().unwrap();
    let judge = Judge::new(&[model()]).unwrap();
    let name = "tok_embeddings.weight";
    let mut script = prologue();
    sum(&mut script, "view", name, "e8m3");
    script.push_str("lamina-shim flush && cat /note && exit 7\n");
    fs::write(folder.path().join("script.sh"), script).unwrap();
    fs::write(folder.path().join("note"), "put here by the test\n").unwrap();
    // A size that no PCI device has is only refused where it was asked for.
    let file = |capacity: &str| {
        format!(
            "[device]\nmodel = [{:?}]\nviews = [\"e8m3\"]\n{capacity}run-dir = \"run\"\n\n\
             [[guest]]\nattach = \"ivshmem\"\nscript = \"script.sh\"\nput = {{ \"/note\" = \"note\" }}\n",
            model()
        )
    };
    let path = folder.path().join("topology.toml");
    let command = || {
        let mut command = Command::new(programs::lamina().unwrap());
        command.args(["boot", "--topology"]).arg(&path);
        command
    };
    fs::write(&path, file("capacity = \"768M\"\n")).unwrap();
    let output = command().output().unwrap();
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && why.contains("power of two"), "{why}");
    fs::write(&path, file("")).unwrap();
    let output = command().arg("--cpus=1").output().unwrap();
    let why = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && why.contains("cpus"), "{why}");
    let said = finish(command());
    assert_eq!(reported(&said, "view"), judge.sha256(name, "e8m3", 0).unwrap());
    assert!(said.contains("put here by the test"), "{said}");
}
