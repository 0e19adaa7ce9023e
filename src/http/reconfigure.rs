//! `POST /v1/reload`: applies a changed configuration.

use std::sync::Arc;

use axum::Json;
use axum::Router as Routes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use serde_json::json;

use super::Problem;
use crate::serve::{NotReloaded, Reload};

/// The path, to be merged into those of a process.
pub(super) fn routes(reload: Arc<Reload>) -> Routes {
    Routes::new().route("/v1/reload", post(answer)).with_state(reload)
}

async fn answer(State(reload): State<Arc<Reload>>) -> Result<Response, Problem> {
    match tokio::task::spawn_blocking(move || reload.reload()).await {
        Ok(Ok(changed)) => Ok(Json(json!({ "changed": changed })).into_response()),
        Ok(Err(error @ (NotReloaded::Invalid(_) | NotReloaded::Fixed(_)))) => {
            Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, error.to_string()))
        }
        Err(error) => Err(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
    }
}
