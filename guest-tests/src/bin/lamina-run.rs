//! `./x run`: the main job, for a person or a script.

use std::{
    io::{IsTerminal, stderr},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, Result};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use lamina_guest_tests::{
    bundled,
    daemon::Serve,
    job::{Job, Step},
};

/// Loads real tensors into the device, boots a guest that reads them in every view, and checks every byte.
///
/// The guest is an unmodified Linux that sees the device as CXL Type-3 memory. It reads each tensor through the base window and
/// in each view by plain loads, writes one tensor by stores, and reads it back. Each hash is held against an independent reference computed from
/// the model file. The exit status is 0 only if every byte was right.
#[derive(Debug, Parser)]
#[command(
    name = "./x run",
    version,
    after_help = "\
Examples:
  ./x run
  ./x run --model model.safetensors --views full,e8m3,fp8_e4m3fn
  ./x run --mode gcomp --json

Views: full · eXmY keeps X exponent and Y mantissa bits · +gN rounds with N more bits fetched · :packed packs the elements ·
bf16 fp8_e4m3fn fp8_e5m2 convert · int4 int2 of int8. Views that a tensor's format cannot give are skipped and listed."
)]
struct Cli {
    /// A safetensors file; may be given more than once [default: a bundled 260 K-parameter model and its KV cache]
    #[arg(long = "model", value_name = "FILE")]
    models: Vec<PathBuf>,
    /// Views to make and read, separated by commas
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "LIST",
        default_value = "full,e8m3,e8m3+g2,e8m3+g2:packed,e8m0,fp8_e4m3fn,fp8_e5m2"
    )]
    views: Vec<String>,
    /// The device: trace (bit-planes), gcomp (compressed words) or plain (words)
    #[arg(long, default_value = "trace", value_parser = ["trace", "gcomp", "plain"])]
    mode: String,
    /// The codec
    #[arg(long, default_value = "tree", value_parser = ["lz4", "zstd", "tree"])]
    codec: String,
    /// Bytes of the base window, for example 1G [default: fitting, a multiple of 256M]
    #[arg(long, value_name = "BYTES")]
    capacity: Option<String>,
    /// KiB the host reads when a page is missing; 4 reads exactly that page
    #[arg(long, default_value_t = 4, value_name = "KIB")]
    read_ahead_kb: u32,
    /// The tensor that the guest writes [default: the first by name]
    #[arg(long, value_name = "TENSOR")]
    write: Option<String>,
    /// Have the guest misbehave too: store into a view, reach past ends
    #[arg(long)]
    hostile: bool,
    /// Seconds the guest may take
    #[arg(long, default_value_t = 1800, value_name = "SECONDS")]
    timeout: u64,
    /// Where the report and the guest's console go
    #[arg(long, default_value = "target/run", value_name = "DIR")]
    out: PathBuf,
    /// Print the report as JSON rather than as a table
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("LAMINA_LOG").unwrap_or_else(|_| "warn".into()),
        )
        .with_writer(stderr)
        .init();
    match run(Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("error: {why:#}");
            ExitCode::from(2)
        }
    }
}

fn run(cli: Cli) -> Result<bool> {
    let models = if cli.models.is_empty() { bundled()? } else { cli.models };
    std::fs::create_dir_all(&cli.out)
        .with_context(|| format!("cannot make the folder {}", cli.out.display()))?;
    let job = Job {
        serve: Serve {
            models,
            views: cli.views,
            mode: cli.mode,
            codec: cli.codec,
            capacity: cli.capacity,
            read_ahead_kb: cli.read_ahead_kb,
        },
        write: cli.write,
        hostile: cli.hostile,
        limit: Duration::from_secs(cli.timeout),
        console: cli.out.join("console.log"),
    };
    let mut meter = Meter::new();
    let report = job.run(|step| meter.show(&step))?;
    meter.finish();
    let path = cli.out.join("report.json");
    report.write(&path).with_context(|| format!("cannot write {}", path.display()))?;
    if cli.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        println!("{}\nreport  {}", report.to_text(), path.display());
    }
    Ok(report.good())
}

/// Progress: a line that changes on a terminal, a line now and then elsewhere.
struct Meter {
    bar: Option<ProgressBar>,
    /// The tenth of the pass that was told last.
    told: usize,
}

impl Meter {
    fn new() -> Self {
        let style = ProgressStyle::with_template("{spinner} {bar:30} {pos}/{len} {wide_msg}");
        let bar = stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(0).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        Self { bar, told: 0 }
    }

    fn show(&mut self, step: &Step<'_>) {
        match (&self.bar, step) {
            (_, Step::Serving(ready)) => {
                let live = format!(
                    "run: live at http://{}/ (/stats, /metrics) and {}",
                    ready.tcp,
                    ready.api.display()
                );
                self.bar.as_ref().map_or_else(|| eprintln!("{live}"), |bar| bar.println(&live));
            }
            (Some(bar), Step::Doing(what)) => bar.set_message((*what).to_owned()),
            (Some(bar), Step::Reading { number, of, tensor, view }) => {
                bar.set_length(*of as u64);
                bar.set_position(*number as u64);
                bar.set_message(format!("{tensor} {view}"));
            }
            (None, Step::Doing(what)) => eprintln!("run: {what}"),
            (None, Step::Reading { number, of, tensor, view }) => {
                let tenth = number * 10 / of;
                if tenth != self.told || *number == 1 {
                    self.told = tenth;
                    eprintln!("run: the guest reads view {number} of {of}: {tensor} {view}");
                }
            }
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
