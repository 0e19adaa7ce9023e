//! Groups repeated failures into episodes, so that only the first one is logged.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::transport::lock;

/// Failures that are further apart are different episodes.
const APART: Duration = Duration::from_secs(60);

/// Episodes of one kind of failure.
#[derive(Debug, Default)]
pub struct Episodes {
    last: Mutex<Option<Instant>>,
}

impl Episodes {
    /// Records a failure; returns whether it starts an episode.
    pub fn begin(&self) -> bool {
        self.begin_at(Instant::now())
    }

    fn begin_at(&self, now: Instant) -> bool {
        lock(&self.last).replace(now).is_none_or(|last| now.saturating_duration_since(last) >= APART)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_that_follow_each_other_are_one_episode() {
        let (episodes, start) = (Episodes::default(), Instant::now());
        let begins = [0, 1, 50, 109, 169, 170].map(|s| episodes.begin_at(start + Duration::from_secs(s)));
        assert_eq!(begins, [true, false, false, false, true, false]);
    }
}
