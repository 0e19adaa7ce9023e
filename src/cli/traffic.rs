//! Simulated traffic for a router: connections that ask and send rewards, and their progress.

use std::io::IsTerminal;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::anyhow;
use indicatif::{ProgressBar, ProgressStyle};
use rand::RngExt;
use tokio::sync::mpsc;

use super::client::{self, Decided, NoAnswer, Target, Trust};
use crate::event::{ModelName, Name};
use crate::simulate::history::Summary;
use crate::simulate::quantiles::Quantiles;
use crate::simulate::traffic::{Ask, Earned, Task, Traffic};

/// Time limit of an attempt.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Pause between attempts: initial and longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));
/// Time between two log lines without a terminal, and between two about the same problem.
const LINES: Duration = Duration::from_secs(10);
/// Time between two updates of the progress line on a terminal.
const MOVES: Duration = Duration::from_secs(1);
/// Time between two checks of the state.
pub const TICK: Duration = Duration::from_millis(200);

/// What all connections share.
pub struct Simulation {
    /// The router.
    pub target: Target,
    /// The models, in the order of the configuration.
    pub models: Vec<ModelName>,
    /// Prefix of the request ids of this run.
    pub run: String,
    /// When it began.
    pub start: Instant,
    state: Mutex<State>,
    /// Signals new work, or the end.
    changed: Condvar,
    connections: u16,
}

/// Where the router is, and who asks it.
pub struct Aim {
    /// Its base URL.
    pub url: String,
    /// The bearer token; empty = none.
    pub token: String,
    /// The certificates that are accepted.
    pub trust: Trust,
    /// Space of the requests.
    pub space: Name,
    /// Its models.
    pub models: Vec<ModelName>,
    /// Number of concurrent connections.
    pub connections: u16,
}

/// What has become of the requests so far.
pub struct State {
    /// Who asks when, and what was earned.
    pub traffic: Traffic,
    /// Whether no more requests are sent.
    pub stopped: bool,
    /// Of the answers.
    pub latencies: Quantiles,
    /// When the last answer arrived.
    pub answered: Duration,
    /// Failed attempts.
    pub errors: u64,
    /// Rewards sent.
    pub rewards: u64,
    /// Their sum.
    pub reward_sum: f64,
    /// Newest version that an answer named.
    pub params_version: u64,
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
    /// A simulation that has not started.
    pub fn new(aim: Aim, traffic: Traffic) -> Arc<Self> {
        let Aim { url, token, trust, space, models, connections } = aim;
        let agent = client::agent(TIMEOUT, connections.into(), trust);
        Arc::new(Self {
            target: Target::new(agent, url, space, token),
            models,
            // A repeated id gets the remembered answer: runs must not share ids.
            run: format!("sim-{:012x}", rand::rng().random::<u64>() >> 16),
            start: Instant::now(),
            state: Mutex::new(State::new(traffic)),
            changed: Condvar::new(),
            connections,
        })
    }

    /// Starts the connections. The channel passes on an error that ends one, and closes when the last one ends.
    pub fn start(self: &Arc<Self>) -> anyhow::Result<mpsc::UnboundedReceiver<anyhow::Error>> {
        let (failed, ended) = mpsc::unbounded_channel();
        for _ in 0..self.connections {
            let (simulation, failed) = (self.clone(), failed.clone());
            std::thread::Builder::new().name("connection".to_owned()).spawn(move || {
                if let Err(error) = simulation.work() {
                    let _ = failed.send(error);
                }
            })?;
        }
        tracing::info!(to = self.target.url(), run = self.run, "simulation started");
        Ok(ended)
    }

    /// Locks the state.
    pub fn lock(&self) -> MutexGuard<'_, State> {
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

    /// Sends no more requests.
    pub fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        state.traffic.stop();
        self.changed.notify_all();
    }
}

/// Reports progress: an updating line on a terminal, periodic log lines elsewhere.
pub struct Teller {
    bar: Option<ProgressBar>,
    told: Instant,
    rounds: u64,
    /// When the current problem was last reported.
    trouble: Option<Instant>,
}

impl Teller {
    /// Reports in log lines only.
    pub fn in_lines() -> Self {
        Self { bar: None, told: Instant::now(), rounds: 0, trouble: None }
    }

    /// Reports on a run of this many requests; 0: without end.
    pub fn new(requests: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let (bar, style) = match requests {
                0 => (ProgressBar::new_spinner(), "{spinner} {pos} requests  {msg}"),
                n => (ProgressBar::new(n), "{bar:24} {pos}/{len} requests  {msg}  {eta} left"),
            };
            bar.set_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.enable_steady_tick(TICK);
            bar
        });
        Self { bar, ..Self::in_lines() }
    }

    /// Prints without disturbing the progress line.
    pub fn aside(&self, print: impl FnOnce()) {
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// Reports, if it is time to.
    pub fn tell(&mut self, simulation: &Simulation) {
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

    /// Removes the progress line.
    pub fn finish(&self) {
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

/// Parses a rate, from 0 to 1000000 per second.
pub fn rate(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x| (0.0..=1e6).contains(x)).ok_or_else(|| "must be a number from 0 to 1000000".to_owned())
}
