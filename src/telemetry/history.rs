//! History in bounded memory: the longer, the coarser.

/// Most points that are kept.
const POINTS_MAX: usize = 600;

/// Points over time. At the limit every other point is dropped and the interval doubles, so the history always reaches
/// back to the start.
#[derive(Debug, Clone)]
pub struct History<T> {
    points: Vec<(u64, T)>,
    every_ms: u64,
}

impl<T> History<T> {
    /// An empty history, with this initial interval in milliseconds.
    pub fn new(every_ms: u64) -> Self {
        Self { points: Vec::new(), every_ms }
    }

    /// Whether it is time for another point.
    pub fn is_due(&self, time_ms: u64) -> bool {
        self.points.last().is_none_or(|(last, _)| time_ms >= last.saturating_add(self.every_ms))
    }

    /// One more.
    pub fn push(&mut self, time_ms: u64, point: T) {
        self.points.push((time_ms, point));
        if self.points.len() >= POINTS_MAX {
            let mut keep = false;
            self.points.retain(|_| {
                keep = !keep;
                keep
            });
            self.every_ms *= 2;
        }
    }

    /// All points, oldest first.
    pub fn points(&self) -> impl Iterator<Item = &(u64, T)> {
        self.points.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_bounded_and_reaches_back_to_the_beginning() {
        let mut history = History::new(1000);
        for time_ms in (0..10_000_000).step_by(250) {
            if history.is_due(time_ms) {
                history.push(time_ms, time_ms);
            }
            assert!(history.points().count() < POINTS_MAX);
        }
        let times: Vec<u64> = history.points().map(|(time_ms, _)| *time_ms).collect();
        assert_eq!(times[0], 0);
        assert!(times.len() >= POINTS_MAX / 2 && *times.last().unwrap() > 9_900_000);
        let steps: Vec<u64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(steps.iter().all(|step| step % 1000 == 0 && *step == steps[0]), "{steps:?}");
    }
}
