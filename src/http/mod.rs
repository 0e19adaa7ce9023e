//! HTTP: the router sidecar, what the learner tells of itself, and the page of both.

pub mod learner;
mod live;
mod problem;
pub mod sidecar;

use axum::http::{HeaderMap, StatusCode, header};
use subtle::ConstantTimeEq;

pub use problem::Problem;

use crate::config::Secret;

/// Whether a request has brought the token, where there is one.
fn check_token(token: &Secret, headers: &HeaderMap) -> Result<(), Problem> {
    let token = token.0.as_bytes();
    let brought = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let brought = brought.and_then(|value| value.strip_prefix(b"Bearer ")).unwrap_or_default();
    if !token.is_empty() && !bool::from(token.ct_eq(brought)) {
        return Err(Problem::new(StatusCode::UNAUTHORIZED, "a bearer token is needed (http.token)"));
    }
    Ok(())
}
