//! `pointsman learn`: the daemon.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;

use super::{Failure, summary};
use crate::config::{Config, Settings};
use crate::runner::{DEAD_LETTERS_BYTES, Places, Runner, Stepped};
use crate::transport::append::Appender;
use crate::transport::directory::Directory;
use crate::transport::file::AtEnd;
use crate::transport::params::ParamsDir;
use crate::wire::events::Parser;

/// Run the daemon: learn from events as they come, keep snapshots, publish parameters
///
/// Follows queries/*.jsonl and rewards/*.jsonl under transport.file.dir, through rotation and compression, and goes on
/// where its store says that it was. After every snapshot (the configuration says how often) it replaces
/// the parameters under params/ there. SIGTERM or SIGINT ends it: it takes a last snapshot, publishes, and exits with 0.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Stop at the present end of the logs, after a last snapshot and publication; join windows stay open
    #[arg(long)]
    once: bool,
    /// With --once: print what it came to as one JSON object
    #[arg(long, requires = "once")]
    json: bool,
}

const EXAMPLES: &str = "Examples:
  pointsman learn --config shop.toml
  pointsman learn --config shop.toml --set transport.file.dir=/var/log/shop --set store.dir=/var/lib/pointsman
  pointsman learn --config shop.toml --once --json";

/// How often a daemon that is busy says how it goes.
const NEWS_EVERY: Duration = Duration::from_secs(30);

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    let settings = config.check().map_err(|e| Failure::Usage(e.into()))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start")?;
    let runner = runtime.block_on(serve(args.once, config, settings))?;
    if args.json {
        println!("{}", summary::json(&runner.engine, runner.merge.out_of_order()));
    }
    Ok(())
}

/// Runs the engine on a thread of its own until it is done or a signal comes.
async fn serve(once: bool, config: &Config, settings: Settings) -> anyhow::Result<Runner> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = Arc::new(AtomicBool::new(false));
    let (done, mut ended) = oneshot::channel();
    let (seen, config) = (stop.clone(), config.clone());
    std::thread::Builder::new().name("engine".to_owned()).spawn(move || {
        let _ = done.send(follow(once, &config, &settings, &seen));
    })?;
    loop {
        tokio::select! {
            outcome = &mut ended => return outcome.unwrap_or_else(|_| Err(anyhow!("the engine panicked"))),
            _ = terminate.recv() => tracing::info!("SIGTERM: stopping"),
            _ = interrupt.recv() => tracing::info!("SIGINT: stopping"),
        }
        stop.store(true, Ordering::Relaxed);
    }
}

fn follow(once: bool, config: &Config, settings: &Settings, stop: &AtomicBool) -> anyhow::Result<Runner> {
    let file = &config.transport.file;
    let poll = Duration::from_millis(file.poll_ms);
    let at_end = if once { AtEnd::Stop } else { AtEnd::Follow { idle: Duration::from_millis(file.idle_ms) } };
    let cannot_read = || format!("cannot read the logs in {} (transport.file.dir)", file.dir.display());
    let dead_letters = Appender::rotating(&file.dir.join("dead-letters"), "dead-letters", DEAD_LETTERS_BYTES)?;
    let params = Some(ParamsDir::new(&file.dir.join("params")));
    let places = Places { store: Some(config.store.clone()), audit: config.audit.path(), dead_letters, params };
    let (mut runner, state) = Runner::open(settings, &config.snapshot, places)?;
    let parser = Arc::new(Parser::new(settings));
    let mut directory = Directory::new(&file.dir, parser, at_end, state.positions.clone());
    directory.create().with_context(cannot_read)?;
    runner.begin(state)?;
    directory.scan(&mut runner.merge).with_context(cannot_read)?;
    for log in directory.missing() {
        tracing::warn!(log, "a log that was read before is gone");
    }
    tracing::info!(dir = %file.dir.display(), once, "learning");
    let (mut scanned, mut news) = (Instant::now(), News::new());
    while !stop.load(Ordering::Relaxed) {
        if !once && scanned.elapsed() >= poll {
            directory.scan(&mut runner.merge).with_context(cannot_read)?;
            scanned = Instant::now();
        }
        match runner.step()? {
            Stepped::Event(_) => news.event(&runner),
            Stepped::End if once => break,
            Stepped::Wait | Stepped::End => {
                if runner.is_due() {
                    runner.snapshot()?;
                }
                std::thread::sleep(poll);
            }
        }
    }
    runner.finish()?;
    let counts = runner.engine.counts();
    tracing::info!(queries = counts.queries(), rewards = counts.rewards(), applied = counts.applied, "stopped");
    Ok(runner)
}

/// A line now and then about how it goes.
struct News {
    since: Instant,
    events: u64,
}

impl News {
    fn new() -> Self {
        Self { since: Instant::now(), events: 0 }
    }

    fn event(&mut self, runner: &Runner) {
        self.events += 1;
        if self.events.is_multiple_of(256) && self.since.elapsed() >= NEWS_EVERY {
            let counts = runner.engine.counts();
            let rate = self.events as f64 / self.since.elapsed().as_secs_f64();
            tracing::info!(
                events_per_s = rate.round(),
                applied = counts.applied,
                pending = counts.join.queries.pending,
                mean_reward = runner.engine.mean_reward(),
                "learning"
            );
            *self = Self::new();
        }
    }
}
