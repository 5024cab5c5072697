//! Sequences by hand, rules that are broken one by one, and work of all kinds that breaks none.

use super::checker::Checker;
use super::energy::PerCommand;
use super::*;

fn profile() -> Profile {
    Profile::named("ddr5-4800").unwrap()
}

fn at(group: u32, bank: u32, row: u32, column: u32) -> Place {
    Place { group, bank, row, column, ..Place::default() }
}

/// Serves these reads and writes, which come at once, and gives when each is done.
fn serve(profile: &Profile, accesses: &[(Place, bool)]) -> (Vec<u64>, Outcome) {
    let mut dram = Dram::new(profile, 64).unwrap();
    for (tag, (place, write)) in (0..).zip(accesses) {
        dram.push(&Access { at: 0, place: *place, write: *write, tag });
    }
    let outcome = dram.finish().unwrap();
    let mut done = Vec::new();
    dram.take_done(&mut done);
    let mut times = vec![0; accesses.len()];
    for done in done {
        times[usize::try_from(done.tag).unwrap()] = done.finished;
    }
    (times, outcome)
}

/// The default profile's times are JESD79-5's for DDR5-4800B.
#[test]
fn the_default_module_is_as_the_paper_and_the_standard_have_it() {
    let profile = profile();
    let t = &profile.timing;
    assert_eq!([t.cl, t.cwl, t.rcd, t.rp, t.ras], [40, 38, 39, 39, 77]);
    assert_eq!([t.ccd_s, t.ccd_l, t.ccd_l_wr, t.rrd_s, t.rrd_l, t.faw], [8, 12, 48, 8, 12, 32]);
    assert_eq!([t.wtr_s, t.wtr_l, t.wr, t.rtp, t.rfc, t.refi], [6, 24, 72, 18, 706, 9332]);
    assert_eq!(profile.bytes(), 64 << 30);
    for name in profile::PROFILES {
        let profile = Profile::named(name).unwrap();
        profile.check().unwrap();
        // Pages have 1 KiB, so that four activations take four bursts' time of the bus.
        assert_eq!([profile.timing.faw, profile.timing.rrd_s], [32, 8], "{name}");
    }
}

/// By hand: activation at 0, read at tRCD = 39, data from 39 + 40 to 87.
#[test]
fn a_read_of_a_closed_row_takes_its_window() {
    let (done, outcome) = serve(&profile(), &[(at(0, 0, 5, 1), false)]);
    assert_eq!(done, [39 + 40 + 8]);
    assert_eq!(done[0], profile().window());
    assert_eq!((outcome.counts.activates, outcome.counts.reads, outcome.counts.row_hits), (1, 1, 0));
    assert_eq!(outcome.checked, 2);
}

/// By hand: reads of one bank follow each other by `tCCD_L` = 12.
#[test]
fn reads_of_one_row_follow_by_ccd_l() {
    let (done, outcome) = serve(&profile(), &[0, 1, 2].map(|column| (at(0, 0, 5, column), false)));
    assert_eq!(done, [87, 99, 111]);
    assert_eq!(outcome.counts.row_hits, 2);
}

/// By hand: activations in two bank groups follow by `tRRD_S` = 8, so their reads do too, as
/// `tCCD_S` = 8 and the burst allow.
#[test]
fn reads_of_two_bank_groups_follow_by_ccd_s() {
    let (done, _) = serve(&profile(), &[(at(0, 0, 5, 0), false), (at(1, 0, 5, 0), false)]);
    assert_eq!(done, [87, 95]);
}

/// By hand: activations of two banks of a group follow by `tRRD_L` = 12.
#[test]
fn activations_of_one_group_follow_by_rrd_l() {
    let (done, _) = serve(&profile(), &[(at(0, 0, 5, 0), false), (at(0, 1, 5, 0), false)]);
    assert_eq!(done, [87, 99]);
}

