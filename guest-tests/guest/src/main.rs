//! `lamina-guest`: does what a plan says inside a guest and reports to the host.

use std::{
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    process::ExitCode,
};

use clap::Parser;
use lamina_guest::{Plan, Report, run};
use lamina_shim::OpenOptions;

/// Reads, writes and checks Lamina's memory from inside a guest, and reports every step as a line
/// of JSON.
///
/// Status 0 means that there was no problem.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "\
The windows are brought up through sysfs, unless LAMINA_BASE and LAMINA_VIEWS name them. LAMINA_CTL names the control port
or socket [default: the virtio port org.lamina.ctl]."
)]
struct Cli {
    /// What to do, as JSON
    #[arg(default_value = "/plan.json")]
    plan: PathBuf,
    /// Where to report [default: the virtio port org.lamina.report, else standard output]
    #[arg(long)]
    report: Option<PathBuf>,
}

fn main() -> anyhow::Result<ExitCode> {
    let cli = Cli::parse();
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("LAMINA_LOG").unwrap_or_else(|_| "warn".into()),
        )
        .with_writer(io::stderr)
        .init();
    let mut report = Report::open(cli.report.as_deref())?;
    match Plan::read(&cli.plan) {
        Ok(plan) => {
            // The host waits for the last event, whatever happens.
            let ran = catch_unwind(AssertUnwindSafe(|| run(&plan, &OpenOptions::from_env(), &mut report)));
            if ran.is_err() {
                report.problem("run", &"the program failed inside; see the console");
            }
        }
        Err(error) => report.problem("plan", &format!("{error:#}")),
    }
    Ok(if report.done() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
