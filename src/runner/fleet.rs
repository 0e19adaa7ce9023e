//! `learn` on topics: as one lane that has all partitions, or with lanes that many instances share.
//!
//! Where lanes are shared, the polling thread of the consumer announces assignments and revocations. Each lane is opened and
//! closed on a thread of its own, so a lane whose state takes long to read, or whose commit waits for the brokers, delays no
//! other. A revoked lane is closed with a last snapshot. A lost lane, which another instance may own already, is dropped: the
//! new owner resumes from the last committed snapshot.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::claim::{Broker, Claims, Disk, Opened, is_whole, lane_name, lane_path};
use super::commit::Keeper;
use super::error::{Doing, LaneError, Result};
use super::follow::{Outcome, Run, check_lanes, finish};
use super::lane::{Lane, Places};
use super::merger::{Merger, Merging};
use super::slots::{Closed, Feed, Running, Slots, Turn};
use crate::config::Topics;
use crate::event::Name;
use crate::merge::{Merge, MergeState};
use crate::router::Params;
use crate::snapshot::SharedHead;
use crate::state::{LaneStore, LocalLane, Retention};
use crate::store::{self, DirStore, ONE_LANE, Shared};
use crate::telemetry::News;
use crate::transport::append::Appender;
use crate::transport::kafka::cluster::{Cluster, Member, Problem};
use crate::transport::kafka::consumer::{Ending, Logs, Membership, Partition, ReadOptions, Reader, Rebalance};
use crate::transport::kafka::homes::{Spread, partition_of};
use crate::transport::kafka::outlet::{KafkaOutlet, LetterLimits};
use crate::transport::kafka::params;
use crate::transport::kafka::positions::{self, Place};
use crate::transport::kafka::standby::Standby;
use crate::transport::kafka::state::{self, Entries};
use crate::transport::kafka::topics;
use crate::transport::kafka::transaction::KafkaProducers;
use crate::transport::{Bell, Lines, lock};
use crate::wire::events::Parser;

/// Number of lanes opened concurrently: most of the time is spent waiting for the brokers.
const OPENINGS: usize = 8;

/// Interval at which the brokers are asked whether topics and group have changed.
const CHECK_EVERY: Duration = Duration::from_secs(20);

/// Slack beyond the session timeout until a dead member is gone from the group.
const SESSION_SLACK: Duration = Duration::from_secs(5);

/// How long a stopping instance waits for its lanes, beyond the delivery timeout of their messages.
const CLOSE_SLACK: Duration = Duration::from_secs(10);

/// Interval at which waiting threads look again.
const LOOK_EVERY: Duration = Duration::from_millis(20);

