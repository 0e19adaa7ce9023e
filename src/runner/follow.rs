//! The daemon's loop on either transport.

use std::iter::once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::runtime::Handle;

use super::{CannotRead, DEAD_LETTERS_BYTES, Places, Retry, Runner, Stepped};
use crate::config::{Config, Lanes, Settings, TransportKind};
use crate::engine::{Engine, Totals};
use crate::merge::MergeState;
use crate::state::running::RunningStore;
use crate::state::{LocalLane, generations};
use crate::store::{self, DirStore, ONE_LANE, Shared};
use crate::telemetry::{News, Status, Unread};
use crate::transport::append::Appender;
use crate::transport::directory::Directory;
use crate::transport::file::{AtEnd, LogFile};
use crate::transport::kafka::cluster::{Cluster, Problem};
use crate::transport::kafka::consumer::{Ending, Membership, Partition, Reader};
use crate::transport::kafka::outlet::KafkaOutlet;
use crate::transport::kafka::params::ParamsTopic;
use crate::transport::kafka::positions::{self, Place};
use crate::transport::kafka::topics;
use crate::transport::params::{Files, ParamsDir};
use crate::transport::{Log, lock};
use crate::wire::events::Parser;

/// Options of a run.
pub struct Run<'a> {
    /// Whether it stops at the current end of its inputs.
    pub once: bool,
    /// Whether lost messages are skipped.
    pub accept_gap: bool,
    /// The configuration.
    pub config: &'a Config,
    /// The validated configuration.
    pub settings: &'a Settings,
    /// Set to stop the run.
    pub stop: &'a Arc<AtomicBool>,
    /// Receives progress reports.
    pub status: &'a Status,
    /// Receives the store once it is open.
    pub store: &'a RunningStore,
    /// Runtime for admin requests to the brokers.
    pub runtime: &'a Handle,
}

/// Result of a run.
pub struct Outcome {
    /// The engine of each lane.
    pub engines: Vec<Engine>,
    /// Events that arrived beyond the reorder window.
    pub out_of_order: u64,
}

/// Interval of progress lines in the log.
const NEWS_EVERY: Duration = Duration::from_secs(30);

/// Interval of status updates; longer if an update takes more than this share of the time.
const STATUS_EVERY: Duration = Duration::from_millis(250);
const STATUS_SHARE: f64 = 0.01;

/// Interval at which it checks that the topics were not recreated.
pub(super) const CHECK_EVERY: Duration = Duration::from_secs(20);

/// Number of events between two checks of idle logs.
const LOOK_EVERY: u64 = 64;

/// Name of the retried operation that reads log files.
const READ: &str = "read";

/// Wait time when idle.
pub(super) const IDLE: Duration = Duration::from_millis(20);

