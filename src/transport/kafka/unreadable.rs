//! Finds batches that the client cannot read, and where the next one starts.
//!
//! A batch that cannot be decompressed (damaged, in an unknown codec, or larger than `receive.message.max.bytes` once it is
//! decompressed) makes librdkafka report an error and fetch the same batch again, forever. The error that reaches the
//! reader carries neither partition nor offset. A probe, a separate client, fetches each partition from its next offset
//! and takes errors from librdkafka itself, which names the partition and offset.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::fmt;
use std::time::{Duration, Instant};

use rdkafka::bindings as ffi;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::{Offset, TopicPartitionList};
use serde::Serialize;

use super::client::Client;
use super::cluster::{CALL, Cluster, Plain, Problem, failed};

/// Timeout of a probe.
const WAIT: Duration = CALL;

/// A batch that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Unreadable {
    /// Its topic.
    pub topic: String,
    /// Its partition.
    pub partition: i32,
    /// The offset from which the partition cannot be read.
    pub offset: u64,
    /// The error of the client.
    pub problem: String,
    /// The first offset of the batch, which may be before the requested one.
    #[serde(skip)]
    base: u64,
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { topic, partition, offset, problem, .. } = self;
        write!(
            f,
            "cannot read {topic}/{partition} from offset {offset} on: {problem}. `pointsman learn --accept-gap` skips the batch \
             and records the gap in the dead-letter topic; if the batch is too large once decompressed, raise \
             \"receive.message.max.bytes\" in transport.kafka.client instead"
        )
    }
}

/// Whether an error may come from an unreadable batch.
pub fn is_suspect(error: &KafkaError) -> bool {
    use RDKafkaErrorCode as Code;
    let suspects = [
        Code::BadCompression,
        Code::BadMessage,
        Code::CriticalSystemResource,
        Code::InvalidMessage,
        Code::MessageSizeTooLarge,
        Code::NotImplemented,
        Code::UnsupportedCompressionType,
    ];
    error.rdkafka_error_code().is_some_and(|code| suspects.contains(&code))
}

/// A client that looks for unreadable batches.
pub struct Probe(Client<BaseConsumer<Plain>>);

/// Result of a fetch.
struct Fetched {
    topic: String,
    partition: i32,
    offset: u64,
    /// The error returned instead of a message.
    error: Option<(RDKafkaErrorCode, String)>,
}

impl Fetched {
    fn problem(&self) -> Option<&str> {
        let (code, problem) = self.error.as_ref()?;
        is_suspect(&KafkaError::MessageConsumption(*code)).then_some(problem)
    }
}

impl Probe {
    /// Creates an idle probe.
    pub fn new(cluster: &Cluster) -> Result<Self, Problem> {
        let mut settings = cluster.consumer();
        settings
            .set("enable.partition.eof", "true")
            .set("fetch.wait.max.ms", "10")
            .set("fetch.error.backoff.ms", "0")
            .set("queued.min.messages", "1")
            // Its log would go to standard error. Errors are returned instead.
            .set("log_level", "0");
        Client::new(&settings, Plain(cluster.trouble.clone())).map(Self)
    }

    /// The first of these partitions that cannot be read from its offset.
    pub fn find(&self, places: &[(String, i32, u64)]) -> Result<Option<Unreadable>, Problem> {
        self.assign(places)?;
        let mut left: BTreeSet<(&str, i32)> = places.iter().map(|(topic, n, _)| (topic.as_str(), *n)).collect();
        let until = Instant::now() + WAIT;
        while !left.is_empty() && Instant::now() < until {
            let Some(fetched) = self.poll() else { continue };
            let asked = |(topic, n, _): &&(String, i32, u64)| *topic == fetched.topic && *n == fetched.partition;
            let Some((topic, partition, offset)) = places.iter().find(asked) else { continue };
            if let Some(problem) = fetched.problem() {
                let (topic, problem) = (topic.clone(), problem.to_owned());
                let (partition, offset, base) = (*partition, *offset, fetched.offset);
                return Ok(Some(Unreadable { topic, partition, offset, problem, base }));
            }
            // Readable, or at its end.
            if left.remove(&(topic.as_str(), *partition)) {
                self.pause(topic, *partition)?;
            }
        }
        Ok(None)
    }