impl Run<'_> {
    /// Runs all partitions as one lane.
    pub(super) fn follow_one(&self, cluster: &Cluster) -> Result<Option<Outcome>> {
        let store = self.open_store()?;
        let instance = self.instance()?;
        let Some((mut lane, state, places)) = self.open_patiently(|| self.open_one(cluster, &store))? else {
            return Ok(None);
        };
        if !self.once && !self.await_place(cluster, &instance, |other| Problem::AnotherInstance(other.to_string()))? {
            return Ok(None);
        }
        lane.begin(state)?;
        let membership = if self.once { Membership::Alone } else { Membership::Group { instance: instance.clone() } };
        let bell = Arc::new(Bell::default());
        let (reader, logs) = self.read(cluster, &places, &membership, None, &bell)?;
        let mut running = Running { lane, feed: TopicFeed::new(&reader, &bell, self.idle(cluster)) };
        running.add(logs);
        let slots = Slots::of([(0, running)], self.retry());
        tracing::info!(brokers = cluster.config.brokers, once = self.once, "learning");
        let (asked, of_group) = (cluster.clone(), reader.clone());
        let mut doubles = Doubles::default();
        let metadata = Watch::start(move || {
            positions::check_ids(&asked, &places)?;
            Ok(doubles.check(&asked, &of_group, &instance)?)
        })?;
        let tend = &mut |_| {
            self.set_ready(&reader, true);
            metadata.check()
        };
        let complete = |lanes: &[(i32, &Running<TopicFeed>)], news: &mut News| report(lanes, news, &reader, cluster);
        self.drive(&slots, &bell, tend, &complete)?;
        finish(&slots).map(Some)
    }

    /// The lane restored from its snapshot, or a new one; with the positions to resume from.
    fn open_one(
        &self,
        cluster: &Cluster,
        store: &Shared<DirStore>,
    ) -> Result<(Lane<Partition>, MergeState, Vec<Place>)> {
        let message_bytes = self.runtime.block_on(topics::check_params(cluster, self.settings))?;
        let limits = self.runtime.block_on(topics::letter_limits(cluster, self.settings));
        let published = params::newest(cluster)?;
        check_lanes(store, |lane| lane == ONE_LANE)?;
        for space in self.settings.sharded().keys() {
            tracing::warn!(
                space = space.as_str(),
                "ignored spaces.SPACE.shards: shards need transport.kafka.lanes = \"partition\""
            );
        }
        let places = Places {
            store: Some(self.lane_store(store, ONE_LANE)),
            audit: self.audit(),
            outlet: Box::new(KafkaOutlet::new(cluster, message_bytes, limits)?),
            published,
            facts: self.status.facts(),
            retry: self.retry(),
        };
        let (mut lane, mut state) = Lane::open(self.settings, &self.config.snapshot, places, Keeper::start)?;
        lane.merge.set_hold(self.hold());
        let (places, gaps) = positions::resolve(cluster, &state, None, self.accept_gap)?;
        if !gaps.is_empty() {
            KafkaOutlet::new(cluster, message_bytes, limits)?.note_gaps(&gaps)?;
        }
        state.positions = positions::of(&places);
        Ok((lane, state, places))
    }

    /// Runs the lanes that the group assigns; with `--once` all lanes, alone.
    pub(super) fn follow_fleet(&self, cluster: &Cluster) -> Result<Option<Outcome>> {
        let store = self.open_store()?;
        let Some(claims) = self.open_patiently(|| self.claims(cluster, &store))? else { return Ok(None) };
        let (claims, bell) = (Arc::new(claims), Arc::new(Bell::default()));
        if self.once {
            return self.fleet_once(cluster, &claims, &bell).map(Some);
        }
        let slots = Slots::new(claims.lanes(), self.retry());
        let instance = claims.instance.clone();
        // Any number of other instances may run.
        let others = |other: &Member| (other.instance == instance).then(|| same_instance(other));
        if !self.await_members(cluster, &instance, others)? {
            return Ok(None);
        }
        let (owner, inbox) = channel();
        let membership = Membership::Fleet { instance: instance.clone(), owner };
        let spread = Some(Spread::new(self.settings, claims.partitions));
        let (reader, _) = self.read(cluster, &[], &membership, spread, &bell)?;
        let unsettled = claims.lanes().filter(|lane| claims.disk.has_audit(*lane)).collect();
        let fleet = Arc::new(Fleet {
            claims,
            slots,
            reader,
            bell,
            idle: self.idle(cluster),
            places: Mutex::default(),
            unsettled: Mutex::new(unsettled),
            openings: Openings::default(),
            jobs: AtomicUsize::new(0),
            hand_overs: AtomicU64::new(0),
            failed: Mutex::default(),
        });
        fleet.settle();
        tracing::info!(brokers = cluster.config.brokers, instance, "learning");
        let metadata = {
            let (fleet, mut doubles) = (fleet.clone(), Doubles::default());
            Watch::start(move || fleet.check(&mut doubles))?
        };
        let mut mergers = BTreeMap::new();
        let tend = &mut |taken: Vec<i32>| {
            inbox.try_iter().try_for_each(|rebalance| fleet.rebalance(rebalance))?;
            fleet.drop_taken(taken)?;
            self.merge_shards(&fleet, cluster, &mut mergers)?;
            self.set_ready(&fleet.reader, fleet.is_open());
            metadata.check()?;
            lock(&fleet.failed).take().map_or(Ok(()), Err)
        };
        let complete = |lanes: &[(i32, &Running<TopicFeed>)], news: &mut News| {
            report(lanes, news, &fleet.reader, cluster);
            news.lanes = lanes.iter().map(|(lane, _)| *lane).collect();
            news.hand_overs = fleet.hand_overs.load(Ordering::Relaxed);
        };
        let driven = self.drive(&fleet.slots, &fleet.bell, tend, &complete);
        drop((metadata, mergers, inbox));
        driven?;
        fleet.close_all(Duration::from_millis(cluster.config.delivery_timeout_ms) + CLOSE_SLACK)?;
        fleet.settle();
        Ok(Some(Outcome { engines: Vec::new(), out_of_order: 0 }))
    }

    /// Runs all lanes up to their current end, without other members.
    fn fleet_once(
        &self,
        cluster: &Cluster,
        claims: &Arc<Claims<KafkaBroker, StoreDisk>>,
        bell: &Arc<Bell>,
    ) -> Result<Outcome> {
        check_stopped(cluster)?;
        let lanes: Vec<i32> = claims.lanes().collect();
        let mut opened = BTreeMap::new();
        for some in lanes.chunks(OPENINGS) {
            let open = |lane: i32| claims.open::<Partition>(lane, &Arc::default());
            std::thread::scope(|scope| {
                let threads: Vec<_> = some.iter().map(|lane| (*lane, scope.spawn(move || open(*lane)))).collect();
                for (lane, thread) in threads {
                    let panicked = |_| LaneError::last(format!("the thread that takes over lane {lane} panicked"));
                    opened.insert(lane, thread.join().map_err(panicked)??);
                }
                Ok::<_, LaneError>(())
            })?;
        }
        let places: Vec<Place> = opened.values().flat_map(|opened| opened.places.clone()).collect();
        let spread = Some(Spread::new(self.settings, claims.partitions));
        let (reader, mut logs) = self.read(cluster, &places, &Membership::Alone, spread, bell)?;
        let open = opened.into_iter().map(|(number, Opened { lane, .. })| {
            let mut running = Running { lane, feed: TopicFeed::new(&reader, bell, self.idle(cluster)) };
            running.add(logs.extract_if(.., |(place, _)| place.partition == number).collect());
            (number, running)
        });
        let slots = Slots::of(open, self.retry());
        let complete = |lanes: &[(i32, &Running<TopicFeed>)], news: &mut News| report(lanes, news, &reader, cluster);
        self.drive(&slots, bell, &mut |_| Ok(()), &complete)?;
        let outcome = finish(&slots)?;
        self.settings.sharded().into_keys().try_for_each(|space| self.merging(cluster, claims, space).once())?;
        Ok(outcome)
    }

    /// What all lanes of this instance share.
    fn claims(&self, cluster: &Cluster, store: &Shared<DirStore>) -> Result<Claims<KafkaBroker, StoreDisk>> {
        let (partitions, _) = topics::check_partitions(cluster)?;
        let (message_bytes, limits) = self.runtime.block_on(async {
            topics::check_lanes(cluster, self.settings, partitions).await?;
            let message_bytes = topics::check_params(cluster, self.settings).await?;
            Ok::<_, Problem>((message_bytes, topics::letter_limits(cluster, self.settings).await))
        })?;
        let all: Vec<i32> = (0..partitions as i32).collect();
        let heads = state::heads(cluster, &all)?;
        check_lanes(store, |lane| all.iter().any(|known| lane == lane_name(*known)))?;
        let kafka = &cluster.config;
        let standby = if kafka.standby && !self.once {
            Some(Standby::start(cluster, partitions, kafka.standby_bytes_max)?)
        } else {
            None
        };
        let message_bytes = message_bytes.max(self.settings.events.bytes_max + (64 << 10));
        let cluster = cluster.clone();
        let broker = KafkaBroker { cluster, message_bytes, limits, standby, accept_gap: self.accept_gap };
        let retention = (&self.config.snapshot).into();
        let claims = Claims {
            broker: Arc::new(broker),
            disk: StoreDisk { store: store.clone(), retention, audit: self.config.audit.path() },
            settings: self.settings.clone(),
            cadence: self.config.snapshot.clone(),
            hold: self.hold(),
            instance: self.instance()?,
            partitions,
            limits,
            facts: self.status.facts(),
            retry: self.retry(),
            keeper: Keeper::start,
        };
        heads.values().try_for_each(|head| claims.check_partitions(head))?;
        Ok(claims)
    }

    fn instance(&self) -> Result<String> {
        let doing = || "cannot read or write the instance ID in store.dir".to_owned();
        store::instance(&self.config.store.dir).doing(doing)
    }

    fn idle(&self, cluster: &Cluster) -> Ending {
        Ending::Follow { idle: Duration::from_millis(cluster.config.idle_ms) }
    }

    /// Starts to read; with `--once` up to the current ends.
    fn read(
        &self,
        cluster: &Cluster,
        places: &[Place],
        membership: &Membership,
        spread: Option<Spread>,
        bell: &Arc<Bell>,
    ) -> Result<(Arc<Reader>, Logs)> {
        let ends = if self.once { positions::ends(cluster, places)? } else { Vec::new() };
        let ending = |i: usize| ends.get(i).map_or(self.idle(cluster), |end| Ending::Until(*end));
        let parser = Arc::new(Parser::new(self.settings));
        let options =
            ReadOptions { parser, spread, accept_gap: self.accept_gap, bell: bell.clone(), facts: self.status.facts() };
        Ok(Reader::start(cluster, options, places, membership, ending)?)
    }

    /// Waits until the only member of the group may be this instance; false if the run is stopped before.
    fn await_place(&self, cluster: &Cluster, instance: &str, other: impl Fn(&Member) -> Problem) -> Result<bool> {
        self.await_members(cluster, instance, |member| {
            Some(if member.instance == instance { same_instance(member) } else { other(member) })
        })
    }

    /// Fails if a member of the group forbids this instance. A member with the name of this instance may be the same one before
    /// a crash: it gets the time of its session to disappear. False if the run is stopped before.
    fn await_members(
        &self,
        cluster: &Cluster,
        instance: &str,
        forbids: impl Fn(&Member) -> Option<Problem>,
    ) -> Result<bool> {
        let until = Instant::now() + cluster.session() + SESSION_SLACK;
        let mut is_logged = false;
        while self.goes_on() {
            let Some(members) = self.open_patiently(|| Ok(cluster.members()?))? else { return Ok(false) };
            let forbidden = members.iter().filter_map(|member| Some((member, forbids(member)?)));
            // Others first: they stay.
            let Some((member, problem)) = forbidden.min_by_key(|(member, _)| member.instance == instance) else {
                return Ok(true);
            };
            if member.instance != instance || Instant::now() >= until {
                return Err(problem.into());
            }
            if !std::mem::replace(&mut is_logged, true) {
                tracing::info!(
                    instance,
                    host = member.host,
                    "a member of the group has the name of this instance; waiting for its session to end"
                );
            }
            std::thread::sleep(LOOK_EVERY * 10);
        }
        Ok(false)
    }

    /// Reports whether everything assigned is read, and if not, the batch at which a partition has stopped.
    fn set_ready(&self, reader: &Reader, is_open: bool) {
        let stopped = reader.unreadable();
        self.status.set_ready(reader.is_assigned() && is_open && stopped.is_empty());
        self.status.set_stopped(stopped.first().map(ToString::to_string));
    }

    /// Merges the shards of the spaces whose home lane is here, and of no others.
    fn merge_shards(&self, fleet: &Fleet, cluster: &Cluster, mergers: &mut BTreeMap<Name, Merger>) -> Result<()> {
        for space in self.settings.sharded().into_keys() {
            if !lock(&fleet.places).contains_key(&partition_of(&space, fleet.claims.partitions)) {
                mergers.remove(&space);
            } else if let Entry::Vacant(vacant) = mergers.entry(space) {
                let merging = self.merging(cluster, &fleet.claims, vacant.key().clone());
                vacant.insert(Merger::start(merging)?);
            }
        }
        Ok(())
    }

    fn merging(&self, cluster: &Cluster, claims: &Claims<KafkaBroker, StoreDisk>, space: Name) -> Merging {
        Merging {
            cluster: cluster.clone(),
            settings: self.settings.clone(),
            space,
            partitions: claims.partitions,
            message_bytes: claims.broker.message_bytes,
            every: Duration::from_millis(self.config.snapshot.every_ms),
        }
    }
}