impl Run<'_> {
    /// Runs until it is done or stopped. `None` if it was stopped before it started.
    pub fn follow(&self) -> anyhow::Result<Option<Outcome>> {
        match self.config.transport.kind {
            TransportKind::File => self.follow_files().map(Some),
            TransportKind::Kafka => self.follow_topics(),
        }
    }

    pub(super) fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    /// The daemon retries failures of the operating system; `--once` fails with an exit code.
    pub(super) fn retry(&self) -> Retry {
        if self.once { Retry::never() } else { Retry::until(self.stop.clone(), self.status.facts()) }
    }

    /// Opens the store. The daemon retries while the disk is full.
    pub(super) fn open_store(&self) -> anyhow::Result<Shared<DirStore>> {
        let store = self.retry().run("open_store", || Ok(super::open_store(&self.config.store)?))?;
        if let Err(error) = self.store.set(&self.config.store.dir, store.clone()) {
            tracing::warn!(%error, "cannot write backup-token to store.dir; `snapshots backup` has to wait for a restart");
        }
        Ok(store)
    }

    /// The snapshots of a lane in the store.
    pub(super) fn lane_store(&self, store: &Shared<DirStore>, lane: &str) -> LocalLane {
        LocalLane::new(store.clone(), lane, (&self.config.snapshot).into())
    }

    /// Opens what the brokers hold. A daemon retries while they cannot answer: `None` if it has to stop before they do.
    pub(super) fn open_patiently<T>(&self, open: impl FnMut() -> anyhow::Result<T>) -> anyhow::Result<Option<T>> {
        match self.retry().run("open_lane", open) {
            Err(_) if !self.once && !self.goes_on() => Ok(None),
            opened => opened.map(Some),
        }
    }

    /// Reports whether all partitions are read, and if not, the batch at which one has stopped.
    pub(super) fn tell_ready(&self, reader: &Reader) {
        let stopped = reader.unreadable();
        self.status.set_ready(reader.is_assigned() && stopped.is_empty());
        self.status.set_stopped(stopped.first().map(ToString::to_string));
    }

    fn follow_files(&self) -> anyhow::Result<Outcome> {
        let file = &self.config.transport.file;
        let poll = Duration::from_millis(file.poll_ms);
        let idle = Duration::from_millis(file.idle_ms);
        let at_end = if self.once { AtEnd::Stop } else { AtEnd::Follow { idle } };
        let cannot_read = || format!("cannot read the log directory {} (transport.file.dir)", file.dir.display());
        let dead_letters = Appender::rotating(&file.dir.join("dead-letters"), "dead-letters", DEAD_LETTERS_BYTES);
        let params = ParamsDir::new(&file.dir.join("params"));
        let published = params.published();
        let outlet = Box::new(Files { dead_letters, params: Some(params) });
        let retry = self.retry();
        let store = Some(self.lane_store(&self.open_store()?, ONE_LANE));
        let (audit, facts) = (self.config.audit.path(), self.status.facts());
        let places = Places { store, audit, outlet, published, facts: facts.clone(), retry: retry.clone() };
        let (mut runner, state) = Runner::open(self.settings, &self.config.snapshot, places)?;
        let parser = Arc::new(Parser::new(self.settings));
        let mut directory = Directory::new(&file.dir, parser, at_end, state.positions.clone(), facts);
        retry.run(READ, || directory.create().with_context(cannot_read))?;
        runner.begin(state)?;
        let scan = |directory: &mut Directory, runner: &mut Runner<LogFile>| {
            retry.run(READ, || directory.scan(&mut runner.merge).with_context(cannot_read))
        };
        match scan(&mut directory, &mut runner) {
            // Shutting down: the loop below does not start.
            Err(_) if !self.once && !self.goes_on() => {}
            scanned => scanned?,
        }
        for log in directory.missing() {
            tracing::warn!(log, "log file is missing; it was read before");
        }
        tracing::info!(dir = %file.dir.display(), once = self.once, "learning");
        self.status.set_ready(true);
        let (mut scanned, mut teller) = (Instant::now(), Teller::new(self.status));
        while self.goes_on() {
            if !self.once && scanned.elapsed() >= poll {
                match scan(&mut directory, &mut runner) {
                    Err(_) if !self.goes_on() => break,
                    scanned => scanned?,
                }
                scanned = Instant::now();
            }
            let stepped = match runner.step() {
                // All logs wait, so that readable ones do not run ahead of the others.
                Err(error) if error.is::<CannotRead>() => match retry.run(READ, || runner.step()) {
                    Err(_) if !self.once && !self.goes_on() => break,
                    stepped => stepped?,
                },
                stepped => stepped?,
            };
            let tell = |news: &mut News| {
                news.unread = Some(Unread::of(directory.unread(&runner.merge)));
                news.skipped_files = directory.skipped(&runner.merge);
            };
            match stepped {
                Stepped::Event(_) => teller.events(once(&runner), 1, tell),
                Stepped::End if self.once => break,
                Stepped::Wait | Stepped::End => {
                    teller.tell(once(&runner), tell);
                    runner.snapshot_if_due()?;
                    std::thread::sleep(poll);
                }
            }
        }
        finish(vec![runner])
    }

    fn follow_topics(&self) -> anyhow::Result<Option<Outcome>> {
        let kafka = &self.config.transport.kafka;
        let cluster = Cluster::new(kafka)?;
        if self.once {
            cluster.reach()?;
        } else if !cluster.await_reach(|| self.goes_on())? {
            return Ok(None);
        }
        if kafka.lanes == Lanes::Partition {
            return self.follow_lanes(&cluster);
        }
        let Some(mut lane) = self.open_patiently(|| self.open_lane(&cluster))? else { return Ok(None) };
        let instance =
            store::instance(&self.config.store.dir).context("cannot read or write the instance ID in store.dir")?;
        let (reader, idle) = self.begin_lane(&cluster, &instance, &mut lane)?;
        tracing::info!(brokers = kafka.brokers, once = self.once, "learning");
        let (mut teller, mut checked) = (Teller::new(self.status), Instant::now());
        while self.goes_on() {
            if checked.elapsed() >= CHECK_EVERY {
                positions::check_ids(&cluster, &lane.places)?;
                checked = Instant::now();
            }
            self.tell_ready(&reader);
            for (place, log) in reader.added(idle) {
                if let Some(place) = self.open_patiently(|| Ok(named(&cluster, place.clone())?))? {
                    lane.merge(place, log);
                }
            }
            let (events, last) = lane.runner.step_some()?;
            let tell = |news: &mut News| tell_kafka(news, &reader, &cluster, once(&lane.runner));
            if events > 0 {
                teller.events(once(&lane.runner), events, tell);
                lane.wake(reader.wait(Duration::ZERO));
                continue;
            }
            if last == Some(Stepped::End) && self.once {
                break;
            }
            teller.tell(once(&lane.runner), tell);
            lane.runner.snapshot_if_due()?;
            lane.wake(reader.wait(IDLE));
        }
        finish(vec![lane.runner]).map(Some)
    }

    /// The lane restored from its snapshot, or a new one.
    fn open_lane(&self, cluster: &Cluster) -> anyhow::Result<OneLane> {
        let message_bytes = self.runtime.block_on(topics::check_params(cluster, self.settings))?;
        let limits = self.runtime.block_on(topics::letter_limits(cluster, self.settings));
        let reader = Arc::new(OnceLock::new());
        let outlet = KafkaOutlet::new(cluster, message_bytes, limits)?.telling(reader.clone());
        let outlet = Arc::new(Mutex::new(outlet));
        let published = ParamsTopic::open(cluster)?.newest()?;
        let store = self.open_store()?;
        check_lanes(&store, |lane| lane == ONE_LANE)?;
        for space in self.settings.sharded().keys() {
            tracing::warn!(
                space = space.as_str(),
                "ignored spaces.SPACE.shards: shards need transport.kafka.lanes = \"partition\""
            );
        }
        let (audit, facts) = (self.config.audit.path(), self.status.facts());
        let outlet_of_runner = Box::new(outlet.clone());
        let retry = self.retry();
        let places = Places {
            store: Some(self.lane_store(&store, ONE_LANE)),
            audit,
            outlet: outlet_of_runner,
            published,
            facts,
            retry,
        };
        let (runner, mut state) = Runner::open(self.settings, &self.config.snapshot, places)?;
        let (places, gaps) = positions::resolve(cluster, &state, None, self.accept_gap)?;
        lock(&outlet).note_gaps(&gaps)?;
        state.positions = positions::of(&places);
        Ok(OneLane { runner, state, places, logs: Vec::new(), reader })
    }

    /// Takes the first snapshot and starts to read.
    fn begin_lane(
        &self,
        cluster: &Cluster,
        instance: &str,
        lane: &mut OneLane,
    ) -> anyhow::Result<(Arc<Reader>, Ending)> {
        if !self.once {
            self.open_patiently(|| Ok(check_alone(cluster, instance)?))?;
        }
        lane.runner.begin(lane.state.clone())?;
        let idle = Ending::Follow { idle: Duration::from_millis(cluster.config.idle_ms) };
        let ends = if self.once { positions::ends(cluster, &lane.places)? } else { Vec::new() };
        let membership =
            if self.once { Membership::Alone } else { Membership::Group { instance: instance.to_owned() } };
        let parser = Arc::new(Parser::new(self.settings));
        let ending = |i: usize| ends.get(i).map_or(idle, |end| Ending::Until(*end));
        let (reader, logs) = Reader::start(cluster, parser, &lane.places, &membership, None, self.accept_gap, ending)?;
        let _ = lane.reader.set(reader.clone());
        for (place, log) in logs {
            lane.merge(place, log);
        }
        Ok((reader, idle))
    }
}