    /// The first offset after a batch, given the end of its partition.
    pub fn end_of(&self, batch: &Unreadable, high: u64) -> Result<u64, Problem> {
        let (mut inside, mut step) = (batch.offset, 1);
        let mut outside = loop {
            let next = batch.offset.saturating_add(step).min(high);
            if next == high || !self.is_in(batch, next)? {
                break next;
            }
            (inside, step) = (next, step.saturating_mul(2));
        };
        while outside - inside > 1 {
            let middle = inside + (outside - inside) / 2;
            if self.is_in(batch, middle)? {
                inside = middle;
            } else {
                outside = middle;
            }
        }
        Ok(outside)
    }

    /// Whether an offset is in the batch: a fetch from there returns the same error.
    fn is_in(&self, batch: &Unreadable, offset: u64) -> Result<bool, Problem> {
        self.assign(&[(batch.topic.clone(), batch.partition, offset)])?;
        let until = Instant::now() + WAIT;
        while Instant::now() < until {
            let Some(fetched) = self.poll() else { continue };
            match (fetched.problem().is_some(), &fetched.error) {
                // It may be another unreadable batch.
                (true, _) => return Ok(fetched.offset == batch.base),
                (false, None | Some((RDKafkaErrorCode::PartitionEOF, _))) => return Ok(false),
                // The client recovers by itself.
                (false, Some(_)) => {}
            }
        }
        let doing = format!("cannot find the end of the unreadable batch in {}/{}", batch.topic, batch.partition);
        Err(Problem::Failed { doing, problem: "the brokers did not answer in time".to_owned() })
    }

    fn assign(&self, places: &[(String, i32, u64)]) -> Result<(), Problem> {
        let cannot = |error: KafkaError| failed("cannot look for the unreadable batch", &error);
        let mut all = TopicPartitionList::new();
        for (topic, partition, offset) in places {
            all.add_partition_offset(topic, *partition, Offset::Offset(*offset as i64)).map_err(cannot)?;
        }
        self.0.assign(&all).map_err(cannot)
    }

    fn pause(&self, topic: &str, partition: i32) -> Result<(), Problem> {
        let mut one = TopicPartitionList::new();
        one.add_partition(topic, partition);
        self.0.pause(&one).map_err(|error| failed("cannot look for the unreadable batch", &error))
    }

    /// The next message or error, with where it belongs, for which rdkafka has no call.
    fn poll(&self) -> Option<Fetched> {
        // SAFETY: the client lives as long as this. A message that is not null is live until it is destroyed here, after
        // all of it was copied; where it is an error its payload is a text that ends with a zero byte, or null.
        unsafe {
            let message = ffi::rd_kafka_consumer_poll(self.0.client().native_ptr(), 100);
            let fetched = message.as_ref().filter(|message| !message.rkt.is_null()).map(|message| {
                let text = |pointer: *const std::ffi::c_char| {
                    if pointer.is_null() {
                        String::new()
                    } else {
                        CStr::from_ptr(pointer).to_string_lossy().into_owned()
                    }
                };
                let is_error = message.err != ffi::rd_kafka_resp_err_t::RD_KAFKA_RESP_ERR_NO_ERROR;
                Fetched {
                    topic: text(ffi::rd_kafka_topic_name(message.rkt)),
                    partition: message.partition,
                    offset: message.offset.max(0).unsigned_abs(),
                    error: is_error.then(|| (message.err.into(), text(message.payload as *const std::ffi::c_char))),
                }
            });
            if !message.is_null() {
                ffi::rd_kafka_message_destroy(message);
            }
            fetched
        }
    }
}
