//! `pointsman simulate`: simulated traffic against a running router, measured against known expected rewards.

use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use indicatif::{ProgressBar, ProgressStyle};
use rand::RngExt;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::Failure;
use super::client::{self, Decided, NoAnswer, Target, Trust};
use super::output::{out, outln, width};
use super::outputs;
use super::world::{WorldArgs, share};
use crate::config::Config;
use crate::event::{ModelName, Name};
use crate::report::{Column, Table};
use crate::simulate::history::{History, Summary};
use crate::simulate::quantiles::Quantiles;
use crate::simulate::traffic::{Ask, Earned, Task, Traffic, TrafficSpec};

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

/// Time limit of an attempt.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between attempts: initial and longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Time between two log lines without a terminal, and between two about the same problem.
const LINES: Duration = Duration::from_secs(10);
/// Time between two updates of the progress line on a terminal.
const MOVES: Duration = Duration::from_secs(1);
/// Time between two checks of the state.
const TICK: Duration = Duration::from_millis(200);
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
    let agent = client::agent(TIMEOUT, args.connections.into(), trust);
    let simulation = Arc::new(Simulation {
        target: Target::new(agent, url, space, token),
        models: spec.models.clone(),
        // A repeated id gets the remembered answer: runs must not share ids.
        run: format!("sim-{:012x}", rand::rng().random::<u64>() >> 16),
        state: Mutex::new(State::new(Traffic::new(args.world.draw(spec.dim, spec.models.len(), args.seed), traffic))),
        changed: Condvar::new(),
        start: Instant::now(),
    });
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

/// What all connections share.
struct Simulation {
    target: Target,
    models: Vec<ModelName>,
    /// Prefix of the request ids of this run.
    run: String,
    state: Mutex<State>,
    /// Signals new work, or the end.
    changed: Condvar,
    start: Instant,
}

struct State {
    traffic: Traffic,
    stopped: bool,
    latencies: Quantiles,
    /// When the last answer arrived.
    answered: Duration,
    errors: u64,
    rewards: u64,
    reward_sum: f64,
    params_version: u64,
    /// Why requests currently fail.
    trouble: Option<String>,
}

impl State {
    fn new(traffic: Traffic) -> Self {
        Self {
            traffic,
            stopped: false,
            latencies: Quantiles::default(),
            answered: Duration::ZERO,
            errors: 0,
            rewards: 0,
            reward_sum: 0.0,
            params_version: 0,
            trouble: None,
        }
    }
}

enum Job {
    Ask(Box<Ask>),
    Reward(Earned),
}

impl Simulation {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now_us(&self) -> u64 {
        self.start.elapsed().as_micros() as u64
    }

    /// Runs one connection until all work is done.
    fn work(&self) -> anyhow::Result<()> {
        while let Some(job) = self.next() {
            match job {
                Job::Ask(ask) => self.ask(&ask)?,
                Job::Reward(earned) => self.reward(earned)?,
            }
        }
        Ok(())
    }

    /// Waits for the next job; `None` when all work is done.
    fn next(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            let wait = match state.traffic.next(self.now_us()) {
                Task::Ask(ask) => return Some(Job::Ask(ask)),
                Task::Reward(earned) => return Some(Job::Reward(earned)),
                Task::WaitUntil(time_us) => Duration::from_micros(time_us.saturating_sub(self.now_us())),
                Task::WaitForAnswer => TICK,
                Task::Done => {
                    self.changed.notify_all();
                    return None;
                }
            };
            state = self.wait(state, wait);
        }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, time: Duration) -> MutexGuard<'a, State> {
        self.changed.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner).0
    }

    fn ask(&self, ask: &Ask) -> anyhow::Result<()> {
        let id = self.id(ask.number);
        let Some((decided, took)) = self.persist(|| self.target.route(&id, ask.query.as_slice()))? else {
            self.lock().traffic.abandoned();
            return Ok(());
        };
        let (model, propensities) = self.understand(&decided)?;
        let mut state = self.lock();
        state.latencies.add(took.as_secs_f64());
        state.answered = self.start.elapsed();
        state.params_version = state.params_version.max(decided.params_version);
        state.traffic.answered(ask, model, propensities, self.now_us());
        self.changed.notify_one();
        Ok(())
    }

    fn reward(&self, Earned { number, reward }: Earned) -> anyhow::Result<()> {
        let id = self.id(number);
        let sent = self.persist(|| self.target.reward(&id, reward))?;
        let mut state = self.lock();
        if sent.is_some() {
            state.rewards += 1;
            state.reward_sum += reward;
        } else {
            state.traffic.undelivered();
        }
        Ok(())
    }

    fn id(&self, number: u64) -> String {
        format!("{}-{number}", self.run)
    }

    /// The index of the model and all probabilities, in the order of the configuration.
    fn understand(&self, decided: &Decided) -> anyhow::Result<(usize, Vec<f64>)> {
        let index = |name: &str| self.models.iter().position(|model| model.as_str() == name);
        let unknown = decided.propensities.keys().find(|name| index(name).is_none());
        if let Some(name) = unknown {
            return Err(anyhow!(
                "the router has a model {name:?} that is not in learner.models: use the router's configuration"
            ));
        }
        let model = index(&decided.model)
            .ok_or_else(|| anyhow!("invalid answer: no propensity for the chosen model {:?}", decided.model))?;
        let of = |name: &ModelName| decided.propensities.get(name.as_str()).copied().unwrap_or_default();
        Ok((model, self.models.iter().map(of).collect()))
    }

    /// Retries until there is an answer or the simulation stops; returns the duration of the last attempt.
    fn persist<T>(&self, attempt: impl Fn() -> Result<T, NoAnswer>) -> anyhow::Result<Option<(T, Duration)>> {
        let (mut pause, longest) = PAUSES;
        loop {
            let start = Instant::now();
            let answer = attempt();
            let took = start.elapsed();
            let mut state = self.lock();
            match answer {
                Ok(answer) => {
                    state.trouble = None;
                    return Ok(Some((answer, took)));
                }
                Err(NoAnswer::Ever(error)) => return Err(error),
                Err(NoAnswer::Yet(why)) => {
                    state.errors += 1;
                    state.trouble = Some(why);
                }
            }
            let until = Instant::now() + pause;
            while !state.stopped && Instant::now() < until {
                state = self.wait(state, until - Instant::now());
            }
            if state.stopped {
                return Ok(None);
            }
            pause = longest.min(2 * pause);
        }
    }

    fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        state.traffic.stop();
        self.changed.notify_all();
    }
}