/// All partitions together.
struct OneLane {
    runner: Runner<Partition>,
    state: MergeState,
    /// What is read.
    places: Vec<Place>,
    /// Its logs in the merge.
    logs: Vec<usize>,
    reader: Arc<OnceLock<Arc<Reader>>>,
}

impl OneLane {
    fn wake(&mut self, news: bool) {
        if news {
            self.logs.iter().for_each(|log| self.runner.merge.wake(*log));
        }
    }

    fn merge(&mut self, place: Place, log: Partition) {
        self.logs.push(self.runner.merge.add(place.name, log, Some(place.position), None));
    }
}

/// A partition that was added to its topic while the others were read, with its name in snapshots.
fn named(cluster: &Cluster, mut place: Place) -> Result<Place, Problem> {
    let ids = cluster.topic_ids(&[&place.topic])?;
    place.name = positions::name(&place.topic, &ids, place.partition);
    Ok(place)
}

/// Statistics of the Kafka client, and the lag of these lanes.
pub(super) fn tell_kafka<'r>(
    news: &mut News,
    reader: &Reader,
    cluster: &Cluster,
    runners: impl Iterator<Item = &'r Runner<Partition>>,
) {
    let floors = runners.flat_map(|runner| runner.merge.floors());
    let floors = floors.filter_map(|(name, floor)| Some((positions::parse(name)?, floor))).collect();
    news.lags = reader.lags(&floors);
    news.unreadable = reader.unreadable();
    news.rebalances = reader.rebalances();
    news.broker_errors = cluster.trouble.counts();
}

