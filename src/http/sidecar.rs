//! The router sidecar: routes queries and accepts their rewards.

use std::collections::BTreeMap;
use std::future::Future;
use std::num::NonZeroU32;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use axum::Router as Routes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post, put};
use governor::{DefaultDirectRateLimiter, Quota, RateLimiter};
use rand::RngExt;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::watch;
use xxhash_rust::xxh3::xxh3_128;

use super::body::{Bodies, Kind, Received, kind, parse};
use super::live::{Seats, Wanted, Watched, page};
use super::{Access, Problem, Server, models, reconfigure};
use crate::config::{Config, OnFull, Settings};
use crate::engine::Side;
use crate::event::{BadQuery, ModelName, Name};
use crate::router::{Answer, Compiled, Params, Recent, RecentSpec, Rest, Resting, RestingSpec, Restriction, Router};
use crate::serve::Reload;
use crate::telemetry::router::Metrics;
use crate::telemetry::{CONTENT_TYPE, Episodes};
use crate::transport::now_ms;
use crate::transport::writer::{Event, EventWriter, NotWritten};
use crate::wire::events::{ID_MAX, query_line, reward_line};
use crate::wire::requests::{
    BATCH_MAX, BatchBody, BatchItem, ExplainBody, Object, RewardBody, RouteBody, Vector, floats,
};

/// Bytes of a number in JSON, indentation included, and of all the rest of a query.
const NUMBER_BYTES: usize = 64;
const QUERY_BYTES: usize = 8 << 10;

/// Bytes of a model in JSON besides its name, indentation included.
const NAME_BYTES: usize = 16;

/// Most bytes of a reward.
const REWARD_BYTES_MAX: usize = 64 << 10;

/// Interval of history points for the page.
const REMEMBER_EVERY: Duration = Duration::from_secs(1);

/// What all requests share.
pub struct Sidecar {
    /// The parameters.
    pub router: Arc<Router>,
    /// Set once parameters are read, or immediately with --serve-uniform.
    pub ready: Arc<AtomicBool>,
    settings: Arc<ArcSwap<Settings>>,
    pub(super) config: Config,
    recent: Recent<Remembered>,
    pub(super) resting: Mutex<Resting>,
    writer: Arc<EventWriter>,
    pub(super) metrics: Metrics,
    limit: Option<DefaultDirectRateLimiter>,
    access: Arc<Access>,
    bodies: Bodies,
    body_limits: BodyLimits,
    write_failures: Episodes,
    seats: Seats,
    started: Instant,
    /// The same in milliseconds since 1970.
    started_ms: u64,
}

/// Size limits of bodies.
struct BodyLimits {
    query: usize,
    batch: usize,
    reward: usize,
}

impl BodyLimits {
    /// As large as the largest good request can be, within the configured limit.
    fn new(config: &Config, settings: &Settings) -> Self {
        let dim = settings.spaces.values().map(|spec| spec.dim).chain([settings.learner.dim]).max().unwrap_or_default();
        let names = |models: &[ModelName]| models.iter().map(|model| model.as_str().len() + NAME_BYTES).sum::<usize>();
        let specs = settings.spaces.values().chain([&settings.learner]);
        // A query may name each model twice: as allowed, and as excluded.
        let names = 2 * specs.map(|spec| names(&spec.models)).max().unwrap_or_default();
        let query = QUERY_BYTES + dim * NUMBER_BYTES + names;
        let within = |bytes: usize| bytes.min(config.http.body_bytes_max);
        Self { query: within(query), batch: within(BATCH_MAX * query), reward: within(REWARD_BYTES_MAX) }
    }
}

/// A decision as it is answered and remembered.
#[derive(Debug, Serialize)]
pub(super) struct Decided {
    request_id: String,
    space: Name,
    pub(super) model: ModelName,
    propensity: f64,
    /// Of the models that were eligible.
    propensities: BTreeMap<ModelName, f64>,
    params_version: u64,
    params_epoch: u64,
    /// Whether the model is known not to have answered.
    #[serde(skip)]
    pub(super) has_failed: AtomicBool,
}

