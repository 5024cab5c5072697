//! What is held: everything that must outlive workers, and how it is had.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail, ensure};
use lamina_serve::{HeldMount, PrivateDir, Shows, SocketFile, claim};
use lamina_store::host_memory::Linux;
use lamina_store::image::{Image, Superblock};

use crate::args::{DeviceArgs, DiskArg, PartitionArgs};
use crate::life::Disk;
use crate::partition_table::Plan;

/// What must outlive workers.
pub(super) struct Held {
    pub(super) image: Image,
    pub(super) image_path: PathBuf,
    /// Memory for the ledger of an image on a disk.
    pub(super) ledger: Option<fs::File>,
    pub(super) mount: Option<(HeldMount, usize)>,
    pub(super) api: Listening,
    /// One for each export.
    pub(super) ctl: Vec<Listening>,
    pub(super) tcp: Option<std::net::TcpListener>,
    pub(super) disks: Vec<(Listening, Disk)>,
}

/// Memory for the ledger of `image`, if that has no room for one itself.
pub(super) fn ledger_of(image: &Image) -> Option<fs::File> {
    if image.is_in_memory() {
        return None;
    }
    let told = |why: &_| tracing::warn!("what is stored will be counted anew when a worker dies: {why}");
    Image::new_ledger().inspect_err(told).ok()
}

/// A listening socket, whose file goes with it.
pub(super) struct Listening {
    pub(super) listener: UnixListener,
    pub(super) path: PathBuf,
    file: SocketFile,
}

impl Listening {
    pub(super) fn at(path: &Path) -> Result<Self> {
        let (listener, file) = claim(path)?;
        Ok(Self { listener, path: path.to_owned(), file })
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.file.remove();
    }
}

/// The sockets of disks of the whole device, and of guests' both windows in a directory each.
pub(super) fn listen_for(
    disks: Vec<DiskArg>,
    guests: &[(String, PathBuf)],
) -> Result<Vec<(Listening, Disk)>> {
    let mut all = Vec::new();
    let both = |directory: &Path, guest: Option<String>| {
        PrivateDir::make(directory)?;
        let disk = |name, shows| Disk { socket: directory.join(name), shows, guest: guest.clone() };
        Ok::<_, anyhow::Error>([disk("base.sock", Shows::Base), disk("views.sock", Shows::Views)])
    };
    for disk in disks {
        match disk {
            DiskArg::Both(directory) => all.extend(both(&directory, None)?),
            DiskArg::One(socket, shows) => all.push(Disk { socket, shows, guest: None }),
        }
    }
    for (guest, directory) in guests {
        all.extend(both(directory, Some(guest.clone()))?);
    }
    all.into_iter().map(|disk| Ok((Listening::at(&disk.socket)?, disk))).collect()
}

/// The image that is asked for.
pub(super) struct Opened {
    pub(super) image: Image,
    pub(super) path: PathBuf,
    pub(super) new: NewFile,
    pub(super) plan: Plan,
}

/// A file that was made for an image, if one was: taken away when this is dropped, unless it became
/// a device's.
pub(super) struct NewFile(Option<PathBuf>);

impl NewFile {
    pub(super) fn keep(&mut self) {
        self.0 = None;
    }
}

/// Refuses a base window that the module of `--model-dram` cannot hold: two of its lines would be
/// one of the module's.
fn fits_module(args: &DeviceArgs, device: &Superblock) -> Result<()> {
    let Some(module) = &args.model_dram else { return Ok(()) };
    ensure!(
        device.base_bytes <= module.bytes(),
        "--model-dram: the base window has {} bytes, and a module of {} has {}",
        device.base_bytes,
        module.name,
        module.bytes()
    );
    Ok(())
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(path) = &self.0
            && let Err(why) = fs::remove_file(path)
        {
            tracing::warn!("the new image {} stays: {why}", path.display());
        }
    }
}

impl Opened {
    pub(super) fn new(args: &DeviceArgs, partition_table: &PartitionArgs) -> Result<Self> {
        if let (Some(reserve), Some(total)) = (args.memory_reserve, Linux::at(Path::new("/")).total())
            && reserve >= total
        {
            bail!("--memory-reserve {reserve}: of {total} bytes of memory nothing would be left to store in");
        }
        if let Some(path) = &args.image
            && let Some(image) = Image::open(path)?
        {
            let plan = Plan::new(partition_table, args, Some((image.superblock(), path)))?;
            fits_module(args, image.superblock())?;
            return Ok(Self { image, path: path.clone(), new: NewFile(None), plan });
        }
        let plan = Plan::new(partition_table, args, None)?;
        let mut config = plan.config(&args.load_options())?;
        config.mode = args.mode.unwrap_or(config.mode);
        config.codec = args.codec.unwrap_or(config.codec);
        config.open_windows = args.open_windows.unwrap_or(config.open_windows);
        config.store_bytes = args.store_capacity;
        config.interleaving = args.several.interleaving();
        config.check()?;
        fits_module(args, &config.superblock())?;
        let (image, path) = match &args.image {
            Some(path) => {
                if config.mode == lamina_store::mode::Mode::Plain {
                    bail!(
                        "--image does not go with --mode plain, which changes blocks in place: a kill could leave one half written"
                    );
                }
                (Image::create(path, config.superblock())?, path.clone())
            }
            None => (Image::in_memory(config.superblock())?, PathBuf::from("memory")),
        };
        Ok(Self { image, path, new: NewFile(args.image.clone()), plan })
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, Command};

    #[test]
    fn a_module_must_hold_the_base_window() {
        let opened = |words: &[&str]| {
            let cli = Cli::try_parse_from(["lamina", "serve", "--mount", "m"].iter().chain(words)).unwrap();
            let Command::Serve(serve) = cli.command else { panic!("lamina serve") };
            Opened::new(&serve.device, &serve.partition_table).map(|_| ()).map_err(|why| why.to_string())
        };
        let why =
            "--model-dram: the base window has 137438953472 bytes, and a module of ddr5-4800 has 68719476736";
        assert_eq!(opened(&["--capacity", "128G", "--model-dram"]), Err(why.to_owned()));
        // Guests' parts lie in one window.
        let guests = ["--guest", "a=40G", "--guest", "b=40G", "--model-dram=ddr5-6400"];
        assert!(opened(&guests).unwrap_err().contains("the base window has 85899345920 bytes"));
        opened(&["--capacity", "256M", "--model-dram"]).unwrap();
    }
}
