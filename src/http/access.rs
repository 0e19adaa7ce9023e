//! Access control: tokens with roles, and protection against cross-site requests.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, anyhow, bail};
use arc_swap::ArcSwap;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, HeaderName, StatusCode, Uri, header};
use serde::Deserialize;
use subtle::ConstantTimeEq;

use super::Problem;
use super::reload::follow;
use crate::config::{HttpConfig, Secret};
use crate::telemetry::HttpCounters;

/// What a token allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Role {
    /// Decisions.
    Route,
    /// Rewards.
    Reward,
    /// Status, metrics and the page's stream.
    Read,
    /// Everything.
    Admin,
}

/// Whether a path is a health check: answered to everyone, always, and before anything else.
pub fn is_probe(path: &str) -> bool {
    matches!(path, "/live" | "/ready")
}

/// The roles that grant access to a path; `None` if it is public. Unknown paths under /v1/ are closed.
fn needed(path: &str) -> Option<&'static [Role]> {
    match path {
        "/v1/route" | "/v1/route:batch" => Some(&[Role::Route]),
        "/v1/explain" => Some(&[Role::Route, Role::Read]),
        "/v1/rewards" => Some(&[Role::Reward]),
        "/v1/status" | "/v1/models" | "/v1/events" | "/metrics" => Some(&[Role::Read]),
        // Among them the paths that change or copy the state of the process: only an admin may use these.
        _ if path.starts_with("/v1/") => Some(&[]),
        _ => None,
    }
}

/// Decides which requests are admitted.
pub struct Access {
    token: Secret,
    tokens: Arc<ArcSwap<Vec<Token>>>,
    hosts: Hosts,
}

struct Token {
    secret: String,
    roles: Vec<Role>,
}

impl Access {
    /// Reads the tokens. Must be called within the runtime, which then watches their file.
    pub fn load(config: &HttpConfig, counters: Arc<HttpCounters>) -> anyhow::Result<Self> {
        let tokens = Arc::new(ArcSwap::default());
        if !config.tokens_file.as_os_str().is_empty() {
            let taken: Arc<ArcSwap<Vec<Token>>> = tokens.clone();
            follow("tokens", vec![config.tokens_file.clone()], counters, move |contents| {
                taken.store(Arc::new(parse_tokens(&contents.concat())?));
                Ok(())
            })
            .context("cannot use http.tokens_file")?;
        }
        Ok(Self { token: config.token.clone(), tokens, hosts: Hosts::new(config) })
    }

    /// Whether a request is admitted. Health checks always are.
    pub fn admit(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), Problem> {
        if is_probe(uri.path()) {
            return Ok(());
        }
        self.hosts.check(uri, headers)?;
        match needed(uri.path()) {
            Some(roles) => self.check_token(roles, headers),
            None => Ok(()),
        }
    }

