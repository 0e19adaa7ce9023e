//! A learner on a thread of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::anyhow;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::config::{Config, Settings};
use crate::runner::follow::{Outcome, Run};
use crate::state::running::RunningStore;
use crate::telemetry::Status;

/// How a learner runs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Whether it stops at the current end of its inputs.
    pub once: bool,
    /// Whether lost messages are skipped.
    pub accept_gap: bool,
}

/// A learner that runs.
pub struct Learning {
    /// What it reports.
    pub status: Arc<Status>,
    /// Its store, once it is open.
    pub store: RunningStore,
    stop: Arc<AtomicBool>,
    ended: oneshot::Receiver<anyhow::Result<Option<Outcome>>>,
}

impl Learning {
    /// Starts a learner that reports to `status`. Must be called within the runtime.
    pub fn start(config: &Config, settings: &Settings, options: Options, status: Arc<Status>) -> anyhow::Result<Self> {
        let (done, ended) = oneshot::channel();
        let (store, stop) = (RunningStore::default(), Arc::new(AtomicBool::new(false)));
        let learning = Self { status: status.clone(), store: store.clone(), stop: stop.clone(), ended };
        let (config, settings, runtime) = (config.clone(), settings.clone(), Handle::current());
        std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
            let Options { once, accept_gap } = options;
            let (config, settings, stop, status, runtime) = (&config, &settings, &stop, &*status, &runtime);
            let run = Run { once, accept_gap, config, settings, stop, status, store: &store, runtime };
            let _ = done.send(run.follow());
        })?;
        Ok(learning)
    }

    /// Asks it to stop: it takes a last snapshot and publishes.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    /// Waits until it has ended. Call it until it has returned once, and not again.
    pub async fn ended(&mut self) -> anyhow::Result<Option<Outcome>> {
        let ended = (&mut self.ended).await;
        ended.unwrap_or_else(|_| Err(anyhow!("the engine thread panicked")))
    }
}