/// A decision, and whether its event is written. The first request and its repeats wait for that.
#[derive(Clone)]
struct Remembered {
    decided: Arc<Decided>,
    /// Hash of the query and what else the decision depends on: a repeat must have the same.
    query: u128,
    receipt: watch::Receiver<Option<Result<(), Problem>>>,
}

impl Sidecar {
    /// A sidecar that routes by `router`, writes to `writer` and answers on `server`.
    pub fn new(
        config: &Config,
        settings: Settings,
        router: Arc<Router>,
        ready: Arc<AtomicBool>,
        writer: Arc<EventWriter>,
        server: &Server,
    ) -> Self {
        let spec = RecentSpec { max: config.router.remember_max, keep_ms: config.router.remember_ms };
        let limit = NonZeroU32::new(config.http.requests_per_s_max).map(|n| RateLimiter::direct(Quota::per_second(n)));
        Self {
            router,
            ready,
            recent: Recent::new(spec, rand::rng().random()),
            resting: Mutex::new(Resting::new(RestingSpec {
                failures_max: config.router.failures_max,
                cooldown_ms: config.router.cooldown_ms,
            })),
            writer,
            metrics: Metrics::new(server.counters()),
            limit,
            access: server.access(),
            bodies: Bodies::new(config.http.in_flight_bytes_max, server.counters()),
            body_limits: BodyLimits::new(config, &settings),
            write_failures: Episodes::default(),
            seats: Seats::default(),
            settings: Arc::new(ArcSwap::from_pointee(settings)),
            config: config.clone(),
            started: Instant::now(),
            started_ms: now_ms(),
        }
    }

    /// The settings in use.
    pub fn settings(&self) -> Arc<Settings> {
        self.settings.load_full()
    }

    /// What continues it with other settings.
    pub fn reconfigure(&self) -> impl Fn(&Config, &Settings) + Send + Sync + use<> {
        let current = self.settings.clone();
        move |_, settings| current.store(Arc::new(settings.clone()))
    }

    /// Serves until `stop` resolves, then completes open requests.
    pub async fn serve(
        self: Arc<Self>,
        server: Server,
        reload: Arc<Reload>,
        stop: impl Future<Output = ()> + Send + 'static,
    ) {
        let about = Routes::new()
            .route("/v1/status", get(status))
            .route("/v1/events", get(events))
            .route("/metrics", get(metrics))
            .route("/ready", get(ready))
            .with_state(self.clone())
            .merge(reconfigure::routes(reload));
        self.serve_with(about, server, stop).await;
    }

    /// The same with other routes for what the process says about itself.
    pub(super) async fn serve_with(
        self: Arc<Self>,
        about: Routes,
        server: Server,
        stop: impl Future<Output = ()> + Send + 'static,
    ) {
        let (sidecar, seats) = (self.clone(), self.seats.clone());
        let remembering = tokio::spawn(async move {
            let mut ticks = tokio::time::interval(REMEMBER_EVERY);
            loop {
                ticks.tick().await;
                sidecar.metrics.remember(&sidecar.router);
                sidecar.end_rests();
            }
        });
        let stop = async move {
            stop.await;
            seats.close();
            remembering.abort();
        };
        server.serve(self.routes(about), stop).await;
    }

    fn routes(self: Arc<Self>, about: Routes) -> Routes {
        Routes::new()
            .route("/v1/route", post(route))
            .route("/v1/route:batch", post(route_batch))
            .route("/v1/rewards", post(reward))
            .route("/v1/explain", post(explain))
            .route("/v1/models", get(models::list))
            .route("/v1/models/{*name}", put(models::rest))
            .route("/", get(page))
            .route("/live", get(|| async { "live\n" }))
            .route("/openapi.json", get(openapi))
            .with_state(self.clone())
            .merge(about)
            .fallback(|| async { Problem::new(StatusCode::NOT_FOUND, "no such path: see /openapi.json") })
            .method_not_allowed_fallback(|| async {
                Problem::new(StatusCode::METHOD_NOT_ALLOWED, "this path does not support the method: see /openapi.json")
            })
            .layer(middleware::from_fn_with_state(self, guard))
    }

