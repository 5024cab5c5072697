//! How long requests took: histograms of this worker process, which no image keeps.
//!
//! A step of a histogram is a quarter of a power of two, so a quantile is at most a quarter
//! above what was measured. Reports have powers of two.

use std::{
    array,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Instant,
};

use serde::Serialize;

use crate::figures;

/// Requests up to so many nanoseconds, 2 to the power of this, are one step.
const SHORTEST: u32 = 8;
/// Requests longer than 2 to the power of this, 17 s, are one step.
const LONGEST: u32 = 34;
/// Steps of a power of two, as a power of two.
const FINE: u32 = 2;
const STEPS: usize = ((LONGEST - SHORTEST) << FINE) as usize + 2;

/// How long requests of one kind took.
#[derive(Debug)]
pub(crate) struct Latency {
    steps: [AtomicU64; STEPS],
    nanoseconds: AtomicU64,
    longest: AtomicU64,
}

impl Default for Latency {
    fn default() -> Self {
        Self {
            steps: array::from_fn(|_| AtomicU64::new(0)),
            nanoseconds: AtomicU64::new(0),
            longest: AtomicU64::new(0),
        }
    }
}

impl Latency {
    /// Counts a request that is done, and began then.
    pub(crate) fn count(&self, begun: Instant) {
        self.add(u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }

    fn add(&self, nanoseconds: u64) {
        self.steps[step(nanoseconds)].fetch_add(1, Relaxed);
        self.nanoseconds.fetch_add(nanoseconds, Relaxed);
        // Few requests are the longest, and a store takes the line from other processors.
        if self.longest.load(Relaxed) < nanoseconds {
            self.longest.fetch_max(nanoseconds, Relaxed);
        }
    }

    pub(crate) fn report(&self, window: &'static str, request: &'static str) -> LatencyReport {
        let times = Times {
            steps: self.steps.iter().map(|step| step.load(Relaxed)).collect(),
            nanoseconds: self.nanoseconds.load(Relaxed),
        };
        let longest = self.longest.load(Relaxed);
        // The bound of a step may be above it.
        let quantile = |part| times.quantile(part).map(|found| found.min(seconds(longest)));
        LatencyReport {
            window,
            request,
            seconds: times.histogram(),
            p50_seconds: quantile(0.5),
            p99_seconds: quantile(0.99),
            max_seconds: (longest > 0).then(|| seconds(longest)),
            times,
        }
    }
}

/// The step of a request.
fn step(nanoseconds: u64) -> usize {
    // A bound belongs to what is below it.
    let below = nanoseconds.saturating_sub(1);
    let Some(power) = below.checked_ilog2().filter(|power| *power >= SHORTEST) else { return 0 };
    if power >= LONGEST {
        return STEPS - 1;
    }
    let fine = (below >> (power - FINE)) & ((1 << FINE) - 1);
    (((power - SHORTEST) << FINE) as usize) + 1 + usize::try_from(fine).expect("less than four")
}

/// The nanoseconds that no request of a step takes longer than; the last one has no such.
fn bound(step: usize) -> Option<u64> {
    let step = u32::try_from(step).ok().filter(|step| (*step as usize) < STEPS - 1)?;
    let Some(above) = step.checked_sub(1) else { return Some(1 << SHORTEST) };
    let (power, fine) = (SHORTEST + (above >> FINE), u64::from(above & ((1 << FINE) - 1)));
    Some(((1 << FINE) + fine + 1) << (power - FINE))
}

#[expect(clippy::cast_precision_loss, reason = "seconds to be looked at; exact to 100 days")]
fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

/// What a histogram had counted at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Times {
    steps: Vec<u64>,
    nanoseconds: u64,
}

impl Times {
    /// Requests.
    pub fn count(&self) -> u64 {
        self.steps.iter().sum()
    }

    /// What was counted since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let steps = self.steps.iter().zip(&before.steps);
        Self {
            steps: steps.map(|(now, before)| now.saturating_sub(*before)).collect(),
            nanoseconds: self.nanoseconds.saturating_sub(before.nanoseconds),
        }
    }

    /// The seconds that this part of all requests took at most; none of no request, or if that was
    /// more than the longest step that has a bound.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a part of a number of requests"
    )]
    pub fn quantile(&self, part: f64) -> Option<f64> {
        let all = self.count();
        let wanted = ((all as f64 * part).ceil() as u64).clamp(1, all.max(1));
        let mut counted = 0;
        let found = self.steps.iter().position(|step| {
            counted += step;
            counted >= wanted
        })?;
        bound(found).map(seconds)
    }

    /// By powers of two.
    fn histogram(&self) -> Histogram {
        let mut buckets: Vec<Bucket> = Vec::new();
        let mut requests = 0;
        for (step, count) in self.steps.iter().enumerate() {
            requests += count;
            let up_to = bound(step);
            if up_to.is_none_or(u64::is_power_of_two) {
                buckets.push(Bucket { up_to_seconds: up_to.map(seconds), requests });
                requests = 0;
            }
        }
        Histogram { count: self.count(), sum: seconds(self.nanoseconds), buckets }
    }
}

