//! The Kafka cluster: creation of clients, metadata of topics, and errors.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::fmt;
use std::ptr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::bindings as ffi;
use rdkafka::client::{ClientContext, DefaultClientContext};
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use thiserror::Error;

use super::client::Client;
use super::unreadable::Unreadable;
use crate::config::{KafkaConfig, MASK, OWN_FILES, is_harmless};
use crate::transport::lock;

/// Timeout of one call to the brokers.
pub const CALL: Duration = Duration::from_secs(10);

/// Session timeout of group members, unless configured.
const SESSION: (&str, &str) = ("session.timeout.ms", "10000");

/// Whether this program can use TLS, SCRAM and OAUTHBEARER: librdkafka needs OpenSSL for all three.
pub const HAS_TLS: bool = cfg!(any(feature = "kafka-tls", feature = "kafka-tls-system"));

/// The pause before a broker that could not answer is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// A Kafka error, with its remedy.
#[derive(Debug, Clone, Error, PartialEq, Eq)]
pub enum Problem {
    /// A client cannot be created.
    #[error("transport.kafka.client: {0}")]
    BadClient(String),
    /// A setting needs TLS, and the program was built without it.
    #[error(
        "transport.kafka.client: {key} = {value} needs OpenSSL, which this program was built without: build it with `--features \
         kafka-tls`, or use the container image"
    )]
    NoTls {
        /// The setting.
        key: String,
        /// Its value.
        value: String,
    },
    /// No broker answers.
    #[error("cannot reach any broker of {brokers} (transport.kafka.brokers): {problem}")]
    Unreachable {
        /// The bootstrap servers.
        brokers: String,
        /// The error of the client.
        problem: String,
    },
    /// Authentication failed.
    #[error("the brokers of {brokers} reject the credentials (sasl.* in transport.kafka.client): {problem}")]
    Authentication {
        /// The bootstrap servers.
        brokers: String,
        /// The error of the client.
        problem: String,
    },
    /// A topic does not exist.
    #[error("topic {0} does not exist: create it with `pointsman topics init`")]
    MissingTopic(String),
    /// The event topics differ in their number of partitions.
    #[error(
        "topic {queries} has {of_queries} partitions, but {rewards} has {of_rewards}: transport.kafka.lanes = \"partition\" \
         needs equal numbers; add partitions to the smaller topic, or set lanes = \"one\""
    )]
    UnequalPartitions {
        /// The queries topic.
        queries: String,
        /// Its partitions.
        of_queries: usize,
        /// The rewards topic.
        rewards: String,
        /// Its partitions.
        of_rewards: usize,
    },
    /// Retention deleted unread messages.
    #[error(
        "offsets lost: {log} resumes at offset {wanted}, but starts at {oldest}: retention deleted {} unread messages. \
         `pointsman learn --accept-gap` skips them and records the gap; raise retention.ms of the topic to avoid this",
        oldest - wanted
    )]
    OffsetsLost {
        /// Topic and partition.
        log: String,
        /// Offset to resume from.
        wanted: u64,
        /// First offset of the partition.
        oldest: u64,
    },
    /// A batch cannot be read.
    #[error("{0}")]
    Unreadable(Unreadable),
    /// A topic was deleted and recreated.
    #[error(
        "topic recreated: {log} was read up to offset {wanted}, but {found}. `pointsman learn --accept-gap` reads the new \
         topic from its beginning and records the gap"
    )]
    Recreated {
        /// Topic and partition.
        log: String,
        /// Offset to resume from.
        wanted: u64,
        /// What was found instead.
        found: String,
    },
    /// The store holds positions in other logs.
    #[error(
        "the store holds positions in other logs (such as {0}), not in these topics: set them with `pointsman snapshots \
         import --start-at FILE`, where FILE is the positions file that `pointsman dump` wrote next to the logs"
    )]
    OtherLogs(String),
    /// The store holds other lanes.
    #[error(
        "the store holds lane {0:?}, which does not match transport.kafka.lanes: a store cannot change its lanes; set lanes \
         back, or set another store.dir"
    )]
    OtherLanes(String),
    /// The number of partitions has changed.
    #[error(
        "topic {topic} has {now} partitions, but its lanes were created for {before}: with transport.kafka.lanes = \
         \"partition\" spaces now map to other lanes. Stop the producers and the whole fleet, then run `pointsman repartition` \
         to move their states"
    )]
    MorePartitions {
        /// The topic.
        topic: String,
        /// Partitions when the state was written.
        before: usize,
        /// Partitions now.
        now: usize,
    },
    /// The state of a lane cannot be used.
    #[error(
        "cannot use the state of the lane in {lane} (transport.kafka.topics.snapshots): {problem}. If it is lost, delete the \
         records of that partition: the instance whose store has the newest copy of the lane then restores it"
    )]
    BadState {
        /// Topic and partition.
        lane: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The snapshots topic does not meet the requirements of lanes.
    #[error(
        "topic {topic} (transport.kafka.topics.snapshots) {problem}: with transport.kafka.lanes = \"partition\" {wanted}"
    )]
    BadSnapshotsTopic {
        /// The topic.
        topic: String,
        /// The setting found.
        problem: String,
        /// The setting required, and what to do.
        wanted: String,
    },
    /// The retention of a topic is too short.
    #[error(
        "topic {topic} has retention.ms = {found}, but a join with the takeover of a lane may need {wanted} ms \
         (join.window_ms, join.early_ms, join.reorder_ms): raise retention.ms of the topic, or lower join.window_ms"
    )]
    ShortRetention {
        /// The topic.
        topic: String,
        /// Its retention in milliseconds.
        found: u64,
        /// The required retention in milliseconds.
        wanted: u64,
    },
    /// Another instance has taken over.
    #[error("lane {0} is fenced: another instance took it over and resumes from its last snapshot")]
    Fenced(String),
    /// The group has given the lane to another instance.
    #[error("lane {0} was lost: the group has assigned it to another instance")]
    Lost(String),
    /// Parameters exceed the message size of their topic.
    #[error(
        "oversized parameters: space {space} needs {bytes} bytes, but topic {topic} has max.message.bytes = {most}: raise it \
         to {bytes} or more, or lower learner.rank to {rank}"
    )]
    OversizedParams {
        /// The space.
        space: String,
        /// Their size.
        bytes: usize,
        /// max.message.bytes of the topic.
        most: usize,
        /// The parameters topic.
        topic: String,
        /// A rank that fits.
        rank: usize,
    },
    /// Another instance reads the same topics.
    #[error(
        "another instance: {0} is a member of the consumer group (transport.kafka.group), and transport.kafka.lanes = \
         \"one\" permits one instance: stop it first. A dead instance leaves the group when its session times out (10 s by \
         default)"
    )]
    AnotherInstance(String),
    /// An instance of the same name runs.
    #[error(
        "instance {instance} runs already, at {host}: two instances must not use copies of one store.dir. Stop that one, or \
         give this one a store.dir of its own (or delete the file `instance` in the copy)"
    )]
    SameInstance {
        /// The ID in the store.
        instance: String,
        /// Where it runs.
        host: String,
    },
    /// Other instances own lanes.
    #[error(
        "another instance: {0} is a member of the consumer group (transport.kafka.group) and may own lanes: stop the whole \
         fleet first. A dead instance leaves the group when its session times out"
    )]
    FleetRuns(String),
    /// Messages could not be delivered.
    #[error("cannot deliver {number} messages to {topic} within transport.kafka.delivery_timeout_ms: {problem}")]
    NotDelivered {
        /// Their destination.
        topic: String,
        /// Number of messages.
        number: usize,
        /// The error of the client.
        problem: String,
    },
    /// A broker cannot answer now: it restarts, elects a leader or does not reach us. A retry may succeed.
    #[error("{doing}: {problem}")]
    Transient {
        /// The operation.
        doing: String,
        /// What the client says.
        problem: String,
    },
    /// Anything else.
    #[error("{doing}: {problem}")]
    Failed {
        /// What failed.
        doing: String,
        /// The error of the client.
        problem: String,
    },
}

