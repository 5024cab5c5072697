//! `lamina pool`: what it keeps in a file, and what it refuses.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use lamina_pool::{Chain, Class, Index, Pool, PoolError, ServedIndex, Service};
use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde_json::{Value, json};

use crate::common::{Place, Run, Window, answer, expected, lamina, noise, request, within};

fn asked(arguments: &[&str]) -> Output {
    lamina(&[&["pool"], arguments].concat()).output().unwrap()
}

fn done(arguments: &[&str]) -> Vec<u8> {
    let output = asked(arguments);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    output.stdout
}

fn refused(arguments: &[&str]) -> String {
    let output = asked(arguments);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && output.stdout.is_empty(), "{arguments:?}");
    assert!(!text.contains("panicked"), "{text}");
    text
}

fn told(arguments: &[&str]) -> Value {
    serde_json::from_slice(&done(arguments)).unwrap()
}

/// Puts, lists, gets and removes objects of a pool in a file.
fn comes_and_goes(place: &Place, pool: &str) {
    for (name, bytes) in [("small", noise(3, 10)), ("large", noise(4, 3 << 20)), ("none", Vec::new())] {
        let (from, to) = (place.text("from"), place.text("to"));
        fs::write(&from, &bytes).unwrap();
        assert_eq!(told(&["put", pool, name, &from, "--json"])["bytes"], bytes.len());
        assert!(done(&["get", pool, name]) == bytes, "{name}");
        assert_eq!(told(&["get", pool, name, &to, "--json"])["bytes"], bytes.len());
        assert!(fs::read(&to).unwrap() == bytes, "{name}");
    }
    let listed = told(&["ls", pool, "--json"]);
    let mut names: Vec<_> = listed.as_array().unwrap().iter().map(|object| &object["name"]).collect();
    names.sort_by_key(ToString::to_string);
    assert_eq!(names, ["large", "none", "small"]);
    assert_eq!(told(&["stat", pool, "--json"])["objects"], 3);
    assert!(refused(&["get", pool, "small", "--json"]).contains("<TO>"));
    // Names that are not there hold up none of the others.
    let partly = asked(&["rm", pool, "large", "nothing", "none", "--json"]);
    assert!(!partly.status.success());
    let said: Value = serde_json::from_slice(&partly.stdout).unwrap();
    assert_eq!(said, json!({ "removed": ["large", "none"], "missing": ["nothing"] }));
    assert_eq!(told(&["ls", pool, "--json"]).as_array().unwrap().len(), 1);
    assert!(refused(&["get", pool, "large"]).contains("no object \"large\""));
    assert_eq!(told(&["check", pool, "--json"])["problems"], Value::Array(Vec::new()));
}

#[test]
fn what_is_refused_is_said_once_and_leaves_nothing() {
    let place = Place::new();
    let [pool, missing] = ["pool", "missing"].map(|name| place.text(name));
    let none = "No such file or directory (os error 2)";
    assert_eq!(refused(&["ls", &missing]), format!("lamina: {missing}: {none}\n"));
    let large = refused(&["create", &pool, "--size", "99999T"]);
    assert!(large.contains("cannot have 109950063265972224 bytes: it has at most 35184372088832"), "{large}");
    let plain = refused(&["create", &pool, "--size", "1M", "--kv", "1024,128"]);
    assert!(
        plain.contains("pool is in no mount") && plain.contains("leave --format and --kv out"),
        "{plain}"
    );
    assert!(!Path::new(&pool).exists(), "it is not left behind");
    // What was there stays, whatever it is.
    fs::write(&pool, []).unwrap();
    assert!(refused(&["create", &pool, "--kv", "1024,128"]).contains("no mount"));
    assert!(Path::new(&pool).exists());
    done(&["create", &pool, "--size", "1M"]);
    let from = place.text("from");
    fs::write(&from, b"bytes").unwrap();
    assert_eq!(
        refused(&["put", &pool, "", &from]),
        "lamina: a name has no bytes: it must have at least one\n"
    );
    assert!(
        refused(&["put", &pool, &"x".repeat(1025), &from]).contains("a name has 1025 bytes, more than 1024")
    );
    let odd = "a\nb\u{1b}[31m\"\\ü\u{202e}";
    done(&["put", &pool, odd, &from]);
    let listed = String::from_utf8(done(&["ls", &pool])).unwrap();
    assert_eq!(listed.trim_start(), "5  a\\nb\\u{1b}[31m\"\\\\ü\\u{202e}\n");
    assert_eq!(told(&["ls", &pool, "--json"])[0]["name"], odd);
}

