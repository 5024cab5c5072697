//! Poison as the host and its guests meet it: a pattern in the windows, and a list.

use serde_json::{Value, json};

use crate::common::{Rig, lamina, within};

#[test]
fn poison_shows_in_cached_pages_and_views_and_a_store_of_the_block_clears_it() {
    within(60, || {
        let rig = Rig::new("auto");
        let view = rig.view("e8m3");
        let (mut base, views) = (rig.base(), rig.views());
        // In the page cache, and mapped.
        assert!(base.load(4096, 4096) == rig.bytes[4096..8192]);
        let shown = rig.expected("e8m3");
        assert!(views.load(view.offset + 4096, 4096) == shown[4096..8192]);
        let api = rig.place.text("run/api.sock");
        let done = lamina(&["poison", "inject", "0x1000", "--api", &api]).output().unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        assert!(base.load(4096, 4096).iter().all(|byte| *byte == 0xff));
        assert!(base.load(8192, 4096) == rig.bytes[8192..12288], "only the block");
        assert!(views.load(view.offset + 4096, 4096) == [0xf0, 0xff].repeat(2048));
        let listed = rig.ask("GET", "/poison", &Value::Null);
        assert_eq!(listed.as_array().unwrap().len(), 1);
        assert_eq!(
            (&listed[0]["dpa"], &listed[0]["tensor"], &listed[0]["cause"]),
            (&json!(4096), &json!("t"), &json!("injected"))
        );
        let table = lamina(&["poison", "list", "--api", &api]).output().unwrap();
        assert!(String::from_utf8_lossy(&table.stdout).contains("0x1000"));
        // The host's cache writes back whole pages: the block is whole again.
        base.store(4096, &rig.bytes[4096..8192]);
        rig.flush(4096, 4096);
        assert!(views.load(view.offset + 4096, 4096) == shown[4096..8192]);
        assert_eq!(rig.ask("GET", "/poison", &Value::Null), json!([]));
        let stats = rig.requests();
        assert_eq!((&stats["poison_events"], &stats["poisoned_blocks"]), (&json!(1), &json!(0)));
    });
}

#[test]
fn cleared_poison_is_zeros_and_bad_ranges_are_refused() {
    within(60, || {
        let rig = Rig::new("auto");
        let range = |offset: u64| json!({ "offset": offset, "length": 4096 });
        rig.ask("POST", "/poison/inject", &range(0));
        rig.ask("POST", "/poison/clear", &range(0));
        assert_eq!(rig.base().load(0, 4096), [0; 4096]);
        let (status, body) = rig.try_ask("POST", "/poison/inject", &range(32 << 20));
        assert!(status == 422 && body["error"].as_str().unwrap().contains("pass"), "{status} {body}");
    });
}
