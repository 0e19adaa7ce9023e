//! What drives the engine: events in from a merge, effects out, snapshots at their time. `learn` and `replay` are two
//! ways to run it.

mod keeper;

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use base64::Engine as _;
use serde_json::{Value, json};

pub use keeper::{Keeper, Outlets, Snapshots, Work};

use crate::config::{Settings, SnapshotConfig, StoreConfig};
use crate::engine::{Applied, DeadLetter, Engine};
use crate::event::Name;
use crate::merge::{Merge, MergeState, Next, Sourced};
use crate::router::Params;
use crate::snapshot::{LaneHead, Publication, fingerprint};
use crate::store::{self, StoreError, Witness};
use crate::transport::append::Appender;
use crate::transport::file::LogFile;
use crate::transport::params::ParamsDir;
use crate::wire::params;

/// The lane of the file transport.
pub const FILE_LANE: &str = "file";

/// Lines wait in memory until they are made durable with a snapshot, at most so many bytes of them.
const LINES_BYTES_MAX: usize = 8 << 20;

/// Dead letters go on in a next file after so many bytes.
pub const DEAD_LETTERS_BYTES: u64 = 64 << 20;

/// Where a run keeps things.
pub struct Places {
    /// The store; none: nothing outlives the run.
    pub store: Option<StoreConfig>,
    /// The log of applied requests.
    pub audit: Option<PathBuf>,
    /// Bad events.
    pub dead_letters: Appender,
    /// Parameters.
    pub params: Option<ParamsDir>,
}

/// An engine with its logs and with what makes its effects last.
pub struct Runner {
    /// The engine.
    pub engine: Engine,
    /// Its logs.
    pub merge: Merge<LogFile>,
    settings: Settings,
    cadence: SnapshotConfig,
    head: LaneHead,
    keeper: Keeper,
    persistent: bool,
    publishes: bool,
    audited: bool,
    work: Work,
    applied_since: u64,
    events_since: u64,
    last_snapshot: Instant,
}

impl Runner {
    /// Goes on from the store if there is one with a snapshot, else begins. Returns also the positions of the logs that
    /// are to be added.
    pub fn open(settings: &Settings, cadence: &SnapshotConfig, places: Places) -> anyhow::Result<(Self, MergeState)> {
        let mut snapshots = None;
        let mut restored = None;
        if let Some(StoreConfig { dir, kind }) = &places.store {
            let archive = store::open(dir, *kind, cadence.keep)?;
            let mut opened = Snapshots { archive, lane: FILE_LANE.to_owned(), witness: Witness::new(dir) };
            restored = opened.restore(settings, &dir.display().to_string())?;
            snapshots = Some(opened);
        }
        let fresh = restored.is_none();
        let (engine, mut head) = restored.unwrap_or_else(|| (Engine::new(settings.clone()), LaneHead::default()));
        let mut audit = places.audit.as_deref().map(Appender::new);
        if let Some(log) = &mut audit {
            cut_audit(log, &mut head, fresh)?;
        }
        note_changes(&head, settings, fresh);
        head.configuration = fingerprint(settings);
        let positions = head.merge.clone();
        let (persistent, publishes, audited) = (snapshots.is_some(), places.params.is_some(), audit.is_some());
        let mut runner = Self {
            engine,
            merge: Merge::new(settings.reorder_ms, &positions),
            settings: settings.clone(),
            cadence: cadence.clone(),
            head,
            keeper: Keeper::start(Outlets {
                snapshots,
                audit,
                dead_letters: places.dead_letters,
                params: places.params.clone(),
            })?,
            persistent,
            publishes,
            audited,
            work: Work::default(),
            applied_since: 0,
            events_since: 0,
            last_snapshot: Instant::now(),
        };
        if let Some(params) = &places.params {
            runner.meet_published(params);
        }
        Ok((runner, positions))
    }

    /// The first snapshot of a run, before its first event: from here on there is something to come back to.
    pub fn begin(&mut self, positions: MergeState) -> anyhow::Result<()> {
        self.snapshot_at(positions, true)
    }

