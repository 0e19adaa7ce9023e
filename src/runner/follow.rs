//! The daemon's loop: events as they come, on either transport.

use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::runtime::Handle;

use super::{DEAD_LETTERS_BYTES, Places, Runner, Stepped};
use crate::config::{Config, Lanes, Settings, TransportKind};
use crate::engine::Engine;
use crate::http::learner::{News, Status};
use crate::store;
use crate::transport::Log;
use crate::transport::append::Appender;
use crate::transport::directory::Directory;
use crate::transport::file::AtEnd;
use crate::transport::kafka::cluster::{Cluster, Problem};
use crate::transport::kafka::consumer::{Ending, Membership, Partition, Reader};
use crate::transport::kafka::outlet::KafkaOutlet;
use crate::transport::kafka::params::ParamsTopic;
use crate::transport::kafka::positions::{self, Place};
use crate::transport::kafka::topics;
use crate::transport::params::{Files, ParamsDir};
use crate::wire::events::Parser;

/// What a run is asked to do.
pub struct Run<'a> {
    /// Whether it stops at the present end of its inputs.
    pub once: bool,
    /// Whether messages that are lost are gone on without.
    pub accept_gap: bool,
    /// The configuration.
    pub config: &'a Config,
    /// The same, checked.
    pub settings: &'a Settings,
    /// Set when it is to stop.
    pub stop: &'a AtomicBool,
    /// Where it tells how it goes.
    pub status: &'a Status,
    /// Where what is asked of the brokers runs.
    pub runtime: &'a Handle,
}

/// What a run came to.
pub struct Outcome {
    /// The engine.
    pub engine: Engine,
    /// Events that were further out of order than the window.
    pub out_of_order: u64,
}

/// How often a daemon that is busy says how it goes.
const NEWS_EVERY: Duration = Duration::from_secs(30);

/// How often it tells those who ask.
const STATUS_EVERY: Duration = Duration::from_millis(250);

/// After so many events it looks whether logs that were idle have something.
const LOOK_EVERY: u64 = 64;

impl Run<'_> {
    /// Runs until it is done or told to stop. `None`: it was told to before it had begun.
    pub fn follow(&self) -> anyhow::Result<Option<Outcome>> {
        match self.config.transport.kind {
            TransportKind::File => self.follow_files().map(Some),
            TransportKind::Kafka => self.follow_topics(),
        }
    }

    fn goes_on(&self) -> bool {
        !self.stop.load(Ordering::Relaxed)
    }

    fn follow_files(&self) -> anyhow::Result<Outcome> {
        let file = &self.config.transport.file;
        let poll = Duration::from_millis(file.poll_ms);
        let idle = Duration::from_millis(file.idle_ms);
        let at_end = if self.once { AtEnd::Stop } else { AtEnd::Follow { idle } };
        let cannot_read = || format!("cannot read the logs in {} (transport.file.dir)", file.dir.display());
        let dead_letters = Appender::rotating(&file.dir.join("dead-letters"), "dead-letters", DEAD_LETTERS_BYTES);
        let params = ParamsDir::new(&file.dir.join("params"));
        let published = params.published();
        let outlet = Box::new(Files { dead_letters, params: Some(params) });
        let places =
            Places { store: Some(self.config.store.clone()), audit: self.config.audit.path(), outlet, published };
        let (mut runner, state) = Runner::open(self.settings, &self.config.snapshot, places)?;
        let parser = Arc::new(Parser::new(self.settings));
        let mut directory = Directory::new(&file.dir, parser, at_end, state.positions.clone());
        directory.create().with_context(cannot_read)?;
        runner.begin(state)?;
        directory.scan(&mut runner.merge).with_context(cannot_read)?;
        for log in directory.missing() {
            tracing::warn!(log, "a log that was read before is gone");
        }
        tracing::info!(dir = %file.dir.display(), once = self.once, "learning");
        self.status.set_ready(true);
        let (mut scanned, mut teller) = (Instant::now(), Teller::new(self.status));
        while self.goes_on() {
            if !self.once && scanned.elapsed() >= poll {
                directory.scan(&mut runner.merge).with_context(cannot_read)?;
                scanned = Instant::now();
            }
            match runner.step()? {
                Stepped::Event(_) => teller.event(&runner, |_| ()),
                Stepped::End if self.once => break,
                Stepped::Wait | Stepped::End => {
                    runner.snapshot_if_due()?;
                    teller.tell(&runner, |_| ());
                    std::thread::sleep(poll);
                }
            }
        }
        finish(runner)
    }

    fn follow_topics(&self) -> anyhow::Result<Option<Outcome>> {
        let kafka = &self.config.transport.kafka;
        let cluster = Cluster::new(kafka)?;
        if self.once {
            cluster.reach()?;
        } else if !cluster.await_reach(|| self.goes_on())? {
            return Ok(None);
        }
        topics::check_partitions(&cluster)?;
        anyhow::ensure!(kafka.lanes == Lanes::One, "transport.kafka.lanes = \"partition\" is not there yet");
        let message_bytes = self.runtime.block_on(topics::check_params(&cluster, self.settings))?;
        let letter_bytes = self.settings.events.bytes_max;
        let reader_slot = Arc::new(OnceLock::new());
        let outlet = KafkaOutlet::new(&cluster, message_bytes, letter_bytes)?.telling(reader_slot.clone());
        let places = Places {
            store: Some(self.config.store.clone()),
            audit: self.config.audit.path(),
            outlet: Box::new(outlet),
            published: ParamsTopic::open(&cluster)?.newest()?,
        };
        let (mut runner, mut state) = Runner::open(self.settings, &self.config.snapshot, places)?;
        let (places, gaps) = positions::resolve(&cluster, &state, self.accept_gap)?;
        if !gaps.is_empty() {
            KafkaOutlet::new(&cluster, message_bytes, letter_bytes)?.note_gaps(&gaps)?;
        }
        let instance = store::instance(&self.config.store.dir).context("cannot name this instance in its store")?;
        if !self.once {
            check_alone(&cluster, &instance)?;
        }
        state.positions = places.iter().map(|place| (place.name.clone(), place.position.clone())).collect();
        runner.begin(state)?;
        let membership = if self.once { Membership::Alone } else { Membership::Group { instance } };
        let parser = Arc::new(Parser::new(self.settings));
        let idle = Ending::Follow { idle: Duration::from_millis(kafka.idle_ms) };
        let mut ends = Vec::new();
        if self.once {
            for place in &places {
                ends.push(cluster.watermarks(&place.topic, place.partition)?.1);
            }
        }
        let ending = |i: usize| ends.get(i).map_or(idle, |end| Ending::Until(*end));
        let (reader, logs) = Reader::start(&cluster, parser, &places, &membership, ending)?;
        let _ = reader_slot.set(reader.clone());
        let mut all = Vec::new();
        for (place, log) in logs {
            all.push(runner.merge.add(place.name, log, Some(place.position), None));
        }
        tracing::info!(brokers = kafka.brokers, partitions = all.len(), once = self.once, "learning");
        let tell = |news: &mut News| {
            news.lags = reader.lags();
            news.rebalances = reader.rebalances();
            news.broker_errors = cluster.trouble.counts();
        };
        let (mut teller, mut events) = (Teller::new(self.status), 0_u64);
        while self.goes_on() {
            match runner.step()? {
                Stepped::Event(_) => {
                    teller.event(&runner, tell);
                    events += 1;
                    if events.is_multiple_of(LOOK_EVERY) {
                        reader.wait(&mut runner.merge, &all, Duration::ZERO);
                    }
                }
                Stepped::End if self.once => break,
                Stepped::Wait | Stepped::End => {
                    runner.snapshot_if_due()?;
                    self.status.set_ready(reader.is_assigned());
                    teller.tell(&runner, tell);
                    for (place, log) in reader.added(idle) {
                        all.push(add_partition(&cluster, &mut runner, place, log)?);
                    }
                    reader.wait(&mut runner.merge, &all, Duration::from_millis(20));
                }
            }
        }
        finish(runner).map(Some)
    }
}