#[test]
fn a_pool_for_many_nodes_is_no_longer_than_its_file() {
    let place = Place::new();
    let file = place.path("zeros");
    fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    for name in ["zeros", "new"] {
        let pool = place.text(name);
        let made = told(&["create", &pool, "--size", "64M", "--nodes", "64", "--json"]);
        assert_eq!(
            fs::metadata(&pool).unwrap().len(),
            if name == "zeros" { 64 << 20 } else { made["bytes"].as_u64().unwrap() }
        );
        assert!(made["bytes"].as_u64().unwrap() <= 64 << 20, "{made}");
    }
    let few = place.text("few");
    let why = refused(&["create", &few, "--size", "2M", "--nodes", "64"]);
    assert!(why.contains("a pool for 64 nodes takes") && why.contains("not 2097152"), "{why}");
    assert!(!Path::new(&few).exists());
}

#[test]
fn objects_are_kept_in_a_file_and_damage_is_found() {
    within(120, || {
        let place = Place::new();
        let pool = place.text("pool");
        let made = told(&["create", &pool, "--size", "64M", "--json"]);
        assert!(made["pool"] == *pool && made["bytes"].as_u64().unwrap() > 60 << 20, "{made}");
        comes_and_goes(&place, &pool);
        let mut bytes = fs::read(&pool).unwrap();
        let at = bytes.windows(10).position(|window| window == noise(3, 10)).expect("its bytes lie there");
        bytes[at] ^= 1;
        fs::write(&pool, &bytes).unwrap();
        assert!(!refused(&["get", &pool, "small"]).is_empty());
        let checked = asked(&["check", &pool]);
        assert!(!checked.status.success(), "{checked:?}");
        done(&["check", &pool, "--repair"]);
        done(&["check", &pool]);
    });
}

/// Where the words lie in a pool's file of which `is_wanted` wants two side by side.
fn words(pool: &str, is_wanted: impl Fn(u64, u64) -> bool) -> u64 {
    let bytes = fs::read(pool).unwrap();
    let (words, _) = bytes.as_chunks::<8>();
    let found =
        words.windows(2).position(|two| is_wanted(u64::from_le_bytes(two[0]), u64::from_le_bytes(two[1])));
    8 * found.expect("they lie there") as u64
}

