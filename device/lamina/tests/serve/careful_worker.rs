//! A worker that is told to be careful, since others died before it, believes no ledger: one that
//! is wrong would end each worker.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::thread;
use std::time::Duration;

use lamina_device::device::DeviceConfig;
use lamina_serve::claim;
use lamina_store::image::Image;
use serde_json::json;

use crate::bare_worker::Worker;
use crate::common::{Place, noise, within};

#[test]
fn a_careful_worker_looks_at_all_entries_and_another_reads_what_was_noted() {
    within(120, || {
        let place = Place::new();
        fs::create_dir(place.path("run")).unwrap();
        let model = place.checkpoint("t", &noise(3, 1 << 20));
        let image = Image::in_memory(DeviceConfig::new(16 << 20, 64 << 20).superblock()).unwrap();
        let [api, ctl] = ["run/api.sock", "run/ctl.sock"].map(|name| claim(&place.path(name)).unwrap().0);
        let workers = [(false, "what was noted was read"), (true, "all entries were looked at")];
        for (deaths, (careful, said)) in [(false, "")].into_iter().chain(workers).enumerate() {
            let log = place.path("log");
            let mut serve = place.serve(&["--model", &model]);
            serve.env("RUST_LOG", "debug").stderr(File::create(&log).unwrap());
            let worker = Worker::start(serve);
            let is_first = deaths == 0;
            let open = json!({ "Open": {
                "image": "memory", "first": is_first, "deaths": deaths, "careful": careful,
                "ctl": [place.text("run/ctl.sock")], "tcp": false,
            } });
            worker.order(&open, &[image.file().as_fd(), api.as_fd(), ctl.as_fd()]);
            if is_first {
                assert_eq!(worker.word(), "Loaded");
            }
            worker.order(&json!({ "Serve": { "mount": null, "qmp": null, "disks": [] } }), &[]);
            assert_eq!(worker.word()["Ready"]["ready"], true);
            // It notes four times a second what the next need not count again, and dies with that.
            thread::sleep(Duration::from_secs(1));
            drop(worker);
            let log = fs::read_to_string(log).unwrap();
            let mut others = workers.iter().filter(|(_, other)| !is_first && *other != said);
            assert!(log.contains(said) && others.all(|(_, other)| !log.contains(other)), "{log}");
        }
    });
}