/// By hand: four activations at 0, 8, 16, 24; the fifth at tFAW = 32. With tFAW = 40 it would be at
/// 40, but the first read has the command bus from 39 to 41.
#[test]
fn five_activations_wait_for_their_window() {
    let five: Vec<_> = (0..5).map(|group| (at(group, 0, 1, 0), false)).collect();
    assert_eq!(serve(&profile(), &five).0, [87, 95, 103, 111, 119]);
    let mut slow = profile();
    slow.timing.faw = 40;
    assert_eq!(serve(&slow, &five).0, [87, 95, 103, 111, 41 + 87]);
}

/// By hand: the row is closed at tRAS = 77, which is later than 39 + tRTP = 57; the next opened at
/// 77 + 39 = 116, its read at 155, data until 203.
#[test]
fn a_row_conflict_waits_for_ras_and_rp() {
    let (done, outcome) = serve(&profile(), &[(at(0, 0, 5, 0), false), (at(0, 0, 6, 0), false)]);
    assert_eq!(done, [87, 116 + 39 + 48]);
    assert_eq!((outcome.counts.precharges, outcome.counts.activates), (1, 2));
    assert_eq!(outcome.counts.open_bank_cycles, 77 + (203 - 116));
}

/// By hand: write at 39, data until 39 + 38 + 8 = 85; a read of the group waits `tWTR_L` = 24 more,
/// to 109, its data until 157. A read of another group waits `tWTR_S` = 6, to 91, data until 139.
#[test]
fn a_read_after_a_write_waits_for_wtr() {
    let (done, _) = serve(&profile(), &[(at(0, 0, 5, 0), true), (at(0, 0, 5, 1), false)]);
    assert_eq!(done, [85, 157]);
    let (done, _) = serve(&profile(), &[(at(0, 0, 5, 0), true), (at(1, 0, 5, 1), false)]);
    assert_eq!(done, [85, 139]);
}

/// By hand: read at 39, data until 87; the write's data begin two cycles later, at 89, so it is
/// issued at 51.
#[test]
fn a_write_after_a_read_lets_the_data_turn() {
    let (done, _) = serve(&profile(), &[(at(0, 0, 5, 0), false), (at(0, 0, 5, 1), true)]);
    assert_eq!(done, [87, 97]);
}

/// By hand: after a write, the row is closed at 85 + tWR = 157; 157 + 39 + 39 + 48 = 283.
#[test]
fn a_row_is_kept_open_for_write_recovery() {
    let (done, _) = serve(&profile(), &[(at(0, 0, 5, 0), true), (at(0, 0, 6, 0), false)]);
    assert_eq!(done, [85, 283]);
}

/// By hand: a hit that came later goes before a conflict that came earlier.
#[test]
fn hits_go_first() {
    let (done, outcome) =
        serve(&profile(), &[(at(0, 0, 5, 0), false), (at(0, 0, 6, 0), false), (at(0, 0, 5, 1), false)]);
    assert_eq!(done, [87, 203, 99]);
    assert_eq!(outcome.counts.row_hits, 1);
}

/// A burst lets 16 younger ones of its bank pass, and no more.
#[test]
fn nobody_waits_for_ever() {
    let mut accesses = vec![(at(0, 0, 5, 0), false), (at(0, 0, 6, 0), false)];
    accesses.extend((1..60).map(|column| (at(0, 0, 5, column), false)));
    let (done, _) = serve(&profile(), &accesses);
    assert_eq!(done[2..].iter().filter(|time| **time < done[1]).count(), 16);
    // A write is not held up by the reads of all other banks.
    let mut accesses = vec![(at(0, 0, 5, 0), false), (at(0, 0, 5, 1), true)];
    accesses.extend((1..4000).map(|number| (at(number % 8, 1, 5, number / 8 % 128), false)));
    let (done, _) = serve(&profile(), &accesses);
    assert!(done[2..].iter().filter(|time| **time < done[1]).count() < 90);
}

