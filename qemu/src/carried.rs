//! Libraries that this one carries and QEMU loads.
//!
//! Each is written to the cache when a guest is started that needs it. Its file's name holds a
//! digest of its bytes, so an older one is never mistaken for it and running guests keep theirs.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Where the library of this name and bytes goes in `folder`.
pub(crate) fn place(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    folder.join(format!("{name}-{:016x}.so", hasher.finish()))
}

/// Writes the library to its place, unless it is there.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if std::fs::read(path).is_ok_and(|found| found == bytes) {
        return Ok(());
    }
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(bytes)?;
    file.persist(path)?;
    Ok(())
}
