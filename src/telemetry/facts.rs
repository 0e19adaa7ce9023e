//! Facts that the learner reports.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use super::{Reasons, SpaceNews, Timing};
use crate::dead_letters::{Recording, SAMPLE};
use crate::engine::{Applied, Side};
use crate::evaluate::rollout::{RolloutView, Stage};
use crate::evaluate::sample_ratio::SampleRatioView;
use crate::event::{ModelName, Name};
use crate::hpg::factored::FORESIGHT;
use crate::router::Params;
use crate::state::StateError;
use crate::store::StoreError;
use crate::transport::{Letter, lock, now_ms};
use crate::wire::events::Bad;

/// Number of recent dead letters kept for the page.
const DEAD_MAX: usize = 20;

/// Number of recent snapshots kept for the page.
const SNAPSHOTS_MAX: usize = 10;

/// Number of events over which the update time is averaged.
const AVERAGED: u32 = FORESIGHT as u32;

/// Interval at which a lasting flood of dead letters is logged again.
const WARN_AGAIN: Duration = Duration::from_secs(3600);

/// What has happened since the process started.
#[derive(Debug)]
pub struct Facts {
    /// Processing time of events that led to an update, averaged over a few: learners defer examples and apply several
    /// together.
    pub(super) update: Timing,
    /// Event time from queries to their rewards.
    pub(super) join: Timing,
    /// Time to make snapshots durable.
    pub(super) snapshot: Timing,
    /// Whether the limit on spaces was logged.
    limit_logged: AtomicBool,
    log: Mutex<Log>,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Log {
    pub dead: Reasons,
    pub newest_dead: VecDeque<DeadNews>,
    /// When it was last logged that dead letters are sampled.
    pub warned_unrecorded: Option<Instant>,
    pub snapshots: VecDeque<SnapshotNews>,
    /// Examples learned from, by space and model.
    pub examples: BTreeMap<String, Vec<u64>>,
    /// Events not in the average yet, and their total time.
    pub untimed: (u32, Duration),
    pub published: BTreeMap<String, Arc<Published>>,
    pub spaces_evicted: u64,
    /// Log files truncated below their read position, and the missing bytes as far as known.
    pub gaps: (u64, u64),
    /// Failures of the operating system since the process started, by operation.
    pub failures: BTreeMap<&'static str, u64>,
    /// Spaces whose models are not played as often as the logged propensities say.
    pub mismatches: BTreeSet<String>,
    /// Stage of the rollout of each space.
    pub stages: BTreeMap<String, Stage>,
    /// Operations that are failing and retried.
    pub failing: BTreeMap<&'static str, Failing>,
}

/// An operation that fails and is retried.
#[derive(Debug, Clone)]
pub(super) struct Failing {
    pub since: Instant,
    pub attempts: u64,
    /// The error of the operating system, without paths: it is public on /ready.
    pub cause: String,
}

/// A dead letter.
#[derive(Debug, Clone, Serialize)]
pub struct DeadNews {
    /// When it was read, in milliseconds since 1970.
    pub time_ms: u64,
    /// Query or reward.
    pub side: Side,
    /// Reason code.
    pub reason: &'static str,
    /// Description of the problem.
    pub detail: String,
    /// Source position.
    pub place: Value,
}

/// A snapshot.
#[derive(Debug, Clone, Serialize)]
pub struct SnapshotNews {
    /// When it was durable, in milliseconds since 1970.
    pub time_ms: u64,
    /// Its lane.
    pub lane: String,
    /// Its number.
    pub generation: u64,
    /// Records changed since the previous snapshot.
    pub records: usize,
    /// Time to make it durable.
    pub duration_ms: f64,
}

/// The published parameters of a space.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Published {
    /// When, in milliseconds since 1970.
    pub time_ms: u64,
    /// Examples in applied batches.
    pub version: u64,
    /// The models, in order.
    pub models: Vec<ModelNews>,
}

/// The spectrum of one model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ModelNews {
    /// Its name.
    pub name: ModelName,
    /// Eigenvalues, the largest by size first.
    pub eigenvalues: Vec<f32>,
}

impl Published {
    /// Summary of these parameters.
    pub fn of(params: &Params) -> Self {
        let models = params.models.iter().zip(&params.policy.scores);
        let models = models.map(|(name, score)| ModelNews::new(name, &score.eigenvalues)).collect();
        Self { time_ms: params.created_ms, version: params.version, models }
    }
}

impl ModelNews {
    /// Summary of these eigenvalues.
    pub fn new(name: &ModelName, eigenvalues: &[f32]) -> Self {
        let mut eigenvalues: Vec<f32> = eigenvalues.iter().copied().filter(|value| *value != 0.0).collect();
        eigenvalues.sort_by(|a, b| b.abs().total_cmp(&a.abs()));
        Self { name: name.clone(), eigenvalues }
    }

