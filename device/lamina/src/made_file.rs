//! Files that a command makes, a drawing or a page: there whole or not at all, and never over what
//! the command reads.

use std::fs::{self, File, Metadata, Permissions};
use std::io::{self, ErrorKind, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use tempfile::{Builder, NamedTempFile};

/// Writes the file. What was there before goes only when the new one is on the disk, and other hard
/// links of it keep it; where the file itself may be written and nothing else, it is written over.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let failed = || format!("cannot write {}", path.display());
    let there = fs::metadata(path).ok();
    if is_written_to(path) {
        // A directory says that it is one.
        return fs::write(path, bytes).with_context(failed);
    }
    let replaced = replace(path, there.as_ref(), bytes);
    if there.is_some() && replaced.as_ref().is_err_and(|why| IN_PLACE.contains(&why.kind())) {
        return fs::write(path, bytes).with_context(failed);
    }
    replaced.with_context(failed)
}

/// Why a file that may be written cannot be replaced: what it lies in may not, or it is a mount of
/// its own.
const IN_PLACE: [ErrorKind; 4] = [
    ErrorKind::PermissionDenied,
    ErrorKind::ReadOnlyFilesystem,
    ErrorKind::ResourceBusy,
    ErrorKind::CrossesDevices,
];

fn replace(path: &Path, there: Option<&Metadata>, bytes: &[u8]) -> io::Result<()> {
    // A symbolic link stays one: what it names is made anew.
    let path = if there.is_some() { fs::canonicalize(path)? } else { path.to_owned() };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // As any new file, less what the process's mask takes.
    let mut file = Builder::new().permissions(Permissions::from_mode(0o666)).tempfile_in(folder)?;
    if let Some(there) = there {
        // Who is not root keeps what is theirs alone.
        let _ = fchown(file.as_file(), Some(there.uid()), Some(there.gid()));
        file.as_file().set_permissions(there.permissions())?;
    }
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(&path).map_err(|why| why.error)?;
    Ok(())
}

/// A new file that gets its name when it is whole. Until then it has none, so that nothing is left
/// of it whatever ends this process; where files must have one, it has another.
pub(crate) enum Part {
    Unnamed(File),
    Named(NamedTempFile),
}

/// The path by which this process has a file open.
fn opened(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

impl Part {
    /// One that may get this path later.
    pub(crate) fn beside(path: &Path) -> io::Result<Self> {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let mut prefix = path.file_name().ok_or(ErrorKind::InvalidFilename)?.to_owned();
        // As any file: less what the umask takes.
        let unnamed = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        if let Ok(file) = rustix::fs::open(folder, unnamed, Mode::from_raw_mode(0o666)) {
            let file = File::from(file);
            // What names it later.
            if fs::exists(opened(&file)).unwrap_or(false) {
                return Ok(Self::Unnamed(file));
            }
        }
        prefix.push(".part-");
        let mut named = Builder::new();
        named.prefix(&prefix).permissions(Permissions::from_mode(0o666));
        Ok(Self::Named(named.tempfile_in(folder)?))
    }

    /// What is written.
    pub(crate) fn file(&self) -> &File {
        match self {
            Self::Unnamed(file) => file,
            Self::Named(file) => file.as_file(),
        }
    }

    /// Gives it its name, which nobody else has, once its bytes are on the disk.
    pub(crate) fn name(self, path: &Path) -> io::Result<()> {
        self.file().sync_all()?;
        match self {
            Self::Unnamed(file) => {
                Ok(rustix::fs::linkat(CWD, opened(&file), CWD, path, AtFlags::SYMLINK_FOLLOW)?)
            }
            Self::Named(file) => file.persist_noclobber(path).map(drop).map_err(|why| why.error),
        }
    }
}

/// Refuses, before minutes of work, an `option` whose file cannot be made or is one of those that
/// are `read`.
pub(crate) fn check<'p>(option: &str, path: &Path, read: impl IntoIterator<Item = &'p Path>) -> Result<()> {
    let beside = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !beside.is_dir() {
        bail!("cannot write {}: there is no directory {}", path.display(), beside.display());
    }
    if path.is_dir() {
        bail!("cannot write {}: it is a directory", path.display());
    }
    not_over(option, path, read)?;
    if is_written_to(path) {
        return Ok(());
    }
    // In place of the file one without a name is made, or what is there is opened, as `write` will.
    let folder = fs::canonicalize(path).ok().and_then(|path| Some(path.parent()?.to_owned()));
    let folder = folder.as_deref().unwrap_or(beside);
    let made = tempfile::tempfile_in(folder).map(drop);
    let there = || File::options().write(true).open(path).map(drop);
    let made = made.or_else(|why| there().map_err(|_| why));
    made.with_context(|| format!("cannot write {}", path.display()))
}

