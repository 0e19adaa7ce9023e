//! Drives the engine: events come in from a merge, effects go out, snapshots are taken when due. `learn` and `replay` both
//! run it.
//!
//! | file | does |
//! |---|---|
//! | `keeper` | makes effects durable, on a thread of its own |
//! | `follow` | `learn` on files, and on topics as one lane |
//! | `fleet` | `learn` on topics that many instances share |
//! | `retry` | retries operations that fail because of the operating system |
//! | `lane` | a lane that moves between instances: which state it resumes from, and how its snapshots become durable |
//! | `repartition` | spaces that move between lanes |

mod fleet;
pub mod follow;
mod keeper;
mod lane;
mod merger;
pub mod repartition;
mod retry;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::{Value, json};

use keeper::checkpoint;
pub use keeper::{Carry, Keeper, Outlets, Work};
pub use retry::Retry;

use crate::config::{Settings, SnapshotConfig, StoreConfig};
use crate::dead_letters::Recording;
use crate::engine::{Applied, DeadLetter, Engine};
use crate::event::Name;
use crate::merge::{Merge, MergeState, Next, Origin, Sourced};
use crate::router::Params;
use crate::snapshot::{LaneHead, Publication, fingerprint, next_epoch};
use crate::state::repair::{Plan, Source};
use crate::state::{LocalLane, Restored, StateError};
use crate::store::{self, Access, DirStore, Shared, SnapshotStore, StoreError};
use crate::telemetry::{Facts, Published};
use crate::transport::append::Appender;
use crate::transport::{Letter, Log, Outlet, now_ms};
use crate::wire::params::{self, STAMP_MAX};

/// Limit on the lines held in memory until a snapshot makes them durable, in bytes.
const LINES_BYTES_MAX: usize = 8 << 20;

/// Size at which a dead-letter file is rotated.
pub const DEAD_LETTERS_BYTES: u64 = 64 << 20;

/// Where a run stores its state and output.
pub struct Places {
    /// The store; without one, nothing outlives the run.
    pub store: Option<LocalLane>,
    /// The log of applied requests.
    pub audit: Option<PathBuf>,
    /// Dead letters and parameters.
    pub outlet: Box<dyn Outlet>,
    /// The newest published parameters.
    pub published: Vec<Params>,
    /// Receives facts for metrics and logs.
    pub facts: Arc<Facts>,
    /// Retries failures of the operating system.
    pub retry: Retry,
}

