use lamina_codec::format::Format;
use lamina_device::device::{Device, DeviceConfig};
use lamina_device::layout::Layout;
use lamina_device::tensor::TensorSpec;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use super::*;

struct Rig {
    device: Arc<Device>,
    live: Live,
    runtime: Runtime,
}

impl Rig {
    /// A device of so many tensors, with a view each.
    fn new(tensors: usize) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let device = Arc::new(Device::new(DeviceConfig::new(128 << 20, 128 << 20)).unwrap());
        let rig = Self { live: Live::new(Control::new(Arc::clone(&device))), device, runtime };
        let specs = (0..tensors).map(|number| TensorSpec {
            name: format!("t{number:05}"),
            dpa: None,
            length: 8192,
            elements: None,
            shape: Vec::new(),
            format: Format::Bf16,
            layout: Layout::Weight,
            codec: None,
            base: None,
        });
        rig.device.create_tensors(specs.collect()).unwrap();
        for number in 0..tensors {
            rig.device.create_view(&format!("t{number:05}"), "e8m3").unwrap();
        }
        rig
    }

    fn watch(&self) -> Result<Watched, TooMany> {
        self.live.watch(self.runtime.handle())
    }

    /// The next event of a viewer: its name and its data.
    fn next(&self, watched: &mut Watched) -> (String, Value) {
        let event = self.runtime.block_on(watched.0.recv()).unwrap();
        let text = std::str::from_utf8(&event).unwrap().strip_suffix("\n\n").unwrap();
        let (name, data) = text.split_once('\n').unwrap();
        let data = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        (name.strip_prefix("event: ").unwrap().to_owned(), data)
    }
}

#[test]
fn a_viewer_gets_all_of_it_and_then_what_changed() {
    let rig = Rig::new(3);
    let mut viewer = rig.watch().unwrap();
    let (name, whole) = rig.next(&mut viewer);
    assert_eq!((name.as_str(), &whole["seconds"]), ("whole", &Value::Null));
    assert_eq!(
        (whole["tensors"].as_array().unwrap().len(), whole["views"].as_array().unwrap().len()),
        (3, 3)
    );
    rig.device.write_base(0, &[7; 8192]).unwrap();
    let offset = rig.device.views()[0].offset;
    rig.device.read_views(offset, &mut [0; 8192]).unwrap();
    rig.device.remove_tensor("t00002").unwrap();
    let (name, tick) = rig.next(&mut viewer);
    assert!(name == "tick" && tick["seconds"].as_f64().unwrap() > 0.5, "{tick}");
    let named = |list: &str, field: &str| {
        let rows = tick[list].as_array().unwrap().iter();
        rows.map(|row| row[field].clone()).collect::<Vec<_>>()
    };
    assert_eq!(named("tensors", "name"), ["t00000"]);
    assert_eq!(named("views", "tensor"), ["t00000"]);
    assert_eq!(tick["tensors_gone"], json!(["t00002"]));
    assert_eq!(tick["views_gone"], json!([["t00002", "e8m3"]]));
    assert_eq!(tick["hottest"][0]["tensor"], "t00000");
    assert_eq!(tick["hottest"][0]["bytes"], 8192);
    let formats = &tick["formats"][0];
    assert_eq!(
        (&formats["format"], &formats["bits"], &formats["plane_bytes"]),
        (&json!("bf16"), &json!(16), &json!(1024))
    );
    let precision = tick["precisions"].as_array().unwrap().iter().find(|row| row["view"] == "e8m3").unwrap();
    assert_eq!((&precision["tensors"], &precision["bytes"]), (&json!(2), &json!(8192)));
    let requests = |update: &Value| {
        let rows = update["latency"].as_array().unwrap().iter();
        rows.map(|row| (row["requests"].clone(), row["now_requests"].clone())).collect::<Vec<_>>()
    };
    assert_eq!(requests(&tick), [(0, 0), (1, 1), (1, 1)].map(|(all, now)| (json!(all), json!(now))));
    let (read, written) = (&tick["latency"][1], &tick["latency"][2]);
    assert_eq!((&read["window"], &read["request"]), (&json!("views"), &json!("read")));
    assert_eq!((&written["window"], &written["request"]), (&json!("base"), &json!("write")));
    // That of all is not above the longest, which the one of now does not know.
    let time = |name: &str| read[name].as_f64().unwrap();
    assert!(time("now_p50_seconds") > 0.0 && time("p99_seconds") <= time("now_p99_seconds"));
    assert!(time("p99_seconds") <= time("max_seconds"));
    // Nothing changes: nothing is said of any.
    let (_, tick) = rig.next(&mut viewer);
    assert_eq!(requests(&tick), [(0, 0), (1, 0), (1, 0)].map(|(all, now)| (json!(all), json!(now))));
    assert!(tick["latency"][1]["now_p50_seconds"].is_null());
    assert_eq!((&tick["tensors"], &tick["views"], &tick["hottest"]), (&json!([]), &json!([]), &json!([])));
}

#[test]
fn viewers_are_bounded_and_who_does_not_read_gets_all_of_it_later() {
    let rig = Rig::new(1);
    let mut slow = rig.watch().unwrap();
    let mut others: Vec<_> = (1..VIEWERS).map(|_| rig.watch().unwrap()).collect();
    assert!(rig.watch().is_err());
    others.pop();
    let mut quick = rig.watch().unwrap();
    assert_eq!(rig.next(&mut quick).0, "whole");
    // What waits for the slow one is bounded.
    for _ in 0..=WAITING {
        assert_eq!(rig.next(&mut quick).0, "tick");
    }
    let names: Vec<_> = (0..WAITING).map(|_| rig.next(&mut slow).0).collect();
    assert_eq!(names, ["whole", "tick"]);
    let (name, whole) = rig.next(&mut slow);
    assert!(name == "whole" && whole["tensors"].as_array().unwrap().len() == 1, "{name}");
    assert_eq!(rig.next(&mut slow).0, "tick");
    // Nobody looks: nothing is computed, and nothing kept.
    drop((slow, others, quick));
    let begun = Instant::now();
    while rig.live.lock().last.is_some() {
        assert!(begun.elapsed() < 10 * TICK);
        std::thread::sleep(TICK / 10);
    }
    assert_eq!(rig.next(&mut rig.watch().unwrap()).0, "whole");
}
