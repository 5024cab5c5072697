//! Booted guests on real devices: the main job in each mode, a guest that misbehaves, live
//! counters, a decoder whose memory is the device, and a script through `lamina boot`.
//!
//! These need what `./x` sets up: the guest's programs and image, a QEMU, FUSE.

use std::{
    io::{Read, Write},
    net::TcpStream,
    os::unix::net::UnixStream,
    path::PathBuf,
    process::Command,
    time::Duration,
};

use lamina_run::{
    bundled, bundled_file,
    daemon::{Serve, worker},
    decode::{Compared, Decode},
    job::{Job, On, Step},
    judge::Judge,
    programs,
    report::Report,
};

fn models() -> Vec<PathBuf> {
    bundled().expect("start the tests through ./x test")
}

fn run(job: &Job) -> Report {
    job.run(|_| {}).unwrap()
}

fn job(mode: &str, codec: &str, views: &[&str], models: Vec<PathBuf>, folder: &tempfile::TempDir) -> Job {
    Job {
        serve: Serve {
            models,
            views: views.iter().map(|&view| view.to_owned()).collect(),
            kv: Vec::new(),
            mode: mode.to_owned(),
            codec: codec.to_owned(),
            capacity: None,
            read_ahead_kb: 4,
            devices: None,
        },
        views: true,
        on: On::Guest,
        decode: None,
        ram: None,
        write: None,
        hostile: false,
        limit: Duration::from_secs(300),
        console: folder.path().join("console.log"),
    }
}

fn right(report: &Report, views: usize) {
    assert_eq!(report.problems, Vec::<String>::new());
    assert_eq!(report.views.len(), views);
    assert!(report.views.iter().all(|view| view.matches));
    assert!(report.guest.boot_seconds > 0.0);
    let written = report.written.as_ref().expect("a tensor was written");
    assert!(written.matches && !written.views.is_empty());
    assert!(
        report.tensors.iter().all(|tensor| tensor.base_sha256.is_some()),
        "every tensor was read through the base window"
    );
}

#[test]
fn a_guest_reads_every_view_right_and_misbehaving_hurts_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let views = ["full", "e8m3", "e8m3+g2:packed", "fp8_e4m3fn", "e5m11", "int4"];
    let mut job = job("trace", "lz4", &views, models(), &folder);
    job.hostile = true;
    job.write = Some("layers.2.seq.3.k".to_owned());
    let report = run(&job);
    let tensors = report.tensors.len();
    right(&report, tensors * 4);
    assert_eq!(report.written.as_ref().unwrap().tensor, "layers.2.seq.3.k");
    // bf16 has no 11 mantissa bits and is no int8.
    assert_eq!(report.skipped.len(), tensors * 2);
    assert!(report.skipped.iter().any(|skipped| skipped.view == "e5m11" && skipped.why.contains("mantissa")));
    let stored = |spelling: &str| -> u64 {
        report.views.iter().filter(|view| view.view == spelling).map(|view| view.stored_bytes_fetched).sum()
    };
    assert!(stored("e8m3") < stored("full"), "a view fetches less than everything");
    assert!(report.device.stored_bytes < report.device.logical_bytes);
}

#[test]
fn a_guest_does_not_notice_that_the_devices_workers_are_killed() {
    let folder = tempfile::tempdir().unwrap();
    let views = ["full", "e8m3", "fp8_e4m3fn", "e8m1+g2", "e8m3:packed"];
    let mut job = job("trace", "tree", &views, models(), &folder);
    job.write = Some("layers.2.seq.3.k".to_owned());
    let (mut killer, over) = (None, std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false)));
    let mut killed = 0;
    let mut end = |killer: &mut Option<std::thread::JoinHandle<u32>>| {
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        killed = killer.take().map_or(killed, |killer| killer.join().unwrap());
    };
    let report = job.run(|step| match step {
        Step::Serving(ready) => {
            let (holder, over) = (ready.pid, over.clone());
            killer = Some(std::thread::spawn(move || kill_workers(holder, &over)));
        }
        // The guest is done. Then the device is told to end, and it is an error if its worker dies
        // before everything is kept.
        Step::Doing("comparing with the reference") => end(&mut killer),
        _ => {}
    });
    end(&mut killer);
    let report = report.unwrap();
    right(&report, report.tensors.len() * views.len());
    // At most four a second; a fast machine boots and reads in a few, and a busy one is slow to
    // start the next.
    assert!(killed > 2, "only {killed} workers were killed");
}

