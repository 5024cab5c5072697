//! Directories of sockets and mounts, and who listens at the sockets in them: only this user's are
//! used, and only this user's and root's are believed.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
use serde_json::json;

use crate::common::{Place, Run, lamina, mounted, within};

/// A user who has nothing here.
const OTHER: u32 = 4711;

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// What a command that is refused says on its standard error. One that goes on is killed.
fn refusal(command: &mut Command) -> String {
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > Duration::from_secs(30) {
            child.kill().unwrap();
            panic!("not refused: {command:?}");
        }
        thread::sleep(Duration::from_millis(5));
    }
    let reported = child.wait_with_output().unwrap();
    let why = String::from_utf8_lossy(&reported.stderr).into_owned();
    assert!(!reported.status.success() && !why.contains("panicked"), "{command:?}: {why}");
    why
}

/// Every command that would use `dir`: for its sockets, a disk's, a guest's disks', mailboxes,
/// shared memory, and the mount.
fn users_of(place: &Place, dir: &str) -> Vec<Command> {
    let (run, mount) = (place.text("good-run"), place.text("good-mount"));
    let socket = |name: &str| format!("{dir}/{name}");
    let uses: [&[&str]; 7] = [
        &["--run-dir", dir, "--mount", &mount],
        &["--run-dir", &run, "--mount", dir],
        &["--run-dir", &run, "--vhost-user", dir],
        &["--run-dir", &run, "--vhost-user", &format!("{}=base", socket("d.sock"))],
        &["--run-dir", &run, "--mount", &mount, "--guest", &format!("a=256M,disks={dir}")],
        &["--run-dir", &run, "--mount", &mount, "--ivshmem", &socket("i.sock")],
        &["--run-dir", &run, "--mount", &mount, "--vhost-user-shmem", &socket("s.sock")],
    ];
    let command = |options: &&[&str]| {
        let mut command = lamina(&["serve"]);
        // A guest's partition is all there is.
        if !options.contains(&"--guest") {
            command.args(["--capacity", "16M"]);
        }
        command.args(*options);
        command
    };
    uses.iter().map(command).collect()
}

/// Nobody uses the directory: each who would says `words`, and nothing is made in it.
fn is_refused(place: &Place, dir: &Path, words: &[&str]) {
    for mut command in users_of(place, dir.to_str().unwrap()) {
        let why = refusal(&mut command);
        for word in words.iter().chain(&[dir.to_str().unwrap()]) {
            assert!(why.contains(word), "{command:?}: {why}");
        }
        assert_eq!(fs::read_dir(dir).unwrap().count(), 0, "{command:?}");
        assert!(!mounted(dir), "{command:?}");
    }
}

#[test]
fn a_directory_in_which_others_may_write_is_used_for_nothing() {
    within(120, || {
        let place = Place::new();
        let dir = place.path("open");
        fs::create_dir(&dir).unwrap();
        for mode in [0o777, 0o1777, 0o770] {
            fs::set_permissions(&dir, PermissionsExt::from_mode(mode)).unwrap();
            is_refused(&place, &dir, &["lets others write", "chmod go-w"]);
        }
    });
}

#[test]
fn a_directory_of_another_user_is_used_for_nothing() {
    if !is_root() {
        return lamina_skipped::test("giving a directory to another user needs root");
    }
    within(120, || {
        let place = Place::new();
        let dir = place.path("theirs");
        fs::create_dir(&dir).unwrap();
        chown(&dir, Some(OTHER), None).unwrap();
        is_refused(&place, &dir, &["user 4711", "user 0"]);
    });
}

#[test]
fn a_link_to_a_directory_is_used_for_nothing() {
    within(120, || {
        let place = Place::new();
        let target = place.path("target");
        fs::create_dir(&target).unwrap();
        fs::set_permissions(&target, PermissionsExt::from_mode(0o700)).unwrap();
        symlink(&target, place.path("link")).unwrap();
        is_refused(&place, &place.path("link"), &["symbolic link"]);
    });
}

