//! Takes over a lane that moves between instances, and commits it in transactions.
//!
//! The snapshots topic is the source of truth about a lane. A snapshot of the lane is one transaction under the lane's
//! transactional ID: its state, the parameters of that state and its dead letters. A new owner initializes transactions
//! under that ID, which aborts the open transaction of the previous owner and fences it, and only then reads the state. So
//! there is one history, even if a stale owner is still running:
//!
//! 1. all messages are delivered, but not committed; a fenced owner fails here and stops,
//! 2. the lines of the snapshot are appended to the log of applied requests,
//! 3. the transaction is committed,
//! 4. the snapshot is written to the local store.
//!
//! A crash between 2 and 3 leaves uncommitted lines; one between 3 and 4 leaves a store that is behind. Both are repaired:
//! the state holds the committed log length of every instance that owned the lane ([`SharedHead::audits`]). An instance
//! truncates its log to that length when it takes over the lane, or when it sees that another instance has done so
//! ([`Claims::settle`]): the new owner started after all transactions of this instance were decided, so its record is final.
//! While the newest state is an instance's own, its last transaction may still be undecided, and it leaves its log alone.
//! Every owner writes a first snapshot before its first event, so a state of another owner is never older than its lines.
//!
//! The local store never holds uncommitted state. `pointsman snapshots` reads it, and it is the fallback if the topic is
//! lost. A state on the topic takes precedence, unless the local one has a later epoch, which a rollback or an import
//! starts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::commit::{Commit, Work, append, checkpoint};
use super::error::{Doing, LaneError, Result};
use super::lane::{Keeps, Lane, StartKeeper, cut_audit, note_changes};
use super::retry::Retry;
use crate::config::{Settings, SnapshotConfig, Topics};
use crate::engine::Engine;
use crate::failpoint;
use crate::merge::MergeState;
use crate::router::Params;
use crate::snapshot::{LaneHead, SharedHead, fingerprint};
use crate::state::generations::difference;
use crate::state::{Change, LaneStore, Records, Resumed, Retention, Snapshot};
use crate::store::SnapshotStore;
use crate::telemetry::Facts;
use crate::transport::kafka::cluster::Problem;
use crate::transport::kafka::homes::partition_of;
use crate::transport::kafka::outlet::{LetterLimits, Outgoing};
use crate::transport::kafka::positions::{self, Place};
use crate::transport::kafka::state::{Entries, Mirror};
use crate::transport::kafka::transaction::{Outcome, Producers, Transactions};
use crate::transport::{Lines, Log};

/// What lanes need from the brokers.
pub trait Broker: Send + Sync {
    /// Transactional producers.
    type Producers: Producers + 'static;

    /// Names of the topics.
    fn topics(&self) -> &Topics;

    /// Producers under the transactional ID of a lane.
    fn producers(&self, lane: i32) -> Self::Producers;

    /// The committed entries of a lane's state, once its previous owner is fenced.
    fn state(&self, lane: i32) -> Result<Entries, Problem>;

    /// The newest committed heads of lanes that have one.
    fn heads(&self, lanes: &[i32]) -> Result<BTreeMap<i32, SharedHead>, Problem>;

    /// The newest published parameters of every space.
    fn published(&self) -> Result<Vec<Params>, Problem>;

    /// The partitions of a lane, with the positions to read them from. Records accepted gaps.
    fn places(&self, lane: i32, state: &MergeState) -> Result<Vec<Place>, Problem>;

    /// The lane is no longer owned here.
    fn released(&self, _lane: i32) {}
}

/// What lanes need from the disk of their instance.
pub trait Disk: Send + Sync {
    /// The store of snapshots.
    type Store: SnapshotStore + 'static;

    /// The snapshots of a lane.
    fn lane(&self, lane: &str) -> LaneStore<Self::Store>;

    /// The log of applied requests of a lane, if it is kept.
    fn audit(&self, lane: i32) -> Option<Box<dyn Lines>>;
}

/// What the lanes of an instance share.
pub struct Claims<B, D> {
    /// The brokers.
    pub broker: Arc<B>,
    /// The disk.
    pub disk: D,
    /// What to learn, and how.
    pub settings: Settings,
    /// When snapshots are taken.
    pub cadence: SnapshotConfig,
    /// How long an event is held for earlier ones; unlimited if none.
    pub hold: Option<Duration>,
    /// ID of this instance.
    pub instance: String,
    /// Number of lanes of all instances.
    pub partitions: usize,
    /// Size limits of dead letters.
    pub limits: LetterLimits,
    /// Receives facts for metrics and logs.
    pub facts: Arc<Facts>,
    /// Retries what may succeed later.
    pub retry: Retry,
    /// How the keepers of lanes run.
    pub keeper: StartKeeper,
}