/// Kills the worker of `holder` a few times a second until it is `over`: how many.
fn kill_workers(holder: u32, over: &std::sync::atomic::AtomicBool) -> u32 {
    let mut killed = 0;
    while !over.load(std::sync::atomic::Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(250));
        if let Some(worker) = worker(holder) {
            killed += u32::from(rustix::process::kill_process(worker, rustix::process::Signal::KILL).is_ok());
        }
    }
    killed
}

#[test]
fn the_counters_are_live_on_both_sockets_while_a_guest_runs() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = job("trace", "zstd", &["full"], models()[..1].to_vec(), &folder);
    job.serve.devices = Some(2);
    let (mut address, mut live, mut socket) = (None, Vec::new(), None);
    let report = job
        .run(|step| match step {
            Step::Serving(ready) => {
                address = Some(ready.tcp);
                socket = Some(ready.api.clone());
            }
            Step::Reading { number, .. } if number % 20 == 0 => {
                live.push(get(TcpStream::connect(address.unwrap()).unwrap(), "/stats"));
                live.push(get(UnixStream::connect(socket.as_ref().unwrap()).unwrap(), "/metrics"));
            }
            _ => {}
        })
        .unwrap();
    right(&report, report.tensors.len());
    // All tensors lie in the first chunk of 2 MiB, so one of the two devices does everything, and
    // the region gives no more than that one.
    let devices = report.interleave.as_ref().expect("counters of two devices");
    assert_eq!((devices.devices.len(), devices.imbalance), (2, Some(2.0)));
    assert!(devices.devices[0].reads > 0 && devices.devices[1].stored_bytes_fetched == 0);
    assert!(report.to_text().contains("modelled at 22.5 GB/s each"), "{}", report.to_text());
    assert!(live.len() >= 4);
    let reads = |text: &String| {
        let (_, rest) = text.split_once("\"views\":{\"reads\":").expect("counters of views");
        rest.split(',').next().unwrap().parse::<u64>().unwrap()
    };
    let (first, last) = (reads(&live[0]), reads(&live[live.len() - 2]));
    assert!(last > first, "{first} reads at first, {last} at last");
    assert!(live.last().unwrap().trim_end().ends_with("# EOF"), "OpenMetrics text");
}

/// The body of an answer.
fn get(mut stream: impl Read + Write, path: &str) -> String {
    write!(stream, "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    body.to_owned()
}

#[test]
fn lamina_boot_runs_a_script_in_a_guest_and_passes_its_status_on() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script.sh");
    let text =
        "#!/bin/sh\nlamina-shim up && lamina-shim sum tok_embeddings.weight e8m3 && cat /note && exit 7\n";
    std::fs::write(&script, text).unwrap();
    let note = folder.path().join("note");
    std::fs::write(&note, "put here by the test\n").unwrap();
    let output = Command::new(programs::lamina().unwrap())
        .args(["boot", "--views", "e8m3", "--put", &format!("{}=/note", note.display())])
        .arg("--model")
        .arg(&models()[0])
        .arg("--run-dir")
        .arg(folder.path().join("run"))
        .arg("--script")
        .arg(&script)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let why = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{said}\n{why}");
    let want = Judge::new(&models()).unwrap().sha256("tok_embeddings.weight", "e8m3", 0).unwrap();
    assert!(said.contains(&want), "{said}");
    assert!(said.contains("put here by the test"), "{said}");
}

