//! Learner and router of one process, on one port.

use std::future::Future;
use std::sync::Arc;

use axum::Router as Routes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::json;

use super::learner::check_ready;
use super::live::Wanted;
use super::sidecar::Sidecar;
use super::{Problem, Server, backup, reconfigure};
use crate::serve::Reload;
use crate::state::running::RunningStore;
use crate::telemetry::{CONTENT_TYPE, Status, join};

struct Both {
    sidecar: Arc<Sidecar>,
    status: Arc<Status>,
    store: RunningStore,
}

/// Serves until `stop` resolves, then completes open requests. The access rules of the router hold for all of it.
pub async fn serve(
    server: Server,
    sidecar: Arc<Sidecar>,
    status: Arc<Status>,
    store: RunningStore,
    reload: Arc<Reload>,
    stop: impl Future<Output = ()> + Send + 'static,
) {
    let about = Routes::new()
        .route("/ready", get(ready))
        .route("/v1/status", get(show))
        .route("/v1/events", get(events))
        .route("/v1/backup", get(send_backup))
        .route("/metrics", get(metrics))
        .with_state(Arc::new(Both { sidecar: sidecar.clone(), status, store }))
        .merge(reconfigure::routes(reload));
    sidecar.serve_with(about, server, stop).await;
}

async fn ready(State(both): State<Arc<Both>>) -> Result<&'static str, Problem> {
    both.sidecar.check_accepts()?;
    check_ready(&both.status)?;
    Ok("ready\n")
}

async fn show(State(both): State<Arc<Both>>) -> Response {
    let status = json!({ "learner": both.status.json(), "router": both.sidecar.status() });
    ([(header::CONTENT_TYPE, "application/json")], status.to_string()).into_response()
}

async fn events(
    State(both): State<Arc<Both>>,
    wanted: Result<Query<Wanted>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(wanted) = wanted.map_err(|error| Problem::new(error.status(), error.body_text()))?;
    both.sidecar.watch(vec![both.status.clone(), both.sidecar.clone()], wanted)
}

async fn send_backup(State(both): State<Arc<Both>>, headers: HeaderMap) -> Result<Response, Problem> {
    backup::answer(both.store.clone(), &headers).await
}

/// Of what both measure, the router's figures come first: it sees more of the loop.
async fn metrics(State(both): State<Arc<Both>>) -> Response {
    let text = join(&[both.sidecar.metrics(), both.status.metrics()]);
    ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response()
}
