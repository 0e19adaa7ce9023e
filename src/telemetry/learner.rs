//! Status of the learner: reported by the engine's thread, read by the HTTP endpoints.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use serde::Serialize;
use serde_json::{Value, json};

use super::facts::Log;
use super::sheet::Sheet;
use super::usable::Usable;
use super::{Facts, History, HttpCounters, MODELS_MAX, OTHER, Published, SPACES_MAX, Unread, pick};
use crate::engine::{Counts, Engine, Side, Tally, Totals};
use crate::evaluate::rollout::RolloutView;
use crate::evaluate::sample_ratio::{SampleRatio, SampleRatioView};
use crate::evaluate::verdict::Contradiction;
use crate::evaluate::worth::WorthView;
use crate::objective::{ObjectiveView, OutcomeView};
use crate::transport::kafka::unreadable::Unreadable;
use crate::transport::{lock, now_ms};
use crate::warnings::{Code as WarningCode, Warning};

/// Maximum number of spaces reported one by one; the rest is aggregated as `other`.
const TOLD_MAX: usize = 2000;

/// Maximum number of spaces with history, in order of appearance.
const PAST_MAX: usize = 50;

/// Maximum number of warnings on the page.
const WARNINGS_MAX: usize = 20;

/// Initial interval of history points.
const PAST_EVERY_MS: u64 = 1000;

/// Current state of the learner.
#[derive(Debug, Clone, Default, Serialize)]
pub struct News {
    /// Outcomes of all events.
    pub counts: Counts,
    /// Mean of the rewards learned from.
    pub mean_reward: f64,
    /// Events beyond the reorder window.
    pub out_of_order: u64,
    /// Events that were read and wait for earlier ones.
    pub held_events: u64,
    /// The spaces by name, up to a limit.
    pub spaces: BTreeMap<String, SpaceNews>,
    /// Lag: topic, partition, messages not learned from yet.
    pub lags: Vec<(String, i32, u64)>,
    /// Batches at which reading has stopped.
    pub unreadable: Vec<Unreadable>,
    /// Backlog of log files, on the file transport.
    pub unread: Option<Unread>,
    /// Unreadable files in the log directory, with their problems.
    pub skipped_files: BTreeMap<String, String>,
    /// Number of rebalances.
    pub rebalances: u64,
    /// Lanes owned by this instance, where they move.
    pub lanes: Vec<i32>,
    /// Number of takeovers by this instance.
    pub hand_overs: u64,
    /// Errors of the Kafka client, by code.
    pub broker_errors: BTreeMap<String, u64>,
}

/// One space.
#[derive(Debug, Clone, Default, Serialize)]
pub struct SpaceNews {
    /// Examples in applied batches.
    pub version: u64,
    /// Outcomes of its events.
    pub counts: Counts,
    /// Sum of the rewards learned from.
    pub reward_sum: f64,
    /// Number of these rewards.
    pub rewarded: u64,
    /// Estimated lift of the current policy over the best single model, if known.
    pub lift: Option<Lift>,
    /// All estimates: over all and over recent examples, of every evaluated policy.
    pub worth: Option<WorthView>,
    /// Warnings about its log.
    pub warnings: Vec<Warning>,
    /// Whether models were played as often as the propensities say, if known.
    pub sample_ratio: Option<SampleRatioView>,
    /// The stage of the rollout, if known.
    pub rollout: Option<RolloutView>,
    /// What was charged, where more than the reward counts. Of a space with several lanes, that of one of them.
    pub objective: Option<ObjectiveView>,
}

/// Policy value, estimated from logged examples.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Lift {
    /// Mean reward of the current policy.
    pub policy: f64,
    /// The best single model.
    pub best_constant: String,
    /// Its mean reward.
    pub best: f64,
    /// The difference.
    pub lift: f64,
    /// Lower confidence bound, valid at all times simultaneously; none if the log contradicts its propensities.
    pub lower: Option<f64>,
    /// Upper confidence bound.
    pub upper: Option<f64>,
    /// Why there is no verdict, if the log contradicts its propensities.
    pub contradiction: Option<String>,
    /// Effective number of examples.
    pub examples: f64,
}

impl Lift {
    /// The estimate and its range, unless the log contradicts its propensities.
    fn ranged(&self) -> Option<[f64; 3]> {
        Some([self.lift, self.lower?, self.upper?])
    }

    /// Over all examples.
    fn of(worth: &WorthView) -> Self {
        let (verdict, range) = (&worth.all, worth.all.policy_lift.range);
        Self {
            policy: verdict.policy.value,
            best_constant: worth.models[verdict.best_alone].to_string(),
            best: verdict.alone[verdict.best_alone].value,
            lift: verdict.policy_lift.value,
            lower: range.map(|range| range.low),
            upper: range.map(|range| range.high),
            contradiction: worth.contradiction.as_ref().map(Contradiction::sentence),
            examples: verdict.policy.effective_examples,
        }
    }
}

