//! Producer of parameters and dead letters, which are done once the brokers have acknowledged them.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, DeliveryResult, Producer, ProducerContext};

use super::client::Client;
use super::cluster::{Cluster, Problem, Trouble, failed, log_line};
use super::positions::Gap;
use crate::config::Topics;
use crate::event::Name;
use crate::failpoint;
use crate::transport::{Letter, Outlet, TransportError, lock, now_ms};
use crate::wire::events::Bad;

/// Publishes results to Kafka.
pub struct KafkaOutlet {
    producer: Client<BaseProducer<Deliveries>>,
    undelivered: Arc<Undelivered>,
    cluster: Cluster,
    limits: LetterLimits,
}

/// Size limits of a dead letter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LetterLimits {
    /// Bytes of the event.
    pub value_bytes: usize,
    /// Bytes of the message, all of it.
    pub message_bytes: usize,
}

impl LetterLimits {
    /// The largest batch of letters: brokers apply the limit of a message to its whole batch.
    pub fn batch_bytes(&self) -> usize {
        // At most the client's default.
        self.message_bytes.saturating_sub(FRAME_BYTES).clamp(1, 1_000_000)
    }
}

/// Messages that could not be delivered.
#[derive(Default)]
pub(super) struct Undelivered(Mutex<Failures>);

/// Delivery failures.
#[derive(Default)]
pub(super) struct Failures {
    /// Number of messages that failed for a reason other than their size.
    pub number: usize,
    /// The last error.
    pub problem: String,
    /// Whether the brokers forbid any of them.
    pub is_final: bool,
    /// Indices of messages that are too large.
    pub too_large: BTreeSet<usize>,
}

impl Undelivered {
    /// Takes the failures recorded so far.
    pub(super) fn take(&self) -> Failures {
        std::mem::take(&mut *lock(&self.0))
    }

    /// Whether a message could not be delivered.
    pub(super) fn any(&self) -> bool {
        let failures = lock(&self.0);
        failures.number > 0 || !failures.too_large.is_empty()
    }

    fn note(&self, number: usize, error: &KafkaError) {
        let mut failures = lock(&self.0);
        if error.rdkafka_error_code() == Some(RDKafkaErrorCode::MessageSizeTooLarge) {
            failures.too_large.insert(number);
        } else {
            failures.number += 1;
        }
        failures.problem = error.to_string();
        failures.is_final |= error.rdkafka_error_code().is_some_and(is_forbidden);
    }
}

impl Failures {
    /// The problem, for `number` messages to `topic`. A retry helps neither against a size nor against a missing permission.
    pub(super) fn problem(&self, topic: String, number: usize) -> Problem {
        let problem = self.problem.clone();
        if self.is_final || self.number == 0 {
            return Problem::Failed { doing: format!("cannot deliver {number} messages to {topic}"), problem };
        }
        Problem::NotDelivered { topic, number, problem }
    }
}

/// Whether the brokers refuse what a producer may do.
fn is_forbidden(code: RDKafkaErrorCode) -> bool {
    use RDKafkaErrorCode as Code;
    [Code::TopicAuthorizationFailed, Code::ClusterAuthorizationFailed, Code::TransactionalIdAuthorizationFailed]
        .contains(&code)
}

/// A producer's callbacks.
pub(super) struct Deliveries {
    pub(super) undelivered: Arc<Undelivered>,
    pub(super) trouble: Arc<Trouble>,
}

/// A message to send.
#[derive(Clone)]
pub struct Outgoing {
    /// Its topic.
    pub topic: String,
    /// Its partition; without one, the key decides.
    pub partition: Option<i32>,
    /// Its key.
    pub key: Vec<u8>,
    /// Its value; none is a tombstone.
    pub value: Option<Vec<u8>>,
    /// Its headers.
    pub headers: Vec<(&'static str, String)>,
    /// What to do if the brokers reject its size.
    pub if_too_large: IfTooLarge,
}

/// What to do with a message that the brokers reject for its size.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum IfTooLarge {
    /// Fail.
    #[default]
    Fail,
    /// Send a message with only this key instead.
    SendKey(String),
    /// Drop it and log an error.
    Drop,
}

/// Overhead of a message beyond key, value and headers: its frame and that of its batch.
const FRAME_BYTES: usize = 256;

/// Overhead of a header beyond name and value.
const HEADER_BYTES: usize = 10;

