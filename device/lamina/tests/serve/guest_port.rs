//! The guest port, with guests that behave and guests that do not.

use lamina_serve::guest_port::MAX_LINE;
use serde_json::json;

use crate::common::{Guest, Rig, noise, within};

/// Connects as QEMU does for a guest.
fn guest(rig: &Rig) -> Guest {
    Guest::connect(rig.run.ready["ctl"].as_str().unwrap())
}

#[test]
fn a_guest_flushes_makes_views_and_sees_what_there_is() {
    within(60, || {
        let mut rig = Rig::new("auto");
        let mut guest = guest(&rig);
        assert_eq!(guest.ask(&json!({ "op": "tensors" }))["tensors"][0]["name"], "t");
        let view = guest.ask(&json!({ "op": "view", "tensor": "t", "spelling": "full" }));
        assert_eq!(view["ok"], true, "{view}");
        let offset = view["view"]["offset"].as_u64().unwrap();
        assert_eq!(guest.ask(&json!({ "op": "views" }))["views"], json!([view["view"]]));

        let (mut base, views) = (rig.base(), rig.views());
        assert!(views.load(offset, rig.bytes.len()) == rig.bytes);
        base.store(4000, b"from the guest");
        rig.bytes[4000..4014].copy_from_slice(b"from the guest");
        assert_eq!(guest.ask(&json!({ "op": "flush", "offset": 4000, "length": 14 })), json!({ "ok": true }));
        assert!(views.load(offset, rig.bytes.len()) == rig.bytes);
        assert_eq!(guest.ask(&json!({ "op": "flush" })), json!({ "ok": true }));
        let stats = guest.ask(&json!({ "op": "stats" }));
        assert!(stats["stats"]["writes"]["base_writes"].as_u64().unwrap() > 0, "{stats}");
    });
}

#[test]
fn a_guest_makes_resizes_and_frees_tensors_and_views() {
    within(60, || {
        let rig = Rig::new("auto");
        let mut guest = guest(&rig);
        let new = json!({ "name": "mine", "length": 8192, "format": "bf16" });
        let create = json!({ "op": "create_tensors", "tensors": [new, { "name": "too", "length": 4096, "format": "fp32" }] });
        let made = guest.ask(&create);
        assert_eq!(made["tensors"][1]["name"], "too", "{made}");
        let dpa = made["tensors"][0]["dpa"].as_u64().unwrap();
        assert_eq!(guest.ask(&create)["ok"], false);
        // Who got no answer may ask again.
        let mut again = create.clone();
        again["again"] = true.into();
        assert_eq!(guest.ask(&again), made);
        let mut other = again.clone();
        other["tensors"][0]["length"] = 4096.into();
        assert_eq!(guest.ask(&other)["ok"], false);
        // A base may be named, and given up.
        let derived = json!({ "name": "near", "length": 8192, "format": "bf16", "base": "mine" });
        let create = json!({ "op": "create_tensors", "tensors": [derived], "again": true });
        let near = guest.ask(&create);
        assert_eq!(near["tensors"][0]["base"], "mine", "{near}");
        assert_eq!(guest.ask(&create), near);
        let refused = guest.ask(&json!({ "op": "remove_tensor", "name": "mine" }));
        assert!(refused["error"].as_str().unwrap().contains("base of near"), "{refused}");
        let detached = guest.ask(&json!({ "op": "detach_tensor", "name": "near" }));
        assert_eq!(
            (&detached["ok"], &detached["tensor"]["base"]),
            (&json!(true), &json!(null)),
            "{detached}"
        );
        assert_eq!(guest.ask(&json!({ "op": "remove_tensor", "name": "near" })), json!({ "ok": true }));
        let lossy =
            json!({ "kind": "lossy_kv", "channels": 64, "window": 64, "lossy": "packkv:0.1,median,8" });
        let cache = json!({ "name": "cache", "length": 1 << 16, "format": "bf16", "layout": lossy });
        let cache = guest.ask(&json!({ "op": "create_tensors", "tensors": [cache] }));
        assert_eq!(cache["tensors"][0]["layout"]["lossy"]["repack"], "median", "{cache}");
        assert_eq!(guest.ask(&json!({ "op": "remove_tensor", "name": "cache" })), json!({ "ok": true }));
        let page = guest.ask(&json!({ "op": "tensors", "from": dpa, "most": 1 }));
        assert_eq!(page["tensors"], json!([made["tensors"][0]]));
        let shorter = guest.ask(&json!({ "op": "resize_tensor", "name": "mine", "length": 4096 }));
        assert_eq!(shorter["tensor"]["length"], 4096, "{shorter}");

        rig.base().store(dpa, &[7; 4096]);
        let view = guest.ask(&json!({ "op": "view", "tensor": "mine", "spelling": "full" }));
        let offset = view["view"]["offset"].as_u64().unwrap();
        assert_eq!(guest.ask(&json!({ "op": "flush" }))["ok"], true);
        let views = rig.views();
        assert!(views.load(offset, 4096) == [7; 4096]);
        let page = guest.ask(&json!({ "op": "views", "from": offset, "most": 1 }));
        assert_eq!(page["views"], json!([view["view"]]));
        let gone = json!({ "op": "remove_view", "tensor": "mine", "spelling": "full" });
        assert_eq!(guest.ask(&gone), json!({ "ok": true }));
        assert!(views.load(offset, 4096) == [0; 4096], "no cache has it");
        assert_eq!(guest.ask(&gone)["ok"], false);
        for (name, again, ok) in [("mine", false, true), ("mine", false, false), ("mine", true, true)] {
            let remove = json!({ "op": "remove_tensor", "name": name, "again": again });
            assert_eq!(guest.ask(&remove)["ok"], ok, "{name} {again}");
        }
        assert!(rig.base().load(dpa, 4096) == [7; 4096], "bytes stay");
        for bad in [
            json!({ "op": "create_tensors", "tensors": [{ "name": "t", "length": 2, "format": "bf16" }] }),
            json!({ "op": "create_tensors", "tensors": [{ "name": "x", "length": u64::MAX, "format": "opaque" }] }),
            json!({ "op": "create_tensors", "tensors": [{ "name": "x", "length": 2, "format": "bf17" }] }),
            json!({ "op": "resize_tensor", "name": "x", "length": 2 }),
            json!({ "op": "resize_tensor", "name": "too", "length": u64::MAX }),
        ] {
            assert_eq!(guest.ask(&bad)["ok"], false, "{bad}");
        }
    });
}

