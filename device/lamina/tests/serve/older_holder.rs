//! A worker under a holder of an earlier version, which `lamina upgrade` put there: what that says
//! is understood, and it is told nothing that it does not know.
//!
//! The test is the holder, and says what holders said before they kept what guests were told of
//! poison.

use std::fs;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

use lamina_device::device::DeviceConfig;
use lamina_serve::claim;
use lamina_store::image::Image;
use serde_json::json;

use crate::bare_worker::{TIMEOUT, Worker};
use crate::common::{Place, answer, request, within};
use crate::poison::monitor;

#[test]
fn the_monitor_that_an_older_holder_names_is_told_of_poison_and_the_holder_is_not() {
    within(120, || {
        let place = Place::new();
        fs::create_dir(place.path("run")).unwrap();
        let image = Image::in_memory(DeviceConfig::new(16 << 20, 64 << 20).superblock()).unwrap();
        let [api, ctl] = ["run/api.sock", "run/ctl.sock"].map(|name| claim(&place.path(name)).unwrap().0);
        let reported = monitor(&place.path("monitor.sock"));
        let worker = Worker::start(place.serve(&[]));
        let open = json!({ "Open": {
            "image": "memory", "first": true, "deaths": 0, "careful": false, "ctl": [place.text("run/ctl.sock")],
            "tcp": false,
        } });
        worker.order(&open, &[image.file().as_fd(), api.as_fd(), ctl.as_fd()]);
        assert_eq!(worker.word(), "Loaded");
        let serve = json!({ "Serve": { "mount": null, "qmp": place.text("monitor.sock"), "disks": [] } });
        worker.order(&serve, &[]);
        assert_eq!(worker.word()["Ready"]["ready"], true);
        let asker = UnixStream::connect(place.path("run/api.sock")).unwrap();
        let block = json!({ "offset": 4096, "length": 4096 }).to_string();
        let (status, _, body) = answer(asker, &request("POST", "/poison/inject", &block));
        assert!((200..300).contains(&status), "{status} {body}");
        assert_eq!(reported.recv_timeout(TIMEOUT), Ok(4096));
        // It ends when the monitor has answered, and has said nothing in between.
        worker.order(&json!("Stop"), &[]);
        assert_eq!(worker.word(), "Stopped");
    });
}
