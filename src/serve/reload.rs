//! A changed configuration, applied while the process runs.

use std::sync::{Arc, Mutex};

use tokio::signal::unix::{SignalKind, signal};

use crate::config::{Changes, Config, Settings};
use crate::transport::lock;

/// Reads and validates the configuration again.
pub type Load = Box<dyn Fn() -> anyhow::Result<(Config, Settings)> + Send + Sync>;

/// Applies a configuration to a part of the process.
type Apply = Box<dyn Fn(&Config, &Settings) + Send + Sync>;

/// The configuration in use, and those who use it.
pub struct Reload {
    load: Load,
    current: Mutex<Config>,
    parts: Mutex<Vec<Apply>>,
}

/// Why a configuration is not applied.
#[derive(Debug, thiserror::Error)]
pub enum NotReloaded {
    /// It is invalid.
    #[error("{0}")]
    Invalid(String),
    /// Keys differ that cannot change while the process runs.
    #[error("{} cannot change while the process runs: restart it, or set the old value again; nothing was changed", .0.join(", "))]
    Fixed(Vec<String>),
}

impl Reload {
    /// For a process that started with `config`.
    pub fn new(config: &Config, load: Load) -> Arc<Self> {
        Arc::new(Self { load, current: Mutex::new(config.clone()), parts: Mutex::default() })
    }

    /// Adds a part of the process.
    pub fn add(&self, apply: impl Fn(&Config, &Settings) + Send + Sync + 'static) {
        lock(&self.parts).push(Box::new(apply));
    }

    /// Reads the configuration and applies what has changed; returns the keys. An invalid configuration, or one with a change
    /// that needs a restart, changes nothing.
    pub fn reload(&self) -> Result<Vec<String>, NotReloaded> {
        let mut current = lock(&self.current);
        let (config, settings) = (self.load)().map_err(|error| NotReloaded::Invalid(format!("{error:#}")))?;
        let Changes { live, fixed } = Changes::between(&current, &config);
        if !fixed.is_empty() {
            return Err(NotReloaded::Fixed(fixed));
        }
        if !live.is_empty() {
            lock(&self.parts).iter().for_each(|apply| apply(&config, &settings));
            *current = config;
        }
        tracing::info!(changed = live.join(", "), "configuration reloaded");
        Ok(live)
    }

    /// Reloads at every SIGHUP. Must be called within the runtime.
    pub fn on_hangup(self: &Arc<Self>) -> std::io::Result<()> {
        let (reload, mut hangups) = (self.clone(), signal(SignalKind::hangup())?);
        tokio::spawn(async move {
            while hangups.recv().await.is_some() {
                let reload = reload.clone();
                let done = tokio::task::spawn_blocking(move || reload.reload()).await;
                if let Ok(Err(error)) = done {
                    tracing::error!("cannot reload the configuration: {error}");
                }
            }
        });
        Ok(())
    }
}