    /// Sum of the sizes of the eigenvalues.
    pub fn nuclear_norm(&self) -> f64 {
        self.eigenvalues.iter().map(|value| f64::from(value.abs())).sum()
    }

    /// The eigenvalue that is largest by size.
    pub fn top(&self) -> f64 {
        self.eigenvalues.first().copied().unwrap_or_default().into()
    }
}

impl Default for Facts {
    fn default() -> Self {
        let (update, join, snapshot) = (Timing::new(1e-5), Timing::new(0.1), Timing::new(1e-3));
        Self { update, join, snapshot, limit_logged: AtomicBool::new(false), log: Mutex::default() }
    }
}

impl Facts {
    /// A copy of the log, so that readers do not block the learner.
    pub(super) fn log(&self) -> Log {
        lock(&self.log).clone()
    }

    /// Why events became dead letters since the process started.
    pub fn reasons(&self) -> Reasons {
        lock(&self.log).dead.clone()
    }

    /// Reports a dead letter.
    pub fn bad_event(&self, letter: &Letter) {
        let (detail, whole) = (letter.detail(), letter);
        let Letter { letter, place, origin, time_ms } = letter;
        let reason = letter.bad.reason();
        let traceparent = origin.as_ref().and_then(|origin| origin.traceparent.as_deref());
        if let Bad::TooManySpaces(_) = letter.bad {
            self.warn_of_limit("events of new spaces become dead letters");
        }
        let mut log = lock(&self.log);
        if log.dead.add(whole) == 1 {
            tracing::warn!(
                %place,
                traceparent,
                reason,
                detail,
                "malformed event sent to dead letters; further ones with this reason are only counted"
            );
        } else {
            tracing::debug!(%place, traceparent, reason, detail, "malformed event sent to dead letters");
        }
        let quiet = log.warned_unrecorded.is_some_and(|since| since.elapsed() < WARN_AGAIN);
        if letter.recording == Recording::Counted && !quiet {
            log.warned_unrecorded = Some(Instant::now());
            tracing::warn!(
                %place,
                reason,
                detail,
                "dead letters exceed events.dead_letters_bytes_max; recording one in {SAMPLE}, counting all"
            );
        }
        let news = DeadNews { time_ms: *time_ms, side: letter.side, reason, detail, place: place.clone() };
        keep(&mut log.newest_dead, news, DEAD_MAX);
    }

    /// Reports that the configuration has changed: models may have other indexes now, so their examples are counted from here.
    pub fn reconfigured(&self) {
        lock(&self.log).examples.clear();
    }

    /// Reports the examples that an event led to, and its processing time.
    pub fn learned(&self, applied: &[Applied], took: Duration) {
        if applied.is_empty() {
            return;
        }
        let mut log = lock(&self.log);
        log.untimed = (log.untimed.0 + 1, log.untimed.1 + took);
        if let (AVERAGED, together) = log.untimed {
            (0..AVERAGED).for_each(|_| self.update.observe(together / AVERAGED));
            log.untimed = (0, Duration::ZERO);
        }
        for Applied { space, model, latency_ms, .. } in applied {
            if let Some(latency_ms) = latency_ms {
                self.join.observe(Duration::from_millis(u64::try_from(*latency_ms).unwrap_or(0)));
            }
            match log.examples.get_mut(space.as_str()).and_then(|examples| examples.get_mut(*model)) {
                Some(number) => *number += 1,
                None => {
                    let examples = log.examples.entry(space.to_string()).or_default();
                    examples.resize(examples.len().max(model + 1), 0);
                    examples[*model] += 1;
                }
            }
        }
    }

    /// Reports the eviction of a space without examples. Only the first is logged.
    pub fn space_evicted(&self, space: &Name) {
        lock(&self.log).spaces_evicted += 1;
        self.warn_of_limit(&format!("evicted space {space}, which has no examples, for a new one"));
    }

