//! The fault-injection run: a device under load is compared with a plain array, while one fault
//! after another happens to it.
//!
//! * Faults are dealt like cards: all [kinds](KINDS) in an order that the seed decides, then again.
//!   So are the load's operations; only where they meet is left to the scheduler.
//! * After each fault everything is flushed and read back from the device, and every byte is what
//!   the array has. Where a fault may leave old or new bytes, as the death of everything may of
//!   blocks that were not flushed, each block is one of the two, and the array takes it over.
//! * A failure names seed and step. `LAMINA_LONG` makes it ten minutes, `LAMINA_SEED` begins with
//!   another seed.

mod injections;
mod trial;

use std::time::{Duration, Instant};

use crate::common::within;
use crate::deaths::kill_worker;
use injections::{
    crash_host, fill, fill_and_kill, flip, half_open, kill_everything, kill_several, panic, poison,
    slow_readers, snapshot, stop, unmap,
};
use trial::{Dice, Trial, index};

/// The faults. The first are injected while the load goes on.
const KINDS: [(&str, Fault); 15] = [
    ("worker killed", Fault::Under(|run, _| kill_worker(&run.rig.run))),
    ("workers killed in a row", Fault::Under(kill_several)),
    ("panic", Fault::Under(panic)),
    ("upgrade", Fault::Under(|run, _| run.lamina(&["upgrade"]))),
    ("worker stopped for a while", Fault::Under(stop)),
    ("flipped bit", Fault::Under(flip)),
    ("poison", Fault::Under(poison)),
    ("half-open clients", Fault::Under(half_open)),
    ("slow readers", Fault::Under(slow_readers)),
    ("unmapped peer", Fault::Under(unmap)),
    ("no room", Fault::Alone(fill)),
    ("no room, worker killed", Fault::Alone(fill_and_kill)),
    ("snapshot", Fault::Alone(snapshot)),
    ("everything killed", Fault::Alone(kill_everything)),
    ("host crashed", Fault::Alone(crash_host)),
];

#[derive(Clone, Copy)]
enum Fault {
    /// While the load goes on.
    Under(fn(&mut Trial, &mut Dice)),
    /// While it does not.
    Alone(fn(&mut Trial, &mut Dice)),
}

/// Deals faults for a time, and each kind once at least: how often each was dealt.
fn run(seed: u64, time: Duration) -> [u32; KINDS.len()] {
    let begun = Instant::now();
    let mut run = Trial::new(seed, seed.is_multiple_of(2));
    let mut dice = Dice(seed);
    let mut dealt = [0; KINDS.len()];
    while dealt[0] == 0 || begun.elapsed() < time {
        let mut deck: Vec<_> = (0..KINDS.len()).collect();
        for place in 0..deck.len() {
            let other = place + index(dice.roll((deck.len() - place) as u64));
            deck.swap(place, other);
        }
        for kind in deck {
            let (name, fault) = KINDS[kind];
            run.step(name, fault, &mut dice);
            dealt[kind] += 1;
        }
    }
    let small = if run.disk.is_some() { "a small disk" } else { "a small store" };
    let [crashes, synced] = run.crashes;
    println!(
        "seed {seed}, {small}: {} faults in {:?}; {crashes} crashes of the host, {synced} more that were none, \
         as the device synced for room",
        run.step.0,
        begun.elapsed(),
    );
    // Else this fault would be none. One that was dealt once or twice may have met a sync.
    assert!(crashes > 0 || synced < 3, "the device synced for room before each of {synced} crashes");
    dealt
}

#[test]
fn no_fault_changes_a_byte() {
    let long = std::env::var_os("LAMINA_LONG").is_some();
    let seed = std::env::var("LAMINA_SEED").map_or(1, |seed| seed.parse().expect("a number"));
    let (runs, time) = if long { (10, 60) } else { (2, 3) };
    within(if long { 3600 } else { 300 }, move || {
        let mut all = [0; KINDS.len()];
        for seed in seed..seed + runs {
            let dealt = run(seed, Duration::from_secs(time));
            all.iter_mut().zip(dealt).for_each(|(all, dealt)| *all += dealt);
        }
        let dealt: Vec<_> =
            KINDS.iter().zip(all).map(|((name, _), count)| format!("{count} × {name}")).collect();
        println!("{}", dealt.join(", "));
    });
}