/// Starts the connections and reports progress until they are done or a signal arrives.
async fn watch(args: &Args, simulation: &Arc<Simulation>) -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (failed, mut ended) = mpsc::unbounded_channel();
    for _ in 0..args.connections {
        let (simulation, failed) = (simulation.clone(), failed.clone());
        std::thread::Builder::new().name("connection".to_owned()).spawn(move || {
            if let Err(error) = simulation.work() {
                let _ = failed.send(error);
            }
        })?;
    }
    // It ends when the last connection does.
    drop(failed);
    let mut teller = Teller::new(args.requests);
    tracing::info!(to = simulation.target.url(), run = simulation.run, "simulation started");
    let mut ticks = tokio::time::interval(TICK);
    let mut deadline = None;
    let outcome = loop {
        tokio::select! {
            error = ended.recv() => break error.map_or(Ok(()), Err),
            _ = ticks.tick() => teller.tell(simulation),
            _ = terminate.recv() => deadline = deadline.or(Some(Instant::now() + DRAIN)),
            _ = interrupt.recv() => deadline = deadline.or(Some(Instant::now() + DRAIN)),
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

/// Reports progress: an updating line on a terminal, periodic log lines elsewhere.
struct Teller {
    bar: Option<ProgressBar>,
    told: Instant,
    rounds: u64,
    /// When the current problem was last reported.
    trouble: Option<Instant>,
}

impl Teller {
    fn new(requests: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let (bar, style) = match requests {
                0 => (ProgressBar::new_spinner(), "{spinner} {pos} requests  {msg}"),
                n => (ProgressBar::new(n), "{bar:24} {pos}/{len} requests  {msg}  {eta} left"),
            };
            bar.set_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.enable_steady_tick(TICK);
            bar
        });
        Self { bar, told: Instant::now(), rounds: 0, trouble: None }
    }

    /// Prints without disturbing the progress line.
    fn aside(&self, print: impl FnOnce()) {
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    fn tell(&mut self, simulation: &Simulation) {
        let mut state = simulation.lock();
        let (rounds, errors, trouble) = (state.traffic.history().rounds(), state.errors, state.trouble.clone());
        let mean_reward = state.reward_sum / state.rewards.max(1) as f64;
        let elapsed = self.told.elapsed();
        let is_time = elapsed >= if self.bar.is_some() { MOVES } else { LINES };
        let stretch = is_time.then(|| Stretch::take(&mut state.traffic));
        drop(state);
        self.tell_trouble(trouble.as_deref(), simulation.target.url());
        if let Some(stretch) = stretch {
            let per_s = (rounds - self.rounds) as f64 / elapsed.as_secs_f64();
            (self.told, self.rounds) = (Instant::now(), rounds);
            match (&self.bar, stretch) {
                (Some(bar), Some(stretch)) => bar.set_message(format!("{per_s:.0}/s  {stretch}  errors {errors}")),
                (Some(bar), None) => bar.set_message(format!("no answers  errors {errors}")),
                (None, Some(stretch)) => {
                    tracing::info!(
                        "{rounds} requests, {per_s:.1}/s; mean reward {mean_reward:.4}; {stretch}; errors {errors}"
                    );
                }
                (None, None) => tracing::info!("{rounds} requests, 0/s; errors {errors}"),
            }
        }
        if let Some(bar) = &self.bar {
            bar.set_position(rounds);
        }
    }

    fn tell_trouble(&mut self, trouble: Option<&str>, url: &str) {
        match (trouble, self.trouble) {
            (Some(why), told) if told.is_none_or(|told| told.elapsed() >= LINES) => {
                self.aside(|| tracing::warn!("no answer from the router at {url}: {why}; retrying"));
                self.trouble = Some(Instant::now());
            }
            (None, Some(_)) => {
                self.aside(|| tracing::info!("the router at {url} answers again"));
                self.trouble = None;
            }
            _ => {}
        }
    }

    fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Expected rewards of the last seconds, against the best constant model of the whole run.
struct Stretch(Summary);

impl Stretch {
    /// None if there were no answers.
    fn take(traffic: &mut Traffic) -> Option<Self> {
        let (best, recent) = (traffic.history().best_constant(), traffic.take_recent());
        (recent.rounds() > 0).then(|| Self(recent.summary_against(1.0, best)))
    }
}

impl std::fmt::Display for Stretch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Summary { policy, best_constant, oracle, .. } = self.0;
        write!(f, "expected {policy:.4}, best constant {best_constant:.4}, oracle {oracle:.4}")?;
        write!(f, ", gap closed {:.1}%", 100.0 * self.0.gap_closed(policy))
    }
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

fn rate(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x| (0.0..=1e6).contains(x)).ok_or_else(|| "must be a number from 0 to 1000000".to_owned())
}
