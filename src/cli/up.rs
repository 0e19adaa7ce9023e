//! `pointsman up`: learner, router and page in one process, on one port.

use std::sync::Arc;

use anyhow::{Context, anyhow};
use tempfile::TempDir;
use tokio::sync::{mpsc, oneshot};

use super::Failure;
use super::client::{self, Trust};
use super::traffic::{Aim, Simulation, TICK, Teller, rate};
use crate::config::{Config, LogsConfig, Settings, TransportKind};
use crate::event::Name;
use crate::http::raise_descriptor_limit;
use crate::router::{DrawKey, Router};
use crate::serve::{Learning, Load, Options, Reload, Routing, Signals, listen};
use crate::simulate::log_quadratic::{LogQuadratic, LogQuadraticSpec};
use crate::simulate::queries::Shape;
use crate::simulate::traffic::{Traffic, TrafficSpec};
use crate::telemetry::Status;

/// Run learner, router and page in one process, on one port
///
/// For a laptop, a test or a small service. It answers POST /v1/route from the start, with equal probabilities until the
/// first parameters are published, and logs decisions and rewards as `route` does. It learns from these logs as `learn`
/// does, takes snapshots in store.dir and routes by the new parameters. So everything can be replayed, and you can change
/// to separate processes at any time: they use the same logs and the same store.
///
/// http.listen serves the endpoints of both: /v1/route, /v1/rewards, /v1/explain, /openapi.json, /live, /ready (ready when
/// both are), /metrics (of both), /v1/status (an object with `learner` and `router`) and the page at /. On SIGTERM or SIGINT
/// it finishes open requests, writes their events, takes a last snapshot, publishes, and exits with 0. After a crash or
/// kill -9 it resumes from the last snapshot. On SIGHUP or POST /v1/reload it reads its configuration again, as `learn` does.
///
/// To start from history, learn it first: `pointsman replay --store DIR --keep-open`, with the DIR of store.dir.
///
/// --demo sends simulated traffic to the router, from a world in which the best model depends on the query. It needs no
/// configuration: learner.dim and learner.models have small values, and log and store are in a temporary directory that is
/// deleted at the end. Values that you configure are kept.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Add simulated queries and rewards
    #[arg(long)]
    demo: bool,
    /// With --demo: requests per second
    #[arg(long, requires = "demo", default_value_t = 100.0, value_parser = rate)]
    rate: f64,
    /// Kafka: continue despite lost messages, as `learn --accept-gap` does
    #[arg(long)]
    accept_gap: bool,
}

const EXAMPLES: &str = "Examples:
  pointsman up --demo                   # then open http://127.0.0.1:9464/
  pointsman up                          # with pointsman.toml, which `pointsman init` writes
  pointsman up --config shop.toml --set http.listen=127.0.0.1:8080
  curl -s localhost:9464/v1/route --json '{\"request_id\": \"r-1\", \"query\": [0.1, 0.2, ...]}'
  curl -s localhost:9464/v1/rewards --json '{\"request_id\": \"r-1\", \"reward\": 1}'

Exit codes: 0 stopped by a signal, 1 failed while running, 2 invalid usage or configuration.";

/// Dimension and models of the demo.
const DEMO_DIM: usize = 16;
const DEMO_MODELS: [&str; 4] = ["minilm", "bge", "e5", "gte"];
/// Mean delay of its rewards.
const DEMO_DELAY_MS: f64 = 100.0;
const DEMO_SEED: u64 = 1;

/// Runs the command.
pub fn run(args: &Args, config: &Config, load: Load) -> Result<(), Failure> {
    let (config, _temporary) = if args.demo { of_demo(config)? } else { (config.clone(), None) };
    let settings = config.check().map_err(|e| Failure::Usage(e.into()))?;
    config.http.check_listen().map_err(|e| Failure::Usage(e.into()))?;
    if config.http.listen.is_empty() {
        let empty = "http.listen is empty, but a router answers over HTTP: set it to an address such as 127.0.0.1:9464";
        return Err(Failure::Usage(anyhow!(empty)));
    }
    raise_descriptor_limit();
    let key = DrawKey::new(config.router.key.0.as_bytes()).map_err(|e| Failure::Usage(e.into()))?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start the async runtime")?;
    Ok(runtime.block_on(serve(args, &config, &settings, Router::new(key), load))?)
}

/// The configuration of the demo: what is not configured is small or temporary.
fn of_demo(config: &Config) -> Result<(Config, Option<TempDir>), Failure> {
    if config.transport.kind == TransportKind::Kafka {
        let mixed = "--demo with transport.kind = kafka would mix simulated events into the topics: use \
                     --set transport.kind=file, or `pointsman simulate` with topics of its own";
        return Err(Failure::Usage(anyhow!(mixed)));
    }
    if config.http.has_token() && config.http.token.0.is_empty() {
        return Err(Failure::Usage(anyhow!("--demo needs a token for its requests: set http.token")));
    }
    let (mut config, default) = (config.clone(), Config::default());
    let learner = &mut config.learner;
    if (learner.dim, &learner.models) == (default.learner.dim, &default.learner.models) {
        (learner.dim, learner.models) = (DEMO_DIM, DEMO_MODELS.map(str::to_owned).to_vec());
    }
    let (log, store) = (&mut config.transport.file.dir, &mut config.store.dir);
    let is_temporary = [*log == default.transport.file.dir, *store == default.store.dir];
    if is_temporary == [false, false] {
        return Ok((config, None));
    }
    let dir = tempfile::Builder::new().prefix("pointsman-demo-").tempdir().context("cannot create a directory")?;
    for (path, name) in
        [(log, "log"), (store, "store")].into_iter().zip(is_temporary).filter_map(|(x, is)| is.then_some(x))
    {
        *path = dir.path().join(name);
    }
    Ok((config, Some(dir)))
}

