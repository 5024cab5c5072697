//! The guest image: kernel and base initramfs.
//!
//! Extra programs are an archive of their own, for the boots that ask for them.
//!
//! `LAMINA_GUEST_IMAGE` names a folder with an image of one's own; otherwise the recipe
//! `images/guest` provides it.

use std::path::{Path, PathBuf};

use crate::recipe::{self, RecipeError};

/// A guest image on disk.
#[derive(Clone, Debug)]
pub struct GuestImage {
    /// The kernel that QEMU loads: `vmlinux` when the image has it (no decompressing in an emulated
    /// guest), else `vmlinuz`.
    pub kernel: PathBuf,
    /// The initramfs with `/init` and the modules.
    pub initramfs: PathBuf,
    /// The kernel's release, for example `6.12.107+deb13-cloud-amd64`.
    pub release: String,
}

/// Why there is no guest image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The recipe gave none.
    #[error("there is no guest image")]
    Recipe(#[from] RecipeError),
    /// A file of the image is missing or unreadable.
    #[error("the guest image {} has no usable {file}: {error}", folder.display())]
    File {
        /// The image's folder.
        folder: PathBuf,
        /// The file's name.
        file: &'static str,
        /// What the system says.
        error: std::io::Error,
    },
}

impl GuestImage {
    /// The image to boot, built now if need be.
    ///
    /// # Errors
    /// When the recipe fails, or the folder lacks a file.
    pub fn find() -> Result<Self, ImageError> {
        match std::env::var_os("LAMINA_GUEST_IMAGE") {
            Some(folder) => Self::open(Path::new(&folder)),
            None => Self::open(&recipe::run("guest")?),
        }
    }

    /// The image in this folder.
    ///
    /// # Errors
    /// When the folder lacks a file.
    pub fn open(folder: &Path) -> Result<Self, ImageError> {
        let file = |file: &'static str| {
            let path = folder.join(file);
            match std::fs::File::open(&path) {
                Ok(_) => Ok(path),
                Err(error) => Err(ImageError::File { folder: folder.to_owned(), file, error }),
            }
        };
        let release = std::fs::read_to_string(file("release")?).map_err(|error| ImageError::File {
            folder: folder.to_owned(),
            file: "release",
            error,
        })?;
        Ok(Self {
            kernel: file("vmlinux").or_else(|_| file("vmlinuz"))?,
            initramfs: file("initramfs.img")?,
            release: release.trim().to_owned(),
        })
    }
}

/// The module `lamina.ko` for the guest image's kernel, built now by the recipe `images/driver` if
/// need be.
///
/// # Errors
/// When the recipe fails, or its folder lacks the module.
pub fn driver() -> Result<PathBuf, ImageError> {
    file_of("driver", "lamina.ko")
}

/// The archive with fio, stress-ng, memtester and numactl, built now by the recipe `images/extras`
/// if need be.
///
/// # Errors
/// When the recipe fails, or its folder lacks the archive.
pub fn extras() -> Result<PathBuf, ImageError> {
    file_of("extras", "extras.img")
}

/// The archive with Python, a compiler, a database and numactl, built now by the recipe
/// `images/workloads` if need be.
///
/// # Errors
/// When the recipe fails, or its folder lacks the archive.
pub fn workloads() -> Result<PathBuf, ImageError> {
    file_of("workloads", "workloads.img")
}

/// The archive with Python, NumPy, safetensors, numactl and the CXL tools, built now by the recipe
/// `images/python` if need be.
///
/// # Errors
/// When the recipe fails, or its folder lacks the archive.
pub fn python() -> Result<PathBuf, ImageError> {
    file_of("python", "python.img")
}

/// A file that a recipe makes.
fn file_of(recipe: &str, file: &'static str) -> Result<PathBuf, ImageError> {
    let folder = recipe::run(recipe)?;
    let path = folder.join(file);
    match std::fs::metadata(&path) {
        Ok(_) => Ok(path),
        Err(error) => Err(ImageError::File { folder, file, error }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_incomplete_image_names_the_missing_file() {
        let folder = tempfile::tempdir().unwrap();
        let make = |name: &str| std::fs::write(folder.path().join(name), "6.12.1-cloud\n").unwrap();
        for missing in ["release", "vmlinuz", "initramfs.img"] {
            let message = GuestImage::open(folder.path()).unwrap_err().to_string();
            assert!(message.contains(missing), "{message}");
            make(missing);
        }
        let image = GuestImage::open(folder.path()).unwrap();
        assert_eq!(image.release, "6.12.1-cloud");
        assert!(image.kernel.ends_with("vmlinuz"));
        make("vmlinux");
        assert!(GuestImage::open(folder.path()).unwrap().kernel.ends_with("vmlinux"));
    }
}