/// A partition that turned up while others were read.
fn add_partition(
    cluster: &Cluster,
    runner: &mut Runner<Partition>,
    place: Place,
    log: Partition,
) -> Result<usize, Problem> {
    let ids = cluster.topic_ids(&[&place.topic])?;
    let name = positions::name(&place.topic, &ids, place.partition);
    Ok(runner.merge.add(name, log, Some(place.position), None))
}

/// One lane has one reader: whoever comes second must not disturb the first.
fn check_alone(cluster: &Cluster, instance: &str) -> Result<(), Problem> {
    match cluster.members()?.into_iter().find(|(client, _)| client != instance) {
        Some((client, host)) => Err(Problem::AnotherInstance(format!("{client} at {host}"))),
        None => Ok(()),
    }
}

fn finish<S: Log>(mut runner: Runner<S>) -> anyhow::Result<Outcome> {
    runner.finish()?;
    let counts = runner.engine.counts();
    tracing::info!(queries = counts.queries(), rewards = counts.rewards(), applied = counts.applied, "stopped");
    Ok(Outcome { out_of_order: runner.merge.out_of_order(), engine: runner.engine })
}

/// Tells how it goes: to the log now and then, and to those who ask.
struct Teller<'a> {
    status: &'a Status,
    since: Instant,
    told: Instant,
    events: u64,
}

impl<'a> Teller<'a> {
    fn new(status: &'a Status) -> Self {
        Self { status, since: Instant::now(), told: Instant::now(), events: 0 }
    }

    fn event<S: Log>(&mut self, runner: &Runner<S>, more: impl Fn(&mut News)) {
        self.events += 1;
        if !self.events.is_multiple_of(LOOK_EVERY) {
            return;
        }
        self.tell(runner, more);
        if self.since.elapsed() >= NEWS_EVERY {
            let counts = runner.engine.counts();
            let rate = self.events as f64 / self.since.elapsed().as_secs_f64();
            tracing::info!(
                events_per_s = rate.round(),
                applied = counts.applied,
                pending = counts.join.queries.pending,
                mean_reward = runner.engine.mean_reward(),
                "learning"
            );
            (self.since, self.events) = (Instant::now(), 0);
        }
    }

    fn tell<S: Log>(&mut self, runner: &Runner<S>, more: impl Fn(&mut News)) {
        if self.told.elapsed() >= STATUS_EVERY {
            let mut news = News::of(&runner.engine, runner.merge.out_of_order());
            more(&mut news);
            self.status.tell(news);
            self.told = Instant::now();
        }
    }
}
