//! Feeds a router: writers of its events, and readers of published parameters.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, anyhow};
use rand::RngExt;

use crate::config::{Config, Settings, TransportKind};
use crate::failpoint;
use crate::http::sidecar::Sidecar;
use crate::transport::kafka::cluster::Cluster;
use crate::transport::kafka::events::EventTopics;
use crate::transport::kafka::params::ParamsTopic;
use crate::transport::writer::{EventWriter, FileWriter};
use crate::wire::params;

/// Feeds parameters to the router until the flag is cleared.
pub(super) type Feed = Box<dyn FnOnce(&Intake, &AtomicBool) -> anyhow::Result<()> + Send>;

/// Entry point of parameters: logs, counts and skips invalid ones, offers the others to the router.
pub(super) struct Intake {
    pub(super) sidecar: Arc<Sidecar>,
}

impl Intake {
    /// Decodes bytes read from a place; returns whether they are valid parameters.
    fn take(&self, place: &str, bytes: anyhow::Result<Vec<u8>>) -> bool {
        let decode = |bytes: Vec<u8>| {
            Ok((params::decode_for(&self.sidecar.settings(), &bytes)?, params::oldest_reward_ms(&bytes)))
        };
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

/// The writer of events and the feed of parameters of the configured transport.
pub(super) fn connect(config: &Config, settings: &Settings) -> anyhow::Result<(EventWriter, Feed)> {
    match config.transport.kind {
        TransportKind::File => files(config),
        TransportKind::Kafka => topics(config, settings),
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
