//! `pointsman simulate`: simulated traffic against a running router, measured against known expected rewards.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::json;

use super::Failure;
use super::client::{self, Trust};
use super::output::{out, outln, width};
use super::outputs;
use super::traffic::{Aim, Simulation, TICK, Teller, rate};
use super::world::{WorldArgs, share};
use crate::config::Config;
use crate::event::{ModelName, Name};
use crate::report::{Column, Table};
use crate::serve::Signals;
use crate::simulate::history::{History, Summary};
use crate::simulate::traffic::{Traffic, TrafficSpec};

/// Send simulated traffic to a running router and measure the rewards it earns
///
/// Sends simulated queries to POST /v1/route of a router sidecar (`pointsman route`). Each answer earns a reward of 0 or 1
/// with a probability that depends on query and model; the reward goes to POST /v1/rewards after a delay, or is lost. With
/// `pointsman learn` reading the router's events the loop is closed: the expected reward rises above that of the best single
/// model, towards the oracle, which always uses the best model of each query. Use the router's configuration: learner.dim
/// and learner.models must match.
///
/// If the router is unreachable or not ready, requests are retried with backoff. SIGINT or SIGTERM stops the simulation and
/// prints the table. A seed determines models, queries and rewards; request ids are new in every run.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// URL of the router, http:// or https:// [default: http.listen, on this machine]
    #[arg(long, value_name = "URL")]
    to: Option<String>,
    /// Requests per second; 0 = unlimited
    #[arg(long, default_value_t = 100.0, value_parser = rate)]
    rate: f64,
    /// Number of requests; 0 = until a signal
    #[arg(long, default_value_t = 0)]
    requests: u64,
    /// Mean delay between answer and reward in milliseconds, exponentially distributed
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(..=86_400_000))]
    delay_ms: u64,
    /// Share of rewards that are lost, 0 to 1
    #[arg(long, alias = "lost", default_value_t = 0.0, value_parser = share)]
    loss: f64,
    /// Seed of models, queries, rewards, losses and delays
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Space of the requests
    #[arg(long, default_value = "default")]
    space: String,
    /// Bearer token [default: http.token, e.g. from POINTSMAN__HTTP__TOKEN]
    #[arg(long)]
    token: Option<String>,
    /// Number of concurrent connections, 1 to 1000
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=1000))]
    connections: u16,
    #[command(flatten)]
    world: WorldArgs,
    /// Request at which the models change abruptly
    #[arg(long, value_name = "REQUEST")]
    switch_at: Option<u64>,
    /// Write the table to this file, as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "Examples:
  pointsman route --config shop.toml --serve-uniform &
  pointsman simulate --config shop.toml --requests 20000 --rate 0
  pointsman simulate --config shop.toml --to http://router:9464 --delay-ms 2000 --loss 0.1
  pointsman simulate --config shop.toml --switch-at 50000 --json

Expected rewards are computed under the propensities that the router returns. In the table, \"gap closed\" is 0% for always \
using the best single model and 100% for always using the best model of each query.";

/// Time limit for open requests after a signal.
const DRAIN: Duration = Duration::from_secs(5);

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    let settings = config.check().map_err(|e| Failure::Usage(e.into()))?;
    outputs::check(&[], &[("--csv", args.csv.as_deref())])?;
    let space = Name::try_from(args.space.as_str()).context("--space").map_err(Failure::Usage)?;
    let url = match &args.to {
        Some(url) => client::check_url(url).context("--to").map_err(Failure::Usage)?,
        None => client::local(&config.http),
    };
    let spec = settings.space(&space);
    let traffic = TrafficSpec {
        requests: Some(args.requests).filter(|requests| *requests > 0),
        rate: args.rate,
        delay_ms: args.delay_ms as f64,
        loss: args.loss,
        switch_at: args.switch_at,
        seed: args.seed,
    };
    let token = args.token.clone().unwrap_or_else(|| config.http.token.0.clone());
    let trust = Trust::load(&config.http.tls).map_err(Failure::Usage)?;
    let (models, connections) = (spec.models.clone(), args.connections);
    let traffic = Traffic::new(args.world.draw(spec.dim, spec.models.len(), args.seed), traffic);
    let simulation = Simulation::new(Aim { url, token, trust, space, models, connections }, traffic);
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start the async runtime")?;
    runtime.block_on(watch(args, &simulation))?;
    let outcome = Outcome::of(&simulation);
    let table = outcome.table();
    super::write_csv(args.csv.as_deref(), &[&table])?;
    if args.json {
        outln!("{}", outcome.json(args, &simulation))?;
    } else {
        out!("{}", table.text(width()))?;
    }
    Ok(())
}

