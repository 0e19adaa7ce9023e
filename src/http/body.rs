//! Request bodies: size limits, the limit on all bodies in flight, and JSON parsing.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::body::Body;
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use futures_util::StreamExt;
use serde::de::DeserializeOwned;

use super::Problem;
use crate::telemetry::HttpCounters;
use crate::wire::requests::Object;

/// Limit on the bytes of all bodies. Counted as they arrive: an announced length uses no memory.
pub struct Bodies {
    max: u64,
    counters: Arc<HttpCounters>,
}

/// A complete body. Its bytes count until it is dropped.
pub struct Received {
    /// The body.
    pub bytes: Vec<u8>,
    held: Held,
}

struct Held {
    bytes: u64,
    counters: Arc<HttpCounters>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.counters.body_bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Bodies {
    /// At most `max` bytes at a time.
    pub fn new(max: usize, counters: Arc<HttpCounters>) -> Self {
        Self { max: max as u64, counters }
    }

    /// Receives a body of at most `most` bytes.
    pub async fn receive(&self, headers: &HeaderMap, body: Body, most: usize) -> Result<Received, Problem> {
        let announced = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        if announced.is_some_and(|announced: usize| announced > most) {
            return Err(too_large(most));
        }
        let held = Held { bytes: 0, counters: self.counters.clone() };
        // Untouched memory is not resident.
        let mut received = Received { bytes: Vec::with_capacity(announced.unwrap_or_default()), held };
        let mut chunks = body.into_data_stream();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|error| Problem::malformed(format!("cannot read the body: {error}")))?;
            if received.bytes.len() + chunk.len() > most {
                return Err(too_large(most));
            }
            self.take(&mut received.held, chunk.len() as u64)?;
            received.bytes.extend_from_slice(&chunk);
        }
        Ok(received)
    }

    fn take(&self, held: &mut Held, bytes: u64) -> Result<(), Problem> {
        held.bytes += bytes;
        if self.counters.body_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > self.max {
            return Err(Problem::unavailable(
                "too many request bytes in flight (http.in_flight_bytes_max): retry later",
            ));
        }
        Ok(())
    }
}

fn too_large(most: usize) -> Problem {
    Problem::new(StatusCode::PAYLOAD_TOO_LARGE, format!("the body exceeds the limit of {most} bytes"))
}

/// What a body is, by its content type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `application/json`
    Json,
    /// `application/octet-stream`
    Binary,
}

/// The kind of a body, one of `allowed`. Other types and a missing one are rejected: browsers send them cross-site
/// without a preflight request.
pub fn kind(request: &Request, allowed: &[Kind]) -> Result<Kind, Problem> {
    let essence = request.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let essence = essence.and_then(|value| value.split(';').next()).unwrap_or_default().trim();
    let is = |name: &str| essence.eq_ignore_ascii_case(name);
    let kind = match () {
        () if is("application/json") => Some(Kind::Json),
        () if is("application/octet-stream") => Some(Kind::Binary),
        () => None,
    };
    kind.filter(|kind| allowed.contains(kind)).ok_or_else(|| {
        let names = match allowed.contains(&Kind::Binary) {
            true => "application/json or application/octet-stream",
            false => "application/json",
        };
        Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, format!("the content type must be {names}"))
    })
}

/// A JSON object as a `T`.
pub fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    let mut deserializer = serde_json::Deserializer::from_slice(body);
    let Object(parsed) = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        match inner.classify() {
            serde_json::error::Category::Data if path == "." => Problem::field(named_field(&inner), inner.to_string()),
            serde_json::error::Category::Data => Problem::field(path, inner.to_string()),
            _ => Problem::malformed(format!("the body is not valid JSON: {inner}")),
        }
    })?;
    deserializer.end().map_err(|error| Problem::malformed(format!("the body is not valid JSON: {error}")))?;
    Ok(parsed)
}

/// The field that an error of the whole object names.
fn named_field(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split('`').nth(1).unwrap_or("body").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bodies(max: usize) -> Bodies {
        Bodies::new(max, Arc::default())
    }

    fn receive(bodies: &Bodies, body: &'static str, most: usize) -> Result<Received, u16> {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let received = runtime.block_on(bodies.receive(&HeaderMap::new(), Body::from(body), most));
        received.map_err(|problem| problem.status().as_u16())
    }

    #[test]
    fn bytes_count_while_they_are_held() {
        let bodies = bodies(10);
        let first = receive(&bodies, "12345678", 8).unwrap();
        assert_eq!(receive(&bodies, "123", 8).err(), Some(503));
        let second = receive(&bodies, "12", 8);
        assert_eq!(bodies.counters.body_bytes.load(Ordering::Relaxed), 10);
        assert_eq!(second.unwrap().bytes, b"12");
        drop(first);
        assert_eq!(bodies.counters.body_bytes.load(Ordering::Relaxed), 0);
        assert_eq!(receive(&bodies, "123456789", 8).err(), Some(413));
        assert!(receive(&bodies, "12345678", 8).is_ok());
    }
}