/// By hand: the refresh is due at 9332. The read that comes then waits for it: all banks are
/// closed already, so it is 9332 + 706 + 87.
#[test]
fn a_read_waits_for_a_refresh() {
    let profile = profile();
    let mut dram = Dram::new(&profile, 64).unwrap();
    dram.push(&Access { at: 9333, place: at(0, 0, 5, 0), write: false, tag: 0 });
    let outcome = dram.finish().unwrap();
    assert_eq!(outcome.cycles, 9332 + 706 + 87);
    // Each channel's rank was refreshed.
    assert_eq!(outcome.counts.refreshes, 4);
}

#[test]
fn an_idle_module_is_refreshed_as_often_as_time_passes() {
    let profile = profile();
    let day = profile.cycles(86_400_000_000_000);
    let mut dram = Dram::new(&profile, 64).unwrap();
    for tag in 0..3 {
        dram.push(&Access { at: tag * day, place: at(0, 0, 5, 0), write: false, tag });
    }
    let outcome = dram.finish().unwrap();
    let due = 4 * (outcome.cycles / profile.timing.refi);
    assert!(outcome.counts.refreshes.abs_diff(due) <= 4, "{} {due}", outcome.counts.refreshes);
    assert_eq!(outcome.counts.activates, 3);
}

/// A generator that gives the same each time.
pub(super) struct Numbers(pub u64);

impl Numbers {
    pub(super) fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % most
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::try_from(self.below(all.len() as u64)).unwrap()]
    }
}

#[test]
fn all_work_is_legal_and_none_of_it_is_lost() {
    let mut numbers = Numbers(7);
    for (name, ranks) in [("ddr5-4800", 1), ("ddr5-4800", 2), ("ddr5-6400", 4), ("ddr5-5600", 1)] {
        let mut profile = Profile::named(name).unwrap();
        profile.geometry.ranks = ranks;
        profile.geometry.channels = 2;
        for (writes, spread, pause, registers) in [
            (0, 1 << 30, 0, 64),
            (50, 1 << 30, 0, 64),
            (30, 4096, 0, 64),
            (10, 1 << 24, 400, 16),
            (90, 600, 3, 1),
        ] {
            let mut dram = Dram::new(&profile, registers).unwrap();
            let (mut now, mut done, mut line) = (0, Vec::new(), 0);
            for tag in 0..20_000 {
                now += if pause == 0 { 0 } else { numbers.below(pause) };
                line = if numbers.below(3) == 0 { numbers.below(spread) } else { line + 1 };
                let place =
                    if tag % 2 == 0 { profile.geometry.by_line(line) } else { profile.geometry.by_row(line) };
                let write = numbers.below(100) < writes;
                dram.push(&Access { at: now, place, write, tag });
                dram.take_done(&mut done);
            }
            let outcome = dram.finish().unwrap();
            dram.take_done(&mut done);
            let mut tags: Vec<_> = done.iter().map(|done| done.tag).collect();
            tags.sort_unstable();
            assert!(tags.iter().copied().eq(0..20_000));
            assert!(done.iter().all(|done| done.finished > done.admitted));
            let c = outcome.counts;
            assert_eq!(c.reads + c.writes, 20_000);
            let commands = c.activates + c.precharges + c.precharges_all + c.reads + c.writes + c.refreshes;
            assert_eq!(outcome.checked, commands);
            assert!(c.row_hits + c.activates >= 20_000);
        }
    }
}

