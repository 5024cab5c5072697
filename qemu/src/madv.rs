//! The preloaded library that keeps QEMU from asking for huge pages (`madv-filter/filter.rs`).
//!
//! It is compiled into this library, and [carried](crate::carried) to where QEMU's loader finds it.

use std::path::{Path, PathBuf};

use crate::carried;

const FILTER: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/libmadv_filter.so"));

/// The filter cannot be put where QEMU's loader finds it.
#[derive(Debug, thiserror::Error)]
pub enum FilterError {
    /// The file cannot be written.
    #[error("cannot write the madvise filter to {}: {error} (LAMINA_CACHE names another folder)", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system says.
        #[source]
        error: std::io::Error,
    },
    /// The dynamic loader splits its list of libraries at spaces and colons.
    #[error("the dynamic loader cannot preload {}: the path has a space or a colon; set LAMINA_CACHE to a folder without", path.display())]
    Path {
        /// The file.
        path: PathBuf,
    },
}

/// Puts the filter into this folder, unless it is there, and returns its path.
///
/// # Errors
/// When the folder cannot be written, or its path cannot be preloaded from.
pub fn install(folder: &Path) -> Result<PathBuf, FilterError> {
    let path = carried::place(folder, "madv-filter", FILTER);
    if path.to_string_lossy().contains([' ', ':']) {
        return Err(FilterError::Path { path });
    }
    carried::write(&path, FILTER).map_err(|error| FilterError::Write { path: path.clone(), error })?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// Asks for huge pages, then for the mapping to be dropped, and prints what became of both.
    fn advise() {
        const BYTES: usize = 4 << 20;
        // SAFETY: a new private mapping, unmapped by nobody, and only used below within its length.
        let (hugepage, dropped, address) = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let address =
                libc::mmap(std::ptr::null_mut(), BYTES, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(address, libc::MAP_FAILED);
            let byte = address.cast::<u8>();
            let hugepage = libc::madvise(address, BYTES, libc::MADV_HUGEPAGE);
            byte.write_volatile(7);
            let dropped =
                libc::madvise(address, BYTES, libc::MADV_DONTNEED) == 0 && byte.read_volatile() == 0;
            (hugepage, dropped, address.addr())
        };
        // SAFETY: no memory is touched: a length that is no mapping's is refused.
        let refused = unsafe { libc::madvise(std::ptr::without_provenance_mut(1), 1, libc::MADV_DONTNEED) };
        let errno = std::io::Error::last_os_error().raw_os_error();
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mapping = smaps.split_once(&format!("{address:x}-")).unwrap().1;
        let flags = mapping.lines().find(|line| line.starts_with("VmFlags:")).unwrap();
        let advised = flags.split_whitespace().any(|flag| flag == "hg");
        println!("<{hugepage} {advised} {dropped} {} {}>", refused, errno == Some(libc::EINVAL));
    }

    #[test]
    fn only_the_advice_for_huge_pages_is_swallowed() {
        const CHILD: &str = "LAMINA_QEMU_TEST_ADVISE";
        if std::env::var_os(CHILD).is_some() {
            return advise();
        }
        let folder = tempfile::tempdir().unwrap();
        let filter = install(folder.path()).unwrap();
        assert_eq!(install(folder.path()).unwrap(), filter, "installing again changes nothing");
        let run = |preload: &Path| {
            let output = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "madv::tests::only_the_advice_for_huge_pages_is_swallowed", "--nocapture"])
                .env(CHILD, "1")
                .env("LD_PRELOAD", preload)
                .output()
                .unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(!stderr.contains("cannot be preloaded"), "{stderr}");
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            text.split_once('<')
                .and_then(|(_, rest)| rest.split_once('>'))
                .map(|(found, _)| found.to_owned())
                .expect(&text)
        };
        assert_eq!(run(&filter), "0 false true -1 true");
        // A kernel without transparent huge pages refuses the advice; on any other the mapping is
        // marked.
        if Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            assert_eq!(run(Path::new("")), "0 true true -1 true");
        }
    }

    #[test]
    fn a_path_that_the_loader_would_split_is_refused() {
        let folder = tempfile::Builder::new().prefix("with space").tempdir().unwrap();
        let message = install(folder.path()).unwrap_err().to_string();
        assert!(message.contains("LAMINA_CACHE"), "{message}");
    }

    #[test]
    fn a_damaged_filter_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = install(folder.path()).unwrap();
        std::fs::write(&path, b"short").unwrap();
        install(folder.path()).unwrap();
        assert_eq!(std::fs::read(path).unwrap(), FILTER);
    }
}
