//! Attachments: a guest for each loads, stores and flushes the same tensor, beside loads from its
//! own ordinary memory.
//!
//! The guests are booted one after the other, each on a device of its own with the same bytes in
//! it. Guests differ, so what can be compared is what each reaches of its ordinary memory.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use comfy_table::Table;
use lamina_abi::Interleave;
use lamina_guest::{DiskPlaces, Event, Measure, Plan};
use lamina_qemu::{
    Accel, Attach, AttachKind, BootConfig, Cxl, GuestFile, Ivshmem, Shmem, Source, Targets, VhostUser, image,
};
use lamina_run::{
    daemon::{Daemon, Serve},
    disks::Disks,
    visit::{Visit, Visited},
};
use serde::Serialize;

use crate::{median, rate, table, tile};

/// How long a guest may take.
const LIMIT: Duration = Duration::from_secs(600);
/// Milliseconds after which a measurement takes in no more bytes.
const MEASUREMENT_MS: u64 = 2000;
/// Where the guest's driver is looked for.
const DRIVER: &str = "/lib/modules/lamina.ko";

/// What is attached, and how.
#[derive(Clone, Debug)]
pub struct AttachBench {
    /// The checkpoints whose values are read.
    pub models: Vec<PathBuf>,
    /// Bytes of the tensor.
    pub bytes: u64,
    /// Rounds.
    pub rounds: u32,
    /// The device's codec.
    pub codec: String,
    /// KiB the host reads when a page is missing.
    pub read_ahead_kb: u32,
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct AttachReport {
    /// QEMU's version.
    pub qemu: String,
    /// The codec of the devices.
    pub codec: String,
    /// Bytes of the tensor.
    pub bytes: u64,
    /// Rounds, of which medians are told.
    pub rounds: u32,
    /// KiB the host reads when a page is missing.
    pub read_ahead_kb: u32,
    /// Each attachment.
    pub rows: Vec<AttachRow>,
}

/// Medians of one attachment. Rates are bytes a second.
#[derive(Clone, Debug, Serialize)]
pub struct AttachRow {
    /// The way, as options of `lamina boot`.
    pub attach: String,
    /// `kvm` or `tcg`.
    pub accel: String,
    /// Loads from the guest's ordinary memory.
    pub ordinary: f64,
    /// Loads of the view `full` that the device decodes for them.
    pub cold: f64,
    /// That, of the ordinary memory's.
    pub cold_of_ordinary: f64,
    /// Loads of the view `full` once it was loaded.
    pub warm: f64,
    /// That, of the ordinary memory's.
    pub warm_of_ordinary: f64,
    /// Loads of the base window once it was loaded.
    pub base: f64,
    /// That, of the ordinary memory's.
    pub base_of_ordinary: f64,
    /// Stores into the base window with the flush that brings them to the views.
    pub stored: f64,
    /// Seconds of a flush of the same bytes that has nothing to bring.
    pub flush_seconds: f64,
}

impl AttachBench {
    /// Measures, and tells what it is at.
    ///
    /// # Errors
    /// When a device or a guest does not start, or a guest loads other words than it stored.
    pub fn run(&self, doing: impl Fn(&str)) -> Result<AttachReport> {
        ensure!(self.rounds > 0, "no rounds measure nothing");
        let folder = tempfile::tempdir()?;
        let model = folder.path().join("tile.safetensors");
        tile::write(&self.models, self.bytes, &model)?;
        let set: Interleave = "2x256".parse()?;
        let ways = [
            (AttachKind::Cxl, None),
            (AttachKind::Cxl, Some(set)),
            (AttachKind::Ivshmem, None),
            (AttachKind::Shmem, None),
            (AttachKind::VhostUser, None),
        ];
        let (mut rows, mut qemu) = (Vec::new(), String::new());
        for (number, (kind, set)) in (1..).zip(ways) {
            let attach = set.map_or_else(|| kind.to_string(), |set| format!("{kind} --interleave {set}"));
            doing(&format!("{attach} ({number} of {})", ways.len()));
            let row = self.measure(kind, set, &model, folder.path(), &doing);
            let (visited, mut row) = row.with_context(|| format!("--attach {attach}"))?;
            row.attach = attach;
            qemu = visited.qemu;
            rows.push(row);
        }
        let Self { bytes, rounds, codec, read_ahead_kb, .. } = self.clone();
        Ok(AttachReport { qemu, codec, bytes, rounds, read_ahead_kb, rows })
    }

