//! A lane: the unit that is owned, snapshotted and moved as a whole.
//!
//! Events come in from a merge of logs, go through the engine, and what follows from them is handed to a [`Keeper`] when a
//! snapshot is due. `learn`, `replay` and `demo` run the same lane with other logs and other ways to commit.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::clock::Clock;
use super::commit::{Commit, Keeper, Local, Work};
use super::error::{Doing, Result};
use super::retry::Retry;
use crate::config::{Settings, SnapshotConfig};
use crate::dead_letters::Recording;
use crate::engine::{Applied, DeadLetter, Engine};
use crate::evaluate::rollout::Stage;
use crate::event::Name;
use crate::merge::{Merge, MergeState, Next, Origin, Sourced};
use crate::router::Params;
use crate::snapshot::{LaneHead, Publication, fingerprint, next_epoch};
use crate::state::{LaneStore, Restored};
use crate::store::SnapshotStore;
use crate::telemetry::{Facts, Published, Reasons};
use crate::transport::{Letter, Lines, Log, Outlet};
use crate::wire::params::{self, STAMP_MAX};

/// Limit on the lines held in memory until a snapshot makes them durable, in bytes.
const LINES_BYTES_MAX: usize = 8 << 20;

/// Number of events that [`Lane::step_some`] processes at most.
const STEPS_MAX: u64 = 64;

/// Where a run stores its state and output.
pub struct Places<S> {
    /// The store; without one, nothing outlives the run.
    pub store: Option<LaneStore<S>>,
    /// The log of applied requests.
    pub audit: Option<Box<dyn Lines>>,
    /// Dead letters and parameters.
    pub outlet: Box<dyn Outlet>,
    /// The newest published parameters.
    pub published: Vec<Params>,
    /// Receives facts for metrics and logs.
    pub facts: Arc<Facts>,
    /// Retries failures of the operating system.
    pub retry: Retry,
}

/// Which outputs of a lane are kept.
pub(super) struct Keeps {
    pub snapshots: bool,
    pub params: bool,
    pub audit: bool,
    /// Whether spaces with shards run in several lanes: a merger publishes their parameters.
    pub spread: bool,
}

/// An engine, the merge of its logs, and how its effects become durable.
pub struct Lane<S> {
    /// The engine.
    pub engine: Engine,
    /// Its logs.
    pub merge: Merge<S>,
    settings: Settings,
    cadence: SnapshotConfig,
    head: LaneHead,
    keeper: Keeper,
    keeps: Keeps,
    facts: Arc<Facts>,
    clock: Arc<dyn Clock>,
    work: Work,
    dead_bytes: usize,
    applied_since: u64,
    events_since: u64,
    /// Event time of the oldest reward of each space that was learned from and is in no publication yet.
    oldest_rewards: BTreeMap<Name, i64>,
    /// Charges of each space at its last publication by this process.
    published_charges: BTreeMap<Name, u64>,
    last_snapshot: Duration,
}

/// Starts the keeper of a lane: [`Keeper::start`] or [`Keeper::here`].
pub type StartKeeper = fn(Box<dyn Commit>) -> Result<Keeper>;

