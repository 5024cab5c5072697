//! Real processes on one file, which are killed, or stopped for a while. With `LAMINA_LONG` they
//! have a minute: ten, and guests beside them, they have in `guest-tests/e2e`.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use lamina_pool::{Geometry, Pool, PoolError, local, soak};
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};

use crate::basics::bytes;

const WORKER: &str = "LAMINA_POOL_WORKER";

fn content(number: u32) -> Vec<u8> {
    bytes(u64::from(number) + 7, 1000 + number as usize * 400)
}

/// What a worker does until it is killed. It is a test that does nothing unless it is one.
#[test]
fn worker() {
    let Some(path) = std::env::var_os(WORKER) else { return };
    soak::work(Path::new(&path)).unwrap();
}

fn start(path: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "processes::worker", "--nocapture"])
        .env(WORKER, path)
        .env("RUST_BACKTRACE", "0")
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn processes_that_are_killed_leave_a_pool_that_holds() {
    let long = std::env::var_os("LAMINA_LONG").is_some();
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join("pool");
    let geometry = Geometry { nodes: 8, stripes: 4, groups: 8, chunks: 40, chunk_bytes: 16 << 10 };
    local::create(&path, &geometry).unwrap();
    let end = Instant::now() + Duration::from_secs(if long { 60 } else { 4 });
    let mut workers: Vec<Child> = (0..4).map(|_| start(&path)).collect();
    let mut killed = 0;
    while Instant::now() < end {
        std::thread::sleep(Duration::from_millis(60 + killed * 37 % 90));
        // One that is stopped is waited for, whatever it holds, and goes on where it was.
        let stopped = (killed % 3 == 0).then(|| &workers[(killed / 3 % 4) as usize]);
        let signal = |signal| {
            if let Some(worker) = stopped {
                kill(Pid::from_raw(worker.id().cast_signed()), signal).unwrap();
            }
        };
        signal(Signal::SIGSTOP);
        std::thread::sleep(Duration::from_millis(killed * 53 % 200));
        signal(Signal::SIGCONT);
        let which = (killed % 4) as usize;
        workers[which].kill().unwrap();
        let status = workers[which].wait().unwrap();
        // One that failed by itself has said why.
        assert_ne!(status.code(), Some(101), "a worker failed");
        workers[which] = start(&path);
        killed += 1;
    }
    eprintln!("{killed} processes were killed, {} stopped for a while", killed.div_ceil(3));
    for worker in &mut workers {
        worker.kill().unwrap();
        assert_ne!(worker.wait().unwrap().code(), Some(101), "a worker failed");
    }
    soak::settle(Pool::open(&path).unwrap(), || Pool::open(&path)).unwrap();
    assert!(killed > 5);
}

#[test]
fn one_of_many_makes_a_pool_where_nothing_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pool");
    let geometry = Geometry::fitting(8 << 20);
    let declared = std::sync::Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for name in 0..8 {
            let (path, geometry, declared) = (&path, &geometry, &declared);
            scope.spawn(move || {
                let declare = |data| {
                    declared.lock().unwrap().push(data);
                    Ok(())
                };
                let (pool, _) = local::open_or_create(path, geometry, declare).unwrap();
                pool.put(&name.to_string(), &content(name)).unwrap();
                pool.leave().unwrap();
            });
        }
    });
    assert_eq!(declared.into_inner().unwrap(), [geometry.data().unwrap()]);
    let pool = Pool::open(&path).unwrap();
    assert!((0..8).all(|name| pool.get(&name.to_string()).unwrap() == Some(content(name))));
    pool.leave().unwrap();
    // What cannot be declared is not made, and what holds something else is left alone.
    let other = folder.path().join("other");
    let refuse = |_| Err(PoolError::Declare("no device".into()));
    assert!(matches!(local::open_or_create(&other, &geometry, refuse), Err(PoolError::Declare(_))));
    assert!(!other.exists());
    std::fs::write(&other, b"something").unwrap();
    let made = local::open_or_create(&other, &geometry, |_| Ok(()));
    assert!(matches!(made, Err(PoolError::NoPool(_))));
    assert_eq!(std::fs::read(&other).unwrap(), b"something");
    assert!(matches!(
        local::open_or_create(folder.path(), &geometry, |_| Ok(())),
        Err(PoolError::File { .. })
    ));
}