/// A lane that is ready to run.
pub struct Opened<S> {
    /// The lane, after its first snapshot was submitted.
    pub lane: Lane<S>,
    /// What it reads.
    pub places: Vec<Place>,
}

impl<B: Broker + 'static, D: Disk> Claims<B, D> {
    /// The lanes of all instances.
    pub fn lanes(&self) -> impl Iterator<Item = i32> + use<B, D> {
        0..self.partitions as i32
    }

    /// Takes over a lane and submits its first snapshot, so that a restart has a state to resume from. Its transactions end when
    /// `given_up` is set.
    pub fn open<S: Log>(&self, lane: i32, given_up: &Arc<AtomicBool>) -> Result<Opened<S>> {
        if lane as usize >= self.partitions {
            let (before, now, topic) = (self.partitions, lane as usize + 1, self.broker.topics().queries.clone());
            return Err(Problem::MorePartitions { topic, before, now }.into());
        }
        let name = lane_name(lane);
        let transactions = Transactions::take_over(self.broker.producers(lane), &name, given_up)?;
        let entries = self.broker.state(lane)?;
        let shared = Mirror::open(&self.broker.topics().snapshots, lane, entries)?;
        let mut shared = LaneStore::new(shared, &name, Retention::newest(1));
        let mut local = self.disk.lane(&name);
        let Begun { snapshot, mut head, from_topic, shared_changes, local_changes, mut shared_head } =
            self.choose(lane, &mut shared, &mut local)?;
        let fresh = snapshot.is_none();
        let engine = match snapshot {
            Some(snapshot) => {
                let restored = Engine::restore(self.settings.clone(), head.engine.clone(), snapshot.records);
                let mismatch = format!("the state of lane {name} does not match the configuration");
                restored.map_err(|error| LaneError::Final(anyhow::Error::from(error).context(mismatch)))?
            }
            None => Engine::new(self.settings.clone()),
        };
        if !fresh {
            note_changes(&head, &self.settings);
        }
        let mut audit = self.disk.audit(lane);
        if let Some(log) = &mut audit {
            let known = shared_head.audits.get(&self.instance).filter(|_| from_topic);
            head.audit_bytes = known.map_or(head.audit_bytes, |audit| audit.bytes);
            cut_audit(&mut **log, &mut head, fresh || (from_topic && known.is_none()))?;
        }
        let committed = shared_head.clone();
        shared_head.instance.clone_from(&self.instance);
        shared_head.partitions = self.partitions as u32;
        shared_head.term += 1;
        let is_published = from_topic && head.configuration == fingerprint(&self.settings);
        let keeps = Keeps { snapshots: true, params: true, audit: audit.is_some(), spread: true };
        let commit = Transactional {
            broker: self.broker.clone(),
            lane,
            transactions,
            shared,
            committed,
            head: shared_head,
            audit_bytes: head.audit_bytes,
            audit,
            limits: self.limits,
            facts: self.facts.clone(),
            retry: self.retry.or_until(given_up.clone()),
            shared_changes,
            local_changes,
            local,
        };
        let keeper = (self.keeper)(Box::new(commit))?;
        let (settings, cadence) = (&self.settings, &self.cadence);
        let (mut opened, mut state) = Lane::resume(
            settings,
            cadence,
            (engine, head),
            keeps,
            (self.facts.clone(), self.retry.clock().clone()),
            keeper,
        );
        opened.merge.set_hold(self.hold);
        if !from_topic {
            let of_lane = |params: &Params| partition_of(&params.space, self.partitions) == lane;
            let known: Vec<Params> = self.broker.published()?.into_iter().filter(of_lane).collect();
            opened.meet_published(&known);
        }
        let places = self.broker.places(lane, &state)?;
        state.positions = positions::of(&places);
        if is_published { opened.begin_quietly(state) } else { opened.begin(state) }?;
        Ok(Opened { lane: opened, places })
    }

    /// Chooses the state to resume from: the topic, or the local store if that is ahead; and what the other one lacks.
    fn choose(&self, lane: i32, shared: &mut LaneStore<Mirror>, local: &mut LaneStore<D::Store>) -> Result<Begun> {
        let topic = &self.broker.topics().snapshots;
        let bad = |problem: String| Problem::BadState { lane: format!("{topic}/{lane}"), problem };
        let Resumed { snapshot: found, damaged } = shared.resume()?;
        if let (None, Some(damage)) = (&found, damaged.first()) {
            return Err(bad(damage.to_string()).into());
        }
        let Some(found) = found else {
            let snapshot = newest(local)?;
            let head = snapshot.as_ref().map_or(Ok(LaneHead::default()), |snapshot| LaneHead::open(&snapshot.head))?;
            let records = snapshot.as_ref().map_or_else(Records::new, |snapshot| snapshot.records.clone());
            let shared_changes = difference(&Records::new(), &records);
            return Ok(Begun { head, shared_changes, snapshot, ..Begun::default() });
        };
        let shared_head = SharedHead::open(&found.head).map_err(|error| bad(error.to_string()))?;
        self.check_partitions(&shared_head)?;
        let head = LaneHead::open(&shared_head.lane).map_err(|error| bad(error.to_string()))?;
        // One that is damaged is replaced.
        let copy = local.resume()?.snapshot;
        let of_copy = copy.as_ref().and_then(|copy| LaneHead::open(&copy.head).ok());
        if let (Some(copy), Some(of_copy)) = (&copy, of_copy)
            && of_copy.epoch > head.epoch
        {
            tracing::warn!(
                lane = local.lane(),
                epoch = of_copy.epoch,
                "the store has a later epoch than the topic; resuming from the store"
            );
            let shared_changes = difference(&found.records, &copy.records);
            let snapshot = Some(copy.clone());
            return Ok(Begun { snapshot, head: of_copy, shared_changes, shared_head, ..Begun::default() });
        }
        let local_changes = difference(&copy.map_or_else(Records::new, |copy| copy.records), &found.records);
        let term = shared_head.term;
        tracing::info!(
            lane = local.lane(),
            term,
            from = shared_head.instance,
            records = found.records.len(),
            "took over lane"
        );
        Ok(Begun { snapshot: Some(found), head, from_topic: true, local_changes, shared_head, ..Begun::default() })
    }

    /// Fails if the spaces were distributed over another number of partitions.
    pub fn check_partitions(&self, head: &SharedHead) -> Result<(), Problem> {
        let (before, now) = (head.partitions as usize, self.partitions);
        let topic = self.broker.topics().queries.clone();
        if before == now { Ok(()) } else { Err(Problem::MorePartitions { topic, before, now }) }
    }

    /// Truncates the log of a lane that another instance has taken over. False while its committed length is unknown.
    pub fn settle(&self, lane: i32, head: &SharedHead) -> Result<bool> {
        let Some(mut log) = self.disk.audit(lane) else { return Ok(true) };
        if head.instance == self.instance {
            return Ok(false);
        }
        if let Some(audit) = head.audits.get(&self.instance) {
            let length = log.cut(audit.bytes).doing(|| "cannot write audit.applied_log".to_owned())?;
            if length > audit.bytes {
                tracing::info!(lane, cut = length - audit.bytes, "removed uncommitted lines from audit.applied_log");
            }
        }
        Ok(true)
    }
}

