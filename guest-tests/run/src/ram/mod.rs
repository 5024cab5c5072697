//! The memory job: the base window as a guest's RAM, by the kernel's own tools, and as a disk that
//! a guest swaps to.
//!
//! Two guests, one after the other, each on a device of its own. The first has the base window as a
//! NUMA node: processes whose memory is bound to it, pages demoted to it and promoted from it,
//! DAMON watching it. The second sees the device as disks, without a driver of ours, and swaps to
//! one. [`report`] judges what they tell.
//!
//! * The first guest's kernel zeroes what is freed (`init_on_free=1`), so that the device stores
//!   nothing of processes that have ended.
//! * Memory is opaque to the device: no tensor covers it.

pub mod report;

use std::{path::PathBuf, time::Duration};

use anyhow::{Context, Result};
use lamina_guest::{Event, Plan, ProcessPlan, RamPlan, SwapPlan};
use lamina_qemu::{Attach, BootConfig, GuestFile, VhostUser};

use self::report::{RamReport, Reported};
use crate::{
    daemon::{Daemon, Serve},
    disks::Disks,
    programs,
    progress::Step,
    subject::{DeviceReport, GuestReport},
    visit::Visit,
};

/// A process that has objects, dictionaries and strings.
const TABLES: &str = include_str!("tables.py");
/// A database in memory.
const ROWS: &str = include_str!("rows.sql");
/// The base window of either device, unless the first's is given.
const CAPACITY: &str = "256M";

/// What to do.
#[derive(Clone, Debug)]
pub struct Ram {
    /// The device, without tensors.
    pub serve: Serve,
    /// How long each guest may take.
    pub limit: Duration,
    /// Where the first guest's console is logged; the second's beside it.
    pub console: PathBuf,
    /// What the first guest does.
    pub plan: RamPlan,
    /// What the second guest does.
    pub swap: SwapPlan,
}

/// What came of it.
pub struct Ran {
    /// The first guest.
    pub guest: GuestReport,
    /// Its device, at the end.
    pub device: DeviceReport,
    /// What was found.
    pub ram: RamReport,
    /// Everything that was wrong.
    pub problems: Vec<String>,
}

/// Three processes, and sizes of which a guest that is emulated is done in seconds.
pub fn plan() -> RamPlan {
    let process = |name: &str, command: &[&str]| ProcessPlan {
        name: name.to_owned(),
        command: command.iter().map(|&word| word.to_owned()).collect(),
        input: String::new(),
        ready: Some("ready".to_owned()),
        check: None,
    };
    let check = |question: &str| Some((question.to_owned(), "ok".to_owned()));
    let python = ProcessPlan {
        check: check("go on"),
        ..process("python", &["python3", "-I", "-S", "-B", "/ram/tables.py"])
    };
    // By the time the compiler's assembly has filled a pipe, it has the whole source in memory, as
    // it represents it.
    let words = ["cc1", "-fpreprocessed", "-quiet", "-O0", "/usr/share/lamina/stb_image.i", "-o", "-"];
    let cc1 = ProcessPlan { ready: None, ..process("cc1", &words) };
    let sqlite = ProcessPlan {
        input: ROWS.to_owned(),
        check: check("PRAGMA integrity_check;"),
        ..process("sqlite", &["sqlite3", "-batch"])
    };
    RamPlan {
        processes: vec![python, cc1, sqlite],
        demote_bytes: 16 << 20,
        watched_bytes: 32 << 20,
        hot_bytes: 8 << 20,
    }
}

/// A process that has three times what it may keep in RAM.
pub fn swap() -> SwapPlan {
    SwapPlan { serial: "lamina-base".to_owned(), bytes: 24 << 20, limit_bytes: 8 << 20 }
}

impl Ram {
    /// Does it.
    ///
    /// # Errors
    /// When it cannot be done. That something was wrong is no error but in the report.
    pub fn run(&self, step: &mut impl FnMut(Step<'_>)) -> Result<Ran> {
        step(Step::Doing("starting a device without tensors"));
        let serve = Serve {
            capacity: Some(self.serve.capacity.clone().unwrap_or_else(|| CAPACITY.to_owned())),
            ..self.serve.clone()
        };
        let device = Daemon::start_observed(&serve)?;
        step(Step::Serving(&device.ready));
        let (base, views) = (&device.ready.base, &device.ready.views);
        let mut config = BootConfig::new(&base.path, base.bytes, &views.path, views.bytes);
        config.ctl_socket = Some(device.ready.ctl.clone());
        config.workloads = true;
        config.kernel_args = vec!["init_on_free=1".to_owned()];
        let files = vec![pages()?, GuestFile::data("/ram/tables.py", TABLES)];
        let plan = Plan { ram: Some(self.plan.clone()), ..Plan::default() };
        let visit = Visit { plan, files, limit: self.limit, console: self.console.clone(), cpus: 2 };
        step(Step::Doing("booting a guest whose memory the base window is"));
        let mut reported = Reported::default();
        let mut guest =
            GuestReport { attach: "cxl-type3 as system RAM".to_owned(), ..GuestReport::default() };
        let visited = visit.make_in(config, |event, since| {
            match &event {
                Event::SystemRam { .. } => guest.boot_seconds = since.as_secs_f64(),
                Event::Started { kernel, .. } => guest.kernel.clone_from(kernel),
                _ => {}
            }
            announce(&event, step);
            reported.take(event);
            Ok(())
        })?;
        reported.ended(visited.outcome.status);
        (guest.qemu, guest.accel) = (visited.qemu, visited.accel);
        let device_report = serde_json::from_value(device.stats()?["device"].take())
            .context("the device's counters have no device")?;
        device.stop()?;
        self.swap(&mut reported, step)?;
        let (ram, problems) = reported.judged(&self.plan)?;
        Ok(Ran { guest, device: device_report, ram, problems })
    }

    /// The second guest.
    fn swap(&self, reported: &mut Reported, step: &mut impl FnMut(Step<'_>)) -> Result<()> {
        step(Step::Doing("booting a guest that swaps to a disk of the device"));
        let Serve { mode, codec, .. } = &self.serve;
        let disks = Disks::start(&["--capacity", CAPACITY, "--mode", mode, "--codec", codec])?;
        let attach = Attach::VhostUser(VhostUser { disks: disks.sockets(), queues: 2 });
        let mut config = BootConfig::attached(attach);
        config.ctl_socket = Some(disks.ready.ctl.clone());
        let plan = Plan { swap: Some(self.swap.clone()), ..Plan::default() };
        let console = self.console.with_extension("swap.log");
        let visit = Visit { plan, files: vec![pages()?], limit: self.limit, console, cpus: 2 };
        let visited = visit.make_in(config, |event, _| {
            reported.take(event);
            Ok(())
        })?;
        reported.ended(visited.outcome.status);
        disks.stop()
    }
}

fn pages() -> Result<GuestFile> {
    Ok(GuestFile::program("/bin/lamina-pages", programs::guest("lamina-pages")?))
}

fn announce(event: &Event, step: &mut impl FnMut(Step<'_>)) {
    match event {
        Event::SystemRam { node, .. } => {
            step(Step::Doing(&format!("the base window is node {node}; processes run on it")));
        }
        Event::Process { name, .. } => step(Step::Doing(&format!("{name} was measured"))),
        Event::Demoted { .. } => step(Step::Doing("pages were demoted; DAMON looks for hot and cold")),
        _ => {}
    }
}
