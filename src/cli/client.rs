//! A client of the router sidecar: HTTP or HTTPS, blocking.

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
    /// The sidecar at a base address that [`check_url`] let pass.
    pub fn new(agent: ureq::Agent, url: String, space: Name, token: String) -> Self {
        Self { agent, url, space, token }
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

/// Which servers a client believes to be who they claim to be.
pub enum Trust {
    /// All of them.
    Anyone,
    /// Those with a certificate of these authorities.
    Roots(RootCerts),
}

impl Trust {
    /// What is configured: `http.tls.ca`, else `http.tls.certificate`, else the public authorities.
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
            bail!("{key}: {} holds no certificate in PEM", path.display());
        }
        Ok(Self::Roots(RootCerts::new_with_certs(&certificates)))
    }
}

/// A client for this many callers at a time that leaves statuses to them. Sidecars are near: no proxy is asked.
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

/// The base address of what listens at `http.listen`, for those on the same machine.
pub fn local(config: &HttpConfig) -> String {
    let listen = &config.listen;
    let near = match listen.rsplit_once(':') {
        Some(("0.0.0.0", port)) => format!("127.0.0.1:{port}"),
        Some(("[::]", port)) => format!("[::1]:{port}"),
        _ => listen.to_owned(),
    };
    format!("{}://{near}", if config.tls.is_on() { "https" } else { "http" })
}

/// An address that can be asked, without a slash at its end.
pub fn check_url(url: &str) -> anyhow::Result<String> {
    let uri: ureq::http::Uri = url.parse().map_err(|error| anyhow!("{url}: {error}; write it as http://host:port"))?;
    let is_known = uri.scheme_str().is_some_and(|scheme| ["http", "https"].contains(&scheme));
    if !is_known || uri.host().is_none_or(str::is_empty) {
        bail!("{url}: write it as http://host:port or https://host:port");
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