#[test]
fn missing_directories_are_made_for_their_user_alone_and_relative_paths_work() {
    within(60, || {
        let place = Place::new();
        let mut command = lamina(&["serve", "--json", "--capacity", "16M", "--run-dir", "a/run"]);
        command.args(["--vhost-user", "disks", "--vhost-user", "one.sock=base", "--mount", "mount/"]);
        let run = Run::start(command.current_dir(place.path("")));
        for name in ["a", "a/run", "disks"] {
            let mode = fs::metadata(place.path(name)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o700, "{name}");
        }
        for name in ["a/run/api.sock", "disks/base.sock", "one.sock", "mount/base"] {
            assert!(place.path(name).exists(), "{name}");
        }
        drop(run);
    });
}

/// A socket at `path` at which `OTHER` listens: a listener is whose thread began to listen.
fn listener_of_other(path: &Path) -> OwnedFd {
    let listener = socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
    let kept = listener.try_clone().unwrap();
    let as_other = move || {
        // SAFETY: takes no pointers. The system call itself changes this thread alone, which then
        // ends.
        let changed = unsafe { libc::syscall(libc::SYS_setresuid, OTHER, OTHER, OTHER) };
        assert_eq!(changed, 0);
        listen(&listener, 16).unwrap();
    };
    thread::spawn(as_other).join().unwrap();
    kept
}

#[test]
fn a_socket_at_which_another_user_listens_is_not_believed() {
    if !is_root() {
        return lamina_skipped::test("listening as another user needs root");
    }
    within(120, || {
        let place = Place::new();
        fs::create_dir(place.path("run")).unwrap();
        let run = place.text("run");
        let [_holder, _api] =
            ["holder.sock", "api.sock"].map(|name| listener_of_other(&place.path("run").join(name)));
        let (api, file) = (place.text("run/api.sock"), place.text("snapshot"));
        let commands: [&[&str]; 5] = [
            &["stats", "--api", &api],
            &["poison", "inject", "0", "--api", &api],
            &["snapshot", "save", &file, "--run-dir", &run],
            &["upgrade", "--run-dir", &run],
            &["boot", "--guest", "a", "--run-dir", &run],
        ];
        for words in commands {
            let why = refusal(&mut lamina(words));
            assert!(why.contains("user 4711") && why.contains("user 0"), "{words:?}: {why}");
        }
    });
}

#[test]
fn a_monitor_of_another_user_is_told_nothing() {
    if !is_root() {
        return lamina_skipped::test("listening as another user needs root");
    }
    within(60, || {
        let place = Place::new();
        let run = Run::start(&mut place.serve(&["--capacity", "16M"]));
        let monitor = UnixListener::from(listener_of_other(&place.path("run/qmp.sock")));
        let stream = UnixStream::connect(place.path("run/api.sock")).unwrap();
        let block = json!({ "offset": 0, "length": 4096 }).to_string();
        let requested = crate::common::request("POST", "/poison/inject", &block);
        assert_eq!(crate::common::answer(stream, &requested).0, 200);
        let (mut connection, _) = monitor.accept().unwrap();
        connection.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        // It hangs up without a word, or had before it was greeted.
        let _ = std::io::Write::write_all(&mut connection, b"{\"QMP\":{}}\n");
        let mut said = Vec::new();
        let _ = std::io::Read::read_to_end(&mut connection, &mut said);
        assert!(said.is_empty(), "{}", String::from_utf8_lossy(&said));
        drop(run);
    });
}

#[test]
fn no_qemu_is_sent_to_a_socket_that_another_user_may_have_made() {
    within(60, || {
        let place = Place::new();
        let dir = place.path("open");
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, PermissionsExt::from_mode(0o777)).unwrap();
        let path = dir.join("s.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let socket = path.to_str().unwrap();
        let [base, views] = ["base", "views"].map(|window| place.text(window));
        for window in [&base, &views] {
            fs::File::create(window).unwrap().set_len(256 << 20).unwrap();
        }
        let commands: [&[&str]; 4] = [
            &["--attach", "vhost-user", "--disk", socket],
            &["--attach", "shmem", "--shmem", socket],
            &["--attach", "ivshmem", "--base", &base, "--views-file", &views, "--mailbox", socket],
            &["--base", &base, "--views-file", &views, "--ctl", socket],
        ];
        for words in commands {
            let why = refusal(lamina(&["boot", "--print-command"]).args(words));
            assert!(why.contains("lets others write"), "{words:?}: {why}");
        }
        drop(listener);
    });
}
