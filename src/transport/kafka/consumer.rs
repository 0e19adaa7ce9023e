//! Kafka partitions as logs of the merge.
//!
//! One thread polls the client for all partitions, parses the events and appends them to one queue per partition. A full
//! queue pauses its partition. The engine's thread drains the queues. An assignment carries its start offsets: those of
//! the snapshot, then of what was read since. The committed offsets of the group are never read.
//!
//! Where lanes move between instances, a member subscribes to the queries topic alone. The owner of a queries partition
//! also reads the rewards partition of the same number, so a pair cannot be split. A rebalance is a message to the owner of
//! the lanes ([`Rebalance`]). The polling thread never waits for it: it accepts an assignment at once and reads a lane when
//! the owner has opened it ([`Reader::read_lane`]); it gives up revoked lanes when the owner has closed them
//! ([`Reader::release`]), or after a second, since a new owner fences the old one anyway.
//!
//! The client's statistics tell when a partition is at its end: offsets have gaps, so the last message does not.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::CStr;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdkafka::bindings as ffi;
use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext};
use rdkafka::error::KafkaError;
use rdkafka::message::{BorrowedMessage, Headers, Message};
use rdkafka::statistics::Statistics;
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{Offset, TopicPartitionList};
use serde_json::{Value, json};

use super::client::Client;
use super::cluster::{CALL, Cluster, Problem, Trouble, failed, is_lasting, lasting, log_line};
use super::homes::Spread;
use super::positions::{self, Place, at, parse};
use super::unreadable::{Probe, Unreadable, is_suspect};
use crate::engine::{Input, Side};
use crate::event::{Name, excerpt};
use crate::event_time::CONFIRMATIONS;
use crate::merge::{MergeState, Origin, Read, Source, Sourced};
use crate::telemetry::Facts;
use crate::transport::{Bell, Log, TransportError, lock};
use crate::wire::events::{Bad, Parser};

/// Queue limits. A full queue pauses its partition.
const QUEUE_EVENTS: usize = 16_384;
const QUEUE_BYTES: usize = 64 << 20;

/// Read-ahead of the client, unless configured: it discards read-ahead messages when a partition is paused.
const AHEAD: [(&str, &str); 3] = [
    ("queued.min.messages", "10000"),
    ("queued.max.messages.kbytes", "8192"),
    // How soon it checks again once these limits are reached.
    ("fetch.queue.backoff.ms", "20"),
];

/// Limits on the metadata of an event: it is held in memory, and anyone can write to a topic.
const KEY_BYTES_MAX: usize = 1024;
const TRACEPARENT_BYTES_MAX: usize = 128;
const CONTENT_TYPE_BYTES_MAX: usize = 80;

/// How long after a resume the client's position of a partition is distrusted, unless a message has arrived since.
const UNSURE: Duration = Duration::from_secs(5);

/// Number of suspicious errors after which an unreadable batch is searched for.
const SUSPECTS: u64 = 3;

/// Interval at which the ends of stopped partitions are queried.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Name of the operation that fails while no broker is connected, and after how long.
const BROKERS: &str = "brokers";
const CUT_OFF: Duration = Duration::from_secs(3);

/// Interval of the client's statistics.
const STATISTICS_MS: u64 = 250;

/// How partitions are read.
#[derive(Debug, Clone)]
pub enum Membership {
    /// Without a group: reads the given partitions.
    Alone,
    /// As the only member of the group.
    Group {
        /// The ID of this instance.
        instance: String,
    },
    /// As one of many members that share the partitions.
    Fleet {
        /// The ID of this instance.
        instance: String,
        /// Opens and closes lanes.
        owner: Sender<Rebalance>,
    },
}

/// What a reader does with messages.
pub struct ReadOptions {
    /// Parses events.
    pub parser: Arc<Parser>,
    /// Maps spaces to partitions, where each has its own.
    pub spread: Option<Spread>,
    /// Whether an unreadable batch becomes one dead letter; otherwise its partition stops there.
    pub accept_gap: bool,
    /// Rung when there are new events.
    pub bell: Arc<Bell>,
    /// Receives failures.
    pub facts: Arc<Facts>,
}

/// Assignment or revocation of lanes.
#[derive(Debug)]
pub enum Rebalance {
    /// Lanes to open, and then to read with [`Reader::read_lane`].
    Assigned(Vec<i32>),
    /// Lanes to close, and then to release with [`Reader::release`].
    Revoked {
        /// Numbers of the pairs of partitions.
        lanes: Vec<i32>,
        /// Whether another instance may own them already.
        lost: bool,
    },
}

/// How long a revocation waits for its lanes to be closed. The client reads no partition meanwhile.
const RELEASE_WITHIN: Duration = Duration::from_secs(1);

