//! Partitions as logs of the merge.
//!
//! One thread takes messages from the client, reads the events, and puts them into a queue a partition; from a partition
//! whose queue is full nothing is taken. The engine's thread takes them from there. When partitions are assigned, the
//! offsets from which to read on are put into the assignment itself: they are ours, from the snapshot, then from what was
//! read since; the group's committed offsets are never asked.
//!
//! Offsets have gaps, so that the end of a partition cannot be told from its last message: the client says it. It does so
//! without the topic, hence in a queue of its own for every partition. Nor are partitions ever paused: the client then
//! throws away what it has read ahead.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::base_consumer::PartitionQueue;
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Headers, Message};
use rdkafka::statistics::Statistics;
use rdkafka::types::RDKafkaRespErr;
use rdkafka::{Offset, TopicPartitionList};
use serde_json::{Value, json};

use super::cluster::{Cluster, Problem, Trouble, failed, log_line, make};
use super::positions::{Place, at};
use super::topics::partition_of;
use crate::config::Lanes;
use crate::engine::{Input, Side};
use crate::event::Name;
use crate::merge::{Origin, Read, Source, Sourced};
use crate::transport::Log;
use crate::wire::events::{Bad, Parser};

/// A queue takes no more than so many events, and bytes, before its partition has to wait.
const QUEUE_EVENTS: usize = 4096;
const QUEUE_BYTES: usize = 32 << 20;

/// What the client reads ahead of a partition, unless its settings say otherwise.
const AHEAD: [(&str, &str); 3] = [
    ("queued.min.messages", "10000"),
    ("queued.max.messages.kbytes", "8192"),
    // When it has so much, it looks this much later whether it wants more.
    ("fetch.queue.backoff.ms", "20"),
];

/// So many messages are taken from a partition before the others have their turn.
const TURN: usize = 256;

/// How long nothing is looked for after nothing has come.
const PAUSE: Duration = Duration::from_millis(5);

/// How often the client tells how far it is.
const STATISTICS_MS: u64 = 250;

/// How partitions are read.
#[derive(Debug, Clone, PartialEq)]
pub enum Membership {
    /// Alone: whatever is given is read.
    Alone,
    /// As a member of the group, under a name that outlives the process.
    Group {
        /// The name.
        instance: String,
    },
}

/// Reads partitions on a thread of its own, until it is dropped.
pub struct Reader {
    consumer: Arc<BaseConsumer<Watch>>,
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the threads share.
struct Shared {
    partitions: Mutex<BTreeMap<(Side, i32), Arc<Queue>>>,
    /// Partitions that turned up since the start: they are yet to be merged.
    added: Mutex<Vec<(Place, Arc<Queue>)>>,
    /// The client's own queues, which the polling thread is yet to take over.
    split: Mutex<Vec<ClientQueue>>,
    consumer: OnceLock<Weak<BaseConsumer<Watch>>>,
    topics: [String; 2],
    /// Whether some queue has something new.
    news: Mutex<bool>,
    changed: Condvar,
    problem: Mutex<Option<Problem>>,
    stop: AtomicBool,
    /// Whether all partitions are ours.
    assigned: AtomicBool,
    rebalances: AtomicU64,
    trouble: Arc<Trouble>,
    grouped: bool,
}

/// The client's queue of a partition.
type ClientQueue = ((Side, i32), PartitionQueue<Watch>);

/// What was read of a partition and not yet taken.
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
    /// Messages that are not read yet, as far as is known.
    lag: Option<u64>,
    /// Since when there is nothing more.
    ended: Option<Instant>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these hold is replaced in single steps: nothing is half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
    /// More may come; after `idle` without any, nobody waits for it.
    Follow {
        /// How long it is waited for.
        idle: Duration,
    },
    /// Nothing from this offset on is read.
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
        if error.rdkafka_error_code() == Some(RDKafkaErrorCode::Fenced) {
            self.0.fail(Problem::AnotherInstance("one with the same store".to_owned()));
        }
    }

    fn stats(&self, statistics: Statistics) {
        let partitions = lock(&self.0.partitions);
        for (&(side, partition), queue) in partitions.iter() {
            let topic = statistics.topics.get(self.0.topic(side));
            let Some(known) = topic.and_then(|topic| topic.partitions.get(&partition)) else { continue };
            if known.fetch_state != "active" || known.ls_offset < 0 {
                continue;
            }
            let mut state = lock(&queue.state);
            // What is left after the last message may be no message.
            let lag = known.ls_offset.unsigned_abs().saturating_sub(state.next);
            state.lag = Some(if state.ended.is_some() { 0 } else { lag });
        }
    }
}

