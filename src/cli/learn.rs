//! `pointsman learn`: the daemon.

use std::sync::Arc;

use anyhow::Context;

use super::output::outln;
use super::{Failure, rejected, summary, warned};
use crate::config::{Config, Settings};
use crate::engine::Totals;
use crate::http::{learner, raise_descriptor_limit};
use crate::runner::follow::Outcome;
use crate::serve::{Learning, Load, Options, Reload, Signals, listen};
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
///
/// On SIGHUP or POST /v1/reload it reads its configuration again and applies what has changed: models come and go, and so do
/// budgets, without a restart. A change that needs one is refused as a whole, and named.
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
pub fn run(args: &Args, config: &Config, load: Load) -> Result<(), Failure> {
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
    let outcome = runtime.block_on(serve(args, config, settings, status.clone(), load))?;
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

/// Runs the learner until it finishes or a signal arrives.
async fn serve(
    args: &Args,
    config: &Config,
    settings: Settings,
    status: Arc<Status>,
    load: Load,
) -> anyhow::Result<Option<Outcome>> {
    let mut signals = Signals::catch()?;
    let server = match args.once || config.http.listen.is_empty() {
        true => None,
        false => Some(listen(&config.http, status.http(), "a free address, or to \"\" for no HTTP").await?),
    };
    let options = Options { once: args.once, accept_gap: args.accept_gap };
    let mut learning = Learning::start(config, &settings, options, status.clone())?;
    let reload = Reload::new(config, load);
    if !args.once {
        reload.add(learning.reconfigure());
        reload.on_hangup()?;
    }
    if let Some(server) = server {
        tracing::info!(listen = server.url(), "HTTP server started");
        tokio::spawn(learner::serve(server, status, learning.store.clone(), reload, std::future::pending()));
    }
    loop {
        tokio::select! {
            outcome = learning.ended() => return outcome,
            signal = signals.received() => {
                tracing::info!("received {signal}, stopping");
                learning.stop();
            }
        }
    }
}
