//! Compiles the `MADV_HUGEPAGE` filter, so that the library carries it.
//!
//! It is no crate of the workspace, because what is preloaded into a foreign program must need
//! nothing of the build host's C library: no standard library and no unwinding, whatever the
//! workspace's profiles say.

use std::env;
use std::path::PathBuf;
use std::process::{Command, exit};

fn main() {
    const SOURCE: &str = "madv-filter/filter.rs";
    println!("cargo::rerun-if-changed={SOURCE}");
    let variable = |name: &str| env::var_os(name).unwrap_or_default();
    let output = PathBuf::from(variable("OUT_DIR")).join("libmadv_filter.so");
    let mut rustc = Command::new(variable("RUSTC"));
    rustc.args(["--edition=2024", "--crate-name=madv_filter", "--crate-type=cdylib", "-O", "-Dwarnings"]);
    rustc.args(["-Cpanic=abort", "-Cstrip=symbols", "-Clink-arg=-nostdlib"]);
    rustc.arg("--target").arg(variable("TARGET"));
    if let Some(linker) = env::var_os("RUSTC_LINKER") {
        rustc.arg("-C").arg(format!("linker={}", linker.to_string_lossy()));
    }
    rustc.arg("-o").arg(&output).arg(SOURCE);
    match rustc.status() {
        Ok(status) if status.success() => {}
        Ok(status) => {
            eprintln!("the madvise filter does not compile ({status}); its messages are above");
            exit(1);
        }
        Err(error) => {
            eprintln!("cannot run rustc for the madvise filter: {error}");
            exit(1);
        }
    }
}
