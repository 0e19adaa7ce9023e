//! The brokers: how clients are made, what they say of topics, and what can be wrong, by name.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::ptr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::bindings as ffi;
use rdkafka::client::{ClientContext, DefaultClientContext};
use rdkafka::config::{ClientConfig, FromClientConfigAndContext, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use thiserror::Error;

use super::unreadable::Unreadable;
use crate::config::{KafkaConfig, MASK, OWN_FILES, is_harmless};
use crate::transport::lock;

/// How long the brokers are waited for in one call.
pub const CALL: Duration = Duration::from_secs(10);

/// What is wrong, and what can be done.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum Problem {
    /// A client cannot be made.
    #[error("transport.kafka.client: {0}")]
    BadClient(String),
    /// No broker answers.
    #[error("no broker of {brokers} (transport.kafka.brokers) answers: {problem}")]
    Unreachable {
        /// Where they should be.
        brokers: String,
        /// What the client says.
        problem: String,
    },
    /// The brokers do not let us in.
    #[error("the brokers of {brokers} refuse the user or password (transport.kafka.client, sasl.*): {problem}")]
    Authentication {
        /// Where they are.
        brokers: String,
        /// What the client says.
        problem: String,
    },
    /// A topic is not there.
    #[error("there is no topic {0}: `pointsman topics init` makes it")]
    MissingTopic(String),
    /// Both topics must have as many partitions.
    #[error(
        "{queries} has {of_queries} partitions, {rewards} has {of_rewards}: with transport.kafka.lanes = \"partition\" \
         they must have as many; add partitions to the one, or use lanes = \"one\""
    )]
    UnequalPartitions {
        /// A topic.
        queries: String,
        /// Its partitions.
        of_queries: usize,
        /// The other topic.
        rewards: String,
        /// Its partitions.
        of_rewards: usize,
    },
    /// Messages that were not read yet are gone.
    #[error(
        "offsets lost: {log} is to be read from offset {wanted}, but begins at {oldest}: retention has deleted \
         {} messages that were not learned from. `learn --accept-gap` goes on without them, and records it; more \
         retention (retention.ms) avoids it", oldest - wanted
    )]
    OffsetsLost {
        /// Topic and partition.
        log: String,
        /// Where to read on.
        wanted: u64,
        /// Where it begins.
        oldest: u64,
    },
    /// A batch cannot be read.
    #[error("{0}")]
    Unreadable(Unreadable),
    /// A topic is not the one that was read before.
    #[error(
        "topic recreated: {log} was read up to offset {wanted}, but {found}. `learn --accept-gap` reads the new topic \
         from its beginning, and records it"
    )]
    Recreated {
        /// Topic and partition.
        log: String,
        /// Where to read on.
        wanted: u64,
        /// What is there now.
        found: String,
    },
    /// The store was made from other logs.
    #[error(
        "the store has read other logs ({0}, for one), so it is not known where to go on in the topics: say it with \
         `pointsman snapshots import --start-at FILE`, where FILE is what `pointsman dump` wrote beside the logs"
    )]
    OtherLogs(String),
    /// The store has other lanes.
    #[error(
        "the store has a lane {0:?}, which transport.kafka.lanes does not make: lanes cannot be changed in a store, use \
         another store.dir"
    )]
    OtherLanes(String),
    /// A topic has grown.
    #[error(
        "topic {topic} has {now} partitions, it had {before}: with transport.kafka.lanes = \"partition\" spaces have moved to \
         others, away from what was learned. Stop the whole fleet and the producers, then `pointsman repartition` moves \
         the spaces after them"
    )]
    MorePartitions {
        /// The topic.
        topic: String,
        /// Its partitions when the state was written.
        before: usize,
        /// Its partitions.
        now: usize,
    },
    /// The state of a lane cannot be used.
    #[error(
        "the state of a lane in {lane} (transport.kafka.topics.snapshots) cannot be used: {problem}. If it is lost, delete \
         the records of that partition: the instance whose store has the newest copy of the lane then goes on from it"
    )]
    BadState {
        /// Topic and partition.
        lane: String,
        /// What is wrong.
        problem: String,
    },
    /// The snapshots topic is not what lanes need.
    #[error(
        "topic {topic} (transport.kafka.topics.snapshots) {problem}: with transport.kafka.lanes = \"partition\" {wanted}"
    )]
    BadSnapshotsTopic {
        /// The topic.
        topic: String,
        /// What it is like.
        problem: String,
        /// What it has to be, and how to make it so.
        wanted: String,
    },
    /// Events are not kept for long enough.
    #[error(
        "topic {topic} keeps events for {found} ms (retention.ms), less than the {wanted} ms that a join may take \
         (join.window_ms, join.early_ms, join.reorder_ms) with the time to take over a lane: raise retention.ms there, or \
         lower join.window_ms"
    )]
    ShortRetention {
        /// The topic.
        topic: String,
        /// How long it keeps them.
        found: u64,
        /// How long it must.
        wanted: u64,
    },
    /// Another instance has taken over.
    #[error("lane {0} was taken over by another instance: what was learned since its last snapshot is given up here")]
    Fenced(String),
    /// Parameters do not fit into a message.
    #[error(
        "oversized parameters: those of space {space} take {bytes} bytes, more than max.message.bytes = {most} of \
         topic {topic}: raise it there to {bytes} or more, or lower learner.rank to {rank}"
    )]
    OversizedParams {
        /// The space.
        space: String,
        /// What they take.
        bytes: usize,
        /// What a message may take.
        most: usize,
        /// The parameters' topic.
        topic: String,
        /// A rank that fits.
        rank: usize,
    },
    /// Another instance reads the same.
    #[error(
        "another instance: {0} is a member of the consumer group (transport.kafka.group), of which one is active. One that has died leaves the group when its session times out (45 s unless \
         configured)"
    )]
    AnotherInstance(String),
    /// All lanes are wanted, but others have some.
    #[error(
        "another instance: {0} is a member of the consumer group (transport.kafka.group), and has lanes: stop the whole \
         fleet first. One that has died leaves the group when its session times out"
    )]
    FleetRuns(String),
    /// A message could not be delivered.
    #[error("{topic}: {number} messages could not be delivered within transport.kafka.delivery_timeout_ms: {problem}")]
    NotDelivered {
        /// Where to.
        topic: String,
        /// How many.
        number: usize,
        /// What the client says.
        problem: String,
    },
    /// A broker cannot answer now: it restarts, elects a leader or does not reach us. A retry may succeed.
    #[error("{doing}: {problem}")]
    Transient {
        /// While doing this.
        doing: String,
        /// What the client says.
        problem: String,
    },
    /// Anything else.
    #[error("{doing}: {problem}")]
    Failed {
        /// While doing this.
        doing: String,
        /// What the client says.
        problem: String,
    },
}

