//! Counters of the HTTP server that learner and router share.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::sheet::Sheet;
use crate::transport::lock;

/// What the HTTP server counts.
#[derive(Debug, Default)]
pub struct HttpCounters {
    /// Open connections.
    pub connections: AtomicU64,
    /// Idle connections that were closed to make room for a new one.
    pub evicted: AtomicU64,
    /// Requests that were refused because too many others were in progress.
    pub overloaded: AtomicU64,
    /// Failed reloads of certificates and tokens.
    pub reload_errors: AtomicU64,
    /// Bytes of request bodies that are being received or processed.
    pub body_bytes: AtomicU64,
    accept_errors: AtomicU64,
    /// The newest failure to accept a connection, and when it happened.
    accept_problem: Mutex<Option<(String, Instant)>>,
}

/// An episode of failures ends when there was none for this long. While descriptors are scarce, successes and failures
/// alternate.
const EPISODE: Duration = Duration::from_secs(10);

impl HttpCounters {
    /// A connection could not be accepted. Returns whether an episode begins.
    pub fn accept_failed(&self, problem: &std::io::Error, now: Instant) -> bool {
        self.accept_errors.fetch_add(1, Ordering::Relaxed);
        let before = lock(&self.accept_problem).replace((problem.to_string(), now));
        before.is_none_or(|(_, at)| is_over(at, now))
    }

    /// Why connections cannot always be accepted at present.
    pub fn accept_problem(&self, now: Instant) -> Option<String> {
        lock(&self.accept_problem).as_ref().filter(|(_, at)| !is_over(*at, now)).map(|(problem, _)| problem.clone())
    }

    /// Adds the metrics of the server to a sheet.
    pub(super) fn write(&self, sheet: &mut Sheet) {
        let one = |number: &AtomicU64| [(Vec::<(String, String)>::new(), number.load(Ordering::Relaxed))];
        sheet.gauges("http_connections", "Open HTTP connections", one(&self.connections));
        sheet.gauges("http_body_bytes", "Bytes of request bodies in flight", one(&self.body_bytes));
        let evicted = "Idle HTTP connections closed for new ones";
        sheet.counters("http_connections_evicted", evicted, one(&self.evicted));
        let overloaded = "HTTP requests rejected because too many were in progress";
        sheet.counters("http_overloaded", overloaded, one(&self.overloaded));
        let failed = "Failed attempts to accept an HTTP connection";
        sheet.counters("http_accept_errors", failed, one(&self.accept_errors));
        let stale = "Failed reloads of TLS certificates and token files";
        sheet.counters("http_reload_errors", stale, one(&self.reload_errors));
    }
}

fn is_over(at: Instant, now: Instant) -> bool {
    now.saturating_duration_since(at) >= EPISODE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_episode_of_accept_errors_begins_once() {
        let counters = HttpCounters::default();
        let (start, problem) = (Instant::now(), std::io::Error::from_raw_os_error(24));
        assert_eq!(counters.accept_problem(start), None);
        assert!(counters.accept_failed(&problem, start));
        assert!(!counters.accept_failed(&problem, start + EPISODE / 2));
        let shown = counters.accept_problem(start + EPISODE);
        assert!(shown.is_some_and(|problem| problem.contains("open files")));
        assert_eq!(counters.accept_problem(start + EPISODE * 2), None);
        assert!(counters.accept_failed(&problem, start + EPISODE * 2));
        let mut sheet = Sheet::new("p");
        counters.write(&mut sheet);
        assert!(sheet.text().contains("p_http_accept_errors_total{} 3"));
    }
}
