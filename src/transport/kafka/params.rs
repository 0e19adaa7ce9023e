//! Reader of the parameters topic.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::message::Message;
use rdkafka::{Offset, TopicPartitionList};

use super::client::Client;
use super::cluster::{CALL, Cluster, Plain, Problem, failed};
use crate::event::Name;
use crate::router::Params;
use crate::wire::params::decode;

/// A reader of the parameters topic.
pub struct ParamsTopic {
    consumer: Client<BaseConsumer<Plain>>,
    topic: String,
    /// Partitions not yet read to the end that they had at the start. Not derived from end-of-partition events: under
    /// constant writes there may be none.
    behind: BTreeMap<i32, u64>,
}

impl ParamsTopic {
    /// Starts at the beginning.
    pub fn open(cluster: &Cluster) -> Result<Self, Problem> {
        let topic = cluster.config.topics.params.clone();
        let number = cluster.partitions(&topic)? as i32;
        let mut settings = cluster.consumer();
        // Every router reads all partitions. No group is joined, though the client requires a group name.
        settings.set("enable.partition.eof", "true").set("auto.offset.reset", "earliest");
        let consumer: Client<BaseConsumer<Plain>> = Client::new(&settings, Plain(cluster.trouble.clone()))?;
        let (mut all, mut behind) = (TopicPartitionList::new(), BTreeMap::new());
        for partition in 0..number {
            let (low, high) = cluster.watermarks(&topic, partition)?;
            if low < high {
                behind.insert(partition, high);
            }
            all.add_partition_offset(&topic, partition, Offset::Beginning)
                .map_err(|error| failed(format!("cannot read topic {topic}"), &error))?;
        }
        consumer.assign(&all).map_err(|error| failed(format!("cannot read topic {topic}"), &error))?;
        Ok(Self { consumer, topic, behind })
    }

    /// Whether everything that existed at the start has been read.
    pub fn caught_up(&self) -> bool {
        self.behind.is_empty()
    }

    /// The next message with a value, if one arrives within `timeout`: its position and its bytes.
    pub fn poll(&mut self, timeout: Duration) -> Option<(String, Vec<u8>)> {
        match self.consumer.poll(timeout)? {
            Ok(message) => {
                let next = message.offset().max(0).unsigned_abs() + 1;
                if self.behind.get(&message.partition()).is_some_and(|end| next >= *end) {
                    self.behind.remove(&message.partition());
                }
                // A tombstone deletes the space from the topic. Routers keep what they have.
                let value = message.payload()?;
                let place = format!("{}/{} at offset {}", self.topic, message.partition(), message.offset());
                Some((place, value.to_vec()))
            }
            Err(KafkaError::PartitionEOF(partition)) => {
                self.behind.remove(&partition);
                None
            }
            Err(error) => {
                tracing::debug!(%error, topic = self.topic, "cannot read parameters");
                None
            }
        }
    }

    /// Reads to the end and returns the newest parameters of every space.
    pub fn newest(mut self) -> Result<Vec<Params>, Problem> {
        let mut newest = BTreeMap::<Name, Params>::new();
        let mut moved = Instant::now();
        let mut left = self.behind.len();
        let stamp = |params: &Params| (params.epoch, params.version, params.revision);
        while !self.caught_up() {
            if let Some((place, value)) = self.poll(Duration::from_millis(200)) {
                moved = Instant::now();
                match decode(&value) {
                    Ok(params) if newest.get(&params.space).is_none_or(|known| stamp(&params) > stamp(known)) => {
                        newest.insert(params.space.clone(), params);
                    }
                    Ok(_) => {}
                    Err(error) => tracing::warn!(place, %error, "ignored invalid published parameters"),
                }
            }
            if self.behind.len() < left {
                (left, moved) = (self.behind.len(), Instant::now());
            }
            if moved.elapsed() > 3 * CALL {
                let doing = format!("cannot read topic {} to its end", self.topic);
                return Err(Problem::Transient { doing, problem: "timed out waiting for messages".to_owned() });
            }
        }
        Ok(newest.into_values().collect())
    }
}
