//! Attacks over HTTP: hoarded connections, forged origins, large bodies, requests that are not what they seem.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::sidecar::{Client, Process, events, free_port, write_config};

const SMALL: &str = "[learner]\ndim = 3\nmodels = [\"a\", \"b\"]\n";

/// A configuration with more keys of `[http]`, and more sections.
fn config(dir: &Path, port: u16, http: &str, more: &str) -> PathBuf {
    let path = write_config(dir, port, &format!("{SMALL}{more}"));
    let text = fs::read_to_string(&path).unwrap();
    let (before, after) = text.split_once("[store]").unwrap();
    fs::write(&path, format!("{before}{http}\n[store]{after}")).unwrap();
    path
}

/// A router that is ready, with its client.
fn router(dir: &Path, http: &str, more: &str) -> (Process, Client, u16) {
    let port = free_port();
    let route = Process::start(&config(dir, port, http, more), &["route", "--serve-uniform"]);
    let client = Client::new(port);
    client.await_status("/ready", 200);
    (route, client, port)
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

/// The status of a request that is sent as it stands.
fn status(port: u16, request: &str) -> u16 {
    let mut stream = connect(port);
    stream.write_all(request.as_bytes()).unwrap();
    let mut line = [0; 12];
    stream.read_exact(&mut line).unwrap();
    String::from_utf8_lossy(&line)[9..].parse().unwrap()
}

fn post(port: u16, path: &str, headers: &[&str], body: &str) -> u16 {
    let headers: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
    status(port, &format!("POST {path} HTTP/1.1\r\n{headers}content-length: {}\r\n\r\n{body}", body.len()))
}

fn metric(client: &Client, name: &str) -> u64 {
    metric_if_answered(client, name).expect("an answer")
}

/// `None` if the server does not answer with metrics.
fn metric_if_answered(client: &Client, name: &str) -> Option<u64> {
    let text = client.get("/metrics")?.1.as_str()?.to_owned();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}{{}} ")));
    Some(line.unwrap_or_else(|| panic!("no {name} in {text}")).parse().unwrap())
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(30), "never: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pointsman")).args(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn half_open_connections_stop_neither_learner_nor_router() {
    const DESCRIPTORS: u32 = 256;
    pointsman::http::raise_descriptor_limit();
    for (arguments, prefix) in
        [(&["learn"][..], "pointsman_learner"), (&["route", "--serve-uniform"], "pointsman_router")]
    {
        let dir = tempfile::tempdir().unwrap();
        let port = free_port();
        let process = Process::start_limited(&config(dir.path(), port, "", ""), DESCRIPTORS, arguments);
        let client = Client::new(port);
        client.await_status("/ready", 200);
        let half_open: Vec<TcpStream> = (0..DESCRIPTORS + 50)
            .map(|i| {
                let mut stream = connect(port);
                // Some never send a byte, some begin a request that never ends.
                if i % 2 == 0 {
                    let _ = stream.write_all(b"GET /live HTTP/1.1\r\nhost: local");
                }
                stream
            })
            .collect();
        for path in ["/live", "/ready", "/metrics"] {
            let fresh = Client::new(port);
            assert_eq!(fresh.get(path).map(|(status, _)| status), Some(200), "{prefix} {path}");
        }
        let open = metric(&client, &format!("{prefix}_http_connections"));
        assert!(open <= u64::from(DESCRIPTORS) / 2, "{prefix}: {open} connections");
        assert!(metric(&client, &format!("{prefix}_http_connections_evicted_total")) > 0);
        assert_eq!(metric(&client, &format!("{prefix}_http_accept_errors_total")), 0);
        if prefix == "pointsman_learner" {
            fs::create_dir_all(dir.path().join("log/queries")).unwrap();
            fs::write(dir.path().join("log/queries/bad.jsonl"), "no JSON\n").unwrap();
            eventually("it reads files meanwhile", || {
                let dead = "pointsman_learner_events_total{kind=\"query\",outcome=\"dead_lettered\"} 1";
                client.get("/metrics").is_some_and(|(_, text)| text.as_str().unwrap().contains(dead))
            });
        }
        let log = process.log();
        let path = dir.path().join("pointsman.log");
        process.terminate();
        let after = fs::read_to_string(path).unwrap();
        assert!(!after.contains("some requests were still open"), "idle connections delay the shutdown: {after}");
        assert!(!log.contains("open files"), "{log}");
        drop(half_open);
    }
}

/// Requests that never end take all there are for requests; health checks have a reserve.
#[test]
fn slow_requests_leave_health_checks_a_reserve() {
    const DESCRIPTORS: u32 = 128;
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = config(dir.path(), port, "timeout_ms = 60000", "");
    let route = Process::start_limited(&config, DESCRIPTORS, &["route", "--serve-uniform"]);
    Client::new(port).await_status("/ready", 200);
    let head =
        "POST /v1/route HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{";
    let slow: Vec<TcpStream> = (0..DESCRIPTORS)
        .map(|_| {
            let mut stream = connect(port);
            let _ = stream.write_all(head.as_bytes());
            stream
        })
        .collect();
    eventually("requests are refused", || Client::new(port).get("/v1/status").is_some_and(|(status, _)| status == 503));
    for _ in 0..20 {
        for path in ["/live", "/ready"] {
            let answer = Client::new(port).get(path);
            assert!(answer.as_ref().is_some_and(|(status, _)| *status == 200), "{path}: {answer:?}");
        }
    }
    drop(slow);
    eventually("it recovers", || Client::new(port).get("/v1/status").is_some_and(|(status, _)| status == 200));
    route.terminate();
}

#[test]
fn slow_heads_and_idle_connections_are_closed() {
    let dir = tempfile::tempdir().unwrap();
    let (route, _, port) = router(dir.path(), "timeout_ms = 200\nkeep_alive_ms = 300", "");
    for (sent, answered) in
        [("", false), ("GET /live HTTP/1.1\r\nhost: l", false), ("GET /live HTTP/1.1\r\n\r\n", true)]
    {
        let mut stream = connect(port);
        stream.write_all(sent.as_bytes()).unwrap();
        let mut received = Vec::new();
        // Ends when the server closes the connection; a reset is as good.
        let _ = stream.read_to_end(&mut received);
        assert_eq!(received.starts_with(b"HTTP/1.1 200"), answered, "{sent}: {}", text(&received));
    }
    route.terminate();
}

#[test]
fn a_server_without_descriptors_retries_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let (route, client, port) = router(dir.path(), "", "");
    let pid = route.id();
    let descriptors = || fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count() as u64;
    let limit = |soft: u64| {
        let limit = libc::rlimit { rlim_cur: soft, rlim_max: 4096 };
        // SAFETY: both pointers are valid or null, as the call demands.
        let done = unsafe { libc::prlimit(pid as libc::pid_t, libc::RLIMIT_NOFILE, &limit, std::ptr::null_mut()) };
        assert_eq!(done, 0);
    };
    limit(descriptors() + 3);
    let held: Vec<TcpStream> = (0..20).map(|_| connect(port)).collect();
    // Without descriptors the server may close this connection too.
    let failed = || metric_if_answered(&client, "pointsman_router_http_accept_errors_total") > Some(0);
    eventually("accepting fails", failed);
    eventually("idle ones are closed instead", || {
        Client::new(port).get("/live").is_some_and(|(status, _)| status == 200)
    });
    let mut ready = None;
    eventually("/ready is answered", || {
        ready = client.get("/ready");
        ready.is_some()
    });
    let (status, problem) = ready.unwrap();
    assert!(status == 503 && problem["detail"].as_str().unwrap().contains("open files"), "{problem}");
    assert_eq!(route.log().matches("cannot accept connections").count(), 1, "{}", route.log());
    limit(4096);
    drop(held);
    route.terminate();
}

