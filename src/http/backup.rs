//! `GET /v1/backup`: a backup of the store of a running learner.

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::Problem;
use crate::state::running::{NoBackup, RunningStore};

/// Header that carries the token of the store.
pub const TOKEN_HEADER: &str = "x-pointsman-store-token";

/// Answers a request for a backup.
pub(super) async fn answer(store: RunningStore, headers: &HeaderMap) -> Result<Response, Problem> {
    let token = headers.get(TOKEN_HEADER).map(|value| value.as_bytes().to_vec()).unwrap_or_default();
    match tokio::task::spawn_blocking(move || store.backup(&token)).await {
        Ok(Ok(bytes)) => Ok(([(header::CONTENT_TYPE, "application/octet-stream")], bytes).into_response()),
        Ok(Err(error @ NoBackup::WrongToken)) => {
            Err(Problem::new(StatusCode::FORBIDDEN, format!("{error}; send it as {TOKEN_HEADER}")))
        }
        Ok(Err(error)) => Err(Problem::unavailable(error.to_string())),
        Err(error) => Err(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
    }
}