/// Errors of the Kafka clients of a process.
#[derive(Debug, Default)]
pub struct Trouble {
    last: Mutex<Option<(RDKafkaErrorCode, String)>>,
    /// Errors so far, by code.
    counts: Mutex<BTreeMap<String, u64>>,
}

impl Trouble {
    /// Records an error of a client.
    pub fn note(&self, error: &KafkaError, reason: &str) {
        let code = error.rdkafka_error_code().unwrap_or(RDKafkaErrorCode::Fail);
        // Not an error: the end of a partition.
        if code == RDKafkaErrorCode::PartitionEOF {
            return;
        }
        *lock(&self.counts).entry(format!("{code:?}")).or_default() += 1;
        // "All brokers down" is less specific than its cause.
        if code != RDKafkaErrorCode::AllBrokersDown {
            *lock(&self.last) = Some((code, reason.to_owned()));
        }
        tracing::debug!(%error, reason, "kafka client error");
    }

    /// Errors so far, by code.
    pub fn counts(&self) -> BTreeMap<String, u64> {
        lock(&self.counts).clone()
    }

    /// Why brokers cannot be reached, if known.
    fn reason(&self) -> Option<(RDKafkaErrorCode, String)> {
        lock(&self.last).clone()
    }
}

/// Forwards a log line of a client.
pub fn log_line(level: RDKafkaLogLevel, facility: &str, line: &str) {
    // The client retries what it logs as an error; permanent errors are returned to the caller.
    match level {
        RDKafkaLogLevel::Debug | RDKafkaLogLevel::Info => tracing::trace!(facility, "librdkafka: {line}"),
        _ => tracing::debug!(facility, "librdkafka: {line}"),
    }
}

