//! `pointsman route`: the router sidecar.

use std::collections::BTreeMap;
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

/// Run the router sidecar: answers over HTTP which model a query goes to, and logs the decision
///
/// With transport.kind = "file" it reads the parameters under params/ in transport.file.dir, and again when they are
/// replaced, and writes decisions to queries/ and rewards to rewards/ there, for `learn`; with "kafka" it does the same
/// with the topics of transport.kafka.topics. Listens on http.listen (loopback unless configured). SIGTERM or
/// SIGINT ends it, after open requests. A page at / shows how it goes.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Be ready before there are any parameters: route uniformly (or to router.fallback_model) until they come
    #[arg(long)]
    serve_uniform: bool,
}

const EXAMPLES: &str = "Example:
  pointsman route --config shop.toml --serve-uniform &
  curl -s localhost:9464/v1/route --json '{\"query\": [0.1, 0.2, ...]}'
  curl -s localhost:9464/v1/rewards --json '{\"request_id\": \"...\", \"reward\": 1}'

GET /openapi.json describes all paths.";

/// How long open requests may take to end.
const DRAIN: Duration = Duration::from_secs(4);

/// Runs the command.
pub fn run(args: &Args, config: &Config) -> Result<(), Failure> {
    let settings = config.check().map_err(|e| Failure::Usage(e.into()))?;
    config.http.check_listen().map_err(|e| Failure::Usage(e.into()))?;
    raise_descriptor_limit();
    let key = DrawKey::new(config.router.key.0.as_bytes()).map_err(|e| Failure::Usage(e.into()))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("cannot start")?;
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
    let server = server.with_context(|| format!("cannot listen on {listen} (http.listen)"))?;
    tracing::info!(listen = server.url(), transport = %config.transport.kind, "routing");
    let sidecar = Arc::new(Sidecar::new(config, settings.clone(), router, ready, writer.clone(), &server));
    let intake = Intake { sidecar: sidecar.clone(), settings };
    let fed = Arc::new(AtomicBool::new(true));
    let feeding = fed.clone();
    // Reading and laying out parameters takes milliseconds: not on a thread that answers.
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
        tracing::info!("stopping");
        let _ = stopping.send(());
    };
    let serving = sidecar.serve(server, stop);
    let served = tokio::select! {
        () = serving => Ok(()),
        () = async { let _ = stopped.await; tokio::time::sleep(DRAIN).await } => {
            tracing::warn!("some requests did not end in time");
            Ok(())
        }
        Ok(problem) = &mut failure => Err(problem),
    };
    fed.store(false, Ordering::Relaxed);
    // However it ends: what was accepted is delivered first.
    let drained = tokio::task::spawn_blocking(move || {
        let _ = feeder.join();
        writer.drain()
    });
    drained.await?.and(served)
}

/// Brings parameters to the router until the flag is cleared.
type Feed = Box<dyn FnOnce(&Intake, &AtomicBool) -> anyhow::Result<()> + Send>;

/// Where parameters enter: what is bad is logged, counted and skipped, the rest is offered to the router.
struct Intake {
    sidecar: Arc<Sidecar>,
    settings: Settings,
}

impl Intake {
    /// Takes in the bytes read from a place; whether they are good parameters.
    fn take(&self, place: &str, bytes: anyhow::Result<Vec<u8>>) -> bool {
        match bytes.and_then(|bytes| Ok(params::decode_for(&self.settings, &bytes)?)) {
            Ok(params) => {
                let (space, version) = (params.space.to_string(), params.version);
                let taken = self.sidecar.router.offer(params);
                tracing::debug!(space, version, taken, "parameters");
                true
            }
            Err(error) => {
                tracing::error!(place, "parameters are rejected, the router keeps those it has: {error:#}");
                self.sidecar.params_rejected();
                false
            }
        }
    }

    /// Notes that the router has all the parameters that there are.
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
        let mut found = false;
        while going() {
            if let Some((place, bytes)) = topic.poll(Duration::from_millis(100)) {
                found |= intake.take(&place, Ok(bytes));
            }
            // An empty topic has no parameters to be ready with.
            intake.set_ready(found && topic.caught_up());
        }
        Ok(())
    };
    Ok((EventWriter::Topics(events), Box::new(feed)))
}

/// Largest parameter file that is read.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// Looks for parameter files that are new or were replaced.
struct Watch {
    dir: PathBuf,
    seen: BTreeMap<PathBuf, (u64, u64, i64)>,
    /// Whether it has found good parameters.
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
        return Err(anyhow!("it has more than {FILE_BYTES_MAX} bytes"));
    }
    Ok(bytes)
}