    /// Takes decisions, all or none, and writes the events of new ones; `place` adds the position in the request to a
    /// problem.
    async fn decide(
        self: &Arc<Self>,
        requests: &[Asked],
        place: impl Fn(usize, Problem) -> Problem,
    ) -> Result<Vec<Arc<Decided>>, Problem> {
        let (settled, receipt) = watch::channel(None);
        let mut known = Vec::with_capacity(requests.len());
        let mut events = Vec::new();
        for (i, asked) in requests.iter().enumerate() {
            let (now_ms, fingerprint) = (now_ms(), asked.fingerprint());
            let decide = || {
                self.answer(asked, now_ms).map(|answer| {
                    self.metrics.decided(&answer, self.router.holds(&asked.space));
                    let line = query_line(&asked.request_id, now_ms as i64, &asked.query, &answer);
                    events.push(asked.event(line));
                    let decided = Arc::new(Decided::new(asked, &answer));
                    Remembered { decided, query: fingerprint, receipt: receipt.clone() }
                })
            };
            let found = self.recent.get_or(&asked.space, &asked.request_id, now_ms, decide);
            let found = found.and_then(|found| match found.0.query == fingerprint {
                true => Ok(found),
                false => Err(Problem::conflict(
                    "request_id",
                    "this request_id was already used with another query, models, exclude or draw_key: use a new one",
                )),
            });
            match found {
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
            // In a task of its own: it must complete even if the caller disconnects.
            tokio::spawn(async move {
                let written = sidecar.write("decision", &events).await;
                if written.is_err() {
                    // A retry must not be treated as logged.
                    sidecar.forget(&events);
                }
                settled.send_replace(Some(written));
            });
        }
        for remembered in &mut known {
            let outcome = remembered.receipt.wait_for(Option::is_some).await;
            let again = || Problem::unavailable("an earlier attempt of the same request failed: retry");
            outcome.map_err(|_| again())?.clone().unwrap_or_else(|| Err(again()))?;
        }
        Ok(known.into_iter().map(|remembered| remembered.decided).collect())
    }

    fn answer(&self, asked: &Asked, now_ms: u64) -> Result<Answer, Problem> {
        let by = match self.router.space(&asked.space) {
            Some(by) => by,
            None => self.begin(&asked.space)?,
        };
        let eligible = self.eligible(&by, &asked.restriction, now_ms)?;
        let (id, key) = (&asked.request_id, asked.draw_key.as_deref());
        let answer = self.router.decide_among(by, id, key, &asked.query, &eligible);
        answer.map_err(|bad| Problem::field("query", bad.to_string()))
    }

    /// A recent decision.
    pub(super) fn remembered(&self, space: &Name, request_id: &str, now_ms: u64) -> Option<Arc<Decided>> {
        self.recent.get(space, request_id, now_ms).map(|remembered| remembered.decided)
    }

    /// Routes a space without parameters as configured, until parameters arrive. The router holds `default`, listed spaces
    /// and others up to the limit. Beyond it spaces are routed in the same way but not held, so that invented names evict
    /// no space. Once that many spaces are learned, new ones are rejected, as the learner does.
    fn begin(&self, space: &Name) -> Result<Arc<Compiled>, Problem> {
        self.check_space(space)?;
        let (unlearned, most) = (self.unlearned(space), self.settings().spaces_max);
        let (held, learned) = self.router.sizes();
        if self.settings().is_reserved(space) || held < most {
            self.router.begin(unlearned.clone());
        } else if learned >= most {
            return Err(Problem::field(
                "space",
                format!("the limit of learner.spaces_max = {most} spaces is reached: raise it"),
            ));
        }
        Ok(Arc::new(unlearned))
    }

    pub(super) fn check_space(&self, space: &Name) -> Result<(), Problem> {
        if self.settings().allows(space) {
            return Ok(());
        }
        let detail =
            format!("space {space} is not listed in [spaces], and learner.spaces = \"listed\": add it to [spaces]");
        Err(Problem::field("space", detail))
    }

    /// Counts rejected parameters.
    pub fn params_rejected(&self) {
        self.metrics.params_rejected();
    }

    /// Takes published parameters, created by the clock of their learner; returns whether they are newer than the current ones.
    /// `oldest_reward_ms` is the event time of the oldest reward that they are the first to contain.
    pub fn take_params(&self, params: Params, oldest_reward_ms: Option<i64>) -> bool {
        let (space, created_ms) = (params.space.clone(), params.created_ms);
        let is_taken = self.router.offer(params);
        // Parameters from before the start say how long the router was down.
        let is_live = created_ms >= self.started_ms;
        if let Some(reward_ms) = oldest_reward_ms.filter(|_| is_taken && is_live) {
            let age_ms = i64::try_from(now_ms()).unwrap_or(i64::MAX).saturating_sub(reward_ms);
            self.metrics.fresh(&space, Duration::from_millis(u64::try_from(age_ms).unwrap_or(0)));
        }
        is_taken
    }

    fn unlearned(&self, space: &Name) -> Compiled {
        let settings = self.settings();
        let spec = settings.space(space);
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
            Err(error) => {
                let drops = self.config.events.on_full == OnFull::Drop;
                if let NotWritten::Failed(problem) = &error
                    && self.write_failures.begin()
                {
                    let message = if drops {
                        "cannot write events; dropping them"
                    } else {
                        "cannot write events; rejecting requests"
                    };
                    tracing::error!(problem, "{message}");
                }
                self.metrics.events(kind, if drops { "dropped" } else { "rejected" }, number);
                if drops { Ok(()) } else { Err(Problem::unavailable(error.to_string())) }
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
            propensities: answer.by_name(propensities).into_iter().map(|(name, p)| (name.clone(), p)).collect(),
            params_version: version,
            params_epoch: answer.by.stamp().0,
            has_failed: AtomicBool::new(false),
        }
    }
}

/// A query to route, validated as far as possible without parameters.
struct Asked {
    space: Name,
    request_id: String,
    query: Vec<f32>,
    restriction: Restriction,
    draw_key: Option<String>,
}

impl Asked {
    /// A hash of all that the decision depends on.
    fn fingerprint(&self) -> u128 {
        let mut bytes: Vec<u8> = self.query.iter().flat_map(|x| x.to_le_bytes()).collect();
        if !self.restriction.is_none() || self.draw_key.is_some() {
            bytes.extend(json!([self.restriction.models, self.restriction.exclude, self.draw_key]).to_string().bytes());
        }
        xxh3_128(&bytes)
    }

