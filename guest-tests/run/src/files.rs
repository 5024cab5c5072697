//! Reading the files that a job is given: regular ones, and no more of them than fits.

use std::{
    fs::{self, File},
    io::Read as _,
    path::Path,
};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{Mode, OFlags, open};

/// Most bytes of a text: a model takes up to 2^20 tokens of it.
pub(crate) const MAX_TEXT_BYTES: u64 = 16 << 20;
/// Most bytes of a vocabulary.
pub(crate) const MAX_VOCABULARY_BYTES: u64 = 64 << 20;

/// Opens the regular file at `path`. Anything else is refused: a FIFO would be waited for, and
/// nothing ends that wait.
///
/// # Errors
/// When it is no regular file or cannot be opened.
pub(crate) fn open_regular(path: &Path) -> Result<File> {
    let failed = || format!("cannot read {}", path.display());
    // Opening alone does something to a device.
    let found = fs::metadata(path).with_context(failed)?;
    ensure!(found.is_file(), "cannot read {}: it is no regular file", path.display());
    // What lies there may be exchanged meanwhile: it is opened without waiting, and looked at.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(open(path, flags, Mode::empty()).with_context(failed)?);
    let found = file.metadata().with_context(failed)?;
    ensure!(found.is_file(), "cannot read {}: it is no regular file", path.display());
    Ok(file)
}

/// The bytes of the regular file at `path`, at most `most`.
///
/// # Errors
/// When it is no regular file, has more bytes, or cannot be read.
pub(crate) fn read(path: &Path, most: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // A file may grow while it is read.
    let mut file = open_regular(path)?.take(most.saturating_add(1));
    file.read_to_end(&mut bytes).with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(bytes.len() as u64 <= most, "{} has more than {most} bytes", path.display());
    Ok(bytes)
}

/// Refuses, before minutes of work, a file that cannot be made.
///
/// # Errors
/// When it is a directory, or cannot be written to or made.
pub(crate) fn can_be_made(path: &Path) -> Result<()> {
    let failed = || format!("cannot write {}", path.display());
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => bail!("{}: it is a directory", failed()),
        Ok(found) if found.is_file() => {
            File::options().write(true).open(path).with_context(failed)?;
        }
        // To open a FIFO waits for who reads it.
        Ok(_) => {}
        Err(_) => {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            tempfile::tempfile_in(folder.unwrap_or(Path::new("."))).with_context(failed)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, sync::mpsc, thread, time::Duration};

    use rustix::fs::{CWD, FileType, mknodat};

    use super::*;

    #[test]
    fn what_is_no_regular_file_is_refused_by_its_path_and_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let [fifo, socket, file] = ["fifo", "socket", "file"].map(|name| folder.path().join(name));
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let _listening = UnixListener::bind(&socket).unwrap();
        fs::write(&file, "four").unwrap();
        for path in [&fifo, &socket, folder.path(), Path::new("/dev/zero")] {
            let (path, (done, refused)) = (path.to_owned(), mpsc::channel());
            // One that waits for ever would keep the test from its end.
            thread::spawn({
                let path = path.clone();
                move || done.send(read(&path, 10).map_err(|why| format!("{why:#}")))
            });
            let refused = refused.recv_timeout(Duration::from_secs(60)).expect("it does not wait");
            assert_eq!(
                refused.unwrap_err(),
                format!("cannot read {}: it is no regular file", path.display())
            );
        }
        assert_eq!(read(&file, 4).unwrap(), b"four");
        let long = read(&file, 3).unwrap_err().to_string();
        assert!(long.ends_with("file has more than 3 bytes"), "{long}");
        let missing = format!("{:#}", read(&folder.path().join("nothing"), 4).unwrap_err());
        assert!(missing.contains("nothing"), "{missing}");
    }

    #[test]
    fn a_file_that_cannot_be_made_is_refused_and_one_that_can_is_not_made() {
        let folder = tempfile::tempdir().unwrap();
        let new = folder.path().join("new");
        can_be_made(&new).unwrap();
        assert!(!new.exists());
        fs::write(&new, "old").unwrap();
        can_be_made(&new).unwrap();
        assert_eq!(fs::read(&new).unwrap(), b"old");
        can_be_made(Path::new("/dev/null")).unwrap();
        // Nobody makes a file in /sys.
        for path in [folder.path(), &folder.path().join("no/file"), Path::new("/sys/file")] {
            let why = format!("{:#}", can_be_made(path).unwrap_err());
            assert!(why.starts_with(&format!("cannot write {}: ", path.display())), "{why}");
        }
    }
}