#[test]
fn a_guest_reads_poison_as_a_pattern_and_its_kernel_logs_the_media_error() {
    let folder = tempfile::tempdir().unwrap();
    let (script, run) = (folder.path().join("poison.sh"), folder.path().join("run"));
    let text = "lamina-shim up || exit 3\n\
        echo waiting for poison\n\
        n=0; until dmesg | grep 'cxl_general_media: '; do n=$((n+1)); [ $n -lt 60 ] || exit 5; sleep 0.5; done\n\
        lamina-shim cat tok_embeddings.weight e8m3 --length 4096 | head -c 8 | hexdump -C\n";
    std::fs::write(&script, text).unwrap();
    let mut child = Command::new(programs::lamina().unwrap())
        .args(["boot", "--views", "e8m3", "--model"])
        .arg(&models()[0])
        .arg("--run-dir")
        .arg(&run)
        .arg("--script")
        .arg(&script)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    for line in std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap())) {
        let line = line.unwrap();
        if line.contains("waiting for poison") {
            let api = run.join("api.sock");
            let tensors = get(UnixStream::connect(&api).unwrap(), "/tensors");
            let tensors: serde_json::Value = serde_json::from_str(&tensors).unwrap();
            let found = |tensor: &&serde_json::Value| tensor["name"] == "tok_embeddings.weight";
            let dpa = tensors.as_array().unwrap().iter().find(found).unwrap()["dpa"].to_string();
            let injected = Command::new(programs::lamina().unwrap())
                .args(["poison", "inject", &dpa, "--api"])
                .arg(&api)
                .status()
                .unwrap();
            assert!(injected.success());
        }
        said.push_str(&line);
        said.push('\n');
    }
    assert!(child.wait().unwrap().success(), "{said}");
    assert!(said.contains("descriptor='UNCORRECTABLE_EVENT'"), "{said}");
    assert!(said.contains("f0 ff f0 ff f0 ff f0 ff"), "{said}");
}

#[test]
fn the_baselines_give_a_guest_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let weights = models()[..1].to_vec();
    for mode in ["plain", "gcomp"] {
        let report = run(&job(mode, "lz4", &["full", "e8m3", "fp8_e5m2"], weights.clone(), &folder));
        right(&report, report.tensors.len() * 3);
        assert_eq!(report.device.mode, mode);
        let fetched: u64 = report.views.iter().map(|view| view.stored_bytes_fetched).sum();
        let plain: u64 = report.views.iter().map(|view| view.plain_bytes_fetched).sum();
        if mode == "plain" {
            assert_eq!(fetched, plain);
        }
        assert!(report.views.iter().all(|view| view.planes_fetched == 0), "words have no planes");
    }
}

#[test]
fn a_view_that_differs_from_the_reference_fails_the_run() {
    // The judge reads another model than the device: everything the guest loads must then be found
    // wrong.
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&models()[0]).unwrap();
    std::fs::write(&model, &bytes).unwrap();
    let job = job("trace", "lz4", &["e8m3"], vec![model.clone()], &folder);
    let mut changed = false;
    let report = job
        .run(|step| {
            // Once the device has loaded it, a bit of the last tensor's last element changes in the
            // file.
            if matches!(step, Step::Doing("booting the guest")) {
                let last = bytes.len() - 1;
                bytes[last] ^= 0x40;
                std::fs::write(&model, &bytes).unwrap();
                changed = true;
            }
        })
        .unwrap();
    assert!(changed);
    assert!(!report.good());
    let wrong = report.views.iter().filter(|view| !view.matches).count();
    assert_eq!(wrong, 1, "{:?}", report.problems);
}

/// A decoder job of a few tokens. Pages and text are so small that policies have something to
/// choose from.
fn decoder(views: &[&str], policies: &[&str], folder: &tempfile::TempDir) -> Job {
    let text = folder.path().join("text.txt");
    std::fs::write(
        &text,
        "One day, a girl named Lily saw a big dog. The dog was sad. She gave it a hug and it was happy.",
    )
    .unwrap();
    let decode = Decode {
        views: views.iter().map(|&view| view.to_owned()).collect(),
        policies: policies.iter().map(|policy| policy.parse().unwrap()).collect(),
        prompt: "Tom had a dog".to_owned(),
        tokens: 72,
        temperature: 0.7,
        seed: 3,
        text: Some(text),
        text_tokens: None,
        compared: Compared::All,
        tokenizer: bundled_file("tok512.bin").unwrap(),
        flush_every: 6,
        page_tokens: Some(8),
        window_tokens: None,
        batch: 1,
        keep_cache: false,
        save_kv: None,
    };
    let job = job("trace", "lz4", &[], models()[..1].to_vec(), folder);
    Job { views: false, decode: Some(decode), ..job }
}

