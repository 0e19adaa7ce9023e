//! A cluster in memory: topics whose readers see committed messages alone, and transactional IDs with epochs.
//!
//! It behaves as Apache Kafka does for clients without KIP-890: the end of a transaction names a producer and an epoch, but not
//! the transaction, so a late one ends whatever transaction of that epoch is open.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;

use super::world::{Without, World};
use crate::config::Topics;
use crate::engine::Side;
use crate::merge::MergeState;
use crate::router::Params;
use crate::runner::claim::Broker;
use crate::snapshot::SharedHead;
use crate::state::generations;
use crate::transport::kafka::cluster::Problem;
use crate::transport::kafka::outlet::Outgoing;
use crate::transport::kafka::positions::{Place, at};
use crate::transport::kafka::state::{Entries, note};
use crate::transport::kafka::transaction::{Producer, Producers, Sent, Undone};
use crate::wire::params;

/// A message, or the marker of the end of a transaction.
struct Record {
    key: Vec<u8>,
    value: Option<Vec<u8>>,
    state: State,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Open,
    Committed,
    Aborted,
    Marker,
}

/// A transactional ID.
#[derive(Default)]
struct TransactionalId {
    epoch: u64,
    /// Messages of the open transaction: topic and partition, offset.
    open: Option<Vec<(Address, usize)>>,
    /// How the last one ended.
    committed: Option<bool>,
}

/// A topic and a partition.
pub type Address = (String, i32);

/// The topics of the cluster.
#[derive(Default)]
pub struct Cluster {
    logs: BTreeMap<Address, Vec<Record>>,
    ids: BTreeMap<String, TransactionalId>,
}

/// Why a request fails.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Refused {
    Fenced,
    InvalidState,
}

impl Cluster {
    /// Appends a message outside of transactions.
    pub fn append(&mut self, address: &Address, value: Vec<u8>) {
        let record = Record { key: Vec::new(), value: Some(value), state: State::Committed };
        self.logs.entry(address.clone()).or_default().push(record);
    }

    /// Number of messages of a partition.
    pub fn end(&self, address: &Address) -> usize {
        self.logs.get(address).map_or(0, Vec::len)
    }

    /// The value at an offset.
    pub fn value(&self, address: &Address, offset: usize) -> Option<Vec<u8>> {
        self.logs.get(address)?.get(offset)?.value.clone()
    }

    /// Committed messages of a partition before its first open transaction.
    pub fn committed(&self, address: &Address) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
        let records = self.logs.get(address).map_or(&[][..], Vec::as_slice);
        let stable = records.iter().take_while(|record| record.state != State::Open);
        let committed = stable.filter(|record| record.state == State::Committed);
        committed.map(|record| (record.key.as_slice(), record.value.as_deref()))
    }

    /// Aborts the open transaction of an ID and begins a new epoch, unless the `fence` is missing.
    pub fn init(&mut self, id: &str, fence: bool) -> u64 {
        if fence {
            self.finish(id, false);
            self.ids.entry(id.to_owned()).or_default().epoch += 1;
        }
        self.ids.entry(id.to_owned()).or_default().epoch
    }

    /// Appends a message to the open transaction of an ID; begins one if none is open.
    pub fn produce(&mut self, id: &str, epoch: u64, message: &Outgoing) -> Result<(), Refused> {
        let known = self.ids.entry(id.to_owned()).or_default();
        if known.epoch != epoch {
            return Err(Refused::Fenced);
        }
        let address = (message.topic.clone(), message.partition.unwrap_or(0));
        let log = self.logs.entry(address.clone()).or_default();
        known.open.get_or_insert_default().push((address, log.len()));
        log.push(Record { key: message.key.clone(), value: message.value.clone(), state: State::Open });
        Ok(())
    }

    /// Ends the open transaction of an ID, whichever it is.
    pub fn end_transaction(&mut self, id: &str, epoch: u64, commit: bool) -> Result<(), Refused> {
        let known = self.ids.entry(id.to_owned()).or_default();
        match known {
            _ if known.epoch != epoch => Err(Refused::Fenced),
            TransactionalId { open: None, committed: Some(before), .. } if *before == commit => Ok(()),
            TransactionalId { open: None, .. } => Err(Refused::InvalidState),
            _ => {
                self.finish(id, commit);
                Ok(())
            }
        }
    }

    fn finish(&mut self, id: &str, commit: bool) {
        let known = self.ids.entry(id.to_owned()).or_default();
        let Some(open) = known.open.take() else { return };
        known.committed = Some(commit);
        let state = if commit { State::Committed } else { State::Aborted };
        let mut ended = BTreeMap::new();
        for (address, offset) in open {
            if let Some(record) = self.logs.get_mut(&address).and_then(|log| log.get_mut(offset)) {
                record.state = state;
            }
            ended.insert(address, ());
        }
        for (address, ()) in ended {
            let marker = Record { key: Vec::new(), value: None, state: State::Marker };
            self.logs.entry(address).or_default().push(marker);
        }
    }
}

