//! Detects that most events are unusable. A producer with a wrong clock, unit or key makes most events late, orphaned or
//! dead letters, and a learner that learns nothing looks healthy otherwise.

use crate::engine::Counts;

/// Minimum number of events for a share.
const EVENTS_MIN: u64 = 200;

/// Share above which a warning is logged.
const SHARE_MAX: f64 = 0.5;

/// The share of recent events that could not be used.
#[derive(Debug, Default)]
pub(super) struct Usable {
    /// Events read, and those of no use, when the share was last taken.
    since: (u64, u64),
    is_begun: bool,
    share: f64,
}

impl Usable {
    /// Updates the share; logs a warning when most events become unusable.
    pub(super) fn note(&mut self, counts: &Counts) {
        let (queries, rewards) = (&counts.join.queries, &counts.join.rewards);
        let dead = counts.queries_dead + counts.rewards_dead;
        let (read, unusable) =
            (counts.queries() + counts.rewards(), dead + queries.late + rewards.late + rewards.orphaned);
        if !self.is_begun {
            // What was read before this process began is not recent.
            (self.since, self.is_begun) = ((read, unusable), true);
        }
        let number = read.saturating_sub(self.since.0);
        if number < EVENTS_MIN {
            return;
        }
        let share = unusable.saturating_sub(self.since.1) as f64 / number as f64;
        if share > SHARE_MAX && self.share <= SHARE_MAX {
            tracing::warn!(
                share,
                events = number,
                late = queries.late + rewards.late,
                orphaned = rewards.orphaned,
                dead,
                "most recent events are unusable (late, orphaned or dead letters); check ts_ms (milliseconds since 1970), \
                 request_id and the dead-letter reasons"
            );
        }
        (self.share, self.since) = (share, (read, unusable));
    }

    /// The share of the last events that were late, orphaned or dead letters.
    pub(super) fn unusable_share(&self) -> f64 {
        self.share
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::joiner::{JoinCounts, RewardCounts};

    fn counts(used: u64, orphaned: u64, dead: u64) -> Counts {
        let rewards = RewardCounts { read: used + orphaned, used, orphaned, ..RewardCounts::default() };
        Counts { rewards_dead: dead, join: JoinCounts { rewards, ..JoinCounts::default() }, ..Counts::default() }
    }

    #[test]
    fn the_share_is_that_of_recent_events() {
        let mut usable = Usable::default();
        usable.note(&counts(0, 1000, 1000));
        assert_eq!(usable.unusable_share(), 0.0, "before this process");
        usable.note(&counts(100, 1000, 1000));
        assert_eq!(usable.unusable_share(), 0.0, "too few to say");
        usable.note(&counts(100, 1200, 1100));
        assert_eq!(usable.unusable_share(), 0.75);
        usable.note(&counts(1100, 1200, 1100));
        assert_eq!(usable.unusable_share(), 0.0);
    }
}
