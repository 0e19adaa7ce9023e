//! The sidecar under load, beside a bare axum handler that only parses the same body: each a process of its own, this
//! one the client, over loopback.
//!
//!   cargo bench --bench sidecar

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use axum::Router as Routes;
use axum::body::Bytes;
use axum::http::HeaderMap;
use axum::routing::{get, post};
use pointsman::event::{ModelName, Name};
use pointsman::report::{Column, Table};
use pointsman::router::{Params, Policy, ScoreForm};
use pointsman::wire::params;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const DIM: usize = 768;
const MODELS: usize = 8;
const RANK: usize = 16;
const CONNECTIONS: usize = 8;
const SECONDS: u64 = 8;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--bare") {
        serve_bare(arguments[at + 1].parse().expect("an address"));
        return;
    }
    let dir = tempfile::tempdir().expect("a temporary directory");
    publish(dir.path());
    let (route_at, bare_at) = (free_address(), free_address());
    let _route = Server(
        Command::new(env!("CARGO_BIN_EXE_pointsman"))
            .arg("route")
            .args(["--set", &format!("http.listen={route_at}")])
            .args(["--set", &format!("transport.file.dir={}", dir.path().display())])
            .stderr(Stdio::null())
            .spawn()
            .expect("the sidecar"),
    );
    let bare =
        Command::new(std::env::current_exe().expect("this program")).args(["--bare", &bare_at.to_string()]).spawn();
    let _bare = Server(bare.expect("the bare server"));
    [route_at, bare_at].into_iter().for_each(await_ready);
    let mut rows = Vec::new();
    for (kind, body) in [("JSON array", json_body()), ("JSON base64", base64_body()), ("binary", binary_body())] {
        let kind_header = if kind == "binary" { "application/octet-stream" } else { "application/json" };
        // Once for each to warm up, then in turns.
        let mut figures = [Vec::new(), Vec::new()];
        for round in 0..3 {
            for (server, address) in [route_at, bare_at].into_iter().enumerate() {
                let seconds = if round == 0 { 1 } else { SECONDS / 2 };
                let measured = load(address, kind_header, &body, Duration::from_secs(seconds));
                if round > 0 {
                    figures[server].extend(measured);
                }
            }
        }
        let [route, bare] = figures.map(|mut times| {
            times.sort_by(f64::total_cmp);
            let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
            (times.len() as f64 / SECONDS as f64, at(0.5), at(0.99))
        });
        for (name, (rate, p50, p99)) in [("sidecar", route), ("bare axum handler", bare)] {
            rows.push(vec![
                kind.to_owned(),
                name.to_owned(),
                format!("{rate:.0}"),
                format!("{:.0} us", p50 * 1e6),
                format!("{:.0} us", p99 * 1e6),
                format!("{:.2}", rate / bare.0),
            ]);
        }
    }
    let left = [Column::left("body"), Column::left("server")];
    let right = ["requests/s", "p50", "p99", "rate / bare"].map(Column::right);
    let columns = left.into_iter().chain(right).collect();
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let note =
        format!("d={DIM} M={MODELS} k={RANK}, {CONNECTIONS} connections; client and servers share {cores} cores");
    println!("{}", Table { columns, rows, note: Some(note) }.text(120));
}

/// A server that ends with the benchmark.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[derive(serde::Deserialize)]
struct Body {
    query: serde_json::Value,
}

#[derive(serde::Deserialize)]
struct ArrayBody {
    query: Vec<f32>,
}