/// Requests by the time that they took.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Histogram {
    /// All of them.
    pub count: u64,
    /// Their seconds together.
    pub sum: f64,
    /// By time.
    pub buckets: Vec<Bucket>,
}

/// Requests that took about as long.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bucket {
    /// The longest of them, in seconds; each is longer than the bucket before. Null for what is
    /// longer than all buckets.
    pub up_to_seconds: Option<f64>,
    /// How many.
    pub requests: u64,
}

figures! {
    /// How long requests of one kind took.
    pub struct LatencyReport {
        reported {
            /// The window that they were for.
            window: &'static str;
            /// What they were: `read` or `write`.
            request: &'static str;
            /// In steps that are finer than those of the report.
            #[serde(skip)]
            times: Times;
        }
        figures {
            /// Seconds that the device took for requests, from when an attachment asked to its
            /// answer. They are this worker process's: an image does not keep them.
            seconds: Histogram = Histogram "request" Seconds;
            /// Seconds that a part of all requests took at most, or a quarter less: half
            /// of them.
            p50_seconds: Option<f64> = Gauge "request_quantile" {quantile = "0.5"} Seconds;
            /// Seconds that 99 of 100 requests took at most.
            p99_seconds: Option<f64> = Gauge "request_quantile" {quantile = "0.99"} Seconds;
            /// Seconds that the longest request took.
            max_seconds: Option<f64> = Gauge "request_quantile" {quantile = "1"} Seconds;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_follow_each_other_and_are_no_wider_than_a_quarter() {
        let mut least = 0;
        for at in 0..STEPS - 1 {
            let most = bound(at).unwrap();
            assert!(most > least);
            assert_eq!((step(least + 1), step(most)), (at, at), "{least} to {most}");
            assert!(at == 0 || most - least <= least / 4, "{least} to {most}");
            least = most;
        }
        assert_eq!((least, bound(STEPS - 1)), (1 << LONGEST, None));
        assert_eq!((step(0), step(least + 1), step(u64::MAX)), (0, STEPS - 1, STEPS - 1));
    }

    #[test]
    fn quantiles_and_buckets_are_of_what_was_counted() {
        let latency = Latency::default();
        let nothing = latency.report("base", "read");
        assert_eq!((nothing.p50_seconds, nothing.max_seconds, nothing.seconds.count), (None, None, 0));
        for _ in 0..98 {
            latency.add(1000);
        }
        latency.add(100_000);
        let before = latency.report("base", "read");
        latency.add(3_000_000_000);
        let report = latency.report("base", "read");
        assert_eq!(report.p50_seconds, Some(1024e-9));
        let p99 = report.p99_seconds.unwrap();
        assert!((100e-6..125e-6).contains(&p99), "{p99}");
        assert_eq!((report.max_seconds, before.max_seconds), (Some(3.0), Some(100e-6)));
        let slow = Latency::default();
        slow.add(100_000);
        assert_eq!(slow.report("base", "read").p99_seconds, Some(100e-6), "not above the longest");
        let Histogram { count, sum, buckets } = report.seconds;
        assert!(count == 100 && (sum - 3.000_198).abs() < 1e-9, "{sum}");
        assert_eq!(buckets.iter().map(|bucket| bucket.requests).sum::<u64>(), 100);
        let bounds: Vec<_> = buckets.iter().map(|bucket| bucket.up_to_seconds).collect();
        assert_eq!((bounds[0], bounds[2], bounds.last()), (Some(256e-9), Some(1024e-9), Some(&None)));
        assert_eq!((buckets[2].requests, buckets.len()), (98, 28));
        let since = report.times.since(&before.times);
        assert!(since.count() == 1 && since.quantile(0.5).unwrap() >= 3.0);
        latency.add(u64::MAX);
        assert_eq!(latency.report("base", "read").times.quantile(1.0), None);
    }
}
