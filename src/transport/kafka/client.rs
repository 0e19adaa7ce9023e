//! Kafka clients that close within a deadline.
//!
//! Dropping a consumer of rdkafka waits until it has left its group, and destroying a client of librdkafka waits for its
//! threads. Neither has a time limit: if no broker answers, the process never exits after SIGTERM. So each
//! client is closed on its own thread, which is abandoned after the deadline.

use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use rdkafka::ClientConfig;
use rdkafka::client::ClientContext;
use rdkafka::config::FromClientConfigAndContext;

use super::cluster::{Problem, without_secrets};
use crate::transport::lock;

/// How long closing may take. Leaving a group takes one request.
const CLOSE: Duration = Duration::from_secs(5);

/// Clients whose closing has taken longer than that and goes on.
static LATE: AtomicUsize = AtomicUsize::new(0);

/// A producer or consumer.
pub struct Client<T: Send + 'static>(Option<T>);

impl<T: Send + 'static> Client<T> {
    /// Creates a client with these settings.
    pub fn new<C: ClientContext>(settings: &ClientConfig, context: C) -> Result<Self, Problem>
    where
        T: FromClientConfigAndContext<C>,
    {
        let made = T::from_config_and_context(settings, context);
        made.map(|client| Self(Some(client))).map_err(|error| Problem::BadClient(without_secrets(error)))
    }
}

impl<T: Send + 'static> Deref for Client<T> {
    type Target = T;

    fn deref(&self) -> &T {
        match &self.0 {
            Some(client) => client,
            None => unreachable!("a client is taken out when it is dropped"),
        }
    }
}

impl<T: Send + 'static> Drop for Client<T> {
    fn drop(&mut self) {
        if let Some(client) = self.0.take() {
            close_within(CLOSE, client);
        }
    }
}

/// How far the closing of a value is.
#[derive(Clone, Copy, PartialEq)]
enum Stage {
    Closing,
    Late,
    Closed,
}

/// Drops a value on another thread, and waits for that until the deadline. While another value is late this does not wait: the
/// brokers do not answer, and one deadline for all clients is enough. Returns whether the value was dropped in time.
fn close_within<T: Send + 'static>(deadline: Duration, value: T) -> bool {
    let shared = Arc::new((Mutex::new(Stage::Closing), Condvar::new()));
    let of_thread = shared.clone();
    let close = move || {
        drop(value);
        let (stage, changed) = &*of_thread;
        if std::mem::replace(&mut *lock(stage), Stage::Closed) == Stage::Late {
            LATE.fetch_sub(1, Ordering::Relaxed);
        }
        changed.notify_all();
    };
    // Without a thread the value is dropped here and now.
    if std::thread::Builder::new().name("close".to_owned()).spawn(close).is_err() {
        return true;
    }
    let deadline = if LATE.load(Ordering::Relaxed) > 0 { Duration::ZERO } else { deadline };
    let (stage, changed) = &*shared;
    let waited = changed.wait_timeout_while(lock(stage), deadline, |stage| *stage == Stage::Closing);
    let (mut stage, _) = waited.unwrap_or_else(PoisonError::into_inner);
    if *stage == Stage::Closed {
        return true;
    }
    *stage = Stage::Late;
    if LATE.fetch_add(1, Ordering::Relaxed) == 0 {
        tracing::warn!("the brokers do not answer; abandoned a Kafka client without closing it");
    }
    false
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, channel};
    use std::time::Instant;

    use super::*;

    /// A value whose drop blocks until the sender is dropped.
    struct Slow(Receiver<()>);

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    #[test]
    fn a_client_that_does_not_close_is_abandoned() {
        let long = Duration::from_secs(600);
        assert!(close_within(long, ()));
        let (first, second) = (channel(), channel());
        assert!(!close_within(Duration::from_millis(20), Slow(first.1)));
        // With one deadline passed, others are not waited for.
        assert!(!close_within(long, Slow(second.1)));
        drop((first.0, second.0));
        // Other tests close clients at the same time, so the count may stay above zero for a moment.
        let start = Instant::now();
        while !close_within(long, ()) {
            assert!(start.elapsed() < long, "late clients are never forgotten");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