/// A log cannot be read, so the next event is unknown.
#[derive(Debug, thiserror::Error)]
#[error("cannot read a log")]
pub struct CannotRead(#[source] io::Error);

/// Which outputs of a run are kept.
struct Keeps {
    snapshots: bool,
    params: bool,
    audit: bool,
    /// Whether spaces with shards run in several runners: a merger publishes their parameters.
    spread: bool,
}

/// An engine, its logs, and the thread that makes its effects durable.
pub struct Runner<S> {
    /// The engine.
    pub engine: Engine,
    /// Its logs.
    pub merge: Merge<S>,
    settings: Settings,
    cadence: SnapshotConfig,
    head: LaneHead,
    keeper: Keeper,
    persistent: bool,
    publishes: bool,
    audited: bool,
    spread: bool,
    facts: Arc<Facts>,
    work: Work,
    dead_bytes: usize,
    applied_since: u64,
    events_since: u64,
    last_snapshot: Instant,
}

impl<S: Log> Runner<S> {
    /// Resumes from the newest snapshot of the store, if there is one. Also returns the positions of the logs to add.
    pub fn open(settings: &Settings, cadence: &SnapshotConfig, places: Places) -> anyhow::Result<(Self, MergeState)> {
        let mut snapshots = places.store;
        let restored = match &mut snapshots {
            Some(snapshots) => restore(snapshots, settings)?,
            None => None,
        };
        let fresh = restored.is_none();
        let (engine, mut head) = restored.unwrap_or_else(|| (Engine::new(settings.clone()), LaneHead::default()));
        let mut audit = places.audit.as_deref().map(Appender::new);
        if let Some(log) = &mut audit {
            cut_audit(log, &mut head, fresh)?;
        }
        if !fresh {
            note_changes(&head, settings);
        }
        let keeps = Keeps {
            snapshots: snapshots.is_some(),
            params: places.outlet.publishes(),
            audit: audit.is_some(),
            spread: false,
        };
        let facts = places.facts;
        let outlets = Outlets { snapshots, audit, outlet: places.outlet, facts: facts.clone(), retry: places.retry };
        let (mut runner, positions) = Self::resume(settings, cadence, (engine, head), keeps, facts, outlets)?;
        runner.meet_published(&places.published);
        Ok((runner, positions))
    }

    /// Resumes from an engine and its head. Also returns the positions of the logs to add.
    fn resume(
        settings: &Settings,
        cadence: &SnapshotConfig,
        (engine, mut head): (Engine, LaneHead),
        keeps: Keeps,
        facts: Arc<Facts>,
        outlets: impl Carry,
    ) -> anyhow::Result<(Self, MergeState)> {
        head.configuration = fingerprint(settings);
        let positions = head.merge.clone();
        let runner = Self {
            engine,
            merge: Merge::new(settings.reorder_ms, &positions),
            settings: settings.clone(),
            cadence: cadence.clone(),
            head,
            keeper: Keeper::start(outlets)?,
            persistent: keeps.snapshots,
            publishes: keeps.params,
            audited: keeps.audit,
            spread: keeps.spread,
            facts,
            work: Work::default(),
            dead_bytes: 0,
            applied_since: 0,
            events_since: 0,
            last_snapshot: Instant::now(),
        };
        Ok((runner, positions))
    }

    /// Takes the first snapshot of a run, before its first event, so that a restart has a state to resume from.
    pub fn begin(&mut self, positions: MergeState) -> anyhow::Result<()> {
        self.snapshot_at(positions, true)
    }

    /// The same without publishing: the published parameters are known to match the state.
    fn begin_quietly(&mut self, positions: MergeState) -> anyhow::Result<()> {
        self.snapshot_at(positions, false)
    }

    /// Processes the next event, if the merge knows which one that is.
    pub fn step(&mut self) -> anyhow::Result<Stepped> {
        match self.merge.next().map_err(CannotRead)? {
            Next::Event(event, log) => {
                let Sourced { input, start, line, origin, .. } = event;
                if let Some(traceparent) = origin.as_ref().and_then(|origin| origin.traceparent.as_deref()) {
                    tracing::debug!(traceparent, log = self.merge.name(log), offset = start, "event");
                }
                let begun = Instant::now();
                let merge = &self.merge;
                let effects = self.engine.step_from(input, || place_of(merge, log, start, line).to_string());
                self.facts.learned(&effects.applied, begun.elapsed());
                effects.evicted.iter().for_each(|space| self.facts.space_evicted(space));
                for letter in effects.dead_letters {
                    let place = place_of(&self.merge, log, start, line);
                    self.note_bad(letter, place, origin.clone());
                }
                self.note_applied(&effects.applied);
                self.events_since += 1;
                self.snapshot_if_due()?;
                Ok(Stepped::Event(effects.applied))
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
        let letter = Letter { letter, place, origin, time_ms: now_ms() };
        self.facts.bad_event(&letter);
        if letter.letter.recording == Recording::Recorded {
            self.dead_bytes += letter.memory_bytes();
            self.work.dead_letters.push(letter);
        }
    }

    /// Records examples that were learned from.
    pub fn note_applied(&mut self, applied: &[Applied]) {
        self.applied_since += applied.len() as u64;
        if self.audited {
            for Applied { space, request_id, model, reward, .. } in applied {
                let line = json!({"space": space, "request_id": request_id, "model": model, "reward": reward});
                self.work.audit.extend_from_slice(format!("{line}\n").as_bytes());
            }
        }
    }

    /// Whether a snapshot is due.
    fn is_due(&self) -> bool {
        self.applied_since >= self.cadence.every_updates
            || self.work.audit.len() + self.dead_bytes > LINES_BYTES_MAX
            || (self.events_since > 0 && self.last_snapshot.elapsed() >= Duration::from_millis(self.cadence.every_ms))
    }

    /// Takes a snapshot if one is due. Also fails if an earlier one could not be made durable or published.
    pub fn snapshot_if_due(&mut self) -> anyhow::Result<()> {
        self.keeper.check()?;
        if self.is_due() { self.snapshot() } else { Ok(()) }
    }

    /// Makes everything learned durable, then publishes it.
    pub fn snapshot(&mut self) -> anyhow::Result<()> {
        self.snapshot_at(self.merge.state(), false)
    }

    /// Waits until all submitted work is durable and published.
    pub fn settle(&mut self) -> anyhow::Result<()> {
        self.keeper.settle()
    }

    /// Stops without another snapshot; returns when all submitted work is done or has failed.
    fn close(&mut self) -> anyhow::Result<()> {
        self.keeper.finish()
    }

    /// The last snapshot; returns when it is durable and published.
    pub fn finish(&mut self) -> anyhow::Result<()> {
        self.snapshot()?;
        self.keeper.finish()
    }

    fn snapshot_at(&mut self, positions: MergeState, republish: bool) -> anyhow::Result<()> {
        let mut work = std::mem::take(&mut self.work);
        self.head.audit_bytes += work.audit.len() as u64;
        let created_ms = now_ms();
        if self.publishes {
            let params = self.publications(created_ms, republish);
            work.told = params.iter().map(|params| (params.space.clone(), Published::of(params))).collect();
            work.params = params.iter().map(|params| (params.space.clone(), params::encode(params))).collect();
        }
        if self.persistent {
            work.positions = positions.clone();
            self.head.merge = positions;
            self.head.engine = self.engine.head();
            self.head.created_ms = created_ms;
            work.snapshot = Some((self.head.seal(), self.engine.take_changes()));
            work.created_ms = created_ms;
        }
        (self.applied_since, self.events_since, self.dead_bytes) = (0, 0, 0);
        self.last_snapshot = Instant::now();
        self.keeper.hand_over(work)
    }

    /// Parameters of the spaces that have learned since their last publication, or (`all`) of every space that has learned.
    fn publications(&mut self, created_ms: u64, all: bool) -> Vec<Params> {
        let in_part = |space: &Name| self.spread && self.settings.space(space).shards > 1;
        let names = self.engine.names().filter(|space| !self.engine.is_blank(space) && !in_part(space));
        let mut published = Vec::new();
        for space in names.cloned().collect::<Vec<Name>>() {
            let Some(version) = self.engine.version(&space) else { continue };
            let last = self.head.publications.get(&space).copied();
            let revision = match last {
                Some(last) if last.version == version && !all => continue,
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
    fn meet_published(&mut self, published: &[Params]) {
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
fn place_of<S: Log>(merge: &Merge<S>, log: usize, start: u64, line: u64) -> Value {
    let mut place = merge.source(log).map(|source| source.place(start, line)).unwrap_or_default();
    place["log"] = json!(merge.name(log));
    place
}

/// Result of one step of the runner.
#[derive(Debug, PartialEq)]
pub enum Stepped {
    /// It processed an event and learned from these examples.
    Event(Vec<Applied>),
    /// Waiting for more events of a log.
    Wait,
    /// All logs are complete, or idle.
    End,
}

/// Opens the store of a daemon. Repairs a damaged one if every lane has an intact generation, and logs what it gives up.
pub fn open_store(config: &StoreConfig) -> Result<Shared<DirStore>, StateError> {
    let mut store = store::open(&config.dir, Access::Learn(config.kind))?;
    if store.is_damaged() {
        let plan = Plan::new(&store)?;
        if let Some(lost) = plan.lanes.iter().find(|lane| !matches!(lane.from, Source::Generation(_))) {
            let problem = format!("the database is damaged and holds no intact snapshot ({lost})");
            return Err(StoreError::Damaged { path: store.place(), problem }.into());
        }
        if plan.lanes.is_empty() {
            let problem = "the database is damaged and holds no intact snapshot".to_owned();
            return Err(StoreError::Damaged { path: store.place(), problem }.into());
        }
        for lane in &plan.lanes {
            tracing::error!(store = store.place(), plan = lane.to_string(), "repairing the damaged store");
        }
        store = plan.carry_out(store)?;
    }
    Ok(Shared::new(store))
}

/// The engine restored from the newest intact snapshot of the lane. Logs what was given up.
fn restore(lane: &mut LocalLane, settings: &Settings) -> anyhow::Result<Option<(Engine, LaneHead)>> {
    let restored = lane.restore(settings).with_context(|| format!("cannot restore store {}", lane.store().place()))?;
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
fn cut_audit(log: &mut Appender, head: &mut LaneHead, fresh: bool) -> io::Result<()> {
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

fn note_changes(head: &LaneHead, settings: &Settings) {
    for (key, before, now) in head.changed_settings(settings) {
        tracing::info!(key, before, now, "configuration changed since the snapshot");
    }
}