    /// Serves the model to a guest in one way, and has it measure that.
    fn measure(
        &self,
        kind: AttachKind,
        set: Option<Interleave>,
        model: &Path,
        folder: &Path,
        doing: &dyn Fn(&str),
    ) -> Result<(Visited, AttachRow)> {
        let mut files = Vec::new();
        if kind == AttachKind::VhostUser {
            let text = model.to_str().context("the temporary folder's path is not UTF-8")?;
            let disks = Disks::start(&["--model", text, "--views", "full", "--codec", &self.codec])?;
            let tensors = disks.tensors()?;
            let shown = disks.partition(tile::TENSOR, "full")?;
            let places = DiskPlaces {
                partition: shown.number,
                offset: tensors[0]["dpa"].as_u64().context("the tensor has no place")?,
                bytes: shown.length,
            };
            let attach = Attach::VhostUser(VhostUser { disks: disks.sockets(), queues: 2 });
            let reported = self.visit(BootConfig::attached(attach), Some(places), files, folder, doing)?;
            disks.stop()?;
            return Ok(reported);
        }
        let socket = folder.join("device.sock");
        let socket_text = socket.to_str().context("the temporary folder's path is not UTF-8")?;
        let set_text = set.map(|set| set.to_string());
        let more = match (kind, &set_text) {
            (AttachKind::Ivshmem, _) => vec!["--ivshmem", socket_text],
            (AttachKind::Shmem, _) => vec!["--vhost-user-shmem", socket_text],
            (_, Some(set)) => vec!["--interleave", set],
            (_, None) => Vec::new(),
        };
        let serve = Serve {
            models: vec![model.to_owned()],
            views: vec!["full".to_owned()],
            kv: Vec::new(),
            mode: "trace".to_owned(),
            codec: self.codec.clone(),
            capacity: None,
            read_ahead_kb: self.read_ahead_kb,
            devices: None,
        };
        let device = Daemon::start_with(&serve, &more)?;
        let ready = &device.ready;
        let (base, base_bytes) = (ready.base.path.clone(), ready.base.bytes);
        let (views, views_bytes) = (ready.views.path.clone(), ready.views.bytes);
        let mut config = BootConfig::attached(match kind {
            AttachKind::Ivshmem => {
                Attach::Ivshmem(Ivshmem { base, base_bytes, views, views_bytes, mailbox: Some(socket) })
            }
            AttachKind::Shmem => {
                let module = image::driver()?;
                files.push(GuestFile { path: DRIVER.into(), source: Source::Host(module), mode: 0o644 });
                Attach::Shmem(Shmem { socket })
            }
            AttachKind::Cxl | AttachKind::VhostUser | AttachKind::Virtiofs => {
                let target = |target| base.with_file_name(format!("target{target}"));
                let targets = set.map(|set| Targets { set, files: (0..set.ways()).map(target).collect() });
                Attach::Cxl(Cxl { base, base_bytes, views, views_bytes, targets })
            }
        });
        if kind == AttachKind::Cxl {
            config.ctl_socket = Some(ready.ctl.clone());
        }
        // As `lamina boot` does: KVM cannot hand every access to a set on to QEMU.
        config.accel = set.map(|_| Accel::Tcg);
        let reported = self.visit(config, None, files, folder, doing)?;
        device.stop()?;
        Ok(reported)
    }