/// The lanes that the group assigns to this instance.
struct Fleet {
    claims: Arc<Claims<KafkaBroker, StoreDisk>>,
    slots: Slots<TopicFeed>,
    reader: Arc<Reader>,
    bell: Arc<Bell>,
    idle: Ending,
    /// What open lanes read.
    places: Mutex<BTreeMap<i32, Vec<Place>>>,
    /// Lanes of other instances whose local log of applied requests may hold uncommitted lines.
    unsettled: Mutex<BTreeSet<i32>>,
    openings: Openings,
    /// Openings and closings under way.
    jobs: AtomicUsize,
    hand_overs: AtomicU64,
    failed: Mutex<Option<LaneError>>,
}

impl Fleet {
    /// Runs a job for a lane on a thread of its own.
    fn spawn(self: &Arc<Self>, lane: i32, job: impl FnOnce(&Self) -> Result<()> + Send + 'static) -> Result<()> {
        let fleet = self.clone();
        self.jobs.fetch_add(1, Ordering::SeqCst);
        let run = move || {
            if let Err(error) = job(&fleet) {
                lock(&fleet.failed).get_or_insert(error);
            }
            fleet.jobs.fetch_sub(1, Ordering::SeqCst);
        };
        let spawned = std::thread::Builder::new().name(format!("lane-{lane}")).spawn(run);
        if spawned.is_err() {
            self.jobs.fetch_sub(1, Ordering::SeqCst);
        }
        spawned?;
        Ok(())
    }

