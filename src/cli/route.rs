//! `pointsman route`: the router sidecar.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, anyhow};
use rand::RngExt;
use tokio::signal::unix::{SignalKind, signal};

use super::Failure;
use crate::config::{Config, Settings, TransportKind};
use crate::failpoint;
use crate::http::sidecar::Sidecar;
use crate::http::{Server, raise_descriptor_limit};
use crate::router::{DrawKey, Router};
use crate::transport::kafka::cluster::Cluster;
use crate::transport::kafka::events::EventTopics;
use crate::transport::kafka::params::ParamsTopic;
use crate::transport::writer::{EventWriter, FileWriter};
use crate::wire::params;

/// Run the router sidecar: chooses a model for each query over HTTP and logs the decision
///
/// With transport.kind = "file" it reads the parameters from params/ in transport.file.dir, reloads them when they are
/// replaced, and writes decisions to queries/ and rewards to rewards/, where `learn` reads them; with "kafka" it uses the
/// topics of transport.kafka.topics. It listens on http.listen (by default on loopback) and serves a status page at /. On
/// SIGTERM or SIGINT it finishes open requests and exits with 0.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Report ready without parameters: route uniformly (or to router.fallback_model) until some are published
    #[arg(long)]
    serve_uniform: bool,
}

const EXAMPLES: &str = "Examples:
  pointsman route --config shop.toml --serve-uniform &
  curl -s localhost:9464/v1/route --json '{\"query\": [0.1, 0.2, ...]}'
  curl -s localhost:9464/v1/rewards --json '{\"request_id\": \"...\", \"reward\": 1}'

GET /openapi.json describes all endpoints.

Exit codes: 0 stopped by a signal, 1 failed while running, 2 invalid usage or configuration.";

/// Time limit for open requests at shutdown.
const DRAIN: Duration = Duration::from_secs(4);

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    let settings = config.check().map_err(|e| Failure::Usage(e.into()))?;
    config.http.check_listen().map_err(|e| Failure::Usage(e.into()))?;
    raise_descriptor_limit();
    let key = DrawKey::new(config.router.key.0.as_bytes()).map_err(|e| Failure::Usage(e.into()))?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start the async runtime")?;
    Ok(runtime.block_on(serve(args, config, settings, Router::new(key)))?)
}

async fn serve(args: &Args, config: &Config, settings: Settings, router: Router) -> anyhow::Result<()> {
    let router = Arc::new(router);
    let ready = Arc::new(AtomicBool::new(args.serve_uniform));
    let (writer, feed) = match config.transport.kind {
        TransportKind::File => files(config)?,
        TransportKind::Kafka => topics(config, &settings)?,
    };
    let writer = Arc::new(writer);
    let listen = &config.http.listen;
    let server = Server::bind(&config.http, Arc::default()).await;
    let server = server.with_context(|| format!("cannot listen on {listen}: set http.listen to a free address"))?;
    tracing::info!(listen = server.url(), transport = %config.transport.kind, "router started");
    let sidecar = Arc::new(Sidecar::new(config, settings.clone(), router, ready, writer.clone(), &server));
    let intake = Intake { sidecar: sidecar.clone(), settings };
    let fed = Arc::new(AtomicBool::new(true));
    let feeding = fed.clone();
    // Loading parameters takes milliseconds: not on a thread that serves requests.
    let (failed, mut failure) = tokio::sync::oneshot::channel();
    let feeder = std::thread::Builder::new().name("parameters".to_owned()).spawn(move || {
        if let Err(problem) = feed(&intake, &feeding) {
            let _ = failed.send(problem);
        }
    })?;
    let (stopping, stopped) = tokio::sync::oneshot::channel();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("received a signal, stopping");
        let _ = stopping.send(());
    };
    let serving = sidecar.serve(server, stop);
    let served = tokio::select! {
        () = serving => Ok(()),
        () = async { let _ = stopped.await; tokio::time::sleep(DRAIN).await } => {
            tracing::warn!("{} s after the signal some requests were still open, closing them", DRAIN.as_secs());
            Ok(())
        }
        Ok(problem) = &mut failure => Err(problem),
    };
    fed.store(false, Ordering::Relaxed);
    // In every case: deliver accepted events first.
    let drained = tokio::task::spawn_blocking(move || {
        let _ = feeder.join();
        writer.drain()
    });
    drained.await?.and(served)
}

/// Feeds parameters to the router until the flag is cleared.
type Feed = Box<dyn FnOnce(&Intake, &AtomicBool) -> anyhow::Result<()> + Send>;