    /// Takes the next event, if it is known which one that is; what became of it.
    pub fn step(&mut self) -> anyhow::Result<Stepped> {
        match self.merge.next().context("a log cannot be read")? {
            Next::Event(event, log) => {
                let Sourced { input, start, line, .. } = event;
                let effects = self.engine.step(input);
                if let Some(letter) = &effects.dead_letter {
                    let path = self.merge.source_mut(log).map(|source| source.path().to_owned());
                    let place = json!({
                        "source": path,
                        "log": self.merge.name(log),
                        "offset": start,
                        "line": line,
                    });
                    self.work.dead_letters.extend_from_slice(json_line(letter, place).as_bytes());
                }
                self.note_applied(&effects.applied);
                self.events_since += 1;
                if self.is_due() {
                    self.snapshot()?;
                }
                Ok(Stepped::Event(effects.applied))
            }
            Next::Wait => Ok(Stepped::Wait),
            Next::End => Ok(Stepped::End),
        }
    }

    /// Notes examples that were learned from.
    pub fn note_applied(&mut self, applied: &[Applied]) {
        self.applied_since += applied.len() as u64;
        if self.audited {
            for Applied { space, request_id, model, reward } in applied {
                let line = json!({"space": space, "request_id": request_id, "model": model, "reward": reward});
                self.work.audit.extend_from_slice(format!("{line}\n").as_bytes());
            }
        }
    }

    /// Whether a snapshot is due.
    pub fn is_due(&self) -> bool {
        let lines = self.work.audit.len() + self.work.dead_letters.len();
        self.applied_since >= self.cadence.every_updates
            || lines > LINES_BYTES_MAX
            || (self.events_since > 0 && self.last_snapshot.elapsed() >= Duration::from_millis(self.cadence.every_ms))
    }

    /// Makes all that was learned durable, then publishes it.
    pub fn snapshot(&mut self) -> anyhow::Result<()> {
        self.snapshot_at(self.merge.state(), false)
    }

    /// Waits until all that was handed over is durable and published.
    pub fn settle(&mut self) -> anyhow::Result<()> {
        self.keeper.settle()
    }

    /// The last snapshot; returns when it is durable and published.
    pub fn finish(&mut self) -> anyhow::Result<()> {
        self.snapshot()?;
        self.keeper.finish()
    }

    /// What the next snapshot would say.
    pub fn head(&self) -> &LaneHead {
        &self.head
    }

    fn snapshot_at(&mut self, positions: MergeState, republish: bool) -> anyhow::Result<()> {
        let mut work = std::mem::take(&mut self.work);
        self.head.audit_bytes += work.audit.len() as u64;
        let created_ms = now_ms();
        if self.publishes {
            work.params = self.publications(created_ms, republish);
        }
        if self.persistent {
            self.head.merge = positions;
            self.head.engine = self.engine.head();
            self.head.created_ms = created_ms;
            work.snapshot = Some((self.head.seal(), self.engine.take_changes()));
        }
        (self.applied_since, self.events_since, self.last_snapshot) = (0, 0, Instant::now());
        self.keeper.hand_over(work)
    }

    /// Parameters of the spaces that have learned since their last publication, or of all.
    fn publications(&mut self, created_ms: u64, all: bool) -> Vec<(Name, Vec<u8>)> {
        let names: Vec<Name> = self.engine.names().cloned().collect();
        let mut published = Vec::new();
        for space in names {
            let Some(version) = self.engine.version(&space) else { continue };
            let last = self.head.publications.get(&space).copied();
            let revision = match last {
                Some(last) if last.version == version && !all => continue,
                Some(last) if last.version == version => last.revision + 1,
                _ => 0,
            };
            self.head.publications.insert(space.clone(), Publication { version, revision });
            let Some(policy) = self.engine.policy(&space) else { continue };
            let spec = self.settings.space(&space);
            let params = Params {
                epoch: self.head.epoch,
                version,
                revision,
                models: spec.models.clone(),
                dim: spec.dim,
                created_ms,
                algorithm: spec.algorithm().to_owned(),
                policy,
                space: space.clone(),
            };
            published.push((space, params::encode(&params)));
        }
        published
    }