/// The cluster, as an instance sees it.
pub struct SimBroker {
    pub world: World,
    pub node: usize,
    pub topics: Topics,
}

impl SimBroker {
    /// Asks the cluster. The request or its answer may be lost.
    fn ask<T>(&self, doing: &str, answer: impl FnOnce(&Cluster) -> T) -> Result<T, Problem> {
        self.world.effect(self.node)?;
        if self.world.request_fails(self.node, "request lost") {
            return Err(transient(doing));
        }
        Ok(self.world.with(|shared| answer(&shared.cluster)))
    }
}

impl Broker for SimBroker {
    type Producers = SimProducers;

    fn topics(&self) -> &Topics {
        &self.topics
    }

    fn producers(&self, lane: i32) -> SimProducers {
        SimProducers {
            world: self.world.clone(),
            node: self.node,
            id: format!("lane-{lane}"),
            initialized: AtomicBool::new(false),
        }
    }

    fn state(&self, lane: i32) -> Result<Entries, Problem> {
        let address = (self.topics.snapshots.clone(), lane);
        self.ask("cannot read the state", |cluster| entries(cluster, &address))
    }

    fn heads(&self, lanes: &[i32]) -> Result<BTreeMap<i32, SharedHead>, Problem> {
        let head = |cluster: &Cluster, lane: i32| newest_head(cluster, &(self.topics.snapshots.clone(), lane));
        self.ask("cannot read heads", |cluster| {
            lanes.iter().filter_map(|lane| Some((*lane, head(cluster, *lane)?))).collect()
        })
    }

    fn published(&self) -> Result<Vec<Params>, Problem> {
        let address = (self.topics.params.clone(), 0);
        self.ask("cannot read parameters", |cluster| {
            let decode = |(_, value): (&[u8], Option<&[u8]>)| params::decode(value?).ok();
            let all: Vec<Params> = cluster.committed(&address).filter_map(decode).collect();
            let mut newest = BTreeMap::new();
            all.into_iter().for_each(|params| drop(newest.insert(params.space.clone(), params)));
            newest.into_values().collect()
        })
    }

    fn places(&self, lane: i32, state: &MergeState) -> Result<Vec<Place>, Problem> {
        self.world.effect(self.node)?;
        let forgotten = self.world.without() == Some(Without::Position);
        let place = |(side, topic): (Side, &String)| {
            let name = format!("{topic}/{lane}");
            let end = self.world.with(|shared| shared.cluster.end(&(topic.clone(), lane)));
            // Without its position a learner continues where the group is: at the end of what was polled.
            let position = match state.positions.get(&name).cloned() {
                Some(_) if forgotten => at(end as u64),
                position => position.unwrap_or_else(|| at(0)),
            };
            Place { side, topic: topic.clone(), partition: lane, name, position }
        };
        Ok([(Side::Query, &self.topics.queries), (Side::Reward, &self.topics.rewards)].map(place).into())
    }
}

/// The committed entries of a partition.
pub fn entries(cluster: &Cluster, address: &Address) -> Entries {
    let mut entries = Entries::new();
    cluster.committed(address).for_each(|(key, value)| note(&mut entries, Some(key), value));
    entries
}

/// The newest committed head of a lane.
pub fn newest_head(cluster: &Cluster, address: &Address) -> Option<SharedHead> {
    let entries = entries(cluster, address);
    let head = entries.iter().filter_map(|(key, value)| generations::head_of(key, value)).next_back()?;
    SharedHead::open(&head).ok()
}

