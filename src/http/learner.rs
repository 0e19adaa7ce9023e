//! What the learner tells of itself over HTTP: whether it lives, whether it is ready, how it goes.

use std::future::Future;
use std::sync::Arc;

use axum::Router as Routes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use serde_json::Value;
use tokio::net::TcpListener;

use super::live::{Seats, Wanted, Watched, page};
use super::{Problem, check_token};
use crate::config::Secret;
use crate::telemetry::{CONTENT_TYPE, Status};

struct Server {
    status: Arc<Status>,
    token: Secret,
    seats: Seats,
}

/// Serves until `stop` comes.
pub async fn serve(
    listener: TcpListener,
    status: Arc<Status>,
    token: Secret,
    stop: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let seats = Seats::default();
    let closing = seats.clone();
    let server = Arc::new(Server { status, token, seats });
    let routes = Routes::new()
        .route("/", get(page))
        .route("/live", get(|| async { "live\n" }))
        .route("/ready", get(ready))
        .route("/v1/status", get(show))
        .route("/v1/events", get(events))
        .route("/metrics", get(metrics))
        .fallback(|| async {
            Problem::new(StatusCode::NOT_FOUND, "there are / /live /ready /v1/status /v1/events /metrics")
        })
        .with_state(server);
    let stop = async move {
        stop.await;
        closing.close();
    };
    axum::serve(listener, routes).with_graceful_shutdown(stop).await
}

async fn ready(State(server): State<Arc<Server>>) -> Result<&'static str, Problem> {
    if server.status.is_ready() {
        return Ok("ready\n");
    }
    Err(Problem::unavailable("the events are not being read yet"))
}

async fn show(State(server): State<Arc<Server>>, headers: HeaderMap) -> Result<Response, Problem> {
    check_token(&server.token, &headers)?;
    Ok(([(header::CONTENT_TYPE, "application/json")], server.status.json().to_string()).into_response())
}

async fn events(
    State(server): State<Arc<Server>>,
    wanted: Result<Query<Wanted>, QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    check_token(&server.token, &headers)?;
    let Query(wanted) = wanted.map_err(|error| Problem::new(error.status(), error.body_text()))?;
    server.seats.watch(server.status.clone(), wanted)
}

async fn metrics(State(server): State<Arc<Server>>, headers: HeaderMap) -> Result<Response, Problem> {
    check_token(&server.token, &headers)?;
    Ok(([(header::CONTENT_TYPE, CONTENT_TYPE)], server.status.metrics()).into_response())
}

impl Watched for Status {
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