    fn rebalance(self: &Arc<Self>, rebalance: Rebalance) -> Result<()> {
        match rebalance {
            Rebalance::Assigned(lanes) => lanes.into_iter().try_for_each(|lane| {
                let turn = self.slots.assign(lane);
                self.spawn(lane, move |fleet| fleet.open(lane, &turn))
            }),
            Rebalance::Revoked { lanes, lost } => {
                lanes.into_iter().try_for_each(|lane| self.spawn_close(lane, lost).map(drop))
            }
        }
    }

    /// Returns whether the lane was assigned.
    fn spawn_close(self: &Arc<Self>, lane: i32, lost: bool) -> Result<bool> {
        let closing = self.slots.end_turn(lane, lost);
        let was_assigned = closing.is_some();
        self.spawn(lane, move |fleet| {
            let closed = closing.map_or(Ok(Closed::Absent), |turn| fleet.slots.close(lane, &turn, lost));
            fleet.reader.release(lane);
            fleet.note_closed(lane, closed?);
            Ok(())
        })?;
        Ok(was_assigned)
    }

    /// Opens a lane and reads it, unless it is revoked before.
    fn open(&self, lane: i32, turn: &Turn) -> Result<()> {
        let begun = Instant::now();
        let open = || {
            let _opening = self.openings.begin(turn);
            let Opened { lane: mut opened, places } = self.claims.open(lane, turn.given_up())?;
            let mut feed = TopicFeed::new(&self.reader, &self.bell, self.idle);
            for place in &places {
                let log = self.reader.open(place, self.idle);
                feed.add(&mut opened.merge, place.clone(), log);
            }
            lock(&self.places).insert(lane, places);
            Ok(Running { lane: opened, feed })
        };
        match self.slots.open(lane, turn, open) {
            Ok(true) => {
                lock(&self.unsettled).remove(&lane);
                self.hand_overs.fetch_add(1, Ordering::Relaxed);
                self.reader.read_lane(lane);
                tracing::info!(lane, ms = begun.elapsed().as_millis(), "lane opened");
                Ok(())
            }
            Ok(false) => {
                lock(&self.places).remove(&lane);
                self.claims.broker.released(lane);
                Ok(())
            }
            Err(error) if error.is_taken() => {
                tracing::warn!(lane, "another instance took over the lane while it was opened; rejoining the group");
                self.claims.broker.released(lane);
                self.reader.rejoin();
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    fn note_closed(&self, lane: i32, closed: Closed) {
        if closed == Closed::Absent {
            return;
        }
        lock(&self.places).remove(&lane);
        self.claims.broker.released(lane);
        match closed {
            Closed::Dropped => {
                tracing::warn!(lane, "dropped lane; its new owner resumes from the last committed snapshot");
                lock(&self.unsettled).insert(lane);
            }
            _ => tracing::info!(lane, "lane released"),
        }
    }

    /// Drops lanes that other instances have taken over, and rejoins the group.
    fn drop_taken(self: &Arc<Self>, lanes: Vec<i32>) -> Result<()> {
        for lane in lanes {
            // A worker may report a lane again before it is closed.
            if self.spawn_close(lane, true)? {
                tracing::warn!(lane, "another instance took over the lane; rejoining the group");
                self.reader.rejoin();
            }
        }
        Ok(())
    }

    /// Whether all assigned lanes are open.
    fn is_open(&self) -> bool {
        self.jobs.load(Ordering::SeqCst) == 0
    }

    /// Closes all lanes, each with a last snapshot. Abandons those that take longer than this.
    fn close_all(self: &Arc<Self>, within: Duration) -> Result<()> {
        let lanes = self.slots.assigned();
        lanes.iter().try_for_each(|lane| self.spawn_close(*lane, false).map(drop))?;
        let begun = Instant::now();
        while self.jobs.load(Ordering::SeqCst) > 0 && begun.elapsed() < within {
            std::thread::sleep(LOOK_EVERY);
        }
        if self.jobs.load(Ordering::SeqCst) > 0 {
            let problem =
                "lanes could not be closed in time: the brokers do not answer; their last snapshots are intact";
            return Err(LaneError::last(problem));
        }
        tracing::info!(?lanes, "stopped");
        lock(&self.failed).take().map_or(Ok(()), Err)
    }

    /// Asks the brokers whether topics and group are still what the lanes were opened for.
    fn check(&self, doubles: &mut Doubles) -> Result<()> {
        let cluster = &self.claims.broker.cluster;
        let places: Vec<Place> = lock(&self.places).values().flatten().cloned().collect();
        positions::check_ids(cluster, &places)?;
        let (topic, before) = (&cluster.config.topics.queries, self.claims.partitions);
        // Ignored while no broker answers.
        if let Ok(now) = cluster.partitions(topic)
            && now != before
        {
            return Err(Problem::MorePartitions { topic: topic.clone(), before, now }.into());
        }
        self.settle();
        Ok(doubles.check(cluster, &self.reader, &self.claims.instance)?)
    }

    /// Truncates logs of applied requests to their committed length, for lanes that other instances took over. Retries
    /// later if the length is unknown.
    fn settle(&self) {
        let is_elsewhere = |lane: &i32| !lock(&self.places).contains_key(lane);
        let lanes: Vec<i32> = lock(&self.unsettled).iter().copied().filter(is_elsewhere).collect();
        if lanes.is_empty() || self.claims.disk.audit.is_none() {
            return;
        }
        let settle = |heads: BTreeMap<i32, SharedHead>| {
            heads.iter().try_for_each(|(lane, head)| {
                if self.claims.settle(*lane, head)? {
                    lock(&self.unsettled).remove(lane);
                }
                Ok(())
            })
        };
        let heads = self.claims.broker.heads(&lanes).map_err(LaneError::from);
        if let Err(error) = heads.and_then(settle) {
            tracing::warn!(%error, "cannot truncate audit.applied_log; retrying");
        }
    }
}

/// Bounds the number of lanes opened concurrently.
#[derive(Default)]
struct Openings {
    number: Mutex<usize>,
    ended: Bell,
}

impl Openings {
    /// Waits until there is room, or until the turn is over.
    fn begin(&self, turn: &Turn) -> Opening<'_> {
        loop {
            let rings = self.ended.rings();
            let mut number = lock(&self.number);
            if *number < OPENINGS || turn.is_over() {
                *number += 1;
                return Opening(self);
            }
            drop(number);
            self.ended.wait(rings, LOOK_EVERY);
        }
    }
}

struct Opening<'a>(&'a Openings);

impl Drop for Opening<'_> {
    fn drop(&mut self) {
        *lock(&self.0.number) -= 1;
        self.0.ended.ring();
    }
}

