//! Opening what is to be a regular file, without waiting for what lies there instead.

use std::fs::{self, File, Metadata};
use std::io;
use std::path::Path;

use rustix::fs::{Mode, OFlags, open};

/// Opens the regular file at `path`, and what the system says of it then; `None` if it is no
/// regular file.
///
/// What lies at a path may be exchanged at any time. Opening a FIFO would wait for its other end,
/// so it is opened without waiting and looked at afterwards.
///
/// # Errors
///
/// The system's.
pub(crate) fn open_regular(path: &Path) -> io::Result<Option<(File, Metadata)>> {
    // Opening alone does something to a device or to the other end of a FIFO.
    if !fs::metadata(path)?.is_file() {
        return Ok(None);
    }
    open_unless_other(path)
}

/// [`open_regular`] of what was a regular file just now.
fn open_unless_other(path: &Path) -> io::Result<Option<(File, Metadata)>> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = match open(path, flags, Mode::empty()) {
        // A socket.
        Err(rustix::io::Errno::NXIO) => return Ok(None),
        file => File::from(file?),
    };
    let found = file.metadata()?;
    Ok(found.is_file().then_some((file, found)))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixListener;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::{Duration, Instant};

    use rustix::fs::{CWD, FileType, RenameFlags, mknodat, renameat_with};

    use super::*;
    use crate::model::{ModelError, ModelFile};

    fn fifo(path: &Path) {
        mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    }

    #[test]
    fn what_is_no_regular_file_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("file"), "text").unwrap();
        std::os::unix::fs::symlink("file", path("link")).unwrap();
        fifo(&path("fifo"));
        let _listening = UnixListener::bind(path("socket")).unwrap();
        for open in [open_regular, open_unless_other] {
            for name in ["file", "link"] {
                let (mut file, found) = open(&path(name)).unwrap().unwrap();
                let mut text = String::new();
                file.read_to_string(&mut text).unwrap();
                assert_eq!((text.as_str(), found.len()), ("text", 4));
            }
            for other in ["fifo", "socket", "."] {
                assert!(open(&path(other)).unwrap().is_none(), "{other}");
            }
            assert!(open(&path("nothing")).is_err());
        }
    }

    #[test]
    fn a_file_that_becomes_a_fifo_at_any_moment_is_opened_or_refused() {
        let folder = tempfile::tempdir().unwrap();
        let (model, other) = (folder.path().join("m.safetensors"), folder.path().join("other"));
        let header = br#"{"w":{"dtype":"BF16","shape":[8],"data_offsets":[0,16]}}"#;
        fs::write(&model, [&(header.len() as u64).to_le_bytes()[..], header, &[7; 16]].concat()).unwrap();
        fifo(&other);
        let stop = AtomicBool::new(false);
        let (done, opened) = channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    renameat_with(CWD, &model, CWD, &other, RenameFlags::EXCHANGE).unwrap();
                }
            });
            let path = model.clone();
            // One that waits for ever would keep a scope from its end.
            thread::spawn(move || {
                let (until, mut both) = (Instant::now() + Duration::from_secs(2), [0; 2]);
                while Instant::now() < until && !(both[0] > 1000 && both[1] > 1000) {
                    match ModelFile::open(&path).and_then(|_| ModelFile::open_as_bytes(&path, "b")) {
                        Ok(file) => both[0] += usize::from(file.tensors().len() == 1),
                        Err(ModelError::NotAFile { .. }) => both[1] += 1,
                        Err(why) => panic!("{why}"),
                    }
                }
                done.send(both).unwrap();
            });
            let both = opened.recv_timeout(Duration::from_secs(10));
            stop.store(true, Ordering::Relaxed);
            let both = both.expect("it does not wait for the other end");
            assert!(both.iter().all(|times| *times > 0), "{both:?}");
        });
    }
}
