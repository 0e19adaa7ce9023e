//! The router sidecar: which model for this query? And what did it earn?

use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::Router as Routes;
use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use base64::Engine as _;
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use rand::RngExt;
use serde::de::{DeserializeOwned, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;

use super::live::{Seats, Wanted, Watched, page};
use super::{Problem, check_token};
use crate::config::{Config, OnFull, Settings};
use crate::engine::Side;
use crate::event::{BadQuery, Name};
use crate::router::{Answer, Compiled, Recent, RecentSpec, Router};
use crate::telemetry::CONTENT_TYPE;
use crate::telemetry::router::Metrics;
use crate::transport::now_ms;
use crate::transport::writer::{Event, EventWriter, NotWritten};
use crate::wire::events::{ID_MAX, query_line, reward_line};

/// Most queries in a batch.
const BATCH_MAX: usize = 1000;

/// How often it keeps how it goes, for the page.
const REMEMBER_EVERY: Duration = Duration::from_secs(1);

/// What all requests share.
pub struct Sidecar {
    /// The parameters.
    pub router: Arc<Router>,
    /// Set once parameters were read, or are not waited for.
    pub ready: Arc<AtomicBool>,
    settings: Settings,
    config: Config,
    recent: Recent<Remembered>,
    writer: Arc<EventWriter>,
    metrics: Metrics,
    limit: Option<DefaultDirectRateLimiter>,
    seats: Seats,
    started: Instant,
}

/// A decision as it is answered and remembered.
#[derive(Debug, Serialize)]
struct Decided {
    request_id: String,
    space: Name,
    model: Name,
    propensity: f64,
    propensities: BTreeMap<Name, f64>,
    params_version: u64,
    params_epoch: u64,
}

/// A decision, and whether its event is written. Whoever asks for it, the first time or again, waits for that.
#[derive(Clone)]
struct Remembered {
    decided: Arc<Decided>,
    receipt: watch::Receiver<Option<Result<(), Problem>>>,
}

impl Sidecar {
    /// A sidecar that routes by `router` and writes to `writer`.
    pub fn new(
        config: &Config,
        settings: Settings,
        router: Arc<Router>,
        ready: Arc<AtomicBool>,
        writer: Arc<EventWriter>,
    ) -> Self {
        let spec = RecentSpec { max: config.router.remember_max, keep_ms: config.router.remember_ms };
        let limit = NonZeroU32::new(config.http.requests_per_s_max).map(|n| RateLimiter::direct(Quota::per_second(n)));
        Self {
            router,
            ready,
            settings,
            recent: Recent::new(spec, rand::rng().random()),
            writer,
            metrics: Metrics::new(),
            limit,
            seats: Seats::default(),
            config: config.clone(),
            started: Instant::now(),
        }
    }

    /// Serves until `stop` comes, then lets open requests end.
    pub async fn serve(
        self: Arc<Self>,
        listener: TcpListener,
        stop: impl Future<Output = ()> + Send + 'static,
    ) -> std::io::Result<()> {
        let (sidecar, seats) = (self.clone(), self.seats.clone());
        let remembering = tokio::spawn(async move {
            let mut ticks = tokio::time::interval(REMEMBER_EVERY);
            loop {
                ticks.tick().await;
                sidecar.metrics.remember(&sidecar.router);
            }
        });
        let stop = async move {
            stop.await;
            seats.close();
            remembering.abort();
        };
        axum::serve(listener, self.routes()).with_graceful_shutdown(stop).await
    }

    fn routes(self: Arc<Self>) -> Routes {
        let guarded = Routes::new()
            .route("/v1/route", post(route))
            .route("/v1/route:batch", post(route_batch))
            .route("/v1/rewards", post(reward))
            .route("/v1/explain", post(explain))
            .route("/v1/status", get(status))
            .route("/v1/events", get(events))
            .route("/metrics", get(metrics))
            .layer(middleware::from_fn_with_state(self.clone(), guard));
        let open = Routes::new()
            .route("/", get(page))
            .route("/live", get(|| async { "live\n" }))
            .route("/ready", get(ready))
            .route("/openapi.json", get(openapi));
        let limit = DefaultBodyLimit::max(self.config.http.body_bytes_max);
        guarded
            .merge(open)
            .fallback(|| async { Problem::new(StatusCode::NOT_FOUND, "there is no such path; see /openapi.json") })
            .method_not_allowed_fallback(|| async {
                Problem::new(StatusCode::METHOD_NOT_ALLOWED, "this path takes another method; see /openapi.json")
            })
            .layer(limit)
            .with_state(self)
    }

    /// Takes decisions, all or none, and writes the events of those that are new; `place` says where in the request a
    /// problem is.
    async fn decide(
        self: &Arc<Self>,
        requests: &[Asked],
        place: impl Fn(usize, Problem) -> Problem,
    ) -> Result<Vec<Arc<Decided>>, Problem> {
        let (settled, receipt) = watch::channel(None);
        let mut known = Vec::with_capacity(requests.len());
        let mut events = Vec::new();
        for (i, asked) in requests.iter().enumerate() {
            let now_ms = now_ms();
            let decide = || {
                self.answer(asked).map(|answer| {
                    self.metrics.decided(&answer);
                    let line = query_line(&asked.request_id, now_ms as i64, &asked.query, &answer);
                    events.push(asked.event(line));
                    Remembered { decided: Arc::new(Decided::new(asked, &answer)), receipt: receipt.clone() }
                })
            };
            match self.recent.get_or(&asked.space, &asked.request_id, now_ms, decide) {
                Ok((remembered, is_new)) => {
                    if !is_new {
                        self.metrics.repeat();
                    }
                    known.push(remembered);
                }
                Err(problem) => {
                    self.forget(&events);
                    return Err(place(i, problem));
                }
            }
        }
        if !events.is_empty() {
            let sidecar = self.clone();
            // Not in this task: it is to be settled even if the caller goes away.
            tokio::spawn(async move {
                let written = sidecar.write("decision", &events).await;
                if written.is_err() {
                    // It must not pass for logged when it is sent again.
                    sidecar.forget(&events);
                }
                settled.send_replace(Some(written));
            });
        }
        for remembered in &mut known {
            let outcome = remembered.receipt.wait_for(Option::is_some).await;
            let again = || Problem::unavailable("the same request, sent before, has failed: try again");
            outcome.map_err(|_| again())?.clone().unwrap_or_else(|| Err(again()))?;
        }
        Ok(known.into_iter().map(|remembered| remembered.decided).collect())
    }

    fn answer(&self, asked: &Asked) -> Result<Answer, Problem> {
        let routed = self.router.route(&asked.space, &asked.request_id, &asked.query);
        let routed = match routed {
            Some(routed) => routed,
            None => {
                self.begin(&asked.space)?;
                self.router
                    .route(&asked.space, &asked.request_id, &asked.query)
                    .ok_or_else(|| Problem::unavailable("the space has no parameters"))?
            }
        };
        routed.map_err(|bad| Problem::field("query", bad.to_string()))
    }

    /// A space without parameters is routed as configured, until some come.
    fn begin(&self, space: &Name) -> Result<(), Problem> {
        if self.router.spaces().len() >= self.settings.spaces_max {
            let most = self.settings.spaces_max;
            return Err(Problem::field("space", format!("there are learner.spaces_max = {most} spaces already")));
        }
        self.router.begin(self.unlearned(space));
        Ok(())
    }

    fn unlearned(&self, space: &Name) -> Compiled {
        let spec = self.settings.space(space);
        let fallback = self.config.router.fallback_model.as_deref();
        let always = spec.models.iter().position(|model| Some(model.as_str()) == fallback);
        Compiled::unlearned(space.clone(), spec.models.clone(), spec.dim, always)
    }

    fn forget(&self, events: &[Event]) {
        events.iter().for_each(|event| self.recent.forget(&event.space, &event.request_id));
    }

    async fn write(&self, kind: &'static str, events: &[Event]) -> Result<(), Problem> {
        let number = events.len() as u64;
        match self.writer.write(events).await {
            Ok(()) => {
                self.metrics.events(kind, "written", number);
                Ok(())
            }
            Err(NotWritten::Full) if self.config.events.on_full == OnFull::Drop => {
                self.metrics.events(kind, "dropped", number);
                Ok(())
            }
            Err(error) => {
                self.metrics.events(kind, "rejected", number);
                if let NotWritten::Failed(problem) = &error {
                    tracing::error!(problem, "events cannot be written");
                }
                Err(Problem::unavailable(error.to_string()))
            }
        }
    }

    fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Relaxed)
    }
}