/// What the client has said of trouble, newest last; shared by all clients of a process.
#[derive(Debug, Default)]
pub struct Trouble {
    last: Mutex<Option<(RDKafkaErrorCode, String)>>,
    /// Errors so far, by code.
    counts: Mutex<BTreeMap<String, u64>>,
}

impl Trouble {
    /// Notes an error of a client.
    pub fn note(&self, error: &KafkaError, reason: &str) {
        let code = error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Fail);
        // An answer to a question of ours.
        if code == RDKafkaErrorCode::PartitionEOF {
            return;
        }
        *lock(&self.counts).entry(format!("{code:?}")).or_default() += 1;
        // That all brokers are down says less than why.
        if code != RDKafkaErrorCode::AllBrokersDown {
            *lock(&self.last) = Some((code, reason.to_owned()));
        }
        tracing::debug!(%error, reason, "kafka");
    }

    /// Errors so far, by code.
    pub fn counts(&self) -> BTreeMap<String, u64> {
        lock(&self.counts).clone()
    }

    /// Why brokers are not reached, if that was said.
    fn reason(&self) -> Option<(RDKafkaErrorCode, String)> {
        lock(&self.last).clone()
    }
}

/// A client's log line, as one of ours.
pub fn log_line(level: RDKafkaLogLevel, facility: &str, line: &str) {
    // What it calls an error it tries again; what cannot be mended reaches us as one.
    match level {
        RDKafkaLogLevel::Debug | RDKafkaLogLevel::Info => tracing::trace!(facility, "librdkafka: {line}"),
        _ => tracing::debug!(facility, "librdkafka: {line}"),
    }
}

/// A client of no callbacks but those of trouble.
#[derive(Clone)]
pub struct Plain(pub Arc<Trouble>);

impl ClientContext for Plain {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        log_line(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.0.note(&error, reason);
    }
}

impl ConsumerContext for Plain {}

/// The cluster, as configured.
#[derive(Clone)]
pub struct Cluster {
    /// The configuration.
    pub config: KafkaConfig,
    /// What clients said of trouble.
    pub trouble: Arc<Trouble>,
    client: ClientConfig,
    asking: Arc<BaseConsumer<Plain>>,
}

