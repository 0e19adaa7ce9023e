//! Reader of the parameters topic.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::time::Duration;

use rdkafka::message::{BorrowedMessage, Message};

use super::cluster::{Cluster, Problem};
use super::scan::{Follower, Ranges, offset_of, read_to, whole};
use crate::event::Name;
use crate::router::Params;
use crate::wire::params::decode;

/// A reader of the parameters topic. Every router reads all partitions.
pub struct ParamsTopic(Follower);

impl ParamsTopic {
    /// Starts at the beginning.
    pub fn open(cluster: &Cluster) -> Result<Self, Problem> {
        Follower::open(cluster, &cluster.config.topics.params, &all(cluster)?).map(Self)
    }

    /// Whether everything that existed at the start has been read.
    pub fn caught_up(&self) -> bool {
        self.0.caught_up()
    }

    /// The next message with a value, if one arrives within `timeout`: its position and its bytes.
    pub fn poll(&mut self, timeout: Duration) -> Result<Option<(String, Vec<u8>)>, Problem> {
        let Some(message) = self.0.poll(timeout)? else { return Ok(None) };
        // A tombstone deletes the space from the topic. Routers keep what they have.
        Ok(message.payload().map(|value| (place_of(&message), value.to_vec())))
    }
}

/// The newest parameters of every space that are on the topic now.
pub fn newest(cluster: &Cluster) -> Result<Vec<Params>, Problem> {
    let mut newest = BTreeMap::<Name, Params>::new();
    let stamp = |params: &Params| (params.epoch, params.version, params.revision);
    read_to(cluster, &cluster.config.topics.params, all(cluster)?, |_, message| {
        match message.payload().map(decode) {
            Some(Ok(params)) if newest.get(&params.space).is_none_or(|known| stamp(&params) > stamp(known)) => {
                newest.insert(params.space.clone(), params);
            }
            Some(Err(error)) => {
                tracing::warn!(place = place_of(message), %error, "ignored invalid published parameters");
            }
            _ => {}
        }
        ControlFlow::<()>::Continue(())
    })?;
    Ok(newest.into_values().collect())
}

fn all(cluster: &Cluster) -> Result<Ranges, Problem> {
    let topic = &cluster.config.topics.params;
    whole(cluster, topic, 0..cluster.partitions(topic)? as i32)
}

fn place_of(message: &BorrowedMessage<'_>) -> String {
    format!("{}/{} at offset {}", message.topic(), message.partition(), offset_of(message))
}