/// A client context that records errors.
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
    /// Errors of the clients.
    pub trouble: Arc<Trouble>,
    client: ClientConfig,
    asking: Arc<Client<BaseConsumer<Plain>>>,
}

/// Whether a client setting has no effect, or fails, without OpenSSL.
fn needs_tls(key: &str, value: &str) -> bool {
    let value = value.to_ascii_lowercase();
    match key {
        "security.protocol" => value.ends_with("ssl"),
        "sasl.mechanism" | "sasl.mechanisms" => value.starts_with("scram") || value == "oauthbearer",
        _ => false,
    }
}

impl Cluster {
    /// Creates the client without contacting the cluster. Fails if the client settings are invalid.
    pub fn new(config: &KafkaConfig) -> Result<Self, Problem> {
        let mut client = ClientConfig::new();
        // Reconnect soon after a broker comes back.
        client.set("client.id", "pointsman").set("reconnect.backoff.max.ms", "1000");
        for (key, value) in config.client.iter() {
            match key.strip_suffix(".file").filter(|_| !OWN_FILES.contains(&key)) {
                Some(name) => {
                    let text = std::fs::read_to_string(value)
                        .map_err(|error| Problem::BadClient(format!("cannot read the file of {key}: {error}")))?;
                    client.set(name, text.trim_end_matches(['\n', '\r']));
                }
                None => drop(client.set(key, value)),
            }
        }
        client.set("bootstrap.servers", &config.brokers);
        if let Some((key, value)) = config.client.iter().find(|(key, value)| needs_tls(key, value)).filter(|_| !HAS_TLS)
        {
            return Err(Problem::NoTls { key: key.to_owned(), value: value.to_owned() });
        }
        let trouble = Arc::new(Trouble::default());
        let mut asking = client.clone();
        asking
            .set("group.id", &config.group)
            .set("enable.auto.commit", "false")
            // The end is the last stable offset: messages of open transactions cannot be read yet.
            .set("isolation.level", "read_committed");
        let asking = Client::new(&asking, Plain(trouble.clone()))?;
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
        if client.get(SESSION.0).is_none() {
            client.set(SESSION.0, SESSION.1);
        }
        client
    }

