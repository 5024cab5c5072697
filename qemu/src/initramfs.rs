//! The initramfs of one boot: the image's own and other archives, with one of this boot's files
//! behind them.
//!
//! The kernel unpacks concatenated cpio archives one after the other, so those that are there are
//! copied as they are. Files are owned by root; the folders they need are made.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use cpio::newc::{Builder, ModeFileType, trailer};

/// What a file in the guest holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The bytes of a file on the host.
    Host(PathBuf),
    /// These bytes.
    Bytes(Vec<u8>),
}

/// A file put into the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestFile {
    /// Its absolute path in the guest.
    pub path: String,
    /// What it holds.
    pub source: Source,
    /// Permission bits, for example `0o755`.
    pub mode: u32,
}

impl GuestFile {
    /// A program of the host, which must be linked statically: the guest has no libraries.
    pub fn program(path: impl Into<String>, host: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), source: Source::Host(host.into()), mode: 0o755 }
    }

    /// A script, run by the guest's busybox when it begins with `#!/bin/sh`.
    pub fn script(path: impl Into<String>, text: impl Into<String>) -> Self {
        Self { path: path.into(), source: Source::Bytes(text.into().into_bytes()), mode: 0o755 }
    }

    /// A file that is only read.
    pub fn data(path: impl Into<String>, bytes: impl Into<Vec<u8>>) -> Self {
        Self { path: path.into(), source: Source::Bytes(bytes.into()), mode: 0o644 }
    }
}

/// Why an initramfs cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum InitramfsError {
    /// A guest path is not usable.
    #[error(
        "{path:?} cannot be a file in the guest: a path begins with '/', names a file and has no '.', '..' or empty part"
    )]
    Path {
        /// The path.
        path: String,
    },
    /// A host file cannot be read.
    #[error("cannot read {} for the guest: {error}", path.display())]
    Read {
        /// The host's file.
        path: PathBuf,
        /// What the system says.
        #[source]
        error: io::Error,
    },
    /// A file is too large for the archive's format.
    #[error("{path} has {bytes} bytes; at most {} fit into an initramfs", u32::MAX)]
    Large {
        /// The path in the guest.
        path: String,
        /// Its size.
        bytes: u64,
    },
    /// A program would not start in the guest.
    #[error("{} is linked dynamically and cannot start in the guest; build it with -C target-feature=+crt-static", path.display())]
    Dynamic {
        /// The host's file.
        path: PathBuf,
    },
    /// The initramfs cannot be written.
    #[error("cannot write the initramfs {}: {error}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        error: io::Error,
    },
}

/// Writes `output`: the archives `bases`, then one with these files. A later file of the same path
/// wins.
///
/// # Errors
/// When a path is not usable or a file cannot be read or written.
pub fn assemble(bases: &[&Path], files: &[GuestFile], output: &Path) -> Result<(), InitramfsError> {
    let write = |error| InitramfsError::Write { path: output.to_owned(), error };
    let mut file = File::create(output).map_err(write)?;
    for base in bases {
        let source = File::open(base);
        let mut source = source.map_err(|error| InitramfsError::Read { path: (*base).to_owned(), error })?;
        let copied = io::copy(&mut source, &mut file).map_err(write)?;
        // An archive begins at a multiple of four bytes.
        let padding: &[u8] = [b"".as_slice(), b"\0\0\0", b"\0\0", b"\0"][(copied & 3) as usize];
        file.write_all(padding).map_err(write)?;
    }
    let mut archive = BufWriter::new(file);
    let mut folders = BTreeSet::new();
    let mut inode = 0;
    let mut entry = |archive: &mut BufWriter<File>, name: &str, kind, mode: u32, bytes: &[u8], size: u32| {
        inode += 1;
        let builder = Builder::new(name).ino(inode).nlink(1).mode(mode & 0o7777).set_mode_file_type(kind);
        let mut writer = builder.write(archive, size);
        writer.write_all(bytes)?;
        writer.finish().map(drop)
    };
    for file in files {
        let name = relative(&file.path)?;
        let read;
        let bytes = match &file.source {
            Source::Bytes(bytes) => bytes,
            Source::Host(path) => {
                read = std::fs::read(path)
                    .map_err(|error| InitramfsError::Read { path: path.clone(), error })?;
                if file.mode & 0o111 != 0 && is_dynamic(&read) {
                    return Err(InitramfsError::Dynamic { path: path.clone() });
                }
                &read
            }
        };
        let size = u32::try_from(bytes.len())
            .map_err(|_| InitramfsError::Large { path: file.path.clone(), bytes: bytes.len() as u64 })?;
        for (end, _) in name.match_indices('/') {
            if folders.insert(&name[..end]) {
                entry(&mut archive, &name[..end], ModeFileType::Directory, 0o755, &[], 0).map_err(write)?;
            }
        }
        entry(&mut archive, name, ModeFileType::Regular, file.mode, bytes, size).map_err(write)?;
    }
    trailer(&mut archive).map(drop).and_then(|()| archive.flush()).map_err(write)
}

