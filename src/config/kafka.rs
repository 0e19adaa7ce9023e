//! `[transport.kafka]`: keys as written, and their validation.

use std::collections::BTreeMap;
use std::fmt;

use serde::ser::SerializeMap;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::Value;

use super::{BadSetting, at_least, bad, within};
use crate::timestamp;

/// `[transport.kafka]`, as written.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KafkaConfig {
    /// Bootstrap servers: host:port, comma-separated.
    pub brokers: String,
    /// The consumer group.
    pub group: String,
    /// Unit of ownership.
    pub lanes: Lanes,
    /// Whether to keep in-memory copies of the lanes of other instances.
    pub standby: bool,
    /// Limit on these copies, in bytes.
    pub standby_bytes_max: usize,
    /// Where a learner without a snapshot starts.
    pub start: Start,
    /// How long the merge by event time waits for an idle partition.
    pub idle_ms: u64,
    /// How long the delivery of a message is retried.
    pub delivery_timeout_ms: u64,
    /// Names of the topics.
    pub topics: Topics,
    /// Settings of topics that `topics init` creates.
    pub create: Create,
    /// librdkafka settings.
    pub client: ClientSettings,
}

impl Default for KafkaConfig {
    fn default() -> Self {
        Self {
            brokers: "localhost:9092".to_owned(),
            group: "pointsman".to_owned(),
            lanes: Lanes::One,
            standby: false,
            standby_bytes_max: 4 << 30,
            start: Start::Earliest,
            idle_ms: 1000,
            delivery_timeout_ms: 120_000,
            topics: Topics::default(),
            create: Create::default(),
            client: ClientSettings::default(),
        }
    }
}

/// `transport.kafka.lanes`
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lanes {
    /// All partitions form one lane.
    One,
    /// Partition n of queries and partition n of rewards form lane n.
    Partition,
}

/// `transport.kafka.topics`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(missing_docs, reason = "each is the name of that topic")]
pub struct Topics {
    pub queries: String,
    pub rewards: String,
    pub params: String,
    pub dead_letters: String,
    pub snapshots: String,
}

impl Default for Topics {
    fn default() -> Self {
        Self {
            queries: "queries".to_owned(),
            rewards: "rewards".to_owned(),
            params: "routing-params".to_owned(),
            dead_letters: "pointsman-dead-letters".to_owned(),
            snapshots: "pointsman-snapshots".to_owned(),
        }
    }
}

/// `transport.kafka.create`
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Create {
    /// Partitions of queries and of rewards.
    pub partitions: i32,
    /// Replication factor of all topics.
    pub replication: i32,
    /// Retention of queries and rewards; -1 = unlimited.
    pub retention_ms: i64,
    /// Retention of dead letters; -1 = unlimited.
    pub dead_letters_retention_ms: i64,
}

impl Default for Create {
    fn default() -> Self {
        let day = 24 * 3_600_000;
        Self { partitions: 6, replication: 1, retention_ms: 7 * day, dead_letters_retention_ms: 30 * day }
    }
}

/// A position in a topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Its first message.
    Earliest,
    /// After its last message.
    Latest,
    /// The first message at or after this time, in milliseconds since 1970.
    At(i64),
}

impl std::str::FromStr for Start {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "earliest" => Ok(Self::Earliest),
            "latest" => Ok(Self::Latest),
            _ => parse_time(text).map(Self::At).ok_or_else(|| {
                format!("{text:?}: must be earliest, latest, or a time such as 2026-01-31T12:00:00Z or 1769860800000")
            }),
        }
    }
}

/// Parses a time: milliseconds since 1970, or text such as RFC 3339.
pub fn parse_time(text: &str) -> Option<i64> {
    let ms = text.parse::<i64>().ok().filter(|ms| *ms >= 0);
    ms.or_else(|| timestamp::parse(text).filter(|ms| *ms >= 0))
}

impl fmt::Display for Start {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Earliest => f.write_str("earliest"),
            Self::Latest => f.write_str("latest"),
            Self::At(ms) => write!(f, "{ms}"),
        }
    }
}

impl Serialize for Start {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Start {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(
            untagged,
            expecting = "must be earliest, latest, or a time such as 2026-01-31T12:00:00Z or 1769860800000"
        )]
        enum Written {
            Ms(i64),
            Text(String),
        }
        let text = match Written::deserialize(deserializer)? {
            Written::Ms(ms) => ms.to_string(),
            Written::Text(text) => text,
        };
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// `transport.kafka.client`: librdkafka settings by name, written with dots or as tables. Values that may be secrets are
/// masked when shown.
#[derive(Clone, Default, PartialEq)]
pub struct ClientSettings(BTreeMap<String, String>);

impl ClientSettings {
    /// The settings, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    fn shown(&self) -> impl Iterator<Item = (&str, &str)> {
        self.iter().map(|(key, value)| (key, if is_harmless(key) { value } else { MASK }))
    }
}

/// Shown instead of a value that may be a secret.
pub const MASK: &str = "***";