    fn event(&self, line: Vec<u8>) -> Event {
        Event { side: Side::Query, space: self.space.clone(), request_id: self.request_id.clone(), line }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RouteParams {
    space: Option<String>,
    request_id: Option<String>,
    /// Names, separated by commas, which no name contains.
    models: Option<String>,
    exclude: Option<String>,
    draw_key: Option<String>,
}

/// Names that are separated by commas.
fn names(text: &str) -> Vec<String> {
    text.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

async fn route(
    State(sidecar): State<Arc<Sidecar>>,
    params: Result<Query<RouteParams>, QueryRejection>,
    request: Request,
) -> Result<Response, Problem> {
    let most = sidecar.body_limits.query;
    let (body, _held) = match kind(&request, &[Kind::Json, Kind::Binary])? {
        Kind::Json => {
            sidecar.check_ready()?;
            sidecar.json(request, most).await?
        }
        Kind::Binary => {
            sidecar.check_ready()?;
            let Query(params) = params.map_err(|error| Problem::new(error.status(), error.body_text()))?;
            let received = sidecar.receive(request, most).await?;
            let query = floats(&received.bytes)
                .ok_or_else(|| Problem::malformed("the body must consist of little-endian f32 values"))?;
            let body = RouteBody {
                space: params.space,
                request_id: params.request_id,
                query: Vector(query),
                models: params.models.as_deref().map(names),
                exclude: params.exclude.as_deref().map(names),
                draw_key: params.draw_key,
            };
            (body, received)
        }
    };
    let RouteBody { space: named, request_id, query, models, exclude, draw_key } = body;
    let asked = asked(space(named)?, BatchItem { request_id, query, models, exclude, draw_key })?;
    let decided = sidecar.decide(&[asked], |_, problem| problem).await?;
    Ok(json_response(decided[0].as_ref()))
}

async fn route_batch(State(sidecar): State<Arc<Sidecar>>, request: Request) -> Result<Response, Problem> {
    kind(&request, &[Kind::Json])?;
    sidecar.check_ready()?;
    let (BatchBody { space: named, requests }, _held) = sidecar.json(request, sidecar.body_limits.batch).await?;
    sidecar.spend_batch(requests.0.len())?;
    let space = space(named)?;
    let place = |i: usize, problem: Problem| problem.within(&format!("requests[{i}]"));
    let requests = requests.0.into_iter().enumerate();
    let requests = requests.map(|(i, Object(item))| asked(space.clone(), item).map_err(|problem| place(i, problem)));
    let decided = sidecar.decide(&requests.collect::<Result<Vec<Asked>, Problem>>()?, place).await?;
    let decisions: Vec<&Decided> = decided.iter().map(Arc::as_ref).collect();
    Ok(json_response(&json!({ "decisions": decisions })))
}

async fn reward(State(sidecar): State<Arc<Sidecar>>, request: Request) -> Result<StatusCode, Problem> {
    kind(&request, &[Kind::Json])?;
    let (mut body, _held): (RewardBody, _) = sidecar.small_json(request).await?;
    let space = space(body.space.take())?;
    sidecar.check_space(&space)?;
    let (request_id, event_id) = (std::mem::take(&mut body.request_id), body.event_id.take());
    check_id("request_id", &request_id)?;
    if let Some(event_id) = &event_id {
        check_id("event_id", event_id)?;
    }
    let (feedback, clipped) = sidecar.feedback(&space, body)?;
    sidecar.note(&space, &request_id, &feedback);
    let line = reward_line(&request_id, &space, now_ms() as i64, &feedback, event_id.as_deref());
    sidecar.write("reward", &[Event { side: Side::Reward, space, request_id, line }]).await?;
    sidecar.metrics.clipped(clipped);
    Ok(StatusCode::ACCEPTED)
}

/// Explains how a query would be routed, without drawing a model or logging.
async fn explain(State(sidecar): State<Arc<Sidecar>>, request: Request) -> Result<Response, Problem> {
    kind(&request, &[Kind::Json])?;
    sidecar.check_ready()?;
    let (ExplainBody { space: named, query, models, exclude }, _held) =
        sidecar.json(request, sidecar.body_limits.query).await?;
    let space = space(named)?;
    sidecar.check_space(&space)?;
    let by = sidecar.router.space(&space).unwrap_or_else(|| Arc::new(sidecar.unlearned(&space)));
    let bad = |bad: BadQuery| Problem::field("query", bad.to_string());
    let restriction = Restriction { models, exclude: exclude.unwrap_or_default() };
    let eligible = sidecar.eligible(&by, &restriction, now_ms())?;
    let scores = by.scores(&query.0).map_err(bad)?;
    let distribution = by.distribution_among(&query.0, &eligible).map_err(bad)?;
    let is_head = by.head(&query.0).map_err(bad)?.is_some();
    let model = |m: usize| {
        json!({
            "model": by.models()[m], "score": scores[m], "policy": distribution.policy[m],
            "propensity": distribution.propensities[m], "eligible": eligible.allows(m),
        })
    };
    let (epoch, version, _) = by.stamp();
    Ok(json_response(&json!({
        "space": space, "params_version": version, "params_epoch": epoch, "algorithm": by.params().algorithm,
        "is_head_query": is_head, "models": (0..by.models().len()).map(model).collect::<Vec<_>>(),
    })))
}

async fn events(
    State(sidecar): State<Arc<Sidecar>>,
    wanted: Result<Query<Wanted>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(wanted) = wanted.map_err(|error| Problem::new(error.status(), error.body_text()))?;
    sidecar.watch(vec![sidecar.clone()], wanted)
}

impl Watched for Sidecar {
    fn role(&self) -> &'static str {
        "router"
    }

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
        if let Ok(space) = Name::try_from(space) {
            let resting = self.resting_of(&space, now_ms()).into_iter().map(|(model, _)| model);
            now["resting"] = json!(resting.collect::<Vec<_>>());
        }
        now
    }
}

async fn status(State(sidecar): State<Arc<Sidecar>>) -> Response {
    json_response(&sidecar.status())
}

async fn ready(State(sidecar): State<Arc<Sidecar>>) -> Result<&'static str, Problem> {
    sidecar.check_accepts()?;
    Ok("ready\n")
}

async fn metrics(State(sidecar): State<Arc<Sidecar>>) -> Response {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], sidecar.metrics()).into_response()
}

