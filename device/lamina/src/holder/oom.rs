//! What becomes of a device when Linux ends processes for lack of memory.
//!
//! * A holder is small, and its end is the device's: it asks not to be chosen, which takes
//!   `CAP_SYS_RESOURCE`. What it starts is not meant, and gets back what the holder had before.
//! * A worker that was chosen is followed by another, as after any other death. But that takes
//!   memory as well, and would be chosen at once where there is still none: after such deaths, one
//!   soon after another, the holder waits, twice as long each time, up to [`LONGEST`].
//! * Whether Linux ended a process for lack of memory is told by a count in `/proc/vmstat`; whose,
//!   it does not say.

use std::fs;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::QUICK;

/// What the first wait is.
const SHORTEST: Duration = Duration::from_millis(50);
/// What a wait is at most.
const LONGEST: Duration = Duration::from_secs(2);
/// The score of a process that is never chosen.
const NEVER: &str = "-1000";

/// The score that this process had before.
static BEFORE: OnceLock<String> = OnceLock::new();

/// Has this process not be chosen, if that is allowed.
pub(super) fn spare() {
    let own = "/proc/self/oom_score_adj";
    let spared = fs::read_to_string(own).and_then(|before| {
        fs::write(own, NEVER)?;
        Ok(before)
    });
    match spared {
        // Only the first value is what it was before.
        Ok(before) => drop(BEFORE.set(before)),
        Err(why) => tracing::debug!("the holder may be chosen when memory runs out: {why}"),
    }
}

/// Has a process that this one started be chosen like any other.
pub(crate) fn put_back(pid: u32) {
    if let Some(before) = BEFORE.get()
        && let Err(why) = fs::write(format!("/proc/{pid}/oom_score_adj"), before)
    {
        // It may have ended.
        tracing::debug!(pid, "a process stays as it is when memory runs out: {why}");
    }
}

/// Deaths for lack of memory, and what is waited after each.
pub(super) struct Deaths {
    /// Processes of the host that were ended so.
    count: u64,
    last: Option<Instant>,
    wait: Duration,
}

impl Deaths {
    pub(super) fn new() -> Self {
        Self { count: ended(), last: None, wait: Duration::ZERO }
    }

    /// What is to be waited after a worker died, if it may have been ended for lack of memory.
    pub(super) fn died(&mut self) -> Option<Duration> {
        self.died_at(Instant::now(), ended())
    }

    /// What is to be waited when none can be started for lack of memory.
    pub(super) fn none_started(&mut self) -> Duration {
        self.next(Instant::now())
    }

    fn died_at(&mut self, now: Instant, count: u64) -> Option<Duration> {
        let was_ended = count > self.count;
        self.count = count;
        was_ended.then(|| self.next(now))
    }

    fn next(&mut self, now: Instant) -> Duration {
        let soon = self.last.is_some_and(|last| now.duration_since(last) <= QUICK);
        self.last = Some(now);
        self.wait = if soon { (self.wait * 2).clamp(SHORTEST, LONGEST) } else { Duration::ZERO };
        self.wait
    }
}

/// Processes of the host that were ended for lack of memory.
fn ended() -> u64 {
    let all = fs::read_to_string("/proc/vmstat").unwrap_or_default();
    all.lines().find_map(|line| line.strip_prefix("oom_kill ")?.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_waited_for_longer_each_time_that_memory_lacks_and_only_then() {
        let begun = Instant::now();
        let mut deaths = Deaths { count: 7, last: None, wait: Duration::ZERO };
        assert_eq!(deaths.died_at(begun, 7), None, "it was killed by somebody");
        let waits: Vec<_> = (8..16).map(|count| deaths.died_at(begun, count).unwrap().as_millis()).collect();
        assert_eq!(waits, [0, 50, 100, 200, 400, 800, 1600, 2000]);
        assert_eq!(deaths.died_at(begun, 15), None);
        let later = begun + QUICK + Duration::from_secs(1);
        assert_eq!(deaths.died_at(later, 20), Some(Duration::ZERO));
        assert_eq!(deaths.next(later), SHORTEST);
    }
}
