//! `--model-dram`: what DRAM would have done is told where the counters are, and else nothing is.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::{Rig, answer, lamina, request, within};

/// What is told of both designs, when the model has followed everything.
fn modelled(rig: &Rig) -> [Value; 2] {
    let begun = Instant::now();
    loop {
        let stats = rig.ask("GET", "/stats", &Value::Null);
        if let [plain, trace] = &stats["modelled"].as_array().unwrap()[..]
            && plain["read_bytes"].as_u64().unwrap() > 0
        {
            return [plain.clone(), trace.clone()];
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{}", stats["modelled"]);
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_device_that_is_modelled_says_what_its_dram_would_have_done() {
    within(60, || {
        let rig = Rig::prepared(|_, command| {
            command.arg("--model-dram=ddr5-6400");
        });
        let view = rig.view("e8m0");
        rig.views().load(view.offset, 1 << 20);
        let [plain, trace] = modelled(&rig);
        assert_eq!((&plain["design"], &trace["design"]), (&"plain".into(), &"trace".into()));
        assert!(plain["source"].as_str().unwrap().starts_with("ddr5-6400"), "{plain}");
        assert!(plain["link"].as_str().unwrap().starts_with("gen5x16"), "{plain}");
        for field in ["up_flits", "down_flits", "written_bytes", "activates", "access_picojoules", "requests"]
        {
            assert!(plain[field].as_u64() > Some(0) && trace[field].as_u64() > Some(0), "{plain} {trace}");
        }
        // A view of 9 planes of 16 of what does not code: fewer bytes, index entries and all.
        assert!(trace["read_bytes"].as_u64() < plain["read_bytes"].as_u64(), "{plain} {trace}");
        let stream = std::os::unix::net::UnixStream::connect(rig.place.path("run/api.sock")).unwrap();
        let (_, _, metrics) = answer(stream, &request("GET", "/metrics", ""));
        assert!(metrics.contains("lamina_modelled_activates_total{design=\"plain\"} "), "{metrics}");
        assert!(metrics.contains("lamina_modelled_up_flits_total{design=\"trace\"} "), "{metrics}");
        let stream = std::os::unix::net::UnixStream::connect(rig.place.path("run/api.sock")).unwrap();
        let (status, head, page) = answer(stream, &request("GET", "/planner", ""));
        assert!(status == 200 && head.contains("default-src 'none'"), "{head}");
        assert!(page.contains("gpt-oss-120b-mxfp4") && !page.contains("GIVEN"), "{page}");
        let told = lamina(&["stats", "--api", &rig.place.text("run/api.sock")]).output().unwrap();
        assert!(String::from_utf8_lossy(&told.stdout).contains("modelled:"), "{told:?}");
    });
}

#[test]
fn a_device_that_is_not_modelled_tells_nothing_and_wrong_modules_are_refused() {
    within(60, || {
        let rig = Rig::new("auto");
        rig.base().load(0, 4096);
        let stats = rig.ask("GET", "/stats", &Value::Null);
        assert_eq!(stats["modelled"], Value::Array(Vec::new()));
        let refused = lamina(&["serve", "--mount", "/nonexistent", "--model-dram=ddr9"]).output().unwrap();
        assert!(!refused.status.success());
        assert!(String::from_utf8_lossy(&refused.stderr).contains("dram is ddr9"), "{refused:?}");
    });
}
