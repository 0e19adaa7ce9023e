//! What the learner tells of itself over HTTP: whether it lives, whether it is ready, how it goes.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use axum::Router as Routes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde::Serialize;
use serde_json::json;
use tokio::net::TcpListener;

use super::{Problem, check_token};
use crate::config::Secret;
use crate::engine::{Counts, Engine, Totals};
use crate::event::Name;
use crate::transport::lock;

/// What the engine's thread tells, and others ask for.
#[derive(Default)]
pub struct Status {
    ready: AtomicBool,
    news: Mutex<News>,
}

/// How it goes.
#[derive(Debug, Clone, Default, Serialize)]
pub struct News {
    /// What became of all events.
    pub counts: Counts,
    /// Mean of the rewards learned from.
    pub mean_reward: f64,
    /// Events that were further out of order than the window.
    pub out_of_order: u64,
    /// Versions, by space.
    pub spaces: BTreeMap<String, u64>,
    /// Messages that are not read yet: topic, partition, number.
    pub lags: Vec<(String, i32, u64)>,
    /// How often partitions were given or taken.
    pub rebalances: u64,
    /// Lanes that are this instance's, where they move.
    pub lanes: Vec<i32>,
    /// How often it has taken one over.
    pub hand_overs: u64,
    /// Errors of the brokers' client, by their code.
    pub broker_errors: BTreeMap<String, u64>,
}

impl News {
    /// What the engines of all lanes tell.
    pub fn of<'a>(engines: impl IntoIterator<Item = &'a Engine> + Clone, out_of_order: u64) -> Self {
        let Totals { counts, mean_reward } = Totals::of(engines.clone());
        let mut spaces = BTreeMap::new();
        for engine in engines {
            let version = |name: &Name| Some((name.to_string(), engine.version(name)?));
            spaces.extend(engine.names().filter_map(version));
        }
        Self { counts, mean_reward, out_of_order, spaces, ..Self::default() }
    }
}

impl Status {
    /// Tells whether it is ready.
    pub fn set_ready(&self, ready: bool) {
        self.ready.store(ready, Ordering::Relaxed);
    }

    /// Tells how it goes.
    pub fn tell(&self, news: News) {
        *lock(&self.news) = news;
    }

    fn news(&self) -> News {
        lock(&self.news).clone()
    }
}

struct Server {
    status: Arc<Status>,
    token: Secret,
    started: Instant,
}

/// Serves until `stop` comes.
pub async fn serve(
    listener: TcpListener,
    status: Arc<Status>,
    token: Secret,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let server = Arc::new(Server { status, token, started: Instant::now() });
    let routes = Routes::new()
        .route("/live", get(|| async { "live\n" }))
        .route("/ready", get(ready))
        .route("/v1/status", get(show))
        .route("/metrics", get(metrics))
        .fallback(|| async { Problem::new(StatusCode::NOT_FOUND, "there are /live /ready /v1/status /metrics") })
        .with_state(server);
    axum::serve(listener, routes).with_graceful_shutdown(stop).await
}

async fn ready(State(server): State<Arc<Server>>) -> Result<&'static str, Problem> {
    if server.status.ready.load(Ordering::Relaxed) {
        return Ok("ready\n");
    }
    Err(Problem::unavailable("the events are not being read yet"))
}

async fn show(State(server): State<Arc<Server>>, headers: HeaderMap) -> Result<Response, Problem> {
    check_token(&server.token, &headers)?;
    let mut shown = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "ready": server.status.ready.load(Ordering::Relaxed),
        "uptime_s": server.started.elapsed().as_secs(),
    });
    if let (Some(all), Ok(serde_json::Value::Object(news))) =
        (shown.as_object_mut(), serde_json::to_value(server.status.news()))
    {
        all.extend(news);
    }
    Ok(([(header::CONTENT_TYPE, "application/json")], shown.to_string()).into_response())
}

async fn metrics(State(server): State<Arc<Server>>, headers: HeaderMap) -> Result<Response, Problem> {
    check_token(&server.token, &headers)?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text(&server.status.news())).into_response())
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    side: &'static str,
    outcome: &'static str,
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
struct Code {
    code: String,
}

/// Spaces beyond these are not named one by one.
const SPACES_MAX: usize = 100;

/// In the format of OpenMetrics.
fn text(news: &News) -> String {
    let mut registry = Registry::with_prefix("pointsman_learner");
    let events = Family::<Outcome, Counter>::default();
    let (queries, rewards) = (&news.counts.join.queries, &news.counts.join.rewards);
    for (side, outcome, number) in [
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
    ] {
        events.get_or_create(&Outcome { side, outcome }).inc_by(number);
    }
    registry.register("events", "Events that were read, by what became of them", events);
    let pending = Family::<Outcome, Gauge>::default();
    for (side, number) in [("query", queries.pending), ("reward", rewards.pending)] {
        pending.get_or_create(&Outcome { side, outcome: "pending" }).set(number as i64);
    }
    registry.register("pending", "Events that wait for their other half", pending);
    let counter = |number: u64| {
        let counter = Counter::<u64>::default();
        counter.inc_by(number);
        counter
    };
    registry.register("applied", "Examples that were learned from", counter(news.counts.applied));
    registry.register("out_of_order", "Events that went after a later one", counter(news.out_of_order));
    registry.register("rebalances", "How often partitions were given or taken", counter(news.rebalances));
    let lanes = Gauge::<i64>::default();
    lanes.set(news.lanes.len() as i64);
    registry.register("lanes", "Lanes of this instance, where they move", lanes);
    registry.register("hand_overs", "How often it has taken a lane over", counter(news.hand_overs));
    let mean = Gauge::<f64, std::sync::atomic::AtomicU64>::default();
    mean.set(news.mean_reward);
    registry.register("mean_reward", "Mean of the rewards learned from, on the scale of 0 to 1", mean);
    let versions = Family::<Space, Gauge>::default();
    for (space, version) in news.spaces.iter().take(SPACES_MAX) {
        versions.get_or_create(&Space { space: space.clone() }).set(*version as i64);
    }
    registry.register("version", "Examples in applied batches, by space", versions);
    let lags = Family::<Place, Gauge>::default();
    for (topic, partition, lag) in &news.lags {
        lags.get_or_create(&Place { topic: topic.clone(), partition: *partition }).set(*lag as i64);
    }
    registry.register("lag", "Messages that are not read yet", lags);
    let errors = Family::<Code, Counter>::default();
    for (code, number) in &news.broker_errors {
        errors.get_or_create(&Code { code: code.clone() }).inc_by(*number);
    }
    registry.register("broker_errors", "Errors of the brokers' client", errors);
    let mut text = String::new();
    // Writing into a string cannot fail.
    let _ = encode(&mut text, &registry);
    text
}