impl ConsumerContext for Watch {
    fn rebalance(&self, consumer: &BaseConsumer<Self>, error: RDKafkaRespErr, partitions: &mut TopicPartitionList) {
        self.0.rebalances.fetch_add(1, Ordering::Relaxed);
        let done = match error {
            RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS => self.0.assign(consumer, partitions),
            _ => {
                self.0.assigned.store(false, Ordering::Relaxed);
                consumer.unassign()
            }
        };
        if let Err(error) = done {
            self.0.fail(failed("taking partitions", &error));
        }
    }
}

impl Shared {
    fn topic(&self, side: Side) -> &str {
        &self.topics[side as usize]
    }

    fn fail(&self, problem: Problem) {
        lock(&self.problem).get_or_insert(problem);
        self.tell();
    }

    fn tell(&self) {
        *lock(&self.news) = true;
        self.changed.notify_all();
    }

    /// Takes partitions, each from where it is to be read.
    fn assign(&self, consumer: &BaseConsumer<Watch>, given: &TopicPartitionList) -> Result<(), KafkaError> {
        let mut assignment = TopicPartitionList::new();
        let mut partitions = lock(&self.partitions);
        let mut missing: BTreeSet<(Side, i32)> = partitions.keys().copied().collect();
        for element in given.elements() {
            let side = if element.topic() == self.topics[0] { Side::Query } else { Side::Reward };
            let key = (side, element.partition());
            missing.remove(&key);
            let queue = partitions.entry(key).or_insert_with(|| self.add(side, element.partition()));
            let next = lock(&queue.state).next;
            assignment.add_partition_offset(element.topic(), element.partition(), Offset::Offset(next as i64))?;
        }
        drop(partitions);
        if let Some((side, partition)) = missing.first() {
            tracing::warn!(
                topic = self.topic(*side),
                partition,
                "another member of the group has some of the partitions: waiting for them"
            );
            return consumer.assign(&TopicPartitionList::new());
        }
        self.assigned.store(true, Ordering::Relaxed);
        tracing::debug!(partitions = assignment.count(), "partitions are assigned");
        consumer.assign(&assignment)
    }

    /// Gives a partition a queue of its own in the client. Messages must not have come yet: they would stay behind.
    fn split(&self, side: Side, partition: i32) -> Result<(), Problem> {
        let consumer = self.consumer.get().and_then(Weak::upgrade);
        let queue = consumer.and_then(|consumer| consumer.split_partition_queue(self.topic(side), partition));
        let Some(queue) = queue else {
            let doing = format!("reading {}/{partition}", self.topic(side));
            return Err(Problem::Failed { doing, problem: "the client does not know it".to_owned() });
        };
        lock(&self.split).push(((side, partition), queue));
        Ok(())
    }

    /// A partition that was not there at the start.
    fn add(&self, side: Side, partition: i32) -> Arc<Queue> {
        let topic = self.topic(side).to_owned();
        tracing::info!(topic, partition, "a new partition: it is read from its beginning");
        let queue = Arc::new(Queue::default());
        if let Err(problem) = self.split(side, partition) {
            self.fail(problem);
        }
        // Its name wants the topic's id, which whoever adds it to the merge has.
        let place = Place { side, topic, partition, name: String::new(), position: at(0) };
        lock(&self.added).push((place, queue.clone()));
        self.tell();
        queue
    }
}

impl QueueState {
    fn is_full(&self) -> bool {
        self.events.len() >= QUEUE_EVENTS || self.bytes >= QUEUE_BYTES
    }
}

