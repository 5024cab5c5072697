//! Several guests on one device: each with a partition of its own, and hosts that share a region
//! and exchange messages through it, right and wrong.
//!
//! These need what `./x` sets up: the guest's programs and image, a QEMU, FUSE.

use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use lamina_guest::{Event, MessagePlan, Phase, Plan, Role, WritePlan};
use lamina_run::{
    bundled,
    daemon::{Ready, SharedDaemon},
    judge::Judge,
    programs,
    visit::Visit,
};

const ROUNDS: u64 = 4;
const PAGES: u64 = 3;

/// What a party leaves out, by the name of the exchange.
const EXCHANGES: [(&str, bool, bool); 4] = [
    ("correct", true, true),
    ("missing-flush", false, true),
    ("missing-invalidate", true, false),
    ("missing-both", false, false),
];

/// One side of all exchanges, each at its own place.
fn exchanges(role: Role) -> Plan {
    let exchange = |(number, (name, flush, invalidate)): (u64, (&str, bool, bool))| MessagePlan {
        name: name.to_owned(),
        role,
        offset: number << 20,
        pages: PAGES,
        rounds: ROUNDS,
        flush,
        invalidate,
    };
    let messages = (1..).zip(EXCHANGES).map(exchange).collect();
    Plan { views: Some(Vec::new()), read_base: false, messages, ..Plan::default() }
}

/// What the consumer saw: every message as it was sent where both did their part, and otherwise, in
/// every round, what there was before the first.
fn judge(events: &[Event]) {
    let mut seen: BTreeMap<&str, Vec<(u64, Option<u64>)>> = BTreeMap::new();
    for event in events {
        match event {
            Event::Message { exchange, round, seen: found } => {
                seen.entry(exchange).or_default().push((*round, *found));
            }
            Event::Problem { step, message } => panic!("{step}: {message}"),
            _ => {}
        }
    }
    for (name, flush, invalidate) in EXCHANGES {
        let right = flush && invalidate;
        let expected: Vec<_> =
            (1..=ROUNDS).map(|round| (round, Some(if right { round } else { 0 }))).collect();
        assert_eq!(seen[name], expected, "{name}");
    }
}

/// Whether the counters say that lines were merged and pages were invalidated, and that no
/// write-back came from nowhere.
fn counted(device: &SharedDaemon) {
    let stats = device.stats().unwrap();
    for host in stats["hosts"].as_array().unwrap() {
        let count = |name: &str| host[name].as_u64().unwrap();
        assert!(count("lines_merged") > 0 && count("pages_invalidated") > 0, "{host}");
        assert_eq!((count("pages_unknown"), count("pages_evicted")), (0, 0), "{host}");
    }
}