impl News {
    /// Collects the state of the engines of all lanes.
    pub fn of<'a>(engines: impl IntoIterator<Item = &'a Engine> + Clone, out_of_order: u64) -> Self {
        let Totals { counts, mean_reward } = Totals::of(engines.clone());
        let (mut spaces, mut ratios) = (BTreeMap::new(), BTreeMap::new());
        for (engine, tally) in engines.into_iter().flat_map(|engine| engine.tallies().map(move |tally| (engine, tally)))
        {
            let told = spaces.len() < TOLD_MAX || spaces.contains_key(tally.name.as_str());
            let name = if told { tally.name.as_str() } else { OTHER };
            let space: &mut SpaceNews = spaces.entry(name.to_owned()).or_default();
            space.add(&tally);
            space.worth = engine.worth(tally.name).filter(|_| told);
            space.lift = space.worth.as_ref().map(Lift::of);
            space.rollout = engine.rollout(tally.name).filter(|_| told);
            space.objective = engine.objective(tally.name).filter(|_| told);
            space.warnings = if told { engine.warnings(tally.name) } else { Vec::new() };
            if let Some((ratio, spec)) = engine.sample_ratio(tally.name).filter(|_| told) {
                let new = || SampleRatio::new(spec.models.len());
                let sum: &mut SampleRatio = ratios.entry(tally.name).or_insert_with(new);
                sum.add(&ratio);
                space.sample_ratio = Some(sum.view(&spec.models, spec.worth.alpha));
            }
        }
        Self { counts, mean_reward, out_of_order, spaces, ..Self::default() }
    }

    /// All warnings, by space.
    fn warnings(&self) -> impl Iterator<Item = Value> {
        let of = |(name, space): (&String, &SpaceNews)| {
            space
                .warnings
                .iter()
                .map(|Warning { code, text, key }| json!({"space": name, "code": code, "text": text, "key": key}))
                .collect::<Vec<_>>()
        };
        self.spaces.iter().flat_map(of)
    }

    /// Total lag of all partitions.
    pub fn lag(&self) -> u64 {
        self.lags.iter().map(|(_, _, lag)| lag).sum()
    }
}

impl SpaceNews {
    fn add(&mut self, tally: &Tally<'_>) {
        self.version += tally.version;
        self.counts += tally.counts;
        let (sum, number) = tally.rewards;
        self.reward_sum += sum;
        self.rewarded += number;
    }

    /// Mean of the rewards learned from.
    pub fn mean_reward(&self) -> f64 {
        if self.rewarded == 0 { 0.0 } else { self.reward_sum / self.rewarded as f64 }
    }
}

/// Shared between the engine's thread, which writes it, and the HTTP endpoints.
pub struct Status {
    ready: AtomicBool,
    /// Why learning has stopped, if it has.
    stopped: Mutex<Option<String>>,
    started: Instant,
    facts: Arc<Facts>,
    told: Mutex<Told>,
    http: Arc<HttpCounters>,
}

struct Told {
    news: Arc<News>,
    /// When it was reported, in milliseconds since 1970.
    time_ms: u64,
    /// Spaces with labels of their own, in order of appearance, so that none loses its label to a later one.
    named: Vec<String>,
    past: History<Moment>,
    usable: Usable,
}

/// One point of the history.
struct Moment {
    point: Point,
    spaces: BTreeMap<String, SpacePoint>,
}

/// The counts of a moment.
#[derive(Debug, Clone, Serialize)]
struct Point {
    queries: u64,
    rewards: u64,
    joined: u64,
    expired: u64,
    late: u64,
    dead: u64,
    applied: u64,
    pending: u64,
    lag: u64,
}

/// The same of one space.
#[derive(Debug, Clone, Serialize)]
struct SpacePoint {
    applied: u64,
    reward_sum: f64,
    rewarded: u64,
    lift: Option<[f64; 3]>,
    traffic: Vec<u64>,
}

impl Default for Status {
    fn default() -> Self {
        let told = Told {
            news: Arc::default(),
            time_ms: 0,
            named: Vec::new(),
            past: History::new(PAST_EVERY_MS),
            usable: Usable::default(),
        };
        Self {
            ready: AtomicBool::new(false),
            stopped: Mutex::new(None),
            started: Instant::now(),
            facts: Arc::default(),
            told: Mutex::new(told),
            http: Arc::default(),
        }
    }
}

impl Status {
    /// Sets the readiness.
    pub fn set_ready(&self, ready: bool) {
        self.ready.store(ready, Ordering::Relaxed);
    }

    /// Reports why learning has stopped, or that it has not.
    pub fn set_stopped(&self, reason: Option<String>) {
        *lock(&self.stopped) = reason;
    }

    /// Why learning has stopped, if it has.
    pub fn stopped(&self) -> Option<String> {
        lock(&self.stopped).clone()
    }

