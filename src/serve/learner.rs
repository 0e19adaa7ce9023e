//! A learner on a thread of its own.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::anyhow;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::config::{Config, Settings};
use crate::runner::follow::{Outcome, Run};
use crate::state::running::RunningStore;
use crate::telemetry::Status;
use crate::transport::lock;

/// How a learner runs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Whether it stops at the current end of its inputs.
    pub once: bool,
    /// Whether lost messages are skipped.
    pub accept_gap: bool,
}

/// The configuration to continue with, if it has changed.
type Next = Arc<Mutex<Option<(Config, Settings)>>>;

/// A learner that runs.
pub struct Learning {
    /// What it reports.
    pub status: Arc<Status>,
    /// Its store, once it is open.
    pub store: RunningStore,
    stop: Arc<AtomicBool>,
    next: Next,
    ended: oneshot::Receiver<anyhow::Result<Option<Outcome>>>,
}

impl Learning {
    /// Starts a learner that reports to `status`. Must be called within the runtime.
    pub fn start(config: &Config, settings: &Settings, options: Options, status: Arc<Status>) -> anyhow::Result<Self> {
        let (done, ended) = oneshot::channel();
        let (store, stop, next) = (RunningStore::default(), Arc::new(AtomicBool::new(false)), Next::default());
        let learning =
            Self { status: status.clone(), store: store.clone(), stop: stop.clone(), next: next.clone(), ended };
        let (mut config, mut settings, runtime) = (config.clone(), settings.clone(), Handle::current());
        std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
            let Options { once, accept_gap } = options;
            let (status, runtime) = (&*status, &runtime);
            let outcome = loop {
                let (config_now, settings_now) = (&config, &settings);
                let run = Run {
                    once,
                    accept_gap,
                    config: config_now,
                    settings: settings_now,
                    stop: &stop,
                    status,
                    store: &store,
                    runtime,
                };
                let outcome = run.follow();
                // It was stopped for a reload: the lanes open again, from their last snapshot, with the new configuration.
                let mut next = lock(&next);
                match next.take() {
                    Some(changed) if outcome.is_ok() => {
                        (config, settings) = changed;
                        status.facts().reconfigured();
                        stop.store(false, Ordering::Relaxed);
                    }
                    _ => break outcome,
                }
            };
            let _ = done.send(outcome);
        })?;
        Ok(learning)
    }

    /// Asks it to stop: it takes a last snapshot and publishes.
    pub fn stop(&self) {
        let mut next = lock(&self.next);
        *next = None;
        self.stop.store(true, Ordering::Relaxed);
    }

    /// What continues it with another configuration: it takes a snapshot and resumes from that.
    pub fn reconfigure(&self) -> impl Fn(&Config, &Settings) + Send + Sync + use<> {
        let (next, stop) = (self.next.clone(), self.stop.clone());
        move |config, settings| {
            let mut next = lock(&next);
            // One that stops for good stays stopped.
            if next.is_some() || !stop.load(Ordering::Relaxed) {
                *next = Some((config.clone(), settings.clone()));
                stop.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Waits until it has ended. Call it until it has returned once, and not again.
    pub async fn ended(&mut self) -> anyhow::Result<Option<Outcome>> {
        let ended = (&mut self.ended).await;
        ended.unwrap_or_else(|_| Err(anyhow!("the engine thread panicked")))
    }
}