impl Cluster {
    /// A cluster that is not asked for anything yet. Fails where the client's settings are wrong.
    pub fn new(config: &KafkaConfig) -> Result<Self, Problem> {
        let mut client = ClientConfig::new();
        // A broker that comes back is noticed soon.
        client.set("client.id", "pointsman").set("reconnect.backoff.max.ms", "1000");
        for (key, value) in config.client.iter() {
            match key.strip_suffix(".file").filter(|_| !OWN_FILES.contains(&key)) {
                Some(name) => {
                    let text = std::fs::read_to_string(value).map_err(|error| {
                        Problem::BadClient(format!("cannot read the file that {key} names: {error}"))
                    })?;
                    client.set(name, text.trim_end_matches(['\n', '\r']));
                }
                None => drop(client.set(key, value)),
            }
        }
        client.set("bootstrap.servers", &config.brokers);
        let trouble = Arc::new(Trouble::default());
        let mut asking = client.clone();
        asking
            .set("group.id", &config.group)
            .set("enable.auto.commit", "false")
            // The end is where transactions are still open: what is after it cannot be read yet.
            .set("isolation.level", "read_committed");
        let asking = make(&asking, Plain(trouble.clone()))?;
        Ok(Self { config: config.clone(), trouble, client, asking: Arc::new(asking) })
    }

    /// Settings of a consumer.
    pub fn consumer(&self) -> ClientConfig {
        let mut client = self.client.clone();
        client
            .set("group.id", &self.config.group)
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("auto.offset.reset", "error")
            .set("isolation.level", "read_committed")
            .set("partition.assignment.strategy", "range");
        client
    }

    /// Settings of a producer.
    pub fn producer(&self) -> ClientConfig {
        let mut client = self.client.clone();
        client
            .set("enable.idempotence", "true")
            .set("acks", "all")
            .set("compression.type", "zstd")
            .set("partitioner", "murmur2_random")
            .set("message.timeout.ms", self.config.delivery_timeout_ms.to_string());
        client
    }

    /// A client that administers.
    pub fn admin(&self) -> Result<AdminClient<DefaultClientContext>, Problem> {
        let context = DefaultClientContext;
        AdminClient::from_config_and_context(&self.client, context)
            .map_err(|error| Problem::BadClient(without_secrets(error)))
    }

    /// Options of what is administered.
    pub fn admin_options() -> AdminOptions {
        AdminOptions::new().request_timeout(Some(CALL)).operation_timeout(Some(CALL))
    }

    /// Makes sure that a broker answers.
    pub fn reach(&self) -> Result<(), Problem> {
        self.reach_within(CALL)
    }

    /// Waits until a broker answers, for as long as it takes, while `go_on`; tells now and then why it does not.
    pub fn await_reach(&self, go_on: impl Fn() -> bool) -> Result<bool, Problem> {
        let mut told: Option<Instant> = None;
        while go_on() {
            match self.reach_within(Duration::from_secs(2)) {
                Err(problem @ Problem::Unreachable { .. }) => {
                    if told.is_none_or(|at| at.elapsed() > Duration::from_secs(15)) {
                        tracing::warn!("{problem}; trying again");
                        told = Some(Instant::now());
                    }
                }
                Err(problem) => return Err(problem),
                Ok(()) => return Ok(true),
            }
        }
        Ok(false)
    }

    fn reach_within(&self, timeout: Duration) -> Result<(), Problem> {
        let until = Instant::now() + timeout;
        loop {
            // Errors are told when the client is polled.
            let _ = self.asking.poll(Duration::ZERO);
            let asked = self.asking.fetch_metadata(Some(&self.config.topics.queries), Duration::from_millis(500));
            let Err(error) = asked else { return Ok(()) };
            let _ = self.asking.poll(Duration::ZERO);
            let (code, reason) = match self.trouble.reason() {
                Some((code, reason)) => (Some(code), reason),
                None => (None, error.to_string()),
            };
            let brokers = self.config.brokers.clone();
            if code == Some(RDKafkaErrorCode::Authentication) {
                return Err(Problem::Authentication { brokers, problem: reason });
            }
            if Instant::now() >= until {
                return Err(Problem::Unreachable { brokers, problem: reason });
            }
        }
    }

    /// Partitions of a topic.
    pub fn partitions(&self, topic: &str) -> Result<usize, Problem> {
        let failed = |error: KafkaError| failed(format!("asking for topic {topic}"), &error);
        let metadata = self.asking.fetch_metadata(Some(topic), CALL).map_err(failed)?;
        let found = metadata.topics().iter().find(|found| found.name() == topic);
        match found.map(|found| (found.error(), found.partitions().len())) {
            Some((None, number)) if number > 0 => Ok(number),
            Some((Some(error), _)) => Err(of_topic(topic, error.into())),
            _ => Err(Problem::MissingTopic(topic.to_owned())),
        }
    }