/// Reads partitions on a thread of its own, until it is dropped.
pub struct Reader {
    consumer: Arc<Client<BaseConsumer<Watch>>>,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the threads share.
struct Shared {
    partitions: Mutex<BTreeMap<(Side, i32), Arc<Queue>>>,
    /// Partitions added since the start, not merged yet.
    added: Mutex<Vec<(Place, Arc<Queue>)>>,
    /// For each topic the name of one of its partitions in snapshots.
    names: Mutex<BTreeMap<String, String>>,
    topics: [String; 2],
    /// Rung when a queue has new events.
    bell: Arc<Bell>,
    problem: Mutex<Option<Problem>>,
    stop: AtomicBool,
    /// Whether the group has assigned partitions; with one lane, all of them.
    assigned: AtomicBool,
    rebalances: AtomicU64,
    /// Whether to leave and rejoin the group.
    rejoin: AtomicBool,
    /// Opens and closes lanes, where they move.
    owner: Option<Sender<Rebalance>>,
    /// Where lanes move: those that are assigned, and whether each is read.
    lanes: Mutex<BTreeMap<i32, Reading>>,
    trouble: Arc<Trouble>,
    facts: Arc<Facts>,
    /// Since when no broker is connected; the inner option is empty once that is reported.
    cut_off: Mutex<Option<Option<Instant>>>,
}

/// How far an assigned lane is.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Reading {
    /// Its owner opens it.
    Opening,
    /// Open, but not read yet.
    Open,
    Read,
    /// Revoked; its owner closes it since then.
    Closing(Instant),
    /// Closed, but not released yet.
    Closed,
}

/// Events of a partition that the engine has not taken yet.
#[derive(Default)]
struct Queue {
    state: Mutex<QueueState>,
}

#[derive(Default)]
struct QueueState {
    events: VecDeque<Sourced>,
    bytes: usize,
    /// The offset of the next message.
    next: u64,
    /// Last known end of the partition.
    end: Option<u64>,
    /// The batch at which reading has stopped.
    unreadable: Option<Unreadable>,
    /// Whether the client reported the end of the partition, not confirmed yet.
    ending: bool,
    /// When the end was reached.
    ended: Option<Instant>,
    paused: bool,
    /// When it was resumed, if no message has arrived since.
    resumed: Option<Instant>,
}

/// Partitions, each with where it is.
pub type Logs = Vec<(Place, Partition)>;

/// A partition, as the merge sees it.
pub struct Partition {
    topic: String,
    partition: i32,
    queue: Arc<Queue>,
    shared: Arc<Shared>,
    /// Taken from the queue together.
    taken: VecDeque<Sourced>,
    ending: Ending,
}

/// What the end of a partition means.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Ending {
    /// Keep reading; after `idle` without events, the merge stops waiting for this partition.
    Follow {
        /// How long the merge waits.
        idle: Duration,
    },
    /// Stop before this offset.
    Until(u64),
}

/// The client's callbacks, all on the polling thread.
pub struct Watch(Arc<Shared>);

impl ClientContext for Watch {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        log_line(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.0.trouble.note(&error, reason);
    }

    fn stats(&self, statistics: Statistics) {
        self.0.note_brokers(statistics.brokers.values().any(|broker| broker.state == "UP"));
        let partitions = lock(&self.0.partitions);
        for (&(side, partition), queue) in partitions.iter() {
            let topic = statistics.topics.get(self.0.topic(side));
            let Some(known) = topic.and_then(|topic| topic.partitions.get(&partition)) else { continue };
            let (end, next) = (known.ls_offset, known.next_offset);
            if known.fetch_state != "active" || end < 0 || next < 0 {
                continue;
            }
            let mut state = lock(&queue.state);
            state.end = Some(end.unsigned_abs());
            state.ending = next >= end && state.ended.is_none() && state.is_sure();
            if state.next >= end.unsigned_abs() {
                state.end();
            }
        }
    }
}

impl ConsumerContext for Watch {
    fn rebalance(&self, consumer: &BaseConsumer<Self>, error: RDKafkaRespErr, partitions: &mut TopicPartitionList) {
        self.0.rebalances.fetch_add(1, Ordering::Relaxed);
        let given = error == RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS;
        let lanes = || partitions.elements().iter().map(|element| element.partition()).collect::<Vec<i32>>();
        let done = match &self.0.owner {
            Some(owner) if given => self.0.assigned(consumer, owner, lanes()),
            Some(owner) => self.0.revoked(consumer, owner, lanes()),
            None if given => self.0.assign(consumer, partitions),
            None => {
                self.0.assigned.store(false, Ordering::Relaxed);
                consumer.unassign()
            }
        };
        if let Err(error) = done {
            self.0.fail(failed("cannot assign partitions", &error));
        }
    }
}

impl Shared {
    fn topic(&self, side: Side) -> &str {
        &self.topics[side as usize]
    }