/// A thread that asks the brokers at intervals, until it is dropped.
struct Watch {
    shared: Arc<Watched>,
}

#[derive(Default)]
struct Watched {
    over: AtomicBool,
    failed: Mutex<Option<LaneError>>,
}

impl Watch {
    fn start(mut check: impl FnMut() -> Result<()> + Send + 'static) -> Result<Self> {
        let shared = Arc::new(Watched::default());
        let seen = shared.clone();
        // Not joined: it may wait for a broker that does not answer.
        std::thread::Builder::new().name("metadata".to_owned()).spawn(move || {
            let mut checked = Instant::now();
            while !seen.over.load(Ordering::Relaxed) {
                if checked.elapsed() >= CHECK_EVERY {
                    match check() {
                        Ok(()) => {}
                        Err(LaneError::Transient(error)) => {
                            tracing::debug!(error = format!("{error:#}"), "cannot check topics and group; retrying")
                        }
                        Err(error) => drop(lock(&seen.failed).get_or_insert(error)),
                    }
                    checked = Instant::now();
                }
                std::thread::sleep(5 * LOOK_EVERY);
            }
        })?;
        Ok(Self { shared })
    }

    /// Fails if a check has failed.
    fn check(&self) -> Result<()> {
        lock(&self.shared.failed).take().map_or(Ok(()), Err)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
    }
}