#[test]
fn what_is_evicted_is_fetched_from_the_device_again() {
    within(60, || {
        let rig = Rig::new("auto");
        let mut guest = guest(&rig);
        let view = guest.ask(&json!({ "op": "view", "tensor": "t", "spelling": "full" }));
        let offset = view["view"]["offset"].as_u64().unwrap();
        let views = rig.views();
        let load = |guest: &mut Guest| {
            assert!(views.load(offset, rig.bytes.len()) == rig.bytes);
            guest.ask(&json!({ "op": "stats" }))["stats"]["views"][0]["bytes"].as_u64().unwrap()
        };
        let first = load(&mut guest);
        assert!(first >= rig.bytes.len() as u64);
        assert_eq!(load(&mut guest), first, "the page cache has it");
        // A page of it, and what lies behind the window's end.
        let ranges = json!([[offset + 1, 1], [u64::MAX, u64::MAX], [0, 0]]);
        assert_eq!(guest.ask(&json!({ "op": "evict", "ranges": ranges })), json!({ "ok": true }));
        assert_eq!(load(&mut guest), first + 4096);
        assert_eq!(guest.ask(&json!({ "op": "evict", "ranges": [[0, u64::MAX]] })), json!({ "ok": true }));
        assert_eq!(load(&mut guest), 2 * first + 4096);
    });
}

#[test]
fn garbage_gets_an_error_and_the_connection_goes_on() {
    within(60, || {
        let rig = Rig::new("auto");
        let mut guest = guest(&rig);
        for line in [
            &b"\0\xff\xfe\n"[..],
            b"null\n",
            b"[]\n",
            b"{}\n",
            b"{\"op\":\"format\"}\n",
            b"{\"op\":\"flush\",\"length\":-1}\n",
            b"{\"op\":\"stats\",\"x\":1}\n",
            b"{\"op\":\"evict\"}\n",
            b"{\"op\":\"evict\",\"ranges\":[[-1,1]]}\n",
        ] {
            let error = guest.refused(line);
            assert!(error.contains("no request"), "{error}");
        }
        let error = guest.refused(b"{\"op\":\"view\",\"tensor\":\"u\",\"spelling\":\"full\"}\n");
        assert!(error.contains("\"u\""), "{error}");
        let error = guest.refused(b"{\"op\":\"flush\",\"offset\":1,\"length\":18446744073709551615}\n");
        assert!(error.contains("pass the end"), "{error}");
        let mut deep = vec![b'['; MAX_LINE - 1];
        deep.push(b'\n');
        assert!(guest.refused(&deep).contains("no request"));
        guest.send(b"\n \n");
        assert_eq!(guest.ask(&json!({ "op": "flush" })), json!({ "ok": true }), "empty lines have no answer");
    });
}

#[test]
fn a_line_past_the_bound_is_refused_once_and_forgotten() {
    within(60, || {
        let rig = Rig::new("auto");
        let mut guest = guest(&rig);
        let mut long = noise(3, 5 * MAX_LINE);
        long.retain(|&byte| byte != b'\n');
        long.push(b'\n');
        let error = guest.refused(&long);
        assert!(error.contains("65536"), "{error}");
        assert_eq!(guest.ask(&json!({ "op": "flush" })), json!({ "ok": true }));
    });
}

#[test]
fn guests_come_go_and_come_again() {
    within(60, || {
        let rig = Rig::new("auto");
        let mut first = guest(&rig);
        let mut second = guest(&rig);
        first.send(b"{\"op\":\"fl");
        assert_eq!(second.ask(&json!({ "op": "flush" })), json!({ "ok": true }));
        drop(first);
        for _ in 0..50 {
            assert_eq!(guest(&rig).ask(&json!({ "op": "flush" })), json!({ "ok": true }));
        }
        // Requests sent at once are answered in order.
        second.send(b"{\"op\":\"flush\"}\n{\"op\":\"nonsense\"}\n{\"op\":\"tensors\"}\n");
        assert_eq!(second.receive(), json!({ "ok": true }));
        assert_eq!(second.receive()["ok"], false);
        assert_eq!(second.receive()["tensors"][0]["name"], "t");
    });
}