    /// The offsets of the first message of a partition, and after its last.
    pub fn watermarks(&self, topic: &str, partition: i32) -> Result<(u64, u64), Problem> {
        let (low, high) = self
            .asking
            .fetch_watermarks(topic, partition, CALL)
            .map_err(|error| failed(format!("asking for the offsets of {topic}/{partition}"), &error))?;
        Ok((low.max(0).unsigned_abs(), high.max(0).unsigned_abs()))
    }

    /// The offset of a partition's first message that is not older than `ms`; after its last if there is none.
    pub fn offset_at(&self, topic: &str, partition: i32, ms: i64) -> Result<u64, Problem> {
        let failed = |error: KafkaError| failed(format!("asking for {topic}/{partition} at time {ms}"), &error);
        let mut asked = rdkafka::TopicPartitionList::new();
        asked.add_partition_offset(topic, partition, rdkafka::Offset::Offset(ms)).map_err(failed)?;
        let found = self.asking.offsets_for_times(asked, CALL).map_err(failed)?;
        match found.elements().first().map(|element| element.offset()) {
            Some(rdkafka::Offset::Offset(offset)) => Ok(offset.max(0).unsigned_abs()),
            _ => Ok(self.watermarks(topic, partition)?.1),
        }
    }

    /// Members of the consumer group: client and host.
    pub fn members(&self) -> Result<Vec<(String, String)>, Problem> {
        let failed = |error: KafkaError| failed(format!("asking for group {}", self.config.group), &error);
        let groups = self.asking.fetch_group_list(Some(&self.config.group), CALL).map_err(failed)?;
        let members = groups.groups().iter().flat_map(|group| group.members());
        Ok(members.map(|member| (member.client_id().to_owned(), member.client_host().to_owned())).collect())
    }

    /// What tells topics from others of the same name that were there before or will be.
    pub fn topic_ids(&self, topics: &[&str]) -> Result<BTreeMap<String, String>, Problem> {
        let names: Vec<CString> = topics.iter().filter_map(|topic| CString::new(*topic).ok()).collect();
        describe(self.asking.client().native_ptr(), &names)
    }
}

/// A client by these settings.
pub fn make<C, T: FromClientConfigAndContext<C>>(settings: &ClientConfig, context: C) -> Result<T, Problem>
where
    C: ClientContext,
{
    T::from_config_and_context(settings, context).map_err(|error| Problem::BadClient(without_secrets(error)))
}

/// What the client says of its settings, without values that may be secret.
fn without_secrets(error: KafkaError) -> String {
    match error {
        KafkaError::ClientConfig(_, problem, key, value) if is_harmless(&key) || value.is_empty() => {
            format!("{key}: {problem}")
        }
        KafkaError::ClientConfig(_, problem, key, value) => format!("{key}: {}", problem.replace(&value, MASK)),
        other => other.to_string(),
    }
}

/// Whether an error lasts: the client mends all others by itself.
pub fn is_lasting(error: &KafkaError) -> bool {
    use RDKafkaErrorCode as Code;
    let lasting = [
        Code::AutoOffsetReset,
        Code::OffsetOutOfRange,
        Code::Authentication,
        Code::TopicAuthorizationFailed,
        Code::GroupAuthorizationFailed,
        Code::UnknownTopicOrPartition,
        Code::UnknownTopic,
        Code::UnknownPartition,
    ];
    let fatal = matches!(error, KafkaError::MessageConsumptionFatal(_));
    fatal || error.rdkafka_error_code().is_some_and(|code| lasting.contains(&code))
}

/// What a lasting error comes to.
pub fn lasting(doing: &str, error: &KafkaError) -> Problem {
    use RDKafkaErrorCode as Code;
    match error.rdkafka_error_code() {
        Some(Code::AutoOffsetReset | Code::OffsetOutOfRange) => Problem::Failed {
            doing: format!("offsets lost while {doing}"),
            problem: "retention deleted messages before they were read: start again to see which".to_owned(),
        },
        Some(Code::FencedInstanceId) => Problem::AnotherInstance("one with a copy of the same store".to_owned()),
        Some(Code::UnknownTopicOrPartition | Code::UnknownTopic | Code::UnknownPartition) => {
            failed(format!("a topic is gone while {doing}"), error)
        }
        _ => failed(doing, error),
    }
}