    /// After this time a dead member leaves the group.
    pub fn session(&self) -> Duration {
        let ms = self.consumer().get(SESSION.0).and_then(|ms| ms.parse().ok());
        Duration::from_millis(ms.unwrap_or(10_000))
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

    /// An admin client.
    pub fn admin(&self) -> Result<Client<AdminClient<DefaultClientContext>>, Problem> {
        Client::new(&self.client, DefaultClientContext)
    }

    /// Options of admin requests.
    pub fn admin_options() -> AdminOptions {
        AdminOptions::new().request_timeout(Some(CALL)).operation_timeout(Some(CALL))
    }

    /// Checks that a broker answers.
    pub fn reach(&self) -> Result<(), Problem> {
        self.reach_within(CALL)
    }

    /// Waits until a broker answers, as long as `go_on` holds; logs the problem at intervals.
    pub fn await_reach(&self, go_on: impl Fn() -> bool) -> Result<bool, Problem> {
        let mut told: Option<Instant> = None;
        while go_on() {
            match self.reach_within(Duration::from_secs(2)) {
                Err(problem @ Problem::Unreachable { .. }) => {
                    if told.is_none_or(|at| at.elapsed() > Duration::from_secs(15)) {
                        tracing::warn!("{problem}; retrying");
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
            // Polling the client delivers its errors.
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
        let doing = || format!("cannot get metadata of topic {topic}");
        let metadata = ask(doing, || self.asking.fetch_metadata(Some(topic), CALL))?;
        let found = metadata.topics().iter().find(|found| found.name() == topic);
        match found.map(|found| (found.error(), found.partitions().len())) {
            Some((None, number)) if number > 0 => Ok(number),
            Some((Some(error), _)) => Err(of_topic(topic, error.into())),
            _ => Err(Problem::MissingTopic(topic.to_owned())),
        }
    }

    /// The low and high watermarks of a partition.
    pub fn watermarks(&self, topic: &str, partition: i32) -> Result<(u64, u64), Problem> {
        let doing = || format!("cannot get the offsets of {topic}/{partition}");
        let (low, high) = ask(doing, || self.asking.fetch_watermarks(topic, partition, CALL))?;
        Ok((low.max(0).unsigned_abs(), high.max(0).unsigned_abs()))
    }

    /// The offset of the first message not older than `ms`; the end of the partition if there is none.
    pub fn offset_at(&self, topic: &str, partition: i32, ms: i64) -> Result<u64, Problem> {
        let doing = || format!("cannot get the offset of {topic}/{partition} at time {ms}");
        let mut asked = rdkafka::TopicPartitionList::new();
        let added = asked.add_partition_offset(topic, partition, rdkafka::Offset::Offset(ms));
        added.map_err(|error| failed(doing(), &error))?;
        let found = ask(doing, || self.asking.offsets_for_times(asked.clone(), CALL))?;
        match found.elements().first().map(|element| element.offset()) {
            Some(rdkafka::Offset::Offset(offset)) => Ok(offset.max(0).unsigned_abs()),
            _ => Ok(self.watermarks(topic, partition)?.1),
        }
    }

    /// Members of the consumer group.
    pub fn members(&self) -> Result<Vec<Member>, Problem> {
        let doing = || format!("cannot get the members of group {}", self.config.group);
        let groups = ask(doing, || self.asking.fetch_group_list(Some(&self.config.group), CALL))?;
        let members = groups.groups().iter().flat_map(|group| group.members());
        let member = |member: &rdkafka::groups::GroupMemberInfo| Member {
            instance: member.client_id().to_owned(),
            host: member.client_host().to_owned(),
            id: member.id().to_owned(),
        };
        Ok(members.map(member).collect())
    }

    /// Topic IDs, which distinguish a recreated topic from the old one of the same name.
    pub fn topic_ids(&self, topics: &[&str]) -> Result<BTreeMap<String, String>, Problem> {
        let names: Vec<CString> = topics.iter().filter_map(|topic| CString::new(*topic).ok()).collect();
        describe(self.asking.client().native_ptr(), &names)
    }
}

/// A member of the consumer group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// The ID of its instance.
    pub instance: String,
    /// Where it runs.
    pub host: String,
    /// The ID of the membership: another one after each start.
    pub id: String,
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.instance, self.host)
    }
}

/// The client's complaint about its settings, with secret values masked.
pub(super) fn without_secrets(error: KafkaError) -> String {
    match error {
        KafkaError::ClientConfig(_, problem, key, value) if is_harmless(&key) || value.is_empty() => {
            format!("{key}: {problem}")
        }
        KafkaError::ClientConfig(_, problem, key, value) => format!("{key}: {}", problem.replace(&value, MASK)),
        other => other.to_string(),
    }
}

/// Whether an error is permanent: the client recovers from all others by itself.
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

/// The problem that a permanent error reports; `doing` is a phrase such as "reading topic x".
pub fn lasting(doing: &str, error: &KafkaError) -> Problem {
    use RDKafkaErrorCode as Code;
    match error.rdkafka_error_code() {
        Some(Code::AutoOffsetReset | Code::OffsetOutOfRange) => Problem::Failed {
            doing: format!("offsets lost while {doing}"),
            problem: "retention deleted messages before they were read; restart to see which".to_owned(),
        },
        Some(Code::UnknownTopicOrPartition | Code::UnknownTopic | Code::UnknownPartition) => {
            failed(format!("a topic was deleted while {doing}"), error)
        }
        _ => failed(format!("error while {doing}"), error),
    }
}

/// A problem without a variant of its own: transient if the error code is.
pub fn failed(doing: impl Into<String>, error: &KafkaError) -> Problem {
    let (doing, problem) = (doing.into(), error.to_string());
    match error.rdkafka_error_code() {
        Some(code) if is_transient(code) => Problem::Transient { doing, problem },
        _ => Problem::Failed { doing, problem },
    }
}

/// Asks the brokers, and retries for at most [`CALL`] while they cannot answer: after a restart a client finds the new leader of
/// a partition only by a request that fails.
fn ask<T>(doing: impl Fn() -> String, request: impl Fn() -> Result<T, KafkaError>) -> Result<T, Problem> {
    let begun = Instant::now();
    loop {
        match request().map_err(|error| failed(doing(), &error)) {
            Err(Problem::Transient { .. }) if begun.elapsed() < CALL => std::thread::sleep(ASK_AGAIN),
            answer => return answer,
        }
    }
}

/// What a broker answers for one topic instead of a description.
fn of_topic(topic: &str, code: RDKafkaErrorCode) -> Problem {
    use RDKafkaErrorCode as Code;
    match code {
        Code::UnknownTopicOrPartition | Code::UnknownTopic => Problem::MissingTopic(topic.to_owned()),
        code => failed(format!("cannot describe topic {topic}"), &KafkaError::MetadataFetch(code)),
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

/// Reads topic IDs; rdkafka has no wrapper for this call.
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
    let doing = "cannot get topic IDs";
    if event.is_null() {
        let problem = "the brokers did not answer in time".to_owned();
        return Err(Problem::Transient { doing: doing.to_owned(), problem });
    }
    let text = |pointer: *const std::ffi::c_char| {
        // SAFETY: librdkafka's strings end with a zero byte and live as long as the event.
        (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
    };
    // SAFETY: by this function's own condition; the array has `number` pointers to live descriptions.
    unsafe {
        let code = ffi::rd_kafka_event_error(event);
        if code != ffi::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR {
            return Err(failed(doing, &KafkaError::MetadataFetch(code.into())));
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

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_broker_that_cannot_answer_is_asked_again_and_others_are_not() {
        let asked = Cell::new(0);
        let ask_with = |code: RDKafkaErrorCode| {
            asked.set(0);
            ask(
                || "cannot ask".to_owned(),
                || {
                    asked.set(asked.get() + 1);
                    if asked.get() < 3 { Err(KafkaError::MetadataFetch(code)) } else { Ok(7) }
                },
            )
        };
        assert_eq!(ask_with(RDKafkaErrorCode::NotLeaderForPartition), Ok(7));
        assert_eq!(asked.get(), 3);
        assert!(matches!(ask_with(RDKafkaErrorCode::TopicAuthorizationFailed), Err(Problem::Failed { .. })));
        assert_eq!(asked.get(), 1);
        let missing = of_topic("t", RDKafkaErrorCode::UnknownTopicOrPartition);
        assert_eq!(missing, Problem::MissingTopic("t".to_owned()));
        assert!(matches!(of_topic("t", RDKafkaErrorCode::LeaderNotAvailable), Problem::Transient { .. }));
    }
}
