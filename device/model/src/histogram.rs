//! How often each time was seen.

use serde::Serialize;

use crate::number::float;

/// Times below this are counted one by one, longer ones in 64 parts of each power of two.
const EXACT: u64 = 128;

/// Counts of times.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    counts: Vec<u64>,
    seen: u64,
    sum: u64,
    most: u64,
}

/// A histogram in numbers.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Summary {
    /// Times counted.
    pub count: u64,
    /// Their mean; null if there are none.
    pub mean: Option<f64>,
    /// Half of them are at most this.
    pub p50: u64,
    /// 99 of 100 are at most this.
    pub p99: u64,
    /// The longest.
    pub max: u64,
    /// Each time that was seen and how often; longer ones by the least of their bucket.
    pub buckets: Vec<(u64, u64)>,
}

fn bucket(time: u64) -> usize {
    if time < EXACT {
        return usize::try_from(time).unwrap_or(0);
    }
    let shift = time.ilog2() - 6;
    let parts = u64::from(shift) * 64 + (time >> shift);
    usize::try_from(parts).unwrap_or(0)
}

/// The least time of a bucket.
fn least(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < EXACT {
        return bucket;
    }
    let shift = bucket / 64 - 1;
    (bucket - shift * 64) << shift
}

impl Histogram {
    /// Counts a time.
    pub fn add(&mut self, time: u64) {
        self.add_each(time, 1);
    }

    /// Counts a time so often.
    pub fn add_each(&mut self, time: u64, times: u64) {
        if times == 0 {
            return;
        }
        let bucket = bucket(time);
        if bucket >= self.counts.len() {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] += times;
        self.seen += times;
        self.sum = self.sum.saturating_add(time.saturating_mul(times));
        self.most = self.most.max(time);
    }

    fn below(&self, part: f64) -> u64 {
        let wanted = float(self.seen) * part;
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if float(seen) >= wanted && seen > 0 {
                return least(bucket);
            }
        }
        0
    }

    /// In numbers.
    pub fn summary(&self) -> Summary {
        let seen = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        Summary {
            count: self.seen,
            mean: (self.seen > 0).then(|| float(self.sum) / float(self.seen)),
            p50: self.below(0.5),
            p99: self.below(0.99),
            max: self.most,
            buckets: seen.map(|(bucket, count)| (least(bucket), *count)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_dense_and_in_order() {
        let mut last = 0;
        for time in 0..100_000 {
            assert!(bucket(time) == last || bucket(time) == last + 1);
            last = bucket(time);
        }
        for time in (0..100_000).chain((1..40).map(|shift| 1 << shift)) {
            let bucket = bucket(time);
            let (low, next) = (least(bucket), least(bucket + 1));
            assert!(low <= time && time < next, "{time}: {low}..{next}");
            assert!((next - low) * 64 <= low.max(64), "{time}");
        }
        assert_eq!(super::bucket(u64::MAX), super::bucket(u64::MAX - 1));
    }

    #[test]
    fn summaries_are_those_of_the_times() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.summary(), Summary::default());
        (1..=100).for_each(|time| histogram.add(time));
        let summary = histogram.summary();
        assert_eq!((summary.count, summary.p50, summary.p99, summary.max), (100, 50, 99, 100));
        assert!((summary.mean.unwrap() - 50.5).abs() < 1e-9);
        assert_eq!(summary.buckets.len(), 100);
    }
}