    /// Begins a new epoch if routers have seen parameters that are ahead of this state.
    fn meet_published(&mut self, dir: &ParamsDir) {
        for space in dir.spaces() {
            let Some(seen) = dir.newest(&space) else { continue };
            let version = self.engine.version(&space).unwrap_or(0);
            let revision = self.head.publications.get(&space).map_or(0, |last| last.revision);
            if seen.epoch > self.head.epoch || (seen.epoch == self.head.epoch && seen.version > version) {
                tracing::warn!(
                    space = space.as_str(),
                    published = seen.version,
                    known = version,
                    epoch = seen.epoch + 1,
                    "published parameters are ahead of the store: a new epoch begins"
                );
                self.head.epoch = seen.epoch + 1;
            } else if seen.version == version && seen.revision > revision {
                let revision = seen.revision;
                self.head.publications.insert(space, Publication { version, revision });
            }
        }
    }
}

/// What a step of the runner did.
#[derive(Debug, PartialEq)]
pub enum Stepped {
    /// It took an event; these examples were learned from.
    Event(Vec<Applied>),
    /// Nothing before some log has more.
    Wait,
    /// All logs are complete, or idle.
    End,
}

impl Snapshots {
    /// The newest snapshot of the lane that is whole, as an engine.
    fn restore(&mut self, settings: &Settings, path: &str) -> anyhow::Result<Option<(Engine, LaneHead)>> {
        let (snapshot, damaged) = self.archive.resume(&self.lane)?;
        for damage in &damaged {
            tracing::error!(generation = damage.generation, problem = damage.problem, "a snapshot is damaged");
        }
        let expected = self.witness.newest(&self.lane);
        let Some(snapshot) = snapshot else {
            let problem = match (damaged.last(), expected) {
                (None, None) => return Ok(None),
                (Some(damage), _) => format!("no snapshot is whole; of the oldest, {damage}"),
                (None, Some(expected)) => format!("it is empty, but had come to generation {expected}"),
            };
            return Err(StoreError::Damaged { path: path.to_owned(), problem }.into());
        };
        let generation = snapshot.generation;
        if !damaged.is_empty() || expected > Some(generation) {
            tracing::warn!(generation, newest = expected, "going on from an older snapshot");
        }
        let head = LaneHead::open(&snapshot.head)?;
        let engine = Engine::restore(settings.clone(), head.engine.clone(), snapshot.records)
            .with_context(|| format!("the snapshot in {path} does not fit the configuration"))?;
        tracing::info!(generation, epoch = head.epoch, "restored");
        Ok(Some((engine, head)))
    }
}

/// Cuts the log of applied requests back to the snapshot; a new store begins where the log ends.
fn cut_audit(log: &mut Appender, head: &mut LaneHead, fresh: bool) -> io::Result<()> {
    let keep = if fresh { u64::MAX } else { head.audit_bytes };
    let length = log.cut(keep)?;
    if !fresh && length < head.audit_bytes {
        tracing::error!(
            length,
            expected = head.audit_bytes,
            "audit.applied_log is shorter than it was: lines are lost"
        );
    }
    head.audit_bytes = length.min(keep);
    Ok(())
}

fn note_changes(head: &LaneHead, settings: &Settings, fresh: bool) {
    if !fresh {
        for (key, before, now) in head.changed_settings(settings) {
            tracing::info!(key, before, now, "the configuration has changed since the snapshot");
        }
    }
}

/// A bad event with its place, as a line of JSON.
fn json_line(letter: &DeadLetter, mut record: Value) -> String {
    record["reason"] = json!(letter.bad.reason());
    record["detail"] = json!(letter.bad.to_string());
    record["side"] = json!(letter.side);
    record["time_ms"] = json!(now_ms());
    record["bytes"] = json!(base64::engine::general_purpose::STANDARD.encode(&letter.bytes));
    format!("{record}\n")
}

fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64)
}
