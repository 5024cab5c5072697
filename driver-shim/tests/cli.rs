//! The command line on windows in ordinary files.

mod common;

use std::{
    io::{Read, Write},
    process::{Command, Output, Stdio},
};

use common::{ELEMENTS, Windows, device, willing_device};
use serde_json::Value;
use sha2::{Digest, Sha256};

fn command(windows: &Windows, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lamina-shim"));
    command.args(args).env_clear();
    for (name, file) in [("LAMINA_BASE", "base"), ("LAMINA_VIEWS", "views"), ("LAMINA_CTL", "ctl")] {
        command.env(name, windows.path(file));
    }
    command
}

fn run(windows: &Windows, args: &[&str]) -> Output {
    command(windows, args).output().unwrap()
}

fn good(windows: &Windows, args: &[&str]) -> String {
    let output = run(windows, args);
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{args:?}: {error}");
    assert_eq!(error, "", "{args:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// The one line that a failing command prints.
fn bad(windows: &Windows, args: &[&str]) -> String {
    let output = run(windows, args);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{args:?}: {error}");
    assert_eq!(error.trim_end().lines().count(), 1, "{error}");
    assert!(error.starts_with("lamina-shim: "), "{error}");
    error
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().fold(String::new(), |text, byte| text + &format!("{byte:02x}"))
}

#[test]
fn list_shows_tensors_and_views() {
    let windows = Windows::new();
    let text = good(&windows, &["list"]);
    let line = text.lines().find(|line| line.starts_with("w ")).unwrap();
    for word in ["bf16", "70001", "140002", "base full e8m3 e8m3:packed"] {
        assert!(line.contains(word), "{word}: {line}");
    }
    let json: Value = serde_json::from_str(&good(&windows, &["list", "--json"])).unwrap();
    assert_eq!(json["generation"], 7);
    assert_eq!(json["tensors"][1]["layout"]["kv"]["channels"], 32);
    assert_eq!(json["tensors"][0]["views"][2]["bits"], 12);
    assert_eq!(json["tensors"][0]["views"][2]["bytes"], (ELEMENTS * 12).div_ceil(8));
}

#[test]
fn cat_gives_the_bytes_and_any_part_of_them() {
    let windows = Windows::new();
    for view in ["base", "full", "e8m3", "e8m3:packed"] {
        let expected = windows.expected("w", view);
        assert!(run(&windows, &["cat", "w", view]).stdout == expected, "{view}");
        let part = run(&windows, &["cat", "w", view, "--offset", "77", "--length", "1000"]).stdout;
        assert!(part == expected[77..1077], "{view}");
        let tail = run(&windows, &["cat", "w", view, "--offset", "100000"]).stdout;
        assert!(tail == expected[100_000..], "{view}");
    }
    assert!(run(&windows, &["cat", "w"]).stdout == windows.expected("w", "base"));
    let error = bad(&windows, &["cat", "w", "full", "--offset", "140000", "--length", "3"]);
    assert!(error.contains("140000 + 3") && error.contains("140002 bytes"), "{error}");
    bad(&windows, &["cat", "w", "full", "--offset", "140003"]);
}

#[test]
fn sum_hashes_what_is_there() {
    let windows = Windows::new();
    assert_eq!(
        good(&windows, &["sum", "kv", "full"]),
        format!("{}  kv full\n", hex(&windows.expected("kv", "full")))
    );
    let all = good(&windows, &["sum", "--all"]);
    assert_eq!(all.lines().count(), 6);
    for line in all.lines() {
        let (hash, name) = line.split_once("  ").unwrap();
        let (tensor, view) = name.split_once(' ').unwrap();
        assert_eq!(hash, hex(&windows.expected(tensor, view)), "{name}");
    }
    assert_eq!(good(&windows, &["sum", "w", "--all"]).lines().count(), 4);
}

#[test]
fn map_is_enough_to_find_the_bytes_without_the_shim() {
    let windows = Windows::new();
    let json: Value = serde_json::from_str(&good(&windows, &["map", "--json"])).unwrap();
    assert_eq!(json.as_array().unwrap().len(), 6);
    for entry in json.as_array().unwrap() {
        let number = |key: &str| entry[key].as_u64().unwrap();
        assert_eq!(number("mmap_offset") % 4096, 0);
        assert_eq!(number("mmap_offset") + number("skip"), number("offset"));
        assert!(number("skip") + number("bytes") <= number("mmap_length"));
        let file = entry["device"].as_str().unwrap();
        let name = file.rsplit('/').next().unwrap();
        let found = windows.bytes(name, number("offset"), number("bytes"));
        assert!(
            found == windows.expected(entry["tensor"].as_str().unwrap(), entry["view"].as_str().unwrap())
        );
    }
    assert!(good(&windows, &["map", "w", "e8m3"]).starts_with("w e8m3: device "));
    bad(&windows, &["map", "nope"]);
}

#[test]
fn write_stores_into_the_tensor_or_nothing_at_all() {
    let windows = Windows::new();
    let feed = |args: &[&str], input: &[u8]| {
        let mut child = command(&windows, args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // Input that is too long may not be read to its end.
        let _ = child.stdin.take().unwrap().write_all(input);
        child.wait_with_output().unwrap()
    };
    let mut expected = windows.expected("kv", "base");
    expected[3..9].copy_from_slice(b"stored");
    assert!(feed(&["write", "kv", "--offset", "3"], b"stored").status.success());
    assert!(windows.expected("kv", "base") == expected);

    let output = feed(&["write", "kv", "--offset", "1278"], b"123");
    assert!(!output.status.success());
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("longer than the 2 bytes"), "{error}");
    assert!(windows.expected("kv", "base") == expected);
    assert!(!feed(&["write", "kv", "--offset", "1281"], b"").status.success());
}

#[test]
fn flush_view_and_stats_reach_the_device() {
    let windows = Windows::new();
    assert!(bad(&windows, &["flush"]).contains("control port"));
    let requests = willing_device(&windows.path("ctl"));
    good(&windows, &["flush"]);
    good(&windows, &["flush", "--offset", "4096", "--length", "8192"]);
    assert!(good(&windows, &["view", "w", "e5m2"]).contains("true"));
    assert!(good(&windows, &["stats"]).contains("true"));
    good(&windows, &["invalidate", "--offset", "64", "--length", "128"]);
    good(&windows, &["invalidate"]);
    let ops: Vec<Value> =
        requests.lock().unwrap().iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(ops[1]["length"], 8192);
    assert_eq!(ops[2], serde_json::json!({ "op": "view", "tensor": "w", "spelling": "e5m2" }));
    assert_eq!(ops[3]["op"], "stats");
    assert_eq!(ops[4], serde_json::json!({ "op": "invalidate", "offset": 64, "length": 128 }));
    assert_eq!(ops[5], serde_json::json!({ "op": "invalidate" }));
}

#[test]
fn tensors_and_views_are_made_and_removed_by_the_device() {
    let windows = Windows::new();
    let requests = willing_device(&windows.path("ctl"));
    let add = ["tensor", "add", "a b", "--length", "64M", "--format", "bf16", "--at", "0x1000"];
    good(&windows, &[&add[..], &["--kv", "1024", "--shape", "4x8", "--codec", "lz4"]].concat());
    good(&windows, &["tensor", "resize", "a b", "--length", "8K"]);
    good(&windows, &["view", "add", "a b", "e8m3"]);
    good(&windows, &["view", "rm", "a b", "e8m3"]);
    good(&windows, &["tensor", "rm", "a b"]);
    let plain = |name| ["tensor", "add", name, "--length", "8K", "--format", "bf16"];
    good(&windows, &[&plain("tuned")[..], &["--derived-from", "w"]].concat());
    good(&windows, &["tensor", "detach", "tuned"]);
    good(&windows, &[&plain("cache")[..], &["--kv", "64", "--lossy", "packkv:0.1"]].concat());
    let ops: Vec<Value> =
        requests.lock().unwrap().iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    let tensor = serde_json::json!({
        "name": "a b", "length": 64 << 20, "format": "bf16", "dpa": 4096, "shape": [4, 8],
        "layout": { "kind": "kv", "channels": 1024, "window": 128 }, "codec": "lz4", "base": null,
    });
    assert_eq!(ops[0], serde_json::json!({ "op": "create_tensors", "tensors": [tensor] }));
    assert_eq!(ops[1], serde_json::json!({ "op": "resize_tensor", "name": "a b", "length": 8192 }));
    assert_eq!(ops[2], serde_json::json!({ "op": "view", "tensor": "a b", "spelling": "e8m3" }));
    assert_eq!(ops[3], serde_json::json!({ "op": "remove_view", "tensor": "a b", "spelling": "e8m3" }));
    assert_eq!(ops[4], serde_json::json!({ "op": "remove_tensor", "name": "a b" }));
    assert_eq!(
        (&ops[5]["tensors"][0]["base"], &ops[5]["tensors"][0]["layout"]["kind"]),
        (&"w".into(), &"weight".into())
    );
    assert_eq!(ops[6], serde_json::json!({ "op": "detach_tensor", "name": "tuned" }));
    let lossy =
        serde_json::json!({ "kind": "lossy_kv", "channels": 64, "window": 128, "lossy": "packkv:0.1" });
    assert_eq!(ops[7]["tensors"][0]["layout"], lossy);
    let misused = |args: &[&str], word: &str| {
        let output = command(&windows, args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(word), "{args:?}");
    };
    for wrong in ["x", "5X", "-1", "", "99999999999T"] {
        misused(&["tensor", "resize", "w", "--length", wrong], "--length");
    }
    misused(&["view", "w"], "SPELLING");
    misused(&[&plain("x")[..], &["--lossy", "packkv"]].concat(), "--kv");
    misused(&[&plain("x")[..], &["--kv", "64", "--derived-from", "w"]].concat(), "--derived-from");
}

#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    let windows = Windows::new();
    for args in [&["cat", "w"][..], &["list"], &["list", "--json"], &["map"], &["sum", "--all"]] {
        let mut child =
            command(&windows, args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let mut error = String::new();
        child.stderr.take().unwrap().read_to_string(&mut error).unwrap();
        assert!(child.wait().unwrap().success(), "{args:?}: {error}");
        assert_eq!(error, "", "{args:?}");
    }
}

#[test]
fn failures_are_one_line_that_says_what_to_do() {
    let windows = Windows::new();
    assert!(bad(&windows, &["sum", "nope"]).contains("lamina-shim list"));
    assert!(bad(&windows, &["cat", "w", "int2"]).contains("base, full, e8m3, e8m3:packed"));
    let error = bad(&windows, &["--views", "/missing", "list"]);
    assert!(error.contains("/missing") && error.matches("No such file").count() == 1, "{error}");
    windows.write_directory(&lamina_abi::Directory { views_bytes: u64::MAX, ..windows.directory.clone() });
    assert!(bad(&windows, &["list"]).contains("another device"));
}

/// A directory that names one tensor of two, and has no views.
fn cut(windows: &Windows) {
    let mut directory = windows.directory.clone();
    directory.tensors.truncate(1);
    directory.views.clear();
    windows.write_directory(&lamina_abi::Directory { is_incomplete: true, ..directory });
}

#[test]
fn what_a_directory_has_no_room_for_is_said_to_be_missing() {
    let windows = Windows::new();
    cut(&windows);
    let text = good(&windows, &["list"]);
    assert!(text.contains("\nw ") && text.lines().last().unwrap().starts_with("... and more"), "{text}");
    let json: Value = serde_json::from_str(&good(&windows, &["list", "--json"])).unwrap();
    assert_eq!((&json["is_incomplete"], json["tensors"].as_array().unwrap().len()), (&Value::Bool(true), 1));
    assert!(run(&windows, &["cat", "w"]).stdout == windows.expected("w", "base"));
    let error = bad(&windows, &["cat", "kv"]);
    assert!(error.contains("has room for 1 of those there are"), "{error}");
    for args in [&["sum", "--all"][..], &["sum", "w", "--all"], &["map"]] {
        let error = bad(&windows, args);
        assert!(error.contains("no room for all") && error.contains("LAMINA_CTL"), "{error}");
    }
}

#[test]
fn what_a_directory_has_no_room_for_the_control_port_tells() {
    let windows = Windows::new();
    cut(&windows);
    let directory = windows.directory.clone();
    // Pages are full: of many tensors of no bytes, which share the place of the last.
    let tensors: Vec<Value> = (0..1500)
        .map(|number| serde_json::json!({
            "name": format!("empty {number}"), "dpa": 0, "length": 0, "elements": 0, "shape": [0], "format": "bf16",
            "layout": { "kind": "weight" }, "codec": "tree",
        }))
        .chain(directory.tensors.iter().map(|tensor| {
            let layout = if tensor.name == "kv" {
                serde_json::json!({ "kind": "kv", "channels": 32, "window": 16 })
            } else {
                serde_json::json!({ "kind": "weight" })
            };
            serde_json::json!({
                "name": tensor.name, "dpa": tensor.dpa, "length": tensor.length, "elements": tensor.elements,
                "shape": [tensor.elements], "format": tensor.format, "layout": layout, "codec": "tree",
            })
        }))
        .collect();
    let views: Vec<Value> = directory
        .views
        .iter()
        .map(|view| serde_json::json!({
            "tensor": directory.tensors[view.tensor as usize].name, "view": view.spelling, "offset": view.offset,
            "length": view.length, "elements": view.elements, "bits": view.bits, "scale_exp": view.scale_exp,
            "planes": 1,
        }))
        .collect();
    let requests = device(&windows.path("ctl"), move |line, stream| {
        let request: Value = serde_json::from_str(line).unwrap();
        let (what, all, place) = match request["op"].as_str().unwrap() {
            "tensors" => ("tensors", &tensors, "dpa"),
            "views" => ("views", &views, "offset"),
            other => panic!("{other}"),
        };
        let from = request["from"].as_u64().unwrap();
        let page: Vec<&Value> = all.iter().filter(|one| one[place].as_u64().unwrap() >= from).collect();
        let reply = serde_json::json!({ "ok": true, what: page });
        stream.write_all(format!("{reply}\n").as_bytes()).unwrap();
    });
    let json: Value = serde_json::from_str(&good(&windows, &["list", "--json"])).unwrap();
    assert_eq!(
        (&json["is_incomplete"], json["tensors"].as_array().unwrap().len()),
        (&Value::Bool(false), 1502)
    );
    assert_eq!(
        json["tensors"][1501]["layout"],
        serde_json::json!({ "kv": { "channels": 32, "window": 16 } })
    );
    assert_eq!(json["tensors"][1500]["views"][2]["bits"], 12);
    assert!(requests.lock().unwrap().len() > 2);
    for tensor in ["w", "kv"] {
        assert!(run(&windows, &["cat", tensor, "full"]).stdout == windows.expected(tensor, "full"));
    }
    assert!(bad(&windows, &["cat", "none"]).contains("shows the 1502 there are"));
    assert_eq!(good(&windows, &["sum", "kv", "--all"]).lines().count(), 2);
}

#[test]
fn help_teaches_the_first_session() {
    let windows = Windows::new();
    let help = good(&windows, &["--help"]);
    for word in ["lamina-shim up", "list", "sum", "cat", "map", "flush", "write", "e8m3:packed"] {
        assert!(help.contains(word), "{word}");
    }
}