    /// Reports brokers that cannot be reached for a while.
    fn note_brokers(&self, is_reached: bool) {
        let mut since = lock(&self.cut_off);
        if is_reached {
            *since = None;
            self.facts.succeeded(BROKERS);
            return;
        }
        let begun = since.get_or_insert_with(|| Some(Instant::now()));
        if begun.is_some_and(|begun| begun.elapsed() >= CUT_OFF) {
            // Once: the client retries by itself.
            *begun = None;
            let error = std::io::Error::new(ErrorKind::NotConnected, "no broker of transport.kafka.brokers answers");
            self.facts.failed(BROKERS, &error.into());
        }
    }

    /// Registers a partition to be read from its position.
    fn open(self: &Arc<Self>, place: &Place, ending: Ending) -> Partition {
        let state = QueueState { next: place.position.floor, ..QueueState::default() };
        let queue = Arc::new(Queue { state: Mutex::new(state) });
        lock(&self.partitions).insert((place.side, place.partition), queue.clone());
        Partition::new(place, queue, self.clone(), ending)
    }

    fn fail(&self, problem: Problem) {
        lock(&self.problem).get_or_insert(problem);
        self.tell();
    }

    fn tell(&self) {
        self.bell.ring();
    }

    /// Assigns partitions with their start offsets.
    fn assign(&self, consumer: &BaseConsumer<Watch>, given: &TopicPartitionList) -> Result<(), KafkaError> {
        let mut assignment = TopicPartitionList::new();
        let mut partitions = lock(&self.partitions);
        let mut missing: BTreeSet<(Side, i32)> = partitions.keys().copied().collect();
        for element in given.elements() {
            let side = if element.topic() == self.topics[0] { Side::Query } else { Side::Reward };
            let key = (side, element.partition());
            missing.remove(&key);
            let queue = partitions.entry(key).or_insert_with(|| self.add(side, element.partition()));
            let mut state = lock(&queue.state);
            // A new assignment is not paused.
            if std::mem::take(&mut state.paused) {
                state.resumed = Some(Instant::now());
            }
            (state.ending, state.ended) = (false, None);
            let next = state.next;
            drop(state);
            assignment.add_partition_offset(element.topic(), element.partition(), Offset::Offset(next as i64))?;
        }
        drop(partitions);
        if let Some((side, partition)) = missing.first() {
            tracing::warn!(
                topic = self.topic(*side),
                partition,
                "another member of the group owns some partitions; waiting for them"
            );
            return consumer.assign(&TopicPartitionList::new());
        }
        self.assigned.store(true, Ordering::Relaxed);
        tracing::debug!(partitions = assignment.count(), "partitions assigned");
        consumer.assign(&assignment)
    }

    /// Accepts lanes. They are read once they are open.
    fn assigned(
        &self,
        consumer: &BaseConsumer<Watch>,
        owner: &Sender<Rebalance>,
        lanes: Vec<i32>,
    ) -> Result<(), KafkaError> {
        lock(&self.lanes).extend(lanes.iter().map(|lane| (*lane, Reading::Opening)));
        consumer.incremental_assign(&TopicPartitionList::new())?;
        self.assigned.store(true, Ordering::Relaxed);
        if !lanes.is_empty() {
            // Fails only if the owner has ended.
            let _ = owner.send(Rebalance::Assigned(lanes));
        }
        self.tell();
        Ok(())
    }

    /// Asks the owner to close lanes; they are released once that is done.
    fn revoked(
        &self,
        consumer: &BaseConsumer<Watch>,
        owner: &Sender<Rebalance>,
        lanes: Vec<i32>,
    ) -> Result<(), KafkaError> {
        self.assigned.store(false, Ordering::Relaxed);
        let lost = consumer.assignment_lost();
        let since = Reading::Closing(Instant::now());
        lock(&self.lanes).extend(lanes.iter().map(|lane| (*lane, since)));
        let is_owned =
            !self.stop.load(Ordering::Relaxed) && owner.send(Rebalance::Revoked { lanes: lanes.clone(), lost }).is_ok();
        self.tell();
        if is_owned { Ok(()) } else { self.release(consumer, &lanes) }
    }

    /// Ends a revocation: stops reading its lanes.
    fn release(&self, consumer: &BaseConsumer<Watch>, lanes: &[i32]) -> Result<(), KafkaError> {
        let read = consumer.assignment()?;
        let mut released = TopicPartitionList::new();
        for element in read.elements().iter().filter(|element| lanes.contains(&element.partition())) {
            released.add_partition(element.topic(), element.partition());
        }
        lock(&self.partitions).retain(|(_, lane), _| !lanes.contains(lane));
        lock(&self.lanes).retain(|lane, _| !lanes.contains(lane));
        consumer.incremental_unassign(&released)
    }