#[test]
fn a_decoder_on_the_device_says_what_it_says_in_ordinary_memory_and_fetches_less_through_fewer_planes() {
    let folder = tempfile::tempdir().unwrap();
    let policies = ["full", "window:16", "top:1", "top:1=full,*=e8m1+g2", "top:*=fp8_e5m2"];
    let report = run(&decoder(&["full", "e8m3+g2", "e8m0", "e8m3:packed"], &policies, &folder));
    assert_eq!(report.problems, Vec::<String>::new());
    assert!(report.views.is_empty() && report.written.is_none());
    let decode = report.decode.expect("a decoder was run");
    assert!(
        decode.identical_to_reference
            && decode.runs.iter().all(|run| run.identical_to_reference == Some(true))
    );
    assert!(decode.text.starts_with("Tom had a dog") && decode.tokens == 72, "{}", decode.text);
    // The text in full and by the three other views, and by the four other policies.
    assert_eq!(decode.runs.len(), 1 + 4 + 4);
    assert_eq!(decode.perplexity.len(), 4);
    assert_eq!(decode.policy_perplexity.len(), 5);

    let full = &decode.runs[1];
    assert_eq!((full.weights.as_str(), full.policy.as_str()), ("full", "full"));
    let find = |weights: &str, policy: &str| {
        let run = decode.runs.iter().skip(1).find(|run| run.weights == weights && run.policy == policy);
        run.unwrap_or_else(|| panic!("no run of {weights} {policy}"))
    };
    for coarse in [find("e8m3+g2", "full"), find("e8m0", "full")] {
        let (less, all) = (coarse.weights_moved, full.weights_moved);
        assert!(less.stored_bytes_fetched < all.stored_bytes_fetched, "{less:?} {all:?}");
        assert!(less.planes_fetched < all.planes_fetched);
    }
    // Rounded a little, a model may even do better on a few words; without mantissas it does not.
    assert!(decode.perplexity["e8m0"] > 2.0 * decode.perplexity["full"], "{:?}", decode.perplexity);
    for policy in ["window:16", "top:1=full"] {
        let run = find("full", policy);
        assert!(run.kv_moved.loaded_bytes < full.kv_moved.loaded_bytes, "{policy}");
        assert_eq!(run.weights_moved.stored_bytes_fetched, full.weights_moved.stored_bytes_fetched);
    }
    // Every step reads every weight from the device, some of them twice.
    let steps = full.steps;
    assert_eq!(steps, u64::try_from(full.tokens).unwrap() - 1);
    assert!(full.weights_moved.plain_bytes_fetched >= steps * 520_000);
    assert!(full.weights_moved.stored_bytes_fetched < full.weights_moved.plain_bytes_fetched);
    // What the guest stored reached the device when it was flushed: ten tensors, each in one block
    // so far.
    assert_eq!(full.flushes, steps.div_ceil(6));
    assert_eq!(full.blocks_written, 10 * full.flushes);
    assert_eq!(full.kv_stored_by_guest, steps * 10 * 64);
    assert!(full.kv_ratio.unwrap() > 1.0);
}

#[test]
fn a_decoder_whose_model_is_another_than_the_references_fails_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&models()[0]).unwrap();
    std::fs::write(&model, &bytes).unwrap();
    let mut job = decoder(&["full"], &["full"], &folder);
    job.serve.models = vec![model.clone()];
    let report = job
        .run(|step| {
            // Once the device has loaded it, a low bit of the embedding changes in the file: too
            // little to be seen in the text.
            if matches!(step, Step::Doing("booting the guest")) {
                let last = bytes.len() - 2;
                bytes[last] ^= 1;
                std::fs::write(&model, &bytes).unwrap();
            }
        })
        .unwrap();
    assert!(!report.good());
    let decode = report.decode.unwrap();
    assert!(!decode.identical_to_reference);
    assert!(decode.runs.iter().all(|run| run.identical_to_reference == Some(false)));
    assert!(
        report.problems.iter().any(|problem| problem.contains("by other logits")),
        "{:?}",
        report.problems
    );
}
