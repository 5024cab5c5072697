//! Files that a command makes, a drawing or a page: there whole or not at all, and never over what
//! the command reads.

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use anyhow::{Context, Result, bail};
use tempfile::Builder;

/// Writes the file. What was there before goes only when the new one is on the disk, and other hard
/// links of it keep it.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let failed = || format!("cannot write {}", path.display());
    let there = fs::metadata(path).ok();
    if there.as_ref().is_some_and(|there| !there.is_file()) {
        // A terminal, a pipe or /dev/null is written to; a directory says that it is one.
        return fs::write(path, bytes).with_context(failed);
    }
    // A symbolic link stays one: what it names is made anew.
    let path = if there.is_some() { fs::canonicalize(path).with_context(failed)? } else { path.to_owned() };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // As any new file, less what the process's mask takes.
    let made = Builder::new().permissions(Permissions::from_mode(0o666)).tempfile_in(folder);
    let mut file = made.with_context(failed)?;
    if let Some(there) = there {
        file.as_file().set_permissions(there.permissions()).with_context(failed)?;
    }
    file.write_all(bytes).with_context(failed)?;
    file.as_file().sync_all().with_context(failed)?;
    file.persist(&path).map_err(|why| why.error).with_context(failed)?;
    Ok(())
}

/// Refuses, before minutes of work, an `option` whose file cannot be made or is one of those that
/// are `read`.
pub(crate) fn check<'p>(option: &str, path: &Path, read: impl IntoIterator<Item = &'p Path>) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !folder.is_dir() {
        bail!("cannot write {}: there is no directory {}", path.display(), folder.display());
    }
    if path.is_dir() {
        bail!("cannot write {}: it is a directory", path.display());
    }
    not_over(option, path, read)
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
        for (path, why) in [(folder.path(), "directory"), (&folder.path().join("no/file"), "no/file")] {
            let refused = write(path, b"x").unwrap_err();
            assert!(format!("{refused:#}").contains(why), "{refused:#}");
        }
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
    }
}