/// The state that a lane starts from.
#[derive(Default)]
struct Begun {
    snapshot: Option<Snapshot>,
    head: LaneHead,
    from_topic: bool,
    /// Changes that the topic and the local store lack.
    shared_changes: Vec<Change>,
    local_changes: Vec<Change>,
    shared_head: SharedHead,
}

/// State, parameters and dead letters in one transaction; a copy of the state in the local store.
struct Transactional<B: Broker, S> {
    broker: Arc<B>,
    lane: i32,
    transactions: Transactions<B::Producers>,
    shared: LaneStore<Mirror>,
    /// The newest head on the topic, as far as this owner knows.
    committed: SharedHead,
    /// The head of the current transaction.
    head: SharedHead,
    audit: Option<Box<dyn Lines>>,
    audit_bytes: u64,
    limits: LetterLimits,
    facts: Arc<Facts>,
    retry: Retry,
    local: LaneStore<S>,
    shared_changes: Vec<Change>,
    local_changes: Vec<Change>,
}

impl<B: Broker, S: SnapshotStore> Commit for Transactional<B, S> {
    fn carry_out(&mut self, mut work: Work) -> Result<()> {
        if let Some((head, changes)) = work.snapshot.take() {
            self.commit(&work, head, changes)?;
            self.facts.published(std::mem::take(&mut work.news));
            checkpoint(&mut self.local, work.created_ms, &self.facts);
        }
        Ok(())
    }
}