impl Reader {
    /// Reads these partitions on; returns them, too, to be merged.
    pub fn start(
        cluster: &Cluster,
        parser: Arc<Parser>,
        places: &[Place],
        membership: &Membership,
        ending: impl Fn(usize) -> Ending,
    ) -> Result<(Arc<Self>, Logs), Problem> {
        let topics = &cluster.config.topics;
        let shared = Arc::new(Shared {
            partitions: Mutex::default(),
            added: Mutex::default(),
            split: Mutex::default(),
            consumer: OnceLock::new(),
            topics: [topics.queries.clone(), topics.rewards.clone()],
            news: Mutex::new(false),
            changed: Condvar::new(),
            problem: Mutex::new(None),
            stop: AtomicBool::new(false),
            assigned: AtomicBool::new(false),
            rebalances: AtomicU64::new(0),
            trouble: cluster.trouble.clone(),
            grouped: *membership != Membership::Alone,
        });
        let mut logs = Vec::new();
        for (i, place) in places.iter().enumerate() {
            let state = QueueState { next: place.position.floor, ..QueueState::default() };
            let queue = Arc::new(Queue { state: Mutex::new(state) });
            lock(&shared.partitions).insert((place.side, place.partition), queue.clone());
            logs.push((place.clone(), Partition::new(place, queue, shared.clone(), ending(i))));
        }
        let mut settings = cluster.consumer();
        settings.set("statistics.interval.ms", STATISTICS_MS.to_string()).set("enable.partition.eof", "true");
        for (key, value) in AHEAD {
            if settings.get(key).is_none() {
                settings.set(key, value);
            }
        }
        if let Membership::Group { instance } = membership {
            settings.set("group.instance.id", instance).set("client.id", instance);
        }
        let consumer: Arc<BaseConsumer<Watch>> = Arc::new(make(&settings, Watch(shared.clone()))?);
        let _ = shared.consumer.set(Arc::downgrade(&consumer));
        places.iter().try_for_each(|place| shared.split(place.side, place.partition))?;
        let cannot = |error: KafkaError| failed("reading the topics", &error);
        if shared.grouped {
            consumer.subscribe(&[&topics.queries, &topics.rewards]).map_err(cannot)?;
        } else {
            let mut assignment = TopicPartitionList::new();
            for place in places {
                let offset = Offset::Offset(place.position.floor as i64);
                assignment.add_partition_offset(&place.topic, place.partition, offset).map_err(cannot)?;
            }
            consumer.assign(&assignment).map_err(cannot)?;
            shared.assigned.store(true, Ordering::Relaxed);
        }
        let number = places.iter().filter(|place| place.side == Side::Query).count();
        let polling = Polling {
            consumer: consumer.clone(),
            shared: shared.clone(),
            parser,
            queues: Vec::new(),
            partitions: (cluster.config.lanes == Lanes::Partition).then_some(number),
        };
        let thread = std::thread::Builder::new()
            .name("kafka".to_owned())
            .spawn(move || polling.run())
            .map_err(|error| Problem::Failed { doing: "starting a thread".to_owned(), problem: error.to_string() })?;
        Ok((Arc::new(Self { consumer, shared, thread: Mutex::new(Some(thread)) }), logs))
    }

    /// The client.
    pub fn consumer(&self) -> &BaseConsumer<Watch> {
        &self.consumer
    }

    /// Waits until something new has come, or for `timeout`: whether it has.
    pub fn wait(&self, timeout: Duration) -> bool {
        let news = lock(&self.shared.news);
        let waited = self.shared.changed.wait_timeout_while(news, timeout, |news| !*news);
        let (mut news, _) = waited.unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *news)
    }

    /// Partitions that turned up since the start.
    pub fn added(&self, ending: Ending) -> Logs {
        let added = std::mem::take(&mut *lock(&self.shared.added));
        let partition = |(place, queue): (Place, Arc<Queue>)| {
            let log = Partition::new(&place, queue, self.shared.clone(), ending);
            (place, log)
        };
        added.into_iter().map(partition).collect()
    }

    /// Whether all partitions are read.
    pub fn is_assigned(&self) -> bool {
        self.shared.assigned.load(Ordering::Relaxed)
    }

    /// How often partitions were given or taken.
    pub fn rebalances(&self) -> u64 {
        self.shared.rebalances.load(Ordering::Relaxed)
    }

    /// Messages of each partition that are not read yet: topic, partition, number.
    pub fn lags(&self) -> Vec<(String, i32, u64)> {
        let partitions = lock(&self.shared.partitions);
        let lag = |((side, partition), queue): (&(Side, i32), &Arc<Queue>)| {
            Some((self.shared.topic(*side).to_owned(), *partition, lock(&queue.state).lag?))
        };
        partitions.iter().filter_map(lag).collect()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = lock(&self.thread).take() {
            // It has nothing to tell: what went wrong is in `problem`.
            let _ = thread.join();
        }
        // These keep the client, which keeps this.
        lock(&self.shared.split).clear();
    }
}

/// The polling thread.
struct Polling {
    consumer: Arc<BaseConsumer<Watch>>,
    shared: Arc<Shared>,
    parser: Arc<Parser>,
    /// The client's queues.
    queues: Vec<ClientQueue>,
    /// How many partitions there are, where each space has its own.
    partitions: Option<usize>,
}

impl Polling {
    fn run(mut self) {
        while !self.shared.stop.load(Ordering::Relaxed) {
            self.queues.append(&mut lock(&self.shared.split));
            let taken: usize = self.queues.iter().map(|(key, queue)| self.take_turn(*key, queue)).sum();
            // Rebalances, statistics, trouble: messages come by the partitions' queues alone.
            match self.consumer.poll(if taken == 0 { PAUSE } else { Duration::ZERO }) {
                Some(Ok(message)) => {
                    let doing = format!("reading {}/{}", message.topic(), message.partition());
                    let problem = "a message has come another way than it should".to_owned();
                    self.shared.fail(Problem::Failed { doing, problem });
                }
                Some(Err(error)) => self.trouble(&error),
                None => {}
            }
        }
    }

