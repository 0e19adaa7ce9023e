//! A lane that moves between instances.
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
//! ([`Desk::settle`]): the new owner started after all transactions of this instance were decided, so its record is final.
//! While the newest state is an instance's own, its last transaction may still be undecided, and it leaves its log alone.
//! Every owner writes a first snapshot before its first event, so a state of another owner is never older than its lines.
//!
//! The local store never holds uncommitted state. `pointsman snapshots` reads it, and it is the fallback if the topic is
//! lost. A state on the topic takes precedence, unless the local one has a later epoch, which a rollback or an import
//! starts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use anyhow::Context;

use super::retry::Retry;
use super::{Carry, Keeps, Runner, Work, checkpoint, cut_audit, note_changes};
use crate::config::{Settings, SnapshotConfig};
use crate::engine::Engine;
use crate::failpoint;
use crate::merge::MergeState;
use crate::router::Params;
use crate::snapshot::{LaneHead, SharedHead, fingerprint};
use crate::state::generations::difference;
use crate::state::{Change, LaneStore, LocalLane, Records, Resumed, Retention, Snapshot};
use crate::store::{DirStore, Shared};
use crate::telemetry::Facts;
use crate::transport::append::Appender;
use crate::transport::kafka::cluster::{Cluster, Problem};
use crate::transport::kafka::consumer::{Partition, Reader};
use crate::transport::kafka::homes::partition_of;
use crate::transport::kafka::outlet::{LetterLimits, Outgoing};
use crate::transport::kafka::standby::Standby;
use crate::transport::kafka::state::{self, Entries, Mirror};
use crate::transport::kafka::transaction::Transactions;

/// What the lanes of an instance share.
pub(super) struct Desk<'a> {
    pub cluster: &'a Cluster,
    pub settings: &'a Settings,
    pub cadence: &'a SnapshotConfig,
    pub store: Shared<DirStore>,
    /// ID of this instance.
    pub instance: String,
    /// Number of lanes of all instances.
    pub partitions: usize,
    /// Path of the log of applied requests; each lane has a file of its own.
    pub audit: Option<PathBuf>,
    /// Maximum message size.
    pub message_bytes: usize,
    /// Size limits of dead letters.
    pub limits: LetterLimits,
    /// The reader, once it is started.
    pub reader: Arc<OnceLock<Arc<Reader>>>,
    /// Standby copies of the lanes of other instances, if enabled.
    pub standby: Option<Standby>,
    /// Receives facts for metrics and logs.
    pub facts: Arc<Facts>,
    /// Retries failures of the local disk.
    pub retry: Retry,
}

/// A lane whose previous owner is fenced, with the state that it left.
pub(super) struct Claim {
    transactions: Transactions,
    entries: Entries,
}

/// A lane that is ready to run.
pub(super) struct Opened {
    pub runner: Runner<Partition>,
    /// Positions to resume from.
    pub state: MergeState,
    /// Whether the published parameters match the state.
    pub is_published: bool,
    /// Aborts its transaction soon.
    pub give_up: Arc<AtomicBool>,
}