    /// Reads open lanes, and releases closed ones. All lanes of a revocation are released together.
    fn serve_lanes(&self, consumer: &BaseConsumer<Watch>) -> Result<(), KafkaError> {
        let mut lanes = lock(&self.lanes);
        let open: Vec<i32> =
            lanes.iter().filter(|(_, reading)| **reading == Reading::Open).map(|(lane, _)| *lane).collect();
        lanes.extend(open.iter().map(|lane| (*lane, Reading::Read)));
        let is_revoked = |reading: &Reading| matches!(reading, Reading::Closing(_) | Reading::Closed);
        let revoked: Vec<i32> =
            lanes.iter().filter(|(_, reading)| is_revoked(reading)).map(|(lane, _)| *lane).collect();
        let is_waiting =
            |reading: &Reading| matches!(reading, Reading::Closing(since) if since.elapsed() < RELEASE_WITHIN);
        let wait = lanes.values().any(is_waiting);
        drop(lanes);
        if !open.is_empty() {
            let mut assignment = TopicPartitionList::new();
            for (side, lane) in open.iter().flat_map(|lane| [(Side::Query, *lane), (Side::Reward, *lane)]) {
                let Some(queue) = lock(&self.partitions).get(&(side, lane)).cloned() else { continue };
                let offset = Offset::Offset(lock(&queue.state).next as i64);
                assignment.add_partition_offset(self.topic(side), lane, offset)?;
            }
            tracing::debug!(partitions = assignment.count(), "partitions assigned");
            consumer.incremental_assign(&assignment)?;
        }
        if revoked.is_empty() || wait {
            return Ok(());
        }
        self.release(consumer, &revoked)
    }

    /// Adds a partition that did not exist at the start.
    fn add(&self, side: Side, partition: i32) -> Arc<Queue> {
        let topic = self.topic(side).to_owned();
        tracing::info!(topic, partition, "new partition; reading it from its beginning");
        let queue = Arc::new(Queue::default());
        // The topic has the same ID in the names of its other partitions.
        let known = lock(&self.names).get(&topic).cloned().unwrap_or_default();
        let place = Place { side, name: positions::sibling(&known, partition), topic, partition, position: at(0) };
        lock(&self.added).push((place, queue.clone()));
        self.tell();
        queue
    }
}

impl QueueState {
    fn end(&mut self) {
        self.ending = false;
        self.ended.get_or_insert_with(Instant::now);
    }

    /// Whether the client's reported position can be trusted. A paused client discards its read-ahead, and corrects its
    /// position only when it reads again, which the first message shows.
    fn is_sure(&self) -> bool {
        !self.paused && self.resumed.is_none_or(|since| since.elapsed() > UNSURE)
    }

    /// Whether the partition has messages that were not taken yet, or may have: its end is not known.
    fn is_behind(&self) -> bool {
        self.ended.is_none() && self.end.is_none_or(|end| self.next < end)
    }

    fn is_full(&self) -> bool {
        self.events.len() >= QUEUE_EVENTS || self.bytes >= QUEUE_BYTES
    }

    fn has_room(&self) -> bool {
        self.events.len() < QUEUE_EVENTS / 2 && self.bytes < QUEUE_BYTES / 2
    }
}