impl<S: Log> Lane<S> {
    /// Resumes from the newest snapshot of the store, if there is one. Also returns the positions of the logs to add.
    pub fn open<T: SnapshotStore + 'static>(
        settings: &Settings,
        cadence: &SnapshotConfig,
        places: Places<T>,
        keeper: StartKeeper,
    ) -> Result<(Self, MergeState)> {
        let Places { store: mut snapshots, mut audit, outlet, published, facts, retry } = places;
        let restored = match &mut snapshots {
            Some(snapshots) => restore(snapshots, settings)?,
            None => None,
        };
        let fresh = restored.is_none();
        let (engine, mut head) = restored.unwrap_or_else(|| (Engine::new(settings.clone()), LaneHead::default()));
        if let Some(log) = &mut audit {
            cut_audit(&mut **log, &mut head, fresh)?;
        }
        if !fresh {
            note_changes(&head, settings);
        }
        let (snapshots_kept, params) = (snapshots.is_some(), outlet.publishes());
        let keeps = Keeps { snapshots: snapshots_kept, params, audit: audit.is_some(), spread: false };
        let clock = retry.clock().clone();
        let commit = Local { snapshots, audit, outlet, facts: facts.clone(), retry };
        let keeper = keeper(Box::new(commit))?;
        let (mut lane, positions) = Self::resume(settings, cadence, (engine, head), keeps, (facts, clock), keeper);
        lane.meet_published(&published);
        Ok((lane, positions))
    }

    /// Resumes from an engine and its head. Also returns the positions of the logs to add.
    pub(super) fn resume(
        settings: &Settings,
        cadence: &SnapshotConfig,
        (engine, mut head): (Engine, LaneHead),
        keeps: Keeps,
        (facts, clock): (Arc<Facts>, Arc<dyn Clock>),
        keeper: Keeper,
    ) -> (Self, MergeState) {
        head.configuration = fingerprint(settings);
        let positions = head.merge.clone();
        let lane = Self {
            engine,
            merge: Merge::new(settings.reorder_ms, &positions),
            settings: settings.clone(),
            cadence: cadence.clone(),
            head,
            keeper,
            keeps,
            facts,
            last_snapshot: clock.now(),
            clock,
            work: Work::default(),
            dead_bytes: 0,
            applied_since: 0,
            events_since: 0,
            oldest_rewards: BTreeMap::new(),
            published_charges: BTreeMap::new(),
        };
        (lane, positions)
    }

    /// Takes the first snapshot of a run, before its first event, so that a restart has a state to resume from.
    pub fn begin(&mut self, positions: MergeState) -> Result<()> {
        self.snapshot_at(positions, true)
    }

    /// The same without publishing: the published parameters are known to match the state.
    pub(super) fn begin_quietly(&mut self, positions: MergeState) -> Result<()> {
        self.snapshot_at(positions, false)
    }

    /// Processes the next event, if the merge knows which one that is. Takes a snapshot if one is due, and waits for earlier
    /// ones if too many of them are not durable yet.
    pub fn step(&mut self) -> Result<Stepped> {
        let stepped = self.advance()?;
        if matches!(stepped, Stepped::Event { .. }) {
            self.snapshot_if_due()?;
        }
        Ok(stepped)
    }

    fn advance(&mut self) -> Result<Stepped> {
        match self.merge.next_at(self.clock.now()).doing(|| "cannot read a log".to_owned())? {
            Next::Event(event, log) => {
                let Sourced { input, start, line, origin, .. } = event;
                if let Some(traceparent) = origin.as_ref().and_then(|origin| origin.traceparent.as_deref()) {
                    tracing::debug!(traceparent, log = self.merge.name(log), offset = start, "event");
                }
                let begun = Instant::now();
                let merge = &self.merge;
                let effects = self.engine.step_from(input, || place_of(merge, log, start, line).to_string());
                let rejected = effects.rejects_its_event().then_some(line);
                self.facts.learned(&effects.applied, begun.elapsed());
                effects.evicted.iter().for_each(|space| self.facts.space_evicted(space));
                for letter in effects.dead_letters {
                    let place = place_of(&self.merge, log, start, line);
                    self.note_bad(letter, place, origin.clone());
                }
                self.note_applied(&effects.applied);
                self.events_since += 1;
                Ok(Stepped::Event { log, rejected, applied: effects.applied })
            }
            Next::Wait => Ok(Stepped::Wait),
            Next::End => Ok(Stepped::End),
        }
    }

    /// Ends a finite log: closes all windows and releases events that no later event can confirm. Returns the examples
    /// learned from.
    pub fn close_windows(&mut self) -> Vec<Applied> {
        let effects = self.engine.finish();
        effects.dead_letters.into_iter().for_each(|letter| self.note_bad(letter, Value::default(), None));
        self.note_applied(&effects.applied);
        effects.applied
    }

    /// Records a malformed event that was read at `place`, or earlier if the engine held it.
    fn note_bad(&mut self, letter: DeadLetter, place: Value, origin: Option<Box<Origin>>) {
        let (place, origin) = match &letter.place {
            Some(earlier) => (serde_json::from_str(earlier).unwrap_or_default(), None),
            None => (place, origin),
        };
        let letter = Letter { letter, place, origin, time_ms: self.clock.wall_ms() };
        self.facts.bad_event(&letter);
        if letter.letter.recording == Recording::Recorded {
            self.dead_bytes += letter.memory_bytes();
            self.work.dead_letters.push(letter);
        }
    }

    /// Why events became dead letters since the start.
    pub fn reasons(&self) -> Reasons {
        self.facts.reasons()
    }

    /// Records examples that were learned from.
    pub fn note_applied(&mut self, applied: &[Applied]) {
        self.applied_since += applied.len() as u64;
        if self.keeps.params {
            self.note_rewards(applied);
        }
        if self.keeps.audit {
            for Applied { space, request_id, model, reward, .. } in applied {
                let line = json!({"space": space, "request_id": request_id, "model": model, "reward": reward});
                self.work.audit.extend_from_slice(format!("{line}\n").as_bytes());
            }
        }
    }

    /// Notes how old the rewards are, for the next publication.
    fn note_rewards(&mut self, applied: &[Applied]) {
        for Applied { space, rewarded_ms, .. } in applied {
            let Some(rewarded_ms) = *rewarded_ms else { continue };
            match self.oldest_rewards.get_mut(space) {
                Some(oldest_ms) => *oldest_ms = rewarded_ms.min(*oldest_ms),
                None => _ = self.oldest_rewards.insert(space.clone(), rewarded_ms),
            }
        }
    }

    /// Whether a snapshot is due.
    fn is_due(&self) -> bool {
        self.applied_since >= self.cadence.every_updates
            || self.work.audit.len() + self.dead_bytes > LINES_BYTES_MAX
            || (self.events_since > 0 && self.since_snapshot() >= Duration::from_millis(self.cadence.every_ms))
    }

    fn since_snapshot(&self) -> Duration {
        self.clock.now().saturating_sub(self.last_snapshot)
    }

    /// Takes a snapshot if one is due. Also fails if an earlier one could not be made durable or published.
    pub fn snapshot_if_due(&mut self) -> Result<()> {
        self.keeper.check()?;
        if self.is_due() { self.snapshot() } else { Ok(()) }
    }

    /// Makes everything learned durable, then publishes it.
    pub fn snapshot(&mut self) -> Result<()> {
        self.snapshot_at(self.merge.state(), false)
    }

    /// Processes some events: returns how many, and the last result unless more events are ready. Does not wait: while earlier
    /// snapshots are not durable yet and another is due, it processes nothing.
    pub fn step_some(&mut self) -> Result<(u64, Option<Stepped>)> {
        for taken in 0..STEPS_MAX {
            self.keeper.check()?;
            if self.is_due() {
                if !self.keeper.has_room() {
                    return Ok((taken, Some(Stepped::Wait)));
                }
                self.snapshot()?;
            }
            let stepped = self.advance()?;
            if !matches!(stepped, Stepped::Event { .. }) {
                return Ok((taken, Some(stepped)));
            }
        }
        Ok((STEPS_MAX, None))
    }

    /// Positions of the newest snapshot that became durable since the last call.
    pub fn take_reached(&self) -> Option<MergeState> {
        self.keeper.take_reached()
    }

    /// Stops without another snapshot; returns when all submitted work is done or has failed.
    pub fn close(&mut self) -> Result<()> {
        self.keeper.finish()
    }

    /// The last snapshot; returns when it is durable and published.
    pub fn finish(&mut self) -> Result<()> {
        self.snapshot()?;
        self.keeper.finish()
    }

    fn snapshot_at(&mut self, positions: MergeState, republish: bool) -> Result<()> {
        let mut work = std::mem::take(&mut self.work);
        self.head.audit_bytes += work.audit.len() as u64;
        let created_ms = self.clock.wall_ms();
        if self.keeps.params {
            let params = self.publications(created_ms, republish);
            work.news = params.iter().map(|params| (params.space.clone(), Published::of(params))).collect();
            work.params = params.iter().map(|params| (params.space.clone(), self.encode(params))).collect();
        }
        if self.keeps.snapshots {
            work.positions = positions.clone();
            self.head.merge = positions;
            self.head.engine = self.engine.head();
            self.head.created_ms = created_ms;
            work.snapshot = Some((self.head.seal(), self.engine.take_changes()));
            work.created_ms = created_ms;
        }
        (self.applied_since, self.events_since, self.dead_bytes) = (0, 0, 0);
        self.last_snapshot = self.clock.now();
        self.keeper.submit(work)
    }

    fn encode(&mut self, params: &Params) -> Vec<u8> {
        params::encode_publication(params, self.oldest_rewards.remove(&params.space))
    }

    /// Parameters of the spaces that have learned since their last publication, or (`all`) of every space that has learned.
    /// Spaces that only observe publish nothing.
    fn publications(&mut self, created_ms: u64, all: bool) -> Vec<Params> {
        let in_part = |space: &Name| self.keeps.spread && self.settings.space(space).shards > 1;
        let observes = |space: &Name| self.settings.space(space).worth.rollout.stage == Stage::Observe;
        let is_shown = |space: &&Name| !self.engine.is_blank(space) && !in_part(space) && !observes(space);
        let names = self.engine.names().filter(is_shown);
        let mut published = Vec::new();
        for space in names.cloned().collect::<Vec<Name>>() {
            let Some(version) = self.engine.version(&space) else { continue };
            let last = self.head.publications.get(&space).copied();
            // Prices change with every charge, whether or not anything was learned.
            let charges = self.engine.charges(&space);
            let has_charged = self.published_charges.insert(space.clone(), charges).unwrap_or_default() != charges;
            let revision = match last {
                Some(last) if last.version == version && !all && !has_charged => continue,
                Some(last) if last.version == version => (last.revision + 1).min(STAMP_MAX),
                _ => 0,
            };
            self.head.publications.insert(space.clone(), Publication { version, revision });
            let Some(policy) = self.engine.policy(&space) else { continue };
            let spec = self.settings.space(&space);
            published.push(Params {
                epoch: self.head.epoch,
                version,
                revision,
                models: spec.models.clone(),
                dim: spec.dim,
                created_ms,
                algorithm: spec.algorithm().to_owned(),
                policy,
                space,
            });
        }
        published
    }

    /// Starts a new epoch if the published parameters are ahead of this state, or if their stamp leaves no room for a
    /// later one.
    pub(super) fn meet_published(&mut self, published: &[Params]) {
        for seen in published {
            let space = &seen.space;
            let version = self.engine.version(space).unwrap_or(0);
            let revision = self.head.publications.get(space).map_or(0, |last| last.revision);
            let is_ahead = seen.version > version || (seen.version == version && seen.revision >= STAMP_MAX);
            if seen.epoch > self.head.epoch || (seen.epoch == self.head.epoch && is_ahead) {
                let epoch = next_epoch(seen.epoch);
                if epoch == seen.epoch {
                    tracing::error!(
                        space = space.as_str(),
                        epoch,
                        "published parameters have the largest possible epoch, so routers may keep them; delete them (the file \
                         params/SPACE.safetensors, or the key on the parameters topic) and restart the routers"
                    );
                } else {
                    tracing::warn!(
                        space = space.as_str(),
                        published = seen.version,
                        known = version,
                        epoch,
                        "published parameters are ahead of the store; starting a new epoch"
                    );
                }
                self.head.epoch = epoch;
            } else if seen.version == version && seen.revision > revision {
                let revision = seen.revision;
                self.head.publications.insert(space.clone(), Publication { version, revision });
            }
        }
    }
}