    /// Whether it is ready: events are read and no operation is failing.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed) && self.facts.trouble().is_none()
    }

    /// Description of the failing operations, if any.
    pub fn trouble(&self) -> Option<String> {
        self.facts.trouble()
    }

    /// The counters of the HTTP server.
    pub fn http(&self) -> Arc<HttpCounters> {
        self.http.clone()
    }

    /// The facts reported by the learner.
    pub fn facts(&self) -> Arc<Facts> {
        self.facts.clone()
    }

    /// Publishes the current state.
    pub fn tell(&self, news: News) {
        self.tell_at(now_ms(), news);
    }

    fn tell_at(&self, time_ms: u64, news: News) {
        let (news, mut told) = (Arc::new(news), lock(&self.told));
        told.usable.note(&news.counts);
        self.facts.sample_ratios(&news.spaces);
        self.facts.stages(&news.spaces);
        if told.named.len() < SPACES_MAX {
            let room = SPACES_MAX - told.named.len();
            let new: Vec<String> = news.spaces.keys().filter(|name| !told.named.contains(name)).cloned().collect();
            told.named.extend(new.into_iter().filter(|name| name != OTHER).take(room));
        }
        if told.past.is_due(time_ms) {
            let log = self.facts.log();
            let kept = told.named.iter().take(PAST_MAX);
            let space = |name: &String| Some((name.clone(), SpacePoint::of(name, news.spaces.get(name)?, &log)));
            let moment = Moment { point: Point::of(&news), spaces: kept.filter_map(space).collect() };
            told.past.push(time_ms, moment);
        }
        (told.news, told.time_ms) = (news, time_ms);
    }

    /// All of it, as JSON.
    pub fn json(&self) -> Value {
        let mut shown = self.head();
        merge(&mut shown, &*self.news().0);
        shown
    }

    /// The space to show: an existing one.
    pub fn pick(&self, asked: &str) -> String {
        let told = lock(&self.told);
        let spaces = &told.news.spaces;
        pick(asked, |name| spaces.contains_key(name), spaces.keys().next().map(String::as_str))
    }

    /// Data of the page: totals, a row for each space whose name contains `find`, and one space in full.
    pub fn now(&self, space: &str, find: &str) -> Value {
        let ((news, time_ms), log) = (self.news(), self.facts.log());
        let row = |(name, space): (&String, &SpaceNews)| {
            json!({
                "space": name, "version": space.version, "counts": space.counts,
                "mean_reward": space.mean_reward(), "lift": space.lift,
                "published_ms": log.published.get(name).map(|published| published.time_ms),
            })
        };
        let found: Vec<_> = news.spaces.iter().filter(|(name, _)| name.contains(find)).collect();
        let mut shown = self.head();
        merge(
            &mut shown,
            &json!({
                "time_ms": now_ms(),
                "point": Point::of(&news),
                "point_ms": time_ms,
                "counts": news.counts,
                "mean_reward": news.mean_reward,
                "out_of_order": news.out_of_order,
                "held_events": news.held_events,
                "lags": news.lags,
                "unreadable": news.unreadable,
                "unread": news.unread,
                "skipped_files": news.skipped_files,
                "rebalances": news.rebalances,
                "lanes": news.lanes,
                "broker_errors": news.broker_errors,
                "snapshots": log.snapshots,
                "dead_letters": log.newest_dead,
                "update_s": self.facts.update.quantile(&self.facts.update.counts(), 0.5),
                "join_s": self.facts.join.quantile(&self.facts.join.counts(), 0.5),
                "spaces": found.iter().take(SPACES_MAX).copied().map(row).collect::<Vec<_>>(),
                "warnings": news.warnings().take(WARNINGS_MAX).collect::<Vec<_>>(),
                "warnings_all": news.warnings().count(),
                "spaces_found": found.len(),
                "spaces_all": news.spaces.len(),
                "space": space,
                "of_space": news.spaces.get(space).map(|news| SpacePoint::of(space, news, &log)),
                "lift": news.spaces.get(space).and_then(|news| news.lift.as_ref()),
                "rollout": news.spaces.get(space).and_then(|news| news.rollout.as_ref()),
                "sample_ratio": news.spaces.get(space).and_then(|news| news.sample_ratio.as_ref()),
                "objective": news.spaces.get(space).and_then(|news| news.objective.as_ref()),
                "models": log.published.get(space).map(|published| &published.models),
            }),
        );
        shown
    }

    /// History of the process and of one space.
    pub fn history(&self, space: &str) -> Value {
        let told = lock(&self.told);
        let point = |(time_ms, moment): &(u64, Moment)| json!({"time_ms": time_ms, "point": moment.point, "of_space": moment.spaces.get(space)});
        Value::Array(told.past.points().map(point).collect())
    }

    /// The latest state, and its time.
    fn news(&self) -> (Arc<News>, u64) {
        let told = lock(&self.told);
        (told.news.clone(), told.time_ms)
    }

    fn head(&self) -> Value {
        json!({
            "role": "learner",
            "version": env!("CARGO_PKG_VERSION"),
            "ready": self.is_ready(),
            "unusable_share": lock(&self.told).usable.unusable_share(),
            "trouble": self.trouble(),
            "uptime_s": self.started.elapsed().as_secs(),
        })
    }
}