impl Reader {
    /// Starts to read these partitions; also returns them as logs to merge.
    pub fn start(
        cluster: &Cluster,
        options: ReadOptions,
        places: &[Place],
        membership: &Membership,
        ending: impl Fn(usize) -> Ending,
    ) -> Result<(Arc<Self>, Logs), Problem> {
        let ReadOptions { parser, spread, accept_gap, bell, facts } = options;
        let topics = &cluster.config.topics;
        let shared = Arc::new(Shared {
            partitions: Mutex::default(),
            added: Mutex::default(),
            names: Mutex::new(places.iter().map(|place| (place.topic.clone(), place.name.clone())).collect()),
            topics: [topics.queries.clone(), topics.rewards.clone()],
            bell,
            problem: Mutex::new(None),
            stop: AtomicBool::new(false),
            assigned: AtomicBool::new(false),
            rebalances: AtomicU64::new(0),
            rejoin: AtomicBool::new(false),
            owner: if let Membership::Fleet { owner, .. } = membership { Some(owner.clone()) } else { None },
            lanes: Mutex::default(),
            trouble: cluster.trouble.clone(),
            facts,
            cut_off: Mutex::default(),
        });
        let open = |(i, place): (usize, &Place)| (place.clone(), shared.open(place, ending(i)));
        let logs = places.iter().enumerate().map(open).collect();
        let mut settings = cluster.consumer();
        settings.set("statistics.interval.ms", STATISTICS_MS.to_string());
        for (key, value) in AHEAD {
            if settings.get(key).is_none() {
                settings.set(key, value);
            }
        }
        match membership {
            Membership::Alone => {}
            // Not static members: a copy of the instance would replace it, and lanes would stay with an instance that has left.
            Membership::Group { instance } => drop(settings.set("client.id", instance)),
            Membership::Fleet { instance, .. } => {
                settings.set("client.id", instance).set("partition.assignment.strategy", "cooperative-sticky");
            }
        }
        let consumer: Arc<Client<BaseConsumer<Watch>>> = Arc::new(Client::new(&settings, Watch(shared.clone()))?);
        let cannot = |error: KafkaError| failed("cannot read the event topics", &error);
        let subscribed = match membership {
            Membership::Alone => Vec::new(),
            Membership::Group { .. } => vec![topics.queries.clone(), topics.rewards.clone()],
            Membership::Fleet { .. } => vec![topics.queries.clone()],
        };
        let polling = Polling {
            consumer: consumer.clone(),
            shared: shared.clone(),
            parser,
            paused: BTreeSet::new(),
            spread,
            subscribed,
            cluster: cluster.clone(),
            accept_gap,
            suspects: 0,
            looked: Instant::now(),
        };
        if polling.subscribed.is_empty() {
            let mut assignment = TopicPartitionList::new();
            for place in places {
                let offset = Offset::Offset(place.position.floor as i64);
                assignment.add_partition_offset(&place.topic, place.partition, offset).map_err(cannot)?;
            }
            consumer.assign(&assignment).map_err(cannot)?;
            shared.assigned.store(true, Ordering::Relaxed);
        } else {
            polling.subscribe().map_err(cannot)?;
        }
        let thread =
            std::thread::Builder::new().name("kafka".to_owned()).spawn(move || polling.run()).map_err(|error| {
                Problem::Failed { doing: "cannot start the Kafka thread".to_owned(), problem: error.to_string() }
            })?;
        Ok((Arc::new(Self { consumer, shared, thread: Mutex::new(Some(thread)) }), logs))
    }

    /// Registers a partition to be read from its position once assigned.
    pub fn open(&self, place: &Place, ending: Ending) -> Partition {
        self.shared.open(place, ending)
    }

    /// Reads a lane from the positions that [`Reader::open`] got, if it is still assigned.
    pub fn read_lane(&self, lane: i32) {
        if let Some(reading) = lock(&self.shared.lanes).get_mut(&lane).filter(|reading| **reading == Reading::Opening) {
            *reading = Reading::Open;
        }
    }

    /// Gives up a revoked lane.
    pub fn release(&self, lane: i32) {
        let mut lanes = lock(&self.shared.lanes);
        if let Some(reading) = lanes.get_mut(&lane).filter(|reading| matches!(reading, Reading::Closing(_))) {
            *reading = Reading::Closed;
        }
    }

    /// Leaves and rejoins the group.
    pub fn rejoin(&self) {
        self.shared.rejoin.store(true, Ordering::Relaxed);
    }

    /// Commits offsets to the group, for lag monitoring.
    pub fn commit(&self, positions: &MergeState) {
        // A commit outside of a membership would be rejected as a stale member.
        if !self.is_assigned() {
            return;
        }
        let mut offsets = TopicPartitionList::new();
        for (name, position) in &positions.positions {
            if let Some((topic, partition)) = parse(name) {
                // Fails only for a repeated partition.
                let _ = offsets.add_partition_offset(topic, partition, Offset::Offset(position.floor as i64));
            }
        }
        // The next snapshot retries.
        if let Err(error) = self.consumer.commit(&offsets, CommitMode::Async) {
            tracing::debug!(%error, "cannot commit offsets");
        }
    }

    /// Partitions added since the start.
    pub fn added(&self, ending: Ending) -> Logs {
        let added = std::mem::take(&mut *lock(&self.shared.added));
        let partition = |(place, queue): (Place, Arc<Queue>)| {
            let log = Partition::new(&place, queue, self.shared.clone(), ending);
            (place, log)
        };
        added.into_iter().map(partition).collect()
    }

    /// The ID of this member of the group; empty before it has joined.
    pub fn member_id(&self) -> String {
        let client = self.consumer.client().native_ptr();
        // SAFETY: the client outlives the call. The answer is null or ends with a zero byte, and is freed here.
        unsafe {
            let id = ffi::rd_kafka_memberid(client);
            if id.is_null() {
                return String::new();
            }
            let text = CStr::from_ptr(id).to_string_lossy().into_owned();
            ffi::rd_kafka_mem_free(client, id.cast());
            text
        }
    }

    /// Whether the group has assigned partitions, or none has to.
    pub fn is_assigned(&self) -> bool {
        self.shared.assigned.load(Ordering::Relaxed)
    }

    /// Number of rebalances.
    pub fn rebalances(&self) -> u64 {
        self.shared.rebalances.load(Ordering::Relaxed)
    }

