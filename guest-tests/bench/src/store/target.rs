//! What takes stores: a device in this process, one that is mounted, tmpfs.

use std::{
    fs::{File, OpenOptions},
    os::unix::fs::{FileExt, OpenOptionsExt},
    path::Path,
    thread,
};

use anyhow::{Context, Result, ensure};
use lamina_codec::{Codec, format::Format};
use lamina_device::{
    device::{Device, DeviceConfig, TensorSpec},
    layout::Layout,
};
use lamina_run::daemon::{Daemon, Serve};
use memmap2::MmapOptions;
use rustix::fs::{FallocateFlags, MemfdFlags, OFlags, fallocate, ftruncate, memfd_create};

use super::{ALIGN, Data, REQUEST, Way};
use crate::{codec::BUNDLED_KV, tile};

/// Something that takes stores.
pub(super) trait Target {
    /// What it is, for errors.
    fn name(&self) -> &'static str;

    /// Whether it can be stored into so.
    fn has(&self, way: Way) -> bool;

    /// Makes the place of `data` a hole.
    fn punch(&mut self, data: Data) -> Result<()>;

    /// Stores `bytes` where `data` lies, in as many parts at once.
    fn store(&mut self, data: Data, way: Way, parts: usize, bytes: &[u8]) -> Result<()>;

    /// What is stored there.
    fn read(&self, data: Data, out: &mut [u8]) -> Result<()>;
}

/// Whether a device tells what other devices would have moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Observers {
    Off,
    On,
}

/// Where the data of each kind begin.
type Places = [u64; Data::ALL.len()];

/// Each kind behind the one before it.
fn places(length: u64) -> Places {
    Data::ALL.map(|data| data as u64 * length)
}

/// Has `store` take each request of `bytes` with its offset, in `parts` at once.
fn requests(bytes: &[u8], parts: usize, store: impl Fn(u64, &[u8]) -> Result<()> + Sync) -> Result<()> {
    let in_turn = |from: usize, bytes: &[u8]| {
        (from..)
            .step_by(REQUEST)
            .zip(bytes.chunks(REQUEST))
            .try_for_each(|(at, piece)| store(at as u64, piece))
    };
    if parts == 1 {
        return in_turn(0, bytes);
    }
    let part = bytes.len().div_ceil(parts).next_multiple_of(REQUEST);
    thread::scope(|scope| {
        let in_turn = &in_turn;
        let threads: Vec<_> = (0..)
            .step_by(part)
            .zip(bytes.chunks(part))
            .map(|(from, bytes)| scope.spawn(move || in_turn(from, bytes)))
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("no thread panics"))
    })
}

/// A device in this process.
pub(super) struct Alone {
    device: Device,
    places: Places,
    length: u64,
}

impl Alone {
    pub(super) fn new(codec: Codec, length: u64, observers: Observers) -> Result<Self> {
        let config = DeviceConfig { codec, observe: observers == Observers::On, ..Self::config(length) };
        Self::with(config, length)
    }

    /// A plain device.
    pub(super) fn plain(length: u64) -> Result<Self> {
        Self::with(DeviceConfig { mode: "plain".parse()?, observe: false, ..Self::config(length) }, length)
    }

    fn config(length: u64) -> DeviceConfig {
        DeviceConfig::new(Data::ALL.len() as u64 * length, 16 << 20)
    }

    fn with(config: DeviceConfig, length: u64) -> Result<Self> {
        let (device, places) = (Device::new(config)?, places(length));
        for (data, layout) in [(Data::Bf16, Layout::Weight), (Data::Kv, Layout::Kv(BUNDLED_KV))] {
            let shape = match data {
                Data::Kv => kv_shape(length).to_vec(),
                _ => Vec::new(),
            };
            device.create_tensor(TensorSpec {
                name: data.name().to_owned(),
                dpa: Some(places[data as usize]),
                length,
                elements: None,
                shape,
                format: Format::Bf16,
                layout,
                codec: None,
                base: None,
            })?;
        }
        Ok(Self { device, places, length })
    }