/// Puts all fields of one object into another.
pub(super) fn merge(into: &mut Value, more: &impl Serialize) {
    if let (Some(all), Ok(Value::Object(more))) = (into.as_object_mut(), serde_json::to_value(more)) {
        all.extend(more);
    }
}

impl Point {
    fn of(news: &News) -> Self {
        let (counts, join) = (&news.counts, &news.counts.join);
        Self {
            queries: counts.queries(),
            rewards: counts.rewards(),
            joined: join.queries.joined,
            expired: join.queries.expired,
            late: join.queries.late + join.rewards.late,
            dead: counts.queries_dead + counts.rewards_dead,
            applied: counts.applied,
            pending: join.queries.pending,
            lag: news.lag(),
        }
    }
}

impl SpacePoint {
    fn of(name: &str, news: &SpaceNews, log: &Log) -> Self {
        Self {
            applied: news.counts.applied,
            reward_sum: news.reward_sum,
            rewarded: news.rewarded,
            lift: news.lift.as_ref().and_then(Lift::ranged),
            traffic: log.examples.get(name).cloned().unwrap_or_default(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    kind: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Reason {
    kind: &'static str,
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Kind {
    kind: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Place {
    topic: String,
    partition: i32,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Space {
    space: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SpaceWarning {
    space: String,
    code: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SpaceOutcome {
    space: String,
    outcome: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Model {
    space: String,
    model: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Operation {
    operation: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Code {
    code: String,
}

impl Status {
    /// All metrics, in the format of OpenMetrics.
    pub fn metrics(&self) -> String {
        let ((news, _), log, named) = (self.news(), self.facts.log(), lock(&self.told).named.clone());
        let mut sheet = Sheet::new("pointsman_learner");
        of_events(&mut sheet, &news, &log);
        of_spaces(&mut sheet, &news, &named, &log);
        of_models(&mut sheet, &named, &log);
        of_brokers(&mut sheet, &news);
        if let Some(Unread { query_bytes, reward_bytes, .. }) = &news.unread {
            let bytes =
                [("query", *query_bytes), ("reward", *reward_bytes)].map(|(kind, bytes)| (Kind { kind }, bytes));
            sheet.gauges("unread_bytes", "Unread bytes of log files", bytes);
            of_files(&mut sheet, &news, &log);
        }
        of_failures(&mut sheet, &log);
        let Facts { update, join, snapshot, .. } = &*self.facts;
        let about = "Processing time of events that led to an update, averaged over eight events";
        sheet.seconds("update_duration", about, update.clone());
        sheet.seconds("join_latency", "Time from a query to its reward, in event time", join.clone());
        sheet.seconds("snapshot_duration", "Time to make a snapshot durable", snapshot.clone());
        if let Some(newest) = log.snapshots.front() {
            let moment = Gauge::<f64, AtomicU64>::default();
            moment.set(newest.time_ms as f64 / 1e3);
            sheet.seconds("snapshot_timestamp", "Unix time at which the newest snapshot became durable", moment);
        }
        self.http.write(&mut sheet);
        let about = "Share of recent events that were late, orphaned or dead letters";
        let share = lock(&self.told).usable.unusable_share();
        sheet.gauges("unusable_share", about, [(Vec::<(String, String)>::new(), share)]);
        let ready = u64::from(self.is_ready());
        let about = "1 if the learner is ready: it reads events and no operation is failing";
        sheet.gauges("ready", about, [(Vec::<(String, String)>::new(), ready)]);
        sheet.text()
    }
}

fn of_events(sheet: &mut Sheet, news: &News, log: &Log) {
    let (queries, rewards) = (&news.counts.join.queries, &news.counts.join.rewards);
    let events = [
        ("query", "dead_lettered", news.counts.queries_dead),
        ("query", "retired", queries.retired),
        ("query", "duplicate", queries.duplicate),
        ("query", "late", queries.late),
        ("query", "joined", queries.joined),
        ("query", "expired", queries.expired),
        ("query", "evicted", queries.evicted),
        ("reward", "dead_lettered", news.counts.rewards_dead),
        ("reward", "used", rewards.used),
        ("reward", "duplicate", rewards.duplicate),
        ("reward", "late", rewards.late),
        ("reward", "orphaned", rewards.orphaned),
        ("reward", "evicted", rewards.evicted),
    ];
    let events = events.map(|(kind, outcome, number)| (Outcome { kind, outcome }, number));
    sheet.counters("events", "Events read, by kind and outcome", events);
    let parts = |number: u64| [(Vec::<(String, String)>::new(), number)];
    let about = "Rewards ignored since their request has one: part of the duplicate ones";
    sheet.counters("rewards_further", about, parts(rewards.further));
    let about = "Rewards learned clipped to reward.range, each after aggregation: part of the used ones";
    sheet.counters("rewards_clipped", about, parts(rewards.clipped));
    let dead = log.dead.all().map(|dead| (Reason { kind: kind(dead.side), reason: dead.code }, dead.number));
    sheet.counters("dead_letters", "Dead letters since the process started, by kind and reason", dead);
    let unrecorded = [(Vec::<(String, String)>::new(), news.counts.dead_unrecorded)];
    let about = "Dead letters counted but not recorded because of events.dead_letters_bytes_max";
    sheet.counters("dead_letters_unrecorded", about, unrecorded);
    let pending = [("query", queries.pending), ("reward", rewards.pending)];
    let pending = pending.map(|(kind, number)| (Kind { kind }, number));
    sheet.gauges("pending", "Events pending in the join", pending);
    let none = Vec::<(String, String)>::new;
    let evicted = "Spaces without examples evicted for new ones since the process started";
    sheet.counters("spaces_evicted", evicted, [(none(), log.spaces_evicted)]);
    let about = "Events processed after a later one, beyond the reorder window";
    sheet.counters("out_of_order", about, [(none(), news.out_of_order)]);
    let about = "Events that were read and wait for earlier ones of other logs";
    sheet.gauges("held_events", about, [(none(), news.held_events)]);
}

fn of_files(sheet: &mut Sheet, news: &News, log: &Log) {
    let none = Vec::<(String, String)>::new;
    let skipped = news.skipped_files.len() as u64;
    sheet.gauges("skipped_files", "Skipped files in the log directory that cannot be read", [(none(), skipped)]);
    let (gaps, bytes) = log.gaps;
    sheet.counters("log_gaps", "Log files truncated below their read position", [(none(), gaps)]);
    sheet.counters("log_gap_bytes", "Bytes missing from truncated log files", [(none(), bytes)]);
}

fn of_failures(sheet: &mut Sheet, log: &Log) {
    let of = |(operation, number): (&&'static str, &u64)| (Operation { operation }, *number);
    sheet.counters("failures", "Failed attempts of operations that are retried", log.failures.iter().map(of));
    let failing = |operation: &&'static str| (Operation { operation }, u64::from(log.failing.contains_key(operation)));
    sheet.gauges("failing", "1 while an operation is failing and retried", log.failures.keys().map(failing));
}

fn kind(side: Side) -> &'static str {
    match side {
        Side::Query => "query",
        Side::Reward => "reward",
    }
}

fn of_spaces(sheet: &mut Sheet, news: &News, named: &[String], log: &Log) {
    let is_named = |name: &str| named.iter().any(|named| named == name);
    let label = |name: &str| Space { space: if is_named(name) { name } else { OTHER }.to_owned() };
    let spaces = || news.spaces.iter().map(|(name, news)| (label(name), news));
    let applied = spaces().map(|(space, news)| (space, news.counts.applied));
    sheet.counters("applied", "Examples learned from", applied);
    let rewards = spaces().map(|(space, news)| (space, news.reward_sum));
    sheet.counters("reward", "Sum of the rewards learned from, each scaled to 0..1", rewards);
    sheet.gauges("version", "Examples in applied batches", spaces().map(|(space, news)| (space, news.version)));
    let single = || spaces().filter(|(label, _)| label.space != OTHER);
    let mean = single().map(|(space, news)| (space, news.mean_reward()));
    sheet.gauges("mean_reward", "Mean of the rewards learned from, scaled to 0..1", mean);
    let warnings = spaces().flat_map(|(Space { space }, news)| {
        let has = |code| u64::from(news.warnings.iter().any(|warning| warning.code == code));
        WarningCode::ALL.map(|code| (SpaceWarning { space: space.clone(), code: code.as_str() }, has(code)))
    });
    sheet.gauges("warnings", "1 while there is a warning about the log of a space", warnings);
    let published = || log.published.iter().map(|(name, published)| (label(name), published));
    let versions = published().map(|(space, published)| (space, published.version));
    sheet.gauges("published_version", "Version of the published parameters", versions);
    // The oldest of those aggregated as `other`.
    let moments = Family::<Space, Gauge<f64, AtomicU64>>::default();
    for (space, published) in published() {
        let moment = published.time_ms as f64 / 1e3;
        let oldest = moments.get_or_create(&space).get();
        moments.get_or_create(&space).set(if oldest > 0.0 { moment.min(oldest) } else { moment });
    }
    sheet.seconds("published_timestamp", "Unix time at which the newest parameters were created", moments);
    let lifts = || single().filter_map(|(space, news)| Some((space, news.lift.as_ref()?)));
    let ranged = || lifts().filter_map(|(space, lift)| Some((space, lift.ranged()?)));
    let about = "Estimated lift: policy value minus the value of the best single model";
    sheet.gauges("lift", about, ranged().map(|(space, [lift, ..])| (space, lift)));
    let lower = ranged().map(|(space, [_, lower, _])| (space, lower));
    sheet.gauges("lift_lower", "Lower confidence bound of the lift, valid at all times simultaneously", lower);
    let upper = ranged().map(|(space, [.., upper])| (space, upper));
    sheet.gauges("lift_upper", "Upper confidence bound of the lift, valid at all times simultaneously", upper);
    let rollouts = || single().filter_map(|(space, news)| Some((space, news.rollout.as_ref()?)));
    let stages = rollouts().map(|(space, rollout)| (space, rollout.stage as u64));
    sheet.gauges("stage", "Stage of the rollout: 0 observe, 1 shadow, 2 canary, 3 full", stages);
    let shares = rollouts().map(|(space, rollout)| (space, rollout.share));
    sheet.gauges("policy_share", "Share of the traffic that follows the learned policy", shares);
    let allowances = rollouts().filter_map(|(space, rollout)| Some((space, rollout.allowance?)));
    let about =
        "Lower confidence bound of what a rollout may still lose against the incumbent, in rewards scaled to 0..1";
    sheet.gauges("allowance", about, allowances);
    let ratios = || single().filter_map(|(space, news)| Some((space, news.sample_ratio.as_ref()?)));
    let about = "1 while models are not played as often as the logged propensities say";
    let mismatch = ratios().map(|(space, ratio)| (space, u64::from(ratio.mismatch)));
    sheet.gauges("sample_ratio_mismatch", about, mismatch);
    let about = "Natural logarithm of the evidence that models are not played as often as the logged propensities say";
    let evidence = ratios().map(|(space, ratio)| (space, ratio.log_evidence));
    sheet.gauges("sample_ratio_log_evidence", about, evidence);
    let outcomes = single().flat_map(|(Space { space }, news)| {
        let outcomes = news.objective.iter().flat_map(|objective| &objective.outcomes);
        outcomes.map(move |one| (SpaceOutcome { space: space.clone(), outcome: one.name.clone() }, one))
    });
    let outcomes: Vec<(SpaceOutcome, &OutcomeView)> = outcomes.collect();
    let of = |figure: fn(&OutcomeView) -> Option<f64>| {
        outcomes.iter().filter_map(move |(label, one)| Some((label.clone(), figure(one)?)))
    };
    sheet.gauges("outcome_mean", "Mean outcome of the latest requests, about 2000 of them", of(|one| one.recent));
    sheet.gauges("outcome_budget", "Budget of an outcome per request", of(|one| one.budget));
    let about = "Reward that one unit of an outcome is worth at present so that its budget holds";
    sheet.gauges("outcome_lambda", about, of(|one| Some(one.lambda)));
}

fn of_models(sheet: &mut Sheet, named: &[String], log: &Log) {
    let mut room = MODELS_MAX;
    let (mut traffic, mut ranks, mut norms, mut tops) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let nobody = Published { time_ms: 0, version: 0, models: Vec::new() };
    for (space, examples) in &log.examples {
        let published = log.published.get(space).map_or(&nobody, |published| published);
        for (i, number) in examples.iter().enumerate() {
            let told = room > 0 && named.contains(space);
            let Some(model) = published.models.get(i).filter(|_| told) else {
                let space = if told { space.as_str() } else { OTHER };
                traffic.push((Model { space: space.to_owned(), model: OTHER.to_owned() }, *number));
                continue;
            };
            room -= 1;
            let label = || Model { space: space.clone(), model: model.name.to_string() };
            traffic.push((label(), *number));
            ranks.push((label(), model.eigenvalues.len() as u64));
            norms.push((label(), model.nuclear_norm()));
            tops.push((label(), model.top()));
        }
    }
    sheet.counters("examples", "Examples since the start or the last reload, by chosen model", traffic);
    sheet.gauges("rank", "Number of nonzero eigenvalues of a model in the published parameters", ranks);
    sheet.gauges("nuclear_norm", "Sum of the absolute eigenvalues of a model in the published parameters", norms);
    let about = "Eigenvalue of a model with the largest absolute value in the published parameters";
    sheet.gauges("top_eigenvalue", about, tops);
}

fn of_brokers(sheet: &mut Sheet, news: &News) {
    let none = Vec::<(String, String)>::new;
    sheet.counters("rebalances", "Consumer group rebalances", [(none(), news.rebalances)]);
    let about = "Lanes owned by this instance, with transport.kafka.lanes = partition";
    sheet.gauges("lanes", about, [(none(), news.lanes.len() as u64)]);
    sheet.counters("hand_overs", "Lanes taken over by this instance", [(none(), news.hand_overs)]);
    let lag =
        |(topic, partition, lag): &(String, i32, u64)| (Place { topic: topic.clone(), partition: *partition }, *lag);
    sheet.gauges("lag", "Lag: messages not learned from yet", news.lags.iter().map(lag));
    let offset = |batch: &Unreadable| (Place { topic: batch.topic.clone(), partition: batch.partition }, batch.offset);
    let about = "Offset at which a partition cannot be read; its lane has stopped";
    sheet.gauges("unreadable_offset", about, news.unreadable.iter().map(offset));
    let errors = news.broker_errors.iter().map(|(code, number)| (Code { code: code.clone() }, *number));
    sheet.counters("broker_errors", "Errors of the Kafka client, by code", errors);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::engine::Applied;
    use crate::event::{ModelName, Name};
    use crate::telemetry::ModelNews;

    fn news(spaces: usize) -> News {
        let mut news = News::default();
        for i in 0..spaces {
            let counts = Counts { applied: 10, ..Counts::default() };
            let space = SpaceNews { version: 10, counts, reward_sum: 5.0, rewarded: 10, ..SpaceNews::default() };
            news.spaces.insert(format!("space-{i:04}"), space);
        }
        news
    }

    fn lift() -> Lift {
        let best_constant = "bge".to_owned();
        Lift {
            policy: 0.7,
            best_constant,
            best: 0.6,
            lift: 0.1,
            lower: Some(0.05),
            upper: Some(0.15),
            contradiction: None,
            examples: 900.0,
        }
    }

    fn values<'a>(metrics: &'a str, name: &str) -> Vec<(&'a str, f64)> {
        let line = |line: &'a str| {
            let (series, value) = line.rsplit_once(' ')?;
            let matches = series.strip_prefix(name)?.starts_with(['{', ' ']) || series == name;
            matches.then(|| (series, value.parse().unwrap()))
        };
        metrics.lines().filter_map(line).collect()
    }

    #[test]
    fn spaces_beyond_the_limit_are_told_together() {
        let status = Status::default();
        status.tell(news(SPACES_MAX + 50));
        let metrics = status.metrics();
        let applied = values(&metrics, "pointsman_learner_applied_total");
        assert_eq!(applied.len(), SPACES_MAX + 1);
        assert_eq!(applied.iter().map(|(_, number)| number).sum::<f64>(), 10.0 * (SPACES_MAX + 50) as f64);
        assert!(applied.contains(&("pointsman_learner_applied_total{space=\"other\"}", 500.0)), "{applied:?}");
        assert_eq!(values(&metrics, "pointsman_learner_mean_reward").len(), SPACES_MAX, "no mean of unlike spaces");
    }

    #[test]
    fn a_space_keeps_its_name_when_others_come_before_it() {
        let status = Status::default();
        let mut news = news(SPACES_MAX);
        status.tell(news.clone());
        news.spaces.insert("a-new-one".to_owned(), SpaceNews::default());
        status.tell(news);
        let metrics = status.metrics();
        assert!(metrics.contains("pointsman_learner_version{space=\"space-0099\"} 10"));
        assert!(!metrics.contains("a-new-one"));
    }

    #[test]
    fn models_beyond_the_limit_are_told_together() {
        let status = Status::default();
        let mut news = news(3);
        news.spaces.remove("space-0002");
        status.tell(news);
        let models = |n: usize| (0..n).map(|i| ModelName::try_from(format!("m-{i}")).unwrap());
        let space = |i: usize| Name::try_from(format!("space-{i:04}")).unwrap();
        for (i, number) in [(0, 10), (1, MODELS_MAX + 5)] {
            let models = models(number).map(|name| ModelNews { name, eigenvalues: vec![-3.0, 1.0] });
            let published = Published { time_ms: 5000, version: 1, models: models.collect() };
            status.facts.published(vec![(space(i), published)]);
            for model in (0..number).flat_map(|model| [model; 2]) {
                let (space, request_id) = (space(i), String::new());
                let (latency_ms, rewarded_ms, example) = (Some(40), Some(1040), None);
                let applied = Applied { space, request_id, model, reward: Some(1.0), latency_ms, rewarded_ms, example };
                status.facts.learned(&[applied], Duration::from_millis(1));
            }
        }
        let metrics = status.metrics();
        let traffic = values(&metrics, "pointsman_learner_examples_total");
        assert_eq!(traffic.len(), MODELS_MAX + 1);
        assert_eq!(traffic.iter().map(|(_, number)| number).sum::<f64>(), 2.0 * (MODELS_MAX + 15) as f64);
        assert_eq!(values(&metrics, "pointsman_learner_rank").len(), MODELS_MAX);
        let updates = values(&metrics, "pointsman_learner_update_duration_seconds_count");
        let averaged = 2 * (MODELS_MAX + 15) / 8 * 8;
        assert_eq!(updates, [("pointsman_learner_update_duration_seconds_count", averaged as f64)]);
        assert!(
            metrics.contains("pointsman_learner_nuclear_norm{space=\"space-0000\",model=\"m-3\"} 4.0"),
            "{metrics}"
        );
        assert!(metrics.contains("pointsman_learner_top_eigenvalue{space=\"space-0000\",model=\"m-3\"} -3.0"));
        assert!(metrics.contains("pointsman_learner_published_timestamp_seconds{space=\"space-0000\"} 5.0"));
    }

    #[test]
    fn what_is_not_read_of_log_files_is_told_where_these_are_read() {
        let status = Status::default();
        status.tell(news(1));
        assert!(!status.metrics().contains("unread") && status.now("", "")["unread"].is_null());
        let unread = Unread::of([(Side::Query, "queries/a.jsonl#1", 70), (Side::Query, "queries/b.jsonl#2", 5)]);
        status.tell(News { unread: Some(unread), ..news(1) });
        let metrics = status.metrics();
        let told = values(&metrics, "pointsman_learner_unread_bytes");
        let series = |kind| format!("pointsman_learner_unread_bytes{{kind=\"{kind}\"}}");
        assert_eq!(told.len(), 2);
        assert!(told.contains(&(&series("query"), 75.0)) && told.contains(&(&series("reward"), 0.0)), "{told:?}");
        assert_eq!(status.json()["unread"]["logs"], json!([["queries/a.jsonl#1", 70], ["queries/b.jsonl#2", 5]]));
        assert_eq!(status.now("", "")["unread"]["query_bytes"], 75);
    }

    #[test]
    fn what_fails_is_shown_until_it_succeeds() {
        let status = Status::default();
        status.set_ready(true);
        let full = || anyhow::Error::from(std::io::Error::from_raw_os_error(28)).context("cannot write /secret/path");
        let failing = |status: &Status| values(&status.metrics(), "pointsman_learner_failing")[0].1;
        status.facts.failed("publish", &full());
        status.facts.failed("publish", &full());
        assert_eq!((status.is_ready(), failing(&status)), (false, 1.0));
        let trouble = status.trouble().unwrap();
        assert!(trouble.starts_with("publish fails: No space left") && !trouble.contains("secret"), "{trouble}");
        status.facts.succeeded("publish");
        assert_eq!((status.is_ready(), failing(&status), status.trouble()), (true, 0.0, None));
        let metrics = status.metrics();
        let failures = values(&metrics, "pointsman_learner_failures_total");
        assert_eq!(failures, [("pointsman_learner_failures_total{operation=\"publish\"}", 2.0)]);
    }

    #[test]
    fn lift_is_told_where_it_is_known() {
        let status = Status::default();
        let mut news = news(2);
        status.tell(news.clone());
        assert!(values(&status.metrics(), "pointsman_learner_lift").is_empty());
        assert_eq!(status.now("space-0001", "")["lift"], Value::Null);
        news.spaces.get_mut("space-0001").unwrap().lift = Some(lift());
        status.tell_at(now_ms() + 2 * PAST_EVERY_MS, news);
        let metrics = status.metrics();
        for (name, value) in [("lift", 0.1), ("lift_lower", 0.05), ("lift_upper", 0.15)] {
            let name = format!("pointsman_learner_{name}");
            assert_eq!(values(&metrics, &name), [(format!("{name}{{space=\"space-0001\"}}").as_str(), value)]);
        }
        assert_eq!(status.now("space-0001", "")["lift"]["best_constant"], "bge");
        assert_eq!(status.now("space-0000", "")["lift"], Value::Null);
        let past = status.history("space-0001");
        assert_eq!(past[0]["of_space"]["lift"], Value::Null);
        assert_eq!(past[1]["of_space"]["lift"], json!([0.1, 0.05, 0.15]));
    }

    /// A log with propensities that are wrong has shares, a metric and a reason in place of a lift.
    #[test]
    fn contradictions_are_reported_in_place_of_a_lift() {
        let status = Status::default();
        let mut news = news(1);
        let space = news.spaces.get_mut("space-0000").unwrap();
        let models = ["a", "b"].map(|name| ModelName::try_from(name).unwrap());
        let mut ratio = SampleRatio::new(2);
        (0..40).for_each(|_| ratio.see(&[0.5, 0.5], 0));
        space.sample_ratio = Some(ratio.view(&models, 0.05));
        let reason = Some("no verdict: the log contradicts its propensities".to_owned());
        space.lift = Some(Lift { lower: None, upper: None, contradiction: reason, ..lift() });
        status.tell(news.clone());
        let metrics = status.metrics();
        let series = "pointsman_learner_sample_ratio_mismatch{space=\"space-0000\"}";
        assert_eq!(values(&metrics, "pointsman_learner_sample_ratio_mismatch"), [(series, 1.0)]);
        assert!(values(&metrics, "pointsman_learner_sample_ratio_log_evidence")[0].1 > 20.0);
        for name in ["lift", "lift_lower", "lift_upper"] {
            assert_eq!(values(&metrics, &format!("pointsman_learner_{name}")), [], "{name}");
        }
        let now = status.now("space-0000", "");
        assert_eq!(now["sample_ratio"]["models"][0], json!({"model": "a", "played": 1.0, "expected": 0.5}));
        assert_eq!((&now["lift"]["lower"], &now["of_space"]["lift"]), (&Value::Null, &Value::Null));
        assert!(now["lift"]["contradiction"].as_str().unwrap().starts_with("no verdict"));
        assert_eq!(status.facts.log().mismatches.iter().collect::<Vec<_>>(), ["space-0000"]);
        news.spaces.get_mut("space-0000").unwrap().sample_ratio = None;
        status.tell(news);
        assert!(status.facts.log().mismatches.is_empty());
    }

    #[test]
    fn spaces_are_found_by_a_part_of_their_name() {
        let status = Status::default();
        status.tell(news(300));
        let now = status.now("space-0007", "ce-02");
        assert_eq!((&now["spaces_found"], &now["spaces_all"]), (&json!(100), &json!(300)));
        assert_eq!(now["spaces"][0]["space"], "space-0200");
        assert_eq!(now["of_space"]["reward_sum"], 5.0);
        assert_eq!(status.now("", "")["spaces"].as_array().unwrap().len(), SPACES_MAX);
    }
}