impl Decided {
    fn new(asked: &Asked, answer: &Answer) -> Self {
        let propensities = &answer.distribution.propensities;
        let (_, version, _) = answer.by.stamp();
        Self {
            request_id: asked.request_id.clone(),
            space: asked.space.clone(),
            model: answer.model_name().clone(),
            propensity: propensities[answer.model],
            propensities: answer.by.models().iter().cloned().zip(propensities.iter().copied()).collect(),
            params_version: version,
            params_epoch: answer.by.stamp().0,
        }
    }
}

/// A query that is to be routed, checked as far as it can be without parameters.
struct Asked {
    space: Name,
    request_id: String,
    query: Vec<f32>,
}

impl Asked {
    fn event(&self, line: Vec<u8>) -> Event {
        Event { side: Side::Query, space: self.space.clone(), request_id: self.request_id.clone(), line }
    }
}

#[derive(Deserialize)]
struct RouteBody {
    space: Option<String>,
    request_id: Option<String>,
    query: Vector,
}

#[derive(Deserialize)]
struct BatchBody {
    space: Option<String>,
    requests: Vec<BatchItem>,
}

#[derive(Deserialize)]
struct BatchItem {
    request_id: Option<String>,
    query: Vector,
}

#[derive(Deserialize)]
struct RewardBody {
    space: Option<String>,
    request_id: String,
    reward: f64,
    event_id: Option<String>,
}