impl Outgoing {
    /// Parameters of a space.
    pub fn params(topics: &Topics, space: &Name, bytes: &[u8]) -> Self {
        Self {
            topic: topics.params.clone(),
            partition: None,
            key: space.as_str().as_bytes().to_vec(),
            value: Some(bytes.to_vec()),
            headers: vec![("content-type", PARAMS_TYPE.to_owned())],
            if_too_large: IfTooLarge::Fail,
        }
    }

    /// A dead letter. Each part and their sum are bounded: the event is truncated to fit, and headers record that.
    pub fn dead_letter(topics: &Topics, letter: &Letter, limits: LetterLimits) -> Self {
        let detail = letter.detail();
        let Letter { letter, place, origin, time_ms } = letter;
        let of_place = |field: &str| place[field].as_str().map_or_else(|| place[field].to_string(), str::to_owned);
        let mut headers = vec![
            ("reason", letter.bad.reason().to_owned()),
            ("detail", detail),
            ("time_ms", time_ms.to_string()),
            ("source", of_place("source")),
            ("partition", of_place("partition")),
            ("offset", of_place("offset")),
        ];
        if let Bad::Gap { from, to, .. } = &letter.bad {
            headers.extend([("from", from.to_string()), ("to", to.to_string())]);
        }
        let origin = origin.as_deref().cloned().unwrap_or_default();
        headers.extend(origin.traceparent.map(|traceparent| ("traceparent", traceparent)));
        let key = origin.key.unwrap_or_default();
        if key.len() < origin.key_bytes {
            headers.push(("key_cut_from_bytes", origin.key_bytes.to_string()));
        }
        let place = format!("{}/{}/{}", of_place("source"), of_place("partition"), of_place("offset"));
        let topic = topics.dead_letters.clone();
        let if_too_large = IfTooLarge::SendKey(place);
        let mut message = Self { topic, partition: None, key, value: None, headers, if_too_large };
        let cut_from = ("cut_from_bytes", letter.bytes.len().to_string());
        let around = message.bytes() + header_bytes(&cut_from);
        let most = limits.value_bytes.min(limits.message_bytes.saturating_sub(around));
        let kept = &letter.bytes[..letter.bytes.len().min(most)];
        if kept.len() < letter.bytes.len() {
            message.headers.push(cut_from);
        }
        message.value = Some(kept.to_vec());
        message
    }

    /// Maximum size without compression.
    fn bytes(&self) -> usize {
        let value = self.value.as_ref().map_or(0, Vec::len);
        FRAME_BYTES + self.key.len() + value + self.headers.iter().map(header_bytes).sum::<usize>()
    }

    /// A smaller replacement for a message that is too large, if there is one.
    fn shrink(self) -> Option<Self> {
        let Self { topic, partition, key, if_too_large, .. } = self;
        if let IfTooLarge::SendKey(place) = if_too_large {
            tracing::warn!(
                topic,
                place,
                "dead letter exceeds max.message.bytes of its topic; sending it without its event"
            );
            let (key, if_too_large) = (place.into_bytes(), IfTooLarge::Drop);
            return Some(Self { topic, partition, key, value: None, headers: Vec::new(), if_too_large });
        }
        let place = String::from_utf8_lossy(&key).into_owned();
        tracing::error!(
            topic,
            place,
            "dead letter exceeds max.message.bytes of its topic and is lost; raise max.message.bytes"
        );
        None
    }

    /// Passes it to a producer under an index; waits while the queue of the producer is full.
    pub(super) fn send(&self, producer: &BaseProducer<Deliveries>, number: usize) -> Result<(), KafkaError> {
        let headers = self.headers.iter();
        let headers =
            headers.fold(OwnedHeaders::new(), |all, (key, value)| all.insert(Header { key, value: Some(value) }));
        let mut record = BaseRecord::<[u8], [u8], usize>::with_opaque_to(&self.topic, number).key(&self.key[..]);
        record.headers = Some(headers);
        (record.partition, record.payload) = (self.partition, self.value.as_deref());
        loop {
            match producer.send(record) {
                Ok(()) => return Ok(()),
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), back)) => {
                    producer.poll(Duration::from_millis(100));
                    record = back;
                }
                // The client's own limit is reported like that of the brokers.
                Err((error @ KafkaError::MessageProduction(RDKafkaErrorCode::MessageSizeTooLarge), _)) => {
                    producer.context().undelivered.note(number, &error);
                    return Ok(());
                }
                Err((error, _)) => return Err(error),
            }
        }
    }
}

