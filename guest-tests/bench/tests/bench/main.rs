//! Benchmarks as a person or a script runs them: that they do their work and tell of it, not how
//! fast anything is.

use std::process::Command;

mod codec;
mod deaths;
mod files;
mod publish;
mod store;

/// The program behind `./x bench`.
fn bench() -> Command {
    Command::new(env!("CARGO_BIN_EXE_lamina-bench"))
}