#[test]
fn a_web_page_can_neither_post_nor_rebind() {
    let dir = tempfile::tempdir().unwrap();
    let (route, client, port) = router(dir.path(), "hosts = [\"shop.example\"]", "");
    let body = r#"{"request_id": "r", "reward": 1}"#;
    let (json, host) = ("content-type: application/json", "host: localhost");
    let own = format!("origin: http://localhost:{port}");
    let named = format!("host: localhost:{port}");
    for (headers, expected) in [
        (vec![host], 415),
        (vec![host, "content-type: text/plain"], 415),
        (vec![host, "content-type: application/x-www-form-urlencoded"], 415),
        (vec![host, "content-type: multipart/form-data; boundary=x"], 415),
        (vec![host, "content-type: application/octet-stream"], 415),
        (vec![host, json, "origin: http://evil.example"], 403),
        (vec![host, json, "origin: null"], 403),
        (vec![&named, json, "origin: http://localhost:1"], 403),
        (vec![host, json, "sec-fetch-site: cross-site"], 403),
        (vec!["host: evil.example", json], 403),
        (vec!["host: evil.example", "content-type: text/plain"], 403),
        (vec!["host: localhost.evil.example", json], 403),
        (vec![host, "host: evil.example", json], 400),
        (vec![json], 400),
        (vec![host, json], 202),
        (vec![host, "content-type: Application/JSON; charset=utf-8"], 202),
        (vec!["host: SHOP.example:443", json], 202),
        (vec![&named, json, &own, "sec-fetch-site: same-origin"], 202),
        (vec![host, json, "origin: https://shop.example"], 202),
    ] {
        assert_eq!(post(port, "/v1/rewards", &headers, body), expected, "{headers:?}");
    }
    assert_eq!(status(port, "POST http://evil.example/v1/rewards HTTP/1.1\r\nhost: localhost\r\n\r\n"), 403);
    for path in ["/live", "/ready"] {
        assert_eq!(status(port, &format!("GET {path} HTTP/1.1\r\nhost: evil.example\r\n\r\n")), 200);
    }
    for path in ["/metrics", "/v1/status", "/", "/openapi.json"] {
        assert_eq!(status(port, &format!("GET {path} HTTP/1.1\r\nhost: evil.example\r\n\r\n")), 403, "{path}");
    }
    let query: Vec<u8> = [1.0_f32, 2.0, 3.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(client.post("/v1/route", "application/octet-stream", &query).0, 200);
    assert_eq!(client.post("/v1/route", "text/plain", br#"{"query": [1, 2, 3]}"#).0, 415);
    route.terminate();
    assert_eq!(events(dir.path(), "rewards").len(), 5, "only what was accepted is written");

    let learn = Process::start(&dir.path().join("pointsman.toml"), &["learn"]);
    client.await_status("/ready", 200);
    for (host, expected) in [("evil.example", 403), ("shop.example", 200), ("127.0.0.1", 200)] {
        assert_eq!(status(port, &format!("GET /metrics HTTP/1.1\r\nhost: {host}\r\n\r\n")), expected, "{host}");
    }
    learn.terminate();
}

#[test]
fn beyond_loopback_a_token_is_needed_or_the_word_open() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let config = config(dir.path(), port, "", "");
    let wide = format!("http.listen=0.0.0.0:{port}");
    let path = config.to_str().unwrap();
    for command in [&["route"][..], &["learn"], &["check-config"]] {
        let output = run(&[command, &["--config", path, "--set", &wide]].concat());
        let told = text(&output.stderr);
        let way_out = ["http.listen = 0.0.0.0", "http.token", "http.open = true"];
        assert!(
            output.status.code() == Some(2) && way_out.iter().all(|part| told.contains(part)),
            "{command:?}: {told}"
        );
    }
    let client = Client::new(port);
    let get =
        |host: &str| status(port, &format!("GET /metrics HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer t\r\n\r\n"));
    let open = Process::start(&config, &["route", "--serve-uniform", "--set", &wide, "--set", "http.open=true"]);
    client.await_status("/ready", 200);
    assert_eq!([get("router"), get("127.0.0.1")], [403, 200], "without a token names are still checked");
    open.terminate();
    let closed = Process::start(&config, &["route", "--serve-uniform", "--set", &wide, "--set", "http.token=t"]);
    client.await_status("/ready", 200);
    assert_eq!([get("router"), get("127.0.0.1")], [200, 200], "with a token any name is good");
    assert_eq!(client.get("/metrics").map(|(status, _)| status), Some(401));
    closed.terminate();
}

#[test]
fn unfinished_bodies_take_bounded_memory() {
    let dir = tempfile::tempdir().unwrap();
    let http = "in_flight_bytes_max = 8388608\ntimeout_ms = 60000";
    let (route, client, port) = router(dir.path(), http, "[spaces.wide]\ndim = 64\n");
    let part = vec![b' '; 3_900_000];
    let head = "POST /v1/route:batch HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n\
                content-length: 4000000\r\n\r\n";
    let held: Vec<TcpStream> = (0..60)
        .map(|_| {
            let mut stream = connect(port);
            // Refused once the budget is spent: then the connection is closed while this is written.
            let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&part));
            stream
        })
        .collect();
    assert!(metric(&client, "pointsman_router_http_body_bytes") <= 8 << 20);
    assert_eq!(client.get("/ready").map(|(status, _)| status), Some(200));
    let status = fs::read_to_string(format!("/proc/{}/status", route.id())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak_kb: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak_kb < 120_000, "{peak_kb} kB for 60 unfinished bodies");
    drop(held);
    eventually("the memory is free again", || metric(&client, "pointsman_router_http_body_bytes") == 0);
    let batch = json!({"requests": [{"query": [1, 2, 3]}]});
    assert_eq!(client.json("/v1/route:batch", &batch).0, 200);
    route.terminate();
}

