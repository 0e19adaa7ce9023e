//! `pointsman learn`: the daemon.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, anyhow};
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use super::output::outln;
use super::{Failure, rejected, summary, warned};
use crate::config::{Config, Settings};
use crate::engine::Totals;
use crate::http::{Server, learner, raise_descriptor_limit};
use crate::runner::follow::{Outcome, Run};
use crate::state::running::RunningStore;
use crate::telemetry::Status;

/// Run the daemon: learn from live events, take snapshots, publish parameters
///
/// With transport.kind = "file" it follows queries/*.jsonl and rewards/*.jsonl under transport.file.dir, across rotation and
/// compression; with "kafka" the topics of transport.kafka.topics. It resumes from the last snapshot in its store. After
/// every snapshot (snapshot.every_ms and every_updates) it publishes the parameters, as files under params/ or to their topic. With
/// transport.kafka.lanes = "partition", any number of instances with the same group share the work.
///
/// http.listen serves /live, /ready, /metrics, /v1/status and a status page at / (empty = no HTTP). On SIGTERM or SIGINT the
/// daemon takes a last snapshot, publishes, and exits with 0. A crash or kill -9 at any time is safe.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Stop at the present end of the inputs, after a last snapshot and publication; join windows stay open
    #[arg(long)]
    once: bool,
    /// With --once: print a summary as one JSON object
    #[arg(long, requires = "once")]
    json: bool,
    /// Kafka: continue despite lost messages (deleted before they were read, or a recreated topic), and skip batches that
    /// cannot be read (damaged, or too large once decompressed); every gap is recorded in the dead-letter topic
    #[arg(long)]
    accept_gap: bool,
}

const EXAMPLES: &str = "Examples:
  pointsman learn --config shop.toml
  pointsman learn --set transport.file.dir=/var/log/shop --set store.dir=/var/lib/pointsman
  pointsman learn --config shop.toml --set transport.kind=kafka \\
      --set transport.kafka.brokers=broker:9092
  pointsman learn --config shop.toml --once --json

Exit codes: 0 stopped by a signal or --once, 1 failed while running (also: with --once, all queries or all rewards were
rejected), 2 invalid usage or configuration.";

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    let settings = config.check().map_err(|e| Failure::Usage(e.into()))?;
    if !args.once {
        config.http.check_listen().map_err(|e| Failure::Usage(e.into()))?;
    }
    raise_descriptor_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .context("cannot start the async runtime")?;
    let status = Arc::new(Status::default());
    let outcome = runtime.block_on(serve(args, config, settings, &status))?;
    let Some(outcome) = outcome.filter(|_| args.once) else { return Ok(()) };
    if args.json {
        outln!("{}", summary::json(&outcome.engines, outcome.out_of_order))?;
    }
    for line in warned::lines(&warned::of(&outcome.engines)) {
        tracing::warn!("{}", line.trim_start_matches("warning: "));
    }
    let (reasons, counts) = (status.facts().reasons(), Totals::of(&outcome.engines).counts);
    rejected::check_usable(&reasons, &counts)?;
    if let Some(warning) = rejected::warning(&reasons, &counts) {
        tracing::warn!("{}", warning.iter().map(|line| line.trim_start()).collect::<Vec<_>>().join("; "));
    }
    Ok(())
}

/// Runs the engine on its own thread until it finishes or a signal arrives.
async fn serve(
    args: &Args,
    config: &Config,
    settings: Settings,
    status: &Arc<Status>,
) -> anyhow::Result<Option<Outcome>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = Arc::new(AtomicBool::new(false));
    let (status, store) = (status.clone(), RunningStore::default());
    let listen = &config.http.listen;
    if !args.once && !listen.is_empty() {
        let server = Server::bind(&config.http, status.http()).await.with_context(|| {
            format!("cannot listen on {listen}: set http.listen to a free address, or to \"\" for no HTTP")
        })?;
        tracing::info!(listen = server.url(), "HTTP server started");
        tokio::spawn(learner::serve(server, status.clone(), store.clone(), std::future::pending()));
    }
    let (done, mut ended) = oneshot::channel();
    let (seen, config, once, accept_gap) = (stop.clone(), config.clone(), args.once, args.accept_gap);
    let runtime = Handle::current();
    std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
        let (config, settings, stop, status, runtime) = (&config, &settings, &seen, &*status, &runtime);
        let run = Run { once, accept_gap, config, settings, stop, status, store: &store, runtime };
        let _ = done.send(run.follow());
    })?;
    loop {
        tokio::select! {
            outcome = &mut ended => return outcome.unwrap_or_else(|_| Err(anyhow!("the engine thread panicked"))),
            _ = terminate.recv() => tracing::info!("received SIGTERM, stopping"),
            _ = interrupt.recv() => tracing::info!("received SIGINT, stopping"),
        }
        stop.store(true, Ordering::Relaxed);
    }
}
