//! `./x bench deaths`: that workers are killed, and that a row tells of each size.

#[test]
fn a_kill_of_a_small_devices_worker_makes_a_row_for_each_place_it_may_lie_in() {
    let output = crate::bench().args(["deaths", "--mib", "8", "--kills", "1"]).output().unwrap();
    let (text, why) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && why.contains("kill 1 of 1"), "{text}{why}");
    assert!(text.contains("of 1 kills") && text.contains("longest load ms"), "{text}");
    for place in ["in memory", "on a disk"] {
        let mut rows = text.lines().filter_map(|line| line.trim().strip_prefix(place));
        let row = rows.next().unwrap_or_else(|| panic!("none {place}: {text}"));
        let row: Vec<f64> = row.split_whitespace().map(|word| word.parse().unwrap()).collect();
        let [gib, blocks, middle, most] = row[..] else { panic!("{text}") };
        assert_eq!((gib, blocks), (0.01, f64::from(8 << 20) / 4096.0));
        // Of one kill, the median is the longest.
        assert!(middle >= 0.0 && middle.total_cmp(&most).is_eq(), "{text}");
        assert_eq!(rows.next(), None, "{text}");
    }
}

#[test]
fn nothing_is_measured_of_no_kill_or_no_bytes() {
    for none in [["--mib", "0"], ["--kills", "0"]] {
        let output = crate::bench().arg("deaths").args(none).output().unwrap();
        let why = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && why.contains("invalid value '0'"), "{none:?}: {why}");
    }
}