/// Partitions of topics, as a feed of a lane.
pub(super) struct TopicFeed {
    reader: Arc<Reader>,
    bell: Arc<Bell>,
    rings: u64,
    idle: Ending,
    /// Its logs in the merge.
    logs: Vec<usize>,
}

impl TopicFeed {
    fn new(reader: &Arc<Reader>, bell: &Arc<Bell>, idle: Ending) -> Self {
        Self { reader: reader.clone(), bell: bell.clone(), rings: 0, idle, logs: Vec::new() }
    }

    fn add(&mut self, merge: &mut Merge<Partition>, place: Place, log: Partition) {
        self.logs.push(merge.add(place.name, log, Some(place.position), None));
    }
}

impl Running<TopicFeed> {
    fn add(&mut self, logs: Logs) {
        logs.into_iter().for_each(|(place, log)| self.feed.add(&mut self.lane.merge, place, log));
    }
}

impl Feed for TopicFeed {
    type Log = Partition;

    fn refresh(&mut self, merge: &mut Merge<Partition>) -> Result<()> {
        let rings = self.bell.rings();
        if std::mem::replace(&mut self.rings, rings) != rings {
            self.logs.iter().for_each(|log| merge.wake(*log));
            for (place, log) in self.reader.added(self.idle) {
                self.add(merge, place, log);
            }
        }
        Ok(())
    }

