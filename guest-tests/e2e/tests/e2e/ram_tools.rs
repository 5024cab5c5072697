//! The base window as a guest's RAM by the kernel's own tools, and as a disk that a guest swaps to:
//! the job of `./x run --workload ram`.

use std::time::Duration;

use lamina_run::{
    daemon::Serve,
    job::{Job, On},
    ram::{self, Ram},
};

#[test]
fn processes_run_on_the_base_window_pages_are_demoted_to_it_and_swapped_to_its_disk() {
    let folder = tempfile::tempdir().unwrap();
    let serve = Serve {
        models: Vec::new(),
        views: Vec::new(),
        kv: Vec::new(),
        mode: "trace".to_owned(),
        codec: "tree".to_owned(),
        capacity: None,
        devices: None,
        read_ahead_kb: 4,
    };
    let limit = Duration::from_secs(600);
    let ram = Ram {
        serve: serve.clone(),
        limit,
        console: folder.path().join("ram.log"),
        plan: ram::plan(),
        swap: ram::swap(),
    };
    let job = Job {
        on: On::Guest,
        serve,
        views: false,
        decode: None,
        ram: Some(ram),
        write: None,
        hostile: false,
        limit,
        console: folder.path().join("console.log"),
    };
    let report = job.run(|_| {}).unwrap();
    println!("{}", report.to_text());
    assert_eq!(report.problems, Vec::<String>::new());
    assert!(report.views.is_empty() && report.tensors.is_empty());

    let found = report.ram.expect("memory was used");
    assert_eq!(found.tiers.len(), 2, "the window is slower than RAM: {:?}", found.tiers);
    // Half of the process at least.
    assert!(found.demoted_pages >= 2048 && found.promoted_pages > 0);
    let names: Vec<&str> = found.ratios.keys().map(String::as_str).collect();
    assert_eq!(names, ["cc1", "python", "sqlite"]);
    for process in &found.processes {
        // Pages of text and pointers, megabytes of them.
        assert!(process.data_bytes > 1 << 20 && process.ratio.unwrap() > 1.2, "{process:?}");
        // Nearly all of what the device holds more is the process's: pages of zeros are less, and
        // what is not given back yet is little.
        assert!(process.data_bytes < process.node_bytes + (1 << 20), "{process:?}");
        assert_eq!(process.other_bytes, 0, "{process:?}");
    }
    let swapped = found.swapped.expect("pages were swapped");
    // What does not fit into 8 of 24 MiB, written once and read once at least.
    assert!(swapped.ok && swapped.out >= 4096 && swapped.r#in >= 4096, "{swapped:?}");
}