#[test]
fn bodies_are_rejected_by_their_announced_length() {
    let dir = tempfile::tempdir().unwrap();
    let (route, client, port) = router(dir.path(), "", "");
    // Eight kilobytes and 64 bytes for each of the three numbers of a query.
    for (path, length, expected) in [
        ("/v1/route", 100_000_u64, 413),
        ("/v1/explain", 100_000, 413),
        ("/v1/rewards", 100_000, 413),
        ("/v1/route:batch", 4_200_000, 413),
        ("/v1/route:batch", 1_000_000_000_000_000, 413),
    ] {
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
        );
        assert_eq!(status(port, &head), expected, "{path} {length}");
    }
    let spaced = format!("{{\"query\": [1, 2, 3]{}}}", " ".repeat(8000));
    assert_eq!(client.post("/v1/route", "application/json", spaced.as_bytes()).0, 200);
    // Without an announced length it is cut off as it comes.
    let chunk = "x".repeat(9000);
    let chunked = format!(
        "POST /v1/route HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n\
         {:x}\r\n{chunk}\r\n",
        chunk.len()
    );
    assert_eq!(status(port, &chunked), 413);
    route.terminate();
}

#[test]
fn the_rate_limit_counts_items_and_spares_probes() {
    let dir = tempfile::tempdir().unwrap();
    let (route, client, _) = router(dir.path(), "requests_per_s_max = 5", "");
    let batch = |items: usize| json!({"requests": vec![json!({"query": [1, 2, 3]}); items]});
    let (status, problem) = client.json("/v1/route:batch", &batch(6));
    assert_eq!((status, &problem["field"]), (422, &json!("requests")), "it could never pass: {problem}");
    eventually("five at once exceed the rate", || client.json("/v1/route:batch", &batch(5)).0 == 429);
    for path in ["/metrics", "/v1/status", "/live", "/ready"] {
        let statuses: Vec<u16> = (0..20).map(|_| client.get(path).unwrap().0).collect();
        assert_eq!(statuses, [200; 20], "{path}");
    }
    route.terminate();
}