/// Whether the value of a librdkafka setting may be shown: only if the setting is known to hold no secret. A misspelt
/// `sasl.pasword` is not.
pub fn is_harmless(key: &str) -> bool {
    let is_path = |key: &str| key.strip_suffix(".file").is_some_and(|key| SECRET.split(' ').any(|known| known == key));
    HARMLESS.split(' ').any(|known| known == key) || OWN_FILES.contains(&key) || is_path(key)
}

/// librdkafka settings that name a file themselves: their `.file` is part of the name.
pub const OWN_FILES: [&str; 3] = [
    "sasl.oauthbearer.assertion.file",
    "sasl.oauthbearer.assertion.jwt.template.file",
    "sasl.oauthbearer.assertion.private.key.file",
];

const SECRET: &str = "\
    sasl.password sasl.oauthbearer.client.secret sasl.oauthbearer.client.credentials.client.secret \
    sasl.oauthbearer.config sasl.oauthbearer.assertion.private.key.passphrase \
    sasl.oauthbearer.assertion.private.key.pem ssl.key.password ssl.key.pem ssl.keystore.password \
    ssl.certificate.pem ssl.ca.pem https.ca.pem";

const HARMLESS: &str = "\
    acks allow.auto.create.topics api.version.fallback.ms api.version.request api.version.request.timeout.ms \
    auto.commit.interval.ms auto.offset.reset batch.num.messages batch.size bootstrap.servers \
    broker.address.family broker.address.ttl broker.version.fallback check.crcs client.dns.lookup client.id \
    client.rack compression.codec compression.level compression.type connections.max.idle.ms \
    coordinator.query.interval.ms debug delivery.timeout.ms enable.auto.commit enable.auto.offset.store \
    enable.gapless.guarantee enable.idempotence enable.metrics.push enable.partition.eof \
    enable.ssl.certificate.verification fetch.error.backoff.ms fetch.max.bytes fetch.message.max.bytes \
    fetch.min.bytes fetch.queue.backoff.ms fetch.wait.max.ms group.id group.instance.id group.protocol \
    group.remote.assignor heartbeat.interval.ms https.ca.location isolation.level linger.ms log.connection.close \
    log_level max.in.flight max.in.flight.requests.per.connection max.partition.fetch.bytes max.poll.interval.ms \
    message.copy.max.bytes message.max.bytes message.send.max.retries message.timeout.ms metadata.broker.list \
    metadata.max.age.ms metadata.recovery.rebootstrap.trigger.ms metadata.recovery.strategy \
    partition.assignment.strategy partitioner queue.buffering.backpressure.threshold queue.buffering.max.kbytes \
    queue.buffering.max.messages queue.buffering.max.ms queued.max.messages.kbytes queued.min.messages \
    queuing.strategy receive.message.max.bytes reconnect.backoff.jitter.ms reconnect.backoff.max.ms \
    reconnect.backoff.ms request.required.acks request.timeout.ms retries retry.backoff.max.ms retry.backoff.ms \
    sasl.kerberos.keytab sasl.kerberos.min.time.before.relogin sasl.kerberos.principal \
    sasl.kerberos.service.name sasl.mechanism sasl.mechanisms sasl.oauthbearer.client.id \
    sasl.oauthbearer.grant.type sasl.oauthbearer.method sasl.oauthbearer.scope sasl.username security.protocol \
    session.timeout.ms socket.blocking.max.ms socket.connection.setup.timeout.ms socket.keepalive.enable \
    socket.max.fails socket.nagle.disable socket.receive.buffer.bytes socket.send.buffer.bytes socket.timeout.ms \
    ssl.ca.certificate.stores ssl.ca.location ssl.certificate.location ssl.cipher.suites ssl.crl.location \
    ssl.curves.list ssl.endpoint.identification.algorithm ssl.key.location ssl.keystore.location ssl.providers \
    ssl.sigalgs.list statistics.interval.ms sticky.partitioning.linger.ms topic.metadata.propagation.max.ms \
    topic.metadata.refresh.fast.interval.ms topic.metadata.refresh.interval.ms topic.metadata.refresh.sparse \
    transaction.timeout.ms transactional.id";

impl fmt::Debug for ClientSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.shown()).finish()
    }
}

impl Serialize for ClientSettings {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        self.shown().try_for_each(|(key, value)| map.serialize_entry(key, value))?;
        map.end()
    }
}

impl<'de> Deserialize<'de> for ClientSettings {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut settings = BTreeMap::new();
        for (key, value) in BTreeMap::<String, Value>::deserialize(deserializer)? {
            flatten(key, value, &mut settings).map_err(serde::de::Error::custom)?;
        }
        Ok(Self(settings))
    }
}

/// Environment variables cannot have dots: there `sasl.password` comes as `password` within `sasl`.
fn flatten(key: String, value: Value, into: &mut BTreeMap<String, String>) -> Result<(), String> {
    match value {
        Value::Object(inner) => {
            inner.into_iter().try_for_each(|(part, value)| flatten(format!("{key}.{part}"), value, into))?;
        }
        Value::String(text) => drop(into.insert(key, text)),
        Value::Number(number) => drop(into.insert(key, number.to_string())),
        Value::Bool(flag) => drop(into.insert(key, flag.to_string())),
        Value::Null | Value::Array(_) => return Err(format!("{key} must be a string, a number or a boolean")),
    }
    Ok(())
}

