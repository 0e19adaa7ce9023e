//! A blocking HTTP(S) client of the router sidecar.

use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use serde::Deserialize;
use serde_json::{Value, json};
use ureq::tls::{PemItem, RootCerts, parse_pem};

use crate::config::{HttpConfig, TlsConfig};
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
    /// The distribution that it was drawn from, by model.
    pub propensities: std::collections::BTreeMap<String, f64>,
    /// Version of the parameters used.
    pub params_version: u64,
}

/// Why a request failed.
#[derive(Debug)]
pub enum NoAnswer {
    /// Transient: the router is unreachable, not ready, or overloaded. Retry.
    Yet(String),
    /// Permanent: the router rejects the request itself.
    Ever(anyhow::Error),
}

impl Target {
    /// The sidecar at a base URL that [`check_url`] has accepted.
    pub fn new(agent: ureq::Agent, url: String, space: Name, token: String) -> Self {
        Self { agent, url, space, token }
    }

    /// Its base URL.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Asks which model a query goes to.
    pub fn route(&self, request_id: &str, query: &[f64]) -> Result<Decided, NoAnswer> {
        let path = format!("/v1/route?space={}&request_id={request_id}", self.space);
        let body: Vec<u8> = query.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect();
        let answer = self.post(&path, "application/octet-stream", &body)?;
        let strange = |error| {
            NoAnswer::Ever(anyhow!(
                "{} sent an invalid answer to /v1/route: {error}; is it a Pointsman router?",
                self.url
            ))
        };
        serde_json::from_str(&answer).map_err(strange)
    }

    /// Sends the reward of a decision. Idempotent: it counts once, however often it is sent.
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
            other => NoAnswer::Yet(format!("cannot connect: {other}")),
        })?;
        let status = response.status();
        let text = match response.body_mut().read_to_string() {
            Ok(text) => text,
            Err(error) => return Err(NoAnswer::Yet(format!("incomplete answer: {error}"))),
        };
        if status.is_success() {
            return Ok(text);
        }
        let detail =
            serde_json::from_str::<Value>(&text).ok().and_then(|problem| Some(problem["detail"].as_str()?.to_owned()));
        let detail = detail.unwrap_or_else(|| text.trim().to_owned());
        match status.as_u16() {
            408 | 429 | 500.. => Err(NoAnswer::Yet(format!("{status}: {detail}"))),
            _ => Err(NoAnswer::Ever(anyhow!("{} rejected {path}: {status}: {detail}", self.url))),
        }
    }
}

/// Which server certificates a client accepts.
pub enum Trust {
    /// All certificates.
    Anyone,
    /// Certificates of these authorities.
    Roots(RootCerts),
}

impl Trust {
    /// From the configuration: `http.tls.ca`, else `http.tls.certificate`, else the public authorities.
    pub fn load(config: &TlsConfig) -> anyhow::Result<Self> {
        let (key, path) = match config.ca.as_os_str().is_empty() {
            false => ("http.tls.ca", &config.ca),
            true if config.is_on() => ("http.tls.certificate", &config.certificate),
            true => return Ok(Self::Roots(RootCerts::WebPki)),
        };
        let pem = std::fs::read(path).with_context(|| format!("{key}: cannot read {}", path.display()))?;
        let certificates = parse_pem(&pem).filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        });
        let certificates: Vec<_> = certificates.collect();
        if certificates.is_empty() {
            bail!("{key}: {} contains no PEM certificate", path.display());
        }
        Ok(Self::Roots(RootCerts::new_with_certs(&certificates)))
    }
}

/// A client for this many concurrent callers that returns statuses as they are. Uses no proxy.
pub fn agent(timeout: Duration, connections: usize, trust: Trust) -> ureq::Agent {
    let tls = match trust {
        Trust::Anyone => ureq::tls::TlsConfig::builder().disable_verification(true),
        Trust::Roots(roots) => ureq::tls::TlsConfig::builder().root_certs(roots),
    };
    let config = ureq::Agent::config_builder()
        .tls_config(tls.build())
        .http_status_as_error(false)
        .timeout_global(Some(timeout))
        .max_idle_connections(connections)
        .max_idle_connections_per_host(connections)
        .proxy(None)
        .user_agent(concat!("pointsman/", env!("CARGO_PKG_VERSION")));
    config.build().into()
}

/// Base URL of the server at `http.listen`, from the same machine.
pub fn local(config: &HttpConfig) -> String {
    near(&format!("{}://{}", if config.tls.is_on() { "https" } else { "http" }, config.listen))
}

/// The URL of a server on this machine, which may listen on all addresses.
pub fn near(url: &str) -> String {
    match url.rsplit_once(':') {
        Some((scheme, port)) if scheme.ends_with("://0.0.0.0") => scheme.replace("0.0.0.0", "127.0.0.1") + ":" + port,
        Some((scheme, port)) if scheme.ends_with("://[::]") => scheme.replace("[::]", "[::1]") + ":" + port,
        _ => url.to_owned(),
    }
}

/// Validates a URL and removes a trailing slash.
pub fn check_url(url: &str) -> anyhow::Result<String> {
    let uri: ureq::http::Uri = url
        .parse()
        .map_err(|error| anyhow!("invalid URL {url:?}: {error}; expected http://host:port or https://host:port"))?;
    let is_known = uri.scheme_str().is_some_and(|scheme| ["http", "https"].contains(&scheme));
    if !is_known || uri.host().is_none_or(str::is_empty) {
        bail!("invalid URL {url:?}: expected http://host:port or https://host:port");
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
            let mut config = HttpConfig { listen: listen.to_owned(), ..HttpConfig::default() };
            assert_eq!(local(&config), url);
            config.tls.certificate = "c.pem".into();
            assert_eq!(local(&config), url.replace("http:", "https:"));
            assert_eq!(check_url(url).unwrap(), url);
        }
        assert_eq!(check_url("http://router:80/base/").unwrap(), "http://router:80/base");
        assert_eq!(check_url("https://router").unwrap(), "https://router");
        for bad in ["router:9464", "ftp://router", "http://", "", "a b"] {
            let error = check_url(bad).unwrap_err().to_string();
            assert!(error.contains("http://host:port"), "{error}");
        }
    }
}
