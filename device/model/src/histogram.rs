//! How often each time was seen.

use std::collections::{BTreeMap, BTreeSet};

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

/// A row of a histogram that is printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The shortest time that was seen in it.
    pub first: u64,
    /// The longest.
    pub last: u64,
    /// How many times fall into it, of each histogram.
    pub counts: Vec<u64>,
}

/// Several histograms, as [`Summary::buckets`] has them, in the same rows: one for each time if
/// that makes at most `most`. Else rows are of one width, or of powers of two where the longest
/// time is more than four times the shortest. Rows into which nothing falls are left out.
pub fn rows(histograms: &[&[(u64, u64)]], most: u32) -> Vec<Row> {
    let times: BTreeSet<u64> = histograms.iter().copied().flatten().map(|(time, _)| *time).collect();
    let (Some(&shortest), Some(&longest)) = (times.first(), times.last()) else { return Vec::new() };
    let most = u64::from(most.max(1));
    let power = |time: u64| u64::from(time.max(1).ilog2());
    let width = (longest - shortest) / most + 1;
    let powers = (power(longest) - power(shortest)) / most + 1;
    let row = |time: u64| {
        if times.len() as u64 <= most {
            time
        } else if longest / 4 <= shortest {
            (time - shortest) / width
        } else {
            (power(time) - power(shortest)) / powers
        }
    };
    let mut rows = BTreeMap::new();
    for (at, histogram) in histograms.iter().enumerate() {
        for (time, count) in *histogram {
            let empty = || Row { first: *time, last: *time, counts: vec![0; histograms.len()] };
            let row: &mut Row = rows.entry(row(*time)).or_insert_with(empty);
            (row.first, row.last) = (row.first.min(*time), row.last.max(*time));
            row.counts[at] += count;
        }
    }
    rows.into_values().collect()
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

    #[test]
    fn rows_hold_every_time_once_and_are_few() {
        assert!(rows(&[&[], &[]], 4).is_empty());
        let few = rows(&[&[(71, 5), (84, 1)], &[(84, 2)]], 12);
        let row = |time, counts: [u64; 2]| Row { first: time, last: time, counts: counts.to_vec() };
        assert_eq!(few, [row(71, [5, 0]), row(84, [1, 2])]);
        let powers: Vec<_> = (0..64_u64).map(|shift| (1 << shift, shift + 1)).collect();
        let near: Vec<_> = (71..=147).map(|time| (time, time % 5 + 1)).collect();
        let far: Vec<_> = (0..3000_u64).map(|n| (n * n, n % 7 + 1)).collect();
        let last = [(u64::MAX - 20, 1), (u64::MAX - 10, 3), (u64::MAX, 2)];
        for times in [&powers[..], &near, &far, &last] {
            for most in [1, 2, 11, 12] {
                let rows = rows(&[times, &near], most);
                assert!(rows.len() <= most as usize, "{most}: {rows:?}");
                assert!(rows.iter().all(|row| row.first <= row.last));
                assert!(rows.windows(2).all(|pair| pair[0].last < pair[1].first), "{most}: {rows:?}");
                let all = |at: usize| rows.iter().map(|row| row.counts[at]).sum::<u64>();
                assert_eq!(all(0), times.iter().map(|(_, count)| count).sum::<u64>());
                assert_eq!(all(1), near.iter().map(|(_, count)| count).sum::<u64>());
            }
        }
    }
}
