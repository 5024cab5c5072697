//! The run: bring up, read, decode, write, misbehave, measure. Each step reports as it goes; a step
//! that fails is a problem, and the next one still runs, unless there is no device to run it on. A
//! base window that is memory, or swapped to, is not looked at otherwise.

mod attach;
mod decode;
mod handoff;
mod hostile;
mod messages;
mod ram;
mod read;
mod soak;
mod swap;
mod talker;
mod vm;
mod warm;
mod write;

use std::{fs, time::Instant};

use lamina_shim::{Access, Lamina, OpenOptions, Role, UpOptions, up};

use crate::{Event, Phase, Plan, Report, WindowReport, report::console};

/// Does what `plan` says on the windows of `options` (brought up first where no paths are given),
/// and reports.
pub fn run(plan: &Plan, options: &OpenOptions, report: &mut Report) {
    started(report);
    if let Some(plan) = &plan.ram {
        return ram::run(options, plan, report);
    }
    if let Some(plan) = &plan.swap {
        if let Err(error) = swap::run(options, plan, report) {
            report.problem("swap", &format!("{error:#}"));
        }
        return;
    }
    if let Some(bench) = &plan.attach_bench
        && let Some(places) = &bench.disks
    {
        if let Err(error) = attach::of_disks(&options.tree, places, bench, report) {
            report.problem("attach-bench", &format!("{error:#}"));
        }
        return;
    }
    let options = OpenOptions { base_access: Access::ReadWrite, ..options.clone() };
    let lamina = match open(&options, report) {
        Ok(lamina) => lamina,
        Err(error) => return report.problem("up", &error),
    };
    if let Err(error) = read::pass(&lamina, plan, Phase::Loaded, None, report) {
        report.problem("read", &error);
    }
    if plan.counters {
        match lamina.ctl().and_then(|mut ctl| Ok(ctl.stats()?)) {
            Ok(mut reply) => report.send(&Event::Counters { stats: reply["stats"].take() }),
            Err(error) => report.problem("counters", &error),
        }
    }
    if let Some(decode) = &plan.decode
        && let Err(error) = decode::run(&lamina, decode, report)
    {
        report.problem("decode", &format!("{error:#}"));
    }
    if let Some(write) = &plan.write
        && let Err(error) = write::run(&lamina, plan, write, report)
    {
        report.problem("write", &format!("{error:#}"));
    }
    for exchange in &plan.messages {
        if let Err(error) = messages::run(&lamina, exchange, report) {
            report.problem("messages", &format!("{error:#}"));
        }
    }
    if let Some(handoff) = &plan.handoff
        && let Err(error) = handoff::run(&lamina, handoff, report)
    {
        report.problem("handoff", &format!("{error:#}"));
    }
    if let Some(plan) = &plan.soak
        && let Err(error) = soak::run(&lamina, plan, report)
    {
        report.problem("soak", &format!("{error:#}"));
    }
    if plan.hostile
        && let Err(error) = hostile::run(&lamina, plan, &options, report)
    {
        report.problem("hostile", &format!("{error:#}"));
    }
    if let Some(bench) = &plan.warm_bench
        && let Err(error) = warm::run(&lamina, bench, report)
    {
        report.problem("warm-bench", &format!("{error:#}"));
    }
    if let Some(bench) = &plan.attach_bench
        && let Err(error) = attach::of_memory(&lamina, bench, report)
    {
        report.problem("attach-bench", &format!("{error:#}"));
    }
}

fn started(report: &mut Report) {
    let uname = rustix::system::uname();
    let text = |field: &std::ffi::CStr| field.to_string_lossy().into_owned();
    report.send(&Event::Started {
        kernel: text(uname.release()),
        machine: text(uname.machine()),
        uptime: uptime(),
    });
}

fn open(options: &OpenOptions, report: &mut Report) -> Result<Lamina, lamina_shim::Error> {
    let start = Instant::now();
    let attached = if options.views.is_none() && options.base.is_none() {
        Some(Box::new(up(&options.tree, &UpOptions::default())?))
    } else {
        None
    };
    let seconds = start.elapsed().as_secs_f64();
    // What `up` found, rather than looking for it again; a driver's one file shows both windows and
    // is no window itself.
    let mut options = options.clone();
    if let Some(attached) = attached.as_ref().filter(|attached| attached.base.node != attached.views.node) {
        options.base = Some(attached.base.node.clone());
        options.views = Some(attached.views.node.clone());
    }
    let lamina = Lamina::open(&options)?;
    let window = |role| {
        let window = lamina.window(role)?;
        Ok::<_, lamina_shim::Error>(WindowReport { path: window.path().into(), bytes: window.bytes() })
    };
    let (base, views) = (window(Role::Base)?, window(Role::Views)?);
    let directory = lamina.directory();
    let uptime = uptime();
    console(&format!(
        "up after {uptime:.2} s: base {} views {}, {} tensors, {} views",
        base.path.display(),
        views.path.display(),
        directory.tensors.len(),
        directory.views.len(),
    ));
    report.send(&Event::Up {
        uptime,
        seconds: if attached.is_some() { seconds } else { 0.0 },
        attached,
        base,
        views,
        generation: directory.generation,
        tensors: directory.tensors.len(),
        view_count: directory.views.len(),
    });
    Ok(lamina)
}

/// Seconds since boot, zero where the kernel does not tell.
fn uptime() -> f64 {
    let text = fs::read_to_string("/proc/uptime").unwrap_or_default();
    text.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0.0)
}