#[test]
fn a_check_tells_what_a_recovery_cannot_read_and_what_a_repair_left() {
    within(120, || {
        let place = Place::new();
        let pool = place.text("pool");
        done(&["create", &pool, "--size", "16M"]);
        let from = place.text("from");
        fs::write(&from, noise(5, 12_000)).unwrap();
        for name in ["lost", "kept"] {
            done(&["put", &pool, name, &from]);
        }
        let file = OpenOptions::new().read(true).write(true).open(&pool).unwrap();
        let at = told(&["ls", &pool, "--json"])[1]["at"].as_u64().unwrap();
        // Its entry, which whoever comes next finds damaged.
        file.write_all_at(&[0xee; 8], words(&pool, |begin, bytes| (begin, bytes) == (at, 12_000))).unwrap();
        for _ in 0..2 {
            assert!(refused(&["get", &pool, "lost"]).contains("the pool is damaged: an entry"));
            let checked = asked(&["check", &pool]);
            let said = String::from_utf8(checked.stdout).unwrap();
            assert!(!checked.status.success() && said.contains("an entry that does not check at"), "{said}");
        }
        let mended = String::from_utf8(done(&["check", &pool, "--repair"])).unwrap();
        assert!(
            mended.contains("an entry that does not check at") && mended.contains(": mended"),
            "{mended}"
        );
        assert!(refused(&["get", &pool, "lost"]).contains("no object \"lost\""));
        // A chunk whose words say that nobody has it, beside one who may.
        let other = Arc::new(Pool::open(Path::new(&pool)).unwrap());
        let service = Service::start(Arc::clone(&other));
        let at = words(&pool, |whose, size| size == 12_288 && whose & 0xff_ffff == 1);
        file.write_all_at(&[9], at + 7).unwrap();
        let left = asked(&["check", &pool, "--repair"]);
        let (said, why) = (String::from_utf8(left.stdout).unwrap(), String::from_utf8(left.stderr).unwrap());
        assert!(!left.status.success() && why.contains("could not be mended"), "{why}");
        assert!(said.contains("a chunk of nobody at") && !said.contains("mended"), "{said}");
        service.stop().unwrap();
        Arc::into_inner(other).unwrap().leave().unwrap();
        let mended = told(&["check", &pool, "--repair", "--json"]);
        assert_eq!((&mended["repaired"], &mended["problems"][0]["mended"]), (&json!(true), &json!(true)));
        done(&["check", &pool]);
        assert!(done(&["get", &pool, "kept"]) == noise(5, 12_000));
    });
}

#[test]
fn a_pool_lies_in_the_base_window_of_a_mount() {
    within(120, || {
        let place = Place::new();
        let _run = Run::start(&mut place.serve(&["--capacity", "64M"]));
        let base = place.text("mount/base");
        done(&["create", &base]);
        comes_and_goes(&place, &base);
    });
}

#[test]
fn what_a_file_holds_is_not_lost_by_mistake() {
    let place = Place::new();
    let file = place.text("letters");
    fs::write(&file, noise(7, 8 << 20)).unwrap();
    assert!(refused(&["create", &file]).contains("--force"));
    assert!(fs::read(&file).unwrap() == noise(7, 8 << 20));
    assert!(!refused(&["ls", &file]).is_empty());
    fs::write(place.path("zeros"), vec![0; 16 << 20]).unwrap();
    done(&["create", &place.text("zeros")]);
    assert!(refused(&["create", &place.text("zeros")]).contains("--force"), "it is a pool now");
    // Nor a pool by one of its objects, whatever it is called.
    let pool = place.text("zeros");
    done(&["put", &pool, "letters", &file]);
    fs::hard_link(&pool, place.path("link")).unwrap();
    for over in [&pool, &place.text("link")] {
        assert!(refused(&["get", &pool, "letters", over]).contains("would write over"));
    }
    assert!(done(&["get", &pool, "letters"]) == noise(7, 8 << 20));
    done(&["create", &place.text("zeros"), "--force"]);
}

#[test]
fn a_pool_in_files_says_what_it_holds() {
    within(120, || {
        let place = Place::new();
        let usual = ["--capacity", "256M", "--views-capacity", "16M", "--views", "", "--files", "64M"];
        let _run = Run::start(&mut place.serve(&usual));
        let file = place.text("mount/files/pool");
        done(&["create", &file, "--size", "16M", "--kv", "64,32"]);
        let attribute = |name: &str| {
            let mut value = [0; 64];
            let length = rustix::fs::getxattr(&file, name, &mut value[..]).unwrap();
            String::from_utf8(value[..length].to_vec()).unwrap()
        };
        assert_eq!([attribute("user.lamina.format"), attribute("user.lamina.kv")], ["bf16", "64,32"]);
        comes_and_goes(&place, &file);
        // What is there already is not run over.
        let base = refused(&["create", &place.text("mount/base"), "--force", "--kv", "64"]);
        assert!(base.contains("base: files/ lie there, and a pool takes all of it"), "{base}");
        assert!(refused(&["create", &place.text("plain"), "--kv", "64"]).contains("plain is in no mount"));
        assert!(refused(&["create", &place.text("mount/files/odd"), "--kv", "0"]).contains("--kv"));
        comes_and_goes(&place, &file);
    });
}