fn header_bytes((name, value): &(&str, String)) -> usize {
    name.len() + value.len() + HEADER_BYTES
}

/// Indices of dead letters at least as large as the smallest one that is too large.
pub(super) fn as_large(messages: &[Outgoing], too_large: &BTreeSet<usize>) -> Vec<usize> {
    let smallest = too_large.iter().filter_map(|number| messages.get(*number)).map(Outgoing::bytes).min();
    let is_letter = |message: &Outgoing| message.if_too_large != IfTooLarge::Fail;
    let as_large = |message: &Outgoing| smallest.is_some_and(|bytes| message.bytes() >= bytes);
    let numbered = messages.iter().enumerate().filter(|(_, message)| is_letter(message) && as_large(message));
    numbered.map(|(number, _)| number).collect()
}

/// Replaces messages that are too large; `None` if one of them must not be replaced.
pub(super) fn shrink(messages: Vec<Outgoing>, too_large: &BTreeSet<usize>) -> Option<Vec<Outgoing>> {
    let mut shrunk = Vec::with_capacity(messages.len());
    for (number, message) in messages.into_iter().enumerate() {
        match (too_large.contains(&number), &message.if_too_large) {
            (false, _) => shrunk.push(message),
            (true, IfTooLarge::Fail) => return None,
            (true, _) => shrunk.extend(message.shrink()),
        }
    }
    Some(shrunk)
}

impl ClientContext for Deliveries {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        log_line(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.trouble.note(&error, reason);
    }
}

impl ProducerContext for Deliveries {
    type DeliveryOpaque = usize;

    fn delivery(&self, result: &DeliveryResult<'_>, number: usize) {
        if let Err((error, _)) = result {
            self.undelivered.note(number, error);
        }
    }
}

impl KafkaOutlet {
    /// An outlet whose messages may have up to `message_bytes`.
    pub fn new(cluster: &Cluster, message_bytes: usize, limits: LetterLimits) -> Result<Self, Problem> {
        let undelivered = Arc::new(Undelivered::default());
        let mut settings = cluster.producer();
        // The limits of the topics are checked at the start; the client's own limit must not be lower.
        let most = message_bytes.max(limits.value_bytes + (64 << 10)).clamp(1_000_000, 1_000_000_000);
        settings.set("message.max.bytes", most.to_string()).set("batch.size", limits.batch_bytes().to_string());
        let context = Deliveries { undelivered: undelivered.clone(), trouble: cluster.trouble.clone() };
        let producer = Client::new(&settings, context)?;
        Ok(Self { producer, undelivered, cluster: cluster.clone(), limits })
    }

    /// Records skipped messages as dead letters.
    pub fn note_gaps(&mut self, gaps: &[Gap]) -> Result<(), Problem> {
        let topic = self.cluster.config.topics.dead_letters.clone();
        let mut messages = Vec::new();
        for Gap { log, offsets, problem } in gaps {
            tracing::warn!(log, from = offsets.0, to = offsets.1, %problem, "skipped missing messages");
            let headers = vec![
                ("reason", "gap".to_owned()),
                ("detail", problem.to_string()),
                ("source", log.clone()),
                ("from", offsets.0.to_string()),
                ("to", offsets.1.to_string()),
                ("time_ms", now_ms().to_string()),
            ];
            let (key, value) = (log.as_bytes().to_vec(), Some(Vec::new()));
            let if_too_large = IfTooLarge::SendKey(format!("{log}/{}", offsets.0));
            messages.push(Outgoing { topic: topic.clone(), partition: None, key, value, headers, if_too_large });
        }
        self.deliver(&topic, messages)
    }

