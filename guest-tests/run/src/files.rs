//! Reading the files that a job is given: regular ones, and no more of them than fits.

use std::{
    fs::{self, File},
    io::{ErrorKind, Read as _},
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::Path,
};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{Mode, OFlags, makedev, open};

/// Most bytes that are read of a text: a model takes up to 2^20 tokens.
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
    let (bytes, is_whole) = read_beginning(path, most)?;
    ensure!(is_whole, "{} has more than {most} bytes", path.display());
    Ok(bytes)
}

/// The text in the regular file at `path`. Of a larger one, which is said, the characters that end
/// within the first `most` bytes.
///
/// # Errors
/// When it is no regular file, cannot be read, or is not in UTF-8.
pub(crate) fn read_text(path: &Path, most: u64) -> Result<String> {
    let (mut bytes, is_whole) = read_beginning(path, most)?;
    if !is_whole {
        if let Err(why) = str::from_utf8(&bytes)
            && why.error_len().is_none()
        {
            bytes.truncate(why.valid_up_to());
        }
        tracing::warn!("{} has more than {most} bytes: the first {} are read", path.display(), bytes.len());
    }
    String::from_utf8(bytes).with_context(|| format!("{} is no text in UTF-8", path.display()))
}

/// The first bytes of the regular file at `path`, at most `most`, and whether that is all.
fn read_beginning(path: &Path, most: u64) -> Result<(Vec<u8>, bool)> {
    let mut bytes = Vec::new();
    // A file may grow while it is read.
    let mut file = open_regular(path)?.take(most.saturating_add(1));
    file.read_to_end(&mut bytes).with_context(|| format!("cannot read {}", path.display()))?;
    let is_whole = bytes.len() as u64 <= most;
    bytes.truncate(usize::try_from(most).unwrap_or(usize::MAX));
    Ok((bytes, is_whole))
}

/// Refuses, before minutes of work, a file that cannot be made.
///
/// # Errors
/// When it is neither a regular file nor /dev/null, or cannot be written to or made.
pub(crate) fn can_be_made(path: &Path) -> Result<()> {
    let failed = || format!("cannot write {}", path.display());
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => bail!("{}: it is a directory", failed()),
        Ok(found) if found.is_file() => {
            File::options().write(true).open(path).with_context(failed)?;
        }
        Ok(found) if found.file_type().is_char_device() && found.rdev() == makedev(1, 3) => {}
        // To open a FIFO waits for who reads it.
        Ok(_) => bail!("{}: it is no regular file", failed()),
        Err(why) if why.kind() == ErrorKind::NotFound => {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            let folder = folder.unwrap_or(Path::new("."));
            match fs::read_link(path) {
                // It is made where the link leads.
                Ok(target) => can_be_made(&folder.join(target)).with_context(failed)?,
                Err(_) => drop(tempfile::tempfile_in(folder).with_context(failed)?),
            }
        }
        Err(why) => return Err(why).with_context(failed),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::{fs::symlink, net::UnixListener},
        sync::mpsc,
        thread,
        time::Duration,
    };

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
    fn a_larger_text_is_read_up_to_the_last_character_that_fits() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        fs::write(&path, "caf\u{e9} au lait").unwrap();
        for (most, text) in [(3, "caf"), (4, "caf"), (5, "café"), (13, "café au lait"), (14, "café au lait")]
        {
            assert_eq!(read_text(&path, most).unwrap(), text, "{most}");
        }
        // What is cut in the middle is no such character here, and one at the end is not cut.
        for (bytes, most) in [(&b"caf\xe9 au lait"[..], 8), (b"caf\xc3", 4)] {
            fs::write(&path, bytes).unwrap();
            let why = format!("{:#}", read_text(&path, most).unwrap_err());
            assert!(why.contains("is no text in UTF-8"), "{why}");
        }
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
        let [to_new, to_nowhere, to_itself, fifo] =
            ["to_new", "to_nowhere", "to_itself", "fifo"].map(|name| folder.path().join(name));
        for (link, target) in [(&to_new, "newer"), (&to_nowhere, "no/file"), (&to_itself, "to_itself")] {
            symlink(target, link).unwrap();
        }
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        can_be_made(&to_new).unwrap();
        assert!(!folder.path().join("newer").exists());
        // Nobody makes a file in /sys.
        let missing = folder.path().join("no/file");
        let sys = Path::new("/sys/file");
        for path in [folder.path(), &missing, sys, &to_nowhere, &to_itself, &fifo, Path::new("/dev/zero")] {
            let why = format!("{:#}", can_be_made(path).unwrap_err());
            assert!(why.starts_with(&format!("cannot write {}: ", path.display())), "{why}");
        }
    }
}
