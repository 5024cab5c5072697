//! `lamina-shim`: brings Lamina up in a guest and shows its tensors and views.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