    /// Lag of each partition (topic, partition, messages): messages not learned from yet, read or not. `floors` holds the
    /// offsets before which everything is learned.
    pub fn lags(&self, floors: &BTreeMap<(&str, i32), u64>) -> Vec<(String, i32, u64)> {
        let partitions = lock(&self.shared.partitions);
        let lag = |((side, partition), queue): (&(Side, i32), &Arc<Queue>)| {
            let topic = self.shared.topic(*side);
            let state = lock(&queue.state);
            let floor = floors.get(&(topic, *partition)).copied().unwrap_or(state.next);
            // Only transaction markers follow the last message of an ended partition.
            let all_done = state.ended.is_some() && floor >= state.next;
            let lag = if all_done { 0 } else { state.end?.saturating_sub(floor) };
            Some((topic.to_owned(), *partition, lag))
        };
        partitions.iter().filter_map(lag).collect()
    }

    /// Batches at which reading has stopped.
    pub fn unreadable(&self) -> Vec<Unreadable> {
        let partitions = lock(&self.shared.partitions);
        partitions.values().filter_map(|queue| lock(&queue.state).unreadable.clone()).collect()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = lock(&self.thread).take() {
            // Errors are in `problem`.
            let _ = thread.join();
        }
    }
}

/// The polling thread.
struct Polling {
    consumer: Arc<Client<BaseConsumer<Watch>>>,
    shared: Arc<Shared>,
    parser: Arc<Parser>,
    paused: BTreeSet<(Side, i32)>,
    /// Maps spaces to partitions, where each has its own.
    spread: Option<Spread>,
    /// Subscribed topics; empty without a group.
    subscribed: Vec<String>,
    cluster: Cluster,
    /// Whether unreadable batches are skipped.
    accept_gap: bool,
    /// Suspicious errors so far.
    suspects: u64,
    /// When the ends of stopped partitions were last queried.
    looked: Instant,
}

impl Polling {
    fn run(mut self) {
        while !self.shared.stop.load(Ordering::Relaxed) {
            let wait = Duration::from_millis(if self.paused.is_empty() { 20 } else { 2 });
            // The message borrows the client, not this.
            let consumer = self.consumer.clone();
            match consumer.poll(wait) {
                Some(Ok(message)) => self.take(&message),
                Some(Err(error)) => self.trouble(&error),
                // Everything before the reported end has been taken.
                None => self.settle_ends(),
            }
            if !self.paused.is_empty() {
                self.resume();
            }
            if let Err(error) = self.shared.serve_lanes(&self.consumer) {
                self.shared.fail(failed("cannot assign partitions", &error));
            }
            if self.looked.elapsed() >= LOOK_EVERY {
                self.look_at_stopped();
                self.looked = Instant::now();
            }
            if self.shared.rejoin.swap(false, Ordering::Relaxed) {
                self.consumer.unsubscribe();
                if let Err(error) = self.subscribe() {
                    self.shared.fail(failed("cannot rejoin the consumer group", &error));
                }
            }
        }
    }

    fn subscribe(&self) -> Result<(), KafkaError> {
        let topics: Vec<&str> = self.subscribed.iter().map(String::as_str).collect();
        self.consumer.subscribe(&topics)
    }

    fn take(&mut self, message: &BorrowedMessage<'_>) {
        let side = if message.topic() == self.shared.topics[0] { Side::Query } else { Side::Reward };
        let key = (side, message.partition());
        let Some(queue) = lock(&self.shared.partitions).get(&key).cloned() else { return };
        let offset = message.offset().max(0).unsigned_abs();
        let event = Sourced {
            input: self.read(side, message),
            start: offset,
            end: offset + 1,
            line: 0,
            origin: origin(message),
        };
        let mut state = lock(&queue.state);
        if offset < state.next {
            return;
        }
        state.next = offset + 1;
        (state.ending, state.ended, state.resumed) = (false, None, None);
        state.bytes += event.input.bytes();
        let was_empty = state.events.is_empty();
        state.events.push_back(event);
        let full = state.is_full() && !state.paused;
        drop(state);
        if was_empty {
            self.shared.tell();
        }
        if full {
            self.paused.insert(key);
            self.set_paused(key, true);
        }
    }

    fn read(&self, side: Side, message: &BorrowedMessage<'_>) -> Input {
        let bytes = message.payload().unwrap_or_default().to_vec();
        let input = match other_type(message) {
            Some(kind) => {
                let kind = excerpt(&kind, CONTENT_TYPE_BYTES_MAX).into_owned();
                return Input::bad(side, bytes, Bad::ContentType(kind));
            }
            None => Input::parse(&self.parser, side, bytes, message.timestamp().to_millis()),
        };
        let belongs = |space: &Name, id: &str| Some(self.spread.as_ref()?.partition(space, id));
        match input.key().and_then(|(_, _, space, id, _)| belongs(space, id)) {
            Some(expected) if expected != message.partition() => {
                let bad = Bad::WrongPartition { found: message.partition(), expected };
                Input::bad(side, message.payload().unwrap_or_default().to_vec(), bad)
            }
            _ => input,
        }
    }