#[derive(Deserialize)]
struct ExplainBody {
    space: Option<String>,
    query: Vector,
}

#[derive(Deserialize)]
struct RouteParams {
    space: Option<String>,
    request_id: Option<String>,
}

async fn route(
    State(sidecar): State<Arc<Sidecar>>,
    params: Result<Query<RouteParams>, QueryRejection>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Problem> {
    sidecar.check_ready()?;
    let Query(params) = params.map_err(|error| Problem::new(error.status(), error.body_text()))?;
    let body = whole(body)?;
    let binary = headers.get(header::CONTENT_TYPE).is_some_and(|kind| kind == "application/octet-stream");
    let RouteBody { space: named, request_id, query } = if binary {
        let query = Vector(floats(&body).ok_or_else(|| Problem::malformed("the body must be little-endian f32"))?);
        RouteBody { space: params.space, request_id: params.request_id, query }
    } else {
        parse(&body)?
    };
    let asked = asked(space(named)?, request_id, query)?;
    let decided = sidecar.decide(&[asked], |_, problem| problem).await?;
    Ok(json_response(decided[0].as_ref()))
}

async fn route_batch(
    State(sidecar): State<Arc<Sidecar>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Problem> {
    sidecar.check_ready()?;
    let BatchBody { space: named, requests } = parse(&whole(body)?)?;
    if requests.len() > BATCH_MAX {
        return Err(Problem::field(
            "requests",
            format!("{} of them, at most {BATCH_MAX} in one batch", requests.len()),
        ));
    }
    let space = space(named)?;
    let place = |i: usize, problem: Problem| problem.within(&format!("requests[{i}]"));
    let requests = requests.into_iter().enumerate().map(|(i, BatchItem { request_id, query })| {
        asked(space.clone(), request_id, query).map_err(|problem| place(i, problem))
    });
    let decided = sidecar.decide(&requests.collect::<Result<Vec<Asked>, Problem>>()?, place).await?;
    let decisions: Vec<&Decided> = decided.iter().map(Arc::as_ref).collect();
    Ok(json_response(&json!({ "decisions": decisions })))
}

async fn reward(
    State(sidecar): State<Arc<Sidecar>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<StatusCode, Problem> {
    let RewardBody { space: named, request_id, reward, event_id } = parse(&whole(body)?)?;
    let space = space(named)?;
    check_id("request_id", &request_id)?;
    if let Some(event_id) = &event_id {
        check_id("event_id", event_id)?;
    }
    if !reward.is_finite() {
        return Err(Problem::field("reward", "must be finite"));
    }
    let line = reward_line(&request_id, &space, now_ms() as i64, reward, event_id.as_deref());
    sidecar.write("reward", &[Event { side: Side::Reward, space, request_id, line }]).await?;
    Ok(StatusCode::ACCEPTED)
}

/// How a query would be routed: nothing is drawn, written or remembered.
async fn explain(
    State(sidecar): State<Arc<Sidecar>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, Problem> {
    sidecar.check_ready()?;
    let ExplainBody { space: named, query } = parse(&whole(body)?)?;
    let space = space(named)?;
    let by = sidecar.router.space(&space).unwrap_or_else(|| Arc::new(sidecar.unlearned(&space)));
    let bad = |bad: BadQuery| Problem::field("query", bad.to_string());
    let (scores, distribution) = (by.scores(&query.0).map_err(bad)?, by.distribution(&query.0).map_err(bad)?);
    let model = |m: usize| {
        json!({
            "model": by.models()[m], "score": scores[m], "policy": distribution.policy[m],
            "propensity": distribution.propensities[m],
        })
    };
    let (epoch, version, _) = by.stamp();
    Ok(json_response(&json!({
        "space": space, "params_version": version, "params_epoch": epoch, "algorithm": by.params().algorithm,
        "models": (0..by.models().len()).map(model).collect::<Vec<_>>(),
    })))
}

async fn events(
    State(sidecar): State<Arc<Sidecar>>,
    wanted: Result<Query<Wanted>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(wanted) = wanted.map_err(|error| Problem::new(error.status(), error.body_text()))?;
    sidecar.seats.watch(sidecar.clone(), wanted)
}

impl Watched for Sidecar {
    fn pick(&self, space: &str) -> String {
        self.metrics.pick(&self.router, space)
    }

    fn history(&self, space: &str) -> Value {
        self.metrics.history(space)
    }

    fn now(&self, space: &str, find: &str) -> Value {
        let mut now = self.metrics.now(&self.router, space, find);
        now["role"] = json!("router");
        now["version"] = json!(env!("CARGO_PKG_VERSION"));
        now["ready"] = json!(self.is_ready());
        now["uptime_s"] = json!(self.started.elapsed().as_secs());
        now
    }
}

async fn status(State(sidecar): State<Arc<Sidecar>>) -> Response {
    let spaces: serde_json::Map<String, Value> = sidecar
        .router
        .spaces()
        .iter()
        .map(|compiled| {
            let params = compiled.params();
            let value = json!({
                "epoch": params.epoch, "version": params.version, "revision": params.revision, "dim": params.dim,
                "models": params.models, "algorithm": params.algorithm, "created_ms": params.created_ms,
            });
            (params.space.to_string(), value)
        })
        .collect();
    json_response(&json!({
        "version": env!("CARGO_PKG_VERSION"),
        "ready": sidecar.is_ready(),
        "uptime_s": sidecar.started.elapsed().as_secs(),
        "spaces": spaces,
    }))
}

async fn ready(State(sidecar): State<Arc<Sidecar>>) -> Result<&'static str, Problem> {
    sidecar.check_ready().map(|()| "ready\n")
}

async fn metrics(State(sidecar): State<Arc<Sidecar>>) -> Response {
    let text = sidecar.metrics.text(&sidecar.router, sidecar.is_ready(), sidecar.writer.deliveries());
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response()
}

async fn openapi() -> Response {
    let document = include_str!("openapi.json").replace("VERSION", env!("CARGO_PKG_VERSION"));
    ([(header::CONTENT_TYPE, "application/json")], document).into_response()
}

/// Counts every request; turns away those without the token, those beyond the rate and those that take too long.
async fn guard(State(sidecar): State<Arc<Sidecar>>, request: Request, next: Next) -> Response {
    let start = Instant::now();
    let endpoint = match request.uri().path() {
        "/v1/route" => "route",
        "/v1/route:batch" => "route_batch",
        "/v1/rewards" => "rewards",
        "/v1/explain" => "explain",
        "/v1/status" => "status",
        "/v1/events" => "events",
        _ => "metrics",
    };
    let timeout = Duration::from_millis(sidecar.config.http.timeout_ms);
    let response = match sidecar.admit(request.headers()) {
        Ok(()) => tokio::time::timeout(timeout, next.run(request)).await.unwrap_or_else(|_| {
            Problem::new(StatusCode::REQUEST_TIMEOUT, "it took longer than http.timeout_ms").into_response()
        }),
        Err(problem) => problem.into_response(),
    };
    sidecar.metrics.request(endpoint, response.status().as_u16(), start.elapsed());
    response
}

impl Sidecar {
    fn admit(&self, headers: &HeaderMap) -> Result<(), Problem> {
        check_token(&self.config.http.token, headers)?;
        match &self.limit {
            Some(limit) if limit.check().is_err() => {
                Err(Problem::new(StatusCode::TOO_MANY_REQUESTS, "more than http.requests_per_s_max"))
            }
            _ => Ok(()),
        }
    }

    fn check_ready(&self) -> Result<(), Problem> {
        if self.is_ready() {
            return Ok(());
        }
        Err(Problem::unavailable("no parameters have been read yet: wait, or start with --serve-uniform"))
    }
}

/// A body that has come as a whole.
fn whole(body: Result<Bytes, BytesRejection>) -> Result<Bytes, Problem> {
    body.map_err(|error| Problem::new(error.status(), error.body_text()))
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let parsed = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        match inner.classify() {
            serde_json::error::Category::Data if path == "." => {
                Problem::field(missing_field(&inner), inner.to_string())
            }
            serde_json::error::Category::Data => Problem::field(path, inner.to_string()),
            _ => Problem::malformed(format!("the body is not JSON: {inner}")),
        }
    })?;
    deserializer.end().map_err(|error| Problem::malformed(format!("the body is not JSON: {error}")))?;
    Ok(parsed)
}

/// The field that an error of the whole object speaks of.
fn missing_field(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split('`').nth(1).unwrap_or("body").to_owned()
}

fn asked(space: Name, request_id: Option<String>, query: Vector) -> Result<Asked, Problem> {
    let request_id = match request_id {
        Some(id) => {
            check_id("request_id", &id)?;
            id
        }
        None => format!("{:032x}", rand::rng().random::<u128>()),
    };
    Ok(Asked { space, request_id, query: query.0 })
}

fn space(named: Option<String>) -> Result<Name, Problem> {
    match named {
        None => Ok(Name::default_space()),
        Some(name) => Name::try_from(name).map_err(|bad| Problem::field("space", bad.to_string())),
    }
}

fn check_id(field: &str, id: &str) -> Result<(), Problem> {
    if id.is_empty() || id.len() > ID_MAX {
        return Err(Problem::field(field, format!("must have 1 to {ID_MAX} bytes")));
    }
    Ok(())
}

fn json_response<T: Serialize>(value: &T) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(error) => Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

fn floats(bytes: &[u8]) -> Option<Vec<f32>> {
    let (chunks, rest) = bytes.as_chunks::<4>();
    rest.is_empty().then(|| chunks.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect())
}

/// A query vector: an array of numbers, or base64 of little-endian f32.
struct Vector(Vec<f32>);

impl<'de> Deserialize<'de> for Vector {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Vector;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array of numbers, or base64 of little-endian f32")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut numbers: A) -> Result<Vector, A::Error> {
                let mut vector = Vec::new();
                while let Some(x) = numbers.next_element::<f32>()? {
                    vector.push(x);
                }
                Ok(Vector(vector))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Vector, E> {
                let bytes = base64::engine::general_purpose::STANDARD.decode(text);
                let vector = bytes.ok().and_then(|bytes| floats(&bytes));
                vector.map(Vector).ok_or_else(|| E::custom("must be base64 of little-endian f32"))
            }
        }
        deserializer.deserialize_any(Either)
    }
}