/// Which burst is served when is no matter of taste: these sums are those of the scheduler that
/// planned all anew for each burst and command.
#[test]
fn a_schedule_stays_what_it_was_to_the_cycle() {
    let sums = [(1, 0), (1, 40), (2, 0), (4, 40)].map(|(ranks, writes)| {
        let mut profile = profile();
        profile.geometry.ranks = ranks;
        let mut numbers = Numbers(11);
        let mut dram = Dram::new(&profile, 64).unwrap();
        let (mut now, mut line, mut done) = (0, 0, Vec::new());
        for tag in 0..20_000 {
            now += if tag % 4000 < 2000 { 0 } else { numbers.below(30) };
            line = if numbers.below(4) == 0 { numbers.below(1 << 24) } else { line + 1 };
            let by_line = numbers.below(2) == 0;
            let place = if by_line { profile.geometry.by_line(line) } else { profile.geometry.by_row(line) };
            dram.push(&Access { at: now, place, write: numbers.below(100) < writes, tag });
        }
        let cycles = dram.finish().unwrap().cycles;
        dram.take_done(&mut done);
        let bytes = done.iter().flat_map(|done| [done.tag, done.admitted, done.finished]);
        (cycles, crc32c::crc32c(&bytes.flat_map(u64::to_le_bytes).collect::<Vec<_>>()))
    });
    let was = [
        (144_599, 1_463_818_738),
        (144_629, 2_150_263_271),
        (144_599, 4_206_293_572),
        (144_629, 1_012_881_492),
    ];
    assert_eq!(sums, was);
}

/// The same of bundles as `trace` fetches them, long runs of one row, with a line here and there
/// between them.
#[test]
fn a_schedule_of_long_runs_stays_what_it_was_to_the_cycle() {
    let sums =
        [(1, 0, 64), (1, 30, 64), (2, 10, 64), (1, 0, 3), (4, 50, 200)].map(|(ranks, writes, registers)| {
            let mut profile = profile();
            profile.geometry.ranks = ranks;
            let mut numbers = Numbers(13);
            let mut dram = Dram::new(&profile, registers).unwrap();
            let (mut now, mut done, mut tag) = (0, Vec::new(), 0);
            for run in 0..1000 {
                now += if run % 300 < 200 { 0 } else { numbers.below(400) };
                let first = numbers.below(1 << 24) & !63;
                let write = numbers.below(100) < writes;
                for line in first..first + 1 + numbers.below(64) {
                    dram.push(&Access { at: now, place: profile.geometry.by_row(line), write, tag });
                    tag += 1;
                    if numbers.below(40) == 0 {
                        let place = profile.geometry.by_line(numbers.below(1 << 12));
                        dram.push(&Access { at: now, place, write: false, tag });
                        tag += 1;
                    }
                }
            }
            let cycles = dram.finish().unwrap().cycles;
            dram.take_done(&mut done);
            let bytes = done.iter().flat_map(|done| [done.tag, done.admitted, done.finished]);
            (cycles, crc32c::crc32c(&bytes.flat_map(u64::to_le_bytes).collect::<Vec<_>>()))
        });
    let was = [
        (179_145, 2_100_681_190),
        (374_334, 4_183_905_673),
        (261_031, 43_434_826),
        (647_824, 4_116_411_155),
        (232_774, 776_772_397),
    ];
    assert_eq!(sums, was);
}

/// A stream over all channels and bank groups gets nearly all of the bus.
#[test]
fn a_stream_is_bound_by_the_bus() {
    let profile = profile();
    let mut dram = Dram::new(&profile, 64).unwrap();
    for line in 0..200_000 {
        let place = profile.geometry.by_line(line);
        dram.push(&Access { at: 0, place, write: false, tag: line });
    }
    let outcome = dram.finish().unwrap();
    let least = 200_000 / 4 * profile.timing.burst;
    let part = crate::number::float(least) / crate::number::float(outcome.cycles);
    // Refresh takes 706 of 9332 cycles.
    assert!((0.85..0.93).contains(&part), "{part}");
}