impl KafkaConfig {
    /// Checks every key.
    pub fn check(&self) -> Result<(), BadSetting> {
        if self.brokers.trim().is_empty() {
            return Err(bad(
                "transport.kafka.brokers",
                "\"\"",
                "must be host:port, or a comma-separated list of these",
            ));
        }
        if self.group.is_empty() {
            return Err(bad("transport.kafka.group", "\"\"", "must not be empty"));
        }
        if self.standby && self.lanes == Lanes::One {
            let way_out =
                "requires transport.kafka.lanes = \"partition\": with one lane there is no other lane to stand by for";
            return Err(bad("transport.kafka.standby", "true", way_out));
        }
        at_least("transport.kafka.standby_bytes_max", self.standby_bytes_max, 1)?;
        within("transport.kafka.idle_ms", self.idle_ms, 0, 3_600_000)?;
        within("transport.kafka.delivery_timeout_ms", self.delivery_timeout_ms, 1000, 86_400_000)?;
        within("transport.kafka.create.partitions", self.create.partitions, 1, 100_000)?;
        within("transport.kafka.create.replication", self.create.replication, 1, 100)?;
        at_least("transport.kafka.create.retention_ms", self.create.retention_ms, -1)?;
        let days = self.create.dead_letters_retention_ms;
        at_least("transport.kafka.create.dead_letters_retention_ms", days, -1)?;
        let Topics { queries, rewards, params, dead_letters, snapshots } = &self.topics;
        let names = [queries, rewards, params, dead_letters, snapshots];
        for (i, name) in names.into_iter().enumerate() {
            if !is_topic(name) {
                let allowed = "a topic name must have 1 to 249 characters of A-Z a-z 0-9 . _ -";
                return Err(bad("transport.kafka.topics", format!("{name:?}"), allowed));
            }
            if names[..i].contains(&name) {
                return Err(bad("transport.kafka.topics", name, "used twice: every topic needs its own name"));
            }
        }
        Ok(())
    }
}

fn is_topic(name: &str) -> bool {
    let good = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    (1..=249).contains(&name.len()) && name != "." && name != ".." && name.bytes().all(good)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_settings_flatten_and_hide_secrets() {
        let text = r#"
            client = { "security.protocol" = "SASL_SSL", "fetch.wait.max.ms" = 10, sasl = { password = "s3cret", username = "me" } }
        "#;
        let config: KafkaConfig = toml::from_str(text).unwrap();
        let all: Vec<(&str, &str)> = config.client.iter().collect();
        let expected = [
            ("fetch.wait.max.ms", "10"),
            ("sasl.password", "s3cret"),
            ("sasl.username", "me"),
            ("security.protocol", "SASL_SSL"),
        ];
        assert_eq!(all, expected);
        let shown = format!("{config:?}{}", serde_json::to_string(&config).unwrap());
        assert!(!shown.contains("s3cret") && shown.contains("***") && shown.contains("SASL_SSL"), "{shown}");
        assert!(toml::from_str::<KafkaConfig>("client = { a = [1] }").is_err());
        for (key, expected) in [
            ("sasl.password.file", true),
            ("sasl.oauthbearer.assertion.private.key.file", true),
            ("sasl.pasword.file", false),
            ("sasl.pasword", false),
            ("ssl.key.pem", false),
            ("sasl.oauthbearer.token.endpoint.url", false),
            ("sasl.kerberos.kinit.cmd", false),
            ("ssl.key.location", true),
        ] {
            assert_eq!(is_harmless(key), expected, "{key}");
        }
    }

    #[test]
    fn starts_are_words_or_times() {
        for (text, expected) in [
            ("start = \"earliest\"", Some(Start::Earliest)),
            ("start = \"latest\"", Some(Start::Latest)),
            ("start = 1769860800000", Some(Start::At(1_769_860_800_000))),
            ("start = \"2026-01-31T12:00:00Z\"", Some(Start::At(1_769_860_800_000))),
            ("start = \"yesterday\"", None),
            ("start = -5", None),
        ] {
            assert_eq!(toml::from_str::<KafkaConfig>(text).ok().map(|config| config.start), expected, "{text}");
        }
    }

    #[test]
    fn bad_keys_are_named() {
        let check = |change: fn(&mut KafkaConfig), expected: &str| {
            let mut config = KafkaConfig::default();
            change(&mut config);
            let error = config.check().unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        };
        check(|c| c.brokers.clear(), "transport.kafka.brokers");
        check(|c| c.group.clear(), "transport.kafka.group");
        check(|c| c.topics.rewards = "queries".to_owned(), "transport.kafka.topics = queries: used twice");
        check(|c| c.topics.params = "a b".to_owned(), "a topic name must have 1 to 249");
        check(|c| c.create.partitions = 0, "transport.kafka.create.partitions = 0: must be");
        assert!(KafkaConfig::default().check().is_ok());
    }
}