    /// Bytes of `data` over those that the device stores for them.
    pub(super) fn ratio(&self, data: Data) -> Result<Option<f64>> {
        let stored = || self.device.stats().device.stored_bytes;
        let with = stored();
        self.device.discard(self.places[data as usize], self.length)?;
        let bytes = with - stored();
        #[expect(clippy::cast_precision_loss, reason = "a ratio to be looked at")]
        let ratio = (bytes > 0).then(|| self.length as f64 / bytes as f64);
        Ok(ratio)
    }
}

impl Target for Alone {
    fn name(&self) -> &'static str {
        "the device alone"
    }

    fn has(&self, way: Way) -> bool {
        way.is_alone()
    }

    fn punch(&mut self, data: Data) -> Result<()> {
        Ok(self.device.discard(self.places[data as usize], self.length)?)
    }

    fn store(&mut self, data: Data, _: Way, parts: usize, bytes: &[u8]) -> Result<()> {
        let place = self.places[data as usize];
        requests(bytes, parts, |at, piece| Ok(self.device.write_base(place + at, piece)?))?;
        Ok(self.device.flush(place, self.length)?)
    }

    fn read(&self, data: Data, out: &mut [u8]) -> Result<()> {
        Ok(self.device.read_base(self.places[data as usize], out)?)
    }
}

/// A file and the same without page cache.
struct Stored {
    file: File,
    /// None where the file system has no such thing.
    direct: Option<File>,
    places: Places,
    length: u64,
}

impl Stored {
    fn open(path: &Path, places: Places, length: u64) -> Result<Self> {
        let open = |flags: OFlags| {
            OpenOptions::new().read(true).write(true).custom_flags(flags.bits().cast_signed()).open(path)
        };
        let file = open(OFlags::empty()).with_context(|| format!("cannot open {}", path.display()))?;
        Ok(Self { file, direct: open(OFlags::DIRECT).ok(), places, length })
    }

    fn punch(&self, data: Data) -> Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, flags, self.places[data as usize], self.length)?)
    }

    fn store(&self, data: Data, way: Way, parts: usize, bytes: &[u8]) -> Result<()> {
        let place = self.places[data as usize];
        let written = |file: &File| {
            requests(bytes, parts, |at, piece| Ok(file.write_all_at(piece, place + at)?))?;
            Ok(file.sync_data()?)
        };
        match way {
            Way::Device | Way::DeviceParallel | Way::Pwrite => written(&self.file),
            Way::Direct | Way::DirectParallel => written(self.direct.as_ref().context("no O_DIRECT")?),
            Way::Mmap => {
                let mut options = MmapOptions::new();
                options.offset(place).len(bytes.len());
                // SAFETY: nobody shortens the file, and only this process stores here meanwhile.
                let mut map = unsafe { options.map_mut(&self.file) }?;
                for (to, from) in map.chunks_mut(REQUEST).zip(bytes.chunks(REQUEST)) {
                    to.copy_from_slice(from);
                }
                Ok(map.flush()?)
            }
        }
    }

    fn read(&self, file: &File, data: Data, out: &mut [u8]) -> Result<()> {
        Ok(file.read_exact_at(out, self.places[data as usize])?)
    }
}

/// A device that is mounted.
pub(super) struct Mounted {
    daemon: Daemon,
    base: Stored,
    _folder: tempfile::TempDir,
}

impl Mounted {
    pub(super) fn new(codec: Codec, length: u64, observers: Observers) -> Result<Self> {
        Self::with("trace", codec, length, observers)
    }

    /// A plain device.
    pub(super) fn plain(length: u64) -> Result<Self> {
        Self::with("plain", Codec::default(), length, Observers::Off)
    }