/// The path as an archive has it.
fn relative(path: &str) -> Result<&str, InitramfsError> {
    let wrong = || InitramfsError::Path { path: path.to_owned() };
    let name = path.strip_prefix('/').ok_or_else(wrong)?;
    let usable = |part: &str| !matches!(part, "" | "." | "..") && !part.contains('\0') && part.len() <= 255;
    // The kernel skips entries whose names are longer than a path may be.
    if name.len() > 4000 || !name.split('/').all(usable) || name == "TRAILER!!!" {
        Err(wrong())
    } else {
        Ok(name)
    }
}

/// Whether these bytes are a 64-bit little-endian ELF file that asks for an interpreter (a
/// `PT_INTERP` program header).
fn is_dynamic(bytes: &[u8]) -> bool {
    const PT_INTERP: u64 = 3;
    let number = |offset: usize, length: usize| -> Option<u64> {
        let field = bytes.get(offset..offset.checked_add(length)?)?;
        Some(field.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
    };
    let headers = || {
        let (start, size, count) =
            (usize::try_from(number(32, 8)?).ok()?, usize::try_from(number(54, 2)?).ok()?, number(56, 2)?);
        (0..usize::try_from(count).ok()?)
            .map_while(|n| number(start.checked_add(n.checked_mul(size)?)?, 4))
            .any(|kind| kind == PT_INTERP)
            .then_some(())
    };
    bytes.starts_with(b"\x7fELF\x02\x01") && headers().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use cpio::newc::Reader;

    #[test]
    fn a_full_disk_is_an_error_that_names_the_file() {
        let base = tempfile::NamedTempFile::new().unwrap();
        let files = [GuestFile::data("/big", vec![1; 1 << 20])];
        let error = assemble(&[base.path()], &files, Path::new("/dev/full")).unwrap_err().to_string();
        assert!(error.contains("/dev/full") && error.contains("No space left"), "{error}");
    }

    fn unpack(bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut entries = Vec::new();
        let mut rest = bytes;
        loop {
            let reader = Reader::new(rest).unwrap();
            if reader.entry().is_trailer() {
                return entries;
            }
            let (name, mode) = (reader.entry().name().to_owned(), reader.entry().mode());
            let mut content = Vec::new();
            rest = reader.to_writer(&mut content).unwrap();
            entries.push((name, mode, content));
        }
    }

    #[test]
    fn files_follow_the_archives_with_their_folders_before_them() {
        let folder = tempfile::tempdir().unwrap();
        let (base, host, output) =
            (folder.path().join("base"), folder.path().join("host"), folder.path().join("out"));
        let extra = folder.path().join("extra");
        std::fs::write(&base, [b'B'; 509]).unwrap();
        std::fs::write(&extra, [b'E'; 4]).unwrap();
        std::fs::write(&host, b"#!/bin/sh\n").unwrap();
        let files = [
            GuestFile::program("/bin/tool", &host),
            GuestFile::data("/a/b/plan.json", b"{}".to_vec()),
            GuestFile::data("/a/b/empty", Vec::new()),
            GuestFile::script("/run.sh", "exit 0"),
        ];
        assemble(&[&base, &extra], &files, &output).unwrap();
        let bytes = std::fs::read(&output).unwrap();
        assert_eq!(bytes[..509], [b'B'; 509]);
        assert_eq!(bytes[509..516], *b"\0\0\0EEEE");
        let expected: [(&str, u32, &[u8]); 7] = [
            ("bin", 0o040_755, b""),
            ("bin/tool", 0o100_755, b"#!/bin/sh\n"),
            ("a", 0o040_755, b""),
            ("a/b", 0o040_755, b""),
            ("a/b/plan.json", 0o100_644, b"{}"),
            ("a/b/empty", 0o100_644, b""),
            ("run.sh", 0o100_755, b"exit 0"),
        ];
        let expected = expected.map(|(name, mode, content)| (name.to_owned(), mode, content.to_vec()));
        assert_eq!(unpack(&bytes[516..]), expected);
    }

    #[test]
    fn paths_that_are_no_files_are_refused() {
        for path in ["", "/", "bin/tool", "/bin/", "/../etc", "/a//b", "/./a", "/a\0b", "/TRAILER!!!"] {
            assert!(matches!(relative(path), Err(InitramfsError::Path { .. })), "{path:?}");
        }
    }

    #[test]
    fn a_program_that_needs_libraries_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path().join("base");
        std::fs::write(&base, b"").unwrap();
        // This test is linked dynamically unless asked otherwise.
        let program = std::env::current_exe().unwrap();
        let result =
            assemble(&[&base], &[GuestFile::program("/bin/test", &program)], &folder.path().join("out"));
        let dynamic = !cfg!(target_feature = "crt-static");
        assert_eq!(matches!(result, Err(InitramfsError::Dynamic { .. })), dynamic, "{result:?}");
    }

    #[test]
    fn bytes_that_only_begin_like_a_program_are_no_reason_to_fail() {
        for length in 0..80 {
            let mut bytes = b"\x7fELF\x02\x01".to_vec();
            bytes.resize(length.max(6), 0xff);
            assert!(!is_dynamic(&bytes), "{length}");
        }
    }

    #[test]
    fn a_missing_program_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path().join("base");
        std::fs::write(&base, b"").unwrap();
        let files = [GuestFile::program("/bin/tool", "/nowhere/tool")];
        let message = assemble(&[&base], &files, &folder.path().join("out")).unwrap_err().to_string();
        assert!(message.contains("/nowhere/tool"), "{message}");
    }
}
