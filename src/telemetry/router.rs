//! Metrics of the router.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use serde::Serialize;
use serde_json::{Value, json};

use super::sheet::Sheet;
use super::{History, HttpCounters, MODELS_MAX, ModelNews, OTHER, SPACES_MAX, Timing, pick};
use crate::event::{ModelName, Name};
use crate::router::{Answer, Compiled, RestReason, Router};
use crate::transport::{lock, now_ms};

/// Initial interval of history points.
const PAST_EVERY_MS: u64 = 1000;

/// Maximum number of spaces with history.
const PAST_MAX: usize = 50;

/// Where the first bucket of freshness ends, in seconds.
const FRESHNESS_LEAST_S: f64 = 0.01;

/// All metrics of a router.
pub struct Metrics {
    counts: Mutex<Counts>,
    durations: Family<EndpointLabels, Timing, fn() -> Timing>,
    /// Duration of routing requests, for the page.
    decision: Timing,
    /// Time from reward events to parameters in use, of each swap the longest.
    freshness: Timing,
    past: Mutex<Past>,
    http: Arc<HttpCounters>,
}

#[derive(Default)]
struct Counts {
    requests: BTreeMap<(&'static str, u16), u64>,
    events: BTreeMap<(&'static str, &'static str), u64>,
    repeats: u64,
    /// Rewards outside of their range, which the learner clips.
    clipped: u64,
    params_rejected: u64,
    /// Time from the oldest reward of the newest parameters to their use, by space.
    freshness: BTreeMap<Name, Duration>,
    decisions: ByModel,
    /// Decisions among a part of the models.
    restricted: u64,
    failures: ByModel,
}

/// Counts by space and model.
type ByModel = BTreeMap<Name, BTreeMap<ModelName, u64>>;

/// The name that spaces are aggregated by.
fn other() -> Name {
    Name::try_from(OTHER).expect("a valid name")
}

struct Past {
    history: History<Moment>,
    /// The buckets at the last point.
    timed: Vec<u64>,
    newest: Point,
    newest_ms: u64,
}

struct Moment {
    point: Point,
    spaces: BTreeMap<String, SpacePoint>,
}

/// The counts of a moment.
#[derive(Debug, Clone, Default, Serialize)]
struct Point {
    decisions: u64,
    written: u64,
    lost: u64,
    errors: u64,
    /// Median and 99th percentile of the requests since the last point.
    p50_s: Option<f64>,
    p99_s: Option<f64>,
}

/// The same of one space.
#[derive(Debug, Clone, Serialize)]
struct SpacePoint {
    version: u64,
    traffic: Vec<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndpointLabels {
    endpoint: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    endpoint: &'static str,
    code: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EventLabels {
    kind: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeliveryLabels {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SpaceLabels {
    space: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RestLabels {
    space: String,
    model: String,
    reason: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabels {
    space: String,
    model: String,
}

impl Metrics {
    /// All at zero, with the counters of the server.
    pub fn new(http: Arc<HttpCounters>) -> Self {
        let timed = Timing::new(1e-5);
        let history = History::new(PAST_EVERY_MS);
        Self {
            counts: Mutex::default(),
            durations: Family::new_with_constructor(|| Timing::new(1e-5)),
            past: Mutex::new(Past { history, timed: timed.counts(), newest: Point::default(), newest_ms: 0 }),
            decision: timed,
            freshness: Timing::new(FRESHNESS_LEAST_S),
            http,
        }
    }

    /// The counters of the server.
    pub fn http(&self) -> &HttpCounters {
        &self.http
    }

    /// A request was answered.
    pub fn request(&self, endpoint: &'static str, code: u16, took: Duration) {
        *lock(&self.counts).requests.entry((endpoint, code)).or_default() += 1;
        self.durations.get_or_create(&EndpointLabels { endpoint }).observe(took);
        if endpoint == "route" || endpoint == "route_batch" {
            self.decision.observe(took);
        }
    }

    /// Counts events of a kind by outcome.
    pub fn events(&self, kind: &'static str, outcome: &'static str, number: u64) {
        *lock(&self.counts).events.entry((kind, outcome)).or_default() += number;
    }

    /// Counts a repeated request.
    pub fn repeat(&self) {
        lock(&self.counts).repeats += 1;
    }

    /// Counts accepted rewards that the learner will clip.
    pub fn clipped(&self, number: u64) {
        lock(&self.counts).clipped += number;
    }

    /// Counts a failure of a model. Spaces that the router does not hold are aggregated, as in [`Self::decided`].
    pub fn failed(&self, space: &Name, model: &ModelName, is_held: bool) {
        let space = if is_held { space.clone() } else { other() };
        *lock(&self.counts).failures.entry(space).or_default().entry(model.clone()).or_default() += 1;
    }

    /// Parameters were rejected.
    pub fn params_rejected(&self) {
        lock(&self.counts).params_rejected += 1;
    }

    /// Parameters came into use, this long after the oldest reward that they are the first to contain.
    pub fn fresh(&self, space: &Name, age: Duration) {
        self.freshness.observe(age);
        lock(&self.counts).freshness.insert(space.clone(), age);
    }

    /// Time from the oldest reward of the parameters in use to their use, if it is known.
    pub fn freshness(&self, space: &Name) -> Option<Duration> {
        lock(&self.counts).freshness.get(space).copied()
    }

    /// Counts a decision. Spaces that the router does not hold are aggregated: their number is unbounded.
    pub fn decided(&self, answer: &Answer, is_held: bool) {
        let mut counts = lock(&self.counts);
        counts.restricted += u64::from(!answer.distribution.eligible.is_all());
        let other = other();
        let (space, model) = (if is_held { answer.by.space() } else { &other }, answer.model_name());
        match counts.decisions.get_mut(space).and_then(|models| models.get_mut(model)) {
            Some(number) => *number += 1,
            None => _ = counts.decisions.entry(space.clone()).or_default().insert(model.clone(), 1),
        }
    }

    /// Adds a point to the history, if one is due.
    pub fn remember(&self, router: &Router) {
        let (time_ms, mut past) = (now_ms(), lock(&self.past));
        let timed = self.decision.counts();
        let since: Vec<u64> = timed.iter().zip(&past.timed).map(|(now, before)| now - before).collect();
        let quantile = |q: f64| self.decision.quantile(&since, q);
        let counts = lock(&self.counts);
        let events = |outcomes: &[&str]| -> u64 {
            let chosen = counts.events.iter().filter(|((_, outcome), _)| outcomes.contains(outcome));
            chosen.map(|(_, number)| number).sum()
        };
        past.newest = Point {
            decisions: counts.decisions.values().flat_map(BTreeMap::values).sum(),
            written: events(&["written"]),
            lost: events(&["dropped", "rejected"]),
            errors: counts.requests.iter().filter(|((_, code), _)| *code >= 500).map(|(_, number)| number).sum(),
            p50_s: quantile(0.5),
            p99_s: quantile(0.99),
        };
        (past.timed, past.newest_ms) = (timed, time_ms);
        if past.history.is_due(time_ms) {
            let spaces = router.spaces();
            let spaces =
                spaces.iter().take(PAST_MAX).map(|by| (by.space().to_string(), counts.space_point(by))).collect();
            let point = past.newest.clone();
            past.history.push(time_ms, Moment { point, spaces });
        }
    }

    /// History of the process and of one space.
    pub fn history(&self, space: &str) -> Value {
        let past = lock(&self.past);
        let point = |(time_ms, moment): &(u64, Moment)| json!({"time_ms": time_ms, "point": moment.point, "of_space": moment.spaces.get(space)});
        Value::Array(past.history.points().map(point).collect())
    }

    /// The space to show: an existing one.
    pub fn pick(&self, router: &Router, asked: &str) -> String {
        let spaces = router.spaces();
        let is_there = |name: &str| spaces.iter().any(|by| by.space().as_str() == name);
        pick(asked, is_there, spaces.first().map(|by| by.space().as_str()))
    }

    /// Data of the page: a row for each space whose name contains `find`, and one space in full.
    pub fn now(&self, router: &Router, space: &str, find: &str) -> Value {
        // In the order in which both are locked elsewhere.
        let (past, counts, spaces) = (lock(&self.past), lock(&self.counts), router.spaces());
        let row = |by: &&Arc<Compiled>| {
            let params = by.params();
            let decided = counts.decisions.get(by.space()).map_or(0, |models| models.values().sum::<u64>());
            json!({
                "space": params.space, "version": params.version, "epoch": params.epoch, "decisions": decided,
                "dim": params.dim, "algorithm": params.algorithm, "published_ms": params.created_ms,
            })
        };
        let found: Vec<_> = spaces.iter().filter(|by| by.space().as_str().contains(find)).collect();
        let one = spaces.iter().find(|by| by.space().as_str() == space);
        json!({
            "time_ms": now_ms(),
            "point": past.newest,
            "point_ms": past.newest_ms,
            "repeats": counts.repeats,
            "spaces": found.iter().take(SPACES_MAX).map(row).collect::<Vec<_>>(),
            "spaces_found": found.len(),
            "spaces_all": spaces.len(),
            "space": space,
            "of_space": one.map(|by| counts.space_point(by)),
            "models": one.map(|by| models(by)),
            "dim": one.map(|by| by.params().dim),
            "freshness_s": one.and_then(|by| counts.freshness.get(by.space())).map(Duration::as_secs_f64),
        })
    }

    /// In the format of OpenMetrics.
    pub fn text(
        &self,
        router: &Router,
        ready: bool,
        deliveries: Option<(u64, u64)>,
        resting: &[(Name, ModelName, RestReason)],
    ) -> String {
        let mut sheet = Sheet::new("pointsman_router");
        let counts = lock(&self.counts);
        let requests = counts.requests.iter();
        let requests = requests.map(|(&(endpoint, code), number)| (RequestLabels { endpoint, code }, *number));
        sheet.counters("requests", "HTTP requests, by endpoint and status code", requests);
        sheet.seconds("request_duration", "Duration of HTTP requests, by endpoint", self.durations.clone());
        let events = counts.events.iter();
        let events = events.map(|(&(kind, outcome), number)| (EventLabels { kind, outcome }, *number));
        sheet.counters("events", "Events, by kind and outcome", events);
        let none = Vec::<(String, String)>::new;
        let again = "Repeated requests that got the same answer again";
        sheet.counters("repeats", again, [(none(), counts.repeats)]);
        let clipped = "Accepted rewards outside of reward.range, which the learner clips";
        sheet.counters("rewards_clipped", clipped, [(none(), counts.clipped)]);
        self.http.write(&mut sheet);
        let rejected = "Rejected parameter files or messages";
        sheet.counters("params_rejected", rejected, [(none(), counts.params_rejected)]);
        sheet.gauges("ready", "1 if the router is ready to answer queries", [(none(), u64::from(ready))]);
        if let Some((delivered, lost)) = deliveries {
            let outcomes = [("delivered", delivered), ("lost", lost)];
            let outcomes = outcomes.map(|(outcome, number)| (DeliveryLabels { outcome }, number));
            let of_accepted = "Accepted events delivered to the brokers, or lost after the delivery timeout";
            sheet.counters("deliveries", of_accepted, outcomes);
        }
        let spaces = router.spaces();
        sheet.counters("decisions", "Decisions, by space and drawn model", labelled(&counts.decisions, &spaces));
        let restricted = "Decisions among a part of the models: the request excluded others, or they rested";
        sheet.counters("restricted", restricted, [(none(), counts.restricted)]);
        let failures = "Decisions whose model did not answer, by space and model";
        sheet.counters("failures", failures, labelled(&counts.failures, &spaces));
        let rests = resting.iter().enumerate().map(|(i, (space, model, reason))| {
            let is_named = i < MODELS_MAX && spaces.iter().take(SPACES_MAX).any(|by| by.space() == space);
            let space = if is_named { space.as_str() } else { OTHER }.to_owned();
            let model = if is_named { model.as_str() } else { OTHER }.to_owned();
            (RestLabels { space, model, reason: reason.name() }, 1_u64)
        });
        let about = "Models that rest, by space, model and reason";
        sheet.gauges("resting", about, rests);
        let told = || spaces.iter().take(SPACES_MAX);
        let label = |by: &Compiled| SpaceLabels { space: by.space().to_string() };
        let versions = told().map(|by| (label(by), by.params().version));
        sheet.gauges("params_version", "Version of the parameters of each space", versions);
        let moments = Family::<SpaceLabels, Gauge<f64, AtomicU64>>::default();
        for by in told().filter(|by| by.params().created_ms > 0) {
            moments.get_or_create(&label(by)).set(by.params().created_ms as f64 / 1e3);
        }
        sheet.seconds("params_timestamp", "Unix time at which the parameters of each space were created", moments);
        let about = "Time from reward events to the use of parameters that contain them: of each swap the longest";
        sheet.seconds("freshness", about, self.freshness.clone());
        let newest = Family::<SpaceLabels, Gauge<f64, AtomicU64>>::default();
        for by in told() {
            if let Some(age) = counts.freshness.get(by.space()) {
                newest.get_or_create(&label(by)).set(age.as_secs_f64());
            }
        }
        let about = "Time from the oldest reward of the newest parameters to their use, by space";
        sheet.seconds_of_loop("freshness", about, newest);
        sheet.text()
    }
}

fn models(by: &Compiled) -> Vec<ModelNews> {
    by.models().iter().zip(by.spectra()).map(|(name, eigenvalues)| ModelNews::new(name, eigenvalues)).collect()
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new(Arc::default())
    }
}

impl Counts {
    fn space_point(&self, by: &Compiled) -> SpacePoint {
        let models = self.decisions.get(by.space());
        let number = |model: &ModelName| models.and_then(|models| models.get(model)).copied().unwrap_or(0);
        SpacePoint { version: by.params().version, traffic: by.models().iter().map(number).collect() }
    }
}

/// Rows of counts. Spaces and models beyond the limits are aggregated.
fn labelled(by_model: &ByModel, spaces: &[Arc<Compiled>]) -> Vec<(ModelLabels, u64)> {
    let mut room = MODELS_MAX;
    let mut rows = Vec::new();
    for (space, models) in by_model {
        let told = spaces.iter().take(SPACES_MAX).any(|by| by.space() == space);
        for (model, number) in models {
            let named = told && room > 0;
            room -= usize::from(named);
            let space = if told { space.as_str() } else { OTHER }.to_owned();
            let model = if named { model.as_str() } else { OTHER }.to_owned();
            rows.push((ModelLabels { space, model }, *number));
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::DrawKey;

    fn name(text: String) -> Name {
        Name::try_from(text).unwrap()
    }

    /// A router of so many spaces, each of which has decided once.
    fn busy(spaces: usize, models: usize, metrics: &Metrics) -> Router {
        let router = Router::new(DrawKey::new(b"key").unwrap());
        for i in 0..spaces {
            let space = name(format!("space-{i:04}"));
            let models = (0..models).map(|m| ModelName::try_from(format!("model-{m}")).unwrap()).collect();
            router.begin(Compiled::unlearned(space.clone(), models, 2, None));
            metrics.decided(&router.route(&space, "r", &[1.0, 0.0]).unwrap().unwrap(), true);
        }
        router
    }

    #[test]
    fn spaces_beyond_the_limit_are_told_together() {
        let metrics = Metrics::default();
        let router = busy(SPACES_MAX + 7, 3, &metrics);
        let text = metrics.text(&router, true, Some((5, 1)), &[]);
        let decisions = text.lines().filter(|line| line.starts_with("pointsman_router_decisions_total{"));
        assert_eq!(decisions.count(), SPACES_MAX + 1);
        assert!(text.contains("pointsman_router_decisions_total{space=\"other\",model=\"other\"} 7"), "{text}");
        let versions = text.lines().filter(|line| line.starts_with("pointsman_router_params_version{"));
        assert_eq!(versions.count(), SPACES_MAX);
        assert!(text.contains("pointsman_router_deliveries_total{outcome=\"lost\"} 1"), "{text}");
    }

    #[test]
    fn freshness_is_that_of_the_newest_parameters_and_counted_for_all() {
        let metrics = Metrics::default();
        let router = busy(2, 2, &metrics);
        let space = name("space-0001".to_owned());
        for ms in [700, 300] {
            metrics.fresh(&space, Duration::from_millis(ms));
        }
        let text = metrics.text(&router, true, None, &[]);
        for line in [
            "pointsman_freshness_seconds{space=\"space-0001\"} 0.3",
            "pointsman_router_freshness_seconds_count 2",
            "pointsman_router_freshness_seconds_sum 1.0",
            "pointsman_router_freshness_seconds_bucket{le=\"0.32\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        assert!(text.ends_with("# EOF\n") && text.matches("# EOF").count() == 1, "{text}");
        assert_eq!(metrics.now(&router, "space-0001", "")["freshness_s"], json!(0.3));
        assert_eq!(metrics.now(&router, "space-0000", "")["freshness_s"], Value::Null);
    }

    #[test]
    fn the_past_has_the_quantiles_of_its_own_stretch() {
        let metrics = Metrics::default();
        let router = busy(2, 3, &metrics);
        metrics.request("route", 200, Duration::from_millis(3));
        metrics.request("status", 200, Duration::from_secs(1));
        metrics.request("route", 503, Duration::from_millis(3));
        metrics.events("decision", "written", 2);
        metrics.events("reward", "dropped", 1);
        metrics.remember(&router);
        let now = metrics.now(&router, "space-0001", "0001");
        let (point, traffic) = (&now["point"], &now["of_space"]["traffic"]);
        let p50 = point["p50_s"].as_f64().unwrap();
        assert!((2e-3..6e-3).contains(&p50), "{point}");
        let counts = [&point["decisions"], &point["written"], &point["lost"], &point["errors"]].map(Value::as_u64);
        assert_eq!(counts, [2, 2, 1, 1].map(Some), "{point}");
        assert_eq!(traffic.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).sum::<u64>(), 1);
        assert_eq!((&now["spaces_found"], &now["spaces_all"]), (&json!(1), &json!(2)));
        assert_eq!(metrics.history("space-0001")[0]["of_space"]["traffic"], *traffic);
        metrics.remember(&router);
        assert_eq!(metrics.now(&router, "", "")["point"]["p50_s"], Value::Null, "nothing since");
        assert_eq!(metrics.pick(&router, "nowhere"), "space-0000");
    }
}