    fn with(mode: &str, codec: Codec, length: u64, observers: Observers) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let model = folder.path().join("empty.safetensors");
        let names = [Data::Bf16.name(), Data::Kv.name()];
        tile::write_empty(&model, &[(names[0], &[length / 2]), (names[1], &kv_shape(length))])?;
        let capacity = (Data::ALL.len() as u64 * length + ALIGN).next_multiple_of(256 << 20);
        let serve = Serve {
            models: vec![model],
            views: Vec::new(),
            kv: vec![format!("{}={},{}", names[1], BUNDLED_KV.channels, BUNDLED_KV.window)],
            mode: mode.to_owned(),
            codec: codec.to_string(),
            capacity: Some(capacity.to_string()),
            read_ahead_kb: 128,
            devices: None,
        };
        let daemon = match observers {
            Observers::Off => Daemon::start(&serve)?,
            Observers::On => Daemon::start_observed(&serve)?,
        };
        let stats = daemon.stats()?;
        let place = |name: &str| {
            let tensor = stats["tensors"].as_array()?.iter().find(|tensor| tensor["name"] == name)?;
            tensor["dpa"].as_u64()
        };
        let mut places = places(length);
        for data in [Data::Bf16, Data::Kv] {
            places[data as usize] = place(data.name()).with_context(|| format!("no {}", data.name()))?;
        }
        // The others behind both.
        let behind = (places[0].max(places[1]) + length).next_multiple_of(ALIGN);
        (places[2], places[3]) = (behind, behind + length);
        ensure!(places[3] + length <= daemon.ready.base.bytes, "the base window is too small");
        let base = Stored::open(&daemon.ready.base.path, places, length)?;
        Ok(Self { daemon, base, _folder: folder })
    }

    pub(super) fn stop(self) -> Result<()> {
        drop(self.base);
        self.daemon.stop()
    }
}

impl Target for Mounted {
    fn name(&self) -> &'static str {
        "the mount"
    }

    fn has(&self, way: Way) -> bool {
        !way.is_alone()
    }

    fn punch(&mut self, data: Data) -> Result<()> {
        self.base.punch(data)
    }

    fn store(&mut self, data: Data, way: Way, parts: usize, bytes: &[u8]) -> Result<()> {
        self.base.store(data, way, parts, bytes)
    }

    /// Asks the device and not the page cache.
    fn read(&self, data: Data, out: &mut [u8]) -> Result<()> {
        let mut map = memmap2::MmapMut::map_anon(out.len())?;
        self.base.read(self.base.direct.as_ref().context("no O_DIRECT")?, data, &mut map)?;
        out.copy_from_slice(&map);
        Ok(())
    }
}

/// A file in tmpfs, without a name.
pub(super) struct Tmpfs(Stored);

impl Tmpfs {
    pub(super) fn new(length: u64) -> Result<Self> {
        let file = memfd_create("lamina-bench", MemfdFlags::CLOEXEC)?;
        ftruncate(&file, Data::ALL.len() as u64 * length)?;
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        Ok(Self(Stored::open(Path::new(&path), places(length), length)?))
    }
}

impl Target for Tmpfs {
    fn name(&self) -> &'static str {
        "tmpfs"
    }

    fn has(&self, way: Way) -> bool {
        self.0.direct.is_some() || !matches!(way, Way::Direct | Way::DirectParallel)
    }

    fn punch(&mut self, data: Data) -> Result<()> {
        self.0.punch(data)
    }

    fn store(&mut self, data: Data, way: Way, parts: usize, bytes: &[u8]) -> Result<()> {
        self.0.store(data, way, parts, bytes)
    }

    fn read(&self, data: Data, out: &mut [u8]) -> Result<()> {
        self.0.read(&self.0.file, data, out)
    }
}

/// Rows of the bundled cache's width.
fn kv_shape(length: u64) -> [u64; 2] {
    let channels = u64::from(BUNDLED_KV.channels);
    [length / 2 / channels, channels]
}