/// Producers under one transactional ID.
pub struct SimProducers {
    world: World,
    node: usize,
    id: String,
    initialized: AtomicBool,
}

impl Producers for SimProducers {
    type Producer = SimProducer;

    fn init(&self, _given_up: &AtomicBool) -> Result<SimProducer, Problem> {
        self.world.effect(self.node)?;
        if self.world.request_fails(self.node, "initialization lost") {
            return Err(transient("cannot initialize transactions"));
        }
        let again = self.initialized.swap(true, std::sync::atomic::Ordering::Relaxed);
        let fence = match self.world.without() {
            Some(Without::Fence) => again,
            // The producer of before: it aborts its transaction and begins another in the same epoch.
            Some(Without::Epoch) => !again,
            _ => true,
        };
        let epoch = self.world.with(|shared| {
            let epoch = shared.cluster.init(&self.id, fence);
            if !fence {
                // Refused if there is nothing to abort.
                let _ = shared.cluster.end_transaction(&self.id, epoch, false);
            }
            epoch
        });
        self.world.record(|| format!("instance {} initializes {} with epoch {epoch}", self.node, self.id));
        Ok(SimProducer { world: self.world.clone(), node: self.node, id: self.id.clone(), epoch })
    }
}

/// A producer in one epoch.
pub struct SimProducer {
    world: World,
    node: usize,
    id: String,
    epoch: u64,
}

impl SimProducer {
    fn undone(&self, refused: Refused) -> Undone {
        self.world
            .record(|| format!("instance {}: {} refused in epoch {}: {refused:?}", self.node, self.id, self.epoch));
        match refused {
            Refused::Fenced => Undone::Fenced,
            Refused::InvalidState => Undone::Failed(transient("invalid transaction state")),
        }
    }
}

impl Producer for SimProducer {
    fn deliver(&mut self, messages: &[Outgoing], given_up: &AtomicBool) -> Result<(), Undone> {
        for message in messages {
            self.world.effect(self.node).map_err(Undone::Failed)?;
            if given_up.load(std::sync::atomic::Ordering::Relaxed) {
                return Err(Undone::Failed(Problem::Lost(self.id.clone())));
            }
            if self.world.request_fails(self.node, "message lost") {
                return Err(Undone::Failed(transient("message timed out")));
            }
            let produced = self.world.with(|shared| shared.cluster.produce(&self.id, self.epoch, message));
            produced.map_err(|refused| self.undone(refused))?;
        }
        Ok(())
    }

    fn commit(&mut self) -> Result<Sent, Undone> {
        self.world.effect(self.node).map_err(Undone::Failed)?;
        let end = |id: &str, epoch| self.world.with(|shared| shared.cluster.end_transaction(id, epoch, true));
        let timed_out = || Undone::Failed(transient("commit timed out"));
        let late = || self.world.later(&self.id, self.epoch);
        if self.world.request_fails(self.node, "commit lost") {
            return Err(timed_out());
        }
        let sent = match self.world.commit_fault(self.node) {
            CommitFault::None => Ok(Sent::Once),
            CommitFault::RequestLost => return Err(timed_out()),
            CommitFault::AnswerLost => Err(timed_out()),
            CommitFault::Late => {
                late();
                return Err(timed_out());
            }
            CommitFault::Retried => {
                late();
                Ok(Sent::PerhapsTwice)
            }
        };
        end(&self.id, self.epoch).map_err(|refused| self.undone(refused))?;
        self.world.record(|| format!("instance {} commits {} in epoch {}", self.node, self.id, self.epoch));
        // Between the commit and its answer.
        self.world.effect(self.node).map_err(Undone::Failed)?;
        sent
    }
}

/// What happens to the request that ends a transaction.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CommitFault {
    None,
    RequestLost,
    AnswerLost,
    /// It arrives after its sender has given up on it.
    Late,
    /// The client sends it again by itself, and the first one arrives late.
    Retried,
}

pub fn transient(doing: &str) -> Problem {
    Problem::Transient { doing: doing.to_owned(), problem: "simulated".to_owned() }
}
