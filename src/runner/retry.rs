//! Retries transient failures: the operating system has no disk space, no descriptors, no permission or a device error, or a
//! broker cannot answer now. Exiting would lose what was learned since the last snapshot, and a restart would fail alike.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::state::StateError;
use crate::store::StoreError;
use crate::telemetry::Facts;
use crate::transport::kafka::cluster::Problem;

/// The pause after the first failure, and the longest.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// How often a pause checks whether to stop.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Retries operations with back-off.
#[derive(Clone)]
pub struct Retry {
    facts: Arc<Facts>,
    /// Gives up when one of these is set; without any, at the first failure.
    stop: Option<Vec<Arc<AtomicBool>>>,
}

impl Retry {
    /// Retries until an operation succeeds or `stop` is set.
    pub fn until(stop: Arc<AtomicBool>, facts: Arc<Facts>) -> Self {
        Self { facts, stop: Some(vec![stop]) }
    }

    /// Retries nothing: for commands that end with an exit code.
    pub fn never() -> Self {
        Self { facts: Arc::default(), stop: None }
    }

    /// The same, but also gives up when `stop` is set.
    pub fn or_until(&self, stop: Arc<AtomicBool>) -> Self {
        let stop = self.stop.clone().map(|all| all.into_iter().chain([stop]).collect());
        Self { facts: self.facts.clone(), stop }
    }

    /// Attempts an operation until it succeeds, fails for a reason that is not transient, or is stopped.
    pub fn run<T>(&self, operation: &'static str, mut attempt: impl FnMut() -> anyhow::Result<T>) -> anyhow::Result<T> {
        let mut pause = PAUSE_MIN;
        loop {
            match attempt() {
                Ok(value) => {
                    self.facts.succeeded(operation);
                    return Ok(value);
                }
                Err(error) if self.gives_up() || !is_transient(&error) => return Err(error),
                Err(error) => self.facts.failed(operation, &error),
            }
            self.wait(pause);
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }

    fn gives_up(&self) -> bool {
        self.stop.as_ref().is_none_or(|stop| stop.iter().any(|stop| stop.load(Ordering::Relaxed)))
    }

    fn wait(&self, pause: Duration) {
        let begun = Instant::now();
        while begun.elapsed() < pause && !self.gives_up() {
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// Whether the same operation may succeed later: a file or a store cannot be read or written, or no broker answers.
fn is_transient(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.is::<io::Error>()
            || matches!(StateError::of_store(cause), Some(StoreError::Read { .. } | StoreError::Write { .. }))
            || matches!(cause.downcast_ref(), Some(Problem::Transient { .. } | Problem::Unreachable { .. }))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full() -> anyhow::Error {
        anyhow::Error::from(io::Error::from_raw_os_error(28)).context("cannot write")
    }

    #[test]
    fn transient_failures_are_retried_until_success() {
        let facts = Arc::new(Facts::default());
        let retry = Retry::until(Arc::default(), facts.clone());
        let mut attempts = 0;
        let leaderless = || Problem::Transient { doing: "reading".to_owned(), problem: "no leader".to_owned() };
        let unwritable = || StoreError::Write { path: "store".to_owned(), problem: "no space".to_owned() };
        let done = retry.run("publish", || {
            attempts += 1;
            assert_eq!(facts.trouble().is_some(), attempts > 1);
            match attempts {
                1 => Err(full()),
                2 => Err(anyhow::Error::from(leaderless()).context("cannot open a lane")),
                3 => Err(StateError::from(unwritable()).into()),
                4 => Err(unwritable().into()),
                _ => Ok(7),
            }
        });
        assert_eq!((done.unwrap(), attempts, facts.trouble()), (7, 5, None));
    }

    #[test]
    fn others_are_not_and_neither_is_anything_once_it_is_to_stop() {
        let stop = Arc::new(AtomicBool::new(false));
        let retry = Retry::until(Arc::default(), Arc::default()).or_until(stop.clone());
        let mut attempts = 0;
        let mut fail = |retry: &Retry, error: fn() -> anyhow::Error| {
            retry.run("snapshot", || {
                attempts += 1;
                if attempts == 4 {
                    stop.store(true, Ordering::Relaxed);
                }
                Err::<(), _>(error())
            })
        };
        assert!(fail(&retry, || anyhow::anyhow!("of another kind")).is_err());
        assert!(fail(&Retry::never(), full).is_err());
        assert_eq!(fail(&retry, full).unwrap_err().to_string(), "cannot write");
        assert_eq!(attempts, 4);
    }
}