    fn reached(&mut self, positions: &MergeState) {
        self.reader.commit(positions);
    }
}

/// Statistics of the Kafka client, and the lag of these lanes.
fn report(lanes: &[(i32, &Running<TopicFeed>)], news: &mut News, reader: &Reader, cluster: &Cluster) {
    let floors = lanes.iter().flat_map(|(_, running)| running.lane.merge.floors());
    let floors = floors.filter_map(|(name, floor)| Some((positions::parse(name)?, floor))).collect();
    news.lags = reader.lags(&floors);
    news.unreadable = reader.unreadable();
    news.rebalances = reader.rebalances();
    news.broker_errors = cluster.trouble.counts();
}

/// The real brokers.
pub(super) struct KafkaBroker {
    pub cluster: Cluster,
    /// Maximum message size.
    pub message_bytes: usize,
    limits: LetterLimits,
    /// Standby copies of the lanes of other instances, if enabled.
    standby: Option<Standby>,
    accept_gap: bool,
}

impl Broker for KafkaBroker {
    type Producers = KafkaProducers;

    fn topics(&self) -> &Topics {
        &self.cluster.config.topics
    }

    fn producers(&self, lane: i32) -> KafkaProducers {
        KafkaProducers::new(&self.cluster, &lane_name(lane), self.message_bytes, Some(self.limits))
    }

    fn state(&self, lane: i32) -> Result<Entries, Problem> {
        if let Some((entries, next)) = self.standby.as_ref().and_then(|standby| standby.take(lane)) {
            let entries = state::read(&self.cluster, lane, entries, next)?;
            if is_whole(&self.cluster.config.topics.snapshots, lane, &entries) {
                return Ok(entries);
            }
            tracing::info!(lane, "standby copy of the lane is incomplete; reading it from the topic");
        }
        state::read(&self.cluster, lane, Entries::new(), 0)
    }

    fn heads(&self, lanes: &[i32]) -> Result<BTreeMap<i32, SharedHead>, Problem> {
        state::heads(&self.cluster, lanes)
    }

    fn published(&self) -> Result<Vec<Params>, Problem> {
        params::newest(&self.cluster)
    }

    fn places(&self, lane: i32, state: &MergeState) -> Result<Vec<Place>, Problem> {
        let (places, gaps) = positions::resolve(&self.cluster, state, Some(lane), self.accept_gap)?;
        if !gaps.is_empty() {
            KafkaOutlet::new(&self.cluster, self.message_bytes, self.limits)?.note_gaps(&gaps)?;
        }
        Ok(places)
    }

    fn released(&self, lane: i32) {
        if let Some(standby) = &self.standby {
            standby.give_back(lane);
        }
    }
}

/// The real disk.
pub(super) struct StoreDisk {
    store: Shared<DirStore>,
    retention: Retention,
    /// Path of the log of applied requests; each lane has a file of its own.
    audit: Option<PathBuf>,
}

impl StoreDisk {
    fn has_audit(&self, lane: i32) -> bool {
        self.audit.as_deref().is_some_and(|path| lane_path(path, lane).exists())
    }
}

impl Disk for StoreDisk {
    type Store = Shared<DirStore>;