#[test]
fn the_checker_finds_each_rule_broken() {
    let read = |time, place| Command { at: time, kind: Kind::Read, place };
    let write = |time, place| Command { at: time, kind: Kind::Write, place };
    let activate = |time, place| Command { at: time, kind: Kind::Activate, place };
    let precharge = |time, place| Command { at: time, kind: Kind::Precharge, place };
    let all = |time| Command { at: time, kind: Kind::PrechargeAll, place: Place::default() };
    let refresh = |time| Command { at: time, kind: Kind::Refresh, place: Place::default() };
    let [a, b, c] = [at(0, 0, 5, 0), at(0, 1, 5, 0), at(1, 0, 5, 0)];
    let other_row = at(0, 0, 6, 0);
    let other_rank = Place { rank: 1, ..a };
    let cases: Vec<(&str, Vec<Command>)> = vec![
        ("tRCD", vec![activate(0, a), read(38, a)]),
        ("not open", vec![read(0, a)]),
        ("not open", vec![activate(0, a), read(39, other_row)]),
        ("a row that is open", vec![activate(0, a), activate(200, other_row)]),
        ("a bank that is closed", vec![precharge(0, a)]),
        ("tRAS", vec![activate(0, a), precharge(76, a)]),
        ("tRTP", vec![activate(0, a), read(70, a), precharge(87, a)]),
        ("tWR", vec![activate(0, a), write(39, a), precharge(156, a)]),
        ("tRP", vec![activate(0, a), precharge(77, a), activate(115, a)]),
        ("tRRD_S", vec![activate(0, a), activate(7, c)]),
        ("tRRD_L", vec![activate(0, a), activate(11, b)]),
        ("tCCD_L", vec![activate(0, a), read(39, a), read(50, a)]),
        ("tCCD_S", vec![activate(0, a), activate(8, c), read(60, a), read(67, c)]),
        ("tCCD_L_WR", vec![activate(0, a), write(39, a), write(86, a)]),
        ("tWTR_L", vec![activate(0, a), write(39, a), read(108, a)]),
        ("tWTR_S", vec![activate(0, a), activate(8, c), write(60, a), read(111, c)]),
        ("the data bus", vec![activate(0, a), read(39, a), write(50, a)]),
        ("the data bus", vec![activate(0, a), activate(8, other_rank), read(60, a), read(69, other_rank)]),
        ("the command bus", vec![activate(0, a), activate(1, c)]),
        ("banks that are open", vec![activate(0, a), refresh(100)]),
        ("tRP", vec![activate(0, a), all(77), refresh(115)]),
        ("tRFC", vec![refresh(0), activate(705, a)]),
        ("geometry", vec![activate(0, at(8, 0, 0, 0))]),
        ("tRAS", vec![activate(0, a), all(76)]),
    ];
    let mut profile = profile();
    profile.geometry.ranks = 2;
    for (rule, commands) in cases {
        let mut checker = Checker::new(&profile);
        let (last, before) = commands.split_last().unwrap();
        assert!(before.iter().all(|command| checker.check(command).is_ok()));
        let why = checker.check(last).unwrap_err().to_string();
        assert!(why.contains(rule), "{rule}: {why}");
        // A cycle later it is legal, where time is all that was wrong.
        if rule.starts_with('t') && !rule.starts_with("the") {
            let mut checker = Checker::new(&profile);
            assert!(before.iter().all(|command| checker.check(command).is_ok()));
            checker.check(&Command { at: last.at + 1, ..*last }).unwrap();
        }
    }
    let mut slow = profile.clone();
    slow.timing.faw = 40;
    let mut checker = Checker::new(&slow);
    for group in 0..4 {
        checker.check(&activate(u64::from(group) * 8, at(group, 0, 1, 0))).unwrap();
    }
    let why = checker.check(&activate(39, at(4, 0, 1, 0))).unwrap_err().to_string();
    assert!(why.contains("tFAW"), "{why}");
}