    fn check_token(&self, needed: &[Role], headers: &HeaderMap) -> Result<(), Problem> {
        let tokens = self.tokens.load();
        if self.token.0.is_empty() && tokens.is_empty() {
            return Ok(());
        }
        let brought = headers.get(header::AUTHORIZATION).map(|value| value.as_bytes());
        let brought = brought.and_then(|value| value.strip_prefix(b"Bearer ")).unwrap_or_default();
        // Compares all tokens, so that the time taken does not reveal a near match.
        let is_it = |secret: &str| !secret.is_empty() && bool::from(secret.as_bytes().ct_eq(brought));
        let is_master = is_it(&self.token.0);
        let known = tokens.iter().fold(None, |known, token| if is_it(&token.secret) { Some(token) } else { known });
        match known {
            _ if is_master => Ok(()),
            None => Err(Problem::new(
                StatusCode::UNAUTHORIZED,
                "missing or wrong bearer token: send `Authorization: Bearer TOKEN` (http.token, http.tokens_file)",
            )),
            Some(token) if token.roles.iter().any(|role| *role == Role::Admin || needed.contains(role)) => Ok(()),
            Some(_) => Err(Problem::new(
                StatusCode::FORBIDDEN,
                "the token does not have the role for this path: add it in http.tokens_file",
            )),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TokenEntry {
    token: String,
    roles: Vec<Role>,
}

/// Errors name the entry or the line, never its contents.
fn parse_tokens(text: &[u8]) -> anyhow::Result<Vec<Token>> {
    let text = std::str::from_utf8(text).map_err(|_| anyhow!("the file is not UTF-8"))?;
    let entries: BTreeMap<String, TokenEntry> = toml::from_str(text).map_err(|error| {
        let line = error.span().map_or(1, |span| 1 + text[..span.start.min(text.len())].matches('\n').count());
        anyhow!("line {line}: expected [NAME] with token = \"...\" and roles = [...] (route, reward, read, admin)")
    })?;
    if entries.is_empty() {
        bail!("the file has no tokens");
    }
    let token = |(name, TokenEntry { token: secret, roles }): (String, TokenEntry)| {
        if secret.trim().is_empty() || roles.is_empty() {
            bail!("[{name}] needs a token and at least one role");
        }
        Ok(Token { secret, roles })
    };
    entries.into_iter().map(token).collect()
}

/// Names that a request may be addressed to.
///
/// A web page can make a browser send requests to this server: straight, or to a name of its own that it lets resolve to
/// this machine (DNS rebinding). Such requests carry a foreign `Origin` or `Host`.
struct Hosts {
    /// `http.hosts`
    configured: Vec<String>,
    /// The address it listens on, unless that is every address.
    own: Option<String>,
    is_any_allowed: bool,
}

impl Hosts {
    fn new(config: &HttpConfig) -> Self {
        let own = Some(config.listen_host()).filter(|host| !["0.0.0.0", "::"].contains(host)).map(str::to_owned);
        // Other hosts need the token, and proxies and probes use names that are unknown here.
        Self { configured: config.hosts.clone(), own, is_any_allowed: config.has_token() && !config.is_local() }
    }

    fn check(&self, uri: &Uri, headers: &HeaderMap) -> Result<(), Problem> {
        let mut named = headers.get_all(header::HOST).iter().map(|value| value.to_str().ok().and_then(authority));
        let host = match (named.next(), named.next()) {
            (Some(Some(host)), None) => host,
            _ => return Err(Problem::malformed("the request must have exactly one Host header")),
        };
        // The name in the request line, where there is one, counts for more than the header.
        let is_foreign = |name: &Authority| !self.is_any_allowed && !self.allows(name);
        if is_foreign(&host) || uri.authority().is_some_and(is_foreign) {
            let refused = "this Host is not allowed: add it to http.hosts";
            return Err(Problem::new(StatusCode::FORBIDDEN, refused));
        }
        self.check_browser(uri, &host, headers)
    }

    /// Checks the headers with which a browser states the origin of a request.
    fn check_browser(&self, uri: &Uri, host: &Authority, headers: &HeaderMap) -> Result<(), Problem> {
        let is_own = |origin: &str| {
            let name = origin.split_once("://").and_then(|(_, name)| authority(name));
            // Another port of this machine is another program: only configured names are trusted whatever their port.
            name.is_some_and(|name| is_same(&name, host) || self.is_configured(&name))
        };
        let mut origins = headers.get_all(header::ORIGIN).iter();
        if !origins.all(|origin| origin.to_str().is_ok_and(is_own)) {
            return Err(Problem::new(StatusCode::FORBIDDEN, "cross-origin requests are not allowed (Origin header)"));
        }
        // The page itself holds no data: any site may link to it.
        if uri.path() != "/" && headers.get(SEC_FETCH_SITE).is_some_and(|site| site == "cross-site") {
            let refused = "cross-site requests are not allowed (Sec-Fetch-Site header)";
            return Err(Problem::new(StatusCode::FORBIDDEN, refused));
        }
        Ok(())
    }

    fn allows(&self, name: &Authority) -> bool {
        let is = |own: &str| own.eq_ignore_ascii_case(bare(name));
        let address = bare(name).parse::<IpAddr>();
        self.is_configured(name)
            || is("localhost")
            || self.own.as_deref().is_some_and(is)
            || address.is_ok_and(|address| address.to_canonical().is_loopback())
    }

    fn is_configured(&self, name: &Authority) -> bool {
        self.configured.iter().any(|host| host.eq_ignore_ascii_case(bare(name)))
    }
}

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// A host with its port, if that is all that the text is.
fn authority(text: &str) -> Option<Authority> {
    Authority::from_str(text).ok().filter(|authority| !authority.as_str().contains('@'))
}

/// The host without the brackets of IPv6.
fn bare(name: &Authority) -> &str {
    name.host().trim_start_matches('[').trim_end_matches(']')
}

fn is_same(a: &Authority, b: &Authority) -> bool {
    a.as_str().eq_ignore_ascii_case(b.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admits(config: &HttpConfig, uri: &str, headers: &[(&str, &str)]) -> u16 {
        let access = Access {
            token: config.token.clone(),
            tokens: Arc::new(ArcSwap::from_pointee(
                parse_tokens(
                    b"[shop]\ntoken = \"r\"\nroles = [\"route\", \"reward\"]\n[ops]\ntoken = \"a\"\nroles = [\"admin\"]\n\
                      [monitor]\ntoken = \"m\"\nroles = [\"read\"]\n",
                )
                .unwrap(),
            )),
            hosts: Hosts::new(config),
        };
        if !config.has_token() {
            access.tokens.store(Arc::default());
        }
        let headers: HeaderMap =
            headers.iter().map(|(name, value)| (name.parse::<HeaderName>().unwrap(), value.parse().unwrap())).collect();
        access.admit(&uri.parse().unwrap(), &headers).map_or_else(|problem| problem.status().as_u16(), |()| 200)
    }

    #[test]
    fn hosts_and_origins() {
        let listens = |listen: &str| HttpConfig { listen: listen.to_owned(), ..HttpConfig::default() };
        let local = HttpConfig { hosts: vec!["Router".to_owned()], ..listens("127.0.0.1:9464") };
        let wide = HttpConfig { open: true, ..listens("10.0.0.7:80") };
        let closed = HttpConfig { token: Secret("t".to_owned()), ..listens("0.0.0.0:80") };
        let near = HttpConfig { token: Secret("t".to_owned()), ..listens("localhost:80") };
        let host = |name: &'static str| vec![("host", name)];
        let with = |name: &'static str, value: &'static str| vec![("host", "localhost:9464"), (name, value)];
        let token = ("authorization", "Bearer t");
        for (config, uri, headers, status) in [
            (&local, "/metrics", host("127.0.0.1:9464"), 200),
            (&local, "/metrics", host("127.1.2.3"), 200),
            (&local, "/metrics", host("LOCALHOST:1"), 200),
            (&local, "/metrics", host("[::1]:9464"), 200),
            (&local, "/metrics", host("router:9464"), 200),
            (&local, "/metrics", host("evil.example"), 403),
            (&local, "/metrics", host("127.0.0.1.evil.example"), 403),
            (&local, "/metrics", host("10.0.0.7"), 403),
            (&local, "/metrics", host("localhost@evil.example"), 400),
            (&local, "/metrics", vec![], 400),
            (&local, "/metrics", vec![("host", "localhost"), ("host", "evil.example")], 400),
            (&local, "http://evil.example/metrics", host("localhost"), 403),
            (&local, "/", host("evil.example"), 403),
            (&local, "/live", host("evil.example"), 200),
            (&local, "/ready", vec![], 200),
            (&wide, "/metrics", host("10.0.0.7:80"), 200),
            (&wide, "/metrics", host("shop"), 403),
            (&closed, "/metrics", vec![("host", "shop"), token], 200),
            (&closed, "/metrics", host("shop"), 401),
            (&near, "/metrics", vec![("host", "shop"), token], 403),
            (&local, "/v1/rewards", with("origin", "http://localhost:9464"), 200),
            (&local, "/v1/rewards", with("origin", "https://router"), 200),
            (&local, "/v1/rewards", with("origin", "http://127.0.0.1:9464"), 403),
            (&local, "/v1/rewards", with("origin", "http://evil.example"), 403),
            (&local, "/v1/rewards", with("origin", "null"), 403),
            (&local, "/v1/rewards", with("sec-fetch-site", "cross-site"), 403),
            (&local, "/v1/rewards", with("sec-fetch-site", "same-origin"), 200),
            (&local, "/", with("sec-fetch-site", "cross-site"), 200),
            (&closed, "/metrics", vec![("host", "shop"), token, ("origin", "http://evil.example")], 403),
        ] {
            assert_eq!(admits(config, uri, &headers), status, "{} {uri} {headers:?}", config.listen);
        }
    }

    #[test]
    fn roles() {
        let config = HttpConfig { token: Secret("all".to_owned()), ..HttpConfig::default() };
        for (token, allowed) in [
            (
                "all",
                &[
                    "/v1/route",
                    "/v1/route:batch",
                    "/v1/rewards",
                    "/v1/explain",
                    "/v1/status",
                    "/v1/models",
                    "/v1/models/bge",
                    "/metrics",
                    "/v1/new",
                ][..],
            ),
            (
                "a",
                &[
                    "/v1/route",
                    "/v1/route:batch",
                    "/v1/rewards",
                    "/v1/explain",
                    "/v1/status",
                    "/v1/models",
                    "/v1/models/bge",
                    "/metrics",
                    "/v1/new",
                ],
            ),
            ("r", &["/v1/route", "/v1/route:batch", "/v1/rewards", "/v1/explain"]),
            ("m", &["/v1/explain", "/v1/status", "/v1/models", "/metrics"]),
            ("x", &[]),
            ("", &[]),
        ] {
            let bearer = format!("Bearer {token}");
            for path in [
                "/v1/route",
                "/v1/route:batch",
                "/v1/rewards",
                "/v1/explain",
                "/v1/status",
                "/v1/models",
                "/v1/models/bge",
                "/metrics",
                "/v1/new",
            ] {
                let known = if ["x", ""].contains(&token) { 401 } else { 403 };
                let expected = if allowed.contains(&path) { 200 } else { known };
                let headers = [("host", "localhost"), ("authorization", bearer.as_str())];
                assert_eq!(admits(&config, path, &headers), expected, "{token} {path}");
            }
            assert_eq!(admits(&config, "/openapi.json", &[("host", "localhost")]), 200);
        }
    }

    #[test]
    fn bad_token_files_are_named_by_line_and_never_quoted() {
        for (text, expected) in [
            ("", "no tokens"),
            ("[a]\ntoken = \"s3cret\"\nroles = [\"rooot\"]", "line 3"),
            ("[a]\ntoken = s3cret\nroles = [\"route\"]", "line 2"),
            ("[a]\ntoken = \"s3cret\"\nrole = [\"route\"]", "line "),
            ("s3cret", "line 1"),
            ("[a]\ntoken = \"\"\nroles = [\"route\"]", "[a] needs a token"),
            ("[a]\ntoken = \"s3cret\"\nroles = []", "at least one role"),
        ] {
            let Err(error) = parse_tokens(text.as_bytes()) else { panic!("{text}") };
            let error = format!("{error:#}");
            assert!(error.contains(expected) && !error.contains("s3cret"), "{error}");
        }
    }
}