    /// Boots a guest that measures.
    fn visit(
        &self,
        config: BootConfig,
        disks: Option<DiskPlaces>,
        files: Vec<GuestFile>,
        folder: &Path,
        doing: &dyn Fn(&str),
    ) -> Result<(Visited, AttachRow)> {
        let bench = lamina_guest::AttachBench {
            tensor: tile::TENSOR.to_owned(),
            rounds: self.rounds,
            limit_ms: MEASUREMENT_MS,
            disks,
        };
        let plan = Plan {
            tensors: Some(Vec::new()),
            read_base: false,
            attach_bench: Some(bench),
            ..Plan::default()
        };
        let visit = Visit { plan, files, limit: LIMIT, console: folder.join("console.log"), cpus: 2 };
        let mut measured: HashMap<Measure, Vec<(u64, f64)>> = HashMap::new();
        let visited = visit.make_in(config, |event, _| {
            match event {
                Event::Measured { what, round, bytes, seconds } => {
                    measured.entry(what).or_default().push((bytes, seconds));
                    if what == Measure::Flush {
                        doing(&format!("  round {} of {}", round + 1, self.rounds));
                    }
                }
                Event::Problem { step, message } => bail!("guest, {step}: {message}"),
                _ => {}
            }
            Ok(())
        })?;
        let of = |what, figure: fn(u64, f64) -> f64| {
            let all = measured.get(&what).map(Vec::as_slice).unwrap_or_default();
            ensure!(all.len() == self.rounds as usize, "{} of {} rounds of {what:?}", all.len(), self.rounds);
            Ok(median(all.iter().map(|(bytes, seconds)| figure(*bytes, *seconds)).collect()))
        };
        let gbs = |what| of(what, rate);
        let ordinary = gbs(Measure::Ordinary)?;
        let (cold, warm, base) = (gbs(Measure::Cold)?, gbs(Measure::Warm)?, gbs(Measure::Base)?);
        let row = AttachRow {
            attach: String::new(),
            accel: visited.accel.clone(),
            ordinary: ordinary * 1e9,
            cold: cold * 1e9,
            cold_of_ordinary: cold / ordinary,
            warm: warm * 1e9,
            warm_of_ordinary: warm / ordinary,
            base: base * 1e9,
            base_of_ordinary: base / ordinary,
            stored: gbs(Measure::Stored)? * 1e9,
            flush_seconds: of(Measure::Flush, |_, seconds| seconds)?,
        };
        Ok((visited, row))
    }
}

impl AttachReport {
    /// How it was measured, in a line.
    pub fn title(&self) -> String {
        let mut accels: Vec<_> = self.rows.iter().map(|row| row.accel.as_str()).collect();
        accels.dedup();
        format!(
            "attachments: {} MiB of bf16, codec {}, read-ahead {} KiB, in guests ({}, QEMU {}), medians of {}; GB/s, and of the same guest's ordinary memory",
            self.bytes >> 20,
            self.codec,
            self.read_ahead_kb,
            accels.join(" and "),
            self.qemu,
            self.rounds,
        )
    }

    /// The table for a person.
    pub fn to_table(&self) -> Table {
        let mut out = table(&[
            "attach",
            "ordinary",
            "cold",
            "of it",
            "warm",
            "of it",
            "base warm",
            "of it",
            "stores + flush",
            "empty flush ms",
        ]);
        for row in &self.rows {
            let gbs = |rate: f64| format!("{:.3}", rate / 1e9);
            let part = |ratio: f64| format!("{ratio:.3}");
            out.add_row([
                row.attach.clone(),
                gbs(row.ordinary),
                gbs(row.cold),
                part(row.cold_of_ordinary),
                gbs(row.warm),
                part(row.warm_of_ordinary),
                gbs(row.base),
                part(row.base_of_ordinary),
                gbs(row.stored),
                format!("{:.2}", row.flush_seconds * 1e3),
            ]);
        }
        out
    }
}