#[test]
fn who_fails_to_make_a_pool_takes_nothing_from_those_that_wait_for_it() {
    let folder = tempfile::tempdir().unwrap();
    let geometry = Geometry::fitting(8 << 20);
    for round in 0..8 {
        let path = &folder.path().join(format!("pool {round}"));
        std::thread::scope(|scope| {
            for name in 0..8_u8 {
                let geometry = &geometry;
                scope.spawn(move || {
                    let declare = |_| match name % 2 {
                        0 => Ok(()),
                        _ => Err(PoolError::Declare("no device".into())),
                    };
                    match local::open_or_create(path, geometry, declare) {
                        Ok((pool, _)) => {
                            pool.put(&name.to_string(), &content(name.into())).unwrap();
                            pool.leave().unwrap();
                        }
                        Err(why) => assert!(name % 2 == 1 && matches!(why, PoolError::Declare(_)), "{why}"),
                    }
                });
            }
        });
        let pool = Pool::open(path).unwrap();
        assert!((0..8).step_by(2).all(|name| pool.get(&name.to_string()).unwrap() == Some(content(name))));
        pool.leave().unwrap();
    }
}

#[test]
fn a_fifo_is_no_pool_and_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fifo");
    mkfifo(&path, Mode::S_IRWXU).unwrap();
    let (done, ended) = channel();
    // One that waits for ever would keep a test from its end.
    std::thread::spawn(move || {
        assert!(local::holds_something(&path).unwrap());
        let geometry = Geometry::fitting(local::length_of(&path, 1 << 20).unwrap());
        local::create(&path, &geometry).unwrap_err();
        assert!(local::open_or_create(&path, &geometry, |_| Ok(())).is_err());
        assert!(Pool::open(&path).is_err() && path.exists());
        done.send(()).unwrap();
    });
    ended.recv_timeout(Duration::from_secs(10)).expect("nobody waits for the other end");
}

#[test]
fn what_a_repair_drops_is_space_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pool");
    local::create(&path, &Geometry::fitting(8 << 20)).unwrap();
    let pool = Pool::open(&path).unwrap();
    pool.put("whole", &content(3)).unwrap();
    pool.put("damaged", &content(9)).unwrap();
    let file = std::fs::read(&path).unwrap();
    let at = file.windows(64).position(|window| *window == content(9)[..64]).unwrap();
    std::os::unix::fs::FileExt::write_all_at(
        &std::fs::File::options().write(true).open(&path).unwrap(),
        &[!content(9)[0]],
        at as u64,
    )
    .unwrap();
    let problems = pool.check(true).unwrap().problems;
    assert_eq!(problems.iter().map(|problem| problem.what).collect::<Vec<_>>(), ["bytes that do not check"]);
    assert_eq!(pool.check(false).unwrap().problems, []);
    assert_eq!((pool.get("damaged").unwrap(), pool.get("whole").unwrap()), (None, Some(content(3))));
}

const FULL: &str = "LAMINA_POOL_FULL";

/// What a process does in a pool on a file system that becomes full. It is a test that does nothing
/// unless it is one.
#[test]
fn filler() {
    let Some(path) = std::env::var_os(FULL) else { return };
    let pool = Pool::open(Path::new(&path)).unwrap();
    let (mut stored, mut refused) = (0, 0);
    for number in 0..600 {
        for length in [64 << 10, 100, 5000] {
            let value = content(number).iter().copied().cycle().take(length).collect::<Vec<_>>();
            match pool.keep_from(&format!("{number} {length}"), length as u64, |place| place.append(&value)) {
                Ok(is_stored) => stored += u32::from(is_stored),
                Err(why) if why.to_string().contains("there is no room for") => refused += 1,
                Err(why) => panic!("{why}"),
            }
        }
    }
    assert!(stored > 100 && refused > 100, "{stored} were stored, {refused} refused");
    assert!(pool.check(false).unwrap().problems.is_empty());
    pool.leave().unwrap();
}

/// A file system of so many bytes, until this goes.
struct Small(tempfile::TempDir);

impl Small {
    fn new(size: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let options = format!("size={size}");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &options, "small"]).arg(folder.path()).stderr(Stdio::null());
        mount.status().is_ok_and(|status| status.success()).then_some(Self(folder))
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0.path()).status();
    }
}

#[test]
fn a_full_file_system_is_an_error_and_ends_no_process() {
    let Some(small) = Small::new("24M") else {
        eprintln!("skipped: only root mounts a file system");
        return;
    };
    let path = small.0.path().join("pool");
    local::create(&path, &Geometry::fitting(64 << 20)).unwrap();
    let filled = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "processes::filler", "--nocapture"])
        .env(FULL, &path)
        .output()
        .unwrap();
    assert!(filled.status.success(), "{}: {}", filled.status, String::from_utf8_lossy(&filled.stderr));
    let none = small.0.path().join("none");
    assert!(local::create(&none, &Geometry::fitting(64 << 30)).is_err());
    assert!(!none.exists());
}