#[test]
fn a_pool_in_the_base_window_is_a_tensor() {
    within(120, || {
        let place = Place::new();
        let _run = Run::start(&mut place.serve(&["--capacity", "64M"]));
        let base = place.text("mount/base");
        // Again if the pool is made anew.
        for (kv, window) in [("64", 128), ("64,256", 256)] {
            done(&["create", &base, "--force", "--format", "fp16", "--kv", kv]);
            let tensors =
                lamina(&["tensors", "--json", "--api", &place.text("run/api.sock")]).output().unwrap();
            let listed: Vec<Value> = serde_json::from_slice(&tensors.stdout).unwrap();
            let [pool] = &listed[..] else { panic!("{listed:?}") };
            assert!(pool["name"].as_str().unwrap().starts_with("pool@"), "{pool}");
            assert_eq!((&pool["format"], &pool["layout"]["window"]), (&"fp16".into(), &window.into()));
        }
        comes_and_goes(&place, &base);
    });
}

/// What is told of pools, once `wanted` holds of it.
fn pools_when(place: &Place, wanted: impl Fn(&Value) -> bool) -> Value {
    let began = Instant::now();
    loop {
        let (status, stats) = place.try_ask("GET", "/stats", &Value::Null);
        assert_eq!(status, 200);
        if wanted(&stats) {
            return stats;
        }
        assert!(began.elapsed() < Duration::from_secs(30), "{}", stats["pools"]);
        thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn the_device_tells_what_pools_on_its_mount_count() {
    within(240, || {
        let place = Place::new();
        let usual = ["--capacity", "256M", "--views-capacity", "16M", "--views", "", "--files", "64M"];
        let _run = Run::start(&mut place.serve(&usual));
        assert_eq!(pools_when(&place, |_| true)["pools"], json!([]));
        let in_files = place.text("mount/files/a pool");
        done(&["create", &in_files, "--size", "16M", "--kv", "64,32"]);
        // What nobody has counted yet is null, and no zero.
        fs::write(place.path("from"), b"bytes").unwrap();
        done(&["put", &in_files, "first", &place.text("from")]);
        let stats = pools_when(&place, |stats| stats["pools"][0]["stores"] == 1);
        for name in ["objects", "blocks", "reserved", "evicting", "ready_bytes", "taken_bytes", "ratio"] {
            assert_eq!(stats["pools"][0][name], Value::Null, "{name} of {}", stats["pools"][0]);
        }
        assert_eq!(stats["pool_classes"][0]["ready_bytes"], Value::Null);
        done(&["rm", &in_files, "first"]);
        let pool = &Arc::new(Pool::open(Path::new(&in_files)).unwrap());
        let serving = Service::start(Arc::clone(pool));
        for number in 0..5 {
            pool.put(&format!("object {number}"), &vec![0; 64 << 10]).unwrap();
        }
        assert!(pool.get("object 1").unwrap().is_some() && pool.get("nothing").unwrap().is_none());
        assert!(pool.keep_from("block", 100, |block| block.append(&noise(5, 100))).unwrap());
        let told = |stats: &Value| stats["pools"][0]["blocks"] == 1 && stats["pools"][0]["misses"] == 1;
        let stats = pools_when(&place, told);
        let seen = &stats["pools"][0];
        let expected = json!({ "name": "files/a pool", "objects": 5, "hits": 1, "stores": 7, "nodes": 1,
            "hit_rate": 0.5, "ready_bytes": 5 * (64 << 10) + 100, "read_bytes": 64 << 10 });
        for (name, value) in expected.as_object().unwrap() {
            assert_eq!(&seen[name], value, "{name} of {seen}");
        }
        assert!(seen["capacity_bytes"].as_u64() > Some(8 << 20) && seen["device_bytes"].is_u64(), "{seen}");
        // Who made the pool had the number before.
        let nodes = stats["pool_nodes"].as_array().unwrap();
        let own = nodes.iter().find(|node| node["attached"] == 1).unwrap();
        assert!(own["host"].as_str().unwrap().starts_with(&std::process::id().to_string()), "{own}");
        assert_eq!((&own["manages"], &own["misses"]), (&json!(1), &json!(1)));
        // The same as metrics, and as a table.
        let api = UnixStream::connect(place.path("run/api.sock")).unwrap();
        let (_, _, metrics) = answer(api, &request("GET", "/metrics", ""));
        let sample = "lamina_pool_used_slots{pool=\"files/a pool\",state=\"object\"} 5";
        assert!(metrics.contains(sample), "{metrics}");
        assert!(metrics.contains("lamina_pool_node_evictions_total{pool=\"files/a pool\",node=\"0\""));
        let table = lamina(&["stats", "--api", &place.text("run/api.sock")]).output().unwrap();
        let table = String::from_utf8(table.stdout).unwrap();
        assert!(table.contains("nodes of pools") && table.contains("files/a pool"), "{table}");
        serving.stop().unwrap();
        // Whatever is stored there, the device answers at once, and its files are as they were.
        let file = OpenOptions::new().read(true).write(true).open(&in_files).unwrap();
        for round in 0..20 {
            file.write_all_at(&noise(round, 8 << 10), if round < 10 { 128 } else { 0 }).unwrap();
            let began = Instant::now();
            pools_when(&place, |_| true);
            assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        }
        assert_eq!(pools_when(&place, |stats| stats["pools"] == json!([]))["pool_nodes"], json!([]));
        drop(file);
        fs::remove_file(&in_files).unwrap();
    });
}

/// Rows of a KV cache of `channels` in bf16, whose channels are alike over time, as real ones are.
fn cache(seed: u64, channels: usize, bytes: usize) -> Vec<u8> {
    let noise = noise(seed, bytes / 2);
    let of = |(at, random): (usize, &u8)| {
        let exponent = 0x3c + u8::try_from(at % channels % 7).unwrap();
        [random & 0xbf | 0x80, exponent]
    };
    noise.iter().enumerate().flat_map(of).collect()
}

#[test]
fn one_pool_holds_caches_of_two_shapes_and_opaque_bytes_each_at_its_own_ratio() {
    within(240, || {
        let place = Place::new();
        let usual = ["--capacity", "1G", "--views-capacity", "16M", "--views", "", "--files", "256M"];
        let _run = Run::start(&mut place.serve(&usual));
        let pool = place.text("mount/files/pool");
        // Chunks of 2 MiB.
        done(&["create", &pool, "--size", "96M"]);
        let held = [
            ("narrow", cache(3, 64, 5 << 20), &["--kv", "64,256"][..]),
            ("wide", cache(4, 1024, 6 << 20), &["--format", "bf16", "--kv", "1024,32"]),
            ("noise", noise(5, 3 << 20), &[]),
        ];
        let from = place.text("from");
        for (name, bytes, class) in &held {
            fs::write(&from, bytes).unwrap();
            done(&[&["put", &pool, name, &from][..], class].concat());
        }
        for (name, bytes, _) in &held {
            assert!(done(&["get", &pool, name]) == *bytes, "{name}");
        }
        let listed = told(&["ls", &pool, "--json"]);
        let classes: Vec<_> = listed.as_array().unwrap().iter().map(|object| &object["class"]).collect();
        assert_eq!(classes, ["bf16 64,256", "", "bf16 1024,32"]);
        assert!(String::from_utf8(done(&["stat", &pool])).unwrap().contains("bf16 1024,32: 6291456 bytes"));
        // What a class is is the device's to know, and what is kept with loss does not check.
        for (class, why) in [("64,256,lossy=packkv", "kept with loss"), ("0,5", "--kv")] {
            assert!(refused(&["put", &pool, "wrong", &from, "--kv", class]).contains(why), "{class}");
        }
        let plain = place.text("plain");
        done(&["create", &plain, "--size", "16M"]);
        assert!(refused(&["put", &plain, "wrong", &from, "--kv", "64"]).contains("in a mount only"));
        // The device tells the ratio of each, once it has what was stored.
        OpenOptions::new().write(true).open(&pool).unwrap().sync_all().unwrap();
        let serving = Arc::new(Pool::open(Path::new(&pool)).unwrap());
        let service = Service::start(Arc::clone(&serving));
        let class = |stats: &Value, class: &str| {
            let all = stats["pool_classes"].as_array().unwrap().clone();
            all.into_iter().find(|of| of["class"] == class).unwrap_or_default()
        };
        let stats = pools_when(&place, |stats| class(stats, "bf16 1024,32")["ready_bytes"] == 6 << 20);
        let ratio = |name: &str| class(&stats, name)["ratio"].as_f64().unwrap_or_default();
        let [narrow, wide, own] = ["bf16 64,256", "bf16 1024,32", "own"].map(ratio);
        eprintln!("ratios: narrow {narrow:.3}, wide {wide:.3}, opaque with the tables {own:.3}");
        assert!(narrow > 1.45 && wide > 1.45, "{narrow} {wide}: {}", stats["pool_classes"]);
        assert!((0.9..=1.0).contains(&own), "{own}: {}", stats["pool_classes"]);
        let table = lamina(&["stats", "--api", &place.text("run/api.sock")]).output().unwrap();
        assert!(String::from_utf8(table.stdout).unwrap().contains("classes of pools"));
        service.stop().unwrap();
        drop(serving);
        // What is put in place of something is of a class of its own.
        fs::write(&from, &held[0].1).unwrap();
        done(&["put", &pool, "noise", &from, "--kv", "64,256"]);
        for (name, bytes) in [("narrow", &held[0].1), ("wide", &held[1].1), ("noise", &held[0].1)] {
            assert!(done(&["get", &pool, name]) == *bytes, "{name}");
        }
        assert_eq!(told(&["check", &pool, "--json"])["problems"], json!([]));
    });
}

#[test]
fn a_view_is_had_of_what_is_of_a_class_in_the_base_window() {
    within(240, || {
        let place = Place::new();
        let _run = Run::start(&mut place.serve(&["--capacity", "64M", "--views-capacity", "64M"]));
        let base = place.text("mount/base");
        done(&["create", &base]);
        let (from, bytes) = (place.text("from"), cache(6, 64, 1 << 20));
        fs::write(&from, &bytes).unwrap();
        done(&["put", &base, "opaque", &from]);
        done(&["put", &base, "cache", &from, "--kv", "64,256"]);
        let listed = told(&["ls", &base, "--json"]);
        let object = listed.as_array().unwrap().iter().find(|object| object["name"] == "cache").unwrap();
        let at = object["at"].as_u64().unwrap();
        let (_, tensors) = place.try_ask("GET", "/tensors", &Value::Null);
        let (mut found, mut whole) = (Vec::new(), 0);
        let views = Window::open(&place.path("mount/views"));
        place.try_ask("POST", "/flush", &json!({ "offset": 0, "length": 64 << 20 }));
        for tensor in tensors.as_array().unwrap() {
            let (dpa, length) = (tensor["dpa"].as_u64().unwrap(), tensor["length"].as_u64().unwrap());
            assert_eq!((&tensor["format"], &tensor["layout"]["window"]), (&json!("bf16"), &json!(256)));
            let asked = json!({ "tensor": tensor["name"], "spelling": "e8m3" });
            let (status, view) = place.try_ask("POST", "/views", &asked);
            assert!((200..300).contains(&status), "{view}");
            let offset = view["offset"].as_u64().unwrap();
            let start = at.max(dpa);
            let end = (at + bytes.len() as u64).min(dpa + length);
            if start < end {
                found.extend(views.load(offset + start - dpa, usize::try_from(end - start).unwrap()));
            }
            whole += length;
        }
        assert!(found == expected("e8m3", &bytes), "{} of {}", found.len(), bytes.len());
        assert!(whole < 4 << 20, "{whole}: the opaque is of no tensor");
        assert!(done(&["get", &base, "cache"]) == bytes && done(&["get", &base, "opaque"]) == bytes);
        // Made anew it is of no class.
        done(&["create", &base, "--force", "--kv", "64"]);
        let (_, tensors) = place.try_ask("GET", "/tensors", &Value::Null);
        assert_eq!(tensors.as_array().unwrap().len(), 1);
        assert!(refused(&["put", &base, "cache", &from, "--kv", "64,256"]).contains("overlap"));
        done(&["put", &base, "plain", &from]);
        assert!(done(&["get", &base, "plain"]) == bytes, "that it was refused stops nobody");
        // And then of none.
        done(&["create", &base, "--force"]);
        let (_, tensors) = place.try_ask("GET", "/tensors", &Value::Null);
        assert_eq!(tensors, json!([]));
        // A chunk that was of a class takes what is of none, also from who cannot tell the device.
        done(&["put", &base, "cache", &from, "--kv", "64,256"]);
        done(&["rm", &base, "cache"]);
        let pool = Arc::new(Pool::open(Path::new(&base)).unwrap());
        let serving = Service::start(Arc::clone(&pool));
        pool.put("one", &bytes).unwrap();
        assert_eq!(pool.get("one").unwrap().as_deref(), Some(&bytes[..]));
        // Whoever has the file tells the device, and so does a server of the index for who asks it.
        let class = Class::new("bf16", Some("64,256")).unwrap();
        pool.of(&class).unwrap().put("two", &bytes).unwrap();
        let server = Run::start(lamina(&["pool", "serve", &base, "--json"]).stdout(Stdio::piped()));
        let wide = Class::new("bf16", Some("1024,32")).unwrap();
        let key = Chain::new("of a class").next(&[1]);
        assert!(ServedIndex::new(Arc::clone(&pool)).store_of(Some(&wide), key, &[&bytes]).unwrap());
        let lies_in = |at: u64, window: u64| {
            let (_, tensors) = place.try_ask("GET", "/tensors", &Value::Null);
            tensors.as_array().unwrap().iter().any(|tensor| {
                let (dpa, length) = (tensor["dpa"].as_u64().unwrap(), tensor["length"].as_u64().unwrap());
                (dpa..dpa + length).contains(&at) && tensor["layout"]["window"] == window
            })
        };
        let two = pool.list().unwrap().into_iter().find(|object| object.name == "two").unwrap();
        assert!(two.class == "bf16 64,256" && lies_in(two.at, 256), "{two:?}");
        let shares = pool.stats().unwrap().by_class;
        assert!(shares.iter().any(|share| share.class == "bf16 1024,32" && share.ready_bytes == 1 << 20));
        let (_, tensors) = place.try_ask("GET", "/tensors", &Value::Null);
        assert!(
            tensors.as_array().unwrap().iter().any(|tensor| tensor["layout"]["window"] == 32),
            "{tensors}"
        );
        assert_eq!(pool.read(&key).unwrap().as_deref(), Some(&bytes[..]));
        server.signal(Signal::SIGTERM);
        assert!(server.end().success());
        // Who has the server's number next waits until that is recovered.
        assert_eq!(told(&["check", &base, "--json"])["problems"], json!([]));
        serving.stop().unwrap();
    });
}

#[test]
fn a_fifo_in_the_place_of_a_pool_keeps_nobody_from_being_told() {
    within(120, || {
        let place = Place::new();
        let _run = Run::start(&mut place.serve(&["--capacity", "256M", "--views", "", "--files", "64M"]));
        let [file, other] = ["mount/files/pool", "mount/files/other"].map(|name| place.path(name));
        done(&["create", file.to_str().unwrap(), "--size", "16M"]);
        mkfifo(&other, Mode::S_IRWXU).unwrap();
        let exchange = || renameat_with(CWD, &file, CWD, &other, RenameFlags::EXCHANGE).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    exchange();
                }
            });
            let began = Instant::now();
            while began.elapsed() < Duration::from_secs(6) {
                pools_when(&place, |_| true);
                thread::sleep(Duration::from_millis(100));
            }
            stop.store(true, Ordering::Relaxed);
        });
        if !fs::metadata(&file).unwrap().is_file() {
            exchange();
        }
        let from = place.text("from");
        fs::write(&from, noise(3, 5000)).unwrap();
        done(&["put", file.to_str().unwrap(), "one", &from]);
        let stats = pools_when(&place, |stats| stats["pools"][0]["stores"] == 1);
        assert_eq!(stats["pools"][0]["name"], "files/pool");
    });
}