    /// Logs once that the limit on spaces is reached.
    fn warn_of_limit(&self, consequence: &str) {
        if !self.limit_logged.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "learner.spaces_max reached: {consequence}; further cases are only counted. Raise learner.spaces_max, or list the \
                 spaces and set learner.spaces = \"listed\" if producers invent names"
            );
        }
    }

    /// Reports a durable snapshot.
    pub fn snapshot(&self, lane: &str, generation: u64, records: usize, took: Duration) {
        tracing::debug!(lane, generation, records, "snapshot");
        self.snapshot.observe(took);
        let (lane, duration_ms) = (lane.to_owned(), took.as_secs_f64() * 1e3);
        let news = SnapshotNews { time_ms: now_ms(), lane, generation, records, duration_ms };
        keep(&mut lock(&self.log).snapshots, news, SNAPSHOTS_MAX);
    }

    /// Reports a log file truncated below its read position, by this many bytes (0 = unknown).
    pub fn log_gap(&self, bytes: u64) {
        let mut log = lock(&self.log);
        log.gaps = (log.gaps.0 + 1, log.gaps.1 + bytes);
    }

    /// Number of truncated log files, and of missing bytes.
    pub fn log_gaps(&self) -> (u64, u64) {
        lock(&self.log).gaps
    }

    /// Reports the sample-ratio tests of all spaces. Logged once per episode, which ends when no evidence is left: near the threshold
    /// evidence comes and goes.
    pub fn sample_ratios(&self, spaces: &BTreeMap<String, SpaceNews>) {
        let mut log = lock(&self.log);
        let of = |(space, news): (&String, &SpaceNews)| {
            let ratio = news.sample_ratio.clone()?;
            let goes_on = log.mismatches.contains(space) && ratio.log_evidence > 0.0;
            (ratio.mismatch || goes_on).then(|| (space.clone(), ratio))
        };
        let found: BTreeMap<String, SampleRatioView> = spaces.iter().filter_map(of).collect();
        for (space, ratio) in found.iter().filter(|(space, _)| !log.mismatches.contains(*space)) {
            let worst = ratio.worst().map(ToString::to_string).unwrap_or_default();
            tracing::warn!(
                space,
                examples = ratio.examples,
                worst,
                "the log contradicts its propensities, so estimates of the lift are withheld and a rollout holds the policy back; \
                 correct the propensities, or declare the split in learner.declared_propensities"
            );
        }
        for space in log.mismatches.iter().filter(|space| !found.contains_key(*space)) {
            tracing::info!(space, "models are again played as often as the logged propensities say");
        }
        log.mismatches = found.into_keys().collect();
    }

    /// Reports the stages of all rollouts. A change of stage is logged, with its figures.
    pub fn stages(&self, spaces: &BTreeMap<String, SpaceNews>) {
        let stages = &mut lock(&self.log).stages;
        for (space, RolloutView { stage, share, incumbent, allowance }) in
            spaces.iter().filter_map(|(space, news)| Some((space, news.rollout.as_ref()?)))
        {
            let Some(before) = stages.insert(space.clone(), *stage).filter(|before| before != stage) else { continue };
            let lift = spaces[space].lift.as_ref();
            tracing::info!(
                space,
                from = before.as_str(),
                to = stage.as_str(),
                share,
                allowance,
                incumbent = incumbent.as_ref().map(ModelName::as_str),
                lift = lift.map(|lift| lift.lift),
                lift_lower = lift.and_then(|lift| lift.lower),
                examples = spaces[space].counts.applied,
                "the rollout has changed its stage"
            );
        }
    }

    /// Reports a failed operation that is retried. Logged once per episode.
    pub fn failed(&self, operation: &'static str, error: &anyhow::Error) {
        let mut log = lock(&self.log);
        *log.failures.entry(operation).or_default() += 1;
        let cause = cause(error);
        let begins = !log.failing.contains_key(operation);
        let failing = log.failing.entry(operation);
        let failing = failing.or_insert_with(|| Failing { since: Instant::now(), attempts: 0, cause: String::new() });
        (failing.attempts, failing.cause) = (failing.attempts + 1, cause);
        drop(log);
        if begins {
            tracing::error!(operation, error = format!("{error:#}"), "operation failed; retrying until it succeeds");
        }
    }

    /// Reports success, which ends an episode of failures.
    pub fn succeeded(&self, operation: &'static str) {
        if let Some(Failing { since, attempts, .. }) = lock(&self.log).failing.remove(operation) {
            tracing::info!(
                operation,
                attempts,
                seconds = since.elapsed().as_secs(),
                "operation succeeded after retries"
            );
        }
    }

    /// Description of the failing operations, if any.
    pub fn trouble(&self) -> Option<String> {
        let failing =
            |(operation, failing): (&&str, &Failing)| format!("{operation} fails: {}; retrying", failing.cause);
        let all: Vec<String> = lock(&self.log).failing.iter().map(failing).collect();
        (!all.is_empty()).then(|| all.join("; "))
    }

    /// Reports published parameters.
    pub fn published(&self, published: Vec<(Name, Published)>) {
        let published = published.into_iter().map(|(space, published)| (space.to_string(), Arc::new(published)));
        lock(&self.log).published.extend(published);
    }
}

/// The error of the operating system, without paths.
fn cause(error: &anyhow::Error) -> String {
    let of_system = |error: &std::io::Error| match error.raw_os_error() {
        Some(_) => error.to_string(),
        None => error.kind().to_string(),
    };
    let known = error.chain().find_map(|cause| match StateError::of_store(cause) {
        Some(StoreError::Read { problem, .. } | StoreError::Write { problem, .. }) => Some(problem.clone()),
        _ => cause.downcast_ref().map(of_system),
    });
    known.unwrap_or_else(|| "see the log".to_owned())
}

/// Prepends an item and drops the oldest beyond `most`.
fn keep<T>(newest: &mut VecDeque<T>, one: T, most: usize) {
    newest.push_front(one);
    newest.truncate(most);
}
