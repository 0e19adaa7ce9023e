//! A router: writes events, reads parameters, serves HTTP.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::sync::oneshot;

use super::Reload;
use super::feed::{Intake, connect};
use crate::config::{Config, Settings};
use crate::http::sidecar::Sidecar;
use crate::http::{Server, both};
use crate::router::Router;
use crate::state::running::RunningStore;
use crate::telemetry::Status;
use crate::transport::writer::EventWriter;

/// Time limit for open requests at shutdown.
const DRAIN: Duration = Duration::from_secs(4);

/// A router that runs, and the server that it will answer on.
pub struct Routing {
    server: Server,
    sidecar: Arc<Sidecar>,
    writer: Arc<EventWriter>,
    feeder: JoinHandle<()>,
    /// Cleared to stop the feeder.
    fed: Arc<AtomicBool>,
    failure: oneshot::Receiver<anyhow::Error>,
}

impl Routing {
    /// Starts the threads that write events and read parameters. `serve_uniform` routes before there are parameters.
    pub fn start(
        config: &Config,
        settings: &Settings,
        router: Router,
        serve_uniform: bool,
        server: Server,
    ) -> anyhow::Result<Self> {
        let (writer, feed) = connect(config, settings)?;
        let (writer, router, ready) = (Arc::new(writer), Arc::new(router), Arc::new(AtomicBool::new(serve_uniform)));
        let sidecar = Arc::new(Sidecar::new(config, settings.clone(), router, ready, writer.clone(), &server));
        let intake = Intake { sidecar: sidecar.clone() };
        let fed = Arc::new(AtomicBool::new(true));
        let feeding = fed.clone();
        // Loading parameters takes milliseconds: not on a thread that serves requests.
        let (failed, failure) = oneshot::channel();
        let feeder = std::thread::Builder::new().name("parameters".to_owned()).spawn(move || {
            if let Err(problem) = feed(&intake, &feeding) {
                let _ = failed.send(problem);
            }
        })?;
        Ok(Self { server, sidecar, writer, feeder, fed, failure })
    }

    /// Serves until `stop` resolves, then completes open requests and writes all accepted events. With a learner the same
    /// server also answers for it. Fails if parameters can no longer be read.
    pub async fn serve(
        self,
        learner: Option<(Arc<Status>, RunningStore)>,
        reload: Arc<Reload>,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> anyhow::Result<()> {
        let Self { server, sidecar, writer, feeder, fed, mut failure } = self;
        reload.add(sidecar.reconfigure());
        let (stopping, stopped) = oneshot::channel();
        let stop = async move {
            stop.await;
            let _ = stopping.send(());
        };
        let serving: Pin<Box<dyn Future<Output = ()> + Send>> = match learner {
            None => Box::pin(sidecar.serve(server, reload, stop)),
            Some((status, store)) => Box::pin(both::serve(server, sidecar, status, store, reload, stop)),
        };
        let served = tokio::select! {
            () = serving => Ok(()),
            () = async { let _ = stopped.await; tokio::time::sleep(DRAIN).await } => {
                tracing::warn!("{} s after the signal some requests were still open, closing them", DRAIN.as_secs());
                Ok(())
            }
            Ok(problem) = &mut failure => Err(problem),
        };
        fed.store(false, Ordering::Relaxed);
        // In every case: deliver accepted events first.
        let drained = tokio::task::spawn_blocking(move || {
            let _ = feeder.join();
            writer.drain()
        });
        drained.await?.and(served)
    }
}