/// Runs learner and router until a signal arrives or one of them fails.
async fn serve(args: &Args, config: &Config, settings: &Settings, router: Router, load: Load) -> anyhow::Result<()> {
    let mut signals = Signals::catch()?;
    let status = Arc::new(Status::default());
    let server = listen(&config.http, status.http(), "a free address").await?;
    let url = client::near(&server.url());
    let hint = hint(config);
    let routing = Routing::start(config, settings, router, true, server)?;
    let options = Options { once: false, accept_gap: args.accept_gap };
    let mut learning = Learning::start(config, settings, options, status)?;
    let is_demo = args.demo;
    let load: Load = Box::new(move || match is_demo {
        true => Err(anyhow!("up --demo has a configuration of its own: start it again")),
        false => load(),
    });
    let reload = Reload::new(config, load);
    reload.add(learning.reconfigure());
    reload.on_hangup()?;
    let (stop, stopped) = oneshot::channel();
    let both = (learning.status.clone(), learning.store.clone());
    let mut serving = tokio::spawn(routing.serve(Some(both), reload, async { _ = stopped.await }));
    tracing::info!("page: {url}/  try: {}", example(&url, config, settings));
    if let Some(hint) = hint {
        tracing::info!("{hint}");
    }
    let mut demo = if args.demo { Some(Demo::start(args, config, settings, url)?) } else { None };
    let (mut served, mut learned, mut failed) = (None, None, None);
    tokio::select! {
        signal = signals.received() => tracing::info!("received {signal}, stopping"),
        end = &mut serving => served = Some(end),
        end = learning.ended() => learned = Some(end),
        problem = Demo::failed(demo.as_mut()) => failed = Some(problem),
    }
    if let Some(demo) = &demo {
        demo.simulation.stop();
    }
    // Requests are completed and their events written before the last snapshot.
    let _ = stop.send(());
    let served = match served {
        Some(end) => end,
        None => serving.await,
    };
    learning.stop();
    let learned = match learned {
        Some(end) => end,
        None => learning.ended().await,
    };
    learned?;
    served??;
    failed.map_or(Ok(()), Err)
}

/// A request for the shell. No vector has to be at hand: any numbers do.
fn example(url: &str, config: &Config, settings: &Settings) -> String {
    let dim = settings.space(&Name::default_space()).dim;
    let token = if config.http.has_token() { " -H \"Authorization: Bearer $TOKEN\"" } else { "" };
    format!("curl -s{token} {url}/v1/route --json '{{\"query\": ['$(seq {dim} | paste -sd, -)']}}'")
}

/// How to start from history, where there is some and none was learned.
fn hint(config: &Config) -> Option<String> {
    let LogsConfig { queries, examples, .. } = &config.logs;
    let store = &config.store.dir;
    let is_empty = std::fs::read_dir(store).map_or(true, |mut entries| entries.next().is_none());
    let has_history = !queries.is_empty() || !examples.is_empty();
    (is_empty && has_history).then(|| {
        format!(
            "starting without history: {} is empty, but section logs names logs. To start from them, stop and run `pointsman \
             replay --store {} --keep-open` with the same configuration first",
            store.display(),
            store.display()
        )
    })
}

/// Simulated traffic to the own router.
struct Demo {
    simulation: Arc<Simulation>,
    ended: mpsc::UnboundedReceiver<anyhow::Error>,
    teller: Teller,
}

impl Demo {
    fn start(args: &Args, config: &Config, settings: &Settings, url: String) -> anyhow::Result<Self> {
        let space = Name::default_space();
        let spec = settings.space(&space);
        let (dim, models) = (spec.dim, spec.models.clone());
        let world = LogQuadraticSpec {
            dim,
            models: models.len(),
            intrinsic_rank: 2,
            signal: 0.3,
            shape: Shape::PowerLaw,
            seed: DEMO_SEED,
        };
        let traffic = TrafficSpec {
            requests: None,
            rate: args.rate,
            delay_ms: DEMO_DELAY_MS,
            loss: 0.0,
            switch_at: None,
            seed: DEMO_SEED,
        };
        let traffic = Traffic::new(Box::new(LogQuadratic::new(world)), traffic);
        // The server is this process: its certificate proves nothing more.
        let (token, trust) = (config.http.token.0.clone(), Trust::Anyone);
        let simulation = Simulation::new(Aim { url, token, trust, space, models, connections: 4 }, traffic);
        let ended = simulation.start()?;
        Ok(Self { simulation, ended, teller: Teller::in_lines() })
    }

    /// Reports progress until the traffic fails.
    async fn failed(demo: Option<&mut Self>) -> anyhow::Error {
        let Some(Self { simulation, ended, teller }) = demo else { return std::future::pending().await };
        let mut ticks = tokio::time::interval(TICK);
        loop {
            tokio::select! {
                Some(error) = ended.recv() => return error,
                _ = ticks.tick() => teller.tell(simulation),
            }
        }
    }
}
