//! The main job: device, guest, judgement, report.

use std::{collections::BTreeMap, path::PathBuf, sync::mpsc, time::Duration};

use anyhow::{Context, Result};
use lamina_guest::{Event, Phase, Plan, WritePlan};
use serde_json::Value;

use crate::{
    daemon::{Daemon, Serve},
    decode::{self, Decode, report::Reported},
    judge::Judge,
    ram::{Ram, Ran},
    report::{DeviceReport, GuestReport, Report, TensorReport, TrafficReport, ViewReport, WrittenReport},
    visit::Visit,
};

pub use crate::progress::Step;

/// Decides the bytes that the guest writes, see [`lamina_guest::rotate`].
const SEED: u64 = 260;

/// What to do.
#[derive(Clone, Debug)]
pub struct Job {
    /// The device.
    pub serve: Serve,
    /// Who reads and decodes.
    pub on: On,
    /// Whether the guest reads every tensor in every view, and writes one.
    pub views: bool,
    /// What it decodes, if it is to.
    pub decode: Option<Decode>,
    /// What it does with the device as memory, if it is to, in guests of their own.
    pub ram: Option<Ram>,
    /// The tensor that the guest writes; the first that has a view if not given.
    pub write: Option<String>,
    /// Whether the guest misbehaves too.
    pub hostile: bool,
    /// How long the guest may take.
    pub limit: Duration,
    /// Where the guest's console is logged.
    pub console: PathBuf,
}

/// Who reads and decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    /// A guest.
    Guest,
    /// The guest's program, on the host, by the mount.
    Host,
}