async fn openapi() -> Response {
    let document = include_str!("openapi.json").replace("VERSION", env!("CARGO_PKG_VERSION"));
    ([(header::CONTENT_TYPE, "application/json")], document).into_response()
}

/// Counts requests; rejects those without a token, beyond the rate limit or beyond the timeout.
async fn guard(State(sidecar): State<Arc<Sidecar>>, request: Request, next: Next) -> Response {
    let start = Instant::now();
    let admitted = sidecar.access.admit(request.uri(), request.headers());
    let (endpoint, is_limited) = match request.uri().path() {
        "/v1/route" => ("route", true),
        "/v1/route:batch" => ("route_batch", true),
        "/v1/rewards" => ("rewards", true),
        "/v1/explain" => ("explain", true),
        "/v1/events" => ("events", true),
        "/v1/status" => ("status", false),
        path if path == "/v1/models" || path.starts_with("/v1/models/") => ("models", false),
        "/metrics" => ("metrics", false),
        _ => {
            return match admitted {
                Ok(()) => next.run(request).await,
                Err(problem) => problem.into_response(),
            };
        }
    };
    let timeout = Duration::from_millis(sidecar.config.http.timeout_ms);
    let response = match admitted.and_then(|()| if is_limited { sidecar.spend(1) } else { Ok(()) }) {
        Ok(()) => tokio::time::timeout(timeout, next.run(request)).await.unwrap_or_else(|_| {
            Problem::new(StatusCode::REQUEST_TIMEOUT, "the request took longer than http.timeout_ms").into_response()
        }),
        Err(problem) => problem.into_response(),
    };
    sidecar.metrics.request(endpoint, response.status().as_u16(), start.elapsed());
    response
}