/// A problem of no other name: transient where the error code is.
pub fn failed(doing: impl Into<String>, error: &KafkaError) -> Problem {
    let (doing, problem) = (doing.into(), error.to_string());
    match error.rdkafka_error_code() {
        Some(code) if is_transient(code) => Problem::Transient { doing, problem },
        _ => Problem::Failed { doing, problem },
    }
}

/// What a broker answers for one topic instead of a description.
fn of_topic(topic: &str, code: RDKafkaErrorCode) -> Problem {
    use RDKafkaErrorCode as Code;
    match code {
        Code::UnknownTopicOrPartition | Code::UnknownTopic => Problem::MissingTopic(topic.to_owned()),
        code => failed(format!("describing topic {topic}"), &KafkaError::AdminOp(code)),
    }
}

/// Whether a request that failed with this code may succeed later without a change to the cluster or to the settings.
fn is_transient(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as Code;
    [
        Code::AllBrokersDown,
        Code::BrokerNotAvailable,
        Code::BrokerTransportFailure,
        Code::ConcurrentTransactions,
        Code::CoordinatorLoadInProgress,
        Code::CoordinatorNotAvailable,
        Code::KafkaStorageError,
        Code::LeaderNotAvailable,
        Code::NetworkException,
        Code::NodeUpdate,
        Code::NotController,
        Code::NotCoordinator,
        Code::NotEnoughReplicas,
        Code::NotEnoughReplicasAfterAppend,
        Code::NotLeaderForPartition,
        Code::OffsetNotAvailable,
        Code::OperationTimedOut,
        Code::ReplicaNotAvailable,
        Code::RequestTimedOut,
        Code::Resolve,
        Code::WaitingForCoordinator,
    ]
    .contains(&code)
}

/// Topic ids, which rdkafka has no call for.
fn describe(client: *mut ffi::rd_kafka_t, names: &[CString]) -> Result<BTreeMap<String, String>, Problem> {
    let mut pointers: Vec<_> = names.iter().map(|name| name.as_ptr()).collect();
    // SAFETY: the client outlives the call. The collection, the queue and the event are made here and destroyed here;
    // what the event holds is read before that, and copied.
    unsafe {
        let queue = ffi::rd_kafka_queue_new(client);
        let topics = ffi::rd_kafka_TopicCollection_of_topic_names(pointers.as_mut_ptr(), pointers.len());
        ffi::rd_kafka_DescribeTopics(client, topics, ptr::null(), queue);
        ffi::rd_kafka_TopicCollection_destroy(topics);
        let event = ffi::rd_kafka_queue_poll(queue, CALL.as_millis() as i32);
        let described = read_ids(event);
        if !event.is_null() {
            ffi::rd_kafka_event_destroy(event);
        }
        ffi::rd_kafka_queue_destroy(queue);
        described
    }
}

/// # Safety
/// The event must be null, or live and the answer to a description of topics.
unsafe fn read_ids(event: *mut ffi::rd_kafka_event_t) -> Result<BTreeMap<String, String>, Problem> {
    let doing = "asking for topic ids";
    if event.is_null() {
        return Err(Problem::Transient { doing: doing.to_owned(), problem: "no answer in time".to_owned() });
    }
    let text = |pointer: *const std::ffi::c_char| {
        // SAFETY: librdkafka's strings end with a zero byte and live as long as the event.
        (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
    };
    // SAFETY: by this function's own condition; the array has `number` pointers to live descriptions.
    unsafe {
        let code = ffi::rd_kafka_event_error(event);
        if code != ffi::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR {
            return Err(failed(doing, &KafkaError::AdminOp(code.into())));
        }
        let result = ffi::rd_kafka_event_DescribeTopics_result(event);
        let mut number = 0;
        let all = ffi::rd_kafka_DescribeTopics_result_topics(result, &mut number);
        let mut ids = BTreeMap::new();
        for i in 0..number {
            let topic = *all.add(i);
            let name = text(ffi::rd_kafka_TopicDescription_name(topic)).unwrap_or_default();
            let code = ffi::rd_kafka_error_code(ffi::rd_kafka_TopicDescription_error(topic));
            if code != ffi::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR {
                return Err(of_topic(&name, code.into()));
            }
            let id = ffi::rd_kafka_TopicDescription_topic_id(topic);
            let id = if id.is_null() { None } else { text(ffi::rd_kafka_Uuid_base64str(id)) };
            ids.insert(name, id.unwrap_or_default());
        }
        Ok(ids)
    }
}
