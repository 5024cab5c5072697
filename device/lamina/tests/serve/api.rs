//! The API, with well- and ill-behaved peers.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use lamina_device::device::{Device, DeviceConfig};
use lamina_serve::{Api, Control, ServeError};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::runtime::Runtime;

use crate::common::{answer, noise, request, spec, within};

/// An API over a device that is not mounted.
struct Served {
    api: Api,
    device: Arc<Device>,
    directory: TempDir,
    runtime: Runtime,
}

impl Served {
    fn new() -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let device = Arc::new(Device::new(DeviceConfig::new(16 << 20, 16 << 20)).unwrap());
        device.create_tensor(spec("t", 0, 8192)).unwrap();
        device.write_base(0, &noise(1, 8192)).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let loopback = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        let control = Control::new(Arc::clone(&device));
        let api =
            runtime.block_on(async { Api::serve(control, &directory.path().join("api"), loopback) }).unwrap();
        Self { api, device, directory, runtime }
    }

    fn unix(&self) -> UnixStream {
        let stream = UnixStream::connect(self.api.socket()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    fn tcp(&self) -> TcpStream {
        let stream = TcpStream::connect(self.api.address().unwrap()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }

    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let (status, _, body) = answer(self.unix(), &request(method, path, body));
        (status, serde_json::from_str(&body).unwrap_or(Value::Null))
    }
}

#[test]
fn tensors_and_views_are_made_listed_and_removed() {
    within(60, || {
        let served = Served::new();
        let tensor = json!({ "name": "a/b c", "length": 6, "shape": [3], "format": "bf16" });
        let (status, made) = served.ask("POST", "/tensors", &tensor.to_string());
        assert_eq!((status, &made["dpa"], &made["elements"]), (201, &json!(8192), &json!(3)), "{made}");
        let (status, view) = served.ask("POST", "/views", r#"{"tensor":"a/b c","spelling":"e8m3"}"#);
        assert_eq!((status, &view["view"]), (201, &json!("e8m3")), "{view}");
        assert_eq!(served.ask("GET", "/tensors", "").1.as_array().unwrap().len(), 2);
        assert_eq!(served.ask("GET", "/views", "").1, json!([view]));
        assert_eq!(served.ask("DELETE", "/tensors/a%2Fb%20c", "").0, 204);
        assert_eq!(served.ask("GET", "/views", "").1, json!([]));
        assert_eq!(served.ask("DELETE", "/tensors/a%2Fb%20c", "").0, 404);
    });
}

#[test]
fn tensors_are_made_many_at_once_and_resized_and_views_are_removed() {
    within(60, || {
        let served = Served::new();
        let many: Vec<_> =
            (0..3000).map(|n| json!({ "name": format!("m{n}"), "length": 4096, "format": "bf16" })).collect();
        let (status, made) = served.ask("POST", "/tensors", &json!(many).to_string());
        assert_eq!((status, made.as_array().unwrap().len()), (201, 3000));
        // One that cannot be leaves none.
        let bad = json!([{ "name": "n", "length": 4096, "format": "bf16" }, { "name": "t", "length": 2, "format": "bf16" }]);
        let (status, why) = served.ask("POST", "/tensors", &bad.to_string());
        assert!(status == 409 && why["error"].as_str().unwrap().contains("\"t\""), "{why}");
        for bad in ["[1]", "[{}]", "7", "\"t\"", r#"[{"name":"n","length":4096,"format":"bf16","x":1}]"#] {
            assert_eq!(served.ask("POST", "/tensors", bad).0, 400, "{bad}");
        }
        assert_eq!(served.ask("POST", "/tensors", "[]"), (201, json!([])));
        assert_eq!(served.ask("GET", "/tensors", "").1.as_array().unwrap().len(), 3001);
        let (status, longer) = served.ask("PATCH", "/tensors/m2999", r#"{"length":8192}"#);
        assert_eq!((status, &longer["length"], &longer["elements"]), (200, &json!(8192), &json!(4096)));
        let (status, why) = served.ask("PATCH", "/tensors/m0", r#"{"length":8192}"#);
        assert!(status == 409 && why["error"].as_str().unwrap().contains("m1"), "{status} {why}");
        assert_eq!(served.ask("PATCH", "/tensors/nobody", r#"{"length":8192}"#).0, 404);
        let view = r#"{"tensor":"m7","spelling":"full"}"#;
        let (_, made) = served.ask("POST", "/views", view);
        assert_eq!(served.ask("DELETE", "/views", view), (200, made));
        assert_eq!(served.ask("DELETE", "/views", view).0, 404);
        assert_eq!(served.ask("GET", "/views", "").1, json!([]));
    });
}

#[test]
fn a_tensor_with_a_base_is_detached() {
    within(60, || {
        let served = Served::new();
        let derived = json!({ "name": "u", "length": 8192, "format": "bf16", "base": "t" });
        let (status, made) = served.ask("POST", "/tensors", &derived.to_string());
        assert_eq!((status, &made["base"]), (201, &json!("t")), "{made}");
        assert_eq!(served.ask("DELETE", "/tensors/t", "").0, 409);
        assert_eq!(served.ask("GET", "/detach", ""), (200, json!([])));
        let (status, detached) = served.ask("POST", "/detach", r#"{"tensor":"u"}"#);
        assert_eq!((status, &detached[0]["name"], &detached[0]["base"]), (200, &json!("u"), &Value::Null));
        assert_eq!(served.ask("DELETE", "/tensors/t", "").0, 204);
        assert_eq!(served.ask("POST", "/detach", r#"{"tensor":"t"}"#).0, 404);
        assert_eq!(served.ask("POST", "/detach", r#"{"model":"m"}"#).0, 409);
        for bad in ["{}", r#"{"tensor":7}"#, r#"{"tensor":"u","model":"m"}"#, r#"{"other":"u"}"#] {
            assert_eq!(served.ask("POST", "/detach", bad).0, 400, "{bad}");
        }
    });
}

#[test]
fn stats_metrics_and_the_page_are_served_and_live() {
    within(60, || {
        let served = Served::new();
        let reads = |stats: &Value| stats["requests"]["base"]["reads"].as_u64().unwrap();
        let before = reads(&served.ask("GET", "/stats", "").1);
        served.device.read_base(0, &mut [0; 4096]).unwrap();
        assert_eq!(reads(&served.ask("GET", "/stats", "").1), before + 1);

        let (status, head, text) = answer(served.tcp(), &request("GET", "/metrics", ""));
        assert_eq!(status, 200);
        assert!(
            head.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8"),
            "{head}"
        );
        assert!(text.ends_with("# EOF\n"));
        let line = format!("lamina_window_reads_total{{window=\"base\"}} {}\n", before + 1);
        assert!(text.contains(&line), "{text}");
        assert!(text.contains("lamina_tensor_logical_bytes{tensor=\"t\",format=\"bf16\"} 8192\n"), "{text}");

        let (status, head, page) = answer(served.tcp(), &request("GET", "/", ""));
        assert_eq!(status, 200);
        assert!(head.contains("content-security-policy: default-src 'none'"), "{head}");
        assert!(page.contains("<title>Lamina</title>") && !page.contains("http"), "self-contained");
    });
}

#[test]
fn every_counter_of_traffic_is_the_same_in_json_and_metrics() {
    within(60, || {
        let served = Served::new();
        let device = &served.device;
        // Over data, so that a block is coded anew; a KV tensor, so that some is staged.
        device.write_base(16 << 10, &noise(2, 4096)).unwrap();
        device.create_tensor(spec("u", 16 << 10, 4096)).unwrap();
        let rows = json!({ "kind": "kv", "channels": 64, "window": 128 });
        let kv =
            json!({ "name": "kv", "dpa": 32 << 10, "length": 32 << 10, "format": "bf16", "layout": rows });
        assert_eq!(served.ask("POST", "/tensors", &kv.to_string()).0, 201);
        let view = device.create_view("kv", "full").unwrap();
        device.write_base(32 << 10, &noise(3, 32 << 10)).unwrap();
        device.write_base(100, &[1; 100]).unwrap();
        device.write_base(32 << 10, &[1; 130]).unwrap();
        device.read_base(0, &mut [0; 16 << 10]).unwrap();
        device.read_base(32 << 10, &mut [0; 200]).unwrap();
        device.read_views(view.offset, &mut vec![0; 32 << 10]).unwrap();
        let (_, _, metrics) = answer(served.tcp(), &request("GET", "/metrics", ""));
        let stats = served.ask("GET", "/stats", "").1;

        let reported = |pointer: &str| stats.pointer(pointer).unwrap_or_else(|| panic!("no {pointer}"));
        let same = |pointer: &str, metric: &str| {
            let number = reported(pointer).as_u64().unwrap_or_else(|| panic!("{pointer} is no number"));
            assert!(
                metrics.contains(&format!("\nlamina_{metric} {number}\n")),
                "{pointer} {number}: {metrics}"
            );
            number
        };
        let names = [
            ("reads", "reads"),
            ("bytes", "read_bytes"),
            ("blocks", "read_blocks"),
            ("planes_fetched", "fetched_planes"),
            ("stored_bytes_fetched", "stored_fetched_bytes"),
            ("plain_bytes_fetched", "plain_fetched_bytes"),
            ("gcomp_bytes_fetched", "gcomp_fetched_bytes"),
            ("index_bytes_fetched", "index_fetched_bytes"),
            ("gcomp_index_bytes_fetched", "gcomp_index_fetched_bytes"),
            ("staged_blocks", "staged_blocks"),
            ("staged_bytes", "staged_bytes"),
        ];
        for (json, metric) in names {
            let window = |at: &str, prefix: &str, label: &str| {
                same(&format!("{at}/{json}"), &format!("{prefix}_{metric}_total{{{label}}}"))
            };
            let sum = window("/requests/base", "window", r#"window="base""#)
                + window("/requests/views", "window", r#"window="views""#)
                + window("/reads_for_writes", "for_writes", r#"window="base""#)
                + window("/views/0", "view", r#"tensor="kv",view="full""#)
                + window("/tensors/0/base", "tensor", r#"tensor="t""#);
            assert!(sum > 0, "nothing was counted as {json}");
        }
        for (json, metric) in [
            ("/index/hits", "index_cache_hits"),
            ("/index/misses", "index_cache_misses"),
            ("/index/bytes_fetched", "index_fetched_bytes"),
            ("/index/bytes_written", "index_written_bytes"),
            ("/index/gcomp_hits", "gcomp_index_cache_hits"),
            ("/index/gcomp_misses", "gcomp_index_cache_misses"),
            ("/index/gcomp_bytes_fetched", "gcomp_index_fetched_bytes"),
            ("/index/gcomp_bytes_written", "gcomp_index_written_bytes"),
            ("/maintenance/recoded_blocks", "recoded_blocks"),
            ("/maintenance/stored_bytes_fetched", "recoding_fetched_bytes"),
            ("/maintenance/stored_bytes_written", "recoding_stored_bytes"),
        ] {
            assert!(same(json, &format!("{metric}_total")) > 0, "{json}");
        }
        same("/maintenance/index_bytes_fetched", "recoding_index_fetched_bytes_total");
        same("/maintenance/moved_blocks", "moved_blocks_total");
        same("/maintenance/moved_bytes", "moved_bytes_total");
        // Requests of 16 KiB and of 200 bytes, and one of 32 KiB.
        for (pointer, window, up_to, fills) in [
            ("/requests/base_fills/0", "base", "4096", 1),
            ("/requests/base_fills/2", "base", "16384", 1),
            ("/requests/view_fills/3", "views", "32768", 1),
            ("/requests/view_fills/6", "views", "+Inf", 0),
        ] {
            let metric = format!("fills_total{{window=\"{window}\",up_to_bytes=\"{up_to}\"}}");
            assert_eq!(same(&format!("{pointer}/fills"), &metric), fills, "{pointer}");
        }
        // 100 bytes at 100 fill lines 1 and 3 in part, 130 at the begin of another block line 2.
        assert_eq!(*reported("/reads_for_writes/plain_bytes_fetched"), 2 * 64 + 64);
        assert_eq!(
            (reported("/reads_for_writes/reads"), reported("/reads_for_writes/bytes")),
            (&json!(2), &json!(230))
        );
        // The window of 16 KiB that is open answered 200 bytes at its begin, and its half of the
        // view.
        assert_eq!(*reported("/requests/base/staged_bytes"), 256);
        assert_eq!(*reported("/requests/views/staged_bytes"), 16 << 10);
        assert_eq!(*reported("/requests/views/plain_bytes_fetched"), 16 << 10);
        assert_eq!(
            (reported("/device/codec"), reported("/device/gcomp_codec")),
            (&json!("tree"), &json!("lz4"))
        );
        assert!(metrics.contains(r#"gcomp_codec="lz4""#), "{metrics}");

        let (_, _, page) = answer(served.tcp(), &request("GET", "/", ""));
        assert!(page.contains("not a load of 64 bytes") && page.contains("gcomp_codec"));
    });
}

#[test]
fn a_discard_drops_bytes_and_a_flush_answers() {
    within(60, || {
        let served = Served::new();
        assert_eq!(served.ask("POST", "/flush", "").0, 200);
        assert_eq!(served.ask("POST", "/flush", r#"{"offset":4096,"length":4096}"#).0, 200);
        assert_eq!(served.ask("POST", "/discard", r#"{"offset":0,"length":4096}"#).0, 200);
        let mut bytes = [1; 4096];
        served.device.read_base(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0; 4096]);
    });
}

#[test]
fn bad_requests_get_a_reason_and_the_right_status() {
    within(60, || {
        let served = Served::new();
        let cases = [
            ("GET", "/nothing", "", 404, "nothing here"),
            ("PUT", "/stats", "", 405, "method"),
            ("POST", "/views", "{", 400, "no request"),
            ("POST", "/views", "[]", 400, "no request"),
            ("POST", "/views", r#"{"tensor":"t"}"#, 400, "spelling"),
            ("POST", "/views", r#"{"tensor":"t","spelling":"full","x":1}"#, 400, "unknown field"),
            ("POST", "/views", r#"{"tensor":"u","spelling":"full"}"#, 404, "\"u\""),
            ("POST", "/views", r#"{"tensor":"t","spelling":"e9m3"}"#, 422, "e9m3"),
            ("POST", "/views", "\u{0}\u{1}", 400, "no request"),
            ("POST", "/tensors", r#"{"name":"t","length":2,"format":"bf16"}"#, 409, "already"),
            ("POST", "/tensors", r#"{"name":"u","length":2,"format":"bf17"}"#, 400, "bf17"),
            ("POST", "/tensors", r#"{"name":"u","length":3,"format":"bf16"}"#, 422, "3"),
            ("POST", "/tensors", r#"{"name":"u","dpa":0,"length":2,"format":"bf16"}"#, 409, "overlap"),
            ("POST", "/tensors", r#"{"name":"u","dpa":1,"length":2,"format":"bf16"}"#, 422, "4096"),
            ("POST", "/tensors", r#"{"name":"u","length":99999999,"format":"opaque"}"#, 507, "99999999"),
            ("POST", "/flush", r#"{"offset":16777216,"length":1}"#, 422, "pass the end"),
            (
                "POST",
                "/flush",
                r#"{"offset":9223372036854775808}"#,
                422,
                "the offset 0x8000000000000000 passes",
            ),
            ("POST", "/flush", r#"{"offset":-1}"#, 400, "no request"),
            ("POST", "/models", r#"{"path":""}"#, 422, "the path of a model is empty"),
            ("POST", "/hosts/x/revoke", "{}", 404, "no host x shares this memory; it has no hosts"),
            (
                "POST",
                "/tensors",
                r#"{"name":"u","length":2,"format":"bf16","shape":[4294967296,4294967296]}"#,
                422,
                "the product of the shape passes 18446744073709551615 elements",
            ),
            ("POST", "/discard", "", 400, "offset"),
            ("POST", "/discard", r#"{"offset":18446744073709551615,"length":2}"#, 422, "pass the end"),
        ];
        for (method, path, body, status, word) in cases {
            let (found, answer) = served.ask(method, path, body);
            let error = answer["error"].as_str().unwrap_or_default();
            assert_eq!(found, status, "{method} {path} {body}: {error}");
            assert!(error.contains(word), "{method} {path} {body}: {error:?} does not say {word:?}");
        }
        assert_eq!(served.ask("GET", "/tensors", "").1.as_array().unwrap().len(), 1, "nothing was made");
    });
}

#[test]
fn a_body_past_the_bound_is_refused() {
    within(60, || {
        let served = Served::new();
        let body = format!(r#"{{"tensor":"{}"}}"#, "x".repeat(2 << 20));
        let mut stream = served.unix();
        // The answer may come, and the connection close, before all of it is sent.
        let _ = stream.write_all(request("POST", "/views", &body).as_bytes());
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(answer.starts_with("HTTP/1.1 413") && answer.contains("1048576 bytes"), "{answer}");
    });
}

#[test]
fn web_pages_from_elsewhere_cannot_reach_it() {
    within(60, || {
        let served = Served::new();
        let rebound = request("GET", "/stats", "").replace("Host: localhost", "Host: evil.example");
        assert_eq!(answer(served.tcp(), &rebound).0, 403);
        // What a browser says of a page of another site, or of another port, that asks.
        let asked_for = |path: &str, headers: &str| {
            let asked =
                request("GET", path, "").replace("Host: localhost", &format!("Host: localhost{headers}"));
            answer(served.tcp(), &asked).0
        };
        let asked = |headers: &str| asked_for("/stats", headers);
        for foreign in [
            "Sec-Fetch-Site: cross-site",
            "Sec-Fetch-Site: same-site",
            "Origin: http://evil.example",
            "Origin: null",
        ] {
            assert_eq!(asked(&format!("\r\n{foreign}")), 403, "{foreign}");
        }
        assert_eq!(asked("\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Dest: iframe"), 403);
        for own in ["Sec-Fetch-Site: same-origin", "Sec-Fetch-Site: none", "Origin: http://localhost"] {
            assert_eq!(asked(&format!("\r\n{own}")), 200, "{own}");
        }
        assert_eq!(asked(":9\r\nOrigin: http://localhost:9"), 200, "through a tunnel");
        // A link to a page that somebody follows, and what no page is.
        let followed = "\r\nSec-Fetch-Site: cross-site\r\nSec-Fetch-Dest: document";
        assert_eq!(asked_for("/", followed), 200);
        // This device has none, which is no refusal.
        assert_eq!(asked_for("/planner", followed), 404);
        assert_eq!((asked_for("/live", followed), asked(followed)), (403, 403));
        // What a form or a simple cross-origin request can send.
        for kind in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"] {
            let simple = request("POST", "/discard", r#"{"offset":0,"length":4096}"#)
                .replace("application/json", kind);
            assert_eq!(answer(served.tcp(), &simple).0, 415, "{kind}");
        }
        for (method, path) in [("DELETE", "/tensors/t"), ("GET", "/trace")] {
            let untyped = request(method, path, "").replace("Content-Type: application/json\r\n", "");
            let (status, _, why) = answer(served.tcp(), &untyped);
            assert!(status == 415 && why.contains("this request needs Content-Type"), "{path}: {why}");
        }
        let asking = request("OPTIONS", "/discard", "");
        let (status, head, _) = answer(served.tcp(), &asking);
        assert!(status == 405 && !head.contains("access-control"), "{head}");
        assert_eq!(served.device.tensors().len(), 1);
    });
}

#[test]
fn other_users_are_refused_over_tcp() {
    within(120, || {
        let served = Served::new();
        assert_eq!(answer(served.tcp(), &request("GET", "/stats", "")).0, 200);
        if !nix::unistd::geteuid().is_root() {
            return lamina_skipped::part("not root: no connection of another user can be made");
        }
        let port = served.api.address().unwrap().port();
        let asks =
            [request("GET", "/stats", ""), request("POST", "/discard", r#"{"offset":0,"length":4096}"#)];
        for requested in asks {
            // The user whom nothing belongs to.
            let asking = Command::new("bash")
                .args(["-c", r#"exec 3<>"/dev/tcp/127.0.0.1/$1" && printf %s "$2" >&3 && cat <&3"#, "bash"])
                .args([&port.to_string(), &requested])
                .current_dir("/")
                .uid(65_534)
                .output();
            let asking = match asking {
                // A container may have no other user.
                Err(why) if why.raw_os_error() == Some(nix::libc::EINVAL) => {
                    return lamina_skipped::part(format!("no user 65534: {why}"));
                }
                asking => asking.unwrap(),
            };
            let said = String::from_utf8_lossy(&asking.stdout);
            assert!(said.starts_with("HTTP/1.1 403") && said.contains("user 65534's"), "{said}");
        }
        let mut bytes = [0; 4096];
        served.device.read_base(0, &mut bytes).unwrap();
        assert!(bytes[..] == noise(1, 8192)[..4096], "nothing was discarded");
    });
}

#[test]
fn only_loopback_addresses_are_listened_on() {
    within(60, || {
        let served = Served::new();
        let everywhere = Some(SocketAddr::from(([0, 0, 0, 0], 0)));
        let control = Control::new(Arc::clone(&served.device));
        let other = served.directory.path().join("other");
        let refused = served.runtime.block_on(async { Api::serve(control.clone(), &other, everywhere) });
        assert!(matches!(refused, Err(ServeError::NotLoopback { .. })));
        assert!(!other.exists(), "nothing stays behind");
        let taken = served.runtime.block_on(async { Api::serve(control, &other, served.api.address()) });
        assert!(matches!(&taken, Err(ServeError::Tcp { .. })), "a port in use");
    });
}

#[test]
fn bodies_that_come_slowly_keep_nobody_out() {
    within(60, || {
        let served = Served::new();
        let start = "POST /views HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n";
        // As many as there are places, each of which is waited for.
        let begin = |_| {
            let mut stream = served.unix();
            stream.write_all(start.as_bytes()).unwrap();
            let mut go_on = [0; b"HTTP/1.1 100 Continue\r\n\r\n".len()];
            stream.read_exact(&mut go_on).unwrap();
            assert!(go_on.starts_with(b"HTTP/1.1 100 "), "{}", String::from_utf8_lossy(&go_on));
            stream
        };
        let mut slow: Vec<_> = (0..64).map(begin).collect();
        assert_eq!(served.ask("GET", "/stats", "").0, 200);
        // One gave way before its body was late, which would have been an answer.
        let mut said = Vec::new();
        let _ = slow[0].read_to_end(&mut said);
        assert!(said.is_empty(), "{}", String::from_utf8_lossy(&said));
    });
}

#[test]
fn peers_that_stop_halfway_do_not_disturb_others() {
    within(60, || {
        let served = Served::new();
        // Silent, cut off in the head, cut off in the body, garbage: all kept open.
        let mut open = Vec::new();
        for start in [
            "",
            "GET /sta",
            "POST /views HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{",
        ] {
            for _ in 0..10 {
                let mut stream = served.unix();
                stream.write_all(start.as_bytes()).unwrap();
                open.push(stream);
            }
        }
        let mut garbage = served.unix();
        garbage.write_all(&noise(5, 4096)).unwrap();
        assert_eq!(served.ask("GET", "/stats", "").0, 200);
        // A peer that closes its sending side after asking still gets its answer.
        let mut half = served.unix();
        half.write_all(request("GET", "/tensors", "").as_bytes()).unwrap();
        half.shutdown(Shutdown::Write).unwrap();
        let mut answer = String::new();
        half.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        drop(open);
        assert_eq!(served.ask("GET", "/stats", "").0, 200);
    });
}
