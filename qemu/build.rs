//! Compiles what QEMU loads, so that this library carries it: the `MADV_HUGEPAGE` filter and the
//! recorder of lines.
//!
//! They are no crates of the workspace, because what is loaded into a foreign program must need
//! nothing of the build host's C library: no standard library and no unwinding, whatever the
//! workspace's profiles say.

use std::env;
use std::path::PathBuf;
use std::process::{Command, exit};

fn main() {
    compile("madv_filter", "madv-filter/filter.rs");
    compile("line_recorder", "line-recorder/recorder.rs");
    for part in ["cache", "decode", "layout", "pages", "processor", "refusal", "ring"] {
        println!("cargo::rerun-if-changed=line-recorder/{part}.rs");
    }
}

/// Makes `libNAME.so` of a source.
fn compile(name: &str, source: &str) {
    println!("cargo::rerun-if-changed={source}");
    let variable = |name: &str| env::var_os(name).unwrap_or_default();
    let output = PathBuf::from(variable("OUT_DIR")).join(format!("lib{name}.so"));
    let mut rustc = Command::new(variable("RUSTC"));
    rustc.args(["--edition=2024", "--crate-name", name, "--crate-type=cdylib", "-O", "-Dwarnings"]);
    rustc.args(["-Cpanic=abort", "-Cstrip=symbols", "-Clink-arg=-nostdlib"]);
    rustc.arg("--target").arg(variable("TARGET"));
    if let Some(linker) = env::var_os("RUSTC_LINKER") {
        rustc.arg("-C").arg(format!("linker={}", linker.to_string_lossy()));
    }
    rustc.arg("-o").arg(&output).arg(source);
    match rustc.status() {
        Ok(status) if status.success() => {}
        Ok(status) => {
            eprintln!("{source} does not compile ({status}); its messages are above");
            exit(1);
        }
        Err(error) => {
            eprintln!("cannot run rustc for {source}: {error}");
            exit(1);
        }
    }
}