/// Parses the same bodies and answers something of the same length.
fn serve_bare(address: SocketAddr) {
    let answer = || "x".repeat(500);
    let parse = move |headers: HeaderMap, body: Bytes| async move {
        let binary = headers.get("content-type").is_some_and(|kind| kind == "application/octet-stream");
        let length = if binary {
            body.as_chunks::<4>().0.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect::<Vec<f32>>().len()
        } else {
            match serde_json::from_slice::<ArrayBody>(&body) {
                Ok(array) => array.query.len(),
                Err(_) => {
                    serde_json::from_slice::<Body>(&body).map_or(0, |body| body.query.as_str().map_or(0, str::len))
                }
            }
        };
        assert!(length >= DIM);
        answer()
    };
    let routes = Routes::new().route("/ready", get(|| async { "ready" })).route("/v1/route", post(parse));
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind(address).await.expect("the address");
        axum::serve(listener, routes).await.expect("serving");
    });
}

/// Time of every request, in seconds.
fn load(address: SocketAddr, kind: &str, body: &[u8], lasting: Duration) -> Vec<f64> {
    let mut request = format!(
        "POST /v1/route HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    request.extend_from_slice(body);
    let request = &request;
    std::thread::scope(|scope| {
        let client = || {
            let mut stream = TcpStream::connect(address).expect("a connection");
            stream.set_nodelay(true).expect("no delay");
            let (start, mut times, mut buffer) = (Instant::now(), Vec::new(), vec![0; 1 << 16]);
            while start.elapsed() < lasting {
                let sent = Instant::now();
                stream.write_all(request).expect("sent");
                read_response(&mut stream, &mut buffer);
                times.push(sent.elapsed().as_secs_f64());
            }
            times
        };
        let clients: Vec<_> = (0..CONNECTIONS).map(|_| scope.spawn(client)).collect();
        clients.into_iter().flat_map(|client| client.join().expect("a client")).collect()
    })
}

fn read_response(stream: &mut TcpStream, buffer: &mut [u8]) {
    let mut read = 0;
    loop {
        let more = stream.read(&mut buffer[read..]).expect("an answer");
        assert!(more > 0, "the connection was closed");
        read += more;
        let text = String::from_utf8_lossy(&buffer[..read]);
        let Some(end) = text.find("\r\n\r\n") else { continue };
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
        let header = text[..end].lines().find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = header.expect("a length").trim().parse().expect("a number");
        if read >= end + 4 + length {
            return;
        }
    }
}

fn await_ready(address: SocketAddr) {
    for _ in 0..500 {
        let answer = TcpStream::connect(address).and_then(|mut stream| {
            stream.write_all(b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        });
        if answer.is_ok_and(|text| text.starts_with("HTTP/1.1 200")) {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("{address} was never ready");
}

fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("a free port")
}

fn query() -> Vec<f32> {
    let mut random = ChaCha8Rng::seed_from_u64(7);
    (0..DIM).map(|_| random.random_range(-0.1..0.1)).collect()
}

fn json_body() -> Vec<u8> {
    serde_json::json!({ "query": query() }).to_string().into_bytes()
}

fn base64_body() -> Vec<u8> {
    use base64::Engine as _;
    let text = base64::engine::general_purpose::STANDARD.encode(binary_body());
    serde_json::json!({ "query": text }).to_string().into_bytes()
}

fn binary_body() -> Vec<u8> {
    query().iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn publish(dir: &Path) {
    let mut random = ChaCha8Rng::seed_from_u64(1);
    let mut numbers = |n: usize| (0..n).map(|_| random.random_range(-1.0..1.0)).collect::<Vec<f32>>();
    let mut policy = Policy::unlearned(MODELS, None);
    for form in &mut policy.scores {
        *form = ScoreForm { eigenvalues: numbers(RANK), eigenvectors: numbers(RANK * DIM), ..ScoreForm::default() };
    }
    let params = Params {
        space: Name::default_space(),
        epoch: 0,
        version: 1,
        revision: 0,
        models: (0..MODELS).map(|m| ModelName::try_from(format!("model-{m}")).expect("a name")).collect(),
        dim: DIM,
        created_ms: 0,
        algorithm: "hpg".to_owned(),
        policy,
    };
    std::fs::create_dir_all(dir.join("params")).expect("a directory");
    std::fs::write(dir.join("params/default.safetensors"), params::encode(&params)).expect("parameters");
}
