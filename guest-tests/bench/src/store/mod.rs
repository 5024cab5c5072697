//! Stores: into the device alone and through the mount, beside the plain device and tmpfs.
//!
//! Each target takes the same bytes by turns. A *first* store goes into a hole; a *rewrite* goes
//! over it, and changes every block. A store has ended when the device has it: the page cache was
//! written back and staged KV windows were coded. What was stored last is read back and compared.

mod bytes;
mod report;
mod target;

use std::{path::PathBuf, thread, time::Instant};

use anyhow::{Context, Result, ensure};
use lamina_codec::{BLOCK_BYTES, Codec};

pub use self::report::{DataReport, Phase, StoreReport, StoreRow};
use self::{
    bytes::Source,
    target::{Alone, Mounted, Observers, Target, Tmpfs},
};
use crate::median;

/// Bytes of a request.
const REQUEST: usize = 1 << 20;
/// Where data of a kind may begin: at chunks of the device.
const ALIGN: u64 = 2 << 20;

/// What is stored.
#[derive(Clone, Debug)]
pub struct StoreBench {
    /// The checkpoints whose values are stored as bf16.
    pub models: Vec<PathBuf>,
    /// The file whose KV cache is stored, in rows as
    /// [`BUNDLED_KV`](crate::codec::BUNDLED_KV) has them.
    pub cache: PathBuf,
    /// Bytes of each store.
    pub bytes: u64,
    /// Rounds.
    pub rounds: usize,
    /// The device's codec.
    pub codec: Codec,
}

/// What the bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Data {
    /// Weights, into a bf16 tensor.
    Bf16,
    /// K and V, into a tensor of KV windows.
    Kv,
    /// Text, where no tensor is.
    Compressible,
    /// Noise, where no tensor is.
    Incompressible,
}

impl Data {
    const ALL: [Self; 4] = [Self::Bf16, Self::Kv, Self::Compressible, Self::Incompressible];

    fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Kv => "KV",
            Self::Compressible => "compressible",
            Self::Incompressible => "incompressible",
        }
    }
}

/// How they are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Calls of the device in this process, beside `pwrite` into tmpfs.
    Device,
    /// As many of them at once as there are processors.
    DeviceParallel,
    /// `pwrite` and `fdatasync`.
    Pwrite,
    /// Stores into a mapping and `msync`.
    Mmap,
    /// `pwrite` with `O_DIRECT`.
    Direct,
    /// As many of them at once as there are processors.
    DirectParallel,
}

impl Way {
    const ALL: [Self; 6] =
        [Self::Device, Self::DeviceParallel, Self::Pwrite, Self::Mmap, Self::Direct, Self::DirectParallel];

    fn name(self, threads: usize) -> String {
        match self {
            Self::Device => "device".to_owned(),
            Self::DeviceParallel => format!("device ×{threads}"),
            Self::Pwrite => "pwrite".to_owned(),
            Self::Mmap => "mmap".to_owned(),
            Self::Direct => "O_DIRECT".to_owned(),
            Self::DirectParallel => format!("O_DIRECT ×{threads}"),
        }
    }

    fn is_alone(self) -> bool {
        matches!(self, Self::Device | Self::DeviceParallel)
    }

    fn is_parallel(self) -> bool {
        matches!(self, Self::DeviceParallel | Self::DirectParallel)
    }
}

/// Whose stores stand in one row, in the order of the columns.
type Targets<'a> = [&'a mut dyn Target; 4];

impl StoreBench {
    /// Measures, and tells what it is at.
    ///
    /// # Errors
    /// When a device does not start, a store fails, or other bytes are read than were stored.
    pub fn run(&self, doing: impl Fn(&str)) -> Result<StoreReport> {
        ensure!(self.bytes > 0 && self.rounds > 0, "no bytes and no rounds measure nothing");
        let length = self.bytes.next_multiple_of(ALIGN);
        let threads = thread::available_parallelism()?.get();
        doing("starting the devices");
        let mut alone = [
            Alone::new(self.codec, length, Observers::Off)?,
            Alone::new(self.codec, length, Observers::On)?,
            Alone::plain(length)?,
        ];
        let mut mounted = [
            Mounted::new(self.codec, length, Observers::Off)?,
            Mounted::new(self.codec, length, Observers::On)?,
            Mounted::plain(length)?,
        ];
        let mut tmpfs = Tmpfs::new(length)?;
        let (mut stored, mut rows) = (Vec::new(), Vec::new());
        for data in Data::ALL {
            let source = Source::new(data, &self.models, &self.cache, usize::try_from(length)?)?;
            for way in Way::ALL.into_iter().filter(|way| threads > 1 || !way.is_parallel()) {
                let name = way.name(threads);
                doing(&format!("{}, {name}", data.name()));
                let mut targets: Targets<'_> = if way.is_alone() {
                    let [lamina, observed, plain] = &mut alone;
                    [lamina, observed, plain, &mut tmpfs]
                } else {
                    let [lamina, observed, plain] = &mut mounted;
                    [lamina, observed, plain, &mut tmpfs]
                };
                let rates = self.rates(data, way, threads, &source, &mut targets)?;
                rows.extend(
                    rates
                        .into_iter()
                        .zip([Phase::First, Phase::Rewrite])
                        .map(|(rates, phase)| StoreRow::new(data.name(), name.clone(), phase, rates)),
                );
            }
            stored.push(DataReport { data: data.name().to_owned(), ratio: alone[0].ratio(data)? });
        }
        mounted.into_iter().try_for_each(Mounted::stop)?;
        Ok(StoreReport {
            codec: self.codec.to_string(),
            bytes: length,
            rounds: self.rounds,
            threads,
            data: stored,
            rows,
        })
    }

    /// Medians of each target, of first stores and of rewrites, in bytes a second.
    fn rates(
        &self,
        data: Data,
        way: Way,
        threads: usize,
        source: &Source,
        targets: &mut Targets<'_>,
    ) -> Result<[[Option<f64>; 4]; 2]> {
        let mut seconds = [const { [const { Vec::new() }; 4] }; 2];
        for round in 0..self.rounds {
            for (column, target) in targets.iter_mut().enumerate() {
                if !target.has(way) {
                    continue;
                }
                target.punch(data)?;
                for (phase, bytes) in [source.first(), source.rewrite()].into_iter().enumerate() {
                    let begun = Instant::now();
                    let threads = if way.is_parallel() { threads } else { 1 };
                    target.store(data, way, threads, bytes).with_context(|| {
                        format!("{} stored by {} into {}", data.name(), way.name(threads), target.name())
                    })?;
                    seconds[phase][column].push(begun.elapsed().as_secs_f64());
                    if round + 1 == self.rounds {
                        let mut found = vec![0; bytes.len()];
                        target.read(data, &mut found)?;
                        ensure!(found == bytes, "{} gives other bytes than were stored", target.name());
                    }
                }
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "a rate to be looked at")]
        let bytes = source.first().len() as f64;
        let rate = |seconds: Vec<f64>| (!seconds.is_empty()).then(|| bytes / median(seconds));
        Ok(seconds.map(|columns| columns.map(rate)))
    }
}

/// Bytes between what is stored first and what is stored over it: a block, so that each changes.
const SHIFT: usize = BLOCK_BYTES;