/// Source position of an event.
pub fn place_of<S: Log>(merge: &Merge<S>, log: usize, start: u64, line: u64) -> Value {
    let mut place = merge.source(log).map(|source| source.place(start, line)).unwrap_or_default();
    place["log"] = json!(merge.name(log));
    place
}

/// Result of one step of a lane.
#[derive(Debug, PartialEq)]
pub enum Stepped {
    /// It processed an event.
    Event {
        /// The log that it came from.
        log: usize,
        /// Its line, or 0 where there are no lines, if it became a dead letter.
        rejected: Option<u64>,
        /// The examples that were learned from.
        applied: Vec<Applied>,
    },
    /// Waiting for more events of a log.
    Wait,
    /// All logs are complete, or idle.
    End,
}

/// The engine restored from the newest intact snapshot of the lane. Logs what was given up.
fn restore<S: SnapshotStore>(lane: &mut LaneStore<S>, settings: &Settings) -> Result<Option<(Engine, LaneHead)>> {
    let restored = lane.restore(settings);
    let restored = restored.doing(|| format!("cannot restore store {}", lane.store().place()))?;
    let Some(Restored { engine, head, generation, damaged, lost }) = restored else { return Ok(None) };
    for damage in &damaged {
        tracing::error!(generation = damage.generation, problem = damage.problem, "snapshot is damaged");
    }
    if !damaged.is_empty() || lost.is_some() {
        tracing::warn!(generation, newest = lost, "resuming from an older snapshot");
    }
    tracing::info!(generation, epoch = head.epoch, "restored snapshot");
    Ok(Some((engine, head)))
}

/// Truncates the log of applied requests to the snapshot; a new store starts at the end of the log.
pub(super) fn cut_audit(log: &mut dyn Lines, head: &mut LaneHead, fresh: bool) -> io::Result<()> {
    let keep = if fresh { u64::MAX } else { head.audit_bytes };
    let length = log.cut(keep)?;
    if !fresh && length < head.audit_bytes {
        tracing::error!(
            length,
            expected = head.audit_bytes,
            "audit.applied_log is shorter than at the snapshot; lines were lost"
        );
    }
    head.audit_bytes = length.min(keep);
    Ok(())
}

pub(super) fn note_changes(head: &LaneHead, settings: &Settings) {
    for (key, before, now) in head.changed_settings(settings) {
        tracing::info!(key, before, now, "configuration changed since the snapshot");
    }
}