/// Whether what is at a path is written to and not replaced: a terminal, a pipe or /dev/null, what
/// somebody else has opened, and what a link names that is not there.
fn is_written_to(path: &Path) -> bool {
    let there = fs::metadata(path).ok();
    let dangles = there.is_none() && fs::symlink_metadata(path).is_ok();
    let is_handed = path.starts_with("/dev") || path.starts_with("/proc");
    there.is_some_and(|there| !there.is_file()) || is_handed || dangles
}

/// Refuses an `option` whose file is one of those that are `read`, by whatever name.
pub(crate) fn not_over<'p>(
    option: &str,
    path: &Path,
    read: impl IntoIterator<Item = &'p Path>,
) -> Result<()> {
    let identity = |path: &Path| fs::metadata(path).ok().map(|file| (file.dev(), file.ino()));
    let Some(there) = identity(path) else { return Ok(()) };
    if let Some(read) = read.into_iter().find(|read| identity(read) == Some(there)) {
        bail!("{option} {} would write over {}; name another file", path.display(), read.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_its_other_names_keep_what_they_had() {
        let folder = tempfile::tempdir().unwrap();
        let [file, hard, soft] = ["file", "hard", "soft"].map(|name| folder.path().join(name));
        write(&file, b"first").unwrap();
        let by_hand = folder.path().join("by hand");
        fs::write(&by_hand, "").unwrap();
        assert_eq!(fs::metadata(&file).unwrap().mode(), fs::metadata(&by_hand).unwrap().mode());
        fs::hard_link(&file, &hard).unwrap();
        std::os::unix::fs::symlink(&file, &soft).unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        write(&soft, b"second").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"second");
        assert_eq!(fs::metadata(&file).unwrap().mode() & 0o777, 0o600);
        assert_eq!(fs::read(&hard).unwrap(), b"first");
        assert!(fs::symlink_metadata(&soft).unwrap().is_symlink());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 4, "nothing else is left");
        write(Path::new("/dev/null"), b"nowhere").unwrap();
        // What is open stays the file that it is, and a link that led nowhere leads somewhere.
        let open = fs::File::options().read(true).write(true).open(&hard).unwrap();
        write(&Path::new("/proc/self/fd").join(open.as_raw_fd().to_string()), b"third").unwrap();
        assert_eq!(fs::read(&hard).unwrap(), b"third");
        let dangling = folder.path().join("dangling");
        std::os::unix::fs::symlink(folder.path().join("made"), &dangling).unwrap();
        write(&dangling, b"fourth").unwrap();
        assert_eq!(fs::read(folder.path().join("made")).unwrap(), b"fourth");
        for (path, why) in [(folder.path(), "directory"), (&folder.path().join("no/file"), "no/file")] {
            let refused = write(path, b"x").unwrap_err();
            assert!(format!("{refused:#}").contains(why), "{refused:#}");
        }
    }

    #[test]
    fn a_part_has_no_name_until_it_is_whole_and_takes_nobody_elses() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let named = Builder::new().prefix("file.part-").tempfile_in(&folder).unwrap();
        for part in [Part::beside(&path).unwrap(), Part::Named(named)] {
            let _ = fs::remove_file(&path);
            if matches!(part, Part::Unnamed(_)) {
                assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "only the other one");
            }
            part.file().write_all(b"all").unwrap();
            part.name(&path).unwrap();
            assert_eq!(fs::read(&path).unwrap(), b"all");
        }
        let late = Part::beside(&path).unwrap();
        assert_eq!(late.name(&path).unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert_eq!(fs::read(&path).unwrap(), b"all");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    }

    #[test]
    fn what_is_read_is_not_written_over_by_any_name() {
        let folder = tempfile::tempdir().unwrap();
        let [file, hard, soft, other] =
            ["file", "hard", "soft", "other"].map(|name| folder.path().join(name));
        fs::write(&file, "read").unwrap();
        fs::hard_link(&file, &hard).unwrap();
        std::os::unix::fs::symlink(&file, &soft).unwrap();
        let reads = [other.as_path(), &file];
        for name in [&file, &hard, &soft] {
            let why = check("--plot", name, reads).unwrap_err().to_string();
            assert!(why.starts_with("--plot ") && why.contains("would write over"), "{why}");
        }
        check("--plot", &other, reads).unwrap();
        check("--plot", Path::new("/dev/stdout"), reads).unwrap();
        assert!(check("--plot", folder.path(), reads).unwrap_err().to_string().contains("is a directory"));
        let nowhere = folder.path().join("no/file");
        assert!(check("--plot", &nowhere, reads).unwrap_err().to_string().contains("no directory"));
        // Nobody makes a file in /sys.
        let refused = check("--plot", Path::new("/sys/file"), reads).unwrap_err().to_string();
        assert_eq!(refused, "cannot write /sys/file");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 3, "nothing is made");
    }
}