/// Commands that are checked together are those that may be issued, and leave the checker as if
/// each had been checked alone. The first that breaks a rule is found wherever it is among them.
#[test]
fn commands_checked_together_are_those_that_are_legal_alone() {
    let mut profile = profile();
    profile.geometry.ranks = 2;
    let mut numbers = Numbers(5);
    let (mut legal, mut broken) = (0, std::collections::BTreeSet::new());
    for _ in 0..4000 {
        let [mut alone, mut together] = [0, 1].map(|_| Checker::new(&profile));
        let first = at(1, 0, 5, u32::try_from(numbers.below(128)).unwrap());
        let mut other = numbers.one_of(&[at(2, 0, 5, 7), at(1, 1, 5, 7), at(1, 0, 5, 7)]);
        other.rank = u32::from(numbers.below(8) == 0);
        for (time, place) in [(0, first), (12, other)] {
            let activate = Command { at: time, kind: Kind::Activate, place };
            let _ = (alone.check(&activate), together.check(&activate));
        }
        other.row += u32::from(numbers.below(8) == 0);
        let both = [first, other];
        let steps = [1, 2, 6, 7, 8, 11, 12, 13, 23, 24, 47, 48, 60];
        let commands = Commands {
            kind: numbers.one_of(&[Kind::Read, Kind::Write]),
            at: 48 + numbers.below(10),
            places: &both[..numbers.one_of(&[1, 2])],
            step: numbers.one_of(&steps),
            count: u32::try_from(1 + numbers.below(70)).unwrap(),
        };
        let by_one = (0..commands.count).try_for_each(|number| alone.check(&commands.get(number)));
        let at_once = together.check_all(&commands);
        assert_eq!(format!("{by_one:?}"), format!("{at_once:?}"), "{commands:?}");
        assert_eq!(alone.checked(), together.checked(), "{commands:?}");
        if let Err(why) = at_once {
            broken.insert(why.to_string().rsplit("breaks ").next().unwrap().to_owned());
            continue;
        }
        legal += u32::from(commands.count > 2);
        // What comes next finds the same.
        let last = commands.get(commands.count - 1);
        for kind in [Kind::Read, Kind::Write, Kind::Precharge] {
            for after in 0..100 {
                let place = Place { column: 3, ..numbers.one_of(&both) };
                let next = Command { at: last.at + after, kind, place };
                let [alone, together] = [&alone, &together].map(|checker| checker.clone().check(&next));
                assert_eq!(format!("{alone:?}"), format!("{together:?}"), "{commands:?} {next:?}");
            }
        }
    }
    assert!(legal > 500, "{legal}");
    let rules = ["tCCD_L", "tCCD_S", "tCCD_L_WR", "the command bus", "the module's geometry", "tRCD"];
    for rule in rules.into_iter().chain(["the row, which is not open"]) {
        assert!(broken.contains(rule), "{rule}: {broken:?}");
    }
}

/// By hand, of ten devices: a read adds 318 − 142 mA at 1.1 V and 2 mA at 1.8 V for 3.33 ns.
#[test]
fn energy_is_that_of_the_currents() {
    let each = PerCommand::new(&profile());
    let close = |ours: f64, by_hand: f64| assert!((ours / by_hand - 1.0).abs() < 1e-3, "{ours} {by_hand}");
    close(each.read_pj, 10.0 * (176.0 * 1.1 + 2.0 * 1.8) * 3.3333);
    close(each.write_pj, 10.0 * (203.0 * 1.1 + 29.0 * 1.8) * 3.3333);
    // Of 103 − 92 mA, 50/32 · 77/116 are the open bank's standby; 116 cycles are 48.33 ns.
    close(each.activate_pj, 10.0 * ((11.0 - 1.0372) * 1.1 + (2.0 - 0.02074) * 1.8) * 48.333);
    close(each.refresh_pj, 10.0 * (185.0 * 1.1 + 22.0 * 1.8) * 706.0 / 2.4);
    close(each.closed_mw, 10.0 * (92.0 * 1.1 + 6.0 * 1.8));
    let counts = Counts { activates: 2, reads: 3, open_bank_cycles: 240, ..Counts::default() };
    let energy = Energy::new(&profile(), &counts, 2400);
    close(energy.access_pj(), 2.0 * each.activate_pj + 3.0 * each.read_pj);
    close(energy.background_pj, 4.0 * each.closed_mw * 1000.0 + each.open_bank_mw * 100.0);
}

