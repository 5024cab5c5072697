//! A shell plays QEMU's part here; `tests/boot.rs` boots the real one.

use super::*;
use crate::find::Install;
use crate::version::OLDEST;
use std::path::Path;

fn prepared(script: &str) -> Prepared {
    Prepared {
        command: CommandLine {
            env: Vec::new(),
            program: "/bin/sh".into(),
            args: vec!["-c".into(), script.into()],
        },
        qemu: Qemu { install: Install::Host("/bin/sh".into()), version: OLDEST },
        image: GuestImage {
            kernel: "vmlinux".into(),
            initramfs: "initramfs.img".into(),
            release: "6.12".into(),
        },
        accel: Accel::Tcg,
        interactive: false,
        has_program: true,
        console_log: PathBuf::new(),
        _folder: None,
    }
}

fn run(script: &str) -> Result<Outcome, BootError> {
    prepared(script).spawn(|_| {}).unwrap().wait(Some(Duration::from_secs(30)))
}

/// Whether this process runs; one that only waits to be reaped by its new parent does not.
fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with('Z'))
}

fn wait_for_end(pid: u32) {
    let begun = Instant::now();
    while runs(pid) {
        assert!(begun.elapsed() < Duration::from_secs(10), "process {pid} still runs");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn the_programs_status_and_the_boot_time_are_reported() {
    let guest = prepared("echo hello; sleep 0.2; echo lamina-init: ready 4; echo; echo lamina-init: exit 3");
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&lines);
    let guest = guest.spawn(move |line| sink.lock().unwrap().push(line.to_owned())).unwrap();
    let outcome = guest.wait(None).unwrap();
    assert_eq!(outcome.status, Some(3));
    assert!(
        outcome.boot_seconds.unwrap() >= 0.2 && outcome.seconds >= outcome.boot_seconds.unwrap(),
        "{outcome:?}"
    );
    assert_eq!(*lines.lock().unwrap(), ["hello", "lamina-init: ready 4", "", "lamina-init: exit 3"]);
    assert!(!guest.is_running());
}

#[test]
fn qemus_failure_carries_its_last_messages() {
    let message =
        run("echo early; echo 'qemu: cannot set up guest memory' >&2; exit 1").unwrap_err().to_string();
    for part in ["cannot set up guest memory", "early", "exit status: 1"] {
        assert!(message.contains(part), "{message}");
    }
}

#[test]
fn a_guest_that_powers_off_early_is_no_success() {
    let error = run("echo lamina-init: ready 4; echo 'Kernel panic - not syncing'").unwrap_err();
    assert!(
        matches!(&error, BootError::Unfinished { console } if console.contains("Kernel panic")),
        "{error}"
    );
}

#[test]
fn a_guest_that_takes_too_long_is_killed() {
    let guest = prepared("echo stuck; exec sleep 1000").spawn(|_| {}).unwrap();
    let pid = guest.pid().unwrap();
    assert!(runs(pid));
    let error = guest.wait(Some(Duration::from_millis(300))).unwrap_err();
    assert!(matches!(&error, BootError::Timeout { console, .. } if console == "stuck"), "{error}");
    wait_for_end(pid);
}

#[test]
fn dropping_a_guest_ends_it() {
    let guest = prepared("exec sleep 1000").spawn(|_| {}).unwrap();
    let pid = guest.pid().unwrap();
    drop(guest);
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
}

#[test]
fn only_a_guest_with_a_shell_hears_what_a_terminal_sends_to_the_job() {
    let group = |pid| rustix::process::getpgid(pid).unwrap();
    for interactive in [false, true] {
        let guest = Prepared { interactive, ..prepared("exec sleep 1000") }.spawn(|_| {}).unwrap();
        let pid = Pid::from_raw(guest.pid().unwrap().try_into().unwrap()).unwrap();
        assert_eq!(group(Some(pid)), if interactive { group(None) } else { pid });
    }
}

#[test]
fn a_guest_does_not_outlive_its_process() {
    const CHILD: &str = "LAMINA_QEMU_TEST_ABORT";
    if std::env::var_os(CHILD).is_some() {
        let guest = prepared("exec sleep 1000").spawn(|_| {}).unwrap();
        println!("<{}>", guest.pid().unwrap());
        std::process::abort();
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "launch::tests::a_guest_does_not_outlive_its_process", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stdout);
    let pid = text.split_once('<').and_then(|(_, rest)| rest.split_once('>')).expect(&text).0;
    wait_for_end(pid.parse().unwrap());
}

#[test]
fn a_panic_of_the_caller_ends_the_guest() {
    let guest = prepared("echo line; exec sleep 1000").spawn(|_| panic!("on purpose")).unwrap();
    let error = guest.wait(Some(Duration::from_secs(30))).unwrap_err();
    assert!(matches!(error, BootError::Qemu { .. }), "{error}");
}

#[test]
fn a_program_that_does_not_start_is_named() {
    let mut missing = prepared("");
    missing.command.program = "/nowhere/qemu".into();
    let message = missing.spawn(|_| {}).unwrap_err().to_string();
    assert!(message.contains("/nowhere/qemu") && message.contains("No such file"), "{message}");
}

#[test]
fn an_interactive_guests_status_is_found_in_its_log() {
    let log = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(log.path(), "# lamina-init: exit 1\r\nlamina-init: exit 4\r\nReboot: Power down\r\n")
        .unwrap();
    let guest = Prepared { interactive: true, console_log: log.path().to_owned(), ..prepared("exit 0") };
    assert_eq!(guest.spawn(|_| {}).unwrap().wait(None).unwrap().status, Some(4));
}

#[test]
fn what_cannot_boot_is_refused_before_anything_is_built() {
    let mut config = BootConfig::new("/nowhere/base", 256 << 20, "/nowhere/views", 1);
    config.run = Some("/run.sh".into());
    assert!(matches!(prepare(&config), Err(BootError::Topology(TopologyError::File { window: "base", .. }))));
}
