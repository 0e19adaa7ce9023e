//! A client of the router sidecar: plain HTTP, blocking.

use std::time::Duration;

use anyhow::{anyhow, bail};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::event::Name;

/// A router sidecar.
pub struct Target {
    agent: ureq::Agent,
    url: String,
    space: Name,
    token: String,
}

/// What the router decided.
#[derive(Debug, Deserialize)]
pub struct Decided {
    /// The model that was drawn.
    pub model: String,
    /// What it was drawn from, by model.
    pub propensities: std::collections::BTreeMap<String, f64>,
    /// Version of the parameters that it was decided by.
    pub params_version: u64,
}

/// Why there is no good answer.
#[derive(Debug)]
pub enum NoAnswer {
    /// It may come when it is asked again: the router is not reachable, not ready, or has too much to do.
    Yet(String),
    /// It will not: the request itself is refused.
    Ever(anyhow::Error),
}

impl Target {
    /// The sidecar at a base address that [`check_url`] let pass, for this many callers at a time.
    pub fn new(url: String, space: Name, token: String, timeout: Duration, connections: usize) -> Self {
        Self { agent: Self::agent(timeout, connections), url, space, token }
    }

    /// A client that leaves statuses to its caller. Sidecars are near: no proxy is asked.
    pub fn agent(timeout: Duration, connections: usize) -> ureq::Agent {
        let config = ureq::Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(timeout))
            .max_idle_connections(connections)
            .max_idle_connections_per_host(connections)
            .proxy(None)
            .user_agent(concat!("pointsman/", env!("CARGO_PKG_VERSION")));
        config.build().into()
    }

    /// Where it is.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Asks which model a query goes to.
    pub fn route(&self, request_id: &str, query: &[f64]) -> Result<Decided, NoAnswer> {
        let path = format!("/v1/route?space={}&request_id={request_id}", self.space);
        let body: Vec<u8> = query.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect();
        let answer = self.post(&path, "application/octet-stream", &body)?;
        let strange = |error| NoAnswer::Ever(anyhow!("{} answers what is no decision: {error}", self.url));
        serde_json::from_str(&answer).map_err(strange)
    }

    /// Tells what a decision has earned; once for all, however often it is sent.
    pub fn reward(&self, request_id: &str, reward: f64) -> Result<(), NoAnswer> {
        let body = json!({
            "space": self.space, "request_id": request_id, "reward": reward, "event_id": request_id,
        });
        self.post("/v1/rewards", "application/json", body.to_string().as_bytes()).map(drop)
    }

    fn post(&self, path: &str, content_type: &str, body: &[u8]) -> Result<String, NoAnswer> {
        let mut request = self.agent.post(format!("{}{path}", self.url)).header("content-type", content_type);
        if !self.token.is_empty() {
            request = request.header("authorization", format!("Bearer {}", self.token));
        }
        let mut response = request.send(body).map_err(|error| match error {
            ureq::Error::BadUri(_) | ureq::Error::Http(_) => NoAnswer::Ever(anyhow!("{}: {error}", self.url)),
            other => NoAnswer::Yet(format!("not reachable: {other}")),
        })?;
        let status = response.status();
        let text = match response.body_mut().read_to_string() {
            Ok(text) => text,
            Err(error) => return Err(NoAnswer::Yet(format!("the answer breaks off: {error}"))),
        };
        if status.is_success() {
            return Ok(text);
        }
        let detail =
            serde_json::from_str::<Value>(&text).ok().and_then(|problem| Some(problem["detail"].as_str()?.to_owned()));
        let detail = detail.unwrap_or_else(|| text.trim().to_owned());
        match status.as_u16() {
            408 | 429 | 500.. => Err(NoAnswer::Yet(format!("{status}: {detail}"))),
            _ => Err(NoAnswer::Ever(anyhow!("{} refuses {path}: {status}: {detail}", self.url))),
        }
    }
}

/// The base address of what listens at `http.listen`, for those on the same machine.
pub fn local(listen: &str) -> String {
    let near = match listen.rsplit_once(':') {
        Some(("0.0.0.0", port)) => format!("127.0.0.1:{port}"),
        Some(("[::]", port)) => format!("[::1]:{port}"),
        _ => listen.to_owned(),
    };
    format!("http://{near}")
}

/// An address that can be asked, without a slash at its end.
pub fn check_url(url: &str) -> anyhow::Result<String> {
    let uri: ureq::http::Uri = url.parse().map_err(|error| anyhow!("{url}: {error}; write it as http://host:port"))?;
    if uri.scheme_str() != Some("http") || uri.host().is_none_or(str::is_empty) {
        bail!("{url}: write it as http://host:port (sidecars speak plain HTTP)");
    }
    Ok(url.trim_end_matches('/').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        for (listen, url) in [
            ("127.0.0.1:9464", "http://127.0.0.1:9464"),
            ("0.0.0.0:80", "http://127.0.0.1:80"),
            ("[::]:80", "http://[::1]:80"),
            ("router:80", "http://router:80"),
        ] {
            assert_eq!(local(listen), url);
            assert_eq!(check_url(url).unwrap(), url);
        }
        assert_eq!(check_url("http://router:80/base/").unwrap(), "http://router:80/base");
        for bad in ["router:9464", "https://router", "http://", "", "a b"] {
            let error = check_url(bad).unwrap_err().to_string();
            assert!(error.contains("http://host:port"), "{error}");
        }
    }
}
