//! Parameters and dead letters as messages. They count when the brokers have them.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use rdkafka::Offset;
use rdkafka::TopicPartitionList;
use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{CommitMode, Consumer};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, DeliveryResult, Producer, ProducerContext};

use super::cluster::{Cluster, Problem, Trouble, failed, log_line, make};
use super::consumer::Reader;
use super::positions::{Gap, parse};
use crate::event::Name;
use crate::failpoint;
use crate::merge::MergeState;
use crate::transport::{Letter, Outlet, lock, now_ms};

/// Where results go.
pub struct KafkaOutlet {
    producer: BaseProducer<Deliveries>,
    deliveries: Arc<Undelivered>,
    cluster: Cluster,
    /// The largest event that a dead letter may carry.
    letter_bytes_max: usize,
    /// Who reads in a group, where one does.
    reader: Arc<OnceLock<Arc<Reader>>>,
}

/// Messages that could not be delivered.
#[derive(Default)]
struct Undelivered(Mutex<(usize, String)>);

struct Deliveries {
    undelivered: Arc<Undelivered>,
    trouble: Arc<Trouble>,
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
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        if let Err((error, _)) = result {
            let mut undelivered = lock(&self.undelivered.0);
            undelivered.0 += 1;
            undelivered.1 = error.to_string();
        }
    }
}

impl KafkaOutlet {
    /// An outlet whose messages may take so many bytes.
    pub fn new(cluster: &Cluster, message_bytes: usize, letter_bytes_max: usize) -> Result<Self, Problem> {
        let undelivered = Arc::new(Undelivered::default());
        let mut settings = cluster.producer();
        // What the topics take is checked at the start; the client's own limit is not to be in the way.
        let most = message_bytes.max(letter_bytes_max + (64 << 10)).clamp(1_000_000, 1_000_000_000);
        settings.set("message.max.bytes", most.to_string());
        let context = Deliveries { undelivered: undelivered.clone(), trouble: cluster.trouble.clone() };
        let producer = make(&settings, context)?;
        Ok(Self {
            producer,
            deliveries: undelivered,
            cluster: cluster.clone(),
            letter_bytes_max,
            reader: Arc::default(),
        })
    }

    /// The same, which also tells the group of a reader, once there is one, how far all is done.
    pub fn telling(self, reader: Arc<OnceLock<Arc<Reader>>>) -> Self {
        Self { reader, ..self }
    }

    /// Writes down that messages will never be read.
    pub fn note_gaps(&mut self, gaps: &[Gap]) -> Result<(), Problem> {
        let topic = self.cluster.config.topics.dead_letters.clone();
        for Gap { log, offsets, problem } in gaps {
            tracing::warn!(log, from = offsets.0, to = offsets.1, "a gap is accepted: {problem}");
            let headers = [
                ("reason", "gap".to_owned()),
                ("detail", problem.to_string()),
                ("source", log.clone()),
                ("from", offsets.0.to_string()),
                ("to", offsets.1.to_string()),
                ("time_ms", now_ms().to_string()),
            ];
            self.send(&topic, log.as_bytes(), b"", &headers)?;
        }
        self.settle(&topic)
    }

    fn send(&self, topic: &str, key: &[u8], value: &[u8], headers: &[(&str, String)]) -> Result<(), Problem> {
        let all = headers
            .iter()
            .fold(OwnedHeaders::new(), |all, (key, value)| all.insert(Header { key, value: Some(value.as_str()) }));
        let mut record = BaseRecord::to(topic).key(key).payload(value).headers(all);
        loop {
            match self.producer.send(record) {
                Ok(()) => return Ok(()),
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), back)) => {
                    self.producer.poll(Duration::from_millis(100));
                    record = back;
                }
                Err((error, _)) => return Err(failed(format!("sending to {topic}"), &error)),
            }
        }
    }

    /// Waits until all is delivered.
    fn settle(&self, topic: &str) -> Result<(), Problem> {
        // Each message has its own time limit, after which it is told as undelivered.
        while self.producer.in_flight_count() > 0 {
            self.producer.poll(Duration::from_millis(100));
        }
        let (number, problem) = std::mem::take(&mut *lock(&self.deliveries.0));
        if number > 0 {
            return Err(Problem::NotDelivered { topic: topic.to_owned(), number, problem });
        }
        Ok(())
    }
}

impl Outlet for KafkaOutlet {
    fn dead_letters(&mut self, letters: &[Letter]) -> anyhow::Result<()> {
        if letters.is_empty() {
            return Ok(());
        }
        let topic = &self.cluster.config.topics.dead_letters;
        for Letter { letter, place, origin, time_ms } in letters {
            let mut headers = vec![
                ("reason", letter.bad.reason().to_owned()),
                ("detail", letter.bad.to_string()),
                ("time_ms", time_ms.to_string()),
            ];
            for (header, field) in [("source", "source"), ("partition", "partition"), ("offset", "offset")] {
                let text = place[field].as_str().map_or_else(|| place[field].to_string(), str::to_owned);
                headers.push((header, text));
            }
            let kept = &letter.bytes[..letter.bytes.len().min(self.letter_bytes_max)];
            if kept.len() < letter.bytes.len() {
                headers.push(("cut_from_bytes", letter.bytes.len().to_string()));
            }
            let origin = origin.as_deref().cloned().unwrap_or_default();
            headers.extend(origin.traceparent.map(|traceparent| ("traceparent", traceparent)));
            self.send(topic, &origin.key.unwrap_or_default(), kept, &headers)?;
        }
        Ok(self.settle(topic)?)
    }

    fn publishes(&self) -> bool {
        true
    }

    fn publish(&mut self, params: &[(Name, Vec<u8>)]) -> anyhow::Result<()> {
        failpoint::reach("before-publish");
        let topic = &self.cluster.config.topics.params;
        for (space, bytes) in params {
            self.send(topic, space.as_str().as_bytes(), bytes, &[("content-type", PARAMS_TYPE.to_owned())])?;
        }
        self.settle(topic)?;
        failpoint::reach("after-publish");
        Ok(())
    }

    fn reached(&mut self, positions: &MergeState) {
        // Who is not yet a member, or just then not, would be taken for an impostor of itself.
        let Some(reader) = self.reader.get().filter(|reader| reader.is_assigned()) else { return };
        let mut offsets = TopicPartitionList::new();
        for (name, position) in &positions.positions {
            if let Some((topic, partition)) = parse(name) {
                let offset = Offset::Offset(position.floor as i64);
                // A partition comes once; only then could this fail.
                let _ = offsets.add_partition_offset(topic, partition, offset);
            }
        }
        // For those who watch the lag: what cannot be committed now will be with the next snapshot.
        if let Err(error) = reader.consumer().commit(&offsets, CommitMode::Async) {
            tracing::debug!(%error, "offsets were not committed");
        }
    }
}

/// What parameters are, as a header says it.
const PARAMS_TYPE: &str = "application/x-safetensors";
