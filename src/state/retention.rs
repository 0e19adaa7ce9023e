//! Which checkpoints are kept.
//!
//! A checkpoint is a complete copy of one generation. The first generation of every hour becomes one. Of the checkpoints, the
//! first of each of the newest `hourly` hours that have one is kept, and the first of each of the newest `daily` days. So an
//! idle week costs no checkpoint, and there are never more than `hourly + daily`.

use std::collections::BTreeSet;

use crate::config::SnapshotConfig;

const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 24 * HOUR_MS;

/// How many snapshots of a lane are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Retention {
    /// Newest generations.
    pub keep: usize,
    /// Hours with a checkpoint.
    pub hourly: usize,
    /// Days with a checkpoint.
    pub daily: usize,
}

impl Retention {
    /// The newest `keep` generations and no checkpoints.
    pub fn newest(keep: usize) -> Self {
        Self { keep, hourly: 0, daily: 0 }
    }

    /// Keeps everything that exists: for commands that must not thin.
    pub const ALL: Self = Self { keep: usize::MAX, hourly: usize::MAX, daily: usize::MAX };

    /// Whether a snapshot made at `created_ms` becomes a checkpoint; `made_ms` are the times of those that exist.
    pub fn is_due(&self, created_ms: u64, made_ms: &[u64]) -> bool {
        let is_same_hour = |made_ms: &u64| made_ms / HOUR_MS == created_ms / HOUR_MS;
        (self.hourly > 0 || self.daily > 0) && !made_ms.iter().any(is_same_hour)
    }

    /// The times of the checkpoints to keep.
    pub fn kept(&self, made_ms: &[u64]) -> BTreeSet<u64> {
        let mut kept = firsts(made_ms, HOUR_MS, self.hourly);
        kept.append(&mut firsts(made_ms, DAY_MS, self.daily));
        kept
    }
}

impl From<&SnapshotConfig> for Retention {
    fn from(config: &SnapshotConfig) -> Self {
        Self { keep: config.keep.max(1), hourly: config.keep_hourly, daily: config.keep_daily }
    }
}

/// The first time in each of the newest `number` periods that have one.
fn firsts(made_ms: &[u64], period_ms: u64, number: usize) -> BTreeSet<u64> {
    let sorted: BTreeSet<u64> = made_ms.iter().copied().collect();
    let mut periods = BTreeSet::new();
    let firsts: Vec<u64> = sorted.into_iter().filter(|made_ms| periods.insert(made_ms / period_ms)).collect();
    firsts[firsts.len().saturating_sub(number)..].iter().copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A month of snapshots, one every seven minutes.
    #[test]
    fn hours_and_days_of_a_month() {
        let retention = Retention { keep: 3, hourly: 24, daily: 7 };
        let mut made: Vec<u64> = Vec::new();
        for created_ms in (0..30 * DAY_MS).step_by(7 * 60_000) {
            if retention.is_due(created_ms, &made) {
                made.push(created_ms);
                let kept = retention.kept(&made);
                made.retain(|made_ms| kept.contains(made_ms));
            }
            assert!(made.len() <= 31);
        }
        let hours: BTreeSet<u64> = made.iter().map(|made_ms| made_ms / HOUR_MS).collect();
        let last = 30 * 24 - 1;
        let expected: BTreeSet<u64> = (last - 23..=last).chain((23..30).map(|day| day * 24)).collect();
        assert_eq!(hours, expected);
    }

    #[test]
    fn idle_time_costs_nothing() {
        let retention = Retention { keep: 3, hourly: 2, daily: 1 };
        let made = [0, 1, HOUR_MS, 5 * DAY_MS];
        assert_eq!(retention.kept(&made), [HOUR_MS, 5 * DAY_MS].into());
        assert!(!retention.is_due(5 * DAY_MS + 1, &made) && retention.is_due(6 * DAY_MS, &made));
        assert!(!Retention::newest(3).is_due(0, &[]));
    }
}
