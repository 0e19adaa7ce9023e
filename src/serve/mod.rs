//! Runs a learner and a router in a process: what `learn`, `route` and `up` are made of.
//!
//! | file | does |
//! |---|---|
//! | `learner` | a learner on a thread of its own |
//! | `router` | a router: events out, parameters in, HTTP |
//! | `reload` | applies a changed configuration |
//! | `feed` | where a router writes events and reads parameters |

mod feed;
mod learner;
mod reload;
mod router;

use std::io;
use std::sync::Arc;

use anyhow::Context;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::HttpConfig;
use crate::http::Server;
use crate::telemetry::HttpCounters;

pub use learner::{Learning, Options};
pub use reload::{Load, NotReloaded, Reload};
pub use router::Routing;

/// The signals that stop a daemon.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Catches SIGTERM and SIGINT from now on. Must be called within the runtime.
    pub fn catch() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits for a signal; returns its name.
    pub async fn received(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// Listens on `http.listen`. The error says how else to set it.
pub async fn listen(config: &HttpConfig, counters: Arc<HttpCounters>, remedy: &str) -> anyhow::Result<Server> {
    let listen = &config.listen;
    let server = Server::bind(config, counters).await;
    server.with_context(|| format!("cannot listen on {listen}: set http.listen to {remedy}"))
}