    /// Takes some messages of a partition; how many.
    fn take_turn(&self, key: (Side, i32), messages: &PartitionQueue<Watch>) -> usize {
        let Some(queue) = lock(&self.shared.partitions).get(&key).cloned() else { return 0 };
        for taken in 0..TURN {
            if lock(&queue.state).is_full() {
                return taken;
            }
            match messages.poll(Duration::ZERO) {
                Some(Ok(message)) => self.take(key.0, &queue, &message),
                Some(Err(KafkaError::PartitionEOF(_))) => {
                    lock(&queue.state).ended.get_or_insert_with(Instant::now);
                }
                Some(Err(error)) => self.trouble(&error),
                None => return taken,
            }
        }
        TURN
    }

    fn take(&self, side: Side, queue: &Queue, message: &BorrowedMessage<'_>) {
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
        state.ended = None;
        state.bytes += event.input.bytes();
        let was_empty = state.events.is_empty();
        state.events.push_back(event);
        drop(state);
        if was_empty {
            self.shared.tell();
        }
    }

    fn read(&self, side: Side, message: &BorrowedMessage<'_>) -> Input {
        let bytes = message.payload().unwrap_or_default().to_vec();
        let input = match other_type(message) {
            Some(kind) => return Input::bad(side, bytes, Bad::ContentType(kind)),
            None => Input::parse(&self.parser, side, bytes, message.timestamp().to_millis()),
        };
        let belongs = |space: &Name| self.partitions.map(|number| partition_of(space, number));
        match input.key().and_then(|(_, _, space, ..)| belongs(space)) {
            Some(expected) if expected != message.partition() => {
                let bad = Bad::WrongPartition { found: message.partition(), expected };
                Input::bad(side, message.payload().unwrap_or_default().to_vec(), bad)
            }
            _ => input,
        }
    }

    fn trouble(&self, error: &KafkaError) {
        use RDKafkaErrorCode as Code;
        match error.rdkafka_error_code() {
            Some(Code::AutoOffsetReset | Code::OffsetOutOfRange) => self.shared.fail(Problem::Failed {
                doing: "offsets lost".to_owned(),
                problem: "messages were deleted before they were read: start again to see which".to_owned(),
            }),
            Some(Code::Authentication | Code::TopicAuthorizationFailed | Code::GroupAuthorizationFailed) => {
                self.shared.fail(failed("reading the topics", error));
            }
            Some(Code::UnknownTopicOrPartition | Code::UnknownTopic | Code::UnknownPartition) => {
                self.shared.fail(failed("a topic is gone", error));
            }
            _ if matches!(error, KafkaError::MessageConsumptionFatal(_)) => {
                self.shared.fail(failed("reading the topics", error));
            }
            // The client mends all others by itself.
            _ => self.shared.trouble.note(error, "while reading"),
        }
    }
}

fn header<'a>(message: &'a BorrowedMessage<'_>, name: &str) -> Option<&'a [u8]> {
    message.headers()?.iter().find(|header| header.key.eq_ignore_ascii_case(name))?.value
}

fn origin(message: &BorrowedMessage<'_>) -> Option<Box<Origin>> {
    let traceparent = header(message, "traceparent").map(|value| String::from_utf8_lossy(value).into_owned());
    let key = message.key().map(<[u8]>::to_vec);
    (key.is_some() || traceparent.is_some()).then(|| Box::new(Origin { key, traceparent }))
}

/// What a message says that it is, if that is not JSON.
pub(super) fn other_type(message: &BorrowedMessage<'_>) -> Option<String> {
    let kind = header(message, "content-type").map(|kind| String::from_utf8_lossy(kind).into_owned());
    kind.filter(|kind| !is_json(kind))
}

/// Whether a content type is JSON; Avro and Protobuf would be told apart here.
fn is_json(kind: &str) -> bool {
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    kind == "application/json" || kind.ends_with("+json") || kind == "text/json"
}

impl Partition {
    fn new(place: &Place, queue: Arc<Queue>, shared: Arc<Shared>, ending: Ending) -> Self {
        let (topic, partition) = (place.topic.clone(), place.partition);
        Self { topic, partition, queue, shared, taken: VecDeque::new(), ending }
    }
}

impl Source for Partition {
    type Error = io::Error;

    fn read(&mut self) -> io::Result<Read> {
        if self.taken.is_empty() {
            let mut state = lock(&self.queue.state);
            std::mem::swap(&mut state.events, &mut self.taken);
            state.bytes = 0;
            if self.taken.is_empty() {
                if let Some(problem) = lock(&self.shared.problem).clone() {
                    return Err(io::Error::other(problem));
                }
                return Ok(match self.ending {
                    Ending::Until(offset) if state.next >= offset || state.ended.is_some() => Read::End,
                    Ending::Follow { idle } if state.ended.is_some_and(|since| since.elapsed() >= idle) => Read::Idle,
                    _ => Read::Pending,
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
