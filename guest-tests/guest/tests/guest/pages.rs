//! The process with known memory, as a guest's steps talk to it.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Command, Stdio},
};

#[test]
fn memory_is_filled_touched_and_checked_when_it_is_told_so() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_lamina-pages"))
        .args(["1048576", "--hot", "65536"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut ask = |line: &str| {
        writeln!(input, "{line}").unwrap();
        lines.next().unwrap().unwrap()
    };
    let ready = ask("fill");
    assert!(ready.starts_with("ready ") && ready.ends_with(" 1048576"), "{ready}");
    assert_eq!(ask("check"), "wrong 0");
    assert_eq!(ask("touch"), "touching");
    assert_eq!(ask("check"), "wrong 0");
    drop(input);
    assert!(child.wait().unwrap().success());
}

#[test]
fn what_it_does_not_understand_ends_it() {
    for reported in ["check\n", "fill\nforget\n"] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_lamina-pages"))
            .arg("4096")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(reported.as_bytes()).unwrap();
        assert!(!child.wait().unwrap().success(), "{reported:?}");
    }
}
