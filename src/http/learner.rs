//! HTTP endpoints of the learner: liveness, readiness, status and metrics.

use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use axum::Router as Routes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::Value;

use super::live::{Seats, Wanted, Watched, page};
use super::{Access, Problem, Server, backup, reconfigure};
use crate::serve::Reload;
use crate::state::running::RunningStore;
use crate::telemetry::{CONTENT_TYPE, Status};

struct Shared {
    status: Arc<Status>,
    access: Arc<Access>,
    seats: Seats,
    store: RunningStore,
}

/// Serves until `stop` resolves.
pub async fn serve(
    server: Server,
    status: Arc<Status>,
    store: RunningStore,
    reload: Arc<Reload>,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let seats = Seats::default();
    let closing = seats.clone();
    let shared = Arc::new(Shared { status, access: server.access(), seats, store });
    let routes = Routes::new()
        .route("/", get(page))
        .route("/live", get(|| async { "live\n" }))
        .route("/ready", get(ready))
        .route("/v1/status", get(show))
        .route("/v1/events", get(events))
        .route("/v1/backup", get(send_backup))
        .route("/metrics", get(metrics))
        .with_state(shared.clone())
        .merge(reconfigure::routes(reload))
        .fallback(|| async {
            Problem::new(
                StatusCode::NOT_FOUND,
                "no such path: use /, /live, /ready, /v1/status, /v1/events, /v1/backup, /v1/reload or /metrics",
            )
        })
        .layer(middleware::from_fn_with_state(shared, guard));
    let stop = async move {
        stop.await;
        closing.close();
    };
    server.serve(routes, stop).await;
}

/// Rejects requests that are not admitted.
async fn guard(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    match shared.access.admit(request.uri(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(problem) => problem.into_response(),
    }
}

async fn ready(State(shared): State<Arc<Shared>>) -> Result<&'static str, Problem> {
    check_ready(&shared.status)?;
    match shared.status.http().accept_problem(Instant::now()) {
        Some(problem) => Err(Problem::unavailable(format!("cannot accept connections: {problem}"))),
        None => Ok("ready\n"),
    }
}

/// Fails while the learner does not do its work.
pub(super) fn check_ready(status: &Status) -> Result<(), Problem> {
    if status.is_ready() {
        return Ok(());
    }
    let reason = status.stopped().or_else(|| status.trouble());
    Err(Problem::unavailable(reason.unwrap_or_else(|| "the learner does not read events yet: wait".to_owned())))
}

async fn show(State(shared): State<Arc<Shared>>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], shared.status.json().to_string()).into_response()
}

async fn events(
    State(shared): State<Arc<Shared>>,
    wanted: Result<Query<Wanted>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(wanted) = wanted.map_err(|error| Problem::new(error.status(), error.body_text()))?;
    shared.seats.watch(vec![shared.status.clone()], wanted)
}

async fn send_backup(State(shared): State<Arc<Shared>>, headers: HeaderMap) -> Result<Response, Problem> {
    backup::answer(shared.store.clone(), &headers).await
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], shared.status.metrics()).into_response()
}

impl Watched for Status {
    fn role(&self) -> &'static str {
        "learner"
    }

    fn pick(&self, space: &str) -> String {
        Status::pick(self, space)
    }

    fn history(&self, space: &str) -> Value {
        Status::history(self, space)
    }

    fn now(&self, space: &str, find: &str) -> Value {
        Status::now(self, space, find)
    }
}