#[test]
fn a_known_request_with_another_query_is_a_conflict() {
    let dir = tempfile::tempdir().unwrap();
    let (route, client, _) = router(dir.path(), "", "");
    let ask = |query: Value| client.json("/v1/route", &json!({"request_id": "r", "query": query}));
    let (status, first) = ask(json!([1, 2, 3]));
    assert_eq!(status, 200);
    assert_eq!(ask(json!([1, 2, 3])), (200, first.clone()));
    let bytes: Vec<u8> = [1.0_f32, 2.0, 3.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    assert_eq!(client.post("/v1/route?request_id=r", "application/octet-stream", &bytes), (200, first));
    let (status, problem) = ask(json!([3, 2, 1]));
    assert_eq!((status, &problem["field"], &problem["status"]), (409, &json!("request_id"), &json!(409)));
    let other = json!({"request_id": "r", "space": "shop", "query": [3, 2, 1]});
    assert_eq!(client.json("/v1/route", &other).0, 200, "another space has its own requests");
    // As a whole or not at all: the first of the two is forgotten again.
    let twice = json!({"requests": [{"request_id": "s", "query": [1, 1, 1]}, {"request_id": "s", "query": [2, 1, 1]}]});
    let (status, problem) = client.json("/v1/route:batch", &twice);
    assert_eq!((status, &problem["field"]), (409, &json!("requests[1].request_id")));
    assert_eq!(client.json("/v1/route", &json!({"request_id": "s", "query": [2, 1, 1]})).0, 200);
    route.terminate();
    assert_eq!(events(dir.path(), "queries").len(), 3);
}

#[test]
fn fields_that_do_not_exist_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let (route, client, _) = router(dir.path(), "", "");
    for (path, body, field) in [
        ("/v1/route", r#"{"query": [1, 2, 3], "spce": "shop"}"#, "spce"),
        ("/v1/route", r#"["shop", "r", [1, 2, 3]]"#, "body"),
        ("/v1/route", r#"[{"query": [1, 2, 3]}]"#, "body"),
        ("/v1/route", r#"{"query": [1, 2, 3], "query": [1, 2, 3]}"#, "query"),
        ("/v1/route:batch", r#"{"requests": [{"query": [1, 2, 3], "space": "shop"}]}"#, "requests[0].space"),
        ("/v1/route:batch", r#"{"requests": [["r", [1, 2, 3]]]}"#, "requests[0]"),
        ("/v1/route:batch", r#"{"requests": [], "spaces": 1}"#, "spaces"),
        ("/v1/route:batch", r#"[null, []]"#, "body"),
        ("/v1/rewards", r#"{"request_id": "r", "reward": 1, "rewrad": 2}"#, "rewrad"),
        ("/v1/rewards", r#"["shop", "r", 1, null]"#, "body"),
        ("/v1/explain", r#"{"query": [1, 2, 3], "request_id": "r"}"#, "request_id"),
        ("/v1/explain", r#"["shop", [1, 2, 3]]"#, "body"),
    ] {
        let (status, problem) = client.post(path, "application/json", body.as_bytes());
        assert_eq!((status, &problem["field"]), (422, &json!(field)), "{path} {body}: {problem}");
    }
    let many = format!(r#"{{"requests": [{}]}}"#, vec![r#"{"query":[1,2,3]}"#; 1001].join(","));
    let (status, problem) = client.post("/v1/route:batch", "application/json", many.as_bytes());
    assert_eq!((status, &problem["field"]), (422, &json!("requests")), "{problem}");
    let good = json!({"query": [1, 2, 3]});
    assert_eq!(client.json("/v1/route?space=shop", &good).0, 400, "in JSON the space is a field");
    assert_eq!(client.json("/v1/rewards?space=shop", &json!({"request_id": "r", "reward": 1})).0, 400);
    assert_eq!(client.post("/v1/route?spce=shop", "application/octet-stream", &[1; 12]).0, 400);
    assert_eq!(client.json("/v1/route", &good).0, 200);
    route.terminate();
    assert_eq!(events(dir.path(), "queries").len(), 1);
    assert!(!dir.path().join("log/rewards").exists() || events(dir.path(), "rewards").is_empty());
}

#[test]
fn rewards_outside_their_range_are_rejected_or_counted() {
    for (out_of_range, status, written, clipped) in [("reject", 422, 2, 0), ("clip", 202, 4, 2)] {
        let dir = tempfile::tempdir().unwrap();
        let more = format!("[reward]\nrange = [-1.0, 1.0]\nout_of_range = {out_of_range:?}\n");
        let (route, client, _) = router(dir.path(), "", &more);
        let send = |reward: f64| client.json("/v1/rewards", &json!({"request_id": "r", "reward": reward}));
        assert_eq!((send(-1.0).0, send(1.0).0), (202, 202));
        for reward in [1.5, -1e300] {
            let (found, problem) = send(reward);
            assert_eq!(found, status, "{out_of_range} {reward}: {problem}");
            assert!(status == 202 || problem["field"] == json!("reward"), "{problem}");
        }
        assert_eq!(metric(&client, "pointsman_router_rewards_clipped_total"), clipped);
        route.terminate();
        assert_eq!(events(dir.path(), "rewards").len(), written, "{out_of_range}");
    }
}

/// A certificate for loopback that no other trusts, in PEM, with its key.
fn certificate() -> (String, String) {
    let names = ["localhost".to_owned(), "127.0.0.1".to_owned()];
    let made = rcgen::generate_simple_self_signed(names).unwrap();
    (made.cert.pem(), made.signing_key.serialize_pem())
}

/// A client that trusts one certificate alone.
fn trusting(pem: &str) -> ureq::Agent {
    use ureq::tls::{Certificate, RootCerts, TlsConfig};
    let roots = RootCerts::new_with_certs(&[Certificate::from_pem(pem.as_bytes()).unwrap()]);
    let tls = TlsConfig::builder().root_certs(roots).build();
    let config = ureq::Agent::config_builder().http_status_as_error(false).tls_config(tls).max_idle_connections(0);
    config.timeout_global(Some(Duration::from_secs(20))).build().into()
}

#[test]
fn tls_with_a_certificate_that_changes() {
    let dir = tempfile::tempdir().unwrap();
    let port = free_port();
    let (old, new) = (certificate(), certificate());
    let (certificate, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    let install = |pair: &(String, String)| {
        fs::write(&certificate, &pair.0).unwrap();
        fs::write(&key, &pair.1).unwrap();
    };
    install(&old);
    let tls = format!("timeout_ms = 500\n[http.tls]\ncertificate = {certificate:?}\nkey = {key:?}");
    let config = config(dir.path(), port, &tls, "");
    let path = config.to_str().unwrap();
    let url = format!("https://127.0.0.1:{port}");
    let answers =
        |agent: &ureq::Agent| agent.get(format!("{url}/ready")).call().is_ok_and(|answer| answer.status() == 200);
    let route = Process::start(&config, &["route", "--serve-uniform"]);
    let trusts_old = trusting(&old.0);
    eventually("it answers over TLS", || answers(&trusts_old));
    assert!(Client::new(port).get("/ready").is_none(), "not without TLS");
    assert!(!answers(&trusting(&new.0)), "another certificate is not trusted");
    let output = run(&["health", "--config", path]);
    assert!(output.status.success() && text(&output.stdout).contains("https://"), "{}", text(&output.stderr));
    let output = run(&["simulate", "--requests", "20", "--rate", "0", "--json", "--config", path]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    // A handshake that never ends is cut off like a request that never comes.
    let mut silent = connect(port);
    assert!(!silent.read(&mut [0]).is_ok_and(|bytes| bytes > 0));

    fs::write(&key, "no key").unwrap();
    eventually("the bad key is reported", || route.log().contains("cannot reload"));
    assert!(!route.log().contains("no key"), "the key is not logged");
    assert!(answers(&trusts_old), "the old one stays in use");
    install(&new);
    let trusts_new = trusting(&new.0);
    eventually("the new certificate is served", || answers(&trusts_new));
    // A new client: the old one resumes its session.
    assert!(!answers(&trusting(&old.0)));
    route.terminate();

    let learn = Process::start(&config, &["learn"]);
    eventually("the learner answers over TLS", || answers(&trusts_new));
    learn.terminate();
    fs::write(&certificate, "nothing").unwrap();
    let output = run(&["route", "--config", path]);
    let told = text(&output.stderr);
    assert!(output.status.code() == Some(1) && told.contains("http.tls.certificate"), "{told}");
}

#[test]
fn tokens_have_roles_and_are_reloaded() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = dir.path().join("tokens.toml");
    let entry = |name: &str, roles: &str| format!("[{name}]\ntoken = \"{name}-token\"\nroles = [{roles}]\n");
    let first = entry("shop", "\"route\"")
        + &entry("cart", "\"reward\"")
        + &entry("grafana", "\"read\"")
        + &entry("ops", "\"admin\"");
    fs::write(&tokens, &first).unwrap();
    let (route, _, port) = router(dir.path(), &format!("token = \"master\"\ntokens_file = {tokens:?}"), "");
    let ask = |token: &str, what: &str| {
        let authorization = format!("authorization: Bearer {token}");
        let headers = ["host: localhost", "content-type: application/json", &authorization];
        match what {
            "route" => post(port, "/v1/route", &headers, r#"{"query": [1, 2, 3]}"#),
            "batch" => post(port, "/v1/route:batch", &headers, r#"{"requests": []}"#),
            "reward" => post(port, "/v1/rewards", &headers, r#"{"request_id": "r", "reward": 1}"#),
            "explain" => post(port, "/v1/explain", &headers, r#"{"query": [1, 2, 3]}"#),
            path => status(port, &format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n{authorization}\r\n\r\n")),
        }
    };
    let asked = ["route", "batch", "explain", "reward", "/v1/status", "/metrics"];
    for (token, expected) in [
        ("master", [200, 200, 200, 202, 200, 200]),
        ("ops-token", [200, 200, 200, 202, 200, 200]),
        ("shop-token", [200, 200, 200, 403, 403, 403]),
        ("cart-token", [403, 403, 403, 202, 403, 403]),
        ("grafana-token", [403, 403, 200, 403, 200, 200]),
        ("ops", [401; 6]),
        ("", [401; 6]),
    ] {
        assert_eq!(asked.map(|what| ask(token, what)), expected, "{token:?}");
    }
    fs::write(&tokens, "[shop]\ntoken = \"leaked-token\"\nroles = [\"rout\"]\n").unwrap();
    eventually("the bad file is reported", || route.log().contains("cannot reload"));
    assert!(!route.log().contains("leaked-token"), "{}", route.log());
    assert_eq!(ask("shop-token", "route"), 200, "the old tokens stay good");
    fs::write(&tokens, entry("other", "\"route\", \"read\"")).unwrap();
    eventually("the new token is good", || ask("other-token", "route") == 200);
    assert_eq!(
        [ask("shop-token", "route"), ask("other-token", "reward"), ask("other-token", "/metrics")],
        [401, 403, 200]
    );
    route.terminate();
}
