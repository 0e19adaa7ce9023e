//! Producer of a router's events.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseRecord, DeliveryResult, Producer, ProducerContext, ThreadedProducer};

use super::client::Client;
use super::cluster::{Cluster, Problem, Trouble, failed, log_line};
use super::homes::Keys;
use crate::config::{Lanes, Settings};
use crate::engine::Side;
use crate::transport::lock;
use crate::transport::writer::{Event, NotWritten};

/// Sends events asynchronously.
pub struct EventTopics {
    producer: Client<ThreadedProducer<Sent>>,
    outcomes: Arc<Outcomes>,
    queue_max: usize,
    /// Held while the events of one request are accepted, all or none.
    accepting: Mutex<()>,
    topics: [String; 2],
    lanes: Lanes,
    keys: Keys,
    drain: Duration,
}

/// Delivery results of accepted events.
#[derive(Debug, Default)]
struct Outcomes {
    delivered: AtomicU64,
    lost: AtomicU64,
}

struct Sent {
    outcomes: Arc<Outcomes>,
    trouble: Arc<Trouble>,
}

impl ClientContext for Sent {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, line: &str) {
        log_line(level, facility, line);
    }

    fn error(&self, error: KafkaError, reason: &str) {
        self.trouble.note(&error, reason);
    }
}

impl ProducerContext for Sent {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        match result {
            Ok(_) => self.outcomes.delivered.fetch_add(1, Ordering::Relaxed),
            Err((error, _)) => {
                tracing::error!(%error, "cannot deliver event in time; it is lost");
                self.outcomes.lost.fetch_add(1, Ordering::Relaxed)
            }
        };
    }
}

impl EventTopics {
    /// Sends to the topics of queries and rewards, at most `queue_max` events at a time.
    pub fn new(cluster: &Cluster, settings: &Settings, queue_max: usize) -> Result<Self, Problem> {
        let outcomes = Arc::new(Outcomes::default());
        let mut client = cluster.producer();
        // `queue_max` is the limit; the client's must not be lower.
        client.set("queue.buffering.max.messages", (queue_max + 1).to_string());
        let context = Sent { outcomes: outcomes.clone(), trouble: cluster.trouble.clone() };
        let topics = &cluster.config.topics;
        Ok(Self {
            producer: Client::new(&client, context)?,
            outcomes,
            queue_max,
            accepting: Mutex::new(()),
            topics: [topics.queries.clone(), topics.rewards.clone()],
            lanes: cluster.config.lanes,
            keys: Keys::new(settings),
            // The delivery timeout of a message, and a margin for the answer.
            drain: Duration::from_millis(cluster.config.delivery_timeout_ms + 1000),
        })
    }

    /// Number of delivered events, and of events not delivered in time.
    pub fn outcomes(&self) -> (u64, u64) {
        let Outcomes { delivered, lost } = &*self.outcomes;
        (delivered.load(Ordering::Relaxed), lost.load(Ordering::Relaxed))
    }

    /// Accepts events, all or none.
    pub fn send(&self, events: &[Event]) -> Result<(), NotWritten> {
        let _accepting = lock(&self.accepting);
        if self.producer.in_flight_count().max(0) as usize + events.len() > self.queue_max {
            return Err(NotWritten::Full);
        }
        for event in events {
            let topic = &self.topics[usize::from(event.side == Side::Reward)];
            let key = match self.lanes {
                Lanes::One => Cow::Borrowed(event.request_id.as_str()),
                Lanes::Partition => self.keys.key(&event.space, &event.request_id),
            };
            let kind = OwnedHeaders::new().insert(Header { key: "content-type", value: Some("application/json") });
            let value = event.line.strip_suffix(b"\n").unwrap_or(&event.line);
            let record = BaseRecord::to(topic).key(&*key).payload(value).headers(kind);
            self.producer.send(record).map_err(|(error, _)| match error {
                KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull) => NotWritten::Full,
                error => NotWritten::Failed(error.to_string()),
            })?;
        }
        Ok(())
    }

    /// Waits until all accepted events are delivered or have timed out.
    pub fn drain(&self) -> Result<(), Problem> {
        let waiting = self.producer.in_flight_count();
        if waiting > 0 {
            tracing::info!(waiting, "delivering queued events");
        }
        self.producer.flush(self.drain).map_err(|error| failed("cannot deliver queued events", &error))
    }
}