impl Sidecar {
    /// The spaces and the versions of their parameters.
    pub(super) fn status(&self) -> Value {
        let now_ms = now_ms();
        let rest = |(model, rest): (ModelName, Rest)| json!({"model": model, "reason": rest.reason, "since_ms": rest.since_ms, "until_ms": rest.until_ms});
        let spaces: serde_json::Map<String, Value> = self
            .router
            .spaces()
            .iter()
            .map(|compiled| {
                let params = compiled.params();
                let value = json!({
                    "epoch": params.epoch, "version": params.version, "revision": params.revision, "dim": params.dim,
                    "models": params.models, "algorithm": params.algorithm, "created_ms": params.created_ms,
                    "head_queries": params.policy.head.len(),
                    "freshness_s": self.metrics.freshness(&params.space).map(|age| age.as_secs_f64()),
                    "resting": self.resting_of(&params.space, now_ms).into_iter().map(rest).collect::<Vec<_>>(),
                });
                (params.space.to_string(), value)
            })
            .collect();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "ready": self.is_ready(),
            "uptime_s": self.started.elapsed().as_secs(),
            "spaces": spaces,
        })
    }

    /// All metrics, in the format of OpenMetrics.
    pub(super) fn metrics(&self) -> String {
        self.metrics.text(&self.router, self.is_ready(), self.writer.deliveries(), &self.rests())
    }

    /// Streams the data of the page.
    pub(super) fn watch(&self, watched: Vec<Arc<dyn Watched>>, wanted: Wanted) -> Result<Response, Problem> {
        self.seats.watch(watched, wanted)
    }

    /// Fails while queries cannot be answered.
    pub(super) fn check_accepts(&self) -> Result<(), Problem> {
        self.check_ready()?;
        match self.metrics.http().accept_problem(Instant::now()) {
            Some(problem) => Err(Problem::unavailable(format!("cannot accept connections: {problem}"))),
            None => Ok(()),
        }
    }

    /// Takes this many requests from the rate limit.
    fn spend(&self, requests: usize) -> Result<(), Problem> {
        let requests = NonZeroU32::new(requests.try_into().unwrap_or(u32::MAX));
        let (Some(limit), Some(requests)) = (&self.limit, requests) else { return Ok(()) };
        match limit.check_n(requests) {
            Ok(Ok(())) => Ok(()),
            _ => Err(Problem::new(
                StatusCode::TOO_MANY_REQUESTS,
                "the rate limit is exceeded (http.requests_per_s_max): retry later",
            )),
        }
    }

    /// Charges the items of a batch; the guard has already charged one.
    fn spend_batch(&self, items: usize) -> Result<(), Problem> {
        let most = self.config.http.requests_per_s_max as usize;
        if self.limit.is_some() && items > most {
            let way_out =
                format!("has {items} items, more than http.requests_per_s_max = {most}: send smaller batches");
            return Err(Problem::field("requests", way_out));
        }
        self.spend(items.saturating_sub(1))
    }

    /// Receives a body.
    async fn receive(&self, request: Request, most: usize) -> Result<Received, Problem> {
        let (head, body) = request.into_parts();
        self.bodies.receive(&head.headers, body, most).await
    }

    /// Receives a JSON object. The second value accounts for the memory of the body.
    async fn json<T: DeserializeOwned>(&self, request: Request, most: usize) -> Result<(T, Received), Problem> {
        if request.uri().query().is_some_and(|query| !query.is_empty()) {
            return Err(Problem::malformed("a JSON request takes no URL parameters: send them as fields of the body"));
        }
        let received = self.receive(request, most).await?;
        Ok((parse(&received.bytes)?, received))
    }

    /// The same of a body that holds no query.
    pub(super) async fn small_json<T: DeserializeOwned>(&self, request: Request) -> Result<(T, Received), Problem> {
        self.json(request, self.body_limits.reward).await
    }

    /// Whether a reward will be clipped. Fails if it is rejected.
    pub(super) fn check_reward(&self, field: &str, reward: f64) -> Result<bool, Problem> {
        let spec = &self.settings().reward;
        if !reward.is_finite() {
            return Err(Problem::field(field, "must be a finite number"));
        }
        if spec.reject && !spec.contains(reward) {
            let range = format!("must be between {} and {} (reward.range)", spec.low, spec.high);
            return Err(Problem::field(field, range));
        }
        Ok(!spec.contains(reward))
    }

    fn check_ready(&self) -> Result<(), Problem> {
        if self.is_ready() {
            return Ok(());
        }
        Err(Problem::unavailable("no parameters received yet: wait, or start the router with --serve-uniform"))
    }
}

fn asked(space: Name, item: BatchItem) -> Result<Asked, Problem> {
    let request_id = match item.request_id {
        Some(id) => {
            check_id("request_id", &id)?;
            id
        }
        None => format!("{:032x}", rand::rng().random::<u128>()),
    };
    if let Some(draw_key) = &item.draw_key {
        check_id("draw_key", draw_key)?;
    }
    // Sorted: a repeat may name them in another order.
    let sorted = |mut names: Vec<String>| {
        names.sort_unstable();
        names
    };
    let restriction =
        Restriction { models: item.models.map(sorted), exclude: item.exclude.map(sorted).unwrap_or_default() };
    Ok(Asked { space, request_id, query: item.query.0, restriction, draw_key: item.draw_key })
}

pub(super) fn space(named: Option<String>) -> Result<Name, Problem> {
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

pub(super) fn json_response<T: Serialize>(value: &T) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(error) => Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
