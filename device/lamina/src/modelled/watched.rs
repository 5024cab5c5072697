//! A trace's file, as it is read.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use anyhow::{Context, Result};

use crate::meter::Meter;

/// Bytes of a trace whose reading is long enough to show how far it is: some seconds with timing.
const LONG: u64 = 16 << 20;

/// The file, which shows how much of it was read.
pub(super) struct Watched {
    file: File,
    meter: Option<Meter>,
    name: String,
    read: u64,
    total: u64,
    is_file: bool,
}

impl Watched {
    /// Opens it.
    ///
    /// # Errors
    /// It cannot be.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let failed = || format!("cannot open {}", path.display());
        let file = File::open(path).with_context(failed)?;
        let metadata = file.metadata().with_context(failed)?;
        let (total, is_file) = (metadata.len(), metadata.is_file());
        let meter = (total >= LONG).then(|| Meter::new("read"));
        Ok(Self { file, meter, name: path.display().to_string(), read: 0, total, is_file })
    }

    /// Whether its end is known: who writes a pipe may keep it open.
    pub(super) fn is_file(&self) -> bool {
        self.is_file
    }
}

impl Read for Watched {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(into)?;
        if let Some(meter) = self.meter.as_ref().filter(|_| read > 0) {
            self.read += read as u64;
            meter.tell(&self.name, self.read, self.total);
        }
        Ok(read)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if let Some(meter) = &self.meter {
            meter.finish();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_file_is_watched_and_read_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for (length, is_long) in [(LONG - 1, false), (LONG + 7, true)] {
            let bytes: Vec<u8> = (0..length).map(|at| at.to_le_bytes()[0]).collect();
            std::fs::write(&path, &bytes).unwrap();
            let mut file = Watched::open(&path).unwrap();
            let mut read = Vec::new();
            file.read_to_end(&mut read).unwrap();
            assert!(read == bytes && file.meter.is_some() == is_long);
            assert_eq!(file.read, if is_long { length } else { 0 });
        }
        assert!(Watched::open(&folder.path().join("none")).is_err());
    }
}
