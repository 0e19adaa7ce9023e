//! Parameters and dead letters as messages. They count when the brokers have them.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{BaseProducer, BaseRecord, DeliveryResult, Producer, ProducerContext};

use super::cluster::{Cluster, Problem, Trouble, failed, log_line, make};
use super::consumer::Reader;
use super::positions::Gap;
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

/// Messages that could not be delivered: how many, and why not the last.
#[derive(Default)]
pub(super) struct Undelivered(Mutex<(usize, String)>);

impl Undelivered {
    /// What is known so far, which is then forgotten.
    pub(super) fn take(&self) -> (usize, String) {
        std::mem::take(&mut *lock(&self.0))
    }
}

/// A producer's callbacks.
pub(super) struct Deliveries {
    pub(super) undelivered: Arc<Undelivered>,
    pub(super) trouble: Arc<Trouble>,
}

/// A message that is to go.
pub struct Outgoing {
    /// Where to.
    pub topic: String,
    /// Which partition, where it is not the key that says it.
    pub partition: Option<i32>,
    /// Its key.
    pub key: Vec<u8>,
    /// Its value; none deletes what a compacted topic has of the key.
    pub value: Option<Vec<u8>>,
    /// Its headers.
    pub headers: Vec<(&'static str, String)>,
}

impl Outgoing {
    /// Parameters of a space.
    pub fn params(cluster: &Cluster, space: &Name, bytes: &[u8]) -> Self {
        Self {
            topic: cluster.config.topics.params.clone(),
            partition: None,
            key: space.as_str().as_bytes().to_vec(),
            value: Some(bytes.to_vec()),
            headers: vec![("content-type", PARAMS_TYPE.to_owned())],
        }
    }

    /// A bad event, of which at most so many bytes are kept.
    pub fn dead_letter(cluster: &Cluster, letter: &Letter, bytes_max: usize) -> Self {
        let Letter { letter, place, origin, time_ms } = letter;
        let mut headers = vec![
            ("reason", letter.bad.reason().to_owned()),
            ("detail", letter.bad.to_string()),
            ("time_ms", time_ms.to_string()),
        ];
        for field in ["source", "partition", "offset"] {
            let text = place[field].as_str().map_or_else(|| place[field].to_string(), str::to_owned);
            headers.push((field, text));
        }
        let kept = &letter.bytes[..letter.bytes.len().min(bytes_max)];
        if kept.len() < letter.bytes.len() {
            headers.push(("cut_from_bytes", letter.bytes.len().to_string()));
        }
        let origin = origin.as_deref().cloned().unwrap_or_default();
        headers.extend(origin.traceparent.map(|traceparent| ("traceparent", traceparent)));
        let topic = cluster.config.topics.dead_letters.clone();
        Self { topic, partition: None, key: origin.key.unwrap_or_default(), value: Some(kept.to_vec()), headers }
    }

    /// Hands it to a producer; waits while that has too many.
    pub(super) fn send(&self, producer: &BaseProducer<Deliveries>) -> Result<(), KafkaError> {
        let headers = self.headers.iter();
        let headers =
            headers.fold(OwnedHeaders::new(), |all, (key, value)| all.insert(Header { key, value: Some(value) }));
        let mut record = BaseRecord::<[u8], [u8]>::to(&self.topic).key(&self.key[..]).headers(headers);
        (record.partition, record.payload) = (self.partition, self.value.as_deref());
        loop {
            match producer.send(record) {
                Ok(()) => return Ok(()),
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), back)) => {
                    producer.poll(Duration::from_millis(100));
                    record = back;
                }
                Err((error, _)) => return Err(error),
            }
        }
    }
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
            let headers = vec![
                ("reason", "gap".to_owned()),
                ("detail", problem.to_string()),
                ("source", log.clone()),
                ("from", offsets.0.to_string()),
                ("to", offsets.1.to_string()),
                ("time_ms", now_ms().to_string()),
            ];
            let (key, value) = (log.as_bytes().to_vec(), Some(Vec::new()));
            self.send(&Outgoing { topic: topic.clone(), partition: None, key, value, headers })?;
        }
        self.settle(&topic)
    }

    fn send(&self, message: &Outgoing) -> Result<(), Problem> {
        message.send(&self.producer).map_err(|error| failed(format!("sending to {}", message.topic), &error))
    }

    /// Waits until all is delivered.
    fn settle(&self, topic: &str) -> Result<(), Problem> {
        // Each message has its own time limit, after which it is told as undelivered.
        while self.producer.in_flight_count() > 0 {
            self.producer.poll(Duration::from_millis(100));
        }
        let (number, problem) = self.deliveries.take();
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
        for letter in letters {
            self.send(&Outgoing::dead_letter(&self.cluster, letter, self.letter_bytes_max))?;
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
            self.send(&Outgoing::params(&self.cluster, space, bytes))?;
        }
        self.settle(topic)?;
        failpoint::reach("after-publish");
        Ok(())
    }

    fn reached(&mut self, positions: &MergeState) {
        if let Some(reader) = self.reader.get() {
            reader.commit(positions);
        }
    }
}

/// What parameters are, as a header says it.
const PARAMS_TYPE: &str = "application/x-safetensors";
