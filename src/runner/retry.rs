//! Retries transient failures: the operating system has no disk space, no descriptors, no permission or a device error, or a
//! broker cannot answer now. Exiting would lose what was learned since the last snapshot, and a restart would fail alike.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::clock::{Clock, SystemClock};
use super::error::{LaneError, Result};
use crate::telemetry::Facts;

/// The pause after the first failure, and the longest.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// How often a pause checks whether to stop.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Retries operations with back-off.
#[derive(Clone)]
pub struct Retry {
    facts: Arc<Facts>,
    clock: Arc<dyn Clock>,
    /// Gives up when one of these is set; without any, at the first failure.
    stop: Option<Vec<Arc<AtomicBool>>>,
}

impl Retry {
    /// Retries until an operation succeeds or `stop` is set.
    pub fn until(stop: Arc<AtomicBool>, facts: Arc<Facts>) -> Self {
        Self { facts, clock: Arc::new(SystemClock), stop: Some(vec![stop]) }
    }

    /// Retries nothing: for commands that end with an exit code.
    pub fn never() -> Self {
        Self { facts: Arc::default(), clock: Arc::new(SystemClock), stop: None }
    }

    /// The same, but also gives up when `stop` is set.
    pub fn or_until(&self, stop: Arc<AtomicBool>) -> Self {
        let stop = self.stop.clone().map(|all| all.into_iter().chain([stop]).collect());
        Self { stop, ..self.clone() }
    }

    /// The same by another clock.
    pub fn by(self, clock: Arc<dyn Clock>) -> Self {
        Self { clock, ..self }
    }

    /// Its clock.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// Receives failures and successes.
    pub fn facts(&self) -> &Arc<Facts> {
        &self.facts
    }

    /// Whether it retries anything.
    pub fn is_patient(&self) -> bool {
        self.stop.is_some()
    }

    /// Attempts an operation until it succeeds, fails for a reason that is not transient, or is stopped.
    pub fn run<T>(&self, operation: &'static str, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
        let mut pause = PAUSE_MIN;
        loop {
            match attempt() {
                Ok(value) => {
                    self.facts.succeeded(operation);
                    return Ok(value);
                }
                Err(LaneError::Transient(error)) if !self.gives_up() => self.facts.failed(operation, &error),
                Err(error) => return Err(error),
            }
            self.wait(pause);
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }

    fn gives_up(&self) -> bool {
        self.stop.as_ref().is_none_or(|stop| stop.iter().any(|stop| stop.load(Ordering::Relaxed)))
    }

    fn wait(&self, pause: Duration) {
        let until = self.clock.now() + pause;
        while self.clock.now() < until && !self.gives_up() {
            self.clock.sleep(LOOK_EVERY);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::kafka::cluster::Problem;

    fn full() -> LaneError {
        LaneError::from(std::io::Error::from_raw_os_error(28)).context("cannot write")
    }

    #[test]
    fn transient_failures_are_retried_until_success() {
        let facts = Arc::new(Facts::default());
        let retry = Retry::until(Arc::default(), facts.clone());
        let mut attempts = 0;
        let leaderless = || Problem::Transient { doing: "reading".to_owned(), problem: "no leader".to_owned() };
        let done = retry.run("publish", || {
            attempts += 1;
            assert_eq!(facts.trouble().is_some(), attempts > 1);
            match attempts {
                1 => Err(full()),
                2 => Err(LaneError::from(leaderless()).context("cannot open a lane")),
                _ => Ok(7),
            }
        });
        assert_eq!((done.unwrap(), attempts, facts.trouble()), (7, 3, None));
    }

    #[test]
    fn others_are_not_and_neither_is_anything_once_it_is_to_stop() {
        let stop = Arc::new(AtomicBool::new(false));
        let retry = Retry::until(Arc::default(), Arc::default()).or_until(stop.clone());
        let mut attempts = 0;
        let mut fail = |retry: &Retry, error: fn() -> LaneError| {
            retry.run("snapshot", || {
                attempts += 1;
                if attempts == 5 {
                    stop.store(true, Ordering::Relaxed);
                }
                Err::<(), _>(error())
            })
        };
        assert!(fail(&retry, || LaneError::last("of another kind")).is_err());
        assert!(fail(&retry, || LaneError::Fenced("lane".to_owned())).is_err());
        assert!(fail(&Retry::never(), full).is_err());
        assert!(fail(&retry, full).unwrap_err().to_string().starts_with("cannot write"));
        assert_eq!(attempts, 5);
    }
}
