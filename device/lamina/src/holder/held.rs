//! What is held: everything that must outlive workers, and how it is had.

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use lamina_serve::{HeldMount, PrivateDir, Shows, claim};
use lamina_store::host_memory::Linux;
use lamina_store::image::Image;

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
}

impl Listening {
    pub(super) fn at(path: &Path) -> Result<Self> {
        Ok(Self { listener: claim(path)?, path: path.to_owned() })
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        if let Err(why) = fs::remove_file(&self.path) {
            tracing::debug!("socket file stays: {why}");
        }
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
            return Ok(Self { image, path: path.clone(), new: NewFile(None), plan });
        }
        let plan = Plan::new(partition_table, args, None)?;
        let mut config = plan.config(&args.load_options())?;
        (config.mode, config.codec) = (args.mode, args.codec);
        (config.open_windows, config.store_bytes) = (args.open_windows, args.store_capacity);
        config.interleaving = args.several.interleaving();
        config.check()?;
        let (image, path) = match &args.image {
            Some(path) => {
                if args.mode == lamina_store::mode::Mode::Plain {
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
