//! The header and the static library, as a C compiler and a C program see them.

mod common;

use std::{env, path::PathBuf, process::Command};

use common::{Windows, willing_device};
use serde_json::Value;

fn fnv(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

#[test]
fn a_c_program_reads_every_view_and_misuse_is_an_error() {
    let windows = Windows::new();
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    // Cargo puts the static library where it puts the tests.
    let library = env::current_exe().unwrap().with_file_name("liblamina_shim.a");
    let program = windows.path("program");
    let compiled = Command::new("cc")
        .args(["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-O1", "-I"])
        .arg(here.join("include"))
        .arg("-o")
        .arg(&program)
        .arg(here.join("tests/capi.c"))
        .arg(&library)
        .args(["-lpthread", "-ldl", "-lm"])
        .output()
        .expect("a C compiler is needed for the C interface's test (Debian: build-essential)");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));

    let requests = willing_device(&windows.path("ctl"));
    let before = windows.expected("kv", "base");
    let ran = Command::new(&program)
        .args([windows.path("base"), windows.path("views")])
        .env("LAMINA_CTL", windows.path("ctl"))
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}{}", ran.status, String::from_utf8_lossy(&ran.stderr));

    let mut stored = before.clone();
    stored[3..9].copy_from_slice(b"stored");
    assert!(windows.expected("kv", "base") == stored);
    let requests = requests.lock().unwrap();
    assert_eq!(requests[0], "{\"op\":\"flush\"}");
    assert!(requests[1].contains("4096"), "{}", requests[1]);
    assert!(requests[2].contains("\"invalidate\"") && requests[2].contains("8192"), "{}", requests[2]);
    assert_eq!(requests[3], "{\"op\":\"invalidate\"}");
    let ops: Vec<Value> = requests[4..12].iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(ops[0]["op"], "create_tensors");
    assert_eq!(ops[0]["tensors"][0]["layout"]["window"], 128);
    assert_eq!(ops[1], serde_json::json!({ "op": "resize_tensor", "name": "mine", "length": 4096 }));
    assert_eq!(ops[2], serde_json::json!({ "op": "view", "tensor": "mine", "spelling": "e8m3" }));
    assert_eq!(ops[3], serde_json::json!({ "op": "remove_view", "tensor": "mine", "spelling": "e8m3" }));
    assert_eq!(ops[4], serde_json::json!({ "op": "remove_tensor", "name": "mine" }));
    assert_eq!((&ops[5]["tensors"][0]["base"], &ops[5]["tensors"][0]["codec"]), (&"w".into(), &Value::Null));
    assert_eq!(ops[6], serde_json::json!({ "op": "detach_tensor", "name": "tuned" }));
    let lossy = serde_json::json!({
        "kind": "lossy_kv", "channels": 64, "window": 64, "lossy": "packkv:0.1,median,8",
    });
    assert_eq!((&ops[7]["tensors"][0]["layout"], &ops[7]["tensors"][0]["codec"]), (&lossy, &"zstd".into()));

    let text = String::from_utf8(ran.stdout).unwrap();
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split(' ').collect()).collect();
    assert_eq!(lines.len(), 6, "{text}");
    for line in lines {
        let [tensor, view, length, hash] = line[..] else { panic!("{line:?}") };
        let expected =
            if (tensor, view) == ("kv", "base") { before.clone() } else { windows.expected(tensor, view) };
        assert_eq!(length.parse(), Ok(expected.len()), "{tensor} {view}");
        assert_eq!(hash, format!("{:016x}", fnv(&expected)), "{tensor} {view}");
    }
}