    /// Delivers all messages, replacing those that are too large with smaller ones; returns once they are acknowledged.
    fn deliver(&self, topic: &str, mut messages: Vec<Outgoing>) -> Result<(), Problem> {
        while !messages.is_empty() {
            for (number, message) in messages.iter().enumerate() {
                message
                    .send(&self.producer, number)
                    .map_err(|error| failed(format!("cannot send to topic {topic}"), &error))?;
            }
            // Each message has a timeout, after which it is reported as undelivered.
            while self.producer.in_flight_count() > 0 {
                self.producer.poll(Duration::from_millis(100));
            }
            let failures = self.undelivered.take();
            let not_delivered = |number: usize| failures.problem(format!("topic {topic}"), number);
            let Failures { number, too_large, .. } = &failures;
            if *number > 0 {
                return Err(not_delivered(number + too_large.len()));
            }
            let rejected = messages.into_iter().enumerate().filter(|(number, _)| too_large.contains(number));
            let rejected: Vec<Outgoing> = rejected.map(|(_, message)| message).collect();
            let all = (0..rejected.len()).collect();
            messages = shrink(rejected, &all).ok_or_else(|| not_delivered(too_large.len()))?;
        }
        Ok(())
    }
}

impl Outlet for KafkaOutlet {
    fn dead_letters(&mut self, letters: &[Letter]) -> Result<(), TransportError> {
        let letters = letters
            .iter()
            .map(|letter| Outgoing::dead_letter(&self.cluster.config.topics, letter, self.limits))
            .collect();
        Ok(self.deliver(&self.cluster.config.topics.dead_letters, letters)?)
    }

    fn publishes(&self) -> bool {
        true
    }

    fn publish(&mut self, params: &[(Name, Vec<u8>)]) -> Result<(), TransportError> {
        failpoint::reach("before-publish");
        let params =
            params.iter().map(|(space, bytes)| Outgoing::params(&self.cluster.config.topics, space, bytes)).collect();
        self.deliver(&self.cluster.config.topics.params, params)?;
        failpoint::reach("after-publish");
        Ok(())
    }
}

/// Content type of parameters.
const PARAMS_TYPE: &str = "application/x-safetensors";

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::config::Config;
    use crate::dead_letters::Recording;
    use crate::engine::{DeadLetter, Side};
    use crate::merge::Origin;

    fn letter(bytes: usize, key: usize, problem: usize) -> Letter {
        let bad = Bad::NotJson("ä".repeat(problem));
        let (side, recording) = (Side::Query, Recording::Recorded);
        let letter = DeadLetter { side, bytes: vec![b'x'; bytes], bad, recording, place: None };
        let origin = Origin { key: Some(vec![b'k'; key]), key_bytes: 2 * key, traceparent: Some("t".repeat(100)) };
        let place = json!({"source": "queries", "partition": 1, "offset": 7});
        Letter { letter, place, origin: Some(Box::new(origin)), time_ms: 5 }
    }

    #[test]
    fn letters_fit_into_their_topic() {
        let topics = Config::default().transport.kafka.topics;
        for message_bytes in [4096, 10_000, 1_048_588] {
            let limits = LetterLimits { value_bytes: 1 << 20, message_bytes };
            for (bytes, key, problem) in [(10, 5, 3), (4000, 1024, 300), (1 << 20, 1024, 500_000), (1 << 21, 0, 0)] {
                let message = Outgoing::dead_letter(&topics, &letter(bytes, key, problem), limits);
                assert!(message.bytes() <= message_bytes, "{bytes} {key} {problem}: {}", message.bytes());
                let has = |name: &str| message.headers.iter().any(|header| header.0 == name);
                assert_eq!(has("cut_from_bytes"), message.value.as_ref().unwrap().len() < bytes);
                assert_eq!(has("key_cut_from_bytes"), key > 0);
            }
        }
    }

    #[test]
    fn what_is_too_large_shrinks_twice_and_is_then_dropped() {
        let topics = Config::default().transport.kafka.topics;
        let limits = LetterLimits { value_bytes: 1 << 20, message_bytes: 1 << 20 };
        let sized = |bytes| Outgoing::dead_letter(&topics, &letter(bytes, 3, 3), limits);
        let messages = vec![sized(10), sized(500), sized(400)];
        let all = as_large(&messages, &BTreeSet::from([2]));
        assert_eq!(all, [1, 2], "what was not tried is as large");
        let messages = shrink(messages, &BTreeSet::from_iter(all)).unwrap();
        assert!(messages[0].value.is_some() && messages[1].value.is_none() && messages[1].headers.is_empty());
        assert_eq!(messages[1].key, b"queries/1/7");
        let messages = shrink(messages, &BTreeSet::from([1, 2])).unwrap();
        assert_eq!(messages.len(), 1);
        let params = Outgoing::params(&topics, &Name::default_space(), b"...");
        assert!(shrink(vec![params], &BTreeSet::from([0])).is_none(), "parameters must not be dropped");
    }
}