#[test]
fn absurd_modules_are_refused_by_field() {
    let refused = |change: &dyn Fn(&mut Profile)| {
        let mut profile = profile();
        change(&mut profile);
        Dram::new(&profile, 64).err().unwrap().to_string()
    };
    assert!(refused(&|p| p.geometry.channels = 0).contains("geometry.channels is 0"));
    assert!(refused(&|p| p.timing.refi = 700).contains("timing.refi is 700"));
    assert!(refused(&|p| p.timing.tck_ps = f64::NAN).contains("timing.tck_ps"));
    assert!(refused(&|p| p.currents.idd4r = 1.0).contains("currents.idd4r is 1"));
    for wrong in [f64::NAN, f64::INFINITY, 1e308, -1.0] {
        assert!(refused(&|p| p.currents.idd2n = wrong).contains("currents.idd2n is"), "{wrong}");
        assert!(refused(&|p| p.currents.ipp2n = wrong).contains("currents.ipp2n is"), "{wrong}");
    }
    assert!(refused(&|p| p.timing.ccd_s = 1).contains("timing.ccd_s"));
    assert!(Dram::new(&profile(), 0).err().unwrap().to_string().contains("mshr is 0"));
    assert!(Profile::named("ddr4").unwrap_err().to_string().contains("ddr5-4800"));
    let text = toml::to_string(&profile()).unwrap();
    assert_eq!(Profile::parse("mine", &text).unwrap(), profile());
    let documented = include_str!("../../../../docs/ddr5.toml");
    assert_eq!(Profile::parse("docs/ddr5.toml", documented).unwrap(), profile());
    let why = Profile::parse("mine", &text.replace("channels = 4", "channels = 0")).unwrap_err().to_string();
    assert_eq!(why, "mine: geometry.channels is 0: it must be from 1 to 64");
    let why = Profile::parse("mine", &text.replace("rcd = 39\n", "")).unwrap_err().to_string();
    assert!(why.contains("rcd"), "{why}");
}

/// One million bursts a second a core with timing, optimised. Here it is only said.
#[test]
fn random_reads_are_served_at_a_rate_that_is_printed() {
    let profile = profile();
    let mut numbers = Numbers(3);
    let started = std::time::Instant::now();
    let mut dram = Dram::new(&profile, 64).unwrap();
    let mut done = Vec::new();
    for tag in 0..300_000 {
        let place = profile.geometry.by_line(numbers.below(1 << 30));
        dram.push(&Access { at: 0, place, write: false, tag });
        done.clear();
        dram.take_done(&mut done);
    }
    let outcome = dram.finish().unwrap();
    let rate = 0.3 / started.elapsed().as_secs_f64();
    let gbs = 300_000.0 * 64.0 / profile.ns(outcome.cycles);
    println!("{rate:.2} million a second; modelled {gbs:.1} GB/s of random lines");
    assert!((20.0..77.0).contains(&gbs), "{gbs}");
}

/// Times that go to cycles and back are what they were, and cycles of such times, too, whether a
/// nanosecond is more than a cycle or less.
#[test]
fn nanoseconds_are_cycles_and_nanoseconds_again() {
    for tck_ps in [10.0, 312.5, 1e6 / 2400.0, 500.0, 625.0, 1000.0, 1250.0, 1e5] {
        let mut profile = Profile::named("ddr5-4800").unwrap();
        profile.timing.tck_ps = tck_ps;
        for ns in (0..5000).chain((0..50).map(|at| 977_777_777 * at)) {
            let cycle = profile.cycles(ns);
            let whole = profile.whole_ns(cycle);
            assert_eq!(profile.cycles(whole), cycle, "{ns} ns of {tck_ps} ps");
            assert!(whole == ns || tck_ps > 1000.0, "{ns} ns of {tck_ps} ps: {whole}");
        }
    }
}