/// Starts the connections and reports progress until they are done or a signal arrives.
async fn watch(args: &Args, simulation: &Arc<Simulation>) -> anyhow::Result<()> {
    let mut signals = Signals::catch()?;
    let mut ended = simulation.start()?;
    let mut teller = Teller::new(args.requests);
    let mut ticks = tokio::time::interval(TICK);
    let mut deadline = None;
    let outcome = loop {
        tokio::select! {
            error = ended.recv() => break error.map_or(Ok(()), Err),
            _ = ticks.tick() => teller.tell(simulation),
            _ = signals.received() => deadline = deadline.or(Some(Instant::now() + DRAIN)),
        }
        if deadline.is_some() && !simulation.lock().stopped {
            teller.aside(|| tracing::info!("received a signal, stopping"));
            simulation.stop();
        }
        if deadline.is_some_and(|deadline| Instant::now() > deadline) {
            break Ok(());
        }
    };
    simulation.stop();
    teller.finish();
    outcome
}

/// Result of the simulation.
struct Outcome {
    seconds: f64,
    /// Up to the last answer: rewards may be sent long after it.
    requests_per_s: Option<f64>,
    requests: u64,
    rewards: u64,
    lost: u64,
    unsent: u64,
    errors: u64,
    p50_ms: Option<f64>,
    p99_ms: Option<f64>,
    mean_reward: Option<f64>,
    params_version: u64,
    all: Summary,
    last_tenth: Summary,
    best: Option<ModelName>,
}

impl Outcome {
    fn of(simulation: &Simulation) -> Self {
        let state = simulation.lock();
        let history: &History = state.traffic.history();
        let best = simulation.models.get(history.best_constant()).filter(|_| history.rounds() > 0);
        let in_ms = |share: f64| state.latencies.at(share).map(|seconds| 1e3 * seconds);
        Self {
            seconds: simulation.start.elapsed().as_secs_f64(),
            requests_per_s: (history.rounds() > 0).then(|| history.rounds() as f64 / state.answered.as_secs_f64()),
            requests: history.rounds(),
            rewards: state.rewards,
            lost: state.traffic.lost(),
            unsent: state.traffic.unsent(),
            errors: state.errors,
            p50_ms: in_ms(0.5),
            p99_ms: in_ms(0.99),
            mean_reward: (state.rewards > 0).then(|| state.reward_sum / state.rewards as f64),
            params_version: state.params_version,
            all: history.summary(1.0),
            last_tenth: history.summary(0.1),
            best: best.cloned(),
        }
    }

    fn gaps(&self) -> (f64, f64) {
        (self.all.gap_closed(self.all.policy), self.last_tenth.gap_closed(self.last_tenth.policy))
    }

    fn table(&self) -> Table {
        let number = |value: Option<f64>, digits: usize| value.map_or("-".to_owned(), |x| format!("{x:.digits$}"));
        let of_requests = |value: f64, digits: usize| number(Some(value).filter(|_| self.requests > 0), digits);
        let percent = |value: f64| format!("{}%", of_requests(100.0 * value, 1)).replace("-%", "-");
        let best = self.best.as_ref().map_or(String::new(), |name| format!(" ({name})"));
        let (gap, last_gap) = self.gaps();
        let rows = [
            ("requests".to_owned(), self.requests.to_string()),
            ("requests per second".to_owned(), number(self.requests_per_s, 1)),
            ("rewards sent".to_owned(), self.rewards.to_string()),
            ("rewards lost on purpose".to_owned(), self.lost.to_string()),
            ("rewards not sent before the end".to_owned(), self.unsent.to_string()),
            ("errors".to_owned(), self.errors.to_string()),
            ("latency p50 (ms)".to_owned(), number(self.p50_ms, 2)),
            ("latency p99 (ms)".to_owned(), number(self.p99_ms, 2)),
            ("parameters version".to_owned(), self.params_version.to_string()),
            ("mean reward".to_owned(), number(self.mean_reward, 4)),
            ("expected reward".to_owned(), of_requests(self.all.policy, 4)),
            (format!("best constant model{best}"), of_requests(self.all.best_constant, 4)),
            ("uniform".to_owned(), of_requests(self.all.uniform, 4)),
            ("oracle of every query".to_owned(), of_requests(self.all.oracle, 4)),
            ("gap closed".to_owned(), percent(gap)),
            ("gap closed in the last tenth".to_owned(), percent(last_gap)),
        ];
        let rows = rows.into_iter().map(|(what, value)| vec![what, value]).collect();
        Table { columns: vec![Column::left("simulation"), Column::right("")], rows, note: None }
    }

    fn json(&self, args: &Args, simulation: &Simulation) -> serde_json::Value {
        let Summary { policy, best_constant, uniform, oracle } = self.all;
        let (gap, last_gap) = self.gaps();
        json!({
            "to": simulation.target.url(),
            "run": simulation.run,
            "space": args.space,
            "seed": args.seed,
            "seconds": self.seconds,
            "requests": self.requests,
            "requests_per_s": self.requests_per_s,
            "rewards": self.rewards,
            "rewards_lost": self.lost,
            "rewards_unsent": self.unsent,
            "errors": self.errors,
            "latency_ms": { "p50": self.p50_ms, "p99": self.p99_ms },
            "params_version": self.params_version,
            "mean_reward": self.mean_reward,
            "expected_reward": {
                "policy": policy, "best_constant": best_constant, "uniform": uniform, "oracle": oracle,
            },
            "best_constant_model": self.best,
            "gap_closed": gap,
            "gap_closed_last_tenth": last_gap,
        })
    }
}