impl Desk<'_> {
    /// Fences the previous owner of the lane and reads the state it left.
    pub fn claim(&self, lane: i32) -> Result<Claim, Problem> {
        let transactions =
            Transactions::take_over(self.cluster, &lane_name(lane), self.message_bytes, Some(self.limits))?;
        let copy = self.standby.as_ref().and_then(|standby| standby.take(lane));
        if let Some((entries, next)) = copy {
            let entries = state::read(self.cluster, lane, entries, next)?;
            if is_whole(&self.cluster.config.topics.snapshots, lane, &entries) {
                return Ok(Claim { transactions, entries });
            }
            tracing::info!(lane, "standby copy of the lane is incomplete; reading it from the topic");
        }
        let entries = state::read(self.cluster, lane, Entries::new(), 0)?;
        Ok(Claim { transactions, entries })
    }

    /// Opens a lane. Calls `published` only if the state of the lane does not tell what is published.
    pub fn open(
        &self,
        lane: i32,
        claim: Claim,
        published: &mut dyn FnMut() -> anyhow::Result<Vec<Params>>,
    ) -> anyhow::Result<Opened> {
        let name = lane_name(lane);
        let shared = Mirror::open(&self.cluster.config.topics.snapshots, lane, claim.entries)?;
        let mut shared = LaneStore::new(shared, &name, Retention::newest(1));
        let mut local = LocalLane::new(self.store.clone(), &name, self.cadence.into());
        let Begun { snapshot, mut head, from_topic, shared_changes, local_changes, mut shared_head } =
            self.choose(lane, &mut shared, &mut local)?;
        let fresh = snapshot.is_none();
        let engine = match snapshot {
            Some(snapshot) => Engine::restore(self.settings.clone(), head.engine.clone(), snapshot.records)
                .with_context(|| format!("the state of lane {name} does not match the configuration"))?,
            None => Engine::new(self.settings.clone()),
        };
        if !fresh {
            note_changes(&head, self.settings);
        }
        let mut audit = self.audit.as_deref().map(|path| Appender::new(&lane_path(path, lane)));
        if let Some(log) = &mut audit {
            let known = shared_head.audits.get(&self.instance).filter(|_| from_topic);
            head.audit_bytes = known.map_or(head.audit_bytes, |audit| audit.bytes);
            cut_audit(log, &mut head, fresh || (from_topic && known.is_none()))?;
        }
        shared_head.instance.clone_from(&self.instance);
        shared_head.partitions = self.partitions as u32;
        shared_head.term += 1;
        let is_published = from_topic && head.configuration == fingerprint(self.settings);
        let keeps = Keeps { snapshots: true, params: true, audit: audit.is_some(), spread: true };
        let give_up = claim.transactions.given_up();
        let outlets = LaneOutlets {
            cluster: self.cluster.clone(),
            transactions: claim.transactions,
            shared,
            head: shared_head,
            audit_bytes: head.audit_bytes,
            audit,
            limits: self.limits,
            facts: self.facts.clone(),
            retry: self.retry.or_until(give_up.clone()),
            reader: self.reader.clone(),
            shared_changes,
            local_changes,
            local,
        };
        let (mut runner, state) =
            Runner::resume(self.settings, self.cadence, (engine, head), keeps, self.facts.clone(), outlets)?;
        if !from_topic {
            let of_lane = |params: &Params| partition_of(&params.space, self.partitions) == lane;
            let known: Vec<Params> = published()?.into_iter().filter(of_lane).collect();
            runner.meet_published(&known);
        }
        Ok(Opened { runner, state, is_published, give_up })
    }

    /// Chooses the state to resume from: the topic, or the local store if that is ahead; and what the other one lacks.
    fn choose(&self, lane: i32, shared: &mut LaneStore<Mirror>, local: &mut LocalLane) -> anyhow::Result<Begun> {
        let topic = &self.cluster.config.topics.snapshots;
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
        let topic = self.cluster.config.topics.queries.clone();
        if before == now { Ok(()) } else { Err(Problem::MorePartitions { topic, before, now }) }
    }

    /// Truncates the log of a lane that another instance has taken over. False while its committed length is unknown.
    pub fn settle(&self, lane: i32, head: &SharedHead) -> anyhow::Result<bool> {
        let Some(path) = self.audit.as_deref().map(|path| lane_path(path, lane)) else { return Ok(true) };
        if head.instance == self.instance {
            return Ok(false);
        }
        if let Some(audit) = head.audits.get(&self.instance) {
            let length = Appender::new(&path).cut(audit.bytes).context("cannot write audit.applied_log")?;
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

/// Where the work of a lane goes.
struct LaneOutlets {
    cluster: Cluster,
    transactions: Transactions,
    shared: LaneStore<Mirror>,
    head: SharedHead,
    audit: Option<Appender>,
    audit_bytes: u64,
    limits: LetterLimits,
    facts: Arc<Facts>,
    retry: Retry,
    local: LocalLane,
    reader: Arc<OnceLock<Arc<Reader>>>,
    shared_changes: Vec<Change>,
    local_changes: Vec<Change>,
}

impl Carry for LaneOutlets {
    fn carry_out(&mut self, mut work: Work) -> anyhow::Result<()> {
        if let Some((head, changes)) = work.snapshot.take() {
            self.commit(&work, head, changes)?;
            self.facts.published(std::mem::take(&mut work.told));
            if let Some(reader) = self.reader.get() {
                reader.commit(&work.positions);
            }
            checkpoint(&mut self.local, work.created_ms, &self.facts);
        }
        if let Some(done) = work.done {
            // The receiver may be gone.
            let _ = done.send(());
        }
        Ok(())
    }
}

impl LaneOutlets {
    fn commit(&mut self, work: &Work, head: Vec<u8>, changes: Vec<Change>) -> anyhow::Result<()> {
        let (begun, records) = (Instant::now(), changes.len());
        let local_changes = together(&mut self.local_changes, changes.clone());
        let messages = self.messages(work, &head, changes)?;
        failpoint::reach("before-publish");
        let number = messages.len();
        self.transactions.deliver(messages)?;
        if let Some(audit) = &mut self.audit {
            self.retry.run("audit", || audit.append(&work.audit).context("cannot write audit.applied_log"))?;
        }
        failpoint::reach("mid-publish");
        self.transactions.commit()?;
        failpoint::reach("after-publish");
        failpoint::reach("before-persist");
        let local = &mut self.local;
        let generation = self.retry.run("snapshot", || Ok(local.commit(&head, &local_changes)?))?;
        tracing::debug!(lane = self.local.lane(), generation, messages = number, "snapshot");
        self.facts.snapshot(self.local.lane(), generation, records, begun.elapsed());
        Ok(())
    }

    /// All that belongs together.
    fn messages(&mut self, work: &Work, head: &[u8], changes: Vec<Change>) -> anyhow::Result<Vec<Outgoing>> {
        self.audit_bytes += work.audit.len() as u64;
        self.head.lane = head.to_vec();
        if self.audit.is_some() {
            self.head.note_audit(self.audit_bytes);
        }
        let letters = work.dead_letters.iter();
        let letters = letters.map(|letter| Outgoing::dead_letter(&self.cluster, letter, self.limits));
        let params = work.params.iter().map(|(space, bytes)| Outgoing::params(&self.cluster, space, bytes));
        let mut messages: Vec<Outgoing> = letters.chain(params).collect();
        let changes = together(&mut self.shared_changes, changes);
        self.shared.commit(&self.head.seal(), &changes)?;
        messages.extend(self.shared.store_mut().take_outbox());
        Ok(messages)
    }
}

/// The newest intact snapshot in the local store; an error if all were lost.
fn newest(local: &mut LocalLane) -> anyhow::Result<Option<Snapshot>> {
    let Resumed { snapshot, damaged } = local.resume()?;
    for damage in &damaged {
        tracing::error!(generation = damage.generation, problem = damage.problem, "snapshot is damaged");
    }
    local.check_lost(snapshot.as_ref(), &damaged)?;
    Ok(snapshot)
}

/// Whether these entries hold a complete state of the lane.
fn is_whole(topic: &str, lane: i32, entries: &Entries) -> bool {
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
pub(super) fn lane_name(lane: i32) -> String {
    format!("partition-{lane}")
}

/// A file that every lane has for itself.
pub(super) fn lane_path(path: &Path, lane: i32) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let extension = path.extension().map(|extension| format!(".{}", extension.to_string_lossy())).unwrap_or_default();
    path.with_file_name(format!("{stem}-{}{extension}", lane_name(lane)))
}