    fn trouble(&mut self, error: &KafkaError) {
        if is_lasting(error) {
            self.shared.fail(lasting("reading the event topics", error));
            return;
        }
        self.shared.trouble.note(error, "error while reading the event topics");
        if is_suspect(error) {
            self.suspects += 1;
            if self.suspects.is_multiple_of(SUSPECTS)
                && let Err(problem) = self.find_unreadable()
            {
                // The error repeats, and so does this search.
                tracing::warn!(%problem, "cannot locate an unreadable batch; retrying");
            }
        }
    }

    /// Finds the unreadable batch. Its partition stops there, or skips it.
    fn find_unreadable(&mut self) -> Result<(), Problem> {
        let (mut asked, mut stopped) = (Vec::new(), Vec::new());
        for (&(side, partition), queue) in lock(&self.shared.partitions).iter() {
            let state = lock(&queue.state);
            match (&state.unreadable, state.paused) {
                (_, true) => {}
                (None, false) => asked.push((self.shared.topic(side).to_owned(), partition, state.next)),
                // Reassigned since, and therefore not paused.
                (Some(_), false) => stopped.push((side, partition)),
            }
        }
        stopped.into_iter().for_each(|key| self.set_paused(key, true));
        let probe = Probe::new(&self.cluster)?;
        let Some(batch) = probe.find(&asked)? else { return Ok(()) };
        let side = if batch.topic == self.shared.topics[0] { Side::Query } else { Side::Reward };
        let key = (side, batch.partition);
        let Some(queue) = lock(&self.shared.partitions).get(&key).cloned() else { return Ok(()) };
        if self.accept_gap {
            let (_, high) = self.cluster.watermarks(&batch.topic, batch.partition)?;
            let end = probe.end_of(&batch, high)?;
            return self.skip(&queue, side, batch, end);
        }
        tracing::error!(
            topic = batch.topic,
            partition = batch.partition,
            offset = batch.offset,
            problem = batch.problem,
            "cannot read batch; lane stopped; `pointsman learn --accept-gap` skips the batch"
        );
        lock(&queue.state).unreadable = Some(batch);
        self.set_paused(key, true);
        self.shared.tell();
        Ok(())
    }

    /// Queries the ends of stopped partitions: they are paused, so the client does not report them.
    fn look_at_stopped(&self) {
        let queues = lock(&self.shared.partitions).clone();
        for ((side, partition), queue) in queues {
            if lock(&queue.state).unreadable.is_some()
                && let Ok((_, high)) = self.consumer.fetch_watermarks(self.shared.topic(side), partition, LOOK_EVERY)
            {
                lock(&queue.state).end = Some(high.max(0).unsigned_abs());
            }
        }
    }

    /// Skips a batch. A dead letter records the gap.
    fn skip(&self, queue: &Queue, side: Side, batch: Unreadable, end: u64) -> Result<(), Problem> {
        let Unreadable { topic, partition, offset, problem, .. } = batch;
        let mut state = lock(&queue.state);
        if state.next != offset {
            return Ok(());
        }
        tracing::warn!(topic, partition, from = offset, to = end, %problem, "skipped unreadable batch");
        let gap = Bad::Gap { from: offset, to: end, problem };
        let input = Input::bad(side, Vec::new(), gap);
        state.events.push_back(Sourced { input, start: offset, end, line: 0, origin: None });
        (state.next, state.ending, state.ended) = (end, false, None);
        drop(state);
        self.shared.tell();
        let next = Offset::Offset(end as i64);
        // Fails if the partition was revoked: once reassigned, it resumes from there.
        if let Err(error) = self.consumer.seek(&topic, partition, next, CALL) {
            tracing::debug!(%error, topic, partition, "cannot seek partition");
        }
        Ok(())
    }

    fn settle_ends(&self) {
        for queue in lock(&self.shared.partitions).values() {
            let mut state = lock(&queue.state);
            if state.ending {
                state.end();
            }
        }
    }

    fn resume(&mut self) {
        let partitions = lock(&self.shared.partitions);
        let roomy = |key: &&(Side, i32)| partitions.get(key).is_none_or(|queue| lock(&queue.state).has_room());
        let keys: Vec<(Side, i32)> = self.paused.iter().filter(roomy).copied().collect();
        drop(partitions);
        for key in keys {
            self.paused.remove(&key);
            self.set_paused(key, false);
        }
    }

