//! How long things take, in buckets, counted without a lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::{MetricType, TypedMetric};

/// Buckets, each twice as wide as the one before; the last has no end.
const BUCKETS: usize = 19;

/// A histogram of durations. Clones count together.
#[derive(Debug, Clone)]
pub struct Timing(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Where the first bucket ends, in seconds.
    least: f64,
    buckets: [AtomicU64; BUCKETS],
    sum_us: AtomicU64,
}

impl Timing {
    /// Nothing yet; the first bucket ends at `least` seconds.
    pub fn new(least: f64) -> Self {
        Self(Arc::new(Inner { least, buckets: Default::default(), sum_us: AtomicU64::new(0) }))
    }

    /// One more.
    pub fn observe(&self, took: Duration) {
        let doublings = (took.as_secs_f64() / self.0.least).log2().ceil().max(0.0) as usize;
        self.0.buckets[doublings.min(BUCKETS - 1)].fetch_add(1, Ordering::Relaxed);
        self.0.sum_us.fetch_add(took.as_micros() as u64, Ordering::Relaxed);
    }

    /// How many were in each bucket so far.
    pub fn counts(&self) -> Vec<u64> {
        self.0.buckets.iter().map(|bucket| bucket.load(Ordering::Relaxed)).collect()
    }

    /// What a share `q` of those in `counts`, of this timing, stayed below, in seconds; within a bucket they are taken
    /// to lie evenly.
    pub fn quantile(&self, counts: &[u64], q: f64) -> Option<f64> {
        let total: u64 = counts.iter().sum();
        let mut rest = q * total as f64;
        for (i, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            if rest <= count as f64 {
                let low = if i == 0 { 0.0 } else { self.end(i - 1) };
                return Some(low + (self.end(i) - low) * rest / count as f64);
            }
            rest -= count as f64;
        }
        None
    }

    fn end(&self, bucket: usize) -> f64 {
        self.0.least * (1_u64 << bucket) as f64
    }
}

impl EncodeMetric for Timing {
    fn encode(&self, mut encoder: MetricEncoder) -> Result<(), std::fmt::Error> {
        let counts = self.counts();
        let end = |i: usize| if i == BUCKETS - 1 { f64::MAX } else { self.end(i) };
        let buckets: Vec<(f64, u64)> = counts.iter().enumerate().map(|(i, &count)| (end(i), count)).collect();
        let sum = Duration::from_micros(self.0.sum_us.load(Ordering::Relaxed)).as_secs_f64();
        encoder.encode_histogram::<NoLabelSet>(sum, counts.iter().sum(), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

impl TypedMetric for Timing {
    const TYPE: MetricType = MetricType::Histogram;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_duration_is_below_the_end_of_its_bucket() {
        for (ms, bucket) in
            [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (131_072, 17), (131_073, 18), (1 << 40, 18)]
        {
            let timing = Timing::new(1e-3);
            timing.observe(Duration::from_millis(ms));
            let counts = timing.counts();
            assert_eq!(counts.iter().position(|&count| count == 1), Some(bucket), "{ms} ms: {counts:?}");
        }
    }

    #[test]
    fn quantiles_are_within_a_bucket_of_the_truth() {
        let timing = Timing::new(1e-3);
        assert_eq!(timing.quantile(&timing.counts(), 0.5), None);
        (1..=1000).for_each(|ms| timing.observe(Duration::from_millis(ms)));
        for (q, truth) in [(0.1, 0.1), (0.5, 0.5), (0.9, 0.9)] {
            let found = timing.quantile(&timing.counts(), q).unwrap();
            assert!((truth / 2.0..=truth * 2.0).contains(&found), "{q}: {found}");
        }
    }
}