impl Job {
    /// Does it.
    ///
    /// # Errors
    /// When it cannot be done. That something was wrong is no error but in the report.
    pub fn run(&self, mut step: impl FnMut(Step<'_>)) -> Result<Report> {
        let report = (self.views || self.decode.is_some()).then(|| self.visit(&mut step)).transpose()?;
        let Some(ram) = &self.ram else { return report.context("there is nothing to do") };
        let Ran { guest, device, ram, problems } = ram.run(&mut step)?;
        let mut report = report.unwrap_or_else(|| Report::of(guest, device));
        report.ram = Some(ram);
        report.problems.extend(problems);
        Ok(report)
    }

    /// The guest that reads views and decodes.
    fn visit(&self, mut step: impl FnMut(Step<'_>)) -> Result<Report> {
        let mut serve = self.serve.clone();
        let decode = self.decode.as_ref().map(|decode| decode.prepare(&mut serve)).transpose()?;
        let judge = Judge::new(&serve.models)?;
        step(Step::Doing("starting the device and loading the tensors"));
        let device = Daemon::start_observed(&serve)?;
        step(Step::Serving(&device.ready));
        let write = self.write.clone().or_else(|| judge.names().next().map(str::to_owned));
        let plan = Plan {
            views: (!self.views).then(Vec::new),
            read_base: self.views,
            write: write.filter(|_| self.views).map(|tensor| WritePlan { tensor, seed: SEED }),
            hostile: self.hostile && self.views,
            counters: self.views,
            decode: decode.as_ref().map(|decode| decode.plan.clone()),
            ..Plan::default()
        };
        let files = decode.as_ref().map(|decode| decode.files.clone()).unwrap_or_default();
        let visit = Visit { plan, files, limit: self.limit, console: self.console.clone(), cpus: 2 };
        step(Step::Doing(match self.on {
            On::Guest => "booting the guest",
            On::Host => "starting the guest's program on the host",
        }));
        let mut found = Found::default();
        let (requested, to_judge) = mpsc::channel::<(String, String, u64)>();
        let (visited, verdicts, decoded) = std::thread::scope(|scope| -> Result<_> {
            // The reference is slow: it works while the guest does.
            let bench = scope.spawn(|| {
                let judged = to_judge.into_iter().map(|(tensor, view, rotation)| {
                    let want = judge.sha256(&tensor, &view, rotation);
                    ((tensor, view, rotation), want)
                });
                judged.collect::<BTreeMap<_, _>>()
            });
            let decoder = scope.spawn(|| {
                let (prepared, decode) = (decode.as_ref()?, self.decode.as_ref()?);
                Some(prepared.expected(decode, &judge))
            });
            let on_event = |event: Event, since| {
                match &event {
                    Event::ViewBegin { tensor, view, number, of, .. } => {
                        step(Step::Reading { number: *number, of: *of, tensor, view });
                    }
                    Event::DecodeBegin { number, of } => {
                        let runs = decode.as_ref().map(|decode| decode.plan.runs.as_slice());
                        if let Some(run) = runs.and_then(|runs| runs.get(number.checked_sub(1)?)) {
                            let (weights, policy) = (&run.weights, &run.policy);
                            step(Step::Decoding { number: *number, of: *of, weights, policy });
                        }
                    }
                    _ => {}
                }
                found.take(event, since, &requested)
            };
            let visited = match self.on {
                On::Guest => visit.make(&device.ready, on_event),
                On::Host => visit.make_on_host(&device.ready, on_event),
            };
            drop(requested);
            let failed = |_| anyhow::anyhow!("the reference failed");
            let verdicts = bench.join().map_err(failed)?;
            let decoded = decoder.join().map_err(failed)?;
            Ok((visited?, verdicts, decoded))
        })?;
        step(Step::Doing("comparing with the reference"));
        let stats = device.stats()?;
        let skipped = device.ready.skipped.clone();
        device.stop()?;
        found.guest.qemu = visited.qemu;
        found.guest.accel = visited.accel;
        if visited.outcome.status != Some(0) {
            found
                .problems
                .push(format!("the guest's program ended with status {:?}", visited.outcome.status));
        }
        let reported = std::mem::take(&mut found.decoded);
        let mut report = found.judged(&verdicts, &stats)?;
        report.skipped = skipped;
        if let Some((decode, expected)) = decode.zip(decoded) {
            let (decoded, problems) =
                decode::report::report(&decode.model, &decode.plan, &reported, &expected)?;
            report.decode = decoded;
            report.problems.extend(problems);
        }
        Ok(report)
    }
}

/// What the guest told.
#[derive(Default)]
struct Found {
    guest: GuestReport,
    views: Vec<Read>,
    decoded: Vec<Reported>,
    written: Option<(String, u64)>,
    /// The device's counters when every view had been read once.
    counters: Value,
    problems: Vec<String>,
}

/// One read of a view: what was loaded, and how long it took.
struct Read {
    phase: Phase,
    tensor: String,
    view: String,
    elements: u64,
    bytes: u64,
    sha256: String,
    seconds: f64,
}

type Verdicts = BTreeMap<(String, String, u64), Result<String>>;

impl Found {
    fn take(
        &mut self,
        event: Event,
        since: Duration,
        ask: &mpsc::Sender<(String, String, u64)>,
    ) -> Result<()> {
        match event {
            Event::Started { kernel, .. } => self.guest.kernel = kernel,
            Event::Up { attached, .. } => {
                self.guest.boot_seconds = since.as_secs_f64();
                let attach = if attached.is_some() { "cxl-type3 as devdax" } else { "files of the mount" };
                attach.clone_into(&mut self.guest.attach);
            }
            Event::View { phase, tensor, view, elements, bytes, sha256, seconds } => {
                ask.send((tensor.clone(), view.clone(), self.rotation(phase)))
                    .context("the reference has ended early")?;
                self.views.push(Read { phase, tensor, view, elements, bytes, sha256, seconds });
            }
            Event::Counters { stats } => self.counters = stats,
            Event::Written { tensor, rotation, .. } => self.written = Some((tensor, rotation)),
            Event::HostileStore { tensor, view, before, after_flush, base_unchanged, .. } => {
                if before != after_flush || !base_unchanged {
                    self.problems
                        .push(format!("a store into {view} of {tensor} had an effect that outlived a flush"));
                }
            }
            Event::Problem { step, message } => self.problems.push(format!("guest, {step}: {message}")),
            decoded @ Event::Decoded { .. } => self.decoded.extend(Reported::of(decoded)),
            Event::ViewBegin { .. }
            | Event::DecodeBegin { .. }
            | Event::PastEnd { .. }
            | Event::WarmRead { .. }
            | Event::Measured { .. }
            | Event::Message { .. }
            | Event::SystemRam { .. }
            | Event::Process { .. }
            | Event::Demoted { .. }
            | Event::Watched { .. }
            | Event::Swapped { .. }
            | Event::Handoff { .. }
            | Event::Soaked { .. }
            | Event::Done { .. } => {}
        }
        Ok(())
    }

    /// By how much the written tensor is rotated in this pass.
    fn rotation(&self, phase: Phase) -> u64 {
        match (phase, &self.written) {
            (Phase::Written, Some((_, rotation))) => *rotation,
            _ => 0,
        }
    }

    fn judged(mut self, verdicts: &Verdicts, stats: &Value) -> Result<Report> {
        let mut views = Vec::new();
        let mut base = BTreeMap::new();
        let mut written = None;
        let reads = std::mem::take(&mut self.views);
        for read in reads {
            let key = (read.tensor.clone(), read.view.clone(), self.rotation(read.phase));
            let matches = match verdicts.get(&key) {
                Some(Ok(want)) if *want == read.sha256 => true,
                Some(Ok(want)) => {
                    self.problems.push(format!(
                        "{} of {} ({:?}) has SHA-256 {}, the reference {want}",
                        read.view, read.tensor, read.phase, read.sha256
                    ));
                    false
                }
                Some(Err(why)) => {
                    self.problems
                        .push(format!("{} of {}: the reference fails: {why:#}", read.view, read.tensor));
                    false
                }
                None => {
                    self.problems.push(format!("{} of {} was not judged", read.view, read.tensor));
                    false
                }
            };
            match read.phase {
                Phase::Written => {
                    let entry = written.get_or_insert_with(|| WrittenReport {
                        tensor: read.tensor.clone(),
                        sha256_full: read.sha256.clone(),
                        matches: true,
                        views: Vec::new(),
                    });
                    entry.matches &= matches;
                    if read.view == "full" {
                        entry.sha256_full.clone_from(&read.sha256);
                    }
                    entry.views.push(read.view);
                }
                Phase::Loaded if read.view == "base" => {
                    base.insert(read.tensor, read.sha256);
                }
                Phase::Loaded => views.push(self.view_report(read, matches)?),
            }
        }
        if let Some((tensor, _)) = &self.written
            && written.is_none()
        {
            self.problems.push(format!("{tensor} was written and not read back"));
        }
        let field = |name: &str| {
            stats.get(name).cloned().with_context(|| format!("the device's counters have no {name}"))
        };
        let device: DeviceReport = serde_json::from_value(field("device")?)?;
        let interleave = serde_json::from_value(field("interleave")?)?;
        let mut tensors: Vec<TensorReport> = serde_json::from_value(field("tensors")?)?;
        for tensor in &mut tensors {
            tensor.base_sha256 = base.remove(&tensor.name);
        }
        let traffic = Some(TrafficReport::of(stats).context("the device's counters lack some")?);
        let Self { guest, problems, .. } = self;
        Ok(Report { interleave, tensors, views, written, traffic, problems, ..Report::of(guest, device) })
    }

    fn view_report(&self, read: Read, matches: bool) -> Result<ViewReport> {
        let counters = self.counters["views"]
            .as_array()
            .and_then(|views| {
                views.iter().find(|v| v["tensor"] == read.tensor.as_str() && v["view"] == read.view.as_str())
            })
            .with_context(|| format!("the device has no counters of {} of {}", read.view, read.tensor))?;
        let count = |name: &str| {
            counters[name]
                .as_u64()
                .with_context(|| format!("{name} of {} of {} is no number", read.view, read.tensor))
        };
        Ok(ViewReport {
            planes_fetched: count("planes_fetched")?,
            stored_bytes_fetched: count("stored_bytes_fetched")?,
            plain_bytes_fetched: count("plain_bytes_fetched")?,
            gcomp_bytes_fetched: counters["gcomp_bytes_fetched"].as_u64(),
            index_bytes_fetched: count("index_bytes_fetched")?,
            gcomp_index_bytes_fetched: counters["gcomp_index_bytes_fetched"].as_u64(),
            staged_bytes: count("staged_bytes")?,
            of_plain: counters["of_plain"].as_f64(),
            of_plain_with_index: counters["of_plain_with_index"].as_f64(),
            tensor: read.tensor,
            view: read.view,
            elements: read.elements,
            bytes: read.bytes,
            sha256: read.sha256,
            matches,
            seconds: read.seconds,
        })
    }
}