/// Entry point of parameters: logs, counts and skips invalid ones, offers the others to the router.
struct Intake {
    sidecar: Arc<Sidecar>,
    settings: Settings,
}

impl Intake {
    /// Decodes bytes read from a place; returns whether they are valid parameters.
    fn take(&self, place: &str, bytes: anyhow::Result<Vec<u8>>) -> bool {
        let decode =
            |bytes: Vec<u8>| Ok((params::decode_for(&self.settings, &bytes)?, params::oldest_reward_ms(&bytes)));
        match bytes.and_then(decode) {
            Ok((params, oldest_reward_ms)) => {
                let (space, version) = (params.space.to_string(), params.version);
                let taken = self.sidecar.take_params(params, oldest_reward_ms);
                tracing::debug!(space, version, taken, "parameters read");
                true
            }
            Err(error) => {
                tracing::error!(place, "rejected invalid parameters, keeping the current ones: {error:#}");
                self.sidecar.params_rejected();
                false
            }
        }
    }

    /// Records that the router has all published parameters.
    fn set_ready(&self, is_ready: bool) {
        self.sidecar.ready.fetch_or(is_ready, Ordering::Relaxed);
    }
}

fn files(config: &Config) -> anyhow::Result<(EventWriter, Feed)> {
    let file = config.transport.file.clone();
    let instance = format!("router-{}-{:08x}", std::process::id(), rand::rng().random::<u32>());
    let writer = FileWriter::start(&file.dir, &instance, config.events.queue_max)
        .with_context(|| format!("cannot write events to {} (transport.file.dir)", file.dir.display()))?;
    let feed = move |intake: &Intake, goes_on: &AtomicBool| {
        let mut watch = Watch::new(&file.dir.join("params"));
        while goes_on.load(Ordering::Relaxed) {
            failpoint::reach(failpoint::READ_PARAMS);
            watch.look(intake);
            intake.set_ready(watch.found);
            std::thread::sleep(Duration::from_millis(file.poll_ms));
        }
        Ok(())
    };
    Ok((EventWriter::Files(writer), Box::new(feed)))
}

fn topics(config: &Config, settings: &Settings) -> anyhow::Result<(EventWriter, Feed)> {
    let cluster = Cluster::new(&config.transport.kafka)?;
    let events = EventTopics::new(&cluster, settings, config.events.queue_max)?;
    let feed = move |intake: &Intake, goes_on: &AtomicBool| {
        let going = || goes_on.load(Ordering::Relaxed);
        if !cluster.await_reach(going)? {
            return Ok(());
        }
        let mut topic = ParamsTopic::open(&cluster)?;
        let (mut found, mut warned) = (false, BTreeSet::new());
        while going() {
            let polled = topic.poll(Duration::from_millis(100)).unwrap_or_else(|problem| {
                if warned.insert(problem.to_string()) {
                    tracing::warn!(%problem, "cannot read parameters, keeping the current ones");
                }
                None
            });
            if let Some((place, bytes)) = polled {
                found |= intake.take(&place, Ok(bytes));
            }
            // An empty topic has no parameters to route by.
            intake.set_ready(found && topic.caught_up());
        }
        Ok(())
    };
    Ok((EventWriter::Topics(events), Box::new(feed)))
}

/// Largest parameter file that is read.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// Detects new and replaced parameter files.
struct Watch {
    dir: PathBuf,
    seen: BTreeMap<PathBuf, (u64, u64, i64)>,
    /// Whether valid parameters were found.
    found: bool,
}

impl Watch {
    fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), seen: BTreeMap::new(), found: false }
    }

    fn look(&mut self, intake: &Intake) {
        // Before the first publication there is no directory.
        let Ok(entries) = std::fs::read_dir(&self.dir) else { return };
        let mut present = BTreeMap::new();
        for path in entries.filter_map(|entry| entry.ok().map(|entry| entry.path())) {
            if path.extension().is_none_or(|extension| extension != "safetensors") {
                continue;
            }
            let Ok(metadata) = std::fs::metadata(&path) else { continue };
            let state = (metadata.ino(), metadata.len(), metadata.mtime_nsec());
            if self.seen.get(&path) != Some(&state) {
                self.found |= intake.take(&path.display().to_string(), read(&path));
            }
            present.insert(path, state);
        }
        self.seen = present;
    }
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = crate::files::open(path).context("cannot read")?;
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).context("cannot read")?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(anyhow!("larger than the limit of {FILE_BYTES_MAX} bytes"));
    }
    Ok(bytes)
}