/// Runs the guest's program here, on a host's files.
fn party(folder: &Path, role: Role, export: &Ready) -> std::process::Child {
    let name = format!("{role:?}");
    let plan = folder.join(format!("{name}.json"));
    fs::write(&plan, serde_json::to_vec(&exchanges(role)).unwrap()).unwrap();
    Command::new(programs::guest("lamina-guest").unwrap())
        .arg(&plan)
        .arg("--report")
        .arg(folder.join(format!("{name}.report")))
        .env("LAMINA_BASE", &export.base.path)
        .env("LAMINA_VIEWS", &export.views.path)
        .env("LAMINA_CTL", &export.ctl)
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn programs_on_two_hosts_files_get_messages_across_only_if_both_do_their_part() {
    let folder = tempfile::tempdir().unwrap();
    let options = ["--capacity", "16M", "--views-capacity", "16M", "--host", "one", "--host", "two"];
    let device = SharedDaemon::start(&options).unwrap();
    let mut parties = [
        party(folder.path(), Role::Consumer, &device.export_of("two").unwrap()),
        party(folder.path(), Role::Producer, &device.export_of("one").unwrap()),
    ];
    for party in &mut parties {
        assert!(party.wait().unwrap().success());
    }
    let report = fs::read_to_string(folder.path().join("Consumer.report")).unwrap();
    judge(&report.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Event>>());
    counted(&device);
    device.stop().unwrap();
}

/// Boots a guest for a plan and collects its events.
fn visit(export: &Ready, plan: Plan, console: &Path) -> Vec<Event> {
    let limit = Duration::from_secs(300);
    let visit = Visit { plan, files: Vec::new(), limit, console: console.to_owned(), cpus: 1 };
    let mut events = Vec::new();
    let visited = visit.make(export, |event, _| {
        events.push(event);
        Ok(())
    });
    assert_eq!(visited.unwrap().outcome.status, Some(0), "{events:?}");
    events
}

/// Boots two guests at once.
fn both(exports: &[Ready; 2], plans: &[Plan; 2], folder: &Path) -> [Vec<Event>; 2] {
    let consoles = ["one.log", "two.log"].map(|name| folder.join(name));
    std::thread::scope(|scope| {
        let [first, second] = [0, 1].map(|guest| {
            let (export, plan, console) = (&exports[guest], plans[guest].clone(), &consoles[guest]);
            scope.spawn(move || visit(export, plan, console))
        });
        [first.join().unwrap(), second.join().unwrap()]
    })
}

#[test]
fn two_booted_hosts_get_messages_across_only_if_both_do_their_part() {
    let folder = tempfile::tempdir().unwrap();
    let options = ["--capacity", "256M", "--views-capacity", "256M", "--host", "one", "--host", "two"];
    let device = SharedDaemon::start(&options).unwrap();
    let exports = ["one", "two"].map(|name| device.export_of(name).unwrap());
    let plans = [Role::Producer, Role::Consumer].map(exchanges);
    let [_, consumer] = both(&exports, &plans, folder.path());
    judge(&consumer);
    counted(&device);
    device.stop().unwrap();
}

#[test]
fn two_booted_guests_have_their_own_tensors_and_neither_sees_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let models = bundled().unwrap();
    let guest = |name: &str, model: &Path| format!("{name}=256M,model={}", model.display());
    let (alice, bob) = (guest("alice", &models[0]), guest("bob", &models[1]));
    let options = ["--guest", &alice, "--guest", &bob, "--views", "full,e8m3"];
    let device = SharedDaemon::start(&options).unwrap();
    let judges = [0, 1].map(|which| Judge::new(&models[which..=which]).unwrap());
    let plans = [0, 1].map(|which: usize| {
        let tensor = judges[which].names().next().unwrap().to_owned();
        Plan {
            views: Some(vec!["e8m3".to_owned()]),
            counters: true,
            // Both write at once, at the same place of their windows.
            write: Some(WritePlan { tensor, seed: 7 + which as u64 }),
            hostile: true,
            ..Plan::default()
        }
    });
    let exports = ["alice", "bob"].map(|name| device.export_of(name).unwrap());
    let reported = both(&exports, &plans, folder.path());
    for (judge, events) in judges.iter().zip(&reported) {
        let mut read = BTreeMap::new();
        let mut rotation = None;
        for event in events {
            match event {
                Event::View { phase: Phase::Loaded, tensor, view, sha256, .. } => {
                    assert_eq!(*sha256, judge.sha256(tensor, view, 0).unwrap(), "{tensor} {view}");
                    *read.entry(tensor.as_str()).or_insert(0) += 1;
                }
                Event::Written { rotation: by, .. } => rotation = Some(*by),
                Event::View { phase: Phase::Written, tensor, view, sha256, .. } => {
                    let want = judge.sha256(tensor, view, rotation.expect("written before")).unwrap();
                    assert_eq!(*sha256, want, "{tensor} {view}, written");
                }
                Event::Counters { stats } => {
                    assert_eq!(stats["tensors"].as_array().unwrap().len(), judge.names().count());
                    assert!(
                        stats["partitions"].is_null()
                            && stats["requests"]["base"]["bytes"].as_u64() > Some(0)
                    );
                }
                _ => {}
            }
        }
        assert!(rotation.is_some());
        // All of its own, through the base window and in the view, and no other.
        let names: Vec<_> = judge.names().collect();
        assert_eq!(read.keys().copied().collect::<Vec<_>>(), names);
        assert!(read.values().all(|times| *times == 2));
        assert!(events.iter().any(|event| matches!(event, Event::PastEnd { .. })));
    }
    let stats = device.stats().unwrap();
    assert!(
        stats["partitions"].as_array().unwrap().iter().all(|part| part["stored_bytes"].as_u64() > Some(0))
    );
    device.stop().unwrap();
}