    fn lane(&self, lane: &str) -> LocalLane {
        LaneStore::new(self.store.clone(), lane, self.retention)
    }

    fn audit(&self, lane: i32) -> Option<Box<dyn Lines>> {
        let path = lane_path(self.audit.as_deref()?, lane);
        Some(Box::new(Appender::new(&path)))
    }
}

/// Fails while a fleet runs.
pub(super) fn check_stopped(cluster: &Cluster) -> Result<(), Problem> {
    match cluster.members()?.first() {
        Some(member) => Err(Problem::FleetRuns(member.to_string())),
        None => Ok(()),
    }
}

/// Members of the group that have the name of this instance: copies of it, or a membership that it has lost. The broker lists
/// the latter until its session ends, so only a member that stays is a copy.
#[derive(Default)]
struct Doubles {
    /// When each was first seen, and in how many checks since.
    seen: BTreeMap<String, (Instant, u32)>,
}

impl Doubles {
    /// Number of checks that must find a member. The brokers may have been gone between two of them, and with them the end of
    /// its session; so two are too few.
    const CHECKS: u32 = 3;

    fn check(&mut self, cluster: &Cluster, reader: &Reader, instance: &str) -> Result<(), Problem> {
        let (own, members) = (reader.member_id(), cluster.members()?);
        let copy = self.find(&members, &own, instance, Instant::now(), cluster.session() + SESSION_SLACK);
        copy.map_or(Ok(()), |copy| Err(same_instance(copy)))
    }

    /// A copy because of which this instance has to stop: of two that started at the same moment only one does. None before the
    /// copy was there for `patience`.
    fn find<'m>(
        &mut self,
        members: &'m [Member],
        own: &str,
        instance: &str,
        now: Instant,
        patience: Duration,
    ) -> Option<&'m Member> {
        let is_present = members.iter().any(|member| member.id == own);
        let earlier = |member: &&Member| is_present && member.instance == instance && *member.id < *own;
        let earlier: Vec<&Member> = members.iter().filter(earlier).collect();
        self.seen.retain(|id, _| earlier.iter().any(|member| member.id == *id));
        earlier.into_iter().find(|member| {
            let (since, checks) = self.seen.entry(member.id.clone()).or_insert((now, 0));
            *checks += 1;
            *checks >= Self::CHECKS && now.duration_since(*since) >= patience
        })
    }
}

fn same_instance(member: &Member) -> Problem {
    Problem::SameInstance { instance: member.instance.clone(), host: member.host.clone() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(instance: &str, id: &str) -> Member {
        Member { instance: instance.to_owned(), host: "/127.0.0.1".to_owned(), id: id.to_owned() }
    }

    #[test]
    fn a_copy_that_stays_is_found_and_a_lost_membership_is_not() {
        let start = Instant::now();
        let check = |doubles: &mut Doubles, ids: &[&str], own: &str, at_s: u64| {
            let members: Vec<Member> = ids.iter().map(|id| member("i", id)).chain([member("j", "0")]).collect();
            let (now, patience) = (start + Duration::from_secs(at_s), Duration::from_secs(30));
            doubles.find(&members, own, "i", now, patience).map(|copy| copy.id.clone())
        };
        let found = |checks: &[(&[&str], u64)], own: &str| {
            let mut doubles = Doubles::default();
            checks.iter().map(|(ids, at_s)| check(&mut doubles, ids, own, *at_s)).collect::<Vec<_>>().pop().flatten()
        };
        let both: &[&str] = &["a", "b"];
        assert_eq!(found(&[(both, 0), (both, 20), (both, 40)], "b"), Some("a".to_owned()));
        // The other one is the copy that stops.
        assert_eq!(found(&[(both, 0), (both, 20), (both, 40)], "a"), None);
        // Not for long enough, or not often enough: the brokers may not have answered for most of the time.
        assert_eq!(found(&[(both, 0), (both, 10), (both, 20)], "b"), None);
        assert_eq!(found(&[(both, 0), (both, 60)], "b"), None);
        // A membership that was lost disappears; another one may be lost later.
        assert_eq!(found(&[(both, 0), (both, 20), (&["b"], 40), (both, 60), (both, 80)], "b"), None);
        // This instance is no member at the moment.
        assert_eq!(found(&[(&["a"], 0), (&["a"], 20), (&["a"], 40)], "b"), None);
    }
}
