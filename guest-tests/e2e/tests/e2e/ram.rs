//! The base window as a guest's RAM: somebody else's memory tests on it, and what its bytes are
//! stored as.
//!
//! `lamina-shim up --system-ram` makes it a NUMA node of its own; what is bound to that node
//! computes in compressed memory. The programs verify what they stored themselves: stress-ng and
//! memtester end with an error where a byte is wrong. `LAMINA_LONG` gives them more time and
//! memory.

use std::sync::mpsc;
use std::time::Duration;

use lamina_qemu::{BootConfig, GuestFile, boot};
use lamina_run::{
    daemon::{Daemon, Serve},
    programs,
};
use serde_json::Value;

/// A step's end is a line `step NAME`; then the guest waits until nothing more is asked of the
/// device.
const SCRIPT: &str = r#"#!/bin/sh
fail() { echo "FAILED: $*"; exit 1; }
step() { echo "step $1"; sleep 4; }
lamina-shim up --system-ram || fail 'lamina-shim'
node=
for n in /sys/devices/system/node/node[1-9]*; do
    total=$(sed -n 's/.*MemTotal: *\([0-9]*\) kB/\1/p' "$n/meminfo")
    [ "$total" -gt 0 ] && node=${n##*node} && echo "node $node $total"
done
[ -n "$node" ] || fail 'the base window is no memory'
on="numactl --membind=$node"
taken() { sed -n 's/.*MemUsed: *\([0-9]*\) kB/\1/p' "/sys/devices/system/node/node$node/meminfo"; }

# Processes whose memory is text, a sorted copy of it, and tables.
(cat /proc/kallsyms; cat /bin/busybox | od -A n -t x1) | head -c SORT >/text
$on sh -c 'sort -k3 /text | awk "{ n[\$NF]++; l[NR] = \$0 } END { print NR > \"/lines\"; system(\"sleep 20\") }"' &
sleep SETTLE
echo "used $(taken)"
step processes
wait
[ "$(cat /lines)" = "$(awk 'END { print NR }' /text)" ] || fail 'a line was lost'

$on memtester MEMTESTER 1 >/out 2>&1 || { tail -n 30 /out; fail memtester; }
tr '\r\b' '\n\n' </out | grep -c ': *ok\|^ok' | sed 's/^/memtester-ok /'
grep -i fail /out && fail memtester
step memtester

$on stress-ng --vm 1 --vm-bytes VM --vm-method all --vm-keep --verify --timeout SECONDS --metrics-brief || fail 'stress-ng --vm'
step vm
$on stress-ng --mmap 1 --mmap-bytes VM --verify --timeout SECONDS --metrics-brief || fail 'stress-ng --mmap'
step mmap
dmesg | grep -i 'bad page\|mce\|hardware error\|bus error' && fail 'the kernel saw an error'
exit 0
"#;

fn device() -> Daemon {
    let serve = Serve {
        models: Vec::new(),
        views: Vec::new(),
        kv: Vec::new(),
        mode: "trace".to_owned(),
        codec: "zstd".to_owned(),
        capacity: Some("256M".to_owned()),
        read_ahead_kb: 4,
        devices: None,
    };
    Daemon::start_observed(&serve).unwrap()
}

fn number(stats: &Value, path: &str) -> u64 {
    stats.pointer(path).and_then(Value::as_u64).unwrap_or_else(|| panic!("no {path}: {stats:#}"))
}

#[expect(clippy::cast_precision_loss, reason = "a number to be looked at")]
fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[test]
fn memory_tests_in_a_guest_find_no_wrong_byte_on_the_node_that_is_the_base_window() {
    let long = std::env::var_os("LAMINA_LONG").is_some();
    let pick = |short: &str, long_one: &str| if long { long_one.to_owned() } else { short.to_owned() };
    let script = SCRIPT
        .replace("SORT", &pick("2000000", "12000000"))
        .replace("SETTLE", &pick("12", "60"))
        .replace("MEMTESTER", &pick("2M", "64M"))
        .replace("VM", &pick("24M", "128M"))
        .replace("SECONDS", &pick("8", "240"));
    let limit = Duration::from_secs(if long { 3600 } else { 300 });

    let device = device();
    let (base, views) = (&device.ready.base, &device.ready.views);
    let mut config = BootConfig::new(&base.path, base.bytes, &views.path, views.bytes);
    config.extras = true;
    config.ctl_socket = Some(device.ready.ctl.clone());
    config.programs = vec![
        GuestFile::program("/bin/lamina-shim", programs::guest("lamina-shim").unwrap()),
        GuestFile::script("/run.sh", script),
    ];
    config.run = Some("/run.sh".into());
    let (sender, lines) = mpsc::channel();
    let guest = boot(&config, move |line| sender.send(line.to_owned()).unwrap_or_default()).unwrap();
    let (mut seen, mut steps) = (Vec::new(), Vec::new());
    while let Ok(line) = lines.recv_timeout(limit) {
        println!("{line}");
        if let Some(name) = line.strip_prefix("step ") {
            // What the guest's processor stored is in the host's page cache until it is flushed.
            device.ask(&["flush"]).unwrap();
            let stats = device.stats().unwrap();
            let (live, opaque) = (number(&stats, "/blocks/live"), number(&stats, "/blocks/opaque"));
            assert_eq!(live, opaque, "no tensor covers the guest's memory");
            println!(
                "after {name}: {:.1} MiB that hold data, stored as {:.1} MiB, opaque ratio {:.2}; {} reads, {} writes",
                mib(number(&stats, "/device/logical_bytes")),
                mib(number(&stats, "/device/stored_bytes")),
                stats["device"]["ratio"].as_f64().unwrap_or(f64::NAN),
                number(&stats, "/requests/base/reads"),
                number(&stats, "/writes/base_writes"),
            );
            steps.push((name.to_owned(), stats));
        }
        seen.push(line);
    }
    let outcome = guest.wait(Some(limit)).unwrap();
    assert_eq!(outcome.status, Some(0), "{seen:#?}");

    let names: Vec<&str> = steps.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["processes", "memtester", "vm", "mmap"]);
    let node = seen.iter().find_map(|line| line.strip_prefix("node ")).expect("the node is told");
    let total: u64 = node.split(' ').nth(1).unwrap().parse().unwrap();
    assert!(total << 10 > base.bytes / 2, "a node of {total} KiB");
    // Each step's traffic reached the device, no read of it met damage, and it is no more than a
    // page for each byte range that was touched.
    let mut before = (0, 0);
    for (name, stats) in &steps {
        let writes = number(stats, "/writes/base_writes");
        let written = number(stats, "/writes/base_written_bytes");
        assert!(writes > before.0 && written > before.1, "{name} wrote nothing");
        assert!(written <= writes << 20 && written >= writes, "{name}: {written} bytes in {writes} writes");
        assert_eq!(number(stats, "/requests/damaged_reads"), 0, "{name}");
        assert_eq!(number(stats, "/requests/poison_events"), 0, "{name}");
        assert!(number(stats, "/device/logical_bytes") <= base.bytes, "{name}");
        before = (writes, written);
    }
    let last = &steps[3].1;
    let (reads, bytes) = (number(last, "/requests/base/reads"), number(last, "/requests/base/bytes"));
    assert!(reads > 0 && bytes >= reads * 512 && bytes <= reads << 20, "{bytes} bytes in {reads} reads");
    // What was bound to the node and written is there: at least the memory that stress-ng verified.
    let live = number(last, "/device/logical_bytes");
    assert!(live >= if long { 128 << 20 } else { 24 << 20 }, "{live} bytes hold data");
    device.stop().unwrap();
}
