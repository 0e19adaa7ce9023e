//! Merges the shards of a space: their learners are sums of examples, so the whole is the sum of the shards.
//!
//! Each lane with events of the space trains a learner of its own, stored in the lane's state on the snapshots topic. The
//! owner of the space's home lane reads these states, sums the learners, projects the sum and publishes it. A dedicated
//! transactional ID ensures that there is one merger. It keeps no state: its output follows from the committed states.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rdkafka::message::Message;

use super::claim::lane_name;
use super::error::{Doing, LaneError, Result};
use crate::config::{Settings, Spec};
use crate::engine::learner_key;
use crate::event::Name;
use crate::learner::Trainer;
use crate::router::Params;
use crate::snapshot::{LaneHead, SharedHead};
use crate::state::{LaneStore, Resumed, Retention};
use crate::transport::kafka::cluster::{Cluster, Problem};
use crate::transport::kafka::homes::partitions_of;
use crate::transport::kafka::outlet::Outgoing;
use crate::transport::kafka::scan::{Follower, whole};
use crate::transport::kafka::state::{Entries, Mirror, note};
use crate::transport::kafka::transaction::{KafkaProducers, Outcome, Transactions};
use crate::transport::now_ms;
use crate::wire::params::{self, STAMP_MAX};

/// Poll timeout between two checks for something to publish.
const WAIT: Duration = Duration::from_millis(50);

/// Pause after an error.
const PAUSE: Duration = Duration::from_secs(1);

/// Settings of a merger.
#[derive(Clone)]
pub(super) struct Merging {
    pub cluster: Cluster,
    pub settings: Settings,
    pub space: Name,
    /// Number of lanes.
    pub partitions: usize,
    /// Maximum message size.
    pub message_bytes: usize,
    /// Minimum time between two publications.
    pub every: Duration,
}

/// A thread that merges until it is dropped.
pub(super) struct Merger {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Merger {
    /// Starts it.
    pub fn start(merging: Merging) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = stop.clone();
        let run = move || {
            while !seen.load(Ordering::Relaxed) {
                match merging.follow(&seen) {
                    Err(error) if error.is_taken() => {
                        tracing::warn!(
                            space = merging.space.as_str(),
                            "another instance merges the shards of this space; stopping"
                        );
                        return;
                    }
                    Err(error) => {
                        tracing::warn!(
                            space = merging.space.as_str(),
                            %error,
                            "cannot merge shards; retrying"
                        );
                        std::thread::sleep(PAUSE);
                    }
                    Ok(()) => {}
                }
            }
        };
        let thread = std::thread::Builder::new().name("merger".to_owned()).spawn(run)?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for Merger {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // The thread returns nothing.
            let _ = thread.join();
        }
    }
}

impl Merging {
    /// Publishes the sum of the committed states once.
    pub fn once(&self) -> Result<()> {
        let mut shards = Shards::open(self)?;
        let mut transactions = self.take_over(&Arc::default())?;
        while !shards.follower.caught_up() {
            shards.take_in()?;
        }
        shards.publish(&mut transactions)
    }

    fn follow(&self, stop: &Arc<AtomicBool>) -> Result<()> {
        let mut transactions = self.take_over(stop)?;
        let mut shards = Shards::open(self)?;
        let mut published = Instant::now();
        while !stop.load(Ordering::Relaxed) {
            shards.take_in()?;
            if published.elapsed() >= self.every {
                shards.publish(&mut transactions)?;
                published = Instant::now();
            }
        }
        Ok(())
    }

    fn take_over(&self, stop: &Arc<AtomicBool>) -> Result<Transactions<KafkaProducers>, Problem> {
        let name = format!("shards-{}", self.space);
        Transactions::take_over(KafkaProducers::new(&self.cluster, &name, self.message_bytes, None), &name, stop)
    }

    fn spec(&self) -> &Spec {
        self.settings.space(&self.space)
    }
}

/// State of the lanes that hold shards of the space.
struct Shards<'a> {
    merging: &'a Merging,
    follower: Follower,
    lanes: BTreeMap<i32, Shard>,
    /// Last published epoch and version.
    published: Option<(u64, u64)>,
}

