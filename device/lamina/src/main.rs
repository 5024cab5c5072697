//! `lamina`: serves a device, talks to one that is being served, and says what one would make of a
//! checkpoint.

// Whoever reads may go, and a disk be full: see `out`.
#![deny(clippy::print_stdout)]

mod advise;
mod against;
mod analyze;
mod args;
mod boot;
mod client;
mod doctor;
#[cfg(debug_assertions)]
mod failpoints;
mod guests;
mod holder;
mod image;
mod life;
mod log;
mod made_file;
mod manual;
mod meter;
mod modelled;
mod mount;
mod mounted;
mod out;
mod partition_table;
mod pool;
mod reproduce;
mod serve;
mod shmem;
mod signals;
mod status;
mod table;
mod top;
mod topology;
mod way;
mod worker;

use std::process::ExitCode;

use crate::args::{Command, PartitionArgs};
use crate::status::Status;

fn main() -> ExitCode {
    signals::survive_file_limit();
    let cli = match topology::command_line() {
        Ok(cli) => cli,
        Err(status) => return status,
    };
    log::start();
    let status = run(cli);
    log::flush(log::TIMEOUT);
    status
}

fn run(cli: args::Cli) -> ExitCode {
    if std::env::var_os(life::WORKER).is_some() {
        match &cli.command {
            Command::Serve(args) => worker::work(&args.device, &args.partition_table),
            Command::Boot(args) => worker::work(&args.device, &PartitionArgs::default()),
            _ => {}
        }
    }
    let alone = match &cli.command {
        Command::Doctor(args) => Some(doctor::doctor(args)),
        Command::Completions(args) => Some(manual::completions(args).map(|()| Status::Done)),
        Command::Man(args) => Some(manual::man(args).map(|()| Status::Done)),
        _ => None,
    };
    if let Some(done) = alone {
        return done.map_or_else(|why| out::failed(&why), ExitCode::from);
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(why) => {
            log::say(&format!("lamina: cannot start: {why}"));
            return ExitCode::FAILURE;
        }
    };
    let boots = matches!(cli.command, Command::Boot(_) | Command::BootSeveral(_));
    let done = runtime.block_on(async {
        match cli.command {
            Command::Advise(args) => tokio::task::block_in_place(|| advise::advise(&args)),
            Command::Analyze(args) => tokio::task::block_in_place(|| analyze::analyze(&args)),
            Command::Boot(args) => return boot::boot(*args).await,
            Command::BootSeveral(args) => return guests::boot(*args).await,
            Command::Compare(args) => tokio::task::block_in_place(|| modelled::compare(&args)),
            Command::Trace(args::Trace::Record(args)) => modelled::record(&args).await,
            Command::Trace(command) => tokio::task::block_in_place(|| modelled::trace(&command)),
            Command::Elastic(args) => tokio::task::block_in_place(|| modelled::elastic(&args)),
            Command::Model(args) => tokio::task::block_in_place(|| modelled::model(&args)),
            Command::Reproduce(args) => tokio::task::block_in_place(|| reproduce::reproduce(&args)),
            Command::Mount(args) => mount::mount(args).await,
            Command::Umount(args) => tokio::task::block_in_place(|| mount::umount(&args)),
            Command::Ls(args) => mount::ls(args).await,
            Command::Load(args) => mount::load(args).await,
            Command::Rm(args) => mount::rm(args).await,
            Command::Serve(args) => serve::serve(*args).await,
            Command::Stats(args) => client::stats(&args).await,
            Command::Top(args) => top::top(args).await,
            Command::Tensors(args) => client::tensors(&args).await,
            Command::Views(args) => client::views(&args).await,
            Command::Guests(args) => client::guests(&args).await,
            Command::Disks(args) => client::disks(&args).await,
            Command::View(command) => client::view(command).await,
            Command::Tensor(command) => client::tensor(command).await,
            Command::Flush(args) => client::flush(&args).await,
            Command::Discard(args) => client::discard(&args).await,
            Command::Events(args) => client::events(&args).await,
            Command::Poison(command) => client::poison(command).await,
            Command::Snapshot(command) => client::snapshot(command),
            Command::Pool(command) => tokio::task::block_in_place(|| pool::pool(command)),
            Command::Image(command) => tokio::task::block_in_place(|| image::image(&command)),
            Command::Upgrade(args) => client::upgrade(&args),
            // Done above.
            Command::Doctor(_) | Command::Completions(_) | Command::Man(_) => Ok(()),
        }
        .map(|()| ExitCode::SUCCESS)
    });
    if boots {
        // What did not heed a signal is not waited for.
        runtime.shutdown_background();
    }
    match done {
        Ok(status) => status,
        Err(why) => out::failed(&why),
    }
}