impl<B: Broker, S: SnapshotStore> Transactional<B, S> {
    fn commit(&mut self, work: &Work, head: Vec<u8>, changes: Vec<Change>) -> Result<()> {
        let (begun, records) = (Instant::now(), changes.len());
        let local_changes = together(&mut self.local_changes, changes.clone());
        let messages = self.messages(work, &head, changes)?;
        failpoint::reach("before-publish");
        let Self { broker, lane, transactions, committed, head: attempted, audit, retry, .. } = self;
        let mut ask = || Ok(compare(broker.heads(&[*lane])?, &[(*lane, committed, attempted)]));
        let mut lines = Some(&work.audit);
        retry.run("commit", || {
            if transactions.deliver(messages.clone(), &mut ask)? == Outcome::Committed {
                return Ok(());
            }
            if let (Some(audit), Some(lines)) = (audit.as_deref_mut(), lines.take()) {
                append(retry, audit, lines)?;
            }
            failpoint::reach("mid-publish");
            Ok(transactions.commit(&mut ask)?)
        })?;
        self.committed.clone_from(&self.head);
        failpoint::reach("after-publish");
        failpoint::reach("before-persist");
        let local = &mut self.local;
        let generation = self.retry.run("snapshot", || Ok(local.commit(&head, &local_changes)?))?;
        tracing::debug!(lane = self.local.lane(), generation, messages = messages.len(), "snapshot");
        self.facts.snapshot(self.local.lane(), generation, records, begun.elapsed());
        Ok(())
    }

    /// All that belongs together.
    fn messages(&mut self, work: &Work, head: &[u8], changes: Vec<Change>) -> Result<Vec<Outgoing>> {
        self.audit_bytes += work.audit.len() as u64;
        self.head.lane = head.to_vec();
        if self.audit.is_some() {
            self.head.note_audit(self.audit_bytes);
        }
        let topics = self.broker.topics();
        let letters = work.dead_letters.iter();
        let letters = letters.map(|letter| Outgoing::dead_letter(topics, letter, self.limits));
        let params = work.params.iter().map(|(space, bytes)| Outgoing::params(topics, space, bytes));
        let mut messages: Vec<Outgoing> = letters.chain(params).collect();
        let changes = together(&mut self.shared_changes, changes);
        self.shared.commit(&self.head.seal(), &changes)?;
        messages.extend(self.shared.store_mut().take_outbox());
        Ok(messages)
    }
}

/// Whether a transaction over lanes is committed, by the heads that `found` on the topic. Of each lane: the head that was
/// committed before it, and its own.
pub(super) fn compare(mut found: BTreeMap<i32, SharedHead>, lanes: &[(i32, &SharedHead, &SharedHead)]) -> Outcome {
    let mut outcome = Outcome::NotCommitted;
    for (lane, committed, attempted) in lanes {
        let newest = found.remove(lane).unwrap_or_default();
        if newest == **committed {
            continue;
        }
        if newest != **attempted {
            return Outcome::Overtaken;
        }
        // A commit reaches the partitions one after the other, but all of them.
        outcome = Outcome::Committed;
    }
    outcome
}

/// The newest intact snapshot in the local store; an error if all were lost.
fn newest<S: SnapshotStore>(local: &mut LaneStore<S>) -> Result<Option<Snapshot>> {
    let Resumed { snapshot, damaged } = local.resume()?;
    for damage in &damaged {
        tracing::error!(generation = damage.generation, problem = damage.problem, "snapshot is damaged");
    }
    local.check_lost(snapshot.as_ref(), &damaged)?;
    Ok(snapshot)
}

/// Whether these entries hold a complete state of the lane.
pub(super) fn is_whole(topic: &str, lane: i32, entries: &Entries) -> bool {
    let newest = |mirror| LaneStore::new(mirror, &lane_name(lane), Retention::newest(1)).newest();
    let found = Mirror::open(topic, lane, entries.clone()).map(newest);
    matches!(found, Ok(Ok(Resumed { snapshot: Some(_), .. })))
}

/// Changes that were left over, then others: of each record the last.
fn together(left_over: &mut Vec<Change>, changes: Vec<Change>) -> Vec<Change> {
    if left_over.is_empty() {
        return changes;
    }
    let all: BTreeMap<Vec<u8>, Option<Vec<u8>>> = std::mem::take(left_over).into_iter().chain(changes).collect();
    all.into_iter().collect()
}

/// The name of a lane: in the store, in the topic and among transactions.
pub fn lane_name(lane: i32) -> String {
    format!("partition-{lane}")
}

/// A file that every lane has for itself.
pub(super) fn lane_path(path: &Path, lane: i32) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let extension = path.extension().map(|extension| format!(".{}", extension.to_string_lossy())).unwrap_or_default();
    path.with_file_name(format!("{stem}-{}{extension}", lane_name(lane)))
}