/// State of one lane.
#[derive(Default)]
struct Shard {
    entries: Entries,
    /// Whether new entries arrived since the last look.
    changed: bool,
    epoch: u64,
    learner: Option<Trainer>,
}

impl<'a> Shards<'a> {
    fn open(merging: &'a Merging) -> Result<Self, Problem> {
        let topic = &merging.cluster.config.topics.snapshots;
        let lanes = partitions_of(&merging.space, merging.spec().shards, merging.partitions);
        let ranges = whole(&merging.cluster, topic, lanes)?;
        let follower = Follower::open(&merging.cluster, topic, &ranges)?;
        let lanes = ranges.into_keys().map(|lane| (lane, Shard::default())).collect();
        Ok(Self { merging, follower, lanes, published: None })
    }

    /// Polls for a message.
    fn take_in(&mut self) -> Result<(), Problem> {
        if let Some(message) = self.follower.poll(WAIT)?
            && let Some(shard) = self.lanes.get_mut(&message.partition())
        {
            note(&mut shard.entries, message.key(), message.payload());
            shard.changed = true;
        }
        Ok(())
    }

    /// Publishes the sum, if all lanes were read and it has changed.
    fn publish(&mut self, transactions: &mut Transactions<KafkaProducers>) -> Result<()> {
        if !self.follower.caught_up() {
            return Ok(());
        }
        let (space, spec) = (&self.merging.space, self.merging.spec());
        let topic = &self.merging.cluster.config.topics.snapshots;
        for (lane, shard) in self.lanes.iter_mut().filter(|(_, shard)| shard.changed) {
            // In the middle of a transaction the state is incomplete: the next look retries.
            shard.changed = !shard.look(topic, *lane, space, spec)?;
        }
        let mut sum = Trainer::new(spec.clone());
        for learner in self.lanes.values().filter_map(|shard| shard.learner.as_ref()) {
            if !sum.add(learner) {
                let problem = format!("cannot merge the shards of space {space}: their states do not match");
                return Err(LaneError::last(problem));
            }
        }
        // The sum of epochs grows when any of them does.
        let epoch = self.lanes.values().map(|shard| shard.epoch).sum::<u64>().min(STAMP_MAX);
        let version = sum.version();
        if version == 0 || self.published == Some((epoch, version)) {
            return Ok(());
        }
        let params = Params {
            space: space.clone(),
            epoch,
            version,
            revision: 0,
            models: spec.models.clone(),
            dim: spec.dim,
            created_ms: now_ms(),
            algorithm: spec.algorithm().to_owned(),
            policy: sum.policy(),
        };
        let message = Outgoing::params(&self.merging.cluster.config.topics, space, &params::encode(&params));
        // Publishing the same parameters again changes nothing, so nobody has to ask what is committed.
        let again = &mut || Ok(Outcome::NotCommitted);
        transactions.deliver(vec![message], again)?;
        transactions.commit(again)?;
        tracing::debug!(space = space.as_str(), epoch, version, "merged shards");
        self.published = Some((epoch, version));
        Ok(())
    }
}

impl Shard {
    /// Restores the learner of the newest state; false if that state is still incomplete.
    fn look(&mut self, topic: &str, lane: i32, space: &Name, spec: &Spec) -> Result<bool> {
        if self.entries.is_empty() {
            return Ok(true);
        }
        let mirror = Mirror::open(topic, lane, self.entries.clone())?;
        let store = LaneStore::new(mirror, &lane_name(lane), Retention::newest(1));
        let Ok(Resumed { snapshot: Some(found), .. }) = store.newest() else { return Ok(false) };
        self.epoch = LaneHead::open(&SharedHead::open(&found.head)?.lane)?.epoch;
        let key = learner_key(space);
        if let Some((_, bytes)) = found.records.iter().find(|(known, _)| *known == key) {
            let doing = || format!("cannot restore the shard of space {space} in lane {lane}");
            self.learner = Some(Trainer::restore(spec.clone(), bytes).doing(doing)?);
        }
        Ok(true)
    }
}