    fn set_paused(&self, (side, partition): (Side, i32), paused: bool) {
        if let Some(queue) = lock(&self.shared.partitions).get(&(side, partition)) {
            let mut state = lock(&queue.state);
            (state.paused, state.ending) = (paused, false);
            state.resumed = (!paused).then(Instant::now);
        }
        let mut list = TopicPartitionList::new();
        list.add_partition(self.shared.topic(side), partition);
        let done = if paused { self.consumer.pause(&list) } else { self.consumer.resume(&list) };
        if let Err(error) = done {
            // The partition was revoked; once reassigned it is not paused.
            tracing::debug!(%error, paused, "cannot pause or resume partition");
        }
    }
}

fn header<'a>(message: &'a BorrowedMessage<'_>, name: &str) -> Option<&'a [u8]> {
    message.headers()?.iter().find(|header| header.key.eq_ignore_ascii_case(name))?.value
}

fn origin(message: &BorrowedMessage<'_>) -> Option<Box<Origin>> {
    let text = |value| excerpt(&String::from_utf8_lossy(value), TRACEPARENT_BYTES_MAX).into_owned();
    let traceparent = header(message, "traceparent").map(text);
    let key_bytes = message.key().map_or(0, <[u8]>::len);
    let key = message.key().map(|key| key[..key_bytes.min(KEY_BYTES_MAX)].to_vec());
    (key.is_some() || traceparent.is_some()).then(|| Box::new(Origin { key, key_bytes, traceparent }))
}

/// The content type of a message, if it is not JSON.
pub(super) fn other_type(message: &BorrowedMessage<'_>) -> Option<String> {
    let kind = header(message, "content-type").map(|kind| String::from_utf8_lossy(kind).into_owned());
    kind.filter(|kind| !is_json(kind))
}

/// Whether a content type is JSON.
fn is_json(kind: &str) -> bool {
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    kind == "application/json" || kind.ends_with("+json") || kind == "text/json"
}

impl Partition {
    fn new(place: &Place, queue: Arc<Queue>, shared: Arc<Shared>, ending: Ending) -> Self {
        let (topic, partition) = (place.topic.clone(), place.partition);
        Self { topic, partition, queue, shared, taken: VecDeque::new(), ending }
    }

    /// The earliest time among the first good events before a known end, as that of a file; waits for them.
    pub fn first_ms(&mut self) -> Result<Option<i64>, Problem> {
        let Ending::Until(end) = self.ending else { return Ok(None) };
        loop {
            let rings = self.shared.bell.rings();
            if let Some(problem) = lock(&self.shared.problem).clone() {
                return Err(problem);
            }
            let mut state = lock(&self.queue.state);
            self.taken.append(&mut state.events);
            state.bytes = 0;
            let is_whole = state.next >= end || state.ended.is_some() || state.unreadable.is_some();
            drop(state);
            let times = self.taken.iter().take_while(|event| event.start < end).filter_map(|event| event.input.key());
            let times: Vec<i64> = times.map(|key| key.0).take(CONFIRMATIONS).collect();
            if is_whole || times.len() == CONFIRMATIONS || self.taken.len() >= QUEUE_EVENTS {
                return Ok(times.into_iter().min());
            }
            self.shared.bell.wait(rings, LOOK_EVERY);
        }
    }
}

impl Source for Partition {
    type Error = TransportError;

    fn read(&mut self) -> Result<Read, TransportError> {
        if self.taken.is_empty() {
            let mut state = lock(&self.queue.state);
            std::mem::swap(&mut state.events, &mut self.taken);
            state.bytes = 0;
            if self.taken.is_empty() {
                if let Some(problem) = lock(&self.shared.problem).clone() {
                    return Err(problem.into());
                }
                // A live reader waits for an operator; one with a fixed end cannot reach it.
                if let (Some(batch), Ending::Until(offset)) = (&state.unreadable, self.ending)
                    && state.next < offset
                {
                    return Err(Problem::Unreadable(batch.clone()).into());
                }
                return Ok(match self.ending {
                    Ending::Until(offset) if state.next >= offset || state.ended.is_some() => Read::End,
                    Ending::Until(_) => Read::Awaited,
                    Ending::Follow { idle } if state.ended.is_some_and(|since| since.elapsed() >= idle) => Read::Idle,
                    Ending::Follow { .. } if state.is_behind() => Read::Awaited,
                    Ending::Follow { .. } => Read::Pending,
                });
            }
        }
        if let (Ending::Until(offset), Some(event)) = (self.ending, self.taken.front())
            && event.start >= offset
        {
            return Ok(Read::End);
        }
        Ok(self.taken.pop_front().map_or(Read::Pending, Read::Event))
    }
}

impl Log for Partition {
    fn place(&self, start: u64, _line: u64) -> Value {
        json!({"source": self.topic, "partition": self.partition, "offset": start})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_types_choose_the_decoder() {
        for (kind, expected) in [
            ("application/json", true),
            ("Application/JSON; charset=utf-8", true),
            ("application/cloudevents+json", true),
            ("application/avro", false),
            ("", false),
        ] {
            assert_eq!(is_json(kind), expected, "{kind}");
        }
    }
}