#[test]
fn a_pool_in_the_base_window_is_seen_while_somebody_is_attached() {
    within(120, || {
        let place = Place::new();
        let _run = Run::start(&mut place.serve(&["--capacity", "64M"]));
        let base = place.text("mount/base");
        done(&["create", &base]);
        let pool = Arc::new(Pool::open(Path::new(&base)).unwrap());
        let serving = Service::start(Arc::clone(&pool));
        pool.put("one", &noise(3, 5000)).unwrap();
        let stats = pools_when(&place, |stats| stats["pools"][0]["objects"] == 1);
        assert_eq!((&stats["pools"][0]["name"], &stats["pools"][0]["nodes"]), (&json!("base"), &json!(1)));
        serving.stop().unwrap();
    });
}

#[test]
fn another_process_serves_the_index_and_may_be_killed() {
    within(240, || {
        let place = Place::new();
        let file = place.text("pool");
        done(&["create", &file, "--size", "16M"]);
        let pool = Arc::new(Pool::open(Path::new(&file)).unwrap());
        let serving = Service::start(Arc::clone(&pool));
        let index = ServedIndex::new(Arc::clone(&pool));
        let mut chain = Chain::new("served");
        let blocks: Vec<_> = (0..30_u64).map(|number| (chain.next(&[1]), noise(number, 900))).collect();
        let keys: Vec<_> = blocks.iter().map(|(key, _)| *key).collect();
        let serve = || Run::start(lamina(&["pool", "serve", &file, "--json"]).stdout(Stdio::piped()));
        let mut server = serve();
        assert!(server.ready["node"].is_u64(), "{}", server.ready);
        assert!(refused(&["serve", &file]).contains("serves the pool's index already"));
        for (number, (key, content)) in blocks.iter().enumerate() {
            // Not at a moment of its choice.
            if number % 10 == 5 {
                server.signal(Signal::SIGKILL);
                drop(server);
                server = serve();
            }
            assert!(index.store(*key, &[content]).unwrap());
            let mut found = vec![0; content.len()];
            assert!(index.read_into(key, &mut [&mut found]).unwrap() && found == *content, "{number}");
        }
        assert_eq!(index.prefix(&keys).unwrap(), blocks.len());
        server.signal(Signal::SIGTERM);
        assert!(server.end().success());
        let began = Instant::now();
        assert!(matches!(index.prefix(&keys), Err(PoolError::NoServer)));
        assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
        // Whoever looks by itself finds the same.
        assert_eq!(pool.prefix(&keys).unwrap(), blocks.len());
        serving.stop().unwrap();
        assert_eq!(pool.check(false).unwrap().problems, []);
    });
}