/// Fails if the store holds an unknown lane.
pub(super) fn check_lanes(store: &Shared<DirStore>, is_ours: impl Fn(&str) -> bool) -> anyhow::Result<()> {
    match generations::lanes(&*store.lock())?.into_iter().find(|lane| !is_ours(lane)) {
        Some(other) => Err(Problem::OtherLanes(other).into()),
        None => Ok(()),
    }
}

/// Fails if the group has another member: a lane has one reader, and a second must not disturb the first.
fn check_alone(cluster: &Cluster, instance: &str) -> Result<(), Problem> {
    match cluster.members()?.into_iter().find(|(client, _)| client != instance) {
        Some((client, host)) => Err(Problem::AnotherInstance(format!("{client} at {host}"))),
        None => Ok(()),
    }
}

/// Fails while a fleet runs.
pub(super) fn check_stopped(cluster: &Cluster) -> Result<(), Problem> {
    match cluster.members()?.first() {
        Some((client, host)) => Err(Problem::FleetRuns(format!("{client} at {host}"))),
        None => Ok(()),
    }
}

pub(super) fn finish<S: Log>(mut runners: Vec<Runner<S>>) -> anyhow::Result<Outcome> {
    runners.iter_mut().try_for_each(Runner::finish)?;
    let out_of_order = runners.iter().map(|runner| runner.merge.out_of_order()).sum();
    let engines: Vec<Engine> = runners.into_iter().map(|runner| runner.engine).collect();
    let counts = Totals::of(&engines).counts;
    tracing::info!(queries = counts.queries(), rewards = counts.rewards(), applied = counts.applied, "stopped");
    Ok(Outcome { engines, out_of_order })
}

impl<S: Log> Runner<S> {
    /// Processes some events: returns how many, and the last result unless more events are ready.
    pub(super) fn step_some(&mut self) -> anyhow::Result<(u64, Option<Stepped>)> {
        for taken in 0..LOOK_EVERY {
            let stepped = self.step()?;
            if !matches!(stepped, Stepped::Event(_)) {
                return Ok((taken, Some(stepped)));
            }
        }
        Ok((LOOK_EVERY, None))
    }
}

/// Reports progress: to the log at intervals, and to the status endpoints.
pub(super) struct Teller<'a> {
    status: &'a Status,
    since: Instant,
    told: Instant,
    took: Duration,
    events: u64,
    /// Backlog: messages, bytes.
    behind: (Option<u64>, Option<u64>),
}

impl<'a> Teller<'a> {
    pub(super) fn new(status: &'a Status) -> Self {
        Self {
            status,
            since: Instant::now(),
            told: Instant::now(),
            took: Duration::ZERO,
            events: 0,
            behind: (None, None),
        }
    }

    pub(super) fn events<'r, S: Log + 'r>(
        &mut self,
        runners: impl Iterator<Item = &'r Runner<S>> + Clone,
        number: u64,
        more: impl Fn(&mut News),
    ) {
        let before = self.events;
        self.events += number;
        if before / LOOK_EVERY == self.events / LOOK_EVERY {
            return;
        }
        self.tell(runners.clone(), more);
        if self.since.elapsed() >= NEWS_EVERY {
            let totals = Totals::of(runners.map(|runner| &runner.engine));
            let rate = self.events as f64 / self.since.elapsed().as_secs_f64();
            tracing::info!(
                events_per_s = rate.round(),
                applied = totals.counts.applied,
                pending = totals.counts.join.queries.pending,
                mean_reward = totals.mean_reward,
                lag = self.behind.0,
                unread_bytes = self.behind.1,
                "learning"
            );
            (self.since, self.events) = (Instant::now(), 0);
        }
    }

    pub(super) fn tell<'r, S: Log + 'r>(
        &mut self,
        runners: impl Iterator<Item = &'r Runner<S>> + Clone,
        more: impl Fn(&mut News),
    ) {
        if self.told.elapsed() >= STATUS_EVERY.max(self.took.div_f64(STATUS_SHARE)) {
            let begun = Instant::now();
            let out_of_order = runners.clone().map(|runner| runner.merge.out_of_order()).sum();
            let mut news = News::of(runners.map(|runner| &runner.engine), out_of_order);
            more(&mut news);
            self.behind = ((!news.lags.is_empty()).then(|| news.lag()), news.unread.as_ref().map(Unread::bytes));
            self.status.tell(news);
            (self.told, self.took) = (Instant::now(), begun.elapsed());
        }
    }
}
